# SPDX-License-Identifier: BSD-3-Clause
"""The mirror with failover running: closed, interrupted, forked, left to the exit."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import random
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

import pytest
from one_process import Verbs, collect, whose

import shiftverbs  # opens the software RNIC before pyverbs
from mirror.shadowed.tools import (
    Logged,
    both_protected,
    cable,
    held_up,
    nics_are_idle,
    pending,
    protected,
    settled,
    until,
)
from shiftverbs.pyverbs_error import PyverbsRDMAError, PyverbsUserError
from shiftverbs.shadows import pyverbs_objects


@pytest.mark.parametrize("seed", range(3))
def test_teardown_in_any_order(v: Verbs, seed: int) -> None:
    """Shadows pending, ready, in use; parents first; twice."""
    rng = random.Random(seed)
    for _ in range(25):
        ctx = v.context()
        channel = v.cq.CompChannel(ctx)
        pds = [v.pd.PD(ctx) for _ in range(2)]
        cqs = [v.cq.CQ(ctx, 30, None, rng.choice([None, channel])) for _ in range(2)]
        mrs = [v.mr.MR(rng.choice(pds), 4096, 1) for _ in range(3)]
        pairs = [v.pair(ctx, pds[0], rng.choice(cqs), rng.choice(cqs)) for _ in range(2)]
        qps = [qp for pair in pairs for qp in pair]
        pause = rng.random()
        if pause < 0.3:
            settled(qps[-1])
        elif pause < 0.5:
            qps[0].shift.wait_protected(5)
        for first, second in pairs:
            mr = v.mr.MR(pds[0], 4096, 1)
            v.receive(second, mr, 1)
            v.send(first, mr, 2)
        things = [ctx, channel, *pds, *cqs, *mrs, *qps]
        rng.shuffle(things)
        for thing in things[: rng.randrange(len(things))]:
            thing.close()
        for thing in things:
            thing.close()
        del first, second, mr, pairs, things
    nics_are_idle()


def test_garbage_in_cycles(v: Verbs) -> None:
    """Objects in reference cycles, so that the collector finds parents before children."""

    class Holder:
        pass

    for number in range(40):
        holder = Holder()
        holder.me = holder  # type: ignore[attr-defined]
        order = ["ctx", "pd", "cq", "channel", "mr", "qps", "ah", "ud"]
        made: dict[str, Any] = {"ctx": v.context()}
        made["channel"] = v.cq.CompChannel(made["ctx"])
        made["pd"] = v.pd.PD(made["ctx"])
        made["cq"] = v.cq.CQ(made["ctx"], 30, None, made["channel"])
        made["mr"] = v.mr.MR(made["pd"], 4096, 1)
        made["qps"] = v.pair(made["ctx"], made["pd"], made["cq"])
        route = v.addr.GlobalRoute(dgid=made["ctx"].query_gid(1, 0), sgid_index=0)
        made["ah"] = v.addr.AH(made["pd"], attr=v.addr.AHAttr(gr=route, is_global=1, port_num=1))
        ud = v.qp.QPInitAttr(qp_type=v.e.IBV_QPT_UD, scq=made["cq"], rcq=made["cq"], cap=v.cap())
        made["ud"] = v.qp.QP(made["pd"], ud, v.qp.QPAttr(port_num=1))
        random.Random(number).shuffle(order)
        for name in order:
            setattr(holder, name, made[name])
        if number % 3 == 0:
            # Our objects have a __dict__: the program may tie them into the cycle directly.
            for thing in (made["ctx"], made["pd"], made["cq"], made["mr"], *made["qps"]):
                thing.holder = holder
        if number % 4 == 0:
            settled(made["qps"][1])
        del holder, made
        if number % 5 == 0:
            gc.collect()
    from shiftverbs.mirroring import lifetime

    def all_gone() -> bool:
        gc.collect()  # what the driver held for a moment is found by a later one
        return not lifetime._waiting

    until(all_gone)
    nics_are_idle()


def in_child(work: Callable[[], Any]) -> None:
    """Run work() in a forked child, which then ends without the interpreter's own; it has to go well."""
    child = os.fork()
    if child == 0:
        status = 9
        try:
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, work


