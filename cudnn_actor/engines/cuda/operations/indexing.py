"""Reads and writes at places that indices name, on CUDA: kernels of our own.

A thread computes one element of the result, or up to 16 bytes of neighbours that
have the same indices. Dims and strides are arguments, so few kernels serve many
shapes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from cudnn_actor.engines.cuda.library.libraries import libraries
from cudnn_actor.engines.cuda.plans.kernels import C_TYPES, Axis, merged
from cudnn_actor.protocol.operations import GraphTensor
from cudnn_actor.protocol.operations.indexing import Gathering, Places

__all__ = ["Walk", "gather_kernel", "gather_source", "launcher"]

_THREADS, _MOST_BLOCKS = 256, 1 << 16
_FEW = 1 << 30
"""Numbers below this, and sums of two of them, fit into 32 bits."""
_MOVED = {
    1: "unsigned char",
    2: "unsigned short",
    4: "unsigned int",
    8: "unsigned long long",
    16: "Sixteen",
}
"""What so many bytes are moved as."""


class Walk(NamedTuple):
    """Places that are numbered, and where each lies in some tensors, in CUDA C++.

    Parameters
    ----------
    letter
        What the names of its variables begin with.
    names
        Of the tensors.
    axes
        The slowest first, with each tensor's strides.
    """

    letter: str
    names: tuple[str, ...]
    axes: tuple[Axis, ...]

    @classmethod
    def over(cls, letter: str, dims: Sequence[int], **strides: Sequence[int]) -> Walk:
        """Over dims, in the order in which the first tensor's elements lie in memory."""
        axes = merged(dims, [*strides.values()]) or [(1, (0,) * len(strides))]
        return cls(letter, tuple(strides), tuple(axes))

    @property
    def total(self) -> int:
        """How many places there are."""
        return math.prod(size for size, _ in self.axes)

    @property
    def span(self) -> int:
        """More than any number that is computed for it."""
        reach = (
            sum((size - 1) * steps[n] for size, steps in self.axes if size) for n in range(len(self.names))
        )
        return max(self.total, *reach) + 1

    @property
    def numbers(self) -> tuple[int, ...]:
        """The arguments of `parameters`."""
        return (
            self.total,
            *(size for size, _ in self.axes[1:]),
            *(step for _, steps in self.axes for step in steps),
        )

    @property
    def parameters(self) -> str:
        """The parameters of a kernel that describe the places."""
        names = [f"{self.letter}_count", *(f"{self.letter}{n}_size" for n in range(1, len(self.axes)))]
        names += [f"{self.letter}{n}_{name}" for n in range(len(self.axes)) for name in self.names]
        return ", ".join(f"long long {name}" for name in names)

    def at(self, number: str) -> str:
        """Statements that define where a place lies in each tensor: `x_at` for x."""
        letter, text = self.letter, [f"I {self.letter}_rest = (I){number};"]
        for n in range(len(self.axes) - 1, 0, -1):
            size = f"(I){letter}{n}_size"
            text.append(f"const I {letter}{n} = {letter}_rest % {size}; {letter}_rest /= {size};")
        text.append(f"const I {letter}0 = {letter}_rest;")
        for name in self.names:
            parts = (f"{letter}{n} * (I){letter}{n}_{name}" for n in range(len(self.axes)))
            text.append(f"const I {name}_at = {' + '.join(parts)};")
        return " ".join(text)

    def loop(self, body: str) -> str:
        """A loop of all threads over the places, for a body to which `{letter}_number` is known."""
        number = f"{self.letter}_number"
        start = f"long long {number} = blockIdx.x * (long long)blockDim.x + threadIdx.x"
        step = f"{number} += (long long)gridDim.x * blockDim.x"
        return f"for ({start}; {number} < {self.letter}_count; {step}) {{ {self.at(number)} {body} }}"


