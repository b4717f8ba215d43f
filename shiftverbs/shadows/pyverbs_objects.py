# SPDX-License-Identifier: BSD-3-Clause
"""C pointers and structs inside pyverbs objects, for the control path.

pyverbs' classes keep their libibverbs pointer or struct at a fixed place of the object, the same in every
release that this module accepts; `check()`, run at import, refuses any other. libibverbs' own structs are its
public ABI. The data path reads the same places in C (_core).
"""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import pyverbs.cq
import pyverbs.device
import pyverbs.mr
import pyverbs.pd
import pyverbs.qp
import pyverbs.srq

# Payload offsets, in bytes: after PyverbsObject (32), after PyverbsCM (40).
_OBJECT = 32
_CM = POINTER = 40
_CQEX_CQ = 48
_MW = MW_POINTER = 48
_MR = MR_POINTER = 56

_SIZES: list[tuple[type, int]] = [
    (pyverbs.mr.MR, 104),
    (pyverbs.qp.QPInitAttr, 120),
    (pyverbs.qp.QPInitAttrEx, 216),
    (pyverbs.qp.QPAttr, 176),
    (pyverbs.qp.QP, 128),
    (pyverbs.cq.CQ, 96),
]


class Cap(ctypes.Structure):
    """struct ibv_qp_cap."""

    _fields_ = [
        ("max_send_wr", ctypes.c_uint32),
        ("max_recv_wr", ctypes.c_uint32),
        ("max_send_sge", ctypes.c_uint32),
        ("max_recv_sge", ctypes.c_uint32),
        ("max_inline_data", ctypes.c_uint32),
    ]


# The same, all at once.
_CAP = struct.Struct("=5I")


# What struct ibv_qp_init_attr and struct ibv_qp_init_attr_ex begin with.
_INIT_ATTR_FIELDS: list[tuple[str, Any]] = [
    ("qp_context", ctypes.c_void_p),
    ("send_cq", ctypes.c_void_p),
    ("recv_cq", ctypes.c_void_p),
    ("srq", ctypes.c_void_p),
    ("cap", Cap),
    ("qp_type", ctypes.c_int),
    ("sq_sig_all", ctypes.c_int),
]


class InitAttr(ctypes.Structure):
    """struct ibv_qp_init_attr."""

    _fields_ = _INIT_ATTR_FIELDS


class InitAttrEx(ctypes.Structure):
    """struct ibv_qp_init_attr_ex."""

    _fields_ = [
        *_INIT_ATTR_FIELDS,
        ("comp_mask", ctypes.c_uint32),
        ("pd", ctypes.c_void_p),
        ("xrcd", ctypes.c_void_p),
        ("create_flags", ctypes.c_uint32),
        ("max_tso_header", ctypes.c_uint16),
        ("rwq_ind_tbl", ctypes.c_void_p),
        ("rx_hash_conf", ctypes.c_uint64 * 3),
        ("source_qpn", ctypes.c_uint32),
        ("send_ops_flags", ctypes.c_uint64),
    ]


class GlobalRoute(ctypes.Structure):
    """struct ibv_global_route."""

    _fields_ = [
        ("dgid", ctypes.c_uint8 * 16),
        ("flow_label", ctypes.c_uint32),
        ("sgid_index", ctypes.c_uint8),
        ("hop_limit", ctypes.c_uint8),
        ("traffic_class", ctypes.c_uint8),
    ]


class AhAttr(ctypes.Structure):
    """struct ibv_ah_attr."""

    _fields_ = [
        ("grh", GlobalRoute),
        ("dlid", ctypes.c_uint16),
        ("sl", ctypes.c_uint8),
        ("src_path_bits", ctypes.c_uint8),
        ("static_rate", ctypes.c_uint8),
        ("is_global", ctypes.c_uint8),
        ("port_num", ctypes.c_uint8),
    ]


