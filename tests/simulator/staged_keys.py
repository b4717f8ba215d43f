# SPDX-License-Identifier: BSD-3-Clause
"""Stories of memory: keys that are told and withdrawn, registrations that take their time, rights. As staged.py."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable
from typing import Any
from unittest import mock

from pyverbs.pyverbs_error import PyverbsRDMAError
from simulator.application import CELLS, Application
from simulator.clock import MS, SECOND
from simulator.host import ALL_RIGHTS, OwnMr
from simulator.network import Network
from simulator.story import (
    Story,
    another_window,
    armed,
    at_home,
    away,
    end,
    ends,
    fail_over,
    go,
    is_request,
    no_answers,
    no_hole,
    on,
    path_failed,
    plan,
    post,
    said,
    sends,
    until,
    wait,
)

from shiftverbs.failover.services import memory_keys
from shiftverbs.protocol.messages import Keys
from shiftverbs.wr import SGE, SendWR

NEVER = 1_000_000


def window_again(app: Application, other_key_on: int = 1) -> None:
    """What the peer reaches is deregistered, and registered anew by the same rkey; the backup has another one for it.

    For meanwhile somebody else on that machine got the key that it had there.
    """
    app.window.close()
    wait(app.net, 1)
    app.device.hardware[other_key_on].new_key()
    was = app.window.rkey
    another_window(app)
    assert app.window.rkey == was


# ---- what was told, and is worth nothing any more --------------------------------------------------------------------


def ready_makes_keys_worthless() -> Network:
    """b registers its memory anew, which nobody need be told of at home. Then traffic goes where it has another key.

    Nothing but READY is heard that says so.
    """
    net = armed()
    a, b = ends(net)
    post(a, "WRITE", 1)
    wait(net, 10)
    window_again(b)
    for k in range(net.pairs):
        net.links["b", k].hole = lambda p: any(isinstance(m, Keys) for m in said(p))
    fail_over(net)
    post(a, "WRITE", 2)
    wait(net, 5)
    no_hole(net, "b", 0, 1)
    return end(net)


def an_answer_is_overtaken() -> Network:
    """An answer of b's is on its way for long, to a question that a asks again; b withdraws what it says meanwhile."""
    net = armed()
    a, b = ends(net)
    net.links["b", 0].delay_ns = 30 * MS
    post(a, "WRITE", 1)
    wait(net, 0.5)
    net.links["b", 0].delay_ns = 10_000
    window_again(b)
    wait(net, 10)
    fail_over(net)
    wait(net, 30)
    post(a, "WRITE", 2)
    return end(net)


def very_many_withdrawals() -> Network:
    """b has withdrawn more than it remembers, when a hears of the first of them."""
    net = armed(capacity=64)
    a, b = ends(net)
    windows = [b.window]
    post(a, "WRITE", 1)
    for _ in range(memory_keys.GONE_KEPT + 1):
        another_window(b)
        windows.append(b.window)
        wait(net, 1)
        post(a, "WRITE", 1)
    wait(net, 20)
    for window in windows:
        window.close()
        wait(net, 0.1)
    for nic in net.nics["b"]:  # others use all of these keys, but the first one's there
        for _ in windows[nic.k == 0 :]:
            nic.new_key()
    another_window(b)
    first = b.window
    assert first.rkey == windows[0].rkey
    another_window(b)
    wait(net, 5)
    post(a, "WRITE", 1)
    wait(net, 20)
    b.window = first
    fail_over(net)
    post(a, "WRITE", 2)
    return end(net)


def a_key_is_given_out_again() -> Network:
    """Away, a is not heard to forget what an rkey was for a while; nobody has it for other memory yet."""
    net = armed()
    a, b = ends(net)
    away(net)
    post(a, "WRITE", 1)
    wait(net, 10)
    for k in range(net.pairs):
        net.links["b", k].hole = lambda p: any(isinstance(m, Keys) for m in said(p))
    net.clock.later(20 * MS, no_hole, net, "b", 0, 1)
    window_again(b)
    post(a, "WRITE", 2)
    return end(net)


# ---- what is still on its way by a key -------------------------------------------------------------------------------


