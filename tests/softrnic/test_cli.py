# SPDX-License-Identifier: BSD-3-Clause
"""`python -m shiftverbs.softrnic`, and how the library gets into a process."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from harness import ROOT, Spawn, child_env

from shiftverbs import softrnic
from shiftverbs.softrnic import faults
from shiftverbs.softrnic.__main__ import main


@pytest.fixture(autouse=True)
def registry(softrnic_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every command here acts on the test's own network."""
    monkeypatch.setenv("SOFTRNIC_DIR", str(softrnic_dir))
    monkeypatch.delenv("SOFTRNIC", raising=False)
    monkeypatch.delenv("SOFTRNIC_HOST", raising=False)
    return softrnic_dir


def test_faults_from_a_shell(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    assert "no host has used softrnic" in capsys.readouterr().out
    assert main(["register", "a"]) == 0 and main(["register", "b", "--config", "3"]) == 0
    assert main(["down", "a/soft0", "b/soft2"]) == 0
    assert main(["kill", "b/soft1"]) == 0
    assert main(["switch-down", "rail1", "--host", "a"]) == 0
    capsys.readouterr()
    assert [(d.name, d.link_up, d.dead, d.switch_up) for d in faults.status().devices] == [
        ("a/soft0", False, False, True),
        ("a/soft1", True, False, False),
        ("b/soft0", True, False, True),
        ("b/soft1", True, True, True),
        ("b/soft2", False, False, True),
    ]
    assert main(["list"]) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[1].split() == ["a/soft0", "rail0", "down", "up", "-"]
    assert table[4].split() == ["b/soft1", "rail1", "dead", "up", "-"]
    assert main(["up", "a/soft0"]) == 0 and main(["revive", "b/soft1"]) == 0
    assert main(["switch-up", "rail1"]) == 0
    assert faults.device("a/soft0").link_up and not faults.device("b/soft1").dead
    assert faults.device("a/soft1").switch_up
    assert main(["clear"]) == 0
    assert faults.device("b/soft2").link_up


def test_rules_from_a_shell(capsys: pytest.CaptureFixture[str]) -> None:
    main(["register", "a"])
    command = "drop a/soft0 --direction rx --opcode ack --nth 3 --count 1 --then down --qpn 0x11 --msn 4"
    assert main(command.split()) == 0
    said = capsys.readouterr()
    rule = faults.rule(int(said.out))
    assert said.err == f"a/soft0: loses packets ({faults.status().directory}; open in no process)\n"
    assert (rule.target, rule.direction, rule.opcode) == ("a/soft0", "rx", "ack")
    assert (rule.nth, rule.count, rule.then, rule.then_target) == (3, 1, "down", "a/soft0")
    assert (rule.qpn, rule.msn, rule.fired, rule.done) == (17, 4, 0, False)
    assert main("drop a/soft1 --probability 0.5 --seed 9 --count 0 --per-message".split()) == 0
    other = faults.rule(int(capsys.readouterr().out))
    assert other.probability == pytest.approx(0.5) and other.seed == 9 and other.per_message
    assert main(["list"]) == 0
    out = capsys.readouterr().out
    assert "nth=3 count=1 qpn=0x11 msn=4" in out and "probability=0.5 seed=9" in out
    assert main(["undrop", str(rule.id)]) == 0
    assert main(["clear", "a/soft0", "--rules"]) == 0
    assert [r.id for r in faults.status().rules] == [other.id]
    capsys.readouterr()
    assert main(["list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rules"][0]["id"] == other.id


def test_late_packets_and_standstill_from_a_shell(capsys: pytest.CaptureFixture[str]) -> None:
    main(["register", "a"])
    for command, action, delay_us in (
        ("delay a/soft0 --ms 1.5 --opcode ack", "delay", 1500),
        ("duplicate a/soft0 --direction tx", "duplicate", 0),
        ("reorder a/soft0 --count 0", "reorder", 20000),
    ):
        assert main(command.split()) == 0
        rule = faults.rule(int(capsys.readouterr().out))
        assert (rule.action, rule.delay_us) == (action, delay_us)
    assert main(["stall", "a/soft0"]) == 0 and main(["hang", "a/soft0", "a/soft1"]) == 0
    assert main(["list"]) == 0
    table = capsys.readouterr().out
    assert "up,stalled,hung" in table and "delay 1.5ms" in table and "reorder 20ms" in table
    assert main(["unstall", "a/soft0"]) == 0 and main(["unhang", "a/soft1"]) == 0
    assert [(d.stalled, d.commands_hang) for d in faults.status().devices] == [(False, True), (False, False)]
    assert main(["slow", "a/soft0", "a/soft1", "--ms", "0.25"]) == 0 and main(["list"]) == 0
    table = capsys.readouterr().out
    assert "a/soft1: a command takes 0.25 ms" in table and ",0.25ms" in table
    assert main(["slow", "a/soft1", "--ms", "0"]) == 0
    assert [device.command_us for device in faults.status().devices] == [250, 0]
    assert main(["clear"]) == 0
    assert not faults.device("a/soft0").commands_hang and faults.status().rules == ()
    assert not faults.device("a/soft0").command_us


def test_whose_it_was_is_told(registry: Path, spawn: Spawn, capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever pulls a cable learns whose: every program that shares the directory loses it, other shells' too."""

    def said(command: str) -> list[str]:
        assert main(command.split()) == 0
        return capsys.readouterr().out.splitlines()

    names = "mlx5_0;mlx5_1"
    one, two = (spawn("-c", OPEN_DEVICE, "mlx5_0", softrnic=names, host="a") for _ in range(2))
    other = spawn("-c", OPEN_DEVICE, "mlx5_0", "mlx5_0", softrnic=names, host="b")
    for child in (one, two, other):
        child.expect("^open$", 60)
    pids = ", ".join(map(str, sorted((one.pid, two.pid))))
    assert said("down a/mlx5_0 a/mlx5_1") == [
        f"a/mlx5_0: cable pulled ({registry}; open in 2 processes: {pids})",
        f"a/mlx5_1: cable pulled ({registry}; open in no process)",
    ]
    assert said("kill b/mlx5_0") == [f"b/mlx5_0: killed ({registry}; open in 1 process: {other.pid})"]
    for name, words in {
        "up": "cable plugged in",
        "stall": "stands still",
        "unhang": "commands return",
    }.items():
        assert said(f"{name} a/mlx5_1") == [f"a/mlx5_1: {words} ({registry}; open in no process)"]
    assert said("switch-down rail0") == [
        f"a/mlx5_0: the switch loses its packets ({registry}; open in 2 processes: {pids})",
        f"b/mlx5_0: the switch loses its packets ({registry}; open in 1 process: {other.pid})",
    ]
    assert said("switch-up rail0 --host b") == [
        f"b/mlx5_0: the switch forwards its packets ({registry}; open in 1 process: {other.pid})"
    ]
    told = f"rail7: the switch loses its packets ({registry}; no host has a device there)"
    assert said("switch-down rail7") == [told]
    assert [line.split(" (")[0] for line in said("clear")] == [
        "a/mlx5_0: healed", "a/mlx5_1: healed", "b/mlx5_0: healed", "b/mlx5_1: healed"
    ]  # fmt: skip
    assert said("clear a/mlx5_0 --rules")[0].startswith("a/mlx5_0: rules removed (")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("down b/soft0", "unknown host 'b'; there are: a/soft0, a/soft1"),
        ("down a/soft5", "host 'a' has no device 'soft5'; there are: a/soft0, a/soft1"),
        ("down soft0", "write HOST/DEVICE"),
        ("switch-down rail77", "unknown rail 'rail77'"),
        ("switch-down rail0 --host q", "unknown host 'q'"),
        ("drop a/soft0 --opcode nothing", "unknown opcode 'nothing'"),
        ("drop a/soft0 --then what", "unknown consequence"),
        ("delay a/soft0 --ms 0", "a delay is greater than 0 and at most 60 s"),
        ("reorder a/soft0 --ms 60001", "a delay is greater than 0 and at most 60 s"),
        ("stall a/soft7", "host 'a' has no device 'soft7'"),
        ("undrop 99", "no rule 99"),
        ("clear z/soft0", "unknown host 'z'"),
        ("register a/b", "a host is 1 to 31"),
        ("register b --config nonsense", "SOFTRNIC=nonsense: expected"),
        ("env --host a*", "a host is"),
    ],
)
def test_wrong_requests(command: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["register", "a"])
    assert main(command.split()) == 2
    said = capsys.readouterr()
    assert said.err.startswith("softrnic: ") and message in said.err and said.out == ""


def test_unknown_command_and_real_exit_status(spawn: Spawn) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["explode"])
    assert exit_info.value.code == 2
    child = spawn("-m", "shiftverbs.softrnic", "down", "nobody/soft0", softrnic=None, host=None)
    assert child.wait() == 2
    assert "unknown host 'nobody'" in child.output


