# SPDX-License-Identifier: BSD-3-Clause
"""The fault registry between processes: addresses, cables, death, switches, rules. No NIC involved."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness import Child, Spawn, child_env

from shiftverbs.softrnic import SoftrnicError, faults
from softrnic.cbuild import build

# Opcodes and syndromes as numbers, so that the test does not lean on the code's own names.
SEND_ONLY, SEND_ONLY_IMM, WRITE_FIRST, WRITE_LAST, ACK, UD = "0x04", "0x05", "0x06", "0x08", "0x11", "0x64"
ACK_OK, RNR_NAK, NAK = "0x1f", "0x2c", "0x60"

LONG_NAME = "n" * 63
MANY_NAMES = ["n" * 61 + f"{i:02}" for i in range(16)]


class Port:
    """A child process that has devices open (c/port.c)."""

    def __init__(self, program: Path, directory: Path, host: str, softrnic: str) -> None:
        self.child = Child([str(program)], child_env(directory, host, softrnic), f"host {host}")
        self.child.expect(f"ready {host}")

    def ask(self, *words: object) -> str:
        """Send one command, return its answer."""
        seen = len(self.child.lines)
        self.child.send(" ".join(str(word) for word in words))
        return self.child.expect("", start=seen).string

    def end(self) -> None:
        """End in an orderly way; a finding of the sanitizers is a failure."""
        assert self.child.process.stdin is not None
        self.child.process.stdin.close()
        self.child.succeed()


@pytest.fixture(scope="session")
def port_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """c/port.c, built with sanitizers."""
    sources = [
        f"faults/{name}.c"
        for name in ("config", "counted", "fault", "links", "netdev", "network", "rails", "registry", "rules")
    ]
    sources += ["wire/wire.c", "wire/icrc.c"]
    sources += [f"fabric/{name}.c" for name in ("events", "params", "port", "switch")]
    return build(tmp_path_factory.mktemp("registry") / "port", "port.c", sources)


@pytest.fixture
def registry(softrnic_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This process gives its faults to the test's own network."""
    monkeypatch.setenv("SOFTRNIC_DIR", str(softrnic_dir))
    return softrnic_dir


@pytest.fixture
def start(port_program: Path, registry: Path) -> Iterator[Callable[..., Port]]:
    """Start a process of a host."""
    ports: list[Port] = []

    def begin(host: str = "a", softrnic: str = "1") -> Port:
        ports.append(Port(port_program, registry, host, softrnic))
        return ports[-1]

    yield begin
    for port in ports:
        port.child.close()


def test_each_process_has_its_own_address(start: Callable[..., Port]) -> None:
    one, two, other = start("a"), start("a"), start("b")
    assert one.ask("claim soft0") == "address 127.32.1.1 slot 1 link up"
    assert two.ask("claim soft0") == "address 127.32.1.2 slot 2 link up"
    assert other.ask("claim soft0") == "address 127.32.2.1 slot 1 link up"
    assert other.ask("claim soft1") == "address 127.33.2.1 slot 1 link up"
    users = faults.device("a/soft0").processes
    assert [(user.pid, user.address) for user in users] == [
        (one.child.pid, "127.32.1.1"),
        (two.child.pid, "127.32.1.2"),
    ]
    assert one.ask("release soft0") == "released"
    assert [user.pid for user in faults.device("a/soft0").processes] == [two.child.pid]
    assert start("a").ask("claim soft0") == "address 127.32.1.1 slot 1 link up"
    for port in (one, two, other):
        port.end()


def test_address_is_free_after_death(start: Callable[..., Port]) -> None:
    one = start()
    one.ask("claim soft0")
    one.child.signal(signal.SIGKILL)
    one.child.wait()
    assert faults.device("a/soft0").processes == ()
    two = start()
    assert two.ask("claim soft0") == "address 127.32.1.1 slot 1 link up"
    two.end()


def test_address_in_use_elsewhere_is_skipped(start: Callable[..., Port]) -> None:
    one = start()
    assert one.ask("busy 3") == "ok"
    assert one.ask("claim soft0") == "address 127.32.1.4 slot 4 link up"
    one.end()


