# SPDX-License-Identifier: BSD-3-Clause
"""Posts that are refused while errors wait for a protection: as they begin to be shown, and a life later."""

from __future__ import annotations

import errno
from collections.abc import Iterator

import pytest
from simulator.application import Application, Wr
from simulator.rnic import ERR, RESET
from simulator.staged_early import connect_anew, failing
from simulator.story import post, sends, until, wait
from simulator.world import World

from shiftverbs.failover.qp.early_errors import EarlyErrors
from shiftverbs.protocol.events import Status
from shiftverbs.shadows.pyverbs_objects import Attr


@pytest.fixture(autouse=True)
def _ended() -> Iterator[None]:
    """Whatever network a test has made is ended behind it."""
    yield
    if World.current is not None:
        World.current.end()


def refuse_next(app: Application) -> None:
    """Its default QP, which is in ERR, refuses the next post: some providers look at the state."""
    provider = app.endpoint.hardware.shared
    provider.refuse_err[0] = errno.EINVAL


def test_a_post_is_refused_as_errors_begin_to_be_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread of the program's posts while the control thread has seen that nothing was refused."""
    net, a, _ = failing()
    for name in "ab":
        net.wall(name, 1, True)
    early = a.endpoint.connection.early
    over = EarlyErrors.over
    posted: list[Wr] = []

    def post_first(self: EarlyErrors) -> None:
        if self is early and not posted:
            refuse_next(a)
            posted.append(post(a, "SEND"))
        over(self)

    monkeypatch.setattr(EarlyErrors, "over", post_first)
    until(net, lambda: bool(posted), ms=3000)
    monkeypatch.undo()
    wait(net, 10_000)
    assert len(a.posted) == 3, "it was accepted"
    assert len(sends(a)) == 3, (sends(a), a.endpoint.core.outstanding, a.endpoint.core.refused)
    assert "SUCCESS" not in sends(a)


def test_what_failed_before_reset_does_not_succeed() -> None:
    """Its NIC keeps completions over RESET, as soft-RoCE: the last flush lies in the CQ, the others were withheld."""
    net, a, b = failing()
    post(a, "SEND")
    net.deliver()
    assert a.endpoint.hardware.state == ERR and not a.wcs
    for app in (a, b):
        connect_anew(net, app)
    wait(net, 50)
    assert not sends(a), sends(a)


def test_a_refusal_of_a_former_life() -> None:
    """That life is over. The next one is connected to itself, is a plain QP, and works."""
    net, a, _ = failing()
    refuse_next(a)
    post(a, "SEND")
    assert a.endpoint.core.refused == errno.EINVAL and a.endpoint.status is Status.PAIRING
    for name in "ab":
        net.wall(name, 0, False)
    a.endpoint.modify(Attr(), RESET, 1)
    a.endpoint.connect(a.endpoint)
    core = a.endpoint.core
    until(net, lambda: a.endpoint.status is Status.UNPROTECTED, ms=1000)
    wait(net, 100)
    state = a.endpoint.hardware.state
    assert not core.ending and not core.aborted and state != ERR, (a.endpoint.connection.why, state)


def test_a_refusal_that_is_heard_of_a_life_later() -> None:
    """The control thread is in a run when the post is refused, and lets go of its lock as RESET wants that."""
    net, a, b = failing()
    for name in "ab":
        net.wall(name, 0, False)
    driver = a.host.runtime.driver
    refuse_next(a)
    driver._depth += 1  # who would run it now leaves that to the run under way
    post(a, "SEND")
    assert a.endpoint.core.refused == errno.EINVAL
    connect_anew(net, a)
    driver._depth -= 1
    connect_anew(net, b)
    with b.host:
        b.post_recv()
    post(a, "SEND")
    wait(net, 1000)
    assert sends(a) == ["SUCCESS"], (sends(a), a.endpoint.status, a.endpoint.connection.why)
