"""Runs a graph in several steps where cuDNN does not accept it as a whole.

Each operation but the pointwise ones runs alone, if necessary on packed or wider
copies of its operands. Pointwise operations become one kernel for all results of
the same dims, at first with gathers and the like before them. All data stays on
the device.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from cudnn_actor.engines.base import EngineFailure
from cudnn_actor.engines.cuda.cudnn.frontend_graph import Refused
from cudnn_actor.engines.cuda.kernels.elementwise import Elementwise, describe_elementwise, elementwise
from cudnn_actor.engines.cuda.kernels.expressions import Result
from cudnn_actor.engines.cuda.kernels.joined_kernels import Joined, shared_launches
from cudnn_actor.engines.cuda.operations import IMPLEMENTATIONS, Launcher
from cudnn_actor.engines.cuda.planning.bodies import Body, broadcast
from cudnn_actor.engines.cuda.planning.candidates import (
    OnRefusal,
    build_candidate,
    candidates,
    computed_first,
    ignore_refusal,
    takes_bytes,
)
from cudnn_actor.engines.cuda.planning.copy_kernels import copy_kernel, copy_kernel_by_elements, rows_of_parts
from cudnn_actor.engines.cuda.planning.indexed_reads import is_indexed_read
from cudnn_actor.engines.cuda.planning.recurrent_layers import replace_layers
from cudnn_actor.engines.cuda.planning.recurrent_passes import passes
from cudnn_actor.engines.cuda.planning.steps import bound_sources, finish, graph_step, source_behind
from cudnn_actor.engines.cuda.running.plan import CudaPlan
from cudnn_actor.engines.cuda.running.recipe import (
    KernelStep,
    OperationStep,
    Scratch,
    Source,
    Step,
    align,
)
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.operations import (
    Concat,
    Convolution,
    GraphTensor,
    Movement,
    Node,
    Operation,
    Placed,
    Pointwise,
    PointwiseMode,
    TensorRole,
)
from cudnn_actor.protocol.types.dtypes import DType
from cudnn_actor.protocol.types.tensor import Layout, TensorSpec, packed_strides

__all__ = ["MOST_FORMS", "compile_split", "is_elementwise", "ways"]

MOST_FORMS = 9
"""The most forms (layouts and dtypes) that `_forms` yields for a convolution's tensors."""


def ways(graph: OperationGraph) -> int:
    """The number of choices of a graph without convolutions: its operation with the most ways decides."""
    others = [operation for operation in graph.operations if not isinstance(operation, Pointwise)]
    most = max((IMPLEMENTATIONS[type(operation)].ways for operation in others), default=1) or 1
    return most + any(_is_fused(graph, operation) for operation in others)


def is_elementwise(graph: OperationGraph) -> bool:
    """Whether a graph is one kernel: pointwise operations, perhaps with gathers and the like before them."""
    return all(isinstance(each, Pointwise) or _is_fused(graph, each) for each in graph.operations)


def compile_split(
    graph: OperationGraph,
    handle: Any,
    limit: int | None,
    form: int = 0,
    choice: int = 0,
    *,
    on_refusal: OnRefusal = ignore_refusal,
    precompiled: bool = False,
    in_passes: bool = False,
) -> CudaPlan:
    """Compile a graph in steps: each operation alone, and a kernel for pointwise results of the same dims.

    `form` is the index of the form of the convolutions' tensors (see `_forms`). `choice` is the index of a
    convolution's candidate among those that can be built, and of the way to run another operation; if that
    has fewer ways, its last one is taken. Calls `on_refusal` for each candidate that cannot be built.
    `precompiled`: see `build_candidate`. `in_passes`: whether each recurrent operation is a step of its own.

    Raises `Refused` if there is no such form or candidate.
    """
    splitter = _Splitter(graph, handle, limit, form, choice, on_refusal=on_refusal, precompiled=precompiled)
    return splitter.plan(passes(graph) if in_passes else replace_layers(graph))


def _is_fused(graph: OperationGraph, operation: Node) -> bool:
    """Whether an operation is computed in one kernel with pointwise ones behind it: see `partition`."""
    x, y = graph.tensor(operation.reads[0]), graph.tensor(operation.writes[0])
    return len(graph.operations) > 1 and is_indexed_read(operation, x, y)


