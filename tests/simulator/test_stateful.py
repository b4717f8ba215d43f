# SPDX-License-Identifier: BSD-3-Clause
"""Two hosts that hypothesis breaks at will, against a model that knows nothing of how failover works.

The model knows what was posted, what was done to the network, and what the paper's picture of the state machine allows
(section 4.3, figure 4). After every step: the protocol's invariants, no error of our own code, each message at most
once and in order, nothing completed that was not executed, no memory touched that is not to be, epochs that never go
back. At the end the network is healed: then all is at home and delivered, or both sides gave up, and that only for a
reason that the model saw. There all checkers judge.
"""

from __future__ import annotations

import errno
import itertools
from collections.abc import Callable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from simulator import checks
from simulator.application import MOST_SENDS, OK, Application, Wr
from simulator.checks import TWO_SIDED, ended
from simulator.clock import MS, US
from simulator.host import ALL_RIGHTS
from simulator.network import Network
from simulator.rest import state
from simulator.rnic import Nic
from simulator.schedule import END_NS, Schedule
from simulator.story import drop_next, path_failed, wait
from simulator.world import World

from shiftverbs.native.ibv import AccessFlag
from shiftverbs.protocol import events as ev
from shiftverbs.protocol.events import Status

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
NAMES = st.sampled_from("ab")
APPS = st.integers(0, 3)
PAIRS = st.integers(0, 2)
LETS_PASS = st.sampled_from([0, 0.1, 1, 5, 30, 120])
SELDOM = st.sampled_from([False, False, False, True])
KINDS = [("SEND",), ("WRITE", "WRITE_IMM"), ("SEND", "WRITE", "WRITE", "WRITE_IMM")]
#: Facts that hold at any time, of all that was posted, executed and seen so far.
AT_ANY_TIME: tuple[Callable[[Network], None], ...] = (
    checks.no_more_than_asked_for,
    checks.nothing_after_the_fence,
    checks.nothing_behind_a_flush,
    checks.nothing_strays,
    checks.each_arm_resets_once,
    checks.receives_before_messages,
    checks.no_storm,
)
#: So long without a rail that works, and giving up is right.
DARK_NS = 100 * MS


class Healed(Schedule):
    """The end of a schedule, of what happened to a network without one."""

    def __init__(self, net: Network) -> None:
        self.net, self.delay_ns = net, 10 * US
        self.lost, self.lives = set(), None

    def heal(self) -> None:
        """All that can be mended is."""
        for nics in self.net.nics.values():
            for nic in nics:
                nic.registering_ns = 50 * US
        self._heal()

    def judge_end(self, net: Network) -> None:
        """Whoever does not know yet may have to give up its peer first: where that has no QP left it hears nobody."""
        for app in net.apps:
            if ended(app.peer) and not ended(app):
                self._needs_its_peer(app)
        clock = net.clock
        clock.run(clock.now + 5_000 * MS, lambda: all(ended(app) or not ended(app.peer) for app in net.apps))
        super().judge_end(net)


