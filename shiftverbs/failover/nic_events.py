# SPDX-License-Identifier: BSD-3-Clause
"""What NICs tell: async events of our own handles and of the application's contexts, and what follows for QPs.

Everything here runs under the driver's lock.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from shiftverbs.failover.services.host import Host, ProtectedQp
from shiftverbs.native.ibv import EventType

if TYPE_CHECKING:
    from shiftverbs._core import QPCore
    from shiftverbs._nic import Waiter
    from shiftverbs.failover.qp.pairing import Pairing
    from shiftverbs.shadows.async_events import AsyncEvents
    from shiftverbs.shadows.nic import Nic

logger = logging.getLogger("shiftverbs.driver")

# How often a port that is down is looked at.
ASK_PORTS_NS = 200_000_000


class ExposedQp(ProtectedQp, Protocol):
    """A connection, as events of NICs concern it."""

    @property
    def pairing(self) -> Pairing:
        """How it finds its peer."""

    def stands_on(self, nic: Nic) -> bool:
        """Whether one of its QPs may be on `nic`."""


class NicHost(Host, Protocol):
    """What this asks of the driver."""

    @property
    def waiter(self) -> Waiter:
        """The control thread's sleep."""

    @property
    def connections(self) -> Mapping[QPCore, ExposedQp]:
        """All that there are now."""

    def watch_soon(self) -> None:
        """Have connections looked at now, not only when their period is over."""


class NicEvents:
    """The NICs and contexts listened to, and which of their ports are down."""

    def __init__(self, driver: NicHost) -> None:
        self._driver = driver
        self._watched_nics: dict[str, Nic] = {}
        self._watched_events: dict[AsyncEvents, None] = {}
        self._port_bad: set[tuple[str, int]] = set()
        # By NIC, while it is looked at: since when, and the ports whose return that would show. No event of theirs has
        # come since.
        self._asking: dict[str, tuple[int, set[int]]] = {}
        self._asked_ns = 0

    def watch_nic(self, nic: Nic) -> None:
        """Listen to the async events of one of our NICs."""
        if nic.name not in self._watched_nics and nic.ctx and not nic.dead:
            self._watched_nics[nic.name] = nic
            self._driver.waiter.add(nic.verbs.async_fd(nic.ctx))

    def watch_events(self, events: AsyncEvents) -> None:
        """Take the events of an application's Context as they come, for its QPs' sake; it gets its copies."""
        if not events.closed:
            self._watched_events[events] = None
            self._driver.waiter.add(events.fd)
            if events.closed:  # meanwhile, by another thread: the descriptor may be another file's next
                self.unwatch_events(events)

    def unwatch_events(self, events: AsyncEvents) -> None:
        """That Context is going away."""
        self._watched_events.pop(events, None)
        self._driver.waiter.remove(events.fd)

    def qp_fatal(self, element: int) -> None:
        """QP_FATAL on the default QP at this address."""
        now = self._driver.now_ns()
        for connection in list(self._driver.connections.values()):
            if connection.shadow.handle(0) == element:
                self._driver.safely(
                    connection, connection.evidence.path_failed, 0, f"QP_FATAL on {connection.device(0)}", now
                )

    def take(self) -> None:
        """Take all events that have come."""
        for events in list(self._watched_events):
            try:
                events.pump(wait=False)
            except OSError as error:  # the device was removed; our own handle on it says so too
                logger.error("the events of a context cannot be read any more: %s", error)
                self.unwatch_events(events)
        for nic in list(self._watched_nics.values()):
            try:
                while nic.ctx and (event := nic.verbs.get_async_event(nic.ctx)) is not None:
                    kind, element = event.type, event.element
                    event.ack()
                    self._on_async(nic, kind, element)
            except OSError as error:
                logger.error(
                    "the events of %s cannot be read any more, it counts as dead: %s", nic.name, error
                )
                del self._watched_nics[nic.name]
                self._driver.waiter.remove(nic.verbs.async_fd(nic.ctx))
                self._on_async(nic, EventType.DEVICE_FATAL)

    def _on_async(self, nic: Nic, kind: int, element: int = 0) -> None:
        """One async event of our own handle on `nic`; element: the port number of a port's event."""
        now = self._driver.now_ns()
        if kind == EventType.PORT_ERR:
            self._port_bad.add((nic.name, element))
            if nic.name in self._asking:
                self._asking[nic.name][1].discard(element)
            if element == nic.port:
                self._driver.channel.port_changed(nic, up=False)
            self._fail_pairs(nic, element, "PORT_ERR", now)
        elif kind == EventType.PORT_ACTIVE:
            self._port_bad.discard((nic.name, element))
            if element == nic.port:
                self._driver.channel.port_changed(nic, up=True)
            self._driver.watch_soon()
            # It may be up with other GIDs.
            nic.look_again(lambda: None)
        elif kind == EventType.DEVICE_FATAL:
            nic.dead = True
            self._driver.channel.nic_died(nic)
            for connection in list(self._driver.connections.values()):
                self._driver.safely(connection, connection.evidence.nic_dead, nic, now)
        elif kind in (EventType.GID_CHANGE, EventType.LID_CHANGE):
            nic.look_again(lambda: self._driver.post(lambda: self._gids_changed(nic)))

    def ask_ports(self, now_ns: int) -> None:
        """Ports that were down by the last event are looked at now and then: the event of their return may be lost.

        Without that, pings would bring traffic home to a port that counts as down, and it would leave again at once.
        """
        if not self._port_bad or now_ns - self._asked_ns < ASK_PORTS_NS:
            return
        self._asked_ns = now_ns
        for name in sorted({name for name, _ in self._port_bad}):
            nic = self._watched_nics.get(name)
            if nic is not None and not nic.dead and name not in self._asking:  # one that hangs is asked once
                self._asking[name] = now_ns, {number for bad, number in self._port_bad if bad == name}
                nic.look_again(functools.partial(self._driver.post, functools.partial(self._ports_seen, nic)))

    def _ports_seen(self, nic: Nic) -> None:
        since_ns, asked = self._asking.pop(nic.name)
        if nic.seen_ns < since_ns:  # it did not answer: what was seen before says nothing
            return
        for port in nic.ports:
            if port.active and port.number in asked and (nic.name, port.number) in self._port_bad:
                self._on_async(nic, EventType.PORT_ACTIVE, port.number)

    def _gids_changed(self, nic: Nic) -> None:
        """The control channel goes by the new GID, and peers must learn it: they answer pings from known ones alone."""
        try:
            nic.refresh_gid()
        except OSError as error:
            logger.debug("%s: %s", nic.name, error)
        self._driver.channel.renew(nic)
        for connection in list(self._driver.connections.values()):
            if connection.stands_on(nic):
                self._driver.safely(connection, connection.pairing.gids_changed)

    def _fail_pairs(self, nic: Nic, port: int, reason: str, now: int) -> None:
        why = f"{reason} on {nic.name}"
        for connection in list(self._driver.connections.values()):
            for k in range(connection.n_pairs):
                if connection.nic(k) is nic and connection.port(k) == port:
                    self._driver.later(connection, connection.evidence.path_failed, k, why, now, True)

    def port_ok(self, nic: Nic, port: int) -> bool:
        """Whether that port of `nic` is, as far as events told, active."""
        return not nic.dead and (nic.name, port) not in self._port_bad
