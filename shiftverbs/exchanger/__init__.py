# SPDX-License-Identifier: BSD-3-Clause
"""The key-value side of shiftverbs: how peers find each other's shadow resources.

interface.py    what the rest of shiftverbs sees: Exchanger and its events
records.py      keys and values: built, encoded, checked
etcd.py         the exchanger on etcd, in the application's process
start.py        how it gets a broker; socket_path.py, settings.py: what both ends need for that
kept.py         descriptors that a forked child must not keep
wire.py         what the two say to each other
broker.py       the broker's process; key_table.py: who wants which keys
coming_link.py  what is asked of the link to etcd before gRPC and etcd3 are loaded
etcd_link.py    the broker towards etcd: leases and transactions; etcd_watch.py: watches; link_events.py: their news
"""

from __future__ import annotations

from shiftverbs.config import Config
from shiftverbs.exchanger.interface import (
    Connected,
    Exchanger,
    ExchangerEvent,
    Found,
    Rejected,
    Unavailable,
    new_instance_id,
)
from shiftverbs.exchanger.records import (
    ControlEndpoint,
    QpRecord,
    RecordError,
    Route,
    ShadowRoute,
    mutual,
    qp_key,
    qp_lid_key,
)

__all__ = [
    "Connected",
    "ControlEndpoint",
    "Exchanger",
    "ExchangerEvent",
    "Found",
    "QpRecord",
    "RecordError",
    "Rejected",
    "Route",
    "ShadowRoute",
    "Unavailable",
    "mutual",
    "new_instance_id",
    "open_exchanger",
    "qp_key",
    "qp_lid_key",
]


def open_exchanger(config: Config) -> Exchanger | None:
    """The exchanger the configuration asks for; None when it names no etcd. Returns at once."""
    if not config.etcd:
        return None
    from shiftverbs.exchanger.etcd import EtcdExchanger

    return EtcdExchanger(config)
