# SPDX-License-Identifier: BSD-3-Clause
"""Rails with limits, as programs see them: what a rate, a delay and a full buffer do, and who sets them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness import wait_until

from shiftverbs.softrnic import fabric, faults
from shiftverbs.softrnic.__main__ import main
from softrnic.hosts import HostProcess, Proxy, VerbsError, connect, statuses

Pair = Callable[..., tuple[Proxy, Proxy]]
PATIENT = {"timeout": 19, "mtu": 4096}  # 2.1 s: nothing is sent again because this machine is busy
BIG = {"size": 1 << 20, "send_wr": 512}
#: Bytes on the wire of a packet of 4 KiB: Ethernet, IP, UDP, BTH, ICRC.
FULL_PACKET = 4096 + 46 + 12 + 4


def link(name: str) -> faults.Link:
    found = faults.device(name).link
    assert found is not None, f"{name} has no limits"
    return found


def seconds(endpoint: Proxy, count: int, length: int) -> float:
    """How long so many WRITEs take, from the first post to the last completion."""
    begin = endpoint.send("RDMA_WRITE", 1, length)
    if count > 1:
        endpoint.send_many(count - 1, op="RDMA_WRITE", length=length, wr_id=2)
    found = endpoint.poll(count, 30)
    assert statuses(found) == [(i, "SUCCESS") for i in range(1, count + 1)]
    return float(found[-1]["at"] - begin)


@pytest.fixture
def hosts_known(network: Path) -> None:
    """Hosts a and b, before a process of them runs."""
    faults.register("a"), faults.register("b")


# -- what limits do --
def test_rate(two: Pair, hosts_known: None) -> None:
    """No faster than the link, and the other rail as fast as ever."""
    fabric.limit("rail0", 80e6)
    left, right = two(BIG, **PATIENT)
    left.pattern(1, 500_000)
    assert seconds(left, 4, 500_000) >= 4 * 500_000 * 8 / 80e6
    assert right.matches(1, 500_000)
    port = link("b/soft0")
    assert port.packets >= 4 * 123 and port.bytes >= 2_000_000 and port.dropped == 0
    assert port.queue_peak <= 2 * FULL_PACKET, "a single sender fills no queue: its link is as fast"
    assert faults.device("b/soft1").link is None


def test_slow_on_one_side_only(two: Pair, hosts_known: None) -> None:
    """A slow port in a fast rail: its queue fills, the sender is held back by its window alone."""
    fabric.apply("rail0:rate=1G,buffer=10M;b/rail0:rate=80M,buffer=10M")
    left, right = two(BIG, **PATIENT)
    left.pattern(2, 1_000_000)
    assert seconds(left, 1, 1_000_000) >= 1_000_000 * 8 / 80e6
    assert right.matches(2, 1_000_000)
    assert 64 * FULL_PACKET <= link("b/soft0").queue_peak <= 128 * FULL_PACKET


def test_delay(two: Pair, hosts_known: None) -> None:
    fabric.limit("rail0", 1e9, delay_s=0.1)
    left, _right = two(**PATIENT)
    for op in ("RDMA_WRITE", "RDMA_READ", "ATOMIC_FETCH_AND_ADD"):
        begin = left.send(op, 1, 8)
        [found] = left.poll(1, 10)
        assert found["status"] == "SUCCESS" and found["at"] - begin >= 0.2, op


def test_full_buffer_drops(hosts: Callable[..., HostProcess], hosts_known: None) -> None:
    """Two who send to one: the queue overflows, go-back-N brings everything through.

    A full queue drops one packet of six. Were it every second one, the eight attempts of a packet would now and then
    not be enough.
    """
    faults.register("c")
    buffer = 20 * FULL_PACKET
    fabric.apply(f"rail0:rate=120M,buffer={buffer};c/rail0:rate=200M,buffer={buffer}")
    target = hosts("c").open("soft0")
    pairs = []
    for host in "ab":
        pair = hosts(host).open("soft0").endpoint(**BIG), target.endpoint(**BIG)
        connect(*pair, timeout=12, retry_cnt=7, mtu=4096)
        pairs.append(pair)
    seeds = itertools.count(1)

    def both_send() -> int:
        """A megabyte each, of 8 ms, that was never there before. Returns what c's port has dropped so far."""
        sent = [(next(seeds), *pair) for pair in pairs]
        for seed, left, _ in sent:
            left.pattern(seed, 1_000_000)
        for _, left, _ in sent:
            left.send("RDMA_WRITE", 1, 1_000_000)
        for seed, left, right in sent:
            assert statuses(left.poll(1, 30)) == [(1, "SUCCESS")]
            assert right.matches(seed, 1_000_000)
        return link("c/soft0").dropped

    wait_until(both_send, 60)  # on a busy machine one may be done before the other has begun
    assert link("c/soft0").queue_peak <= 20 * FULL_PACKET


