# SPDX-License-Identifier: BSD-3-Clause
"""One protected QP: its connection, and what that is made of."""
