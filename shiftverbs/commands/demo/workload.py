# SPDX-License-Identifier: BSD-3-Clause
"""One host's program: RC traffic by commands, with whichever verbs package it is told to use.

    python -m shiftverbs.commands.demo.workload pyverbs|shiftverbs

It reads commands, one JSON object a line, on standard input and answers on standard output; the end of its input
is the end of it. Commands: open, connect, start, pause, status, close. In between it runs the traffic and tells
its counters every INTERVAL_S.
"""

from __future__ import annotations

import json
import queue
import sys
import threading
import time
import traceback
from typing import Any

from shiftverbs.commands.demo.endpoint import Peer, Verbs
from shiftverbs.commands.demo.traffic import KINDS, Broken, Traffic

__all__ = ["Program", "main"]

INTERVAL_S = 0.05
# After this many empty polls the loop naps: two hosts, their NICs and the parent share few cores here.
SPINS = 50
NAP_S = 0.0001


class Program:
    """The loop: commands, traffic, reports."""

    def __init__(self, package: str) -> None:
        self.verbs = Verbs(package)
        self.traffic: Traffic | None = None
        self.sending = False
        self.error: str | None = None
        self.error_ns = 0
        self._commands: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._next_report = 0.0

    def run(self) -> int:
        """Work until the input ends. Returns the exit status."""
        threading.Thread(target=self._read_commands, name="commands", daemon=True).start()
        self._say({"event": "ready"})
        idle = 0
        while True:
            passive = self.traffic is None or self.error is not None or not self.traffic.active
            try:
                line = self._commands.get(block=passive, timeout=INTERVAL_S if passive else None)
            except queue.Empty:
                pass
            else:
                if line is None:
                    self._close()
                    return 0
                self._answer(line)
                continue
            if not passive and self._step():
                idle = 0
            else:
                idle += 1
                if idle > SPINS and not passive:
                    time.sleep(NAP_S)
            if time.monotonic() >= self._next_report:
                self._next_report = time.monotonic() + INTERVAL_S
                if self.traffic is not None:
                    self._say({"event": "report", **self._report()})

    def _step(self) -> bool:
        assert self.traffic is not None
        try:
            return self.traffic.step(self.sending)
        except Broken as broken:
            self.error, self.error_ns = str(broken), time.monotonic_ns()
            self.sending = False
            self._say({"event": "report", **self._report()})
            return False

    def _read_commands(self) -> None:
        for line in sys.stdin:
            self._commands.put(line)
        self._commands.put(None)

    def _answer(self, line: str) -> None:
        command = json.loads(line)
        try:
            answer: dict[str, Any] = getattr(self, "do_" + command["do"])(command)
        except Exception as error:
            traceback.print_exc()
            answer = {"failed": f"{type(error).__name__}: {error}"}
        self._say({"answers": command["id"], **answer})

    @staticmethod
    def _say(message: dict[str, Any]) -> None:
        sys.stdout.write(json.dumps(message) + "\n")
        sys.stdout.flush()

    def _report(self, full: bool = False) -> dict[str, Any]:
        report: dict[str, Any] = {"t_ns": time.monotonic_ns(), "error": self.error, "error_ns": self.error_ns}
        if self.traffic is not None:
            report |= self.traffic.report()
            if self.verbs.package == "shiftverbs":
                shift = self.traffic.endpoint.qp.shift
                names = ["status", "why", "state", "recv_state", "path", "pair"]
                if full:
                    names += ["counters", "durations", "history"]
                report["shift"] = {name: getattr(shift, name) for name in names}
        return report

    # -- commands

    def do_open(self, command: dict[str, Any]) -> dict[str, Any]:
        """Make the verbs objects; answer with what the peer must know."""
        self._close()
        kind = KINDS[command["traffic"]]
        self.traffic = kind(self.verbs, command["device"], command["role"], command["seed"])
        self.traffic.endpoint.attrs |= command.get("attrs", {})
        return {"peer": self.traffic.endpoint.peer().to_json()}

    def do_connect(self, command: dict[str, Any]) -> dict[str, Any]:
        """Connect to the peer."""
        assert self.traffic is not None
        self.traffic.start(Peer(**command["peer"]))
        return {}

    def do_start(self, command: dict[str, Any]) -> dict[str, Any]:
        """Send messages from now on."""
        self.sending = True
        return {}

    def do_pause(self, command: dict[str, Any]) -> dict[str, Any]:
        """Send no new messages."""
        self.sending = False
        return self._report()

    def do_status(self, command: dict[str, Any]) -> dict[str, Any]:
        """Tell everything."""
        return self._report(full=True)

    def do_close(self, command: dict[str, Any]) -> dict[str, Any]:
        """Destroy the verbs objects."""
        self._close()
        return {}

    def _close(self) -> None:
        traffic, self.traffic = self.traffic, None
        self.sending, self.error, self.error_ns = False, None, 0
        if traffic is not None:
            traffic.close()


def main(arguments: list[str]) -> int:
    """Run the program with the package that is named."""
    if arguments not in (["pyverbs"], ["shiftverbs"]):
        print("usage: python -m shiftverbs.commands.demo.workload pyverbs|shiftverbs", file=sys.stderr)
        return 2
    return Program(arguments[0]).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
