# SPDX-License-Identifier: BSD-3-Clause
"""The tag table, which matches requests and tensors, and the cache of metadata."""

from __future__ import annotations

import pytest

from shiftverbs.tensors.errors import DuplicateError
from shiftverbs.tensors.metadata import Metadata, MetadataCache
from shiftverbs.tensors.tag_table import TagTable

TAG, OTHER = ("w", 1), ("w", 2)


def table() -> TagTable[str, str]:
    return TagTable()


def test_a_tensor_waits_for_its_request():
    t = table()
    assert t.publish(None, TAG, "tensor", 1) == []
    assert t.request("c", OTHER, "r0") is None
    assert t.request("c", TAG, "r1") == "tensor"
    assert t.request("c", TAG, "r2") is None, "it was for one"
    assert len(t) == 0 and t.waiting == 2


def test_requests_wait_for_their_tensor_in_order():
    t = table()
    for r in ("r1", "r2", "r3"):
        assert t.request("c", TAG, r) is None
    assert t.cancel("r2") and not t.cancel("r2")
    assert t.request("d", TAG, "r4") is None
    assert t.publish(None, TAG, "first", 2) == ["r1", "r3"]
    assert len(t) == 0
    assert t.publish(None, TAG, "second", 2) == ["r4"]
    assert t.request("c", TAG, "r5") == "second" and len(t) == 0


def test_any_number_until_it_is_withdrawn():
    t = table()
    t.request("c", TAG, "r0")
    assert t.publish(None, TAG, "weights", None) == ["r0"]
    assert [t.request("c", TAG, str(i)) for i in range(5)] == ["weights"] * 5
    assert t.withdraw(None, TAG) == "weights" and t.withdraw(None, TAG) is None
    assert t.request("c", TAG, "r9") is None


def test_a_scope_has_its_own():
    t = table()
    t.publish("c", TAG, "for c", 1)
    t.publish(None, TAG, "for all", 1)
    assert t.request("d", TAG, "d0") == "for all"
    assert t.request("d", TAG, "d1") is None
    assert t.request("c", TAG, "c0") == "for c"
    assert t.publish("c", TAG, "again for c", 1) == [], "d does not get it"
    assert t.drop("c") == (["again for c"], [])
    assert t.drop("d") == ([], ["d1"])
    assert t.waiting == 0 and len(t) == 0


def test_twice_is_an_error():
    t = table()
    t.publish(None, TAG, "one", 1)
    with pytest.raises(DuplicateError, match="'w' of step 1 is published already"):
        t.publish(None, TAG, "two", 1)
    assert t.request("c", TAG, "r") == "one"
    t.publish(None, TAG, "two", 1)


def test_what_comes_back_is_there_again():
    t = table()
    t.publish(None, TAG, "x", 2)
    assert t.request("c", TAG, "r0") == t.request("c", TAG, "r1") == "x"
    assert t.give_back(None, TAG, "x") == []
    assert t.request("c", TAG, "r2") == "x"
    assert t.request("c", TAG, "r3") is None
    assert t.give_back(None, TAG, "x") == ["r3"], "who waits gets it"
    t.publish(None, TAG, "newer", 1)
    assert t.give_back(None, TAG, "x") is None, "another one has its place"
    assert t.request("c", TAG, "r4") == "newer", "it has been replaced"
    assert t.request("c", TAG, "r5") is None


def test_the_cache_forgets_what_was_used_longest_ago():
    cache = MetadataCache(limit=2)
    a, b, c = (Metadata("int8", (n,)) for n in (1, 2, 3))
    cache.put("a", a)
    cache.put("b", b)
    assert cache.get("a") == a
    cache.put("c", c)
    assert (cache.get("a"), cache.get("b"), cache.get("c"), len(cache)) == (a, None, c, 2)
