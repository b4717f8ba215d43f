# SPDX-License-Identifier: BSD-3-Clause
"""The control channel at work: one UD QP per NIC, address handles, batching, pings (protocol.md, "Who is heard").

Everything here runs under the driver's lock; only making a control port or an address handle runs elsewhere, on the
NIC's own thread, because both may block. A datagram can be lost at any time: whoever cares sends again.
"""

from __future__ import annotations

import collections
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from shiftverbs.exchanger.records import ControlEndpoint
from shiftverbs.process.log_lines import Seldom
from shiftverbs.protocol import codec
from shiftverbs.protocol.codec import Entry, Forged, MalformedDatagram, OtherVersion, Ping, Replayed
from shiftverbs.protocol.path_health import PingState
from shiftverbs.protocol.seal import SECRET_BYTES, Seals
from shiftverbs.stragglers.trains import PATIENCE_NS, TRAIN_MESSAGES, Trains

if TYPE_CHECKING:
    from shiftverbs._nic import ControlPort
    from shiftverbs.failover.services.machine import Machine
    from shiftverbs.shadows.nic import Nic

logger = logging.getLogger("shiftverbs.control")

SEND_DEPTH = 256
# After a pair was suspected, so long it is not suspected again.
TRUST_NS = 500_000_000
# Where so many entries wait to be sent together, a datagram is as good as full.
BATCH_ENTRIES = 11
# An address handle that could not be made is tried again: resolving a neighbour that is down takes its time.
RETRY_FIRST_NS, RETRY_MOST_NS = 1_000_000_000, 60_000_000_000
# About so many datagrams of a port are read in one run of the driver: whoever floods us must not keep it here. A
# thousand QPs that fail together are eleven to a datagram.
READ_AT_ONCE = 64
# The seals of so many control ports of peers are kept after the last connection there was closed.
KEPT_SEALS = 1024


def gid_bytes(text: str) -> bytes:
    """A GID in record spelling (eight groups of four hex digits) as its 16 bytes."""
    return bytes.fromhex(text.replace(":", ""))


class Link:
    """Our control port on one NIC and one of a peer process's: under which seals they talk.

    paths: all that lead there; path: the one by which the peer is reached now. (There are several while some
    connections know already that its address is another one, and others do not.) key: our device, and what datagrams
    from there to it say whose they are.
    """

    def __init__(self, nic: Nic, seals: Seals) -> None:
        self.seals = seals
        self.key = (nic.name, seals.name_in)
        self.paths: list[Path] = []
        self.path: Path | None = None


class Path:
    """One NIC pair: our control port on `nic` with one control endpoint of a peer.

    `ready` once the address handle exists. users: connections that hold it.
    """

    def __init__(self, nic: Nic, endpoint: ControlEndpoint, link: Link, ping: PingState) -> None:
        self.nic = nic
        self.endpoint = endpoint
        self.link = link
        self.ping = ping
        self.ah = 0
        self.failed: str | None = None
        self.users: list[Callable[[Path], None]] = []
        self.outbox: list[Entry] = []
        self.told: bool | None = None
        self.asked = 0  # number of the last ping
        self.heard_ns: int | None = None  # when anything else came since then
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


