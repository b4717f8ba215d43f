"""The control channel at work: one UD QP per NIC, address handles, batching, pings (design 7.3).

Everything here runs under the driver's lock; only making a control port or an address handle runs elsewhere, on the
NIC's own thread, because both may block. A datagram can be lost at any time: whoever cares sends again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from . import _nic, control
from .control import Entry, MalformedDatagram, Ping
from .exchanger.records import ControlEndpoint
from .path_health import PingState

if TYPE_CHECKING:
    from .backup import Nic

logger = logging.getLogger("shiftverbs.control")

SEND_DEPTH = 256
# After a pair was suspected, so long it is not suspected again.
TRUST_NS = 500_000_000
# Where so many entries wait to be sent together, a datagram is as good as full.
BATCH_ENTRIES = 11
# An address handle that could not be made is tried again: resolving a neighbour that is down takes its time.
RETRY_FIRST_NS, RETRY_MOST_NS = 1_000_000_000, 60_000_000_000
QUIET_DATAGRAMS = 64  # at most that many malformed ones are logged


def gid_bytes(text: str) -> bytes:
    """A GID in record spelling (eight groups of four hex digits) as its 16 bytes."""
    return bytes.fromhex(text.replace(":", ""))


class Path:
    """One NIC pair: our control port on `nic` with one control endpoint of a peer.

    `ready` once the address handle exists. users: connections that hold it.
    """

    def __init__(self, nic: Nic, endpoint: ControlEndpoint, ping: PingState) -> None:
        self.nic = nic
        self.endpoint = endpoint
        self.ping = ping
        self.ah = 0
        self.failed: str | None = None
        self.users: list[Callable[[Path], None]] = []
        self.outbox: list[Entry] = []
        self.told: bool | None = None
        self.asked = 0  # number of the last ping
        self.heard = False  # whether anything else came since then
        self.trusted_ns = 0  # until then another failure there says nothing new about it
        self.making = False
        self.retry_ns = 0
        self.backoff_ns = RETRY_FIRST_NS

    @property
    def ready(self) -> bool:
        """Whether messages can be sent."""
        return self.ah != 0

    @property
    def key(self) -> tuple[str, ControlEndpoint]:
        """Our device, and all that there is to say of the peer's port.

        A peer that was restarted may have the same QPN with another Q_Key; one whose LID changed is elsewhere.
        """
        return (self.nic.name, self.endpoint)

    @property
    def source(self) -> tuple[str, bytes, int]:
        """What is heard of the peer: (our device, its GID, its control QPN)."""
        return (self.nic.name, gid_bytes(self.endpoint.gid), self.endpoint.qpn)


class ControlChannel:
    """All control ports and paths of this process.

    post: runs a callable under the driver's lock, from any thread. watch/unwatch: add or remove a descriptor the
    control thread waits for.
    """

    def __init__(
        self,
        post: Callable[[Callable[[], None]], None],
        watch: Callable[[int], None],
        unwatch: Callable[[int], None],
        ping_interval_ns: int,
        ping_dead_after: int,
    ) -> None:
        self._post = post
        self._watch = watch
        self._unwatch = unwatch
        self._ping_interval_ns = ping_interval_ns
        self._ping_dead_after = ping_dead_after
        self._ports: dict[str, Any] = {}  # device name -> ControlPort
        self._waiting: dict[str, list[Callable[[], None]]] = {}
        self._failed: dict[str, str] = {}
        self._reviving: set[str] = set()
        self.paths: dict[tuple[str, ControlEndpoint], Path] = {}
        self._by_source: dict[tuple[str, bytes, int], Path] = {}
        self._dirty: set[Path] = set()
        self.malformed = 0
        self.unknown = 0

    # ---- ports ------------------------------------------------------------------------------------------------------

    def port(self, nic: Nic) -> Any | None:
        """The control port on `nic`, or None while it is not there."""
        return self._ports.get(nic.name)

    def port_error(self, nic: Nic) -> str | None:
        """Why `nic` has no control port, or None."""
        return self._failed.get(nic.name)

    def open_port(self, nic: Nic, then: Callable[[], None]) -> None:
        """Make the control port on `nic` if it is not there; call `then` (under the lock) when it is, or failed."""
        if nic.name in self._ports or nic.name in self._failed:
            then()
            return
        waiting = self._waiting.setdefault(nic.name, [])
        waiting.append(then)
        if len(waiting) > 1:
            return

        def make() -> None:
            try:
                port = _nic.ControlPort(nic.ctx, nic.port, nic.gid_index, SEND_DEPTH)
                port.rearm()
            except OSError as error:
                reason = f"{nic.name}: no control port: {error}"
                self._post(lambda: self._port_made(nic, None, reason))
            else:
                self._post(lambda: self._port_made(nic, port, None))

        nic.worker.call(make)

    def _port_made(self, nic: Nic, port: Any, reason: str | None) -> None:
        if reason is not None:
            self._failed[nic.name] = reason
            logger.warning("%s", reason)
        else:
            self._ports[nic.name] = port
            if not nic.dead:
                self._watch(port.fd)
        for then in self._waiting.pop(nic.name, []):
            then()

    def _revive(self, nic_name: str, nic: Nic, port: Any) -> None:
        if nic_name in self._reviving or nic.dead:
            return
        self._reviving.add(nic_name)

        def revive() -> None:
            try:
                port.revive()
                port.rearm()
            except OSError as error:
                logger.info("%s: the control port could not be revived: %s", nic_name, error)
            self._post(lambda: self._reviving.discard(nic_name))

        nic.worker.call(revive)

    # ---- paths ------------------------------------------------------------------------------------------------------

    def open_path(self, nic: Nic, endpoint: ControlEndpoint, on_change: Callable[[Path], None]) -> Path:
        """The path from `nic` to `endpoint`; on_change is called when it becomes ready or its health changes."""
        path = self.paths.get((nic.name, endpoint))
        if path is None:
            path = Path(nic, endpoint, PingState(self._ping_interval_ns, self._ping_dead_after))
            self.paths[path.key] = path
            self._make_ah(path)
        self._by_source[path.source] = path  # what the peer is now, where something before is not let go of yet
        path.users.append(on_change)
        return path

    def close_path(self, path: Path, on_change: Callable[[Path], None]) -> None:
        """Let go of a path; the last user takes it down."""
        if on_change in path.users:
            path.users.remove(on_change)
        if path.users or self.paths.get(path.key) is not path:
            return
        self.flush_path(path)
        del self.paths[path.key]
        if self._by_source.get(path.source) is path:
            del self._by_source[path.source]
        ah, path.ah = path.ah, 0
        if ah:
            self._destroy_ah(path.nic, ah)

    def _destroy_ah(self, nic: Nic, ah: int) -> None:
        port = self._ports.get(nic.name)
        if port is not None and not nic.dead:
            nic.worker.call(port.destroy_ah, ah)

    def _make_ah(self, path: Path) -> None:
        port = self._ports.get(path.nic.name)
        if port is None:
            path.failed = self._failed.get(path.nic.name, f"{path.nic.name} has no control port")
            return
        endpoint = path.endpoint
        attrs: dict[str, Any] = {"dlid": endpoint.lid}
        if path.nic.uses_grh or endpoint.lid == 0:
            attrs["dgid"] = gid_bytes(endpoint.gid)
            attrs["sgid_index"] = path.nic.gid_index

        def make() -> None:
            try:
                ah = port.create_ah(**attrs)
            except (OSError, ValueError) as error:
                reason = f"{path.nic.name}: no address handle for {endpoint.gid}: {error}"
                self._post(lambda: self._ah_made(path, 0, reason))
            else:
                self._post(lambda: self._ah_made(path, ah, None))

        path.making = True
        path.nic.worker.call(make)

    def _ah_made(self, path: Path, ah: int, reason: str | None) -> None:
        path.making = False
        if self.paths.get(path.key) is not path:  # closed meanwhile
            if ah:
                self._destroy_ah(path.nic, ah)
            return
        path.failed = reason
        if ah:
            before, path.ah = path.ah, ah
            path.backoff_ns = RETRY_FIRST_NS
            if before:
                self._destroy_ah(path.nic, before)
        for user in list(path.users):
            user(path)

    def renew(self, nic: Nic) -> None:
        """The GID table of `nic` changed: make its address handles again."""
        for path in list(self.paths.values()):
            if path.nic is nic:
                self._make_ah(path)

    # ---- sending and receiving --------------------------------------------------------------------------------------

    def send(self, path: Path, entry: Entry) -> None:
        """Queue one entry; it leaves with the next `flush`, together with others for the same peer."""
        if path.ready:
            path.outbox.append(entry)
            self._dirty.add(path)
            if len(path.outbox) >= BATCH_ENTRIES:
                self.flush_path(path)  # the peer may begin

    def flush(self) -> None:
        """Hand everything queued to the NICs."""
        while self._dirty:
            self.flush_path(self._dirty.pop())

    def flush_path(self, path: Path) -> None:
        """Hand what is queued for one path to its NIC."""
        self._dirty.discard(path)
        entries, path.outbox = path.outbox, []
        port = self._ports.get(path.nic.name)
        if not entries or port is None or not path.ready:
            return
        if port.state == "error":
            self._revive(path.nic.name, path.nic, port)
            return
        for datagram in control.encode(entries, min(control.MAX_DATAGRAM_BYTES, port.max_message)):
            port.send(path.ah, path.endpoint.qpn, path.endpoint.qkey, datagram)

    def receive(self, now_ns: int) -> list[tuple[Path | None, Entry]]:
        """Everything that arrived, pings answered and taken out."""
        arrived: list[tuple[Path | None, Entry]] = []
        for name, port in self._ports.items():
            for data, source_qpn, source_gid in port.recv():
                path = self._by_source.get((name, source_gid, source_qpn)) if source_gid is not None else None
                try:
                    entries = control.decode(data)
                except MalformedDatagram as error:
                    self.malformed += 1
                    if self.malformed <= QUIET_DATAGRAMS:
                        logger.warning("%s: malformed control datagram from QPN %#x: %s", name, source_qpn, error)
                    continue
                for entry in entries:
                    if isinstance(entry.message, Ping):
                        self._on_ping(path, entry.message, now_ns)
                    else:
                        arrived.append((path, entry))
                        if path is not None:
                            path.heard = True
        return arrived

    def _on_ping(self, path: Path | None, ping: Ping, now_ns: int) -> None:
        if path is None:
            self.unknown += 1
        elif ping.answer:
            path.ping.handle_pong(ping.number, now_ns)
            self._tell(path)
        else:
            self.send(path, Entry(0, 0, Ping(ping.number, True)))

    def ping(self, now_ns: int) -> int | None:
        """Send the pings that are due; return when the next one is, or None."""
        soonest: int | None = None
        for path in list(self.paths.values()):
            if path.failed is not None and not path.making and not path.nic.dead:
                self._retry(path, now_ns)
            dead = path.ping.alive is False
            number = path.ping.poll_ping(now_ns)
            if number is not None:
                if path.heard and not dead:
                    # The peer has so much to say that its answer is late. One that counts as dead has to answer.
                    path.ping.handle_pong(path.asked, now_ns)
                path.asked, path.heard = number, False
                self.send(path, Entry(0, 0, Ping(number, False)))
                self._tell(path)
            due = path.ping.next_timeout_ns
            if soonest is None or due < soonest:
                soonest = due
        return soonest

    def _retry(self, path: Path, now_ns: int) -> None:
        if path.retry_ns == 0:
            path.retry_ns = now_ns + path.backoff_ns
            path.backoff_ns = min(2 * path.backoff_ns, RETRY_MOST_NS)
        elif now_ns >= path.retry_ns:
            path.retry_ns = 0
            self._make_ah(path)

    def suspect(self, path: Path, now_ns: int) -> None:
        """A QP on this NIC pair failed: it counts as dead until a ping is answered.

        Once for a while: a thousand QPs that fail one after the other on a pair that answers say no more than the
        first, and each time every QP there would have to be told.
        """
        if now_ns >= path.trusted_ns:
            path.trusted_ns = now_ns + TRUST_NS
            path.ping.suspect()
            self._tell(path)

    def port_changed(self, nic: Nic, up: bool) -> None:
        """PORT_ERR or PORT_ACTIVE on `nic`."""
        for path in list(self.paths.values()):
            if path.nic is nic:
                path.ping.port_ok = up
                self._tell(path)

    def nic_died(self, nic: Nic) -> None:
        """DEVICE_FATAL on `nic`. Where the device was removed, its descriptors are in error, which is as readable."""
        self.port_changed(nic, up=False)
        port = self._ports.get(nic.name)
        if port is not None:
            self._unwatch(port.fd)

    def _tell(self, path: Path) -> None:
        alive = path.ping.alive
        if alive is not None and alive is not path.told:
            path.told = alive
            for user in list(path.users):
                user(path)

    def close(self) -> None:
        """Take all ports down (blocks; NICs that hang are left alone)."""
        for name, port in list(self._ports.items()):
            self._unwatch(port.fd)
            try:
                port.close()
            except OSError as error:
                logger.info("%s: %s", name, error)
        self._ports.clear()
        self.paths.clear()
        self._by_source.clear()
