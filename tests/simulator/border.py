# SPDX-License-Identifier: BSD-3-Clause
"""What a simulated process stands on: Machine, raw verbs, NICs' threads, control ports, in virtual time.

The production code of failover and shadows gets these and nothing of the machine that the test runs on. What it asks
the standard library for by itself, world.py answers.
"""

from __future__ import annotations

import concurrent.futures
import errno
import itertools
import types
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from simulator.clock import US
from simulator.provider import library
from simulator.rnic import INIT, RESET, Datagram, HwCq, HwQp, Nic, Region

from shiftverbs import _core
from shiftverbs.exchanger import records
from shiftverbs.exchanger.interface import Connected, Exchanger, ExchangerEvent, Found, Rejected, Unavailable
from shiftverbs.native.ibv import GidType, LinkLayer, PortState
from shiftverbs.shadows.mr import ShadowMR

if TYPE_CHECKING:
    from simulator.host import Host
    from simulator.network import Network

    from shiftverbs import _nic
    from shiftverbs.shadows import raw_verbs

_handles = itertools.count(1 << 20)


class Steps:
    """`_nic.ModifySteps`: transitions of a QP, in order."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []

    def add(self, **attrs: Any) -> Steps:
        """One more."""
        self.steps.append(attrs)
        return self

    def __len__(self) -> int:
        return len(self.steps)


class AsyncEvent:
    """An async event of a context."""

    def __init__(self, kind: int, element: int) -> None:
        self.type, self.element = kind, element

    def ack(self) -> None:
        """Nobody waits for that."""


class Context:
    """A device that was opened."""

    def __init__(self, nic: Nic) -> None:
        self.nic = nic
        self.pointer = library().sv_context()
        self.events: deque[AsyncEvent] = deque()
        self.fd = next(_handles)


class Verbs:
    """`_nic` as one process has it: raw verbs on its NICs. QPs, CQs and contexts are provider.c's pointers."""

    ModifySteps = Steps

    def __init__(self, host: Host) -> None:
        self.host = host
        self.nics = {nic.name: nic for nic in host.hardware}
        self.contexts: dict[int, Context] = {}
        self.pds: dict[int, Context] = {}
        self.mrs: dict[int, tuple[Nic, Region]] = {}
        self.cqs: dict[int, HwCq] = {}
        self.qps: dict[int, HwQp] = {}
        for nic in host.hardware:
            nic.on_event = self._event(nic)

    def _event(self, nic: Nic) -> Callable[[int, int], None]:
        def event(kind: int, element: int) -> None:
            for context in self.contexts.values():
                if context.nic is nic:
                    context.events.append(AsyncEvent(kind, element))
            self.host.wake()

        return event

    # ---- devices

    def list_devices(self) -> list[str]:
        return list(self.nics)

    def open_device(self, name: str) -> int:
        context = Context(self.nics[name])
        self.contexts[context.pointer] = context
        return int(context.pointer)

    def query_device(self, ctx: int) -> dict[str, Any]:
        atomic_cap = self.contexts[ctx].nic.atomic_cap
        return {
            "phys_port_cnt": 1,
            "atomic_cap": atomic_cap,
            "num_comp_vectors": 1,
            "max_qp_init_rd_atom": 16,
        }

    def query_port(self, ctx: int, port: int) -> dict[str, int]:
        nic = self.contexts[ctx].nic
        self._alive(nic)
        state = PortState.ACTIVE if nic.port_active else PortState.DOWN
        return {
            "state": int(state),
            "active_mtu": 3,
            "lid": 0,
            "gid_tbl_len": 1,
            "pkey_tbl_len": len(nic.pkeys) or 1,
            "link_layer": int(LinkLayer.INFINIBAND if nic.pkeys else LinkLayer.ETHERNET),
        }

    def query_pkey(self, ctx: int, port: int, index: int) -> int:
        return self.contexts[ctx].nic.pkeys[index]

    def query_gid(self, ctx: int, port: int, index: int) -> bytes:
        return self.contexts[ctx].nic.gid

    def query_gid_type(self, ctx: int, port: int, index: int) -> int:
        return GidType.ROCE_V2

    def async_fd(self, ctx: int) -> int:
        return self.contexts[ctx].fd

    def get_async_event(self, ctx: int) -> AsyncEvent | None:
        events = self.contexts[ctx].events
        return events.popleft() if events else None

    # ---- objects

    def alloc_pd(self, ctx: int) -> int:
        handle = next(_handles)
        self.pds[handle] = self.contexts[ctx]
        return handle

    def dealloc_pd(self, pd: int) -> None:
        del self.pds[pd]

    def _alive(self, nic: Nic) -> None:
        if nic.dead:
            raise OSError(errno.EIO, "the device is gone")
        if nic.failing:
            raise OSError(errno.ENOMEM, "the device has no room")

    def reg_mr(self, pd: int, addr: int, length: int, iova: int, access: int) -> tuple[int, int, int]:
        nic = self.pds[pd].nic
        self._alive(nic)
        region = nic.register(addr, length, iova, access)
        handle = next(_handles)
        self.mrs[handle] = nic, region
        return handle, region.key, region.key

    def rereg_mr(self, mr: int, flags: int, pd: int, addr: int, length: int, access: int) -> tuple[int, int]:
        nic, region = self.mrs[mr]
        self._alive(nic)
        region.access = access
        return region.key, region.key

    def dereg_mr(self, mr: int) -> None:
        nic, region = self.mrs.pop(mr)
        nic.deregister(region)

    def create_cq(self, ctx: int, cqe: int, channel: int = 0, vector: int = 0) -> tuple[int, int]:
        self._alive(self.contexts[ctx].nic)
        cq = HwCq(ctx, cqe)
        cq.on_cqe = self.host.look
        self.cqs[cq.pointer] = cq
        self.host.net.objects.append(cq)
        return int(cq.pointer), cqe

    def resize_cq(self, cq: int, cqe: int) -> int:
        self.cqs[cq].cqe = cqe
        return cqe

    def destroy_cq(self, cq: int) -> None:
        self.cqs.pop(cq)

    def create_qp(
        self,
        pd: int,
        send_cq: int,
        recv_cq: int,
        caps: tuple[int, ...],
        sq_sig_all: int = 0,
        qp_type: int = 2,
    ) -> tuple[int, int, tuple[int, ...]]:
        context = self.pds[pd]
        self._alive(context.nic)
        net = self.host.net
        qp = HwQp(
            context.nic,
            context.pointer,
            len(net.qps),
            self.cqs[send_cq],
            self.cqs[recv_cq],
            (caps[0], caps[1]),
        )
        qp.log = net.note
        qp.on_rnr = net.refused
        net.qps.append(qp)
        net.objects.append(qp)
        self.qps[qp.pointer] = qp
        return int(qp.pointer), qp.number, tuple(caps)

    def destroy_qp(self, qp: int) -> None:
        hardware = self.qps.pop(qp)
        hardware.reset()
        hardware.nic.qps.pop(hardware.number, None)

    def query_qp_state(self, qp: int) -> int:
        found = self.qps[qp]
        if found.nic.dead:
            raise OSError(errno.EIO, "the device is gone")
        return int(found.state)

    def modify(self, qp: int, steps: Steps) -> tuple[int, int]:
        """Carry out transitions: (errno, how many were carried out)."""
        found = self.qps.get(qp)
        if found is None:
            return errno.EINVAL, 0
        nic = found.nic
        for done, attrs in enumerate(steps.steps):
            if nic.refusing > 0 and attrs.get("state") not in (RESET, INIT):
                nic.refusing -= 1
                return errno.ETIMEDOUT, done
            err = found.modify(attrs)
            if err:
                return err, done
        return 0, len(steps)

    def ControlPort(self, ctx: int, port: int, gid_index: int, depth: int) -> ControlPort:
        self._alive(self.contexts[ctx].nic)
        return ControlPort(self.host, self.contexts[ctx].nic)


