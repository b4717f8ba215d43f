# SPDX-License-Identifier: BSD-3-Clause
"""Registered memory that an application took away: an error of its own, on whichever NIC, and nothing to switch for."""

from __future__ import annotations

from typing import Any

import pytest
from harness import wait_until
from hosts import WHERE, Host, Network, go

#: A region of two pages where nothing else comes when it is gone.
REGION = """
import ctypes
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
assert libc.mmap(0x2000_0000_0000, 2 * SLOT, 3, 0x22, -1, 0) == 0x2000_0000_0000
gone = mr.MR(ep.pd, 2 * SLOT, ACCESS, 0x2000_0000_0000)
gone.rkey
"""
UNMAP = "libc.munmap(gone.buf, 2 * SLOT)"


def aim(a: Host, rkey: int) -> None:
    """What a posts goes to the region."""
    a(f"ep.peer |= {{'addr': 0x2000_0000_0000, 'rkey': {rkey}}}")


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("op", ["RDMA_WRITE", "RDMA_READ", "ATOMIC_FETCH_AND_ADD"])
def test_peer_writes_where_nothing_is(network: Network, faults: Any, where: str, op: str) -> None:
    a, b = network.protected()
    aim(a, b(REGION))
    a("ep.post('RDMA_WRITE', wr_id=1)")
    assert a("ep.poll(1)")[0][:2] == [1, "SUCCESS"]
    go(faults, where, a, b)
    b(UNMAP)
    switches = a("ep.shift()['counters']['switches']")
    a(f"ep.post({op!r}, wr_id=2, length=8)")
    a("ep.post('SEND', wr_id=3)")
    assert [wc[:2] for wc in a("ep.poll(2)")] == [[2, "REM_ACCESS_ERR"], [3, "WR_FLUSH_ERR"]]
    assert a("ep.none()") == [] and a("ep.shift()['counters']['switches']") == switches
    assert b("ep.text(0, 1)") == "\0", "it lives"


@pytest.mark.parametrize("where", WHERE)
def test_own_memory_is_gone(network: Network, faults: Any, where: str) -> None:
    """What is to be sent, and what a message was to be received into."""
    a, b = network.protected()
    for host in (a, b):
        host(REGION)
    go(faults, where, a, b)
    for host in (a, b):
        host(UNMAP)
    b("ep.qp.post_recv(wr.RecvWR(7, 1, [wr.SGE(gone.buf, 64, gone.lkey)]))")
    a("ep.post('SEND', wr_id=1)")
    assert a("ep.poll(1)")[0][:2] == [1, "REM_OP_ERR"]
    assert b("ep.poll(1)")[0][:2] == [7, "LOC_PROT_ERR"]
    a, b = network.protected()
    a(REGION), a(UNMAP)
    a(
        "ep.qp.post_send(wr.SendWR(5, num_sge=1, sg=[wr.SGE(gone.buf, 64, gone.lkey)], send_flags=e.IBV_SEND_SIGNALED))"
    )
    assert a("ep.poll(1)")[0][:2] == [5, "LOC_PROT_ERR"]


def test_gone_between_two_attempts(network: Network, faults: Any) -> None:
    """The default NIC could not deliver it; the backup finds the memory gone, and the application learns that."""
    a, b = network.protected()
    aim(a, b(REGION))
    wait_until(lambda: b("gone._shadow.state(1)") == "ready", what="the backup has registered it")
    faults.switch_down("rail0")
    a("ep.post('RDMA_WRITE', wr_id=1)")
    b(UNMAP)
    assert a("ep.poll(1)")[0][:2] == [1, "REM_ACCESS_ERR"]
    assert a("ep.shift()['counters']['switches']") == 1 and b("ep.text(0, 1)") == "\0"
