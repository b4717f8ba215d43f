# SPDX-License-Identifier: BSD-3-Clause
"""How an application's process gets a broker: by starting one of its own, or by joining the host's.

The broker is started so that it is no child the application could notice: a shell puts it in the background and
is gone at once, so neither `os.wait` nor a SIGCHLD handler meets it later. It sits in a session of its own, where
the terminal's Ctrl-C does not reach it, with none of the application's descriptors but those meant for it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shlex
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec import Struct

from shiftverbs._core import without_signals
from shiftverbs.config import OWN_BROKER, SHARED_BROKER, Config
from shiftverbs.exchanger import kept, socket_path, wire
from shiftverbs.exchanger.settings import settings_of, store_identity

logger = logging.getLogger("shiftverbs.exchanger")

# Python and this package are loaded before the hello; on a busy host with cold caches even that takes its time.
START_TIMEOUT_S = 30.0
# How often one that is shared unasked is looked at meanwhile, and how often in a row it may be found without one turn
# of a processor: a program that starts then need not wait as long, and may have to be PROTECTED by that time.
LOOK_S = 2.5
LOOKS = 3
_SHELL = "/bin/sh"
# What is meant for the application alone: a preloaded RNIC, a debugger's or a test's settings.
_NOT_FOR_THE_BROKER = (
    "LD_PRELOAD", "SOFTRNIC", "SOFTRNIC_HOST", "PYTHONWARNINGS", "PYTHONDEVMODE", "PYTHONINSPECT", "PYTHONSTARTUP",
)  # fmt: skip


class BrokerError(Exception):
    """There is no broker for this process; the message says why."""


class _NoHello(BrokerError):
    """There is one, which says nothing."""


class _StandsStill(BrokerError):
    """There is one that does nothing, and may just be slow. seen: what it looks like."""

    def __init__(self, seen: Looks):
        super().__init__(f"the broker has done nothing for {LOOKS * LOOK_S:g} s")
        self.seen = seen


class _Ended(BrokerError):
    """There was one."""


class Connection(Struct):
    """A broker that has said hello. frames: what came right after.

    pidfd: readable when the broker has ended, whoever else may hold the other end of the socket; None where that is not
    to be had. answers: it says "pong" to "ping".
    """

    sock: socket.socket
    pid: int
    reader: wire.FrameReader
    frames: list[dict[str, Any]] = []
    pidfd: int | None = None
    answers: bool = False

    def close(self) -> None:
        """Close the descriptors."""
        self.sock.close()
        pidfd, self.pidfd = self.pidfd, None
        if pidfd is not None:
            os.close(pidfd)


class Looks(Struct, frozen=True):
    """What /proc tells of a process. used: of a processor; began: since boot; both in ticks of the system's clock.

    turns: how often its main thread gave a processor back.
    """

    state: str
    used: int
    began: int
    turns: int


def look_at(pid: int | None) -> Looks | None:
    """What can be seen of a process; None where there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        turns = sum(int(line.split()[1]) for line in lines if "_ctxt_switches:" in line)
        return Looks(fields[0], int(fields[11]) + int(fields[12]), int(fields[19]), turns)
    except (OSError, ValueError, IndexError):
        return None


def _has_ended(pid: int, began: int) -> bool:
    """Whether a process has ended, though perhaps its parent has not waited for it."""
    seen = look_at(pid)
    return seen is None or seen.began != began or seen.state in "ZX"


def _kill(pid: int, began: int) -> None:
    """End process `pid`, unless that is another one by now."""
    with contextlib.suppress(OSError, AttributeError):  # it is gone; an old kernel: then it stays
        pidfd = os.pidfd_open(pid)
        try:
            seen = look_at(pid)
            if seen is not None and seen.began == began:
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        finally:
            os.close(pidfd)


class _Spawned(Struct):
    """A broker that was started, until it has said hello.

    diagnostics: a descriptor of what it writes on its standard error; began: as in Looks, None where not known.
    """

    pid: int | None
    diagnostics: int
    began: int | None = None

    def last_words(self) -> str:
        """The last line that it wrote on its standard error before it died."""
        text = os.pread(self.diagnostics, 1 << 16, 0).decode("utf-8", "replace").strip()
        return f" ({text.splitlines()[-1][:300]})" if text else ""

    def looks(self) -> str:
        """What can be seen of it from outside: whether it is stuck, or hardly ever had its turn."""
        seen = look_at(self.pid)
        if seen is None:
            return ""
        used_s, load = seen.used / os.sysconf("SC_CLK_TCK"), ""
        with contextlib.suppress(OSError):
            load = f", the load is {os.getloadavg()[0]:.1f}"
        return f"; process {self.pid} (state {seen.state}) has had {used_s:.1f} s of a processor{load}"

    def close(self) -> None:
        """It has said hello, or is given up."""
        os.close(self.diagnostics)


