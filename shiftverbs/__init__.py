# SPDX-License-Identifier: BSD-3-Clause
"""pyverbs whose RC traffic survives the loss of a NIC, a cable or a switch port.

Write `import shiftverbs` where a program has `import pyverbs`: for every module `pyverbs.X` there is
`shiftverbs.X` with the same names. Context, PD, MR, CompChannel, CQ and QP are subclasses of pyverbs' own that
keep, behind the default resource, a shadow on each backup NIC. `qp.shift` tells a QP's protection.

What lies in which room of the package: docs/architecture.md.

Importing this package does no I/O, with one exception: where the environment has SOFTRNIC set, the software
RNIC's library is opened here, because it must be in place before pyverbs is loaded.
"""

from __future__ import annotations

import importlib.util
import os
from types import ModuleType

__version__ = "0.1.0"

if importlib.util.find_spec("pyverbs") is None:
    raise ImportError(
        "shiftverbs stands on pyverbs, which this Python interpreter does not have. On Debian and Ubuntu: "
        "apt-get install python3-pyverbs (it belongs to /usr/bin/python3; a virtual environment sees it when "
        "made with /usr/bin/python3 -m venv --system-site-packages).",
        name="pyverbs",
    )

if os.environ.get("SOFTRNIC", "0") not in ("", "0"):
    from shiftverbs import softrnic as _softrnic

    _softrnic.enable()

from shiftverbs.mirroring import reexport as _reexport

_reexport.install()


def __getattr__(name: str) -> ModuleType:
    """`import shiftverbs` alone is enough for `shiftverbs.pd.PD`: a module is imported when it is named."""
    return _reexport.submodule(__name__, name)
