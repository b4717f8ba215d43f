# SPDX-License-Identifier: BSD-3-Clause
"""Shadow resources: what stands on the backup NICs behind each default resource.

A control verb runs on the default NIC at once, in the application's thread. The same verb, with the same attributes,
is queued here for each backup NIC's own thread: what makes something as a job in Python, what takes it away as a
command that needs no GIL. A NIC's thread goes by the order of its queue. Memory is registered in a thread of its own,
behind what the other one has to do; a PD goes behind what that thread has of it. Nothing here waits for a peer. A job
that fails leaves a reason behind and nothing else: the default resource works on.

Pair numbers k: 0 is the default NIC, 1 … n are the backups in `domain.backups`' order.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from pyverbs.pyverbs_error import PyverbsRDMAError

from shiftverbs._core import Unbroken, is_busy
from shiftverbs.native.ibv import AccessFlag, ReregMrFlag
from shiftverbs.process.waiting import in_slices, while_it_moves

logger = logging.getLogger("shiftverbs.shadow")

PENDING, READY, FAILED = "pending", "ready", "failed"

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

# Set at exit: the NICs' threads will not get the GIL any more, and the kernel takes back what is left.
_exiting = False


@atexit.register
def _at_exit() -> None:
    global _exiting
    _exiting = True


class Slot:
    """One shadow resource on one backup NIC."""

    __slots__ = ("begun", "former", "handle", "keys", "number", "reason", "size", "state")

    def __init__(self) -> None:
        self.state = PENDING
        self.begun = False  # its job
        self.handle = 0
        self.former = 0  # of an MR: the registration to be changed
        self.reason = ""
        self.keys: tuple[int, int] = (0, 0)  # of an MR: lkey, rkey
        self.number = 0  # of a QP: its number; of a channel: its descriptor
        self.size = 0  # of a CQ: its entries


class NotReady(Exception):
    """Something that this resource stands on failed; the message is the reason."""


class Shadow:
    """A resource on each backup NIC of a domain.

    domain: `.nic`, `.backups` (backup.Nic), `.keymap`, `.runtime`; default: the C pointer on the default NIC.
    """

    kind = "resource"
    behind_memory = False  # its end comes behind what the NIC's thread for memory has

    def __init__(self, domain: Any, default: int) -> None:
        self.domain = domain
        self.default = default
        self.slots = [Slot() for _ in domain.backups]
        # Being closed: jobs not begun yet make nothing.
        self.closed = False
        self.disposed = False  # by close(): its pointers may be somebody else's since
        self._pid = os.getpid()
        # Taken by the first that calls settled(): popping is atomic.
        self._to_settle = [True]

    def start(self) -> None:
        """Queue the creation on every backup NIC."""
        if not self.slots:
            self._answered()
        for k, nic in enumerate(self.domain.backups, 1):
            self._queue(k, nic, self._create)

    def state(self, k: int) -> str:
        """PENDING, READY or FAILED. The default resource (k = 0) is ready as long as this exists."""
        return READY if k == 0 else self.slots[k - 1].state

    def handle(self, k: int) -> int:
        """The C pointer on NIC k; 0 unless READY."""
        if k == 0:
            return self.default
        slot = self.slots[k - 1]
        return slot.handle if slot.state == READY else 0

    def reason(self, k: int) -> str:
        """Why it is FAILED; empty otherwise."""
        return "" if k == 0 else self.slots[k - 1].reason

    @property
    def is_inherited(self) -> bool:
        """Whether this is a forked child's copy: the machinery behind it is the parent's."""
        return self._pid != os.getpid()

    @property
    def pending(self) -> bool:
        """Whether some backup NIC has not answered yet."""
        return any(slot.state == PENDING for slot in self.slots)

    def _queue(self, k: int, nic: Any, job: Callable[[int, Any, Slot], None]) -> None:
        """Have a job run on a NIC's thread; whatever it raises makes slot k FAILED."""
        slot = self.slots[k - 1]
        if not nic.worker.post(self._run, k, nic, slot, job):
            self._fail(k, slot, f"{nic.name} is shut down")

    def _run(self, k: int, nic: Any, slot: Slot, job: Callable[[int, Any, Slot], None]) -> None:
        slot.begun = True
        if self.closed:
            self._fail(k, slot, "closed")
            return
        try:
            if not nic.is_open:
                raise NotReady(nic.error or "it is not open")
            job(k, nic, slot)
            if self.disposed:
                self._dispose(k, nic)  # close() may have been unable to queue it
        except (OSError, NotReady) as error:
            self._fail(k, slot, f"{self.kind} on {nic.name}: {error}")
        except Exception as error:
            if not self.closed:
                logger.exception("%s on %s", self.kind, nic.name)
            self._fail(k, slot, f"{self.kind} on {nic.name}: {error!r}")

    def _create(self, k: int, nic: Any, slot: Slot) -> None:
        """Job: make it on NIC k, then call _ready."""
        raise NotImplementedError

    def _destroy(self, nic: Any, handle: int) -> None:
        """On the NIC's thread: take it away. Raises OSError."""
        raise NotImplementedError

    def _detach(self, k: int) -> None:
        """Make the data path forget NIC k's resource, before it goes."""

    def _ready(self, k: int, slot: Slot) -> None:
        slot.state = READY
        self._answered()

    def _fail(self, k: int, slot: Slot, reason: str) -> None:
        if slot.state == FAILED:
            return
        slot.state = FAILED
        slot.reason = reason
        if not self.closed:
            logger.info("not made on the backup NIC, which cannot stand in for what uses it: %s", reason)
        self.failed(k)
        self._answered()

    def _answered(self) -> None:
        """One NIC more has answered; several may at the same time."""
        if self.pending:
            return
        try:
            self._to_settle.pop()
        except IndexError:
            return
        self.settled()

    def failed(self, k: int) -> None:
        """Called once where NIC k's resource could not be made."""

    def settled(self) -> None:
        """Called once no backup NIC is PENDING any more."""

    def close(self) -> None:
        """Take the resources away in the background. Any thread, any number of times; nothing in a forked child."""
        if self.disposed:
            return
        self.disposed = self.closed = True
        if self._pid != os.getpid() or _exiting:
            for k in range(1, len(self.slots) + 1):
                self.gone(k)
            return
        commands = 0
        for k, nic in enumerate(self.domain.backups, 1):
            if self.slots[k - 1].state == PENDING:
                # Its own job is queued or under way: only after that is there something to take away, or nothing.
                self._dispose_later(k, nic)
                continue
            handle = self._take(k)
            if not handle:
                self.gone(k)
                continue
            if self.behind_memory:
                self._destroy_later(k, nic, handle)
            else:
                nic.worker.destroy(functools.partial(self._destroyed, k, nic), self.kind, handle)
            commands += 1
        if not commands:
            self.domain.runtime.wake()  # as the end of a command does

    def _dispose_later(self, k: int, nic: Any) -> None:
        """Have NIC k's thread take away what its job will have made."""
        nic.worker.post(self._dispose, k, nic)

    def _destroy_later(self, k: int, nic: Any, handle: int) -> None:
        """Where it goes `behind_memory`: have NIC k's threads take it away."""
        raise NotImplementedError

    def _take(self, k: int) -> int:
        """The handle on NIC k, for whoever destroys it: nobody else has it any more. 0 where there is none."""
        slot = self.slots[k - 1]
        handle, slot.handle = slot.handle, 0
        if handle:
            slot.state, slot.reason = FAILED, "closed"
            self._detach(k)
        return handle

    def _dispose(self, k: int, nic: Any) -> None:
        """Job: take away what is on NIC k."""
        self._end(k, nic, self._take(k))

    def _end(self, k: int, nic: Any, handle: int) -> None:
        """Job: take away what was taken out of its slot; 0: there is nothing."""
        error = 0
        if handle:
            try:
                self._destroy(nic, handle)
            except OSError as failure:
                error = failure.errno or errno.EIO
        self._destroyed(k, nic, error)

    def _destroyed(self, k: int, nic: Any, error: int) -> None:
        """NIC k's resource was destroyed, or not: error is the verb's errno."""
        if error and error != errno.ECANCELED:  # which is the end of the process
            logger.warning("%s on %s was not destroyed: %s", self.kind, nic.name, os.strerror(error))
        self.gone(k)

    def gone(self, k: int) -> None:
        """Called when NIC k holds nothing of it any more after close(); perhaps twice."""


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


