"""Compiles an operation graph into a plan."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field

from cudnn_actor.engines.base import no_progress
from cudnn_actor.engines.cpu.boxes import largest_tile
from cudnn_actor.engines.cpu.exact.activations import BINARY, UNARY
from cudnn_actor.engines.cpu.exact.convolution import (
    TILE_BYTES,
    BackwardFilter,
    Forward,
    Kernel,
    backward_data,
)
from cudnn_actor.engines.cpu.exact.evaluation import EvaluatedPlan
from cudnn_actor.engines.cpu.exact.plan import Convolved, CpuPlan, Mapped, Stage, Target, View
from cudnn_actor.engines.cpu.exact.pointwise import Elementwise, Loaded, Operand, Passed
from cudnn_actor.engines.cpu.geometry import ConvGeometry
from cudnn_actor.engines.cpu.rounding import rounding_to
from cudnn_actor.engines.cpu.scratch import Dims, footprint
from cudnn_actor.engines.support import check_graph, tag_of
from cudnn_actor.protocol.errors import OutOfMemory
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.operations import (
    FUNCTIONS,
    Convolution,
    ConvolutionBackwardData,
    ConvolutionBackwardFilter,
    ConvolutionForward,
    GraphTensor,
    Node,
    Pointwise,
    PointwiseMode,
    Reshape,
    TensorRole,
)
from cudnn_actor.protocol.types.dtypes import DType

__all__ = ["compile_plan"]

_KERNELS: dict[type, Callable[[ConvGeometry, int, int], Kernel]] = {
    ConvolutionForward: Forward,
    ConvolutionBackwardData: backward_data,
    ConvolutionBackwardFilter: BackwardFilter,
}


def compile_plan(
    graph: OperationGraph,
    workspace_limit: int | None,
    on_progress: Callable[[], None] = no_progress,
) -> CpuPlan | EvaluatedPlan:
    """Make a graph ready to run in at most `workspace_limit` bytes of workspace.

    Convolutions and pointwise operations are computed tile by tile, and reshapes of inputs that add or remove
    dims of size 1, as for a bias, cost nothing. A graph with any other operation, or with a tensor that tiles
    do not hold, is run by its operations' definitions. `on_progress` is called after each operation.

    Raises `UnsupportedGraph` for graphs that `check_graph` rejects, and `OutOfMemory` if even the smallest
    tiles need more.
    """
    check_graph(graph, "cpu", on_progress)
    overwritten = {tensor.overwrites for tensor in graph.tensors}
    tiled = all(_has_tiles(graph, each) or _is_view(graph, each, overwritten) for each in graph.operations)
    if tiled and all(map(_tiles_hold, graph.tensors)):
        return _Compiler(graph, on_progress).plan(workspace_limit)
    return EvaluatedPlan(tag_of("cpu", graph, "exact"), graph)


def _has_tiles(graph: OperationGraph, operation: Node) -> bool:
    """Whether an operation can be computed box by box, in float64."""
    if not isinstance(operation, Pointwise):
        return isinstance(operation, Convolution)
    mode = operation.mode
    if mode is PointwiseMode.MUL and any(graph.tensor(uid).dtype is DType.UINT32 for uid in operation.reads):
        return False  # the products of int64 wrap around
    clipped = mode is PointwiseMode.RELU and operation.effective_parameters != FUNCTIONS[mode].parameters
    return not clipped and (mode in UNARY or mode in BINARY)


def _is_view(graph: OperationGraph, operation: Node, overwritten: Container[int | None]) -> bool:
    """Whether an operation only adds or removes dims of size 1 of an input, which keeps its values."""
    if not isinstance(operation, Reshape):
        return False
    x, y = graph.tensor(operation.x), graph.tensor(operation.y)
    given = x.role is TensorRole.BOUND and x.uid not in graph.written and x.uid not in overwritten
    same = [dim for dim in x.dims if dim != 1] == [dim for dim in y.dims if dim != 1]
    return given and same and y.role is TensorRole.VIRTUAL


def _tiles_hold(tensor: GraphTensor) -> bool:
    """Whether float64 holds a tensor's values, it has dims and elements, and it is given or computed."""
    if tensor.role is TensorRole.CONSTANT:
        return False
    return bool(tensor.dims) and 0 not in tensor.dims and tensor.dtype not in (DType.INT64, DType.UINT64)


@dataclass
class _Draft:
    """A stage while operations are being added to it."""

    dims: Dims
    convolution: Convolution[int] | None = None
    pointwise: list[Pointwise[int]] = field(default_factory=list)
    results: set[int] = field(default_factory=set)
    numbers: list[int] = field(default_factory=list)
    """The operations' numbers in the graph."""

    def admits(self, operation: Node, dims: Dims) -> bool:
        """Whether an operation can run box by box together with the stage's other operations."""
        if dims != self.dims:
            return False
        if isinstance(operation, Pointwise):
            return True
        # A convolution reads beyond the box, so its inputs must be complete before the stage begins.
        return self.convolution is None and self.results.isdisjoint(operation.reads)

    def add(self, number: int, operation: Node) -> None:
        self.numbers.append(number)
        if isinstance(operation, Pointwise):
            self.pointwise.append(operation)
        else:
            assert isinstance(operation, Convolution)
            self.convolution = operation
        self.results.update(operation.writes)


