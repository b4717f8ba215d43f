# SPDX-License-Identifier: BSD-3-Clause
"""One protected QP at work: carries out the actions of its PairProtocol on the hardware.

Everything here runs under the driver's lock. NIC commands go to the NIC's own thread and come back as events; posts
and polls are done at once. Nothing here decides anything: that is protocol/pair.py's.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from msgspec.structs import replace
from pyverbs.pyverbs_error import PyverbsRDMAError

from shiftverbs import _core
from shiftverbs.exchanger.records import QpRecord
from shiftverbs.failover.qp import changes
from shiftverbs.failover.qp.absence import Absence
from shiftverbs.failover.qp.connection_keys import ConnectionKeys
from shiftverbs.failover.qp.drain import Fence
from shiftverbs.failover.qp.early_errors import EarlyErrors
from shiftverbs.failover.qp.ending import FLUSHED, Ending
from shiftverbs.failover.qp.evidence import Evidence
from shiftverbs.failover.qp.key_wait import KeyWait
from shiftverbs.failover.qp.pairing import Pairing, PeerShown
from shiftverbs.failover.qp.rebuild import Rebuild
from shiftverbs.failover.qp.reports import Reports
from shiftverbs.failover.qp.requirement import Requirement
from shiftverbs.failover.qp.timeline import Timeline
from shiftverbs.failover.qp.watchdog import Watchdog
from shiftverbs.failover.services.control_channel import Path
from shiftverbs.failover.services.host import AnyCall, Host, LocalPort
from shiftverbs.native.ibv import AccessFlag, QpState, WcStatus
from shiftverbs.protocol import events as ev
from shiftverbs.protocol.codec import Entry
from shiftverbs.protocol.draws import Draws
from shiftverbs.protocol.events import Action, Status
from shiftverbs.protocol.messages import Arm, Keys, Message, Move, Phase, Sync, WantKeys
from shiftverbs.protocol.pair import LocalPair, PairProtocol
from shiftverbs.state_machine import RecvState, SendState

if TYPE_CHECKING:
    from shiftverbs.shadows.nic import Nic
    from shiftverbs.shadows.qp import ShadowQP

logger = logging.getLogger("shiftverbs.driver")

# The peer's NIC has refused.
REFUSED = (WcStatus.REM_INV_REQ_ERR, WcStatus.REM_ACCESS_ERR, WcStatus.REM_OP_ERR)
# Bits of EV_KEY_MISSING.
KEY_REMOTE, KEY_UNSHADOWABLE = 1, 2


class Connection:
    """A candidate for protection: its pairing, its protocol once paired, its place on the hardware.

    shadow: the QP's ShadowQP. status and why: what `qp.shift` shows.
    """

    # The first for tests, which put others in the place of some methods.
    __slots__ = (
        "__dict__",
        "_active",
        "_feeding",
        "_fence_refused",
        "_inbox",
        "_looked_for",
        "_ports",
        "_rx_target",
        "absence",
        "closed",
        "core",
        "driver",
        "early",
        "ending",
        "evidence",
        "fence",
        "given",
        "key_wait",
        "keys",
        "n_pairs",
        "pairing",
        "paths",
        "peer",
        "protocol",
        "rebuild",
        "reports",
        "requirement",
        "shadow",
        "status",
        "superseded",
        "timeline",
        "timer_ns",
        "unlike",
        "was_protected",
        "watchdog",
        "why",
    )

    def __init__(self, driver: Host, shadow: ShadowQP) -> None:
        self.driver = driver
        self.shadow = shadow
        self.core = shadow.core
        self.status = Status.PAIRING
        self.why: str | None = "the QP is not connected yet"
        self.pairing = Pairing(self)
        self.keys = ConnectionKeys(self)
        self.key_wait = KeyWait(self)
        self.timeline = Timeline()
        self.ending = Ending(self)
        self.requirement = Requirement(self)
        self.reports = Reports(self)
        self.absence = Absence(self)
        self.evidence = Evidence(self)
        self.watchdog = Watchdog(self)
        self.early = EarlyErrors(self)
        self.closed = False
        self.timer_ns: int | None = None
        self.superseded = 0  # messages of the peer that a newer one took the place of, before they were read
        self._inbox: list[ev.Event] = []
        self._feeding = False
        self._active: set[int] = {0}
        self._ports: dict[int, int] = {}
        self._looked_for: tuple[int, bool] | None = None
        # By pair. Of the backups it outlives a pairing: their QPs are as they are until they are reset.
        self.given: dict[int, changes.Given] = {}
        self._forget_pairing()

    def _forget_pairing(self) -> None:
        """Everything that belongs to one pairing, as it is before there is one."""
        self.protocol: PairProtocol | None = None
        self.peer: QpRecord | None = None
        self.paths: list[Path] = []
        self.n_pairs = 1
        self._inbox.clear()
        self.keys.close()
        self.fence: Fence | None = None  # a SWITCH's, or that of the end
        self.rebuild = Rebuild(self)
        self.ending.forget()
        self.absence.forget()
        self._rx_target: int | None = None
        self.key_wait.forget()
        if not self.closed:
            self._count_away()
        self.timeline.begin()
        self.was_protected = False
        # Pairs that carry traffic, and are to be connected anew when that can be.
        self.unlike: set[int] = set()
        self.watchdog.forget()
        self._fence_refused = 0  # the rights that were the peer's when it refused our fence all the same
        self._stop_looking()

    # ---- what qp.shift shows ----------------------------------------------------------------------------------------

    @property
    def send_state(self) -> str:
        """Name of the send state."""
        return self.protocol.send_state.value if self.protocol is not None else SendState.DEFAULT.value

    @property
    def recv_state(self) -> str:
        """Name of the receive state."""
        return self.protocol.recv_state.value if self.protocol is not None else RecvState.DEFAULT.value

    @property
    def send_pair(self) -> int:
        """The pair that carries sends."""
        return self.protocol.send_pair if self.protocol is not None else 0

    @property
    def recv_pair(self) -> int:
        """The pair that carries receives."""
        return self.protocol.recv_pair if self.protocol is not None else 0

    @property
    def preferred(self) -> int:
        """The pair that traffic should be on while all is well."""
        return self.protocol.preferred if self.protocol is not None else 0

    @property
    def shown_why(self) -> str | None:
        """For `qp.shift.why`: that the peer seems to be gone, whoever waits for it; a pair that lacks; or `why`."""
        text = self.absence.text if self.status in (Status.PAIRING, Status.PROTECTED) else None
        if text is None and self.status is Status.PROTECTED:
            text = self.watchdog.lacking
        return text or self.why

    def nic(self, k: int) -> Nic:
        """Our handle on the NIC of pair k."""
        domain = self.shadow.domain
        return domain.nic if k == 0 else domain.backups[k - 1]

    def device(self, k: int) -> str:
        """Name of the device of pair k."""
        domain = self.shadow.domain
        name: str = domain.nic.name if k == 0 else domain.backups[k - 1].name
        return name

    def describe_pairing(self) -> PeerShown | None:
        """For `qp.shift.pairing`."""
        peer = self.peer
        if peer is None:
            return None
        return {
            "gid": peer.default.gid,
            "lid": peer.default.lid,
            "qpn": peer.default.qpn,
            "instance": peer.instance,
            "pairs": self.n_pairs,
            "devices": [self.device(k) for k in range(self.n_pairs)],
        }

    def counters(self) -> dict[str, int]:
        """For `qp.shift.counters`."""
        counts: dict[str, int] = {}
        if self.protocol is not None:
            c = self.protocol.counts
            counts = {name: getattr(c, name) for name in c.__struct_fields__}
        if not self.closed:
            rx, acked, wired = self.core.counters()
            counts.update(rx=rx, acked=acked, wired=wired)
        counts["superseded"] = self.superseded
        return counts

    def wait_protected(self, timeout: float | None) -> bool:
        """Wait, without the lock, until PROTECTED (True) or hopeless, or timeout seconds passed (False)."""
        deadline = None if timeout is None else time.monotonic() + timeout
        self.wait_for(lambda: self.status is not Status.PAIRING, deadline)
        return self.status is Status.PROTECTED

    def found_broken(self, k: int) -> None:
        """As `Evidence.found_broken`."""
        self.evidence.found_broken(k)

    def wait_for(self, condition: Callable[[], bool], deadline: float | None) -> bool:
        """Wait until condition() holds or time.monotonic() reaches deadline; return whether it holds."""
        return self.timeline.wait_for(condition, lambda: self.closed, deadline)

    def prefer(self, pair: int) -> None:
        """`migrate` or `restore`, from the application's thread."""
        self.driver.post(lambda: self.feed(ev.PreferPair(pair)))
        self.driver.run()

    # ---- pairing ----------------------------------------------------------------------------------------------------

    def set_status(self, status: Status, why: str | None, what: str = "failover gave up") -> None:
        """Change what `qp.shift` shows; errors are withheld from the application only while PROTECTED.

        what: for the log, what is so where status is FAILED.
        """
        before = self.status
        entry = self.absence.entry if status is Status.FAILED else None
        self.status, self.why = status, f"{why}; {entry}" if entry else why
        if status is Status.PROTECTED:
            self.was_protected = True
            self.early.protected()
        if not self.closed:
            # Let go of away from home, it stays where it is; only we can end both halves of it, and what it left there.
            ours = self.was_protected and not self.core.flushes_itself
            if status in (Status.FAILED, Status.UNPROTECTED):
                self.early.end()
            waits = self.core.ending or ours or self.early.waits
            waits = waits or bool(self.ending.behind)  # until these have stopped: `let_go`, or the end
            self.core.guarded = status is Status.PROTECTED or waits
        if before is not status:
            self.reports.status_changed(why, what)
        self.timeline.tell()

    def never_protected(self, why: str) -> None:
        """It cannot be protected as it is connected (why: a sentence), and whoever relies on it is told so."""
        self.reports.never_protected(why)
        self.set_status(Status.UNPROTECTED, why)

    def set_why(self, why: str) -> None:
        """Say what pairing waits for."""
        if self.status is Status.PAIRING:
            self.why = why

    def paired(self, mine: QpRecord, theirs: QpRecord, paths: list[Path]) -> None:
        """The exchanger's entries name each other and every path is ready: start the protocol."""
        self.peer = theirs
        self.paths = paths
        self.n_pairs = len(paths)
        locals_ = []
        for k in range(self.n_pairs):
            route = self.local_port(k)
            locals_.append(LocalPair(route.gid, route.lid, self.shadow.qpn(k), route.mtu))
        initiator = mine.begins_arm(theirs)
        self.protocol = PairProtocol(
            self.driver.protocol_config,
            locals_,
            initiator,
            Draws(self.driver.machine.random_bits(64)),
            self.driver.now_ns(),
        )
        self.keys.open(mine, theirs)
        self.set_why("the backup QPs are being connected")
        self.reports.paired()
        for k, path in enumerate(paths):  # what is known already is told to nobody again
            if self.nic(k).dead:
                self._inbox.append(ev.NicDead(k))
            elif path.ping.alive is not None:
                self._inbox.append(ev.PathHealth(k, path.ping.alive))
        self._run_inbox()
        if self.protocol is not None:
            self.execute(self.protocol.start(self.driver.now_ns()))
            self._run_inbox()

    def stands_on(self, nic: Nic) -> bool:
        """Whether one of our QPs may be on `nic`."""
        domain = self.shadow.domain
        return nic is domain.nic or nic in domain.backups

    def local_port(self, k: int) -> LocalPort:
        """Where our QP of pair k is reached, as its NIC was when last looked at. Raises OSError."""
        port, index, gid, mtu = self.shadow.route(k)
        self._ports[k] = port
        return LocalPort(port, index, gid, mtu, self.nic(k).port_seen(port).lid)

    def port(self, k: int) -> int:
        """The port number that our QP of pair k was last connected on."""
        port = self._ports.get(k)
        return self.nic(k).port if port is None else port

    # ---- events in --------------------------------------------------------------------------------------------------

    def feed(self, event: ev.Event) -> None:
        """Give one event to the protocol and carry out what it says."""
        if self.protocol is None or self.closed:
            return
        self._inbox.append(event)
        if not self._feeding:
            self._run_inbox()

    def later(self, event: ev.Event) -> None:
        """Give one event to the protocol when the actions under way are carried out."""
        self._inbox.append(event)

    def carry_on(self, call: Callable[[], None]) -> None:
        """Go on with an action after something was awaited."""
        if not self.closed:
            self.driver.safely(self, call)
            self._run_inbox()

    def _run_inbox(self) -> None:
        if self.protocol is None:
            return
        self._feeding = True
        try:
            while self._inbox and not self.closed:
                event = self._inbox.pop(0)
                self.execute(self.protocol.handle(event, self.driver.now_ns()))
        finally:
            self._feeding = False
        self._schedule()

    def on_time(self, now_ns: int) -> None:
        """The driver's timer for this connection."""
        self.timer_ns = None
        if self.closed:
            return
        if self.early.waits:
            self.early.on_time(now_ns)
        if self.fence is not None:
            self.fence.tick(now_ns)
        if self.protocol is None:
            self._schedule()
            return
        self.keys.on_time(now_ns)
        self.key_wait.on_time(now_ns)
        due = self.protocol.next_timeout_ns if self.protocol is not None else None
        if due is not None and due <= now_ns:
            self.execute(self.protocol.handle_timeout(now_ns))
            self._run_inbox()
        else:
            self._schedule()

    def _schedule(self) -> None:
        p = self.protocol
        early_ns = self.early.due_ns
        if self.closed or (
            p is None and self.fence is None and early_ns is None and not self.ending.under_way
        ):
            self._stop_looking()
            return
        self._look()
        if self in self.driver.turns.going and self._arrived():
            self.driver.turns.arrived(self)
        # Without a protocol nobody asks for keys: what is due of that stays so.
        due = p.next_timeout_ns if p is not None else None
        times = [] if due is None else [due]
        if early_ns is not None:
            times.append(early_ns)
        if p is not None and (due := self.keys.due_ns) is not None:
            times.append(due)
        if self.key_wait.since_ns is not None:
            times.append(self.key_wait.due_ns)
        if self.fence is not None:
            times.append(self.fence.due_ns)
        if times and (self.timer_ns is None or min(times) < self.timer_ns):
            self.driver.schedule(self, min(times))

    def await_nothing(self) -> None:
        """The QP ends: no message, receive or key is waited for any more."""
        self._rx_target = None
        self.key_wait.forget()

    def wake_up(self) -> None:
        """Something is due earlier than before."""
        self._schedule()

    def _arrived(self) -> bool:
        """Whether nothing is left of what began in its turn: all is where it should be, what works is fit."""
        p = self.protocol
        if p is None or p.over:
            return True
        if p.busy:
            return p.switching
        works = [not pair.dead and pair.alive is not False for pair in p.pairs]
        here = (p.send_pair, p.recv_pair)
        if works[p.preferred] and here != (p.preferred, p.preferred):
            return False
        return all(pair.clean or k in here for k, pair in enumerate(p.pairs) if works[k])

    def _look(self) -> None:
        """Have the driver look at the CQs whose completions matter now, as long as they do."""
        if self._rx_target is not None:
            wanted = (1 << self.recv_pair, True)
        elif self.fence is not None or (self.protocol is not None and self.protocol.busy):
            # Completions matter that the application may not be polling for.
            pairs = max(self.n_pairs, max(self.ending.behind, default=0) + 1)
            wanted = ((1 << pairs) - 1, False)
        else:
            wanted = None
        if wanted == self._looked_for:
            return
        queues: list[tuple[_core.CQCore, int]] = []
        if wanted is not None:
            pairs, recv_only = wanted
            cqs = dict.fromkeys((self.core.recv_cq, self.core.recv_cq if recv_only else self.core.send_cq))
            queues = [(cq, k) for k in range(pairs.bit_length()) if pairs >> k & 1 for cq in cqs]
        self.driver.looks.look_at(self, queues)
        self._looked_for = wanted

    def _stop_looking(self) -> None:
        if self._looked_for is not None:
            self._looked_for = None
            self.driver.looks.look_at(self, [])
        self.driver.turns.arrived(self)

    def handle_message(self, message: Message | WantKeys | Keys) -> None:
        """A control message from this connection's peer."""
        if isinstance(message, (WantKeys, Keys)):
            if self.protocol is not None and not self.protocol.over and not self.closed:
                self.keys.on_message(message)
            return
        if isinstance(message, (Sync, Move)) and message.keys:
            self.keys.heed(message)  # before anything is sent on account of it
        if isinstance(message, Arm) and self._is_pairing and not self.pairing.has_memory():
            return  # it is said again
        asked = isinstance(message, Sync) and message.phase is Phase.ASK
        unsafe = self.evidence.unsafe_soon() if asked else None
        self.feed(ev.MessageReceived(message, unsafe))

    @property
    def _is_pairing(self) -> bool:
        return self.protocol is not None and self.status is Status.PAIRING and not self.closed

    def core_event(self, kind: int, k: int, a: int, b: int, t_ns: int) -> None:
        """An event of the data path (see _core)."""
        if kind == _core.EV_ERROR:
            wr = self.evidence.failed_wr(k)  # first: it looks at what the send itself was told
            why = self.core.why_sends_fail(k) or (a, b)
            if why[0] in REFUSED:
                # Our own fence, or an error of the application's, which ends the QP. The peer has just withdrawn the
                # right, and its QP broke too: both leave the pair. Not again, before its entry says something else.
                self._fence_refused = self.peer.qp_access_flags if self.peer is not None else 0
            elif k == self.core.send_pair and self.ending.original is None:
                self.ending.original = why
            reason = f"{self.driver.wc_name(a)} (vendor_err {b:#x}) on {self.device(k)}"
            if self.early.waits:
                self.early.failed()
            self.evidence.path_failed(k, reason, t_ns, wr=wr)
        elif kind == _core.EV_POST_FAILED:
            if b or self.core.refused:  # else the send was taken since, or forgotten
                self.evidence.post_failed(k, a, t_ns)
        elif kind in (_core.EV_SQ_FENCED, _core.EV_RQ_FENCED):
            if self.fence is not None:
                self.fence.progress(k)
        elif kind == _core.EV_ARM_WC:
            self.feed(ev.ArmCompletion(k, receive=bool(a), ok=b == 0))
        elif kind == _core.EV_FENCE_WR_POSTED:
            self.feed(ev.FenceWrPosted())
        elif kind == _core.EV_FENCE_WR_DONE:
            self.feed(ev.FenceWrDone(self.core.counters()[2]))
        elif kind == _core.EV_RX_REACHED:
            self._rx_target = None
            self.feed(ev.RxReached())
        elif kind == _core.EV_LATE_POST:
            self.ending.at_post()
            if self.fence is None:
                self.ending.deliver()
        elif kind == _core.EV_NEW_RKEY:
            self.keys.want([a])
        elif kind == _core.EV_KEY_MISSING:
            self.key_wait.begin()
            if b & KEY_UNSHADOWABLE:
                what = "rkey" if b & KEY_REMOTE else "lkey"
                self.keys_missing(f"the memory of {what} {a:#x} has no counterpart on {self.device(k)}")
                return
            if b & KEY_REMOTE and not self.keys.is_answered(a):
                # And not this one alone: each would take a question of its own.
                self.keys.want({a} | self.core.missing_keys(self.core.send_pair, self.core.recv_pair)[1])
                self.keys.hurry()
            self._schedule()
        elif kind == _core.EV_FIRST_WC:
            self.reports.first_wc(k, t_ns)
        elif kind == _core.EV_APP_ERROR:
            self.early.end()
            if self.protocol is not None and not self.protocol.over:
                # The application's own error broke the QP, as it would have without us; the peer need not wait for it.
                why = f"the application's own error: {self.driver.wc_name(a)}"
                self.feed(ev.Quit(why))
                self.set_status(Status.UNPROTECTED, why)
            # A SWITCH may have begun since, and nobody opens its gates.
            if self.core.ending or not self.core.flushes_itself:
                self.ending.begin(FLUSHED)

    def catch_up(self) -> None:
        """Events of the data path were lost, there being too many: find out what they may have said."""
        p = self.protocol
        self.keys.want(self.core.seen_rkeys)
        self.ending.at_post()
        if self.fence is not None:
            self.fence.command_again()
        elif self.ending.under_way:
            self.ending.deliver()
        elif self.core.ending:
            self.core_event(_core.EV_APP_ERROR, 0, 0, 0, self.driver.now_ns())
        now = self.driver.now_ns()
        if p is None or p.over or self.closed:
            if self.core.refused and not self.closed:  # the peer has left since: nobody else ends that
                self.evidence.post_failed(self.core.send_pair, self.core.refused, now)
            for k in {self.core.send_pair, self.core.recv_pair}:
                if self.ending.is_left_alone_on(k) and (
                    self.nic(k).dead or self.core.first_error(k) is not None
                ):
                    self.ending.lose(k)
            return
        for k in range(self.n_pairs):
            if self.nic(k).dead and not p.pairs[k].dead:
                self.evidence.nic_dead(self.nic(k), now)
        if p is not self.protocol or p.over:
            return
        if self.status is Status.PROTECTED and not self.core.guarded:
            self.core_event(_core.EV_APP_ERROR, 0, 0, 0, now)
            return
        for k in {p.send_pair, p.recv_pair}:
            first = self.core.first_error(k)
            if first is not None and not p.fencing:
                self.core_event(_core.EV_ERROR, k, first[0], first[1], now)
        if self.core.refused:
            self.core_event(_core.EV_POST_FAILED, self.core.send_pair, self.core.refused, 0, now)
        sends, _ = self.core.outstanding
        if p.send_state is SendState.WAIT_SIGNALED and not self.core.send_is_open:
            self.feed(ev.FenceWrPosted())
        if p.send_state is SendState.WAIT_DRAINED and sends == self.core.unwired[0]:
            self.feed(ev.FenceWrDone(self.core.counters()[2]))
        if self._rx_target is not None:
            self.core.set_rx_target(self._rx_target)
        self.key_wait.begin()
        self._schedule()

    def keys_arrived(self) -> None:
        """More keys were resolved: go on posting."""
        self.key_wait.arrived()

    def keys_missing(self, why: str) -> None:
        """What was posted cannot be handed over where the traffic is, and never will be."""
        self.key_wait.in_vain(why)

    @property
    def awaits_keys(self) -> bool:
        """Whether a WR is withheld because the counterpart of a key is not known."""
        return self.key_wait.since_ns is not None

    @property
    def receives_away(self) -> bool:
        """Whether the peer sends to a backup of ours, or may when it hears what we said."""
        p = self.protocol
        return p is not None and not p.over and p.recv_pair != 0

    @property
    def reached_away(self) -> bool:
        """Whether something of the peer's may come by a backup of ours, perhaps the last of what it sent there."""
        return self.receives_away or bool(self.ending.behind) or self.core.recv_pair != 0

    # ---- actions out ------------------------------------------------------------------------------------------------

    def execute(self, actions: list[Action]) -> None:
        """Carry out actions in order."""
        kinds = set(map(type, actions))
        if ev.SwitchStarted in kinds:
            # Its log lines, and those of what comes before it, can wait.
            self.driver.hurry(self.driver.now_ns())
        kinds.discard(ev.SendMessage)
        if kinds:
            # It goes on, and another QP's long wait in the same CQs must not delay that. What is only said is no news.
            self.driver.looks.expect()
        for action in actions:
            if self.closed:
                return
            handler = self._HANDLERS[type(action)]
            handler(self, action)
        if ev.StateChanged in kinds:
            self.timeline.tell()

    def _close_send(self, _: ev.CloseSend) -> None:
        self.core.close_send()

    def _close_recv(self, _: ev.CloseRecv) -> None:
        self.key_wait.posting = None
        self.core.close_recv()

    def _do_fence(self, action: ev.Fence) -> None:
        self._rx_target = None
        self.key_wait.since_ns = None
        for k in action.pairs:
            if k in self.given:
                self.given[k].state = QpState.ERR
        number = action.number

        def hung(reason: str) -> None:
            self.fence = None
            self.feed(ev.FenceHung(number, reason))

        self.fence = Fence(self, action.pairs, action.deadline_ns, lambda: self._fenced(number), hung)
        self.fence.begin()

    def _fenced(self, number: int) -> None:
        self.fence = None
        if self.core.ending:
            return  # by an error of the application's among the last completions: EV_APP_ERROR ends this SWITCH
        rx, acked, wired = self.core.counters()
        lost = any(self.nic(k).dead for k in range(self.n_pairs))
        unsafe = self.core.unsafe_reason(cqes_lost=lost)
        if_lost = self.core.unsafe_reason(cqes_lost=lost, receipts_lost=True)
        failed = self.core.shown_error
        if failed and self.status is Status.PAIRING:
            # The peer's ARM was through, ours was not, and the application has seen its QP fail: that was its end.
            unsafe = f"behind {self.driver.wc_name(failed)}, which came before the QP was protected"
        self.feed(ev.FenceCompleted(number, rx, acked, wired, unsafe, lost, if_lost))

    def _reset_pair(self, action: ev.ResetPair) -> None:
        self.rebuild.reset(action)

    def _connect_pair(self, action: ev.ConnectPair) -> None:
        self.rebuild.connect(action)

    def drain(self, k: int, recv_only: bool = False) -> None:
        """Take what pair k's CQs hold; the application gets its part at its next poll."""
        recv_cq, send_cq = self.core.recv_cq, self.core.send_cq
        for cq in (recv_cq,) if recv_only or send_cq is recv_cq else (recv_cq, send_cq):
            try:
                cq.drain(k)
            except PyverbsRDMAError as error:  # a dying NIC's: it holds nothing any more
                logger.debug("%s: %s", self.device(k), error)

    def _post_arm_send(self, action: ev.PostArmSend) -> None:
        if self.core.post_arm_send(action.pair):
            self._inbox.append(ev.ArmCompletion(action.pair, receive=False, ok=False))

    def _activate(self, k: int) -> None:
        """The application polls pair k's CQs from now on."""
        if k not in self._active:
            self._active.add(k)
            for cq in dict.fromkeys((self.core.recv_cq, self.core.send_cq)):
                self.driver.looks.activate(cq, k)

    def _post_receives(self, action: ev.PostReceives) -> None:
        self._activate(action.pair)
        self._began_posting(action, self.core.open_recv(action.pair))

    def _began_posting(self, action: ev.PostReceives | ev.MoveReceives, err: int) -> None:
        self.keys.push()  # from now on the peer goes by what it knows
        posted = self.key_wait.posted(action, err)
        if posted is not None:
            self.later(posted)

    def _trim(self, action: ev.Trim) -> None:
        self.core.trim(action.peer_rx)

    def _open_send(self, action: ev.OpenSend) -> None:
        self.ending.original = None
        self._activate(action.pair)
        self.core.open_send(action.pair)

    def _deliver_errors(self, action: ev.DeliverErrors) -> None:
        logger.warning(
            "QP %#x on %s: %s: the application gets its original errors",
            self.shadow.qp_num,
            self.device(0),
            action.reason,
        )
        self.ending.begin()

    def _let_go(self, action: ev.LetGo) -> None:
        if action.unanswered:
            self.core.end_at_post()
        self.core.guarded = not self.core.flushes_itself
        self.ending.at_post()
        if self.status is Status.PAIRING:
            self.pairing.peer_left()

    def _begin_fence(self, _: ev.BeginFenceWr) -> None:
        how = self.core.move_begin()
        if how != "wanted":
            self._inbox.append(ev.FenceWrPosted())
        if how == "idle":
            self._inbox.append(ev.FenceWrDone(self.core.counters()[2]))

    def _post_fence_write(self, _: ev.PostFenceWrite) -> None:
        # A zero-length WRITE names no memory, so its rkey is not looked at (IBA 9.7.4.1.5); the right to write is.
        rights = self.peer.qp_access_flags if self.peer is not None else 0
        allowed = rights & AccessFlag.REMOTE_WRITE and rights != self._fence_refused
        if allowed and self.core.post_fence_write(0, 0) == 0:
            self._inbox.append(ev.FenceWrPosted())

    def _cancel_move(self, _: ev.CancelMove) -> None:
        self.core.move_cancel()

    def _await_rx(self, action: ev.AwaitRx) -> None:
        self._rx_target = action.rx
        self.core.set_rx_target(action.rx)
        if self._rx_target is not None:
            self.drain(self.recv_pair, recv_only=True)

    def _move_receives(self, action: ev.MoveReceives) -> None:
        self._activate(action.pair)
        self._began_posting(action, self.core.move_recv(action.pair))

    def _send_message(self, action: ev.SendMessage) -> None:
        message = action.message
        if isinstance(message, (Sync, Move)) and (version := self.keys.version):
            message = replace(message, keys=version)
        self.say(message, action.pair, action.spread)

    def say(self, message: Message | WantKeys | Keys, pair: int, spread: bool = False) -> None:
        """Send to the peer over the NIC pair of `pair`; spread: over every one that may work."""
        peer = self.peer
        if peer is None:
            return
        entry = Entry(int(peer.life, 16), self.pairing.life, message)
        first = self.paths[pair] if pair < len(self.paths) else None
        if first is not None:
            self.driver.channel.send(first, entry)
        if spread or first is None or not first.ah:
            for path in self.paths:
                if path is not first:
                    self.driver.channel.send(path, entry)

    def _set_status(self, action: ev.SetStatus) -> None:
        failed = self.core.shown_error
        if action.status is Status.PROTECTED and failed:
            # The application has seen the QP fail before it was protected: only a reconnect makes a QP of it again.
            # Our own fence in a SWITCH of the peer's, whose ARM was through when ours was not, is no such failure.
            why = f"it failed before it was protected: {self.driver.wc_name(failed)}"
            self._inbox.append(ev.Quit(why))
            self.set_status(Status.UNPROTECTED, why)
            return
        if action.status is Status.PROTECTED:
            for path in self.paths:
                path.ping.peer_knows_us()
        self.set_status(action.status, action.why)

    def _state_changed(self, action: ev.StateChanged) -> None:
        if action.direction == "send":
            self.timeline.send_state(self.driver.now_ns(), action.state)
        p = self.protocol
        home = p is None or (p.send_state is SendState.DEFAULT and p.recv_state is RecvState.DEFAULT)
        self.reports.is_home(home, action.pair)
        if home and len(self._active) > 1:
            self.driver.looks.settle(self)
        if logger.isEnabledFor(logging.DEBUG):
            name = self.device(action.pair)
            logger.debug(
                "QP %#x: %s queue %s on %s", self.shadow.qp_num, action.direction, action.state, name
            )

    def _switch_started(self, action: ev.SwitchStarted) -> None:
        left = self.send_pair
        if left < len(self.paths):
            self.driver.channel.suspect(self.paths[left], self.driver.now_ns())
        self.reports.switch_started(action.target, action.reason)

    _HANDLERS: dict[type, AnyCall] = {
        ev.CloseSend: _close_send,
        ev.CloseRecv: _close_recv,
        ev.Fence: _do_fence,
        ev.ResetPair: _reset_pair,
        ev.ConnectPair: _connect_pair,
        ev.PostArmSend: _post_arm_send,
        ev.PostReceives: _post_receives,
        ev.Trim: _trim,
        ev.OpenSend: _open_send,
        ev.DeliverErrors: _deliver_errors,
        ev.LetGo: _let_go,
        ev.BeginFenceWr: _begin_fence,
        ev.PostFenceWrite: _post_fence_write,
        ev.CancelMove: _cancel_move,
        ev.AwaitRx: _await_rx,
        ev.MoveReceives: _move_receives,
        ev.SendMessage: _send_message,
        ev.SetStatus: _set_status,
        ev.StateChanged: _state_changed,
        ev.SwitchStarted: _switch_started,
    }

    # ---- the end ----------------------------------------------------------------------------------------------------

    def disconnect(self, reason: str) -> None:
        """The application reset or failed the QP: tell the peer, withdraw, forget the pairing."""
        self._take_leave(reason)
        self._forget_peer()

    def _take_leave(self, reason: str) -> None:
        """Tell the peer."""
        if self.protocol is not None:
            with contextlib.suppress(Exception):
                self.execute(self.protocol.handle(ev.Quit(reason), self.driver.now_ns()))
                if self.protocol.left:
                    self.driver.life_ended(self.pairing.life, self.protocol.bye)
            self.driver.channel.flush()

    def _forget_peer(self) -> None:
        self.driver.drop_backlog(self)
        self.pairing.withdraw()
        self._forget_pairing()
        self.timeline.reset(self.driver.now_ns())

    def unpair(self) -> None:
        """Back to before `paired`: it was with a former life of the peer's QP."""
        self._forget_pairing()
        if self.early.due_ns is not None:
            self.early.end()  # who was its peer will not help
        if self.core.ending:
            self.set_status(Status.FAILED, "it failed, and its peer has left", "it ends in errors")
        else:
            self.set_status(Status.PAIRING, "the peer connects its QP anew")

    def carried(self) -> set[int]:
        """The backup pairs whose CQs need no polling for this connection any more; forgets them."""
        gone, self._active = self._active - {0}, {0}
        return gone

    def give_up(self, reason: str) -> None:
        """Something of ours failed: what is outstanding gets its original error, the QP is a plain one again."""
        if self.closed:
            return
        self.ending.leave_behind()
        p, self.protocol = self.protocol, None
        self._stop_looking()
        self.ending.without_protocol(p)
        self.set_status(Status.FAILED, reason)

    def quit(self, reason: str) -> None:
        """The process ends: tell the peer at once."""
        if self.protocol is not None and not self.protocol.over:
            self.execute(self.protocol.handle(ev.Quit(reason), self.driver.now_ns()))

    def close(self) -> list[int]:
        """The QP is going away, and nothing is done to it any more; `clear_away` is to follow.

        Returns the backup pairs whose QPs may still reach the application's memory: the verb has them stopped.
        """
        if not self.closed:
            self.ending.leave_behind()
            self._take_leave("the QP is closed")
            self.driver.drop_backlog(self)
            self._stop_looking()
            self._count_away()  # now: nobody finds it among the connections any more
            self.closed = True
            self.status, self.why = Status.UNPROTECTED, "it is closed"
        return sorted(self.ending.behind | self.ending.unstopped)

    def _count_away(self) -> None:
        """Its absence from home ends by what it is, not by a homecoming."""
        away_since_ns = self.timeline.away_since_ns
        if away_since_ns is not None:
            self.driver.totals.away_ns += self.driver.now_ns() - away_since_ns

    def clear_away(self) -> None:
        """What is left to be done for a closed QP; its verb need not wait for that."""
        self.driver.looks.settle(self)
        self._forget_peer()
        self.timeline.tell()
