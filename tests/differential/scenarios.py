# SPDX-License-Identifier: BSD-3-Clause
"""Programs that must print the same with pyverbs and with shiftverbs: `python scenarios.py MODULE NAME`.

They use the software RNIC's soft0, in one process, and print what an application could see.
"""

from __future__ import annotations

import faulthandler
import fcntl
import gc
import importlib
import os
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from one_process import Verbs, collect, in_threads, show, whose

SCENARIOS: dict[str, Callable[[Any], None]] = {}


def scenario(function: Callable[[Any], None]) -> Callable[[Any], None]:
    SCENARIOS[function.__name__] = function
    return function


def attempt(what: str, function: Callable[[], Any]) -> None:
    """Print what a call returns or raises."""
    try:
        print(what, "->", function())
    except Exception as error:
        kind = type(error)
        # The names of our classes, and of constructors in Python rather than C, may differ.
        text = re.sub(r"(shift|py)verbs\.[a-z]+\.|\w+\.(?=__init__)", "", str(error))
        print(what, "raises", kind.__module__.replace("shiftverbs", "pyverbs"), kind.__name__, text)
        print("   ", getattr(error, "error_code", None))


@scenario
def capabilities(v: Verbs) -> None:
    """What an application reads back of the capacities it asked for."""
    with v.context() as ctx:
        pd, cq = v.pd.PD(ctx), v.cq.CQ(ctx, 100)
        print(cq.cqe, cq.comp_channel, str(cq).splitlines()[-1])
        for send, recv, sges, inline in (
            (1, 1, 1, 0),
            (20, 30, 2, 32),
            (0, 5, 1, 0),
            (7, 0, 1, 0),
            (100, 100, 4, 64),
        ):
            init = v.rc(cq, v.cap(send, recv, sges, inline), sq_sig_all=0)
            qp = v.qp.QP(pd, init)
            print(init.cap, init.max_send_wr, init.sq_sig_all)
            _, seen = qp.query(v.e.IBV_QP_CAP)
            print(seen.cap, seen.sq_sig_all, seen.qp_type, type(seen).__name__)
            again = v.qp.QP(pd, init)  # the same QPInitAttr for several QPs
            print(init.cap, again.qp_type, qp.qp_type)
        print(cq.cqe)
        extended = v.qp.QPInitAttrEx(qp_type=v.e.IBV_QPT_RC, scq=cq, rcq=cq, cap=v.cap(), pd=pd, comp_mask=1)
        qp = v.qp.QP(ctx, extended)
        print(extended.cap, extended.comp_mask, extended.pd is pd, qp.qp_type)
        kept = v.qp.QPEx(ctx, extended)  # without extended send operations
        print(kept.qp_type, kept.qp_state, isinstance(kept, v.qp.QP), kept.ind_table)
        ud = v.qp.QPInitAttr(qp_type=v.e.IBV_QPT_UD, scq=cq, rcq=cq, cap=v.cap())
        print(v.qp.QP(pd, ud, v.qp.QPAttr(port_num=1)).qp_state, ud.cap)


@scenario
def init_attributes(v: Verbs) -> None:
    """QPInitAttr and QPInitAttrEx as objects."""
    with v.context() as ctx:
        cq, other = v.cq.CQ(ctx, 10), v.cq.CQ(ctx, 10)
        for cls in (v.qp.QPInitAttr, v.qp.QPInitAttrEx):
            plain = cls()
            print(plain.qp_type, plain.sq_sig_all, plain.send_cq, plain.recv_cq, plain.srq, plain.cap)
            plain.cap = v.cap(5, 6, 1, 7)
            plain.send_cq, plain.recv_cq = cq, other
            plain.qp_type, plain.sq_sig_all = v.e.IBV_QPT_RC, 1
            print(plain.cap, plain.max_inline_data, plain.send_cq is cq, plain.recv_cq is other)
            plain.max_send_wr = 9
            plain.send_cq = None
            print(plain, plain.send_cq)
            attempt("cap", lambda plain=plain: setattr(plain, "cap", 3))
            attempt("no cap", lambda plain=plain: setattr(plain, "cap", None))
            print(plain.cap)
            attempt("scq", lambda cls=cls, ctx=ctx: cls(scq=ctx).send_cq)
            attempt("scq int", lambda cls=cls: cls(scq=5))
            attempt("srq", lambda cls=cls, ctx=ctx: cls(srq=ctx))
            attempt("cap type", lambda cls=cls, ctx=ctx: cls(cap=ctx))
            attempt("keyword", lambda cls=cls: cls(nothing=1))
            positional = cls(v.e.IBV_QPT_RC, None, cq, other, None, v.cap(3, 4), 1)
            print(positional, positional.send_cq is cq, positional.recv_cq is other)


