# SPDX-License-Identifier: BSD-3-Clause
"""`shiftverbs status` and `shiftverbs top`: this host's processes that run under shiftverbs, and their QPs.

Each process is asked once for what it shows of itself (telemetry/); nothing is read, and nothing costs anything, while
nobody asks.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shiftverbs.process.run_dir import directory
from shiftverbs.telemetry import reader

if TYPE_CHECKING:
    from rich.console import Group, RenderableType

__all__ = ["add_status_arguments", "add_top_arguments", "status", "top"]

STATUSES = ("PROTECTED", "PAIRING", "UNPROTECTED", "FAILED")
_STYLES = {"PROTECTED": "green", "PAIRING": "yellow", "UNPROTECTED": "yellow", "FAILED": "red"}
# More QPs of one process than these are shown by NIC and status, not one by one.
MOST_QPS = 16
# A line for each different reason, this many.
MOST_REASONS = 4


def add_status_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `shiftverbs status` to its parser."""
    parser.add_argument("--json", action="store_true", help="everything that the processes tell, as JSON")
    parser.add_argument(
        "--qps", action="store_true", help=f"a line for each QP, be there more than {MOST_QPS} too"
    )
    parser.add_argument("--pid", type=int, action="append", help="only this process (may be repeated)")


def add_top_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `shiftverbs top` to its parser."""
    parser.add_argument("--interval", type=_interval, default=1.0, metavar="SECONDS", help="default 1")
    parser.add_argument("--qps", action="store_true", help="as of status")
    parser.add_argument("--pid", type=int, action="append", help="as of status")
    parser.add_argument("--count", type=int, metavar="N", help="end after N screens")


def _interval(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds") from None
    if not 0.1 <= value <= 3600:
        raise argparse.ArgumentTypeError("must be from 0.1 to 3600 seconds")
    return value


def _where() -> Path:
    return directory(os.environ.get("SHIFTVERBS_RUN_DIR", "").strip() or None)


def _asked(pids: list[int] | None) -> reader.Answers:
    answers = reader.ask(_where())
    if pids is not None:
        answers.processes = [each for each in answers.processes if each["pid"] in pids]
        answers.silent = [each for each in answers.silent if each[0] in pids]
    return answers


def status(arguments: argparse.Namespace) -> int:
    """Show this host's processes once. Returns 0; 1 where there is none, or one that lives does not answer."""
    try:
        answers = _asked(arguments.pid)
    except OSError as error:
        print(f"shiftverbs status: {error}", file=sys.stderr)
        return 1
    found = bool(answers.processes) and not answers.silent
    if arguments.json:
        silent = [{"pid": pid, "why": why} for pid, why in answers.silent]
        json.dump({"processes": answers.processes, "silent": silent}, sys.stdout, indent=1)
        print()
        return 0 if found else 1
    console = _console()
    if console is None:
        return 1
    console.print(screen(answers, None, arguments.qps))
    return 0 if found else 1


def top(arguments: argparse.Namespace) -> int:
    """Show them again and again, with rates, until interrupted. Returns 0."""
    console = _console()
    if console is None:
        return 1
    from rich.live import Live

    before: tuple[float, reader.Answers] | None = None
    shown = 0
    try:
        with Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
            while True:
                began = time.monotonic()
                answers = _asked(arguments.pid)
                rates = None if before is None else _rates(before[1], answers, began - before[0])
                live.update(screen(answers, rates, arguments.qps), refresh=True)
                before = began, answers
                shown += 1
                if arguments.count is not None and shown >= arguments.count:
                    return 0
                time.sleep(max(0.0, began + arguments.interval - time.monotonic()))
    except KeyboardInterrupt:
        return 0
    except OSError as error:
        print(f"shiftverbs top: {error}", file=sys.stderr)
        return 1


def _console() -> Any:
    try:
        from rich.console import Console
    except ImportError:
        print("this needs rich: pip install 'shiftverbs[status]' (--json does not)", file=sys.stderr)
        return None
    return Console(highlight=False)