def test_fork_leaves_the_address_with_the_parent(start: Callable[..., Port]) -> None:
    one, two = start(), start()
    one.ask("claim soft0")
    assert one.ask("fork soft0") == "child has dropped it"
    assert two.ask("claim soft0").startswith("address 127.32.1.2")
    faults.down("a/soft0")
    assert one.ask("wait soft0") == "readable"
    assert one.ask("events soft0") == "events port_err"
    one.end()


def test_fixed_address_taken(start: Callable[..., Port]) -> None:
    one, two = start("a", "soft0@127.0.0.77"), start("b", "soft0@127.0.0.77")
    assert one.ask("claim soft0").startswith("address 127.0.0.77 slot 0")
    assert "address 127.0.0.77 belongs to another process" in two.ask("claim soft0")
    one.end()
    assert two.ask("claim soft0").startswith("address 127.0.0.77")
    two.ask("release soft0")
    two.ask("busy 1")
    assert "127.0.0.77 belongs to another process" in two.ask("claim soft0")
    two.end()


def test_cable(start: Callable[..., Port]) -> None:
    one, two = start("a"), start("b")
    one.ask("claim soft0"), one.ask("claim soft1"), two.ask("claim soft0")
    assert one.ask("filter soft0 tx", SEND_ONLY) == "pass"
    faults.down("a/soft0")
    assert one.ask("filter soft0 tx", SEND_ONLY) == "drop"
    assert one.ask("filter soft0 rx", ACK, ACK_OK) == "drop"
    assert one.ask("filter soft1 tx", SEND_ONLY) == "pass"
    assert two.ask("filter soft0 tx", SEND_ONLY) == "pass"
    assert one.ask("wait soft0") == "readable"
    assert one.ask("events soft0") == "events port_err"
    assert one.ask("events soft0") == "events"
    assert one.ask("events soft1") == "events" and two.ask("events soft0") == "events"
    faults.down("a/soft0")
    assert one.ask("events soft0") == "events", "down twice is one event"
    assert one.ask("state soft0") == "link down alive 1"
    faults.up("a/soft0")
    assert one.ask("wait soft0") == "readable"
    assert one.ask("events soft0") == "events port_active"
    assert one.ask("filter soft0 tx", SEND_ONLY) == "pass"
    one.end(), two.end()


