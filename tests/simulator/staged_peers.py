# SPDX-License-Identifier: BSD-3-Clause
"""Stories of control: who is heard, when, and what is said of it. As staged.py."""

from __future__ import annotations

from simulator.story import Story

SURVIVED: dict[Story, tuple[str, ...]] = {}
