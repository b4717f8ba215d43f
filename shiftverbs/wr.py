# SPDX-License-Identifier: BSD-3-Clause
"""`pyverbs.wr`: SGE, SendWR and RecvWR are ours, made faster; the rest is re-exported."""

from __future__ import annotations

from shiftverbs import _core as _core  # checks the layout that _wr relies on
from shiftverbs import mirror
from shiftverbs._wr import SGE as SGE
from shiftverbs._wr import RecvWR as RecvWR
from shiftverbs._wr import SendWR as SendWR

mirror.reexport("wr", globals())
