# SPDX-License-Identifier: BSD-3-Clause
"""Whether a resource gets shadows: what the mirror's classes ask before and after a control verb.

A QP is protected if it is RC, has CQs with shadows, no SRQ, a PD with shadows, and if the
default NIC has room for the headroom that failover needs. Everything else works as with pyverbs, and the reason is
kept for `qp.shift`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from typing import Any

import pyverbs.qp

from shiftverbs import _core
from shiftverbs.failover import runtime
from shiftverbs.failover.qp.status import ShiftStatus
from shiftverbs.native.ibv import EventType, QpCreateSendOp, QpInitAttrMask, QpType
from shiftverbs.pyverbs_error import ShiftError
from shiftverbs.shadows import pyverbs_objects
from shiftverbs.shadows.cq import ShadowCQ
from shiftverbs.shadows.pd import ShadowPD
from shiftverbs.shadows.qp import HEADROOM_RECV_WR, HEADROOM_SEND_WR, ShadowQP
from shiftverbs.telemetry.show import show

logger = logging.getLogger("shiftverbs.protection")

_QPT_NAMES = {
    QpType.UC: "a UC",
    QpType.UD: "a UD",
    QpType.RAW_PACKET: "a raw packet",
    QpType.XRC_SEND: "an XRC",
    QpType.XRC_RECV: "an XRC",
    QpType.DRIVER: "a provider's",
}
# Of QPInitAttrEx.send_ops_flags, those that the journal knows.
_SEND_OPS = sum(set(QpCreateSendOp) - {QpCreateSendOp.BIND_MW, QpCreateSendOp.TSO})

_lock = threading.RLock()
# The protected QPs, by their default ibv_qp, until they are closed.
_by_pointer: dict[int, ShadowQP] = {}

_CLOSED = "its context is closed"

# What was logged once.
_told: set[str] = set()

_INIT_ATTRS = (pyverbs.qp.QPInitAttr, pyverbs.qp.QPInitAttrEx)

runtime.at_start(show)


def domain_of(creator: Any) -> tuple[Any, str]:
    """The domain (default NIC, its backups, its key map) of a Context; None and the reason where it has none.

    Made when the Context's first PD, CompChannel or CQ is. Raises ShiftError where SHIFTVERBS_BACKUP cannot be
    followed and SHIFTVERBS_REQUIRE is set.
    """
    if not hasattr(creator, "_domain_known"):
        return None, "its context is not a shiftverbs Context"
    if not creator._domain_known:
        with _lock:
            if not creator._domain_known:
                found = (None, creator._why) if creator._why else _new_domain(creator)
                if not creator._domain_known:  # a signal's handler may have made one meanwhile
                    creator._domain, creator._why = found
                    creator._domain_known = True
    if not pyverbs_objects.pointer(creator):  # or closed it
        return None, _CLOSED
    if creator._domain is not None and creator._domain.runtime.is_inherited:
        return None, runtime.FORKED
    return creator._domain, creator._why


def _domain_so_far(context: Any) -> Any:
    return context._domain


def _new_domain(context: Any) -> tuple[Any, str]:
    machinery = runtime.current()
    if machinery is None:
        return None, runtime.why_not() or "failover is not running"
    try:
        domain = machinery.domain(context, lambda: _domain_so_far(context))
    except (ShiftError, OSError) as error:
        if runtime.required():
            raise
        logger.warning("%s: QPs on it are not protected: %s", context.name, error)
        return None, str(error)
    if not pyverbs_objects.pointer(context):
        return None, _CLOSED
    if domain is None or not domain.backups:
        why = f"{context.name} has no backup NIC"
        if why not in _told:
            _told.add(why)
            logger.warning(
                "%s: QPs on it are not protected (shiftverbs doctor says which NICs could be)", why
            )
        return None, why
    domain.async_events.ours = is_ours
    return domain, ""


def is_ours(event: Any) -> bool:
    """Whether an async event of the default NIC was caused by failover: a QP that it rebuilt gets its first packet."""
    if event.type != EventType.COMM_EST:
        return False
    held = _by_pointer.get(event.element)
    return held is not None and held.was_rebuilt()


def context_closing(context: Any) -> None:
    """Before a Context is closed: the control thread must stop reading its events."""
    domain = context._domain
    if domain is not None:
        domain.runtime.context_closing(domain)


def _after_fork_in_child() -> None:
    """Whoever had the lock, perhaps while NICs were opened, may not exist in this process."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork_in_child)


