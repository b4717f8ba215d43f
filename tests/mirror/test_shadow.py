# SPDX-License-Identifier: BSD-3-Clause
"""Shadow resources on made-up NICs whose jobs run when the test says so: adverse orders, failures, teardown."""

from __future__ import annotations

import errno
import itertools
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from shiftverbs import _core, _nic
from shiftverbs.shadows import nic as nic_of
from shiftverbs.shadows import shadow
from shiftverbs.shadows.key_plugs import Plugs
from shiftverbs.shadows.nic import Nic as RealNic
from shiftverbs.shadows.shadow import FAILED, PENDING, READY, ShadowChannel, ShadowCQ, ShadowMR, ShadowPD

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
        self._waited_s, self._brief_left_s = -10.0, 0.0

    in_turn = RealNic.in_turn
    wait_briefly = RealNic.wait_briefly
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


def test_pending_then_ready_then_gone() -> None:
    domain = Domain()
    pd = ShadowPD(domain, 4711)
    mr = an_mr(domain, pd)
    assert [pd.state(k) for k in range(3)] == [READY, PENDING, PENDING]
    assert (pd.handle(0), pd.handle(1), mr.keys(0), mr.keys(1)) == (4711, 0, (5, 6), None)
    domain.backups[1].run()
    assert [mr.state(k) for k in range(3)] == [READY, PENDING, READY]
    assert domain.keymap == {(5, 2): mr.handle(2) + 1} and not domain.runtime.told
    domain.backups[0].run()
    assert domain.runtime.told == [("shadowed", mr)]
    assert mr.keys(1) == (mr.handle(1) + 1, mr.handle(1) + 2)
    assert domain.backups[0].verbs.log[-1] == ("mr", 0x1000, 100, 0x2000, 7)
    settle_close(domain, mr, mr, pd, pd)
    assert not domain.leftovers() and not domain.keymap
    assert domain.runtime.told[1:] == [("gone", mr)]


def test_a_failure_is_a_reason_and_nothing_else() -> None:
    domain = Domain()
    domain.backups[0].verbs.broken["mr"] = OSError(12, "Cannot allocate memory")
    pd = ShadowPD(domain, 1)
    mr = an_mr(domain, pd)
    domain.run()
    assert mr.state(1) == FAILED and "backup1" in mr.reason(1) and "Cannot allocate" in mr.reason(1)
    assert mr.state(2) == READY and not mr.reason(2)
    assert domain.keymap == {(5, 1): None, (5, 2): mr.handle(2) + 1}
    assert domain.runtime.told == [("shadowed", mr)]
    settle_close(domain, mr, pd)
    assert not domain.leftovers()


def test_what_a_nic_does_not_take_away_is_told_and_stays(caplog: pytest.LogCaptureFixture) -> None:
    domain = Domain()
    domain.backups[0].verbs.broken["-mr"] = OSError(16, "busy")
    pd = ShadowPD(domain, 1)
    made, unmade = an_mr(domain, pd), an_mr(domain, pd, 9)
    domain.run()
    settle_close(domain, made, unmade)
    assert caplog.text.count("MR on backup1 was not destroyed: Device or resource busy") == 2
    assert domain.leftovers() == ["pd", "mr", "mr", "pd"] and made.handle(1) == made.handle(2) == 0


def test_what_is_ready_is_taken_away_by_a_command_and_what_is_not_by_a_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shadow, "DEREG_TIMEOUT_S", 0.0)
    domain = Domain(1)
    pd = ShadowPD(domain, 1)
    ready, pending = an_mr(domain, pd), an_mr(domain, pd, 9)
    worker, registrar = domain.backups[0].worker, domain.backups[0].registrar
    while worker.step():
        pass
    registrar.step()
    handles = [ready.handle(1), pd.handle(1)]
    for held in (ready, pending, pd):
        held.close()
    assert worker.destroyed == [("MR", handles[0]), ("PD", handles[1])]
    domain.run()
    assert not domain.leftovers() and [kind for kind, *_ in worker.verbs.log].count("mr") == 1


