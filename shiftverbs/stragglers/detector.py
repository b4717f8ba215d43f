# SPDX-License-Identifier: BSD-3-Clause
"""The door: samples and pings in, actions out; all paths of a process, its peers' traffic decided on one by one."""

from __future__ import annotations

from shiftverbs.stragglers import verdict
from shiftverbs.stragglers.decision import Decision
from shiftverbs.stragglers.records import (
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
from shiftverbs.stragglers.verdict import PathWatch, Suspicion

# Whose fault it is is asked at every so many readings more.
ASKED_EACH = 4
# And it must have been the same so many times in a row to be said, and to be said otherwise later.
AGREED = 2
AGREED_AGAIN = 8
# Home is looked at for so long before traffic comes back.
LOOK_NS = 10 * SECOND
# While home is not well it is asked again after that.
AGAIN_NS = SECOND
# A path that was moved to must be better than the one it was moved off, by so many readings.
TRIAL = 16


class _Peer:
    """All that is known of one peer."""

    def __init__(self, decision: Decision) -> None:
        self.paths: dict[int, PathWatch] = {}
        self.decision = decision
        self.probed = False
        self.look_ns = 0  # home was not well: not before that
        # Since the last move, by what home takes when it is well.
        self.trial = verdict.Part()

    @property
    def trusted(self) -> bool:
        """Whether nobody thinks that one of its paths is slow: only then is learned what is healthy."""
        return all(path.suspicion is None for path in self.paths.values())


class Stragglers:
    """All paths of a process.

    settings: what counts as slow, and what is done.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._peers: dict[str, _Peer] = {}

    def add_peer(self, peer: str, home: int) -> None:
        """There is traffic to `peer`, over rail `home`. Raises ValueError where it is known already."""
        if peer in self._peers:
            raise ValueError(f"{peer} is known already")
        self._peers[peer] = _Peer(Decision(home, self.settings))

    def forget_peer(self, peer: str) -> None:
        """There is no traffic to `peer` any more; nothing happens where it is not known."""
        self._peers.pop(peer, None)

    def _peer(self, peer: str) -> _Peer:
        try:
            return self._peers[peer]
        except KeyError:
            raise ValueError(f"{peer} is not known: add_peer() first") from None

    def watch(self, path: Path) -> PathWatch:
        """What is known of a path. Raises ValueError for a peer that is not known."""
        paths = self._peer(path.peer).paths
        if path.rail not in paths:
            paths[path.rail] = PathWatch(path, self.settings)
        return paths[path.rail]

    def handle_sample(self, sample: Sample) -> list[Action]:
        """A sample ended. Raises ValueError for a peer that is not known."""
        watch = self.watch(sample.path)
        if self.settings.mode is Mode.OFF:
            return []
        peer = self._peer(sample.path.peer)
        actions: list[Action] = []
        dropped = watch.handle_sample(sample, peer.trusted)
        if dropped is not None and dropped.attribution is not None:
            actions.append(Recovered(sample.path, dropped.since_ns))
        watch.settle(sample.ended_ns, [other for other in peer.paths.values() if other is not watch])
        self._try(peer, sample, actions)
        there = sample.path.rail == peer.decision.rail and not (sample.probe or peer.decision.moving)
        if watch.suspicion is not None and there and watch.suspicion.grown(ASKED_EACH):
            self._judge(peer, watch, watch.suspicion, actions)
        return self._probe(sample.path.peer, peer, actions)

    def _probe(self, name: str, peer: _Peer, actions: list[Action]) -> list[Action]:
        busy = peer.paths.get(peer.decision.rail)
        suspected = busy is not None and busy.suspicion is not None
        if suspected != peer.probed:
            peer.probed = suspected
            actions.append(Probe(name, self.settings.probe_ns if suspected else None))
        return actions

    def _judge(self, peer: _Peer, watch: PathWatch, suspicion: Suspicion, actions: list[Action]) -> None:
        """Verify, attribute, decide."""
        suspicion.verified = suspicion.verified or suspicion.lasts(self.settings)
        if not suspicion.verified:
            return
        rails = [other for other in peer.paths.values() if other is not watch]
        elsewhere = [
            path for other in self._peers.values() if other is not peer for path in other.paths.values()
        ]
        attribution, better = verdict.attribute(watch, rails, elsewhere, self.settings)
        suspicion.find(attribution)
        if suspicion.found_times < (AGREED if suspicion.attribution is None else AGREED_AGAIN):
            return
        whole = suspicion.whole
        evidence = Evidence(
            watch.path, whole.ratio, suspicion.since_ns, whole.readings, suspicion.lost_ns, attribution
        )
        if attribution is not suspicion.attribution:
            suspicion.attribution = attribution
            actions.append(Observe(evidence))
        cut_short = attribution is Attribution.UNKNOWN and any(rail.was_cut_short for rail in rails)
        if cut_short and suspicion.found_times >= AGREED_AGAIN and not peer.decision.left_home:
            self._learn_anew(peer, watch, suspicion, actions)
            return
        if attribution is not Attribution.PATH or self.settings.mode is not Mode.MIGRATE:
            return
        decision, now_ns = peer.decision, suspicion.latest_ns
        if not decision.may_move(now_ns) or not decision.pays(suspicion.lost_ns):
            return
        targets = [other for other in better if self._would_help(watch, other)]
        if decision.left_home and decision.home in [other.path.rail for other in targets]:
            # Left because it was slow, and pings may not show that: only if it was less so.
            if whole.ratio > decision.left_ratio:
                decision.order_return(True, now_ns)
                actions.append(
                    Return(Path(watch.path.peer, decision.home), "slower here than it was at home")
                )
                return
            targets = [other for other in targets if other.path.rail != decision.home]
        if targets:
            target = min(targets, key=lambda other: other.path.rail)
            decision.order_move(whole.ratio, now_ns)
            actions.append(Move(watch.path, target.path.rail, evidence))

    @staticmethod
    def _learn_anew(peer: _Peer, watch: PathWatch, suspicion: Suspicion, actions: list[Action]) -> None:
        """What a path takes has changed for good before it was known what the others take, which is learned no more.

        So nothing is known that is of use: what they take from now on is the custom. Machines that get busy just after
        a program has begun are like that.
        """
        actions.append(Recovered(watch.path, suspicion.since_ns))
        peer.paths.clear()

    def _would_help(self, watch: PathWatch, other: PathWatch) -> bool:
        """Whether another path takes less for what this one carried of late, as far as that path was ever used."""
        observed_ns = expected_ns = 0.0
        for reading in watch.recent:
            if not reading.unclear:
                observed_ns += reading.observed_ns
                expected_ns += other.healthy.predict(reading.sample) or reading.predicted_ns
        return observed_ns > expected_ns * self.settings.slow_ratio

    def _try(self, peer: _Peer, sample: Sample, actions: list[Action]) -> None:
        """Whether it is any better where traffic was moved to; home if not."""
        decision = peer.decision
        if not decision.left_home or decision.moving or sample.path.rail != decision.rail:
            return
        home = peer.paths.get(decision.home)
        reading = home.healthy.read(sample) if home is not None else None
        if reading is None or sample.began_ns < decision.moved_ns or peer.trial.readings >= 4 * TRIAL:
            return
        peer.trial.add(verdict.part_of(reading))
        if peer.trial.readings < TRIAL or sample.ended_ns - decision.moved_ns < self.settings.least_ns:
            return
        if peer.trial.ratio >= decision.left_ratio and decision.may_move(sample.ended_ns):
            decision.order_return(True, sample.ended_ns)
            actions.append(Return(Path(sample.path.peer, decision.home), "no better here than at home"))

    def handle_ping(self, ping: Ping) -> None:
        """A ping was answered. Raises ValueError for a peer that is not known."""
        watch = self.watch(ping.path)
        watch.handle_ping(ping, self._peer(ping.path.peer).trusted)

    def handle_moved(self, peer: str, rail: int, now_ns: int, took_ns: int | None = None) -> list[Action]:
        """What goes to `peer` is on `rail` now.

        took_ns: how long a MOVE that was ordered kept work waiting; None where somebody else moved it.
        Raises ValueError for a peer that is not known.
        """
        known = self._peer(peer)
        actions: list[Action] = []
        for watch in known.paths.values():
            dropped = watch.forget()
            if dropped is not None and dropped.attribution is not None and watch.path.rail == rail:
                actions.append(Recovered(watch.path, dropped.since_ns))
        known.trial = verdict.Part()
        known.look_ns = 0
        decision = known.decision
        if decision.left_home and rail == decision.home:
            self.watch(Path(peer, rail)).relapse_until_ns = now_ns + decision.hold_ns
        decision.handle_moved(rail, now_ns, took_ns)
        self.watch(Path(peer, decision.home)).left = decision.left_home
        return self._probe(peer, known, actions)

    def handle_refused(self, peer: str, now_ns: int) -> None:
        """A MOVE that was ordered did not take place. Raises ValueError for a peer that is not known."""
        self._peer(peer).decision.handle_refused(now_ns)

    def poll(self, now_ns: int) -> list[Action]:
        """What time alone brings: coming home. To be called when `next_timeout_ns` has passed."""
        actions: list[Action] = []
        for name, peer in self._peers.items():
            due_ns = self._return_ns(peer)
            if due_ns is None or now_ns < due_ns:
                continue
            if not self._well(peer, now_ns) or not peer.decision.may_move(now_ns):
                peer.look_ns = now_ns + AGAIN_NS
                continue
            peer.decision.order_return(False, now_ns)
            actions.append(Return(Path(name, peer.decision.home), "it is time to try home again"))
        return actions

    def _well(self, peer: _Peer, now_ns: int) -> bool:
        """Whether home's pings and probes are as they should be."""
        home = peer.paths.get(peer.decision.home)
        if home is None:
            return False
        others = [path for path in peer.paths.values() if path is not home]
        pings = home.ping_ratio(now_ns - LOOK_NS)
        probes = home.probe_ratio(now_ns - LOOK_NS, others)
        return pings is not None and max(pings, probes or 1.0) <= verdict.SLOW_PINGS

    @staticmethod
    def _return_ns(peer: _Peer) -> int | None:
        due_ns = peer.decision.return_ns
        return None if due_ns is None else max(due_ns, peer.look_ns)

    @property
    def next_timeout_ns(self) -> int | None:
        """When `poll` wants to be called, or None."""
        return min(
            (due for peer in self._peers.values() if (due := self._return_ns(peer)) is not None), default=None
        )
