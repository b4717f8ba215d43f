# SPDX-License-Identifier: BSD-3-Clause
"""A soak run's program on one host: groups of lanes that share CQs, each group with a thread of its own.

How a group awaits completions (Shape.mode): "spin" polls without end; "slow" leaves its CQ alone for long; "blocked"
sits in get_cq_event without a time limit; "descriptor" waits on the channel's fd, as asyncio would.

The campaign drives it through tests/failover/puppet.py.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import random
import select
import socket
import threading
import time
from types import SimpleNamespace
from typing import Any

from shiftverbs.commands.demo.endpoint import Peer, Verbs, wc_status_name
from shiftverbs.commands.demo.pattern import Pattern
from shiftverbs.commands.demo.traffic import KINDS, Broken, Traffic
from soak.lanes import OURS, SIZE, Lane, Shape, rts_attributes

JOIN_S = 60.0
#: How long a group of the descriptor mode waits at a time.
WAIT_MS = 200


class Group:
    """Lanes on one CQ, or on a send CQ and a receive CQ, and the thread that serves them."""

    def __init__(self, app: Application, shape: Shape, first: int) -> None:
        v = app.verbs
        self.app = app
        self.shape = shape
        self.sending = self.stopping = False
        self.lock = threading.Lock()
        self.trouble: str | None = None
        events = shape.mode in ("blocked", "descriptor")
        self.channel = v.cq.CompChannel(app.context) if events else None
        sends, receives = shape.lanes * shape.depth, shape.lanes * shape.receives
        if shape.extended:
            depths = [sends + receives] if shape.one_cq else [sends, receives]
            flags = v.e.IBV_WC_STANDARD_FLAGS
            self.cqs = [v.cq.CQEX(app.context, v.cq.CqInitAttrEx(cqe=cqe, wc_flags=flags)) for cqe in depths]
        elif shape.one_cq or events:
            self.cqs = [v.cq.CQ(app.context, sends + receives, None, self.channel, 0)]
        else:
            self.cqs = [
                v.cq.CQ(app.context, sends, None, None, 0),
                v.cq.CQ(app.context, receives, None, None, 0),
            ]
        if events:
            self.cqs[0].req_notify()
        self.lanes = [
            Lane(
                v,
                app.context,
                app.pd,
                (self.cqs[0], self.cqs[-1]),
                shape,
                first + i,
                app.role,
                app.seed,
                app.pattern,
            )
            for i in range(shape.lanes)
        ]
        self.by_qp: dict[int, Lane | None] = {lane.qp_num: lane for lane in self.lanes}  # None: it is closed
        self.random = random.Random(f"{app.seed}/{first}")
        self.thread = threading.Thread(target=self._run, name=f"lanes-{first}", daemon=True)

    def _run(self) -> None:
        try:
            while not self.stopping:
                self._wait()
                with self.lock:
                    if not self.stopping:
                        self._turn()
                if self.stopping or all(lane.is_over for lane in self.lanes):
                    return
        except Exception as error:
            self.trouble = f"{type(error).__name__}: {error}"
            raise

    def _wait(self) -> None:
        shape = self.shape
        if self.channel is None:
            time.sleep(shape.nap_s * (self.random.uniform(0.5, 20) if shape.mode == "slow" else 1))
            return
        if shape.mode == "descriptor":
            poller = select.poll()
            poller.register(self.channel.fd, select.POLLIN)
            if not poller.poll(WAIT_MS):
                return
        self.channel.get_cq_event(self.cqs[0])
        self.cqs[0].ack_events(1)
        self.cqs[0].req_notify()
        time.sleep(shape.nap_s)  # other threads work too

    def _turn(self) -> None:
        self._take(1000)
        if self.sending:
            self.pump()

    def _take(self, batches: int) -> None:
        """What the CQs hold, as far as so many batches go."""
        for cq in self.cqs:
            for _ in range(batches):
                count, wcs = self._read(cq) if self.shape.extended else cq.poll(self.shape.batch)
                for wc in wcs:
                    lane = self.by_qp[wc.qp_num]
                    if lane is not None:
                        lane.take(wc)
                if count < self.shape.batch:
                    break

    def _read(self, cq: Any) -> tuple[int, list[Any]]:
        """As CQ.poll, with the cursor of a CQEX."""
        wcs = []
        rc = cq.start_poll(None)
        while rc == 0:
            wcs.append(
                SimpleNamespace(
                    wr_id=cq.wr_id,
                    status=cq.status,
                    opcode=cq.read_opcode(),
                    byte_len=cq.read_byte_len(),
                    wc_flags=cq.read_wc_flags(),
                    imm_data=socket.ntohl(cq.read_imm_data()),
                    qp_num=cq.read_qp_num(),
                )
            )
            if len(wcs) == self.shape.batch:
                break
            rc = cq.poll_next()
        if rc not in (0, errno.ENOENT):
            raise OSError(rc, "the CQ's cursor")
        if wcs:
            cq.end_poll()
        return len(wcs), wcs

    def pump(self) -> None:
        """Post a few messages on every lane. Under the lock."""
        for lane in self.lanes:
            lane.pump(2 if len(self.lanes) < 16 else 1)

    # -- the end of a lane's life, and the next one

    def reset(self, lane: Lane, most: int) -> list[int]:
        """The QP to RESET with work outstanding; what was completed before is taken. The record of this life."""
        with self.lock:
            lane.pump(most)
            lane.modify(qp_state=self.app.verbs.e.IBV_QPS_RESET)
            lane.ended = True
            self._take(1_000_000)
            lane.take_memory()
            record = lane.record()
            lane.begin_life(lane.life + 1)
            lane.awake = False
            return record

    def fail(self, lane: Lane, most: int) -> None:
        """The QP to ERR with work outstanding; `drain` is to follow."""
        with self.lock:
            lane.pump(most)
            lane.modify(qp_state=self.app.verbs.e.IBV_QPS_ERR)
            lane.awake = False  # the last WR is the drain's

    def drain(self, lane: Lane, deadline: float) -> list[int]:
        """Take completions until none can come; then RESET. The record of this life."""
        while True:
            with self.lock:
                if not lane.draining:
                    lane.drain()
                self._take(1000)
                if lane.is_drained:
                    break
            if time.monotonic() > deadline:
                why = f"posted {lane.posted}, receives {lane.receives_posted}, flushed {lane.received_errors}"
                lane.fault(
                    f"does not drain: {lane.draining}, {lane.drained}, {lane.record()}, {why}; {lane.qp.shift}"
                )
                break
            time.sleep(0.001)
        return self.reset(lane, 0)

    def replace(self, lane: Lane, mr_first: bool, most: int) -> tuple[Lane, Lane]:
        """Close the QP and the MR with work outstanding, and use the memory for something else as soon as one is gone.

        The next life is one of a new QP. Returns both lanes, the old one and the new one.
        """
        with self.lock:
            lane.pump(most)
            if mr_first:
                lane.mr.close()
                lane.take_memory()
            lane.qp.close()
            if not mr_first:
                lane.take_memory()
                lane.mr.close()
            self.by_qp[lane.qp_num] = None
            app, cqs = self.app, (self.cqs[0], self.cqs[-1])
            new = Lane(
                app.verbs, app.context, app.pd, cqs, self.shape, lane.number, app.role, app.seed, app.pattern,
                lane.life + 1,
            )  # fmt: skip
            new.awake, new.leaving = False, True
            new.take_memory()  # nobody has any business there before it is connected
            self.by_qp[new.qp_num] = new
            self.lanes[self.lanes.index(lane)] = new
            return lane, new

    def close(self) -> None:
        """Destroy the verbs objects, in an order of chance."""
        qps = [lane.qp for lane in self.lanes]
        mrs = [lane.mr for lane in self.lanes]
        self.random.shuffle(qps)
        for thing in (*qps, *mrs, *self.cqs, self.channel):
            if thing is not None:
                thing.close()


class Demo:
    """One of the demo's kinds of traffic with a thread of its own: large batches, chains, credits, large READs."""

    def __init__(self, app: Application, kind: str) -> None:
        self.traffic: Traffic = KINDS[kind](app.verbs, "soft0", app.role, app.seed)
        self.kind = kind
        self.sending = self.stopping = False
        self.broken: str | None = None
        self.lock = threading.Lock()
        self.thread = threading.Thread(target=self._run, name=f"demo-{kind}", daemon=True)

    def _run(self) -> None:
        while not self.stopping and self.broken is None:
            with self.lock:
                try:
                    self.traffic.step(self.sending)
                except Broken as broken:
                    self.broken = str(broken)
            time.sleep(0.002)

    def status(self) -> dict[str, Any]:
        """The traffic's own report, and the QP's state."""
        shift = self.traffic.endpoint.qp.shift
        with self.lock:
            report = self.traffic.report()
        state = [shift.status, shift.state, shift.recv_state, shift.pair]
        return {**report, "kind": self.kind, "broken": self.broken, "shift": state}


