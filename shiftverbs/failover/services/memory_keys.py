# SPDX-License-Identifier: BSD-3-Clause
"""The life of memory keys: what our memory is called on each NIC, who was told, and what a peer's is called.

A WR names a peer's memory by the rkey of the peer's default NIC. Elsewhere the same memory has another key, and only
its owner knows which. So whoever uses an rkey asks its owner, over the control channel, as soon as the rkey is first
seen in a posted WR: the failure path neither waits for etcd nor goes by what once stood there.

An answer is good until the owner says otherwise. It numbers what it withdraws of what it told a peer, and its READY and
MOVED carry the number of the last: who has not heard of that one yet forgets everything and asks again. While a peer
sends to a backup, it is told of each withdrawal at once; and a key that our default NIC gives out again is not handed
to the application before such peers have confirmed that they forgot the old one (protocol.md, "Memory keys").
"""

from __future__ import annotations

import collections
import functools
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Protocol

from shiftverbs._core import Unbroken
from shiftverbs.process.waiting import look_for_signals
from shiftverbs.protocol.messages import FoundKey, Keys, KeyState, WantKeys

if TYPE_CHECKING:
    from shiftverbs._core import KeyMap, QPCore, RemoteKeys
    from shiftverbs.shadows.mr import ShadowMR
    from shiftverbs.shadows.nic import Nic

# How many keys that nothing else may get yet a peer is told at most; then no others before some are free.
HELD_MOST = 1 << 16
# How many withdrawals are remembered for a peer; one that has heard of none of them forgets all keys.
GONE_KEPT = 40
# A message's body.
BODY_BYTES = 255
# How many rkeys of one peer port are known at once. Then all are forgotten, and asked for again when used.
KNOWN_MOST = 1 << 17
# A NIC that is busy with one command for this long hangs: nobody waits for memory that it is to register.
HANGS_S = 5.0


class Teller(Protocol):
    """A connection's part in this, see connection_keys.py."""

    def push(self) -> None:
        """Tell the peer what was withdrawn."""


class KeyUser(Protocol):
    """A connection that uses keys which it shares with others."""

    @property
    def core(self) -> QPCore:
        """Its part in the data path."""

    @property
    def closed(self) -> bool:
        """Whether the QP is gone, or going: nothing is done to it any more."""

    @property
    def send_pair(self) -> int:
        """The pair that carries sends."""

    @property
    def receives_away(self) -> bool:
        """Whether the peer sends to a backup of ours, or may when it hears what we said."""

    @property
    def reached_away(self) -> bool:
        """Whether something of the peer's may come by a backup of ours, perhaps the last of what it sent."""

    @property
    def keys(self) -> Teller:
        """Its part in this, see connection_keys.py."""

    def drain(self, k: int) -> None:
        """Take what pair k's CQs hold."""

    @property
    def awaits_keys(self) -> bool:
        """Whether a WR is withheld because the counterpart of a key is not known."""

    def keys_arrived(self) -> None:
        """More keys were resolved."""

    def keys_missing(self, why: str) -> None:
        """What was posted cannot be handed over where the traffic is, and never will be."""


class Mapped(Protocol):
    """A domain, as local keys are translated in it."""

    @property
    def nic(self) -> Nic:
        """The default NIC."""

    @property
    def keymap(self) -> KeyMap:
        """What its lkeys are on the others."""


