# SPDX-License-Identifier: BSD-3-Clause
"""Stories of what NICs answer to an application's changes, and of who waits for that, or does not any more.

As staged.py.
"""

from __future__ import annotations

from pyverbs.pyverbs_error import PyverbsRDMAError
from simulator.application import Application
from simulator.clock import MS
from simulator.host import ALL_RIGHTS
from simulator.network import Network
from simulator.rnic import RTS
from simulator.staged_changes import a_write_fails, begins_to_withdraw, is_busy, no_writes
from simulator.story import (
    Story,
    armed,
    away,
    end,
    ends,
    fail_over,
    feed,
    post,
    split,
    tell,
    until,
    wait,
    went,
)

from shiftverbs.native.ibv import AccessFlag
from shiftverbs.protocol import events as ev

# ---- a carrier that refuses ------------------------------------------------------------------------------------------


def a_right_is_given_twice_and_refused_once() -> Network:
    """The second thread's holds, and is withdrawn later like any: nobody takes the carrier for one that has it not."""
    net = _away_with_less()
    a, b = ends(net)
    net.nics["b"][1].command_ns = 50 * MS
    given: list[int] = []

    def again() -> None:
        b.endpoint.set_rights(ALL_RIGHTS)
        given.append(ALL_RIGHTS)

    net.clock.later(1 * MS, again)
    _is_refused(b)
    until(net, lambda: bool(given))
    net.nics["b"][1].command_ns = 30_000
    _sends_elsewhere(b)
    no_writes(b)
    return a_write_fails(net)


def a_right_is_given_that_a_carrier_has_refused() -> Network:
    """It is given once more when another pair is asked, and the one that has refused it gets it."""
    net = _away_with_less()
    a, b = ends(net)
    _is_refused(b)
    _sends_elsewhere(b)
    b.endpoint.set_rights(ALL_RIGHTS)
    post(a, "WRITE", 1)
    return end(net)


def _away_with_less() -> Network:
    net = armed(pairs=3)
    _, b = ends(net)
    no_writes(b)
    wait(net, 50)
    away(net)
    return net


def _is_refused(app: Application) -> None:
    """Its carrier's NIC does not give the peer a right."""
    app.net.nics[app.device.name][1].refusing = 1
    try:
        app.endpoint.set_rights(ALL_RIGHTS)
    except PyverbsRDMAError:
        return
    raise AssertionError("its NIC has refused that")


def _sends_elsewhere(app: Application) -> None:
    """It is asked first when something is changed; what it receives stays on pair 1."""
    feed(app.peer, ev.PathHealth(2, False))
    app.endpoint.prefer(2)
    until(app.net, lambda: app.endpoint.core.send_pair == 2 and not app.endpoint.protocol.busy, ms=50)
    wait(app.net, 1)
    assert app.endpoint.core.recv_pair == 1


def a_withdrawal_is_said_again_that_is_refused() -> Network:
    """Who says it again does not return before the pair that refuses it serves nobody."""
    net = armed()
    a, b = ends(net)
    split(net, "a")
    net.nics["b"][1].command_ns, net.nics["b"][1].refusing = 50 * MS, 1
    qp = b.endpoint.qp(1)
    assert qp is not None
    serves: list[bool] = []

    def again() -> None:
        no_writes(b)
        serves.append(qp.state == RTS and bool(qp.rights & AccessFlag.REMOTE_WRITE))

    net.clock.later(1 * MS, again)
    no_writes(b)
    until(net, lambda: bool(serves))
    assert serves == [False]
    return end(net)


# ---- nobody waits any more -------------------------------------------------------------------------------------------


def a_withdrawal_is_broken_off_and_its_pair_is_of_use() -> Network:
    """Ctrl-C while a healthy NIC is waited for: it takes the change all the same, and carries the traffic later."""
    net = armed()
    a, b = ends(net)
    net.nics["b"][1].command_ns = 50 * MS
    begins_to_withdraw(b)
    wait(net, 51)
    _has_it(net)
    fail_over(net)
    post(a, "SEND")
    return end(net)


def a_finalizer_changes_a_qp() -> Network:
    """In the driver, which cannot heed an answer meanwhile: the verb returns, and the pair stays in use."""
    return _is_changed_in_the_driver(armed())


def a_finalizer_changes_a_qp_that_is_away() -> Network:
    """The same of the pair that carries the traffic."""
    net = armed()
    fail_over(net)
    wait(net, 100)
    return _is_changed_in_the_driver(net)


def a_finalizer_changes_a_qp_while_its_carrier_hangs() -> Network:
    """The driver waits for no NIC: the verb returns, and the pair has the change when its NIC is well again."""
    net = armed()
    fail_over(net)
    wait(net, 100)
    net.nics["b"][1].hung = True
    net.clock.later(300 * MS, net.nics["b"][1].unhang)
    return _is_changed_in_the_driver(net, 400)


def _is_changed_in_the_driver(net: Network, takes_ms: int = 10) -> Network:
    a, b = ends(net)
    switches = len(went(net, ev.SwitchStarted))
    began = net.clock.now
    took: list[int] = []

    def finalizer() -> None:
        no_writes(b)
        took.append(net.clock.now - began)

    tell(b, finalizer)
    until(net, lambda: bool(took))
    assert took[0] < 10 * MS
    wait(net, takes_ms)
    _has_it(net)
    post(a, "SEND")
    end(net)
    assert len(went(net, ev.SwitchStarted)) == switches
    return net


def _has_it(net: Network) -> None:
    """b's backup has what its program has said, and is in use."""
    _, b = ends(net)
    qp = b.endpoint.qp(1)
    assert qp is not None
    assert qp.state == RTS and not qp.rights & AccessFlag.REMOTE_WRITE
    assert b.endpoint.connection.given[1].state == RTS and b.endpoint.protocol.pairs[1].works


def a_qp_is_closed_while_its_change_waits_for_a_busy_nic() -> Network:
    """Nothing is left that could be waited for: the verb returns."""
    net = armed(pairs=3)
    _, b = ends(net)
    net.nics["b"][1].command_ns = 20 * MS
    is_busy(b, 2)
    began = net.clock.now
    net.clock.later(5 * MS, b.endpoint.close)
    no_writes(b)
    assert net.clock.now - began < 200 * MS
    b.left = b.closed = True
    wait(net, 3000)
    return net


SURVIVED: dict[Story, tuple[str, ...]] = {
    a_right_is_given_that_a_carrier_has_refused: ("note_what_a_carrier_has_refused",),
    a_withdrawal_is_said_again_that_is_refused: ("leave_the_refusal_of_anothers_change_to_it",),
    a_withdrawal_is_broken_off_and_its_pair_is_of_use: ("give_up_what_nobody_waits_for",),
    a_finalizer_changes_a_qp: ("give_up_what_the_driver_cannot_wait_for",),
    a_finalizer_changes_a_qp_that_is_away: ("wait_in_the_driver_for_an_answer",),
    a_finalizer_changes_a_qp_while_its_carrier_hangs: (
        "wait_in_the_driver_for_an_answer",
        "wait_in_the_driver_for_a_nic",
    ),
}

TOLD: dict[Story, tuple[str, ...]] = {
    a_right_is_given_twice_and_refused_once: ("take_back_what_another_has_changed_since",),
    a_qp_is_closed_while_its_change_waits_for_a_busy_nic: ("wait_for_the_nics_of_a_closed_qp",),
}
