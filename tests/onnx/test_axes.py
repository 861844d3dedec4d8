"""Axes that a tensor does not have, and counts below 0: of each operator that takes them, from one table."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import onnx
import pytest
from onnx import TensorProto, defs, helper, numpy_helper

from cudnn_actor import DType, TensorSpec
from cudnn_actor.errors import InvalidModel, UnsupportedModel
from cudnn_actor.onnx import OnnxModel
from cudnn_actor.onnx.axes import axes_of
from cudnn_actor.onnx.control import CONTROL
from cudnn_actor.onnx.expanding import has_body
from cudnn_actor.onnx.operators import handler_of

from ..in_one_test import cases_in_one_test
from ..whole import pairwise
from .small_models import FLOAT, INT64, graph_of, model_of, node

F4 = np.float32
X = np.arange(6, dtype=F4).reshape(2, 3)
FAR = 1 << 40


class Row(NamedTuple):
    """What an operator is given beside its axes, and which axes there are.

    `x`: its first input. `given`: others, inputs or attributes by their names in some version. `none`: axes
    that it does not have, although they lie between `low` and `high`.
    """

    x: np.ndarray = X
    given: dict[str, Any] = {}  # noqa: RUF012 - nobody changes it
    low: int = -2
    high: int = 1
    none: tuple[int, ...] = ()
    dtype: int = FLOAT


INDICES = {"indices": np.array([[0, 1, 1]]), "updates": X[:1]}
OF_ROWS = {"y_scale": np.ones(2, F4), "y_zero_point": np.zeros(2, np.uint8)}
OF_ROWS |= {"x_scale": OF_ROWS["y_scale"], "x_zero_point": OF_ROWS["y_zero_point"]}
CACHE = np.ones((2, 3, 4), F4)
REDUCTIONS = "L1 L2 LogSum LogSumExp Max Mean Min Prod Sum SumSquare"

ROWS: dict[str, Row] = {
    **{f"Reduce{each}": Row() for each in REDUCTIONS.split()},
    "ArgMax": Row(dtype=INT64),
    "ArgMin": Row(dtype=INT64),
    "CenterCropPad": Row(given={"shape": np.array([2])}),
    "Compress": Row(given={"condition": np.array([True, False])}),
    "Concat": Row(),
    "CumProd": Row(),
    "CumSum": Row(),
    "DFT": Row(x=np.ones((1, 4, 1), F4), low=-3, high=1, none=(-1,)),
    "DequantizeLinear": Row(x=np.zeros((2, 2), np.uint8), given=OF_ROWS),
    "Flatten": Row(high=2),
    "Gather": Row(given={"indices": np.array([0, 1])}),
    "GatherElements": Row(given=INDICES),
    "Hardmax": Row(),
    "LayerNormalization": Row(given={"Scale": np.ones((), F4)}),
    "LogSoftmax": Row(),
    "LpNormalization": Row(),
    "MeanVarianceNormalization": Row(),
    "OneHot": Row(
        x=np.array([[0, 1, 2]]), given={"depth": np.array(3), "values": np.array([0, 1], F4)}, low=-3, high=2
    ),
    "Pad": Row(given={"pads": np.array([0, 1])}),
    "QuantizeLinear": Row(x=np.ones((2, 2), F4), given=OF_ROWS, dtype=TensorProto.UINT8),
    "RMSNormalization": Row(given={"scale": np.ones((), F4)}),
    "Resize": Row(given={"scales": np.ones(1, F4)}),
    "ReverseSequence": Row(x=CACHE[:, :2], given={"sequence_lens": np.array([1, 2])}, low=0, none=(-1,)),
    "Scatter": Row(given=INDICES),
    "ScatterElements": Row(given=INDICES),
    "Slice": Row(given={"starts": np.array([0]), "ends": np.array([1])}),
    "Softmax": Row(),
    "Split": Row(given={"split": np.array([], np.int64), "num_outputs": 1}),
    "SplitToSequence": Row(),
    "Squeeze": Row(x=np.ones((1, 1), F4)),
    "TensorScatter": Row(
        x=CACHE, given={"update": CACHE[:, :1], "write_indices": np.array([0, 1])}, low=-2, high=2, none=(0,)
    ),
    "TopK": Row(given={"K": np.array([1]), "k": 1}),
    "Unique": Row(),
    "Unsqueeze": Row(low=-3, high=2),
}
BY_THEMSELVES = {"ConcatFromSequence", "Scan"}
"""Operators that have tests of their own, below."""


def operators_with_axes() -> Iterator[Any]:
    """Each operator that runs here and has axes, in each of its versions."""
    for schema in defs.get_all_schemas_with_history():
        known = (schema.domain, schema.name) in CONTROL or has_body(schema)
        known = known or handler_of(schema.domain, schema.name, schema.since_version) is not None
        if known and axes_of(schema) and not schema.deprecated:
            yield schema


def test_every_operator_with_axes_is_in_the_table() -> None:
    assert {schema.name for schema in operators_with_axes()} == ROWS.keys()
    others = {
        schema.name
        for schema in defs.get_all_schemas_with_history()
        if (schema.domain, schema.name) in CONTROL
        and any("axis" in name or "axes" in name for name in schema.attributes)
    }
    assert others - ROWS.keys() == BY_THEMSELVES


def with_axis(schema: Any, name: str, axis: int, *, constant: bool) -> onnx.ModelProto:
    """A model of one node that has this axis, and perhaps nothing but constants."""
    row = ROWS[schema.name]
    along = np.array([axis] if name == "axes" or schema.name == "CumSum" else axis)
    given: dict[str, Any] = {**row.given, name: along}
    if schema.name == "ReverseSequence":
        given["time_axis" if name == "batch_axis" else "batch_axis"] = 1 - axis
    inputs = ["x"]
    attributes: dict[str, Any] = {}
    tensors: dict[str, np.ndarray] = {}
    for formal in schema.inputs[1:]:
        known = formal.name in given and np.size(given[formal.name]) > 0
        inputs.append(formal.name if known else "")
        tensors |= {formal.name: given[formal.name]} if known else {}
    for each in schema.attributes.values():
        if each.name in given and np.size(given[each.name]):
            value = np.asarray(given[each.name])
            ints = each.type == defs.OpSchema.AttrType.INTS
            floats = each.type == defs.OpSchema.AttrType.FLOATS
            attributes[each.name] = value.reshape(-1).tolist() if ints or floats else int(value.reshape(()))
    while not inputs[-1]:
        inputs.pop()
    outputs = "y i" if schema.name == "TopK" else "y"
    nodes = [node(schema.name, " ".join(each or "-" for each in inputs), outputs, **attributes)]
    of = helper.np_dtype_to_tensor_dtype(row.x.dtype)
    result = helper.make_tensor_value_info("y", row.dtype, None)
    if schema.name == "SplitToSequence":
        nodes.append(node("SequenceAt", "y first", "z"))
        tensors["first"], result.name = np.array(0), "z"
    graph = graph_of(nodes, {} if constant else {"x": (of, row.x.shape)}, {})
    graph.output.append(result)
    graph.initializer.extend(numpy_helper.from_array(each, name) for name, each in tensors.items())
    graph.initializer.extend([numpy_helper.from_array(row.x, "x")] if constant else [])
    imports = [helper.make_opsetid("", max(schema.since_version, 7))]
    return helper.make_model(graph, opset_imports=imports)


def imported(proto: onnx.ModelProto) -> None:
    model = OnnxModel(proto)
    specs: Any = {each.name: each.spec for each in model.inputs}
    values = {name: np.ones(spec.dims, spec.dtype.numpy) for name, spec in specs.items()}
    model.specialise(specs, values)


EACH = [pytest.param(each, id=f"{each.name}-{each.since_version}") for each in operators_with_axes()]


@cases_in_one_test
@pytest.mark.parametrize("schema", EACH)
def test_an_axis_that_there_is_not_is_refused_and_each_other_is_taken(schema: Any) -> None:
    row = ROWS[schema.name]
    wrong = (row.low - 1, row.high + 1, 7, -FAR, FAR, *row.none)
    for name in axes_of(schema):
        right = sorted(set(range(row.low, row.high + 1)) - {*row.none})
        for axis, constant in pairwise(itertools.product((*wrong, *right), (False, True)), tuple, together=1):
            refused = pytest.raises(InvalidModel, match=r"axis|axes")
            with contextlib.nullcontext() if axis in right else refused:
                imported(with_axis(schema, name, axis, constant=constant))


def test_no_axis_is_one_of_a_tensor_without_dims() -> None:
    for op in ("Softmax", "ReduceMax", "CumSum"):
        scalar = with_axis(defs.get_schema(op), next(iter(axes_of(defs.get_schema(op)))), 0, constant=False)
        scalar.graph.input[0].type.tensor_type.shape.ClearField("dim")
        with pytest.raises(InvalidModel, match="has axis 0, where there is none"):
            imported(scalar)


@pytest.mark.parametrize("attribute", ["scan_input_axes", "scan_output_axes"])
@pytest.mark.parametrize("axis", [-3, 2, 7])
def test_an_axis_of_a_scan_that_there_is_not_is_refused(attribute: str, axis: int) -> None:
    body = graph_of([node("Exp", "part", "e")], {"part": (FLOAT, None)}, {"e": (FLOAT, None)})
    scan = node("Scan", "x", "y", body=body, num_scan_inputs=1, **{attribute: [axis]})
    with pytest.raises(InvalidModel, match=f"has axis {axis}, where the axes are -2 to 1"):
        imported(model_of([scan], {"x": (FLOAT, [2, 3])}, {"y": (FLOAT, None)}))


@pytest.mark.parametrize(("new", "axis"), [(0, 2), (0, -3), (1, 3), (1, -4)])
def test_an_axis_that_a_list_is_joined_along_and_that_there_is_not_is_refused(new: int, axis: int) -> None:
    nodes = [
        node("SequenceConstruct", "x x", "list"),
        node("ConcatFromSequence", "list", "y", axis=axis, new_axis=new),
    ]
    with pytest.raises(InvalidModel, match=f"has axis {axis}, where the axes are"):
        imported(model_of(nodes, {"x": (FLOAT, [2, 3])}, {"y": (FLOAT, None)}))


def test_an_axis_that_an_input_of_the_model_says_is_refused_by_its_run_only() -> None:
    proto = model_of(
        [node("CumSum", "x axis", "y")], {"x": (FLOAT, [2, 3]), "axis": (INT64, [])}, {"y": (FLOAT, None)}
    )
    model = OnnxModel(proto)
    specs = {"x": TensorSpec.packed((2, 3), DType.FLOAT32), "axis": TensorSpec.packed((), DType.INT64)}
    model.specialise(specs, {"axis": np.array(-1)})
    with pytest.raises(UnsupportedModel, match="has axis 2, where the axes are -2 to 1, which an input"):
        model.specialise(specs, {"axis": np.array(2)})


IMAGES = np.ones((1, 4, 4, 4), F4)
FILTERS = np.ones((4, 4, 1, 1), F4)
COUNTS: list[tuple[str, dict[str, Any], int]] = [
    ("AveragePool", {"kernel_shape": [0, 1]}, 21),
    ("CenterCropPad", {"shape": [-1, 4, 4, 4]}, 21),
    ("Col2Im", {"image_shape": [-4, 4], "block_shape": [1, 1]}, 21),
    ("Conv", {"W": FILTERS, "group": 0}, 21),
    ("Conv", {"W": FILTERS, "strides": [0, 1]}, 21),
    ("ConvTranspose", {"W": FILTERS, "output_padding": [-1, 0]}, 21),
    ("DFT", {"dft_length": -2}, 21),
    ("DepthToSpace", {"blocksize": -2}, 21),
    ("Expand", {"shape": [-1, 4, 4, 4]}, 21),
    ("LpNormalization", {"p": 5}, 21),
    ("MaxPool", {"kernel_shape": [1, 1], "dilations": [-1, 1]}, 21),
    ("OneHot", {"depth": -3, "values": np.array([0, 1], F4)}, 21),
    ("Pad", {"pads": [0, 0, -3, 0, 0, 0, -3, 0]}, 21),
    ("Reshape", {"shape": [-2, -32]}, 21),
    ("Resize", {"sizes": [1, 4, -2, 4]}, 21),
    ("Split", {"split": [5, -1], "axis": 1}, 11),
    ("Split", {"split": [5, -1], "axis": 1}, 21),
    ("Split", {"num_outputs": 0, "axis": 1}, 21),
    ("SplitToSequence", {"split": [5, -1], "axis": 1}, 21),
    ("Tile", {"repeats": [-1, 0, 1, 1]}, 21),
    ("Tile", {"repeats": [1, 1]}, 21),
    ("TopK", {"k": -1}, 9),
    ("TopK", {"K": [-1]}, 21),
    ("Transpose", {"perm": [0, 1, 2, -1]}, 21),
]


@cases_in_one_test
@pytest.mark.parametrize(("op", "given", "version"), COUNTS)
@pytest.mark.parametrize("constant", [False, True])
def test_a_count_below_its_least_value_is_refused(
    op: str, given: dict[str, Any], version: int, constant: bool
) -> None:
    schema = defs.get_schema(op, version)
    arrays = {name: np.asarray(value) for name, value in given.items() if name not in schema.attributes}
    names = [each.name if each.name in arrays else "-" for each in schema.inputs[1:]]
    outputs = " ".join(f"y{number}" for number in range(2 if op in ("Split", "TopK") else 1))
    attributes = {name: value for name, value in given.items() if name in schema.attributes}
    made = node(op, " ".join(["x", *names]).rstrip(" -"), outputs, **attributes)
    x = np.ones((1, 4, 16), F4) if op == "Col2Im" else IMAGES.astype(np.int64) if op == "OneHot" else IMAGES
    of, tensors = helper.np_dtype_to_tensor_dtype(x.dtype), {**arrays, **({"x": x} if constant else {})}
    inputs = {} if constant else {"x": (of, x.shape)}
    proto = model_of(
        [made], inputs, {"y0": (FLOAT, None)}, tensors, opset_imports=[helper.make_opsetid("", version)]
    )
    with pytest.raises(InvalidModel, match=rf"\({op}\): (has|pads)"):
        imported(proto)
