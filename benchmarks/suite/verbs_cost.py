# SPDX-License-Identifier: BSD-3-Clause
"""What each verb costs in software: both packages in one process, on the software RNIC's null device.

A child process of the suite; prints one JSON object: nanoseconds per call, one value for each package and slice.
Slices of the two packages take turns, so that whatever else the machine does hits both alike.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

# In the order in which their slices take turns.
PACKAGES = ("pyverbs", "shiftverbs")
DEPTH = 1024
BATCH = 16
#: Send and receive WRs of the QP that the control verbs make: perftest's.
USUAL_DEPTH = (128, 512)
#: Repetitions that one slice of a data verb takes.
CALLS = 4096
#: Rounds of control verbs without a rest.
ROW = 20
SLICE_NS = Callable[[], float]


class Side:
    """One package with a connected QP whose every WR completes at once.

    :param package: pyverbs or shiftverbs
    """

    def __init__(self, package: str) -> None:
        from benchmarks.perftest.verbs import Verbs

        self.verbs = verbs = Verbs(package)
        e = verbs.enums
        self.ctx = verbs.device.Context(name="soft0")
        self.gid = self.ctx.query_gid(1, 0)
        self.pd = verbs.pd.PD(self.ctx)
        self.memory = mmap.mmap(-1, 4096)
        pointer = (ctypes.c_char * 4096).from_buffer(self.memory)
        self.vaddr = ctypes.addressof(pointer)
        del pointer
        self.access = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE
        self.mr = self.reg_mr()
        self.cq = self.create_cq()
        self.qp = self.create_qp()
        self.qp.to_rts(self.attr())
        sge = self.sge = verbs.wr.SGE(self.vaddr, 64, self.mr.lkey)
        self.signaled = verbs.wr.SendWR(
            wr_id=1, num_sge=1, sg=[sge], opcode=e.IBV_WR_RDMA_WRITE, send_flags=e.IBV_SEND_SIGNALED
        )
        self.signaled.set_wr_rdma(self.mr.rkey, self.vaddr)
        self.recv = verbs.wr.RecvWR(wr_id=2, num_sge=1, sg=[sge])

    # -- control verbs, each returning what it made

    def alloc_pd(self) -> Any:
        """ibv_alloc_pd."""
        return self.verbs.pd.PD(self.ctx)

    def reg_mr(self) -> Any:
        """ibv_reg_mr."""
        return self.verbs.mr.MR(self.pd, 4096, self.access, address=self.vaddr)

    def create_cq(self) -> Any:
        """ibv_create_cq."""
        return self.verbs.cq.CQ(self.ctx, 2 * DEPTH)

    def init_attr(self, send_wr: int = DEPTH, recv_wr: int = DEPTH) -> Any:
        """struct ibv_qp_init_attr of a QP of this depth."""
        cap = self.verbs.qp.QPCap(max_send_wr=send_wr, max_recv_wr=recv_wr, max_send_sge=1, max_recv_sge=1)
        return self.verbs.qp.QPInitAttr(
            qp_type=self.verbs.enums.IBV_QPT_RC, scq=self.cq, rcq=self.cq, cap=cap, sq_sig_all=0
        )

    def create_qp(self) -> Any:
        """ibv_create_qp."""
        return self.verbs.qp.QP(self.pd, self.init_attr())

    def attr(self) -> Any:
        """struct ibv_qp_attr for all transitions."""
        verbs = self.verbs
        route = verbs.addr.GlobalRoute(dgid=self.gid, sgid_index=0, hop_limit=64)
        attr = verbs.qp.QPAttr(port_num=1)
        attr.qp_access_flags = self.access
        attr.ah_attr = verbs.addr.AHAttr(is_global=1, gr=route, port_num=1)
        attr.path_mtu = 3
        attr.dest_qp_num = 0x123456
        attr.max_rd_atomic = attr.max_dest_rd_atomic = 1
        attr.min_rnr_timer = 12
        attr.timeout, attr.retry_cnt, attr.rnr_retry = 14, 7, 7
        return attr

    def drain(self) -> None:
        """Poll until nothing is left."""
        while self.cq.poll(DEPTH)[0]:
            pass

    def close(self) -> None:
        """Release everything."""
        for resource in (self.qp, self.cq, self.mr, self.pd, self.ctx):
            resource.close()


def data_verbs(side: Side) -> dict[str, SLICE_NS]:
    """Return, by name, what measures one slice of each data verb: nanoseconds per call."""
    verbs, qp, cq = side.verbs, side.qp, side.cq
    signaled, recv = side.signaled, side.recv
    clock = time.perf_counter_ns
    SGE, SendWR, RecvWR = verbs.wr.SGE, verbs.wr.SendWR, verbs.wr.RecvWR
    address, lkey = side.vaddr, side.mr.lkey
    opcode, flags = verbs.enums.IBV_WR_RDMA_WRITE, verbs.enums.IBV_SEND_SIGNALED

    def post_and_poll() -> float:
        post, poll = qp.post_send, cq.poll
        start = clock()
        for _ in range(CALLS):
            post(signaled)
            poll(1)
        return (clock() - start) / CALLS

    def post_send() -> float:
        post = qp.post_send
        total = 0
        for _ in range(CALLS // DEPTH):
            start = clock()
            for _ in range(DEPTH):
                post(signaled)
            total += clock() - start
            side.drain()
        return total / (CALLS // DEPTH * DEPTH)

    def post_recv() -> float:
        post = qp.post_recv
        total = 0
        for _ in range(CALLS // DEPTH):
            start = clock()
            for _ in range(DEPTH):
                post(recv)
            total += clock() - start
            side.drain()
        return total / (CALLS // DEPTH * DEPTH)

    def poll_batch() -> float:
        post, poll = qp.post_send, cq.poll
        total = 0
        for _ in range(CALLS // DEPTH):
            for _ in range(DEPTH):
                post(signaled)
            start = clock()
            for _ in range(DEPTH // BATCH):
                poll(BATCH)
            total += clock() - start
        return total / (CALLS // DEPTH * (DEPTH // BATCH))

    def empty_poll() -> float:
        poll = cq.poll
        start = clock()
        for _ in range(CALLS):
            poll(1)
        return (clock() - start) / CALLS

    def build_send() -> float:
        start = clock()
        for _ in range(CALLS):
            SendWR(wr_id=7, num_sge=1, sg=[SGE(address, 64, lkey)], opcode=opcode, send_flags=flags)
        return (clock() - start) / CALLS

    def build_recv() -> float:
        start = clock()
        for _ in range(CALLS):
            RecvWR(wr_id=7, num_sge=1, sg=[SGE(address, 64, lkey)])
        return (clock() - start) / CALLS

    return {
        "post_send + poll": post_and_poll,
        "post_send": post_send,
        "post_recv": post_recv,
        "poll of 16": poll_batch,
        "empty poll": empty_poll,
        "SGE + SendWR": build_send,
        "SGE + RecvWR": build_recv,
    }


def control_verbs(side: Side, rest: Callable[[], None]) -> dict[str, float]:
    """Run each control verb once, as a program that connects does; return nanoseconds by name.

    :param rest: called where a program would do something else
    """
    clock = time.perf_counter_ns
    took: dict[str, float] = {}

    def timed(name: str, verb: Callable[..., Any], *arguments: Any) -> Any:
        start = clock()
        made = verb(*arguments)
        took[name] = clock() - start
        return made

    run_control_verbs(side, rest, timed)
    return took


def run_control_verbs(side: Side, rest: Callable[[], None], timed: Callable[..., Any]) -> None:
    """Run each control verb once, as `timed(name, verb, *arguments)`."""
    pd = timed("alloc_pd", side.alloc_pd)
    mr = timed("reg_mr", side.reg_mr)
    cq = timed("create_cq", side.create_cq)
    init = side.init_attr(*USUAL_DEPTH)
    qp = timed("create_qp", side.verbs.qp.QP, side.pd, init)
    attr = side.attr()
    timed("modify to INIT", qp.to_init, attr)
    # Each verb alone: pyverbs' to_rtr goes through INIT, its to_rts through both.
    for name, state in (("RTR", 2), ("RTS", 3)):
        attr.qp_state = state
        mask = qp._get_comp_mask(name)
        timed(f"modify to {name}", qp.modify, attr, mask[name] if isinstance(mask, dict) else mask)
    rest()  # no program queries or destroys a QP microseconds after it was connected
    timed("query_qp", qp.query, 0)
    timed("destroy_qp", qp.close)
    timed("destroy_cq", cq.close)
    timed("dereg_mr", mr.close)
    timed("dealloc_pd", pd.close)


def calls_of_ours(side: Side) -> dict[str, dict[str, int]]:
    """Run each control verb once more; return how often each Python function of the package was called, by verb.

    In the calling thread; unlike times they are the same on every machine.
    """
    counted: dict[str, dict[str, int]] = {}
    now: dict[str, int] = {}
    package = os.path.dirname(sys.modules[side.verbs.package].__file__ or "")

    def called(frame: FrameType, what: str, _: Any) -> None:
        code = frame.f_code
        if what == "call" and code.co_filename.startswith(package):
            name = f"{code.co_filename[len(package) + 1 :]}: {getattr(code, 'co_qualname', code.co_name)}"
            now[name] = now.get(name, 0) + 1

    def timed(name: str, verb: Callable[..., Any], *arguments: Any) -> Any:
        nonlocal now
        now = counted[name] = {}
        sys.setprofile(called)
        try:
            return verb(*arguments)
        finally:
            sys.setprofile(None)

    run_control_verbs(side, settle, timed)
    return counted


def note(found: dict[str, dict[str, list[float]]], package: str, took: dict[str, float]) -> None:
    """Put one round of one package to the others."""
    for name, ns in took.items():
        found.setdefault(name, {key: [] for key in PACKAGES})[package].append(ns)


def settle() -> None:
    """Wait until what the verbs of one side left to the background is done, so that it is not charged to the other.

    :raises RuntimeError: it never ends
    """
    from shiftverbs.failover import runtime

    machinery = runtime.current()
    assert machinery is not None
    for _ in range(2):  # what the NICs' threads did gives the driver work, and the other way round
        for nic in machinery.nics.all():
            nic.worker.call(lambda: None).result(30)
        seen = threading.Event()
        machinery.driver.post(seen.set)
        if not seen.wait(30):
            raise RuntimeError("the failover machinery does not come to rest")
        with machinery.driver.locked():
            pass  # the run that set it is over too


def wait_journal(side: Side) -> None:
    """Check that what is measured is the journal.

    :raises RuntimeError: posts go past it
    """
    core = side.qp._core
    if core is None:
        raise RuntimeError(f"shiftverbs' QP has no journal: {side.qp.shift}")
    before = core.posted
    side.qp.post_send(side.signaled)
    side.drain()
    if core.posted != before + 1:
        raise RuntimeError("a post went past the journal")


def measure(rounds: int, control_rounds: int) -> dict[str, Any]:
    """Return {"data": {verb: {package: [ns]}}, "control": …, "in_a_row": …, "calls": …, "memory": …}.

    The caller sees progress as one line per round on standard error.
    """
    sides = {package: Side(package) for package in PACKAGES}
    wait_journal(sides["shiftverbs"])
    data: dict[str, dict[str, list[float]]] = {}
    control: dict[str, dict[str, list[float]]] = {}
    verbs = {package: data_verbs(side) for package, side in sides.items()}
    gc.collect()
    gc.disable()
    for name in verbs["pyverbs"]:
        taken = data[name] = {package: [] for package in PACKAGES}
        for package in PACKAGES:
            verbs[package][name]()  # warm
        for _ in range(rounds):
            for package in PACKAGES:
                taken[package].append(verbs[package][name]())
        gc.collect()
        print(f"progress {name}", file=sys.stderr, flush=True)
    for index in range(control_rounds + 2):
        for package in PACKAGES:
            settle()
            took = control_verbs(sides[package], settle)
            if index >= 2:  # the first make what later ones find made
                note(control, package, took)
        gc.collect()
        if index % 10 == 9:
            print("progress control verbs", file=sys.stderr, flush=True)
    # The same as a program does it that makes many QPs: what a verb runs through is in the caches from the last one.
    in_a_row: dict[str, dict[str, list[float]]] = {}
    for _ in range(control_rounds // ROW):
        for package in PACKAGES:
            settle()
            for index in range(ROW):
                took = control_verbs(sides[package], lambda: None)
                if index >= ROW // 4:
                    note(in_a_row, package, took)
        gc.collect()
    gc.enable()
    memory = {
        "journal_bytes": sides["shiftverbs"].qp._core.journal_bytes,
        "depth": DEPTH,
    }
    settle()
    counted = {name: sum(each.values()) for name, each in calls_of_ours(sides["shiftverbs"]).items()}
    for side in sides.values():
        side.close()
    return {
        "data": data,
        "control": control,
        "in_a_row": in_a_row,
        "calls": counted,
        "memory": memory,
    }


def main() -> int:
    """Measure and print; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--control-rounds", type=int, default=100)
    options = parser.parse_args()
    if not os.environ.get("SHIFTVERBS_ETCD"):
        parser.error("SHIFTVERBS_ETCD is not set: without it there is no journal")
    print(json.dumps(measure(options.rounds, options.control_rounds)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
