# SPDX-License-Identifier: BSD-3-Clause
"""How bugs are put into the Python of the package for a while: a list of them, and pieces of functions replaced."""

from __future__ import annotations
import __future__

import contextlib
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

Patch = Callable[[], contextlib.AbstractContextManager[None]]
Generator = Callable[[], Iterator[None]]


def mutations_of(names: dict[str, tuple[str, Patch]]) -> Callable[[str], Callable[[Generator], Generator]]:
    """A decorator that registers in `names` what is patched, under its name, with the duty that is dropped."""

    def mutation(what: str) -> Callable[[Generator], Generator]:
        def register(generator: Generator) -> Generator:
            if generator.__name__ in names:
                raise ValueError(f"two mutations are called {generator.__name__}")
            names[generator.__name__] = (what, contextlib.contextmanager(generator))
            return generator

        return register

    return mutation


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """`owner.name` is `value`, also where `owner` has it among its _HANDLERS."""
    former = inspect.getattr_static(owner, name)
    handlers = getattr(owner, "_HANDLERS", {})
    others = {action: value for action, handler in handlers.items() if handler is former}
    with mock.patch.object(owner, name, value), mock.patch.dict(handlers, others):
        yield


@contextlib.contextmanager
def rewritten(owner: Any, name: str, *edits: tuple[str, str]) -> Iterator[None]:
    """The function `owner.name` (a class's, or a module's) with pieces of its source replaced, each of which is there
    once. LookupError where one is not."""
    former = inspect.getattr_static(owner, name)
    place = name
    if hasattr(former, "around"):  # the simulator's own, which calls what is meant by this global name
        owner, place = sys.modules[former.__module__], former.around
        former = getattr(owner, place)
    plain = former.fget if isinstance(former, property) else getattr(former, "__func__", former)
    source = textwrap.dedent(inspect.getsource(plain))
    for old, new in edits:
        if source.count(old) != 1:
            raise LookupError(f"{name}: found {source.count(old)} times: {old!r}")
        source = source.replace(old, new)
    flags = __future__.annotations.compiler_flag
    code = compile(source, f"<{name} with a bug>", "exec", flags=flags, dont_inherit=True)
    made: dict[str, Any] = {}
    exec(code, plain.__globals__, made)
    with replaced(owner, place, made[name]):
        yield
