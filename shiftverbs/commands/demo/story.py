# SPDX-License-Identifier: BSD-3-Clause
"""One cable, before and after: the demo's first half minute, told line by line as it happens."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any, Protocol

from shiftverbs.commands.demo.host import DemoError, HostPair
from shiftverbs.commands.demo.network import Network
from shiftverbs.commands.demo.options import Plan
from shiftverbs.commands.demo.report import RateMeter
from shiftverbs.commands.demo.scenario import Lab, Stage
from shiftverbs.commands.demo.traffic import Send

__all__ = ["Story"]

TRAFFIC, FAULT, HOST = "send", "initiator_port", "a"
FLOWING = (Stage.PLAIN, Stage.HOME, Stage.AWAY, Stage.HOME_AGAIN)
CLOCK = "{:6.1f} s  "
CLOCK_WIDTH = len(CLOCK.format(0))


class Say(Protocol):
    """Print one paragraph at once, wrapped; hang: columns that its further lines are indented by."""

    def __call__(self, text: str, hang: int = 0) -> None: ...


class Story:
    """The same program and the same cable with plain pyverbs and with shiftverbs.

    plan: of the whole demo; phases take plan.story_s seconds each. Every figure told is this run's own.
    """

    def __init__(self, plan: Plan, network: Network, etcd: str, say: Say) -> None:
        s = plan.story_s
        self._plan = replace(plan, warm_s=s, fault_s=s, home_s=s, baseline_s=s, reconnect=True)
        self._say = say
        self._device = network.device(HOST)
        self._lab = Lab(self._plan, network, etcd, self.phase, self.tick)
        self._stage = ""
        self._begin()

    @property
    def logs(self) -> list[str]:
        """What the hosts wrote, where the plan is verbose."""
        return self._lab.logs

    def tell(self) -> bool:
        """Run it. Returns whether plain pyverbs died and shiftverbs went on, nothing lost."""
        self._say("One cable, before and after")
        self._say(
            f"Two hosts, a and b, with a backup NIC each. A program on a SENDs messages of {Send.SIZE // 1024} KiB to "
            f"b over one RC QP, and b checks every byte. Then the cable of {HOST}'s {self._device} is pulled.\n"
        )
        try:
            before = self._before()
            self._lab.end_hosts()
            after = self._after()
        finally:
            self._lab.end_hosts()
        return before and after

    def _begin(self) -> None:
        self._began = self._next_line = time.monotonic()
        self._pair: HostPair | None = None
        self._meter = RateMeter()

    def _line(self, text: str) -> None:
        self._say(CLOCK.format(time.monotonic() - self._began) + text, CLOCK_WIDTH)

    def _report(self, host: int) -> dict[str, Any]:
        return self._pair.both[host].report if self._pair is not None else {}

    @property
    def _path(self) -> str:
        shift = self._report(0).get("shift")
        return shift["path"] if shift else self._device

    @property
    def _checked(self) -> int:
        return self._report(1).get("checked", 0)

    def _before(self) -> bool:
        self._say("Before: the program imports pyverbs")
        self._begin()
        try:
            result = self._lab.run_baseline(TRAFFIC, FAULT)
        except DemoError as error:
            self._line(f"FAILED to run: {error}\n")
            return False
        if result.problem is not None:
            self._line(f"FAILED: {result.problem}\n")
        elif result.survived:
            self._line("FAILED: the stream goes on, so the fault was none\n")
        elif result.error_ms is None:
            self._line(f"{result.error}: the stream stands still\n")
        else:
            self._line(
                f"{result.error}, {result.error_ms:.0f} ms after the cable: the QP is dead, and the stream with it, "
                f"behind message {self._checked:,}\n"
            )
        return result.ok

    def _after(self) -> bool:
        self._say("After: it imports shiftverbs, and nothing else is changed")
        self._begin()
        result = self._lab.run(TRAFFIC, FAULT)
        if result.ok:
            self._line(
                f"{result.messages:,} messages, {result.bytes / 1e6:,.0f} MB, every byte checked: lost {result.lost}, "
                f"duplicated {result.duplicated}, reordered {result.reordered}, corrupt {result.corrupt}\n"
            )
        else:
            self._line(f"FAILED: {result.problem}\n")
        return result.ok

    def phase(self, text: str) -> None:
        """What the lab does now, in the story's words."""
        now = self._lab.current
        self._stage = text
        if text in (Stage.FAULT, Stage.PLAIN_FAULT):
            self._line(f"the cable of {HOST}'s {self._device} is pulled")
        elif text == Stage.HOME:
            self._line(f"PROTECTED: on {self._path}, with a backup connected")
        elif text == Stage.AWAY and now is not None:
            if now.detect_ms is not None and now.fallback_ms is not None:
                self._line(
                    f"the stream goes on, on {self._path}: a gap of {now.detect_ms + now.fallback_ms:.1f} ms from the "
                    f"cable to the first completion there ({now.detect_ms:.1f} ms of it until it was noticed)"
                )
        elif text == Stage.HEALED:
            self._line("the cable is back")
        elif text == Stage.HOME_AGAIN and now is not None:
            if now.failback_ms is not None:
                self._line(f"home on {self._path}, {now.failback_ms:.1f} ms after that")
        elif not isinstance(text, Stage) or text == Stage.AGAIN:
            self._line(text)
        self._next_line = time.monotonic() + 1

    def tick(self, pair: HostPair) -> None:
        """Throughput, once a second while the stream flows."""
        self._pair = pair
        now = time.monotonic()
        self._meter.update(self._report(1).get("bytes", 0), now)
        if now >= self._next_line and self._stage in FLOWING and self._checked:
            self._next_line = now + 1
            self._line(f"{self._path}  {self._meter.rate() / 1e6:6.1f} MB/s  {self._checked:9,} messages")
