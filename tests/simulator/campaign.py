# SPDX-License-Identifier: BSD-3-Clause
"""Run many schedules: `python tests/simulator/campaign.py FIRST LAST [JOBS]`, on so many processes (default 1).

Each seed from FIRST up to and without LAST is one schedule. The last line is the summary: of what code (a digest of
all that a schedule runs, so that campaigns of the same code add up), how many, how fast, how they ended, which seeds
failed. Exit status 1 if any did.
"""

from __future__ import annotations

import collections
import gc
import hashlib
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

from simulator.checks import over  # noqa: E402
from simulator.schedule import Schedule  # noqa: E402  (found through the lines above)

CHUNK = 250
COLLECT = 25  # runs between two collections of garbage
PROGRESS_S = 60


ROOT = Path(__file__).parents[2]


def digest() -> str:
    """Of the sources of all that a schedule runs: the package's and the simulator's modules, and the data path."""
    loaded = {
        Path(path) for module in list(sys.modules.values()) if (path := getattr(module, "__file__", None))
    }
    sources = {path for path in loaded if path.is_relative_to(ROOT) and path.suffix in (".py", ".c")}
    sources |= {
        *ROOT.glob("shiftverbs/*.pyx"),
        *ROOT.glob("shiftverbs/native/**/*.px?"),
        *ROOT.glob("tests/simulator/*.c"),
    }
    sources -= {path for path in sources if ".venv" in path.parts or path == Path(__file__)}
    hashed = hashlib.sha256()
    for path in sorted(sources):
        hashed.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return hashed.hexdigest()[:12]


def chunk(first: int, last: int) -> tuple[dict[str, int], dict[int, str], float]:
    """Run some seeds; returns how they ended, what failed and how, and the CPU seconds."""
    started = time.process_time()
    ends: collections.Counter[str] = collections.Counter()
    failed: dict[int, str] = {}
    if not gc.get_freeze_count():
        gc.freeze()
    gc.disable()  # a run leaves its cycles behind as a whole
    for seed in range(first, last):
        if seed % COLLECT == 0:
            gc.collect()
        try:
            net = Schedule(seed).run()
        except Exception as error:
            failed[seed] = f"{type(error).__name__}: {str(error)[:400]}"
        else:
            ends["both protected" if all(over(app) is None for app in net.apps) else "ended"] += 1
    return dict(ends), failed, time.process_time() - started


def main() -> int:
    first, last = int(sys.argv[1]), int(sys.argv[2])
    jobs = int(sys.argv[3]) if len(sys.argv) > 3 else 1
    started = shown = time.monotonic()
    Schedule(0).run()  # what it imports, late, is part of the code
    code = digest()
    ends: collections.Counter[str] = collections.Counter()
    failed: list[int] = []
    cpu_s = 0.0
    starts = range(first, last, CHUNK)
    with ProcessPoolExecutor(jobs) as pool:
        for some_ends, some_failed, some_s in pool.map(
            chunk, starts, (min(start + CHUNK, last) for start in starts)
        ):
            ends.update(some_ends)
            cpu_s += some_s
            for seed, what in some_failed.items():
                failed.append(seed)
                print(f"seed {seed}: {what}", flush=True)
            if time.monotonic() - shown > PROGRESS_S:
                shown = time.monotonic()
                print(f"{ends.total() + len(failed)} schedules, {len(failed)} failed", flush=True)
    wall_s = time.monotonic() - started
    print(
        f"code {code}, seeds {first} to {last - 1}: {last - first} schedules in {wall_s:.0f} s on {jobs} processes,"
        f" {(last - first) / max(cpu_s, 1e-9):.0f} per CPU second, {dict(ends)}, failed: {failed or 'none'}"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
