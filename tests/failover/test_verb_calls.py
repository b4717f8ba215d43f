# SPDX-License-Identifier: BSD-3-Clause
"""How many Python functions of ours create_qp and destroy_qp go through: the same on every machine, unlike time."""

from __future__ import annotations

import json
from pathlib import Path

from harness import EtcdServer, Spawn

# To make a QP and its shadow's place, and to close one that was never protected.
MOST = 60
# With a peer, which is told on every path, and whose pairs are no longer armed.
MOST_PROTECTED = 120

PROGRAM = """
import gc, json, os, sys
sys.path.insert(0, os.environ["TESTS"])
import shiftverbs
from one_process import Verbs

package = os.path.dirname(shiftverbs.__file__)


def count(call):
    calls = {}

    def called(frame, what, _):
        code = frame.f_code
        if what == "call" and code.co_filename.startswith(package):
            calls[code.co_name] = calls.get(code.co_name, 0) + 1

    sys.setprofile(called)
    try:
        made = call()
    finally:
        sys.setprofile(None)
    return made, calls


v = Verbs("shiftverbs")
ctx, pd, cq, mr, first, second = v.connected()
assert first.shift.wait_protected(20) and second.shift.wait_protected(20)
v.qp.QP(pd, v.rc(cq)).close()
gc.collect()
gc.disable()
attr = v.rc(cq)
qp, create = count(lambda: v.qp.QP(pd, attr))
_, destroy = count(qp.close)
_, protected = count(first.close)
print(json.dumps([create, destroy, protected]))
"""


def test_what_verbs_go_through(spawn: Spawn, shared_etcd: EtcdServer, job: str) -> None:
    env = {
        "SHIFTVERBS_ETCD": shared_etcd.endpoint,
        "SHIFTVERBS_JOB": job,
        "TESTS": str(Path(__file__).resolve().parents[1]),
        "SHIFTVERBS_INVARIANTS": None,  # they are calls, too
    }
    child = spawn("-c", PROGRAM, env=env)
    child.succeed(60)
    for calls, most in zip(json.loads(child.printed[-1]), (MOST, MOST, MOST_PROTECTED), strict=True):
        assert sum(calls.values()) <= most, calls
        assert sum(calls.values()) > 5, calls  # something was counted
