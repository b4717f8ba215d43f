# SPDX-License-Identifier: BSD-3-Clause
"""Cases of the raw verbs, ModifySteps and async events, on the software RNIC (host "a")."""

from __future__ import annotations

import ctypes
import errno
import gc
import mmap
import os
import select
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from fakes import calls, in_child, last_mask, library, modify_qp, n_calls, until

from shiftverbs import _nic
from shiftverbs.softrnic import faults

RESET, INIT, RTR, RTS, SQD, SQE, ERR = range(7)
LOCAL_WRITE = 1
CAPS = (16, 16, 1, 1, 0)


def expect(number: int, verb: str, action: Callable[[], Any]) -> None:
    """The action fails with this errno and names the verb."""
    try:
        action()
    except OSError as error:
        assert error.errno == number, f"{error!r}: not {errno.errorcode[number]}"
        assert verb in str(error), error
        return
    raise AssertionError(f"no {errno.errorcode[number]}")


def case_devices() -> None:
    names = _nic.list_devices()
    assert names[:2] == ["soft0", "soft1"]
    expect(errno.ENODEV, "no_such", lambda: _nic.open_device("no_such"))
    ctx = _nic.open_device("soft1")
    attributes = _nic.query_device(ctx)
    assert (
        attributes["phys_port_cnt"] == 1 and attributes["max_qp"] > 0 and attributes["num_comp_vectors"] >= 1
    )
    port = _nic.query_port(ctx, 1)
    assert port["state"] == 4 and port["link_layer"] == 2 and 1 <= port["active_mtu"] <= 5
    gid = _nic.query_gid(ctx, 1, 0)
    assert len(gid) == 16 and any(gid)
    assert _nic.query_gid_type(ctx, 1, 0) in (1, 2)
    assert _nic.query_pkey(ctx, 1, 0) == 0xFFFF
    expect(errno.EINVAL, "ibv_query_pkey", lambda: _nic.query_pkey(ctx, 1, 7))
    expect(errno.EINVAL, "ibv_query_gid", lambda: _nic.query_gid(ctx, 1, 10000))
    expect(errno.EINVAL, "ibv_query_port", lambda: _nic.query_port(ctx, 77))
    _nic.close_device(ctx)
    for wrong in (
        lambda: _nic.close_device(0),
        lambda: _nic.alloc_pd(0),
        lambda: _nic.destroy_qp(0),
        lambda: _nic.get_async_event(0),
        lambda: _nic.create_qp(1, 0, 0, CAPS),
    ):
        try:
            wrong()
        except ValueError:
            continue
        raise AssertionError("NULL was taken")


def case_objects_in_and_out() -> None:
    ctx = _nic.open_device("soft0")
    pd = _nic.alloc_pd(ctx)
    memory = mmap.mmap(-1, 8192)
    addr = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    mr, lkey, rkey = _nic.reg_mr(pd, addr, 8192, addr, LOCAL_WRITE)
    assert lkey and rkey
    lkey, rkey = _nic.rereg_mr(mr, 1 | 4, 0, addr, 4096, LOCAL_WRITE | 2)  # translation and access
    assert lkey and rkey
    expect(errno.EINVAL, "ibv_rereg_mr", lambda: _nic.rereg_mr(mr, 4, 0, 0, 0, 2))
    # Remote without local write.
    expect(errno.EINVAL, "ibv_reg_mr", lambda: _nic.reg_mr(pd, addr, 8192, addr, 2))
    channel, fd = _nic.create_channel(ctx)
    assert not select.select([fd], [], [], 0)[0]
    cq, cqe = _nic.create_cq(ctx, 10, channel)
    assert cqe >= 10
    assert _nic.resize_cq(cq, 100) >= 100
    expect(errno.EINVAL, "ibv_create_cq", lambda: _nic.create_cq(ctx, 0))
    expect(errno.EINVAL, "ibv_create_cq", lambda: _nic.create_cq(ctx, 10, 0, 12345))
    qp, qpn, granted = _nic.create_qp(pd, cq, cq, CAPS)
    assert isinstance(granted, tuple) and granted[0] >= 16 and granted[1] >= 16
    other, other_qpn, named = _nic.create_qp(
        pd, cq, cq, {"max_send_wr": 4, "max_recv_wr": 4, "max_send_sge": 1, "max_recv_sge": 1}, sq_sig_all=1
    )
    assert named["max_send_wr"] >= 4 and set(named) == set(_nic.CAP_FIELDS)
    assert qpn != other_qpn
    expect(errno.EINVAL, "ibv_create_qp", lambda: _nic.create_qp(pd, cq, cq, (10**7, 1, 1, 1, 0)))
    try:
        _nic.create_qp(pd, cq, cq, {"max_sent_wr": 1})
    except TypeError as error:
        assert "max_sent_wr" in str(error)
    else:
        raise AssertionError("an unknown capability was taken")
    assert _nic.query_qp_state(qp) == RESET
    ah = _nic.create_ah(pd, port_num=1, dgid=_nic.query_gid(ctx, 1, 0), sgid_index=0)
    expect(errno.EBUSY, "ibv_dealloc_pd", lambda: _nic.dealloc_pd(pd))
    expect(errno.EBUSY, "ibv_destroy_cq", lambda: _nic.destroy_cq(cq))
    expect(errno.EBUSY, "ibv_destroy_comp_channel", lambda: _nic.destroy_channel(channel))
    _nic.destroy_ah(ah)
    _nic.destroy_qp(other)
    _nic.destroy_qp(qp)
    _nic.destroy_cq(cq)
    _nic.destroy_channel(channel)
    _nic.dereg_mr(mr)
    _nic.dealloc_pd(pd)
    _nic.close_device(ctx)