class _Splitter:
    """Splits one graph into steps."""

    def __init__(
        self,
        graph: OperationGraph,
        handle: Any,
        limit: int | None,
        form: int,
        choice: int,
        *,
        on_refusal: OnRefusal,
        precompiled: bool,
    ) -> None:
        self._graph = graph
        self._handle = handle
        self._limit = limit
        self._form = form
        self._choice = choice
        self._on_refusal = on_refusal
        self._precompiled = precompiled
        self._sources = bound_sources(graph)
        self._of_graph = frozenset(tensor.uid for tensor in graph.tensors)
        self._forms = {tensor.uid: tensor for tensor in graph.tensors}
        """Each tensor as it is stored at its place in `_sources`."""
        self._waiting: dict[int, Node] = {}
        """Pointwise operations, and gathers and the like, that are in no step yet, by their results."""
        self._steps: list[Step] = []
        self._graphs: list[Any] = []
        self._scratch = 0
        self._workspaces: dict[int, Scratch] = {}

    def plan(self, operations: Sequence[Node]) -> CudaPlan:
        """The plan that runs these operations, which may have operands that the graph does not have."""
        for uid in {uid for each in operations for uid in (*each.reads, *each.writes)} - self._forms.keys():
            self._forms[uid], self._sources[uid] = _opaque(uid, 0), Scratch(0, 0)  # see `_make_room`
        for operation in operations:
            if isinstance(operation, Pointwise):
                self._waiting[operation.result] = operation
                continue
            self._compute([uid for uid in operation.reads if uid in self._waiting])
            is_of_graph = self._of_graph.issuperset(operation.writes)
            if not self._choice and is_of_graph and _is_fused(self._graph, operation):
                self._waiting[operation.writes[0]] = operation
            else:
                self._add(operation)
        bound = (uid for uid in self._waiting if self._graph.tensor(uid).role is TensorRole.BOUND)
        self._compute(list(bound))
        return finish(self._graph, self._steps, self._graphs, self._scratch, self._limit)

    def _add(self, operation: Node) -> None:
        """Add the steps of an operation that is not pointwise. Raises `Refused`."""
        if isinstance(operation, Convolution):
            self._convolve(operation)
        elif isinstance(operation, Concat):
            self._concatenate(operation)
        elif isinstance(operation, Movement) and not IMPLEMENTATIONS[type(operation)].ways:
            self._move(operation)
        else:
            self._run_operation(operation)

    # Convolutions.

    def _convolve(self, operation: Convolution[int]) -> None:
        """Add a convolution on tensors of the wanted form, copied where they differ. Raises `Refused`."""
        tensors = [self._forms[uid] for _, uid in operation.named()]
        forms = next(itertools.islice(_forms(tensors), self._form, None), None)
        if forms is None:
            raise Refused("there is no other form for its tensors")
        alone, lowered = self._build_convolution(operation, tensors, forms)
        *inputs, (result, form) = zip(tensors, forms, strict=True)
        sources = {number: self._source_in_form(*pair) for number, pair in enumerate(inputs)}
        place = self._sources.get(result.uid)
        target = place if place is not None and _serves(result, form) else self._take(form)
        self._steps.append(graph_step(alone, lowered, {**sources, len(inputs): target}))
        self._graphs.append(lowered)
        if place is None:
            self._sources[result.uid], self._forms[result.uid] = target, form
        elif place != target:
            self._copy(form, target, result, place)

    def _build_convolution(
        self, operation: Convolution[int], tensors: Sequence[GraphTensor], forms: Sequence[GraphTensor]
    ) -> tuple[OperationGraph, Any]:
        """A convolution of those forms as its own graph, and cuDNN's built graph. Raises `Refused`.

        Each operand is a tensor of its own there, with its number as uid: see `check_whole`.
        """
        # Values of half types and bytes are exact in float32, and in TF32, with ten bits and float32's range.
        numerics = self._graph.numerics
        if tensors[0].dtype is not forms[0].dtype:
            numerics = msgspec.structs.replace(numerics, tf32=True)
        numbers = {name: number for number, (name, _) in enumerate(operation.named())}
        alone = OperationGraph(
            tensors=tuple(
                msgspec.structs.replace(form, uid=number, overwrites=None)
                for number, form in enumerate(forms)
            ),
            operations=(operation.with_operands(numbers.__getitem__),),
            numerics=numerics,
        )
        return alone, self._candidate(alone, self._choice)

    def _candidate(self, alone: OperationGraph, choice: int) -> Any:
        """cuDNN's graph, built with number `choice` of the candidates that can be. Raises `Refused`."""
        lowered = candidates(alone, self._handle, self._limit, fallbacks=not self._precompiled)
        left = choice
        for index in range(lowered.get_execution_plan_count()):
            try:
                build_candidate(alone, lowered, index, precompiled=self._precompiled)
            except Refused as refusal:
                self._on_refusal(str(refusal))
                continue
            if not left:
                return lowered
            left -= 1
        raise Refused(f"cuDNN has no candidate {choice} for {alone.operations[0].kind}")

    def _source_in_form(self, tensor: GraphTensor, form: GraphTensor) -> Source:
        """The source of an input in the wanted form: its own, or that of a copy, whose step is added."""
        if _serves(tensor, form):
            return self._sources[tensor.uid]
        copy = self._take(form)
        self._copy(tensor, self._sources[tensor.uid], form, copy)
        return copy

    # Other operations.

    def _run_operation(self, operation: Node) -> None:
        """Add the steps that run an operation, in the chosen way. Raises `Refused`."""
        implementation = IMPLEMENTATIONS[type(operation)]
        for uid in operation.writes:
            if uid not in self._sources:
                self._sources[uid] = self._reserve(self._forms[uid].spec.nbytes)
        run: list[Callable[[Node], None]] = []
        if implementation.lower is not None:
            run += [partial(self._by_graph, packed=packed) for packed in (False, True)]
        tensors = [self._forms[uid] for uid in (*operation.reads, *operation.writes)]
        launchers = implementation.launchers_in_order(operation, tensors)
        run += [partial(self._by_step, launcher=name) for name in launchers]
        run[min(self._choice, len(run) - 1)](operation)

    def _by_graph(self, operation: Node, *, packed: bool) -> None:
        """Add an operation as a graph of cuDNN's of its own."""
        computed = computed_first(self._graph, operation)
        with self._operands_in_form(operation, packed=packed) as placed:
            # Each operand is a tensor of its own here, even if two are one in the graph: see `check_whole`.
            names = (*placed, *(name for name in computed if name not in placed))
            numbers = {name: number for number, name in enumerate(names)}
            operands = dict(placed)
            for name, wanted in computed.items():
                spec = TensorSpec.packed(wanted.dims, wanted.dtype)
                form = GraphTensor(uid=-1, dims=spec.dims, strides=spec.strides, dtype=spec.dtype)
                operands[name] = form, self._take(form)
                if isinstance(wanted.value, Operation):
                    self._steps.append(_generating_step(wanted.value, {**placed, "y": operands[name]}))
                    continue
                strides = [spec.strides, *(placed[read][0].strides for read in wanted.operands)]
                kernel = elementwise(wanted.value, wanted.dtype, wanted.dims, strides)
                places = (operands[name][1], *(placed[read][1] for read in wanted.operands))
                self._steps.append(KernelStep(kernel, places))
            changes = {name: numbers[name] for name in computed}
            alone = OperationGraph(
                tensors=tuple(
                    msgspec.structs.replace(_as_bound(form), uid=numbers[name], overwrites=None)
                    for name, (form, _) in operands.items()
                ),
                operations=(
                    msgspec.structs.replace(operation.with_operands(numbers.__getitem__), **changes),
                ),
                numerics=self._graph.numerics,
            )
            lowered = self._candidate(alone, 0)
            sources = {numbers[name]: source for name, (_, source) in operands.items()}
            self._steps.append(graph_step(alone, lowered, sources))
            self._graphs.append(lowered)

    def _by_step(self, operation: Node, *, launcher: str) -> None:
        """Add an operation as a step of its own."""
        found = IMPLEMENTATIONS[type(operation)].launchers[launcher]
        with self._operands_in_form(operation, packed=found.packed) as placed:
            numbers = {name: number for number, name in enumerate(placed)}
            alone = msgspec.structs.replace(
                operation.with_operands(numbers.__getitem__), numerics=self._graph.numerics
            )
            try:
                nbytes = self._make_room(found, alone, placed)
                tensors = tuple(form for form, _ in placed.values())
                found.make(alone, tensors, self._handle)
            except EngineFailure as failure:
                raise Refused(str(failure)) from failure
            step = OperationStep(
                operation=alone,
                tensors=tensors,
                sources=(*(source for _, source in placed.values()), *self._workspace(nbytes)),
                launcher=launcher,
            )
            self._steps.append(step)

    def _make_room(
        self, launcher: Launcher, alone: Node, placed: dict[str, tuple[GraphTensor, Source]]
    ) -> int:
        """Returns the bytes of a step's workspace.

        Places the operands that only a library understands in memory that it reserves for them.
        """
        tensors = [form for form, _ in placed.values()]
        if launcher.asked is None:
            return 0 if launcher.workspace is None else launcher.workspace(alone, tensors)
        asked = launcher.asked(alone, tensors, self._handle)
        for name, nbytes in asked.held.items():
            uid = placed[name][0].uid
            self._sources[uid] = self._reserve(nbytes)
            self._forms[uid] = _opaque(uid, nbytes)
            placed[name] = self._forms[uid], self._sources[uid]
        return asked.workspace

    def _workspace(self, nbytes: int) -> tuple[Scratch, ...]:
        """The workspace of a step, if it needs any. Steps that need the same number of bytes share one."""
        if nbytes and nbytes not in self._workspaces:
            self._workspaces[nbytes] = self._reserve(nbytes)
        return (self._workspaces[nbytes],) if nbytes else ()

    @contextlib.contextmanager
    def _operands_in_form(
        self, operation: Node, *, packed: bool
    ) -> Iterator[dict[str, tuple[GraphTensor, Source]]]:
        """An operation's operands by name, each in the wanted form and with its source.

        If they must be packed, the steps that copy inputs are added before the `with` block, and those that
        copy results behind it.
        """
        placed: dict[str, tuple[GraphTensor, Source]] = {}
        written = frozenset(operation.writes)
        for name, uid in operation.named():
            tensor = self._forms[uid]
            form = _packed_in(tensor, Layout.NCHW) if packed else tensor
            copied = uid in written and not _serves(tensor, form)
            placed[name] = form, self._take(form) if copied else self._source_in_form(tensor, form)
        yield placed
        for name, uid in operation.named(operation.outputs):
            form, source = placed[name]
            if source != self._sources[uid]:
                self._copy(form, source, self._forms[uid], self._sources[uid])

    def _move(self, operation: Movement[int]) -> None:
        """Add the step that moves elements: a copy of the operand, seen as the result.

        A result that is not bound needs no step if it can be seen in the operand's memory.
        """
        tensor, result = self._forms[operation.x], self._graph.tensor(operation.y)
        source = self._sources[operation.x]
        placed = operation.view(tensor.dims, tensor.strides)
        if result.role is TensorRole.VIRTUAL and placed is not None:
            seen, self._sources[result.uid] = _part_of(tensor, source, result.dims, placed)
            self._forms[result.uid] = msgspec.structs.replace(seen, uid=result.uid)
            return
        if placed is None:  # a reshape: packed, its elements lie as the result's
            packed = _packed_in(tensor, Layout.NCHW)
            if result.strides == packed_strides(result.dims):  # so it is the operand, packed
                packed = msgspec.structs.replace(packed, dtype=result.dtype)
                self._copy(tensor, source, packed, self._sources[result.uid])
                return
            tensor, source = packed, self._source_in_form(tensor, packed)
            placed = operation.view(tensor.dims, tensor.strides)
            assert placed is not None
        seen, start = _part_of(tensor, source, result.dims, placed)
        self._copy(seen, start, result, self._sources[result.uid])

    def _concatenate(self, operation: Concat[int]) -> None:
        """Add the steps that copy each operand to its part of the result: as few as possible."""
        result, target = self._graph.tensor(operation.y), self._sources[operation.y]
        tensors = [self._forms[uid] for uid in operation.operands]
        rows = rows_of_parts(operation, result, [tensor for tensor in tensors if 0 not in tensor.dims])
        if rows is not None:
            sources = (self._sources[tensor.uid] for tensor in tensors if 0 not in tensor.dims)
            self._steps.append(KernelStep(rows, (target, *sources)))
            return
        starts = operation.starts([tensor.dims for tensor in tensors])
        copies: list[tuple[Elementwise, tuple[Source, ...]]] = []
        for tensor, start in zip(tensors, starts, strict=True):
            placed = Placed(result.strides, start * result.strides[operation.axis])
            part, place = _part_of(result, target, tensor.dims, placed)
            kernel, places = copy_kernel_by_elements(tensor, part), (place, self._sources[tensor.uid])
            if isinstance(kernel, Elementwise):
                copies.append((kernel, places))
            else:
                self._steps.append(KernelStep(kernel, places))
        self._launch_together(copies)

    def _launch_together(self, copies: Sequence[tuple[Elementwise, tuple[Source, ...]]]) -> None:
        """Add the steps of kernels, each with its places, in as few launches as possible."""
        for numbers in shared_launches([kernel for kernel, _ in copies]) if copies else ():
            kernels, places = zip(*(copies[number] for number in numbers), strict=True)
            self._steps.append(KernelStep(Joined(kernels), tuple(itertools.chain(*places))))

    # Pointwise.

    def _compute(self, results: Sequence[int]) -> None:
        """Add the kernels of pointwise results that no step computes yet: one for all of the same dims."""
        by_dims: dict[tuple[int, ...], list[int]] = {}
        for uid in results:
            by_dims.setdefault(self._graph.tensor(uid).dims, []).append(uid)

        def overwrites(uids: list[int]) -> bool:
            return any(self._graph.tensor(uid).overwrites is not None for uid in uids)

        for dims, uids in sorted(by_dims.items(), key=lambda one: overwrites(one[1])):
            self._add_kernel(dims, uids)
            for uid in uids:
                del self._waiting[uid]

    def _add_kernel(self, dims: tuple[int, ...], uids: Sequence[int]) -> None:
        """Add the kernel that computes these results, of these dims."""
        operations = self._waiting_for(uids)
        stored = [self._graph.tensor(uid) for uid in uids]
        for tensor in stored:
            if tensor.uid not in self._sources:
                self._sources[tensor.uid] = self._take(tensor)
        copied = self._copied_tensor(operations, stored[0]) if len(stored) == 1 else None
        if copied is not None:
            (result,) = stored
            self._copy(copied, self._sources[copied.uid], result, self._sources[result.uid])
            return
        body = self._body(operations, dims)
        tensors = [*stored, *(tensor for tensor, _ in body.leaves)]
        kernel = describe_elementwise(
            [Result(value, tensor.dtype) for value, tensor in zip(body.of(uids), stored, strict=True)],
            body.nodes,
            dims,
            [*(tensor.strides for tensor in stored), *(steps for _, steps in body.leaves)],
            [tensor.alignment for tensor in tensors],
            tables=body.tables,
        )
        self._steps.append(KernelStep(kernel, tuple(self._sources[tensor.uid] for tensor in tensors)))

    def _body(self, operations: Sequence[Node], dims: tuple[int, ...]) -> Body:
        """The expressions of pointwise operations, and of gathers and the like."""
        body = Body(self._graph, operations, dims, form=self._forms.__getitem__)
        for operation in operations:
            if isinstance(operation, Pointwise):
                body.add(operation)
            else:
                body.read(operation)
        return body

    def _waiting_for(self, uids: Sequence[int]) -> list[Node]:
        """The waiting operations by which these results are computed, in order."""
        wanted, operations = set(uids), list[Node]()
        for uid, operation in reversed(self._waiting.items()):
            if uid in wanted:
                operations.append(operation)
                wanted.update(operation.reads)
        return operations[::-1]

    def _copied_tensor(self, operations: Sequence[Node], result: GraphTensor) -> GraphTensor | None:
        """The tensor that operations only broadcast or bring into another layout, with the result's dims.

        None if they do anything else.
        """
        uid, dtypes = result.uid, {result.dtype}
        for operation in reversed(operations):
            dtypes.add(self._graph.tensor(uid).dtype)
            of = self._copied_operand(operation)
            if of is None or operation.writes != (uid,):
                return None
            uid = of
        copied = self._forms.get(uid)
        if copied is None or copied.value is not None or copied.role is TensorRole.SCALAR:
            return None
        exact = {copied.dtype, DType.FLOAT32} if copied.dtype.is_half else {copied.dtype}
        if copied.dtype is not result.dtype or not dtypes <= exact or len(copied.dims) != len(result.dims):
            return None
        return msgspec.structs.replace(copied, dims=result.dims, strides=broadcast(copied, result.dims))

    def _copied_operand(self, operation: Node) -> int | None:
        """The operand whose elements are the operation's result: of an identity, or of a product with 1."""
        if not isinstance(operation, Pointwise):
            return None
        x, *others = operation.operands
        if operation.mode is PointwiseMode.MUL:
            one, boolean = self._graph.tensor(others[0]), self._graph.tensor(x).dtype is DType.BOOL
            return x if one.value == 1 and not boolean else None
        return x if operation.mode is PointwiseMode.IDENTITY else None

    def _copy(self, tensor: GraphTensor, source: Source, to: GraphTensor, target: Source) -> None:
        """Add the step that copies a tensor to another of the same dims."""
        self._steps.append(KernelStep(copy_kernel(tensor, to), (target, source)))

    def _take(self, tensor: GraphTensor) -> Scratch:
        """Reserve scratch memory for a tensor between steps."""
        return self._reserve(tensor.spec.nbytes)

    def _reserve(self, nbytes: int) -> Scratch:
        place = Scratch(self._scratch, nbytes)
        self._scratch += align(nbytes)
        return place