def test_memory_goes_behind_what_was_commanded_to_qps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A QP is on its way to ERR, whose receives name that memory: a message must not find it gone."""
    monkeypatch.setattr(shadow, "DEREG_TIMEOUT_S", 0.0)
    domain = Domain(1)
    pd = ShadowPD(domain, 1)
    closed, changed = an_mr(domain, pd), an_mr(domain, pd, 9)
    domain.run()
    nic = domain.backups[0]
    log = nic.verbs.log
    nic.worker.post(log.append, ("ERR",))
    closed.close()
    changed.hand_over()
    an_mr(domain, pd, 9)
    while nic.registrar.step():
        pass
    assert log[-1][0] == "mr", "nothing went before"
    domain.run()
    assert [kind for kind, *_ in log[3:]] == ["ERR", "-mr", "mr"]


@pytest.mark.parametrize("is_there", [True, False], ids=["a PD that is there", "one that is not yet"])
def test_memory_comes_behind_its_pd_and_the_end_of_the_pd_behind_that_of_its_memory(
    monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    """Whichever of the two threads is slow: both are turned in every order that their queues allow."""
    monkeypatch.setattr(shadow, "DEREG_TIMEOUT_S", 0.0)
    rng = random.Random(1)
    seen = set()
    for _ in range(200):
        domain = Domain(1)
        threads = [domain.backups[0].worker, domain.backups[0].registrar]
        pd = ShadowPD(domain, 1)
        if is_there:
            domain.run()
        held: list[Any] = [pd]
        for step in rng.sample([lambda: held.insert(0, an_mr(domain, pd, 9))] * 2, 2):
            step()
            for _ in range(rng.randrange(4)):
                rng.choice(threads).step()
        for each in held:
            each.close()
            for _ in range(rng.randrange(4)):
                rng.choice(threads).step()
        domain.run()
        log = [kind for kind, *_ in domain.backups[0].verbs.log]
        assert not domain.leftovers() and log.count("mr") == log.count("-mr"), log
        assert not log or (log[0], log[-1], log.count("pd"), log.count("-pd")) == ("pd", "-pd", 1, 1), log
        seen.add(tuple(log))
    assert {("pd", "-pd"), ("pd", "mr", "mr", "-mr", "-mr", "-pd")} < seen


def test_the_control_thread_is_woken_where_no_command_to_a_nic_does_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shadow, "DEREG_TIMEOUT_S", 0.0)
    domain = Domain(1)
    pd = ShadowPD(domain, 1)
    unshadowable, ready = an_mr(domain, pd, unshadowable="device memory"), an_mr(domain, pd, 9)
    domain.run()
    pending = an_mr(domain, pd, 13)
    for mr, woken in ((ready, 0), (pending, 1), (unshadowable, 2)):
        mr.close()
        assert domain.runtime.told[-1] == ("gone", mr) and domain.runtime.woken == woken


def test_what_stands_on_something_that_failed_fails_with_its_reason() -> None:
    domain = Domain(1)
    domain.backups[0].verbs.broken["pd"] = OSError(28, "No space left on device")
    pd = ShadowPD(domain, 1)
    mr = an_mr(domain, pd)
    domain.run()
    assert "No space left" in mr.reason(1)
    assert ("mr", 0x1000, 100, 0x2000, 7) not in domain.backups[0].verbs.log


def test_a_nic_that_did_not_open_and_one_that_is_stopped() -> None:
    domain = Domain()
    domain.backups[0].is_open, domain.backups[0].error = False, "it is on fire"
    domain.backups[1].worker.stopped = True
    pd = ShadowPD(domain, 1)
    mr = an_mr(domain, pd)
    domain.run()
    assert "on fire" in pd.reason(1) and "shut down" in pd.reason(2)
    assert domain.runtime.told == [("shadowed", mr)] and domain.keymap == {(5, 1): None, (5, 2): None}
    settle_close(domain, mr, pd)


def test_unshadowable_memory_is_known_as_such_at_once() -> None:
    domain = Domain()
    pd = ShadowPD(domain, 1)
    mr = an_mr(domain, pd, unshadowable="device memory")
    assert domain.keymap == {(5, 1): None, (5, 2): None} and domain.runtime.told == [("shadowed", mr)]
    assert mr.reason(2) == "device memory" and mr.keys(2) is None
    mr.close()  # nothing to wait for
    assert not domain.keymap


def test_closed_before_it_was_made() -> None:
    domain = Domain(1)
    pd = ShadowPD(domain, 1)
    cq = ShadowCQ(domain, 3, Core(), 10, None, 0)
    cq.close()
    pd.close()
    domain.run()
    assert not domain.leftovers() and domain.backups[0].verbs.log == []
    assert cq.state(1) == FAILED


def test_closing_an_mr_from_a_nics_own_thread_does_not_wait_for_it() -> None:
    """The garbage collector may run there. The other NIC may hang: it is given a command, and a moment."""
    domain = Domain()
    pd = ShadowPD(domain, 1)
    mr = an_mr(domain, pd)
    domain.run()
    first, other = domain.backups
    first.worker.call(mr.close)
    began = time.monotonic()
    first.run()
    assert nic_of.BRIEF_S <= time.monotonic() - began < shadow.DEREG_TIMEOUT_S
    assert (list(first.verbs.alive.values()), list(other.verbs.alive.values())) == (["pd"], ["pd", "mr"])
    assert len(other.worker.destroyed) == 1 and not domain.keymap
    domain.run()
    assert domain.leftovers() == ["pd", "pd"]


def test_memory_that_is_just_being_registered_is_not_waited_for_in_a_nics_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody knows its keys, and a fence waits for that thread. What is not even begun nobody waits for."""
    domain = Domain(1)
    pd = ShadowPD(domain, 1)
    domain.run()
    nic = domain.backups[0]
    register = nic.verbs.reg_mr
    others = iter([an_mr(domain, pd, 9), an_mr(domain, pd, 13)])

    def dropped(*args: Any) -> tuple[int, int, int]:
        began = time.monotonic()
        mr.close()
        with IN_A_NICS_THREAD:  # another one's
            next(others).close()
        next(others).close()
        took.append(time.monotonic() - began)
        return register(*args)

    took: list[float] = []
    monkeypatch.setattr(nic.verbs, "reg_mr", dropped)
    nic.registrar.jobs.rotate(-2)
    mr = an_mr(domain, pd)
    nic.registrar.jobs.rotate(1)
    domain.run()
    assert len(took) == 1 and took[0] < nic_of.BRIEF_S
    assert domain.leftovers() == ["pd"] and [kind for kind, *_ in nic.verbs.log] == ["pd", "mr", "-mr"]


