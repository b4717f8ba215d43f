# SPDX-License-Identifier: BSD-3-Clause
"""What the checkers let pass, and that they let nothing pass just beside it."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
from pyverbs.pyverbs_error import PyverbsRDMAError
from simulator import checks, network
from simulator.application import FLUSHED, NO_RECEIVE, OK, Application
from simulator.checks import Violation
from simulator.clock import MS
from simulator.network import Network
from simulator.patching import rewritten
from simulator.staged_posts import has_patience
from simulator.story import (
    armed,
    drop_next,
    ends,
    go,
    hole,
    is_answer,
    plan,
    post,
    split,
    telling,
    until,
    wait,
)

from shiftverbs.failover.qp.ending import Ending
from shiftverbs.native.ibv import AccessFlag, WcStatus
from shiftverbs.protocol import events as ev

Change = Callable[[Network], object]


def nothing(net: Network) -> None:
    """The run is as it is."""


def fires(net: Network, rule: str) -> None:
    with pytest.raises(Violation) as caught:
        checks.check(net)
    assert caught.value.rule == rule


# ---- a plain QP whose NIC dies tells of nothing ----------------------------------------------------------------------


def the_nic_of_a_plain_qp_dies(before: Change = nothing) -> Network:
    """b leaves, a's NIC dies, and a can only be told that it does so by an exception."""
    net = armed()
    a, b = ends(net)
    b.close()
    wait(net, 10)
    before(net)
    net.kill("a", 0)
    wait(net, 100)
    a.err()
    wait(net, 1000)
    return net


def test_a_plain_qp_need_not_be_flushed_by_a_dead_nic() -> None:
    with telling(the_nic_of_a_plain_qp_dies) as net:
        a = net.app("a")
        assert a.failed and not a.wcs
        checks.check(net)


def another_pairing_has_begun(net: Network) -> None:
    """As far as the judge knows."""
    with mock.patch.object(network, "_paired"):
        network._begun(net.app("a").endpoint.connection)


def its_qp_has_broken_before(net: Network) -> None:
    a = net.app("a")
    a.endpoint.hardware.to_error()
    wait(net, 1)
    a.wcs.clear()  # as if nobody had seen that


def it_withholds_errors(net: Network) -> None:
    """As if its protection were not taken from it when its peer leaves."""
    net.app("a").endpoint.core.guarded = True


def a_gate_is_shut(net: Network) -> None:
    """As if a MOVE were never called off."""
    net.app("a").endpoint.core.close_send()


class Waits:
    """A QPCore that has taken a send from the program, and not handed it over."""

    unwired = (1, 0)

    def __init__(self, core: Any) -> None:
        self._core = core

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)


class WaitsForRoom(Waits):
    """The same, where that waits for room."""

    def __init__(self, core: Any, capacity: int) -> None:
        super().__init__(core)
        self.outstanding = (capacity + 1, 0)


def a_send_waits(net: Network) -> None:
    """Though there is room."""
    a = net.app("a")
    a.endpoint.core = Waits(a.endpoint.core)  # type: ignore[assignment]


def its_queue_is_full(net: Network) -> None:
    """And more has been taken behind that, which is for no NIC yet."""
    core = net.app("a").endpoint.core
    net.app("a").endpoint.core = WaitsForRoom(core, net.capacity)  # type: ignore[assignment]


def it_is_at_its_end(net: Network) -> None:
    """And never comes there."""
    net.app("a").endpoint.core.begin_end()


close = Application.close


def both_send(app: Application) -> None:
    """One message each, before it closes its QP."""
    for each in (app, app.peer):
        post(each, "SEND")
    wait(app.net, 1)
    close(app)


@pytest.mark.parametrize("before", [another_pairing_has_begun, its_qp_has_broken_before])
def test_one_that_is_not_plain_any_more_is_told(before: Change) -> None:
    with telling(lambda: the_nic_of_a_plain_qp_dies(before)) as net:
        fires(net, "what failed is told")


