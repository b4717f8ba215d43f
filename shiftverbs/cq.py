# SPDX-License-Identifier: BSD-3-Clause
"""`pyverbs.cq`: CompChannel, CQ and CQEX are ours, the rest is re-exported."""

from __future__ import annotations

import errno
import weakref
from typing import Any

import pyverbs.cq as _base
from pyverbs.pyverbs_error import PyverbsRDMAError

from shiftverbs._core import whole, whole_close, whole_end
from shiftverbs.mirroring import eligibility, extended_cq, lifetime, reexport
from shiftverbs.mirroring.extended_cq import Cursor
from shiftverbs.shadows import async_events, pyverbs_objects
from shiftverbs.shadows.cq import ShadowChannel, ShadowCQ

_poll = _base.CQ.poll
_req_notify = _base.CQ.req_notify


class CompChannel(lifetime.Ended, _base.CompChannel):
    """A completion channel that wakes for completions of whichever NIC carries the traffic."""

    _node: lifetime.Node | None = None
    _shadow: ShadowChannel | None = None
    _core: Any = None
    _why = ""

    @whole
    def __init__(self, context: Any) -> None:
        """As pyverbs' (context: Context): verb ibv_create_comp_channel. Raises PyverbsRDMAError as the verb does."""
        super().__init__(context)
        self._node = lifetime.Node(self, context)
        domain, _ = eligibility.domain_of(context)
        if domain is not None:
            try:
                self._core = eligibility.new_channel_core(self)
            except OSError as error:  # it needs descriptors of its own
                self._why = f"its completion channel is not shadowed: {error}"
                return
            self._shadow = ShadowChannel(domain, pyverbs_objects.pointer(self), self._core)

    @property
    def fd(self) -> int:
        """A descriptor that is readable when get_cq_event() would return; for poll, epoll or asyncio."""
        if self._core is not None:
            return int(self._core.fd)
        if not lifetime.is_open(self):
            raise PyverbsRDMAError("The completion channel is closed", errno.EBADF)
        return pyverbs_objects.channel_fd(self)

    def get_cq_event(self, expected_cq: Any) -> None:
        """Verb ibv_get_cq_event: waits for the next event without holding the GIL.

        Raises PyverbsRDMAError where the event is of another CQ than expected_cq, or (EAGAIN) where the channel
        is in non-blocking mode and there is none.
        """
        inherited = self._shadow is not None and self._shadow.is_inherited
        if self._core is None or (inherited and getattr(expected_cq, "_core", None) is None):
            if lifetime.is_open(self) and isinstance(expected_cq, _base.CQ):
                async_events.wait_readable(pyverbs_objects.channel_fd(self))
            super().get_cq_event(expected_cq)
            return
        if not isinstance(expected_cq, _base.CQ):
            raise TypeError(
                f"Argument 'expected_cq' has incorrect type (expected pyverbs.cq.CQ, got "
                f"{type(expected_cq).__name__})"
            )
        seen, _, _ = self._core.wait()
        if seen is None or seen is not getattr(expected_cq, "_core", None):
            raise PyverbsRDMAError("Received event on an unexpected CQ", errno.EINVAL)
        expected_cq._events += 1  # noqa: SLF001  (a CQ, below)

    @whole_close(pyverbs_objects.POINTER)
    def close(self, _is_open: Any = lifetime.is_open) -> None:
        """Verb ibv_destroy_comp_channel, after closing the CQs that use it.

        A second call does nothing. Raises PyverbsRDMAError as the verb does.
        """
        if not _is_open(self):
            return
        pointer = pyverbs_objects.pointer(self)
        if self._core is not None:
            self._core.detach(0)  # before it is freed: its descriptor is read there
        try:
            super().close()
        finally:
            if self._core is not None and lifetime.is_open(self):
                self._core.attach(0, pointer)
        if self._shadow is not None:
            self._shadow.close()
        if self._core is not None:
            self._core.close()
        if self._node is not None:
            self._node.closed()

    @whole_end
    def __del__(self, _finalize: Any = lifetime.finalize) -> None:
        _finalize(self)


