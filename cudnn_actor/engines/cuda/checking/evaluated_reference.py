"""The correct results of any graph: its operations' definitions, in double.

Small graphs are computed on the host: on the device, CuPy compiles each of its functions at the first use,
which takes seconds on a new machine. Of large products, evenly spaced rows and columns are computed.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from cudnn_actor.engines.cpu.exact.evaluation import NumPy, exact, round_into
from cudnn_actor.engines.cuda.checking.comparison import (
    ROUNDING_DRAWS,
    Accuracy,
    Compared,
    compare_on_device,
    rounding_bound,
    sample,
)
from cudnn_actor.engines.cuda.checking.self_check_memory import draw_array
from cudnn_actor.engines.cuda.kernels.elementwise import elementwise
from cudnn_actor.engines.cuda.kernels.expressions import Leaf
from cudnn_actor.engines.cuda.kernels.index_code import INDEXING, division
from cudnn_actor.engines.cuda.kernels.kernel import Launch, compile_run, grid_over
from cudnn_actor.engines.cuda.library.libraries import TO_DEVICE, TO_HOST, libraries
from cudnn_actor.engines.cuda.operations import IMPLEMENTATIONS
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.operations import (
    GraphTensor,
    MatMul,
    Node,
    Pointwise,
    Reduction,
    ReductionMode,
    TensorRole,
)
from cudnn_actor.protocol.operations.base import Array, Region
from cudnn_actor.protocol.types.dtypes import DType
from cudnn_actor.protocol.types.tensor import packed_nbytes, packed_strides

__all__ = [
    "EvaluatedReference",
    "Evaluator",
    "OnDevice",
    "OnHost",
    "OnHostInPart",
    "device_evaluator",
    "evaluate_graph",
    "evaluator_of",
    "first_byte",
    "kernels_of_evaluation",
    "product_kernel",
    "result_uncertainties",
    "sample_graph",
    "small_part",
]

_MOST_ELEMENTS, _COPIES = 1 << 30, 10
"""The most elements of all tensors together, and how many copies of them as double the device may hold."""
_MOST_PLACES, _LEAST_PLACES = 1 << 12, 16
"""The most and the fewest places of each dim of a result that are evaluated where all are too many."""
_FEW_ELEMENTS, _LITTLE_WORK = 1 << 20, 1 << 22
"""A graph with fewer elements in its tensors, and less work (see `Operation.work`), is computed on the host:
that takes some milliseconds to 0.1 s, as long as CuPy takes to compile one function."""
_FEW_ANYWAY = 1 << 17
"""A graph with no more elements is computed on the host, however much work it is."""
_WORK_IN_PART, _ELEMENTS_IN_PART = 1 << 21, 1 << 18
_MOST_WORK_IN_PART, _MOST_ELEMENTS_IN_PART = 1 << 26, 1 << 22
"""Of a larger graph, the host computes a part: the work and the elements that the part is to have, and the
most that it may have if no part is that small."""
_MOST_COPIED = 1 << 26
"""The most elements of a graph of which a part is evaluated on the host. The elements between those of the
part are copied, too."""
_MOST_SAMPLED = 256
"""How many results of `sample_graph` are remembered: a build asks for the same one several times."""
_FORMS = ((_LEAST_PLACES, _MOST_PLACES, None), (1, _MOST_PLACES, 1), (_LEAST_PLACES, 1, 2))
"""The forms of parts of graphs. Each has the fewest places of a dim, the most places of the first dim, and
how many dims of a result are cut, None for all. A part has the first form in which it is small enough."""
_SELECTED = (ReductionMode.MAX, ReductionMode.MIN, ReductionMode.ABSOLUTE_MAX)
"""Modes of reductions that round nothing."""


class CuPy:
    """CuPy, with the functions of `cupyx` that operations' definitions call."""

    def __getattr__(self, name: str) -> Any:
        special = name in ("erf", "erfc")  # imported late: few graphs need it
        return getattr(importlib.import_module("cupyx.scipy.special") if special else libraries().cupy, name)


