# SPDX-License-Identifier: BSD-3-Clause
"""The periodic look at one QP: completions that nobody polls for, work that is too old, ports that are down.

And what a user should hear of a QP at work: it is not protected yet, nothing could fail over to one of its pairs.
Runs under the driver's lock, for one connection.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct

from shiftverbs.failover.qp import changes
from shiftverbs.failover.qp.changes import ChangedQp
from shiftverbs.protocol import events as ev
from shiftverbs.protocol.events import Status
from shiftverbs.protocol.path_health import PROBE_NS, PingState
from shiftverbs.protocol.silence import Silence

if TYPE_CHECKING:
    from shiftverbs.failover.qp.absence import Absence
    from shiftverbs.failover.qp.early_errors import EarlyErrors
    from shiftverbs.failover.qp.requirement import Requirement
    from shiftverbs.protocol.pair import PairProtocol

# Work this old makes us check whether its path is alive, whatever it usually takes.
AGE_NS = 1_000_000_000
# Between pings where path health matters.
URGENT_PING_NS = 50_000_000
# While a work request has failed and not completed: an outage is to be seen, not to be taken for a fault of the work
# request's. No shorter than an answer takes on a busy machine.
STUCK_PING_NS = 25_000_000
# Each QP is looked at so often; one with work under way again after that, and while its path is in doubt.
WATCH_PERIOD_NS = 20_000_000
WORK_LOOK_NS = 10_000_000
DOUBT_LOOK_NS = 4_000_000
# That a path counts as dead and another is alive says little for so long: a peer that goes on after a stop is heard on
# one first.
ONLY_HERE_NS = 100_000_000
# A QP that works and is not protected for this long is reported.
PAIRING_NS = 5_000_000_000
# A pair that could not be connected for this long is reported.
UNFIT_NS = 3_000_000_000


class _Unfit(Struct):
    """A pair that nothing can fail over to: since when, for which reason and since when for that, what was said."""

    since_ns: int
    reason: str
    reason_since_ns: int
    said: set[str] = set()  # each has its own
    text: str | None = None  # what was said last


class WatchedQp(ChangedQp, Protocol):
    """A connection that is watched."""

    @property
    def absence(self) -> Absence:
        """What is known of the peer's whereabouts."""

    @property
    def early(self) -> EarlyErrors:
        """Its errors before it is protected."""

    @property
    def requirement(self) -> Requirement:
        """What is required of it."""

    @property
    def shown_why(self) -> str | None:
        """For `qp.shift.why`."""

    @property
    def send_state(self) -> str:
        """Name of the send state."""

    @property
    def recv_state(self) -> str:
        """Name of the receive state."""


