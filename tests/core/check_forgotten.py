# SPDX-License-Identifier: BSD-3-Clause
"""RESET takes what nobody has polled: withheld errors too. What comes behind them makes no success of what failed."""

from __future__ import annotations

import errno
import gc
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from functools import partial
from operator import call

import pytest
from check_answered import away
from fake import FLUSH, RETRY_EXC, SUCCESS, World

from shiftverbs import _core


@pytest.mark.parametrize("when", ["before its NIC is in RESET", "out of a CQ that a NIC keeps over RESET"])
@pytest.mark.parametrize("driven", [1, 3])
def test_what_failed_does_not_succeed_by_a_reset(guarded: World, when: str, driven: int) -> None:
    """Some of the flushes were looked at while errors were withheld, the last one was not."""
    w = guarded
    for i in range(3):
        w.send(i)
    w.hw[0].fail_send(RETRY_EXC)
    for _ in range(driven - 1):
        w.hw[0].fail_send(FLUSH)
    assert w.poll() == [] and w.qp.outstanding == (3, 0)
    w.send(3)
    w.qp.app_touched(True)
    w.hw[0].flush()
    if when.startswith("out"):
        w.hw[0].reset()
        w.qp.reset_journal()
    assert w.poll() == []


@pytest.mark.parametrize("driven", [1, 3])
def test_all_of_it_is_told_where_a_reset_is_refused(guarded: World, driven: int) -> None:
    """Its NIC is gone: what had been taken is not, and comes in order, whatever of it was looked at since."""
    w = guarded
    for i in range(5):
        w.send(i)
    w.recv(0)
    w.hw[0].fail_send(RETRY_EXC)
    for _ in range(driven - 1):
        w.hw[0].fail_send(FLUSH)
    assert w.poll() == []
    w.qp.app_touched(True)
    w.hw[0].fail_send(FLUSH)
    assert w.poll() == []
    w.qp.begin_end()
    w.hw[0].flush()
    assert w.poll() == []
    w.qp.abort()
    assert w.poll_cq(w.scq) == [(0, RETRY_EXC), *((i, FLUSH) for i in range(1, 5))]
    assert w.poll_cq(w.rcq) == [(0, FLUSH)] and w.qp.outstanding == (0, 0)


@pytest.mark.parametrize("driven", [1, 2])
def test_receives_that_were_flushed_are_forgotten_with_those_behind(guarded: World, driven: int) -> None:
    w = guarded
    w.recv(0)
    w.hw[0].receive()
    for i in range(1, 4):
        w.recv(i)
    assert w.poll() == [(0, SUCCESS)]
    for _ in range(driven):
        w.hw[0].fail_recv(FLUSH)
    assert w.poll() == [] and w.qp.outstanding == (0, 3)
    w.qp.app_touched(True)
    w.hw[0].flush()
    assert w.poll() == []
    w.hw[0].reset()
    w.qp.reset_journal()
    assert w.poll() == [] and w.qp.outstanding == (0, 0)


def test_a_refusal_ends_with_its_life(guarded: World) -> None:
    """What a NIC refused before RESET says nothing of the next life."""
    w = guarded
    w.send(0)
    w.hw[0].fail_send(RETRY_EXC)
    assert w.poll() == []
    w.hw[0].fail(0, errno.EINVAL)
    w.send(1)
    assert w.qp.refused == errno.EINVAL and not w.qp.is_plain
    w.qp.app_touched(True)
    w.hw[0].reset()
    w.qp.reset_journal()
    assert w.qp.is_plain and w.qp.outstanding == (0, 0)
    w.send(2)
    assert w.qp.unwired == (0, 0), "its NIC has taken it"
    assert w.qp.refused == 0


@pytest.mark.parametrize("failed", [1, 2, 3])
def test_what_waited_for_room_ends_too(make: Callable[..., World], failed: int) -> None:
    """The peer has left, and errors are shown: nothing that the hardware has yet is to tell of those behind."""
    w = make(max_send=3)
    w.protect()
    hears = make(join=w, qp_num=0x200)
    away(hears)
    hears.recv(100)
    for i in range(3):
        w.send(i)
    hears.hw[1].receive()
    hears.rcq.drain(1)
    for i in range(3, 6):
        w.send(i)
    assert w.qp.outstanding[0] == 6 and w.qp.unwired[0] == 3, (
        "they are answered, as far as the program can tell"
    )
    w.hw[0].fail_send(RETRY_EXC)
    for _ in range(failed - 1):
        w.hw[0].fail_send(FLUSH)
    assert w.poll_cq(w.scq) == []
    w.qp.guarded = False
    got = []
    for _ in range(3):
        w.hw[0].flush()
        got += w.poll_cq(w.scq)
    assert got == [(0, RETRY_EXC), *((i, FLUSH) for i in range(1, 6))]


