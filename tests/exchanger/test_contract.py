# SPDX-License-Identifier: BSD-3-Clause
"""What every exchanger does, the fake and the one on etcd alike."""

from __future__ import annotations

import json
import os
import select
from collections.abc import Callable

import pytest
from harness import wait_until as wait_until_within
from msgspec.structs import replace

from exchanger.conftest import GID_A, GID_B, World, as_json, publish_qp, qp_record
from shiftverbs.exchanger import (
    Connected,
    Found,
    RecordError,
    Rejected,
    Route,
    ShadowRoute,
    mutual,
    qp_key,
    qp_lid_key,
    records,
)


def wait_until(condition: Callable[[], object]) -> None:
    # A broker's start takes seconds on a machine that is busy otherwise.
    wait_until_within(condition, timeout_s=30)


def test_connected_is_the_first_event(world: World) -> None:
    one = world.make()
    one.until(lambda events: events)
    assert one.events == [Connected()]


def test_a_wanted_key_is_absent_appears_changes_and_disappears(world: World) -> None:
    publisher, reader = world.make(), world.make()
    key = qp_key(world.job, GID_A, 17)
    reader.exchanger.want(key)
    assert reader.next(Found) == Found(key, None)
    first = qp_record(world.job, 17)
    publisher.exchanger.publish(key, first)
    assert reader.next(Found) == Found(key, first)
    second = qp_record(world.job, 17, peer_life="00000000000000bb")
    publisher.exchanger.publish(key, second)
    assert reader.next(Found) == Found(key, second)
    publisher.exchanger.withdraw(key)
    assert reader.next(Found) == Found(key, None)
    assert world.keys() == []


def test_what_is_there_already_is_found(world: World) -> None:
    publisher, reader = world.make(), world.make()
    key = qp_key(world.job, GID_A, 0xDEADBE)
    value = qp_record(world.job, 0xDEADBE)
    publisher.exchanger.publish(key, value)
    wait_until(lambda: world.keys() == [key])
    reader.exchanger.want(key)
    assert reader.next(Found) == Found(key, value)


def test_one_finds_ones_own(world: World) -> None:
    one = world.make()
    key = publish_qp(one, world.job, 3)
    one.exchanger.want(key)
    one.until(lambda events: any(isinstance(event, Found) and event.value is not None for event in events))


def test_a_lid_key_is_a_key_like_any_other(world: World) -> None:
    publisher, reader = world.make(), world.make()
    key = qp_lid_key(world.job, GID_A, 9, 17)
    reader.exchanger.want(key)
    reader.next(Found, value=None)
    value = qp_record(world.job, 17, default=Route(GID_A, 9, 17))
    publisher.exchanger.publish(key, value)
    assert reader.next(Found) == Found(key, value)


def test_two_peers_pair(world: World) -> None:
    a, b = world.make(), world.make()
    route_a, route_b = Route(GID_A, 0, 1), Route(GID_B, 0, 2)
    key_a, key_b = qp_key(world.job, GID_A, 1), qp_key(world.job, GID_B, 2)
    a.exchanger.want(key_b)
    b.exchanger.want(key_a)
    mine_a = qp_record(world.job, 1, life="a" * 16, default=route_a, peer=route_b)
    mine_b = qp_record(world.job, 2, life="b" * 16, default=route_b, peer=route_a)
    a.exchanger.publish(key_a, mine_a)
    b.exchanger.publish(key_b, mine_b)
    a.until(lambda events: events and isinstance(events[-1], Found) and events[-1].value)
    b.until(lambda events: events and isinstance(events[-1], Found) and events[-1].value)
    assert not mutual(mine_a, mine_b)
    mine_a, mine_b = (
        replace(mine_a, peer_life=mine_b.life),
        replace(mine_b, peer_life=mine_a.life),
    )
    a.exchanger.publish(key_a, mine_a)
    b.exchanger.publish(key_b, mine_b)
    a.next(Found, value=mine_b)
    found = b.next(Found, value=mine_a)
    assert found.value is not None and mutual(mine_b, found.value)


def test_unwant_ends_the_events(world: World) -> None:
    publisher, reader = world.make(), world.make()
    dropped, kept = qp_key(world.job, GID_A, 1), qp_key(world.job, GID_A, 2)
    for key in (dropped, kept):
        reader.exchanger.want(key)
        reader.next(Found, key=key)
    reader.exchanger.unwant(dropped)
    publish_qp(publisher, world.job, 1)
    publish_qp(publisher, world.job, 2)
    assert reader.next(Found).key == kept
    assert not [event for event in reader.events if isinstance(event, Found)]