@pytest.mark.parametrize("queue", ["send", "recv"])
def test_one_is_told_of_what_completed_before(queue: str) -> None:
    def story() -> Network:
        with mock.patch.object(Application, "close", both_send):
            return the_nic_of_a_plain_qp_dies()

    with telling(story) as net:
        checks.check(net)
        wcs = net.app("a").wcs
        wcs.remove(next(wc for wc in wcs if wc[0] == queue))
        with pytest.raises(Violation, match="what failed is told"):
            checks.what_failed_is_told(net, net.app("a"))


def test_one_that_is_flushed_is_flushed_to_the_end() -> None:
    with telling(the_nic_of_a_plain_qp_dies) as net:
        net.app("a").wcs.append(("recv", 0, FLUSHED))
        fires(net, "what failed is told")


@pytest.mark.parametrize("before", [it_withholds_errors, a_gate_is_shut, a_send_waits, it_is_at_its_end])
def test_one_that_withholds_something_is_told(before: Change) -> None:
    """Here nobody ends it."""

    def story() -> Network:
        with mock.patch.object(Ending, "begin", lambda *args: None):
            return the_nic_of_a_plain_qp_dies(before)

    with telling(story) as net:
        net.app("a").failed = True
        fires(net, "what failed is told")


def test_one_whose_sends_wait_for_room_is_a_plain_one() -> None:
    """What stands before them in the NIC's queue dies with that, and completes as little as they do."""

    def story() -> Network:
        with mock.patch.object(Ending, "begin", lambda *args: None):
            return the_nic_of_a_plain_qp_dies(its_queue_is_full)

    with telling(story) as net:
        net.app("a").failed = True
        assert "a" in net.died_plain
        checks.what_failed_is_told(net, net.app("a"))


def test_one_that_is_split_is_told() -> None:
    """Its sends are at home when that dies, and its receives are not: no NIC flushes those."""

    def story() -> Network:
        net = armed()
        a, b = ends(net)
        split(net, "b")
        assert a.endpoint.core.send_pair == 0
        b.close()
        wait(net, 10)
        a.endpoint.core.guarded = False
        with mock.patch.object(Ending, "begin", lambda *args: None):
            net.kill("a", 0)
            wait(net, 100)
            a.err()
            a.failed = True
            wait(net, 1000)
        return net

    with telling(story) as net:
        fires(net, "what failed is told")


# ---- a full queue of what was answered -------------------------------------------------------------------------------


def shut(net: Network) -> None:
    """b's port fails, and with it what it acknowledges."""
    net.wall("b", 0, True)


def lose_answers(net: Network) -> None:
    """Nothing has failed."""
    net.links["b", 0].hole = is_answer


def shut_too_early(net: Network) -> None:
    """What a posts afterwards is not concerned by that."""
    shut(net)
    net.wall("b", 0, False)
    wait(net, 1)
    lose_answers(net)


def shut_the_other_rail(net: Network) -> None:
    net.wall("b", 1, True)
    lose_answers(net)


def a_full_queue_is_answered(lose: Change = shut) -> Network:
    """a's four WRs are executed. b answers the first one before its NIC is asked again for its ACKs."""
    net = armed(capacity=4)
    a, b = ends(net)
    has_patience(a)
    a.endpoint.hardware.RETRY_NS = 50 * MS
    a.answers = a.begins = True
    lose(net)
    if lose is not shut:
        wait(net, 1)
    for _ in range(4):
        plan(a, "SEND", signaled=True)
    net.links["a", 0].delay_ns = 0
    go(a)
    assert len(b.received) == 4 and not a.endpoint.qp(0).completed
    net.wall("b", 0, False)
    net.wall("b", 1, False)
    net.links["b", 0].hole = lambda p: is_answer(p) and lose is not shut
    post(b, "SEND")
    wait(net, 1)
    assert len(a.received) == 1 and len(a.endpoint.qp(0).unacked) == 4
    post(a, "SEND")
    return net


