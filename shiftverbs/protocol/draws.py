# SPDX-License-Identifier: BSD-3-Clause
"""Random numbers for a pairing: PSNs and jitter. The same ones for the same seed."""

from __future__ import annotations

import random
from typing import Protocol


class Chance(Protocol):
    """Where random numbers come from, as random.Random is."""

    def randrange(self, stop: int, /) -> int:
        """A number from 0 up to and without `stop`."""


class Draws:
    """A `Chance` of a few words, for a thousand QPs that draw seldom: a random.Random keeps 2.5 kB, and is made anew
    for each number.

    seed: any number.
    """

    __slots__ = ("_drawn", "_seed")

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._drawn = 0

    def randrange(self, stop: int, /) -> int:
        """A number from 0 up to and without `stop`."""
        self._drawn += 1
        return random.Random(self._seed + self._drawn).randrange(stop)
