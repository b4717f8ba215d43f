# SPDX-License-Identifier: BSD-3-Clause
"""What the production code asks the standard library for by itself, in virtual time: how late it is, which thread this
is, a wait."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import sys
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from unittest import mock

from shiftverbs import _core
from shiftverbs.failover import driver, runtime
from shiftverbs.failover.qp import changes, connection, timeline
from shiftverbs.failover.services import memory_keys
from shiftverbs.process import waiting
from shiftverbs.process.log_lines import Seldom
from shiftverbs.shadows import nic as shadows_nic
from shiftverbs.shadows import pyverbs_objects

if TYPE_CHECKING:
    from simulator.network import Network


class Condition:
    """threading.Condition of one process whose only thread may wait in it."""

    def __init__(self, net: Network) -> None:
        self._net = net

    def __enter__(self) -> Condition:
        return self

    def __exit__(self, *error: object) -> None:
        """It is nobody else's."""

    def wait(self, timeout: float | None = None) -> bool:
        return self._net.wait(lambda: False, timeout)

    def notify_all(self) -> None:
        """Who waits looks again in any case."""


class WaitLock:
    """threading.Lock in which somebody waits to be told."""

    def __init__(self, net: Network) -> None:
        self._net = net
        self._taken = False

    def acquire(self, timeout: float | None = None) -> bool:
        if not self._taken:
            self._taken = True
            return True
        return self._net.wait(lambda: not self._taken, timeout)

    def release(self) -> None:
        self._taken = False


class _Silent:
    """`OutsideTheLock` where nothing is logged."""

    def __init__(self, held: Callable[[], bool]) -> None:
        pass

    def close(self) -> None:
        pass

    def flush(self, timeout_s: float) -> bool:
        return True


def _note_error(logger: logging.Logger, *_: object, **__: object) -> None:
    """`Logger.exception`: only what nobody expected is told so, and it is a bug of ours."""
    error = sys.exception()
    if error is not None and World.current is not None and logger.name.startswith("shiftverbs"):
        World.current.errors.append(error)


def _note_seldom(seldom: Seldom, now_ns: int, error: BaseException, *_: object) -> None:
    """`Seldom.exception`."""
    World.net().errors.append(error)


class World:
    """The standard library and pyverbs as simulated processes see them, while `entered`. Once for any number of runs.

    current: the network that runs.
    """

    current: Network | None = None
    _depth = 0
    _stack: contextlib.ExitStack | None = None

    @classmethod
    @contextlib.contextmanager
    def entered(cls) -> Any:
        """Patches hold meanwhile."""
        cls._depth += 1
        if cls._depth == 1:
            cls._stack = contextlib.ExitStack()
            cls._patch(cls._stack)
        try:
            yield
        finally:
            cls._depth -= 1
            if cls._depth == 0 and cls._stack is not None:
                cls._stack.close()

    @classmethod
    def net(cls) -> Network:
        assert cls.current is not None
        return cls.current

    @classmethod
    def _patch(cls, stack: contextlib.ExitStack) -> None:
        time = types.SimpleNamespace(
            monotonic=lambda: cls.net().clock.now / 1e9,
            monotonic_ns=lambda: cls.net().clock.now,
            strftime=lambda form: "00:00:00",
        )
        for module in (waiting, memory_keys, changes, shadows_nic, timeline, connection, runtime):
            stack.enter_context(mock.patch.object(module, "time", time))
        conditions = types.SimpleNamespace(
            Condition=lambda lock=None: Condition(cls.net()), RLock=shadows_nic.threading.RLock
        )
        stack.enter_context(mock.patch.object(memory_keys, "threading", conditions))
        locks = types.SimpleNamespace(Lock=lambda: WaitLock(cls.net()))
        stack.enter_context(mock.patch.object(timeline, "threading", locks))
        threading = types.SimpleNamespace(
            **{name: getattr(shadows_nic.threading, name) for name in ("Lock", "RLock")},
            get_ident=lambda: running.thread if (running := cls.net().running) is not None else 0,
        )
        stack.enter_context(mock.patch.object(shadows_nic, "threading", threading))
        stack.enter_context(mock.patch.object(driver, "OutsideTheLock", _Silent))
        stack.enter_context(mock.patch.object(runtime, "_at_start", []))
        stack.enter_context(mock.patch.object(_core, "when_dropped", lambda call: None))
        pointer = pyverbs_objects.pointer
        ours = lambda obj: obj.pointer if hasattr(obj, "pointer") else pointer(obj)  # noqa: E731
        stack.enter_context(mock.patch.object(pyverbs_objects, "pointer", ours))
        stack.enter_context(mock.patch.object(logging.Logger, "exception", _note_error))
        stack.enter_context(mock.patch.object(Seldom, "exception", _note_seldom))
        stack.callback(logging.disable, logging.root.manager.disable)
        logging.disable(logging.CRITICAL)
        clock = ctypes.CFUNCTYPE(ctypes.c_int64)(lambda: cls.net().clock.now)
        stack.callback(lambda kept: _core.set_sample_clock(0), clock)
        _core.set_sample_clock(ctypes.cast(clock, ctypes.c_void_p).value or 0)
        stack.callback(_core.set_driver, None)
        _core.set_driver(lambda: cls.net().run_inline())
