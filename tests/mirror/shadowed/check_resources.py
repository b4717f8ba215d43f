# SPDX-License-Identifier: BSD-3-Clause
"""The mirror with failover running, both ends in one process: what the application has, and that it works."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import threading
import time
from typing import Any

import pytest
from one_process import Verbs, collect, in_threads, show

import shiftverbs  # opens the software RNIC before pyverbs
from mirror.shadowed.tools import Logged, both_protected, cable, nics_are_idle, protected, settled, until
from shiftverbs import _nic
from shiftverbs.pyverbs_error import PyverbsRDMAError, ShiftError


def test_every_resource_has_its_shadow(v: Verbs) -> None:
    ctx = v.context()
    channel = v.cq.CompChannel(ctx)
    pd, cq = v.pd.PD(ctx), v.cq.CQ(ctx, 100, None, channel)
    mr = v.mr.MR(pd, 4096, v.e.IBV_ACCESS_LOCAL_WRITE | v.e.IBV_ACCESS_REMOTE_WRITE)
    first, second = v.pair(ctx, pd, cq)
    for thing in (channel, pd, cq, mr, first, second):
        held = settled(thing)
        assert held.state(1) == "ready" and held.handle(1) and held.handle(1) != held.handle(0), held.reason(
            1
        )
    held = mr._shadow
    assert (held.lkey, held.rkey, held.region) == (mr.lkey, mr.rkey, (mr.buf, 4096, mr.buf, 3))
    keymap = ctx._domain.keymap
    assert keymap.get_local(mr.lkey, 1) == held.keys(1)[0]
    mr.close()
    assert len(keymap) == 0
    assert first._shadow.qpn(0) == first.qp_num and first._shadow.qpn(1) not in (0, second._shadow.qpn(1))
    both_protected(first, second)
    ctx.close()


def test_attributes_are_remembered(v: Verbs) -> None:
    ctx = v.context()
    pd, cq = v.pd.PD(ctx), v.cq.CQ(ctx, 100)
    qp = v.qp.QP(pd, v.rc(cq))
    held = qp._shadow
    attr = v.attr(ctx, 0x1234)
    attr.timeout, attr.rnr_retry, attr.min_rnr_timer = 17, 3, 9
    assert held.attrs == {} and held.app_state == v.e.IBV_QPS_RESET
    qp.to_rts(attr)
    assert list(held.transitions) == ["INIT", "RTR", "RTS"]
    assert held.transitions["INIT"] == {"pkey_index": 0, "port_num": 1, "qp_access_flags": 3}
    assert held.transitions["RTR"]["ah_attr"]["dgid"] == bytes.fromhex(
        ctx.query_gid(1, 0).gid.replace(":", "")
    )
    assert held.transitions["RTR"]["ah_attr"]["is_global"] == 1
    rtr = {"dest_qp_num": 0x1234, "path_mtu": 3, "rq_psn": 7, "max_dest_rd_atomic": 2, "min_rnr_timer": 9}
    for name, value in rtr.items():
        assert held.transitions["RTR"][name] == held.attrs[name] == value, name
    rts = {"timeout": 17, "retry_cnt": 6, "rnr_retry": 3, "sq_psn": 7, "max_rd_atomic": 2}
    for name, value in rts.items():
        assert held.transitions["RTS"][name] == held.attrs[name] == value, name
    again = v.qp.QPAttr()
    again.min_rnr_timer = 20
    qp.modify(again, v.e.IBV_QP_MIN_RNR_TIMER)  # RTS to RTS, without the state
    assert held.attrs["min_rnr_timer"] == 20 and held.transitions["RTR"]["min_rnr_timer"] == 9
    port, index, gid, mtu = held.route(0)
    assert (port, index, gid) == (1, 0, held.attrs["ah_attr"]["dgid"]) and mtu >= 3
    port, index, gid, _mtu = held.route(1)
    assert (
        port == 1 and gid != held.attrs["ah_attr"]["dgid"] and gid[:12] == held.attrs["ah_attr"]["dgid"][:12]
    )
    qp.modify(v.qp.QPAttr(qp_state=v.e.IBV_QPS_RESET), v.e.IBV_QP_STATE)
    assert held.attrs == {} and held.app_state == v.e.IBV_QPS_RESET == qp.qp_state
    qp.to_init(v.qp.QPAttr(port_num=1))
    assert held.attrs["port_num"] == 1 and "dest_qp_num" not in held.attrs
    ctx.close()


def test_connecting_never_waits_for_the_peer(v: Verbs) -> None:
    """A is connected fully, and used, before B exists: to a peer that never comes, and to one that comes late."""
    ctx = v.context()
    pd, cq = v.pd.PD(ctx), v.cq.CQ(ctx, 100)
    lonely = v.qp.QP(pd, v.rc(cq))
    start = time.monotonic()
    lonely.to_rts(v.attr(ctx, 0xABCDE))
    assert time.monotonic() - start < 1.0
    first = v.qp.QP(pd, v.rc(cq))
    late = v.qp.QP(pd, v.rc(cq))
    start = time.monotonic()
    first.to_rts(v.attr(ctx, late.qp_num))
    assert time.monotonic() - start < 1.0
    mr = v.mr.MR(pd, 4096, 1)
    v.receive(first, mr, 1)
    settled(first)
    until(lambda: first.shift.status == "PAIRING")
    late.to_rts(v.attr(ctx, first.qp_num))
    both_protected(first, late)
    v.send(late, mr, 2)
    assert show(collect(cq, 2)) == [(1, 0, 128, 64), (2, 0, 0, 64)]
    assert lonely.shift.status == "PAIRING" and lonely.shift.why
    ctx.close()


def test_a_changed_mr_has_a_changed_shadow(v: Verbs) -> None:
    """rereg: address, access and PD; the backup has let go of the old memory when the verb returns."""
    e = v.e
    ctx = v.context()
    pd, other = v.pd.PD(ctx), v.pd.PD(ctx)
    first, second = v.mem_alloc.mmap(length=4096), v.mem_alloc.mmap(length=8192)
    mr = v.mr.MR(pd, 4096, e.IBV_ACCESS_LOCAL_WRITE, address=first)
    held = settled(mr)
    assert held.region == (first, 4096, first, e.IBV_ACCESS_LOCAL_WRITE)
    keymap = ctx._domain.keymap
    changes = [
        (e.IBV_REREG_MR_CHANGE_ACCESS, pd, 0, 0, 7, (first, 4096, first, 7)),
        (e.IBV_REREG_MR_CHANGE_TRANSLATION, pd, second, 8192, 0, (second, 8192, second, 7)),
        (e.IBV_REREG_MR_CHANGE_PD, other, 0, 0, 0, (second, 8192, second, 7)),
    ]
    for flags, new_pd, address, length, access, region in changes:
        before = mr._shadow
        nics_are_idle()  # nothing is being registered: it is changed at once
        mr.rereg(flags, new_pd, address, length, access)
        after = mr._shadow
        assert not after.pending
        assert after is not before and after.region == region and before.handle(1) == 0, after.region
        assert after.state(1) == "ready" and after.keys(0) == (mr.lkey, mr.rkey)
        assert keymap.get_local(mr.lkey, 1) == after.keys(1)[0] and len(keymap) == 1
    assert mr._shadow.pd is other._shadow
    with contextlib.suppress(PyverbsRDMAError):
        mr.rereg(e.IBV_REREG_MR_CHANGE_ACCESS, pd, 0, 0, e.IBV_ACCESS_REMOTE_WRITE)  # without local write
    assert settled(mr).state(1) == "ready" and len(keymap) == 1
    other.close()
    assert len(keymap) == 0
    moved = v.mr.MR(pd, 4096, 7, address=first)
    settled(moved)
    # Has no shadow: no backup keeps the memory.
    parent = v.pd.ParentDomain(ctx, v.pd.ParentDomainInitAttr(pd=pd))
    moved.rereg(e.IBV_REREG_MR_CHANGE_PD, parent, 0, 0, 0)
    assert moved._shadow is None and len(keymap) == 0
    moved.close()
    parent.close()
    ctx.close()
    nics_are_idle()
    shiftverbs.failover.runtime.current().driver.run()  # what could not be destroyed would be told


def test_a_programs_own_subclasses(v: Verbs) -> None:
    """Classes that override data verbs, and calls through the class: all go through the journal."""
    calls: list[str] = []

    class TracingQP(v.qp.QP):  # type: ignore[name-defined,misc]
        def post_send(self, wr: Any, bad_wr: Any = None) -> None:
            calls.append("post_send")
            super().post_send(wr, bad_wr)

    class TracingCQ(v.cq.CQ):  # type: ignore[name-defined,misc]
        def poll(self, num_entries: int = 1) -> Any:
            calls.append("poll")
            return super().poll(num_entries)

    ctx = v.context()
    pd = v.pd.PD(ctx)
    cq = TracingCQ(ctx, 100)
    mr = v.mr.MR(pd, 4096, 1)
    first, second = TracingQP(pd, v.rc(cq)), v.qp.QP(pd, v.rc(cq))
    v.connect(ctx, first, second)
    both_protected(first, second)
    assert show(v.exchange(first, second, mr, cq, 1, 2)) == [(1, 0, 128, 64), (2, 0, 0, 64)]
    assert calls[0] == "post_send" and calls[-1] == "poll" and first._core.posted == 1
    sge = v.wr.SGE(mr.buf, 8, mr.lkey)
    v.qp.QP.post_recv(first, v.wr.RecvWR(wr_id=3, num_sge=1, sg=[sge]))
    v.qp.QP.post_send(second, v.wr.SendWR(wr_id=4, opcode=v.e.IBV_WR_SEND, num_sge=1, sg=[sge], send_flags=2))
    found: list[Any] = []
    until(lambda: (found.extend(v.cq.CQ.poll(cq, 2)[1]), len(found) == 2)[1])
    assert show(found) == [(3, 0, 128, 8), (4, 0, 0, 8)]
    ctx.close()


def test_protection_ends_and_the_qp_goes_on(v: Verbs, logged: Logged) -> None:
    """What binding a memory window does to a QP (the software RNIC has no windows to bind)."""
    ctx, _, cq, mr, first, second = protected(v)
    for number in range(3):
        completions = v.exchange(first, second, mr, cq, number, 10 + number)
        assert show(completions) == [(number, 0, 128, 64), (10 + number, 0, 0, 64)]
        if number == 0:
            with pytest.raises(TypeError):
                first.bind_mw(None, None)
            assert first.shift.status == "PROTECTED"
            first._end_protection("a memory window was bound through it")
            assert first.shift.status == "UNPROTECTED" and "window" in first.shift.why
            assert first.qp_state == v.e.IBV_QPS_RTS
    until(lambda: second.shift.status != "PROTECTED")
    v.exchange(first, second, mr, cq, 5, 6)
    ctx.close()
    logged.take("gave up")


def test_eight_threads(v: Verbs) -> None:
    ctx = v.context()
    pd = v.pd.PD(ctx)
    ready = []

    def work() -> None:
        cq = v.cq.CQ(ctx, 20)
        mr = v.mr.MR(pd, 4096, 1)
        for number in range(4):
            first, second = v.pair(ctx, pd, cq)
            if number == 3:
                both_protected(first, second, timeout_s=30)
                ready.append(True)
            v.exchange(first, second, mr, cq, number, 100 + number)
            first.close()
            second.close()

    failures = in_threads(8, work)
    assert not failures, failures
    assert ready == [True] * 8
    ctx.close()


def test_reasons(v: Verbs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that is not protected says why, and works."""
    e = v.e
    ctx = v.context()
    pd, cq = v.pd.PD(ctx), v.cq.CQ(ctx, 50)

    def why(init: Any, creator: Any = None) -> str:
        qp = v.qp.QP(creator or pd, init)
        assert qp._shadow is None and qp.shift.status == "UNPROTECTED", qp.shift
        reason = qp.shift.why
        qp.close()
        assert reason
        return str(reason)

    assert "UD" in why(v.qp.QPInitAttr(qp_type=e.IBV_QPT_UD, scq=cq, rcq=cq, cap=v.cap()))
    limits = ctx.query_device()
    init = v.rc(cq, v.cap(limits.max_qp_wr, 1))
    assert "room" in why(init) and init.max_send_wr == limits.max_qp_wr
    init = v.rc(cq, v.cap(1, limits.max_qp_wr))
    assert "room" in why(init) and init.max_recv_wr == limits.max_qp_wr
    shallow = v.cq.CQ(ctx, 5)

    def no_room(cq: int, cqe: int) -> int:
        raise OSError(errno.ENOMEM, "ibv_resize_cq: no room")

    init = v.rc(shallow)
    with monkeypatch.context() as patch:
        patch.setattr(_nic, "resize_cq", no_room)
        assert "no room" in why(init) and (init.max_send_wr, init.max_recv_wr) == (20, 30)
    assert v.qp.QP(pd, init)._shadow is not None and shallow.cqe == 5
    extended = v.qp.QPInitAttrEx(
        qp_type=e.IBV_QPT_RC, scq=cq, rcq=cq, cap=v.cap(), pd=pd, comp_mask=e.IBV_QP_INIT_ATTR_PD
    )
    ours = v.qp.QP(ctx, extended)
    assert ours._shadow is not None
    plain = __import__("pyverbs.device").device.Context(name="soft0")
    foreign = v.pd.PD(plain)
    theirs = v.cq.CQ(plain, 10)
    assert "Context" in why(v.rc(theirs), foreign)
    other = v.qp.QP(pd, v.rc(v.cq.CQ(ctx, 10)))
    assert other._shadow is not None
    other.close()
    assert other.shift.status == "UNPROTECTED" and other.shift.why == "it is closed"
    ctx.close()
    plain.close()


