# SPDX-License-Identifier: BSD-3-Clause
"""A cluster of three etcds that loses its leader while everybody sets up: nothing that was published is lost."""

from __future__ import annotations

import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import Spawn

from exchanger.around import launch, wait_until
from exchanger.cluster import Cluster, Member, running_cluster
from exchanger.conftest import GID_A, EtcdWorld, Watched, publish_qp, qp_record
from exchanger.test_bulk import Deletions
from shiftverbs.config import Config
from shiftverbs.exchanger import Found, qp_key

pytestmark = pytest.mark.timeout(300)
HOSTS = 4


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with running_cluster() as made:
        yield made


def publish(job: str, hosts: list[Watched], published: list[dict[str, Any]], numbers: range) -> None:
    """Each host publishes QPs of these numbers, and wants those of the next host. published: of each host, by key."""
    for place, host in enumerate(hosts):
        following = (place + 1) % HOSTS * 10_000
        for number in numbers:
            qpn = place * 10_000 + number
            published[place][publish_qp(host, job, qpn)] = qp_record(job, qpn)
            host.exchanger.want(qp_key(job, GID_A, following + number))


def found(host: Watched) -> dict[str, Any]:
    """What was last found, by key."""
    values = {event.key: event.value for event in host.events if isinstance(event, Found)}
    return {key: value for key, value in values.items() if value is not None}


def keys(member: Member, job: str) -> set[str]:
    """What a member holds; the empty set where it cannot say."""
    try:
        return set(EtcdWorld(member, job).keys())
    except (urllib.error.URLError, OSError, ValueError):
        return set()


def await_keys(member: Member, job: str, wanted: set[str], timeout_s: float) -> None:
    """Wait until a member holds exactly these; the error says what it holds, and what it wrote last."""
    try:
        wait_until(lambda: keys(member, job) == wanted, timeout_s)
    except AssertionError as error:
        held = keys(member, job)
        ended = None if member.process is None else member.process.poll()
        raise AssertionError(
            f"{error}: {len(wanted - held)} of {len(wanted)} keys are missing, {len(held - wanted)} are too many, "
            f"exit status {ended}; its log's end:\n{member.log_tail()}"
        ) from None


def all_of(published: list[dict[str, Any]]) -> set[str]:
    """All keys."""
    return {key for each in published for key in each}


def test_a_set_up_storm_survives_the_leaders_death(cluster: Cluster, job: str) -> None:
    """Twice, each time in the middle; an empty one takes its place, and gets what the others have."""
    world = EtcdWorld(cluster.members[0], job)
    etcd = Config.from_environ({"SHIFTVERBS_ETCD": cluster.endpoints}).etcd
    hosts = [world.make(etcd=etcd) for _ in range(HOSTS)]
    deletions = [Deletions(member, job) for member in cluster.members]
    published: list[dict[str, Any]] = [{} for _ in hosts]
    for first, each in ((1, 256), (1001, 64)):
        leader = cluster.await_leader()
        before = all_of(published)
        publish(job, hosts, published, range(first, first + each))
        wait_until(lambda before=before, leader=leader: keys(leader, job) - before)  # type: ignore[misc]
        leader.kill()
        publish(job, hosts, published, range(first + each, first + 2 * each))
        for place, host in enumerate(hosts):
            theirs = published[(place + 1) % HOSTS]
            host.until(lambda _, host=host, theirs=theirs: found(host) == theirs, 120)  # type: ignore[misc]
        for member in cluster.running():
            await_keys(member, job, all_of(published), 30)
        cluster.replace(leader)
        await_keys(leader, job, all_of(published), 60)
    assert not any(one.keys for one in deletions)
    for host in hosts:
        host.exchanger.close()
    wait_until(lambda: not world.keys())


PROGRAM = """
import os, subprocess, sys
sys.path.insert(0, os.environ["TESTS"])
import shiftverbs
from one_process import Verbs

v = Verbs("shiftverbs")
ctx, pd, cq, mr, *qps = v.connected()
for _ in range(63):
    qps += v.pair(ctx, pd, cq)
    if sum(qp.shift.status == "PROTECTED" for qp in qps) and "storm" not in globals():
        storm = print("storm", flush=True)
if "storm" not in globals():
    assert qps[0].shift.wait_protected(60)
    print("storm", flush=True)
assert all(qp.shift.wait_protected(120) for qp in qps), [qp.shift for qp in qps if qp.shift.status != "PROTECTED"]
for number, (first, second) in enumerate(zip(qps[::2], qps[1::2])):
    wcs = v.exchange(first, second, mr, cq, 1000 + number, number)
    assert {(wc.wr_id, wc.status) for wc in wcs} == {(1000 + number, 0), (number, 0)}, wcs
subprocess.run([sys.executable, "-m", "shiftverbs.softrnic", "down", "a/soft0"], check=True)
for number, (first, second) in enumerate(zip(qps[::2], qps[1::2])):
    wcs = v.exchange(first, second, mr, cq, 1000 + number, number)
    assert {(wc.wr_id, wc.status) for wc in wcs} == {(1000 + number, 0), (number, 0)}, wcs
assert {qp.shift.status for qp in qps} == {"PROTECTED"}
print("done", flush=True)
"""


def test_qps_are_protected_while_the_leader_dies(
    cluster: Cluster, spawn: Spawn, job: str, softrnic_dir: Path
) -> None:
    """Those that begin while there is no leader, too; and then they fail over, all of them."""
    world = EtcdWorld(cluster.members[0], job)
    env = {
        "SHIFTVERBS_ETCD": cluster.endpoints,
        "SOFTRNIC": "1",
        "SOFTRNIC_HOST": "a",
        "SOFTRNIC_DIR": str(softrnic_dir),
    }
    child = launch(spawn, world, PROGRAM, **env)
    wait_until(lambda: "storm" in child.output, 60)
    cluster.kill_leader()
    child.succeed(150)
    assert child.printed[-1].strip() == "done"
