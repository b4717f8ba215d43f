# SPDX-License-Identifier: BSD-3-Clause
"""Fixtures of what runs in a process of its own: soft0 is the default NIC, soft1 behind it."""

from __future__ import annotations

import faulthandler
import logging
from collections.abc import Iterator

import pytest
from one_process import Verbs

import shiftverbs  # opens the software RNIC before pyverbs
from mirror.shadowed.tools import Logged

DEADLINE_S = 50


@pytest.fixture(autouse=True)
def deadline() -> Iterator[None]:
    """A test that hangs says where, and ends the process."""
    faulthandler.dump_traceback_later(DEADLINE_S, exit=True)
    yield
    # Not cancelled: the interpreter's end has to come in time, too.


@pytest.fixture(autouse=True)
def logged() -> Iterator[Logged]:
    """What our code logs at WARNING or above: an error unless the test takes it away."""
    logger, lines = logging.getLogger("shiftverbs"), Logged()
    logger.addHandler(lines)
    yield lines
    assert not lines
    logger.removeHandler(lines)


@pytest.fixture
def v() -> Verbs:
    """The modules of shiftverbs, and shorthands."""
    return Verbs(shiftverbs.__name__)