class _Compiler:
    def __init__(self, graph: OperationGraph, on_progress: Callable[[], None]) -> None:
        self._graph = graph
        self._on_progress = on_progress
        self._readers: dict[int, list[Node]] = {}
        for operation in graph.operations:
            for uid in operation.reads:
                self._readers.setdefault(uid, []).append(operation)
        places = {uid: place for place, uid in enumerate(graph.bound)}
        self._views = {
            operation.y: View(number, places[operation.x], self._dims(operation.y))
            for number, operation in enumerate(graph.operations)
            if isinstance(operation, Reshape)
        }
        self._drafts = self._cut()
        self._intermediates = self._crossing_tensors()
        order = (*self._intermediates, *graph.bound, *graph.scalars, *self._views)
        self._index = {uid: index for index, uid in enumerate(order)}

    def plan(self, limit: int | None) -> CpuPlan:
        shared = footprint(*map(self._dims, self._intermediates))
        stages, needs = [], [shared]
        for draft in self._drafts:
            stage = self._stage(draft)
            kept = stage.kept_footprint()
            room = max(TILE_BYTES, stage.narrow_footprint())
            if limit is not None:
                room = min(room, limit - shared - kept)
            tile = largest_tile(stage.grid, stage.tile_footprint, room)
            stages.append((stage, tile))
            needs.append(shared + kept + stage.tile_footprint(tile))
        workspace = max(needs)
        if limit is not None and workspace > limit:
            _, most = max(zip(needs[1:], self._drafts, strict=True), key=lambda each: each[0])
            numbers = most.numbers
            raise OutOfMemory(requested=workspace, in_use=0, limit=limit, workspace=True, operations=numbers)
        return CpuPlan(
            tag=tag_of("cpu", self._graph, "exact"),
            workspace=workspace,
            stages=tuple(stages),
            operations=tuple(tuple(draft.numbers) for draft in self._drafts),
            intermediates=tuple(map(self._dims, self._intermediates)),
            buffers=len(self._graph.bound),
            scalars=len(self._graph.scalars),
            views=tuple(self._views.values()),
        )

    def _cut(self) -> list[_Draft]:
        """Group consecutive operations that can run box by box together."""
        drafts: list[_Draft] = []
        for number, operation in enumerate(self._graph.operations):
            if operation.writes[0] in self._views:
                continue
            dims = self._dims(operation.writes[0])
            if not drafts or not drafts[-1].admits(operation, dims):
                drafts.append(_Draft(dims))
            drafts[-1].add(number, operation)
        return drafts

    def _crossing_tensors(self) -> tuple[int, ...]:
        """Virtual tensors that one stage writes and another reads. They need memory for the whole tensor."""
        home = {uid: draft for draft in self._drafts for uid in draft.results}
        crossing: dict[int, None] = {}
        for draft in self._drafts:
            for operation in (*draft.pointwise, *([draft.convolution] if draft.convolution else ())):
                for uid in operation.reads:
                    virtual = self._graph.tensor(uid).role is TensorRole.VIRTUAL
                    if virtual and uid not in self._views and home[uid] is not draft:
                        crossing[uid] = None
        return tuple(crossing)

    def _stage(self, draft: _Draft) -> Stage:
        last = {uid: operation for operation in draft.pointwise for uid in operation.reads}
        mapped = []
        for operation in draft.pointwise:
            mapped.append(self._map(operation, last))
            self._on_progress()
        convolved = None
        if draft.convolution is not None:
            (uid,) = draft.convolution.writes
            exact = self._graph.tensor(uid).dtype is DType.INT32  # of sums that `check_graph` bounds
            read_as = None if exact else self._read_as(uid)
            convolved = Convolved(self._kernel(draft.convolution), uid, self._target(uid), read_as)
        return Stage(draft.dims, convolved, tuple(mapped))

    def _map(self, operation: Pointwise[int], last: Mapping[int, Node]) -> Mapped:
        """`last`: what reads each tensor last in the stage."""
        operands = tuple(self._operand(uid, last[uid] is operation) for uid in operation.operands)
        dims, parameter = self._dims(operation.result), operation.effective_parameters.get("parameter")
        elementwise = Elementwise(operation.mode, parameter, operands, dims)
        uid = operation.result
        return Mapped(elementwise, uid, self._target(uid), self._read_as(uid))

    def _operand(self, uid: int, last: bool) -> Operand:
        if uid in self._index:
            return Loaded(self._index[uid], self._dims(uid))
        return Passed(uid, last=last)

    def _target(self, uid: int) -> Target | None:
        if uid not in self._index:
            return None
        tensor = self._graph.tensor(uid)
        # What is between stages has been rounded already, and is kept in float64.
        dtype = tensor.dtype if tensor.role is TensorRole.BOUND else DType.FLOAT64
        return Target(self._index[uid], rounding_to(dtype.numpy))

    def _read_as(self, uid: int) -> DType | None:
        """The type that a result is rounded to before it is read; None if that changes nothing."""
        dtype = self._graph.tensor(uid).dtype
        if dtype is DType.FLOAT64 or all(
            self._rounds_alike(reader, dtype) for reader in self._readers.get(uid, ())
        ):
            return None
        return dtype

    def _rounds_alike(self, reader: Node, dtype: DType) -> bool:
        """Whether rounding to `dtype` after an operation gives the same as before it."""
        if not isinstance(reader, Pointwise) or reader.mode is not PointwiseMode.RELU:
            return False
        return self._graph.tensor(reader.result).dtype is dtype

    def _kernel(self, operation: Convolution[int]) -> Kernel:
        first, second = (self._index[uid] for uid in operation.reads)
        kernel = _KERNELS[type(operation)]
        x, w, y = map(self._dims, operation.of_shape)
        return kernel(ConvGeometry(x, w, y, operation.conv), first, second)

    def _dims(self, uid: int) -> Dims:
        return self._graph.tensor(uid).dims
