# SPDX-License-Identifier: BSD-3-Clause
"""A program whose QPs are connected by rdma_cm, both ends in one process, over the network of tools/rxe/network.sh.

The connection manager's own QPs, made inside librdmacm, are not protected and say why where there is a QP to ask. A QP
of the program's own, which rdma_cm only connects (init_qp_attr, ConnParam.qp_num), is protected like any other.
"""

from __future__ import annotations

import time
from typing import Any

from shiftverbs.cmid import CMID, AddrInfo, CMEvent, CMEventChannel, ConnParam

import shiftverbs.cm_enums as ce
import shiftverbs.enums as e
from shiftverbs.commands.demo.rxe import RxeNetwork
from shiftverbs.cq import CQ
from shiftverbs.device import Context
from shiftverbs.mr import MR
from shiftverbs.pd import PD
from shiftverbs.qp import QP, QPCap, QPInitAttr
from shiftverbs.wr import SGE, RecvWR, SendWR

PORT = "7471"
ADDRESS = {"a": "10.0.0.1", "b": "10.0.0.2"}
LENGTH = 64
PATIENCE_S = 60.0


class End:
    """A host's verbs objects, and its QP."""

    def __init__(self, host: str) -> None:
        self.context = Context(name=f"rxe_{host}0")
        self.pd = PD(self.context)
        self.cq = CQ(self.context, 32)
        self.mr = MR(self.pd, LENGTH * 2, e.IBV_ACCESS_LOCAL_WRITE)
        init = QPInitAttr(qp_type=e.IBV_QPT_RC, scq=self.cq, rcq=self.cq, cap=QPCap(8, 8, 1, 1))
        self.qp = QP(self.pd, init)

    def modify(self, cmid: Any, *states: int) -> None:
        """Take the attributes of these transitions from the connection manager."""
        for state in states:
            self.qp.modify(*cmid.init_qp_attr(state))

    def receive(self) -> None:
        self.qp.post_recv(RecvWR(1, 1, [SGE(self.mr.buf + LENGTH, LENGTH, self.mr.lkey)]))

    def send(self, text: str) -> None:
        self.mr.write(text.ljust(LENGTH), LENGTH)
        sge = SGE(self.mr.buf, LENGTH, self.mr.lkey)
        self.qp.post_send(
            SendWR(2, num_sge=1, sg=[sge], opcode=e.IBV_WR_SEND, send_flags=e.IBV_SEND_SIGNALED)
        )

    def completion(self) -> Any:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            n, wcs = self.cq.poll(1)
            if n:
                assert wcs[0].status == e.IBV_WC_SUCCESS, wcs[0]
                return wcs[0]
        raise TimeoutError(f"no completion: {self.qp.shift}")


def event(channel: Any, expected: int) -> Any:
    """The next event, which must be of this type; not acknowledged yet."""
    got = CMEvent(channel)
    assert got.event_type == expected, got.event_str()
    return got


def connect(a: End, b: End) -> list[Any]:
    """Connect the QPs of a (client) and b (server); the connection manager's objects, to be kept."""
    listening, asking = CMEventChannel(), CMEventChannel()
    listener = CMID(creator=listening, port_space=ce.RDMA_PS_TCP)
    here = AddrInfo(src=ADDRESS["b"], src_service=PORT, port_space=ce.RDMA_PS_TCP, flags=ce.RAI_PASSIVE)
    listener.bind_addr(here)
    listener.listen()
    client = CMID(creator=asking, port_space=ce.RDMA_PS_TCP)
    client.resolve_addr(
        AddrInfo(src=ADDRESS["a"], dst=ADDRESS["b"], dst_service=PORT, port_space=ce.RDMA_PS_TCP)
    )
    event(asking, ce.RDMA_CM_EVENT_ADDR_RESOLVED).ack_cm_event()
    client.resolve_route()
    event(asking, ce.RDMA_CM_EVENT_ROUTE_RESOLVED).ack_cm_event()
    client.connect(ConnParam(qp_num=a.qp.qp_num))
    request = event(listening, ce.RDMA_CM_EVENT_CONNECT_REQUEST)
    server = CMID(creator=request, listen_id=listener)
    request.ack_cm_event()
    b.modify(server, e.IBV_QPS_INIT, e.IBV_QPS_RTR, e.IBV_QPS_RTS)
    server.accept(ConnParam(qp_num=b.qp.qp_num))
    event(asking, ce.RDMA_CM_EVENT_CONNECT_RESPONSE).ack_cm_event()
    a.modify(client, e.IBV_QPS_INIT, e.IBV_QPS_RTR, e.IBV_QPS_RTS)
    client.establish()
    event(listening, ce.RDMA_CM_EVENT_ESTABLISHED).ack_cm_event()
    return [client, server, listener, asking, listening]


def message(x: End, y: End, text: str) -> None:
    y.receive()
    x.send(text)
    assert x.completion().wr_id == 2
    assert y.completion().wr_id == 1
    got = y.mr.read(LENGTH, LENGTH).decode().rstrip()
    assert got == text, got


def inside_librdmacm(cmid: Any) -> str:
    """What a QP says that is made from what a CMID has of its own."""
    pd = cmid.pd
    cq = CQ(cmid.context, 8)
    qp = QP(pd, QPInitAttr(qp_type=e.IBV_QPT_RC, scq=cq, rcq=cq, cap=QPCap(1, 1, 1, 1)))
    said = f"{qp.shift.status}: {qp.shift.why}"
    qp.close()
    cq.close()
    return said


def main() -> None:
    """Connect, lose the cable, come home, part."""
    with RxeNetwork() as network:
        a, b = End("a"), End("b")
        kept = connect(a, b)
        print("of a CMID's own:", inside_librdmacm(kept[0]), flush=True)
        for end in (a, b):
            assert end.qp.shift.wait_protected(PATIENCE_S), end.qp.shift
        print("protected", flush=True)
        message(a, b, "at home")
        network.cut("a0")
        for i in range(5):
            message(a, b, f"away {i}")
            message(b, a, f"back {i}")
        for end in (a, b):
            assert end.qp.shift.wait_state("FALLBACK", PATIENCE_S), end.qp.shift
        print("away on", a.qp.shift.path, b.qp.shift.path, flush=True)
        network.heal()
        for end in (a, b):
            assert end.qp.shift.wait_state("DEFAULT", PATIENCE_S), end.qp.shift
        message(a, b, "home again")
        print("home on", a.qp.shift.path, b.qp.shift.path, flush=True)
        kept[0].disconnect()
        for end in (a, b):
            end.qp.close()
        for thing in kept:
            thing.close()
        print("over", flush=True)


if __name__ == "__main__":
    main()