def test_env_is_for_a_shell(registry: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "--host", "b", "--preload"]) == 0
    lines = capsys.readouterr().out
    shell = subprocess.run(
        ["sh", "-c", f"{lines}\nenv"], capture_output=True, text=True, env={"PATH": "/bin"}
    )
    assert "SOFTRNIC=1\n" in shell.stdout and "SOFTRNIC_HOST=b\n" in shell.stdout
    assert f"SOFTRNIC_DIR={registry}\n" in shell.stdout
    assert f"LD_PRELOAD={softrnic.library_path()}" in shlex.split(lines)


def run_python(source: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", source],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=child_env(None, None, None, {"SOFTRNIC_DIR": faults.status().directory, **env}),
    )


OPEN_DEVICE = """
import sys
from shiftverbs import softrnic
softrnic.enable()
import pyverbs.device as d
contexts = [d.Context(name=name) for name in sys.argv[1:]]
print("open", flush=True)
sys.stdin.read()
"""
LIST_DEVICES = "import pyverbs.device as d; print([x.name.decode() for x in d.get_device_list()])"


def test_enable_before_pyverbs() -> None:
    done = run_python(f"from shiftverbs import softrnic; softrnic.enable('3'); {LIST_DEVICES}")
    assert done.stdout.strip().endswith("['soft0', 'soft1', 'soft2']"), done.stderr
    done = run_python(
        f"from shiftverbs import softrnic; softrnic.enable(); softrnic.enable(); {LIST_DEVICES}"
    )
    assert done.stdout.strip().endswith("['soft0', 'soft1']"), done.stderr
    done = run_python(f"from shiftverbs import softrnic; softrnic.enable('mlx5_1;mlx5_0'); {LIST_DEVICES}")
    assert done.stdout.strip().endswith("['mlx5_1', 'mlx5_0']"), done.stderr


