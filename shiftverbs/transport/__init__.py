# SPDX-License-Identifier: BSD-3-Clause
"""Messages and bulk data between the ranks of a job, over one RC QP for each pair of them.

It is written against pyverbs' API, by the face's names, so it is carried by whatever the face is at the time: protected
QPs, or with `SHIFTVERBS_DISABLE=1` pyverbs itself. Neither torch nor numpy is needed.

All of a transport but `wake` belongs to one thread. Data goes by RDMA WRITE with immediate into memory that its
receiver has registered and named; each message consumes a receive, and nobody is sent more than there
are receives and room for.
"""

from __future__ import annotations

from shiftverbs.transport.errors import PeerFailed, PeerLeft, PeerTimeout, TransportError
from shiftverbs.transport.flow import In, Out, run
from shiftverbs.transport.group import SMALL_BYTES, Transport
from shiftverbs.transport.link import SLOT_BYTES, Link, Message
from shiftverbs.transport.memory import Buffer, Lease, MrCache
from shiftverbs.transport.nic import Nic
from shiftverbs.transport.store import Store

__all__ = [
    "SLOT_BYTES",
    "SMALL_BYTES",
    "Buffer",
    "In",
    "Lease",
    "Link",
    "Message",
    "MrCache",
    "Nic",
    "Out",
    "PeerFailed",
    "PeerLeft",
    "PeerTimeout",
    "Store",
    "Transport",
    "TransportError",
    "run",
]
