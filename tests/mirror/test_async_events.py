# SPDX-License-Identifier: BSD-3-Clause
"""One descriptor, two readers: each event once to the application, once to the driver."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import pyverbs.device

from shiftverbs.shadows import async_events
from shiftverbs.shadows.async_events import AsyncEvents


class Event:
    """What _nic.get_async_event returns."""

    def __init__(self, kind: int, element: int = 1) -> None:
        self.type = kind
        self.element = element
        self.acks = 0

    def ack(self) -> None:
        self.acks += 1


class Device:
    """A pipe for a descriptor: one byte per event."""

    def __init__(self) -> None:
        self.fd, self._write = os.pipe()
        self.events: list[Event] = []
        self.taken: list[Event] = []

    def happens(self, kind: int, element: int = 1) -> None:
        self.events.append(Event(kind, element))
        os.write(self._write, b".")

    def take(self, context: int) -> Event | None:
        assert context == 4711
        if not self.events:
            return None
        os.read(self.fd, 1)
        self.taken.append(self.events.pop(0))
        return self.taken[-1]

    def close(self) -> None:
        os.close(self.fd)
        os.close(self._write)


@pytest.fixture
def device() -> Iterator[Device]:
    made = Device()
    yield made
    made.close()


def events_of(device: Device, listener: Any = None) -> AsyncEvents:
    return AsyncEvents(4711, device.fd, device.take, listener)


def test_each_event_once_to_each(device: Device) -> None:
    heard: list[int] = []
    events = events_of(device, lambda event: heard.append(event.type))
    for kind in (9, 10, 9):
        device.happens(kind)
    assert events.pump() == 3 and events.pump() == 0
    assert heard == [9, 10, 9]
    got = [events.get() for _ in range(3)]
    assert [event.event_type for event in got] == [9, 10, 9]
    assert all(isinstance(event, pyverbs.device.AsyncEvent) for event in got)
    for event in got:
        event.ack()
        event.ack()
    assert [event.acks for event in device.taken] == [1, 1, 1]


def test_waiting_wakes_for_the_device_and_for_what_the_driver_took(device: Device) -> None:
    events = events_of(device)
    got: list[Any] = []
    reader = threading.Thread(target=lambda: got.extend([events.get(), events.get()]))
    reader.start()
    device.happens(9)
    # Taken by the "control thread", perhaps, before the reader sees the descriptor.
    while reader.is_alive() and len(got) < 2:
        events.pump()
        if not device.events:
            device.happens(10)
        reader.join(0.01)
    reader.join(10)
    assert [event.event_type for event in got] == [9, 10]


def test_a_removed_device_is_told_as_pyverbs_does(device: Device) -> None:
    def take(context: int) -> None:
        raise OSError(errno.EIO, "removed")

    with pytest.raises(pyverbs.device.PyverbsRDMAError) as error:
        AsyncEvents(4711, device.fd, take).get()
    assert error.value.error_code == errno.EIO


def test_nonblocking_descriptor(device: Device) -> None:
    events = events_of(device)
    fcntl.fcntl(device.fd, fcntl.F_SETFL, fcntl.fcntl(device.fd, fcntl.F_GETFL) | os.O_NONBLOCK)
    with pytest.raises(pyverbs.device.PyverbsRDMAError):
        events.get()
    device.happens(3)
    assert events.get().event_type == 3


def test_what_failover_caused_is_not_shown(device: Device) -> None:
    events = events_of(device)
    events.ours = lambda event: event.element == 5
    device.happens(4, 5)
    device.happens(4, 6)
    device.happens(4, 5)
    assert events.pump() == 3
    assert events.get().event_type == 4
    assert [event.acks for event in device.taken] == [1, 1, 1] and not events._queue


def test_what_failover_caused_does_not_keep_a_waiting_thread_busy(device: Device) -> None:
    looks = 0

    def take(context: int) -> Event | None:
        nonlocal looks
        looks += 1
        return device.take(context)

    events = AsyncEvents(4711, device.fd, take)
    events.ours = lambda event: event.element == 5
    got: list[Any] = []
    reader = threading.Thread(target=lambda: got.append(events.get()))
    reader.start()
    device.happens(4, 5)
    reader.join(0.3)
    assert reader.is_alive() and looks < 20
    device.happens(4, 6)
    reader.join(10)
    assert [event.event_type for event in got] == [4]


def test_each_of_two_waiting_threads_gets_its_event(device: Device) -> None:
    events = events_of(device)
    got: list[Any] = []
    readers = [threading.Thread(target=lambda: got.append(events.get())) for _ in range(2)]
    for reader in readers:
        reader.start()
    with events._lock:
        device.happens(9)
        device.happens(10)
        events.pump()
    for reader in readers:
        reader.join(10)
    assert sorted(event.event_type for event in got) == [9, 10]


def test_a_listener_that_fails_wakes_who_waits(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a signal's handler raises in the driver, in another thread than the one that waits for events."""
    wait, taken = os.pipe()
    # The device's own descriptor wakes nobody: the event is taken.
    events = AsyncEvents(4711, wait, device.take)
    got: list[Any] = []
    found_nothing, wait_readable = threading.Event(), async_events.wait_readable

    def waits(fd: int, also: int = -1) -> None:
        found_nothing.set()
        wait_readable(fd, also)

    def fail(event: Any) -> None:
        raise ValueError(event.type)

    monkeypatch.setattr(async_events, "wait_readable", waits)
    reader = threading.Thread(target=lambda: got.append(events.get()))
    reader.start()
    assert found_nothing.wait(10)
    events.listener = fail
    device.happens(7)
    with pytest.raises(ValueError):
        events.pump()
    reader.join(10)
    assert [event.event_type for event in got] == [7]
    os.close(wait)
    os.close(taken)


def test_a_listener_that_fails_loses_no_event(device: Device) -> None:
    def fail(event: Any) -> None:
        raise ValueError(event.type)

    events = events_of(device, fail)
    device.happens(7)
    with pytest.raises(ValueError):
        events.pump()
    events.listener = None
    assert events.get().event_type == 7 and device.taken[0].acks == 1


def test_bounded(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_events, "MAX_QUEUED", 3)
    events = events_of(device)
    for kind in range(5):
        device.happens(kind)
    events.pump()
    assert [events.get().event_type for _ in range(3)] == [2, 3, 4] and events.dropped == 2


def test_closing_ends_the_wait(device: Device) -> None:
    events = events_of(device)
    errors: list[Exception] = []

    def read() -> None:
        try:
            events.get()
        except Exception as error:
            errors.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    events.close()
    events.close()
    reader.join(10)
    assert len(errors) == 1 and isinstance(errors[0], pyverbs.device.PyverbsRDMAError)
    device.happens(1)
    assert events.pump() == 0


def test_a_signal_while_events_are_taken(device: Device) -> None:
    """None is lost, or stays unacknowledged, which would block who destroys its QP; nor does the lock stay taken."""

    class Alarm(Exception):
        pass

    def handler(number: int, frame: object) -> None:
        raise Alarm

    def take(context: int) -> Event | None:
        event = device.take(context)
        if event is not None:
            signal.raise_signal(signal.SIGUSR1)
        return event

    events = AsyncEvents(4711, device.fd, take)
    device.happens(9)
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(Alarm):
            events.get()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert [event.acks for event in device.taken] == [1]
    pumped: list[int] = []
    thread = threading.Thread(target=lambda: pumped.append(events.pump(wait=False)))
    thread.start()
    thread.join(10)
    assert pumped == [0]
    assert events.get().event_type == 9
