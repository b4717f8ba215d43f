# SPDX-License-Identifier: BSD-3-Clause
"""Fixtures of the exchanger's tests: collecting events, and one world for the fake and for real etcd."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar

import pytest
from harness import EtcdServer, readable
from memory_exchanger import MemoryExchanger, MemoryStore

from shiftverbs.config import Config
from shiftverbs.exchanger import (
    ControlEndpoint,
    Exchanger,
    ExchangerEvent,
    Found,
    QpRecord,
    Route,
    ShadowRoute,
    qp_key,
    records,
)
from shiftverbs.exchanger.etcd import EtcdExchanger

GID_A = "fe80::a"
GID_B = "fe80::b"
E = TypeVar("E")


class Watched:
    """An exchanger whose events are collected; what a test waits for has a deadline."""

    def __init__(self, exchanger: Exchanger, neighbours: list[Watched] | None = None):
        self.exchanger = exchanger
        self.events: list[ExchangerEvent] = []
        # Those who have to be polled as well while one waits: an exchanger's owner always does.
        self.neighbours = [] if neighbours is None else neighbours
        self.neighbours.append(self)

    def poll(self, timeout_s: float = 0.0) -> None:
        """Collect what there is, waiting up to timeout_s for something."""
        readable(self.exchanger.fileno(), timeout_s)
        self.events += self.exchanger.poll_events()

    def until(self, condition: Callable[[list[ExchangerEvent]], object], timeout_s: float = 30.0) -> None:
        """Collect events until the condition holds for all of them."""
        deadline = time.monotonic() + timeout_s
        while not condition(self.events):
            assert time.monotonic() < deadline, f"not within {timeout_s} s; seen: {self.events}"
            for one in self.neighbours:
                if one is not self and one.exchanger.fileno() >= 0:
                    one.poll()
            self.poll(0.02)

    def next(self, kind: type[E], timeout_s: float = 30.0, **attributes: Any) -> E:
        """Wait for an event of a kind, with these attributes, and forget it and all before it."""

        def position() -> int | None:
            for index, event in enumerate(self.events):
                if isinstance(event, kind) and all(
                    getattr(event, name) == value for name, value in attributes.items()
                ):
                    return index
            return None

        self.until(lambda _: position() is not None, timeout_s)
        index = position()
        assert index is not None
        found = self.events[index]
        del self.events[: index + 1]
        assert isinstance(found, kind)
        return found


class World(Protocol):
    """A store and the means to look into it."""

    def make(self, job: str | None = None) -> Watched:
        """A new exchanger, as if in another process."""

    def write(self, key: str, value: str | bytes | None) -> None:
        """Put anything there, as a stranger would; None deletes."""

    def keys(self) -> list[str]:
        """The keys of the test's job."""

    @property
    def job(self) -> str:
        """The test's job."""


class MemoryWorld:
    """The fake."""

    def __init__(self, job: str):
        self.job = job
        self.store = MemoryStore()
        self.made: list[Exchanger] = []
        self.watched: list[Watched] = []

    def make(self, job: str | None = None) -> Watched:
        self.made.append(MemoryExchanger(self.store, job or self.job))
        return Watched(self.made[-1], self.watched)

    def write(self, key: str, value: str | bytes | None) -> None:
        text = value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else value
        self.store.write(key, text)

    def keys(self) -> list[str]:
        return [key for key in self.store.keys() if key.startswith(f"/shiftverbs/{self.job}/")]

    def close(self) -> None:
        for exchanger in self.made:
            exchanger.close()