class Told:
    """What one process of a peer knows of the keys of one of our NICs, as far as we have told it.

    Its book's lock protects it; but the collector, which ends memory wherever it finds it, is kept off by none. What is
    walked is a copy therefore, made by one call that allocates nothing else.

    version: number of the last withdrawal that concerns it; confirmed: the last that it has heard of; settled: the last
    since which none of its WRs is on its way by older keys; floor: about earlier ones nothing is remembered. users: our
    connections to it. held: what withdrawn rkeys were on our backups, where its WRs may still come.
    """

    def __init__(self, nic: Nic, version: int) -> None:
        self.nic = nic
        self.version = self.floor = self.confirmed = self.settled = version
        self.rkeys: set[int] = set()
        # rkey -> the keys on our backups that it was told
        self._on: dict[int, dict[tuple[Nic, int], None]] = {}
        self.held: dict[tuple[Nic, int], tuple[int, int]] = {}  # -> number of the withdrawal, rkey
        self.full_since = 0.0  # when HELD_MOST were reached, in seconds; 0: they are not
        self.gone: collections.deque[tuple[int, int]] = collections.deque()
        self.users: dict[KeyUser, None] = {}  # in their order: what is done goes by it

    def withdraw(self, rkey: int, numbers: Iterator[int]) -> None:
        """`rkey`, which it was told of, is gone. numbers: of withdrawals, the next one first.

        Its number is noted last: whoever reads that amid this, without the lock, can tell all that goes with it. Where
        the collector withdraws other memory meanwhile, by a later number, this is withdrawn once more.
        """
        self.rkeys.discard(rkey)
        on = self._on.pop(rkey, ())
        while True:
            number = next(numbers)
            for key in on:
                self.held[key] = number, rkey
            self.gone.append((number, rkey))
            if number > self.version:  # the collector can't come between these two
                self.version = number
                break
        while len(self.gone) > GONE_KEPT:
            # From here on the collector can't come, either. Who looks for what is gone looks at `gone` before `floor`.
            if self.gone[0][0] > self.floor:
                self.floor = self.gone[0][0]
            self.gone.popleft()

    def tell(self, rkey: int, keys: Iterable[tuple[Nic, int]]) -> None:
        """It is told of `rkey`, and of its counterparts on these NICs."""
        self.rkeys.add(rkey)
        self._on.setdefault(rkey, {}).update(dict.fromkeys(keys))

    def untell(self, rkey: int) -> None:
        """It is not told of `rkey` after all: that is gone, and withdrawn if it was told of it before."""
        self.rkeys.discard(rkey)
        self._on.pop(rkey, None)

    def settle(self, version: int) -> None:
        """Nothing of it can come any more by what was withdrawn up to `version`."""
        self.settled = version
        for key in list(self.held):
            if key in self.held and self.held[key][0] <= version:
                del self.held[key]
        if len(self.held) < HELD_MOST:
            self.full_since = 0.0

    def holds(self, nic: Nic, of: int, rkey: int | None = None) -> bool:
        """Whether WRs may still come to `nic` by a key (rkey: this one) of memory that is gone, not as rkey `of`."""
        if rkey is not None:
            _, was = self.held.get((nic, rkey), (0, of))
            found = was != of
        else:
            found = any(each is nic and was != of for (each, _), (_, was) in self.held.copy().items())
        return found and any(user.reached_away for user in list(self.users))

    @property
    def unheard(self) -> bool:
        """Whether there is something that it has to confirm."""
        return self.confirmed < self.version or (bool(self.held) and self.settled < self.version)

    def since(self, version: int) -> tuple[int, int, tuple[int, ...]]:
        """What to tell one that has heard of `version`: (up to, and from which version on this says all, what is gone).

        What is withdrawn amid this may be in it or not; the version is from before that.
        """
        until = self.version
        gone = list(self.gone)
        since = min(until, max(self.floor, version))
        return until, since, tuple(rkey for number, rkey in gone if number > since)

    def news(self) -> Keys:
        """What it has not confirmed, said without a question. The book's lock is not needed: see `withdraw`."""
        version, since, gone = self.since(self.confirmed)
        return Keys(version, since, gone, push=True)

    @property
    def away(self) -> list[KeyUser]:
        """The connections whose peer sends to a backup of ours, so that our answers are in use."""
        return [user for user in list(self.users) if user.receives_away]

    def awaits(self, rkey: int) -> bool:
        """Whether it may still use `rkey` for memory that is gone."""
        if self.confirmed >= self.version:
            return False
        remembered = list(self.gone)
        forgotten = self.confirmed < self.floor  # it may be among what is not remembered
        if not forgotten and not any(number > self.confirmed and gone == rkey for number, gone in remembered):
            return False
        return any(user.receives_away for user in list(self.users))