@scenario
def errors(v: Verbs) -> None:
    """Errors of every kind: class, text and error_code."""
    attempt("no name", lambda: v.device.Context())
    attempt("no device", lambda: v.device.Context(name="nobody0"))
    ctx = v.context()
    pd, cq = v.pd.PD(ctx), v.cq.CQ(ctx, 10)
    attempt("pd of nothing", lambda: v.pd.PD(None))
    attempt("pd of cq", lambda: v.pd.PD(cq))
    attempt("cq of nothing", lambda: v.cq.CQ(None, 1))
    attempt("cq of pd", lambda: v.cq.CQ(pd, 1))
    attempt("cq 0", lambda: v.cq.CQ(ctx, 0))
    attempt("cq huge", lambda: v.cq.CQ(ctx, 1 << 30))
    attempt("cq channel", lambda: v.cq.CQ(ctx, 1, None, cq))
    attempt("channel", lambda: v.cq.CompChannel(None))
    attempt("mr of ctx", lambda: v.mr.MR(ctx, 10, 0))
    attempt("mr of nothing", lambda: v.mr.MR(None))
    attempt("mr access", lambda: v.mr.MR(pd, 10, v.e.IBV_ACCESS_REMOTE_WRITE))
    attempt("qp of nothing", lambda: v.qp.QP(None, v.rc(cq)))
    attempt("qp without init", lambda: v.qp.QP(pd, None))
    attempt("qp attr type", lambda: v.qp.QP(pd, v.rc(cq), 5))
    attempt("qp huge", lambda: v.qp.QP(pd, v.rc(cq, v.cap(1 << 24, 1))))
    attempt("qp sges", lambda: v.qp.QP(pd, v.rc(cq, v.cap(1, 1, 9999))))
    attempt("qp no cq", lambda: v.qp.QP(pd, v.qp.QPInitAttr(qp_type=v.e.IBV_QPT_RC)))
    attempt("qp type", lambda: v.qp.QP(pd, v.qp.QPInitAttr(qp_type=77, scq=cq, rcq=cq)))
    qp = v.qp.QP(pd, v.rc(cq))
    attempt("rtr", lambda: qp.modify(v.qp.QPAttr(qp_state=v.e.IBV_QPS_RTR), v.e.IBV_QP_STATE))
    attempt("rts", lambda: qp.modify(v.qp.QPAttr(qp_state=v.e.IBV_QPS_RTS), v.e.IBV_QP_STATE))
    attempt("modify nothing", lambda: qp.modify(None, 1))
    attempt("to_init wrong", lambda: qp.to_init(5))
    attempt("post in reset", lambda: v.send(qp, v.mr.MR(pd, 4096, 1), 1))
    attempt("post nothing", lambda: qp.post_send(None))
    attempt("recv nothing", lambda: qp.post_recv(None))
    qp.to_init(v.qp.QPAttr(port_num=1))
    mr = v.mr.MR(pd, 4096, 1)
    attempt("post in init", lambda: v.send(qp, mr, 1))
    granted = 0
    try:
        while granted < 200:
            v.receive(qp, mr, granted)
            granted += 1
    except v.pyverbs_error.PyverbsRDMAError as error:
        print("full after", granted, error.error_code, error)
    print(ctx.query_port(1).lid)
    attempt("port 9", lambda: ctx.query_port(9).state)
    attempt("srq", lambda: v.srq.SRQ(cq, v.srq.SrqInitAttr(v.srq.SrqAttr())))
    attempt("srq of pd", lambda: v.srq.SRQ(pd, v.srq.SrqInitAttr(v.srq.SrqAttr())) and "made")
    attempt("srq of context", lambda: v.srq.SRQ(ctx, v.srq.SrqInitAttrEx()) and "made")
    special = v.srq.SrqInitAttrEx()
    special.cq, special.pd = cq, pd
    print(special.cq is cq, special.pd is pd)
    attempt("srq of context with a CQ", lambda: v.srq.SRQ(ctx, special) and "made")
    attempt("cqex", lambda: v.cq.CQEX(ctx, v.cq.CqInitAttrEx(cqe=10)) and "made")
    attempt("cqex default", lambda: v.cq.CQEX(ctx, None) and "made")
    attempt("dm", lambda: v.device.DM(ctx, v.device.AllocDmAttr(length=64)) and "made")
    attempt("xrcd", lambda: v.xrcd.XRCD(ctx, v.xrcd.XRCDInitAttr(0, os.O_CREAT, -1)) and "made")
    extended = v.qp.QPInitAttrEx(
        qp_type=v.e.IBV_QPT_RC, scq=cq, rcq=cq, cap=v.cap(), pd=pd, comp_mask=65, send_ops_flags=1
    )
    attempt("qpex", lambda: v.qp.QPEx(ctx, extended) and "made")
    attempt("qp of context without pd", lambda: v.qp.QP(ctx, v.qp.QPInitAttrEx(scq=cq, rcq=cq)) and "made")
    ctx.close()


