# SPDX-License-Identifier: BSD-3-Clause
"""Train a small model with DistributedDataParallel. What is ours in it: one import, and the backend's name.

python train_ddp.py                   rank 0 of 2; waits for rank 1
python train_ddp.py SERVER            rank 1 of 2
torchrun … train_ddp.py               the rank that torchrun says
"""

import argparse
import os
import time

import shiftverbs.torch

# isort: split
# Some builds of torch put libibverbs in front of what comes later, software NICs too: so ours is first.
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def model():
    """A few layers, with a BatchNorm, whose buffers DDP sends around."""
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Linear(64, 256),
        torch.nn.BatchNorm1d(256),
        torch.nn.ReLU(),
        torch.nn.Linear(256, 256),
        torch.nn.ReLU(),
        torch.nn.Linear(256, 1),
    )


def train(steps, pause_s=0.0, told=lambda step, loss: None):
    """Train; returns the model. pause_s: seconds to wait after each step; told: called with each step's loss."""
    net = DistributedDataParallel(model(), bucket_cap_mb=0.1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.002, momentum=0.9)
    chance = torch.Generator().manual_seed(100 + dist.get_rank())
    for step in range(steps):
        inputs = torch.randn(32, 64, generator=chance)
        loss = (net(inputs) - inputs.sum(1, keepdim=True)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        told(step, loss.item())
        time.sleep(pause_s)
    return net.module


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("server", nargs="?", help="where rank 0 runs")
    parser.add_argument("--port", type=int, default=18515, help="TCP port where rank 0 waits")
    parser.add_argument("--rank", type=int, help="by default 0 without a server, else 1")
    parser.add_argument("--ranks", type=int, default=2, help="how many there are")
    parser.add_argument("--backend", default="shift", help="shift or gloo")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds to wait after each step")
    return parser.parse_args()


def main():
    options = arguments()
    # For ranks to meet, any backend: Debian's torch 2.6 is built without.
    os.environ.setdefault("USE_LIBUV", "0")
    if "RANK" in os.environ:
        dist.init_process_group(options.backend)
    else:
        rank = options.rank if options.rank is not None else int(options.server is not None)
        meet = f"tcp://{options.server or '127.0.0.1'}:{options.port}"
        dist.init_process_group(options.backend, init_method=meet, rank=rank, world_size=options.ranks)

    def tell(step, loss):
        if dist.get_rank() == 0 and (step + 1) % 50 == 0:
            where = f" on {' '.join(shiftverbs.torch.paths())}" if options.backend == "shift" else ""
            print(f"step {step + 1}{where}, loss {loss:.4f}", flush=True)

    trained = train(options.steps, options.pause, tell)
    checksum = sum(weight.double().sum().item() for weight in trained.parameters())
    print(f"rank {dist.get_rank()}: checksum of weights {checksum:.12f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
