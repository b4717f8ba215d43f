# SPDX-License-Identifier: BSD-3-Clause
"""A driver whose clock, NIC and exchanger the test holds."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from driver.doubles import make_nic
from memory_exchanger import MemoryExchanger, MemoryStore
from typed_doubles import double

from shiftverbs import _core, _nic
from shiftverbs.config import Config
from shiftverbs.failover.driver import Driver
from shiftverbs.failover.services.machine import ThisMachine


@pytest.fixture
def clock() -> SimpleNamespace:
    return SimpleNamespace(now=10**9)


@pytest.fixture
def nic() -> Any:
    return make_nic()


@pytest.fixture(autouse=True)
def at_work(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The QPs that have sends outstanding, where all are doubles."""
    working: list[Any] = []
    monkeypatch.setattr(_core, "at_work", lambda cores: [each for each in working if each in cores])
    return working


@pytest.fixture
def driver(clock: SimpleNamespace, nic: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    monkeypatch.setattr(_nic, "async_fd", lambda ctx: 99)
    monkeypatch.setattr(_nic, "get_async_event", lambda ctx: None)
    waiter = double(
        _nic.Waiter,
        add=lambda fd: None,
        remove=lambda fd: None,
        wake=lambda: None,
        set_deadline=lambda at: None,
        wake_within=lambda ns: None,
    )
    exchanger = MemoryExchanger(MemoryStore())
    machine = ThisMachine()
    machine.now_ns = lambda: clock.now  # type: ignore[assignment]
    made = Driver(Config(invariants=True), exchanger, "0" * 16, waiter, lambda: [nic], machine)
    made.run()
    yield made
    exchanger.close()
    assert made.outside.flush(10), "what one test has logged is not to be found in the next"
    made.outside.close()
    _core.clear_attention()


@pytest.fixture
def alarm() -> Iterator[Any]:
    """A call in the middle of which the application's signal handler raises TimeoutError."""

    def handler(number: int, frame: Any) -> None:
        raise TimeoutError("the application's")

    before = signal.signal(signal.SIGUSR1, handler)
    yield lambda *args: signal.raise_signal(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, before)