class EtcdWorld:
    """Real etcd, each exchanger with a broker of its own unless the configuration says otherwise."""

    def __init__(self, server: EtcdServer, job: str):
        self.job = job
        self.server = server
        self.made: list[EtcdExchanger] = []
        self.watched: list[Watched] = []

    def config(self, **changes: Any) -> Config:
        base = Config.from_environ(
            {"SHIFTVERBS_ETCD": self.server.endpoint, "SHIFTVERBS_JOB": self.job, "SHIFTVERBS_BROKER": "own"}
        )
        return base.replace(**changes)

    def make(self, job: str | None = None, **changes: Any) -> Watched:
        if job is not None:
            changes["job"] = job
        self.made.append(EtcdExchanger(self.config(**changes)))
        return Watched(self.made[-1], self.watched)

    def write(self, key: str, value: str | bytes | None) -> None:
        name = base64.b64encode(key.encode()).decode()
        if value is None:
            self.server.call("kv/deleterange", {"key": name})
            return
        raw = value.encode() if isinstance(value, str) else value
        self.server.call("kv/put", {"key": name, "value": base64.b64encode(raw).decode()})

    def keys(self) -> list[str]:
        for one in self.watched:  # what they were asked is on its way then
            if one.exchanger.fileno() >= 0:
                one.poll()
        return sorted(self.server.keys(f"/shiftverbs/{self.job}/"))

    def close(self) -> None:
        for exchanger in self.made:
            exchanger.close()


@pytest.fixture(params=["memory", "etcd"])
def world(request: pytest.FixtureRequest, job: str) -> Iterator[World]:
    """The same tests for the fake and for etcd."""
    made: MemoryWorld | EtcdWorld
    if request.param == "memory":
        made = MemoryWorld(job)
    else:
        made = EtcdWorld(request.getfixturevalue("shared_etcd"), job)
    yield made
    made.close()


@pytest.fixture
def etcd_world(shared_etcd: EtcdServer, job: str) -> Iterator[EtcdWorld]:
    """Real etcd, shared with other tests: not to be stopped."""
    made = EtcdWorld(shared_etcd, job)
    yield made
    made.close()


@pytest.fixture
def own_etcd_world(etcd_server: EtcdServer, job: str) -> Iterator[EtcdWorld]:
    """Real etcd, the test's own."""
    made = EtcdWorld(etcd_server, job)
    yield made
    made.close()


@pytest.fixture
def shared_config(etcd_world: EtcdWorld, softrnic_dir: Path) -> Config:
    """A configuration with a shared broker's socket (in a directory with a short name)."""
    return etcd_world.config(broker=str(softrnic_dir / "b.sock"), broker_idle_exit_s=1)


def qp_record(
    job: str, qpn: int, gid: str = GID_A, instance: str = "00000000000000aa", **changes: Any
) -> QpRecord:
    """A well-formed record of a QP."""
    fields: dict[str, Any] = {
        "job": job,
        "instance": instance,
        "default": Route(gid, 0, qpn),
        "peer": Route(GID_B, 0, 0x1234),
        "peer_life": None,
        "shadows": (
            ShadowRoute("nic1", "fe80::1:a", 0, 3, qpn + 1),
            ShadowRoute("nic2", "fe80::2:a", 0, 5, qpn + 2),
        ),
        "control": tuple(
            ControlEndpoint(f"nic{k}", f"fe80::{k}:a", 0, 3, 40 + k, 0x7FFF0000 + k, f"{k:032x}")
            for k in range(3)
        ),
        "life": "0123456789abcdef",
        "qp_access_flags": 7,
        **changes,
    }
    return QpRecord(**fields)


def publish_qp(watched: Watched, job: str, qpn: int, **changes: Any) -> str:
    """Publish a QP's record; returns its key."""
    key = qp_key(job, GID_A, qpn)
    watched.exchanger.publish(key, qp_record(job, qpn, **changes))
    watched.poll()
    return key


def as_json(record: QpRecord) -> dict[str, Any]:
    """A record as it stands in the store, for tests that spoil it."""
    key = qp_key(record.job, str(record.default.gid), record.default.qpn)
    value: dict[str, Any] = json.loads(records.encode_value(key, record))
    return value


def found_keys(events: list[ExchangerEvent]) -> set[str]:
    """The keys that were found with a value."""
    return {event.key for event in events if isinstance(event, Found) and event.value is not None}
