# SPDX-License-Identifier: BSD-3-Clause
"""The test's end of the strings: two hosts on the software RNIC, connected and protected, faults between them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from harness import Child, EtcdServer, Spawn

from shiftverbs.softrnic import faults

PUPPET = str(Path(__file__).parent / "puppet.py")


class HostError(Exception):
    """What the child's code raised: its type's name, its text, its error_code."""

    def __init__(self, what: dict[str, Any]) -> None:
        super().__init__(f"{what['type']}: {what['text']}")
        self.type: str = what["type"]
        self.text: str = what["text"]
        self.code: int | None = what["code"]


class Host:
    """One child. `host("expression")` returns its value; `host("statement")` returns None."""

    def __init__(self, child: Child) -> None:
        self.child = child
        self._seen = 0
        self._answer(60)

    def _answer(self, timeout_s: float) -> Any:
        match = self.child.expect(r"^(=>|!!) (.*)$", timeout_s, self._seen)
        with self.child._changed:
            self._seen = (
                next(
                    i for i in range(self._seen, len(self.child.lines)) if self.child.lines[i] == match.string
                )
                + 1
            )
        value = json.loads(match[2])
        if match[1] == "!!":
            raise HostError(value)
        return value

    def begin(self, source: str) -> None:
        """Send source without waiting for its end; `end` does."""
        self.child.send(json.dumps(source))

    def end(self, timeout_s: float = 60.0) -> Any:
        """The value of what `begin` began."""
        return self._answer(timeout_s)

    def __call__(self, source: str, timeout_s: float = 60.0) -> Any:
        self.begin(source)
        return self.end(timeout_s)


def connect(a: Host, b: Host, setup: str = "", attrs: str = "", kind: str = "Endpoint") -> None:
    """An endpoint `ep` on each host, connected to the other; setup: arguments of its class, kind; attrs: of connect."""
    names = [h(f"ep = {kind}({setup}); ep.name()") for h in (a, b)]
    b(f"ep.connect({names[0]!r}{', ' + attrs if attrs else ''})")
    a(f"ep.connect({names[1]!r}{', ' + attrs if attrs else ''})")


def connect_again(*hosts: Host) -> None:
    """Take each host's `ep` through RESET, connect all of them as before, and wait until they are protected."""
    for h in hosts:
        h("at = qp.QPAttr(); at.qp_state = e.IBV_QPS_RESET; ep.qp.modify(at, e.IBV_QP_STATE); ep.none(0.05)")
    for h in hosts:
        h("ep.connect(ep.peer)")
    for h in hosts:
        assert h("ep.qp.shift.wait_protected(20)"), h("ep.shift()")


class Network:
    """Hosts a and b on one software network."""

    def __init__(self, spawn: Spawn, env: dict[str, str | None], directory: Path) -> None:
        self._spawn = spawn
        self.env = env
        self._directory = directory

    def host(self, name: str, package: str = "shiftverbs", nics: str = "2", **env: str | None) -> Host:
        """Start one host."""
        child = self._spawn(PUPPET, package, host=name, softrnic=nics, env={**self.env, **env})
        return Host(child)

    def pair(
        self,
        package: str = "shiftverbs",
        nics: str = "2",
        setup: str = "",
        attrs: str = "",
        kind: str = "Endpoint",
    ) -> tuple[Host, Host]:
        """Two hosts with one connected QP each, as `connect` makes them."""
        a, b = self.host("a", package, nics), self.host("b", package, nics)
        connect(a, b, setup, attrs, kind)
        return a, b

    def protected(
        self, nics: str = "2", setup: str = "", attrs: str = "", kind: str = "Endpoint"
    ) -> tuple[Host, Host]:
        """As `pair`, and waits until both say PROTECTED."""
        a, b = self.pair("shiftverbs", nics, setup, attrs, kind)
        for h in (a, b):
            assert h("ep.qp.shift.wait_protected(20)"), h("ep.shift()")
        return a, b

    @contextmanager
    def faults(self) -> Iterator[Any]:
        """The fault functions of the software RNIC, on this network."""
        before = os.environ.get("SOFTRNIC_DIR")
        os.environ["SOFTRNIC_DIR"] = str(self._directory)
        try:
            yield faults
        finally:
            if before is None:
                del os.environ["SOFTRNIC_DIR"]
            else:
                os.environ["SOFTRNIC_DIR"] = before


HOME = "s.state == 'DEFAULT' and s.recv_state == 'DEFAULT'"
AWAY = "s.state == 'FALLBACK' and s.path == 'soft1' and s.recv_path == 'soft1'"

#: Where verbs are tried: at home, on the backup, and home again.
WHERE = ["home", "away", "back"]


def go(faults: Any, where: str, *hosts: Host) -> None:
    """Bring the QPs of both hosts to where they are to be tried."""
    if where == "home":
        return
    faults.down("a/soft0")
    for host in hosts:
        host(f"ep.wait({AWAY!r}, 20)")
    if where == "back":
        faults.up("a/soft0")
        for host in hosts:
            host(f"ep.wait({HOME!r}, 20)")


@pytest.fixture(name="network")
def network_of(spawn: Spawn, shared_etcd: EtcdServer, job: str, softrnic_dir: Path) -> Network:
    """Two hosts to be, with etcd."""
    env = {"SHIFTVERBS_ETCD": shared_etcd.endpoint, "SHIFTVERBS_JOB": job}
    return Network(spawn, env, softrnic_dir)


@pytest.fixture(name="faults")
def faults_of(network: Network) -> Iterator[Any]:
    """The software RNIC's faults, on this test's network."""
    with network.faults() as functions:
        yield functions
