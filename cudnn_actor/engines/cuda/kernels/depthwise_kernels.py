"""The CUDA C++ of kernels for depthwise convolutions, and their launches. See `depthwise_geometry`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from cudnn_actor.engines.cuda.kernels.depthwise_geometry import MOST_THREADS, Geometry, Pass
from cudnn_actor.engines.cuda.kernels.element_types import C_TYPES, CONVERSIONS, PACK, load, store, value_type
from cudnn_actor.engines.cuda.kernels.expressions import Scalar, scalars_of
from cudnn_actor.engines.cuda.kernels.formulas import FORMULA_FUNCTIONS, formula, value_of_expression
from cudnn_actor.engines.cuda.kernels.index_code import (
    block_loop,
    division,
    index_type,
    is_wide,
    number_of,
    offset_of,
    split_all,
)
from cudnn_actor.engines.cuda.kernels.kernel import ROUNDING, THREADS, Argument, Launch, Pointer
from cudnn_actor.engines.cuda.kernels.reduction_code import in_turn
from cudnn_actor.protocol.graphs.step_kinds import StepKind

__all__ = ["Depthwise"]


class Depthwise(Geometry, frozen=True, tag="depthwise"):
    """A kernel as data; backward filter has two launches. Its result is leaf 0 of its body."""

    # `Kernel`. Its tensors are its operands, then its results, then its workspace if it needs any.

    title = StepKind.DEPTHWISE.step_name()
    is_empty = False

    @property
    def name(self) -> str:
        """See `Kernel.name`. It contains the tile, which tuning chooses."""
        return f"depthwise-{self.tile.vector}x{self.tile.columns}x{self.tile.rows}"

    def scalars(self) -> tuple[Scalar, ...]:
        """The plan's scalars that it takes."""
        return scalars_of(self.body)

    @property
    def reads(self) -> range:
        """See `Kernel.reads`."""
        return range(len(self.operands))

    def launches(self) -> tuple[Launch, ...]:
        """The only launch; for backward filter, one that computes parts of sums and one that adds them up."""
        if self.of is Pass.FILTER:
            return _parts_of_filter(self), _sums_of_filter(self)
        return (_gather_launch(self),)


