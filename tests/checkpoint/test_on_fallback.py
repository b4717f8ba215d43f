# SPDX-License-Identifier: BSD-3-Clause
"""Ranks as threads that share a store: whatever one of them does, nobody waits longer than was said."""

from __future__ import annotations

import logging
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from harness import ROOT, wait_until

from shiftverbs import observe
from shiftverbs.checkpoint import CheckpointOnFallback, Outcome, agreement
from shiftverbs.checkpoint.on_fallback import AGAIN_S

#: A step's length; what is waited for in tests takes many.
STEP_S = 0.002


class SharedStore:
    """Counters for all threads; they can be made to fail or to stand still."""

    def __init__(self) -> None:
        self._counters: dict[str, int] = {}
        self._lock = threading.Lock()
        self.broken = False
        self.open = threading.Event()
        self.open.set()

    def add(self, key: str, amount: int) -> int:
        self.open.wait()
        if self.broken:
            raise ConnectionError("store lost")
        with self._lock:
            self._counters[key] = self._counters.get(key, 0) + amount
            return self._counters[key]


class Rank:
    """A rank that steps in a thread of its own, in step with the others, which it meets after each step's work."""

    def __init__(self, job: Job, rank: int) -> None:
        self.job = job
        self.rank = rank
        self.steps = 0
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.stands = False
        self.saved: list[int] = []
        self.outcomes: list[Outcome] = []
        self.save: Callable[[], object] = lambda: None
        self.checkpoint = CheckpointOnFallback(
            self._save, job.store, rank, job.size, **{"timeout_s": 20.0, "min_interval_s": 0.0, **job.options}
        )
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _save(self) -> None:
        self.saved.append(self.steps)
        self.save()

    def _run(self) -> None:
        chance = random.Random(self.job.seed + self.rank)
        while True:
            if not self.goes_on.is_set():
                self.stands = True
                self.goes_on.wait()
                self.stands = False
            time.sleep(STEP_S * chance.random() * 2)
            if not self.job.meet(self.rank):
                return
            self.steps += 1
            outcome = self.checkpoint.step()
            if outcome is not None:
                self.outcomes.append(outcome)


class Job:
    """Some ranks in lockstep: none begins its step N + 2 before all have begun step N, as with a collective in each."""

    def __init__(self, size: int, seed: int = 0, **options: object) -> None:
        self.store = SharedStore()
        self.size = size
        self.options = options
        self.seed = seed
        self.over = False
        self.absent: set[int] = set()
        self._met = [0] * size
        self._changed = threading.Condition()
        self.ranks = [Rank(self, rank) for rank in range(size)]

    def start(self) -> Job:
        for rank in self.ranks:
            rank.thread.start()
        return self

    def meet(self, rank: int) -> bool:
        """The collective of a step; a rank that is absent is waited for by nobody. Whether to go on."""
        with self._changed:
            self._met[rank] += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self.over or self._all_met(self._met[rank]))
        return not self.over

    def _all_met(self, step: int) -> bool:
        return all(met >= step for one, met in enumerate(self._met) if one not in self.absent)

    def leave(self, rank: int) -> None:
        with self._changed:
            self.absent.add(rank)
            self._changed.notify_all()

    def hold(self, rank: int) -> None:
        """Have a rank make no more steps; the others do not wait for it."""
        self.ranks[rank].goes_on.clear()
        wait_until(lambda: self.ranks[rank].stands, what=f"rank {rank} stands still")
        self.leave(rank)

    def stop(self) -> None:
        self.store.open.set()
        with self._changed:
            self.over = True
            for rank in self.ranks:
                rank.goes_on.set()
            self._changed.notify_all()
        for rank in self.ranks:
            rank.checkpoint.close()
            if rank.thread.is_alive():
                rank.thread.join(20)
                assert not rank.thread.is_alive(), f"rank {rank.rank} hangs"


@pytest.fixture
def jobs() -> Iterator[Callable[..., Job]]:
    made: list[Job] = []

    def make(size: int, **options: object) -> Job:
        made.append(Job(size, **options))
        return made[-1]

    yield make
    for job in made:
        job.stop()


