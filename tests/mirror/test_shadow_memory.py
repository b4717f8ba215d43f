# SPDX-License-Identifier: BSD-3-Clause
"""Shadow MRs on made-up NICs: where they end, what is waited for, by which keys they are reached."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mirror.made_up_nics import (
    IN_A_NICS_THREAD,
    Domain,
    an_mr,
    settle_close,
)
from shiftverbs import _core
from shiftverbs.shadows import mr as shadow_mr
from shiftverbs.shadows.key_plugs import Plugs
from shiftverbs.shadows.mr import ShadowMR
from shiftverbs.shadows.pd import ShadowPD
from shiftverbs.shadows.shadow import FAILED, PENDING, READY


@contextlib.contextmanager
def pumped(step: Callable[[], object], every_s: float) -> Iterator[None]:
    """Meanwhile a thread takes a step of a NIC's again and again."""
    done = threading.Event()

    def pump() -> None:
        while not done.wait(every_s):
            step()

    thread = threading.Thread(target=pump)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def test_closing_an_mr_from_a_nics_own_thread_does_not_wait_for_it() -> None:
    """The garbage collector may run there. The other NIC may hang: it is given a command, and a moment."""
    domain = Domain()
    pd = ShadowPD(domain, 1)
    mr = an_mr(domain, pd)
    domain.run()
    first, other = domain.backups
    first.worker.call(mr.close)
    began = time.monotonic()
    other.hangs = lambda longer_than_s: time.monotonic() - began > longer_than_s  # type: ignore[method-assign]
    first.run()
    assert shadow_mr.BRIEF_S <= time.monotonic() - began < shadow_mr.DEREG_TIMEOUT_S
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
    assert len(took) == 1 and took[0] < shadow_mr.BRIEF_S
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
    with pumped(nic.worker.run, 0.05):
        mr.close()
        assert list(nic.verbs.alive.values()) == ["pd", "mr"]
        after = changed(changing, pd)
        after.wait()
        assert list(nic.verbs.alive.values()) == ["pd"] and after.state(1) == PENDING
    domain.run()
    assert after.state(1) == READY


class Signal(Exception):
    """What a handler raises."""


def interrupted(monkeypatch: pytest.MonkeyPatch, wait: Callable[[], object]) -> None:
    """A wait for memory that a signal's handler breaks off."""

    def raises(*_: object) -> bool:
        raise Signal

    with monkeypatch.context() as patched, pytest.raises(Signal):
        patched.setattr(shadow_mr, "in_slices", raises)
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
    monkeypatch.setattr(shadow_mr, "DEREG_TIMEOUT_S", 0.05)
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


def test_a_nics_thread_waits_for_another_one_that_hangs_no_longer_for_more_memory(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A fence does not wait for any number of MRs that the collector finds together."""
    domain = Domain()
    pd = ShadowPD(domain, 1)
    held = [an_mr(domain, pd, 9 + n) for n in range(60)]
    domain.run()
    began = time.monotonic()
    for nic in domain.backups:
        nic.hangs = lambda longer_than_s: time.monotonic() - began > longer_than_s  # type: ignore[method-assign]
    with IN_A_NICS_THREAD:
        for mr in held:
            mr.close()
    assert shadow_mr.BRIEF_S <= time.monotonic() - began < 5 * shadow_mr.BRIEF_S
    assert caplog.text.count("still holds the memory") == 120
    domain.run()
    assert domain.leftovers() == ["pd", "pd"]


@pytest.mark.parametrize("needs", [0.2, 4.0], ids=["all of them", "some of them"])
def test_a_nics_thread_waits_for_another_one_that_goes_on(
    caplog: pytest.LogCaptureFixture, needs: float
) -> None:
    """The memory may be freed next; but it waits no longer in all than peers can, however many MRs there are."""
    domain = Domain(1)
    pd = ShadowPD(domain, 1)
    held = [an_mr(domain, pd, 9 + n) for n in range(30)]
    domain.run()
    nic = domain.backups[0]
    given_back = 0
    began = time.monotonic()
    with pumped(nic.worker.step, needs * shadow_mr.BRIEF_S / len(held)):
        with _core.Unbroken(threading.RLock()):  # not the one that pump() needs
            for left, mr in reversed(list(enumerate(held))):
                mr.close()
                given_back += list(nic.verbs.alive.values()) != ["pd"] + left * ["mr"]
    took_s = time.monotonic() - began
    assert caplog.text.count("still holds the memory") == given_back
    if needs < 1:
        assert not given_back
    else:
        assert given_back and shadow_mr.BRIEF_S <= took_s < needs * shadow_mr.BRIEF_S


def test_a_nic_that_hangs_uses_up_no_patience_with_another_one() -> None:
    domain = Domain()
    pd = ShadowPD(domain, 1)
    held = [an_mr(domain, pd, 9 + n) for n in range(5)]
    domain.run()
    hung, healthy = domain.backups
    began = time.monotonic()
    hung.hangs = lambda longer_than_s: time.monotonic() - began > longer_than_s  # type: ignore[method-assign]
    with pumped(healthy.worker.step, 0.002):
        with _core.Unbroken(threading.RLock()):
            for left, mr in reversed(list(enumerate(held))):
                mr.close()
                assert list(healthy.verbs.alive.values()) == ["pd"] + left * ["mr"]
    assert list(hung.verbs.alive.values()) == ["pd"] + 5 * ["mr"]


def test_a_nics_thread_has_patience_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    patience = shadow_mr.Patience()
    waits = 0
    now_s = 5.0

    def wait(timeout_s: float) -> bool:
        nonlocal now_s, waits
        now_s += timeout_s
        waits += timeout_s > 0
        return False

    monkeypatch.setattr("time.monotonic", lambda: now_s)
    assert not patience.wait(wait, lambda longer_than_s: False)
    assert waits and now_s == pytest.approx(5.0 + shadow_mr.BRIEF_S, abs=shadow_mr.BRIEF_S / 5)
    waits = 0
    assert not patience.wait(wait, lambda longer_than_s: False) and not waits
    before = now_s = now_s + shadow_mr.BRIEF_WITHIN_S / 2
    assert not patience.wait(wait, lambda longer_than_s: False) and waits
    assert now_s == pytest.approx(before + shadow_mr.BRIEF_S / 2, abs=shadow_mr.BRIEF_S / 5), (
        "half of it has grown back"
    )
    before = now_s = now_s + 10 * shadow_mr.BRIEF_WITHIN_S
    assert not patience.wait(wait, lambda longer_than_s: False)
    assert now_s == pytest.approx(before + shadow_mr.BRIEF_S, abs=shadow_mr.BRIEF_S / 5), (
        "and never more than all"
    )


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
    with pumped(nic.worker.run, 0.01):
        after.close()
        assert list(nic.verbs.alive.values()) == ["pd"]
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
    monkeypatch.setattr(shadow_mr, "DEREG_TIMEOUT_S", 0.0)
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
