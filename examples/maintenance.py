# SPDX-License-Identifier: BSD-3-Clause
"""A ping-pong that leaves its NIC when told to, so that the NIC can be taken out of service, and returns.

    python maintenance.py            one end
    python maintenance.py SERVER     the other

SIGUSR1 moves it to the backup NIC, SIGUSR2 home, at either end.
"""

import signal
import time

from endpoint import Endpoint, arguments, meet

from shiftverbs.pyverbs_error import ShiftError


def main():
    options = arguments(__doc__).parse_args()
    orders = []
    signal.signal(signal.SIGUSR1, lambda *_: orders.append("away"))
    signal.signal(signal.SIGUSR2, lambda *_: orders.append("home"))
    endpoint = Endpoint(options.device)
    endpoint.receive(0, 64)
    with meet(options) as stream:
        endpoint.connect(stream)
        shift = endpoint.qp.shift
        rounds, where = 0, None
        while True:
            endpoint.ping_pong(first=options.server is not None)
            rounds += 1
            if where != (shift.status, shift.path):
                where = shift.status, shift.path
                print(f"round {rounds}: {shift.status} on {shift.path}", flush=True)
            while orders:
                try:
                    shift.migrate(1) if orders.pop() == "away" else shift.restore()
                except ShiftError as error:
                    print(error, flush=True)
            time.sleep(0.01)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        pass
