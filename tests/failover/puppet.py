# SPDX-License-Identifier: BSD-3-Clause
"""A host on strings: a child that carries out, line by line, what a test tells it to.

Each line of standard input is a JSON string of Python source; the value of its last expression comes back as a line
`=> JSON`, an exception as `!! JSON`. The first argument is the package to use, `shiftverbs` or `pyverbs`.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import sys
import time
import traceback
from typing import Any

PACKAGE = sys.argv[1]


def module(name: str) -> Any:
    """A module of the package under test."""
    return importlib.import_module(f"{PACKAGE}.{name}")


if PACKAGE == "pyverbs":
    from shiftverbs import softrnic

    softrnic.enable()

# pyverbs 57 and later have another name for it; shiftverbs has both.
e = module("enums" if importlib.util.find_spec(f"{PACKAGE}.enums") else "libibverbs_enums")
addr, cq, device, mr, pd, qp, wr = map(module, ("addr", "cq", "device", "mr", "pd", "qp", "wr"))
SLOT = 4096
STATUS = {getattr(e, name): name[7:] for name in dir(e) if name.startswith("IBV_WC_") and name.endswith("_ERR")}
STATUS[0] = "SUCCESS"
ACCESS = (
    e.IBV_ACCESS_LOCAL_WRITE
    | e.IBV_ACCESS_REMOTE_WRITE
    | e.IBV_ACCESS_REMOTE_READ
    | e.IBV_ACCESS_REMOTE_ATOMIC
)


class Endpoint:
    """One RC QP with its CQ and a buffer of numbered slots of SLOT bytes; split: with one CQ for each queue."""

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
        self.cq = shared.cq if shared else cq.CQ(self.context, 4 * depth, None, self.channel, 0)
        self.recv_cq = cq.CQ(self.context, 2 * depth, None, self.channel, 0) if split else self.cq
        self.access = access
        self.mr = mr.MR(self.pd, SLOT * 64, access)
        cap = qp.QPCap(max_send_wr=depth, max_recv_wr=depth, max_inline_data=inline)
        init = qp.QPInitAttr(
            qp_type=e.IBV_QPT_RC, scq=self.cq, rcq=self.recv_cq, cap=cap, sq_sig_all=sq_sig_all
        )
        self.qp = qp.QP(self.pd, init)
        self.gid = self.context.query_gid(1, 1)
        self.peer: dict[str, Any] = {}

    def name(self) -> dict[str, Any]:
        """What the peer needs to connect."""
        return {"gid": str(self.gid), "qpn": self.qp.qp_num, "rkey": self.mr.rkey, "addr": self.mr.buf}

    def attr(self, timeout: int = 12, retry: int = 3, rnr: int = 7) -> Any:
        """QPAttr towards the peer."""
        a = qp.QPAttr(port_num=1)
        a.qp_access_flags = self.access
        a.path_mtu = e.IBV_MTU_1024
        a.dest_qp_num = self.peer["qpn"]
        a.rq_psn = a.sq_psn = 77
        a.max_rd_atomic = a.max_dest_rd_atomic = 4
        a.min_rnr_timer = 1
        a.timeout, a.retry_cnt, a.rnr_retry = timeout, retry, rnr
        gr = addr.GlobalRoute(dgid=addr.GID(self.peer["gid"]), sgid_index=1, hop_limit=64)
        a.ah_attr = addr.AHAttr(port_num=1, is_global=1, gr=gr)
        return a

    def connect(self, peer: dict[str, Any], **attrs: int) -> None:
        """To RTS."""
        self.peer = peer
        self.qp.to_rts(self.attr(**attrs))

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
            wr_id, opcode=getattr(e, "IBV_WR_" + opcode), num_sge=1, sg=[sge], send_flags=flags, imm_data=imm or 0
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
        while len(seen) < count and time.monotonic() < deadline:
            _, wcs = (queue or self.cq).poll(min(most, max(1, count - len(seen))))
            for wc in wcs:
                seen.append([wc.wr_id, STATUS.get(wc.status, wc.status), wc.byte_len, wc.qp_num == self.qp.qp_num])
        return seen

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
            what = {"type": type(error).__name__, "text": str(error), "code": getattr(error, "error_code", None)}
            text = "!! " + json.dumps(what)
        sys.stdout.write(text + "\n")  # one write: log lines must not come between
        sys.stdout.flush()


if __name__ == "__main__":
    main()