class _Shadowed(lifetime.Ended):
    """What CQ and CQEX have in common: the shadows, and letting go of them."""

    _node: lifetime.Node | None = None
    _shadow: ShadowCQ | None = None
    _core: Any = None
    _why = ""
    _qps: weakref.WeakSet[Any] | None = None

    def _begin(self, context: Any, channel: Any, comp_vector: int) -> bool:
        """Make the shadows, if there can be any. channel: CompChannel or None."""
        domain, self._why = eligibility.domain_of(context)
        if domain is None:
            return False
        channel_core = getattr(channel, "_core", None)
        channel_shadow = getattr(channel, "_shadow", None)
        if channel is not None and channel_core is None:
            self._why = (
                getattr(channel, "_why", "") or "its completion channel is not a shiftverbs CompChannel"
            )
            return False
        self._core = eligibility.new_cq_core(self, channel_core)
        entries = pyverbs_objects.cq_entries(self)
        self._shadow = ShadowCQ(
            domain, pyverbs_objects.pointer(self), self._core, entries, channel_shadow, comp_vector
        )
        return True

    def used_by(self, qp: Any) -> None:
        """A protected QP's completions come here: it must be closed first."""
        # Two threads may make the first QPs of a CQ at once.
        self.__dict__.setdefault("_qps", weakref.WeakSet()).add(qp)

    def __str__(self) -> str:
        text = super().__str__()
        if self._shadow is None:
            return text
        head, colon, number = text.rstrip("\n").rpartition(": ")
        return f"{head}{colon}{self._shadow.application_cqe:<{len(number)}}\n"

    @whole_close(pyverbs_objects.POINTER)
    def close(self, _is_open: Any = lifetime.is_open) -> None:
        """Verb ibv_destroy_cq, after closing the QPs that use it.

        A second call does nothing. Raises PyverbsRDMAError as the verb does.
        """
        if not _is_open(self):
            return
        pointer = pyverbs_objects.pointer(self)
        if self._core is not None:
            for qp in list(self._qps or ()):
                qp.close()
            # The journals of those QPs end on the NICs' threads, and look at what their CQs still hold.
            self._core.detach(0)
        try:
            super().close()  # type: ignore[misc]
        finally:
            if self._core is not None and lifetime.is_open(self):
                self._core.attach(0, pointer)
                self._core.set_active(0, True)
        if self._shadow is not None:
            self._shadow.close()
        if self._core is not None:
            self._core.close()
        if self._node is not None:
            self._node.closed()

    @whole_end
    def __del__(self, _finalize: Any = lifetime.finalize) -> None:
        _finalize(self)


class CQ(_Shadowed, _base.CQ):
    """A completion queue, and one on each backup NIC; the application polls them as one.

    The hardware's CQ may be deeper than the application asked for (room for headroom WRs and for errors that
    complete unsignaled WRs); `cqe` is the application's.
    """

    _shadow: ShadowCQ | None = None
    _events = 0

    @whole
    def __init__(
        self, context: Any, cqe: int, cq_context: Any = None, channel: Any = None, comp_vector: int = 0
    ) -> None:
        """As pyverbs': verb ibv_create_cq.

        context: Context; cqe: capacity in completions, at least 1; cq_context: any object, given back as it is;
        channel: CompChannel that tells of its completions, or None; comp_vector: which interrupt, from 0.
        Raises PyverbsRDMAError as the verb does.
        """
        super().__init__(context, cqe, cq_context, channel, comp_vector)
        self._node = lifetime.Node(self, context, channel)
        if self._begin(context, channel, comp_vector):
            eligibility.shortcut(self, self._core, CQ, "poll", "req_notify")

    def poll(self, num_entries: int = 1) -> tuple[int, list[Any]]:
        """Verb ibv_poll_cq, over whichever NICs carry the traffic.

        num_entries: how many completions to take at most.
        Returns (number of completions, list of WCs), oldest first, (0, []) where there is none.
        Raises PyverbsRDMAError as the verb does.
        """
        if self._core is None:
            return _poll(self, num_entries)
        return self._core.poll(num_entries)

    def req_notify(self, solicited_only: bool = False) -> None:
        """Verb ibv_req_notify_cq: one event on the CompChannel with the next completion, of either NIC.

        solicited_only: only a solicited message or an error counts. Raises PyverbsRDMAError as the verb does.
        """
        if self._core is None:
            _req_notify(self, solicited_only)
        else:
            self._core.req_notify(solicited_only)

    @property
    def cqe(self) -> int:
        """The application's capacity in completions."""
        return super().cqe if self._shadow is None else self._shadow.application_cqe

    @whole
    def resize(self, cqe: int) -> None:
        """Verb ibv_resize_cq; the hardware's CQ stays as deep as its protected QPs need.

        cqe: new capacity in completions. Raises PyverbsRDMAError as the verb does.
        """
        if self._shadow is None:
            super().resize(cqe)
        else:
            self._shadow.resize(cqe, super().resize, lambda: super(CQ, self).cqe)

    def ack_events(self, num_events: int) -> None:
        """Verb ibv_ack_cq_events. The hardware's events are acknowledged when taken: this only counts.

        num_events: how many of the events that get_cq_event() returned.
        """
        if self._core is None:
            super().ack_events(num_events)
        else:
            self._events -= num_events


class CQEX(Cursor, _Shadowed, _base.CQEX):
    """An extended completion queue, and a CQ on each backup NIC; one cursor goes over them all.

    Without shadows where it reports more than a struct ibv_wc holds (timestamps, for one): then it is pyverbs' own,
    and its QPs are not protected.
    """

    _shadow: ShadowCQ | None = None

    @whole
    def __init__(self, context: Any, init_attr: Any) -> None:
        """As pyverbs' (context: Context; init_attr: CqInitAttrEx or None): verb ibv_create_cq_ex.

        Raises PyverbsRDMAError as the verb does.
        """
        super().__init__(context, init_attr)
        channel = getattr(init_attr, "comp_channel", None)
        self._node = lifetime.Node(self, context, channel, getattr(init_attr, "parent_domain", None))
        self._why = extended_cq.plan(init_attr)
        if not self._why and self._begin(context, channel, getattr(init_attr, "comp_vector", 0)):
            self._begin_cursor(self._core, CQEX)


reexport.reexport("cq", globals())
