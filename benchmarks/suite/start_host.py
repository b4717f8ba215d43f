# SPDX-License-Identifier: BSD-3-Clause
"""One process from its import of a verbs package to a QP that is protected, and how long that took.

    python -m benchmarks.suite.start_host PACKAGE DEVICE

Prints who it is, reads who its peer is, connects, prints the times; ends when its input does. Nothing of either package
is loaded before the clock starts: the software RNIC comes by LD_PRELOAD.
"""

from __future__ import annotations

import importlib
import json
import sys
import time

#: IBV_QPT_RC, IBV_ACCESS_LOCAL_WRITE, IBV_MTU_1024: where pyverbs has the names differs between its releases.
RC, LOCAL_WRITE, MTU = 2, 1, 3
PROTECTED_S = 60.0


def main() -> int:
    """Start once; the exit status."""
    package, device = sys.argv[1:]
    begun = time.monotonic_ns()
    addr, cq, dev, mr, pd, qp = (
        importlib.import_module(f"{package}.{name}") for name in ("addr", "cq", "device", "mr", "pd", "qp")
    )
    times = {"import": time.monotonic_ns()}
    context = dev.Context(name=device)
    domain = pd.PD(context)
    region = mr.MR(domain, 4096, LOCAL_WRITE)
    queue = cq.CQ(context, 64)
    cap = qp.QPCap(max_send_wr=16, max_recv_wr=16)
    pair = qp.QP(domain, qp.QPInitAttr(qp_type=RC, scq=queue, rcq=queue, cap=cap))
    print(json.dumps({"gid": str(context.query_gid(1, 0)), "qpn": pair.qp_num}), flush=True)
    peer = json.loads(sys.stdin.readline())
    attr = qp.QPAttr(port_num=1)
    attr.dest_qp_num, attr.path_mtu = peer["qpn"], MTU
    attr.max_rd_atomic = attr.max_dest_rd_atomic = 1
    attr.min_rnr_timer, attr.timeout, attr.retry_cnt, attr.rnr_retry = 12, 14, 6, 7
    route = addr.GlobalRoute(dgid=addr.GID(peer["gid"]), sgid_index=0, hop_limit=64)
    attr.ah_attr = addr.AHAttr(port_num=1, is_global=1, gr=route)
    pair.to_rts(attr)
    times["rts"] = time.monotonic_ns()
    if package == "shiftverbs":
        if not pair.shift.wait_protected(PROTECTED_S):
            print(json.dumps({"failed": f"not protected: {pair.shift}"}), flush=True)
            return 1
        times["protected"] = time.monotonic_ns()
    print(json.dumps({name: (ns - begun) / 1e6 for name, ns in times.items()}), flush=True)
    sys.stdin.read()
    for thing in (pair, queue, region, domain, context):
        thing.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
