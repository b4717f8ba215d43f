# SPDX-License-Identifier: BSD-3-Clause
"""Taking protected resources down in any order, twice, by the collector, in a forked child, with work outstanding."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import EtcdServer, wait_until
from hosts import AWAY, Host, Network, connect, go

ORDERS = [
    "qp mr cq pd context",
    "context qp mr cq pd",
    "pd context mr qp cq",
    "cq qp context pd mr",
    "mr mr qp qp cq cq pd pd context context",
]
#: Whether what multiprocessing forks ends as a process does.
ENDS = sys.version_info >= (3, 13)
EXIT = "import gc, sys; gc.collect()"


def leave(host: Host) -> None:
    """End the host as a program ends; it must do so at once and with status 0."""
    host.child.process.stdin.close()  # type: ignore[union-attr]
    assert host.child.wait(20) == 0, host.child.output
    for bad in ("Fatal Python error", "Traceback", "Segmentation", "Exception ignored"):
        assert bad not in host.child.output, host.child.output


def keys_gone(etcd: EtcdServer, job: str) -> None:
    """Nothing of this job is left in etcd."""
    wait_until(lambda: not etcd.items(f"/shiftverbs/{job}/"), 5, "the keys are withdrawn")


@pytest.mark.parametrize("order", ORDERS)
def test_any_order(network: Network, shared_etcd: EtcdServer, job: str, order: str) -> None:
    a, b = network.protected()
    b("[ep.recv(i) for i in range(8)]")
    a("[ep.post('SEND', wr_id=i) for i in range(8)]")
    for name in order.split():
        try:
            a(f"ep.{name}.close()")
        except Exception as error:  # as with pyverbs: a parent may refuse while it has children
            assert "PyverbsRDMAError" in str(error), error
    leave(a)
    leave(b)
    keys_gone(shared_etcd, job)


@pytest.mark.parametrize("state", ["home", "away"])
def test_just_leaving(network: Network, shared_etcd: EtcdServer, job: str, faults: Any, state: str) -> None:
    """No close at all, WRs outstanding, threads running."""
    a, b = network.protected()
    b("[ep.recv(i) for i in range(4)]")
    if state == "away":
        faults.down("a/soft0")
        a(f"ep.wait({AWAY!r})")
    a("[ep.post('SEND', wr_id=i) for i in range(8)]")
    leave(a)
    leave(b)
    keys_gone(shared_etcd, job)


@pytest.mark.parametrize("where", ["home", "away", "back"])
def test_a_program_s_own_end(network: Network, faults: Any, where: str) -> None:
    """Registered behind the import and before the first Context: it moves its QP to ERR, and waits for the flushes."""
    a, b = network.host("a"), network.host("b")
    a(
        """
def last():
    at = qp.QPAttr()
    at.qp_state = e.IBV_QPS_ERR
    ep.qp.modify(at, e.IBV_QP_STATE)
    print("told", [wc[:2] for wc in ep.poll(4, 10)], flush=True)
"""
    )
    a("import atexit; _ = atexit.register(last)")
    connect(a, b)
    for host in (a, b):
        assert host("ep.qp.shift.wait_protected(20)"), host("ep.shift()")
    go(faults, where, a, b)
    a("[ep.recv(i) for i in range(4)]")
    leave(a)
    assert f"told {[[i, 'WR_FLUSH_ERR'] for i in range(4)]}" in a.child.output, a.child.output


CHILD = """
import atexit, multiprocessing, sys
from shiftverbs.failover import runtime

def child(pipe):
    mine = runtime.current()
    stop = mine.stop
    atexit.register(lambda: os.write(pipe, b"the program's; " if not mine.driver.stopped else b"too late; "))

    def told():
        stop()
        os.write(pipe, b"ours; ")

    mine.stop = told

read, write = os.pipe()
"""


def test_a_forked_child_ends_as_its_parent_does(network: Network) -> None:
    """It has failover of its own, which ends behind its program's own handlers, and once."""
    a = network.host("a")
    a(CHILD)
    a("pid = os.fork()\nif pid == 0: child(write); sys.exit()")
    assert a("os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])") == 0
    assert a("os.read(read, 100).decode()") == "the program's; ours; "


