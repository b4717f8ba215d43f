# SPDX-License-Identifier: BSD-3-Clause
"""NICs and links in virtual time: RC as the InfiniBand specification has it, one packet per message, and datagrams.

What is modelled (IBA vol. 1, chapter 9): PSNs and the duplicate region, cumulative acknowledgements, responses of READs
and atomics (an acknowledgement does not stand for a lost response), NAK for a sequence error and for a key or right
that is not there, RNR NAK, retry counters and timers, the FENCE flag, flush in order, the error state, RESET, memory
keys. Packets stay in flight after their sender gave up, and reach whatever life of the QP is there then. Buffers are
read when a packet is built, as zero-copy hardware does; keys are looked at then, and when a packet arrives.

The application, or failover, has the C objects of provider.c in hand; what it posts there is given to `HwQp.post`.
"""

from __future__ import annotations

import errno
import itertools
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from simulator.clock import MS, US, Clock
from simulator.provider import RECV, Shared, library

from shiftverbs.native.ibv import AccessFlag, AtomicCap, EventType, QpState, WcStatus

if TYPE_CHECKING:
    from simulator.memory import Memory

MASK = 0xFFFFFF
HALF = 1 << 23
WINDOW = 32  # requests in flight

OPCODES = {0: "WRITE", 1: "WRITE_IMM", 2: "SEND", 3: "SEND_IMM", 4: "READ", 5: "CAS", 6: "FADD"}
WC_OPCODES = {"WRITE": 1, "WRITE_IMM": 1, "SEND": 0, "SEND_IMM": 0, "READ": 2, "CAS": 3, "FADD": 4}
TWO_SIDED = frozenset({"SEND", "SEND_IMM", "WRITE_IMM"})
ATOMICS = frozenset({"CAS", "FADD"})
RESPONDED = frozenset({"READ"}) | ATOMICS
RIGHTS = {
    "WRITE": AccessFlag.REMOTE_WRITE,
    "WRITE_IMM": AccessFlag.REMOTE_WRITE,
    "READ": AccessFlag.REMOTE_READ,
    "CAS": AccessFlag.REMOTE_ATOMIC,
    "FADD": AccessFlag.REMOTE_ATOMIC,
}
SEND_FENCE, SEND_SIGNALED, SEND_INLINE = 1, 2, 8
RESET, INIT, RTR, RTS, SQD, SQE, ERR = QpState
OK, FLUSHED = int(WcStatus.SUCCESS), int(WcStatus.WR_FLUSH_ERR)
NAKS = {"access": WcStatus.REM_ACCESS_ERR, "invalid": WcStatus.REM_INV_REQ_ERR, "op": WcStatus.REM_OP_ERR}
WC_RECV, WC_RECV_RDMA = 128, 129
WITH_IMM = 2

_numbers = itertools.count(1)