def require(parent: Shadow, k: int) -> int:
    """The handle on NIC k of something that must be there first. Raises NotReady with its reason."""
    handle = parent.handle(k)
    if not handle:
        raise NotReady(parent.reason(k) or f"its {parent.kind} is missing")
    return handle


class ShadowPD(Shadow):
    """ibv_pd. behind_memory: set where the thread for memory may have MRs of it when it ends."""

    kind = "PD"

    def __init__(self, domain: Any, default: int) -> None:
        super().__init__(domain, default)
        self.start()

    def _create(self, k: int, nic: Any, slot: Slot) -> None:
        slot.handle = nic.verbs.alloc_pd(nic.ctx)
        self._ready(k, slot)

    def _destroy(self, nic: Any, handle: int) -> None:
        nic.verbs.dealloc_pd(handle)

    def _dispose_later(self, k: int, nic: Any) -> None:
        """Behind its MRs."""
        nic.in_turn((nic.worker, nic.registrar, nic.worker), self._dispose, k, nic)

    def _destroy_later(self, k: int, nic: Any, handle: int) -> None:
        """Behind its MRs."""
        ended = functools.partial(self._destroyed, k, nic)
        nic.in_turn((nic.worker, nic.registrar), nic.worker.destroy, ended, self.kind, handle)


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
            if under_way and not is_busy() and not _exiting:
                self.endings.append((nic, nic.memory_hangs, nic.registrar.call(int).wait))
        elif _exiting:  # the threads are stopped, or are being
            if not nic.hangs(0.0):
                self._end(k, nic, handle)
        elif nic.own_thread() is nic.worker:
            self._end(k, nic, handle)
        else:
            nic.worker.destroy(functools.partial(self._destroyed, k, nic), self.kind, handle)
            self.endings.append((nic, nic.hangs, functools.partial(_is_destroyed, nic, handle)))
            return True
        return False


