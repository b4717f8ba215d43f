# SPDX-License-Identifier: BSD-3-Clause
"""What the application changes of a QP that has peers already, carried to every pair.

With plain verbs a right that was withdrawn is gone when ibv_modify_qp returns. So it must be gone then from every QP of
ours that could serve the peer: each NIC's thread is told, and waited for. A pair that does not follow is of no use any
more: it goes to ERR, no traffic is brought there, and ARM connects it anew, with the attributes of then.

Called from the application's threads, without the driver's lock.
"""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from shiftverbs import _core
from shiftverbs.failover.services.host import ProtectedQp
from shiftverbs.native.ibv import AccessFlag, AtomicCap
from shiftverbs.process.waiting import in_slices
from shiftverbs.protocol import events as ev
from shiftverbs.shadows.qp_attributes import (
    ALTERNATE,
    CONNECTED,
    ERR,
    INIT,
    LIVE,
    RTS,
    Alternate,
    Connected,
    QpFields,
)

if TYPE_CHECKING:
    from shiftverbs._nic import ModifySteps
    from shiftverbs.failover.qp.pairing import Pairing
    from shiftverbs.failover.qp.timeline import Timeline

logger = logging.getLogger("shiftverbs.driver")

#: How many times as long as a NIC that hangs one is waited for that is busy with others' commands.
_BUSY = 10

UNLIKE = "it was connected before the application gave its QP all attributes"


def on_pair(connection: ProtectedQp, k: int, attrs: dict[str, int]) -> dict[str, int]:
    """What the application gave its QP, as pair k's QP is to have it: atomics only where they are atomic.

    A peer may reach a word by a backup while another peer's QP, or another process's, is at the default NIC; most NICs
    are atomic to themselves alone (ATOMIC_HCA).
    """
    c = connection
    if not k or all(c.nic(n).limits.get("atomic_cap") == AtomicCap.GLOB for n in range(c.n_pairs)):
        return attrs
    return {
        name: v & ~AccessFlag.REMOTE_ATOMIC if name == "qp_access_flags" else v for name, v in attrs.items()
    }


class Given:
    """What the commands that were queued so far give one pair's QP.

    state: INIT, RTR or RTS, or ERR; attrs: fields of ibv_qp_attr by name; changing: how many commands of the
    application's changes are not answered yet; withdrawing: whether one of those takes a right from the peer;
    useless: it did not take one, and its QP is on its way to ERR for that; doubt: the rights it may have, where nobody
    knows; rebuilt: its QP went through RESET for it, or is about to; served: it may have served a peer before that.
    Another one each time the pair is brought further.
    """

    def __init__(
        self, state: int, attrs: dict[str, object], served: bool = False, rebuilt: bool = True
    ) -> None:
        self.state = state
        self.attrs = attrs
        self.served = served
        self.rebuilt = rebuilt
        self.doubt = -1
        self.changing = 0
        self.withdrawing = False
        self.useless = False

    @property
    def rights(self) -> int:
        """The peer's, enum ibv_access_flags: all that may be."""
        flags = self.attrs.get("qp_access_flags", self.doubt)
        assert isinstance(flags, int)
        return flags

    def forget(self, changes: dict[str, int]) -> None:
        """Nobody knows whether the QP has these: the next change brings them again."""
        for name, value in changes.items():
            if self.attrs.get(name) == value:
                del self.attrs[name]


class ChangedQp(ProtectedQp, Protocol):
    """A connection whose pairs are to have what the application gave its QP."""

    @property
    def given(self) -> dict[int, Given]:
        """What each pair's QP was given, by pair."""

    @property
    def unlike(self) -> set[int]:
        """Pairs that carry traffic, and are to be connected anew when that can be."""

    @property
    def pairing(self) -> Pairing:
        """How it finds its peer."""

    def found_broken(self, k: int) -> None:
        """Pair k's QP is in ERR, or its NIC gone, and it may be that nothing else has told so yet."""

    @property
    def timeline(self) -> Timeline:
        """What became of it, and who waits for that."""

    def wait_for(self, condition: Callable[[], bool], deadline: float | None) -> bool:
        """Wait until condition() holds or time.monotonic() reaches deadline; return whether it holds."""


