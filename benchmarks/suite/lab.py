# SPDX-License-Identifier: BSD-3-Clause
"""Where a run takes place: a private software network, a private etcd, child processes, and what machine it is.

With a device of the machine's own (`--device`) its NICs are used instead of the software ones; then there is nothing
here that can make them fail.
"""

from __future__ import annotations

import json
import os
import platform
import queue
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from shiftverbs.commands.demo.etcd_server import EtcdServer
from shiftverbs.commands.demo.network import SoftNetwork

ROOT = Path(__file__).resolve().parent.parent.parent
ANSWER_S = 120.0


class SuiteError(RuntimeError):
    """A measurement could not be made; the message says which and why."""


def written(log: IO[str]) -> str:
    """What a process has written to this file so far, whose place for more is left alone."""
    with open(f"/proc/self/fd/{log.fileno()}", errors="replace") as again:
        return again.read()


class Child:
    """A child process that answers each command, one JSON object a line, with one JSON object.

    :param module: of this package
    :param env: its environment
    :param arguments: its command line
    """

    def __init__(self, module: str, env: Mapping[str, str], *arguments: str) -> None:
        self.name = f"{module} {' '.join(arguments)}"
        self._log = tempfile.TemporaryFile("w+", errors="replace")
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"benchmarks.suite.{module}", *arguments],
            env={**env, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self._answers: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                if line.startswith("{"):
                    self._answers.put(json.loads(line))
        self._answers.put(None)

    def tell(self, **command: Any) -> None:
        """Send a command; `answer` waits for what it gives."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
        except OSError:
            raise SuiteError(f"{self.name} ended: {self.log()}") from None

    def answer(self, timeout_s: float = ANSWER_S) -> dict[str, Any]:
        """Return the next answer.

        :raises SuiteError: the child failed, ended, or says nothing
        """
        try:
            answer = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            raise SuiteError(f"{self.name} gave no answer within {timeout_s:g} s: {self.log()}") from None
        if answer is None:
            raise SuiteError(f"{self.name} ended with {self._process.wait(10)}: {self.log()}")
        if "failed" in answer:
            raise SuiteError(f"{self.name}: {answer['failed']}\n{self.log()}")
        return answer

    def ask(self, timeout_s: float = ANSWER_S, **command: Any) -> dict[str, Any]:
        """Send a command and return its answer."""
        self.tell(**command)
        return self.answer(timeout_s)

    def log(self) -> str:
        """Return the end of its standard error."""
        self._log.flush()
        return written(self._log)[-3000:]

    def close(self) -> None:
        """End it: its input ends; if that does not help, it is killed."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
        except OSError:
            pass
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(5)
        self._log.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class Lab:
    """The private network and etcd of one run; a context manager.

    :param device: a NIC of the machine's own, or None for the software one
    """

    def __init__(self, device: str | None = None) -> None:
        self.device = device or "soft0"
        self.is_soft = device is None
        self.network = SoftNetwork()
        self.etcd = EtcdServer()
        self._jobs = 0

    def __enter__(self) -> Lab:
        try:
            self.etcd.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Take everything away."""
        self.etcd.close()
        self.network.close()

    def job(self) -> str:
        """Return a namespace that nobody used before."""
        self._jobs += 1
        return f"bench{self._jobs}"

    def environment(self, host: str, package: str, job: str, softrnic: str | None = None) -> dict[str, str]:
        """Return the environment of a child on a host.

        :param package: pyverbs, or shiftverbs, which finds its peer through etcd
        :param job: namespace in etcd
        :param softrnic: value of SOFTRNIC; None: two devices on two rails, or nothing on the machine's own NICs
        """
        env = self.network.environment(host, os.environ)
        if softrnic is not None:
            env["SOFTRNIC"] = softrnic
        elif not self.is_soft:
            del env["SOFTRNIC"]
        if package == "shiftverbs":
            env |= {"SHIFTVERBS_ETCD": self.etcd.endpoint, "SHIFTVERBS_JOB": job}
        return env

    def etcd_requests(self) -> int:
        """Return how many messages etcd has received from clients so far, those in streams included."""
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"http://{self.etcd.endpoint}/metrics", timeout=5) as answer:
            text = answer.read().decode()
        return sum(
            int(float(line.rsplit(" ", 1)[1]))
            for line in text.splitlines()
            if line.startswith("grpc_server_msg_received_total{")
        )


def machine(device: str) -> dict[str, Any]:
    """Describe what the figures were measured on."""

    def run(*command: str) -> str:
        try:
            return subprocess.run(
                command, cwd=ROOT, capture_output=True, text=True, check=True
            ).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            return ""

    model = ""
    try:
        with open("/proc/cpuinfo") as lines:
            model = next(
                (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), ""
            )
    except OSError:
        pass
    commit = run("git", "rev-parse", "--short", "HEAD")
    if commit and run("git", "status", "--porcelain", "--untracked-files=no"):
        commit += "+"
    return {
        "commit": commit or None,
        "cpu": model or platform.processor(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "device": device,
        "load": os.getloadavg()[0],
    }
