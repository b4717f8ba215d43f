# SPDX-License-Identifier: BSD-3-Clause
"""Which NIC backs up which, and our own handle on each NIC.

Without SHIFTVERBS_BACKUP, the backups of a device are all other devices with an active port of the same link
layer, in the order of `ibv_get_device_list`. With it, exactly those that it names for that device.
"""

from __future__ import annotations

import atexit
import errno
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from msgspec import Struct

from shiftverbs.native.ibv import GidType, LinkLayer, PortState
from shiftverbs.process.waiting import in_slices
from shiftverbs.pyverbs_error import ShiftError
from shiftverbs.shadows.key_plugs import Plugs

if TYPE_CHECKING:
    from shiftverbs._nic import Job, NicWorker
    from shiftverbs.shadows.raw_verbs import Verbs

logger = logging.getLogger("shiftverbs.backup")

# _core numbers pairs up to 15.
MAX_BACKUPS = 15
# How long a first PD may wait until all candidates are open; a sick NIC must not hold up a program for longer.
OPEN_TIMEOUT_S = 3.0
# A GID table has at most this many entries on any hardware known; mostly empty ones.
MAX_GIDS = 256
# The P_Key of the default partition, the only one on RoCE (annex A17.7.1).
DEFAULT_PKEY = 0xFFFF
_FULL_MEMBER = 0x8000

# What a NIC that is gone answers to a command.
GONE = (errno.EIO, errno.ENODEV, errno.ENXIO)

_IPV4_MAPPED = bytes(10) + b"\xff\xff"
_LINK_LOCAL = b"\xfe\x80"


# NICs whose threads must not outlive Python's own end.
_live: weakref.WeakSet[Nic] = weakref.WeakSet()
# At the end it is waited so long for all of them together.
STOP_S = 0.5


@atexit.register
def _stop_threads() -> None:
    """Cancel what is queued and wait a little for what is under way; the kernel takes back the rest."""
    nics = list(_live)
    for nic in nics:
        nic.stop(0.0)
    until = time.monotonic() + STOP_S
    for nic in nics:
        nic.stop(until - time.monotonic())


class BackupError(ShiftError):
    """SHIFTVERBS_BACKUP cannot be followed; the message says why."""


class Gid(Struct, frozen=True):
    """One entry of a GID table: its index, its type (enum ibv_gid_type), its 16 bytes."""

    index: int
    type: int
    raw: bytes

    @property
    def is_ipv4(self) -> bool:
        """Whether this is an IPv4-mapped address."""
        return self.raw.startswith(_IPV4_MAPPED)

    @property
    def is_link_local(self) -> bool:
        """Whether this is an fe80:: address."""
        return self.raw.startswith(_LINK_LOCAL)

    @property
    def kind(self) -> tuple[int, bool, bool]:
        """What two GIDs must have in common to reach the same peers: type, address family, scope."""
        return self.type, self.is_ipv4, self.is_link_local


class Port(Struct, frozen=True):
    """A port as it was when last looked at.

    number: from 1; active: its state; ethernet: its link layer (RoCE), else InfiniBand; mtu: active MTU (enum
    ibv_mtu); lid: 0 on RoCE; gids: its GID table without the empty entries; pkeys: its P_Key table, 0 = empty.
    """

    number: int
    active: bool
    ethernet: bool
    mtu: int = 5
    lid: int = 0
    gids: tuple[Gid, ...] = ()
    pkeys: tuple[int, ...] = (DEFAULT_PKEY,)


def best_gid(gids: Iterable[Gid], like: Gid | None = None) -> Gid | None:
    """The entry to use of one port's table; None where it is empty.

    like: the application's own entry: the same type and address family come first, then the same index.
    Without: RoCE v2 before v1, IPv4 before other addresses, link-local ones last, then the lowest index.
    """

    def rank(gid: Gid) -> tuple[int, ...]:
        general = (
            -gid.type if gid.type != GidType.IB else 0,
            not gid.is_ipv4,
            gid.is_link_local,
            gid.index,
        )
        if like is None:
            return tuple(map(int, general))
        special = (
            gid.type != like.type,
            gid.is_ipv4 != like.is_ipv4,
            gid.is_link_local != like.is_link_local,
        )
        return tuple(map(int, (*special, gid.index != like.index, *general)))

    return min(gids, key=rank, default=None)