class OwnProducts(CuPy):
    """CuPy with products of matrices of float64 by a kernel of our own: cuBLAS is not to judge itself."""

    @staticmethod
    def matmul(a: Array, b: Array) -> Array:
        """The product as CuPy's `matmul` gives it, of operands with at least two dims."""
        cupy = libraries().cupy
        (*of_a, m, k), (*of_b, _, n) = a.shape, b.shape
        dims = np.broadcast_shapes(tuple(of_a), tuple(of_b))
        numbers = (np.arange(math.prod(of)).reshape(of) for of in (of_a, of_b))
        places = [np.broadcast_to(each, dims).ravel() for each in numbers]
        y = cupy.empty((*dims, m, n), np.float64)
        operands = (cupy.ascontiguousarray(each) for each in (a, b))
        product_kernel()(*grid_over(y.size), (*operands, y, *map(cupy.asarray, places), y.size, m, n, k))
        return y


@functools.cache
def product_kernel() -> Any:
    """The kernel of products of matrices, compiled once."""
    return libraries().cupy.RawKernel(INDEXING + _PRODUCT, "product", options=("--std=c++17",))


_PRODUCT = f"""
extern "C" __global__ void product(
    const double* a, const double* b, double* y, const long long* of_a, const long long* of_b,
    long long count, long long m, long long n, long long k) {{
    EACH(i, count) {{
        long long batch = i;
        {division("column", "batch", "n", kind="long long")}
        {division("row", "batch", "m", kind="long long")}
        const double* in_row = a + (of_a[batch] * m + row) * k;
        const double* in_column = b + of_b[batch] * k * n + column;
        double sum = 0;
        for (long long l = 0; l < k; ++l) sum += in_row[l] * in_column[l * n];
        y[i] = sum;
    }}
}}
"""


class OnDevice:
    """Evaluates graphs on the device. Values are packed arrays of CuPy's, of the types that `exact` gives."""

    xp = CuPy()
    most_work = 1 << 36
    """The most work that is evaluated, as `Operation.work` counts it."""
    most_elements = _MOST_ELEMENTS
    """The most elements of all tensors that are evaluated."""

    @staticmethod
    def draw(dims: tuple[int, ...], seed: int) -> Array:
        """Random whole numbers from -3 to 4, as float64."""
        return draw_array(dims, seed)

    elements_to_compare = staticmethod(compare_on_device)

    @staticmethod
    def store(values: Array, tensor: GraphTensor, address: int) -> None:
        """Enqueue a kernel that rounds values into a tensor's memory."""
        values = libraries().cupy.ascontiguousarray(values)
        kind = DType.of(values.dtype)
        assert kind is not None
        strides = [tensor.strides, packed_strides(tensor.dims)]
        run = compile_run(elementwise(Leaf(0, kind), tensor.dtype, tensor.dims, strides).launches())
        run((address, int(values.data.ptr)), ())

    @staticmethod
    def load(tensor: GraphTensor, address: int) -> Array:
        """Returns a tensor's values."""
        kind = _kind(tensor)
        values = libraries().cupy.empty(tensor.dims, kind.numpy)
        kernel = elementwise(Leaf(0, tensor.dtype), kind, tensor.dims, _load_strides(tensor))
        run = compile_run(kernel.launches())
        run((int(values.data.ptr), address), ())
        return values

    @classmethod
    def round(cls, values: Array, tensor: GraphTensor) -> Array:
        """Returns the values that are read after a tensor has stored these."""
        if values.dtype == tensor.dtype.numpy:
            return values
        stored = libraries().cupy.empty(tensor.spec.nbytes, np.uint8)
        cls.store(values, tensor, int(stored.data.ptr))
        return cls.load(tensor, int(stored.data.ptr))


def _kind(tensor: GraphTensor) -> DType:
    """The type of a tensor's values on the device."""
    if tensor.dtype is DType.UINT64:
        return DType.UINT64
    return DType.FLOAT64 if tensor.dtype.is_floating else DType.INT64


def _load_strides(tensor: GraphTensor) -> list[tuple[int, ...]]:
    return [packed_strides(tensor.dims), tensor.strides]


class OnDeviceApart(OnDevice):
    """Like `OnDevice`, but a kernel of our own computes matrix products, which takes longer than cuBLAS."""

    xp = OwnProducts()
    most_work = 1 << 33


