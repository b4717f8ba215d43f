# SPDX-License-Identifier: BSD-3-Clause
"""When a train of datagrams goes ahead of a ping, on a path without traffic. Pure: no I/O, no clock.

A round trip does not show what a rail carries; one behind so many bytes does. Trains are few: one at a time in a
process, and none for long where one took long or was not answered, for what is slow must not be filled up.
"""

from __future__ import annotations

from collections.abc import Hashable

from msgspec import Struct

from shiftverbs.stragglers.records import MS, SECOND

#: A train's datagrams, with the ping that ends it, and their bytes: 1,024 each, the most a control port takes.
TRAIN_MESSAGES = 64
TRAIN_BYTES = 64 * 1024
# Between two trains of a process, wherever they go.
APART_NS = 25 * MS
# A train that is not answered by then has taken too long, and so has one that is answered later.
LONG_NS = 100 * MS
# After that there is none on its path for so long, which doubles up to the other.
FIRST_REST_NS, MOST_REST_NS = SECOND, 8 * SECOND
# So long pings behind a train are not missed: at a megabit a second it takes half of that.
PATIENCE_NS = SECOND


class _Path(Struct):
    each: int | None
    pings: int = 0  # since its last train
    sent_ns: int | None = None  # that train
    rests_until_ns: int = 0
    rest_ns: int = FIRST_REST_NS


class Trains:
    """All trains of a process. paths: those that had some, named by whatever the caller knows them by."""

    def __init__(self) -> None:
        self.paths: dict[Hashable, _Path] = {}
        self._under_way: Hashable | None = None
        self._next_ns = 0

    def want(self, path: Hashable, each: int | None) -> None:
        """Have a train ahead of every so-many-th ping of a path; None: of none."""
        if path in self.paths:
            self.paths[path].each = each
        elif each is not None:
            self.paths[path] = _Path(each)

    def forget(self, path: Hashable) -> None:
        """That path is no more."""
        self.paths.pop(path, None)
        if self._under_way == path:
            self._under_way = None

    def handle_ping(self, path: Hashable, now_ns: int) -> bool:
        """A ping of that path is about to go out. Returns whether a train goes ahead of it."""
        known = self.paths.get(path)
        if known is None or known.each is None:
            return False
        known.pings += 1
        self._give_up(now_ns)
        if self._under_way is not None or now_ns < self._next_ns or now_ns < known.rests_until_ns:
            return False
        if known.pings < known.each:
            return False
        known.pings, known.sent_ns = 0, now_ns
        self._under_way, self._next_ns = path, now_ns + APART_NS
        wanted = sum(other.each is not None for other in self.paths.values())
        known.rests_until_ns = now_ns + APART_NS * wanted  # the others have their turn
        return True

    def handle_failed(self, path: Hashable) -> None:
        """The train that was to go now is not on its way as a whole: its ping is an ordinary one."""
        known = self.paths.get(path)
        if known is not None and known.sent_ns is not None:
            self._rest(known, known.sent_ns)  # no room: what there will be of it is not for trains
            known.sent_ns = None
        self._under_way = None

    def handle_pong(self, path: Hashable, sent_ns: int, now_ns: int) -> bool:
        """The ping that was sent then is answered. Returns whether a train went ahead of it."""
        known = self.paths.get(path)
        if known is None or known.sent_ns != sent_ns:
            return False
        if self._under_way == path:
            self._under_way = None
            if now_ns - sent_ns > LONG_NS:
                self._rest(known, now_ns)
            else:
                known.rest_ns = FIRST_REST_NS
        return True

    def _give_up(self, now_ns: int) -> None:
        """The one under way, where it has taken too long."""
        known = self.paths.get(self._under_way)
        if known is not None and known.sent_ns is not None and now_ns - known.sent_ns > LONG_NS:
            self._under_way = None
            self._rest(known, now_ns)

    @staticmethod
    def _rest(known: _Path, now_ns: int) -> None:
        known.rests_until_ns = now_ns + known.rest_ns
        known.rest_ns = min(2 * known.rest_ns, MOST_REST_NS)
