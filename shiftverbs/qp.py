# SPDX-License-Identifier: BSD-3-Clause
"""`pyverbs.qp`: QP, QPEx, QPInitAttr and QPInitAttrEx are ours, the rest is re-exported."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

import pyverbs.mr
import pyverbs.qp as _base
from pyverbs.pyverbs_error import PyverbsRDMAError

from shiftverbs import enums as _e
from shiftverbs._core import destroy_qp, forget_unpolled, whole, whole_close, whole_end
from shiftverbs.failover import runtime
from shiftverbs.mirroring import eligibility, lifetime, reexport
from shiftverbs.mirroring.extended_qp import SendOperations
from shiftverbs.mirroring.qp_init_attr import QPInitAttr as QPInitAttr
from shiftverbs.mirroring.qp_init_attr import QPInitAttrEx as QPInitAttrEx
from shiftverbs.pyverbs_error import ShiftError
from shiftverbs.shadows import pyverbs_objects
from shiftverbs.shadows.nic import GONE
from shiftverbs.shadows.qp import ShadowQP

e: Any = _e

_post_send = _base.QP.post_send
_post_recv = _base.QP.post_recv

# Moving here, the application ends (or suspends) the connection by itself.
_LEAVING = (e.IBV_QPS_RESET, e.IBV_QPS_ERR, e.IBV_QPS_SQD, e.IBV_QPS_SQE)
# What of a QPInitAttr(Ex) must outlive its QP.
_PARENTS = ("send_cq", "recv_cq", "srq", "pd", "xrcd", "ind_table")
# What pyverbs' constructor does with qp_attr, by type.
_FIRST_TRANSITION = {
    e.IBV_QPT_RC: "to_init",
    e.IBV_QPT_UC: "to_init",
    e.IBV_QPT_UD: "to_rts",
    e.IBV_QPT_XRC_RECV: "to_init",
    e.IBV_QPT_XRC_SEND: "to_init",
    e.IBV_QPT_RAW_PACKET: "to_rts",
}


class QP(lifetime.Ended, _base.QP):
    """A queue pair, and, if it can be protected (RC, plain CQs, no SRQ), one on each backup NIC.

    `shift` tells its protection. Control verbs go to the default NIC and are remembered; `qp_state` and `query`
    show the state that the application last set, until the QP really failed.
    """

    _node: lifetime.Node | None = None
    _shadow: ShadowQP | None = None
    _core: Any = None
    _why = ""
    _counted: list[Any] = []
    _cqs: list[Any] = []
    _parents: list[Any] = []
    _number = 0

    @whole
    def __init__(self, creator: Any, init_attr: Any, qp_attr: Any = None) -> None:
        """As pyverbs': verb ibv_create_qp(_ex).

        creator: PD, or Context with a QPInitAttrEx; init_attr: QPInitAttr or QPInitAttrEx; qp_attr: QPAttr of the
        first transitions (RC and UC to INIT, UD to RTS), or None.
        Raises PyverbsRDMAError as the verb does, and ShiftError where the QP cannot be protected and
        SHIFTVERBS_REQUIRE=1.
        """
        if qp_attr is not None and not isinstance(qp_attr, _base.QPAttr):
            super().__init__(creator, init_attr, qp_attr)  # raises
        plan, self._why = eligibility.plan_qp(creator, init_attr)
        if self._why and runtime.required():
            self._refuse()
        if plan is None:
            super().__init__(creator, init_attr, None)
        else:
            self._create_protected(plan, creator, init_attr)
        parents = [getattr(init_attr, name, None) for name in _PARENTS]
        self._node = lifetime.Node(self, creator, *parents)
        self._number = self.qp_num
        self._cqs, self._parents = parents[:2], [creator, *parents]
        if self._shadow is None:
            self._counted = eligibility.count_other(init_attr)
        if qp_attr is not None:
            # Only now: the transitions dispatch to the overrides below.
            getattr(self, _FIRST_TRANSITION[self.qp_type])(qp_attr)

    def _create_protected(self, plan: eligibility.QpPlan, creator: Any, init_attr: Any) -> None:
        create = super().__init__
        with plan:
            try:
                plan.add_headroom()
                create(creator, init_attr, None)
            except PyverbsRDMAError:
                plan.remove_headroom()
                create(creator, init_attr, None)
            self._shadow = plan.shadow_for(self)
            if self._shadow is None and plan.padded:
                # Then exactly as with pyverbs, without WRs of our own.
                _base.QP.close(self)
                plan.remove_headroom()
                create(creator, init_attr, None)
        self._why = plan.why
        if self._shadow is None:
            if runtime.required():
                _base.QP.close(self)
                self._refuse()
            return
        self._core = self._shadow.core
        eligibility.shortcut(self, self._core, QP, "post_send", "post_recv")
        for cq in {init_attr.send_cq, init_attr.recv_cq}:
            cq.used_by(self)
        self._shadow.start()

    def _refuse(self) -> None:
        raise ShiftError(f"The QP would not be protected ({self._why}), and SHIFTVERBS_REQUIRE is set")

    def _insist(self) -> None:
        """Before RTR to RTS: a QP that is certain to stay unprotected does not get there where SHIFTVERBS_REQUIRE=1."""
        if not lifetime.is_open(self):
            return  # pyverbs says so
        held = self._shadow
        if held is None:
            why: str | None = self._why
        else:
            why = runtime.FORKED if held.is_inherited else held.hopeless()
        if why:
            raise ShiftError(f"The QP would not be protected ({why}), and SHIFTVERBS_REQUIRE is set")

    @property
    def shift(self) -> Any:
        """How this QP is protected, where its traffic runs, and if not, why not (shift.ShiftStatus)."""
        return eligibility.status_of(self)

    @property
    def qp_state(self) -> int:
        """The state the application last set; the hardware's where the QP is not protected or has failed."""
        held, state = self._shadow, super().qp_state
        return state if held is None else held.seen_state(state)

    @whole
    def to_init(self, qp_attr: Any) -> None:
        """As pyverbs': verb ibv_modify_qp to INIT.

        qp_attr: QPAttr with what INIT needs. Raises PyverbsRDMAError as the verb does.
        """
        super().to_init(qp_attr)
        self._remember(qp_attr, "INIT")

    @whole
    def to_rtr(self, qp_attr: Any) -> None:
        """As pyverbs': verb ibv_modify_qp to RTR, from RESET through INIT. Never waits for the peer.

        qp_attr: QPAttr with what these states need. Raises PyverbsRDMAError as the verb does.
        """
        super().to_rtr(qp_attr)
        self._remember(qp_attr, "RTR")

    @whole
    def to_rts(self, qp_attr: Any) -> None:
        """As pyverbs': verb ibv_modify_qp to RTS, from RESET through INIT and RTR. Never waits for the peer.

        qp_attr: QPAttr with what these states need. Raises PyverbsRDMAError as the verb does, and ShiftError where it
        is certain that the QP will not be protected and SHIFTVERBS_REQUIRE=1: then it stays in RTR.
        """
        if isinstance(qp_attr, _base.QPAttr) and runtime.required():
            if self.qp_state != e.IBV_QPS_RTR:
                self.to_rtr(qp_attr)  # as pyverbs does, but it may fail between the two
            self._insist()
        held = self._shadow
        if held is not None and self.qp_state == e.IBV_QPS_RTR and isinstance(qp_attr, _base.QPAttr):
            pyverbs_objects.qp_attr(qp_attr).qp_state = e.IBV_QPS_RTS
            self._change(held, qp_attr, self._get_comp_mask("RTS"), super().to_rts, qp_attr)
            return
        super().to_rts(qp_attr)
        self._remember(qp_attr, "RTS")

    def _remember(self, qp_attr: Any, name: str) -> None:
        held = self._shadow
        if held is not None:
            held.modified(pyverbs_objects.qp_attr(qp_attr), self._get_comp_mask(name), held.interruptions)

    @whole
    def modify(self, qp_attr: Any, comp_mask: int) -> None:
        """As pyverbs': verb ibv_modify_qp.

        qp_attr: QPAttr with the new attributes; comp_mask: IBV_QP_* flags for those that count.
        Raises PyverbsRDMAError as the verb does, and ShiftError from RTR to RTS as `to_rts`.
        """
        held = self._shadow
        state = None
        if isinstance(qp_attr, _base.QPAttr) and comp_mask & e.IBV_QP_STATE:
            state = qp_attr.qp_state
            if state == e.IBV_QPS_RTS and runtime.required() and self.qp_state == e.IBV_QPS_RTR:
                self._insist()
        if held is None or not isinstance(qp_attr, _base.QPAttr):
            super().modify(qp_attr, comp_mask)
            if state == e.IBV_QPS_RESET:
                forget_unpolled(self._cqs, self._number)
            return
        if state not in _LEAVING:
            self._change(held, qp_attr, comp_mask, super().modify, qp_attr, comp_mask)
            return
        if state in (e.IBV_QPS_RESET, e.IBV_QPS_ERR) and comp_mask != e.IBV_QP_STATE:
            # No NIC takes more with these (IBA 11.2.5.2); so nothing is given up for it first.
            raise PyverbsRDMAError("Failed to modify QP", errno.EINVAL)
        if state == e.IBV_QPS_SQE or (state == e.IBV_QPS_SQD and not held.may_drain(comp_mask)):
            raise PyverbsRDMAError("Failed to modify QP", errno.EINVAL)  # nor these
        if state == e.IBV_QPS_SQD:
            held.look_for_failure()  # what has broken unseen takes no SQD, and protection would be gone for nothing
        was_guarded = held.core.guarded or held.core.ending
        was_out = held.is_away() or (was_guarded and held.core.first_error(0) is not None)
        while True:
            if not held.leaving(state):
                text = "Failed to modify QP: its traffic is on a backup NIC, where it cannot be drained"
                raise PyverbsRDMAError(text, errno.EBUSY)
            if not lifetime.is_open(self):  # a signal's handler closed it while that waited for a NIC
                return
            if self._shadow is not held:  # one has bound a window through it
                super().modify(qp_attr, comp_mask)
                if state == e.IBV_QPS_RESET:
                    forget_unpolled(self._cqs, self._number)
                return
            if not held.is_connected or held.connection is None or held.is_inherited:
                break  # nor has one connected it anew
        try:
            super().modify(qp_attr, comp_mask)
        except PyverbsRDMAError as error:
            gone = was_guarded and error.error_code in GONE
            if state != e.IBV_QPS_ERR or not gone:
                held.refused(state, gone, was_out)
                raise
            # A protected QP outlives its NIC: the application may end it like any other.
            held.ended_without_nic()
        if state == e.IBV_QPS_ERR:
            held.ended()
        held.modified(pyverbs_objects.qp_attr(qp_attr), comp_mask, held.interruptions)

    def _change(
        self, held: ShadowQP, qp_attr: Any, comp_mask: int, verb: Callable[..., None], *args: Any
    ) -> None:
        """Modify to a state where the QP works, or stay in one: all of its pairs follow, or none does.

        verb, args: how pyverbs does it to the default QP.
        """
        attr = pyverbs_objects.qp_attr(qp_attr)
        error: PyverbsRDMAError | None = None
        while not held.is_out_of_service():
            interruptions = held.interruptions
            try:
                states = held.change(attr, comp_mask, verb, *args)
            except PyverbsRDMAError as refused:
                held.look_for_failure()
                if held.interruptions != interruptions:
                    continue  # a SWITCH that led home again may have been amid the verb
                if not held.is_out_of_service():
                    raise
                error = refused  # it was taken out of service on our way, or just broke
                break
            if states is not None:
                held.follow(states, attr, comp_mask, interruptions)
                return
            if not lifetime.is_open(self):  # a signal's handler closed it in that wait
                return
            if self._shadow is not held:  # or has bound a window through it
                verb(*args)
                return
        code = held.refusal(attr, comp_mask)
        if code:
            raise PyverbsRDMAError("Failed to modify QP", code) from error
        held.modified(attr, comp_mask)

    def query(self, attr_mask: int) -> tuple[Any, Any]:
        """Verb ibv_query_qp, with the application's own capacities and state.

        attr_mask: IBV_QP_* flags for what is asked (a device may tell more).
        Returns (QPAttr, QPInitAttr). Raises PyverbsRDMAError as the verb does.
        """
        held = self._shadow
        try:
            attr, init_attr = super().query(attr_mask)
        except PyverbsRDMAError:
            if held is None or held.is_inherited or held.known_state() is None:
                raise
            # The default NIC is gone, and its traffic ran elsewhere, or has ended.
            attr, init_attr = _base.QPAttr(), _base.QPInitAttr()
        ours = QPInitAttr()
        source, target = pyverbs_objects.init_attr(init_attr), pyverbs_objects.init_attr(ours)
        pyverbs_objects.copy_struct(target, source)
        if held is not None:
            held.show(pyverbs_objects.qp_attr(attr), target)
        return attr, ours

    def set_ece(self, ece: Any) -> None:
        """Verb ibv_set_ece (ece: ECE), on the default NIC's QP. Raises PyverbsRDMAError as the verb does.

        pyverbs 44 takes no keyword here, later releases do.
        """
        super().set_ece(ece)

    def post_send(self, wr: Any, bad_wr: Any = None) -> None:
        """Verb ibv_post_send: through the journal where the QP is protected.

        wr: SendWR, the first of a chain (next_wr); bad_wr: SendWR that becomes a copy of the first one not posted.
        The WRs and inline data may be changed at once. Raises PyverbsRDMAError: ENOMEM where the queue is full,
        EINVAL for a bad WR or state; WRs ahead of bad_wr are posted.
        """
        if self._core is None:
            _post_send(self, wr, bad_wr)
        else:
            self._core.post_send(wr, bad_wr)

    def post_recv(self, wr: Any, bad_wr: Any = None) -> None:
        """Verb ibv_post_recv: through the journal where the QP is protected.

        wr: RecvWR, the first of a chain (next_wr); bad_wr: RecvWR that becomes a copy of the first one not posted.
        Raises PyverbsRDMAError: ENOMEM where the queue is full, EINVAL for a bad WR or state; WRs ahead of bad_wr
        are posted.
        """
        if self._core is None:
            _post_recv(self, wr, bad_wr)
        else:
            self._core.post_recv(wr, bad_wr)

    @whole
    def bind_mw(self, mw: Any, mw_bind: Any) -> None:
        """Verb ibv_bind_mw. It posts past the journal, and a window cannot be moved: the QP's protection ends.

        mw: MW of type 1; mw_bind: MWBind.
        Raises PyverbsRDMAError (EBUSY) where a protected QP has WRs outstanding or is away from its default NIC, and
        ShiftError where it was not protected yet and SHIFTVERBS_REQUIRE=1.
        """
        held = self._shadow
        if held is not None and isinstance(mw, pyverbs.mr.MW):
            if runtime.required() and not held.is_inherited and held.is_owed():
                why = "a memory window cannot be bound before the QP was protected once"
                raise ShiftError(f"The QP would not be protected ({why}), and SHIFTVERBS_REQUIRE is set")
            why = "a memory window was bound through it"
            if any(held.core.outstanding) or not held.leaving(e.IBV_QPS_SQD, why):
                raise PyverbsRDMAError(
                    "Failed to Bind MW: the QP is protected and has WRs outstanding", errno.EBUSY
                )
            if not lifetime.is_open(self):  # a signal's handler closed it while that waited
                raise PyverbsRDMAError("Failed to Bind MW", errno.EINVAL)
            if self._shadow is held:  # else such a handler has bound another one
                self._end_protection(why)
            if not (lifetime.is_open(self) and lifetime.is_open_mw(mw)):
                raise PyverbsRDMAError("Failed to Bind MW", errno.EINVAL)
        super().bind_mw(mw, mw_bind)

    def _end_protection(self, why: str) -> None:
        """Go on as a plain pyverbs QP. Nothing may be outstanding."""
        held = self._shadow
        assert held is not None
        eligibility.closing(held)
        if self._shadow is not held or not lifetime.is_open(self):
            return  # a handler bound another one, or closed it, while that waited, and did all the rest
        self._shadow = None
        held.core.close()  # the default QP lives on and its WCs are the application's again
        self._unprotected()
        held.close()
        self._why = why

    def _unprotected(self) -> None:
        """Post as pyverbs does from now on."""
        self._core = None
        eligibility.undo_shortcut(self, "post_send", "post_recv")

    @whole_close(pyverbs_objects.POINTER)
    def close(self, _is_open: Any = lifetime.is_open) -> None:
        """Verb ibv_destroy_qp. First the failover machinery lets go of the QP.

        A second call does nothing. Raises PyverbsRDMAError as the verb does.
        """
        if not _is_open(self):
            return
        held, self._shadow = self._shadow, None
        if held is not None:
            try:
                eligibility.closing(held)
            except BaseException:  # Ctrl-C while it waited for a NIC: the next close begins anew
                self._shadow = held
                raise
            self._why = "it is closed"
        try:
            core = None if held is None else held.core
            destroy_qp(super().close, core, self._cqs, self._number)
        except PyverbsRDMAError:
            # Still there, with a window bound to it: it goes on as with pyverbs.
            if held is not None:
                held.core.close()
            self._unprotected()
            raise
        finally:
            if held is not None:
                held.close()
        # They may go now, and not before: their end may run a program's code.
        self._cqs, self._parents = [], []
        eligibility.uncount_other(self._counted)
        if self._node is not None:
            self._node.closed()

    @whole_end
    def __del__(self, _finalize: Any = lifetime.finalize) -> None:
        _finalize(self)


class QPEx(SendOperations, QP, _base.QPEx):
    """An extended QP, protected as a QP is: what wr_complete posts goes through the journal."""

    _shadow: ShadowQP | None = None

    def _create_protected(self, plan: eligibility.QpPlan, creator: Any, init_attr: Any) -> None:
        super()._create_protected(plan, creator, init_attr)
        if self._core is not None and init_attr.comp_mask & e.IBV_QP_INIT_ATTR_SEND_OPS_FLAGS:
            flags = getattr(pyverbs_objects.init_attr(init_attr), "send_ops_flags", 0)
            self._begin_operations(self._core, flags, QPEx)

    def _unprotected(self) -> None:
        super()._unprotected()
        self._end_operations()


reexport.reexport("qp", globals())
