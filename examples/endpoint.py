# SPDX-License-Identifier: BSD-3-Clause
"""What the programs beside this file share: the verbs objects of one RC connection, and connecting them over TCP.

Nothing in it is about failover but the import. A program of your own has this part already.
"""

import argparse
import json
import socket
import sys
import time

import shiftverbs.enums as e
from shiftverbs.addr import GID, AHAttr, GlobalRoute
from shiftverbs.cq import CQ, CompChannel
from shiftverbs.device import Context, get_device_list
from shiftverbs.mr import MR
from shiftverbs.pd import PD
from shiftverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from shiftverbs.wr import SGE, RecvWR, SendWR

REMOTE = e.IBV_ACCESS_REMOTE_WRITE | e.IBV_ACCESS_REMOTE_READ


class Endpoint:
    """Context, PD, MR, CompChannel, CQ and an RC QP in state INIT: receives can be posted.

    device: its name, None for the first; size: of the memory region, in bytes; depth: WRs in each queue.
    """

    def __init__(self, device=None, size=4096, depth=16):
        self.context = Context(name=device or get_device_list()[0].name.decode())
        self.pd = PD(self.context)
        self.mr = MR(self.pd, size, e.IBV_ACCESS_LOCAL_WRITE | REMOTE)
        self.channel = CompChannel(self.context)
        self.cq = CQ(self.context, 2 * depth, None, self.channel)
        cap = QPCap(max_send_wr=depth, max_recv_wr=depth)
        init = QPInitAttr(qp_type=e.IBV_QPT_RC, scq=self.cq, rcq=self.cq, cap=cap, sq_sig_all=1)
        attr = QPAttr(port_num=1)
        attr.qp_access_flags = REMOTE
        self.qp = QP(self.pd, init, attr)

    def connect(self, stream):
        """Tell the other end who we are, learn who it is, and go to RTS. Returns its address and rkey.

        stream: a file on a TCP connection between the two.
        """
        gids = ((index, str(self.context.query_gid(1, index))) for index in range(16))
        gid_index, gid = next((index, gid) for index, gid in gids if gid.replace("0", "").strip(":"))
        ours = {"gid": gid, "qpn": self.qp.qp_num, "address": self.mr.buf, "rkey": self.mr.rkey}
        peer = swap(stream, ours)
        attr = QPAttr(port_num=1)
        attr.dest_qp_num = peer["qpn"]
        attr.path_mtu = e.IBV_MTU_1024
        attr.rq_psn = attr.sq_psn = 0
        attr.max_rd_atomic = attr.max_dest_rd_atomic = 1
        attr.min_rnr_timer = 12
        attr.timeout, attr.retry_cnt, attr.rnr_retry = 14, 6, 7
        route = GlobalRoute(dgid=GID(peer["gid"]), sgid_index=gid_index, hop_limit=64)
        attr.ah_attr = AHAttr(port_num=1, is_global=1, gr=route)
        self.qp.to_rtr(attr)
        self.qp.to_rts(attr)
        swap(stream, "connected")
        return peer["address"], peer["rkey"]

    def sge(self, offset, length):
        """A piece of the memory region, both in bytes."""
        return SGE(self.mr.buf + offset, length, self.mr.lkey)

    def receive(self, offset, length):
        """Post a receive into the memory region; its wr_id is the offset."""
        self.qp.post_recv(RecvWR(offset, 1, [self.sge(offset, length)]))

    def send(self, offset, length, opcode=e.IBV_WR_SEND, remote=None):
        """Post a SEND, or what opcode says with remote, the peer's (address, rkey); its wr_id is the offset."""
        wr = SendWR(offset, num_sge=1, sg=[self.sge(offset, length)], opcode=opcode)
        if remote is not None:
            wr.set_wr_rdma(rkey=remote[1], addr=remote[0])
        self.qp.post_send(wr)

    def poll(self):
        """The completions that there are. One with an error ends the program."""
        _, wcs = self.cq.poll(16)
        for wc in wcs:
            if wc.status != e.IBV_WC_SUCCESS:
                sys.exit(f"completion with error status {wc.status}")
        return wcs

    def ping_pong(self, first):
        """One message there and back, 64 bytes each; a receive is posted. first: whether this end begins."""
        if first:
            self.send(64, 64)
        self.wait(e.IBV_WC_RECV)
        self.receive(0, 64)
        if not first:
            self.send(64, 64)

    def wait(self, *opcodes):
        """Poll until a completion with each of these opcodes has come."""
        missing = set(opcodes)
        while missing:
            found = {wc.opcode for wc in self.poll()}
            missing -= found
            if not found:
                time.sleep(0.0001)


def swap(stream, value):
    """Tell the other end a value and return the one that it tells."""
    stream.write(json.dumps(value).encode() + b"\n")
    stream.flush()
    return json.loads(stream.readline())


def arguments(text):
    """The command line: [--device NAME] [--port PORT] [SERVER]. text: what the program does."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("server", nargs="?", help="where the other end runs; without it, wait for it")
    parser.add_argument("--device", help="RDMA device, by default the first")
    parser.add_argument("--port", type=int, default=18515, help="TCP port where one end waits")
    return parser


def meet(options):
    """Connect the two ends over TCP. Returns a file on the connection."""
    if options.server is None:
        with socket.create_server(("", options.port)) as listener:
            print("waiting for the other end", flush=True)
            return listener.accept()[0].makefile("rwb")
    for _ in range(100):  # the other end may still be starting
        try:
            return socket.create_connection((options.server, options.port)).makefile("rwb")
        except ConnectionRefusedError:
            time.sleep(0.1)
    sys.exit(f"nobody listens on {options.server}:{options.port}")
