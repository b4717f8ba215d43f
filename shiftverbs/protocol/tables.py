# SPDX-License-Identifier: BSD-3-Clause
"""How far SWITCH and ARM have come: their states, as one transition table each. Pure.

As in `shiftverbs.state_machine`: (state, input) to (next state, steps in order), and what is not in a table is illegal.
switch.py and arm.py feed them and carry the steps out; the diagrams in docs/protocol.md are generated from them.
"""

from __future__ import annotations

import enum

from shiftverbs.state_machine import IllegalTransition, diagram


class SwitchState(enum.Enum):
    """How far this side has come with a SWITCH. All but IDLE are what it tells its peer (`messages.Phase`)."""

    IDLE = "IDLE"  # none is under way: none yet, or the last one is done
    ASK = "ASK"  # the peer is asked; nothing is fenced
    START = "START"  # fencing, or the target is being reset
    FENCED = "FENCED"  # the target was reset, and waits for its peer to be connected
    POSTING = "POSTING"  # the target is fit; the receives are being posted there
    READY = "READY"  # they are


class SwitchInput(enum.Enum):
    """What can happen to a SWITCH."""

    HINTED = "HINTED"  # a pair looks as if it had failed
    PATH_FAILED = "PATH_FAILED"  # a pair has failed
    PEER_AGREED = "PEER_AGREED"  # the answer to the question, or the same question
    DROPPED = "DROPPED"  # the peer refused, or nobody answers
    JOINED = "JOINED"  # the peer is in a newer SWITCH
    NEXT_PAIR = "NEXT_PAIR"  # the target does not work, or the peer does not answer there
    UNFIT = "UNFIT"  # the target is not clean, or the peer was reset more often
    WAS_RESET = "WAS_RESET"  # the target was reset as often as the peer's, as far as is known
    CLEAN = "CLEAN"  # the target is clean on both sides, as far as is known: it needs no reset
    CONNECTED = "CONNECTED"  # the target is in RTS
    RECEIVES_POSTED = "RECEIVES_POSTED"
    PEER_READY = "PEER_READY"
    ENDED = "ENDED"  # the pairing is over


class SwitchStep(enum.Enum):
    """What a transition of SWITCH asks for, in order."""

    FENCE = "FENCE"  # close both directions, call off ARM and MOVE, fence every used pair
    SAY = "SAY"  # tell the peer
    REOPEN = "REOPEN"  # go on where we are
    CLOSE_RECV = "CLOSE_RECV"
    RESET = "RESET"
    POST_RECEIVES = "POST_RECEIVES"
    HAND_OVER = "HAND_OVER"  # trim what is proven, replay the rest


class ArmState(enum.Enum):
    """How far ARM has come with one pair."""

    IDLE = "IDLE"
    RESETTING = "RESETTING"
    WAIT_PEER = "WAIT_PEER"  # requester: REQ is out; responder: REP is out
    CONNECTING = "CONNECTING"
    PROBING = "PROBING"


class ArmInput(enum.Enum):
    """What can happen to ARM of one pair. The requester is who said REQ."""

    BEGUN = "BEGUN"  # requester
    REQUESTED = "REQUESTED"  # responder: REQ
    RESET_TO_REQUEST = "RESET_TO_REQUEST"  # requester: in INIT
    RESET_TO_REPLY = "RESET_TO_REPLY"  # responder: in INIT
    REPLIED = "REPLIED"  # requester: REP
    RTS_TO_PROBE = "RTS_TO_PROBE"  # requester: in RTS
    RTR_TO_REPLY = "RTR_TO_REPLY"  # responder: in RTR
    PROBED = "PROBED"  # responder: the requester's zero-length SEND came
    RTS_TO_ANSWER = "RTS_TO_ANSWER"  # responder: in RTS
    ALL_SEEN = "ALL_SEEN"  # our SEND completed, and the peer's came
    FAILED = "FAILED"
    ENDED = "ENDED"  # the pairing is over