def outcomes(job: Job, count: int, ranks: list[int] | None = None) -> list[Outcome]:
    """The count-th outcome of each rank, waiting for it."""
    members = [job.ranks[rank] for rank in (range(job.size) if ranks is None else ranks)]
    wait_until(lambda: all(len(rank.outcomes) >= count for rank in members), 25, "everybody's outcome")
    return [rank.outcomes[count - 1] for rank in members]


def goes_on(job: Job, ranks: list[int]) -> bool:
    """Whether ranks make further steps."""
    before = [job.ranks[rank].steps for rank in ranks]
    return bool(
        wait_until(
            lambda: all(job.ranks[r].steps > b + 5 for r, b in zip(ranks, before, strict=True)), 10, "steps"
        )
    )


def fallback() -> observe.Fallback:
    return observe.Fallback(qp_num=1, device="soft0", epoch=1, target="soft1", durations={"fallback_ms": 1.0})


@pytest.mark.parametrize("size", [1, 2, 5])
def test_all_pause_after_the_same_step_and_it_is_saved_once(jobs, size):
    job = jobs(size).start()
    assert goes_on(job, list(range(size)))
    assert not any(rank.outcomes for rank in job.ranks)
    observe.publish(fallback())
    found = outcomes(job, 1)
    assert {(one.step, one.saved, one.why) for one in found} == {(found[0].step, True, "")}
    assert job.ranks[0].saved == [found[0].step]
    assert not any(rank.saved for rank in job.ranks[1:])
    assert goes_on(job, list(range(size)))
    assert [len(rank.outcomes) for rank in job.ranks] == [
        1
    ] * size  # one event, of which all heard: one pause


def test_all_ranks_save_where_all_are_to(jobs):
    job = jobs(3, savers=None).start()
    job.ranks[1].checkpoint.request()
    (first, *_) = outcomes(job, 1)
    assert [rank.saved for rank in job.ranks] == [[first.step]] * 3