class PeerKeys:
    """The rkeys of one peer process's NIC, as it told us; shared by the QPs connected there.

    remote: what the data path translates with; version: the peer's number of the last withdrawal that this heeds.
    """

    def __init__(self, remote: RemoteKeys) -> None:
        self.remote = remote
        self.version = 0
        self.users: dict[KeyUser, None] = {}  # in their order: what is done goes by it
        self.waiting: dict[KeyUser, None] = {}  # those of them with a WR that waits for keys
        self._known: dict[int, int] = {}  # rkey -> on how many backups
        # WRs on their way by keys that were withdrawn since: what was heeded before, whose they are, the last's number.
        self._under_way: list[tuple[int, KeyUser, int]] = []

    def knows(self, rkey: int, backups: int) -> bool:
        """Whether the rkey's counterparts on this many backups are known for good."""
        return self._known.get(rkey, -1) >= backups

    def forget(self) -> None:
        """Forget everything; what is used from now on is asked for again."""
        if self._known:
            self._known.clear()
            self.remote.clear()
            for user in list(self.users):
                user.core.forget_rkey(None)

    @property
    def settled(self) -> int:
        """The last withdrawal since which no WR is on its way by what we were told before."""
        self._under_way = [
            (version, user, end)
            for version, user, end in self._under_way
            if user in self.users
            and user.core.oldest_wr < end
            and user.core.send_pair  # at home, keys are the owner's
        ]
        return min((version for version, _, _ in self._under_way), default=self.version)

    def look(self) -> None:
        """Take what has completed of the WRs that `settled` waits for, if nobody else does."""
        for user in dict.fromkeys(user for _, user, _ in self._under_way):
            if not user.closed:
                user.drain(user.send_pair)

    def _leave_behind(self, rkey: int | None, but: KeyUser | None = None) -> None:
        """Forget `rkey` (None: all), so that no further WR uses it; those that hardware has still do."""
        for user in list(self.users):
            end = user.core.last_use(rkey) if user is not but else 0
            # What the same WRs hold back already they need not hold back again.
            if end and not any(each is user and end <= until for _, each, until in self._under_way):
                self._under_way.append((self.version, user, end))

    def heed(self, version: int, by: KeyUser | None = None) -> None:
        """Nothing from before this withdrawal may be used, and we may not know which it was.

        by: the connection that is told so before it sends again, and has nothing on its way.
        """
        if version > self.version:
            self.forget()  # first: the application posts meanwhile
            self._leave_behind(None, by)
            self.version = version

    def take(self, m: Keys) -> bool:
        """Withdrawals, and answers; False for one that is out of date by now."""
        if m.version > self.version:
            if self.version < m.since:
                self.forget()
                self._leave_behind(None)
            for rkey in m.gone:
                if self._known.pop(rkey, None) is not None:
                    # Before the WRs are looked for: the application posts meanwhile.
                    self.remote.del_remote(rkey)
                    for user in list(self.users):
                        user.core.forget_rkey(rkey)
                self._leave_behind(rkey)
            self.version = m.version
        if m.version < self.version:
            return False
        for found in m.found:
            if not found.on:
                continue
            if len(self._known) >= KNOWN_MOST:
                self.forget()
            self._known.setdefault(found.rkey, 0)
            for k, (state, rkey) in enumerate(found.on, start=1):
                if state is KeyState.READY:
                    self.remote.set_remote(found.rkey, k, rkey)
                elif state is KeyState.NEVER:
                    self.remote.set_remote(found.rkey, k, None)
            if is_final(found):
                self._known[found.rkey] = max(self._known[found.rkey], len(found.on))
        return True


def is_final(found: FoundKey) -> bool:
    """Whether this answer will not be another one until the rkey is withdrawn."""
    return bool(found.on) and all(state in (KeyState.READY, KeyState.NEVER) for state, _ in found.on)


