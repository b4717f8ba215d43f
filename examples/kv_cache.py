# SPDX-License-Identifier: BSD-3-Clause
"""Prefill and decode apart: blocks of a KV cache, pulled by whoever goes on with a request, on asyncio.

python kv_cache.py --listen 127.0.0.1:7001        prefill: computes blocks and publishes them
python kv_cache.py 127.0.0.1:7001                 decode: pulls all blocks of a request at once
"""

import argparse
import asyncio
import itertools

from shiftverbs.tensors import Node, PullTimeout, RemoteError

BLOCKS, SHAPE = 8, (2, 16, 8, 64)  # a block: keys and values, tokens, heads, bytes of a head


def key(request, block):
    return f"kv/{request}/{block}"


async def prefill(node):
    """Compute the blocks of each request, and publish them for one pull each."""
    print(f"listening at {node.address}", flush=True)
    for request in itertools.count():
        if request % 10 == 9:
            node.publish_error(key(request, 0), 0, "the prompt is too long")
        else:
            publications = []
            for block in range(BLOCKS):
                tensor = node.empty("uint8", SHAPE)
                tensor.memory[:] = bytes([request % 256]) * tensor.nbytes
                publications.append(node.publish(key(request, block), 0, tensor))
            # Backpressure: no more than one request ahead of the decoder.
            for publication in publications:
                await publication
        await asyncio.sleep(0.02)


async def decode(node, address):
    """Pull all blocks of a request at once. What takes too long is computed again, here: a cache may be lost."""
    channel = await asyncio.to_thread(node.connect, address, None, 60)
    await asyncio.to_thread(channel.wait_protected, 20)
    for request in itertools.count():
        wanted = [key(request, block) for block in range(1 if request % 10 == 9 else BLOCKS)]
        try:
            blocks = await asyncio.gather(*(channel.pull(name, 0, timeout_s=10) for name in wanted))
        except (PullTimeout, RemoteError) as error:
            print(f"request {request}: {error}", flush=True)
            continue
        # numpy.asarray(block) or torch.from_dlpack(block) look at the same memory, which is free when nobody does.
        assert all(block.shape == SHAPE and set(block.memory) == {request % 256} for block in blocks)
        if request % 25 == 0:
            print(f"request {request}: {len(blocks)} blocks over {channel.path}", flush=True)


async def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("prefill", nargs="?", help="host:port of the prefill node; without it, this is one")
    parser.add_argument("--listen", default="127.0.0.1:7001", help="where it listens (%(default)s)")
    options = parser.parse_args()
    if options.prefill:
        with Node() as node:
            await decode(node, options.prefill)
    else:
        with Node("prefill", listen=options.listen) as node:
            await prefill(node)


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except KeyboardInterrupt:
        pass