def test_memory_goes_while_other_memory_is_being_registered() -> None:
    """For longer than anybody waits: what is there goes in the other thread, and that is waited for."""
    domain = Domain(1)
    pd = ShadowPD(domain, 1)
    mr, changing = an_mr(domain, pd), an_mr(domain, pd, 9)
    domain.run()
    nic = domain.backups[0]
    nic.memory_hangs = lambda longer_than_s: True  # type: ignore[method-assign]
    an_mr(domain, pd, 13)  # its registration never ends
    done = threading.Event()

    def pump() -> None:
        while not done.wait(0.05):
            nic.worker.run()

    thread = threading.Thread(target=pump)
    thread.start()
    try:
        mr.close()
        assert list(nic.verbs.alive.values()) == ["pd", "mr"]
        after = changed(changing, pd)
        after.wait()
        assert list(nic.verbs.alive.values()) == ["pd"] and after.state(1) == PENDING
    finally:
        done.set()
        thread.join()
    domain.run()
    assert after.state(1) == READY


class Signal(Exception):
    """What a handler raises."""


def interrupted(monkeypatch: pytest.MonkeyPatch, wait: Callable[[], object]) -> None:
    """A wait for memory that a signal's handler breaks off."""

    def raises(*_: object) -> bool:
        raise Signal

    with monkeypatch.context() as patched, pytest.raises(Signal):
        patched.setattr(shadow, "in_slices", raises)
        wait()


