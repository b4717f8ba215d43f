# SPDX-License-Identifier: BSD-3-Clause
"""Priority flow control: the model in virtual time, then between processes and as it is asked for."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import wait_until

from benchmarks.fabric import rail
from benchmarks.fabric.rail import Run
from shiftverbs.softrnic import fabric, faults
from shiftverbs.softrnic.__main__ import main
from softrnic import test_congestion, test_fabric, test_raw_peer
from softrnic.cbuild import build
from softrnic.hosts import HostProcess, Proxy, connect, statuses
from softrnic.test_congestion import ECT0, HEADERS, LINE, SEED, fixed_point, receive
from softrnic.test_fabric import BIG, PATIENT, link
from softrnic.test_raw_peer import SEND_ONLY, RawPeer

hosts_known, peer, marking = test_fabric.hosts_known, test_raw_peer.peer, test_congestion.marking
start = test_fabric.start

XOFF = 250_000
PFC = "rail0:rate=40G,pfc=on"


# -- in virtual time --
@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """benchmarks/fabric/rail.c with the model, built with sanitizers."""
    return build(tmp_path_factory.mktemp("rail") / "rail", str(rail.PROGRAM), rail.SOURCES)


@pytest.fixture(scope="session")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """c/switch.c, built with sanitizers."""
    sources = [name for name in rail.SOURCES if name != "fabric/dcqcn.c"]
    return build(tmp_path_factory.mktemp("switch") / "switch", "switch.c", sources)


@pytest.mark.parametrize("arguments", [(), ("1", "150")], ids=["steps", "anything"])
def test_switch(steps: Path, arguments: tuple[str, ...]) -> None:
    """Times, pauses, forgotten packets; then random calls (seeds 1 to 150), which leave nobody paused."""
    done = subprocess.run([str(steps), *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="session")
def carrier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """c/carry.c, built with sanitizers."""
    sources = [name for name in rail.SOURCES if name != "fabric/dcqcn.c"]
    return build(tmp_path_factory.mktemp("carry") / "carry", "carry.c", [*sources, "transport/carry.c"])


@pytest.mark.parametrize(
    "arguments", [(), ("finish",), ("paced",)], ids=["to the end", "finished early", "without flow control"]
)
def test_no_packet_overtakes_another_one_of_its_connection(carrier: Path, arguments: tuple[str, ...]) -> None:
    """Though a busy NIC asks later about what was held up than about what comes behind it, and does late what is due
    in between (seeds 1 to 100)."""
    done = subprocess.run([str(carrier), "1", "100", *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("ms", ["190", "4000"])
def test_no_packet_waits_for_one_that_was_held_up(carrier: Path, ms: str) -> None:
    """A host takes nothing for so long: when it goes on, what comes then is not behind by what that packet waited."""
    done = subprocess.run([str(carrier), "still", ms], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def run(model: Path, entry: str, ms: int, *flows: str) -> Run:
    print(f"seed {SEED}")
    return rail.run(model, entry, ms, flows, seed=SEED)


def incast(senders: int) -> list[str]:
    """Hosts 0 to senders - 1 all write to the next one."""
    return [f"{i}-{senders}" for i in range(senders)]


@pytest.mark.parametrize("senders", [2, 4, 8])
def test_lossless(model: Path, senders: int) -> None:
    """Nothing is dropped or sent again; each sender is paused for what it has too much."""
    found = run(model, PFC, 10, *incast(senders))
    assert found.throughput >= 0.999 * LINE
    assert all(flow.again == flow.timeouts == 0 for flow in found.flows)
    target = found.ports[senders]
    assert target.dropped == 0
    assert 0.9 * XOFF * senders <= target.queue <= target.peak <= senders * (XOFF + 23_192)
    for sender in range(senders):
        assert found.ports[sender].rx_pause > 1000
        assert abs(found.ports[sender].paused - (1 - 1 / senders)) <= 0.02


@pytest.mark.parametrize("flows", [2, 4, 8])
def test_unfair(model: Path, flows: int) -> None:
    """Ports get equal shares and not flows: the parking lot (Zhu et al. 2015, figure 3).

    One flow comes by a port of its own, all others by another one.
    """
    found = run(model, PFC, 10, "0-2", *["1-2"] * (flows - 1))
    alone, *others = (flow.rate for flow in found.flows)
    assert abs(alone / LINE - 1 / 2) <= 0.02
    assert all(abs(rate / LINE - 1 / 2 / (flows - 1)) <= 0.02 for rate in others)


@pytest.mark.parametrize("senders", [4, 8])
def test_victim(model: Path, senders: int) -> None:
    """Head-of-line blocking (figure 4 there): a flow to an idle host is paused with the others of its port.

    It gets what its port gets for the incast. Nobody but its own host's other flow needs what it does not get.
    """
    found = run(model, PFC, 10, *incast(senders), f"0-{senders + 1}")
    victim = found.flows[-1].rate
    assert victim <= 1.05 * LINE / senders < 0.5 * (1 - 1 / senders) * LINE
    assert found.ports[senders + 1].peak < 10_000, "there is nothing before it"


def test_other_priorities_go_on(model: Path) -> None:
    """The same flow in a priority of its own: what is paused is one priority of the port."""
    found = run(model, PFC, 10, *(f"{flow}/3" for flow in incast(8)), "0-9/1")
    assert found.flows[-1].rate >= 0.99 * (1 - 1 / 8) * LINE
    found = run(model, PFC, 10, *(f"{flow}/3" for flow in incast(8)), "0-9/4")
    assert found.flows[-1].rate >= 0.99 * LINE, "the higher priority comes first"
    assert found.flows[0].rate <= 0.01 * LINE
    assert found.ports[8].dropped == 0


@pytest.mark.parametrize("senders", [2, 4, 8])
def test_with_dcqcn(model: Path, senders: int) -> None:
    """Pauses at the start alone, when nobody has heard of anything yet; then the queue is DCQCN's."""
    entry = f"{PFC},dcqcn=sigcomm15"
    found = run(model, entry, 300, *incast(senders))
    target = found.ports[senders]
    assert found.throughput >= 0.95 * LINE and target.dropped == 0
    if senders < 8:
        assert abs(target.queue / fixed_point(senders, 938 + HEADERS) - 1) <= 0.25
    pauses, without = (
        sum(one.ports[i].rx_pause for i in range(senders))
        for one in (found, run(model, PFC, 3, *incast(senders)))
    )
    assert pauses <= 0.01 * 100 * without


