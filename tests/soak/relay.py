# SPDX-License-Identifier: BSD-3-Clause
"""A TCP relay in front of etcd, one for each host, that can be cut: a partition, or a connection that is reset."""

from __future__ import annotations

import asyncio
import threading


class Relay:
    """Forwards connections to a port of loopback. `endpoint` is where to connect."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._loop = asyncio.new_event_loop()
        self._writers: set[asyncio.StreamWriter] = set()
        self._open = asyncio.Event()
        self._open.set()
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,), name="relay", daemon=True)
        self._thread.start()
        started.wait()

    def _run(self, started: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        self._server = self._loop.run_until_complete(asyncio.start_server(self._connected, "127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        started.set()
        self._loop.run_forever()
        self._server.close()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*asyncio.all_tasks(self._loop), return_exceptions=True))
        self._loop.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._open.wait()
            there, back = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.close()
            return
        await asyncio.gather(self._copy(reader, back), self._copy(there, writer))

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while data := await reader.read(1 << 16):
                await self._open.wait()
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    def _soon(self, call: object, *args: object) -> None:
        self._loop.call_soon_threadsafe(call, *args)  # type: ignore[arg-type]

    def cut(self) -> None:
        """Nothing passes any more, in either direction; connections stay as they are."""
        self._soon(self._open.clear)

    def heal(self) -> None:
        """All that was held back passes."""
        self._soon(self._open.set)

    def reset(self) -> None:
        """Break all connections; new ones are accepted."""
        self._soon(lambda: [writer.transport.abort() for writer in list(self._writers)])

    def close(self) -> None:
        """End it."""
        self.heal()
        self.reset()
        self._soon(self._loop.stop)
        self._thread.join(5)
