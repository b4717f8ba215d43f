# SPDX-License-Identifier: BSD-3-Clause
"""Memory that the collector, or another thread, ends at any instruction of what is done with the book of keys."""

from __future__ import annotations

import dis
import functools
import gc
import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
from test_key_book import Mr, Nic, User, ask, known

from shiftverbs import _core
from shiftverbs.failover.services import memory_keys
from shiftverbs.failover.services.memory_keys import KeyBook, PeerKeys, Told
from shiftverbs.protocol.messages import Keys

RKEYS = range(1, 6)


class Peers:
    """Our book, and a peer that knows all keys in it and sends to a backup of ours."""

    def __init__(self) -> None:
        self.book = KeyBook()
        self.domain: Any = SimpleNamespace(nic=Nic(), backups=[Nic()])
        self.users: list[Any] = [User(), User()]
        self.users[0].receives_away = True
        self.told = self.book.told("i", "g", self.domain.nic)
        self.told.users.update(dict.fromkeys(self.users))
        self.theirs = PeerKeys(_core.RemoteKeys())
        their_user: Any = User()
        self.theirs.users[their_user] = None
        self.mrs = {rkey: Mr(self.domain, rkey, 100 + rkey) for rkey in RKEYS}
        for mr in self.mrs.values():
            self.book.add(mr)  # type: ignore[arg-type]
        self.question(*RKEYS)
        assert all(known(self.theirs, rkey) == 100 + rkey for rkey in RKEYS)
        self.end(1)
        self.hear()

    def question(self, *rkeys: int) -> None:
        """The peer asks, and takes every answer."""
        for answer in ask(self.book, self.told, self.theirs, *rkeys):
            self.theirs.take(answer)

    def end(self, rkey: int) -> None:
        """That memory is deregistered."""
        self.book.remove(self.mrs.pop(rkey))  # type: ignore[arg-type]

    def hear(self) -> None:
        """The peer is told of what is withdrawn; what it says to that is on its way."""
        self.theirs.take(self.book.push(self.told))

    def confirm(self) -> None:
        """That comes."""
        self.book.confirmed(self.told, self.theirs.version)

    def leave(self) -> None:
        """One of its two connections with us goes."""
        self.book.leave(self.told, self.users[1])


@functools.cache
def cannot_collect(code: Any, offset: int) -> bool:
    """Whether the instruction before this one neither allocates nor ends: only there does the collector come."""
    before = [
        each.opname for each in dis.get_instructions(code) if each.offset < offset and each.opname != "CACHE"
    ]
    return bool(before) and before[-1].startswith(("LOAD_FAST", "LOAD_ATTR", "COMPARE_OP", "POP_JUMP"))


def instructions(act: Callable[[], None], n: int, amid: Callable[[], None]) -> bool:
    """Call `act`, and `amid` before the n-th instruction of the book that it comes to; whether there were so many."""
    left = n

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal left
        if frame.f_code.co_filename != memory_keys.__file__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and not cannot_collect(frame.f_code, frame.f_lasti):
            left -= 1
            if left == 0:
                sys.settrace(None)
                amid()
                sys.settrace(trace)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(before)
    return left <= 0


def everywhere(act: Callable[[Peers], None]) -> Iterator[Peers]:
    """What becomes of it, where memory is ended before each instruction of it in turn."""
    for n in itertools.count(1):
        peers = Peers()
        if not instructions(lambda p=peers: act(p), n, lambda p=peers: p.end(3)):  # type: ignore[misc]
            assert n > 10
            return
        yield peers


ACTS: dict[str, Callable[[Peers], None]] = {
    "it asks": lambda peers: peers.question(2, 3, 4),
    "it confirms": Peers.confirm,
    "it is told": Peers.hear,
    "one of its QPs is closed": Peers.leave,
    "other memory is ended": lambda peers: peers.end(2),
}


@pytest.mark.parametrize("act", ACTS)
def test_the_peer_hears_of_all_that_is_gone(act: str) -> None:
    for peers in everywhere(ACTS[act]):
        for _ in range(3):
            peers.hear()
            peers.confirm()
        told = peers.told
        assert not told.unheard and not told.held and told.rkeys <= peers.mrs.keys()
        for rkey in RKEYS:
            assert known(peers.theirs, rkey) in ("?", *([100 + rkey] if rkey in peers.mrs else [])), rkey
        peers.question(4)
        assert known(peers.theirs, 4) == 104


def test_walking_what_is_held_allocates_nothing_that_the_collector_counts() -> None:
    """Else it may come amid that, within one instruction."""
    held = {(Nic(), rkey): (1, rkey) for rkey in range(100)}
    thresholds = gc.get_threshold()
    ran: list[str] = []
    gc.callbacks.append(lambda phase, info: ran.append(phase))
    try:
        for walk in (list, dict.copy):
            gc.set_threshold(0)
            gc.collect()
            gc.set_threshold(20)  # fewer than it has entries
            ran.clear()
            kept = walk(held)  # type: ignore[operator]
            gc.set_threshold(0)
            assert len(kept) == 100 and not ran
    finally:
        gc.callbacks.pop()
        gc.set_threshold(*thresholds)


def test_no_other_thread_tells_of_a_withdrawal_that_is_half_there() -> None:
    """Its number without its rkey: the peer would confirm that, and never hear of it."""
    said: list[Keys] = []
    for n in itertools.count(1):
        peers = Peers()
        told, before = peers.told, (peers.told.version, len(peers.told.gone))
        threads: list[threading.Thread] = []

        def amid(
            told: Told = told, before: Any = before, peers: Peers = peers, threads: Any = threads
        ) -> None:
            if told.version > before[0] and len(told.gone) == before[1]:
                thread = threading.Thread(target=lambda: said.append(peers.book.push(told)))
                threads.append(thread)
                thread.start()
                thread.join(0.02)  # it has to wait; where it need not, that is enough

        if not instructions(lambda p=peers: p.end(3), n, amid):  # type: ignore[misc]
            break
        for thread in threads:
            thread.join(30)
            assert 3 in said[-1].gone
    assert len(said) > 3
