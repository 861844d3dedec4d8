"""A convolution computed directly from its definition, in double, at a sample of its result's elements.

One warp computes one element: its lanes share the channels, and the taps, too, if there are
fewer channels than lanes. So an index is taken apart once for each tap, not for each product.
Self-checks compare cuDNN's plans with it, so it is independent of layouts, tiles and cuDNN
engines. The definitions are those of `ConvSpec`; one or two spatial dims are extended to three.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import msgspec
import numpy as np

from cudnn_actor.engines.cuda.checking.comparison import (
    ROUNDING_DRAWS,
    Accuracy,
    Compared,
    compare_on_device,
    rounding_bound,
    sample,
)
from cudnn_actor.engines.cuda.kernels.axes import in_five, prepend_dims
from cudnn_actor.engines.cuda.kernels.element_types import C_TYPES, load, value_type
from cudnn_actor.engines.cuda.kernels.expressions import (
    Constant,
    Earlier,
    Expression,
    Leaf,
    Scalar,
    Value,
    expression,
)
from cudnn_actor.engines.cuda.kernels.formulas import PREAMBLE, formula, value_of_expression
from cudnn_actor.engines.cuda.kernels.index_code import THREAD, offset_of, split_all
from cudnn_actor.engines.cuda.kernels.kernel import AHEAD, WARP, Launch, power_of_two
from cudnn_actor.engines.cuda.kernels.reduction_code import LARGEST, over_lanes
from cudnn_actor.engines.cuda.kernels.window_code import covered_place, covering_window
from cudnn_actor.engines.cuda.library.libraries import libraries
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.graphs.remembering import remember
from cudnn_actor.protocol.operations import (
    Convolution,
    ConvolutionBackwardData,
    ConvolutionBackwardFilter,
    ConvolutionForward,
    GraphTensor,
    Pointwise,
    TensorRole,
)
from cudnn_actor.protocol.types.dtypes import DType

__all__ = ["Reference", "References", "references_of"]

_THREADS = 128
_MOST_PRODUCTS = 1 << 29
"""The most products summed up for one reference: a few milliseconds of work."""
_LEAST_SAMPLES, _MOST_SAMPLES = 512, 1 << 17
_RANK = 5
_MOST_SOURCES = 1 << 8
_sources: dict[Hashable, str] = {}
"""The sources of kernels by what they follow from. Any thread changes it, in one step each."""


@remember(1 << 7)
def references_of(graph: OperationGraph) -> References:
    """The references of a graph. A build asks for them twice, and their sources take a while to make."""
    return References(graph)


class References:
    """The correct values of all results of a graph, at a sample of their elements; see `Reference.covers`."""

    def __init__(self, graph: OperationGraph) -> None:
        self._graph = graph
        self._each = [Reference(graph, result) for result in graph.results]

    def launches(self) -> list[Launch]:
        """The launches of the references' kernels, to compile them ahead."""
        return [reference.launch for reference in self._each]

    def compare(self, address: Callable[[int], int], scalars: Sequence[float]) -> dict[int, Compared]:
        """Returns the elements to compare of each result, by uid. Blocks.

        `address` gives the address of each bound tensor.
        """
        computed = {reference.result: reference.compute(address, scalars) for reference in self._each}
        return {
            uid: compare_on_device(wanted, got, Accuracy.of(self._graph, uid))
            for uid, (wanted, got, _) in computed.items()
        }

    def uncertainties(self, address: Callable[[int], int], scalars: Sequence[float]) -> dict[int, np.ndarray]:
        """How far the elements that `compare` returns may be off, as operations magnify earlier roundings.

        Blocks. The parameters are those of `compare`.
        """
        return {reference.result: sample(reference.compute(address, scalars)[2]) for reference in self._each}