def taken(w: World) -> list[tuple[int, int]]:
    """What the application finds in its CQs."""
    return [*w.poll_cq(w.scq), *w.poll_cq(w.rcq)]


@pytest.mark.parametrize("drained", [False, True])
def test_what_a_backup_has_completed_is_forgotten_too(guarded: World, drained: bool) -> None:
    """Its CQ is no NIC's business that the application knows: nothing of it comes in the next life."""
    w = guarded
    away(w)
    for i in range(3):
        w.send(i)
        w.recv(10 + i)
    w.hw[1].complete()
    w.hw[1].receive()
    if drained:
        w.scq.drain(1)
        w.rcq.drain(1)
        assert w.scq.buffered + w.rcq.buffered == 2
    w.qp.app_touched(True)
    w.hw[1].reset()
    w.hw[0].reset()
    w.qp.reset_journal()
    assert taken(w) == [] and w.qp.outstanding == (0, 0)


def test_the_errors_of_an_end_are_forgotten(guarded: World) -> None:
    """They were made by us, and a NIC's own RESET takes its flushes."""
    w = guarded
    away(w)
    for i in range(3):
        w.send(i)
        w.recv(10 + i)
    w.qp.begin_end()
    w.qp.abort(RETRY_EXC)
    assert w.scq.buffered + w.rcq.buffered == 6
    w.hw[0].reset()
    w.qp.reset_journal()
    assert taken(w) == []
    w.send(4)
    w.hw[0].complete()
    assert taken(w) == [(4, SUCCESS)]


@pytest.mark.parametrize("other_first", [False, True])
def test_what_other_qps_have_completed_stays_in_order(make: Callable[..., World], other_first: bool) -> None:
    """Several QPs on one CQ, and a buffer whose WCs do not begin at its beginning."""
    w = make()
    w.protect()
    other = make(join=w, qp_num=0x200)
    other.protect()
    for i in range(40):  # the buffer has room for 64
        other.send(i)
        other.hw[0].complete()
    w.scq.drain(0)
    assert len(w.poll_cq(w.scq)) == 40
    for i in range(40):
        first, second = (other, w) if other_first else (w, other)
        for each in (first, second):
            each.send(100 + i if each is other else i)
            each.hw[0].complete()
        w.scq.drain(0)
    assert w.scq.buffered == 80
    w.qp.app_touched(True)
    w.hw[0].reset()
    w.qp.reset_journal()
    assert [wr_id for wr_id, _ in w.poll_cq(w.scq)] == list(range(100, 140))


@pytest.mark.parametrize("drained", [0, 1, 2])
def test_what_a_nic_keeps_is_forgotten_too(guarded: World, drained: int) -> None:
    """Soft-RoCE's RESET leaves its CQs as they are, and some of that may be in the buffer: it is all or nothing."""
    w = guarded
    for i in range(2):
        if i == drained:
            w.scq.drain(0)
            w.rcq.drain(0)
        w.send(i)
        w.recv(10 + i)
        w.hw[0].complete()
        w.hw[0].receive()
    w.qp.app_touched(True)
    w.hw[0].reset()
    w.qp.reset_journal()
    assert taken(w) == []


@pytest.mark.parametrize("drained", [0, 1, 2])
def test_what_a_destroyed_qp_has_completed_goes_with_it(make: Callable[..., World], drained: int) -> None:
    """As providers clean a CQ then; what is another QP's stays, and nothing comes of a backup that stops later."""
    w = make()
    w.protect()
    other = make(join=w, qp_num=0x200)
    other.protect()
    away(w)
    for i in range(4):
        if i == 2 * drained:
            for cq in (w.scq, w.rcq):
                cq.drain(0)
                cq.drain(1)
        w.send(i)
        other.send(100 + i)
        if i != 3:
            w.hw[1].complete()
        other.hw[0].complete()
    w.recv(10)
    w.qp.detach(0)
    w.qp.destroyed()
    w.hw[1].complete()
    w.hw[1].receive()
    w.scq.drain(1)
    w.rcq.drain(1)
    assert [wr_id for wr_id, _ in taken(w)] == [100, 101, 102, 103]
    w.qp.close()
    w.qp.destroyed()
    assert taken(w) == []