@scenario
def states(v: Verbs) -> None:
    """qp_state and query through every transition."""
    e = v.e
    with v.context() as ctx:
        pd, cq = v.pd.PD(ctx), v.cq.CQ(ctx, 100)
        qp = v.qp.QP(pd, v.rc(cq))

        def look(what: str) -> None:
            attr, _ = qp.query(e.IBV_QP_STATE)
            print(what, qp.qp_state, attr.qp_state)

        look("new")
        for _ in range(2):
            qp.to_init(v.attr(ctx, qp.qp_num))
            look("init")
            qp.to_rtr(v.attr(ctx, qp.qp_num)) if _ else qp.to_rts(v.attr(ctx, qp.qp_num))
            look("next")
            attr, _init = qp.query(e.IBV_QP_AV | e.IBV_QP_PATH_MTU | e.IBV_QP_TIMEOUT | e.IBV_QP_DEST_QPN)
            print(attr.path_mtu, attr.dest_qp_num == qp.qp_num, attr.qp_access_flags, attr.min_rnr_timer)
            print(attr.ah_attr.is_global, attr.ah_attr.port_num, attr.port_num)
            qp.modify(v.qp.QPAttr(qp_state=e.IBV_QPS_ERR), e.IBV_QP_STATE)
            look("err")
            qp.modify(v.qp.QPAttr(qp_state=e.IBV_QPS_RESET), e.IBV_QP_STATE)
            look("reset")
        by_constructor = v.qp.QP(pd, v.rc(cq), v.attr(ctx, 5))
        print(by_constructor.qp_state)
        attempt("skip", lambda: by_constructor.to_rts(v.attr(ctx, 5)))
        print(by_constructor.qp_state)
        attempt("back", lambda: by_constructor.to_init(v.attr(ctx, 5)))
        print(by_constructor.qp_state, str(by_constructor).splitlines()[0])


@scenario
def traffic(v: Verbs) -> None:
    """SEND and WRITE, signaled and not, until the QP is put in error."""
    e = v.e
    with v.context() as ctx:
        pd, cq, other = v.pd.PD(ctx), v.cq.CQ(ctx, 100), v.cq.CQ(ctx, 100)
        mr = v.mr.MR(pd, 4096, e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE)
        first, second = v.pair(ctx, pd, cq, other, sq_sig_all=0)
        for number in range(10):
            v.receive(second, mr, 100 + number)
        for number in range(10):
            v.send(first, mr, number, flags=e.IBV_SEND_SIGNALED if number % 3 == 0 else 0)
        print(show(collect(cq, 4)), show(collect(other, 10)))
        write = v.wr.SendWR(
            wr_id=55,
            opcode=e.IBV_WR_RDMA_WRITE,
            num_sge=1,
            sg=[v.wr.SGE(mr.buf, 100, mr.lkey)],
            send_flags=e.IBV_SEND_SIGNALED,
        )
        write.set_wr_rdma(mr.rkey, mr.buf + 1024)
        mr.write("x" * 100, 100)
        first.post_send(write)
        print(show(collect(cq, 1)), mr.read(3, 1024), cq.poll(1), cq.poll())
        bad = v.wr.SendWR(
            wr_id=56,
            opcode=e.IBV_WR_RDMA_WRITE,
            num_sge=1,
            sg=[v.wr.SGE(mr.buf, 100, mr.lkey)],
            send_flags=e.IBV_SEND_SIGNALED,
        )
        bad.set_wr_rdma(mr.rkey + 999, mr.buf)
        first.post_send(bad)
        print(show(collect(cq, 1)))
        for number in range(2):
            v.receive(second, mr, 200 + number)
        second.modify(v.qp.QPAttr(qp_state=e.IBV_QPS_ERR), e.IBV_QP_STATE)
        print(show(collect(other, 2)))
        wc = v.cq.WC(wr_id=1, status=2)
        print(wc.wr_id, v.cq.cqe_status_to_str(12))


