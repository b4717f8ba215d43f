# SPDX-License-Identifier: BSD-3-Clause
"""Verbs objects of one RC connection, made as any verbs program makes them, with pyverbs or shiftverbs."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import ModuleType
from typing import Any

from shiftverbs.native.ibv import GidTypeSysfs

__all__ = ["Endpoint", "Peer", "Verbs", "wc_status_name"]

GID_ROWS = 16


class Verbs:
    """The modules of one verbs package: Verbs("pyverbs").qp is pyverbs.qp, Verbs("shiftverbs").qp shiftverbs.qp."""

    def __init__(self, package: str) -> None:
        self.package = package
        self.device = self._module("device")
        self.pd = self._module("pd")
        self.mr = self._module("mr")
        self.cq = self._module("cq")
        self.qp = self._module("qp")
        self.addr = self._module("addr")
        self.wr = self._module("wr")
        self.error = self._module("pyverbs_error")
        # Constants alone, the same for both; where and how pyverbs spells them differs between its releases.
        self.e = importlib.import_module("shiftverbs.enums")

    def _module(self, name: str) -> ModuleType:
        return importlib.import_module(f"{self.package}.{name}")


def wc_status_name(verbs: Verbs, status: int) -> str:
    """Return "RETRY_EXC_ERR" for IBV_WC_RETRY_EXC_ERR, else the number."""
    for name in dir(verbs.e):
        if name.startswith("IBV_WC_") and name.endswith("_ERR") and getattr(verbs.e, name) == status:
            return name.removeprefix("IBV_WC_")
    return f"status {status}"


@dataclass(frozen=True)
class Peer:
    """What one side must know of the other; travels as JSON."""

    gid: str
    qpn: int
    psn: int
    address: int
    rkey: int

    def to_json(self) -> dict[str, object]:
        """Return it as a JSON object."""
        return asdict(self)


class Endpoint:
    """Context, PD, one MR, CQs and an RC QP on one device.

    length: bytes of the MR. depth: (send WRs, receive WRs). one_cq: send and receive completions share a CQ.
    """

    # About 17 ms per try. Seven tries, a good 100 ms: a failure is seen soon, but a program that did not get its
    # share of a busy machine for a moment is not taken for one.
    # min_rnr_timer 12 is 0.64 ms, path_mtu 3 is IBV_MTU_1024.
    ATTRS: Mapping[str, int] = {"timeout": 12, "retry_cnt": 6, "min_rnr_timer": 12, "path_mtu": 3}

    def __init__(self, verbs: Verbs, device: str, length: int, depth: tuple[int, int], one_cq: bool) -> None:
        v, e = verbs, verbs.e
        self.verbs = verbs
        self.context = v.device.Context(name=device)
        self.pd = v.pd.PD(self.context)
        access = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE | e.IBV_ACCESS_REMOTE_READ
        self.access = access
        self.mr = v.mr.MR(self.pd, length, access)
        sends, receives = depth
        if one_cq:
            self.send_cq = self.recv_cq = v.cq.CQ(self.context, sends + receives)
        else:
            self.send_cq = v.cq.CQ(self.context, sends)
            self.recv_cq = v.cq.CQ(self.context, receives)
        cap = v.qp.QPCap(max_send_wr=sends, max_recv_wr=receives, max_send_sge=1, max_recv_sge=1)
        init = v.qp.QPInitAttr(
            qp_type=e.IBV_QPT_RC, scq=self.send_cq, rcq=self.recv_cq, cap=cap, sq_sig_all=0
        )
        self.qp = v.qp.QP(self.pd, init)
        self.gid_index, self.gid = self._find_gid()
        self.attrs = dict(self.ATTRS)
        self.psn = (self.qp.qp_num * 7919) & 0xFFFFFF
        attributes = self.context.query_device()
        self.rd_atomic = max(1, min(16, attributes.max_qp_rd_atom, attributes.max_qp_init_rd_atom))

    def _find_gid(self) -> tuple[int, str]:
        """Return the first IPv4-mapped GID of RoCE v2, else the first that is not zero."""
        fallback: tuple[int, str] | None = None
        for index in range(GID_ROWS):
            try:
                gid = str(self.context.query_gid(1, index))
            except self.verbs.error.PyverbsError:
                break
            groups = gid.split(":")
            if (
                groups[:6] == ["0000"] * 5 + ["ffff"]
                and self.context.query_gid_type(1, index) == GidTypeSysfs.ROCE_V2
            ):
                return index, gid
            if fallback is None and set(gid) - set("0:"):
                fallback = (index, gid)
        if fallback is None:
            raise RuntimeError("the port has no GID")
        return fallback

    def peer(self) -> Peer:
        """Return what the other side must know of us."""
        return Peer(self.gid, self.qp.qp_num, self.psn, self.mr.buf, self.mr.rkey)

    def connect(self, peer: Peer) -> None:
        """Bring the QP to RTS towards the peer."""
        v = self.verbs
        attr: Any = v.qp.QPAttr(port_num=1)
        attr.qp_access_flags = self.access
        attr.dest_qp_num = peer.qpn
        attr.rq_psn = peer.psn
        attr.sq_psn = self.psn
        attr.max_rd_atomic = self.rd_atomic
        attr.max_dest_rd_atomic = self.rd_atomic
        for name, value in self.attrs.items():
            setattr(attr, name, value)
        attr.rnr_retry = 7  # without end: flow control is the application's
        route = v.addr.GlobalRoute(dgid=v.addr.GID(peer.gid), sgid_index=self.gid_index, hop_limit=64)
        attr.ah_attr = v.addr.AHAttr(port_num=1, is_global=1, gr=route, dlid=0)
        self.qp.to_rts(attr)

    def close(self) -> None:
        """Destroy everything, users first."""
        for thing in (self.qp, self.send_cq, self.recv_cq, self.mr, self.pd, self.context):
            thing.close()