def both_complete(make: Callable[..., World]) -> tuple[World, World]:
    """Two QPs on one CQ: three completions of each, by turns, and behind them an error that the driver hears of."""
    w = make()
    w.protect()
    other = make(join=w, qp_num=0x200)
    other.protect()
    for i in range(3):
        for each, wr_id in ((w, i), (other, 100 + i)):
            each.send(wr_id)
            each.hw[0].complete()
    w.send(3)
    w.hw[0].fail_send(RETRY_EXC)
    _core.clear_attention()
    return w, other


def reset(w: World) -> None:
    """The application moves it to RESET."""
    w.qp.app_touched(True)
    w.hw[0].reset()
    w.qp.reset_journal()


@pytest.mark.parametrize("how", ["stays", "reset", "closed", "not ours"])
def test_what_a_poll_had_taken_of_a_qp_that_is_gone_does_not_come_back(
    make: Callable[..., World], how: str
) -> None:
    """A handler, amid a poll, resets or closes one of its QPs, or resets one that has no journal, and raises."""
    w, _ = both_complete(make)

    def driver() -> None:
        _core.clear_attention()
        if how == "reset":
            reset(w)
        elif how == "closed":
            w.qp.destroyed()
            w.qp.close()
        elif how == "not ours":
            w.scq.forget_qp(0x200)
        raise KeyboardInterrupt

    _core.set_driver(driver)
    with pytest.raises(KeyboardInterrupt):
        w.scq.poll(64)
    _core.set_driver(None)
    others = [100, 101, 102]
    left = {"stays": [0, 100, 1, 101, 2, 102], "reset": others, "closed": others, "not ours": [0, 1, 2]}
    assert [wr_id for wr_id, _ in w.poll_cq(w.scq)] == left[how]


@pytest.mark.parametrize("drained", [1, 2, 4, None])
def test_a_qp_without_a_journal_takes_along_what_was_taken_for_others(
    make: Callable[..., World], drained: int | None
) -> None:
    """All of it goes, or nothing: where nothing was taken out of the NIC's CQ, that is the NIC's affair."""
    w = make()
    w.protect()
    cq = w.scqs[0]
    for i in range(4):
        if i == drained:
            w.scq.drain(0)
        cq.push(100 + i, qp_num=0x200)
        w.send(i)
        w.hw[0].complete()
    if drained == 4:
        w.scq.drain(0)
    w.scq.forget_qp(0x300)
    untouched = [i + 100 * k for i in range(4) for k in (1, 0)]
    if drained is None:
        assert cq.pending == 8
        w.scq.forget_qp(0x200)
        assert cq.pending == 8 and [wr_id for wr_id, _ in w.poll_cq(w.scq)] == untouched
        return
    w.scq.forget_qp(0x200)
    assert [wr_id for wr_id, _ in w.poll_cq(w.scq)] == [0, 1, 2, 3]


@pytest.mark.parametrize("is_ours", [False, True])
def test_a_new_qp_may_have_the_number_of_a_destroyed_one(make: Callable[..., World], is_ours: bool) -> None:
    """Its journal is there until its backups are gone: the default NIC's number is not its own any more."""
    w = make()
    w.protect()
    away(w)
    w.send(0)
    w.qp.detach(0)
    w.qp.destroyed()
    if is_ours:
        new = make(join=w)
        new.send(7)
        new.hw[0].complete()
    else:
        w.scqs[0].push(7, qp_num=w.qp_num)
    w.hw[1].complete()
    w.scq.drain(1)
    assert w.poll_cq(w.scq) == [(7, SUCCESS)]
    w.qp.close()
    if is_ours:
        new.send(8)
        new.hw[0].complete()
    else:
        w.scqs[0].push(8, qp_num=w.qp_num)
    assert w.poll_cq(w.scq) == [(8, SUCCESS)]


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("lives_again", [False, True])
def test_a_poll_that_runs_the_driver_twice_gives_nothing_of_before(
    make: Callable[..., World], raises: bool, lives_again: bool
) -> None:
    """A handler resets a QP amid the first run, and may use it anew; one amid the second run may raise."""
    w, other = both_complete(make)
    runs = []

    def driver() -> None:
        _core.clear_attention()
        runs.append(len(runs))
        if len(runs) == 1:
            reset(w)
            if lives_again:
                w.send(50)
                w.hw[0].complete()
                w.scq.drain(0)  # the poll goes on with what is there then
            other.send(103)
            other.hw[0].complete()
            w.scq.drain(0)
            _core.raise_attention()
        elif raises:
            raise KeyboardInterrupt

    _core.set_driver(driver)
    left = [100, 101, 102, *([50] if lives_again else []), 103]
    try:
        if raises:
            with pytest.raises(KeyboardInterrupt):
                w.scq.poll(64)
            seen = []
        else:
            count, wcs = w.scq.poll(64)
            assert count == len(wcs)
            seen = [wc.wr_id for wc in wcs]
    finally:
        _core.set_driver(None)
    assert len(runs) > 1
    assert seen + [wr_id for wr_id, _ in w.poll_cq(w.scq)] == left