def test_fork_with_shadows(v: Verbs, logged: Logged) -> None:
    """A forked child that closes, collects and ends as it likes leaves the parent's protection alone."""
    ctx, _, cq, mr, first, second = protected(v)
    sys.stdout.flush()

    def use(ending: Callable[[], Any]) -> None:
        assert first.shift.status  # may be asked
        ending()

    def error_and_close() -> None:
        with contextlib.suppress(PyverbsRDMAError):  # the device is the parent's
            second.modify(v.qp.QPAttr(qp_state=v.e.IBV_QPS_ERR), v.e.IBV_QP_STATE)
        ctx.close()
        assert first.shift.status == "UNPROTECTED"

    for ending in (int, gc.collect, mr.close, error_and_close) * 3:
        in_child(lambda: use(ending))
    assert first.shift.status == "PROTECTED"
    cable("down")
    for number in range(5):
        v.receive(second, mr, number)
        v.send(first, mr, 100 + number)
    assert [wc.status for wc in collect(cq, 10)] == [0] * 10
    cable("up")
    ctx.close()
    logged.take("leaving soft0")


def as_with_pyverbs(v: Verbs, ctx: Any, made_before: dict[str, Any]) -> None:
    """Every control verb in a forked child, on what it inherited and on what it makes: nothing has a shadow."""
    reason = shiftverbs.failover.runtime.FORKED
    pd, channel = v.pd.PD(ctx), v.cq.CompChannel(ctx)
    cq = v.cq.CQ(ctx, 20, None, channel)
    memory = v.mr.MR(pd, 4096, 3)
    memory.rereg(v.e.IBV_REREG_MR_CHANGE_ACCESS, access=1)
    made = [pd, channel, cq, memory, *v.pair(ctx, pd, cq)]
    old = made_before.get("pd", pd), made_before.get("cq", cq), made_before.get("channel", channel)
    made += [v.mr.MR(old[0], 4096, 1), v.cq.CQ(ctx, 10, None, old[2]), *v.pair(ctx, old[0], old[1])]
    mixed = v.qp.QP(old[0], v.rc(cq))
    made += [mixed, v.qp.QP(pd, v.rc(old[1]))]
    assert all(each._shadow is None for each in made)
    for qp in (made[4], made[8], mixed):
        assert (qp.shift.status, qp.shift.why) == ("UNPROTECTED", reason), qp.shift
    v.receive(made[5], memory, 1)
    cq.req_notify()
    v.send(made[4], memory, 2)
    channel.get_cq_event(cq)
    cq.ack_events(1)
    assert sorted(wc.wr_id for wc in collect(cq, 2)) == [1, 2]
    late = made[7]
    late.req_notify()
    plain = v.qp.QP(old[0], v.rc(late))
    plain.to_rts(v.attr(ctx, plain.qp_num))
    v.receive(plain, made[6], 3)
    v.send(plain, made[6], 4)
    old[2].get_cq_event(late)
    late.ack_events(1)
    assert sorted(wc.wr_id for wc in collect(late, 2)) == [3, 4]
    if "mr" in made_before:
        made_before["mr"].rereg(v.e.IBV_REREG_MR_CHANGE_ACCESS, access=3)
        made_before["cq"].resize(40)
        assert made_before["cq"].cqe >= 40
    for each in reversed([*made, plain]):
        each.close()
        each.close()


def test_made_in_a_forked_child(v: Verbs) -> None:
    """On a Context of its own a child does all as with pyverbs, whatever other threads were at when it was forked."""
    ctx = v.context()
    cq = v.cq.CQ(ctx, 20)
    v.pair(ctx, v.pd.PD(ctx), cq)
    protection = shiftverbs.mirroring.eligibility
    held, go = threading.Event(), threading.Event()

    def hold() -> None:
        with protection._lock, ctx._domain.async_events._lock, cq._shadow._lock:  # as while NICs are opened
            held.set()
            go.wait(30)

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(10)

    def child() -> None:
        signal.alarm(20)
        as_with_pyverbs(v, v.context(), {})
        ctx.close()

    in_child(child)
    go.set()
    holder.join()
    ctx.close()


def test_made_from_what_a_forked_child_inherited(v: Verbs, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the parent's Context too. The software RNIC refuses that, so it is told of no other process: we alone are."""
    ctx, pd, cq, mr, first, second = protected(v, channel=True)
    channel = cq.comp_channel
    nics_are_idle()
    parent, held = os.getpid, mr._shadow
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: parent() + 1)
        as_with_pyverbs(v, ctx, {"pd": pd, "cq": cq, "channel": channel, "mr": mr})
    mr._shadow = held
    assert not pending(*ctx._domain.backups)
    assert first.shift.status == "PROTECTED"
    ctx.close()