class Full:
    """A QPCore that says once that there is no room."""

    def __init__(self, app: Application) -> None:
        self._app, self._core = app, app.endpoint.core

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    def post_send(self, wr: Any) -> None:
        self._app.endpoint.core = self._core
        raise PyverbsRDMAError("staged", errno.ENOMEM)


def refuse(app: Application) -> None:
    """A post of its is refused."""
    app.endpoint.core = Full(app)
    post(app, "SEND")


def test_a_queue_is_full_of_what_a_nic_waits_to_have_acknowledged() -> None:
    with telling(a_full_queue_is_answered) as net:
        a = net.app("a")
        assert a.plan and not a.refused_room
        wait(net, 200)
        assert not a.plan
        checks.check(net)


@pytest.mark.parametrize("lose", [lose_answers, shut_too_early, shut_the_other_rail])
def test_so_it_is_only_where_a_port_failed_since(lose: Change) -> None:
    with telling(lambda: a_full_queue_is_answered(lose)) as net:
        assert net.app("a").plan
        net.links["b", 0].hole = lambda p: False
        wait(net, 200)
        fires(net, "room is given by answers")


def test_only_what_was_answered_is_waited_for_so() -> None:
    with telling(a_full_queue_is_answered) as net:
        a = net.app("a")
        assert net.waits_for_ack(a) == 0
        a.endpoint.hardware.unacked.popleft()
        assert net.waits_for_ack(a) == 4


def test_what_its_qp_has_given_up_is_waited_for_until_it_has_left() -> None:
    with telling(a_full_queue_is_answered) as net:
        a = net.app("a")
        a.endpoint.hardware.to_error(WcStatus.RETRY_EXC_ERR)
        assert a.endpoint.core.send_pair == 0 and net.waits_for_ack(a) == 0
        until(net, lambda: a.endpoint.core.send_pair == 1, ms=100)
        assert a.endpoint.hardware.given_up and net.waits_for_ack(a) == len(a.posted)


def test_so_it_is_no_longer_than_the_nic_waits() -> None:
    with telling(a_full_queue_is_answered) as net:
        wait(net, 200)
        refuse(net.app("a"))
        wait(net, 200)
        fires(net, "room is given by answers")


def test_so_it_is_only_where_the_queue_is_full_of_that() -> None:
    def story() -> Network:
        with mock.patch.object(Network, "waits_for_ack", lambda net, app: 1):  # the first was acknowledged
            return a_full_queue_is_answered()

    with telling(story) as net:
        wait(net, 200)
        fires(net, "room is given by answers")


def test_what_is_answered_over_another_nic_takes_no_room() -> None:
    """Wherever it is waited for."""

    def story() -> Network:
        net = armed(capacity=4)
        a, b = ends(net)
        a.answers = a.begins = True
        split(net, "a")
        has_patience(a)
        net.wall("b", 1, True)
        for _ in range(4):
            plan(a, "SEND", signaled=True)
        go(a)
        post(b, "SEND")
        wait(net, 1)
        assert len(b.received) == 4 and len(a.received) == 1
        net.wall("b", 1, False)
        refuse(a)
        wait(net, 1000)
        return net

    with telling(story) as net:
        fires(net, "room is given by answers")


# ---- an error that is the peer's doing -------------------------------------------------------------------------------


@contextlib.contextmanager
def told(status: int, gone: bool) -> Iterator[Network]:
    """a's SEND has failed so. Then a message comes to its memory."""

    def story() -> Network:
        net = armed()
        a, b = ends(net)
        wr = post(a, "SEND")
        wait(net, 0.001)
        b.own_error = "it takes its memory away, sooner or later"
        b.buffers.closed = gone
        a._take(wr.ref, status, 0)
        post(b, "SEND")
        wait(net, 1)
        return net

    with telling(story) as net:
        yield net


def test_what_the_peer_has_done_is_shown_while_receives_complete() -> None:
    with told(NO_RECEIVE, gone=True) as net:
        checks.nothing_behind_a_flush(net)


