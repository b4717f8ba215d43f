# SPDX-License-Identifier: BSD-3-Clause
"""Memory regions on the backup NICs: registered in each NIC's thread for memory, ended in the one for commands."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from shiftverbs._core import is_busy
from shiftverbs.native.ibv import AccessFlag, ReregMrFlag
from shiftverbs.process.waiting import in_slices, while_it_moves
from shiftverbs.shadows import shadow
from shiftverbs.shadows.pd import ShadowPD
from shiftverbs.shadows.shadow import FAILED, PENDING, READY, NotReady, Shadow, Slot, require

logger = logging.getLogger("shiftverbs.shadow")

# Closing an MR waits this long for a backup NIC to let go of the memory. A NIC that hangs longer keeps it pinned.
DEREG_TIMEOUT_S = 5.0
# A thread that failover waits for waits so long at a stretch for one backup, for however many MRs: half of what a peer
# with two pairs waits for an answer on each. It grows back within BRIEF_WITHIN_S.
BRIEF_S, BRIEF_WITHIN_S = 0.5, 1.0

PEERS_ACCESS = AccessFlag.REMOTE_WRITE | AccessFlag.REMOTE_READ | AccessFlag.REMOTE_ATOMIC
# How often a NIC is asked again that gave out a forbidden key, though it could have given others.
KEY_TRIES = 16

# (address, length, iova, access) of a registration.
Region = tuple[int, int, int, int]

# The NIC that something is being taken away from, whether what does that has hung for so many seconds, and a call that
# waits so many seconds and says if it is done.
Ending = tuple[Any, Callable[[float], bool], Callable[[float], bool]]


class Patience:
    """How long threads that failover waits for have waited for a NIC to let go of memory, of late. It grows back.

    One for each NIC of a process: what hangs uses up none of what another one needs.
    """

    def __init__(self) -> None:
        self._counted_s = -math.inf
        self._spent_s = 0.0

    def wait(self, ended: Callable[[float], bool], hangs: Callable[[float], bool]) -> bool:
        """Whether what is taken away (an `Ending`) is gone while there is patience; without any, whether it is now."""
        now = time.monotonic()
        self._spent_s = max(0.0, self._spent_s - (now - self._counted_s) * BRIEF_S / BRIEF_WITHIN_S)
        is_over = while_it_moves(ended, hangs, BRIEF_S, now + BRIEF_S - self._spent_s)
        self._counted_s = time.monotonic()
        self._spent_s += self._counted_s - now
        return is_over


def _is_destroyed(nic: Any, handle: int, timeout_s: float) -> bool:
    """Wait until a NIC's thread for commands has destroyed something. In that thread: whether it has."""
    if nic.own_thread() is nic.worker:
        return not nic.worker.pending(handle)
    return bool(nic.worker.drain(handle, timeout_s))


def _is_changed(slot: Slot, queued: Callable[[float], bool], timeout_s: float) -> bool:
    """Wait until a registration was changed, or was taken back before that began."""
    return (not slot.begun and not slot.former) or queued(timeout_s)


