"""Reads and writes at places that indices name, on CUDA: kernels of our own.

A thread of a gather writes one element of the result, or up to 16 bytes of
neighbours that have the same indices. Dims and strides are arguments, so few
kernels serve many shapes.

A scatter gives the same result each time. The indices of an element, or of a slice
that is written as a whole, are a writer, and have a number. A first kernel finds the
writers of each destination: the last one, or a list of all. The lists are in no order
at first; for sums and products, a second kernel sorts them. In the last kernel, a
thread for each element of the result, or for up to 16 bytes of neighbours with the
same writers, takes the writers' updates one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from cudnn_actor.engines.cuda.kernels.axes import largest_pack
from cudnn_actor.engines.cuda.kernels.element_types import C_TYPES, WORD_TYPES
from cudnn_actor.engines.cuda.kernels.index_code import PLACED, indexing, is_wide, offset_of
from cudnn_actor.engines.cuda.kernels.kernel import ROUNDING, Launch, arguments_of, grid_over
from cudnn_actor.engines.cuda.kernels.lines import beginning, stored_value, value_of
from cudnn_actor.engines.cuda.kernels.reduction_code import (
    ELEMENT_MAX,
    ELEMENT_MIN,
    ELEMENT_PRODUCT,
    ELEMENT_SUM,
)
from cudnn_actor.engines.cuda.kernels.walks import Walk
from cudnn_actor.engines.cuda.operations.implementation import implement, kernels
from cudnn_actor.protocol.operations import (
    Gather,
    GatherElements,
    GatherND,
    GraphTensor,
    Scatter,
    ScatterElements,
    ScatterND,
)
from cudnn_actor.protocol.operations.indexing import Gathering, Places, Scattering, ScatterReduction

__all__ = ["describe_gather", "describe_scatter", "gather_launches", "scatter_launches", "scatter_workspace"]

_UNROLLED = 4
"""How often a gather's loop is unrolled, so that as many reads are under way at once."""
_MOVED = WORD_TYPES | {16: "Sixteen"}
"""The C type that moves an element, by its bytes."""


class _Gather(NamedTuple):
    """A gather as data.

    `walk`: over the result. `selects`: the size and the stride of each axis that indices select along.
    `component`: the distance of two components of an index. `nbytes`: the bytes that are moved at a time.
    """

    walk: Walk
    selects: tuple[tuple[int, int], ...]
    component: int
    nbytes: int

    @property
    def numbers(self) -> tuple[int, ...]:
        """The arguments behind the pointers."""
        return (*self.walk.numbers.values(), *(n for pair in self.selects for n in pair), self.component)


def gather_launches(operation: Gathering[int], tensors: Sequence[GraphTensor]) -> list[Launch]:
    """The launch of a gather."""
    gather = describe_gather(operation, tensors)
    arguments = arguments_of(3, *gather.numbers)
    return [Launch("gather", _gather_source(gather, tensors[1]), *grid_over(gather.walk.total), arguments)]


def _gather_source(gather: _Gather, indices: GraphTensor) -> str:
    """The kernel in CUDA C++."""
    element = _MOVED[gather.nbytes]
    wide = is_wide(gather.walk.span + sum(size * step for size, step in gather.selects), sums=True)
    return f"""{PLACED}{indexing(wide=wide)}{_SIXTEEN}
extern "C" __global__ void gather(
    const {element}* __restrict__ x, const {C_TYPES[indices.dtype]}* __restrict__ indices,
    {element}* __restrict__ y, {gather.walk.parameters}, {selection(len(gather.selects))}) {{
    {gather.walk.loop(f"y[y_at] = x[x_at + {selection_offset(len(gather.selects))}];", _UNROLLED)}
}}
"""


def selection(count: int) -> str:
    """The C parameters that `selection_offset` names: size and step of each selected axis, and `component`.

    `component` is the distance of two components of one index, where indices have components.
    """
    names = [name for n in range(count) for name in (f"size{n}", f"step{n}")]
    return ", ".join(f"long long {name}" for name in (*names, "component"))