def test_dcqcn_spares_the_victim(model: Path) -> None:
    found = run(model, f"{PFC},dcqcn=sigcomm15", 300, *incast(4), "0-5")
    assert found.flows[-1].rate >= 0.95 * (1 - 1 / 4) * LINE


@pytest.mark.parametrize("senders", [2, 4, 8])
def test_without_control(model: Path, senders: int) -> None:
    """Drops, and go-back-N sends again what had arrived: with four senders less than half gets through."""
    found = run(model, "rail0:rate=40G", 20, *incast(senders))
    assert found.ports[senders].dropped > 1000
    assert sum(flow.again for flow in found.flows) >= 0.1 * sum(flow.sent for flow in found.flows)
    assert found.throughput <= (0.95 if senders == 2 else 0.5) * LINE


def test_headroom_that_is_too_small(model: Path) -> None:
    """What is under way when a host is paused does not find room."""
    entry = "rail0:rate=40G,delay=20us,pfc=on,xoff=100K"
    assert run(model, f"{entry},headroom=10K", 10, *incast(4)).ports[4].dropped > 100
    assert run(model, entry, 10, *incast(4)).ports[4].dropped == 0


def test_storm(model: Path) -> None:
    """A host that stands still: its pauses spread to all who send to it, and to whom they send. A watchdog ends it.

    Host 2 stands still during the second half; 0 sends to it and to 3, as 1 does.
    """
    flows = ("still=2@9+100", "0-2", "0-3", "1-3")
    spread = run(model, f"{PFC},watchdog=off", 10, *flows)
    assert [flow.rate for flow in spread.flows] == [0, 0, spread.flows[2].rate]
    assert spread.ports[2].tx_pause == 1 and spread.ports[2].storms == 0
    ended = run(model, f"{PFC},watchdog=500us", 10, *flows)
    assert ended.flows[0].rate == 0 and ended.flows[1].rate >= 0.4 * LINE
    assert ended.ports[2].storms == 1 and ended.ports[2].watchdog_dropped >= XOFF / 1000


