# SPDX-License-Identifier: BSD-3-Clause
"""A backup that cannot stand in says so, and why: in `qp.shift.why`, and once in the log."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from harness import wait_until
from hosts import AWAY, Host, Network

from shiftverbs.failover.qp.watchdog import Watchdog

# The partitions that backup NICs are in, as their P_Key tables say.
PARTITIONS = """
import msgspec
from shiftverbs.shadows import nic as backup
tables = {tables!r}
read = backup.Nic._read_ports
backup.Nic._read_ports = lambda nic: tuple(
    msgspec.structs.replace(port, pkeys=tables.get(nic.name, port.pkeys)) for port in read(nic)
)
"""

UNFIT = "nothing can fail over to pair 1, on soft1: "


def said(host: Host, text: str) -> int:
    """In how many lines a host logged it."""
    return sum(text in line for line in host.child.lines if not line.startswith("=>"))


def test_a_backup_in_another_partition_cannot_stand_in(network: Network, faults: Any) -> None:
    a, b = network.host("a", nics="3"), network.host("b", nics="3")
    b(PARTITIONS.format(tables={"soft1": [0x8001, 0]}))
    names = [h("ep = Endpoint(); ep.name()") for h in (a, b)]
    second = [h("second = Endpoint(shared=ep); second.name()") for h in (a, b)]
    for h, i in ((b, 0), (a, 1)):
        h(f"ep.connect({names[i]!r}); second.connect({second[i]!r})")
    for h in (a, b):
        assert h("ep.qp.shift.wait_protected(20) and second.qp.shift.wait_protected(20)"), h("ep.shift()")
    wait_until(lambda: said(b, f"{UNFIT}soft1 has no P_Key 0xffff on port 1"), what="b says why")
    wait_until(lambda: said(a, UNFIT), what="a says that it is so")
    faults.down("a/soft0")
    for h in (a, b):
        for each in ("ep", "second"):
            h(f"{each}.wait(\"s.state == 'FALLBACK' and s.path == s.recv_path == 'soft2'\", 30)")
    # The partition comes, at an index that this NIC refuses, then at one that it takes.
    b("tables['soft1'] = (0x8001, 0x7fff, 0xffff)")
    wait_until(lambda: said(b, f"{UNFIT}step 1 on soft1: Invalid argument"), 20, "b says so")
    b("tables['soft1'] = (0xffff, 0x8001)")
    for h in (a, b):
        h("ep.wait('ep.qp._shadow.connection.protocol.pairs[1].clean', 30)")
    assert said(b, "no P_Key") <= 2  # once for each QP, or for both


def test_why_tells_how_far_etcds_first_answer_is(network: Network, softrnic_dir: Path) -> None:
    go_on = softrnic_dir / "go-on"
    (softrnic_dir / "sitecustomize.py").write_text(
        "import os, sys, time\n"
        "while 'shiftverbs.exchanger.broker' in sys.orig_argv and "
        f"os.path.exists({str(softrnic_dir)!r}) and not os.path.exists({str(go_on)!r}): time.sleep(0.01)\n"
    )
    network.env |= {"PYTHONPATH": str(softrnic_dir), "SHIFTVERBS_BROKER": "own"}
    a, b = network.pair()
    said_of_hello = "etcd has not answered yet: the broker, process "
    for h in (a, b):
        wait_until(lambda h=h: h("ep.qp.shift.why").startswith(said_of_hello), 20, what="why says it")
        assert "has not said hello, for " in h("ep.qp.shift.why")
    go_on.touch()
    for h in (a, b):
        assert h("ep.qp.shift.wait_protected(20)"), h("ep.shift()")
        assert h("ep.qp.shift.why") is None


def test_a_pair_that_never_arms_tells_why(network: Network, faults: Any) -> None:
    """The messages of ARM come through, its zero-length SENDs do not."""
    a, b = network.host("a"), network.host("b")
    names = [h("ep = Endpoint(); ep.name()") for h in (a, b)]
    rules = [faults.drop(f"{h}/soft1", direction="rx", opcode="RC_SEND_ONLY", count=0) for h in "ab"]
    for h, i in ((b, 0), (a, 1)):
        h(f"ep.connect({names[i]!r})")
    lost = "the peer's zero-length SEND does not come"
    for h in (a, b):
        wait_until(lambda h=h: UNFIT in (h("ep.qp.shift.why") or ""), what="why says it")
    for h in (a, b):
        wait_until(lambda h=h: said(h, UNFIT) > 0, 20, what="the log says it")
    wait_until(lambda: said(a, lost) + said(b, lost) > 0, 20, what=lost)
    for rule in rules:
        faults.undrop(rule)
    for h in (a, b):
        assert h("ep.qp.shift.wait_protected(20)"), h("ep.shift()")
        assert h("ep.qp.shift.why") is None
    faults.down("a/soft0")
    for h in (a, b):
        h(f"ep.wait({AWAY!r}, 20)")
        # Each reason once, however often ARM failed.
        lines = [line for line in h.child.lines if "QP" in line and UNFIT in line]
        assert lines and len(lines) == len(set(lines)), lines
    # Away, and PROTECTED: the default NICs cannot stand in, for as long as they cannot.
    for h in (a, b):
        wait_until(
            lambda h=h: "nothing can fail over to pair 0, on soft0: " in (h("ep.qp.shift.why") or ""), 20
        )
        assert h("ep.qp.shift.status") == "PROTECTED"
    assert said(a, "leaving soft0 for soft1: ") == 1 and not said(a, "PORT_ERR on soft0")
    faults.up("a/soft0")
    for h in (a, b):
        h("ep.wait(\"s.state == s.recv_state == 'DEFAULT' and s.why is None\", 30)")


class _Pairs:
    """What a watchdog asks of a connection with two pairs, one of which cannot be connected."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.n_pairs, self.why, self.set_why = 2, None, lambda why: None
        self.driver = SimpleNamespace(announcements=SimpleNamespace(say=lambda *of: self.said.append(of[2])))
        self.shadow = SimpleNamespace(qp_num=7)
        self.protocol, self.pairs = self, [None, None]
        self.reason: str | None = None

    def device(self, k: int) -> str:
        return f"soft{k}"

    def unfit(self, k: int) -> str | None:
        return self.reason if k == 0 else None


def test_a_pair_on_its_way_back_is_not_told_step_by_step() -> None:
    pairs: Any = _Pairs()
    watchdog = Watchdog(pairs)

    def watch(reason: str | None, at_ms: int) -> list[str]:
        pairs.reason, pairs.said[:] = reason, []
        watchdog._watch_fitness(pairs.protocol, at_ms * 1_000_000)
        return [line.partition(": ")[2] for line in pairs.said]

    assert watch("its port is down", 0) == watch("its port is down", 2900) == [] and watchdog.lacking is None
    assert watch("its port is down", 3000) == ["its port is down"] and watch("its port is down", 9000) == []
    assert watchdog.lacking == "nothing can fail over to pair 0, on soft0: its port is down"
    assert (
        watch("it is being connected", 9500)
        == watch("it waits for the peer", 9540)
        == watch(None, 9580)
        == []
    )
    assert watchdog.lacking is None
    # Each step for itself lasts too short, all of them do not: the one that it is in by then is told.
    assert watch("it is being connected", 20000) == watch("it waits for the peer", 22000) == []
    assert watch("it is being connected", 24000) == ["it is being connected"]
    assert watch("it waits for the peer", 26000) == [] and watch("it waits for the peer", 29000) != []
