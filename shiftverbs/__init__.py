# SPDX-License-Identifier: BSD-3-Clause
"""pyverbs whose RC traffic survives the loss of a NIC, a cable or a switch port.

Write `import shiftverbs` where a program has `import pyverbs`: for every module `pyverbs.X` there is
`shiftverbs.X` with the same names. Context, PD, MR, CompChannel, CQ and QP are subclasses of pyverbs' own that
keep, behind the default resource, a shadow on each backup NIC. `qp.shift` tells a QP's protection.

Where things live:

    what a program imports, one module per pyverbs module, same names
      device pd mr cq qp srq             shadowed: Python subclasses of the pyverbs classes
      wr addr cmid enums wq flow …       re-exported
      providers.*                        re-exported on import, by mirror.py
      pyverbs_error                      pyverbs' exceptions, and ShiftError

    control path
      protection.py                      which resources get shadows, and why not
      shadow.py shadow_qp.py             records control verbs and replays them on the backup NICs
      backup.py                          which NIC backs up which; our own handle on each NIC
      qp_init_attr.py pyverbs_objects.py C pointers and structs inside pyverbs objects
      lifetime.py                        closing in any order: by hand, twice, by the garbage collector
      async_events.py                    the default NIC's events: once to the program, once to us
      mirror.py                          re-exporting

    data path
      _core.pyx                          journal, post and poll, key translation, WC buffer
      _nic.pyx                           NIC command threads, the control port, the control thread's wait

    failover
      state_machine.py pair_protocol.py  pure: what happens next, and what two peers agree on:
        switch.py arm.py move.py         after a failure, to be fit again, voluntarily
      events.py messages.py              its input, output and datagrams; path_health.py its pings
      runtime.py driver.py connection.py perform it: the only place that acts and reads the clock
      pairing.py control_channel.py      finding the peer's shadow resources; talking to it
      control.py                         the datagrams on the wire
      exchanger/                         etcd: where peers find each other's shadow resources

    what a person touches
      config.py observe.py cli.py run.py mapping.py status.py doctor.py rehearsal.py demo/
      telemetry/                         what others see of a process: status, metrics
      softrnic/                          a user-space RoCEv2 RNIC with fault injection

Importing this package does no I/O, with one exception: where the environment has SOFTRNIC set, the software
RNIC's library is opened here, because it must be in place before pyverbs is loaded.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from types import ModuleType

__version__ = "0.1.0"

if importlib.util.find_spec("pyverbs") is None:
    raise ImportError(
        "shiftverbs stands on pyverbs, which this Python interpreter does not have. On Debian and Ubuntu: "
        "apt-get install python3-pyverbs (it belongs to /usr/bin/python3; a virtual environment sees it when "
        "made with /usr/bin/python3 -m venv --system-site-packages).",
        name="pyverbs",
    )

if os.environ.get("SOFTRNIC", "0") not in ("", "0"):
    from shiftverbs import softrnic as _softrnic

    _softrnic.enable()

from shiftverbs import mirror as _mirror

_mirror.install()


def __getattr__(name: str) -> ModuleType:
    """`import shiftverbs` alone is enough for `shiftverbs.pd.PD`: a module is imported when it is named."""
    if not name.startswith("_"):
        try:
            return importlib.import_module(f"{__name__}.{name}")
        except ModuleNotFoundError as missing:
            if missing.name != f"{__name__}.{name}":
                raise
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
