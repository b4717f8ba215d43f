# SPDX-License-Identifier: BSD-3-Clause
"""Finding the peer of one QP: what is published, what is wanted, and when two entries name each other.

A pairing counts only if it is mutual: each side's entry names the other's default route and life. That is another one
each time a QP is connected, so that nobody pairs with a ghost: a QPN reused after a crash, or a peer's QP before RESET.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypedDict

from msgspec.structs import replace

from shiftverbs.exchanger import records
from shiftverbs.exchanger.records import ControlEndpoint, QpRecord, Route, ShadowRoute
from shiftverbs.failover.services.directory import NO_ENTRY
from shiftverbs.failover.services.host import ProtectedQp
from shiftverbs.process.log_lines import Seldom
from shiftverbs.protocol import events as ev
from shiftverbs.protocol.events import Status
from shiftverbs.protocol.messages import PairAddress, Phase, Sync

if TYPE_CHECKING:
    from shiftverbs.failover.qp.absence import Absence
    from shiftverbs.failover.services.control_channel import Path
    from shiftverbs.shadows.nic import Nic
    from shiftverbs.shadows.qp_attributes import QpFields

logger = logging.getLogger("shiftverbs.pairing")
_seldom = Seldom(logger)  # for what peers cause


def gid_text(gid: bytes) -> str:
    """16 bytes in record spelling: eight groups of four hex digits."""
    return gid.hex(":", 2)


class PeerShown(TypedDict):
    """For `qp.shift.pairing`: the peer's address and QPN, its process, how many pairs there are, our devices."""

    gid: str | None
    lid: int
    qpn: int
    instance: str
    pairs: int
    devices: list[str]


class PairedQp(ProtectedQp, Protocol):
    """A connection that is to have a peer."""

    peer: QpRecord | None

    @property
    def absence(self) -> Absence:
        """What is known of the peer's whereabouts."""

    @property
    def was_protected(self) -> bool:
        """Whether it was, in this pairing."""

    def paired(self, mine: QpRecord, theirs: QpRecord, paths: list[Path]) -> None:
        """The exchanger's entries name each other and every path is ready: start the protocol."""

    def unpair(self) -> None:
        """Back to before `paired`: it was with a former life of the peer's QP."""

    def never_protected(self, why: str) -> None:
        """It cannot be protected as it is connected (why: a sentence)."""


