# SPDX-License-Identifier: BSD-3-Clause
"""Cases of NicWorker, on fake QPs (small numbers): see fake_verbs.c."""

from __future__ import annotations

import atexit
import ctypes
import errno
import gc
import os
import random
import signal
import sys
import threading
import time
import weakref
from concurrent.futures import CancelledError
from typing import Any

from fakes import calls, fds, in_child, library, n_calls, threads, until

from shiftverbs import _nic

RESET, INIT, RTR, RTS, ERR = 0, 1, 2, 3, 6


def steps(*states: int) -> _nic.ModifySteps:
    """Transitions through these states."""
    result = _nic.ModifySteps()
    for state in states:
        result.add(state=state)
    return result


class Tag:
    """Something that can be watched dying."""


def case_commands_run_in_the_order_of_submission_and_jobs_behind() -> None:
    seed = 7
    print("seed", seed)
    rng = random.Random(seed)
    worker = _nic.NicWorker("order")
    expected: list[tuple[int, int]] = []
    jobs: list[tuple[int, int]] = []
    futures = []
    tags = []
    for number in range(300):
        if rng.random() < 0.3:
            # A job sees the commands queued before it, and perhaps later ones.
            before = len(expected)
            futures.append(worker.call(lambda before=before: jobs.append((before, n_calls()))))
        else:
            qp = rng.randrange(1, 5)
            states = [rng.choice([RESET, INIT, RTR, RTS, ERR]) for _ in range(rng.randrange(1, 4))]
            worker.submit(number, qp, steps(*states))
            expected += [(qp, state) for state in states]
            tags.append((number, len(states)))
    assert worker.drain(timeout_s=30)
    assert calls() == expected
    assert len(jobs) == len(futures) and all(before <= seen for before, seen in jobs)
    assert [(tag, err, done) for tag, err, done, _ in worker.results()] == [(t, 0, n) for t, n in tags]
    assert worker.results() == []
    assert worker.completed == len(tags)
    assert worker.stop()


def case_first_failing_step_ends_a_command_and_is_named() -> None:
    worker = _nic.NicWorker("errors")
    library.fake_fail(1, RTR, errno.EINVAL, 0)
    library.fake_fail(2, RTS, -1, errno.ENETDOWN)  # some providers return -1 and set errno
    library.fake_fail(3, INIT, -1, 0)  # and some forget it
    for qp in (1, 2, 3, 4):
        worker.submit(("qp", qp), qp, steps(RESET, INIT, RTR, RTS))
    worker.submit("empty", 4, steps())
    assert worker.drain(timeout_s=30)
    results = worker.results()
    assert [r[:3] for r in results] == [
        (("qp", 1), errno.EINVAL, 2),
        (("qp", 2), errno.ENETDOWN, 3),
        (("qp", 3), errno.EIO, 1),
        (("qp", 4), 0, 4),
        ("empty", 0, 0),
    ]
    assert all(elapsed_ns >= 0 for *_, elapsed_ns in results)
    assert [c for c in calls() if c[0] == 1] == [(1, RESET), (1, INIT), (1, RTR)]
    assert worker.stop()


def case_elapsed_is_time_of_execution_and_not_of_waiting() -> None:
    worker = _nic.NicWorker("elapsed")
    library.fake_hold(1)
    worker.submit("slow", 1, steps(ERR))
    worker.submit("quick", 2, steps(ERR))
    since = until(lambda: worker.busy_since_ns)
    until(lambda: time.monotonic_ns() - since > 30_000_000)
    library.fake_hold(-1)
    assert worker.drain(timeout_s=30)
    slow, quick = worker.results()
    assert slow[3] > 30_000_000
    assert slow[3] + quick[3] <= time.monotonic_ns() - since, "one after the other"
    assert worker.busy_since_ns == 0
    assert worker.stop()