def new_channel_core(channel: Any) -> Any:
    """The ChannelCore of a CompChannel."""
    return _core.ChannelCore(pyverbs_objects.pointer(channel))


def new_cq_core(cq: Any, channel_core: Any) -> Any:
    """The CQCore of a CQ, on the ChannelCore of its channel or None."""
    return _core.CQCore(pyverbs_objects.pointer(cq), channel_core)


def shortcut(obj: Any, core: Any, cls: type, *names: str) -> None:
    """Put the core's bound methods into obj itself: `obj.post_send` is the core's, without a Python frame between.

    Not where a subclass of cls overrides the method: that calls cls's own, which goes to the core too.
    The core holds no reference to obj, so this makes no cycle.
    """
    for name in names:
        if getattr(type(obj), name) is getattr(cls, name):
            setattr(obj, name, getattr(core, name))


def undo_shortcut(obj: Any, *names: str) -> None:
    """Take them out again."""
    for name in names:
        with contextlib.suppress(AttributeError):
            delattr(obj, name)


class QpPlan:
    """One protected QP in the making. init_attr: the application's, changed only while the verb runs.

    Used as a context manager: whatever happens, the application's init_attr shows its own capacities afterwards.
    """

    def __init__(self, init_attr: Any, attr: Any, pd: ShadowPD, send_cq: ShadowCQ, recv_cq: ShadowCQ) -> None:
        self.domain = pd.domain
        self.why = ""
        self._init_attr = init_attr  # keeps attr, which lies in it
        self._attr = attr
        self._pd = pd
        self._cqs = (send_cq, recv_cq)
        self._cap = attr.cap
        self._asked = pyverbs_objects.cap_tuple(self._cap)
        self._shown: Any = None
        # Whether the verb is asked for room for our own WRs too.
        self.padded = False

    def __enter__(self) -> QpPlan:
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is not None:
            pyverbs_objects.set_cap(self._cap, self._asked)
        elif self._shown is not None:
            pyverbs_objects.set_cap(self._cap, self._shown)

    def add_headroom(self) -> None:
        """Ask for our own WRs too."""
        send, recv, send_sge, recv_sge, inline = self._asked
        wanted = (send + HEADROOM_SEND_WR, recv + HEADROOM_RECV_WR, max(1, send_sge), recv_sge, inline)
        pyverbs_objects.set_cap(self._cap, wanted)
        self.padded = True

    def remove_headroom(self) -> None:
        """Ask for exactly what the application wants; the QP will not be protected."""
        pyverbs_objects.set_cap(self._cap, self._asked)
        self.padded = False
        self.why = (
            self.why or f"{self.domain.nic.name} has no room for WRs of our own beside the application's"
        )

    def shadow_for(self, qp: Any) -> ShadowQP | None:
        """The shadow of the QP just created; None, with `why`, where there is none after all."""
        if self.why:
            return None
        send, recv, send_sge, recv_sge, inline = pyverbs_objects.cap_tuple(self._cap)
        send_sge = send_sge if self._asked[2] else 0
        cap = (send - HEADROOM_SEND_WR, recv - HEADROOM_RECV_WR, send_sge, recv_sge, inline)
        send_cq, recv_cq = self._cqs
        number, sig_all = qp.qp_num, self._attr.sq_sig_all
        core = _core.QPCore(
            send_cq.core,
            recv_cq.core,
            pyverbs_objects.pointer(qp),
            number,
            *cap,
            bool(sig_all),
            self.domain.keymap,
        )
        shadow = ShadowQP(qp, self._pd, send_cq, recv_cq, core, number, cap, sig_all)
        reserved: list[tuple[ShadowCQ, int]] = []
        try:
            for cq, entries in shadow.entries.items():
                cq.reserve(entries)
                reserved.append((cq, entries))
        except OSError as error:
            for cq, entries in reserved:
                cq.release(entries)
            core.close()
            self.why = f"its CQ cannot be made deep enough: {error}"
            return None
        self._shown = cap
        _by_pointer[shadow.default] = shadow
        return shadow


