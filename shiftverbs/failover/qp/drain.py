# SPDX-License-Identifier: BSD-3-Clause
"""A fence on the hardware: the QPs of some pairs to ERR, and every completion out of their queues.

Runs under the driver's lock, for one connection.
"""

from __future__ import annotations

import errno
import functools
import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

from shiftverbs.failover.services.host import ProtectedQp
from shiftverbs.native.ibv import QpState
from shiftverbs.shadows.nic import GONE

if TYPE_CHECKING:
    from shiftverbs.failover.qp.rebuild import Rebuild

KICK_NS = 20_000_000
# What the NIC has for the flush after it answered, however late that was; and between two looks whether it is at work.
PATIENCE_NS = 100_000_000
# So often a NIC may refuse to bring a QP to ERR before it is believed that there is nothing to be brought there.
TRIES = 20


class FencedQp(ProtectedQp, Protocol):
    """A connection whose queues are emptied."""

    @property
    def fence(self) -> Fence | None:
        """The fence under way; any other is over."""

    @property
    def rebuild(self) -> Rebuild:
        """The one of the pairing that it is in."""


class Fence:
    """The fence of a SWITCH, or of a QP's end, while it is `connection.fence`.

    pairs: which; deadline_ns: when it hangs at the latest. done(): all of them are quiet, and what they completed is
    taken. hung(reason): they are not in time; it is over then, or made to `be_patient`. spare: of these pairs, those
    not waited for when their NIC refuses, or the time is over. unstopped: that were not brought to ERR.
    """

    __slots__ = (
        "_again_ns",
        "_c",
        "_commanded",
        "_deadline_ns",
        "_done",
        "_flushing",
        "_hung",
        "_kicked_ns",
        "_refused",
        "_spare",
        "_spare_until_ns",
        "_tries_left",
        "is_patient",
        "unstopped",
    )

    def __init__(
        self,
        connection: FencedQp,
        pairs: Iterable[int],
        deadline_ns: int,
        done: Callable[[], None],
        hung: Callable[[str], None],
        spare: Iterable[int] = (),
    ) -> None:
        self._c = connection
        self._deadline_ns = deadline_ns
        self._again_ns = 0  # is_patient: when it looks again at what has not ended
        self._done = done
        self._hung = hung
        self.is_patient = False
        self.unstopped: set[int] = set()
        self._spare = set(spare)
        self._spare_until_ns = deadline_ns
        self._tries_left = dict.fromkeys(pairs, TRIES)
        self._commanded = set(self._tries_left)  # ERR not confirmed yet
        self._flushing: set[int] = set()
        self._refused: dict[int, int] = {}  # pairs whose markers were not taken: the errno
        self._kicked_ns: dict[int, int] = {}

    def begin(self) -> None:
        """Give the commands."""
        c = self._c
        pairs = sorted(self._commanded)
        for k in pairs:
            c.rebuild.call_off(k)
            c.core.begin_fence(k)
        for k in pairs:
            if c.nic(k).dead:
                self._erred(k, errno.EIO, 0)
            else:
                c.driver.command(
                    c,
                    k,
                    c.nic(k).verbs.ModifySteps().add(state=QpState.ERR),
                    functools.partial(self._erred, k),
                )
        self._check()

    def command_again(self) -> None:
        """News of the commands may be lost: give those again that did not end. From ERR to ERR changes nothing."""
        c = self._c
        for k in sorted(self._commanded):
            if not c.nic(k).dead and not c.nic(k).worker.pending(c.shadow.handle(k)):
                c.driver.command(
                    c,
                    k,
                    c.nic(k).verbs.ModifySteps().add(state=QpState.ERR),
                    functools.partial(self._erred, k),
                )

    def _erred(self, k: int, err: int, _step: int) -> None:
        """The command that brings pair k to ERR came back."""
        c = self._c
        if c.fence is not self or k not in self._commanded:
            return
        self._commanded.discard(k)
        # Of a dead context nothing can reach the peer any more, and no flush will ever come.
        is_gone = c.nic(k).dead or err in GONE
        if err != 0 and not is_gone and k not in self._spare and self._tries_left[k]:
            self._tries_left[k] -= self.is_patient
            self._commanded.add(k)
            self._hung(f"{c.device(k)}: modify to ERR: {os.strerror(err)}")
            return
        c.drain(k)
        if err != 0 and not is_gone:
            self.unstopped.add(k)
        # No marker where it was refused for good: the QP may be in RTS, and the peer would receive it.
        if err == 0 and not is_gone and not all(c.core.fence_state(k)):
            self._deadline_ns = max(self._deadline_ns, c.driver.now_ns() + PATIENCE_NS)
            self._flushing.add(k)
            self._post_marker(k)
            self._kick(k)
        self.progress(k)

    def _post_marker(self, k: int) -> None:
        refused = self._c.core.post_marker(k)
        if refused:
            self._refused[k] = refused
        else:
            self._refused.pop(k, None)
        self._c.drain(k)
        self._c.driver.looks.expect()  # its flush, however long the command has taken

    def _kick(self, k: int) -> None:
        """Ask pair k's NIC to flush what stands in its queues now.

        A NIC may flush what it finds when the QP goes to ERR and not look again: soft-RoCE is never told of a receive
        that is posted later, the marker. ERR to ERR is a transition that changes nothing and makes it look.
        """
        c = self._c
        if c.fence is not self or k not in self._flushing or all(c.core.fence_state(k)):
            return
        self._kicked_ns[k] = c.driver.now_ns()
        c.driver.schedule(c, self.due_ns)
        c.driver.command(
            c, k, c.nic(k).verbs.ModifySteps().add(state=QpState.ERR), lambda err, step: self._kicked(k)
        )

    def _kicked(self, k: int) -> None:
        """The NIC has brought pair k to ERR once more: markers that it would not take before, it takes now."""
        if self._c.fence is self and k in self._flushing and k in self._refused:
            self._post_marker(k)
        self.progress(k)

    def progress(self, k: int) -> None:
        """Look whether pair k's queues have shown their flush."""
        if self._c.fence is not self:
            return
        if k in self._flushing and all(self._c.core.fence_state(k)):
            self._flushing.discard(k)
        if not self._commanded:
            self._check()

    def _check(self) -> None:
        if self._commanded or self._flushing or self._c.fence is not self:
            return
        self._done()

    def be_patient(self) -> None:
        """It hangs, and goes on. A QP that is in ERR takes nothing any more; the others are waited for."""
        c = self._c
        self.is_patient = True
        for k in sorted(self._flushing | self._commanded):
            c.drain(k)
        now_ns = c.driver.now_ns()
        # Where another pair's NIC refused, these have their time still: only a marker tells what completed unsignaled.
        if now_ns >= self._deadline_ns:
            self._flushing.clear()
        # One that has flushed both its queues went to ERR by itself, though its NIC does not answer.
        self._commanded -= {k for k in self._commanded if all(c.core.fence_state(k))}
        self._again_ns = now_ns + PATIENCE_NS
        c.driver.schedule(c, self._again_ns)
        self._check()

    @property
    def due_ns(self) -> int:
        """When `tick` must be called next."""
        due_ns = self._again_ns or self._deadline_ns
        if self._spare & (self._commanded | self._flushing):
            due_ns = min(due_ns, self._spare_until_ns)
        for k in self._flushing:
            due_ns = min(due_ns, self._kicked_ns.get(k, 0) + KICK_NS)
        return due_ns

    def tick(self, now_ns: int) -> None:
        """Time passes: take what the CQs hold, ask again, give up at the deadline."""
        c = self._c
        late = self._spare & (self._commanded | self._flushing) if now_ns >= self._spare_until_ns else None
        if late:
            self.unstopped |= late
            self._commanded -= late
            self._flushing -= late
            self._check()
        for k in sorted(self._flushing):
            c.drain(k)
            self.progress(k)
            if now_ns >= self._kicked_ns.get(k, 0) + KICK_NS:
                self._kick(k)
        for k in sorted(self._commanded):
            if c.nic(k).dead:
                self._erred(k, errno.EIO, 0)
        if c.fence is not self or now_ns < (self._again_ns or self._deadline_ns):
            return
        if self.is_patient:
            self.command_again()
            self.be_patient()
            return
        allowed_s = c.driver.protocol_config.fence_deadline_ns / 1e9
        if self._commanded and not any(c.nic(k).hangs(allowed_s) for k in self._commanded):
            # The NIC is at work, on the QPs that failed with this one: the command waits for its turn.
            self._deadline_ns = now_ns + PATIENCE_NS
            return
        hung = [f"{c.device(k)} did not bring the QP to ERR" for k in sorted(self._commanded)]
        for k in sorted(self._flushing):
            queues = zip(("send queue", "receive queue"), c.core.fence_state(k), strict=True)
            missing = " and the ".join(name for name, seen in queues if not seen)
            refused = f" (its marker: {os.strerror(self._refused[k])})" if k in self._refused else ""
            hung.append(f"{c.device(k)} did not flush the {missing}{refused}")
        self._hung(f"{'; '.join(hung)} in time")
