# SPDX-License-Identifier: BSD-3-Clause
"""Bugs of the protocol that were there, and are mended: each is put in again for a while, and must be found.

As unmended.py, but registered with those of protocol_mutations.py: `PairProtocol.invariants` says nothing meanwhile.
`MUTATIONS` has those of this file only.
"""

from __future__ import annotations

from collections.abc import Iterator

from simulator import protocol_mutations
from simulator.patching import Patch, replaced, rewritten
from simulator.protocol_mutations import mutation

from shiftverbs.failover.qp.pairing import Pairing
from shiftverbs.protocol.arm import ArmProcedure
from shiftverbs.protocol.ending import Ending
from shiftverbs.protocol.move import MoveProcedure
from shiftverbs.protocol.path_health import PingState
from shiftverbs.protocol.switch import SwitchProcedure

_OTHERS = frozenset(protocol_mutations.MUTATIONS)


# ---- receives whose memory is being registered ----------------------------------------------------------------------


@mutation("a MOVE is held, and not broken off, while the memory of receives is being registered")
def let_a_move_time_out_over_memory() -> Iterator[None]:
    with rewritten(MoveProcedure, "on_message", ("s.say(replace(m, step=MoveStep.HELD), m.target)", "pass")):
        yield


@mutation("a fence WRITE that its NIC has no room for is tried again: the program may post nothing any more")
def try_a_fence_write_once() -> Iterator[None]:
    edit = ("s.timers.set(Timer.FENCE_WRITE, s.now_ns + s.config.move_timeout_ns)", "pass")
    with rewritten(MoveProcedure, "fence_write", edit):
        yield


@mutation("a SWITCH waits for the memory of receives as long as its registration takes, if the peer is heard")
def give_memory_no_more_time_than_a_peer() -> Iterator[None]:
    with rewritten(SwitchProcedure, "_attempt_deadline_ns", ("if posting:", "if False:")):
        yield


@mutation("time in which receives were posted is not time in which pairs were tried")
def count_posting_among_the_attempts() -> Iterator[None]:
    with replaced(SwitchProcedure, "_leave_out_posting", lambda p: None):
        yield


@mutation("a pair that refuses a receive is left at once")
def stay_where_a_receive_was_refused() -> Iterator[None]:
    with rewritten(SwitchProcedure, "on_receives_posted", ("if event.error is not None:", "if False:")):
        yield


@mutation("one lost message does not end an attempt")
def end_an_attempt_by_one_lost_message() -> Iterator[None]:
    with rewritten(
        SwitchProcedure,
        "_attempt_deadline_ns",
        ("min(max(patience // max(1, usable), 2 * resend), patience)", "patience // usable"),
    ):
        yield


@mutation("machines too slow for one ARM are in time for a later one")
def give_each_arm_the_same_time() -> Iterator[None]:
    with rewritten(
        ArmProcedure, "_begin", ("s.config.arm_timeout_ns + p.extra_ns", "s.config.arm_timeout_ns")
    ):
        yield


@mutation("a machine that was in time for ARM once has as much time the next time")
def give_an_arm_the_time_of_its_back_off() -> Iterator[None]:
    with rewritten(ArmProcedure, "_begin", ("p.extra_ns", "p.backoff_ns")):
        yield


@mutation("a responder that has failed says so: the initiator's half cannot end well any more")
def leave_the_initiator_to_its_own_time() -> Iterator[None]:
    with rewritten(ArmProcedure, "fail", ("if answering:", "if False:")):
        yield


# ---- work that no pair carries --------------------------------------------------------------------------------------


@mutation("of the pairs that answer, those that have failed the work are tried last")
def go_back_to_what_failed_the_work() -> Iterator[None]:
    with replaced(SwitchProcedure, "_failed_last", lambda p, k: 0):
        yield


@mutation("a ping that a peer which knows us lost speaks against its path, before the first answer too")
def let_first_answers_hide_what_was_lost_before() -> Iterator[None]:
    with replaced(PingState, "peer_knows_us", lambda p: None):
        yield


@mutation("a peer that knew us before its address changed knows us still")
def let_paths_made_anew_hide_what_was_lost_there() -> Iterator[None]:
    with rewritten(Pairing, "_peer_moved", ("if c.was_protected:", "if False:")):
        yield


@mutation("no MOVE begins while sends wait for their next attempt")
def move_while_sends_pause() -> Iterator[None]:
    with rewritten(MoveProcedure, "_destination", ("        and not self._directions.pausing\n", "")):
        yield


@mutation("sends that wait for their next attempt are handed over when the peer leaves")
def forget_sends_that_pause() -> Iterator[None]:
    with rewritten(Ending, "_end", ("self._directions.open_now()", "pass")):
        yield


# ---- a peer that leaves ---------------------------------------------------------------------------------------------


@mutation("a BYE says which MOVE was the last that was followed")
def say_nothing_of_moves_in_a_bye() -> Iterator[None]:
    with rewritten(Ending, "sync", ("ask=moved", "ask=0")):
        yield


@mutation("receives that were on their way when their side left have moved")
def forget_receives_that_were_moving() -> Iterator[None]:
    with rewritten(MoveProcedure, "end", ("self.moved_in = coming.message.number", "pass")):
        yield


@mutation("a peer that leaves in a MOVE fails nobody who only waits")
def fail_who_only_waits() -> Iterator[None]:
    with rewritten(
        Ending,
        "peer_left",
        (
            "    if out is not None and out.tx is not None and m.ask > out.number:",
            "    if unanswered:\n"
            '        self.abort("the peer closed its QP while a MOVE was not answered", answer=True)\n'
            "        return\n"
            "    if out is not None and out.tx is not None and m.ask > out.number:",
        ),
    ):
        yield


MUTATIONS: dict[str, tuple[str, Patch]] = {
    name: mutated for name, mutated in protocol_mutations.MUTATIONS.items() if name not in _OTHERS
}
