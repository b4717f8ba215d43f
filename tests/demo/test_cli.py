# SPDX-License-Identifier: BSD-3-Clause
"""The command line's arguments, and the form of the demo's JSON file."""

import io
import json
import re
import subprocess
import sys

import pytest

from shiftverbs import cli
from shiftverbs.demo import options
from shiftverbs.demo.options import FAULTS, TRAFFIC, plan_from
from shiftverbs.demo.report import PlainView, RateMeter, make_view, to_json, write_json
from shiftverbs.demo.scenario import BaselineResult, ScenarioResult


def parse(*arguments):
    import argparse

    parser = argparse.ArgumentParser()
    options.add_arguments(parser)
    return plan_from(parser.parse_args(arguments))


def test_default_plan_is_everything():
    plan = parse()
    assert plan.traffic == ("write_imm", "send", "read")
    assert plan.faults == ("initiator_port", "responder_port", "switch", "ack_lost")
    assert plan.baseline and not plan.plain


@pytest.mark.parametrize(
    "arguments",
    [
        ("--traffic", "send,read", "--fault", "switch"),
        ("--traffic", "read", "--traffic", "send", "--fault", "switch,switch"),
    ],
)
def test_selection_keeps_the_order(arguments):
    plan = parse(*arguments)
    assert (plan.traffic, plan.faults) == (("send", "read"), ("switch",))


def test_quick_is_shorter_and_seconds_wins():
    assert parse("--quick").warm_s < parse().warm_s
    assert parse("--quick", "--seconds", "0.7").fault_s == 0.7


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--traffic", "udp"], "'udp' is none of write_imm, send, read"),
        (["demo", "--fault", "switch,fire"], "'fire' is none of"),
        (["demo", "--seconds", "soon"], "not a number"),
        (["demo", "--seconds", "0"], "not between"),
        (["demo", "--device", "mlx5_0"], "invalid choice"),
        (["demo", "--json"], "expected one argument"),
        (["demo", "extra"], "unrecognized"),
        ([], "required"),
        (["fly"], "invalid choice"),
    ],
)
def test_bad_arguments(capsys, arguments, message):
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_no_directory_for_the_json(capsys):
    assert cli.main(["demo", "--json", "/nowhere/at/all.json"]) == 2
    assert "/nowhere/at/all.json" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--help"], ["demo", "--help"], ["run", "--help"], ["version"]])
def test_help_and_version_work_as_commands(arguments):
    done = subprocess.run(
        [sys.executable, "-m", "shiftverbs", *arguments], capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 0, done.stderr
    assert "shiftverbs" in done.stdout


def test_version_names_pyverbs_release():
    done = subprocess.run(
        [sys.executable, "-m", "shiftverbs", "version"], capture_output=True, text=True, timeout=30
    )
    assert re.fullmatch(r"shiftverbs \d+\.\d+\.\d+, pyverbs \d+\.\d+, Python 3\.\d+\.\d+\S*\n", done.stdout), done


def results():
    good = ScenarioResult(
        "write_imm", "initiator_port", messages=10, bytes=655360, detect_ms=1.5, fallback_ms=2.25, failback_ms=30.0,
        states=["DEFAULT", "FALLBACK", "WAIT_SIGNALED", "WAIT_DRAINED", "DEFAULT"], ok=True,
    )  # fmt: skip
    bad = ScenarioResult("read", "ack_lost", lost=1, problem="message 3 came where 2 was next")
    return [good, bad], [BaselineResult("send", "switch", False, "RETRY_EXC_ERR", 71.0)]


def test_json_has_exactly_the_documented_form(tmp_path):
    path = tmp_path / "out.json"
    write_json(str(path), to_json(*results()))
    content = json.loads(path.read_text())
    assert set(content) == {"scenarios", "baseline"}
    for scenario in content["scenarios"]:
        assert list(scenario) == [
            "traffic", "fault", "messages", "bytes", "lost", "duplicated", "reordered", "corrupt",
            "detect_ms", "fallback_ms", "failback_ms", "states", "ok",
        ]  # fmt: skip
        assert scenario["traffic"] in TRAFFIC and scenario["fault"] in FAULTS
        for name in ("messages", "bytes", "lost", "duplicated", "reordered", "corrupt"):
            assert type(scenario[name]) is int
        for name in ("detect_ms", "fallback_ms", "failback_ms"):
            assert scenario[name] is None or type(scenario[name]) is float
        assert type(scenario["ok"]) is bool
    assert content["baseline"] == [
        {"traffic": "send", "fault": "switch", "survived": False, "error": "RETRY_EXC_ERR"}
    ]


def test_plain_view_shows_tables_problems_and_verdict():
    out = io.StringIO()
    view = make_view(plain=True, out=out)
    assert isinstance(view, PlainView)
    view.open(3)
    scenarios, baseline = results()
    for result in (*scenarios, *baseline):
        view.begin("x")
        view.phase("y")
        view.result(result)
    view.close()
    view.summary(12.0)
    text = out.getvalue()
    assert "RETRY_EXC_ERR" in text and "71.0" in text
    assert "read / ack_lost: message 3 came where 2 was next" in text
    assert "shiftverbs: 1 of 2 scenarios verified; plain pyverbs died in 1 of 1 (12 s)" in text


def test_live_view_draws_and_closes(monkeypatch):
    import rich.console as rich_console

    from shiftverbs.demo.report import LiveView

    monkeypatch.setenv("TERM", "xterm-256color")  # rich draws nothing live on a dumb one
    view = LiveView()
    out = io.StringIO()
    view.console = view._live.console = rich_console.Console(file=out, force_terminal=True, width=150)
    view.open(3)
    for result in results()[0]:
        view.begin("title of it")
        view.phase("doing")
        view.meter.update(10**6, 1.0)
        view.meter.update(3 * 10**6, 2.0)
        view.result(result)
    view._live.refresh()
    view.close()
    view.summary(3.0)
    text = out.getvalue()
    assert "title of it" in text and "MB/s" in text and "FAILED" in text and "1 of 2 scenarios" in text


def test_rate_meter_counts_bytes_per_second_and_survives_new_counters():
    meter = RateMeter()
    for tenth in range(31):
        meter.update(tenth * 1000, tenth / 10)
    assert meter.rate() == pytest.approx(10_000)
    meter.update(5, 3.2)
    assert meter.rate() == 0
    assert len(meter.sparkline()) == len(meter.history)
