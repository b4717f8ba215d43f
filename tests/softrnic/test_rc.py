# SPDX-License-Identifier: BSD-3-Clause
"""RC: each operation, in one process and between two."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from softrnic.hosts import Proxy, VerbsError, connect, statuses

Pair = Callable[..., tuple[Proxy, Proxy]]
# Around the edges of packets and of padding, for an MTU of 256.
SIZES = [0, 1, 3, 4, 5, 255, 256, 257, 511, 512, 513, 1023, 1025, 4099, 50_001]


def test_send(pair: Pair) -> None:
    left, right = pair(mtu=256)
    for seed, size in enumerate(SIZES):
        left.pattern(seed, size)
        right.recv(seed, size)
        left.send("SEND", 100 + seed, size)
        [sent], [received] = left.poll(), right.poll()
        assert (sent["wr_id"], sent["status"], sent["opcode"]) == (100 + seed, "SUCCESS", "SEND")
        assert (received["wr_id"], received["status"], received["opcode"]) == (seed, "SUCCESS", "RECV")
        assert received["byte_len"] == size and received["imm"] is None
        assert right.matches(seed, size)


def test_send_with_imm(pair: Pair) -> None:
    left, right = pair(mtu=256)
    for seed, size in enumerate((0, 4, 300)):
        left.pattern(seed, size)
        right.recv(seed, 1000)
        left.send("SEND_WITH_IMM", 7, size, imm=0x01020304 + seed)
        assert statuses(left.poll()) == [(7, "SUCCESS")]
        [received] = right.poll()
        assert received["imm"] == 0x01020304 + seed and received["byte_len"] == size
        assert received["opcode"] == "RECV" and right.matches(seed, size)


def test_write(pair: Pair) -> None:
    left, right = pair(mtu=256)
    for seed, size in enumerate(SIZES):
        left.pattern(seed, size)
        left.send("RDMA_WRITE", seed, size, remote_offset=11)
        [sent] = left.poll()
        assert (sent["wr_id"], sent["status"], sent["opcode"]) == (seed, "SUCCESS", "RDMA_WRITE")
        assert right.matches(seed, size, 11)
    assert right.poll(1, 0.01) == []


def test_write_with_imm(pair: Pair) -> None:
    left, right = pair(mtu=512)
    for seed, size in enumerate((0, 5, 512, 3001)):
        left.pattern(seed, size)
        right.recv(50 + seed)
        left.send("RDMA_WRITE_WITH_IMM", seed, size, remote_offset=3, imm=seed + 1)
        [sent], [received] = left.poll(), right.poll()
        assert sent["opcode"] == "RDMA_WRITE" and sent["status"] == "SUCCESS"
        assert (received["wr_id"], received["opcode"]) == (50 + seed, "RECV_RDMA_WITH_IMM")
        assert received["imm"] == seed + 1 and received["byte_len"] == size
        assert right.matches(seed, size, 3)


def test_read(pair: Pair) -> None:
    left, right = pair(mtu=256)
    for seed, size in enumerate(SIZES):
        right.pattern(seed, size, 5)
        left.send("RDMA_READ", seed, size, remote_offset=5)
        [done] = left.poll()
        assert (done["wr_id"], done["status"], done["opcode"]) == (seed, "SUCCESS", "RDMA_READ")
        assert left.matches(seed, size)


def test_atomics(pair: Pair) -> None:
    left, right = pair()
    right.put((41).to_bytes(8, "little").hex(), 16)
    left.send("ATOMIC_FETCH_AND_ADD", 1, 8, remote_offset=16, compare_add=1)
    [done] = left.poll()
    assert (done["status"], done["opcode"]) == ("SUCCESS", "FETCH_ADD")
    assert left.get(8) == (41).to_bytes(8, "little").hex()
    assert right.get(8, 16) == (42).to_bytes(8, "little").hex()
    left.send("ATOMIC_CMP_AND_SWP", 2, 8, remote_offset=16, compare_add=7, swap=9)
    left.send("ATOMIC_CMP_AND_SWP", 3, 8, 8, remote_offset=16, compare_add=42, swap=(1 << 64) - 2)
    done = left.poll(2)
    assert [wc["opcode"] for wc in done] == ["COMP_SWAP"] * 2
    assert left.get(16) == ((42).to_bytes(8, "little") * 2).hex()
    assert right.get(8, 16) == ((1 << 64) - 2).to_bytes(8, "little").hex()
    left.send("ATOMIC_FETCH_AND_ADD", 4, 8, remote_offset=16, compare_add=5)
    left.poll()
    assert right.get(8, 16) == (3).to_bytes(8, "little").hex(), "sums wrap at 2^64"


def test_scatter_gather(pair: Pair) -> None:
    left, right = pair(mtu=256)
    left.pattern(1, 1000)
    right.recv(1, sges=[[5000, 1], [6000, 700], [7000, 0], [8000, 299]])
    left.send("SEND", 1, sges=[[0, 333], [333, 0], [333, 66], [399, 601]])
    assert statuses(left.poll()) == [(1, "SUCCESS")]
    [received] = right.poll()
    assert received["byte_len"] == 1000
    assert right.matches(1, 1, 5000) and right.matches(1, 700, 6000, 1) and right.matches(1, 299, 8000, 701)
    # Gathered WRITE, scattered READ.
    left.send("RDMA_WRITE", 2, sges=[[0, 500], [500, 500]], remote_offset=20_000)
    left.send("RDMA_READ", 3, sges=[[30_000, 17], [31_000, 983]], remote_offset=20_000)
    assert statuses(left.poll(2)) == [(2, "SUCCESS"), (3, "SUCCESS")]
    assert right.matches(1, 1000, 20_000)
    assert left.matches(1, 17, 30_000) and left.matches(1, 983, 31_000, 17)


def test_inline_data_is_copied_at_post_time(two: Pair) -> None:
    left, right = two()
    size = left.numbers()["max_inline_data"]
    assert size >= 256
    for seed in range(20):
        left.pattern(seed, 200)
        right.recv(seed, 200, seed * 200)
        # No valid lkey is needed, and the buffer may change at once.
        left.send("SEND", seed, 200, flags="signaled inline", lkey=0xDEAD00)
        left.pattern(999, 200)
    assert statuses(left.poll(20)) == [(seed, "SUCCESS") for seed in range(20)]
    assert len(right.poll(20)) == 20
    assert all(right.matches(seed, 200, seed * 200) for seed in range(20))
    with pytest.raises(VerbsError):
        left.send("SEND", 1, size + 1, flags="signaled inline")


def test_unsignaled(pair: Pair) -> None:
    left, right = pair()
    right.recv_many(11, 4)
    left.send_many(10, op="SEND", length=4, flags="")
    left.send("SEND", 99, 4)
    assert statuses(left.poll(1, 10)) == [(99, "SUCCESS")]
    assert len(right.poll(11)) == 11 and left.poll(1, 0.2) == []


def test_sq_sig_all(pair: Pair) -> None:
    left, right = pair({"sig_all": True})
    right.recv_many(3, 4)
    left.send_many(3, op="SEND", length=4, flags="")
    assert statuses(left.poll(3)) == [(1, "SUCCESS"), (2, "SUCCESS"), (3, "SUCCESS")]


def test_order_of_mixed_operations(pair: Pair) -> None:
    """Completions in posting order, whatever the operations; fenced work sees what READ brought."""
    left, right = pair(mtu=256)
    right.recv_many(20, 2000)
    right.pattern(5, 2000, 40_000)
    wanted = []
    for round_ in range(5):
        base = round_ * 10
        left.send("RDMA_READ", base, 2000, 10_000, remote_offset=40_000)
        left.send("RDMA_WRITE", base + 1, 2000, 10_000, remote_offset=50_000, flags="signaled fence")
        left.send("SEND", base + 2, 100)
        left.send("ATOMIC_FETCH_AND_ADD", base + 3, 8, 20_000, remote_offset=60_000, compare_add=1)
        left.send("RDMA_WRITE_WITH_IMM", base + 4, 300, imm=round_)
        wanted += [base + i for i in range(5)]
    assert statuses(left.poll(25)) == [(wr_id, "SUCCESS") for wr_id in wanted]
    assert right.matches(5, 2000, 50_000)
    assert [wc["opcode"] for wc in right.poll(10)] == ["RECV", "RECV_RDMA_WITH_IMM"] * 5
    assert left.get(8, 20_000) == (4).to_bytes(8, "little").hex()


def test_both_directions_at_once(pair: Pair) -> None:
    left, right = pair({"send_wr": 200, "recv_wr": 200}, mtu=1024)
    for side, seed in ((left, 1), (right, 2)):
        side.pattern(seed, 10_000)
        side.recv_many(100, 10_000, wr_id=1000)
    for _ in range(10):
        left.send_many(10, op="SEND", length=5000)
        right.send_many(10, op="SEND", length=5000)
    for side in (left, right):
        done = side.poll(200)
        assert len(done) == 200 and {wc["status"] for wc in done} == {"SUCCESS"}
        assert [wc["wr_id"] for wc in done if wc["opcode"] == "RECV"] == list(range(1000, 1100))


def test_large_message(pair: Pair) -> None:
    size = 3_000_001
    left, right = pair({"size": 2 * size}, mtu=4096, timeout=14)
    left.pattern(3, size)
    left.send("RDMA_WRITE", 1, size)
    assert statuses(left.poll(1, 30)) == [(1, "SUCCESS")]
    assert right.matches(3, size)
    left.send("RDMA_READ", 2, size, size)
    assert statuses(left.poll(1, 30)) == [(2, "SUCCESS")]
    assert left.matches(3, size, size)


def test_many_reads_wait_for_their_turn(pair: Pair) -> None:
    """More READs than max_rd_atomic allows at once."""
    left, right = pair({"send_wr": 64}, rd_atomic=2, dest_rd_atomic=2)
    right.pattern(1, 3000)
    for i in range(50):
        left.send("RDMA_READ", i, 3000, remote_offset=0)
    assert statuses(left.poll(50)) == [(i, "SUCCESS") for i in range(50)]
    assert left.matches(1, 3000)


def test_chain_of_work_requests(pair: Pair) -> None:
    left, right = pair()
    right.recv_many(5, 16)
    assert left.send_chain([{"wr_id": i, "length": 16} for i in range(5)]) == 5
    assert statuses(left.poll(5)) == [(i, "SUCCESS") for i in range(5)]
    assert len(right.poll(5)) == 5


def test_full_queues(two: Pair) -> None:
    left, right = two({"send_wr": 8, "recv_wr": 8}, rnr_retry=7)
    for which in (left, right):
        room = which.numbers()
        with pytest.raises(VerbsError) as full:
            which.recv_many(room["max_recv_wr"] + 1, 4)
        assert full.value.errno == 12
    for post in range(8):  # no receives for these: they stay in the queue
        left.send("SEND", post, 4)
    assert len(left.poll(8)) == 8, "the receives posted above take them"
    right.modify("RESET")
    left.send_many(left.numbers()["max_send_wr"], op="SEND", length=4)
    with pytest.raises(VerbsError) as full:
        left.send("SEND", 99, 4)
    assert full.value.errno == 12


def test_solicited_flag_and_events(two: Pair) -> None:
    left, right = two({"channel": True})
    right.recv_many(3, 4)
    right.arm(solicited=True)
    left.send("SEND", 1, 4)
    assert left.poll() and right.poll()
    assert not right.wait_event(0.05), "not solicited"
    left.send("SEND", 2, 4, flags="signaled solicited")
    assert right.wait_event() and right.poll()
    left.send("SEND", 3, 4, flags="signaled solicited")
    assert right.poll() and not right.wait_event(0.05), "armed once, one event"
    left.arm()
    left.send("RDMA_WRITE", 4, 4)
    assert left.wait_event()
    assert len(left.poll(3)) == 3


def test_shared_cq_and_many_qps(hosts: Callable[..., object]) -> None:
    a, b = hosts("a").open("soft0"), hosts("b").open("soft0")  # type: ignore[attr-defined]
    lefts = [a.endpoint(cqe=1000)]
    rights = [b.endpoint(cqe=1000)]
    for _ in range(9):
        lefts.append(a.endpoint(share=lefts[0]))
        rights.append(b.endpoint(share=rights[0]))
    for left, right in zip(lefts, rights, strict=True):
        connect(left, right)
        right.recv_many(5, 100)
    for number, left in enumerate(lefts):
        left.send_many(5, op="SEND", length=100, wr_id=number * 100)
    done = lefts[0].poll(50)
    assert sorted(wc["wr_id"] for wc in done) == sorted(n * 100 + i for n in range(10) for i in range(5))
    by_qpn = {left.numbers()["qpn"]: n for n, left in enumerate(lefts)}
    assert all(by_qpn[wc["qpn"]] == wc["wr_id"] // 100 for wc in done)
    assert len(rights[0].poll(50)) == 50


def test_query_shows_what_was_set(two: Pair) -> None:
    left, right = two(mtu=2048, timeout=13, retry_cnt=5, rnr_retry=3, min_rnr_timer=14, rd_atomic=4)
    found = left.query()
    assert found["state"] == "RTS" and found["dest_qp_num"] == right.numbers()["qpn"]
    assert (found["timeout"], found["retry_cnt"], found["rnr_retry"]) == (13, 5, 3)
    assert (found["min_rnr_timer"], found["max_rd_atomic"], found["path_mtu"]) == (14, 4, 4)
    assert found["max_send_wr"] >= 64 and found["port_num"] == 1


def test_devices_ports_gids(hosts: Callable[..., object]) -> None:
    a, b = hosts("a", "3"), hosts("b")  # type: ignore[operator]
    assert a.call("host", "device_names")[:3] == ["soft0", "soft1", "soft2"]
    assert b.call("host", "device_names")[:2] == ["soft0", "soft1"]
    gids = {a.open("soft0").gid(), a.open("soft1").gid(), b.open("soft0").gid(), b.open("soft1").gid()}
    assert len(gids) == 4 and all(":ffff:7f2" in gid for gid in gids)
    port = a.open("soft0").port()
    assert (port["state"], port["link_layer"], port["pkey"]) == ("ACTIVE", 2, 0xFFFF)
    attr = a.open("soft0").device_attr()
    assert attr["max_qp_wr"] >= 1024 and attr["max_sge"] >= 8 and attr["phys_port_cnt"] == 1
