# SPDX-License-Identifier: BSD-3-Clause
"""Extended QPs and CQs: ibv_wr_* and the completion cursor, at home, on the backup, and through a failure."""

from __future__ import annotations

import errno
from typing import Any

import pytest
from hosts import AWAY, HOME, WHERE, Host, HostError, Network, go

KIND: dict[str, Any] = {"kind": "Extended"}


EVERY_OPERATION = """
ep.mr.write((0).to_bytes(8, "little"), 8, 12 * SLOT)
data = bytearray(b"inline, and gone")
kept = (ctypes.c_char * len(data)).from_buffer(data)
ep.qp.wr_start()
ep.wr(1, "send"); ep.qp.wr_set_sge(ep.sge(0, 5))
ep.wr(2, "send_imm", 0x01020304); ep.qp.wr_set_sge_list(2, [ep.sge(0, 5), ep.sge(1, 6)])
ep.wr(3, "rdma_write", *ep.at(20)); ep.qp.wr_set_inline_data(ctypes.addressof(kept), len(data))
ep.wr(4, "rdma_write_imm", *ep.at(21), 0x05060708); ep.qp.wr_set_sge(ep.sge(1, 6))
ep.wr(5, "rdma_read", *ep.at(2)); ep.qp.wr_set_sge_list(2, [ep.sge(10, 3), ep.sge(11, 4)])
ep.wr(6, "atomic_fetch_add", *ep.at(22), 5); ep.qp.wr_set_sge(ep.sge(12, 8))
ep.wr(7, "atomic_cmp_swp", *ep.at(22), 5, 2**64 - 1); ep.qp.wr_set_sge(ep.sge(13, 8))
buffers = [qp.DataBuffer(ctypes.addressof(kept), 6), qp.DataBuffer(ctypes.addressof(kept) + 8, 3)]
ep.wr(8, "send", signaled=False); ep.qp.wr_set_inline_data_list(2, buffers)
ep.wr(9, "send")
del kept
data[:] = b"x" * len(data)
ep.qp.wr_complete()
"""


def every_operation(a: Host, b: Host) -> dict[str, Any]:
    """Post one of each, in one batch, and tell all that can be seen of it."""
    b(
        "[ep.recv(i) for i in range(5)]; ep.fill(2, 'to read'); ep.mr.write((0).to_bytes(8, 'little'), 8, 22 * SLOT)"
    )
    a("import ctypes; ep.fill(0, 'hello'); ep.fill(1, 'world!')")
    a(EVERY_OPERATION)
    sent, received = a("ep.take(8)"), b("ep.take(5, ep.recv_cq)")
    for wcs, host in ((sent, a), (received, b)):
        number = host("ep.qp.qp_num")
        assert all(wc.pop("qp_num") == number for wc in wcs)
        for wc in wcs:
            wc.pop("src_qp")  # of RC nobody promises it
    return {
        "sent": sent,
        "received": received,
        "memory": [
            b(
                "[ep.text(0, 5), ep.text(1, 11), ep.text(3, 9), ep.text(20, 16), ep.text(21, 6), ep.number(22)]"
            )
        ],
        "read": a("[ep.text(10, 3), ep.text(11, 4), ep.number(12), ep.number(13)]"),
        "nothing more": [a("ep.batch(ep.cq)"), b("ep.batch(ep.recv_cq)")],
    }


def test_every_operation_is_what_it_is_with_pyverbs(network: Network, faults: Any) -> None:
    theirs = every_operation(*network.pair("pyverbs", **KIND))
    assert [wc["wr_id"] for wc in theirs["sent"]] == [1, 2, 3, 4, 5, 6, 7, 9]
    assert [wc["byte_len"] for wc in theirs["received"]] == [5, 11, 6, 9, 0]
    assert theirs["memory"] == [
        ["hello", "helloworld!", "inlineand", "inline, and gone", "world!", 2**64 - 1]
    ]
    assert theirs["read"] == ["to ", "read", 0, 5]
    a, b = network.protected(**KIND)
    for where in WHERE:
        go(faults, where, a, b)
        assert every_operation(a, b) == theirs, where