def _messages(qp: dict[str, Any]) -> int:
    """Two-sided messages of a QP so far: received, and sent and acknowledged."""
    counters = qp["counters"]
    return int(counters.get("rx", 0)) + int(counters.get("acked", 0))


def _rates(before: reader.Answers, now: reader.Answers, seconds: float) -> dict[tuple[str, int], float]:
    """Messages a second, by process and QP. A QP that was reset meanwhile counts from its new life on."""
    old = {(each["instance"], qp["qp_num"]): _messages(qp) for each in before.processes for qp in each["qps"]}
    rates = {}
    for each in now.processes:
        for qp in each["qps"]:
            key = each["instance"], qp["qp_num"]
            since = _messages(qp) - old.get(key, 0)
            rates[key] = (since if since >= 0 else _messages(qp)) / max(seconds, 1e-3)
    return rates


# ---- what is shown --------------------------------------------------------------------------------------------------


def screen(answers: reader.Answers, rates: dict[tuple[str, int], float] | None, each_qp: bool) -> Group:
    """Everything, for a rich console of 80 columns or more.

    answers: what the processes told; rates: messages a second by (instance, QP number), or None; each_qp: a line for
    each QP however many there are.
    """
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = []
    for process in answers.processes:
        parts += _process(process, rates, each_qp)
    for pid, why in answers.silent:
        parts.append(Text(f"pid {pid}: {why}", style="red"))
    if not parts:
        parts.append(Text(f"No process runs under shiftverbs with its socket in {_where()}."))
    return Group(*parts)


def _process(
    process: dict[str, Any], rates: dict[tuple[str, int], float] | None, each_qp: bool
) -> Iterator[RenderableType]:
    from rich.text import Text

    exchanger = process["exchanger"]
    head = Text(no_wrap=True, overflow="ellipsis")
    head.append(f"{process['pid']}", style="bold")
    head.append(f" on {process['host']}  {' '.join(process['command'])}")
    yield head
    line = Text("  NICs", no_wrap=True, overflow="ellipsis")
    for nic in process["nics"]:
        line.append(f"  {nic['name']} ")
        line.append(nic["state"], style="green" if nic["state"] == "ACTIVE" else "red")
    yield line
    state = Text("  etcd ", no_wrap=True, overflow="ellipsis")
    if exchanger["answers"]:
        state.append("answers", style="green")
    else:
        state.append(exchanger["why"] or "away", style="yellow")
    up = _span(time.time() - process["started"])
    state.append(f"  broker {exchanger['broker'] or '-'}  job {process['job']}  up {up}")
    yield state
    totals = process["totals"]
    counts = Text("  ")
    for name in STATUSES:
        number = sum(qp["status"] == name for qp in process["qps"])
        if number:
            counts.append(f"{number} {name}  ", style=_STYLES[name])
    counts.append(f"SWITCHes {totals['switches']}  home again {totals['homecomings']}")
    gave_up = sum(totals["failed"].values())
    if gave_up:
        counts.append(f"  gave up {gave_up}", style="red")
    yield counts
    if process["qps"]:
        if each_qp or len(process["qps"]) <= MOST_QPS:
            yield _qp_table(process, rates)
        else:
            yield _summary_table(process, rates)
    yield from _reasons(process)
    yield from _slow_paths(process)
    yield Text()


def _table(*columns: str) -> Any:
    from rich.table import Table

    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="dim")
    table.add_column("  ", width=1)
    for name in columns:
        numeric = name in ("QPs", "msg/s", "SWITCHes", "fallback", "away")
        table.add_column(name, justify="right" if numeric else "left", no_wrap=True, overflow="ellipsis")
    return table


