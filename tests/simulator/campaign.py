# SPDX-License-Identifier: BSD-3-Clause
"""Run many schedules: `python tests/simulator/campaign.py [--compiled] FIRST LAST [JOBS]`, on so many processes
(default 1). --compiled: the same sources, but most of them native (build_compiled.py, a few minutes the first time).

Each seed from FIRST up to and without LAST is one schedule. The last line is the summary: of what code (a digest of
all that a schedule runs, so that campaigns of the same code add up), how many, how fast, how they ended (and a digest
of that: when, after how many events, with what chance next), which seeds failed. Exit status 1 if any did.
"""

from __future__ import annotations

import collections
import gc
import hashlib
import os
import signal
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

from simulator.checks import over  # noqa: E402
from simulator.schedule import Schedule  # noqa: E402  (found through the lines above)
from simulator.world import World  # noqa: E402

CHUNK = 250
PROGRESS_S = 60


ROOT = Path(__file__).parents[2]


def loaded() -> dict[str, Path]:
    """The files of all modules, by name."""
    files = {name: getattr(module, "__file__", None) for name, module in list(sys.modules.items())}
    return {name: Path(file) for name, file in files.items() if file}


def source(name: str, file: Path) -> Path:
    """What a module was made of: where it is native, the Python file of that name (mypyc may not say where it is)."""
    if file.suffix == ".so":
        for top in (ROOT, ROOT / "tests"):
            python = top / f"{name.replace('.', '/')}.py"
            if python.exists():
                return python
    return file


def check_native() -> int:
    """How many modules are native; RuntimeError where any that should be is not."""
    listed = ROOT / "native_modules.txt"  # only in the tree of build_compiled.py
    wanted = {ROOT / name for name in listed.read_text().split()} if listed.exists() else set()
    python = wanted - {source(name, file) for name, file in loaded().items() if file.suffix == ".so"}
    if python:
        raise RuntimeError(f"not native: {', '.join(sorted(map(str, python)))}")
    return len(wanted)


def digest() -> str:
    """Of the sources of all that a schedule runs: the package's and the simulator's modules, and the data path."""
    sources = {
        path
        for path in (source(*item) for item in loaded().items())
        if path.is_relative_to(ROOT) and path.suffix in (".py", ".c")
    }
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


def prepare() -> None:
    """In each process: the driver has no Python handlers to put off, two system calls each, whenever it runs."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def chunk(first: int, last: int) -> tuple[dict[str, int], dict[int, str], str, float]:
    """Run some seeds; returns how they ended, what failed and how, where each came to, and the CPU seconds."""
    started = time.process_time()
    ends: collections.Counter[str] = collections.Counter()
    failed: dict[int, str] = {}
    came_to = hashlib.sha256()
    if not gc.get_freeze_count():
        gc.freeze()
    gc.disable()  # a run leaves its cycles behind as a whole: the next finds their memory in the cache
    with World.entered():
        for seed in range(first, last):
            gc.collect()
            try:
                net = Schedule(seed).run()
            except Exception as error:
                failed[seed] = f"{type(error).__name__}: {str(error)[:400]}"
            else:
                clock = net.clock
                came_to.update(f"{seed} {clock.now} {clock.steps} {clock.rng.getrandbits(64)}\n".encode())
                ends["both protected" if all(over(app) is None for app in net.apps) else "ended"] += 1
    return dict(ends), failed, came_to.hexdigest(), time.process_time() - started


def main() -> int:
    if "--compiled" in sys.argv:
        from simulator.build_compiled import build

        sys.argv.remove("--compiled")
        script = build() / "tests" / "simulator" / "campaign.py"
        os.execv(sys.executable, [sys.executable, str(script), *sys.argv[1:]])
    first, last = int(sys.argv[1]), int(sys.argv[2])
    jobs = int(sys.argv[3]) if len(sys.argv) > 3 else 1
    started = shown = time.monotonic()
    Schedule(0).run()  # what it imports, late, is part of the code
    code = digest()
    native = check_native()
    came_to = hashlib.sha256()
    ends: collections.Counter[str] = collections.Counter()
    failed: list[int] = []
    cpu_s = 0.0
    starts = range(first, last, CHUNK)
    with ProcessPoolExecutor(jobs, initializer=prepare) as pool:
        for some_ends, some_failed, some_came_to, some_s in pool.map(
            chunk, starts, (min(start + CHUNK, last) for start in starts)
        ):
            ends.update(some_ends)
            cpu_s += some_s
            came_to.update(some_came_to.encode())
            for seed, what in some_failed.items():
                failed.append(seed)
                print(f"seed {seed}: {what}", flush=True)
            if time.monotonic() - shown > PROGRESS_S:
                shown = time.monotonic()
                print(f"{ends.total() + len(failed)} schedules, {len(failed)} failed", flush=True)
    wall_s = time.monotonic() - started
    count = last - first
    print(
        f"code {code} ({native} modules native), seeds {first} to {last - 1}: {count} schedules in {wall_s:.0f} s on"
        f" {jobs} processes, {count / max(cpu_s, 1e-9):.0f} per CPU second, {dict(ends)} ({came_to.hexdigest()[:12]}),"
        f" failed: {failed or 'none'}"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