def selection_offset(count: int) -> str:
    """The C expression of the offset that the indices select."""
    found = (f"(I)placed(indices[indices_at + {n} * (I)component], size{n})" for n in range(count))
    return offset_of(found, (f"(I)step{n}" for n in range(count)))


def strides_of(places: Places, x: GraphTensor, indices: GraphTensor) -> tuple[list[int], list[int]]:
    """The strides of x, and of the indices, along each dim of `places`."""
    of_x, of_indices = [0] * len(places.dims), [0] * len(places.dims)
    for own, stride in zip(places.own, x.strides, strict=True):
        if own is not None:
            of_x[own] = stride
    for own, stride in zip(places.of_indices, indices.strides, strict=False):
        of_indices[own] = stride
    return of_x, of_indices


def describe_gather(operation: Gathering[int], tensors: Sequence[GraphTensor]) -> _Gather:
    """Describe a gather."""
    x, indices, y = tensors
    places = operation.places(x.dims, indices.dims)
    of_x, of_indices = strides_of(places, x, indices)
    walk = Walk.over("t", y.dims, y=y.strides, x=of_x, indices=of_indices)
    selects = tuple((x.dims[axis], x.strides[axis]) for axis in places.selected_axes)
    component = indices.strides[-1] if places.stacked else 0
    return _in_packs(_Gather(walk, selects, component, x.dtype.itemsize), math.gcd(x.alignment, y.alignment))


