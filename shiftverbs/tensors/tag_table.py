# SPDX-License-Identifier: BSD-3-Clause
"""Which tensor a request gets: tensors that wait for requests, and requests that wait for tensors.

A tensor is for everybody, or for one scope (a channel). Pure: neither tensors nor requests are looked into.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, NamedTuple, TypeVar

from shiftverbs.tensors.errors import DuplicateError

T = TypeVar("T")
W = TypeVar("W", bound=Hashable)
Tag = tuple[str, int]


class _Waiting(NamedTuple):
    scope: Hashable
    tag: Tag


class _Entry(Generic[T]):
    def __init__(self, item: T, left: int | None) -> None:
        self.item, self.left = item, left


class TagTable(Generic[T, W]):
    """A tensor may be matched a number of times, and is out of the table then. Requests are served as they came."""

    def __init__(self) -> None:
        self._entries: dict[tuple[Hashable, Tag], _Entry[T]] = {}
        self._waiting: dict[W, _Waiting] = {}
        self._by_tag: dict[Tag, dict[W, None]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    def publish(self, scope: Hashable, tag: Tag, item: T, pulls: int | None) -> list[W]:
        """A tensor came.

        :param scope: who may have it; None: everybody
        :param tag: its key and step
        :param pulls: how many requests it is for; None: for any number, until `withdraw`
        :return: the requests that waited for it, and get it
        :raises DuplicateError: there is one for that scope
        """
        if (scope, tag) in self._entries:
            raise DuplicateError(f"{tag[0]!r} of step {tag[1]} is published already")
        matched: list[W] = []
        for request in list(self._by_tag.get(tag, ())):
            if pulls is not None and len(matched) == pulls:
                break
            if scope is None or self._waiting[request].scope == scope:
                matched.append(request)
                self.cancel(request)
        if pulls is None or len(matched) < pulls:
            self._entries[scope, tag] = _Entry(item, None if pulls is None else pulls - len(matched))
        return matched

    def request(self, scope: Hashable, tag: Tag, request: W) -> T | None:
        """A request came.

        :param scope: who asks: what is for it alone is taken first
        :return: the tensor that it gets; None: it waits
        """
        for where in (scope, None):
            entry = self._entries.get((where, tag))
            if entry is None:
                continue
            if entry.left is not None:
                entry.left -= 1
                if not entry.left:
                    del self._entries[where, tag]
            return entry.item
        self._waiting[request] = _Waiting(scope, tag)
        self._by_tag.setdefault(tag, {})[request] = None
        return None

    def give_back(self, scope: Hashable, tag: Tag, item: T) -> list[W] | None:
        """A tensor that was matched was not needed after all. Arguments and result as of `publish`.

        :return: None: another one has its place
        """
        entry = self._entries.get((scope, tag))
        if entry is None:
            return self.publish(scope, tag, item, 1)
        if entry.item is not item:
            return None
        if entry.left is not None:
            entry.left += 1
        return []

    def cancel(self, request: W) -> bool:
        """A request waits no longer; whether it did."""
        waiting = self._waiting.pop(request, None)
        if waiting is None:
            return False
        requests = self._by_tag[waiting.tag]
        del requests[request]
        if not requests:
            del self._by_tag[waiting.tag]
        return True

    def withdraw(self, scope: Hashable, tag: Tag) -> T | None:
        """Take a tensor out. Returns it, or None where there is none."""
        entry = self._entries.pop((scope, tag), None)
        return None if entry is None else entry.item

    def drop(self, scope: Hashable) -> tuple[list[T], list[W]]:
        """Take out all that is a scope's: its tensors and its requests."""
        tags = [tag for where, tag in self._entries if where == scope]
        items = [self._entries.pop((scope, tag)).item for tag in tags]
        requests = [request for request, waiting in self._waiting.items() if waiting.scope == scope]
        for request in requests:
            self.cancel(request)
        return items, requests
