# SPDX-License-Identifier: BSD-3-Clause
"""Samples of how long sends take: when one begins and ends, of what it is, and what breaks it off."""

from __future__ import annotations

import ctypes
import errno
from collections.abc import Callable, Iterator

import pytest
from fake import REM_ACCESS, RETRY_EXC, SUCCESS, World

from shiftverbs import _core


class Clock:
    """A clock that goes on when it is told to."""

    now = 1000


CLOCK = Clock()
_READ = ctypes.CFUNCTYPE(ctypes.c_int64)(lambda: CLOCK.now)


@pytest.fixture(autouse=True)
def clock() -> Iterator[Clock]:
    """The clock of samples."""
    CLOCK.now = 1000
    _core.set_sample_clock(ctypes.cast(_READ, ctypes.c_void_p).value or 0)
    yield CLOCK
    _core.set_sample_clock(0)
    _core.ended_samples()


def ended(sample: _core.SendSample) -> tuple[int, ...] | None:
    """What has ended, which is this one and nothing else."""
    assert _core.ended_samples() == [sample]
    return sample.take()


def test_it_begins_with_a_post_and_ends_when_that_is_polled(guarded: World, clock: Clock) -> None:
    sample = _core.SendSample()
    sample.want([guarded.qp], 0)
    clock.now = 2000
    guarded.send(7)
    clock.now = 2100
    guarded.send(8)
    assert guarded.poll() == []
    clock.now = 2500
    guarded.hw[0].complete()
    assert guarded.poll() == [(7, SUCCESS)]
    # Not looked at from 2,100 to 2,500; the second send was not there when it began.
    assert ended(sample) == (64, 1, 2000, 2500, 400, 0)
    guarded.hw[0].complete()
    assert guarded.poll() == [(8, SUCCESS)]
    assert _core.ended_samples() == []


def test_it_is_of_all_that_is_outstanding_up_to_the_last_that_tells(guarded: World, clock: Clock) -> None:
    guarded.send(1, sges=[(0x1000, 100, 1), (0x2000, 20, 1)])
    sample = _core.SendSample()
    sample.want([guarded.qp], 0)
    guarded.send(2)
    guarded.hw[0].complete()
    guarded.poll()
    assert _core.ended_samples() == []
    clock.now = 1300
    guarded.hw[0].complete()
    guarded.poll()
    # The oldest may have been under way.
    assert ended(sample) == (184, 2, 1000, 1300, 300, 120)


def test_without_a_completion_to_come_it_is_broken_off(guarded: World) -> None:
    sample = _core.SendSample()
    sample.want([guarded.qp], 0)
    guarded.send(1, flags=0)
    assert ended(sample) is None
    guarded.send(2)
    guarded.hw[0].complete(2)
    assert guarded.poll() == [(2, SUCCESS)]
    assert _core.ended_samples() == []


def test_what_is_behind_the_last_that_tells_is_left_out(guarded: World, clock: Clock) -> None:
    guarded.send(1)
    guarded.send(2, flags=0)
    sample = _core.SendSample()
    sample.want([guarded.qp], 0)
    guarded.send(3, flags=0)
    clock.now = 1100
    guarded.hw[0].complete(3)
    guarded.poll()
    assert ended(sample) == (64, 1, 1000, 1100, 100, 64)


def test_a_look_in_vain_is_noted_and_an_event_is_as_good_as_one(
    make: Callable[..., World], clock: Clock
) -> None:
    w = make(with_channel=True)
    w.protect()
    sample = _core.SendSample()
    sample.want([w.qp], 0)
    w.scq.req_notify()
    w.send(1)
    clock.now = 1900
    w.hw[0].complete()
    assert w.channel is not None and w.channel.wait(0)[0] is w.scq
    clock.now = 2000
    w.poll()
    assert ended(sample) == (64, 1, 1000, 2000, 100, 0)


def test_a_cursor_that_finds_nothing_says_so_while_a_sample_waits(guarded: World, clock: Clock) -> None:
    cursor = _core.CQCursor(guarded.scq, guarded.scqs[0].ptr)
    sample = _core.SendSample()
    sample.want([guarded.qp], 0)
    guarded.send(1)
    clock.now = 1400
    assert cursor.start_poll(None) == errno.ENOENT
    clock.now = 1500
    guarded.hw[0].complete()
    assert cursor.start_poll(None) == 0
    assert cursor.poll_next() == errno.ENOENT
    assert ended(sample) == (64, 1, 1000, 1500, 100, 0)


