# SPDX-License-Identifier: BSD-3-Clause
"""Closing verbs objects in any order: by hand, twice, by the garbage collector, at exit.

What pyverbs does: an object's `__dealloc__` calls `self.close()`, which, overridden, runs when the subclass's
`__dict__` is gone already. And the garbage collector may reach a parent (a PD) before its children (its MRs),
whose weak references in the parent are cleared by then, so that closing the parent cannot find them.

Hence the rules that every subclass here follows:

- the first thing `close()` looks at is the C pointer, and nothing else if that is NULL;
- `__del__` runs `finalize()`, which closes while the object is whole. A parent with live children is kept until
  the last of them is closed; an object that cannot be destroyed is leaked, as pyverbs does. When the interpreter
  ends, nothing is closed any more;
- a thread that has a lock of ours closes nothing but memory: `__del__`, or close(), puts the object aside there, and
  the thread "shiftverbs-closing" or the next control verb closes it (`native/core/finalizers.pxi`);
- it is `Ended`: a program's subclass with a `__del__` of its own, which has no reason to call ours, has both run.
"""

from __future__ import annotations

import ctypes
import logging
import sys
import weakref
from typing import Any

from shiftverbs._core import and_end, end_when_free, whole_close, whole_end
from shiftverbs.shadows import pyverbs_objects

logger = logging.getLogger("shiftverbs.lifetime")

_keep = ctypes.pythonapi.Py_IncRef
_release = ctypes.pythonapi.Py_DecRef
for _function in (_keep, _release):
    _function.argtypes = [ctypes.py_object]
    _function.restype = None

# Parents that were garbage while they had live children, by id. They wait for the last one.
_waiting: dict[int, Any] = {}


class Node:
    """The place of one object among its parents and children. It holds no reference to the object itself."""

    __slots__ = ("children", "left", "open", "owner_id", "parents")

    def __init__(self, owner: object, *parents: object) -> None:
        """owner: the object; parents: those that must outlive it (others than ours are passed over)."""
        self.owner_id = id(owner)
        self.children = 0
        self.open = True
        self.parents = []
        self.left: dict[int, weakref.ref[Any]] = {}
        for parent in parents:
            node = getattr(parent, "_node", None)
            if isinstance(node, Node):
                self.parents.append(node)
                node.children += 1

    def leave(self, owner: object) -> None:
        """The object's close was broken off or refused: its parents', which took it out of pyverbs' list, find it."""
        for parent in self.parents:
            parent.left[id(owner)] = weakref.ref(owner)

    def close_left(self) -> None:
        """Before the object is closed: close what `leave` left there."""
        while self.left:
            child = self.left.popitem()[1]()
            if child is not None:
                child.close()  # which leaves itself here again, where it is broken off

    def closed(self) -> None:
        """The object's resource is gone: let the parents know. Does nothing the second time."""
        if not self.open:
            return
        self.open = False
        for parent in self.parents:
            parent.children -= 1
            if parent.children == 0:
                waiting = _waiting.pop(parent.owner_id, None)
                if waiting is not None:
                    end_when_free(_end_waiting, waiting)
        self.parents = []  # only now: whoever closes a grandparent sees that its child is not through


def node_of(obj: object) -> Node | None:
    """The node of one of our objects; None for anything else (plain pyverbs objects, None)."""
    node = getattr(obj, "_node", None)
    return node if isinstance(node, Node) else None


def is_open(obj: Any, _pointer: Any = pyverbs_objects.pointer) -> bool:
    """Whether the object (any but an MR or MW) still has its C resource. Touches no attribute."""
    return bool(_pointer(obj))


def is_open_mr(obj: Any, _pointer: Any = pyverbs_objects.mr_pointer) -> bool:
    """is_open for an MR, which keeps its pointer elsewhere."""
    return bool(_pointer(obj))


def is_open_mw(obj: Any, _pointer: Any = pyverbs_objects.mw_pointer) -> bool:
    """is_open for an MW, which keeps its pointer elsewhere."""
    return bool(_pointer(obj))


def finalize(
    obj: Any,
    still_open: Any = is_open,
    _at_exit: Any = sys.is_finalizing,
    _keep: Any = _keep,
) -> None:
    """What `__del__` does: close, or wait for the children, or leak. Raises what close() does.

    When the interpreter ends, modules, classes and functions are taken apart in any order, and `__dealloc__` would
    call into what is left of ours. So the object, closed or not, is kept for ever, and with it its class; the
    kernel takes back what is open. (For the same reason this function brings along what it needs.)
    """
    if _at_exit():
        _keep(obj)
        return
    if not still_open(obj):
        return
    node = node_of(obj)
    if node is not None and node.children and node.open:
        if id(obj) not in _waiting:
            # Kept at exit too: `__del__` runs only once.
            _keep(obj)
            _waiting[id(obj)] = obj
        return
    _close_or_leak(obj, still_open)


def _end_waiting(obj: Any) -> None:
    """The last child of a parent that was garbage before it is gone."""
    try:
        _close_or_leak(obj)
    except Exception as error:
        logger.warning("a %s was not closed: %s", type(obj).__name__, error)
    finally:
        _release(obj)


def _close_or_leak(obj: Any, still_open: Any = is_open) -> None:
    try:
        obj.close()
    finally:
        if still_open(obj):
            # __dealloc__ would try again with half an object.
            pyverbs_objects.forget_pointer(obj)


class Ended:
    """First base of our classes. With a subclass's own `__del__`, ours is run after it."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        theirs = cls.__del__  # type: ignore[attr-defined]  # each of ours has one
        if callable(theirs) and not hasattr(theirs, "our_end"):
            ends = (getattr(vars(base).get("__del__"), "our_end", None) for base in cls.__mro__)
            cls.__del__ = and_end(theirs, next(filter(None, ends)))  # type: ignore[attr-defined]


class Tracked(Ended):
    """First base of a class that is pyverbs' in all but this: it is closed in good order by the collector too."""

    _node: Node | None = None

    @whole_close(pyverbs_objects.POINTER)
    def close(self, _is_open: Any = is_open) -> None:
        """As pyverbs'; does nothing where it is closed."""
        self._close(_is_open)

    def _close(self, is_open: Any) -> None:
        if not is_open(self):
            return
        super().close()  # type: ignore[misc]
        if self._node is not None:
            self._node.closed()

    @whole_end
    def __del__(self, _finalize: Any = finalize) -> None:
        _finalize(self)
