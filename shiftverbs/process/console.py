# SPDX-License-Identifier: BSD-3-Clause
"""What a command prints."""

from __future__ import annotations

import io
import sys


def print_whatever_comes() -> None:
    """Have standard output escape what its encoding has no bytes for, instead of raising UnicodeEncodeError.

    Paths, and other processes' command lines, need not be text in the user's encoding.
    """
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")
