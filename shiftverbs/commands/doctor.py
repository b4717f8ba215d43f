# SPDX-License-Identifier: BSD-3-Clause
"""`shiftverbs doctor`: would failover work on this machine, with this environment? Each red finding with its remedy.

It looks at the devices, ports and GIDs, the backup map, etcd (reached and logged in to, written and read), pyverbs'
layout, the memlock limit, and runs real traffic: over each NIC and moved between a NIC and its backups.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import secrets
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from shiftverbs.process.releases import release

__all__ = ["Check", "Doctor", "add_arguments", "main"]

ETCD_S = 15.0
REHEARSAL_S = 90.0
# Memory is registered once per NIC, and each registration is counted against the limit.
MEMLOCK_BYTES = 1 << 30
CAP_IPC_LOCK = 14
INFINIBAND = Path("/sys/class/infiniband")
PORT_STATES = {0: "no state", 1: "DOWN", 2: "INIT", 3: "ARMED", 4: "ACTIVE", 5: "ACTIVE_DEFER"}
RATE_MTU = {1: 256, 2: 512, 3: 1024, 4: 2048, 5: 4096}
GID_TYPES = {0: "IB", 1: "RoCE v1", 2: "RoCE v2"}
# A GID that no network has (RFC 6666's discard prefix): where the doctor writes in etcd.
DISCARD_GID = "0100:0000:0000:0000:0000:0000:0000:0001"


@dataclass(frozen=True)
class Check:
    """One finding. ok: green, red, or None where something above made it pointless; remedy: what to do about red."""

    name: str
    ok: bool | None
    found: str
    remedy: str | None = None


@dataclass
class Device:
    """What was read of a device: its ports (backup.Port) and, by port number, its GIDs (backup.Gid)."""

    name: str
    ports: list[Any]
    gids: dict[int, list[Any]]

    @property
    def active(self) -> bool:
        """Whether a port is active."""
        return any(port.active for port in self.ports)


def own_card(name: str) -> str | None:
    """The PCI card of a device, without the function number; None where it has none (software)."""
    try:
        address = (INFINIBAND / name / "device").resolve(strict=True).name
    except OSError:
        return None
    return address.rpartition(".")[0] or None


def is_the_kernels(name: str) -> bool:
    """Whether this device is one of the kernel's: software NICs show files, too, where they are in front of libc."""
    path = (INFINIBAND / name).resolve()
    return path.exists() and "softrnic" not in path.parts