def test_failover_is_not_seen(v: Verbs, logged: Logged) -> None:
    """qp_state, query, CQ events and completions while the traffic is on the backup."""
    e = v.e
    ctx, _, cq, mr, first, second = protected(v, channel=True)
    channel = cq.comp_channel
    cable("down")
    for number in range(5):
        cq.req_notify()
        v.receive(second, mr, number)
        v.send(first, mr, 100 + number)
        channel.get_cq_event(cq)
        assert show(collect(cq, 2)) == [(number, 0, 128, 64), (100 + number, 0, 0, 64)]
    assert first.shift.state == "FALLBACK" and first.shift.path == "soft1", first.shift
    quicker = v.qp.QPAttr()
    quicker.min_rnr_timer = 5
    first.modify(quicker, e.IBV_QP_MIN_RNR_TIMER)
    assert first._shadow.attrs["min_rnr_timer"] == 5
    attr, init = first.query(e.IBV_QP_STATE | e.IBV_QP_AV | e.IBV_QP_DEST_QPN | e.IBV_QP_TIMEOUT)
    assert (first.qp_state, attr.qp_state) == (e.IBV_QPS_RTS, e.IBV_QPS_RTS)
    assert (attr.dest_qp_num, attr.timeout, attr.path_mtu) == (second.qp_num, 14, e.IBV_MTU_1024)
    assert (init.cap.max_send_wr, attr.cap.max_recv_wr, cq.cqe) == (20, 30, 20)
    events = []
    reader = threading.Thread(target=lambda: events.append(ctx.get_async_event()))
    reader.start()
    reader.join(15)
    assert [event.event_type for event in events] == [e.IBV_EVENT_PORT_ERR]
    events[0].ack()
    cable("up")
    until(lambda: (cq.poll(1), first.shift.state == second.shift.state == "DEFAULT")[1])
    cq.req_notify()
    v.receive(second, mr, 50)
    v.send(first, mr, 51)
    channel.get_cq_event(cq)
    assert len(collect(cq, 2)) == 2
    # Now the application ends it by itself, with receives outstanding.
    v.receive(second, mr, 60)
    second.modify(v.qp.QPAttr(qp_state=e.IBV_QPS_ERR), e.IBV_QP_STATE)
    assert second.qp_state == e.IBV_QPS_ERR and second.query(e.IBV_QP_STATE)[0].qp_state == e.IBV_QPS_ERR
    flushed = collect(cq, 1)
    assert (flushed[0].wr_id, flushed[0].status) == (60, e.IBV_WC_WR_FLUSH_ERR)
    ctx.close()
    logged.take("leaving soft0")


