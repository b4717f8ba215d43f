# SPDX-License-Identifier: BSD-3-Clause
"""WRITE a block into another host's memory, READ it back, compare; and again.

    python read_write.py            offers its memory and sleeps
    python read_write.py SERVER     writes and reads there

The address and the rkey are told once, at the beginning, and stay good on every NIC.
"""

import sys
import time

from endpoint import Endpoint, arguments, meet

import shiftverbs.enums as e

BLOCK = 64 * 1024
OUT, BACK = 0, BLOCK  # where the two blocks lie in the memory region


def write_and_read(endpoint, remote):
    """remote: (address, rkey) of the peer's memory."""
    shift = endpoint.qp.shift
    number = 0
    shown = time.monotonic()
    while True:
        block = number.to_bytes(8, "little") * (BLOCK // 8)
        endpoint.mr.write(block, BLOCK, OUT)
        endpoint.send(OUT, BLOCK, e.IBV_WR_RDMA_WRITE, remote)
        endpoint.wait(e.IBV_WC_RDMA_WRITE)
        endpoint.send(BACK, BLOCK, e.IBV_WR_RDMA_READ, remote)
        endpoint.wait(e.IBV_WC_RDMA_READ)
        if endpoint.mr.read(BLOCK, BACK) != block:
            sys.exit(f"block {number} came back changed")
        number += 1
        if time.monotonic() >= shown + 1:
            shown = time.monotonic()
            print(f"{number} blocks written and read back, {shift.status} on {shift.path}", flush=True)


def main():
    options = arguments(__doc__).parse_args()
    endpoint = Endpoint(options.device, size=2 * BLOCK)
    with meet(options) as stream:
        remote = endpoint.connect(stream)
        if options.server:
            write_and_read(endpoint, remote)
        print("connected", flush=True)
        stream.readline()  # asleep until the other end goes: nothing here handles a WRITE or a READ


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        pass
