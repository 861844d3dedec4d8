"""Small files that ask for much: `python -m tests.onnx.bombs` draws some for each operator, and imports them.

Each has one operator of ONNX's, with large constants, huge numbers, attributes beyond all bounds, and inputs
whose values decide over shapes. What becomes of each is printed, with the memory that the importing process
took at its peak, and its processor time.
"""

from __future__ import annotations

import argparse
import collections
import json
import random
import resource
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import TensorProto, defs, helper, numpy_helper

from cudnn_actor import DType, TensorSpec
from cudnn_actor.models.source import NeedsValues
from cudnn_actor.onnx import ModelLimits, OnnxModel
from cudnn_actor.protocol.errors import CudnnActorError

__all__ = ["KNOWN", "Fate", "Peak", "drawn", "imported", "known", "names", "values_for"]

_NUMBERS = (0, 1, -1, 2, 3, 7, 15_000, 10**8, 1 << 31, 1 << 40, 1 << 62, -(1 << 63))
_DIMS = ([4_000_000], [3000, 3000], [1, 1 << 28], [1 << 40], [0, 1 << 40], [1, 1, 4096, 4096], [15_000])
_FLOATS = (0.0, 1.0, -1.0, 0.5, 1e-30, 1e30, float("inf"), float("nan"))
_TEXTS = (
    *("NOTSET", "SAME_UPPER", "VALID", "constant", "reflect", "edge", "nearest", "linear", "cubic", "LEFT"),
    *("ij,jk->ik", "i,j->ij", "ij->", "abc,d,e,f->abcdef", "add", "max", "none", "avg", "bilinear", "tanh"),
)
_TYPES = {"tensor(float)": np.float32, "tensor(int64)": np.int64, "tensor(bool)": np.bool_}


def names() -> list[str]:
    """The operators that are drawn: those of the standard domain that are not of random numbers or text."""
    every = {each.name for each in defs.get_all_schemas() if each.domain == "" and not each.deprecated}
    return sorted(every - {"If", "Loop", "Scan", "SequenceMap"})


def _schemas(op: str) -> list[tuple[int, Any]]:
    """The versions of the standard operators that a model may be of, with that operator in each."""
    newest = defs.onnx_opset_version()
    found = [(newest, defs.get_schema(op, newest, ""))]
    for version in (7, 9, 10, 11, 13, 18, 21):
        try:
            found.append((version, defs.get_schema(op, version, "")))
        except defs.SchemaError:
            continue
    return found


