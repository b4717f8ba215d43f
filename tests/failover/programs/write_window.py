# SPDX-License-Identifier: BSD-3-Clause
"""A window of WRITEs with immediate data, answered by credits, written for pyverbs 59 and later: the constants are
those of the enum classes in libibverbs_enums, everything else comes by `import pyverbs.x as y`.

usage: write_window.py TCP_PORT [SERVER]; prints "written N, STATUS on DEVICE", or received, now and then.
"""

import socket
import sys
import time

import pyverbs.addr as addr
import pyverbs.cq as cq
import pyverbs.device as device
import pyverbs.libibverbs_enums as e
import pyverbs.mr as mr
import pyverbs.pd as pd
import pyverbs.qp as qp
import pyverbs.wr as wr
from pyverbs.libibverbs_enums import ibv_qp_type, ibv_send_flags, ibv_wc_status, ibv_wr_opcode

WINDOW, SIZE = 32, 2048


class Side:
    """One end: the client WRITEs numbered blocks, the server answers each with a SEND as a credit."""

    def __init__(self):
        self.context = device.Context(name="soft0")
        self.pd = pd.PD(self.context)
        self.send_cq, self.recv_cq = cq.CQ(self.context, WINDOW), cq.CQ(self.context, WINDOW)
        access = e.ibv_access_flags.IBV_ACCESS_LOCAL_WRITE | e.ibv_access_flags.IBV_ACCESS_REMOTE_WRITE
        self.mr = mr.MR(self.pd, WINDOW * SIZE + 8, access)
        cap = qp.QPCap(max_send_wr=WINDOW, max_recv_wr=WINDOW)
        init = qp.QPInitAttr(
            qp_type=ibv_qp_type.IBV_QPT_RC, scq=self.send_cq, rcq=self.recv_cq, cap=cap, sq_sig_all=0
        )
        attr = qp.QPAttr(port_num=1)
        attr.qp_access_flags = access
        self.qp = qp.QP(self.pd, init, attr)
        for number in range(WINDOW):
            self.receive(number)
        self.posted = self.done = self.arrived = 0
        self.shown = time.monotonic()

    def receive(self, number):
        # Room for a credit.
        self.qp.post_recv(wr.RecvWR(number, 1, [wr.SGE(self.mr.buf + WINDOW * SIZE, 8, self.mr.lkey)]))

    def connect(self, tcp):
        reader, writer = tcp.makefile("r"), tcp.makefile("w")
        gid = self.context.query_gid(port_num=1, index=0)
        print(gid, self.qp.qp_num, self.mr.rkey, self.mr.buf, file=writer, flush=True)
        gid, qpn, rkey, base = reader.readline().split()
        self.rkey, self.base = int(rkey), int(base)
        attr = qp.QPAttr(port_num=1)
        attr.dest_qp_num, attr.path_mtu = int(qpn), e.ibv_mtu.IBV_MTU_1024
        attr.timeout, attr.retry_cnt, attr.rnr_retry, attr.min_rnr_timer = 14, 6, 7, 12
        route = addr.GlobalRoute(dgid=addr.GID(gid), sgid_index=0, hop_limit=1)
        attr.ah_attr = addr.AHAttr(gr=route, is_global=1, port_num=1)
        attr.qp_access_flags = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE
        self.qp.to_rts(attr)
        print("ready", file=writer, flush=True)
        assert reader.readline() == "ready\n"

    def block(self, number):
        return number.to_bytes(4, "little") * (SIZE // 4)

    def post(self, opcode, number):
        # Every fourth one is signaled: the others are done when it is.
        flags = ibv_send_flags.IBV_SEND_SIGNALED if number % 4 == 3 else 0
        slot, sge = number % WINDOW, wr.SGE(self.mr.buf + WINDOW * SIZE, 1, self.mr.lkey)
        if opcode == ibv_wr_opcode.IBV_WR_RDMA_WRITE_WITH_IMM:
            self.mr.write(self.block(number), SIZE, slot * SIZE)
            sge = wr.SGE(self.mr.buf + slot * SIZE, SIZE, self.mr.lkey)
        request = wr.SendWR(number, opcode=opcode, num_sge=1, sg=[sge], imm_data=number, send_flags=flags)
        if opcode == ibv_wr_opcode.IBV_WR_RDMA_WRITE_WITH_IMM:
            request.set_wr_rdma(self.rkey, self.base + slot * SIZE)
        self.qp.post_send(request)
        self.posted += 1

    def poll(self, queue):
        count, completions = queue.poll(num_entries=8)
        for wc in completions[:count]:
            if wc.status != ibv_wc_status.IBV_WC_SUCCESS:
                sys.exit(f"error status {wc.status} after {self.arrived}")
            yield wc

    def turn(self, client):
        """Look at both queues once."""
        for wc in self.poll(self.send_cq):
            assert wc.wr_id == self.done + 3, (wc.wr_id, self.done)
            self.done += 4
        for wc in self.poll(self.recv_cq):
            assert wc.wr_id == self.arrived % WINDOW, (wc.wr_id, self.arrived)
            if client:
                assert wc.opcode == e.ibv_wc_opcode.IBV_WC_RECV, wc.opcode
            else:
                assert wc.opcode == e.ibv_wc_opcode.IBV_WC_RECV_RDMA_WITH_IMM, wc.opcode
                assert wc.imm_data == self.arrived & 0xFFFFFFFF and wc.byte_len == SIZE
                found = self.mr.read(SIZE, self.arrived % WINDOW * SIZE)
                assert found == self.block(self.arrived), (found[:8], self.arrived)
            self.receive(wc.wr_id)
            self.arrived += 1
        if client:
            # A credit says that the block was looked at, so that its place may be written again.
            while self.posted - self.arrived < WINDOW // 2 and self.posted - self.done < WINDOW:
                self.post(ibv_wr_opcode.IBV_WR_RDMA_WRITE_WITH_IMM, self.posted)
        else:
            while self.posted < self.arrived and self.posted - self.done < WINDOW:
                self.post(ibv_wr_opcode.IBV_WR_SEND, self.posted)
        if time.monotonic() - self.shown > 0.1:
            self.shown = time.monotonic()
            shift = getattr(self.qp, "shift", None)
            what = f"{'written' if client else 'received'} {self.arrived}"
            print(f"{what}, {shift.status} on {shift.path}" if shift else what, flush=True)


def main(port, server=None):
    side = Side()
    if server:
        tcp = socket.create_connection((server, port))
    else:
        with socket.create_server(("127.0.0.1", port)) as listener:
            print("listening", flush=True)
            tcp, _ = listener.accept()
    with tcp:
        side.connect(tcp)
    while True:
        side.turn(client=bool(server))


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:3])
