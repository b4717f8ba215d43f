# SPDX-License-Identifier: BSD-3-Clause
"""What two processes know of each other's memory keys, in any order of withdrawals, questions, answers and losses."""

from __future__ import annotations

import random
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from harness import wait_until

from shiftverbs import _core
from shiftverbs.failover.qp.connection_keys import ConnectionKeys
from shiftverbs.failover.services import memory_keys
from shiftverbs.failover.services.memory_keys import GONE_KEPT, KeyBook, PeerKeys, Told
from shiftverbs.protocol import codec
from shiftverbs.protocol.messages import FoundKey, Keys, KeyState, WantKeys


class Nic:
    """A NIC, which may hang."""

    def __init__(self) -> None:
        self.hanging = False
        self.plugs = SimpleNamespace(keys={})

    def memory_hangs(self, longer_than_s: float) -> bool:
        return self.hanging


class Mr:
    """A ShadowMR on one backup: its key there, None while it is being made, "failed"."""

    def __init__(self, domain: Any, rkey: int, there: Any) -> None:
        self.domain, self.rkey, self.lkey, self.there = domain, rkey, rkey, there

    def keys(self, k: int) -> tuple[int, int] | None:
        return (self.there, self.there) if isinstance(self.there, int) else None

    def state(self, k: int) -> str:
        return "failed" if self.there == "failed" else "pending" if self.there is None else "ready"


class User:
    """A connection, as far as keys are concerned."""

    def __init__(self) -> None:
        self.receives_away = False
        self.forgot: list[int | None] = []
        self.uses: dict[int | None, int] = {}  # rkey -> number behind the last WR by it that is under way
        self.core = SimpleNamespace(
            forget_rkey=self.forgot.append,
            oldest_wr=0,
            send_pair=1,
            last_use=lambda rkey: self.uses.get(rkey, 0),
        )

    @property
    def reached_away(self) -> bool:
        return self.receives_away


@pytest.fixture
def domain() -> Any:
    return SimpleNamespace(nic=Nic(), backups=[Nic()])


@pytest.fixture
def book() -> KeyBook:
    return KeyBook()


@pytest.fixture
def user() -> User:
    """Our connection with the peer."""
    return User()


@pytest.fixture
def told(book: KeyBook, domain: Any, user: Any) -> Told:
    """The peer, as our book knows it."""
    told = book.told("i", "g", domain.nic)
    told.users[user] = None
    return told


@pytest.fixture
def mr(book: KeyBook, domain: Any) -> Mr:
    """Memory of ours: 1, on the backup 101."""
    mr = Mr(domain, 1, 101)
    book.add(mr)
    return mr


@pytest.fixture
def their_user() -> User:
    """The peer's connection with us."""
    return User()


@pytest.fixture
def theirs(their_user: Any) -> PeerKeys:
    """What the peer knows."""
    theirs = PeerKeys(_core.RemoteKeys())
    theirs.users[their_user] = None
    return theirs


def ask(book: KeyBook, told: Told, theirs: PeerKeys, *rkeys: int) -> list[Keys]:
    """Every answer to one question, which fits into a datagram each."""
    answers = list(book.answers(told, WantKeys(theirs.version, rkeys, False), 1))
    for answer in answers:
        entry = codec.encode_entry(codec.Entry(0, 0, answer))
        assert answer.size <= 255 and codec._decode_body(entry[16], entry[18:]) == answer
    return answers


def known(theirs: PeerKeys, rkey: int) -> Any:
    try:
        return theirs.remote.get_remote(rkey, 1)
    except KeyError:
        return "?"


def test_what_is_asked_for_is_told(domain: Any, book: KeyBook, told: Told, theirs: PeerKeys) -> None:
    for rkey, there in ((1, 101), (2, None), (3, "failed")):
        book.add(Mr(domain, rkey, there))
    (answer,) = ask(book, told, theirs, 1, 2, 3, 4)
    assert [(found.rkey, found.on) for found in answer.found] == [
        (1, ((KeyState.READY, 101),)),
        (2, ((KeyState.PENDING, 0),)),
        (3, ((KeyState.NEVER, 0),)),
        (4, ()),
    ]
    assert theirs.take(answer)
    assert [known(theirs, rkey) for rkey in (1, 2, 3, 4)] == [101, "?", None, "?"]
    assert [theirs.knows(rkey, 1) for rkey in (1, 2, 3, 4)] == [True, False, True, False]
    assert not theirs.knows(1, 2), "another connection has two backups"
    domain.backups[0].hanging = True
    assert ask(book, told, theirs, 2)[0].found == (FoundKey(2, ((KeyState.HUNG, 0),)),)


