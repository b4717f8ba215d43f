# SPDX-License-Identifier: BSD-3-Clause
"""Rails that are slow and lose nothing: none of them counts as dead, however long a train takes there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from simulator.clock import MS
from simulator.slow_rails import LEARNING_MS, Stream
from simulator.staged_silence import never_switched, patient
from simulator.story import ends, post, sends, until, wait
from simulator.world import World

from shiftverbs.failover.services.control_channel import ControlChannel, Path


@pytest.fixture(autouse=True)
def _ended() -> Iterator[None]:
    """Whatever network a test has made is ended behind it."""
    yield
    if World.current is not None:
        World.current.end()


@pytest.fixture
def dead(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, str]]:
    """Which NICs' paths were taken for dead, and when, in ms."""
    told: list[tuple[float, str]] = []
    tell = ControlChannel._tell

    def note(self: ControlChannel, path: Path) -> None:
        before = path.told
        tell(self, path)
        if path.told is False and before is not False:
            net = World.current
            assert net is not None
            told.append((net.clock.now / MS, path.nic.name))

    monkeypatch.setattr(ControlChannel, "_tell", note)
    return told


@pytest.mark.parametrize("packet_ms", [2, 4, 7])
@pytest.mark.parametrize("delay_ms", [0, 1, 3])
def test_a_train_on_the_backup_while_a_message_waits(
    dead: list[tuple[float, str]], packet_ms: int, delay_ms: int
) -> None:
    """The message is in doubt now and then, and old: pings are dense, and one is on its way when the train goes.

    packet_ms: what a packet takes on the backup; so a train takes 128 to 448 ms, and may take a second.
    """
    net = patient(receives=4, at_start=0, straggler="migrate")
    a, b = ends(net)
    for k in range(2):
        net.slow(k, delay_ms * MS)
    stream = Stream(a)
    wait(net, LEARNING_MS)
    assert not dead
    net.slow(1, delay_ms * MS, packet_ms * MS)
    stream.stop()
    wait(net, 50)
    post(a, "SEND")
    wait(net, 8000)
    with b.host:
        b.post_recv()
    until(net, lambda: sends(a)[-1] == "SUCCESS" and a.endpoint.core.outstanding[0] == 0)
    assert dead == [] and never_switched(net)