class Counter:
    """Fetch-and-add by a on a number of b's, one at a time. A failure may end it; none may ever be done twice."""

    def __init__(self, app: Application) -> None:
        v, e = app.verbs, app.verbs.e
        self.app = app
        self.sending = self.stopping = False
        self.outstanding = False
        self.done = 0
        self.broken: str | None = None
        self.faults: list[str] = []
        self.access = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_ATOMIC
        self.mr = v.mr.MR(app.pd, 16, self.access)
        self.mr.write(bytes(16), 16)
        self.cq = v.cq.CQ(app.context, 8)
        cap = v.qp.QPCap(max_send_wr=4, max_recv_wr=1)
        self.qp = v.qp.QP(app.pd, v.qp.QPInitAttr(qp_type=e.IBV_QPT_RC, scq=self.cq, rcq=self.cq, cap=cap))
        self.thread = threading.Thread(target=self._run, name="counter", daemon=True)

    def name(self) -> dict[str, Any]:
        """What the peer must know."""
        gid = str(self.app.context.query_gid(1, 1))
        return {"gid": gid, "qpn": self.qp.qp_num, "psn": 77, "rkey": self.mr.rkey, "address": self.mr.buf}

    def connect(self, peer: dict[str, Any]) -> None:
        """To RTS; makes the WR: what it fetches lies in the second eight bytes."""
        v, e = self.app.verbs, self.app.verbs.e
        self.qp.to_rts(rts_attributes(v, peer, self.access, 77, 14))
        sge = v.wr.SGE(self.mr.buf + 8, 8, self.mr.lkey)
        self.wr = v.wr.SendWR(
            1, num_sge=1, sg=[sge], opcode=e.IBV_WR_ATOMIC_FETCH_AND_ADD, send_flags=e.IBV_SEND_SIGNALED
        )
        self.wr.set_wr_atomic(peer["rkey"], peer["address"], 1, 0)

    def _run(self) -> None:
        while not self.stopping and self.broken is None and self.app.role == 0:
            self._step()
            time.sleep(0.005)

    def _step(self) -> None:
        _, wcs = self.cq.poll(4)
        for wc in wcs:
            self.outstanding = False
            if wc.status:
                self.broken = wc_status_name(self.app.verbs, wc.status)
                return
            fetched = int.from_bytes(self.mr.read(8, 8), "little")
            if fetched != self.done:
                self.faults.append(f"counter: fetched {fetched} after {self.done} additions")
            self.done += 1
        if self.sending and not self.outstanding:
            try:
                self.qp.post_send(self.wr)
            except self.app.verbs.error.PyverbsRDMAError as error:
                self.broken = f"post_send: {error}"
                return
            self.outstanding = True

    def status(self) -> dict[str, Any]:
        """done: additions that succeeded; value: of this host's own number."""
        value = int.from_bytes(self.mr.read(8, 0), "little")
        return {"done": self.done, "value": value, "outstanding": self.outstanding, "broken": self.broken}

    def close(self) -> None:
        """Destroy the verbs objects."""
        for thing in (self.qp, self.cq, self.mr):
            thing.close()


