# SPDX-License-Identifier: BSD-3-Clause
"""Which replays would be seen: the table of docs/protocol.md, "What must not be replayed", case by case."""

from __future__ import annotations

import ctypes
import random
import re
from collections.abc import Callable

import pytest
from fake import FENCE, INLINE, READ, SEND, SEND_IMM, SIGNALED, WRITE, WRITE_IMM, World

Make = Callable[..., World]
LETTERS = {"W": WRITE, "I": WRITE_IMM, "S": SEND, "M": SEND_IMM, "R": READ}
FLAGS = {"!": SIGNALED, "|": FENCE, "i": INLINE}
MEMORY = ctypes.create_string_buffer(1024)  # what is inline is copied
BASE = ctypes.addressof(MEMORY)
#: Addresses of local areas, 64 bytes each: B begins within A, C where A ends.
AREAS = {"A": BASE, "B": BASE + 0x20, "C": BASE + 0x40, "D": BASE + 0x100, "E": BASE + 0x200}


def post(w: World, story: str) -> None:
    """Post WRs: an operation's letter, the areas of its SGEs (0: one of no length), flags. wr_id: 1, 2, …"""
    for wr_id, word in enumerate(story.split(), 1):
        areas = [c for c in word[1:] if c in AREAS or c == "0"]
        sges = [(AREAS.get(area, BASE), 0 if area == "0" else 64, 1) for area in areas]
        flags = sum(FLAGS[c] for c in word[1:] if c in FLAGS)
        w.send(wr_id, LETTERS[word[0]], flags, sges=sges, addr=0x5000 + 0x1000 * wr_id)


OVERWRITTEN = {
    "WA RA": (1, 2),
    "WA RB": (1, 2),  # in part
    "WA RC": None,  # next to it
    "WD RA WA": None,  # the READ comes first
    "WE WA WD RA": (2, 4),
    "WEA RDA": (1, 2),  # any SGE
    "WA RA!": (1, 2),  # a part of the response may have landed
    "WA! RA": None,  # the WRITE's WC would be here before anything landed
    "WA WD! RA": None,
    "WA WD RD! RA": (2, 3),
    "WA RD! RA": None,
    "WAi RA": None,
    "WA0 R0": None,
    "WA R0": None,
    "SA RA": None,  # executed it is counted
    "MA RA": None,
    "IA RA": None,
    "WA S RA": None,  # ... and with it what is before
    "S WA RA": (2, 3),
    "RA RA": None,
    "WA WA": None,
}
BEHIND_FENCE = {
    "RA WD|": (1, 2),
    "RA WD": None,  # free to pass it
    "RA RD| WE": (1, 3),
    "RA R0| WE": (1, 3),
    "RA WE W0|": None,
    "RA W0| WE": (1, 3),
    "RA! WD|": None,  # the READ's WC would be here before the WRITE was sent
    "RA RD! WE|": None,
    "RA! RD WE|": None,
    "RA WD! WE|": (1, 3),  # only READs are waited for
    "WD! RA WE|": None,  # not answered, so the READ is not either
    "RA| WE": None,
    "R0 WE|": None,
    "RA S| WE": None,  # counted, so the READ is proven; or not executed, so the WRITE is not either
    "RA IE|": None,
    "RA RD| S WE": None,
    "RA S| RA WE|": (3, 4),
    "RA S WE|": (1, 3),
    "RA S|": None,
    "RA RD|": None,
}


#: What is said, and of which two.
WORDS = {"overwritten": ("WRITE", "READ"), "fenced WRITE": ("READ", "WRITE")}
CASES = [
    *(("overwritten", *case) for case in OVERWRITTEN.items()),
    *(("fenced WRITE", *case) for case in BEHIND_FENCE.items()),
]


@pytest.mark.parametrize("said, story, expected", CASES)
def test_which_two_would_be_seen(
    guarded: World, said: str, story: str, expected: tuple[int, int] | None
) -> None:
    """Memory that a READ overwrites; a READ before a fence."""
    post(guarded, story)
    why = guarded.qp.unsafe_reason()
    if expected is None:
        assert why is None
        return
    assert why is not None and said in why
    for operation, wr_id in zip(WORDS[said], expected, strict=True):
        assert re.search(rf"\b{operation} with wr_id {wr_id}\b", why)


