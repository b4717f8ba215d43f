# SPDX-License-Identifier: BSD-3-Clause
"""Stories of posts: room, refusals, work that no pair carries, what was shown. As staged.py."""

from __future__ import annotations

from simulator.story import Story

SURVIVED: dict[Story, tuple[str, ...]] = {}
