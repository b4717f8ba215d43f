# SPDX-License-Identifier: BSD-3-Clause
"""Connections that do not last, written for pyverbs: after every hundred messages the QP is closed and made anew, or
reset and connected again, or its Context is closed with all that hangs on it. It goes on while its NIC is away.

usage: short_connections.py TCP_PORT [SERVER]; prints "message N, STATUS on DEVICE".
"""

import json
import socket
import sys
import time

import pyverbs.qp as q
from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.enums import (
    IBV_ACCESS_LOCAL_WRITE,
    IBV_MTU_1024,
    IBV_QP_STATE,
    IBV_QPS_RESET,
    IBV_QPT_RC,
    IBV_SEND_SIGNALED,
    IBV_WC_SUCCESS,
    IBV_WR_SEND,
)
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.wr import SGE, RecvWR, SendWR

SLOTS, SIZE, EACH = 16, 1024, 100


class Endpoint:
    """All that hangs on one Context."""

    def __init__(self):
        self.ctx = Context(name="soft0")
        self.pd = PD(self.ctx)
        self.cq = CQ(self.ctx, 2 * SLOTS)
        self.mr = MR(self.pd, SIZE * SLOTS, IBV_ACCESS_LOCAL_WRITE)
        self.qp = None

    def new_qp(self):
        if self.qp is not None:
            self.qp.close()
        cap = q.QPCap(max_send_wr=SLOTS, max_recv_wr=SLOTS)
        self.qp = q.QP(self.pd, q.QPInitAttr(qp_type=IBV_QPT_RC, scq=self.cq, rcq=self.cq, cap=cap))

    def connect(self, swap, psn):
        gid, qpn = swap([str(self.ctx.query_gid(1, 0)), self.qp.qp_num])
        attr = q.QPAttr(port_num=1)
        attr.dest_qp_num, attr.path_mtu, attr.min_rnr_timer = qpn, IBV_MTU_1024, 12
        attr.timeout, attr.retry_cnt, attr.rnr_retry = 14, 6, 7
        attr.sq_psn = attr.rq_psn = psn
        route = GlobalRoute(dgid=GID(gid), sgid_index=0, hop_limit=2)
        attr.ah_attr = AHAttr(gr=route, is_global=1, port_num=1)
        self.qp.to_rts(attr)

    def sge(self, slot):
        return [SGE(self.mr.buf + slot * SIZE, SIZE, self.mr.lkey)]


def main(port, server):
    if server:
        tcp = socket.create_connection((server, port))
    else:
        listener = socket.create_server(("127.0.0.1", port))
        print("listening", flush=True)
        tcp = listener.accept()[0]
    incoming, outgoing = tcp.makefile("r"), tcp.makefile("w")

    def swap(value):
        outgoing.write(json.dumps(value) + "\n")
        outgoing.flush()
        return json.loads(incoming.readline())

    end, lives, total = None, 0, 0
    while True:
        if lives % 4 == 0:
            if end is not None:
                end.ctx.close()
            end = Endpoint()
        if lives % 4 == 2:
            end.qp.modify(q.QPAttr(qp_state=IBV_QPS_RESET), IBV_QP_STATE)
        else:
            end.new_qp()
        end.connect(swap, 1000 * lives)
        for slot in range(0 if server else SLOTS):
            end.qp.post_recv(RecvWR(slot, 1, end.sge(slot)))
        shift = getattr(end.qp, "shift", None)
        # Without its NIC a new connection works only once it is protected.
        if shift is not None and not shift.wait_protected(20):
            sys.exit(f"connection {lives} is not protected: {shift.why}")
        assert swap(lives) == lives
        send(end, lives) if server else receive(end, lives)
        lives, total = lives + 1, total + EACH
        assert swap(total) == total
        print(f"message {total}, {shift.status} on {shift.path}" if shift else f"message {total}", flush=True)


def completions(end, due):
    """At least one, in order of their wr_id from `due` on."""
    while True:
        count, wcs = end.cq.poll(SLOTS)
        for i, wc in enumerate(wcs[:count]):
            if wc.status != IBV_WC_SUCCESS:
                sys.exit(f"error status {wc.status} after {due + i} messages")
            assert wc.wr_id == (due + i) % SLOTS and wc.qp_num == end.qp.qp_num, (wc.wr_id, due + i)
        if count:
            return count
        time.sleep(0.0005)


def text(life, number):
    return f"message {number} of connection {life}".ljust(SIZE).encode()


def send(end, life):
    posted = done = 0
    while done < EACH:
        while posted < EACH and posted - done < SLOTS:
            slot = posted % SLOTS
            end.mr.write(text(life, posted), SIZE, slot * SIZE)
            flags = IBV_SEND_SIGNALED
            end.qp.post_send(SendWR(slot, num_sge=1, sg=end.sge(slot), opcode=IBV_WR_SEND, send_flags=flags))
            posted += 1
        done += completions(end, done)


def receive(end, life):
    done = 0
    while done < EACH:
        for _ in range(completions(end, done)):
            slot = done % SLOTS
            assert end.mr.read(SIZE, slot * SIZE) == text(life, done), (life, done)
            end.qp.post_recv(RecvWR(slot, 1, end.sge(slot)))
            done += 1


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None)