def launcher(kernel: Any, count: int, arguments: tuple[Any, ...]) -> Callable[[Sequence[int]], None]:
    """The launch of a kernel with a thread for each of so many places; without any, nothing."""
    grid = (min(-(-count // _THREADS), _MOST_BLOCKS),)

    def launch(addresses: Sequence[int]) -> None:
        if count:
            kernel(grid, (_THREADS,), (*addresses, *arguments))

    return launch


class _Gather(NamedTuple):
    """A gather as data: its loop, what selects, and how many bytes are moved at a time."""

    walk: Walk
    selects: tuple[tuple[int, int], ...]
    component: int
    nbytes: int

    @property
    def numbers(self) -> tuple[int, ...]:
        return (*self.walk.numbers, *(n for pair in self.selects for n in pair), self.component)


def gather_kernel(
    operation: Gathering[int], tensors: Sequence[GraphTensor], handle: Any
) -> Callable[[Sequence[int]], None]:
    """The launch of a gather; see `operations.Launcher`."""
    del handle
    cupy = libraries().cupy
    gather = _gather(operation, tensors)
    kernel = cupy.RawKernel(gather_source(operation, tensors), "gather", options=("--std=c++17",))
    kernel.compile()
    return launcher(kernel, gather.walk.total, gather.numbers)


def gather_source(operation: Gathering[int], tensors: Sequence[GraphTensor]) -> str:
    """The kernel in CUDA C++."""
    gather = _gather(operation, tensors)
    element = _MOVED[gather.nbytes]
    wide = gather.walk.span + sum(size * step for size, step in gather.selects) >= _FEW
    return f"""{PLACED.format(offset="long long" if wide else "int")}
extern "C" __global__ void gather(
    const {element}* __restrict__ x, const {C_TYPES[tensors[1].dtype]}* __restrict__ indices,
    {element}* __restrict__ y, {gather.walk.parameters}, {selection(len(gather.selects))}) {{
    {gather.walk.loop(f"y[y_at] = x[x_at + {selected(len(gather.selects))}];")}
}}
"""


def selection(count: int) -> str:
    """The parameters of `selected`: size and stride of each axis that is selected, and the indices' step."""
    names = [name for n in range(count) for name in (f"size{n}", f"step{n}")]
    return ", ".join(f"long long {name}" for name in (*names, "component"))


def selected(count: int, what: str = "step") -> str:
    """The C expression of how far behind `x_at` indices select an element; `what`: whose steps count."""
    return " + ".join(
        f"placed(indices[indices_at + {n} * (I)component], size{n}) * (I){what}{n}" for n in range(count)
    )


def strides_of(places: Places, x: GraphTensor, indices: GraphTensor) -> tuple[list[int], list[int]]:
    """The strides of x and of the indices along each dim of what is read or written."""
    of_x, of_indices = [0] * len(places.dims), [0] * len(places.dims)
    for own, stride in zip(places.own, x.strides, strict=True):
        if own is not None:
            of_x[own] = stride
    for own, stride in zip(places.of_indices, indices.strides, strict=False):
        of_indices[own] = stride
    return of_x, of_indices


def _gather(operation: Gathering[int], tensors: Sequence[GraphTensor]) -> _Gather:
    x, indices, y = tensors
    places = operation.places(x.dims, indices.dims)
    of_x, of_indices = strides_of(places, x, indices)
    walk = Walk.over("t", y.dims, y=y.strides, x=of_x, indices=of_indices)
    selects = tuple((x.dims[axis], x.strides[axis]) for axis in places.selected)
    component = indices.strides[-1] if places.stacked else 0
    return _packed(_Gather(walk, selects, component, x.dtype.itemsize), math.gcd(x.alignment, y.alignment))


def _packed(gather: _Gather, alignment: int) -> _Gather:
    """With neighbours that are moved at once as one element, if there are any."""
    *slow, (size, steps) = gather.walk.axes
    if steps != (1, 1, 0):
        return gather
    for nbytes in (16, 8, 4, 2):
        count = nbytes // gather.nbytes
        apart = [step for _, of in slow for step in of[:2]] + [step for _, step in gather.selects]
        if count > 1 and size % count == 0 == alignment % nbytes and all(step % count == 0 for step in apart):
            axes = [(n, (of[0] // count, of[1] // count, of[2])) for n, of in slow]
            walk = gather.walk._replace(axes=(*axes, (size // count, steps)))
            selects = tuple((n, step // count) for n, step in gather.selects)
            return gather._replace(walk=walk, selects=selects, nbytes=nbytes)
    return gather


PLACED = """typedef {offset} I;
struct alignas(16) Sixteen {{ unsigned int of[4]; }};
// An index below 0 counts from the end; one out of range counts as the nearest.
__device__ __forceinline__ I placed(long long index, long long size) {{
    if (index < 0) index += size;
    return (I)(index < 0 ? 0 : index < size ? index : size - 1);
}}
"""