@scenario
def channel(v: Verbs) -> None:
    """Blocking on a completion channel; solicited only; acknowledging; the wrong CQ; non-blocking mode."""
    e = v.e
    ctx = v.context()
    comp = v.cq.CompChannel(ctx)
    pd, cq, quiet = v.pd.PD(ctx), v.cq.CQ(ctx, 50, None, comp), v.cq.CQ(ctx, 50)
    mr = v.mr.MR(pd, 4096, 1)
    first, second = v.pair(ctx, pd, quiet, cq)
    print(cq.comp_channel is comp, quiet.comp_channel)
    for round_number in range(3):
        cq.req_notify()
        v.receive(second, mr, round_number)
        v.send(first, mr, 10 + round_number)
        comp.get_cq_event(cq)
        print(show(collect(cq, 1)), show(collect(quiet, 1)))
    cq.ack_events(2)
    cq.req_notify(True)
    v.receive(second, mr, 20)
    v.receive(second, mr, 21)
    v.send(first, mr, 30)
    print(show(collect(cq, 1)), show(collect(quiet, 1)))
    v.send(first, mr, 31, flags=e.IBV_SEND_SIGNALED | e.IBV_SEND_SOLICITED)
    comp.get_cq_event(cq)
    print(show(collect(cq, 1)), show(collect(quiet, 1)))
    attempt("not a CQ", lambda: comp.get_cq_event(pd))
    cq.req_notify()
    v.receive(second, mr, 22)
    v.send(first, mr, 32)
    try:
        comp.get_cq_event(quiet)
    except v.pyverbs_error.PyverbsRDMAError as error:
        # pyverbs reports whatever errno held before.
        print(str(error).partition(".")[0])
    cq.req_notify()
    second.close()
    first.close()
    print("closed")
    os._exit(0)  # pyverbs would wait for ever for the acknowledgement of the unexpected event


@scenario
def resize(v: Verbs) -> None:
    """Resizing a CQ, with completions in it."""
    with v.context() as ctx:
        pd, cq = v.pd.PD(ctx), v.cq.CQ(ctx, 10)
        mr = v.mr.MR(pd, 4096, 1)
        first, second = v.pair(ctx, pd, cq, cap=v.cap(8, 8))
        cq.resize(33)
        print(cq.cqe)
        v.receive(second, mr, 1)
        v.send(first, mr, 2)
        attempt("zero", lambda: cq.resize(0))
        attempt("huge", lambda: cq.resize(1 << 30))
        cq.resize(60)
        print(cq.cqe, show(collect(cq, 2)))


@scenario
def async_events(v: Verbs) -> None:
    """A port that goes down and up: each event once, and waiting does not hold the GIL."""
    ctx = v.context()
    cli = [sys.executable, "-m", "shiftverbs.softrnic"]
    env = {**os.environ, "LD_PRELOAD": ""}
    subprocess.run([*cli, "down", "a/soft0"], check=True, env=env, stdout=subprocess.DEVNULL)
    event = ctx.get_async_event()
    print(event.event_type == v.e.IBV_EVENT_PORT_ERR, str(event).strip())
    event.ack()
    print(ctx.query_port(1).state)
    subprocess.run([*cli, "up", "a/soft0"], check=True, env=env, stdout=subprocess.DEVNULL)
    while True:
        event = ctx.get_async_event()
        event.ack()
        if event.event_type == v.e.IBV_EVENT_PORT_ACTIVE:
            break
    print("active", ctx.query_port(1).state)
    ctx.close()


