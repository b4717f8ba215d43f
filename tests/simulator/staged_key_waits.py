# SPDX-License-Identifier: BSD-3-Clause
"""Stories of keys that are waited for while the pair that needs them fails: what is forgotten then. As staged.py."""

from __future__ import annotations

from simulator.clock import MS
from simulator.network import Network
from simulator.story import (
    Story,
    another_window,
    armed,
    end,
    ends,
    on,
    path_failed,
    post,
    said,
    sends,
    tell,
    until,
    wait,
)

from shiftverbs.protocol.messages import Keys


def memory_comes_while_the_pair_it_was_for_is_fenced() -> Network:
    """Receives wait for it on pair 1, which fails too; all is looked at meanwhile. They go nowhere before pair 2."""
    net = armed(pairs=3, at_start=4)
    a, b = ends(net)
    net.nics["a"][1].registering_ns = 300 * MS
    a.renew_buffers()
    with a.host:
        a.post_recv()
    path_failed(a, 0)
    wait(net, 200)
    connection, core = a.endpoint.connection, a.endpoint.core
    assert connection.key_wait.posting is not None and connection.key_wait.posting.pair == 1
    for name in "ab":
        net.nics[name][1].command_ns = 200 * MS
    path_failed(a, 1)
    assert connection.fence is not None
    tell(a, connection.catch_up)
    until(net, lambda: connection.fence is None or core.recv_is_open)
    assert connection.fence is None, "receives went to the pair that is being fenced"
    for name in "ab":
        net.nics[name][1].command_ns = MS
    wait(net, 50)
    post(b, "SEND")
    wait(net, 2000)
    assert sends(b) == ["SUCCESS"]
    return end(net)


def a_key_is_waited_for_on_one_pair_after_the_other() -> Network:
    """b has its patience anew on pair 2: that it did not tell what the key is on pair 1 was that pair's fault."""
    net = armed(pairs=3)
    a, b = ends(net)
    for name in "ab":
        net.wall(name, 0, True)
    path_failed(a, 0)
    until(net, lambda: all(on(app, 1) for app in net.apps))
    for k in range(3):
        net.links["b", k].hole = lambda packet: any(isinstance(m, Keys) for m in said(packet))
    another_window(b)
    post(a, "WRITE", 1)
    wait(net, 1500)
    assert a.endpoint.connection.awaits_keys
    path_failed(a, 1)
    until(net, lambda: all(on(app, 2) for app in net.apps), ms=400)
    wait(net, 1000)
    assert a.endpoint.connection.awaits_keys
    for k in range(3):
        net.links["b", k].hole = lambda packet: False
    until(net, lambda: sends(a) == ["SUCCESS"])
    for name in "ab":
        net.wall(name, 0, False)
    return end(net)


SURVIVED: dict[Story, tuple[str, ...]] = {
    memory_comes_while_the_pair_it_was_for_is_fenced: ("post_receives_where_they_were_closed",),
    a_key_is_waited_for_on_one_pair_after_the_other: ("count_a_wait_for_keys_from_the_pair_before",),
}