def test_every_change_of_the_cable_is_an_event(start: Callable[..., Port]) -> None:
    one = start()
    one.ask("claim soft0")
    faults.down("a/soft0"), faults.up("a/soft0"), faults.down("a/soft0")
    assert one.ask("events soft0") == "events port_err port_active port_err"
    for _ in range(20):
        faults.up("a/soft0"), faults.down("a/soft0")
    told = one.ask("events soft0").split()[1:]
    assert told == ["port_active", "port_err"] * (len(told) // 2) and 2 <= len(told) <= 8
    assert one.ask("events soft0") == "events"
    one.end()


def test_open_while_the_cable_is_out(start: Callable[..., Port]) -> None:
    faults.register("a")
    faults.down("a/soft0")
    one = start()
    assert one.ask("claim soft0").endswith("link down")
    assert one.ask("events soft0") == "events"
    faults.up("a/soft0")
    assert one.ask("events soft0") == "events port_active"
    one.end()


def test_death_is_for_ever(start: Callable[..., Port]) -> None:
    one, two = start(), start()
    one.ask("claim soft0")
    faults.kill("a/soft0")
    assert one.ask("wait soft0") == "readable"
    assert one.ask("events soft0") == "events device_fatal"
    assert one.ask("state soft0") == "link up alive 0"
    assert one.ask("filter soft0 tx", SEND_ONLY) == "drop"
    assert "dead" in two.ask("claim soft0")
    faults.revive("a/soft0")
    assert two.ask("claim soft0").startswith("address")
    assert two.ask("filter soft0 tx", SEND_ONLY) == "pass"
    assert one.ask("filter soft0 tx", SEND_ONLY) == "drop", "the old device stays dead"
    faults.down("a/soft0")
    assert one.ask("events soft0") == "events" and two.ask("events soft0") == "events port_err"
    faults.clear()
    assert one.ask("state soft0") == "link up alive 0" and two.ask("state soft0") == "link up alive 1"
    one.end(), two.end()


def test_switch(start: Callable[..., Port]) -> None:
    one, two = start("a"), start("b")
    for device in ("soft0", "soft1"):
        one.ask("claim", device), two.ask("claim", device)
    faults.switch_down("rail0")
    late = start("c")
    late.ask("claim soft0")
    assert [port.ask("filter soft0 tx", SEND_ONLY) for port in (one, two, late)] == ["drop"] * 3
    assert one.ask("filter soft1 rx", SEND_ONLY) == "pass"
    assert one.ask("events soft0") == "events" and one.ask("state soft0") == "link up alive 1"
    faults.switch_up("rail0", "b")
    assert [port.ask("filter soft0 tx", SEND_ONLY) for port in (one, two)] == ["drop", "pass"]
    faults.switch_up("rail0")
    assert [port.ask("filter soft0 tx", SEND_ONLY) for port in (one, two, late)] == ["pass"] * 3
    faults.switch_down("rail1", "b")
    assert [port.ask("filter soft1 rx", SEND_ONLY) for port in (one, two)] == ["pass", "drop"]
    one.end(), two.end(), late.end()


def test_rule_nth_and_count(start: Callable[..., Port]) -> None:
    one = start()
    one.ask("claim soft0")
    rule = faults.drop("a/soft0", direction="rx", opcode="ack", nth=3, count=2)
    assert one.ask("repeat 5 soft0 rx", ACK, NAK) == "drops 0 of 5, first at 0"
    assert one.ask("repeat 5 soft0 rx", ACK, RNR_NAK) == "drops 0 of 5, first at 0"
    assert one.ask("repeat 5 soft0 tx", ACK, ACK_OK) == "drops 0 of 5, first at 0"
    assert one.ask("repeat 5 soft0 rx", SEND_ONLY) == "drops 0 of 5, first at 0"
    assert one.ask("repeat 10 soft0 rx", ACK, ACK_OK) == "drops 2 of 10, first at 3"
    found = faults.rule(rule)
    assert found.matched == 4 and found.fired == 2 and found.done and found.fired_ns > 0
    faults.undrop(rule)
    with pytest.raises(faults.FaultError, match=f"no rule {rule}"):
        faults.undrop(rule)
    one.end()


@pytest.mark.parametrize(
    ("opcode", "packet", "fits"),
    [
        ("any", (UD,), True),
        ("send", (SEND_ONLY_IMM,), True),
        ("send", (WRITE_FIRST,), False),
        ("send_imm", (SEND_ONLY,), False),
        ("send_imm", (SEND_ONLY_IMM,), True),
        ("write", (WRITE_FIRST,), True),
        ("write", ("0x0b",), True),
        ("write_imm", ("0x0a",), False),
        ("write_imm", ("0x09",), True),
        ("read_request", ("0x0c",), True),
        ("read_response", ("0x0e",), True),
        ("read_response", ("0x0c",), False),
        ("nak", (ACK, NAK), True),
        ("nak", (ACK, ACK_OK), False),
        ("rnr_nak", (ACK, RNR_NAK), True),
        ("atomic", ("0x13",), True),
        ("atomic", ("0x12",), False),
        ("atomic_ack", ("0x12",), True),
        ("ud", (UD,), True),
        ("ud", (SEND_ONLY,), False),
        ("request", ("0x14",), True),
        ("request", (ACK, ACK_OK), False),
        ("response", ("0x10",), True),
        ("response", (SEND_ONLY,), False),
        ("RC_SEND_ONLY", (SEND_ONLY,), True),
        ("RC_SEND_ONLY", (SEND_ONLY_IMM,), False),
        ("0x05", (SEND_ONLY_IMM,), True),
        ("0x05", (SEND_ONLY,), False),
    ],
)
def test_rule_opcodes(start: Callable[..., Port], opcode: str, packet: tuple[str, ...], fits: bool) -> None:
    one = start()
    one.ask("claim soft0")
    faults.drop("a/soft0", opcode=opcode)
    assert one.ask("filter soft0 tx", *packet) == ("drop" if fits else "pass")
    one.end()


def test_rule_details(start: Callable[..., Port]) -> None:
    one, two = start("a"), start("b")
    one.ask("claim soft0"), two.ask("claim soft0")
    # Messages are counted by their last packets.
    rule = faults.drop("a/soft0", opcode="write", per_message=True, nth=2)
    answers = [
        one.ask("filter soft0 tx", opcode) for opcode in (WRITE_FIRST, WRITE_LAST, WRITE_FIRST, WRITE_LAST)
    ]
    assert answers == ["pass", "pass", "pass", "drop"]
    faults.undrop(rule)
    # The acknowledgement of the 3rd message, whichever packet carries it; MSN wraps at 2^24.
    rule = faults.drop("a/soft0", opcode="ack", msn=3, count=0)
    assert [one.ask("filter soft0 rx", ACK, ACK_OK, msn) for msn in (2, 3, 7, 0xFFFFFF)] == [
        "pass", "drop", "drop", "pass",
    ]  # fmt: skip
    faults.undrop(rule)
    faults.drop("a/soft0", qpn=17, count=0)
    assert [one.ask("filter soft0 rx", SEND_ONLY, 0, 0, qpn) for qpn in (16, 17)] == ["pass", "drop"]
    faults.clear(rules_only=True)
    faults.drop("a/soft0", peer="b", count=0)
    peers = ("127.32.1.1", "127.32.2.1", "127.32.9.1")
    assert [one.ask("filter soft0 rx", SEND_ONLY, 0, 0, 1, peer) for peer in peers] == [
        "pass",
        "drop",
        "pass",
    ]
    assert two.ask("filter soft0 rx", SEND_ONLY, 0, 0, 1, "127.32.2.1") == "pass", "b's packets are not a's"
    one.end(), two.end()


def test_rule_probability_is_seeded(start: Callable[..., Port]) -> None:
    one = start()
    one.ask("claim soft0")
    seen = []
    for seed in (7, 7, 8):
        rule = faults.drop("a/soft0", probability=0.25, seed=seed, count=0)
        seen.append([one.ask("repeat 1 soft0 tx", SEND_ONLY) for _ in range(40)])
        lost = 40 - sum("drops 0" in answer for answer in seen[-1])
        assert faults.rule(rule).fired == lost
        assert one.ask("repeat 4000 soft0 tx", SEND_ONLY)
        assert 850 < faults.rule(rule).fired < 1170
        faults.undrop(rule)
    assert seen[0] == seen[1] != seen[2]
    one.end()


def test_rule_then_down_lets_nothing_through(start: Callable[..., Port]) -> None:
    """The acknowledgement is lost and the port goes down in one step: no packet passes in between."""
    one = start()
    one.ask("claim soft0")
    rule = faults.drop("a/soft0", direction="rx", opcode="ack", nth=2, then="down")
    assert one.ask("repeat 2 soft0 rx", ACK, ACK_OK) == "drops 1 of 2, first at 2"
    assert one.ask("filter soft0 tx", SEND_ONLY) == "drop"
    assert one.ask("wait soft0") == "readable" and one.ask("events soft0") == "events port_err"
    device = faults.device("a/soft0")
    assert not device.link_up and device.changed_ns <= faults.rule(rule).fired_ns + 10**9
    faults.clear("a/soft0")
    assert faults.status().rules == () and faults.device("a/soft0").link_up
    assert one.ask("filter soft0 tx", SEND_ONLY) == "pass"
    one.end()


@pytest.mark.parametrize("then", ["kill", "switch-down"])
def test_rule_then_elsewhere(start: Callable[..., Port], then: str) -> None:
    one, two = start("a"), start("b")
    one.ask("claim soft0"), two.ask("claim soft1")
    faults.drop("a/soft0", opcode="send", count=2, then=then, then_target="b/soft1")
    assert one.ask("repeat 3 soft0 tx", SEND_ONLY) == "drops 2 of 3, first at 1"
    assert two.ask("filter soft1 tx", SEND_ONLY) == "drop"
    assert two.ask("events soft1") == ("events device_fatal" if then == "kill" else "events")
    assert one.ask("filter soft0 tx", SEND_ONLY) == "pass"
    one.end(), two.end()


def test_one_rule_counts_over_all_processes(start: Callable[..., Port]) -> None:
    one, two = start(), start()
    one.ask("claim soft0"), two.ask("claim soft0")
    faults.drop("a/soft0", nth=3)
    answers = [port.ask("filter soft0 tx", SEND_ONLY) for port in (one, two, one, two)]
    assert answers == ["pass", "pass", "drop", "pass"]
    one.end(), two.end()


def test_too_many_rules(start: Callable[..., Port]) -> None:
    faults.register("a")
    for _ in range(128):
        faults.drop("a/soft0")
    with pytest.raises(faults.FaultError, match="128 rules already"):
        faults.drop("a/soft0")
    assert len(faults.status().rules) == 128
    faults.clear()
    assert faults.status().rules == ()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"target": "c/soft0"}, r"unknown host 'c'; there are: a/soft0, a/soft1"),
        ({"target": "a/soft9"}, r"no device 'soft9'; there are: a/soft0, a/soft1"),
        ({"target": "a/mlx5_0"}, r"no device 'mlx5_0'"),
        ({"target": "soft0"}, r"write HOST/DEVICE"),
        ({"target": "x" * 500 + "/soft0"}, r"unknown host 'xxx"),
        ({"direction": "up"}, r"unknown direction 'up'"),
        ({"opcode": "acks"}, r"unknown opcode 'acks': there are any, send"),
        ({"opcode": "0xff"}, r"unknown opcode"),
        ({"nth": 0}, r"nth counts from 1"),
        ({"nth": -1}, r"nth=-1"),
        ({"count": 1 << 32}, r"count=4294967296"),
        ({"probability": 0.0}, r"probability"),
        ({"probability": float("nan")}, r"probability"),
        ({"qpn": 1 << 24}, r"qpn"),
        ({"peer": "z"}, r"unknown host 'z'"),
        ({"then": "explode"}, r"unknown consequence 'explode'"),
        ({"then": "down", "then_target": "b/soft0"}, r"unknown host 'b'"),
        ({"target": "a/soft0\0"}, r"is no name"),
    ],
)
def test_wrong_rules_are_refused(registry: Path, arguments: dict[str, object], message: str) -> None:
    faults.register("a")
    with pytest.raises(faults.FaultError, match=message):
        faults.drop(**{"target": "a/soft0", **arguments})  # type: ignore[arg-type]
    assert faults.status().rules == ()


