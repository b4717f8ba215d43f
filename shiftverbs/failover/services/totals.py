# SPDX-License-Identifier: BSD-3-Clause
"""Counts over the life of a process, which outlive the QPs that they are about."""

from __future__ import annotations

import collections
import re

#: How many different reasons are kept apart; later ones are counted as OTHER.
MOST_REASONS = 32
OTHER = "other"

_NUMBERS = re.compile(r"0x[0-9a-f]+|\d+")


class Totals:
    """SWITCHes, homecomings, the time that QPs were away, and why failover gave up. Under the driver's lock.

    switches, homecomings: how many; away_ns: nanoseconds, of absences that are over; failed: how many QPs
    by reason, numbers in it left out. slow_paths: verdicts that a path is slow, by device and whose fault that is;
    straggler_moves: how often traffic was moved for that, there and back.
    """

    def __init__(self) -> None:
        self.switches = 0
        self.homecomings = 0
        self.away_ns = 0
        self.failed: collections.Counter[str] = collections.Counter()
        self.slow_paths: collections.Counter[tuple[str, str]] = collections.Counter()
        self.straggler_moves = 0

    def gave_up(self, why: str) -> None:
        """Failover of a QP gave up (why: a sentence)."""
        reason = _NUMBERS.sub("N", why) or OTHER
        if reason not in self.failed and len(self.failed) >= MOST_REASONS:
            reason = OTHER
        self.failed[reason] += 1

    def slow_path(self, device: str, fault: str) -> None:
        """A path of ours is slow (device: its NIC); fault: whose fault that is, in a word."""
        self.slow_paths[device, fault] += 1
