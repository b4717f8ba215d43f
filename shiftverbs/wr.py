# SPDX-License-Identifier: BSD-3-Clause
"""`pyverbs.wr`: SGE, SendWR and RecvWR are ours, made faster; the rest is re-exported."""

from __future__ import annotations

from typing import Any

from shiftverbs import _core as _core  # checks the layout that _wr relies on
from shiftverbs._wr import SGE as SGE
from shiftverbs._wr import RecvWR as RecvWR
from shiftverbs._wr import SendWR as SendWR
from shiftverbs.mirroring import reexport

_set_qp_type_xrc = SendWR.set_qp_type_xrc


def set_qp_type_xrc(self: Any, remote_srqn: int) -> None:
    """Send to an SRQ of the peer's XRC domain (remote_srqn: its number). pyverbs 44 takes no keyword here."""
    _set_qp_type_xrc(self, remote_srqn)


SendWR.set_qp_type_xrc = set_qp_type_xrc
del set_qp_type_xrc

reexport.reexport("wr", globals())