def test_waiting_does_not_hold_the_gil(v: Verbs, logged: Logged) -> None:
    """get_cq_event and get_async_event block in threads of their own while this one works."""
    ctx = v.context()
    channel = v.cq.CompChannel(ctx)
    pd, cq, quiet = v.pd.PD(ctx), v.cq.CQ(ctx, 20, None, channel), v.cq.CQ(ctx, 20)
    mr = v.mr.MR(pd, 4096, 1)
    first, second = v.pair(ctx, pd, quiet, cq)
    seen: list[str] = []

    def wait_for_completion() -> None:
        channel.get_cq_event(cq)
        seen.append("completion")

    def wait_for_event() -> None:
        event = ctx.get_async_event()
        event.ack()
        seen.append(f"event {event.event_type}")

    cq.req_notify()
    assert not select.select([channel.fd], [], [], 0)[0]
    threads = [threading.Thread(target=wait_for_completion), threading.Thread(target=wait_for_event)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 0.2
    steps = 0
    while time.monotonic() < deadline:  # this would not be reached by now
        steps += 1
    assert steps > 100 and not seen
    v.receive(second, mr, 1)
    v.send(first, mr, 2)
    threads[0].join(15)
    assert seen == ["completion"]
    cable("down")
    threads[1].join(15)
    assert seen == ["completion", f"event {v.e.IBV_EVENT_PORT_ERR}"]
    cable("up")
    collect(cq, 1)
    cq.req_notify()
    v.receive(second, mr, 3)
    v.send(first, mr, 4)
    assert select.select([channel.fd], [], [], 15)[0] == [channel.fd]
    channel.get_cq_event(cq)
    ctx.close()
    logged.take("leaving soft0")


def test_reset_and_again(v: Verbs) -> None:
    """RESET and a new connection of the same QPs."""
    e = v.e
    ctx, _, cq, mr, first, second = v.connected()
    for round_number in range(3):
        completions = v.exchange(first, second, mr, cq, round_number, 10 + round_number)
        assert [wc.status for wc in completions] == [0, 0]
        v.receive(second, mr, 77)  # is lost with the RESET
        for qp in (first, second):
            qp.modify(v.qp.QPAttr(qp_state=e.IBV_QPS_RESET), e.IBV_QP_STATE)
            assert qp.qp_state == e.IBV_QPS_RESET
        while cq.poll(8)[0]:
            pass
        v.connect(ctx, first, second)
        assert first.qp_state == second.qp_state == e.IBV_QPS_RTS
    assert show(v.exchange(first, second, mr, cq, 1, 2)) == [(1, 0, 128, 64), (2, 0, 0, 64)]
    ctx.close()


def test_a_channel_without_descriptors(v: Verbs, monkeypatch: pytest.MonkeyPatch) -> None:
    """There were enough for the verb, but not for ours; or it is pyverbs' own. Its CQs are plain ones, and tell why."""
    import pyverbs.cq

    ctx = v.context()
    pd, memory = v.pd.PD(ctx), []

    def none_left(channel: Any) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(shiftverbs.mirroring.eligibility, "new_channel_core", none_left)
        ours = v.cq.CompChannel(ctx)
    for channel, why in (
        (ours, os.strerror(errno.EMFILE)),
        (pyverbs.cq.CompChannel(ctx), "not a shiftverbs"),
    ):
        cq = v.cq.CQ(ctx, 10, None, channel)
        qp = v.qp.QP(pd, v.rc(cq))
        assert cq._shadow is None and qp.shift.status == "UNPROTECTED" and why in qp.shift.why, qp.shift
        qp.to_rts(v.attr(ctx, qp.qp_num))
        memory.append(v.mr.MR(pd, 4096, 1))
        cq.req_notify()
        v.receive(qp, memory[-1], 1)
        v.send(qp, memory[-1], 2)
        channel.get_cq_event(cq)
        cq.ack_events(1)
        assert sorted(wc.wr_id for wc in collect(cq, 2)) == [1, 2]
        qp.close()
        cq.close()
        channel.close()
    ctx.close()


def test_required(v: Verbs) -> None:
    """SHIFTVERBS_REQUIRE=1: a QP that is not protected is an error before it exists."""
    ctx = v.context()
    pd, cq = v.pd.PD(ctx), v.cq.CQ(ctx, 20)
    v.qp.QP(pd, v.rc(cq)).close()
    limits = ctx.query_device()
    for init in (
        v.qp.QPInitAttr(qp_type=v.e.IBV_QPT_UD, scq=cq, rcq=cq, cap=v.cap()),
        v.rc(cq, v.cap(limits.max_qp_wr, 1)),
    ):
        with pytest.raises(ShiftError, match="SHIFTVERBS_REQUIRE"):
            v.qp.QP(pd, init)
    ctx.close()


def test_unknown_backup(v: Verbs, logged: Logged) -> None:
    """SHIFTVERBS_BACKUP names a device that does not exist: a warning, and no protection; or an error."""
    ctx = v.context()
    if os.environ.get("SHIFTVERBS_REQUIRE"):
        with pytest.raises(ShiftError, match="soft7") as refused:
            v.pd.PD(ctx)
        assert "soft0, soft1" in str(refused.value)
        return
    pd, cq = v.pd.PD(ctx), v.cq.CQ(ctx, 20)
    mr = v.mr.MR(pd, 4096, 1)
    first, second = v.pair(ctx, pd, cq)
    assert first.shift.status == "UNPROTECTED" and "soft7" in first.shift.why, first.shift
    assert logged.take("soft7", "soft0, soft1")
    logged.take("")
    v.exchange(first, second, mr, cq, 1, 2)
    ctx.close()


def test_no_backup(v: Verbs, logged: Logged) -> None:
    """One NIC only, or none named for this one."""
    ctx, pd, cq, mr, first, second = v.connected()
    assert first.shift.status == "UNPROTECTED" and "no backup" in first.shift.why, first.shift
    assert len(logged.take("soft0 has no backup NIC")) == 1
    v.exchange(first, second, mr, cq, 1, 2)
    with pytest.raises(PyverbsRDMAError) as refused:
        v.qp.QP(pd, v.rc(cq, v.cap(1 << 24, 1)))
    assert refused.value.error_code in (errno.EINVAL, errno.ENOMEM)
    ctx.close()