class OnHost:
    """Evaluates graphs on the host. Values are NumPy's arrays. Each copy waits for the stream."""

    xp = NumPy()
    most_work = OnDevice.most_work
    most_elements = _MOST_ELEMENTS

    @staticmethod
    def draw(dims: tuple[int, ...], seed: int) -> Array:
        """Random whole numbers from -3 to 4, as float64."""
        return np.random.default_rng(seed).integers(-3, 5, dims, np.int8).astype(np.float64)

    @staticmethod
    def elements_to_compare(wanted: Array, got: Array, accuracy: Accuracy) -> Compared:
        """The elements to compare: a sample of both."""
        del accuracy
        return sample(wanted), sample(got)

    @classmethod
    def store(cls, values: Array, tensor: GraphTensor, address: int) -> None:
        """Round values into a tensor's memory. The bytes between its elements stay as they are.

        Where two floats are equally near, either may be stored: finding the even one takes a few times as
        long.
        """
        packed = packed_nbytes(tensor.spec) == tensor.spec.nbytes
        data = np.empty(tensor.spec.nbytes, np.uint8) if packed else cls._bytes_of(tensor, address)
        if tensor.dtype.is_floating:
            _elements(data, tensor)[...] = values
        else:
            round_into(values, tensor.dtype, _elements(data, tensor))
        stream = libraries().cupy.cuda.get_current_stream()
        libraries().runtime.memcpyAsync(address, data.ctypes.data, data.nbytes, TO_DEVICE, stream.ptr)
        stream.synchronize()

    @classmethod
    def load(cls, tensor: GraphTensor, address: int) -> Array:
        """Returns a tensor's values."""
        return exact(_elements(cls._bytes_of(tensor, address), tensor))

    @staticmethod
    def _bytes_of(tensor: GraphTensor, address: int) -> np.ndarray:
        """Returns the bytes of a tensor, copied from the device."""
        data = np.empty(tensor.spec.nbytes, np.uint8)
        stream = libraries().cupy.cuda.get_current_stream()
        libraries().runtime.memcpyAsync(data.ctypes.data, address, data.nbytes, TO_HOST, stream.ptr)
        stream.synchronize()
        return data

    @staticmethod
    def round(values: Array, tensor: GraphTensor) -> Array:
        """Returns the values that are read after a tensor has stored these."""
        stored = np.empty(tensor.dims, tensor.dtype.numpy)
        round_into(values, tensor.dtype, stored)
        return exact(stored)


class OnHostInPart(OnHost):
    """Like `OnHost`, but evaluates only a part of a graph, for which the host needs a moment."""

    most_work, most_elements = _WORK_IN_PART, _ELEMENTS_IN_PART


def _elements(data: np.ndarray, tensor: GraphTensor) -> np.ndarray:
    """A view of a tensor's elements in its bytes."""
    steps = [stride * tensor.dtype.itemsize for stride in tensor.strides]
    return np.lib.stride_tricks.as_strided(data.view(tensor.dtype.numpy), tensor.dims, steps)


_Sampled = tuple[OperationGraph, Mapping[int, Region]]
Evaluator = type[OnDevice] | type[OnHost]
"""A class that evaluates graphs, on the device or on the host."""


def evaluator_of(graph: OperationGraph, *, ready: bool = True) -> Evaluator:
    """The class that evaluates a graph: on the host if it has few values.

    While the device is not `ready`, the host evaluates a small part of the graph, if there is one, because
    CuPy would first compile the functions.
    """
    if _elements_of(graph) <= _FEW_ANYWAY or not _exceeds(graph, _LITTLE_WORK, _FEW_ELEMENTS):
        return OnHost
    may_copy = not ready and _elements_of(graph) <= _MOST_COPIED
    if may_copy and not _exceeds(small_part(graph), _MOST_WORK_IN_PART, _MOST_ELEMENTS_IN_PART):
        return OnHostInPart
    return device_evaluator(graph)


def small_part(graph: OperationGraph) -> OperationGraph:
    """The part of a graph that is evaluated on the host: all of it if its operations allow no part."""
    return sample_graph(graph, _WORK_IN_PART, _ELEMENTS_IN_PART)[0]


def device_evaluator(graph: OperationGraph) -> type[OnDevice]:
    """The class that evaluates a graph on the device."""
    double = (graph.compute(op) is DType.FLOAT64 for op in graph.operations if isinstance(op, MatMul))
    return OnDeviceApart if any(double) else OnDevice


