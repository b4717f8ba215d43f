# SPDX-License-Identifier: BSD-3-Clause
"""Memory keys on the backup NIC: translated, missing, arriving late."""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest
from fake import (
    CAS,
    FAA,
    INLINE,
    LOCAL_INV,
    READ,
    SIGNALED,
    WRITE,
    World,
    recv_wr,
    seqs,
)

from shiftverbs import _core

Make = Callable[..., World]


# --- keys


def test_every_key_is_translated(guarded: World) -> None:
    w = guarded
    w.pair_keys((1, 2, 3), (7, 8))
    w.qp.close_send()
    w.send(0, WRITE, sges=[(0x10, 1, 1), (0x20, 2, 2), (0x30, 3, 3)], rkey=8, addr=0x77)
    w.send(1, CAS, rkey=7, addr=0x88)
    w.qp.open_send(1)
    write, cas = w.hw[1].posts()
    assert [(s.addr, s.length, s.lkey) for s in write.sge[:3]] == [
        (0x10, 1, 1001),
        (0x20, 2, 1002),
        (0x30, 3, 1003),
    ]
    assert (write.rkey, write.remote_addr, cas.rkey, cas.remote_addr) == (1008, 0x77, 1007, 0x88)
    assert (cas.compare_add, cas.swap) == (1, 2)


def test_missing_keys_stop_the_pump_and_it_goes_on(guarded: World) -> None:
    w = guarded
    w.qp.close_send()
    w.send(0)
    w.send(1, WRITE, rkey=99)
    w.send(2, sges=[(0, 4, 55)])
    w.send(3, sges=[(0, 0, 56)])
    w.recv(4)
    w.qp.post_recv(recv_wr(5, [(0, 8, 57)]))
    assert w.qp.missing_keys(1) == ({55, 57}, {99}) and w.qp.missing_keys(0) == (set(), set())
    assert w.qp.missing_keys(0, 1) == ({57}, set()), "sends are at home"
    assert w.qp.missing_keys(1, 0) == ({55}, {99}), "receives are"
    w.events()
    w.qp.open_send(1)
    assert (_core.EV_KEY_MISSING, 1, 99, 1) in w.events()
    assert seqs(w.hw[1].posts()) == [0]
    w.send(6)
    assert w.events() == [], "said once"
    w.remote.set_remote(99, 1, 1099)
    w.qp.pump()
    assert (_core.EV_KEY_MISSING, 1, 55, 0) in w.events()
    w.keys.set_local(55, 1, 1055)
    w.qp.pump()
    assert seqs(w.hw[1].posts()) == [0, 1, 2, 3, 4]
    assert w.hw[1].post(3).sge[0].lkey == 0, "an empty SGE needs no key"
    w.qp.close_recv()
    assert w.qp.open_recv(1) == errno.ENOKEY
    assert (_core.EV_KEY_MISSING, 1, 57, 0) in w.events()
    assert not w.qp.recv_is_open and seqs(w.hw[1].posts(recv=True)) == [0]
    w.keys.set_local(57, 1, 1057)
    w.qp.pump()
    assert w.qp.recv_is_open and seqs(w.hw[1].posts(recv=True)) == [0, 1], "never twice"
    assert w.qp.missing_keys(1) == (set(), set())


@pytest.mark.parametrize("send_pair", [1, 0])
def test_sends_wait_for_a_receive_before_them(guarded: World, send_pair: int) -> None:
    """What is posted behind it may tell the peer that it can send there; what was posted before it cannot."""
    w = guarded
    assert w.qp.open_recv(1) == 0
    if send_pair:
        w.qp.open_send(1)
    w.events()
    sent = w.hw[send_pair]
    w.send(0)
    w.qp.post_recv(recv_wr(1, [(0, 8, 57)]))
    w.send(2)
    w.qp.post_recv(recv_wr(3, [(0, 8, 58)]))
    w.send(4)
    w.send(5)
    assert seqs(sent.posts()) == [0] and w.qp.unwired == (3, 2)
    w.qp.pump()
    assert seqs(sent.posts()) == [0], "it is not there yet"
    w.keys.set_local(57, 1, 1057)
    w.qp.pump()
    assert seqs(sent.posts()) == [0, 1] and seqs(w.hw[1].posts(recv=True)) == [0]
    w.keys.set_local(58, 1, 1058)
    w.qp.pump()
    assert seqs(sent.posts()) == [0, 1, 2, 3] and seqs(w.hw[1].posts(recv=True)) == [0, 1]
    w.send(6)
    assert seqs(sent.posts()) == [0, 1, 2, 3, 4] and w.qp.unwired == (0, 0)
    sent.complete(5)
    w.qp.send_cq.drain(send_pair)
    assert [wc[0] for wc in w.poll()] == [0, 2, 4, 5, 6]


