# SPDX-License-Identifier: BSD-3-Clause
"""Bugs to put into the protocol on purpose.

A mutation is a context manager that patches something for as long as it is open; `PairProtocol.invariants` says nothing
meanwhile, since each must be found by who shares no code with the protocol. `MUTATIONS` maps a name to (what it breaks,
the patch).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from unittest import mock

from msgspec.structs import replace
from simulator.patching import rewritten

from shiftverbs.protocol import events as ev
from shiftverbs.protocol import silence
from shiftverbs.protocol.arm import ArmProcedure
from shiftverbs.protocol.ending import Ending
from shiftverbs.protocol.hopeless import HopelessWork
from shiftverbs.protocol.messages import Arm, Message, Move, Phase, Sync
from shiftverbs.protocol.move import MoveProcedure
from shiftverbs.protocol.pair import PairProtocol
from shiftverbs.protocol.path_health import PingState
from shiftverbs.protocol.silence import Silence
from shiftverbs.protocol.state import PairState, Switch
from shiftverbs.protocol.switch import SwitchProcedure

Paths = Callable[[], Sequence[PingState]]
Patch = Callable[[], contextlib.AbstractContextManager[None]]
MUTATIONS: dict[str, tuple[str, Patch]] = {}


def mutation(what: str) -> Callable[[Callable[[], Iterator[None]]], Callable[[], Iterator[None]]]:
    """Register a mutation; `what` says which duty it drops."""

    def register(generator: Callable[[], Iterator[None]]) -> Callable[[], Iterator[None]]:
        patch = contextlib.contextmanager(generator)

        @contextlib.contextmanager
        def unseen() -> Iterator[None]:
            with mock.patch.object(PairProtocol, "invariants", lambda protocol: None), patch():
                yield

        MUTATIONS[generator.__name__] = (what, unseen)
        return generator

    return register


@mutation("a message of an older SWITCH does not count for the present one")
def ignore_epochs() -> Iterator[None]:
    original = PairProtocol._on_message

    def on_message(p: PairProtocol, message: Message, unsafe: str | None) -> None:
        s = p.state.switch
        if isinstance(message, Move):
            message = replace(message, epoch=p.epoch)
        elif isinstance(message, Sync) and s is not None and message.phase is Phase.READY:
            message = replace(message, epoch=s.epoch, target=s.target, arm=p.pairs[s.target].arm)
        original(p, message, unsafe)

    with mock.patch.object(PairProtocol, "_on_message", on_message):
        yield


@mutation("a SWITCH fences every pair: what the peer sent may still arrive where we send nothing")
def fence_only_where_we_send() -> Iterator[None]:
    with rewritten(SwitchProcedure, "_fence", ("p.used and not p.fenced", "k == s.send_pair")):
        yield


@mutation("READY counts only for the life of the pair that it names")
def accept_a_stale_ready() -> Iterator[None]:
    original = SwitchProcedure._advance

    def advance(p: SwitchProcedure) -> None:
        s = p._state.switch
        if s is not None and s.peer is not None and s.peer.phase is not Phase.ASK:
            s.peer = replace(s.peer, phase=Phase.READY, arm=max(s.peer.arm, p._state.pairs[s.target].arm))
        original(p)

    with mock.patch.object(SwitchProcedure, "_advance", advance):
        yield


@mutation("receives that MOVE left behind take no message")
def reuse_stale_receives() -> Iterator[None]:
    original = MoveProcedure.on_message

    def on_message(p: MoveProcedure, m: Move) -> bool:
        for pair in p._state.pairs:
            pair.stale = False
        return original(p, m)

    with mock.patch.object(MoveProcedure, "on_message", on_message):
        yield


@mutation("a MOVE that was told is not called off because the peer left: it may have moved its receives")
def call_off_a_move_that_was_told() -> Iterator[None]:
    original = Ending.peer_left

    def peer_left(p: Ending, m: Sync) -> None:
        if p._state.move_out is not None:
            p._state.move_out.tx = None
        original(p, m)

    with mock.patch.object(Ending, "peer_left", peer_left):
        yield


@mutation("a doubled REQ resets once")
def arm_resets_twice() -> Iterator[None]:
    original = ArmProcedure._on_req

    def on_req(p: ArmProcedure, k: int, m: Arm) -> None:
        pair = p._state.pairs[k]
        if m.arm == pair.arm and not p._state.switching and not p._state.carries(k):
            pair.arm -= 1
        original(p, k, m)

    with mock.patch.object(ArmProcedure, "_on_req", on_req):
        yield


@mutation("a new life's PSNs are out of the old one's reach")
def psns_start_over() -> Iterator[None]:
    with mock.patch.object(PairState, "_new_psn", lambda p, old: 0):
        yield


@mutation("a mere port event fences nothing unsafe")
def fence_an_unsafe_qp_on_a_port_event() -> Iterator[None]:
    original = PairProtocol.handle

    def handle(p: PairProtocol, event: ev.Event, now_ns: int) -> list[ev.Action]:
        if isinstance(event, ev.PathFailed | ev.MessageReceived):
            event = replace(event, unsafe=None)
        return original(p, event, now_ns)

    with mock.patch.object(PairProtocol, "handle", handle):
        yield


@mutation("a message that was acknowledged and lost is reported")
def hide_a_lost_message() -> Iterator[None]:
    original = SwitchProcedure._complete

    def complete(p: SwitchProcedure, s: Switch, peer: Sync) -> None:
        assert s.final is not None
        if peer.rx < s.final.acked:
            s.peer = peer = replace(peer, rx=s.final.acked)
        original(p, s, peer)

    with mock.patch.object(SwitchProcedure, "_complete", complete):
        yield


@mutation("what no pair carries is an error, soon")
def try_for_ever() -> Iterator[None]:
    with mock.patch.object(HopelessWork, "is_hopeless", lambda p, k, wr: False):
        yield


@mutation("what failed on each pair once, soon, may have come upon rails that fail in turn")
def give_up_after_one_quick_round() -> Iterator[None]:
    original = HopelessWork.is_hopeless

    def is_hopeless(p: HopelessWork, k: int, wr: int) -> bool:
        return original(p, k, wr) or set(p.failed_on) == set(range(len(p._state.pairs)))

    with mock.patch.object(HopelessWork, "is_hopeless", is_hopeless):
        yield


@mutation("both sides learn of an ABORT")
def abort_in_silence() -> Iterator[None]:
    original = PairState.say

    def say(p: PairState, message: Message, pair: int, spread: bool = False) -> None:
        if not (isinstance(message, Sync) and message.phase is Phase.ABORT):
            original(p, message, pair, spread)

    with mock.patch.object(PairState, "say", say):
        yield


@mutation("a homecoming in vain makes the next one wait")
def come_home_at_once_where_a_move_was_in_vain() -> Iterator[None]:
    original = MoveProcedure.note_flap

    def note_flap(p: MoveProcedure, target: int) -> None:
        with mock.patch.object(p._state, "move_out", None):
            original(p, target)

    with mock.patch.object(MoveProcedure, "note_flap", note_flap):
        yield


@mutation("a path that dies is left before its NIC says so")
def wait_for_a_nic_that_tries() -> Iterator[None]:
    with mock.patch.object(Silence, "look", lambda p, now_ns, oldest, age_ns, path, others: False):
        yield


@mutation("a peer that answers nowhere says nothing of a path")
def take_a_peer_that_stands_still_for_a_silent_path() -> Iterator[None]:
    original = Silence.look

    def look(p: Silence, now_ns: int, oldest: int, age_ns: int, path: PingState, others: Paths) -> bool:
        answers = mock.Mock(
            answered_sent_ns=now_ns,
            longest_ns=path.longest_ns,
            shortest_ns=path.shortest_ns,
            late_since=lambda then_ns, longest_ns: -1,
        )
        return original(p, now_ns, oldest, age_ns, path, lambda: [answers])

    # And nothing is concluded from the silence of both, which hides that.
    missing = mock.patch.object(Silence, "is_missing_too", lambda p, now_ns, other: False)
    with mock.patch.object(Silence, "look", look), missing:
        yield


@mutation("a ping may be lost")
def take_lost_pings_for_silence() -> Iterator[None]:
    # And nothing is concluded from the silence of both, which hides that.
    missing = mock.patch.object(Silence, "is_missing_too", lambda p, now_ns, other: False)
    with mock.patch.multiple(silence, PINGS=1, PATIENCE_NS=0, SETTLED_NS=0, GOES_ON_NS=0), missing:
        yield


@mutation("an answer may be late")
def take_a_late_answer_for_silence() -> Iterator[None]:
    with mock.patch.object(silence, "ANSWERS", 0):
        yield


@mutation("pings that were lost before there was work keep no others from being sent")
def wait_for_answers_to_lost_pings() -> Iterator[None]:
    edit = ("under_way = min(under_way, self._number - self._probes_after)", "pass")
    with rewritten(PingState, "next_timeout_ns", edit):
        yield


@mutation("a path that is as silent is no way out")
def ask_on_a_path_that_is_silent_too() -> Iterator[None]:
    with mock.patch.object(Silence, "is_missing_too", lambda p, now_ns, other: False):
        yield


@mutation("a path that died before there was work is asked about")
def ask_only_of_what_counts_as_alive() -> Iterator[None]:
    with rewritten(Silence, "_stands_still", ("path.is_to_answer and", "path.alive is True and")):
        yield


@mutation("a peer that goes on after a while may be heard on another path first")
def conclude_from_the_first_answer_elsewhere() -> Iterator[None]:
    with rewritten(
        Silence,
        "_stands_still",
        ("if late and now_ns - max(self._missing_ns, went_on_ns) >= settled_ns:", "if late:"),
    ):
        yield


@mutation("a ping that was not sent has no answer")
def miss_answers_to_what_was_not_sent() -> Iterator[None]:
    with mock.patch.object(PingState, "handle_unsent", lambda ping: None):
        yield


@mutation("what was found silent is not asked about any more")
def ask_about_what_was_found() -> Iterator[None]:
    edit = ("self._found, self.asks = True, False", "self._found = True")
    with rewritten(Silence, "_stands_still", edit):
        yield


@mutation("a rail whose answers take long is not as silent as one that is dead")
def take_a_slow_rail_for_a_silent_one() -> Iterator[None]:
    edit = ("self._patience[other]", "PATIENCE_NS")
    with rewritten(Silence, "is_missing_too", edit):
        yield


@mutation("what was ahead of a train says nothing of the pings behind it")
def take_patience_back() -> Iterator[None]:
    edit = ("self._since_ns = max(self._since_ns, self._allowed_ns)", "pass")
    with rewritten(PingState, "handle_pong", edit):
        yield


@mutation("a stop makes answers late on all rails, and no slow rail quicker than it is")
def forget_what_a_rail_takes_longer() -> Iterator[None]:
    with rewritten(Silence, "_stands_still", ("max(longest_ns, shortest_ns)", "longest_ns")):
        yield
