# SPDX-License-Identifier: BSD-3-Clause
"""A ping-pong as rdma-core's rc_pingpong does it, written for pyverbs: blocks in completion events, steps the QP by
hand, one CQ, inline sends with immediate data, both directions, a WRITE in every round.

usage: pingpong_events.py TCP_PORT [SERVER]; prints "round N, STATUS on DEVICE" now and then.
"""

import pickle
import socket
import sys
import time

import pyverbs.device as d
import pyverbs.enums as e
import pyverbs.qp
from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ, CompChannel
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.wr import SGE, RecvWR, SendWR

RECEIVES = 8
MESSAGE = 48


def modify(qp, state, mask, **values):
    attr = pyverbs.qp.QPAttr(qp_state=state)
    for name, value in values.items():
        setattr(attr, name, value)
    qp.modify(attr, mask | e.IBV_QP_STATE)


def main(port, server):
    ctx = d.Context(name="soft0")
    channel = CompChannel(ctx)
    pd = PD(ctx)
    cq = CQ(ctx, 64, None, channel)
    mr = MR(pd, 8192, e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE)
    init = pyverbs.qp.QPInitAttr(
        qp_type=e.IBV_QPT_RC,
        scq=cq,
        rcq=cq,
        cap=pyverbs.qp.QPCap(8, RECEIVES, 1, 1, max_inline_data=64),
        sq_sig_all=1,
    )
    qp = pyverbs.qp.QP(pd, init)
    modify(
        qp, e.IBV_QPS_INIT, e.IBV_QP_PKEY_INDEX | e.IBV_QP_PORT | e.IBV_QP_ACCESS_FLAGS,
        pkey_index=0, port_num=1, qp_access_flags=e.IBV_ACCESS_REMOTE_WRITE,
    )  # fmt: skip
    receives = [RecvWR(i, 1, [SGE(mr.buf + 1024 + 64 * i, 64, mr.lkey)]) for i in range(RECEIVES)]
    for wr in receives:
        qp.post_recv(wr)
    cq.req_notify()

    gid = ctx.query_gid(1, 0)
    if server:
        tcp = socket.create_connection((server, port))
    else:
        listener = socket.create_server(("127.0.0.1", port))
        print("listening", flush=True)
        tcp = listener.accept()[0]
    stream = tcp.makefile("rwb")
    pickle.dump((str(gid), qp.qp_num, mr.rkey, mr.buf), stream)
    stream.flush()
    peer_gid, peer_qpn, peer_rkey, peer_buf = pickle.load(stream)
    modify(
        qp, e.IBV_QPS_RTR,
        e.IBV_QP_AV | e.IBV_QP_PATH_MTU | e.IBV_QP_DEST_QPN | e.IBV_QP_RQ_PSN | e.IBV_QP_MAX_DEST_RD_ATOMIC
        | e.IBV_QP_MIN_RNR_TIMER,
        path_mtu=e.IBV_MTU_1024, dest_qp_num=peer_qpn, rq_psn=7, max_dest_rd_atomic=1, min_rnr_timer=12,
        ah_attr=AHAttr(port_num=1, is_global=1, gr=GlobalRoute(dgid=GID(peer_gid), sgid_index=0, hop_limit=1)),
    )  # fmt: skip
    modify(
        qp, e.IBV_QPS_RTS,
        e.IBV_QP_TIMEOUT | e.IBV_QP_RETRY_CNT | e.IBV_QP_RNR_RETRY | e.IBV_QP_SQ_PSN | e.IBV_QP_MAX_QP_RD_ATOMIC,
        timeout=14, retry_cnt=6, rnr_retry=7, sq_psn=7, max_rd_atomic=1,
    )  # fmt: skip
    stream.write(b"!")
    stream.flush()
    assert stream.read(1) == b"!"

    write_sge = SGE(mr.buf, 8, mr.lkey)
    send_sge = SGE(mr.buf + 512, MESSAGE, mr.lkey)

    def send(number):
        """A WRITE of the number, and an inline SEND of it behind: two WRs in a chain, both buffers reused at once."""
        mr.write(number.to_bytes(8, "little"), 8, 512)
        mr.write(number.to_bytes(8, "little"), 8, 0)
        inline = e.IBV_SEND_INLINE | e.IBV_SEND_SIGNALED
        message = SendWR(
            number,
            num_sge=1,
            sg=[send_sge],
            opcode=e.IBV_WR_SEND_WITH_IMM,
            send_flags=inline,
            imm_data=number & 0xFFFF,
        )
        write = SendWR(
            1 << 40 | number,
            num_sge=1,
            sg=[write_sge],
            opcode=e.IBV_WR_RDMA_WRITE,
            send_flags=inline,
            next_wr=message,
        )
        write.set_wr_rdma(peer_rkey, peer_buf + 256)
        qp.post_send(write)

    number, received, due = 0, 0, 0
    shown = time.monotonic()
    if server:
        send(number)
    while True:
        channel.get_cq_event(cq)
        cq.ack_events(1)
        cq.req_notify()
        while True:
            count, wcs = cq.poll(4)
            if not count:
                break
            for wc in wcs[:count]:
                if wc.status != e.IBV_WC_SUCCESS:
                    sys.exit(f"error status {wc.status} after {received} rounds")
                assert wc.qp_num == qp.qp_num
                if not wc.opcode & e.IBV_WC_RECV:
                    # Two completions per round: first the WRITE's, then the SEND's.
                    wanted = (1 << 40 | due // 2) if due % 2 == 0 else due // 2
                    assert wc.wr_id == wanted, (wc.wr_id, wanted)
                    due += 1
                    continue
                assert wc.imm_data == received & 0xFFFF, (wc.imm_data, received)
                slot = wc.wr_id
                assert slot == received % RECEIVES and wc.byte_len == MESSAGE
                got = int.from_bytes(mr.read(8, 1024 + 64 * slot), "little")
                written = int.from_bytes(mr.read(8, 256), "little")
                assert got == received == written, (got, written, received)
                received += 1
                qp.post_recv(receives[slot])
                if server:
                    number += 1
                    send(number)
                else:
                    send(received - 1)
                if time.monotonic() - shown > 0.1:
                    shown = time.monotonic()
                    shift = getattr(qp, "shift", None)
                    print(
                        f"round {received}, {shift.status} on {shift.path}" if shift else received, flush=True
                    )


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None)
