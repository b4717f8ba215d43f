# SPDX-License-Identifier: BSD-3-Clause
"""Bugs to put into the data path itself: each must be found by the checkers, or they prove nothing.

A mutant replaces pieces of the sources that `_core` is compiled from. build_mutants.py puts all of them into one build, to
be switched on one at a time.
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
        q.fence_active = q.fence_wanted = q.key_wait = q.blocked = 0
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
    value(QP, "def trim", "lost <= seq < q.shown_end and rec.wr.opcode == IBV_WR_RDMA_WRITE", "False"),
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

# ---- the fence of a SWITCH ----------------------------------------------------------------------------------------

mutant(
    "forget_the_marker",
    "an acknowledged unsignaled tail never flushes: the marker does",
    value(QP, "def post_marker", "self.post_own_send(k, KIND_MARKER)", "0"),
    value(QP, "def post_marker", "self.post_own_recv(k, KIND_MARKER)", "0"),
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
        if self.q.fence_active and not self.q.send_open:
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
    value(JOURNAL, "cdef inline void pump_send", "q.fence_wanted", "False"),
)

mutant(
    "hand_over_all_at_once",
    "the NIC is handed no more at a time than the application asked room for",
    value(JOURNAL, "cdef inline int hand_over", "q.wired - q.head >= q.send_cap", "False"),
)

mutant(
    "put_the_fence_behind_all_that_waits",
    "what is posted behind a fence that waits for room is for the next pair",
    lines(QP, "def move_begin", "q.last_signaled = q.fence_upto = end", "q.last_signaled = end"),
    lines(
        DISPATCH,
        "cdef inline int qp_post_send",
        "q.last_signaled = q.fence_upto = q.tail",
        "q.last_signaled = q.tail",
    ),
)

mutant(
    "a_fence_write_for_each_move",
    "one fence WRITE of ours at a time: there is room for no more",
    lines(
        JOURNAL,
        "cdef inline int post_own_fence",
        """
        if q.pairs[q.send_pair].own_fence:
            return EAGAIN
        """,
    ),
    value(QP, "def post_fence_write", "q.wired != send_end(q) or q.pairs[q.send_pair].own_fence", "q.wired != send_end(q)"),
)
