"""Runs operation graphs directly on an engine, without service or actor, on made-up values from a seed."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from cudnn_actor.cli.user_error import UserError
from cudnn_actor.engines.base import Binding, Engine, EngineFailure, Plan
from cudnn_actor.engines.cpu.exact.evaluation import NumPy
from cudnn_actor.options import make_options
from cudnn_actor.protocol import DType, GraphTensor, InvalidRequest, OperationGraph
from cudnn_actor.service.engine_choice import engine_for

__all__ = ["GraphBench", "graph_bench", "made_up_scalars", "made_up_values", "open_engine", "tensor_name"]

_ARENA = 1
_PLACE = 256
_MEASURE_S = 0.2
_ROUNDS = 5
_POLL_S = 20e-6

Values = Mapping[str, np.ndarray]


class GraphBench:
    """The buffers of one graph, on one engine. A result that overwrites an input shares its buffer.

    Use `graph_bench`, which allocates and frees the memory.
    """

    def __init__(self, engine: Engine, graph: OperationGraph, offsets: Mapping[str, int]) -> None:
        self._engine = engine
        self._graph = graph
        self._bindings = {
            uid: engine.bind(_ARENA, offsets[tensor_name(graph, uid)], graph.tensor(uid).spec)
            for uid in graph.bound
        }
        self._scalars = made_up_scalars(graph)

    def fill(self, values: Values) -> None:
        """Write the inputs; buffers that are only outputs are filled with NaN, 77 or True."""
        for uid, binding in self._bindings.items():
            name = tensor_name(self._graph, uid)
            if name in values:
                self._engine.write(binding, values[name])
            else:
                dtype = self._graph.tensor(uid).dtype
                whole = dtype is DType.BOOL or 77
                self._engine.fill(binding, float("nan") if dtype.is_floating else whole)

    def run(self, plan: Plan) -> dict[str, np.ndarray]:
        """Run once; the outputs by name. Raises `EngineFailure`. Blocks."""
        self._execute(plan)
        written = self._graph.written
        outputs = {uid: binding for uid, binding in self._bindings.items() if uid in written}
        return {tensor_name(self._graph, uid): self._engine.read(binding) for uid, binding in outputs.items()}

    def measure(self, plan: Plan) -> float:
        """Microseconds per run, over many consecutive runs: the median of some rounds. Blocks."""
        once = self._round(plan, 1)
        count = int(min(max(_MEASURE_S / _ROUNDS / max(once, 1e-6), 1), 1000))
        return statistics.median(self._round(plan, count) / count for _ in range(_ROUNDS)) * 1e6

    def _round(self, plan: Plan, count: int) -> float:
        """Seconds that `count` runs take."""
        began = time.perf_counter()
        for _ in range(count):
            self._execute(plan)
        if not self._engine.synchronous:
            fence = self._engine.fence()
            while not self._engine.has_passed(fence):
                time.sleep(_POLL_S)
        return time.perf_counter() - began

    def _execute(self, plan: Plan) -> None:
        buffers: list[Binding] = [self._bindings[uid] for uid in self._graph.bound]
        self._engine.execute(plan, buffers, self._scalars)


@contextlib.contextmanager
def open_engine(device: str, **options: Any) -> Iterator[Engine]:
    """Open the engine of a device for a `with` block, with those options of `spawn` that concern the engine.

    Raises `UserError` if there is no such device, or if it cannot be used with these options, and
    `EngineFailure`.
    """
    try:
        engine = engine_for(make_options({"device": device, "isolation": "thread", **options})).make()
    except InvalidRequest as error:
        raise UserError(str(error)) from error
    try:
        engine.open()
        yield engine
    finally:
        engine.close()


@contextlib.contextmanager
def graph_bench(engine: Engine, graph: OperationGraph) -> Iterator[GraphBench]:
    """A bench for a graph on an open engine, for a `with` block. Raises `MemoryError` if its buffers do not
    fit."""
    offsets, end = _places(graph)
    fd = engine.create_arena(_ARENA, end)
    try:
        yield GraphBench(engine, graph, offsets)
    finally:
        # the context has died: its own error is already being raised
        with contextlib.suppress(EngineFailure):
            engine.unmap_arena(_ARENA)
        os.close(fd)


def made_up_values(graph: OperationGraph, seed: int) -> dict[str, np.ndarray]:
    """Values for all inputs of a graph, by name: normally distributed, or small whole numbers.

    Inputs for which such values are meaningless, such as indices, get valid ones.
    Raises `UserError` if the host lacks memory for the graph's tensors: else the system would kill us later.
    """
    needed = 2 * _places(graph)[1]  # one copy here, one in the buffers
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > free:
        raise UserError(f"its tensors need {needed / 1e9:.0f} GB of memory, but {free / 1e9:.0f} GB are free")
    written = graph.written
    read = [graph.tensor(uid) for uid in graph.bound if uid not in written]
    values = {
        tensor.uid: _values(tensor, np.random.default_rng([seed, place])) for place, tensor in enumerate(read)
    }
    rng = np.random.default_rng([seed, len(read)])
    with np.errstate(all="ignore"):
        samples = graph.samples(NumPy(), lambda spec: rng.integers(-3, 5, spec.dims).astype(np.float64))
    values |= {uid: array.astype(graph.tensor(uid).dtype.numpy) for uid, array in samples.items()}
    return {tensor_name(graph, uid): array for uid, array in values.items()}


def made_up_scalars(graph: OperationGraph) -> list[float]:
    """Values for alpha and beta. None is 0 or 1, since these would make different graphs."""
    return [0.75 - 0.25 * place for place in range(len(graph.scalars))]


def _values(tensor: GraphTensor, rng: np.random.Generator) -> np.ndarray:
    if tensor.dtype is DType.FLOAT64:
        return rng.standard_normal(tensor.dims)
    if tensor.dtype.is_floating:
        return rng.standard_normal(tensor.dims, dtype=np.float32).astype(tensor.dtype.numpy)
    if tensor.dtype is DType.BOOL:
        return rng.integers(0, 2, size=tensor.dims).astype(np.bool_)
    low = 0 if np.dtype(tensor.dtype.numpy).kind == "u" else -8
    return rng.integers(low, 9, size=tensor.dims).astype(tensor.dtype.numpy)


def _places(graph: OperationGraph) -> tuple[dict[str, int], int]:
    """The offset of each buffer, and the end of the last one, in bytes."""
    sizes: dict[str, int] = {}
    for uid in graph.bound:
        name = tensor_name(graph, uid)
        sizes[name] = max(sizes.get(name, 1), graph.tensor(uid).spec.nbytes)
    offsets, end = {}, 0
    for name, nbytes in sizes.items():
        offsets[name] = end
        end += -(-nbytes // _PLACE) * _PLACE
    return offsets, end


def tensor_name(graph: OperationGraph, uid: int) -> str:
    """The name of a bound tensor's buffer: a result that overwrites an input has the input's.

    In a graph of a `GraphBuilder`, a result's name is the line that made it. One line may have made several
    results.
    """
    tensor = graph.tensor(uid)
    if tensor.overwrites is not None:
        return tensor_name(graph, tensor.overwrites)
    same = [other for other in map(graph.tensor, graph.bound) if other.name == tensor.name]
    alone = sum(other.overwrites is None for other in same) == 1
    return tensor.name if tensor.name and alone else f"{tensor.name or 'tensor'} {uid}"
