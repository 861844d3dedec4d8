"""Generates kernels for reductions, norms and softmaxes together with the pointwise operations around them.

A kernel goes over the lines of some tensors (see `lines`). A value is either one
number for each element of a line, or one for the whole line: the result of a
reduction, or a function of such results. The elements of a line are read once for
the reductions of the elements themselves, again for the reductions that need the
results of these, and a last time for the kernel's results. Short lines stay in
registers meanwhile, and so do the values of costly functions. Values are computed
and rounded as in `elementwise`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec

from cudnn_actor.engines.cuda.kernels.accumulators import accumulator_of
from cudnn_actor.engines.cuda.kernels.element_types import C_TYPES, load, store, value_type
from cudnn_actor.engines.cuda.kernels.expressions import (
    Earlier,
    Expression,
    Leaf,
    Result,
    Scalar,
    Value,
    scalars_of,
)
from cudnn_actor.engines.cuda.kernels.formulas import FORMULA_FUNCTIONS, formula, value_of_expression
from cudnn_actor.engines.cuda.kernels.kernel import ROUNDING, THREADS, Argument, Launch, Pointer
from cudnn_actor.engines.cuda.kernels.lines import Form, Lines, Threads, beginning, lines_of
from cudnn_actor.engines.cuda.kernels.reduction_code import COMBINING
from cudnn_actor.protocol.graphs.step_kinds import StepKind
from cudnn_actor.protocol.operations import PointwiseMode, ReductionMode
from cudnn_actor.protocol.types.dtypes import DType

__all__ = ["Lined", "Reduced", "describe_lined", "fits", "source"]

_MOST_HELD = 8
"""How many packs of all tensors together a thread keeps in registers."""
_M = PointwiseMode
_CHEAP = frozenset({_M.IDENTITY, _M.ABS, _M.NEG, _M.ADD, _M.SUB, _M.MUL, _M.MIN, _M.MAX, _M.SQUARE, _M.RELU})
_CHEAP |= {_M.EQ, _M.NE, _M.LT, _M.LE, _M.GT, _M.GE, _M.SELECT, _M.CLIP}
"""Functions that are computed again in each pass."""
_FEW_ELEMENTS, _LONG, _MANY_LINES = 1 << 16, 1 << 15, 256


class Reduced(msgspec.Struct, frozen=True, tag="reduced"):
    """A reduction of a value, its only operand, along the lines; not rounded."""

    mode: ReductionMode
    operands: tuple[Value, ...]


class Lined(msgspec.Struct, frozen=True, tag="lined"):
    """A kernel over lines, as data.

    Parameters
    ----------
    body
        The expressions and reductions that are computed, in this order; `Earlier` has the index of one of
        them.
    results
        The results that the kernel stores.
    operands
        The element types of the leaves, by number.
    compute
        The type of sums: float32 or float64.
    lines
        The lines of the operands, then of the results.
    """

    body: tuple[Expression | Reduced, ...]
    results: tuple[Result, ...]
    operands: tuple[DType, ...]
    compute: DType
    lines: Lines

    def scalars(self) -> tuple[Scalar, ...]:
        """The plan's scalars that it takes."""
        return scalars_of(self.body)

    def moves(self, tensor: int) -> bool:
        """Whether a tensor has an element for each element of a line."""
        return any(steps[tensor] for _, steps in self.lines.along)

    @property
    def packs_held(self) -> int:
        """The number of packs of each operand that stay in a thread's registers; 0 if passes read anew."""
        threads = 32 if self.lines.form is Form.WARP else self.threads().block[-1]
        fits = self._fits(threads) and any(isinstance(node, Reduced) for node in self.body)
        return -(-self.lines.packs // threads) if fits else 0

    def _fits(self, threads: int) -> bool:
        """Whether a line stays in the registers of `threads` threads."""
        inner = sum(map(self.moves, range(len(self.operands))))
        return -(-self.lines.packs // threads) * inner <= _MOST_HELD

    def threads(self) -> Threads:
        """Grid and block. They have enough threads to keep a line in their registers, if that is possible."""
        threads = self.lines.threads()
        match self.lines.form:
            case Form.BLOCK:
                sizes = (size for size in (256, 512, 1024) if size >= threads.block[0])
                return threads._replace(block=(next(filter(self._fits, sizes), threads.block[0]),))
            case Form.COLUMN:  # neighbouring lines for each warp; few threads have to wait for each other
                rows = next(filter(self._fits, (1, 2, 4, 8, 16, 32)), None)
                return threads if rows is None else self.lines.columns(max(32, THREADS // rows), rows)
            case _:
                return threads

    # `Kernel`. Its tensors are its operands, then its results.

    name = "lines"
    title = StepKind.LINES.step_name()

    @property
    def is_empty(self) -> bool:
        """Whether there are no elements."""
        return not self.lines.total

    @property
    def reads(self) -> range:
        """See `Kernel.reads`."""
        return range(len(self.operands))

    def launches(self) -> tuple[Launch, ...]:
        """The kernel's only launch."""
        pointers = map(Pointer, range(len(self.operands) + len(self.results)))
        arguments: tuple[Argument, ...] = (*pointers, *self.lines.numbers.values(), *self.scalars())
        return (Launch("lined", source(self), *self.threads(), arguments, ROUNDING),)


def describe_lined(
    body: Sequence[Expression | Reduced],
    results: Sequence[Result],
    operands: Sequence[DType],
    compute: DType,
    geometry: tuple[Sequence[int], Sequence[int], Sequence[Sequence[int]]],
) -> Lined:
    """Describe a kernel over lines.

    `geometry`: the dims, the axes of a line, and the strides of operands and results. The first operand has
    an element for each place of the dims, and its memory decides the form of the lines.
    """
    dims, axes, strides = geometry
    dtypes = (*operands, *(result.dtype for result in results))
    inner = [t for t, steps in enumerate(strides) if any(steps[axis] for axis in axes)]
    return Lined(
        body=tuple(body),
        results=tuple(results),
        operands=tuple(operands),
        compute=compute,
        lines=lines_of(dims, strides, axes, dtypes, vectors=inner),
    )


def source(description: Lined) -> str:
    """The kernel in CUDA C++."""
    return _Source(description).text()


class _Source:
    """Generates the source of one kernel."""

    def __init__(self, kernel: Lined) -> None:
        self._kernel, self._lines = kernel, kernel.lines
        count = len(kernel.operands)
        self._moves = [kernel.moves(t) for t in range(count + len(kernel.results))]
        self._names = [*(f"in{n}" for n in range(count)), *(f"out{n}" for n in range(len(kernel.results)))]
        self._single: list[bool] = []
        """Whether each value of the body is one number for the whole line."""
        self._level: list[int] = []
        """The number of reductions that must end, one after the other, before each value is known."""
        for node in kernel.body:
            level = max(map(self._level_of, node.operands), default=0)
            self._single.append(isinstance(node, Reduced) or all(map(self._is_single, node.operands)))
            self._level.append(level + isinstance(node, Reduced))
        self._passes = max(
            (
                level
                for node, level in zip(kernel.body, self._level, strict=True)
                if isinstance(node, Reduced)
            ),
            default=0,
        )
        self._known: dict[int, tuple[str, str]] = {}
        """Name and C type of the values that are known, by their index."""
        self._steps: list[str] = []
        """The statements that compute numbers of a line."""
        self._held = kernel.packs_held
        self._keeping = self._costly() if self._held else set()
        """The expressions of elements whose values stay in registers."""
        self._kept: set[int] = set()
        """The expressions of `_keeping` that have been computed."""

    def _level_of(self, value: Value) -> int:
        """The number of reductions that must end, one after the other, before a value is known."""
        return self._level[value.number] if isinstance(value, Earlier) else 0

    def _is_single(self, value: Value) -> bool:
        """Whether a value is one number for the whole line."""
        match value:
            case Earlier(number=number):
                return self._single[number]
            case Leaf(number=number):
                return not self._moves[number]
            case _:
                return True

    def _costly(self) -> set[int]:
        """The expressions of elements that call a costly function in more than one pass, by index."""
        return {
            n
            for n, node in enumerate(self._kernel.body)
            if isinstance(node, Expression)
            and not self._single[n]
            and self._level[n] < self._passes
            and node.mode not in _CHEAP
        }

    def _kind(self, n: int) -> str:
        """The C type of an expression's value."""
        node = self._kernel.body[n]
        assert isinstance(node, Expression)
        return value_type(node.dtype or node.compute)

    def text(self) -> str:
        """The source."""
        kernel, lines = self._kernel, self._lines
        reductions = [(n, node) for n, node in enumerate(kernel.body) if isinstance(node, Reduced)]
        states = "".join(
            f"namespace r{n} {{ {accumulator_of(node.mode, kernel.compute).struct} }}\n"
            for n, node in reductions
        )
        pointers = [f"const {C_TYPES[dtype]}* in{n}" for n, dtype in enumerate(kernel.operands)]
        pointers += [f"{C_TYPES[result.dtype]}* out{n}" for n, result in enumerate(kernel.results)]
        scalars = "".join(f", double scalar{one.number}" for one in kernel.scalars())
        body = "\n        ".join(self._body())
        start = beginning(kernel.compute, wide=lines.wide) + FORMULA_FUNCTIONS + states + COMBINING
        return start + lines.kernel("lined", ", ".join(pointers), body, scalars)

    def _body(self) -> Iterable[str]:
        """The statements for a line."""
        kernel, lines = self._kernel, self._lines
        yield lines.base({name: t for t, name in enumerate(self._names)})
        yield f"const I end = there ? (I)length / {lines.vector} : 0;"
        for n, dtype in enumerate(kernel.operands):
            if not self._moves[n]:
                yield f"{value_type(dtype)} v{n} = 0; if (there) v{n} = {load(dtype, f'in{n}[in{n}_base]')};"
        if self._held:
            yield from self._hold()
        yield from self._line_values(0)
        for level in range(self._passes):
            yield from self._reduce(level)
            yield from self._line_values(level + 1)
        elements = [n for n in range(len(kernel.results)) if self._moves[len(kernel.operands) + n]]
        if elements:
            yield from self._store(elements)
        stored = [
            f"out{n}[out{n}_base] = {self._stored_value(result, self._steps)};"
            for n, result in enumerate(kernel.results)
            if n not in elements
        ]
        if stored:
            yield f"if (there && lane == 0) {{ {' '.join(stored)} }}"

    def _inner(self) -> list[int]:
        """The operands with an element for each element of a line, by number."""
        return [n for n in range(len(self._kernel.operands)) if self._moves[n]]

    def _pack(self, dtype: DType) -> str:
        """The C type of a pack of elements."""
        return f"Pack<{C_TYPES[dtype]}, {self._lines.vector}>"

    def _hold(self) -> Iterable[str]:
        """The statements that read all elements of the line that a thread works on."""
        kernel, inner = self._kernel, self._inner()
        for n in inner:
            yield f"{self._pack(kernel.operands[n])} held{n}[{self._held}];"
        reads = " ".join(
            f"held{n}[k] = *(const {self._pack(kernel.operands[n])}*)(in{n} + in{n}_at);" for n in inner
        )
        yield f"{self._each_held()} {{ {self._lines.at({f'in{n}': n for n in inner})} {reads} }}"
        for n in sorted(self._keeping):
            yield f"{self._kind(n)} kept{n}[{self._held}][{self._lines.vector}];"

    def _each_held(self) -> str:
        """The head of a loop over the packs in registers."""
        return (
            f"#pragma unroll\n        for (int k = 0; k < {self._held}; ++k) "
            f"if (const I p = lane + k * lanes, j = p * {self._lines.vector}; p < end)"
        )

    def _line_values(self, level: int) -> Iterable[str]:
        """Yields the statements that compute the numbers of a line that are known after pass `level`."""
        start = len(self._steps)
        for n, node in enumerate(self._kernel.body):
            if isinstance(node, Expression) and self._single[n] and self._level[n] == level:
                self._compute(n, node, self._steps, self._known)
        yield from self._steps[start:]

    @staticmethod
    def _compute(n: int, node: Expression, steps: list[str], known: dict[int, tuple[str, str]]) -> None:
        """Add the statements of an expression, and note its C name and type."""
        known[n] = value_of_expression(node, steps, known)

    def _dependencies(self, values: Iterable[Value]) -> tuple[list[int], list[int]]:
        """The expressions of elements that values depend on, and the operands that these read, in order."""
        nodes: set[int] = set()
        leaves: set[int] = set()
        waiting = list(values)
        while waiting:
            value = waiting.pop()
            if isinstance(value, Leaf) and self._moves[value.number]:
                leaves.add(value.number)
            elif isinstance(value, Earlier) and not self._single[value.number] and value.number not in nodes:
                nodes.add(value.number)
                if value.number in self._kept:
                    continue
                node = self._kernel.body[value.number]
                assert isinstance(node, Expression), "a reduction is one number"
                waiting += node.operands
        return sorted(nodes), sorted(leaves)

    def _loop(self, values: Sequence[Value], results: Sequence[int]) -> tuple[str, list[str], list[str]]:
        """The parts of a C loop over packs that computes values.

        Returns its head, the statements for each element of a pack, and those for each pack before them.
        `results`: the numbers of the results that are written.
        """
        kernel, vector = self._kernel, self._lines.vector
        nodes, leaves = self._dependencies(values)
        tensors = {} if self._held else {f"in{n}": n for n in leaves}
        tensors |= {f"out{n}": len(kernel.operands) + n for n in results}
        before = [self._lines.at(tensors)] if tensors else []
        known, steps = dict(self._known), list(self._steps)
        start = len(steps)
        for n in sorted(self._kept & set(nodes)):
            kind = self._kind(n)
            steps.append(f"const {kind} u{n} = kept{n}[k][v];")
            known[n] = f"u{n}", kind
        for n in leaves:
            dtype, place = kernel.operands[n], f"held{n}[k]"
            if not self._held:
                pack = self._pack(dtype)
                before.append(f"const {pack} p{n} = *(const {pack}*)(in{n} + in{n}_at);")
                place = f"p{n}"
            steps.append(f"const {value_type(dtype)} v{n} = {load(dtype, f'{place}.of[v]')};")
        for n in nodes:
            node = kernel.body[n]
            assert isinstance(node, Expression)
            if n in self._kept:
                continue
            self._compute(n, node, steps, known)
            if n in self._keeping:
                steps.append(f"kept{n}[k][v] = {known[n][0]};")
                self._kept.add(n)
        self._here = known
        if self._held:
            return self._each_held(), steps[start:], before
        head = f"for (I p = lane; p < end; p += lanes) if (const I j = p * {vector}; true)"
        return head, steps[start:], before

    def _block(self, head: str, inside: Sequence[str], before: Sequence[str], behind: str) -> str:
        """A C loop over packs, with an inner loop over each pack's elements."""
        lines = "\n                ".join(inside)
        first = "\n            ".join(before)
        return f"""{head} {{
            {first}
            #pragma unroll
            for (int v = 0; v < {self._lines.vector}; ++v) {{
                {lines}
            }}
            {behind}
        }}"""

    def _reduce(self, level: int) -> Iterable[str]:
        """Yields the statements of pass `level` over the line, with which that level's reductions end."""
        kernel = self._kernel
        now = [
            (n, node)
            for n, node in enumerate(kernel.body)
            if isinstance(node, Reduced) and self._level[n] == level + 1
        ]
        for n, _ in now:
            yield f"r{n}::State s{n} = r{n}::State::none();"
        head, inside, before = self._loop([value for _, node in now for value in node.operands], [])
        takes = [
            f"s{n}.take({formula(node.operands[0], inside, 'T', self._here)}, j + v);" for n, node in now
        ]
        yield self._block(head, [*inside, *takes], before, "")
        for n, node in now:
            yield f"s{n} = over_{self._lines.form.value}(s{n});"
            result = accumulator_of(node.mode, kernel.compute).result.format(state=f"s{n}")
            kind = value_type(kernel.compute)
            yield f"const {kind} x{n} = {result};"
            self._known[n] = f"x{n}", kind

    def _stored_value(self, result: Result, steps: list[str]) -> str:
        """The C expression of a result's stored element."""
        return store(result.dtype, formula(result.value, steps, known=self._known))

    def _store(self, elements: Sequence[int]) -> Iterable[str]:
        """Yields the statements of the last pass, which writes the results of the line's elements."""
        results = self._kernel.results
        head, inside, before = self._loop([results[n].value for n in elements], elements)
        for n in elements:
            value = store(results[n].dtype, formula(results[n].value, inside, known=self._here))
            before.append(f"{self._pack(results[n].dtype)} r{n};")
            inside.append(f"r{n}.of[v] = {value};")
        writes = " ".join(f"*({self._pack(results[n].dtype)}*)(out{n} + out{n}_at) = r{n};" for n in elements)
        yield self._block(head, inside, before, writes)


def fits(dims: Sequence[int], axes: Sequence[int]) -> bool:
    """Whether one kernel is a good way to reduce lines: there are many lines, or few elements altogether."""
    length = math.prod(dims[axis] for axis in axes)
    elements = math.prod(dims)
    few = elements <= _FEW_ELEMENTS or (length <= _LONG and elements >= length * _MANY_LINES)
    return elements > 0 and few
