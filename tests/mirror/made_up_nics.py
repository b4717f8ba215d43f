# SPDX-License-Identifier: BSD-3-Clause
"""Made-up NICs whose jobs run when the test says so, and what shadow resources stand on beside them."""

from __future__ import annotations

import collections
import errno
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from shiftverbs import _core, _nic
from shiftverbs.shadows import mr
from shiftverbs.shadows.mr import ShadowMR
from shiftverbs.shadows.nic import Nic as RealNic
from shiftverbs.shadows.pd import ShadowPD

#: As long as it is held, failover waits for the calling thread, as for a NIC's.
IN_A_NICS_THREAD = _core.Unbroken(threading.RLock())


class Worker:
    """Jobs wait until run() or step()."""

    def __init__(self, verbs: Verbs) -> None:
        self.verbs = verbs
        self.jobs: deque[tuple[_nic.Job[Any], Callable[[], Any]]] = deque()
        self.queued: set[int] = set()
        self.destroyed: list[tuple[str, int]] = []
        self.stopped = False
        self.inside = False

    def call(self, job: Callable[..., Any], *args: Any) -> _nic.Job[Any]:
        future: _nic.Job[Any] = _nic.Job()
        if self.stopped:
            future.cancel()
        else:
            self.jobs.append((future, lambda: job(*args)))
        return future

    def post(self, job: Callable[..., Any], *args: Any) -> bool:
        return not self.call(job, *args).cancelled()

    def destroy(self, tag: Callable[[int], None], kind: str, handle: int) -> None:
        def job() -> None:
            error = self.verbs.take(kind, handle)
            tag(error)

        if self.stopped:
            tag(errno.ECANCELED)
        else:
            self.destroyed.append((kind, handle))
            self.queued.add(handle)
            self.call(job).add_done_callback(lambda _: self.queued.discard(handle))

    def pending(self, handle: int = 0) -> int:
        return handle in self.queued if handle else len(self.jobs)

    def drain(self, handle: int, timeout_s: float) -> bool:
        if self.inside:
            raise RuntimeError("drain() from a job of the same NicWorker")
        deadline = time.monotonic() + timeout_s
        while handle in self.queued and time.monotonic() < deadline:
            time.sleep(0.001)
        return handle not in self.queued

    def step(self) -> bool:
        if not self.jobs:
            return False
        future, job = self.jobs.popleft()
        self.inside = True
        try:
            with IN_A_NICS_THREAD:
                if future.begin():
                    future.end(job())
        finally:
            self.inside = False
        return True

    def run(self) -> None:
        while self.step():
            pass


class Verbs:
    """Raw verbs of one NIC that counts what exists, and fails what it is told to."""

    def __init__(self) -> None:
        self.alive: dict[int, str] = {}
        self.log: list[tuple[Any, ...]] = []
        self.broken: dict[str, OSError] = {}
        self.max_cqe = 1000
        self._numbers = itertools.count(1)

    def _make(self, kind: str, *detail: Any) -> int:
        self.log.append((kind, *detail))
        if kind in self.broken:
            raise self.broken[kind]
        handle = next(self._numbers) * 16
        self.alive[handle] = kind
        return handle

    def _take(self, kind: str, handle: int) -> None:
        self.log.append((f"-{kind}", handle))
        assert self.alive.pop(handle) == kind

    def take(self, kind: str, handle: int) -> int:
        """What a NIC's thread does for NicWorker.destroy: errno."""
        short = {"completion channel": "channel"}.get(kind, kind.lower())
        if f"-{short}" in self.broken:
            return self.broken[f"-{short}"].errno or 0
        self._take(short, handle)
        return 0

    def alloc_pd(self, ctx: int) -> int:
        return self._make("pd", ctx)

    def dealloc_pd(self, handle: int) -> None:
        self._take("pd", handle)

    def reg_mr(self, pd: int, address: int, length: int, iova: int, access: int) -> tuple[int, int, int]:
        assert self.alive[pd] == "pd"
        handle = self._make("mr", address, length, iova, access)
        return handle, handle + 1, handle + 2

    def rereg_mr(
        self, handle: int, flags: int, pd: int, address: int, length: int, access: int
    ) -> tuple[int, int]:
        assert self.alive[handle] == "mr" and self.alive[pd] == "pd"
        self.log.append(("rereg", handle, address, length))
        return handle + 1, handle + 2

    def dereg_mr(self, handle: int) -> None:
        self._take("mr", handle)

    def create_channel(self, ctx: int) -> tuple[int, int]:
        return self._make("channel"), 77

    def destroy_channel(self, handle: int) -> None:
        self._take("channel", handle)

    def create_cq(self, ctx: int, cqe: int, channel: int, vector: int) -> tuple[int, int]:
        if cqe > self.max_cqe:
            raise OSError(22, "Invalid argument")
        return self._make("cq", cqe, channel, vector), cqe

    def resize_cq(self, handle: int, cqe: int) -> int:
        self.log.append(("resize", handle, cqe))
        if cqe > self.max_cqe:
            raise OSError(12, "Cannot allocate memory")
        return cqe

    def destroy_cq(self, handle: int) -> None:
        self._take("cq", handle)


