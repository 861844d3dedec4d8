"""Elementwise kernels: pointwise operations, perhaps with indexed reads before them, as one kernel.

A kernel computes one or more results of the same dims. Its source depends only on
the operations, the element types, the rank and how the last axis is read; dims and
strides are arguments, so few kernels serve many shapes. Neighbours in the last axis
are read and written together, up to 16 bytes at a time. Each value is computed in
the type that its operation computes in, and rounded where the graph says so, and
nowhere else: to nearest, ties to even; integers saturate and NaN becomes 0; of
bool, all but 0 is true. A kernel that only copies, from and to one type, copies
the bits.

An indexed read takes its elements from the places that indices name. The indices are
those of another operand, where one out of range counts as the nearest in range, or
those of a table, which is a part of the kernel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import msgspec
import numpy as np

from cudnn_actor.engines.cuda.kernels.axes import extent, merge_dims
from cudnn_actor.engines.cuda.kernels.element_types import (
    ACCESS_BYTES,
    C_TYPES,
    PACK,
    WORDS,
    literal,
    load,
    store,
    value_type,
)
from cudnn_actor.engines.cuda.kernels.expressions import (
    Expression,
    Leaf,
    Result,
    Scalar,
    Selection,
    Table,
    Tabled,
    Value,
    nodes_of,
    scalars_of,
)
from cudnn_actor.engines.cuda.kernels.formulas import PREAMBLE, formula, value_of_expression
from cudnn_actor.engines.cuda.kernels.index_code import (
    ALL_THREADS,
    PLACED,
    THREAD,
    index_type,
    indexing,
    is_wide,
    offset_of,
    place_type,
)
from cudnn_actor.engines.cuda.kernels.kernel import ROUNDING, Launch, arguments_of, grid_over
from cudnn_actor.engines.cuda.kernels.walks import Walk
from cudnn_actor.protocol.graphs.step_kinds import StepKind
from cudnn_actor.protocol.types.dtypes import DType

__all__ = ["Elementwise", "Source", "describe_copy", "describe_elementwise", "elementwise", "source"]

_MOST_TOGETHER = 8
"""The most elements that a thread computes together."""
_FEW_STEPS = 4
"""The most steps of a body whose values for several places fit into the registers."""


class Elementwise(msgspec.Struct, frozen=True, tag="elementwise", dict=True):
    """A kernel as data: what it computes, and over which elements.

    Parameters
    ----------
    results
        The results that the kernel stores.
    body
        Expressions that are computed first, in this order. Results and later expressions use their values.
    dims
        Dims to iterate over, slowest axis first.
    strides
        The results' strides in elements, then the operands' and the tables'; 0 where an operand is broadcast.
    tables
        The indices of each table.
    together
        The number of neighbours in the last axis that a thread computes together. In each tensor whose
        elements lie side by side there, every place at which the axis begins is a multiple of it. So is the
        axis' size, unless it is the only axis.
    """

    results: tuple[Result, ...]
    body: tuple[Expression, ...]
    dims: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]
    tables: tuple[tuple[int, ...], ...] = ()
    together: int = 1

    @property
    def rest(self) -> bool:
        """Whether the only axis is no multiple of `together`. One thread computes its last elements."""
        return self.dims[-1] % self.together > 0

    @property
    def reads_at_once(self) -> int:
        """The number of packs that a thread reads before it stores any, so that it has 16 bytes under way."""
        if len(self.body) > _FEW_STEPS or any(leaf.selects for leaf in self.leaves()):
            return 1
        least = min(result.dtype.itemsize for result in self.results)
        return max(1, ACCESS_BYTES // (least * self.together))

    @property
    def places(self) -> int:
        """The number of threads that have work."""
        return -(-self.walk.total // self.reads_at_once) + self.rest

    @property
    def wide(self) -> bool:
        """Whether offsets need 64 bits."""
        spans = [extent(self.dims, steps) for steps in self.strides]
        for leaf in self.leaves():
            selected = extent((of.size for of in leaf.selects), (of.step for of in leaf.selects))
            spans[len(self.results) + leaf.number] += leaf.offset + selected
        return is_wide(math.prod(self.dims), *spans)

    @cached_property
    def walk(self) -> Walk:
        """The walk over packs of neighbours: where each lies in the results, the operands and the tables."""
        *slow, last = self.dims
        counts = {"out": len(self.results), "table": len(self.tables)}
        counts["in"] = len(self.strides) - sum(counts.values())
        names = tuple(f"{kind}{n}" for kind in ("out", "in", "table") for n in range(counts[kind]))
        axes = zip((*slow, last // self.together), zip(*self.strides, strict=True), strict=True)
        return Walk("i", names, tuple(axes))

    @cached_property
    def numbers(self) -> dict[str, int]:
        """The kernel's numbers, by the names of its parameters."""
        found = {**self.walk.numbers, **({"all": self.dims[-1]} if self.rest else {})}
        for leaf in self.leaves():
            for n, select in enumerate(leaf.selects):
                found[f"step{leaf.number}_{n}"] = select.step
                if _is_read(select):
                    found[f"size{leaf.number}_{n}"] = select.size
        return found

    def leaves(self) -> tuple[Leaf, ...]:
        """The tensors that the kernel reads, in the order of their numbers."""
        found = {
            node.number: node for node in nodes_of((*self.body, *self.results)) if isinstance(node, Leaf)
        }
        return tuple(found[number] for number in sorted(found))

    def tensor(self, read: Leaf | Tabled) -> int:
        """The index in `strides` of an operand or a table."""
        first = len(self.strides) - len(self.tables) if isinstance(read, Tabled) else len(self.results)
        return first + read.number

    def selects_alike(self, leaf: Leaf) -> bool:
        """Whether neighbours in the last axis read a leaf by the same indices, or by none."""
        return not any(self.strides[self.tensor(select.indices)][-1] for select in leaf.selects)

    def scalars(self) -> tuple[Scalar, ...]:
        """The plan's scalars that it takes."""
        return scalars_of((*self.body, *self.results))

    # `Kernel`. Its tensors are its results, then its operands.

    name = "elementwise"

    @property
    def title(self) -> str:
        """See `Kernel.title`."""
        return (StepKind.ELEMENTWISE if self.body else StepKind.COPY).step_name()

    @property
    def is_empty(self) -> bool:
        """Whether there are no elements."""
        return 0 in self.dims

    @property
    def reads(self) -> range:
        """See `Kernel.reads`."""
        return range(len(self.results), len(self.strides) - len(self.tables))

    def launches(self) -> tuple[Launch, ...]:
        """The kernel's only launch."""
        tables = (np.asarray(indices, np.int32) for indices in self.tables)
        tensors = len(self.strides) - len(self.tables)
        arguments = arguments_of(tensors, *tables, *self.numbers.values(), *self.scalars())
        return (Launch("elementwise", source(self), *grid_over(self.places), arguments, ROUNDING),)


