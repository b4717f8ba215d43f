# SPDX-License-Identifier: BSD-3-Clause
"""The broker's table of wanted keys, against a watch stream that is played by hand."""

from __future__ import annotations

from collections.abc import Iterable

from shiftverbs.config import Config
from shiftverbs.exchanger.key_table import DIRECTORY_KEYS, KeyTable
from shiftverbs.exchanger.link_events import Changed, Denied, Got, StreamEnded, Up, WatchEnded, Watches

CONFIG = Config(etcd_backoff_min_ms=100, etcd_backoff_max_ms=10_000)


class Stream:
    """Records what is watched."""

    def __init__(self) -> None:
        self.watched: dict[str, int] = {}
        self.closed = False
        self.next: Stream | None = None
        self.number = 0

    def watch(self, target: str, start_revision: int) -> int:
        assert target not in self.watched
        self.watched[target] = start_revision
        self.number += 1
        return self.number

    def cancel(self, target: str) -> None:
        del self.watched[target]

    def close(self) -> None:
        self.closed = True

    def successor(self) -> Watches:
        self.next = Stream()
        return self.next


class Bench:
    """A table with its surroundings."""

    def __init__(self) -> None:
        self.reads: list[list[str]] = []
        self.told: list[tuple[str, int]] = []
        self.table = KeyTable(CONFIG, self._read, lambda key, client: self.told.append((key, client)))
        self.stream = Stream()
        self.session = 0

    def _read(self, keys: Iterable[str]) -> None:
        self.reads.append(list(keys))

    def up(self, now_s: float = 0.0) -> None:
        self.session += 1
        self.stream = Stream()
        self.table.handle(Up(self.session, self.stream), now_s)

    def got(self, revision: int, **values: bytes | int | None) -> None:
        self.table.handle(
            Got(self.session, revision, {f"/d/{key}": value for key, value in values.items()}), 0.0
        )

    def changed(self, key: str, value: bytes | None, revision: int) -> None:
        self.table.handle(Changed(self.session, [(f"/d/{key}", value, revision)]), 0.0)

    def value(self, key: str) -> object:
        frame = self.table.frame_for(f"/d/{key}")
        return "unknown" if frame is None else frame.get("value", frame["ev"])


def test_a_key_is_read_then_watched_from_the_next_revision() -> None:
    bench = Bench()
    bench.table.want("/d/a", 1)
    assert bench.reads == []
    bench.up()
    assert bench.reads == [["/d/a"]]
    assert bench.value("a") == "unknown"
    bench.got(7, a=None)
    assert bench.stream.watched == {"/d/a": 8}
    assert bench.told == [("/d/a", 1)]
    assert bench.value("a") is None
    bench.changed("a", b"x", 9)
    assert bench.value("a") == "x"
    bench.table.want("/d/a", 2)
    assert bench.told == [("/d/a", 1), ("/d/a", 1), ("/d/a", 2)]
    bench.table.unwant("/d/a", 1)
    assert bench.stream.watched
    bench.table.unwant("/d/a", 2)
    assert bench.stream.watched == {}
    bench.table.unwant("/d/a", 2)


def test_news_that_overtake_each_other_leave_the_newest() -> None:
    bench = Bench()
    bench.up()
    bench.table.want("/d/a", 1)
    # Another watch already covered it: the change arrives before the answer to the read.
    bench.changed("a", b"new", 12)
    bench.got(11, a=b"old")
    assert bench.value("a") == "new"
    bench.changed("a", b"older", 10)
    assert bench.value("a") == "new"
    bench.changed("a", None, 13)
    assert bench.value("a") is None


def test_the_same_value_again_is_no_news() -> None:
    bench = Bench()
    bench.table.want("/d/a", 1)
    bench.up()
    bench.got(5, a=b"x")
    bench.told.clear()
    bench.table.handle_down()
    assert bench.stream.closed
    # A restored etcd counts from a lower revision.
    bench.up()
    bench.got(2, a=b"x")
    assert bench.told == []
    assert bench.stream.watched == {"/d/a": 3}
    bench.changed("a", b"y", 4)
    assert bench.told == [("/d/a", 1)]


def test_many_keys_of_a_directory_share_one_watch() -> None:
    bench = Bench()
    bench.up()
    names = [f"k{i}" for i in range(DIRECTORY_KEYS)]
    for name in names:
        bench.table.want(f"/d/{name}", 1)
    bench.table.want("/e/alone", 1)
    bench.table.handle(Got(1, 5, {**{f"/d/{name}": None for name in names}, "/e/alone": None}), 0.0)
    assert bench.stream.watched == {"/d/": 6, "/e/alone": 6}
    bench.table.want("/d/more", 1)
    bench.table.handle(Got(1, 9, {"/d/more": None}), 0.0)
    assert bench.stream.watched == {"/d/": 6, "/e/alone": 6}
    bench.changed("more", b"x", 10)
    assert bench.value("more") == "x"
    for name in [*names, "more"]:
        bench.table.unwant(f"/d/{name}", 1)
    assert bench.stream.watched == {"/e/alone": 6}


