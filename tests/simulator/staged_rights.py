# SPDX-License-Identifier: BSD-3-Clause
"""Stories of what the application changes of a QP, and of what its NICs are allowed and able to do. As staged.py."""

from __future__ import annotations

import functools

from simulator.clock import MS, US
from simulator.host import ALL_RIGHTS
from simulator.network import Network
from simulator.rnic import Nic
from simulator.story import (
    Story,
    armed,
    end,
    ends,
    executed,
    fail_over,
    feed,
    hole,
    no_hole,
    on,
    post,
    sends,
    until,
    wait,
    went,
)

from shiftverbs.native.ibv import AccessFlag, AtomicCap
from shiftverbs.protocol import events as ev

NEVER = 1_000_000


def _no_writes(net: Network) -> None:
    """b's program withdraws the right to write."""
    b = net.app("b")
    b.endpoint.set_rights(ALL_RIGHTS & ~AccessFlag.REMOTE_WRITE)


def _writes_all_the_same(net: Network) -> Network:
    """Traffic goes to pair 1, and a's program writes."""
    a, _ = ends(net)
    fail_over(net)
    a.own_error = "it has no right to write"
    wr = post(a, "WRITE", 1)
    wait(net, 500)
    assert a.failed and not executed(net, wr), "it has no right to"
    return net


def a_right_is_withdrawn() -> Network:
    """It is gone on all pairs."""
    net = armed()
    _no_writes(net)
    return _writes_all_the_same(net)


def a_nic_keeps_a_right_that_is_withdrawn() -> Network:
    """b's backup does not carry out the change: its QP is of no use before it is made anew."""
    net = armed()
    net.nics["b"][1].refusing = 1
    _no_writes(net)
    return _writes_all_the_same(net)


def a_qp_is_changed_that_has_broken() -> Network:
    """Nobody has seen it yet, and the change is not refused: what takes over will have it."""
    net = armed()
    a, _ = ends(net)
    net.hold_cqes("a", 0, True)
    a.endpoint.hardware.to_error(12)
    net.clock.later(1 * MS, net.hold_cqes, "a", 0, False)
    a.change_rights(ALL_RIGHTS & ~AccessFlag.REMOTE_ATOMIC)
    assert a.rights != ALL_RIGHTS, "it was refused"
    post(a, "SEND")
    return end(net)


def a_fence_needs_a_right() -> Network:
    """b has published that nobody may write any more: a's MOVE waits for a WR of the application's as its fence."""
    net = armed(receives=4, at_start=0)
    a, b = ends(net)
    _no_writes(net)
    wait(net, 10)
    post(a, "SEND", signaled=False)
    post(b, "FADD", 8, data=1)
    b.endpoint.hardware.RETRIES = NEVER
    a.endpoint.prefer(1)
    net.links["a", 0].hole = lambda p: getattr(p, "kind", None) == "resp"
    wait(net, 20)
    with b.host:
        for _ in range(3):
            b.post_recv()
    wait(net, 20)
    no_hole(net, "a", 0)
    post(a, "SEND")
    end(net)
    assert all(on(app, 1) for app in ends(net))
    return net


def a_receive_was_told_first_of_a_refused_fence() -> Network:
    """b cannot follow, having an atomic outstanding, and gives up: a never asked for what was refused."""
    net = armed()
    a, b = ends(net)
    hole(net, "b", "FADD", 0)
    post(b, "FADD", 8, data=1)
    b.endpoint.hardware.rights &= ~AccessFlag.REMOTE_WRITE
    hardware = a.endpoint.hardware
    hardware.to_error = functools.partial(hardware.to_error, receives_first=True)
    post(a, "SEND", signaled=False)
    feed(b, ev.PathHealth(1, False))
    net.links["a", 0].delay_ns = 500 * US
    a.endpoint.prefer(1)
    until(net, lambda: not a.endpoint.core.send_is_open, ms=50)
    for _ in range(2):
        post(a, "SEND")  # behind the fence
    wait(net, 1000)
    assert sends(a)[-2:] == ["RETRY_EXC_ERR", "WR_FLUSH_ERR"], sends(a)
    return net


def a_fence_is_refused() -> Network:
    """b's entry does not say yet that nobody may write. What was refused once is not tried again before it changes."""
    net = armed(receives=8, at_start=0)
    a, b = ends(net)
    b.host.exchanger.go_away(lose_lease=False)
    _no_writes(net)
    for target in (1, 0):
        post(a, "SEND", signaled=False)
        a.endpoint.prefer(target)
        wait(net, 50)
        with b.host:
            b.post_recv()
        wait(net, 50)
    assert len(went(net, ev.SwitchStarted, a)) == 1
    b.host.exchanger.come_back()
    post(a, "SEND")
    with b.host:
        b.post_recv()
    return end(net)


def atomics_on_a_backup() -> Network:
    """The NICs are atomic to themselves alone: a backup carries out no atomic, others may be at the same word."""

    def own(nics: dict[str, list[Nic]]) -> None:
        for nic in (*nics["a"], *nics["b"]):
            nic.atomic_cap = AtomicCap.HCA

    net = armed(with_nics=own)
    a, _ = ends(net)
    fail_over(net)
    a.own_error = "it has no right to atomics there"
    wr = post(a, "FADD", 8, data=1)
    wait(net, 500)
    assert a.failed and not executed(net, wr), "it is not atomic to others"
    return net


def tables_of_p_keys_differ() -> Network:
    """The program's partition is not at the same place in each port's table."""

    def tables(nics: dict[str, list[Nic]]) -> None:
        for nic in (*nics["a"], *nics["b"]):
            nic.pkeys, nic.pkey_index = [0xFFFF, 0x8001], 1
        nics["a"][1].pkeys = [0x8001, 0xFFFF]

    net = armed(with_nics=tables)
    a, _ = ends(net)
    fail_over(net)
    post(a, "SEND")
    return end(net)


SURVIVED: dict[Story, tuple[str, ...]] = {
    a_qp_is_changed_that_has_broken: ("leave_a_broken_qp_to_others",),
    a_fence_needs_a_right: ("publish_no_change_of_rights",),
    tables_of_p_keys_differ: ("use_the_default_nics_pkey_index",),
    a_fence_is_refused: ("post_a_refused_fence_again",),
}


ENDED: dict[Story, tuple[str, ...]] = {
    atomics_on_a_backup: ("give_every_backup_the_right_to_atomics",),
    a_right_is_withdrawn: ("leave_changes_to_a_later_life",),
    a_nic_keeps_a_right_that_is_withdrawn: ("serve_with_rights_that_were_withdrawn",),
}


TOLD: dict[Story, tuple[str, ...]] = {
    a_receive_was_told_first_of_a_refused_fence: ("tell_what_refused_our_fence",),
}
