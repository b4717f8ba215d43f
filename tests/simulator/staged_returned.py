# SPDX-License-Identifier: BSD-3-Clause
"""Stories of memory that is a program's again, whatever else but messages would touch it. As staged.py."""

from __future__ import annotations

from collections.abc import Callable

from simulator.application import Application
from simulator.clock import MS
from simulator.network import Network
from simulator.story import Story, armed, away, ends, go, hole, plan, post, tell, wait

Change = Callable[[Network], object]
NEVER = 1_000_000


def _slow_away(net: Network) -> tuple[Application, Application]:
    """Traffic is on pair 1, whose keys are known, and where a's NIC takes 20 ms for a command."""
    away(net)
    for app in ends(net):
        post(app, "WRITE", 1)
    wait(net, 5)
    net.nics["a"][1].command_ns = 20 * MS
    return ends(net)


def _reads_slowly(net: Network) -> None:
    """a reads, and each answer takes 5 ms."""
    a, _ = ends(net)
    net.links["b", 1].delay_ns = 5 * MS
    for cell in range(4):
        plan(a, "READ", cell, signaled=True)
    go(a)


def _sends_in_vain(net: Network, opcode: str = "WRITE") -> None:
    """a's NIC sends again and again what b's never gets, and does not give up."""
    a, _ = ends(net)
    qp = a.endpoint.qp(1)
    assert qp is not None
    qp.RETRIES = NEVER
    hole(net, "a", opcode, 1)
    post(a, opcode, 1)
    wait(net, 1)


def _writes_slowly(net: Network) -> None:
    """b writes, and it takes 5 ms until that is there."""
    _, b = ends(net)
    net.links["b", 1].delay_ns = 5 * MS
    for cell in range(4):
        plan(b, "WRITE", cell, signaled=True)
    go(b)


def _gives_up(net: Network, work: Change) -> Network:
    """Something of ours fails while a's NIC is at work, on another's behalf or its own."""
    a, _ = _slow_away(net)
    work(net)
    tell(a, lambda: a.endpoint.connection.give_up("staged"))
    wait(net, 500)
    assert a.failed
    net.app("b").close()
    wait(net, 100)
    return net


def we_fail_while_a_peer_writes() -> Network:
    """a's memory is its own again when b's WRITEs cannot come any more."""
    return _gives_up(armed(), _writes_slowly)


def we_fail_while_reads_are_answered() -> Network:
    """And when no result of its own READs can."""
    return _gives_up(armed(), _reads_slowly)


def we_fail_while_a_nic_sends() -> Network:
    """And when its NIC does not send out of it any more."""
    return _gives_up(armed(), _sends_in_vain)


def _resets(work: Change) -> Network:
    """a moves its QP to RESET while its NIC is at work: all of its memory is its own when that returns."""
    net = armed()
    a, _ = _slow_away(net)
    work(net)
    a.reset()
    assert a.was_reset
    wait(net, 500)
    return net


def a_qp_is_reset_while_reads_are_answered() -> Network:
    """None of them lands behind that."""
    return _resets(_reads_slowly)


def a_qp_is_reset_while_its_nic_sends() -> Network:
    """Nothing is sent behind that."""
    return _resets(_sends_in_vain)


def a_qp_is_reset_while_a_peer_writes() -> Network:
    """Nothing is written behind that."""
    return _resets(_writes_slowly)


def _closes(work: Change) -> Network:
    """a closes its QP while its NIC is at work."""
    net = armed()
    a, _ = _slow_away(net)
    work(net)
    a.close()
    wait(net, 500)
    return net


def a_qp_is_closed_while_reads_are_answered() -> Network:
    """None of them lands behind that."""
    return _closes(_reads_slowly)


def a_qp_is_closed_while_its_nic_sends() -> Network:
    """Nothing is sent behind that."""
    return _closes(_sends_in_vain)


def a_qp_is_closed_while_a_peer_writes() -> Network:
    """Nothing is written behind that."""
    return _closes(_writes_slowly)


def memory_is_taken_away_that_a_backup_sends_from() -> Network:
    """a deregisters what it sends from: no NIC reads that when the verb has returned."""
    net = armed()
    a, _ = _slow_away(net)
    _sends_in_vain(net)
    a.take_memory_away()
    wait(net, 500)
    return net


CLOSE = ("close_while_backups_are_at_work",)
RESET = ("reset_while_backups_are_at_work",)
TOLD: dict[Story, tuple[str, ...]] = {
    we_fail_while_a_peer_writes: ("flush_at_once_where_we_failed",),
    we_fail_while_reads_are_answered: ("flush_at_once_where_we_failed",),
    we_fail_while_a_nic_sends: ("flush_at_once_where_we_failed",),
    a_qp_is_reset_while_reads_are_answered: RESET,
    a_qp_is_reset_while_its_nic_sends: RESET,
    a_qp_is_reset_while_a_peer_writes: RESET,
    a_qp_is_closed_while_reads_are_answered: CLOSE,
    a_qp_is_closed_while_its_nic_sends: CLOSE,
    a_qp_is_closed_while_a_peer_writes: CLOSE,
    memory_is_taken_away_that_a_backup_sends_from: ("deregister_beside_the_backups",),
}
