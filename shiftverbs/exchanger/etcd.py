# SPDX-License-Identifier: BSD-3-Clause
"""The exchanger on etcd, as the application's process sees it: a connection to a broker.

This module knows nothing of etcd's protocol; neither gRPC nor protobuf ever comes into this process. It keeps what
was published and wanted, so that a broker that dies is replaced without anybody noticing: everything is told to
the next one.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import select
import signal
import socket
import threading
import time
from collections import deque
from typing import Any

from shiftverbs._core import without_signals
from shiftverbs.config import OWN_BROKER, SHARED_BROKER, Config
from shiftverbs.exchanger import records, wire
from shiftverbs.exchanger.interface import Connected, Exchanger, ExchangerEvent, Found, Rejected, Unavailable
from shiftverbs.exchanger.start import BrokerError, Connection, Looks, look_at, open_connection

logger = logging.getLogger("shiftverbs.exchanger")

# Frames waiting for a broker that does not read. Beyond it the broker is taken for dead.
MAX_QUEUED_FRAMES = 1 << 18
# How much one call of poll_events reads at most, so that it stays short.
MAX_READ_BYTES = 1 << 20
# A broker that lived longer did not die of something that kills the next one at once too.
STABLE_S = 10.0
WARNING_INTERVAL_S = 60.0
# After this many failures in a row, a broker that nobody asked to share is not shared any more:
# who started it may have had an environment in which none can live.
SHARED_TRIES = 3

# How often a broker is asked whether it is there; and how often in a row it may be found without an answer, and without
# having had one turn of a processor meanwhile, before it is taken for stopped.
PING_S = 7.5
PINGS = 3

_UNSEEN = object()
_TIMER_FLAGS = os.O_CLOEXEC | os.O_NONBLOCK


class EtcdExchanger(Exchanger):
    """An exchanger on etcd.

    config: names the etcd, the job and the broker. This waits for nothing: a thread gets the broker, and the
    first event, Connected or Unavailable, tells how it went.
    """

    def __init__(self, config: Config):
        if not config.etcd:
            raise ValueError("no etcd endpoint is configured")
        self._config = config
        self._prefix = records.job_prefix(config.job)
        # Guards all below but _commands and _rung. Never waited for by publish and its like, as by poll_events, which
        # carries out what they leave in _commands.
        self._lock = threading.Lock()
        self._commands: deque[tuple[str, str, records.QpRecord | None, str]] = deque()
        # Whether the bell was rung for them.
        self._rung = False
        self._published: dict[str, records.QpRecord] = {}
        # Wanted keys, each with what was last delivered for it: a record, None, or why what stands there is refused.
        self._wanted: dict[str, object] = {}
        self._events: deque[ExchangerEvent] = deque()
        self._connection: Connection | None = None
        self._queue: deque[bytes] = deque()
        self._interest = 0
        self._connected_at = 0.0
        self._failures = 0
        self._state: ExchangerEvent | None = None
        # What we wait for while there is no state yet, and since when.
        self._phase = ("a broker is being started", time.monotonic())
        # What the broker said it was doing, while it has not told of etcd.
        self._last_said = ""
        # Whether the last ping is answered.
        self._has_answered = True
        # How often in a row it was not, and what was seen of the broker last.
        self._silent = 0
        self._seen: Looks | None = None
        # Readable when the broker needs a look; -1 where the system has no such descriptor.
        self._timer = ctypes.CDLL(None).timerfd_create(time.CLOCK_MONOTONIC, _TIMER_FLAGS)
        # Whether this broker has told of etcd: it is past what ends a start.
        self._has_told = False
        self._warned_at: float | None = None
        self._outage_told = False
        self._closed = threading.Event()
        self._pid = os.getpid()
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll = select.epoll(flags=select.EPOLL_CLOEXEC)
        self._epoll.register(self._bell, select.EPOLLIN)
        if self._timer >= 0:
            self._epoll.register(self._timer, select.EPOLLIN)
        self._start_connecting(0.0)

    # The interface

    def publish(self, key: str, record: records.QpRecord) -> None:
        self._check(key)
        self._command("put", key, record, records.encode_value(key, record))

    def withdraw(self, key: str) -> None:
        self._command("del", key)

    def want(self, key: str) -> None:
        self._check(key)
        self._command("want", key)

    def unwant(self, key: str) -> None:
        self._command("unwant", key)

    def fileno(self) -> int:
        return -1 if self._epoll.closed else self._epoll.fileno()

    def poll_events(self) -> list[ExchangerEvent]:
        if os.getpid() != self._pid:
            return []
        # Not waited for either: the collector may run in the thread that has the lock, and close a QP, which takes the
        # lock under which we are called. What makes the descriptor readable is still there then.
        if not self._lock.acquire(blocking=False):
            return []
        try:
            if self._closed.is_set():
                return []
            ready = {descriptor for descriptor, _ in self._epoll.poll(0)}
            if self._bell in ready:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._bell)
            # After the bell was read: who sets it from now on rings for the next time. Before the commands are taken:
            # who found it set had left one by then.
            self._rung = False
            self._take_commands()
            connection = self._connection
            if connection is not None and connection.sock.fileno() in ready:
                self._receive()
            # A broker's end is no end of the connection where another process has a copy of its socket: a forked child.
            if connection is not None and connection is self._connection and connection.pidfd in ready:
                self._lose("the broker has ended")
            if self._timer in ready:
                self._see_that_it_moves()
            self._send()
            events = [
                event
                for event in self._events
                if not isinstance(event, Found | Rejected)
                or event.key in self._wanted
                or (isinstance(event, Rejected) and event.key in self._published)
            ]
            self._events.clear()
            return events
        except BaseException:
            # The bell that was rung for what is left, here or in the queue, may be read.
            self._rung = False
            self._ring()
            raise
        finally:
            self._lock.release()

    def close(self, after_fork: bool = False) -> None:
        if after_fork or os.getpid() != self._pid:
            # No lock: the thread that holds it may not exist in this process.
            self._closed.set()
            if self._connection is not None:
                self._connection.close()
                self._connection = None
            self._close_descriptors()
            return
        deadline = time.monotonic() + self._config.exchanger_close_ms / 1000
        # In vain only when a finalizer closes us in the middle of poll_events: the end of the process does the rest.
        if not self._lock.acquire(timeout=self._config.exchanger_close_ms / 1000):
            return
        try:
            if self._closed.is_set():
                return
            self._closed.set()
            if self._connection is not None:
                self._take_leave(self._connection.sock, deadline)
                self._connection.close()
                self._connection = None
            self._queue.clear()
            self._events.clear()
            self._close_descriptors()
        finally:
            self._lock.release()

    @property
    def progress(self) -> str:
        if self._state is not None:
            return ""
        phase, since = self._phase
        return f"{phase}, for {time.monotonic() - since:.1f} s"

    @property
    def broker_pid(self) -> int | None:
        """The process id of the broker, None while there is none. For messages and tests."""
        connection = self._connection
        return None if connection is None else connection.pid

    # Commands

    def _check(self, key: str) -> None:
        if self._closed.is_set():
            raise RuntimeError("the exchanger is closed")
        records.parse_key(key)
        if not key.startswith(self._prefix):
            raise records.RecordError(key, "belongs to another job")

    def _command(
        self, operation: str, key: str, record: records.QpRecord | None = None, text: str = ""
    ) -> None:
        """Leave something for poll_events to tell the broker, which is woken once for all that is left until then."""
        # A forked child shares the connection with its parent: it must not say a word there.
        if self._closed.is_set() or os.getpid() != self._pid:
            return
        self._commands.append((operation, key, record, text))
        if self._rung:
            return
        try:
            self._rung = True  # before the bell: poll_events may clear it at once
            self._ring()
        except BaseException:
            # Another thread may have relied on it.
            self._rung = False
            self._ring()
            raise

    def _ring(self) -> None:
        # Closed in between: nobody is left to be woken.
        with contextlib.suppress(OSError):
            os.eventfd_write(self._bell, 1)

    def _take_commands(self) -> None:
        while self._commands:
            operation, key, record, text = self._commands[0]
            # First told, then noted, and only then let go of: where an interrupt comes between, it is told twice.
            if record is not None:
                self._tell({"op": "put", "key": key, "value": text})
                self._published[key] = record
            elif operation == "del":
                if key in self._published:
                    self._tell({"op": "del", "key": key})
                    del self._published[key]
            elif operation == "want":
                if key not in self._wanted:
                    self._tell({"op": "want", "key": key})
                    self._wanted[key] = _UNSEEN
            elif key in self._wanted:
                self._tell({"op": "unwant", "key": key})
                del self._wanted[key]
            self._commands.popleft()

    def _tell(self, frame: dict[str, Any]) -> None:
        # Without a connection nothing is queued: the next broker is told everything that holds by then.
        if self._connection is not None:
            self._queue.append(wire.encode(frame))

    # The connection

    def _start_connecting(self, pause_s: float) -> None:
        thread = threading.Thread(
            target=self._connect, args=(pause_s,), name="shiftverbs-broker-start", daemon=True
        )
        try:
            without_signals(thread.start)
        except RuntimeError as error:  # the interpreter is ending
            self._set_state(Unavailable(f"no broker: {error}"))

    def _connect(self, pause_s: float) -> None:
        """Get a broker, for as long as it takes. Runs in a thread of its own."""
        config = self._config
        while not self._closed.wait(pause_s):
            connection = None
            try:
                unlucky = config.broker == SHARED_BROKER and self._failures >= SHARED_TRIES
                asked = config.replace(broker=OWN_BROKER) if unlucky else config
                connection = open_connection(asked, self._enter)
            except (BrokerError, OSError) as error:
                reason = str(error)
            except Exception as error:
                reason = f"no broker: {error!r}"
            with self._lock:
                if self._closed.is_set():
                    if connection is not None:
                        connection.close()
                    return
                if connection is not None:
                    self._take_over(connection)
                    break
                self._failures += 1
                self._set_state(Unavailable(reason))
                pause_s = self._pause_s()

    def _enter(self, phase: str) -> None:
        """For those that ask why there is no news of etcd yet."""
        self._phase = (phase, time.monotonic())

    def _pause_s(self) -> float:
        config = self._config
        doubled_ms = config.broker_backoff_min_ms * 2 ** min(self._failures, 20)
        return min(doubled_ms, config.broker_backoff_max_ms) / 1000

    def _take_over(self, connection: Connection) -> None:
        self._connection = connection
        self._last_said = ""
        self._has_told = False
        self._has_answered = True
        self._connected_at = time.monotonic()
        self._interest = select.EPOLLIN
        self._epoll.register(connection.sock, self._interest)
        if connection.pidfd is not None:
            self._epoll.register(connection.pidfd, select.EPOLLIN)
            if connection.answers:
                self._silent, self._seen = 0, look_at(connection.pid)
                self._set_timer()
        for key, record in self._published.items():
            self._tell({"op": "put", "key": key, "value": records.encode_value(key, record)})
        for key in self._wanted:
            self._tell({"op": "want", "key": key})
        self._take_commands()
        frames, connection.frames = connection.frames, []
        for frame in frames:
            if not self._handle(frame):
                return
        self._send()

    def _lose(self, reason: str) -> None:
        connection = self._connection
        if connection is None:
            return
        self._connection = None
        self._queue.clear()
        self._epoll.unregister(connection.sock)
        if connection.pidfd is not None:
            self._epoll.unregister(connection.pidfd)
        connection.close()
        if self._last_said:
            reason = f"{reason}; the last it said: {self._last_said}"
        # A start may take longer than that on a slow host, and come to nothing all the same.
        proven = self._has_told and time.monotonic() - self._connected_at > STABLE_S
        self._failures = 0 if proven else self._failures + 1
        self._set_state(Unavailable(reason))
        self._start_connecting(self._pause_s())

    def _send(self) -> None:
        if self._connection is None:
            return
        if len(self._queue) > MAX_QUEUED_FRAMES:
            self._lose("the broker does not read what it is told")
            return
        try:
            while self._queue:
                # Frames are short: many of them in one system call.
                chunk = self._queue.popleft()
                while self._queue and len(chunk) < wire.MAX_FRAME_BYTES:
                    chunk += self._queue.popleft()
                try:
                    sent = self._connection.sock.send(chunk, socket.MSG_NOSIGNAL)
                except BlockingIOError:
                    sent = 0
                if sent < len(chunk):
                    self._queue.appendleft(chunk[sent:])
                    break
        except OSError as error:
            self._lose(f"the broker is gone ({error})")
            return
        interest = select.EPOLLIN | (select.EPOLLOUT if self._queue else 0)
        if interest != self._interest:
            self._interest = interest
            self._epoll.modify(self._connection.sock, interest)

    def _receive(self) -> None:
        read = 0
        while self._connection is not None and read < MAX_READ_BYTES:
            try:
                data = self._connection.sock.recv(1 << 17)
                if not data:
                    self._lose("the broker is gone")
                    return
                read += len(data)
                for frame in self._connection.reader.feed(data):
                    if not self._handle(frame):
                        return
            except BlockingIOError:
                return
            except OSError as error:
                self._lose(f"the broker is gone ({error})")
            except wire.WireError as error:
                self._lose(f"the broker talks nonsense: {error}")

    def _set_timer(self) -> None:
        """Look at the broker once more, PING_S from now."""
        if self._timer >= 0:
            whole, part = divmod(PING_S, 1.0)
            spec = (ctypes.c_long * 4)(0, 0, int(whole), int(part * 1e9))
            ctypes.CDLL(None).timerfd_settime(self._timer, 0, spec, None)

    def _see_that_it_moves(self) -> None:
        """A broker that stands still, as in a suspended job, is ended: etcd would forget its clients' keys.

        Counts looks, not seconds: a process that was stopped meanwhile made none.
        """
        connection = self._connection
        try:
            os.read(self._timer, 8)
        except OSError:  # it is not time
            return
        if (
            connection is None or connection.pidfd is None or not connection.answers
        ):  # the timer was another one's
            return
        now = look_at(connection.pid)
        self._silent = (
            self._silent + 1 if now is not None and now == self._seen and not self._has_answered else 0
        )
        self._seen = now
        if self._silent >= PINGS:
            # It would keep its socket from any successor. One that got processor time is slow, and worth waiting for.
            with contextlib.suppress(OSError, AttributeError):
                signal.pidfd_send_signal(connection.pidfd, signal.SIGKILL)
            self._lose("the broker stands still")
            return
        self._has_answered = False
        self._tell({"op": "ping"})
        self._set_timer()

    def _handle(self, frame: dict[str, Any]) -> bool:
        """Take in one frame. Returns whether to go on reading the connection."""
        event = frame.get("ev")
        if event in ("up", "down", "fatal"):
            self._last_said = ""
            self._has_told = self._has_told or event != "fatal"
        if event == "up":
            self._set_state(Connected())
        elif event == "down":
            self._set_state(Unavailable(str(frame.get("reason"))))
        elif event == "starting":
            self._last_said = str(frame.get("phase"))[:200]
            self._enter(self._last_said)
        elif event == "found":
            value = frame.get("value")
            self._answer(wire.text_of(frame, "key"), None if value is None else wire.text_of(frame, "value"))
        elif event == "oversize":
            self._answer(wire.text_of(frame, "key"), frame.get("size"))
        elif event == "refused":
            key = wire.text_of(frame, "key")
            if key in self._wanted:
                self._wanted[key] = _UNSEEN  # should access be granted some day, the value is news
            self._events.append(Rejected(key, f"{key}: {frame.get('reason')}"))
        elif event == "pong":
            self._has_answered = True
        elif event == "fatal":
            self._lose(str(frame.get("reason")))
            return False
        # Anything else is a newer broker's news, which we can do without.
        return True

    def _answer(self, key: str, value: object) -> None:
        """The state of a wanted key: its text, None when absent, or a number of bytes when too large."""
        if key not in self._wanted:
            return
        event: Found | Rejected
        try:
            if value is None:
                event = Found(key, None)
            elif isinstance(value, str):
                event = Found(key, records.decode_value(key, value))
            else:
                raise records.RecordError(
                    key, f"the value has more than {records.MAX_VALUE_BYTES} bytes, which is the limit"
                )
        except records.RecordError as error:
            event = Rejected(key, str(error))
        told = event.value if isinstance(event, Found) else event.reason
        # After an outage everything is answered anew.
        if self._wanted[key] != told:
            self._wanted[key] = told
            self._events.append(event)

    def _set_state(self, state: Connected | Unavailable) -> None:
        if state == self._state:
            return
        now = time.monotonic()
        if isinstance(state, Unavailable):
            due = self._warned_at is None or now - self._warned_at > WARNING_INTERVAL_S
            level = logging.WARNING if due and not isinstance(self._state, Unavailable) else logging.DEBUG
            if level == logging.WARNING:
                self._warned_at = now
                self._outage_told = True
            text = "etcd cannot be used: %s; protected QPs stay protected, others wait for it (see SHIFTVERBS_ETCD)"
            logger.log(level, text, state.reason)
        elif self._outage_told:  # of one that was not told of, its end is no news either
            self._outage_told = False
            logger.info("etcd can be used again")
        self._state = state
        self._events.append(state)
        self._ring()

    # The end

    def _take_leave(self, sock: socket.socket, deadline: float) -> None:
        """Have everything withdrawn and wait until `deadline` for the broker to say that it is."""
        assert self._connection is not None
        # What is not sent yet need not be: but a frame once begun must be finished.
        first = self._queue.popleft() if self._queue else b""
        rest = first[: first.find(b"\n") + 1]
        reader = self._connection.reader
        try:
            sock.settimeout(max(0.001, deadline - time.monotonic()))
            sock.sendall(rest + wire.encode({"op": "bye"}))
            while (left := deadline - time.monotonic()) > 0:
                sock.settimeout(left)
                data = sock.recv(1 << 17)
                if not data or any(frame.get("ev") == "bye" for frame in reader.feed(data)):
                    return
            logger.info("etcd did not confirm the withdrawal in time; the lease will run out")
        except TimeoutError:
            logger.info("etcd did not confirm the withdrawal in time; the lease will run out")
        except (OSError, wire.WireError):
            pass

    def _close_descriptors(self) -> None:
        bell, self._bell = self._bell, -1
        if bell >= 0:
            self._epoll.close()
            os.close(bell)
            if self._timer >= 0:
                os.close(self._timer)
                self._timer = -1
