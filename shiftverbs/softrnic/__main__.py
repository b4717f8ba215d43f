# SPDX-License-Identifier: BSD-3-Clause
"""``python -m shiftverbs.softrnic``: look at software NICs and break them, from a shell.

Exit status: 0 done, 2 the request is wrong (unknown host, device, rail, ...) or softrnic cannot be used.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import os
import shlex
import sys
from collections.abc import Sequence
from typing import TextIO

from shiftverbs.process.console import print_whatever_comes
from shiftverbs.softrnic import SoftrnicError, fabric, faults, library_path
from shiftverbs.softrnic.faults import NIC_COUNTERS

# What does it, its help, and what it says afterwards.
_PORT_ACTIONS = {
    "down": (faults.down, "pull the cable", "cable pulled"),
    "up": (faults.up, "plug it in again", "cable plugged in"),
    "kill": (faults.kill, "the NIC dies (IBV_EVENT_DEVICE_FATAL)", "killed"),
    "revive": (faults.revive, "replace a dead NIC: it can be opened again", "replaced"),
    "stall": (faults.stall, "the data path stands still: work is accepted and not done", "stands still"),
    "unstall": (faults.unstall, "it moves again", "moves again"),
    "hang": (faults.hang, "commands (ibv_modify_qp, ...) do not return", "commands hang"),
    "unhang": (faults.unhang, "they return again", "commands return"),
}
_RULES = {
    "drop": ("lose packets; prints the rule's number", "loses packets"),
    "delay": ("make packets late; prints the rule's number", "delays packets"),
    "duplicate": ("double packets; prints the rule's number", "doubles packets"),
    "reorder": ("put packets behind the next one; prints the rule's number", "reorders packets"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    :param argv: the arguments without the program's name; those of the process by default.
    :return: the exit status.
    """
    args = _parser().parse_args(argv)
    print_whatever_comes()
    try:
        _run(args)
    except SoftrnicError as error:
        print(f"softrnic: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m shiftverbs.softrnic",
        description="Look at software NICs and break them. A device is named host/device, for example a/soft0.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    listing = commands.add_parser("list", help="devices, the processes that use them, and fault rules")
    listing.add_argument("--json", action="store_true", help="for programs")
    for name, (_, text, _) in _PORT_ACTIONS.items():
        command = commands.add_parser(name, help=text)
        command.add_argument("target", nargs="+", metavar="HOST/DEVICE")
    slow = commands.add_parser("slow", help="each command takes so long, as a NIC's of hardware does")
    slow.add_argument("target", nargs="+", metavar="HOST/DEVICE")
    slow.add_argument("--ms", type=float, required=True, help="how long at least, milliseconds; 0: no longer")
    for name, text in (
        ("switch-down", "a rail's switch loses all packets, and no NIC notices"),
        ("switch-up", "it forwards them again"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument(
            "rail", nargs="+", metavar="RAIL", help="rail0 connects each host's first device"
        )
        command.add_argument("--host", help="only the switch's port towards this host")
    for name, (text, _) in _RULES.items():
        _add_rule(commands.add_parser(name, help=text), name)
    undrop = commands.add_parser("undrop", help="remove a rule")
    undrop.add_argument("rule", nargs="+", type=int)
    clear = commands.add_parser("clear", help="heal everything, remove all rules")
    clear.add_argument("target", nargs="*", metavar="HOST/DEVICE", help="only this device")
    clear.add_argument("--rules", action="store_true", help="only remove rules")
    limits = commands.add_parser(
        "fabric",
        help="give rails a rate, a delay, a buffer, congestion and flow control; alone: show what ports have",
    )
    limits.add_argument(
        "where", nargs="?", metavar="RAIL", help="rail0, * for all, HOST/rail0 or HOST/DEVICE for one port"
    )
    limits.add_argument(
        "setting", nargs="*", metavar="KEY=VALUE", help="rate=10G delay=5us buffer=1M, or off"
    )
    register = commands.add_parser("register", help="make a host known before a process of it runs")
    register.add_argument("host")
    register.add_argument("--config", default="1", help="its devices, as SOFTRNIC (default 1)")
    env = commands.add_parser("env", help="shell commands that set the environment of a host's programs")
    env.add_argument("--host", default=os.environ.get("SOFTRNIC_HOST") or "a")
    env.add_argument("--config", default=os.environ.get("SOFTRNIC") or "1", help="devices (default 1)")
    env.add_argument(
        "--preload", action="store_true", help="LD_PRELOAD too, for programs that are not Python"
    )
    return parser


def _add_rule(parser: argparse.ArgumentParser, name: str) -> None:
    parser.add_argument("target", metavar="HOST/DEVICE")
    if name == "delay":
        parser.add_argument("--ms", type=float, required=True, help="how late, milliseconds")
    elif name == "duplicate":
        parser.add_argument(
            "--ms", type=float, default=0.0, help="how long after it the copy follows (default 0)"
        )
    elif name == "reorder":
        parser.add_argument(
            "--ms", type=float, default=20.0, help="wait so long for a next packet (default 20)"
        )
    parser.add_argument("--direction", default="both", help="tx, rx or both (default)")
    parser.add_argument("--opcode", default="any", help="send, write, ack, read_response, ..., RC_SEND_ONLY")
    parser.add_argument("--nth", type=int, default=1, help="the first match that counts, from 1")
    parser.add_argument("--count", type=int, default=1, help="how many; 0 = all (default 1)")
    parser.add_argument("--probability", type=float, default=1.0, help="of each match (default 1)")
    parser.add_argument("--seed", type=int, default=0, help="for --probability")
    parser.add_argument("--per-message", action="store_true", help="count messages by their last packets")
    parser.add_argument("--peer", help="only to or from this host")
    parser.add_argument("--qpn", type=lambda text: int(text, 0), default=0, help="only this queue pair")
    parser.add_argument(
        "--msn", type=int, default=0, help="only what acknowledges this message or a later one"
    )
    parser.add_argument("--then", help="down, kill or switch-down, in the same instant as the last of them")
    parser.add_argument("--then-target", metavar="HOST/DEVICE", help="the device that it happens to")


def _run(args: argparse.Namespace) -> None:
    match args.command:
        case "list":
            _list(args.json)
        case name if name in _PORT_ACTIONS:
            action, _, done = _PORT_ACTIONS[name]
            for target in args.target:
                users = faults.status()  # before it happens: whose devices are hit
                action(target)
                _tell(users, done, target=target)
        case "slow":
            done = f"a command takes {args.ms:g} ms" if args.ms else "commands take no longer than they do"
            for target in args.target:
                users = faults.status()
                faults.slow(target, args.ms / 1000)
                _tell(users, done, target=target)
        case "switch-down" | "switch-up":
            down = args.command == "switch-down"
            switch = faults.switch_down if down else faults.switch_up
            done = f"the switch {'loses' if down else 'forwards'} its packets"
            for rail in args.rail:
                users = faults.status()
                switch(rail, args.host)
                _tell(users, done, rail=rail, host=args.host)
        case name if name in _RULES:
            users = faults.status()
            print(_rule(name, args), flush=True)
            # A script reads the rule's number: the rest is for people.
            _tell(users, _RULES[name][1], target=args.target, file=sys.stderr)
        case "undrop":
            for rule in args.rule:
                faults.undrop(rule)
        case "clear":
            for target in args.target or [None]:
                users = faults.status()
                faults.clear(target, rules_only=args.rules)
                _tell(users, "rules removed" if args.rules else "healed", target=target)
        case "fabric":
            _fabric(args.where, args.setting)
        case "register":
            faults.register(args.host, args.config)
        case "env":
            _env(args)


def _tell(
    status: faults.Status,
    done: str,
    *,
    target: str | None = None,
    rail: str | None = None,
    host: str | None = None,
    file: TextIO | None = None,
) -> None:
    """Say what was done to whom: everybody who shares the directory is concerned, other shells' programs too."""
    concerned = [
        device
        for device in sorted(status.devices, key=lambda device: device.host)  # whichever was opened first
        if target in (None, device.name) and rail in (None, device.rail) and host in (None, device.host)
    ]
    for device in concerned:
        pids = sorted({process.pid for process in device.processes})
        who = f"open in {len(pids)} process{'es' * (len(pids) > 1)}: {', '.join(map(str, pids))}"
        print(
            f"{device.name}: {done} ({status.directory}; {who if pids else 'open in no process'})", file=file
        )
    if not concerned:
        print(f"{rail or 'all'}: {done} ({status.directory}; no host has a device there)", file=file)


def _rule(name: str, args: argparse.Namespace) -> int:
    which = {key: value for key, value in vars(args).items() if key not in ("command", "target", "ms")}
    match name:
        case "delay":
            return faults.delay(args.target, args.ms / 1000, **which)
        case "duplicate":
            return faults.duplicate(args.target, delay_s=args.ms / 1000, **which)
        case "reorder":
            return faults.reorder(args.target, wait_s=args.ms / 1000, **which)
    return faults.drop(args.target, **which)


def _list(as_json: bool) -> None:
    status = faults.status()
    if as_json:
        print(json.dumps(dataclasses.asdict(status), indent=2))
        return
    if not status.devices:
        print(f"no host has used softrnic with {status.directory} yet")
        return
    rows = [("DEVICE", "RAIL", "LINK", "SWITCH", "PROCESSES")]
    for device in status.devices:
        users = ", ".join(f"{process.pid} {process.address}".rstrip() for process in device.processes)
        link = "dead" if device.dead else "up" if device.link_up else "down"
        link += ",stalled" * device.stalled + ",hung" * device.commands_hang
        link += f",{device.command_us / 1000:g}ms" if device.command_us else ""
        rows.append((device.name, device.rail, link, "up" if device.switch_up else "down", users or "-"))
    _print_table(rows)
    if status.rules:
        print()
        rules = [("RULE", "ACTION", "DEVICE", "DIRECTION", "OPCODE", "WHICH", "THEN", "MATCHED", "DONE")]
        for rule in status.rules:
            rules.append(
                (
                    str(rule.id),
                    rule.action + (f" {rule.delay_us / 1000:g}ms" if rule.delay_us else ""),
                    rule.target,
                    rule.direction,
                    rule.opcode,
                    _which(rule),
                    f"{rule.then} {rule.then_target}" if rule.then else "-",
                    str(rule.matched),
                    f"{rule.fired}{' done' if rule.done else ''}",
                )
            )
        _print_table(rules)
    counters = [("DEVICE", "COUNTER", "VALUE")]
    for device in status.devices:
        counters += [(device.name, name, str(value)) for name, value in device.counters.items() if value]
    _print_another(counters)


def _fabric(where: str | None, settings: Sequence[str]) -> None:
    if where is not None:
        fabric.apply(f"{fabric.port(where)}:{','.join(settings)}")
    status = faults.status()
    rows: list[tuple[str, ...]] = [("PORT", "RATE", "DELAY", "BUFFER", "QUEUE", "PEAK", "PACKETS", "DROPPED")]
    for device in status.devices:
        if link := device.link:
            counts = (link.buffer, link.queue, link.queue_peak, link.packets, link.dropped)
            rows.append(
                (device.name, f"{link.rate / 1e6:g}Mb/s", f"{link.delay_ns / 1e3:g}us", *map(str, counts))
            )
    if not rows[1:]:
        print(f"no port has limits ({status.directory})")
        return
    _print_table(rows)
    rows = [("PORT", "CONTROL", "KMIN", "KMAX", "PMAX", "DILATION", "MARKED", *NIC_COUNTERS)]
    for device in status.devices:
        if (link := device.link) and link.kmax:
            control = "dcqcn" if link.dcqcn else "ecn"
            counts = (link.marked, *(getattr(link, name) for name in NIC_COUNTERS))
            marking = (str(link.kmin), str(link.kmax), f"{link.pmax * 100:g}%", str(link.dilation))
            rows.append((device.name, control, *marking, *map(str, counts)))
    _print_another(rows)
    rows = [("PORT", "XOFF", "XON", "HEADROOM", "WATCHDOG", "STORMS", "DROPPED IN THEM")]
    for device in status.devices:
        if (link := device.link) and link.pfc:
            watchdog = f"{link.watchdog_ns / 1e6:g}ms" if link.watchdog_ns else "off"
            sizes, storms = (link.xoff, link.xon, link.headroom), (link.storms, link.watchdog_dropped)
            rows.append((device.name, *map(str, sizes), watchdog, *map(str, storms)))
    _print_another(rows)
    rows = [("PORT", "COUNTER", "VALUE")]
    for device in status.devices:
        counted = device.link.prio if device.link else {}
        rows += [(device.name, name, str(value)) for name, value in counted.items() if value]
    _print_another(rows)


def _print_another(rows: Sequence[Sequence[str]]) -> None:
    """A table behind another one, if there is anything in it."""
    if rows[1:]:
        print()
        _print_table(rows)


def _which(rule: faults.Rule) -> str:
    """What a rule applies to beyond direction and opcode, in the command line's own words."""
    words = [f"nth={rule.nth}", f"count={rule.count or 'all'}"]
    if rule.per_message:
        words.append("per-message")
    if rule.probability < 1:
        words.append(f"probability={rule.probability:.3g} seed={rule.seed}")
    if rule.peer:
        words.append(f"peer={rule.peer}")
    if rule.qpn:
        words.append(f"qpn={rule.qpn:#x}")
    if rule.msn:
        words.append(f"msn={rule.msn}")
    return " ".join(words)


def _print_table(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _env(args: argparse.Namespace) -> None:
    # Checks host and devices, too.
    faults.register(args.host, args.config)
    values = {"SOFTRNIC": args.config, "SOFTRNIC_HOST": args.host, "SOFTRNIC_DIR": faults.status().directory}
    if args.preload:
        values["LD_PRELOAD"] = str(library_path())
    if isinstance(sys.stdout, io.TextIOWrapper):  # a shell is to read the path's very bytes
        sys.stdout.reconfigure(encoding=sys.getfilesystemencoding(), errors="surrogateescape")
    for name, value in values.items():
        print(f"export {name}={shlex.quote(value)}")


if __name__ == "__main__":
    sys.exit(main())