def _in_packs(gather: _Gather, alignment: int) -> _Gather:
    """The gather with neighbours moved at once as one element, if there are any."""
    *slow, (size, steps) = gather.walk.axes
    if steps != (1, 1, 0):
        return gather
    apart = [step for _, of in slow for step in of[:2]] + [step for _, step in gather.selects]
    count = largest_pack(size, apart, alignment, gather.nbytes)
    axes = [(n, (of[0] // count, of[1] // count, of[2])) for n, of in slow]
    walk = gather.walk._replace(axes=(*axes, (size // count, steps)))
    selects = tuple((n, step // count) for n, step in gather.selects)
    return gather._replace(walk=walk, selects=selects, nbytes=gather.nbytes * count)


_SIXTEEN = """
struct alignas(16) Sixteen { unsigned int of[4]; };
"""


class _Scatter(NamedTuple):
    """A scatter as data.

    Parameters
    ----------
    writers
        The walk over the writers in their order: the offset of a writer's indices, and the part of its
        destination's number that follows from its own place.
    updates
        The walk over the writers: the offset of a writer's updates.
    elements
        The walk over the elements of the result.
    selects
        The size of each axis that indices select along, and its step in destinations' numbers.
    component
        The distance of two components of an index.
    destinations
        The number of destinations.
    together
        The number of neighbouring elements that have the same destination and lie side by side in each
        tensor, and that a thread takes at once.
    """

    writers: Walk
    updates: Walk
    elements: Walk
    selects: tuple[tuple[int, int], ...]
    component: int
    destinations: int
    together: int

    @property
    def wide(self) -> bool:
        """Whether offsets need 64 bits."""
        return is_wide(max(walk.span for walk in self[:3]) + self.destinations, sums=True)

    @property
    def list_length(self) -> int:
        """The numbers in the workspace: the first writer of each destination, and the next of each writer."""
        return self.destinations + self.writers.total


def describe_scatter(operation: Scattering[int], tensors: Sequence[GraphTensor]) -> _Scatter:
    """Describe a scatter."""
    x, indices, updates, y = tensors
    places = operation.places(x.dims, indices.dims)
    whole = [own is not None and own not in places.of_indices for own in places.own]
    steps, destinations = [0] * len(x.dims), 1
    for axis in reversed(range(len(x.dims))):
        if not whole[axis]:
            steps[axis] = destinations
            destinations *= x.dims[axis]
    own_steps = dict(zip(places.own, steps, strict=True))
    writers = [places.dims[own] for own in places.of_indices]
    of_updates = [
        updates.strides[own] if own is not None and apart else 0
        for own, apart in zip(places.own, whole, strict=True)
    ]
    written = Walk.in_order("v", writers, written=[updates.strides[own] for own in places.of_indices])
    elements = Walk.over("t", y.dims, y=y.strides, x=x.strides, d=steps, u=of_updates)
    *slow, (size, last) = elements.axes
    apart = [step for _, (*of, _, u) in slow for step in (*of, u)] + [step for _, (step,) in written.axes]
    together = 1
    if last == (1, 1, 0, 1):
        alignment = math.gcd(x.alignment, updates.alignment, y.alignment)
        together = largest_pack(size, apart, alignment, x.dtype.itemsize)
        elements = elements._replace(
            axes=(*slow, (size // together, tuple(step * together for step in last)))
        )
    return _Scatter(
        writers=Walk.in_order(
            "w",
            writers,
            indices=indices.strides[: len(writers)],
            d=[own_steps.get(own, 0) for own in places.of_indices],
        ),
        updates=written,
        elements=elements,
        selects=tuple((x.dims[axis], steps[axis]) for axis in places.selected_axes),
        component=indices.strides[-1] if places.stacked else 0,
        destinations=destinations,
        together=together,
    )


def scatter_workspace(operation: Scattering[int], tensors: Sequence[GraphTensor]) -> int:
    """Bytes for the writers of each destination."""
    scatter = describe_scatter(operation, tensors)
    if not math.prod(tensors[0].dims):
        return 0
    count = scatter.destinations if _takes_last(operation) else scatter.list_length
    return count * (8 if scatter.wide else 4)


def scatter_launches(operation: Scattering[int], tensors: Sequence[GraphTensor]) -> list[Launch]:
    """The launches of a scatter."""
    scatter = describe_scatter(operation, tensors)
    if not scatter.elements.total:
        return []
    text = _scatter_source(scatter, operation, tensors)
    found = (*scatter.writers.numbers.values(), *(n for pair in scatter.selects for n in pair))
    written = scatter.elements.numbers | scatter.updates.numbers
    return [
        Launch(name, text, *grid_over(count), arguments_of(5, scatter.destinations, *numbers), ROUNDING)
        for name, count, numbers in (
            ("fill", scatter.destinations, ()),
            ("find", scatter.writers.total, (*found, scatter.component)),
            *([("order", scatter.destinations, ())] if _is_ordered(operation, tensors) else []),
            ("write", scatter.elements.total, tuple(written.values())),
        )
    ]


def _takes_last(operation: Scattering[int]) -> bool:
    """Whether only the last update of an element counts."""
    return operation.reduction is ScatterReduction.NONE


def _is_ordered(operation: Scattering[int], tensors: Sequence[GraphTensor]) -> bool:
    """Whether the result depends on the order in which all of an element's updates are taken."""
    sums = operation.reduction in (ScatterReduction.ADD, ScatterReduction.MUL)
    return sums and tensors[0].dtype.is_floating


def _scatter_source(scatter: _Scatter, operation: Scattering[int], tensors: Sequence[GraphTensor]) -> str:
    """The kernels in CUDA C++, in the order in which they are launched."""
    x, indices, *_ = tensors
    count = len(scatter.selects)
    element = C_TYPES[x.dtype]
    pointers = (
        f"const {element}* __restrict__ x, const {C_TYPES[indices.dtype]}* __restrict__ indices, "
        f"const {element}* __restrict__ updates, {element}* __restrict__ y, I* first, long long destinations"
    )
    found = "last(first + to, (I)w_number);"
    if not _takes_last(operation):
        found = "first[destinations + w_number] = exchanged(first + to, (I)w_number);"
    find = f"const I to = d_at + {selection_offset(count)}; {found}"
    start = 'extern "C" __global__ void'
    order = f"""{start} order({pointers}) {{
    EACH(d, destinations) sorted(first + d, first + destinations);
}}
"""
    elements = f"{scatter.elements.parameters}, {scatter.updates.parameters}"
    return f"""{beginning(x.dtype, wide=scatter.wide)}{PLACED}{_LISTS}
typedef Pack<{element}, {scatter.together}> Packed;
{start} fill({pointers}) {{
    EACH(d, destinations) first[d] = -1;
}}
{start} find({pointers}, {scatter.writers.parameters}, {selection(count)}) {{
    {scatter.writers.loop(find)}
}}
{order if _is_ordered(operation, tensors) else ""}
{start} write({pointers}, {elements}) {{
    {scatter.elements.loop(_written_elements(scatter, operation, tensors))}
}}
"""


def _written_elements(scatter: _Scatter, operation: Scattering[int], tensors: Sequence[GraphTensor]) -> str:
    """The statements that compute neighbouring elements of the result from their writers, and store them."""
    x, _, updates, y = tensors
    update = "*(const Packed*)(updates + u_at + written_at)"
    if _takes_last(operation):
        return f"""Packed pack;
        const I writer = first[d_at];
        if (writer >= 0) {{ {scatter.updates.at("writer")} pack = {update}; }}
        else pack = *(const Packed*)(x + x_at);
        *(Packed*)(y + y_at) = pack;"""
    combined = _JOINS[operation.reduction].of("other", "value")  # of equal ones, the update
    stored = stored_value(y, "values[v]", exact=not y.dtype.is_floating)
    each = f"for (int v = 0; v < {scatter.together}; ++v)"
    return f"""Packed pack = *(const Packed*)(x + x_at);
        T values[{scatter.together}];
        {each} values[v] = {value_of(x, "pack.of[v]")};
        for (I writer = first[d_at]; writer >= 0; writer = first[destinations + writer]) {{
            {scatter.updates.at("writer")}
            const Packed others = {update};
            {each} {{
                const T value = values[v], other = {value_of(updates, "others.of[v]")};
                values[v] = {combined};
            }}
        }}
        {each} pack.of[v] = {stored};
        *(Packed*)(y + y_at) = pack;"""


_JOINS = {
    ScatterReduction.ADD: ELEMENT_SUM,
    ScatterReduction.MUL: ELEMENT_PRODUCT,
    ScatterReduction.MIN: ELEMENT_MIN,
    ScatterReduction.MAX: ELEMENT_MAX,
}
_LISTS = """
__device__ __forceinline__ int exchanged(int* place, int value) { return atomicExch(place, value); }
__device__ __forceinline__ long long exchanged(long long* place, long long value) {
    return (long long)atomicExch((unsigned long long*)place, (unsigned long long)value);
}
__device__ __forceinline__ void last(int* place, int value) { atomicMax(place, value); }
__device__ __forceinline__ void last(long long* place, long long value) { atomicMax(place, value); }
// Sorts a list by merging runs, of 1 element at first, in place.
__device__ void sorted(I* first, I* next) {
    I list = *first;
    if (list < 0) return;
    for (I run = 1, runs = 0; runs != 1; run *= 2) {
        I left = list, end = -1;
        runs = 0;
        while (left >= 0) {
            I right = left, of_left = 0, of_right = run;
            for (; of_left < run && right >= 0; ++of_left) right = next[right];
            while (of_left > 0 || (of_right > 0 && right >= 0)) {
                const bool from_left = of_left > 0 && (of_right == 0 || right < 0 || left < right);
                const I taken = from_left ? left : right;
                if (from_left) { left = next[left]; --of_left; } else { right = next[right]; --of_right; }
                if (end >= 0) next[end] = taken; else list = taken;
                end = taken;
            }
            left = right;
            ++runs;
        }
        next[end] = -1;
    }
    *first = list;
}
"""


implement(Gather, GatherElements, GatherND, launchers=kernels(gather_launches), exact=True)
implement(Scatter, ScatterElements, ScatterND, launchers=kernels(scatter_launches, scatter_workspace))