class Doctor:
    """All checks, in an order in which each may rely on those before. progress: told what is being looked at."""

    def __init__(self, progress: Callable[[str], None] = lambda text: None) -> None:
        self.checks: list[Check] = []
        self._progress = progress
        self._config: Any = None
        self._names: list[str] = []
        self._devices: dict[str, Device] = {}
        self._backups: dict[str, list[str]] = {}
        self._etcd_works = False

    def examine(self) -> list[Check]:
        """Run every check."""
        for part in (self._pyverbs, self._configuration, self._list, self._ports, self._gids, self._backup_map,
                     self._memlock, self._etcd, self._traffic):  # fmt: skip
            self._progress(part.__name__.strip("_").replace("_", " "))
            self.checks.extend(part())
            if not self.checks[0].ok:
                break  # without pyverbs nothing below can be asked
        return self.checks

    # -- software

    def _pyverbs(self) -> Iterator[Check]:
        try:
            import pyverbs.pyverbs_error  # noqa: F401

            from shiftverbs import _core

            _core.check_abi()
        except ImportError as error:
            yield Check(
                "pyverbs", False, str(error),
                "install pyverbs for this interpreter (Debian: apt-get install python3-pyverbs, for /usr/bin/python3), "
                "in a release whose layout is known; then build shiftverbs anew",
            )  # fmt: skip
            return
        yield Check("pyverbs", True, f"pyverbs {release()}, its objects are laid out as expected")

    def _configuration(self) -> Iterator[Check]:
        from shiftverbs.config import Config, ConfigError, unknown_variables

        try:
            self._config = Config.from_environ()
        except ConfigError as error:
            yield Check("configuration", False, str(error), f"correct {error.variable}, or unset it")
            return
        unknown = unknown_variables(os.environ)
        if unknown:
            yield Check(
                "configuration", False, f"{', '.join(unknown)} means nothing", "correct the name, or unset it"
            )
        elif self._config.disable:
            yield Check(
                "configuration", False, "SHIFTVERBS_DISABLE is set: no failover", "unset SHIFTVERBS_DISABLE"
            )
        else:
            given = sorted(name for name in os.environ if name.startswith("SHIFTVERBS_"))
            yield Check("configuration", True, f"{', '.join(given) or 'no SHIFTVERBS_ variable is set'}")

    # -- devices

    def _list(self) -> Iterator[Check]:
        from shiftverbs import _nic

        try:
            self._names = _nic.list_devices()
        except OSError as error:
            yield Check(
                "devices", False, f"no list of devices: {error}", "load the driver (modprobe ib_uverbs …)"
            )
            return
        if len(self._names) < 2:
            yield Check(
                "devices", False, f"there is {self._names[0] if self._names else 'no RDMA device'}",
                "failover needs two: load the NICs' driver and rdma-core's provider (ibv_devices lists what libibverbs "
                "sees), in a container pass /dev/infiniband in; or try without hardware: SOFTRNIC=1",
            )  # fmt: skip
        else:
            yield Check("devices", True, ", ".join(self._names))

    def _ports(self) -> Iterator[Check]:
        from shiftverbs import _nic
        from shiftverbs.native.ibv import LinkLayer, PortState
        from shiftverbs.shadows.nic import Port

        for name in self._names:
            try:
                ctx = _nic.open_device(name)
            except OSError as error:
                yield Check(
                    f"device {name}", False, f"it cannot be opened: {error}",
                    "look at the permissions of /dev/infiniband/uverbs*, and at the kernel's log",
                )  # fmt: skip
                continue
            try:
                found, ports, gids = [], [], {}
                for number in range(1, _nic.query_device(ctx)["phys_port_cnt"] + 1):
                    seen = _nic.query_port(ctx, number)
                    ethernet = seen["link_layer"] == LinkLayer.ETHERNET
                    ports.append(Port(number, seen["state"] == PortState.ACTIVE, ethernet))
                    gids[number] = _read_gids(ctx, number, seen["gid_tbl_len"])
                    found.append(
                        f"port {number} {PORT_STATES.get(seen['state'], seen['state'])}, "
                        f"{'Ethernet' if ethernet else 'InfiniBand'}, MTU {RATE_MTU.get(seen['active_mtu'], '?')}"
                    )
            finally:
                _nic.close_device(ctx)
            device = self._devices[name] = Device(name, ports, gids)
            yield Check(
                f"device {name}", device.active, "; ".join(found) or "it has no port",
                None if device.active else
                "bring the port up: look at the cable, at `ip link` (RoCE) or at the subnet manager (InfiniBand)",
            )  # fmt: skip

    def _gids(self) -> Iterator[Check]:
        from shiftverbs.native.ibv import GidType
        from shiftverbs.shadows.nic import best_gid

        for device in self._devices.values():
            for port in device.ports:
                if not port.active:
                    continue
                best = best_gid(device.gids[port.number])
                name = f"GID of {device.name}/{port.number}"
                if best is None:
                    yield Check(
                        name, False, "its GID table is empty", "give its network interface an address"
                    )
                elif port.ethernet and (best.type != GidType.ROCE_V2 or best.is_link_local):
                    yield Check(
                        name, False,
                        f"the best is index {best.index}, {GID_TYPES.get(best.type, best.type)} {_text(best.raw)}",
                        "give its network interface an address that the peers can route to (RoCE v2 over IPv4 or IPv6)",
                    )  # fmt: skip
                else:
                    what = f"index {best.index}, {GID_TYPES.get(best.type, best.type)}, {_text(best.raw)}"
                    yield Check(name, True, what)

    def _backup_map(self) -> Iterator[Check]:
        from shiftverbs.shadows.nic import BackupError, choose

        backup_map = dict(self._config.backup or ()) if self._config is not None else {}

        def ports_of(name: str) -> list[Any]:
            return self._devices[name].ports if name in self._devices else []

        for name, device in self._devices.items():
            if not device.active or (backup_map and name not in backup_map and _is_backup(name, backup_map)):
                continue
            try:
                backups = choose(name, self._names, backup_map, ports_of)
            except BackupError as error:
                yield Check("backups", False, str(error), "correct SHIFTVERBS_BACKUP")
                return
            usable = [
                backup for backup in backups if backup in self._devices and self._devices[backup].active
            ]
            self._backups[name] = usable
            if not usable:
                yield Check(
                    f"backup of {name}", False,
                    f"{', '.join(backups)} has no active port" if backups else "it has none",
                    "another device with an active port of the same link layer is needed; SHIFTVERBS_BACKUP, where it"
                    f" is set, must name it: {name}=…",
                )  # fmt: skip
            elif own_card(name) is not None and all(own_card(backup) == own_card(name) for backup in usable):
                yield Check(
                    f"backup of {name}", False, f"{', '.join(usable)}, on the same card",
                    "it survives a cable and not the card: name a device of another card in SHIFTVERBS_BACKUP",
                )  # fmt: skip
            else:
                yield Check(f"backup of {name}", True, ", ".join(usable))

    # -- limits

    def _memlock(self) -> Iterator[Check]:
        soft, _hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        text = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft // 1024} KiB"
        if not any(is_the_kernels(name) for name in self._names):
            yield Check("memlock limit", True, f"{text}; no device here pins memory")
        elif soft == resource.RLIM_INFINITY or soft >= MEMLOCK_BYTES or _has_capability(CAP_IPC_LOCK):
            yield Check("memlock limit", True, text if soft != 0 else "privileged")
        else:
            yield Check(
                "memlock limit", False, text,
                "memory is registered on every NIC, and each time counts: ulimit -l unlimited "
                "(/etc/security/limits.d, LimitMEMLOCK=infinity, docker --ulimit memlock=-1)",
            )  # fmt: skip

    # -- etcd

    def _etcd(self) -> Iterator[Check]:
        if self._config is None:
            yield Check("etcd", None, "not looked at: the configuration is wrong")
            return
        if not self._config.etcd:
            yield Check(
                "etcd", False, "SHIFTVERBS_ETCD is not set: no QP is protected",
                "run etcd where every host reaches it and set SHIFTVERBS_ETCD=host:2379",
            )  # fmt: skip
            return
        endpoints = ", ".join(endpoint.url for endpoint in self._config.etcd)
        problem, took_ms = _write_and_read(self._config)
        if problem is None:
            self._etcd_works = True
            login = f" as {self._config.etcd_user}" if self._config.etcd_user else ""
            yield Check("etcd", True, f"{endpoints}{login}: written and read in {took_ms:.0f} ms")
        else:
            yield Check(
                "etcd", False, f"{endpoints}: {problem}",
                "look at SHIFTVERBS_ETCD, at firewalls, at etcd itself; with login or TLS at SHIFTVERBS_ETCD_USER, "
                "_PASSWORD_FILE, _CA, _CERT and _KEY; its role must read and write /shiftverbs/",
            )  # fmt: skip

    # -- traffic

    def _traffic(self) -> Iterator[Check]:
        for name, device in self._devices.items():
            if not device.active:
                continue
            backups = self._backups.get(name)
            full = bool(self._etcd_works and backups and not self._config.disable)
            if backups is None and self._backups:
                full = False
            self._progress(f"traffic on {name}")
            problem, steps = _rehearse(name, plain=not full)
            what = (
                f"traffic {name} to {', '.join(backups)} and back"
                if full and backups
                else f"traffic on {name}"
            )
            if problem is None:
                yield Check(what, True, ", then ".join(steps))
            else:
                yield Check(
                    what, False, problem,
                    "with plain verbs: ib_write_bw -d DEVICE between two shells; then `qp.shift.why`, and "
                    "the log (SHIFTVERBS programs log through Python's logging)" if full else
                    "the NIC does not carry traffic to itself: try ibv_rc_pingpong -d DEVICE -g GID_INDEX, look at "
                    "firewalls (UDP port 4791) and at the kernel's log",
                )  # fmt: skip


