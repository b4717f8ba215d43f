# SPDX-License-Identifier: BSD-3-Clause
"""A rank that trains: the example's model, and what can be asked of it meanwhile."""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import rank as base
import train_ddp
from rank import *  # noqa: F403
from rank import digest, dist, start, torch, world  # noqa: F401

SEEN = set()


def weights(steps: int, pause_s: float = 0.0) -> list[str]:
    """Train from the beginning; the digests of all weights, and of the buffers, of which each rank has its own."""

    def note(step: int, loss: float) -> None:
        for link in world().transport.links:
            shift = getattr(link.qp, "shift", None)
            SEEN.add(shift.path if shift is not None else "")
        if step % 10 == 0:
            sys.stdout.write(f"at step {step}\n")

    found = train_ddp.train(steps, pause_s, note)
    assert all(bool(torch.isfinite(value).all()) for value in found.parameters())
    return [digest(*found.parameters()), digest(*found.buffers())]


def seen() -> list[str]:
    """The paths that traffic ran on, and forget them."""
    found = sorted(map(str, SEEN))
    SEEN.clear()
    return found


def reduce_often(count: int) -> None:
    """Many allreduces, one after the other."""
    for _ in range(count):
        dist.all_reduce(torch.ones(1000))


def unused() -> str:
    """DDP that looks for parameters that were not used, and a step without synchronization."""
    torch.manual_seed(3)

    class Halves(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
            return self.two(self.one(x)) if both else self.one(x)

    net = torch.nn.parallel.DistributedDataParallel(Halves(), find_unused_parameters=True)
    for step in range(6):
        x = torch.full((2, 4), float(base.RANK + step))
        if step == 2:
            with net.no_sync():
                net(x, True).sum().backward()
        net(x, step % 2 == 0).sum().backward()
    return digest(*[p.grad for p in net.parameters()])


def embedded() -> str:
    """DDP of a table whose gradients are sparse: each rank reads rows of its own."""
    torch.manual_seed(4)
    net = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Embedding(50, 4, sparse=True), torch.nn.Linear(4, 1))
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    before = digest(*net.parameters())
    for step in range(6):
        net(torch.tensor([step, 7, 20 * base.RANK + step])).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    after = digest(*net.parameters())
    assert after != before
    return after


def checkpointed(
    steps: int, pause_s: float = 0.0, *, late_s: float | None = None, **options: object
) -> list[list]:
    """Train with a CheckpointOnFallback; [step, saved, why, digest of the weights then] of each pause.

    late_s: before the end of step 20 a pause is asked for, and this rank is late for it by so many seconds.
    """
    import shiftverbs.torch

    found: list[list] = []
    saved: list[int] = []
    step = 0

    def save() -> None:
        saved.append(step)
        print("saving", flush=True)
        if "hang" in options:
            time.sleep(600)

    arguments = {name: value for name, value in options.items() if name != "hang"}
    net = torch.nn.parallel.DistributedDataParallel(train_ddp.model(), bucket_cap_mb=0.1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.002)
    chance = torch.Generator().manual_seed(base.RANK)
    with shiftverbs.torch.CheckpointOnFallback(save, **arguments) as checkpoint:
        for step in range(1, steps + 1):
            net(torch.randn(32, 64, generator=chance)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 20 and late_s is not None:
                checkpoint.request()
                until = time.monotonic() + 20
                while checkpoint._round is None and time.monotonic() < until:
                    time.sleep(0.001)
                time.sleep(late_s)
            outcome = checkpoint.step()
            if outcome is not None:
                print(f"paused at {step}", flush=True)
                found.append([outcome.step, outcome.saved, outcome.why, digest(*net.parameters())])
            if step % 10 == 0:
                sys.stdout.write(f"at step {step}\n")
            time.sleep(pause_s)
    return [*found, saved]
