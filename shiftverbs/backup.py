# SPDX-License-Identifier: BSD-3-Clause
"""Which NIC backs up which, and our own handle on each NIC.

Without SHIFTVERBS_BACKUP, the backups of a device are all other devices with an active port of the same link
layer, in the order of `ibv_get_device_list`. With it, exactly those that it names for that device.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shiftverbs.pyverbs_error import ShiftError

logger = logging.getLogger("shiftverbs.backup")

PORT_ACTIVE = 4  # enum ibv_port_state
LINK_LAYER_ETHERNET = 2  # else InfiniBand: 1, or 0 from old providers
GID_TYPE_IB, GID_TYPE_ROCE_V1, GID_TYPE_ROCE_V2 = 0, 1, 2

# _core numbers pairs up to 15.
MAX_BACKUPS = 15
# How long a first PD may wait until all candidates are open; a sick NIC must not hold up a program for longer.
OPEN_TIMEOUT_S = 3.0
# A GID table has at most this many entries on any hardware known; mostly empty ones.
MAX_GIDS = 256

_IPV4_MAPPED = bytes(10) + b"\xff\xff"
_LINK_LOCAL = b"\xfe\x80"


# NICs whose threads must not outlive Python's own end.
_live: weakref.WeakSet[Nic] = weakref.WeakSet()


@atexit.register
def _stop_threads() -> None:
    """Cancel what is queued and wait a little for what is under way; the kernel takes back the rest."""
    for nic in list(_live):
        nic.stop()


class BackupError(ShiftError):
    """SHIFTVERBS_BACKUP cannot be followed; the message says why."""


@dataclass(frozen=True)
class Gid:
    """One entry of a GID table: its index, its type (enum ibv_gid_type), its 16 bytes."""

    index: int
    type: int
    raw: bytes

    @property
    def is_ipv4(self) -> bool:
        """Whether this is an IPv4 address in IPv6's clothes."""
        return self.raw.startswith(_IPV4_MAPPED)

    @property
    def is_link_local(self) -> bool:
        """Whether this is an fe80:: address."""
        return self.raw.startswith(_LINK_LOCAL)

    @property
    def kind(self) -> tuple[int, bool, bool]:
        """What two GIDs must have in common to reach the same peers: type, address family, scope."""
        return self.type, self.is_ipv4, self.is_link_local


@dataclass(frozen=True)
class Port:
    """What choosing needs to know of a port: its number, whether it is active, its link layer."""

    number: int
    active: bool
    ethernet: bool