class Pairing:
    """Publishing one QP and finding its peer."""

    # The first for tests, which put others in the place of some methods.
    __slots__ = (
        "__dict__",
        "_entry",
        "_looks",
        "_memory",
        "_mine",
        "_my_keys",
        "_paths",
        "_peer_key",
        "_seen",
        "_theirs",
        "connection",
        "driver",
        "life",
    )

    def __init__(self, connection: PairedQp) -> None:
        self.connection = connection
        self.driver = connection.driver
        self.life = 0
        self._mine: QpRecord | None = None
        self._my_keys: list[str] = []
        self._peer_key: str | None = None
        self._paths: list[Path] = []
        self._theirs: QpRecord | None = None
        self._seen = False  # an entry of the peer's
        self._entry: QpRecord | None = None  # the peer's as it stands
        self._looks: dict[Nic, bool] = {}  # whether the look at it is over
        self._memory: dict[Nic, bool] = {}  # whether it has registered what there was

    # ---- our side ---------------------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Publish as soon as everything that has to be published is known; called whenever something changed."""
        c = self.connection
        shadow = c.shadow
        if self._mine is not None or c.closed or shadow.closed or c.status is Status.FAILED:
            return  # a QP that goes, or has been going since its shadows did: nobody is waiting for its protection
        if not shadow.is_connected:
            return
        backups = len(shadow.domain.backups)
        states = [shadow.state(k) for k in range(1, backups + 1)]
        if "pending" in states:
            c.set_why("the shadow resources are being made")
            return
        usable = 0
        while usable < backups and states[usable] == "ready":
            usable += 1
        if usable == 0:
            reason = shadow.reason(1) if backups else "no backup NIC"
            c.never_protected(f"no shadow QP: {reason}")
            return
        channel = self.driver.channel
        for k in range(usable + 1):
            nic = c.nic(k)
            if channel.port(nic) is None and channel.port_error(nic) is None:
                channel.open_port(nic, self.advance)
                c.set_why(f"the control port on {nic.name} is being made")
                return
        while usable and channel.port_error(c.nic(usable)) is not None:
            usable -= 1
        error = channel.port_error(c.nic(0))
        if usable == 0 or error is not None:
            c.never_protected(error or channel.port_error(c.nic(1)) or "no control port")
            return
        if not self._looked_at(usable):
            return
        try:
            self._publish(usable)
        except (OSError, ValueError) as failure:
            c.never_protected(f"the QP cannot be published: {failure}")

    def _looked_at(self, usable: int) -> bool:
        """Whether the NICs were looked at since the application connected the QP; else that is under way.

        A GID may have come a moment ago: the application uses it, so its peer will look under it.
        """
        c = self.connection
        nics = [c.nic(k) for k in range(usable + 1)]
        missing = [nic.name for nic in nics if not self._looks.get(nic)]
        for nic in nics:
            if nic not in self._looks:
                self._looks[nic] = False
                over = functools.partial(self._looked, self._looks, nic)
                nic.look_again(functools.partial(self.driver.post, over))
        if missing:
            c.set_why(f"{', '.join(missing)} is asked for its addresses")
        return not missing

    def _looked(self, looks: dict[Nic, bool], nic: Nic) -> None:
        looks[nic] = True
        if looks is self._looks:
            self.advance()

    def _publish(self, usable: int) -> None:
        c = self.connection
        shadow, attrs = c.shadow, c.shadow.attrs
        job = self.driver.config.job
        route = c.local_port(0)
        ah = attrs.get("ah_attr") or {}
        dgid = ah.get("dgid")
        own = Route(gid_text(route.gid), route.lid, shadow.qp_num)
        peer = Route(gid_text(dgid) if dgid is not None else None, ah.get("dlid", 0), attrs["dest_qp_num"])
        control, shadows = self._reached_at(usable)
        self.life = self.life or self.driver.machine.random_bits(64) or 1
        self._mine = QpRecord(
            job=job,
            instance=self.driver.instance,
            default=own,
            peer=peer,
            peer_life=None,
            shadows=shadows,
            control=control,
            life=f"{self.life:016x}",
            qp_access_flags=attrs.get("qp_access_flags", 0),
        )
        self._my_keys = [records.qp_key(job, own.gid or "", own.qpn)]
        if self.is_outdated(shadow.attrs):  # a modify whose thread found nothing published yet
            self._mine = replace(self._mine, qp_access_flags=shadow.attrs.get("qp_access_flags", 0))
        if own.lid:
            self._my_keys.append(records.qp_lid_key(job, own.gid or "", own.lid, own.qpn))
        self._put()
        self.driver.by_life[self.life] = c
        if peer.gid is not None:
            self._peer_key = records.qp_key(job, peer.gid, peer.qpn)
        else:
            self._peer_key = records.qp_lid_key(job, own.gid or "", peer.lid, peer.qpn)
        # A peer cannot be blamed for what cannot be read.
        c.set_why(self.driver.directory.away or NO_ENTRY)
        self.driver.directory.want(self._peer_key, self._peer_found)

    def _reached_at(self, usable: int) -> tuple[tuple[ControlEndpoint, ...], tuple[ShadowRoute, ...]]:
        """Our control ports, and our shadow QPs, on the default NIC and the first `usable` backups as they are now."""
        c = self.connection
        control, shadows = [], []
        for k in range(usable + 1):
            nic = c.nic(k)
            channel = self.driver.channel
            port = channel.port(nic)
            if port is None:
                raise ValueError(channel.port_error(nic) or f"{nic.name} has no control port")
            gid, lid = gid_text(nic.own_gid), nic.port_seen(nic.port).lid
            control.append(
                ControlEndpoint(nic.name, gid, lid, 5, port.qpn, port.qkey, channel.secret(nic).hex())
            )
            if k:
                found = c.local_port(k)
                shadows.append(
                    ShadowRoute(nic.name, gid_text(found.gid), found.lid, found.mtu, c.shadow.qpn(k))
                )
        return tuple(control), tuple(shadows)

    def gids_changed(self) -> None:
        """The GID table of a NIC changed: publish anew where we are reached, under the keys by which peers know us."""
        if self._mine is None:
            return
        try:
            self.connection.local_port(0)
            control, shadows = self._reached_at(len(self._mine.shadows))
        except (OSError, ValueError) as error:
            logger.debug("QP %#x: %s", self.connection.shadow.qp_num, error)
            return
        if (control, shadows) != (self._mine.control, self._mine.shadows):
            self._mine = replace(self._mine, control=control, shadows=shadows)
            self._put()

    def is_outdated(self, attrs: QpFields) -> bool:
        """Whether it was published that peers may do something else than these attributes say."""
        return self._mine is not None and self._mine.qp_access_flags != attrs.get("qp_access_flags", 0)

    def rights_changed(self, rights: Callable[[int], int]) -> None:
        """Publish anew what peers may do, on which they rely for our memory and for the fence of a MOVE.

        rights: the new IBV_ACCESS_* flags, of the published ones.
        """
        if self._mine is None:
            return
        flags = rights(self._mine.qp_access_flags)
        if flags != self._mine.qp_access_flags:
            self._mine = replace(self._mine, qp_access_flags=flags)
            self._put()

    def _put(self) -> None:
        assert self._mine is not None
        for key in self._my_keys:
            self.driver.directory.publish(key, self._mine)

    # ---- the peer's side --------------------------------------------------------------------------------------------

    def _peer_found(self, theirs: QpRecord | None) -> None:
        c = self.connection
        if c.closed or self._mine is None or self._peer_key is None:
            return
        self._entry = theirs
        if theirs is None:
            self._peer_lost()
            return
        self._seen = True
        if c.protocol is not None and not self._superseded(theirs):
            self._peer_moved(theirs)
            return
        if c.status is Status.FAILED:  # the SWITCH under way ended with the peer's former life
            return
        if theirs.life == self._mine.life:
            c.never_protected("the QP is connected to itself")
            return
        if theirs.peer is None or not theirs.peer.matches(self._mine.default):
            c.set_why("the peer's entry names another QP as its peer")
            return
        if self._mine.peer_life != theirs.life:
            if not self.has_memory():
                return
            self._memory = {}
            self._mine = replace(self._mine, peer_life=theirs.life)
            self._put()
        if not records.mutual(self._mine, theirs):
            c.set_why("the peer's entry does not name this connection yet")
            return
        self._theirs = theirs
        c.absence.entry_stands()
        self._open_paths()

    def _peer_lost(self) -> None:
        """Its entry is not there yet, or gone; a peer that died is noticed on the path."""
        c = self.connection
        if self._theirs is not None:
            c.absence.entry_left()
            c.set_why(c.absence.entry or NO_ENTRY)
        elif self._seen:
            c.set_why(NO_ENTRY)

    def _superseded(self, theirs: QpRecord) -> bool:
        """Whether we paired with what the peer's QP was before it was reset: only its new life will ever answer."""
        c, before = self.connection, self._theirs
        if c.status is not Status.PAIRING or c.was_protected or before is None or theirs.life == before.life:
            return False
        # Its BYE was lost. In a SWITCH of its, our QP is in our own fence: then it ends, for nobody would end that.
        nobody = PairAddress(bytes(16), 0, 0, 0, 1)
        c.feed(ev.MessageReceived(Sync(0, 0, Phase.BYE, 0, False, nobody, 0), None))
        return True

    def peer_left(self) -> None:
        """The peer's QP was closed or reset before we were protected: wait for its new life."""
        self._theirs = None
        self._memory = {}
        self._close_paths()
        self.connection.unpair()

    def _peer_moved(self, theirs: QpRecord) -> None:
        """Paired already: a GID of the peer's can be another one now. A newer life of it needs a newer life of ours."""
        c, before = self.connection, self._theirs
        if before is None or theirs.life != before.life:
            c.absence.entry_left()
            return
        c.absence.entry_stands()
        for k, path in enumerate(self._paths):
            if k < len(theirs.control) and theirs.control[k] != path.endpoint:
                now = theirs.control[k]
                text = "QP %#x: the peer's %s is %s now"
                _seldom.info(self.driver.now_ns(), text, c.shadow.qp_num, path.endpoint.gid, now.gid)
                self._paths[k] = self.driver.channel.open_path(c.nic(k), now, self._path_changed)
                if c.was_protected:
                    self._paths[k].ping.peer_knows_us()
                self.driver.channel.close_path(path, self._path_changed)
        self._theirs = c.peer = theirs

    def _open_paths(self) -> None:
        """Make the control paths to the peer, one per pair; both sides number pairs by their published order."""
        c, mine, theirs = self.connection, self._mine, self._theirs
        assert mine is not None and theirs is not None
        pairs = min(len(mine.shadows), len(theirs.shadows), len(theirs.control) - 1) + 1
        if pairs < 2:
            c.never_protected("the peer has no backup NIC")
            return
        if [path.endpoint for path in self._paths] != list(theirs.control[:pairs]):
            self._close_paths()  # those of a process that was restarted meanwhile, if any
            c.set_why("the control paths to the peer are being made")
            channel = self.driver.channel
            self._paths = [
                channel.open_path(c.nic(k), theirs.control[k], self._path_changed) for k in range(pairs)
            ]
        self._start_if_ready()

    def _path_changed(self, path: Path) -> None:
        if self.connection.protocol is not None:
            # One by one, in turn with what else is to be done: a path may have a thousand users.
            self.driver.later(self.connection, self.connection.evidence.path_changed, path)
        elif self._paths:
            self._start_if_ready()

    def _close_paths(self) -> None:
        paths, self._paths = self._paths, []
        for path in paths:
            self.driver.channel.close_path(path, self._path_changed)

    def _start_if_ready(self, my_turn: bool = False) -> None:
        c, mine, theirs = self.connection, self._mine, self._theirs
        if c.closed or c.protocol is not None or mine is None or theirs is None:
            return
        if c.status is Status.FAILED:  # it was given up: its application has its errors
            return
        pending = [path for path in self._paths if not path.ready and path.failed is None]
        if pending:
            return
        usable = [path for path in self._paths if path.ready]
        if not usable:
            failed = self._paths[0].failed
            c.set_why(
                f"no control path to the peer (does each rail carry traffic between these hosts?): {failed}"
            )
            return
        if mine.begins_arm(theirs) and not my_turn:
            self.driver.turns.begin_in_turn(c, functools.partial(self._start_if_ready, my_turn=True))
        else:
            c.paired(mine, theirs, self._paths)

    def has_memory(self) -> bool:
        """Whether the backups have the memory that there was when this began to be asked, or never will.

        Who is PROTECTED may lose a NIC the next moment: what is sent then must not wait for memory. So it is asked
        twice: before the peer is named, which pairs with who names it, and when a first step of ARM is heard, for
        either side may have been waited for since. Not for ever: a program may register on and on.
        """
        c = self.connection
        assert self._mine is not None
        nics = [c.nic(k) for k in range(1, len(self._mine.shadows) + 1)]
        for nic in nics:
            if nic not in self._memory:
                self._memory[nic] = not nic.is_registering()
                if not self._memory[nic]:
                    over = functools.partial(self._registered, self._memory, nic)
                    nic.register(self.driver.post, over)
        missing = [nic.name for nic in nics if not self._memory[nic]]
        if missing:
            c.set_why(f"memory is being registered on {', '.join(missing)}")
        return not missing

    def _registered(self, memory: dict[Nic, bool], nic: Nic) -> None:
        memory[nic] = True
        if memory is self._memory and self._entry is not None and self.connection.protocol is None:
            self._peer_found(self._entry)

    def rejected(self, key: str, reason: str) -> None:
        """The exchanger refused what stands under a key we want or published."""
        if key == self._peer_key:
            self.connection.set_why(f"the peer's entry is not usable: {reason}")
        elif key in self._my_keys:
            self.connection.set_why(f"our entry was refused: {reason}")

    # ---- the end ----------------------------------------------------------------------------------------------------

    def withdraw(self) -> None:
        """Take back what was published, and stop wanting; `advance` may begin a new life."""
        for key in self._my_keys:
            self.driver.directory.withdraw(key)
        self._my_keys = []
        if self._peer_key is not None:
            self.driver.directory.unwant(self._peer_key, self._peer_found)
            self._peer_key = None
        if self.life:
            self.driver.by_life.pop(self.life, None)
            self.life = 0
        self._close_paths()
        self._mine = None
        self._theirs = self._entry = None
        self._seen = False
        self._looks = {}
        self._memory = {}
