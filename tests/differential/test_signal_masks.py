# SPDX-License-Identifier: BSD-3-Clause
"""Signals that a program blocks, and waits for, reach it as with pyverbs: none of our threads takes one."""

from __future__ import annotations

from typing import Any

import pytest
from hosts import Network

THREADS = """
import os, signal, threading
def names():
    'Of all threads; one may have ended since it was listed'
    return {int(n): comm.strip() for n in os.listdir('/proc/self/task') if (comm := read(n, 'comm'))}
def read(n, name):
    try:
        return open(f'/proc/self/task/{n}/{name}').read()
    except (FileNotFoundError, ProcessLookupError):
        return ''
def takes(number):
    'The threads, but for the main one, that the kernel may choose for a signal: their names'
    found = []
    for n, name in names().items():
        lines = dict(l.split(':', 1) for l in read(n, 'status').splitlines())
        if n != os.getpid() and lines and not int(lines['SigBlk'], 16) >> (number - 1) & 1:
            found.append((name, [t.name for t in threading.enumerate() if t.native_id == n]))
    return found
"""
MASKABLE = [
    "SIGHUP",
    "SIGINT",
    "SIGUSR1",
    "SIGUSR2",
    "SIGTERM",
    "SIGALRM",
    "SIGPROF",
    "SIGCHLD",
    "SIGIO",
    "SIGRTMIN",
]


def host(network: Network, package: str, **env: str) -> Any:
    """One with a Context; where there is failover, it has all its threads."""
    a = network.host("a", package, **env)
    a("ep = Endpoint()")
    a(THREADS)
    return a


def test_no_thread_of_ours_takes_a_signal(network: Network, faults: Any) -> None:
    """Neither one that is always there, nor those that get a broker, tell subscribers or serve metrics."""
    a, b = (network.host(name, SHIFTVERBS_METRICS="0") for name in "ab")
    for h in (a, b):
        h(THREADS)
        h("from shiftverbs import observe; observe.subscribe(lambda event: None); ep = Endpoint()")
        for _ in range(3):  # those that come and go
            assert h(f"[takes(getattr(signal, n)) for n in {MASKABLE!r}]") == [[] for _ in MASKABLE]
    names = [h("ep.name()") for h in (a, b)]
    a(f"ep.connect({names[1]!r})")
    b(f"ep.connect({names[0]!r})")
    for h in (a, b):
        assert h("ep.qp.shift.wait_protected(20)")
        assert h(f"[takes(getattr(signal, n)) for n in {MASKABLE!r}]") == [[] for _ in MASKABLE]
        assert h("len(names())") > 3
        # The broker, which such a thread has started, is to be ended as any process.
        assert h(
            "pid = __import__('shiftverbs').failover.runtime.current().exchanger._connection.pid\n"
            "[l.split()[1] for l in open(f'/proc/{pid}/status') if l.startswith('SigBlk')]"
        ) == ["0" * 16]


@pytest.mark.parametrize("package", ["pyverbs", "shiftverbs"])
def test_a_blocked_signal_is_waited_for(network: Network, package: str) -> None:
    """What a daemon does with SIGTERM: block it, and sigwait."""
    a = host(network, package)
    assert a("""
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1})
found = []
for number in (signal.SIGTERM, signal.SIGUSR1) * 20:
    os.kill(os.getpid(), number)
    info = signal.sigtimedwait({number}, 10)
    found.append(info is not None and info.si_signo == number)
all(found)
""")


@pytest.mark.parametrize("package", ["pyverbs", "shiftverbs"])
def test_no_handler_runs_where_its_signal_is_blocked(network: Network, package: str) -> None:
    """Behind the section that is not to be broken off it does."""
    a = host(network, package)
    assert (
        a("""
signal.signal(signal.SIGINT, signal.default_int_handler)
def section():
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    os.kill(os.getpid(), signal.SIGINT)
    try:
        for _ in range(20):
            ep.cq.poll(1)
            time.sleep(0.005)
    except KeyboardInterrupt:
        return 'broken off'
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        time.sleep(1)
    except KeyboardInterrupt:
        return 'behind it'
section()
""")
        == "behind it"
    )
