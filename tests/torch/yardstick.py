# SPDX-License-Identifier: BSD-3-Clause
"""torch's own tests of a process group, those that gloo passes, on the shift backend: a table. `make yardstick`.

Each case runs with four ranks, with gloo and with shift (protected, on the software NIC, a private etcd), by
yardstick_cases.py.
Exit status 0: shift passes whatever gloo passes, but for what stands in KNOWN, with its reason.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from shiftverbs.commands.demo.etcd_server import EtcdServer
from shiftverbs.commands.demo.network import SoftNetwork

HERE = Path(__file__).parent
RANKS = 4
#: How long one case may take, in seconds, before torch's harness ends it.
CASE_S = 90
#: Cases that gloo passes and shift can not, and why: `make yardstick` says so if one of them passes.
KNOWN = dict.fromkeys(
    (
        "test_monitored_barrier_failure_order",
        "test_monitored_barrier_gloo",
        "test_monitored_barrier_gloo_rank_0_timeout",
        "test_monitored_barrier_gloo_subgroup",
        "test_monitored_barrier_wait_all_ranks",
    ),
    "torch.distributed.monitored_barrier asks for gloo by name",
)

#: By case: how it ended (passed, skipped, failed), and why.
Outcomes = Mapping[str, tuple[str, str]]


def run(backend: str, names: Sequence[str], network: SoftNetwork, etcd: EtcdServer, log: Path) -> Outcomes:
    """All cases with a backend.

    :param log: what they print besides
    :raises RuntimeError: their process ended early
    """
    env = network.environment("a", os.environ) | {
        "BACKEND": backend,
        "WORLD_SIZE": str(RANKS),
        "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(CASE_S),
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "SHIFTVERBS_ETCD": etcd.endpoint,
        "SHIFTVERBS_JOB": f"yardstick-{backend}",
    }
    command = [sys.executable, str(HERE / "yardstick_cases.py"), *names]
    found: dict[str, tuple[str, str]] = {}
    with (
        log.open("w") as errors,
        subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=errors, text=True) as child,
    ):
        assert child.stdout is not None
        for line in child.stdout:
            if not line.startswith("{"):
                continue  # the harness's own words
            case = json.loads(line)
            found[case["name"]] = (case["how"], case["why"])
            print(f"\r{backend}: {len(found)} cases", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    if child.returncode:
        raise RuntimeError(f"the cases with {backend} ended with {child.returncode}: see {log}")
    return found


def short(why: str) -> str:
    """The last words of a traceback that name an error, or of anything."""
    lines = [line.strip() for line in why.splitlines() if line.strip()]
    named = [
        line for line in lines if line.split(":")[0].endswith(("Error", "Exception", "Timeout", "Failed"))
    ]
    return (named or lines or [""])[-1][:200]


def report(gloo: Outcomes, shift: Outcomes) -> tuple[str, bool]:
    """The table, and whether all is as it is known to be."""
    passed = sorted(name for name, (how, _) in gloo.items() if how == "passed")
    short_of = [name for name in passed if shift[name][0] != "passed"]
    lines = []
    for backend, outcomes in (("gloo", gloo), ("shift", shift)):
        count = Counter(how for how, _ in outcomes.values())
        lines.append(
            f"{backend}: {len(outcomes)} cases, {count['passed']} passed, {count['skipped']} skipped, "
            f"{count['failed']} failed"
        )
    lines.append(f"of {len(passed)} that gloo passes, shift passes {len(passed) - len(short_of)}")
    for name in short_of:
        how, why = shift[name]
        lines.append(f"  {name} {how}: {KNOWN.get(name) or short(why)}")
    unknown = [name for name in short_of if name not in KNOWN]
    better = [name for name in KNOWN if name in passed and shift[name][0] == "passed"]
    lines += [f"NOT KNOWN to fall short: {name}" for name in unknown]
    lines += [f"known to fall short, but passes: {name}" for name in better]
    return "\n".join(lines), not unknown and not better


def main() -> int:
    """Run, print; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="some cases (default: all)")
    parser.add_argument(
        "--output", type=Path, default=Path("build/yardstick"), help="logs, and outcomes as JSON"
    )
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    network, etcd = SoftNetwork(), EtcdServer()
    try:
        etcd.start()
        gloo, shift = (
            run(backend, options.names, network, etcd, options.output / f"{backend}.log")
            for backend in ("gloo", "shift")
        )
    finally:
        etcd.close()
        network.close()
    text, good = report(gloo, shift)
    print(text)
    print(f"took {time.monotonic() - begun:.0f} s; what each said: {options.output}")
    (options.output / "outcomes.json").write_text(json.dumps({"gloo": gloo, "shift": shift}, indent=1) + "\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
