# SPDX-License-Identifier: BSD-3-Clause
"""One host whose NIC fails: one QP in one of three kinds of program, or a thousand QPs.

    python -m benchmarks.suite.failure_host PACKAGE

Commands are JSON objects, one a line, answered in order: open, connect, protect, run, stop, close, status, memory.

polling    keeps SENDs outstanding and polls without pause; the peer polls and posts receives again
blocked    SENDs there and back, each side asleep in get_cq_event
spinning   RDMA WRITEs there and back, each side spins on memory in Python and calls nothing of ours meanwhile
many       one WRITE outstanding on each of many QPs, polled in a loop
idle       QPs without traffic
"""

from __future__ import annotations

import ctypes
import json
import mmap
import queue
import sys
import threading
import time
import traceback
from typing import Any

from benchmarks.perftest.verbs import Verbs

SIZE = 64
DEPTH = 16
#: timeout and retry_cnt: perftest's, 67 ms and seven more tries; or so short that the NIC tells first.
PATIENT = (14, 7)
IMPATIENT = (9, 5)
#: Turns of a spinning program between two looks whether it is to stop.
LOOK_EVERY = 256


class Failed(RuntimeError):
    """The program saw an error."""


class Host:
    """Verbs objects and the program that uses them.

    :param package: pyverbs or shiftverbs
    :param device: name of the default NIC
    """

    def __init__(self, package: str, device: str) -> None:
        self.verbs = Verbs(package)
        self.device = device
        self.commands: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self.qps: list[Any] = []
        self.running = False
        self.error = ""
        self._reset()
        self._opened: list[Any] = []
        self.opened_ns = self.connected_ns = self.protected_ns = 0

    def _reset(self) -> None:
        """What belongs to one connection."""
        self.trips_us: list[float] = []
        self.writes: list[Any] = []
        self.trip_ns = self.done = self.outstanding = self.owed = self.sent = self.collected = 0

    # -- commands

    def do_open(self, command: dict[str, Any]) -> dict[str, Any]:
        """Make the verbs objects; answer with what the peer must know."""
        v, e = self.verbs, self.verbs.enums
        self.opened_ns = time.monotonic_ns()
        self.mode, self.role, count = command["mode"], command["role"], command.get("qps", 1)
        self.timers = IMPATIENT if command.get("impatient") else PATIENT
        self._reset()
        self.ctx = v.device.Context(name=self.device)
        self.gid = self.ctx.query_gid(1, 0)
        self.pd = v.pd.PD(self.ctx)
        self.memory = mmap.mmap(-1, 4096)
        pointer = (ctypes.c_char * 4096).from_buffer(self.memory)
        self.vaddr = ctypes.addressof(pointer)
        del pointer
        access = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE
        self.mr = v.mr.MR(self.pd, 4096, access, address=self.vaddr)
        self.channel: Any = v.cq.CompChannel(self.ctx) if self.mode == "blocked" else None
        depth = command.get("depth", DEPTH)
        self.cq = v.cq.CQ(self.ctx, 2 * depth * count, None, self.channel)
        cap = v.qp.QPCap(max_send_wr=depth, max_recv_wr=depth, max_send_sge=1, max_recv_sge=1)
        init = v.qp.QPInitAttr(qp_type=e.IBV_QPT_RC, scq=self.cq, rcq=self.cq, cap=cap, sq_sig_all=0)
        self.qps = [v.qp.QP(self.pd, init) for _ in range(count)]
        channel = [self.channel] if self.channel is not None else []
        self._opened = [*self.qps, self.cq, *channel, self.mr, self.pd, self.ctx]
        return {
            "peer": {
                "gid": str(self.gid),
                "qpns": [qp.qp_num for qp in self.qps],
                "address": self.vaddr,
                "rkey": self.mr.rkey,
            },
            "took_ms": (time.monotonic_ns() - self.opened_ns) / 1e6,
        }

    def do_connect(self, command: dict[str, Any]) -> dict[str, Any]:
        """Bring every QP to RTS; answer with the time in ms."""
        v, e = self.verbs, self.verbs.enums
        self.connected_ns = time.monotonic_ns()
        self.peer = command["peer"]
        route = v.addr.GlobalRoute(dgid=v.addr.GID(self.peer["gid"]), sgid_index=0, hop_limit=64)
        for qp, qpn in zip(self.qps, self.peer["qpns"], strict=True):
            attr = v.qp.QPAttr(port_num=1)
            attr.qp_access_flags = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE
            attr.ah_attr = v.addr.AHAttr(is_global=1, gr=route, port_num=1)
            attr.path_mtu = e.IBV_MTU_1024
            attr.dest_qp_num = qpn
            attr.max_rd_atomic = attr.max_dest_rd_atomic = 1
            attr.min_rnr_timer, attr.rnr_retry = 12, 7
            attr.timeout, attr.retry_cnt = self.timers
            qp.to_rts(attr)
        sge = v.wr.SGE(self.vaddr, SIZE, self.mr.lkey)
        landing = v.wr.SGE(self.vaddr + 2048, SIZE, self.mr.lkey)
        self.recv = v.wr.RecvWR(num_sge=1, sg=[landing])
        self.send = v.wr.SendWR(num_sge=1, sg=[sge], opcode=e.IBV_WR_SEND, send_flags=e.IBV_SEND_SIGNALED)
        self.write = v.wr.SendWR(
            num_sge=1, sg=[sge], opcode=e.IBV_WR_RDMA_WRITE, send_flags=e.IBV_SEND_SIGNALED
        )
        self.write.set_wr_rdma(self.peer["rkey"], self.peer["address"] + 2048)
        if self.mode in ("polling", "blocked"):
            for qp in self.qps:
                for _ in range(DEPTH):
                    qp.post_recv(self.recv)
        return {"took_ms": (time.monotonic_ns() - self.connected_ns) / 1e6}

    def do_protect(self, command: dict[str, Any]) -> dict[str, Any]:
        """Wait until every QP is protected; answer with when that was, CLOCK_MONOTONIC."""
        for qp in self.qps:
            if not qp.shift.wait_protected(60):
                raise Failed(f"not protected: {qp.shift}")
        self.protected_ns = time.monotonic_ns()
        return {"opened_ns": self.opened_ns, "connected_ns": self.connected_ns, "ns": self.protected_ns}

    def do_status(self, command: dict[str, Any]) -> dict[str, Any]:
        """Tell how many QPs are on which pair, and the durations of each on request."""
        shifts = [qp.shift for qp in self.qps]
        away = sum(1 for s in shifts if s.state == "FALLBACK" and s.pair != 0)
        home = sum(1 for s in shifts if (s.state, s.recv_state, s.pair) == ("DEFAULT", "DEFAULT", 0))
        answer: dict[str, Any] = {"away": away, "home": home, "done": self.done}
        if command.get("full"):
            answer["durations"] = [s.durations for s in shifts]
            answer["trips_us"] = self.trips_us
        return answer

    def do_memory(self, command: dict[str, Any]) -> dict[str, Any]:
        """Tell the resident memory in bytes, and the journals'."""
        with open("/proc/self/status") as lines:
            rss = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))
        cores = [getattr(qp, "_core", None) for qp in self.qps]
        return {"rss": rss, "journal": sum(core.journal_bytes for core in cores if core is not None)}

    def do_close(self, command: dict[str, Any]) -> dict[str, Any]:
        """Destroy the verbs objects."""
        for thing in self._opened:
            thing.close()
        self._opened, self.qps = [], []
        return {}

    def do_run(self, command: dict[str, Any]) -> dict[str, Any]:
        """Run the program from now on; other commands interrupt it for a moment."""
        self.running = True
        return {}

    def do_stop(self, command: dict[str, Any]) -> dict[str, Any]:
        """Run it no longer."""
        if self.running and self.mode == "blocked" and self.role == 0:
            self.say_goodbye()
        self.running = False
        return {}

    # -- the programs: each returns soon after a command came, and goes on where it was when called again

    def check(self, completions: list[Any]) -> None:
        """Raise Failed if a completion is an error: the program would die of it."""
        for wc in completions:
            if wc.status:
                raise Failed(f"completion with status {wc.status}")

    def run_polling(self) -> None:
        """a sends, b receives; both poll."""
        qp, cq, no_command = self.qps[0], self.cq, self.commands.empty
        while no_command():
            while self.role == 0 and self.outstanding < DEPTH:
                qp.post_send(self.send)
                self.outstanding += 1
            count, completions = cq.poll(DEPTH)
            if not count:
                continue
            self.check(completions)
            self.done += count
            if self.role == 0:
                self.outstanding -= count
            else:
                for _ in range(count):
                    qp.post_recv(self.recv)

    def take(self) -> list[Any]:
        """Return completions, asleep until there are some; none if a command came meanwhile."""
        cq = self.cq
        while True:
            count, completions = cq.poll(DEPTH)
            if not count:
                cq.req_notify()
                count, completions = cq.poll(DEPTH)
            if count:
                self.check(completions)
                self.done += count
                return list(completions)
            if not self.commands.empty():
                return []
            self.channel.get_cq_event(cq)
            cq.ack_events(1)

    def run_blocked(self) -> None:
        """a sends and waits for the answer; both sleep. a's round trips are noted."""
        clock = time.perf_counter_ns
        qp = self.qps[0]
        while True:
            if self.role == 0 and not self.owed:
                if not self.commands.empty():
                    return
                self.trip_ns = clock()
                qp.post_send(self.send)
                self.owed = 2  # the SEND's own completion, and the answer
            completions = self.take()
            if not completions:
                return
            for wc in completions:
                self.owed -= 1
                if not wc.opcode & self.verbs.enums.IBV_WC_RECV:
                    continue
                qp.post_recv(self.recv)
                if self.role == 1:
                    if wc.wc_flags & self.verbs.enums.IBV_WC_WITH_IMM:
                        self.running = False
                        return
                    qp.post_send(self.send)
            if self.role == 0 and not self.owed:
                self.trips_us.append((clock() - self.trip_ns) / 1000)

    def say_goodbye(self) -> None:
        """Finish the round trip under way and have b wake up for good."""
        e = self.verbs.enums
        while self.owed:
            count, completions = self.cq.poll(DEPTH)
            self.check(completions if count else [])
            self.owed -= count
        self.send.opcode = e.IBV_WR_SEND_WITH_IMM
        self.qps[0].post_send(self.send)
        while not self.cq.poll(1)[0]:
            pass

    def run_spinning(self) -> None:
        """The message's number is written to the other side's memory, and the answer watched for in one's own."""
        memory, into, no_command = self.memory, 2048 + SIZE - 1, self.commands.empty
        qp, cq = self.qps[0], self.cq
        while True:
            if self.role == 1 or self.done < self.sent:
                wanted = (self.done + 1) & 0xFF
                turns = 0
                while memory[into] != wanted:
                    turns += 1
                    if turns % LOOK_EVERY == 0 and not no_command():
                        return
                self.done += 1
            if not no_command() and self.role == 0:
                return
            while self.sent - self.collected >= DEPTH // 2:
                self.collect(cq)
            self.collect(cq)
            self.sent += 1
            memory[SIZE - 1] = self.sent & 0xFF
            qp.post_send(self.write)

    def collect(self, cq: Any) -> None:
        """Poll for completions of own WRITEs."""
        count, completions = cq.poll(DEPTH)
        if count:
            self.check(completions)
            self.collected += count

    def run_many(self) -> None:
        """a keeps one WRITE outstanding on each QP."""
        if self.role == 1:
            self.run_idle()
            return
        cq, no_command = self.cq, self.commands.empty
        posts = [qp.post_send for qp in self.qps]
        if not self.writes:
            for index in range(len(posts)):
                e = self.verbs.enums
                sge = self.verbs.wr.SGE(self.vaddr, SIZE, self.mr.lkey)
                wr = self.verbs.wr.SendWR(
                    wr_id=index,
                    num_sge=1,
                    sg=[sge],
                    opcode=e.IBV_WR_RDMA_WRITE,
                    send_flags=e.IBV_SEND_SIGNALED,
                )
                wr.set_wr_rdma(self.peer["rkey"], self.peer["address"] + 2048)
                self.writes.append(wr)
        if not self.outstanding:
            for post, wr in zip(posts, self.writes, strict=True):
                post(wr)
                self.outstanding += 1
        while no_command():
            count, completions = cq.poll(64)
            if count:
                self.check(completions)
                self.done += count
                for wc in completions:
                    posts[wc.wr_id](self.writes[wc.wr_id])

    def run_idle(self) -> None:
        """Nothing: sleep until there is a command."""
        self.running = False

    # -- the loop

    def serve(self) -> None:
        """Answer commands and run the program in between, until standard input ends."""
        threading.Thread(target=self._read, name="commands", daemon=True).start()
        self._say({"ready": True})
        while True:
            if self.running:
                try:
                    getattr(self, f"run_{self.mode}")()
                except Exception as error:
                    traceback.print_exc()
                    self.running = False
                    self.error = f"{type(error).__name__}: {error}"
                if self.running and self.commands.empty():
                    continue
            line = self.commands.get()
            if line is None:
                self.do_close({})
                return
            command = json.loads(line)
            try:
                if self.error:
                    raise Failed(self.error)
                answer = getattr(self, "do_" + command["do"])(command)
            except Exception as error:
                traceback.print_exc()
                answer = {"failed": f"{type(error).__name__}: {error}"}
            self._say(answer)

    def _read(self) -> None:
        for line in sys.stdin:
            self.commands.put(line)
        self.commands.put(None)

    @staticmethod
    def _say(answer: dict[str, Any]) -> None:
        print(json.dumps(answer), flush=True)


def main() -> int:
    """Serve one run; the exit status."""
    package, device = sys.argv[1:]
    Host(package, device).serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())
