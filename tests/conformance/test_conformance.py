# SPDX-License-Identifier: BSD-3-Clause
"""rdma-core's own pyverbs tests on the software RNIC: with shiftverbs each ends as it does with pyverbs."""

from __future__ import annotations

import io
import json
import unittest
from collections import Counter

import pytest

from conformance import compare

# Comparison of made-up outcomes against the tests that this name matches: none of the kernel's list.
NONE = ("no such test",)


@pytest.fixture(scope="module")
def done() -> compare.Comparison:
    """Both runs, once."""
    found = compare.compare(limit_s=130)
    print(compare.report(found))
    return found


def test_no_test_fails(done: compare.Comparison) -> None:
    assert len(done.pyverbs) == len(done.shiftverbs) > 200
    assert done.bad == []


def test_shiftverbs_makes_no_difference(done: compare.Comparison) -> None:
    assert done.different == []


def test_failover_was_on(done: compare.Comparison) -> None:
    """What a test's shape allows to be protected was: its traffic ran through journal and gates."""
    assert done.without_failover == []
    assert done.qps["protected"] >= 30


def test_what_passes_on_the_kernels_soft_roce_passes_here(done: compare.Comparison) -> None:
    assert len(compare.known_to_pass()) == 86
    assert done.short_of_the_kernel == []


def test_every_skip_has_a_reason(done: compare.Comparison) -> None:
    assert [name for name, (status, why) in done.shiftverbs.items() if status == "skipped" and not why] == []


def test_the_report_counts_what_was_run(done: compare.Comparison) -> None:
    line = next(line for line in compare.report(done).splitlines() if line.startswith("all "))
    statuses = [status for outcomes in (done.pyverbs, done.shiftverbs) for status, _ in outcomes.values()]
    assert sum(map(int, line.split()[1:7])) == len(statuses)
    assert int(line.split()[1]) + int(line.split()[4]) == statuses.count("passed")
    assert done.good


@pytest.mark.parametrize(
    "other, complaint",
    [
        (("failed", "Traceback"), "bad"),
        (("died", "exit status -11"), "bad"),
        (("failed", "Traceback"), "different"),
        (("died", "exit status -11"), "different"),
        (("skipped", "of late"), "different"),
    ],
)
def test_a_difference_is_found(other: tuple[str, str], complaint: str) -> None:
    name = "tests.test_qp.QPTest.test_modify_ud_qp"
    found = compare.Comparison({name: ("passed", "")}, {name: other}, match=NONE)
    assert not found.good
    assert len(getattr(found, complaint)) == 1 and name in getattr(found, complaint)[0]
    assert name in compare.report(found)
    row = next(line for line in compare.report(found).splitlines() if line.startswith("test_qp "))
    assert row.split()[-1] == "1", row


def test_another_reason_to_skip_is_a_difference() -> None:
    name = "tests.test_mr.MWTest.test_reg_mw"
    found = compare.Comparison({name: ("skipped", "one")}, {name: ("skipped", "another")}, match=NONE)
    assert len(found.different) == 1 and "another" in found.different[0]


def test_a_test_that_is_gone_is_a_difference() -> None:
    name = "tests.test_mr.MWTest.test_reg_mw"
    assert compare.Comparison({name: ("passed", "")}, {}, match=NONE).different
    assert compare.Comparison({}, {name: ("passed", "")}, match=NONE).different


def test_a_run_without_failover_is_not_good() -> None:
    outcomes = dict.fromkeys(compare.known_to_pass(), ("passed", ""))
    assert compare.Comparison(outcomes, outcomes, Counter({"protected": 1})).good
    assert not compare.Comparison(outcomes, outcomes).good
    late = Counter({"protected": 1, "pairing: the backup QPs are being connected": 1})
    assert not compare.Comparison(outcomes, outcomes, late).good


def test_a_test_missing_from_the_kernels_list_is_told() -> None:
    outcomes = dict.fromkeys(compare.known_to_pass()[1:], ("passed", ""))
    found = compare.Comparison(outcomes, outcomes, Counter({"protected": 1}))
    assert not found.good and "absent" in found.short_of_the_kernel[0]


def test_a_run_ends_at_its_limit() -> None:
    with pytest.raises(TimeoutError):
        compare.compare(match=["test_pd."], limit_s=0)


def test_failures_and_errors_are_told_apart_from_passes() -> None:
    """The teller of outcomes, on tests of our own."""

    class Some(unittest.TestCase):
        def test_passes(self) -> None:
            pass

        def test_fails(self) -> None:
            self.assertEqual(1, 2)

        def test_raises(self) -> None:
            raise OSError("on purpose")

        def test_skips(self) -> None:
            self.skipTest("no such thing")

        def test_fails_in_a_part(self) -> None:
            with self.subTest("part"):
                self.fail("only here")

    stream = io.StringIO()
    suite = unittest.defaultTestLoader.loadTestsFromTestCase(Some)
    suite.run(compare.upstream._Tell(stream))
    ended = {}
    for line in map(json.loads, stream.getvalue().splitlines()):
        if "end" in line:
            ended[line["end"].rpartition(".")[2]] = (line["status"], line["why"])
    assert {name: status for name, (status, _) in ended.items()} == {
        "test_passes": "passed",
        "test_fails": "failed",
        "test_raises": "failed",
        "test_skips": "skipped",
        "test_fails_in_a_part": "failed",
    }
    assert ended["test_skips"][1] == "no such thing" and "on purpose" in ended["test_raises"][1]
