# SPDX-License-Identifier: BSD-3-Clause
"""Bugs of the protocol that were there, and are mended: each is put in again for a while, and must be found.

As unmended.py. `MUTATIONS` maps a name to (what it breaks, the patch).
"""

from __future__ import annotations

from collections.abc import Iterator

from simulator.patching import Patch, mutations_of, replaced, rewritten

from shiftverbs.protocol.pair import PairProtocol

MUTATIONS: dict[str, tuple[str, Patch]] = {}
mutation = mutations_of(MUTATIONS)


# ---- receives whose memory is being registered ----------------------------------------------------------------------


@mutation("a MOVE is held, and not broken off, while the memory of receives is being registered")
def let_a_move_time_out_over_memory() -> Iterator[None]:
    with rewritten(PairProtocol, "_on_move", ("self._say(replace(m, step=MoveStep.HELD), m.target)", "pass")):
        yield


@mutation("a SWITCH waits for the memory of receives as long as its registration takes, if the peer is heard")
def give_memory_no_more_time_than_a_peer() -> Iterator[None]:
    with rewritten(PairProtocol, "_attempt_deadline_ns", ("if s.posting:", "if False:")):
        yield


@mutation("time in which receives were posted is not time in which pairs were tried")
def count_posting_among_the_attempts() -> Iterator[None]:
    with replaced(PairProtocol, "_leave_out_posting", lambda p: None):
        yield


@mutation("a pair that refuses a receive is left at once")
def stay_where_a_receive_was_refused() -> Iterator[None]:
    with rewritten(
        PairProtocol,
        "_on_receives_posted",
        (
            "if event.error is not None:\n            self._next_attempt(",
            "if False:\n            self._next_attempt(",
        ),
    ):
        yield


@mutation("one lost message does not end an attempt")
def end_an_attempt_by_one_lost_message() -> Iterator[None]:
    with rewritten(
        PairProtocol,
        "_attempt_deadline_ns",
        ("min(max(patience // usable, 2 * resend), patience)", "patience // usable"),
    ):
        yield


# ---- work that no pair carries --------------------------------------------------------------------------------------


@mutation("of the pairs that answer, those that have failed the work are tried last")
def go_back_to_what_failed_the_work() -> Iterator[None]:
    with replaced(PairProtocol, "_failed_last", lambda p, k: 0):
        yield


@mutation("no MOVE begins while sends wait for their next attempt")
def move_while_sends_pause() -> Iterator[None]:
    with rewritten(PairProtocol, "_wants_move", ("        and not self._opening\n", "")):
        yield


@mutation("sends that wait for their next attempt are handed over when the peer leaves")
def forget_sends_that_pause() -> Iterator[None]:
    with rewritten(PairProtocol, "_end", ("self._open_in_time(self._open_ns)", "pass")):
        yield


# ---- a peer that leaves ---------------------------------------------------------------------------------------------


@mutation("a BYE says which MOVE was the last that was followed")
def say_nothing_of_moves_in_a_bye() -> Iterator[None]:
    with rewritten(PairProtocol, "_over_sync", ("ask=moved", "ask=0")):
        yield


@mutation("receives that were on their way when their side left have moved")
def forget_receives_that_were_moving() -> Iterator[None]:
    with rewritten(PairProtocol, "_end", ("self._moved_in = self._moving_in.message.number", "pass")):
        yield


@mutation("a peer that leaves in a MOVE fails nobody who only waits")
def fail_who_only_waits() -> Iterator[None]:
    with rewritten(
        PairProtocol,
        "_on_bye",
        (
            "    if out is not None and out.tx is not None and m.ask > out.number:",
            "    if out is not None and out.tx is not None:\n"
            '        self._abort("the peer closed its QP while a MOVE was not answered", answer=True)\n'
            "        return\n"
            "    if out is not None and out.tx is not None and m.ask > out.number:",
        ),
    ):
        yield
