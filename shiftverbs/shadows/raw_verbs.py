# SPDX-License-Identifier: BSD-3-Clause
"""What NICs are asked by: `_nic`'s verbs, as a type. Objects are C pointers; each verb raises OSError."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from shiftverbs._nic import AsyncEventRaw, ControlPort, ModifySteps

# (send WRs, receive WRs, send SGEs, receive SGEs, inline bytes)
Cap = tuple[int, int, int, int, int]


class Verbs(Protocol):
    """Those that failover and shadows use."""

    @property
    def ModifySteps(self) -> Callable[[], ModifySteps]:
        """Makes an empty list of a QP's transitions."""

    @property
    def ControlPort(self) -> Callable[[int, int, int, int], ControlPort]:
        """Makes a control port: context, port number, GID index, depth."""

    # ---- devices ----------------------------------------------------------------------------------------------------

    def list_devices(self) -> list[str]:
        """The names, in libibverbs' order."""

    def open_device(self, name: str, /) -> int:
        """Returns the context."""

    def close_device(self, ctx: int, /) -> None:
        """Closes a context."""

    def query_device(self, ctx: int, /) -> dict[str, int]:
        """Its limits: fields of ibv_device_attr by name."""

    def query_port(self, ctx: int, port_num: int, /) -> dict[str, int]:
        """Fields of ibv_port_attr by name."""

    def query_pkey(self, ctx: int, port_num: int, index: int, /) -> int:
        """An entry of the port's P_Key table."""

    def query_gid(self, ctx: int, port_num: int, index: int, /) -> bytes:
        """An entry of the port's GID table, 16 bytes."""

    def query_gid_type(self, ctx: int, port_num: int, index: int, /) -> int:
        """Its type, enum ibv_gid_type."""

    def async_fd(self, ctx: int, /) -> int:
        """The descriptor of a context's events."""

    def get_async_event(self, ctx: int, /) -> AsyncEventRaw | None:
        """The next one; None where there is none."""

    # ---- objects ----------------------------------------------------------------------------------------------------

    def alloc_pd(self, ctx: int, /) -> int:
        """Returns the PD."""

    def dealloc_pd(self, pd: int, /) -> None:
        """Takes it away."""

    def reg_mr(self, pd: int, addr: int, length: int, iova: int, access: int, /) -> tuple[int, int, int]:
        """Returns the MR, its lkey and its rkey."""

    def rereg_mr(
        self, mr: int, flags: int, pd: int, addr: int, length: int, access: int, /
    ) -> tuple[int, int]:
        """Returns its lkey and its rkey."""

    def dereg_mr(self, mr: int, /) -> None:
        """Takes it away."""

    def create_channel(self, ctx: int, /) -> tuple[int, int]:
        """Returns the channel and its descriptor."""

    def destroy_channel(self, channel: int, /) -> None:
        """Takes it away."""

    def create_cq(self, ctx: int, cqe: int, channel: int = 0, vector: int = 0, /) -> tuple[int, int]:
        """Returns the CQ and how many entries it has."""

    def resize_cq(self, cq: int, cqe: int, /) -> int:
        """Returns how many entries it has."""

    def destroy_cq(self, cq: int, /) -> None:
        """Takes it away."""

    def create_qp(
        self, pd: int, send_cq: int, recv_cq: int, caps: Cap, sq_sig_all: int = 0, /
    ) -> tuple[int, int, Cap]:
        """Returns the QP, its number and its capacities."""

    def destroy_qp(self, qp: int, /) -> None:
        """Takes it away."""

    def query_qp_state(self, qp: int, /) -> int:
        """Its state, enum ibv_qp_state."""
