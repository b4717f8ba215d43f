# SPDX-License-Identifier: BSD-3-Clause
"""Weights to inference servers: a trainer publishes each version, servers pull it to where they compute.

python serve_weights.py --listen 127.0.0.1:7000            the trainer
python serve_weights.py 127.0.0.1:7000                     a server
"""

import argparse
import array
import time

from shiftverbs.tensors import ChannelError, Node, PullTimeout

LAYERS = {"embedding": 200_000, "attention": 100_000, "head": 50_000}
KEEP = 2  # versions that a slow server may still pull


def train(node, seconds_per_version):
    """Publish versions 1, 2, …: any number of servers may pull each, until it is withdrawn."""
    print(f"listening at {node.address}", flush=True)
    weights = {}
    version = 0
    while True:
        version += 1
        for name, length in LAYERS.items():
            # Memory of the node's pool is registered once. A step of training would write to it.
            weights[version, name] = tensor = node.empty("float32", (length,))
            tensor.memory.cast("f")[:] = array.array("f", [version]) * length
            node.publish(name, version, tensor, pulls=None)
        for name in LAYERS:
            old = (version - KEEP, name)
            if node.withdraw(name, version - KEEP):
                del weights[old]  # whoever is pulling it gets it all the same
        node.withdraw("newest", 0)
        node.publish("newest", 0, array.array("q", [version]), pulls=None)  # where a server begins
        print(f"version {version} for {len(node.channels)} servers", flush=True)
        time.sleep(seconds_per_version)


def serve(node, address):
    """Pull one version after the other. A version that is not there yet is waited for."""
    memory = {name: array.array("f", bytes(4 * length)) for name, length in LAYERS.items()}
    channel = connect(node, address)
    version = newest(channel)
    while True:
        try:
            if came([channel.pull(name, version, out, timeout_s=5) for name, out in memory.items()]):
                assert all(set(out) == {version} for out in memory.values())
                print(f"version {version} of {channel.peer} is in place, over {channel.path}", flush=True)
                version += 1
            else:  # we are slow, and it was withdrawn before we asked
                version = newest(channel)
        except ChannelError as error:
            print(f"{error}; connecting again", flush=True)
            channel = connect(node, address)
            version = newest(channel)


def connect(node, address):
    """A channel that survives the loss of a NIC, if there is another."""
    channel = node.connect(address, timeout_s=60)
    channel.wait_protected(20)
    return channel


def newest(channel):
    """The version that the trainer published last."""
    return channel.pull("newest", 0).result().memory.cast("q")[0]


def came(pulls):
    """Wait for all. Whether each tensor is in place."""
    in_time = True
    for pull in pulls:
        try:
            pull.result()
        except PullTimeout:
            in_time = False
    return in_time


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "trainer", nargs="?", help="host:port of the trainer; without it, this is the trainer"
    )
    parser.add_argument("--listen", default="127.0.0.1:7000", help="where the trainer listens (%(default)s)")
    parser.add_argument(
        "--every", type=float, default=0.5, help="seconds from version to version (%(default)s)"
    )
    options = parser.parse_args()
    if options.trainer:
        with Node() as node:
            serve(node, options.trainer)
    else:
        with Node("trainer", listen=options.listen) as node:
            train(node, options.every)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        pass
