# SPDX-License-Identifier: BSD-3-Clause
"""One protocol alone, fed with anything."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from shiftverbs.protocol import events as ev
from shiftverbs.protocol.messages import Arm, ArmStep, Move, MoveStep, PairAddress, Phase, Prefer, Sync
from shiftverbs.protocol.pair import MS, LocalPair, PairProtocol, ProtocolConfig

PAIRS = st.integers(0, 2)
SMALL = st.integers(0, 4)
ADDRESS = PairAddress(b"p" * 16, 0, 77, 1, 3)
WHY = st.sampled_from([None, "atomic"])
SYNCS = st.builds(
    Sync,
    *(SMALL, st.integers(0, 4), st.sampled_from(Phase), SMALL, st.booleans(), st.just(ADDRESS), SMALL, SMALL),
    *(st.integers(-1, 6), st.integers(-1, 4), st.booleans()),
)
MESSAGES = st.one_of(
    SYNCS,
    st.builds(Arm, st.sampled_from(ArmStep), SMALL, st.integers(0, 4), SMALL, st.just(ADDRESS), SMALL),
    st.builds(Move, st.sampled_from(MoveStep), SMALL, SMALL, st.integers(0, 4), SMALL, SMALL),
    st.builds(Prefer, SMALL, st.integers(0, 4), st.booleans()),
)
ERRORS = st.sampled_from([None, None, None, "EIO"])
EVENTS = st.one_of(
    st.builds(ev.MessageReceived, MESSAGES, WHY),
    st.builds(ev.PathFailed, PAIRS, st.just("why"), st.booleans(), WHY),
    st.builds(ev.FenceHung, SMALL, st.just("hung")),
    st.builds(ev.PairReset, PAIRS, SMALL, st.just(b"g" * 16), st.just(3), ERRORS),
    st.builds(ev.PairConnected, PAIRS, SMALL, st.sampled_from(ev.Stage), ERRORS),
    st.builds(ev.ArmCompletion, PAIRS, st.booleans(), st.booleans()),
    st.just(ev.FenceWrPosted()),
    st.builds(ev.FenceWrDone, SMALL),
    st.just(ev.RxReached()),
    st.builds(ev.PathHealth, PAIRS, st.booleans()),
    st.builds(ev.NicDead, PAIRS),
    st.builds(ev.PreferPair, st.integers(0, 4)),
    st.builds(ev.KeysMissing, st.just("lkey")),
    st.builds(ev.FenceCompleted, SMALL, SMALL, st.just(0), st.just(4), WHY),
    st.integers(0, 3000),  # milliseconds
    st.sampled_from(["reset", "connect", "fence"]),  # what was asked for is done
)


@settings(max_examples=400, deadline=None)
@given(st.booleans(), st.lists(EVENTS, max_size=60), st.integers(0, 99))
def test_no_input_is_illegal(initiator: bool, story: list[object], seed: int) -> None:
    """Whatever comes in, in whatever order: no IllegalTransition, no assertion, and silence once it is over."""
    locals_ = [LocalPair(b"g" * 16, 0, 10 + k, 3) for k in range(3)]
    p = PairProtocol(ProtocolConfig(invariants=True), locals_, initiator, random.Random(seed), 0)
    now = 0
    asked: dict[str, ev.Action] = {}
    actions = p.start(now)
    for item in story:
        for action in actions:
            match action:
                case ev.ResetPair():
                    asked["reset"] = action
                case ev.ConnectPair():
                    asked["connect"] = action
                case ev.Fence():
                    asked["fence"] = action
        was_over = p.over
        if isinstance(item, int):
            now += item * MS
            actions = p.handle_timeout(now)
        elif isinstance(item, str):
            match asked.pop(item, None):
                case ev.ResetPair(pair=k, arm=arm):
                    actions = p.handle(ev.PairReset(k, arm, b"g" * 16, 3), now)
                case ev.ConnectPair(pair=k, arm=arm, stage=stage):
                    actions = p.handle(ev.PairConnected(k, arm, stage), now)
                case ev.Fence(number=number):
                    actions = p.handle(ev.FenceCompleted(number, 0, 0, 3), now)
                case _:
                    actions = []
        else:
            actions = p.handle(item, now)  # type: ignore[arg-type]
        due = p.next_timeout_ns
        assert due is None or due >= 0
        if was_over:
            assert all(isinstance(action, ev.SendMessage | ev.SetStatus) for action in actions), actions
