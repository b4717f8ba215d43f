# SPDX-License-Identifier: BSD-3-Clause
"""Terminals with a shell in each, in which a page's commands are typed, and what a page says that they print."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import termios
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness import ROOT

#: A fence such as ```sh title="host a": which terminal, and whether something is typed or comes out there. A comment
#: stands for what a reader does by hand.
_BLOCK = re.compile(
    r'^```(?P<kind>sh|text) title="(?P<terminal>[^"]+)"\n(?P<text>.*?)^```$'
    r"|^<!-- test, in (?P<by_hand>\w+): (?P<command>.*?) -->$",
    re.DOTALL | re.MULTILINE,
)
#: What differs from run to run: numbers that are a word of their own.
_NUMBER = re.compile(r"(?<![\w.])(0x[0-9a-f]+|\d+(?:\.\d+)*)(?!\w)")

_COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass(frozen=True)
class Block:
    """Commands for a terminal (kind sh; ^C is the key), or lines that it shows (kind text)."""

    terminal: str
    kind: str
    lines: tuple[str, ...]


def blocks(page: Path) -> list[Block]:
    """All blocks of a page that name a terminal, in their order."""
    found = []
    for match in _BLOCK.finditer(page.read_text()):
        if match["command"]:
            found.append(Block(match["by_hand"], "sh", (match["command"],)))
            continue
        text = match["text"].replace("\\\n", " ") if match["kind"] == "sh" else match["text"]
        lines = tuple(line.strip() for line in text.splitlines() if line.strip())
        found.append(Block(match["terminal"], match["kind"], lines))
    return found


def pattern(line: str) -> str:
    """A regular expression for a line of output: numbers may be others, blanks more or fewer."""
    pieces = [r"\S+" if _NUMBER.fullmatch(part) else re.escape(part) for part in _NUMBER.split(line)]
    return re.sub(r"(\\ )+", r"\\s+", "".join(pieces))


class Terminal:
    """An interactive bash on a terminal of its own, so that jobs and Ctrl-C are what they are for a reader."""

    def __init__(self, name: str, env: dict[str, str]) -> None:
        self.name = name
        self.output = ""
        self._read_to = 0
        self._changed = threading.Condition()
        self._master, slave = os.openpty()
        settings = termios.tcgetattr(slave)
        settings[3] &= ~termios.ECHO
        termios.tcsetattr(slave, termios.TCSANOW, settings)
        command = ["setsid", "--ctty", "bash", "--norc", "--noprofile", "--noediting", "-i"]
        self._process = subprocess.Popen(command, env=env, cwd=ROOT, stdin=slave, stdout=slave, stderr=slave)
        os.close(slave)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        raw = b""
        while True:
            try:
                data = os.read(self._master, 65536)
            except OSError:  # nobody has the other side any more
                return
            with self._changed:
                raw += data
                self.output = _COLOUR.sub("", raw.decode(errors="replace")).replace("\r\n", "\n")
                self._changed.notify_all()

    def type(self, line: str) -> None:
        """One line, or the key ^C."""
        os.write(self._master, b"\x03" if line == "^C" else line.encode() + b"\n")

    def expect(self, lines: Sequence[str], timeout_s: float = 60.0) -> None:
        """Wait until lines such as these, in any order, stand behind those that were expected before.

        In any order, because a log line is written by another thread than what a program prints.
        """
        deadline = time.monotonic() + timeout_s
        ends = []
        for line in lines:
            wanted = re.compile(pattern(line))
            with self._changed:
                while not (match := wanted.search(self.output, self._read_to)):
                    left = deadline - time.monotonic()
                    assert left > 0, (
                        f"{self.name} showed no {line!r} in {timeout_s} s; it showed:\n{self.output}"
                    )
                    self._changed.wait(left)
                ends.append(match.end())
        self._read_to = max(ends)

    def close(self) -> None:
        """Kill all that was started here."""
        for pid in self._session():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self._process.wait()
        self._reader.join(5)
        os.close(self._master)

    def _session(self) -> Iterator[int]:
        for entry in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = entry.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == self._process.pid:
                yield int(entry.parent.name)
