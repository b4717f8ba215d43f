# SPDX-License-Identifier: BSD-3-Clause
"""Cases of forks while NICs' threads take jobs, as while shadows are being made."""

from __future__ import annotations

import os
import random
import signal
import time

from shiftverbs import _nic

WORKERS, FORKS, DEADLINE_S = 4, 40, 10.0


def ended(pid: int) -> bool:
    """Whether a child that does nothing ends; one that hangs is killed."""
    deadline = time.monotonic() + DEADLINE_S
    while os.waitpid(pid, os.WNOHANG)[0] == 0:
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return False
        time.sleep(0.001)
    return True


def forks_in(ns: int) -> bool:
    """Fork after so long, in ns, without a wait in which threads could come first; whether the child ends."""
    until_ns = time.monotonic_ns() + ns
    while time.monotonic_ns() < until_ns:
        pass
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    return ended(pid)


def case_a_fork_as_threads_begin() -> None:
    """Each thread makes its state in the interpreter as it begins: the parent goes on, and the child ends."""
    for fork in range(FORKS):
        workers = [_nic.NicWorker(f"nic{n}") for n in range(WORKERS)]
        assert forks_in(fork % 10 * 100_000), f"the child of fork {fork} hangs"
        assert all(worker.stop() for worker in workers)


def case_a_child_that_does_nothing_ends() -> None:
    """The threads begin their jobs, and so come to the interpreter, at any time."""
    seed = random.randrange(1 << 31)
    print("seed", seed, flush=True)
    rng = random.Random(seed)
    workers = [_nic.NicWorker(f"nic{n}") for n in range(WORKERS)]
    for fork in range(FORKS):
        for worker in workers:
            worker.call(int)
        assert forks_in(rng.randrange(300_000)), f"the child of fork {fork} hangs"
    for worker in workers:
        assert worker.stop()