def test_a_watch_that_ends_is_made_again_after_a_pause() -> None:
    bench = Bench()
    bench.table.want("/d/a", 1)
    bench.up()
    bench.got(5, a=b"x")
    bench.reads.clear()
    del bench.stream.watched["/d/a"]
    bench.table.handle(WatchEnded(1, "/d/a", "compacted", bench.stream.number), 10.0)
    due = bench.table.next_due_s(10.0)
    assert due is not None
    assert 0 < due <= 0.2
    bench.table.handle_time(10.0)
    assert bench.reads == []
    bench.table.handle_time(10.0 + due)
    assert bench.reads == [["/d/a"]]
    assert bench.table.next_due_s(11.0) is None
    bench.got(9, a=b"y")
    assert bench.stream.watched == {"/d/a": 10}
    assert bench.value("a") == "y"


def test_where_watching_always_fails_polling_slows_down_to_the_limit() -> None:
    bench = Bench()
    bench.table.want("/d/a", 1)
    bench.up()
    now, pauses = 100.0, []
    stream: Stream | None = bench.stream
    for revision in range(5, 20):
        bench.got(revision, a=str(revision).encode())
        assert stream is not None
        assert stream.watched
        bench.table.handle(StreamEnded(1, "broken"), now)
        stream = stream.next
        pause = bench.table.next_due_s(now)
        assert pause is not None
        pauses.append(round(pause, 6))
        now += pause
        bench.table.handle_time(now)
        assert bench.value("a") == str(revision)
    assert pauses == sorted(pauses)
    assert pauses[0] <= 0.11
    assert pauses[-1] == 10.0


def test_events_of_an_earlier_session_are_ignored() -> None:
    bench = Bench()
    bench.table.want("/d/a", 1)
    bench.up()
    bench.got(50, a=b"x")
    bench.table.handle_down()
    bench.changed("a", b"late", 60)
    assert bench.value("a") == "x"
    bench.up()
    bench.table.handle(Changed(1, [("/d/a", b"late", 60)]), 0.0)
    bench.table.handle(Got(1, 61, {"/d/a": b"late"}), 0.0)
    bench.table.handle(WatchEnded(1, "/d/a", "", bench.stream.number), 0.0)
    bench.table.handle(StreamEnded(1, ""), 0.0)
    assert bench.value("a") == "x"
    assert bench.table.next_due_s(0.0) is None


def test_what_is_too_large_is_not_carried() -> None:
    bench = Bench()
    bench.table.want("/d/a", 1)
    bench.table.want("/d/b", 1)
    bench.up()
    bench.got(5, a=b"x" * 9000, b=1 << 20)
    assert bench.table.frame_for("/d/a") == {"ev": "oversize", "key": "/d/a", "size": 9000}
    assert bench.table.frame_for("/d/b") == {"ev": "oversize", "key": "/d/b", "size": 1 << 20}


def test_an_answer_for_a_key_nobody_wants_any_more_is_dropped() -> None:
    bench = Bench()
    bench.up()
    bench.table.want("/d/a", 1)
    bench.table.unwant("/d/a", 1)
    bench.got(5, a=b"x")
    assert bench.stream.watched == {}
    assert bench.told == []
    assert bench.table.frame_for("/d/a") is None


def test_the_end_of_an_earlier_watch_does_not_end_the_present_one() -> None:
    bench = Bench()
    bench.table.want("/d/a", 1)
    bench.up()
    bench.got(7, a=None)
    # etcd ends the watch; before that is heard of, the key is let go of and wanted again.
    late = WatchEnded(1, "/d/a", "compacted", bench.stream.number)
    bench.table.unwant("/d/a", 1)
    bench.table.want("/d/a", 1)
    bench.got(9, a=b"x")
    assert bench.stream.watched == {"/d/a": 10}
    bench.table.handle(late, 0.0)
    assert bench.table.next_due_s(0.0) is None
    bench.got(11, a=b"x")
    bench.table.handle(WatchEnded(1, "/d/a", "compacted", bench.stream.number), 0.0)
    assert bench.table.next_due_s(0.0) is not None


def test_denied_keys_are_told_once_and_a_few_tried_again() -> None:
    bench = Bench()
    bench.up()
    keys = [f"/d/{number}" for number in range(20)]
    for key in keys:
        bench.table.want(key, 1)
    for round_ in range(3):
        bench.reads.clear()
        bench.table.handle(Denied(1, dict.fromkeys(keys, "no rights")), 100.0 * round_)
        assert bench.table.frame_for("/d/3") == {"ev": "refused", "key": "/d/3", "reason": "no rights"}
        assert len(bench.told) == len(keys)
        bench.table.handle_time(100.0 * round_ + 99)
        assert [len(read) for read in bench.reads] == [8]
    tried = bench.reads[0][0]
    bench.reads.clear()
    # The rights come: then all are read.
    bench.table.handle(Got(1, 5, {tried: b"x"}), 400.0)
    assert sorted(bench.reads[0]) == sorted(set(keys) - {tried})
    assert bench.told[-1] == (tried, 1)
    assert bench.stream.watched == {"/d/": 6}
