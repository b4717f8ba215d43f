# SPDX-License-Identifier: BSD-3-Clause
"""Raw verbs, ModifySteps and async events, on the software RNIC. Cases in verbs_cases.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from nic.fakes import case_names

CASES = case_names(Path(__file__).with_name("verbs_cases.py"))


@pytest.mark.parametrize("case", CASES)
def test_verbs(run_case: Callable[..., str], case: str) -> None:
    output = run_case("verbs_cases", case, softrnic="1")
    assert "Traceback" not in output, output


def test_cases_are_found() -> None:
    assert len(CASES) >= 8