@scenario
def memory(v: Verbs) -> None:
    """MRs: with and without a buffer of one's own, read, write, rereg, double close."""
    e = v.e
    with v.context() as ctx:
        pd = v.pd.PD(ctx)
        mr = v.mr.MR(pd, 100, e.IBV_ACCESS_LOCAL_WRITE)
        mr.write("hello", 5)
        print(mr.read(5, 0), mr.length, mr.lkey != 0, mr.rkey != 0, mr.buf % 4096)
        area = v.mem_alloc.mmap(length=8192)
        own = v.mr.MR(pd, 8192, e.IBV_ACCESS_LOCAL_WRITE, address=area)
        own.write(b"abc", 3, 10)
        print(own.read(3, 10), own.buf == area)
        attempt("negative", lambda: own.read(-1, 0))
        attempt("offset", lambda: own.read(1, -1))
        own.close()
        own.close()
        attempt("closed", lambda: own.read(1, 0))
        v.mem_alloc.munmap(area, 8192)
        with v.mr.MR(pd, 10, 1) as inner:
            print(inner.length)
        attempt("empty", lambda: v.mr.MR(pd).length)
        first, second = v.mem_alloc.mmap(length=4096), v.mem_alloc.mmap(length=8192)
        changing = v.mr.MR(pd, 4096, e.IBV_ACCESS_LOCAL_WRITE, address=first)
        changing.rereg(
            e.IBV_REREG_MR_CHANGE_ACCESS, pd, 0, 0, e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_READ
        )
        changing.rereg(e.IBV_REREG_MR_CHANGE_TRANSLATION, pd, second, 8192, 0)
        print(changing.length, changing.buf == second)
        other = v.pd.PD(ctx)
        changing.rereg(e.IBV_REREG_MR_CHANGE_PD, other, 0, 0, 0)
        attempt("rereg", lambda: changing.rereg(99, pd, 0, 0, 0))
        other.close()
        attempt("after its new PD", lambda: changing.read(1, 0))
        attempt("window", lambda: v.mr.MW(pd, e.IBV_MW_TYPE_1).type)
        pd.close()
        attempt("after the PD", lambda: mr.read(1, 0))


@scenario
def close_orders(v: Verbs) -> None:
    """Closing parents before children, everything twice."""
    for order in range(6):
        ctx, pd, cq, mr, first, second = v.connected(channel=True)
        v.receive(second, mr, 1)
        v.send(first, mr, 2)
        if order == 5:
            collect(cq, 2)
        objects = [ctx, pd, cq, cq.comp_channel, mr, first, second]
        for step in range(len(objects)):
            objects[(order + step) % len(objects)].close()
        for thing in reversed(objects):
            thing.close()
    print("closed")


@scenario
def context_left_to_the_collector(v: Verbs) -> None:
    """Objects dropped in whatever order, with and without cycles, and at exit."""
    keep: list[Any] = []
    for number in range(20):
        ctx = v.context()
        pd, cq = v.pd.PD(ctx), v.cq.CQ(ctx, 50)
        mr = v.mr.MR(pd, 4096, 1)
        pair = v.pair(ctx, pd, cq)
        if number == 19:
            keep += [pair, mr, cq, pd, ctx]
    del ctx, pd, cq, mr, pair
    gc.collect()
    print("dropped")
    sys.exit(3)


@scenario
def threads(v: Verbs) -> None:
    """Eight threads create, connect, use and close QPs at once."""
    ctx = v.context()
    pd = v.pd.PD(ctx)

    def work() -> None:
        cq = v.cq.CQ(ctx, 100)
        mr = v.mr.MR(pd, 4096, 1)
        for number in range(5):
            first, second = v.pair(ctx, pd, cq)
            v.exchange(first, second, mr, cq, number, 100 + number)
            first.close()
            second.close()

    print("failures", in_threads(8, work))
    ctx.close()