def best_pkey(table: Sequence[int], pkey: int) -> int | None:
    """The index at which a P_Key table has `pkey`, or its partition with full membership, which reaches more; or None.

    pkey: 16 bits, the uppermost says whether it is of a full member (IBA 10.9.1).
    """
    for wanted in (pkey, pkey | _FULL_MEMBER):
        if wanted & ~_FULL_MEMBER and wanted in table:
            return table.index(wanted)
    return None


def choose(
    device: str,
    devices: Sequence[str],
    backup_map: Mapping[str, Sequence[str]],
    ports_of: Callable[[str], Sequence[Port]],
) -> list[str]:
    """The names of the backups of a device, in order.

    devices: all that exist, in libibverbs' order; backup_map: SHIFTVERBS_BACKUP, empty if unset; ports_of: asks a
    device for its ports (an empty answer: it could not be opened).
    Raises BackupError where the map names a device that does not exist.
    """
    if backup_map:
        named = [name for key, values in backup_map.items() for name in (key, *values)]
        unknown = sorted(set(named) - set(devices))
        if unknown:
            raise BackupError(
                f"SHIFTVERBS_BACKUP names {', '.join(unknown)}, which does not exist here; there is "
                f"{', '.join(devices) or 'no device at all'}"
            )
        return list(backup_map.get(device, ()))[:MAX_BACKUPS]
    own = ports_of(device)
    active = [port for port in own if port.active]
    if not own:
        return []
    ethernet = (active or own)[0].ethernet
    found = [
        name
        for name in devices
        if name != device and any(port.active and port.ethernet == ethernet for port in ports_of(name))
    ]
    return found[:MAX_BACKUPS]