@pytest.mark.parametrize(
    ("status", "gone"),
    [
        (NO_RECEIVE, False),
        *((int(status), True) for status in WcStatus if int(status) not in (OK, NO_RECEIVE)),
    ],
)
def test_nothing_else_is_shown_before_all_has_stopped(status: int, gone: bool) -> None:
    with told(status, gone) as net, pytest.raises(Violation, match="memory given back"):
        checks.nothing_behind_a_flush(net)


# ---- who is sent to too early ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def receives_are_being_posted() -> Iterator[Network]:
    """Those of all of b's QPs."""
    with telling(lambda: armed(qps=2)) as net:
        for app in (net.apps[1], net.apps[3]):
            app.endpoint.connection.key_wait.posting = ev.PostReceives(0, 1)
        yield net


@pytest.mark.parametrize(("left", "heard"), [(False, False), (True, False), (False, True), (True, True)])
def test_who_has_left_is_sent_to_once_its_peer_knows(left: bool, heard: bool) -> None:
    with receives_are_being_posted() as net:
        a, b, _, other = net.apps
        b.left = left
        if heard:
            net.let_go[a.name] = net.clock.now
        net.refused(b.endpoint.hardware)
        assert bool(net.too_early) is not (left and heard)
        net.too_early.clear()
        net.refused(other.endpoint.hardware)  # that is another program's
        with pytest.raises(Violation, match="before the peer sends"):
            checks.receives_before_messages(net)


# ---- who only waits --------------------------------------------------------------------------------------------------


def the_half_that_sends_breaks(
    first: Change = nothing, before: Change = nothing, behind: Change = nothing, pair: int = 1
) -> Network:
    """b has left a, whose sends would go to that pair, and its receives are on the other."""
    net = armed()
    a, b = ends(net)
    split(net, "a" if pair else "b")
    first(net)
    wait(net, 1)
    b.close()
    wait(net, 10)
    before(net)
    net.qp_fatal("a", pair)
    wait(net, 10)
    behind(net)
    wait(net, 1000)
    return net


def test_who_only_waits_is_told_at_its_next_send() -> None:
    with telling(lambda: the_half_that_sends_breaks(a_write_completes)) as net:
        a = net.app("a")
        assert not a.failed
        checks.check(net)
        post(a, "SEND")
        wait(net, 1000)
        assert a.failed
        checks.check(net)


def test_who_only_waits_is_flushed_where_its_default_qp_has_broken() -> None:
    """As with plain verbs: a NIC that lives flushes the receives as well."""
    with telling(lambda: the_half_that_sends_breaks(a_write_completes, pair=0)) as net:
        assert net.app("a").failed
        checks.check(net)
    with (
        rewritten(Ending, "lose", (" or (k == 0 and not c.nic(0).dead)", "")),
        telling(lambda: the_half_that_sends_breaks(a_write_completes, pair=0)) as net,
    ):
        fires(net, "what failed is told")


def a_write_completes(net: Network) -> None:
    post(net.app("a"), "WRITE")


def a_sends(net: Network) -> None:
    post(net.app("a"), "WRITE", signaled=False)


def a_sends_in_vain(net: Network) -> None:
    has_patience(net.app("a"))
    hole(net, "a", "WRITE", 1)
    a_sends(net)


def its_receives_lose_their_nic(net: Network) -> None:
    net.kill("a", 0)


def its_receives_break(net: Network) -> None:
    net.app("a").endpoint.hardware.to_error()


@pytest.mark.parametrize(
    ("first", "before", "behind"),
    [
        (a_sends_in_vain, nothing, nothing),
        (nothing, a_sends_in_vain, nothing),
        (nothing, nothing, a_sends),
        (nothing, nothing, its_receives_lose_their_nic),
        (nothing, nothing, its_receives_break),
    ],
)
def test_who_does_more_than_wait_is_told_at_once(first: Change, before: Change, behind: Change) -> None:
    """As if a QP that was left alone never ended, but only at its next send; and not then."""
    with (
        rewritten(Ending, "lose", ("if k == core.recv_pair or core.outstanding[0] or", "if False and")),
        rewritten(Ending, "at_post", ("self.begin()", "pass")),
        telling(lambda: the_half_that_sends_breaks(first, before, behind)) as net,
    ):
        assert not net.app("a").failed
        fires(net, "what failed is told")


