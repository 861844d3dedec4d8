"""Compiles an operation graph into a fast plan."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

from cudnn_actor.engines.base import no_progress
from cudnn_actor.engines.cpu.fast.by_definition import ByDefinition
from cudnn_actor.engines.cpu.fast.kernel_table import kernel_of
from cudnn_actor.engines.cpu.fast.kernels import carried_number, carrier_dtype
from cudnn_actor.engines.cpu.fast.memory_orders import is_channels_last
from cudnn_actor.engines.cpu.fast.open_chain import OpenChain
from cudnn_actor.engines.cpu.fast.plan import Buffer, FastPlan, Piece, Place, RepeatedNumber, View
from cudnn_actor.engines.cpu.fast.pointwise import Chain, rounding_kernel
from cudnn_actor.engines.cpu.fast.units import (
    Unit,
    copy_unit,
    definition_unit,
    kernel_unit,
    redirect_unit,
    stored_number,
)
from cudnn_actor.engines.cpu.scratch import footprint
from cudnn_actor.engines.scratch_places import Held, places
from cudnn_actor.engines.support import tag_of
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.graphs.step_kinds import StepKind
from cudnn_actor.protocol.operations import (
    Convolution,
    GraphTensor,
    GroupNorm,
    GroupNormBackward,
    Movement,
    Node,
    Pointwise,
    TensorRole,
)

__all__ = ["compile_fast"]

_MOST_LANE_BYTES = 256 << 20
"""Bytes for each lane. Kernels need some MiB, and more only for filters of thousands of elements."""


def compile_fast(
    graph: OperationGraph, lanes: int, on_progress: Callable[[], None] = no_progress
) -> FastPlan | None:
    """Make a graph ready to run in float32, on `lanes` lanes.

    None if no operation has a kernel, if a convolution has none, or if one needs very much scratch memory.
    Then exact plans compute it, convolutions in tiles.

    The graph is one that `check_graph` takes. `on_progress` is called after each operation. Each operation
    gets a kernel, or is evaluated by its definition where there is none. Reshapes, transposes and slices
    that only the graph itself sees are read where their operands lie.
    """
    return _Compiler(graph, lanes, on_progress).plan()


class _Compiler:
    def __init__(self, graph: OperationGraph, lanes: int, on_progress: Callable[[], None]) -> None:
        self._graph = graph
        self._lanes = lanes
        self._on_progress = on_progress
        self._readers: defaultdict[int, set[int]] = defaultdict(set)
        """The operations that read each tensor, by their numbers."""
        for number, operation in enumerate(graph.operations):
            for uid in operation.reads:
                self._readers[uid].add(number)
        self._overwritten = {tensor.overwrites for tensor in graph.tensors} - {None}
        self._apart = set(self._carried_apart())
        self._channels_last_ranks = {
            len(graph.tensor(operation.writes[0]).dims)
            for operation in graph.operations
            if isinstance(operation, Convolution)
        }
        """Ranks of tensors that lie channels-last in the workspace: convolutions are fastest there."""
        self._held: dict[int, GraphTensor] = {}
        """Tensors whose values lie in the workspace, in the order in which they are needed first."""
        self._strides: dict[int, tuple[int, ...]] = {}
        """Strides, in elements, of each tensor whose place is known."""
        self._views: dict[int, View] = {}
        """The views, by the numbers of their operations."""
        self._roots: dict[int, int] = {}
        """The tensor in which a view's values lie."""
        self._moved_into: set[int] = set()
        """Results in whose memory an earlier one lies, too. They stay there: its piece refers to that."""
        self._pieces: list[Piece] = []
        self._chain = OpenChain(graph, self._readers)
        self._loads: list[Unit] = []
        """Copies that the next piece begins with."""

    def plan(self) -> FastPlan | None:
        graph = self._graph
        for number, operation in enumerate(graph.operations):
            if not self._chain.joins(operation, self._roots):
                self._end_chain()
            if not self._is_view(number, operation):
                self._add(number, operation)
            self._on_progress()
        self._end_chain()
        without_kernel = [piece for piece in self._pieces if piece.step == StepKind.NUMPY.step_name()]
        evaluated_ones = (graph.operations[number] for piece in without_kernel for number in piece.operations)
        if len(without_kernel) == len(self._pieces) or any(
            isinstance(one, Convolution) for one in evaluated_ones
        ):
            return None
        held = self._lifetimes()
        offsets, held_bytes = places(list(held.values()))
        scratch = (unit.footprint for piece in self._pieces for unit in piece.units)
        lane_bytes = max((footprint((nbytes,), itemsize=1) for nbytes in scratch), default=0)
        if lane_bytes > _MOST_LANE_BYTES:
            return None
        return FastPlan(
            tag=tag_of("cpu", graph),
            pieces=tuple(self._pieces),
            bound=tuple(self._buffer(graph.tensor(uid)) for uid in graph.bound),
            places=tuple(self._place(one, offsets[one.uid]) for one in held.values()),
            repeated=tuple(map(self._repeated_number, (*graph.scalars, *graph.constants))),
            views=tuple(each for each in self._views.items() if self._is_read(each[1], held)),
            held_bytes=held_bytes,
            lane_bytes=lane_bytes,
            lanes=self._lanes,
            scalars=len(graph.scalars),
            updates=bool(self._overwritten),
        )

    def _carried_apart(self) -> Iterator[int]:
        """The bound tensors whose values are not computed in their buffers.

        They are of a type that kernels do not take, or overwrite what the operation that writes them may
        still read, or are results that NumPy would not change in place.
        """
        graph = self._graph
        for uid in graph.bound:
            if carrier_dtype(graph.tensor(uid).dtype) != graph.tensor(uid).dtype.numpy:
                yield uid
        for operation in graph.operations:
            written = set(graph.bound).intersection(operation.writes)
            yield from (uid for uid in written if _is_entangled(graph.tensor(uid), operation))
            if not isinstance(operation, Pointwise):
                yield from (uid for uid in operation.writes if graph.tensor(uid).overwrites is not None)

    # Operations.

    def _is_view(self, number: int, operation: Node) -> bool:
        """Whether an operation's result is read where its operand lies. If so, it is noted."""
        if not isinstance(operation, Movement):
            return False
        x, y = self._graph.tensor(operation.x), self._graph.tensor(operation.y)
        root = self._roots.get(x.uid, x.uid)
        if y.role is not TensorRole.VIRTUAL or root in self._overwritten:
            return False
        if x.role not in (TensorRole.VIRTUAL, TensorRole.BOUND):
            return False
        self._load(x.uid)
        placed = operation.view(x.dims, self._strides[x.uid])
        if placed is None:
            return False
        self._views[number] = View(y.uid, x.uid, operation, y.dims)
        self._strides[y.uid] = placed.strides
        self._roots[y.uid] = root
        return True

    def _add(self, number: int, operation: Node) -> None:
        """Add the piece that computes an operation, or the operation to the chain."""
        graph = self._graph
        for uid in operation.reads:
            self._load(uid)
        kernel = kernel_of(graph, operation)
        if isinstance(kernel, Chain):
            self._chain.add(number)
            return
        if isinstance(kernel, ByDefinition) and any(map(self._may_lie_channels_last, operation.writes)):
            kernel = kernel.with_channels_last()
        self._end_chain()
        for uid in operation.writes:
            self._make(uid)
        units = self._loads
        self._loads = []
        if kernel is None:
            units.append(definition_unit(graph, number))
            step = StepKind.NUMPY.step_name()
        else:
            operands, results = (dict(operation.named(n)) for n in (operation.inputs, operation.outputs))
            units.append(kernel_unit(kernel, operands, results, self._lanes))
            units += self._rounding_units(operation)
            step = StepKind.BLOCKS.step_name()
        for uid in operation.writes:
            if uid in self._apart:
                units.append(copy_unit(uid, stored_number(uid)))
        self._pieces.append(Piece((number,), step, tuple(units)))

    def _end_chain(self) -> None:
        """Add the piece of the operations that are computed element by element, together."""
        chain, self._chain = self._chain, OpenChain(self._graph, self._readers)
        if not chain.numbers:
            return
        kept = chain.stored_results()
        for uid in kept:
            self._make(uid)
        overwritten = self._write_ahead(chain, kept)
        units = [*self._loads, chain.unit(kept, overwritten, self._lanes)]
        units += (copy_unit(uid, stored_number(uid)) for uid in kept if uid in self._apart)
        self._loads = []
        self._pieces.append(Piece(tuple(chain.numbers), StepKind.BLOCKS.step_name(), tuple(units)))

    def _write_ahead(self, chain: OpenChain, kept: Sequence[int]) -> dict[int, int]:
        """Make the last piece write its result directly into the buffer that the chain behind it overwrites.

        That is done where it is possible. The result then takes no memory of its own, and has the layout of
        that buffer, so that the chain does not transpose it. That pays more than to compute the chain block
        by block behind a convolution, with which a few networks on an x86-64 processor even took longer: its
        registers displace the filter and the columns from the second-level cache.

        Returns
        -------
        dict
            The uid of the chain's result by the uid of what it overwrites; empty if none can.
        """
        for piece in self._pieces[-1:]:
            written = (uid for number in piece.operations for uid in self._graph.operations[number].writes)
            for uid, into in itertools.product(written, kept):
                if uid not in self._moved_into and chain.may_overwrite(uid, into):
                    units = tuple(redirect_unit(unit, uid, into) for unit in piece.units)
                    self._pieces[-1] = dataclasses.replace(piece, units=units)
                    del self._held[uid], self._strides[uid]
                    self._moved_into.add(into)
                    return {uid: into}
        return {}

    def _rounding_units(self, operation: Node) -> Iterator[Unit]:
        """The units that round an operation's results to their dtypes, for the operations that read them."""
        for uid in operation.writes:
            tensor = self._graph.tensor(uid)
            if self._readers[uid] and carrier_dtype(tensor.dtype) != tensor.dtype.numpy:
                yield kernel_unit(rounding_kernel(tensor), {"x": uid}, {"y": uid}, self._lanes)

    def _load(self, uid: int) -> None:
        """Give a tensor an array that kernels can read."""
        tensor = self._graph.tensor(uid)
        known = uid in self._strides or uid in self._chain.results
        if known or tensor.role not in (TensorRole.VIRTUAL, TensorRole.BOUND):
            return
        if uid in self._apart:
            self._hold(tensor)
            self._loads.append(copy_unit(stored_number(uid), uid))
        else:
            self._strides[uid] = tensor.strides

    def _make(self, uid: int) -> None:
        """Give a result an array that kernels can write to."""
        tensor = self._graph.tensor(uid)
        if self._in_workspace(tensor):
            self._hold(tensor)
        else:
            self._strides[uid] = tensor.strides

    def _in_workspace(self, result: GraphTensor) -> bool:
        """Whether the array of a result lies in the workspace."""
        return result.role is TensorRole.VIRTUAL or result.uid in self._apart

    # Arrays.

    def _may_lie_channels_last(self, uid: int) -> bool:
        """Whether the array of a result may lie channels-last, although the tensor does not: in the workspace
        (`_hold`), or in the memory of a result of the chain behind it (`_write_ahead`)."""
        graph, tensor = self._graph, self._graph.tensor(uid)
        if self._in_workspace(tensor) and len(tensor.dims) in self._channels_last_ranks:
            return True
        return tensor.role is TensorRole.VIRTUAL and any(
            each.dims == tensor.dims and is_channels_last(each.strides) for each in graph.tensors
        )

    def _hold(self, tensor: GraphTensor) -> None:
        self._held[tensor.uid] = tensor
        rank = len(tensor.dims)
        last = rank in self._channels_last_ranks
        order = (
            (0, *range(2, rank), 1) if last else sorted(range(rank), key=lambda axis: -tensor.strides[axis])
        )
        self._strides[tensor.uid] = _dense(tensor.dims, order)

    def _lifetimes(self) -> dict[int, Held]:
        """For each tensor in the workspace: the first and the last piece that use it, or a view of it."""
        found: dict[int, Held] = {}
        for number, piece in enumerate(self._pieces):
            for unit in piece.units:
                for uid in (*unit.reads, *unit.writes):
                    root = self._roots.get(uid, uid)
                    if root in self._held:
                        first = found[root].first if root in found else number
                        found[root] = Held(root, self._nbytes(root), first, number)
        return found

    def _is_read(self, view: View, held: Mapping[int, Held]) -> bool:
        """Whether the array that a view shows exists. A tensor that nothing uses may have none."""
        root = self._roots[view.number]
        return root in held or root not in self._held

    def _nbytes(self, uid: int) -> int:
        tensor = self._held[uid]
        return footprint((max(1, math.prod(tensor.dims)),), itemsize=carrier_dtype(tensor.dtype).itemsize)

    def _place(self, held: Held, offset: int) -> Place:
        tensor = self._held[held.uid]
        dtype = carrier_dtype(tensor.dtype)
        return Place(
            number=held.uid,
            offset=offset,
            dims=tensor.dims,
            strides=tuple(stride * dtype.itemsize for stride in self._strides[held.uid]),
            dtype=dtype,
            label=tensor.name,
            nbytes=held.size,
            first=held.first,
            last=held.last,
        )

    def _buffer(self, tensor: GraphTensor) -> Buffer:
        number = stored_number(tensor.uid) if tensor.uid in self._apart else tensor.uid
        return Buffer(number, tensor.dims, tensor.dtype)

    def _repeated_number(self, uid: int) -> RepeatedNumber:
        tensor = self._graph.tensor(uid)
        number = self._graph.constants.get(uid)
        return RepeatedNumber(uid, tensor.dims, carried_number(tensor.dtype, number), number)


def _is_entangled(result: GraphTensor, operation: Node) -> bool:
    """Whether the strides of three dims or more are no multiples of each other.

    NumPy looks for a limited time whether an array has an element twice, and does not find it out for such an
    array. Where a function is to write to the array that it reads, it then works on a copy. Parts of an array
    without gaps are not entangled, except if their channels are seen as groups.
    """
    steps = [*zip(result.dims, result.strides, strict=True)]
    if len(steps) > 1 and isinstance(operation, (GroupNorm, GroupNormBackward)):
        channels, stride = steps[1]
        each = channels // operation.groups
        steps[1:2] = [(operation.groups, each * stride), (each, stride)]
    strides = sorted(abs(stride) for size, stride in steps if size > 1)
    return len(strides) > 2 and any(larger % smaller for smaller, larger in itertools.pairwise(strides))


def _dense(dims: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Strides without gaps, in elements. `order`: the axes; elements lie farthest apart along the first."""
    strides, step = [1] * len(dims), 1
    for axis in reversed(order):
        strides[axis] = step
        step *= max(dims[axis], 1)
    return tuple(strides)
