# SPDX-License-Identifier: BSD-3-Clause
"""The ib_*_lat programs: one message at a time, as fast as both sides can.

RDMA WRITE: each side writes a counter into the last byte of the other's buffer and spins on its own. SEND: each side
polls for the other's message. Both report half of a round trip, as perftest does. READ and atomics: the client alone
posts and polls, and reports the whole.
"""

from __future__ import annotations

import time
from typing import Any

from benchmarks.perftest import report
from benchmarks.perftest.exchange import Exchange
from benchmarks.perftest.options import Options
from benchmarks.perftest.verbs import CompletionError, Endpoint

#: A waiting side looks for errors of its own sends and of the other side once in so many turns.
LOOK_EVERY = 50_000
#: A ping-pong never has more receives posted than this: one is used at a time.
RECEIVES = 64


class PingPong:
    """One side of the exchange for one message size.

    :param wr: what is posted for each message
    """

    def __init__(self, endpoint: Endpoint, exchange: Exchange, wr: Any) -> None:
        self.endpoint, self.exchange, self.wr = endpoint, exchange, wr
        self.sent = self.completed = self.received = 0

    def post(self) -> None:
        """Send the next message; collects completions so that the queue never fills.

        :raises CompletionError: an earlier one failed
        """
        endpoint = self.endpoint
        # With no more than one message outstanding the buffer is ours again once the answer came; but its
        # completion may come later than the answer, and inline data are copied at once.
        self.collect(block=self.sent - self.completed >= min(endpoint.options.tx_depth, 8))
        self.sent += 1
        endpoint.qp.post_send(self.wr)

    def collect(self, block: bool = False) -> None:
        """Poll own completions, at least one if block is set.

        :raises CompletionError: one failed
        """
        while True:
            count, completions = self.endpoint.send_cq.poll(8)
            for wc in completions if count else ():
                self.check(wc)
                self.completed += 1
            if count or not block:
                return

    def check(self, wc: Any) -> None:
        """Look at the status of a completion.

        :raises CompletionError: it is not success
        """
        if wc.status:
            side = "server" if self.endpoint.options.is_server else "client"
            raise CompletionError(wc, side, self.sent, self.completed)

    def wait(self) -> bool:
        """Wait for the next message; False if the other side says on TCP that it is over."""
        raise NotImplementedError

    def is_over(self) -> bool:
        """Look for errors of own sends, and whether the other side has something to say on TCP."""
        self.collect()
        return self.exchange.pending()

    def finish(self) -> None:
        """Collect what is still outstanding."""
        while self.completed < self.sent:
            self.collect(block=True)


class WritePingPong(PingPong):
    """RDMA WRITE: the message is there when its last byte is."""

    def __init__(self, endpoint: Endpoint, exchange: Exchange, size: int) -> None:
        opcode = endpoint.verbs.enums.IBV_WR_RDMA_WRITE
        super().__init__(endpoint, exchange, endpoint.send_wr(size, opcode, signaled=True))
        # The last byte a message touches, there and here.
        self.out, self.into = size - 1, endpoint.half + size - 1
        endpoint.buffer[self.out] = endpoint.buffer[self.into] = 0

    def post(self) -> None:
        """Send the next message, marked with its number."""
        endpoint = self.endpoint
        self.collect(block=self.sent - self.completed >= min(endpoint.options.tx_depth, 8))
        self.sent += 1
        endpoint.buffer[self.out] = self.sent & 0xFF
        endpoint.qp.post_send(self.wr)

    def wait(self) -> bool:
        """Spin on memory."""
        buffer, into = self.endpoint.buffer, self.into
        wanted = (self.received + 1) & 0xFF
        turns = 0
        while buffer[into] != wanted:
            turns += 1
            if turns % LOOK_EVERY == 0 and self.is_over():
                return False
        self.received += 1
        return True


class SendPingPong(PingPong):
    """SEND: the message is there when its receive completes."""

    def __init__(self, endpoint: Endpoint, exchange: Exchange, size: int) -> None:
        opcode = endpoint.verbs.enums.IBV_WR_SEND
        super().__init__(endpoint, exchange, endpoint.send_wr(size, opcode, signaled=True))
        # Every message is followed by a new receive, so what the sizes before left fits the largest.
        self.receive = endpoint.recv_wr(max(endpoint.options.sizes))

    def fill(self) -> None:
        """Post the first receives; once for all sizes."""
        for _ in range(min(self.endpoint.rx_depth, RECEIVES)):
            self.endpoint.qp.post_recv(self.receive)

    def wait(self) -> bool:
        """Poll for the message, and post a receive in its place."""
        poll = self.endpoint.recv_cq.poll
        turns = 0
        while True:
            count, completions = poll(1)
            if count:
                break
            turns += 1
            if turns % LOOK_EVERY == 0 and self.is_over():
                return False
        self.check(completions[0])
        self.endpoint.qp.post_recv(self.receive)
        self.received += 1
        return True


