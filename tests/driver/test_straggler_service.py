# SPDX-License-Identifier: BSD-3-Clause
"""What the straggler detector is told, and what becomes of what it says, with QPs and samples that only remember.

With all of failover around it: tests/simulator/test_slow_rails.py, tests/failover/test_slow_paths.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from driver.doubles import make_nic, with_port
from typed_doubles import Double, double

from shiftverbs import _core, observe
from shiftverbs.exchanger.records import ControlEndpoint, QpRecord, Route
from shiftverbs.failover.driver import QUIET_PING_NS, Driver
from shiftverbs.failover.qp.connection import Connection as RealConnection
from shiftverbs.failover.services import stragglers
from shiftverbs.failover.services.control_channel import Path as ControlPath
from shiftverbs.failover.services.stragglers import DENSE_PING_NS, MOVE_NS, REST_NS, SAID_NS, SlowPaths
from shiftverbs.protocol import events as ev
from shiftverbs.protocol.events import Status
from shiftverbs.protocol.messages import PairAddress
from shiftverbs.protocol.pair import PairProtocol
from shiftverbs.protocol.state import Pair
from shiftverbs.shadows.qp import ShadowQP
from shiftverbs.stragglers.detector import Stragglers
from shiftverbs.stragglers.records import (
    SECOND,
    Action,
    Attribution,
    Evidence,
    Mode,
    Move,
    Observe,
    Path,
    Probe,
    Recovered,
    Return,
)
from shiftverbs.stragglers.trains import TRAIN_BYTES, TRAIN_MESSAGES

SECRET = "5e" * 16


class Sample(Double, real=_core.SendSample, own=("made", "wanted", "taken")):
    """A SendSample: wanted is what was last asked for, taken what it says when it has ended."""

    made: list[Sample] = []

    def __init__(self) -> None:
        super().__init__()
        self.wanted: tuple[Any, int] | None = None
        self.taken: tuple[int, ...] | None = None
        Sample.made.append(self)

    def want(self, cores: list[Any], k: int) -> None:
        self.wanted = (cores, k)

    def drop(self) -> None:
        self.wanted = None

    def take(self) -> tuple[int, ...] | None:
        return self.taken


class Detector(Double, real=Stragglers, own=("heard", "says", "fails")):
    """The detector: remembers what it is told, and says what it was given to say."""

    next_timeout_ns = None

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[tuple[Any, ...]] = []
        self.says: list[Action] = []
        self.fails = False

    def _hears(self, *what: Any) -> list[Action]:
        if self.fails:
            raise RuntimeError("a bug")
        self.heard.append(what)
        said, self.says = self.says, []
        return said

    def __getattr__(self, name: str) -> Any:
        if name not in vars(Stragglers):
            raise AttributeError(name)
        return self._checked(name, lambda *args: self._hears(name, *args))

    _own = Double._own | {"heard", "says", "fails", "_hears"}


class Around:
    """A driver with its SlowPaths, two rails to one peer, and QPs that go there."""

    def __init__(self, driver: Driver, clock: SimpleNamespace, mode: Mode) -> None:
        self.driver, self.clock = driver, clock
        self.measures = driver.measures = SlowPaths(driver, mode)
        driver.channel.on_pong = self.measures.handle_pong
        self.detector = Detector()
        self.measures._detector = self.detector  # type: ignore[assignment]
        self.ended: list[Sample] = []
        driver.machine.ended_samples = self._take  # type: ignore[assignment,method-assign]
        self.nics = [make_nic("soft0"), make_nic("soft1")]
        self.paths = [self._path(nic) for nic in self.nics]
        self.members = [self.connection(number) for number in (1, 2)]

    def _take(self) -> list[Any]:
        found, self.ended = self.ended, []
        return found

    def _path(self, nic: Any) -> ControlPath:
        with_port(self.driver.channel, nic)
        endpoint = ControlEndpoint("x", "0000:0000:0000:0000:0000:ffff:0a00:0001", 0, 5, 7, 9, SECRET)
        return self.driver.channel.open_path(nic, endpoint, lambda path: None)

    def connection(self, number: int) -> Any:
        pairs = [Pair(PairAddress(bytes(16), 0, 0, 0, 1), clean=True, alive=True) for _ in range(2)]
        protocol = double(
            PairProtocol, pairs=pairs, over=False, busy=False, preferred=0, send_pair=0, recv_pair=0
        )
        record = double(QpRecord, instance="ab", default=double(Route, gid="fe80::1", lid=0))
        made = double(
            RealConnection,
            shadow=double(ShadowQP, qp_num=number),
            core=SimpleNamespace(oldest_wr=0, outstanding=(1, 0)),
            closed=False,
            status=Status.PROTECTED,
            protocol=protocol,
            peer=record,
            paths=list(self.paths),
            n_pairs=2,
            send_pair=0,
            recv_pair=0,
            device=lambda k: f"soft{k}",
        )
        fed: list[Any] = []
        made.feed = fed.append
        self.fed = getattr(self, "fed", {})
        self.fed[made] = fed
        return made

    def join(self) -> Sample:
        """All of them; returns their sample."""
        for member in self.members:
            self.measures.joined(member)
        self.look(REST_NS)
        return Sample.made[-1]

    def look(self, after_ns: int = 0) -> None:
        self.clock.now += after_ns
        self.measures.look(self.clock.now)

    def says(self, *actions: Action) -> None:
        """The detector says this at the next sample."""
        sample = Sample.made[-1]
        self.detector.says = list(actions)
        sample.taken = (64, 1, self.clock.now, self.clock.now + 1000, 0, 0)
        self.ended = [sample]
        self.look()

    def go_to(self, pair: int) -> None:
        """All QPs are on that pair."""
        for member in self.members:
            member.send_pair = member.recv_pair = pair
            member.protocol.send_pair = member.protocol.recv_pair = member.protocol.preferred = pair

    def told(self, name: str) -> list[tuple[Any, ...]]:
        return [what[1:] for what in self.detector.heard if what[0] == name]

    def asked(self) -> list[int]:
        """Which pairs each QP was asked to go to, the same for all."""
        while self.driver._backlog:
            _, call, args = self.driver._backlog.popleft()
            call(*args)
        found = {tuple(event.pair for event in fed) for fed in self.fed.values()}
        assert len(found) == 1 and all(
            type(event) is ev.PreferPair for fed in self.fed.values() for event in fed
        )
        return list(found.pop())


@pytest.fixture
def make(driver: Driver, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Callable[[Mode], Around]:
    monkeypatch.setattr(stragglers._core, "SendSample", Sample)
    monkeypatch.setattr(Sample, "made", [])
    return lambda mode: Around(driver, clock, mode)


@pytest.fixture
def around(make: Callable[[Mode], Around]) -> Around:
    return make(Mode.MIGRATE)


def slow(name: str, ratio: float = 3.0, fault: Attribution = Attribution.PATH) -> Evidence:
    return Evidence(Path(name, 0), ratio, 0, 20, SECOND, fault)


def test_where_it_is_off_there_is_nothing(driver: Driver) -> None:
    config = driver.config.replace(straggler="off")
    made = Driver(config, driver.exchanger, "0" * 16, driver.waiter, list, driver.machine)
    try:
        assert made.measures is None and made.channel.on_pong is None
    finally:
        made.outside.close()
    assert driver.measures is not None and driver.measures.mode is Mode.OBSERVE


def test_samples_are_wanted_taken_in_and_wanted_again(around: Around) -> None:
    sample = around.join()
    first, second = around.members
    assert len(Sample.made) == 1 and sample.wanted == ([first.core, second.core], 0)
    assert around.told("add_peer") == [("ab 1", 0)]
    sample.wanted, sample.taken = None, (128, 2, 1000, 3000, 500, 64)
    around.ended = [sample]
    around.look()
    ((told,),) = around.told("handle_sample")
    assert (told.path, told.bytes, told.messages, told.took_ns) == (Path("ab 1", 0), 128, 2, 2000)
    assert (told.unseen_ns, told.begun_bytes, told.busy_ns) == (500, 64, 0)
    around.look(REST_NS - 1)
    assert sample.wanted is None
    around.look(1)
    assert sample.wanted is not None
    # Three times as many WRs were complete since then as there are in a sample; and there was time for two of them.
    first.core.oldest_wr = 6
    for ended_ns, busy_ns in ((10_000, 6000), (14_000, 4000)):
        sample.taken = (128, 2, ended_ns - 2000, ended_ns, 0, 0)
        around.ended = [sample]
        around.look()
        assert around.told("handle_sample")[-1][0].busy_ns == busy_ns
        first.core.oldest_wr += 6


def test_one_that_was_broken_off_says_nothing(around: Around) -> None:
    sample = around.join()
    around.ended = [sample]
    around.look()
    assert around.told("handle_sample") == []
    sample.wanted = None
    around.look(REST_NS)
    assert sample.wanted is not None


def test_others_do_not_wait_for_a_qp_whose_sends_wait(around: Around) -> None:
    sample = around.join()
    first, second = around.members
    cores = [first.core, second.core]
    assert sample.wanted == (cores, 0)
    around.measures.waits(first)
    around.measures.waits(first)
    around.look(REST_NS)
    assert sample.wanted == (cores, 0), "nobody goes on: the path may be slow"
    first.core.oldest_wr = 3
    around.measures.waits(first)
    around.look(REST_NS)
    assert sample.wanted == (cores, 0), "it does go on"
    around.says()
    around.look(REST_NS)
    around.measures.waits(first)
    second.core.oldest_wr = 9
    around.measures.waits(first)
    assert sample.wanted is None
    around.look(REST_NS)
    assert sample.wanted == ([second.core], 0)
    for _ in range(2):
        around.measures.waits(first)
        around.measures.waits(second)
    assert sample.wanted == ([second.core], 0)
    around.says()
    around.look(REST_NS)
    assert sample.wanted == ([second.core], 0), "it stands still"
    first.core.oldest_wr = 4
    around.says()
    around.look(REST_NS)
    assert sample.wanted == (cores, 0), "and does not any more"


def test_what_was_posted_before_a_send_became_old_says_nothing_about_it(around: Around) -> None:
    """Where each send takes more than a second, each is old at some time while others, of before, complete."""
    sample = around.join()
    first, second = around.members
    for _ in range(5):
        second.core.oldest_wr += 1  # one that was posted before the first's
        around.measures.waits(first)
        assert sample.wanted is not None, "it takes no longer than others"
        first.core.oldest_wr += 1
        around.measures.waits(second)
        assert sample.wanted is not None, "it takes no longer than others"


def left_out(around: Around) -> tuple[Sample, Any, Any]:
    """The first of two QPs waits, and the other one goes on."""
    sample = around.join()
    first, second = around.members
    around.measures.waits(first)
    second.core.oldest_wr += 9
    around.measures.waits(first)
    around.look(REST_NS)
    assert sample.wanted == ([second.core], 0)
    return sample, first, second


def test_a_qp_that_was_left_out_is_taken_in_though_others_post_no_more(around: Around) -> None:
    sample, first, second = left_out(around)
    second.core.outstanding = (0, 0)
    second.core.oldest_wr += 1
    around.look(REST_NS)
    around.look(REST_NS)
    assert sample.wanted == ([second.core], 0), "the first stands still"
    first.core.oldest_wr += 1
    around.look(REST_NS)
    around.look(REST_NS)
    assert sample.wanted == ([first.core, second.core], 0)


def test_one_under_way_is_not_broken_off_to_take_a_qp_in(around: Around) -> None:
    sample, first, second = left_out(around)
    second.core.outstanding = (2, 0)
    first.core.oldest_wr += 1
    around.look(REST_NS)
    around.look(REST_NS)
    assert sample.wanted == ([second.core], 0)


def test_a_qp_that_was_left_out_shows_that_another_one_waits(around: Around) -> None:
    """It goes on, and those that were measured in its place do not any more."""
    sample, first, second = left_out(around)
    second.core.outstanding = (2, 0)  # under way
    around.measures.waits(second)
    first.core.oldest_wr += 9
    around.measures.waits(second)
    around.look(REST_NS)
    assert sample.wanted == ([first.core], 0)


def test_a_qp_that_waits_alone_is_all_there_is(around: Around) -> None:
    sample = around.join()
    first, second = around.members
    around.measures.waits(first)
    second.core.oldest_wr = 9
    around.measures.waits(first)
    around.look(REST_NS)
    around.measures.left(second)
    around.says()
    around.look(REST_NS)
    assert sample.wanted == ([first.core], 0)
    around.measures.left(first)
    around.measures.waits(first)
    assert not around.measures.failed and not around.measures._peers


def test_one_is_taken_in_at_a_look(around: Around) -> None:
    others = [around.connection(number) for number in range(3)]
    for k, other in enumerate(others):
        nics = make_nic(f"other{k}"), make_nic(f"more{k}")
        other.paths = [around._path(nic) for nic in nics]
        around.measures.joined(other)
    assert len(Sample.made) == 3
    for sample in Sample.made:
        sample.taken = (64, 1, 1, 2, 0, 0)
    around.ended = list(Sample.made)
    for number in range(1, 5):
        around.look(1)
        assert len(around.told("handle_sample")) == min(number, 3)


def test_pings_of_those_that_have_traffic_are_told(around: Around) -> None:
    path = around.paths[1]
    around.measures.handle_pong(path, 5, 6)  # nobody there
    around.join()
    around.measures.handle_pong(path, 5, 6)  # nothing was sent yet
    around.says()
    assert around.measures.dense.keys() == set(around.paths), "until it is known what a round trip takes"
    around.measures.handle_pong(path, 7, 7)
    assert around.told("handle_ping") == []
    for _ in range(2 * stragglers.LEARNING_PINGS):
        around.measures.handle_pong(path, around.clock.now, around.clock.now + 5)
    assert around.measures.dense == {}
    told = around.told("handle_ping")
    assert len(told) == 2 * stragglers.LEARNING_PINGS and told[0][0].path == Path("ab 1", 1)
    around.measures.handle_pong(path, around.clock.now + 61 * SECOND, around.clock.now + 61 * SECOND + 5)
    assert len(around.told("handle_ping")) == len(told), "too long ago"


def test_a_suspicion_has_both_rails_pinged_often(around: Around) -> None:
    around.join()
    for path in around.paths:
        path.ping.interval_ns = QUIET_PING_NS
    around.says(Probe("ab 1", DENSE_PING_NS))
    assert around.measures.dense == dict.fromkeys(around.paths, DENSE_PING_NS)
    assert all(path.ping.interval_ns == DENSE_PING_NS for path in around.paths)
    around.driver._to_watch = []
    around.driver._watch(around.clock.now)
    assert all(path.ping.interval_ns == DENSE_PING_NS for path in around.paths), "as long as it lasts"
    around.measures._peers[tuple(around.paths)].pongs = 1000
    around.says(Probe("ab 1", None))
    around.driver._watch(around.clock.now)
    assert all(path.ping.interval_ns == QUIET_PING_NS for path in around.paths)


def test_a_peer_that_is_well_does_not_take_the_pings_of_another_over_the_same_rails(around: Around) -> None:
    """Two QPs of one process, whose default NICs are two: the rails are the same, in another order."""
    other = around.connection(3)
    other.paths = list(reversed(around.paths))
    around.measures.joined(other)
    around.join()
    for peer in around.measures._peers.values():
        peer.pongs = 1000
    around.says(Probe("ab 2", DENSE_PING_NS))
    assert around.measures.dense == dict.fromkeys(around.paths, DENSE_PING_NS)
    for sample in Sample.made:
        sample.taken = (64, 1, around.clock.now, around.clock.now + 1000, 0, 0)
    around.ended = list(Sample.made)
    around.look()
    around.look()
    assert around.measures.dense == dict.fromkeys(around.paths, DENSE_PING_NS)
    around.measures.left(other)
    assert around.measures.dense == dict.fromkeys(around.paths, DENSE_PING_NS)
    around.says(Probe("ab 2", None))
    for member in around.members:
        around.measures.left(member)
    assert around.measures.dense == {} and not around.measures.failed


def test_a_path_that_is_closed_is_not_kept_for_trains(around: Around) -> None:
    """A QP goes elsewhere, and a sample of before is taken in after that."""
    sample = around.join()
    users = [path.users[0] for path in around.paths]
    sample.taken = (64, 1, around.clock.now, around.clock.now + 1000, 0, 0)
    around.ended = [sample]
    for path, user in zip(around.paths, users, strict=True):
        around.driver.channel.close_path(path, user)
    around.look()
    for member in around.members:
        around.measures.left(member)
    assert not around.driver.channel.trains.paths and not around.measures.dense


def trained(around: Around) -> list[int | None]:
    """Ahead of every how many pings of each path a train goes."""
    trains = around.driver.channel.trains
    return [trains.paths[path].each if path in trains.paths else None for path in around.paths]


def test_trains_go_over_the_rail_without_traffic_where_qps_may_move(
    around: Around, make: Callable[[Mode], Around]
) -> None:
    around.join()
    assert trained(around) == [None, None], "nothing was sent yet"
    around.says()
    assert trained(around) == [None, 2], "what it takes is learned"
    peer = around.measures._peers[tuple(around.paths)]
    peer.pongs, peer.trains = 2 * stragglers.LEARNING_PINGS - 1, stragglers.LEARNING_TRAINS
    around.measures.handle_pong(around.paths[0], around.clock.now, around.clock.now + 5)
    assert trained(around) == [None, 5]
    around.says(Probe("ab 1", DENSE_PING_NS))
    assert trained(around) == [None, 2]
    around.says(Move(Path("ab 1", 0), 1, slow("ab 1")))
    around.go_to(1)
    around.look(5_000_000)
    around.says(Probe("ab 1", None))
    assert trained(around) == [5, None], "home is looked at"
    around.clock.now += 61 * SECOND
    around.measures.handle_pong(around.paths[0], around.clock.now, around.clock.now + 5)
    assert trained(around) == [None, None], "nothing is sent any more"
    around.says()
    assert trained(around) == [5, None]
    for member in around.members:
        around.measures.left(member)
    assert trained(around) == [None, None]
    observing = make(Mode.OBSERVE)
    observing.join()
    observing.says(Probe("ab 1", DENSE_PING_NS))
    assert trained(observing) == [None, None]


def test_an_error_of_its_own_ends_the_trains(around: Around) -> None:
    around.join()
    around.says()
    around.detector.fails = True
    around.says()
    assert around.measures.failed and trained(around) == [None, None]


def test_what_a_train_took_is_a_sample_and_no_ping(around: Around) -> None:
    around.join()
    around.says()
    trains, path, now = around.driver.channel.trains, around.paths[1], around.clock.now
    for ping in (1, 2):
        assert trains.handle_ping(path, now + ping * SECOND) == (ping == 2)
    around.measures.handle_pong(path, now + 2 * SECOND, now + 2 * SECOND + 700)
    told = around.told("handle_sample")[-1][0]
    assert (told.path, told.bytes, told.messages) == (Path("ab 1", 1), TRAIN_BYTES, TRAIN_MESSAGES)
    assert told.probe and told.took_ns == 700
    around.measures.handle_pong(path, now + SECOND, now + SECOND + 300)
    assert [each[0].path.rail for each in around.told("handle_ping")] == [1]
    # Its traffic has come there meanwhile: what the train took is no example.
    for ping in (3, 4):
        trains.handle_ping(path, now + ping * SECOND)
    around.go_to(1)
    around.look(REST_NS)
    around.says()
    before = len(around.told("handle_sample"))
    around.measures.handle_pong(path, now + 4 * SECOND, now + 4 * SECOND + 700)
    assert len(around.told("handle_sample")) == before and len(around.told("handle_ping")) == 1


def test_a_verdict_says_what_the_nic_counted_meanwhile(
    around: Around, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "shiftverbs.stragglers")
    looks: list[Callable[[], None]] = []
    counts = {"soft0": {"local_ack_timeout_err": 7, "packet_seq_err": 1}, "soft1": {}}
    monkeypatch.setattr(
        stragglers.congestion, "read", lambda devices: {name: counts[name] for name in devices}
    )
    for nic in around.nics:
        nic.look_again = looks.append

    def looked() -> None:
        """The NICs' threads are done, and the driver has heard of it."""
        for look in looks:
            look()
        looks.clear()
        while around.driver._posted:
            around.driver._posted.popleft()()

    told: list[observe.Straggler] = []
    with observe.subscribe(told.append, (observe.Straggler,)):
        around.join()
        around.says()
        assert not looks, "not where nothing is suspected"
        around.says(Probe("ab 1", DENSE_PING_NS))
        assert len(looks) == 2
        looked()
        counts["soft0"] = {"local_ack_timeout_err": 38, "packet_seq_err": 1}
        around.clock.now += stragglers.COUNT_NS
        around.says()
        looked()
        around.says(Observe(slow("ab 1")))
        assert observe.flush(10) and around.driver.outside.flush(10)
        assert [event.counted for event in told] == [{"local_ack_timeout_err": 31}]
        (record,) = caplog.records
        assert "lost; local_ack_timeout_err +31, this path" in record.getMessage()
        # Another suspicion begins anew, and who hears nothing says nothing.
        around.says(Recovered(Path("ab 1", 0), 0), Probe("ab 1", None))
        around.says(Probe("ab 1", DENSE_PING_NS))
        around.clock.now += SAID_NS
        around.says(Observe(slow("ab 1")))
        assert observe.flush(10) and told[-1].counted == {}
        for member in around.members:
            around.measures.left(member)
        looked()
    assert not around.measures.failed