class Application:
    """All groups of this host. shapes: keyword arguments of Shape, one for each group; demo: kinds of demo traffic."""

    def __init__(self, role: int, seed: int, shapes: list[dict[str, Any]], demo: list[str]) -> None:
        self.verbs = Verbs("shiftverbs")
        self.role, self.seed = role, seed
        self.pattern = Pattern(seed, 40, SIZE)
        self.context = self.verbs.device.Context(name="soft0")
        self.pd = self.verbs.pd.PD(self.context)
        self.groups: list[Group] = []
        first = 0
        for spec in shapes:
            shape = Shape(**{**spec, "ops": tuple(spec["ops"])})
            self.groups.append(Group(self, shape, first))
            first += shape.lanes
        self.lanes = [lane for group in self.groups for lane in group.lanes]
        self.relics: list[Lane] = []  # closed, but for their memory
        self.demos = [Demo(self, kind) for kind in demo]
        self.counter = Counter(self)
        self.workers: list[Any] = [*self.groups, *self.demos, self.counter]

    def signaling(self) -> list[int]:
        """The lanes whose program knows when its work is done."""
        return [lane.number for lane in self.lanes if lane.shape.signal_every]

    def names(self) -> list[Any]:
        """What the peer must know: of the lanes, of the demo's traffic."""
        return [
            [lane.name() for lane in self.lanes],
            [demo.traffic.endpoint.peer().to_json() for demo in self.demos],
            self.counter.name(),
        ]

    def connect(self, names: list[Any]) -> None:
        """Connect all lanes; start the threads."""
        for lane, name in zip(self.lanes, names[0], strict=True):
            lane.connect(name)
        for demo, name in zip(self.demos, names[1], strict=True):
            demo.traffic.start(Peer(**name))
        self.counter.connect(names[2])
        for worker in self.workers:
            worker.thread.start()

    def send(self, on: bool) -> None:
        """Send messages from now on, or no new ones."""
        for worker in self.workers:
            worker.sending = on
        for group in self.groups if on else ():
            with group.lock:
                group.pump()  # a blocked thread waits for what this causes

    def _group(self, lane: int) -> Group:
        return next(g for g in self.groups if self.lanes[lane] in g.lanes)

    def batch(self, lane: int, count: int) -> int:
        """Post count messages on one lane at once, as far as there is room; returns how many were."""
        with self._group(lane).lock:
            return self.lanes[lane].pump(count)

    # -- lives of lanes

    def leave(self, lanes: list[int]) -> None:
        """These lives are about to end."""
        for number in lanes:
            self.lanes[number].leaving = True

    def end(self, lanes: list[int], how: str, most: int) -> list[list[int]]:
        """End these lives with up to `most` messages more on their way: "reset", "fail" (ERR, drain, RESET), "close" or
        "close_mr" (which of QP and MR goes first). Their records; those of closed ones are not whole."""
        if how in ("close", "close_mr"):
            for number in lanes:
                old, new = self._group(number).replace(self.lanes[number], how == "close_mr", most)
                self.lanes[number] = new
                self.relics.append(old)
            return [lane.record() for lane in self.relics[-len(lanes) :]]
        if how == "reset":
            return [self._group(number).reset(self.lanes[number], most) for number in lanes]
        for number in lanes:
            self._group(number).fail(self.lanes[number], most)
        deadline = time.monotonic() + JOIN_S
        return [self._group(number).drain(self.lanes[number], deadline) for number in lanes]

    def names_of(self, lanes: list[int], later: int = 0) -> list[Any]:
        """What the peer must know of some lanes; later: of so many lives after this one."""
        return [self.lanes[number].name(later) for number in lanes]

    def connect_again(self, lanes: list[int], names: list[Any]) -> None:
        """Begin to receive in a new life."""
        for number, name in zip(lanes, names, strict=True):
            lane = self.lanes[number]
            with self._group(number).lock:
                lane.check_memory()
                lane.leaving = False
                lane.connect(name)

    def rest(self, lanes: list[int], on: bool) -> None:
        """Send nothing new on these lanes, but one message whose WC is the last; or send again."""
        for number in lanes:
            lane = self.lanes[number]
            with self._group(number).lock:
                lane.last = on
                lane.awake = True
                lane.pump(1)

    def resting(self, lanes: list[int]) -> bool:
        """Whether these lanes have said their last message, and it and all before it are done."""
        return not any(self.lanes[n].awake or self.lanes[n].owed for n in lanes)

    def check_relics(self) -> list[str]:
        """Nobody has written into memory that was closed. Faults."""
        for lane in self.relics:
            lane.check_memory()
        faults = [fault for lane in self.relics for fault in lane.all_faults()]
        self.relics.clear()
        return faults

    def modify(self, lanes: list[int], mask: str, **attributes: int) -> None:
        """Verb ibv_modify_qp on these lanes."""
        for number in lanes:
            with self._group(number).lock:
                self.lanes[number].modify(mask, **attributes)

    def try_right(self, lane: int, write: bool) -> None:
        """Have one lane use what its peer may have withdrawn; `tried` tells the outcome."""
        with self._group(lane).lock:
            self.lanes[lane].try_right(write)

    def tried(self, lane: int) -> list[Any]:
        """[how the WR ended or None, whether what it was to bring is here, whether what one wrote is here]."""
        made = self.lanes[lane]
        brought = made.mr.read(5, made.reading) == bytes([OURS]) * 5
        return [made.tried_with, brought, made.mr.read(5, made.tried) == b"tried"]

    def untry(self, lane: int) -> None:
        """Put back what try_right is to find, or to change."""
        made = self.lanes[lane]
        made.mr.write(bytes([OURS]) * SIZE, SIZE, made.tried)

    def status(self) -> dict[str, Any]:
        """Everything the campaign looks at."""
        return {
            "lanes": [lane.status() for lane in self.lanes],
            "demos": [demo.status() for demo in self.demos],
            "counter": self.counter.status(),
            "faults": [*self.counter.faults, *(fault for lane in self.lanes for fault in lane.all_faults())],
            "trouble": [group.trouble for group in self.groups if group.trouble],
        }

    def why(self) -> list[str]:
        """In words: which QPs are not protected or not at home, and why."""
        qps = [(str(lane.number), lane.qp) for lane in self.lanes]
        qps += [(demo.kind, demo.traffic.endpoint.qp) for demo in self.demos]
        return [
            f"{name}: {qp.shift} recv {qp.shift.recv_state} on {qp.shift.recv_path}, preferred {qp.shift.preferred} "
            f"{qp.shift.counters}"
            for name, qp in qps
            if (qp.shift.status, qp.shift.state, qp.shift.recv_state) != ("PROTECTED", "DEFAULT", "DEFAULT")
        ]

    def migrate(self, lanes: list[int], pair: int) -> None:
        """Prefer a pair on some lanes; 0: go home."""
        for number in lanes:
            self.lanes[number].qp.shift.migrate(pair)

    def keys_known(self) -> bool:
        """Whether the peer's memory key has a counterpart on every backup, on all lanes that use any."""
        for lane in self.lanes:
            if set(lane.shape.ops) <= {"send", "send_imm"}:
                continue
            if lane.qp.shift.pairing is None:
                return False
            for k in range(1, lane.qp.shift.pairing["pairs"]):
                try:
                    lane.qp._shadow.core.remote_keys.get_remote(lane.peer["rkey"], k)
                except KeyError:
                    return False
        return True

    def preferred(self, lanes: list[int]) -> list[int]:
        """Where some lanes are to be, as far as this host knows."""
        return [self.lanes[number].qp.shift.preferred for number in lanes]

    def audit(self) -> list[str]:
        """At rest: look at memory; all faults so far."""
        for lane in self.lanes:
            if lane.broken is None:
                lane.audit()
        return [fault for lane in self.lanes for fault in lane.all_faults()]

    def farewell(self) -> None:
        """The threads end with their next turn; what wakes the peer's blocked ones is a last message on each lane."""
        for worker in self.workers:
            worker.stopping = True

    def wake_peer(self) -> None:
        """The last message, once the threads of both hosts are told."""
        for group in self.groups:
            if group.shape.mode == "blocked":
                with group.lock:
                    for lane in group.lanes:
                        lane.pump(1)

    def join(self) -> list[str]:
        """Wait for the threads; the names of those that do not end."""
        deadline = time.monotonic() + JOIN_S
        for worker in self.workers:
            worker.thread.join(max(0.0, deadline - time.monotonic()))
        return [worker.thread.name for worker in self.workers if worker.thread.is_alive()]

    def close(self) -> None:
        """Destroy everything."""
        for demo in self.demos:
            demo.traffic.close()
        self.counter.close()
        for group in self.groups:
            group.close()
        self.pd.close()
        self.context.close()


_libc = ctypes.CDLL(None)


def usage() -> dict[str, Any]:
    """What this process holds: descriptors, threads (by name) and resident memory in KiB."""
    gc.collect()
    _libc.malloc_trim(0)
    threads = []
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/comm") as comm:
                threads.append(comm.read().strip())
        except OSError:
            pass  # it ended meanwhile
    descriptors = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            descriptors.append(os.readlink(f"/proc/self/fd/{fd}").rstrip("0123456789[]"))
        except OSError:
            pass
    with open("/proc/self/statm") as statm:
        rss_kib = int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024
    return {"fds": sorted(descriptors), "threads": sorted(threads), "rss_kib": rss_kib}