class _Told:
    """Commands under way on some pairs, which one verb waits for.

    Their answers are heeded whoever waits, or does not any more: a pair that does not take a change is put out of use.
    """

    def __init__(self, connection: ChangedQp) -> None:
        self.connection = connection
        self.pointers: dict[int, int] = {}  # by pair: of its QP
        self.given: dict[int, Given] = {}

    def steps(self, k: int) -> ModifySteps:
        """An empty list of transitions for pair k's QP."""
        return self.connection.nic(k).verbs.ModifySteps()

    def tell(self, k: int, given: Given, steps: ModifySteps, asked: list[int] | None = None) -> None:
        """Under the driver's lock: queue steps for pair k's QP, whose last command was `given`.

        asked: takes the errno of a question, whose answer is the application's.
        """
        if not self.told_before(k):
            return
        c = self.connection
        given.changing += 1
        # Not the pairing's, as other commands are: its end does not end the wait.
        answered = functools.partial(_answered, c, k, given, given.state == ERR, asked)
        c.nic(k).worker.submit(answered, self.pointers[k], steps)

    def told_before(self, k: int) -> bool:
        """Under the driver's lock: pair k's QP is brought to ERR, or changed, by a command that may be under way still.

        Until that is done it serves the peer as before: it is waited for. False: there is no such QP, or no such NIC.
        """
        c = self.connection
        pointer = c.shadow.handle(k)
        if not pointer or c.nic(k).dead:
            return False
        self.pointers[k] = pointer
        if k in c.given:
            self.given[k] = c.given[k]
        return True

    def wait(self, timeout_s: float, raised: list[BaseException] | None = None) -> list[int]:
        """Wait until all have answered, or timeout_s passed; no longer for a NIC that hangs already: those pairs.

        That is one whose command under way has been waited for in vain before, or takes longer than timeout_s. One that
        is merely slow, or busy with others' commands, has its time: a change that is given up puts a pair out of use.
        raised: takes what signals' handlers raise meanwhile, and the wait goes on.
        """
        c = self.connection
        if c.driver.is_in():  # a finalizer's verb: whoever runs the driver heeds the answers
            return []
        deadline = time.monotonic() + timeout_s
        # What is queued behind the very command that this is called from cannot be waited for.
        awaited = [k for k in self.pointers if not c.nic(k).on_worker()]
        hung = [k for k in awaited if not self._is_drained(k, deadline, timeout_s, raised)]
        c.driver.run()
        told = [self.given[k] for k in awaited if k in self.given and k not in hung]
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                c.wait_for(lambda: not any(given.changing for given in told), deadline)
                return hung
            except BaseException as error:
                if raised is None:
                    raise
                raised.append(error)

    def _is_drained(
        self, k: int, deadline: float, timeout_s: float, raised: list[BaseException] | None
    ) -> bool:
        """Wait for the commands of pair k's QP. False: its NIC hangs."""
        c = self.connection
        nic, pointer = c.nic(k), self.pointers[k]
        if nic.hangs(timeout_s) or nic.is_known_to_wait():
            return not nic.worker.pending(pointer)

        def drain(seconds: float) -> bool:
            return c.closed or bool(nic.worker.drain(pointer, seconds))

        last = deadline + (_BUSY - 1) * timeout_s
        until = deadline
        while not in_slices(drain, max(0.0, until - time.monotonic()), raised):
            if nic.hangs(timeout_s) or until >= last:
                nic.waited_in_vain()
                return False
            until = min(last, time.monotonic() + timeout_s / _BUSY)
        return True


