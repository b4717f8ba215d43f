# SPDX-License-Identifier: BSD-3-Clause
"""What a training loop calls at the end of each step, and the thread behind it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

from shiftverbs import observe
from shiftverbs._core import without_signals
from shiftverbs.checkpoint.agreement import (
    DONE,
    FAILED,
    RESUME,
    SAVE,
    Conductor,
    LocalStore,
    Round,
    Store,
    interval_s,
    log,
)

#: How much longer than the others' time a rank waits for what they decided.
GRACE_S = 1.0
#: A round in which nothing was saved is not asked for again before that: a rank that has ended ends each at once.
AGAIN_S = 0.2
#: Threads cannot wait much longer.
MOST_S = 10**9


@dataclass(frozen=True)
class Outcome:
    """What became of a pause.

    step: the number of the call of `step` at which it was, from 1; the same on all ranks where `saved`. saved: whether
    every rank that saves has. why: if not, the reason, with the rank that it is about. paused_s: how long this rank
    stood still, in seconds.
    """

    step: int
    saved: bool
    why: str
    paused_s: float


class CheckpointOnFallback:
    """After a fallback on any rank, all ranks stop at the end of the same step, save once, and go on.

    A job that runs on its backup has no further path to lose. A rank that does not come in time makes all others go on
    without a checkpoint; nobody waits longer than is said here. All ranks make one before the same step, with the same
    arguments. Logged under `shiftverbs.checkpoint`.

    :param save: called without arguments between two steps, while all ranks stand still
    :param store: what the ranks agree over, used for nothing else; None: there is one rank
    :param rank, size: ours in the job, and how many ranks it has
    :param savers: the ranks that call save; None: all of them
    :param timeout_s: how long a rank waits for the others, in seconds: longer than a step takes
    :param save_timeout_s: how long they wait until all is saved, in seconds
    :param min_interval_s: from the end of a pause to the next one, in seconds; a fallback between them leads to a pause
        at the end of that time
    :raises TypeError: save cannot be called
    :raises ValueError: an argument does not fit the others; the text says which
    """

    def __init__(
        self,
        save: Callable[[], object],
        store: Store | None = None,
        rank: int = 0,
        size: int = 1,
        *,
        savers: Sequence[int] | None = (0,),
        timeout_s: float = 30.0,
        save_timeout_s: float = 300.0,
        min_interval_s: float = 60.0,
    ) -> None:
        if not callable(save):
            raise TypeError(f"save must be callable, not {type(save).__name__}")
        if not 0 <= rank < size:
            raise ValueError(f"there is no rank {rank} in a job of {size}")
        if store is None and size > 1:
            raise ValueError(f"{size} ranks need a store to agree over")
        for name, value in (("timeout_s", timeout_s), ("save_timeout_s", save_timeout_s)):
            if not value > 0:
                raise ValueError(f"{name} must be more than 0, not {value}")
            if value > MOST_S:
                raise ValueError(f"{name} must be {MOST_S} at most, not {value}")
        if not min_interval_s >= 0:
            raise ValueError(f"min_interval_s must not be less than 0, not {min_interval_s}")
        self._savers = tuple(range(size)) if savers is None else tuple(dict.fromkeys(savers))
        if not self._savers or not all(0 <= one < size for one in self._savers):
            raise ValueError(f"savers must be ranks of a job of {size}, not {savers}")
        self._save = save
        self._store = LocalStore() if store is None else store
        self._rank, self._size = rank, size
        self._timeout_s, self._save_timeout_s = timeout_s, save_timeout_s
        self._min_interval_s = min_interval_s
        self._changed = threading.Condition()
        self._passed = 0
        self._round: Round | None = None
        self._wanted_ns = 0  # the last fallback that no checkpoint covers
        self._covered_ns = 0  # what a checkpoint covers
        self._not_before = 0.0
        self._broken = ""
        self._closed = False
        self._subscription = observe.subscribe(self._fell_back, observe.Fallback)
        self._thread = threading.Thread(target=self._run, name="shiftverbs-checkpoint", daemon=True)
        without_signals(self._thread.start)

    def step(self) -> Outcome | None:
        """Say that a step has ended. Where a pause was agreed on, take part in it. In `save` it says nothing.

        :return: what became of it; None where there was none
        :raises BaseException: what save raises that is no Exception; an Exception is logged
        """
        with self._changed:
            state = self._round
            if state is not None and state.is_taken and not state.left:
                return None
            self._passed += 1
            if state is None or state.left or self._passed < state.ready:
                return None
            began = time.monotonic()
            if not self._is_boundary(state, began + self._timeout_s):
                return None
            if not self._agreed(state, began + self._timeout_s):
                return self._resume(state, began)
            if state.is_taken:
                return None
            state.is_taken = True
        if self._rank in self._savers:
            self._call_save(state)
        return self._await_end(state, began)

    def request(self) -> None:
        """Have all ranks pause and save as after a fallback: before maintenance, for example. Any thread."""
        self._want(time.monotonic_ns())

    def close(self) -> None:
        """End it. Ranks that wait for us go on at once. A second call does nothing."""
        self._subscription.cancel()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        # A thread that a store holds fast ends with the process.
        self._thread.join(GRACE_S)

    def __enter__(self) -> CheckpointOnFallback:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # The rank's thread, in step()

    def _is_boundary(self, state: Round, deadline: float) -> bool:
        """Whether this is where all stop, or we have waited too long to learn where."""
        self._wait(lambda: state.boundary or state.outcome, state, deadline)
        return not state.boundary or self._passed >= state.boundary

    def _agreed(self, state: Round, deadline: float) -> bool:
        """Whether all have stopped."""
        if state.boundary:
            state.paused_ns = time.monotonic_ns()
        self._wait(lambda: state.outcome, state, deadline)
        if not state.outcome:
            state.gave_up = True
            self._wait(lambda: state.outcome, state, deadline + GRACE_S)
        return state.outcome == SAVE

    def _wait(self, done: Callable[[], int], state: Round, deadline: float) -> None:
        state.is_waiting = True
        self._changed.notify_all()
        self._changed.wait_for(
            lambda: done() or self._broken or self._closed, max(0.0, deadline - time.monotonic())
        )
        state.is_waiting = False

    def _resume(self, state: Round, began: float, why: str = "") -> Outcome:
        state.left = True
        self._changed.notify_all()
        if why:
            pass
        elif state.outcome >= RESUME:
            why = f"rank {state.outcome - RESUME} did not pause in time"
        elif self._closed:
            why = "it was closed"
        else:
            why = self._broken or "the store does not answer"
        log.warning("no checkpoint at step %d, training goes on: %s", self._passed, why)
        return Outcome(self._passed, False, why, time.monotonic() - began)

    def _call_save(self, state: Round) -> None:
        result = FAILED
        try:
            self._save()
            result = DONE
        except Exception:
            log.exception("saving a checkpoint failed at step %d", self._passed)
        finally:
            with self._changed:
                state.result = result
                self._changed.notify_all()

    def _await_end(self, state: Round, began: float) -> Outcome:
        with self._changed:
            self._wait(lambda: state.end, state, time.monotonic() + self._save_timeout_s + GRACE_S)
            if state.end != DONE:
                if state.end_failed:
                    why = f"saving failed at rank {state.end - FAILED}"
                elif state.end:
                    why = f"rank {state.end - FAILED} did not save within {self._save_timeout_s:g} s"
                else:
                    why = self._broken or "rank 0 did not say that all is saved"
                return self._resume(state, began, why)
            state.left = True
        took_s = time.monotonic() - began
        log.info("a checkpoint at step %d, for which all ranks paused %.0f ms", self._passed, took_s * 1000)
        return Outcome(self._passed, True, "", took_s)

    # The thread

    def _fell_back(self, event: observe.Event) -> None:
        self._want(event.t_ns)

    def _want(self, t_ns: int) -> None:
        with self._changed:
            if t_ns > self._covered_ns:  # it may be told late
                self._wanted_ns = max(self._wanted_ns, t_ns)
                self._changed.notify_all()

    def _run(self) -> None:
        number = 0
        try:
            while True:
                conductor = Conductor(
                    self._store,
                    number,
                    self._rank,
                    self._size,
                    self._savers,
                    self._save_timeout_s,
                    self._changed,
                )
                if self._closed or not self._await_round(conductor):
                    break
                number += 1
                is_saved = not conductor.is_over() and self._conduct(conductor)
                self._not_before = time.monotonic() + max(self._min_interval_s, 0.0 if is_saved else AGAIN_S)
            conductor.leave()
        except Exception as error:
            with self._changed:
                self._broken = f"the ranks cannot agree any more, the store failed: {error}"
                self._changed.notify_all()
            if not self._closed:
                log.warning("no more checkpoints after fallbacks: %s", self._broken)

    def _await_round(self, conductor: Conductor) -> bool:
        """Until a round is asked for, by us or another rank. False: closed."""
        asked = False
        while not conductor.is_wanted():
            with self._changed:
                if self._closed:
                    return False
                left_s = self._not_before - time.monotonic()
                wants = bool(self._wanted_ns) and not asked
                if not wants or left_s > 0:
                    self._changed.wait(self._idle_s(left_s if wants else None))
                    continue
            conductor.want()
            asked = True
        return True

    def _idle_s(self, left_s: float | None) -> float:
        idle_s = interval_s(self._size, False)
        return idle_s if left_s is None else min(idle_s, left_s)

    def _conduct(self, conductor: Conductor) -> bool:
        """Play our part in a round; whether all is saved."""
        with self._changed:
            state = self._round = Round(self._passed + 1)
        conductor.begin(state)
        while not conductor.look(state):
            with self._changed:
                if self._closed:
                    break
                # It may have changed while we looked, but then it is waiting, and we look again soon.
                self._changed.wait(interval_s(self._size, state.is_waiting))
        if self._closed:
            conductor.abandon(state)
        with self._changed:
            self._round = None
            if state.end == DONE:
                self._covered_ns = state.paused_ns
                if self._wanted_ns <= state.paused_ns:
                    self._wanted_ns = 0
            if state.outcome >= RESUME and not state.left and not state.is_waiting:
                log.warning("no checkpoint: rank %d did not pause in time", state.outcome - RESUME)
            self._changed.notify_all()
            return state.end == DONE
