# SPDX-License-Identifier: BSD-3-Clause
"""A private software network for one run: two hosts, two rails, and the four faults."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Protocol

from shiftverbs.softrnic import faults

__all__ = ["DEFAULT_DEVICE", "HOSTS", "Injection", "Network", "SoftNetwork"]

HOSTS = ("a", "b")
DEFAULT_DEVICE = "soft0"


class Injection:
    """A fault that was ordered: when it took effect, once it has."""

    def __init__(self, at_ns: Callable[[], int | None]) -> None:
        self._at_ns = at_ns

    def at_ns(self) -> int | None:
        """CLOCK_MONOTONIC nanoseconds, or None while it waits for its packet."""
        return self._at_ns()


class Network(Protocol):
    """What scenarios need of a network with hosts a and b.

    patience: factor on the time limits of waiting. attrs: attributes of the QPs (fields of ibv_qp_attr) where
    Endpoint.ATTRS do not suit its NICs.
    """

    patience: float
    attrs: Mapping[str, int]

    def device(self, host: str) -> str:
        """Return the name of a host's default device."""

    def environment(self, host: str, base: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of a program on a host."""

    def inject(self, fault: str, traffic: str) -> Injection:
        """Order a fault; traffic says what an answer to a message is there."""

    def heal(self) -> int:
        """Make everything whole again; returns CLOCK_MONOTONIC in nanoseconds."""


class SoftNetwork:
    """The software RNIC's network in a directory of its own, so that its faults reach nobody else.

    Sets SOFTRNIC_DIR of this process while it is open: the fault functions follow it.
    """

    patience = 1.0
    attrs: Mapping[str, int] = {}

    def __init__(self) -> None:
        self.directory = tempfile.mkdtemp(prefix="shiftverbs-nic-")
        self._previous = os.environ.get("SOFTRNIC_DIR")
        os.environ["SOFTRNIC_DIR"] = self.directory
        for host in HOSTS:
            faults.register(host, "1")

    def device(self, host: str) -> str:
        """Return the default device of a host."""
        return DEFAULT_DEVICE

    def environment(self, host: str, base: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of a program on a host: base, without what configures us, plus its NICs."""
        env = {name: value for name, value in base.items() if not name.startswith(("SOFTRNIC", "SHIFTVERBS"))}
        if "SOFTRNIC_LIBRARY" in base:
            env["SOFTRNIC_LIBRARY"] = base["SOFTRNIC_LIBRARY"]
        # Programs that are killed leave their sockets: with everything else, they are removed with the network.
        sockets = os.path.join(self.directory, "run")
        nics = {"SOFTRNIC": "1", "SOFTRNIC_HOST": host, "SOFTRNIC_DIR": self.directory}
        return env | nics | {"SHIFTVERBS_RUN_DIR": sockets}

    def inject(self, fault: str, traffic: str) -> Injection:
        """Order one of the faults of options.FAULTS; traffic says what an answer to a message is there."""
        if fault == "ack_lost":
            opcode = "read_response" if traffic == "read" else "ack"
            rule = faults.drop("a/soft0", direction="rx", opcode=opcode, then="down")
            return Injection(lambda: faults.rule(rule).fired_ns or None)
        now_ns = time.monotonic_ns()
        if fault == "initiator_port":
            faults.down("a/soft0")
        elif fault == "responder_port":
            faults.down("b/soft0")
        elif fault == "switch":
            faults.switch_down("rail0")
        else:
            raise ValueError(f"unknown fault {fault!r}")
        return Injection(lambda: now_ns)

    def heal(self) -> int:
        """Make everything whole again; returns CLOCK_MONOTONIC in nanoseconds."""
        faults.clear()
        return time.monotonic_ns()

    def close(self) -> None:
        """Remove it. A second call does nothing."""
        if os.environ.get("SOFTRNIC_DIR") == self.directory:
            if self._previous is None:
                del os.environ["SOFTRNIC_DIR"]
            else:
                os.environ["SOFTRNIC_DIR"] = self._previous
        shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> SoftNetwork:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