def test_queue_pairs_share_a_link(two: Pair, hosts_known: None) -> None:
    """A link serves the QPs that wait for it in turn: none is done long before the other."""
    fabric.limit("rail0", 80e6)
    left, right = two(BIG, **PATIENT)
    others = left._host.open("soft0").endpoint(**BIG), right._host.open("soft0").endpoint(**BIG)
    connect(*others, **PATIENT)
    begin = left.send("RDMA_WRITE", 1, 1_000_000)
    others[0].send("RDMA_WRITE", 2, 1_000_000)
    ends = [endpoint.poll(1, 30)[0]["at"] - begin for endpoint in (left, others[0])]
    assert min(ends) >= 1.5 * 1_000_000 * 8 / 80e6


@pytest.mark.parametrize("kind", ["UC", "UD"])
def test_what_nobody_acknowledges(hosts: Callable[..., HostProcess], hosts_known: None, kind: str) -> None:
    fabric.limit("rail0", 1e9, delay_s=0.1)
    left, right = (hosts(host).open("soft0").endpoint(kind=kind) for host in ("a", "b"))
    left.pattern(5, 1000)
    if kind == "UC":
        connect(left, right)
        right.recv(1, 1000)
        begin = left.send("SEND", 1, 1000)
    else:
        left.ud_ready(), right.ud_ready()
        right.recv(1, 1040)
        begin = left.send("SEND", 1, 1000, to=right.info())
    assert statuses(left.poll()) == [(1, "SUCCESS")]
    [found] = right.poll(1, 10)
    assert found["status"] == "SUCCESS" and found["at"] - begin >= 0.1
    assert right.matches(5, 1000, 0 if kind == "UC" else 40)


# -- faults on the way --
def test_what_is_in_the_network_survives_its_sender(two: Pair, hosts_known: None) -> None:
    """The last acknowledgement of a process that ends arrives."""
    fabric.limit("rail0", 1e9, delay_s=0.3)
    left, right = two(timeout=18, retry_cnt=0)
    right.recv(1, 100)
    left.send("SEND", 1, 100)
    assert statuses(right.poll(1, 10)) == [(1, "SUCCESS")]
    right._host.end()
    assert statuses(left.poll(1, 10)) == [(1, "SUCCESS")]


def test_cable_pulled_under_way(two: Pair, hosts_known: None) -> None:
    """What waited for the link is lost with it, and sent again when the cable is back."""
    fabric.limit("rail0", 8e6)
    left, right = two(BIG, timeout=15, retry_cnt=7, mtu=4096)
    left.pattern(3, 100_000)
    left.send("RDMA_WRITE", 1, 100_000)
    wait_until(lambda: link("b/soft0").packets >= 2, 10)
    faults.down("a/soft0")
    before = link("b/soft0").packets
    assert left.poll(1, 0.3) == []
    assert link("b/soft0").packets <= before + 1, "at most one was being forwarded"
    faults.up("a/soft0")
    assert statuses(left.poll(1, 30)) == [(1, "SUCCESS")]
    assert right.matches(3, 100_000)