@pytest.mark.parametrize("wanted", [1, 2])
def test_a_poll_that_gives_back_all_it_took_looks_again(make: Callable[..., World], wanted: int) -> None:
    """Who armed the CQ sleeps on an empty poll: what came before it was armed raises no event any more."""
    w = make(with_channel=True)
    w.protect()
    other = make(join=w, qp_num=0x200)
    other.protect()
    w.qp.open_send(0)  # after a SWITCH or a MOVE: the driver hears of the first completion
    w.events()
    for i in range(wanted):
        w.send(i)
        w.hw[0].complete()
    for i in range(3):
        other.send(100 + i)
        other.hw[0].complete()

    def driver() -> None:
        _core.clear_attention()
        w.qp.detach(0)
        w.qp.destroyed()

    _core.clear_attention()
    w.scq.req_notify()
    _core.set_driver(driver)
    seen = [wr_id for wr_id, _ in w.poll_cq(w.scq, wanted)]
    _core.set_driver(None)
    _core.clear_attention()
    assert seen == [100, 101][:wanted]
    assert [wr_id for wr_id, _ in w.poll_cq(w.scq)] == [100, 101, 102][wanted:]


@pytest.mark.parametrize("threshold", range(1, 30))
def test_what_is_reset_where_a_poll_makes_its_answer_is_forgotten(guarded: World, threshold: int) -> None:
    """Up to Python 3.11 the collector runs there, where the interpreter has no pair at hand; later it never does."""
    w = guarded
    for i in range(3):
        w.send(i)
        w.hw[0].complete()
    under_way, ran = [1], list[int]()

    class Finalized:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            gc.disable()
            if under_way:
                ran.append(1)
                reset(w)

    before = gc.get_threshold()
    gc.disable()
    try:
        gc.collect()
        hoard = [(i, i) for i in range(5000)]  # more pairs than the interpreter keeps: the next one is new
        gc.collect()
        # Between the poll's end and that it is known, no step of Python code.
        steps = map(call, (partial(w.scq.poll, 64), under_way.clear))
        Finalized()
        gc.set_threshold(threshold)
        gc.enable()
        (count, wcs), _ = steps
    finally:
        gc.disable()
        gc.set_threshold(*before)
        gc.enable()
    assert hoard and (count, [wc.wr_id for wc in wcs]) == ((0, []) if ran else (3, [0, 1, 2]))


@pytest.mark.parametrize("each", [3, 150])
def test_a_want_of_memory_loses_none_of_what_a_poll_took(make: Callable[..., World], each: int) -> None:
    """Each allocation of a poll fails once, that of its count too; a QP that is reset meanwhile is still forgotten."""
    testcapi = pytest.importorskip("_testcapi")
    w = make(max_send=each + 1)
    w.protect()
    other = make(join=w, qp_num=0x200, max_send=each + 1)
    other.protect()
    failures = 0
    while True:
        for i in range(each):
            for one, wr_id in ((w, i), (other, 1000 + i)):
                one.send(wr_id)
                one.hw[0].complete()
            if i == each // 2:
                w.scq.drain(0)  # some of them are in the buffer
        _core.clear_attention()
        at = failures + 1 if each < 10 or failures < 3 else failures + 2 * each - 20
        testcapi.set_nomemory(at, at + 1)
        try:
            w.scq.poll(4 * each)
        except MemoryError:
            testcapi.remove_mem_hooks()
            failures += 1
        else:
            testcapi.remove_mem_hooks()
            break
        if failures % 2:
            every = [wr_id for i in range(each) for wr_id in (i, 1000 + i)]
            assert [wr_id for wr_id, _ in w.poll_cq(w.scq, 4 * each)] == every
        else:
            reset(w)
            assert [wr_id for wr_id, _ in w.poll_cq(w.scq, 4 * each)] == [1000 + i for i in range(each)]
    assert failures >= 6, "one for each WC, at least"


