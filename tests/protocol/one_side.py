# SPDX-License-Identifier: BSD-3-Clause
"""One PairProtocol by itself; its peer, its NICs and the time are what the test says."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

from shiftverbs.protocol import events as ev
from shiftverbs.protocol.events import Status
from shiftverbs.protocol.messages import Arm, ArmStep, PairAddress
from shiftverbs.protocol.pair import MS, LocalPair, PairProtocol, ProtocolConfig

#: Where its peer's QPs are.
ADDRESS = PairAddress(b"x" * 16, 0, 99, 5, 3)


def begun(pairs: int = 2, initiator: bool = True) -> tuple[PairProtocol, list[ev.Action]]:
    """A protocol at time 0, and what it does first."""
    locals_ = [LocalPair(b"a" * 16, 0, 10 + k, 3) for k in range(pairs)]
    p = PairProtocol(ProtocolConfig(invariants=True), locals_, initiator, random.Random(1), 0)
    return p, p.start(0)


def one_side(pairs: int = 2) -> tuple[PairProtocol, int]:
    """The initiator of a pairing at rest, each of its backups armed; and the present time."""
    p, actions = begun(pairs)
    now = 50 * MS
    todo = deque(actions)
    answers: dict[type, Callable[[Any], list[ev.Event]]] = {
        ev.ResetPair: lambda a: [ev.PairReset(a.pair, a.arm, b"a" * 16, 3)],
        ev.SendMessage: lambda a: _agreed(a.message),
        ev.ConnectPair: lambda a: [ev.PairConnected(a.pair, a.arm, a.stage)],
        ev.PostArmSend: lambda a: [ev.ArmCompletion(a.pair, receive, ok=True) for receive in (False, True)],
    }
    while todo:
        action = todo.popleft()
        for event in answers.get(type(action), lambda a: [])(action):
            todo += p.handle(event, now)
    assert p.status is Status.PROTECTED and p.all_fit and not p.busy
    return p, now


def _agreed(message: Any) -> list[ev.Event]:
    """What a peer with nothing against it says to an ARM."""
    if not isinstance(message, Arm) or message.step is not ArmStep.REQ:
        return []
    return [ev.MessageReceived(Arm(ArmStep.REP, message.epoch, message.pair, message.arm, ADDRESS))]


def sent(actions: list[ev.Action]) -> list[Any]:
    """What these actions say."""
    return [action.message for action in actions if isinstance(action, ev.SendMessage)]
