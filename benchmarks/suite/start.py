# SPDX-License-Identifier: BSD-3-Clause
"""The rows about a program's start: from importing the package to a QP that is PROTECTED."""

from __future__ import annotations

import contextlib
import statistics
import tempfile
from collections.abc import Iterator

from benchmarks.suite.lab import Child, Lab
from benchmarks.suite.programs import Progress
from benchmarks.suite.rows import Row, ratio_row
from shiftverbs.softrnic import library_path

Times = dict[str, float]

#: Milliseconds from the import to PROTECTED.
LIMITS_MS = {"cold": 1000.0, "warm": 200.0}


@contextlib.contextmanager
def started(lab: Lab, package: str, warm: bool) -> Iterator[Times]:
    """Two processes, one on each host, that start at once and connect.

    :param warm: they join their host's broker, which is there; otherwise each is the first and starts it
    :return: milliseconds from the import to "import", "rts" and, with shiftverbs, "protected", of the slower of both
    :raises SuiteError: they do not come so far
    """
    job = lab.job()
    with contextlib.ExitStack() as stack:
        children = []
        for host in "ab":
            env = lab.environment(host, package, job) | {"LD_PRELOAD": str(library_path())}
            # Compiled modules of our own, whatever the environment says: an installed package has its.
            env.pop("PYTHONDONTWRITEBYTECODE", None)
            env["PYTHONPYCACHEPREFIX"] = f"{lab.network.directory}/bytecode"
            # Where nobody was yet, no broker is.
            run_dir = (
                f"{lab.network.directory}/warm"
                if warm
                else stack.enter_context(tempfile.TemporaryDirectory())
            )
            env["SHIFTVERBS_RUN_DIR"] = run_dir
            children.append(stack.enter_context(Child("start_host", env, package, lab.device)))
        who = [child.answer() for child in children]
        for child, peer in zip(children, reversed(who), strict=True):
            child.tell(**peer)
        both = [child.answer() for child in children]
        yield {name: max(times[name] for times in both) for name in both[0]}


def start_rows(lab: Lab, quick: bool, progress: Progress) -> list[Row]:
    """From import to PROTECTED, without a broker and with one, beside pyverbs from import to RTS."""
    progress("from import to PROTECTED")
    seen: dict[str, list[Times]] = {"pyverbs": [], "cold": [], "warm": []}
    # Not counted: these two have the modules compiled and the hosts' brokers started, which stay as long as they do.
    with started(lab, "shiftverbs", warm=True):
        for _ in range(3 if quick else 9):
            for kind, times in seen.items():
                package = "pyverbs" if kind == "pyverbs" else "shiftverbs"
                with started(lab, package, warm=kind == "warm") as took:
                    times.append(took)
    plain = [times["rts"] for times in seen["pyverbs"]]
    rows = []
    for kind, broker in (("cold", "no broker yet"), ("warm", "the host's broker is there")):
        values = [times["protected"] for times in seen[kind]]
        row = ratio_row(f"import to PROTECTED, {broker} (pyverbs: to RTS)", "ms", plain, values, None)
        row.target, row.met = f"≤ {LIMITS_MS[kind]:g} ms", row.shiftverbs <= LIMITS_MS[kind]
        parts = {name: statistics.median(times[name] for times in seen[kind]) for name in ("import", "rts")}
        row.note = (
            f"{min(values):.0f} to {max(values):.0f} ms (pyverbs {min(plain):.0f} to {max(plain):.0f}); "
            f"imported after {parts['import']:.0f}, RTS after {parts['rts']:.0f}"
        )
        rows.append(row)
    return rows