class Nic:
    def __init__(self, name: str) -> None:
        self.name = name
        self.verbs = Verbs()
        self.worker = Worker(self.verbs)
        self.registrar = Worker(self.verbs)
        self._on_the_way: list[None] = []
        self.ctx = 1
        self.error = ""
        self.is_open = True
        self.limits = {"num_comp_vectors": 2}
        self.hanging = False

    in_turn = RealNic.in_turn
    register = RealNic.register
    _pass_on = RealNic._pass_on

    def run(self) -> None:
        """Both threads at work."""
        while self.worker.step() or self.registrar.step():
            pass

    def own_thread(self) -> Worker | None:
        return next((thread for thread in (self.worker, self.registrar) if thread.inside), None)

    def on_worker(self) -> bool:
        return self.own_thread() is not None

    def memory_hangs(self, longer_than_s: float) -> bool:
        return self.hanging

    def hangs(self, longer_than_s: float) -> bool:
        return self.hanging

    def is_registering(self) -> bool:
        return bool(self._on_the_way or self.registrar.pending())


class KeyMap(dict[tuple[int, int], int | None]):
    def set_local(self, lkey: int, k: int, shadow_lkey: int | None) -> None:
        self[lkey, k] = shadow_lkey

    def del_local(self, lkey: int) -> None:
        for key in [key for key in self if key[0] == lkey]:
            del self[key]


class Runtime:
    def __init__(self) -> None:
        self.told: list[tuple[str, Any]] = []
        self.woken = 0
        self.patience: dict[Any, mr.Patience] = collections.defaultdict(mr.Patience)

    def mr_made(self, held: Any) -> None:
        pass

    def mr_changing(self, held: Any) -> None:
        pass

    def mr_changed(self, held: Any) -> None:
        pass

    def holds_key(self, nic: Any, of: int, rkey: int | None = None) -> bool:
        return False

    def mr_shadowed(self, held: Any) -> None:
        self.told.append(("shadowed", held))

    def mr_gone(self, held: Any) -> None:
        self.told.append(("gone", held))

    def wake(self) -> None:
        self.woken += 1


class Core:
    """A CQCore or ChannelCore: what is attached where."""

    def __init__(self) -> None:
        self.attached: dict[int, int] = {}

    def attach(self, k: int, handle: int) -> None:
        assert k not in self.attached
        self.attached[k] = handle

    def detach(self, k: int) -> None:
        self.attached.pop(k, None)


class Domain:
    def __init__(self, backups: int = 2) -> None:
        self.nic = Nic("default")
        self.backups = [Nic(f"backup{number}") for number in range(1, backups + 1)]
        self.keymap = KeyMap()
        self.runtime = Runtime()

    def run(self) -> None:
        for nic in self.backups:
            nic.run()

    def leftovers(self) -> list[str]:
        return [kind for nic in self.backups for kind in nic.verbs.alive.values()]


def an_mr(domain: Domain, pd: ShadowPD, lkey: int = 5, unshadowable: str = "") -> ShadowMR:
    return ShadowMR(pd, 999, (0x1000, 100, 0x2000, 7), lkey, lkey + 1, unshadowable)


def settle_close(domain: Domain, *held: Any) -> None:
    """Close, with the NICs' threads at work."""
    done = threading.Event()

    def pump() -> None:
        while not done.is_set():
            domain.run()
            done.wait(0.001)

    thread = threading.Thread(target=pump)
    thread.start()
    try:
        for each in held:
            each.close()
    finally:
        done.set()
        thread.join()
    domain.run()