@pytest.mark.parametrize("process", ["context.Process", "multiprocessing.Process", "Subclass"])
def test_a_child_of_multiprocessing_ends_too(network: Network, process: str) -> None:
    """From Python 3.13 on, behind what it has registered itself. Before that it runs no handlers at exit."""
    a = network.host("a")
    a(CHILD)
    a("context = multiprocessing.get_context('fork'); multiprocessing.set_start_method('fork')")
    a("class Subclass(multiprocessing.Process): pass")
    a(f"it = {process}(target=child, args=(write,)); it.start(); it.join()")
    assert a("it.exitcode") == 0
    a("os.write(write, b'.')")
    told = "the program's; ours; ." if ENDS else "."
    assert a("os.read(read, 100).decode()") == told


CHILDREN = """
import atexit, multiprocessing, os
from shiftverbs.failover import runtime

def tell(file, what):
    with open(file, "a") as told:
        told.write(what)

def begin(file):
    mine = runtime.current()
    stop = mine.stop
    atexit.register(lambda: tell(file, "too late; " if mine.driver.stopped else "the program's; "))
    mine.stop = lambda: (stop(), tell(file, "ours; "))

class Begins:
    def __init__(self, file):
        self.file = file

    def __setstate__(self, state):
        begin(state["file"])

def nothing(*args):
    pass

def outer(file):
    it = multiprocessing.Process(target=nothing)
    it.start()
    it.join()

def get_logger_behind(file):
    begin(file)
    multiprocessing.get_logger()
"""


BEGINS = """
import os
import children

def nothing():
    pass

if "BEGINS" in os.environ:
    children.begin(os.environ["BEGINS"])
"""


@pytest.fixture
def children(network: Network, tmp_path: Path) -> Host:
    """A host that has multiprocessing, and children's functions to begin with."""
    (tmp_path / "children.py").write_text(CHILDREN)
    (tmp_path / "begins.py").write_text(BEGINS)
    a = network.host("a")
    a(
        f"sys.path.insert(0, {str(tmp_path)!r}); import multiprocessing, children; file = {str(tmp_path / 'told')!r}"
    )
    return a


def ends_of(a: Host, method: str, process: str) -> str:
    """What is told of the end of a process, and of its children's."""
    a(f"multiprocessing.set_start_method({method!r}, force=True); it = multiprocessing.Process({process})")
    a("it.start(); it.join()")
    assert a("it.exitcode") == 0
    return str(a("open(file).read() if os.path.exists(file) else ''"))


@pytest.mark.parametrize(
    "moment", ["a hook of its fork", "a hook of its child's fork", "unpickling", "importing"]
)
def test_a_child_of_multiprocessing_begins_before_it_is_itself(children: Host, moment: str) -> None:
    """And is to forget then what it has registered. Before Python 3.13 it runs nothing at its end."""
    a = children
    method, process = "forkserver", "target=children.nothing, args=(children.Begins(file),)"
    if moment.startswith("a hook"):
        method, process = "fork", "target=children.nothing"
        a("depth = 0")
        if moment == "a hook of its child's fork":
            process = "target=children.outer, args=(file,)"
            a("depth = 1")
        a(
            """
def hook():
    global depth
    depth -= 1
    if depth == -1:
        children.begin(file)

os.register_at_fork(after_in_child=hook)
"""
        )
    elif moment == "importing":
        process = "target=begins.nothing"
        a("import begins; os.environ['BEGINS'] = file")
    a("multiprocessing.set_forkserver_preload(['shiftverbs.failover.runtime'])")
    # multiprocessing forgets what the program has registered in the hook, too.
    told = "ours; " if moment.startswith("a hook") else "the program's; ours; "
    assert ends_of(a, method, process) == (told if ENDS else "")


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_where_atexit_knows_us_multiprocessing_is_not_asked(children: Host, method: str) -> None:
    """Its logger moves its end before that of what was registered, and so would ours be."""
    told = ends_of(children, method, "target=children.get_logger_behind, args=(file,)")
    assert told == ("the program's; ours; " if ENDS or method == "spawn" else "")


@pytest.mark.parametrize("what", ["None", "types.ModuleType('multiprocessing')", "Raises('multiprocessing')"])
def test_multiprocessing_is_not_what_it_should_be(children: Host, what: str) -> None:
    """In a child that it has forked: failover begins all the same."""
    a = children
    a(
        f"""
import types

class Raises(types.ModuleType):
    def __getattr__(self, name):
        raise ImportError(name)

def child():
    sys.modules["multiprocessing"] = {what}
    children.begin(file)
    children.tell(file, "begun; ")
"""
    )
    assert ends_of(a, "fork", "target=child") == "begun; " + ("the program's; ours; " if ENDS else "")


