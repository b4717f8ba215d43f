# SPDX-License-Identifier: BSD-3-Clause
"""A host on strings: a child that carries out, line by line, what a test tells it to.

Each line of standard input is a JSON string of Python source; the value of its last expression comes back as a line
`=> JSON`, an exception as `!! JSON`. The first argument is the package to use, `shiftverbs` or `pyverbs`.
"""

from __future__ import annotations

import ast
import errno
import importlib
import importlib.util
import json
import os
import signal
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable
from typing import Any

PACKAGE = sys.argv[1]
# How its applications behave beside what a test says: "" (they poll, one QP on a CQ), "blocks", "shares".
HABIT = os.environ.get("FAILOVER_HABIT", "")
# As programs have it written in them: RoCE v2 over IPv4.
GID_INDEX = int(os.environ.get("FAILOVER_GID", "3"))


def module(name: str) -> Any:
    """A module of the package under test."""
    return importlib.import_module(f"{PACKAGE}.{name}")


# 67 ms in all. With plain pyverbs 2 s: nothing saves a QP whose peer is late by that on a busy machine.
TIMEOUT, RETRY = (16, 7) if PACKAGE == "pyverbs" else (12, 3)

if PACKAGE == "pyverbs":
    from shiftverbs import softrnic

    softrnic.enable()

# Constants alone, the same for both; where and how pyverbs spells them differs between its releases.
e = importlib.import_module("shiftverbs.enums")
addr, cq, device, mr, pd, qp, wr = map(module, ("addr", "cq", "device", "mr", "pd", "qp", "wr"))
SLOT = 4096
STATUS = {
    getattr(e, name): name[7:] for name in dir(e) if name.startswith("IBV_WC_") and name.endswith("_ERR")
}
STATUS[0] = "SUCCESS"
ACCESS = (
    e.IBV_ACCESS_LOCAL_WRITE
    | e.IBV_ACCESS_REMOTE_WRITE
    | e.IBV_ACCESS_REMOTE_READ
    | e.IBV_ACCESS_REMOTE_ATOMIC
)


class TimeIsOver(Exception):
    """Raised by the alarm in get_cq_event."""


def time_is_over(number: int, frame: Any) -> None:
    """The alarm's handler."""
    raise TimeIsOver


