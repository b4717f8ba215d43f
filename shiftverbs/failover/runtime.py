# SPDX-License-Identifier: BSD-3-Clause
"""The failover machinery of this process: started with the first Context, stopped at exit, dead in a forked child.

`current()` is what the mirror asks. It starts everything on first use: NIC threads, the control thread, the exchanger.
Where that is off, not configured or impossible, it returns None and `why_not()` says why; the program then runs as with
plain pyverbs.
"""

from __future__ import annotations

import atexit
import collections
import functools
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from shiftverbs import _core
from shiftverbs.config import Config, ConfigError
from shiftverbs.failover.driver import Driver
from shiftverbs.failover.qp import changes
from shiftverbs.failover.qp.connection import Connection
from shiftverbs.failover.services import memory_keys
from shiftverbs.failover.services.machine import Machine, ThisMachine
from shiftverbs.native.ibv import EventType, QpState
from shiftverbs.process.log_lines import LAST_LINES_S
from shiftverbs.process.waiting import in_slices
from shiftverbs.pyverbs_error import ShiftError
from shiftverbs.shadows import async_events, pyverbs_objects
from shiftverbs.shadows.mr import Patience
from shiftverbs.shadows.nic import BackupError, Nic, Nics

if TYPE_CHECKING:
    from shiftverbs._nic import AsyncEventRaw, NicWorker
    from shiftverbs.shadows.mr import ShadowMR
    from shiftverbs.shadows.qp import ShadowQP

logger = logging.getLogger("shiftverbs.runtime")

GRACE_US = 300
# Where a QP may still write into memory that is about to be the application's, its NIC is waited for so long: a command
# to hardware that is dying takes up to a minute.
STOP_DMA_S = 60.0
# One that refuses is asked again for so long.
REFUSING_S = 2.0
# How long the end of the process waits for whoever is in the driver, perhaps on a NIC that hangs.
STOP_S = 2.0
# Among what multiprocessing calls at the end of its children.
LAST_OF_ALL = -1_000_000
# Why nothing is protected in a forked child.
FORKED = "the process was forked after failover had started"
# Who is called with each Runtime that was started, and may return what is to be called at its end.
_at_start: list[Callable[[Runtime], Callable[[], None] | None]] = []
_STATES: dict[int, str] = {QpState.RESET: "RESET", QpState.SQD: "SQD", QpState.SQE: "SQE", QpState.ERR: "ERR"}


def _nobody_waits(_err: int) -> None:
    """The end of a command that only its NIC had to hear of."""


class ApplicationContext(Protocol):
    """A Context of the application's, as far as this looks at it: the face is above."""

    @property
    def name(self) -> str:
        """Its device."""


class Domain:
    """One Context of the application: its NIC, what backs it up, and the keys of its memory.

    nic: our own handle on the same device; backups: in order; keymap: lkeys; async_events: the application's events.
    """

    def __init__(
        self, runtime: Runtime, nic: Nic, backups: list[Nic], events: async_events.AsyncEvents
    ) -> None:
        self.runtime = runtime
        self.nic = nic
        self.backups = backups
        self.keymap = _core.KeyMap(runtime.group(nic))
        self.async_events = events


