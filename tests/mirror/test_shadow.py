# SPDX-License-Identifier: BSD-3-Clause
"""Shadow resources on made-up NICs whose jobs run when the test says so: adverse orders, failures, teardown."""

from __future__ import annotations

import random
from typing import Any

import pytest

from mirror.made_up_nics import (
    Core,
    Domain,
    an_mr,
    settle_close,
)
from shiftverbs.shadows import mr as shadow_mr
from shiftverbs.shadows import shadow
from shiftverbs.shadows.cq import ShadowChannel, ShadowCQ
from shiftverbs.shadows.pd import ShadowPD
from shiftverbs.shadows.shadow import FAILED, PENDING, READY


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
    monkeypatch.setattr(shadow_mr, "DEREG_TIMEOUT_S", 0.0)
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
    monkeypatch.setattr(shadow_mr, "DEREG_TIMEOUT_S", 0.0)
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
    monkeypatch.setattr(shadow_mr, "DEREG_TIMEOUT_S", 0.0)
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
    monkeypatch.setattr(shadow_mr, "DEREG_TIMEOUT_S", 0.0)
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
    monkeypatch.setattr(shadow, "exiting", True)
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
    monkeypatch.setattr(shadow_mr, "DEREG_TIMEOUT_S", 0.05)
    mr.close()
    assert "still holds the memory" in caplog.text
    monkeypatch.setattr(shadow_mr, "DEREG_TIMEOUT_S", 1000.0)
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