@pytest.mark.parametrize("module", ["multiprocessing", "multiprocessing.process"])
def test_it_begins_while_another_thread_imports_multiprocessing(network: Network, module: str) -> None:
    """Of which nothing is there yet but the name."""
    a = network.host("a")
    a(f"import types; before = sys.modules.copy(); sys.modules[{module!r}] = types.ModuleType({module!r})")
    a("ep = Endpoint(); sys.modules.update(before)")
    assert a("ep.shift()['status']") == "PAIRING"


def test_what_the_end_logs_is_written(network: Network) -> None:
    """Under the driver's lock a thread of ours writes it, into a handler that takes its time."""
    a, b = network.host("a"), network.host("b")
    a(
        """
import logging

class Slow(logging.Handler):
    def emit(self, record):
        time.sleep(0.3)
        print("logged:", record.getMessage(), flush=True)

logging.getLogger("shiftverbs").addHandler(Slow())
"""
    )
    connect(a, b)
    for host in (a, b):
        assert host("ep.qp.shift.wait_protected(20)"), host("ep.shift()")
    a(
        """
from shiftverbs.failover import runtime

def flush():
    logging.getLogger("shiftverbs.driver").warning("a first line")
    raise OSError(28, "the channel refuses")

runtime.current().driver.channel.flush = flush
"""
    )
    a.child.process.stdin.close()  # type: ignore[union-attr]
    assert a.child.wait(20) == 0
    assert "logged: a first line" in a.child.output, a.child.output
    assert "logged: the peers were not told" in a.child.output, a.child.output


def test_garbage(network: Network, shared_etcd: EtcdServer, job: str) -> None:
    """Cycles of protected objects, collected in whatever order; nothing is left of them."""
    a, b = network.protected()
    a("import gc, os; gc.collect()")
    a("threads = len(os.listdir('/proc/self/task')); fds = len(os.listdir('/proc/self/fd'))")
    a(
        """
def one():
    x, y = Endpoint(shared=ep), Endpoint(shared=ep)
    x.me, x.qp.ep, y.x, x.y = x, x, x, y
    x.connect(y.name()); y.connect(x.name())
    return x.qp.shift.wait_protected(10) and y.qp.shift.wait_protected(10)
"""
    )
    assert a("[one() for _ in range(5)]") == [True] * 5
    a("for _ in range(3): gc.collect()")
    wait_until(lambda: a("len(os.listdir('/proc/self/fd')) <= fds + 1"), what="descriptors are back")
    assert a("len(os.listdir('/proc/self/task'))") == a("threads")
    prefix = f"/shiftverbs/{job}/qp/"
    wait_until(lambda: len(shared_etcd.items(prefix)) == 2, 5, "only the live QPs are published")
    b("ep.recv(1)")
    a("ep.post('SEND', wr_id=3)")
    assert a("ep.poll(1)")[0][:2] == [3, "SUCCESS"]
    leave(a)
    leave(b)


def test_connected_to_itself(network: Network) -> None:
    """One QP at both ends: nothing to pair, and it works as with pyverbs."""
    a = network.host("a")
    a("ep = Endpoint(); ep.connect(ep.name()); ep.recv(1); ep.post('SEND', wr_id=3)")
    assert sorted(wc[:2] for wc in a("ep.poll(2)")) == [[1, "SUCCESS"], [3, "SUCCESS"]]
    assert not a("ep.qp.shift.wait_protected(10)")
    assert "itself" in a("ep.shift()['why']")
    leave(a)


def test_repeated_connections_leave_nothing(network: Network, shared_etcd: EtcdServer, job: str) -> None:
    a, b = network.host("a"), network.host("b")
    for h in (a, b):
        h("first = Endpoint(); import os")
    counts = []
    for _ in range(4):
        connect(a, b, setup="shared=first")
        for h in (a, b):
            assert h("ep.qp.shift.wait_protected(10)")
        b("ep.recv(1)")
        a("ep.post('SEND', wr_id=3)")
        assert a("ep.poll(1)")[0][:2] == [3, "SUCCESS"]
        assert b("ep.poll(1)")[0][:2] == [1, "SUCCESS"]
        for h in (a, b):
            h("ep.qp.close(); ep.mr.close(); ep = None")
        counts.append([h("len(os.listdir('/proc/self/fd'))") for h in (a, b)])
        wait_until(lambda: not shared_etcd.items(f"/shiftverbs/{job}/qp/"), 5, "the QPs are withdrawn")
    assert counts[1] == counts[-1]
    a("driver = first.qp._shadow.domain.runtime.driver")
    assert a("len(driver.connections)") == 0  # `first` was never connected
    wait_until(lambda: a("driver.channel.paths") == {}, 5, "the paths are closed")
    leave(a)
    leave(b)


