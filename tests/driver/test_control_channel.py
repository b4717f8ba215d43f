# SPDX-License-Identifier: BSD-3-Clause
"""The control channel's paths, with ports that only remember: who is heard, who is suspected, who is told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from driver.doubles import GID, PEER_SECRET, Peer, Port, arrived, heard_of, with_port

from shiftverbs.exchanger.records import ControlEndpoint
from shiftverbs.failover.driver import PINGS_UNTIL_DEAD, QUIET_PING_NS, Driver
from shiftverbs.failover.services import control_channel
from shiftverbs.failover.services.control_channel import RETRY_FIRST_NS, TRUST_NS
from shiftverbs.failover.services.stragglers import DENSE_PING_NS
from shiftverbs.native.ibv import EventType
from shiftverbs.process.log_lines import SELDOM_NS
from shiftverbs.protocol import codec
from shiftverbs.protocol.codec import Entry, Ping
from shiftverbs.protocol.messages import Arm, ArmStep, PairAddress, Phase, Sync
from shiftverbs.protocol.seal import TAG_BYTES
from shiftverbs.stragglers.records import MS
from shiftverbs.stragglers.trains import TRAIN_BYTES, TRAIN_MESSAGES


def test_a_removed_device_does_not_keep_the_control_thread_awake(
    driver: Driver, nic: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its descriptors are never quiet again, those of its control port too, whether that was made before or after."""
    watched: set[int] = set()
    channel = driver.channel
    monkeypatch.setattr(channel, "_watch", watched.add)
    monkeypatch.setattr(channel, "_unwatch", watched.discard)
    port = Port()
    channel._port_made(nic, port)
    assert watched == {port.fd}
    driver.nic_events._on_async(nic, EventType.DEVICE_FATAL)
    assert not watched
    channel._port_made(nic, port)
    assert not watched


def test_a_peer_that_was_restarted_or_moved_has_a_path_of_its_own(driver: Driver, nic: Any) -> None:
    """Same GID, same QPN, another Q_Key or LID, while a QP of ours still holds the path to what was there before."""
    channel, port = driver.channel, with_port(driver.channel, nic)
    users: list[Any] = [lambda path: None for _ in range(3)]
    before, after = "0a" * 16, "0b" * 16
    endpoints = [
        ControlEndpoint("x", GID, lid, 5, 7, qkey, secret)
        for lid, qkey, secret in ((1, 9, before), (1, 10, after), (2, 10, after))
    ]
    paths = [channel.open_path(nic, endpoint, user) for endpoint, user in zip(endpoints, users, strict=True)]
    nic.worker.work()
    driver.run()
    assert [path.endpoint for path in paths] == endpoints
    assert paths[0].link is not paths[1].link is paths[2].link

    def answered_by(secret: str) -> list[Any]:
        """The paths by which a ping of that process's is answered."""
        port.inbox = Peer(driver, nic, secret).says(Entry(0, 0, Ping(5, False)))
        channel.receive(0)
        found = [path for path in paths if path.outbox]
        for path in found:
            path.outbox.clear()
        return found

    assert answered_by(before) == [paths[0]] and answered_by(after) == [paths[2]]
    channel.close_path(paths[0], users[0])
    assert answered_by(before) == []
    assert channel.open_path(nic, endpoints[1], users[1]) is paths[1]  # there and back again
    assert paths[1].link.path is paths[1]
    channel.close_path(paths[2], users[2])
    assert paths[1].link.path is paths[1]
    for _ in range(2):
        assert list(channel.paths.values()) == [paths[1]]
        channel.close_path(paths[1], users[1])
    assert not channel.paths and not channel._links


def test_an_address_handle_is_made_again(driver: Driver, nic: Any, clock: SimpleNamespace) -> None:
    channel, port = driver.channel, with_port(driver.channel, nic)
    path = channel.open_path(nic, ControlEndpoint("x", GID, 0, 5, 7, 9, PEER_SECRET), lambda path: None)

    def settle() -> None:
        nic.worker.work()
        driver.run()

    settle()
    assert path.ah == 1
    port.ah = 0
    channel.renew(nic)  # the GID went away, or the neighbour did
    settle()
    assert path.ready and path.failed and port.gone == []
    port.ah = 2
    for _ in range(2):
        clock.now += RETRY_FIRST_NS
        settle()
    settle()
    assert path.ah == 2 and path.failed is None and port.gone == [1]
    assert not nic.worker.jobs
    port.ah = 3
    channel.renew(nic)
    channel.close_path(path, path.users[0])
    nic.worker.work()
    driver.run()
    nic.worker.work()
    assert port.gone == [1, 2, 3], "one that was being made when the path was closed is destroyed too"


