# SPDX-License-Identifier: BSD-3-Clause
"""One connection's memory keys: it asks for those that it uses, and answers its peer's questions.

What is known of keys, here and there, is in memory_keys.py. Runs under the driver's lock.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from shiftverbs import _core
from shiftverbs.failover.services import memory_keys
from shiftverbs.failover.services.host import ProtectedQp
from shiftverbs.failover.services.memory_keys import KeyBook, KeyUser, PeerKeys, Told, is_final, push
from shiftverbs.protocol.messages import Keys, KeyState, Message, Move, MoveStep, Phase, Sync, WantKeys
from shiftverbs.protocol.state import MS

if TYPE_CHECKING:
    from shiftverbs.exchanger.records import QpRecord

# How many rkeys a question has at most. A message's body has 255 bytes.
RKEYS_AT_ONCE = 59
# A question without a final answer is asked again; seldom while nothing waits for it.
ASK_FIRST_NS, ASK_URGENT_NS, ASK_QUIET_NS = 3 * MS, 100 * MS, 1000 * MS


class KeyedQp(ProtectedQp, KeyUser, Protocol):
    """A connection that asks its peer for keys, and is asked."""

    def say(self, message: Message | WantKeys | Keys, pair: int, spread: bool = False) -> None:
        """Send to the peer over the NIC pair of `pair`; spread: over every one that may work."""


class ConnectionKeys:
    """One connection's part: it asks for the rkeys that it uses, and answers what its peer asks.

    due_ns: when `on_time` is to be called, or None.
    """

    __slots__ = (
        "_answered_ns",
        "_ask_ns",
        "_ask_step_ns",
        "_asking",
        "_book",
        "_connection",
        "_fresh",
        "_hung",
        "_nowhere",
        "_push_ns",
        "_push_step_ns",
        "_theirs",
        "_told",
    )

    def __init__(self, connection: KeyedQp) -> None:
        self._connection = connection
        self._book: KeyBook = connection.driver.keys
        self._told: Told | None = None
        self._theirs: PeerKeys | None = None
        self._asking: dict[int, None] = {}
        self._fresh: list[int] = []  # of these, not asked for yet
        self._nowhere: set[int] = set()  # the peer has no such memory
        self._hung: set[tuple[int, int]] = set()  # (rkey, k): ... has it, and its NIC k does not register it
        self._answered_ns = 0
        self._ask_ns: int | None = None
        self._ask_step_ns = 0
        self._push_ns: int | None = None
        self._push_step_ns = 0

    # ---- from pairing to its end ------------------------------------------------------------------------------------

    def open(self, mine: QpRecord, theirs: QpRecord) -> None:
        """The connection is paired; mine, theirs: the two entries."""
        c = self._connection
        self._told = self._book.told(theirs.instance, mine.default.gid or "", c.nic(0))
        self._told.users[c] = None
        self._theirs = self._book.peer_keys(theirs.instance, theirs.default.gid or "", _core.RemoteKeys)
        self._theirs.users[c] = None
        if c.awaits_keys:
            self.begin_wait()
        c.core.remote_keys = self._theirs.remote  # which reports all rkeys seen so far

    def close(self) -> None:
        """The pairing is over."""
        c = self._connection
        told, self._told = self._told, None
        theirs, self._theirs = self._theirs, None
        if told is not None:
            self._book.leave(told, c)
            push(told)
        if theirs is not None:
            self._book.leave_peer(theirs, c)
            if not c.closed:
                c.core.remote_keys = None
        self._asking.clear()
        self._fresh.clear()
        self._nowhere.clear()
        self._hung.clear()
        self._ask_ns = self._push_ns = None

    @property
    def due_ns(self) -> int | None:
        """See the class."""
        if self._ask_ns is None or self._push_ns is None:
            return self._push_ns if self._ask_ns is None else self._ask_ns
        return min(self._ask_ns, self._push_ns)

    def on_time(self, now_ns: int) -> None:
        """Say again what was not answered."""
        if self._ask_ns is not None and now_ns >= self._ask_ns:
            self._ask_again(now_ns)
        if self._push_ns is not None and now_ns >= self._push_ns:
            self.push()

    def on_message(self, m: WantKeys | Keys) -> None:
        """The peer speaks of keys."""
        if isinstance(m, Keys):
            self._on_keys(m)
        else:
            self._on_want(m)

    # ---- what we use of the peer's ----------------------------------------------------------------------------------

    def want(self, rkeys: Iterable[int]) -> None:
        """WRs use these: ask for those that are not known."""
        theirs, c = self._theirs, self._connection
        if theirs is None:
            return
        asked = bool(self._fresh)
        for rkey in rkeys:
            if rkey not in self._asking and not theirs.knows(rkey, c.n_pairs - 1):
                self._asking[rkey] = None
                self._nowhere.discard(rkey)
                self._hung.difference_update((rkey, k) for k in range(1, c.n_pairs))
                self._fresh.append(rkey)
        if self._fresh and not asked:
            c.driver.later(c, self._ask)  # together with what else comes now

    def begin_wait(self) -> None:
        """A WR waits for keys, and none did before: what an rkey was not then, it may be now."""
        self._nowhere.clear()
        if self._theirs is not None:
            self._theirs.waiting[self._connection] = None

    def is_answered(self, rkey: int) -> bool:
        """Whether the peer said, since a WR waits for this rkey, that it has no such memory."""
        return rkey in self._nowhere

    def hurry(self) -> None:
        """A WR waits for a key: ask for it again soon, over every path."""
        if self._ask_ns is not None:
            self._ask_step_ns = 0
            self._ask_ns = min(self._ask_ns, self._connection.driver.now_ns() + ASK_FIRST_NS)

    def _ask(self) -> None:
        fresh, self._fresh = self._fresh, []
        theirs = self._theirs
        if theirs is None or not fresh:
            return
        self._say_want(theirs, fresh, again=False)
        now_ns = self._connection.driver.now_ns()
        self._ask_step_ns = ASK_FIRST_NS
        self._ask_ns = min(now_ns + ASK_FIRST_NS, self._ask_ns or now_ns + ASK_FIRST_NS)
        self._connection.wake_up()

    def _ask_again(self, now_ns: int) -> None:
        theirs = self._theirs
        asking = [rkey for rkey in self._asking if theirs is not None]
        if not asking or theirs is None:
            self._ask_ns = None
            return
        most_ns = ASK_URGENT_NS if self._connection.awaits_keys else ASK_QUIET_NS
        self._ask_step_ns = min(max(2 * self._ask_step_ns, ASK_FIRST_NS), most_ns)
        self._ask_ns = now_ns + self._ask_step_ns
        self._say_want(theirs, asking, again=True)

    def _say_want(self, theirs: PeerKeys, rkeys: list[int], again: bool) -> None:
        c = self._connection
        for at in range(0, len(rkeys), RKEYS_AT_ONCE):
            part = tuple(rkeys[at : at + RKEYS_AT_ONCE])
            c.say(WantKeys(theirs.version, part, again, theirs.settled), c.send_pair, spread=again)

    def _on_keys(self, m: Keys) -> None:
        """An answer of the peer's, or news of a withdrawal."""
        theirs, c = self._theirs, self._connection
        if theirs is None:
            return
        good = theirs.take(m)
        if m.push:
            theirs.look()
            c.say(WantKeys(theirs.version, (), False, theirs.settled), c.send_pair, spread=True)
        if not good:
            return
        for found in m.found:
            if found.rkey not in self._asking:
                continue
            self._answered_ns = c.driver.now_ns()
            if is_final(found) or not found.on:
                del self._asking[found.rkey]
            if not found.on:
                self._nowhere.add(found.rkey)
            for k, (state, _) in enumerate(found.on, start=1):
                if state is KeyState.HUNG:
                    self._hung.add((found.rkey, k))
                else:
                    self._hung.discard((found.rkey, k))
        for user in list(theirs.waiting):
            user.keys_arrived()
            if not user.awaits_keys:
                theirs.waiting.pop(user, None)

    def heed(self, m: Sync | Move) -> None:
        """A SYNC or MOVE of the peer's says how far its withdrawals have come. READY and MOVED let us send: by then
        nothing older may be used."""
        theirs = self._theirs
        if theirs is None or m.keys <= theirs.version:
            return
        if (isinstance(m, Sync) and m.phase is Phase.READY) or (
            isinstance(m, Move) and m.step is MoveStep.MOVED
        ):
            theirs.heed(m.keys, self._connection)
        elif isinstance(m, Sync) and m.phase in (Phase.START, Phase.FENCED, Phase.POSTING):
            # There is time to hear which they were: then only those need to be asked for again.
            self._connection.say(WantKeys(theirs.version, (), True, theirs.settled), m.target, spread=True)

    def hopeless(self, since_ns: int, now_ns: int) -> str | None:
        """Why it makes no sense to wait any longer for the keys that posted WRs lack where traffic is; None: it does.

        since_ns: since when a WR waits. A registration that is under way is waited for as long as its NIC works. Only
        the NIC that a WR waits for counts: sends and receives may be on different ones, and others carry nothing.
        """
        c = self._connection
        nic = c.nic(0)
        patience_ns = c.driver.protocol_config.peer_deadline_ns
        send_k, recv_k = c.core.send_pair, c.core.recv_pair
        of_sends, remote = c.core.missing_keys(send_k, 0)
        of_receives, _ = c.core.missing_keys(0, recv_k)
        for k, lkey in sorted({(send_k, x) for x in of_sends} | {(recv_k, x) for x in of_receives}):
            mr = self._book.local(nic, lkey)
            if mr is None and self._book.is_changing(nic, lkey=lkey):
                continue
            if mr is None:
                if not self._stand_in(k, lkey):
                    return f"lkey {lkey:#x} is of no memory region"
                if c.nic(k).memory_hangs(memory_keys.HANGS_S):
                    return (
                        f"{c.device(k)} hangs: it cannot refuse lkey {lkey:#x}, which is of no memory region"
                    )
                continue
            if mr.state(k) == "pending":
                if c.nic(k).memory_hangs(memory_keys.HANGS_S):
                    return f"{c.device(k)} hangs: the memory of lkey {lkey:#x} is not registered there"
            elif now_ns - since_ns > patience_ns:
                return f"the memory of lkey {lkey:#x} has no counterpart on {c.device(k)}"
        for rkey in sorted(remote):
            if rkey in self._nowhere:
                continue  # see `refused`
            if (rkey, send_k) in self._hung:
                return f"the peer's NIC hangs: the memory of rkey {rkey:#x} is not registered there"
            if now_ns - max(since_ns, self._answered_ns) > patience_ns:
                return f"the peer does not tell what rkey {rkey:#x} is on {c.device(send_k)}"
        return None

    def _stand_in(self, k: int, lkey: int) -> bool:
        """Have NIC k itself refuse a WR, in its turn, for the memory that the application took away from it.

        Returns False where it cannot.
        """
        c = self._connection
        plugs = c.nic(k).plugs
        if plugs.nobodys is None:
            plugs.ask_nobodys()
        elif plugs.nobodys:
            self._book.stand_in(c.shadow.domain, lkey, k, plugs.nobodys)
            c.driver.later(c, c.keys_arrived)
        return plugs.nobodys != 0

    def refused(self, since_ns: int, now_ns: int) -> str | None:
        """Why the peer would refuse the next WR to be handed over, when all ahead of it have completed.

        None where it would not, or where that is not known, or not yet its turn. since_ns: as in `hopeless`; what is
        ahead and unsignaled says nothing: it is given the time that a peer is.
        """
        core, patience_ns = self._connection.core, self._connection.driver.protocol_config.peer_deadline_ns
        local, remote = core.missing_keys(core.send_pair, 0)
        # If others were missing as well, a WR that lacks one of those might be first.
        if not remote or local or not remote <= self._nowhere:
            return None
        if core.outstanding[0] != core.unwired[0] and (
            core.completion_due or now_ns - since_ns <= patience_ns
        ):
            return None
        return "the peer has no memory region of rkey " + ", ".join(f"{rkey:#x}" for rkey in sorted(remote))

    # ---- what the peer uses of ours ---------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """What READY and MOVED say."""
        return self._told.version if self._told is not None else 0

    def _on_want(self, m: WantKeys) -> None:
        """The peer asks, or confirms."""
        c, told = self._connection, self._told
        if told is None:
            return
        self._book.confirmed(told, m.version, m.settled)
        for answer in self._book.answers(told, m, c.n_pairs - 1):
            c.say(answer, c.send_pair, spread=m.again)

    def push(self) -> None:
        """Tell the peer what was withdrawn, until it confirms or sends to no backup any more; its WRs, too."""
        c, told = self._connection, self._told
        if told is None or not told.unheard or not c.receives_away:
            pushes, self._push_ns = self._push_ns is not None, None
            self._push_step_ns = 0
            if pushes and told is not None:
                push(told)  # another that is away still goes on with it
            return
        c.say(told.news(), c.recv_pair, spread=True)
        most_ns = ASK_URGENT_NS if told.confirmed < told.version else ASK_QUIET_NS
        self._push_step_ns = min(max(2 * self._push_step_ns, ASK_FIRST_NS), most_ns)
        self._push_ns = c.driver.now_ns() + self._push_step_ns
        c.wake_up()