def case_steps_may_change_after_submit() -> None:
    worker = _nic.NicWorker("copy")
    library.fake_hold(0)
    transition = steps(ERR)
    worker.submit(1, 1, transition)
    worker.submit(2, 2, transition)
    transition.add(state=RESET)
    worker.submit(3, 3, transition)
    del transition
    gc.collect()
    library.fake_hold(-1)
    assert worker.drain(timeout_s=30)
    assert calls() == [(1, ERR), (2, ERR), (3, ERR), (3, RESET)]
    assert worker.stop()


def case_commands_need_no_gil() -> None:
    """A command queued by a thread that never gives up the GIL is carried out and announced meanwhile."""
    attention = ctypes.c_int(0)
    waiter = _nic.Waiter(ctypes.addressof(attention))
    worker = _nic.NicWorker("nogil", ctypes.addressof(attention), waiter)
    listener = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    waiter.add_listener(listener)
    worker.call(int).result(30)  # the thread is up
    transition = steps(ERR, RESET, INIT)
    sys.setswitchinterval(3600.0)  # nobody can take the GIL from this thread, only be given it
    begun_ns = time.monotonic_ns()
    ran: list[int] = []
    worker.submit("failover", 1, transition)
    worker.call(ran.append, 1)  # needs the GIL: proves below that this thread has not given it up
    deadline = begun_ns + 30_000_000_000
    while not (worker.completed and attention.value and waiter.raised):
        if time.monotonic_ns() > deadline:
            sys.setswitchinterval(0.005)
            raise AssertionError("the command waits for the GIL")
    held_until_ns = time.monotonic_ns()
    assert ran == []
    sys.setswitchinterval(0.005)
    ((*result, elapsed_ns),) = worker.results()
    assert result == ["failover", 0, 3] and elapsed_ns <= held_until_ns - begun_ns
    until(lambda: os.eventfd_read(listener) if _readable(listener) else 0)
    assert waiter.wait(timeout_ms=0, grace_us=0) == []
    assert worker.drain(timeout_s=30)
    assert ran == [1]
    assert worker.stop()


def _readable(fd: int) -> bool:
    import select

    return bool(select.select([fd], [], [], 0)[0])


def case_pending_cancel_and_drain() -> None:
    worker = _nic.NicWorker("pending")
    library.fake_hold(1)
    worker.submit("a", 1, steps(ERR))
    until(n_calls)
    worker.submit("b", 2, steps(ERR))
    worker.submit("c", 1, steps(RESET))
    worker.submit("d", 2, steps(RESET))
    job = worker.call(lambda: "job")
    assert (worker.pending(1), worker.pending(2), worker.pending(3), worker.pending()) == (2, 2, 0, 5)
    assert worker.drain(3, 10)
    assert not worker.drain(2, 0.02)
    assert not worker.drain(1, 0)
    assert worker.cancel(2) == 2
    assert worker.cancel(2) == 0
    assert worker.drain(2, 10)
    assert (worker.pending(1), worker.pending(2), worker.pending()) == (2, 0, 3)
    assert [r[:3] for r in worker.results()] == [("b", errno.ECANCELED, 0), ("d", errno.ECANCELED, 0)]
    library.fake_hold(-1)
    assert worker.drain(timeout_s=30)
    assert job.result(0) == "job"
    assert [r[:3] for r in worker.results()] == [("a", 0, 1), ("c", 0, 1)]
    assert calls() == [(1, ERR), (1, RESET)]
    assert worker.stop()


def case_what_came_first_does_not_wait_for_ever() -> None:
    """Behind 32 that came later it goes next; but nothing goes before what it came behind."""
    worker = _nic.NicWorker("passed")
    begun, gate = threading.Event(), threading.Event()
    seen: list[int] = []

    def begin() -> None:
        begun.set()
        gate.wait(30)

    worker.call(begin)
    assert begun.wait(30)
    for tag in range(50):
        worker.submit(tag, 1, steps(RTS))
    for _ in range(3):
        worker.call(lambda: seen.append(n_calls()))
    for tag in range(50, 150):
        worker.submit(tag, 1, steps(RTS))
    gate.set()
    assert worker.drain(timeout_s=30)
    assert seen == [82, 114, 146]
    assert [tag for tag, *_ in worker.results()] == list(range(150))
    assert worker.stop()


