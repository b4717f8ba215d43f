# SPDX-License-Identifier: BSD-3-Clause
"""The figures: DCQCN's incast, PFC alone, no control; each with the queue over time and the flows' shares."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.fabric.cases import (
    BUFFER,
    HEADERS,
    LINE,
    PAYLOAD,
    SENDERS,
    XOFF,
    Case,
    Unfair,
    fixed_point,
)

COLOURS = {2: "#1f6fb4", 4: "#e0a030", 8: "#c03030"}
GREY, LIGHT = "#8c8c8c", "#cccccc"
FIGURES = ("dcqcn", "pfc", "none")
#: What is shown of a run, milliseconds: from its beginning.
SHOWN_MS = {"DCQCN": 300.0, "PFC": 20.0, "none": 40.0}


def draw(directory: Path, cases: Sequence[Case], unfair: Sequence[Unfair], note: str) -> list[Path]:
    """Draw fabric-dcqcn, fabric-pfc and fabric-none, .png and .svg; the files written.

    :param directory: made if it is not there
    :param note: one line that says what they are of
    :raises ModuleNotFoundError: matplotlib is missing
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    # Without an id that is another one each time, and without a date, a figure changes only if its curves do.
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "fabric", "font.size": 9})
    plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False})
    directory.mkdir(parents=True, exist_ok=True)
    draws: dict[str, Callable[[Any], None]] = {
        "dcqcn": lambda axes: _dcqcn(axes, [case for case in cases if case.control == "DCQCN"]),
        "pfc": lambda axes: _pfc(axes, [case for case in cases if case.control == "PFC"], unfair),
        "none": lambda axes: _none(axes, [case for case in cases if case.control == "none"]),
    }
    written = []
    for name in FIGURES:
        # DCQCN's curves would hide each other.
        left = ["2", "4", "8"] if name == "dcqcn" else ["queue"] * 3
        layout = [[one, "bars"] for one in left]
        figure, axes = plt.subplot_mosaic(layout, figsize=(10, 3.8), width_ratios=(3, 2))
        draws[name](axes)
        plt.tight_layout()
        figure.text(0.99, 0.002, note, ha="right", va="bottom", fontsize=6, color="#777777")
        for suffix, metadata in (("png", {}), ("svg", {"Date": None})):
            written.append(directory / f"fabric-{name}.{suffix}")
            figure.savefig(written[-1], dpi=110, bbox_inches="tight", metadata=metadata)
        plt.close(figure)
    return written


def _queues(axis: Any, cases: Sequence[Case], title: str) -> None:
    for case in cases:
        shown = [(us, queue) for us, queue in case.run.queue if us <= 1000 * SHOWN_MS[case.control]]
        times, queues = zip(*shown, strict=True)
        axis.plot(
            [us / 1000 for us in times],
            [queue / 1000 for queue in queues],
            color=COLOURS[case.senders],
            linewidth=0.7,
            label=f"{case.senders} senders",
        )
    axis.set_title(title, fontsize=9)
    axis.set_xlabel("milliseconds")
    axis.set_ylabel("KB in the queue")
    axis.set_xlim(left=0)
    axis.set_ylim(bottom=0)


def _bars(axis: Any, groups: Sequence[Sequence[tuple[float, float, str]]], labels: Sequence[str]) -> None:
    """Groups of bars (height, of which light, colour), one label each."""
    place = 0.0
    ticks = []
    for group in groups:
        for i, (height, light, colour) in enumerate(group):
            axis.bar(place + i, height, 0.8, color=colour)
            axis.bar(place + i, light, 0.8, bottom=height, color=LIGHT)
        ticks.append(place + (len(group) - 1) / 2)
        place += len(group) + 1.5
    axis.set_xticks(ticks, labels)


def _dcqcn(axes: Any, cases: Sequence[Case]) -> None:
    for case in cases:
        axis = axes[f"{case.senders}"]
        first, last = case is cases[0], case is cases[-1]
        _queues(axis, [case], "(a) DCQCN; dashed: the fixed point, where there is one" if first else "")
        axis.set_ylim(0, 250)
        axis.set_ylabel("KB" if last else "")
        axis.set_xlabel("milliseconds" if last else "")
        axis.legend(fontsize=7, loc="upper right")
        if not last:
            at = fixed_point(case.senders, PAYLOAD + HEADERS) / 1000
            axis.axhline(at, color="#000000", linewidth=0.8, linestyle="--")
    groups = [[(rate / 1e9, 0.0, COLOURS[case.senders]) for rate in case.incast] for case in cases]
    _bars(axes["bars"], groups, [f"{case.senders}" for case in cases])
    _equal(axes["bars"], groups)
    axes["bars"].set_title("(b) what each sender gets; lines: equal shares", fontsize=9)
    axes["bars"].set_xlabel("senders")
    axes["bars"].set_ylabel("Gb/s")


def _equal(axis: Any, groups: Sequence[Sequence[Any]]) -> None:
    place = 0.0
    for group in groups:
        axis.hlines(
            LINE / 1e9 / len(group), place - 0.6, place + len(group) - 0.4, color="#000000", linewidth=0.8
        )
        place += len(group) + 1.5


def _pfc(axes: Any, cases: Sequence[Case], unfair: Sequence[Unfair]) -> None:
    _queues(axes["queue"], cases, "(a) PFC alone: nothing is dropped; dashed: XOFF of all senders")
    for senders in SENDERS:
        axes["queue"].axhline(senders * XOFF / 1000, color=COLOURS[senders], linewidth=0.8, linestyle="--")
    axes["queue"].legend(fontsize=7, loc="center right")
    groups = [
        [(one.alone / 1e9, 0.0, "#1f6fb4"), (one.shared / 1e9, 0.0, "#c03030"), (one.victim / 1e9, 0.0, GREY)]
        for one in unfair
    ]
    _bars(axes["bars"], groups, [f"{one.senders}" for one in unfair])
    place = 0.0
    for one in unfair:
        axes["bars"].hlines(
            LINE / 1e9 / one.senders, place - 0.5, place + 1.5, color="#000000", linewidth=0.8
        )
        axes["bars"].hlines(
            LINE / 1e9 * (1 - 1 / one.senders), place + 1.5, place + 2.5, color="#000000", linewidth=0.8
        )
        place += 4.5
    axes["bars"].set_title("(b) and it is unfair; lines: what would be fair", fontsize=9)
    axes["bars"].set_xlabel(
        "flows: one alone on its port (blue), the others on one port (red, each);\n"
        "a flow to an idle host from one of as many senders (grey)",
        fontsize=8,
    )
    axes["bars"].set_ylabel("Gb/s")


def _none(axes: Any, cases: Sequence[Case]) -> None:
    _queues(axes["queue"], cases, "(a) no control; dashed: the buffer")
    axes["queue"].axhline(BUFFER / 1000, color="#000000", linewidth=0.8, linestyle="--")
    axes["queue"].legend(fontsize=7, loc="lower right")
    _bars(
        axes["bars"],
        [
            [(case.throughput * 100, 0.0, COLOURS[case.senders]), (case.again * 100, 0.0, GREY)]
            for case in cases
        ],
        [f"{case.senders}" for case in cases],
    )
    axes["bars"].set_ylim(0, 100)
    axes["bars"].set_title("(b) what gets through in order; grey: sent again, of all packets", fontsize=9)
    axes["bars"].set_xlabel("senders")
    axes["bars"].set_ylabel("percent")