class ControlPort:
    """`_nic.ControlPort`: a UD QP."""

    state = "ready"
    max_message = 4096

    def __init__(self, host: Host, nic: Nic) -> None:
        self.host, self.nic = host, nic
        self.qpn = nic.new_qpn()
        self.qkey = 0x1000 + self.qpn
        self.fd = next(_handles)
        self.more = False
        self._inbox: deque[tuple[bytes, int, bytes]] = deque()
        self._ahs: dict[int, bytes] = {}
        nic.ports[self.qpn] = self

    def rearm(self) -> None:
        """It is always armed."""

    def create_ah(self, **attrs: Any) -> int:
        handle = next(_handles)
        self._ahs[handle] = bytes(attrs["dgid"])
        return handle

    def destroy_ah(self, ah: int) -> None:
        self._ahs.pop(ah, None)

    def send(self, ah: int, qpn: int, qkey: int, message: bytes) -> bool:
        nic = self.nic
        to = nic.reach(self._ahs[ah]) if not (nic.dead or nic.stalled) else None
        if to is not None:
            datagram = Datagram(message, qpn, qkey, self.qpn, nic.gid)
            self.host.net.on_datagram(nic, to, datagram)
            nic.out.send(datagram, to)
        return True

    def arrive(self, datagram: Datagram) -> None:
        """Something for the process."""
        self._inbox.append((datagram.data, datagram.source_qpn, datagram.source_gid))
        self.host.wake()

    def recv(self, most: int) -> list[tuple[bytes, int, bytes]]:
        if self.nic.dead or not self._inbox:
            self.more = False
            return []
        found = [self._inbox.popleft() for _ in range(min(most, len(self._inbox)))]
        self.more = bool(self._inbox)
        if self.host.reading_ns:
            self.host.wait(lambda: False, len(found) * self.host.reading_ns / 1e9)
        return found


