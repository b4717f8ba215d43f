# SPDX-License-Identifier: BSD-3-Clause
"""Where ranks find each other: a key-value store, such as torch's, behind a small protocol."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Protocol

from shiftverbs.transport.errors import PeerTimeout, TransportError

Address = Mapping[str, Any]


class Store(Protocol):
    """What a transport needs of a store."""

    def set(self, key: str, value: bytes) -> None:
        """Write a key."""

    def get(self, key: str, timeout_s: float) -> bytes:
        """Read a key, waiting for it. Raises an exception of the store's own when the time is over."""


def exchange(
    store: Store, rank: int, peers: list[int], address: Address, timeout_s: float
) -> dict[int, Address]:
    """Publish our address, and return the peers' by rank.

    :param address: anything that JSON holds
    :raises PeerTimeout: a peer published none in time
    :raises TransportError: what it published cannot be read
    """
    store.set(f"address/{rank}", json.dumps(address).encode())
    found: dict[int, Address] = {}
    for peer in peers:
        try:
            value = store.get(f"address/{peer}", timeout_s)
        except Exception as error:
            raise PeerTimeout(f"rank {peer} did not publish its address: {error}", [peer]) from error
        try:
            found[peer] = json.loads(value)
        except ValueError as error:
            raise TransportError(f"the address of rank {peer} cannot be read: {error}", [peer]) from error
    return found
