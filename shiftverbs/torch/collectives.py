# SPDX-License-Identifier: BSD-3-Clause
"""The collectives, on contiguous tensors, in the group's thread.

What fits into a few slots of the transport goes by small messages: recursive doubling for allreduce, everybody to
everybody for the rest. What is larger is written from tensor to tensor: around the ring, chunk by chunk, each sent on
as soon as it was reduced; or straight to whom it is for. The order in which contributions are reduced depends on the
ranks alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shiftverbs.torch.reduction import Reduction
from shiftverbs.torch.tensors import from_bytes, nbytes, region, to_bytes
from shiftverbs.transport import SLOT_BYTES, In, Lease, Out, Transport, run
from shiftverbs.transport import SMALL_BYTES as MESSAGE_BYTES
from shiftverbs.transport.flow import Chunk, offer
from shiftverbs.transport.group import STAGE_BYTES, STAGES

#: Up to so many bytes an allreduce or a broadcast goes by small messages: above, the ring is faster.
SMALL_BYTES = 4 * SLOT_BYTES
#: How many chunks of a step are in staging places at once where they are sent on from there.
HELD = STAGES // 2


class Collectives:
    """The collectives of one transport, one at a time. Deadlines are in time.monotonic()'s seconds."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.rank, self.size = transport.rank, transport.size
        self._before = (self.rank - 1) % self.size
        self._behind = (self.rank + 1) % self.size
        self._stage: dict[Any, list[Any]] = {}

    # Small messages

    def _send(self, rank: int, data: bytes) -> None:
        for at in range(0, max(1, len(data)), MESSAGE_BYTES):
            self.transport.send_small(rank, data[at : at + MESSAGE_BYTES])

    def _receive(self, rank: int, length: int, deadline: float) -> bytes:
        pieces = [self.transport.recv_small(rank, deadline) for _ in range(0, max(1, length), MESSAGE_BYTES)]
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        if len(data) != length:
            raise ValueError(
                f"rank {rank} sent {len(data)} bytes, not {length}: do all ranks pass the same sizes?"
            )
        return data

    def _receive_like(self, rank: int, tensor: Any, deadline: float) -> Any:
        data = bytearray(self._receive(rank, nbytes(tensor), deadline))
        return torch.frombuffer(data, dtype=tensor.dtype)

    def barrier(self, deadline: float) -> None:
        """Until all ranks are here: dissemination."""
        self.transport.begin("barrier")
        step = 1
        while step < self.size:
            self._send((self.rank + step) % self.size, b"")
            self._receive((self.rank - step) % self.size, 0, deadline)
            step *= 2

    # Reductions

    def allreduce(self, tensor: Any, reduction: Reduction, deadline: float, name: str = "allreduce") -> None:
        """In place."""
        self.transport.begin(f"{name} ({reduction.name}) of {_what(tensor)}")
        flat = tensor.view(-1)
        if not flat.numel():
            return
        if nbytes(flat) <= SMALL_BYTES:
            self._double(flat, reduction, deadline)
        else:
            self._ring(flat, reduction, deadline)

    def _double(self, flat: Any, reduction: Reduction, deadline: float) -> None:
        """Recursive doubling. Ranks beyond a power of two have one of the others work for them."""
        rank, many = self.rank, 1 << (self.size.bit_length() - 1)
        if rank >= many:
            self._send(rank - many, to_bytes(flat))
            from_bytes(flat, self._receive(rank - many, nbytes(flat), deadline))
            return
        works_for = rank + many if rank + many < self.size else None
        if works_for is not None:
            reduction.into(flat, self._receive_like(works_for, flat, deadline), flat)
        step = 1
        while step < many:
            peer = rank ^ step
            self._send(peer, to_bytes(flat))
            other = self._receive_like(peer, flat, deadline)
            if peer < rank:  # the same order at both ends
                reduction.into(other, flat, flat)
            else:
                reduction.into(flat, other, flat)
            step *= 2
        reduction.finish(flat, self.size)
        if works_for is not None:
            self._send(works_for, to_bytes(flat))

    def _stages(self, dtype: Any) -> list[Any]:
        """The staging places as tensors of a dtype."""
        found = self._stage.get(dtype)
        if found is None:
            view = self.transport.stage.view
            found = self._stage[dtype] = [
                torch.frombuffer(view[i * STAGE_BYTES : (i + 1) * STAGE_BYTES], dtype=dtype)
                for i in range(STAGES)
            ]
        return found

    def _ring(self, flat: Any, reduction: Reduction, deadline: float) -> None:
        size, rank, element = self.size, self.rank, flat.element_size()
        stages, into = self._stages(flat.dtype), reduction.into
        chunks = _split(flat.numel(), size, STAGE_BYTES // element)
        lease = self.transport.lease()
        try:
            address, lkey, rkey = region(lease, flat)

            def reduce_into(target: Any, last: bool) -> Any:
                count = target.numel()

                def act(place: int) -> bool:
                    into(target, stages[place % STAGES][:count], target)
                    if last:
                        reduction.finish(target, size)
                    return True

                return act

            incoming: list[Any] = []
            outgoing: list[Chunk] = []
            begins: list[int] = []
            for step in range(2 * (size - 1)):
                reducing = step < size - 1
                out, into_ = (rank - step) % size, (rank - step - 1) % size
                for number, (start, stop) in enumerate(chunks[out]):
                    source = (address + start * element, (stop - start) * element, lkey)
                    need = begins[-1] + number + 1 if step else 0
                    outgoing.append(Chunk(source, -1 if reducing else 0, start * element, need))
                begins.append(len(incoming))
                for start, stop in chunks[into_]:
                    target = flat[start:stop] if reducing else None
                    incoming.append(reduce_into(target, step == size - 2) if reducing else None)
            before, behind = self.transport.link(self._before), self.transport.link(self._behind)
            offer(self.transport, before, [(address, rkey, nbytes(flat))])
            came = In(before, incoming)
            run(self.transport, [came], [Out(behind, outgoing, came)], deadline)
        finally:
            lease.end()

    def reduce_scatter(
        self, output: Any, inputs: Sequence[Any], reduction: Reduction, deadline: float
    ) -> None:
        """inputs: one tensor for each rank, of output's size; they stay as they are."""
        self.transport.begin(f"reduce_scatter ({reduction.name}) of {_what(output)}")
        if not output.numel():
            return
        if nbytes(output) <= SLOT_BYTES:
            self._reduce_scatter_small(output, inputs, reduction, deadline)
        else:
            self._reduce_scatter_ring(output.view(-1), [one.view(-1) for one in inputs], reduction, deadline)
        reduction.finish(output, self.size)

    def _reduce_scatter_small(
        self, output: Any, inputs: Sequence[Any], reduction: Reduction, deadline: float
    ) -> None:
        for peer in self._peers():
            self._send(peer, to_bytes(inputs[peer]))
        flat = output.view(-1)
        total: Any = None
        for rank in range(self.size):
            one = inputs[rank].view(-1) if rank == self.rank else self._receive_like(rank, flat, deadline)
            if total is None:
                total = one
            else:
                reduction.into(total, one, flat)
                total = flat

    def _reduce_scatter_ring(
        self, output: Any, inputs: Sequence[Any], reduction: Reduction, deadline: float
    ) -> None:
        """A chunk is reduced in the staging place where it came, and sent on from there.

        All steps for some chunks, and then for the next: of the rank that is behind the others no more than HELD chunks
        hold staging places at its next one, so there is always another.
        """
        size, rank, element, transport = self.size, self.rank, output.element_size(), self.transport
        stages, into = self._stages(output.dtype), reduction.into
        pieces = _pieces(output.numel(), STAGE_BYTES // element)
        before, behind = transport.link(self._before), transport.link(self._behind)
        first, staged = before.places, transport.stage.address
        lease = transport.lease()

        def reduce_here(source: Any, target: Any) -> Any:
            count = source.numel()

            def act(place: int) -> bool:
                here = stages[place % STAGES][:count]
                into(here, source, here if target is None else target)
                return target is not None

            return act

        try:
            address, lkey, _ = region(lease, inputs[(rank - 1) % size])
            incoming: list[Any] = []
            outgoing: list[Chunk] = []
            for some in range(0, len(pieces), HELD):
                group = pieces[some : some + HELD]
                for step in range(size - 1):
                    before_these = len(incoming) - len(group)
                    for number, (start, stop) in enumerate(group):
                        length = (stop - start) * element
                        if not step:
                            outgoing.append(Chunk((address + start * element, length, lkey), -1, 0, 0))
                            continue
                        arrival = before_these + number
                        at = staged + (first + arrival) % STAGES * STAGE_BYTES
                        outgoing.append(Chunk((at, length, transport.stage_lkey), -1, 0, arrival + 1, True))
                    own = inputs[(rank - step - 2) % size]
                    for start, stop in group:
                        target = output[start:stop] if step == size - 2 else None
                        incoming.append(reduce_here(own[start:stop], target))
            came = In(before, incoming)
            run(transport, [came], [Out(behind, outgoing, came)], deadline)
        finally:
            lease.end()

    def reduce(self, tensor: Any, root: int, reduction: Reduction, deadline: float) -> None:
        """The result is root's; the others' tensors stay as they are."""
        mine = tensor if self.rank == root else tensor.clone()
        self.allreduce(mine, reduction, deadline, f"reduce to rank {root}")

    # Moving

    def _peers(self) -> list[int]:
        """All others, the next one first: so that not all send to the same one."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]

    def broadcast(self, tensor: Any, root: int, deadline: float) -> None:
        """From root to all."""
        self.transport.begin(f"broadcast from rank {root} of {_what(tensor)}")
        length, place = nbytes(tensor), (self.rank - root) % self.size
        if not length:
            return
        if length <= SMALL_BYTES:
            self._broadcast_small(tensor, root, place, deadline)
            return
        lease = self.transport.lease()
        try:
            address, lkey, rkey = region(lease, tensor)
            pieces = _pieces(length, STAGE_BYTES)
            ins, outs = [], []
            if place:
                before = self.transport.link(self._before)
                offer(self.transport, before, [(address, rkey, length)])
                ins.append(In(before, [None] * len(pieces)))
            if place < self.size - 1:
                outgoing = [
                    Chunk((address + start, stop - start, lkey), 0, start, number + 1 if place else 0)
                    for number, (start, stop) in enumerate(pieces)
                ]
                outs.append(Out(self.transport.link(self._behind), outgoing, ins[0] if ins else None))
            run(self.transport, ins, outs, deadline)
        finally:
            lease.end()

    def _broadcast_small(self, tensor: Any, root: int, place: int, deadline: float) -> None:
        """A binomial tree: place p hears from p without its highest bit."""
        length = nbytes(tensor)
        if place:
            above = place - (1 << (place.bit_length() - 1))
            data = self._receive((above + root) % self.size, length, deadline)
            from_bytes(tensor, data)
        else:
            data = to_bytes(tensor)
        step = 1 << place.bit_length() if place else 1
        while place + step < self.size:
            self._send((place + step + root) % self.size, data)
            step *= 2

    def allgather(self, outputs: Sequence[Any], own: Any, deadline: float) -> None:
        """outputs: one tensor for each rank, of own's size."""
        self.transport.begin(f"allgather of {_what(own)}")
        outputs[self.rank].copy_(own)
        length = nbytes(own)
        if not length:
            return
        if length <= SLOT_BYTES:
            self.exchange(
                dict.fromkeys(self._peers(), own),
                {peer: outputs[peer] for peer in self._peers()},
                deadline,
            )
            return
        size, rank = self.size, self.rank
        lease = self.transport.lease()
        try:
            regions = [region(lease, output) for output in outputs]
            pieces = _pieces(length, STAGE_BYTES)
            outgoing = []
            for step in range(size - 1):
                segment = (rank - step) % size
                address, lkey, _ = regions[segment]
                for number, (start, stop) in enumerate(pieces):
                    need = (step - 1) * len(pieces) + number + 1 if step else 0
                    outgoing.append(Chunk((address + start, stop - start, lkey), segment, start, need))
            before = self.transport.link(self._before)
            offer(self.transport, before, [(address, rkey, length) for address, _, rkey in regions])
            came = In(before, [None] * len(outgoing))
            run(self.transport, [came], [Out(self.transport.link(self._behind), outgoing, came)], deadline)
        finally:
            lease.end()

    def exchange(self, sends: Mapping[int, Any], receives: Mapping[int, Any], deadline: float) -> None:
        """Tensors to and from others, by rank, all at once. Both ends of each know its size."""
        lease: Lease = self.transport.lease()
        try:
            ins, outs = [], []
            for peer, tensor in receives.items():
                length = nbytes(tensor)
                if length > SLOT_BYTES:
                    address, _, rkey = region(lease, tensor)
                    link = self.transport.link(peer)
                    offer(self.transport, link, [(address, rkey, length)])
                    ins.append(In(link, [None] * len(_pieces(length, STAGE_BYTES))))
            for peer, tensor in sends.items():
                length = nbytes(tensor)
                if length > SLOT_BYTES:
                    address, lkey, _ = region(lease, tensor)
                    chunks = [
                        Chunk((address + start, stop - start, lkey), 0, start, 0)
                        for start, stop in _pieces(length, STAGE_BYTES)
                    ]
                    outs.append(Out(self.transport.link(peer), chunks))
                elif length:
                    self._send(peer, to_bytes(tensor))
            if ins or outs:
                run(self.transport, ins, outs, deadline)
            for peer, tensor in receives.items():
                if 0 < nbytes(tensor) <= SLOT_BYTES:
                    from_bytes(tensor, self._receive(peer, nbytes(tensor), deadline))
        finally:
            lease.end()

    def alltoall(self, outputs: Sequence[Any], inputs: Sequence[Any], deadline: float) -> None:
        """One tensor for and from each rank; their sizes may differ from peer to peer."""
        self.transport.begin(f"alltoall of {outputs[0].dtype}")
        outputs[self.rank].view(-1).copy_(inputs[self.rank].view(-1))
        self.exchange(
            {peer: inputs[peer] for peer in self._peers()},
            {peer: outputs[peer] for peer in self._peers()},
            deadline,
        )

    def gather(self, outputs: Sequence[Any], own: Any, root: int, deadline: float) -> None:
        """outputs: at root, one tensor for each rank."""
        self.transport.begin(f"gather to rank {root} of {_what(own)}")
        if self.rank != root:
            self.exchange({root: own}, {}, deadline)
            return
        outputs[root].copy_(own)
        self.exchange({}, {peer: outputs[peer] for peer in self._peers()}, deadline)

    def scatter(self, output: Any, inputs: Sequence[Any], root: int, deadline: float) -> None:
        """inputs: at root, one tensor for each rank."""
        self.transport.begin(f"scatter from rank {root} of {_what(output)}")
        if self.rank != root:
            self.exchange({}, {root: output}, deadline)
            return
        output.copy_(inputs[root])
        self.exchange({peer: inputs[peer] for peer in self._peers()}, {}, deadline)


def _what(tensor: Any) -> str:
    return f"{tensor.numel()} {str(tensor.dtype).removeprefix('torch.')}"


def _pieces(length: int, most: int) -> list[tuple[int, int]]:
    """(start, stop) of pieces of at most so many."""
    return [(start, min(start + most, length)) for start in range(0, length, most)]


def _split(count: int, size: int, most: int) -> list[list[tuple[int, int]]]:
    """The elements of a tensor as one segment for each rank, each as chunks of at most so many elements."""
    segments, start = [], 0
    for number in range(size):
        stop = start + count // size + (number < count % size)
        segments.append([(start + a, start + b) for a, b in _pieces(stop - start, most)])
        start = stop
    return segments