def test_storm_that_ends_in_time(model: Path) -> None:
    """Shorter than the watchdog's time: nothing is lost. The next one has that time for itself."""
    flows = ("still=2@2+3", "still=2@6+3", "0-2")
    found = run(model, f"{PFC},watchdog=4ms", 10, *flows)
    assert found.ports[2].storms == found.ports[2].watchdog_dropped == 0
    assert found.ports[2].tx_pause == 4, "XOFF and XON, twice"
    assert found.flows[0].rate >= 0.99 * LINE


def test_sixty_four_ports(model: Path) -> None:
    """Eight incasts of four with their victims, and pairs that share nothing with them: these keep their line."""
    flows = []
    for first in range(0, 64, 8):
        flows += [f"{first + i}-{first + 4}" for i in range(4)]
        flows += [f"{first}-{first + 5}", f"{first + 6}-{first + 7}"]
    found = run(model, PFC, 5, *flows)
    assert found == run(model, PFC, 5, *flows), "the same seed, another run"
    assert sum(port.dropped for port in found.ports.values()) == 0
    for group in range(8):
        rates = [flow.rate for flow in found.flows[6 * group : 6 * group + 6]]
        assert sum(rates[:4]) >= 0.999 * LINE
        assert rates[4] <= 1.05 * LINE / 4 and rates[5] >= 0.999 * LINE


# -- between processes --
Hosts = Callable[..., HostProcess]
#: 80 Mb/s: a packet of 4 KiB takes 0.4 ms.
SLOW, SMALL = 80e6, {"buffer": 1_000_000, "xoff": 50_000, "watchdog_s": 0.0}


def senders(hosts: Hosts, names: str = "ab", **attributes: int) -> list[tuple[Proxy, Proxy]]:
    """A pair from each of these hosts to host c."""
    target = hosts("c").open("soft0")
    pairs = []
    for name in names:
        pair = hosts(name).open("soft0").endpoint(**BIG), target.endpoint(**BIG)
        connect(*pair, **(PATIENT | attributes))
        pairs.append(pair)
    return pairs


@pytest.fixture
def three_known(hosts_known: None) -> None:
    """Host c as well."""
    faults.register("c")


def test_incast_between_processes(hosts: Hosts, three_known: None) -> None:
    """Nothing is lost, the queue is what both may have in it, and the link is never idle."""
    fabric.limit("rail0", SLOW, pfc=True, **SMALL)
    pairs = senders(hosts)
    for seed, (left, _) in enumerate(pairs, 1):
        left.pattern(seed, 1_000_000)
    begin = min(left.send("RDMA_WRITE", 1, 1_000_000) for left, _ in pairs)
    ends = [left.poll(1, 30)[0] for left, _ in pairs]
    assert all(end["status"] == "SUCCESS" for end in ends)
    assert all(right.matches(seed, 1_000_000) for seed, (_, right) in enumerate(pairs, 1))
    assert 0.2 <= max(end["at"] for end in ends) - begin <= 0.4, "0.2 s is what the link needs"
    port = link("c/soft0")
    assert port.dropped == 0 and port.packets >= 2 * 245
    assert 60_000 < port.queue_peak <= 2 * (50_000 + port.headroom)
    for name in ("a/soft0", "b/soft0"):
        counted = link(name).prio
        assert counted["rx_prio0_pause"] >= 2 and counted["rx_prio0_pause_duration"] > 0
        assert sum(counted.values()) == counted["rx_prio0_pause"] + counted["rx_prio0_pause_duration"]
        counters = faults.device(name).counters
        assert set(counters) == set(faults.DEVICE_COUNTERS) and not any(counters.values())


