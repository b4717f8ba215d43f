# SPDX-License-Identifier: BSD-3-Clause
"""Coming home with an application that has fallen silent."""

from typing import Any

import pytest
from hosts import AWAY, HOME, Network


@pytest.mark.parametrize("polling", [False, True])
def test_an_application_that_falls_silent_behind_unsignaled_sends_comes_home(
    network: Network, faults: Any, polling: bool
) -> None:
    """Nothing signaled is outstanding and nothing more is posted: the fence is our own WRITE, and it is enough."""
    a, b = network.protected()
    b("[ep.recv(i) for i in range(8)]")
    faults.down("a/soft0")
    for host in (a, b):
        host(f"ep.wait({AWAY!r})")
    a("[ep.post('SEND', length=8, wr_id=i, signaled=False) for i in range(3)]")
    assert [wc[0] for wc in b("ep.poll(3)")] == [0, 1, 2]
    faults.up("a/soft0")
    for host in (a, b):
        assert host(f"ep.wait({HOME!r}, poll={polling})") in (True, [])
    a("ep.post('SEND', length=8, wr_id=9)")
    assert a("ep.poll(1)")[0][:2] == [9, "SUCCESS"]
    assert b("ep.poll(1)")[0][:2] == [3, "SUCCESS"]
    assert a("ep.shift()['counters']['switches']") == 1