@pytest.mark.parametrize("rail", ["rail16", "rail", "rail-1", "0", ""])
def test_wrong_rails_are_refused(registry: Path, rail: str) -> None:
    with pytest.raises(faults.FaultError, match="unknown rail"):
        faults.switch_down(rail)


def test_directory_of_others_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    monkeypatch.setenv("SOFTRNIC_DIR", str(shared))
    with pytest.raises(SoftrnicError, match="not be writable by others"):
        faults.status()
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    monkeypatch.setenv("SOFTRNIC_DIR", str(link))
    with pytest.raises(SoftrnicError, match="link"):
        faults.status()
    monkeypatch.setenv("SOFTRNIC_DIR", str(tmp_path / "no" / "such"))
    with pytest.raises(SoftrnicError, match="cannot create"):
        faults.status()


def test_foreign_state_file_is_refused(registry: Path) -> None:
    faults.register("a")
    state = next(registry.glob("state.*"))
    content = state.read_bytes()
    broken = registry / "broken"
    broken.mkdir(mode=0o700)
    for wrong in (b"x" * len(content), content[:100], b"\xff" + content[1:]):
        (broken / state.name).write_bytes(wrong)
        os.environ["SOFTRNIC_DIR"] = str(broken)  # the fixture restores it
        with pytest.raises(SoftrnicError, match="not a state file of this softrnic"):
            faults.status()