def test_many_are_told_in_several_messages(domain: Any, book: KeyBook, told: Told, theirs: PeerKeys) -> None:
    for rkey in range(60):
        book.add(Mr(domain, rkey, 1000 + rkey))
    answers = ask(book, told, theirs, *range(60))
    assert len(answers) > 1
    assert all(theirs.take(answer) for answer in answers)
    assert all(known(theirs, rkey) == 1000 + rkey for rkey in range(60))


def test_a_withdrawal_is_heard_of_with_the_next_answer(
    domain: Any, book: KeyBook, told: Told, theirs: PeerKeys, their_user: User
) -> None:
    """Only what was withdrawn is forgotten, and it is new when it is seen again."""
    mrs = [Mr(domain, rkey, 100 + rkey) for rkey in range(4)]
    for mr in mrs:
        book.add(mr)
    theirs.take(*ask(book, told, theirs, 0, 1, 2))
    before = told.version
    book.remove(mrs[3])
    assert told.version == before, "nobody was told of that one"
    book.remove(mrs[1])
    book.remove(mrs[1])
    assert told.version == before + 1
    theirs.take(*ask(book, told, theirs, 3))
    assert [known(theirs, rkey) for rkey in range(3)] == [100, "?", 102]
    assert their_user.forgot == [1] and theirs.version == told.version
    assert ask(book, told, theirs) == [], "nothing to say"


def test_an_answer_that_a_withdrawal_overtook_is_not_used(
    book: KeyBook, told: Told, theirs: PeerKeys, mr: Mr
) -> None:
    late = ask(book, told, theirs, 1)[0]
    book.remove(mr)
    assert theirs.take(*ask(book, told, theirs, 2))
    assert not theirs.take(late)
    assert known(theirs, 1) == "?"


def test_who_heard_of_no_withdrawal_that_is_remembered_forgets_all(
    domain: Any, book: KeyBook, told: Told, theirs: PeerKeys, their_user: User
) -> None:
    keep = Mr(domain, 9999, 1)
    book.add(keep)
    theirs.take(*ask(book, told, theirs, 9999))
    mrs = [Mr(domain, rkey, rkey) for rkey in range(GONE_KEPT + 1)]
    for mr in mrs:
        book.add(mr)
        told.rkeys.add(mr.rkey)
        book.remove(mr)
    assert len(told.gone) == GONE_KEPT
    (answer,) = ask(book, told, theirs, 5)
    assert answer.since > theirs.version
    theirs.take(answer)
    assert known(theirs, 9999) == "?" and their_user.forgot == [None]


def test_what_ready_says_makes_older_answers_worthless(
    book: KeyBook, told: Told, theirs: PeerKeys, mr: Mr
) -> None:
    first = ask(book, told, theirs, 1)[0]
    theirs.take(first)
    theirs.heed(told.version)
    assert known(theirs, 1) == 101, "nothing was withdrawn"
    book.remove(mr)
    theirs.heed(told.version)
    assert known(theirs, 1) == "?" and not theirs.take(first) and known(theirs, 1) == "?"
    theirs.heed(0)
    assert theirs.version == told.version


def test_one_that_is_told_anew_is_not_taken_for_who_knew_before(
    domain: Any, book: KeyBook, told: Told, user: User, theirs: PeerKeys, mr: Mr
) -> None:
    """All its QPs here were closed meanwhile; over there one was still left."""
    theirs.take(*ask(book, told, theirs, 1))
    book.leave(told, user)  # type: ignore[arg-type]
    book.remove(mr)
    book.add(Mr(domain, 1, 202))
    again = book.told("i", "g", domain.nic)
    assert again is not told and again.version > theirs.version
    (answer,) = ask(book, again, theirs, 1)
    theirs.take(answer)
    assert known(theirs, 1) == 202