def test_a_pair_that_answers_is_not_suspected_again_and_again(
    driver: Driver, nic: Any, clock: SimpleNamespace
) -> None:
    """A thousand QPs that fail there one after the other: each time every one of them would have to be told."""
    with_port(driver.channel, nic)
    told: list[bool | None] = []
    path = driver.channel.open_path(
        nic, ControlEndpoint("x", GID, 0, 5, 7, 9, PEER_SECRET), lambda path: told.append(path.told)
    )
    nic.worker.work()
    driver.run()
    path.users[0](path)
    told.clear()

    def answered() -> None:
        clock.now += QUIET_PING_NS
        driver.channel.ping(clock.now)
        path.ping.handle_pong(path.asked, clock.now)
        driver.channel._tell(path)

    answered()
    assert told == [True]
    for _ in range(1000):
        driver.channel.suspect(path, clock.now)
        driver.channel.ping(clock.now)
        path.ping.handle_pong(path.asked, clock.now)
        driver.channel._tell(path)
    assert told == [True, False, True]
    clock.now += TRUST_NS
    driver.channel.suspect(path, clock.now)
    assert told == [True, False, True, False]


def test_pings_that_cannot_be_sent_are_not_missed(driver: Driver, nic: Any, clock: SimpleNamespace) -> None:
    """No address handle, or no port: nothing has gone out, and that no answer comes says nothing of the path."""
    one, _heard, _arrive = heard_of(driver, nic)
    channel, path, port = driver.channel, one.paths[0], driver.channel.port(nic)

    def missing() -> int | None:
        began = clock.now
        for _ in range(3):
            clock.now += QUIET_PING_NS
            channel.ping(clock.now)
        return path.ping.missing_since(began, 1)

    assert missing() is not None
    path.ping.handle_pong(path.asked, clock.now)
    ah, path.ah = path.ah, 0
    assert missing() is None and path.ping.alive is not True
    path.ah = ah
    assert missing() is not None
    path.ping.handle_pong(path.asked, clock.now)
    port.state = "error"
    assert missing() is None


def test_a_train_goes_ahead_of_a_ping_and_is_read_by_nobody(
    driver: Driver, nic: Any, clock: SimpleNamespace, caplog: Any
) -> None:
    one, _heard, _arrive = heard_of(driver, nic)
    channel, path, port = driver.channel, one.paths[0], driver.channel.port(nic)
    peer = Peer(driver, nic)
    pongs: list[tuple[Any, ...]] = []
    channel.on_pong = lambda *what: pongs.append(what)

    def pinged() -> list[bytes]:
        """What goes out with the next ping, and the ping."""
        port.sent.clear()
        clock.now += QUIET_PING_NS
        driver.run()
        (ping,) = peer.hears(port.sent[-1])
        assert ping.message == Ping(path.asked, False)
        port.inbox = peer.says(Entry(0, 0, Ping(path.asked, True)))
        clock.now += 1000
        driver.run()
        return list(port.sent[:-1])

    assert pinged() == []
    channel.trains.want(path, 1)
    sent = pinged()
    assert len(sent) == TRAIN_MESSAGES - 1 and set(sent) == {codec.FILL}
    assert sum(map(len, sent)) + len(codec.FILL) == TRAIN_BYTES
    where, sent_ns, heard_ns = pongs[-1]
    assert where is path and channel.trains.handle_pong(path, sent_ns, heard_ns)
    # They say nothing, whoever sends them and whatever is in them, and are no sign of life.
    dropped = (channel.malformed, channel.forged, channel.unknown, channel.replayed)
    path.heard_ns = None
    port.inbox = arrived(*sent, codec.FILL_HEAD, codec.FILL_HEAD + bytes(range(256)))
    driver.run()
    while channel.more:
        driver.run()
    assert channel.filled == TRAIN_MESSAGES + 1 and path.heard_ns is None
    assert (channel.malformed, channel.forged, channel.unknown, channel.replayed) == dropped
    port.max_message = codec.MAX_DATAGRAM_BYTES - 1
    assert pinged() == [], "smaller ones show something else"
    del port.max_message
    assert len(pinged()) == TRAIN_MESSAGES - 1