class Link:
    """What one NIC sends, on its rail. up: whether packets leave; the rest says what happens to those that do."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.up = True
        self.loss = 0.0
        self.datagram_loss = 0.0
        self.duplicate = 0.0
        self.delay_ns = 10 * US
        self.jitter_ns = 0
        self.packet_ns = 0  # how long a packet keeps it busy: others wait behind it
        self._free_ns = 0
        self.echo_ns = 0  # some packets come a second time, up to this much later
        self.drops: list[Callable[[Any], bool]] = []  # one packet each: the first that matches is dropped
        self.hole: Callable[[Any], bool] = lambda packet: False  # these never get through

    def send(self, packet: Packet | Datagram, to: Nic) -> None:
        """Carry a packet, or lose it."""
        if not (self.up and to.port_active) or self.hole(packet):
            return
        rng = self.clock.rng
        for drop in self.drops:
            if drop(packet):
                self.drops.remove(drop)
                return
        if self.loss and rng.random() < self.loss:
            return
        if self.datagram_loss and isinstance(packet, Datagram) and rng.random() < self.datagram_loss:
            return
        copies = 2 if self.duplicate and rng.random() < self.duplicate else 1
        takes_ns = self.delay_ns + self._queue()
        for _ in range(copies):
            jitter = rng.randrange(self.jitter_ns) if self.jitter_ns else 0
            self.clock.later(takes_ns + jitter, self._arrive, packet, to)
        if self.echo_ns and rng.random() < 0.3:
            self.clock.later(takes_ns + rng.randrange(self.echo_ns), self._arrive, packet, to)

    def _queue(self) -> int:
        """How long a packet takes to leave, behind those that wait for that."""
        if not self.packet_ns:
            return 0
        self._free_ns = max(self._free_ns, self.clock.now) + self.packet_ns
        return self._free_ns - self.clock.now

    def _arrive(self, packet: Packet | Datagram, to: Nic) -> None:
        # What was on the wire when the cable was pulled is gone; what waits in a switch comes out later.
        if self.up and to.port_active and not (to.dead or to.stalled):
            if isinstance(packet, Datagram):
                to.arrive_datagram(packet)
            else:
                to.arrive(packet)


class Packet:
    """A request or an answer. data: a request's payload or a response's; ref: for judging only, not looked at here."""

    __slots__ = (
        "data",
        "dest",
        "imm",
        "kind",
        "length",
        "opcode",
        "pkey",
        "psn",
        "reads",
        "ref",
        "remote",
        "rkey",
        "swap",
    )

    def __init__(self, kind: str, dest: int, psn: int, opcode: str = "", data: int = 0, ref: int = 0) -> None:
        self.kind = kind
        self.dest = dest
        self.psn = psn
        self.opcode = opcode
        self.data = data
        self.ref = ref
        self.remote = self.rkey = self.length = self.imm = self.pkey = self.reads = self.swap = 0


class Datagram:
    """What a UD QP sent to another."""

    __slots__ = ("data", "qkey", "qpn", "source_gid", "source_qpn")

    def __init__(self, data: bytes, qpn: int, qkey: int, source_qpn: int, source_gid: bytes) -> None:
        self.data = data
        self.qpn = qpn
        self.qkey = qkey
        self.source_qpn = source_qpn
        self.source_gid = source_gid


class Wqe:
    """A send WR at the hardware."""

    __slots__ = (
        "addr", "data", "fence", "inline", "length", "lkey", "opcode", "psn", "ref", "remote", "rkey", "signaled",
        "swap", "wr_id",
    )  # fmt: skip

    def __init__(self, post: tuple[int, ...]) -> None:
        self.wr_id, self.remote, self.addr, self.data, self.swap, inline = post[:6]
        flags, self.ref, self.rkey, self.length, self.lkey = post[8:13]
        self.opcode = OPCODES[post[7]]
        self.signaled = bool(flags & SEND_SIGNALED)
        self.fence = bool(flags & SEND_FENCE)
        self.inline = inline if flags & SEND_INLINE else None
        self.psn = 0


class Region:
    """A memory region on one NIC."""

    def __init__(self, key: int, addr: int, length: int, iova: int, access: int) -> None:
        self.key = key
        self.addr, self.length, self.iova, self.access = addr, length, iova, access


class Rail:
    """The switch between NICs. nics: by the GIDs that they have; ever: by those that they have had, too."""

    def __init__(self) -> None:
        self.nics: dict[bytes, Nic] = {}
        self.ever: dict[bytes, Nic] = {}


class Nic:
    """One NIC: its links, its QPs, its keys, and how it fails.

    Keys are given out again at once, the last one first, and all NICs begin with the same few: a key that is not
    translated, or that was withdrawn, is soon other memory's.

    number: its host's.
    """

    def __init__(
        self, clock: Clock, host: str, number: int, k: int, out: Link, memory: Memory, rail: Rail
    ) -> None:
        self.clock = clock
        self.host = host
        self.k = k
        self.name = f"{host}{k}"
        self.out = out
        self.memory = memory
        self.rail = rail
        self._gid = b""
        self.gid = bytes(10) + b"\xff\xff" + bytes((10, k, *number.to_bytes(2, "big")))
        self.qps: dict[int, HwQp] = {}
        self.ports: dict[int, Any] = {}  # control ports, by QPN
        self.regions: dict[int, Region] = {}
        self._free_keys = list(range(40 + 7 * k, 8, -1))
        self._next_key = 1000 * (k + 1)
        self._next_qpn = 0x100
        self.atomic_cap = AtomicCap.GLOB
        self.pkeys: list[int] = []  # the table of an InfiniBand port; on Ethernet there is none
        self.pkey_index = 0  # the program's choice
        self.counts_reads = False  # whether READs and atomics at a time are limited, as QPs were told
        self.events: list[tuple[int, int]] = []  # async ones, as every context of it gets them
        self.on_event: Callable[[int, int], None] = lambda kind, element: None
        self.port_active = True
        self.dead = False
        self.stalled = False  # nothing moves, and nobody says so
        self.holds_cqes = False  # acknowledges, and has not written the completion yet
        self.hung = False  # commands do not come back
        self.mute = False  # questions for its ports do not come back
        self.failing = False  # commands come back with an error
        self.refusing = 0  # so many QP transitions come back with an error
        self.command_ns = 30 * US
        self.registering_ns = self.making_ns = 50 * US
        self.waiting: list[Callable[[], None]] = []

    @property
    def gid(self) -> bytes:
        """Its address."""
        return self._gid

    @gid.setter
    def gid(self, gid: bytes) -> None:
        self.rail.nics.pop(self._gid, None)
        self.rail.nics[gid] = self.rail.ever[gid] = self
        self._gid = gid

    def reach(self, gid: bytes) -> Nic | None:
        """Who has that address on its rail; None: nobody else."""
        to = self.rail.nics.get(gid)
        return to if to is not self else None

    def new_key(self) -> int:
        """A key that no memory has now."""
        if self._free_keys:
            return self._free_keys.pop()
        self._next_key += 1
        return self._next_key

    def register(self, addr: int, length: int, iova: int, access: int) -> Region:
        """A region by a key of its own, which is its lkey and its rkey."""
        region = Region(self.new_key(), addr, length, iova, access)
        self.regions[region.key] = region
        return region

    def deregister(self, region: Region) -> None:
        """Its key may be the next one's."""
        del self.regions[region.key]
        self._free_keys.append(region.key)

    def new_qpn(self) -> int:
        """The number of a new QP. As on hardware, all NICs count alike."""
        self._next_qpn += 1
        return self._next_qpn

    def local(self, addr: int, length: int, lkey: int, write: bool) -> bool:
        """Whether a WR may name this memory so."""
        region = self.regions.get(lkey)
        return (
            region is not None
            and region.addr <= addr
            and addr + length <= region.addr + region.length
            and not (write and not region.access & AccessFlag.LOCAL_WRITE)
        )

    def remote(self, offset: int, length: int, rkey: int, right: int) -> int | None:
        """The address that a request means; None where it has no right to that."""
        region = self.regions.get(rkey)
        if region is None or not region.access & right:
            return None
        at = offset - region.iova
        return region.addr + at if 0 <= at and at + length <= region.length else None

    def unhang(self) -> None:
        """Carry out what waited."""
        self.hung = self.mute = False
        waiting, self.waiting = self.waiting, []
        for go_on in waiting:
            go_on()

    def die(self) -> None:
        """DEVICE_FATAL: completions not written yet never will be."""
        self.dead = True
        for qp in self.qps.values():
            qp.shared.refusal[:] = (errno.EIO, errno.EIO)
        self.unhang()

    def event(self, kind: EventType, element: int) -> None:
        """An async event, for each context that this device was opened by."""
        self.on_event(int(kind), element)

    def arrive(self, packet: Packet) -> None:
        """A packet for one of our QPs."""
        qp = self.qps.get(packet.dest)
        if qp is None or self.dead:
            return
        if packet.kind == "req":
            qp.on_request(packet)
        else:
            qp.on_answer(packet)

    def arrive_datagram(self, datagram: Datagram) -> None:
        """A datagram for one of our control ports."""
        port = self.ports.get(datagram.qpn)
        if port is not None and port.qkey == datagram.qkey and not (self.dead or self.stalled):
            port.arrive(datagram)


