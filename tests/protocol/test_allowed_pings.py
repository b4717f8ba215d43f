# SPDX-License-Identifier: BSD-3-Clause
"""What was sent ahead of pings takes its time: they are not missed for so long, whatever is answered meanwhile."""

from __future__ import annotations

import pytest

from shiftverbs.protocol.path_health import PROBE_NS, PingState
from shiftverbs.stragglers.trains import PATIENCE_NS

MS = 1_000_000


@pytest.mark.parametrize("apart_ms, probes", [(25, 0), (2, 0), (2, 10)])
def test_an_answer_to_a_ping_of_before_takes_no_patience_back(apart_ms: int, probes: int) -> None:
    """A ping was on its way when the train went out, and is answered in its time; the next are behind the train.

    probes: so many of them are as dense as where work stands still, all others 25 ms apart.
    """
    ping = PingState(25 * MS, 4)
    assert ping.poll_ping(0) == 1
    ping.handle_pong(1, 3 * MS)
    now = 100 * MS
    if probes:
        ping.interval_ns = PROBE_NS
    assert ping.poll_ping(now) == 2
    ping.earliest_ns = now = now + apart_ms * MS
    assert ping.poll_ping(now) == 3
    assert ping.is_well(now)
    ping.allow(PATIENCE_NS, now)
    sent_ns = now
    ping.handle_pong(2, 100 * MS + max(3, apart_ms + 1) * MS)  # it was ahead of all that
    for n in range(1, 400):
        if n > probes:
            ping.interval_ns = 25 * MS
        now = sent_ns + 2 * n * MS
        if now >= sent_ns + 500 * MS:
            break
        if now >= ping.next_timeout_ns:
            ping.poll_ping(now)
        assert ping.alive is not False, (
            f"dead {(now - sent_ns) / MS} ms behind a train that may take a second"
        )
    ping.handle_pong(3, now)
    assert ping.alive is True
