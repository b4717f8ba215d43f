# SPDX-License-Identifier: BSD-3-Clause
"""What nobody has polled goes with RESET and with close, of QPs that are protected and of those that are not.

Beside them on their CQs are others, whose completions stay. All of it is as with pyverbs on the same software NIC.
"""

from __future__ import annotations

from typing import Any

import pytest
from harness import wait_until
from hosts import AWAY, Host, Network, connect

PACKAGES = pytest.mark.parametrize("package", ["shiftverbs", "pyverbs"])
RESET = "at = qp.QPAttr(); at.qp_state = e.IBV_QPS_RESET; {}.modify(at, e.IBV_QP_STATE)"

#: `more`: one more QP, on the PD and CQ of `ep`, that receives through an SRQ, or is a UD QP, or like `ep`.
SRQ_QP = """
srq = module('srq')
class More(Endpoint):
    def __init__(self):
        self.context, self.pd, self.cq, self.recv_cq, self.channel = ep.context, ep.pd, ep.cq, ep.cq, None
        self._channels, self.access, self.gid, self.peer = {}, ACCESS, ep.gid, {}
        self.mr = mr.MR(self.pd, SLOT * 64, ACCESS)
        self.srq = srq.SRQ(self.pd, srq.SrqInitAttr(srq.SrqAttr(max_wr=32, max_sge=1)))
        cap = qp.QPCap(max_send_wr=16, max_recv_wr=0)
        init = qp.QPInitAttr(qp_type=e.IBV_QPT_RC, scq=ep.cq, rcq=ep.cq, cap=cap, srq=self.srq)
        self.qp = qp.QP(self.pd, init)
    def takes(self, wr_id):
        self.srq.post_recv(wr.RecvWR(wr_id, 1, [wr.SGE(self.mr.buf + 40 * SLOT, SLOT, self.mr.lkey)]))
    def gives(self, wr_id):
        self.post('SEND', slot=1, wr_id=wr_id)
more = More()
"""
UD_QP = """
class More:
    def __init__(self):
        cap = qp.QPCap(max_send_wr=16, max_recv_wr=16)
        self.qp = qp.QP(ep.pd, qp.QPInitAttr(qp_type=e.IBV_QPT_UD, scq=ep.cq, rcq=ep.cq, cap=cap))
    def name(self):
        return self.qp.qp_num
    def connect(self, peer):
        self.peer = peer
        attr = qp.QPAttr(port_num=1)
        attr.qkey, attr.pkey_index = 0x11, 0
        self.qp.to_rts(attr)
    def takes(self, wr_id):
        self.qp.post_recv(wr.RecvWR(wr_id, 1, [wr.SGE(ep.mr.buf + 40 * SLOT, SLOT, ep.mr.lkey)]))
    def gives(self, wr_id):
        route = addr.GlobalRoute(dgid=addr.GID(ep.peer['gid']), sgid_index=GID_INDEX, hop_limit=64)
        self.ah = addr.AH(ep.pd, attr=addr.AHAttr(port_num=1, is_global=1, gr=route))
        sge = wr.SGE(ep.mr.buf, 8, ep.mr.lkey)
        send = wr.SendWR(wr_id, opcode=e.IBV_WR_SEND, num_sge=1, sg=[sge], send_flags=e.IBV_SEND_SIGNALED)
        send.set_wr_ud(self.ah, self.peer, 0x11)
        self.qp.post_send(send)
more = More()
"""
RC_QP = """
more = Endpoint(shared=ep)
more.takes = lambda wr_id: more.recv(40, wr_id)
more.gives = lambda wr_id: more.post('SEND', slot=1, wr_id=wr_id)
"""
KINDS = {"RC": RC_QP, "SRQ": SRQ_QP, "UD": UD_QP}


def two(network: Network, package: str, setup: str = "") -> tuple[Host, Host]:
    """Two hosts whose first QPs are protected, as far as they can be."""
    a, b = network.host("a", package), network.host("b", package)
    connect(a, b, setup)
    for h in (a, b):
        assert package == "pyverbs" or h("ep.qp.shift.wait_protected(20)"), h("ep.shift()")
    return a, b


def beside(a: Host, b: Host, kind: str) -> None:
    """`more` on both, connected."""
    for h in (a, b):
        h(f"exec({KINDS[kind]!r}, globals())")
    names = [h("more.name()") for h in (a, b)]
    for h, name in zip((b, a), names, strict=True):
        h(f"more.connect({name!r})")


def found(h: Host, count: int) -> list[int]:
    """The wr_ids of that many completions, all good; and nothing else is there."""
    seen = h(f"ep.poll({count})")
    assert all(status == "SUCCESS" for _, status, *_ in seen), seen
    assert h("ep.none(0.1)") == []
    return sorted(wr_id for wr_id, *_ in seen)


