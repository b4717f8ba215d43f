# SPDX-License-Identifier: BSD-3-Clause
"""A checkpoint when the network has lost a path: all ranks of a job agree on a step, pause, save and go on.

For jobs with torch, `shiftverbs.torch.CheckpointOnFallback` has the same with torch's store. A job without it brings a
`Store`; a program of one process needs none:

    from shiftverbs.checkpoint import CheckpointOnFallback

    with CheckpointOnFallback(save) as checkpoint:
        for step in range(steps):
            train()
            checkpoint.step()
"""

from __future__ import annotations

from shiftverbs.checkpoint.agreement import Store
from shiftverbs.checkpoint.on_fallback import CheckpointOnFallback, Outcome

__all__ = ["CheckpointOnFallback", "Outcome", "Store"]