class ArmAction(enum.Enum):
    """What a transition of ARM asks for, in order."""

    RESET = "RESET"
    SAY_REQ = "SAY_REQ"
    SAY_REP = "SAY_REP"
    RTR = "RTR"
    RTS = "RTS"
    RTR_RTS = "RTR_RTS"
    POST_SEND = "POST_SEND"
    MARK_CLEAN = "MARK_CLEAN"


_S, _I, _T = SwitchState, SwitchInput, SwitchStep
_A, _B, _C = ArmState, ArmInput, ArmAction

SwitchTable = dict[tuple[SwitchState, SwitchInput], tuple[SwitchState, tuple[SwitchStep, ...]]]
ArmTable = dict[tuple[ArmState, ArmInput], tuple[ArmState, tuple[ArmAction, ...]]]

# READY is said behind POST_RECEIVES' answer only: the peer sends the moment it hears it. Behind FENCE there is no way
# back to ASK or, but for the end of the pairing, to IDLE without HAND_OVER.
SWITCH_TABLE: SwitchTable = {
    (_S.IDLE, _I.HINTED): (_S.ASK, (_T.SAY,)),
    (_S.IDLE, _I.PATH_FAILED): (_S.START, (_T.FENCE,)),
    (_S.IDLE, _I.JOINED): (_S.START, (_T.FENCE,)),
    (_S.IDLE, _I.ENDED): (_S.IDLE, ()),
    (_S.ASK, _I.PATH_FAILED): (_S.START, (_T.FENCE,)),
    (_S.ASK, _I.PEER_AGREED): (_S.START, (_T.FENCE,)),
    (_S.ASK, _I.JOINED): (_S.START, (_T.FENCE,)),
    (_S.ASK, _I.DROPPED): (_S.IDLE, (_T.REOPEN,)),
    (_S.ASK, _I.ENDED): (_S.IDLE, ()),
    (_S.START, _I.UNFIT): (_S.START, (_T.RESET,)),
    (_S.START, _I.WAS_RESET): (_S.FENCED, (_T.SAY,)),
    (_S.START, _I.CLEAN): (_S.POSTING, (_T.POST_RECEIVES,)),
    (_S.START, _I.NEXT_PAIR): (_S.START, (_T.FENCE,)),
    (_S.START, _I.JOINED): (_S.START, (_T.FENCE,)),
    (_S.START, _I.ENDED): (_S.IDLE, ()),
    (_S.FENCED, _I.UNFIT): (_S.START, (_T.RESET,)),
    (_S.FENCED, _I.CONNECTED): (_S.POSTING, (_T.POST_RECEIVES,)),
    (_S.FENCED, _I.NEXT_PAIR): (_S.START, (_T.FENCE,)),
    (_S.FENCED, _I.JOINED): (_S.START, (_T.FENCE,)),
    (_S.FENCED, _I.ENDED): (_S.IDLE, ()),
    (_S.POSTING, _I.RECEIVES_POSTED): (_S.READY, (_T.SAY,)),
    (_S.POSTING, _I.UNFIT): (_S.START, (_T.CLOSE_RECV, _T.RESET)),
    (_S.POSTING, _I.NEXT_PAIR): (_S.START, (_T.FENCE,)),
    (_S.POSTING, _I.JOINED): (_S.START, (_T.FENCE,)),
    (_S.POSTING, _I.ENDED): (_S.IDLE, ()),
    (_S.READY, _I.PEER_READY): (_S.IDLE, (_T.HAND_OVER, _T.SAY)),
    (_S.READY, _I.UNFIT): (_S.START, (_T.CLOSE_RECV, _T.RESET)),
    (_S.READY, _I.NEXT_PAIR): (_S.START, (_T.FENCE,)),
    (_S.READY, _I.JOINED): (_S.START, (_T.FENCE,)),
    (_S.READY, _I.ENDED): (_S.IDLE, ()),
}