def test_rules_and_limits(two: Pair, hosts_known: None) -> None:
    """Late, double and overtaken packets go through the link and the queue as all do."""
    fabric.limit("rail0", 1e9, delay_s=0.02)
    left, right = two(timeout=16, retry_cnt=7)
    faults.duplicate("a/soft0", count=3, direction="tx")
    faults.delay("a/soft0", 0.05, count=1, direction="tx", opcode="write", nth=5)
    faults.reorder("b/soft0", count=2, direction="tx")
    left.pattern(4, 20_000)
    assert seconds(left, 5, 20_000) >= 0.04
    assert right.matches(4, 20_000)


def test_death_under_way(two: Pair, hosts_known: None) -> None:
    fabric.limit("rail0", 8e6)
    left, _right = two(BIG, **PATIENT)
    left.send("RDMA_WRITE", 1, 500_000)
    wait_until(lambda: link("b/soft0").packets >= 2, 10)
    faults.kill("a/soft0")
    assert Proxy(left._host, "device1").event() == "DEVICE_FATAL"
    assert left.poll(1, 0.1) == []


# -- who sets them --
def test_changed_while_traffic_runs(two: Pair, hosts_known: None) -> None:
    fabric.limit("rail0", 8e6)
    left, right = two(BIG, **PATIENT)
    left.pattern(6, 1_000_000)
    begin = left.send("RDMA_WRITE", 1, 1_000_000)
    wait_until(lambda: link("b/soft0").packets >= 3, 10)
    fabric.unlimit("rail0")
    [found] = left.poll(1, 30)
    assert found["status"] == "SUCCESS" and found["at"] - begin < 1, "that would be 1 s with the limit"
    assert right.matches(6, 1_000_000)
    assert faults.device("b/soft0").link is None


def test_off_costs_nothing(two: Pair, hosts_known: None) -> None:
    """Without limits no packet comes near the model."""
    fabric.limit("rail0", 1e9)
    fabric.unlimit()
    left, _right = two(**PATIENT)
    seconds(left, 4, 10_000)
    fabric.limit("rail0", 1e9)
    assert link("b/soft0").packets == 0


@pytest.fixture
def start(network: Path, tmp_path: Path) -> Any:
    """Start a process of host a with this SOFTRNIC_FABRIC."""
    started: list[HostProcess] = []

    def run(value: str) -> HostProcess:
        started.append(HostProcess(network, "a", env={"SOFTRNIC_FABRIC": value}, log=tmp_path))
        return started[-1]

    yield run
    for process in started:
        process.kill()


def test_environment(start: Callable[[str], HostProcess]) -> None:
    """A value holds from the first device opened with it on; what is changed by hand then stays."""
    start("rail0:rate=10G,delay=5us;b/rail0:rate=1G").open()
    assert (link("a/soft0").rate, link("a/soft0").delay_ns) == (10_000_000_000, 5000)
    faults.register("b")
    assert link("b/soft0").rate == 1_000_000_000
    fabric.limit("a/soft0", 2e9)
    start("rail0:rate=10G,delay=5us;b/rail0:rate=1G").open()
    assert link("a/soft0").rate == 2_000_000_000
    start("*:rate=3G").open()
    assert [link(f"{host}/{name}").rate for host in "ab" for name in ("soft0", "soft1")] == [
        3_000_000_000
    ] * 4


