# SPDX-License-Identifier: BSD-3-Clause
"""RC errors to the specification: which status on which side, in which order, after what time."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

import pytest

from shiftverbs.softrnic import faults
from softrnic.hosts import Proxy, VerbsError, connect, statuses

Pair = Callable[..., tuple[Proxy, Proxy]]
FLUSHED = "WR_FLUSH_ERR"
# min_rnr_timer codes and their milliseconds (IBA table 45).
RNR_20_MS = (22, 20.48)


def reconnect(left: Proxy, right: Proxy, **kw: Any) -> None:
    """Both sides to RESET and up again."""
    left.modify("RESET")
    right.modify("RESET")
    connect(left, right, **kw)


def check_usable(left: Proxy, right: Proxy) -> None:
    """After RESET the pair works like a new one."""
    reconnect(left, right)
    left.poll(100, 0.02), right.poll(100, 0.02)
    for seed in range(3):
        left.pattern(seed, 5000)
        right.recv(seed, 5000)
        left.send("SEND", seed, 5000)
        assert statuses(left.poll()) == [(seed, "SUCCESS")]
        assert statuses(right.poll()) == [(seed, "SUCCESS")]
        assert right.matches(seed, 5000)


def test_receive_too_small(pair: Pair) -> None:
    left, right = pair(mtu=256)
    right.recv(1, 999)
    right.recv(2, 2000)
    left.send("SEND", 10, 1000)
    left.send("SEND", 11, 10)
    assert statuses(left.poll(2)) == [(10, "REM_INV_REQ_ERR"), (11, FLUSHED)]
    assert statuses(right.poll(2)) == [(1, "LOC_LEN_ERR"), (2, FLUSHED)]
    assert left.state() == "ERR" and right.state() == "ERR"
    check_usable(left, right)


@pytest.mark.parametrize("op", ["SEND", "RDMA_WRITE", "RDMA_READ", "ATOMIC_FETCH_AND_ADD"])
def test_bad_local_key(pair: Pair, op: str) -> None:
    left, right = pair()
    right.recv(1, 100)
    left.send("RDMA_WRITE", 9, 8)
    left.send(op, 10, 8, lkey=0x12345600)
    left.send("SEND", 11, 8)
    left.send("SEND", 12, 8, flags="")
    done = left.poll(4)
    assert statuses(done) == [(9, "SUCCESS"), (10, "LOC_PROT_ERR"), (11, FLUSHED), (12, FLUSHED)]
    assert left.state() == "ERR" and right.state() == "RTS"
    check_usable(left, right)


def test_local_address_out_of_range(pair: Pair) -> None:
    left, right = pair({"size": 4096})
    right.recv(1, 4096)
    left.send("SEND", 10, sges=[[0, 10], [4000, 97]])
    assert statuses(left.poll()) == [(10, "LOC_PROT_ERR")]
    check_usable_small(left, right)


def check_usable_small(left: Proxy, right: Proxy) -> None:
    reconnect(left, right)
    right.recv(5, 100)
    left.send("SEND", 6, 100)
    assert statuses(left.poll()) == [(6, "SUCCESS")]


def test_receive_with_bad_local_key(pair: Pair) -> None:
    left, right = pair()
    right.recv(1, 100, lkey=0x777)
    right.recv(2, 100)
    left.send("SEND", 10, 50)
    assert statuses(left.poll()) == [(10, "REM_OP_ERR")]
    assert statuses(right.poll(2)) == [(1, "LOC_PROT_ERR"), (2, FLUSHED)]
    check_usable(left, right)


WRONG = ["rkey", "beyond the end", "access of the region", "access of the queue pair", "deregistered"]


@pytest.mark.parametrize("op", ["RDMA_WRITE", "RDMA_READ", "ATOMIC_CMP_AND_SWP", "RDMA_WRITE_WITH_IMM"])
@pytest.mark.parametrize("wrong", WRONG)
def test_remote_access(two: Pair, op: str, wrong: str) -> None:
    left, right = two(access="local_write") if wrong == "access of the queue pair" else two()
    remote: dict[str, Any] = {}
    device = Proxy(right._host, "device1")
    if wrong == "rkey":
        remote["rkey"] = right.numbers()["rkey"] ^ 0x100
    elif wrong == "beyond the end":
        remote["remote_offset"] = (1 << 16) - 8
    elif wrong == "access of the region":
        region = device.reg(4096, "local_write")
        remote = {"rkey": region["rkey"], "remote_addr": region["addr"]}
    elif wrong == "deregistered":
        region = device.reg(4096, "local_write remote_write remote_read remote_atomic")
        device.dereg(region["index"])
        remote = {"rkey": region["rkey"], "remote_addr": region["addr"]}
    if op == "RDMA_WRITE_WITH_IMM":
        right.recv(1, 8)
    size = 8 if op.startswith("ATOMIC") else 16
    if op.startswith("ATOMIC") and wrong == "beyond the end":
        remote["remote_offset"] = 1 << 16
    right.pattern(1, 1 << 16)
    left.send(op, 10, size, **remote)
    left.send("RDMA_WRITE", 11, 8)
    # What the queue pair as such does not take is an invalid request (IBA 9.7.4.1.5), not a wrong key.
    status = "REM_INV_REQ_ERR" if wrong == "access of the queue pair" else "REM_ACCESS_ERR"
    assert statuses(left.poll(2)) == [(10, status), (11, FLUSHED)]
    assert right.matches(1, 1 << 16), "nothing was written"
    assert left.state() == "ERR"
    right.modify("ERR")
    check_usable(left, right)


def test_zero_length_needs_no_key(pair: Pair) -> None:
    """IBA 9.7.4.1.3: a WRITE or READ of zero bytes is not checked against the key."""
    left, right = pair()
    left.send("RDMA_WRITE", 1, 0, rkey=0, remote_addr=0)
    left.send("RDMA_READ", 2, 0, rkey=0, remote_addr=0)
    assert statuses(left.poll(2)) == [(1, "SUCCESS"), (2, "SUCCESS")]
    assert right.state() == "RTS"


def test_atomic_at_odd_address(pair: Pair) -> None:
    left, right = pair()
    left.send("ATOMIC_FETCH_AND_ADD", 1, 8, remote_offset=4, compare_add=1)
    assert statuses(left.poll()) == [(1, "REM_INV_REQ_ERR")]
    check_usable(left, right)


def test_read_where_none_are_allowed(two: Pair) -> None:
    left, right = two(dest_rd_atomic=0)
    left.send("RDMA_READ", 1, 8)
    assert statuses(left.poll()) == [(1, "REM_INV_REQ_ERR")]
    check_usable(left, right)


# -- receiver not ready --
def test_rnr_retries_end_in_time(pair: Pair) -> None:
    code, wait_ms = RNR_20_MS
    left, right = pair(rnr_retry=3, min_rnr_timer=code)
    start = left.send("SEND", 1, 10)
    left.send("SEND", 2, 10)
    done = left.poll(2)
    assert statuses(done) == [(1, "RNR_RETRY_EXC_ERR"), (2, FLUSHED)]
    took_ms = (done[0]["at"] - start) * 1000
    assert 3 * wait_ms * 0.95 <= took_ms < 3 * wait_ms + 300
    assert right.state() == "RTS"
    check_usable(left, right)


def test_rnr_zero_retries(pair: Pair) -> None:
    left, _ = pair(rnr_retry=0, min_rnr_timer=26)
    start = left.send("SEND", 1, 10)
    [done] = left.poll()
    assert done["status"] == "RNR_RETRY_EXC_ERR" and done["at"] - start < 0.5


def test_rnr_then_receive(pair: Pair) -> None:
    """rnr_retry 7 waits for ever; a receive posted later gets the message, in order."""
    left, right = pair(rnr_retry=7, min_rnr_timer=12, mtu=256)
    left.pattern(1, 4000)
    for wr_id in range(4):
        left.send("SEND", wr_id, 1000, wr_id * 1000)
    assert left.poll(1, 0.1) == [] and left.state() == "RTS"
    for wr_id in range(4):
        right.recv(wr_id, 1000, wr_id * 1000)
    assert statuses(left.poll(4)) == [(i, "SUCCESS") for i in range(4)]
    assert statuses(right.poll(4)) == [(i, "SUCCESS") for i in range(4)]
    assert right.matches(1, 4000)


def test_rnr_for_write_with_imm(pair: Pair) -> None:
    left, right = pair(rnr_retry=7, min_rnr_timer=12, mtu=256)
    left.pattern(1, 1000)
    left.send("RDMA_WRITE_WITH_IMM", 1, 1000, imm=5)
    assert left.poll(1, 0.05) == []
    right.recv(7)
    assert statuses(left.poll()) == [(1, "SUCCESS")]
    [received] = right.poll()
    assert received["imm"] == 5 and received["byte_len"] == 1000 and right.matches(1, 1000)


# -- transport retries --
@pytest.mark.parametrize(("timeout", "retry_cnt"), [(14, 2), (12, 7), (10, 0)])
def test_retries_end_in_time(two: Pair, timeout: int, retry_cnt: int) -> None:
    """IBA 9.9.2.1.1: each attempt waits at least 4.096 us * 2^timeout and at most four times that."""
    left, right = two(timeout=timeout, retry_cnt=retry_cnt)
    faults.switch_down("rail0")
    start = left.send("RDMA_WRITE", 1, 10)
    left.send("SEND", 2, 10, flags="")
    right.recv(1, 10)
    done = left.poll(2, 20)
    assert statuses(done) == [(1, "RETRY_EXC_ERR"), (2, FLUSHED)]
    one = 4.096e-6 * 2**timeout
    took = done[0]["at"] - start
    assert (retry_cnt + 1) * one * 0.95 <= took <= 4 * (retry_cnt + 1) * one + 0.5
    assert left.state() == "ERR" and right.state() == "RTS"
    faults.clear()
    check_usable(left, right)


def test_timeout_zero_waits_for_ever(two: Pair) -> None:
    left, right = two(timeout=0, retry_cnt=1)
    faults.switch_down("rail0")
    left.send("RDMA_WRITE", 1, 10)
    assert left.poll(1, 0.3) == [] and left.state() == "RTS"
    # Only a later packet can uncover the loss now: the responder sees the gap.
    faults.clear()
    left.send("RDMA_WRITE", 2, 10)
    assert statuses(left.poll(2)) == [(1, "SUCCESS"), (2, "SUCCESS")]
    assert right.state() == "RTS"


def test_peer_process_dies(two: Pair) -> None:
    left, right = two(timeout=10, retry_cnt=3)
    right._host.kill()
    left.send("SEND", 1, 10)
    assert statuses(left.poll(1, 10)) == [(1, "RETRY_EXC_ERR")]


def test_no_such_queue_pair(two: Pair) -> None:
    left, right = two(timeout=10, retry_cnt=2)
    right.close()
    left.send("SEND", 1, 10)
    assert statuses(left.poll(1, 10)) == [(1, "RETRY_EXC_ERR")]


def test_peer_in_error_does_not_answer(two: Pair) -> None:
    left, right = two(timeout=10, retry_cnt=2)
    right.recv(5, 10)
    right.modify("ERR")
    assert statuses(right.poll()) == [(5, FLUSHED)]
    left.send("SEND", 1, 10)
    assert statuses(left.poll(1, 10)) == [(1, "RETRY_EXC_ERR")]
    check_usable(left, right)


# -- states --
def test_flush_order(pair: Pair) -> None:
    """Everything outstanding is flushed in posting order, unsignaled work too; later posts as well."""
    left, right = pair(rnr_retry=7, min_rnr_timer=12)
    for wr_id in range(10):
        left.send("SEND", wr_id, 10, flags="signaled" if wr_id % 2 else "")
        left.recv(100 + wr_id, 10)
    left.modify("ERR")
    left.send("SEND", 10, 10, flags="")
    left.recv(110, 10)
    done = left.poll(22)
    assert [wc["wr_id"] for wc in done if wc["wr_id"] < 100] == list(range(11))
    assert [wc["wr_id"] for wc in done if wc["wr_id"] >= 100] == list(range(100, 111))
    assert {wc["status"] for wc in done} == {FLUSHED}
    assert left.poll(1, 0.02) == []
    check_usable(left, right)


def test_error_state_with_nothing_outstanding_is_silent(pair: Pair) -> None:
    left, _ = pair()
    left.modify("ERR")
    assert left.poll(1, 0.05) == []
    left.send("SEND", 3, 10)
    assert statuses(left.poll()) == [(3, FLUSHED)]


def test_reset_forgets_work_and_completions_of_others_stay(pair: Pair) -> None:
    left, right = pair(rnr_retry=7, min_rnr_timer=12)
    left.send("SEND", 1, 10)
    left.recv(2, 10)
    left.modify("RESET")
    assert left.poll(1, 0.05) == [] and left.state() == "RESET"
    check_usable(left, right)


def test_posting_in_early_states(hosts: Callable[..., Any]) -> None:
    device = hosts("a").open("soft0")
    one, two = device.endpoint(), device.endpoint()
    with pytest.raises(VerbsError) as refused:
        one.send("SEND", 1, 4)
    assert refused.value.errno == errno.EINVAL
    with pytest.raises(VerbsError) as refused:
        one.recv(1, 4)
    assert refused.value.errno == errno.EINVAL
    one.init()
    one.recv(1, 4)
    with pytest.raises(VerbsError) as refused:
        one.send("SEND", 1, 4)
    assert refused.value.errno == errno.EINVAL
    one.modify("RESET")
    two_info, one_info = two.info(), one.info()
    one.connect(two_info, rts=False)
    assert one.state() == "RTR"
    one.recv(7, 4)
    with pytest.raises(VerbsError) as refused:
        one.send("SEND", 1, 4)
    assert refused.value.errno == errno.EINVAL
    two.connect(one_info)
    two.send("SEND", 3, 4)
    # In RTR the responder works; both share nothing but the network.
    assert statuses(two.poll()) == [(3, "SUCCESS")] and statuses(one.poll()) == [(7, "SUCCESS")]


@pytest.mark.parametrize(
    ("mask", "fields"),
    [
        ("STATE", {"qp_state": 3}),  # RESET -> RTS
        ("STATE PKEY_INDEX PORT ACCESS_FLAGS", {"qp_state": 1, "port_num": 9}),
        ("STATE PORT", {"qp_state": 1, "port_num": 1}),  # attributes missing
    ],
)
def test_wrong_transitions_are_refused(hosts: Callable[..., Any], mask: str, fields: dict[str, int]) -> None:
    one = hosts("a").open("soft0").endpoint()
    with pytest.raises(VerbsError) as refused:
        one.modify_raw(mask, **fields)
    assert refused.value.errno == errno.EINVAL
    assert one.state() == "RESET"


def test_reuse_many_times(two: Pair) -> None:
    """ERR, RESET, up again, with work left over each time: nothing of the last life shows up."""
    waiting = {"mtu": 256, "rnr_retry": 7, "min_rnr_timer": 12}
    left, right = two(**waiting)
    for life in range(15):
        left.pattern(life, 3000)
        right.recv(life, 3000)
        left.send("SEND", life, 3000)
        left.send("SEND", 500, 3000)  # no receive: cut off below
        assert statuses(left.poll(1)) == [(life, "SUCCESS")]
        assert statuses(right.poll(1)) == [(life, "SUCCESS")] and right.matches(life, 3000)
        left.modify("ERR")
        assert statuses(left.poll(1)) == [(500, FLUSHED)]
        reconnect(left, right, **waiting)
    assert right.poll(1, 0.02) == []


def test_old_connection_does_not_reach_the_new_one(hosts: Callable[..., Any]) -> None:
    """Packets of a peer that was not reset do not fit the new PSN window and change nothing."""
    a, b = hosts("a"), hosts("b")
    left, right = a.open("soft0").endpoint(), b.open("soft0").endpoint()
    connect(left, right, timeout=10, retry_cnt=2)
    right.modify("RESET")
    info = left.info()
    right.connect({**info, "psn": (info["psn"] + (1 << 22)) % (1 << 24)})
    right.recv(1, 100)
    left.send("SEND", 1, 100)
    assert [wc["status"] for wc in left.poll(1, 10)] == ["RETRY_EXC_ERR"]
    assert right.poll(1, 0.02) == [] and right.state() == "RTS"
