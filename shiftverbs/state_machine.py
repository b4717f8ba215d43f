# SPDX-License-Identifier: BSD-3-Clause
"""The per-QP state machine: four send states and two receive states, as one transition table each.

The tables are the only truth: `SEND_TABLE` and `RECV_TABLE` map (state, input) to (next state, steps in order); what is
not in a table is illegal and raises `IllegalTransition`. The machine performs nothing: `protocol.directions` feeds
it and turns its steps into actions, and `shiftverbs.failover` carries those out. The states are those of the SHIFT
paper, section 4.3; the diagram in docs/protocol.md is generated from the tables (`python -m shiftverbs.state_machine`).
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence


class SendState(enum.Enum):
    """Send-queue states (SHIFT, section 4.3)."""

    DEFAULT = "DEFAULT"  # on the default pair
    FALLBACK = "FALLBACK"  # on a backup pair, or between pairs (then closed: posts are only journaled)
    WAIT_SIGNALED = "WAIT_SIGNALED"  # a MOVE waits for its fence WR
    # The fence WR is posted; later posts are withheld until it and the peer are through.
    WAIT_DRAINED = "WAIT_DRAINED"


class RecvState(enum.Enum):
    """Receive-queue states (SHIFT, section 4.3)."""

    DEFAULT = "DEFAULT"
    FALLBACK = "FALLBACK"


class SendInput(enum.Enum):
    """What can happen to the send direction."""

    ASKED = "ASKED"  # an advisory trigger: the peer is asked before anything is fenced
    # The peer refused, or did not answer; sends stay on the default pair.
    ASK_DROPPED_HOME = "ASK_DROPPED_HOME"
    ASK_DROPPED_AWAY = "ASK_DROPPED_AWAY"  # the same on a backup pair
    PATH_FAILED = "PATH_FAILED"  # a SWITCH starts, is joined, or starts over with another target
    SWITCHED_HOME = "SWITCHED_HOME"  # the peer is READY on the default pair
    SWITCHED_AWAY = "SWITCHED_AWAY"  # the peer is READY on a backup pair
    MOVE_STARTED = "MOVE_STARTED"
    FENCE_WR_POSTED = "FENCE_WR_POSTED"
    FENCE_WR_DONE = "FENCE_WR_DONE"
    MOVED_HOME = "MOVED_HOME"  # the peer took the receive side over to the default pair
    MOVED_AWAY = "MOVED_AWAY"
    # The peer refused; sends stay where they are: the default pair.
    MOVE_CANCELLED_HOME = "MOVE_CANCELLED_HOME"
    MOVE_CANCELLED_AWAY = "MOVE_CANCELLED_AWAY"  # the same on a backup pair
    ABORTED = "ABORTED"  # no error is hidden any more


class RecvInput(enum.Enum):
    """What can happen to the receive direction."""

    PATH_FAILED = "PATH_FAILED"
    READY_HOME = "READY_HOME"  # SWITCH: the default pair is connected and may take the receives
    READY_AWAY = "READY_AWAY"
    MOVE_HOME = "MOVE_HOME"  # the peer's MOVE to the default pair, everything before its fence WR received
    MOVE_AWAY = "MOVE_AWAY"
    RECEIVES_MOVED = "RECEIVES_MOVED"  # all of them are posted where the peer's MOVE wants them
    ABORTED = "ABORTED"


class Step(enum.Enum):
    """What a transition asks for, in order."""

    CLOSE_SEND = "CLOSE_SEND"
    CLOSE_RECV = "CLOSE_RECV"
    TRIM = "TRIM"
    OPEN_SEND = "OPEN_SEND"
    REOPEN_SEND = "REOPEN_SEND"
    POST_RECEIVES = "POST_RECEIVES"
    BEGIN_FENCE_WR = "BEGIN_FENCE_WR"
    SEND_MOVE = "SEND_MOVE"
    CANCEL_MOVE = "CANCEL_MOVE"
    MOVE_RECEIVES = "MOVE_RECEIVES"
    ANSWER_MOVED = "ANSWER_MOVED"
    DELIVER_ERRORS = "DELIVER_ERRORS"


class IllegalTransition(Exception):
    """An input that the table does not have for the present state: a bug of ours, never the application's."""


