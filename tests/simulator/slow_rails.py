# SPDX-License-Identifier: BSD-3-Clause
"""A program that sends all the time, over rails that become slow and well again: what is said and done of that.

As in staged.py each story returns its network at the end, for the checkers.
"""

from __future__ import annotations

from simulator.application import CELLS, Application
from simulator.clock import MS, US
from simulator.network import Network
from simulator.story import armed, ends, plan, wait

from shiftverbs.failover.services.stragglers import Slow

EACH_NS = 10 * MS
LEARNING_MS, SLOW_MS = 6_000, 10_000


class Stream:
    """A WRITE each 10 ms, unless the one before is under way still; meanwhile it polls, ever less often.

    attentive: whether it does. Else it polls when something is there, as late as its application has it.
    """

    def __init__(self, app: Application) -> None:
        self.app = app
        self.posted = 0
        self.each_ns = EACH_NS
        self.going = self.attentive = True
        self._posted_ns = 0
        app.clock.later(0, self._post)

    def stop(self) -> None:
        """It posts no more."""
        self.going = False

    def _post(self) -> None:
        app = self.app
        if not self.going or app.at_its_end:
            return
        app.clock.later(self.each_ns, self._post)
        if self._under_way():
            return
        self.posted += 1
        self._posted_ns = app.clock.now
        wr = plan(app, "WRITE", self.posted % CELLS, signaled=True)
        wr.slot = self.posted % 64  # long complete
        app.due()
        self._poll()

    def _under_way(self) -> bool:
        return len(self.app.wcs) - len(self.app.received) < self.posted

    def _poll(self) -> None:
        clock = self.app.clock
        if self.attentive and self._under_way():
            self.app.poll()
            clock.later(max(2 * US, (clock.now - self._posted_ns) // 10), self._poll)


def streaming(mode: str, seed: int = 1) -> tuple[Network, Stream]:
    """Both sides protected, a sends for long enough for its paths to be known."""
    net = armed(seed, straggler=mode)
    stream = Stream(net.app("a"))
    wait(net, LEARNING_MS)
    return net, stream


def end(net: Network, stream: Stream) -> Network:
    """All that was posted is complete."""
    stream.stop()
    wait(net, 1000)
    return net


def verdicts(net: Network, name: str = "a") -> dict[tuple[str, str], int]:
    """How often a host said of which NIC that its path is slow, and whose fault that is."""
    return dict(net.host(name).runtime.driver.totals.slow_paths)


def shown(net: Network) -> tuple[Slow, ...]:
    """Which paths a says are slow, now."""
    measures = net.a.runtime.driver.measures
    assert measures is not None
    return measures.slow


def where(net: Network, name: str = "a") -> list[int]:
    """The pairs that an application's sends went to, one after the other."""
    return [pair for _, which, pair in net.whereabouts if which == name]


def a_slow_rail_is_told_of(delay_ns: int = 1 * MS, packet_ns: int = 0) -> Network:
    net, stream = streaming("observe")
    assert not verdicts(net)
    net.slow(0, delay_ns, packet_ns)
    wait(net, SLOW_MS)
    assert [each.device for each in shown(net)] == ["a0"]
    net.slow(0)
    wait(net, 2 * SLOW_MS)
    return end(net, stream)


def a_slow_rail_is_left_and_come_back_to() -> Network:
    net, stream = streaming("migrate")
    net.slow(0, 1 * MS)
    wait(net, SLOW_MS)
    assert where(net) == [1], net.whereabouts
    net.slow(0)
    wait(net, 3 * SLOW_MS)
    return end(net, stream)


def both_sides_send() -> Network:
    """Both find out, at about the same time."""
    net, stream = streaming("migrate")
    other = Stream(net.app("b"))
    wait(net, LEARNING_MS)
    net.slow(0, 1 * MS)
    wait(net, SLOW_MS)
    assert where(net)[-1] == where(net, "b")[-1] == 1, net.whereabouts
    net.slow(0)
    wait(net, 4 * SLOW_MS)
    other.stop()
    return end(net, stream)


def both_rails_are_slow() -> Network:
    net, stream = streaming("migrate")
    for k in range(2):
        net.slow(k, 1 * MS)
    wait(net, 3 * SLOW_MS)
    return end(net, stream)


def the_program_is_slow() -> Network:
    """It polls late, and posts seldom."""
    net, stream = streaming("migrate")
    for app in ends(net):
        app.poll_ns = 40 * MS
    stream.attentive = False
    stream.each_ns = 60 * MS
    wait(net, 3 * SLOW_MS)
    return end(net, stream)


def the_peer_stands_still_now_and_then() -> Network:
    """Its process, that is: its NIC goes on."""
    net, stream = streaming("migrate")
    for _ in range(20):
        net.b.frozen_until_ns = net.clock.now + 150 * MS
        wait(net, 1500)
    return end(net, stream)


def a_rail_is_slow_by_turns(turns: int = 5) -> Network:
    net, stream = streaming("migrate")
    for _ in range(turns):
        net.slow(0, 1 * MS)
        wait(net, 7000)
        net.slow(0)
        wait(net, 7000)
    return end(net, stream)


def the_application_has_asked_for_the_slow_rail() -> Network:
    """Whoever migrates by hand knows why: nothing is moved off again."""
    net, stream = streaming("migrate")
    net.app("a").endpoint.prefer(1)
    wait(net, LEARNING_MS)
    assert where(net) == [1], net.whereabouts
    net.slow(1, 1 * MS)
    wait(net, SLOW_MS)
    return end(net, stream)


def the_other_rail_fails_meanwhile() -> Network:
    """Away because home is slow, it loses the rail that it is on, and has the slow one back."""
    net, stream = streaming("migrate")
    net.slow(0, 1 * MS)
    wait(net, SLOW_MS)
    assert where(net) == [1], net.whereabouts
    net.faults.append("port")
    net.port("a", 1, False, 1 * MS)
    wait(net, 5000)
    assert where(net)[-1] == 0, net.whereabouts
    net.port("a", 1, True, 1 * MS)
    wait(net, SLOW_MS)
    net.slow(0)
    wait(net, 4 * SLOW_MS)
    return end(net, stream)
