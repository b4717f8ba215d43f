# SPDX-License-Identifier: BSD-3-Clause
"""What stories are told with: a protected network, WRs one by one, losses on purpose, and the protocol's own events."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from simulator.application import CELLS, OK, Application, Wr
from simulator.checks import over
from simulator.clock import MS
from simulator.host import ALL_RIGHTS, OwnMr
from simulator.network import Network
from simulator.rnic import Datagram, Packet
from simulator.world import World

from shiftverbs.native.ibv import WcStatus
from shiftverbs.protocol import events as ev
from shiftverbs.protocol.codec import decode, name_of

Story = Callable[[], Network]


@contextlib.contextmanager
def telling(story: Story) -> Iterator[Network]:
    """Tell a story; its network is ended afterwards, also where the story was not told to its end."""
    try:
        yield story()
    finally:
        if World.current is not None:
            World.current.end()


def armed(seed: int = 1, pairs: int = 2, capacity: int = 32, receives: int = 16, **options: Any) -> Network:
    """A network whose QPs are protected and at rest."""
    net = Network(seed, pairs, capacity, receives, **options)
    wait(net, 30)
    assert net.protected()
    return net


# ---- both sides ------------------------------------------------------------------------------------------------------


def ends(net: Network) -> tuple[Application, Application]:
    """The programs of both sides."""
    return net.app("a"), net.app("b")


def share(read: Wr, other: Wr) -> None:
    """Have a READ land where another WR has its bytes."""
    read.slot = other.slot
    read.shared = other.shared = True


def end(net: Network, *seen: Wr) -> Network:
    """Let all become as it will; where a has given up, it names the WRs that would have been seen."""
    wait(net, 2000)
    why = over(net.app("a"))
    assert why is None or all(f"{wr.opcode} with wr_id {wr.ref}" in why for wr in seen), why
    return net


# ---- time ------------------------------------------------------------------------------------------------------------


def wait(net: Network, ms: float) -> None:
    """Let time pass."""
    net.clock.run(net.clock.now + int(ms * MS))


def until(net: Network, done: Callable[[], bool], ms: float = 5000) -> None:
    """Let time pass until something holds, and no event further."""
    assert done() or net.clock.run(net.clock.now + int(ms * MS), done, each=1)


def pinged(net: Network) -> None:
    """Let time pass until pings were answered on every path just now: then a failure says something about its WR."""
    paths = [path for app in net.apps for path in app.endpoint.connection.paths]
    until(net, lambda: all(path.ping.answers(net.clock.now) for path in paths))


# ---- work ------------------------------------------------------------------------------------------------------------


def plan(
    app: Application,
    opcode: str,
    cell: int = 0,
    signaled: bool = False,
    fence: bool = False,
    data: int | None = None,
) -> Wr:
    """One more WR of a program's plan."""
    index = len(app.posted) + len(app.plan)
    value = 0 if opcode == "READ" else index + 1 if data is None else data
    wr = Wr(app.name, index, opcode, cell, value, signaled, fence, inline=False)
    app.plan.append(wr)
    return wr


def post(app: Application, opcode: str, cell: int = 0, signaled: bool = True, data: int | None = None) -> Wr:
    """Post one WR now."""
    wr = plan(app, opcode, cell, signaled, data=data)
    app.due()
    return wr


def go(app: Application) -> None:
    """Post all that is planned at once, and let it be executed."""
    for _ in range(len(app.plan)):
        app.due()
    wait(app.net, 0.1)


def sends(app: Application) -> list[str]:
    """How its sends ended, as far as it was told."""
    return [WcStatus(status).name for queue, _, status in app.wcs if queue == "send"]


def statuses(app: Application) -> list[tuple[str, str]]:
    """All that it was told."""
    return [
        (str(what) if queue == "send" else "recv", WcStatus(status).name) for queue, what, status in app.wcs
    ]


def succeeded(app: Application) -> bool:
    """Whether it was told of nothing but successes."""
    return all(status == OK for _, _, status in app.wcs)


def another_window(app: Application) -> OwnMr:
    """What the peer reaches is registered once more: from now on it goes by that key. Returns what it was before."""
    before = app.window
    app.window = OwnMr(app.device, app.cell_address(0), CELLS, ALL_RIGHTS, iova=0)
    return before


# ---- losses ----------------------------------------------------------------------------------------------------------


def is_request(packet: Any, opcode: str | None = None) -> bool:
    """Whether it is a WR of an application's, of that operation."""
    return (
        isinstance(packet, Packet)
        and bool(packet.ref)
        and packet.kind == "req"
        and opcode in (None, packet.opcode)
    )


def hole(net: Network, name: str, opcode: str, *rails: int) -> None:
    """These rails lose that operation of one side's, and nothing else."""
    for k in rails:
        net.links[name, k].hole = lambda p: is_request(p, opcode)


def no_hole(net: Network, name: str, *rails: int) -> None:
    """They lose nothing."""
    for k in rails:
        net.links[name, k].hole = lambda p: False


