# SPDX-License-Identifier: BSD-3-Clause
"""What every ib_* script runs: options, endpoint, exchange, measurement, and errors in words."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks.perftest import bandwidth, latency, report
from benchmarks.perftest.exchange import Exchange, ExchangeError
from benchmarks.perftest.options import Test, parse
from benchmarks.perftest.verbs import CompletionError, Endpoint, Verbs


def main(test: Test, argv: Sequence[str] | None = None) -> int:
    """Run one program of the suite; return its exit status."""
    options = parse(test, argv)
    try:
        verbs = Verbs(options.module)
    except ImportError as error:
        print(error, file=sys.stderr)
        return 1
    try:
        endpoint = Endpoint(verbs, options)
    except (ValueError, verbs.Error) as error:
        print(error, file=sys.stderr)
        return 1
    try:
        if options.host is None:
            exchange = Exchange.listen(options.port)
        else:
            exchange = Exchange.connect(options.host, options.port)
        report.print_header(endpoint, options.moderation(options.sizes[0]))
        endpoint.connect(exchange)
        report.print_addresses(endpoint.locals, endpoint.peers, test)
        if options.protected:
            endpoint.wait_protected()
        (latency if test.latency else bandwidth).run(endpoint, exchange, options)
        print(report.LINE, flush=True)
        exchange.close()
    except (CompletionError, ExchangeError, RuntimeError, verbs.Error) as error:
        print(error, file=sys.stderr, flush=True)
        return 1
    finally:
        endpoint.close()
    return 0
