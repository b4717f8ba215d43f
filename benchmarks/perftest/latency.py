"""ib_write_lat: one message there, one back, as fast as both sides can.

Each side writes a counter into the last byte of the other's buffer and spins on its own. Reported is half
of a round trip, as perftest does.
"""

from __future__ import annotations

import time

from . import report
from .exchange import Exchange
from .options import Options
from .verbs import CompletionError, Endpoint

#: A spinning side looks for errors of its own sends and of the other side once in so many turns.
LOOK_EVERY = 50_000


class PingPong:
    """One side of the exchange for one message size."""

    def __init__(self, endpoint: Endpoint, exchange: Exchange, size: int) -> None:
        e = endpoint.verbs.enums
        self.endpoint, self.exchange, self.size = endpoint, exchange, size
        self.wr = endpoint.send_wr(size, e.IBV_WR_RDMA_WRITE, signaled=True)
        self.sent = self.completed = self.received = 0
        # The last byte a message touches, there and here.
        self.out, self.into = size - 1, endpoint.half + size - 1
        endpoint.buffer[self.out] = endpoint.buffer[self.into] = 0

    def post(self) -> None:
        """Send the next message; collects completions so that the queue never fills.

        :raises CompletionError: an earlier one failed
        """
        endpoint = self.endpoint
        # With no more than one message outstanding the buffer is ours again once the answer came; but its
        # completion may come later than the answer, and inline data are copied at once.
        self.collect(block=self.sent - self.completed >= min(endpoint.options.tx_depth, 8))
        self.sent += 1
        endpoint.buffer[self.out] = self.sent & 0xFF
        endpoint.qp.post_send(self.wr)

    def collect(self, block: bool = False) -> None:
        """Poll own completions, at least one if block is set.

        :raises CompletionError: one failed
        """
        while True:
            count, completions = self.endpoint.send_cq.poll(8)
            for wc in completions if count else ():
                if wc.status:
                    side = "server" if self.endpoint.options.is_server else "client"
                    raise CompletionError(wc, side, self.sent, self.completed)
                self.completed += 1
            if count or not block:
                return

    def wait(self) -> bool:
        """Spin until the next message has arrived; False if the other side says on TCP that it is over."""
        buffer, into = self.endpoint.buffer, self.into
        wanted = (self.received + 1) & 0xFF
        turns = 0
        while buffer[into] != wanted:
            turns += 1
            if turns % LOOK_EVERY == 0:
                self.collect()
                if self.exchange.pending():
                    return False
        self.received += 1
        return True

    def finish(self) -> None:
        """Collect what is still outstanding."""
        while self.completed < self.sent:
            self.collect(block=True)


def run(endpoint: Endpoint, exchange: Exchange, options: Options) -> None:
    """Run all sizes on a connected endpoint and print the table."""
    print(report.latency_columns(options), flush=True)
    for size in options.sizes:
        pair = PingPong(endpoint, exchange, size)
        exchange.barrier(f"start {size}")
        trips = _answer(pair, options) if options.is_server else _ask(pair, options)
        pair.finish()
        exchange.barrier(f"end {size}")
        figures = report.Latency(size, trips)
        if options.histogram or options.unsorted_out:
            print("#, usec")
            for index, value in enumerate(trips if options.unsorted_out else sorted(trips), 1):
                print(f"{index}, {value:.3f}")
        print(figures.row() if options.duration_s is None else figures.duration_row(), flush=True)


def _ask(pair: PingPong, options: Options) -> list[float]:
    """The client's loop; returns half round trips in microseconds."""
    clock = time.perf_counter_ns
    start = previous = clock()
    stop = None if options.duration_s is None else start + int(options.duration_s * 1e9)
    margin = int(options.margin_s * 1e9)
    trips: list[float] = []
    count = 0
    while count < options.iters if stop is None else previous < stop:
        pair.post()
        if not pair.wait():
            raise RuntimeError("the server ended early")
        now = clock()
        count += 1
        if stop is None or start + margin <= now <= stop - margin:
            trips.append((now - previous) / 2000)
        previous = now
    pair.exchange.send(f"sent {count}")
    return trips


def _answer(pair: PingPong, options: Options) -> list[float]:
    """The server's loop; returns its own half round trips in microseconds."""
    clock = time.perf_counter_ns
    trips: list[float] = []
    previous = 0
    while options.duration_s is not None or pair.received < options.iters:
        if not pair.wait():
            break
        now = clock()
        if previous:
            trips.append((now - previous) / 2000)
        previous = now
        pair.post()
    said = pair.exchange.receive()
    if said != f"sent {pair.received}":
        raise RuntimeError(f"answered {pair.received} messages, but the client says: {said}")
    return trips
