# SPDX-License-Identifier: BSD-3-Clause
"""How two nodes meet: over TCP, once, to tell each other the addresses of their QPs. Lines of JSON.

Whoever connects is outside input: lines have a bound, everything has a deadline, and nothing is believed unseen.
"""

from __future__ import annotations

import json
import re
import socket
import time
from typing import Any

from shiftverbs.tensors.errors import MeetingError

VERSION = 1
MAX_LINE_BYTES = 64 * 1024
MAX_NAME = 200


def parse(address: str) -> tuple[str, int]:
    """Host and port of "host:port". Raises ValueError for anything else."""
    match = re.fullmatch(r"(\[[0-9A-Fa-f:.%\w]+\]|[^:\s]*):(\d{1,5})", address)
    if match is None or int(match[2]) > 65535:
        raise ValueError(f"an address is host:port, not {address!r}")
    return match[1].strip("[]"), int(match[2])


def listen(address: str) -> socket.socket:
    """A listening socket. Raises ValueError for what is no address, OSError as bind does."""
    host, port = parse(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family)


def dial(address: str, deadline: float) -> socket.socket:
    """A connection. Raises MeetingError where there is nobody; until the deadline it is tried again."""
    host, port = parse(address)
    while True:
        left = deadline - time.monotonic()
        try:
            return socket.create_connection((host, port), timeout=max(0.01, left))
        except ConnectionRefusedError as error:
            # A node that is being started again.
            if left < 0.1:
                raise MeetingError(f"nobody listens at {address}: {error}") from error
            time.sleep(0.05)
        except OSError as error:
            raise MeetingError(f"{address} cannot be reached: {error}") from error


class Meeting:
    """A conversation on a connected socket, and the Store of a transport of two: what one sets, the other gets.

    :param deadline: for all of it, in time.monotonic()'s seconds
    """

    def __init__(self, connection: socket.socket, deadline: float) -> None:
        self._socket, self._deadline = connection, deadline
        self._rest = b""
        self._found: dict[str, bytes] = {}

    def _send(self, what: dict[str, Any]) -> None:
        self._patience(self._deadline)
        self._socket.sendall(json.dumps(what).encode() + b"\n")

    def _patience(self, until: float) -> None:
        left = until - time.monotonic()
        if left <= 0:
            raise TimeoutError("the time is over")
        self._socket.settimeout(left)

    def _receive(self, until: float) -> dict[str, Any]:
        while b"\n" not in self._rest:
            if len(self._rest) > MAX_LINE_BYTES:
                raise MeetingError(f"a line of more than {MAX_LINE_BYTES} bytes came")
            self._patience(until)
            more = self._socket.recv(65536)
            if not more:
                raise MeetingError("the other side closed the connection")
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\n")
        try:
            what = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise MeetingError(f"what came is no JSON: {error}") from error
        if not isinstance(what, dict):
            raise MeetingError("what came is no JSON object")
        if "error" in what:
            raise MeetingError(f"the other side says: {str(what['error'])[:1000]}")
        return what

    def greet(self, name: str, expected: str | None, until: float | None = None) -> str:
        """Tell our name and hear the other's.

        :param expected: who it is to be; None: anybody
        :param until: when it must have been heard, in time.monotonic()'s seconds; None: at the deadline
        :raises MeetingError: it is somebody else, or no node of this version
        """
        self._send({"shiftverbs.tensors": VERSION, "name": name})
        hello = self._receive(self._deadline if until is None else until)
        version, peer = hello.get("shiftverbs.tensors"), hello.get("name")
        if version != VERSION:
            raise self.refused(f"the protocol's version is {VERSION} here, and {version!r} there")
        if not isinstance(peer, str) or not 0 < len(peer) <= MAX_NAME:
            raise self.refused(f"a name has 1 to {MAX_NAME} characters")
        if expected is not None and peer != expected:
            raise self.refused(f"the node there is {peer!r}, not {expected!r}")
        return peer

    def refused(self, why: str) -> MeetingError:
        """Tell the other side why this ends, if it hears; returns the error to raise here."""
        try:
            self._send({"error": why})
        except OSError:
            pass
        return MeetingError(why)

    # As transport.Store

    def set(self, key: str, value: bytes) -> None:
        """Give the other side a value."""
        self._send({"key": key, "value": value.decode()})

    def get(self, key: str, timeout_s: float) -> bytes:
        """The other side's value of a key. Raises MeetingError, or TimeoutError after so many seconds."""
        until = min(self._deadline, time.monotonic() + timeout_s)
        while key not in self._found:
            what = self._receive(until)
            name, value = what.get("key"), what.get("value")
            if not isinstance(name, str) or not isinstance(value, str) or len(self._found) > 8:
                raise MeetingError("what came is no key and value")
            self._found[name] = value.encode()
        return self._found.pop(key)