class Attr(ctypes.Structure):
    """struct ibv_qp_attr."""

    _fields_ = [
        ("qp_state", ctypes.c_int),
        ("cur_qp_state", ctypes.c_int),
        ("path_mtu", ctypes.c_int),
        ("path_mig_state", ctypes.c_int),
        ("qkey", ctypes.c_uint32),
        ("rq_psn", ctypes.c_uint32),
        ("sq_psn", ctypes.c_uint32),
        ("dest_qp_num", ctypes.c_uint32),
        ("qp_access_flags", ctypes.c_uint),
        ("cap", Cap),
        ("ah_attr", AhAttr),
        ("alt_ah_attr", AhAttr),
        ("pkey_index", ctypes.c_uint16),
        ("alt_pkey_index", ctypes.c_uint16),
        ("en_sqd_async_notify", ctypes.c_uint8),
        ("sq_draining", ctypes.c_uint8),
        ("max_rd_atomic", ctypes.c_uint8),
        ("max_dest_rd_atomic", ctypes.c_uint8),
        ("min_rnr_timer", ctypes.c_uint8),
        ("port_num", ctypes.c_uint8),
        ("timeout", ctypes.c_uint8),
        ("retry_cnt", ctypes.c_uint8),
        ("rnr_retry", ctypes.c_uint8),
        ("alt_port_num", ctypes.c_uint8),
        ("alt_timeout", ctypes.c_uint8),
        ("rate_limit", ctypes.c_uint32),
    ]


class _SrqInitAttrEx(ctypes.Structure):
    """struct ibv_srq_init_attr_ex up to its CQ."""

    _fields_ = [
        ("srq_context", ctypes.c_void_p),
        ("attr", ctypes.c_uint32 * 3),
        ("comp_mask", ctypes.c_uint32),
        ("srq_type", ctypes.c_int),
        ("pd", ctypes.c_void_p),
        ("xrcd", ctypes.c_void_p),
        ("cq", ctypes.c_void_p),
    ]


class _Context(ctypes.Structure):
    """struct ibv_context up to its descriptors."""

    _fields_ = [
        ("device", ctypes.c_void_p),
        ("ops", ctypes.c_void_p * 32),
        ("cmd_fd", ctypes.c_int),
        ("async_fd", ctypes.c_int),
    ]


class _Channel(ctypes.Structure):
    """struct ibv_comp_channel."""

    _fields_ = [("context", ctypes.c_void_p), ("fd", ctypes.c_int), ("refcnt", ctypes.c_int)]


class _Cq(ctypes.Structure):
    """struct ibv_cq, and struct ibv_cq_ex, up to its size."""

    _fields_ = [("pointers", ctypes.c_void_p * 3), ("handle", ctypes.c_uint32), ("cqe", ctypes.c_int)]


_Pointer = ctypes.c_void_p


# These run in finalizers too, when this module may have been emptied: they bring along what they need.
_at = _Pointer.from_address


def pointer(obj: object, _at: Any = _at, _offset: int = _CM) -> int:
    """The libibverbs pointer of a Context, PD, CompChannel, CQ, QP, SRQ or AH; 0 once closed."""
    return _at(id(obj) + _offset).value or 0


def mr_pointer(obj: object, _at: Any = _at, _offset: int = _MR) -> int:
    """The `ibv_mr *` of an MR; 0 once closed."""
    return _at(id(obj) + _offset).value or 0


def mw_pointer(obj: object, _at: Any = _at, _offset: int = _MW) -> int:
    """The `ibv_mw *` of an MW; 0 once closed."""
    return _at(id(obj) + _offset).value or 0


def cqex_pointer(obj: object) -> int:
    """The `ibv_cq *` of a CQEX; not reset by closing (its `ibv_cq_ex *`, see pointer(), is)."""
    return _at(id(obj) + _CQEX_CQ).value or 0


def forget_pointer(obj: object) -> None:
    """Make the object look closed without closing it: for what could not be destroyed and must be leaked."""
    offset = _MR if isinstance(obj, pyverbs.mr.MR) else _MW if isinstance(obj, pyverbs.mr.MW) else _CM
    _at(id(obj) + offset).value = None


