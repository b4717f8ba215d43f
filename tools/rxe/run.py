# SPDX-License-Identifier: BSD-3-Clause
"""The tests on the kernel's soft-RoCE: one guest per group, each with a time limit. `make test-rxe`, `make soak-rxe`.

Exit status: 0 all passed, or no guest can be had here (said loudly); 1 a test failed; 3 a guest hung, panicked or never
started, which says nothing about what is tested. Logs stay in OUT.
"""

from __future__ import annotations

import argparse
import compileall
import os
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import guest

ROOT = guest.HERE.parent.parent
PYTEST = "-m pytest -p pytest_timeout -p no:cacheprovider --confcutdir=tests/rxe --durations=5 --tb=short -v"
SUMMARY = re.compile(r"^=+ (.*(?:passed|failed|error|no tests ran).*) =+$", re.MULTILINE)


@dataclass(frozen=True)
class Group:
    """What one guest does.

    script: shell, in the checkout, the network with this many rails made; limit_s: for all of it, with booting.
    """

    name: str
    script: str
    limit_s: float
    rails: int = 2


def pytest_group(name: str, files: str, limit_s: float, rails: int = 2, env: str = "") -> Group:
    """A group that is a pytest run."""
    return Group(name, f"{env} $PYTHON {PYTEST} {files}", limit_s, rails)


# The longest first: as many run at once as there are cores for.
GROUPS = [
    pytest_group("failover", "tests/rxe/test_failover.py -k 'survives or infinite'", 420),
    Group("demo", "$PYTHON -m shiftverbs demo --device rxe --quick --plain --json /out/demo.json", 420),
    pytest_group("adversity", "tests/rxe/test_failover.py -k 'not survives and not infinite'", 600, rails=3),
    pytest_group(
        "conformance", "tests/rxe/test_conformance.py tests/rxe/test_doctor.py tests/rxe/test_cmid.py", 420
    ),
    pytest_group("benchmarks", "tests/rxe/test_benchmarks.py", 300),
    pytest_group("interop", "tests/rxe/test_interop.py", 240, rails=0),
]
SOAK = [
    pytest_group("soak", "tests/rxe/test_failover.py", 3600, rails=3, env="RXE_SOAK=1"),
    Group("demo", "$PYTHON -m shiftverbs demo --device rxe --plain --json /out/demo.json", 1800),
    Group(
        "bench",
        "$PYTHON -m benchmarks --quick --device rxe_a0 --only network --no-figures --output /out",
        3600,
    ),
]


def job(group: Group) -> str:
    """The script that a guest runs for a group."""
    return f"""
        cd {ROOT}
        export PYTHONDONTWRITEBYTECODE=1 PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 RXE_GUEST=1 PYTHON=.venv/bin/python
        . tools/rxe/network.sh
        RAILS={group.rails} rxe_make || exit 125
        {group.script}
    """


def compile_sources() -> None:
    """Keep the byte code of what the guests' programs import: each would compile it for itself, on an emulated core."""
    for directory in ("shiftverbs", "tests", "benchmarks"):
        compileall.compile_dir(ROOT / directory, quiet=1)


def verdict(group: Group, result: guest.Result, scale: float) -> tuple[str, str]:
    """(passed | failed | infrastructure, one line)."""
    found = SUMMARY.findall(result.log)
    line = found[-1] if found else (result.log.strip().splitlines() or ["no output"])[-1]
    if result.infrastructure_failed or result.status == 125:
        over = result.seconds >= group.limit_s * scale
        why = "over its time" if over else "the guest ended without a result"
        return "infrastructure", f"{why}; last line: {line}"
    return ("passed" if result.status == 0 else "failed"), line


def main() -> int:
    """Run the groups named, or all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--soak", action="store_true", help="the full cross product, an hour and more")
    parser.add_argument("--scale", type=float, default=float(os.environ.get("RXE_TIME_SCALE", "1")),
                        help="factor on all time limits, for a busy machine (RXE_TIME_SCALE)")  # fmt: skip
    parser.add_argument(
        "--jobs", type=int, default=min(2, os.cpu_count() or 1), help="guests at a time, a core each"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "rxe", help="where logs go")
    parser.add_argument("group", nargs="*", help="only these")
    options = parser.parse_args()
    groups = SOAK if options.soak else GROUPS
    unknown = set(options.group) - {group.name for group in groups}
    if unknown:
        parser.error(f"there is no group {', '.join(sorted(unknown))}")
    started = time.monotonic()
    try:
        kernel = guest.prepare()
    except guest.Unavailable:
        print("*" * 100)
        print(
            "*** test-rxe SKIPPED: nothing was tested on the kernel's soft-RoCE: no guest can be had (see above)."
        )
        print("*" * 100)
        return 0
    version = (kernel / "ready").read_text().strip()
    print(f"guests run Linux {version}; prepared in {time.monotonic() - started:.0f} s", flush=True)
    compile_sources()
    lines, seen = [], set()

    def run(group: Group) -> tuple[Group, guest.Result]:
        return group, guest.run(kernel, job(group), options.out / group.name, group.limit_s * options.scale)

    with ThreadPoolExecutor(options.jobs) as pool:
        runs = [
            pool.submit(run, group) for group in groups if not options.group or group.name in options.group
        ]
        for done in as_completed(runs):
            group, result = done.result()
            status, line = verdict(group, result, options.scale)
            seen.add(status)
            lines.append(f"{group.name:12} {status:14} {result.seconds:4.0f} s  {line}")
            if status != "passed":
                print(result.log, result.console, sep="\n")
            print(lines[-1], flush=True)
    print(f"== test-rxe: {time.monotonic() - started:.0f} s, logs in {options.out}", *lines, sep="\n")
    return 1 if "failed" in seen else 3 if "infrastructure" in seen else 0


if __name__ == "__main__":
    sys.exit(main())
