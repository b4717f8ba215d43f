# SPDX-License-Identifier: BSD-3-Clause
"""One side of pulls of tensors: who has them, or who pulls them.

    python -m benchmarks.suite.tensors_host serve|pull node|grpc SIZE...

Commands of serve: {} -> {"address"}. Of pull: {"address"} -> {"ready"}, then {"size": bytes, "count": pulls} ->
{"seconds": of each pull}.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

METHOD = "/tensors/Pull"
#: No limit on messages, and nothing between us and the loopback.
OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.enable_http_proxy", 0),
]


def content(size: int) -> bytearray:
    """What a tensor of that many bytes holds."""
    return bytearray((b"%d." % size) * (size // 3 + 1))[:size]


def serve_node(sizes: list[int]) -> str:
    """Publish a tensor of each size, with shiftverbs.tensors; the address."""
    from shiftverbs.tensors import Node

    node = Node("pub", listen="127.0.0.1:0")
    for size in sizes:
        node.publish("tensor", size, content(size), pulls=None)
    return node.address


def pull_node(address: str, sizes: list[int]) -> Callable[[int], Any]:
    """What pulls a tensor of a size into memory that is there."""
    from shiftverbs.config import Config
    from shiftverbs.tensors import Node

    channel = Node("get").connect(address, "pub")
    if not Config.from_environ().disable and not channel.wait_protected(30):
        raise RuntimeError("the channel is not protected")
    memory = {size: bytearray(size) for size in sizes}
    return lambda size: channel.pull("tensor", size, memory[size], timeout_s=120).result()


def serve_grpc(sizes: list[int]) -> str:
    """The same with gRPC: one unary call, bytes in and bytes out, nothing serialized."""
    import grpc

    tensors = {size: bytes(content(size)) for size in sizes}
    handler = grpc.unary_unary_rpc_method_handler(lambda request, context: tensors[int(request)])

    class Handlers(grpc.GenericRpcHandler):
        def service(self, call: Any) -> Any:
            return handler if call.method == METHOD else None

    server = grpc.server(ThreadPoolExecutor(2), options=OPTIONS)
    server.add_generic_rpc_handlers((Handlers(),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    _kept.append(server)
    return f"127.0.0.1:{port}"


def pull_grpc(address: str, sizes: list[int]) -> Callable[[int], Any]:
    """What pulls a tensor of a size; gRPC gives new bytes each time."""
    import grpc

    channel = grpc.insecure_channel(address, options=OPTIONS)
    call = channel.unary_unary(METHOD)
    return lambda size: call(b"%d" % size, timeout=120)


_kept: list[Any] = []


def main() -> None:
    """Serve, or answer commands, until standard input ends."""
    role, kind, *rest = sys.argv[1:]
    sizes = [int(size) for size in rest]
    pull: Callable[[int], Any] | None = None
    for line in sys.stdin:
        command = json.loads(line)
        if role == "serve":
            answer: dict[str, Any] = {"address": (serve_node if kind == "node" else serve_grpc)(sizes)}
        elif "address" in command:
            pull = (pull_node if kind == "node" else pull_grpc)(command["address"], sizes)
            for size in sizes:
                if bytes(pull(size)) != content(size):
                    answer = {"failed": f"the tensor of {size} bytes is another one"}
                    break
            else:
                answer = {"ready": True}
        else:
            assert pull is not None
            seconds = []
            for _ in range(command["count"]):
                begin = time.perf_counter()
                pull(command["size"])
                seconds.append(time.perf_counter() - begin)
            answer = {"seconds": seconds}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
