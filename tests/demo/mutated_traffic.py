# SPDX-License-Identifier: BSD-3-Clause
"""Child of test_traffic.py: both sides of one kind of traffic in one process, with one deliberate fault.

usage: mutated_traffic.py KIND MUTATION; prints both sides' reports as JSON.
"""

import json
import sys
import time

import shiftverbs  # noqa: F401  (puts the software RNIC in front of libibverbs)
from shiftverbs.commands.demo import traffic as traffic_module
from shiftverbs.commands.demo.endpoint import Endpoint, Verbs
from shiftverbs.commands.demo.scenario import settled
from shiftverbs.commands.demo.traffic import KINDS

VICTIM = 22  # of every kind: unsignaled where some are
MESSAGES = 300


def mutate(traffic, mutation):
    """Make one side's message VICTIM wrong, once."""
    post = traffic._post_send
    held = []

    def mutated(wr, count, signaled):
        # Called with `sent` not yet counting this message; in write_imm single WRs are credits.
        if traffic.verbs_kind == "write_imm" and count == 1:
            return post(wr, count, signaled)
        if held:
            post(wr, count, signaled)
            return post(*held.pop())
        if traffic.sent != VICTIM:
            return post(wr, count, signaled)
        if mutation == "lost":
            if signaled is not None:  # nobody waits for a completion that cannot come
                traffic._completed += 1
        elif mutation == "duplicated":
            post(wr, count, signaled)
            traffic.endpoint.qp.post_send(wr)
        elif mutation == "reordered":
            held.append((wr, count, signaled))
        elif mutation == "chunk missing":
            traffic.endpoint.qp.post_send(traffic._links[4 * (VICTIM % 64)])
            traffic._posted += count
            traffic._signaled.append((signaled, traffic._posted))
        else:
            post(wr, count, signaled)
        return None

    traffic._post_send = mutated
    if mutation == "corrupt":
        pattern = getattr(traffic, "_out", None) or traffic._pattern
        message = pattern.message

        def damaged(number):
            data = bytearray(message(number))
            if number == VICTIM:
                data[len(data) // 2] ^= 1
            return bytes(data)

        pattern.message = damaged


def roomy(verbs, device, length, depth, one_cq):
    """An endpoint whose send queue has room for what a mutation posts too much."""
    return Endpoint(verbs, device, length, (depth[0] + 8, depth[1]), one_cq)


def main(kind, mutation):
    traffic_module.Endpoint = roomy
    sides = [KINDS[kind](Verbs("pyverbs"), "soft0", role, 5) for role in (0, 1)]
    for side in sides:
        side.verbs_kind = kind
    if kind == "read" and mutation == "corrupt":
        memory = sides[1].endpoint.mr
        offset = VICTIM % sides[1].SERVED * sides[1].SIZE + 100
        memory.write(bytes([memory.read(1, offset)[0] ^ 1]), 1, offset)
    else:
        mutate(sides[0], mutation)
    for side, other in zip(sides, reversed(sides), strict=True):
        side.start(other.endpoint.peer())
    deadline = time.monotonic() + 20
    quiet_since = time.monotonic()
    while time.monotonic() < deadline:
        moved = [side.step(side.sent < MESSAGES) for side in sides]
        if any(moved):
            quiet_since = time.monotonic()
        done = sides[0].sent >= MESSAGES and settled(kind, tuple(side.report() for side in sides))
        if done or time.monotonic() - quiet_since > 1:
            break
    print(json.dumps([side.report() for side in sides]))
    for side in sides:
        side.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