def case_worker_brings_an_rc_pair_up() -> None:
    ctx = _nic.open_device("soft0")
    pd = _nic.alloc_pd(ctx)
    cq, _ = _nic.create_cq(ctx, 100)
    gid = _nic.query_gid(ctx, 1, 0)
    ends = [_nic.create_qp(pd, cq, cq, CAPS)[:2] for _ in range(2)]
    worker = _nic.NicWorker("soft0")
    for (qp, _), (_, peer_qpn) in (ends, ends[::-1]):
        transitions = _nic.ModifySteps()
        transitions.add(state=RESET)
        transitions.add(state=INIT, pkey_index=0, port_num=1, qp_access_flags=0)
        transitions.add(
            state=RTR,
            path_mtu=3,
            dest_qp_num=peer_qpn,
            rq_psn=77,
            max_dest_rd_atomic=1,
            min_rnr_timer=12,
            ah_attr={"port_num": 1, "grh": {"dgid": gid, "sgid_index": 0}},
        )
        transitions.add(state=RTS, sq_psn=77, timeout=14, retry_cnt=7, rnr_retry=7, max_rd_atomic=1)
        worker.submit(qp, qp, transitions)
    assert worker.drain(timeout_s=30)
    assert [r[1:3] for r in worker.results()] == [(0, 4), (0, 4)]
    assert [_nic.query_qp_state(qp) for qp, _ in ends] == [RTS, RTS]
    # A transition the device refuses.
    first = ends[0][0]
    illegal = _nic.ModifySteps().add(state=RESET).add(state=RTS, sq_psn=1)
    worker.submit("illegal", first, illegal)
    assert worker.drain(timeout_s=30)
    assert [r[:3] for r in worker.results()] == [("illegal", errno.EINVAL, 1)]
    assert _nic.query_qp_state(first) == RESET
    modify_qp(ends[1][0], _nic.ModifySteps().add(state=ERR))
    assert _nic.query_qp_state(ends[1][0]) == ERR
    assert worker.call(_nic.query_qp_state, first).result(30) == RESET
    assert worker.stop()
    for qp, _ in ends:
        _nic.destroy_qp(qp)
    _nic.destroy_cq(cq)
    _nic.dealloc_pd(pd)
    _nic.close_device(ctx)