def test_environment_names_a_file(start: Callable[[str], HostProcess], tmp_path: Path) -> None:
    file = tmp_path / "fabric"
    file.write_text(
        "# the first rail; all of it\nrail0: rate = 2.5G, delay=1ms, buffer=256K # slow\n\nrail1:off\n"
    )
    start(str(file)).open()
    assert (link("a/soft0").rate, link("a/soft0").delay_ns, link("a/soft0").buffer) == (
        2_500_000_000,
        1_000_000,
        256_000,
    )
    assert faults.device("a/soft1").link is None


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("/nowhere/at/all", "SOFTRNIC_FABRIC=/nowhere/at/all: No such file or directory"),
        ("rail0:rate=fast", "fabric: 'rate=fast': expected a rate of 1K to 1000G bits per second"),
    ],
)
def test_wrong_environment(start: Callable[[str], HostProcess], value: str, told: str) -> None:
    """No device opens, and it is said why."""
    host = start(value)
    with pytest.raises(VerbsError):
        host.open()
    assert told in host.output()


@pytest.mark.parametrize(
    ("entries", "told"),
    [
        ("rail0", "'rail0': expected RAIL:SETTINGS"),
        ("rail16:rate=1G", "'rail16': expected rail0 to rail15"),
        ("rail:rate=1G", "'rail': expected rail0 to rail15"),
        ("rail0x:rate=1G", "'rail0x': expected rail0 to rail15"),
        ("nobody/rail0:rate=1G", "unknown host 'nobody'"),
        ("/rail0:rate=1G", "'/rail0': expected a host"),
        (f"{'x' * 32}/rail0:rate=1G", "expected a host of at most 31 characters"),
        ("rail0:delay=1us", "'rail0:delay=1us': expected a rate, or off"),
        ("rail0:", "'': expected KEY=VALUE"),
        ("rail0:speed=1G", "'speed=1G': expected KEY=VALUE"),
        ("rail0:rate=", "'rate=': expected a rate"),
        ("rail0:rate=.", "'rate=.': expected a rate"),
        ("rail0:rate=999", "'rate=999': expected a rate"),
        ("rail0:rate=1.0001G", "'rate=1.0001G': expected a rate"),
        ("rail0:rate=99999999999999999999", "expected a rate"),
        ("rail0:rate=1G,delay=5", "'delay=5': expected a time with its unit"),
        ("rail0:rate=1G,delay=11s", "'delay=11s': expected a time with its unit"),
        ("rail0:rate=1G,buffer=8191", "'buffer=8191': expected 8192 to 1000G bytes"),
        ("rail0:rate=1G,off", "'off': expected KEY=VALUE"),
        ("rail0:rate=2G;rail1:rate=none", "'rate=none': expected a rate"),
    ],
)
def test_wrong_entries(hosts_known: None, entries: str, told: str) -> None:
    """The message names what is wrong, and nothing of it is in force."""
    with pytest.raises(faults.FaultError) as caught:
        fabric.apply(entries)
    assert told in str(caught.value)
    assert all(device.link is None for device in faults.status().devices)


def test_from_a_shell(hosts_known: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fabric"]) == 0
    assert "no port has limits" in capsys.readouterr().out
    assert main("fabric rail0 rate=10G delay=5us buffer=1M".split()) == 0
    assert main("fabric b/soft0 rate=1G".split()) == 0
    capsys.readouterr()
    assert main(["fabric"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[1] == ["a/soft0", "10000Mb/s", "5us", "1000000", "0", "0", "0", "0"]
    assert rows[2] == ["b/soft0", "1000Mb/s", "1us", "1000000", "0", "0", "0", "0"]
    assert main("fabric rail0 rate=slow".split()) == 2
    assert "softrnic: fabric: 'rate=slow'" in capsys.readouterr().err
    assert main("fabric rail0:x off".split()) == 2
    assert "is no rail and no port" in capsys.readouterr().err
    assert main("fabric * off".split()) == 0
    assert "no port has limits" in capsys.readouterr().out
    faults.clear()


def test_clear_leaves_limits_alone(hosts_known: None) -> None:
    fabric.limit("rail0", 1e9)
    faults.clear()
    assert link("a/soft0").rate == 1_000_000_000
