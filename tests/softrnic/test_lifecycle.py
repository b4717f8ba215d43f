# SPDX-License-Identifier: BSD-3-Clause
"""Opening, closing, forking, dying: nothing leaks, nothing crashes, nothing hangs."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
from harness import Spawn, wait_until

from shiftverbs.softrnic import faults
from softrnic.hosts import Proxy, connect, statuses

PRELUDE = """
import gc, os, sys, threading, time
from shiftverbs import softrnic
softrnic.enable()
import shiftverbs.enums as e
from pyverbs.addr import AHAttr, GID, GlobalRoute
from pyverbs.cq import CQ, CompChannel
from pyverbs.device import Context, get_device_list
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.pyverbs_error import PyverbsError, PyverbsRDMAError
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, RecvWR, SendWR

ACCESS = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE | e.IBV_ACCESS_REMOTE_READ

class End:
    def __init__(self, name="soft0", ctx=None):
        self.ctx = ctx or Context(name=name)
        self.pd = PD(self.ctx)
        self.mr = MR(self.pd, 65536, ACCESS)
        self.channel = CompChannel(self.ctx)
        self.cq = CQ(self.ctx, 300, channel=self.channel)
        ia = QPInitAttr(qp_type=e.IBV_QPT_RC, scq=self.cq, rcq=self.cq, cap=QPCap(128, 128, 1, 1, 64))
        self.qp = QP(self.pd, ia)

    def connect(self, other, rnr_retry=7):
        attr = QPAttr(port_num=1)
        attr.qp_access_flags = ACCESS
        attr.path_mtu = e.IBV_MTU_1024
        attr.dest_qp_num = other.qp.qp_num
        attr.rq_psn = attr.sq_psn = 7
        attr.max_rd_atomic = attr.max_dest_rd_atomic = 4
        attr.min_rnr_timer, attr.timeout, attr.retry_cnt, attr.rnr_retry = 12, 14, 7, rnr_retry
        gid = other.ctx.query_gid(1, 0)
        attr.ah_attr = AHAttr(port_num=1, is_global=1, gr=GlobalRoute(dgid=gid, sgid_index=0))
        self.qp.to_rts(attr)
        self.other = other

    def write(self, wr_id=1, length=60000):
        wr = SendWR(wr_id, opcode=e.IBV_WR_RDMA_WRITE, num_sge=1, sg=[SGE(self.mr.buf, length, self.mr.lkey)],
                    send_flags=e.IBV_SEND_SIGNALED)
        wr.set_wr_rdma(self.other.mr.rkey, self.other.mr.buf)
        self.qp.post_send(wr)

    def receive(self, wr_id=1):
        self.qp.post_recv(RecvWR(wr_id, 1, [SGE(self.mr.buf, 60000, self.mr.lkey)]))

    def wait(self, count=1):
        found = []
        while len(found) < count:
            found += self.cq.poll(count - len(found))[1]
        return found

def pair():
    one, two = End(), End()
    one.connect(two), two.connect(one)
    return one, two

def traffic(one, two):
    # Work of every kind under way: WRITEs, receives, a SEND that nobody takes.
    for i in range(60):
        one.write(i)
        two.write(i)
        one.receive(i)
"""


def test_exit_with_traffic_outstanding(spawn: Spawn) -> None:
    for ending in ("", "sys.exit(0)", "os._exit(0)", "del one, two; gc.collect()", "gc.disable()"):
        spawn("-c", PRELUDE + "one, two = pair(); traffic(one, two)\n" + ending).succeed()


def test_close_in_any_order(spawn: Spawn) -> None:
    """Parents before children, twice, while traffic is under way."""
    spawn(
        "-c",
        PRELUDE
        + """
import itertools, random
for seed in range(20):
    one, two = pair()
    traffic(one, two)
    things = [x for end in (one, two) for x in (end.qp, end.cq, end.mr, end.pd, end.channel, end.ctx)]
    random.Random(seed).shuffle(things)
    for thing in things + things:
        try:
            thing.close()
        except PyverbsError as error:
            print(seed, type(thing).__name__, error)
    del one, two, things, thing
    gc.collect()
print("done")
""",
    ).expect("^done", 40)


def test_nothing_leaks(spawn: Spawn) -> None:
    """Threads, descriptors and memory are where they were after 150 lives."""
    child = spawn(
        "-c",
        PRELUDE
        + """
import resource
def life():
    one, two = pair()
    one.write(), one.wait()
    for end in (one, two):
        end.qp.close(), end.cq.close(), end.channel.close(), end.mr.close(), end.pd.close(), end.ctx.close()
def size():
    return int(open("/proc/self/statm").read().split()[1]) * 4
for _ in range(50):
    life()
gc.collect()
before = len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), size()
for _ in range(150):
    life()