def _other_memory(app: Application) -> OwnMr:
    """Memory that has nothing to do with what the peer knows, though it may reach it."""
    return OwnMr(app.device, app.memory.address(app._spare[0]), CELLS, ALL_RIGHTS, iova=0)


def _window_goes(net: Network) -> tuple[Application, Application]:
    """b's program takes away what a's WRITE is on its way to, which gets lost once and is sent again 4 ms later."""
    net.links["a", 1].drops += [lambda p: is_request(p, "WRITE")]
    a, b = ends(net)
    b.own_error = "it has taken its memory away"
    return a, b


def other_memory_gets_no_key_that_is_in_use() -> Network:
    """What b registers next is not what a's WRITE means: that fails."""
    net = armed()
    a, b = ends(net)
    away(net)
    post(a, "WRITE", 1)
    wait(net, 10)
    _window_goes(net)
    post(a, "WRITE", 2)
    b.window.close()
    wait(net, 1)
    net.nics["b"][0].new_key()
    _other_memory(b)
    wait(net, 100)
    return net


class _Meanwhile:
    """A data path's table of keys, and what another thread does just before one is taken out."""

    def __init__(self, keys: Any, meanwhile: Callable[[], object]) -> None:
        self._keys, self._meanwhile = keys, meanwhile

    def del_remote(self, rkey: int) -> None:
        self._meanwhile()
        self._keys.del_remote(rkey)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._keys, name)


def a_key_goes_while_a_program_posts() -> Network:
    """a posts its WRITE, in another thread, just before it forgets the key that this goes by."""
    net = armed()
    a, b = ends(net)
    away(net)
    post(a, "WRITE", 1)
    wait(net, 10)
    _window_goes(net)
    theirs = a.endpoint.connection.keys._theirs
    theirs.remote = _Meanwhile(theirs.remote, lambda: post(a, "WRITE", 2))
    b.window.close()
    wait(net, 1)
    net.nics["b"][0].new_key()
    _other_memory(b)
    wait(net, 100)
    return net


def a_key_that_is_in_use_comes_back_to_its_nic() -> Network:
    """Another process had it when it was looked for; b's memory gets it, and the NIC takes its time to say so."""
    net = armed()
    a, b = ends(net)
    away(net)
    post(a, "WRITE", 1)
    wait(net, 10)
    key = net.nics["b"][1].regions
    mine = next(k for k, region in key.items() if region.iova == 0)
    _window_goes(net)
    post(a, "WRITE", 2)
    b.window.close()
    wait(net, 1)
    net.nics["b"][0].new_key()
    assert net.nics["b"][1].new_key() == mine
    verbs, asked = b.host.verbs, []
    register = verbs.reg_mr

    def slowly(pd: int, *what: int) -> tuple[int, int, int]:
        nic = verbs.pds[pd].nic
        asked.append(nic.k)
        if asked.count(1) == 2:  # behind the look which keys it would give out
            nic._free_keys.append(mine)
        made = register(pd, *what)
        if asked.count(1) == 2:
            net.wait(lambda: False, 0.006)
        return made

    verbs.reg_mr = slowly  # type: ignore[method-assign]
    _other_memory(b)
    wait(net, 100)
    assert asked.count(1) >= 2
    return net


def a_wr_that_never_ends_holds_all_keys() -> Network:
    """As many as b may hold for a: none of its memory is told to a any more, and a's next WR does not wait for ever."""
    net = armed(receives=4, at_start=0)
    a, b = ends(net)
    away(net)
    post(a, "WRITE", 1)
    wait(net, 10)
    plan(a, "SEND")  # b has no receive for it
    plan(a, "WRITE", 1)
    go(a)
    b.window.close()
    wait(net, 1)
    with mock.patch.object(memory_keys, "HELD_MOST", 1):
        another_window(b)
        post(a, "WRITE", 1)
        wait(net, 10_000)
    assert a.failed, "it waits for ever"
    return net