def _qp_table(process: dict[str, Any], rates: dict[tuple[str, int], float] | None) -> Any:
    from rich.text import Text

    table = _table(
        "QP", "NIC", "runs on", "status", "queue", "fallback", "away", *([] if rates is None else ["msg/s"])
    )
    for qp in sorted(process["qps"], key=lambda qp: (STATUSES.index(qp["status"]) * -1, qp["qp_num"])):
        carrier = qp["path"] if qp["path"] == qp["recv_path"] else f"{qp['path']}/{qp['recv_path']}"
        fallback = "" if qp["fallback_ms"] is None else f"{qp['fallback_ms']:.1f} ms"
        away = qp["away_s"]
        row = [
            "",
            f"{qp['qp_num']:#x}",
            qp["device"],
            Text(carrier, style="" if carrier == qp["device"] else "yellow"),
            Text(qp["status"], style=_STYLES.get(qp["status"], "")),
            qp["state"],
            fallback,
            "" if away is None else _span(away),
        ]
        if rates is not None:
            row.append(_count(rates.get((process["instance"], qp["qp_num"]), 0.0)))
        table.add_row(*row)
    return table


def _summary_table(process: dict[str, Any], rates: dict[tuple[str, int], float] | None) -> Any:
    from rich.text import Text

    table = _table("NIC", "runs on", "status", "QPs", "away", *([] if rates is None else ["msg/s"]))
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for qp in process["qps"]:
        groups.setdefault((qp["device"], qp["path"], qp["status"]), []).append(qp)
    for (device, path, state), members in sorted(groups.items()):
        longest = max((qp["away_s"] or 0.0 for qp in members), default=0.0)
        row = [
            "",
            device,
            Text(path, style="" if path == device else "yellow"),
            Text(state, style=_STYLES.get(state, "")),
            str(len(members)),
            _span(longest) if longest else "",
        ]
        if rates is not None:
            row.append(_count(sum(rates.get((process["instance"], qp["qp_num"]), 0.0) for qp in members)))
        table.add_row(*row)
    return table


def _reasons(process: dict[str, Any]) -> Iterator[RenderableType]:
    """Why QPs are not protected, and the last failure: one line for each different text."""
    from rich.text import Text

    texts: dict[str, list[int]] = {}
    for qp in process["qps"]:
        if qp["why"]:
            texts.setdefault(f"{qp['status']}: {qp['why']}", []).append(qp["qp_num"])
    for text, numbers in list(texts.items())[:MOST_REASONS]:
        named = f"QP {numbers[0]:#x}" + (f" and {len(numbers) - 1} more" if len(numbers) > 1 else "")
        yield Text(f"  {named} {text}", style="yellow")
    if len(texts) > MOST_REASONS:
        yield Text(f"  and {len(texts) - MOST_REASONS} other reasons (--json has them)", style="yellow")
    failures = [(qp["last_failure"]["ago_s"], qp) for qp in process["qps"] if qp["last_failure"]]
    if failures:
        ago_s, qp = min(failures, key=lambda failure: failure[0])
        yield Text(f"  last failure {_span(ago_s)} ago, QP {qp['qp_num']:#x}: {qp['last_failure']['why']}")


def _slow_paths(process: dict[str, Any]) -> Iterator[RenderableType]:
    """Paths that work and are slow: a line for each."""
    from rich.text import Text

    stragglers = process.get("stragglers") or {}
    if not stragglers.get("works", True):
        yield Text("  the straggler detector failed: its log says why", style="red")
    for each in stragglers.get("slow", ())[:MOST_REASONS]:
        text = (
            f"  slow: {each['path']} to {each['peer']} ({each['qps']} QPs), {each['ratio']:.1f} times as long for"
            f" {_span(each['since_s'])}, {_span(each['lost_s'])} lost in {each['samples']} samples: {each['why']}"
        )
        yield Text(text, style="red" if each["fault"] == "path" else "yellow")


def _span(seconds: float) -> str:
    """A time in at most 7 characters."""
    if seconds < 10:
        return f"{max(0.0, seconds):.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.0f} d"


def _count(number: float) -> str:
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number:.0f}"
