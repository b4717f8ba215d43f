# SPDX-License-Identifier: BSD-3-Clause
"""A READ server, written for pyverbs: four QPs per host share one CQ, reads of two SGEs are outstanding on all of
them at once. The server calls no verb once it is connected: it waits on its TCP stream.

usage: many_reads.py TCP_PORT [SERVER]; prints "read N, STATUS on DEVICE".
"""

import json
import socket
import sys
import time

import pyverbs.enums as e
from pyverbs import addr, cq, device, mr, pd, qp, wr

QPS, PER_QP, BLOCK, BLOCKS = 4, 4, 8192, 64


def content(block):
    """What a block holds: its number, and bytes that depend on number and place."""
    return block.to_bytes(4, "big") + bytes((7 * block + i) & 255 for i in range(BLOCK - 4))


def connect(queue_pair, peer_gid, peer_qpn):
    attr = qp.QPAttr(port_num=1)
    attr.qp_access_flags = e.IBV_ACCESS_REMOTE_READ
    attr.dest_qp_num, attr.path_mtu, attr.min_rnr_timer = peer_qpn, e.IBV_MTU_1024, 12
    attr.timeout, attr.retry_cnt, attr.rnr_retry = 14, 6, 7
    attr.max_rd_atomic = attr.max_dest_rd_atomic = PER_QP
    route = addr.GlobalRoute(dgid=addr.GID(peer_gid), sgid_index=0, hop_limit=2)
    attr.ah_attr = addr.AHAttr(gr=route, is_global=1, port_num=1)
    queue_pair.to_rts(attr)


class Say:
    """A line now and then; QPs that do not agree are not reported."""

    def __init__(self, qps):
        self.qps, self.next = qps, 0.0

    def __call__(self, count):
        if time.monotonic() < self.next:
            return
        self.next = time.monotonic() + 0.1
        where = {f"{q.shift.status} on {q.shift.path}" for q in self.qps if hasattr(q, "shift")}
        print(f"read {count}, {where.pop() if len(where) == 1 else sorted(where)}", flush=True)


def main(port, server):
    with device.Context(name="soft0") as ctx, pd.PD(ctx) as domain, cq.CQ(ctx, QPS * PER_QP) as queue:
        access = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_READ
        memory = mr.MR(domain, BLOCK * BLOCKS, access)
        cap = qp.QPCap(max_send_wr=PER_QP, max_recv_wr=1, max_send_sge=2)
        init = qp.QPInitAttr(qp_type=e.IBV_QPT_RC, scq=queue, rcq=queue, cap=cap)
        qps = [qp.QP(domain, init) for _ in range(QPS)]
        if server:
            tcp = socket.create_connection((server, port))
        else:
            for block in range(BLOCKS):
                memory.write(content(block), BLOCK, block * BLOCK)
            listener = socket.create_server(("127.0.0.1", port))
            print("listening", flush=True)
            tcp = listener.accept()[0]
        incoming, outgoing = tcp.makefile("r"), tcp.makefile("w")

        def tell(value):
            outgoing.write(json.dumps(value) + "\n")
            outgoing.flush()

        tell([str(ctx.query_gid(1, 0)), [q.qp_num for q in qps], memory.rkey, memory.buf])
        gid, numbers, rkey, address = json.loads(incoming.readline())
        for queue_pair, number in zip(qps, numbers, strict=True):
            connect(queue_pair, gid, number)
        tell("ready")
        assert json.loads(incoming.readline()) == "ready"
        if server:
            read(qps, queue, memory, rkey, address, tell)
        say = Say(qps)
        for line in incoming:
            say(json.loads(line))


def read(qps, queue, memory, rkey, address, tell):
    """Read blocks without end; every one is compared with what it must be."""
    wanted = [content(block) for block in range(BLOCKS)]
    free = [(q, q * PER_QP + s) for s in range(PER_QP) for q in range(QPS)]
    outstanding, posted, done = {}, 0, 0
    say = Say(qps)
    while True:
        while free:
            index, slot = free.pop(0)
            place = memory.buf + slot * BLOCK
            memory.write(b"\xee" * BLOCK, BLOCK, slot * BLOCK)
            wr_read = wr.SendWR(
                posted,
                num_sge=2,
                sg=[wr.SGE(place, 100, memory.lkey), wr.SGE(place + 100, BLOCK - 100, memory.lkey)],
                opcode=e.IBV_WR_RDMA_READ,
                send_flags=e.IBV_SEND_SIGNALED,
            )
            wr_read.set_wr_rdma(rkey, address + posted % BLOCKS * BLOCK)
            qps[index].post_send(wr_read)
            outstanding[posted] = index, slot
            posted += 1
        count, wcs = queue.poll(8)
        if not count:
            time.sleep(0.001)
        for wc in wcs[:count]:
            if wc.status != e.IBV_WC_SUCCESS:
                sys.exit(f"error status {wc.status} after {done} reads")
            index, slot = outstanding.pop(wc.wr_id)
            assert wc.opcode == e.IBV_WC_RDMA_READ and wc.qp_num == qps[index].qp_num
            assert memory.read(BLOCK, slot * BLOCK) == wanted[wc.wr_id % BLOCKS], wc.wr_id
            free.append((index, slot))
            done += 1
            if done % 32 == 0:
                tell(done)
        say(done)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None)
