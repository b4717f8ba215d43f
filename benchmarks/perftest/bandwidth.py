"""ib_write_bw and ib_send_bw: the client keeps the send queue full, the server takes what comes.

The server's side costs nothing in a plain RDMA WRITE test: it waits on TCP and prints the client's figures.
Where messages consume receives (SEND, WRITE with immediate) it counts them and prints its own.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from . import report
from .exchange import Exchange
from .options import Options
from .verbs import CompletionError, Endpoint

POLL_BATCH = 16
#: How often a receiver in a timed run looks whether the client has said how many messages there were.
LOOK_EVERY = 1024


class Window:
    """The measured stretch of a run by time: a margin at both ends is left out."""

    def __init__(self, duration_s: float, margin_s: float) -> None:
        start = time.perf_counter()
        self.stop = start + duration_s
        self._begin, self._end = start + margin_s, self.stop - margin_s
        #: (completed, time) at the first look inside and at the first look past the measured stretch
        self._marks: list[tuple[int, float]] = []

    def look(self, completed: int) -> None:
        """Take note of how many messages have completed by now."""
        now = time.perf_counter()
        if (not self._marks and now >= self._begin) or (len(self._marks) == 1 and now >= self._end):
            self._marks.append((completed, now))

    def figures(self, size: int, completed: int) -> report.Bandwidth:
        """Return what was measured, given the number completed at the end.

        :raises RuntimeError: nothing completed within the stretch
        """
        marks = self._marks + [(completed, time.perf_counter())] * 2
        (first, since), (last, until) = marks[:2]
        if last == first:
            raise RuntimeError("nothing completed within the measured time: choose a longer -D")
        return report.Bandwidth(size, last - first, until - since)


class Sender:
    """The client's loop for one message size."""

    def __init__(self, endpoint: Endpoint, size: int) -> None:
        e = endpoint.verbs.enums
        options = endpoint.options
        if options.test.verb == "send":
            opcode = e.IBV_WR_SEND
        else:
            opcode = e.IBV_WR_RDMA_WRITE_WITH_IMM if options.use_imm else e.IBV_WR_RDMA_WRITE
        self.endpoint, self.size = endpoint, size
        self.moderation = options.moderation(size)
        self.plain = endpoint.send_wr(size, opcode, signaled=False)
        self.signaled = endpoint.send_wr(size, opcode, signaled=True)

    def run_count(self, iters: int, look_for_peak: bool) -> report.Bandwidth:
        """Send this many messages.

        :raises CompletionError: one failed
        """
        posted_ns: list[int] = []
        completed_ns: list[int] = []
        clock = time.perf_counter_ns
        start = clock()
        if look_for_peak:
            self._loop(lambda posted: posted < iters, iters, posted_ns, completed_ns)
        else:
            self._loop(lambda posted: posted < iters, iters, None, None)
        elapsed = clock() - start
        return report.Bandwidth(
            self.size,
            iters,
            elapsed / 1e9,
            report.peak_time(posted_ns, completed_ns) if look_for_peak else 0.0,
        )

    def run_time(self, duration_s: float, margin_s: float) -> tuple[report.Bandwidth, int]:
        """Send for a time; what completes within the margins at both ends is not counted.

        :return: the figures, and how many messages were sent altogether
        :raises CompletionError: one failed
        """
        window = Window(duration_s, margin_s)
        clock = time.perf_counter
        total = self._loop(lambda posted: clock() < window.stop, None, None, None, window.look)
        return window.figures(self.size, total), total

    def _loop(
        self,
        more: Callable[[int], bool],
        final: int | None,
        posted_ns: list[int] | None,
        completed_ns: list[int] | None,
        progress: Callable[[int], None] | None = None,
    ) -> int:
        """Post while `more` says so and the queue has room, and poll; return how many were sent.

        :param final: how many there will be, if known: the last one is signaled
        :param posted_ns: gets the time of each post
        :param completed_ns: gets the time each completion was seen, once for each message it stands for
        :param progress: called with the number completed after each successful poll
        """
        endpoint, moderation = self.endpoint, self.moderation
        qp, cq, depth = endpoint.qp, endpoint.send_cq, endpoint.options.tx_depth
        plain, signaled = self.plain, self.signaled
        clock = time.perf_counter_ns
        posted = completed = 0
        waiting: deque[int] = deque()  # the number of messages that each outstanding completion stands for
        since_signal = 0
        stopped = False
        while True:
            while not stopped and posted - completed < depth:
                if not more(posted):
                    stopped = True
                    break
                since_signal += 1
                posted += 1
                if posted_ns is not None:
                    posted_ns.append(clock())
                if since_signal == moderation or posted == final:
                    qp.post_send(signaled)
                    waiting.append(since_signal)
                    since_signal = 0
                else:
                    qp.post_send(plain)
            if stopped and since_signal and final is None:
                # A timed run ends in the middle of a batch: one more message flushes it out.
                if posted - completed < depth:
                    since_signal += 1
                    posted += 1
                    qp.post_send(signaled)
                    waiting.append(since_signal)
                    since_signal = 0
            if stopped and completed == posted:
                return posted
            count, completions = cq.poll(POLL_BATCH)
            if not count:
                continue
            for wc in completions:
                if wc.status:
                    raise CompletionError(wc, "client", posted, completed)
                stands_for = waiting.popleft()
                completed += stands_for
                if completed_ns is not None:
                    completed_ns.extend([clock()] * stands_for)
            if progress is not None:
                progress(completed)


