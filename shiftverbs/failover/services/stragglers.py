# SPDX-License-Identifier: BSD-3-Clause
"""Feeds the straggler detector, and does what it says: slow paths are told of, and left where that is wanted.

What is judged is one peer over the same rails, whatever number of QPs go there (docs/stragglers.md). Samples are the
data path's (`_core.SendSample`), pings those of path health; the periodic look takes in what has ended, one sample at a
time, so that what it costs is bounded however many peers there are. A path without traffic ends no sample, and so costs
nothing. Nothing here has to do with whether a path fails: an error in here ends the judging and nothing else.

Everything runs under the driver's lock.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVarTuple

from msgspec import Struct

from shiftverbs import _core, observe
from shiftverbs.protocol import events as ev
from shiftverbs.protocol.events import Status
from shiftverbs.shadows import congestion
from shiftverbs.stragglers.detector import Stragglers
from shiftverbs.stragglers.records import (
    MS,
    SECOND,
    Action,
    Attribution,
    Evidence,
    Mode,
    Move,
    Observe,
    Path,
    Ping,
    Probe,
    Recovered,
    Return,
    Sample,
    Settings,
)
from shiftverbs.stragglers.trains import TRAIN_BYTES, TRAIN_MESSAGES

if TYPE_CHECKING:
    from shiftverbs.failover.services.control_channel import Path as ControlPath
    from shiftverbs.failover.services.host import Host, MeasuredQp

logger = logging.getLogger("shiftverbs.stragglers")
Args = TypeVarTuple("Args")

# Between the end of a path's sample and the next: fewer than 20 a second.
REST_NS = 60 * MS
# While a path is suspected both rails are pinged so often. No more often: four pings without answer make a path dead,
# and a peer that is paused for a moment is not.
DENSE_PING_NS = 25 * MS
# So often, and so many times on each path, until it is known what a round trip takes there.
LEARNING_PING_NS = 100 * MS
LEARNING_PINGS = 32
# Where QPs may be moved, what their other rails carry is asked by a train of datagrams ahead of every so-many-th ping,
# and of more of them while a path is suspected, or it is being learned.
TRAIN_EACH, DENSE_TRAIN_EACH = 5, 2
LEARNING_TRAINS = 16
# After that, pings of a path without traffic are ignored.
QUIET_NS = 60 * SECOND
# A QP more than these is not in its path's samples.
MOST_QPS = 64
# While a path is suspected it is asked so often what the NICs there have counted meanwhile.
COUNT_NS = 500 * MS
# The same path is told of again after that, at the earliest.
SAID_NS = 10 * SECOND
# A MOVE that has not come to its end by then is called off.
MOVE_NS = 5 * SECOND


class Slow(Struct, frozen=True):
    """A path that is slow, for those who look: device, the peer's address, what speaks for it, how many QPs it has."""

    device: str
    peer: str
    evidence: Evidence
    qps: int


class _Peer:
    """A peer as far as it is reached over the same rails. name: what the detector calls it."""

    def __init__(self, name: str, first: MeasuredQp) -> None:
        self.name = name
        self.paths = tuple(first.paths)
        self.address = str(first.peer.default.gid or first.peer.default.lid) if first.peer is not None else ""
        self.devices = [first.device(k) for k in range(first.n_pairs)]
        self.members: dict[MeasuredQp, None] = {}  # in order
        self.sample = _core.SendSample()
        self.rests = False  # between two samples
        self.rail = 0  # where its traffic is
        self.preferred = 0  # where we asked it to be
        self.target: int | None = None  # where it is on its way to
        self.ordered_ns = 0
        self.suspected_ns: int | None = None  # how far apart pings are wanted on its account
        self.pongs = 0  # of all its paths
        self.trains = 0  # that were answered
        # What the NICs of its rails had counted when it was suspected, and since then; and when that was last asked.
        self.counted_before: dict[int, dict[str, int]] = {}
        self.counted: dict[int, dict[str, int]] = {}
        self.asked_ns = 0
        self.asking: set[int] = set()  # rails of which that is not known yet
        self.heard_ns: int | None = None  # the end of its last sample
        self.quiet = True  # that was too long ago for anything to be asked on its account
        self.measured: list[_core.QPCore] = []  # whose sends
        self.posted = 0  # by all of these, when that was asked for
        # QPs whose oldest send is old: which one that is, and how many each had posted when that was first seen.
        self.old: dict[MeasuredQp, tuple[int, list[tuple[_core.QPCore, int]]]] = {}
        # QPs whose oldest send stands still while others go on, and which one that is.
        self.waiting: dict[MeasuredQp, int] = {}
        self.complete: int | None = None  # their WRs so far, at the last sample
        self.said_ns = -SAID_NS
        self.unsaid: Evidence | None = None  # it was too early to tell of that

    @property
    def learning(self) -> bool:
        """Whether it is not known yet what a round trip takes on its paths."""
        return self.pongs < LEARNING_PINGS * len(self.paths)


