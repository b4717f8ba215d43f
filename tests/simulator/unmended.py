# SPDX-License-Identifier: BSD-3-Clause
"""Bugs that were there, and are mended: each is put in again for a while, and must be found by the checkers.

Those of the driver's part, of memory keys and of the control channel; the data path's are in mutants.py, the protocol's
in protocol_unmended.py. `MUTATIONS` maps a name to (what it breaks, the patch).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

from simulator.patching import Patch, mutations_of, replaced, rewritten

from shiftverbs import _core
from shiftverbs.failover import driver
from shiftverbs.failover.driver import Driver
from shiftverbs.failover.nic_events import NicEvents
from shiftverbs.failover.qp.connection import Connection
from shiftverbs.failover.qp.connection_keys import ConnectionKeys
from shiftverbs.failover.qp.drain import Fence
from shiftverbs.failover.qp.ending import Ending
from shiftverbs.failover.qp.evidence import Evidence
from shiftverbs.failover.qp.key_wait import KeyWait
from shiftverbs.failover.qp.pairing import Pairing
from shiftverbs.failover.qp.rebuild import Rebuild
from shiftverbs.failover.qp.reports import Reports
from shiftverbs.failover.qp.watchdog import Watchdog
from shiftverbs.failover.runtime import Runtime
from shiftverbs.failover.services import control_channel
from shiftverbs.failover.services.control_channel import ControlChannel
from shiftverbs.failover.services.cq_polling import Looks
from shiftverbs.failover.services.memory_keys import KeyBook, PeerKeys
from shiftverbs.process.log_lines import Seldom
from shiftverbs.protocol.path_health import PingState
from shiftverbs.protocol.seal import Seals, Window
from shiftverbs.protocol.silence import Silence
from shiftverbs.shadows.mr import ShadowMR
from shiftverbs.shadows.nic import Nic
from shiftverbs.shadows.qp import ShadowQP

MUTATIONS: dict[str, tuple[str, Patch]] = {}
mutation = mutations_of(MUTATIONS)


def nothing(*_args: Any, **_options: Any) -> None:
    """Does nothing."""


# ---- the end of a QP ------------------------------------------------------------------------------------------------


@mutation("moved to ERR away from home, a QP gets its flushes when its backups have stopped and are empty")
def flush_in_err_before_backups_stop() -> Iterator[None]:
    with rewritten(
        Ending,
        "by_application",
        ("self.begin(muted or FLUSHED)", "self.stop_backups(reset=False)\n        core.abort(*FLUSHED)"),
    ):
        yield


@mutation("an error that RESET was to take, and that is refused, is told")
def flush_what_failed_before_a_reset_in_vain() -> Iterator[None]:
    with rewritten(Ending, "by_application", ("self.begin(muted or FLUSHED)", "self.begin(FLUSHED)")):
        yield


@mutation("an error that was withheld at home as ERR came is told")
def flush_what_failed_before_err() -> Iterator[None]:
    with rewritten(Ending, "by_application", ("core.forgets or core.send_pair == 0", "core.forgets")):
        yield


@mutation("so is one whose QP was amid a MOVE")
def flush_what_failed_before_err_amid_a_move() -> Iterator[None]:
    with rewritten(
        Ending, "by_application", ("core.forgets or core.send_pair == 0", "core.forgets or core.is_plain")
    ):
        yield


@mutation("so is one that nobody has polled")
def flush_what_nobody_has_polled_before_err() -> Iterator[None]:
    with rewritten(Ending, "by_application", ("core.guarded and not core.ending", "False")):
        yield


@mutation("where one NIC refuses to stop its QP, the flush of another's still tells what was complete")
def drop_the_flush_where_another_nic_refuses() -> Iterator[None]:
    with rewritten(Fence, "be_patient", ("if now_ns >= self._deadline_ns:", "if True:")):
        yield


@mutation("and it has its whole time for that")
def cut_the_flush_where_another_nic_refuses() -> Iterator[None]:
    with rewritten(Fence, "be_patient", ("now_ns + PATIENCE_NS", "self._deadline_ns = now_ns + PATIENCE_NS")):
        yield


@mutation("where something of ours failed, too, no WR is flushed before every pair has stopped")
def flush_at_once_where_we_failed() -> Iterator[None]:
    with rewritten(Ending, "without_protocol", ("self.begin(first)", "core.abort(*first)")):
        yield


@mutation(
    "a QP that is away when its peer leaves goes on withholding errors, since only we can end both halves of it"
)
def let_go_of_what_is_away() -> Iterator[None]:
    with (
        rewritten(Connection, "_let_go", ("not self.core.flushes_itself", "False")),
        rewritten(Connection, "set_status", ("self.was_protected and not self.core.flushes_itself", "False")),
    ):
        yield


@mutation("a QP is closed when no backup's QP can write into its memory any more")
def close_while_backups_are_at_work() -> Iterator[None]:
    with rewritten(
        Connection, "close", ("return sorted(self.ending.behind | self.ending.unstopped)", "return []")
    ):
        yield


@mutation(
    "a QP that its peer left while away ends when its path fails, its NIC dies or its keys are not to be had"
)
def forget_who_was_left_alone() -> Iterator[None]:
    with replaced(Ending, "is_left_alone_on", lambda ending, k: False):
        yield


@mutation("a WR whose key nobody can tell ends a QP that its peer left while away")
def wait_for_keys_that_nobody_can_tell() -> Iterator[None]:
    with rewritten(KeyWait, "in_vain", ("c.ending.is_left_alone_on(c.core.send_pair)", "False")):
        yield


@mutation("the errors of a QP wait for a NIC that hangs: it may still write into its memory")
def flush_though_a_nic_hangs() -> Iterator[None]:
    with rewritten(Ending, "_hung", ("c.fence.be_patient()", "self.deliver()")):
        yield


@mutation("an ARM that waited for its look at the NIC does not reset a QP that has ended")
def revive_an_ended_qp() -> Iterator[None]:
    with (
        rewritten(Rebuild, "_see_nic_first", (" and not c.core.ending", "")),
        rewritten(Ending, "begin", ("c.rebuild.call_off(0)", "pass")),
    ):
        yield


@mutation("what is posted behind the end is flushed by us where the default NIC is dead")
def trust_a_dead_nic_to_flush() -> Iterator[None]:
    with rewritten(Ending, "deliver", ("self._we_flush or c.nic(0).dead", "self._we_flush")):
        yield


@mutation("a MOVE that was told is not called off because something of ours failed")
def call_off_a_told_move_where_we_failed() -> Iterator[None]:
    with rewritten(Ending, "without_protocol", (" and not (p.move_told or core.ends_at_post)", "")):
        yield


@mutation("SQD calls off a MOVE that waits for its fence")
def leave_a_move_waiting_in_sqd() -> Iterator[None]:
    with replaced(Ending, "_call_move_off", nothing):
        yield


@mutation("an idle QP whose peer left keeps its receives when the NIC of its sends dies")
def flush_receives_of_who_is_idle() -> Iterator[None]:
    with rewritten(Ending, "lose", ("k == core.recv_pair or core.outstanding[0]", "True")):
        yield


@mutation("whoever is left in a MOVE that was not answered sends nothing to receives that may have been left")
def send_to_receives_that_were_left() -> Iterator[None]:
    with rewritten(Connection, "_let_go", ("self.core.end_at_post()", "self.core.move_cancel()")):
        yield


@mutation("what waits for room is not handed to a backup that is being stopped")
def post_to_a_backup_that_is_stopped() -> Iterator[None]:
    # What completes behind RESET makes no room either; and what is refused there is heard of in the next life.
    with (
        rewritten(Ending, "stop_backups", ("c.core.close_send()", "pass"), ("c.core.forget_pair(k)", "pass")),
        rewritten(ShadowQP, "begin_anew", ("self.core.forget_events()", "pass")),
        rewritten(Connection, "core_event", ("if b or self.core.refused:", "if True:")),
    ):
        yield


@mutation("SQD is refused where its QP has left home, or is about to")
def take_a_qp_to_sqd_amid_a_switch() -> Iterator[None]:
    with rewritten(
        Runtime, "qp_touched", ("state == QpState.SQD and (switching or shadow.is_away())", "False")
    ):
        yield


@mutation("the end of a QP is no homecoming")
def take_an_end_for_a_homecoming() -> Iterator[None]:
    with rewritten(Reports, "is_home", (" or (p is not None and p.over)", "")):
        yield


@mutation("a QP that is going is not told as never protected")
def tell_of_a_qp_that_is_going() -> Iterator[None]:
    with rewritten(Pairing, "advance", ("shadow.closed", "False")):
        yield


# ---- fences, work that no pair carries ------------------------------------------------------------------------------


@mutation("a fence that begins behind a RESET is not forgotten when that ends, whatever RESETs ended before")
def forget_a_reset_under_way() -> Iterator[None]:
    with rewritten(
        Rebuild,
        "_reset",
        ("c.core.forget_pair(k)\n    c.given[k]", "c.given[k]"),
    ):
        yield


@mutation("a WR that a healthy NIC refuses late ends the QP, and starts no SWITCH")
def take_a_late_refusal_for_the_paths() -> Iterator[None]:
    with rewritten(Evidence, "post_failed", ("if by_path and not", "if not")):
        yield


@mutation("failures are counted where nothing else speaks against the path")
def count_failures_on_silent_paths() -> Iterator[None]:
    with replaced(Evidence, "path_answers", lambda evidence, k: True):
        yield


@mutation("what an answer takes is learned from each, also where other pings went out meanwhile")
def measure_the_newest_answer_alone() -> Iterator[None]:
    took = "took_ns = now_ns - sent_ns"
    with rewritten(PingState, "handle_pong", (took, f"{took} if number == self._number else 0")):
        yield


@mutation("an answer is not missing before it takes longer than answers do there")
def take_a_slow_answer_for_a_missing_one() -> Iterator[None]:
    with rewritten(PingState, "handle_pong", ("max(PATIENCE_NS, patience_ns)", "PATIENCE_NS")):
        yield


@mutation("pings are as dense where answers take long")
def ping_as_seldom_as_answers_come() -> Iterator[None]:
    apart = "max(self.interval_ns, min(ANSWERS_APART * self._takes_ns, MOST_APART_NS))"
    edit = ("now_ns + self.interval_ns", f"now_ns + {apart}")
    with rewritten(PingState, "poll_ping", edit), rewritten(PingState, "hurry", edit):
        yield


@mutation("pings are as dense as they are wanted while the other QPs are looked at, too")
def forget_between_two_looks_who_is_stuck() -> Iterator[None]:
    edit = ("wanted.get(path, QUIET_PING_NS)", "50 * MS if path in wanted else QUIET_PING_NS")
    # And nobody is looked at more often for its work, which hides that.
    with rewritten(Driver, "_begin_round", edit), mock.patch.object(_core, "at_work", lambda cores: []):
        yield


@mutation("of very many at work one that doubts is looked at each time")
def look_at_who_doubts_in_turn() -> Iterator[None]:
    edits = ("asking if is_many else {}", "{}"), ("elif asking:", "elif False:")
    with rewritten(Driver, "_watch", *edits):
        yield


@mutation("what one QP's pings have shown of other paths is known to all")
def find_what_another_has_found() -> Iterator[None]:
    with rewritten(Watchdog, "_tell_dead_paths", ("if k == at:", "if k == at or not self._silence._found:")):
        yield


@mutation("who is known to be silent is suspected, whatever was so a moment ago")
def trust_who_is_known_to_be_silent() -> Iterator[None]:
    with rewritten(ControlChannel, "suspect", ("is_known or now_ns", "now_ns")):
        yield


@mutation("a path that is not missed yet has not answered either")
def take_who_is_not_missed_yet_for_alive() -> Iterator[None]:
    edit = ("any(other.answered_sent_ns > self._dead_ns for other in alive)", "True")
    with rewritten(Watchdog, "_is_only_here", edit):
        yield


@mutation("a WR that failed and has completed is not stuck, wherever traffic is")
def take_what_completed_away_for_stuck() -> Iterator[None]:
    away = 'c.send_state == "DEFAULT" and c.recv_state == "DEFAULT" and p.all_fit'
    edit = ("self.stuck_wr is not None and c.core", f"self.stuck_wr is not None and {away} and c.core")
    with rewritten(Watchdog, "pings_ns", edit):
        yield


@mutation("what a peer said is as fresh as it was when it was said")
def take_what_was_said_before_for_news() -> Iterator[None]:
    with rewritten(
        ControlChannel, "_ping", ("handle_sign_of_life(path.heard_ns)", "handle_sign_of_life(now_ns)")
    ):
        yield


@mutation("memory goes behind what was commanded to QPs")
def take_memory_from_under_a_qp() -> Iterator[None]:
    with rewritten(ShadowMR, "_take_from", ("nic.worker.destroy(", "nic.registrar.destroy(")):
        yield


@mutation("what is registered ends in the thread that registers nothing")
def end_memory_behind_what_is_registered() -> Iterator[None]:
    wait = (
        "nic.hangs, functools.partial(_is_destroyed, nic, handle)",
        "nic.memory_hangs, functools.partial(nic.registrar.drain, handle)",
    )
    edits = [("nic.worker.destroy(", "nic.registrar.destroy("), wait]
    with rewritten(ShadowMR, "_take_from", *edits):
        yield


@mutation("a NIC that registers carries out commands")
def wait_for_no_end_beside_a_registration() -> Iterator[None]:
    with rewritten(ShadowMR, "_take_from", ("nic.hangs, functools", "nic.memory_hangs, functools")):
        yield


@mutation("what is changed does not wait for what is being registered, which may take for ever")
def change_memory_behind_what_is_registered() -> Iterator[None]:
    with rewritten(ShadowMR, "hand_over", (" and not nic.is_registering()", "")):
        yield


@mutation("the peer may take its time: what was registered meanwhile is waited for, too")
def look_once_for_memory() -> Iterator[None]:
    with rewritten(Connection, "handle_message", ("not self.pairing.has_memory()", "False")):
        yield


@mutation("PROTECTED is said when the backups have the memory that there was")
def protect_before_memory_is_there() -> Iterator[None]:
    with replaced(Pairing, "has_memory", lambda *_: True):
        yield


@mutation("a NIC may refuse the end of each pair's QP as often")
def count_the_refusals_of_all_pairs() -> Iterator[None]:
    first = "self._tries_left[min(self._tries_left)]"
    edits = [(f"self._tries_left[k]{end}", f"{first}{end}") for end in (" -=", ":")]
    with rewritten(Fence, "_erred", *edits):
        yield


@mutation("no fence waits for memory that is being registered")
def register_among_the_commands() -> Iterator[None]:
    with rewritten(Nic, "__init__", ("self.registrar = make_worker(name)", "self.registrar = self.worker")):
        yield


@mutation("what an answer takes is learned from one to a ping that is not known any more, too")
def learn_nothing_from_very_late_answers() -> Iterator[None]:
    late = ("sent_ns = self._awaited[0][1]", "sent_ns = now_ns")
    with rewritten(PingState, "handle_pong", late):
        yield


@mutation("what came all at once behind a pause does not say that answers are quick again")
def forget_a_pause_in_what_comes_behind_it() -> Iterator[None]:
    edit = ("elif sent_ns >= self._learned_ns:", "else:")
    # And a path in doubt is not asked, whose pings are counted more slowly and hide that.
    calm = mock.patch.object(Silence, "look", lambda p, now_ns, oldest, age_ns, path, others: False)
    with rewritten(PingState, "handle_pong", edit), calm:
        yield


@mutation("a fence does not wait for what a NIC is asked of its ports")
def look_at_ports_among_the_commands() -> Iterator[None]:
    with rewritten(Nic, "look_again", ("self._looker", "self.worker")):
        yield


@mutation("a question is not asked, or agreed to, with work that is unsafe once more of it has completed")
def ask_with_work_that_will_be_unsafe() -> Iterator[None]:
    with rewritten(Evidence, "unsafe_soon", ("cqes_lost=True", "")):
        yield


# ---- memory keys ----------------------------------------------------------------------------------------------------


@mutation("READY and MOVED make worthless what was told before the withdrawal that they name")
def go_by_what_ready_made_worthless() -> Iterator[None]:
    with replaced(PeerKeys, "heed", nothing):
        yield


@mutation("an answer that a withdrawal overtook is not used")
def use_an_answer_that_was_overtaken() -> Iterator[None]:
    with rewritten(PeerKeys, "take", ("m.version < self.version:", "False:")):
        yield


@mutation("who has heard of no withdrawal that is remembered forgets all")
def forget_only_what_is_named() -> Iterator[None]:
    with rewritten(PeerKeys, "take", ("if self.version < m.since:", "if False:")):
        yield


@mutation("a peer that sends to a backup is told of each withdrawal at once")
def tell_nobody_of_a_withdrawal() -> Iterator[None]:
    with replaced(ConnectionKeys, "push", nothing):
        yield


@mutation("an rkey that is given out again waits until every peer that is away has forgotten the former one")
def give_a_key_again_at_once() -> Iterator[None]:
    with replaced(KeyBook, "await_confirmed", lambda book, mr, timeout_s: []):
        yield


@mutation("a peer that is told anew is not taken for one that heard of earlier withdrawals")
def take_who_is_told_anew_for_who_knew() -> Iterator[None]:
    with rewritten(KeyBook, "told", ("next(self._numbers)", "0")):
        yield


@mutation("a registration that is under way is waited for as long as its NIC works")
def wait_for_a_registration_as_for_a_peer() -> Iterator[None]:
    with rewritten(ConnectionKeys, "hopeless", ('if mr.state(k) == "pending":', "if False:")):
        yield


@mutation("no other memory gets a key by which a peer's WRs may still come")
def give_other_memory_a_held_key() -> Iterator[None]:
    with replaced(KeyBook, "holds", lambda book, nic, of, rkey=None: False):
        yield


@mutation("who confirms a withdrawal says which of its WRs may still come by older keys")
def settle_what_is_under_way() -> Iterator[None]:
    with rewritten(
        PeerKeys,
        "settled",
        (
            "return min((version for version, _, _ in self._under_way), default=self.version)",
            "return self.version",
        ),
    ):
        yield


@mutation("memory has no rights of peers' before it is known which key it has, where some are held")
def register_with_rights_by_an_unknown_key() -> Iterator[None]:
    with rewritten(ShadowMR, "_register", ("access & ~PEERS_ACCESS", "access")):
        yield


@mutation("who is home again holds back no key of a backup")
def hold_keys_for_who_is_home() -> Iterator[None]:
    with rewritten(
        PeerKeys,
        "settled",
        ("        and user.core.send_pair  # at home, keys are the owner's\n", ""),
    ):
        yield


@mutation("a key is forgotten before the WRs are looked for that go by it: others are posted meanwhile")
def look_for_wrs_before_a_key_is_forgotten() -> Iterator[None]:
    with rewritten(
        PeerKeys,
        "take",
        ("            self._leave_behind(rkey)\n", ""),
        (
            "        for rkey in m.gone:\n",
            "        for rkey in m.gone:\n            self._leave_behind(rkey)\n",
        ),
    ):
        yield


@mutation("memory that rereg_mr is changing is memory all the same")
def deny_memory_that_is_changing() -> Iterator[None]:
    with replaced(KeyBook, "is_changing", lambda book, nic, lkey=None, rkey=None: False):
        yield


@mutation("only a NIC that a WR waits for makes it hopeless by hanging")
def despair_of_any_nic_that_hangs() -> Iterator[None]:
    with rewritten(
        ConnectionKeys,
        "hopeless",
        ("(rkey, send_k) in self._hung", "any(rkey == hung for hung, _ in self._hung)"),
    ):
        yield


@mutation("who is told of no key any more, since a WR that never ends holds them all, does not wait for ever")
def wait_for_ever_for_keys_that_are_held() -> Iterator[None]:
    with rewritten(KeyBook, "_find", ("time.monotonic() - told.full_since > HANGS_S", "False")):
        yield


@mutation("a WR whose own memory is gone fails in its turn, as its NIC would have it")
def give_up_a_qp_whose_memory_is_gone() -> Iterator[None]:
    with replaced(ConnectionKeys, "_stand_in", lambda keys, k, lkey: False):
        yield


@mutation("a WR that names memory which the peer has not fails in its turn, as the peer's NIC would have it")
def give_up_a_qp_whose_peer_has_no_memory() -> Iterator[None]:
    with (
        rewritten(
            ConnectionKeys,
            "hopeless",
            (
                "continue  # see `refused`",
                'return f"the peer has no memory region of rkey {rkey:#x}"',
            ),
        ),
        replaced(ConnectionKeys, "refused", lambda keys, since_ns, now_ns: None),
    ):
        yield


@mutation("an answer may come by a QP of another Context of the same NIC")
def forget_the_nics_other_contexts() -> Iterator[None]:
    with replaced(Runtime, "group", lambda runtime, nic: _core.QPGroup()):
        yield


# ---- who is heard, and when -----------------------------------------------------------------------------------------


@mutation("a datagram counts only with the seal of its sender")
def believe_whoever_speaks() -> Iterator[None]:
    with replaced(Seals, "is_theirs", lambda seals, data, tag: True):
        yield


@mutation("a datagram is taken once")
def hear_a_datagram_twice() -> Iterator[None]:
    with replaced(Window, "take", lambda window, number: True):
        yield


@mutation("numbers of datagrams stay taken when a path is made again")
def forget_the_seals_of_a_path() -> Iterator[None]:
    with replaced(ControlChannel, "_keep_seals", nothing):
        yield


@mutation("a process speaks for its own QPs only")
def let_any_process_speak_for_a_qp() -> Iterator[None]:
    with rewritten(Driver, "_hear", ("path.link not in [mine.link for mine in connection.paths]", "False")):
        yield


@mutation("of what a peer says only the newest waits, behind what happened here")
def read_all_that_a_peer_says_in_turn() -> Iterator[None]:
    with rewritten(
        Driver,
        "_hear",
        (
            "    messages = self._mail.get(connection)\n",
            "    self.later(connection, self._read, connection, {said.message.about: said})\n"
            "    return\n"
            "    messages = self._mail.get(connection)\n",
        ),
    ):
        yield


@mutation("a deadline is put off by nothing that is said")
def put_off_deadlines_by_what_is_said() -> Iterator[None]:
    with rewritten(
        Driver,
        "_timeouts",
        (
            "        messages = self._mail.pop(connection, None)\n",
            "        if connection in self._mail:\n"
            "            connection.timer_ns = None\n"
            "            self.schedule(connection, now + LATER_NS)\n"
            "            continue\n"
            "        messages = self._mail.pop(connection, None)\n",
        ),
    ):
        yield


@mutation("no more messages of a peer are kept than it can mean")
def keep_all_that_a_peer_invents() -> Iterator[None]:
    with mock.patch.object(driver, "MOST_UNREAD", 1 << 30):
        yield


@mutation("a part of what has arrived is read at a time, and then it is looked what else there is")
def read_a_flood_to_its_end() -> Iterator[None]:
    with mock.patch.object(control_channel, "READ_AT_ONCE", 1 << 20):
        yield


@mutation("a run of the driver ends, though others say always more")
def run_as_long_as_others_speak() -> Iterator[None]:
    with mock.patch.object(driver, "RUN_NS", 1 << 62):
        yield


@mutation("a look at a NIC that was not answered says nothing of its ports")
def believe_a_look_that_failed() -> Iterator[None]:
    with rewritten(NicEvents, "_ports_seen", ("if nic.seen_ns < since_ns:", "if False:")):
        yield


@mutation("who did not hear a BYE is told the same again")
def forget_what_a_bye_said() -> Iterator[None]:
    with replaced(Driver, "life_ended", nothing):
        yield


@mutation("a QP that was given up is not paired again")
def pair_again_what_was_given_up() -> Iterator[None]:
    edit = ("if c.status is Status.FAILED:  # it was given up", "if False:  # it was given up")
    with rewritten(Pairing, "_start_if_ready", edit):
        yield


@mutation("where something of ours failed, nothing that nobody does any more is due, again and again")
def ask_for_keys_without_a_protocol() -> Iterator[None]:
    with rewritten(
        Connection,
        "_schedule",
        (
            "if p is not None and (due := self.keys.due_ns) is not None:",
            "if (due := self.keys.due_ns) is not None:",
        ),
    ):
        yield


@mutation("a default QP that its NIC does not end is flushed by us")
def take_a_refused_err_for_an_end() -> Iterator[None]:
    with rewritten(Ending, "deliver", ("0 in c.fence.unstopped", "False")):
        yield


@mutation("an own error ends a QP, also where a SWITCH has begun before that was heard of")
def leave_an_own_error_to_a_switch() -> Iterator[None]:
    with rewritten(Connection, "core_event", (" or not self.core.flushes_itself", "")):
        yield


@mutation("looks that grew sparse are dense again when something happens")
def let_looks_stay_sparse() -> Iterator[None]:
    with replaced(Looks, "expect", nothing):
        yield


@mutation(
    "what goes on in a QP is looked for at once, however long another one has been waiting in the same CQs"
)
def look_seldom_for_what_goes_on() -> Iterator[None]:
    with rewritten(Connection, "execute", ("self.driver.looks.expect()", "pass")):
        yield


@mutation("what a NIC flushes is looked for at once, however long it took to bring the QP to ERR")
def look_seldom_for_a_flush() -> Iterator[None]:
    with rewritten(Fence, "_post_marker", ("self._c.driver.looks.expect()", "pass")):
        yield


@mutation("a NIC that refuses ERR for good gets no marker: it would be sent")
def post_a_marker_where_err_was_refused() -> Iterator[None]:
    with rewritten(Fence, "_erred", ("if err == 0 and not is_gone", "if not is_gone")):
        yield


@mutation("a SWITCH does not go on when its fence has found the application's own error")
def go_on_behind_an_own_error_in_a_fence() -> Iterator[None]:
    with rewritten(Connection, "_fenced", ("if self.core.ending:", "if False:")):
        yield


@mutation("where a SWITCH goes on behind an own error, what the peer's count proves is flushed all the same")
def succeed_behind_an_own_error_in_a_fence() -> Iterator[None]:
    choose: Any = getattr(_core, "set_mutant", nothing)
    choose("succeed_behind_an_error")  # in the data path that has mutants; one of the two alone is harmless
    try:
        with rewritten(Connection, "_fenced", ("if self.core.ending:", "if False:")):
            yield
    finally:
        choose(None)


# ---- what is said of it ---------------------------------------------------------------------------------------------


@mutation("lines that others cause are written once a second")
def write_a_line_each_time() -> Iterator[None]:
    with rewritten(Seldom, "_log", ("if now_ns < self._next_ns.get(text, now_ns):", "if False:")):
        yield


@mutation("a peer is not blamed for what cannot be read")
def blame_a_peer_that_cannot_be_read() -> Iterator[None]:
    with rewritten(Pairing, "_publish", ("self.driver.directory.away or NO_ENTRY", "NO_ENTRY")):
        yield


@mutation("a backup that was in use is stopped with the QP, also when it has begun another life")
def stop_only_what_is_in_use() -> Iterator[None]:
    with rewritten(Ending, "leave_behind", ("reached = self._c.core.carried", "reached = set()")):
        yield


@mutation(
    "a QP that was away is ended by us when its peer has left it at home: its backups are to be stopped"
)
def let_go_of_what_was_away() -> Iterator[None]:
    with (
        rewritten(Connection, "_let_go", ("self.core.flushes_itself", "self.core.is_plain")),
        rewritten(Connection, "set_status", ("self.core.flushes_itself", "self.core.is_plain")),
    ):
        yield


@mutation("a default QP that carries nothing is stopped before anything is flushed")
def flush_before_the_default_qp_is_stopped() -> Iterator[None]:
    with rewritten(
        Ending,
        "begin",
        ("not p.pairs[0].fenced or c.rebuild.is_under_way(0)", "(p.pairs[0].used and not p.pairs[0].fenced)"),
    ):
        yield


@mutation("a QP that was away, and that we gave up at home, is ended by us when it breaks there")
def leave_what_we_gave_up_to_nobody() -> Iterator[None]:
    edit = ("(Status.UNPROTECTED, Status.FAILED)", "(Status.UNPROTECTED,)")
    with rewritten(Ending, "is_left_alone_on", edit):
        yield


@mutation("an error that was not heard of ends a QP that the peer has left")
def hear_of_no_error_behind_a_farewell() -> Iterator[None]:
    with rewritten(Connection, "catch_up", ("if self.ending.is_left_alone_on(k) and", "if False and")):
        yield


@mutation("no flush is shown amid a verb that leaves RTS before the backups that were in use are stopped")
def show_flushes_amid_the_verb() -> Iterator[None]:
    with rewritten(Connection, "set_status", ("waits or bool(self.ending.behind)", "waits")):
        yield


@mutation("errors do not wait for a default QP that carries nothing and whose NIC hangs")
def wait_for_a_spare_default_qp() -> Iterator[None]:
    with rewritten(Ending, "begin", ("{0} if self._spare else ()", "()")):
        yield


@mutation("what a backup says behind the RESET of an end proves nothing of what was posted before")
def believe_a_flush_behind_a_reset() -> Iterator[None]:
    with rewritten(Ending, "stop_backups", ("c.core.forget_pair(k)", "pass")):
        yield


@mutation("and are not shown before that had its time, because another NIC refuses")
def leave_a_spare_default_qp_at_once() -> Iterator[None]:
    with rewritten(Fence, "tick", ("now_ns >= self._spare_until_ns", "True")):
        yield


@mutation("nor for one whose pairing is over")
def forget_a_spare_default_qp_with_its_pairing() -> Iterator[None]:
    with rewritten(Ending, "begin", ("{0} if self._spare", "{0} if p is not None and self._spare")):
        yield


@mutation("but for one that has begun anew since")
def take_a_new_life_for_spare() -> Iterator[None]:
    with rewritten(Ending, "begin_anew", ("self._spare = False", "pass")):
        yield


@mutation("a backup that refuses to be stopped is asked again")
def ask_a_backup_to_stop_once() -> Iterator[None]:
    with rewritten(Ending, "stop_again", ("self._refused if not self._c.closed else {}", "{}")):
        yield


@mutation("what a NIC has answered is heeded")
def take_a_refusal_for_a_stop() -> Iterator[None]:
    with rewritten(Ending, "_stopped", ("if err and", "if False and")):
        yield


@mutation("errors wait for a backup that refused to be stopped")
def let_go_of_a_backup_that_refused() -> Iterator[None]:
    with rewritten(Ending, "let_go", ("not reset and bool(self.unstopped.intersection(stopped))", "False")):
        yield


@mutation("a NIC that refuses is not asked for longer than it may take")
def ask_a_slow_nic_for_ever() -> Iterator[None]:
    edit = ("asks_again(time.monotonic() < until)", "asks_again(True)")
    with rewritten(Runtime, "_stop_backups", edit):
        yield


@mutation("a backup that was not stopped once may have been stopped since")
def remember_a_refusal_for_good() -> Iterator[None]:
    with rewritten(Ending, "_stopped", ("self.unstopped.discard(k)", "pass")):
        yield


@mutation("behind a RESET that is refused the application is told all")
def keep_errors_behind_a_refused_reset() -> Iterator[None]:
    with rewritten(Ending, "let_go", ("not reset and bool", "bool")):
        yield


@mutation("a default QP that carries nothing carries nothing where RESET is refused")
def forget_a_spare_default_qp_before_reset() -> Iterator[None]:
    edit = (
        "self.behind.difference_update(stopped)",
        "self.behind.difference_update(stopped)\n    self._spare = False",
    )
    with rewritten(Ending, "let_go", edit):
        yield


@mutation("an error that was withheld as SQD began ends a QP whose backup was not stopped")
def forget_what_was_withheld_in_sqd() -> Iterator[None]:
    with rewritten(Ending, "let_go", ("c.core.guarded and withheld is not None", "False")):
        yield


@mutation("what ends in the wait of RESET ends with it")
def end_a_new_life() -> Iterator[None]:
    with rewritten(Ending, "begin_anew", ("if was_ending:", "if False:")):
        yield


@mutation("where another backup's NIC refuses for good, one that refused once is asked again")
def ask_all_nics_once_where_one_refuses() -> Iterator[None]:
    with rewritten(Ending, "asks_again", ("again |= not nic.refuses", "again = False")):
        yield


@mutation("a NIC that refuses is asked again and again by one verb, not by each")
def ask_a_nic_that_refuses_for_each_qp() -> Iterator[None]:
    with rewritten(Ending, "asks_again", ("nic.refuses = True", "pass")):
        yield


@mutation("a backup that is in RESET already counts as stopped")
def bring_what_is_in_reset_to_err() -> Iterator[None]:
    with (
        rewritten(Ending, "stop_again", ("if err == errno.EINVAL", "if False")),
        rewritten(Ending, "asks_again", ("err == errno.EINVAL and", "False and")),
    ):
        yield


@mutation("a command of a life that is over reaches none of the next, however late its NIC is at it")
def leave_a_command_to_the_next_life() -> Iterator[None]:
    with rewritten(Runtime, "qp_reset", ("was_ending or begun", "was_ending")):
        yield


@mutation("nor one that ends before anybody looks behind the verb")
def look_for_commands_behind_the_verb_alone() -> Iterator[None]:
    with rewritten(Runtime, "qp_reset", ("shadow.commands_left > cancelled or ", "")):
        yield


@mutation("nor does an event of it that waited for its turn")
def keep_a_former_lifes_backlog() -> Iterator[None]:
    with rewritten(Runtime, "qp_reset", ("self.driver.drop_backlog(connection)", "pass")):
        yield


@mutation("what a slow NIC takes is not the time that one which refuses is asked for")
def take_the_time_of_a_slow_nic_for_refusals() -> Iterator[None]:
    with rewritten(Runtime, "_stop_backups", ("until = 0.0", "until = time.monotonic() + REFUSING_S")):
        yield
