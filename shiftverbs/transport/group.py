# SPDX-License-Identifier: BSD-3-Clause
"""A transport: one rank's links to all others, their completions, and waiting for them."""

from __future__ import annotations

import logging
import os
import random
import select
import struct
import time
import zlib
from collections.abc import Callable, Iterable
from typing import Any

from shiftverbs.pyverbs_error import PyverbsError
from shiftverbs.transport.errors import PeerFailed, PeerLeft, PeerTimeout, TransportError, rank_list
from shiftverbs.transport.link import (
    GAVE_UP,
    LEFT,
    RECEIVES,
    REGION_BYTES,
    SENDS,
    SLOT_BYTES,
    Kind,
    Link,
    Message,
    told,
)
from shiftverbs.transport.memory import Buffer, Lease
from shiftverbs.transport.nic import Nic
from shiftverbs.transport.store import Store, ends_of, exchange
from shiftverbs.transport.verbs import e, status_name

log = logging.getLogger("shiftverbs.transport")

#: How long a wait polls before it sleeps: as long as waking up takes.
SPIN_S = 20e-6
#: How long a wait is silent before the NIC is asked whether the peers are there.
PROBE_S = 0.25
POLL_BATCH = 16
#: Staging places for the peer before us in the ring, and the bytes of each.
STAGES = 8
STAGE_BYTES = 256 * 1024
#: How long `close` waits for the acknowledgements of what was sent last, and for the peers to leave, too.
LINGER_S = 1.0
#: In front of what a collective sends: which one it is.
MARK = struct.Struct("<I")
#: What a small message has room for.
SMALL_BYTES = SLOT_BYTES - MARK.size