def _gather_launch(kernel: Depthwise) -> Launch:
    """The launch of forward or backward data."""
    behind = _Behind(kernel, ("n", "first", "h0 + i", "w0 + j"), kernel.tile.vector)
    w = kernel.strides[1]
    own, given = kernel.groups_of_block, kernel.y if kernel.of is Pass.DATA else kernel.x
    down, across = (-(-all_ // some) for all_, some in zip(kernel.groups, own, strict=True))
    numbers = {
        "tiles": kernel.blocks,
        "down": down,
        "across": across,
        "rows_of_block": own[0],
        "columns_of_block": own[1],
        "channels": kernel.channels,
        "height": kernel.result_dims[2],
        "width": kernel.result_dims[3],
        "given_height": given[2],
        "given_width": given[3],
        "x_n": kernel.strides[0][0],
        "x_h": kernel.strides[0][2],
        "filters": kernel.w[0],
        "w_k": w[0],
        "w_r": w[2],
        "w_s": w[3],
        **behind.numbers,
    }
    body = "\n".join(_gather(kernel, behind))
    return _launch(kernel, body, "depthwise", kernel.grid, block=kernel.block, numbers=numbers)


def _launch(
    kernel: Depthwise,
    body: str,
    name: str,
    grid: tuple[int, ...],
    *,
    block: tuple[int, ...],
    numbers: Mapping[str, int],
    tensors: tuple[int, ...] | None = None,
    stores: bool = True,
) -> Launch:
    """A launch of a body. By default it takes all operands and results."""
    tensors = tuple(range(len(kernel.strides))) if tensors is None else tensors
    scalars = kernel.scalars() if stores else ()
    parameters = [*_pointers(kernel, tensors), *(f"long long {number}" for number in numbers)]
    parameters += [f"double scalar{one.number}" for one in scalars]
    element = kernel.operands[0]
    reading = _READING.format(element=C_TYPES[element], value=load(element, "bits"), times=_times(kernel))
    most = MOST_THREADS if len(block) > 1 else THREADS
    text = f"""typedef {index_type(wide=kernel.wide)} I;
{CONVERSIONS}{FORMULA_FUNCTIONS}{PACK}{reading}
extern "C" __global__ void __launch_bounds__({most}) {name}({", ".join(parameters)}) {{
{body}
}}
"""
    arguments: tuple[Argument, ...] = (*map(Pointer, tensors), *numbers.values(), *scalars)
    return Launch(name, text, grid, block, arguments, ROUNDING)


_READING = """
typedef {element} E;
__device__ __forceinline__ float value(E bits) {{ return {value}; }}
template <int N> __device__ __forceinline__ void read(float* to, const E* from) {{
    const Pack<E, N> pack = *(const Pack<E, N>*)from;
    #pragma unroll
    for (int v = 0; v < N; ++v) to[v] = value(pack.of[v]);
}}
template <int N> __device__ __forceinline__ void read_apart(float* to, const E* from) {{
    #pragma unroll
    for (int v = 0; v < N; ++v) to[v] = value(from[v * {times}]);
}}
template <int N> __device__ __forceinline__ void zero(float* to) {{
    #pragma unroll
    for (int v = 0; v < N; ++v) to[v] = 0;
}}
// Adds a product to each of `N` sums. `M` values are multiplied with `N` factors: `N / M` neighbouring sums
// have the same value.
template <int N, int M> __device__ __forceinline__ void add(float* sums, const float* x, const float* w) {{
    #pragma unroll
    for (int v = 0; v < N; ++v) sums[v] = fmaf(x[v * M / N], w[v], sums[v]);
}}
"""


def _pointers(kernel: Depthwise, tensors: Sequence[int]) -> list[str]:
    """The C parameters for some tensors."""
    count, every = len(kernel.operands), len(kernel.strides)
    return [
        "float* parts"
        if tensor == every
        else f"const {C_TYPES[kernel.dtypes[tensor]]}* in{tensor}"
        if tensor < count
        else f"{C_TYPES[kernel.dtypes[tensor]]}* out{tensor - count}"
        for tensor in tensors
    ]


def _values(kernel: Depthwise) -> int:
    """The number of values that a thread reads of the first operand at each place."""
    return kernel.tile.vector if kernel.of is Pass.DATA else kernel.channels_read


def _times(kernel: Depthwise) -> int:
    """The number of channels of the first operand that are added up for each channel of the result."""
    return kernel.multiplier if kernel.of is Pass.DATA else 1


def _gather(kernel: Depthwise, behind: _Behind) -> Iterator[str]:
    """The body of forward and backward data."""
    tile = kernel.tile
    yield _filter_in_shared(kernel)
    yield from behind.before()
    yield _tile_of_sums(kernel)
    yield from _sums_of_rows(kernel)
    yield f"""        #pragma unroll
        for (int i = 0; i < {tile.rows}; ++i)
            #pragma unroll
            for (int j = 0; j < {tile.columns}; ++j) {{
                if (h0 + i >= (I)height || w0 + j >= (I)width) continue;"""
    yield from behind.each("sums[i][j][v]")
    yield "            }\n    }"


def _filter_in_shared(kernel: Depthwise) -> str:
    """The statements that copy the filter of a block's channels to shared memory, as float32."""
    (packs, _), vector, (down, across) = kernel.block, kernel.tile.vector, kernel.lines
    times, taps = _times(kernel), down.taps * across.taps
    pack, own = f"Pack<float, {vector}>", packs * vector * times
    return f"""    __shared__ {pack} taps[{times * taps * (packs + 1)}];
    const int pack = threadIdx.x, group = threadIdx.y;
    for (int i = group * {packs} + pack; i < {own * taps}; i += {packs} * blockDim.y) {{
        int rest = i;
        {division("s", "rest", str(across.taps), kind="int")}
        {division("r", "rest", str(down.taps), kind="int")}
        const I k = (I)blockIdx.y * {own} + rest;
        {division("m", "rest", str(times), kind="int")}
        {division("v", "rest", str(vector), kind="int")}
        const I place = {offset_of("krs", ("(I)w_k", "(I)w_r", "(I)w_s"))};
        {pack}& to = taps[{number_of(("m", "r", "s", "rest"), (down.taps, across.taps, packs + 1))}];
        to.of[v] = k < (I)filters ? value(in1[place]) : 0;
    }}
    __syncthreads();
    const I first = ((I)blockIdx.y * {packs} + pack) * {vector};
    if (first >= (I)channels) return;"""


def _tile_of_sums(kernel: Depthwise) -> str:
    """The head of the C loop over tiles, and the statements that define where a thread's results are."""
    tile = kernel.tile
    divided = [line.stride if line.back else 1 for line in kernel.lines]
    multiplied = [1 if line.back else line.stride for line in kernel.lines]
    return f"""    {block_loop("tile", "tiles")} {{
        long long row_number = tile;
        {division("right", "row_number", "across")}
        I rest = (I)row_number, group_down = group;
        {split_all("rest", [("below", "(I)down"), ("n", "")])}
        {division("group_right", "group_down", "(I)columns_of_block")}
        const I h0 = (below * (I)rows_of_block + group_down) * {tile.rows};
        const I w0 = (right * (I)columns_of_block + group_right) * {tile.columns};
        if (h0 >= (I)height || w0 >= (I)width) continue;
        const I row = h0 * {multiplied[0]} / {divided[0]}, column = w0 * {multiplied[1]} / {divided[1]};
        const I start = n * (I)x_n + {_first_read(kernel)};
        float sums[{tile.rows}][{tile.columns}][{tile.vector}] = {{}};"""


def _sums_of_rows(kernel: Depthwise) -> Iterator[str]:
    """Yields the C loop over rows of the input: each is read once, and added to the sums it belongs to."""
    tile, (down, across), times = kernel.tile, kernel.lines, _times(kernel)
    offsets, rows = across.offsets(tile.columns), down.offsets(tile.rows)
    if not offsets or not rows:
        return
    yield f"""        const bool inside = {_inside(offsets)};
        #pragma unroll 1
        for (I d = {rows[0]}; d <= {rows[-1]}; d += {_step(rows)}) {{
            const I h = row + d;
            if (h < 0 || h >= (I)given_height) continue;"""
    if times > 1:
        yield f"            for (int m = 0; m < {times}; ++m) {{"
    place = f"start + h * (I)x_h + column * {_far(kernel.strides[0][3])}{' + m' if times > 1 else ''}"
    yield f"            const E* line = in0 + {place};"
    yield from _row(kernel, offsets)
    for n in range(tile.rows):
        yield from _products_of_row(kernel, n, offsets)
    yield "            }" + (" }" if times > 1 else "")


def _products_of_row(kernel: Depthwise, n: int, offsets: Sequence[int]) -> Iterator[str]:
    """Yields the statements that add a row's products to result row `n`, if it belongs to its sums."""
    (packs, _), tile, (down, across) = kernel.block, kernel.tile, kernel.lines
    pack = f"Pack<float, {tile.vector}>"
    which = f"{'m * ' + str(down.taps) + ' + ' if _times(kernel) > 1 else ''}(int)q / {down.dilation}"
    yield f"            {{ const I q = {_tap_row(kernel, n)};"
    yield f"            if (q >= 0 && q < {down.taps * down.dilation} && q % {down.dilation} == 0) {{"
    yield f"            const {pack}* tap = taps + ({which}) * {across.taps * (packs + 1)} + pack;"
    for s in range(across.taps):
        yield f"            {{ const {pack} w = tap[{s * (packs + 1)}];"
        for t in range(tile.columns):
            offset = across.offset(t, s)
            if offset is not None:
                yield f"            {_add(kernel)}(sums[{n}][{t}], x[{offsets.index(offset)}], w.of);"
        yield "            }"
    yield "            } }"


def _first_read(kernel: Depthwise) -> str:
    """The C expression of the first channel of the first operand that a thread reads."""
    return f"first * {kernel.multiplier}" if kernel.of is Pass.DATA else f"first / {kernel.multiplier}"


def _add(kernel: Depthwise) -> str:
    """The C function that adds products to a thread's sums."""
    return f"add<{kernel.tile.vector}, {_values(kernel)}>"


def _far(offset: int) -> str:
    """The C constant of a distance, of a type that holds it."""
    return f"{offset}ll" if is_wide(abs(offset)) else f"({offset})"


def _inside(offsets: Sequence[int]) -> str:
    """The C expression of whether all columns that a thread reads are inside the tensor."""
    return f"column + {_far(offsets[0])} >= 0 && column + {_far(offsets[-1])} < (I)given_width"


def _step(places: Sequence[int]) -> int:
    """The distance from each place to the next, if it is always the same; else 1."""
    steps = {after - before for before, after in itertools.pairwise(places)}
    return steps.pop() if len(steps) == 1 else 1


def _tap_row(kernel: Depthwise, result: int) -> str:
    """The C expression of the row of the filter, times dilation, by which the row at `d` is multiplied.

    It is for row `result` of a thread's results. See `Line.offset`.
    """
    down = kernel.lines[0]
    if down.back:
        return f"{result + down.padding} - d * {down.stride}"
    return f"d + {down.padding - result * down.stride}"


def _row(kernel: Depthwise, offsets: Sequence[int]) -> Iterator[str]:
    """Yields the statements that read a thread's part of the row that begins at `line`, into `x`."""
    count, step = _values(kernel), kernel.strides[0][3]
    apart = kernel.of is Pass.DATA and kernel.multiplier > 1
    read = f"read{'_apart' if apart else ''}<{count}>"
    yield f"            float x[{len(offsets)}][{count}];"
    reads = [f"{read}(x[{n}], line + {_far(offset * step)});" for n, offset in enumerate(offsets)]
    yield "            if (inside) {"
    yield from (f"                {one}" for one in reads)
    yield "            } else {"
    for n, (offset, one) in enumerate(zip(offsets, reads, strict=True)):
        yield f"                if ({_inside([offset])}) {one} else zero<{count}>(x[{n}]);"
    yield "            }"


# Backward filter.


def _parts_of_filter(kernel: Depthwise) -> Launch:
    """The launch of backward filter that computes parts of the sums."""
    x, dy = kernel.strides[:2]
    places = kernel.y[0] * math.prod(kernel.groups)
    numbers = {
        "places": places,
        "places_of_part": -(-places // kernel.parts),
        "across": kernel.groups[1],
        "channels": kernel.channels,
        "height": kernel.y[2],
        "width": kernel.y[3],
        "given_height": kernel.x[2],
        "given_width": kernel.x[3],
        "x_n": x[0],
        "x_h": x[2],
        "y_n": dy[0],
        "y_h": dy[2],
    }
    return _launch(
        kernel,
        "\n".join(_parts(kernel)),
        "depthwise_parts",
        kernel.grid,
        block=kernel.block,
        numbers=numbers,
        tensors=(0, 1, len(kernel.strides)),
        stores=False,
    )


def _parts(kernel: Depthwise) -> Iterator[str]:
    """Yields the body of the kernel that computes parts of the sums."""
    yield from _places_of_part(kernel)
    for n in range(kernel.tile.rows):
        yield from _products_of_place(kernel, n)
    yield "    }"
    yield _sums_of_block(kernel)


def _places_of_part(kernel: Depthwise) -> Iterator[str]:
    """Yields the head of a thread's C loop over the places of its part, with the reads of their gradients."""
    (packs, groups), tile, across = kernel.block, kernel.tile, kernel.lines[1]
    beside, vector, step = -(-kernel.w[2] // tile.rows), tile.vector, kernel.strides[1][3]
    yield f"""    __shared__ float shared[{_sums_per_thread(kernel) * packs * groups}];
    const int pack = threadIdx.x, group = threadIdx.y;
    unsigned strip = blockIdx.y;
    {division("r0", "strip", str(beside), tile.rows, "int")}
    const I chunk = (I)strip * {packs}, first = (chunk + pack) * {vector};
    const long long begin = blockIdx.x * places_of_part;
    const long long most = first < channels ? places : 0;
    const long long end = begin + places_of_part < most ? begin + places_of_part : most;
    float sums[{tile.rows}][{across.taps}][{vector}] = {{}};
    for (long long place = begin + group; place < end; place += {groups}) {{
        long long row_number = place;
        {division("right", "row_number", "across")}
        I rest = (I)row_number;
        {split_all("rest", [("h0", "(I)height"), ("n", "")])}
        const I w0 = right * {tile.columns};
        const I count = (I)width - w0;
        float dy[{tile.columns}][{vector}];
        const E* gradient = in1 + n * (I)y_n + h0 * (I)y_h + w0 * {_far(step)} + first;"""
    for t in range(tile.columns):
        read = f"read<{vector}>(dy[{t}], gradient + {_far(t * step)});"
        yield f"        if ({t} < count) {read} else zero<{vector}>(dy[{t}]);"
    yield f"""        const I column = w0 * {across.stride};
        const I start = n * (I)x_n + {_first_read(kernel)};
        const bool inside = {_inside(across.offsets(tile.columns))};"""


def _products_of_place(kernel: Depthwise, n: int) -> Iterator[str]:
    """Yields the statements that add a place's products to the sums of row `n` of a thread's filter."""
    tile, (down, across) = kernel.tile, kernel.lines
    offsets = across.offsets(tile.columns)
    place = f"start + h * (I)x_h + column * {_far(kernel.strides[0][3])}"
    yield f"""        if (r0 + {n} < {down.taps}) {{
            const I h = h0 * {down.stride} + (I)(r0 + {n}) * {down.dilation} - {down.padding};
            if (h >= 0 && h < (I)given_height) {{
            const E* line = in0 + {place};"""
    yield from _row(kernel, offsets)
    for t in range(tile.columns):
        # A value beside the last column may be infinite, so it is left out instead of multiplied by 0.
        yield f"            if ({t} < count) {{" if kernel.y[3] % tile.columns else "            {"
        for s in range(across.taps):
            offset = across.offset(t, s)
            assert offset is not None, "none is between two places"
            yield f"            {_add(kernel)}(sums[{n}][{s}], x[{offsets.index(offset)}], dy[{t}]);"
        yield "            }"
    yield "            } }"


def _sums_per_thread(kernel: Depthwise) -> int:
    """The number of sums of a thread."""
    return kernel.tile.rows * kernel.w[3] * kernel.tile.vector


def _sums_of_block(kernel: Depthwise) -> str:
    """The statements that add up the sums of a block's threads, and store them as the block's part."""
    (packs, groups), vector, (down, across) = kernel.block, kernel.tile.vector, kernel.lines
    threads, sums = packs * groups, _sums_per_thread(kernel)
    tap = number_of(("r", "s"), (across.taps,))
    return f"""    #pragma unroll
    for (int i = 0; i < {sums}; ++i)
        shared[i * {threads} + group * {packs} + pack] =
            sums[i / {across.taps * vector}][i / {vector} % {across.taps}][i % {vector}];
    __syncthreads();
    for (int i = group * {packs} + pack; i < {sums * packs}; i += {threads}) {{
        int which = i;
        {division("of", "which", str(packs), kind="int")}
        {in_turn("float total", f"shared[which * {threads} + g * {packs} + of]", str(groups), "int g")}
        {division("v", "which", str(vector), kind="int")}
        {division("s", "which", str(across.taps), kind="int")}
        const I k = (chunk + of) * {vector} + v;
        const int r = r0 + which;
        if (k < (I)channels && r < {down.taps})
            parts[{number_of(("blockIdx.x", "k", tap), ("channels", down.taps * across.taps))}] = total;
    }}"""


def _sums_of_filter(kernel: Depthwise) -> Launch:
    """The launch of backward filter that adds up the parts and computes the results."""
    every = len(kernel.strides)
    behind = _Behind(kernel, ("k", "0", "r", "s"), 1)
    (_, _, down, across), total = kernel.w, math.prod(kernel.w)
    numbers = {"total": total, "count": kernel.parts, **behind.numbers}
    body = [
        f"""    const I e = (I)blockIdx.x * {THREADS} + threadIdx.x;
    if (e >= (I)total) return;
    I rest = e;
    {split_all("rest", [("s", str(across)), ("r", str(down)), ("k", "")])}
    {in_turn("float sum", "parts[part * total + e]", "count", "long long part", unrolled=8)}""",
        *behind.each("sum"),
    ]
    return _launch(
        kernel,
        "\n".join(body),
        "depthwise_sums",
        (-(-total // THREADS),),
        block=(THREADS,),
        numbers=numbers,
        tensors=(*range(2, every), every),
    )


# The operations behind a convolution.


class _Behind:
    """The C++ of the pointwise operations behind a convolution, and of its results.

    Parameters
    ----------
    kernel
        The kernel with the convolution.
    indices
        The C expression of a result's index in each of its dims.
    vector
        The number of neighbouring channels that are computed together; the second index is the first one's.
    """

    def __init__(self, kernel: Depthwise, indices: tuple[str, ...], vector: int) -> None:
        self._kernel, self._indices, self._vector = kernel, indices, vector
        self._leaves = range(2, len(kernel.operands))
        self._results = range(len(kernel.operands), len(kernel.strides))
        self.numbers = {
            f"s{tensor}_{axis}": step
            for tensor in (*self._leaves, *self._results)
            for axis, step in enumerate(kernel.strides[tensor])
        }

    def _place(self, tensor: int) -> str:
        """The C expression of where a thread's channels of a tensor begin."""
        steps = self._kernel.strides[tensor]
        own = [n for n in range(len(self._indices)) if steps[n]]
        return offset_of((f"({self._indices[n]})" for n in own), (f"(I)s{tensor}_{n}" for n in own)) or "0"

    def _pack(self, tensor: int) -> str:
        return f"Pack<{C_TYPES[self._kernel.dtypes[tensor]]}, {self._vector}>"

    def _is_packed(self, tensor: int) -> bool:
        return self._vector > 1 and self._kernel.packs(tensor, self._vector)

    def _single(self, tensor: int) -> bool:
        """Whether a tensor has one element for all channels that a thread computes together."""
        return self._vector == 1 or not self._kernel.strides[tensor][1]

    def _read_statement(self, tensor: int) -> str | None:
        """The statement that reads an operand once for all channels; None if channels are read one by one."""
        dtype = self._kernel.dtypes[tensor]
        if self._single(tensor):
            element = load(dtype, f"in{tensor}[{self._place(tensor)}]")
            return f"const {value_type(dtype)} v{tensor - 1} = {element};"
        if self._is_packed(tensor):
            pack = self._pack(tensor)
            return f"const {pack} p{tensor} = *(const {pack}*)&in{tensor}[{self._place(tensor)}];"
        return None

    def _is_fixed(self, tensor: int) -> bool:
        """Whether an operand is the same at all places of a thread."""
        steps = self._kernel.strides[tensor]
        return self._vector > 1 and not any(step for axis, step in enumerate(steps) if axis != 1)

    def before(self) -> Iterator[str]:
        """Yields the statements that run once, before the loop over a thread's places."""
        reads = (self._read_statement(tensor) for tensor in self._leaves if self._is_fixed(tensor))
        yield from (f"    {read}" for read in reads if read is not None)

    def each(self, value: str) -> Iterator[str]:
        """Yields the statements for one place.

        `value`: the C expression of the convolution's result there, for channel `v`.
        """
        kernel, several = self._kernel, self._vector > 1
        steps: list[str] = [f"const float v0 = {value};"]
        for tensor in self._leaves:
            dtype, read = kernel.dtypes[tensor], self._read_statement(tensor)
            if read is not None and not self._is_fixed(tensor):
                yield f"                {read}"
            if not self._single(tensor):
                far = f"in{tensor}[{self._place(tensor)} + v * (I)s{tensor}_1]"
                element = f"p{tensor}.of[v]" if self._is_packed(tensor) else far
                steps.append(f"const {value_type(dtype)} v{tensor - 1} = {load(dtype, element)};")
        known: dict[int, tuple[str, str]] = {}
        for n, node in enumerate(kernel.body):
            known[n] = value_of_expression(node, steps, known)
        after: list[str] = []
        for n, (tensor, result) in enumerate(zip(self._results, kernel.results, strict=True)):
            stored = store(result.dtype, formula(result.value, steps, known=known))
            if several:
                yield f"                {self._pack(tensor)} r{n};"
                steps.append(f"r{n}.of[v] = {stored};")
                after.append(f"*({self._pack(tensor)}*)&out{n}[{self._place(tensor)}] = r{n};")
            else:
                steps.append(f"out{n}[{self._place(tensor)}] = {stored};")
        inner = "\n                    ".join(steps)
        if several:
            yield "                #pragma unroll"
        loop = f"for (int v = 0; v < {self._vector}; ++v) " if several else "const int v = 0; "
        yield f"                {loop}{{\n                    {inner}\n                }}"
        yield from (f"                {one}" for one in after)