class Endpoint:
    """One RC QP with its CQ and a buffer of numbered slots of SLOT bytes; split: with one CQ for each queue.

    With the habit "blocks" it sleeps in get_cq_event where it would poll; with "shares" a second QP, with receives
    outstanding and messages both ways so far, is on the same CQ.
    """

    beside: Any = None
    _talks = False
    # Those of the habit; with a channel of its own a test says itself how it waits.
    _channels: dict[int, Any] = types.MappingProxyType({})  # type: ignore[assignment]

    def __init__(
        self,
        context: Any = None,
        depth: int = 16,
        channel: bool = False,
        access: int = ACCESS,
        shared: Endpoint | None = None,
        inline: int = 0,
        sq_sig_all: int = 0,
        split: bool = False,
    ) -> None:
        self.context = context or (shared.context if shared else device.Context(name="soft0"))
        self.pd = shared.pd if shared else pd.PD(self.context)
        self.channel = cq.CompChannel(self.context) if channel else None
        self._channels = {}
        self.cq = shared.cq if shared else self._cq(4 * depth)
        self.recv_cq = self._cq(2 * depth) if split else self.cq
        self.access = access
        self.mr = mr.MR(self.pd, SLOT * 64, access)
        cap = qp.QPCap(max_send_wr=depth, max_recv_wr=depth, max_inline_data=inline)
        init = qp.QPInitAttr(
            qp_type=e.IBV_QPT_RC, scq=self.cq, rcq=self.recv_cq, cap=cap, sq_sig_all=sq_sig_all
        )
        self.qp = qp.QP(self.pd, init)
        if HABIT == "shares" and shared is None:
            self.beside = qp.QP(self.pd, init)
        self.gid = self.context.query_gid(1, GID_INDEX)
        self.peer: dict[str, Any] = {}

    def _cq(self, depth: int) -> Any:
        if HABIT == "blocks" and self.channel is None:
            channel = cq.CompChannel(self.context)
            made = cq.CQ(self.context, depth, None, channel, 0)
            self._channels[id(made)] = channel
            return made
        return cq.CQ(self.context, 2 * depth if HABIT == "shares" else depth, None, self.channel, 0)

    def name(self) -> dict[str, Any]:
        """What the peer needs to connect."""
        beside = self.beside.qp_num if self.beside is not None else None
        return {
            "gid": str(self.gid), "qpn": self.qp.qp_num, "rkey": self.mr.rkey, "addr": self.mr.buf, "beside": beside
        }  # fmt: skip

    def attr(self, timeout: int = TIMEOUT, retry: int = RETRY, rnr: int = 7) -> Any:
        """QPAttr towards the peer."""
        a = qp.QPAttr(port_num=1)
        a.qp_access_flags = self.access
        a.path_mtu = e.IBV_MTU_1024
        a.dest_qp_num = self.peer["qpn"]
        a.rq_psn = a.sq_psn = 77
        a.max_rd_atomic = a.max_dest_rd_atomic = 4
        a.min_rnr_timer = 1
        a.timeout, a.retry_cnt, a.rnr_retry = timeout, retry, rnr
        gr = addr.GlobalRoute(dgid=addr.GID(self.peer["gid"]), sgid_index=GID_INDEX, hop_limit=64)
        a.ah_attr = addr.AHAttr(port_num=1, is_global=1, gr=gr)
        return a

    def connect(self, peer: dict[str, Any], **attrs: int) -> None:
        """To RTS."""
        self.peer = peer
        self.qp.to_rts(self.attr(**attrs))
        if self.beside is not None and peer.get("beside") and not self._talks:
            self._talks = True
            a = self.attr()
            a.dest_qp_num = peer["beside"]
            self.beside.to_rts(a)
            sge = wr.SGE(self.mr.buf + 63 * SLOT, 8, self.mr.lkey)
            for i in range(6):
                self.beside.post_recv(wr.RecvWR(900 + i, 1, [sge]))
            for flags in (0, e.IBV_SEND_SIGNALED):
                self.beside.post_send(
                    wr.SendWR(990, opcode=e.IBV_WR_SEND, num_sge=1, sg=[sge], send_flags=flags)
                )

    def recv(self, slot: int, wr_id: int | None = None, length: int = SLOT) -> None:
        """Post one receive into a slot."""
        sge = wr.SGE(self.mr.buf + slot * SLOT, length, self.mr.lkey)
        self.qp.post_recv(wr.RecvWR(slot if wr_id is None else wr_id, 1, [sge]))

    def post(
        self,
        opcode: str,
        slot: int = 0,
        length: int = 64,
        wr_id: int = 0,
        signaled: bool = True,
        flags: int = 0,
        remote_slot: int | None = None,
        lkey: int | None = None,
        rkey: int | None = None,
        imm: int | None = None,
        compare: int = 0,
        swap: int = 0,
    ) -> None:
        """Post one send WR: SEND, SEND_WITH_IMM, RDMA_WRITE, RDMA_WRITE_WITH_IMM, RDMA_READ, ATOMIC_…"""
        sge = wr.SGE(self.mr.buf + slot * SLOT, length, self.mr.lkey if lkey is None else lkey)
        flags |= e.IBV_SEND_SIGNALED if signaled else 0
        w = wr.SendWR(
            wr_id,
            opcode=getattr(e, "IBV_WR_" + opcode),
            num_sge=1,
            sg=[sge],
            send_flags=flags,
            imm_data=imm or 0,
        )
        remote = self.peer["addr"] + (slot if remote_slot is None else remote_slot) * SLOT
        if "RDMA" in opcode:
            w.set_wr_rdma(self.peer["rkey"] if rkey is None else rkey, remote)
        elif "ATOMIC" in opcode:
            w.set_wr_atomic(self.peer["rkey"] if rkey is None else rkey, remote, compare, swap)
        self.qp.post_send(w)

    def fill(self, slot: int, text: str) -> None:
        """Write text into a slot."""
        self.mr.write(text.encode(), len(text.encode()), slot * SLOT)

    def text(self, slot: int, length: int) -> str:
        """Read text from a slot."""
        return self.mr.read(length, slot * SLOT).decode(errors="replace")  # type: ignore[no-any-return]

    def number(self, slot: int) -> int:
        """A slot's first 8 bytes as a little-endian number."""
        return int.from_bytes(self.mr.read(8, slot * SLOT), "little")

    def poll(self, count: int = 1, timeout_s: float = 10.0, most: int = 16, queue: Any = None) -> list[Any]:
        """Poll until count WCs came or the time is over: [wr_id, status, byte_len, qp_num is ours]."""
        seen: list[Any] = []
        deadline = time.monotonic() + timeout_s
        queue = queue or self.cq
        late = False
        while len(seen) < count and not late:
            late = time.monotonic() >= deadline  # looked at before: what is there is found at least once
            _, wcs = queue.poll(min(most, max(1, count - len(seen))))
            if not wcs and id(queue) in self._channels:
                queue.req_notify()
                _, wcs = queue.poll(1)
                if not wcs:
                    self._sleep(queue, deadline - time.monotonic())
            for wc in wcs:
                if self.beside is not None and wc.qp_num == self.beside.qp_num:
                    continue
                seen.append(
                    [wc.wr_id, STATUS.get(wc.status, wc.status), wc.byte_len, wc.qp_num == self.qp.qp_num]
                )
        return seen

    def _sleep(self, queue: Any, for_s: float) -> None:
        """In get_cq_event; for_s: seconds."""
        before = signal.signal(signal.SIGALRM, time_is_over)
        try:
            signal.setitimer(signal.ITIMER_REAL, max(for_s, 0.001))
            self._channels[id(queue)].get_cq_event(queue)
            signal.setitimer(signal.ITIMER_REAL, 0)
            queue.ack_events(1)
        except TimeIsOver:
            pass
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    def none(self, for_s: float = 0.2) -> list[Any]:
        """What comes in a while in which nothing should."""
        return self.poll(1, for_s)

    def shift(self) -> dict[str, Any]:
        """`qp.shift` as a dict."""
        s = self.qp.shift
        names = "status why state recv_state path recv_path pair counters durations history".split()
        return {name: getattr(s, name) for name in names}

    def wait(self, expression: str, timeout_s: float = 10.0, poll: bool = False) -> Any:
        """Wait until an expression over `s` (qp.shift) is true; returns it. poll: poll the CQ meanwhile."""
        deadline = time.monotonic() + timeout_s
        kept: list[Any] = []
        while True:
            value = eval(expression, {"s": self.qp.shift, "ep": self})
            if value:
                return kept if poll else value
            if time.monotonic() > deadline:
                raise TimeoutError(f"not within {timeout_s} s: {expression}; {self.shift()}")
            if poll:
                kept += self.poll(1, 0.005)
            else:
                time.sleep(0.002)