def who_is_home_again_holds_no_key() -> Network:
    """a's WRITE was on its way by a key that was withdrawn since, and was done at home; nobody signaled that.

    Another QP is away still, and is told of b's memory, of which so many keys may be held.
    """
    net = armed(qps=2)
    a, b = ends(net)
    other, its_peer = net.apps[2:]
    away(net)
    other.endpoint.prefer(1)
    until(net, lambda: on(other, 1) and on(its_peer, 1), ms=200)
    post(a, "WRITE", 1)
    wait(net, 10)
    no_answers(net, "b", 1)
    post(a, "WRITE", 2, signaled=False)
    wait(net, 1)
    window_again(b)
    path_failed(a, 1)
    a.endpoint.prefer(0)
    no_hole(net, "b", 1)
    until(net, lambda: at_home_(a), ms=100)
    wait(net, 20)
    with mock.patch.object(memory_keys, "HELD_MOST", 1):
        another_window(its_peer)
        post(other, "WRITE", 1)
        wait(net, 10_000)
    assert sends(other) == ["SUCCESS"]
    return end(net)


def at_home_(app: Application) -> bool:
    """Whether its sends are, and go on."""
    return app.endpoint.core.send_pair == 0 and app.endpoint.core.send_is_open


# ---- memory that is not there ----------------------------------------------------------------------------------------


def memory_of_ours_is_gone() -> Network:
    """Away, a's program names memory that it has taken away: its NIC refuses that, in its turn."""
    net = armed()
    a, _ = ends(net)
    away(net)
    known, gone = a.buffers, OwnMr(a.device, a.buffers.region[0], a.buffers.words, 1)
    gone.close()
    wait(net, 1)
    plan(a, "SEND", signaled=True)
    go(a)
    a.own_error, a.buffers = "it named memory that is gone", gone
    plan(a, "SEND", signaled=True)
    go(a)
    a.buffers = known
    wait(net, 500)
    assert sends(a) == ["SUCCESS", "LOC_PROT_ERR"], sends(a)
    return net


def memory_of_the_peers_is_not_there() -> Network:
    """Away, a's program names memory that b never had: b's NIC would refuse that, in its turn."""
    net = armed()
    a, _ = ends(net)
    away(net)
    plan(a, "SEND", signaled=True)
    plan(a, "WRITE", 1, signaled=True).bad = True
    a.own_error = "it named memory that is not there"
    go(a)
    wait(net, 500)
    assert sends(a) == ["SUCCESS", "REM_ACCESS_ERR"], sends(a)
    return net


def a_key_that_nobody_can_tell() -> Network:
    """Away, a was left by its peer, and names memory whose key there it has not asked for before."""
    net = armed()
    a, b = ends(net)
    away(net)
    b.close()
    wait(net, 100)
    assert not a.failed
    post(a, "WRITE", 1)
    wait(net, 5000)
    assert a.failed, "it never ends"
    return net


# ---- registrations that take their time ------------------------------------------------------------------------------


def memory_takes_longer_than_a_peer_may() -> Network:
    """Away, a sends from memory that its NIC registers for three seconds."""
    net = armed()
    a, _ = ends(net)
    away(net)
    net.nics["a"][1].registering_ns = 3 * SECOND
    a.renew_buffers()
    post(a, "SEND")
    wait(net, 3100)
    net.nics["a"][1].registering_ns = 50_000
    return end(net)


def another_nic_hangs() -> Network:
    """On the third rail b's NIC hangs. a's WR waits for the second rail's, which has much to register, and works."""
    net = armed(pairs=3)
    a, b = ends(net)
    away(net)
    post(a, "WRITE", 1)
    wait(net, 10)
    net.nics["b"][1].registering_ns = 4 * SECOND
    net.nics["b"][2].hung = True
    another_window(b)
    another_window(b)
    post(a, "WRITE", 2)
    wait(net, 9000)
    net.nics["b"][2].unhang()
    net.nics["b"][1].registering_ns = 50_000
    return end(net)