def _opaque(uid: int, nbytes: int) -> GraphTensor:
    """A tensor of bytes that only a library understands."""
    return GraphTensor(uid=uid, dims=(nbytes,), strides=(1,), dtype=DType.UINT8, role=TensorRole.VIRTUAL)


def _part_of(
    tensor: GraphTensor, source: Source, dims: tuple[int, ...], placed: Placed
) -> tuple[GraphTensor, Source]:
    """A part of a tensor, as a tensor of these dims, and its source."""
    start = placed.offset * tensor.dtype.itemsize
    part = msgspec.structs.replace(
        tensor, dims=dims, strides=placed.strides, alignment=math.gcd(tensor.alignment, start)
    )
    return part, source_behind(source, start)


def _generating_step(
    operation: Operation[str], placed: Mapping[str, tuple[GraphTensor, Source]]
) -> OperationStep:
    """The step of the kernel that computes an operand of another operation. `placed`: operands by name."""
    named = dict(operation.named())
    operands = [placed[name] for name in named.values()]
    return OperationStep(
        operation=operation.with_operands([*named].index),
        tensors=tuple(form for form, _ in operands),
        sources=tuple(source for _, source in operands),
        launcher="kernel",
    )


def _serves(tensor: GraphTensor, form: GraphTensor) -> bool:
    """Whether a tensor already has the wanted form."""
    same = (tensor.dims, tensor.strides, tensor.dtype) == (form.dims, form.strides, form.dtype)
    return same and tensor.alignment >= form.alignment


