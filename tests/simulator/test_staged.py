# SPDX-License-Identifier: BSD-3-Clause
"""The stories of staged.py, with the production code as it is."""

from __future__ import annotations

import pytest
from simulator import checks
from simulator.checks import over
from simulator.staged import ENDED, LEFT, STAGED, SURVIVED, ends
from simulator.story import Story, telling


@pytest.mark.parametrize("story", STAGED)
def test_a_replay_that_would_be_seen_is_an_abort(story: Story) -> None:
    with telling(story) as net:
        checks.check(net)
        for app in ends(net):
            assert over(app) is not None, "both sides give up"


@pytest.mark.parametrize("story", ENDED)
def test_an_end_is_told_as_it_is(story: Story) -> None:
    with telling(story) as net:
        checks.check(net)
        for app in ends(net):
            assert over(app) is not None and (app.failed or app.left)


@pytest.mark.parametrize("story", LEFT)
def test_a_peer_that_leaves_fails_nobody(story: Story) -> None:
    with telling(story) as net:
        checks.check(net)
        a, _ = ends(net)
        assert over(a) is not None and not a.failed
        core = a.endpoint.core
        assert core.send_is_open and core.send_pair == 1, "where its receives are"


@pytest.mark.parametrize("story", SURVIVED)
def test_a_story_that_nobody_notices(story: Story) -> None:
    with telling(story) as net:
        checks.check(net)
        for app in ends(net):
            assert over(app) is None and not app.failed