def case_a_short_wait_keeps_the_gil() -> None:
    """Who gives it up beside threads that compute may wait long to have it back."""
    worker = _nic.NicWorker("short")
    worker.call(int).result(30)  # the thread is up
    turns = [0]

    def compute() -> None:
        while not worker.stopped:
            turns[0] += 1
            time.sleep(0)  # gives it up, and wants it back at once

    threading.Thread(target=compute, daemon=True).start()
    until(lambda: turns[0])
    turned = 0
    for _ in range(20):
        library.fake_hold(1)
        sys.setswitchinterval(3600.0)  # nobody can take it from this thread, only be given it
        before = turns[0]
        worker.submit(None, 1, steps(ERR))
        assert not worker.drain(1, 0.0005)
        turned += turns[0] != before
        sys.setswitchinterval(0.005)
        library.fake_hold(-1)
        assert worker.drain(timeout_s=30)
    assert turned < 10, turned  # on a busy machine a wait may be no short one
    # What has taken longer, and jobs, and what is behind one: nobody keeps it from them.
    library.fake_hold(1)
    worker.submit(None, 1, steps(ERR))
    worker.call(int)
    sys.setswitchinterval(3600.0)
    for target in (1, 0):
        before = turns[0]
        assert not worker.drain(target, 0.5)
        assert turns[0] > before
    sys.setswitchinterval(0.005)
    library.fake_hold(-1)
    assert worker.drain(timeout_s=30)
    assert worker.stop()


def case_drain_does_not_hold_the_gil_and_hears_signals() -> None:
    worker = _nic.NicWorker("drain")
    library.fake_hold(1)
    worker.submit(None, 1, steps(ERR))
    threading.Thread(target=lambda: library.fake_hold(-1), daemon=True).start()
    assert worker.drain(1, 30)
    library.fake_hold(1)
    worker.submit(None, 1, steps(ERR))
    signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(InterruptedError("alarm")))
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        worker.drain(1, None)
    except InterruptedError as error:
        assert str(error) == "alarm"
    else:
        raise AssertionError("drain did not see the signal")
    library.fake_hold(-1)
    assert worker.stop()


def failure(job: _nic.Job[Any]) -> BaseException | None:
    assert job.wait(30)
    return job.failure


def case_jobs_return_raise_and_are_cancelled() -> None:
    worker = _nic.NicWorker("jobs")
    assert worker.call(lambda a, b=0: a + b, 40, b=2).result(30) == 42
    assert isinstance(failure(worker.call(lambda: 1 / 0)), ZeroDivisionError)
    assert isinstance(failure(worker.call(sys.exit, 3)), SystemExit)
    assert isinstance(failure(worker.call(7)), TypeError)  # type: ignore[arg-type]
    main = threading.get_ident()
    assert worker.call(threading.get_ident).result(30) != main
    seen: list[Any] = []
    job = worker.call(lambda: "x")
    job.add_done_callback(lambda job: seen.append(job.result(0)))
    until(lambda: seen == ["x"])
    library.fake_hold(1)
    worker.submit(None, 1, steps(ERR))
    never = worker.call(seen.append, "never")
    assert not never.wait(0) and never.cancel() and never.wait(0) and never.cancelled() and never.cancel()
    assert isinstance(never.failure, CancelledError)
    library.fake_hold(-1)
    assert worker.drain(timeout_s=30)
    assert seen == ["x"]
    assert worker.stop()


