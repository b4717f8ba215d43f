# SPDX-License-Identifier: BSD-3-Clause
"""Memory that the collector, or another thread, ends at any instruction of what is done with the book of keys."""

from __future__ import annotations

import dis
import functools
import gc
import itertools
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import CodeType, FrameType, SimpleNamespace
from typing import Any

import pytest
from harness import wait_until
from test_key_book import Mr, Nic, User, ask, known

from shiftverbs import _core
from shiftverbs.failover.services import memory_keys
from shiftverbs.failover.services.memory_keys import KeyBook, PeerKeys

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
        news = self.told.news()
        assert news.since <= news.version, "the peer takes no other"
        self.theirs.take(news)

    def confirm(self) -> None:
        """That comes."""
        self.book.confirmed(self.told, self.theirs.version)

    def leave(self) -> None:
        """One of its two connections with us goes."""
        self.book.leave(self.told, self.users[1])


#: Instructions that neither allocate nor end anything, of ints, tuples and deques: the collector comes behind none.
PLAIN = "LOAD_", "COMPARE_OP", "POP_JUMP", "STORE_ATTR", "BINARY_SUBSCR", "CONTAINS_OP", "PRECALL"


@functools.cache
def names(code: CodeType) -> dict[int, str]:
    """Its instructions, by where they are."""
    return {each.offset: each.opname for each in dis.get_instructions(code)}


def instructions(act: Callable[[], None], n: int, amid: Callable[[], None]) -> bool:
    """Call `act`, and `amid` before the n-th instruction of our book that it comes to; whether there were so many."""
    left = n
    last: dict[FrameType, str] = {}

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal left
        code = frame.f_code
        if code.co_filename != memory_keys.__file__ or not code.co_qualname.startswith(("KeyBook.", "Told.")):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            before, last[frame] = last.get(frame, ""), names(code).get(frame.f_lasti, "")
            left -= not before.startswith(PLAIN)
            if left == 0 and not before.startswith(PLAIN):
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


def everywhere(act: Callable[[Peers], None], amid: Callable[[Peers], None]) -> Iterator[Peers]:
    """What becomes of it, where `amid` happens before each instruction of it in turn."""
    for n in itertools.count(1):
        peers = Peers()
        if not instructions(lambda p=peers: act(p), n, lambda p=peers: amid(p)):  # type: ignore[misc]
            assert n > 10
            return
        yield peers


def tell(peers: Peers) -> None:
    """A push, and what it is answered with: by another thread, or in a finalizer of the program's that polls."""
    peers.hear()
    peers.confirm()


def end_and_tell(peers: Peers) -> None:
    peers.end(3)
    tell(peers)


def much_is_ended(peers: Peers) -> None:
    peers.end(3)
    peers.end(4)


AMID: dict[str, Callable[[Peers], None]] = {
    "memory is ended": lambda peers: peers.end(3),
    "much memory is ended": much_is_ended,
    "the peer is told": tell,
    "memory is ended, and the peer told": end_and_tell,
}
ACTS: dict[str, Callable[[Peers], None]] = {
    "it asks": lambda peers: peers.question(2, 3, 4),
    "it confirms": Peers.confirm,
    "it is told": Peers.hear,
    "one of its QPs is closed": Peers.leave,
    "other memory is ended": lambda peers: peers.end(2),
}


def hears_of_all(act: str, amid: str) -> None:
    """Whatever the peer is told, and when: in the end it knows no key of memory that is gone, and nothing is kept."""
    for peers in everywhere(ACTS[act], AMID[amid]):
        told = peers.told
        numbers = {number for number, _ in told.gone}
        assert numbers >= {*range(told.floor + 1, told.version + 1)} and len(numbers) <= memory_keys.GONE_KEPT
        for _ in range(3):
            tell(peers)
        assert not told.unheard and not told.held and told.rkeys <= peers.mrs.keys()
        for rkey in RKEYS:
            assert known(peers.theirs, rkey) in ("?", *([100 + rkey] if rkey in peers.mrs else [])), rkey
        peers.question(5)
        assert known(peers.theirs, 5) == 105


@pytest.mark.parametrize("amid", AMID)
@pytest.mark.parametrize("act", ACTS)
def test_the_peer_hears_of_all_that_is_gone(act: str, amid: str) -> None:
    hears_of_all(act, amid)


@pytest.mark.parametrize("amid", AMID)
def test_one_that_has_forgotten_what_is_gone_hears_that_it_has(
    amid: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of some withdrawals alone is remembered what they were."""
    monkeypatch.setattr(memory_keys, "GONE_KEPT", 1)
    hears_of_all("other memory is ended", amid)
    hears_of_all("it is told", amid)


def test_who_waits_for_a_key_waits_whatever_is_ended_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than is remembered, so that it is not among that any more."""
    monkeypatch.setattr(memory_keys, "GONE_KEPT", 1)

    def waits(peers: Peers) -> None:
        peers.confirm()
        peers.end(2)
        said.append(peers.told.awaits(2))

    said: list[bool] = []
    for _ in everywhere(waits, much_is_ended):
        assert said[-1]


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


def test_a_handler_that_raises_leaves_no_memory_in_the_book() -> None:
    """It runs while a thread that ends memory waits for the book; a second close would not withdraw that any more."""
    peers = Peers()
    held, release, main = threading.Event(), threading.Event(), threading.get_ident()

    def has_the_book() -> None:
        with peers.book._lock:
            held.set()
            release.wait(30)

    places: list[tuple[CodeType, int]] = []

    def is_waited_for() -> bool:
        frame = sys._current_frames()[main]
        places.append((frame.f_code, frame.f_lasti))
        return (
            places[-1][0] is KeyBook.remove.__code__ and places[-5:] == [places[-1]] * 5
        )  # it goes no further

    def rings() -> None:
        held.wait(30)
        wait_until(is_waited_for, 30)
        signal.pthread_kill(main, signal.SIGUSR1)

    def handler(*_: object) -> None:
        release.set()
        raise KeyboardInterrupt

    threads = [threading.Thread(target=has_the_book), threading.Thread(target=rings)]
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        for thread in threads:
            thread.start()
        held.wait(30)
        with pytest.raises(KeyboardInterrupt):
            peers.end(3)
            _core.look_for_signals()
    finally:
        signal.signal(signal.SIGUSR1, before)
        release.set()
        for thread in threads:
            thread.join(30)
    tell(peers)
    assert known(peers.theirs, 3) == "?" and 3 not in peers.told.rkeys