def best_gid(gids: Iterable[Gid], like: Gid | None = None) -> Gid | None:
    """The entry to use of one port's table; None where it is empty.

    like: the application's own entry: the same type and address family come first, then the same index.
    Without: RoCE v2 before v1, IPv4 before other addresses, link-local ones last, then the lowest index.
    """

    def rank(gid: Gid) -> tuple[int, ...]:
        general = (
            -gid.type if gid.type != GID_TYPE_IB else 0,
            not gid.is_ipv4,
            gid.is_link_local,
            gid.index,
        )
        if like is None:
            return tuple(map(int, general))
        special = (gid.type != like.type, gid.is_ipv4 != like.is_ipv4, gid.is_link_local != like.is_link_local)
        return tuple(map(int, (*special, gid.index != like.index, *general)))

    return min(gids, key=rank, default=None)


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
    """Our own handle on one NIC, shared by all of this process: context, PD, command thread.

    Nothing of it belongs to the application: its async events are ours alone. `port` and `gid_index` are what our
    control channel uses on it; shadow QPs use what `route()` finds for the application's.

    name: the device; worker: its command thread (a NicWorker); verbs: the module of raw verbs (`_nic`).
    """

    def __init__(self, name: str, worker: Any, verbs: Any) -> None:
        self.name = name
        self.worker = worker
        self.verbs = verbs
        self.ctx = 0
        self.pd = 0
        self.port = 0
        self.gid_index = 0
        self._gid: Gid | None = None
        # Under each of these peers may know our memory.
        self.seen_gids: set[bytes] = set()
        self.ports: tuple[Port, ...] = ()
        self.limits: dict[str, Any] = {}
        self.error = ""
        # Set by the driver: it saw DEVICE_FATAL. Nothing works on this context any more.
        self.dead = False
        self._pid = os.getpid()
        self._thread = 0
        self._opened = worker.call(self._open)
        _live.add(self)

    def _open(self) -> None:
        """On the worker: open the device and look at its ports."""
        self._thread = threading.get_ident()
        try:
            self.ctx = self.verbs.open_device(self.name)
            self.pd = self.verbs.alloc_pd(self.ctx)
            self.limits = self.verbs.query_device(self.ctx)
            self.ports = tuple(map(self.query_port, range(1, self.limits["phys_port_cnt"] + 1)))
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
        try:
            self._opened.result(timeout_s)
        except Exception as error:
            if self._opened.done():
                self.error = self.error or str(error) or type(error).__name__
            return False
        return not self.error

    @property
    def uses_grh(self) -> bool:
        """Whether addresses on this NIC need a GRH: always on Ethernet (RoCE)."""
        return any(port.ethernet for port in self.ports)

    @property
    def is_open(self) -> bool:
        """Whether the device was opened."""
        return bool(self.pd)

    def on_worker(self) -> bool:
        """Whether the caller is this NIC's own thread, which must not wait for itself."""
        return threading.get_ident() == self._thread

    def hangs(self, longer_than_s: float) -> bool:
        """Whether the thread has been busy with one command for so long."""
        since_ns = self.worker.busy_since_ns
        return bool(since_ns) and time.monotonic_ns() - since_ns > longer_than_s * 1e9

    def query_port(self, number: int) -> Port:
        """Ask the device for one port. Raises OSError."""
        seen = self.verbs.query_port(self.ctx, number)
        return Port(number, seen["state"] == PORT_ACTIVE, seen["link_layer"] == LINK_LAYER_ETHERNET)

    def gids(self, port: int) -> list[Gid]:
        """The GID table of a port as it is now, without its empty entries."""
        found = []
        for index in range(min(MAX_GIDS, self.verbs.query_port(self.ctx, port)["gid_tbl_len"])):
            gid = self.gid(port, index)
            if gid is not None and any(gid.raw[8:]):
                found.append(gid)
        return found

    def gid(self, port: int, index: int) -> Gid | None:
        """One entry of a port's GID table as it is now; None where it is empty."""
        try:
            return Gid(
                index,
                self.verbs.query_gid_type(self.ctx, port, index),
                self.verbs.query_gid(self.ctx, port, index),
            )
        except OSError:
            return None

    def current_gid(self, port: int, index: int, before: Gid | None) -> Gid | None:
        """What to use now for a GID that was at `index` of a port: the same one, wherever it is, before any other.

        before: that GID, if it was ever read. None where there is none of its kind: an IPv4 peer cannot be reached from
        a link-local address, whatever else is in the table.
        """
        at_index = self.gid(port, index)
        if at_index is not None and any(at_index.raw[8:]) and (before is None or at_index == before):
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
        """The port and GID to use for an application's QP; read anew, for a GID can change over a flap.

        port: the application's port number on its own NIC; like: its GID there. The same number where this NIC has
        it and it is active, else any active one. Raises OSError.
        """
        ports = [self.query_port(known.number) for known in self.ports]
        usable = [seen.number for seen in ports if seen.active] or [seen.number for seen in ports]
        number = port if port in usable else usable[0]
        return number, best_gid(self.gids(number), like)

    def stop(self, timeout_s: float = 0.5) -> None:
        """Stop the thread and leave the device as it is. Nothing in a forked child."""
        if self._pid == os.getpid():
            self.worker.stop(timeout_s)

    def close(self, timeout_s: float = 1.0) -> bool:
        """Close the device and stop its thread. Returns whether all ended in time."""
        if self._pid != os.getpid():
            return True
        closing = self.worker.call(self._close)
        try:
            closing.result(timeout_s)
        except Exception as error:
            logger.debug("NIC %s: %s", self.name, error)
        return bool(self.worker.stop(timeout_s))

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

    make_worker: makes the command thread of a NIC from its name; verbs: the module of raw verbs (`_nic`).
    """

    def __init__(self, make_worker: Callable[[str], Any], verbs: Any) -> None:
        self._make_worker = make_worker
        self._verbs = verbs
        self._nics: dict[str, Nic] = {}
        self._lock = threading.RLock()

    def get(self, name: str) -> Nic:
        """The handle on a device, opened in the background the first time."""
        with self._lock:
            nic = self._nics.get(name)
            if nic is None:
                nic = self._nics[name] = Nic(name, self._make_worker(name), self._verbs)
            return nic

    def all(self) -> list[Nic]:
        """Every NIC that was ever asked for."""
        with self._lock:
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