def kernels_of_evaluation(graph: OperationGraph, evaluator: Evaluator) -> Iterator[Launch]:
    """Yields the launches that load the tensors of a graph for an evaluation on the device."""
    if issubclass(evaluator, OnHost):
        return
    for uid in graph.bound:
        tensor = graph.tensor(uid)
        kernel = elementwise(Leaf(0, tensor.dtype), _kind(tensor), tensor.dims, _load_strides(tensor))
        yield from kernel.launches()


def _elements_of(graph: OperationGraph) -> int:
    """The number of elements of all tensors of a graph together."""
    return sum(math.prod(tensor.dims) for tensor in graph.tensors)


class EvaluatedReference:
    """A graph's results, or a part of them, by `Operation.evaluate`. `within_room` makes one.

    Parameters
    ----------
    graph
        The graph.
    evaluator
        The class that evaluates it.
    part, regions
        The part of the graph that is evaluated: see `sample_graph`.
    """

    def __init__(
        self, graph: OperationGraph, evaluator: Evaluator, part: OperationGraph, regions: Mapping[int, Region]
    ) -> None:
        self._graph = graph
        self._evaluator = evaluator
        self._part, self._regions = part, regions

    @classmethod
    def within_room(cls, graph: OperationGraph, evaluator: Evaluator) -> EvaluatedReference | None:
        """The reference of a graph by an evaluator; None if the device has not enough free memory for it."""
        room = _room()
        part, regions = sample_graph(graph, evaluator.most_work, min(evaluator.most_elements, room))
        return cls(graph, evaluator, part, regions) if _elements_of(part) <= room else None

    def compare(self, address: Callable[[int], int], scalars: Sequence[float]) -> dict[int, Compared]:
        """The elements to compare of each result, by uid. Blocks.

        An operation that reads a result is evaluated on the result that the plan has stored. Else a result
        that the plan has rounded to the other side of 0 would make the results behind it look wrong.
        `address` gives the address of each bound tensor. Raises CuPy's `OutOfMemoryError`.
        """
        wanted = self._evaluated_results(address, scalars)
        return {
            uid: self._evaluator.elements_to_compare(
                values, self._load(uid, address), Accuracy.of(self._graph, uid)
            )
            for uid, values in wanted.items()
        }

    def uncertainties(self, address: Callable[[int], int], scalars: Sequence[float]) -> dict[int, np.ndarray]:
        """The `result_uncertainties` of the elements that `compare` returns. Blocks.

        The parameters are those of `compare`.
        """
        wanted = self._evaluated_results(address, scalars)
        found = result_uncertainties(
            self._part, self._evaluator, lambda uid: self._load(uid, address), scalars, wanted
        )
        return {uid: sample(values) for uid, values in found.items()}

    def _evaluated_results(self, address: Callable[[int], int], scalars: Sequence[float]) -> dict[int, Array]:
        """Evaluates the part, and returns its results."""
        return evaluate_graph(
            self._part, self._evaluator, lambda uid: self._load(uid, address), scalars, stored=True
        )

    def _load(self, uid: int, address: Callable[[int], int]) -> Array:
        """Returns the values of a bound tensor, as far as they belong to the part."""
        whole, part = self._graph.tensor(uid), self._part.tensor(uid)
        return self._evaluator.load(part, address(uid) + first_byte(whole, self._regions.get(uid)))


def evaluate_graph(
    graph: OperationGraph,
    evaluator: Evaluator,
    load: Callable[[int], Array],
    scalars: Sequence[float],
    *,
    stored: bool = False,
    draw: int | None = None,
) -> dict[int, Array]:
    """A graph's results, not rounded to their dtypes.

    `load` gives the values of bound tensors. Results are loaded only if `stored`: then operations that read
    them get the stored values. `draw`: the number of an evaluation with other roundings; None without them.
    """
    xp, values, found = evaluator.xp, graph.given_values(evaluator.xp, scalars), dict[int, Array]()
    seeds = itertools.count(draw or 0, ROUNDING_DRAWS)
    with np.errstate(all="ignore"):
        for operation in graph.operations:
            values |= {uid: load(uid) for uid in operation.reads if uid not in values}
            results = graph.evaluate(xp, operation, values)
            errors = {} if draw is None else _errors(graph, xp, operation, values, results)
            for uid, result in results.items():
                if uid in errors:
                    error = xp.where(xp.isfinite(errors[uid]), errors[uid], 0.0)
                    if draw == 1:
                        error = -error
                    elif draw:
                        error = xp.where(evaluator.draw(result.shape, next(seeds)) > 0, error, -error)
                    result = result + error  # noqa: PLW2901 - the result of this draw
                tensor = graph.tensor(uid)
                bound = tensor.role is TensorRole.BOUND
                values[uid] = load(uid) if bound and stored else evaluator.round(result, tensor)
                if bound:
                    found[uid] = result
    return found


