# SPDX-License-Identifier: BSD-3-Clause
"""A fence on NICs that are late, refuse or lose its commands; and what is amid something when we give up."""

from __future__ import annotations

import errno
from types import SimpleNamespace
from typing import Any

import pytest
from driver.doubles import Connection, shadow_qp
from typed_doubles import Double, double

from shiftverbs import _core
from shiftverbs.failover.driver import Driver
from shiftverbs.failover.qp.connection import Connection as RealConnection
from shiftverbs.failover.qp.drain import Fence
from shiftverbs.failover.qp.ending import Ending
from shiftverbs.failover.qp.rebuild import Rebuild
from shiftverbs.protocol.pair import PairProtocol
from shiftverbs.state_machine import SendState


def fence_of(driver: Driver, nic: Any, deadline_ns: int) -> tuple[Fence, list[Any]]:
    """A fence of pair 0 of a QP on `nic`, and where its end will be told."""
    ends: list[Any] = []
    core = double(
        _core.QPCore, begin_fence=lambda k: None, post_marker=lambda k: 0, fence_state=lambda k: (False, False),
        counters=lambda: (0, 0, 0), unsafe_reason=lambda k=None, cqes_lost=False, receipts_lost=False: None,
    )  # fmt: skip
    connection: Any = Connection(nic)
    connection.driver, connection.core, connection.timer_ns = driver, core, None
    connection.rebuild = double(Rebuild, call_off=lambda k: None)
    connection.device = lambda k: nic.name
    connection.fence = Fence(connection, (0,), deadline_ns, lambda: ends.append("done"), ends.append)
    connection.fence.begin()
    return connection.fence, ends


def test_a_fence_waits_for_its_turn_at_a_nic_that_works(
    driver: Driver, nic: Any, clock: SimpleNamespace
) -> None:
    """A thousand QPs fail together: the last command stands behind 999 others, and the NIC hangs at none of them."""
    hangs = [False]
    nic.hangs = lambda longer_than_s: hangs[0]
    fence, ends = fence_of(driver, nic, clock.now + 10**9)
    for _ in range(50):
        assert fence.due_ns > clock.now
        clock.now = fence.due_ns
        fence.tick(clock.now)
    assert ends == [] and clock.now > 10**9 + 2 * 10**9
    hangs[0] = True
    clock.now = fence.due_ns
    fence.tick(clock.now)
    assert "did not bring the QP to ERR" in ends[0]


def test_markers_that_were_refused_are_posted_again(driver: Driver, nic: Any, clock: SimpleNamespace) -> None:
    nic.hangs = lambda longer_than_s: False
    fence, ends = fence_of(driver, nic, clock.now + 10**9)
    core = fence._c.core
    answers = [errno.EINVAL, errno.EINVAL, 0]
    core.post_marker = lambda k: answers.pop(0)
    core.fence_state = lambda k: (not answers, not answers)
    fence._erred(0, 0, 1)
    assert ends == [] and len(answers) == 2
    fence._kicked(0)
    assert ends == [] and len(answers) == 1
    fence._kicked(0)
    assert answers == [] and ends == ["done"]


def test_a_fence_that_hung_tells_what_became_of_its_markers(
    driver: Driver, nic: Any, clock: SimpleNamespace
) -> None:
    nic.hangs = lambda longer_than_s: False
    fence, ends = fence_of(driver, nic, clock.now + 10**9)
    fence._c.core.post_marker = lambda k: errno.EINVAL
    fence._erred(0, 0, 1)
    while not ends:
        clock.now = fence.due_ns
        fence.tick(clock.now)
    told = "nic0 did not flush the send queue and the receive queue (its marker: Invalid argument) in time"
    assert ends[0] == told


def test_a_late_answer_leaves_time_for_the_flush(driver: Driver, nic: Any, clock: SimpleNamespace) -> None:
    """The NIC, or we, were busy: the deadline is over when the command comes back, but nothing hangs."""
    fence, ends = fence_of(driver, nic, clock.now + 10**9)
    clock.now += 10**9
    fence._erred(0, 0, 1)
    fence.tick(clock.now)
    assert ends == []
    while not ends:
        assert clock.now < 5 * 10**9
        clock.now = fence.due_ns
        fence.tick(clock.now)
    assert "did not flush" in ends[0]


@pytest.mark.parametrize(
    ("closed", "state", "expected"),
    [
        ("", SendState.WAIT_SIGNALED, "move_cancel"),
        ("send_is_open", SendState.WAIT_DRAINED, "move_cancel"),
        ("told", SendState.WAIT_DRAINED, "end"),
        ("ending", SendState.DEFAULT, "end"),
        ("send_is_open", SendState.DEFAULT, "end"),
        ("recv_is_open", SendState.DEFAULT, "end"),
        ("withheld", SendState.DEFAULT, "end"),
    ],
)
def test_giving_up_opens_the_gates(
    driver: Driver, nic: Any, closed: str, state: SendState, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Amid a MOVE from home, or while errors wait for the pairs to stop: nobody would come back."""
    done: list[str] = []

    class Core(Double, real=_core.QPCore):
        @property
        def is_plain(self) -> bool:
            return bool(self.send_is_open and self.recv_is_open)

    core = Core(send_is_open=True, recv_is_open=True, send_pair=0, recv_pair=0, guarded=True, ending=False)
    core.ends_at_post = False
    core.carried = set()

    def move_cancel() -> None:
        done.append("move_cancel")
        core.send_is_open = True

    core.move_cancel = move_cancel
    core.first_error = lambda k: (12, 0) if closed == "withheld" else None
    if closed and closed != "withheld":
        setattr(core, "send_is_open" if closed == "told" else closed, closed == "ending")
    connection = RealConnection(driver, shadow_qp(nic, core=core))
    monkeypatch.setattr(Ending, "begin", lambda _, first: done.append("end"))
    connection.protocol = double(
        PairProtocol,
        switching=False,
        send_state=state,
        pairs=[SimpleNamespace(used=True, fenced=False)],
        move_told=closed == "told",
    )
    connection.give_up("a bug")
    assert done == [expected] and connection.status.value == "FAILED"
    assert core.guarded == (closed == "ending")


def test_a_fence_gives_a_command_again_whose_end_was_lost(
    driver: Driver, nic: Any, clock: SimpleNamespace
) -> None:
    """In an interrupted run: a NIC that does not hang would be waited for without end."""
    nic.hangs = lambda longer_than_s: False
    fence, ends = fence_of(driver, nic, clock.now + 10**9)
    nic.worker.under_way = 1
    fence.command_again()
    assert len(nic.worker.submitted) == 1
    nic.worker.under_way = 0
    fence.command_again()
    assert len(nic.worker.submitted) == 2
    markers: list[int] = []
    fence._c.core.post_marker = lambda k: markers.append(k) or 0
    fence._erred(0, 0, 1)
    fence._erred(0, 0, 1)
    assert markers == [0] and ends == []
    fence.command_again()
    assert len(nic.worker.submitted) == 3  # the kick
