# SPDX-License-Identifier: BSD-3-Clause
"""ib_write_bw, ib_read_bw and ib_send_bw: the client keeps the send queues full, the server takes what comes.

The server's side costs nothing in a plain RDMA WRITE or READ test: it waits on TCP and prints the client's figures.
With -b it does as the client does, at the same time, and both print the sum of both directions.
Where messages consume receives (SEND, WRITE with immediate) it counts them and prints its own.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from benchmarks.perftest import report
from benchmarks.perftest.exchange import Exchange
from benchmarks.perftest.options import PEAK_LIMIT, Options
from benchmarks.perftest.verbs import CompletionError, Endpoint

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
        opcode = {
            "send": e.IBV_WR_SEND,
            "read": e.IBV_WR_RDMA_READ,
            "write": e.IBV_WR_RDMA_WRITE_WITH_IMM if options.use_imm else e.IBV_WR_RDMA_WRITE,
        }[options.test.verb]
        self.endpoint, self.size = endpoint, size
        self.moderation = options.moderation(size)
        indexes = range(len(endpoint.qps))
        self.plain = [endpoint.send_wr(size, opcode, signaled=False, index=index) for index in indexes]
        self.signaled = [endpoint.send_wr(size, opcode, signaled=True, index=index) for index in indexes]

    def run_count(self, iters: int, look_for_peak: bool) -> report.Bandwidth:
        """Send this many messages on each QP.

        :raises CompletionError: one failed
        """
        times: tuple[list[int], list[int]] | None = ([], []) if look_for_peak else None
        clock = time.perf_counter_ns
        start = clock()
        total = self._loop(lambda posted: posted < iters, iters, times)
        elapsed = clock() - start
        peak_s = report.peak_time(*times) if times is not None else 0.0
        return report.Bandwidth(self.size, total, elapsed / 1e9, peak_s)

    def run_time(self, duration_s: float, margin_s: float) -> tuple[report.Bandwidth, int]:
        """Send for a time; what completes within the margins at both ends is not counted.

        :return: the figures, and how many messages were sent altogether
        :raises CompletionError: one failed
        """
        window = Window(duration_s, margin_s)
        clock = time.perf_counter
        total = self._loop(lambda posted: clock() < window.stop, None, None, window.look)
        return window.figures(self.size, total), total

    def _loop(
        self,
        more: Callable[[int], bool],
        final: int | None,
        times: tuple[list[int], list[int]] | None,
        progress: Callable[[int], None] | None = None,
    ) -> int:
        """Post while `more` says so and the queues have room, and poll; return how many were sent.

        :param more: told how many were posted on a QP, says whether that QP takes another
        :param final: how many each QP will get, if known: the last one is signaled
        :param times: get the time of each post, and the time each completion was seen, once for each message it
            stands for
        :param progress: called with the number completed after each successful poll
        """
        endpoint, moderation = self.endpoint, self.moderation
        cq, depth = endpoint.send_cq, endpoint.options.tx_depth
        posts = [qp.post_send for qp in endpoint.qps]
        plain, signaled = self.plain, self.signaled
        clock = time.perf_counter_ns
        sending = list(range(len(posts)))
        posted, completed, since_signal = [0] * len(posts), [0] * len(posts), [0] * len(posts)
        # The number of messages that each outstanding completion stands for.
        waiting: list[deque[int]] = [deque() for _ in posts]
        done = 0
        while True:
            for i in sending:
                stopped = False
                while posted[i] - completed[i] < depth:
                    stopped = not more(posted[i])
                    # A timed run ends in the middle of a batch: one more message flushes it out.
                    if stopped and (final is not None or not since_signal[i]):
                        break
                    since_signal[i] += 1
                    posted[i] += 1
                    if times is not None:
                        times[0].append(clock())
                    if since_signal[i] == moderation or posted[i] == final or stopped:
                        posts[i](signaled[i])
                        waiting[i].append(since_signal[i])
                        since_signal[i] = 0
                    else:
                        posts[i](plain[i])
                    if stopped:
                        break
                if stopped:
                    sending = [other for other in sending if other != i]
            if not sending and completed == posted:
                return done
            count, completions = cq.poll(POLL_BATCH)
            if not count:
                continue
            for wc in completions:
                if wc.status:
                    raise CompletionError(wc, "client", sum(posted), done)
                i = wc.wr_id
                stands_for = waiting[i].popleft()
                completed[i] += stands_for
                done += stands_for
                if times is not None:
                    times[1].extend([clock()] * stands_for)
            if progress is not None:
                progress(done)


class Receiver:
    """The server's loop for messages that consume receives.

    The queues are filled once, for the largest size, and every receive is posted again as it completes.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        size = max(endpoint.options.sizes)
        self.wrs = [endpoint.recv_wr(size, index) for index in range(len(endpoint.qps))]
        for qp, wr in zip(endpoint.qps, self.wrs, strict=True):
            for _ in range(endpoint.rx_depth):
                qp.post_recv(wr)

    def run(self, size: int, told: Callable[[], int | None]) -> report.Bandwidth:
        """Count messages, the first one starting the clock, until all have come.

        :param size: their size in bytes
        :param told: returns how many will come, once that is known
        :raises CompletionError: one failed
        """
        cq, wrs, options = self.endpoint.recv_cq, self.wrs, self.endpoint.options
        posts = [qp.post_recv for qp in self.endpoint.qps]
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
                posts[wc.wr_id](wrs[wc.wr_id])
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
        figures = measure(endpoint, exchange, options, size, receiver)
        print(figures.row(options.gbits), flush=True)


def measure(
    endpoint: Endpoint, exchange: Exchange, options: Options, size: int, receiver: Receiver | None
) -> report.Bandwidth:
    """Run one size on both sides; return the figures. receiver: the server's, where messages consume receives."""
    if options.bidirectional:
        return _both(endpoint, exchange, options, size)
    if options.is_server:
        return _serve(receiver, exchange, options, size)
    return _drive(endpoint, exchange, options, size)


def _drive(endpoint: Endpoint, exchange: Exchange, options: Options, size: int) -> report.Bandwidth:
    sender = Sender(endpoint, size)
    exchange.barrier(f"start {size}")
    figures, total = _send(sender, options)
    exchange.send(f"sent {total}")
    exchange.send(figures.encode())
    exchange.barrier(f"end {size}")
    return figures


def _send(sender: Sender, options: Options) -> tuple[report.Bandwidth, int]:
    """Send as the options say; return the figures, and how many messages were sent altogether."""
    if options.duration_s is not None:
        return sender.run_time(options.duration_s, options.margin_s)
    figures = sender.run_count(options.iters, not options.no_peak and options.iters <= PEAK_LIMIT)
    return figures, figures.iters


def _both(endpoint: Endpoint, exchange: Exchange, options: Options, size: int) -> report.Bandwidth:
    """One size with both sides sending: the sum of both directions."""
    sender = Sender(endpoint, size)
    exchange.barrier(f"start {size}")
    figures, _ = _send(sender, options)
    theirs = report.Bandwidth.decode(exchange.swap(figures.encode()))
    exchange.barrier(f"end {size}")
    return figures.with_other_direction(theirs)


def _serve(receiver: Receiver | None, exchange: Exchange, options: Options, size: int) -> report.Bandwidth:
    exchange.barrier(f"start {size}")
    total: int | None = None

    def told() -> int | None:
        nonlocal total
        if options.duration_s is None:
            return options.iters * options.num_qps
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