class Runtime:
    """Everything that runs behind the application in one process. Made by `current()`.

    config: what the user configured; machine: what it all stands on. Raises OSError and ShiftError.
    """

    def __init__(self, config: Config, machine: Machine) -> None:
        self.machine = machine
        self.config = config
        self.pid = os.getpid()
        self.instance = f"{machine.random_bits(64):016x}"
        self.waiter = machine.waiter()
        self._keys_coming = False  # whether that is posted to the driver already
        self.nics = Nics(self._make_worker, machine.verbs)
        exchanger = machine.exchanger(config)
        if exchanger is None:
            raise ShiftError("SHIFTVERBS_ETCD is not set")
        self.exchanger = exchanger
        self.driver = Driver(config, exchanger, self.instance, self.waiter, self.nics.all, machine)
        self._groups: dict[Nic, _core.QPGroup] = {}
        self.patience: dict[Nic, Patience] = collections.defaultdict(Patience)
        self._stopped = False
        self.started_ns = machine.now_ns()
        self.metrics_port: int | None = None
        machine.set_driver(self.driver.run)
        self._thread = machine.start_thread(self._control, "shiftverbs-control")
        self._dropped: queue.SimpleQueue[bool | None] = queue.SimpleQueue()
        self._closing = machine.start_thread(self._close_dropped, "shiftverbs-closing")
        _core.when_dropped(self._dropped.put)
        # What ends with this.
        self._at_stop = [stop for stop in (begin(self) for begin in _at_start) if stop is not None]

    def _make_worker(self, name: str) -> NicWorker:
        return self.machine.worker(name, self.waiter)

    def _control(self) -> None:
        """The control thread: sleeps without the GIL, runs the driver when no application thread did."""
        _core.closes_nothing_here()
        while not self._stopped:
            self.waiter.wait(-1, GRACE_US)
            if self._stopped or self.waiter.closed:
                return
            self.driver.run()

    def _close_dropped(self) -> None:
        """Another thread: closes what nobody names any more, and could not be closed where that was found out."""
        ends = None
        while not ends:
            ends = self._dropped.get()
            _core.close_dropped()

    # ---- what the mirror calls --------------------------------------------------------------------------------------

    @property
    def is_inherited(self) -> bool:
        """Whether this is a forked child's copy: nothing of it works here."""
        return self.pid != os.getpid()

    def group(self, nic: Nic) -> _core.QPGroup:
        """The QPGroup of all Contexts of one NIC."""
        return self._groups.setdefault(nic, _core.QPGroup())

    def domain(self, context: ApplicationContext, known: Callable[[], Domain | None]) -> Domain | None:
        """The domain of an application's Context; None where its device has no backup, or it was closed meanwhile.

        known: what it has by then. Raises BackupError where SHIFTVERBS_BACKUP cannot be followed.
        """
        backup_map = dict(self.config.backup) if self.config.backup is not None else {}
        nic, backups = self.nics.for_device(context.name, backup_map)
        nic.wait_open(3.0)
        pointer = pyverbs_objects.pointer(context)
        found = known()
        if found is not None or not pointer:
            return found  # a signal's handler made it, or closed the Context, in these waits
        if not nic.is_open:
            raise BackupError(f"{nic.name} cannot be opened a second time: {nic.error}")
        if not backups:
            return None
        events = async_events.AsyncEvents(
            pointer, pyverbs_objects.async_fd(context), nic.verbs.get_async_event
        )
        domain = Domain(self, nic, backups, events)
        events.listener = self._on_application_event

        def watch() -> None:
            for each in (nic, *backups):
                self.driver.nic_events.watch_nic(each)
            self.driver.nic_events.watch_events(events)

        self.driver.post(watch)
        return domain

    def context_closing(self, domain: Domain) -> None:
        """A Context is about to be closed: this was its domain."""
        if not self.is_inherited:
            domain.async_events.close()
            self.driver.nic_events.unwatch_events(domain.async_events)

    def _on_application_event(self, event: AsyncEventRaw) -> None:
        """An event of an application's Context, whoever took it: QP_FATAL comes to the QP's own context only."""
        if event.type == EventType.QP_FATAL:
            element = event.element
            self.driver.post(lambda: self.driver.nic_events.qp_fatal(element))

    def mr_made(self, shadow: ShadowMR) -> None:
        """An MR was registered, and nobody has its keys yet."""
        self.driver.keys.add(shadow)

    def await_peers(self, shadow: ShadowMR) -> None:
        """Wait until no peer takes this MR's rkey for another's that had it before; as a rule none does."""
        if self._stopped or self.is_inherited:
            return
        for connection in self.driver.keys.await_confirmed(shadow, self.config.peer_deadline_ms / 1000):
            # It may still use what the key stood for: better an error than the wrong memory.
            reason = f"the peer does not confirm that rkey {shadow.rkey:#x} was withdrawn"
            self.driver.post(functools.partial(connection.keys_missing, reason))

    def holds_key(self, nic: Nic, of: int, rkey: int | None = None) -> bool:
        """Whether peers' WRs may still come to a backup NIC by a key of former memory (rkey: this one), not as `of`."""
        return self.driver.keys.holds(nic, of, rkey)

    def mr_shadowed(self, shadow: ShadowMR) -> None:
        """Every backup NIC has answered for an MR: WRs may wait for its keys. From any thread."""
        if not self._keys_coming:
            self._keys_coming = True
            self.driver.post(self._keys_came)

    def _keys_came(self) -> None:
        self._keys_coming = False  # first: what comes from now on may come too late for this
        for connection in list(self.driver.connections.values()):
            if connection.key_wait.since_ns is not None:
                connection.keys_arrived()

    def mr_gone(self, shadow: ShadowMR) -> None:
        """An MR is about to be deregistered. `wake`, or a command to a NIC, is to follow."""
        for told in self.driver.keys.remove(shadow):
            self.driver.post(functools.partial(memory_keys.push, told), wake=False)

    def mr_changing(self, shadow: ShadowMR) -> None:
        """An MR is about to be changed: `mr_gone` is to follow, another's `mr_made` perhaps, and `mr_changed`."""
        self.driver.keys.change(shadow)

    def mr_changed(self, shadow: ShadowMR) -> None:
        """What an MR was changed into has been made, or will not be."""
        self.driver.keys.changed(shadow)

    def wake(self) -> None:
        """Have the control thread do what was posted for it."""
        self.driver.waiter.wake()

    def connection_of(self, shadow: ShadowQP) -> Connection | None:
        """The connection of a QP that may be protected, made when first needed; None if it is closed before that."""
        if shadow.connection is None:
            with self.driver.locked():
                if shadow.connection is None and not shadow.closed:
                    made = Connection(self.driver, shadow)
                    self.driver.connections[shadow.core] = shadow.connection = made
        found: Connection | None = shadow.connection
        return found

    def qp_shadowed(self, shadow: ShadowQP) -> None:
        """Every backup NIC has answered for a QP."""
        self.driver.post(lambda: self._advance(shadow))

    def qp_connected(self, shadow: ShadowQP) -> None:
        """The application brought a QP to RTR: its peer is known."""
        self.driver.post_soon(lambda: self._advance(shadow))

    def qp_ready(self, shadow: ShadowQP) -> None:
        """The application brought a QP to RTS."""
        shadow.ready_ns = self.driver.now_ns()
        self.driver.post_soon(lambda: self._advance(shadow))

    def _advance(self, shadow: ShadowQP) -> None:
        if not shadow.is_connected:
            return  # until it is connected, there is nothing to do for it, nor when the application has ended that
        connection = self.connection_of(shadow)
        if connection is not None and not connection.closed:
            connection.early.begin()
            connection.pairing.advance()

    def qp_changed(self, shadow: ShadowQP, said: tuple[int, dict[str, int]] | None) -> None:
        """The application changed attributes of a QP: it is not told so before every pair has them.

        said: the shadow's interruptions before the default QP's own verb, and what that said; None where none did.
        """
        connection = shadow.connection
        if connection is None or connection.closed:
            return
        # Nothing was connected or published yet: what is from now on takes what was remembered before this was asked.
        pairing = connection.pairing
        if connection.protocol is not None or connection.given or pairing.is_outdated(shadow.attrs):
            changes.spread(connection, self._change_timeout_s, said)

    def qp_failed(self, shadow: ShadowQP) -> None:
        """A verb of the application's found its default QP, or NIC, broken: what follows of that begins at once."""
        connection = shadow.connection
        with self.driver.locked():
            if connection.closed:
                return
            self.driver.safely(connection, connection.evidence.found_broken)
        self.driver.run()

    def qp_asked(self, shadow: ShadowQP, fields: dict[str, int]) -> int:
        """Whether the NIC that carries a QP's traffic takes new attributes: 0, or its errno."""
        return changes.asks_the_carrier(shadow.connection, fields, self._change_timeout_s)

    @property
    def _change_timeout_s(self) -> float:
        return self.driver.protocol_config.fence_deadline_ns / 1e9

    def qp_touched(self, shadow: ShadowQP, state: int, why: str = "") -> bool:
        """The application is about to move a QP to RESET, ERR, SQD or SQE by itself; why: what it does otherwise.

        `qp_ended` is to follow where that is ERR. False: it is not to be brought to SQD, being elsewhere.
        Where a handler raises it has happened in full, and the QP has ended, or not at all.
        """
        connection = self.connection_of(shadow)
        if connection is None:
            shadow.touched(state)
            return True
        with self.driver.locked():
            if connection.closed:  # by a handler, in the wait for the lock
                return True
            p = connection.protocol
            switching = p is not None and not p.over and p.switching
            if state == QpState.SQD and (switching or shadow.is_away()):
                return False  # looked at here: what began since the verb did would be left in the middle
            if state != QpState.SQD:
                shadow.touched(state)
            why = why or f"the application moved the QP to {_STATES.get(state, state)}"
            connection.ending.touched(why, for_good=state in (QpState.SQD, QpState.SQE))
            used = (
                [] if state == QpState.ERR else connection.ending.stop_backups(reset=state == QpState.RESET)
            )
        if state == QpState.ERR:
            return True
        # No message may arrive on a backup once this verb has returned: the memory is the application's again.
        try:
            self._stop_backups(connection, used)
        except BaseException:  # Ctrl-C: the verb is not carried out, and the QP has left all the same
            self.qp_ended(shadow, False)
            raise
        with self.driver.locked(quietly=True):
            # Where nothing runs any more nobody would tell what was withheld.
            connection.ending.let_go(used, reset=state == QpState.RESET or self._stopped)
            if state == QpState.SQD and not connection.core.guarded:
                shadow.touched(state)
        return True

    def _stop_backups(self, connection: Connection, used: list[int]) -> None:
        """After `Ending.stop_backups`: wait until it is done, and have it done again where a NIC refused."""
        ending, stopping, pause_s = connection.ending, used, 0.001
        until = 0.0
        while stopping:
            for k in stopping:
                self._await_stop(connection.nic(k), connection.shadow.handle(k))
            if self._stopped or self.driver.is_in():
                return
            self.driver.run()
            answered = functools.partial(ending.have_answered, stopping)
            connection.wait_for(answered, time.monotonic() + self._change_timeout_s)
            until = until or time.monotonic() + REFUSING_S  # not while one hangs, or is slow
            if not ending.asks_again(time.monotonic() < until):
                return
            connection.wait_for(lambda: False, time.monotonic() + pause_s)
            pause_s = min(2 * pause_s, 0.1)
            with self.driver.locked():
                stopping = ending.stop_again()

    def _await_stop(
        self, nic: Nic, pointer: int, ours: bool = True, raised: list[BaseException] | None = None
    ) -> None:
        """Wait until a NIC has carried out what was commanded on one QP: it may write into memory until then.

        A NIC that let one of these waits expire is not waited for again before it has carried out something: all QPs
        of one that hangs cost one wait. ours: a QP on a backup. The application's own one is destroyed next, which no
        command may be under way on, and only one at a time can: that is waited for in any case.
        raised: takes what signals' handlers raise meanwhile; then a QP of ours is not waited for any longer.

        Not in the driver, nor on the NIC's own thread, where a finalizer of the program's may move a QP to RESET:
        nobody else could fail over meanwhile.
        """
        if not pointer or nic.on_worker() or self.driver.is_in():
            return
        if ours and (nic.is_given_up() or raised):
            return
        drained = functools.partial(nic.worker.drain, pointer)
        if in_slices(drained, STOP_DMA_S, raised, to_the_end=not ours):
            return
        if not (ours and raised) and nic.give_up():
            said = "%s hangs: a QP on it could not be stopped; it is not waited for again while it carries out nothing"
            logger.error(said, nic.name)

    def qp_ended(self, shadow: ShadowQP, without_nic: bool) -> None:
        """The application moved a QP to ERR, or its default NIC is gone: what no hardware will flush, we do."""
        connection = shadow.connection
        if connection is not None:
            with self.driver.locked(quietly=True):
                connection.ending.by_application(without_nic)

    def qp_reset(self, shadow: ShadowQP) -> None:
        """The application's QP is in RESET: a new life of it begins."""
        connection = shadow.connection
        nic, pointer = shadow.domain.nic, shadow.default
        nobody_may_wait = nic.on_worker() or self.driver.is_in()
        with self.driver.locked(quietly=True):
            if connection.closed:  # by a handler, in the wait for the lock
                return
            shadow.begin_anew()
            connection.given.clear()  # what that life's backups have is nobody's concern any more
            self.driver.drop_backlog(connection)
            was_ending = connection.ending.begin_anew()
            cancelled = nic.worker.cancel(pointer) if nic.worker.pending(pointer) else 0
            begun = shadow.commands_left > cancelled or nic.worker.pending(pointer)
            if nobody_may_wait or not (was_ending or begun):
                return
            # A command of that life's may have come, or come yet, behind the application's verb.
            nic.worker.submit(_nobody_waits, pointer, nic.verbs.ModifySteps().add(state=QpState.RESET))
        raised: list[BaseException] = []
        try:
            # To its end, whatever handlers raise: else it overtakes what the application does next.
            self._await_stop(nic, pointer, ours=False, raised=raised)
        finally:
            if nic.worker.pending(pointer):
                nic.worker.cancel(pointer)  # it must not come later, whatever that NIC is at
        if raised:
            _core.raise_where_it_ends(raised)

    def qp_closing(self, shadow: ShadowQP) -> None:
        """A QP is about to be destroyed: no command of ours may be under way on it afterwards.

        `wake`, or a command to a NIC, is to follow. Where a handler raises before it is `closed`, nothing has happened.
        What one raises later comes out where the verb ends, which waits for no backup from then on: nobody else would
        end what is outstanding.
        """
        if self.is_inherited:
            return
        used: list[int] = []
        if self._stopped:  # the NICs' threads may be at work all the same
            if shadow.connection is None:
                return
        else:
            with self.driver.locked():
                if shadow.disposed:  # a handler closed the QP: another one may be where it was
                    return
                shadow.closed = True
                connection = shadow.connection
                if connection is None:  # then no command of ours ever was
                    return
                used = connection.close()
                self.driver.forget(connection)
            self.driver.post(connection.clear_away, wake=False)
        raised: list[BaseException] = []
        for k, nic in enumerate((shadow.domain.nic, *shadow.domain.backups)):
            pointer = shadow.handle(k)
            if not pointer:
                continue
            pending = nic.worker.pending(pointer)
            if pending:
                nic.worker.cancel(pointer)
            if k in used and not nic.dead:
                # Its destruction comes in the NIC's own time, and messages must not until then.
                nic.worker.submit(_nobody_waits, pointer, nic.verbs.ModifySteps().add(state=QpState.ERR))
            if pending or k in used:
                self._await_stop(nic, pointer, k > 0, raised)
        if raised:
            _core.raise_where_it_ends(raised)

    # ---- the end ----------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Tell the peers, withdraw from the exchanger, stop the threads. Bounded; twice is allowed."""
        if self._stopped or self.is_inherited:
            return
        self._dropped.put(True)
        self._closing.join(STOP_S)
        for stop in self._at_stop:
            stop()
        self.driver.stop(STOP_S)
        self._stopped = True
        self.machine.set_driver(None)
        self.waiter.wake()
        self.waiter.close()
        self._thread.join(1.0)
        self.exchanger.close()

    def forget(self) -> None:
        """In a forked child: everything here belongs to the parent."""
        self._stopped = True
        self.driver.stopped = True
        self.driver.outside.close()
        self.driver.restore_switch_interval()
        self.machine.set_driver(None)
        self.waiter.close()
        self.exchanger.close(after_fork=True)


