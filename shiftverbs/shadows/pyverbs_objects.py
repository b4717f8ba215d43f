# SPDX-License-Identifier: BSD-3-Clause
"""C pointers and structs inside pyverbs objects, as the control path uses them: `_core` reads and writes them.

Its finalizers use them too, when this module may have been emptied, and so bring along what they need.
"""

from __future__ import annotations

from shiftverbs._core import (
    MR_POINTER,
    MW_POINTER,
    POINTER,
    AhAttr,
    Attr,
    Cap,
    InitAttr,
    InitAttrEx,
    async_fd,
    cap_tuple,
    channel_fd,
    copy_struct,
    cq_entries,
    cqex_pointer,
    forget_pointer,
    init_attr,
    mr_pointer,
    mw_pointer,
    pointer,
    qp_attr,
    set_cap,
    set_srq_cq,
)

__all__ = [
    "MR_POINTER",
    "MW_POINTER",
    "POINTER",
    "AhAttr",
    "Attr",
    "Cap",
    "InitAttr",
    "InitAttrEx",
    "async_fd",
    "cap_tuple",
    "channel_fd",
    "copy_struct",
    "cq_entries",
    "cqex_pointer",
    "forget_pointer",
    "init_attr",
    "mr_pointer",
    "mw_pointer",
    "pointer",
    "qp_attr",
    "set_cap",
    "set_srq_cq",
]
