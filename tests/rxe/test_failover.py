# SPDX-License-Identifier: BSD-3-Clause
"""Failover and recovery on the kernel's soft-RoCE: two hosts, two rails (once three), every byte checked.

The machinery is the demo's. What breaks is real: cables, switch ports, packets, interfaces. Which WC comes first, or
whether one comes at all, is the driver's business: these tests take it as it comes.
"""

from __future__ import annotations

import os
import random
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from shiftverbs.commands.demo.options import TRAFFIC, Plan
from shiftverbs.commands.demo.rxe import FAULTS, RxeNetwork
from shiftverbs.commands.demo.scenario import Lab, ScenarioResult, at_home, away, settled

SOAK = os.environ.get("RXE_SOAK") == "1"
PLAN = Plan(
    traffic=tuple(TRAFFIC),
    faults=tuple(FAULTS),
    warm_s=0.3,
    fault_s=0.3,
    home_s=0.3,
    device="rxe",
    reconnect=False,
    seed=5,
    verbose=True,
)
# Every fault, every kind of traffic; interface_down leaves WRs in flight without any WC, for each kind.
SPREAD = [
    ("send", "initiator_port"),
    ("send", "netem"),
    ("send", "interface_down"),
    ("write_imm", "responder_port"),
    ("write_imm", "interface_down"),
    ("read", "switch"),
    ("read", "ack_lost"),
]
CASES = [(traffic, fault) for traffic in TRAFFIC for fault in FAULTS] if SOAK else SPREAD
HOME_S, AWAY_S, SETTLE_S = 30, 10, 10


def say(text: str) -> None:
    print(f"{time.monotonic():9.3f} {text}", flush=True)


def finish(lab: Lab) -> None:
    """End its hosts, show what they logged, heal the network."""
    lab.end_hosts()
    lab.network.heal()
    print(*lab.logs, sep="\n")


@pytest.fixture
def make_lab(etcd: str) -> Iterator[Callable[..., Lab]]:
    """Make a lab: two hosts' programs on the guest's network; rails, and whatever of the plan differs."""
    labs = []

    def make(rails: int = 2, **plan: Any) -> Lab:
        lab = Lab(replace(PLAN, **plan), RxeNetwork(rails), etcd, say, lambda pair: None)
        labs.append(lab)
        return lab

    yield make
    for lab in labs:
        finish(lab)


@pytest.fixture(scope="module")
def shared_lab(etcd: str) -> Iterator[Lab]:
    """One lab for all scenarios of the demo's kind: programs start once."""
    lab = Lab(PLAN, RxeNetwork(), etcd, say, lambda pair: None)
    yield lab
    finish(lab)


@pytest.fixture
def shared_story(shared_lab: Lab) -> Iterator[Callable[[str], Story]]:
    """Tell a story of this traffic in the shared lab; one that does not come to its end takes the programs with it."""
    stories = []

    def tell(traffic: str) -> Story:
        stories.append(Story(shared_lab, traffic))
        return stories[-1]

    yield tell
    shared_lab.network.heal()
    if not all(story.ended for story in stories):
        shared_lab.end_hosts()


class Story:
    """Traffic of one kind between a and b with faults in any order; `end` accounts for every message."""

    def __init__(self, lab: Lab, traffic: str) -> None:
        self.lab, self.traffic, self.network = lab, traffic, lab.network
        self.ended = False
        self.pair = lab.protected(traffic)
        self._before = self._status()
        self.pair.ask_both("start")
        self.pair.run_for(0.2)

    def _status(self) -> Any:
        return tuple(self.pair.ask_both("status"))

    def shift(self, host: int = 0) -> dict[str, Any]:
        """`qp.shift` of a host."""
        return self._status()[host]["shift"]

    def wait(self, condition: Callable[[Any, Any], bool], timeout_s: float, what: str) -> None:
        """Wait until condition(a's report, b's report); no host may have seen an error."""
        say(f"wait for: {what}")
        self.pair.wait_for(lambda a, b: self.lab._sound(a, b) and condition(a, b), timeout_s, what)

    def wait_on(self, device: str) -> None:
        """Wait until a sends on this device, and messages move there."""
        there = {"path": device, "state": "FALLBACK"}
        self.wait(lambda a, b: there.items() <= a["shift"].items(), AWAY_S, f"a on {device}")
        self.lab._wait_moving(self.pair, self.traffic, f"messages on {device}")

    def wait_away(self) -> None:
        """Wait until both are on a backup and messages move."""
        self.wait(lambda a, b: away(a) and away(b), AWAY_S, "both away")
        self.lab._wait_moving(self.pair, self.traffic, "messages on the backup")

    def wait_home(self) -> None:
        """Wait until both are at home and messages move."""
        self.wait(lambda a, b: at_home(a) and at_home(b), HOME_S, "both at home")
        self.lab._wait_moving(self.pair, self.traffic, "messages at home")

    def end(self) -> ScenarioResult:
        """Stop sending; nothing may be lost, duplicated, reordered or corrupt, and all must have arrived."""
        self.pair.ask_both("pause")
        self.wait(lambda a, b: settled(self.traffic, (a, b)), SETTLE_S, "all messages arrived")
        result = ScenarioResult(self.traffic, "story")
        Lab._account(result, self._before, self._status())
        say(f"{result}")
        assert result.problem is None
        assert (result.lost, result.duplicated, result.reordered, result.corrupt) == (0, 0, 0, 0)
        assert result.messages > 0
        self.ended = True
        return result


