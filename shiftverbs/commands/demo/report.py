# SPDX-License-Identifier: BSD-3-Clause
"""What the user sees: progress and throughput while it runs, then the tables; and the JSON file."""

from __future__ import annotations

import itertools
import json
import shutil
import sys
import textwrap
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from shiftverbs.commands.demo.host import HostPair
from shiftverbs.commands.demo.scenario import BaselineResult, ScenarioResult

__all__ = ["LiveView", "PlainView", "RateMeter", "View", "make_view", "to_json", "write_json"]

BARS = " ▁▂▃▄▅▆▇█"
SCENARIO_COLUMNS = (
    "", "messages", "MB", "lost", "dup", "re-\nord", "cor-\nrupt", "detect\nms", "fall-\nback\nms",
    "fail-\nback\nms", "",
)  # fmt: skip
SCENARIO_TITLE = "\nshiftverbs: RC traffic through failures"
BASELINE_TITLE = "\nplain pyverbs: same traffic, same faults"
BASELINE_COLUMNS = ("traffic", "fault", "died of", "after ms")
# Without a terminal, and without COLUMNS in the environment.
COLUMNS = 80


def columns() -> int:
    """Return how wide lines may be: COLUMNS, else the terminal's width, else 80."""
    return max(40, shutil.get_terminal_size((COLUMNS, 24)).columns)