@pytest.mark.parametrize("where", WHERE)
def test_a_batch_is_posted_whole_or_not_at_all(network: Network, faults: Any, where: str) -> None:
    a, b = network.protected(setup="depth=4, ops='SEND RDMA_WRITE'", **KIND)
    go(faults, where, a, b)
    a("import ctypes; one = lambda n: (ep.wr(n, 'send'), ep.qp.wr_set_sge(ep.sge(0, 8)))")
    bad = {
        "[one(i) for i in range(5)]": errno.ENOMEM,
        "one(1); ep.wr(2, 'rdma_read', *ep.at(0)); ep.qp.wr_set_sge(ep.sge(0, 8))": errno.EOPNOTSUPP,
        "one(1); one(2); ep.qp.wr_set_sge_list(5, [ep.sge(0, 8)] * 5)": errno.EINVAL,
        "one(1); ep.wr(2, 'send'); ep.qp.wr_set_inline_data(ep.mr.buf, 129)": errno.EINVAL,
        "ep.qp.wr_set_sge(ep.sge(0, 8))": errno.EINVAL,
        "one(1); ep.qp.wr_bind_mw(None, 1, None)": errno.EOPNOTSUPP,
        "one(1); ep.qp.wr_send_tso(0, 0, 0)": errno.EOPNOTSUPP,
        "one(1); ep.qp.wr_atomic_write(1, 0, bytes(8))": errno.EOPNOTSUPP,
        "one(1); ep.qp.wr_set_ud_addr(None, 1, 1)": errno.EINVAL,
        "one(1); ep.qp.wr_set_xrc_srqn(1)": errno.EINVAL,
    }
    for source, code in bad.items():
        with pytest.raises(HostError) as error:
            a(f"ep.qp.wr_start(); {source}; ep.qp.wr_complete()")
        assert (error.value.type, error.value.code) == ("PyverbsRDMAError", code), source
        assert a("ep.qp._core.outstanding[0]") == 0, source
    a("ep.qp.wr_start(); one(1); ep.qp.wr_abort()")
    a("ep.qp.wr_start(); one(1); ep.qp.wr_start(); ep.qp.wr_complete()")
    b("[ep.recv(i) for i in range(4)]")
    a("ep.qp.wr_start(); [one(i) for i in (7, 8)]; ep.qp.wr_complete()")
    a("ep.post('SEND', 0, wr_id=9)")  # the two ways to post may take turns
    a("ep.qp.wr_start(); one(10); ep.qp.wr_complete()")
    assert [wc[:2] for wc in a("ep.poll(4)")] == [[n, "SUCCESS"] for n in (7, 8, 9, 10)]
    assert [wc[:2] for wc in b("ep.poll(4, queue=ep.recv_cq)")] == [[n, "SUCCESS"] for n in range(4)]
    with pytest.raises(HostError, match="AttributeError"):
        a("ep.qp.wr_start(); ep.wr(1, 'send'); ep.qp.wr_set_sge_list(1, [3])")


@pytest.mark.parametrize("fault", ["port", "ack"])
def test_a_failure_in_the_middle_of_a_batch(network: Network, faults: Any, fault: str) -> None:
    """Messages of one batch, some unsignaled, some received before the cable goes: each arrives once, in order."""
    a, b = network.protected(setup="depth=32", **KIND)
    b("[ep.recv(i) for i in range(32)]")
    a("[ep.fill(i, f'message {i:02}') for i in range(24)]")
    if fault == "ack":
        faults.drop("b/soft0", count=4, opcode="ack")
    a("ep.qp.wr_start()")
    a("[(ep.wr(i, 'send', signaled=i % 3 == 2), ep.qp.wr_set_sge(ep.sge(i, 10))) for i in range(24)]")
    if fault == "port":
        a("ep.qp.wr_complete()")
        faults.down("a/soft0")
    else:
        faults.down("b/soft0")
        a("ep.qp.wr_complete()")
    sent = a("ep.poll(8, timeout_s=30)")
    assert sent == [[i, "SUCCESS", 10, True] for i in range(2, 24, 3)]
    got = b("ep.poll(24, queue=ep.recv_cq)")
    assert got == [[i, "SUCCESS", 10, True] for i in range(24)]
    assert b("[ep.text(i, 10) for i in range(24)]") == [f"message {i:02}" for i in range(24)]
    assert a("ep.poll(1, 0.2)") == [] == b("ep.poll(1, 0.2, queue=ep.recv_cq)")
    faults.up("a/soft0")
    faults.up("b/soft0")
    for h in (a, b):
        h(f"ep.wait({HOME!r}, 20)")