def open_connection(config: Config, progress: Callable[[str], None] = lambda phase: None) -> Connection:
    """Get a broker, start it if need be, and exchange hellos. May take seconds.

    progress: is told what this waits for. Raises BrokerError or OSError.
    """
    if config.broker == OWN_BROKER:
        return _open(config, None, progress)
    if config.broker != SHARED_BROKER:
        return _open(config, config.broker, progress)
    try:
        path = socket_path.of_host(config)
        try:
            return _open(config, path, progress)
        except _Ended:  # it took its leave, for want of anything to do, in this very moment
            return _open(config, path, progress)
    except (BrokerError, OSError) as error:
        # Nobody asked for a shared one: everything works without it, somewhat slower.
        logger.info("no broker to share, this process has one of its own: %s", error)
        return _open(config, None, progress)


def _open(config: Config, path: str | None, progress: Callable[[str], None]) -> Connection:
    """Get the broker that is shared at a socket, or (None) one for this process alone."""
    spawned = None
    try:
        progress("a broker is being started")
        if path is None:
            sock, spawned = _start_own(config)
        else:
            sock, spawned = _join_shared(config, path)
        progress(f"the broker{'' if spawned is None else f', process {spawned.pid},'} has not said hello")
        named = None if path is None else socket_path.named_broker(path)
        before = None if named is None else look_at(named[0])
        shared = None if path is None or spawned is not None or config.broker != SHARED_BROKER else named
        try:
            return _greet(sock, config, spawned, None if shared is None else shared[0])
        except _StandsStill as still:
            kept.keep(sock)
            end = threading.Thread(target=_wait_for_the_end, args=(sock, named, still.seen), daemon=True)
            try:
                without_signals(end.start)
            except RuntimeError:  # no thread can be started: somebody else will reap it
                sock.close()
                kept.let_go(sock)
            raise still from None
        except _NoHello:
            sock.close()
            # One that is stuck would never notice that it is given up; a shared one keeps the socket from a successor.
            if path is None:
                if spawned is not None and spawned.pid is not None and spawned.began is not None:
                    _kill(spawned.pid, spawned.began)
            elif named is not None and before is not None and look_at(named[0]) == before:
                _kill(*named)  # it had not one turn in all that time, as a slow or starved one has
            raise
        except BaseException:
            sock.close()
            raise
    finally:
        if spawned is not None:
            spawned.close()


def _wait_for_the_end(sock: socket.socket, named: tuple[int, int] | None, before: Looks) -> None:
    """A silent broker gets as long as any other; one that got no processor time in it gives way to a successor."""
    with contextlib.ExitStack() as stack:
        stack.callback(kept.let_go, sock)
        stack.enter_context(sock)
        sock.settimeout(LOOK_S)
        # Counts looks, not seconds: a process that was stopped meanwhile made none.
        for _ in range(round(START_TIMEOUT_S / LOOK_S) - LOOKS):
            try:
                sock.recv(1)
                return
            except TimeoutError:
                if named is None or look_at(named[0]) != before:
                    return
            except OSError:
                return
        if named is not None:
            _kill(*named)


def _start_own(config: Config) -> tuple[socket.socket, _Spawned]:
    with kept.making:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        kept.keep(ours, theirs)
    with contextlib.ExitStack() as stack:
        stack.callback(kept.let_go, ours, theirs)
        stack.enter_context(theirs)
        arguments = ["--client-fd", str(theirs.fileno())]
        passed = [theirs.fileno()]
        pidfd: int | None = None
        with contextlib.suppress(OSError, AttributeError):  # an old kernel: the end of the socket has to do
            pidfd = os.pidfd_open(os.getpid())
            arguments += ["--client-pidfd", str(pidfd)]
            passed.append(pidfd)
        try:
            return ours, _spawn(config, arguments, passed)
        except BaseException:
            ours.close()
            raise
        finally:
            if pidfd is not None:
                os.close(pidfd)


def _join_shared(config: Config, path: str) -> tuple[socket.socket, _Spawned | None]:
    sock, connected = socket_path.connect_or_bind(path)
    named = socket_path.named_broker(path) if connected else None
    if named is not None and _has_ended(*named):
        # A child that C code forked when that socket was made has a copy: who asks there would wait for ever.
        sock.close()
        sock, connected = socket_path.connect_or_replace(path, named)
    if connected:
        return sock, None
    # From here on others connect to the path too; they are served as soon as the broker is there.
    with contextlib.ExitStack() as stack:
        stack.callback(kept.let_go, sock)
        listener = stack.enter_context(sock)
        arguments = ["--socket", path, "--listen-fd", str(listener.fileno())]
        bound = socket_path.identity(path)
        if bound is not None:
            arguments += ["--bound", *map(str, bound)]
        spawned = _spawn(config, arguments, [listener.fileno()])
        try:
            if spawned.pid is not None and spawned.began is not None:
                socket_path.name_broker(path, spawned.pid, spawned.began)
            return socket_path.connect(path), spawned
        except BaseException:
            spawned.close()
            raise