class ShadowMR(Shadow):
    """ibv_mr: the same memory, the same iova, the same access, on each backup NIC.

    A registration is made, and changed, in the thread for memory; it ends in the one for commands, which waits for no
    registration, behind what was commanded to QPs.

    lkey, rkey: the default NIC's; unshadowable: why no other NIC can reach this memory, empty if it can.
    former: registrations to be changed rather than made (`hand_over` of what this takes the place of: before), by
    backup; flags: what of them changes (IBV_REREG_MR_CHANGE_*). A NIC that keeps the keys then, as the default one may,
    leaves peers nothing to learn.
    """

    kind = "MR"

    def __init__(
        self,
        pd: ShadowPD,
        default: int,
        region: Region,
        lkey: int,
        rkey: int,
        unshadowable: str = "",
        former: Sequence[int] = (),
        flags: int = 0,
        before: ShadowMR | None = None,
    ) -> None:
        super().__init__(pd.domain, default)
        self.pd = pd
        self.region = region
        self.lkey = lkey
        self.rkey = rkey
        self.unshadowable = unshadowable
        self._flags = flags
        # What is waited for, again where that was interrupted, though it takes another one's place meanwhile.
        self.endings: list[Ending] = before.endings if before is not None else []
        for slot, handle in zip(self.slots, former, strict=False):
            slot.former = handle
        self.domain.runtime.mr_made(self)
        self.domain.keymap.del_local(lkey)  # where it was memory that is gone, and WRs named it
        if unshadowable:
            for slot in self.slots:
                slot.state, slot.reason = FAILED, unshadowable
            for k in range(1, len(self.slots) + 1):
                self.failed(k)
            self._answered()
        else:
            self.start()
        for handle, slot, nic in zip(former, self.slots, self.domain.backups, strict=False):
            if handle:
                changed = functools.partial(_is_changed, slot, nic.in_turn((nic.worker, nic.registrar), int))
                self.endings.append((nic, nic.memory_hangs, changed))

    def keys(self, k: int) -> tuple[int, int] | None:
        """(lkey, rkey) on NIC k; None unless READY."""
        if k == 0:
            return self.lkey, self.rkey
        slot = self.slots[k - 1]
        return slot.keys if slot.state == READY else None

    def _create(self, k: int, nic: Any, slot: Slot) -> None:
        address, length, _, access = self.region
        handle, slot.former = slot.former, 0  # nobody else's while it is being changed
        if handle and not self.pd.handle(k):  # of the memory before, which is the application's again
            nic.verbs.dereg_mr(handle)
        pd = require(self.pd, k)
        if handle and self._is_held(nic):  # perhaps its own key, from when it had another rkey
            nic.verbs.dereg_mr(handle)
            handle = 0
        if handle:
            try:
                keys = nic.verbs.rereg_mr(handle, self._flags, pd, address, length, access)
            except OSError as error:
                logger.info("%s refuses ibv_rereg_mr (%s): the MR is registered there anew", nic.name, error)
                nic.verbs.dereg_mr(handle)
                handle = 0
        if not handle:
            handle, *keys = self._register(nic, pd)
        slot.handle = handle
        slot.keys = (keys[0], keys[1])
        if not self.closed:  # else the key may be another MR's by now
            self.domain.keymap.set_local(self.lkey, k, keys[0])
        self._ready(k, slot)

    def _queue(self, k: int, nic: Any, job: Callable[[int, Any, Slot], None]) -> None:
        """Behind its PD, and where it takes the place of other memory behind what was commanded to QPs."""
        slot = self.slots[k - 1]
        if not nic.register(self._run, k, nic, slot, job):
            self._fail(k, slot, f"{nic.name} is shut down")

    def _take(self, k: int) -> int:
        slot = self.slots[k - 1]
        former, slot.former = slot.former, 0
        return former or super()._take(k)

    def _is_held(self, nic: Any, rkey: int | None = None) -> bool:
        """Whether a peer's WR may still come by a key (rkey: this one) that was other memory's, and reach this."""
        return bool(self.region[3] & PEERS_ACCESS) and self.domain.runtime.holds_key(nic, self.rkey, rkey)

    def _register(self, nic: Any, pd: int) -> tuple[int, int, int]:
        """(handle, lkey, rkey) of a new registration, by a key that is held for nobody."""
        address, length, iova, access = self.region
        if not self._is_held(nic):
            found: tuple[int, int, int] = nic.verbs.reg_mr(pd, address, length, iova, access)
            if not self._is_held(nic, found[2]):
                return found
            nic.verbs.dereg_mr(found[0])
        for _ in range(KEY_TRIES):
            nic.plugs.plug(functools.partial(self._is_held, nic))
            # Without the peers' rights as long as it is not known which key it has.
            handle, lkey, rkey = nic.verbs.reg_mr(pd, address, length, iova, access & ~PEERS_ACCESS)
            if not self._is_held(nic, rkey):
                try:
                    lkey, rkey = nic.verbs.rereg_mr(
                        handle, ReregMrFlag.CHANGE_ACCESS, pd, address, length, access
                    )
                except OSError:  # not all NICs can
                    nic.verbs.dereg_mr(handle)
                    handle, lkey, rkey = nic.verbs.reg_mr(pd, address, length, iova, access)
                if not self._is_held(nic, rkey):
                    return handle, lkey, rkey
            nic.verbs.dereg_mr(handle)
        raise NotReady("it gives out keys by which peers may still reach other memory")

    def _destroy(self, nic: Any, handle: int) -> None:
        nic.verbs.dereg_mr(handle)

    def failed(self, k: int) -> None:
        """A WR with this lkey cannot be moved to NIC k."""
        if not self.closed:
            self.domain.keymap.set_local(self.lkey, k, None)

    def settled(self) -> None:
        """WRs may wait for the keys."""
        if not self.closed:
            self.domain.runtime.mr_shadowed(self)

    def hand_over(self) -> list[int]:
        """As close(), but the registrations stay: they are the caller's. By backup, 0 where there is none.

        But not where other memory is being registered: what takes their place would come behind that, and the memory of
        these may go first. `wait` for these. Peers that ask meanwhile wait for what takes its place: `handed_over` must
        follow.
        """
        if self.closed or self._pid != os.getpid():
            return []
        self.disposed = self.closed = True  # before all else: what is made from now on enters no key
        self.pd.behind_memory = True  # what takes its place is made of it there
        self.domain.runtime.mr_changing(self)
        self.domain.keymap.del_local(self.lkey)
        self.domain.runtime.mr_gone(self)
        self.domain.runtime.wake()
        handles = []
        for k, (slot, nic) in enumerate(zip(self.slots, self.domain.backups, strict=True), 1):
            taken = slot.handle if slot.state == READY else 0
            if taken and not nic.is_registering():
                slot.handle, slot.state, slot.reason = 0, FAILED, "changed"
                handles.append(taken)
            else:
                self._take_from(k, nic)
                handles.append(0)
        return handles

    def handed_over(self) -> None:
        """What takes its place is there, or nothing will."""
        self.domain.runtime.mr_changed(self)

    def take_back(self, handles: Sequence[int]) -> None:
        """What `hand_over` gave, and nobody took: it is taken away as by close()."""
        for k, (handle, nic) in enumerate(zip(handles, self.domain.backups, strict=False), 1):
            if handle:
                self.slots[k - 1].former = handle
                self._take_from(k, nic)

    def wait(self) -> None:
        """Wait until the backups have let go of the memory that it was, and what it takes the place of: it may be freed
        next. Again where that was interrupted.
        """
        if self._pid != os.getpid():
            return
        for ending in tuple(self.endings):
            nic, hangs, ended = ending
            if is_busy():  # failover waits for this thread
                is_over = self.domain.runtime.patience[nic].wait(ended, hangs)
            else:  # not again and again for what hangs already
                is_over = in_slices(ended, 0.0 if hangs(DEREG_TIMEOUT_S) else DEREG_TIMEOUT_S)
            if not is_over:
                logger.error("%s still holds the memory of an MR that is being closed", nic.name)
            with contextlib.suppress(ValueError):  # another thread has waited for it, too
                self.endings.remove(ending)

    def close(self) -> None:
        """As for the others; but wait, since the memory may be freed next. Keys go first."""
        if self.closed:
            self.wait()  # the first close was interrupted
            return
        if self._pid != os.getpid():
            super().close()
            return
        self.disposed = self.closed = True  # before all else: what is made from now on enters no key
        self.domain.keymap.del_local(self.lkey)
        self.domain.runtime.mr_gone(self)
        commands = 0
        for k, nic in enumerate(self.domain.backups, 1):
            commands += self._take_from(k, nic)
        if not commands:
            self.domain.runtime.wake()  # as the end of a command does
        self.wait()

    def _take_from(self, k: int, nic: Any) -> bool:
        """Have NIC k let go of the memory, behind what was commanded to QPs that use it. `wait` waits for that.
        Returns whether that is a command.

        A NIC's own thread, where the collector found it, does so at once, but never another one's: that may hang.
        """
        slot = self.slots[k - 1]
        handle = self._take(k)
        if not handle:
            # Its job takes back what it makes, as it sees `disposed`.
            under_way = slot.begun and slot.state == PENDING
            self.pd.behind_memory |= under_way
            # Nobody knows its keys yet: it is only about pages that are held.
            if under_way and not is_busy() and not shadow.exiting:
                self.endings.append((nic, nic.memory_hangs, nic.registrar.call(int).wait))
        elif shadow.exiting:  # the threads are stopped, or are being
            if not nic.hangs(0.0):
                self._end(k, nic, handle)
        elif nic.own_thread() is nic.worker:
            self._end(k, nic, handle)
        else:
            nic.worker.destroy(functools.partial(self._destroyed, k, nic), self.kind, handle)
            self.endings.append((nic, nic.hangs, functools.partial(_is_destroyed, nic, handle)))
            return True
        return False
