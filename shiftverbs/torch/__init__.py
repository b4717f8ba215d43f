# SPDX-License-Identifier: BSD-3-Clause
"""A torch process group over RC QPs: `import shiftverbs.torch`, then `init_process_group("shift")`.

Nothing else of shiftverbs needs this or torch. docs/howto/training.md shows it.
"""

from __future__ import annotations

import importlib.util

if importlib.util.find_spec("torch") is None:
    raise ImportError(
        "shiftverbs.torch needs torch, which this Python interpreter does not have. On Debian: apt-get install "
        "python3-torch libopenblas0-pthread; or https://pytorch.org/get-started.",
        name="torch",
    )

from shiftverbs.torch.checkpoint import CheckpointOnFallback
from shiftverbs.torch.group import BACKEND, ProcessGroupShift, paths, register

__all__ = ["BACKEND", "CheckpointOnFallback", "ProcessGroupShift", "paths", "register"]

register()
