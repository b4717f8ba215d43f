# SPDX-License-Identifier: BSD-3-Clause
"""Bugs to put into the data path itself: each must be found by the checkers, or they prove nothing.

A mutant replaces pieces of the sources that `_core` is compiled from. build_mutants.py puts all of them into one build,
to be switched on one at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

QP, DISPATCH = "native/core/qp.pxi", "native/core/dispatch.pxd"
JOURNAL, REPLAY = "native/core/journal.pxd", "native/core/replay.pxd"


@dataclass(frozen=True)
class Edit:
    """One piece of a source, which is there once, and what is in its place.

    file: below shiftverbs/; function: how the line begins that defines the function where it is, up to its arguments;
    whole_lines: `old` and `new` are statements, to be indented as is fit, else expressions.
    """

    file: str
    function: str
    old: str
    new: str
    whole_lines: bool = False


@dataclass(frozen=True)
class Mutant:
    """A bug: its name, the duty that it drops, what is to be changed for it."""

    name: str
    duty: str
    edits: tuple[Edit, ...]


MUTANTS: list[Mutant] = []


def mutant(name: str, duty: str, *edits: Edit) -> None:
    """Register a mutant; `duty` says what it does not do any more."""
    MUTANTS.append(Mutant(name, duty, edits))


def value(file: str, function: str, old: str, new: str) -> Edit:
    """An expression in place of another one."""
    return Edit(file, function, old, new)


def lines(file: str, function: str, old: str, new: str = "") -> Edit:
    """Statements in place of others."""
    return Edit(file, function, old, new, whole_lines=True)


# ---- what is replayed ---------------------------------------------------------------------------------------------

mutant(
    "do_not_trim",
    "what the peer received is not sent again",
    lines(
        QP,
        "def trim",
        "end = q.head",
        """
        q.wired = q.head
        q.wired_ts = q.acked_ts
        q.withheld_send_end = q.withheld_recv_end = 0
        q.fence_wr_active = q.fence_wr_wanted = q.key_wait = q.blocked = 0
        return
        """,
    ),
)

mutant(
    "trim_one_too_many",
    "what the peer did not receive is sent again",
    lines(
        QP,
        "def trim",
        "end = q.head",
        """
        peer_rx = min(peer_rx + 1, q.wired_ts)
        end = q.head
        """,
    ),
)

mutant(
    "prove_a_read_by_the_counter",
    "a READ is never proven by the counter",
    value(QP, "def trim", "fenced or seq < q.shown_end", "True"),
)

mutant(
    "replay_proven_writes",
    "replay starts behind the last proven message, not at the last completed WR",
    value(
        QP,
        "def trim",
        "not (rec.wr.opcode == IBV_WR_RDMA_READ or opcode_in(rec.wr.opcode, atomic_opcodes()))",
        "rec.state & REC_TWO_SIDED",
    ),
)

mutant(
    "let_an_old_message_cover_a_write",
    "a message that is sent again is followed by the WRITEs that were behind it",
    value(QP, "def trim", "covered and rec.wr.opcode == IBV_WR_RDMA_WRITE", "False"),
)

mutant(
    "let_an_old_message_cover_a_write_the_next_time",
    "what was to be sent again, and was not, is no more complete than it was",
    value(QP, "def trim", "seq >= told and not rec.state & REC_PROVEN", "False"),
)

mutant(
    "forget_inline_copies",
    "inline bytes are the journal's own",
    value(
        JOURNAL,
        "cdef inline int send_append",
        "flags & IBV_SEND_INLINE and opcode_in(wr.opcode, payload_out_opcodes())",
        "False",
    ),
    value(
        JOURNAL,
        "cdef inline bint double_sends",
        "rec.app_flags & IBV_SEND_INLINE and opcode_in(rec.wr.opcode, payload_out_opcodes())",
        "False",
    ),
)

mutant(
    "forget_what_a_nic_has_shown",
    "the first error of a send queue says that all before it is complete",
    value(
        DISPATCH,
        "cdef inline void note_error",
        "kind != KIND_ARM and k == q.send_pair and pair.sending",
        "False",
    ),
)

mutant(
    "trust_a_pair_that_was_handed_nothing",
    "an error of our own WR on a pair that was handed nothing says nothing of what others were handed",
    value(DISPATCH, "cdef inline void note_error", "pair.sending", "True"),
)

# ---- what must not be replayed ------------------------------------------------------------------------------------

mutant(
    "replay_atomics",
    "an atomic that hardware has is never replayed",
    value(QP, "def unsafe_reason", "opcode_in(rec.wr.opcode, atomic_opcodes())", "False"),
)

mutant(
    "send_again_what_a_read_overwrote",
    "what a READ may have overwritten is not sent again",
    value(REPLAY, "cdef inline Seen replay_seen", "seen.how", "0"),
)

mutant(
    "repeat_a_read_behind_a_fence",
    "a READ is not repeated behind a WRITE that a fence kept behind it",
    lines(REPLAY, "cdef inline Seen behind_fence", "seen.how = SEEN_BEHIND_FENCE", "seen.how = SEEN_NOT"),
)

mutant(
    "fence_only_the_wr_that_carries_it",
    "a fence orders all behind it, not only the WR that carries it",
    value(
        REPLAY,
        "cdef inline Seen behind_fence",
        "fence_seen and has_payload(rec)",
        "fence_seen and rec.app_flags & IBV_SEND_FENCE != 0 and has_payload(rec)",
    ),
)

mutant(
    "trust_a_dead_nic_to_have_told",
    "a dead NIC may have taken along the completion that would have told",
    value(
        QP,
        "def unsafe_reason",
        "replay_seen(&self.q, cqes_lost, receipts_lost)",
        "replay_seen(&self.q, False, receipts_lost)",
    ),
)

# ---- what the application sees ------------------------------------------------------------------------------------

mutant(
    "complete_a_trimmed_wr_twice",
    "a trimmed WR completes once",
    lines(
        JOURNAL,
        "cdef inline void after_retire",
        "push_send_wc(q, rec, IBV_WC_SUCCESS, 0)",
        """
        push_send_wc(q, rec, IBV_WC_SUCCESS, 0)
        push_send_wc(q, rec, IBV_WC_SUCCESS, 0)
        """,
    ),
)

mutant(
    "swallow_completions_of_trimmed_wrs",
    "a trimmed WR completes at all",
    value(JOURNAL, "cdef inline void after_retire", "rec.state & REC_SIGNALED", "False"),
)

mutant(
    "swallow_what_was_withheld",
    "what was withheld is told when nothing is withheld any more",
    value(
        DISPATCH,
        "cdef inline void give_withheld",
        "q.closed or q.ending or not is_plain(q) or not pair.first_status",
        "True",
    ),
)

mutant(
    "flush_at_home_what_was_away",
    "an own error of a QP that was away is followed by flushes when its backups are stopped",
    value(DISPATCH, "cdef inline void end_by_own_error", "flushes_itself(q)", "is_plain(q)"),
)

mutant(
    "forget_at_reset_who_was_in_use",
    "who was in use is known in another life of that pair",
    lines(QP, "def pair_reset", "pair.carried = carried"),
)

# ---- the fence of a SWITCH ----------------------------------------------------------------------------------------

mutant(
    "forget_the_marker",
    "an acknowledged unsignaled tail never flushes: the marker does",
    value(QP, "def post_marker", "self.post_own_send(k, KIND_MARKER)", "0"),
    value(QP, "def post_marker", "self.post_own_recv(k, KIND_MARKER)", "0"),
)

mutant(
    "post_markers_that_lie_there",
    "there is room for one marker in each queue: one that lies there is not posted again",
    value(QP, "def post_marker", "pair.sq_marker != journal.MARKER_POSTED", "True"),
    value(QP, "def post_marker", "pair.rq_marker != journal.MARKER_POSTED", "True"),
)

# ---- MOVE ---------------------------------------------------------------------------------------------------------

mutant(
    "lose_the_withheld_queue",
    "what MOVE withheld is still there after a second failure",
    lines(
        QP,
        "def close_send",
        "self.q.send_open = 0",
        """
        if self.q.fence_wr_active and not self.q.send_open:
            journal.send_cut(&self.q, self.q.wired)
        self.q.send_open = 0
        """,
    ),
)

mutant(
    "let_a_message_overtake_a_receive",
    "what may tell the peer of a receive waits until that is posted",
    value(JOURNAL, "cdef inline int hand_over", "q.recv_withheld and q.send_limit < end", "False"),
)

mutant(
    "fence_only_what_is_posted_next",
    "a MOVE that begins while sends wait for the NIC's room makes the last of them its fence",
    value(JOURNAL, "cdef inline void pump_send", "q.fence_wr_wanted", "False"),
)

mutant(
    "wait_for_room_that_nobody_tells_of",
    "a NIC without room is waited for only if something that it has tells of its end",
    value(JOURNAL, "cdef inline int hand_over", "completion_due(q) or not q.guarded", "True"),
)

mutant(
    "hand_over_all_at_once",
    "the NIC is handed no more at a time than the application asked room for",
    value(JOURNAL, "cdef inline int hand_over", "q.wired - q.head >= q.send_cap", "False"),
)

mutant(
    "put_the_fence_behind_all_that_waits",
    "what is posted behind a fence that waits for room is for the next pair",
    lines(QP, "def move_begin", "q.last_signaled = q.fence_wr_upto = end", "q.last_signaled = end"),
    lines(
        DISPATCH,
        "cdef inline int qp_post_send",
        "q.last_signaled = q.fence_wr_upto = q.tail",
        "q.last_signaled = q.tail",
    ),
)

mutant(
    "a_fence_write_for_each_move",
    "one fence WRITE of ours at a time: there is room for no more",
    lines(
        JOURNAL,
        "cdef inline int post_own_fence_write",
        """
        if q.pairs[q.send_pair].own_fence_write:
            return EAGAIN
        """,
    ),
    value(
        QP,
        "def post_fence_write",
        "q.wired != send_end(q) or q.pairs[q.send_pair].own_fence_write",
        "q.wired != send_end(q)",
    ),
)

mutant(
    "wait_in_a_move_for_what_lacks_a_key",
    "a MOVE leaves what is withheld for a key to the next pair",
    value(
        JOURNAL,
        "cdef inline uint64_t send_end",
        "q.wired < q.tail and (q.key_wait or (q.recv_withheld and q.wired >= q.send_limit))",
        "False",
    ),
)

mutant(
    "take_an_old_fence_write_for_the_wr",
    "a WR that is the fence ends it, not a WRITE of ours ahead of it",
    value(DISPATCH, "cdef inline int own_wc", "q.fence_wr_seq == seq == q.wired", "q.fence_wr_seq == seq"),
)

mutant(
    "forget_a_fence_write_that_had_to_wait",
    "a fence WRITE that waited for the one before is posted when that has completed",
    lines(
        DISPATCH,
        "cdef inline int own_wc",
        """
        if q.fence_wr_wanted:
            last_is_fence_wr(q)
        """,
    ),
)

mutant(
    "drop_a_fence_write_that_finds_no_room",
    "a fence WRITE that finds WRs waiting for room is posted behind them",
    lines(QP, "def post_fence_write", "q.own_fence_write = 1"),
)

# ---- the end of a QP ----------------------------------------------------------------------------------------------

mutant(
    "go_on_with_one_half_behind_an_own_error",
    "the application's own error ends both halves of a QP that is not wholly at home",
    lines(
        DISPATCH,
        "cdef inline void end_by_own_error",
        "begin_end(q)",
        """
        q.guarded = 0
        q.pairs[0].fencing = q.pairs[q.send_pair].fencing = q.pairs[q.recv_pair].fencing = 0
        q.pairs[0].fence_again = q.pairs[q.send_pair].fence_again = q.pairs[q.recv_pair].fence_again = 0
        q.fence_wr_active = q.fence_wr_wanted = q.key_wait = 0
        if not q.send_open:
            q.send_open = 1
            pump_send(q)
        if not q.recv_open:
            q.recv_open = pump_recv(q) == 0
        """,
    ),
)

mutant(
    "show_errors_before_the_end",
    "while a QP ends no error is shown before every pair has stopped",
    lines(
        DISPATCH,
        "cdef inline bint withhold",
        """
        if q.ending:
            if in_use(q, k, recv, seq) and not may_be_path_error(wc.status):
                keep(&q.kept_recv if recv else &q.kept_send, seq, wc)
            fenced(q, k, recv)
            return True
        """,
        """
        if q.ending:
            fenced(q, k, recv)
            return not in_use(q, k, recv, seq)
        """,
    ),
)

mutant(
    "forget_an_own_error_in_an_end",
    "a send whose NIC says why it failed, while its QP ends, has that status when all errors are given",
    value(JOURNAL, "cdef inline void abort_sends", "q.kept_send.seq == q.head + 1", "False"),
)

mutant(
    "forget_an_own_error_of_a_receive_in_an_end",
    "a receive whose NIC says why it failed, while its QP ends, has that status when all errors are given",
    value(JOURNAL, "cdef inline void abort_recvs", "q.kept_recv.seq == q.rhead + 1", "False"),
)

mutant(
    "forget_the_outstanding_receives",
    "READY is said after the receives are posted",
    lines(
        QP,
        "def open_recv",
        "receive_on(&self.q, k)",
        """
        receive_on(&self.q, k)
        pair.recv_upto = self.q.rtail
        """,
    ),
)

mutant(
    "open_the_gate_in_an_end",
    "a MOVE that is called off hands nothing over once the QP has begun to end",
    value(QP, "def move_cancel", "not self.q.ending", "True"),
)

mutant(
    "give_a_qp_back_that_still_works",
    "what is posted behind the end is flushed by us until the default QP has stopped",
    lines(
        QP,
        "def abort",
        """
        if still_ending:
            return
        """,
    ),
)

mutant(
    "flush_what_was_complete",
    "what was complete before the first error gets no error at the end",
    value(JOURNAL, "cdef inline void abort_sends", "q.head < q.shown_end", "False"),
)

mutant(
    "tell_nobody_of_a_late_post",
    "who posts behind a peer that left in a MOVE is told so",
    value(DISPATCH, "cdef inline int qp_post_send", "q.ending or q.ends_at_post", "q.ending"),
)

mutant(
    "show_a_later_error_first",
    "errors that were withheld come before those behind them, once nothing is withheld",
    lines(
        DISPATCH,
        "cdef inline bint withhold",
        """
        if recv:
            abort_recvs(q, min(seq, q.withheld_recv_end))
        else:
            abort_sends(q, min(seq, q.withheld_send_end), before.status, before.vendor_err)
        """,
    ),
)

mutant(
    "post_to_a_qp_in_reset",
    "what waits for room is not handed to a QP that was moved to RESET",
    lines(
        QP,
        "def reset_journal",
        "q.send_open = 0  # what waited for room is forgotten too: a QP in RESET would refuse it",
    ),
    # And what is refused there is heard of in the next life, which hides that.
    lines(
        QP,
        "def reset_journal",
        "q.aborted = q.shown_error = q.sends_failed = q.refused = 0",
        "q.aborted = q.shown_error = q.sends_failed = 0",
    ),
    lines(QP, "def forget_events", "forget_events(self.q.shared, self.q.owner)"),
)

mutant(
    "keep_what_nobody_has_polled",
    "RESET takes what was told and nobody has polled",
    lines(QP, "cdef void take_unpolled", "cq_clean(q.scq, q.qp_num)"),
    lines(QP, "cdef void take_unpolled", "cq_clean(q.rcq, q.qp_num)"),
)

mutant(
    "keep_what_a_destroyed_qp_has_completed",
    "a QP that is closed takes along what nobody has polled",
    lines(QP, "def destroyed", "self.take_unpolled()"),
)

mutant(
    "tell_what_comes_of_a_destroyed_qp",
    "what the backups of a closed QP complete is told nobody",
    lines(QP, "def destroyed", "self.q.pairs[k].forgotten = 1", "pass"),
)

mutant(
    "forget_what_was_withheld_alone",
    "RESET takes the flushes behind what was withheld, too",
    lines(
        QP,
        "def app_touched",
        "q.forgets_sends = forgets and q.withheld_send_end > q.head",
        """
        if forgets:
            q.head = max(q.head, min(q.withheld_send_end, q.tail))
            q.wired = max(q.wired, q.head)
            q.withheld_send_end = 0
        """,
    ),
)

mutant(
    "forget_though_reset_is_refused",
    "what RESET was to take is told of where that is refused",
    lines(
        QP,
        "def app_touched",
        "q.forgets_sends = forgets and q.withheld_send_end > q.head",
        """
        if forgets and q.withheld_send_end > q.head:
            q.head = q.wired = q.tail
            q.withheld_send_end = 0
        """,
    ),
)

mutant(
    "leave_a_move_waiting_in_err",
    "ERR calls off a MOVE that waits for its fence",
    lines(
        QP,
        "def app_touched",
        "q.fence_wr_wanted = 0  # the MOVE is over: nobody would open the gate behind its fence",
    ),
)

mutant(
    "show_what_was_withheld_amid_err",
    "what was withheld at home is told when the backups that were in use have stopped",
    lines(
        QP,
        "def app_touched",
        """
        if itself:
            give_withheld(q)
        """,
        "give_withheld(q)",
    ),
)

mutant(
    "flush_what_is_proven_before_pairs_stop",
    "what is proven behind an own error is flushed when every pair has stopped",
    value(
        DISPATCH, "cdef inline int send_wc", "q.proven_end > q.head and not q.ending", "q.proven_end > q.head"
    ),
)

mutant(
    "show_flushes_of_the_other_queue_before_pairs_stop",
    "behind an own error what was withheld of the other queue is flushed when every pair has stopped",
    value(DISPATCH, "cdef inline bint withhold", "not recv or flushes_itself(q)", "True"),
    value(DISPATCH, "cdef inline bint withhold", "flushes_itself(q) or recv", "True"),
)

mutant(
    "withhold_nothing_as_err_begins",
    "as ERR begins another thread is shown no flush either, before every pair has stopped",
    value(QP, "def app_touched", "itself or self.made_in != forks", "True"),
)

mutant(
    "tell_a_send_why_a_receive_failed",
    "the error of a receive is not told of a send",
    value(DISPATCH, "cdef inline void note_error", "not recv", "True"),
)

# ---- a message that is sent again ---------------------------------------------------------------------------------

mutant(
    "forget_what_comes_again_with_a_lost_message",
    "what was complete behind a message that is sent again is looked at like what was not",
    value(
        REPLAY,
        "cdef inline bint may_go_again",
        "behind[0] and seq < q.shown_end",
        "False",
    ),
)

mutant(
    "count_a_lost_message_as_complete",
    "what is sent again because its receipt was lost is not complete any more",
    lines(
        QP,
        "def trim",
        """
        if q.shown_end > lost:
            q.shown_end = lost
        """,
    ),
)

mutant(
    "trust_a_counter_behind_lost_receipts",
    "the counter of a peer whose NIC died with receipts proves less than was executed",
    value(REPLAY, "cdef inline bint is_counted", "not receipts_lost", "True"),
)

# ---- posts that are refused ---------------------------------------------------------------------------------------

mutant(
    "take_an_own_refusal_for_the_paths",
    "a post that a healthy NIC refuses raises",
    value(
        DISPATCH,
        "cdef inline bint refused_by_path",
        "pair.first_status != 0 or pair.sq_error_seen or pair.rq_error_seen",
        "True",
    ),
)

mutant(
    "refuse_ahead_of_what_completes",
    "what is refused when it is handed over later is told when all ahead of it has completed",
    value(JOURNAL, "cdef inline void pump_send", "completion_due(q) and not device_gone(err)", "False"),
)

mutant(
    "fail_a_post_that_room_made_whole",
    "a post succeeds whose rest is handed over when room is made",
    value(
        DISPATCH,
        "cdef inline int qp_post_send",
        "post_default(q, q.wired) if q.wired < q.tail else 0",
        "post_default(q, q.wired) if q.wired < q.tail else rc",
    ),
)

mutant(
    "forget_which_wr_failed",
    "it is known which WR failed on a pair, so that one which fails on all of them ends",
    lines(
        DISPATCH,
        "cdef inline void note_error",
        "pair.failed_seq = (wc.wr_id & seq_mask()) + 1",
    ),
)

mutant(
    "forget_a_refusal",
    "a refused post is found though its event was lost",
    lines(JOURNAL, "cdef inline void post_refused", "q.refused = err"),
)

mutant(
    "keep_a_late_refusal_of_a_receive",
    "a receive that is refused when its key has come is told",
    value(QP, "def pump", "rc > 0 and self.q.recv_withheld", "False"),
)

# ---- memory keys --------------------------------------------------------------------------------------------------

mutant(
    "forget_receives_that_lack_a_key",
    "a receive that waits for a key is looked for again while sends are at home",
    value(
        QP,
        "def missing_keys",
        "self.q.rtail if to_recv else self.q.rhead",
        "self.q.rtail if k else self.q.rhead",
    ),
)

mutant(
    "forget_wrs_by_old_keys",
    "WRs that are on their way by a key that was withdrawn are counted",
    lines(QP, "def last_use", "return seq", "return 0"),
)

mutant(
    "one_rkey_too_many",
    "an rkey is asked for, however many were seen before",
    lines(
        JOURNAL,
        "cdef inline void note_rkey",
        """
        if q.seen_rkeys.live >= SEEN_RKEYS_MAX:
            map_free(&q.seen_rkeys)  # those still in use are reported once more
        """,
        """
        if q.seen_rkeys.live >= SEEN_RKEYS_MAX:
            return
        """,
    ),
)

mutant(
    "keep_seen_rkeys",
    "an rkey that was withdrawn is asked for again when it is used again",
    lines(
        QP,
        "def forget_rkey",
        """
        if rkey is None:
            map_free(&self.q.seen_rkeys)
        else:
            gone = rkey
            map_del(&self.q.seen_rkeys, gone)
        self.q.last_rkey = <uint64_t>-1
        """,
    ),
)

# ---- an answer that overtakes the ACK -----------------------------------------------------------------------------

mutant(
    "give_answers_no_room",
    "what the peer has answered takes no room in the send queue",
    value(
        JOURNAL,
        "cdef inline bint discount_answered",
        "q.crossed <= q.head or q.crossed <= q.answered",
        "True",
    ),
)

mutant(
    "forget_what_was_answered_before_a_switch",
    "what a SWITCH proved may have been answered, though some of it is sent again",
    lines(
        QP,
        "def trim",
        """
        if q.crossed < end:
            q.crossed = end  # executed, and answered perhaps, though something ahead is sent again
        """,
    ),
)

mutant(
    "count_only_messages_as_answers",
    "an answer may come that is no message",
    value(QP, "def open_recv", "self.q.crossed < self.q.wired and is_answered_elsewhere(&self.q)", "False"),
)

mutant(
    "forget_what_others_answered_before_a_switch",
    "what another QP may have answered is noted before a SWITCH takes back what was handed over",
    value(QP, "def open_recv", "is_answered_elsewhere(&self.q)", "self.q.recv_pair != self.q.send_pair"),
)

mutant(
    "forget_the_answers_of_other_qps",
    "an answer may come by another QP, over another NIC",
    value(JOURNAL, "cdef inline bint is_answered_elsewhere", "q.siblings != NULL", "False"),
)

mutant(
    "forget_the_answers_of_a_qp_that_goes",
    "what another QP may have answered is noted before that goes elsewhere or closes",
    lines(JOURNAL, "cdef inline void receive_on", "note_answers(q.siblings)"),
    lines(JOURNAL, "cdef inline void leave_siblings", "note_answers(q.siblings)"),
)

mutant(
    "hand_over_a_broken_chain",
    "a chain that is broken by a doubled ring is handed over one by one",
    lines(DISPATCH, "cdef inline int qp_post_send", "q.one_by_one |= q.tail != first + 1"),
)

mutant(
    "succeed_behind_an_error",
    "behind a send's error that was shown, each send has a flush, whatever was executed",
    lines(DISPATCH, "cdef inline int send_wc", "q.sends_failed = True"),
)

mutant(
    "forget_that_an_own_error_was_shown",
    "behind an error of its own that the application has seen all is flushed, whoever ends the QP",
    lines(
        DISPATCH,
        "cdef inline bint withhold",
        """
        if q.shown_error == 0:
            q.shown_error = wc.status  # behind it all that is left is flushed, whoever ends the QP
        """,
    ),
    lines(DISPATCH, "cdef inline int send_wc", "q.sends_failed = True"),
)
