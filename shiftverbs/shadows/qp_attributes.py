# SPDX-License-Identifier: BSD-3-Clause
"""The attributes that an application gave its QP: what is needed to make the QP anew, and to show it unchanged.

They are remembered from the application's `modify`, never queried; and as the bytes they came in, which are read only
when somebody asks: the verb need not wait for that.
"""

from __future__ import annotations

import errno
from typing import Literal, TypedDict, cast

from shiftverbs.native.ibv import MigState, QpAttrMask, QpState
from shiftverbs.shadows import pyverbs_objects

RESET, INIT, RTR, RTS, SQD, SQE, ERR = map(int, QpState)
_STATE_NAMES = {INIT: "INIT", RTR: "RTR", RTS: "RTS"}

# What RTS to RTS changes on any pair (IBA 11.2.5.2). The alternate path, which it changes too, lies on the default NIC.
Live = Literal["qp_access_flags", "min_rnr_timer"]
LIVE: tuple[Live, ...] = ("qp_access_flags", "min_rnr_timer")
# What RTR to RTS gives: a QP that was connected with other values must be connected anew.
Connected = Literal["timeout", "retry_cnt", "rnr_retry", "max_rd_atomic"]
CONNECTED: tuple[Connected, ...] = ("timeout", "retry_cnt", "rnr_retry", "max_rd_atomic")
# The other path that it may have on its own NIC.
Alternate = Literal["alt_ah_attr", "alt_pkey_index", "alt_port_num", "alt_timeout", "path_mig_state"]
ALTERNATE: tuple[Alternate, ...] = (
    "alt_ah_attr",
    "alt_pkey_index",
    "alt_port_num",
    "alt_timeout",
    "path_mig_state",
)

_ANY_TIME = (
    QpAttrMask.CUR_STATE
    | QpAttrMask.ACCESS_FLAGS
    | QpAttrMask.ALT_PATH
    | QpAttrMask.MIN_RNR_TIMER
    | QpAttrMask.PATH_MIG_STATE
)
_TO_SEND = (
    QpAttrMask.TIMEOUT
    | QpAttrMask.RETRY_CNT
    | QpAttrMask.RNR_RETRY
    | QpAttrMask.SQ_PSN
    | QpAttrMask.MAX_QP_RD_ATOMIC
)
# Of a connected RC QP: (before, after) -> what must be given, what may be.
_TRANSITIONS = {
    (RTR, RTS): (_TO_SEND, _ANY_TIME),
    (RTS, RTS): (0, _ANY_TIME),
}
_MOST_RNR_TIMER, _MOST_MIG_STATE = 31, MigState.ARMED
_FIELDS = {
    QpAttrMask.ACCESS_FLAGS: "qp_access_flags",
    QpAttrMask.PKEY_INDEX: "pkey_index",
    QpAttrMask.PORT: "port_num",
    QpAttrMask.QKEY: "qkey",
    QpAttrMask.PATH_MTU: "path_mtu",
    QpAttrMask.TIMEOUT: "timeout",
    QpAttrMask.RETRY_CNT: "retry_cnt",
    QpAttrMask.RNR_RETRY: "rnr_retry",
    QpAttrMask.RQ_PSN: "rq_psn",
    QpAttrMask.MAX_QP_RD_ATOMIC: "max_rd_atomic",
    QpAttrMask.MIN_RNR_TIMER: "min_rnr_timer",
    QpAttrMask.SQ_PSN: "sq_psn",
    QpAttrMask.MAX_DEST_RD_ATOMIC: "max_dest_rd_atomic",
    QpAttrMask.PATH_MIG_STATE: "path_mig_state",
    QpAttrMask.DEST_QPN: "dest_qp_num",
    QpAttrMask.RATE_LIMIT: "rate_limit",
}
# More notes than this are merged into one.
_MOST_NOTES = 32


class AddressVector(TypedDict, total=False):
    """Fields of ibv_ah_attr by name; from `dgid` on those that only a global one has."""

    dlid: int
    sl: int
    src_path_bits: int
    static_rate: int
    port_num: int
    is_global: int
    dgid: bytes
    flow_label: int
    sgid_index: int
    hop_limit: int
    traffic_class: int


class QpFields(TypedDict, total=False):
    """Fields of ibv_qp_attr by name: those that were given."""

    qp_access_flags: int
    pkey_index: int
    port_num: int
    qkey: int
    path_mtu: int
    timeout: int
    retry_cnt: int
    rnr_retry: int
    rq_psn: int
    max_rd_atomic: int
    min_rnr_timer: int
    sq_psn: int
    max_dest_rd_atomic: int
    path_mig_state: int
    dest_qp_num: int
    rate_limit: int
    ah_attr: AddressVector
    alt_ah_attr: AddressVector
    alt_pkey_index: int
    alt_port_num: int
    alt_timeout: int


# For each of "INIT", "RTR" and "RTS".
Transitions = dict[str, QpFields]
# A struct ibv_qp_attr, which of it counts, the states before and after; or what all earlier ones come to.
_Note = tuple[bytes, int, int, int] | Transitions