def until(h: Host, what: str) -> None:
    """Wait on that host until it is so."""
    wait_until(lambda: h(what), 20, what)


def arrived(h: Host, slot: int, text: str, name: str = "ep", length: int = 60) -> None:
    """Wait for a message in memory, somewhere in that many bytes: the CQ is not looked at."""
    until(h, f"{text!r} in {name}.text({slot}, {length})")


@PACKAGES
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("end", ["RESET", "close"])
def test_it_goes_and_a_neighbours_stays(network: Network, package: str, kind: str, end: str) -> None:
    """Two messages each way by either QP, and a run of the driver that takes them all out of the NIC's CQ."""
    a, b = two(network, package)
    beside(a, b, kind)
    memory, text = ("ep", "by ep") if kind == "UD" else ("more", "by more")
    for h in (a, b):
        h("[ep.recv(i, 10 + i) for i in range(2)]; [more.takes(500 + i) for i in range(2)]")
        h(f"{memory}.fill(1, {text!r}); ep.fill(0, 'by ep')")
    for h in (a, b):
        h(
            "[more.gives(600 + i) for i in range(2)]; [ep.post('SEND', slot=0, wr_id=20 + i) for i in range(2)]"
        )
    for h in (a, b):
        arrived(h, 1, "by ep")
        arrived(h, 40, text, memory)
        if package == "shiftverbs":
            until(h, "ep.cq._core.drain(0) * 0 + ep.cq._core.buffered == 8")
    for h in (a, b):
        h("more.qp.close()" if end == "close" else RESET.format("more.qp"))
    for h in (a, b):
        assert found(h, 4) == [10, 11, 20, 21]


@pytest.mark.parametrize("end", ["RESET", "close"])
def test_away_too(network: Network, faults: Any, end: str) -> None:
    """What the backup has completed, and what a QP of another NIC's CQ has."""
    a, b = two(network, "shiftverbs")
    beside(a, b, "RC")
    for h in (a, b):
        assert h("more.qp.shift.wait_protected(20)"), h("more.shift()")
    faults.down("a/soft0")
    for name in ("ep", "more"):
        b(f"{name}.recv(0, 1)")
        a(f"{name}.post('SEND', wr_id=1)")
        assert [h("ep.poll(1)")[0][:2] for h in (a, b)] == [[1, "SUCCESS"]] * 2
    for h in (a, b):
        for name in ("ep", "more"):
            h(f"{name}.wait({AWAY!r})")
        h("ep.recv(1, 10); more.recv(2, 500); ep.fill(0, 'by ep'); more.fill(0, 'by more')")
    for h in (a, b):
        h("more.post('SEND', wr_id=600); ep.post('SEND', wr_id=20)")
    for h in (a, b):
        arrived(h, 1, "by ep")
        arrived(h, 2, "by more", "more")
    for h in (a, b):
        h("more.qp.close()" if end == "close" else RESET.format("more.qp"))
    for h in (a, b):
        assert found(h, 2) == [10, 20]


@PACKAGES
def test_a_window_was_bound_before(network: Network, package: str) -> None:
    """That ends protection, and what was completed until then is taken into our buffer."""
    a, b = two(network, package, "access=ACCESS | e.IBV_ACCESS_MW_BIND")
    b("[ep.recv(i) for i in range(3)]")
    a("ep.fill(0, 'by ep'); [ep.post('SEND', wr_id=20 + i) for i in range(3)]")
    arrived(b, 2, "by ep")
    if package == "shiftverbs":
        until(a, "ep.cq._core.drain(0) * 0 + ep.cq._core.buffered == 3")
    a("window = mr.MW(ep.pd, e.IBV_MW_TYPE_1)")
    a("info = mr.MWBindInfo(ep.mr, ep.mr.buf, 64, e.IBV_ACCESS_REMOTE_WRITE)")
    a("ep.qp.bind_mw(window, mr.MWBind(info, 1, 5))")
    a(RESET.format("ep.qp"))
    assert a("ep.none(0.1)") == []


