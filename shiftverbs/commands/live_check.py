# SPDX-License-Identifier: BSD-3-Clause
"""Real traffic between two QPs of this machine, moved over to every backup NIC and home again.

    python -m shiftverbs.commands.live_check DEVICE [--plain]

`shiftverbs doctor` runs it, one process per device, so that a NIC that hangs costs it one child. It prints one JSON
object: {"ok": bool, "problem": text or null, "steps": [text, ...]}. --plain: without failover, on this NIC alone.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from shiftverbs.commands.demo.endpoint import Endpoint, Verbs, wc_status_name
from shiftverbs.commands.demo.pattern import Pattern

__all__ = ["main", "rehearse"]

SIZE = 64 * 1024
MESSAGES = 4
COMPLETION_S = 10.0
PROTECTED_S = 20.0
MOVE_S = 10.0


class Problem(RuntimeError):
    """A step did not do what it should; the message says which."""


def _exchange(verbs: Verbs, sender: Endpoint, receiver: Endpoint, first: int, where: str) -> None:
    """Send MESSAGES messages one way and check every byte. first: number of the first one."""
    e, wr = verbs.e, verbs.wr
    pattern = Pattern(1, 40, SIZE)
    for number in range(first, first + MESSAGES):
        sender.mr.write(pattern.message(number), SIZE, 0)
        receiver.mr.write(bytes(SIZE), SIZE, SIZE)
        receiver.qp.post_recv(wr.RecvWR(number, 1, [wr.SGE(receiver.mr.buf + SIZE, SIZE, receiver.mr.lkey)]))
        sge = wr.SGE(sender.mr.buf, SIZE, sender.mr.lkey)
        sender.qp.post_send(
            wr.SendWR(number, num_sge=1, sg=[sge], opcode=e.IBV_WR_SEND, send_flags=e.IBV_SEND_SIGNALED)
        )
        for endpoint, what in ((sender, "sent"), (receiver, "received")):
            wc = _completion(endpoint, f"a message {what} on {where}")
            if wc.status != e.IBV_WC_SUCCESS:
                raise Problem(f"a message {what} on {where} ended with {wc_status_name(verbs, wc.status)}")
        fault = pattern.verify(number, receiver.mr.read(SIZE, SIZE))
        if fault is not None:
            raise Problem(f"on {where}: {fault}")


def _completion(endpoint: Endpoint, what: str) -> Any:
    deadline = time.monotonic() + COMPLETION_S
    while time.monotonic() < deadline:
        count, wcs = endpoint.send_cq.poll(1)
        if count:
            return wcs[0]
        time.sleep(0.0005)
    raise Problem(f"{what}: no completion within {COMPLETION_S:g} s")


def rehearse(device: str, plain: bool) -> list[str]:
    """Do it; return what was done, step by step. Raises Problem, or whatever the verbs raise."""
    verbs = Verbs("shiftverbs")
    ends = [Endpoint(verbs, device, 2 * SIZE, (16, 16), one_cq=True) for _ in range(2)]
    ends[0].connect(ends[1].peer())
    ends[1].connect(ends[0].peer())
    steps: list[str] = []
    number = 0

    def both_ways(where: str) -> None:
        nonlocal number
        for sender, receiver in (ends, reversed(ends)):
            _exchange(verbs, sender, receiver, number, where)
            number += MESSAGES
        steps.append(f"{2 * MESSAGES * SIZE // 1024} KiB on {where}")

    both_ways(device)
    if plain:
        return steps
    shifts = [end.qp.shift for end in ends]
    for shift in shifts:
        if not shift.wait_protected(PROTECTED_S):
            raise Problem(f"traffic on {device} is not protected after {PROTECTED_S:g} s: {shift.why}")
    for pair in range(1, shifts[0].pairing["pairs"]):
        _move(shifts, pair)
        both_ways(shifts[0].path)
    _move(shifts, 0)
    both_ways(device)
    return steps


def _move(shifts: Sequence[Any], pair: int) -> None:
    """Move both QPs, both directions, and wait until they are there."""
    shifts[0].migrate(pair)
    deadline = time.monotonic() + MOVE_S
    state = "FALLBACK" if pair else "DEFAULT"
    while any((s.pair, s.state, s.recv_state) != (pair, state, state) for s in shifts):
        if time.monotonic() > deadline:
            raise Problem(f"traffic did not move to pair {pair} within {MOVE_S:g} s: {shifts}")
        time.sleep(0.002)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it for one device and print the outcome."""
    parser = argparse.ArgumentParser(prog="python -m shiftverbs.commands.live_check")
    parser.add_argument("device")
    parser.add_argument("--plain", action="store_true")
    options = parser.parse_args(arguments)
    outcome: dict[str, Any] = {"ok": True, "problem": None, "steps": []}
    try:
        outcome["steps"] = rehearse(options.device, options.plain)
    except Exception as error:  # whatever it is, the doctor tells
        text = str(error) if isinstance(error, Problem) else f"{type(error).__name__}: {error}"
        outcome.update(ok=False, problem=text)
    print(json.dumps(outcome), flush=True)
    # Not by way of the interpreter's end: what hangs there is another matter, and the outcome is told.
    os._exit(0 if outcome["ok"] else 1)


if __name__ == "__main__":
    sys.exit(main())