def address_vector(attr: pyverbs_objects.AhAttr) -> AddressVector:
    """struct ibv_ah_attr as a dict; `dgid` (16 bytes) and what goes with it only where it is global."""
    fields: AddressVector = {
        "dlid": attr.dlid,
        "sl": attr.sl,
        "src_path_bits": attr.src_path_bits,
        "static_rate": attr.static_rate,
        "port_num": attr.port_num,
        "is_global": attr.is_global,
    }
    if attr.is_global:
        grh = attr.grh
        fields["dgid"] = grh.dgid
        fields["flow_label"] = grh.flow_label
        fields["sgid_index"] = grh.sgid_index
        fields["hop_limit"] = grh.hop_limit
        fields["traffic_class"] = grh.traffic_class
    return fields


def masked_fields(attr: pyverbs_objects.Attr, mask: int) -> QpFields:
    """The fields of an ibv_qp_attr that a mask selects (without the state)."""
    fields = cast(QpFields, {name: getattr(attr, name) for bit, name in _FIELDS.items() if mask & bit})
    if mask & QpAttrMask.AV:
        fields["ah_attr"] = address_vector(attr.ah_attr)
    if mask & QpAttrMask.ALT_PATH:
        fields["alt_ah_attr"] = address_vector(attr.alt_ah_attr)
        fields["alt_pkey_index"] = attr.alt_pkey_index
        fields["alt_port_num"] = attr.alt_port_num
        fields["alt_timeout"] = attr.alt_timeout
    return fields


def refusal(attr: pyverbs_objects.Attr, mask: int, before: int) -> int:
    """What a NIC would say to this of an RC QP in state `before`: an errno, 0 where it is in order.

    For a QP whose default one is out of service, and cannot be asked. attr: struct ibv_qp_attr.
    """
    after = int(attr.qp_state) if mask & QpAttrMask.STATE else before
    required, optional = _TRANSITIONS.get((before, after), (1 << 31, 0))
    given = mask & ~QpAttrMask.STATE
    if given & required != required or given & ~(required | optional):
        return errno.EINVAL
    if mask & QpAttrMask.CUR_STATE and attr.cur_qp_state != before:
        return errno.EINVAL
    if mask & QpAttrMask.MIN_RNR_TIMER and attr.min_rnr_timer > _MOST_RNR_TIMER:
        return errno.EINVAL
    if mask & QpAttrMask.PATH_MIG_STATE and attr.path_mig_state > _MOST_MIG_STATE:
        return errno.EINVAL
    return 0


class QpAttributes:
    """What the application gave to each transition of one QP. Any thread may ask, and nobody is kept waiting."""

    __slots__ = ("_notes", "_read")

    def __init__(self) -> None:
        # Since the last RESET. Only ever appended to, or replaced: a reader sees all of it or the former one.
        self._notes: list[_Note] = []
        # What was read: of which list, how many of its notes, what they come to. Replaced as a whole.
        self._read: tuple[list[_Note], int, Transitions, QpFields] = (self._notes, 0, {}, {})

    def note(self, attr: pyverbs_objects.Attr, mask: int, before: int, state: int) -> None:
        """The application's `modify` succeeded: it came from state `before` to `state` (enum ibv_qp_state)."""
        if state == RESET:
            self._notes = []
            return
        if len(self._notes) >= _MOST_NOTES:
            self._notes = [self.transitions]
        self._notes.append((bytes(attr), mask, before, state))

    @property
    def transitions(self) -> Transitions:
        """What each transition was given: "INIT", "RTR", "RTS" -> fields of ibv_qp_attr by name.

        The address vector is a dict `ah_attr` (see address_vector).
        """
        return self._all()[0]

    @property
    def merged(self) -> QpFields:
        """The same in one: later ones over earlier ones."""
        return self._all()[1]

    def _all(self) -> tuple[Transitions, QpFields]:
        notes = self._notes
        of, count, transitions, merged = self._read
        if of is not notes:
            count, transitions, merged = 0, {}, {}
        elif count == len(notes):
            return transitions, merged
        transitions = dict(transitions)
        new = notes[count:]
        for one in new:
            _apply(transitions, one)
        merged = {}
        for name in _STATE_NAMES.values():
            merged.update(transitions.get(name, {}))
        self._read = (notes, count + len(new), transitions, merged)
        return transitions, merged

    def write_to(self, attr: pyverbs_objects.Attr) -> None:
        """Write all of it into an ibv_qp_attr."""
        for name, value in self.merged.items():
            if name in ("ah_attr", "alt_ah_attr"):
                _set_address_vector(getattr(attr, name), cast(AddressVector, value))
            else:
                setattr(attr, name, value)


def _apply(transitions: Transitions, note: _Note) -> None:
    if isinstance(note, dict):
        transitions.update(note)
        return
    raw, mask, before, state = note
    name = _STATE_NAMES.get(RTS if state == SQD else state)  # what is changed in SQD is there in RTS
    if name is None:
        return
    fields = masked_fields(pyverbs_objects.Attr(raw), mask)
    if state == before or SQD in (state, before):
        fields = {**transitions.get(name, {}), **fields}
    elif state == INIT:
        transitions.clear()
    transitions[name] = fields


def _set_address_vector(attr: pyverbs_objects.AhAttr, fields: AddressVector) -> None:
    for name, value in fields.items():
        if name == "dgid":
            attr.grh.dgid = value
        elif name in ("flow_label", "sgid_index", "hop_limit", "traffic_class"):
            setattr(attr.grh, name, value)
        else:
            setattr(attr, name, value)