def init_attr(obj: object) -> InitAttr | InitAttrEx:
    """The struct inside a QPInitAttr, live: writing to it writes to the object. Keep obj while using it."""
    if isinstance(obj, pyverbs.qp.QPInitAttrEx):
        return InitAttrEx.from_address(id(obj) + _OBJECT)
    if isinstance(obj, pyverbs.qp.QPInitAttr):
        return InitAttr.from_address(id(obj) + _OBJECT)
    raise TypeError(f"expected QPInitAttr or QPInitAttrEx, got {type(obj).__name__}")


def qp_attr(obj: object) -> Attr:
    """The struct inside a QPAttr, live. Keep obj while using it."""
    if not isinstance(obj, pyverbs.qp.QPAttr):
        raise TypeError(f"expected QPAttr, got {type(obj).__name__}")
    return Attr.from_address(id(obj) + _OBJECT)


def set_srq_cq(obj: object, cq: int) -> None:
    """Write the CQ of an SrqInitAttrEx, which pyverbs reads from the wrong place of a CQ subclass."""
    assert isinstance(obj, pyverbs.srq.SrqInitAttrEx)
    _SrqInitAttrEx.from_address(id(obj) + _OBJECT).cq = cq


def async_fd(context: object) -> int:
    """The descriptor on which an open Context's asynchronous events arrive."""
    return int(_Context.from_address(pointer(context)).async_fd)


def channel_fd(channel: object) -> int:
    """The descriptor of an open CompChannel."""
    return int(_Channel.from_address(pointer(channel)).fd)


def cq_entries(cq: object) -> int:
    """How many completions an open CQ or CQEX holds on the default NIC."""
    return int(_Cq.from_address(pointer(cq)).cqe)


def copy_struct(target: ctypes.Structure, source: ctypes.Structure) -> None:
    """Copy one struct over another of the same type."""
    assert type(target) is type(source)
    # Not ctypes.memmove, which gives up the GIL: who takes it then keeps it for longer than the verb takes.
    memoryview(target).cast("B")[:] = memoryview(source).cast("B")


def cap_tuple(cap: Cap) -> tuple[int, int, int, int, int]:
    """(max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data)."""
    send_wr, recv_wr, send_sge, recv_sge, inline = _CAP.unpack_from(cap)
    return send_wr, recv_wr, send_sge, recv_sge, inline


def set_cap(cap: Cap, values: tuple[int, int, int, int, int]) -> None:
    """Write all five capacities."""
    _CAP.pack_into(cap, 0, *values)


def check() -> None:
    """Verify the layouts assumed above. Raises ImportError naming the class that differs."""
    for cls, size in _SIZES:
        if cls.__basicsize__ != size:
            raise ImportError(
                f"shiftverbs does not know this release of pyverbs: {cls.__module__}.{cls.__name__} has "
                f"{cls.__basicsize__} bytes where {size} are known",
                name="pyverbs",
            )
    qp = pyverbs.qp
    cap = qp.QPCap(max_send_wr=11, max_recv_wr=12, max_send_sge=13, max_recv_sge=14, max_inline_data=15)
    plain = qp.QPInitAttr(qp_type=16, cap=cap, sq_sig_all=17)
    extended = qp.QPInitAttrEx(
        qp_type=16, cap=cap, sq_sig_all=17, comp_mask=18, create_flags=19, source_qpn=20, send_ops_flags=21
    )
    for obj in (plain, extended):
        seen = init_attr(obj)
        known: tuple[int, ...] = (*cap_tuple(seen.cap), seen.qp_type, seen.sq_sig_all)
        if isinstance(seen, InitAttrEx):
            known = (*known, seen.comp_mask, seen.create_flags, seen.source_qpn, seen.send_ops_flags)
        if known != tuple(range(11, 11 + len(known))):
            raise ImportError(f"unknown layout of {type(obj).__name__}: {known}", name="pyverbs")
    names: list[Any] = [name for name, *_ in Attr._fields_ if name not in ("cap", "ah_attr", "alt_ah_attr")]
    attr = qp.QPAttr()
    for number, name in enumerate(names):
        setattr(attr, name, number)
    seen_attr = qp_attr(attr)
    for number, name in enumerate(names):
        if getattr(seen_attr, name) != number:
            raise ImportError(f"unknown layout of QPAttr: {name}", name="pyverbs")


check()
