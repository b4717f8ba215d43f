# SPDX-License-Identifier: BSD-3-Clause
"""One etcd watch stream, carrying any number of watches.

etcd3's own watcher makes one watch per round trip and starts a new stream without any pause when one fails, so it
keeps a processor busy while etcd is away. Here requests are sent ahead, answers are matched by their order (etcd
answers creations in the order they came), and a stream that fails is reported once and stays dead.
"""

from __future__ import annotations

import queue
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any

import etcd3.etcdrpc as rpc
import grpc

from shiftverbs.exchanger.link_events import Changed, StreamEnded, WatchEnded


class WatchStream:
    """A stream of watches. Methods are for one thread; events come through `post`, from the stream's own thread.

    A target is a key, or, when it ends with '/', everything that begins with it.
    """

    def __init__(self, stub: Any, metadata: Any, post: Callable[[object], None], session: int):
        self._stub = stub
        self._metadata = metadata
        self._post = post
        self._session = session
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._lock = threading.Lock()
        # Targets whose creation is not answered yet, in order, with our numbers; then by etcd's watch id.
        self._creating: deque[tuple[str, int]] = deque()
        self._ids: dict[str, int] = {}
        self._targets: dict[int, tuple[str, int]] = {}
        self._number = 0
        # Cancelled before etcd told their id.
        self._cancelled: Counter[str] = Counter()
        self._call: Any = None
        self._closing = False

    def watch(self, target: str, start_revision: int) -> int:
        """Report every change of `target` from `start_revision` on. Once per target, until cancelled.

        Returns the number of this watch, by which WatchEnded calls it.
        """
        name = target.encode()
        create = rpc.WatchCreateRequest(key=name, start_revision=start_revision)
        if target.endswith("/"):
            create.range_end = name[:-1] + bytes([name[-1] + 1])
        with self._lock:
            self._number += 1
            number = self._number
            self._creating.append((target, number))
            # Inside the lock: the order of requests must be the order of _creating.
            self._requests.put(rpc.WatchRequest(create_request=create))
        if self._call is None:
            self._call = self._stub.Watch(self._send(), metadata=self._metadata)
            threading.Thread(target=self._receive, name="shiftverbs-etcd-watch", daemon=True).start()
        return number

    def cancel(self, target: str) -> None:
        """No longer watch `target`."""
        with self._lock:
            watch_id = self._ids.pop(target, None)
            if watch_id is None:
                if sum(created == target for created, _ in self._creating) > self._cancelled[target]:
                    self._cancelled[target] += 1
                return
            self._targets.pop(watch_id, None)
            self._send_cancel(watch_id)

    def close(self) -> None:
        """End the stream, quietly."""
        self._closing = True
        self._requests.put(None)
        if self._call is not None:
            self._call.cancel()

    def successor(self) -> WatchStream:
        """A fresh stream in the same session, for when this one has failed."""
        return WatchStream(self._stub, self._metadata, self._post, self._session)

    def _send_cancel(self, watch_id: int) -> None:
        self._requests.put(rpc.WatchRequest(cancel_request=rpc.WatchCancelRequest(watch_id=watch_id)))

    def _send(self) -> Iterator[Any]:
        while (request := self._requests.get()) is not None:
            yield request

    def _receive(self) -> None:
        reason = "the watch stream ended"
        try:
            for response in self._call:
                self._handle(response)
        except grpc.RpcError as error:
            reason = f"watch: {error.code().name}: {(error.details() or '')[:200]}"
        except Exception as error:
            # Whatever it is: those that wait for events have to learn that none will come.
            reason = f"watch: {error!r}"[:200]
        self._requests.put(None)
        if not self._closing:
            self._post(StreamEnded(self._session, reason))

    def _handle(self, response: Any) -> None:
        ended: tuple[str, int] | None = None
        with self._lock:
            if response.created:
                target, number = self._creating.popleft()
                if self._cancelled[target]:
                    self._cancelled[target] -= 1
                    if not response.canceled:
                        self._send_cancel(response.watch_id)
                elif response.canceled:
                    ended = target, number
                else:
                    self._ids[target] = response.watch_id
                    self._targets[response.watch_id] = target, number
            elif response.canceled:
                ended = self._targets.pop(response.watch_id, None)
                if ended is not None:
                    del self._ids[ended[0]]
        if response.events:
            self._post(Changed(self._session, [_change(event) for event in response.events]))
        if ended is not None:
            target, number = ended
            self._post(WatchEnded(self._session, target, response.cancel_reason or "compacted", number))


def _change(event: Any) -> tuple[str, bytes | None, int]:
    key = event.kv.key.decode("utf-8", "surrogateescape")
    # EventType: PUT = 0, DELETE = 1. A deletion carries the revision of the deletion.
    return key, None if event.type else event.kv.value, event.kv.mod_revision
