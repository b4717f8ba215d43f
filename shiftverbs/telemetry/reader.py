# SPDX-License-Identifier: BSD-3-Clause
"""Asking the processes of this host what they show of themselves."""

from __future__ import annotations

import json
import os
import socket
import stat
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shiftverbs.telemetry.publisher import remove_if_dead

#: How long all processes together may take to answer, in seconds.
TIMEOUT_S = 3.0
#: More than this of one process is not read: a thousand QPs are half a megabyte.
MOST_BYTES = 256 << 20


@dataclass
class Answers:
    """processes: snapshots, by pid; silent: (pid, why) of those that live and gave none."""

    processes: list[dict[str, Any]] = field(default_factory=list)
    silent: list[tuple[int, str]] = field(default_factory=list)


def ask(where: Path, timeout_s: float = TIMEOUT_S) -> Answers:
    """Ask every process that has a socket in a directory. Sockets of dead ones are removed.

    timeout_s: for all together, but each that is reached gets a second.

    Raises OSError where the directory cannot be read; one that does not exist has no processes in it.
    """
    answers = Answers()
    deadline = time.monotonic() + timeout_s
    try:
        names = sorted(os.listdir(where))
    except FileNotFoundError:
        return answers
    for name in names:
        pid = name.partition("-")[0]
        path = where / name
        if not pid.isdecimal() or not name.endswith(".sock") or not stat.S_ISSOCK(path.lstat().st_mode):
            continue
        try:
            answers.processes.append(_ask_one(path, deadline))
        except (ConnectionRefusedError, FileNotFoundError):
            remove_if_dead(path)
        except (OSError, ValueError) as error:
            answers.silent.append((int(pid), str(error) or type(error).__name__))
    answers.processes.sort(key=lambda process: int(process["pid"]))
    return answers


def _ask_one(path: Path, deadline: float) -> dict[str, Any]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as asked:
        parts: list[bytes] = []
        size = 0
        # A second each at least: one that hangs must not make those after it look as if they did.
        until = max(deadline, time.monotonic() + 1.0)
        asked.settimeout(max(0.1, until - time.monotonic()))
        asked.connect(os.fspath(path))
        while True:
            asked.settimeout(max(0.1, until - time.monotonic()))
            try:
                part = asked.recv(1 << 16)
            except TimeoutError:
                raise TimeoutError("it does not answer") from None
            if not part:
                break
            parts.append(part)
            size += len(part)
            if size > MOST_BYTES:
                raise ValueError("its answer does not end")
            if time.monotonic() > until:
                raise TimeoutError("it does not answer in time")
    if not parts:
        raise ValueError("it gave no answer (another user's, or its log says why)")
    found = json.loads(b"".join(parts))
    if (
        not isinstance(found, dict)
        or not isinstance(found.get("pid"), int)
        or not isinstance(found.get("qps"), list)
    ):
        raise ValueError("its answer is not understood: another release of shiftverbs?")
    return found
