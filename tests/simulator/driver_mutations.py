# SPDX-License-Identifier: BSD-3-Clause
"""Bugs to put into the driver's part, one connection's: each must be found by the checkers, or they prove nothing.

As mutations.py, on the classes of shiftverbs/failover. `MUTATIONS` maps a name to (what it breaks, the patch).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

from simulator.patching import Patch, mutations_of, replaced, rewritten

from shiftverbs.failover.qp import watchdog
from shiftverbs.failover.qp.connection import Connection
from shiftverbs.failover.qp.drain import Fence
from shiftverbs.failover.qp.early_errors import EarlyErrors
from shiftverbs.failover.qp.ending import Ending
from shiftverbs.failover.qp.key_wait import KeyWait
from shiftverbs.failover.qp.pairing import Pairing
from shiftverbs.failover.runtime import Runtime
from shiftverbs.protocol import events as ev
from shiftverbs.shadows.mr import ShadowMR

MUTATIONS: dict[str, tuple[str, Patch]] = {}
mutation = mutations_of(MUTATIONS)


# ---- the fence of a SWITCH ------------------------------------------------------------------------------------------


@mutation("the peer of a failure fences too: late packets must not consume receives")
def skip_the_peers_fence() -> Iterator[None]:
    original = Connection._do_fence

    def fence(connection: Connection, action: ev.Fence) -> None:
        protocol = connection.protocol
        if protocol is not None and not protocol.initiator:
            connection._fenced(action.number)
        else:
            original(connection, action)

    with replaced(Connection, "_do_fence", fence):
        yield


@mutation("rx is final only when both queues are drained")
def read_the_counter_before_draining() -> Iterator[None]:
    original = Connection._do_fence

    def fence(connection: Any, action: ev.Fence) -> None:
        connection.counted = connection.core.counters()
        original(connection, action)

    with (
        replaced(Connection, "_do_fence", fence),
        rewritten(Connection, "_fenced", ("self.core.counters()", "self.counted")),
    ):
        yield


@mutation("what the default QP completed before its NIC died is delivered")
def forget_the_dead_nics_cq() -> Iterator[None]:
    with rewritten(
        Fence,
        "_erred",
        (
            "return\n    c.drain(k)",
            "return\n    c.core.forget_pair(k) if is_gone else c.drain(k)",
        ),
    ):
        yield


@mutation("where the peer's NIC died, its counter says less than was executed")
def trust_the_counter_of_a_dead_nic() -> Iterator[None]:
    with rewritten(Connection, "_fenced", ("unsafe, lost, if_lost", "unsafe, False, if_lost")):
        yield


# ---- receives, completions, MOVE ------------------------------------------------------------------------------------


@mutation("READY and MOVED wait for memory that is still being registered")
def say_ready_while_receives_wait() -> Iterator[None]:
    with rewritten(KeyWait, "posted", ("return None", "return ev.ReceivesPosted(action.number)")):
        yield


@mutation("where receives were closed, none are posted when their memory comes")
def post_receives_where_they_were_closed() -> Iterator[None]:
    with rewritten(Connection, "_close_recv", ("self.key_wait.posting = None", "pass")):
        yield


@mutation("behind a fence the wait for keys begins anew")
def count_a_wait_for_keys_from_the_pair_before() -> Iterator[None]:
    with rewritten(Connection, "_do_fence", ("self.key_wait.since_ns = None", "pass")):
        yield


@mutation("MOVED is answered when the last message was polled, not before")
def moved_before_the_last_message() -> Iterator[None]:
    def await_rx(connection: Connection, action: ev.AwaitRx) -> None:
        if action.rx is not None:
            connection.later(ev.RxReached())

    with replaced(Connection, "_await_rx", await_rx):
        yield


@mutation("withheld WRs wait for the fence's completion")
def release_before_the_drain() -> Iterator[None]:
    with rewritten(
        Connection,
        "_run_inbox",
        (
            "event = self._inbox.pop(0)",
            "event = self._inbox.pop(0)\n"
            "            if isinstance(event, ev.FenceWrPosted):\n"
            "                self._inbox.append(ev.FenceWrDone(self.core.counters()[1]))",
        ),
    ):
        yield


@mutation("completions taken ahead of the application wait for it")
def drop_the_wc_buffer() -> Iterator[None]:
    original = Connection._open_send

    def open_send(connection: Connection, action: ev.OpenSend) -> None:
        for cq in {connection.core.send_cq, connection.core.recv_cq}:
            if cq.buffered:
                cq.poll(cq.buffered)
        original(connection, action)

    with replaced(Connection, "_open_send", open_send):
        yield


# ---- an error that was shown before protection ----------------------------------------------------------------------


@mutation("an error that was shown before protection is the QP's end, though the peer fails over")
def go_on_behind_an_error_that_was_shown() -> Iterator[None]:
    with (
        rewritten(Connection, "_fenced", ("if failed and self.status is Status.PAIRING:", "if False:")),
        rewritten(Ending, "begin", ("FLUSHED if c.core.shown_error else first", "first")),
    ):
        yield


@mutation("a QP whose application has seen an error is not PROTECTED, though ARM is through")
def protect_what_has_failed() -> Iterator[None]:
    with rewritten(
        Connection, "_set_status", ("if action.status is Status.PROTECTED and failed:", "if False:")
    ):
        yield


# ---- the end --------------------------------------------------------------------------------------------------------


@mutation("no WR is flushed to the application before every pair has stopped")
def end_without_a_fence() -> Iterator[None]:
    with rewritten(
        Ending,
        "begin",
        (
            "    c.fence = Fence(c, pairs, deadline_ns, self.deliver, self._hung, spare)\n    c.fence.begin()\n",
            "    for k in sorted(pairs):\n"
            "        if not c.nic(k).dead:\n"
            "            c.driver.command(c, k, c.nic(k).verbs.ModifySteps().add(state=QpState.ERR), lambda *_: None)\n"
            "    self.deliver()\n",
        ),
    ):
        yield


@mutation("what a NIC completed before the end is delivered as it completed")
def end_without_a_drain() -> Iterator[None]:
    with rewritten(
        Ending,
        "begin",
        (
            "    c.fence = Fence(",
            "    for k in range(c.n_pairs):\n        c.core.forget_pair(k)\n    c.fence = Fence(",
        ),
    ):
        yield


@mutation("a QP is in RESET when no backup's QP can touch its memory any more")
def reset_while_backups_are_at_work() -> Iterator[None]:
    edit = ("self._await_stop(connection.nic(k), connection.shadow.handle(k))", "pass")
    with rewritten(Runtime, "_stop_backups", edit):
        yield


@mutation("memory is deregistered when no backup's NIC has it any more")
def deregister_beside_the_backups() -> Iterator[None]:
    with replaced(ShadowMR, "wait", lambda mr: None):
        yield


# ---- before it is protected -----------------------------------------------------------------------------------------


@mutation("what fails before a QP is protected waits for that")
def show_errors_before_protection() -> Iterator[None]:
    with replaced(EarlyErrors, "begin", lambda early: None):
        yield


@mutation("what failed before a QP was protected is healed when it is")
def forget_what_failed_before_protection() -> Iterator[None]:
    with rewritten(EarlyErrors, "protected", ("if had_failed:", "if False:")):
        yield


@mutation("errors wait no longer than for a silent peer")
def wait_for_protection_for_ever() -> Iterator[None]:
    with replaced(EarlyErrors, "failed", lambda early: None):
        yield


@mutation("a QP that the application has ended is not connected")
def pair_what_the_application_has_ended() -> Iterator[None]:
    connected = ("not shadow.is_connected", "'RTR' not in shadow.transitions")
    with rewritten(Runtime, "_advance", connected), rewritten(Pairing, "advance", connected):
        yield


@mutation("a new life of a QP begins before it is protected as the first one did")
def remember_that_a_life_was_over() -> Iterator[None]:
    with rewritten(Ending, "begin_anew", ("self._c.early.begin_anew()", "pass")):
        yield


@mutation("old work on a path that counts as dead says little while a peer goes on")
def leave_old_work_for_who_is_heard_first() -> Iterator[None]:
    with mock.patch.object(watchdog, "ONLY_HERE_NS", 0):
        yield
