# SPDX-License-Identifier: BSD-3-Clause
"""What a replay must not show: bytes that nobody wrote, and a READ's result that changes behind a fence."""

from __future__ import annotations

from typing import Any

import pytest
from harness import wait_until
from hosts import Host, Network

LENGTH = 4096  # four packets


def gave_up(*hosts: Host) -> None:
    """Wait until both sides know that the pairing is over."""
    for h in hosts:
        wait_until(lambda h=h: h("ep.shift()['status']") == "FAILED", what="both sides know")


@pytest.mark.parametrize(
    ("operation", "landing"), [("RDMA_WRITE", 1), ("RDMA_WRITE", 5), ("RDMA_WRITE_WITH_IMM", 1), ("SEND", 1)]
)
def test_memory_that_a_read_overwrites_is_not_sent_again(
    network: Network, faults: Any, operation: str, landing: int
) -> None:
    """Slot 1 goes out unsignaled, then a READ lands there, or in slot 5; the last packet of its response is lost.

    The READ's error shows that what is before it is complete: the READ alone is repeated.
    """
    a, b = network.protected()
    b(f"ep.fill(2, 'o' * {LENGTH}); ep.fill(3, 'r' * {LENGTH}); ep.recv(2)")
    faults.drop("a/soft0", direction="rx", opcode="RC_READ_RESP_LAST", then="down")
    a(
        f"ep.fill(1, 'w' * {LENGTH})\n"
        f"ep.post('{operation}', slot=1, remote_slot=2, length={LENGTH}, wr_id=11, signaled=False)\n"
        f"ep.post('RDMA_READ', slot={landing}, remote_slot=3, length={LENGTH}, wr_id=12)"
    )
    assert [wc[:2] for wc in a("ep.poll(1)")] == [[12, "SUCCESS"]]
    assert a("ep.shift()['path']") == "soft1"
    assert a(f"ep.text({landing}, {LENGTH})") == "r" * LENGTH
    assert b(f"ep.text(2, {LENGTH})") == "w" * LENGTH


def test_a_nic_that_died_shows_nothing(network: Network, faults: Any) -> None:
    """A WRITE from where a READ landed, both complete without a completion: nothing says so, and it is not repeated."""
    a, b = network.protected()
    b(f"ep.fill(2, 'o' * {LENGTH}); ep.fill(3, 'r' * {LENGTH})")
    a(
        f"ep.fill(1, 'w' * {LENGTH})\n"
        f"ep.post('RDMA_WRITE', slot=1, remote_slot=2, length={LENGTH}, wr_id=11, signaled=False)\n"
        f"ep.post('RDMA_READ', slot=1, remote_slot=3, length={LENGTH}, wr_id=12, signaled=False)"
    )
    wait_until(lambda: a(f"ep.text(1, {LENGTH})") == "r" * LENGTH, what="the READ has landed")
    faults.kill("a/soft0")
    assert [wc[:2] for wc in a("ep.poll(2)")] == [[11, "RETRY_EXC_ERR"], [12, "WR_FLUSH_ERR"]]
    gave_up(a, b)
    why = a("ep.shift()['why']")
    assert "wr_id 11" in why and "wr_id 12" in why, why
    assert b(f"ep.text(2, {LENGTH})") == "w" * LENGTH


READ_FENCE_WRITE = """
ep.fill(6, 'behind')
ep.post('RDMA_READ', slot=1, remote_slot=3, length=6, wr_id=21, signaled=False)
ep.post('RDMA_READ', slot=5, remote_slot=4, length=5, wr_id=22, signaled=False, flags=e.IBV_SEND_FENCE)
ep.post('{0}', slot=6, remote_slot=3, length=6, wr_id=23, signaled={1})
"""


@pytest.mark.parametrize("behind", ["RDMA_WRITE", "RDMA_WRITE_WITH_IMM"])
def test_a_read_that_a_fence_completed_is_not_repeated(network: Network, faults: Any, behind: str) -> None:
    """READ, a fenced READ of something else, a WRITE of what the first one read: its acknowledgement is lost."""
    a, b = network.protected()
    b("ep.fill(3, 'before'); ep.fill(4, 'other'); ep.recv(9)")
    faults.drop("a/soft0", direction="rx", opcode="ack", then="down")
    a(READ_FENCE_WRITE.format(behind, True))
    wait_until(lambda: b("ep.text(3, 6)") == "behind", what="the WRITE was executed")
    assert [wc[:2] for wc in a("ep.poll(1)")] == [[23, "SUCCESS"]]
    assert a("ep.text(1, 6)") == "before"


