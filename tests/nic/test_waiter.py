# SPDX-License-Identifier: BSD-3-Clause
"""Waiter: readiness, attention, grace, deadline, listeners, close, fork, exit. Cases in waiter_cases.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from nic.fakes import case_names

CASES = case_names(Path(__file__).with_name("waiter_cases.py"))


@pytest.mark.parametrize("case", CASES)
def test_waiter(run_case: Callable[..., str], case: str) -> None:
    output = run_case("waiter_cases", case)
    assert "Traceback" not in output, output
    if case == "case_exit_while_something_wakes_the_control_thread":
        assert "stayed away" in output


def test_cases_are_found() -> None:
    assert len(CASES) >= 14
