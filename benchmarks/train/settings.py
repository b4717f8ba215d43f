# SPDX-License-Identifier: BSD-3-Clause
"""The settings of the SHIFT paper's Fig. 8, and the failures in them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shiftverbs.softrnic import fabric, faults

#: Where in the run the failure is, in epochs (SHIFT, 5.2: "approximately 1.78 epochs").
FAILS_AT = 1.78
#: How long the NIC is away in a flap, in seconds.
FLAP_S = 2.0

FAULTS = {
    "down": "the cable of host a's default NIC is pulled",
    "kill": "host a's default NIC dies",
    "switch-down": "the switch of the default rail loses everything",
    "lost-ack": "an acknowledgement is lost, and in the same instant the cable is pulled",
}


#: What rail 0 carries where it is slow, in bits per second: a fifth of what `make train` gives it.
SLOW_RATE = 80e6


@dataclass(frozen=True)
class Setting:
    """One of the five, or of those with a slow rail.

    :param number: the paper's
    :param is_protected: with shiftverbs; else its code runs as plain pyverbs
    :param is_fatal: the NIC stays away until the job has ended or restarts; else it is away for a while
    :param is_busy: other traffic on the backup's rail, from beginning to end
    :param stops: runs to the next checkpoint, stops, and resumes once the NIC is back
    :param straggler: SHIFTVERBS_STRAGGLER; "": as it is by default
    """

    number: int
    title: str
    is_protected: bool = True
    fails: bool = True
    is_fatal: bool = True
    is_busy: bool = False
    stops: bool = False
    straggler: str = ""

    @property
    def name(self) -> str:
        """ "(1) no failure"."""
        return f"({self.number}) {self.title}"


SETTINGS = {
    setting.number: setting
    for setting in (
        Setting(1, "no failure", fails=False),
        Setting(2, "fatal, checkpoint-restart", is_protected=False),
        Setting(3, "fatal, shift, busy backup", is_busy=True, stops=True),
        Setting(4, "fatal, shift, idle backup"),
        Setting(5, "flap, shift, busy backup", is_fatal=False, is_busy=True),
    )
}

#: No failure, but a rail that becomes slow, and stays so: without and with who moves off it.
SLOW_RAIL = (
    Setting(6, "slow rail, stays", straggler="observe"),
    Setting(7, "slow rail, moves", straggler="migrate"),
)
#: What becomes of the rail in these.
SLOW = "slow"


def break_network(fault: str) -> None:
    """Make a failure happen; it is there until `heal`, a slow rail until `quicken`.

    Raises KeyError for what is neither of FAULTS nor SLOW.
    """
    {
        "down": lambda: faults.down("a/soft0"),
        "kill": lambda: faults.kill("a/soft0"),
        "switch-down": lambda: faults.switch_down("rail0"),
        "lost-ack": lambda: faults.drop("a/soft0", direction="rx", opcode="ack", then="down"),
        SLOW: lambda: fabric.limit("rail0", SLOW_RATE),
    }[fault]()


def heal() -> None:
    """Plug everything in again, with a new NIC in a dead one's place."""
    faults.clear()


def quicken(limits: str) -> None:
    """Have rails carry again what they did.

    :param limits: as SOFTRNIC_FABRIC takes them: entries, or a file of them; "": none
    """
    fabric.unlimit()
    entries = Path(limits).read_text() if limits[:1] in ("/", ".") else limits
    if entries:
        fabric.apply(entries)
