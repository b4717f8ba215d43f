# SPDX-License-Identifier: BSD-3-Clause
"""What this room raises. Each text names the peer, the key and the step that it is about, where there are such."""

from __future__ import annotations

from shiftverbs.pyverbs_error import ShiftError


class TensorsError(ShiftError, RuntimeError):
    """All errors of shiftverbs.tensors."""


class TensorError(TensorsError, ValueError):
    """A tensor that cannot be published or filled: its dtype, its layout, its device."""


class MismatchError(TensorsError, ValueError):
    """`out` has not the dtype or shape of the published tensor. The tensor waits for another pull."""


class DuplicateError(TensorsError, KeyError):
    """The key and step are published already."""

    def __str__(self) -> str:
        return str(self.args[0])


class RemoteError(TensorsError):
    """The publisher has an error instead of the tensor."""


class PullTimeout(TensorsError, TimeoutError):
    """The tensor did not come in time."""


class PullCancelled(TensorsError):
    """`Pull.cancel` was called."""


class PoolError(TensorsError, MemoryError):
    """There is no memory for a tensor."""


class MessageError(TensorsError):
    """A peer sent what is no message, or one that makes no sense now. The channel to it is closed."""


class MeetingError(TensorsError, ConnectionError):
    """A node could not be reached, or is not the one that was expected."""


class ChannelError(TensorsError, ConnectionError):
    """The channel's peer failed or left, or the channel is closed."""
