# SPDX-License-Identifier: BSD-3-Clause
"""Mooncake's transfer engine: one process has memory, another writes into it and reads it back.

    mooncake_peer.py DEVICES                                    has memory: prints where
    mooncake_peer.py DEVICES SERVER ADDRESS SECONDS             writes for so long

The second prints a line for each write that took over a second or failed, and one a second.
"""

import ctypes
import sys
import time

from mooncake.engine import TransferEngine

LENGTH = 1 << 20

devices, *peer = sys.argv[1:]
engine = TransferEngine()
assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "rdma", devices) == 0
memory = ctypes.create_string_buffer(LENGTH)
address = ctypes.addressof(memory)
assert engine.register_memory(address, LENGTH) == 0
if not peer:
    print(f"memory at 127.0.0.1:{engine.get_rpc_port()} {address}", flush=True)
    sys.stdin.read()
    sys.exit()

server, there, seconds = peer[0], int(peer[1]), float(peer[2])
start = said = time.monotonic()
count = 0
while time.monotonic() - start < seconds:
    count += 1
    ctypes.memset(address, count % 251, LENGTH)
    before = time.monotonic()
    failed = engine.transfer_sync_write(server, address, there, LENGTH)
    now = time.monotonic()
    if failed or now - before > 1:
        print(f"write {count}: {'failed' if failed else 'done'} after {now - before:.1f} s", flush=True)
        time.sleep(0.1)
    if now - said > 1:
        print(f"{count} writes", flush=True)
        said = now
ctypes.memset(address, 255, LENGTH)
assert engine.transfer_sync_read(server, address, there, LENGTH) == 0
assert memory.raw == bytes([count % 251]) * LENGTH, "what was read is not what was written last"
print("all right", flush=True)