def case_memory_and_qps_go_before_set_up() -> None:
    """Whoever lets go of it does not wait for the set-up of anything else, nor for QPs' ends; what stands on it goes
    first."""
    ctx = _nic.open_device("soft0")
    pd = _nic.alloc_pd(ctx)
    memory = mmap.mmap(-1, 4096)
    addr = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    mrs = [_nic.reg_mr(pd, addr, 4096, addr, LOCAL_WRITE)[0] for _ in range(3)]
    cq, _ = _nic.create_cq(ctx, 10, 0)
    qp, _, _ = _nic.create_qp(pd, cq, cq, CAPS)
    worker = _nic.NicWorker("soft0")
    begun, gate = threading.Event(), threading.Event()
    seen: list[list[int]] = []

    def look() -> None:
        seen.append([worker.pending(one) for one in (*mrs, qp, cq, pd)])

    def begin() -> None:
        begun.set()
        gate.wait(30)

    worker.call(begin)
    assert begun.wait(30)
    worker.call(look)
    worker.destroy("first", "MR", mrs[0])
    worker.destroy("CQ", "CQ", cq)
    worker.call(look)
    worker.destroy("second", "MR", mrs[1])
    to_err = _nic.ModifySteps()
    to_err.add(state=6)
    worker.submit("ERR", qp, to_err)
    worker.destroy("QP", "QP", qp)
    worker.destroy("third", "MR", mrs[2])
    worker.destroy("PD", "PD", pd)
    worker.call(look)
    gate.set()
    assert worker.drain(timeout_s=30)
    assert seen == [[0, 0, 0, 0, 1, 1], [0, 0, 0, 0, 0, 1], [0] * 6], seen
    assert [r[:2] for r in worker.results()] == [
        ("first", 0), ("second", 0), ("ERR", 0), ("third", 0), ("QP", 0), ("CQ", 0), ("PD", 0),
    ]  # fmt: skip
    assert worker.stop()
    _nic.close_device(ctx)


def case_worker_takes_everything_away_without_the_gil() -> None:
    ctx = _nic.open_device("soft0")
    pd = _nic.alloc_pd(ctx)
    memory = mmap.mmap(-1, 4096)
    addr = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    mr, _, _ = _nic.reg_mr(pd, addr, 4096, addr, LOCAL_WRITE)
    channel, _ = _nic.create_channel(ctx)
    cq, _ = _nic.create_cq(ctx, 10, channel)
    qp, _, _ = _nic.create_qp(pd, cq, cq, CAPS)
    worker = _nic.NicWorker("soft0")
    worker.call(int).result(30)  # the thread is up
    # What something else stands on is refused, as by the verb.
    interval = sys.getswitchinterval()
    sys.setswitchinterval(3600.0)  # nobody can take the GIL from this thread, only be given it
    deadline = time.monotonic() + 30
    worker.destroy("too early", "PD", pd)
    while worker.completed < 1 and time.monotonic() < deadline:
        pass
    for kind, pointer in (("QP", qp), ("CQ", cq), ("completion channel", channel), ("MR", mr), ("PD", pd)):
        worker.destroy(kind, kind, pointer)
    while worker.completed < 6 and time.monotonic() < deadline:
        pass
    sys.setswitchinterval(interval)
    assert worker.drain(mr, 0) and worker.pending() == 0
    (first, *others) = [r[:2] for r in worker.results()]
    assert first == ("too early", errno.EBUSY)
    assert sorted(others) == [("CQ", 0), ("MR", 0), ("PD", 0), ("QP", 0), ("completion channel", 0)]
    for kind, pointer, error in (("SRQ", 16, KeyError), ("PD", 0, ValueError)):
        try:
            worker.destroy(1, kind, pointer)
        except error:
            continue
        raise AssertionError(f"no {error.__name__}")
    # Waited for one by one; what is queued after stop() is not done, and says so.
    pds = [_nic.alloc_pd(ctx) for _ in range(3)]
    worker.destroy(1, "PD", pds[0])
    assert worker.drain(pds[0], 30) and worker.pending(pds[0]) == 0
    assert worker.cancel(pds[1]) == 0
    assert worker.stop()
    worker.destroy(2, "PD", pds[1])
    assert [r[:2] for r in worker.results()] == [(1, 0), (2, errno.ECANCELED)]
    for left in pds[1:]:
        _nic.dealloc_pd(left)
    _nic.close_device(ctx)


def case_cancelling_a_qps_commands_leaves_its_end_in_the_queue() -> None:
    ctx = _nic.open_device("soft0")
    pd = _nic.alloc_pd(ctx)
    cq, _ = _nic.create_cq(ctx, 10)
    qp, _, _ = _nic.create_qp(pd, cq, cq, CAPS)
    worker = _nic.NicWorker("soft0")
    library.fake_hold(1)
    worker.submit("slow", 1, _nic.ModifySteps().add(state=ERR))
    until(n_calls)
    worker.submit("modify", qp, _nic.ModifySteps().add(state=ERR))
    worker.destroy("end", "QP", qp)
    assert worker.pending(qp) == 2 and not worker.drain(qp, 0)
    assert worker.cancel(qp) == 1 and worker.pending(qp) == 1
    library.fake_hold(-1)
    assert worker.drain(qp, 30)
    assert [r[:2] for r in worker.results()] == [("modify", errno.ECANCELED), ("slow", 0), ("end", 0)]
    assert worker.stop()
    _nic.destroy_cq(cq)
    _nic.dealloc_pd(pd)
    _nic.close_device(ctx)


