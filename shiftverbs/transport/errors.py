# SPDX-License-Identifier: BSD-3-Clause
"""What a transport raises. Each of them names the rank that it is about, where there is one."""

from __future__ import annotations

from collections.abc import Sequence

from shiftverbs.pyverbs_error import ShiftError


class TransportError(ShiftError, RuntimeError):
    """The transport cannot go on; ranks: the peers that it is about."""

    def __init__(self, text: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(text)
        self.ranks = tuple(ranks)


class PeerFailed(TransportError):
    """A peer's QP failed, or the peer died."""


class PeerLeft(TransportError):
    """A peer closed its transport while it was waited for."""


class PeerTimeout(TransportError, TimeoutError):
    """Peers did not do in time what they were waited for."""


def rank_list(ranks: Sequence[int]) -> str:
    """ "rank 1", "ranks 1, 2 and 3"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}" if ranks else "nobody"