def _answered(c: ChangedQp, k: int, given: Given, to_err: bool, asked: list[int] | None, err: int) -> None:
    """Under the driver's lock: what became of a command of `_Told.tell`; to_err: that brought the QP to ERR."""
    given.changing -= 1
    given.withdrawing &= given.changing > 0
    if asked is not None:
        asked.append(err)
    elif err and not c.closed and c.given.get(k) is given and (to_err or given.state != ERR):
        _out_of_use(c, k, f"{c.device(k)} did not take the QP's new attributes: {os.strerror(err)}")
    c.timeline.tell()


def asks_the_carrier(connection: ChangedQp, changes: dict[str, int], timeout_s: float) -> int:
    """Have the backup pair that carries traffic take the changes, in place of the default NIC: its errno.

    0 too where none carries any, or it is not to be believed: its QP broke, or its NIC does not answer.
    """
    told = _Told(connection)
    asked: list[int] = []
    with connection.driver.locked():
        p = connection.protocol
        if connection.closed or p is None or p.over or p.fencing:
            return 0
        k = p.send_pair or p.recv_pair
        given = connection.given.get(k)
        if not k or given is None or given.state != RTS:
            return 0
        changes = on_pair(connection, k, changes)
        # What another thread asks for may not be answered yet.
        before = given.rights | (given.doubt if given.changing else 0)
        given.doubt = before | changes.get("qp_access_flags", 0)
        given.attrs.update(changes)
        told.tell(k, given, told.steps(k).add(**changes), asked)
    raised: list[BaseException] = []
    told.wait(timeout_s, raised)  # to its end, or the carrier has what nobody knows of
    if raised:
        _core.raise_where_it_ends(raised)
    err = asked[0] if asked else 0
    broken = bool(err) and connection.shadow.is_broken(k)
    with connection.driver.locked(quietly=True):
        if asked != [0]:
            given.forget(changes)
            if asked and not given.changing:  # refused: it is as it was
                given.doubt = before
        if connection.closed or connection.given.get(k) is not given or given.state != RTS or p.fencing:
            return 0
        if broken:  # what its WCs say comes first, and nobody may have looked at them
            connection.driver.safely(connection, lambda: connection.found_broken(k))
            return 0
        return err


def spread(connection: ChangedQp, timeout_s: float, said: tuple[int, dict[str, int]] | None) -> None:
    """Bring what the application's attributes are now to every pair's QP; returns when none serves with others.

    said: the shadow's interruptions before the application's verb was carried out by the default QP, and what that gave
    it; None where it did not: others may have noted more meanwhile.
    """
    told = _Told(connection)
    with connection.driver.locked(quietly=True):
        if connection.closed:
            return
        wanted = connection.shadow.attrs  # here: another thread may have changed others since this one's verb
        rights = wanted.get("qp_access_flags", 0)
        live: dict[str, int] = {name: wanted[name] for name in LIVE if name in wanted}
        # Those that are left; new ones not before.
        connection.pairing.rights_changed(lambda before: before & rights)
        default = connection.given.get(0)
        if (
            said is not None and said[0] == connection.shadow.interruptions
        ):  # neither fenced nor rebuilt since
            if default is not None and default.state == RTS:
                default.attrs.update(said[1])
        if default is None and connection.shadow.is_out_of_service():
            # Behind a fence, which is waited for; or a MOVE has left it as the application had it.
            p = connection.protocol
            fenced = p is not None and (p.fencing or p.pairs[0].fenced)
            names = CONNECTED + ALTERNATE
            had: dict[str, object] = {"qp_access_flags": -1, **{name: wanted.get(name) for name in names}}
            connection.given[0] = Given(ERR if fenced else connection.shadow.app_state, had, rebuilt=False)
        for k, given in list(connection.given.items()):
            _follow(told, k, given, on_pair(connection, k, live))
        anew = _connect_anew(connection, wanted)
        if not told.pointers:
            connection.pairing.rights_changed(lambda before: rights)
            if not anew:
                return
    hung: list[int] = []
    last = _Told(connection)
    try:
        hung = told.wait(timeout_s)
    finally:
        with connection.driver.locked(quietly=True):
            if not connection.closed:
                for k in hung:
                    _give_up(told, k)
                for k, given in told.given.items():
                    if given.useless and connection.given.get(k) is given:
                        last.told_before(k)
            rights = connection.shadow.attrs.get("qp_access_flags", 0)
            connection.pairing.rights_changed(lambda before: rights)
    last.wait(timeout_s)
    if connection.driver.is_in():
        return
    # Where a pair carried traffic, the peer stops using it when it has heard of the SWITCH: at its end, at the latest.
    deadline = time.monotonic() + timeout_s
    connection.driver.run()
    connection.wait_for(lambda: not any(_carries(connection, k) for k in last.pointers), deadline)


