# SPDX-License-Identifier: BSD-3-Clause
"""The child side of hosts.py: a process on one host of the software network, driven by JSON lines.

Commands come on standard input as {"on": object, "call": method, "args": [...], "kw": {...}}; answers go to the
descriptor named in the first argument as {"result": ...} or {"error": [type, text, errno]}. The traffic is plain
pyverbs; nothing of shiftverbs but the software NIC takes part.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import json
import mmap
import os
import random
import select
import socket
import sys
import threading
import time
from typing import Any

from shiftverbs import softrnic
from shiftverbs.softrnic import faults

softrnic.enable()

# isort: split  (the library must come before pyverbs)
# ruff: noqa: E402
from pyverbs.addr import AH, GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ, CQEX, WC, CompChannel, CqInitAttrEx, PollCqAttr
from pyverbs.device import Context, get_device_list
from pyverbs.mr import MR, MW, MWBind, MWBindInfo
from pyverbs.pd import PD
from pyverbs.pyverbs_error import PyverbsRDMAError
from pyverbs.qp import QP, QPAttr, QPCap, QPEx, QPInitAttr, QPInitAttrEx
from pyverbs.srq import SRQ, SrqAttr, SrqInitAttr
from pyverbs.wr import SGE, RecvWR, SendWR

import shiftverbs.enums as e

ALL_ACCESS = (
    e.IBV_ACCESS_LOCAL_WRITE
    | e.IBV_ACCESS_REMOTE_WRITE
    | e.IBV_ACCESS_REMOTE_READ
    | e.IBV_ACCESS_REMOTE_ATOMIC
    | e.IBV_ACCESS_MW_BIND
)
ALL_SEND_OPS = {
    "RC": "SEND SEND_WITH_IMM SEND_WITH_INV RDMA_WRITE RDMA_WRITE_WITH_IMM RDMA_READ ATOMIC_CMP_AND_SWP "
    "ATOMIC_FETCH_AND_ADD LOCAL_INV BIND_MW",
    "UC": "SEND SEND_WITH_IMM RDMA_WRITE RDMA_WRITE_WITH_IMM LOCAL_INV BIND_MW",
    "UD": "SEND SEND_WITH_IMM",
}
RDMA_OPS = ("RDMA_WRITE", "RDMA_WRITE_WITH_IMM", "RDMA_READ")
ATOMIC_OPS = ("ATOMIC_CMP_AND_SWP", "ATOMIC_FETCH_AND_ADD")


LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mmap.restype = ctypes.c_void_p
LIBC.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
LIBC.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
# Never garbage: the collector clears an MR before it is closed, and pyverbs 44 then takes its memory for its own and
# frees it.
ON_PAGES: list[MR] = []
PROTECTION = {"none": 0, "read": mmap.PROT_READ, "read_write": mmap.PROT_READ | mmap.PROT_WRITE}


def enum_names(prefix: str) -> dict[int, str]:
    """Value -> name without prefix, for the constants of pyverbs that start with it."""
    return {int(getattr(e, name)): name[len(prefix) :] for name in dir(e) if name.startswith(prefix)}


WC_STATUS = {
    int(getattr(e, f"IBV_WC_{name}")): name
    for name in (
        "SUCCESS LOC_LEN_ERR LOC_QP_OP_ERR LOC_PROT_ERR WR_FLUSH_ERR MW_BIND_ERR BAD_RESP_ERR LOC_ACCESS_ERR "
        "REM_INV_REQ_ERR REM_ACCESS_ERR REM_OP_ERR RETRY_EXC_ERR RNR_RETRY_EXC_ERR REM_ABORT_ERR FATAL_ERR "
        "RESP_TIMEOUT_ERR GENERAL_ERR"
    ).split()
}
WC_OPCODE = {
    int(getattr(e, f"IBV_WC_{name}")): name
    for name in "SEND RDMA_WRITE RDMA_READ COMP_SWAP FETCH_ADD RECV RECV_RDMA_WITH_IMM BIND_MW LOCAL_INV".split()
}
QP_STATE = enum_names("IBV_QPS_")
EVENT = enum_names("IBV_EVENT_")
MTU = {
    256: e.IBV_MTU_256,
    512: e.IBV_MTU_512,
    1024: e.IBV_MTU_1024,
    2048: e.IBV_MTU_2048,
    4096: e.IBV_MTU_4096,
}


def flag_bits(names: str, prefix: str) -> int:
    bits = 0
    for name in names.split():
        bits |= int(getattr(e, prefix + name.upper()))
    return bits


def stream(seed: int, length: int) -> bytes:
    """The first bytes of the endless sequence that belongs to seed."""
    # Whole words only: a shorter request must be a prefix of a longer one.
    return random.Random(seed).randbytes(-(-length // 4) * 4)[:length]


class Device:
    """An open device: Context, PD and the asynchronous events."""

    def __init__(self, name: str, gid_index: int | None = None) -> None:
        self.ctx = Context(name=name)
        self.pd = PD(self.ctx)
        self.mrs: list[MR] = []
        # RoCE v2 over IPv4: the software RNIC's index 3, the kernel's soft-RoCE's 1; a null device has none.
        table = self.gid_table()
        wanted = (i for i, gid, kind in table if kind == "RoCE v2" and gid.startswith("0000:" * 5 + "ffff:"))
        self.gid_index = next(wanted, 0) if gid_index is None else gid_index

    def gid_table(self) -> list[tuple[int, str, str]]:
        """Index, GID and type of each entry (ibv_query_gid_table)."""
        kinds = {
            e.IBV_GID_TYPE_IB: "IB",
            e.IBV_GID_TYPE_ROCE_V1: "RoCE v1",
            e.IBV_GID_TYPE_ROCE_V2: "RoCE v2",
        }
        entries = self.ctx.query_gid_table(16)
        return [(entry.gid_index, entry.gid_str(), kinds[entry.gid_type]) for entry in entries]

    def gid_rows(self) -> list[tuple[str, int, tuple[str, int] | None]]:
        """Every line of the table, by ibv_query_gid, ibv_query_gid_type and ibv_query_gid_ex (None: empty)."""
        rows = []
        for index in range(self.ctx.query_port(1).gid_tbl_len):
            try:
                entry = self.ctx.query_gid_ex(1, index)
                found = (entry.gid_str(), int(entry.gid_type))
            except PyverbsRDMAError as error:
                assert error.error_code == errno.ENODATA, error
                found = None
            rows.append((str(self.ctx.query_gid(1, index)), int(self.ctx.query_gid_type(1, index)), found))
        return rows

    def port(self) -> dict[str, Any]:
        attr = self.ctx.query_port(1)
        return {
            "state": {e.IBV_PORT_DOWN: "DOWN", e.IBV_PORT_ACTIVE: "ACTIVE"}.get(attr.state, str(attr.state)),
            "link_layer": attr.link_layer,
            "active_mtu": attr.active_mtu,
            "gid_tbl_len": attr.gid_tbl_len,
            "pkey": self.ctx.query_pkey(1, 0),
        }

    def gid(self, index: int | None = None) -> str:
        return str(self.ctx.query_gid(1, self.gid_index if index is None else index))

    def device_attr(self) -> dict[str, Any]:
        attr = self.ctx.query_device()
        names = (
            "max_qp_wr",
            "max_sge",
            "max_cqe",
            "max_qp_rd_atom",
            "atomic_caps",
            "phys_port_cnt",
            "node_guid",
        )
        return {name: getattr(attr, name) for name in names}

    def event(self, timeout_s: float = 5.0) -> str | None:
        """The next asynchronous event's name, acknowledged; None if none comes in time."""
        if not select.select([self.async_fd()], [], [], timeout_s)[0]:
            return None
        event = self.ctx.get_async_event()
        event.ack()
        return EVENT[event.event_type]

    def async_fd(self) -> int:
        return async_fd_of(self.ctx)

    def reg(self, length: int, access: str) -> dict[str, int]:
        """One more memory region; its keys."""
        mr = MR(self.pd, length, flag_bits(access, "IBV_ACCESS_"))
        self.mrs.append(mr)
        return {"index": len(self.mrs) - 1, "addr": mr.buf, "lkey": mr.lkey, "rkey": mr.rkey}

    def dereg(self, index: int) -> None:
        self.mrs[index].close()

    def reg_pages(self, pages: int, access: str) -> dict[str, int]:
        """A memory region on pages of their own, which unmap() and protect() take away from under it."""
        size = pages * mmap.PAGESIZE
        # Far from where the kernel looks for room: nothing else comes there when these pages are gone.
        hint = 0x2000_0000_0000 + (len(self.mrs) << 30)
        addr = LIBC.mmap(hint, size, PROTECTION["read_write"], mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        assert addr == hint
        ctypes.memset(addr, 0xAA, size)
        mr = MR(self.pd, size, flag_bits(access, "IBV_ACCESS_"), addr)
        self.mrs.append(mr)
        ON_PAGES.append(mr)
        return {"index": len(self.mrs) - 1, "addr": addr, "lkey": mr.lkey, "rkey": mr.rkey, "size": size}

    def unmap(self, addr: int, size: int) -> None:
        """The memory is gone, and nothing else comes there."""
        assert LIBC.munmap(addr, size) == 0

    def protect(self, addr: int, size: int, how: str) -> None:
        """how: none, read, read_write."""
        assert LIBC.mprotect(addr, size, PROTECTION[how]) == 0

    def peek(self, addr: int, size: int) -> str:
        return ctypes.string_at(addr, size).hex()

    def flicker(self, addr: int, size: int) -> None:
        """Take the memory away and give it back, all the time, until steady()."""
        self.flickering = threading.Event()

        def work() -> None:
            while not self.flickering.is_set():
                self.protect(addr, size, "none")
                self.protect(addr, size, "read_write")

        self.flickerer = threading.Thread(target=work)
        self.flickerer.start()

    def steady(self) -> None:
        self.flickering.set()
        self.flickerer.join()

    def close(self) -> None:
        self.ctx.close()


def async_fd_of(ctx: Context) -> int:
    """async_fd out of struct ibv_context, through the pointer behind pyverbs' object header and vtable."""
    pointer = ctypes.c_void_p.from_address(id(ctx) + 40).value
    assert pointer is not None
    # device; struct ibv_context_ops (32 pointers); cmd_fd; async_fd
    return ctypes.c_int.from_address(pointer + 33 * ctypes.sizeof(ctypes.c_void_p) + 4).value


class Srq:
    """A shared receive queue with a registered buffer."""

    def __init__(self, device: Device, max_wr: int = 16, max_sge: int = 2, size: int = 1 << 16) -> None:
        self.mr = MR(device.pd, size, ALL_ACCESS)
        self.srq = SRQ(device.pd, SrqInitAttr(SrqAttr(max_wr=max_wr, max_sge=max_sge)))

    def recv(self, wr_id: int, length: int, offset: int = 0, sges: int = 1) -> None:
        pieces = [SGE(self.mr.buf + offset, length, self.mr.lkey)] * sges
        self.srq.post_recv(RecvWR(wr_id, sges, pieces))

    def recv_at(self, wr_id: int, addr: int, length: int, lkey: int) -> None:
        """A receive into any region."""
        self.srq.post_recv(RecvWR(wr_id, 1, [SGE(addr, length, lkey)]))

    def modify(self, mask: str, **fields: int) -> None:
        attr = SrqAttr()
        for name, value in fields.items():
            setattr(attr, name, value)
        self.srq.modify(attr, flag_bits(mask, "IBV_SRQ_"))

    def query(self) -> dict[str, int]:
        attr = self.srq.query()
        return {"max_wr": attr.max_wr, "max_sge": attr.max_sge, "srq_limit": attr.srq_limit}

    def matches(self, seed: int, length: int, offset: int = 0) -> bool:
        """Whether the buffer holds the seed's bytes."""
        return bool(self.mr.read(length, offset) == stream(seed, length))

    def close(self) -> None:
        self.srq.close()


class Endpoint:
    """A queue pair with its CQ and one registered buffer."""

    def __init__(
        self,
        device: Device,
        kind: str = "RC",
        size: int = 1 << 16,
        send_wr: int = 64,
        recv_wr: int = 64,
        sges: int = 8,
        inline: int = 256,
        cqe: int = 512,
        sig_all: bool = False,
        channel: bool = False,
        share: Endpoint | None = None,
        srq: Srq | None = None,
        extended: bool = False,
    ) -> None:
        self.device = device
        self.kind = kind
        self.channel = share.channel if share else CompChannel(device.ctx) if channel else None
        if share:
            self.cq = share.cq
        elif extended:
            attr_ex = CqInitAttrEx(cqe=cqe, channel=self.channel, wc_flags=e.IBV_WC_STANDARD_FLAGS)
            self.cq = CQEX(device.ctx, attr_ex)
        else:
            self.cq = CQ(device.ctx, cqe, channel=self.channel)
        self.mr = MR(device.pd, size, ALL_ACCESS)
        cap = QPCap(send_wr, recv_wr, sges, sges, inline)
        common = {
            "qp_type": {"RC": e.IBV_QPT_RC, "UC": e.IBV_QPT_UC, "UD": e.IBV_QPT_UD}[kind],
            "scq": self.cq,
            "rcq": self.cq,
            "cap": cap,
            "sq_sig_all": int(sig_all),
            "srq": srq.srq if srq else None,
        }
        if extended:
            ops = flag_bits(ALL_SEND_OPS[kind], "IBV_QP_EX_WITH_")
            mask = e.IBV_QP_INIT_ATTR_PD | e.IBV_QP_INIT_ATTR_SEND_OPS_FLAGS
            self.init_attr = QPInitAttrEx(**common, pd=device.pd, comp_mask=mask, send_ops_flags=ops)
            self.qp = QPEx(device.ctx, self.init_attr)
        else:
            self.init_attr = QPInitAttr(**common)
            self.qp = QP(device.pd, self.init_attr)
        self.mws: list[MW] = []
        self.ahs: dict[str, AH] = {}
        self.remote: dict[str, Any] = {}
        self.psn = random.getrandbits(24)
        self.attr: dict[str, Any] = {}

    # -- control path --
    def info(self) -> dict[str, Any]:
        """What the peer needs to know."""
        return {
            "gid": self.device.gid(self.device.gid_index),
            "qpn": self.qp.qp_num,
            "psn": self.psn,
            "addr": self.mr.buf,
            "rkey": self.mr.rkey,
        }

    def numbers(self) -> dict[str, int]:
        return {
            "lkey": self.mr.lkey,
            "rkey": self.mr.rkey,
            "addr": self.mr.buf,
            "cqe": self.cq.cqe,
            "qpn": self.qp.qp_num,
            "max_send_wr": self.init_attr.cap.max_send_wr,
            "max_recv_wr": self.init_attr.cap.max_recv_wr,
            "max_inline_data": self.init_attr.cap.max_inline_data,
        }

    def init(
        self, access: str = "local_write remote_write remote_read remote_atomic", qkey: int = 0x1234
    ) -> None:
        attr = QPAttr(port_num=1)
        if self.kind == "UD":
            attr.qkey = qkey
        else:
            attr.qp_access_flags = flag_bits(access, "IBV_ACCESS_")
        self.qp.to_init(attr)

    def connect(
        self,
        remote: dict[str, Any],
        *,
        timeout: int = 14,
        retry_cnt: int = 7,
        rnr_retry: int = 6,
        min_rnr_timer: int = 1,
        mtu: int = 1024,
        rd_atomic: int = 16,
        dest_rd_atomic: int = 16,
        access: str = "local_write remote_write remote_read remote_atomic",
        traffic_class: int = 0,
        sl: int = 0,
        rts: bool = True,
    ) -> None:
        """RESET -> INIT -> RTR (-> RTS) towards what the other side's info() gave."""
        attr = QPAttr(port_num=1)
        attr.qp_access_flags = flag_bits(access, "IBV_ACCESS_")
        attr.path_mtu = MTU[mtu]
        attr.dest_qp_num = remote["qpn"]
        attr.rq_psn = remote["psn"]
        attr.max_dest_rd_atomic = dest_rd_atomic
        attr.min_rnr_timer = min_rnr_timer
        route = GlobalRoute(
            dgid=GID(remote["gid"]), sgid_index=self.device.gid_index, traffic_class=traffic_class
        )
        attr.ah_attr = AHAttr(port_num=1, sl=sl, is_global=1, gr=route, dlid=0)
        attr.sq_psn = self.psn
        attr.timeout = timeout
        attr.retry_cnt = retry_cnt
        attr.rnr_retry = rnr_retry
        attr.max_rd_atomic = rd_atomic
        self.remote = remote
        if rts:
            self.qp.to_rts(attr)
        else:
            self.qp.to_rtr(attr)

    def ud_ready(self, qkey: int = 0x1234) -> None:
        attr = QPAttr(port_num=1)
        attr.qkey = qkey
        attr.sq_psn = self.psn
        self.qp.to_rts(attr)

    def modify(self, state: str) -> None:
        """To RESET or ERR (or SQD)."""
        attr = QPAttr(qp_state=getattr(e, f"IBV_QPS_{state}"))
        self.qp.modify(attr, e.IBV_QP_STATE)

    def modify_raw(self, mask: str, **fields: int) -> None:
        attr = QPAttr()
        for name, value in fields.items():
            setattr(attr, name, value)
        self.qp.modify(attr, flag_bits(mask, "IBV_QP_"))

    def state(self) -> str:
        attr, _ = self.qp.query(e.IBV_QP_STATE)
        return QP_STATE[attr.qp_state]

    def query(self) -> dict[str, Any]:
        attr, init = self.qp.query((1 << 20) - 1)
        names = (
            "timeout retry_cnt rnr_retry min_rnr_timer max_rd_atomic max_dest_rd_atomic path_mtu dest_qp_num"
        )
        found = {
            name: getattr(attr, name) for name in (names + " rq_psn sq_psn qp_access_flags port_num").split()
        }
        return {**found, "state": QP_STATE[attr.qp_state], "max_send_wr": init.cap.max_send_wr}

    # -- data path --
    def sge_list(self, offset: int, length: int, sges: list[list[int]] | None, lkey: int | None) -> list[SGE]:
        pieces = [[offset, length]] if sges is None else sges
        key = self.mr.lkey if lkey is None else lkey
        return [SGE(self.mr.buf + start, size, key) for start, size in pieces]

    def send(
        self,
        op: str = "SEND",
        wr_id: int = 1,
        length: int = 0,
        offset: int = 0,
        *,
        sges: list[list[int]] | None = None,
        flags: str = "signaled",
        imm: int = 0,
        remote_offset: int = 0,
        remote_addr: int | None = None,
        rkey: int | None = None,
        lkey: int | None = None,
        compare_add: int = 0,
        swap: int = 0,
        to: dict[str, Any] | None = None,
        qkey: int = 0x1234,
    ) -> float:
        """Post one send WR; the time (CLOCK_MONOTONIC, seconds) right before."""
        pieces = self.sge_list(offset, length, sges, lkey)
        wr = SendWR(
            wr_id,
            opcode=getattr(e, f"IBV_WR_{op}"),
            num_sge=len(pieces),
            sg=pieces,
            imm_data=imm,
            send_flags=flag_bits(flags, "IBV_SEND_"),
        )
        if length == 0 and sges is None:
            wr.num_sge = 0  # pyverbs' constructor insists on an SGE
        target = self.remote.get("addr", 0) + remote_offset if remote_addr is None else remote_addr
        key = self.remote.get("rkey", 0) if rkey is None else rkey
        if op in RDMA_OPS:
            wr.set_wr_rdma(key, target)
        elif op in ATOMIC_OPS:
            wr.set_wr_atomic(key, target, compare_add, swap)
        elif op in ("SEND_WITH_INV", "LOCAL_INV"):
            wr.imm_data = key
        if to is not None:
            wr.set_wr_ud(self.address_handle(to["gid"]), to["qpn"], qkey)
        start = time.monotonic()
        self.qp.post_send(wr)
        return start

    def address_handle(self, gid: str) -> AH:
        if gid not in self.ahs:
            route = GlobalRoute(dgid=GID(gid), sgid_index=self.device.gid_index)
            self.ahs[gid] = AH(self.device.pd, attr=AHAttr(port_num=1, is_global=1, gr=route, dlid=0))
        return self.ahs[gid]

    def send_many(self, count: int, **kw: Any) -> None:
        """The same WR count times, wr_id counting up."""
        first = kw.pop("wr_id", 1)
        for i in range(count):
            self.send(wr_id=first + i, **kw)

    def send_chain(self, wrs: list[dict[str, Any]]) -> int:
        """Several WRs (op, wr_id, length, flags) in one ibv_post_send."""
        chain: list[SendWR] = []
        keep = []
        for spec in wrs:
            pieces = self.sge_list(0, spec.get("length", 0), None, spec.get("lkey"))
            keep.append(pieces)
            op = spec.get("op", "SEND")
            flags = flag_bits(spec.get("flags", "signaled"), "IBV_SEND_")
            wr = SendWR(
                spec["wr_id"], opcode=getattr(e, f"IBV_WR_{op}"), num_sge=1, sg=pieces, send_flags=flags
            )
            if op in RDMA_OPS:
                wr.set_wr_rdma(self.remote["rkey"], self.remote["addr"])
            if chain:
                chain[-1].next_wr = wr
            chain.append(wr)
        self.qp.post_send(chain[0])
        return len(chain)

    def wr_batch(self, wrs: list[dict[str, Any]], abort: bool = False) -> None:
        """Several WRs through ibv_wr_*: op and its arguments, then data as "sge" (offset, length) or "inline" (hex)."""
        self.qp.wr_start()
        for wr_id, spec in enumerate(wrs, 1):
            self.qp.wr_id = spec.get("wr_id", wr_id)
            self.qp.wr_flags = flag_bits(spec.get("flags", "signaled"), "IBV_SEND_")
            key, addr = self.remote.get("rkey", 0), self.remote.get("addr", 0) + spec.get("remote_offset", 0)
            match spec["op"]:
                case "send":
                    self.qp.wr_send()
                case "send_imm":
                    self.qp.wr_send_imm(socket.htonl(spec["imm"]))
                case "write":
                    self.qp.wr_rdma_write(key, addr)
                case "write_imm":
                    self.qp.wr_rdma_write_imm(key, addr, socket.htonl(spec["imm"]))
                case "read":
                    self.qp.wr_rdma_read(key, addr)
                case "fetch_add":
                    self.qp.wr_atomic_fetch_add(key, addr, spec["add"])
                case "cmp_swp":
                    self.qp.wr_atomic_cmp_swp(key, addr, spec["compare"], spec["swap"])
            if "to" in spec:
                self.qp.wr_set_ud_addr(self.address_handle(spec["to"]["gid"]), spec["to"]["qpn"], 0x1234)
            if "inline" in spec:
                data = bytes.fromhex(spec["inline"])
                buffer = ctypes.create_string_buffer(data, len(data))
                self.qp.wr_set_inline_data(ctypes.addressof(buffer), len(data))
            elif "sges" in spec:
                pieces = [SGE(self.mr.buf + offset, length, self.mr.lkey) for offset, length in spec["sges"]]
                self.qp.wr_set_sge_list(len(pieces), pieces)
            elif "sge" in spec:
                offset, length = spec["sge"]
                self.qp.wr_set_sge(SGE(self.mr.buf + offset, length, self.mr.lkey))
        if abort:
            self.qp.wr_abort()
        else:
            self.qp.wr_complete()

    def poll_ex(self, count: int = 1, timeout_s: float = 5.0) -> list[dict[str, Any]]:
        """As poll, through start_poll, next_poll and end_poll."""
        found: list[dict[str, Any]] = []
        deadline = time.monotonic() + timeout_s
        while len(found) < count and time.monotonic() < deadline:
            if self.cq.start_poll(PollCqAttr()):
                time.sleep(0.0002)
                continue
            while True:
                flags = self.cq.read_wc_flags()
                found.append(
                    {
                        "wr_id": self.cq.wr_id,
                        "status": WC_STATUS[self.cq.status],
                        "opcode": WC_OPCODE[self.cq.read_opcode()],
                        "byte_len": self.cq.read_byte_len(),
                        "imm": self.cq.read_imm_data() if flags & e.IBV_WC_WITH_IMM else None,
                        "qpn": self.cq.read_qp_num(),
                        "src_qp": self.cq.read_src_qp(),
                    }
                )
                if len(found) == count or self.cq.poll_next():
                    break
            self.cq.end_poll()
        return found

    def answer(
        self, length: int, wr_id: int = 1, qkey: int = 0x1234, timeout_s: float = 20.0
    ) -> dict[str, Any]:
        """Wait for a datagram at the start of the buffer and send its payload back to where it came from.

        The address handle is made of the completion and the 40 bytes (ibv_create_ah_from_wc); what those are.
        """
        deadline = time.monotonic() + timeout_s
        while not (found := self.cq.poll(1)[1]):
            assert time.monotonic() < deadline, "no datagram came"
            time.sleep(0.0002)
        header = self.mr.read(40, 0)
        ah = self.ah_from(found[0], header)
        wr = SendWR(
            wr_id, num_sge=1, sg=[SGE(self.mr.buf + 40, length, self.mr.lkey)], send_flags=e.IBV_SEND_SIGNALED
        )
        wr.set_wr_ud(ah, found[0].src_qp, qkey)
        self.qp.post_send(wr)
        [sent] = self.poll(1, timeout_s)
        ah.close()
        wc = {"src_qp": found[0].src_qp, "sl": found[0].sl}
        return {"header": header.hex(), "status": sent["status"], **wc}

    def ah_from(self, wc: WC, header: bytes) -> AH:
        """An address handle of a completion and the 40 bytes before a datagram."""
        memory = ctypes.create_string_buffer(header, 40)
        return AH(self.device.pd, wc=wc, grh=ctypes.addressof(memory), port_num=1)

    def handle_of(self, header: str) -> bool:
        """Make and destroy the address handle of a datagram that came with this header."""
        self.ah_from(WC(wc_flags=e.IBV_WC_GRH), bytes.fromhex(header)).close()
        return True

    def gid(self, index: int) -> str:
        """As of the device."""
        return self.device.gid(index)

    def reach(self, index: int, gid: str) -> None:
        """To RTR towards a GID, or an address handle of it, by a GID index."""
        route = GlobalRoute(dgid=GID(gid), sgid_index=index)
        vector = AHAttr(port_num=1, is_global=1, gr=route, dlid=0)
        if self.kind == "UD":
            AH(self.device.pd, attr=vector).close()
            return
        self.init()
        attr = QPAttr(qp_state=e.IBV_QPS_RTR, port_num=1)
        attr.path_mtu, attr.dest_qp_num, attr.ah_attr = MTU[1024], 1, vector
        self.qp.to_rtr(attr)

    # -- memory windows --
    def window(self, kind: int) -> int:
        """A new window of type 1 or 2; its index."""
        self.mws.append(MW(self.device.pd, kind))
        return len(self.mws) - 1

    def bind(self, index: int, offset: int, length: int, access: str = "", wr_id: int = 1) -> int:
        """Bind a window to a part of the buffer (length 0: unbind type 1); the new rkey."""
        return self.bind_part(self.mws[index], self.mr, offset, length, access, wr_id)

    def bind_region(
        self, index: int, region: int, offset: int, length: int, access: str, wr_id: int = 1
    ) -> int:
        """The same to a part of a region of the device's reg() and reg_pages()."""
        return self.bind_part(self.mws[index], self.device.mrs[region], offset, length, access, wr_id)

    def bind_part(self, window: MW, mr: MR, offset: int, length: int, access: str, wr_id: int) -> int:
        info = MWBindInfo(mr, mr.buf + offset, length, flag_bits(access, "IBV_ACCESS_"))
        if window.type == e.IBV_MW_TYPE_1:
            self.qp.bind_mw(window, MWBind(info, e.IBV_SEND_SIGNALED, wr_id))
            return int(window.rkey)
        wr = SendWR(wr_id, opcode=e.IBV_WR_BIND_MW, send_flags=e.IBV_SEND_SIGNALED)
        wr.set_bind_wr(window, info)
        self.qp.post_send(wr)
        return int(wr.rkey)

    def windows_are_told(self) -> bool:
        """Whether this release of pyverbs puts the rkey of a type-2 bind into its window, when it is posted."""
        return hasattr(SendWR, "rdma_rkey")

    def close_mr(self) -> None:
        self.mr.close()

    def free_window(self, index: int) -> None:
        self.mws[index].close()

    def recv(
        self, wr_id: int = 1, length: int = 0, offset: int = 0, *, sges: list[list[int]] | None = None,
        lkey: int | None = None,
    ) -> None:  # fmt: skip
        pieces = self.sge_list(offset, length, sges, lkey)
        wr = RecvWR(wr_id, len(pieces), pieces)
        if length == 0 and sges is None:
            wr.num_sge = 0  # pyverbs' constructor insists on an SGE
        self.qp.post_recv(wr)

    def recv_many(self, count: int, length: int, *, wr_id: int = 1, stride: int = 0) -> None:
        for i in range(count):
            self.recv(wr_id + i, length, i * stride)

    def poll(self, count: int = 1, timeout_s: float = 5.0) -> list[dict[str, Any]]:
        """Completions, until there are count of them or the time is over."""
        found: list[dict[str, Any]] = []
        deadline = time.monotonic() + timeout_s
        while True:  # at least once: what is there is found even by who hardly had its turn
            _, wcs = self.cq.poll(count - len(found))
            now = time.monotonic()
            for wc in wcs:
                found.append(self.wc_dict(wc, now))
            if len(found) >= count or now >= deadline:
                return found
            if not wcs:
                time.sleep(0.0002)

    def kill_and_send(self, count: int, **kw: Any) -> None:
        """The NIC dies, and this process posts before its thread can have heard of it."""
        faults.kill(f"{os.environ['SOFTRNIC_HOST']}/soft0")
        self.send_many(count, **kw)

    def wc_dict(self, wc: Any, now: float) -> dict[str, Any]:
        found = {"wr_id": wc.wr_id, "status": WC_STATUS[wc.status], "qpn": wc.qp_num, "at": now}
        found["vendor_err"] = wc.vendor_err
        if wc.status == e.IBV_WC_SUCCESS:
            flags = wc.wc_flags
            found |= {
                "opcode": WC_OPCODE[wc.opcode],
                "byte_len": wc.byte_len,
                "imm": wc.imm_data if flags & e.IBV_WC_WITH_IMM else None,
                "invalidated": wc.imm_data if flags & e.IBV_WC_WITH_INV else None,
                "grh": bool(flags & e.IBV_WC_GRH),
                "src_qp": wc.src_qp,
            }
        return found

    # -- memory --
    def pattern(self, seed: int, length: int, offset: int = 0) -> None:
        """Fill the buffer with bytes that follow from seed."""
        self.mr.write(stream(seed, length), length, offset)

    def matches(self, seed: int, length: int, offset: int = 0, skip: int = 0) -> bool:
        """Whether the buffer holds the seed's bytes (from byte skip of them on)."""
        return bool(self.mr.read(length, offset) == stream(seed, length + skip)[skip:])

    def put(self, text: str, offset: int = 0) -> None:
        data = bytes.fromhex(text)
        self.mr.write(data, len(data), offset)

    def get(self, length: int, offset: int = 0) -> str:
        return bytes(self.mr.read(length, offset)).hex()

    # -- events --
    def arm(self, solicited: bool = False) -> None:
        self.cq.req_notify(solicited)

    def wait_event(self, timeout_s: float = 5.0) -> bool:
        """Wait for a completion event and acknowledge it; False if none comes."""
        fd = channel_fd_of(self.channel)
        if not select.select([fd], [], [], timeout_s)[0]:
            return False
        assert self.channel.get_cq_event(self.cq) is None
        self.cq.ack_events(1)
        return True

    def resize(self, cqe: int) -> int:
        self.cq.resize(cqe)
        return int(self.cq.cqe)

    def close(self) -> None:
        for ah in self.ahs.values():
            ah.close()
        self.qp.close()
        self.cq.close()
        if self.channel is not None:
            self.channel.close()
        self.mr.close()


def channel_fd_of(channel: Any) -> int:
    """fd out of struct ibv_comp_channel: context, fd."""
    pointer = ctypes.c_void_p.from_address(id(channel) + 40).value
    assert pointer is not None
    return ctypes.c_int.from_address(pointer + ctypes.sizeof(ctypes.c_void_p)).value


class Host:
    """The process itself: makes devices and endpoints, which get names to be called by."""

    def __init__(self) -> None:
        self.objects: dict[str, Any] = {"host": self}

    def keep(self, thing: Any) -> str:
        name = f"{type(thing).__name__.lower()}{len(self.objects)}"
        self.objects[name] = thing
        return name

    def device_names(self) -> list[str]:
        return [device.name.decode() for device in get_device_list()]

    def open(self, name: str, gid_index: int | None = None) -> str:
        return self.keep(Device(name, gid_index))

    def srq(self, device: str, **kw: Any) -> str:
        return self.keep(Srq(self.objects[device], **kw))

    def endpoint(self, device: str, share: str | None = None, srq: str | None = None, **kw: Any) -> str:
        other = self.objects[share] if share else None
        queue = self.objects[srq] if srq else None
        return self.keep(Endpoint(self.objects[device], share=other, srq=queue, **kw))

    def forget(self, name: str) -> None:
        """Leave it to the garbage collector."""
        del self.objects[name]
        gc.collect()

    def fault(self, name: str, *args: Any) -> None:
        """Give a fault from this process."""
        getattr(faults, name)(*args)

    def threads(self) -> int:
        return len(os.listdir("/proc/self/task"))

    def descriptors(self) -> int:
        return len(os.listdir("/proc/self/fd"))


def main() -> None:
    host = Host()
    out = os.fdopen(int(sys.argv[1]), "w", buffering=1)
    out.write(json.dumps({"result": "ready"}) + "\n")
    for line in sys.stdin:
        command = json.loads(line)
        try:
            target = host.objects[command["on"]]
            result = getattr(target, command["call"])(*command["args"], **command["kw"])
            answer: dict[str, Any] = {"result": result}
        except Exception as error:  # whatever it is, the parent shows it
            answer = {"error": [type(error).__name__, str(error), getattr(error, "error_code", None)]}
        out.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