def _read_gids(ctx: int, port: int, length: int) -> list[Any]:
    from shiftverbs import _nic
    from shiftverbs.shadows.nic import MAX_GIDS, Gid

    found = []
    for index in range(min(length, MAX_GIDS)):
        try:
            raw = _nic.query_gid(ctx, port, index)
            if any(raw[8:]):
                found.append(Gid(index, _nic.query_gid_type(ctx, port, index), raw))
        except OSError:
            continue  # an empty entry
    return found


def _text(gid: bytes) -> str:
    import ipaddress

    address = ipaddress.IPv6Address(gid)
    return str(address.ipv4_mapped or address)


def _is_backup(name: str, backup_map: dict[str, tuple[str, ...]]) -> bool:
    return any(name in backups for backups in backup_map.values())


def _has_capability(number: int) -> bool:
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("CapEff:"):
                return bool(int(line.split()[1], 16) >> number & 1)
    except (OSError, ValueError):
        pass
    return False


def _write_and_read(config: Any) -> tuple[str | None, float]:
    """Publish a record, read it back, withdraw it: what every process will do. Returns (problem, milliseconds)."""
    from shiftverbs.exchanger import (
        Found,
        QpRecord,
        Rejected,
        Route,
        Unavailable,
        new_instance_id,
        open_exchanger,
        qp_key,
    )

    exchanger = open_exchanger(config)
    assert exchanger is not None
    problem = ""
    started = time.monotonic()
    with exchanger:
        route = Route(DISCARD_GID, 0, secrets.randbits(24))
        key = qp_key(config.job, DISCARD_GID, route.qpn)
        mine = QpRecord(config.job, new_instance_id(), route, None, None, (), (), new_instance_id(), 0)
        exchanger.publish(key, mine)
        exchanger.want(key)
        while (left := started + ETCD_S - time.monotonic()) > 0:
            select.select([exchanger.fileno()], [], [], left)
            for event in exchanger.poll_events():
                match event:
                    case Found() if event.value is not None:
                        return None, (time.monotonic() - started) * 1e3
                    case Rejected() | Unavailable():
                        problem = event.reason
            if problem and time.monotonic() - started > ETCD_S / 3:
                break  # it is tried again all the time; a passing failure at the start is none
        if not problem:
            progress = exchanger.progress
            problem = f"no answer within {ETCD_S:g} s" + (f": {progress}" if progress else "")
    return problem, (time.monotonic() - started) * 1e3


