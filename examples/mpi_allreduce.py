# SPDX-License-Identifier: BSD-3-Clause
"""Allreduces of four megabytes, one after the other, each result checked: an ordinary program for mpi4py.

    mpirun -np 4 python mpi_allreduce.py [--seconds 20]

Rank 0 prints a line a second. It knows nothing of NICs.
"""

import argparse
import time
from array import array

from mpi4py import MPI

LENGTH = 1 << 19

parser = argparse.ArgumentParser(description="Allreduces, each result checked.")
parser.add_argument("--seconds", type=float, default=20.0)
seconds = parser.parse_args().seconds

comm = MPI.COMM_WORLD
rank, size = comm.Get_rank(), comm.Get_size()
mine = array("d", range(LENGTH))
total = array("d", bytes(8 * LENGTH))
count, longest = 0, 0.0
start = said = time.monotonic()
while True:
    mine[count % LENGTH] = rank
    before = time.monotonic()
    comm.Allreduce(mine, total)
    longest = max(longest, time.monotonic() - before)
    for index in range(LENGTH - 1, LENGTH - 1000, -1):
        assert total[index] == index * size, f"rank {rank}: element {index} is {total[index]}"
    assert total[count % LENGTH] == sum(range(size))
    count += 1
    now = time.monotonic()
    if rank == 0 and now - said > 1:
        print(f"{count} allreduces, the longest {longest:.1f} s", flush=True)
        said = now
    if comm.bcast(now - start > seconds, 0):
        break
print(f"rank {rank} of {size}: all right", flush=True)
