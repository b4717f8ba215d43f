# SPDX-License-Identifier: BSD-3-Clause
"""A stream of numbered messages over one RC QP: an ordinary pyverbs program.

    python rc_stream.py [--device NAME]             the receiver: prints what arrives
    python rc_stream.py [--device NAME] SERVER      the sender

Both ends print a line a second. It knows nothing of failover. Change `pyverbs` to `shiftverbs` in the imports
below, or run it under `python -m shiftverbs run`, and it survives the loss of its NIC.
"""

import argparse
import json
import socket
import struct
import sys
import time

from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context, get_device_list
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, RecvWR, SendWR

try:
    import pyverbs.enums as e
except ModuleNotFoundError:  # plain pyverbs from release 65 on: the constants are members of classes
    import types

    import pyverbs.libibverbs_enums

    classes = [c for c in vars(pyverbs.libibverbs_enums).values() if isinstance(c, type)]
    e = types.SimpleNamespace(
        **{name: v for c in classes for name, v in getattr(c, "__members__", {}).items()}
    )

SIZE = 16 * 1024
SLOTS = 64
NUMBER = struct.Struct("<Q")


class Endpoint:
    """Context, PD, MR with SLOTS buffers, CQ, QP."""

    def __init__(self, device):
        name = device or get_device_list()[0].name.decode()
        self.context = Context(name=name)
        self.pd = PD(self.context)
        self.mr = MR(self.pd, SIZE * SLOTS, e.IBV_ACCESS_LOCAL_WRITE)
        self.cq = CQ(self.context, 2 * SLOTS)
        cap = QPCap(max_send_wr=SLOTS, max_recv_wr=SLOTS)
        self.qp = QP(self.pd, QPInitAttr(qp_type=e.IBV_QPT_RC, scq=self.cq, rcq=self.cq, cap=cap))
        self.gid_index, self.gid = next(
            (index, gid)
            for index, gid in ((i, str(self.context.query_gid(1, i))) for i in range(16))
            if gid.replace("0", "").strip(":")
        )

    def exchange(self, stream):
        """Tell the other end who we are, over TCP, and learn who it is."""
        stream.write(json.dumps({"gid": self.gid, "qpn": self.qp.qp_num}) + "\n")
        stream.flush()
        return json.loads(stream.readline())

    def connect(self, peer):
        """RESET to RTS."""
        attr = QPAttr(port_num=1)
        attr.dest_qp_num = peer["qpn"]
        attr.path_mtu = e.IBV_MTU_1024
        attr.rq_psn = attr.sq_psn = 0
        attr.max_rd_atomic = attr.max_dest_rd_atomic = 1
        attr.min_rnr_timer = 12
        attr.timeout = 14
        attr.retry_cnt = 6
        attr.rnr_retry = 7
        route = GlobalRoute(dgid=GID(peer["gid"]), sgid_index=self.gid_index, hop_limit=64)
        attr.ah_attr = AHAttr(port_num=1, is_global=1, gr=route)
        self.qp.to_rts(attr)

    def sge(self, slot):
        return SGE(self.mr.buf + slot * SIZE, SIZE, self.mr.lkey)

    def completions(self):
        """Wait for completions; an error ends the program, as it would any."""
        while True:
            count, wcs = self.cq.poll(SLOTS)
            for wc in wcs[:count]:
                if wc.status != e.IBV_WC_SUCCESS:
                    sys.exit(f"completion with error status {wc.status}")
            if count:
                return wcs[:count]
            time.sleep(0.0001)


class Progress:
    """A line a second."""

    def __init__(self, what, qp):
        self.what, self.qp = what, qp
        self.count = self.last = 0
        self.next = time.monotonic() + 1

    def add(self):
        self.count += 1
        if time.monotonic() >= self.next:
            self.next += 1
            # What carries the stream; with plain pyverbs nobody can tell.
            shift = getattr(self.qp, "shift", None)
            where = f", {shift.status} on {shift.path}" if shift else ""
            rate = (self.count - self.last) * SIZE / 1e6
            print(f"{self.what} {self.count} messages, {rate:.0f} MB/s{where}", flush=True)
            self.last = self.count


def receive(endpoint, stream):
    wrs = [RecvWR(slot, 1, [endpoint.sge(slot)]) for slot in range(SLOTS)]
    for wr in wrs:
        endpoint.qp.post_recv(wr)
    stream.write("ready\n")
    stream.flush()
    progress = Progress("received", endpoint.qp)
    while True:
        for wc in endpoint.completions():
            (number,) = NUMBER.unpack(endpoint.mr.read(NUMBER.size, wc.wr_id * SIZE))
            if number != progress.count:
                sys.exit(f"message {number} arrived where {progress.count} was due")
            endpoint.qp.post_recv(wrs[wc.wr_id])
            progress.add()


def send(endpoint, stream):
    flags = e.IBV_SEND_SIGNALED
    wrs = [
        SendWR(slot, num_sge=1, sg=[endpoint.sge(slot)], opcode=e.IBV_WR_SEND, send_flags=flags)
        for slot in range(SLOTS)
    ]
    assert stream.readline() == "ready\n"
    progress = Progress("sent", endpoint.qp)
    posted = 0
    while True:
        while posted - progress.count < SLOTS:
            slot = posted % SLOTS
            endpoint.mr.write(NUMBER.pack(posted), NUMBER.size, slot * SIZE)
            endpoint.qp.post_send(wrs[slot])
            posted += 1
        for _ in endpoint.completions():
            progress.add()


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("server", nargs="?", help="where the receiver runs; without it this is the receiver")
    parser.add_argument("--device", help="RDMA device, by default the first")
    parser.add_argument("--port", type=int, default=18515, help="TCP port of the receiver")
    options = parser.parse_args()
    endpoint = Endpoint(options.device)
    if options.server is None:
        with socket.create_server(("", options.port)) as listener:
            print("waiting for the sender", flush=True)
            connection, _ = listener.accept()
    else:
        connection = connect_soon(options.server, options.port)
    with connection, connection.makefile("rw") as stream:
        endpoint.connect(endpoint.exchange(stream))
        (receive if options.server is None else send)(endpoint, stream)


def connect_soon(host, port):
    """The receiver may still be starting."""
    for _ in range(100):
        try:
            return socket.create_connection((host, port))
        except ConnectionRefusedError:
            time.sleep(0.1)
    sys.exit(f"nobody listens on {host}:{port}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        pass
