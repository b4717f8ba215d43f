# SPDX-License-Identifier: BSD-3-Clause
"""A double has no more than the real class, compiled or not."""

from __future__ import annotations

from typing import Any

import pytest
from typed_doubles import Double, double

from shiftverbs import _core
from shiftverbs.failover.qp.connection import Connection


def test_names_that_the_real_class_lacks() -> None:
    connection = double(Connection, closed=True, n_pairs=2)
    assert (connection.closed, connection.n_pairs) == (True, 2)
    with pytest.raises(AttributeError, match="Connection has no clsoed"):
        double(Connection, clsoed=True)
    with pytest.raises(AttributeError, match="Connection has no pears"):
        connection.pears = 3
    with pytest.raises(AttributeError):  # not given
        print(connection.status)
    with pytest.raises(AttributeError, match="QPCore has no withheld"):
        double(_core.QPCore).withheld = 1


def test_calls_that_the_real_method_would_not_take() -> None:
    core = double(_core.QPCore, post_marker=lambda *args: len(args))
    assert core.post_marker(1) == 1
    with pytest.raises(TypeError, match="too many positional arguments"):
        core.post_marker(1, 2)
    with pytest.raises(TypeError, match="post_marker is a method of QPCore"):
        core.post_marker = 3


def test_a_class_of_doubles() -> None:
    class Queue(Double, real=_core.CQCore, own=("looks",)):
        def __init__(self) -> None:
            super().__init__()
            self.looks: list[int] = []

        def drain(self, *args: Any) -> int:
            self.looks.extend(args)
            return 0

    queue = Queue()
    assert queue.drain(1) == 0 and queue.looks == [1] and queue != Queue()
    with pytest.raises(TypeError, match="missing a required argument"):
        queue.drain()
    with pytest.raises(AttributeError, match="CQCore has no dran"):

        class Wrong(Double, real=_core.CQCore):
            def dran(self, k: int) -> int:
                return 0