def test_a_key_given_out_again_waits_for_who_uses_what_it_knows(
    domain: Any, book: KeyBook, told: Told, user: User, theirs: PeerKeys, mr: Mr
) -> None:
    theirs.take(*ask(book, told, theirs, 1))
    assert book.remove(mr) == [], "at home it learns of that when it leaves"
    new = Mr(domain, 1, 202)
    book.add(new)
    assert book.await_confirmed(new, 10) == []
    ask(book, told, theirs, 1)
    user.receives_away = True
    assert book.remove(new) == [told]
    newer = Mr(domain, 1, 303)
    book.add(newer)
    assert book.await_confirmed(Mr(domain, 2, 0), 10) == [], "another key"
    assert book.await_confirmed(newer, 0.01) == [user]
    done: list[Any] = []
    thread = threading.Thread(target=lambda: done.append(book.await_confirmed(newer, 30)))
    thread.start()
    theirs.take(told.news())
    assert known(theirs, 1) == "?" and not done
    book.confirmed(told, theirs.version)
    thread.join(30)
    assert done == [[]]


@pytest.mark.parametrize("way", ["came home", "left"])
def test_it_waits_for_nobody_who_came_home_or_left(
    book: KeyBook, told: Told, user: User, mr: Mr, way: str
) -> None:
    told.rkeys.add(1)
    user.receives_away = True
    book.remove(mr)
    book.add(mr)
    assert book.await_confirmed(mr, 0.01) == [user]
    done: list[Any] = []
    thread = threading.Thread(target=lambda: done.append(book.await_confirmed(mr, 30)))
    thread.start()
    wait_until(lambda: book._changed._waiters, what="it waits")  # type: ignore[attr-defined]
    if way == "left":
        book.leave(told, user)  # type: ignore[arg-type]
    else:
        user.receives_away = False
    wait_until(lambda: done == [[]], what="it goes on")
    thread.join()


@pytest.mark.parametrize("end", ["settled", "left", "home"])
def test_a_key_is_held_until_no_peer_can_come_by_it(
    domain: Any, book: KeyBook, told: Told, user: User, theirs: PeerKeys, mr: Mr, end: str
) -> None:
    """Of two peers that were told, one has confirmed; then the other has, and its WRs are through, or it is gone."""
    (nic,) = domain.backups
    other, another = book.told("j", "g", domain.nic), User()
    other.users[another] = None  # type: ignore[arg-type]
    user.receives_away = another.receives_away = True
    for each in (told, other):
        ask(book, each, theirs, 1)
    assert not book.holds(nic, 2), "it is there"
    book.remove(mr)
    assert book.holds(nic, 2) and book.holds(nic, 2, 101) and not book.holds(nic, 2, 102)
    assert not book.holds(nic, 1, 101), "by the same rkey it would come at home, too"
    assert not book.holds(domain.nic, 2)
    book.confirmed(told, told.version)
    assert book.holds(nic, 2, 101), "the other one has not heard"
    book.confirmed(other, other.version, other.settled)
    assert book.holds(nic, 2, 101) and other.unheard, "a WR of its is on its way"
    if end == "settled":
        book.confirmed(other, other.version, other.version)
        assert not other.unheard
    elif end == "left":
        book.leave(other, another)  # type: ignore[arg-type]
    else:
        another.receives_away = False
    assert not book.holds(nic, 2) and not book.holds(nic, 2, 101)


def test_what_is_on_its_way_is_said(theirs: PeerKeys, their_user: User) -> None:
    """A withdrawal is heeded at once; that nothing comes by the old key any more is said when that is so."""
    other = User()
    theirs.users[other] = None  # type: ignore[arg-type]
    assert theirs.take(
        Keys(5, 0, (), (FoundKey(1, ((KeyState.READY, 101),)), FoundKey(2, ((KeyState.READY, 102),))))
    )
    assert (theirs.version, theirs.settled) == (5, 5)
    their_user.uses, other.uses = {1: 4}, {2: 9, None: 9}
    assert theirs.take(Keys(6, 5, (1,), push=True))
    assert (theirs.version, theirs.settled) == (6, 5)
    assert theirs.take(Keys(7, 6, (3,), push=True)) and theirs.settled == 5, "nobody uses that one"
    their_user.core.oldest_wr = 4
    assert theirs.settled == 7
    theirs.heed(8, other)  # type: ignore[arg-type]
    assert theirs.settled == 8, "it is told before it sends anything again"
    theirs.heed(9, their_user)  # type: ignore[arg-type]
    assert (theirs.version, theirs.settled) == (9, 8), "the other one's is on its way"
    theirs.users.pop(other)  # type: ignore[arg-type]
    assert theirs.settled == 9


