# SPDX-License-Identifier: BSD-3-Clause
"""The command line: `shiftverbs demo | doctor | run | status | top | version`, also as `python -m shiftverbs`.

Each command imports what it needs only when it is chosen: `shiftverbs run` must not load anything that the
program did not ask for.
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Sequence

from shiftverbs.process.console import print_whatever_comes

__all__ = ["main"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="shiftverbs",
        description="RDMA traffic that survives the loss of a NIC, a cable or a switch port.",
    )
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)

    demo = commands.add_parser(
        "demo",
        help="run verified traffic through pulled cables, and the same with plain pyverbs",
        description="Two hosts with two NICs each, three kinds of traffic, four faults each. Every byte is "
        "checked at whoever received it. Exit status 0 only if all of it is verified.",
    )
    from shiftverbs.commands.demo import options

    options.add_arguments(demo)

    doctor = commands.add_parser(
        "doctor",
        help="examine this machine: would failover work, and if not, what is to be done",
        description="Looks at devices, ports, GIDs, backups, limits and etcd, and runs real traffic over each NIC and "
        "its backups. Exit status 0 only if nothing is red.",
    )
    from shiftverbs.commands import doctor as examination

    examination.add_arguments(doctor)

    from shiftverbs.commands import run

    commands.add_parser(
        "run",
        help="run an unmodified pyverbs program with its imports mapped to shiftverbs",
        usage=run.USAGE,
        description="Whoever imports pyverbs there gets shiftverbs, installed packages too. --except PACKAGE: "
        "not this one; --only PACKAGE: the program's own file and this one alone. Both may be repeated, or name "
        "several with commas.",
    )
    from shiftverbs.commands import status

    show = commands.add_parser(
        "status",
        help="this host's processes under shiftverbs: their QPs, NICs, last failures",
        description="Asks each process of this user that runs under shiftverbs. Exit status 1 where there is none, or "
        "one does not answer.",
    )
    status.add_status_arguments(show)
    follow = commands.add_parser(
        "top", help="the same again and again, with rates", description="Ends with Ctrl-C."
    )
    status.add_top_arguments(follow)
    commands.add_parser("version", help="print the versions of shiftverbs and pyverbs")
    return parser


def _version() -> int:
    try:
        from shiftverbs import __version__
        from shiftverbs.process.releases import release
    except ImportError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"shiftverbs {__version__}, pyverbs {release()}, Python {platform.python_version()}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; argv without the program's name, by default sys.argv's.

    Returns the exit status: 0 done, 1 the command failed, 2 wrong usage (argparse exits itself), 130
    interrupted.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["run"] and arguments[1:2] not in (["-h"], ["--help"]):
        # Not argparse's: every argument behind the program's name is the program's.
        from shiftverbs.commands.run import run

        return run(arguments[1:])
    print_whatever_comes()
    parsed = _parser().parse_args(arguments)
    if parsed.command == "demo":
        from shiftverbs.commands.demo import main as demo

        try:
            return demo.main(parsed)
        except KeyboardInterrupt:
            return 130
    if parsed.command == "doctor":
        from shiftverbs.commands import doctor

        return doctor.main(parsed)
    if parsed.command in ("status", "top"):
        from shiftverbs.commands import status

        return status.status(parsed) if parsed.command == "status" else status.top(parsed)
    return _version()
