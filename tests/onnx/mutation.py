"""Damaged models: `python -m tests.onnx.mutation` tries many, and prints what became of them."""

from __future__ import annotations

import argparse
import collections
import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from cudnn_actor import spawn
from cudnn_actor.onnx import ModelLimits, OnnxModel
from cudnn_actor.protocol.errors import CudnnActorError

from .node_suite import cases
from .small_models import FLOAT, INT64, graph_of, image_model, model_of, node

__all__ = ["MODELS", "damaged", "fate"]

_LIMITS = ModelLimits(nbytes=64 << 20, nodes=20_000, constants=16 << 20, steps=1 << 28)


def _branches() -> onnx.ModelProto:
    inner = {"y": (FLOAT, [4])}
    yes, no = (graph_of([node(op, "x", "y")], {}, inner) for op in ("Relu", "Neg"))
    return model_of(
        [
            node("Shape", "x", "s"),
            node("Expand", "x s", "e"),
            node("Cast", "flag", "c", to=onnx.TensorProto.BOOL),
            node("If", "c", "i", then_branch=yes, else_branch=no),
            node("LayerNormalization", "i w", "l", axis=-1),
            node("Slice", "l start end", "y"),
        ],
        {"x": (FLOAT, [4])},
        {"y": (FLOAT, [None])},
        {"flag": np.array(1), "w": np.ones(4, np.float32), "start": np.array([1]), "end": np.array([3])},
    )


def _reshaped() -> onnx.ModelProto:
    return model_of(
        [
            node("Reshape", "x shape", "r"),
            node("Transpose", "r", "t", perm=[1, 0]),
            node("MatMul", "r t", "y"),
        ],
        {"x": (FLOAT, ["N"]), "shape": (INT64, [2])},
        {"y": (FLOAT, [None, None])},
    )


MODELS: Sequence[Callable[[], onnx.ModelProto]] = (lambda: image_model(1), _branches, _reshaped)
"""What is damaged."""


def _of_suite() -> Sequence[Callable[[], onnx.ModelProto]]:
    """The models of ONNX's node suite, which have each operator."""
    every = [each.model.SerializeToString() for each in cases() if each.model is not None]
    return [functools.partial(onnx.load_from_string, data) for data in every]


def damaged(rng: random.Random, models: Sequence[Callable[[], onnx.ModelProto]] = MODELS) -> bytes:
    """One of the models, with something wrong about it; now and then, nothing."""
    proto = rng.choice(models)()
    if rng.random() < 0.5:
        for _ in range(rng.randint(1, 3)):
            rng.choice(_CHANGES)(proto, rng)
        return bytes(proto.SerializeToString())
    data = bytearray(proto.SerializeToString())
    for _ in range(rng.choice((1, 1, 4, 40))):
        place = rng.randrange(len(data))
        match rng.randrange(4):
            case 0:
                data[place] ^= 1 << rng.randrange(8)
            case 1:
                data[place] = rng.randrange(256)
            case 2:
                del data[place : place + rng.randrange(1, 30)]
            case _:
                del data[max(1, len(data) - rng.randrange(1, 200)) :]
        if len(data) < 2:
            break
    return bytes(data)


def _dtype(proto: onnx.ModelProto, rng: random.Random) -> None:
    if proto.graph.initializer:
        rng.choice(proto.graph.initializer).data_type = rng.randrange(0, 30)


def _dims(proto: onnx.ModelProto, rng: random.Random) -> None:
    if proto.graph.initializer:
        dims = rng.choice(proto.graph.initializer).dims
        if dims:
            dims[rng.randrange(len(dims))] = rng.choice((-1, 0, 1, 2, 7, 1 << 40))


def _input(proto: onnx.ModelProto, rng: random.Random) -> None:
    inputs = rng.choice(proto.graph.node).input
    if inputs:
        names = [name for each in proto.graph.node for name in (*each.input, *each.output)]
        inputs[rng.randrange(len(inputs))] = rng.choice([*names, "nowhere", ""])


def _output(proto: onnx.ModelProto, rng: random.Random) -> None:
    names = [name for each in proto.graph.node for name in (*each.input, *each.output)]
    rng.choice(proto.graph.node).output[0] = rng.choice([*names, "nowhere", ""])


def _operator(proto: onnx.ModelProto, rng: random.Random) -> None:
    others = ("Gemm", "Concat", "Nonsense", "", "Loop", "NonZero", "Tile", "ConstantOfShape", "Range")
    rng.choice(proto.graph.node).op_type = rng.choice(others)


_NUMBERS = (-1, 0, 1, 15_000, 10**8, 1 << 31, 1 << 40, 1 << 62, -(1 << 63))


