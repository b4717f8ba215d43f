# SPDX-License-Identifier: BSD-3-Clause
"""What the face is made with: re-exporting pyverbs, which resources get shadows, closing in any order."""
