# SPDX-License-Identifier: BSD-3-Clause
"""Child side: put the fakes before libibverbs, then run one function of a module of cases.

Usage: run_case.py MODULE CASE. The case has passed when the child exits with 0 and has said "case … done";
what happens between the two (the interpreter's exit) is part of the test.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import fakes

if __name__ == "__main__":
    fakes.install(os.environ["FAKE_VERBS"])
    getattr(importlib.import_module(sys.argv[1]), sys.argv[2])()
    print(f"case {sys.argv[2]} done", flush=True)
