# SPDX-License-Identifier: BSD-3-Clause
"""Stories of ends: of a QP, of a pairing, of a NIC. As staged.py."""

from __future__ import annotations

from simulator.story import Story

SURVIVED: dict[Story, tuple[str, ...]] = {}
