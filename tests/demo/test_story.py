# SPDX-License-Identifier: BSD-3-Clause
"""The story that the demo begins with: told from what happened, in 80 columns, and a failure is told as one."""

import io
import re

import pytest

from shiftverbs.commands.demo import main
from shiftverbs.commands.demo.etcd_server import EtcdServer
from shiftverbs.commands.demo.host import DemoError
from shiftverbs.commands.demo.network import SoftNetwork
from shiftverbs.commands.demo.options import Plan
from shiftverbs.commands.demo.report import PlainView
from shiftverbs.commands.demo.scenario import BaselineResult, ScenarioResult
from shiftverbs.commands.demo.story import Story

PLAN = Plan(("send",), ("switch",), warm_s=0.1, fault_s=0.1, home_s=0.1, story_s=1.2)


@pytest.fixture(autouse=True)
def eighty(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


def test_one_cable_before_and_after():
    out = io.StringIO()
    with SoftNetwork() as network, EtcdServer() as etcd:
        story = Story(PLAN, network, etcd.endpoint, PlainView(out).say)
        assert story.tell() is True
        result = story._lab.current
    text = out.getvalue()
    assert max(map(len, text.splitlines())) <= 80 and "…" not in text
    before, after = re.sub(r"\s+", " ", text).split("After: it imports shiftverbs")
    second = r"\d+\.\d s "
    in_order = (
        "One cable, before and after", "32 KiB", "Before: the program imports pyverbs",
        rf"{second} soft0 +\d+\.\d MB/s +[\d,]+ messages", rf"{second} the cable of a's soft0 is pulled",
        rf"{second} RETRY_EXC_ERR, \d+ ms after the cable: the QP is dead, .* behind message [\d,]+",
    )  # fmt: skip
    assert re.search(".*".join(part.replace("  ", " ") for part in in_order), before), text
    gap = result.detect_ms + result.fallback_ms
    in_order = (
        "PROTECTED: on soft0, with a backup connected", r"soft0 +\d+\.\d MB/s",
        "the cable of a's soft0 is pulled", rf"goes on, on soft1: a gap of {gap:.1f} ms .*\({result.detect_ms:.1f} ms",
        r"soft1 +\d+\.\d MB/s", "the cable is back", rf"home on soft0, {result.failback_ms:.1f} ms after that",
        r"soft0 +\d+\.\d MB/s", rf"{result.messages:,} messages, .* lost 0, duplicated 0, reordered 0, corrupt 0",
    )  # fmt: skip
    assert re.search(".*".join(in_order), after), text


class FailingLab:
    """A lab in which nothing is as it should be."""

    baseline = BaselineResult("send", "initiator_port", True, None)
    logs = []
    current = None

    def end_hosts(self):
        pass

    def run_baseline(self, traffic, fault):
        if isinstance(self.baseline, Exception):
            raise self.baseline
        return self.baseline

    def run(self, traffic, fault):
        return ScenarioResult(traffic, fault, problem="message 3 came where 2 was next", ok=False)


@pytest.mark.parametrize(
    ("baseline", "said"),
    [
        (BaselineResult("send", "initiator_port", True, None), "FAILED: the stream goes on, so the fault was none"),
        (BaselineResult("send", "initiator_port", False, None, problem="died early"), "FAILED: died early"),
        (BaselineResult("send", "initiator_port", False, "no completion within 10 s"), "the stream stands still"),
        (DemoError("host a ended with status -9"), "FAILED to run: host a ended with status -9"),
    ],
)  # fmt: skip
def test_a_story_that_goes_wrong_says_so(baseline, said):
    out = io.StringIO()
    with SoftNetwork() as network:
        story = Story(PLAN, network, "", PlainView(out).say)
        story._lab = FailingLab()
        story._lab.baseline = baseline
        assert story.tell() is False
    assert said in out.getvalue()
    assert "FAILED: message 3 came where 2 was next" in out.getvalue()


class NoStory:
    """A story that fails."""

    logs = ["a host's log"]

    def __init__(self, plan, network, etcd, say):
        pass

    def tell(self):
        return False


def test_a_failed_story_is_a_failed_demo(monkeypatch, capsys):
    from test_baseline import FakeLab

    monkeypatch.setattr(main, "Lab", FakeLab)
    monkeypatch.setattr(FakeLab, "problem", None)
    monkeypatch.setattr(main, "Story", NoStory)
    out = io.StringIO()
    plan = Plan(("send",), ("switch",), 0.1, 0.1, 0.1, story=True)
    assert main.run(plan, PlainView(out)) == 1
    assert "The story at the beginning is NOT verified" in out.getvalue()
    assert "a host's log" in capsys.readouterr().err
