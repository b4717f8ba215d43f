# SPDX-License-Identifier: BSD-3-Clause
"""Two workers that add up a number in each step, and save a checkpoint when the network has lost a NIC.

    python checkpoint_hook.py            one worker
    python checkpoint_hook.py SERVER     the other, on another host

The job goes on by itself on the backup NIC. From then on the next failure may be the one that ends it: a good moment
for a checkpoint.
"""

import json
import queue
import struct
import time
from pathlib import Path

from endpoint import Endpoint, arguments, meet

import shiftverbs.enums as e
from shiftverbs import observe

NUMBER = struct.Struct("<Q")
SEND, RECEIVE = 0, 8  # where each number lies in the memory region
STEP_S = 0.02


def add_up(endpoint, number):
    """Exchange a number with the other worker and return the sum."""
    endpoint.mr.write(NUMBER.pack(number), NUMBER.size, SEND)
    endpoint.send(SEND, NUMBER.size)
    endpoint.wait(e.IBV_WC_SEND, e.IBV_WC_RECV)  # the buffer may be changed again only behind its SEND
    (other,) = NUMBER.unpack(endpoint.mr.read(NUMBER.size, RECEIVE))
    endpoint.receive(RECEIVE, NUMBER.size)
    return number + other


def save(path, state):
    """Write the state beside the old checkpoint, then put it in its place at one stroke."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(state))
    new.replace(path)


def main():
    parser = arguments(__doc__)
    parser.add_argument("--checkpoint", type=Path, default="checkpoint.json", help="where to save the state")
    options = parser.parse_args()
    endpoint = Endpoint(options.device)
    endpoint.receive(RECEIVE, NUMBER.size)
    with meet(options) as stream:
        endpoint.connect(stream)
        # The hook runs in a thread of shiftverbs.observe: it only says what happened, the loop acts on it.
        happened = queue.SimpleQueue()
        kinds = (observe.Protected, observe.Fallback, observe.Failback, observe.Failed)
        with observe.subscribe(happened.put, kinds=kinds):
            if not endpoint.qp.shift.wait_protected(30):
                print(f"not protected: {endpoint.qp.shift.why}", flush=True)
            state = {"step": 0, "total": 0}
            while True:
                state["total"] += add_up(endpoint, state["step"])
                state["step"] += 1
                time.sleep(STEP_S)  # the work of a step
                while not happened.empty():
                    react(happened.get(), state, options.checkpoint)


def react(event, state, path):
    """Between two steps: what is to be done about an event."""
    if isinstance(event, observe.Protected):
        print(f"step {state['step']}: protected by {', '.join(event.backups)}", flush=True)
    elif isinstance(event, observe.Fallback):
        save(path, state)
        took_ms = event.durations["fallback_ms"]
        print(
            f"step {state['step']}: on {event.target} after {took_ms:.1f} ms; saved {path.name}", flush=True
        )
    elif isinstance(event, observe.Failback):
        print(f"step {state['step']}: home on {event.device}", flush=True)
    else:
        print(f"step {state['step']}: gave up: {event.why}", flush=True)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        pass