def memory_comes_again_that_no_backup_reaches() -> Network:
    """a knows of the new one, as it does of the former, before anything speaks against the path: it stays then."""
    net = armed()
    a, b = ends(net)
    post(a, "WRITE", 1)
    wait(net, 10)
    net.nics["b"][1].failing = True
    window_again(b)
    wait(net, 10)
    net.nics["b"][1].failing = False
    path_failed(a, 0)
    wait(net, 20)
    until(net, lambda: at_home(net), ms=2000)
    has_patience_at_home(a)
    no_answers(net, "b", 0)
    post(a, "WRITE", 2)
    wait(net, 5)
    path_failed(a, 0, advisory=True)
    wait(net, 5)
    no_hole(net, "b", 0)
    return end(net)


def has_patience_at_home(app: Application) -> None:
    """Its default QP does not give up by itself."""
    app.endpoint.hardware.RETRIES = NEVER


def memory_is_being_changed() -> Network:
    """Away, a names memory that is being changed just now, which takes a while: it is memory all the same."""
    net = armed()
    a, b = ends(net)
    away(net)
    post(a, "WRITE", 1)
    wait(net, 10)
    net.clock.later(5 * MS, post, a, "WRITE", 2)
    b.window.rereg(0.1)
    return end(net)


def very_many_keys() -> Network:
    """A program has named more memory than is remembered, which its NIC refuses. Then it names what no backup reaches.

    That is known before anything speaks against the path.
    """
    net = Network(1)
    a, b = ends(net)
    a.host.exchanger.go_away(lose_lease=False)
    wait(net, 5)
    a.endpoint.hardware.shared.refusal[0] = errno.EINVAL
    wr = SendWR(num_sge=1, sg=[SGE(0, 0, 0)], opcode=0)
    with a.host:
        for n in range(1 << 16):
            wr.set_wr_rdma(1 << 20 | n, 0)
            with contextlib.suppress(PyverbsRDMAError):
                a.endpoint.core.post_send(wr)
    a.endpoint.hardware.shared.refusal[0] = 0
    a.host.exchanger.come_back()
    until(net, net.protected, ms=3000)
    wait(net, 500)
    net.nics["b"][1].failing = True
    another_window(b)
    wait(net, 10)
    net.nics["b"][1].failing = False
    has_patience_at_home(a)
    no_answers(net, "b", 0)
    post(a, "WRITE", 2)
    wait(net, 5)
    path_failed(a, 0, advisory=True)
    wait(net, 5)
    no_hole(net, "b", 0)
    return end(net)


SURVIVED: dict[Story, tuple[str, ...]] = {
    ready_makes_keys_worthless: ("go_by_what_ready_made_worthless",),
    an_answer_is_overtaken: ("use_an_answer_that_was_overtaken",),
    very_many_withdrawals: ("forget_only_what_is_named",),
    a_key_is_given_out_again: ("give_a_key_again_at_once", "tell_nobody_of_a_withdrawal"),
    memory_takes_longer_than_a_peer_may: ("wait_for_a_registration_as_for_a_peer",),
    another_nic_hangs: ("despair_of_any_nic_that_hangs",),
    memory_comes_again_that_no_backup_reaches: ("keep_seen_rkeys",),
    very_many_keys: ("one_rkey_too_many",),
    who_is_home_again_holds_no_key: ("hold_keys_for_who_is_home",),
    memory_is_being_changed: ("deny_memory_that_is_changing",),
}

ENDED: dict[Story, tuple[str, ...]] = {
    memory_of_the_peers_is_not_there: ("give_up_a_qp_whose_peer_has_no_memory",),
}

TOLD: dict[Story, tuple[str, ...]] = {
    a_wr_that_never_ends_holds_all_keys: ("wait_for_ever_for_keys_that_are_held",),
    memory_of_ours_is_gone: ("give_up_a_qp_whose_memory_is_gone",),
    other_memory_gets_no_key_that_is_in_use: (
        "give_other_memory_a_held_key",
        "settle_what_is_under_way",
        "forget_wrs_by_old_keys",
    ),
    a_key_goes_while_a_program_posts: ("look_for_wrs_before_a_key_is_forgotten",),
    a_key_that_is_in_use_comes_back_to_its_nic: ("register_with_rights_by_an_unknown_key",),
    a_key_that_nobody_can_tell: ("wait_for_keys_that_nobody_can_tell",),
}