def _attribute(proto: onnx.ModelProto, rng: random.Random) -> None:
    attributes = rng.choice(proto.graph.node).attribute
    if not attributes:
        return
    chosen = rng.choice(attributes)
    match rng.randrange(4):
        case 0:
            chosen.type = rng.randrange(0, 15)
        case 1:
            chosen.i = rng.choice(_NUMBERS)
        case 2:
            chosen.ints.append(rng.choice(_NUMBERS))
        case _:
            del chosen.ints[:]


def _declared(proto: onnx.ModelProto, rng: random.Random) -> None:
    """Another dtype, or other dims, of an input or an output."""
    ports = [*proto.graph.input, *proto.graph.output]
    if ports:
        kind = rng.choice(ports).type.tensor_type
        if rng.random() < 0.5:
            kind.elem_type = rng.choice((0, 1, 6, 7, 8, 9, 10, 11, 16, 99))
        elif kind.shape.dim:
            rng.choice(kind.shape.dim).dim_value = rng.choice(_NUMBERS)


def _fixed(proto: onnx.ModelProto, rng: random.Random) -> None:
    """A constant in the place of an input."""
    kinds = {FLOAT: np.float32, INT64: np.int64, onnx.TensorProto.BOOL: np.bool_}
    small = [each for each in proto.graph.input if each.type.tensor_type.elem_type in kinds]
    if small:
        chosen = rng.choice(small)
        dims = [min(max(dim.dim_value, 0), 8) for dim in chosen.type.tensor_type.shape.dim]
        dtype = kinds[chosen.type.tensor_type.elem_type]
        array: np.ndarray = np.full(dims, rng.choice(_NUMBERS) if dtype is np.int64 else 1, dtype)
        proto.graph.initializer.append(numpy_helper.from_array(array, chosen.name))
        proto.graph.input.remove(chosen)


def _value(proto: onnx.ModelProto, rng: random.Random) -> None:
    if proto.graph.initializer:
        tensor = rng.choice(proto.graph.initializer)
        tensor.raw_data = bytes(rng.randrange(256) for _ in tensor.raw_data)


def _external(proto: onnx.ModelProto, rng: random.Random) -> None:
    if proto.graph.initializer:
        tensor = rng.choice(proto.graph.initializer)
        tensor.data_location = onnx.TensorProto.EXTERNAL
        where = rng.choice(("/etc/passwd", "../../etc/passwd", "gone.bin", ""))
        tensor.external_data.add(key="location", value=where)


def _version(proto: onnx.ModelProto, rng: random.Random) -> None:
    proto.opset_import[0].version = rng.choice((-1, 0, 1, 6, 7, 13, 23, 1000))


def _removed(proto: onnx.ModelProto, rng: random.Random) -> None:
    field = rng.choice((proto.graph.node, proto.graph.initializer, proto.graph.input, proto.graph.output))
    if field:
        del field[rng.randrange(len(field))]


def _moved(proto: onnx.ModelProto, rng: random.Random) -> None:
    nodes = list(proto.graph.node)
    rng.shuffle(nodes)
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)


_CHANGES: Sequence[Callable[[onnx.ModelProto, random.Random], None]] = (
    _dtype,
    _dims,
    _input,
    _output,
    _operator,
    _attribute,
    _value,
    _external,
    _version,
    _removed,
    _moved,
    _declared,
    _fixed,
)


async def fate(gpu: Any, data: bytes) -> str:
    """What becomes of a model: "ran", or the class of its error. Any other exception is raised."""
    try:
        model = await gpu.load(OnnxModel(data, _LIMITS))
    except CudnnActorError as error:
        return type(error).__name__
    try:
        given = {each.name: _made_up(each) for each in model.inputs}
        await gpu.run(model, given)
    except CudnnActorError as error:
        return f"{type(error).__name__} when it runs"
    finally:
        await model.close()
    return "ran"


def _made_up(feature: Any) -> np.ndarray:
    dims = [each if isinstance(each, int) and each < 100 else 2 for each in feature.dims or ()]
    return np.ones(dims, (feature.dtype.numpy if feature.dtype else np.float32))


async def main() -> None:
    """Try many, and print how often what became of them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--suite", action="store_true", help="damage the models of ONNX's node suite")
    args = parser.parse_args()
    models = _of_suite() if args.suite else MODELS
    fates: collections.Counter[str] = collections.Counter()
    async with spawn(device="cpu", memory_limit=1 << 30) as gpu:
        for number in range(args.count):
            data = damaged(random.Random(args.seed * 1_000_000 + number), models)
            try:
                fates[await fate(gpu, data)] += 1
            except BaseException:
                print(f"seed {args.seed}, number {number}")
                raise
            await gpu.drain()
            statistics = await gpu.statistics()
            assert statistics.live_buffers == 0, (number, statistics)
            assert gpu.generation == 1, number
    for what, count in fates.most_common():
        print(f"{count:6} {what}")


if __name__ == "__main__":
    import asyncio

    asyncio.run(main())