@pytest.mark.parametrize("how", [{"traffic_class": 0x68}, {"sl": 3}])
def test_priorities_between_processes(hosts: Hosts, three_known: None, how: dict[str, int]) -> None:
    """By DSCP (26, so 3) or service level: a slow port pauses one priority, the other one goes on."""
    fabric.apply("rail0:rate=80M,pfc=on,xoff=20K,watchdog=off;c/rail0:rate=1M,pfc=on,watchdog=off")
    [(slow, _)] = senders(hosts, "a", **how)
    other = hosts("a").open("soft0").endpoint(**BIG), hosts("b").open("soft0").endpoint(**BIG)
    connect(*other, **PATIENT)
    slow.send("RDMA_WRITE", 1, 400_000)
    wait_until(lambda: link("a/soft0").prio["rx_prio3_pause"] == 1, 10)
    begin = other[0].send("RDMA_WRITE", 1, 200_000)
    [found] = other[0].poll(1, 10)
    assert found["status"] == "SUCCESS" and found["at"] - begin <= 0.2
    assert slow.poll(1, 0) == [], "that takes 3.2 s"
    assert {name for name, value in link("a/soft0").prio.items() if value} <= {
        "rx_prio3_pause",
        "rx_prio3_pause_duration",
    }


def test_storm_between_processes(hosts: Hosts, three_known: None) -> None:
    """A NIC that stands still stops those who send to others; `unstall` or the watchdog lets them go on."""
    fabric.limit("rail0", SLOW, pfc=True, **SMALL)
    [(to_c, _)] = senders(hosts, "a")
    to_b = hosts("a").open("soft0").endpoint(**BIG), hosts("b").open("soft0").endpoint(**BIG)
    connect(*to_b, **PATIENT)
    faults.stall("c/soft0")
    to_c.send("RDMA_WRITE", 1, 400_000)
    wait_until(lambda: link("a/soft0").prio["rx_prio0_pause"] == 1, 10)
    assert link("c/soft0").prio["tx_prio0_pause"] == 1
    to_b[0].send("RDMA_WRITE", 1, 400_000)
    assert to_b[0].poll(1, 0.3) == [], "0.04 s, were it not paused with the other"
    faults.unstall("c/soft0")
    assert statuses(to_b[0].poll(1, 10)) == [(1, "SUCCESS")]
    assert statuses(to_c.poll(1, 20)) == [(1, "SUCCESS")]
    assert link("c/soft0").watchdog_dropped == 0

    fabric.limit("rail0", SLOW, pfc=True, **SMALL | {"watchdog_s": 0.1})
    faults.stall("c/soft0")
    to_c.send("RDMA_WRITE", 2, 400_000)
    to_b[0].send("RDMA_WRITE", 2, 400_000)
    assert statuses(to_b[0].poll(1, 10)) == [(2, "SUCCESS")]
    wait_until(lambda: link("c/soft0").storms == 1, 10)
    assert link("c/soft0").watchdog_dropped > 0
    faults.clear()
    assert statuses(to_c.poll(1, 20)) == [(2, "SUCCESS")], "sent again"