@pytest.mark.parametrize("then", [ShadowMR.close, lambda mr: mr.wait(), lambda mr: changed(mr, mr.pd).wait()])
def test_what_a_signal_broke_off_waiting_for_is_waited_for_the_next_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, then: Callable[[ShadowMR], object]
) -> None:
    """By what takes its place, too: the memory may be freed next."""
    domain = Domain(1)
    pd = ShadowPD(domain, 1)
    mr = an_mr(domain, pd)
    domain.run()
    an_mr(domain, pd, 9)  # is being registered
    after = changed(mr, pd)
    interrupted(monkeypatch, after.wait)
    monkeypatch.setattr(shadow, "DEREG_TIMEOUT_S", 0.05)
    then(after)
    assert caplog.text.count("backup1 still holds the memory") == 1
    domain.run()
    caplog.clear()
    settle_close(domain, after, pd)
    assert not caplog.text


def test_memory_whose_close_was_broken_off_is_dropped_in_the_thread_that_has_let_go_of_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    domain = Domain(1)
    pd = ShadowPD(domain, 1)
    mr = an_mr(domain, pd)
    domain.run()
    interrupted(monkeypatch, mr.close)
    done = domain.backups[0].worker.call(mr.close)
    domain.run()
    assert done.failure is None and not caplog.text and domain.leftovers() == ["pd"]


