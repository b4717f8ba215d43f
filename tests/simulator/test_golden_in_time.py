# SPDX-License-Identifier: BSD-3-Clause
"""The golden scenarios of docs/protocol.md in virtual time, each with its transcript in golden/.

A transcript changes when the protocol does, or what is around it in a process: look at the difference, then rewrite
with SHIFTVERBS_REWRITE_GOLDEN=1.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from msgspec.structs import fields
from simulator import application, checks
from simulator.application import RECV_ID, Application
from simulator.checks import over
from simulator.clock import MS, US
from simulator.network import Network
from simulator.story import (
    Story,
    armed,
    at_home,
    drop_next,
    path_failed,
    post,
    sends,
    statuses,
    telling,
    until,
    wait,
    went,
)

from shiftverbs.protocol import events as ev
from shiftverbs.protocol.events import Status
from shiftverbs.protocol.messages import Arm, Move, PairAddress, Prefer, Sync
from shiftverbs.wr import RecvWR

FOLDER = Path(__file__).parent / "golden"
STORIES: dict[str, Story] = {}


def story(function: Story) -> Story:
    STORIES[function.__name__] = function
    return function


def begin(**options: Any) -> tuple[Network, Application, Application]:
    """A network whose QP is protected; the transcript begins after that."""
    net = armed(**{"capacity": 16, "receives": 8, **options})
    net.trace.clear()
    return net, net.app("a"), net.app("b")


# ---- the stories -----------------------------------------------------------------------------------------------------


@story
def read_response_lost_send_counted() -> Network:
    net, a, b = begin()
    post(a, "WRITE", 3, data=33)
    wait(net, 1)
    drop_next(net, "b", 0, "resp", "READ")
    read = post(a, "READ", 3)
    send = post(a, "SEND")
    wait(net, 0.025)
    assert b.endpoint.core.counters()[0] == 1  # counted, while the READ has no answer
    net.port("a", 0, False, 10 * US)
    until(net, lambda: len(a.wcs) >= 3)
    assert a.reads == [(read, 33)]
    assert [wr for queue, wr, _ in a.wcs if queue == "send"][1:] == [read, send]
    assert [e[4] for e in net.executions].count(send) == 1
    assert [e[4] for e in net.executions].count(read) == 2
    return net


@story
def acked_but_receive_cqe_lost() -> Network:
    net, a, b = begin()
    net.hold_cqes("b", 0, True)
    post(a, "SEND")
    wait(net, 0.1)
    assert statuses(a) == [("a0 SEND", "SUCCESS")]
    net.kill("b", 0)
    post(a, "SEND")
    until(net, lambda: over(a) is not None and over(b) is not None)
    wait(net, 10)
    assert "acknowledged and lost" in (over(a) or "") + (over(b) or "")
    assert statuses(a)[1] == ("a1 SEND", "RETRY_EXC_ERR")
    assert b.received == []
    return net


@story
def unsignaled_tail_fence() -> Network:
    net, a, b = begin()
    for cell in range(4):
        post(a, "WRITE", cell, signaled=False)
    wait(net, 1)
    assert b.cells[:4] == [1, 2, 3, 4]  # acknowledged; no completion will ever say so
    net.port("a", 0, False, 10 * US)
    until(net, lambda: a.endpoint.protocol.send_pair == 1 and not a.endpoint.protocol.switching)
    post(a, "SEND")
    wait(net, 1)
    assert statuses(a) == [("a4 SEND", "SUCCESS")]
    assert over(a) is None
    return net


class AlikeIds:
    """A CQ whose WRs, as the program posts them, have the wr_ids 0, 1, 2 … on each queue of each of its QPs."""

    def __init__(self, cq: Any, numbers: dict[int, int], seen: list[tuple[int, bool, int, int]]) -> None:
        self._cq, self._numbers, self._seen = cq, numbers, seen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cq, name)

    def poll(self, most: int) -> tuple[int, list[Any]]:
        count, wcs = self._cq.poll(most)
        for wc in wcs:  # all succeed, so their opcodes count
            number, recv = self._numbers[wc.qp_num], wc.opcode >= 128
            self._seen.append((number, recv, wc.wr_id, wc.status))
            wc.wr_id = RECV_ID | number << 20 | wc.wr_id if recv else number << 16 | wc.wr_id + 1
        return count, wcs


@story
def shared_cq_colliding_wr_ids() -> Network:
    """One CQ serves both queues of two QPs, and the wr_ids of all four are the same: each WC finds its own WR."""

    def recv(wr_id: int, **has: Any) -> RecvWR:
        return RecvWR(wr_id=wr_id & 0xFFFFF, **has)

    def send(app: Application, wr: Any) -> Any:
        made = made_by(app, wr)
        made.wr_id = wr.index
        return made

    made_by = Application._send_wr
    with (
        mock.patch.object(application, "RecvWR", recv),
        mock.patch.object(Application, "_send_wr", send),
    ):
        net, _, _ = begin(receives=4, qps=2, one_cq=True)
        seen: dict[str, list[tuple[int, bool, int, int]]] = {"a": [], "b": []}
        for app in net.apps:
            name = app.device.name
            numbers = {each.endpoint.qp_num: each.number for each in net.apps_of(name)}
            alike = AlikeIds(app.endpoint.cq, numbers, seen[name])
            app.cqs = (SimpleNamespace(core=alike, apps=app.cqs[0].apps),)  # type: ignore[assignment]
        net.hold_cqes("a", 0, True)
        for _ in range(3):
            for app in net.apps:
                post(app, "SEND")
        wait(net, 0.1)
        net.hold_cqes("a", 0, False)
        net.wall("b", 0, True)
        for app in net.apps:
            post(app, "SEND")
        until(net, lambda: all(len(app.posted) == len(app.received) == 4 for app in net.apps))
        wait(net, 5)
        for app in net.apps:
            assert sends(app) == ["SUCCESS"] * 4
            for queue in (False, True):
                mine = [
                    (wr_id, status)
                    for number, recv, wr_id, status in seen[app.device.name]
                    if (number, recv) == (app.number, queue)
                ]
                assert mine == [(n, 0) for n in range(4)]
    return net


@story
def crossing_sync_different_targets() -> Network:
    net, a, b = begin(pairs=3)
    a.endpoint.protocol.pairs[1].alive = False  # each side believes in another backup
    b.endpoint.protocol.pairs[2].alive = False
    for app in (a, b):
        post(app, "SEND")
        path_failed(app, 0, "RETRY_EXC_ERR")
    started = {action.target for action in went(net, ev.SwitchStarted)}
    assert started == {1, 2}
    until(
        net,
        lambda: all(not app.endpoint.protocol.switching for app in (a, b)) and len(a.received) == 1,
    )
    wait(net, 5)
    assert a.endpoint.protocol.epoch == b.endpoint.protocol.epoch
    assert [app.received for app in (a, b)] == [[(0, 1)], [(0, 1)]]
    return net


@story
def ack_lost_then_target_dies() -> Network:
    net, a, b = begin(pairs=3)
    drop_next(net, "b", 0, "ack", "SEND")
    post(a, "SEND")
    wait(net, 0.1)
    net.port("a", 0, False, 10 * US)
    net.clock.later(15 * US, net.kill, "b", 1)
    until(
        net,
        lambda: (
            all(app.endpoint.protocol.send_pair == 2 for app in (a, b)) and not a.endpoint.protocol.switching
        ),
    )
    post(a, "SEND")
    wait(net, 5)
    assert b.received == [(0, 1), (1, 2)]
    assert statuses(a) == [("a0 SEND", "SUCCESS"), ("a1 SEND", "SUCCESS")]
    return net


@story
def half_home_default_fails() -> Network:
    net, a, b = begin()
    p, q = a.endpoint.protocol, b.endpoint.protocol
    post(b, "WRITE", signaled=False)
    net.port("a", 0, False, 10 * US)
    until(net, lambda: p.send_pair == q.send_pair == 1 and not p.switching)
    wait(net, 1)
    post(b, "WRITE", signaled=False)  # b waits for a signaled WR before it comes home
    net.port("a", 0, True, 10 * US)
    until(net, lambda: p.send_pair == 0 and q.send_state.value == "WAIT_SIGNALED")
    assert q.send_pair == 1
    post(a, "SEND")
    net.port("b", 0, False, 10 * US)
    until(net, lambda: p.send_pair == p.recv_pair == 1 and len(b.received) == 1)
    net.port("b", 0, True, 10 * US)
    until(net, lambda: at_home(net), ms=30_000)
    assert statuses(a)[-1] == ("a0 SEND", "SUCCESS")
    return net


@story
def move_before_last_receive_polled() -> Network:
    net, a, b = begin()
    b.poll_ns = 50 * MS  # the application does not poll for a while
    for _ in range(5):
        post(a, "SEND")
    wait(net, 0.1)
    assert b.received == []
    a.endpoint.prefer(1)
    until(net, lambda: a.endpoint.protocol.send_pair == 1 and b.endpoint.protocol.recv_pair == 1)
    post(a, "SEND")
    wait(net, 120)
    assert [value for _, value in b.received] == [1, 2, 3, 4, 5, 6]
    assert not went(net, ev.Trim)
    return net


@story
def port_blip_with_atomic() -> Network:
    net, a, b = begin()
    drop_next(net, "b", 0, "resp")
    atomic = post(a, "FADD", 8, data=5)
    net.port("a", 0, False, 10 * US)
    wait(net, 5)
    net.port("a", 0, True, 10 * US)
    until(net, lambda: len(a.wcs) == 1)
    assert statuses(a) == [("a0 FADD", "SUCCESS")]
    assert a.reads == [(atomic, 0)]
    assert b.cells[8] == 5
    assert not went(net, ev.Fence)
    return net


@story
def close_during_wait_drained() -> Network:
    net, a, b = begin()
    drop_next(net, "b", 0, "ack", times=2)
    post(a, "SEND")
    wait(net, 0.05)
    a.endpoint.prefer(1)
    wait(net, 0.05)
    assert a.endpoint.protocol.send_state.value == "WAIT_DRAINED"
    a.close()
    wait(net, 10)
    assert over(b) == "the peer closed its QP"
    assert b.endpoint.status is Status.UNPROTECTED
    assert not went(net, ev.Fence)
    return net


# ---- transcripts -----------------------------------------------------------------------------------------------------


def render(value: Any) -> str:
    """One action or message in a line."""
    match value:
        case ev.SendMessage(message=message, pair=pair, spread=spread):
            return f"-> {render(message)} over {'every pair' if spread else f'pair {pair}'}"
        case Sync() as m:
            words = [f"SYNC {m.phase.name} ({m.epoch}, {m.target}) arm={m.arm} rx={m.rx}"]
            words += ["clean"] * m.clean + [f"ask={m.ask}"] * bool(m.ask) + ["settled"] * m.settled
            return " ".join([*words, f"seen=({m.seen_phase}, {m.seen_arm})"])
        case Arm() as m:
            return f"ARM {m.step.name} epoch={m.epoch} pair={m.pair} arm={m.arm}"
        case Move() as m:
            return f"{m.step.name} number={m.number} epoch={m.epoch} target={m.target} arm={m.arm} tx={m.tx}"
        case Prefer() as m:
            return f"PREFER {m.number} pair {m.target}{' seen' * m.seen}"
        case PairAddress():
            return f"qp {value.qpn}"
    parts = []
    for field in fields(value):
        shown = getattr(value, field.name)
        if field.name not in ("remote", "psn", "deadline_ns") and shown not in (None, ""):
            parts.append(f"{field.name}={getattr(shown, 'value', shown)}")
    return " ".join([type(value).__name__, *parts])


def transcript(net: Network) -> str:
    """What the protocol did and what the applications saw, as it is kept in golden/."""
    lines = [f"{t / 1e6:12.3f} ms  {name}  {render(action)}" for t, name, action in net.trace]
    for app in net.apps:
        seen = [f"{what} {status}" for what, status in statuses(app)]
        lines.append(f"{app.name} saw: {', '.join(seen) or 'nothing'}")
        lines.append(f"{app.name} received: {[value for _, value in app.received]}")
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("name", STORIES)
def test_golden(name: str) -> None:
    with telling(STORIES[name]) as net:
        checks.check(net)
        got = transcript(net)
    path = FOLDER / f"{name}.txt"
    if os.environ.get("SHIFTVERBS_REWRITE_GOLDEN"):
        path.write_text(got)
    assert path.exists(), f"no transcript of {name}: SHIFTVERBS_REWRITE_GOLDEN=1 writes it"
    assert got == path.read_text(), (
        f"the transcript of {name} changed: look at it, then SHIFTVERBS_REWRITE_GOLDEN=1"
    )


def test_the_names_are_those_of_the_documentation() -> None:
    page = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text().split("## Golden scenarios")[1]
    named = {
        line.split("|")[1].strip() for line in page.splitlines() if line.startswith("| ") and "_" in line
    }
    assert named == set(STORIES) == {path.stem for path in FOLDER.glob("*.txt")}
