# SPDX-License-Identifier: BSD-3-Clause
"""The journal of the simulator (tests/simulator/journal.py) against the data path itself: same steps, same sights.

What the virtual-time schedules prove, they prove of that model of the data path. Here both get the same posts,
completions, failures, fences, trims, resets and moves, in an order of chance, on hardware that does what it is told.
Compared after each step: what the hardware was given (queue, kind, number, operation, flags, on which pair), the
application's WCs, the driver's events, what calls returned, counters and gates.

Left out is what the simulator has no use for: keys, several SGEs, chains, errors that are the application's own. A
failure names its seed and all steps; `SHIFTVERBS_MODEL_SEEDS=1000:5000` looks at others.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from typing import Any

import fake
import pytest
from fake import FAA, FLUSH, READ, RETRY_EXC, SEND, SEQ_MASK, SIGNALED, SUCCESS, WRITE, WRITE_IMM, World
from pyverbs.pyverbs_error import PyverbsRDMAError
from simulator.journal import APP, ARM, FENCE, MARKER, Journal, Wr
from simulator.mutations import MUTATIONS

from shiftverbs import _core

NICS = 3
CAP = 6
LENGTH = 120
SEEDS = range(*map(int, os.environ.get("SHIFTVERBS_MODEL_SEEDS", "0:400").split(":")))
OPCODES = {"SEND": SEND, "WRITE": WRITE, "WRITE_IMM": WRITE_IMM, "READ": READ, "FADD": FAA}
NAMES = {number: name for name, number in OPCODES.items()}
KINDS = [APP, MARKER, ARM, FENCE]
STATUS = {"SUCCESS": SUCCESS, "RETRY_EXC_ERR": RETRY_EXC, "WR_FLUSH_ERR": FLUSH}
OFTEN = ["SEND", "SEND", "SEND", "WRITE", "WRITE", "WRITE_IMM", "READ", "READ", "FADD"]
EVENTS = {
    getattr(_core, f"EV_{name}"): name
    for name in "ERROR APP_ERROR POST_FAILED SQ_FENCED RQ_FENCED ARM_WC FENCE_POSTED FENCE_DONE RX_REACHED".split()
}


class ScriptedQp:
    """A hardware QP of the model: keeps what is posted and does what it is told, as fake.HwQP does."""

    class Nic:
        dead = False

    nic = Nic()

    def __init__(self) -> None:
        self.posts: tuple[list[Any], list[Any]] = ([], [])  # (hw_id, opcode, signaled, fence), by queue
        self.done = [0, 0]
        self.cqes: list[tuple[str, Any, str]] = []
        self.refusal = [0, 0]

    def post_send(self, wqe: Any) -> int:
        return self._post(0, (wqe.wr_id, wqe.opcode, wqe.signaled, wqe.fence))

    def post_recv(self, hw_id: Any, buf: Any) -> int:
        del buf
        return self._post(1, (hw_id, "RECV", True, False))

    def _post(self, queue: int, what: Any) -> int:
        err, self.refusal[queue] = self.refusal[queue], 0
        if not err:
            self.posts[queue].append(what)
        return err

    def complete(self, queue: int, status: str, silent: bool) -> bool:
        """The next post ends; silent: with success and unsignaled, it shows nothing."""
        if self.done[queue] >= len(self.posts[queue]):
            return False
        hw_id, _, signaled, _ = self.posts[queue][self.done[queue]]
        self.done[queue] += 1
        if signaled or not silent:
            self.cqes.append(("recv" if queue else "send", hw_id, status))
        return True

    def reset(self) -> None:
        self.done = [len(self.posts[0]), len(self.posts[1])]


Step = Callable[["Comparison"], None]
STEPS: list[tuple[Step, int, Callable[[Comparison], bool]]] = []


def step(weight: int, when: Callable[[Comparison], bool] = lambda self: True) -> Callable[[Step], Step]:
    """Enter a method into STEPS: how often it comes up, and where it may."""

    def enter(method: Step) -> Step:
        STEPS.append((method, weight, when))
        return method

    return enter


class Comparison:
    """Steps are what application, hardware and driver do. left: the data path; right: the model."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        _core.set_driver(None)
        self.world = World(fake.library(), nics=NICS, max_send=CAP, max_recv=CAP, shared_cq=True)
        self.world.pair_keys()
        self.core = self.world.qp
        self.cq = self.world.scq
        for k in range(1, NICS):
            self.cq.set_active(k, True)
        _core.clear_attention()
        _core.take_events()
        self.hw = [ScriptedQp() for _ in range(NICS)]
        self.events: list[tuple[str, int]] = []
        self.wcs: list[tuple[str, int, str]] = []
        self.model = Journal(
            self.hw,  # type: ignore[arg-type]
            CAP,
            CAP,
            lambda kind, k, value: self.events.append((kind, k)),
            lambda wc: self.wcs.append((wc[0], wc[1].wr_id, wc[2])),
        )
        self.model.look = self.model_drain
        self.wr_ids = 0
        self.areas: list[list[Any]] = [[0] for _ in range(4)]  # memory of send WRs: some have the same
        self.broken: set[int] = set()  # pairs in ERR
        self.fenced: set[int] = set()
        self.used = {0}
        self.away = False  # both gates closed for a SWITCH
        self.moving = False  # a MOVE of the send direction is under way
        self.over = False  # given up: the application would now reset its QP

        guarded = self.rng.random() < 0.8
        self.core.guarded = self.model.guarded = guarded
        for _ in range(self.rng.randrange(CAP + 1)):
            self.post_recv()

    def close(self) -> None:
        self.world.close()
        _core.take_events()

    def walk(self, steps: int, told: list[str]) -> None:
        """Take so many steps, and compare behind each."""
        for _ in range(steps):
            possible = [(method, weight) for method, weight, when in STEPS if when(self)]
            (method,) = self.rng.choices([m for m, _ in possible], [w for _, w in possible])
            told.append(method.__name__)
            method(self)
            self.hardware_was_given_the_same()
            self.the_driver_hears_the_same()
            self.counters_and_gates_agree()

    # --- both sides at once

    def model_drain(self, k: int) -> None:
        cqes, self.hw[k].cqes = self.hw[k].cqes, []
        for cqe in cqes:
            self.model.dispatch(k, cqe)

    def complete(self, k: int, queue: int, status: str = "SUCCESS") -> bool:
        """The next post of pair k's queue ends so, on both."""
        left = self.world.hw[k]
        ok = status == "SUCCESS"
        if not self.hw[k].complete(queue, status, silent=ok):
            assert left.done[queue] == left.count(bool(queue))
            return False
        if ok and queue:
            left.receive()
        elif ok:
            left.complete()
        elif queue:
            left.fail_recv(STATUS[status])
        else:
            left.fail_send(STATUS[status])
        return True

    def into_error(self, k: int) -> None:
        """Everything outstanding on pair k ends with an error."""
        status = "WR_FLUSH_ERR" if k in self.broken else "RETRY_EXC_ERR"
        self.broken.add(k)
        while self.complete(k, 0, status):
            status = "WR_FLUSH_ERR"
        while self.complete(k, 1, "WR_FLUSH_ERR"):
            pass

    def drain_both(self, k: int) -> None:
        self.cq.drain(k)
        self.model_drain(k)

    # --- the application

    @step(12, lambda self: not self.over)
    def post_sends(self) -> None:
        rng = self.rng
        for _ in range(rng.randrange(1, 5)):
            self.post_send(rng.choice(OFTEN), rng.random() < 0.4, rng.random() < 0.2)

    def post_send(self, opcode: str, signaled: bool, fence: bool) -> None:
        self.wr_ids += 1
        wr = Wr("a", self.wr_ids, opcode, 0, 0, signaled, fence, False)
        area = self.rng.randrange(len(self.areas))
        wr.buf = self.areas[area]
        flags = (SIGNALED if signaled else 0) | (fake.FENCE if fence else 0)
        err = self.model.post_send(wr)
        if err == errno.ENOMEM and self.hw[self.model.send_pair].cqes:
            # A full journal makes the data path look for completions itself.
            self.model_drain(self.model.send_pair)
            err = self.model.post_send(wr)
        try:
            self.world.send(self.wr_ids, OPCODES[opcode], flags, sges=[(0x1000 + 64 * area, 64, 1)])
        except PyverbsRDMAError as error:
            assert error.error_code == err
        else:
            assert err == 0

    @step(6, lambda self: not self.over)
    def post_recvs(self) -> None:
        for _ in range(self.rng.randrange(1, 5)):
            self.post_recv()

    def post_recv(self) -> None:
        self.wr_ids += 1
        err = self.model.post_recv(self.wr_ids, [None])
        if err == errno.ENOMEM and self.hw[self.model.recv_pair].cqes:
            self.model_drain(self.model.recv_pair)
            err = self.model.post_recv(self.wr_ids, [None])
        try:
            self.world.recv(self.wr_ids)
        except PyverbsRDMAError as error:
            assert error.error_code == err
        else:
            assert err == 0

    @step(8)
    def poll(self) -> None:
        """All that there is, from every NIC."""
        _, wcs = self.cq.poll(500)
        seen = [("recv" if wc.opcode & 128 else "send", wc.wr_id, wc.status) for wc in wcs]
        for k in range(NICS):
            self.model_drain(k)
        wanted, self.wcs = self.wcs, []
        # An error WC has no opcode: the queue it is of is compared only where it is known.
        assert [wc[1:] for wc in seen] == [(wr_id, STATUS[status]) for _, wr_id, status in wanted]
        for got, want in zip(seen, wanted, strict=True):
            assert got[2] != SUCCESS or got[0] == want[0]

    # --- the hardware

    @step(8)
    def sends_complete(self) -> None:
        n = self.rng.randrange(1, 4)
        for k in sorted(self.used - self.broken):
            for _ in range(n):
                self.complete(k, 0)

    @step(6)
    def messages_arrive(self) -> None:
        n = self.rng.randrange(1, 4)
        for k in sorted(self.used - self.broken):
            for _ in range(n):
                self.complete(k, 1)

    @step(2)
    def dummies_complete(self) -> None:
        recv = self.rng.random() < 0.5
        for k in sorted(set(range(NICS)) - self.used - self.broken):
            self.complete(k, int(recv))

    @step(2, lambda self: self.core.guarded)
    def path_fails(self) -> None:
        self.into_error(self.rng.choice(sorted(self.used)))

    @step(1, lambda self: self.core.guarded)
    def post_is_refused(self) -> None:
        """The next post on the pair in use fails: the WR is at fault, or the QP is in ERR, or the device is gone."""
        recv = self.rng.random() < 0.5
        k = self.model.recv_pair if recv else self.model.send_pair
        err = self.rng.choice([errno.EINVAL, errno.EINVAL, errno.EIO])
        self.hw[k].refusal[recv] = err
        self.world.hw[k].fail(0, err, recv)

    # --- the driver

    @step(2, lambda self: not self.over and not self.core.guarded)
    def guard(self) -> None:
        self.core.guarded = self.model.guarded = True

    @step(1, lambda self: self.core.guarded and not self.away and not self.moving)
    def nothing_is_withheld_any_more(self) -> None:
        """The peer has left, or the application moves its QP; of errors withheld just now nobody has heard yet."""
        if self.rng.random() < 0.7:
            return  # it is the end
        if self.rng.random() < 0.5:
            self.path_fails()
            self.drain_both(self.rng.randrange(NICS))
        self.core.guarded = self.model.guarded = False
        self.over = True
        if self.rng.random() < 0.5:
            self.path_fails()

    @step(3)
    def drain(self) -> None:
        self.drain_both(self.rng.randrange(NICS))

    @step(4, lambda self: self.core.guarded and not self.away)
    def fence(self) -> None:
        """Close, ERR on every used pair, markers behind everything; the flushes are taken now or later."""
        late = self.rng.random() < 0.5
        self.away = True
        self.moving = False
        self.core.close_send()
        self.core.close_recv()
        self.model.close_send()
        self.model.recv_open = False
        for k in sorted(self.used):
            self.core.begin_fence(k)
            self.model.begin_fence(k)
        for k in sorted(self.used):
            self.forget_refusals(k)
            self.into_error(k)
            self.core.post_marker(k)
            self.model.post_marker(k)
            self.into_error(k)
            if not late:
                self.drain_both(k)

    def forget_refusals(self, k: int) -> None:
        for recv in (False, True):
            self.hw[k].refusal[recv] = 0
            self.world.hw[k].fail(1 << 40, 0, recv)

    @step(20, lambda self: self.away and self.core.guarded)
    def switch(self) -> None:
        """The fence is complete, the peer says how much it received; reset, trim, replay."""
        for k in sorted(self.used):
            self.drain_both(k)
            assert self.core.fence_state(k) == self.model.fence_state(k) == (True, True)
        _, acked, wired = self.model.counters()
        assert self.core.counters() == self.model.counters()
        target = self.rng.randrange(NICS)
        for k in sorted(self.used | {target}):
            self.reset(k)
        off = self.rng.choice([0] * 20 + [-1, 1])
        peer_rx = max(0, self.rng.randint(acked, wired) + off)
        assert self.core.open_recv(target) == 0
        self.model.open_recv(target)
        try:
            self.model.trim(peer_rx)
        except ValueError:
            try:
                self.core.trim(peer_rx)
            except ValueError:
                self.give_up()
                return
            raise AssertionError(f"trim({peer_rx}) was accepted") from None
        self.core.trim(peer_rx)
        self.core.open_send(target)
        self.model.open_send(target)
        self.used = {target}
        self.away = False

    def reset(self, k: int) -> None:
        self.drain_both(k)
        self.forget_refusals(k)
        self.core.forget_pair(k)
        self.model.forget(k)
        self.world.hw[k].reset()
        self.hw[k].reset()
        self.broken.discard(k)
        self.core.pair_reset(k)
        self.model.pairs[k].renew()

    def give_up(self) -> None:
        """ABORT: errors for all that is outstanding; no more failover."""
        for k in range(NICS):
            self.forget_refusals(k)
        self.core.abort(RETRY_EXC, 0)
        self.model.abort("RETRY_EXC_ERR")
        self.over = True
        self.away = self.moving = False

    @step(1, lambda self: self.away and self.core.guarded)
    def abort(self) -> None:
        for k in sorted(self.used):
            self.drain_both(k)
        self.give_up()

    @step(4, lambda self: self.core.guarded and not self.away and not self.moving and self.model.send_open)
    def move_begins(self) -> None:
        """The fence of a MOVE is looked for; sometimes ours is posted where there is none."""
        write = self.rng.random() < 0.5
        hw = self.hw[self.model.send_pair]
        if any(hw_id[1] == FENCE for hw_id, *_ in hw.posts[0][hw.done[0] :]):
            return  # room for our own WRs is not without end
        self.moving = True
        how = self.core.move_begin()
        assert how == self.model.move_begin()
        if how == "wanted" and write:
            before = len(self.events)
            self.model.post_fence_write()
            posted = ("FENCE_POSTED", self.model.send_pair) in self.events[before:]
            if (
                self.core.post_fence_write(0, 7) == 0
            ):  # the driver takes the 0 for what the simulator says by an event
                assert posted
                self.events.remove(("FENCE_POSTED", self.model.send_pair))

    @step(4, lambda self: self.moving and not self.away and self.core.guarded)
    def move_ends(self) -> None:
        """All completes and the direction moves; or the MOVE is called off."""
        cancelled = self.rng.random() < 0.3
        self.moving = False
        source = self.model.send_pair
        target = (source + self.rng.randrange(1, NICS)) % NICS
        while not cancelled and source not in self.broken and self.complete(source, 0):
            pass
        self.drain_both(source)
        under_way = self.model.fence_seq is not None or self.model.fence_wanted
        if cancelled or under_way or source in self.broken:
            self.core.move_cancel()
            self.model.move_cancel()
            return
        if target not in self.used:
            self.reset(target)
        self.used.add(target)
        self.core.open_send(target)
        self.model.open_send(target)

    @step(3, lambda self: self.core.guarded and not self.away and self.model.recv_open)
    def move_recv(self) -> None:
        target = (self.model.recv_pair + self.rng.randrange(1, NICS)) % NICS
        if target in self.used:
            return
        self.drain_both(self.model.recv_pair)
        self.reset(target)
        self.used.add(target)
        assert self.core.move_recv(target) == 0
        self.model.move_recv(target)

    @step(3, lambda self: not self.away)
    def arm(self) -> None:
        """A pair that carries nothing is reset and gets a dummy."""
        k, sends = self.rng.randrange(NICS), self.rng.random() < 0.7
        if k in (self.model.send_pair, self.model.recv_pair) or self.over:
            return
        self.reset(k)
        self.used.discard(k)
        assert self.core.post_arm_recv(k) == self.model.post_arm_recv(k) == 0
        if sends:
            assert self.core.post_arm_send(k) == self.model.post_arm_send(k) == 0

    @step(2, lambda self: not self.away and not self.over and self.core.guarded and len(self.used) < NICS)
    def fence_meets_reset(self) -> None:
        """A RESET is given for an idle pair; a fence begins before its result is here; the ERR comes behind it."""
        rng = self.rng
        k = rng.choice(sorted(set(range(NICS)) - self.used))
        self.drain_both(k)
        self.forget_refusals(k)
        self.core.forget_pair(k)
        self.model.forget(k)
        if rng.random() < 0.3:  # the fence of an earlier SWITCH had begun before
            self.into_error(k)
            self.drain_both(k)
        self.core.begin_fence(k)
        self.model.begin_fence(k)
        if rng.random() < 0.7:  # else the NIC refused the RESET
            self.world.hw[k].reset()
            self.hw[k].reset()
            self.broken.discard(k)
            self.core.pair_reset(k)
            self.model.pairs[k].renew()
            if rng.random() < 0.5:
                assert self.core.post_arm_recv(k) == self.model.post_arm_recv(k) == 0
        self.into_error(k)
        self.core.post_marker(k)
        self.model.post_marker(k)
        self.into_error(k)
        self.drain_both(k)
        assert self.core.fence_state(k) == self.model.fence_state(k) == (True, True)
        self.reset(k)

    @step(2)
    def await_rx(self) -> None:
        ahead = self.rng.choice([None, 0, 1, 2, 3])
        target = None if ahead is None else self.model.rx + ahead
        self.core.set_rx_target(target)
        self.model.set_rx_target(target)

    # --- always

    def hardware_was_given_the_same(self) -> None:
        for k in range(NICS):
            left = self.world.hw[k]
            for recv in (False, True):
                given = []
                for post in left.posts(recv=recv):
                    assert post.wr_id >> 63 == recv
                    kind = KINDS[(post.wr_id >> 60) & 7]
                    if recv:
                        given.append((kind, post.wr_id & SEQ_MASK, "RECV", True, False))
                    else:
                        flags = bool(post.flags & SIGNALED), bool(post.flags & fake.FENCE)
                        given.append((kind, post.wr_id & SEQ_MASK, NAMES[post.opcode], *flags))
                wanted = [(hw_id[1], hw_id[3], *rest) for hw_id, *rest in self.hw[k].posts[recv]]
                assert given == wanted, f"pair {k}, {'receives' if recv else 'sends'}"

    def the_driver_hears_the_same(self) -> None:
        heard = [(EVENTS[kind], k) for kind, k, _, _ in self.world.events() if kind in EVENTS]
        told, self.events = self.events, []
        assert heard == told

    def counters_and_gates_agree(self) -> None:
        model, core = self.model, self.core
        assert core.counters() == model.counters()
        assert core.outstanding == (model.tail - model.head, model.rtail - model.rhead)
        assert (core.send_pair, core.recv_pair) == (model.send_pair, model.recv_pair)
        assert (core.send_is_open, core.recv_is_open) == (model.send_open, model.recv_open)
        assert core.guarded == model.guarded
        assert core.shown_error == (0 if model.shown_error is None else STATUS[model.shown_error])
        for k in range(NICS):
            assert core.failed_wr(k) == model.pairs[k].failed_wr
        for cqes, receipts in ((False, False), (False, True), (True, False), (True, True)):
            left = core.unsafe_reason(cqes_lost=cqes, receipts_lost=receipts)
            right = model.unsafe_reason(cqes, receipts)
            assert (left is None) == (right is None), (left, right)


def compare(seed: int) -> None:
    """One walk. Raises AssertionError with the seed and the steps."""
    comparison = Comparison(seed)
    told: list[str] = []
    try:
        comparison.walk(LENGTH, told)
    except (AssertionError, IndexError, ValueError) as error:
        raise AssertionError(f"seed {seed}: {error}\n{' '.join(told)}") from error
    finally:
        comparison.close()


def test_the_simulators_journal_is_the_data_paths() -> None:
    for seed in SEEDS:
        compare(seed)


@pytest.mark.parametrize(
    "name",
    [
        "do_not_trim",
        "trim_one_too_many",
        "prove_a_read_by_the_counter",
        "complete_a_trimmed_wr_twice",
        "swallow_completions_of_trimmed_wrs",
        "lose_the_withheld_queue",
        "swallow_what_was_withheld",
        "put_the_fence_behind_all_that_waits",
    ],
)
def test_a_model_that_differs_is_noticed(name: str) -> None:
    """Bugs of the simulator's list, put into the model alone."""
    _, patch = MUTATIONS[name]
    for seed in SEEDS:
        try:
            with patch():
                compare(seed)
        except AssertionError:
            return
    raise AssertionError(f"{name}: not noticed")