def test_a_nics_thread_waits_for_another_one_no_longer_for_more_memory(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A fence does not wait for any number of MRs that the collector finds together."""
    domain = Domain()
    pd = ShadowPD(domain, 1)
    held = [an_mr(domain, pd, 9 + n) for n in range(60)]
    domain.run()
    began = time.monotonic()
    with IN_A_NICS_THREAD:
        for mr in held:
            mr.close()
    assert time.monotonic() - began < 5 * nic_of.BRIEF_S
    domain.run()
    assert domain.leftovers() == ["pd", "pd"]


def test_a_change_that_has_not_begun_does_not_keep_the_memory() -> None:
    """Its job is behind a registration that came in between; it is closed then."""
    domain = Domain(1)
    pd = ShadowPD(domain, 1)
    mr = an_mr(domain, pd)
    domain.run()
    after = changed(mr, pd)
    nic = domain.backups[0]
    an_mr(domain, pd, 9)
    nic.registrar.jobs.rotate(1)
    done = threading.Event()

    def pump() -> None:
        while not done.wait(0.01):
            nic.worker.run()

    thread = threading.Thread(target=pump)
    thread.start()
    try:
        after.close()
        assert list(nic.verbs.alive.values()) == ["pd"]
    finally:
        done.set()
        thread.join()
    domain.run()
    assert domain.leftovers() == ["pd", "mr"]


def test_closing_an_mr_from_a_nics_own_thread_before_it_was_made() -> None:
    domain = Domain()
    pd = ShadowPD(domain, 1)
    worker = domain.backups[0].worker
    holder: list[ShadowMR] = []
    worker.call(lambda: holder[0].close())
    holder.append(an_mr(domain, pd))
    domain.run()
    assert "mr" not in domain.leftovers()


def changed(mr: ShadowMR, pd: ShadowPD) -> ShadowMR:
    """What takes the place of an MR that is registered anew."""
    return ShadowMR(pd, 999, (0x3000, 100, 0x3000, 7), mr.lkey, mr.rkey, "", mr.hand_over(), 1, mr)


def test_an_mr_that_is_changed_again_before_a_nic_began_with_the_first_change() -> None:
    """It hung for so long that the first one was not waited for; what it holds of the memory goes all the same."""
    domain = Domain(1)
    pd = ShadowPD(domain, 1)
    mr = an_mr(domain, pd)
    domain.run()
    first = changed(mr, pd)
    second = changed(first, pd)
    domain.run()
    assert domain.leftovers() == ["pd", "mr"] and second.state(1) == READY
    settle_close(domain, second, pd)
    assert not domain.leftovers()


def test_an_mr_is_closed_on_one_nics_thread_while_another_changes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The collector may run there, and takes away for all NICs at once."""
    domain = Domain()
    pd = ShadowPD(domain, 1)
    mr = an_mr(domain, pd)
    domain.run()
    after = changed(mr, pd)
    verbs, other = domain.backups[0].verbs, domain.backups[1].worker
    change = verbs.rereg_mr

    def meanwhile(handle: int, *args: int) -> tuple[int, int]:
        other.inside = True
        after.close()
        other.inside = False
        alive.append(handle in verbs.alive)
        return change(handle, *args)

    alive: list[bool] = []
    monkeypatch.setattr(verbs, "rereg_mr", meanwhile)
    domain.run()
    assert alive == [True] and domain.leftovers() == ["pd", "pd"]


class Held:
    """A backup NIC whose next keys are given; some of them no memory of the application's may have."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, given: list[int], held: set[int], changes: bool = True
    ) -> None:
        self.domain = Domain(1)
        self.nic = self.domain.backups[0]
        self.given, self.held = given, held
        self.rights: list[tuple[int, int]] = []  # (key, access) of what was registered
        self.nic.pd = self.nic.verbs.alloc_pd(1)
        self.nic.plugs = Plugs(self.nic)
        register, change = self.nic.verbs.reg_mr, self.nic.verbs.rereg_mr

        def reg_mr(pd: int, address: int, length: int, iova: int, access: int) -> tuple[int, int, int]:
            handle, lkey, _ = register(pd, address, length, iova, access)
            rkey = self.given.pop(0)
            self.rights.append((rkey, access))
            return handle, lkey, rkey

        def rereg_mr(handle: int, *args: int) -> tuple[int, int]:
            if not changes:
                raise OSError(95, "Operation not supported")
            lkey, _ = change(handle, *args)
            rkey = self.rights[-1][0]
            self.rights.append((rkey, args[-1]))
            return lkey, rkey

        monkeypatch.setattr(self.nic.verbs, "reg_mr", reg_mr)
        monkeypatch.setattr(self.nic.verbs, "rereg_mr", rereg_mr)
        self.domain.runtime.holds_key = lambda nic, of, rkey=None: (
            (rkey or min(self.held, default=-1)) in self.held
        )

    def mr(self, access: int = 7) -> ShadowMR:
        pd = ShadowPD(self.domain, 1)
        mr = ShadowMR(pd, 999, (0x3000, 100, 0x3000, access), 1, 2)
        self.domain.run()
        return mr

    def reachable(self) -> set[int]:
        """The keys by which a peer could ever reach the application's memory."""
        return {rkey for rkey, access in self.rights if access & 14}


def test_memory_gets_no_key_by_which_other_memory_may_be_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    there = Held(monkeypatch, [70, 71, 80, 80], {70, 71})
    mr = there.mr()
    assert mr.keys(1) is not None and mr.keys(1)[1] == 80 and there.reachable() == {80}  # type: ignore[index]
    assert sorted(there.nic.plugs.keys) == [70, 71], "nobody else gets them meanwhile"
    there.held.discard(70)
    there.nic.plugs.release(there.held.__contains__)
    assert sorted(there.nic.plugs.keys) == [71]
    there.held.clear()
    there.nic.plugs.release(there.held.__contains__)
    settle_close(there.domain, mr, mr.pd)
    assert there.domain.leftovers() == ["pd"] and not there.nic.plugs.keys


def test_memory_that_no_peer_may_reach_takes_any_key(monkeypatch: pytest.MonkeyPatch) -> None:
    there = Held(monkeypatch, [70], {70})
    mr = there.mr(access=1)
    assert mr.state(1) == READY and there.reachable() == set()


@pytest.mark.parametrize("changes", [True, False])
def test_keys_given_out_in_another_order(monkeypatch: pytest.MonkeyPatch, changes: bool) -> None:
    """What is probed says little of what comes next; and not all NICs can change a registration."""
    given = [80, 70, 81, 71, 82, 83, 84]
    there = Held(monkeypatch, given, {70, 71}, changes)
    mr = there.mr()
    assert mr.state(1) == READY and there.reachable() == {83 if changes else 84}


def test_a_nic_that_gives_out_nothing_else_leaves_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    there = Held(monkeypatch, [80, 70] * 50, {70})
    mr = there.mr()
    assert mr.state(1) == FAILED and "keys by which peers may still reach" in mr.reason(1)
    assert there.reachable() == set() and there.domain.leftovers() == ["pd", "pd"]


def test_a_registration_that_keeps_its_key_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The home NIC gave the changed memory another rkey, the backup would leave it its own: peers mean the old one."""
    there = Held(monkeypatch, [80, 81, 81], set())
    mr = there.mr()
    there.held.add(80)
    after = ShadowMR(mr.pd, 999, (0x3000, 100, 0x3000, 7), 1, 3, "", mr.hand_over(), 1, mr)
    there.domain.run()
    assert after.keys(1) is not None and after.keys(1)[1] == 81  # type: ignore[index]
    assert there.rights[1:] == [(81, 0), (81, 1), (81, 7)]


def test_what_nobody_takes_over_goes() -> None:
    """An MR is moved to a PD without shadows: a parent domain, an imported one."""
    domain = Domain()
    pd = ShadowPD(domain, 1)
    mr = an_mr(domain, pd)
    domain.backups[0].run()
    assert (mr.state(1), mr.state(2)) == (READY, PENDING)
    handed = mr.hand_over()
    settle_close(domain, Returned(mr, handed), pd)
    assert not domain.leftovers()


def test_memory_is_let_go_where_the_new_pd_is_missing() -> None:
    domain = Domain(1)
    pd = ShadowPD(domain, 1)
    mr = an_mr(domain, pd)
    domain.run()
    domain.backups[0].verbs.broken["pd"] = OSError(28, "No space left on device")
    after = changed(mr, ShadowPD(domain, 2))
    domain.run()
    assert after.state(1) == FAILED and domain.leftovers() == ["pd"]
    settle_close(domain, after, pd)
    assert not domain.leftovers()


class Returned:
    def __init__(self, mr: ShadowMR, handles: list[int]) -> None:
        self.close = lambda: mr.take_back(handles)


def test_no_key_of_an_mr_that_is_closed_while_a_nic_registers_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one may have that key next, and no backup's yet."""
    monkeypatch.setattr(shadow, "DEREG_TIMEOUT_S", 0.0)
    domain = Domain(1)
    pd = ShadowPD(domain, 1)
    domain.run()
    mr = an_mr(domain, pd)
    worker, verbs = domain.backups[0].worker, domain.backups[0].verbs
    register = verbs.reg_mr

    def closed_meanwhile(*args: Any) -> tuple[int, int, int]:
        worker.inside = False  # the application's thread does it
        mr.close()
        return register(*args)

    monkeypatch.setattr(verbs, "reg_mr", closed_meanwhile)
    domain.run()
    assert not domain.keymap and domain.leftovers() == ["pd"]


def test_an_mr_is_closed_when_its_end_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever publishes it after that finds it closed."""
    domain = Domain(1)
    pd = ShadowPD(domain, 1)
    told: list[bool] = []
    monkeypatch.setattr(domain.runtime, "mr_gone", lambda held: told.append(held.closed))
    for end in (lambda mr: settle_close(domain, mr), ShadowMR.hand_over):
        mr = an_mr(domain, pd)
        domain.run()
        end(mr)
    domain.backups[0].worker.call(an_mr(domain, pd).close)
    domain.run()
    assert told == [True] * 3


def test_who_only_is_about_to_be_closed_keeps_what_was_made() -> None:
    """A QP's driver lets go of it first; the journal must not go with a shadow made meanwhile."""
    gone: list[int] = []

    class Closing(ShadowPD):
        def _create(self, k: int, nic: Any, slot: Any) -> None:
            super()._create(k, nic, slot)
            self.closed = True

        def gone(self, k: int) -> None:
            gone.append(k)

    domain = Domain(1)
    held = Closing(domain, 1)
    domain.run()
    assert gone == [] and domain.leftovers() == ["pd"]
    held.close()
    domain.run()
    assert not domain.leftovers() and 1 in gone


def test_at_exit_memory_is_let_go_without_the_nics_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    domain = Domain()
    pd = ShadowPD(domain, 1)
    mr = an_mr(domain, pd)
    domain.run()
    monkeypatch.setattr(shadow, "_exiting", True)
    mr.close()
    pd.close()
    assert domain.leftovers() == ["pd", "pd"] and not any(nic.worker.jobs for nic in domain.backups)


def test_a_hanging_nic_delays_closing_an_mr_by_no_more_than_the_limit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    domain = Domain(1)
    pd = ShadowPD(domain, 1)
    mr = an_mr(domain, pd)
    domain.run()
    monkeypatch.setattr(shadow, "DEREG_TIMEOUT_S", 0.05)
    mr.close()
    assert "still holds the memory" in caplog.text
    monkeypatch.setattr(shadow, "DEREG_TIMEOUT_S", 1000.0)
    domain.backups[0].hanging = True
    another = an_mr(domain, pd, 9)
    another.close()  # not waited for a second time
    domain.run()
    assert domain.leftovers() == ["pd"]


def test_forked_child_leaves_the_parents_resources_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    domain = Domain(1)
    pd = ShadowPD(domain, 1)
    mr = an_mr(domain, pd)
    domain.run()
    for held in (pd, mr):
        held._pid += 1
    mr.close()
    pd.close()
    assert not domain.backups[0].worker.jobs and domain.runtime.told == [("shadowed", mr)]


def test_channel_and_cq() -> None:
    domain = Domain(1)
    channel = ShadowChannel(domain, 1, Core())
    cq = ShadowCQ(domain, 2, Core(), 10, channel, 3)
    domain.run()
    assert channel.core.attached == {1: channel.handle(1)} and cq.core.attached == {1: cq.handle(1)}
    assert domain.backups[0].verbs.log[-1] == ("cq", 10, channel.handle(1), 1)  # two vectors: 3 becomes 1
    cq.close()
    channel.close()
    domain.run()
    assert not domain.leftovers() and not channel.core.attached and not cq.core.attached


def test_cq_grows_with_its_qps_and_is_shown_as_the_application_made_it() -> None:
    domain = Domain(1)
    default, backup = domain.nic.verbs, domain.backups[0].verbs
    cq = ShadowCQ(domain, 2, Core(), 100, None, 0)
    cq.reserve(60)
    cq.reserve(40)
    assert not default.log and cq.needed == 100
    cq.reserve(50)
    assert default.log == [("resize", 2, 150)] and cq.application_cqe == 100
    domain.run()  # made late, it has its size at once
    assert backup.log == [("cq", 150, 0, 0)]
    cq.reserve(10)
    domain.run()
    assert backup.log[-1] == ("resize", cq.handle(1), 160)
    cq.room(1, domain.backups[0])
    cq.release(110)
    cq.count_other(30)
    cq.count_other(-30)
    assert cq.needed == 100 and len(default.log) == 2


def test_a_qp_that_the_default_cq_has_no_room_for_changes_nothing() -> None:
    domain = Domain(1)
    cq = ShadowCQ(domain, 2, Core(), 100, None, 0)
    with pytest.raises(OSError):
        cq.reserve(2000)
    assert cq.needed == 100
    cq.reserve(200)
    assert cq.needed == 200


def test_a_shadow_cq_that_cannot_grow_says_so_when_a_qp_asks() -> None:
    domain = Domain(1)
    domain.backups[0].verbs.max_cqe = 120
    cq = ShadowCQ(domain, 2, Core(), 100, None, 0)
    domain.run()
    cq.reserve(200)
    domain.run()
    with pytest.raises(shadow.NotReady, match="100 entries instead of 200"):
        cq.room(1, domain.backups[0])
    domain.backups[0].verbs.max_cqe = 1000
    cq.room(1, domain.backups[0])
    assert domain.backups[0].verbs.log[-1] == ("resize", cq.handle(1), 200)


def test_application_resize_with_protected_qps() -> None:
    domain = Domain(1)
    cq = ShadowCQ(domain, 2, Core(), 100, None, 0)
    cq.reserve(300)
    hardware = [300]

    def resize(cqe: int) -> None:
        if not 1 <= cqe <= 1000:
            raise ValueError(cqe)
        hardware[0] = cqe

    cq.resize(200, resize, lambda: hardware[0])
    assert (cq.application_cqe, hardware[0]) == (200, 300)
    cq.resize(400, resize, lambda: hardware[0])
    assert (cq.application_cqe, hardware[0]) == (400, 400)
    for wrong in (0, 5000):
        with pytest.raises(ValueError):
            cq.resize(wrong, resize, lambda: hardware[0])
    assert (cq.application_cqe, cq.needed) == (400, 400)
    cq.release(300)
    cq.resize(50, resize, lambda: hardware[0])
    assert (cq.application_cqe, hardware[0]) == (50, 50)


@pytest.mark.parametrize("seed", range(8))
def test_any_order_leaves_nothing_behind(seed: int) -> None:
    """Random creation, progress, failures and closing."""
    print("seed", seed)
    rng = random.Random(seed)
    domain = Domain(3)
    for nic in domain.backups:
        for kind in ("pd", "mr", "cq", "channel"):
            if rng.random() < 0.1:
                nic.verbs.broken[kind] = OSError(12, "Cannot allocate memory")
    live: list[Any] = []
    pds = [ShadowPD(domain, number + 1) for number in range(3)]
    for number in range(60):
        action = rng.randrange(5)
        if action == 0:
            live.append(an_mr(domain, rng.choice(pds), lkey=1000 + number))
        elif action == 1:
            live.append(ShadowChannel(domain, number, Core()))
        elif action == 2:
            channels = [held for held in live if isinstance(held, ShadowChannel)]
            live.append(ShadowCQ(domain, number, Core(), 10, rng.choice([None, *channels]), 0))
        elif action == 3:
            nic = rng.choice(domain.backups)
            for _ in range(rng.randrange(10)):
                nic.worker.step()
        elif live:
            closed = [live.pop(rng.randrange(len(live)))]
            if isinstance(closed[0], ShadowChannel):
                users = [held for held in live if isinstance(held, ShadowCQ) and held.channel is closed[0]]
                live = [held for held in live if held not in users]
                closed = [*users, *closed]
            settle_close(domain, *closed)
    rng.shuffle(live)
    live.sort(key=lambda held: isinstance(held, ShadowChannel))
    settle_close(domain, *live, *pds)
    assert domain.leftovers() == [] and not domain.keymap