class HwCq:
    """A CQ: where the provider has it, and how it was used."""

    def __init__(self, ctx: int, cqe: int) -> None:
        self.lib = library()
        self.cqe = cqe
        self.pointer = self.lib.sv_cq(ctx, cqe)
        self.most = 0  # that ever waited in it
        self.overrun = False
        self.on_cqe: Callable[[], None] = lambda: None

    def push(
        self, wr_id: int, status: int, opcode: int, qp_num: int, byte_len: int = 0, imm: int = 0
    ) -> None:
        """A completion."""
        waiting = self.lib.sv_push(
            self.pointer, wr_id, status, opcode, qp_num, byte_len, imm, WITH_IMM if imm else 0
        )
        if waiting > self.most:
            self.most = waiting
            self.overrun |= waiting > self.cqe
        self.on_cqe()

    def hide(self, polls: int) -> None:
        """The newest completion shows itself after so many more polls."""
        self.lib.sv_hide(self.pointer, polls)

    def free(self) -> None:
        """Give its memory back."""
        self.lib.sv_free_cq(self.pointer)


class HwQp:
    """One RC QP of one NIC."""

    RETRY_NS = 4 * MS
    RETRIES = 3
    RNR_NS = 300 * US

    def __init__(
        self, nic: Nic, ctx: int, index: int, send_cq: HwCq, recv_cq: HwCq, depth: tuple[int, int]
    ) -> None:
        self.nic = nic
        self.clock = nic.clock
        self.memory = nic.memory
        self.number = nic.new_qpn()
        self.send_cq, self.recv_cq = send_cq, recv_cq
        self.pointer = library().sv_qp(ctx, send_cq.pointer, recv_cq.pointer, self.number, index, *depth)
        self.shared = Shared.from_address(library().sv_shared(self.pointer))
        self.life = 0
        self.rights = 0
        self.app = False  # the application's own one
        self.log: Callable[..., None] = lambda *facts: None
        self.on_rnr: Callable[[HwQp], None] = lambda qp: None
        self.held: list[tuple[HwCq, tuple[Any, ...], int]] = []
        self.completed: list[int] = []  # for judging only
        nic.qps[self.number] = self
        self.state = RESET
        self.reset()
        if nic.dead:
            self.shared.refusal[:] = (errno.EIO, errno.EIO)

    # ---- transitions

    def reset(self) -> None:
        """RESET: queues empty, no state of the connection left."""
        self.state = RESET
        self.life += 1
        self.unsent: deque[Wqe] = deque()
        self.unacked: deque[Wqe] = deque()
        self.given_up: tuple[Wqe, ...] = ()  # of these, when it broke; for judging only
        self.rq: deque[tuple[int, int, int]] = deque()  # wr_id, address, lkey
        self.next_psn = 0
        self.expected = 0
        self.dest = 0
        self.dgid = b""
        self.atomics: dict[int, int] = {}
        self.retries = 0
        self.timer = 0
        self.rnr_wait = False
        self.drained = False
        self.pkey = self.most_served = self.most_reads = 0
        self.nak_sent = False  # one NAK per gap: what follows is dropped without a word
        shared = self.shared
        shared.freed[:] = shared.posted[:]
        if not self.nic.dead:
            shared.refusal[:] = (errno.EINVAL, errno.EINVAL)

    def modify(self, attrs: dict[str, Any]) -> int:
        """ibv_modify_qp: 0 or an errno."""
        nic = self.nic
        if nic.dead:
            return errno.EIO
        state = attrs.get("state")
        if state in (SQD, RTS) and self.state == RTS:  # in SQD it is as in RTS, but begins nothing
            self.drained = state == SQD
            self._kick()
        elif state is None:
            if self.state != RTS:
                return errno.EINVAL
        elif state == RESET:
            held, self.held = self.held, []
            for cq, cqe, _ in held:
                cq.push(*cqe)  # they are written when the command is done
            self.reset()
        elif state == ERR:
            self.to_error()
            self.state = ERR
            self.shared.refusal[:] = (0, 0)
        elif (self.state, state) == (RESET, INIT):
            self.state = INIT
            self.shared.refusal[1] = 0
            self.pkey = nic.pkeys[attrs["pkey_index"]] if nic.pkeys else 0
        elif (self.state, state) == (INIT, RTR):
            self.expected = attrs["rq_psn"]
            self.most_served = attrs.get("max_dest_rd_atomic", 0)
            self.dest = attrs["dest_qp_num"]
            self.dgid = bytes(attrs["ah_attr"]["dgid"])
            self.state = RTR
        elif (self.state, state) == (RTR, RTS):
            self.next_psn = attrs["sq_psn"]
            self.most_reads = attrs.get("max_rd_atomic", 0)
            self.state = RTS
            self.shared.refusal[0] = 0
        else:
            return errno.EINVAL
        if "qp_access_flags" in attrs:
            self.rights = attrs["qp_access_flags"]
        return 0

    def to_error(
        self, first_status: int = FLUSHED, receives: int = FLUSHED, receives_first: bool = False
    ) -> None:
        """The error state: everything is flushed in order, the first of each queue with first_status and receives."""
        if self.state in (ERR, RESET):
            return
        self.state = ERR
        if not self.nic.dead:
            self.shared.refusal[:] = (0, 0)
        self.timer += 1
        if receives_first:
            self._flush_receives(receives)
        status = first_status
        for wqe in (*self.unacked, *self.unsent):
            self._end(wqe, status)
            status = FLUSHED
        self.given_up = tuple(self.unacked)
        self.unacked.clear()
        self.unsent.clear()
        self._flush_receives(receives)

    def _flush_receives(self, status: int) -> None:
        for wr_id, _, _ in self.rq:
            self._end_recv(wr_id, status)
            status = FLUSHED
        self.rq.clear()

    # ---- posts

    def post(self, post: tuple[int, ...]) -> None:
        """What the provider has taken."""
        if post[7] == RECV:
            if self.state == ERR:
                self._end_recv(post[0], FLUSHED)
            else:
                self.rq.append((post[0], post[2], post[12]))
            return
        wqe = Wqe(post)
        if self.state == ERR:
            self._end(wqe, FLUSHED)
            return
        self.unsent.append(wqe)
        self._kick()

    def _cqe(self, cq: HwCq, cqe: tuple[Any, ...], recv_addr: int = 0) -> None:
        nic = self.nic
        if nic.dead:
            return
        if nic.holds_cqes or nic.stalled:
            self.held.append((cq, cqe, recv_addr))
        else:
            cq.push(*cqe)

    def _end(self, wqe: Wqe, status: int) -> None:
        self.shared.freed[0] += 1
        if status == OK:
            self.completed.append(wqe.ref)
        if wqe.signaled or status != OK:
            self._cqe(self.send_cq, (wqe.wr_id, status, WC_OPCODES[wqe.opcode], self.number))

    def _end_recv(self, wr_id: int, status: int, opcode: int = WC_RECV, imm: int = 0, addr: int = 0) -> None:
        self.shared.freed[1] += 1
        self._cqe(self.recv_cq, (wr_id, status, opcode, self.number, 8, imm), addr)

    def release(self) -> None:
        """Write the completions that were held back."""
        held, self.held = self.held, []
        for cq, cqe, addr in held:
            self._cqe(cq, cqe, addr)

    # ---- requester

    def _kick(self) -> None:
        unsent, unacked = self.unsent, self.unacked
        started = False
        if self.drained:
            return
        while unsent and len(unacked) < WINDOW and not self.rnr_wait:
            wqe = unsent[0]
            if wqe.fence and any(other.opcode in RESPONDED for other in unacked):
                break
            if wqe.length and wqe.inline is None:
                write = wqe.opcode in RESPONDED
                if not self.nic.local(wqe.addr, wqe.length, wqe.lkey, write):
                    if not unacked:
                        self._local_error()
                    break
            if self.nic.counts_reads and wqe.opcode in RESPONDED and self._reads() >= self.most_reads:
                break
            unsent.popleft()
            wqe.psn = self.next_psn
            self.next_psn = (self.next_psn + 1) & MASK
            unacked.append(wqe)
            self._transmit(wqe)
            started = True
        if started and not self.timer_running:
            self._start_timer()

    def _reads(self) -> int:
        """How many READs and atomics are on their way."""
        return sum(1 for wqe in self.unacked if wqe.opcode in RESPONDED)

    def _local_error(self) -> None:
        self.to_error(int(WcStatus.LOC_PROT_ERR))

    @property
    def timer_running(self) -> bool:
        return self.timer % 2 == 1

    def _transmit(self, wqe: Wqe) -> None:
        nic = self.nic
        to = nic.reach(self.dgid)
        if nic.dead or nic.stalled or to is None:
            return
        packet = Packet("req", self.dest, wqe.psn, wqe.opcode, 0, wqe.ref)
        packet.pkey, packet.reads = self.pkey, self._reads()
        packet.length = wqe.length
        packet.remote, packet.rkey = wqe.remote, wqe.rkey
        packet.imm = wqe.ref if wqe.opcode in ("WRITE_IMM", "SEND_IMM") else 0
        if wqe.opcode in ATOMICS:
            packet.data, packet.swap = wqe.data, wqe.swap
        elif wqe.opcode != "READ" and wqe.length:
            if wqe.inline is not None:
                packet.data = wqe.inline
            else:
                packet.data = self.memory.read(wqe.addr)
                self.log(self, "sending", wqe.ref, wqe.addr, None)
        nic.out.send(packet, to)

    def _start_timer(self) -> None:
        self.timer += 1 if self.timer % 2 == 0 else 2
        self.clock.later(self.RETRY_NS, self._expire, self.timer, self.life)

    def _expire(self, timer: int, life: int) -> None:
        if timer != self.timer or life != self.life or self.state != RTS or self.nic.dead:
            return
        if self.nic.stalled:
            self._start_timer()
            return
        self._retry()

    def _retry(self) -> None:
        self.retries += 1
        if self.retries > self.RETRIES:
            self.to_error(int(WcStatus.RETRY_EXC_ERR))
            return
        if self._send_again():
            self._start_timer()

    def _send_again(self) -> bool:
        """Send what is not answered once more, with the memory that it has now. False: the first of it has none."""
        for wqe in list(self.unacked):
            if wqe.inline is None and wqe.length:
                if not self.nic.local(wqe.addr, wqe.length, wqe.lkey, wqe.opcode in RESPONDED):
                    if wqe is self.unacked[0]:
                        self._local_error()
                        return False
                    break
            self._transmit(wqe)
        return True

    def on_answer(self, packet: Packet) -> None:
        """An ACK, a NAK or a response arrived."""
        if self.state != RTS or self.nic.dead or not self.unacked:
            return
        unacked = self.unacked
        at = (packet.psn - unacked[0].psn) & MASK
        kind = packet.kind
        if kind in ("nak", "rnr") or kind in NAKS:
            # Everything before the PSN named is acknowledged, except for responses that did not come.
            if at > len(unacked) or (kind in NAKS and at == len(unacked)):
                return
            if not self._complete_until(at):
                return
            if kind in NAKS:
                self.to_error(int(NAKS[kind]))
            elif kind == "rnr":
                if not self.rnr_wait:
                    self.rnr_wait = True
                    self.timer += 2 if self.timer % 2 == 0 else 1
                    self.clock.later(self.RNR_NS, self._after_rnr, self.life)
            else:
                self._retry()
            return
        if at >= len(unacked):
            return
        wqe = unacked[at]
        if kind == "ack" and wqe.opcode in RESPONDED:
            return  # a ghost: such a request is answered by a response
        if kind == "resp" and wqe.opcode not in RESPONDED:
            return
        if not self._complete_until(at):
            return
        if kind == "resp":
            if not self.nic.local(wqe.addr, wqe.length, wqe.lkey, True):
                self._local_error()
                return
            self.memory.write(wqe.addr, packet.data)
            self.log(self, "response", wqe.ref, wqe.addr, packet.data)
        self._complete_until(1) if kind == "ack" else self._finish()
        self._progress()

    def _complete_until(self, n: int) -> bool:
        """Complete the n oldest requests. False: a response is missing among them, and is asked for again."""
        for _ in range(n):
            if self.unacked[0].opcode in RESPONDED:
                self._retry()
                return False
            self._finish()
        if n:
            self._progress()
        return True

    def _finish(self) -> None:
        self.retries = 0
        self._end(self.unacked.popleft(), OK)

    def _progress(self) -> None:
        if self.unacked and not self.rnr_wait:
            self._start_timer()
        elif not self.unacked and self.timer_running:
            self.timer += 1
        self._kick()

    def _after_rnr(self, life: int) -> None:
        if life != self.life or self.state != RTS:
            return
        self.rnr_wait = False
        if not self._send_again():
            return
        if self.unacked:
            self._start_timer()
        self._kick()

    # ---- responder

    def on_request(self, packet: Packet) -> None:
        """A request arrived."""
        if self.state not in (RTR, RTS) or self.nic.dead or self.nic.stalled or packet.pkey != self.pkey:
            return
        ahead = (packet.psn - self.expected) & MASK
        if ahead == 0:
            self._execute(packet)
        elif ahead >= HALF:
            self._duplicate(packet)
        elif ahead < 1 << 16 and not self.nak_sent:
            self.nak_sent = True
            self._answer("nak", self.expected)

    def _execute(self, packet: Packet) -> None:
        opcode = packet.opcode
        nic = self.nic
        target: int | None = 0
        right = RIGHTS.get(opcode, 0)
        if nic.counts_reads and opcode in RESPONDED and packet.reads > self.most_served:
            self._refuse("invalid", packet)
            return
        if right:
            if not self.rights & right:
                self._refuse("invalid" if not packet.length else "access", packet)
                return
            if packet.length:
                target = nic.remote(packet.remote, packet.length, packet.rkey, right)
                if target is None:
                    self._refuse("access", packet)
                    return
        recv = None
        if opcode in TWO_SIDED:
            if not self.rq:
                self.on_rnr(self)
                self._answer("rnr", packet.psn)
                return
            recv = self.rq[0]
            if (
                opcode != "WRITE_IMM"
                and packet.length
                and not nic.local(recv[1], packet.length, recv[2], True)
            ):
                self.rq.popleft()
                self._end_recv(recv[0], int(WcStatus.LOC_PROT_ERR))
                self._refuse("op", packet)
                return
            self.rq.popleft()
        assert target is not None
        self.expected = (self.expected + 1) & MASK
        self.nak_sent = False
        memory, data = self.memory, packet.data
        answer, kind = 0, "ack"
        if opcode in ("WRITE", "WRITE_IMM"):
            if packet.length:
                memory.write(target, data)
        elif opcode == "READ":
            kind, answer = "resp", memory.read(target)
        elif opcode in ATOMICS:
            kind, answer = "resp", memory.read(target)
            if opcode == "FADD":
                memory.write(target, (answer + data) & (1 << 64) - 1)
            elif answer == data:
                memory.write(target, packet.swap)
            self.atomics[packet.psn] = answer
        elif recv is not None and packet.length:
            memory.write(recv[1], data)
        self.log(self, "executed", packet.ref, target, recv[1] if recv is not None else None)
        if recv is not None:
            self._end_recv(
                recv[0], OK, WC_RECV_RDMA if opcode == "WRITE_IMM" else WC_RECV, packet.imm, recv[1]
            )
        self._answer(kind, packet.psn, opcode, answer, packet.ref)

    def _refuse(self, why: str, packet: Packet) -> None:
        """A request that it must not carry out: the QP is in error here too (IBA 9.9.3)."""
        self._answer(why, packet.psn, ref=packet.ref)
        self.to_error()

    def _duplicate(self, packet: Packet) -> None:
        if packet.opcode == "READ":
            target = self.nic.remote(packet.remote, packet.length, packet.rkey, AccessFlag.REMOTE_READ)
            if target is None:
                self._refuse("access", packet)
            else:
                self.log(self, "again", packet.ref, target, None)
                self._answer("resp", packet.psn, "READ", self.memory.read(target), packet.ref)
        elif packet.opcode in ATOMICS:
            if packet.psn in self.atomics:
                self._answer("resp", packet.psn, packet.opcode, self.atomics[packet.psn], packet.ref)
        else:
            self._answer("ack", packet.psn, packet.opcode, ref=packet.ref)

    def _answer(self, kind: str, psn: int, opcode: str = "", data: int = 0, ref: int = 0) -> None:
        nic = self.nic
        to = nic.reach(self.dgid)
        if to is not None:
            nic.out.send(Packet(kind, self.dest, psn, opcode, data, ref), to)

    def free(self) -> None:
        """Give its memory back."""
        self.nic.qps.pop(self.number, None)
        library().sv_free(self.pointer)