class Transport:
    """Links to all other ranks of a group.

    :param store: where its ranks, and nobody else, find each other
    :param rank, size: ours, and how many there are (two or more)
    :param timeout_s: how long the peers may take to come
    :param nic: its NIC, which `close` releases; None: `Nic.of()`
    :param stages: staging places for the peer before us in the ring; 0: none, for who sends no chunks to them
    :raises PeerTimeout: a peer did not come
    :raises TransportError: there is no device
    :raises PyverbsError: as the verbs do
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout_s: float = 300.0,
        nic: Nic | None = None,
        stages: int = STAGES,
    ) -> None:
        self.rank, self.size = rank, size
        self._stages = stages
        self.nic = nic or Nic.of()
        self.error: TransportError | None = None
        #: is given messages of kind MESSAGE and DATA
        self.on_message: Callable[[Message], None] | None = None
        #: called again and again while something is waited for
        self.background: Callable[[], None] | None = None
        self._closed = False
        self._collective, self._collectives, self.mark = "nothing", 0, 0
        self._links: list[Link] = []
        self._resources: list[Any] = []
        self._wake_fd = -1
        try:
            self._open(store, timeout_s)
        except BaseException:
            self._release()
            raise

    def _open(self, store: Store, timeout_s: float) -> None:
        nic, peers = self.nic, [rank for rank in range(self.size) if rank != self.rank]
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._send_channel, self._send_cq = nic.queue(SENDS * len(peers))
        self._resources += [self._send_channel, self._send_cq]
        self._recv_channel, self._recv_cq = nic.queue(RECEIVES * len(peers))
        self._resources += [self._recv_channel, self._recv_cq]
        self._events = {"send": 0, "recv": 0}
        self._armed = {"send": False, "recv": False}
        incoming, outgoing = Buffer(REGION_BYTES * len(peers)), Buffer(REGION_BYTES * len(peers))
        self.stage = Buffer(self._stages * STAGE_BYTES or 1)
        mrs = [nic.register(buffer.address, buffer.length) for buffer in (incoming, outgoing, self.stage)]
        self._buffers = (incoming, outgoing)
        self._resources += mrs
        self.stage_lkey = int(mrs[2].lkey)
        address: dict[str, Any] = {
            "gid": nic.gid,
            "lid": nic.lid,
            "mtu": nic.mtu,
            "size": self.size,
            "links": {},
        }
        before = (self.rank - 1) % self.size
        for number, peer in enumerate(peers):
            qp = nic.queue_pair(self._send_cq, self._recv_cq, SENDS, RECEIVES)
            self._resources.append(qp)
            at = number * REGION_BYTES
            self._links.append(Link(peer, qp, number, (incoming, at), (outgoing, at), (mrs[0], mrs[1])))
            stages = self._stages if peer == before else 0
            address["links"][str(peer)] = {
                "qpn": qp.qp_num,
                "psn": random.getrandbits(24),
                "slots": [incoming.address + at, mrs[0].rkey],
                "stage": [self.stage.address, mrs[2].rkey, stages, STAGE_BYTES],
            }
        self._by_rank = {link.rank: link for link in self._links}
        found = exchange(store, self.rank, peers, address, timeout_s)
        for link in self._links:
            self._connect(link, address, found[link.rank])
        # Nobody sends before the other end can answer for it.
        store.set(f"ready/{self.rank}", b"1")
        for peer in peers:
            try:
                store.get(f"ready/{peer}", timeout_s)
            except Exception as error:
                raise PeerTimeout(f"rank {peer} did not connect: {error}", [peer]) from error
        self._poller = select.poll()
        for fd in (self._recv_channel.fd, self._wake_fd):
            self._poller.register(fd, select.POLLIN)
        self._both = select.poll()
        for fd in (self._recv_channel.fd, self._send_channel.fd, self._wake_fd):
            self._both.register(fd, select.POLLIN)

    def _connect(self, link: Link, ours: dict[str, Any], theirs: Any) -> None:
        try:
            size, to, slots, stage = ends_of(theirs, str(self.rank), self.nic.is_global)
        except (KeyError, TypeError, ValueError) as error:
            raise TransportError(
                f"the address of rank {link.rank} makes no sense: {error}", [link.rank]
            ) from error
        if size != self.size:
            raise TransportError(f"rank {link.rank} is of a group of {size}, not {self.size}", [link.rank])
        mine = ours["links"][str(link.rank)]
        self.nic.connect(link.qp, mine["psn"], to)
        link.connected(slots, stage, mine["stage"][2])

    def link(self, rank: int) -> Link:
        """The link to a peer. Raises KeyError for our own rank and those that there are not."""
        return self._by_rank[rank]

    @property
    def links(self) -> list[Link]:
        """All of them."""
        return self._links

    def lease(self) -> Lease:
        """For the memory of one operation."""
        return self.nic.cache.lease()

    def wait_protected(self, timeout_s: float) -> bool:
        """Whether all QPs are protected, waiting for it until the time is over."""
        deadline = time.monotonic() + timeout_s
        return all(
            link.qp.shift.wait_protected(max(0.0, deadline - time.monotonic())) for link in self._links
        )

    # Collectives

    def begin(self, what: str) -> None:
        """A collective begins. Whatever belongs to it carries a mark, and what comes with another one is an error.

        :param what: its name, and what must be the same on all ranks
        """
        self._collective = what
        self._collectives += 1
        self.mark = zlib.crc32(f"{self._collectives} {what}".encode())

    def disagrees(self, rank: int) -> ValueError:
        """What to raise where a peer is in another collective than we are."""
        return ValueError(
            f"rank {rank} does not take part in the {self._collective} of rank {self.rank}: do all ranks make the "
            "same calls in the same order, with the same sizes, dtypes, operations and roots?"
        )

    def unmarked(self, rank: int, data: bytes) -> bytes:
        """What a peer sent, without its mark. Raises ValueError for the mark of another collective."""
        if data[: MARK.size] != MARK.pack(self.mark):
            raise self.disagrees(rank)
        return data[MARK.size :]

    def send_small(self, rank: int, data: bytes) -> None:
        """Send at most SMALL_BYTES to a peer. Returns at once; what can not be sent yet is sent later."""
        self.check()
        self._by_rank[rank].send(Kind.SMALL, MARK.pack(self.mark) + data)

    def recv_small(self, rank: int, deadline: float) -> bytes:
        """The next small message of a peer.

        :param deadline: in time.monotonic()'s seconds
        :raises PeerTimeout: none came
        :raises PeerFailed: the peer, or another one
        :raises ValueError: it is in another collective
        """
        link = self._by_rank[rank]
        small = link.small
        if not small:
            self.wait(lambda: bool(small), deadline, lambda: [rank])
        return self.unmarked(rank, small.popleft())

    def settle(self, deadline: float) -> None:
        """Until no message waits for a credit of its receiver. Raises as `recv_small`."""
        if any(link.is_waiting for link in self._links):
            self.wait(
                lambda: not any(link.is_waiting for link in self._links),
                deadline,
                lambda: [link.rank for link in self._links if link.is_waiting],
            )

    # Waiting

    def check(self) -> None:
        """Raise what this transport failed of, if it did."""
        if self.error is not None:
            raise type(self.error)(str(self.error), self.error.ranks)
        if self._closed:
            raise TransportError("the transport is closed")

    def progress(self) -> bool:
        """Take in what has come. Returns whether there was something.

        :raises PeerFailed: a link failed, or a peer told of one
        """
        count, wcs = self._recv_cq.poll(POLL_BATCH)
        if not count:
            return False
        links = self._links
        for wc in wcs:
            link = links[wc.wr_id]
            if wc.status != e.IBV_WC_SUCCESS:
                self._wc_failed(link, wc.status)
            message = link.arrived(wc.imm_data)
            if message is None:
                continue
            if isinstance(message, int):
                if message != LEFT:
                    self._fail(told(message, link.rank))
            elif self.on_message is not None:
                self.on_message(message)
        return True

    def retire(self) -> bool:
        """Look which sends are complete. Returns whether there were some. Raises PeerFailed for one that failed."""
        count, wcs = self._send_cq.poll(POLL_BATCH)
        for wc in wcs if count else ():
            link = self._links[wc.wr_id >> 32]
            if wc.status != e.IBV_WC_SUCCESS:
                self._wc_failed(link, wc.status)
            link.retired(wc.wr_id & 0xFFFFFFFF)
        return bool(count)

    def flush(self) -> None:
        """Send what can be sent of what waits, and credits that peers may wait for."""
        for link in self._links:
            if link.posted - link.completed > SENDS // 2:
                self.retire()
            link.flush()

    def wait(
        self,
        done: Callable[[], bool],
        deadline: float,
        missing: Callable[[], Iterable[int]],
        sends: bool = False,
        woken: bool = False,
    ) -> None:
        """Until done() holds, sleeping on completion events.

        :param deadline: in time.monotonic()'s seconds
        :param missing: which ranks it is that are waited for
        :param sends: completions of sends matter, too
        :param woken: return when `wake` was called, as well
        :raises PeerTimeout: the deadline passed
        :raises PeerFailed, PeerLeft: what is waited for can not come
        """
        self.check()
        spin_until = time.monotonic() + SPIN_S
        probe_at = spin_until + PROBE_S
        while True:
            try:
                some = self.progress()
                if sends or some:
                    some = self.retire() or some
                self.flush()
                if self.background is not None:
                    self.background()
            except PyverbsError as error:
                if isinstance(error, TransportError):
                    raise
                self._fail(PeerFailed(f"{error}", sorted(missing())))
            if done():
                return
            now = time.monotonic()
            if some:
                probe_at = max(probe_at, now + PROBE_S)
                continue
            if now < spin_until:
                continue
            waited_for = None
            for rank in missing():
                if self._by_rank[rank].left:
                    self._fail(PeerLeft(f"rank {rank} has left", [rank]))
            if now >= deadline:
                waited_for = sorted(missing())
                self._fail(
                    PeerTimeout(
                        f"{rank_list(waited_for)} did not answer before the timeout was over", waited_for
                    )
                )
            if now >= probe_at:
                for link in self._links:
                    if not link.left:
                        link.probe()
                sends = True
                probe_at = now + PROBE_S
            if self._sleep(min(deadline, probe_at) - now, sends) and woken:
                return

    def idle(self) -> None:
        """Sleep until something comes or `wake` is called, and take it in. Raises PeerFailed as `progress`."""
        self.check()
        busy = any(link.is_busy for link in self._links)
        self._sleep(3600.0, busy)
        self.progress()
        self.retire()
        self.flush()
        if self.background is not None:
            self.background()

    def _sleep(self, for_s: float, sends: bool) -> bool:
        """Until a completion or `wake` comes; whether it was `wake`. sends: completions of sends wake, too."""
        if self.arm(sends):
            return False
        poller = self._both if sends else self._poller
        ready = poller.poll(max(0.0, for_s) * 1000 + 0.5)
        woken = False
        for fd, _ in ready:
            if fd == self._wake_fd:
                woken = True
                try:
                    os.eventfd_read(fd)
                except BlockingIOError:
                    pass
            else:
                self.take_event(fd)
        return woken

    # For who sleeps on several transports at once, instead of `wait`

    @property
    def fds(self) -> tuple[int, int]:
        """Readable when something came; when a send completed. Each only after `arm`."""
        return self._recv_channel.fd, self._send_channel.fd

    def turn(self) -> bool:
        """Take in what has come and send what can be sent, without waiting. Returns whether there was something.

        :raises PeerFailed: a link failed, or a peer told of one
        :raises PyverbsRDMAError: as the verbs do; the transport is of no use then
        """
        self.check()
        some = self.progress()
        some = self.retire() or some
        self.flush()
        return some

    def arm(self, sends: bool) -> bool:
        """Ask for an event of what comes next. Returns whether something came meanwhile, and was taken in.

        :param sends: of sends that complete, too
        :raises PeerFailed, PyverbsRDMAError: as `turn`
        """
        if not self._armed["recv"]:
            self._recv_cq.req_notify()
            self._armed["recv"] = True
            if self.progress():
                return True
        if sends and not self._armed["send"]:
            self._send_cq.req_notify()
            self._armed["send"] = True
            if self.retire():
                return True
        return False

    def take_event(self, fd: int) -> None:
        """One of `fds` is readable. Raises PyverbsRDMAError as ibv_get_cq_event."""
        if fd == self._recv_channel.fd:
            self._event("recv", self._recv_channel, self._recv_cq)
        else:
            self._event("send", self._send_channel, self._send_cq)

    def _event(self, name: str, channel: Any, cq: Any) -> None:
        channel.get_cq_event(cq)
        self._armed[name] = False
        self._events[name] += 1
        if self._events[name] == 64:
            cq.ack_events(self._events[name])
            self._events[name] = 0

    def wake(self) -> None:
        """Have the transport's thread return from where it sleeps. From any thread."""
        os.eventfd_write(self._wake_fd, 1)

    # Failing, and the end

    def _wc_failed(self, link: Link, status: int) -> None:
        if link.left and not self._closed:
            self._fail(PeerLeft(f"rank {link.rank} has left", [link.rank]))
        self._fail(
            PeerFailed(f"the connection to rank {link.rank} failed: {status_name(status)}", [link.rank])
        )

    def _fail(self, error: TransportError) -> None:
        """Raise error now and from now on, and tell the peers, which may be waiting for somebody else."""
        first = self.error is None
        self.error = self.error or error
        if first and not self._closed:
            self.give_up(error)
        raise error

    def give_up(self, error: TransportError) -> None:
        """Fail from now on of this, and tell the peers."""
        self.error = self.error or error
        number = (error.ranks[0] if error.ranks else self.rank) | GAVE_UP * isinstance(error, PeerTimeout)
        for link in self._links:
            # Who was only late is told, too.
            if not link.left and (link.rank not in error.ranks or isinstance(error, PeerTimeout)):
                try:
                    link.notice(number)
                except PyverbsError:
                    pass  # it failed, too

    def close(self) -> None:
        """Leave: wait a moment until the peers have what was sent; release everything. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        try:
            if self.error is None:
                self._linger()
        except (PyverbsError, OSError):
            log.debug("closing", exc_info=True)
        finally:
            self._release()

    def _linger(self) -> None:
        for link in self._links:
            if not link.left:
                link.notice(LEFT)
        deadline = time.monotonic() + LINGER_S
        while time.monotonic() < deadline:
            self.progress()
            self.retire()
            if all(link.left or link.posted == link.completed for link in self._links):
                return
            self._sleep(0.01, True)

    def _release(self) -> None:
        for name, cq in (("send", "_send_cq"), ("recv", "_recv_cq")):
            if hasattr(self, "_events") and self._events[name]:
                getattr(self, cq).ack_events(self._events[name])
                self._events[name] = 0
        order = {"QP": 0, "CQ": 1, "CompChannel": 2, "MR": 3}
        for resource in sorted(self._resources, key=lambda r: order.get(type(r).__name__, 4)):
            try:
                resource.close()
            except PyverbsError:
                log.debug("closing", exc_info=True)
        self._resources = []
        if self._wake_fd >= 0:
            os.close(self._wake_fd)
            self._wake_fd = -1
        self.nic.release()