SEND_OPS = (
    "SEND SEND_WITH_IMM SEND_WITH_INV RDMA_WRITE RDMA_WRITE_WITH_IMM RDMA_READ ATOMIC_CMP_AND_SWP "
    "ATOMIC_FETCH_AND_ADD LOCAL_INV"
)


class Extended(Endpoint):
    """The same with a CQEX for each queue and a QPEx; ops: its send operations; sges, depth, inline: its capacities."""

    def __init__(self, ops: str = SEND_OPS, depth: int = 16, inline: int = 128, sges: int = 4) -> None:
        self.context = device.Context(name="soft0")
        self.pd = pd.PD(self.context)
        self.cq = cq.CQEX(self.context, cq.CqInitAttrEx(cqe=4 * depth, wc_flags=e.IBV_WC_STANDARD_FLAGS))
        self.recv_cq = cq.CQEX(self.context, cq.CqInitAttrEx(cqe=2 * depth, wc_flags=e.IBV_WC_STANDARD_FLAGS))
        self.access = ACCESS
        self.mr = mr.MR(self.pd, SLOT * 64, ACCESS)
        init = qp.QPInitAttrEx(
            qp_type=e.IBV_QPT_RC,
            scq=self.cq,
            rcq=self.recv_cq,
            cap=qp.QPCap(depth, depth, sges, 1, inline),
            pd=self.pd,
            comp_mask=e.IBV_QP_INIT_ATTR_PD | e.IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
            send_ops_flags=sum(getattr(e, "IBV_QP_EX_WITH_" + name) for name in ops.split()),
        )
        self.qp = qp.QPEx(self.context, init)
        self.gid = self.context.query_gid(1, GID_INDEX)

    def at(self, slot: int) -> tuple[int, int]:
        """(rkey, address) of a slot of the peer's."""
        return self.peer["rkey"], self.peer["addr"] + slot * SLOT

    def sge(self, slot: int, length: int) -> Any:
        """An SGE of a slot of our own."""
        return wr.SGE(self.mr.buf + slot * SLOT, length, self.mr.lkey)

    def wr(self, wr_id: int, operation: str, *args: Any, signaled: bool = True, flags: int = 0) -> None:
        """Begin a WR: wr_id, and the method wr_<operation>(*args)."""
        self.qp.wr_id = wr_id
        self.qp.wr_flags = flags | (e.IBV_SEND_SIGNALED if signaled else 0)
        getattr(self.qp, "wr_" + operation)(*args)

    def read(self, queue: Any) -> dict[str, Any]:
        """All that can be read of the completion under the cursor."""
        found = {"wr_id": queue.wr_id, "status": STATUS.get(queue.status, queue.status)}
        names = "opcode vendor_err byte_len imm_data qp_num src_qp wc_flags slid sl dlid_path_bits".split()
        return {**found, **{name: getattr(queue, "read_" + name)() for name in names}}

    def batch(self, queue: Any, most: int = 16) -> list[dict[str, Any]]:
        """One start_poll … end_poll; at most so many completions."""
        found: list[dict[str, Any]] = []
        rc = queue.start_poll(cq.PollCqAttr())
        while rc == 0:
            found.append(self.read(queue))
            if len(found) == most:
                break
            rc = queue.poll_next()
        if rc not in (0, errno.ENOENT):
            raise OSError(rc, "CQEX")
        if found:
            queue.end_poll()
        return found

    def take(
        self, count: int, queue: Any = None, timeout_s: float = 10.0, most: int = 16
    ) -> list[dict[str, Any]]:
        """Poll until count completions came or the time is over."""
        found: list[dict[str, Any]] = []
        deadline = time.monotonic() + timeout_s
        while len(found) < count and time.monotonic() < deadline:
            found += self.batch(queue or self.cq, min(most, count - len(found)))
        return found

    def poll(self, count: int = 1, timeout_s: float = 10.0, most: int = 16, queue: Any = None) -> list[Any]:
        """As Endpoint.poll."""
        found = self.take(count, queue, timeout_s, most)
        return [[x["wr_id"], x["status"], x["byte_len"], x["qp_num"] == self.qp.qp_num] for x in found]