@pytest.mark.parametrize("story", ["WA! RA", "WA WD! RA", "RA! WD|", "RA RD! WE|", "WD! RA WE|"])
def test_a_dead_nic_keeps_completions_to_itself(guarded: World, story: str) -> None:
    post(guarded, story)
    assert guarded.qp.unsafe_reason() is None
    assert guarded.qp.unsafe_reason(cqes_lost=True) is not None


@pytest.mark.parametrize(
    "story", ["SA RA", "MA RA", "IA RA", "WA S RA", "RA S| WE", "RA IE|", "RA RD| S WE", "RA RD| S IE"]
)
def test_the_peers_dead_nic_keeps_receipts_to_itself(guarded: World, story: str) -> None:
    post(guarded, story)
    assert guarded.qp.unsafe_reason() is None
    assert guarded.qp.unsafe_reason(receipts_lost=True) is not None


def test_what_is_proven_or_was_never_sent_is_not_looked_at(guarded: World) -> None:
    w = guarded
    post(w, "WA S")
    w.fence(0)
    w.switch(1, 1)
    w.send(3, READ, 0, sges=[(AREAS["A"], 64, 1)], addr=0x5000)
    assert w.qp.unsafe_reason() is None
    w.qp.close_send()
    w.send(4, WRITE, 0, sges=[(AREAS["D"], 64, 1)], addr=0x5000)
    w.send(5, READ, 0, sges=[(AREAS["D"], 64, 1)], addr=0x5000)
    assert w.qp.unsafe_reason() is None


def test_our_own_signal_counts(make: Make) -> None:
    """Where the application never signals, every so many-th WR shows us a WC all the same."""
    w = make(max_send=4)
    w.protect()
    post(w, "WD WA RA")
    assert w.qp.unsafe_reason() is None, "the second asked for a WC"


def test_any_set_of_areas(make: Make) -> None:
    """Against a plain look at every byte: many SGEs, in any order, that touch, overlap and contain each other."""
    rng = random.Random(7)

    def some_sges() -> list[tuple[int, int, int]]:
        lengths = [rng.choice([0, 1, 8, 8, 24]) for _ in range(rng.randrange(1, 5))]
        return [(0x1000 + rng.randrange(40) * 8, length, 1) for length in lengths]

    for _ in range(60):
        w = make(max_send=256)
        w.protect()
        first: dict[int, int] = {}  # byte -> the first WRITE from it
        for wr_id in range(rng.randrange(1, 60)):
            sges = some_sges()
            w.send(wr_id, WRITE, 0, sges=sges, addr=0x5000)
            for start, length, _ in sges:
                for at in range(start, start + length):
                    first.setdefault(at, wr_id)
        assert w.qp.unsafe_reason() is None
        sges = some_sges()
        w.send(1000, READ, 0, sges=sges, addr=0x5000)
        hit = [first[at] for start, length, _ in sges for at in range(start, start + length) if at in first]
        why = w.qp.unsafe_reason()
        if hit:
            assert f"WRITE with wr_id {min(hit)} " in (why or "") and "wr_id 1000" in (why or "")
        else:
            assert why is None


def test_thousands_outstanding(make: Make) -> None:
    """The worst there can be: areas that lie apart, in an order that has every one moved, and READs among them."""
    w = make(max_send=8192)
    w.protect()
    for i in range(4095):
        w.send(i, READ if i % 2 else WRITE, 0, sges=[(0x10000000 - 256 * i, 64, 1)], addr=0x5000)
    assert w.qp.unsafe_reason() is None
    w.send(9999, READ, 0, sges=[(0x10000000 - 256 * 2048, 64, 1)], addr=0x5000)
    assert "WRITE with wr_id 2048 " in (w.qp.unsafe_reason() or "")