class Nic:
    """Our own handle on one NIC, shared by all of this process: context, PD, its three threads.

    Nothing of it belongs to the application: its async events are ours alone. `port` and `gid_index` are what our
    control channel uses on it; shadow QPs use what `route()` finds for the application's.

    Whoever asks a sick NIC something hangs. So only a thread of its own asks: it leaves what it saw in `ports`, and
    everybody else goes by that. `look_again` has it look anew. That thread gives no commands, and `worker` asks nothing
    once the device is open: a driver may hold up a question (for Linux's RTNL, say) while it carries out commands.
    And a third one registers memory, which takes seconds where there is much of it: no fence waits for that.

    name: the device; make_worker: makes a thread (a NicWorker) from that: `worker` for commands, `registrar` for
    memory, and one that looks; verbs: the module of raw verbs (`_nic`). seen_ns: when the look began that `ports` is
    from (CLOCK_MONOTONIC, nanoseconds): one that is not answered changes neither.
    """

    def __init__(self, name: str, make_worker: Callable[[str], NicWorker], verbs: Verbs) -> None:
        self.name = name
        self.worker = make_worker(name)
        self.registrar = make_worker(name)
        self._looker = make_worker(name)
        self.verbs = verbs
        self.ctx = 0
        self.pd = 0
        self.port = 0
        self.gid_index = 0
        self._gid: Gid | None = None
        self.ports: tuple[Port, ...] = ()
        self.seen_ns = 0
        self.limits: dict[str, int] = {}
        self.error = ""
        # Set by the driver: it saw DEVICE_FATAL. Nothing works on this context any more.
        self.dead = False
        self.plugs = Plugs(self)
        self._pid = os.getpid()
        self._threads: dict[int, NicWorker] = {}
        self._on_the_way: list[None] = []  # one for each job that `worker` is to hand to `registrar`
        self.refuses = False  # to stop QPs, though it was asked again and again
        self._given_up_ns = 0  # when the command began that somebody gave up waiting for; 0: none
        self._in_vain_ns = 0  # the same, of whoever changed a QP's attributes
        self._looks: list[Callable[[], None]] = []
        self._looks_lock = threading.Lock()
        self.registrar.call(self._note_thread, self.registrar)
        self._opened = self.worker.call(self._open)
        _live.add(self)

    def _note_thread(self, thread: NicWorker) -> None:
        self._threads[threading.get_ident()] = thread

    def _open(self) -> None:
        """On the worker: open the device and look at its ports."""
        self._note_thread(self.worker)
        try:
            self.ctx = self.verbs.open_device(self.name)
            self.pd = self.verbs.alloc_pd(self.ctx)
            self.limits = self.verbs.query_device(self.ctx)
            self._see_ports()
            active = [port for port in self.ports if port.active]
            self.port = (active or list(self.ports))[0].number
            gid = best_gid(self.gids(self.port))
            self.gid_index = gid.index if gid is not None else 0
            self._gid = gid
        except (OSError, IndexError) as error:
            self.error = str(error) or "it has no port"
            logger.warning("NIC %s cannot be used: %s", self.name, self.error)

    def wait_open(self, timeout_s: float | None = None) -> bool:
        """Wait, without the GIL, until the device is open. Returns whether it is."""
        if not in_slices(self._opened.wait, timeout_s):
            return False
        error = self._opened.failure
        if error is not None:
            self.error = self.error or str(error) or type(error).__name__
        return not self.error

    @property
    def uses_grh(self) -> bool:
        """Whether addresses on this NIC need a GRH: always on Ethernet (RoCE)."""
        return any(port.ethernet for port in self.ports)

    @property
    def is_open(self) -> bool:
        """Whether the device was opened."""
        return bool(self.pd)

    def own_thread(self) -> NicWorker | None:
        """`worker` or `registrar`, where that is the caller's thread; else None."""
        return self._threads.get(threading.get_ident())

    def on_worker(self) -> bool:
        """Whether the caller is a thread of this NIC's, which must not wait for itself."""
        return threading.get_ident() in self._threads

    def hangs(self, longer_than_s: float) -> bool:
        """Whether the thread for commands has been busy with one for longer than this."""
        since_ns = self.worker.busy_since_ns
        return bool(since_ns) and time.monotonic_ns() - since_ns > longer_than_s * 1e9

    def memory_hangs(self, longer_than_s: float) -> bool:
        """Whether what is to be registered or let go of waits for something that has taken longer than this."""
        before_ns = time.monotonic_ns() - longer_than_s * 1e9
        return 0 < self.registrar.busy_since_ns < before_ns or 0 < self.worker.busy_since_ns < before_ns

    def register(self, job: Callable[..., object], *args: Any) -> bool:
        """Have a job run in `registrar`, behind all that both threads have now. Returns whether it was queued."""
        if not self.worker.pending():
            return bool(self.registrar.post(job, *args))
        self._on_the_way.append(None)
        return bool(self.worker.post(self._pass_on, job, *args))

    def _pass_on(self, job: Callable[..., object], *args: Any) -> None:
        self.registrar.post(job, *args)
        self._on_the_way.pop()

    def is_registering(self) -> bool:
        """Whether `registrar` has something to do, or will have when `worker` has handed it over."""
        return bool(self._on_the_way) or self.registrar.pending() > 0

    def in_turn(
        self, threads: Sequence[NicWorker], job: Callable[..., object], *args: Any
    ) -> Callable[[float], bool]:
        """Have a job run in the last of these threads of ours, behind all that each of them, in this order, has now.

        Returns what waits so many seconds for its end, and says if that has come, or never will: the NIC is shut down.
        """
        first, *others = threads
        for thread in reversed(others):
            job, args = thread.call, (job, *args)
        step = first.call(job, *args)

        def ended(timeout_s: float) -> bool:
            nonlocal step
            until = time.monotonic() + timeout_s
            while step.wait(max(0.0, until - time.monotonic())):
                if not others or step.failure is not None:
                    return True
                others.pop()
                step = cast("Job[object]", step.result(0.0))
            return False

        return ended

    def give_up(self) -> bool:
        """Somebody has waited long enough for the command under way. Returns whether that is new for this command."""
        before, self._given_up_ns = self._given_up_ns, self.worker.busy_since_ns
        return before != self._given_up_ns or not before

    def is_given_up(self) -> bool:
        """Whether what was under way at `give_up` still is: nothing was carried out since."""
        return bool(self._given_up_ns) and self.worker.busy_since_ns == self._given_up_ns

    def waited_in_vain(self) -> None:
        """A change of attributes has waited its whole time. (Not `give_up`: that one keeps DMA out of memory.)"""
        self._in_vain_ns = self.worker.busy_since_ns

    def is_known_to_wait(self) -> bool:
        """Whether what was under way at `waited_in_vain` still is."""
        return bool(self._in_vain_ns) and self.worker.busy_since_ns == self._in_vain_ns

    def _see_ports(self) -> None:
        """On a thread of ours: have `ports` be what the device answers now. Raises OSError."""
        began_ns = time.monotonic_ns()
        self.ports = self._read_ports()
        self.seen_ns = began_ns

    def _read_ports(self) -> tuple[Port, ...]:
        """On a thread of ours: ask the device for its ports and their GID tables. Raises OSError."""
        ports = []
        for number in range(1, self.limits["phys_port_cnt"] + 1):
            seen = self.verbs.query_port(self.ctx, number)
            gids = [self._read_gid(number, index) for index in range(min(MAX_GIDS, seen["gid_tbl_len"]))]
            ethernet = seen["link_layer"] == LinkLayer.ETHERNET
            entries = 0 if ethernet else seen["pkey_tbl_len"]
            pkeys = tuple(self._read_pkey(number, index) for index in range(entries)) or (DEFAULT_PKEY,)
            ports.append(
                Port(
                    number,
                    seen["state"] == PortState.ACTIVE,
                    ethernet,
                    seen["active_mtu"],
                    seen["lid"],
                    tuple(gid for gid in gids if gid is not None and any(gid.raw[8:])),
                    pkeys,
                )
            )
        return tuple(ports)

    def _read_pkey(self, port: int, index: int) -> int:
        try:
            return int(self.verbs.query_pkey(self.ctx, port, index))
        except OSError:
            return 0

    def _read_gid(self, port: int, index: int) -> Gid | None:
        try:
            return Gid(
                index,
                self.verbs.query_gid_type(self.ctx, port, index),
                self.verbs.query_gid(self.ctx, port, index),
            )
        except OSError:  # an empty entry
            return None

    @property
    def own_gid(self) -> bytes:
        """The GID of our control port, as last seen. Raises OSError where it has none."""
        gid = self.gid(self.port, self.gid_index)
        if gid is None:
            raise OSError(errno.ENODATA, f"{self.name} has no GID at index {self.gid_index}")
        return gid.raw

    def look_again(self, then: Callable[[], None]) -> None:
        """Read `ports` again, and call then() on the thread that looks afterwards, whether the device answered or not:
        that it did, `seen_ns` tells.

        Never waits: where the device hangs, then() is not called before it answers. Who asks before a look has begun
        shares it.
        """
        with self._looks_lock:
            self._looks.append(then)
            if len(self._looks) > 1:
                return
        self._opened.add_done_callback(lambda _: self._looker.call(self._look))

    def _look(self) -> None:
        with self._looks_lock:
            waiting, self._looks = self._looks, []
        try:
            if self.ctx and self.limits and not self.dead:
                self._see_ports()
        except OSError as error:
            logger.debug("%s: %s", self.name, error)
        for then in waiting:
            then()

    def port_seen(self, number: int) -> Port:
        """A port as it was when last looked at. Raises OSError where it does not exist or was never seen."""
        for port in self.ports:
            if port.number == number:
                return port
        raise OSError(errno.ENODEV, f"{self.name} has no port {number}")

    def gids(self, port: int) -> tuple[Gid, ...]:
        """The GID table of a port without its empty entries. Raises OSError."""
        return self.port_seen(port).gids

    def gid(self, port: int, index: int) -> Gid | None:
        """One entry of a port's GID table; None where it is empty. Raises OSError."""
        return next((gid for gid in self.gids(port) if gid.index == index), None)

    def pkey(self, port: int, index: int) -> int:
        """One entry of a port's P_Key table. Raises OSError where there is none."""
        table = self.port_seen(port).pkeys
        if not 0 <= index < len(table) or not table[index] & ~_FULL_MEMBER:
            raise OSError(errno.ENODATA, f"{self.name} has no P_Key at index {index}")
        return table[index]

    def pkey_index(self, port: int, pkey: int) -> int:
        """The index of `pkey`, which its peers' QPs use, in this port's table. Raises OSError where it is not there."""
        index = best_pkey(self.port_seen(port).pkeys, pkey)
        if index is None:
            raise OSError(errno.ENODATA, f"{self.name} has no P_Key {pkey:#06x} on port {port}")
        return index

    def current_gid(self, port: int, index: int, before: Gid | None) -> Gid | None:
        """What to use now for a GID that was at `index` of a port: the same one, wherever it is, before any other.

        before: that GID, if it was ever read. None where there is none of its kind: an IPv4 peer cannot be reached from
        a link-local address, whatever else is in the table.
        """
        at_index = self.gid(port, index)
        if at_index is not None and (before is None or at_index == before):
            return at_index
        table = self.gids(port)
        if before is None:
            return best_gid(table)
        same = [gid for gid in table if (gid.raw, gid.type) == (before.raw, before.type)]
        alike = [gid for gid in table if gid.kind == before.kind]
        return same[0] if same else best_gid(alike, before)

    def refresh_gid(self) -> bool:
        """After the GID table changed: see that `gid_index` is a good entry. Returns whether our GID is another now."""
        gid = self.current_gid(self.port, self.gid_index, self._gid)
        changed = gid != self._gid
        if gid is not None:
            self._gid, self.gid_index = gid, gid.index
        return changed and gid is not None

    def route(self, port: int, like: Gid | None) -> tuple[int, Gid | None]:
        """The port and GID to use for an application's QP.

        port: the application's port number on its own NIC; like: its GID there. The same number where this NIC has
        it and it is active, else any active one. Raises OSError.
        """
        usable = [seen.number for seen in self.ports if seen.active] or [seen.number for seen in self.ports]
        if not usable:
            raise OSError(errno.ENODEV, f"{self.name} has no port")
        number = port if port in usable else usable[0]
        return number, best_gid(self.gids(number), like)

    def stop(self, timeout_s: float) -> None:
        """Stop the threads and leave the device as it is. Nothing in a forked child.

        timeout_s: how long to wait for what is under way in all; again and again is allowed.
        """
        if self._pid == os.getpid():
            until = time.monotonic() + timeout_s
            self.worker.stop(max(0.0, timeout_s))
            self.registrar.stop(max(0.0, until - time.monotonic()))
            self._looker.stop(max(0.0, until - time.monotonic()))

    def close(self, timeout_s: float = 1.0) -> bool:
        """Close the device, stop its threads. Returns whether all ended in time. What hangs leaves it open."""
        if self._pid != os.getpid():
            return True
        memory = self.in_turn((self.worker, self.registrar), self._close_plugs)
        if not self._looker.stop(timeout_s) or not memory(timeout_s) or not self.registrar.stop(timeout_s):
            logger.debug("NIC %s hangs", self.name)
            self.stop(timeout_s)
            return False
        closing = self.worker.call(self._close)
        if not closing.wait(timeout_s):
            logger.debug("NIC %s hangs", self.name)
        elif closing.failure is not None:
            logger.debug("NIC %s: %s", self.name, closing.failure)
        return bool(self.worker.stop(timeout_s))

    def _close_plugs(self) -> None:
        try:
            self.plugs.close()
        except OSError as error:
            logger.debug("a page of ours is kept by %s: %s", self.name, error)

    def _close(self) -> None:
        pd, self.pd = self.pd, 0
        ctx, self.ctx = self.ctx, 0
        try:
            if pd:
                self.verbs.dealloc_pd(pd)
            if ctx:
                self.verbs.close_device(ctx)
        except OSError as error:
            logger.debug("NIC %s was not closed: %s", self.name, error)

    def __repr__(self) -> str:
        return f"<Nic {self.name}>"