def _give_up(told: _Told, k: int) -> None:
    """Under the driver's lock: pair k's NIC hangs, and the change with it: no harm, unless the peer loses a right."""
    c = told.connection
    given = told.given.get(k)
    if given is not None and c.given.get(k) is given and given.withdrawing:
        _out_of_use(c, k, f"{c.device(k)} did not take the QP's new attributes in time")


def _follow(told: _Told, k: int, given: Given, wanted: dict[str, int]) -> None:
    changes = {name: value for name, value in wanted.items() if given.attrs.get(name) != value}
    if given.state == INIT:
        behind = given.served  # its RESET may be on its way
    else:
        behind = given.state == ERR or bool(given.changing and not changes)
    if behind:
        told.told_before(k)
    elif not changes or given.state == INIT:
        return  # from INIT the next command takes them along, and no peer is served before
    elif given.state == RTS:
        given.withdrawing |= bool(given.rights & ~wanted.get("qp_access_flags", 0))
        given.attrs.update(changes)
        told.tell(k, given, told.steps(k).add(**changes))
    elif given.rights & ~wanted.get("qp_access_flags", 0):
        # Nothing can be changed in RTR. ARM begins again.
        given.state, given.withdrawing = ERR, True
        told.tell(k, given, told.steps(k).add(state=ERR))


def _connect_anew(connection: ChangedQp, wanted: QpFields) -> bool:
    """Of the QPs that were connected before the application said how: ARM does it again, what is in use waits.

    Returns whether ARM does.
    """
    p, found = connection.protocol, False
    if p is None or p.over or "timeout" not in wanted:
        return False
    for k, given in list(connection.given.items()):
        if k >= connection.n_pairs:
            continue
        names: tuple[Connected | Alternate, ...] = CONNECTED if k else CONNECTED + ALTERNATE
        if given.state == RTS and any(given.attrs.get(name) != wanted.get(name) for name in names):
            if k in (p.send_pair, p.recv_pair):
                connection.unlike.add(k)
            else:
                connection.driver.safely(connection, connection.feed, ev.PathFailed(k, UNLIKE))
                found = True
    return found


def is_unlike(connection: ChangedQp, k: int) -> bool:
    """Whether READs and atomics would fail, or be too many, on pair k, which carries traffic."""
    given = connection.given.get(k)
    wanted = connection.shadow.attrs.get("max_rd_atomic")
    return given is not None and given.state == RTS and given.attrs.get("max_rd_atomic") != wanted


def _carries(connection: ProtectedQp, k: int) -> bool:
    p = connection.protocol
    return p is not None and not p.over and k in (p.send_pair, p.recv_pair)


def _out_of_use(connection: ChangedQp, k: int, why: str) -> None:
    """Pair k's QP is not as the application wants it: it must serve nobody. The default one is the application's where
    nothing is protected any more."""
    p = connection.protocol
    if not k and (p is None or p.over):
        return
    given = connection.given[k]
    if k >= connection.n_pairs:
        p = None  # an earlier pairing's
    if p is not None and p.pairs[k].works:  # else it was of no use before
        logger.warning("QP %#x: %s: that pair is connected anew", connection.shadow.qp_num, why)
    given.state, given.useless = ERR, True
    if not connection.nic(k).dead:
        connection.driver.command(
            connection, k, connection.nic(k).verbs.ModifySteps().add(state=ERR), lambda err, step: None
        )
    if p is not None:
        connection.driver.safely(connection, connection.feed, ev.PathFailed(k, why))