def answer(driver: Driver, nic: Any, path: Any) -> None:
    """The peer answers the last ping."""
    driver.channel.port(nic).inbox = Peer(driver, nic).says(Entry(0, 0, Ping(path.asked, True)))
    driver.run()


def pings_behind_a_train(
    driver: Driver, nic: Any, clock: SimpleNamespace, answered_after_ns: int
) -> list[Any]:
    """What is told of a path that is asked each 25 ms, once a train goes there that takes so long."""
    one, _heard, _arrive = heard_of(driver, nic)
    channel, path, port = driver.channel, one.paths[0], driver.channel.port(nic)
    peer = Peer(driver, nic)

    def ping() -> None:
        path.ping.interval_ns = DENSE_PING_NS
        path.ping.hurry(clock.now)
        clock.now += DENSE_PING_NS
        driver.run()

    for _ in range(40):
        ping()
        port.inbox = peer.says(Entry(0, 0, Ping(path.asked, True)))
        clock.now += MS
        driver.run()
    told: list[Any] = []
    path.users.append(lambda path: told.append(path.told))
    channel.trains.want(path, 1)
    ping()
    began, number = clock.now, path.asked
    assert port.sent.count(codec.FILL) == TRAIN_MESSAGES - 1
    while clock.now - began < answered_after_ns:
        ping()
    port.inbox = peer.says(Entry(0, 0, Ping(number, True)))
    driver.run()
    return told


def test_pings_wait_behind_a_train_and_a_slow_rail_is_no_dead_one(
    driver: Driver, nic: Any, clock: SimpleNamespace
) -> None:
    """A megabit a second: half a second."""
    assert pings_behind_a_train(driver, nic, clock, 600 * MS) == []


def test_one_on_which_nothing_comes_behind_a_train_is_dead_all_the_same(
    driver: Driver, nic: Any, clock: SimpleNamespace
) -> None:
    assert pings_behind_a_train(driver, nic, clock, 1500 * MS)[:1] == [False]


def test_no_train_goes_where_nobody_answers(driver: Driver, nic: Any, clock: SimpleNamespace) -> None:
    one, _heard, _arrive = heard_of(driver, nic)
    path, port = one.paths[0], driver.channel.port(nic)
    answer(driver, nic, path)
    driver.channel.trains.want(path, 1)
    path.ping.suspect()
    port.sent.clear()
    for _ in range(30):
        clock.now += QUIET_PING_NS
        driver.run()
    assert port.sent and codec.FILL not in port.sent


def test_what_is_to_be_said_goes_ahead_of_a_train(driver: Driver, nic: Any, clock: SimpleNamespace) -> None:
    one, _heard, _arrive = heard_of(driver, nic)
    path, port = one.paths[0], driver.channel.port(nic)
    answer(driver, nic, path)
    driver.channel.trains.want(path, 1)
    clock.now += QUIET_PING_NS
    port.sent.clear()
    driver.channel.send(path, Entry(11, 22, Arm(ArmStep.REQ, 0, 1, 1, PairAddress(bytes(16), 0, 1, 0, 3))))
    driver.channel.ping(clock.now)
    driver.channel.flush()
    assert codec.FILL in port.sent and port.sent[0] != codec.FILL
    assert not isinstance(Peer(driver, nic).hears(port.sent[0])[0].message, Ping)


