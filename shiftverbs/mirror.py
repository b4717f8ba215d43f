# SPDX-License-Identifier: BSD-3-Clause
"""Re-exporting pyverbs: every name of `pyverbs.X` in `shiftverbs.X`, whatever the installed release has."""

from __future__ import annotations

import enum
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import re
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


def release() -> str:
    """The release of the pyverbs that is imported here, "56.1"; "(release unknown)" if nothing tells.

    Debian's package has no metadata; it is of rdma-core's release, as the libibverbs that it loads is, whose file
    is named after it: libibverbs.so.1.15.56.1 (rdma-core, CMakeLists.txt).
    """
    try:
        importlib.import_module(f"{SOURCE}.device")
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            found = re.search(r"/libibverbs\.so\.1\.\d+\.(\d+\.\d+)$", maps.read(), re.MULTILINE)
    except (ImportError, OSError):
        found = None
    if found is not None:
        return found.group(1)
    from importlib import metadata  # here only: it would be a tenth of this package's import

    try:
        return metadata.version(SOURCE)
    except metadata.PackageNotFoundError:
        return "(release unknown)"


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
    """Copy the names of module `pyverbs.<name>` into namespace; what stands there already stays.

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


def install() -> None:
    """Put the finder in place, once."""
    if not any(isinstance(finder, MirrorFinder) for finder in sys.meta_path):
        sys.meta_path.append(MirrorFinder())
