# SPDX-License-Identifier: BSD-3-Clause
"""Re-exporting pyverbs: every name of `pyverbs.X` in `shiftverbs.X`, whatever the installed release has."""

from __future__ import annotations

import enum
import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence
from typing import Any

SOURCE = "pyverbs"
TARGET = "shiftverbs"

# Modules that were renamed between releases: a program written for either name runs on either release.
RENAMED = {
    "enums": "libibverbs_enums",
    "libibverbs_enums": "enums",
    "cm_enums": "librdmacm_enums",
    "librdmacm_enums": "cm_enums",
}


def names_of(module: types.ModuleType) -> list[str]:
    """The names a module offers: all but `__dunder__`s (pyverbs' enums have some with one underscore)."""
    return [name for name in vars(module) if not name.startswith("__")]


def substituted(value: object) -> object:
    """The mirror's own class where value is a shadowed pyverbs class, else value itself.

    pyverbs.device, for one, offers pyverbs.mr's DMMR under its own name.
    """
    if not isinstance(value, type):
        return value
    package, _, name = value.__module__.partition(".")
    if package != SOURCE or not name:
        return value
    ours = sys.modules.get(f"{TARGET}.{name}")
    candidate = getattr(ours, value.__name__, value)
    return candidate if isinstance(candidate, type) and issubclass(candidate, value) else value


def reexport(name: str, namespace: dict[str, Any]) -> types.ModuleType:
    """Copy the names of module `pyverbs.<name>` into namespace; names that are there already stay.

    Returns the pyverbs module. Raises ImportError as importing it does.
    """
    module = importlib.import_module(f"{SOURCE}.{name}")
    for key in names_of(module):
        namespace.setdefault(key, substituted(getattr(module, key)))
    return module


def reexport_enums(name: str, namespace: dict[str, Any]) -> types.ModuleType:
    """As reexport, for a module of constants, which differ between releases in name and layout: both spellings of each.

    Release 44 has `enums.IBV_QPT_RC`, 56 that and `libibverbs_enums.IBV_QPT_RC`, 65 only
    `libibverbs_enums.ibv_qp_type.IBV_QPT_RC`. Release 44 has `_IBV_DEVICE_RAW_SCATTER_FCS` where 59 has no underscore.
    """
    modules: list[types.ModuleType] = []
    for source in (name, RENAMED[name]):
        try:
            modules.append(reexport(source, namespace))
        except ModuleNotFoundError as missing:
            if missing.name != f"{SOURCE}.{source}":
                raise
    if not modules:
        raise ModuleNotFoundError(f"No module named '{SOURCE}.{name}'", name=f"{SOURCE}.{name}")
    for module in modules:
        for key in names_of(module):
            value = getattr(module, key)
            constants = {key: value}
            if isinstance(value, type) and issubclass(value, enum.Enum):
                constants = dict(value.__members__)
            for constant, number in constants.items():
                namespace.setdefault(constant, number)
                other = constant[1:] if constant.startswith("_") else f"_{constant}"
                if other.startswith(("IBV_", "_IBV_")):
                    namespace.setdefault(other, number)
    return modules[0]


def submodule(package: str, name: str) -> types.ModuleType:
    """Module `name` of a package of ours, imported now. Raises AttributeError where there is none."""
    if not name.startswith("_"):
        try:
            return importlib.import_module(f"{package}.{name}")
        except ModuleNotFoundError as missing:
            if missing.name != f"{package}.{name}":
                raise
    raise AttributeError(f"module {package!r} has no attribute {name!r}")


class MirrorFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Last on sys.meta_path: `shiftverbs.X` without a file of its own is made from `pyverbs.X`.

    This covers the providers, and modules that later releases of pyverbs add.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Meta path protocol: None where this is not ours, or pyverbs lacks it too."""
        if not fullname.startswith(TARGET + "."):
            return None
        name = fullname[len(TARGET) + 1 :]
        if name.startswith("__"):
            return None  # `pyverbs.__version__`, a module, would take the place of our own
        try:
            source = importlib.util.find_spec(f"{SOURCE}.{name}")
        except ModuleNotFoundError:
            return None
        if source is None:
            return None
        is_package = source.submodule_search_locations is not None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=is_package)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        """Loader protocol: the ordinary module object."""
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        """Loader protocol: fill the module. Raises ImportError as importing the original does."""
        name = module.__name__[len(TARGET) + 1 :]
        original = reexport(name, vars(module))
        module.__doc__ = f"`{original.__name__}`, re-exported."
        if hasattr(module, "__path__"):
            vars(module)["__getattr__"] = functools.partial(submodule, module.__name__)


def install() -> None:
    """Put the finder in place, once."""
    if not any(isinstance(finder, MirrorFinder) for finder in sys.meta_path):
        sys.meta_path.append(MirrorFinder())