def last_attr() -> dict[str, str]:
    """The attributes that the fake saw last."""
    return dict(part.split("=") for part in library.fake_last_attr().decode().split())


def mask_of(**attrs: Any) -> int:
    """With which mask a transition that has these attributes comes to ibv_modify_qp."""
    modify_qp(1, _nic.ModifySteps().add(**attrs))
    return last_mask()


def case_modify_steps_carry_every_attribute() -> None:
    gid = bytes(range(1, 17))
    given = {
        "qp_state": 3,
        "cur_qp_state": 2,
        "path_mtu": 5,
        "path_mig_state": 1,
        "qkey": 0x7FFFFFFF,
        "rq_psn": 0xFFFFFF,
        "sq_psn": 1,
        "dest_qp_num": 0xABCDEF,
        "qp_access_flags": 15,
        "pkey_index": 65535,
        "alt_pkey_index": 9,
        "en_sqd_async_notify": 1,
        "max_rd_atomic": 16,
        "max_dest_rd_atomic": 15,
        "min_rnr_timer": 31,
        "port_num": 2,
        "timeout": 21,
        "retry_cnt": 6,
        "rnr_retry": 5,
        "alt_port_num": 1,
        "alt_timeout": 20,
        "rate_limit": 4_000_000_000,
    }
    whole = _nic.ModifySteps().add(
        **given,
        cap=(1, 2, 3, 4, 5),
        ah_attr={
            "dlid": 65535,
            "sl": 7,
            "src_path_bits": 3,
            "static_rate": 2,
            "port_num": 1,
            "is_global": 1,
            "dgid": gid,
            "grh": {"flow_label": 0xFFFFF, "sgid_index": 3, "hop_limit": 255, "traffic_class": 106},
        },
        alt_ah_attr={"dlid": 12, "port_num": 1},
        sq_draining=0,
        rate_unknown=None,
    )
    modify_qp(1, whole)
    # enum ibv_qp_attr_mask: all bits up to DEST_QPN, and RATE_LIMIT.
    assert last_mask() == (1 << 21) - 1 | 1 << 25
    seen = last_attr()
    for name, value in given.items():
        assert seen[name] == str(value), name
    assert seen["cap"] == "1,2,3,4,5"
    assert seen["ah"] == "65535,7,3,2,1,1"
    text = library.fake_last_attr().decode()
    assert f"grh=1048575,3,255,106 dgid={gid.hex()}" in text
    assert "alt_ah=12,0,0,0,0,1" in text
    # One attribute, one bit.
    bits = {
        "state": 0,
        "cur_qp_state": 1,
        "en_sqd_async_notify": 2,
        "qp_access_flags": 3,
        "pkey_index": 4,
        "port_num": 5,
        "qkey": 6,
        "path_mtu": 8,
        "timeout": 9,
        "retry_cnt": 10,
        "rnr_retry": 11,
        "rq_psn": 12,
        "max_rd_atomic": 13,
        "alt_timeout": 14,
        "min_rnr_timer": 15,
        "sq_psn": 16,
        "max_dest_rd_atomic": 17,
        "path_mig_state": 18,
        "dest_qp_num": 20,
        "rate_limit": 25,
    }
    for name, bit in bits.items():
        assert mask_of(**{name: 1}) == 1 << bit, name
    assert mask_of(ah_attr={}) == 1 << 7
    assert mask_of(cap=CAPS) == 1 << 19
    # A mask selects from a remembered dict.
    assert mask_of(mask=1 | 1 << 16, **given) == 1 | 1 << 16