def test_what_is_forgotten_amid_a_poll_needs_no_memory(make: Callable[..., World]) -> None:
    """Most of what a poll had taken goes: its list would be made smaller, and there is no memory for that."""
    testcapi = pytest.importorskip("_testcapi")
    w = make(max_send=40)
    w.protect()
    other = make(join=w, qp_num=0x200)
    other.protect()
    w.qp.open_send(0)
    w.events()
    for i in range(30):
        w.send(i)
        w.hw[0].complete()
    for i in range(5):
        other.send(100 + i)
        other.hw[0].complete()

    def driver() -> None:
        _core.clear_attention()
        reset(w)
        testcapi.set_nomemory(1, 0)

    _core.clear_attention()
    _core.set_driver(driver)
    try:
        count, wcs = w.scq.poll(64)
    finally:
        testcapi.remove_mem_hooks()
        _core.set_driver(None)
    assert count == 5 and [wc.wr_id for wc in wcs] == [100, 101, 102, 103, 104]


def test_a_cq_that_a_driver_run_adds_is_polled_in_the_same_poll(make: Callable[..., World]) -> None:
    """The poll is past it, and it is not armed: who arms it after an empty answer hears of nothing."""
    w = make(shared_cq=True)
    w.protect()
    other = make(join=w, shared_cq=True, qp_num=0x200)
    other.protect()
    away(other)
    w.scq.set_active(1, False)
    other.send(5)
    other.hw[1].complete()
    w.send(1)
    w.hw[0].fail_send(RETRY_EXC)

    def driver() -> None:
        _core.clear_attention()
        w.scq.set_active(1, True)

    w.events()
    _core.clear_attention()
    _core.set_driver(driver)
    seen = w.poll_cq(w.scq)
    _core.set_driver(None)
    assert seen == [(5, SUCCESS)]


@pytest.mark.parametrize("count", [Fraction(5, 2), Decimal("2.5"), 2.5, float("inf"), 1 << 80, 3])
def test_counts_are_what_compares_with_an_int(guarded: World, count: object) -> None:
    """pyverbs polls until it has as many."""
    w = guarded
    for i in range(5):
        w.send(i)
        w.hw[0].complete()
    wanted = 5 if count in (float("inf"), 1 << 80) else 3
    assert w.scq.poll(count)[0] == wanted
    for none in (float("nan"), float("-inf"), 0, -1, -(1 << 80), False):
        assert w.scq.poll(none) == (0, [])
    assert w.scq.poll(True)[0] == min(1, 5 - wanted)


def test_what_is_put_back_raises_an_event(make: Callable[..., World]) -> None:
    """Another thread found the CQ empty, armed it and sleeps: who had its WCs in hand may never poll again."""
    w = make(with_channel=True)
    w.protect()
    for i in range(2):
        w.send(i)
        w.hw[0].complete()
    w.send(2)
    w.hw[0].fail_send(RETRY_EXC)
    _core.clear_attention()

    def driver() -> None:
        _core.clear_attention()
        w.scq.req_notify()
        raise KeyboardInterrupt

    _core.set_driver(driver)
    with pytest.raises(KeyboardInterrupt):
        w.scq.poll(64)
    _core.set_driver(None)
    assert w.channel.wait(0)[0] is w.scq
    assert w.poll_cq(w.scq) == [(0, SUCCESS), (1, SUCCESS)]


@pytest.mark.parametrize("how", ["closed", "reset"])
def test_what_a_nic_keeps_of_a_forgotten_life_goes_too(guarded: World, how: str) -> None:
    """Soft-RoCE does not clean its CQs. The default pair's life was over, and its flushes came late: none is shown."""
    w = guarded
    for i in range(4):
        w.recv(i)
        w.send(i)
    w.qp.close_send()
    w.qp.close_recv()
    w.qp.begin_fence(0)
    assert w.qp.post_marker(0) == 0
    w.hw[0].fail_send(RETRY_EXC)
    w.hw[0].fail_recv(FLUSH)
    w.scq.drain(0)
    w.rcq.drain(0)
    w.qp.forget_pair(0)
    w.hw[0].flush()
    w.switch(1, 0)
    if how == "closed":
        w.qp.detach(0)
        w.qp.destroyed()
    else:
        reset(w)
    assert taken(w) == []