def test_a_completion_that_the_cursor_finds_was_a_look(guarded: World, clock: Clock) -> None:
    cursor = _core.CQCursor(guarded.scq, guarded.scqs[0].ptr)
    guarded.send(1)
    sample = _core.SendSample()
    sample.want([guarded.qp], 0)
    guarded.send(2)
    for now in (1400, 1500):
        clock.now = now
        guarded.hw[0].complete()
        assert cursor.start_poll(None) == 0
    assert ended(sample) == (128, 2, 1000, 1500, 100, 64)


def test_several_qps_are_one_sample(make: Callable[..., World], clock: Clock) -> None:
    first = make()
    second = make(qp_num=0x200, join=first)
    for w in (first, second):
        w.protect()
    second.send(1)
    sample = _core.SendSample()
    sample.want([first.qp, second.qp], 0)
    first.send(2)
    clock.now = 1200
    first.hw[0].complete()
    first.poll()
    assert _core.ended_samples() == []
    clock.now = 1500
    second.hw[0].complete()
    first.poll()
    assert ended(sample) == (128, 2, 1000, 1500, 300, 64)


@pytest.mark.parametrize("how", ["close_send", "open_send", "pair_reset", "abort", "reset_journal", "close"])
@pytest.mark.parametrize("begun", [False, True])
def test_it_is_broken_off_where_something_else_happens(guarded: World, how: str, begun: bool) -> None:
    sample = _core.SendSample()
    sample.want([guarded.qp], 0)
    if begun:
        guarded.send(1)
    call: Callable[[], object] = {
        "close_send": guarded.qp.close_send,
        "open_send": lambda: guarded.qp.open_send(1),
        "pair_reset": lambda: guarded.qp.pair_reset(0),
        "abort": guarded.qp.abort,
        "reset_journal": guarded.qp.reset_journal,
        "close": guarded.qp.close,
    }[how]
    call()
    assert ended(sample) is None
    sample.want([], 0)
    assert ended(sample) is None


def test_a_failure_ends_none(guarded: World) -> None:
    sample = _core.SendSample()
    sample.want([guarded.qp], 0)
    guarded.send(1)
    guarded.hw[0].fail_send(RETRY_EXC)
    guarded.poll()
    assert _core.ended_samples() == []
    guarded.fence(0)
    assert ended(sample) is None


def test_on_another_pair_there_is_none(guarded: World) -> None:
    sample = _core.SendSample()
    sample.want([guarded.qp], 1)
    guarded.send(1)
    assert ended(sample) is None


def test_a_qp_is_in_one_sample(guarded: World) -> None:
    first, second = _core.SendSample(), _core.SendSample()
    first.want([guarded.qp], 0)
    second.want([guarded.qp], 0)
    assert ended(first) is None
    guarded.send(1)
    del second  # whoever wanted it is gone, and the QP is free
    guarded.hw[0].complete()
    assert guarded.poll() == [(1, SUCCESS)]
    assert _core.ended_samples() == []


def test_the_next_one_is_wanted_anew(guarded: World, clock: Clock) -> None:
    sample = _core.SendSample()
    for n in range(3):
        sample.want([guarded.qp], 0)
        guarded.send(n)
        clock.now += 50
        guarded.hw[0].complete()
        guarded.poll()
        assert ended(sample) == (64, 1, clock.now - 50, clock.now, 50, 0)
        guarded.send(n)
        guarded.hw[0].complete()
        guarded.poll()
        assert _core.ended_samples() == []


def test_one_that_ended_and_is_dropped_is_not_told_of(guarded: World) -> None:
    sample = _core.SendSample()
    sample.want([guarded.qp], 0)
    guarded.send(1)
    guarded.hw[0].complete()
    guarded.poll()
    sample.drop()
    assert _core.ended_samples() == [] and sample.take() is None


def test_a_closed_qp_takes_no_post(guarded: World) -> None:
    sample = _core.SendSample()
    sample.want([guarded.qp], 0)
    guarded.qp.close()
    with pytest.raises(Exception, match="post send"):
        guarded.send(1)
    assert ended(sample) is None


@pytest.mark.parametrize("how", ["own error", "moved to ERR", "not guarded any more"])
def test_a_qp_that_fails_for_itself_holds_up_no_other(make: Callable[..., World], how: str) -> None:
    """Nothing that was outstanding there completes any more, and the QP may stay open for long."""
    first = make()
    second = make(qp_num=0x200, join=first)
    for w in (first, second):
        w.protect()
    second.send(1)
    first.send(2)
    sample = _core.SendSample()
    sample.want([first.qp, second.qp], 0)
    first.send(3)
    if how == "moved to ERR":
        second.qp.app_touched()
    elif how == "not guarded any more":
        second.qp.guarded = False
    if how == "own error":
        second.hw[0].fail_send(REM_ACCESS)
    second.hw[0].flush()
    first.hw[0].complete(2)
    first.poll()
    assert first.qp.outstanding == second.qp.outstanding == (0, 0)
    assert ended(sample) is None