def case_a_job_is_waited_for_by_many_threads() -> None:
    worker = _nic.NicWorker("waits")
    go = threading.Event()
    jobs = [worker.call(go.wait, 30), worker.call(lambda: 1 / 0)]
    cancelled = worker.call(int)
    assert cancelled.cancel() and not jobs[0].wait(0.01) and not jobs[1].wait(0) and cancelled.wait(0)
    found: list[tuple[bool, type[BaseException] | None]] = []

    def wait() -> None:
        found.extend((job.wait(30), job.failure and type(job.failure)) for job in [*jobs, cancelled])

    threads = [threading.Thread(target=wait, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    go.set()
    for thread in threads:
        thread.join(10)
    assert sorted(map(str, found)) == sorted(
        map(str, [(True, None), (True, ZeroDivisionError), (True, CancelledError)] * 3)
    )
    begins, called = threading.Event(), threading.Event()
    slow = worker.call(begins.wait, 30)
    slow.add_done_callback(lambda _: called.wait(30))
    begins.set()
    until(lambda: slow.wait(0))  # though a callback takes its time
    called.set()
    assert worker.stop()


def case_what_is_raised_while_jobs_are_cancelled_loses_none() -> None:
    """As by a signal's handler, which runs in the callbacks of the thread that stops the NIC's."""
    worker = _nic.NicWorker("raises")
    library.fake_hold(1)
    worker.submit(None, 1, steps(ERR))
    until(n_calls)
    told: list[int] = []

    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    jobs = [worker.call(int) for _ in range(9)]
    jobs[3].add_done_callback(interrupted)
    for k, job in enumerate(jobs):
        job.add_done_callback(lambda _, k=k: told.append(k))
    try:
        worker.stop(0)
    except KeyboardInterrupt:
        pass
    else:
        raise AssertionError("nothing was raised")
    assert all(job.cancelled() and job.wait(0) for job in jobs) and told == [*range(9)]
    library.fake_hold(-1)
    assert worker.stop(30)


def case_a_job_must_not_wait_for_its_own_worker() -> None:
    worker = _nic.NicWorker("self")
    assert isinstance(failure(worker.call(worker.drain)), RuntimeError)
    assert worker.call(worker.stop).result(30) is False
    assert worker.stop(30)
    assert worker.stopped


def case_stop_cancels_what_has_not_begun() -> None:
    attention = ctypes.c_int(0)
    worker = _nic.NicWorker("stop", ctypes.addressof(attention))
    library.fake_hold(1)
    worker.submit("hung", 1, steps(ERR, RESET))
    until(n_calls)
    worker.submit("queued", 2, steps(ERR))
    job = worker.call(lambda: 1)
    callback: list[bool] = []
    job.add_done_callback(lambda job: callback.append(job.cancelled()))
    begun = time.monotonic()
    assert worker.stop(0.05) is False
    assert time.monotonic() - begun < 20
    assert job.cancelled() and callback == [True]
    try:
        job.result(0)
    except CancelledError:
        pass
    assert attention.value == 1
    assert [r[:3] for r in worker.results()] == [("queued", errno.ECANCELED, 0)]
    # After stop nothing is accepted, and callers hear of it in the usual way.
    worker.submit("late", 3, steps(ERR))
    assert [r[:3] for r in worker.results()] == [("late", errno.ECANCELED, 0)]
    assert worker.call(lambda: 1).cancelled()
    assert worker.stop(0) is False
    library.fake_hold(-1)
    assert worker.stop(30) is True
    assert worker.stop() is True
    assert [r[:3] for r in worker.results()] == [("hung", 0, 2)]
    assert calls() == [(1, ERR), (1, RESET)]


def case_tags_and_jobs_are_let_go() -> None:
    def watched() -> tuple[Tag, weakref.ref[Tag]]:
        tag = Tag()
        return tag, weakref.ref(tag)

    worker = _nic.NicWorker("refs")
    tag, taken = watched()
    worker.submit(tag, 1, steps(ERR))
    assert worker.drain(timeout_s=30)
    ((back, *_),) = worker.results()
    assert back is tag
    del back, tag
    assert taken() is None

    tag, not_taken = watched()
    worker.submit(tag, 1, steps(ERR))
    tag, in_job = watched()
    future = worker.call(lambda keep: None, tag)
    assert worker.drain(timeout_s=30)
    del tag
    until(lambda: in_job() is None)
    library.fake_hold(1)
    n = n_calls()
    tag, under_way = watched()
    worker.submit(tag, 1, steps(ERR))
    until(lambda: n_calls() > n)
    tag, queued = watched()
    worker.submit(tag, 1, steps(ERR))
    tag, queued_job = watched()
    cancelled = worker.call(lambda keep: None, tag)
    del tag, future
    assert not_taken() and under_way() and queued() and queued_job()
    before = threads()
    del worker  # the command hangs: its thread stays, Python's objects do not
    gc.collect()
    assert cancelled.cancelled()
    assert not_taken() is under_way() is queued() is queued_job() is None
    assert threads() == before
    library.fake_hold(-1)
    until(lambda: threads() == before - 1)
    assert n_calls() == n + 1


def case_workers_come_and_go_without_traces() -> None:
    attention = ctypes.c_int(0)
    threads_before, fds_before = threads(), fds()
    for number in range(200):
        waiter = _nic.Waiter(ctypes.addressof(attention))
        worker = _nic.NicWorker(f"w{number}", ctypes.addressof(attention), waiter)
        worker.submit(number, 1, steps(ERR))
        if number % 3 == 0:
            worker.call(lambda: None)
        if number % 2:
            worker.stop(30)
        if number % 5 == 0:
            waiter.close()
        if number % 7 == 0:
            del waiter  # the worker keeps what it needs to wake it
    del worker, waiter
    gc.collect()
    until(lambda: threads() == threads_before)
    assert fds() == fds_before


def case_cycle_through_a_worker_is_collected() -> None:
    class Owner:
        pass

    owner = Owner()
    owner.worker = _nic.NicWorker("cycle")  # type: ignore[attr-defined]
    owner.self = owner  # type: ignore[attr-defined]
    gone = weakref.ref(owner)
    before = threads()
    del owner
    gc.collect()
    assert gone() is None
    until(lambda: threads() == before - 1)


def case_thread_takes_no_signals_and_has_a_name() -> None:
    worker = _nic.NicWorker("a name longer than fifteen bytes")
    native = worker.call(threading.get_native_id).result(30)
    with open(f"/proc/self/task/{native}/comm") as comm:
        assert comm.read() == "a name longer t\n"
    with open(f"/proc/self/task/{native}/status") as status:
        blocked = next(int(line.split()[1], 16) for line in status if line.startswith("SigBlk"))
    assert all(blocked >> (number - 1) & 1 for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM))
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()
    assert worker.stop()


def case_arguments_are_checked() -> None:
    worker = _nic.NicWorker("arguments")
    for wrong, kind in (
        (lambda: worker.submit(1, 0, steps(ERR)), ValueError),
        (lambda: worker.submit(1, 1, None), TypeError),
        (lambda: worker.submit(1, -1, steps(ERR)), OverflowError),
        (lambda: worker.cancel(0), ValueError),
        (lambda: worker.drain(1, "soon"), ValueError),
        (lambda: _nic.NicWorker(None), TypeError),
        (lambda: _nic.Waiter(0), ValueError),
    ):
        try:
            wrong()  # type: ignore[no-untyped-call]
        except kind:
            continue
        raise AssertionError(f"no {kind.__name__}")
    assert worker.results() == [] and worker.pending() == 0
    assert worker.drain(1, -5)
    assert worker.stop(-1) in (True, False)
    assert worker.stop(30)


def case_forked_child_finds_it_dead_and_can_make_its_own() -> None:
    attention = ctypes.c_int(0)
    waiter = _nic.Waiter(ctypes.addressof(attention))
    worker = _nic.NicWorker("parent", ctypes.addressof(attention), waiter)
    library.fake_hold(1)
    worker.submit("parent's", 1, steps(ERR))
    until(n_calls)
    job = worker.call(lambda: "later")

    def child() -> None:
        nonlocal worker, waiter
        for wrong in (
            lambda: worker.submit(1, 2, steps(ERR)),
            lambda: worker.call(int),
            lambda: worker.cancel(1),
            lambda: _nic.NicWorker("x", 0, waiter),
        ):
            try:
                wrong()
            except RuntimeError as error:
                assert "dead" in str(error)
                continue
            raise AssertionError("used in a child")
        assert worker.results() == [] and worker.pending() == 0 and worker.completed == 0
        assert worker.busy_since_ns == 0
        assert worker.drain() and worker.stop()
        worker = None  # type: ignore[assignment]
        gc.collect()
        library.fake_hold(-1)
        mine = _nic.NicWorker("child's")
        mine.submit("mine", 2, steps(ERR))
        assert mine.call(lambda: "works").result(30) == "works"
        assert [r[:3] for r in mine.results()] == [("mine", 0, 1)]
        _nic._at_exit()
        assert mine.stop(30)

    in_child(child)
    library.fake_hold(-1)
    assert job.result(30) == "later"
    assert [r[:3] for r in worker.results()] == [("parent's", 0, 1)]
    assert worker.stop()


def case_forks_amid_commands() -> None:
    """Locks that another thread holds at the moment of the fork are never touched by the child."""
    attention = ctypes.c_int(0)
    waiter = _nic.Waiter(ctypes.addressof(attention))
    workers = [_nic.NicWorker(f"busy{i}", ctypes.addressof(attention), waiter) for i in range(3)]
    # Under AddressSanitizer a fork while another thread allocates (as one does that starts, or runs Python)
    # leaves the child its allocator's lock: these threads are to be past that.
    for worker in workers:
        worker.call(int)
        assert worker.drain(timeout_s=30)
    transition = steps(*[ERR, RESET] * 20)
    for number in range(15):
        for worker in workers:
            for qp in range(1, 20):
                worker.submit(number, qp, transition)
            worker.results()

        def child() -> None:
            workers.clear()
            gc.collect()
            mine = _nic.NicWorker("mine")
            assert mine.call(lambda: 5).result(30) == 5
            assert mine.stop(30)

        in_child(child)
    for worker in workers:
        assert worker.stop(30)


def case_exit_with_an_idle_worker() -> None:
    globals()["kept"] = _nic.NicWorker("idle")


def case_exit_with_a_hung_command() -> None:
    worker = _nic.NicWorker("hung")
    library.fake_hold(0)
    worker.submit(None, 1, steps(ERR))
    until(n_calls)
    worker.submit(None, 2, steps(ERR))
    globals()["kept"] = worker


def case_exit_with_a_hung_job_that_comes_back_too_late() -> None:
    """A job whose verb returns when the interpreter is finalized already must not touch Python."""
    worker = _nic.NicWorker("late")
    library.fake_hold(1)
    worker.call(_nic.query_qp_state, 1)
    until(n_calls)
    globals()["kept"] = worker

    # Little is left of the modules by then: what is needed comes along.
    def others_sleep(
        open_: Any = open, listdir: Any = os.listdir, us: str = str(threading.get_native_id())
    ) -> bool:
        return all(
            open_(f"/proc/self/task/{thread}/stat").read().rpartition(")")[2].split()[0] == "S"
            for thread in listdir("/proc/self/task")
            if thread != us
        )

    class ReleaseLate:
        def __del__(
            self,
            library: Any = library,
            sleep: Any = others_sleep,
            now: Any = time.monotonic,
            wait: Any = time.sleep,
        ) -> None:
            library.fake_hold(-1)
            deadline = now() + 20
            while not (library.fake_returned() == 1 and sleep()):
                assert now() < deadline, "the verb does not return, or its thread does not come to rest"
                wait(0.001)
            wait(0.05)  # were it at rest because it waits for the GIL, here it is

    globals()["late"] = ReleaseLate()


def case_exit_with_a_running_python_job() -> None:
    """The exit hook lets a job finish that is between two bytecodes, and cancels the next."""
    worker = _nic.NicWorker("running")
    begun = threading.Event()
    order: list[str] = []

    def job() -> None:
        begun.set()
        until(lambda: worker.stopped)  # by the hook
        order.append("job")

    def after_the_hook() -> None:
        assert worker.stop(30)
        assert order == ["job"], order
        late = _nic.NicWorker("late")
        assert late.call(order.append, "late").cancelled()
        assert late.stop(30)
        print("the job finished and the next did not run", flush=True)

    atexit.unregister(_nic._at_exit)
    atexit.register(after_the_hook)
    atexit.register(_nic._at_exit)
    worker.call(job)
    worker.call(order.append, "next")
    assert begun.wait(30)
