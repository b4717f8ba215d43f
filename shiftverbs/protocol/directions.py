# SPDX-License-Identifier: BSD-3-Clause
"""Where each direction is: steps the send and the receive machine, and turns their steps into actions. Pure."""

from __future__ import annotations

from shiftverbs.protocol import events as ev
from shiftverbs.protocol.state import PairState
from shiftverbs.protocol.timers import Timer
from shiftverbs.state_machine import RecvInput, SendInput, Step, step_recv, step_send


class Directions:
    """The only one who changes send_state, recv_state, send_pair and recv_pair."""

    __slots__ = ("_state",)

    def __init__(self, state: PairState) -> None:
        self._state = state

    def send(self, given: SendInput, pair: int, peer_rx: int = 0, reason: str = "") -> tuple[Step, ...]:
        """Step the send machine; `pair` is where sends are afterwards.

        peer_rx: for TRIM; reason: for DELIVER_ERRORS. Returns the steps; SEND_MOVE is left to the caller.
        Raises IllegalTransition.
        """
        s = self._state
        before = s.send_state
        s.send_state, steps = step_send(before, given)
        s.send_pair = pair
        for step in steps:
            match step:
                case Step.CLOSE_SEND:
                    s.timers.stop(Timer.OPEN)
                    s.do(ev.CloseSend())
                case Step.TRIM:
                    s.do(ev.Trim(peer_rx))
                case Step.OPEN_SEND | Step.REOPEN_SEND:
                    self._open(pair)
                case Step.BEGIN_FENCE_WR:
                    s.do(ev.BeginFenceWr())
                case Step.CANCEL_MOVE:
                    s.do(ev.CancelMove(pair))
                case Step.DELIVER_ERRORS:
                    s.do(ev.DeliverErrors(reason))
        if s.send_state is not before or Step.OPEN_SEND in steps:
            s.do(ev.StateChanged("send", s.send_state.value, pair))
        return steps

    def receive(self, given: RecvInput, pair: int) -> tuple[Step, ...]:
        """Step the receive machine; `pair` is where receives are afterwards.

        Returns the steps; ANSWER_MOVED is left to the caller. Raises IllegalTransition.
        """
        s = self._state
        before = s.recv_state
        s.recv_state, steps = step_recv(before, given)
        left, s.recv_pair = s.recv_pair, pair
        for step in steps:
            match step:
                case Step.CLOSE_RECV:
                    s.do(ev.CloseRecv())
                case Step.POST_RECEIVES:
                    s.use(pair)
                    s.receives_number += 1
                    s.do(ev.PostReceives(pair, s.receives_number))
                case Step.MOVE_RECEIVES:
                    s.pairs[left].stale = left != pair
                    s.use(pair)
                    s.receives_number += 1
                    s.do(ev.MoveReceives(pair, s.receives_number))
        if s.recv_state is not before:
            s.do(ev.StateChanged("recv", s.recv_state.value, pair))
        return steps

    def _open(self, pair: int) -> None:
        """Hand sends over, but not before `open_ns`."""
        s = self._state
        if s.now_ns < s.open_ns:
            s.timers.set(Timer.OPEN, s.open_ns)
        else:
            s.timers.stop(Timer.OPEN)
            s.do(ev.OpenSend(pair))

    @property
    def pausing(self) -> bool:
        """Whether nothing but `open_ns` is waited for before sends are handed over."""
        return self._state.timers.runs(Timer.OPEN)

    def open_now(self) -> None:
        """The pause is over."""
        s = self._state
        s.timers.stop(Timer.OPEN)
        s.do(ev.OpenSend(s.send_pair))

    def pause_until(self, open_ns: int) -> None:
        """Hand no sends over before."""
        s = self._state
        s.open_ns = open_ns
        if self.pausing:
            s.timers.set(Timer.OPEN, open_ns)