class Receiver:
    """The server's loop for messages that consume receives.

    The queue is filled once, for the largest size, and every receive is posted again as it completes.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.wr = endpoint.recv_wr(max(endpoint.options.sizes))
        for _ in range(endpoint.rx_depth):
            endpoint.qp.post_recv(self.wr)

    def run(self, size: int, told: Callable[[], int | None]) -> report.Bandwidth:
        """Count messages, the first one starting the clock, until all have come.

        :param size: their size in bytes
        :param told: returns how many will come, once that is known
        :raises CompletionError: one failed
        """
        qp, cq, wr, options = self.endpoint.qp, self.endpoint.recv_cq, self.wr, self.endpoint.options
        clock = time.perf_counter
        seen = idle = 0
        start = last = 0.0
        window: Window | None = None
        expected = told()
        while expected is None or seen < expected:
            count, completions = cq.poll(POLL_BATCH)
            if not count:
                idle += 1
                if expected is None and idle % LOOK_EVERY == 0:
                    expected = told()
                continue
            last = clock()
            if not seen:
                start = last
                if options.duration_s is not None:
                    window = Window(options.duration_s, options.margin_s)
            for wc in completions:
                if wc.status:
                    raise CompletionError(wc, "server", 0, seen)
                seen += 1
                qp.post_recv(wr)
            if window is not None:
                window.look(seen)
        if window is not None:
            return window.figures(size, seen)
        return report.Bandwidth(size, seen, max(last - start, 1e-9))


def run(endpoint: Endpoint, exchange: Exchange, options: Options) -> None:
    """Run all sizes on a connected endpoint and print the table."""
    receiver = Receiver(endpoint) if options.is_server and options.uses_receives else None
    print(report.bandwidth_columns(options), flush=True)
    for size in options.sizes:
        figures: report.Bandwidth
        if options.is_server:
            figures = _serve(receiver, exchange, options, size)
        else:
            figures = _drive(endpoint, exchange, options, size)
        print(figures.row(options.gbits), flush=True)


def _drive(endpoint: Endpoint, exchange: Exchange, options: Options, size: int) -> report.Bandwidth:
    sender = Sender(endpoint, size)
    exchange.barrier(f"start {size}")
    if options.duration_s is None:
        look = not options.no_peak and options.iters <= 20000
        figures, total = sender.run_count(options.iters, look), options.iters
    else:
        figures, total = sender.run_time(options.duration_s, options.margin_s)
    exchange.send(f"sent {total}")
    exchange.send(figures.encode())
    exchange.barrier(f"end {size}")
    return figures


def _serve(receiver: Receiver | None, exchange: Exchange, options: Options, size: int) -> report.Bandwidth:
    exchange.barrier(f"start {size}")
    total: int | None = None

    def told() -> int | None:
        nonlocal total
        if options.duration_s is None:
            return options.iters
        if total is None and exchange.pending():
            total = _total(exchange)
        return total

    mine = None if receiver is None else receiver.run(size, told)
    if total is None:
        total = _total(exchange)
    theirs = report.Bandwidth.decode(exchange.receive())
    exchange.barrier(f"end {size}")
    return mine or theirs


def _total(exchange: Exchange) -> int:
    word, _, number = exchange.receive().partition(" ")
    if word != "sent":
        raise RuntimeError(f"expected the number of messages, got {word!r}")
    return int(number)
