# SPDX-License-Identifier: BSD-3-Clause
"""A ring buffer in each direction at once, written for pyverbs: chains of four WRITE_WITH_IMM of random length, the
last one signaled; credits come back as inline WRITEs into a word that the sender looks at. The PSN wraps early.

usage: ring_credits.py TCP_PORT [SERVER]; prints "got N, STATUS on DEVICE".
"""

import json
import random
import socket
import sys
import time
from struct import Struct

from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.enums import *  # noqa: F403
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, RecvWR, SendWR

SLOT, SLOTS, CHAIN = 2048, 32, 4
WORD = Struct("<Q")
CREDIT = 1 << 63  # wr_id


def payload(source, number):
    return WORD.pack(number) + source.randbytes(source.randrange(SLOT - WORD.size))


def main(port, server):
    ctx = Context(name="soft0")
    pd = PD(ctx)
    send_cq, recv_cq = CQ(ctx, 2 * SLOTS), CQ(ctx, SLOTS)
    access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE  # noqa: F405
    inbound, outbound, credit = MR(pd, SLOT * SLOTS, access), MR(pd, SLOT * SLOTS, 1), MR(pd, 16, access)
    credit.write(bytes(16), 16)
    cap = QPCap(max_send_wr=2 * SLOTS, max_recv_wr=SLOTS, max_inline_data=WORD.size)
    init = QPInitAttr(qp_type=IBV_QPT_RC, scq=send_cq, rcq=recv_cq, cap=cap, sq_sig_all=0)  # noqa: F405
    qp = QP(pd, init)
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

    gid, qpn, ring_rkey, ring, credit_rkey, credit_address = swap(
        [str(ctx.query_gid(1, 0)), qp.qp_num, inbound.rkey, inbound.buf, credit.rkey, credit.buf]
    )
    attr = QPAttr(port_num=1)
    attr.qp_access_flags = IBV_ACCESS_REMOTE_WRITE  # noqa: F405
    attr.dest_qp_num, attr.path_mtu, attr.min_rnr_timer = qpn, IBV_MTU_512, 12  # noqa: F405
    attr.timeout, attr.retry_cnt, attr.rnr_retry = 14, 6, 7
    attr.sq_psn = attr.rq_psn = 0xFFFFF0
    route = GlobalRoute(dgid=GID(gid), sgid_index=0, hop_limit=2)
    attr.ah_attr = AHAttr(gr=route, is_global=1, port_num=1)
    qp.to_init(attr)
    # The immediate is all that a receive is for; pyverbs wants an SGE in every WR.
    receive = RecvWR(0, 1, [SGE(inbound.buf, 0, inbound.lkey)])
    for _ in range(SLOTS):
        qp.post_recv(receive)
    qp.to_rtr(attr)
    qp.to_rts(attr)
    assert swap("ready") == "ready"

    mine, theirs = random.Random(bool(server)), random.Random(not server)
    head = retired = got = credits_out = 0
    shown = time.monotonic()
    while True:
        (tail,) = WORD.unpack(credit.read(WORD.size, 0))
        if head - tail <= SLOTS - CHAIN and head - retired <= SLOTS - CHAIN:
            chain = []  # kept until posted: a WR does not keep alive the one that follows it
            pieces = [payload(mine, head + i) for i in range(CHAIN)]
            for i in reversed(range(CHAIN)):
                slot = (head + i) % SLOTS
                outbound.write(pieces[i], len(pieces[i]), slot * SLOT)
                wr = SendWR(
                    head + i + 1,
                    num_sge=1,
                    sg=[SGE(outbound.buf + slot * SLOT, len(pieces[i]), outbound.lkey)],
                    opcode=IBV_WR_RDMA_WRITE_WITH_IMM,  # noqa: F405
                    imm_data=slot,
                    send_flags=IBV_SEND_SIGNALED if not chain else 0,  # noqa: F405
                    next_wr=chain[-1] if chain else None,
                )
                wr.set_wr_rdma(ring_rkey, ring + slot * SLOT)
                chain.append(wr)
            qp.post_send(chain[-1])
            head += CHAIN
        count, wcs = send_cq.poll(16)
        for wc in wcs[:count]:
            if wc.status != IBV_WC_SUCCESS:  # noqa: F405
                sys.exit(f"error status {wc.status} after {got} messages")
            if wc.wr_id == CREDIT:
                credits_out -= 1
            else:
                retired += CHAIN
                assert wc.wr_id == retired, (wc.wr_id, retired)
        count, wcs = recv_cq.poll(8) if credits_out < SLOTS else (0, [])
        for wc in wcs[:count]:
            if wc.status != IBV_WC_SUCCESS:  # noqa: F405
                sys.exit(f"error status {wc.status} in the receive queue after {got} messages")
            wanted = payload(theirs, got)
            assert wc.opcode == IBV_WC_RECV_RDMA_WITH_IMM  # noqa: F405
            assert (wc.imm_data, wc.byte_len) == (got % SLOTS, len(wanted)), (wc.imm_data, wc.byte_len, got)
            assert inbound.read(len(wanted), wc.imm_data * SLOT) == wanted, got
            got += 1
            qp.post_recv(receive)
        if count:
            credit.write(WORD.pack(got), WORD.size, WORD.size)
            wr = SendWR(
                CREDIT,
                num_sge=1,
                sg=[SGE(credit.buf + WORD.size, WORD.size, credit.lkey)],
                opcode=IBV_WR_RDMA_WRITE,  # noqa: F405
                send_flags=IBV_SEND_INLINE | IBV_SEND_SIGNALED,  # noqa: F405
            )
            wr.set_wr_rdma(credit_rkey, credit_address)
            qp.post_send(wr)
            credits_out += 1
        if time.monotonic() - shown > 0.1:
            shown = time.monotonic()
            shift = getattr(qp, "shift", None)
            print(f"got {got}, {shift.status} on {shift.path}" if shift else f"got {got}", flush=True)
        time.sleep(0.0005)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None)
