# SPDX-License-Identifier: BSD-3-Clause
"""Train a small model with DistributedDataParallel. What is ours in it: the second import, and the backend's name.

RANK=0 WORLD_SIZE=2 MASTER_ADDR=HOST MASTER_PORT=29500 python train_ddp.py
RANK=1 WORLD_SIZE=2 MASTER_ADDR=HOST MASTER_PORT=29500 python train_ddp.py
"""

import argparse
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import shiftverbs.torch  # noqa: F401  (makes the backend "shift" known)


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


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", default="shift", help="shift or gloo")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds to wait after each step")
    options = parser.parse_args()
    dist.init_process_group(options.backend)

    def tell(step, loss):
        if dist.get_rank() == 0 and (step + 1) % 20 == 0:
            print(f"step {step + 1}: loss {loss:.4f}", flush=True)

    trained = train(options.steps, options.pause, tell)
    checksum = sum(weight.double().sum().item() for weight in trained.parameters())
    print(f"rank {dist.get_rank()}: checksum of weights {checksum:.12f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