@pytest.mark.parametrize("by", ["move home", "move on", "switch", "abort", "refusal"])
def test_sends_wait_no_longer_than_the_receive(make: Make, by: str) -> None:
    """It goes elsewhere, or the peer sends nothing before it hears that it may, or all is over."""
    w = make(nics=3)
    w.protect()
    assert w.qp.open_recv(1) == 0
    w.qp.open_send(1)
    w.qp.post_recv(recv_wr(0, [(0, 8, 57)]))
    w.send(1)
    assert w.hw[1].posts() == [] and w.qp.unwired == (1, 1)
    w.events()
    if by == "move home":
        assert w.qp.move_recv(0) == 0
    elif by == "move on":
        assert w.qp.move_recv(2) == errno.ENOKEY
    elif by == "switch":
        w.qp.close_send()
        w.qp.close_recv()
        assert w.qp.open_recv(1) == errno.ENOKEY
        w.qp.open_send(1)
    elif by == "abort":
        w.qp.begin_end()
        w.qp.abort()
        w.poll()
        w.qp.guarded = False
        w.send(2)
    else:
        w.keys.set_local(57, 1, 1057)
        w.hw[1].fail(0, errno.EINVAL, recv=True)
        w.qp.pump()
        assert (_core.EV_POST_FAILED, 1, errno.EINVAL, 1) in w.events()
        assert w.hw[1].posts() == [], "the driver decides"
        return
    assert seqs(w.hw[0 if by == "abort" else 1].posts()) == [1 if by == "abort" else 0]


def test_keys_that_can_never_be_shadowed(guarded: World) -> None:
    w = guarded
    w.keys.set_local(60, 1, None)
    w.remote.set_remote(70, 1, None)
    w.send(0, sges=[(0, 4, 60)])
    assert w.qp.unsafe_reason() == "the memory of lkey 0x3c cannot be shadowed"
    assert w.qp.unsafe_reason(0) is None
    w.hw[0].complete()
    w.poll()
    w.send(1, WRITE, rkey=70)
    assert w.qp.unsafe_reason(1) == "the peer cannot shadow the memory of rkey 0x46"
    w.hw[0].complete()
    w.poll()
    w.qp.close_send()
    w.send(2, WRITE, rkey=70)
    assert w.qp.unsafe_reason() is None, "never handed to hardware"
    w.events()
    w.qp.open_send(1)
    assert (_core.EV_KEY_MISSING, 1, 70, 3) in w.events()


def test_unshadowable_on_one_backup_of_two(make: Make) -> None:
    w = make(nics=3)
    w.protect()
    w.keys.set_local(60, 1, None)
    w.keys.set_local(60, 2, 2060)
    w.send(0, sges=[(0, 4, 60)])
    assert w.qp.unsafe_reason() is None and w.qp.unsafe_reason(2) is None
    assert w.qp.unsafe_reason(1) is not None


def test_what_hardware_has_goes_by_an_rkey(guarded: World) -> None:
    """What is on its way to a backup by a key that was withdrawn since."""
    w = guarded
    w.pair_keys((1,), (7, 8))
    w.send(0, WRITE, rkey=7)
    assert w.qp.last_use(7) == w.qp.last_use() == 0, "at home"
    w.hw[0].complete()
    w.poll()
    w.qp.close_send()
    w.send(1, WRITE, rkey=7)
    w.send(2, CAS, rkey=8)
    w.send(3)
    w.send(4, WRITE, rkey=99)
    assert w.qp.last_use() == 0, "hardware has none of them"
    w.qp.open_send(1)
    assert (w.qp.last_use(7), w.qp.last_use(8), w.qp.last_use(99), w.qp.last_use()) == (2, 3, 0, 3)
    w.hw[1].complete(1)
    w.qp.send_cq.drain(1)
    assert (w.qp.last_use(7), w.qp.last_use(8), w.qp.oldest_wr) == (0, 3, 2)


