"""Reductions, arg-reductions, running sums and products on CUDA: cuDNN's sums, and kernels of our own.

cuDNN's graphs have reductions of matrices, over rows, columns or all, to float32
(9.19, sm_90). It is not documented whether its largest and smallest propagate NaN,
so only its sum is used. Our kernels take every mode, dtype, stride and axis: sums
are float32 (float64 of float64, int64 of integers). A few long lines are first cut
into parts, which a second kernel combines. The order of additions is fixed.
https://docs.nvidia.com/deeplearning/cudnn/frontend/latest/operations/Reduction.html
"""

from __future__ import annotations

from collections.abc import Sequence

from cudnn_actor.engines.cuda.cudnn.frontend_graph import FrontendGraph, Refused
from cudnn_actor.engines.cuda.kernels.accumulators import Accumulator, accumulator_of, accumulator_of_place
from cudnn_actor.engines.cuda.kernels.element_types import C_TYPES
from cudnn_actor.engines.cuda.kernels.kernel import Launch, Pointer, arguments_of
from cudnn_actor.engines.cuda.kernels.lines import (
    Form,
    Lines,
    beginning,
    lines_of,
    stored_value,
    value_of,
)
from cudnn_actor.engines.cuda.kernels.reduction_code import (
    COMBINING,
    ELEMENT_PRODUCT,
    ELEMENT_SUM,
    combined_parts,
    part_of_line,
    stored_part,
)
from cudnn_actor.engines.cuda.library.libraries import libraries
from cudnn_actor.engines.cuda.operations.implementation import implement, kernels
from cudnn_actor.protocol.operations import ArgReduction, Cumulative, GraphTensor, Reduction, ReductionMode
from cudnn_actor.protocol.types.dtypes import DType

__all__ = [
    "cumulative_launches",
    "lower_reduction",
    "matrix_of",
    "reduction_launches",
    "reduction_lines",
    "reduction_workspace",
]

AnyReduction = Reduction[int] | ArgReduction[int]
_Mode = ReductionMode

_MANY_LINES, _SHORT = 4096, 64
"""Of lines that lie side by side, a thread scans one alone if there are at least `_MANY_LINES`, or if they
are at most `_SHORT` long."""


# cuDNN's.


def lower_reduction(graph: FrontendGraph, operation: Reduction[int]) -> None:
    """Add a sum to a graph of cuDNN's frontend. Raises `Refused`."""
    x, y = graph.spec(operation.x), graph.spec(operation.y)
    if operation.mode is not _Mode.SUM:
        raise Refused(f"cuDNN is not used for {operation.mode}: it lacks it, or may lose NaN")
    if y.dtype is not DType.FLOAT32:
        raise Refused("cuDNN's sums are float32")
    lines = reduction_lines(operation, (x, y))
    shapes = matrix_of(lines)
    if shapes is None:
        raise Refused("cuDNN sums rows, columns or all of a packed matrix")
    found = graph.pygraph.reduction(
        input=graph.tensor(operation.x, *shapes[0]),
        mode=libraries().cudnn.reduction_mode.ADD,
        compute_data_type=graph.compute(operation),
    )
    graph.write(operation.y, found, *shapes[1])


Shape = tuple[list[int], list[int]]


def matrix_of(lines: Lines) -> tuple[Shape, Shape] | None:
    """Dims and strides of x and y as cuDNN takes them: samples of channels, in NHWC."""
    match lines.across, lines.along:
        case (), ((length, (1, _)),) if length:
            sizes = (1, length), (1, 1)
        case ((count, (step, 1)),), ((length, (1, _)),) if step == length:
            sizes = (count, length), (count, 1)
        case ((count, (1, 1)),), ((length, (step, _)),) if step == count:
            sizes = (length, count), (1, count)
        case _:
            return None
    x, y = (([n, c, 1, 1], [c, 1, c, c]) for n, c in sizes)
    return x, y


# Our own.


