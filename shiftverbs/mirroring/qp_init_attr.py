# SPDX-License-Identifier: BSD-3-Clause
"""QPInitAttr and QPInitAttrEx that accept our CQ.

pyverbs tests `type(scq) is CQ`, and finds the place of the capacities by `type(dst) == QPInitAttr`: a subclass of
either needs the CQ pointers and capacities written into the struct behind pyverbs' back.
"""

from __future__ import annotations

from typing import Any

import pyverbs.cq
import pyverbs.qp as _base

from shiftverbs.shadows import pyverbs_objects


def _cq_pointer(cq: Any) -> int | None:
    """The `ibv_cq *` of a CQ or CQEX; None for anything else."""
    if isinstance(cq, pyverbs.cq.CQ):
        return pyverbs_objects.pointer(cq)
    if isinstance(cq, pyverbs.cq.CQEX):
        return pyverbs_objects.cqex_pointer(cq)
    return None


def _refuse(base: Any, **arguments: Any) -> None:
    """Have pyverbs itself raise its error for arguments of a wrong type."""
    base(**arguments)


def _copy_cap(target: Any, source: Any) -> None:
    values = pyverbs_objects.cap_tuple(pyverbs_objects.init_attr(source).cap)
    pyverbs_objects.set_cap(pyverbs_objects.init_attr(target).cap, values)


def _set_cap(obj: Any, plain: Any, cap: Any) -> None:
    """The `cap` setter of obj, done on a plain pyverbs object."""
    if cap is not None:
        plain.cap = cap
        _copy_cap(obj, plain)


class QPInitAttr(_base.QPInitAttr):
    """struct ibv_qp_init_attr."""

    def __init__(
        self,
        qp_type: int = _base.QPInitAttr().qp_type,
        qp_context: Any = None,
        scq: Any = None,
        rcq: Any = None,
        srq: Any = None,
        cap: Any = None,
        sq_sig_all: int = 1,
    ) -> None:
        """As pyverbs': struct ibv_qp_init_attr.

        qp_type: IBV_QPT_*; qp_context: any object; scq, rcq: CQ or CQEX of sends and of receives; srq: SRQ or None;
        cap: QPCap; sq_sig_all: 1 if every send WR completes with a WC.
        Raises PyverbsUserError where scq or rcq is no CQ.
        """
        for cq in (scq, rcq):
            if cq is not None and _cq_pointer(cq) is None:
                _refuse(_base.QPInitAttr, scq=cq)
        super().__init__(qp_type=qp_type, qp_context=qp_context, srq=srq, sq_sig_all=sq_sig_all)
        if cap is not None:
            _copy_cap(self, _base.QPInitAttr(cap=cap))
        if scq is not None:
            self.send_cq = scq
        if rcq is not None:
            self.recv_cq = rcq

    def _set_send_cq(self, value: Any) -> None:
        _base.QPInitAttr.send_cq.__set__(self, value)
        pointer = _cq_pointer(value)
        if pointer is not None:
            pyverbs_objects.init_attr(self).send_cq = pointer

    send_cq = property(  # pyverbs reads it often: without a Python frame
        _base.QPInitAttr.send_cq.__get__,
        _set_send_cq,
        doc="The CQ of the send queue. Set to a CQ or CQEX (value).",
    )

    def _set_recv_cq(self, value: Any) -> None:
        _base.QPInitAttr.recv_cq.__set__(self, value)
        pointer = _cq_pointer(value)
        if pointer is not None:
            pyverbs_objects.init_attr(self).recv_cq = pointer

    recv_cq = property(  # pyverbs reads it often: without a Python frame
        _base.QPInitAttr.recv_cq.__get__,
        _set_recv_cq,
        doc="The CQ of the receive queue. Set to a CQ or CQEX (value).",
    )

    @property
    def cap(self) -> Any:
        """The capacities, as a QPCap of its own. Set from a QPCap (value)."""
        return super().cap

    @cap.setter
    def cap(self, value: Any) -> None:
        _set_cap(self, _base.QPInitAttr(), value)


class QPInitAttrEx(_base.QPInitAttrEx):
    """struct ibv_qp_init_attr_ex."""

    def __init__(
        self,
        qp_type: int = _base.QPInitAttrEx().qp_type,
        qp_context: Any = None,
        scq: Any = None,
        rcq: Any = None,
        srq: Any = None,
        cap: Any = None,
        sq_sig_all: int = 0,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """As pyverbs' (further arguments: comp_mask, pd, xrcd, create_flags, … as pyverbs has them).

        qp_type: IBV_QPT_*; qp_context: any object; scq, rcq: CQ or CQEX of sends and of receives; srq: SRQ or None;
        cap: QPCap; sq_sig_all: 1 if every send WR completes with a WC.
        Raises PyverbsUserError where scq or rcq is no CQ.
        """
        for cq in (scq, rcq):
            if cq is not None and _cq_pointer(cq) is None:
                _refuse(_base.QPInitAttrEx, scq=cq)
        super().__init__(qp_type, qp_context, None, None, srq, None, sq_sig_all, *args, **kwargs)
        if cap is not None:
            _copy_cap(self, _base.QPInitAttrEx(cap=cap))
        if scq is not None:
            self.send_cq = scq
        if rcq is not None:
            self.recv_cq = rcq

    def mask_to_str(self, mask: int) -> str:
        """Name the bits of mask, a comp_mask. pyverbs 44 takes no keyword here, later releases do."""
        return str(super().mask_to_str(mask))

    def flags_to_str(self, flags: int) -> str:
        """Name the bits of flags, IBV_QP_CREATE_*. pyverbs 44 takes no keyword here, later releases do."""
        return str(super().flags_to_str(flags))

    def _set_send_cq(self, value: Any) -> None:
        _base.QPInitAttrEx.send_cq.__set__(self, value)
        pointer = _cq_pointer(value)
        if pointer is not None:
            pyverbs_objects.init_attr(self).send_cq = pointer

    send_cq = property(  # pyverbs reads it often: without a Python frame
        _base.QPInitAttrEx.send_cq.__get__,
        _set_send_cq,
        doc="The CQ of the send queue. Set to a CQ or CQEX (value).",
    )

    def _set_recv_cq(self, value: Any) -> None:
        _base.QPInitAttrEx.recv_cq.__set__(self, value)
        pointer = _cq_pointer(value)
        if pointer is not None:
            pyverbs_objects.init_attr(self).recv_cq = pointer

    recv_cq = property(  # pyverbs reads it often: without a Python frame
        _base.QPInitAttrEx.recv_cq.__get__,
        _set_recv_cq,
        doc="The CQ of the receive queue. Set to a CQ or CQEX (value).",
    )

    @property
    def cap(self) -> Any:
        """The capacities, as a QPCap of its own. Set from a QPCap (value)."""
        return super().cap

    @cap.setter
    def cap(self, value: Any) -> None:
        _set_cap(self, _base.QPInitAttrEx(), value)