class Job(concurrent.futures.Future[Any]):
    """`_nic.Job`: it is waited for in virtual time."""

    def __init__(self, net: Network) -> None:
        super().__init__()
        self.net = net

    @property
    def failure(self) -> BaseException | None:
        return self.exception()

    def wait(self, timeout_s: float) -> bool:
        return self.done() or bool(self.net.wait(self.done, timeout_s))


MOST_PASSED = 32


def _lane_of(what: str, kind: Any) -> int:
    """Transitions and the ends of memory go before the ends of QPs, those before jobs and all other ends."""
    if what == "modify" or (what == "destroy" and kind == "MR"):
        return 0
    return 1 if what == "destroy" and kind == "QP" else 2


class Worker:
    """`_nic.NicWorker`: carries out what it is given one after the other, each in its time."""

    def __init__(self, host: Host, name: str) -> None:
        self.host = host
        self.clock = host.net.clock
        self.nic = host.nic(name)
        self.name = name
        self.busy_since_ns = 0
        # What, tag or job, object, steps; by lane, and within one in the order of its number.
        self._lanes: tuple[deque[tuple[int, tuple[str, Any, int, Any]]], ...] = (deque(), deque(), deque())
        self._came = 0
        self._passed = 0  # since the earliest of those in the lanes was
        self._busy: tuple[str, Any, int, Any] | None = None
        self._results: list[tuple[Any, int, int, int]] = []
        self._waits = False

    def submit(self, tag: Any, qp: int, steps: Steps) -> None:
        self._put(("modify", tag, qp, steps))

    def destroy(self, tag: Any, kind: str, pointer: int) -> None:
        self._put(("destroy", tag, pointer, kind))

    def post(self, fn: Callable[..., object], *args: Any) -> bool:
        self._put(("job", (fn, args, None), 0, None))
        return True

    def call(self, fn: Callable[..., object], *args: Any) -> Job:
        future = Job(self.host.net)
        self._put(("job", (fn, args, future), 0, None))
        return future

    def results(self) -> list[tuple[Any, int, int, int]]:
        found, self._results = self._results, []
        return found

    def pending(self, qp: int = 0) -> int:
        busy = (self._busy,) if self._busy is not None else ()
        waiting = (entry for lane in self._lanes for _, entry in lane)
        return sum(1 for entry in (*busy, *waiting) if not qp or entry[2] == qp)

    def cancel(self, qp: int) -> int:
        gone = [item for item in self._lanes[0] if item[1][0] == "modify" and item[1][2] == qp]
        kept = [item for item in self._lanes[0] if item not in gone]
        self._lanes[0].clear()
        self._lanes[0].extend(kept)
        self._results.extend((entry[1], errno.ECANCELED, 0, 0) for _, entry in gone)
        self.host.attention |= bool(gone)
        self.host.wake()
        return len(gone)

    def drain(self, qp: int = 0, timeout_s: float | None = None) -> bool:
        """Wait until nothing is under way on one QP, as an application's thread does."""
        return self.host.wait(lambda: not self.pending(qp), timeout_s)

    def stop(self, timeout_s: float | None = None) -> bool:
        return True

    def _put(self, entry: tuple[str, Any, int, Any]) -> None:
        if self.host.booting and entry[0] == "job":
            self._carry_out(entry)
            return
        self._lanes[_lane_of(entry[0], entry[3])].append((self._came, entry))
        self._came += 1
        if self._busy is None:
            self._begin()

    def _next(self) -> tuple[str, Any, int, Any]:
        """Of the first lane, or what came first, where 32 others have gone before that."""
        first = next(lane for lane in self._lanes if lane)
        oldest = min((lane for lane in self._lanes if lane), key=lambda lane: lane[0][0])
        if self._passed >= MOST_PASSED:
            first = oldest
        self._passed = 0 if first is oldest else self._passed + 1
        return first.popleft()[1]

    def _begin(self) -> None:
        entry = self._busy = self._next()
        self.busy_since_ns = self.clock.now
        what, _, _, steps = entry
        takes_ns = self.nic.command_ns * len(steps) if what == "modify" else 2 * US
        if what == "destroy":
            takes_ns = self.nic.command_ns
        elif what == "job" and getattr(entry[1][0], "__name__", "") == "_run":
            is_memory = isinstance(entry[1][0].__self__, ShadowMR)
            takes_ns = self.nic.registering_ns if is_memory else self.nic.making_ns
        self.clock.later(takes_ns, self._end)

    def _is_stuck(self) -> bool:
        entry = self._busy
        assert entry is not None
        is_question = entry[0] == "job" and getattr(entry[1][0], "__name__", "") == "_look"
        return (self.nic.hung or (self.nic.mute and is_question)) and not self.nic.dead

    def _end(self) -> None:
        if self.host.gone:
            return
        if self._is_stuck():
            if not self._waits:
                self._waits = True
                self.nic.waiting.append(self._go_on)
            return
        entry = self._busy
        assert entry is not None
        self._carry_out(entry)
        self._busy = None
        self.busy_since_ns = 0
        if any(self._lanes):
            self._begin()

    def _go_on(self) -> None:
        self._waits = False
        self._end()

    def _carry_out(self, entry: tuple[str, Any, int, Any]) -> None:
        what, tag, pointer, steps = entry
        host = self.host
        with host:
            if what == "modify":
                err, step = host.verbs.modify(pointer, steps)
                self._results.append((tag, err, step, 0))
            elif what == "destroy":
                getattr(host.verbs, f"destroy_{steps.lower()}" if steps != "MR" else "dereg_mr")(pointer)
                self._results.append((tag, 0, 0, 0))
            else:
                fn, args, future = tag
                before, host.thread = host.thread, id(self)
                try:
                    result = fn(*args)
                except Exception as error:
                    if future is None:
                        raise
                    future.set_exception(error)
                else:
                    if future is not None:
                        future.set_result(result)
                finally:
                    host.thread = before
        if what != "job":
            host.attention = 1
        host.wake()