def test_counters_that_could_not_be_read_at_first_have_not_grown(
    around: Around, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[Callable[[], None]] = []
    counts: list[dict[str, int]] = [{}, {"packet_seq_err": 70_000}, {"packet_seq_err": 70_001}]
    monkeypatch.setattr(stragglers.congestion, "read", lambda devices: dict.fromkeys(devices, counts[0]))
    for nic in around.nics:
        nic.look_again = looks.append
    around.join()
    around.says()
    around.says(Probe("ab 1", DENSE_PING_NS))
    (peer,) = around.measures._peers.values()
    for grown in ({}, {}, {"packet_seq_err": 1}):
        while looks:
            looks.pop()()
        while around.driver._posted:
            around.driver._posted.popleft()()
        assert peer.counted == dict.fromkeys(range(2), grown)
        counts.pop(0)
        around.clock.now += stragglers.COUNT_NS
        around.says()


def test_a_nic_that_hangs_is_not_asked_again_and_again(around: Around) -> None:
    looks: list[Callable[[], None]] = []
    for nic in around.nics:
        nic.look_again = looks.append
    around.join()
    around.says()
    around.says(Probe("ab 1", DENSE_PING_NS))
    for _ in range(100):
        around.clock.now += stragglers.COUNT_NS
        around.says()
    assert len(looks) == len(around.nics)


def test_an_error_in_reading_counters_is_nobodys_who_had_a_nic_looked_at(
    around: Around, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is called after one look at a NIC is called one behind the other."""

    def broken(devices: list[str]) -> None:
        raise RuntimeError("a bug")

    looks: list[Callable[[], None]] = []
    monkeypatch.setattr(stragglers.congestion, "read", broken)
    for nic in around.nics:
        nic.look_again = looks.append
    around.join()
    around.says()
    around.says(Probe("ab 1", DENSE_PING_NS))
    assert len(looks) == 2
    for look in looks:
        look()


def test_a_verdict_is_shown_counted_and_told_seldom(around: Around, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "shiftverbs.stragglers")
    around.join()
    around.says(Observe(slow("ab 1")))
    (shown,) = around.measures.slow
    assert (shown.device, shown.peer, shown.qps) == ("soft0", "fe80::1", 2)
    around.says(Observe(slow("ab 1", fault=Attribution.PEER)))
    around.says(Observe(slow("ab 1", fault=Attribution.UNKNOWN)))
    around.look(SAID_NS)
    around.clock.now += SAID_NS
    around.says(Observe(slow("ab 1", fault=Attribution.APPLICATION)))
    assert around.driver.totals.slow_paths == dict.fromkeys(
        [("soft0", fault) for fault in ("path", "peer", "unknown", "application")], 1
    )
    assert around.driver.outside.flush(10)
    assert [(r.levelname, r.getMessage().rpartition("; ")[2]) for r in caplog.records] == [
        ("WARNING", Attribution.PATH.value),
        ("INFO", Attribution.UNKNOWN.value),
        ("INFO", Attribution.APPLICATION.value),
    ]
    around.says(Observe(slow("ab 1", fault=Attribution.PEER)), Recovered(Path("ab 1", 0), 0))
    assert around.measures.slow == ()
    around.look(SAID_NS)
    assert around.driver.outside.flush(10)
    assert [r.getMessage() for r in caplog.records][3:] == ["soft0 to fe80::1 is as it was before"]


def test_who_is_moved_is_told_why_however_lately_something_else_was(
    around: Around, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "shiftverbs.stragglers")
    around.join()
    around.says(Observe(slow("ab 1", fault=Attribution.BOTH_RAILS)))
    around.says(Observe(slow("ab 1")), Move(Path("ab 1", 0), 1, slow("ab 1")))
    around.look(SAID_NS)
    assert around.driver.outside.flush(10)
    said = [record.getMessage() for record in caplog.records]
    assert [text.rpartition("; ")[2] for text in said[:2]] == [
        Attribution.BOTH_RAILS.value,
        Attribution.PATH.value,
    ]
    assert said[2].startswith("moving 2 QPs") and not [text for text in said[3:] if " is slow: " in text]


def test_a_move_is_asked_for_followed_and_measured(around: Around) -> None:
    sample = around.join()
    around.says(Observe(slow("ab 1")), Move(Path("ab 1", 0), 1, slow("ab 1")))
    assert around.asked() == [1] and sample.wanted is None
    around.look(5_000_000)
    assert around.told("handle_moved") == []
    around.members[0].send_pair = around.members[0].recv_pair = 1
    around.look(5_000_000)
    assert around.told("handle_moved") == [], "not all of them"
    around.go_to(1)
    around.look(5_000_000)
    ((name, rail, now_ns, took_ns),) = around.told("handle_moved")
    assert (name, rail, now_ns, took_ns) == ("ab 1", 1, around.clock.now, 15_000_000)
    assert sample.wanted is not None and sample.wanted[1] == 1
    assert around.driver.totals.straggler_moves == 1
    late = around.connection(3)
    around.members.append(late)
    asked = around.fed.pop(late)
    around.measures.joined(late)
    assert around.asked() == [1] and [event.pair for event in asked] == [1], "it goes where the others are"
    around.go_to(1)
    around.look(REST_NS)
    assert [each.device for each in around.measures.slow] == ["soft0"], "that is why it is away"
    around.says(Return(Path("ab 1", 0), "it is time"))
    around.go_to(0)
    around.look()
    assert around.measures.slow == ()
    assert around.told("handle_moved")[-1][:2] == ("ab 1", 0)
    assert around.driver.totals.straggler_moves == 2


@pytest.mark.parametrize(
    "obstacle",
    ["busy", "over", "preferred", "dead", "alive", "clean"],
)
def test_what_stands_in_the_way_of_a_move(around: Around, obstacle: str) -> None:
    around.join()
    protocol = around.members[1].protocol
    protocol.unfit = lambda k: "it is being connected"
    if obstacle in ("busy", "over"):
        setattr(protocol, obstacle, True)
    elif obstacle == "preferred":
        protocol.preferred = 1
    else:
        setattr(protocol.pairs[1], obstacle, obstacle == "dead")
    around.says(Move(Path("ab 1", 0), 1, slow("ab 1")))
    assert around.asked() == [] and around.told("handle_refused") == [("ab 1", around.clock.now)]


def test_a_move_that_takes_too_long_is_called_off(around: Around) -> None:
    sample = around.join()
    around.says(Move(Path("ab 1", 0), 1, slow("ab 1")))
    around.look(MOVE_NS - 1)
    assert around.told("handle_refused") == []
    around.look(1)
    assert around.asked() == [1, 0] and len(around.told("handle_refused")) == 1
    assert sample.wanted is not None and sample.wanted[1] == 0
    around.look(REST_NS)
    assert around.told("handle_moved") == []


def test_traffic_that_somebody_else_moved_is_followed(around: Around) -> None:
    sample = around.join()
    around.go_to(1)
    around.ended = [sample]
    around.look()
    around.look(REST_NS)
    assert around.told("handle_moved") == [("ab 1", 1, around.clock.now, None)]
    assert sample.wanted is not None and sample.wanted[1] == 1


def test_a_peer_whose_qps_are_gone_is_forgotten(around: Around) -> None:
    sample = around.join()
    around.says(Observe(slow("ab 1")))
    around.driver.forget(around.members[0])
    assert around.told("forget_peer") == []
    around.members[1].status = Status.FAILED
    around.look(REST_NS)
    assert around.told("forget_peer") == [("ab 1",)] and around.measures.slow == ()
    measures = around.measures
    assert sample.wanted is None and not (measures._by_path or measures._peers or measures._peer_of)


def test_an_error_of_its_own_ends_it(around: Around, caplog: pytest.LogCaptureFixture) -> None:
    sample = around.join()
    around.says(Observe(slow("ab 1")), Probe("ab 1", DENSE_PING_NS))
    around.look(REST_NS)
    around.detector.fails = True
    for _ in range(3):
        around.says()
        around.look(REST_NS)
        around.measures.handle_pong(around.paths[0], 1, 2)
        around.measures.joined(around.connection(9))
    assert around.measures.failed and around.measures.slow == () and around.measures.dense == {}
    assert sample.wanted is None
    assert around.driver.outside.flush(10)
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR] == [
        "the straggler detector failed, and is off in this process from now on"
    ]


def test_who_comes_back_in_the_middle_of_a_move_is_a_peer_of_its_own(around: Around) -> None:
    """The move of those that are gone ends without anything that those have who came since."""
    around.join()
    around.says(Move(Path("ab 1", 0), 1, slow("ab 1")))
    measures = around.measures
    for member in around.members:
        around.driver.forget(member)
    around.members = [around.connection(3)]
    sample = around.join()
    around.look(1)
    assert [peer.name for peer in measures._peers.values()] == list(measures._by_name) == ["ab 2"]
    late = around.connection(4)
    measures.joined(late)
    around.look(REST_NS)
    assert len(Sample.made) == 2, "it goes where the other does"
    sample.taken = (64, 1, 1, 2, 0, 0)
    around.detector.fails = True
    around.ended = [sample]
    around.look(REST_NS)
    assert measures.failed and [each.wanted for each in Sample.made] == [None, None]


def test_a_wish_of_somebody_elses_stays_where_a_move_is_called_off(around: Around) -> None:
    around.join()
    around.says(Move(Path("ab 1", 0), 1, slow("ab 1")))
    around.asked()
    for fed in around.fed.values():
        fed.clear()
    around.members[0].protocol.preferred = 1  # as it was asked
    around.members[1].protocol.preferred = 2  # by hand, since
    around.look(MOVE_NS)
    for _, call, args in list(around.driver._backlog):
        call(*args)
    assert [[event.pair for event in around.fed[member]] for member in around.members] == [[0], []]
