# SPDX-License-Identifier: BSD-3-Clause
"""One side of a perftest program, in short slices by command, so that two packages can take turns.

    python -m benchmarks.suite.perf_host PROGRAM PORT [HOST] PROGRAM'S OPTIONS

Commands: {"do": "slice", "size": bytes, "iters": messages} -> {"value": microseconds or MB/s}.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import statistics
import sys
from typing import Any

from benchmarks.perftest import bandwidth, latency
from benchmarks.perftest.exchange import Exchange
from benchmarks.perftest.options import Options, parse
from benchmarks.perftest.verbs import Endpoint, Verbs


class Side:
    """A connected endpoint and what one slice needs."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.endpoint = Endpoint(Verbs(options.module), options)
        with contextlib.redirect_stdout(sys.stderr):
            if options.host is None:
                self.exchange = Exchange.listen(options.port)
            else:
                self.exchange = Exchange.connect(options.host, options.port)
        self.endpoint.connect(self.exchange)
        if options.protected:
            self.endpoint.wait_protected()
        self.receiver: bandwidth.Receiver | None = None
        if options.test.latency:
            latency.prepare(self.endpoint, self.exchange, options)
        elif options.is_server and options.uses_receives:
            self.receiver = bandwidth.Receiver(self.endpoint)
        self.exchange.barrier("ready")

    def slice(self, size: int, iters: int) -> dict[str, Any]:
        """Measure once: MB/s (2^20), or the latency in microseconds that one trip in ten stays below.

        Why not the median: where all cores are busy, it tells when the scheduler lets the software NIC run.
        """
        options = dataclasses.replace(self.options, size=size, iters=iters, no_peak=True)
        if options.test.latency:
            trips = latency.measure(self.endpoint, self.exchange, options, size)
            if not trips:  # the server of READ and atomics
                return {"value": None}
            return {"value": sorted(trips)[len(trips) // 10], "median": statistics.median(trips)}
        figures = bandwidth.measure(self.endpoint, self.exchange, options, size, self.receiver)
        return {"value": figures.iters * size / figures.elapsed_s / 2**20}

    def close(self) -> None:
        """Release everything."""
        self.exchange.close()
        self.endpoint.close()


def main() -> int:
    """Serve commands until standard input ends; the exit status."""
    program, *arguments = sys.argv[1:]
    test = importlib.import_module(f"benchmarks.{program}").TEST
    try:
        side = Side(parse(test, arguments))
    except Exception as error:
        print(json.dumps({"failed": f"{type(error).__name__}: {error}"}), flush=True)
        return 1
    print(json.dumps({"ready": True}), flush=True)
    try:
        for line in sys.stdin:
            command = json.loads(line)
            print(json.dumps(side.slice(command["size"], command["iters"])), flush=True)
    except Exception as error:
        print(json.dumps({"failed": f"{type(error).__name__}: {error}"}), flush=True)
        return 1
    side.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