def reduction_launches(operation: AnyReduction, tensors: Sequence[GraphTensor]) -> list[Launch]:
    """The launches of a reduction: one that reduces lines, and one that combines their parts if they are cut.

    There are none if there are no lines.
    """
    lines = reduction_lines(operation, tensors)
    if not lines.total:
        return []
    parts = lines.parts()
    chunk = -(-lines.packs // parts)
    reduce, finish = _sources(operation, tensors, lines, cut=parts > 1)
    x, y, workspace = map(Pointer, range(3))
    if parts == 1:
        return [Launch("reduce", reduce, *lines.threads(), (x, y, *lines.numbers.values(), chunk))]
    combining = lines._replace(form=Form.WARP).threads()
    return [
        Launch("reduce", reduce, *lines.threads(parts), (x, workspace, *lines.numbers.values(), chunk)),
        Launch("finish", finish, *combining, (workspace, y, *lines.numbers.values(), parts)),
    ]


def reduction_workspace(operation: AnyReduction, tensors: Sequence[GraphTensor]) -> int:
    """Bytes for the parts of lines; 0 if lines are not cut."""
    lines = reduction_lines(operation, tensors)
    parts = lines.parts()
    dtype = tensors[0].dtype
    return lines.total * parts * _accumulator(operation, dtype).nbytes(dtype) if parts > 1 else 0


def _sources(
    operation: AnyReduction, tensors: Sequence[GraphTensor], lines: Lines, *, cut: bool
) -> tuple[str, str]:
    """The kernels in CUDA C++: one that reduces lines, or parts of them, and one that combines parts."""
    x, y = tensors
    accumulator = _accumulator(operation, x.dtype)
    start = beginning(x.dtype, wide=lines.wide) + accumulator.struct + COMBINING
    exact = isinstance(operation, ArgReduction) or not x.dtype.is_floating
    stored = f"y[y_base] = {stored_value(y, accumulator.result.format(state='state'), exact=exact)};"
    from_x, to_y = f"const {C_TYPES[x.dtype]}* x", f"{C_TYPES[y.dtype]}* y"
    body = _REDUCE.format(
        base=lines.base({"x": 0, "y": 1}),
        part=part_of_line("chunk", lines.vector),
        at=lines.at({"x": 0}),
        element=C_TYPES[x.dtype],
        vector=lines.vector,
        value=value_of(x, "pack.of[v]"),
        form=lines.form.value,
        result=f"{stored_part('line')} = state;" if cut else stored,
    )
    reduce = lines.kernel("reduce", f"{from_x}, {'State* parts' if cut else to_y}", body, ", long long chunk")
    body = _FINISH.format(
        base=lines.base({"y": 1}), combine=combined_parts("const State state", "line", "count"), result=stored
    )
    finish = lines._replace(form=Form.WARP).kernel(
        "finish", f"const State* parts, {to_y}", body, ", long long count"
    )
    return start + reduce, start + finish


def _accumulator(operation: AnyReduction, dtype: DType) -> Accumulator:
    """The accumulator of a reduction, of elements of this dtype."""
    if isinstance(operation, ArgReduction):
        return accumulator_of_place(operation.mode)
    return accumulator_of(operation.mode, dtype)


def reduction_lines(operation: AnyReduction, tensors: Sequence[GraphTensor]) -> Lines:
    """The lines of x that a reduction, or a sum along an axis, takes to y."""
    x, y = tensors
    rank = len(x.dims)
    axes = operation.reduced_dims(rank) if isinstance(operation, Reduction) else (operation.axis % rank,)
    steps = iter(y.strides)
    of_y = []
    for axis in range(rank):
        if axis not in axes:
            of_y.append(next(steps))
        else:
            of_y.append(0)
            if operation.keep_dims:
                next(steps)
    return lines_of(x.dims, (x.strides, of_y), axes, (x.dtype, y.dtype), vectors=(0,))


_REDUCE = """{base}
        {part}
        State state = State::none();
        for (I p = begin + lane; p < end; p += lanes) {{
            const I j = p * {vector};
            {at}
            const Pack<{element}, {vector}> pack = *(const Pack<{element}, {vector}>*)(x + x_at);
            #pragma unroll
            for (int v = 0; v < {vector}; ++v) state.take({value}, j + v);
        }}
        state = over_{form}(state);
        if (there && lane == 0) {{ {result} }}"""
_FINISH = """{base}
        {combine}
        if (lane == 0) {{ {result} }}"""


# Running sums and products. Two elements become one by a `Join`, as in reductions. The order differs from
# reductions: each element has a result, so lanes and warps combine only the elements before them.


def cumulative_launches(operation: Cumulative[int], tensors: Sequence[GraphTensor]) -> list[Launch]:
    """The launch of a running sum or product; none if there are no elements."""
    lines = _scan_lines(operation, tensors)
    if not lines.total * lines.length:
        return []
    launched = lines._replace(along=()) if lines.form is Form.COLUMN else lines
    arguments = arguments_of(2, *lines.numbers.values())
    return [Launch("scan", _scan_source(operation, tensors, lines), *launched.threads(), arguments)]


def _scan_source(operation: Cumulative[int], tensors: Sequence[GraphTensor], lines: Lines) -> str:
    """The kernel in CUDA C++."""
    x, y = tensors
    value = stored_value(y, "{}", exact=not x.dtype.is_floating)
    join = ELEMENT_SUM if operation.mode is _Mode.SUM else ELEMENT_PRODUCT
    before = "true" if operation.exclusive else "false"
    body = (_SCAN_ALONE if lines.form is Form.COLUMN else _SCAN).format(
        base=lines.base({"x": 0, "y": 1}),
        at=lines.at({"x": 0, "y": 1}),
        value=value_of(x, "x[x_at]"),
        number="(I)length - 1 - n" if operation.reverse else "n",
        none=join.none,
        with_earlier=join.of("earlier", "upto"),
        with_warp=join.of("carry", "totals[other]"),
        with_until=join.of("until", f"{before} ? before : upto"),
        with_element=join.of("upto", value_of(x, "x[x_at]")),
        before=before,
        stored=value.format("result"),
    )
    pointers = f"const {C_TYPES[x.dtype]}* x, {C_TYPES[y.dtype]}* y"
    return beginning(x.dtype, wide=lines.wide) + lines.kernel("scan", pointers, body)


def _scan_lines(operation: Cumulative[int], tensors: Sequence[GraphTensor]) -> Lines:
    """The lines. Their form says if a block has each, or, of lines side by side, a thread (`COLUMN`)."""
    x, y = tensors
    axis = operation.axis % len(x.dims)
    lines = lines_of(x.dims, (x.strides, y.strides), (axis,), (x.dtype, y.dtype), vectors=())
    alone = lines.form is Form.COLUMN and (lines.total >= _MANY_LINES or lines.length <= _SHORT)
    return lines._replace(form=Form.COLUMN if alone else Form.BLOCK)


_SCAN = """{base}
        __shared__ T totals[32];
        const int warp = threadIdx.x / 32, warps = blockDim.x / 32;
        T carry = {none};
        for (I start = 0; start < (I)length; start += blockDim.x) {{
            const I n = start + threadIdx.x, j = {number};
            T upto = {none};
            {at}
            if (n < (I)length) upto = {value};
            #pragma unroll
            for (int apart = 1; apart < 32; apart *= 2) {{
                const T earlier = __shfl_up_sync(~0u, upto, apart);
                if (lane % 32 >= apart) upto = {with_earlier};
            }}
            T before = __shfl_up_sync(~0u, upto, 1);
            if (lane % 32 == 0) before = {none};
            if (lane % 32 == 31) totals[warp] = upto;
            __syncthreads();
            T until = carry;
            for (int other = 0; other < warps; ++other) {{
                if (other == warp) until = carry;
                carry = {with_warp};
            }}
            const T result = {with_until};
            if (n < (I)length) y[y_at] = {stored};
            __syncthreads();
        }}"""
_SCAN_ALONE = """if (!there || lane) continue;
        {base}
        T upto = {none};
        for (I n = 0; n < (I)length; ++n) {{
            const I j = {number};
            {at}
            const T before = upto;
            upto = {with_element};
            const T result = {before} ? before : upto;
            y[y_at] = {stored};
        }}"""


_KERNELS = kernels(reduction_launches, reduction_workspace)
implement(Reduction, lower=lower_reduction, launchers=_KERNELS)
implement(ArgReduction, launchers=_KERNELS)
implement(Cumulative, launchers=kernels(cumulative_launches))
