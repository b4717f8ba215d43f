# SPDX-License-Identifier: BSD-3-Clause
"""One rank of an allreduce, in short slices by command, so that several backends can take turns.

    python -m benchmarks.suite.allreduce_host BACKEND RANK RANKS FILE

FILE: where torch's ranks find each other. Commands: {"size": bytes, "iters": count} -> {"value": seconds}, of one
allreduce in place of that many bytes of float32, on this rank.
"""

from __future__ import annotations

import json
import sys
import time

#: How long a QP may take to be protected, in seconds.
PROTECTED_S = 60.0


def main() -> int:
    """Serve commands until standard input ends; the exit status."""
    backend, rank, ranks, file = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    if backend == "shift":  # first: torch may put libibverbs before software NICs
        import os

        import shiftverbs.torch  # noqa: F401  (the backend)

        protected = bool(os.environ.get("SHIFTVERBS_ETCD"))
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(backend, init_method=f"file://{file}", rank=rank, world_size=ranks)
    group = dist.distributed_c10d._get_default_group()
    if backend == "shift" and protected and not group.wait_protected(PROTECTED_S):
        print(json.dumps({"failed": "the group is not protected"}), flush=True)
        return 1
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        tensor = torch.full((command["size"] // 4,), float(rank + 1))
        dist.all_reduce(tensor)
        if not bool((tensor == ranks * (ranks + 1) / 2).all()):
            print(json.dumps({"failed": "the sum is wrong"}), flush=True)
            return 1
        tensor.zero_()  # or it grows without end
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(command["iters"]):
            dist.all_reduce(tensor)
        took = time.perf_counter() - begin
        print(json.dumps({"value": took / command["iters"]}), flush=True)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