class Watchdog:
    """What was seen of one connection's work.

    stuck_wr: the send WR that failed last, until it has completed. is_old: its oldest send is outstanding for AGE_NS.
    again_ns: when it is to be looked at again, from the last look on.
    """

    # The first for tests, which put others in the place of some methods.
    __slots__ = (
        "__dict__",
        "_aging",
        "_c",
        "_dead_ns",
        "_last_polled",
        "_only_here",
        "_only_here_ns",
        "_pairing_since_ns",
        "_pairing_told",
        "_silence",
        "_unfit",
        "again_ns",
        "is_old",
        "stuck_wr",
    )

    def __init__(self, connection: WatchedQp) -> None:
        self._c = connection
        self._last_polled = 0
        self.forget()

    def forget(self) -> None:
        """Another pairing, or none."""
        self.stuck_wr: int | None = None
        self.is_old = False
        # The pair that carries the sends, if it counts as dead; since when it is missed, and another answers.
        self._only_here: int | None = None
        self._dead_ns = 0
        self._only_here_ns: int | None = None
        self._silence = Silence()
        self.again_ns = WATCH_PERIOD_NS
        self._aging = False
        self._unfit: dict[int, _Unfit] = {}
        self._pairing_since_ns: int | None = None
        self._pairing_told = False

    @property
    def pings_ns(self) -> int | None:
        """How dense pings are wanted on its paths right now: work is old, or not everything is at home and fit."""
        c = self._c
        p = c.protocol
        if p is None or p.over or c.closed:
            return None
        if self.stuck_wr is not None and c.core.oldest_wr > self.stuck_wr:
            self.stuck_wr = None
        if self._silence.asks:
            return PROBE_NS
        if self.stuck_wr is not None:
            return STUCK_PING_NS
        if self._aging or c.send_state != "DEFAULT" or c.recv_state != "DEFAULT" or not p.all_fit:
            return URGENT_PING_NS
        return None

    def watch(self, now_ns: int) -> None:
        """Look once, and do what follows."""
        c = self._c
        self.is_old = False
        self.again_ns = WATCH_PERIOD_NS
        self._watch_pairing(now_ns)
        if c.early.waits and not c.closed:
            c.early.look()
            self._drain_unpolled(0)
        c.requirement.watch(now_ns)
        p = c.protocol
        if p is None or p.over or c.closed:
            return
        if not p.switching:
            c.absence.watch(now_ns)
        self._watch_fitness(p, now_ns)
        if c.status is not Status.PROTECTED:
            return
        sends = self._drain_unpolled(p.send_pair)
        if p.switching:
            self._silence.rest()
            self._only_here = None
        else:
            self._watch_paths(p, now_ns, sends)

    def _drain_unpolled(self, k: int) -> int:
        """Take what has completed on pair k where nobody has polled since the last look; how many sends there were."""
        core = self._c.core
        sends: int = core.outstanding[0]
        polled = core.send_cq.polled
        if sends and polled == self._last_polled:
            self._c.drain(k)
        self._last_polled = polled
        return sends

    def _watch_paths(self, p: PairProtocol, now_ns: int, sends: int) -> None:
        """Leave a path that carries traffic, and should not."""
        c, at = self._c, p.send_pair
        age_ns = c.core.oldest_post_age(now_ns)
        silence = self._silence
        silent = silence.look(now_ns, c.core.oldest_wr, age_ns, c.paths[at].ping, self._others)
        if silence.works:
            self.again_ns = DOUBT_LOOK_NS if silence.asks else WORK_LOOK_NS
        for k in {p.send_pair, p.recv_pair}:
            if not c.driver.nic_events.port_ok(c.nic(k), c.port(k)):
                c.evidence.path_failed(k, f"the port of {c.device(k)} is down", now_ns, advisory=True)
                return
        for k in list(c.unlike):
            if k not in (p.send_pair, p.recv_pair) or not changes.is_unlike(c, k):
                c.unlike.discard(k)
            else:
                c.evidence.path_failed(k, changes.UNLIKE, now_ns, advisory=True)
                return
        # Whether it comes back is to be seen soon, too.
        self._aging = silent or bool(sends and age_ns > AGE_NS // 4)
        self.is_old = bool(sends and age_ns > AGE_NS)
        is_only_here = self._is_only_here(at, now_ns)
        if silent:
            self._tell_dead_paths(at, now_ns)
            reason = f"no completion on {c.device(at)}, and no answer to pings, which come on another path"
            c.evidence.path_failed(at, reason, now_ns, advisory=True)
        elif self.is_old and is_only_here:
            reason = f"no completion on {c.device(at)} and no answer to pings"
            c.evidence.path_failed(at, reason, now_ns, advisory=True)

    def _is_only_here(self, at: int, now_ns: int) -> bool:
        """Whether pair `at` counts as dead, and another path, which is alive, has answered later for ONLY_HERE_NS.

        That another has not been missed yet says nothing: where answers take longer it is later.
        """
        path = self._c.paths[at].ping
        if path.alive is not False:
            self._only_here = None
            return False
        if self._only_here != at:
            missing_ns = path.missing_since(0, 1)
            self._only_here, self._only_here_ns = at, None
            self._dead_ns = now_ns if missing_ns is None else missing_ns
        alive = [other for other in self._others() if other.alive]
        if not alive:
            self._only_here_ns = None
        elif self._only_here_ns is None and any(other.answered_sent_ns > self._dead_ns for other in alive):
            self._only_here_ns = now_ns
        return self._only_here_ns is not None and now_ns - self._only_here_ns >= ONLY_HERE_NS

    def _tell_dead_paths(self, at: int, now_ns: int) -> None:
        """Pair `at` is silent, and so may others be that are on one switch with it: nobody is to be asked there.

        The driver's news of a path that counts as dead, which another QP may have found, comes too late for that.
        """
        c = self._c
        for k, path in enumerate(c.paths):
            if k == at:
                continue
            if self._silence.is_missing_too(now_ns, path.ping):
                c.driver.channel.suspect(path, now_ns, is_known=True)
            if path.ping.alive is False:
                c.feed(ev.PathHealth(k, False))

    def _others(self) -> list[PingState]:
        """The paths to the peer over other NICs than the one that carries its sends."""
        c = self._c
        at = c.nic(c.send_pair)
        return [path.ping for k, path in enumerate(c.paths) if c.nic(k) is not at]

    def _watch_pairing(self, now_ns: int) -> None:
        """Tell once of a QP that is at work and not protected yet, and why; and when it is, after that."""
        c = self._c
        if c.closed:
            return
        say, number = c.driver.announcements.say, c.shadow.qp_num
        if c.status is Status.PROTECTED and self._pairing_told:
            self._pairing_told = False
            say(logging.INFO, number, "is protected now")
        if c.status is not Status.PAIRING or "RTS" not in c.shadow.transitions:
            self._pairing_since_ns = None
        elif self._pairing_since_ns is None:
            self._pairing_since_ns = now_ns
        elif not self._pairing_told and now_ns - self._pairing_since_ns >= PAIRING_NS:
            self._pairing_told = True
            after = f"{PAIRING_NS // 10**9} s after it was connected"
            say(logging.WARNING, number, f"is not protected, {after}: {c.shown_why}")

    @property
    def lacking(self) -> str | None:
        """What was reported of a pair that nothing can fail over to, while it is so; None where there is none."""
        p = self._c.protocol
        for k, unfit in list(self._unfit.items()):
            if unfit.text is not None and p is not None and k < len(p.pairs) and p.unfit(k) is not None:
                return unfit.text
        return None

    def _watch_fitness(self, p: PairProtocol, now_ns: int) -> None:
        """Tell of pairs that cannot be connected, and why: once each, and again if that is another reason.

        A pair that is on its way back changes its reason in each step: only one that stays is told, or the first.
        """
        c = self._c
        for k in range(c.n_pairs):
            reason = p.unfit(k)
            if reason is None:
                self._unfit.pop(k, None)
                continue
            unfit = self._unfit.setdefault(k, _Unfit(now_ns, reason, now_ns))
            if reason != unfit.reason:
                unfit.reason, unfit.reason_since_ns = reason, now_ns
            text = f"nothing can fail over to pair {k}, on {c.device(k)}: {reason}"
            if k and c.why != text and now_ns > unfit.since_ns:
                c.set_why(text)
            since_ns = unfit.reason_since_ns if unfit.said else unfit.since_ns
            if now_ns - since_ns < UNFIT_NS:
                continue
            unfit.text = text
            if reason not in unfit.said:
                unfit.said.add(reason)
                c.driver.announcements.say(logging.WARNING, c.shadow.qp_num, text)