_lock = threading.RLock()
_runtime: Runtime | None = None
_why: str | None = None
_started = False
_required = False
_forked = False  # since this was imported


def at_start(begin: Callable[[Runtime], Callable[[], None] | None]) -> None:
    """Have `begin` called with each Runtime when it runs, and what that returns when it stops."""
    _at_start.append(begin)


def current() -> Runtime | None:
    """The running machinery, started on first use; None where there is none (see `why_not`).

    Raises ShiftError (or ConfigError) with SHIFTVERBS_REQUIRE=1 where it cannot be started.
    """
    global _runtime, _why, _started, _required
    if _started:
        return _runtime
    with _lock:
        if _started:
            return _runtime
        try:
            config = Config.from_environ()
        except ConfigError as error:
            if os.environ.get("SHIFTVERBS_REQUIRE", "").strip().lower() not in (
                "",
                "0",
                "false",
                "no",
                "off",
            ):
                raise ShiftError(str(error)) from error
            _give_up(str(error))
            return None
        if config.disable:
            _why, _started = "SHIFTVERBS_DISABLE is set", True
            return None
        if not config.etcd:
            if config.require:
                raise ShiftError("SHIFTVERBS_REQUIRE is set, but SHIFTVERBS_ETCD is not")
            _give_up("SHIFTVERBS_ETCD is not set")
            return None
        _required = config.require
        try:
            _runtime = Runtime(config, ThisMachine())
        except (OSError, ShiftError, RuntimeError) as error:
            if config.require:
                raise ShiftError(f"failover cannot be started: {error}") from error
            _give_up(f"failover cannot be started: {error}")
            return None
        _started = True
        _end_with_multiprocessing()
        return _runtime


