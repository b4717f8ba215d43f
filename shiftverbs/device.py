# SPDX-License-Identifier: BSD-3-Clause
"""`pyverbs.device`: Context is ours, the rest is re-exported."""

from __future__ import annotations

import errno
from typing import Any

import pyverbs.device as _base
from pyverbs.pyverbs_error import PyverbsRDMAError

from shiftverbs._core import whole, whole_close, whole_end
from shiftverbs.mirroring import eligibility, lifetime, reexport
from shiftverbs.mr import DMMR as DMMR
from shiftverbs.shadows import async_events, pyverbs_objects


class Context(lifetime.Ended, _base.Context):
    """An open device: the application's default NIC.

    Its first PD, CompChannel or CQ makes it a domain: the NICs that back it up get opened, each on its own
    thread. A Context that is only queried costs nothing.
    """

    _node: lifetime.Node | None = None
    _domain: Any = None
    _domain_known = False

    @whole
    def __init__(self, **kwargs: Any) -> None:
        """As pyverbs' (name=, cmd_fd=, attr=, cmid=): verb ibv_open_device, or ibv_import_device with cmd_fd=.

        Raises PyverbsUserError for an unknown name and PyverbsRDMAError as the verb does.
        """
        super().__init__(**kwargs)
        self._node = lifetime.Node(self)
        self._why = "its context belongs to a CMID" if kwargs.get("cmid") is not None else ""
        if kwargs.get("cmd_fd") is not None:
            self._why = "its context was imported"

    def query_port(self, port_num: int) -> _base.PortAttr:
        """Verb ibv_query_port (port_num counts from 1). Returns a PortAttr; raises PyverbsRDMAError as the verb does.

        pyverbs 44 takes no keyword here, later releases do.
        """
        return super().query_port(port_num)

    def get_pkey_index(self, port_num: int, pkey: int) -> int:
        """Verb ibv_get_pkey_index, which pyverbs 44 lacks: where a port's table has a P_Key.

        port_num counts from 1; pkey: in network byte order, as query_pkey gives it. Returns the index. Raises
        PyverbsRDMAError where the port's table has no such P_Key, or as the verb does.
        """
        if hasattr(_base.Context, "get_pkey_index"):
            return int(super().get_pkey_index(port_num, pkey))
        for index in range(super().query_port(port_num).pkey_tbl_len):
            if super().query_pkey(port_num, index) == pkey:
                return index
        raise PyverbsRDMAError(f"Failed to get the index of P_Key {pkey} of port {port_num}", errno.ENOENT)

    def get_async_event(self) -> _base.AsyncEvent:
        """Verb ibv_get_async_event: waits for the next event of this device without holding the GIL.

        Returns an AsyncEvent, to be acknowledged with its ack(). What failover causes by itself is left out.
        Raises PyverbsRDMAError as the verb does.
        """
        domain = self._domain
        if domain is None or domain.runtime.is_inherited:
            return async_events.get_directly(self)
        event: _base.AsyncEvent = domain.async_events.get()
        return event

    @whole_close(pyverbs_objects.POINTER)
    def close(self, _is_open: Any = lifetime.is_open) -> None:
        """Verb ibv_close_device, after closing everything made from this Context.

        A second call does nothing. Raises PyverbsRDMAError as the verb does.
        """
        if not _is_open(self):
            return
        eligibility.context_closing(self)
        super().close()
        if self._node is not None:
            self._node.closed()

    @whole_end
    def __del__(self, _finalize: Any = lifetime.finalize) -> None:
        _finalize(self)


reexport.reexport("device", globals())
