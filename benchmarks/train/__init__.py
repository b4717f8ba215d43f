# SPDX-License-Identifier: BSD-3-Clause
"""`make train`: a GPT trained through the failures of the SHIFT paper's Fig. 8, five settings side by side.

`python -m benchmarks.train` launches the ranks as processes, breaks the network under them, and draws what became of
the training. `python -m benchmarks.train.rank` is one rank, by hand, for real NICs. docs/training.md has both.
"""