_S, _I, _R, _J, _T = SendState, SendInput, RecvState, RecvInput, Step

SendTable = dict[tuple[SendState, SendInput], tuple[SendState, tuple[Step, ...]]]
RecvTable = dict[tuple[RecvState, RecvInput], tuple[RecvState, tuple[Step, ...]]]

# CLOSE_SEND comes before anything else of a failure: no WR may reach hardware between the fence and the trim.
# TRIM comes before OPEN_SEND: opening replays whatever is not proven.
SEND_TABLE: SendTable = {
    (_S.DEFAULT, _I.ASKED): (_S.DEFAULT, (_T.CLOSE_SEND,)),
    (_S.DEFAULT, _I.ASK_DROPPED_HOME): (_S.DEFAULT, (_T.REOPEN_SEND,)),
    (_S.DEFAULT, _I.PATH_FAILED): (_S.FALLBACK, (_T.CLOSE_SEND,)),
    (_S.DEFAULT, _I.MOVE_STARTED): (_S.WAIT_SIGNALED, (_T.BEGIN_FENCE_WR,)),
    (_S.DEFAULT, _I.ABORTED): (_S.DEFAULT, (_T.DELIVER_ERRORS,)),
    (_S.FALLBACK, _I.ASKED): (_S.FALLBACK, (_T.CLOSE_SEND,)),
    (_S.FALLBACK, _I.ASK_DROPPED_AWAY): (_S.FALLBACK, (_T.REOPEN_SEND,)),
    (_S.FALLBACK, _I.PATH_FAILED): (_S.FALLBACK, (_T.CLOSE_SEND,)),
    (_S.FALLBACK, _I.SWITCHED_HOME): (_S.DEFAULT, (_T.TRIM, _T.OPEN_SEND)),
    (_S.FALLBACK, _I.SWITCHED_AWAY): (_S.FALLBACK, (_T.TRIM, _T.OPEN_SEND)),
    (_S.FALLBACK, _I.MOVE_STARTED): (_S.WAIT_SIGNALED, (_T.BEGIN_FENCE_WR,)),
    (_S.FALLBACK, _I.ABORTED): (_S.DEFAULT, (_T.DELIVER_ERRORS,)),
    (_S.WAIT_SIGNALED, _I.PATH_FAILED): (_S.FALLBACK, (_T.CLOSE_SEND,)),
    (_S.WAIT_SIGNALED, _I.FENCE_WR_POSTED): (_S.WAIT_DRAINED, ()),
    (_S.WAIT_SIGNALED, _I.MOVE_CANCELLED_HOME): (_S.DEFAULT, (_T.CANCEL_MOVE,)),
    (_S.WAIT_SIGNALED, _I.MOVE_CANCELLED_AWAY): (_S.FALLBACK, (_T.CANCEL_MOVE,)),
    (_S.WAIT_SIGNALED, _I.ABORTED): (_S.DEFAULT, (_T.DELIVER_ERRORS,)),
    (_S.WAIT_DRAINED, _I.PATH_FAILED): (_S.FALLBACK, (_T.CLOSE_SEND,)),
    (_S.WAIT_DRAINED, _I.FENCE_WR_DONE): (_S.WAIT_DRAINED, (_T.SEND_MOVE,)),
    (_S.WAIT_DRAINED, _I.MOVED_HOME): (_S.DEFAULT, (_T.OPEN_SEND,)),
    (_S.WAIT_DRAINED, _I.MOVED_AWAY): (_S.FALLBACK, (_T.OPEN_SEND,)),
    (_S.WAIT_DRAINED, _I.MOVE_CANCELLED_HOME): (_S.DEFAULT, (_T.CANCEL_MOVE,)),
    (_S.WAIT_DRAINED, _I.MOVE_CANCELLED_AWAY): (_S.FALLBACK, (_T.CANCEL_MOVE,)),
    (_S.WAIT_DRAINED, _I.ABORTED): (_S.DEFAULT, (_T.DELIVER_ERRORS,)),
}

