# SPDX-License-Identifier: BSD-3-Clause
"""Stories of memory: keys, rights, registrations that take their time. As staged.py."""

from __future__ import annotations

from simulator.story import Story

SURVIVED: dict[Story, tuple[str, ...]] = {}
