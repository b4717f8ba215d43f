# SPDX-License-Identifier: BSD-3-Clause
"""What any program of several threads needs, and knows nothing of verbs: log lines, waiting, the run directory."""