# MOVED is answered only when the receives are on the new pair: the peer sends there the moment it hears it. That may
# take a while, where their memory is still being registered there.
RECV_TABLE: RecvTable = {
    (_R.DEFAULT, _J.PATH_FAILED): (_R.FALLBACK, (_T.CLOSE_RECV,)),
    (_R.DEFAULT, _J.MOVE_HOME): (_R.DEFAULT, (_T.MOVE_RECEIVES,)),
    (_R.DEFAULT, _J.MOVE_AWAY): (_R.FALLBACK, (_T.MOVE_RECEIVES,)),
    (_R.DEFAULT, _J.RECEIVES_MOVED): (_R.DEFAULT, (_T.ANSWER_MOVED,)),
    (_R.DEFAULT, _J.ABORTED): (_R.DEFAULT, ()),
    (_R.FALLBACK, _J.PATH_FAILED): (_R.FALLBACK, (_T.CLOSE_RECV,)),
    (_R.FALLBACK, _J.READY_HOME): (_R.DEFAULT, (_T.POST_RECEIVES,)),
    (_R.FALLBACK, _J.READY_AWAY): (_R.FALLBACK, (_T.POST_RECEIVES,)),
    (_R.FALLBACK, _J.MOVE_HOME): (_R.DEFAULT, (_T.MOVE_RECEIVES,)),
    (_R.FALLBACK, _J.MOVE_AWAY): (_R.FALLBACK, (_T.MOVE_RECEIVES,)),
    (_R.FALLBACK, _J.RECEIVES_MOVED): (_R.FALLBACK, (_T.ANSWER_MOVED,)),
    (_R.FALLBACK, _J.ABORTED): (_R.DEFAULT, ()),
}


def step_send(state: SendState, given: SendInput) -> tuple[SendState, tuple[Step, ...]]:
    """Return (next state, steps in order) for `given` in `state`.

    Raises IllegalTransition when the table has no such cell.
    """
    try:
        return SEND_TABLE[state, given]
    except KeyError:
        raise IllegalTransition(f"send machine: {given.value} in state {state.value}") from None


def step_recv(state: RecvState, given: RecvInput) -> tuple[RecvState, tuple[Step, ...]]:
    """Return (next state, steps in order) for `given` in `state`.

    Raises IllegalTransition when the table has no such cell.
    """
    try:
        return RECV_TABLE[state, given]
    except KeyError:
        raise IllegalTransition(f"receive machine: {given.value} in state {state.value}") from None


def diagram(title: str, first: str, cells: Iterable[tuple[str, str, str, Sequence[str]]]) -> str:
    """Return one table as a Mermaid state diagram. cells: (state, input, next state, steps in order)."""
    lines = [f"%% {title}", "stateDiagram-v2", f"    [*] --> {first}"]
    for state, given, target, steps in cells:
        lines.append(f"    {state} --> {target}: {given}{' / ' if steps else ''}{', '.join(steps)}")
    return "\n".join(lines) + "\n"


def mermaid() -> str:
    """Return both tables as Mermaid state diagrams (the text in docs/protocol.md)."""
    send = [(s.value, i.value, t.value, [w.value for w in ws]) for (s, i), (t, ws) in SEND_TABLE.items()]
    recv = [(s.value, i.value, t.value, [w.value for w in ws]) for (s, i), (t, ws) in RECV_TABLE.items()]
    return (
        diagram("send machine", "DEFAULT", send) + "\n" + diagram("receive machine", "DEFAULT", recv) + "\n"
    )


if __name__ == "__main__":
    print(mermaid(), end="")
