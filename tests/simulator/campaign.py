# SPDX-License-Identifier: BSD-3-Clause
"""Run many schedules: `python tests/simulator/campaign.py FIRST LAST`. Exit status 1 and the seeds if any fails."""

from __future__ import annotations

import collections
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

from simulator.schedule import Schedule  # noqa: E402  (found through the lines above)


def main() -> int:
    first, last = int(sys.argv[1]), int(sys.argv[2])
    started = time.process_time()
    ends: collections.Counter[str] = collections.Counter()
    failed = []
    for seed in range(first, last):
        try:
            net = Schedule(seed).run()
        except Exception as error:
            failed.append(seed)
            print(f"seed {seed}: {type(error).__name__}: {str(error)[:400]}", flush=True)
        else:
            ends["both protected" if all(side.over is None for side in net.sides) else "ended"] += 1
    seconds = time.process_time() - started
    print(
        f"{last - first} schedules, {(last - first) / seconds:.0f} per CPU second, {dict(ends)}, failed: {failed}"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
