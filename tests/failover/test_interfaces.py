# SPDX-License-Identifier: BSD-3-Clause
"""Failover on real network interfaces: two hosts in network namespaces, two cables, `ip link set down`.

The software RNIC follows the interfaces' carrier. A host cannot reach etcd from its namespace: the broker's socket
leads out of it, as it would out of a container.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import EtcdServer, Spawn, wait_until
from hosts import HOME, PUPPET, Host
from netns import Namespace, spaces_or_skip

SIZE = 3000
FLOCK = 6


@pytest.fixture
def spaces() -> Iterator[tuple[Namespace, Namespace]]:
    """Rail r is ar (10.80.r.1) in the first, br (10.80.r.2) in the second."""
    with spaces_or_skip() as (one, two):
        for rail in (0, 1):
            one.ip(f"link add a{rail} type veth peer name b{rail} netns {two.holder.pid}")
            for space, netdev, number in ((one, f"a{rail}", 1), (two, f"b{rail}", 2)):
                space.ip(f"addr add 10.80.{rail}.{number}/24 dev {netdev}")
                space.ip(f"link set {netdev} up")
        for rail in (0, 1):
            one.wait_up(f"a{rail}"), two.wait_up(f"b{rail}")
        yield one, two


@pytest.fixture
def hosts(
    spaces: tuple[Namespace, Namespace], spawn: Spawn, shared_etcd: EtcdServer, job: str, softrnic_dir: Path
) -> tuple[Host, Host]:
    """Hosts a and b with a protected QP each."""
    broker = str(softrnic_dir / "broker")
    env: dict[str, str | None] = {"SHIFTVERBS_ETCD": shared_etcd.endpoint, "SHIFTVERBS_JOB": job}
    spawn("-m", "shiftverbs.exchanger.broker", "--socket", broker, softrnic=None, env=env, name="broker")
    wait_until(lambda: os.path.exists(broker), 20, "the broker's socket")
    env["SHIFTVERBS_BROKER"] = broker
    ends = []
    for space, name in zip(spaces, "ab", strict=True):
        program, *arguments = [*space.prefix, sys.executable, PUPPET, "shiftverbs"]
        nics = f"soft0@netdev:{name}0;soft1@netdev:{name}1"
        ends.append(Host(spawn(*arguments, program=program, host=name, softrnic=nics, env=env)))
    a, b = ends
    names = [end("ep = Endpoint(depth=32); ep.name()") for end in ends]
    b(f"ep.connect({names[0]!r}, retry=6)")
    a(f"ep.connect({names[1]!r}, retry=6)")
    for end in ends:
        assert end("ep.qp.shift.wait_protected(20)"), end("ep.shift()")
    return a, b


def post(sender: Host, receiver: Host, first: int) -> None:
    """FLOCK messages of their own text, the receives before them."""
    receiver(f"for n in range({FLOCK}): ep.recv(20 + n, {first} + n)")
    sender(f"for n in range({FLOCK}): ep.fill(n, f'message {{{first} + n:6}} ' * 200)")
    sender(f"for n in range({FLOCK}): ep.post('SEND', n, {SIZE}, {first} + n)")


def arrived(sender: Host, receiver: Host, first: int) -> None:
    """All of them, once, in order, whole; and the sender knows."""
    due = [[number, "SUCCESS"] for number in range(first, first + FLOCK)]
    assert [wc[:2] for wc in sender(f"ep.poll({FLOCK}, 15)")] == due
    assert [wc[:2] for wc in receiver(f"ep.poll({FLOCK}, 15)")] == due
    for n in range(FLOCK):
        text = f"message {first + n:6} " * 200
        assert receiver(f"ep.text(20 + {n}, {SIZE})") == text[:SIZE]


@pytest.mark.parametrize("netdev", ["a0", "b0"])
def test_interface_down_and_up(
    spaces: tuple[Namespace, Namespace], hosts: tuple[Host, Host], netdev: str
) -> None:
    """Switched off at one end it has no carrier at the other: a port event on both, and work is in flight."""
    one, two = spaces
    a, b = hosts
    space = one if netdev == "a0" else two
    for sender, receiver, first in ((a, b, 100), (b, a, 200)):
        post(sender, receiver, first)
        arrived(sender, receiver, first)

    post(a, b, 300)
    space.ip(f"link set {netdev} down")
    post(b, a, 400)
    arrived(a, b, 300)
    arrived(b, a, 400)
    for end in hosts:
        shift = end("ep.shift()")
        assert (shift["path"], shift["recv_path"], shift["counters"]["switches"]) == ("soft1", "soft1", 1)
    post(a, b, 500)
    arrived(a, b, 500)

    space.ip(f"link set {netdev} up")
    for end in hosts:
        end(f"ep.wait({HOME!r}, 20)")
    for sender, receiver, first in ((a, b, 600), (b, a, 700)):
        post(sender, receiver, first)
        arrived(sender, receiver, first)
    for end in hosts:
        shift = end("ep.shift()")
        assert (shift["path"], shift["recv_path"]) == ("soft0", "soft0")
        assert end("ep.none()") == []