def test_a_read_behind_a_fence_is_not_repeated_for_a_nic_that_died(network: Network, faults: Any) -> None:
    """The same, and the NIC takes along what it knew."""
    a, b = network.protected()
    b("ep.fill(3, 'before'); ep.fill(4, 'other')")
    a(READ_FENCE_WRITE.format("RDMA_WRITE", False))
    wait_until(lambda: b("ep.text(3, 6)") == "behind", what="the WRITE was executed")
    faults.kill("a/soft0")
    assert [wc[:2] for wc in a("ep.poll(3)")] == [
        [21, "RETRY_EXC_ERR"],
        [22, "WR_FLUSH_ERR"],
        [23, "WR_FLUSH_ERR"],
    ]
    assert a("ep.text(1, 6)") == "before"
    gave_up(a, b)
    why = a("ep.shift()['why']")
    assert "wr_id 21" in why and "wr_id 23" in why, why


#: What b's NIC 0 tells of receives is not heard of: it dies with that.
KEEPS_RECEIPTS = """
looks = ep.qp._shadow.connection.driver.looks
for each in (ep.qp, ep.beside):
    if each is not None:
        c = each._shadow.connection
        c.drain = lambda k, *args, real=c.drain, **named: None if k == 0 else real(k, *args, **named)
real_look_at = looks.look_at
looks.look_at = lambda user, queues: real_look_at(user, [queue for queue in queues if queue[1]])
"""
# Who keeps them sees no flushes, either: its fence works only on a NIC that is dead. So a peer that a busy machine
# holds up must not seem lost before: 0.5 s.
PATIENT = "timeout=14, retry=7"


def test_what_is_sent_again_does_not_cover_what_came_later(network: Network, faults: Any) -> None:
    """A message with data, a WRITE to the same place, both complete: the receipt is lost, the message comes again."""
    a, b = network.protected(attrs=PATIENT)
    b(KEEPS_RECEIPTS)
    b("ep.recv(0); ep.fill(3, 'seen')")
    a(
        "ep.fill(1, 'older'); ep.fill(2, 'newer')\n"
        "ep.post('RDMA_WRITE_WITH_IMM', slot=1, remote_slot=7, length=5, wr_id=11, signaled=False)\n"
        "ep.post('RDMA_WRITE', slot=2, remote_slot=7, length=5, wr_id=12, signaled=False)\n"
        "ep.post('RDMA_READ', slot=5, remote_slot=3, length=4, wr_id=13, signaled=False)"
    )
    wait_until(lambda: a("ep.text(5, 4)") == "seen", what="all three are complete")
    faults.kill("b/soft0")
    a("ep.post('SEND', slot=2, wr_id=14, length=5)")
    b("ep.recv(1)")
    assert [wc[:2] for wc in b("ep.poll(2)")] == [[0, "SUCCESS"], [1, "SUCCESS"]]
    assert [wc[:2] for wc in a("ep.poll(1)")] == [[14, "SUCCESS"]], (a("ep.shift()"), b("ep.shift()"))
    assert b("ep.text(7, 5)") == "newer"


def test_what_must_be_sent_again_and_cannot_is_an_error(network: Network, faults: Any) -> None:
    """A message was complete, and its receipt is lost; no pair carries it now: its sender hears of that one first."""
    a, b = network.protected(attrs=PATIENT)
    b(KEEPS_RECEIPTS)
    b("ep.recv(0); ep.fill(3, 'seen')")
    a(
        "ep.post('SEND', slot=1, length=5, wr_id=11, signaled=False)\n"
        "ep.post('RDMA_READ', slot=5, remote_slot=3, length=4, wr_id=12, signaled=False)"
    )
    wait_until(lambda: a("ep.text(5, 4)") == "seen", what="both are complete")
    faults.drop("b/soft1", direction="rx", opcode="RC_SEND_ONLY", count=0)
    faults.kill("b/soft0")
    a("ep.post('SEND', slot=2, wr_id=13, length=5)")
    wcs = [wc[:2] for wc in a("ep.poll(3, 20)")]
    assert wcs == [[11, "RETRY_EXC_ERR"], [12, "WR_FLUSH_ERR"], [13, "WR_FLUSH_ERR"]]
    gave_up(a, b)
