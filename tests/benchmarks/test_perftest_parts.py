# SPDX-License-Identifier: BSD-3-Clause
"""The benchmarks' arithmetic, addresses and command line."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.perftest.exchange import Destination, ExchangeError
from benchmarks.perftest.options import Test as Program
from benchmarks.perftest.options import parse
from benchmarks.perftest.report import Bandwidth, Latency, peak_time

WRITE_BW = Program("ib_write_bw", "RDMA_Write BW Test", "write")
ATOMIC_LAT = Program("ib_atomic_lat", "Atomic {atomic} Latency Test", "atomic", latency=True)
WRITE_LAT = Program("ib_write_lat", "RDMA_Write Latency Test", "write", latency=True)


@st.composite
def timelines(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Times of posts, and of completions that follow them in order."""
    posted = sorted(draw(st.lists(st.integers(0, 10_000), min_size=1, max_size=30)))
    delays = draw(st.lists(st.integers(1, 5_000), min_size=len(posted), max_size=len(posted)))
    completed: list[int] = []
    for begin, delay in zip(posted, delays, strict=True):
        completed.append(max(begin + delay, completed[-1] if completed else 0))
    return posted, completed


@given(timelines())
def test_peak_is_the_best_of_all_stretches(times: tuple[list[int], list[int]]) -> None:
    posted, completed = times
    count = len(posted)
    best = min((completed[j] - posted[i]) / (j + 1 - i) for i in range(count) for j in range(i, count))
    assert peak_time(posted, completed) == pytest.approx(best / 1e9)


def test_both_directions_are_added() -> None:
    ours, theirs = Bandwidth(1 << 20, 100, 1.0, 0.005), Bandwidth(1 << 20, 300, 2.0, 0.005)
    both = ours.with_other_direction(theirs)
    assert both.iters == 100
    assert both.iters / both.elapsed_s == pytest.approx(250)
    assert 1 / both.peak_s == pytest.approx(400)
    assert ours.with_other_direction(Bandwidth(1 << 20, 300, 2.0)).peak_s == 0


def test_rows_have_perftests_columns() -> None:
    row = Bandwidth(65536, 5000, 1.25, 65536 / 2**20 / 300).row(gbits=False).split()
    assert row == ["65536", "5000", "300.00", "250.00", "0.004000"]
    assert Bandwidth(1000, 10, 1e-5, 0.0).row(gbits=True).split() == [
        "1000",
        "10",
        "0.00",
        "8.00",
        "1.000000",
    ]
    fields = Latency(2, [float(i) for i in range(1, 1001)]).row().split()
    assert fields == ["2", "1000", "1.00", "1000.00", "500.50", "500.50", "288.67", "990.00", "999.00"]
    assert Latency(8, [50.0, 50.0]).duration_row().split() == ["8", "2", "50.00", "10000.00"]
    assert Latency(8, [50.0, 50.0], whole=True).duration_row().split() == ["8", "2", "50.00", "20000.00"]


@given(
    st.integers(0, 2**16 - 1),
    st.integers(0, 2**24 - 1),
    st.integers(0, 2**32 - 1),
    st.binary(min_size=16, max_size=16),
)
def test_an_address_survives_the_wire(lid: int, qpn: int, rkey: int, gid: bytes) -> None:
    side = Destination(lid, qpn, qpn ^ 1, rkey, rkey << 20, gid, 1024, lid & 0xFF)
    assert Destination.decode(side.encode()) == side


@pytest.mark.parametrize("line", ["", "1:2:3", "x:1:1:1:1:" + "00" * 16 + ":400:1", "1:1:1:1:1:00:400:1"])
def test_a_malformed_address_is_named(line: str) -> None:
    with pytest.raises(ExchangeError, match="malformed"):
        Destination.decode(line)


def test_defaults_are_perftests() -> None:
    options = parse(WRITE_BW, [])
    assert (options.size, options.iters, options.tx_depth, options.port) == (65536, 5000, 128, 18515)
    assert (options.moderation(65536), options.moderation(8192)) == (1, 100)
    options = parse(WRITE_LAT, ["host", "-D", "4"])
    assert (options.size, options.iters, options.host, options.margin_s) == (2, 1000, "host", 1.0)
    options = parse(ATOMIC_LAT, [])
    assert (options.size, options.sizes, options.title) == (8, [8], "Atomic FETCH_AND_ADD Latency Test")
    assert (options.outs, options.inline_size, options.num_qps) == (None, 0, 1)
    assert parse(WRITE_BW, ["--gid-index", "3"]).gid_index == parse(WRITE_BW, ["-x", "3"]).gid_index == 3


@pytest.mark.parametrize(
    "argv",
    [
        ["-n", "4"],
        ["-s", "0"],
        ["-D", "0"],
        ["-D", "3", "-f", "2"],
        ["-Q", "200"],
        ["-q", "0"],
        ["--idle-qps", "-1"],
        ["-D", "2", "-a"],
        ["-m", "1500"],
        ["-b", "--use-imm"],
    ],
)
def test_what_makes_no_sense_is_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(WRITE_BW, argv)
    assert caught.value.code == 2
    assert "error" in capsys.readouterr().err
