# SPDX-License-Identifier: BSD-3-Clause
"""rdma-core's own pyverbs tests on the software RNIC, with pyverbs and with shiftverbs: one table. `make conformance`.

(a) is pyverbs on the software RNIC; (b) is shiftverbs on it, failover on: a private etcd, a backup NIC, and each test's
first send waits until its QPs are protected, if they can be. Exit status 0: no test failed in either, none differs, and
what passes on the kernel's soft-RoCE passes here.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import upstream

from shiftverbs.commands.demo.etcd_server import EtcdServer

__all__ = ["Comparison", "compare", "known_to_pass", "report"]

DEVICE, GID = "soft0", 3
YARDSTICK = Path(__file__).with_name("kernel_soft_roce.txt")
# What newer releases call a test of the yardstick.
RENAMED = {
    "tests.test_qpex.QpExTestCase.test_qp_ex_rc_rdma_write_zero_length": (
        "tests.test_qpex.QpExTestCase.test_qp_ex_rc_rdma_write_zero_size"
    ),
}
STATUSES = ("passed", "skipped", "failed")
# Without any test beginning or ending, a child hangs; seconds.
HUNG_S = 60.0


@dataclass
class Comparison:
    """Both runs. qps: of (b), how the QPs were protected when traffic began -> how many; seconds: each run's."""

    pyverbs: upstream.Outcomes
    shiftverbs: upstream.Outcomes
    qps: Counter[str] = field(default_factory=Counter)
    seconds: tuple[float, float] = (0.0, 0.0)
    match: Sequence[str] = ()

    @property
    def bad(self) -> list[str]:
        """Every test that failed or killed its process, with either package, and what it said."""
        runs = (("pyverbs", self.pyverbs), ("shiftverbs", self.shiftverbs))
        return [
            f"{name} {status} with {package}\n{why}"
            for package, outcomes in runs
            for name, (status, why) in outcomes.items()
            if status not in ("passed", "skipped")
        ]

    @property
    def different(self) -> list[str]:
        """Every test that ended otherwise in (b) than in (a), or was skipped for another reason."""
        lines = upstream.differences(self.pyverbs, self.shiftverbs)
        for name, (status, why) in self.pyverbs.items():
            other, why_other = self.shiftverbs.get(name, ("", ""))
            if status == other == "skipped" and why != why_other:
                lines.append(
                    f"{name}: skipped with another reason\n  pyverbs: {why}\n  shiftverbs: {why_other}"
                )
        return lines

    @property
    def yardstick(self) -> list[str]:
        """The yardstick's tests, by the names that this release has for them."""
        return [
            name if name in self.pyverbs else RENAMED.get(name, name) for name in known_to_pass(self.match)
        ]

    @property
    def short_of_the_kernel(self) -> list[str]:
        """What passes on the kernel's soft-RoCE with pyverbs, but not in (a), and why."""
        lines = []
        for name in self.yardstick:
            status, why = self.pyverbs.get(name, ("absent", ""))
            if status == "absent" and upstream.DIRECTORY != upstream.DEBIANS:
                continue  # another release: it was renamed
            if status != "passed":
                lines.append(f"{name}: {status}: {why}")
        return lines

    @property
    def without_failover(self) -> list[str]:
        """Why (b) does not count: nothing was protected, or a QP that could be did not become so in time."""
        if not self.match and not self.qps["protected"]:
            return ["no QP was protected"]
        return [
            f"{number} QPs {how}" for how, number in self.qps.items() if how.startswith(("pairing", "failed"))
        ]

    @property
    def good(self) -> bool:
        """Whether there is nothing to complain about."""
        return not (self.bad or self.different or self.short_of_the_kernel or self.without_failover)


def known_to_pass(match: Sequence[str] = ()) -> list[str]:
    """The tests that pass on the kernel's soft-RoCE, of those that match."""
    names = [line for line in YARDSTICK.read_text().splitlines() if line and not line.startswith("#")]
    full = [f"{upstream.PACKAGE}.{name}" for name in names]
    return [name for name in full if not match or any(part in name for part in match)]


@contextmanager
def _network() -> Iterator[dict[str, str]]:
    """A software network of our own, with two NICs; yields the variables that lead to it."""
    ours = [name for name in os.environ if name.startswith(("SOFTRNIC", "SHIFTVERBS"))]
    hidden = {name: os.environ.pop(name) for name in ours}
    directory = tempfile.mkdtemp(prefix="sv-conf-")
    try:
        yield {"SOFTRNIC": "1", "SOFTRNIC_DIR": directory}
    finally:
        os.environ.update(hidden)
        shutil.rmtree(directory, ignore_errors=True)