def test_unwant_takes_back_what_was_not_polled_yet(world: World) -> None:
    publisher, reader = world.make(), world.make()
    key = publish_qp(publisher, world.job, 1)
    reader.exchanger.want(key)
    # Readable: the answer may be on its way or waiting; polling it is what must not happen any more.
    select.select([reader.exchanger.fileno()], [], [], 10)
    reader.exchanger.unwant(key)
    other = publish_qp(publisher, world.job, 2)
    reader.exchanger.want(other)
    assert reader.next(Found).key == other


def test_wanting_again_is_answered_again_only_after_unwant(world: World) -> None:
    publisher, reader = world.make(), world.make()
    key = publish_qp(publisher, world.job, 1)
    wait_until(lambda: world.keys() == [key])
    reader.exchanger.want(key)
    reader.next(Found, key=key)
    reader.exchanger.want(key)
    marker = qp_key(world.job, GID_A, 999)
    reader.exchanger.want(marker)
    assert reader.next(Found).key == marker
    reader.exchanger.unwant(key)
    reader.exchanger.want(key)
    assert reader.next(Found).key == key


def test_close_withdraws_everything(world: World) -> None:
    publisher, reader = world.make(), world.make()
    keys = [publish_qp(publisher, world.job, qpn) for qpn in range(5)]
    for key in keys:
        reader.exchanger.want(key)
    reader.until(lambda events: sum(isinstance(e, Found) and e.value is not None for e in events) >= 5)
    reader.events.clear()
    publisher.exchanger.close()
    assert world.keys() == []
    reader.until(
        lambda events: {e.key for e in events if isinstance(e, Found) and e.value is None} == set(keys)
    )


def test_a_closed_exchanger_stays_closed(world: World) -> None:
    one = world.make()
    key = publish_qp(one, world.job, 1)
    one.exchanger.close()
    one.exchanger.close()
    one.exchanger.close(after_fork=True)
    assert one.exchanger.poll_events() == []
    one.exchanger.withdraw(key)
    one.exchanger.unwant(key)
    with pytest.raises(RuntimeError, match="closed"):
        one.exchanger.publish(key, qp_record(world.job, 1))
    with pytest.raises(RuntimeError, match="closed"):
        one.exchanger.want(key)


def test_closing_at_once_is_fine(world: World) -> None:
    world.make().exchanger.close()


def test_other_jobs_are_out_of_reach(world: World) -> None:
    one, stranger = world.make(), world.make(job=world.job[:50] + "-other")
    key = publish_qp(one, world.job, 1)
    with pytest.raises(RecordError, match="another job"):
        stranger.exchanger.want(key)
    with pytest.raises(RecordError, match="another job"):
        stranger.exchanger.publish(key, qp_record(world.job, 1))


def test_the_successor_of_a_qpn_keeps_its_key(world: World) -> None:
    ghost, successor = world.make(), world.make()
    key = publish_qp(ghost, world.job, 1, instance="00000000000000aa")
    wait_until(lambda: world.keys() == [key])
    reader = world.make()
    reader.exchanger.want(key)
    publish_qp(successor, world.job, 1, instance="00000000000000bb")
    reader.next(Found, value=qp_record(world.job, 1, instance="00000000000000bb"))
    ghost.exchanger.withdraw(key)
    # Orders the ghost's requests: when this stands there, the withdrawal has been carried out too.
    marker = publish_qp(ghost, world.job, 2)
    wait_until(lambda: marker in world.keys())
    assert key in world.keys()
    ghost.exchanger.close()
    assert world.keys() == [key]


def test_what_breaks_the_schema_is_not_published(world: World) -> None:
    one = world.make()
    key = qp_key(world.job, GID_A, 1)
    good = qp_record(world.job, 1)
    many = tuple(ShadowRoute("nic1", GID_A, 0, 3, qpn) for qpn in range(records.MAX_NICS + 1))
    for bad in (
        as_json(good),
        None,
        replace(good, instance="xyz"),
        replace(good, job="elsewhere"),
        replace(good, default=Route(GID_A, 0, 2)),
        replace(good, default=Route(GID_A, 0, True)),
        replace(good, peer=Route(GID_A, -1, 2)),
        replace(good, shadows=many),
        replace(good, qp_access_flags=1.0),
        replace(good, life="\ud800"),
        replace(good, peer=object()),
        replace(good, control="x" * 9000),
    ):
        with pytest.raises(RecordError) as caught:
            one.exchanger.publish(key, bad)
        assert key in str(caught.value)
    with pytest.raises(RecordError, match="not a key"):
        one.exchanger.publish("/elsewhere", good)
    assert world.keys() == []