def _rehearse(device: str, plain: bool) -> tuple[str | None, list[str]]:
    """Run live_check.py for a device. Returns (problem, steps)."""
    env = dict(os.environ)
    if plain:
        env["SHIFTVERBS_DISABLE"] = "1"
    command = [
        sys.executable,
        "-m",
        "shiftverbs.commands.live_check",
        device,
        *(["--plain"] if plain else []),
    ]
    # The child must find the very package this is.
    env["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).parents[1]), *env.get("PYTHONPATH", "").split(os.pathsep)]
    )
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=REHEARSAL_S)
    except subprocess.TimeoutExpired:
        return f"it hung for {REHEARSAL_S:g} s", []
    try:
        outcome = json.loads(done.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        return f"it died with status {done.returncode}: {last}", []
    return outcome["problem"], outcome["steps"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the doctor's arguments to a parser."""
    parser.add_argument("--json", action="store_true", help="print the findings as a JSON object")


def show(checks: list[Check], stream: TextIO) -> None:
    """Print findings for people, in colour on a terminal."""
    colour = stream.isatty()
    words = {True: ("green", "32"), False: ("RED", "31"), None: ("-", "33")}
    for check in checks:
        word, code = words[check.ok]
        mark = f"\x1b[{code}m{word:5}\x1b[0m" if colour else f"{word:5}"
        print(f"{mark}  {check.name}: {check.found}", file=stream)
        if check.remedy:
            print(f"       remedy: {check.remedy}", file=stream)


def main(parsed: argparse.Namespace) -> int:
    """Examine this machine. Returns 0 if nothing is red, else 1."""
    quiet = parsed.json or not sys.stderr.isatty()
    doctor = Doctor(lambda text: None if quiet else print(f"… {text}", file=sys.stderr, flush=True))
    checks = doctor.examine()
    healthy = all(check.ok is not False for check in checks)
    if parsed.json:
        print(json.dumps({"ok": healthy, "checks": [asdict(check) for check in checks]}, indent=2))
    else:
        show(checks, sys.stdout)
        red = sum(check.ok is False for check in checks)
        print("all green: failover works here" if healthy else f"{red} of {len(checks)} findings are red")
    return 0 if healthy else 1
