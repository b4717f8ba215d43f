# SPDX-License-Identifier: BSD-3-Clause
"""Tensors between processes: whoever has one publishes it, whoever needs it pulls it, straight into its memory.

After TensorFlow's verbs transport. A `Node` publishes, and connects to other nodes; a `Channel` pulls. A tensor is
anything with the buffer protocol or `__dlpack__` in the CPU's memory: neither numpy nor torch is needed.
"""

from __future__ import annotations

from shiftverbs.tensors.channel import Channel
from shiftverbs.tensors.errors import (
    ChannelError,
    DuplicateError,
    MeetingError,
    MessageError,
    MismatchError,
    PoolError,
    PullCancelled,
    PullTimeout,
    RemoteError,
    TensorError,
    TensorsError,
)
from shiftverbs.tensors.node import Node
from shiftverbs.tensors.publication import Publication
from shiftverbs.tensors.pull import Pull
from shiftverbs.tensors.tensor import Tensor

__all__ = [
    "Channel",
    "ChannelError",
    "DuplicateError",
    "MeetingError",
    "MessageError",
    "MismatchError",
    "Node",
    "PoolError",
    "Publication",
    "Pull",
    "PullCancelled",
    "PullTimeout",
    "RemoteError",
    "Tensor",
    "TensorError",
    "TensorsError",
]