class KeyBook:
    """All keys of this process: of our memory, and what peers told us of theirs.

    Our memory comes and goes in the application's threads; all else runs under the driver's lock.
    """

    def __init__(self) -> None:
        # Reentrant: the collector may take memory away while it is held, which goes at once wherever that is.
        lock = threading.RLock()
        # Quietly: where a handler's exception broke the wait for it off, memory would be closed and never withdrawn.
        self._lock = Unbroken(lock, quietly=True)
        self._changed = threading.Condition(lock)  # what peers have confirmed
        self._by_rkey: dict[tuple[Nic, int], ShadowMR] = {}
        self._by_lkey: dict[tuple[Nic, int], ShadowMR] = {}
        self._changing: set[ShadowMR] = set()  # by ibv_rereg_mr: neither the former memory nor none
        self._told: dict[tuple[str, str, Nic], Told] = {}
        self._numbers = itertools.count(1)  # of withdrawals
        self._theirs: dict[tuple[str, str], PeerKeys] = {}

    # ---- our memory -------------------------------------------------------------------------------------------------

    def add(self, mr: ShadowMR) -> None:
        """A ShadowMR was made: peers may ask for its rkeys from now on."""
        nic = mr.domain.nic
        with self._lock:
            self._by_rkey[nic, mr.rkey] = self._by_lkey[nic, mr.lkey] = mr

    def remove(self, mr: ShadowMR) -> list[Told]:
        """A ShadowMR is gone. Returns the peers that use its keys, and have to be told."""
        nic = mr.domain.nic
        concerned = []
        with self._lock:
            by_lkey, by_rkey = self._by_lkey.get((nic, mr.lkey)), self._by_rkey.get((nic, mr.rkey))
            if by_lkey is mr:
                del self._by_lkey[nic, mr.lkey]
            if by_rkey is mr:
                del self._by_rkey[nic, mr.rkey]
                for told in list(self._told.values()):
                    if told.nic is nic and mr.rkey in told.rkeys:
                        told.withdraw(mr.rkey, self._numbers)
                        concerned.append(told)
        return [told for told in concerned if told.away]

    def change(self, mr: ShadowMR) -> None:
        """A ShadowMR is about to be removed, and something else will take its place before `changed`."""
        with self._lock:
            self._changing.add(mr)

    def changed(self, mr: ShadowMR) -> None:
        """What takes its place is there, or nothing will."""
        with self._lock:
            self._changing.discard(mr)

    def is_changing(self, nic: Nic, lkey: int | None = None, rkey: int | None = None) -> bool:
        """Whether it is open for the moment what this key on `nic` is."""
        return any(
            mr.domain.nic is nic and (mr.lkey == lkey or mr.rkey == rkey) for mr in list(self._changing)
        )

    def local(self, nic: Nic, lkey: int) -> ShadowMR | None:
        """The ShadowMR with this lkey on `nic`."""
        return self._by_lkey.get((nic, lkey))

    def stand_in(self, domain: Mapped, lkey: int, k: int, there: int) -> None:
        """On NIC k `there` stands for an lkey of no memory, until memory has that lkey."""
        with self._lock:  # memory that comes meanwhile enters the book first
            if self.local(domain.nic, lkey) is None and not self.is_changing(domain.nic, lkey=lkey):
                domain.keymap.set_local(lkey, k, there)

    def await_confirmed(self, mr: ShadowMR, timeout_s: float) -> list[KeyUser]:
        """Wait until no peer that sends to a backup takes `mr`'s rkey for former memory of ours.

        Returns the connections to those that did not say so in time.
        """
        if not self._told:
            return []
        until = time.monotonic() + timeout_s
        while True:
            with self._lock:
                waiting = [told for told in list(self._told.values()) if self._awaits(told, mr)]
                left = until - time.monotonic()
                if not waiting or left <= 0:
                    return [user for told in waiting for user in told.away]
                self._changed.wait(min(left, 0.05))  # a QP that comes home, or is closed, tells nobody
            look_for_signals()

    @staticmethod
    def _awaits(told: Told, mr: ShadowMR) -> bool:
        return told.nic is mr.domain.nic and told.awaits(mr.rkey)

    # ---- what peers know of it --------------------------------------------------------------------------------------

    def told(self, instance: str, gid: str, nic: Nic) -> Told:
        """What the process `instance` knows of our memory on `nic`, which it knows under `gid`."""
        key = (instance, gid, nic)
        with self._lock:
            told = self._told.get(key)
            if told is None:
                # A number of its own: the peer may remember what we told it before.
                told = self._told[key] = Told(nic, next(self._numbers))
            return told

    def leave(self, told: Told, user: KeyUser) -> None:
        """One user less; what nobody uses is forgotten."""
        with self._lock:
            told.users.pop(user, None)
            if not told.users:
                for key, kept in list(self._told.items()):
                    if kept is told:
                        del self._told[key]
            self._changed.notify_all()
        self._free(dict.fromkeys(nic for nic, _ in list(told.held)))

    def confirmed(self, told: Told, version: int, settled: int | None = None) -> None:
        """The peer has heard of everything up to `version`, and its WRs are through up to `settled` (None: as well)."""
        settled = version if settled is None else settled
        if told.confirmed < version <= told.version:
            with self._lock:
                told.confirmed = version
                self._changed.notify_all()
        if told.settled < settled <= told.version:
            with self._lock:
                held = dict.fromkeys(nic for nic, _ in list(told.held))
                told.settle(settled)
            self._free(held)

    def _free(self, nics: Iterable[Nic]) -> None:
        """Keys on these NICs may be free for other memory."""
        for nic in nics:
            if nic.plugs.keys:
                nic.registrar.post(nic.plugs.release, functools.partial(self.holds, nic, 0))

    def holds(self, nic: Nic, of: int, rkey: int | None = None) -> bool:
        """Whether WRs of some peer's may still come to `nic` by a key of former memory, as `Told.holds`."""
        return any(told.holds(nic, of, rkey) for told in list(self._told.values()))

    def answers(self, told: Told, m: WantKeys, backups: int) -> Iterator[Keys]:
        """The answer to a question, in as many messages as it takes."""
        with self._lock:
            version, since, gone = told.since(m.version)
            found = [self._find(told, rkey, backups) for rkey in m.rkeys]
        size = least = Keys(version, since, gone).size
        part: list[FoundKey] = []
        for each in found:
            if size + each.size > BODY_BYTES:
                yield Keys(version, since, gone, tuple(part))
                part, size = [], least
            part.append(each)
            size += each.size
        if part or m.version < version:
            yield Keys(version, since, gone, tuple(part))

    def _find(self, told: Told, rkey: int, backups: int) -> FoundKey:
        mr = self._by_rkey.get((told.nic, rkey))
        if mr is None:
            if self.is_changing(told.nic, rkey=rkey):
                return FoundKey(rkey, ((KeyState.PENDING, 0),) * backups)
            return FoundKey(rkey, ())
        if len(told.held) >= HELD_MOST:
            # One WR of its own that never ends may hold them all: those that wait here end then, too.
            told.full_since = told.full_since or time.monotonic()
            state = KeyState.HUNG if time.monotonic() - told.full_since > HANGS_S else KeyState.PENDING
            return FoundKey(rkey, ((state, 0),) * backups)
        # Under the lock: a withdrawal from now on concerns that peer.
        on = tuple(key_on(mr, k) for k in range(1, backups + 1))
        told.tell(
            rkey,
            [(mr.domain.backups[k], key) for k, (state, key) in enumerate(on) if state is KeyState.READY],
        )
        if self._by_rkey.get((told.nic, rkey)) is not mr:  # the collector came before it was told
            told.untell(rkey)
            return FoundKey(rkey, ())
        return FoundKey(rkey, on)

    # ---- what peers told us -----------------------------------------------------------------------------------------

    def peer_keys(self, instance: str, gid: str, remote: Callable[[], RemoteKeys]) -> PeerKeys:
        """What the process `instance` told us of its memory behind its port with `gid`."""
        keys = self._theirs.get((instance, gid))
        if keys is None:
            keys = self._theirs[instance, gid] = PeerKeys(remote())
        return keys

    def leave_peer(self, keys: PeerKeys, user: KeyUser) -> None:
        """One user less."""
        keys.users.pop(user, None)
        keys.waiting.pop(user, None)
        if not keys.users:
            for key, kept in list(self._theirs.items()):
                if kept is keys:
                    del self._theirs[key]


def key_on(mr: ShadowMR, k: int) -> tuple[KeyState, int]:
    """What an MR's rkey is on NIC k, or why there is none."""
    if k > len(mr.domain.backups):
        return KeyState.NEVER, 0
    keys = mr.keys(k)
    if keys is not None:
        return KeyState.READY, keys[1]
    if mr.state(k) == "failed":
        return KeyState.NEVER, 0
    return (KeyState.HUNG if mr.domain.backups[k - 1].memory_hangs(HANGS_S) else KeyState.PENDING), 0


def push(told: Told) -> None:
    """Have one connection tell its peer of a withdrawal that it has not confirmed."""
    if told.unheard:
        away = told.away
        if away:
            away[0].keys.push()
