# SPDX-License-Identifier: BSD-3-Clause
"""`pyverbs.srq`: SRQ and SrqInitAttrEx are ours, the rest is re-exported."""

from __future__ import annotations

from typing import Any

import pyverbs.cq
import pyverbs.device
import pyverbs.srq as _base
from pyverbs.base import PyverbsRDMAErrno
from pyverbs.pyverbs_error import PyverbsRDMAError

from shiftverbs._core import whole
from shiftverbs.mirroring import lifetime, reexport
from shiftverbs.shadows import pyverbs_objects


class SrqInitAttrEx(_base.SrqInitAttrEx):
    """pyverbs' SrqInitAttrEx, which reads the CQ pointer from the wrong place of a CQ subclass."""

    @property
    def cq(self) -> Any:
        """The CQ of an XRC or tag matching SRQ. Set to a CQ or CQEX (value); pyverbs' TypeError for another."""
        return super().cq

    @cq.setter
    def cq(self, value: Any) -> None:
        _base.SrqInitAttrEx.cq.__set__(self, value)
        if isinstance(value, pyverbs.cq.CQ):
            pyverbs_objects.set_srq_cq(self, pyverbs_objects.pointer(value))
        elif isinstance(value, pyverbs.cq.CQEX):
            pyverbs_objects.set_srq_cq(self, pyverbs_objects.cqex_pointer(value))


class SRQ(lifetime.Tracked, _base.SRQ):
    """A shared receive queue: as with pyverbs. QPs attached to one are not protected."""

    @whole
    def __init__(self, creator: Any, attr: Any) -> None:
        """As pyverbs' (creator: PD with attr a SrqInitAttr, or Context with a SrqInitAttrEx): ibv_create_srq(_ex).

        Raises PyverbsRDMAError as the verb does.
        """
        try:
            super().__init__(creator, attr)
        except PyverbsRDMAError as error:
            # Before release 55, pyverbs compares the creator's type exactly and so refuses a subclass.
            if error.error_code != -1 or not isinstance(creator, pyverbs.device.Context):
                raise
            self._create_srq_ex(creator, attr)
            if not lifetime.is_open(self):
                code = PyverbsRDMAErrno("").error_code
                raise PyverbsRDMAError(f"Failed to create SRQ (errno is {code})", code) from None
        others = [getattr(attr, name, None) for name in ("cq", "xrcd", "pd")]
        self._node = lifetime.Node(self, creator, *others)


reexport.reexport("srq", globals())
