# SPDX-License-Identifier: BSD-3-Clause
"""What C headers have is told to Cython once: two declarations of one struct come to differ."""

from __future__ import annotations

import re
from collections import defaultdict

from harness import ROOT


def test_each_header_is_declared_in_one_place() -> None:
    places = defaultdict(list)
    for suffix in ("pyx", "pxd", "pxi"):
        for path in sorted((ROOT / "shiftverbs").rglob(f"*.{suffix}")):
            for header in re.findall(r'^cdef extern from "<?([^">]+)', path.read_text(), re.MULTILINE):
                places[header].append(str(path.relative_to(ROOT / "shiftverbs")))
    assert places["infiniband/verbs.h"] == ["native/verbs.pxd"]
    assert places["sys/epoll.h"] == ["native/posix.pxd"]
    assert {header: where for header, where in places.items() if len(where) > 1} == {}
