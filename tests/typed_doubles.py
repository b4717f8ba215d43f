# SPDX-License-Identifier: BSD-3-Clause
"""Doubles that have no more than the real thing: a name or an argument that the real class lacks is an error."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any


@functools.cache
def names_of(real: type) -> frozenset[str]:
    """Every attribute that an instance of real has or may have: of the class, annotated, or assigned to self."""
    names = set(dir(real))
    for cls in real.__mro__:
        names |= set(vars(cls).get("__annotations__", ()))
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
        except (OSError, TypeError):  # compiled: dir() knows all
            continue
        names |= {
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
        }
    return frozenset(names)


def _checked(real: type, name: str, value: Any) -> Any:
    """value, where it stands for a method of real: with calls that the method would not take refused."""
    method = inspect.getattr_static(real, name, None)
    if isinstance(method, (property, type)) or not callable(getattr(real, name, None)):
        return value
    if not callable(value):
        raise TypeError(f"{name} is a method of {real.__name__}, and {value!r} is not one")
    signature = inspect.signature(getattr(real, name))
    bound = () if isinstance(method, (staticmethod, classmethod)) else (None,)

    @functools.wraps(value)
    def call(*args: Any, **kwargs: Any) -> Any:
        signature.bind(*bound, *args, **kwargs)
        return value(*args, **kwargs)

    return call


class Double(SimpleNamespace):
    """Base of a double of `real`: `class Port(Double, real=ControlPort, own=("sent",))`; own: what only the double has.

    Keyword arguments become attributes, as those that are assigned. Two are equal only where they are the same.
    """

    _real: type = object
    _own: frozenset[str] = frozenset()

    def __init_subclass__(cls, real: type | None = None, own: tuple[str, ...] = (), **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._real = real or cls._real
        cls._own |= frozenset(own)
        for name, value in list(vars(cls).items()):
            if not name.startswith("__") and name not in ("_real", "_own"):
                cls._known(name)
                if inspect.isfunction(value) and name not in cls._own:
                    setattr(cls, name, cls._bound(name, value))

    @classmethod
    def _known(cls, name: str) -> None:
        if name not in cls._own and name not in names_of(cls._real):
            raise AttributeError(f"{cls._real.__name__} has no {name}")

    def _checked(self, name: str, value: Any) -> Any:
        """value, which stands for that of the real class."""
        return _checked(self._real, name, value)

    @classmethod
    def _bound(cls, name: str, value: Callable[..., Any]) -> Callable[..., Any]:
        real = cls._real

        @functools.wraps(value)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            return _checked(real, name, functools.partial(value, self))(*args, **kwargs)

        return call

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        for name, value in attributes.items():
            setattr(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        self._known(name)
        super().__setattr__(name, value if name in self._own else _checked(self._real, name, value))

    __hash__ = object.__hash__
    __eq__ = object.__eq__


def double(of: type, **attributes: Any) -> Any:
    """A double of a class that has these attributes."""
    return _class_of(of)(**attributes)


@functools.cache
def _class_of(real: type) -> type[Double]:
    class Doubled(Double, real=real):
        pass

    return Doubled
