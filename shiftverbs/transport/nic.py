# SPDX-License-Identifier: BSD-3-Clause
"""The NIC that a process's transports share: its Context, its PD, and the memory registered with it."""

from __future__ import annotations

import threading
from typing import Any

from shiftverbs.config import Config
from shiftverbs.native.ibv import GidTypeSysfs, LinkLayer
from shiftverbs.pyverbs_error import PyverbsError
from shiftverbs.transport.errors import TransportError
from shiftverbs.transport.memory import MrCache
from shiftverbs.transport.verbs import (
    CQ,
    GID,
    MR,
    PD,
    QP,
    AHAttr,
    CompChannel,
    Context,
    GlobalRoute,
    QPAttr,
    QPCap,
    QPInitAttr,
    e,
    get_device_list,
)

PORT = 1
GID_ROWS = 16
ACCESS = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE
#: 67 ms a try, seven of them more: a busy machine is late by more than what suffices on a quiet one.
TIMEOUT, RETRY_CNT = 14, 7

_lock = threading.Lock()
_open: dict[str, Nic] = {}


class Nic:
    """One device of this process: `Nic.of` gives the one that there is. Close what was made with it first."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.context = Context(name=device)
        self.pd = PD(self.context)
        self.cache = MrCache(self.register)
        port = self.context.query_port(PORT)
        self.lid = int(port.lid)
        self.mtu = int(port.active_mtu)
        self.gid_index, self.gid = self._find_gid()
        self.is_global = port.link_layer == LinkLayer.ETHERNET
        self._users = 0

    @classmethod
    def of(cls, device: str | None = None) -> Nic:
        """This process's handle on a device, for one more user; `release` ends that.

        :param device: its name; None: SHIFTVERBS_DEVICE, or the first that there is
        :raises TransportError: there is none
        :raises PyverbsError: as opening it does
        """
        name = device or Config.from_environ().device or _first()
        with _lock:
            nic = _open.get(name)
            if nic is None:
                nic = _open[name] = cls(name)
            nic._users += 1
            return nic

    def release(self) -> None:
        """One user less. With the last, it is closed."""
        with _lock:
            self._users -= 1
            if self._users:
                return
            del _open[self.device]
        self.cache.clear()
        self.pd.close()
        self.context.close()

    def _find_gid(self) -> tuple[int, str]:
        """The first IPv4-mapped GID of RoCE v2, else the first that is not zero."""
        fallback = (0, "")
        for index in range(GID_ROWS):
            try:
                gid = str(self.context.query_gid(PORT, index))
                if (
                    gid.startswith("0000:" * 5 + "ffff:")
                    and self.context.query_gid_type(PORT, index) == GidTypeSysfs.ROCE_V2
                ):
                    return index, gid
            except PyverbsError:
                break
            if not fallback[1] and set(gid) - set("0:"):
                fallback = (index, gid)
        return fallback

    def register(self, address: int, length: int, access: int = ACCESS) -> Any:
        """An MR of memory at address. Raises PyverbsRDMAError as ibv_reg_mr does.

        :param access: IBV_ACCESS_*; without it peers may write to the memory; 0: it is only read, and by us
        """
        return MR(self.pd, length, access, address=address)

    def queue(self, depth: int) -> tuple[Any, Any]:
        """A CompChannel, and a CQ of depth entries on it."""
        channel = CompChannel(self.context)
        return channel, CQ(self.context, depth, None, channel, 0)

    def queue_pair(self, send_cq: Any, recv_cq: Any, sends: int, receives: int) -> Any:
        """An RC QP in INIT, for so many WRs in each queue."""
        cap = QPCap(max_send_wr=sends, max_recv_wr=receives, max_send_sge=1, max_recv_sge=1)
        init = QPInitAttr(qp_type=e.IBV_QPT_RC, scq=send_cq, rcq=recv_cq, cap=cap, sq_sig_all=0)
        attr = QPAttr(port_num=PORT)
        attr.qp_access_flags = ACCESS
        return QP(self.pd, init, attr)

    def connect(self, qp: Any, psn: int, peer: dict[str, Any]) -> None:
        """Bring a QP to RTS.

        :param psn: of its first packet
        :param peer: gid, lid, mtu, qpn and psn of the other end
        :raises PyverbsRDMAError: as ibv_modify_qp
        """
        attr: Any = QPAttr(port_num=PORT)
        attr.qp_access_flags = ACCESS
        attr.dest_qp_num = peer["qpn"]
        attr.path_mtu = min(self.mtu, peer["mtu"])
        attr.sq_psn, attr.rq_psn = psn, peer["psn"]
        attr.max_rd_atomic = attr.max_dest_rd_atomic = 1
        attr.min_rnr_timer = 12
        attr.timeout, attr.retry_cnt, attr.rnr_retry = TIMEOUT, RETRY_CNT, 7
        if self.is_global:
            route = GlobalRoute(dgid=GID(peer["gid"]), sgid_index=self.gid_index, hop_limit=64)
            attr.ah_attr = AHAttr(port_num=PORT, is_global=1, gr=route, dlid=peer["lid"])
        else:
            attr.ah_attr = AHAttr(port_num=PORT, is_global=0, dlid=peer["lid"])
        qp.to_rtr(attr)
        qp.to_rts(attr)


def _first() -> str:
    names = [device.name.decode() for device in get_device_list()]
    if not names:
        raise TransportError("there is no RDMA device")
    return str(names[0])
