# SPDX-License-Identifier: BSD-3-Clause
"""NicWorker: order, results, jobs, life without the GIL, stop, fork, exit. Cases in worker_cases.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from nic.fakes import case_names

CASES = case_names(Path(__file__).with_name("worker_cases.py"))


@pytest.mark.parametrize("case", CASES)
def test_worker(run_case: Callable[..., str], case: str) -> None:
    output = run_case("worker_cases", case)
    assert "Traceback" not in output, output
    if case == "case_exit_with_a_running_python_job":
        assert "the job finished and the next did not run" in output


def test_cases_are_found() -> None:
    assert len(CASES) >= 20
