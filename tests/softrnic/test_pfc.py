# SPDX-License-Identifier: BSD-3-Clause
"""Priority flow control: the model in virtual time, then between processes and as it is asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from softrnic import rail
from softrnic.cbuild import build
from softrnic.rail import Run
from softrnic.test_congestion import HEADERS, LINE, SEED, fixed_point

XOFF = 250_000
PFC = "rail0:rate=40G,pfc=on"


# -- in virtual time --
@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """c/rail.c with the model, built with sanitizers."""
    return build(tmp_path_factory.mktemp("rail") / "rail", "rail.c", rail.SOURCES)


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
