# SPDX-License-Identifier: BSD-3-Clause
"""Hosts of the software network as child processes, called like local objects.

    a, b = hosts("a"), hosts("b")
    left, right = a.open("soft0").endpoint(), b.open("soft0").endpoint()
    connect(left, right)
    left.send("RDMA_WRITE", length=100); left.poll()

Every method of hostproc.Device and hostproc.Endpoint can be called on the proxies here. The test process itself never
loads pyverbs, so that a crash in the NIC costs one child and shows as a failed call.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import ROOT, child_env, readable


class VerbsError(Exception):
    """A call in the child raised. errno is pyverbs' error_code, where there is one."""

    def __init__(self, kind: str, text: str, errno: int | None) -> None:
        super().__init__(f"{kind}: {text}")
        self.errno = errno


class Proxy:
    """An object in a child process."""

    def __init__(self, host: HostProcess, name: str) -> None:
        self._host = host
        self._name = name

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)
        return lambda *args, **kw: self._host.call(self._name, method, *args, **kw)

    def endpoint(self, share: Proxy | None = None, srq: Proxy | None = None, **kw: Any) -> Proxy:
        """An endpoint on this device; share: use that endpoint's CQ; srq: receive from that SRQ."""
        kw |= {"share": share and share._name, "srq": srq and srq._name}
        return Proxy(self._host, self._host.call("host", "endpoint", self._name, **kw))

    def srq(self, **kw: Any) -> Proxy:
        """A shared receive queue on this device."""
        return Proxy(self._host, self._host.call("host", "srq", self._name, **kw))

    def forget(self) -> None:
        """Leave the object to the child's garbage collector."""
        self._host.call("host", "forget", self._name)


class HostProcess:
    """A child process on one host."""

    def __init__(
        self,
        directory: Path,
        host: str,
        softrnic: str = "1",
        env: Mapping[str, str | None] | None = None,
        log: Path | None = None,
        prefix: Sequence[str] = (),
    ) -> None:
        self.host = host
        self.log = (log or directory) / f"host-{host}-{time.monotonic_ns()}.log"
        read, write = os.pipe()
        extra = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]), **(env or {})}
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                [*prefix, sys.executable, "-m", "softrnic.hostproc", str(write)],
                env=child_env(directory, host, softrnic, extra),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                pass_fds=[write],
                text=True,
            )
        os.close(write)
        self._answers = os.fdopen(read, "rb", buffering=0)
        self._buffer = b""
        assert self._answer(60.0) == "ready"

    @property
    def pid(self) -> int:
        """Process id."""
        return self.process.pid

    def call(self, on: str, method: str, *args: Any, **kw: Any) -> Any:
        """Call a method of an object in the child.

        :raises VerbsError: it raised
        :raises AssertionError: the child died or does not answer; the text has its output
        """
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps({"on": on, "call": method, "args": args, "kw": kw}) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # the missing answer tells
        return self._answer(60.0)

    def _answer(self, timeout_s: float) -> Any:
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            ready = readable(self._answers.fileno(), max(0.0, deadline - time.monotonic()))
            data = os.read(self._answers.fileno(), 1 << 20) if ready else b""
            if not data:
                why = "died" if ready else f"did not answer in {timeout_s} s"
                if ready:
                    why += f" ({self.process.wait(20)})"
                raise AssertionError(f"host {self.host} {why}:\n{self.output()}")
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        answer = json.loads(line)
        if "error" in answer:
            raise VerbsError(*answer["error"])
        return answer["result"]

    def output(self) -> str:
        """What it wrote to stdout and stderr."""
        return self.log.read_text(errors="replace")

    def open(self, name: str = "soft0", gid_index: int | None = None) -> Proxy:
        """Open a device; its endpoints use its GID `gid_index`, by default the one of RoCE v2 over IPv4."""
        return Proxy(self, self.call("host", "open", name, gid_index))

    def end(self, timeout_s: float = 20.0) -> None:
        """End in an orderly way, with everything still open; it must not crash or hang."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        status = self.process.wait(timeout_s)
        assert status == 0, f"host {self.host} ended with {status}:\n{self.output()}"

    def kill(self) -> None:
        """kill -9 and release everything."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._answers.close()
        if self.process.stdin is not None and not self.process.stdin.closed:
            try:
                self.process.stdin.close()
            except BrokenPipeError:
                pass


def connect(left: Proxy, right: Proxy, **kw: Any) -> None:
    """Connect two RC endpoints with each other, both with the same attributes."""
    left_info, right_info = left.info(), right.info()
    left.connect(right_info, **kw)
    right.connect(left_info, **kw)


def statuses(completions: list[dict[str, Any]]) -> list[tuple[int, str]]:
    """(wr_id, status) of each."""
    return [(wc["wr_id"], wc["status"]) for wc in completions]
