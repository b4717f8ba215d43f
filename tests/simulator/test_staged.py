# SPDX-License-Identifier: BSD-3-Clause
"""The stories of staged.py and its files, with the production code as it is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from simulator import checks
from simulator.network import Network
from simulator.staged import KINDS
from simulator.story import Story, telling

STORIES = [(story, judge) for stories, judge in KINDS for story in stories]


@pytest.mark.parametrize(("story", "judge"), STORIES, ids=lambda it: it.__name__)
def test_a_story_ends_as_it_should(story: Story, judge: Callable[[Network], None]) -> None:
    with telling(story) as net:
        checks.check(net)
        judge(net)