WALKED = """
srq = module('srq')
class Walked(Endpoint):
    def __init__(self):
        self.context = device.Context(name='soft0')
        self.pd, self.access, self.peer = pd.PD(self.context), ACCESS, {}
        self.cq = cq.CQEX(self.context, cq.CqInitAttrEx(cqe=64, wc_flags=e.IBV_WC_STANDARD_FLAGS))
        self.mr = mr.MR(self.pd, SLOT * 64, ACCESS)
        self.srq = srq.SRQ(self.pd, srq.SrqInitAttr(srq.SrqAttr(max_wr=32, max_sge=1)))
        self.qp = qp.QP(self.context, qp.QPInitAttrEx(
            qp_type=e.IBV_QPT_RC, scq=self.cq, rcq=self.cq, srq=self.srq, cap=qp.QPCap(16, 0, 1, 1, 0),
            pd=self.pd, comp_mask=e.IBV_QP_INIT_ATTR_PD))
        self.gid = self.context.query_gid(1, GID_INDEX)
    def takes(self, slot):
        self.srq.post_recv(wr.RecvWR(500 + slot, 1, [wr.SGE(self.mr.buf + slot * SLOT, SLOT, self.mr.lkey)]))
    def walk(self, most):
        seen, failed = [], self.cq.start_poll(cq.PollCqAttr())
        if failed:
            return seen
        while not failed:
            seen.append(self.cq.wr_id)
            failed = len(seen) == most or self.cq.poll_next()
        self.cq.end_poll()
        return seen
ep = Walked()
"""


@PACKAGES
def test_an_extended_cq_was_walked_half(network: Network, package: str) -> None:
    """One QP, which nothing protects: a walk takes all out of the NIC's CQ, and tells as much as it is asked."""
    a, b = network.host("a", package), network.host("b", package)
    for h in (a, b):
        h(f"exec({WALKED!r}, globals())")
    names = [h("ep.name()") for h in (a, b)]
    for h, name in zip((b, a), names, strict=True):
        h(f"ep.connect({name!r})")
    b("[ep.takes(i) for i in range(5)]")
    a("ep.fill(0, 'by ep'); [ep.post('SEND', wr_id=20 + i) for i in range(4)]")
    arrived(b, 3, "by ep")
    assert b("ep.walk(1)") == [500]
    until(a, "ep.walk(1)")
    for h in (a, b):
        h(RESET.format("ep.qp"))
        assert h("ep.walk(20)") == []
    for h in (a, b):
        h("ep.connect(ep.peer)")
    a("ep.post('SEND', wr_id=99)")
    for h, wr_id in ((a, 99), (b, 504)):
        until(h, f"ep.walk(1) == [{wr_id}]")
        assert h("ep.walk(20)") == []


@PACKAGES
@pytest.mark.parametrize("kind", ["RC", "UD"])
def test_a_closed_qp_keeps_no_cq(network: Network, package: str, kind: str) -> None:
    a = network.host("a", package)
    a("import weakref; context = device.Context(name='soft0'); area = pd.PD(context)")
    a("own = cq.CQ(context, 8, None, None, 0); cap = qp.QPCap(max_send_wr=2, max_recv_wr=2)")
    a(f"own_qp = qp.QP(area, qp.QPInitAttr(qp_type=e.IBV_QPT_{kind}, scq=own, rcq=own, cap=cap))")
    a("own_qp.close(); left = weakref.ref(own); del own")
    assert a("left() is None")


OWN_PD = """
class Area(module('pd').PD):
    def __del__(self):
        seen.append([wc.wr_id for wc in ep.cq.poll(16)[1]])
seen = []
area = Area(ep.context)
cap = qp.QPCap(max_send_wr=1, max_recv_wr=4)
more = qp.QP(area, qp.QPInitAttr(qp_type=e.IBV_QPT_{0}, scq=ep.cq, rcq=ep.cq, cap=cap))
memory = mr.MR(area, 4096, e.IBV_ACCESS_LOCAL_WRITE)
attr = qp.QPAttr(port_num=1)
attr.qkey, attr.pkey_index = 0x11, 0
more.to_rts(attr) if '{0}' == 'UD' else more.to_init(attr)
for wr_id in (1, 2):
    more.post_recv(wr.RecvWR(wr_id, 1, [wr.SGE(memory.buf, 64, memory.lkey)]))
attr = qp.QPAttr()
attr.qp_state = e.IBV_QPS_ERR
more.modify(attr, e.IBV_QP_STATE)
"""


@PACKAGES
@pytest.mark.parametrize("kind", ["RC", "UD"])
def test_nothing_of_a_qp_is_left_when_its_parents_end(network: Network, package: str, kind: str) -> None:
    """The QP has the last reference to its PD, whose end runs a program's code: the QP is wholly gone by then."""
    a, _ = two(network, package)
    a(f"exec({OWN_PD.format(kind)!r}, globals())")
    if package == "shiftverbs":
        until(a, "ep.cq._core.drain(0) * 0 + ep.cq._core.buffered == 2")
    a("memory.close(); del memory, area")
    assert a("seen") == []
    a("more.close()")
    until(a, "seen")
    assert a("seen") == [[]]
