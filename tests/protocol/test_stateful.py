# SPDX-License-Identifier: BSD-3-Clause
"""Two protocols in a world that hypothesis breaks at will, against a model that knows nothing of how they work.

The model knows what was posted, what was done to the world, and what the paper's picture of the state machine allows
(section 4.3, figure 4). After every step: each message at most once and in order, nothing completed that was not
received, epochs that never go back. At the end the world is healed: then all is at home and delivered, or both sides
gave up, and that only for a reason that the model saw.
"""

from __future__ import annotations

import itertools
import random

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from protocol.world import COMMAND_NS, LATENCY_NS, Side, World

from shiftverbs.protocol import events as ev
from shiftverbs.protocol.messages import Arm, ArmStep, Move, MoveStep, PairAddress, Phase, Prefer, Sync
from shiftverbs.protocol.pair import MS, LocalPair, PairProtocol, ProtocolConfig

#: The arrows of the paper's picture, plus ours: a `migrate` from DEFAULT, a MOVE that is called off.
ARROWS = {
    ("DEFAULT", "FALLBACK"),
    ("DEFAULT", "WAIT_SIGNALED"),
    ("FALLBACK", "FALLBACK"),
    ("FALLBACK", "DEFAULT"),
    ("FALLBACK", "WAIT_SIGNALED"),
    ("WAIT_SIGNALED", "WAIT_DRAINED"),
    ("WAIT_SIGNALED", "FALLBACK"),
    ("WAIT_SIGNALED", "DEFAULT"),
    ("WAIT_DRAINED", "FALLBACK"),
    ("WAIT_DRAINED", "DEFAULT"),
}
SIDES = st.sampled_from("ab")


