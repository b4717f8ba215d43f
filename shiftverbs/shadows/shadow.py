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
import errno
import functools
import logging
import os
from collections.abc import Callable
from typing import Any

logger = logging.getLogger("shiftverbs.shadow")

PENDING, READY, FAILED = "pending", "ready", "failed"

# Set at exit: the NICs' threads will not get the GIL any more, and the kernel takes back what is left.
exiting = False


@atexit.register
def _at_exit() -> None:
    global exiting
    exiting = True


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
        if self._pid != os.getpid() or exiting:
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


def require(parent: Shadow, k: int) -> int:
    """The handle on NIC k of something that must be there first. Raises NotReady with its reason."""
    handle = parent.handle(k)
    if not handle:
        raise NotReady(parent.reason(k) or f"its {parent.kind} is missing")
    return handle
