# SPDX-License-Identifier: BSD-3-Clause
"""For programs in one process whose QPs on soft0 talk to each other, with pyverbs or with shiftverbs: shorthands."""

from __future__ import annotations

import importlib
import re
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple


def whose(what: Any) -> str:
    """The name of what raised into sys.unraisablehook; from Python 3.14 on it is told in a text alone."""
    if what.object is not None:
        return getattr(what.object, "__qualname__", repr(what.object))
    found = re.search(r"function (\S+) at 0x", what.err_msg or "")
    return found[1] if found else str(what.err_msg)


class Connected(NamedTuple):
    """Two connected RC QPs, and what they stand on."""

    ctx: Any
    pd: Any
    cq: Any
    mr: Any
    first: Any
    second: Any


class Verbs:
    """The modules of one package, and shorthands."""

    def __init__(self, package: str) -> None:
        self.package = package
        names = "device pd mr cq qp addr wr pyverbs_error srq wq xrcd mem_alloc fork".split()
        for name in names:
            setattr(self, name, importlib.import_module(f"{package}.{name}"))
        # Constants alone, the same for both; where and how pyverbs spells them differs between its releases.
        self.e: Any = importlib.import_module("shiftverbs.enums")

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)

    def context(self) -> Any:
        return self.device.Context(name="soft0")

    def cap(self, send: int = 20, recv: int = 30, sges: int = 2, inline: int = 32) -> Any:
        return self.qp.QPCap(send, recv, sges, sges, inline)

    def rc(self, cq: Any, cap: Any = None, **more: Any) -> Any:
        return self.qp.QPInitAttr(qp_type=self.e.IBV_QPT_RC, scq=cq, rcq=cq, cap=cap or self.cap(), **more)

    def attr(self, ctx: Any, peer: int) -> Any:
        attr = self.qp.QPAttr(port_num=1)
        attr.dest_qp_num = peer
        attr.path_mtu = self.e.IBV_MTU_1024
        attr.rq_psn = attr.sq_psn = 7
        attr.max_rd_atomic = attr.max_dest_rd_atomic = 2
        attr.min_rnr_timer, attr.timeout, attr.retry_cnt, attr.rnr_retry = 12, 14, 6, 7
        attr.qp_access_flags = self.e.IBV_ACCESS_LOCAL_WRITE | self.e.IBV_ACCESS_REMOTE_WRITE
        route = self.addr.GlobalRoute(dgid=ctx.query_gid(1, 0), sgid_index=0)
        attr.ah_attr = self.addr.AHAttr(gr=route, is_global=1, port_num=1)
        return attr

    def connect(self, ctx: Any, first: Any, second: Any) -> None:
        for mine, theirs in ((first, second), (second, first)):
            mine.to_rts(self.attr(ctx, theirs.qp_num))

    def pair(self, ctx: Any, pd: Any, cq: Any, other: Any = None, **more: Any) -> tuple[Any, Any]:
        """Two connected RC QPs."""
        first = self.qp.QP(pd, self.rc(cq, **more))
        second = self.qp.QP(pd, self.rc(other or cq, **more))
        self.connect(ctx, first, second)
        return first, second

    def connected(self, channel: bool = False) -> Connected:
        """Two connected RC QPs on a Context of their own; channel: their CQ has one, its `comp_channel`."""
        ctx = self.context()
        events = self.cq.CompChannel(ctx) if channel else None
        pd, cq = self.pd.PD(ctx), self.cq.CQ(ctx, 20, None, events)
        mr = self.mr.MR(pd, 4096, self.e.IBV_ACCESS_LOCAL_WRITE)
        return Connected(ctx, pd, cq, mr, *self.pair(ctx, pd, cq))

    def send(self, qp: Any, mr: Any, wr_id: int, length: int = 64, flags: int | None = None) -> None:
        flags = self.e.IBV_SEND_SIGNALED if flags is None else flags
        sge = self.wr.SGE(mr.buf, length, mr.lkey)
        wr = self.wr.SendWR(wr_id=wr_id, opcode=self.e.IBV_WR_SEND, num_sge=1, sg=[sge], send_flags=flags)
        qp.post_send(wr)

    def receive(self, qp: Any, mr: Any, wr_id: int, length: int = 64) -> None:
        sge = self.wr.SGE(mr.buf + 2048, length, mr.lkey)
        qp.post_recv(self.wr.RecvWR(wr_id=wr_id, num_sge=1, sg=[sge]))

    def exchange(self, first: Any, second: Any, mr: Any, cq: Any, received: int, sent: int) -> list[Any]:
        """A SEND from first to second, with these wr_ids. Returns the completions of both, from the CQ they share."""
        self.receive(second, mr, received)
        self.send(first, mr, sent)
        return collect(cq, 2)


def collect(cq: Any, count: int, timeout_s: float = 10.0) -> list[Any]:
    """Poll until count completions are there."""
    found: list[Any] = []
    deadline = time.monotonic() + timeout_s
    while len(found) < count:
        number, wcs = cq.poll(count)
        assert number == len(wcs)
        found += wcs
        assert time.monotonic() < deadline, f"{len(found)} of {count} completions"
    return found


def in_threads(count: int, work: Callable[[], None]) -> list[BaseException]:
    """Run work() in so many threads at once, to their ends. Returns what was raised."""
    failures: list[BaseException] = []

    def guarded() -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failures


def show(wcs: list[Any]) -> list[tuple[int, int, int, int]]:
    return sorted((wc.wr_id, wc.status, wc.opcode if not wc.status else -1, wc.byte_len) for wc in wcs)