class Waiter:
    """`_nic.Waiter`: the control thread's sleep."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.closed = False

    def add(self, fd: int) -> None:
        self.host.watched.add(fd)

    def remove(self, fd: int) -> None:
        self.host.watched.discard(fd)

    def add_listener(self, fd: int) -> None:
        """Nobody blocks."""

    def set_deadline(self, at_ns: int) -> None:
        self.host.set_deadline(at_ns)

    def wake_within(self, ns: int) -> None:
        self.host.set_deadline(self.host.net.clock.now + ns)

    def wake(self) -> None:
        self.host.wake()

    def close(self) -> None:
        self.closed = True


class Attention:
    """The attention flag: of the data path while its process runs, else what it was when that stopped."""

    def __init__(self, host: Host) -> None:
        self._host = host

    @property
    def value(self) -> int:
        host = self._host
        return host.attention or (host.net.flag.value if host.net.running is host else 0)

    @value.setter
    def value(self, value: int) -> None:
        self._host.attention = value
        if self._host.net.running is self._host:
            self._host.net.flag.value = value


class VirtualMachine:
    """A Machine. What it makes stands for what is compiled, and is final there."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.verbs = cast("raw_verbs.Verbs", host.verbs)
        self.attention: Any = Attention(host)
        clock = host.net.clock
        self.now_ns = lambda: clock.now

    def random_bits(self, count: int) -> int:
        return self.host.net.clock.rng.getrandbits(count)

    def set_driver(self, run: Callable[[], object] | None) -> None:
        self.host.run_inline = run

    def take_events(self) -> list[Any]:
        self.host.park()
        events, self.host.events = self.host.events, []
        return events

    def events_overflowed(self) -> bool:
        lost, self.host.events_lost = self.host.events_lost, False
        return lost or _core.events_overflowed()

    def ended_samples(self) -> list[Any]:
        self.host.park()
        samples, self.host.samples = self.host.samples, []
        return samples

    def raise_attention(self) -> None:
        self.attention.value = 1
        self.host.notice()

    def clear_attention(self) -> None:
        self.attention.value = 0

    def waiter(self) -> _nic.Waiter:
        return cast("_nic.Waiter", Waiter(self.host))

    def worker(self, name: str, waiter: _nic.Waiter) -> _nic.NicWorker:
        return cast("_nic.NicWorker", Worker(self.host, name))

    def exchanger(self, config: Any) -> VirtualExchanger:
        return VirtualExchanger(self.host)

    def readable(self, fd: int) -> bool:
        return self.host.exchanger.has_news

    def start_thread(self, run: Callable[[], None], name: str) -> Any:
        return types.SimpleNamespace(join=lambda timeout=None: None)