def test_enable_after_pyverbs_is_refused() -> None:
    done = run_python(
        "import pyverbs.device\nfrom shiftverbs import softrnic\n"
        "try:\n    softrnic.enable()\nexcept softrnic.SoftrnicError as e:\n    print('refused:', e)"
    )
    assert "refused: softrnic must be enabled before pyverbs is imported" in done.stdout, done.stderr
    assert "pyverbs." in done.stdout and "LD_PRELOAD=" in done.stdout


def test_enable_behind_a_global_libibverbs_is_refused() -> None:
    done = run_python(
        "import ctypes; ctypes.CDLL('libibverbs.so.1', mode=ctypes.RTLD_GLOBAL)\n"
        "from shiftverbs import softrnic\n"
        "try:\n    softrnic.enable()\nexcept softrnic.SoftrnicError as e:\n    print('refused:', e)"
    )
    assert "refused: another library in this process defines the verbs already" in done.stdout, done.stderr


def test_importing_shiftverbs_enables_it() -> None:
    done = run_python(f"import shiftverbs; {LIST_DEVICES}", SOFTRNIC="1")
    assert done.stdout.strip().endswith("['soft0', 'soft1']"), done.stderr


def test_preload() -> None:
    done = run_python(LIST_DEVICES, SOFTRNIC="1", LD_PRELOAD=str(softrnic.library_path()))
    assert done.stdout.strip().endswith("['soft0', 'soft1']"), done.stderr


@pytest.mark.parametrize("value", [None, "", "0", "lots", "mlx5_0;mlx5_0"])
def test_without_devices_nothing_changes(value: str | None) -> None:
    """Not asked for, or asked for wrongly: what a program sees is what it sees without the library."""
    plain = run_python(LIST_DEVICES)
    env = {"LD_PRELOAD": str(softrnic.library_path())} | ({} if value is None else {"SOFTRNIC": value})
    done = run_python(LIST_DEVICES, **env)
    assert (done.returncode, done.stdout) == (plain.returncode, plain.stdout)
    assert done.stderr.count("softrnic: SOFTRNIC=lots: expected") == (value == "lots")
    assert ("device mlx5_0 is described twice; no devices" in done.stderr) == (value == "mlx5_0;mlx5_0")


def test_faults_need_no_pyverbs() -> None:
    done = run_python(
        "import sys; from shiftverbs.softrnic import faults; faults.register('a'); faults.down('a/soft0');"
        "print(faults.device('a/soft0').link_up, [m for m in sys.modules if m.startswith('pyverbs')])"
    )
    assert done.stdout.strip() == "False []", done.stderr


def test_library_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert softrnic.library_path().name == "libsoftrnic.so"
    monkeypatch.setenv("SOFTRNIC_LIBRARY", str(tmp_path / "none.so"))
    with pytest.raises(softrnic.SoftrnicError, match=r"none\.so does not exist: SOFTRNIC_LIBRARY names it"):
        softrnic.library_path()


def test_environment(tmp_path: Path) -> None:
    env = softrnic.environment("b", "3", tmp_path, base={"X": "1", "LD_PRELOAD": "other.so"}, preload=True)
    assert env["X"] == "1" and env["SOFTRNIC"] == "3" and env["SOFTRNIC_HOST"] == "b"
    assert env["SOFTRNIC_DIR"] == str(tmp_path)
    assert env["LD_PRELOAD"] == f"{softrnic.library_path()} other.so"
    kept = softrnic.environment(None, None, base={"SOFTRNIC_HOST": "c"})
    assert kept == {"SOFTRNIC_HOST": "c"}
