# SPDX-License-Identifier: BSD-3-Clause
"""The driver: takes events from everywhere, feeds the protocol, carries out its actions. The only reader of the clock.

Who runs it: whoever comes first. The control thread waits without the GIL and sets a C flag when something
happened; `post_*`, `poll` and blocked waits of the application see the flag and call `run` inline; only if none of them
does so at once, the control thread takes the GIL and calls it. One lock serialises runs; whoever finds it taken leaves,
and the holder looks at the flag once more before it goes.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import heapq
import itertools
import logging
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVarTuple

from shiftverbs import _core
from shiftverbs.failover.nic_events import NicEvents
from shiftverbs.failover.qp.watchdog import DOUBT_LOOK_NS, URGENT_PING_NS, WATCH_PERIOD_NS
from shiftverbs.failover.services.admission import Turns
from shiftverbs.failover.services.control_channel import ControlChannel
from shiftverbs.failover.services.cq_polling import Looks
from shiftverbs.failover.services.directory import Directory
from shiftverbs.failover.services.machine import Machine
from shiftverbs.failover.services.memory_keys import KeyBook
from shiftverbs.failover.services.stragglers import SlowPaths
from shiftverbs.failover.services.totals import Totals
from shiftverbs.native.ibv import WcStatus
from shiftverbs.process.log_lines import Announcements, OutsideTheLock
from shiftverbs.protocol.codec import Entry, Ping
from shiftverbs.protocol.messages import PairAddress, Phase, Sync
from shiftverbs.protocol.pair import MS, ProtocolConfig
from shiftverbs.protocol.path_health import PROBE_NS
from shiftverbs.protocol.timers import NEVER
from shiftverbs.stragglers.records import Mode

if TYPE_CHECKING:
    from shiftverbs._nic import ModifySteps, Waiter
    from shiftverbs.config import Config
    from shiftverbs.exchanger.interface import Exchanger
    from shiftverbs.failover.qp.connection import Connection
    from shiftverbs.failover.services.control_channel import Path
    from shiftverbs.failover.services.host import AnyCall, HostedQp
    from shiftverbs.shadows.nic import Nic

logger = logging.getLogger("shiftverbs.driver")
Args = TypeVarTuple("Args")

# For so long after a SWITCH began, whatever it does not need waits.
HURRY_NS = 20 * MS
# How long a Python thread keeps the GIL from us then, and while a path is in doubt. (As a rule 5 ms, at each step.)
HURRY_SWITCH_INTERVAL_S = 0.0002
# But no longer: a SWITCH may need the keys of memory, and where very many begin one after the other, the hurry is long.
EXCHANGE_NS = 100 * MS
# After so many calls a run reads what came meanwhile: a thousand QPs fail together, and the peer takes us for dead
# where its pings are not answered. Not many fewer: what is done together is sent together.
SLICE = 256
# Where there is much else, so many messages are read all the same: their senders have deadlines.
READ_AT_LEAST = SLICE // 4
# So many messages are kept of one peer's QP, each about something else. More there are only from one who invents pairs.
MOST_UNREAD = 128
# After so long a run ends once what happened here is handled: it may be in a verb of the application's, which is to
# return, and signals wait for it. Whoever floods us must not keep that thread; what is left is for another run.
RUN_NS = 10 * MS
# What a verb leaves to be done soon waits so long at most.
SOON_NS = 1 * MS
# While there is more to do than time, this part of it goes to what is due.
TIMEOUTS_SHARE = 3
# A timeout of one whose news has not been looked at is put off by this.
LATER_NS = 5 * MS
# Connections looked at each period: a thousand idle ones must cost next to nothing.
WATCH_AT_ONCE = 64
QUIET_PING_NS = 1000 * MS
PINGS_UNTIL_DEAD = 4
# Of so many lives of QPs that have ended it is kept what their BYE said.
KEPT_BYES = 1024

_WC_STATUSES = frozenset(WcStatus)


class Driver:
    """The failover machinery of one process.

    config: what the user configured; exchanger: where peers are found; instance: this process's id, 16 hex digits;
    waiter: the control thread's sleep; nics: all our NICs so far; machine: what all this stands on.
    now_ns: its clock, CLOCK_MONOTONIC in nanoseconds.
    """

    def __init__(
        self,
        config: Config,
        exchanger: Exchanger,
        instance: str,
        waiter: Waiter,
        nics: Callable[[], list[Nic]],
        machine: Machine,
    ) -> None:
        self.machine = machine
        self.now_ns = machine.now_ns
        self.config = config
        self.instance = instance
        self.exchanger = exchanger
        self.waiter = waiter
        self.protocol_config = ProtocolConfig.patient(config.peer_deadline_ms * MS, config.invariants)
        self.connections: dict[_core.QPCore, Connection] = {}
        self.by_life: dict[int, HostedQp] = {}
        # What a life said when it ended.
        self._left: collections.OrderedDict[int, Sync] = collections.OrderedDict()
        self.channel = ControlChannel(
            self.post, waiter.add, waiter.remove, QUIET_PING_NS, PINGS_UNTIL_DEAD, machine
        )
        self.keys = KeyBook()
        self.announcements = Announcements()
        self.totals = Totals()
        self.nic_events = NicEvents(self)
        self.directory = Directory(self, exchanger)
        self.turns: Turns[HostedQp] = Turns(self.now_ns, self.run_again, self.later)
        self.looks = Looks(self.now_ns)
        mode = Mode(config.straggler)
        self.measures = SlowPaths(self, mode) if mode is not Mode.OFF else None
        if self.measures is not None:
            self.channel.on_pong = self.measures.handle_pong
        self.stopped = False
        self._nics = nics
        self._lock = threading.RLock()
        self._depth = 0
        self._lost = False  # what a run had taken, when it was interrupted
        self._posted: collections.deque[Callable[[], None]] = collections.deque()
        # What has come and is not handled yet: (connection or None, call, arguments), oldest first.
        self._backlog: collections.deque[tuple[HostedQp | None, AnyCall, tuple[object, ...]]] = (
            collections.deque()
        )
        self._pending: dict[HostedQp, int] = {}  # how many of these are each connection's
        # Messages that are not read yet, the newest of what each is about; who has had mail for longest comes first.
        self._mail: collections.OrderedDict[HostedQp, dict[tuple[object, ...], Entry]] = (
            collections.OrderedDict()
        )
        self._timers: list[tuple[int, int, HostedQp]] = []
        self._ticket = itertools.count()
        # With the pairing each belongs to: what comes back after that has ended means nothing any more.
        self._commands: dict[int, tuple[HostedQp, object, Callable[[int, int], None]]] = {}
        # What NICs have said and is not noted yet.
        self._results: collections.deque[tuple[int | Callable[[int], None], int, int, int]] = (
            collections.deque()
        )
        self._watch_ns = 0
        self._to_watch: list[Connection] = []
        self._to_watch_ns = 0  # no more of them before
        self._working: list[Connection] = []  # of very many, those with work that are to be looked at next
        self._portion_ns = 0  # nor of those before that
        # Of very many: those that asked at the last look, one for each path in doubt.
        self._asking: dict[Path, Connection] = {}
        self._urgent: dict[Path, int] = {}  # how dense pings were wanted there in this round of looks
        self._probed: dict[Path, None] = {}  # where a look has found doubt the last time
        self._hurry_until_ns = 0
        self._exchanged_ns = 0
        self._interval_before_s: float | None = None
        self._short_until_ns = 0  # the interpreter's switch interval is short
        self._asides: collections.deque[Callable[[], object]] = collections.deque()
        self._next_ping_ns: int | None = None
        self._timeouts_ns = 0
        self._soon_ns = 0  # until then the waiter's deadline is post_soon's
        self._attention = machine.attention
        owned: Callable[[], bool] = self._lock._is_owned  # type: ignore[attr-defined]  # noqa: SLF001  (as Condition asks)
        self.outside = OutsideTheLock(owned)
        self.is_in = owned  # whether the calling thread has the lock
        self._unbroken = _core.Unbroken(self._lock, self._lock.release)
        self._held = _core.Unbroken(self._lock, self._leave_and_tell)
        self._held_quietly = _core.Unbroken(self._lock, self._leave_and_tell, quietly=True)
        waiter.add(exchanger.fileno())

    # ---- running ----------------------------------------------------------------------------------------------------

    @staticmethod
    def wc_name(status: int) -> str:
        """Name of an enum ibv_wc_status, without its prefix."""
        return WcStatus(status).name if status in _WC_STATUSES else f"status {status}"

    def post(self, call: Callable[[], None], wake: bool = True) -> None:
        """Have `call` run under the lock, soon; from any thread.

        wake: False where the control thread is woken anyway, as by the end of a NIC's command.
        """
        self._posted.append(call)
        self.machine.raise_attention()
        if wake:
            self.waiter.wake()

    def post_soon(self, call: Callable[[], None]) -> None:
        """Have `call` run under the lock within SOON_NS; from a verb of the application's, which need not pay for more.

        As many of these as come meanwhile are one wake-up. Whoever arms the driver's own deadline instead looks at the
        attention flag afterwards, so none is forgotten.
        """
        self._posted.append(call)
        self.machine.raise_attention()
        now = self.now_ns()
        if now < self._soon_ns:
            return
        if self._soon_ns:
            # It is over, and nobody has run: setting it anew, whenever the application makes a QP, would put it off.
            self._soon_ns = 0
            self.waiter.wake()
        else:
            self._soon_ns = now + SOON_NS
            self.waiter.wake_within(SOON_NS)

    def run(self) -> None:
        """Handle what is there. Any thread; returns at once where another one is at it.

        And after RUN_NS where others say always more: the control thread is told to go on, if nobody else does.
        """
        until = self.now_ns() + RUN_NS
        while not self.stopped:
            if not self._unbroken.enter_now():
                return
            try:
                if self._depth:  # this thread is in a run already, where a program's finalizer polls
                    return
                self._depth += 1
                try:
                    self.machine.clear_attention()
                    self._once()
                except BaseException as error:
                    # No timer was set, and what is left must not wait until something else happens.
                    self._lost = True
                    with contextlib.suppress(Exception):
                        self.waiter.set_deadline(self.now_ns() + WATCH_PERIOD_NS)
                    if not isinstance(error, Exception):
                        raise
                    # A bug of ours must not surface in an application's poll.
                    logger.exception("the failover driver failed")
                finally:
                    self._depth -= 1
            finally:
                self._unbroken.leave()
            if not self._attention.value:
                return
            if not self._backlog and self.now_ns() >= until:
                self.waiter.wake()
                return

    def _leave_and_tell(self) -> None:
        self._lock.release()
        if self._attention.value:
            self.waiter.wake()

    def locked(self, quietly: bool = False) -> contextlib.AbstractContextManager[None]:
        """The driver's lock, for set-up and teardown from application threads.

        Whoever wanted to run meanwhile found it taken and left; so the control thread is told if a run is due. The
        application's verb does not wait for that.

        Signals' handlers run while it is waited for, and may raise. quietly: what they raise is raised later, as
        something has begun that must not be left so.
        """
        return self._held_quietly if quietly else self._held

    def hurry(self, now_ns: int) -> None:
        """A SWITCH begins. What it does not need waits a moment, and no busy Python thread keeps us from the GIL."""
        if not self._hurry_until_ns:
            self._exchanged_ns = now_ns
            # What it has to tell waits, and must not keep the control thread awake until then.
            self.waiter.remove(self.exchanger.fileno())
        self._hurry_until_ns = now_ns + HURRY_NS
        self._shorten_switch_interval(now_ns)

    def _shorten_switch_interval(self, now_ns: int) -> None:
        """For HURRY_NS no busy Python thread keeps us from the GIL for long.

        The interpreter's switch interval belongs to the application: it is put back, unless it was changed meanwhile.
        """
        self._short_until_ns = now_ns + HURRY_NS
        if self._interval_before_s is None:
            before_s = sys.getswitchinterval()
            if before_s > HURRY_SWITCH_INTERVAL_S:
                self._interval_before_s = before_s
                sys.setswitchinterval(HURRY_SWITCH_INTERVAL_S)

    def aside(self, call: Callable[[], object]) -> None:
        """Have `call` run in its turn: at once, or when nothing is in a hurry. For logs and subscribers."""
        if self._hurry_until_ns or self._asides:
            self._asides.append(call)
        else:
            call()

    def restore_switch_interval(self) -> None:
        """Undo what `_shorten_switch_interval` did to the interpreter."""
        before_s, self._interval_before_s = self._interval_before_s, None
        if before_s is not None and abs(sys.getswitchinterval() - HURRY_SWITCH_INTERVAL_S) < 1e-6:
            sys.setswitchinterval(before_s)

    def _take_time(self) -> None:
        """The hurry is over: do what waited for that."""
        self._hurry_until_ns = 0
        left = SLICE
        while self._asides:
            self._asides.popleft()()
            left -= 1
            if left == 0 and not self.stopped:
                self._attention.value = 1
                break

    def stop(self, timeout_s: float) -> None:
        """Tell all peers that this process ends; nothing runs afterwards. Whoever is in a run is waited for so long."""
        free = self._unbroken.enter_within(timeout_s)
        try:
            if free:
                for connection in list(self.connections.values()):
                    self.safely(connection, connection.quit, "the process ends")
                self.channel.flush()
        except Exception:
            logger.exception("the peers were not told that the process ends")
        finally:
            self.stopped = True
            if free:
                self._take_time()
                self.restore_switch_interval()
                self.announcements.flush()
                self._unbroken.leave()

    def safely(self, connection: HostedQp, call: Callable[[*Args], None], *args: *Args) -> None:
        """Call into one connection. A bug of ours there costs that QP its protection, and nobody else anything."""
        try:
            call(*args)
        except Exception:
            logger.exception("QP %#x: failover of this QP failed and is given up", connection.shadow.qp_num)
            with contextlib.suppress(Exception):
                connection.give_up("an internal error, see the log")

    def _once(self) -> None:
        now = self.now_ns()
        self._collect(now)
        if self.turns.waiting:
            self.turns.admit(now)
        # The peer waits for what was said just now, here and below.
        if self._backlog or self._mail:
            self._work()
        if self.channel.dirty:
            self.channel.flush()
        hurry = now < self._hurry_until_ns
        if not hurry:
            if self._hurry_until_ns:
                self.waiter.add(self.exchanger.fileno())
            if self._hurry_until_ns or self._asides:
                self._take_time()
            if self._interval_before_s is not None and now >= self._short_until_ns:
                self.restore_switch_interval()
        # Only when something is there: each system call in it lets go of the GIL, for 5 ms next to a busy program.
        if not hurry or now >= self._exchanged_ns + EXCHANGE_NS:
            if self.directory.is_behind or self.machine.readable(self.exchanger.fileno()):
                self._exchanged_ns = now
                self.directory.take()
        if (self._timers and self._timers[0][0] <= now) or now >= self._watch_ns:
            self._timeouts(now)
        due = self.looks.due_ns
        if due is not None and now >= due:
            self.looks.look()
        self._next_ping_ns = self.channel.ping(now, hurry)
        if self.channel.dirty:
            self.channel.flush()
        if self._backlog or self._mail or self.channel.more or (self.turns.waiting and self.turns.may_begin):
            self._attention.value = 1
        if not self._attention.value:  # else the next run follows at once
            self._arm_deadline()

    def run_again(self) -> None:
        """Have another run follow the one under way."""
        self._attention.value = 1

    def watch_soon(self) -> None:
        """Have connections looked at now, not only when their period is over."""
        self._watch_ns = 0

    def later(self, connection: HostedQp | None, call: Callable[[*Args], None], *args: *Args) -> None:
        """Put at the end of what is to be handled."""
        self._backlog.append((connection, call, args))
        if connection is not None:
            self._pending[connection] = self._pending.get(connection, 0) + 1

    def _collect(self, now: int) -> None:
        """Take what has come from everywhere, to be handled in this order. Pings are answered at once."""
        later = self.later
        for _ in range(len(self._posted)):
            later(None, self._posted.popleft())
        self.nic_events.take()
        for nic in self._nics():
            self._results.extend(nic.worker.results())
            self._results.extend(nic.registrar.results())
        while self._results:
            tag, err, step, _elapsed_ns = self._results[0]
            if callable(tag):  # not a command of a connection's
                later(None, tag, err)
            else:
                entry = self._commands.pop(tag, None)
                if entry is not None:
                    later(entry[0], self._command_ended, entry, err, step)
            self._results.popleft()  # only now: what fails may be had again
        for kind, core, k, a, b, t_ns in self.machine.take_events():
            connection = self.connections.get(core)
            if connection is not None:
                later(connection, connection.core_event, kind, k, a, b, t_ns)
        lost, self._lost = self._lost, False
        if self.machine.events_overflowed():
            logger.warning("events of the data path overflowed: every QP is looked at, so nothing is lost")
            lost = True
        if lost:
            for connection in list(self.connections.values()):
                later(connection, connection.catch_up)
        for path, said in self.channel.receive(now):
            self._hear(path, said, now)

    def _work(self) -> None:
        """Handle what was collected; what is too much for once when it was looked what came meanwhile.

        What happened here comes first: others may say as much as they like.
        """
        backlog, pending = self._backlog, self._pending
        left = SLICE
        for _ in range(min(SLICE, len(backlog))):
            if not backlog:
                break
            left -= 1
            connection, call, args = backlog.popleft()
            if connection is None:
                try:
                    call(*args)
                except Exception:
                    logger.exception("a call posted to the failover driver failed")
            else:
                left = pending.pop(connection, 1) - 1
                if left:
                    pending[connection] = left
                if not connection.closed:
                    self.safely(connection, call, *args)
        left = max(left, READ_AT_LEAST)
        while self._mail and left > 0:
            connection, messages = self._mail.popitem(last=False)
            left -= len(messages)
            self._read(connection, messages)

    def drop_backlog(self, connection: HostedQp) -> None:
        """What has come for this connection, and is not handled yet, was about a life of its QP that is over."""
        self.turns.drop(connection)
        self._mail.pop(connection, None)
        if self._pending.pop(connection, 0):
            kept = [entry for entry in self._backlog if entry[0] is not connection]
            self._backlog.clear()
            self._backlog.extend(kept)

    def _hear(self, path: Path, said: Entry, now_ns: int) -> None:
        """A message of the process at the other end of `path`. It speaks for its own QPs only.

        Of those that are about the same only the newest waits to be read: a peer that loses patience, or is out of its
        mind, gives us no more to do.
        """
        connection = self.by_life.get(said.to)
        if connection is None:
            self.channel.unknown += 1
            self._say_bye(path, said)
            return
        peer = connection.peer
        if (
            peer is None
            or int(peer.life, 16) != said.sender
            or (path not in connection.paths and path.link not in [mine.link for mine in connection.paths])
        ):
            self.channel.unknown += 1
            return
        path.heard_ns = now_ns
        assert not isinstance(said.message, Ping)
        messages = self._mail.get(connection)
        if messages is None:
            messages = self._mail[connection] = {}
        about = said.message.about
        before = messages.get(about)
        if before is not None:
            assert not isinstance(before.message, Ping)
            connection.superseded += 1
            if before.sender == said.sender and said.message.age < before.message.age:
                return
        elif len(messages) >= MOST_UNREAD:
            connection.superseded += 1
            return
        messages[about] = said

    def _read(self, connection: HostedQp, messages: dict[tuple[object, ...], Entry]) -> None:
        for said in messages.values():
            peer = connection.peer  # it may be in another life since this was heard
            if not connection.closed and peer is not None and int(peer.life, 16) == said.sender:
                assert not isinstance(said.message, Ping)
                self.safely(connection, connection.handle_message, said.message)

    def _say_bye(self, path: Path, said: Entry) -> None:
        """Nobody of that name here (any more): our own BYE was lost, and the peer need not wait for its deadline."""
        m = said.message
        if isinstance(m, Sync) and m.phase in (Phase.BYE, Phase.ABORT):
            return
        nobody = PairAddress(bytes(16), 0, 0, 0, 1)
        bye = self._left.get(said.to, Sync(0, 0, Phase.BYE, 0, False, nobody, 0))
        self.channel.send(path, Entry(said.sender, said.to, bye))

    def life_ended(self, life: int, bye: Sync) -> None:
        """A QP of ours has said `bye`, and is forgotten: whoever did not hear it is told the same."""
        self._left[life] = bye
        while len(self._left) > KEPT_BYES:
            self._left.popitem(last=False)

    def _timeouts(self, now: int) -> None:
        """What is due, except where something that may have come in time has not been looked at.

        Where there is more to do than time, this gets a part of it: most of it is said again, and not needed.
        """
        if (self._backlog or self._mail) and now < self._timeouts_ns:
            return
        began = self.now_ns()
        left = SLICE
        while self._timers and self._timers[0][0] <= now:
            due, _, connection = heapq.heappop(self._timers)
            if connection.timer_ns != due:
                continue
            if connection in self._pending:
                connection.timer_ns = None
                self.schedule(connection, now + LATER_NS)
                continue
            messages = self._mail.pop(connection, None)
            if messages is not None:  # at once: new ones may come at any moment
                self._read(connection, messages)
            self.safely(connection, connection.on_time, now)
            left -= 1
            if not left:
                self._attention.value = 1
                break
        ended = self.now_ns()
        self._timeouts_ns = ended + TIMEOUTS_SHARE * (ended - began)
        if now >= self._watch_ns and self.connections:
            self._watch_ns = now + WATCH_PERIOD_NS
            self._watch(now)
            self.nic_events.ask_ports(now)
            if now >= self._hurry_until_ns:
                self.announcements.flush()
                if self.measures is not None:
                    self.measures.look(now)

    def _watch(self, now: int) -> None:
        """Look at the next connections; a round through very many takes several looks, so that each costs little."""
        if not self._to_watch:
            self._begin_round()
        next_ones = self._next_to_watch(now)
        again_ns = WATCH_PERIOD_NS
        asking: dict[Path, Connection] = {}
        probed: dict[Path, None] = {}
        for connection in next_ones:
            watchdog = connection.watchdog
            self.safely(connection, watchdog.watch, now)
            if watchdog.is_old and self.measures is not None:
                self.measures.waits(connection)
            again_ns = min(again_ns, watchdog.again_ns)
            wanted_ns = watchdog.pings_ns
            if wanted_ns is not None:
                self._want_pings(connection, wanted_ns, now)
            if wanted_ns == PROBE_NS:
                self._shorten_switch_interval(now)  # else each of the pings would wait for who computes
                asking.setdefault(connection.paths[connection.send_pair], connection)
                probed.update(dict.fromkeys(connection.paths))
        is_many = len(self.connections) > WATCH_AT_ONCE
        if is_many:
            # Doubt does not last as long as a round through all of them.
            for path in self._probed:
                if path not in probed and path.ping.interval_ns == PROBE_NS:
                    self._urgent[path] = path.ping.interval_ns = URGENT_PING_NS
        self._probed, self._asking = probed, asking if is_many else {}
        if not self._working:  # of very many each look takes its portion, in turn
            self._portion_ns = now + again_ns
            self._watch_ns = min(self._watch_ns, self._portion_ns)
        elif asking:
            self._watch_ns = min(self._watch_ns, now + DOUBT_LOOK_NS)

    def _begin_round(self) -> None:
        """All connections are to be looked at, and pings are as dense as the round before had them wanted."""
        self._to_watch = list(self.connections.values())
        wanted, self._urgent = self._urgent, {}
        dense = self.measures.dense if self.measures is not None else {}
        for path in self.channel.paths.values():
            path.ping.interval_ns = min(wanted.get(path, QUIET_PING_NS), dense.get(path, QUIET_PING_NS))

    def _next_to_watch(self, now: int) -> list[Connection]:
        """Who is looked at now: of few everybody.

        Of very many a portion, and as many of those that have work, which are not to wait for that; and each time one
        for each path that is in doubt, since doubt is short and what one finds holds for all.
        """
        if len(self.connections) <= WATCH_AT_ONCE:
            self._working = []
            return self._portion()
        next_ones = list(self._asking.values())
        if now >= self._portion_ns:
            self._portion_ns = now + WATCH_PERIOD_NS
            if not self._working:
                self._working = [self.connections[core] for core in _core.at_work(self.connections)]
            next_ones += self._working[:WATCH_AT_ONCE]
            del self._working[:WATCH_AT_ONCE]
        if now >= self._to_watch_ns or not next_ones:
            self._to_watch_ns = now + WATCH_PERIOD_NS
            next_ones += self._portion()
        return list(dict.fromkeys(next_ones))  # each once

    def _portion(self) -> list[Connection]:
        """The next ones of the round."""
        portion = self._to_watch[-1 : -1 - WATCH_AT_ONCE : -1]
        del self._to_watch[-WATCH_AT_ONCE:]
        return portion

    def _want_pings(self, connection: Connection, wanted_ns: int, now: int) -> None:
        """Its paths are pinged as often as it wants, for this round and the next."""
        for path in connection.paths:
            self._urgent[path] = min(self._urgent.get(path, wanted_ns), wanted_ns)
            path.ping.interval_ns = min(path.ping.interval_ns, wanted_ns)
            path.ping.hurry(now)

    def forget(self, connection: Connection) -> None:
        """A connection was closed. With the last one goes what still names any: nothing would look there again."""
        self.connections.pop(connection.core, None)
        if self.measures is not None:
            self.measures.left(connection)
        if not self.connections:
            self._to_watch.clear()
            self._working.clear()
            self._asking.clear()
            self._timers.clear()
            self.announcements.flush()

    def schedule(self, connection: HostedQp, due_ns: int) -> None:
        """Call `connection.on_time` at due_ns; an earlier appointment stands."""
        if connection.timer_ns is None or due_ns < connection.timer_ns:
            connection.timer_ns = due_ns
            heapq.heappush(self._timers, (due_ns, next(self._ticket), connection))

    def _arm_deadline(self) -> None:
        first = self._timers[0][0] if self._timers else NEVER
        for due in (
            self._next_ping_ns,
            self.looks.due_ns,
            self.turns.due_ns if self.turns.waiting else None,
            self._watch_ns if self.connections else None,
            self._hurry_until_ns or None,
            self._short_until_ns if self._interval_before_s is not None else None,
        ):
            if due is not None and due < first:
                first = due
        self._soon_ns = 0
        self.waiter.set_deadline(max(1, first) if first != NEVER else 0)  # 0: none

    # ---- commands to NICs -------------------------------------------------------------------------------------------

    def command(
        self, connection: HostedQp, k: int, steps: ModifySteps, done: Callable[[int, int], None]
    ) -> None:
        """Have pair k's NIC carry out steps on its QP; done(errno, step) is called under the lock."""
        nic = connection.nic(k)
        entry = (connection, connection.protocol, done)
        pointer = connection.shadow.handle(k)
        if not pointer:
            self.post(lambda: self._command_ended(entry, errno.ENODEV, 0))
            return
        tag = next(self._ticket)
        self._commands[tag] = entry
        nic.worker.submit(tag, pointer, steps)

    def _command_ended(
        self, entry: tuple[HostedQp, object, Callable[[int, int], None]], err: int, step: int
    ) -> None:
        connection, life, done = entry
        if not connection.closed and connection.protocol is life:
            self.safely(connection, done, err, step)