def _is_read(select: Selection) -> bool:
    """Whether the indices are an operand's, so that they may be out of range, and not a table's."""
    return isinstance(select.indices, Leaf)


def elementwise(
    value: Value, dtype: DType, dims: Sequence[int], strides: Sequence[Sequence[int]]
) -> Elementwise:
    """Describe a kernel with one result. `strides`: the result's, then each operand's."""
    return describe_elementwise((Result(value, dtype),), (), dims, strides)


def describe_elementwise(
    results: Sequence[Result],
    body: Sequence[Expression],
    dims: Sequence[int],
    strides: Sequence[Sequence[int]],
    alignments: Sequence[int] = (),
    *,
    tables: Sequence[Table] = (),
) -> Elementwise:
    """Describe a kernel over `dims`.

    `strides`: the results' in elements, then the operands'. `alignments`: theirs in bytes; without
    alignments, a thread computes one element at a time.
    """
    strides = [*strides, *(table.steps for table in tables)]
    axes = merge_dims(dims, strides) or [(1, (0,) * len(strides))]
    made = Elementwise(
        results=tuple(results),
        body=tuple(body),
        dims=tuple(size for size, _ in axes),
        strides=tuple(tuple(steps[i] for _, steps in axes) for i in range(len(strides))),
        tables=tuple(table.indices for table in tables),
    )
    return msgspec.structs.replace(made, together=_together(made, alignments))