@scenario
def forked(v: Verbs) -> None:
    """A child made by fork leaves without harm to the parent's traffic."""
    ctx, _, cq, mr, first, second = v.connected()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os._exit(7)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    print(show(v.exchange(first, second, mr, cq, 1, 2)))
    ctx.close()


@scenario
def nonblocking_channel(v: Verbs) -> None:
    """O_NONBLOCK on the channel's descriptor makes get_cq_event say EAGAIN."""
    ctx = v.context()
    comp = v.cq.CompChannel(ctx)
    cq = v.cq.CQ(ctx, 10, None, comp)
    known = set(os.listdir("/proc/self/fd"))
    # pyverbs 44 does not give the descriptor away: find it, as the newest one before.
    fd = getattr(comp, "fd", None)
    if fd is None:
        import ctypes

        pointer = ctypes.c_void_p.from_address(id(comp) + 40).value
        assert pointer is not None
        fd = ctypes.c_int.from_address(pointer + 8).value
    assert str(fd) in known
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_NONBLOCK)
    attempt("empty", lambda: comp.get_cq_event(cq))
    ctx.close()


@scenario
def ends_of_its_own(v: Verbs) -> None:
    """Classes of the program's with a `__del__` that leaves the rest to whoever made their base."""
    ended: list[str] = []
    kept: list[Any] = []

    class Named:
        def __del__(self) -> None:
            ended.append(type(self).__name__)

    class Context(v.device.Context):  # type: ignore[name-defined,misc]
        __del__ = Named.__del__

    class PD(Named, v.pd.PD):  # type: ignore[name-defined,misc]
        pass

    class Channel(v.cq.CompChannel):  # type: ignore[name-defined,misc]
        __del__ = Named.__del__

    class CQ(v.cq.CQ):  # type: ignore[name-defined,misc]
        __del__ = Named.__del__

    class MR(v.mr.MR):  # type: ignore[name-defined,misc]
        __del__ = Named.__del__

    class SRQ(v.srq.SRQ):  # type: ignore[name-defined,misc]
        __del__ = Named.__del__

    class QP(v.qp.QP):  # type: ignore[name-defined,misc]
        def __del__(self) -> None:
            ended.append(f"QP in {self.qp_state}")

    class Inheriting(QP):
        pass

    class Overriding(QP):
        def __del__(self) -> None:
            ended.append("Overriding")

    class Calling(QP):
        def __del__(self) -> None:
            getattr(super(), "__del__", int)()
            ended.append("Calling")

    class Failing(QP):
        def __del__(self) -> None:
            getattr(super(), "__del__", int)()
            raise ValueError("in Failing")

    class Closing(QP):
        def __del__(self) -> None:
            self.close()
            ended.append("Closing")

    class Reviving(QP):
        def __del__(self) -> None:
            kept.append(self)

    def told() -> None:
        print(ended)
        ended.clear()

    sys.unraisablehook = lambda what: print("ignored:", what.exc_value, whose(what))
    for cycles in (False, True):
        ctx = Context(name="soft0")
        pd, channel = PD(ctx), Channel(ctx)
        cq, own = v.cq.CQ(ctx, 50, None, channel), CQ(ctx, 50, None, channel)
        mr, srq = MR(pd, 4096, 1), SRQ(pd, v.srq.SrqInitAttr(v.srq.SrqAttr()))
        for cls in (QP, Inheriting, Overriding, Calling, Failing, Closing, Reviving):
            made = cls(pd, v.rc(cq))
            made.to_init(v.qp.QPAttr(port_num=1))
            if cycles:
                made.me = made
            del made
            gc.collect()
            told()
        revived = kept.pop()
        v.receive(revived, mr, 1)
        print(revived.qp_state)
        revived.close()
        del revived
        if cycles:
            mr.me = srq.me = own.me = mr
        del mr, srq, own
        gc.collect()
        told()
        # Nothing that stands on them is left.
        attempt("PD", pd.close)
        attempt("CQ", cq.close)
        attempt("channel", channel.close)
        attempt("context", ctx.close)
        del pd, cq, channel, ctx
        told()


def main() -> None:
    faulthandler.enable()
    package, name = sys.argv[1:3]
    importlib.import_module(package)
    SCENARIOS[name](Verbs(package))


if __name__ == "__main__":
    main()