def test_long_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, port_program: Path) -> None:
    """Longer than a socket address: notifications arrive all the same."""
    directory = tmp_path / ("d" * 150)
    monkeypatch.setenv("SOFTRNIC_DIR", str(directory))
    one = Port(port_program, directory, "a", "1")
    try:
        assert one.ask("claim soft0").startswith("address")
        faults.down("a/soft0")
        assert one.ask("wait soft0") == "readable"
        one.end()
    finally:
        one.child.close()
    monkeypatch.setenv("SOFTRNIC_DIR", "/" + "d" * 300)
    with pytest.raises(SoftrnicError, match="longer than"):
        faults.status()


@pytest.mark.parametrize(
    ("softrnic", "answer"),
    [
        ("0", "host a devices"),
        ("1", "host a devices soft0:loopback soft1:loopback"),
        ("3", "host a devices soft0:loopback soft1:loopback soft2:loopback"),
        ("null", "host a devices soft0:null soft1:null"),
        ("null:1", "host a devices soft0:null"),
        ("soft1@127.0.0.5;soft0@netdev:eth0;", "host a devices soft0:netdev:eth0 soft1:address/127.0.0.5"),
        ("soft3;soft2@netdev:eth0/10.0.0.1", "host a devices soft2:netdev:eth0/10.0.0.1 soft3:loopback"),
        ("soft0@null;soft1@loopback", "host a devices soft0:null soft1:loopback"),
        ("2x", "error SOFTRNIC=2x: expected 0, 1"),
        ("17", "error SOFTRNIC=17: expected"),
        ("-1", "error SOFTRNIC=-1: expected"),
        ("null:0", "error SOFTRNIC=null:0: expected"),
        ("softx", "error SOFTRNIC=softx: expected"),
        ("on", "error SOFTRNIC=on: expected"),
        ("nul", "error SOFTRNIC=nul: expected"),
        ("soft16", "error SOFTRNIC=soft16: 'soft16' is no device name: soft0 to soft15"),
        ("mlx5_0", "host a devices mlx5_0:loopback"),
        ("roce;", "host a devices roce:loopback"),
        ("mlx5_1;mlx5_0;", "host a devices mlx5_1:loopback mlx5_0:loopback"),
        (
            "mlx5_0@null;eth-0.1@127.0.0.5;soft2",
            "host a devices mlx5_0:null eth-0.1:address/127.0.0.5 soft2:loopback",
        ),
        (LONG_NAME + ";m", f"host a devices {LONG_NAME}:loopback m:loopback"),
        (";".join(MANY_NAMES), "host a devices " + " ".join(f"{name}:loopback" for name in MANY_NAMES)),
        (
            LONG_NAME + "n;m",
            f"error SOFTRNIC={LONG_NAME}n;m: '{LONG_NAME}n' is no device name: it is longer than 63",
        ),
        (
            "a/b;c",
            "error SOFTRNIC=a/b;c: 'a/b' is no device name: it has a character that is white space, '/'",
        ),
        ("a;b\x7f", "error SOFTRNIC=a;b\x7f: 'b\x7f' is no device name: it has a character"),
        ("mlx5_0;mlx5_é", "error SOFTRNIC=mlx5_0;mlx5_é: 'mlx5_é' is no device name: it has a character"),
        (".;..", "error SOFTRNIC=.;..: '.' is no device name: it is a directory's"),
        ("a;..", "error SOFTRNIC=a;..: '..' is no device name: it is a directory's"),
        ("0;1", "error SOFTRNIC=0;1: '0' is no device name: write a name like mlx5_0"),
        ("mlx5_0;null", "error SOFTRNIC=mlx5_0;null: 'null' is no device name"),
        (";", "error SOFTRNIC=;: '' is no device name"),
        ("mlx5_0;mlx5_1;mlx5_0", "error SOFTRNIC=mlx5_0;mlx5_1;mlx5_0: device mlx5_0 is described twice"),
        (
            "soft1;mlx5_1",
            "error SOFTRNIC=soft1;mlx5_1: soft1 and mlx5_1 are both on rail1: soft<N> is on rail<N>",
        ),
        ("m;" * 15 + "m", f"error SOFTRNIC={'m;' * 15}m: device m is described twice"),
        (
            ";".join("abcdefghijklmnopq"),
            "error SOFTRNIC=a;b;c;d;e;f;g;h;i;j;k;l;m;n;o;p;q: more than 16 devices",
        ),
        ("soft0;soft0", "error SOFTRNIC=soft0;soft0: device soft0 is described twice"),
        ("soft0;;soft1", "error SOFTRNIC=soft0;;soft1: '' is no device name"),
        ("soft0@netdev:", "error SOFTRNIC=soft0@netdev:: device soft0: '' is no name of a network interface"),
        ("soft0@1.2.3", "error SOFTRNIC=soft0@1.2.3: device soft0: '1.2.3' is neither an IPv4 address"),
        ("soft0@0.0.0.0", "error SOFTRNIC=soft0@0.0.0.0: device soft0: '0.0.0.0' is neither"),
        ("soft0@" + "n" * 1500, "error SOFTRNIC=soft0@nnn"),
    ],
)
def test_configuration(start: Callable[..., Port], softrnic: str, answer: str) -> None:
    one = start()
    said = one.ask("parse", softrnic)
    assert said == answer or (answer.startswith("error") and said.startswith(answer))
    one.end()