@pytest.mark.parametrize("who", ["sender", "receiver", "NIC"])
def test_whoever_caused_a_pause_dies(hosts: Hosts, three_known: None, who: str) -> None:
    """Its packets leave the switch all the same, and others go on."""
    fabric.limit("rail0", SLOW, pfc=True, **SMALL)
    (dying, _), (left, right) = senders(hosts)
    to_b = hosts("a").open("soft0").endpoint(**BIG), hosts("b").open("soft0").endpoint(**BIG)
    connect(*to_b, **PATIENT)
    if who == "NIC":
        faults.stall("c/soft0")
    dying.send("RDMA_WRITE", 1, 1_000_000)
    left.pattern(7, 1_000_000)
    left.send("RDMA_WRITE", 1, 1_000_000)
    wait_until(lambda: link("b/soft0").prio["rx_prio0_pause"] >= 1, 10)
    if who == "NIC":
        faults.kill("c/soft0")
    else:
        os.kill(hosts("a" if who == "sender" else "c").pid, signal.SIGKILL)
    if who == "sender":
        assert statuses(left.poll(1, 20)) == [(1, "SUCCESS")]
        assert right.matches(7, 1_000_000)
    else:
        to_b[0].send("RDMA_WRITE", 1, 200_000)
        assert statuses(to_b[0].poll(1, 10)) == [(1, "SUCCESS")]
    wait_until(lambda: link("c/soft0").queue == 0, 20)


def test_a_pause_without_end_ends_in_an_error(hosts: Hosts, three_known: None) -> None:
    """Nobody watches, and the process of the NIC that stands still is killed: its peer's retries run out."""
    fabric.limit("rail0", SLOW, pfc=True, **SMALL)
    [(left, _)] = senders(hosts, "a", timeout=14, retry_cnt=2)
    faults.stall("c/soft0")
    left.send("RDMA_WRITE", 1, 400_000)
    wait_until(lambda: link("a/soft0").prio["rx_prio0_pause"] == 1, 10)
    os.kill(hosts("c").pid, signal.SIGKILL)
    assert statuses(left.poll(1, 20)) == [(1, "RETRY_EXC_ERR")]
    faults.unstall("c/soft0")
    wait_until(lambda: link("c/soft0").queue == 0 and link("a/soft0").prio["rx_prio0_pause"] == 2, 10)


def test_cable_pulled_under_flow_control(hosts: Hosts, three_known: None) -> None:
    fabric.limit("rail0", 8e6, pfc=True, **SMALL)
    [(left, right)] = senders(hosts, "a", timeout=15)
    left.pattern(3, 100_000)
    left.send("RDMA_WRITE", 1, 100_000)
    wait_until(lambda: link("c/soft0").packets >= 2, 10)
    faults.down("a/soft0")
    assert left.poll(1, 0.3) == []
    faults.up("a/soft0")
    assert statuses(left.poll(1, 30)) == [(1, "SUCCESS")]
    assert right.matches(3, 100_000)
    counters = faults.device("a/soft0").counters
    assert counters["local_ack_timeout_err"] + counters["packet_seq_err"] > 0


def test_switched_on_and_off_under_way(hosts: Hosts, three_known: None) -> None:
    """What the switch has goes on by itself, what comes after it as without."""
    fabric.limit("rail0", 8e6)
    pairs = senders(hosts)
    for seed, (left, _) in enumerate(pairs, 1):
        left.pattern(seed, 300_000)
        left.send("RDMA_WRITE", 1, 300_000)
    wait_until(lambda: link("c/soft0").packets >= 3, 10)
    fabric.limit("rail0", 8e6, pfc=True, xoff=20_000)
    wait_until(lambda: link("a/soft0").prio["rx_prio0_pause"] >= 1, 10)
    fabric.limit("rail0", 80e6)
    for seed, (left, right) in enumerate(pairs, 1):
        assert statuses(left.poll(1, 30)) == [(1, "SUCCESS")]
        assert right.matches(seed, 300_000)