def _spawn(config: Config, arguments: list[str], passed: list[int]) -> _Spawned:
    """Start a broker in the background."""
    if not sys.executable:
        raise BrokerError("cannot start a broker: this Python does not know its own executable")
    command = [
        sys.executable, "-P", "-m", "shiftverbs.exchanger.broker",
        "--settings", json.dumps(settings_of(config), separators=(",", ":")), *arguments,
    ]  # fmt: skip
    diagnostics = os.memfd_create("shiftverbs-broker-stderr", os.MFD_CLOEXEC)
    try:
        # No pipe: a child that is forked at this moment would have its other end too.
        number = os.memfd_create("shiftverbs-broker-pid", os.MFD_CLOEXEC)
        try:
            try:
                shell = subprocess.Popen(
                    [_SHELL, "-c", f"{shlex.join(command)} >{os.devnull} & echo $!"],
                    stdin=subprocess.DEVNULL,
                    stdout=number,
                    stderr=diagnostics,
                    env=_environment(),
                    pass_fds=passed,
                    start_new_session=True,
                )
            except OSError as error:
                raise BrokerError(f"cannot start a broker: {error}") from None
            try:
                shell.wait(10)
            except subprocess.TimeoutExpired:
                shell.kill()
                shell.wait()
                raise BrokerError(f"cannot start a broker: {_SHELL} hangs") from None
            text = os.pread(number, 32, 0).strip()
        finally:
            os.close(number)
    except BaseException:
        os.close(diagnostics)
        raise
    pid = int(text) if text.isdigit() else None
    seen, session = look_at(pid), None
    with contextlib.suppress(OSError):
        session = os.getsid(pid or 0)
    # Of another session: it has ended already, and its number is another process's.
    return _Spawned(pid, diagnostics, seen.began if seen is not None and session == shell.pid else None)


def _environment() -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name not in _NOT_FOR_THE_BROKER}
    # The broker has to find the very package it belongs to, also when only sys.path led here. A directory that
    # every Python searches anyway is not put in front: that would place all its modules before the standard ones.
    root = str(Path(__file__).resolve().parents[2])
    if root not in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        rest = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = root if not rest else os.pathsep.join((root, rest))
    return environment


def _greet(sock: socket.socket, config: Config, spawned: _Spawned | None, shared: int | None) -> Connection:
    """Exchange hellos. shared: the broker's process, where one that has no turn of a processor is not waited for."""
    sock.settimeout(START_TIMEOUT_S)
    reader = wire.FrameReader()
    hello = {"op": "hello", "protocol": wire.PROTOCOL, "job": config.job, "store": store_identity(config)}
    frames: list[dict[str, Any]] = []

    def last_words() -> str:
        return "" if spawned is None else spawned.last_words()

    try:
        # A broker that turned us away has closed its end; its reason can still be read.
        with contextlib.suppress(ConnectionError):
            sock.sendall(wire.encode(hello))
        end, stood, seen = time.monotonic() + START_TIMEOUT_S, 0, look_at(shared)
        while not frames:
            left_s = max(0.001, end - time.monotonic())
            sock.settimeout(left_s if shared is None else min(LOOK_S, left_s))
            try:
                data = sock.recv(1 << 16)
            except TimeoutError:
                if time.monotonic() >= end:
                    raise
                now = look_at(shared)
                stood, seen = stood + 1 if now == seen else 0, now
                if stood == LOOKS and now is not None:
                    raise _StandsStill(now) from None
                continue
            if not data:
                raise _Ended(f"the broker ended before it said hello{last_words()}")
            frames = reader.feed(data)
    except TimeoutError:
        looks = "" if spawned is None else spawned.looks()
        raise _NoHello(
            f"the broker does not say hello in {START_TIMEOUT_S:g} s{last_words()}{looks}"
        ) from None
    except ConnectionError as error:
        raise _Ended(f"no hello from the broker: {error}{last_words()}") from None
    except wire.WireError as error:
        raise BrokerError(f"no hello from the broker: {error}{last_words()}") from None
    first = frames[0]
    if first.get("ev") == "fatal":
        raise BrokerError(str(first.get("reason")))
    if first.get("ev") != "hello" or not isinstance(first.get("pid"), int):
        raise BrokerError("what listens there is not a broker")
    sock.setblocking(False)
    pidfd = None
    if first.get("pid_namespace") == wire.pid_namespace():
        with contextlib.suppress(
            OSError, AttributeError
        ):  # an old kernel, or it is gone: then the socket tells
            pidfd = os.pidfd_open(first["pid"])
    return Connection(sock, first["pid"], reader, frames[1:], pidfd, first.get("answers") is True)
