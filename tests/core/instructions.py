# SPDX-License-Identifier: BSD-3-Clause
"""Runs under callgrind, which counts inside post_send, post_recv and poll only: see test_instructions.py."""

from __future__ import annotations

import ctypes
import gc
import os
import sys

# Before libibverbs, so that its symbols are found first.
ctypes.CDLL(os.environ["SHIFTVERBS_FAKEVERBS"], mode=ctypes.RTLD_GLOBAL)

import fake  # noqa: E402

CALLS = 512
BATCH = 16


def main() -> None:
    """One phase after the other; each ends what the one before counted."""
    lib = fake.library()
    phase = ctypes.CDLL(os.environ["SHIFTVERBS_PHASE"]).phase
    world = fake.World(lib, max_send=CALLS, max_recv=CALLS, shared_cq=True)
    world.protect()
    lib.fv_null_mode(world.hw[0].ptr, 1)
    post_send, post_recv, poll = world.qp.post_send, world.qp.post_recv, world.scq.poll
    signaled, recv = fake.send_wr(), fake.recv_wr()

    def post() -> None:
        for _ in range(CALLS):
            post_send(signaled)

    # Memory that later phases take again, and everything that is looked up once.
    for _ in range(2):
        post()
        kept = [poll(BATCH) for _ in range(CALLS // BATCH)]
        del kept
    gc.collect()
    gc.disable()

    phase()
    post()
    phase()  # post_send
    for _ in range(CALLS // BATCH):
        poll(BATCH)
    phase()  # poll of 16
    post()
    phase()  # (nothing)
    for _ in range(CALLS):
        poll(1)
    phase()  # poll of 1
    for _ in range(CALLS):
        poll(1)
    phase()  # empty poll
    for _ in range(CALLS):
        post_recv(recv)
    phase()  # post_recv
    count, _ = poll(1)
    assert world.qp.posted == 4 * CALLS and world.qp.outstanding[0] == 0, (world.qp.posted, count)
    sys.stdout.write("counted\n")


main()
