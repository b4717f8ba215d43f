# SPDX-License-Identifier: BSD-3-Clause
"""Which pyverbs there is."""

from __future__ import annotations

import importlib
import re

SOURCE = "pyverbs"


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