def _forms(tensors: Sequence[GraphTensor]) -> Iterator[list[GraphTensor]]:
    """Forms to try for a convolution's tensors, the result last.

    They come in this order: as they are; packed; packed with a wider result; packed with all tensors wider.
    """
    bound = [_as_bound(tensor) for tensor in tensors]
    narrow = tensors[0].dtype not in (DType.FLOAT32, DType.FLOAT64)
    wider = DType.FLOAT32 if tensors[0].dtype.is_floating else DType.INT32
    if takes_bytes(bound):
        yield bound
    for layout in (Layout.NHWC, Layout.NCHW) if narrow else (Layout.NCHW, Layout.NHWC):
        packed = [_packed_in(tensor, layout) for tensor in bound]
        if takes_bytes(packed):
            yield packed
            if packed[-1].dtype not in (wider, DType.FLOAT64):
                yield [*packed[:-1], _packed_in(packed[-1], layout, wider)]
    for dtype, layout in itertools.product(_wider(tensors) if narrow else (), (Layout.NCHW, Layout.NHWC)):
        yield [_packed_in(tensor, layout, dtype) for tensor in bound]


def _wider(tensors: Sequence[GraphTensor]) -> Sequence[DType]:
    """The dtypes in which half-type and byte operands, and sums of products of bytes, are exact."""
    largest = {DType.INT8: 128, DType.UINT8: 255}.get(tensors[0].dtype)
    if largest is None:
        return (DType.FLOAT32,)
    exact = math.prod(tensors[1].dims[1:]) * largest**2 < 1 << 24
    return (DType.FLOAT32, DType.FLOAT64) if exact else (DType.FLOAT64,)


def _as_bound(tensor: GraphTensor) -> GraphTensor:
    """A tensor as a bound tensor of a separate graph."""
    return msgspec.structs.replace(tensor, role=TensorRole.BOUND)


def _packed_in(tensor: GraphTensor, layout: Layout, dtype: DType | None = None) -> GraphTensor:
    """A tensor packed in a layout, perhaps of another dtype."""
    spec = TensorSpec.packed(tensor.dims, dtype or tensor.dtype, layout)
    return GraphTensor(
        uid=tensor.uid, dims=spec.dims, strides=spec.strides, dtype=spec.dtype, name=tensor.name
    )
