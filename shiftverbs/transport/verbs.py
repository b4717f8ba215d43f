# SPDX-License-Identifier: BSD-3-Clause
"""pyverbs' classes that the transport uses, by the face's names. mypy does not see what is re-exported there."""

from __future__ import annotations

import importlib
from typing import Any

from shiftverbs.cq import CQ as CQ
from shiftverbs.cq import CompChannel as CompChannel
from shiftverbs.device import Context as Context
from shiftverbs.mr import MR as MR
from shiftverbs.pd import PD as PD
from shiftverbs.qp import QP as QP
from shiftverbs.wr import SGE as SGE
from shiftverbs.wr import RecvWR as RecvWR
from shiftverbs.wr import SendWR as SendWR

#: The constants: IBV_*.
e: Any = importlib.import_module("shiftverbs.enums")
_addr: Any = importlib.import_module("shiftverbs.addr")
_device: Any = importlib.import_module("shiftverbs.device")
_qp: Any = importlib.import_module("shiftverbs.qp")

GID, AHAttr, GlobalRoute = _addr.GID, _addr.AHAttr, _addr.GlobalRoute
get_device_list = _device.get_device_list
QPAttr, QPCap, QPInitAttr = _qp.QPAttr, _qp.QPCap, _qp.QPInitAttr


def status_name(status: int) -> str:
    """ "RETRY_EXC_ERR" for IBV_WC_RETRY_EXC_ERR, else the number."""
    for name in dir(e):
        if name.startswith("IBV_WC_") and name.endswith("_ERR") and getattr(e, name) == status:
            return name.removeprefix("IBV_WC_")
    return f"status {status}"