def test_with_dcqcn_between_processes(hosts: Hosts, three_known: None) -> None:
    """Marks come before pauses, and their senders slow down."""
    fabric.limit("rail0", LINE, buffer=10_000_000, dcqcn="connectx", kmin=0, kmax=1, pfc=True, dilation=1000)
    pairs = senders(hosts)
    for left, _ in pairs:
        left.send("RDMA_WRITE", 1, 1_000_000)
    for left, _ in pairs:
        assert statuses(left.poll(1, 30)) == [(1, "SUCCESS")]
    port = link("c/soft0")
    assert port.marked > 0 and port.np_cnp_sent > 0 and port.dropped == 0
    assert link("a/soft0").rp_cnp_handled > 0 and link("a/soft0").prio["rx_prio0_pause"] == 0


def test_traffic_class_on_the_wire(hosts: Hosts, peer: Callable[..., RawPeer], hosts_known: None) -> None:
    """Its DSCP is what packets with data and answers have; ECN's bits are the NIC's."""
    fabric.limit("rail0", 1e9, pfc=True)
    made = peer(traffic_class=0x6B)
    made.socket.setsockopt(test_congestion.socket.IPPROTO_IP, test_congestion.socket.IP_RECVTOS, 1)
    made.endpoint.send("SEND", 1, 100)
    assert receive(made)[1] == 0x68 | ECT0
    made.endpoint.recv(1, 100)
    made.send(SEND_ONLY, payload=b"x" * 20, ack_req=True)
    data, tos = receive(made)
    assert data[0] == 0x11 and tos == 0x68


