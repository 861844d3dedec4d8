"""What no size of a model's open dims can mend is refused when it is loaded, and nothing else."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

from cudnn_actor import TensorSpec
from cudnn_actor.models import InvalidModel, UnsupportedModel
from cudnn_actor.onnx import OnnxModel
from cudnn_actor.protocol.errors import CudnnActorError

from ..in_one_test import cases_in_one_test
from ..whole import WHOLE
from . import node_suite
from .small_models import FLOAT, model_of, node

N4: list[Any] = ["N", 4]
IMAGES: list[Any] = ["N", 3, "H", "W"]


def of_one(op: str, dims: list[Any], tensors: dict[str, Any], **attributes: Any) -> onnx.ModelProto:
    """A node of an input with these dims, and of constants: their dims are given, or their elements."""
    made = {
        name: np.ones(each, np.float32) if isinstance(each, tuple) else np.array(each)
        for name, each in tensors.items()
    }
    one = node(op, " ".join(["x", *tensors]), "y", name="one", **attributes)
    return model_of([one], {"x": (FLOAT, dims)}, {"y": (FLOAT, None)}, made)


@cases_in_one_test
@pytest.mark.parametrize(
    ("op", "dims", "tensors", "attributes"),
    [
        ("MatMul", N4, {"w": (5, 3)}, {}),
        ("MatMul", ["N", "M", 4], {"w": (2, 5, 3)}, {}),
        ("Gemm", N4, {"w": (5, 3)}, {}),
        ("Gemm", N4, {"w": (3, 5)}, {"transB": 1}),
        ("Add", N4, {"w": (5,)}, {}),
        ("Conv", IMAGES, {"w": (8, 4, 3, 3)}, {}),
        ("Conv", IMAGES, {"w": (8, 3, 3, 3), "b": (5,)}, {}),
        ("Conv", IMAGES, {"w": (8, 3, 3)}, {}),
        ("ConvTranspose", IMAGES, {"w": (4, 8, 3, 3)}, {}),
        ("BatchNormalization", IMAGES, {"s": (4,), "b": (4,), "m": (4,), "v": (4,)}, {}),
        ("GroupNormalization", IMAGES, {"s": (3,), "b": (3,)}, {"num_groups": 2}),
        ("LayerNormalization", N4, {"s": (5,)}, {}),
        ("PRelu", N4, {"s": (5,)}, {}),
        ("Reshape", N4, {"shape": [0, 5]}, {}),
        ("Reshape", N4, {"shape": [0, -1, 3]}, {}),
        ("Reshape", ["N", 3], {"shape": [4, 2]}, {}),
        ("Expand", N4, {"shape": [1, 7]}, {}),
        ("Squeeze", N4, {"axes": [1]}, {}),
        ("Concat", N4, {"w": (2, 5)}, {"axis": 0}),
        ("Einsum", N4, {"w": (5, 3)}, {"equation": "ij,jk->ik"}),
        ("Einsum", N4, {"w": (5,)}, {"equation": "ij,jk->ik"}),
        ("Transpose", N4, {}, {"perm": [0, 0]}),
        ("Softmax", N4, {}, {"axis": 7}),
        ("Cast", N4, {}, {"to": 99}),
        ("LSTM", [7, "N", 3], {"w": (1, 8, 4), "r": (1, 8, 2)}, {"hidden_size": 2}),
    ],
)
def test_known_dims_that_contradict_an_operator(
    op: str, dims: list[Any], tensors: dict[str, Any], attributes: dict[str, Any]
) -> None:
    with pytest.raises(InvalidModel, match=rf"node 'one' \({op}\)"):
        OnnxModel(of_one(op, dims, tensors, **attributes))


def test_nodes_that_cannot_be_run_are_all_named() -> None:
    nodes = [
        node("Cast", "x", "a", to=TensorProto.STRING, name="text"),
        node("Cast", "x", "b", to=TensorProto.FLOAT8E4M3FN, name="bytes"),
        node("Conv", "x w", "c", kernel_shape=[5, 5], name="filter"),
        node("Relu", "x", "y"),
    ]
    proto = model_of(
        nodes, {"x": (FLOAT, IMAGES)}, {"y": (FLOAT, None)}, {"w": np.ones((2, 3, 3, 3), np.float32)}
    )
    with pytest.raises(UnsupportedModel, match="the model has 3 nodes") as raised:
        OnnxModel(proto)
    assert raised.value.nodes == (
        "node 'text' (Cast): no tensor here is of string",
        "node 'bytes' (Cast): no tensor here is of float8e4m3fn",
        "node 'filter' (Conv): kernel_shape (5, 5) is not that of the filter, (3, 3)",
    )


def test_dims_behind_other_nodes_are_known() -> None:
    """Those of a split, too, of which ONNX is not asked."""
    nodes = [
        node("MatMul", "x w", "a"),
        node("Split", "a", "b c d", axis=-1, num_outputs=3),
        node("Relu", "c", "e"),
        node("MatMul", "e v", "y", name="one"),
    ]
    tensors = {"w": np.ones((4, 12), np.float32), "v": np.ones((12, 3), np.float32)}
    proto = model_of(nodes, {"x": (FLOAT, ["N", "S", 4])}, {"y": (FLOAT, None)}, tensors)
    with pytest.raises(
        InvalidModel, match=r"node 'one' \(MatMul\): has inputs of dims \(\?, \?, 4\), \(12, 3\)"
    ):
        OnnxModel(proto)


@cases_in_one_test
@pytest.mark.parametrize(
    ("op", "dims", "tensors", "attributes"),
    [
        ("MatMul", ["N", "K"], {"w": (9216, 3)}, {}),
        ("Add", ["N", "M"], {"w": (5,)}, {}),
        ("Conv", ["N", "C", "H", "W"], {"w": (8, 12, 11, 7)}, {"group": 3}),
        ("Reshape", ["N", "M"], {"shape": [-1, 7, 11, 13]}, {}),
        ("Reshape", ["N"], {"shape": [2, 3, 5, 7]}, {}),
        ("Reshape", ["N", 6], {"shape": [4, 9]}, {}),
        ("MaxPool", ["N", 3, "H", "W"], {}, {"kernel_shape": [31, 37]}),
        ("DepthToSpace", ["N", "C", "H", "W"], {}, {"blocksize": 5}),
        ("GroupNormalization", ["N", "C", "M"], {"s": (91,), "b": (91,)}, {"num_groups": 13}),
        ("Squeeze", ["N", "M"], {"axes": [0]}, {}),
        ("Gather", ["N", "M"], {"i": [900]}, {"axis": 1}),
    ],
)
def test_what_some_size_mends_is_loaded(
    op: str, dims: list[Any], tensors: dict[str, Any], attributes: dict[str, Any]
) -> None:
    assert OnnxModel(of_one(op, dims, tensors, **attributes)).inputs


def opened(case: Any, draw: random.Random) -> onnx.ModelProto:
    """A case of ONNX's node suite with some dims open, and perhaps constants for all inputs but one."""
    made = onnx.ModelProto()
    made.CopyFrom(case.model)
    graph, (given, _) = made.graph, case.data_sets[0]
    kept = draw.randrange(len(graph.input)) if graph.input and draw.random() < 0.5 else None
    for number in reversed(range(min(len(graph.input), len(given)))):
        value = given[number]
        array = numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else value
        if kept not in (None, number) and isinstance(array, np.ndarray | np.generic):
            graph.initializer.append(numpy_helper.from_array(np.asarray(array), graph.input[number].name))
            del graph.input[number]
    share = draw.choice([0.3, 1])
    for value in graph.input:
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            if axis == 0 or draw.random() < share:
                dim.dim_param = f"{value.name} {axis}"
    for value in graph.output:
        if value.type.HasField("tensor_type"):
            value.type.tensor_type.ClearField("shape")
    return made


def can_be_run(case: Any) -> bool:
    """Whether a case can be imported with its own dims and values."""
    inputs = {}
    for value, given in zip(case.model.graph.input, case.data_sets[0][0], strict=False):
        inputs[value.name] = numpy_helper.to_array(given) if isinstance(given, onnx.TensorProto) else given
    try:
        source = OnnxModel(case.model, random=1)
        specs = {name: TensorSpec.packed(array.shape, array.dtype) for name, array in inputs.items()}
        source.specialise(specs, inputs)
    except CudnnActorError:
        return False
    return True


def test_what_can_be_run_is_loaded_with_open_dims() -> None:
    """Some of the cases of ONNX's node suite, that can be run with their own dims: in each run others."""
    seed = random.randrange(1 << 32)
    draw, refused = random.Random(seed), []
    for case in node_suite.cases():
        if draw.random() > (1 / 6 if WHOLE else 1 / 15):
            continue
        try:
            OnnxModel(opened(case, draw), random=1)
        except CudnnActorError as error:
            if can_be_run(case):
                refused.append(f"{case.name}: {error}")
    assert not refused, "\n".join([f"seed {seed}", *refused])