def test_what_came_home_uses_no_key_of_a_backup(theirs: PeerKeys, their_user: User) -> None:
    """A WR that nobody signals, replayed at home: nothing tells of its end for as long as nothing else is posted."""
    their_user.uses = {1: 4}
    assert theirs.take(Keys(5, 0, (1,), push=True)) and theirs.settled == 0
    their_user.core.send_pair = 0
    assert theirs.settled == 5


def test_a_wr_that_never_ends_is_remembered_once(theirs: PeerKeys, their_user: User) -> None:
    """Its rkey comes and goes for others' sake."""
    their_user.uses = {1: 4}
    for version in range(1, 200):
        assert theirs.take(Keys(version, version - 1, (1,), push=True)) and theirs.settled == 0
    assert len(theirs._under_way) == 1
    their_user.uses = {1: 6}
    assert theirs.take(Keys(200, 199, (1,), push=True))
    their_user.core.oldest_wr = 4
    assert theirs.settled == 199 and len(theirs._under_way) == 1


def test_a_peer_that_never_settles_is_told_of_no_more_than_can_be_held(
    domain: Any,
    book: KeyBook,
    told: Told,
    user: User,
    theirs: PeerKeys,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory_keys, "HELD_MOST", 20)
    user.receives_away = True
    for rkey in range(100):
        mr = Mr(domain, rkey, 1000 + rkey)
        book.add(mr)
        theirs.take(*ask(book, told, theirs, rkey))
        book.confirmed(told, theirs.version, told.settled)
        if rkey < 99:
            book.remove(mr)
    assert len(told.held) == 20 and known(theirs, 99) == "?"
    (answer,) = book.answers(told, WantKeys(theirs.version, (99,), False), 1)
    assert answer.found[0].on[0] == (KeyState.PENDING, 0)
    monkeypatch.setattr(memory_keys, "HANGS_S", 0.0)
    (answer,) = book.answers(told, WantKeys(theirs.version, (99,), False), 1)
    assert answer.found[0].on[0] == (KeyState.HUNG, 0)
    book.confirmed(told, told.version, told.version)
    theirs.take(*ask(book, told, theirs, 99))
    assert known(theirs, 99) == 1099 and not told.held


