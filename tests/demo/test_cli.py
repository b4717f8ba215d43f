# SPDX-License-Identifier: BSD-3-Clause
"""The command line's arguments, and the form of the demo's JSON file."""

import io
import json
import re
import subprocess
import sys
from collections import Counter

import pytest

from shiftverbs.commands import cli
from shiftverbs.commands.demo import options
from shiftverbs.commands.demo.options import FAULTS, TRAFFIC, plan_from
from shiftverbs.commands.demo.report import (
    PlainView,
    RateMeter,
    baseline_table,
    make_view,
    scenario_table,
    to_json,
    wrap,
    write_json,
)
from shiftverbs.commands.demo.scenario import BaselineResult, ScenarioResult


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
    ("arguments", "told"),
    [
        ((), True),
        (("--json", "x", "--seconds", "1"), True),
        (("--quick",), False),
        (("--traffic", "send"), False),
        (("--fault", "switch"), False),
        (("--no-baseline",), False),
        (("--device", "rxe"), False),
        (("--no-story",), False),
        (("--quick", "--story", "--device", "rxe"), True),
    ],
)
def test_the_story_is_told_where_everything_is_run(arguments, told):
    assert parse(*arguments).story is told


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
    assert re.fullmatch(
        r"shiftverbs \d+\.\d+\.\d+, pyverbs \d+\.\d+, Python 3\.\d+\.\d+\S*\n", done.stdout
    ), done


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

    from shiftverbs.commands.demo.report import LiveView

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


def many_results(number, text):
    """All twelve scenarios with figures of some size; text: what a baseline died of, and problems."""
    scenarios, baseline = [], []
    wrong = 0 if number < 100_000 else number
    for traffic in TRAFFIC:
        for fault in FAULTS:
            scenarios.append(
                ScenarioResult(
                    traffic, fault, number, number * 65536, wrong, wrong, wrong, wrong,
                    number / 10, number / 10, number / 10, ok=number < 10, problem=text,
                )
            )  # fmt: skip
            baseline.append(BaselineResult(traffic, fault, False, text, float(number), repeats=number % 3))
    baseline[-1].problem = text
    return scenarios, baseline


WORST = {
    "small": (1, "RETRY_EXC_ERR"),
    "usual": (45_678, "RETRY_EXC_ERR"),
    "large": (12_345_678, "post_send: Failed to post send: [Errno 12] Cannot allocate memory " * 3),
    "one long word": (999_999_999_999, "x" * 300 + "\n" + "{" * 200),
}


@pytest.mark.parametrize("width", [80, 60])
@pytest.mark.parametrize("name", WORST)
def test_tables_fit_and_nothing_is_cut(name, width):
    scenarios, baseline = many_results(*WORST[name])
    for lines, rows in (
        (
            scenario_table(scenarios, width),
            [[r.fault, f"{r.messages:,}", "ok" if r.ok else "FAILED"] for r in scenarios],
        ),
        (baseline_table(baseline, width), [[r.traffic, r.fault, f"{r.error_ms:.1f}"] for r in baseline]),
    ):
        assert max(map(len, lines)) <= width
        letters = Counter("".join(lines).replace(" ", ""))
        assert letters["…"] == 0
        assert not Counter("".join(cell for row in rows for cell in row).replace(" ", "")) - letters
    if name in ("small", "usual") and width == 80:
        assert len(scenario_table(scenarios, width)) == 3 + 3 + 12, "a line each, a heading for each traffic"


@pytest.mark.parametrize("columns", ["80", None])
@pytest.mark.parametrize("name", WORST)
def test_every_plain_line_fits_in_80_columns(monkeypatch, columns, name):
    """With COLUMNS, and without both that and a terminal."""
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr(sys, "__stdout__", io.StringIO())
    out = io.StringIO()
    view = PlainView(out)
    scenarios, baseline = many_results(*WORST[name])
    view.say("A long paragraph. " * 20, hang=4)
    for result in (*baseline, *scenarios):
        view.begin(f"{result.traffic} / {result.fault}, plain pyverbs")
        view.phase("plain pyverbs died of RETRY_EXC_ERR before its fault was given: no measurement")
        view.result(result)
    view.summary(1234.0)
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 80, max(lines, key=len)
    assert "…" not in out.getvalue()


@pytest.mark.parametrize("name", WORST)
def test_every_line_of_the_live_view_fits_in_80_columns(monkeypatch, name):
    import rich.console as rich_console

    from shiftverbs.commands.demo.report import LiveView

    monkeypatch.setenv("TERM", "xterm-256color")
    view = LiveView()
    out = io.StringIO()
    view.console = rich_console.Console(file=out, width=80)
    scenarios, baseline = many_results(*WORST[name])
    view.begin("write_imm / initiator_port, plain pyverbs")
    view.phase("plain pyverbs died of RETRY_EXC_ERR before its fault was given: no measurement")
    for second in range(80):
        view.meter.update(second * 10**8, float(second))
    for result in (*baseline, *scenarios):
        view.result(result)
        view.console.print(view._render())
    view.say("A long paragraph. " * 20, hang=4)
    view.summary(1234.0)
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 80, max(lines, key=len)
    assert "…" not in out.getvalue() and "NOT" in out.getvalue()


def test_wrapped_words_are_indented_and_none_is_lost():
    words = "   a few words that are too many for one line of thirty"
    assert wrap(words, 30) == ["   a few words that are too", "   many for one line of thirty"]
    assert wrap(words, 31, hang=6)[1].startswith("      m")
    assert wrap("", 30) == [""] and wrap("x\n\ny", 30) == ["x", "", "y"]
    assert "".join(wrap("y" * 95, 30)) == "y" * 95


def test_rate_meter_counts_bytes_per_second_and_survives_new_counters():
    meter = RateMeter()
    for tenth in range(31):
        meter.update(tenth * 1000, tenth / 10)
    assert meter.rate() == pytest.approx(10_000)
    meter.update(5, 3.2)
    assert meter.rate() == 0
    assert len(meter.sparkline()) == len(meter.history)