class ShadowChannel(Shadow):
    """ibv_comp_channel. core: the ChannelCore that merges the NICs' events."""

    kind = "completion channel"

    def __init__(self, domain: Any, default: int, core: Any) -> None:
        super().__init__(domain, default)
        self.core = core
        self.start()

    def _create(self, k: int, nic: Any, slot: Slot) -> None:
        slot.handle, slot.number = nic.verbs.create_channel(nic.ctx)
        self.core.attach(k, slot.handle)
        self._ready(k, slot)

    def _destroy(self, nic: Any, handle: int) -> None:
        nic.verbs.destroy_channel(handle)

    def _detach(self, k: int) -> None:
        self.core.detach(k)


class ShadowCQ(Shadow):
    """ibv_cq. core: the CQCore that the application polls; cqe: its capacity as the application knows it.

    The default CQ and the shadows grow with the QPs that use them: an error completes every outstanding WR,
    signaled or not, and an overrun kills the CQ for all.
    """

    kind = "CQ"

    def __init__(
        self, domain: Any, default: int, core: Any, cqe: int, channel: ShadowChannel | None, vector: int
    ) -> None:
        super().__init__(domain, default)
        self.core = core
        self.channel = channel
        self.application_cqe = cqe
        self._hardware_cqe = cqe
        self._vector = vector
        self._protected = 0
        self._others = 0
        # Across resize_cq. A handler that ran in the wait for it could close the CQ that waits.
        self._lock = Unbroken(threading.RLock(), shut=True)
        self.start()

    @property
    def needed(self) -> int:
        """Entries that must fit: the application's, or the sum of its QPs' queues and our own WCs."""
        return max(self.application_cqe, self._protected + self._others if self._protected else 0)

    def reserve(self, entries: int) -> None:
        """Make room for one more protected QP. Raises OSError where the default NIC has none; then nothing changed."""
        with self._lock:
            self._protected += entries
            try:
                if self.needed > self._hardware_cqe:
                    self._hardware_cqe = self.domain.nic.verbs.resize_cq(self.default, self.needed)
            except OSError:
                self._protected -= entries
                raise
        self._grow()

    def release(self, entries: int) -> None:
        """The protected QP is gone. CQs are not made smaller."""
        if self.is_inherited:  # whoever had the lock may not exist in this process
            return
        with self._lock:
            self._protected -= entries

    def count_other(self, entries: int) -> None:
        """An unprotected QP with this many WRs came (or, negative, went)."""
        if self.is_inherited:
            return
        refused: OSError | None = None
        with self._lock:
            self._others += entries
            if self.needed > self._hardware_cqe:
                try:
                    self._hardware_cqe = self.domain.nic.verbs.resize_cq(self.default, self.needed)
                except OSError as error:
                    refused = error
        # Not under the lock: the program's log handlers may take their time.
        if refused is not None:
            text = (
                "a CQ cannot have more than %d entries (%s): QPs for which that is too few are not protected"
            )
            logger.info(text, self._hardware_cqe, refused)

    def resize(self, cqe: int, resize: Callable[[int], None], granted: Callable[[], int]) -> None:
        """The application's ibv_resize_cq: resize(entries) does it, granted() reads what became of it."""
        if self.is_inherited:
            resize(cqe)
            self.application_cqe = granted()
            return
        with self._lock:
            if cqe < 1 or not self._protected:
                resize(cqe)
                self.application_cqe = self._hardware_cqe = granted()
            else:
                if cqe < self.application_cqe and self._waiting() > cqe:
                    # The hardware's has room. An application's own would have to hold them.
                    raise PyverbsRDMAError("Failed to resize CQ", errno.EINVAL)
                needed = max(cqe, self._protected + self._others)
                resize(needed)
                self._hardware_cqe = granted()
                self.application_cqe = cqe if needed > cqe else self._hardware_cqe
        self._grow()

    def _waiting(self) -> int:
        """How many completions the application has not taken, on whichever NIC they are."""
        for k in range(1 + len(self.slots)):
            if self.core.is_active(k):
                with contextlib.suppress(PyverbsRDMAError):  # a NIC that is gone
                    self.core.drain(k)
        return int(self.core.buffered)

    def _grow(self) -> None:
        """Let the shadows follow."""
        if self.closed or self._pid != os.getpid():
            return
        for k, nic in enumerate(self.domain.backups, 1):
            if self.slots[k - 1].size < self.needed:
                nic.worker.post(self._fit, k, nic)

    def _fit(self, k: int, nic: Any) -> None:
        """On the NIC's thread: make the shadow as deep as needed."""
        slot = self.slots[k - 1]
        if self.closed or not slot.handle or slot.size >= self.needed:
            return
        try:
            slot.size = nic.verbs.resize_cq(slot.handle, self.needed)
        except OSError as error:
            logger.info(
                "a CQ on the backup NIC %s cannot have more than %d entries: %s", nic.name, slot.size, error
            )

    def room(self, k: int, nic: Any) -> None:
        """On the NIC's thread: make sure that shadow k is deep enough. Raises NotReady."""
        slot = self.slots[k - 1]
        while slot.size < self.needed:  # which may go on growing meanwhile
            before = slot.size
            self._fit(k, nic)
            if slot.size <= before:
                raise NotReady(f"its CQ has {slot.size} entries instead of {self.needed}")

    def _create(self, k: int, nic: Any, slot: Slot) -> None:
        channel = require(self.channel, k) if self.channel is not None else 0
        vector = self._vector % max(1, int(nic.limits.get("num_comp_vectors", 1)))
        slot.handle, slot.size = nic.verbs.create_cq(nic.ctx, self.needed, channel, vector)
        self.core.attach(k, slot.handle)
        self._ready(k, slot)

    def _destroy(self, nic: Any, handle: int) -> None:
        nic.verbs.destroy_cq(handle)

    def _detach(self, k: int) -> None:
        self.core.detach(k)
