# SPDX-License-Identifier: BSD-3-Clause
"""A DDP script as anybody has it, started once for each rank: python ddp_script.py BACKEND STEPS PAUSE_S."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import train_ddp

# isort: split
import torch
import torch.distributed as dist

import shiftverbs.torch


def main() -> None:
    """Train, say where, and say what came of it."""
    backend, steps, pause_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    dist.init_process_group(backend)

    def tell(step: int, loss: float) -> None:
        print(f"step {step} on {shiftverbs.torch.paths()}", flush=True)

    trained = train_ddp.train(steps, pause_s, tell)
    found = hashlib.sha256()
    for value in trained.parameters():
        found.update(bytes(value.detach().contiguous().view(-1).view(torch.uint8).tolist()))
    print(f"weights {found.hexdigest()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