def _together(kernel: Elementwise, alignments: Sequence[int]) -> int:
    """The number of neighbours in the last axis that a thread can read and write at once."""
    apart = [(result.dtype, True, ()) for result in kernel.results] + [
        (leaf.dtype, kernel.selects_alike(leaf), (leaf.offset, *(select.step for select in leaf.selects)))
        for leaf in kernel.leaves()
    ]
    beside = [
        (dtype.itemsize, (*further, *steps), alignment)
        for (dtype, alike, further), steps, alignment in zip(apart, kernel.strides, alignments, strict=False)
        if steps[-1] == 1 and alike
    ]
    if not beside or any(steps[-1] != 1 for steps in kernel.strides[: len(kernel.results)]):
        return 1
    most = min(_MOST_TOGETHER, ACCESS_BYTES // min(size for size, _, _ in beside))

    def fits(count: int) -> bool:
        return (kernel.dims[-1] % count == 0 or len(kernel.dims) == 1) and all(
            alignment % min(ACCESS_BYTES, count * size) == 0 and all(step % count == 0 for step in steps[:-1])
            for size, steps, alignment in beside
        )

    return next((count for count in (8, 4, 2) if count <= most and fits(count)), 1)


def describe_copy(
    dtypes: tuple[DType, DType],
    dims: Sequence[int],
    strides: Sequence[Sequence[int]],
    alignments: Sequence[int],
) -> Elementwise:
    """Describe a copy, perhaps to another type. The parameters have the result's first, then the operand's.

    Bits are copied as words of up to 8 bytes.
    """
    to, of = dtypes
    axes = merge_dims(dims, strides)
    if axes and of is to and set(axes[-1][1]) == {1}:
        *slow, (size, last) = axes
        apart = [size, *(step for _, steps in slow for step in steps)]
        words = (
            (nbytes // of.itemsize, word)
            for nbytes, word in reversed(WORDS.items())
            if nbytes > of.itemsize and all(alignment % nbytes == 0 for alignment in alignments)
        )
        fitting = (pair for pair in words if all(step % pair[0] == 0 for step in apart))
        count, word = next(fitting, (1, of))
        axes = [*((n, tuple(step // count for step in steps)) for n, steps in slow), (size // count, last)]
        of = to = word
        dims, strides = [n for n, _ in axes], [[steps[t] for _, steps in axes] for t in range(2)]
    return describe_elementwise([Result(Leaf(0, of), to)], [], dims, strides, alignments)


def source(description: Elementwise) -> str:
    """The kernel in CUDA C++."""
    return Source(description).text()


class Source:
    """Generates the source of one kernel."""

    def __init__(self, kernel: Elementwise) -> None:
        self._kernel = kernel
        self._rank, self._together = len(kernel.dims), kernel.together
        self._walk = kernel.walk
        self._stored = [result.dtype for result in kernel.results]
        self._read = kernel.leaves()

    def text(self) -> str:
        """The source of the kernel as a launch of its own."""
        packs = PACK if self._together > 1 or self._kernel.reads_at_once > 1 else ""
        placed = PLACED if any(_is_read(select) for leaf in self._read for select in leaf.selects) else ""
        return f"""{PREAMBLE}{packs}{placed}{indexing(wide=self._kernel.wide)}
extern "C" __global__ void elementwise({", ".join(self.arguments())}) {{
    const long long stride = {ALL_THREADS}, last = i_count;
    const long long first = {THREAD};
    {self._loop()}
}}
"""

    def function(self, name: str) -> str:
        """The source as a device function, for a kernel that joins several.

        The function computes every `stride`-th pack from number `first` on, below `last`.
        """
        arguments = [f"const long long {name}" for name in ("first", "stride", "last")] + self.arguments()
        return f"""
struct {name} {{
    typedef {index_type(wide=self._kernel.wide)} I;
    static __device__ void run({", ".join(arguments)}) {{
    {self._loop()}
    }}
}};
"""

    def arguments(self) -> list[str]:
        """The C parameters."""
        arguments = [f"{C_TYPES[dtype]}* out{i}" for i, dtype in enumerate(self._stored)]
        arguments += [f"const {C_TYPES[leaf.dtype]}* in{leaf.number}" for leaf in self._read]
        arguments += [f"const int* table{number}" for number in range(len(self._kernel.tables))]
        arguments += [f"long long {name}" for name in self._kernel.numbers]
        return arguments + [f"double scalar{one.number}" for one in self._kernel.scalars()]

    def _loop(self) -> str:
        """A thread's C loops: over packs, and over the elements that remain."""
        several = self._kernel.reads_at_once > 1
        return f"""{self._several() if several else self._each()}
    {self._of_the_rest() if self._kernel.rest else ""}"""

    def _each(self) -> str:
        """The C loop that reads and stores one pack at a time."""
        number = place_type(wide=self._kernel.wide)
        return f"""#pragma unroll 1
    for ({number} i = ({number})first; i < ({number})last; i += ({number})stride) {{
        {self._body(self._together)}
    }}"""

    def _several(self) -> str:
        """The C loop that reads several packs before it stores them."""
        count, number = self._kernel.reads_at_once, place_type(wide=self._kernel.wide)
        results = [(i, f"Pack<{C_TYPES[dtype]}, {self._together}>") for i, dtype in enumerate(self._stored)]
        kept = " ".join(f"{pack} r{i}s[{count}]; I at{i}s[{count}];" for i, pack in results)
        stored = " ".join(f"*({pack}*)&out{i}[at{i}s[u]] = r{i}s[u];" for i, pack in results)
        ends = " ".join(f"r{i}s[u] = r{i}; at{i}s[u] = {self._walk.offset(f'out{i}')};" for i, _ in results)
        return f"""const {number} end = ({number})last, step = ({number})stride;
    #pragma unroll 1
    for ({number} begin = ({number})first; begin < end; begin += step * {count}) {{
        {kept}
        #pragma unroll
        for (int u = 0; u < {count}; ++u) {{
        const {number} i = min(begin + u * step, end - 1);
        {self._body(self._together, ends)}
        }}
        #pragma unroll
        for (int u = 0; u < {count}; ++u) if (begin + u * step < end) {{ {stored} }}
    }}"""

    def _of_the_rest(self) -> str:
        """The C loop over the elements that remain."""
        return f"""if (first == 0) for (long long i = i_count * {self._together}; i < all; ++i) {{
        {self._body(1)}
    }}"""

    def _body(self, together: int, ends: str = "") -> str:
        """The statements for pack number `i`. `ends`: statements that keep its results, instead of stores."""
        before, inside, after = self._accesses(together, packed=bool(ends))
        block = "\n            ".join([*inside, *self._element_statements(together, packed=bool(ends))])
        if ends:
            after = [ends]
        if together > 1 or ends:
            loop = f"#pragma unroll\n        for (int v = 0; v < {together}; ++v)"
            block = f"{loop} {{\n            {block}\n        }}"
        return "\n        ".join([self._walk.split("i", together), *before, block, *after])

    def _accesses(self, together: int, *, packed: bool) -> tuple[list[str], list[str], list[str]]:
        """The statements that access memory: before the loop over a pack's elements, in it, and behind it."""
        before: list[str] = []
        inside: list[str] = []
        after: list[str] = []
        self._elements: list[str] = []
        """The C expression of each operand's element."""
        for i, leaf in enumerate(self._read):
            tensor = self._kernel.tensor(leaf)
            step, alike = self._kernel.strides[tensor][-1], together > 1 and self._kernel.selects_alike(leaf)
            at = self._walk.offset(f"in{i}") + (f" + {leaf.offset}" if leaf.offset else "")
            if leaf.selects:
                (before if alike else inside).extend(self._selection_statements(leaf, together))
                at += f" + at{i}"
            place, filled = f"in{i}[{at}]", ""
            if leaf.filling is not None:
                value = literal(leaf.filling, value_type(leaf.dtype))
                filled = f"({C_TYPES[leaf.dtype]}){store(leaf.dtype, value)}"
            if alike and step == 1:
                pack = f"Pack<{C_TYPES[leaf.dtype]}, {together}>"
                read = f"*(const {pack}*)&{place}"
                before.append(f"const {pack} p{i} = {f'outside{i} ? {pack}() : ' if filled else ''}{read};")
                place = f"p{i}.of[v]"
            elif together > 1 and step:
                place = f"in{i}[{at} + v * (I)i{self._rank - 1}_in{i}]"
            if filled:
                place = f"(outside{i} ? {filled} : {place})"
            self._elements.append(place)
            to = before if alike and not step else inside
            to.append(f"const {value_type(leaf.dtype)} v{i} = {load(leaf.dtype, place)};")
        if together > 1 or packed:
            for i, dtype in enumerate(self._stored):
                pack = f"Pack<{C_TYPES[dtype]}, {together}>"
                before.append(f"{pack} r{i};")
                after.append(f"*({pack}*)&out{i}[{self._walk.offset(f'out{i}')}] = r{i};")
        return before, inside, after

    def _element_statements(self, together: int, *, packed: bool) -> list[str]:
        """The statements that compute one element of each result."""
        steps: list[str] = []
        known: dict[int, tuple[str, str]] = {}
        for n, node in enumerate(self._kernel.body):
            known[n] = value_of_expression(node, steps, known)
        for i, result in enumerate(self._kernel.results):
            value = result.value
            if isinstance(value, Leaf) and value.dtype is result.dtype:
                stored = self._elements[value.number]
            else:
                stored = store(result.dtype, formula(value, steps, known=known))
            target = f"r{i}.of[v]" if together > 1 or packed else f"out{i}[{self._walk.offset(f'out{i}')}]"
            steps.append(f"{target} = {stored};")
        return steps

    def _selection_statements(self, leaf: Leaf, together: int) -> list[str]:
        """The statements that define the offset that indices select in a leaf, and whether one is below 0."""
        statements, names = [], [f"index{leaf.number}_{n}" for n in range(len(leaf.selects))]
        for n, (name, select) in enumerate(zip(names, leaf.selects, strict=True)):
            index = f"(I)placed(v{select.indices.number}, size{leaf.number}_{n})"
            if not _is_read(select):
                tensor = self._kernel.tensor(select.indices)
                along = together > 1 and self._kernel.strides[tensor][-1]
                table = f"table{select.indices.number}"
                further = f" + v * (I)i{self._rank - 1}_{table}" if along else ""
                index = f"(I){table}[{self._walk.offset(table)}{further}]"
            statements.append(f"const I {name} = {index};")
        steps = (f"(I)step{leaf.number}_{n}" for n in range(len(names)))
        statements.append(f"const I at{leaf.number} = {offset_of(names, steps)};")
        if leaf.filling is not None:
            statements.append(f"const bool outside{leaf.number} = {' || '.join(f'{n} < 0' for n in names)};")
        return statements