def test_new_rkeys_are_reported_once(world: World) -> None:
    w = world
    for rkey in (5, 6, 5, 6, 5):
        w.send(0, WRITE, rkey=rkey)
    w.send(0, FAA, rkey=9)
    assert w.events() == [], "nobody to resolve them"
    assert sorted(w.qp.seen_rkeys) == [5, 6, 9]
    w.qp.remote_keys = w.remote
    assert sorted(e[2] for e in w.events()) == [5, 6, 9]
    w.send(0, READ, rkey=5)
    w.send(0, READ, rkey=11)
    assert w.events() == [(_core.EV_NEW_RKEY, -1, 11, 0)]
    w.qp.reset_journal()
    assert w.qp.seen_rkeys == [], "the next peer has keys of its own"
    w.send(0, READ, rkey=11)
    assert w.events() == [(_core.EV_NEW_RKEY, -1, 11, 0)]


def test_rkeys_that_are_forgotten_are_reported_again(guarded: World) -> None:
    w = guarded

    def reported(rkey: int) -> bool:
        w.send(0, READ, rkey=rkey)
        w.hw[0].complete()
        w.poll()
        return (_core.EV_NEW_RKEY, -1, rkey, 0) in w.events()

    assert reported(5) and reported(6) and not reported(6)
    w.qp.forget_rkey(6)
    assert reported(6), "the last one, too"
    assert not reported(5)
    w.qp.forget_rkey(77)
    w.qp.forget_rkey(None)
    assert w.qp.seen_rkeys == [] and reported(5) and reported(6)
    w.remote.set_remote(5, 1, 7)
    w.remote.clear()
    assert len(w.remote) == 0
    w.remote.set_remote(5, 1, 8)
    assert w.remote.get_remote(5, 1) == 8


def test_no_rkey_is_one_too_many(guarded: World) -> None:
    """From the 65,537th on new ones were not resolved ahead; now all begin anew, and what is in use is seen again."""
    w = guarded
    for rkey in range(65536):
        w.send(0, READ, rkey=rkey)
        w.hw[0].complete()
        w.poll()
        if rkey % 1024 == 0:
            w.events()
    w.events()
    assert len(w.qp.seen_rkeys) == 65536
    for rkey in (1 << 20, 7):
        w.send(0, READ, rkey=rkey)
        assert w.events() == [(_core.EV_NEW_RKEY, -1, rkey, 0)]
        w.hw[0].complete()
        w.poll()
    assert sorted(w.qp.seen_rkeys) == [7, 1 << 20]


def test_key_maps(world: World) -> None:
    keys, remote = _core.KeyMap(), _core.RemoteKeys()
    for i in range(2000):
        keys.set_local(i, i % 3, i + 5)
        remote.set_remote(0xFFFFFFFF - i, 1, None if i % 2 else i)
    assert len(keys) == 2000 and len(remote) == 2000
    assert all(keys.get_local(i, i % 3) == i + 5 for i in range(2000))
    assert remote.get_remote(0xFFFFFFFF - 7, 1) is None and remote.get_remote(0xFFFFFFFF - 8, 1) == 8
    for i in range(0, 2000, 2):
        keys.del_local(i)
    assert len(keys) == 1000
    with pytest.raises(KeyError):
        keys.get_local(0, 0)
    keys.del_local(12345678)
    for bad in (-1, 1 << 32, "x", None):
        with pytest.raises((OverflowError, TypeError)):
            keys.set_local(bad, 1, 1)
    with pytest.raises(ValueError, match="pair 16"):
        keys.set_local(1, 16, 1)


def test_memory_windows_and_inline(guarded: World) -> None:
    w = guarded
    w.qp.close_send()
    w.send(0, flags=INLINE | SIGNALED, sges=[])
    w.send(1, LOCAL_INV, sges=[], imm=0x99)
    w.events()
    w.qp.open_send(1)
    assert seqs(w.hw[1].posts()) == [0]
    assert (_core.EV_KEY_MISSING, 1, 0x99, 3) in w.events()