def _posted(core: _core.QPCore) -> int:
    """How many sends were posted there so far."""
    return core.oldest_wr + core.outstanding[0]


class SlowPaths:
    """The straggler detector of one process, fed. host: the driver; mode: what is done about a slow path.

    moves: how many were carried out. failed: it had an error of its own, and is off since. slow: paths that are slow,
    replaced as a whole.
    """

    def __init__(self, host: Host, mode: Mode) -> None:
        self.mode = mode
        self.moves = 0
        self.failed = False
        self.slow: tuple[Slow, ...] = ()
        #: Paths that are to be pinged often, and how far apart.
        self.dense: dict[ControlPath, int] = {}
        self._host = host
        self._detector = Stragglers(Settings(mode=mode, probe_ns=DENSE_PING_NS))
        self._peers: dict[tuple[ControlPath, ...], _Peer] = {}
        self._by_name: dict[str, _Peer] = {}
        self._by_path: dict[ControlPath, list[tuple[_Peer, int]]] = {}
        self._by_sample: dict[_core.SendSample, _Peer] = {}
        self._peer_of: dict[MeasuredQp, _Peer] = {}
        self._number = 0
        self._ended: collections.deque[_Peer] = collections.deque()
        self._resting: collections.deque[tuple[int, _Peer]] = collections.deque()
        self._moving: list[_Peer] = []
        self._left: list[_Peer] = []  # those that were moved, and have not come home since
        self._verdicts: dict[Path, Slow] = {}
        self._told: set[Path] = set()  # those of them that were told of
        self._silent: list[_Peer] = []
        self._without: list[_Peer] = []  # those that have left out some of their QPs

    # ---- what the driver tells --------------------------------------------------------------------------------------

    def joined(self, connection: MeasuredQp) -> None:
        """A connection is protected from now on."""
        self._safely(self._join, connection)

    def left(self, connection: MeasuredQp) -> None:
        """A connection was closed: nothing here names it any more."""
        self._safely(self._leave, connection)

    def waits(self, connection: MeasuredQp) -> None:
        """Its oldest send is outstanding for long."""
        self._safely(self._leave_out, connection)

    def look(self, now_ns: int) -> None:
        """The periodic look: take in what has ended, at most one sample, and do what follows."""
        self._safely(self._look, now_ns)

    def handle_pong(self, path: ControlPath, sent_ns: int, heard_ns: int) -> None:
        """A ping of that path was answered."""
        if path in self._by_path and heard_ns > sent_ns:
            self._safely(self._take_in_pong, path, sent_ns, heard_ns)

    def _safely(self, call: Callable[[*Args], None], *args: *Args) -> None:
        if self.failed:
            return
        try:
            call(*args)
        except Exception:
            self.failed = True
            with contextlib.suppress(Exception):
                self._end()
            logger.exception("the straggler detector failed, and is off in this process from now on")

    def _end(self) -> None:
        self.slow = ()
        self.dense = {}
        for peer in self._peers.values():
            peer.sample.drop()
        for path in self._by_path:
            self._host.channel.trains.want(path, None)
        for what in (
            self._peers,
            self._by_name,
            self._by_path,
            self._by_sample,
            self._peer_of,
            self._verdicts,
        ):
            what.clear()
        for those in (self._ended, self._resting, self._moving, self._left, self._silent, self._without):
            those.clear()
        self._told.clear()

    # ---- who is measured --------------------------------------------------------------------------------------------

    def _join(self, connection: MeasuredQp) -> None:
        key = tuple(connection.paths)
        peer = self._peers.get(key)
        is_new = peer is None
        if peer is None:
            self._number += 1
            instance = connection.peer.instance if connection.peer is not None else ""
            peer = _Peer(f"{instance} {self._number}", connection)
            self._peers[key] = self._by_name[peer.name] = peer
            self._by_sample[peer.sample] = peer
            for rail, path in enumerate(key):
                self._by_path.setdefault(path, []).append((peer, rail))
            self._detector.add_peer(peer.name, 0)
        if connection in peer.members:
            return
        self._leave(connection)  # where it went before
        peer.members[connection] = None
        self._peer_of[connection] = peer
        if peer.target is not None or peer.preferred:
            # The others have left, or are about to.
            at = peer.preferred if peer.target is None else peer.target
            self._host.later(connection, connection.feed, ev.PreferPair(at))
        if is_new:
            self._measure(peer)
        else:  # a thousand come one after the other
            self._rest(peer)

    def _leave(self, connection: MeasuredQp) -> None:
        peer = self._peer_of.pop(connection, None)
        if peer is None:
            return
        del peer.members[connection]
        peer.waiting.pop(connection, None)
        peer.old.pop(connection, None)
        if not peer.members:
            self._forget(peer)

    def _rest(self, peer: _Peer) -> None:
        """It is measured again in a while."""
        if not peer.rests:
            peer.rests = True
            self._resting.append((self._host.now_ns() + REST_NS, peer))

    def _there(self, peer: _Peer) -> list[MeasuredQp]:
        """Its connections that are protected and still go that way; others are forgotten."""
        for c in list(peer.members):
            if c.closed or c.status is not Status.PROTECTED or tuple(c.paths) != peer.paths:
                del peer.members[c]
                peer.waiting.pop(c, None)
                peer.old.pop(c, None)
                del self._peer_of[c]
        return list(peer.members)

    def _forget(self, peer: _Peer) -> None:
        if self._by_name.pop(peer.name, None) is None:
            return  # long since; who goes that way now is another one
        peer.sample.drop()
        peer.unsaid = None
        self._wishes(peer, 0)
        self._detector.forget_peer(peer.name)
        self._peers.pop(peer.paths, None)
        self._by_sample.pop(peer.sample, None)
        for path in peer.paths:
            left = [each for each in self._by_path.get(path, ()) if each[0] is not peer]
            if left:
                self._by_path[path] = left
            else:
                self._by_path.pop(path, None)
            self._wish_pings(path)
        for path_key in [key for key in self._verdicts if key.peer == peer.name]:
            del self._verdicts[path_key]
            self._told.discard(path_key)
        self.slow = tuple(self._verdicts.values())

    def _measure(self, peer: _Peer) -> None:
        """Have the next post there begin a sample."""
        members = self._there(peer)
        if not members:
            self._forget(peer)
            return
        rails = collections.Counter(c.send_pair for c in members)
        rail = peer.rail if peer.rail in rails else rails.most_common(1)[0][0]
        if rail != peer.rail:
            if peer.preferred:  # a failure has come between: what we wished for is over
                self._ask([c for c in members if c.preferred == peer.preferred], 0)
            self._wishes(peer, 0)
            self._arrived(peer, rail, None)
        for c in self._gone_on(peer):
            del peer.waiting[c]
        here = [c for c in members if c.send_pair == rail]
        # Where nobody goes on there is nothing else to measure.
        going = [c for c in here if c not in peer.waiting] or here
        there = [c.core for c in going[:MOST_QPS]]
        if there != peer.measured:
            peer.measured, peer.complete = there, None
        peer.posted = sum(map(_posted, there))
        peer.old.clear()
        peer.sample.want(there, rail)

    def _leave_out(self, connection: MeasuredQp) -> None:
        """Have others not wait for a QP whose sends wait, for a receive that is not posted or a poll, as they go on.

        They do where one is complete that was posted when its own was old already: on a path that is slow each send is
        old at some time, and those of before complete meanwhile.
        """
        peer = self._peer_of.get(connection)
        if peer is None or peer.target is not None or peer.rests or connection.core not in peer.measured:
            return
        before = peer.old.get(connection)
        if before is None or before[0] != connection.core.oldest_wr:
            cores = [*peer.measured, *(c.core for c in peer.waiting)]
            peer.old[connection] = connection.core.oldest_wr, [(core, _posted(core)) for core in cores]
        elif any(core.oldest_wr > posted for core, posted in before[1]):
            peer.waiting[connection] = connection.core.oldest_wr
            if peer not in self._without:
                self._without.append(peer)
            peer.sample.drop()
            self._rest(peer)

    def _take_back(self, peer: _Peer) -> None:
        """Those that go on again, where nobody else has posted: a sample of others may never begin."""
        if not peer.waiting or peer.name not in self._by_name:
            self._without.remove(peer)
        elif peer.target is None and self._gone_on(peer):
            if sum(map(_posted, peer.measured)) == peer.posted:
                self._rest(peer)

    @staticmethod
    def _gone_on(peer: _Peer) -> list[MeasuredQp]:
        """Of those that were left out."""
        return [c for c, wr in peer.waiting.items() if c.core.oldest_wr != wr]

    # ---- what is measured -------------------------------------------------------------------------------------------

    def _look(self, now_ns: int) -> None:
        for sample in self._host.machine.ended_samples():
            ended = self._by_sample.get(sample)
            if ended is not None and ended not in self._ended:
                self._ended.append(ended)
        while self._resting and self._resting[0][0] <= now_ns:
            _, peer = self._resting.popleft()
            peer.rests = False
            if peer.name in self._by_name and peer.target is None:
                self._measure(peer)
        if self._ended:
            peer = self._ended.popleft()
            if peer.name in self._by_name and peer.target is None:
                self._rest(peer)
                self._take_in(peer)
        for peer in list(self._moving):
            self._look_at_move(peer, now_ns)
        for peer in list(self._without):
            self._take_back(peer)
        if self._silent:
            self._break_silence(now_ns)
        if self._left:  # else nothing is to come home
            due_ns = self._detector.next_timeout_ns
            if due_ns is not None and now_ns >= due_ns:
                self._carry_out(self._detector.poll(now_ns))

    def _take_in(self, peer: _Peer) -> None:
        taken = peer.sample.take()
        if taken is None:
            return
        size, messages, began_ns, ended_ns, unseen_ns, begun_bytes = taken
        before, peer.complete = peer.complete, sum(core.oldest_wr for core in peer.measured)
        busy_ns = 0
        if peer.heard_ns is not None and before is not None:
            as_much = (peer.complete - before) / messages
            busy_ns = self._busy_ns(ended_ns - began_ns, ended_ns - peer.heard_ns, as_much)
        peer.heard_ns = ended_ns
        if peer.quiet:
            peer.quiet = False
            self._ping(peer)
        if peer.suspected_ns and ended_ns - peer.asked_ns >= COUNT_NS:
            self._count(peer)
        path = Path(peer.name, peer.rail)
        sample = Sample(path, size, messages, began_ns, ended_ns, unseen_ns, busy_ns, begun_bytes)
        self._carry_out(self._detector.handle_sample(sample))

    @staticmethod
    def _busy_ns(took_ns: int, since_ns: int, as_much: float) -> int:
        """For how long work was outstanding since the last sample, which the data path does not measure.

        took_ns: the sample; since_ns: the time; as_much: the WRs that were complete since then, as a multiple of the
        sample's. Where all of them are alike, that is right.
        """
        return max(took_ns, min(since_ns, round(took_ns * as_much)))

    def _take_in_pong(self, path: ControlPath, sent_ns: int, heard_ns: int) -> None:
        behind_a_train = self._host.channel.trains.handle_pong(path, sent_ns, heard_ns)
        for peer, rail in list(self._by_path[path]):
            if peer.quiet or peer.name not in self._by_name:
                continue
            if peer.heard_ns is None or heard_ns - peer.heard_ns >= QUIET_NS:
                peer.quiet = True
                self._ping(peer)
                continue
            peer.pongs += 1
            if peer.pongs == LEARNING_PINGS * len(peer.paths):
                self._ping(peer)
            there = Path(peer.name, rail)
            if not behind_a_train:
                self._detector.handle_ping(Ping(there, sent_ns, heard_ns))
            elif rail != peer.rail and peer.target is None:
                if not peer.suspected_ns:  # else it teaches nothing
                    peer.trains += 1
                    if peer.trains == LEARNING_TRAINS:
                        self._wish_trains(path)
                train = Sample(there, TRAIN_BYTES, TRAIN_MESSAGES, sent_ns, heard_ns, probe=True)
                self._carry_out(self._detector.handle_sample(train))

    def _wish_trains(self, path: ControlPath) -> None:
        """Have trains go over a path as often as those want that could move there, or come home."""
        if self._host.channel.paths.get(path.key) is not path:
            return  # it is closed, and forgotten there
        each = None
        for peer, rail in self._by_path.get(path, ()):
            if self.mode is Mode.MIGRATE and rail != peer.rail and not peer.quiet:
                learning = peer.learning or peer.trains < LEARNING_TRAINS
                wanted = DENSE_TRAIN_EACH if peer.suspected_ns or learning else TRAIN_EACH
                each = min(each or wanted, wanted)
        self._host.channel.trains.want(path, each)

    def _ping(self, peer: _Peer) -> None:
        """Have its paths pinged as often as is needed now."""
        for path in peer.paths:
            self._wish_pings(path)

    def _wish_pings(self, path: ControlPath) -> None:
        """Have a path pinged as often as any of those wants that go there."""
        self._wish_trains(path)
        there = [peer for peer, _ in self._by_path.get(path, ()) if not peer.quiet]
        wanted = [peer.suspected_ns or (LEARNING_PING_NS if peer.learning else None) for peer in there]
        interval_ns = min((each for each in wanted if each is not None), default=None)
        if interval_ns is None:
            self.dense.pop(path, None)
        else:
            self.dense[path] = interval_ns
            path.ping.interval_ns = min(path.ping.interval_ns, interval_ns)
            path.ping.hurry(self._host.now_ns())

    def _count(self, peer: _Peer) -> None:
        """Have the threads that look at the NICs of its rails read what these count."""
        peer.asked_ns = self._host.now_ns()
        for rail, path in enumerate(peer.paths):
            if rail in peer.asking:
                continue  # it hangs
            peer.asking.add(rail)
            path.nic.look_again(functools.partial(self._read_counters, peer.name, rail, path.nic.name))

    def _read_counters(self, name: str, rail: int, device: str) -> None:
        """On such a thread, for which others wait: it raises nothing there."""
        found: dict[str, int] | Exception
        try:
            found = congestion.read([device]).get(device, {})
        except Exception as error:
            found = error
        self._host.post(functools.partial(self._safely, self._take_in_counters, name, rail, found))

    def _take_in_counters(self, name: str, rail: int, found: dict[str, int] | Exception) -> None:
        if isinstance(found, Exception):
            raise found
        peer = self._by_name.get(name)
        if peer is not None:
            peer.asking.discard(rail)
            before = peer.counted_before.setdefault(rail, {})
            # What could not be read at first counts from when it could.
            grown = {what: count - before.setdefault(what, count) for what, count in found.items()}
            peer.counted[rail] = {what: by for what, by in grown.items() if by > 0}

    # ---- what follows -----------------------------------------------------------------------------------------------

    def _carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Observe():
                    self._observed(self._by_name[action.evidence.path.peer], action.evidence)
                case Recovered():
                    self._recovered(self._by_name[action.path.peer], action.path)
                case Probe():
                    peer = self._by_name[action.peer]
                    peer.suspected_ns = action.interval_ns
                    self._ping(peer)
                    if action.interval_ns is not None:
                        peer.counted_before, peer.counted = {}, {}
                        self._count(peer)
                case Move():
                    evidence = action.evidence
                    why = f"{evidence.ratio:.1f} times as slow as when it was well"
                    self._order(self._by_name[action.path.peer], action.target, why)
                case Return():
                    self._order(self._by_name[action.path.peer], action.path.rail, action.reason)

    def _observed(self, peer: _Peer, evidence: Evidence) -> None:
        now_ns = self._host.now_ns()
        device = peer.devices[evidence.path.rail]
        peer.unsaid = None
        self._verdicts[evidence.path] = Slow(device, peer.address, evidence, len(peer.members))
        self.slow = tuple(self._verdicts.values())
        self._host.totals.slow_path(device, evidence.attribution.name.lower())
        if now_ns - peer.said_ns < SAID_NS:
            peer.unsaid = evidence
            if peer not in self._silent:
                self._silent.append(peer)
        else:
            self._say(peer, evidence, now_ns)

    def _break_silence(self, now_ns: int) -> None:
        """Tell of what it was too early for, where it is so still."""
        for peer in [each for each in self._silent if now_ns - each.said_ns >= SAID_NS]:
            self._silent.remove(peer)
            evidence, peer.unsaid = peer.unsaid, None
            if evidence is not None and evidence.path in self._verdicts:
                self._say(peer, evidence, now_ns)

    def _say(self, peer: _Peer, evidence: Evidence, now_ns: int) -> None:
        device = peer.devices[evidence.path.rail]
        peer.said_ns = now_ns
        self._told.add(evidence.path)
        counted = peer.counted.get(evidence.path.rail, {})
        logger.log(
            logging.WARNING if evidence.attribution is Attribution.PATH else logging.INFO,
            "%s to %s is slow: %.1f times as long as when it was well, for %.1f s, in %d samples; %.2f s lost; %s%s",
            device,
            peer.address,
            evidence.ratio,
            (now_ns - evidence.since_ns) / SECOND,
            evidence.samples,
            evidence.lost_ns / SECOND,
            "".join(f"{name} +{by}, " for name, by in counted.items()),
            evidence.attribution.value,
        )
        self._publish(
            peer,
            lambda qp_num, own: observe.Straggler(
                qp_num=qp_num,
                device=own,
                path=device,
                peer=peer.address,
                ratio=evidence.ratio,
                since_ns=evidence.since_ns,
                samples=evidence.samples,
                lost_ns=evidence.lost_ns,
                counted=counted,
                fault=evidence.attribution.name.lower(),
                qp_nums=tuple(c.shadow.qp_num for c in peer.members),
            ),
        )

    def _publish(self, peer: _Peer, event: Callable[[int, str], observe.Event]) -> None:
        """event: makes it, of one of the QPs: from its number and its device."""
        first = next(iter(peer.members), None)
        if first is None:
            return
        self._host.aside(functools.partial(observe.publish, event(first.shadow.qp_num, first.device(0))))

    def _recovered(self, peer: _Peer, path: Path) -> None:
        if self._verdicts.pop(path, None) is None:
            return
        self.slow = tuple(self._verdicts.values())
        if path not in self._told:
            return
        self._told.discard(path)
        device = peer.devices[path.rail]
        logger.info("%s to %s is as it was before", device, peer.address)
        self._publish(
            peer,
            lambda qp_num, own: observe.StragglerOver(
                qp_num=qp_num, device=own, path=device, peer=peer.address
            ),
        )

    # ---- moves ------------------------------------------------------------------------------------------------------

    def _obstacle(self, peer: _Peer, members: list[MeasuredQp], target: int) -> str | None:
        """Why it is not moved to that rail, or None."""
        for c in members:
            p = c.protocol
            if p is None or p.over or p.busy:
                return "something else is under way"
            if p.preferred != peer.preferred:
                return "somebody has asked for another rail"
            if p.pairs[target].dead or p.pairs[target].alive is False:
                return f"{peer.devices[target]} does not answer"
            if not p.pairs[target].clean and target not in (p.send_pair, p.recv_pair):
                return p.unfit(target) or "the pair there is not fit"
        return None if members else "nothing is there any more"

    def _order(self, peer: _Peer, target: int, why: str) -> None:
        now_ns = self._host.now_ns()
        members = self._there(peer)
        obstacle = self._obstacle(peer, members, target)
        if obstacle is not None:
            self._detector.handle_refused(peer.name, now_ns)
            logger.info("%s to %s is kept: %s", peer.devices[peer.rail], peer.address, obstacle)
            return
        if (
            peer.unsaid is not None
        ):  # nobody is moved without being told why, however lately something else was told
            evidence, peer.unsaid = peer.unsaid, None
            self._say(peer, evidence, now_ns)
        logger.warning(
            "moving %d QPs to %s from %s to %s: %s",
            len(members),
            peer.address,
            peer.devices[peer.rail],
            peer.devices[target],
            why,
        )
        peer.sample.drop()
        peer.target, peer.ordered_ns = target, now_ns
        self._moving.append(peer)
        self._ask(members, target)

    def _ask(self, members: list[MeasuredQp], pair: int) -> None:
        """What `qp.shift.migrate(pair)` asks for."""
        for c in members:
            self._host.later(c, c.feed, ev.PreferPair(pair))

    def _look_at_move(self, peer: _Peer, now_ns: int) -> None:
        members = self._there(peer)
        target = peer.target
        if peer.name not in self._by_name or not members or target is None:
            self._moving.remove(peer)
            self._forget(peer)
        elif all((c.send_pair, c.recv_pair) == (target, target) for c in members):
            self._moving.remove(peer)
            self.moves += 1
            self._host.totals.straggler_moves += 1
            peer.target = None
            self._wishes(peer, target)
            self._arrived(peer, target, max(1, now_ns - peer.ordered_ns))
            self._measure(peer)
        elif now_ns - peer.ordered_ns >= MOVE_NS:
            self._moving.remove(peer)
            peer.target = None
            # Somebody else's wish, since, stays.
            asked = [c for c in members if c.protocol and c.protocol.preferred in (target, peer.preferred)]
            self._ask(asked, peer.preferred)
            self._detector.handle_refused(peer.name, now_ns)
            logger.info("%s to %s is kept: the move took too long", peer.devices[peer.rail], peer.address)
            self._measure(peer)

    def _wishes(self, peer: _Peer, pair: int) -> None:
        """That is where we asked its traffic to be."""
        peer.preferred = pair
        if pair and peer not in self._left:
            self._left.append(peer)
        elif not pair and peer in self._left:
            self._left.remove(peer)

    def _arrived(self, peer: _Peer, rail: int, took_ns: int | None) -> None:
        """Its traffic is on that rail now. took_ns: how long a move of ours took; None: it was not ours."""
        peer.rail = rail
        peer.heard_ns, peer.quiet = None, True
        for path in peer.paths:
            self._wish_trains(path)
        self._carry_out(self._detector.handle_moved(peer.name, rail, self._host.now_ns(), took_ns))
        self._recovered(peer, Path(peer.name, rail))  # or it will be told of anew