class Failover(RuleBasedStateMachine):
    """Faults, posts and time in any order."""

    net: Network | None = None
    gentle = False

    @initialize(
        seed=st.integers(0, 2**32),
        pairs=st.sampled_from([2, 2, 3]),
        qps=st.sampled_from([1, 1, 2]),
        capacity=st.sampled_from([2, 32]),
        receives=st.sampled_from([1, 16]),
        one_process=SELDOM,
        early=SELDOM,
        n=st.sampled_from([0, 40, 160]),
        gap_ns=st.sampled_from([20 * US, 100 * US, 1 * MS]),
        gentle=st.booleans(),
    )
    def begin(
        self,
        seed: int,
        pairs: int,
        qps: int,
        capacity: int,
        receives: int,
        one_process: bool,
        early: bool,
        n: int,
        gap_ns: int,
        gentle: bool,
    ) -> None:
        """early: before they are protected; n: so many messages of each side come by themselves, gap_ns apart.

        gentle: only what must be survived, as long as one rail works.
        """
        self.gentle = gentle
        self.pairs = pairs
        self.reasons: set[str] = set()  # why giving up would be right
        self.epochs: dict[tuple[str, int], int] = {}
        self.known_down: set[tuple[str, int]] = set()
        self.dark_ns = 0
        self.has_atomics = self.has_other_rights = False
        self.net = Network(seed, pairs, capacity, receives, qps=qps, one_cq=qps > 1, one_process=one_process)
        if gentle or not early:
            wait(self.net, 30)
            assert self.net.protected()
        for app in self.net.apps:
            for i in range(n):
                self.plan(app, "SEND", 0, i % 4 != 1, i * gap_ns)

    # ---- the model --------------------------------------------------------------------------------------------------

    def app(self, number: int) -> Application:
        assert self.net is not None
        return self.net.apps[number % len(self.net.apps)]

    def nic(self, name: str, k: int) -> Nic:
        assert self.net is not None
        return self.net.nics[name][k % self.pairs]

    def passes(self, k: int) -> bool:
        """Whether everything that speaks on rail k can be heard."""
        assert self.net is not None
        nics = [self.net.nics[name][k] for name in "ab"]
        links = [self.net.links[name, k] for name in "ab"]
        return not any(nic.dead or nic.stalled for nic in nics) and all(
            link.up and link.loss < 0.5 and link.datagram_loss < 0.5 for link in links
        )

    def let_pass(self, ms: float) -> None:
        """Time goes by."""
        assert self.net is not None
        dark = not any(self.passes(k) for k in range(self.pairs))
        began_ns = self.net.clock.now
        wait(self.net, ms)
        self.dark_ns = self.dark_ns + self.net.clock.now - began_ns if dark else 0
        if self.dark_ns > DARK_NS:
            self.reasons.add("nothing works")

    def broken(self, what: str, reason: str | None = None) -> Network:
        """Note a fault, as schedules call it, and for what reason a QP may end because of it."""
        net = self.net
        assert net is not None
        net.faults.append(what)
        if reason is not None:
            self.reasons.add(reason)
        if any(app.endpoint.status in (None, Status.PAIRING) for app in net.apps):
            self.reasons.add("it is not protected yet")
        return net

    # ---- what applications do ---------------------------------------------------------------------------------------

    def plan(self, app: Application, opcode: str, cell: int, signaled: bool, gap_ns: int) -> Wr | None:
        index = len(app.posted) + len(app.plan)
        if index >= MOST_SENDS - 10:
            return None
        wr = Wr(app.name, index, opcode, cell, 0 if opcode == "READ" else index + 1, signaled, False, False)
        app.plan.append(wr)
        app.clock.later(gap_ns, app.due)
        return wr

    @rule(
        number=APPS,
        n=st.integers(1, 20),
        gap_ns=st.sampled_from([0, 10_000, 300_000]),
        kinds=st.sampled_from(KINDS),
        unsignaled=st.sampled_from([0, 3, 19]),
        inline=st.booleans(),
    )
    def post(
        self, number: int, n: int, gap_ns: int, kinds: tuple[str, ...], unsignaled: int, inline: bool
    ) -> None:
        for i in range(n):
            signaled = i % (unsignaled + 1) == 0 or i == n - 1
            wr = self.plan(self.app(number), kinds[i % len(kinds)], i % 8, signaled, i * gap_ns)
            if wr is not None:
                wr.inline = inline

    @precondition(lambda self: not self.gentle)
    @rule(number=APPS, n=st.integers(1, 4), opcode=st.sampled_from(["READ", "FADD"]))
    def read(self, number: int, n: int, opcode: str) -> None:
        """What is not, or not always, to be sent again."""
        app = self.app(number)
        if opcode == "FADD" and self.has_other_rights:
            return
        self.has_atomics |= opcode == "FADD"
        self.reasons.add("a replay would be seen")
        for i in range(n):
            self.plan(app, opcode, 8 + i % 4 if opcode == "FADD" else i, True, i * 10 * US)

    @rule(number=APPS, k=PAIRS, ms=LETS_PASS)
    def prefer(self, number: int, k: int, ms: float) -> None:
        self.app(number).endpoint.prefer(k % self.pairs)
        self.let_pass(ms)

    @precondition(lambda self: not self.gentle)
    @rule(
        number=APPS, how=st.sampled_from(["close", "err", "reset", "no memory", "take memory"]), really=SELDOM
    )
    def end(self, number: int, how: str, really: bool) -> None:
        """It leaves, or does what ends its QP with plain verbs too."""
        app = self.app(number)
        if not really or app.at_its_end or app.own_error is not None:
            return
        if how == "no memory":
            wr = self.plan(app, "WRITE", 0, True, 0)
            if wr is not None:
                self.reasons.add("an error of the application's own")
                app.own_error = "it named memory that is not there"
                wr.bad = True
        elif how == "take memory":
            self.broken("gone", "an error of the application's own")
            app.take_memory_away()
        else:
            self.broken("close", "one of them left")
            getattr(app, how)()

    @rule(number=APPS, what=st.sampled_from(["again", "elsewhere", "less", "more"]), ms=LETS_PASS)
    def memory(self, number: int, what: str, ms: float) -> None:
        """Deregister what the peer reaches, and register it again, perhaps elsewhere; or change what it may do.

        The right that comes and goes is that of atomics: where any are used it stays.
        """
        app = self.app(number)
        if what in ("again", "elsewhere"):
            app.renew_window(what == "elsewhere")
        elif not self.has_atomics:
            self.has_other_rights |= what == "less"
            spare = int(AccessFlag.REMOTE_ATOMIC) if what == "less" else 0
            app.change_rights(ALL_RIGHTS & ~spare)
        self.let_pass(ms)

    # ---- what happens to them ---------------------------------------------------------------------------------------

    @rule(ms=st.sampled_from([0.02, 0.1, 1, 5, 30, 200, 1500]))
    def wait(self, ms: float) -> None:
        self.let_pass(ms)

    @rule(
        name=NAMES,
        k=PAIRS,
        up=st.booleans(),
        event_ns=st.sampled_from([None, 10 * US, 2 * MS]),
        ms=LETS_PASS,
    )
    def port(self, name: str, k: int, up: bool, event_ns: int | None, ms: float) -> None:
        """event_ns: how late its host hears of it, None: never. Of a port that it knows to be down it hears all."""
        k %= self.pairs
        if event_ns is not None and not up:
            self.known_down.add((name, k))
        elif event_ns is None and up and (name, k) in self.known_down:
            event_ns = 10 * US
        self.broken("port").port(name, k, up, event_ns)
        self.let_pass(ms)

    @rule(names=st.sampled_from(["a", "b", "ab"]), k=PAIRS, on=st.booleans(), ms=LETS_PASS)
    def switch(self, names: str, k: int, on: bool, ms: float) -> None:
        net = self.broken("wall")
        for name in names:
            net.wall(name, k % self.pairs, on)
        self.let_pass(ms)

    @rule(name=NAMES, k=PAIRS, n=st.integers(1, 5), kind=st.sampled_from(["ack", "resp", "req"]))
    def lose(self, name: str, k: int, n: int, kind: str) -> None:
        drop_next(self.broken("drop_answer"), name, k % self.pairs, kind, times=n)

    @rule(
        loss=st.sampled_from([0.0, 0.1, 0.3, 0.9]),
        packets=st.sampled_from([0.0, 0.0, 0.2]),
        duplicate=st.sampled_from([0.0, 0.3]),
        jitter_ns=st.sampled_from([0, 200 * US, 2 * MS, 40 * MS]),
        echo_ns=st.sampled_from([0, 0, 30 * MS]),
        ms=LETS_PASS,
    )
    def network(
        self, loss: float, packets: float, duplicate: float, jitter_ns: int, echo_ns: int, ms: float
    ) -> None:
        """loss: of datagrams; packets: of any; echo_ns: some come once more, so late."""
        net = self.broken("loss")
        if self.gentle:
            loss, jitter_ns = min(loss, 0.3), min(jitter_ns, 2 * MS)
        for link in net.links.values():
            link.datagram_loss, link.loss, link.duplicate = loss, packets, duplicate
            link.jitter_ns, link.echo_ns = jitter_ns, echo_ns
        if loss > 0.5 or jitter_ns > 10 * MS:
            self.reasons.add("the peer cannot be heard")
        self.let_pass(ms)

    @rule(name=NAMES, k=PAIRS, broken=st.booleans(), ms=LETS_PASS)
    def qp_fatal(self, name: str, k: int, broken: bool, ms: float) -> None:
        """The QP of one pair goes to ERR on one side (or only looks as if it did)."""
        net = self.broken("qp_fatal")
        app = net.app(name)
        if broken:
            net.qp_fatal(name, k % self.pairs)
        if app.endpoint.connection is not None and not app.closed:
            path_failed(app, k % self.pairs, "QP_FATAL")
        self.let_pass(ms)

    @precondition(lambda self: not self.gentle)
    @rule(
        name=NAMES,
        k=PAIRS,
        how=st.sampled_from(["slow", "hung", "failing", "refusing", "send", "receive", "well"]),
        ms=LETS_PASS,
    )
    def commands(self, name: str, k: int, how: str, ms: float) -> None:
        """A NIC carries out commands late, never, or not; or it refuses one post."""
        net, nic = self.net, self.nic(name, k)
        assert net is not None
        if how != "well":
            what = {"send": "refuse_post", "receive": "refuse_post"}.get(how, how)
            self.broken(what, "a NIC misbehaves")
        nic.command_ns = 5 * MS if how == "slow" else 30 * US
        nic.failing = how == "failing"
        nic.refusing = 2 if how == "refusing" else 0
        nic.unhang()
        nic.hung = how == "hung"
        qp = net.app(name).endpoint.qp(nic.k)
        if how in ("send", "receive") and qp is not None and not net.app(name).closed:
            queue = how == "receive"
            qp.shared.refuse_at[queue], qp.shared.refuse_err[queue] = 1, errno.ENOMEM
        self.let_pass(ms)

    @rule(name=NAMES, k=PAIRS, late_ms=st.sampled_from([0.05, 5, 60]))
    def late_memory(self, name: str, k: int, late_ms: float) -> None:
        """Memory takes so long to be registered on a backup."""
        if k % self.pairs:
            self.broken("slow_memory")
            self.nic(name, k).registering_ns = int(late_ms * MS)

    @precondition(lambda self: not self.gentle)
    @rule(
        name=NAMES,
        k=PAIRS,
        how=st.sampled_from(["stalls", "goes on", "holds completions", "tells them", "dies"]),
        ms=LETS_PASS,
    )
    def nic_that(self, name: str, k: int, how: str, ms: float) -> None:
        net, nic = self.net, self.nic(name, k)
        assert net is not None
        on = how in ("stalls", "holds completions")
        if how == "dies":
            self.broken("kill", "a NIC died").kill(name, nic.k)
        elif how in ("stalls", "goes on") and nic.stalled != on:
            self.broken("stall", "a NIC misbehaves").stall(name, nic.k, on)
        elif how in ("holds completions", "tells them") and nic.holds_cqes != on and not nic.dead:
            self.broken("hold_and_kill", "a NIC misbehaves").hold_cqes(name, nic.k, on)
        self.let_pass(ms)

    @rule(name=NAMES, away=st.booleans(), lose_lease=st.booleans())
    def etcd(self, name: str, away: bool, lose_lease: bool) -> None:
        exchanger = self.broken("etcd").host(name).exchanger
        if away:
            exchanger.go_away(lose_lease)
        else:
            exchanger.come_back()

    @rule(name=NAMES, ms=st.sampled_from([1, 20, 200]))
    def freeze(self, name: str, ms: int) -> None:
        """A process that is not scheduled."""
        net = self.broken("freeze")
        net.host(name).frozen_until_ns = net.clock.now + ms * MS

    # ---- what must hold ---------------------------------------------------------------------------------------------

    @invariant()
    def what_holds_at_any_time(self) -> None:
        net = self.net
        if net is None:
            return
        net.deliver()  # raises where our own code failed
        self.facts_hold(net)
        self.epochs_never_go_back(net)
        self.states_follow_the_picture(net)

    def facts_hold(self, net: Network) -> None:
        for fact in AT_ANY_TIME:
            fact(net)
        executed = {e[4] for e in net.executions}
        for app in net.apps:
            mine = [
                e
                for e in net.executions
                if e[4].side == app.name and (e[1], e[2], e[3], e[5]) not in net.lost_cqes
            ]
            checks.messages_once_and_in_order(app, app.peer, mine)
            checks.executed_no_more_than_allowed(net, app, mine)
            checks.data_before_its_message(mine)
            checks.reads_are_right(app)
            checks.nothing_bad_succeeds(app)
            for queue, wr, status in app.wcs:
                assert queue == "recv" or status != OK or wr in executed, f"{wr} was not executed"
            successes = [wr.index for queue, wr, status in app.wcs if queue == "send" and status == OK]
            assert successes == sorted(set(successes)), f"{app.name}: {successes}"

    def epochs_never_go_back(self, net: Network) -> None:
        for app in net.apps:
            p = app.endpoint.protocol
            if p is not None:
                life = (app.name, net.life_at(app.name, net.clock.now))
                assert p.epoch >= self.epochs.get(life, 0)
                self.epochs[life] = p.epoch

    @staticmethod
    def states_follow_the_picture(net: Network) -> None:
        paths: dict[tuple[str, int], list[str]] = {}
        for t, name, what in net.trace:
            if isinstance(what, ev.StateChanged) and what.direction == "send":
                paths.setdefault((name, net.life_at(name, t)), ["DEFAULT"]).append(what.state)
        for path in paths.values():
            assert set(itertools.pairwise(path)) <= ARROWS, path

    # ---- the end ----------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        try:
            if self.net is not None and not self.net.errors:
                self.come_to_rest(self.net)
        finally:
            if World.current is not None:
                World.current.end()

    def come_to_rest(self, net: Network) -> None:
        """Heal, let it end as it will, and judge."""
        healed = Healed(net)
        healed.heal()
        clock = net.clock
        self.let_pass(50)
        assert clock.run(clock.now + END_NS, healed.finished), f"not at rest: {self.told()}"
        self.let_pass(300)
        gave_up = [app for app in net.apps if ended(app)]
        assert not gave_up or self.reasons, f"gave up without a reason: {self.told()}"
        healed.judge_end(net)
        going_on = [app for app in net.apps if not ended(app) and not ended(app.peer)]

        alive = [k for k in range(self.pairs) if not any(net.nics[name][k].dead for name in "ab")]

        def fit() -> bool:
            protocols = [app.endpoint.protocol for app in going_on]
            return all(p.pairs[k].clean or k in (p.send_pair, p.recv_pair) for p in protocols for k in alive)

        assert clock.run(clock.now + 15_000 * MS, fit), f"a backup stays unfit: {self.told()}"
        for app in going_on:
            messages = [wr for wr in app.posted if wr.opcode in TWO_SIDED]
            assert len(app.peer.received) == len(messages)
        checks.check(net)
        self.what_holds_at_any_time()

    def told(self) -> str:
        """For a failure's text."""
        assert self.net is not None
        return "\n".join([*map(str, self.net.trace[-60:]), *map(state, self.net.apps), str(self.reasons)])


TestFailover = Failover.TestCase
TestFailover.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
