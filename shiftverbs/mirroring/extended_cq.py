# SPDX-License-Identifier: BSD-3-Clause
"""An extended CQ's cursor: `start_poll … poll_next … end_poll` over whichever NICs carry the traffic.

pyverbs reads the provider's queue in place, through function pointers of the ibv_cq_ex. Here the completion under the
cursor is a copy, taken as CQ.poll takes it; what is not in a struct ibv_wc cannot be read, and a CQEX that asks for
such a thing (see `plan`) is pyverbs' own.
"""

from __future__ import annotations

import types
from typing import Any

import pyverbs.cq
from pyverbs.pyverbs_error import PyverbsUserError

from shiftverbs import _core
from shiftverbs.mirroring import eligibility, reexport
from shiftverbs.native.ibv import CqInitAttrMask, CreateCqAttr
from shiftverbs.shadows import pyverbs_objects

_constants: dict[str, Any] = {}
reexport.reexport_enums("enums", _constants)
_e: Any = types.SimpleNamespace(**_constants)

_METHODS = (
    "start_poll",
    "poll_next",
    "end_poll",
    "read_opcode",
    "read_vendor_err",
    "read_byte_len",
    "read_imm_data",
    "read_qp_num",
    "read_src_qp",
    "read_wc_flags",
    "read_slid",
    "read_sl",
    "read_dlid_path_bits",
)


def plan(init_attr: Any) -> str:
    """Why a CQEX with these attributes can have no shadow; empty where it can."""
    why = ""
    if init_attr is None:
        return why
    if init_attr.wc_flags & ~_e.IBV_WC_STANDARD_FLAGS:
        # Two NICs' clocks do not compare; flow tags, VLANs and tags are not in a struct ibv_wc.
        why = "its CQ reports what two NICs cannot report as one"
    elif (
        type(init_attr) is not pyverbs.cq.CqInitAttrEx
        or init_attr.parent_domain is not None
        or init_attr.comp_mask & ~CqInitAttrMask.FLAGS
        # A CQ of one thread is understood: the GIL is held in all that touches it.
        or (init_attr.comp_mask and init_attr.flags & ~CreateCqAttr.SINGLE_THREADED)
    ):
        why = "its CQ has extended attributes"
    return why


class Cursor:
    """The cursor's methods, for CQEX: the merged cursor's where the CQ has shadows, else pyverbs'."""

    _cursor: Any = None

    def _begin_cursor(self, core: Any, cls: type) -> None:
        """Read over core, the CQCore, from now on; cls: the class whose methods are those below."""
        self._cursor = _core.CQCursor(core, pyverbs_objects.pointer(self))
        eligibility.shortcut(self, self._cursor, cls, *_METHODS)

    def _reader(self) -> Any:
        return super() if self._cursor is None else self._cursor

    def _only_pyverbs(self, what: str) -> Any:
        if self._cursor is not None:
            raise PyverbsUserError(f"The CQ was not created with {what}")
        return super()

    def start_poll(self, attr: Any) -> int:
        """Verb ibv_start_poll, over whichever NICs carry the traffic.

        attr: PollCqAttr or None. Returns 0 with the cursor on the oldest completion; ENOENT where there is none, or
        what the verb fails with: then poll_next and end_poll are not to be called.
        """
        return int(self._reader().start_poll(attr))

    def poll_next(self) -> int:
        """Verb ibv_next_poll. Returns 0 with the cursor on the next completion; ENOENT or another errno where none."""
        return int(self._reader().poll_next())

    def end_poll(self) -> None:
        """Verb ibv_end_poll: done with the cursor."""
        self._reader().end_poll()

    def read_opcode(self) -> int:
        """Verb ibv_wc_read_opcode. Returns IBV_WC_* of the completion under the cursor."""
        return int(self._reader().read_opcode())

    def read_vendor_err(self) -> int:
        """Verb ibv_wc_read_vendor_err. Returns the vendor's code of an error."""
        return int(self._reader().read_vendor_err())

    def read_byte_len(self) -> int:
        """Verb ibv_wc_read_byte_len. Returns bytes."""
        return int(self._reader().read_byte_len())

    def read_imm_data(self) -> int:
        """Verb ibv_wc_read_imm_data. Returns the immediate data as on the wire (big endian)."""
        return int(self._reader().read_imm_data())

    def read_qp_num(self) -> int:
        """Verb ibv_wc_read_qp_num. Returns the number of the application's QP, whichever NIC completed the WR."""
        return int(self._reader().read_qp_num())

    def read_src_qp(self) -> int:
        """Verb ibv_wc_read_src_qp. Returns the sender's QP number (UD)."""
        return int(self._reader().read_src_qp())

    def read_wc_flags(self) -> int:
        """Verb ibv_wc_read_wc_flags. Returns IBV_WC_GRH, IBV_WC_WITH_IMM, IBV_WC_WITH_INV."""
        return int(self._reader().read_wc_flags())

    def read_slid(self) -> int:
        """Verb ibv_wc_read_slid. Returns the sender's LID (UD)."""
        return int(self._reader().read_slid())

    def read_sl(self) -> int:
        """Verb ibv_wc_read_sl. Returns the service level (UD)."""
        return int(self._reader().read_sl())

    def read_dlid_path_bits(self) -> int:
        """Verb ibv_wc_read_dlid_path_bits. Returns the low bits of the LID that was sent to (UD)."""
        return int(self._reader().read_dlid_path_bits())

    def read_timestamp(self) -> int:
        """Verb ibv_wc_read_completion_ts. Returns the NIC's clock; PyverbsUserError where it was not asked for."""
        return int(self._only_pyverbs("IBV_WC_EX_WITH_COMPLETION_TIMESTAMP").read_timestamp())

    def read_completion_wallclock_ns(self) -> int:
        """Verb ibv_wc_read_completion_wallclock_ns. Returns ns; PyverbsUserError where it was not asked for."""
        name = "IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK"
        return int(self._only_pyverbs(name).read_completion_wallclock_ns())

    def read_cvlan(self) -> int:
        """Verb ibv_wc_read_cvlan. Returns the VLAN tag; PyverbsUserError where it was not asked for."""
        return int(self._only_pyverbs("IBV_WC_EX_WITH_CVLAN").read_cvlan())

    def read_flow_tag(self) -> int:
        """Verb ibv_wc_read_flow_tag. Returns the tag of the flow; PyverbsUserError where it was not asked for."""
        return int(self._only_pyverbs("IBV_WC_EX_WITH_FLOW_TAG").read_flow_tag())

    def read_tm_info(self) -> Any:
        """Verb ibv_wc_read_tm_info. Returns WcTmInfo; PyverbsUserError where it was not asked for."""
        return self._only_pyverbs("IBV_WC_EX_WITH_TM_INFO").read_tm_info()
