# SPDX-License-Identifier: BSD-3-Clause
"""Bugs of what the application changes of a QP that were there, and are mended. As unmended.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from simulator.patching import Patch, mutations_of, replaced, rewritten
from simulator.unmended import nothing

from shiftverbs.failover.qp import changes, rebuild
from shiftverbs.failover.qp.connection import Connection
from shiftverbs.failover.qp.evidence import Evidence
from shiftverbs.failover.qp.pairing import Pairing
from shiftverbs.failover.runtime import Runtime
from shiftverbs.protocol.pair import PairProtocol
from shiftverbs.shadows import qp_attributes
from shiftverbs.shadows.qp import ShadowQP

MUTATIONS: dict[str, tuple[str, Patch]] = {}
mutation = mutations_of(MUTATIONS)


@mutation("what the application changes of a QP reaches all of its pairs")
def leave_changes_to_a_later_life() -> Iterator[None]:
    with replaced(changes, "spread", nothing):
        yield


@mutation("a SWITCH that is only asked about leaves the default QP in service")
def leave_the_default_qp_when_a_switch_is_asked_about() -> Iterator[None]:
    with replaced(PairProtocol, "fencing", property(lambda p: p.switching)):
        yield


@mutation("a default QP that broke unseen ends a question")
def leave_a_broken_qp_to_the_question() -> Iterator[None]:
    with rewritten(Evidence, "found_broken", ("not p.fencing", "not p.switching")):
        yield


@mutation("what is changed amid a fence is not said to be before that is done")
def change_a_qp_before_its_fence_is_done() -> Iterator[None]:
    with (
        rewritten(changes, "_follow", ("told.told_before(k)", "pass")),
        rewritten(changes, "spread", ("connection.shadow.is_out_of_service()", "False")),
    ):
        yield


@mutation("a NIC that is busy, and does not hang, is waited for")
def wait_no_longer_for_a_busy_nic() -> Iterator[None]:
    with replaced(changes, "_BUSY", 1):
        yield


@mutation("two threads that change a QP leave it with what both have said")
def bring_the_pairs_what_was_there_before_the_lock() -> Iterator[None]:
    with rewritten(
        changes,
        "spread",
        (
            "told = _Told(connection)\n",
            "told, before = _Told(connection), dict(connection.shadow.attrs)\n",
        ),
        ("wanted = connection.shadow.attrs", "wanted = before"),
    ):
        yield


@mutation("what is published is what was said last")
def publish_the_rights_of_an_earlier_verb() -> Iterator[None]:
    with rewritten(changes, "spread", ('rights = connection.shadow.attrs.get("qp_access_flags", 0)', "pass")):
        yield


@mutation("a later change of what a carrier has is not taken for an earlier one")
def note_what_a_carrier_took_when_it_has_answered() -> Iterator[None]:
    with rewritten(
        changes,
        "asks_the_carrier",
        ("if asked != [0]:", "given.attrs.update(changes)\n        if asked != [0]:"),
    ):
        yield


@mutation("who says again what another has begun waits for it")
def wait_for_ones_own_changes_alone() -> Iterator[None]:
    with rewritten(changes, "_follow", ("bool(given.changing and not changes)", "False")):
        yield


@mutation("what is changed before there is a peer is published")
def publish_no_change_before_there_is_a_peer() -> Iterator[None]:
    with replaced(Pairing, "is_outdated", lambda self, attrs: False):
        yield


@mutation("what backups were given in a former life is nobody's concern")
def keep_what_a_former_life_was_given() -> Iterator[None]:
    with rewritten(Runtime, "qp_reset", ("given.clear()", "given.pop(0, None)")):
        yield


@mutation("no pair is connected anew that this pairing has not")
def connect_the_pairs_of_an_earlier_pairing_anew() -> Iterator[None]:
    with rewritten(changes, "_connect_anew", ("if k >= connection.n_pairs:", "if False:")):
        yield


@mutation("a pair that this pairing has not is no path of its peer's")
def put_the_pairs_of_an_earlier_pairing_out_of_this_one() -> Iterator[None]:
    with rewritten(changes, "_out_of_use", ("if k >= connection.n_pairs:", "if False:")):
        yield


@mutation("where a former life had more pairs, these are not connected anew")
def look_at_what_a_former_life_was_given() -> Iterator[None]:
    with (
        rewritten(Runtime, "qp_reset", ("given.clear()", "given.pop(0, None)")),
        rewritten(changes, "_connect_anew", ("if k >= connection.n_pairs:", "if False:")),
    ):
        yield


@mutation("what a carrier refused one thread does not take back what it took from another")
def take_back_what_another_has_changed_since() -> Iterator[None]:
    with rewritten(
        changes,
        "asks_the_carrier",
        ("given.attrs.update(changes)", "before = dict(given.attrs)\n        given.attrs.update(changes)"),
        ("given.forget(changes)", "given.attrs.update(before)"),
    ):
        yield


@mutation("a carrier has not what it refused")
def note_what_a_carrier_has_refused() -> Iterator[None]:
    with replaced(changes.Given, "forget", nothing):
        yield


@mutation("who says again what a pair refuses waits until that serves nobody")
def leave_the_refusal_of_anothers_change_to_it() -> Iterator[None]:
    told = "told.told_before(k)"
    with rewritten(changes, "_follow", (told, f"{told} and told.given.pop(k, None)")):
        yield


@mutation("a change that nobody waits for any more is carried out, and its pair stays in use")
def give_up_what_nobody_waits_for() -> Iterator[None]:
    with rewritten(changes, "spread", ("hung: list[int] = []", "hung = list(told.pointers)")):
        yield


@mutation("a NIC does not hang because the driver itself cannot wait for its answer")
def give_up_what_the_driver_cannot_wait_for() -> Iterator[None]:
    with rewritten(changes._Told, "wait", ("return []", "return list(self.pointers)")):
        yield


@mutation("a verb of a finalizer in the driver waits for no answer, which only the driver could heed")
def wait_in_the_driver_for_an_answer() -> Iterator[None]:
    with rewritten(changes._Told, "wait", ("if c.driver.is_in():", "if False:")):
        yield


@mutation("a verb of a finalizer in the driver waits for no NIC, which may hang")
def wait_in_the_driver_for_a_nic() -> Iterator[None]:
    ran = "c.driver.run()\n"
    edits = [
        ("if c.driver.is_in():", "if False:"),
        (ran, f"{ran}    if c.driver.is_in():\n        return hung\n"),
    ]
    with rewritten(changes._Told, "wait", *edits):
        yield


@mutation("a change of a QP that is closed meanwhile is not waited for")
def wait_for_the_nics_of_a_closed_qp() -> Iterator[None]:
    with rewritten(changes._Told, "_is_drained", ("c.closed or ", "")):
        yield


@mutation("a pair that does not take a change serves nobody when the verb returns")
def leave_at_once_what_did_not_change() -> Iterator[None]:
    with rewritten(changes, "spread", ("last.told_before(k)", "pass")):
        yield


@mutation("a pair that does not take a change serves nobody")
def serve_with_rights_that_were_withdrawn() -> Iterator[None]:
    with replaced(changes, "_out_of_use", nothing):
        yield


@mutation("a default QP has what its own verb has done, and none of our commands decides about it")
def say_again_what_a_verb_has_done() -> Iterator[None]:
    with rewritten(changes, "spread", ("default.attrs.update(said[1])", "pass")):
        yield


@mutation("a default QP that nothing protects any more is the application's, whatever its NIC answers")
def put_a_plain_default_qp_out_of_use() -> Iterator[None]:
    with rewritten(changes, "_out_of_use", ("if not k and (p is None or p.over):", "if False:")):
        yield


@mutation("a plain default QP stays in use where its own verb was taken, whatever its NIC answers to us")
def say_again_to_a_plain_qp_what_its_verb_has_done() -> Iterator[None]:
    with (
        rewritten(changes, "spread", ("default.attrs.update(said[1])", "pass")),
        rewritten(changes, "_out_of_use", ("if not k and (p is None or p.over):", "if False:")),
    ):
        yield


@mutation("a default QP that a MOVE has left as it was has what the application wants")
def leave_the_default_qp_as_a_move_left_it() -> Iterator[None]:
    given = "connection.given[0] = Given(ERR if fenced else connection.shadow.app_state, had, rebuilt=False)"
    with rewritten(changes, "spread", (given, "told.told_before(0)")):
        yield


@mutation("a carrier that has broken unseen refuses nothing")
def refuse_what_a_broken_carrier_refuses() -> Iterator[None]:
    with rewritten(
        changes,
        "asks_the_carrier",
        ("broken = bool(err) and connection.shadow.is_broken(k)", "broken = False"),
    ):
        yield


@mutation("a slow pair is of use where a change takes nothing from the peer")
def give_up_a_slow_pair_that_takes_nothing_away() -> Iterator[None]:
    with rewritten(changes, "_give_up", ("given.withdrawing", "given.changing")):
        yield


@mutation("what is changed in SQD is remembered")
def forget_what_is_changed_in_sqd() -> Iterator[None]:
    with rewritten(qp_attributes, "_apply", ("RTS if state == SQD else state", "state")):
        yield


@mutation("a QP that has broken unseen fails over before a change of it is refused")
def leave_a_broken_qp_to_others() -> Iterator[None]:
    with replaced(Evidence, "found_broken", nothing):
        yield


@mutation("what peers may do is published anew when it changes")
def publish_no_change_of_rights() -> Iterator[None]:
    with replaced(Pairing, "rights_changed", nothing):
        yield


@mutation("a fence WRITE that the peer refused is the path's failure, and not posted again")
def post_a_refused_fence_again() -> Iterator[None]:
    with (
        rewritten(Connection, "_post_fence_write", (" and rights != self._fence_refused", "")),
        rewritten(Connection, "core_event", ("if why[0] in REFUSED:", "if False:")),
    ):
        yield


@mutation("pairs that were connected before the application gave all attributes are connected anew")
def keep_pairs_that_were_connected_too_early() -> Iterator[None]:
    with replaced(changes, "_connect_anew", lambda connection, wanted: False):
        yield


@mutation("a backup's QP uses the application's P_Key, wherever that is in its table")
def use_the_default_nics_pkey_index() -> Iterator[None]:
    with rewritten(ShadowQP, "pkey_index", ("if k == 0:", "if True:")):
        yield


@mutation("peers may use atomics on a backup only where all NICs are atomic to each other")
def give_every_backup_the_right_to_atomics() -> Iterator[None]:
    def as_given(connection: Any, k: int, attrs: dict[str, Any]) -> dict[str, Any]:
        return attrs

    with replaced(changes, "on_pair", as_given), replaced(rebuild, "on_pair", as_given):
        yield


@mutation("a default QP is told again where failover came between its verb and the note")
def believe_that_the_verbs_qp_is_there() -> Iterator[None]:
    with rewritten(
        changes,
        "spread",
        ("said[0] == connection.shadow.interruptions", "said is not None"),
    ):
        yield


@mutation(
    "a verb that the default QP was taken through RESET amid is repeated, or what it said is told again"
)
def count_no_rebuilding() -> Iterator[None]:
    with rewritten(rebuild.Rebuild, "_reset", ("c.shadow.interruptions += k == 0", "pass")):
        yield


@mutation("what is published is what the application wants when it is")
def publish_what_was_there_before() -> Iterator[None]:
    with rewritten(Pairing, "_publish", ("self.is_outdated(shadow.attrs)", "False")):
        yield


@mutation("a carrier that does not answer has what it had, or was to have, and not all rights")
def doubt_that_a_carrier_has_no_right_at_all() -> Iterator[None]:
    with rewritten(changes, "asks_the_carrier", ('before | changes.get("qp_access_flags", 0)', "-1")):
        yield


@mutation("a carrier that refuses has what it had")
def doubt_that_a_carrier_refused() -> Iterator[None]:
    with rewritten(changes, "asks_the_carrier", ("given.doubt = before\n", "pass\n")):
        yield


@mutation("a QP whose RESET waits for its turn serves as before")
def leave_a_reset_to_its_turn() -> Iterator[None]:
    with rewritten(changes, "_follow", ("behind = given.served", "behind = False")):
        yield


@mutation("a default QP that a MOVE has left, and that refuses, is put out of use")
def ask_a_default_qp_that_a_move_left() -> Iterator[None]:
    with rewritten(
        changes,
        "spread",
        (
            "connection.given[0] = Given(ERR if fenced else connection.shadow.app_state, had, rebuilt=False)",
            "told.tell(0, Given(RTS, {}), told.steps(0).add(**live), [])",
        ),
    ):
        yield


@mutation("what another asks for, and has no answer yet, is in doubt")
def know_what_was_asked_before() -> Iterator[None]:
    with rewritten(
        changes, "asks_the_carrier", ("given.rights | (given.doubt if given.changing else 0)", "given.rights")
    ):
        yield


@mutation("a verb has given the default QP what it said, and not what others have noted")
def take_what_was_noted_for_what_the_verb_said() -> Iterator[None]:
    with rewritten(changes, "spread", ("default.attrs.update(said[1])", "default.attrs.update(live)")):
        yield


@mutation("where RESET is refused, a QP ends whose gates a MOVE closed amid the verb")
def leave_gates_closed_where_reset_was_refused() -> Iterator[None]:
    with rewritten(ShadowQP, "refused", (" or not self.core.is_plain", "")):
        yield


@mutation("what refused our own fence is told nobody, though a receive's WC was polled before that")
def tell_what_refused_our_fence() -> Iterator[None]:
    with rewritten(Connection, "core_event", ("if why[0] in REFUSED:", "if a in REFUSED:")):
        yield


@mutation("a send is told what came of sends, though a receive's WC was polled first")
def tell_what_was_polled_first() -> Iterator[None]:
    with rewritten(Connection, "core_event", ("self.core.why_sends_fail(k) or (a, b)", "(a, b)")):
        yield