class Failover(RuleBasedStateMachine):
    """Faults, posts and time in any order."""

    @initialize(seed=st.integers(0, 2**32), pairs=st.sampled_from([2, 2, 3]), armed=st.booleans())
    def begin(self, seed: int, pairs: int, armed: bool) -> None:
        self.pairs = pairs
        self.w = World(seed, pairs)
        self.posted = {"a": 0, "b": 0}
        self.epochs = {"a": 0, "b": 0}
        self.reasons: set[str] = set()  # why giving up would be right
        self.closed = False
        if armed:
            self.w.run(until_ns=self.w.now + 20 * MS)

    def side(self, name: str) -> Side:
        return self.w.a if name == "a" else self.w.b

    # ---- what applications do

    @rule(name=SIDES, n=st.integers(1, 20), gap_ns=st.sampled_from([0, 10_000, 300_000]))
    def post(self, name: str, n: int, gap_ns: int) -> None:
        for i in range(n):
            self.w.later(i * gap_ns, self.side(name).post)

    @rule(name=SIDES, on=st.booleans())
    def unsafe(self, name: str, on: bool) -> None:
        self.side(name).unsafe = "an atomic is outstanding" if on else None
        if on:
            self.reasons.add("unsafe")

    @rule(name=SIDES, pair=st.integers(0, 2))
    def prefer(self, name: str, pair: int) -> None:
        self.side(name).feed(ev.PreferPair(pair))

    @precondition(lambda self: not self.closed)
    @rule(name=SIDES, really=st.sampled_from([False, False, False, True]))
    def close(self, name: str, really: bool) -> None:
        if really:
            self.closed = True
            self.reasons.add("closed")
            self.side(name).close()

    # ---- what happens to them

    @rule(ms=st.sampled_from([0.02, 0.1, 1, 5, 30, 200, 1500]))
    def wait(self, ms: float) -> None:
        if ms > 100 and not self.usable():
            self.reasons.add("nothing works")
        self.w.run(until_ns=self.w.now + int(ms * MS))

    def usable(self) -> bool:
        return self.w.loss < 0.5 and any(self.w.passes(k) for k in range(self.pairs))

    @rule(name=SIDES, k=st.integers(0, 2), up=st.booleans(), event=st.booleans())
    def port(self, name: str, k: int, up: bool, event: bool) -> None:
        if k < self.pairs:
            self.w.port(name, k, up, event)

    @rule(k=st.integers(0, 2), on=st.booleans())
    def switch(self, k: int, on: bool) -> None:
        if k < self.pairs:
            self.w.blackhole(k, on)

    @rule(n=st.integers(1, 5))
    def lose_acks(self, n: int) -> None:
        self.w.ack_drops += n

    @rule(
        loss=st.sampled_from([0.0, 0.1, 0.3, 0.9]),
        duplicate=st.sampled_from([0.0, 0.3]),
        jitter_ns=st.sampled_from([LATENCY_NS, 2 * MS, 40 * MS]),
    )
    def network(self, loss: float, duplicate: float, jitter_ns: int) -> None:
        self.w.loss, self.w.duplicate, self.w.jitter_ns = loss, duplicate, jitter_ns
        if loss > 0.5 or jitter_ns > 10 * MS:
            self.reasons.add("the peer cannot be heard")

    @rule(name=SIDES, k=st.integers(0, 2), broken=st.booleans())
    def qp_fatal(self, name: str, k: int, broken: bool) -> None:
        """The QP of one pair goes to ERR on one side (or only looks as if it did)."""
        if k < self.pairs and self.side(name).qps[k].state == "RTS":
            if broken:
                self.side(name).qps[k].state = "ERR"
            self.side(name).feed(ev.PathFailed(k, "QP_FATAL"))

    @rule(name=SIDES, k=st.integers(0, 2), how=st.sampled_from(["slow", "hung", "failing", "well"]))
    def nic(self, name: str, k: int, how: str) -> None:
        if k >= self.pairs:
            return
        side = self.side(name)
        side.slow_ns[k] = 30 * MS if how == "slow" else COMMAND_NS
        (side.failing.add if how == "failing" else side.failing.discard)(k)
        if how == "hung":
            side.hung.add(k)
        else:
            side.unhang(k)
        if how != "well":
            self.reasons.add("a NIC misbehaves")

    @rule(name=SIDES, k=st.integers(0, 2), really=st.sampled_from([False, False, True]))
    def device_fatal(self, name: str, k: int, really: bool) -> None:
        if really and k < self.pairs:
            self.reasons.add("a NIC died")
            self.w.kill(name, k)

    # ---- what must hold

    @invariant()
    def exactly_once_and_in_order(self) -> None:
        if hasattr(self, "w"):
            self.w.check()

    @invariant()
    def epochs_never_go_back(self) -> None:
        if hasattr(self, "w"):
            for side in (self.w.a, self.w.b):
                assert side.protocol.epoch >= self.epochs[side.name]
                self.epochs[side.name] = side.protocol.epoch

    @invariant()
    def states_follow_the_picture(self) -> None:
        if hasattr(self, "w"):
            for side in (self.w.a, self.w.b):
                path = ["DEFAULT", *side.states]
                assert set(itertools.pairwise(path)) <= ARROWS, path

    def teardown(self) -> None:
        if not hasattr(self, "w"):
            return
        w = self.w
        w.loss = w.duplicate = 0.0
        w.jitter_ns = LATENCY_NS
        w.ack_drops = 0
        if not self.usable():
            self.reasons.add("nothing works")
        for side in (w.a, w.b):
            side.unsafe = None
            side.feed(ev.PreferPair(0))
            side.failing.clear()
            for k in range(self.pairs):
                side.slow_ns[k] = COMMAND_NS
                side.unhang(k)
                w.port(side.name, k, True)
        for k in range(self.pairs):
            w.blackhole(k, False)
        fit = [k for k in range(self.pairs) if k not in w.a.dead | w.b.dead]

        def over() -> bool:
            return any(side.failed or side.let_go or side.closed for side in (w.a, w.b))

        def settled() -> bool:
            for side in (w.a, w.b):
                p = side.protocol
                if p.busy or p.send_pair not in fit or p.recv_pair not in fit:
                    return False
                if 0 in fit and (p.send_state.value, p.recv_state.value) != ("DEFAULT", "DEFAULT"):
                    return False
                if not all(p.pairs[k].clean or k in (p.send_pair, p.recv_pair) for k in fit):
                    return False
            return w.delivered()

        w.run(until_ns=w.now + 50 * MS)
        w.run(until_ns=w.now + 120_000 * MS, condition=lambda: over() or settled(), most=2_000_000)
        w.run(until_ns=w.now + 300 * MS)
        w.check()
        if not over():
            assert settled(), self.story()
            return
        assert self.reasons, f"gave up without a reason: {self.story()}"
        # Whoever does not know yet learns it the moment it needs its peer.
        for side in (w.a, w.b):
            side.post()
            side.feed(ev.PathFailed(side.protocol.send_pair, "RETRY_EXC_ERR"))
        w.run(until_ns=w.now + 15_000 * MS)
        for side in (w.a, w.b):
            assert side.failed or side.let_go or side.closed, f"only one side gave up: {self.story()}"
        w.check()

    def story(self) -> str:
        lines = [str(line) for line in self.w.log[-60:]]
        for side in (self.w.a, self.w.b):
            p = side.protocol
            lines.append(
                f"{side.name}: {p.send_state.value}@{p.send_pair} {p.recv_state.value}@{p.recv_pair} epoch {p.epoch}"
                f" posted {side.tail} handed over {side.wired} completed {side.head} received {len(side.received)}"
                f" failed {side.failed} {p.pairs}"
            )
        return "\n".join(lines)


TestFailover = Failover.TestCase
TestFailover.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)


# ---- one protocol alone, fed with anything ---------------------------------------------------------------------------

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
    st.just(ev.FencePosted()),
    st.builds(ev.FenceDone, SMALL),
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
