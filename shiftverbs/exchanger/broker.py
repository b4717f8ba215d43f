# SPDX-License-Identifier: BSD-3-Clause
"""The broker: a process that speaks to etcd on behalf of shiftverbs processes on this host.

    python -m shiftverbs.exchanger.broker --socket PATH

runs one for the host (SHIFTVERBS_BROKER=PATH in the applications; where etcd is comes from the broker's own
environment). No hand is needed: the first process that wants one starts it, and the next ones join.

It is a process of its own so that gRPC's threads, its trouble with fork, and etcd3's need for one particular
protobuf implementation stay out of the application.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import logging
import os
import queue
import resource
import selectors
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

from shiftverbs.config import OWN_BROKER, SHARED_BROKER, Config, ConfigError
from shiftverbs.exchanger import link_events, records, wire
from shiftverbs.exchanger.coming_link import ComingLink
from shiftverbs.exchanger.key_table import KeyTable
from shiftverbs.exchanger.settings import config_of, store_identity
from shiftverbs.exchanger.socket_path import bind_socket, identity, name_broker, of_host, remove_socket
from shiftverbs.process.log_lines import Seldom

logger = logging.getLogger("shiftverbs.exchanger.broker")

MAX_KEYS_PER_CLIENT = 1 << 17
# After the last client of an own broker went: how long etcd may take to revoke its lease.
LAST_WORDS_S = 2.0
# Descriptors for all but clients: the way to etcd, logs, and what Python opens at times.
RESERVED_DESCRIPTORS = 32
# A socket and a pidfd.
DESCRIPTORS_PER_CLIENT = 2
# Where none are left all the same: how long to accept no new client.
ACCEPT_PAUSE_S = 0.5
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
# What a broker started by hand is told to end by.
STOPPING = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
_PEERCRED = struct.Struct("3i")


class Client:
    """One application's process, on its connection."""

    def __init__(self, number: int, sock: socket.socket, pidfd: int | None):
        self.number = number
        self.sock = sock
        self.pidfd = pidfd
        self.reader = wire.FrameReader()
        self.greeted = False
        self.prefix = ""
        self.published: set[str] = set()
        self.wanted: set[str] = set()
        self.leaving = False
        # What to tell it: the newest frame of each kind, so a client that does not read costs little.
        self.news: dict[tuple[str, str], Callable[[], dict[str, Any] | None]] = {}
        self.unsent = b""

    def tell(self, frame: dict[str, Any]) -> None:
        """Queue a frame; of the frames of one kind about one key only the last is sent."""
        kind = "link" if frame["ev"] in ("up", "down") else str(frame["ev"])
        self.news.pop((kind, frame.get("key", "")), None)
        self.news[kind, frame.get("key", "")] = lambda: frame

    def flush(self) -> bool:
        """Send what the socket takes. Returns whether something is left. Raises OSError when it is broken."""
        while self.news or self.unsent:
            while self.news and len(self.unsent) < wire.MAX_FRAME_BYTES:
                make = self.news.pop(next(iter(self.news)))
                frame = make()
                if frame is not None:
                    self.unsent += wire.encode(frame)
            try:
                sent = self.sock.send(self.unsent, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return True
            self.unsent = self.unsent[sent:]
        return False


class Broker:
    """The main thread: sockets on one side, the link to etcd and the table of wanted keys on the other."""

    def __init__(
        self,
        config: Config,
        listener: socket.socket | None,
        path: str | None,
        idle_exit_s: float | None,
        bound: tuple[int, int] | None = None,
    ):
        self._config = config
        self._identity = store_identity(config)
        self._listener = listener
        self._path = path
        # Which file the socket is. By now the path may be another's, but for one that was bound here.
        self._bound = bound if path is None or bound is not None else identity(path)
        self._idle_exit_s = idle_exit_s
        self._selector = selectors.DefaultSelector()
        self._inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._clients: dict[int, Client] = {}
        self._dropping: set[int] = set()
        self._next_number = 1
        self._descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        # When to take new clients again; None while they are taken.
        self._accept_at: float | None = None
        self._full_told = False
        self._stopping = False
        # When to leave those who still are there, without a word to etcd: they tell the next broker everything.
        self._leave_at: float | None = None
        self._failed = False
        self._link: link_events.Link = ComingLink(config, self.post)
        self._table = KeyTable(config, lambda keys: self._link.get(keys), self._tell_change)
        self._seldom = Seldom(logger)
        # What to tell a client that comes now about the link to etcd.
        self._status: dict[str, Any] = {"ev": "starting", "phase": "the broker loads gRPC and etcd3"}
        # Clients whose keys etcd has no room for, and why.
        self._held: dict[int, str] = {}

    def post(self, event: object) -> None:
        """Hand something to the main thread, from any thread."""
        self._inbox.put(event)
        os.eventfd_write(self._bell, 1)

    def run(self, mask: Iterable[int] | None = None) -> bool:
        """Serve until there is nobody left to serve. Returns False where nobody can be: there was no link.

        mask: of signals, once they are handled.
        """
        self._selector.register(self._bell, selectors.EVENT_READ, self._on_bell)
        if self._listener is not None:
            self._listener.setblocking(False)
            self._accept()
        # A signal that another thread was given, as in a process that is being continued, wakes nobody by itself.
        woken, wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(woken, selectors.EVENT_READ, lambda: os.read(woken, 4096))
        signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda *_: self.post("stop"))
        if mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self._link.start()
        idle_since = time.monotonic()
        end = None
        quiet = False
        while True:
            if self._clients:
                idle_since = time.monotonic()
            shared = self._listener is not None and not self._stopping
            if not self._clients and not shared:
                end = end or time.monotonic() + LAST_WORDS_S
                if not self._dropping or time.monotonic() >= end:
                    return not self._failed
            if self._leave_at is not None and time.monotonic() >= self._leave_at:
                return not self._failed
            idle = not self._clients and not self._dropping and quiet  # not even somebody at the door
            if shared and self._idle_exit_s is not None and idle:
                # A socket whose path was taken away is not found by anybody.
                if (
                    time.monotonic() - idle_since >= self._idle_exit_s
                    or identity(self._path or "") != self._bound
                ):
                    return True
            timeout = self._table.next_due_s(time.monotonic())
            if self._accept_at is not None:
                timeout = min(ACCEPT_PAUSE_S if timeout is None else timeout, ACCEPT_PAUSE_S)
                if time.monotonic() >= self._accept_at and shared:
                    self._accept()
            if (
                end is not None
                or self._leave_at is not None
                or (self._idle_exit_s is not None and not self._clients)
            ):
                timeout = min(1.0 if timeout is None else timeout, 0.5)
            ready = self._selector.select(timeout)
            quiet = all(key.fileobj is not self._listener for key, _ in ready)
            for key, _ in ready:
                key.data()
            self._table.handle_time(time.monotonic())
            for client in list(self._clients.values()):
                self._flush(client)

    def adopt(self, sock: socket.socket, pidfd: int | None = None) -> None:
        """Serve the process at the other end of `sock`; pidfd, if given, becomes readable when it dies."""
        client = Client(self._next_number, sock, pidfd)
        self._next_number += 1
        self._clients[client.number] = client
        self._link.add(client.number)
        sock.setblocking(False)
        self._selector.register(sock, selectors.EVENT_READ, lambda: self._on_readable(client))
        if pidfd is not None:
            # A forked child keeps the socket open: the end of the process itself is the certain sign.
            self._selector.register(pidfd, selectors.EVENT_READ, lambda: self._drop(client))

    def close(self) -> None:
        """Take the socket's path away."""
        if self._path is not None and self._listener is not None and self._listener.fileno() >= 0:
            remove_socket(self._path, self._listener, self._bound)

    # Clients

    def _accept(self) -> None:
        assert self._listener is not None
        self._accept_at = None
        self._selector.register(self._listener, selectors.EVENT_READ, self._on_connection)

    def _on_connection(self) -> None:
        assert self._listener is not None
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            if error.errno in _EXHAUSTED:
                # It stays readable: looking again at once would take all of a processor.
                self._selector.unregister(self._listener)
                self._accept_at = time.monotonic() + ACCEPT_PAUSE_S
                self._say_full(f"the broker cannot take another process for now: {error}")
            return
        pid, uid, _ = _PEERCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size))
        if uid != os.geteuid():
            self._seldom.warning(time.monotonic_ns(), "refused a connection from user %d", uid)
            sock.close()
        elif self._is_full():
            reason = (
                f"the broker serves {len(self._clients)} processes, more its {self._descriptors} descriptors"
            )
            self._turn_away(sock, f"{reason} (ulimit -n) do not allow")
        else:
            self._full_told = False
            self.adopt(sock, _pidfd(pid))

    def _is_full(self) -> bool:
        if self._descriptors == resource.RLIM_INFINITY:
            return False
        # etcd comes first: without descriptors for it all would be lost.
        most = max(1, (self._descriptors - RESERVED_DESCRIPTORS) // DESCRIPTORS_PER_CLIENT)
        return len(self._clients) >= most

    def _say_full(self, reason: str) -> None:
        """Once, until somebody is taken again."""
        if not self._full_told:
            self._full_told = True
            self._seldom.warning(time.monotonic_ns(), "%s", reason)

    def _turn_away(self, sock: socket.socket, reason: str) -> None:
        self._say_full(reason)
        with sock, contextlib.suppress(OSError):
            frame = wire.encode({"ev": "fatal", "reason": reason})
            sock.send(frame, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    def _on_readable(self, client: Client) -> None:
        if client.number not in self._clients:
            return
        try:
            data = client.sock.recv(1 << 18)
            if not data:
                raise ConnectionResetError
            for frame in client.reader.feed(data):
                self._handle(client, frame)
        except BlockingIOError:
            pass
        except OSError:
            self._drop(client)
        except wire.WireError as error:
            self._refuse(client, f"the broker cannot understand this process: {error}")

    def _handle(self, client: Client, frame: dict[str, Any]) -> None:
        operation = wire.text_of(frame, "op")
        if client.leaving:
            return
        if not client.greeted:
            self._greet(client, operation, frame)
        elif operation == "bye":
            client.leaving = True
            self._forget_keys(client)
            self._dropping.add(client.number)
            self._link.drop(client.number)
        elif operation == "ping":
            client.tell({"ev": "pong"})
        elif operation in ("put", "del", "want", "unwant"):
            self._handle_key(client, operation, wire.text_of(frame, "key"), frame)
        else:
            raise wire.WireError(f"unknown operation {operation[:40]!r}")

    def _greet(self, client: Client, operation: str, frame: dict[str, Any]) -> None:
        if operation != "hello" or frame.get("protocol") != wire.PROTOCOL:
            raise wire.WireError(f"it does not begin with hello of protocol {wire.PROTOCOL}")
        try:
            client.prefix = records.job_prefix(wire.text_of(frame, "job"))
        except ValueError as error:
            raise wire.WireError(str(error)) from None
        if frame.get("store") != self._identity:
            self._refuse(client, f"the broker serves etcd {self._identity}, not {frame.get('store')}")
            return
        client.greeted = True
        client.tell(
            {"ev": "hello", "pid": os.getpid(), "pid_namespace": wire.pid_namespace(), "answers": True}
        )
        client.tell(self._status)

    def _handle_key(self, client: Client, operation: str, key: str, frame: dict[str, Any]) -> None:
        try:
            records.parse_key(key)
            if not key.startswith(client.prefix):
                raise records.RecordError(key, "belongs to another job")
            keys = client.published if operation in ("put", "del") else client.wanted
            if operation in ("put", "want") and len(keys) >= MAX_KEYS_PER_CLIENT:
                raise records.RecordError(key, f"more than {MAX_KEYS_PER_CLIENT} keys in use")
            text = wire.text_of(frame, "value") if operation == "put" else ""
            if len(text) > records.MAX_VALUE_BYTES:
                raise records.RecordError(key, "the value is too large")
            if operation == "put":
                # What no reader accepts need not be stored; and etcd's client does not accept what is not UTF-8.
                records.decode_value(key, text)
        except records.RecordError as error:
            client.tell({"ev": "refused", "key": key[: records.MAX_KEY_BYTES], "reason": str(error)})
            return
        if operation == "put":
            client.published.add(key)
            self._link.put(client.number, key, text)
        elif operation == "del":
            client.published.discard(key)
            self._link.delete(client.number, key)
        elif operation == "want":
            client.wanted.add(key)
            self._table.want(key, client.number)
        else:
            client.wanted.discard(key)
            client.news.pop(("found", key), None)
            self._table.unwant(key, client.number)

    def _refuse(self, client: Client, reason: str) -> None:
        try:
            client.news.clear()
            client.tell({"ev": "fatal", "reason": reason[:1000]})
            client.flush()
        except OSError:
            pass
        self._drop(client)

    def _forget_keys(self, client: Client) -> None:
        for key in client.wanted:
            self._table.unwant(key, client.number)
        client.wanted.clear()
        client.published.clear()

    def _drop(self, client: Client) -> None:
        if self._clients.pop(client.number, None) is None:
            return
        self._forget_keys(client)
        self._selector.unregister(client.sock)
        client.sock.close()
        if client.pidfd is not None:
            self._selector.unregister(client.pidfd)
            os.close(client.pidfd)
        if not client.leaving:
            self._dropping.add(client.number)
            self._link.drop(client.number)

    def _flush(self, client: Client) -> None:
        try:
            left = client.flush()
        except OSError:
            self._drop(client)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if left else 0)
        if self._selector.get_key(client.sock).events != events:
            self._selector.modify(client.sock, events, lambda: self._on_readable(client))

    def _tell_change(self, key: str, number: int) -> None:
        """A wanted key has a value to tell: it is fetched when the client's socket takes it."""
        client = self._clients.get(number)
        if client is not None:
            client.news.pop(("found", key), None)
            client.news["found", key] = lambda: self._table.frame_for(key)

    # etcd

    def _on_bell(self) -> None:
        try:
            os.eventfd_read(self._bell)
        except BlockingIOError:
            pass
        while True:
            try:
                event = self._inbox.get_nowait()
            except queue.Empty:
                return
            if event == "stop":
                self._stop()
            elif isinstance(event, link_events.Loaded):
                assert isinstance(self._link, ComingLink)
                self._link.hand_over(event.link)
                self._link = event.link
                self._set_status({"ev": "starting", "phase": "the broker has asked etcd"})
                self._link.start()
            elif isinstance(event, link_events.NotLoaded):
                self._fail(event.reason)
            elif isinstance(event, link_events.Dropped):
                self._dropping.discard(event.owner)
                client = self._clients.get(event.owner)
                if client is not None:
                    client.tell({"ev": "bye"})
            elif isinstance(event, link_events.Refused):
                client = self._clients.get(event.owner)
                if client is not None:
                    self._seldom.warning(time.monotonic_ns(), "%s: %s", event.key, event.reason)
                    client.tell({"ev": "refused", "key": event.key, "reason": event.reason})
            elif isinstance(event, link_events.Held):
                self._held[event.owner] = event.reason
                self._tell_held(event.owner)
            elif isinstance(event, link_events.PutsTaken):
                held, self._held = self._held, {}
                for number in held:
                    client = self._clients.get(number)
                    if client is not None and not client.leaving:
                        client.tell({"ev": "up"})
            elif isinstance(event, link_events.Down):
                self._held.clear()
                self._table.handle_down()
                self._set_status({"ev": "down", "reason": event.reason[:1000]})
            else:
                if isinstance(event, link_events.Up):
                    self._set_status({"ev": "up"})
                    self._held = dict(event.held)
                    for number in self._held:
                        self._tell_held(number)
                self._table.handle(event, time.monotonic())

    def _tell_held(self, number: int) -> None:
        """To this client etcd is as good as away, for what it publishes; the others need not know."""
        client = self._clients.get(number)
        if client is not None and client.greeted and not client.leaving:
            client.tell({"ev": "down", "reason": self._held[number][:1000]})

    def _set_status(self, status: dict[str, Any]) -> None:
        now_ns = time.monotonic_ns()
        if status["ev"] == "down" and self._status["ev"] != "down":
            text = "etcd cannot be used: %s; it is asked until it answers (does it run where SHIFTVERBS_ETCD says?)"
            self._seldom.warning(now_ns, text, status["reason"])
        elif status["ev"] == "up":
            self._seldom.info(now_ns, "etcd answers")
        if status != self._status:
            self._status = status
            for client in self._clients.values():
                if client.greeted and not client.leaving:
                    client.tell(status)

    def _fail(self, reason: str) -> None:
        """Nobody can be served: those who are there, or knock, are told why."""
        self._failed = True
        logger.error("%s", reason)
        for client in list(self._clients.values()):
            self._refuse(client, reason)
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.setblocking(False)
                while True:
                    self._turn_away(self._listener.accept()[0], reason)
        self._stop()

    def _stop(self) -> None:
        if self._stopping:
            return  # asked again: SIGHUP comes after SIGTERM where a session ends
        self._stopping = True
        if self._listener is not None:
            if self._accept_at is None:
                self._selector.unregister(self._listener)
            self.close()
        if self._idle_exit_s is not None and not self._failed:
            # Whoever ends the job that happened to start us means its processes: the others' keys are not to vanish.
            self._leave_at = time.monotonic() + LAST_WORDS_S
            return
        for client in list(self._clients.values()):
            self._drop(client)


def _pidfd(pid: int) -> int | None:
    """A descriptor that is readable when process `pid` has ended; None where the system has none."""
    try:
        # 0 stands for a process that this process's PID namespace does not contain.
        return os.pidfd_open(pid) if pid > 0 else None
    except (OSError, AttributeError):
        return None


def _take_all_descriptors() -> None:
    """Raise the soft limit of open descriptors to the hard one: each client takes two."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m shiftverbs.exchanger.broker",
        description="Speaks to etcd for the shiftverbs processes of this host.",
    )
    default = "$SHIFTVERBS_BROKER, or where this user's processes look for the one they share"
    parser.add_argument("--socket", metavar="PATH", help=f"serve this UNIX socket (default: {default})")
    # How shiftverbs starts it.
    parser.add_argument("--client-fd", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--client-pidfd", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--listen-fd", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--bound", type=int, nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--settings", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def _named_path(config: Config) -> str:
    """Where a broker started by hand serves."""
    if config.broker == OWN_BROKER:
        raise ConfigError(
            "SHIFTVERBS_BROKER", OWN_BROKER, "a broker of one process is started by that process"
        )
    return of_host(config) if config.broker == SHARED_BROKER else config.broker


def _report_failure(options: argparse.Namespace, reason: str) -> None:
    """Tell the process that started us, the only way there is: over its connection."""
    try:
        if options.client_fd is not None:
            sock = socket.socket(fileno=options.client_fd)
        else:
            with socket.socket(fileno=options.listen_fd) as listener:
                listener.settimeout(5)
                sock, _ = listener.accept()
        with sock:
            sock.sendall(wire.encode({"ev": "fatal", "reason": reason[:1000]}))
    except OSError:
        pass


def main(argv: list[str] | None = None) -> int:
    """Entry point of `python -m shiftverbs.exchanger.broker`; returns the exit status."""
    # etcd3's generated code does not work with the others from protobuf 4 on.
    os.environ["PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION"] = "python"
    # gRPC writes about every failed connection attempt otherwise.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    options = _arguments(argv)
    _take_all_descriptors()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    started_by_us = options.client_fd is not None or options.listen_fd is not None
    if started_by_us:
        # The terminal's Ctrl-C is for the application, which then takes its leave of us.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # The thread that started us takes no signals, and we have its mask.
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
    listener = mask = None
    path = options.socket
    try:
        config = config_of(json.loads(options.settings)) if options.settings else Config.from_environ()
        if not config.etcd:
            raise ConfigError("SHIFTVERBS_ETCD", "", "must say where etcd is")
        if options.listen_fd is not None:
            listener = socket.socket(fileno=options.listen_fd)
        elif options.client_fd is None:
            path = os.path.abspath(options.socket or _named_path(config))
            # From here on there is something to take away: a signal waits until it can be heeded.
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
            listener = bind_socket(path)
            from shiftverbs.exchanger.start import (
                look_at,  # what a broker that was not started by hand need not load
            )

            seen = look_at(os.getpid())
            if seen is not None:
                name_broker(path, os.getpid(), seen.began)
        idle_exit_s = config.broker_idle_exit_s if options.listen_fd is not None else None
        bound = None if options.bound is None else (options.bound[0], options.bound[1])
        broker = Broker(config, listener, path, idle_exit_s, bound)
        if options.client_fd is not None:
            broker.adopt(socket.socket(fileno=options.client_fd), options.client_pidfd)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        if not started_by_us:
            print(reason, file=sys.stderr)
            return 1
        _report_failure(options, f"the broker cannot start: {reason}")
        return 1
    if started_by_us:
        os.chdir("/")
        # Standard error was kept for failures until here; it belongs to the process that started us.
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 2)
        os.close(null)
    else:
        signal.signal(signal.SIGINT, lambda *_: broker.post("stop"))
    status = 0
    try:
        status = 0 if broker.run(mask) else 1
    except Exception:
        # Its clients start another one: better than one that looks alive.
        logger.exception("the broker failed")
        status = 1
    finally:
        broker.close()
    logging.shutdown()
    # Not by way of the interpreter's end: gRPC's threads may take their time.
    os._exit(status)


if __name__ == "__main__":
    sys.exit(main())
