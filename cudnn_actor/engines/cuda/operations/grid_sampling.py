"""Images read at places that a tensor holds, on CUDA: a kernel with a thread for each result."""

from __future__ import annotations

from collections.abc import Sequence

from cudnn_actor.engines.cuda.kernels.axes import extent
from cudnn_actor.engines.cuda.kernels.element_types import C_TYPES
from cudnn_actor.engines.cuda.kernels.index_code import is_wide
from cudnn_actor.engines.cuda.kernels.kernel import ROUNDING, Launch, arguments_of, grid_over
from cudnn_actor.engines.cuda.kernels.lines import beginning, stored_value, value_of
from cudnn_actor.engines.cuda.kernels.walks import Walk
from cudnn_actor.engines.cuda.operations.implementation import implement, kernels
from cudnn_actor.protocol.operations import GraphTensor, GridPadding, GridSample, ResampleMode
from cudnn_actor.protocol.operations.grid_sampling import CUBIC, FARTHEST

__all__ = ["grid_sample_launches"]


def grid_sample_launches(operation: GridSample[int], tensors: Sequence[GraphTensor]) -> list[Launch]:
    """The launch of a grid sample."""
    x, grid, _ = tensors
    walk = _walk(tensors)
    text = _source(operation, tensors, walk)
    spatial = zip(x.dims[2:], x.strides[2:], strict=True)
    numbers = (grid.strides[-1], *(number for pair in spatial for number in pair), *walk.numbers.values())
    arguments = arguments_of(3, *numbers)
    # Without `ROUNDING`, a fused multiply-add would give another place.
    return [Launch("grid_sample", text, *grid_over(walk.total), arguments, ROUNDING)]


def _walk(tensors: Sequence[GraphTensor]) -> Walk:
    """The walk over the result, with the offsets of x's sample and channel, and of the grid's numbers."""
    x, grid, y = tensors
    spatial = [0] * (len(x.dims) - 2)
    of_grid = (grid.strides[0], 0, *grid.strides[1:-1])
    return Walk.over("t", y.dims, y=y.strides, x=(*x.strides[:2], *spatial), grid=of_grid)


def _source(operation: GridSample[int], tensors: Sequence[GraphTensor], walk: Walk) -> str:
    """The kernel in CUDA C++."""
    x, grid, y = tensors
    spatial = len(x.dims) - 2
    wide = is_wide(walk.span, *(extent(tensor.dims, tensor.strides) for tensor in tensors), sums=True)
    body = f"sum += weight{spatial - 1} * {value_of(x, f'x[at{spatial - 1}]')};"
    count = operation.reach[1]
    for axis in reversed(range(spatial)):
        before, start = (f"weight{axis - 1} * ", f"at{axis - 1}") if axis else ("", "x_at")
        body = f"""for (int k{axis} = 0; k{axis} < {count}; ++k{axis}) {{
                if (taps{axis}.weights[k{axis}] == 0) continue;
                const T weight{axis} = {before}taps{axis}.weights[k{axis}];
                const I at{axis} = {start} + taps{axis}.places[k{axis}] * (I)step{axis};
                {body}
            }}"""
    numbers = [
        value_of(grid, f"grid[grid_at + {spatial - 1 - axis} * (I)component]") for axis in range(spatial)
    ]
    taps = " ".join(
        f"const Taps taps{axis} = taps_of({number}, (T)size{axis});" for axis, number in enumerate(numbers)
    )
    loop = walk.loop(f"{taps} T sum = 0; {body} y[y_at] = {stored_value(y, 'sum')};")
    sizes = ", ".join(f"long long size{axis}, long long step{axis}" for axis in range(spatial))
    return f"""{beginning(x.dtype, wide=wide)}{_taps(operation)}
extern "C" __global__ void grid_sample(
    const {C_TYPES[x.dtype]}* __restrict__ x, const {C_TYPES[grid.dtype]}* __restrict__ grid,
    {C_TYPES[y.dtype]}* __restrict__ y, long long component, {sizes}, {walk.parameters}) {{
    {loop}
}}
"""


def _taps(operation: GridSample[int]) -> str:
    """The C function that returns places and weights along one dim, as `GridSample._taps` does.

    It is no trace of the definition, which would have a statement for each tap of each dim, but has a loop.
    """
    first, count = operation.reach
    corners, padding = operation.align_corners, operation.padding
    low, high = ("0", "size - 1") if corners else ("(T)-0.5", "size - (T)0.5")
    reflects = padding is GridPadding.REFLECTION
    return _TAPS.format(
        first=first,
        count=count,
        place="(number + 1) / 2 * (size - 1)" if corners else "((number + 1) * size - 1) / 2",
        farthest=f"(T){FARTHEST!r}",
        whole="place = rint(place);" if operation.mode is ResampleMode.NEAREST else "",
        low=low,
        high=high,
        outside="place = reflected(place, low, high);" if reflects else "",
        weights=_WEIGHTS[operation.mode],
        back="at = reflected(at, low, high);" if reflects else "",
        kept="inside ? weights[k] : 0" if padding is GridPadding.ZEROS else "weights[k]",
        one=repr(CUBIC + 2),
        two=repr(CUBIC + 3),
        cubic=repr(CUBIC),
        five=repr(5 * CUBIC),
        eight=repr(8 * CUBIC),
        four=repr(4 * CUBIC),
    )


_TAPS = """
struct Taps {{ I places[{count}]; T weights[{count}]; }};
__device__ __forceinline__ T reflected(T place, T low, T high) {{
    const T width = high - low;
    if (width == 0) return 0;
    if (!(place < low || place > high)) return place;
    const T beyond = place < low ? low - place : place - high;
    const T times = trunc(beyond / width), rest = beyond - times * width;
    return (place < low) == (fmod(times, (T)2) == 0) ? low + rest : high - rest;
}}
__device__ __forceinline__ T near(T apart) {{
    return ((T){one} * apart - (T){two}) * apart * apart + 1;
}}
__device__ __forceinline__ T far(T apart) {{
    return (((T){cubic} * apart - (T){five}) * apart + (T){eight}) * apart - (T){four};
}}
__device__ __forceinline__ Taps taps_of(T number, T size) {{
    T place = {place};
    place = place >= -{farthest} ? (place < {farthest} ? place : {farthest}) : -{farthest};
    {whole}
    const T low = {low}, high = {high};
    {outside}
    const T before = floor(place), ratio = place - before;
    const T weights[] = {{{weights}}};
    Taps taps;
    #pragma unroll
    for (int k = 0; k < {count}; ++k) {{
        T at = before + (T)(k + {first});
        const bool inside = at >= 0 && at < size;
        {back}
        taps.places[k] = (I)(at < 0 ? 0 : at < size ? at : size - 1);
        taps.weights[k] = {kept};
    }}
    return taps;
}}
"""
_WEIGHTS = {
    ResampleMode.NEAREST: "1",
    ResampleMode.LINEAR: "1 - ratio, ratio",
    ResampleMode.CUBIC: "far(ratio + 1), near(ratio), near(1 - ratio), far(2 - ratio)",
}


implement(GridSample, launchers=kernels(grid_sample_launches))
