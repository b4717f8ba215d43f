# SPDX-License-Identifier: BSD-3-Clause
"""The process group: torch's calls as jobs of a Runner."""

from __future__ import annotations

import atexit
import datetime
import os
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from shiftverbs.torch import sparse
from shiftverbs.torch.alone import Alone
from shiftverbs.torch.dense import Copy, dense_of, fill, with_copies
from shiftverbs.torch.futures import Futures
from shiftverbs.torch.point_to_point import Receive, Send
from shiftverbs.torch.reduction import Reduction
from shiftverbs.torch.runner import Action, Runner
from shiftverbs.torch.tensors import check, check_device, is_dense, nbytes, overlaps
from shiftverbs.torch.work import Keeper, ShiftWork
from shiftverbs.transport import Transport

BACKEND = "shift"
_ALONE: Any = Alone()
#: Tensors of an allreduce_coalesced up to so many bytes are put together first.
COALESCED_BYTES = 64 * 1024


class StoreAdapter:
    """torch's store as the transport's. A restart by torchrun has keys of its own: the store still has the old ones."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._prefix = f"shift/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/"

    def set(self, key: str, value: bytes) -> None:
        """As Store.set."""
        self._store.set(self._prefix + key, value.decode())

    def get(self, key: str, timeout_s: float) -> bytes:
        """As Store.get. Raises RuntimeError when the time is over."""
        self._store.wait([self._prefix + key], datetime.timedelta(seconds=timeout_s))
        return bytes(self._store.get(self._prefix + key))


class ProcessGroupShift(dist.ProcessGroup):
    """A process group over RC QPs, as `init_process_group("shift")` makes it.

    :param store: torch's store for this group
    :param rank, size: ours in the group, and how many there are
    :param timeout: timedelta, of each operation that is given none
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: datetime.timedelta) -> None:
        super().__init__(rank, size)
        self._own_rank, self._own_size = rank, size
        self._timeout_s = timeout.total_seconds()
        self._keeper = Keeper()
        self._futures = Futures(f"shift-{rank}")
        self._runner: Runner | None = None
        if size > 1:
            transport = Transport(StoreAdapter(store), rank, size, self._timeout_s)
            self._runner = runner = Runner(transport, self._futures, f"shift-{rank}")
            # At exit too, and before the failover machinery, which began earlier, stops.
            atexit.register(runner.stop)
            weakref.finalize(self, _stop, runner)

    # What it is

    def getBackendName(self) -> str:
        """torch's name of this kind."""
        return BACKEND

    def rank(self) -> int:
        """Our rank in the group."""
        return self._own_rank

    def size(self) -> int:
        """How many ranks it has."""
        return self._own_size

    @property
    def transport(self) -> Transport | None:
        """What it runs on; None for a group of one."""
        return self._runner.transport if self._runner is not None else None

    def wait_protected(self, timeout_s: float = 30.0) -> bool:
        """Whether all QPs of this group are protected, waiting for it so many seconds at most."""
        transport = self.transport
        return transport is None or transport.wait_protected(timeout_s)

    def shutdown(self, *_: Any) -> None:
        """End: what has not ended yet fails."""
        if self._runner is not None:
            _stop(self._runner)

    abort = shutdown

    # Running

    def _submit(
        self,
        action: Action,
        tensors: list[Any],
        options: Any = None,
        outputs: Any = None,
        copies: Sequence[Copy] = (),
        inputs: Sequence[Copy] = (),
    ) -> ShiftWork:
        """Submit a collective.

        :param tensors: what it works on; outputs: its result, where that is not the same
        :param copies, inputs: what `dense_of` gave for tensors that are written to, and that are not
        :raises ValueError: one of copies has several elements in one place
        """
        if any(map(overlaps, (tensor for tensor, _ in copies))):
            raise ValueError("a tensor to write to must not have several elements in one place: clone it")
        work = ShiftWork(tensors if outputs is None else outputs, self._futures)
        self._keeper.keep(work, sum(map(nbytes, tensors)))
        if copies or inputs:
            action = with_copies(action, copies, inputs)
        if self._runner is None:
            try:
                action(_ALONE, 0.0)
            except BaseException as error:
                work.finish(error)
            else:
                work.finish()
        else:
            self._runner.submit(action, work, self._seconds(options))
        return work

    def _seconds(self, options: Any) -> float:
        timeout = getattr(options, "timeout", None)
        seconds = timeout.total_seconds() if timeout is not None else 0.0
        return seconds if seconds > 0 else self._timeout_s

    # Collectives

    def allreduce(self, tensors: Any, opts: Any = None) -> ShiftWork:
        """In place; tensors: a list of one. One that is sparse (COO) may be summed, or averaged."""
        if len(tensors) == 1 and tensors[0].layout is torch.sparse_coo:
            return self._allreduce_sparse(tensors[0], opts)
        tensor = _only(tensors)
        reduction = Reduction(_op(opts), tensor.dtype)
        dense, copies = dense_of([tensor])
        return self._submit(
            lambda c, until: c.allreduce(dense[0], reduction, until), [tensor], opts, copies=copies
        )

    def _allreduce_sparse(self, tensor: Any, opts: Any) -> ShiftWork:
        check_device(tensor)
        reduction = Reduction(_op(opts), tensor.dtype)
        if not reduction.adds:
            raise ValueError(
                f"the shift backend sums and averages sparse tensors, {_op(opts)} it does not know"
            )
        if tensor.dim() > sparse.MOST_DIMENSIONS:
            raise ValueError(
                f"a sparse tensor has {sparse.MOST_DIMENSIONS} dimensions at most, not {tensor.dim()}"
            )
        size = self._own_size
        return self._submit(
            lambda c, until: sparse.allreduce(c, size, tensor, reduction, until), [tensor], opts
        )

    def allreduce_coalesced(self, tensors: Sequence[Any], opts: Any = None) -> ShiftWork:
        """In place, all of them; small ones of a dtype together."""
        op = _op(opts)
        for tensor in tensors:
            check(tensor)
        dense, copies = dense_of(tensors)
        small: dict[Any, list[Any]] = {}
        large = []
        for tensor in dense:
            if nbytes(tensor) <= COALESCED_BYTES:
                small.setdefault(tensor.dtype, []).append(tensor.view(-1))
            else:
                large.append((tensor, Reduction(op, tensor.dtype)))
        groups = [(group, Reduction(op, dtype)) for dtype, group in small.items()]

        def act(collectives: Any, until: float) -> None:
            for group, reduction in groups:
                flat = torch.cat(group)
                collectives.allreduce(flat, reduction, until)
                for tensor, piece in zip(group, flat.split([t.numel() for t in group]), strict=True):
                    tensor.copy_(piece)
            for tensor, reduction in large:
                collectives.allreduce(tensor, reduction, until)

        return self._submit(act, list(tensors), opts, copies=copies)

    def broadcast(self, tensors: Any, opts: Any = None) -> ShiftWork:
        """tensors: a list of one."""
        tensor = _only(tensors)
        root = self._root(opts)
        dense, copies = dense_of([tensor])
        return self._submit(
            lambda c, until: c.broadcast(dense[0], root, until), [tensor], opts, copies=copies
        )

    def reduce(self, tensors: Any, opts: Any = None) -> ShiftWork:
        """To root; tensors: a list of one."""
        tensor = _only(tensors)
        root = self._root(opts)
        reduction = Reduction(_op(opts), tensor.dtype)
        dense, copies = dense_of([tensor])
        return self._submit(
            lambda c, until: c.reduce(dense[0], root, reduction, until), [tensor], opts, copies=copies
        )

    def allgather(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> ShiftWork:
        """output_tensors: a list of one list, of a tensor for each rank; input_tensors: a list of one."""
        own, outputs = _only(input_tensors), _lists(output_tensors)
        self._check_each(outputs, own)
        (source,), inputs = dense_of([own])
        dense, copies = dense_of(outputs)
        return self._submit(
            lambda c, until: c.allgather(dense, source, until),
            [*outputs, own],
            opts,
            [outputs],
            copies,
            inputs,
        )

    def _allgather_base(self, output: Any, input: Any, opts: Any = None) -> ShiftWork:  # noqa: A002
        """output: one tensor that holds all ranks' inputs in order."""
        check(output)
        check(input)
        if output.numel() != input.numel() * self._own_size or output.dtype != input.dtype:
            raise ValueError(f"the output must hold {self._own_size} times the input, in its dtype")
        (source,), inputs = dense_of([input])
        (whole,), copies = dense_of([output])
        parts = list(whole.view(-1).chunk(self._own_size)) if whole.numel() else [whole] * self._own_size
        return self._submit(
            lambda c, until: c.allgather(parts, source.view(-1), until),
            [output, input],
            opts,
            [output],
            copies,
            inputs,
        )

    all_gather_into_tensor = _allgather_base

    def allgather_coalesced(self, output_lists: Any, input_list: Any, opts: Any = None) -> ShiftWork:
        """As allgather, for several inputs; output_lists: for each rank a list of a tensor for each of them."""
        if len(output_lists) != self._own_size:
            raise ValueError(f"{len(output_lists)} lists of tensors for {self._own_size} ranks")
        for number, outputs in enumerate(output_lists):
            if len(outputs) != len(input_list):
                raise ValueError(f"{len(outputs)} tensors for rank {number}'s {len(input_list)} inputs")
        by_input = list(zip(*output_lists, strict=True))
        for outputs, own in zip(by_input, input_list, strict=True):
            check(own)
            self._check_each(outputs, own)
        sources, inputs = dense_of(input_list)
        pairs = [dense_of(outputs) for outputs in by_input]
        copies = [copy for _, some in pairs for copy in some]

        def act(collectives: Any, until: float) -> None:
            for (outputs, _), own in zip(pairs, sources, strict=True):
                collectives.allgather(outputs, own, until)

        everything = [tensor for outputs in output_lists for tensor in outputs] + list(input_list)
        return self._submit(act, everything, opts, output_lists, copies, inputs)

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> ShiftWork:
        """As _allgather_base, for several."""
        works = [self._allgather_base(o, i, opts) for o, i in zip(outputs, inputs, strict=True)]
        return _last(works, list(outputs))

    def reduce_scatter(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> ShiftWork:
        """output_tensors: a list of one; input_tensors: a list of one list, of a tensor for each rank."""
        output, inputs = _only(output_tensors), _lists(input_tensors)
        self._check_each(inputs, output)
        return self._reduce_scatter(output, inputs, opts)

    def _reduce_scatter(
        self, output: Any, tensors: Sequence[Any], opts: Any, inputs: Sequence[Copy] = ()
    ) -> ShiftWork:
        reduction = Reduction(_op(opts), output.dtype)
        sources, own = dense_of(tensors)
        (target,), copies = dense_of([output])
        return self._submit(
            lambda c, until: c.reduce_scatter(target, sources, reduction, until),
            [output, *tensors],
            opts,
            [output],
            copies,
            [*inputs, *own],
        )

    def _reduce_scatter_base(self, outputTensor: Any, inputTensor: Any, opts: Any = None) -> ShiftWork:
        """inputTensor: one tensor that holds what is for each rank in order."""
        check(outputTensor)
        check(inputTensor)
        if (
            inputTensor.numel() != outputTensor.numel() * self._own_size
            or inputTensor.dtype != outputTensor.dtype
        ):
            raise ValueError(f"the input must hold {self._own_size} times the output, in its dtype")
        (whole,), inputs = dense_of([inputTensor])
        parts = list(whole.view(-1).chunk(self._own_size)) if whole.numel() else [whole] * self._own_size
        return self._reduce_scatter(outputTensor, parts, opts, inputs)

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> ShiftWork:
        """As _reduce_scatter_base, for several."""
        works = [self._reduce_scatter_base(o, i, opts) for o, i in zip(outputs, inputs, strict=True)]
        return _last(works, list(outputs))

    def alltoall(
        self, output_tensors: Sequence[Any], input_tensors: Sequence[Any], opts: Any = None
    ) -> ShiftWork:
        """One tensor for each rank, and one from each."""
        for tensors in (output_tensors, input_tensors):
            if len(tensors) != self._own_size:
                raise ValueError(f"{len(tensors)} tensors for {self._own_size} ranks")
            for tensor in tensors:
                check(tensor)
        self._check_parts(output_tensors, input_tensors)
        sources, inputs = dense_of(input_tensors)
        targets, copies = dense_of(output_tensors)
        everything = [*output_tensors, *input_tensors]
        return self._submit(
            lambda c, until: c.alltoall(targets, sources, until),
            everything,
            opts,
            list(output_tensors),
            copies,
            inputs,
        )

    def alltoall_base(
        self,
        output_tensor: Any,
        input_tensor: Any,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any = None,
    ) -> ShiftWork:
        """One tensor with what is for each rank in order, one with what comes; sizes: rows of each, none if equal."""
        check(output_tensor)
        check(input_tensor)
        (source,), inputs = dense_of([input_tensor])
        (target,), copies = dense_of([output_tensor])
        sources, targets = self._rows(source, input_split_sizes), self._rows(target, output_split_sizes)
        self._check_parts(targets, sources)
        return self._submit(
            lambda c, until: c.alltoall(targets, sources, until),
            [output_tensor, input_tensor],
            opts,
            [output_tensor],
            copies,
            inputs,
        )

    def _rows(self, tensor: Any, sizes: Sequence[int]) -> list[Any]:
        rows = tensor.size(0) if tensor.dim() else 0
        if not sizes:
            if rows % self._own_size:
                raise ValueError(f"{rows} rows cannot be divided among {self._own_size} ranks")
            sizes = [rows // self._own_size] * self._own_size
        if len(sizes) != self._own_size or sum(sizes) != rows:
            raise ValueError(
                f"the split sizes {list(sizes)} do not fit {rows} rows and {self._own_size} ranks"
            )
        return list(tensor.split(list(sizes)))

    def gather(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> ShiftWork:
        """output_tensors: at root a list of one list, of a tensor for each rank."""
        own, root = _only(input_tensors), self._root(opts)
        outputs = _lists(output_tensors) if self._own_rank == root else []
        if self._own_rank == root:
            self._check_each(outputs, own)
        (source,), inputs = dense_of([own])
        dense, copies = dense_of(outputs)
        return self._submit(
            lambda c, until: c.gather(dense, source, root, until),
            [*outputs, own],
            opts,
            [outputs],
            copies,
            inputs,
        )

    def scatter(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> ShiftWork:
        """input_tensors: at root a list of one list, of a tensor for each rank."""
        output, root = _only(output_tensors), self._root(opts)
        tensors = _lists(input_tensors) if self._own_rank == root else []
        if self._own_rank == root:
            self._check_each(tensors, output)
        sources, inputs = dense_of(tensors)
        (target,), copies = dense_of([output])
        return self._submit(
            lambda c, until: c.scatter(target, sources, root, until),
            [output, *tensors],
            opts,
            [output],
            copies,
            inputs,
        )

    def barrier(self, opts: Any = None) -> ShiftWork:
        """Until all ranks have called it."""
        return self._submit(lambda c, until: c.barrier(until), [], opts)

    # Point to point

    def send(self, tensors: Any, dstRank: int, tag: int = 0) -> ShiftWork:
        """To a rank; tensors: a list of one."""
        tensor = _only(tensors)
        self._check_peer(dstRank)
        (dense,), inputs = dense_of([tensor])
        fill(inputs)
        work = ShiftWork([tensor], self._futures, self._own_rank)
        return self._post(work, tensor, lambda until: Send(dense, dstRank, tag, work, until))

    def recv(self, tensors: Any, srcRank: int, tag: int = 0) -> ShiftWork:
        """From a rank; tensors: a list of one."""
        self._check_peer(srcRank)
        return self._receive(tensors, srcRank, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> ShiftWork:
        """From whichever rank sends first; the work's source_rank tells."""
        return self._receive(tensors, None, tag)

    def _receive(self, tensors: Any, rank: int | None, tag: int) -> ShiftWork:
        tensor = _only(tensors)
        if not is_dense(tensor):
            raise ValueError("a tensor to receive into must be contiguous")
        work = ShiftWork([tensor], self._futures, -1 if rank is None else rank)
        return self._post(work, tensor, lambda until: Receive(tensor, rank, tag, work, until))

    def _post(self, work: ShiftWork, tensor: Any, make: Callable[[float], Send | Receive]) -> ShiftWork:
        if self._runner is None:
            raise ValueError("there is nobody else in a group of one")
        self._keeper.keep(work, nbytes(tensor))
        self._runner.post(make(time.monotonic() + self._timeout_s))
        return work

    # Arguments

    def _check_peer(self, rank: int) -> None:
        if not 0 <= rank < self._own_size or rank == self._own_rank:
            raise ValueError(
                f"rank {rank} is no peer of rank {self._own_rank} in a group of {self._own_size}"
            )

    def _root(self, opts: Any) -> int:
        root = int(opts.rootRank) if opts is not None else 0
        if not 0 <= root < self._own_size:
            raise ValueError(f"there is no rank {root} in a group of {self._own_size}")
        return root

    def _check_parts(self, outputs: Sequence[Any], inputs: Sequence[Any]) -> None:
        if len({tensor.dtype for tensor in (*outputs, *inputs)}) > 1:
            raise ValueError("what is sent and what comes must have the same dtype")
        ours, theirs = inputs[self._own_rank].numel(), outputs[self._own_rank].numel()
        if ours != theirs:
            raise ValueError(f"rank {self._own_rank} sends itself {ours} elements, and expects {theirs}")

    def _check_each(self, tensors: Sequence[Any], like: Any) -> None:
        if len(tensors) != self._own_size:
            raise ValueError(f"{len(tensors)} tensors for {self._own_size} ranks")
        for tensor in tensors:
            check(tensor)
            if tensor.numel() != like.numel() or tensor.dtype != like.dtype:
                raise ValueError("all tensors must have the same size and dtype")


def _stop(runner: Runner) -> None:
    atexit.unregister(runner.stop)
    runner.stop()


def _op(opts: Any) -> Any:
    return opts.reduceOp if opts is not None else dist.ReduceOp.SUM


def _only(tensors: Any) -> Any:
    """The tensor of a list of one, or the tensor."""
    if not isinstance(tensors, torch.Tensor):
        if len(tensors) != 1:
            raise ValueError(f"one tensor is expected, not {len(tensors)}")
        tensors = tensors[0]
    check(tensors)
    return tensors


def _lists(tensors: Any) -> list[Any]:
    """The list of a list of one list, or the list."""
    if len(tensors) == 1 and not isinstance(tensors[0], torch.Tensor):
        return list(tensors[0])
    return list(tensors)


def _last(works: list[ShiftWork], outputs: list[Any]) -> ShiftWork:
    """The last one of works that end in order; it stands for all of them."""
    work = works[-1]
    work.stand_for(outputs)
    return work


def _create(store: Any, rank: int, size: int, timeout: datetime.timedelta) -> ProcessGroupShift:
    return ProcessGroupShift(store, rank, size, timeout)


def paths(group: Any = None) -> list[str]:
    """The NICs that a group's traffic runs on now: one, unless something fails. group: None for the default one."""
    # torch has no public name for the default one.
    own = dist.distributed_c10d._get_default_group() if group is None else group  # noqa: SLF001
    transport = own.transport
    if transport is None:
        return []
    # As plain pyverbs QPs have no path.
    return sorted({str(link.qp.shift.path or transport.nic.device) for link in transport.links})


def register() -> None:
    """Make torch know the backend "shift". A second call does nothing."""
    if hasattr(dist.Backend, BACKEND.upper()):
        return
    try:
        dist.Backend.register_backend(BACKEND, _create, devices=["cpu"])
    except TypeError:  # torch 1.13 knows no devices
        dist.Backend.register_backend(BACKEND, _create)
