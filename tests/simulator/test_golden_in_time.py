# SPDX-License-Identifier: BSD-3-Clause
"""The golden scenarios of docs/protocol.md in virtual time, each with its transcript in golden/.

A transcript changes when the protocol does: look at the difference, then rewrite with SHIFTVERBS_REWRITE_GOLDEN=1.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from simulator import checks
from simulator.hosts import Network, Side
from simulator.journal import Wr
from simulator.rnic import MS, US, Packet

from shiftverbs.protocol import events as ev
from shiftverbs.protocol.events import Status
from shiftverbs.protocol.messages import Arm, Move, PairAddress, Prefer, Sync

FOLDER = Path(__file__).parent / "golden"
Story = Callable[[], Network]
STORIES: dict[str, Story] = {}


def story(function: Story) -> Story:
    STORIES[function.__name__] = function
    return function


# ---- tools of the stories --------------------------------------------------------------------------------------------


def armed(pairs: int = 2, receives: int = 8, capacity: int = 16) -> Network:
    """A network whose QP is protected; the transcript begins after that."""
    net = Network(1, pairs, capacity, receives)
    net.clock.run(30 * MS)
    assert net.a.statuses == net.b.statuses == [Status.PROTECTED]
    net.trace.clear()
    return net


def post(side: Side, opcode: str, remote: int = 0, signaled: bool = True, data: int | None = None) -> Wr:
    """Post one WR now."""
    app = side.app
    index = len(app.posted) + len(app.plan)
    wr = Wr(side.name, index, opcode, remote, data or index + 1, signaled, fence=False, inline=False)
    app.plan.append(wr)
    app.due()
    return wr


def wait(net: Network, ms: float) -> None:
    net.clock.run(net.clock.now + int(ms * MS))


def until(net: Network, done: Callable[[], bool], ms: int = 5000) -> None:
    assert net.clock.run(net.clock.now + ms * MS, done)


def at_home(net: Network) -> bool:
    return all(
        (side.protocol.send_state.value, side.protocol.recv_state.value) == ("DEFAULT", "DEFAULT")
        and not side.protocol.busy
        for side in net.sides
    )


def drop_next(net: Network, name: str, k: int, kind: str, opcode: str) -> None:
    """The next answer of that kind that `name` sends is lost."""
    net.links[name, k].drops.append(lambda p: isinstance(p, Packet) and p.kind == kind and p.opcode == opcode)


def went(net: Network, kind: type) -> list[Any]:
    return [action for _, _, action in net.trace if isinstance(action, kind)]


def statuses(side: Side) -> list[tuple[str, str]]:
    return [(str(what) if queue == "send" else "recv", status) for queue, what, status in side.app.wcs]


# ---- the stories -----------------------------------------------------------------------------------------------------


@story
def read_response_lost_send_counted() -> Network:
    net = armed()
    post(net.a, "WRITE", remote=3, data=33)
    wait(net, 1)
    drop_next(net, "b", 0, "resp", "READ")
    read = post(net.a, "READ", remote=3)
    send = post(net.a, "SEND")
    wait(net, 0.025)
    assert net.b.journal.rx == 1  # counted, while the READ has no answer
    net.port("a", 0, False, 10 * US)
    until(net, lambda: len(net.a.app.wcs) >= 3)
    assert read.buf[0] == 33
    assert [wr for queue, wr, _ in net.a.app.wcs if queue == "send"][1:] == [read, send]
    assert [e[4] for e in net.executions].count(send) == 1
    assert [e[4] for e in net.executions].count(read) == 2
    return net


@story
def acked_but_receive_cqe_lost() -> Network:
    net = armed()
    net.hold_cqes("b", 0, True)
    post(net.a, "SEND")
    wait(net, 0.1)
    assert statuses(net.a) == [("a0 SEND", "SUCCESS")]
    net.kill("b", 0)
    post(net.a, "SEND")
    until(net, lambda: net.a.over is not None and net.b.over is not None)
    wait(net, 10)
    assert "acknowledged and lost" in (net.a.over or "") + (net.b.over or "")
    assert statuses(net.a)[1] == ("a1 SEND", "RETRY_EXC_ERR")
    assert net.b.app.received == []
    return net


@story
def unsignaled_tail_fence() -> Network:
    net = armed()
    for cell in range(4):
        post(net.a, "WRITE", remote=cell, signaled=False)
    wait(net, 1)
    assert net.b.memory[:4] == [1, 2, 3, 4]  # acknowledged; no completion will ever say so
    net.port("a", 0, False, 10 * US)
    until(net, lambda: net.a.protocol.send_pair == 1 and not net.a.protocol.switching)
    post(net.a, "SEND")
    wait(net, 1)
    assert statuses(net.a) == [("a4 SEND", "SUCCESS")]
    assert net.a.over is None
    return net


@story
def shared_cq_colliding_wr_ids() -> Network:
    """One CQ per pair serves both queues, and receive 0 and send 0 have the same wr_id: each WC finds its own WR."""
    net = armed(receives=4)
    net.hold_cqes("a", 0, True)
    for _ in range(3):
        post(net.a, "SEND")
        post(net.b, "SEND")
    wait(net, 0.1)
    net.hold_cqes("a", 0, False)
    net.wall("b", 0, True)
    post(net.a, "SEND")
    post(net.b, "SEND")
    until(
        net,
        lambda: len(net.a.app.posted) == 4 and len(net.a.app.received) == 4 and len(net.b.app.received) == 4,
    )
    wait(net, 5)
    for side in net.sides:
        sends = [(wr.wr_id, status) for queue, wr, status in side.app.wcs if queue == "send"]
        receives = [(wr_id, status) for queue, wr_id, status in side.app.wcs if queue == "recv"]
        assert sends == receives == [(n, "SUCCESS") for n in range(4)]
    return net


@story
def crossing_sync_different_targets() -> Network:
    net = armed(pairs=3)
    net.a.protocol.pairs[1].alive = False  # each side believes in another backup
    net.b.protocol.pairs[2].alive = False
    for side in net.sides:
        post(side, "SEND")
        side.feed(ev.PathFailed(0, "RETRY_EXC_ERR"))
    started = {action.target for action in went(net, ev.SwitchStarted)}
    assert started == {1, 2}
    until(
        net, lambda: all(not side.protocol.switching for side in net.sides) and len(net.a.app.received) == 1
    )
    wait(net, 5)
    assert net.a.protocol.epoch == net.b.protocol.epoch
    assert [side.app.received for side in net.sides] == [[(0, 1)], [(0, 1)]]
    return net


@story
def ack_lost_then_target_dies() -> Network:
    net = armed(pairs=3)
    drop_next(net, "b", 0, "ack", "SEND")
    post(net.a, "SEND")
    wait(net, 0.1)
    net.port("a", 0, False, 10 * US)
    net.clock.later(15 * US, net.kill, "b", 1)
    until(
        net,
        lambda: net.a.protocol.send_pair == net.b.protocol.send_pair == 2 and not net.a.protocol.switching,
    )
    post(net.a, "SEND")
    wait(net, 5)
    assert net.b.app.received == [(0, 1), (1, 2)]
    assert statuses(net.a) == [("a0 SEND", "SUCCESS"), ("a1 SEND", "SUCCESS")]
    return net


@story
def half_home_default_fails() -> Network:
    net = armed()
    post(net.b, "WRITE", signaled=False)
    net.port("a", 0, False, 10 * US)
    until(
        net,
        lambda: net.a.protocol.send_pair == net.b.protocol.send_pair == 1 and not net.a.protocol.switching,
    )
    wait(net, 1)
    post(net.b, "WRITE", signaled=False)  # b waits for a signaled WR before it comes home
    net.port("a", 0, True, 10 * US)
    until(net, lambda: net.a.protocol.send_pair == 0)
    assert net.b.protocol.send_pair == 1
    post(net.a, "SEND")
    net.port("b", 0, False, 10 * US)
    until(
        net,
        lambda: net.a.protocol.send_pair == net.a.protocol.recv_pair == 1 and len(net.b.app.received) == 1,
    )
    net.port("b", 0, True, 10 * US)
    until(net, lambda: at_home(net), ms=30_000)
    assert statuses(net.a)[-1] == ("a0 SEND", "SUCCESS")
    return net


@story
def move_before_last_receive_polled() -> Network:
    net = armed()
    net.b.app.poll_ns = 50 * MS  # the application does not poll for a while
    for _ in range(5):
        post(net.a, "SEND")
    wait(net, 0.1)
    assert net.b.app.received == []
    net.a.feed(ev.PreferPair(1))
    until(net, lambda: net.a.protocol.send_pair == 1 and net.b.protocol.recv_pair == 1)
    post(net.a, "SEND")
    wait(net, 120)
    assert [value for _, value in net.b.app.received] == [1, 2, 3, 4, 5, 6]
    assert not went(net, ev.Trim)
    return net


@story
def port_blip_with_atomic() -> Network:
    net = armed()
    net.links["b", 0].drops.append(lambda p: isinstance(p, Packet) and p.kind == "resp")
    atomic = post(net.a, "FADD", remote=8, data=5)
    net.port("a", 0, False, 10 * US)
    wait(net, 5)
    net.port("a", 0, True, 10 * US)
    until(net, lambda: len(net.a.app.wcs) == 1)
    assert statuses(net.a) == [("a0 FADD", "SUCCESS")]
    assert atomic.buf[0] == 0
    assert net.b.memory[8] == 5
    assert not went(net, ev.Fence)
    return net


@story
def close_during_wait_drained() -> Network:
    net = armed()
    net.links["b", 0].drops += [lambda p: isinstance(p, Packet) and p.kind == "ack"] * 2
    post(net.a, "SEND")
    wait(net, 0.05)
    net.a.feed(ev.PreferPair(1))
    wait(net, 0.05)
    assert net.a.protocol.send_state.value == "WAIT_DRAINED"
    net.a.close()
    wait(net, 10)
    assert net.b.over == "the peer closed its QP"
    assert net.b.statuses[-1] is Status.UNPROTECTED
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
    for side in net.sides:
        seen = [f"{what} {status}" for what, status in statuses(side)]
        lines.append(f"{side.name} saw: {', '.join(seen) or 'nothing'}")
        lines.append(f"{side.name} received: {[value for _, value in side.app.received]}")
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("name", STORIES)
def test_golden(name: str) -> None:
    net = STORIES[name]()
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