def plan_qp(creator: Any, init_attr: Any) -> tuple[QpPlan | None, str]:
    """How to create a protected QP; None and the reason where it cannot be one.

    Arguments as the QP's constructor got them, unchecked: what pyverbs will refuse gives some reason too.
    """
    if not isinstance(init_attr, _INIT_ATTRS):
        return None, "it is a provider's QP"
    attr = pyverbs_objects.init_attr(init_attr)
    if attr.qp_type != QpType.RC:
        return None, f"it is {_QPT_NAMES.get(attr.qp_type, 'an unknown kind of')} QP"
    if attr.srq:
        return None, "it receives through an SRQ"
    if isinstance(attr, pyverbs_objects.InitAttrEx):
        if attr.comp_mask & ~(QpInitAttrMask.PD | QpInitAttrMask.SEND_OPS_FLAGS):
            return None, f"it has extended attributes (comp_mask {attr.comp_mask:#x})"
        if attr.comp_mask & QpInitAttrMask.SEND_OPS_FLAGS and attr.send_ops_flags & ~_SEND_OPS:
            return None, "it has send operations that cannot be moved"
    pd = getattr(init_attr, "pd", None) or creator
    if not hasattr(pd, "_shadow"):
        return None, "its PD is not a shiftverbs PD"
    if pd._shadow is None:
        return None, pd._why or "its PD has no shadow"
    if pd._shadow.is_inherited:
        return None, runtime.FORKED
    cqs = []
    for cq in (init_attr.send_cq, init_attr.recv_cq):
        if not hasattr(cq, "_shadow"):
            return None, "its CQ is not a shiftverbs CQ"
        if cq._shadow is None or cq._shadow.domain is not pd._shadow.domain:
            return None, cq._why or "its CQ has no shadow"
        cqs.append(cq._shadow)
    return QpPlan(init_attr, attr, pd._shadow, cqs[0], cqs[1]), ""


def closing(shadow: ShadowQP) -> None:
    """A protected QP is about to be destroyed: driver, NIC commands and data path let go of it."""
    shadow.closing()
    _by_pointer.pop(shadow.default, None)


def count_other(init_attr: Any) -> list[tuple[ShadowCQ, int]]:
    """Note the WRs of an unprotected QP on the CQs that it shares. Returns what uncount_other takes."""
    counted: list[tuple[ShadowCQ, int]] = []
    if not isinstance(init_attr, _INIT_ATTRS):
        return counted
    cap = pyverbs_objects.init_attr(init_attr).cap
    for cq, entries in ((init_attr.send_cq, cap.max_send_wr), (init_attr.recv_cq, cap.max_recv_wr)):
        held = getattr(cq, "_shadow", None)
        if held is not None:
            held.count_other(entries)
            counted.append((held, entries))
    return counted


def uncount_other(counted: list[tuple[ShadowCQ, int]]) -> None:
    """The unprotected QP is gone."""
    for held, entries in counted:
        held.count_other(-entries)
    counted.clear()


def status_of(qp: Any) -> ShiftStatus:
    """`qp.shift`."""
    held = qp._shadow
    if held is None:
        return ShiftStatus(None, qp._why)
    if held.is_inherited:
        return ShiftStatus(None, runtime.FORKED)
    connection = held.domain.runtime.connection_of(held)
    return ShiftStatus(connection, "it is closed")