def test_names_of_devices(start: Callable[..., Port]) -> None:
    """Each host calls its devices as it likes; the rail is the place, and a fault is by the name."""
    one, two = start("a", "mlx5_0;mlx5_1"), start("b", "2")
    assert one.ask("claim mlx5_1") == "address 127.33.1.1 slot 1 link up"
    assert two.ask("claim soft1") == "address 127.33.2.1 slot 1 link up"
    assert [(d.name, d.rail) for d in faults.status().devices] == [
        ("a/mlx5_0", "rail0"),
        ("a/mlx5_1", "rail1"),
        ("b/soft0", "rail0"),
        ("b/soft1", "rail1"),
    ]
    faults.down("a/mlx5_1")
    assert one.ask("state mlx5_1").startswith("link down") and two.ask("state soft1").startswith("link up")
    rule = faults.drop("a/mlx5_0", then="down", then_target="b/soft1")
    assert (faults.rule(rule).target, faults.rule(rule).then_target) == ("a/mlx5_0", "b/soft1")
    with pytest.raises(
        faults.FaultError, match="host 'a' has no device 'soft1'; there are: a/mlx5_0, a/mlx5_1, b/"
    ):
        faults.down("a/soft1")
    one.end()


def test_a_host_is_known_by_the_names_it_was_given_last(start: Callable[..., Port]) -> None:
    one = start("a", "mlx5_0;mlx5_1;mlx5_2")
    assert one.ask("claim mlx5_0").startswith("address")
    for config, names in (
        ("mlx5_1;mlx5_0", ["mlx5_1", "mlx5_0", "mlx5_2"]),  # exchanged
        ("mlx5_2", ["mlx5_2", "mlx5_0", "soft2"]),  # a name is one device's
        ('q"\\;%s', ['q"\\', "%s", "soft2"]),
    ):
        faults.register("a", config)
        assert [d.device for d in faults.status().devices] == names
    faults.down('a/q"\\')
    assert one.ask("state mlx5_0").startswith("link down"), "it is the same NIC"
    rule = faults.drop('a/q"\\')
    assert faults.rule(rule).target == faults.rule(rule).then_target == 'a/q"\\'
    one.end()


def test_host_names(start: Callable[..., Port]) -> None:
    one = start()
    assert one.ask("parse 1 node-1.rack_2").startswith("host node-1.rack_2 devices")
    assert one.ask("parse 1 a/b").startswith("error SOFTRNIC_HOST=a/b")
    assert one.ask("parse 1", "h" * 32).startswith("error SOFTRNIC_HOST=hhh")
    one.end()


def test_wrong_configuration_offers_no_devices(port_program: Path, registry: Path, spawn: Spawn) -> None:
    child = spawn(program=str(port_program), softrnic="many")
    assert child.wait() == 3
    assert (
        child.output.startswith("softrnic: SOFTRNIC=many: expected") and child.output.count("softrnic:") == 1
    )
    child = spawn(program=str(port_program), softrnic="1", env={"SOFTRNIC_KEYS": "old"})
    assert child.wait() == 3
    assert child.output.startswith("softrnic: SOFTRNIC_KEYS=old: expected reuse")
    assert child.output.count("softrnic:") == 1
