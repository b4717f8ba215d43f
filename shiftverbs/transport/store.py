# SPDX-License-Identifier: BSD-3-Clause
"""Where ranks find each other: a key-value store, such as torch's, behind a small protocol."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from typing import Any, Protocol

from shiftverbs.transport.errors import PeerTimeout, TransportError

Address = Mapping[str, Any]


#: Bits of what an address has as integers.
_BITS = {"lid": 16, "mtu": 3, "qpn": 24, "psn": 24}
_SLOTS, _STAGE = (64, 32), (64, 32, 6, 32)


def _integer(value: Any, bits: int, what: str) -> int:
    if type(value) is not int or not 0 <= value < 1 << bits:
        raise ValueError(f"{what} is {str(value)[:40]}, not an integer of {bits} bits")
    return value


def _integers(values: Any, bits: tuple[int, ...], what: str) -> tuple[int, ...]:
    if len(values) != len(bits):
        raise ValueError(f"{what} has {len(values)} numbers, not {len(bits)}")
    return tuple(_integer(value, b, what) for value, b in zip(values, bits, strict=True))


def ends_of(
    address: Any, rank: str, is_global: bool
) -> tuple[int, dict[str, Any], tuple[int, ...], tuple[int, ...]]:
    """What an address says to a rank, checked: it may come from anybody.

    :param is_global: whether its GID matters
    :return: the size of its group; gid, lid, mtu, qpn and psn as `Nic.connect` takes them; its slots and its staging
        places, as `Link.connected` takes them
    :raises KeyError, TypeError, ValueError: something is missing, or cannot be
    """
    link = address["links"][rank]
    to: dict[str, Any] = {
        name: _integer((link if name in ("qpn", "psn") else address)[name], bits, name)
        for name, bits in _BITS.items()
    }
    to["gid"] = address["gid"]
    if is_global:
        try:
            socket.inet_pton(socket.AF_INET6, to["gid"])
        except (OSError, TypeError, ValueError) as error:
            raise ValueError(f"gid is {str(to['gid'])[:60]!r}") from error
    stage = _integers(link["stage"], _STAGE, "stage")
    return _integer(address["size"], 32, "size"), to, _integers(link["slots"], _SLOTS, "slots"), stage


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