def test_a_handler_uses_the_context_while_nics_open(v: Verbs) -> None:
    """A Context has one domain, whoever asked first; one closed meanwhile has none."""
    backup, waiting = shiftverbs.shadows.nic, shiftverbs.process.waiting
    in_slices, made = waiting.in_slices, []

    def signalled(*args: Any) -> bool:
        backup.in_slices = in_slices
        signal.raise_signal(signal.SIGALRM)
        waiting.look_for_signals()  # as between two slices
        return in_slices(*args)

    def pd_amid(ctx: Any, handler: Callable[[], Any]) -> Any:
        signal.signal(signal.SIGALRM, lambda *_: made.append(handler()))
        backup.in_slices = signalled
        pd = v.pd.PD(ctx)
        assert backup.in_slices is in_slices and len(made) == 1
        return pd

    ctx = v.context()
    pd = pd_amid(ctx, lambda: v.pd.PD(ctx))
    watched = shiftverbs.failover.runtime.current().driver.nic_events._watched_events
    assert pd._shadow.domain is made.pop()._shadow.domain is ctx._domain
    both_protected(*v.pair(ctx, pd, v.cq.CQ(ctx, 20)))
    assert list(watched) == [ctx._domain.async_events], watched
    ctx.close()
    assert not watched
    for use in (lambda: None, lambda: v.pd.PD(ctx)):
        ctx = v.context()
        pd = pd_amid(ctx, lambda use=use: (use(), ctx.close()))
        made.clear()
        assert pd._shadow is None and pd._why == "its context is closed"
    shiftverbs.failover.runtime.current().driver.run()
    assert not watched


kept: list[Any] = []


def test_left_to_the_exit(v: Verbs) -> None:
    """Everything is still open, and referenced by a module, when the interpreter ends."""
    ctx, pd, cq, mr, *pair = protected(v)
    v.receive(pair[1], mr, 1)
    v.send(pair[0], mr, 2)
    kept.extend([pair, mr, cq, pd, ctx, [kept]])


def test_left_to_the_exit_while_pending(v: Verbs) -> None:
    ctx = v.context()
    pd, cq = v.pd.PD(ctx), v.cq.CQ(ctx, 20)
    kept.extend([v.pair(ctx, pd, cq), v.mr.MR(pd, 1 << 20, 1), cq, pd, ctx])


def test_left_to_the_exit_in_cycles(v: Verbs) -> None:
    """Some closed, some open, in cycles with modules, with the collector off: the interpreter's own order."""

    class Holder:
        pass

    for number in range(12):
        ctx = v.context()
        pd, cq = v.pd.PD(ctx), v.cq.CQ(ctx, 20)
        holder = Holder()
        holder.things = [holder, ctx, pd, cq, v.mr.MR(pd, 4096, 1), *v.pair(ctx, pd, cq)]  # type: ignore[attr-defined]
        for thing in holder.things[1:]:  # type: ignore[attr-defined]
            thing.holder = holder
        if number % 2:
            ctx.close()
        if number % 3 == 0:
            vars(shiftverbs)[f"_kept{number}"] = holder
        if number % 4:
            kept.append(holder)
    gc.disable()


def test_closed_objects_do_not_crash(v: Verbs) -> None:
    ctx, _, cq, mr, first, second = v.connected(channel=True)
    channel = cq.comp_channel
    first.close()
    for use in (v.send, v.receive):
        with pytest.raises(PyverbsRDMAError) as refused:
            use(first, mr, 1)
        assert refused.value.error_code == errno.EINVAL
    cq.close()
    assert second.shift.why == "it is closed"
    assert cq.poll(1) == (0, [])
    channel.close()
    with pytest.raises(PyverbsUserError, match="closed"):
        print(channel.fd)
    ctx.close()