def result_uncertainties(
    graph: OperationGraph,
    evaluator: Evaluator,
    load: Callable[[int], Array],
    scalars: Sequence[float],
    wanted: Mapping[int, Array],
) -> dict[int, Array]:
    """How far each element of the results may be off, because operations magnify earlier roundings.

    This is Monte Carlo arithmetic (D. S. Parker, 1997): the graph is evaluated several times more, with other
    roundings each time. An element that is not finite in each of them has an infinite uncertainty. `wanted`:
    the results without roundings; the other parameters are those of `evaluate_graph`.
    """
    xp = evaluator.xp
    found = {uid: xp.zeros(values.shape) for uid, values in wanted.items()}
    for draw in range(ROUNDING_DRAWS):
        for uid, values in evaluate_graph(graph, evaluator, load, scalars, draw=draw).items():
            found[uid] = xp.maximum(found[uid], _apart(xp, values, wanted[uid]))
    return found


def _errors(
    graph: OperationGraph,
    xp: Any,
    operation: Node,
    values: Mapping[int, Array],
    results: Mapping[int, Array],
) -> dict[int, Array]:
    """How far an operation's results may be off, by uid; nothing for results that are exact."""
    selects = isinstance(operation, Reduction) and operation.mode in _SELECTED
    if selects or IMPLEMENTATIONS[type(operation)].exact:
        return {}
    share = rounding_bound(graph.compute(operation))
    found = {uid: share * abs(result) for uid, result in results.items() if result.dtype.kind == "f"}
    if isinstance(operation, Pointwise):
        # A value that a function only selects is exact, and so is a sum that equals one of its terms.
        for uid, error in found.items():
            size = abs(results[uid])
            exact = functools.reduce(xp.logical_or, (size == abs(values[read]) for read in operation.reads))
            found[uid] = xp.where(exact, 0.0, error)
        return found
    sums = max(Accuracy.of(graph, uid).of_sums for uid in graph.results)
    magnitudes = graph.magnitudes(xp, operation, values)
    uncentred = graph.uncentred_sizes(xp, operation, values)
    for uid, error in found.items():
        # Where the terms of an element cancel, its error is still as large as other elements' errors.
        own = xp.maximum(error, share * _typical(xp, results[uid]))
        found[uid] = own + sums * magnitudes.get(uid, 0.0) + share * uncentred.get(uid, 0.0)
    return found


def _typical(xp: Any, values: Array) -> Array | float:
    """The root mean square of the finite values."""
    finite = values[xp.isfinite(values)]
    return xp.sqrt((finite * finite).mean()) if finite.size else 0.0


def _apart(xp: Any, one: Array, other: Array) -> Array:
    """The distances of values; infinite where one is not finite and the other is another value."""
    alike = (one == other) | (xp.isnan(one) & xp.isnan(other))
    with np.errstate(all="ignore"):
        found = abs(one.astype(np.float64) - other)
    return xp.where(alike, 0.0, xp.where(xp.isfinite(found), found, xp.inf))