class _Drawn:
    """One model while it is drawn."""

    def __init__(self, op: str, rng: random.Random) -> None:
        self.rng = rng
        self.opset, self.schema = rng.choice(_schemas(op))
        self.nodes: list[onnx.NodeProto] = []
        self.tensors: list[onnx.TensorProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []

    def model(self) -> bytes:
        attributes = {name: self.attribute(each) for name, each in self.schema.attributes.items()}
        count = self.rng.randint(self.schema.min_input, min(self.schema.max_input, self.schema.min_input + 2))
        inputs = [self.input(number) for number in range(count)]
        outputs = [f"y{n}" for n in range(max(1, min(self.schema.max_output, 3)))]
        given = {name: value for name, value in attributes.items() if value is not None}
        self.nodes.append(helper.make_node(self.schema.name, inputs, outputs, **given))
        graph = helper.make_graph(
            [*self.nodes, *self.decided()],
            "bomb",
            self.inputs,
            [helper.make_tensor_value_info("out", TensorProto.INT64, None)],
            initializer=self.tensors,
        )
        opsets = [helper.make_opsetid("", self.opset)]
        return bytes(helper.make_model(graph, opset_imports=opsets).SerializeToString())

    def decided(self) -> list[onnx.NodeProto]:
        """What has the first result decide over dims, or not."""
        one = numpy_helper.from_array(np.ones(1, np.int64))
        whole = [helper.make_node("Cast", ["y0"], ["whole"], to=TensorProto.INT64)]
        flat = [*whole, helper.make_node("Reshape", ["whole", self.constant(np.array([-1]))], ["flat"])]
        return self.rng.choice(
            (
                [helper.make_node("Cast", ["y0"], ["out"], to=TensorProto.INT64)],
                [helper.make_node("NonZero", ["y0"], ["out"])],
                [*flat, helper.make_node("ConstantOfShape", ["flat"], ["out"], value=one)],
            )
        )

    def attribute(self, of: Any) -> Any:
        rng = self.rng
        if not of.required and rng.random() < 0.5:
            return None
        if of.name in ("to", "dtype"):
            return TensorProto.FLOAT
        drawn: dict[str, Callable[[], Any]] = {
            "INT": lambda: rng.choice(_NUMBERS),
            "INTS": lambda: [rng.choice((1, 1, 2, 3, *_NUMBERS)) for _ in range(rng.choice((1, 2, 2, 4, 8)))],
            "FLOAT": lambda: rng.choice(_FLOATS),
            "STRING": lambda: rng.choice(_TEXTS),
            "TENSOR": lambda: numpy_helper.from_array(np.ones(1, np.float32)),
        }
        return drawn.get(of.type.name, lambda: None)()

    def input(self, number: int) -> str:
        of, rng = self.schema.inputs[min(number, len(self.schema.inputs) - 1)], self.rng
        dtypes = [dtype for name, dtype in _TYPES.items() if name in of.types] or [np.float32]
        dtype = dtypes[0] if rng.random() < 0.7 else rng.choice(dtypes)
        match rng.randrange(5) if dtype is not np.int64 else rng.randrange(3, 8):
            case 0 | 1:
                return self.given(
                    np.ones([rng.choice((1, 2, 3)) for _ in range(rng.choice((1, 2, 3, 4)))], dtype)
                )
            case 2 | 3 | 4:
                return self.large(dtype)
            case 5:
                return self.given(np.array(rng.choice(_NUMBERS), dtype))
            case _:
                length = rng.choice((1, 2, 2, 4, 8))
                return self.given(np.array([rng.choice(_NUMBERS) for _ in range(length)], dtype))

    def given(self, array: np.ndarray) -> str:
        """A constant, or an input of the model that has these values."""
        if self.rng.random() < 0.6:
            return self.constant(array)
        name = f"input{len(self.inputs)}"
        code = helper.np_dtype_to_tensor_dtype(array.dtype)
        info = helper.make_tensor_value_info(name, code, array.shape)
        info.doc_string = json.dumps(array.tolist())
        self.inputs.append(info)
        return name

    def constant(self, array: np.ndarray) -> str:
        name = f"constant{len(self.tensors)}"
        self.tensors.append(numpy_helper.from_array(array, name))
        return name

    def large(self, dtype: Any) -> str:
        """A tensor that is large, and takes few bytes in the file."""
        name, dims = f"large{len(self.nodes)}", self.rng.choice(_DIMS)
        one = numpy_helper.from_array(np.ones(1, dtype))
        shape = self.constant(np.array(dims))
        self.nodes.append(helper.make_node("ConstantOfShape", [shape], [name], value=one))
        return name


def drawn(op: str, rng: random.Random) -> bytes:
    """A model of one operator that asks for much."""
    return _Drawn(op, rng).model()


# Those that were found.


def _of_large(op: str, count: int, dims: Sequence[int], **attributes: Any) -> bytes:
    """An operator of that many constants of ones."""
    fill = helper.make_node(
        "ConstantOfShape", ["dims"], ["x"], value=numpy_helper.from_array(np.ones(1, "f4"))
    )
    node = helper.make_node(op, ["x"] * count, ["y"], **attributes)
    return _bytes([fill, node], {"dims": np.array(dims)})


def _bytes(nodes: Sequence[onnx.NodeProto], tensors: Mapping[str, np.ndarray]) -> bytes:
    """A model whose result `y` decides: so it cannot be left to the service."""
    kept = [numpy_helper.from_array(array, name) for name, array in tensors.items()]
    last = helper.make_node("NonZero", ["y"], ["out"])
    output = helper.make_tensor_value_info("out", TensorProto.INT64, None)
    graph = helper.make_graph([*nodes, last], "bomb", [], [output], initializer=kept)
    return bytes(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)]).SerializeToString())


def _outer(op: str) -> bytes:
    """A row and a column of 15,000."""
    numbers = [
        helper.make_node("Range", ["zero", "count", "one"], ["row"]),
        helper.make_node("Unsqueeze", ["row", "last"], ["column"]),
        helper.make_node("Unsqueeze", ["row", "zeros"], ["flat"]),
    ]
    first = ["choice"] if op == "Where" else []
    if op == "Where":
        numbers.append(helper.make_node("Greater", ["column", "zero"], ["choice"]))
    options = {"equation": "ab,bc->ac"} if op == "Einsum" else {}
    tensors = {"zero": np.float32(0), "count": np.float32(15_000), "one": np.float32(1)}
    lists = {"last": np.array([1]), "zeros": np.array([0])}
    nodes = [*numbers, helper.make_node(op, [*first, "column", "flat"], ["y"], **options)]
    return _bytes(nodes, {**{name: np.array(each) for name, each in tensors.items()}, **lists})


def _window(op: str) -> bytes:
    size = [helper.make_node("Mul", ["n", "n"], ["size"]), helper.make_node(op, ["size"], ["y"])]
    return _bytes(size, {"n": np.array(15_000)})


def _gathered() -> bytes:
    places = helper.make_node("Range", ["zero", "n", "one"], ["places"])
    row = helper.make_node("Reshape", ["places", "wide"], ["row"])
    table = helper.make_node("Expand", ["row", "dims"], ["table"])
    nodes = [places, row, table, helper.make_node("Gather", ["table", "places"], ["y"], axis=1)]
    return _bytes(
        nodes,
        {
            "zero": np.array(0),
            "n": np.array(3000),
            "one": np.array(1),
            "wide": np.array([1, -1]),
            "dims": np.array([3000, 3000]),
        },
    )


