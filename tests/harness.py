# SPDX-License-Identifier: BSD-3-Clause
"""Tools for tests: child processes that play a host, waiting with deadlines, and a real etcd server.

Nothing here sleeps for a guessed time: everything waits on a condition and fails with what was seen when its
deadline passes.
"""

from __future__ import annotations

import base64
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from shiftverbs.commands.demo.etcd_server import EtcdServer as DemoEtcdServer
from shiftverbs.commands.demo.etcd_server import free_port as free_port

ROOT = Path(__file__).resolve().parent.parent
T = TypeVar("T")


def wait_until(condition: Callable[[], T], timeout_s: float = 10.0, what: str = "") -> T:
    """Call condition until it returns something true, and return that.

    :param condition: called about every 5 ms; its exceptions pass through
    :param timeout_s: deadline in seconds
    :param what: what is waited for, for the error
    :raises AssertionError: the deadline passed
    """
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s} s: {what or condition}")
        time.sleep(0.005)


def readable(fd: int, timeout_s: float) -> bool:
    """Whether there is something to read, or the end, within the time; of any descriptor, above 1,023 too."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


class _Lines:
    """The lines that come out of a pipe, which never blocks. seen: the list that all of them are added to."""

    def __init__(self, fd: int, seen: list[str]) -> None:
        self.open = True
        self._fd = fd
        self._seen = seen
        self._rest = b""
        os.set_blocking(fd, False)

    def fileno(self) -> int:
        return self._fd

    def read(self) -> list[str]:
        """Return the lines that have come since the last time."""
        data = self._rest
        try:
            while self.open and (more := os.read(self._fd, 65536)):
                data += more
            self.open = False
        except BlockingIOError:
            pass
        *whole, self._rest = data.split(b"\n")
        if not self.open and self._rest:
            whole.append(self._rest)
            self._rest = b""
        lines = [line.decode(errors="replace") for line in whole]
        self._seen += lines
        return lines


class Child:
    """A child interpreter (or any program) whose output lines can be waited for.

    `lines` has all that it wrote, for waiting and for the text of failures; `printed` only its standard output, for
    tests that compare. Each stream has a pipe of its own: print() writes a line's text and its end one after the
    other, and another thread's log line would come between them.
    """

    def __init__(self, args: Sequence[str], env: Mapping[str, str], name: str = "child") -> None:
        self.name = name
        self.args = list(args)
        self.lines: list[str] = []
        self.printed: list[str] = []
        self.errors: list[str] = []
        self._changed = threading.Condition()
        self._ended = False
        self.process = subprocess.Popen(
            self.args,
            env=dict(env),
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self._reader = threading.Thread(target=self._read, name=f"{name}-output", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        """Read both pipes. What was written to standard error before a printed line stands before it in `lines`."""
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        with self.process.stdout as stdout, self.process.stderr as stderr:
            printed = _Lines(stdout.fileno(), self.printed)
            errors = _Lines(stderr.fileno(), self.errors)
            poll = select.poll()
            for pipe in (printed, errors):
                poll.register(pipe, select.POLLIN)
            while True:
                ready = {fd for fd, _ in poll.poll()}
                said = printed.read() if printed.fileno() in ready else []
                said = errors.read() + said
                for pipe in (printed, errors):
                    if not pipe.open and pipe.fileno() in ready:
                        poll.unregister(pipe)
                with self._changed:
                    self.lines += said
                    self._changed.notify_all()
                if not printed.open and not errors.open:
                    break
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    @property
    def pid(self) -> int:
        """Process id."""
        return self.process.pid

    @property
    def output(self) -> str:
        """All output so far."""
        with self._changed:
            return "\n".join(self.lines)

    def expect(self, pattern: str, timeout_s: float = 20.0, start: int = 0) -> re.Match[str]:
        """Wait for an output line that matches a regular expression (searched) and return the match.

        :param start: index of the first line to look at
        :raises AssertionError: the deadline passed, or the child ended without such a line
        """
        wanted = re.compile(pattern)
        deadline = time.monotonic() + timeout_s
        seen = start
        with self._changed:
            while True:
                while seen < len(self.lines):
                    match = wanted.search(self.lines[seen])
                    seen += 1
                    if match:
                        return match
                left = deadline - time.monotonic()
                if self._ended or left <= 0:
                    why = "ended" if self._ended else f"said nothing of the kind in {timeout_s} s"
                    text = "\n".join(self.lines)
                    raise AssertionError(f"{self.name} {why}; wanted {pattern!r}; its output:\n{text}")
                self._changed.wait(left)

    def send(self, line: str) -> None:
        """Write one line to the child's standard input."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def wait(self, timeout_s: float = 20.0) -> int:
        """Wait for the end and return the exit status (negative: killed by that signal).

        :raises AssertionError: still running at the deadline
        """
        try:
            status = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"{self.name} still runs after {timeout_s} s; its output:\n{self.output}"
            ) from None
        self._reader.join(5)
        return status

    def succeed(self, timeout_s: float = 20.0) -> str:
        """Wait for an exit status of 0 and return the output."""
        status = self.wait(timeout_s)
        assert status == 0, f"{self.name} ended with {status}; its output:\n{self.output}"
        return self.output

    def signal(self, number: int) -> None:
        """Send a signal; after SIGSTOP it stands still."""
        self.process.send_signal(number)
        if number == signal.SIGSTOP:
            await_stopped(self.process.pid)

    def close(self) -> None:
        """Kill it if it still runs, and release everything."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join(5)
        if self.process.stdin is not None:
            try:
                self.process.stdin.close()
            except BrokenPipeError:
                pass


class Spawn(Protocol):
    """What the spawn fixture gives."""

    def __call__(
        self,
        *args: str,
        host: str | None = "a",
        softrnic: str | None = "1",
        env: Mapping[str, str | None] | None = None,
        name: str | None = None,
        program: str | None = None,
    ) -> Child:
        """Start this interpreter (or program) with args as one host."""
        ...


def child_env(
    softrnic_dir: Path | None = None,
    host: str | None = None,
    softrnic: str | None = "1",
    extra: Mapping[str, str | None] | None = None,
) -> dict[str, str]:
    """Return an environment for a child: this one's without our own variables, plus what is named.

    Failover checks its invariants there.

    :param softrnic_dir: registry directory of the software RNIC
    :param host: which host the child plays
    :param softrnic: value of SOFTRNIC; None leaves it unset
    :param extra: further variables; None removes one
    """
    env = {k: v for k, v in os.environ.items() if not k.startswith(("SOFTRNIC", "SHIFTVERBS"))}
    env["PYTHONUNBUFFERED"] = "1"
    env["PYTHONFAULTHANDLER"] = "1"
    env["SHIFTVERBS_INVARIANTS"] = "1"
    if softrnic_dir is not None:
        env["SOFTRNIC_DIR"] = str(softrnic_dir)
    if softrnic is not None:
        env["SOFTRNIC"] = softrnic
    if host is not None:
        env["SOFTRNIC_HOST"] = host
    for key, value in (extra or {}).items():
        if value is None:
            env.pop(key, None)
        else:
            env[key] = value
    return env


class EtcdServer(DemoEtcdServer):
    """A real single-member etcd on loopback, whose keys a test reads and writes past every client of ours.

    start, stop and kill keep the endpoint and the data, so that a test can let it die and come back.
    """

    def put(self, key: str, value: str | bytes) -> None:
        """Write one key (malformed values, for example)."""
        raw = value.encode() if isinstance(value, str) else value
        self.call("kv/put", {"key": _base64(key.encode()), "value": _base64(raw)})

    def delete(self, key: str) -> None:
        """Remove one key."""
        self.call("kv/deleterange", {"key": _base64(key.encode())})

    def items(self, prefix: str) -> dict[str, bytes]:
        """Return all keys that start with prefix, and their values."""
        start = prefix.encode()
        end = start[:-1] + bytes([start[-1] + 1])
        found = self.call("kv/range", {"key": _base64(start), "range_end": _base64(end)}).get("kvs", [])
        assert isinstance(found, list)
        return {base64.b64decode(kv["key"]).decode(): base64.b64decode(kv.get("value", "")) for kv in found}

    def signal(self, number: int) -> None:
        """Send a signal; after SIGSTOP it stands still."""
        assert self.process is not None
        self.process.send_signal(number)
        if number == signal.SIGSTOP:
            await_stopped(self.process.pid)


def stop_process(pid: int) -> None:
    """SIGSTOP; it stands still when this returns."""
    os.kill(pid, signal.SIGSTOP)
    await_stopped(pid)


def await_stopped(pid: int) -> None:
    """Wait until all threads of a process stand still after SIGSTOP.

    It takes a while on a busy processor: one of them is to stop the others, and they run until it comes to that.
    """
    wait_until(lambda: set(_thread_states(pid)) <= {"T", "Z"}, what=f"process {pid} stands still")


def _thread_states(pid: int) -> Iterator[str]:
    for stat in Path("/proc", str(pid), "task").glob("*/stat"):
        try:
            yield stat.read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended meanwhile


def _base64(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def python_args(*args: str) -> list[str]:
    """Return the command line of this interpreter with args."""
    return [sys.executable, *args]
