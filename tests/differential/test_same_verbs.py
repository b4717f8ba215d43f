# SPDX-License-Identifier: BSD-3-Clause
"""What verbs say where little programs differ: with pyverbs, and with shiftverbs at home, away, and home again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hosts import WHERE, Host, Network, go

TELL = """
import os
def tell(f):
    try:
        return repr(f())
    except BaseException as error:
        return [type(error).__name__, str(error), getattr(error, "error_code", None)]
def in_child(f):
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, json.dumps(tell(f)).encode())
        os._exit(0)
    os.close(writing)
    said = os.read(reading, 4000)
    os.close(reading)
    os.waitpid(child, 0)
    return json.loads(said)
"""


def same(
    network: Network, faults: Any, where: str, trace: Callable[[Host, Host], list[Any]], **setup: Any
) -> None:
    """Have the program leave its trace with pyverbs, and with shiftverbs at a place: the same."""
    hosts = network.pair("pyverbs", **setup)
    for h in hosts:
        h(TELL)
    theirs = trace(*hosts)
    for h in hosts:
        h.child.close()
    hosts = network.protected(**setup)
    for h in hosts:
        h(TELL)
    go(faults, where, *hosts)
    ours = trace(*hosts)
    assert ours == theirs
    for h in hosts:
        assert h("ep.qp.shift.status") == "PROTECTED"


@pytest.mark.parametrize("kind", ["Endpoint", "Extended"])
@pytest.mark.parametrize("where", WHERE)
def test_a_forked_child_uses_what_it_inherited(network: Network, faults: Any, where: str, kind: str) -> None:
    """As with pyverbs: an error, where a QP or CQ that looks alive would have it wait for ever. The parent goes on."""

    def trace(a: Host, b: Host) -> list[Any]:
        b("ep.recv(3); ep.recv(4)")
        a("ep.post('SEND', wr_id=9)")
        assert [wc[:2] for wc in b("ep.poll(1, queue=ep.recv_cq)")] == [[3, "SUCCESS"]]
        verbs = ["ep.post('SEND')", "ep.recv(1)", "ep.qp.query(1)"]
        if kind == "Endpoint":
            verbs += ["ep.cq.resize(100)", "ep.cq.poll(1)", "ep.cq.req_notify()"]
        else:
            verbs += [
                "(ep.qp.wr_start(), ep.wr(1, 'send'), ep.qp.wr_set_sge(ep.sge(1, 8)), ep.qp.wr_complete())",
                "ep.cq.start_poll(cq.PollCqAttr())",
            ]
        said = [a(f"in_child(lambda: {verb})") for verb in verbs]
        assert [wc[:2] for wc in a("ep.poll(1)")] == [[9, "SUCCESS"]]  # which waited: it is the parent's
        a("ep.post('SEND', wr_id=10)")
        return [*said, a("ep.poll(1)"), b("ep.poll(1, queue=ep.recv_cq)")]

    same(network, faults, where, trace, kind=kind)


@pytest.mark.parametrize("where", WHERE)
def test_whose_message_it_was(network: Network, faults: Any, where: str) -> None:
    """`src_qp` is the peer's QP that the application knows, whichever carries the traffic."""

    def trace(a: Host, b: Host) -> list[Any]:
        b("ep.recv(3); ep.recv(4)")
        a("ep.post('SEND', wr_id=9); ep.post('RDMA_WRITE_WITH_IMM', wr_id=10, imm=5)")
        b("got = []\nwhile len(got) < 2: got += ep.cq.poll(2)[1]")
        shown = b("[[w.src_qp == ep.peer['qpn'], w.qp_num == ep.qp.qp_num, w.wc_flags] for w in got]")
        return [shown, a("ep.poll(2)")]

    same(network, faults, where, trace)


@pytest.mark.parametrize("where", WHERE)
def test_resize_below_what_waits(network: Network, faults: Any, where: str) -> None:
    """The completions that the application has not taken must fit: else EINVAL, and nothing has changed."""

    def trace(a: Host, b: Host) -> list[Any]:
        b("for i in range(8): ep.recv(i)")
        a("for i in range(8): ep.post('SEND', wr_id=i)")
        said = [a("ep.poll(8)")]
        for entries in (7, 1, 8, 7, 40, 0):
            said += [b(f"tell(lambda: ep.cq.resize({entries}))"), b("ep.cq.cqe")]
        said.append(b("ep.poll(3)"))
        said += [b("tell(lambda: ep.cq.resize(4))"), b("tell(lambda: ep.cq.resize(5))"), b("ep.poll(5)")]
        return said

    same(network, faults, where, trace)


@pytest.mark.parametrize("where", ["home", "back"])
def test_what_rkey_a_window_shows(network: Network, faults: Any, where: str) -> None:
    """From the post of its bind on the new one, where the installed pyverbs does that; not if the bind is refused."""

    def trace(a: Host, b: Host) -> list[Any]:
        a("windows = [mr.MW(ep.pd, e.IBV_MW_TYPE_2) for _ in range(3)]; at_first = [w.rkey for w in windows]")
        a("info = mr.MWBindInfo(ep.mr, ep.mr.buf, 64, e.IBV_ACCESS_REMOTE_WRITE)")
        a("""
def bind(wr_id, window, flags=e.IBV_SEND_SIGNALED, next_wr=None):
    made = wr.SendWR(wr_id, opcode=e.IBV_WR_BIND_MW, num_sge=0, send_flags=flags, next_wr=next_wr)
    made.set_bind_wr(window, info)
    return made
def shown():
    return [w.rkey - first for w, first in zip(windows, at_first)]
""")
        said = [a("ep.qp.post_send(bind(1, windows[0])); shown()"), a("ep.poll(1)")]
        a("gone = wr.SendWR(2, opcode=e.IBV_WR_LOCAL_INV, num_sge=0, send_flags=e.IBV_SEND_SIGNALED)")
        a("gone.imm_data = at_first[0] + 1")
        said += [a("ep.qp.post_send(gone)"), a("ep.poll(1)")]
        a("refused = bind(4, windows[1], e.IBV_SEND_INLINE, bind(5, windows[1]))")
        a("bad = wr.SendWR(opcode=e.IBV_WR_BIND_MW)")
        a("chain = bind(3, windows[2], next_wr=refused)")
        said += [
            a("tell(lambda: ep.qp.post_send(chain, bad))"),
            a("bad.wr_id"),
            a("shown()"),
            a("ep.poll(1)"),
        ]
        return said

    same(network, faults, where, trace, setup="access=ACCESS | e.IBV_ACCESS_MW_BIND")