def _give_up(why: str) -> None:
    global _why, _started
    _why, _started = why, True
    logger.warning("no failover: %s; the program runs as with plain pyverbs", why)


def required() -> bool:
    """Whether an unprotected QP is an error (SHIFTVERBS_REQUIRE): in a forked child too, where nothing is protected."""
    current()
    return _required


def why_not() -> str | None:
    """Why `current()` is None."""
    return _why


def _end_with_multiprocessing() -> None:
    """What it forks has forgotten our handler. Before Python 3.13 that ends without a word; elsewhere atexit has us."""
    if sys.version_info < (3, 13) or not _forked:
        return
    # Where another thread is at its first import of it, it has no such functions yet, nor any children.
    parent_process = getattr(sys.modules.get("multiprocessing.process"), "parent_process", None)
    register_after_fork = getattr(sys.modules.get("multiprocessing.util"), "register_after_fork", None)
    if parent_process is not None and register_after_fork is not None:
        if parent_process() is not None:
            _finalize(_at_exit)
        # Amid the hooks of a fork, or while it unpickles its arguments, it is about to forget its Finalizers too.
        register_after_fork(_at_exit, _finalize)


def _finalize(at_exit: Callable[[], None]) -> None:
    sys.modules["multiprocessing.util"].Finalize(None, at_exit, exitpriority=LAST_OF_ALL)


def _at_exit() -> None:
    """Behind what the program has registered since it imported this: that may wait for flushes that only we give."""
    if _runtime is not None and not _runtime.is_inherited:
        _runtime.stop()
        _runtime.driver.outside.flush(LAST_LINES_S)


def _after_fork_in_child() -> None:
    global _runtime, _why, _started, _lock, _forked
    _lock = threading.RLock()
    _forked = True
    if _runtime is not None:
        runtime, _runtime = _runtime, None
        runtime.forget()
        _why, _started = FORKED, True


os.register_at_fork(after_in_child=_after_fork_in_child)
atexit.register(_at_exit)
