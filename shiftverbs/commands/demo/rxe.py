# SPDX-License-Identifier: BSD-3-Clause
"""The kernel's soft-RoCE as the demo's network: two hosts with two or more rails on one machine, and what breaks them.

It uses a network that is there (tools/rxe/network.sh of the source tree makes it, in a virtual machine of its own:
it rearranges routing); it makes none. Devices rxe_a0, rxe_a1, … are host a's, on the interfaces a0, a1, …, which are
cabled to sa0, sa1, … on the bridges sw0, sw1, …; the same for b.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType

from shiftverbs.commands.demo.network import HOSTS, Injection

__all__ = ["FAULTS", "RxeNetwork", "RxeNetworkError"]

FAULTS = {
    "initiator_port": "host a's cable to its switch is pulled: PORT_ERR there",
    "responder_port": "host b's cable to its switch is pulled: PORT_ERR there",
    "switch": "the switch forwards nothing from or to host a: no event anywhere",
    "ack_lost": "host a's NIC gets no acknowledgements (READ: responses) any more, then its cable is pulled",
    "netem": "the network loses every packet that host a sends",
    "interface_down": "host a's interface is switched off on the host itself",
}
# BTH opcodes of RC: responses to READs, acknowledgement.
READ_RESPONSES, ACKNOWLEDGE = (0x0D, 0x0E, 0x0F, 0x10), (0x11,)
# Of the first payload byte of UDP over IPv4 without options: where the BTH begins.
BTH_OFFSET = 28
INFINIBAND = Path("/sys/class/infiniband")


class RxeNetworkError(RuntimeError):
    """The network is not there, or a command failed on it. The message says which."""


def _command(*arguments: str, check: bool = True) -> None:
    done = subprocess.run(arguments, capture_output=True, text=True)
    if check and done.returncode:
        raise RxeNetworkError(f"{' '.join(arguments)}: {done.stderr.strip() or done.returncode}")


class RxeNetwork:
    """The network of tools/rxe/network.sh as it stands. rails: how many of its rails the hosts use."""

    #: Times of the demo's waits are multiplied by this: an emulated machine is slow.
    patience = 4.0
    #: rxe (6.1) lets a resend run into what arrives meanwhile, and then sends wrong packets, or the same ones without
    #: end. So nothing is resent on a path that is merely slow: 268 ms a try, 0.8 s for all; 82 ms after an RNR NAK,
    #: time for the receiver to run; and MTU 4096, for fewer packets.
    attrs: Mapping[str, int] = {"timeout": 16, "retry_cnt": 2, "min_rnr_timer": 26, "path_mtu": 5}

    def __init__(self, rails: int = 2) -> None:
        self.rails = rails
        missing = [name for host in HOSTS for name in self.devices(host) if not (INFINIBAND / name).exists()]
        if missing:
            raise RxeNetworkError(
                f"there is no RDMA device {', '.join(missing)}: the demo on rxe runs in a virtual machine whose "
                f"network tools/rxe/network.sh has made (make test-rxe does that)"
            )
        for program in ("ip", "bridge", "tc"):
            if shutil.which(program) is None:
                raise RxeNetworkError(f"{program} is not installed (package iproute2)")
        self._undo: list[tuple[str, ...]] = []
        self._directory = tempfile.mkdtemp(prefix="shiftverbs-rxe-")

    def devices(self, host: str) -> list[str]:
        """Return the devices of a host, the default one first."""
        return [f"rxe_{host}{rail}" for rail in range(self.rails)]

    def device(self, host: str) -> str:
        """Return the default device of a host."""
        return self.devices(host)[0]

    def environment(self, host: str, base: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of a program on a host: base, without what configures us, plus its backups.

        Both hosts see the same devices, so each is told its own. They share a broker, which an emulated machine takes
        half a minute to start; for the same reason a silent peer is given longer.
        """
        env = {name: value for name, value in base.items() if not name.startswith(("SOFTRNIC", "SHIFTVERBS"))}
        own = self.devices(host)
        backups = [f"{name}={','.join(n for n in own if n != name)}" for name in own if self.rails > 1]
        broker = os.path.join(self._directory, "broker")
        deadline_ms = int(2000 * self.patience)
        return env | {
            "SHIFTVERBS_BACKUP": ";".join(backups),
            "SHIFTVERBS_BROKER": broker,
            "SHIFTVERBS_PEER_DEADLINE_MS": str(deadline_ms),
            "SHIFTVERBS_RUN_DIR": os.path.join(self._directory, "run"),
        }

    def inject(self, fault: str, traffic: str, rail: int = 0) -> Injection:
        """Order one of FAULTS on a rail; traffic says what an answer to a message is there."""
        now_ns = time.monotonic_ns()
        a, b = f"a{rail}", f"b{rail}"
        if fault == "initiator_port":
            self.cut(a)
        elif fault == "responder_port":
            self.cut(b)
        elif fault == "switch":
            _command("bridge", "link", "set", "dev", f"s{a}", "state", "0")
            self._undo.append(("bridge", "link", "set", "dev", f"s{a}", "state", "3"))
        elif fault == "ack_lost":
            self.drop_arriving(a, READ_RESPONSES if traffic == "read" else ACKNOWLEDGE)
            self.cut(a)
        elif fault == "netem":
            _command("tc", "qdisc", "replace", "dev", a, "root", "netem", "loss", "100%")
            self._undo.append(("tc", "qdisc", "replace", "dev", a, "root", "pfifo", "limit", "10000"))
        elif fault == "interface_down":
            _command("ip", "link", "set", a, "down")
            self._undo.extend(self._interface_up(a))
        else:
            raise ValueError(f"unknown fault {fault!r}")
        return Injection(lambda: now_ns)

    def cut(self, netdev: str) -> None:
        """Pull the cable of an interface ("a0") out of its switch."""
        _command("ip", "link", "set", f"s{netdev}", "down")
        self._undo.append(("ip", "link", "set", f"s{netdev}", "up"))

    def mend(self, netdev: str) -> int:
        """Plug the cable in again; returns CLOCK_MONOTONIC in nanoseconds."""
        command = ("ip", "link", "set", f"s{netdev}", "up")
        _command(*command)
        self._undo = [undo for undo in self._undo if undo != command]
        return time.monotonic_ns()

    def drop_arriving(self, netdev: str, opcodes: Iterable[int]) -> None:
        """Drop the RoCEv2 packets with these BTH opcodes that arrive at an interface."""
        _command("tc", "qdisc", "add", "dev", netdev, "clsact")
        self._undo.append(("tc", "qdisc", "del", "dev", netdev, "clsact"))
        for opcode in opcodes:
            match = f"match ip protocol 17 0xff match ip dport 4791 0xffff match u8 {opcode:#x} 0xff at {BTH_OFFSET}"
            _command(*f"tc filter add dev {netdev} ingress protocol ip u32 {match} action drop".split())

    @staticmethod
    def _interface_up(netdev: str) -> list[tuple[str, ...]]:
        """The commands that bring an interface back with what the kernel forgot of it."""
        rail = netdev[1:]
        own, peer = (1, 2) if netdev[0] == "a" else (2, 1)
        table = str(100 + int(rail) * 2 + own)
        lines = [
            f"ip link set {netdev} up",
            f"ip route replace 10.0.{rail}.0/24 dev {netdev} src 10.0.{rail}.{own} table {table}",
            f"ip route replace local 10.0.{rail}.{own} dev {netdev} table {table}",
            f"ip neigh replace 10.0.{rail}.{peer} lladdr 02:00:00:00:0{rail}:0{peer} dev {netdev} nud permanent",
        ]
        return [tuple(line.split()) for line in lines]

    def heal(self) -> int:
        """Make everything whole again; returns CLOCK_MONOTONIC in nanoseconds, before the first of its commands."""
        undo, self._undo = self._undo, []
        began_ns = time.monotonic_ns()
        for command in undo:
            _command(*command)
        return began_ns

    def close(self) -> None:
        """Heal it. A second call does nothing."""
        self.heal()
        shutil.rmtree(self._directory, ignore_errors=True)

    def __enter__(self) -> RxeNetwork:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