GOOD = as_json(qp_record("JOB", 1))
FOREIGN = {
    "not-json": b"{",
    "empty": b"",
    "null": b"null",
    "list": b"[]",
    "binary": b"\x80\xff\x00",
    "deep": b"[" * 5000,
    "huge-number": b'{"version": ' + b"9" * 6000 + b"}",
    "nan": json.dumps({**GOOD, "qp_access_flags": float("nan")}).encode(),
    "wrong-version": json.dumps({**GOOD, "version": 99}).encode(),
    "version-as-bool": json.dumps({**GOOD, "version": True}).encode(),
    "no-version": json.dumps({k: v for k, v in GOOD.items() if k != "version"}).encode(),
    "wrong-kind": json.dumps({**GOOD, "kind": "mr"}).encode(),
    "wrong-type": json.dumps({**GOOD, "shadows": {"0": 1}}).encode(),
    "wrong-range": json.dumps({**GOOD, "qp_access_flags": 1 << 32}).encode(),
    "other-job": json.dumps({**GOOD, "job": "another"}).encode(),
    "other-route": json.dumps({**GOOD, "default": {"gid": GID_B, "lid": 0, "qpn": 1}}).encode(),
    "many-nics": json.dumps({**GOOD, "shadows": GOOD["shadows"] * 20}).encode(),
    "a-bit-large": b'"' + b"x" * 10_000 + b'"',
    "huge": b'"' + b"x" * 500_000 + b'"',
}


@pytest.mark.parametrize("name", FOREIGN)
def test_foreign_values_are_rejected_by_name(world: World, name: str) -> None:
    one = world.make()
    key = qp_key(world.job, GID_A, 1)
    value = FOREIGN[name].replace(b'"JOB"', json.dumps(world.job).encode())
    world.write(key, value)
    one.exchanger.want(key)
    rejected = one.next(Rejected)
    assert rejected.key == key
    assert key in rejected.reason
    # It stays wanted: whoever belongs there may come yet, and go bad later.
    good = qp_record(world.job, 1)
    world.write(key, json.dumps(as_json(good)))
    assert one.next(Found) == Found(key, good)
    world.write(key, value)
    assert one.next(Rejected).key == key
    world.write(key, None)
    assert one.next(Found) == Found(key, None)


def test_unknown_fields_are_passed_over(world: World) -> None:
    one = world.make()
    key = qp_key(world.job, GID_A, 1)
    value = {**as_json(qp_record(world.job, 1)), "from_the_future": [1, 2]}
    world.write(key, json.dumps(value))
    one.exchanger.want(key)
    assert one.next(Found).value == qp_record(world.job, 1)


def test_the_descriptor_is_readable_only_when_there_is_something(world: World) -> None:
    publisher, reader = world.make(), world.make()
    publisher.next(Connected)
    key = qp_key(world.job, GID_A, 1)
    reader.exchanger.want(key)
    reader.next(Found, key=key)
    reader.poll()
    reader.events.clear()
    assert select.select([reader.exchanger.fileno()], [], [], 0) == ([], [], [])
    publish_qp(publisher, world.job, 1)
    assert select.select([reader.exchanger.fileno()], [], [], 30)[0]
    assert reader.next(Found).value is not None


def test_a_forked_child_lets_go_without_withdrawing(world: World) -> None:
    one = world.make()
    key = publish_qp(one, world.job, 1)
    wait_until(lambda: world.keys() == [key])
    child = os.fork()
    if child == 0:
        status = 1
        try:
            # Whatever a child does by mistake does not reach the parent's connection.
            if one.exchanger.broker_pid is not None:
                one.exchanger.withdraw(key)
                assert one.exchanger.poll_events() == []
            one.exchanger.close(after_fork=True)
            one.exchanger.close(after_fork=True)
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    # The connection still works, and nothing is gone.
    other = publish_qp(one, world.job, 2)
    wait_until(lambda: world.keys() == sorted([key, other]))
