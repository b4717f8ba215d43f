# SPDX-License-Identifier: BSD-3-Clause
"""One host: a child process that runs workload.py, and our conversation with it. Every wait has a deadline."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from shiftverbs.commands.demo.endpoint import Peer

__all__ = ["DemoError", "Host", "HostPair"]

ANSWER_S = 15.0
# How often waiting looks at the latest report and lets the view draw.
POLL_S = 0.02


class DemoError(RuntimeError):
    """Something did not happen in time, or a host failed. The message says what, with the hosts' own words."""


class Host:
    """A child process on one host.

    name: "a" or "b". package: the verbs package it uses. env: its whole environment. patience: factor on the time
    limits of all waits.
    """

    def __init__(self, name: str, package: str, env: Mapping[str, str], patience: float = 1.0) -> None:
        self.name = name
        self.patience = patience
        self.report: dict[str, Any] = {}
        self._answers: dict[int, dict[str, Any]] = {}
        self._ready = False
        self._ended = False
        self._next_id = 0
        self._changed = threading.Condition()
        # Appending, because our reading moves the position that the child shares.
        self._log = tempfile.TemporaryFile("a+", errors="replace")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "shiftverbs.commands.demo.workload", package],
            env=dict(env) | {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, name=f"host-{name}", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                try:
                    message = json.loads(line)
                except ValueError:  # a library's own print
                    self._log.write(line)
                    continue
                with self._changed:
                    if "answers" in message:
                        self._answers[message["answers"]] = message
                    elif message.get("event") == "report":
                        self.report = message
                    elif message.get("event") == "ready":
                        self._ready = True
                    self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def wait_ready(self, timeout_s: float = ANSWER_S) -> None:
        """Wait until the program reads commands. Raises DemoError."""
        self._wait(lambda: self._ready, timeout_s, "did not start")

    def ask(self, do: str, timeout_s: float = ANSWER_S, **arguments: Any) -> Callable[[], dict[str, Any]]:
        """Send a command; returns the function that waits for its answer (DemoError when there is none)."""
        self._next_id += 1
        number = self._next_id
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, "id": number, **arguments}) + "\n")
            self._process.stdin.flush()
        except OSError:
            raise self.error(self._end()) from None

        def answer() -> dict[str, Any]:
            self._wait(lambda: number in self._answers, timeout_s, f"gave no answer to {do!r}")
            message = self._answers.pop(number)
            if "failed" in message:
                raise self.error(f"{do!r} failed: {message['failed']}")
            return message

        return answer

    def call(self, do: str, timeout_s: float = ANSWER_S, **arguments: Any) -> dict[str, Any]:
        """Send a command and wait for its answer."""
        return self.ask(do, timeout_s, **arguments)()

    def _wait(self, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        deadline = time.monotonic() + timeout_s * self.patience
        with self._changed:
            while not condition():
                left = deadline - time.monotonic()
                if self._ended:
                    raise self.error(self._end())
                if left <= 0:
                    raise self.error(f"{what} within {timeout_s:g} s")
                self._changed.wait(left)

    def check_alive(self) -> None:
        """Raise DemoError where the process has ended."""
        if self._ended:
            raise self.error(self._end())

    def _end(self) -> str:
        """How the process ended. Its pipes close a moment before its status is known."""
        try:
            return f"ended with status {self._process.wait(ANSWER_S)}"
        except subprocess.TimeoutExpired:
            return "closed its pipes and did not end"

    def log(self, limit: int = 6000) -> str:
        """Return the end of what the program wrote on standard error."""
        self._log.flush()
        self._log.seek(0)
        return self._log.read()[-limit:].rstrip()

    def error(self, what: str) -> DemoError:
        """Make the error of this host, with the end of its standard error."""
        log = self.log()
        said = f"; its standard error ends:\n{log}" if log else "; it wrote nothing on standard error"
        return DemoError(f"host {self.name} {what}{said}")

    def close(self, timeout_s: float = 5.0) -> None:
        """End the program: its input ends, and if it does not end by itself in time, it is killed."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
        except OSError:
            pass
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(5)
        self._log.close()


class HostPair:
    """Hosts a and b with the same package, and what concerns both.

    env: gives a host's environment. tick: called often while waiting (the view's chance to draw). patience: as for
    Host.
    """

    def __init__(
        self,
        package: str,
        env: Callable[[str], Mapping[str, str]],
        tick: Callable[[HostPair], None],
        patience: float = 1.0,
    ) -> None:
        self.package = package
        self.patience = patience
        self._tick = tick
        self.a = Host("a", package, env("a"), patience)
        try:
            self.b = Host("b", package, env("b"), patience)
        except BaseException:
            self.a.close()
            raise
        self.both = (self.a, self.b)

    def __enter__(self) -> HostPair:
        try:
            for host in self.both:
                host.wait_ready()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End both programs."""
        for host in self.both:
            host.close()

    def ask_both(self, do: str, timeout_s: float = ANSWER_S, **arguments: Any) -> list[dict[str, Any]]:
        """Send one command to both; return their answers in the order a, b."""
        waits = [host.ask(do, timeout_s, **arguments) for host in self.both]
        return [wait() for wait in waits]

    def connect(
        self, traffic: str, device: Callable[[str], str], seed: int, attrs: Mapping[str, int] | None = None
    ) -> None:
        """Open and connect one endpoint on each host.

        device: gives a host's default device; attrs: of the QPs, see Network.
        """
        for host in self.both:
            host.report = {}
        waits = [
            host.ask(
                "open",
                traffic=traffic,
                device=device(host.name),
                role=role,
                seed=seed,
                attrs=dict(attrs or {}),
            )
            for role, host in enumerate(self.both)
        ]
        peers = [Peer(**wait()["peer"]) for wait in waits]
        waits = [
            host.ask("connect", peer=peer.to_json())
            for host, peer in zip(self.both, reversed(peers), strict=True)
        ]
        for wait in waits:
            wait()

    def wait_for(
        self, condition: Callable[[dict[str, Any], dict[str, Any]], bool], timeout_s: float, what: str
    ) -> None:
        """Wait until condition(a's report, b's report) holds; DemoError after timeout_s, naming `what`.

        Reports made before the call do not count: they may tell of an earlier phase, or of another connection.
        """
        timeout_s *= self.patience
        began_ns = time.monotonic_ns()
        deadline = time.monotonic() + timeout_s
        while True:
            reports = self.a.report, self.b.report
            if all(report.get("t_ns", 0) > began_ns for report in reports) and condition(*reports):
                return
            for host in self.both:
                host.check_alive()
            if time.monotonic() > deadline:
                raise DemoError(f"{what}: not within {timeout_s:g} s\n{self.story()}")
            self._tick(self)
            time.sleep(POLL_S)

    def run_for(self, seconds: float) -> None:
        """Let the traffic run."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            for host in self.both:
                host.check_alive()
            self._tick(self)
            time.sleep(min(POLL_S, left))

    def story(self) -> str:
        """Return what both hosts last told, for an error message."""
        lines = []
        for host in self.both:
            lines.append(
                f"  host {host.name}: {json.dumps({k: v for k, v in host.report.items() if k != 'event'})}"
            )
            log = host.log(3000)
            if log:
                lines.append(f"  host {host.name}'s standard error ends:")
                lines.extend("    " + line for line in log.splitlines())
        return "\n".join(lines)
