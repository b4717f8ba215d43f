# SPDX-License-Identifier: BSD-3-Clause
"""One rank of the training. `python -m benchmarks.train` starts them; on real NICs it is one command per host:

    python -m benchmarks.train.rank --device mlx5_0 --checkpoints DIR                    rank 0 of 2
    python -m benchmarks.train.rank --device mlx5_0 --checkpoints DIR --server HOST      rank 1 of 2

It goes on from the last checkpoint that all ranks have. Exit status: 0 it has ended, or stopped after a fallback's next
checkpoint as --stop asks; 1 training failed; 2 the command line is wrong.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from shiftverbs.torch import CheckpointOnFallback, paths

# isort: split
# Some builds of torch put libibverbs in front of what comes later, software NICs too: so ours is first.
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.train.checkpoints import Checkpoints
from benchmarks.train.model import SHAPES, batch, build, read_text
from shiftverbs.config import Config

#: How long a rank waits for the others: to come, and in a collective.
TIMEOUT_S = 60.0
#: How long it waits for its QPs to be protected.
PROTECTED_S = 20.0

#: Told of an event: its kind, and what belongs to it. All have `t`, time.monotonic() in seconds.
Tell = Callable[..., None]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; exits where it is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.train.rank",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--server", default="", help="where rank 0 runs (default: here)")
    add("--port", type=int, default=18515, help="TCP port where rank 0 waits (default %(default)s)")
    add("--rank", type=int, help="by default 0 without a server, else 1")
    add("--ranks", type=int, default=2, help="how many there are (default %(default)s)")
    add("--device", metavar="DEV", help="RDMA device (default: SHIFTVERBS_DEVICE, or the first)")
    add("--model", choices=sorted(SHAPES), default="small")
    add("--epochs", type=int, default=4)
    add(
        "--steps",
        type=int,
        default=80,
        help="of an epoch, at whose end is a checkpoint (default %(default)s)",
    )
    add("--seed", type=int, default=1)
    add("--checkpoints", type=Path, required=True, metavar="DIR", help="of this job and this host")
    add("--on-fallback", action="store_true", help="a further checkpoint, agreed by all, after each fallback")
    add("--stop", action="store_true", help="the same, and stop at the next regular checkpoint")
    add("--json", action="store_true", help="a JSON object for each event, for programs")
    options = parser.parse_args(argv)
    if options.rank is None:
        options.rank = int(bool(options.server))
    if not 0 <= options.rank < options.ranks:
        parser.error(f"there is no rank {options.rank} among {options.ranks}")
    if options.epochs < 1 or options.steps < 1:
        parser.error("--epochs and --steps must be at least 1")
    return options


def tell_json(kind: str, **what: Any) -> None:
    """Print an event for programs."""
    print(json.dumps({"kind": kind, "t": time.monotonic(), **what}), flush=True)


def tell_people(kind: str, **what: Any) -> None:
    """Print an event for people; of steps every tenth."""
    if kind != "step":
        print(kind, *(f"{name}={value}" for name, value in what.items()), flush=True)
    elif what["step"] % 10 == 0:
        path = "+".join(what["paths"])
        print(f"step {what['step']} on {path}, loss {what['loss']:.4f}, {what['ms']:.0f} ms", flush=True)


def digest(model: Any) -> str:
    """Of all weights, bit for bit."""
    found = hashlib.sha256()
    for weight in model.parameters():
        dense = weight.detach().contiguous()
        found.update(ctypes.string_at(dense.data_ptr(), dense.numel() * dense.element_size()))
    return found.hexdigest()


class Training:
    """The job as one rank has it.

    :param options: as `parse` gives them
    :param tell: is told of each event
    """

    def __init__(self, options: argparse.Namespace, tell: Tell) -> None:
        self._options, self._tell = options, tell
        self._shape = SHAPES[options.model]
        self._text = read_text()
        model = build(self._shape, options.seed)
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self._checkpoints = Checkpoints(options.checkpoints, options.rank)
        self._model = model
        self._step = self._checkpoints.load_common(model, self._optimizer)
        self._net = DistributedDataParallel(model)

    def run(self) -> bool:
        """Train to the end. False: stopped before it. Raises what the group's collectives raise."""
        options = self._options
        last = options.epochs * options.steps
        leaving = False
        hook = self._hook()
        try:
            self._tell("begin", step=self._step, parameters=sum(p.numel() for p in self._model.parameters()))
            while self._step < last:
                self._train_step()
                outcome = hook.step() if hook is not None else None
                if outcome is not None:
                    self._tell(
                        "pause", step=self._step, saved=outcome.saved, s=outcome.paused_s, why=outcome.why
                    )
                    # Where it was saved all ranks agree, so they leave together.
                    leaving = leaving or (options.stop and outcome.saved)
                if self._step % options.steps == 0:
                    self._save()
                    self._tell("checkpoint", step=self._step)
                    if leaving and self._step < last:
                        self._tell("stopped", step=self._step)
                        return False
        finally:
            if hook is not None:
                hook.close()
        self._tell("done", step=self._step, digest=digest(self._model))
        return True

    def _hook(self) -> Any:
        options = self._options
        if not (options.on_fallback or options.stop):
            return None
        # Each rank has checkpoints of its own, so all save.
        return CheckpointOnFallback(self._save, savers=None, timeout_s=TIMEOUT_S / 2)

    def _save(self) -> None:
        self._checkpoints.save(self._step, self._model, self._optimizer)

    def _train_step(self) -> None:
        began = time.monotonic()
        inputs, targets = batch(self._text, self._shape, self._options.seed, self._step, self._options.rank)
        scores = self._net(inputs)
        loss = torch.nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten())
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        self._step += 1
        took_ms = (time.monotonic() - began) * 1000
        self._tell("step", step=self._step, loss=loss.item(), ms=took_ms, paths=paths())


def main(argv: Sequence[str] | None = None) -> int:
    """Train as one rank; the exit status."""
    options = parse(argv)
    if options.device:
        os.environ["SHIFTVERBS_DEVICE"] = options.device
    os.environ.setdefault("USE_LIBUV", "0")  # Debian's torch 2.6 is built without it
    tell = tell_json if options.json else tell_people
    torch.set_num_threads(1)
    server = options.server or "127.0.0.1"
    try:
        dist.init_process_group(
            "shift",
            init_method=f"tcp://{server}:{options.port}",
            rank=options.rank,
            world_size=options.ranks,
            timeout=datetime.timedelta(seconds=TIMEOUT_S),
        )
        group = dist.distributed_c10d._get_default_group()
        if not Config.from_environ().disable:
            protected = group.wait_protected(PROTECTED_S)
            reasons = {link.qp.shift.why for link in group.transport.links} if not protected else ()
            tell("protected", protected=protected, why="; ".join(map(str, reasons)))
        Training(options, tell).run()
        dist.destroy_process_group()
    except (RuntimeError, OSError) as error:
        tell("failed", error=str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