def _room() -> int:
    """The most elements that may be evaluated with the memory that is free now."""
    free, _ = libraries().runtime.memGetInfo()
    return min(_MOST_ELEMENTS, int(free) // (_COPIES * DType.FLOAT64.itemsize))


@functools.lru_cache(maxsize=_MOST_SAMPLED)
def sample_graph(
    graph: OperationGraph, work: int, elements: int
) -> tuple[OperationGraph, Mapping[int, Region]]:
    """The part of a graph that takes at most this work and has at most these elements, and its regions.

    The regions say which part of each tensor belongs to it, by uid; a tensor without one is whole. Results
    are cut in each dim, or in the first dim alone if the operations allow nothing else or only that is small
    enough, or in the second dim at one place of the first: see `_FORMS`. If an operation can only be
    evaluated as a whole, or two operations need different parts of a tensor, the part is the whole graph.
    """
    whole: _Sampled = _part_of(graph, {}), {}
    if not _exceeds(whole[0], work, elements):
        return whole
    found: list[_Sampled] = []
    for least, most_of_first, dims in _FORMS:
        part = _largest_part(graph, (least, most_of_first), dims, work, elements)
        if part is not None and not _exceeds(part[0], work, elements):
            return part
        found += [] if part is None else [part]
    return min(found, key=lambda each: _elements_of(each[0]), default=whole)


def _largest_part(
    graph: OperationGraph, bounds: tuple[int, int], dims: int | None, work: int, elements: int
) -> _Sampled | None:
    """The largest part within this work and these elements, or the one with the fewest places of each dim.

    None if the operations allow no part. `bounds`: the fewest places of each dim, and the most of the first.
    `dims`: see `_regions`.
    """
    least, most_of_first = bounds
    largest = max((size for uid in graph.results for size in graph.tensor(uid).dims), default=1)
    fewer = 1 << max(0, (largest - 1).bit_length() - 1)  # as many places as there are would cut nothing
    places = max(least, min(_MOST_PLACES, fewer))
    while (found := _regions(graph, places, dims, most_of_first)) is not None:
        part = _part_of(graph, found)
        if places // 2 < least or not _exceeds(part, work, elements):
            return part, found
        places //= 2
    return None


def _regions(
    graph: OperationGraph, places: int, dims: int | None, most_of_first: int
) -> dict[int, Region] | None:
    """The part of each tensor that is needed for a part of the results; None if the operations allow none.

    Of the results, at most `places` places of the first `dims` dims are wanted, or of all dims if it is None,
    and at most `most_of_first` places of the first dim.
    """
    found = {}
    for uid in graph.results:
        sizes = graph.tensor(uid).dims
        count = len(sizes) if dims is None else dims
        most = (min(places, most_of_first), *(places,) * len(sizes))
        cut = tuple(map(_places, sizes[:count], most))
        found[uid] = (*cut, *(slice(None),) * (len(sizes) - len(cut)))
    for operation in reversed(graph.operations):
        names = dict(operation.named())
        specs = {name: graph.tensor(uid).spec for name, uid in names.items()}
        wanted = {name: found[uid] for name, uid in operation.named(operation.outputs) if uid in found}
        needed = operation.needs(specs, wanted) if len(wanted) == len(operation.writes) else None
        if needed is None:
            return None
        for name, region in needed.items():
            if found.setdefault(names[name], region) != region:
                return None
    return found


def _places(size: int, most: int) -> slice:
    """At most `most` evenly spaced places of a dim, the last one among them.

    Their distance is odd, so that each place within a tile, whose size is a power of two, occurs.
    """
    step = -(-size // most) | 1
    return slice((size - 1) % step, None, step) if size > most else slice(None)


def _part_of(graph: OperationGraph, found: Mapping[int, Region]) -> OperationGraph:
    """The graph on parts of its tensors. It is only evaluated, so no tensor overwrites another one."""
    tensors = (_cut_tensor(tensor, found.get(tensor.uid)) for tensor in graph.tensors)
    return OperationGraph(tensors=tuple(tensors), operations=graph.operations, numerics=graph.numerics)


def _cut_tensor(tensor: GraphTensor, region: Region | None) -> GraphTensor:
    """A part of a tensor, as a tensor."""
    if region is None:
        return msgspec.structs.replace(tensor, overwrites=None)
    ranges = [range(size)[part] for size, part in zip(tensor.dims, region, strict=True)]
    return msgspec.structs.replace(
        tensor,
        dims=tuple(map(len, ranges)),
        strides=tuple(step * r.step for r, step in zip(ranges, tensor.strides, strict=True)),
        overwrites=None,
    )


def first_byte(tensor: GraphTensor, region: Region | None) -> int:
    """The offset of a region's first element from the tensor's first one, in bytes."""
    starts = (part.start or 0 for part in region or ())
    return tensor.dtype.itemsize * sum(n * step for n, step in zip(starts, tensor.strides, strict=False))


def _exceeds(graph: OperationGraph, work: int, elements: int) -> bool:
    """Whether a graph takes more than this work, or has more than these elements."""
    specs = ({name: graph.tensor(uid).spec for name, uid in op.named()} for op in graph.operations)
    steps = sum(op.work(given) for op, given in zip(graph.operations, specs, strict=True))
    return steps > work or _elements_of(graph) > elements