def test_a_train_that_did_not_fit_into_the_queue_is_none(
    driver: Driver, nic: Any, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _heard, _arrive = heard_of(driver, nic)
    path, port = one.paths[0], driver.channel.port(nic)
    answer(driver, nic, path)
    driver.channel.trains.want(path, 1)
    went = iter(range(1000))
    send = port.send
    monkeypatch.setattr(port, "send", lambda *what: send(*what) and next(went) != 30)
    clock.now += QUIET_PING_NS
    driver.run()
    assert len(port.sent) > 31 and not driver.channel.trains.handle_pong(path, clock.now, clock.now + 1)


def test_who_has_much_to_say_is_not_taken_for_dead(driver: Driver, nic: Any, clock: SimpleNamespace) -> None:
    """A busy peer answers a ping late. But one that counts as dead has to answer, whatever else it says."""
    one, _heard, arrive = heard_of(driver, nic)
    path = one.paths[0]
    somebody = PairAddress(bytes(16), 0, 1, 0, 3)

    def time_passes(say: bool) -> None:
        clock.now += QUIET_PING_NS
        if say:
            arrive(22, Arm(ArmStep.RTU, 0, 1, 1, somebody))
        driver.run()

    for _ in range(3 * PINGS_UNTIL_DEAD):
        time_passes(say=True)
    assert path.ping.alive
    for _ in range(2 * PINGS_UNTIL_DEAD):
        time_passes(say=False)
    assert path.ping.alive is False
    for _ in range(2 * PINGS_UNTIL_DEAD):
        time_passes(say=True)
    assert path.ping.alive is False


def test_a_peer_whose_qp_is_gone_here_is_told(driver: Driver, nic: Any) -> None:
    """Our BYE was lost; what the peer says to a QP of before is answered, and a BYE is not."""
    port = with_port(driver.channel, nic)
    driver.channel.open_path(nic, ControlEndpoint("x", GID, 0, 5, 7, 9, PEER_SECRET), lambda path: None)
    nic.worker.work()
    driver.run()
    peer = Peer(driver, nic)

    def arrives(entry: Entry) -> list[Entry]:
        port.inbox = peer.says(entry)
        port.sent.clear()
        driver.run()
        return [each for each in peer.hears(*port.sent) if each.to]

    somebody = PairAddress(bytes(16), 0, 1, 0, 3)
    answers = arrives(Entry(11, 22, Arm(ArmStep.REQ, 0, 1, 1, somebody)))
    assert [(each.to, each.sender, each.message.phase) for each in answers] == [(22, 11, Phase.BYE)]  # type: ignore[union-attr]
    assert arrives(answers[0]) == []


ABORT = Sync(99, 0, Phase.ABORT, 1, False, PairAddress(bytes(16), 0, 1, 0, 3), 0)


def forger_of(driver: Driver, nic: Any) -> Peer:
    """Somebody who has seen all that the peer said, but none of the secrets."""
    forger, peer = Peer(driver, nic, "00" * 16), Peer(driver, nic)
    forger.seals.name_out, forger.seals.next_number = peer.seals.name_out, 1 << 40
    return forger


def test_who_forges_or_replays_is_not_heard(driver: Driver, nic: Any, caplog: Any) -> None:
    """What he says does nothing, is no sign of life, and does not keep what the peer says from being heard."""
    one, heard, arrive = heard_of(driver, nic)
    port, path = driver.channel.port(nic), one.paths[0]
    forger = forger_of(driver, nic)
    port.sent.clear()
    for message in (
        ABORT,
        Sync(0, 0, Phase.BYE, 0, False, ABORT.address, 0),
        Arm(ArmStep.REQ, 0, 1, 7, ABORT.address),
    ):
        port.inbox = forger.says(Entry(11, 22, message))
        driver.run()
    assert driver.channel.forged == 3 and heard == [] and path.heard_ns is None
    port.inbox = forger.says(Entry(12, 22, Arm(ArmStep.REQ, 0, 1, 7, ABORT.address)))
    driver.run()
    assert port.sent == [], "a stranger's question after a QP is not answered"

    arrive(22, Arm(ArmStep.RTU, 0, 1, 1, ABORT.address))
    kept = list(port.inbox)
    driver.run()
    assert len(heard) == 1 and path.heard_ns is not None
    path.heard_ns = None
    port.inbox = kept * 5
    driver.run()
    assert driver.channel.replayed == 5 and len(heard) == 1 and path.heard_ns is None
    assert driver.outside.flush(10)
    lines = [record.getMessage() for record in caplog.records if "forged" in record.getMessage()]
    assert lines == ["nic0: forged control datagram from QPN 0x7: dropped"]


def test_forged_and_replayed_pings_count_for_nothing(
    driver: Driver, nic: Any, clock: SimpleNamespace
) -> None:
    """They neither keep a dead path alive, nor have an answer to a ping passed off as one to a later ping."""
    one, _heard, _arrive = heard_of(driver, nic)
    port, path = driver.channel.port(nic), one.paths[0]
    forger, peer = forger_of(driver, nic), Peer(driver, nic)

    def asked() -> int:
        return [each.message.number for each in peer.hears(*port.sent) if isinstance(each.message, Ping)][-1]

    clock.now += QUIET_PING_NS
    driver.run()
    first = asked()
    answer = peer.says(Entry(0, 0, Ping(first, True)))
    port.inbox = list(answer)
    driver.run()
    assert path.ping.alive
    for _ in range(2 * PINGS_UNTIL_DEAD):
        clock.now += QUIET_PING_NS
        port.sent.clear()
        driver.run()
        port.inbox = forger.says(Entry(0, 0, Ping(asked(), True)), Entry(0, 0, Ping(1, False))) + answer
        port.sent.clear()
        driver.run()
        assert port.sent == []
    assert path.ping.alive is False
    assert driver.channel.forged == driver.channel.replayed == 2 * PINGS_UNTIL_DEAD


@pytest.mark.parametrize("kept", [0, 1], ids=["forgotten", "kept"])
def test_an_answer_of_before_fits_no_ping_of_a_path_made_again(
    driver: Driver, nic: Any, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, kept: int
) -> None:
    """All that was said is known to who listens; the last connection to a peer is closed, and another is made."""
    monkeypatch.setattr(control_channel, "KEPT_SEALS", kept)
    channel, port = driver.channel, with_port(driver.channel, nic)
    endpoint, peer = ControlEndpoint("x", GID, 0, 5, 7, 9, PEER_SECRET), Peer(driver, nic)
    answers: list[Any] = []

    def use(path: Any) -> None:
        pass

    for life in range(2):
        path = channel.open_path(nic, endpoint, use)
        nic.worker.work()
        driver.run()
        for _ in range(3 * PINGS_UNTIL_DEAD):
            clock.now += QUIET_PING_NS
            driver.run()
            if life == 0:
                pings = [each.message for each in peer.hears(*port.sent) if isinstance(each.message, Ping)]
                said = peer.says(*(Entry(0, 0, Ping(each.number, True)) for each in pings))
                answers += said
            port.inbox = list(said if life == 0 else answers)
            port.sent.clear()
            driver.run()
        assert path.ping.alive is (life == 0)
        assert bool(channel.replayed) is bool(life)
        channel.close_path(path, use)
        assert len(channel._kept_seals) == kept


def test_a_process_speaks_for_its_own_qps_only(driver: Driver, nic: Any) -> None:
    """What a message is called by is on the wire, and in the exchanger: that is no proof."""
    one, heard, _arrive = heard_of(driver, nic)
    port = driver.channel.port(nic)
    other = "77" * 16
    driver.channel.open_path(nic, ControlEndpoint("x", GID, 0, 5, 8, 9, other), lambda path: None)
    nic.worker.work()
    driver.run()
    port.sent.clear()
    port.inbox = Peer(driver, nic, other).says(Entry(11, 22, ABORT))
    driver.run()
    assert heard == [] and driver.channel.unknown == 1 and one.paths[0].heard_ns is None and port.sent == []


def test_lines_that_somebody_outside_may_cause_are_written_once_a_second(
    driver: Driver, nic: Any, clock: SimpleNamespace, caplog: Any
) -> None:
    """One of each kind, which tells how many there were; none is ever left out for good."""
    _one, _heard, _arrive = heard_of(driver, nic)
    port, forger, peer = driver.channel.port(nic), forger_of(driver, nic), Peer(driver, nic)
    old = b"\x53\x56\x01\x01" + bytes(16) + b"\x05\x09" + bytes(9)

    def flood() -> list[str]:
        caplog.clear()
        broken = bytearray(codec.encode([Entry(11, 22, ABORT)], peer.seals)[0])[:-TAG_BYTES] + b"junk"
        broken = bytearray(peer.seals.seal(bytes(broken)))
        port.inbox = arrived(b"x", old, bytes(broken)) * 100
        for _ in range(100):
            port.inbox += forger.says(Entry(11, 22, ABORT))
        driver.run()
        assert driver.outside.flush(10)
        return sorted(record.getMessage().partition(": ")[2] for record in caplog.records)

    kinds = [
        "a process of another release (control QPN 0x7) cannot talk with this one: version 1, this release speaks 2",
        "forged control datagram from QPN 0x7: dropped",
        "malformed control datagram from QPN 0x7: 1 bytes are no header",
    ]
    assert flood() == kinds
    for _ in range(4):
        clock.now += SELDOM_NS // 5
        assert flood() == []
    clock.now += SELDOM_NS // 5
    left_out = zip(kinds, (99 + 400, 99 + 400, 99 + 1 + 4 * 101), strict=True)
    assert flood() == [f"{kind} ({n} more like it since the last such line)" for kind, n in left_out]
    channel = driver.channel
    assert (channel.other_version, channel.forged, channel.malformed) == (600, 600, 606)
