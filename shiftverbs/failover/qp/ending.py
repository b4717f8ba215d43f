# SPDX-License-Identifier: BSD-3-Clause
"""The end of a QP: its pairs are stopped and emptied, then the application gets the errors of all that is left.

It begins where nothing can be hidden any more, where the application has its QP fail, and where something of ours did
(docs/protocol.md, "The end of a QP"). Runs under the driver's lock, for one connection.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
from typing import TYPE_CHECKING, Protocol

from shiftverbs.failover.qp.drain import Fence, FencedQp
from shiftverbs.failover.services.cq_polling import Carrier
from shiftverbs.native.ibv import QpState, WcStatus
from shiftverbs.protocol.events import Status
from shiftverbs.shadows.nic import GONE
from shiftverbs.state_machine import SendState

if TYPE_CHECKING:
    from shiftverbs.failover.qp.timeline import Timeline
    from shiftverbs.protocol.pair import PairProtocol

# Status and vendor_err of a WC: those of a flushed WR, and of the first one where the application has seen none.
FLUSHED = (int(WcStatus.WR_FLUSH_ERR), 0)
NO_ANSWER = (int(WcStatus.RETRY_EXC_ERR), 0)
# A MOVE is under way.
WAITS = (SendState.WAIT_SIGNALED, SendState.WAIT_DRAINED)

logger = logging.getLogger("shiftverbs.driver")


class Required(Protocol):
    """What is required of a QP."""

    def begin(self) -> None:
        """The application has its QP begin anew."""


class Early(Protocol):
    """Errors that come before a QP is protected."""

    def begin_anew(self) -> None:
        """The application has its QP begin anew."""

    def over(self) -> None:
        """Nothing waits any more: the QP is protected, or it ends."""


class EndingQp(FencedQp, Carrier, Protocol):
    """A connection, as its end concerns it."""

    fence: Fence | None

    @property
    def early(self) -> Early:
        """Its errors before it is protected."""

    @property
    def requirement(self) -> Required:
        """What is required of it."""

    @property
    def timeline(self) -> Timeline:
        """What became of it, and who waits for that."""

    def await_nothing(self) -> None:
        """The QP ends: no message, receive or key is waited for any more."""

    def disconnect(self, reason: str) -> None:
        """Tell the peer, withdraw, forget the pairing."""


class Ending:
    """How one connection's QP ends; what of it is still at work on backups that a pairing left.

    behind: backups that a pairing which is over left with work, until they are reset: their QPs may still be at it.
    unstopped: backups that hung when they were let go of, or refused: what is to stop their QPs may lie there still.
    original: status and vendor_err of the error that started a SWITCH, if there was one.
    """

    __slots__ = (
        "_asked",
        "_by_reset",
        "_c",
        "_first",
        "_refused",
        "_spare",
        "_we_flush",
        "behind",
        "original",
        "unstopped",
    )

    def __init__(self, connection: EndingQp) -> None:
        self._c = connection
        self.behind: set[int] = set()
        self.unstopped: set[int] = set()
        self._asked: set[int] = set()  # by `stop_backups`, and not answered yet
        self._refused: dict[int, int] = {}  # that: the errno
        self._by_reset: set[int] = set()  # are asked for that, not for ERR
        # The default QP was rebuilt and carries nothing, until the application resets it: the pairing may be forgotten.
        self._spare = False
        self.forget()

    def forget(self) -> None:
        """The pairing is over, and with it what ended in it."""
        self.original: tuple[int, int] | None = None
        # The error that comes first of what is left: given when all pairs have stopped.
        self._first: tuple[int, int] | None = None
        self._we_flush = False  # what is posted from now on: its default QP is not known to be in ERR

    @property
    def under_way(self) -> bool:
        """Whether errors are to be given, of what is left or of what is posted from now on."""
        return self._first is not None

    def leave_behind(self) -> None:
        """Note the backup pairs whose QPs may still reach the application's memory, or hold what came for it.

        A READ of a former life that a fabric held up, or doubled, may look like one that the new life has answered: it
        is answered again, as long as that QP works.
        """
        protocol = self._c.protocol
        if protocol is not None:
            self._spare = not protocol.pairs[0].used
        reached = self._c.core.carried
        for k, p in enumerate(protocol.pairs if protocol is not None else ()):
            if p.fenced:
                reached.discard(k)
            elif k and p.used:
                reached.add(k)
        self.behind = self.behind | reached

    def begin(self, first: tuple[int, int] | None = None) -> None:
        """The QP has failed for good: its pairs are stopped and emptied, and then the application gets the rest.

        Until the last of them has stopped, not one WR is flushed: its memory is not the application's yet.
        first: status and vendor_err of the first send that is left; all else is flushed. None: the original error, or,
        where our own fence made the flush and the application never saw one, the usual one. It was flushed where the
        application has seen an error before.
        """
        c = self._c
        if c.closed or self._first is not None:
            return
        self._first = FLUSHED if c.core.shown_error else first or self.original or NO_ANSWER
        c.early.over()
        self.leave_behind()
        c.await_nothing()
        c.core.begin_end()
        c.core.guarded = True
        deadline_ns = c.driver.now_ns() + c.driver.protocol_config.fence_deadline_ns
        p = c.protocol
        pairs = self.behind | self.unstopped
        # There only what a former life was asked could be read; but what is posted later must fail.
        spare = {0} if self._spare else ()
        if p is None or not p.pairs[0].fenced or c.rebuild.is_under_way(0):
            pairs.add(0)
        c.rebuild.call_off(0)
        c.fence = Fence(c, pairs, deadline_ns, self.deliver, self._hung, spare)
        c.fence.begin()
        c.wake_up()

    def _hung(self, reason: str) -> None:
        """The fence of the end hung: a QP in ERR is at its end all the same; for one that is not, its errors wait."""
        c = self._c
        if c.fence is not None:
            if not c.fence.is_patient:
                logger.error(
                    "QP %#x on %s: %s: its errors wait for that", c.shadow.qp_num, c.device(0), reason
                )
            c.fence.be_patient()

    def deliver(self) -> None:
        """Nothing moves any more: the application gets the errors of all that is left, and its default QP back."""
        c = self._c
        if c.fence is not None:
            self._we_flush |= 0 in c.fence.unstopped
            c.fence = None
        self.behind = set()
        if self._first is None:
            return
        # A NIC that is dead would take what is posted, and never flush it.
        we_flush = self._we_flush or c.nic(0).dead
        if c.core.outstanding != (0, 0) or not we_flush:
            c.core.abort(*self._first, still_ending=we_flush)
            self._first = FLUSHED
        if not we_flush:
            self._first = None
            c.driver.looks.settle(c)
        c.wake_up()

    def at_post(self) -> None:
        """End the QP if the peer has left it in a MOVE and something is to be sent: nobody may take that any more."""
        if self._c.core.ends_at_post and self._c.core.outstanding[0]:
            self.begin()

    def lose(self, k: int) -> None:
        """Pair k does not work, where the QP was left alone: it ends now, or at its next send if that is all there.

        A default QP that went to ERR would have flushed the application's receives, had they been there.
        """
        c, core = self._c, self._c.core
        if k == core.recv_pair or core.outstanding[0] or (k == 0 and not c.nic(0).dead):
            self.begin()
        else:
            core.end_at_post()

    def is_left_alone_on(self, k: int) -> bool:
        """Whether the peer, or we, let go of a QP that is still withholding errors, and that uses pair k.

        So it is just after the BYE was heard, and as long as it is away from home: nobody but us will end it. Where no
        send is handed over any more, nothing is left of them on their pair.
        """
        c = self._c
        over = c.protocol is None or c.protocol.over
        gone = over and c.status in (Status.UNPROTECTED, Status.FAILED)
        alone = gone and not c.closed and c.core.guarded and not self.under_way
        return alone and (k == c.core.recv_pair or (k == c.core.send_pair and not c.core.ends_at_post))

    # ---- the application's doing ------------------------------------------------------------------------------------

    def touched(self, reason: str, for_good: bool = False) -> None:
        """The application moves its QP to a state where nothing is protected; a later RTR begins anew.

        for_good: from there it can go on without RTR, unprotected: the peer has let go of it.
        `stop_backups` or `by_application` is to follow.
        """
        c = self._c
        c.shadow.is_connected = False
        self.leave_behind()
        if for_good:
            self._call_move_off()
        c.early.begin_anew()
        c.disconnect(reason)
        if for_good:
            c.set_status(Status.UNPROTECTED, f"{reason}; only a new connection is protected again")
        else:
            c.set_status(Status.PAIRING, reason)
            c.requirement.begin()

    def _call_move_off(self) -> None:
        """No pairing is to end the MOVE that is under way: its fence would close the gate for good."""
        c = self._c
        p = c.protocol
        if p is None or p.over or p.send_state not in WAITS:
            return
        if p.move_told:
            c.core.end_at_post()
        else:
            c.core.move_cancel()

    def stop_backups(self, reset: bool) -> list[int]:
        """After `touched`: have the QPs that carried work on backups stopped: in RESET, or in ERR.

        Returns their pairs; `let_go` is to follow when the commands have ended.
        """
        c = self._c
        stopping = sorted(self.behind)
        if c.core.send_pair in stopping:
            c.core.close_send()  # what waits for room there is not handed over any more, whatever completes
        for k in stopping:
            c.drain(k)
            if reset:
                c.core.forget_pair(k)  # what comes behind RESET proves nothing of what was posted before
        self._refused.clear()
        self._by_reset = set(stopping) if reset else set()
        self._stop(stopping)
        return stopping

    def asks_again(self, in_time: bool) -> bool:
        """After `stop_backups`: whether a NIC has refused that and is to be asked again; in_time: while there is time.

        One that was asked for all the time is asked once by each verb from then on, until it carries out one of these.
        """
        again = False
        for k, err in list(self._refused.items()):  # an answer may come meanwhile
            nic = self._c.nic(k)
            if err == errno.EINVAL and k not in self._by_reset:
                again = True
            elif not in_time:
                nic.refuses = True
            else:
                again |= not nic.refuses
        return again

    def stop_again(self) -> list[int]:
        """After `stop_backups`: have that done that was refused. Returns their pairs."""
        again = self._refused if not self._c.closed else {}
        self._refused = {}
        # From RESET, where a failed rebuild leaves a QP, nothing goes to ERR (IBA 11.2.5.2): EINVAL.
        self._by_reset.update(k for k, err in again.items() if err == errno.EINVAL)
        self._stop(sorted(again))
        return sorted(again)

    def _stop(self, pairs: list[int]) -> None:
        c = self._c
        for k in pairs:
            if not c.nic(k).dead:
                self._asked.add(k)
                state = QpState.RESET if k in self._by_reset else QpState.ERR
                steps = c.nic(k).verbs.ModifySteps().add(state=state)
                c.driver.command(c, k, steps, functools.partial(self._stopped, k))

    def _stopped(self, k: int, err: int, _step: int) -> None:
        self._asked.discard(k)
        if err and err not in GONE and not self._c.nic(k).dead:
            self._refused[k] = err
        else:
            self.unstopped.discard(k)  # though it hung, or refused, before
            self._c.nic(k).refuses = False
        self._c.timeline.tell()

    def have_answered(self, stopping: list[int]) -> bool:
        """Whether it is known what became of that, but for those whose NICs are still at it."""
        c = self._c
        asked = self._asked.intersection(stopping)
        return all(c.nic(k).worker.pending(c.shadow.handle(k)) for k in asked)

    def let_go(self, stopped: list[int], reset: bool) -> None:
        """After `stop_backups`, when nothing can arrive there any more: the QP is the default one again.

        But for RESET its errors wait on where a backup is not known to be stopped: that is done before they are shown.
        """
        c = self._c
        if c.closed:
            return
        for k in stopped:
            c.drain(k)
            refused = self._refused.get(k)
            if refused:
                said = "QP %#x on %s: its backup could not be stopped on %s: %s"
                logger.error(said, c.shadow.qp_num, c.device(0), c.device(k), os.strerror(refused))
            if refused or k in self._asked:
                self.unstopped.add(k)
        self.behind.difference_update(stopped)
        if not c.core.ending:
            c.core.guarded = not reset and bool(self.unstopped.intersection(stopped))
            withheld = c.core.why_sends_fail(0)
            if c.core.guarded and withheld is not None:
                self.begin(withheld)  # what told of it may be gone with the pairing
        c.driver.looks.settle(c)

    def begin_anew(self) -> bool:
        """The application's QP is in RESET: what it has from now on is the default one's.

        Returns whether it was about to end, by an error that came while RESET waited for its backups.
        """
        was_ending = self.under_way
        if was_ending:
            self._c.fence = None
            self.forget()
        self.behind = set()
        self._spare = False
        self._c.early.begin_anew()  # what was said on leaving, or heard of while RESET waited, has ended it
        return was_ending

    def by_application(self, without_nic: bool) -> None:
        """After `touched`: the application's default QP is in ERR; without_nic: or would be, were its NIC not gone.

        A QP that was wholly there is flushed by it. What was elsewhere, or withheld, no hardware will flush. The error
        that was withheld at home, or that RESET was to take and did not, comes first.
        """
        core = self._c.core
        if self._c.closed:
            return
        flushed_by_nic = core.flushes_itself and not without_nic and core.first_error(0) is None
        if self.behind or core.ending or not flushed_by_nic:
            if core.guarded and not core.ending:
                self._c.drain(0)  # what its NIC tells of already
            kept = core.forgets or core.send_pair == 0
            muted = core.why_sends_fail(0) if kept and core.failed_wr(0) is not None else None
            self.begin(muted or FLUSHED)

    # ---- a mistake of ours ------------------------------------------------------------------------------------------

    def without_protocol(self, p: PairProtocol | None) -> None:
        """Something of ours failed, and nobody goes by `p` any more: what it had under way is ended here.

        What is outstanding gets its original error, the QP is a plain one again. `leave_behind` was called before.
        """
        c = self._c
        core = c.core
        moving = p is not None and p.send_state in WAITS and not (p.move_told or core.ends_at_post)
        if moving and core.send_pair == core.recv_pair == 0 and core.recv_is_open and not core.ending:
            core.move_cancel()  # nobody would open the gate behind its fence
        withheld = core.first_error(0) is not None  # the event that tells of it may still lie here
        if core.ending or (p is not None and (p.switching or withheld or not core.is_plain)):
            first, self._first, c.fence = self._first, None, None
            first = first or self.original or NO_ANSWER
            try:
                self.begin(first)
            except Exception:
                logger.exception("QP %#x: its end failed too; its errors come at once", c.shadow.qp_num)
                core.abort(*first)
