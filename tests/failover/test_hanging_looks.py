# SPDX-License-Identifier: BSD-3-Clause
"""A process whose NICs were asked for their ports, and have not answered: everything else goes on."""

from __future__ import annotations

import time
from typing import Any

from harness import wait_until
from hosts import AWAY, Host, Network
from test_teardown import leave

#: `mutes`: both NICs' verbs, whose questions for a port wait, without the GIL, until `answer()`.
HANG = """
import os
class Mute:
    def __init__(self, nic):
        self.real, self.asked, self.pipe, nic.verbs = nic.verbs, 0, os.pipe(), self
    def __getattr__(self, name):
        return getattr(self.real, name)
    def query_port(self, ctx, number):
        self.asked += 1
        os.read(self.pipe[0], 1)
        return self.real.query_port(ctx, number)
def answer():
    for mute in mutes:
        os.close(mute.pipe[1])
c = ep.qp._shadow.connection
nics = [c.nic(k) for k in range(2)]
mutes = [Mute(nic) for nic in nics]
[nic.look_again(lambda: None) for nic in nics]
"""


def looks_hang(network: Network) -> tuple[Host, Host]:
    """Two hosts with a protected QP; looks at a's NICs hang."""
    a, b = network.protected()
    a(HANG)
    wait_until(lambda: a("all(mute.asked for mute in mutes)"), what="both NICs are asked")
    b("[ep.recv(i) for i in range(4)]")
    return a, b


def test_a_program_fails_over_and_comes_home_when_its_nics_answer(network: Network, faults: Any) -> None:
    a, b = looks_hang(network)
    faults.down("a/soft0")
    a("ep.post('SEND', wr_id=1)")
    assert a("ep.poll(1)")[0][:2] == [1, "SUCCESS"] and a(f"ep.wait({AWAY!r})")
    faults.up("a/soft0")
    a("answer()")
    wait_until(lambda: a("ep.shift()['path']") == "soft0", what="it is at home")
    assert a("[mute.asked > 1 for mute in mutes]")[0], "it was looked at again"
    leave(a)
    leave(b)


def test_it_closes_forks_and_ends(network: Network) -> None:
    """The end waits for both looks together; a child for none, nor at its own end."""
    a, b = looks_hang(network)
    a("ep.post('SEND', wr_id=1)")
    began = time.monotonic()
    forked = a(
        """
import sys
pid = os.fork()
if pid == 0:
    sys.stdin = open(os.devnull)
    sys.exit(0)
os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""
    )
    assert forked == 0 and a("ep.poll(1)")[0][:2] == [1, "SUCCESS"]
    for what in "qp mr cq pd context".split():
        a(f"ep.{what}.close()")
    ready = time.monotonic()
    leave(a)
    ended = time.monotonic()
    print(f"all but the end took {ready - began:.1f} s, the end {ended - ready:.1f} s")
    assert ready - began < 10 and ended - ready < 10
    leave(b)