def test_what_nics_count(
    peer: Callable[..., RawPeer], hosts_known: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without limits too; and `list` shows what is not 0."""
    made = peer()
    made.endpoint.recv(1, 100)
    made.send(SEND_ONLY, 1, payload=b"x", ack_req=True)  # before the one that is missing
    made.send(SEND_ONLY, 0, payload=b"x", ack_req=True)
    made.send(SEND_ONLY, 0, payload=b"x", ack_req=True)  # again
    made.send(SEND_ONLY, 1, payload=b"x", ack_req=True)  # nothing is posted for it
    made.send_raw(b"\x04" + bytes(39))
    wanted = {"out_of_sequence": 1, "duplicate_request": 1, "out_of_buffer": 1, "rx_icrc_encapsulated": 1}
    wait_until(lambda: not wanted.items() - faults.device("a/soft0").counters.items(), 10)
    assert sum(faults.device("a/soft0").counters.values()) == 4
    assert main(["list"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["a/soft0", "out_of_sequence", "1"] in rows and rows[-5] == ["DEVICE", "COUNTER", "VALUE"]


def test_retries_are_counted(hosts: Hosts, three_known: None) -> None:
    [(left, right)] = senders(hosts, "a", timeout=12, retry_cnt=2, rnr_retry=1)
    faults.drop("c/soft0", direction="rx", opcode="write", count=1)
    left.send("RDMA_WRITE", 1, 10_000)
    assert statuses(left.poll(1, 10)) == [(1, "SUCCESS")]
    counters = faults.device("a/soft0").counters
    assert (counters["packet_seq_err"], counters["local_ack_timeout_err"]) == (1, 0)
    assert faults.device("c/soft0").counters["out_of_sequence"] >= 1
    left.send("SEND", 2, 100)
    assert statuses(left.poll(1, 10)) == [(2, "RNR_RETRY_EXC_ERR")]
    counters = faults.device("a/soft0").counters
    assert (counters["rnr_nak_retry_err"], counters["req_rnr_retries_exceeded"]) == (1, 1)
    assert faults.device("c/soft0").counters["out_of_buffer"] == 2
    [(left, right)] = senders(hosts, "a", timeout=8, retry_cnt=2)
    faults.switch_down("rail0")
    left.send("RDMA_WRITE", 1, 100)
    assert statuses(left.poll(1, 10)) == [(1, "RETRY_EXC_ERR")]
    counters = faults.device("a/soft0").counters
    assert (counters["local_ack_timeout_err"], counters["req_transport_retries_exceeded"]) == (2, 1)


# -- who sets it --
def test_defaults(hosts_known: None, softrnic_dir: Path) -> None:
    """A quarter of the buffer, 3000 below it, three times what is under way; nothing of it without pfc."""
    fabric.limit("rail0", LINE, delay_s=2e-6, dilation=10)
    assert not list(softrnic_dir.glob("rail*")), "no switch where nobody wants one"
    found = link("a/soft0")
    assert not found.pfc and found.xoff == found.xon == found.headroom == found.watchdog_ns == 0
    fabric.limit("rail0", LINE, delay_s=2e-6, pfc=True, dilation=10)
    found = link("a/soft0")
    assert found.pfc and (found.xoff, found.xon, found.headroom) == (250_000, 247_000, 30_000 + 8192)
    assert found.watchdog_ns == 2_000_000_000
    fabric.limit("a/soft0", LINE, pfc=True, xoff=5000, xon=0, headroom=5000, watchdog_s=1e-3)
    found = link("a/soft0")
    assert (found.xoff, found.xon, found.headroom, found.watchdog_ns) == (5000, 0, 5000, 1_000_000)
    assert not link("b/soft0").prio["rx_prio7_pause"]


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ("pfc=yes", "'pfc=yes': expected on or off"),
        ("pfc=on,xoff=much", "'xoff=much': expected 0 to 1000G bytes"),
        ("pfc=on,xon=-1", "'xon=-1': expected 0 to 1000G bytes"),
        ("pfc=on,headroom=2000G", "'headroom=2000G': expected 0 to 1000G bytes"),
        ("pfc=on,watchdog=5", "'watchdog=5': expected off, or a time with its unit"),
        ("pfc=on,watchdog=1ns", "'watchdog=1ns': expected off, or a time with its unit, of 1us to 10s"),
        ("pfc=on,xoff=10K,xon=11K", "expected an xon that is not above xoff"),
        ("pfc=on,xoff=4K,headroom=4K", "expected an xoff and a headroom of 8192 bytes together"),
        ("xoff=10K", "expected pfc=on with xoff, xon, headroom or watchdog"),
        ("pfc=off,watchdog=off", "expected pfc=on with xoff, xon, headroom or watchdog"),
    ],
)
def test_wrong_settings(hosts_known: None, settings: str, told: str) -> None:
    with pytest.raises(faults.FaultError) as caught:
        fabric.apply(f"rail0:rate=1G,{settings}")
    assert told in str(caught.value)
    assert all(device.link is None for device in faults.status().devices)


def test_switch_that_cannot_be_made(hosts_known: None, softrnic_dir: Path) -> None:
    """It is said, and nothing of the entries is in force."""
    (softrnic_dir / "rail0.v6").write_bytes(b"something else")
    with pytest.raises(faults.FaultError, match=r"rail0: a switch with flow control in .*: Protocol"):
        fabric.limit("rail0", 1e9, pfc=True)
    assert faults.device("a/soft0").link is None


def test_from_environment(start: Callable[[str], HostProcess]) -> None:
    start("rail0:rate=1G,pfc=on,xoff=40K,watchdog=10ms").open()
    assert (link("a/soft0").xoff, link("a/soft0").watchdog_ns) == (40_000, 10_000_000)


def test_from_a_shell(hosts_known: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main("fabric rail0 rate=40G pfc=on xoff=100K watchdog=off dilation=500".split()) == 0
    assert main("fabric b/soft0 rate=1G".split()) == 0
    capsys.readouterr()
    assert main(["fabric"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[-2][:5] == ["PORT", "XOFF", "XON", "HEADROOM", "WATCHDOG"]
    assert rows[-1] == ["a/soft0", "100000", "97000", "23192", "off", "0", "0"]