class Reference:
    """The correct values of one of a graph's results, at a sample of its elements.

    Parameters
    ----------
    graph
        One convolution and pointwise operations after it; see `covers`.
    result
        The result's uid.
    """

    def __init__(self, graph: OperationGraph, result: int) -> None:
        self._graph = graph
        (self._convolution,) = _convolutions(graph)
        self.result = result
        self._leaves: list[GraphTensor] = []
        self._body: list[Expression] = []
        self._values: dict[int, Value] = {}
        """The expressions of the tensors so far, by uid."""
        self._roundings: list[float] = []
        """The most that each expression of the body may be off by, relative to its value."""
        value = self._node(self.result)
        self._names = [*self._convolution.reads, *(leaf.uid for leaf in self._leaves)]
        self.source = self._source(value)
        """The kernel in CUDA C++."""
        total = math.prod(graph.tensor(self.result).dims)
        length = max(self.length, 1)
        self.samples = min(total, _MOST_SAMPLES, max(_LEAST_SAMPLES, _MOST_PRODUCTS // length))
        self._scalars = len(graph.scalars)

    @staticmethod
    def covers(graph: OperationGraph) -> bool:
        """Whether a reference can be computed for a graph."""
        others = [operation for operation in graph.operations if not isinstance(operation, Pointwise)]
        if len(others) != 1:
            return False
        (operation,) = others
        bound = all(graph.tensor(uid).role is TensorRole.BOUND for uid in operation.reads)
        dims = {graph.tensor(uid).dims for uid in (*operation.writes, *graph.results)}
        return isinstance(operation, Convolution) and bound and len(dims) == 1

    @property
    def launch(self) -> Launch:
        """The kernel's launch without arguments, to compile it ahead."""
        return Launch("reference", self.source, self._grid, (_THREADS,), ())

    @property
    def _grid(self) -> tuple[int]:
        """The grid: as many blocks as it takes to have a warp for each sample."""
        return (-(-self.samples * WARP // _THREADS),)

    @functools.cached_property
    def _kernel(self) -> Any:
        """CuPy's kernel. It is compiled at its first use, unless it was compiled ahead."""
        AHEAD.wait_for(self.launch)
        return libraries().cupy.RawKernel(self.source, "reference", options=("--std=c++17",))

    @property
    def length(self) -> int:
        """The number of products that are summed up for one element, those with padding included."""
        return math.prod(self._lengths())

    def _lengths(self) -> tuple[int, int]:
        """The number of taps of one element's sum, and the number of products of each tap.

        The sums of a filter's gradient are over places: the rows of all samples count as taps.
        """
        _, filters, y = (shape.dims for shape in self._shapes())
        taps = math.prod(filters[2:])
        if isinstance(self._convolution, ConvolutionForward):
            return taps, filters[1]
        if isinstance(self._convolution, ConvolutionBackwardData):
            return taps, filters[0] // self._convolution.conv.groups
        return y[0] * math.prod(y[2:-1]), y[-1]

    def compute(self, address: Callable[[int], int], scalars: Sequence[float]) -> Any:
        """Three rows of float64 on the device, of the sampled elements: wanted, got, uncertainty.

        An element's uncertainty is how far it may be off, because operations magnify earlier roundings.
        `address` gives the address of each bound tensor. Does not block.
        """
        cupy = libraries().cupy
        found = cupy.empty((3, self.samples), cupy.float64)
        pointers = [address(uid) for uid in self._names]
        numbers = [cupy.float64(scalars[i]) for i in range(self._scalars)]
        geometry = cupy.asarray(np.array([*self._numbers().values()], np.int64))
        arguments = (found, self.samples, geometry, address(self.result), *pointers, *numbers)
        self._kernel(self._grid, (_THREADS,), arguments)
        return found

    # The kernel.

    def _node(self, uid: int) -> Value:
        """The expression of a tensor; the convolution's own result is leaf 0."""
        if uid not in self._values:
            self._values[uid] = self._new_node(uid)
        return self._values[uid]

    def _new_node(self, uid: int) -> Value:
        """The expression of a tensor that has none yet. Adds the expressions that it is computed from."""
        writer = next((op for op in self._graph.operations if uid in op.writes), None)
        tensor = self._graph.tensor(uid)
        if isinstance(writer, Pointwise):
            # All is computed in double. Only integers are rounded in between, and not the result itself.
            own = self._graph.compute(writer)
            compute = DType.FLOAT64 if own.is_floating else own
            operands = tuple(self._node(uid) for uid in writer.operands)
            whole = uid != self.result and not tensor.dtype.is_floating
            self._body.append(expression(writer, operands, compute, tensor.dtype, used=whole))
            self._roundings.append(rounding_bound(own))
            return Earlier(len(self._body) - 1)
        if writer is not None:
            return Leaf(0, DType.FLOAT64)
        if tensor.role is TensorRole.SCALAR:
            return Scalar(self._graph.scalars.index(uid))
        if tensor.value is not None:
            return Constant(tensor.value)
        if tensor not in self._leaves:
            self._leaves.append(tensor)
        return Leaf(1 + self._leaves.index(tensor), tensor.dtype)

    def _numbers(self) -> dict[str, int]:
        """The geometry: the kernel's names for the numbers in its `g` array, in their order."""
        conv, out = self._convolution.conv, self._graph.tensor(self.result)
        lists = {name: in_five(of.dims, 1) for name, of in zip("xwy", self._shapes(), strict=True)}
        sizes = {"pre": (conv.pre_padding, 0), "stride": (conv.stride, 1), "dilation": (conv.dilation, 1)}
        lists |= {name: prepend_dims(of, 3, other) for name, (of, other) in sizes.items()}
        lists["s_out"] = in_five(out.strides, 0)
        for number, operand in enumerate(map(self._graph.tensor, self._names)):
            lists[f"s_{number}"] = in_five(operand.strides, 0) if number < 2 else _broadcast(operand, out)
        found = {f"{name}{axis}": value for name, of in lists.items() for axis, value in enumerate(of)}
        taps, length = self._lengths()
        lanes = min(WARP, power_of_two(length))
        return {"groups": conv.groups, "taps": taps, "length": length, "lanes": lanes, **found}

    def _shapes(self) -> tuple[GraphTensor, GraphTensor, GraphTensor]:
        """The convolution's x, w and y."""
        x, w, y = map(self._graph.tensor, self._convolution.of_shape)
        return x, w, y

    def _source(self, value: Value) -> str:
        """The source of the kernel that computes a value at sampled elements.

        It does not depend on sizes, so a network has few different ones, and they are kept. The key has the
        expressions as bytes, in which 0.0 and -0.0 differ.
        """
        dtypes = tuple(self._graph.tensor(uid).dtype for uid in (self.result, *self._names))
        steps = msgspec.msgpack.encode((value, self._body, self._roundings))
        key = type(self._convolution), dtypes, len(self._graph.scalars), steps
        source = _sources.get(key)
        if source is None:
            if len(_sources) >= _MOST_SOURCES:
                _sources.clear()
            source = _sources[key] = self._generated_source(value)
        return source

    def _generated_source(self, value: Value) -> str:
        """The kernel's source in CUDA C++."""
        out = self._graph.tensor(self.result)
        operands = [self._graph.tensor(uid) for uid in self._names]
        pointers = [f"const {C_TYPES[t.dtype]}* in{i}" for i, t in enumerate(operands)]
        arguments = ["double* found", "long long samples", "const long long* g"]
        arguments += [f"const {C_TYPES[out.dtype]}* result", *pointers]
        arguments += [f"double scalar{i}" for i in range(len(self._graph.scalars))]
        names = enumerate(self._numbers())
        geometry = "\n    ".join(f"const long long {name} = g[{i}];" for i, name in names)
        loads = [
            f"const {value_type(t.dtype)} v{i - 1} = {load(t.dtype, f'in{i}[{_offset(i, _ELEMENT)}]')};"
            for i, t in enumerate(operands)
            if i >= 2
        ]
        shape, body = _BODIES[type(self._convolution)]
        steps: list[str] = []
        known: dict[int, tuple[str, str]] = {}
        for n, (node, share) in enumerate(zip(self._body, self._roundings, strict=True)):
            name, kind = value_of_expression(node, steps, known)
            if kind == "double":
                steps.append(f"const double r{n} = rounded_off({name}, {share!r}, sample, {n}, draw);")
                name = f"r{n}"
            known[n] = name, kind
        final = formula(value, steps, known=known)
        return _TEMPLATE.format(
            preamble=PREAMBLE,
            arguments=", ".join(arguments),
            geometry=geometry,
            total=" * ".join(f"{shape}{i}" for i in range(_RANK)),
            decode=split_all("rest", [(f"i{i}", f"{shape}{i}") for i in reversed(range(_RANK))]),
            body=body.format(
                a=load(operands[0].dtype, "in0[a + l * a_step]"),
                b=load(operands[1].dtype, "in1[b + l * b_step]"),
            ),
            loads="\n        ".join(loads),
            draws=ROUNDING_DRAWS,
            thread=THREAD,
            warp=WARP,
            sums=over_lanes("sum"),
            farthest=over_lanes("off", LARGEST),
            steps="\n            ".join(steps),
            final=final,
            got=load(out.dtype, f"result[{_offset('out', _ELEMENT)}]"),
        )


_ELEMENT = [f"i{axis}" for axis in range(_RANK)]
"""The C names of a result's indices."""


def _offset(tensor: int | str, indices: Sequence[str]) -> str:
    """The C expression of an element's offset in a tensor."""
    return offset_of(indices, (f"s_{tensor}{axis}" for axis in range(_RANK)))


_TEMPLATE = """{preamble}
typedef long long I;
// A value off by a share of itself: by 0, away from 0, towards it, then at random.
__device__ double rounded_off(double value, double share, unsigned long long sample, int step, int draw) {{
    if (draw == 0 || value - value != 0) return value;  // or not finite
    if (draw <= 2) return value + value * (draw == 1 ? share : -share);
    unsigned long long bits = (sample * 64 + step) * 64 + draw;
    bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9ull;
    bits = (bits ^ (bits >> 27)) * 0x94d049bb133111ebull;
    return value + value * (bits >> 63 ? share : -share);
}}
extern "C" __global__ void reference({arguments}) {{
    {geometry}
    const long long x_channels = x1 / groups, y_channels = y1 / groups;
    const long long total = {total};
    const long long thread = {thread}, lane = thread % {warp};
    const unsigned long long sample = thread / {warp};
    if (sample >= samples) return;  // the whole warp
    // Every element if all are sampled; else the first, the last, and others picked by a multiplicative hash.
    long long rest = samples == total ? (long long)sample
        : sample == 0 ? 0 : sample == 1 ? total - 1
        : (long long)((sample * 11400714819323198485ull) % (unsigned long long)total);
    {decode}
    double sum = 0;
    for (long long tap = lane / lanes; tap < taps; tap += {warp} / lanes) {{
        I left = tap;
        {body}
    }}
    {sums}
    const double v0 = sum;
    {loads}
    double wanted = 0, off = 0;
    // Each lane computes what is wanted, and then with roundings of its own.
    for (int turn = 0; turn < 2; ++turn) {{
        const int draw = turn && lane <= {draws} ? (int)lane : 0;
        {steps}
        const double value = {final};
        if (turn == 0) wanted = value;
        if (value == wanted || (value != value && wanted != wanted)) continue;
        const double distance = fabs(value - wanted);
        off = distance - distance == 0 ? distance : (double)__int_as_float(0x7f800000);
    }}
    {farthest}
    if (lane == 0) {{
        found[sample] = wanted;
        found[samples + sample] = (double){got};
        found[2 * samples + sample] = off;
    }}
}}
"""


def _statements_of_dims(statements: Callable[[int], str]) -> str:
    """The C statements of all spatial dims, one after the other."""
    return " ".join(map(statements, range(3)))


_BODIES: dict[type, tuple[str, str]] = {
    ConvolutionForward: (
        "y",
        f"""{split_all("left", [("t2", "w4"), ("t1", "w3"), ("t0", "w2")])}
        {_statements_of_dims(lambda n: covered_place(f"p{n}", f"i{n + 2}", f"t{n}", n, f"x{n + 2}"))}
        const I channel = i1 / y_channels * x_channels, a_step = s_01, b_step = s_11;
        const I a = {_offset(0, ("i0", "channel", "p0", "p1", "p2"))};
        const I b = {_offset(1, ("i1", "0", "t0", "t1", "t2"))};
        for (I l = lane % lanes; l < length; l += lanes) sum += (double){{a}} * (double){{b}};""",
    ),
    ConvolutionBackwardData: (
        "x",
        f"""{split_all("left", [("t2", "w4"), ("t1", "w3"), ("t0", "w2")])}
        const I k = i1 / x_channels * y_channels, a_step = s_01, b_step = s_10;
        {_statements_of_dims(lambda n: covering_window(f"q{n}", f"i{n + 2}", f"t{n}", n, f"y{n + 2}"))}
        const I a = {_offset(0, ("i0", "k", "q0", "q1", "q2"))};
        const I b = {_offset(1, ("k", "i1 % x_channels", "t0", "t1", "t2"))};
        for (I l = lane % lanes; l < length; l += lanes) sum += (double){{a}} * (double){{b}};""",
    ),
    ConvolutionBackwardFilter: (
        "w",
        f"""{split_all("left", [("o1", "y3"), ("o0", "y2"), ("n", "y0")])}
        {covered_place("p0", "o0", "i2", 0, "x2")} {covered_place("p1", "o1", "i3", 1, "x3")}
        const I first = i4 * dilation2 - pre2, a_step = stride2 * s_04, b_step = s_14;
        const I channel = i0 / y_channels * x_channels + i1;
        const I a = {_offset(0, ("n", "channel", "p0", "p1", "first"))};
        const I b = {_offset(1, ("n", "i0", "o0", "o1", "0"))};
        for (I l = lane % lanes; l < length; l += lanes) {{{{
            const I p2 = first + l * stride2;
            if (p2 >= 0 && p2 < x4) sum += (double){{a}} * (double){{b}};
        }}}}""",
    ),
}
"""By the class of a convolution: the letter of the operand that has the result's dims, and the C statements
that add a tap's products to `sum`."""


def _convolutions(graph: OperationGraph) -> list[Convolution[int]]:
    """The convolutions of a graph."""
    return [operation for operation in graph.operations if isinstance(operation, Convolution)]


def _broadcast(tensor: GraphTensor, to: GraphTensor) -> list[int]:
    """A tensor's strides over the dims of another one: 0 where it has one element."""
    dims, wanted, strides = in_five(tensor.dims, 1), in_five(to.dims, 1), in_five(tensor.strides, 0)
    return [
        0 if own == 1 and size != 1 else stride
        for own, size, stride in zip(dims, wanted, strides, strict=True)
    ]