def test_who_has_sent_since_is_told() -> None:
    """Also where we have lost sight of that."""
    with telling(lambda: the_half_that_sends_breaks(a_write_completes)) as net:
        net.app("a").posted[0].posted_ns = net.clock.now
        fires(net, "what failed is told")


def test_who_was_not_left_is_told_at_once() -> None:
    with telling(the_half_that_sends_breaks) as net:
        del net.let_go["a"]
        fires(net, "what failed is told")


# ---- memory that is a program's again --------------------------------------------------------------------------------


def test_what_was_told_as_complete_is_not_sent_again() -> None:
    """Whatever stands there by then."""
    with telling(armed) as net:
        a, _ = ends(net)
        qp = a.endpoint.hardware
        post(a, "SEND")
        net.deliver()
        (wqe,) = qp.unacked
        qp._transmit(wqe)
        wait(net, 1)
        checks.check(net)
        qp._transmit(wqe)
        fires(net, "no DMA where none may be")


@pytest.mark.parametrize("opcode", ["READ", "FADD"])
def test_what_was_told_as_failed_brings_nothing(opcode: str) -> None:
    with telling(armed) as net:
        a, _ = ends(net)
        net.links["b", 0].delay_ns = 2 * MS
        wr = post(a, opcode, 8)
        wait(net, 1)
        a._take(wr.ref, FLUSHED, 0)
        wait(net, 5)
        with pytest.raises(Violation, match="response of a's WR 0, by a0, at"):
            checks.nothing_behind_a_flush(net)
        with pytest.raises(Violation, match="it is complete, as was told"):
            checks.nothing_strays(net)


@pytest.mark.parametrize("opcode", ["WRITE", "WRITE_IMM", "READ", "FADD"])
def test_nothing_of_the_peers_is_executed_behind_a_flush(opcode: str) -> None:
    with telling(armed) as net:
        a, b = ends(net)
        for _ in range(2):
            checks.nothing_behind_a_flush(net)
            post(b, opcode, 8)
            wait(net, 1)
            a.flushed = a.flushed or net.clock.now
        with pytest.raises(Violation, match="memory given back"):
            checks.nothing_behind_a_flush(net)


def test_a_read_is_not_answered_again_behind_a_flush() -> None:
    with telling(armed) as net:
        a, b = ends(net)
        drop_next(net, "a", 0, "resp")
        post(b, "READ", 1)
        wait(net, 1)
        a.flushed = net.clock.now
        checks.nothing_behind_a_flush(net)
        wait(net, 10)
        with pytest.raises(Violation, match="a READ that comes again"):
            checks.nothing_behind_a_flush(net)


@pytest.mark.parametrize("opcode", ["WRITE", "READ"])
def test_what_was_withdrawn_is_not_executed(opcode: str) -> None:
    """Here the peer's NIC does not know that, and its backups neither."""
    with telling(armed) as net:
        a, b = ends(net)
        b.withdraw(0, (opcode,))
        assert b.withdrawn_ns is not None
        a.trespasses = True
        post(a, "SEND")
        wait(net, 1)
        checks.nothing_without_a_right(net)
        post(a, opcode, 1)
        wait(net, 1)
        fires(net, "what names no memory fails")
        with pytest.raises(Violation, match="no right, no work"):
            checks.nothing_without_a_right(net)


def test_who_obeys_sends_a_message_instead() -> None:
    with telling(armed) as net:
        a, b = ends(net)
        b.withdraw(int(AccessFlag.REMOTE_WRITE), ("WRITE", "WRITE_IMM"))
        wr = post(a, "WRITE", 1)
        wait(net, 1)
        assert wr.opcode == "SEND" and len(b.received) == 1
        checks.check(net)
