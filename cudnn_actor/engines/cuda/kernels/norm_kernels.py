"""Kernels of norms and of their gradients, with the pointwise operations around them.

They take any dtype, layout and strides. The elements that are normalised together
are a line (see `lines`). A line is reduced to its mean and the sum of the squared
distances from it, by running means, or to two sums. Then its elements are changed.
One kernel does both if there are enough lines. A few long lines are cut into parts:
one kernel reduces the parts, a second combines them, and a third changes the
elements. Where lines lie side by side, a thread takes as many of them as it reads
at a time. Sums are float32 (float64 of float64), and are added in a fixed order.

Pointwise operations before a norm are computed as its elements are read, in each
pass; those behind it as they are changed. There may be several results. These
values are computed and rounded as in `elementwise`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from cudnn_actor.engines.cuda.kernels.accumulators import MOMENTS, TWO_SUMS, Accumulator
from cudnn_actor.engines.cuda.kernels.element_types import ACCESS_BYTES, C_TYPES, load, store, value_type
from cudnn_actor.engines.cuda.kernels.expressions import Earlier, Expression, Leaf, Result, Scalar, Value
from cudnn_actor.engines.cuda.kernels.formulas import FORMULA_FUNCTIONS, formula, value_of_expression
from cudnn_actor.engines.cuda.kernels.kernel import MOST_THREADS, ROUNDING, THREADS, Launch, Pointer
from cudnn_actor.engines.cuda.kernels.lines import Form, Lines, Threads, beginning, lines_of
from cudnn_actor.engines.cuda.kernels.reduction_code import (
    COMBINING,
    OVER_COLUMNS,
    combined_parts,
    part_of_line,
    stored_part,
)
from cudnn_actor.protocol.types.dtypes import DType

__all__ = ["Norm", "NormKernels", "Normal", "Operand", "Pass", "launches_of", "workspace_of"]

_VALUES = 2
"""The numbers of a line with which its elements are changed."""


class Operand(NamedTuple):
    """A tensor as the kernels see it, with a stride of 0 in dims that it does not have.

    `whole`: it has an element for each of x's, and several are read or written at a time.
    """

    dtype: DType
    strides: tuple[int, ...]
    whole: bool
    written: bool


class Normal(msgspec.Struct, frozen=True, tag="normal"):
    """A value of a body: the norm's result for each element, not rounded.

    `operands`: the values of the norm's inputs of x's dims, in the order of its fields.
    """

    operands: tuple[Value, ...]


class Pass(NamedTuple):
    """A reduction of lines and the stores that follow it, as C expressions of elements and of a line's
    numbers.

    In them, `{name}` stands for an operand's value, `{state}` for the numbers to which a line was reduced,
    and `{low}` and `{high}` for the two numbers with which its elements are changed. `n0` to `n2` are the
    norm's numbers.

    Parameters
    ----------
    axes
        The dims along a line.
    moments
        The expression whose mean and squared distances are wanted; None if sums are wanted, or nothing.
    sums
        The two expressions whose sums are wanted; empty if nothing is reduced.
    values
        The expressions of the two numbers, `{low}` and `{high}`.
    results
        The expression that is stored once for each line, by operand.
    changed
        The expression of each element's result, in the last pass; None if the norm does not change elements.
    """

    axes: tuple[int, ...]
    moments: str | None = None
    sums: tuple[str, ...] = ()
    values: tuple[str, str] = ("(T)0", "(T)0")
    results: Mapping[str, str] = {}
    changed: str | None = None

    @property
    def reduces(self) -> bool:
        """Whether it has a reduction."""
        return self.moments is not None or bool(self.sums)


class Norm(NamedTuple):
    """A norm and the pointwise operations around it, as the kernels see them.

    Parameters
    ----------
    dims
        The dims of x; a dim may be split into two.
    operands
        The tensors by name, in the order of their addresses; the first is whole. The body's leaves are "in0",
        "in1", ...
    passes
        The passes in the order in which they run. The last one stores the results.
    compute
        The type of sums: float32 or float64.
    given
        The values of the norm's inputs of x's dims, by name.
    body
        The values that are computed of each element, in this order; `Earlier` has the index of one of them.
    results
        The result that is stored for each element, by operand.
    numbers
        Values of the kernels' parameters `n0`, `n1` and `n2`.
    scalars
        The plan's scalars that the kernels take.
    in_place
        Whether results may overwrite what is read at the same places.
    """

    dims: tuple[int, ...]
    operands: Mapping[str, Operand]
    passes: tuple[Pass, ...]
    compute: DType
    given: Mapping[str, Value]
    body: tuple[Expression | Normal, ...]
    results: Mapping[str, Result]
    numbers: tuple[float, float, float] = (0.0, 0.0, 0.0)
    scalars: tuple[Scalar, ...] = ()
    in_place: bool = False


def launches_of(norm: Norm) -> tuple[Launch, ...]:
    """The launches of a norm's kernels. Their tensors are its operands, and its workspace if it needs any."""
    passes = [NormKernels(norm, each) for each in norm.passes]
    workspace = Pointer(len(norm.operands)) if any(each.workspace for each in passes) else 0
    return tuple(launch for each in passes for launch in each.launches(workspace))