class ControlChannel:
    """All control ports and paths of this process.

    post: runs a callable under the driver's lock, from any thread. watch/unwatch: add or remove a descriptor the
    control thread waits for. machine: the clock, and chance.
    """

    def __init__(
        self,
        post: Callable[[Callable[[], None]], None],
        watch: Callable[[int], None],
        unwatch: Callable[[int], None],
        ping_interval_ns: int,
        ping_dead_after: int,
        machine: Machine,
    ) -> None:
        self._machine = machine
        self._post = post
        self._watch = watch
        self._unwatch = unwatch
        self._ping_interval_ns = ping_interval_ns
        self._ping_dead_after = ping_dead_after
        self._ports: dict[str, ControlPort] = {}  # by device
        self._waiting: dict[str, list[Callable[[], None]]] = {}
        self._failed: dict[str, str] = {}
        self._reviving: set[str] = set()
        self.paths: dict[tuple[str, ControlEndpoint], Path] = {}
        self._secrets: dict[str, bytes] = {}  # device name -> the secret of our port there
        self._links: dict[tuple[str, int], Link] = {}  # by their keys
        # The seals of links that are gone, for when they are made again: what was said before is not new then.
        self._kept_seals: collections.OrderedDict[tuple[str, int], Seals] = collections.OrderedDict()
        self._first_number = 1  # greater than that of any datagram under seals that were forgotten
        self.dirty: dict[Path, None] = {}  # paths with something to `flush`, in order
        self._seldom = Seldom(logger)
        self.more = False  # whether datagrams were left in a port
        # Who is told of answers to pings: path, when the ping was sent, when its answer was heard.
        self.on_pong: Callable[[Path, int, int], None] | None = None
        self.trains = Trains()  # what goes ahead of pings, so that these tell what a rail carries
        # Datagrams that were dropped: no datagram of this release; of another release; not from whom they say; taken
        # before; from nobody we have to do with, or about a QP that is not here (those are entries); nothing in it but
        # room taken up.
        self.malformed = self.other_version = self.forged = self.replayed = self.unknown = self.filled = 0

    # ---- ports ------------------------------------------------------------------------------------------------------

    def port(self, nic: Nic) -> ControlPort | None:
        """The control port on `nic`, or None while it is not there."""
        return self._ports.get(nic.name)

    def secret(self, nic: Nic) -> bytes:
        """The secret of our control port on `nic`: for the exchanger, and nobody else."""
        secret = self._secrets.get(nic.name)
        if secret is None:
            made = self._machine.random_bits(8 * SECRET_BYTES).to_bytes(SECRET_BYTES, "big")
            secret = self._secrets.setdefault(nic.name, made)
        return secret

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
                port = nic.verbs.ControlPort(nic.ctx, nic.port, nic.gid_index, SEND_DEPTH)
                port.rearm()
            except OSError as error:
                reason = f"{nic.name}: no control port: {error}"
                self._post(lambda: self._port_made(nic, reason))
            else:
                self._post(lambda: self._port_made(nic, port))

        nic.worker.call(make)

    def _port_made(self, nic: Nic, made: ControlPort | str) -> None:
        """Or why there is none."""
        if isinstance(made, str):
            self._failed[nic.name] = made
            logger.warning("%s", made)
        else:
            self._ports[nic.name] = made
            if not nic.dead:
                self._watch(made.fd)
        for then in self._waiting.pop(nic.name, []):
            then()

    def _revive(self, nic_name: str, nic: Nic, port: ControlPort) -> None:
        if nic_name in self._reviving or nic.dead:
            return
        self._reviving.add(nic_name)

        def revive() -> None:
            try:
                port.revive()
                port.rearm()
                self._post(lambda: self._revived(nic_name, None))
            except OSError as error:
                reason = str(error)
                self._post(lambda: self._revived(nic_name, reason))

        nic.worker.call(revive)

    def _revived(self, nic_name: str, reason: str | None) -> None:
        self._reviving.discard(nic_name)
        if reason is not None:
            text = "%s: the QP of the control port cannot be brought out of ERR: %s"
            self._seldom.info(self._machine.now_ns(), text, nic_name, reason)

    # ---- paths ------------------------------------------------------------------------------------------------------

    def open_path(self, nic: Nic, endpoint: ControlEndpoint, on_change: Callable[[Path], None]) -> Path:
        """The path from `nic` to `endpoint`; on_change is called when it becomes ready or its health changes."""
        path = self.paths.get((nic.name, endpoint))
        if path is None:
            link = self._link(nic, endpoint)
            ping = PingState(self._ping_interval_ns, self._ping_dead_after, self._machine.random_bits(62))
            path = Path(nic, endpoint, link, ping)
            self.paths[path.key] = path
            link.paths.append(path)
            self._make_ah(path)
        path.link.path = path  # how the peer is reached now, where another way is not let go of yet
        path.users.append(on_change)
        return path

    def _link(self, nic: Nic, endpoint: ControlEndpoint) -> Link:
        made = Link(nic, Seals(self.secret(nic), bytes.fromhex(endpoint.secret), self._first_number))
        kept = self._kept_seals.pop(made.key, None)
        if kept is not None:
            made.seals = kept
        return self._links.setdefault(made.key, made)

    def _keep_seals(self, link: Link) -> None:
        self._kept_seals[link.key] = link.seals
        while len(self._kept_seals) > KEPT_SEALS:
            _, forgotten = self._kept_seals.popitem(last=False)
            self._first_number = max(self._first_number, forgotten.next_number)

    def close_path(self, path: Path, on_change: Callable[[Path], None]) -> None:
        """Let go of a path; the last user takes it down."""
        if on_change in path.users:
            path.users.remove(on_change)
        if path.users or self.paths.get(path.key) is not path:
            return
        self.flush_path(path)
        del self.paths[path.key]
        link = path.link
        link.paths.remove(path)
        if link.path is path:
            link.path = link.paths[-1] if link.paths else None
        if not link.paths:
            del self._links[link.key]
            self._keep_seals(link)
        self.trains.forget(path)
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
        attrs: dict[str, int | bytes] = {"dlid": endpoint.lid}
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
        if path.ah:
            path.outbox.append(entry)
            self.dirty[path] = None
            if len(path.outbox) >= BATCH_ENTRIES:
                self.flush_path(path)  # the peer may begin

    def flush(self) -> None:
        """Hand everything queued to the NICs."""
        while self.dirty:
            self.flush_path(next(iter(self.dirty)))

    def flush_path(self, path: Path) -> None:
        """Hand what is queued for one path to its NIC."""
        self.dirty.pop(path, None)
        entries, path.outbox = path.outbox, []
        port = self._ports.get(path.nic.name)
        if not entries or port is None or not path.ah:
            return
        if port.state == "error":
            self._revive(path.nic.name, path.nic, port)
            return
        most_bytes = min(codec.MAX_DATAGRAM_BYTES, port.max_message)
        for datagram in codec.encode(entries, path.link.seals, most_bytes):
            port.send(path.ah, path.endpoint.qpn, path.endpoint.qkey, datagram)

    def receive(self, now_ns: int) -> list[tuple[Path, Entry]]:
        """What arrived and is from whom it says, with a path to there; pings answered and taken out.

        Not all of it where there is much: `more` says so.
        """
        arrived: list[tuple[Path, Entry]] = []
        self.more = False
        for name, port in self._ports.items():
            datagrams = port.recv(READ_AT_ONCE)
            self.more |= port.more
            for data, source_qpn, _source_gid in datagrams:
                if data.startswith(codec.FILL_HEAD):
                    self.filled += 1
                    continue
                found = self._open(name, data, source_qpn, now_ns)
                if found is None:
                    continue
                link, entries = found
                for entry in entries:
                    if isinstance(entry.message, Ping):
                        self._on_ping(link, entry.message, now_ns)
                    elif link.path is not None:
                        arrived.append((link.path, entry))
        return arrived

    def _open(self, name: str, data: bytes, source_qpn: int, now_ns: int) -> tuple[Link, list[Entry]] | None:
        """The link and the entries of a datagram that arrived on device `name`; None if it is dropped."""
        try:
            link = self._links.get((name, codec.name_of(data)))
            if link is None:
                self.unknown += 1
                return None
            return link, codec.decode(data, link.seals)
        except OtherVersion as error:
            self.other_version += 1
            text = "%s: a process of another release (control QPN %#x) cannot talk with this one: %s"
            self._seldom.warning(now_ns, text, name, source_qpn, error)
        except Forged:
            self.forged += 1
            self._seldom.warning(
                now_ns, "%s: forged control datagram from QPN %#x: dropped", name, source_qpn
            )
        except Replayed:
            self.replayed += 1
        except MalformedDatagram as error:
            self.malformed += 1
            text = "%s: malformed control datagram from QPN %#x: %s"
            self._seldom.warning(now_ns, text, name, source_qpn, error)
        return None

    def _on_ping(self, link: Link, ping: Ping, now_ns: int) -> None:
        if ping.answer:
            for path in list(link.paths):  # the numbers of one fit no other
                sent_ns = path.ping.handle_pong(ping.number, now_ns)
                if sent_ns is not None and self.on_pong is not None:
                    self.on_pong(path, sent_ns, now_ns)
                self._tell(path)
        elif link.path is not None:
            self.send(link.path, Entry(0, 0, Ping(ping.number, True)))

    def ping(self, now_ns: int, hurry: bool = False) -> int | None:
        """Send the pings that are due; return when the next one is, or None. hurry: and nothing that can wait."""
        soonest: int | None = None
        for path in list(self.paths.values()):
            if path.failed is not None and not path.making and not path.nic.dead:
                self._retry(path, now_ns)
            due = path.ping.earliest_ns  # as a rule it is not: every run of the driver comes by here
            if now_ns >= due:
                self._ping(path, now_ns, hurry)
                due = path.ping.next_timeout_ns
            if soonest is None or due < soonest:
                soonest = due
        return soonest

    def _ping(self, path: Path, now_ns: int, hurry: bool) -> None:
        dead = path.ping.alive is False
        number = path.ping.poll_ping(now_ns)
        if number is not None:
            if path.asked and path.heard_ns is not None and not dead:
                # The peer has so much to say that its answer is late. One that counts as dead has to answer.
                path.ping.handle_sign_of_life(path.heard_ns)
            path.asked, path.heard_ns = number, None
            port = self._ports.get(path.nic.name)
            if not path.ah or port is None or port.state == "error":
                path.ping.handle_unsent()
            if self.trains.paths and not hurry and path.ping.is_well(now_ns):
                self._train(path, now_ns)
            self.send(path, Entry(0, 0, Ping(number, False)))
            self._tell(path)

    def _train(self, path: Path, now_ns: int) -> None:
        """Send what goes ahead of a ping, where a train is due."""
        port = self._ports.get(path.nic.name)
        if not path.ah or port is None or port.max_message < codec.MAX_DATAGRAM_BYTES:
            return
        if not self.trains.handle_ping(path, now_ns):
            return
        self.flush()  # what is to be said does not wait behind it
        to = (path.ah, path.endpoint.qpn, path.endpoint.qkey)
        if not all(port.send(*to, codec.FILL) for _ in range(TRAIN_MESSAGES - 1)):
            self.trains.handle_failed(path)
        for other in self.paths.values():
            if other.nic is path.nic:
                other.ping.allow(PATIENCE_NS, now_ns, other is path)

    def _retry(self, path: Path, now_ns: int) -> None:
        if path.retry_ns == 0:
            path.retry_ns = now_ns + path.backoff_ns
            path.backoff_ns = min(2 * path.backoff_ns, RETRY_MOST_NS)
        elif now_ns >= path.retry_ns:
            path.retry_ns = 0
            self._make_ah(path)

    def suspect(self, path: Path, now_ns: int, is_known: bool = False) -> None:
        """A QP on this NIC pair failed: it counts as dead until a ping is answered.

        Once for a while: a thousand QPs that fail one after the other on a pair that answers say no more than the
        first, and each time every QP there would have to be told. is_known: it does not answer.
        """
        if is_known or now_ns >= path.trusted_ns:
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
