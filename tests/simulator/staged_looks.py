# SPDX-License-Identifier: BSD-3-Clause
"""Stories of completions that nobody polls for and that were long in coming: what follows is not late. As staged.py."""

from __future__ import annotations

from simulator.clock import MS
from simulator.network import Network
from simulator.story import Story, armed, end, ends, path_failed, post, until, wait, went

from shiftverbs.protocol import events as ev

#: Some looks, as long as they are dense, and what lies between them.
SOON_MS = 1.5


def _idle(net: Network) -> Network:
    """The programs poll as good as never."""
    for app in net.apps:
        app.poll_ns = 400 * MS
    return net


def _opens_soon(net: Network, ms: float) -> None:
    """The first QP's sends go on at both sides, somewhere else, within that time."""
    apps = ends(net)
    before = [len(went(net, ev.OpenSend, app)) for app in apps]
    until(net, lambda: all(len(went(net, ev.OpenSend, a)) > n for a, n in zip(apps, before, strict=True)), ms)


def _another_waits() -> Network:
    """Two QPs share their CQs. The second's failover has been waiting for memory on a's backup for 200 ms."""
    net = _idle(armed(qps=2, one_cq=True, at_start=4))
    other = net.apps[2]
    net.nics["a"][1].registering_ns = 900 * MS
    other.renew_buffers()
    with other.host:
        other.post_recv()
    path_failed(other, 0)
    wait(net, 200)
    assert other.endpoint.protocol.switching
    return net


def a_qp_fails_while_another_waits() -> Network:
    """The first one's failover is no slower for that."""
    net = _another_waits()
    path_failed(net.app("a"), 0)
    _opens_soon(net, SOON_MS)
    return end(net)


def a_qp_moves_while_another_waits() -> Network:
    """Nor is its MOVE: what it waits for is on its way for 2 ms."""
    net = _another_waits()
    a, b = ends(net)
    for name in "ab":
        net.links[name, 0].delay_ns = MS
    for app in (a, b):
        post(app, "SEND")
    a.endpoint.prefer(1)
    _opens_soon(net, 2 + SOON_MS)
    return end(net)


def a_nic_takes_its_time_for_the_fence() -> Network:
    """What it flushes when it is through is seen at once, however long that took."""
    net = _idle(armed())
    slow = 62
    for name in "ab":
        net.nics[name][0].command_ns = slow * MS
    path_failed(net.app("a"), 0)
    _opens_soon(net, slow + SOON_MS)
    for name in "ab":
        net.nics[name][0].command_ns = MS
    return end(net)


SURVIVED: dict[Story, tuple[str, ...]] = {
    a_qp_fails_while_another_waits: ("let_looks_stay_sparse",),
    a_qp_moves_while_another_waits: ("look_seldom_for_what_goes_on",),
    a_nic_takes_its_time_for_the_fence: ("look_seldom_for_a_flush",),
}