# The responder is not in RTS before the requester's SEND came: until then nothing of it can be lost on the way.
ARM_TABLE: ArmTable = {
    (_A.IDLE, _B.BEGUN): (_A.RESETTING, (_C.RESET,)),
    (_A.IDLE, _B.REQUESTED): (_A.RESETTING, (_C.RESET,)),
    (_A.IDLE, _B.FAILED): (_A.IDLE, ()),
    (_A.IDLE, _B.ENDED): (_A.IDLE, ()),
    (_A.RESETTING, _B.RESET_TO_REQUEST): (_A.WAIT_PEER, (_C.SAY_REQ,)),
    (_A.RESETTING, _B.RESET_TO_REPLY): (_A.CONNECTING, (_C.RTR,)),
    (_A.RESETTING, _B.REQUESTED): (_A.RESETTING, (_C.RESET,)),
    (_A.RESETTING, _B.FAILED): (_A.IDLE, ()),
    (_A.RESETTING, _B.ENDED): (_A.IDLE, ()),
    (_A.WAIT_PEER, _B.REPLIED): (_A.CONNECTING, (_C.RTR_RTS,)),
    (_A.WAIT_PEER, _B.PROBED): (_A.PROBING, (_C.RTS,)),
    (_A.WAIT_PEER, _B.REQUESTED): (_A.RESETTING, (_C.RESET,)),
    (_A.WAIT_PEER, _B.FAILED): (_A.IDLE, ()),
    (_A.WAIT_PEER, _B.ENDED): (_A.IDLE, ()),
    (_A.CONNECTING, _B.RTS_TO_PROBE): (_A.PROBING, (_C.POST_SEND,)),
    (_A.CONNECTING, _B.RTR_TO_REPLY): (_A.WAIT_PEER, (_C.SAY_REP,)),
    (_A.CONNECTING, _B.REQUESTED): (_A.RESETTING, (_C.RESET,)),
    (_A.CONNECTING, _B.FAILED): (_A.IDLE, ()),
    (_A.CONNECTING, _B.ENDED): (_A.IDLE, ()),
    (_A.PROBING, _B.RTS_TO_ANSWER): (_A.PROBING, (_C.POST_SEND,)),
    (_A.PROBING, _B.ALL_SEEN): (_A.IDLE, (_C.MARK_CLEAN,)),
    (_A.PROBING, _B.REQUESTED): (_A.RESETTING, (_C.RESET,)),
    (_A.PROBING, _B.FAILED): (_A.IDLE, ()),
    (_A.PROBING, _B.ENDED): (_A.IDLE, ()),
}


def step_switch(state: SwitchState, given: SwitchInput) -> tuple[SwitchState, tuple[SwitchStep, ...]]:
    """Return (next state, steps in order) for `given` in `state`.

    Raises IllegalTransition when the table has no such cell.
    """
    try:
        return SWITCH_TABLE[state, given]
    except KeyError:
        raise IllegalTransition(f"SWITCH: {given.value} in state {state.value}") from None


def step_arm(state: ArmState, given: ArmInput) -> tuple[ArmState, tuple[ArmAction, ...]]:
    """Return (next state, steps in order) for `given` in `state`.

    Raises IllegalTransition when the table has no such cell.
    """
    try:
        return ARM_TABLE[state, given]
    except KeyError:
        raise IllegalTransition(f"ARM: {given.value} in state {state.value}") from None


def mermaid() -> str:
    """Return both tables as Mermaid state diagrams (the text in docs/protocol.md)."""
    switch = [(s.value, i.value, t.value, [w.value for w in ws]) for (s, i), (t, ws) in SWITCH_TABLE.items()]
    arm = [(s.value, i.value, t.value, [w.value for w in ws]) for (s, i), (t, ws) in ARM_TABLE.items()]
    return diagram("SWITCH", "IDLE", switch) + "\n" + diagram("ARM of one pair", "IDLE", arm) + "\n"