def workspace_of(norm: Norm) -> int:
    """Bytes of memory for the parts of lines, which one pass after the other uses."""
    return max(NormKernels(norm, each).workspace for each in norm.passes)


class NormKernels:
    """Generates the kernels of one pass."""

    def __init__(self, norm: Norm, one: Pass) -> None:
        self._norm, self._pass = norm, one
        self._places = {name: number for number, name in enumerate(norm.operands)}
        self._single, self.lines, self.width, self._apart = _beside(norm, one.axes)
        self._stores = bool(norm.results) and one is norm.passes[-1]

    @property
    def workspace(self) -> int:
        """Bytes for the parts of lines; 0 if lines are not cut."""
        if not self._is_cut:
            return 0
        compute = self._norm.compute
        numbers = _VALUES * compute.itemsize
        return self._single.total * (self.parts * self._accumulator.nbytes(compute) + numbers)

    @property
    def _accumulator(self) -> Accumulator:
        """The accumulator that a line is reduced to."""
        return TWO_SUMS if self._pass.moments is None else MOMENTS

    @property
    def parts(self) -> int:
        """The number of parts into which each line is cut."""
        if not self.lines.total or self.lines.parts() == 1:
            return 1
        return self.lines.parts(THREADS)  # smaller blocks, whose threads wait less for each other

    @property
    def _most(self) -> int:
        """The most threads of a block that has columns."""
        return THREADS if self.parts > 1 else MOST_THREADS

    @property
    def _is_cut(self) -> bool:
        """Whether lines are cut into parts."""
        return self._pass.reduces and self.parts > 1

    def launches(self, workspace: Pointer | int) -> Iterator[Launch]:
        """Yields the launches in order. `workspace`: any number if there is none."""
        norm, parts = self._norm, self.parts
        pointers = (*map(Pointer, range(len(norm.operands))), workspace)
        number: type[np.floating] = np.float64 if norm.compute is DType.FLOAT64 else np.float32
        numbers = tuple(map(number, norm.numbers))

        def launch(name: str, source: str, lines: Lines, threads: Threads, last: int) -> Launch:
            """The launch of a kernel. `last`: the packs of a part of a line, or the number of parts."""
            arguments = (*pointers, *lines.numbers.values(), *numbers, last, *norm.scalars)
            return Launch(name, source, *threads, arguments, ROUNDING)

        def of_lines(name: str, *steps: str) -> Launch:
            threads = self.lines.threads(parts, self._most)
            return launch(
                name, self._source(name, *steps), self.lines, threads, -(-self.lines.packs // parts)
            )

        of_line = (self._values(), self._results())
        if not self._is_cut:
            yield of_lines("whole", _RANGE, self._reduce(), *of_line, self._change())
            return
        yield of_lines("reduce", _RANGE, self._reduce(), _KEEP)
        one = self._single._replace(form=Form.WARP)
        combine = self._source("combine", _COMBINE, *of_line, _SAVE, lines=one)
        yield launch("combine", combine, one, one.threads(), parts)
        if self._stores:
            yield of_lines("change", _RANGE, _RESTORE, self._change())

    def _source(self, name: str, *steps: str, lines: Lines | None = None) -> str:
        """The source of a kernel that runs the steps for each line, or for each of `lines` if they are given.

        `lines` are single ones: a thread takes one at a time.
        """
        operands = self._norm.operands.items()
        pointers = [
            f"{'' if operand.written else 'const '}{C_TYPES[operand.dtype]}*{self._restrict(name)} {name}"
            for name, operand in operands
        ]
        width, lines = (self.width, self.lines) if lines is None else (1, lines)
        body = "\n        ".join([lines.base(self._places), self._of_lines(), *filter(None, steps)])
        last = ", T n0, T n1, T n2, long long last"
        last += "".join(f", double scalar{one.number}" for one in self._norm.scalars)
        computes = any(isinstance(node, Expression) for node in self._norm.body)
        return (
            beginning(self._norm.compute, wide=lines.wide)
            + f"constexpr int W = {width}, V = {lines.vector};\n"
            + (FORMULA_FUNCTIONS if computes else "")
            + self._accumulator.struct
            + COMBINING
            + OVER_COLUMNS
            + lines.kernel(name, ", ".join([*pointers, "State* parts"]), body, last, self._most)
        )

    def _restrict(self, name: str) -> str:
        """The C qualifier of a pointer; none if results may overwrite operands, as running statistics do."""
        return "" if self._norm.in_place or "running" in name else " __restrict__"

    # The steps of kernels.

    def _of_lines(self) -> str:
        """The statements that read the operands that have one element for each line."""
        names = [
            n for n, operand in self._norm.operands.items() if not operand.written and self._is_shared(n)
        ]
        if not names:
            return ""
        declared = " ".join(f"{self._kind(name)} {name}_of[W];" for name in names)
        reads = " ".join(
            f"{name}_of[s] = 0; "
            f"if (there) {name}_of[s] = {self._load(name, f'{name}_base + s * {self._apart[name]}')};"
            for name in names
        )
        return f"{declared}{_each(reads)}"

    def _reduce(self) -> str:
        """The statements that reduce a line, or a part of it, to `state`."""
        moments, sums = self._pass.moments, self._pass.sums
        if not self._pass.reduces:
            return ""
        element = _Element(self)
        if moments is not None:
            element.steps.append(f"taken[v] = {element.text(moments)};")
            take = _TAKE.format(element="\n                ".join(element.steps))
            loop = self._loop(element, "count += V; const T share = V / count;", take)
        else:
            element.steps.append(f"state[s].take({element.text(sums[0])}, {element.text(sums[1])});")
            loop = self._loop(element, "", element.of_each())
        total = _each(f"state[s] = over_{self.lines.form.value}(state[s]);")
        if self.lines.form is Form.COLUMN and self._is_cut:
            total = "over_columns<W>(state);"
        none = _each("state[s] = State::none();")
        return f"State state[W];{none}\n        T count = 0;\n        {loop}{total}"

    def _values(self) -> str:
        """The statements that compute the two numbers of a line, `low` and `high`."""
        low, high = map(self._of_line, self._pass.values)
        return f"T low[W], high[W];{_each(f'low[s] = {low}; high[s] = {high};')}"

    def _results(self) -> str:
        """The statements that store the results that have one element for each line."""
        stores = [
            f"{name}[{name}_base + s * {self._apart[name]}] = "
            f"{store(self._norm.operands[name].dtype, self._of_line(text))};"
            for name, text in self._pass.results.items()
            if name in self._norm.operands
        ]
        return f"if (there && lane == 0) {{{_each(' '.join(stores))} }}" if stores else ""

    def _change(self) -> str:
        """The statements that compute and store the results of elements."""
        if not self._stores:
            return ""
        element, changed = _Element(self), self._pass.changed
        if changed is not None:
            element.define(changed)
        before, after = [], []
        for name, (value, dtype) in ((n, (r.value, r.dtype)) for n, r in self._norm.results.items()):
            pack = f"Pack<{C_TYPES[dtype]}, V * W>"
            element.steps.append(f"{name}_new.of[s + v] = {store(dtype, element.value(value))};")
            before.append(f"{pack} {name}_new;")
            after.append(f"*({pack}*)({name} + {name}_at) = {name}_new;")
        return self._loop(element, " ".join(before), element.of_each(), " ".join(after))

    def _loop(self, element: _Element, before: str, body: str, after: str = "") -> str:
        """A C loop over the packs of a part of a line, with the reads of the operands that `element` uses."""
        names = [*element.names, *(self._norm.results if after else ())]
        operands = {name: self._norm.operands[name] for name in self._norm.operands if name in names}
        at = self.lines.at({name: self._places[name] for name in operands if not self._is_shared(name)})
        loads = " ".join(
            f"const {pack} of_{name} = *(const {pack}*)({name} + {name}_at);"
            for name, pack in ((name, self._pack(name)) for name in operands)
            if pack and not operands[name].written
        )
        return _LOOP.format(at=at, loads=loads, before=before, body=_each(body), after=after)

    # Values in C.

    def _is_shared(self, name: str) -> bool:
        """Whether an operand has one element for each line."""
        dims, (_, strides, whole, _) = self._norm.dims, self._norm.operands[name]
        return not whole and all(dims[axis] == 1 or strides[axis] == 0 for axis in self._pass.axes)

    def _pack(self, name: str) -> str:
        """The C type of the pack of an operand that is read at a time; empty for single elements."""
        operand, (*slow, last) = self._norm.operands[name], self.lines.along or ((1, ()),)
        kind, place, vector = C_TYPES[operand.dtype], self._places[name], self.lines.vector
        if operand.whole:
            return f"Pack<{kind}, V * W>"
        if vector == 1 or self.width > 1 or self._is_shared(name) or last[1][place] != 1:
            return ""
        aligned = all(steps[place] % vector == 0 for _, steps in (*slow, *self.lines.across))
        return f"Pack<{kind}, V>" if aligned else ""

    def _of_line(self, text: str) -> str:
        """The C expression of a line's number, from one of the pass's expressions."""
        names = {name: f"{name}_of[s]" for name in self._norm.operands if f"{{{name}}}" in text}
        return text.format(state="state[s]", low="low[s]", high="high[s]", **names)

    def _element(self, name: str) -> str:
        """The C expression of an operand's value at the element `v` of line `s`."""
        if self._pack(name):
            value = load(self._norm.operands[name].dtype, f"of_{name}.of[s + v]")
            return f"({self._kind(name)})({value})"
        if self._is_shared(name):
            return f"{name}_of[s]"
        if self.width > 1 or self.lines.vector == 1:
            return self._load(name, f"{name}_at + s * {self._apart[name]}")
        last = len(self.lines.along) - 1
        if not self.lines.along[last][1][self._places[name]]:
            return self._load(name, f"{name}_at")
        return self._load(name, f"{name}_at + v * e{last}_step{self._places[name]}")

    def _load(self, name: str, place: str) -> str:
        """The C expression of an operand's value at a place."""
        return f"({self._kind(name)})({load(self._norm.operands[name].dtype, f'{name}[{place}]')})"

    def _kind(self, name: str) -> str:
        """The C type of an operand's values: T, but for leaves of the body."""
        leaf = name.startswith("in") and name[2:].isdigit()
        return value_type(self._norm.operands[name].dtype) if leaf else "T"


class _Element:
    """Generates the statements that compute one element."""

    def __init__(self, kernels: NormKernels) -> None:
        self._kernels, self._norm = kernels, kernels._norm
        self.steps: list[str] = []
        self.names: set[str] = set()
        """The operands that are read."""
        self._known: dict[int, tuple[str, str]] = {}

    def of_each(self) -> str:
        """A C loop over the elements of a pack, with the statements so far."""
        return f"for (int v = 0; v < V; ++v) {{\n                {' '.join(self.steps)}\n            }}"

    def text(self, text: str) -> str:
        """The C expression of an element's value, from one of the pass's expressions. Notes what it reads."""
        names = {}
        for name in (*self._norm.given, *self._norm.operands):
            if f"{{{name}}}" not in text:
                continue
            if name in self._norm.given:
                names[name] = f"((T){self.value(self._norm.given[name])})"
            else:
                self.names.add(name)
                names[name] = self._kernels._element(name)
        return text.format(low="low[s]", high="high[s]", **names)

    def define(self, text: str) -> None:
        """Add the statement that computes the norm's result for the element, by an expression of the pass."""
        self.steps.append(f"const T normal = {self.text(text)};")
        place = next(n for n, node in enumerate(self._norm.body) if isinstance(node, Normal))
        self._known[place] = "normal", value_type(self._norm.compute)

    def value(self, value: Value) -> str:
        """The C expression of a value of the body. Adds the statements that it needs."""
        for n in sorted(self._expressions_to_compute([value])):
            node = self._norm.body[n]
            assert isinstance(node, Expression), "a norm is computed before what follows it"
            self._known[n] = value_of_expression(node, self.steps, self._known)
        return formula(value, self.steps, known=self._known)

    def _expressions_to_compute(self, values: Iterable[Value]) -> set[int]:
        """The indices of the expressions that must still be computed. Adds the reads of their leaves."""
        found: set[int] = set()
        waiting = list(values)
        while waiting:
            value = waiting.pop()
            if isinstance(value, Leaf):
                self._read(value)
            elif isinstance(value, Earlier) and not (value.number in self._known or value.number in found):
                found.add(value.number)
                node = self._norm.body[value.number]
                waiting += node.operands if isinstance(node, Expression) else ()
        return found

    def _read(self, leaf: Leaf) -> None:
        """Add the statement that reads a leaf, once."""
        name = f"in{leaf.number}"
        if name not in self.names:
            self.names.add(name)
            kind = value_type(leaf.dtype)
            self.steps.append(f"const {kind} v{leaf.number} = {self._kernels._element(name)};")


def _each(body: str) -> str:
    """A C loop over the lines that a thread takes at a time."""
    return f"\n        #pragma unroll\n        for (int s = 0; s < W; ++s) {{ {body} }}"


class _Beside(NamedTuple):
    """Lines of a norm, of which a thread takes several side by side at a time.

    Parameters
    ----------
    single
        The lines, one at a time.
    lines
        The same lines, with `width` of them side by side as one.
    width
        The number of lines that a thread takes at a time.
    apart
        The distance of two neighbouring lines in each operand, by name, in elements.
    """

    single: Lines
    lines: Lines
    width: int
    apart: Mapping[str, int]


def _beside(norm: Norm, axes: Sequence[int]) -> _Beside:
    """Describe the lines of a norm along these axes."""
    operands = norm.operands
    dtypes = [operand.dtype for operand in operands.values()]
    strides = [operand.strides for operand in operands.values()]
    whole = [number for number, operand in enumerate(operands.values()) if operand.whole]
    single = lines_of(norm.dims, strides, axes, dtypes, vectors=whole)
    width = ACCESS_BYTES // max(dtypes[number].itemsize for number in whole)
    several = single.form is Form.COLUMN and width > 1
    axis = _neighbours(norm.dims, [strides[n] for n in whole], axes, width) if several else None
    if axis is None:
        return _Beside(single, single, 1, dict.fromkeys(operands, 0))
    fewer = [size // width if n == axis else size for n, size in enumerate(norm.dims)]
    wider = [[step * width if n == axis else step for n, step in enumerate(of)] for of in strides]
    lines = lines_of(fewer, wider, axes, dtypes, vectors=())._replace(vector=1)
    return _Beside(single, lines, width, {name: of.strides[axis] for name, of in operands.items()})


def _neighbours(
    dims: Sequence[int], strides: Sequence[Sequence[int]], axes: Sequence[int], width: int
) -> int | None:
    """The first dim outside `axes` along which `width` lines lie side by side in all tensors, or None."""
    for axis, size in enumerate(dims):
        others = [n for n, other in enumerate(dims) if n != axis and other > 1]
        if axis in axes or size < 2 or size % width:
            continue
        if all(of[axis] == 1 and not any(of[n] % width for n in others) for of in strides):
            return axis
    return None


_TAKE = """T middle = 0, apart = 0, taken[V];
            for (int v = 0; v < V; ++v) {{
                {element}
                middle += taken[v];
            }}
            middle /= V;
            if (V > 1) for (int v = 0; v < V; ++v) {{
                const T d = taken[v] - middle;
                apart = fma(d, d, apart);
            }}
            state[s].take(middle, apart, V, share);"""
_RANGE = part_of_line("last", "V")
_LOOP = """#pragma unroll 2
        for (I p = begin + lane; p < end; p += lanes) {{
            const I j = p * V;
            {at}
            {loads} {before}{body}
            {after}
        }}"""
_LINE = "(line * W + s)"
"""The number of one of the lines that a thread takes at a time."""
_KEEP = f"if (there && lane == 0) {{{_each(f'{stored_part(_LINE)} = state[s];')} }}"
_COMBINE = "State state[W];" + _each(combined_parts("state[s]", _LINE, "last"))
_SAVE = f"""T* values = (T*)(parts + lines * W * last) + line * W * 2;
        if (lane == 0) {{{_each("values[s * 2] = low[s]; values[s * 2 + 1] = high[s];")} }}"""
_RESTORE = """const T* values = (const T*)(parts + lines * W * gridDim.y) + line * W * 2;
        T low[W], high[W];""" + _each(
    "low[s] = there ? values[s * 2] : (T)0; high[s] = there ? values[s * 2 + 1] : (T)0;"
)
