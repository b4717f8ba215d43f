# SPDX-License-Identifier: BSD-3-Clause
"""What the driver stands on in its process: the clock, the data path's events, the exchanger, chance.

Nothing else in failover asks the operating system or the module `_core` for these. NICs are asked through `Nic.verbs`
and `Nic.worker`. Whoever has another `Machine`, other verbs and other workers has failover in another world: the
simulator runs all of it in virtual time, two processes in one interpreter.
"""

from __future__ import annotations

import ctypes
import secrets
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from shiftverbs import _core, _nic
from shiftverbs.exchanger import open_exchanger

if TYPE_CHECKING:
    from shiftverbs.config import Config
    from shiftverbs.exchanger.interface import Exchanger
    from shiftverbs.shadows.raw_verbs import Verbs

# An event of the data path: (kind, QPCore, pair, a, b, CLOCK_MONOTONIC in ns), see _core.take_events.
CoreEvent = tuple[int, "_core.QPCore", int, int, int, int]


class Flag(Protocol):
    """The attention flag: not zero when there is something for the driver to do."""

    value: int


class Machine(Protocol):
    """One process's surroundings.

    attention: the flag that the data path, the NICs' threads and the control thread share.
    """

    attention: Flag

    @property
    def verbs(self) -> Verbs:
        """The module of raw verbs, as `_nic`."""

    @property
    def now_ns(self) -> Callable[[], int]:
        """The clock: CLOCK_MONOTONIC in nanoseconds."""

    def random_bits(self, count: int) -> int:
        """So many bits that nobody can guess."""

    # ---- the data path's events -------------------------------------------------------------------------------------

    def set_driver(self, run: Callable[[], object] | None) -> None:
        """Whom post, poll and blocked waits run when attention is set; None: nobody."""

    def take_events(self) -> list[CoreEvent]:
        """What the data path has to say, oldest first; it is not said again."""

    def events_overflowed(self) -> bool:
        """Whether some of it was lost since the last call."""

    def ended_samples(self) -> list[_core.SendSample]:
        """Samples of sends that have ended since the last call."""

    def raise_attention(self) -> None:
        """Ask for a run, and wake who is blocked in a wait for completions."""

    def clear_attention(self) -> None:
        """Before events are taken: later ones raise it again."""

    # ---- what is made once ------------------------------------------------------------------------------------------

    def waiter(self) -> _nic.Waiter:
        """The control thread's sleep."""

    def worker(self, name: str, waiter: _nic.Waiter) -> _nic.NicWorker:
        """A thread for a NIC."""

    def exchanger(self, config: Config) -> Exchanger | None:
        """Where peers are found; None where none is configured. Raises ShiftError."""

    def readable(self, fd: int) -> bool:
        """Whether a descriptor has something to read. Keeps the GIL."""

    def start_thread(self, run: Callable[[], None], name: str) -> threading.Thread:
        """Have `run` run in a thread that handles no signals."""


class ThisMachine:
    """The one that an application runs on."""

    verbs = _nic
    now_ns = staticmethod(time.monotonic_ns)
    random_bits = staticmethod(secrets.randbits)
    set_driver = staticmethod(_core.set_driver)
    take_events = staticmethod(_core.take_events)
    events_overflowed = staticmethod(_core.events_overflowed)
    ended_samples = staticmethod(_core.ended_samples)
    raise_attention = staticmethod(_core.raise_attention)
    clear_attention = staticmethod(_core.clear_attention)
    readable = staticmethod(_nic.readable)
    exchanger = staticmethod(open_exchanger)

    def __init__(self) -> None:
        self.attention: Flag = ctypes.c_int.from_address(_core.attention_address())

    def waiter(self) -> _nic.Waiter:
        """The control thread's sleep. Application threads blocked in get_cq_event wake up with it."""
        made = _nic.Waiter(_core.attention_address())
        made.add_listener(_core.wake_descriptor())
        return made

    def worker(self, name: str, waiter: _nic.Waiter) -> _nic.NicWorker:
        """A thread for a NIC; the end of a command raises attention and wakes the control thread."""
        made = _nic.NicWorker(name, _core.attention_address(), waiter)
        made.post(_core.closes_nothing_here)
        return made

    def start_thread(self, run: Callable[[], None], name: str) -> threading.Thread:
        """Have `run` run in a thread that handles no signals, and keeps no process alive."""
        thread = threading.Thread(target=run, name=name, daemon=True)
        _core.without_signals(thread.start)
        return thread