def test_no_more_is_remembered_than_a_peer_can_use(
    domain: Any, book: KeyBook, told: Told, theirs: PeerKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that registers for each transfer: both sides stay as they are."""
    monkeypatch.setattr(memory_keys, "KNOWN_MOST", 50)
    for rkey in range(500):
        mr = Mr(domain, rkey, rkey)
        book.add(mr)
        theirs.take(*ask(book, told, theirs, rkey))
        assert known(theirs, rkey) == rkey
        if rkey % 2:
            book.remove(mr)
    assert len(theirs.remote) <= 51 and len(theirs._known) <= 51
    assert len(told.gone) <= GONE_KEPT and len(told.rkeys) == 250


@pytest.mark.parametrize("seed", range(40))
def test_no_stale_key_is_used_whatever_is_lost_or_late(
    domain: Any, book: KeyBook, told: Told, user: User, theirs: PeerKeys, seed: int
) -> None:
    """READY and confirmations come through; all else may be lost, doubled, or very late."""
    rng = random.Random(seed)
    mrs: dict[int, Mr] = {}
    late: list[Keys] = []
    there = 1000
    for _ in range(600):
        what = rng.randrange(6)
        rkey = rng.randrange(6)
        if what == 0:
            if rkey in mrs:
                book.remove(mrs.pop(rkey))
            there += 1
            mrs[rkey] = Mr(domain, rkey, there)
            book.add(mrs[rkey])
        elif what == 1 and rkey in mrs:
            book.remove(mrs.pop(rkey))
        elif what == 2:
            late += ask(book, told, theirs, rkey)
        elif what == 3 and late:
            theirs.take(rng.choice(late))
        elif what == 4:
            late = late[-20:]
            late.append(told.news())
        else:
            book.confirmed(told, theirs.version)
        # The peer goes by what it knows when it is up to date, by its own belief or because READY says so.
        user.receives_away = True
        trusted = [r for r in mrs if not told.awaits(r)] if rng.random() < 0.5 else list(mrs)
        if len(trusted) == len(mrs):
            theirs.heed(told.version)
        for each in trusted:
            assert known(theirs, each) in ("?", mrs[each].there), seed


def test_who_comes_home_leaves_what_it_pushes_to_another_that_is_away(
    book: KeyBook, told: Told, domain: Any
) -> None:
    """Its push was lost, and nobody else had a time for the next."""
    said: list[str] = []

    def connection(name: str) -> Any:
        made: Any = User()
        made.receives_away, made.recv_pair, made.wake_up = True, 1, lambda: None
        made.driver = SimpleNamespace(keys=book, now_ns=lambda: 0)
        made.say = lambda *args, **options: said.append(name)
        made.keys = ConnectionKeys(made)
        made.keys._told = told
        return made

    first, second = connection("first"), connection("second")
    told.users.clear()
    told.users.update({first: None, second: None})
    mr: Any = Mr(domain, 1, 101)
    book.add(mr)
    list(book.answers(told, WantKeys(told.version, (1,), False), 1))
    assert book.remove(mr) == [told]
    memory_keys.push(told)
    first.receives_away = False
    first.keys.on_time(first.keys.due_ns)
    assert said == ["first", "second"]
    assert first.keys.due_ns is None and second.keys.due_ns is not None


def test_only_the_nic_that_a_wr_waits_for_can_make_it_hopeless(domain: Any, theirs: PeerKeys) -> None:
    """Another backup hung, which carried nothing, and traffic ended where it would soon have gone on."""
    nics = [domain.nic, Nic(), Nic()]
    lacks = {"send": {7}, "recv": {8}, "remote": {9}}
    core = SimpleNamespace(
        send_pair=1,
        recv_pair=2,
        missing_keys=lambda k, r: (
            (lacks["send"] if k else set()) | (lacks["recv"] if r else set()),
            lacks["remote"] if k else set(),
        ),
    )
    driver = SimpleNamespace(
        keys=KeyBook(),
        now_ns=lambda: 0,
        protocol_config=SimpleNamespace(peer_deadline_ns=1000),
        later=lambda c, then: None,
    )
    connection: Any = SimpleNamespace(
        driver=driver,
        core=core,
        n_pairs=3,
        nic=nics.__getitem__,
        device=lambda k: f"nic{k}",
        keys_arrived=lambda: None,
    )
    theirs.users = [connection]  # type: ignore[assignment]
    for key in (7, 8):
        driver.keys.add(Mr(domain, key, None))
    keys = ConnectionKeys(connection)
    keys._theirs = theirs
    keys.want([9])
    pending, hung = (KeyState.PENDING, 0), (KeyState.HUNG, 0)

    keys.on_message(Keys(0, 0, (), (FoundKey(9, (pending, hung)),)))
    assert keys.hopeless(0, 1) is None, "the peer's second NIC hangs, and the first one carries our sends"
    core.send_pair = 2
    assert "peer's NIC hangs" in (keys.hopeless(0, 1) or "")
    keys.on_message(Keys(0, 0, (), (FoundKey(9, (hung, pending)),)))
    assert keys.hopeless(0, 1) is None

    lacks["remote"] = lacks["recv"] = set()
    core.send_pair = 1
    nics[2].hanging = True
    assert keys.hopeless(0, 1) is None, "only sends lack a key, and they are on the first one"
    lacks["recv"] = {8}
    assert keys.hopeless(0, 1) == "nic2 hangs: the memory of lkey 0x8 is not registered there"
    lacks["recv"] = set()
    nics[1].hanging = True
    assert keys.hopeless(0, 1) == "nic1 hangs: the memory of lkey 0x7 is not registered there"