def _resized() -> bytes:
    node = helper.make_node("Resize", ["x", "", "scales"], ["y"], mode="nearest")
    return _bytes([node], {"x": np.ones((1, 1, 1, 1), "f4"), "scales": np.array([1, 1, 15e3, 15e3], "f4")})


def _convolved() -> bytes:
    node = helper.make_node("Conv", ["x", "w"], ["y"], pads=[10**8] * 2, strides=[10**8])
    return _bytes([node], {"x": np.ones((1, 1, 1), "f4"), "w": np.ones((1, 1, 1), "f4")})


def _transformed() -> bytes:
    node = helper.make_node("DFT", ["x", "length"], ["y"])
    return _bytes([node], {"x": np.ones((1, 8, 1), "f4"), "length": np.array(1 << 28)})


def _one_hot() -> bytes:
    node = helper.make_node("OneHot", ["x", "depth", "values"], ["y"])
    return _bytes([node], {"x": np.array([1]), "depth": np.array(1 << 40), "values": np.array([0, 1])})


def _of_ranges() -> bytes:
    """Sixty of a few MB each: none is too large by itself."""
    nodes = [helper.make_node("Range", ["zero", "n", "one"], [f"r{k}"]) for k in range(60)]
    nodes += [helper.make_node("Neg", [f"r{k}"], [f"s{k}"]) for k in range(60)]
    nodes.append(helper.make_node("Concat", [f"s{k}" for k in range(60)], ["y"], axis=0))
    return _bytes(nodes, {"zero": np.array(0), "n": np.array(1 << 19), "one": np.array(1)})


KNOWN: dict[str, Callable[[], bytes]] = {
    "Add": lambda: _outer("Add"),
    "Concat": lambda: _of_large("Concat", 40, [1 << 20], axis=0),
    "Conv": _convolved,
    "DFT": _transformed,
    "Einsum": lambda: _outer("Einsum"),
    "Gather": _gathered,
    "HannWindow": lambda: _window("HannWindow"),
    "MatMul": lambda: _outer("MatMul"),
    "NonZero": lambda: _of_large("Neg", 1, [15_000, 15_000]),
    "OneHot": _one_hot,
    "Range": _of_ranges,
    "Resize": _resized,
    "Where": lambda: _outer("Where"),
}
"""Files of less than 1 kB, but for two, of which each took gigabytes, or hours."""


# What becomes of them.


class Fate(NamedTuple):
    """What became of a model: "imported", an error's class, or another exception's traceback."""

    what: str
    text: str


def values_for(model: OnnxModel, proto: onnx.ModelProto) -> dict[str, np.ndarray]:
    """The values that the inputs of a drawn model have."""
    texts = {each.name: each.doc_string for each in proto.graph.input}
    found = {}
    for each in model.inputs:
        assert each.dtype is not None
        found[each.name] = np.array(json.loads(texts[each.name] or "0"), each.dtype.numpy)
    return found


def imported(data: bytes, limits: ModelLimits) -> Fate:
    """Import a model as a service does."""
    try:
        model = OnnxModel(data, limits)
        values = values_for(model, onnx.load_from_string(data))
        specs = {name: TensorSpec.packed(each.shape, DType(str(each.dtype))) for name, each in values.items()}
        known: dict[str, np.ndarray] = {}
        while True:
            try:
                model.specialise(specs, known)
                return Fate("imported", "")
            except NeedsValues as needs:
                known |= {name: values[name] for name in needs.names}
    except CudnnActorError as error:
        return Fate(type(error).__name__, str(error))
    except Exception:  # noqa: BLE001 - which is what is looked for
        return Fate("RAW", traceback.format_exc())


class Peak:
    """The most memory that this process has had since it was made, beyond what it had then. Linux."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")
        self._before = self._read("VmRSS")

    @staticmethod
    def _read(field: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return self._read("VmHWM") - self._before


def known() -> Iterator[tuple[str, bytes]]:
    """Those of `KNOWN`."""
    for name, make in KNOWN.items():
        yield name, make()


def main() -> None:
    """Draw some of each operator, and print what became of them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--each", type=int, default=5, help="models of each operator")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--constants", type=int, default=8 << 20)
    parser.add_argument("--steps", type=int, default=1 << 26)
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    limits = ModelLimits(constants=args.constants, steps=args.steps)
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
    fates: collections.Counter[str] = collections.Counter()
    worst: list[tuple[int, str]] = []
    slowest: list[tuple[float, str]] = []
    cases = [(name, data) for name, data in known() if not args.only]
    cases += [
        (f"{op} {n}", drawn(op, random.Random(f"{args.seed} {op} {n}")))
        for op in ([args.only] if args.only else names())
        for n in range(args.each)
    ]
    for name, data in cases:
        peak, start = Peak(), time.process_time()
        fate = imported(data, limits)
        fates[fate.what] += 1
        worst.append((peak.nbytes, name))
        slowest.append((time.process_time() - start, name))
        if fate.what == "RAW":
            sys.stderr.write(f"{name}: {fate.text}")
    json.dump({"fates": fates, "worst": sorted(worst)[-8:], "slowest": sorted(slowest)[-8:]}, sys.stdout)


if __name__ == "__main__":
    main()