def test_requests_at_random(jobs):
    """Any rank asks at any time; all ranks have the same history, and each ask is followed by a pause."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    chance = random.Random(seed)
    job = jobs(4, seed=seed, savers=None).start()
    for _ in range(30):
        asking, before = chance.choice(job.ranks), [len(rank.outcomes) for rank in job.ranks]
        time.sleep(chance.random() * 3 * STEP_S)
        for _ in range(chance.randrange(1, 4)):
            asking.checkpoint.request()
        wait_until(lambda: all(len(r.outcomes) > b for r, b in zip(job.ranks, before, strict=True)), 20)
    histories = [[(one.step, one.saved) for one in rank.outcomes[:30]] for rank in job.ranks]
    assert histories == [histories[0]] * 4
    assert all(saved for _, saved in histories[0])
    assert [rank.saved[:30] for rank in job.ranks] == [[step for step, _ in histories[0]]] * 4


@pytest.mark.parametrize(("size", "late"), [(2, 0), (2, 1), (3, 0), (3, 1), (3, 2)])
def test_a_late_rank_makes_all_resume_and_is_named(jobs, caplog, size, late):
    caplog.set_level(logging.WARNING, "shiftverbs.checkpoint")
    job = jobs(size, timeout_s=0.3).start()
    others = [rank for rank in range(size) if rank != late]
    assert goes_on(job, list(range(size)))
    job.hold(late)  # the others' collectives do not wait: only the pause does
    job.ranks[others[0]].checkpoint.request()
    for one in outcomes(job, 1, others):
        assert not one.saved and one.why == f"rank {late} did not pause in time"
        assert one.paused_s < 0.3 + 1.0 + 2.0
    assert goes_on(job, others)
    assert f"rank {late} did not pause in time" in caplog.text
    assert not any(rank.saved for rank in job.ranks)
    job.ranks[late].goes_on.set()
    wait_until(lambda: job.ranks[late].steps > 20, 10)


@pytest.fixture
def dies(monkeypatch):
    """Threads that end leave no word."""
    monkeypatch.setattr(agreement.Conductor, "leave", lambda conductor: None)


def test_a_dead_rank_makes_all_resume_and_is_named(jobs, dies):
    """Its thread does not answer, either."""
    job = jobs(3, timeout_s=0.3)
    dead = job.ranks[1]
    dead.checkpoint._closed = True
    dead.checkpoint._thread.join(5)
    job.leave(1)
    for rank in (job.ranks[0], job.ranks[2]):
        rank.thread.start()
    job.ranks[2].checkpoint.request()
    for one in outcomes(job, 1, [0, 2]):
        assert not one.saved and one.why == "rank 1 did not pause in time"
    assert goes_on(job, [0, 2])


def test_without_rank_0_the_others_resume(jobs, dies):
    """It alone looks at all ranks."""
    job = jobs(3, timeout_s=0.3)
    job.ranks[0].checkpoint._closed = True
    job.ranks[0].checkpoint._thread.join(5)
    job.leave(0)
    for rank in job.ranks[1:]:
        rank.thread.start()
    job.ranks[2].checkpoint.request()
    assert {one.why for one in outcomes(job, 1, [1, 2])} == {"rank 0 did not pause in time"}
    assert goes_on(job, [1, 2])


def test_a_rank_that_has_ended_is_not_waited_for(jobs):
    job = jobs(2, timeout_s=20.0).start()
    assert goes_on(job, [0, 1])
    job.hold(1)
    job.ranks[0].checkpoint.request()
    # It stands at the boundary, and is told what comes of it: one that is on its way there may never stop.
    wait_until(lambda: (state := job.ranks[0].checkpoint._round) is not None and state.paused_ns)
    began = time.monotonic()
    job.ranks[1].checkpoint.close()
    (one,) = outcomes(job, 1, [0])
    assert one.why == "rank 1 did not pause in time" and time.monotonic() - began < 5


def test_rounds_that_save_nothing_do_not_follow_each_other_at_once(jobs, caplog):
    """A rank that has ended ends each of them; without a pause they would take all of the processor."""
    job = jobs(2, timeout_s=20.0).start()
    assert goes_on(job, [0, 1])
    job.hold(1)
    job.ranks[1].checkpoint.close()
    job.ranks[0].checkpoint.request()
    wait_until(lambda: caplog.text.count("rank 1 did not pause in time") >= 5)
    times = [each.created for each in caplog.records if "rank 1 did not pause" in each.getMessage()]
    assert times[4] - times[0] >= 2 * AGAIN_S, "some are told by the step, too"


def test_a_rank_that_ended_before_anybody_asked_is_not_waited_for(jobs, caplog):
    job = jobs(2, timeout_s=20.0).start()
    assert goes_on(job, [0, 1])
    job.hold(1)
    job.ranks[1].checkpoint.close()
    began = time.monotonic()
    job.ranks[0].checkpoint.request()
    wait_until(lambda: "rank 1 did not pause in time" in caplog.text)
    assert goes_on(job, [0]) and time.monotonic() - began < 5


def test_rank_0_that_ended_before_anybody_asked_is_not_waited_for(jobs, caplog):
    """Nor is it in any later round."""
    job = jobs(3, timeout_s=20.0).start()
    assert goes_on(job, [0, 1, 2])
    job.hold(0)
    job.ranks[0].checkpoint.close()
    for count in (1, 2):
        began = time.monotonic()
        job.ranks[1].checkpoint.request()
        wait_until(lambda: caplog.text.count("rank 0 did not pause in time") >= count)
        assert goes_on(job, [1, 2]) and time.monotonic() - began < 5
    assert not any(rank.saved for rank in job.ranks)


@pytest.mark.parametrize("closes", [0, 1])
@pytest.mark.parametrize("savers", [None, (0,), (1,)])
def test_a_rank_that_ends_while_it_saves_frees_the_others(jobs, savers, closes):
    """As where an exception leaves its block: there is no time to tell how saving went."""
    job = jobs(3, savers=savers, save_timeout_s=20.0)
    saving, gate = threading.Event(), threading.Event()

    def save() -> None:
        saving.set()
        gate.wait(20)

    saver = job.ranks[closes if savers is None else savers[0]]
    saver.save = save
    job.start()
    job.ranks[2].checkpoint.request()
    assert saving.wait(20)
    began = time.monotonic()
    job.leave(closes)
    job.ranks[closes].checkpoint.close()
    if saver is not job.ranks[closes]:
        gate.set()
    others = [rank for rank in range(3) if rank != closes]
    found = outcomes(job, 1, others)
    assert time.monotonic() - began < 5
    assert len({(one.saved, one.why) for one in found}) == 1
    if closes == 0 or saver is job.ranks[closes]:
        assert found[0].why == f"saving failed at rank {closes}"
    gate.set()


def test_save_may_step_and_request(jobs):
    """A step in it does not count, as the other ranks make none; what it asks for is another pause."""
    job = jobs(2, min_interval_s=0.05)
    first = job.ranks[0]

    def save() -> None:
        assert first.checkpoint.step() is None
        if len(first.saved) == 1:
            first.checkpoint.request()

    first.save = save
    job.start()
    job.ranks[1].checkpoint.request()
    assert all(one.saved for one in outcomes(job, 2))
    assert len(first.saved) == len(set(first.saved)) >= 2


def test_steps_of_many_threads_save_once(jobs):
    saved, at_once = [], threading.Barrier(4)
    with CheckpointOnFallback(lambda: saved.append(1), min_interval_s=1000.0) as checkpoint:
        checkpoint.request()
        found = []

        def steps() -> None:
            at_once.wait()
            while not found:
                outcome = checkpoint.step()
                if outcome is not None:
                    found.append(outcome)

        threads = [threading.Thread(target=steps) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert not any(thread.is_alive() for thread in threads)
    assert saved == [1] and len(found) == 1 and found[0].saved


def test_a_slow_store_is_no_late_rank(jobs, monkeypatch):
    """Each look takes its time, and all pause and save all the same."""
    job = jobs(2, timeout_s=20.0)
    add = job.store.add

    def slow(key: str, amount: int) -> int:
        time.sleep(0.1)
        return add(key, amount)

    monkeypatch.setattr(job.store, "add", slow)
    job.start()
    job.ranks[1].checkpoint.request()
    assert all(one.saved for one in outcomes(job, 1))


def test_who_was_not_in_time_keeps_the_interval_too(jobs):
    """A rank whose thread was late for a pause asks for none before the others would."""
    job = jobs(2, timeout_s=0.2, min_interval_s=1000.0)
    gate = threading.Event()
    late = job.ranks[1].checkpoint
    add = job.store.add

    def held(key: str, amount: int) -> int:
        if threading.current_thread() is late._thread:
            gate.wait(20)
        return add(key, amount)

    job.store.add = held
    job.start()
    observe.publish(fallback())
    (one,) = outcomes(job, 1, [0])
    assert one.why == "rank 1 did not pause in time"
    gate.set()
    wait_until(lambda: late._not_before > 0, 5, "the interval of rank 1")
    assert goes_on(job, [0, 1])
    assert [len(rank.outcomes) for rank in job.ranks] == [1, 0]


@pytest.mark.parametrize("saver", [0, 1])
def test_saving_that_fails_is_told_to_all(jobs, caplog, saver):
    def fail() -> None:
        raise OSError("the disk is full")

    job = jobs(2, savers=(saver,))
    job.ranks[saver].save = fail
    job.start()
    job.ranks[0].checkpoint.request()
    found = outcomes(job, 1)
    assert {(one.step, one.saved, one.why) for one in found} == {
        (found[0].step, False, f"saving failed at rank {saver}")
    }
    assert "the disk is full" in caplog.text
    job.ranks[saver].save = lambda: None
    wait_until(lambda: all(any(one.saved for one in rank.outcomes) for rank in job.ranks), 10)  # tried again
    assert goes_on(job, [0, 1])


@pytest.mark.parametrize("saver", [0, 1])
def test_a_rank_that_stands_still_while_it_saves(jobs, saver):
    gate = threading.Event()
    job = jobs(3, savers=(saver,), save_timeout_s=0.3, min_interval_s=1000.0)
    job.ranks[saver].save = lambda: gate.wait(20)
    job.start()
    others = [rank for rank in range(3) if rank != saver]
    job.ranks[0].checkpoint.request()
    for one in outcomes(job, 1, others):
        assert not one.saved and one.why == f"rank {saver} did not save within 0.3 s"
    job.leave(saver)
    assert goes_on(job, others)
    gate.set()
    assert not outcomes(job, 1, [saver])[0].saved


def test_saving_that_is_broken_off_passes_through_and_frees_the_others(jobs):
    job = jobs(2, savers=(0,), save_timeout_s=20.0)
    raised = []

    def interrupt() -> None:
        raise KeyboardInterrupt

    job.ranks[0].save = interrupt
    run = job.ranks[0]._run

    def run_until_interrupted() -> None:
        try:
            run()
        except KeyboardInterrupt:
            raised.append(True)
            job.leave(0)

    job.ranks[0].thread = threading.Thread(target=run_until_interrupted, daemon=True)
    job.start()
    job.ranks[1].checkpoint.request()
    assert outcomes(job, 1, [1])[0].why == "saving failed at rank 0"
    wait_until(lambda: raised)


@pytest.mark.parametrize("paused", [False, True])
def test_a_store_that_hangs_holds_nobody(jobs, paused):
    job = jobs(2, timeout_s=0.3).start()
    assert goes_on(job, [0, 1])
    if paused:
        job.ranks[1].goes_on.clear()
        job.leave(1)
        job.ranks[0].checkpoint.request()
        wait_until(lambda: (state := job.ranks[0].checkpoint._round) is not None and state.is_waiting)
    job.store.open.clear()
    job.ranks[0].checkpoint.request()
    assert goes_on(job, [0])
    if paused:
        assert outcomes(job, 1, [0])[0].why == "the store does not answer"


def test_a_store_that_fails_is_told_and_holds_nobody(jobs, caplog):
    job = jobs(2).start()
    job.hold(1)
    job.ranks[0].checkpoint.request()
    wait_until(lambda: (state := job.ranks[0].checkpoint._round) is not None and state.is_waiting)
    job.store.broken = True
    assert "store lost" in outcomes(job, 1, [0])[0].why
    assert goes_on(job, [0])
    wait_until(lambda: "no more checkpoints after fallbacks" in caplog.text)
    job.ranks[0].checkpoint.request()
    assert goes_on(job, [0])


def test_fallbacks_in_quick_succession_are_one_pause_in_each_interval(jobs):
    job = jobs(2, min_interval_s=0.6).start()
    began = time.monotonic()
    seen = 0

    def goes_on_falling_back() -> bool:
        nonlocal seen
        observe.publish(fallback())
        seen += 1
        return all(len(rank.outcomes) >= 3 for rank in job.ranks)

    wait_until(goes_on_falling_back, 20)
    counts = [len(rank.outcomes) for rank in job.ranks]
    # The first pause is at once, each other one an interval behind the one before.
    took = time.monotonic() - began
    assert seen > 20 and max(counts) <= 1 + took / 0.6
    wait_until(lambda: all(len(rank.outcomes) > c for rank, c in zip(job.ranks, counts, strict=True)), 10)


def test_a_fallback_that_is_told_late_is_covered(jobs):
    job = jobs(1).start()
    event = fallback()
    job.ranks[0].checkpoint.request()
    outcomes(job, 1)
    wait_until(lambda: job.ranks[0].checkpoint._round is None)
    job.ranks[0].checkpoint._fell_back(event)
    assert goes_on(job, [0])
    assert len(job.ranks[0].outcomes) == 1


@pytest.mark.parametrize(
    "arguments, error, text",
    [
        ({"save": 3}, TypeError, "save must be callable, not int"),
        ({"rank": 2, "size": 2, "store": SharedStore()}, ValueError, "no rank 2 in a job of 2"),
        ({"size": 2}, ValueError, "2 ranks need a store"),
        ({"timeout_s": 0}, ValueError, "timeout_s must be more than 0, not 0"),
        ({"timeout_s": float("inf")}, ValueError, "timeout_s must be 1000000000 at most, not inf"),
        ({"save_timeout_s": float("nan")}, ValueError, "save_timeout_s must be more than 0"),
        ({"min_interval_s": -1}, ValueError, "min_interval_s must not be less than 0"),
        ({"savers": (1,)}, ValueError, "savers must be ranks of a job of 1"),
        ({"savers": ()}, ValueError, "savers must be ranks of a job of 1"),
    ],
)
def test_wrong_arguments_are_named(arguments, error, text):
    with pytest.raises(error, match=text):
        CheckpointOnFallback(**{"save": lambda: None, **arguments})


def test_it_ends_with_its_block_and_twice():
    with CheckpointOnFallback(lambda: None) as checkpoint:
        assert checkpoint.step() is None
    checkpoint.close()
    assert not checkpoint._thread.is_alive()
    assert checkpoint.step() is None


def test_it_needs_no_torch():
    code = "import sys, shiftverbs.checkpoint; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