gc.collect()
after = len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), size()
print("before", before, "after", after)
assert after[:2] == before[:2]
assert after[2] - before[2] < 4000, "more than 4 MB for 150 lives"
print("done")
""",
    )
    child.expect("^done", 60)


def test_address_is_given_back_with_the_last_context(hosts: Callable[..., Any]) -> None:
    host = hosts("a")
    first, second = host.open("soft0"), host.open("soft0")
    gid = first.gid()
    assert second.gid() == gid, "one device, one address, however many contexts"
    assert len(faults.device("a/soft0").processes) == 1
    first.close()
    assert second.gid() == gid and len(faults.device("a/soft0").processes) == 1
    second.close()
    assert faults.device("a/soft0").processes == ()
    assert host.open("soft0").port()["state"] == "ACTIVE"


def test_without_proc(hosts: Callable[..., Any]) -> None:
    """In a bare chroot, say: devices open, traffic flows, faults are told, to such a process and by it."""
    unshare = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"])]
    if subprocess.run([*unshare, "true"], capture_output=True).returncode != 0:
        pytest.skip("this machine does not allow mount namespaces")
    hide = 'mount -t tmpfs none /proc && test ! -e /proc/self && exec "$@"'
    bare, other = hosts("a", prefix=[*unshare, "sh", "-c", hide, "sh"]), hosts("b")
    device = bare.open("soft0")
    left, right = device.endpoint(), other.open("soft0").endpoint()
    connect(left, right)
    left.send("RDMA_WRITE", 1, 100)
    assert statuses(left.poll()) == [(1, "SUCCESS")]
    faults.down("a/soft0")
    assert device.event() == "PORT_ERR"
    faults.up("a/soft0")
    assert device.event() == "PORT_ACTIVE"
    bare.call("host", "fault", "kill", "b/soft0")
    assert Proxy(other, "device1").event() == "DEVICE_FATAL"


def test_fork(spawn: Spawn) -> None:
    """The child cannot use the parent's devices, and does no harm to them; it can open its own."""
    child = spawn(
        "-c",
        PRELUDE
        + """
one, two = pair()
one.write(), one.wait()
pid = os.fork()
if pid == 0:
    refused = 0
    for command in (lambda: one.write(), lambda: one.ctx.query_port(1), lambda: MR(one.pd, 64, ACCESS),
                    lambda: PD(one.ctx), lambda: one.qp.query(e.IBV_QP_STATE), lambda: one.cq.poll(1)):
        try:
            command()
        except PyverbsError:
            refused += 1
    for end in (one, two):
        end.qp.close(), end.cq.close(), end.mr.close(), end.pd.close(), end.ctx.close()
    three, four = pair()
    three.write()
    assert three.wait()[0].status == e.IBV_WC_SUCCESS
    print("child refused", refused, "own", str(three.ctx.query_gid(1, 0))[-9:], flush=True)
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
for i in range(20):
    one.write(i)
done = one.wait(20)
assert all(wc.status == e.IBV_WC_SUCCESS for wc in done)
print("parent", str(one.ctx.query_gid(1, 0))[-9:], flush=True)
""",
    )
    refused, own = child.expect(r"child refused (\d) own (\S+)").groups()
    parent = child.expect(r"parent (\S+)").group(1)
    child.succeed()
    assert refused == "6" and own != parent


def test_fork_under_traffic(spawn: Spawn) -> None:
    child = spawn(
        "-c",
        PRELUDE
        + """
one, two = pair()
pids = []
for i in range(15):
    traffic_wrs = 20
    for w in range(traffic_wrs):
        one.write(w)
    pid = os.fork()
    if pid == 0:
        try:
            one.cq.poll(1)
        except PyverbsError:
            os._exit(0)
        os._exit(1)
    pids.append(pid)
    assert all(wc.status == e.IBV_WC_SUCCESS for wc in one.wait(traffic_wrs))
assert all(os.waitpid(pid, 0)[1] == 0 for pid in pids)
print("done")
""",
    )
    child.expect("^done", 30)
    child.succeed()


def test_threads(spawn: Spawn) -> None:
    """Eight threads make, use and close queue pairs on the same device."""
    child = spawn(
        "-c",
        PRELUDE
        + """
ctx = Context(name="soft0")
failures = []
def work():
    try:
        for _ in range(10):
            one, two = End(ctx=ctx), End(ctx=ctx)
            one.connect(two), two.connect(one)
            for i in range(20):
                one.write(i, 5000)
            assert [wc.wr_id for wc in one.wait(20)] == list(range(20))
            for end in (one, two):
                end.qp.close(), end.cq.close(), end.channel.close(), end.mr.close(), end.pd.close()
    except BaseException as error:
        failures.append(repr(error))
threads = [threading.Thread(target=work) for _ in range(8)]
[t.start() for t in threads], [t.join() for t in threads]
assert not failures, failures
print("done")
""",
    )
    child.expect("^done", 60)
    child.succeed()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_killed_process_leaves_nothing(hosts: Callable[..., Any], number: signal.Signals) -> None:
    a, b = hosts("a"), hosts("b")
    left, right = a.open("soft0").endpoint(), b.open("soft0").endpoint()
    connect(left, right, timeout=10, retry_cnt=1)
    left.send("SEND", 1, 10)
    a.process.send_signal(number)
    a.process.wait(10)
    wait_until(lambda: faults.device("a/soft0").processes == (), what="the address is free")
    right.send("SEND", 2, 10)
    assert statuses(right.poll(1, 10)) == [(2, "RETRY_EXC_ERR")]
    hosts("a").open("soft0")
    assert len(faults.device("a/soft0").processes) == 1


def test_interrupted_wait(spawn: Spawn) -> None:
    """A signal gets through to a program that waits for a completion event."""
    child = spawn(
        "-c",
        PRELUDE
        + """
import signal
one, two = pair()
def stop(number, frame):
    raise KeyboardInterrupt
signal.signal(signal.SIGUSR1, stop)
one.cq.req_notify()
try:
    print("waiting", flush=True)
    one.channel.get_cq_event(one.cq)
except (KeyboardInterrupt, PyverbsRDMAError) as error:
    print("woken", type(error).__name__, flush=True)
""",
    )
    child.expect("^waiting")
    child.signal(signal.SIGUSR1)
    child.expect("^woken")
    child.succeed()