def test_an_interrupted_close_can_be_repeated(v: Verbs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while close waits for a NIC that hangs: whatever closes the QP next does all that is left."""
    ctx, _, cq, mr, first, second = protected(v)
    whole = shiftverbs.failover.runtime.Runtime.qp_closing

    def interrupted(machinery: Any, held: Any) -> None:
        monkeypatch.undo()
        whole(machinery, held)
        raise KeyboardInterrupt

    monkeypatch.setattr(shiftverbs.failover.runtime.Runtime, "qp_closing", interrupted)
    with pytest.raises(KeyboardInterrupt):
        first.close()
    first.close()
    assert first.shift.why == "it is closed" and not first._shadow
    ctx.close()
    nics_are_idle()
    shiftverbs.failover.runtime.current().driver.run()  # what could not be destroyed would be told


def test_an_interrupted_dereg_waits_when_it_is_repeated(v: Verbs) -> None:
    """Ctrl-C while a NIC that hangs has the memory: it is not the application's before the NIC let go of it."""
    ctx = v.context()
    mr = v.mr.MR(v.pd.PD(ctx), 4096, 1)
    assert settled(mr).state(1) == "ready"
    go = threading.Event()
    for nic in ctx._domain.backups:
        held_up(nic, go)

    module, in_slices = shiftverbs.shadows.mr, shiftverbs.process.waiting.in_slices

    def close_amid(happens: Callable[[], Any]) -> None:
        def waits(*args: Any) -> bool:
            module.in_slices = in_slices
            happens()
            return in_slices(*args)

        module.in_slices = waits
        mr.close()

    signal.signal(signal.SIGALRM, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt):
        close_amid(lambda: signal.raise_signal(signal.SIGALRM))
    assert pyverbs_objects.mr_pointer(mr) and not go.is_set()
    close_amid(go.set)
    assert go.is_set() and not pyverbs_objects.mr_pointer(mr)
    ctx.close()


def test_a_destroyed_cq_is_not_polled(v: Verbs) -> None:
    """A backup NIC is slow to destroy a shadow QP, whose journal ends only then, when its CQ has long been closed."""
    ctx, _, cq, mr, first, second = v.connected()
    settled(first)
    v.receive(second, mr, 1)
    v.send(first, mr, 2)
    core, journal = cq._core, first._core
    go = threading.Event()
    busy = [held_up(nic, go) for nic in ctx._domain.backups]
    known: list[int] = []
    close_shadow = cq._shadow.close

    def closes() -> None:
        # Between the default CQ's destruction and the core's end the NICs' threads may run.
        with pytest.raises(ValueError, match="no CQ on NIC 0"):
            core.set_active(0, True)
        known.append(0)
        close_shadow()

    cq._shadow.close = closes
    cq.close()
    assert known == [0]
    assert not journal.closed
    go.set()
    for future in busy:
        future.result(30)
    until(lambda: journal.closed)
    ctx.close()


def test_a_cq_that_cannot_be_destroyed_works_on(v: Verbs) -> None:
    ctx = v.context()
    pd, cq = v.pd.PD(ctx), v.cq.CQ(ctx, 20)
    # A QP on it that pyverbs does not know of.
    verbs = ctx._domain.nic.verbs
    pointers = [pyverbs_objects.pointer(one) for one in (pd, cq, cq)]
    stranger, _, _ = verbs.create_qp(*pointers, (4, 4, 1, 1, 0), 1)
    with pytest.raises(PyverbsRDMAError) as refused:
        cq.close()
    assert refused.value.error_code == errno.EBUSY
    mr = v.mr.MR(pd, 4096, 1)
    first, second = v.pair(ctx, pd, cq)
    v.exchange(first, second, mr, cq, 1, 2)
    verbs.destroy_qp(stranger)
    cq.close()
    ctx.close()


def test_ends_of_its_own(v: Verbs, monkeypatch: pytest.MonkeyPatch, logged: Logged) -> None:
    """A program's `__del__` that is broken off does not keep ours from being run; where it is not, that is told."""
    ctx = v.context()
    pd, cq = v.pd.PD(ctx), v.cq.CQ(ctx, 20)
    ignored: list[str] = []
    monkeypatch.setattr(
        sys, "unraisablehook", lambda what: ignored.append(f"{whose(what)}: {what.exc_value}")
    )

    def handler(number: int, frame: Any) -> None:
        raise InterruptedError("now")

    signal.signal(signal.SIGUSR1, handler)

    class Interrupted(v.qp.QP):  # type: ignore[name-defined,misc]
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGUSR1)

    class Twice(v.pd.PD):  # type: ignore[name-defined,misc]
        def __del__(self) -> None:
            super().__del__()
            raise ValueError("twice")

    class Revived(v.qp.QP):  # type: ignore[name-defined,misc]
        def __del__(self) -> None:
            revived.append(self)

    class Late(v.qp.QP):  # type: ignore[name-defined,misc]
        pass

    settled(Interrupted(pd, v.rc(cq)))
    assert ignored.pop().endswith("Interrupted.__del__: now") and not ignored
    # A parent that the collector finds before its child waits for that, and once.
    parent = Twice(ctx)
    parent.child = v.mr.MR(parent, 4096, 1)
    del parent
    gc.collect()
    assert ignored.pop().endswith("Twice.__del__: twice") and not ignored
    assert not shiftverbs.mirroring.lifetime._waiting and not [
        one for one in gc.get_objects() if type(one) is Twice
    ]
    pd.close()  # nothing is left on it
    pd = v.pd.PD(ctx)
    revived: list[Any] = []
    Late.__del__ = lambda self: None  # type: ignore[method-assign]
    for cls, name in ((Late, "Late"), (Revived, "Revived")):
        cls(pd, v.rc(cq))
        assert [qp.qp_state for qp in revived] == ([v.e.IBV_QPS_RESET] if cls is Revived else [])
        revived.clear()
        assert len(logged.take(f"{name} was dropped")) == 1 and not logged
    assert not ignored
    try:
        pd.close()
    except PyverbsRDMAError as error:
        assert error.error_code == errno.EBUSY