def test_fork(network: Network, faults: Any) -> None:
    """A child of the application leaves everything alone; the parent goes on, protected."""
    a, b = network.protected()
    b("[ep.recv(i) for i in range(4)]")
    assert (
        a(
            """
import os, gc
pid = os.fork()
if pid == 0:
    shift = ep.qp.shift
    known = shift.status == "UNPROTECTED" and "forked" in shift.why and not shift.wait_protected(0)
    ep.qp.close(); ep.cq.close(); ep = None; gc.collect()
    os._exit(7 if known else 8)
os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""
        )
        == 7
    )
    assert a("import subprocess; subprocess.run(['true']).returncode") == 0
    a("ep.post('SEND', wr_id=1)")
    assert a("ep.poll(1)")[0][:2] == [1, "SUCCESS"]
    faults.down("a/soft0")
    a("ep.post('SEND', wr_id=2)")
    assert a("ep.poll(1)")[0][:2] == [2, "SUCCESS"]
    assert a("ep.shift()['path']") == "soft1"
    leave(a)
    leave(b)


def test_fork_that_exits_as_a_program(network: Network) -> None:
    """The child runs exit handlers and finalisers; the parent's keys and connections stay."""
    a, b = network.protected()
    assert (
        a(
            """
import os, sys
pid = os.fork()
if pid == 0:
    sys.stdin = open(os.devnull)
    sys.exit(0)
os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""
        )
        == 0
    )
    b("ep.recv(1)")
    a("ep.post('SEND', wr_id=1)")
    assert a("ep.poll(1)")[0][:2] == [1, "SUCCESS"]
    assert b("ep.shift()['status']") == "PROTECTED"


def test_close_in_every_state(network: Network, faults: Any) -> None:
    """Away, coming home, failing: close must return, the peer must be told, nobody crashes."""
    moments = ["faults.down", "faults.up", "faults.switch"]
    for moment in moments:
        a, b = network.protected()
        b("[ep.recv(i) for i in range(8)]")
        if moment != "faults.switch":
            faults.down("a/soft0")
            a(f"ep.wait({AWAY!r})")
        a("[ep.post('SEND', wr_id=i) for i in range(4)]")
        if moment == "faults.up":
            faults.up("a/soft0")
        if moment == "faults.switch":
            faults.switch_down("rail0")
        a("ep.qp.close()")
        wait_until(lambda: b("ep.shift()['status']") != "PROTECTED", what=f"b is told ({moment})")
        leave(a)
        leave(b)
        faults.clear()


def test_eight_threads_creating_qps(network: Network) -> None:
    """A connects all of its QPs before B starts with any, in eight threads."""
    a, b = network.host("a"), network.host("b")
    make = """
import threading
first = Endpoint()
eps = [None] * 8
def work(i):
    eps[i] = Endpoint(shared=first, depth=8)
def everywhere(f):
    threads = [threading.Thread(target=f, args=(i,)) for i in range(8)]
    [t.start() for t in threads]; [t.join() for t in threads]
everywhere(work)
[x.name() for x in eps]
"""
    names = {h: h(make) for h in (a, b)}
    for h, peer in ((a, b), (b, a)):
        h(f"peers = {names[peer]!r}; everywhere(lambda i: eps[i].connect(peers[i]))")
    for h in (a, b):
        assert h("[x.qp.shift.wait_protected(20) for x in eps]") == [True] * 8
    order = list(itertools.chain(range(8)))
    b(f"[eps[i].recv(i) for i in {order}]")
    a(f"[eps[i].post('SEND', wr_id=i) for i in {order}]")
    assert sorted(wc[0] for wc in a("first.poll(8)")) == order
    assert sorted(wc[0] for wc in b("first.poll(8)")) == order
    leave(a)
    leave(b)
