# SPDX-License-Identifier: BSD-3-Clause
"""The conversation between an application's process and its broker, over a UNIX stream socket.

One JSON object per line, at most MAX_FRAME_BYTES long.

From the application:

    {"op": "hello", "protocol": 1, "job": ..., "store": {...}}    first; job and the etcd it expects
    {"op": "put", "key": ..., "value": text}
    {"op": "del", "key": ...}
    {"op": "want", "key": ...}, {"op": "unwant", "key": ...}
    {"op": "ping"}                                                is somebody there? To a broker that answers that
    {"op": "bye"}                                                 withdraw everything

From the broker:

    {"ev": "hello", "pid": ..., "pid_namespace": ..., "answers": true}    it serves this application
    {"ev": "pong"}
    {"ev": "starting", "phase": ...}         nobody knows yet whether etcd answers
    {"ev": "up"}                             etcd answers
    {"ev": "down", "reason": ...}            it does not
    {"ev": "found", "key": ..., "value": text or null}
    {"ev": "oversize", "key": ..., "size": bytes}
    {"ev": "refused", "key": ..., "reason": ...}
    {"ev": "fatal", "reason": ...}           this broker will not serve this application
    {"ev": "bye"}                            everything is withdrawn
"""

from __future__ import annotations

import json
import os
from typing import Any

import msgspec

_write = msgspec.json.Encoder().encode
_read = msgspec.json.Decoder().decode
PROTOCOL = 1
# A value of records.MAX_VALUE_BYTES with every byte escaped, and its key.
MAX_FRAME_BYTES = 65536


def namespace(kind: str) -> int | None:
    """The number of this process's namespace of a kind, "pid" or "net"; None where that is not known."""
    try:
        return os.stat(f"/proc/self/ns/{kind}").st_ino
    except OSError:
        return None


def pid_namespace() -> int | None:
    """Within which namespace a process id of ours means something."""
    return namespace("pid")


class WireError(Exception):
    """What came is not a frame."""


def encode(frame: dict[str, Any]) -> bytes:
    """One frame as bytes, newline included."""
    try:
        return _write(frame) + b"\n"
    except UnicodeEncodeError:  # a lone surrogate: etcd has bytes there that are no text
        return json.dumps(frame, separators=(",", ":")).encode("ascii") + b"\n"


class FrameReader:
    """Cuts a byte stream into frames."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """Take bytes in; return the frames they complete. Raises WireError, after which the stream is useless."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_FRAME_BYTES or any(len(line) > MAX_FRAME_BYTES for line in lines):
            raise WireError(f"a frame of more than {MAX_FRAME_BYTES} bytes")
        frames = []
        for line in lines:
            try:
                frame = _read(line)
            except (ValueError, RecursionError):
                frame = _read_slowly(line)
            if not isinstance(frame, dict):
                raise WireError("a frame that is not an object")
            frames.append(frame)
        return frames


def _read_slowly(line: bytes) -> object:
    """Of what the quick reader refuses, lone surrogates are in order."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise WireError(f"a frame that is not JSON: {error}") from None


def text_of(frame: dict[str, Any], name: str) -> str:
    """A string member of a frame. Raises WireError."""
    value = frame.get(name)
    if not isinstance(value, str):
        raise WireError(f"a frame without the string {name!r}")
    return value