def silent_server(options: Options) -> bool:
    """True for the server of READ and atomics: it sees nothing of them, and perftest's prints no figures either."""
    return options.is_server and options.test.one_sided


def run(endpoint: Endpoint, exchange: Exchange, options: Options) -> None:
    """Run all sizes on a connected endpoint and print the table."""
    if not silent_server(options):
        print(report.latency_columns(options), flush=True)
    prepare(endpoint, exchange, options)
    for size in options.sizes:
        trips = measure(endpoint, exchange, options, size)
        if silent_server(options):
            continue
        figures = report.Latency(size, trips, options.test.one_sided)
        if options.histogram or options.unsorted_out:
            print("#, usec")
            for index, value in enumerate(trips if options.unsorted_out else sorted(trips), 1):
                print(f"{index}, {value:.3f}")
        print(figures.row() if options.duration_s is None else figures.duration_row(), flush=True)


def prepare(endpoint: Endpoint, exchange: Exchange, options: Options) -> None:
    """Do what comes once, before the first size, on both sides."""
    if options.test.verb == "send":
        SendPingPong(endpoint, exchange, options.sizes[0]).fill()


def measure(endpoint: Endpoint, exchange: Exchange, options: Options, size: int) -> list[float]:
    """Run one size on both sides; return the trips in microseconds."""
    if options.test.one_sided:
        return _one_sided(endpoint, exchange, options, size)
    return _ping_pong(endpoint, exchange, options, size)


def _ping_pong(endpoint: Endpoint, exchange: Exchange, options: Options, size: int) -> list[float]:
    pair: PingPong
    pair = (SendPingPong if options.test.verb == "send" else WritePingPong)(endpoint, exchange, size)
    exchange.barrier(f"start {size}")
    trips = _answer(pair, options) if options.is_server else _ask(pair, options)
    pair.finish()
    exchange.barrier(f"end {size}")
    return trips


class Trips:
    """The client's clock: how long each trip took, the margins of a run by time left out.

    :param divisor_ns: nanoseconds of a trip per microsecond reported: 2000 for half round trips
    """

    def __init__(self, options: Options, divisor_ns: int) -> None:
        self._iters, self._divisor = options.iters, divisor_ns
        self._previous = start = time.perf_counter_ns()
        self._stop: int | None = None
        self._from, self._to = start, 0
        if options.duration_s is not None:
            margin = int(options.margin_s * 1e9)
            self._stop = start + int(options.duration_s * 1e9)
            self._from, self._to = start + margin, self._stop - margin
        self.count = 0
        self.us: list[float] = []

    def more(self) -> bool:
        """Whether there is another trip to make."""
        return self.count < self._iters if self._stop is None else self._previous < self._stop

    def done(self) -> None:
        """One trip ended now, and the next one begins."""
        now = time.perf_counter_ns()
        self.count += 1
        if self._stop is None or self._from <= now <= self._to:
            self.us.append((now - self._previous) / self._divisor)
        self._previous = now


def _ask(pair: PingPong, options: Options) -> list[float]:
    """The client's loop; returns half round trips in microseconds."""
    trips = Trips(options, 2000)
    while trips.more():
        pair.post()
        if not pair.wait():
            raise RuntimeError("the server ended early")
        trips.done()
    pair.exchange.send(f"sent {trips.count}")
    return trips.us


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


def _one_sided(endpoint: Endpoint, exchange: Exchange, options: Options, size: int) -> list[float]:
    """READ and atomics; returns whole round trips in microseconds, none at the server."""
    e = endpoint.verbs.enums
    opcode = {
        ("read", "FETCH_AND_ADD"): e.IBV_WR_RDMA_READ,
        ("atomic", "FETCH_AND_ADD"): e.IBV_WR_ATOMIC_FETCH_AND_ADD,
        ("atomic", "CMP_AND_SWAP"): e.IBV_WR_ATOMIC_CMP_AND_SWP,
    }[options.test.verb, options.atomic]
    exchange.barrier(f"start {size}")
    trips: list[float] = []
    if not options.is_server:
        pair = PingPong(endpoint, exchange, endpoint.send_wr(size, opcode, signaled=True))
        clock = Trips(options, 1000)
        qp, wr = endpoint.qp, pair.wr
        while clock.more():
            pair.sent += 1
            qp.post_send(wr)
            pair.collect(block=True)
            clock.done()
        trips = clock.us
    exchange.barrier(f"end {size}")
    return trips