def compare(match: Sequence[str] = (), limit_s: float = 300.0, settle_s: float = 10.0) -> Comparison:
    """Run both, one after the other. Raises TimeoutError where one takes longer than limit_s seconds.

    match: parts of names of tests, empty for all; settle_s: how long a test's first send waits for protection.
    """
    qps: Counter[str] = Counter()
    with _network() as env:
        began = time.monotonic()
        reference = upstream.run("pyverbs", DEVICE, GID, env, match, HUNG_S, limit_s)
        between = time.monotonic()
        with EtcdServer() as etcd:
            env = {**env, "SHIFTVERBS_ETCD": etcd.endpoint}
            other = upstream.run("shiftverbs", DEVICE, GID, env, match, HUNG_S, limit_s, settle_s, qps)
        seconds = (between - began, time.monotonic() - between)
    return Comparison(reference, other, qps, seconds, match)


def _modules(outcomes: upstream.Outcomes) -> dict[str, Counter[str]]:
    """Module -> how many of its tests ended how. What killed a process counts as failed."""
    modules: dict[str, Counter[str]] = {}
    for name, (status, _) in outcomes.items():
        module = name.split(".")[1] if name.startswith(upstream.PACKAGE + ".") else name
        modules.setdefault(module, Counter())[status if status in STATUSES else "failed"] += 1
    return modules


def _table(done: Comparison) -> Iterator[str]:
    modules = _modules(done.pyverbs), _modules(done.shiftverbs)
    different = Counter(
        line.split(".")[1] for line in done.different if line.startswith(upstream.PACKAGE + ".")
    )
    head = f"{'':24}{'(a) pyverbs':^26} {'(b) shiftverbs':^26}"
    yield head.rstrip()
    yield (
        f"{'module':24}"
        + " ".join(" ".join(f"{status:>8}" for status in STATUSES) for _ in range(2))
        + "  different"
    )
    total = Counter[str](), Counter[str]()
    for module in sorted({*modules[0], *modules[1]}):
        cells = []
        for counts, totals in zip(modules, total, strict=True):
            found = counts.get(module, Counter())
            totals.update(found)
            cells += [f"{found[status]:8}" for status in STATUSES]
        yield f"{module:24}" + " ".join(cells) + f"{different[module] or '':>11}"
    sums = [f"{totals[status]:8}" for totals in total for status in STATUSES]
    yield f"{'all':24}" + " ".join(sums) + f"{len(done.different) or '':>11}"


def report(done: Comparison) -> str:
    """The table, the reasons of all skips, and what is wrong."""
    lines = list(_table(done))
    lines += [
        "",
        f"(a) took {done.seconds[0]:.1f} s, (b) {done.seconds[1]:.1f} s",
        "",
        "skipped in (a), by reason:",
    ]
    skips = Counter(why for status, why in done.pyverbs.values() if status == "skipped")
    lines += [f"{number:5}  {why}" for why, number in skips.most_common()]
    lines += ["", "QPs made in (b), by protection when traffic began:"]
    lines += [f"{number:5}  {how}" for how, number in done.qps.most_common()]
    yardstick = done.yardstick
    short = done.short_of_the_kernel
    passing = {name for name, (status, _) in done.pyverbs.items() if status == "passed"}
    here = len(passing.intersection(yardstick))
    lines += ["", f"of {len(yardstick)} that pass on the kernel's soft-RoCE, {here} pass in (a)"]
    more = sorted(passing - set(yardstick))
    lines += (
        [f"  and beyond them {len(more)}: {', '.join(name.rpartition('.')[2] for name in more)}"]
        if more
        else []
    )
    for title, found in (
        ("not passed here", short),
        ("failed", done.bad),
        ("different in (b)", done.different),
        ("(b) without failover", done.without_failover),
    ):
        lines += ["", f"{title}: {len(found) or 'none'}", *found]
    return "\n".join(lines)


def main() -> int:
    """Compare, print, and judge."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--match", action="append", default=[], help="only tests whose name has this in it")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for each of the two runs")
    parser.add_argument("--json", type=Path, help="write all outcomes there")
    options = parser.parse_args()
    done = compare(options.match, options.limit)
    print(report(done))
    if options.json:
        outcomes = {"pyverbs": done.pyverbs, "shiftverbs": done.shiftverbs, "qps": done.qps}
        options.json.write_text(json.dumps(outcomes, indent=1))
    return int(not done.good)


if __name__ == "__main__":
    sys.exit(main())