class Store:
    """What stands in etcd: key -> (text, whose). All see it alike; news of it takes its time to each."""

    def __init__(self, net: Network) -> None:
        self.net = net
        self.values: dict[str, tuple[str, VirtualExchanger | None]] = {}
        self.users: list[VirtualExchanger] = []

    def put(self, key: str, text: str | None, owner: VirtualExchanger | None) -> None:
        if text is None:
            self.values.pop(key, None)
        else:
            self.values[key] = text, owner
        for user in self.users:
            user.tell(key)


class VirtualExchanger(Exchanger):
    """The exchanger of one process: each request and each piece of news is late by as much as chance says.

    away: etcd cannot be reached; what it was asked meanwhile is done afterwards. With `lose_lease`, what it had
    published is gone meanwhile.
    """

    def __init__(self, host: Host) -> None:
        self.host = host
        self.net = host.net
        self.store = host.net.store
        self.store.users.append(self)
        self.late_ns = (200 * US, 2000 * US)
        self.away = False
        self._published: dict[str, str] = {}
        self.wanted: set[str] = set()
        self._told: dict[str, str | None] = {}
        self._events: list[ExchangerEvent] = [Connected()]
        self._asked: list[tuple[str, str | None]] = []  # while it is away
        # What etcd had to do for this process: entries that were written, keys to read and watch, news of them.
        self.written = self.sought = self.told = 0
        host.exchanger = self

    @property
    def has_news(self) -> bool:
        return bool(self._events)

    def _late(self) -> int:
        first, last = self.late_ns
        return self.net.clock.rng.randrange(first, last)

    def publish(self, key: str, record: records.QpRecord) -> None:
        text = records.encode_value(key, record)
        self._published[key] = text
        self._ask(key)

    def withdraw(self, key: str) -> None:
        if self._published.pop(key, None) is not None:
            self._ask(key)

    def _ask(self, key: str) -> None:
        if not self.away:
            self.net.clock.later(self._late(), self._put, key)

    def _put(self, key: str) -> None:
        if self.away:
            return
        text = self._published.get(key)
        standing = self.store.values.get(key)
        if text is None and (standing is None or standing[1] is not self):
            return
        if standing is None or standing[0] != text:
            self.written += 1
            self.store.put(key, text, self)

    def want(self, key: str) -> None:
        records.parse_key(key)
        self.wanted.add(key)
        self.sought += 1
        self.tell(key)

    def unwant(self, key: str) -> None:
        self.wanted.discard(key)
        self._told.pop(key, None)
        self._events = [e for e in self._events if not isinstance(e, Found | Rejected) or e.key != key]

    def tell(self, key: str) -> None:
        """Something may have changed there."""
        if key in self.wanted and not self.away:
            self.net.clock.later(self._late(), self._tell, key)

    def _tell(self, key: str) -> None:
        if key not in self.wanted or self.away:
            return
        text = self.store.values.get(key, (None, None))[0]
        if key in self._told and self._told[key] == text:
            return
        self._told[key] = text
        self.told += 1
        try:
            self._post(Found(key, None if text is None else records.decode_value(key, text)))
        except records.RecordError as error:
            self._post(Rejected(key, str(error)))

    def _post(self, event: ExchangerEvent) -> None:
        self._events.append(event)
        if self.fileno() in self.host.watched:
            self.host.wake()

    def go_away(self, lose_lease: bool) -> None:
        """No answer from etcd any more."""
        if self.away:
            return
        self.away = True
        self._post(Unavailable("cut off"))
        if lose_lease:
            for key in [key for key, (_, owner) in self.store.values.items() if owner is self]:
                self.store.put(key, None, None)

    def come_back(self) -> None:
        """It answers again."""
        if not self.away:
            return
        self.away = False
        self._post(Connected())
        mine = [key for key, (_, owner) in self.store.values.items() if owner is self]
        for key in dict.fromkeys([*mine, *self._published]):
            self._ask(key)
        for key in sorted(self.wanted):
            self.tell(key)

    def fileno(self) -> int:
        return 7

    def poll_events(self) -> list[ExchangerEvent]:
        events, self._events = self._events, []
        return events

    def close(self, after_fork: bool = False) -> None:
        """The end of the process."""