def test_the_cursor_goes_over_both_nics(network: Network, faults: Any) -> None:
    """Completions of the default NIC that nobody has read yet, then the backup's: one order, one cursor."""
    a, b = network.protected(**KIND)
    b("[ep.recv(i) for i in range(6)]")
    a("[ep.post('SEND', 0, 10 + i, wr_id=i) for i in range(3)]")
    first = (
        "rc = ep.cq.start_poll(None); seen = [(rc, ep.cq.wr_id, ep.cq.status, ep.cq.read_byte_len())]; seen"
    )
    a("ep.wait('ep.cq._core.drain(0) >= 0 and ep.qp._core.counters()[1] == 3')")
    assert a(first) == [[0, 0, 0, 10]]
    faults.down("a/soft0")  # between start_poll and end_poll
    for h in (a, b):
        h(f"ep.wait({AWAY!r}, 20)")
    assert a("[ep.cq.wr_id, ep.cq.read_byte_len(), ep.cq.read_qp_num() == ep.qp.qp_num]") == [0, 10, True]
    assert a("[ep.cq.poll_next(), ep.cq.wr_id, ep.cq.read_byte_len()]") == [0, 1, 11]
    a("ep.cq.end_poll()")
    a("[ep.post('SEND', 0, 13 + i, wr_id=3 + i) for i in range(3)]")
    assert a("ep.poll(4, most=3)") == [[i, "SUCCESS", 10 + i, True] for i in range(2, 6)]
    assert a("ep.cq.start_poll(cq.PollCqAttr())") == errno.ENOENT
    assert b("ep.poll(6, queue=ep.recv_cq)") == [[i, "SUCCESS", 10 + i, True] for i in range(6)]
    a("ep.cq.wr_id = 77; ep.cq.status = 5")  # as with pyverbs
    assert a("[ep.cq.wr_id, ep.cq.status]") == [77, 5]
    with pytest.raises(HostError, match="IBV_WC_EX_WITH_COMPLETION_TIMESTAMP"):
        a("ep.cq.read_timestamp()")
    a("attr = cq.PollCqAttr(); attr.comp_mask = 1")
    assert a("ep.cq.start_poll(attr)") == errno.EINVAL


def test_errors_that_are_the_applications_own(network: Network, faults: Any) -> None:
    a, b = network.protected(**KIND)
    go(faults, "away", a, b)
    a("ep.qp.wr_start(); ep.wr(3, 'rdma_write', ep.peer['rkey'], 1)")
    a("ep.qp.wr_set_sge(ep.sge(0, 8)); ep.qp.wr_complete()")
    (wc,) = a("ep.take(1)")
    assert (wc["wr_id"], wc["status"]) == (3, "REM_ACCESS_ERR")
    assert a("ep.shift()['status']") != "PROTECTED"


def test_closing_in_the_middle(network: Network) -> None:
    """A batch that is never completed, a cursor that is never ended, and a QP that is closed before either."""
    a, b = network.protected(**KIND)
    b("ep.recv(1)")
    a("ep.post('SEND', 0, wr_id=1); ep.take(0); ep.wait('ep.cq.start_poll(None) == 0')")
    a("ep.qp.wr_start(); ep.wr(2, 'send'); ep.qp.close()")
    with pytest.raises(HostError) as error:
        a("ep.qp.wr_send(); ep.qp.wr_complete()")
    assert error.value.code == errno.EINVAL
    a("ep.cq.close(); ep.recv_cq.close(); ep.cq.close()")
    assert b("ep.poll(1, queue=ep.recv_cq)")[0][:2] == [1, "SUCCESS"]
    b("del ep; import gc; gc.collect()")


def test_a_qpex_that_would_not_be_protected_is_refused_where_that_is_wanted(network: Network) -> None:
    network.env["SHIFTVERBS_REQUIRE"] = "1"
    a = network.host("a")
    with pytest.raises(HostError, match="cannot be moved") as error:
        a("Extended(ops='SEND BIND_MW')")
    assert error.value.type == "ShiftError"
