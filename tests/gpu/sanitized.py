"""One configuration of each recurrent operation, of CTC, attention and loops, for compute-sanitizer.

compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 9 python -m tests.gpu.sanitized

Each name is printed once its results have been compared with the exact CPU engine's. The engine is on a
thread of this process, where compute-sanitizer sees its kernels.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from cudnn_actor import CudnnRef, GraphBuilder, spawn
from cudnn_actor.onnx import OnnxModel
from cudnn_actor.operations import RecurrentCell, RecurrentSteps
from cudnn_actor.protocol import DType, Graph

from ..onnx.test_long_loops import AS_LOOPS, scan, until
from ..service.loop_bodies import Case, run_case

__all__ = ["main"]

_S = 600.0
"""Seconds that a request may take: kernels are a hundred times as slow as without the tool."""
Arrays = dict[str, np.ndarray]


class Checked(NamedTuple):
    """A graph with values for its inputs, and how far its results may be off."""

    name: str
    graph: Graph
    values: Arrays
    off: float = 1e-4


class _Inputs:
    """Adds inputs to a builder, with values."""

    def __init__(self) -> None:
        self.g, self.values = GraphBuilder(), dict[str, np.ndarray]()
        self._rng = np.random.default_rng(0)

    def normal(self, name: str, *dims: int, dtype: str = "float32") -> Any:
        element = DType(dtype)
        self.values[name] = (self._rng.standard_normal(dims) / 4).astype(element.numpy)
        return self.g.input(name, dims, element)

    def whole(self, name: str, values: Any) -> Any:
        self.values[name] = np.array(values, np.int32)
        return self.g.input(name, self.values[name].shape, "int32")


def _with_gradients(made: _Inputs, result: Any, of: list[Any]) -> Graph:
    loss = made.g.sum(made.g.square(result))
    outputs = {f"g{n}": each for n, each in enumerate(made.g.grad(loss, of))}
    return made.g.build({"result": result, **outputs})


def _layers(kind: str, dtype: str, off: float) -> Checked:
    made, rows = _Inputs(), {"lstm": 4, "gru": 3}[kind] * 24
    x = made.normal("x", 6, 5, 16, dtype=dtype)
    shapes = ((rows, 16), (rows, 24), (rows,), (rows,))
    weights = [
        [made.normal(f"w{way}{n}", *dims, dtype=dtype) for n, dims in enumerate(shapes)] for way in range(2)
    ]
    y = getattr(made.g, kind)(x, weights, bidirectional=True, lengths=(6, 0, 3, 2, 1)).y
    of = [x, *itertools.chain.from_iterable(weights)]
    return Checked(kind, _with_gradients(made, y, of), made.values, off)


def _steps(cell: RecurrentCell, units: int, dtype: str = "float32") -> Checked:
    """Both directions, with lengths; with so many units, a launch for all steps or for each."""
    made, lstm = _Inputs(), cell is RecurrentCell.LSTM
    rows, state = cell.gates * units, (2, 9, units)
    operands = {
        "x": made.normal("x", 4, 9, 2 * rows, dtype=dtype),
        "w": made.normal("w", 2, rows, units, dtype=dtype),
        "bias": made.normal("bias", 2, rows, dtype=dtype),
        "lengths": made.whole("lengths", [4, 0, 3, 2, 1, 4, 4, 9, -1]),
        "h0": made.normal("h0", *state, dtype=dtype),
    }
    made.values["w"] /= np.sqrt(units)
    if lstm:
        operands["peepholes"] = made.normal("peepholes", 2, 3, units, dtype=dtype)
        operands["c0"] = made.normal("c0", *state, dtype=dtype)
    operation: RecurrentSteps[Any] = RecurrentSteps(**operands, cell=cell, clip=3.0)
    graph = made.g.build(y=made.g.apply(operation))
    return Checked(f"steps of {cell}, {units} units, {dtype}", graph, made.values)


def _ctc() -> Checked:
    made = _Inputs()
    logarithms = made.normal("logarithms", 20, 4, 9)
    given = made.values["logarithms"]
    given -= np.log(np.exp(given).sum(-1, keepdims=True))
    labels = made.whole("labels", np.random.default_rng(1).integers(1, 9, (4, 6)))
    frames, lengths = made.whole("frames", [20, 15, 3, 0]), made.whole("lengths", [6, 2, 3, 0])
    loss = made.g.ctc_loss(logarithms, labels, frames, lengths)
    slopes = made.g.grad(made.g.sum(loss), [logarithms])[0]
    return Checked("ctc", made.g.build(loss=loss, slopes=slopes), made.values)


def _attention() -> Checked:
    made, width = _Inputs(), 16
    x = made.normal("x", 6, 3, width)
    weights = {
        "in_proj_weight": made.normal("w_in", 3 * width, width),
        "in_proj_bias": made.normal("b_in", 3 * width),
        "out_proj.weight": made.normal("w_out", width, width),
        "out_proj.bias": made.normal("b_out", width),
    }
    y = made.g.multi_head_attention(x, weights=weights, heads=4, causal=True)
    graph = _with_gradients(made, y, [x, *weights.values()])
    return Checked("multi-head attention", graph, made.values)


def _graphs() -> Iterator[Checked]:
    yield _layers("lstm", "bfloat16", 0.2)
    yield _layers("gru", "float32", 1e-3)
    for units in (40, 272):
        yield _steps(RecurrentCell.LSTM, units, "float64")
    for units in (40, 320):
        yield _steps(RecurrentCell.GRU_RESET_FIRST, units, "float64")
    yield _steps(RecurrentCell.PLAIN, 33)
    yield _ctc()
    yield _attention()


async def _outputs(gpu: CudnnRef, checked: Checked) -> list[np.ndarray]:
    buffers = {name: await gpu.upload(values) for name, values in checked.values.items()}
    for _ in range(2):  # also as it is replayed
        found = await gpu.apply(checked.graph, buffers, timeout=_S)
    refs = found if isinstance(found, tuple) else (found,)
    return [np.asarray(await gpu.download(ref), np.float64) for ref in refs]


async def _run(device: str) -> None:
    slow: Any = {"isolation": "thread", "hang_after_s": _S}
    async with spawn(device=device, **slow) as gpu, spawn(device="cpu", exact=True) as exact:
        for checked in _graphs():
            pairs = zip(await _outputs(gpu, checked), await _outputs(exact, checked), strict=True)
            for found, wanted in pairs:
                np.testing.assert_allclose(found, wanted, rtol=checked.off, atol=checked.off)
            _tell(checked.name)
        case = Case("matmul", (2,), 3, "float32", 5, 4, goes=True, scans=True, stacks=True, permuted=True)
        await run_case(gpu, case)
        _tell("a loop")
        for name, (proto, inputs) in {"data": until(100.0), "rows": scan()}.items():
            async with await gpu.load(OnnxModel(proto, AS_LOOPS), timeout=_S) as model:
                given = await gpu.run(model, inputs, timeout=_S)
            async with await exact.load(OnnxModel(proto, AS_LOOPS)) as model:
                right = await exact.run(model, inputs)
            for each, array in right.items():
                np.testing.assert_allclose(given[each], array, rtol=1e-4, atol=1e-4)
            _tell(f"a loop of a file that {name} decides")


def _tell(name: str) -> None:
    print(name, flush=True)  # noqa: T201 - a command line


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.sanitized", description=__doc__)
    parser.add_argument("--device", default="cuda")
    asyncio.run(_run(parser.parse_args(arguments).device))
    return 0


if __name__ == "__main__":
    sys.exit(main())