def drop_next(net: Network, name: str, k: int, kind: str, opcode: str | None = None, times: int = 1) -> None:
    """The next answers of that kind (to that operation) that `name` sends there are lost."""
    net.links[name, k].drops += [
        lambda p: isinstance(p, Packet) and p.kind == kind and opcode in (None, p.opcode)
    ] * times


def is_answer(packet: Any) -> bool:
    """Whether it answers a WR of an application's."""
    return isinstance(packet, Packet) and bool(packet.ref) and packet.kind in ("ack", "resp")


def no_answers(net: Network, name: str, *rails: int) -> None:
    """What `name` answers to WRs of the application's on these rails is lost."""
    for k in rails:
        net.links[name, k].hole = lambda p: (
            isinstance(p, Packet) and bool(p.ref) and p.kind in ("ack", "resp")
        )


class _Opened:
    """Seals that take everything: for reading along."""

    def __init__(self, name: int) -> None:
        self.name_in = name

    def is_theirs(self, data: bytes, tag: bytes) -> bool:
        return True

    def take(self, number: int) -> bool:
        return True


def said(packet: Any) -> list[Any]:
    """The messages in a datagram."""
    if not isinstance(packet, Datagram):
        return []
    return [entry.message for entry in decode(packet.data, _Opened(name_of(packet.data)))]  # type: ignore[arg-type]


# ---- what happens to a connection ------------------------------------------------------------------------------------


def tell(app: Application, call: Callable[[], object]) -> None:
    """Have a call run under the driver's lock, and the driver after it, as a verb of the application's has it."""
    with app.host:
        driver = app.host.runtime.driver
        driver.post(call)  # type: ignore[arg-type]
        driver.run()


def feed(app: Application, event: ev.Event) -> None:
    """Give its protocol an event."""
    tell(app, lambda: app.endpoint.connection.feed(event))


def path_failed(app: Application, k: int, reason: str = "staged", advisory: bool = False) -> None:
    """Evidence, or a hint, that pair k is broken."""
    now = app.net.clock.now
    tell(app, lambda: app.endpoint.connection.evidence.path_failed(k, reason, now, advisory))


def on(app: Application, k: int) -> bool:
    """Whether both of its directions are on pair k."""
    p = app.endpoint.protocol
    return bool(p.send_pair == p.recv_pair == k)


def away(net: Network, k: int = 1) -> None:
    """Have all traffic go to pair k, and be at rest there."""
    net.apps[0].endpoint.prefer(k)
    until(net, lambda: all(on(app, k) and not app.endpoint.protocol.busy for app in net.apps[:2]), ms=200)
    wait(net, 1)


def split(net: Network, mover: str) -> None:
    """One side's sends, and the other's receives, leave for pair 1; the other direction stays at home."""
    a, b = ends(net)
    app = a if mover == "a" else b
    feed(app.peer, ev.PathHealth(1, False))
    app.endpoint.prefer(1)
    until(net, lambda: app.endpoint.core.send_pair == 1 and not app.endpoint.protocol.busy, ms=50)
    wait(net, 1)
    assert app.peer.endpoint.core.recv_pair == 1 and app.peer.endpoint.core.send_pair == 0


def fail_over(net: Network) -> None:
    """Traffic goes to pair 1, and stays there."""
    a = net.app("a")
    path_failed(a, 0)
    a.endpoint.prefer(1)
    wait(net, 10)
    assert on(a, 1)


def executed(net: Network, wr: Wr) -> bool:
    """Whether any NIC has carried it out."""
    return any(e[4] is wr for e in net.executions)


def at_home(net: Network) -> bool:
    """Whether all traffic is at home, and nothing is under way."""
    return all(
        (p.send_state.value, p.recv_state.value) == ("DEFAULT", "DEFAULT") and not p.busy
        for p in (app.endpoint.protocol for app in net.apps)
    )


def went(net: Network, kind: type, app: Application | None = None) -> list[Any]:
    """The actions of that kind so far, of one side or of both."""
    return [
        action
        for _, name, action in net.trace
        if isinstance(action, kind) and (app is None or name == app.name)
    ]


def follow_with_a_hole(app: Application, opcode: str, times: int) -> list[int]:
    """The rail that its traffic is on loses this operation, up to `times` SWITCHes later; the others carry it.

    Returns where the hole was, as it goes along.
    """
    net, was = app.net, [0]
    name = app.device.name
    hole(net, name, opcode, 0)

    def follow() -> None:
        started = went(net, ev.SwitchStarted, app)
        while len(was) <= min(times, len(started)):
            k = started[len(was) - 1].target
            no_hole(net, name, *range(net.pairs))
            hole(net, name, opcode, k)
            was.append(k)

    deliver = net.clock.after

    def after() -> None:
        follow()
        deliver()

    net.clock.after = after
    net.one_rail_is_well = True
    return was