@pytest.mark.parametrize(("traffic", "fault"), CASES)
def test_traffic_survives_and_comes_home(shared_lab: Lab, traffic: str, fault: str) -> None:
    result = shared_lab.run(traffic, fault)
    say(f"{result}")
    assert result.problem is None
    assert result.ok
    assert (result.lost, result.duplicated, result.reordered, result.corrupt) == (0, 0, 0, 0)
    assert result.messages > 0 and result.states[0] == "DEFAULT" and result.states[-1] == "DEFAULT"


@pytest.mark.parametrize("fault", ["switch", "initiator_port"])
def test_infinite_retries_never_give_an_error_and_are_noticed(
    shared_lab: Lab, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """rxe takes retry_cnt=7 for without end: only port events and the watchdog are left."""
    monkeypatch.setattr(shared_lab, "plan", replace(PLAN, retry_cnt=7))
    result = shared_lab.run("send", fault)
    assert result.problem is None
    assert result.ok


def test_twenty_flaps_in_a_row(shared_story: Callable[[str], Story]) -> None:
    seed = 20
    rng = random.Random(seed)
    say(f"seed {seed}")
    story = shared_story("write_imm")
    for flap in range(20):
        side = rng.choice("ab")
        story.network.cut(f"{side}0")
        story.pair.run_for(rng.choice((0.0, 0.02, 0.1, 0.4)))
        story.network.mend(f"{side}0")
        story.pair.run_for(rng.choice((0.0, 0.02, 0.1, 0.4)))
    story.wait_home()
    story.end()


def test_backup_cut_during_fallback(shared_story: Callable[[str], Story]) -> None:
    """The second failure comes as soon as home is whole again, before or while traffic returns."""
    story = shared_story("send")
    story.network.cut("a0")
    story.wait_away()
    story.network.mend("a0")
    story.network.cut("b1")
    story.wait_home()
    story.network.mend("b1")
    story.end()


def test_all_paths_gone_gives_the_original_errors(shared_story: Callable[[str], Story]) -> None:
    """The sender at once. The receiver, as with plain verbs, cannot know, until the peer can tell it so."""
    story = shared_story("send")
    story.network.cut("a0")
    story.wait_away()
    story.network.cut("a1")
    story.pair.wait_for(lambda a, b: bool(a["error"]), 10, "an error on a")
    assert story.shift(0)["status"] == "FAILED"
    story.network.heal()
    story.pair.wait_for(lambda a, b: bool(b["error"]), HOME_S, "an error on b")
    a, b = story._status()
    assert a["error"] in ("RETRY_EXC_ERR", "WR_FLUSH_ERR", "LOC_QP_OP_ERR")
    assert b["error"] in ("RETRY_EXC_ERR", "WR_FLUSH_ERR")
    assert b["shift"]["status"] == "FAILED"
    for report in (a, b):
        assert report["duplicated"] == report["reordered"] == report["corrupt"] == 0


def test_third_nic(make_lab: Callable[..., Lab]) -> None:
    story = Story(make_lab(rails=3), "send")
    story.network.cut("a0")
    story.wait_on("rxe_a1")
    story.network.cut("b1")
    story.wait_on("rxe_a2")
    story.network.heal()
    story.wait_home()
    story.end()


def ip(*commands: str) -> None:
    """Run ip with each of these."""
    for command in commands:
        subprocess.run(["ip", *command.split()], check=True)


def move_address(netdev: str, peer: str, old: int, new: int, order: str) -> None:
    """Change an interface's address to 10.0.0.new; order: "add first" moves the GID to another index."""
    # Else deleting an interface's first address takes the others with it.
    subprocess.run(["sysctl", "-qw", "net.ipv4.conf.all.promote_secondaries=1"], check=True)
    table = 101 if netdev == "a0" else 102
    lladdr = "02:00:00:00:00:01" if netdev == "a0" else "02:00:00:00:00:02"
    add = f"addr add 10.0.0.{new}/24 dev {netdev} noprefixroute"
    delete = f"addr del 10.0.0.{old}/24 dev {netdev}"
    ip(*((add, delete) if order == "add first" else (delete, add)))
    ip(
        f"route replace 10.0.0.0/24 dev {netdev} src 10.0.0.{new} table {table}",
        f"route replace local 10.0.0.{new} dev {netdev} table {table}",
        f"neigh replace 10.0.0.{new} lladdr {lladdr} dev {peer} nud permanent",
    )


@pytest.mark.parametrize("order", ["delete first", "add first"])
def test_gid_changes_over_a_flap(make_lab: Callable[..., Lab], order: str) -> None:
    lab = make_lab()
    story = Story(lab, "send")
    try:
        story.network.cut("a0")
        story.wait_away()
        move_address("a0", "b0", 1, 11, order)
        story.network.mend("a0")
        story.wait_home()
        story.end()
    finally:
        lab.end_hosts()
        story.network.heal()
        move_address("a0", "b0", 11, 1, "delete first")