def when_it_waits(then: Callable[[], Any], timeout_s: float = 20.0, where: str = "in_slices") -> None:
    """then(), in another thread, as soon as the main thread waits for a NIC, or is in the function `where`; or never,
    if that is not so in time.
    """
    main_thread = threading.main_thread().ident

    def waits() -> bool:
        frame = sys._current_frames().get(main_thread or 0)
        while frame is not None and frame.f_code.co_name != where:
            frame = frame.f_back
        return frame is not None

    def watch() -> None:
        deadline = time.monotonic() + timeout_s
        while not waits():
            if time.monotonic() > deadline:
                return
            time.sleep(0.002)
        then()

    threading.Thread(target=watch).start()


def ring(number: int) -> None:
    """A signal for the main thread."""
    signal.pthread_kill(threading.main_thread().ident or 0, number)


def run(source: str, names: dict[str, Any]) -> Any:
    """Execute source; return the value of its last expression."""
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "<test>", "exec"), names)
    if isinstance(last, ast.Expr):
        return eval(compile(ast.Expression(last.value), "<test>", "eval"), names)
    return None


def main() -> None:
    """Obey."""
    names = dict(globals())
    print("=> null", flush=True)
    for line in sys.stdin:
        try:
            text = "=> " + json.dumps(run(json.loads(line), names))
        except SystemExit:
            raise  # a forked child that ends as a program does
        except BaseException as error:
            names["error"] = error
            traceback.print_exc()
            what = {
                "type": type(error).__name__,
                "text": str(error),
                "code": getattr(error, "error_code", None),
            }
            text = "!! " + json.dumps(what)
        sys.stdout.write(text + "\n")  # one write: log lines must not come between
        sys.stdout.flush()


if __name__ == "__main__":
    main()