def case_modify_steps_reject_nonsense() -> None:
    steps = _nic.ModifySteps().add(state=ERR)
    for attrs, kind in (
        ({"qp_sate": 1}, TypeError),
        ({"sq_psn": 1 << 24}, ValueError),
        ({"rq_psn": -1}, ValueError),
        ({"timeout": 256}, OverflowError),
        ({"timeout": -1}, OverflowError),
        ({"qkey": 1 << 32}, OverflowError),
        ({"state": "ERR"}, TypeError),
        ({"ah_attr": {"dgid": b"short"}}, ValueError),
        ({"ah_attr": {"lid": 1}}, TypeError),
        ({"ah_attr": {"sl": 300}}, OverflowError),
        ({"ah_attr": 5}, TypeError),
        ({"cap": (1, 2)}, ValueError),
        ({"mask": 1 << 40}, OverflowError),
    ):
        try:
            steps.add(**attrs)  # type: ignore[arg-type]
        except kind:
            continue
        raise AssertionError(f"{attrs} was taken")
    # What failed left nothing behind.
    assert len(steps) == 1
    steps.add(state=RESET)
    modify_qp(9, steps)
    assert calls() == [(9, ERR), (9, RESET)]


def case_async_events() -> None:
    PORT_ACTIVE, PORT_ERR, DEVICE_FATAL = 9, 10, 8
    ctx = _nic.open_device("soft0")
    fd = _nic.async_fd(ctx)
    assert _nic.get_async_event(ctx) is None
    faults.down("a/soft0")
    assert select.select([fd], [], [], 30)[0]
    event = until(lambda: _nic.get_async_event(ctx))
    assert (event.type, event.element) == (PORT_ERR, 1)
    event.ack()
    event.ack()
    faults.up("a/soft0")
    assert select.select([fd], [], [], 30)[0]
    event = until(lambda: _nic.get_async_event(ctx))
    assert (event.type, event.element) == (PORT_ACTIVE, 1)
    del event  # acknowledges
    gc.collect()
    faults.kill("a/soft0")
    event = until(lambda: _nic.get_async_event(ctx))
    while event is not None and event.type != DEVICE_FATAL:
        event.ack()
        event = until(lambda: _nic.get_async_event(ctx))

    def child() -> None:
        event.ack()  # the parent's: nothing happens

    in_child(child)
    event.ack()
    _nic.close_device(ctx)


def case_unacknowledged_event_of_a_qp_is_let_go() -> None:
    """destroy_qp waits for acknowledgement: dropping the event object is one."""
    ctx = _nic.open_device("soft0")
    pd = _nic.alloc_pd(ctx)
    cq, _ = _nic.create_cq(ctx, 100)
    gid = _nic.query_gid(ctx, 1, 0)
    qp, qpn, _ = _nic.create_qp(pd, cq, cq, CAPS)
    peer, peer_qpn, _ = _nic.create_qp(pd, cq, cq, CAPS)
    for one, other_qpn in ((qp, peer_qpn), (peer, qpn)):
        transitions = _nic.ModifySteps().add(state=INIT, pkey_index=0, port_num=1, qp_access_flags=0)
        transitions.add(
            state=RTR,
            path_mtu=3,
            dest_qp_num=other_qpn,
            rq_psn=0,
            max_dest_rd_atomic=1,
            min_rnr_timer=12,
            ah_attr={"port_num": 1, "dgid": gid, "sgid_index": 0},
        )
        if one == peer:
            transitions.add(state=RTS, sq_psn=0, timeout=14, retry_cnt=7, rnr_retry=7, max_rd_atomic=1)
        modify_qp(one, transitions)
    # A READ that the responder's access flags forbid puts the responder in ERR, with an event naming it.
    library.fake_post_read(ctypes.c_void_p(peer))
    event = until(lambda: _nic.get_async_event(ctx))
    while event.element != qp:
        event = until(lambda: _nic.get_async_event(ctx))
    del event
    gc.collect()
    _nic.destroy_qp(qp)
    _nic.destroy_qp(peer)
    _nic.destroy_cq(cq)
    _nic.dealloc_pd(pd)
    _nic.close_device(ctx)


def case_child_can_open_devices_of_its_own() -> None:
    ctx = _nic.open_device("soft0")
    gid = _nic.query_gid(ctx, 1, 0)

    def child() -> None:
        own = _nic.open_device("soft1")
        assert len(_nic.query_gid(own, 1, 0)) == 16
        pd = _nic.alloc_pd(own)
        _nic.dealloc_pd(pd)
        _nic.close_device(own)

    in_child(child)
    assert _nic.query_gid(ctx, 1, 0) == gid
    _nic.close_device(ctx)


def case_exit_with_everything_open() -> None:
    ctx = _nic.open_device("soft0")
    pd = _nic.alloc_pd(ctx)
    cq, _ = _nic.create_cq(ctx, 10)
    globals()["kept"] = (ctx, pd, cq, _nic.create_qp(pd, cq, cq, CAPS), os.getpid())
