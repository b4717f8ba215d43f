# SPDX-License-Identifier: BSD-3-Clause
"""A verbs program with two threads per host, written for pyverbs: one posts without end, the other spins on the CQ.
WRITEs only, one in sixteen signaled; the receiver spins on its memory and calls no verb at all.

usage: threads_busy.py TCP_PORT [SERVER]; prints "written N, STATUS on DEVICE" or "seen N, STATUS on DEVICE".
"""

import json
import socket
import sys
import threading
import time

import pyverbs.enums as e
from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, SendWR

DEPTH = 64
EVERY = 16


def say(text, qp):
    shift = getattr(qp, "shift", None)
    print(f"{text}, {shift.status} on {shift.path}" if shift else text, flush=True)


def main(port, server):
    ctx = Context(name="soft0")
    pd = PD(ctx)
    send_cq, recv_cq = CQ(ctx, DEPTH), CQ(ctx, 1)
    mr = MR(pd, 4096, e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE)
    cap = QPCap(max_send_wr=DEPTH)
    qp = QP(pd, QPInitAttr(qp_type=e.IBV_QPT_RC, scq=send_cq, rcq=recv_cq, cap=cap, sq_sig_all=0))
    if server:
        tcp = socket.create_connection((server, port))
    else:
        listener = socket.create_server(("127.0.0.1", port))
        print("listening", flush=True)
        tcp = listener.accept()[0]
    # Two files: one for both directions forgets what it has read ahead when it writes.
    incoming, outgoing = tcp.makefile("r"), tcp.makefile("w")
    outgoing.write(json.dumps([str(ctx.query_gid(1, 0)), qp.qp_num, mr.rkey, mr.buf]) + "\n")
    outgoing.flush()
    gid, qpn, rkey, address = json.loads(incoming.readline())
    attr = QPAttr(port_num=1)
    attr.qp_access_flags = e.IBV_ACCESS_REMOTE_WRITE
    attr.dest_qp_num, attr.path_mtu, attr.min_rnr_timer = qpn, e.IBV_MTU_1024, 12
    attr.timeout, attr.retry_cnt, attr.rnr_retry = 14, 6, 7
    attr.ah_attr = AHAttr(port_num=1, is_global=1, gr=GlobalRoute(dgid=GID(gid), sgid_index=0, hop_limit=1))
    qp.to_rts(attr)
    outgoing.write("ready\n")
    outgoing.flush()
    assert incoming.readline() == "ready\n"

    if not server:
        last = shown = 0
        while True:
            value = int.from_bytes(mr.read(8, 0), "little")
            # After a failure the WRITEs without proof are written again: at most a queue's worth.
            assert value >= last - DEPTH, f"memory went back from {last} to {value}"
            last = value
            if time.monotonic() - shown > 0.1:
                shown = time.monotonic()
                say(f"seen {value}", qp)

    room = threading.Semaphore(DEPTH)
    failed = []

    def spin():
        due = EVERY - 1
        while not failed:
            count, wcs = send_cq.poll(8)
            for wc in wcs[:count]:
                if wc.status != e.IBV_WC_SUCCESS or wc.wr_id != due:
                    failed.append(f"status {wc.status}, wr_id {wc.wr_id} where {due} was due")
                due += EVERY
                room.release(EVERY)

    threading.Thread(target=spin, daemon=True).start()
    number, shown = 0, 0.0
    # One source per WR: a signaled one completes before its buffer is used again.
    sges = [SGE(mr.buf + 64 + 8 * i, 8, mr.lkey) for i in range(DEPTH)]
    while not failed:
        if not room.acquire(timeout=1):
            continue
        slot = number % DEPTH
        mr.write((number + 1).to_bytes(8, "little"), 8, 64 + 8 * slot)
        flags = e.IBV_SEND_SIGNALED if number % EVERY == EVERY - 1 else 0
        wr = SendWR(number, num_sge=1, sg=[sges[slot]], opcode=e.IBV_WR_RDMA_WRITE, send_flags=flags)
        wr.set_wr_rdma(rkey, address)
        qp.post_send(wr)
        number += 1
        if time.monotonic() - shown > 0.1:
            shown = time.monotonic()
            say(f"written {number}", qp)
    sys.exit(failed[0])


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None)