class Nics:
    """All our NICs of this process.

    make_worker: makes a thread for a NIC from its name; verbs: the module of raw verbs (`_nic`).
    """

    def __init__(self, make_worker: Callable[[str], NicWorker], verbs: Verbs) -> None:
        self._make_worker = make_worker
        self._verbs = verbs
        self._nics: dict[str, Nic] = {}
        self._lock = threading.RLock()

    def get(self, name: str) -> Nic:
        """The handle on a device, opened in the background the first time."""
        with self._lock:
            nic = self._nics.get(name)
            if nic is None:
                nic = self._nics[name] = Nic(name, self._make_worker, self._verbs)
            return nic

    def all(self) -> list[Nic]:
        """Every NIC that was ever asked for. Waits for no lock, in whose holder the collector may close a QP."""
        return list(self._nics.values())

    def for_device(
        self,
        name: str,
        backup_map: Mapping[str, Sequence[str]],
        timeout_s: float = OPEN_TIMEOUT_S,
    ) -> tuple[Nic, list[Nic]]:
        """Our handle on a device, and on its backups in order; waits until they are open.

        backup_map: SHIFTVERBS_BACKUP; empty if unset.
        Raises BackupError where SHIFTVERBS_BACKUP cannot be followed; OSError where devices cannot be listed.
        """
        devices = self._verbs.list_devices()
        if not backup_map:
            for other in devices:  # all open at the same time
                self.get(other)

        def ports_of(device: str) -> Sequence[Port]:
            nic = self.get(device)
            return nic.ports if nic.wait_open(timeout_s) else ()

        names = choose(name, devices, backup_map, ports_of)
        backups = []
        for other in names:
            nic = self.get(other)
            if nic.wait_open(timeout_s):
                backups.append(nic)
            else:
                logger.warning("%s cannot back up %s: %s", other, name, nic.error or "it does not answer")
        return self.get(name), backups

    def close(self, timeout_s: float = 1.0) -> None:
        """Close every NIC."""
        with self._lock:
            nics, self._nics = list(self._nics.values()), {}
        for nic in nics:
            nic.close(timeout_s)