def wrap(text: str, width: int, hang: int | None = None) -> list[str]:
    """Return lines of at most `width` columns; hang: indentation of further ones, by default that of their own.

    Nothing is cut: a word that is too long is folded.
    """
    lines: list[str] = []
    for line in text.split("\n"):
        if len(line) <= width:
            lines.append(line)
            continue
        own = len(line) - len(line.lstrip())
        further = " " * min(own if hang is None else hang, width // 2)
        folded = textwrap.wrap(
            line.strip(), width, initial_indent=line[: min(own, width // 2)], subsequent_indent=further
        )
        lines.extend(folded)
    return lines


def table(header: Sequence[str], rows: Sequence[Sequence[str]], left: int, width: int) -> list[str]:
    """Return rows as lines of at most `width` columns; the first `left` columns of them are flush left.

    Where it is too wide, the widest column's cells are wrapped until it fits.
    """
    every = [header, *rows]
    widths = [max(len(line) for row in every for line in row[n].split("\n")) for n in range(len(header))]
    gaps = len(widths) - 1
    while sum(widths) + gaps > width:
        widths[widths.index(max(widths))] -= 1
    gap = "  " if sum(widths) + 2 * gaps <= width else " "
    lines = []
    for row in every:
        cells = [
            [part for line in cell.split("\n") for part in textwrap.wrap(line, w) or [""]]
            for cell, w in zip(row, widths, strict=True)
        ]
        height = max(len(cell) for cell in cells)
        for cell in cells:
            # Headings stand on their column, cells hang from their row's top.
            missing = [""] * (height - len(cell))
            cell[:] = [*missing, *cell] if row is header else [*cell, *missing]
        for parts in zip(*cells, strict=True):
            padded = [
                part.ljust(w) if column < left else part.rjust(w)
                for column, (part, w) in enumerate(zip(parts, widths, strict=True))
            ]
            lines.append(gap.join(padded).rstrip())
    return lines


class RateMeter:
    """Bytes a second over the last WINDOW_S, from counters that both hosts report."""

    WINDOW_S = 1.0
    SLOT_S = 0.25

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()
        self.history: deque[float] = deque(maxlen=60)
        self._next_slot = 0.0
        self._slot_base = 0

    def update(self, total_bytes: int, now: float) -> None:
        """Take the current sum of the counters (smaller than before: the hosts are new ones)."""
        if self._samples and total_bytes < self._samples[-1][1]:
            self._samples.clear()
            self._slot_base = 0
        self._samples.append((now, total_bytes))
        while self._samples[-1][0] - self._samples[0][0] > self.WINDOW_S:
            self._samples.popleft()
        if now >= self._next_slot:
            self._next_slot = now + self.SLOT_S
            self.history.append(max(0, total_bytes - self._slot_base) / self.SLOT_S)
            self._slot_base = total_bytes

    def rate(self) -> float:
        """Bytes a second."""
        if len(self._samples) < 2:
            return 0.0
        (t0, b0), (t1, b1) = self._samples[0], self._samples[-1]
        return (b1 - b0) / (t1 - t0) if t1 > t0 else 0.0

    def sparkline(self) -> str:
        """The last 15 seconds as a line of bars."""
        top = max(self.history, default=0) or 1
        return "".join(BARS[round(value / top * (len(BARS) - 1))] for value in self.history)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _scenario_row(result: ScenarioResult) -> list[str]:
    return [
        " " + result.fault,
        f"{result.messages:,}",
        f"{result.bytes / 1e6:,.0f}",
        str(result.lost),
        str(result.duplicated),
        str(result.reordered),
        str(result.corrupt),
        _number(result.detect_ms),
        _number(result.fallback_ms),
        _number(result.failback_ms),
        "ok" if result.ok else "FAILED",
    ]


def scenario_table(results: Sequence[ScenarioResult], width: int) -> list[str]:
    """Return the table of scenarios with shiftverbs: a section for each kind of traffic."""
    rows: list[list[str]] = []
    for traffic, group in itertools.groupby(results, lambda result: result.traffic):
        rows.append([traffic, *[""] * (len(SCENARIO_COLUMNS) - 1)])
        rows.extend(_scenario_row(result) for result in group)
    return table(SCENARIO_COLUMNS, rows, 1, width)


def _said(result: BaselineResult) -> str:
    if result.problem is not None:
        return "NOT MEASURED"
    return "survived: the fault was none" if result.survived else result.error or "?"


def baseline_table(results: Sequence[BaselineResult], width: int) -> list[str]:
    """Return the table of what plain pyverbs died of."""
    rows = [[r.traffic, r.fault, _said(r), _number(r.error_ms)] for r in results]
    return table(BASELINE_COLUMNS, rows, 3, width)


class View:
    """What both views have: the meter, and the closing words."""

    def __init__(self) -> None:
        self.meter = RateMeter()
        self.scenarios: list[ScenarioResult] = []
        self.baseline: list[BaselineResult] = []

    def say(self, text: str, hang: int = 0) -> None:
        """Print words to stay, wrapped; hang: indentation of further lines. Not while the live part is open."""
        raise NotImplementedError

    def open(self, total: int) -> None:
        """Begin; total: how many scenarios and baselines there will be."""

    def begin(self, title: str) -> None:
        """A scenario begins."""

    def phase(self, text: str) -> None:
        """Something else is done now."""

    def result(self, result: ScenarioResult | BaselineResult) -> None:
        """A scenario has ended."""
        if isinstance(result, ScenarioResult):
            self.scenarios.append(result)
        else:
            self.baseline.append(result)

    def tick(self, pair: HostPair) -> None:
        """Called many times a second while hosts work."""
        total = sum(host.report.get("bytes", 0) for host in pair.both)
        self.meter.update(total, time.monotonic())

    def close(self) -> None:
        """End the live part."""

    def summary(self, seconds: float) -> None:
        """Print the tables and every problem."""
        raise NotImplementedError

    def verdict(self) -> str:
        """The last line."""
        good = sum(result.ok for result in self.scenarios)
        died = sum(result.ok for result in self.baseline)
        text = f"shiftverbs: {good} of {len(self.scenarios)} scenarios verified"
        if self.baseline:
            text += f"; plain pyverbs died in {died} of {len(self.baseline)}"
        if failed := sum(result.problem is not None for result in self.baseline):
            text += f", {failed} not measured"
        return text

    def repeated(self) -> list[str]:
        """One line per baseline that died before its fault at first."""
        return [
            f"{b.traffic} / {b.fault}, plain pyverbs: died before its fault; run {b.repeats + 1} counts"
            for b in self.baseline
            if b.repeats and b.ok
        ]

    def problems(self) -> list[str]:
        """One paragraph per scenario that is not ok."""
        found = [f"{r.traffic} / {r.fault}: {r.problem}" for r in self.scenarios if not r.ok]
        for b in self.baseline:
            if not b.ok:
                found.append(f"{b.traffic} / {b.fault}, plain pyverbs: {b.problem or 'survived the fault'}")
        return found


class PlainView(View):
    """Lines of text: for pipes, logs, and where rich is not installed."""

    def __init__(self, out: TextIO) -> None:
        super().__init__()
        self._out = out
        self._next_line = 0.0
        self._phase = ""

    def _line(self, text: str, hang: int | None = None) -> None:
        for line in wrap(text, columns(), hang):
            print(line, file=self._out, flush=True)

    def say(self, text: str, hang: int = 0) -> None:
        """One paragraph."""
        self._line(text, hang)

    def begin(self, title: str) -> None:
        """One line."""
        self._line(f"== {title}")

    def phase(self, text: str) -> None:
        """One line."""
        self._phase = text
        self._line(f"   {text}")
        self._next_line = time.monotonic() + 1

    def tick(self, pair: HostPair) -> None:
        """Throughput, once a second."""
        super().tick(pair)
        if time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + 1
            self._line(f"   {self.meter.rate() / 1e6:8.1f} MB/s  {self._phase}")

    def result(self, result: ScenarioResult | BaselineResult) -> None:
        """The row as a line."""
        super().result(result)
        if isinstance(result, ScenarioResult):
            names = (name.replace("-\n", "").replace("\n", " ") for name in SCENARIO_COLUMNS[1:])
            cells = zip(names, _scenario_row(result)[1:], strict=True)
            self._line("   " + "  ".join(f"{name} {value}".strip() for name, value in cells))
        else:
            self._line("   " + _said(result))
        if result.problem:
            self._line("   " + result.problem)

    def summary(self, seconds: float) -> None:
        """The tables, then what is not verified."""
        if self.scenarios:
            self._line(SCENARIO_TITLE)
            for line in scenario_table(self.scenarios, columns()):
                self._line(line)
        if self.baseline:
            self._line(BASELINE_TITLE)
            for line in baseline_table(self.baseline, columns()):
                self._line(line)
        for text in self.repeated():
            self._line(text)
        problems = self.problems()
        if problems:
            self._line("\nnot verified (the whole story stands above, with the scenario):")
        for problem in problems:
            self._line("  " + problem.splitlines()[0])
        self._line(f"\n{self.verdict()} ({seconds:.0f} s)")


class LiveView(View):
    """A live display with rich: what runs, throughput, the table as it grows."""

    def __init__(self) -> None:
        super().__init__()
        import rich.console
        import rich.live
        import rich.progress

        self.console = rich.console.Console()
        self._title = self._phase = ""
        self._began = time.monotonic()
        self._progress = rich.progress.Progress(
            rich.progress.BarColumn(bar_width=40),
            rich.progress.MofNCompleteColumn(),
            rich.progress.TimeElapsedColumn(),
            console=self.console,
        )
        self._task = self._progress.add_task("demo", total=1)
        self._live = rich.live.Live(console=self.console, get_renderable=self._render, refresh_per_second=8)

    def say(self, text: str, hang: int = 0) -> None:
        """One paragraph."""
        self._print("\n".join(wrap(text, self.console.width, hang)))

    def _print(self, text: str, style: str | None = None) -> None:
        self.console.print(text, style=style, markup=False, highlight=False)

    def open(self, total: int) -> None:
        """Start drawing."""
        self._progress.update(self._task, total=total)
        self._live.start()

    def begin(self, title: str) -> None:
        """Shown with its own clock."""
        self._title = title
        self._began = time.monotonic()

    def phase(self, text: str) -> None:
        """Shown beside the title."""
        self._phase = text

    def result(self, result: ScenarioResult | BaselineResult) -> None:
        """A row more."""
        super().result(result)
        self._progress.advance(self._task)

    def _render(self) -> Any:
        from rich.console import Group
        from rich.text import Text

        seconds = time.monotonic() - self._began
        # On top: a terminal with too few lines cuts the table, not this.
        parts: list[Any] = [
            Text.assemble((self._title, "bold"), f"  {self._phase}  ", (f"{seconds:.1f} s", "dim")),
            Text.assemble(
                (f"{self.meter.rate() / 1e6:8.1f} MB/s ", "cyan"), (self.meter.sparkline(), "cyan")
            ),
            self._progress,
        ]
        if self.scenarios:
            parts.append(self._scenario_table())
        elif self.baseline:
            parts.append(self._baseline_table())
        return Group(*parts)

    def _scenario_table(self) -> Any:
        lines = scenario_table(self.scenarios, self.console.width)
        return self._coloured([SCENARIO_TITLE, *lines])

    def _baseline_table(self) -> Any:
        return self._coloured([BASELINE_TITLE, *baseline_table(self.baseline, self.console.width)])

    @staticmethod
    def _coloured(lines: list[str]) -> Any:
        from rich.text import Text

        text = Text("\n".join(lines))
        text.highlight_regex(r"\bok$", "green")
        text.highlight_regex(r"FAILED|NOT MEASURED|survived.*", "red")
        text.highlight_regex(r"[A-Z]+_[A-Z_]+", "yellow")
        return text

    def close(self) -> None:
        """Stop drawing; nothing of the live part stays."""
        self._live.transient = True
        self._live.stop()

    def summary(self, seconds: float) -> None:
        """The same tables, to stay."""
        if self.scenarios:
            self.console.print(self._scenario_table())
        if self.baseline:
            self.console.print(self._baseline_table())
        for text in self.repeated():
            self._print(text)
        for problem in self.problems():
            self._print(problem, "red")
        good = not self.problems()
        self._print(f"\n{self.verdict()} ({seconds:.0f} s)", "bold green" if good else "bold red")


def make_view(plain: bool, out: TextIO | None = None) -> View:
    """Return the live view where standard output is a terminal and rich is there, else plain lines."""
    out = out or sys.stdout
    if not plain and out is sys.stdout and out.isatty():
        try:
            return LiveView()
        except ImportError:
            print("(pip install rich: a live view instead of these lines)", file=out)
    return PlainView(out)


def to_json(scenarios: Sequence[ScenarioResult], baseline: Sequence[BaselineResult]) -> dict[str, Any]:
    """Return the content of the JSON file."""
    return {
        "scenarios": [result.to_json() for result in scenarios],
        "baseline": [result.to_json() for result in baseline],
    }


def write_json(path: str, content: dict[str, Any]) -> None:
    """Write it to a file, or to standard output where path is "-"."""
    text = json.dumps(content, indent=1) + "\n"
    if path == "-":
        sys.stdout.write(text)
    else:
        Path(path).write_text(text, encoding="utf-8")
