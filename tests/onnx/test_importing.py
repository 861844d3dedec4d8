"""How nodes become operations: functions, control flow, constants, and what is fused."""

from __future__ import annotations

import asyncio
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from cudnn_actor import DType, TensorSpec, spawn
from cudnn_actor.errors import InvalidModel, UnsupportedModel
from cudnn_actor.onnx import ModelLimits, OnnxModel
from cudnn_actor.onnx.operator_table import NO_WAY, UNSEEDED
from cudnn_actor.protocol import Layout
from cudnn_actor.protocol.operations import Convolution

from .small_models import FLOAT, INT64, graph_of, model_of, node

BOOL, HALF = TensorProto.BOOL, TensorProto.FLOAT16
rng = np.random.default_rng(11)


def imported(proto: onnx.ModelProto, **dims: tuple[int, ...]) -> Any:
    """A model for inputs of these dims: what it is made into."""
    model = OnnxModel(proto)
    inputs: Any = model.inputs
    specs = {each.name: TensorSpec.packed(dims.get(each.name, each.dims), each.dtype) for each in inputs}
    return model.specialised(specs, {})


def kinds(special: Any) -> list[str]:
    """The operations of a graph, in order."""
    return [str(getattr(each, "mode", each.kind)) for each in special.graph.body.operations]


def run(proto: onnx.ModelProto, **inputs: np.ndarray) -> list[np.ndarray]:
    async def result() -> list[np.ndarray]:
        async with spawn(device="cpu") as gpu:
            model = await gpu.load(proto)
            found = list((await gpu.run(model, inputs)).values())
            await model.close()
            return found

    return asyncio.run(result())


def check(proto: onnx.ModelProto, **inputs: np.ndarray) -> None:
    """Compare with ONNX's reference implementation."""
    for value, wanted in zip(run(proto, **inputs), ReferenceEvaluator(proto).run(None, inputs), strict=True):
        assert value.dtype == wanted.dtype
        np.testing.assert_allclose(value, wanted, rtol=1e-5, atol=1e-6)


X = rng.standard_normal((3, 4)).astype(np.float32)
PORTS = {"x": (FLOAT, [3, 4])}, {"y": (FLOAT, [3, 4])}
SPECS = {"x": TensorSpec.packed((3, 4), DType.FLOAT32)}


# Constants.


@pytest.mark.parametrize("dtype", [np.int64, np.uint8, np.float64, ml_dtypes.bfloat16])
def test_a_choice_of_two_constants_has_their_dtype(dtype: Any) -> None:
    one, two = np.array(1, dtype), np.array(2, dtype)
    code = helper.np_dtype_to_tensor_dtype(one.dtype)
    choice = [node("Greater", "x zero", "c"), node("Where", "c one two", "y")]
    tensors = {"zero": np.zeros((), np.float32), "one": one, "two": two}
    (found,) = run(model_of(choice, PORTS[0], {"y": (code, [3, 4])}, tensors), x=X)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, np.where(X > 0, one, two))


def test_what_follows_from_dims_and_constants_is_no_part_of_the_graph() -> None:
    proto = model_of(
        [
            node("Shape", "x", "s"),
            node("Gather", "s zero", "rows"),
            node("Mul", "rows two", "twice"),
            node("Concat", "twice rest", "dims", axis=0),
            node("Reshape", "x dims", "y"),
            node("Sqrt", "four", "root"),
            node("Mul", "y root", "z"),
        ],
        {"x": (FLOAT, ["N", 4])},
        {"z": (FLOAT, None)},
        {
            "zero": np.array([0]),
            "two": np.array([2]),
            "rest": np.array([-1]),
            "four": np.array(4, np.float32),
        },
    )
    special = imported(proto, x=(3, 4))
    assert kinds(special) == ["reshape", "mul"]
    assert special.weights == {}
    check(proto, x=X)


def test_a_constant_of_the_dtype_of_an_input_is_a_constant() -> None:
    proto = model_of(
        [node("CastLike", "one x", "like"), node("Exp", "like", "e"), node("Mul", "x e", "y")],
        *PORTS,
        {"one": np.array(1, np.int64)},
    )
    assert kinds(imported(proto)) == ["mul"]
    check(proto, x=X)


def test_a_model_of_constants_needs_no_graph() -> None:
    proto = model_of(
        [node("Add", "a b", "y")], {}, {"y": (FLOAT, [2])}, {"a": np.ones(2, "f4"), "b": np.ones(2, "f4")}
    )
    assert imported(proto).graph is None
    np.testing.assert_array_equal(run(proto)[0], [2, 2])


def test_an_output_may_be_an_input() -> None:
    proto = model_of([node("Identity", "x", "y")], *PORTS)
    np.testing.assert_array_equal(run(proto, x=X)[0], X)


def test_a_huge_constant_is_not_computed_when_the_model_is_imported() -> None:
    proto = model_of(
        [
            node("ConstantOfShape", "dims", "c"),
            node("ReduceMax", "c", "m", keepdims=0),
            node("Add", "x m", "y"),
        ],
        *PORTS,
        {"dims": np.array([1 << 20, 1 << 10])},
    )
    assert "max" in kinds(imported(proto))


def test_weights_are_named_as_the_model_names_them_and_equal_constants_are_one() -> None:
    proto = model_of(
        [
            node("Mul", "x w", "a"),
            node("Neg", "v", "b"),
            node("Neg", "v", "c"),
            node("Add", "a b", "d"),
            node("Mul", "d c", "y"),
        ],
        *PORTS,
        {"w": X, "v": X[0]},
    )
    special = imported(proto)
    assert list(special.weights) == ["w", "constant 1"]
    assert special.weights["w"][0] == "initialiser 'w'"
    check(proto, x=X)


@pytest.mark.parametrize("options", [{}, {"dtype": DType.BFLOAT16}, {"swappable": True}])
def test_a_weight_that_is_read_as_it_is_and_transposed_is_uploaded_once(options: Any) -> None:
    nodes = [
        node("Gather", "words x", "rows"),
        node("Transpose", "words", "turned", perm=[1, 0]),
        node("MatMul", "rows turned", "y"),
    ]
    tensors = {"words": rng.standard_normal((6, 4)).astype("f4")}
    proto = model_of(nodes, {"x": (INT64, [3])}, {"y": (FLOAT, [3, 6])}, tensors)
    special = OnnxModel(proto, **options).specialised({"x": TensorSpec.packed((3,), "int64")}, {})
    assert len(special.weights) == 1
    check(proto, x=np.array([5, 0, 3]))


@pytest.mark.parametrize("options", [{}, {"dtype": DType.BFLOAT16}, {"swappable": True}])
def test_a_weight_that_is_transposed_again_and_again_is_one_weight(options: Any) -> None:
    """So often that a call in a call for each time would be too deep."""
    count = 1500
    turns = [node("Transpose", f"w{n}", f"w{n + 1}", perm=[1, 0]) for n in range(count)]
    proto = model_of(
        [*turns, node("MatMul", f"x w{count}", "y")],
        {"x": (FLOAT, [2, 4])},
        {"y": (FLOAT, [2, 4])},
        {"w0": rng.standard_normal((4, 4)).astype("f4")},
    )
    special = OnnxModel(proto, **options).specialised({"x": TensorSpec.packed((2, 4), "float32")}, {})
    assert len(special.weights) == 1


@pytest.mark.parametrize("dtype", [TensorProto.BFLOAT16, HALF, FLOAT])
def test_networks_of_half_types_have_their_channels_last(dtype: int) -> None:
    """From the first convolution on; filters are uploaded so, where they are constants."""
    proto = model_of(
        [
            node("Conv", "x w", "a", pads=[1] * 4),
            node("MaxPool", "a", "b", kernel_shape=[2, 2]),
            node("Mul", "w s", "v"),
            node("Conv", "b v", "c", pads=[1] * 4),
            node("ConvTranspose", "c w", "y"),
        ],
        {"x": (dtype, [1, 4, 6, 6]), "s": (dtype, [1, 1, 1, 1])},
        {"y": (dtype, [1, 4, 7, 7])},
        {"w": rng.standard_normal((4, 4, 3, 3)).astype(helper.tensor_dtype_to_np_dtype(dtype))},
    )
    special = imported(proto)
    last = [port.name for port in special.graph.inputs if port.spec.layout is Layout.NHWC]
    assert last == ([] if dtype == FLOAT else ["w"])
    for operation in special.graph.body.operations:
        if isinstance(operation, Convolution):
            tensors = map(special.graph.body.tensor, (*operation.reads, *operation.writes))
            assert {tensor.spec.layout is Layout.NHWC for tensor in tensors} == {dtype != FLOAT}


def test_what_several_convolutions_read_is_copied_once() -> None:
    proto = model_of(
        [node("Conv", "x w", "a"), node("Conv", "x v", "b"), node("Add", "a b", "y")],
        {"x": (HALF, [1, 4, 6, 6]), "v": (HALF, [4, 4, 3, 3])},
        {"y": (HALF, [1, 4, 4, 4])},
        {"w": rng.standard_normal((4, 4, 3, 3)).astype(np.float16)},
    )
    operations = imported(proto).graph.body.operations
    copied = [each.reads for each in operations if each.kind == "pointwise"][:-1]
    assert len(copied) == len(set(copied)) == 2


def test_tensors_without_elements_are_constants() -> None:
    proto = model_of(
        [
            node("Concat", "x empty", "c", axis=0),
            node("ReduceSum", "e axes", "s", keepdims=0),
            node("Add", "c s", "y"),
        ],
        {"x": (FLOAT, [3, 4]), "e": (FLOAT, [0, 4]), "axes": (INT64, [1])},
        {"y": (FLOAT, [3, 4])},
        {"empty": np.empty((0, 4), np.float32)},
    )
    check(proto, x=X, e=np.empty((0, 4), np.float32), axes=np.array([0]))


# Functions.


def test_functions_of_the_model_with_attributes_of_their_own() -> None:
    leaky = helper.make_node("LeakyRelu", ["t"], ["r"])
    leaky.attribute.append(
        helper.make_attribute_ref("alpha", onnx.AttributeProto.FLOAT, ref_attr_name="slope")
    )
    inner = helper.make_function(
        "own", "Inner", ["t"], ["r"], [leaky], [helper.make_opsetid("", 21)], ["slope"]
    )
    call = helper.make_node("Inner", ["x"], ["y"], domain="own", slope=0.25)
    outer = helper.make_function(
        "own", "Outer", ["x"], ["y"], [call], [helper.make_opsetid("", 21), helper.make_opsetid("own", 1)]
    )
    proto = model_of(
        [helper.make_node("Outer", ["x"], ["y"], domain="own")],
        *PORTS,
        functions=[inner, outer],
        opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid("own", 1)],
    )
    assert kinds(imported(proto)) == ["leaky_relu"]
    np.testing.assert_allclose(run(proto, x=X)[0], np.where(X > 0, X, X / 4), rtol=1e-6)


def test_a_function_that_contains_itself_is_invalid() -> None:
    call = helper.make_node("Loopy", ["x"], ["y"], domain="own")
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("own", 1)]
    loopy = helper.make_function("own", "Loopy", ["x"], ["y"], [call], opsets)
    proto = model_of([call], *PORTS, functions=[loopy], opset_imports=opsets)
    with pytest.raises(InvalidModel, match="must not be recursive"):
        imported(proto)


def test_what_is_missing_in_a_function_is_named_with_the_node_around_it() -> None:
    call = helper.make_node("Odd", ["x"], ["y"], domain="own", name="outer")
    inner = helper.make_node("RandomNormalLike", ["x"], ["y"], name="inner")
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("own", 1)]
    odd = helper.make_function("own", "Odd", ["x"], ["y"], [inner], opsets)
    proto = model_of([call], *PORTS, functions=[odd], opset_imports=opsets)
    with pytest.raises(UnsupportedModel, match=r"node 'outer' \(own.Odd\), in node 'inner' \(RandomN"):
        imported(proto)


def test_what_no_dims_can_make_run_is_named_in_functions_when_a_model_is_loaded() -> None:
    """Each with the first call by which it is reached; but not what nothing calls."""
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("own", 1)]

    def function(name: str, *nodes: onnx.NodeProto) -> onnx.FunctionProto:
        return helper.make_function("own", name, ["x"], ["y"], list(nodes), opsets)

    def call(op: str, inputs: str, outputs: str, **options: str) -> onnx.NodeProto:
        return node(op, inputs, outputs, domain="own", **options)

    functions = [
        function("Noise", node("RandomNormalLike", "x", "n", name="noise"), node("Add", "x n", "y")),
        function("Strange", call("Noise", "x", "z"), node("NoSuch", "z", "y", name="odd", domain="own")),
        function("Length", node("Size", "x", "y")),
        function("Unused", node("Bernoulli", "x", "y")),
    ]
    nodes = [
        call("Strange", "x", "a", name="one"),
        call("Noise", "a", "y", name="other"),
        call("Length", "x", "z"),
    ]
    proto = model_of(
        nodes, {"x": (FLOAT, ["N", 4])}, {"y": (FLOAT, None)}, functions=functions, opset_imports=opsets
    )
    with pytest.raises(UnsupportedModel) as raised:
        OnnxModel(proto)
    assert raised.value.nodes == (
        f"node 'one' (own.Strange), in node 'noise' (RandomNormalLike): {UNSEEDED}",
        f"node 'one' (own.Strange), in node 'odd' (own.NoSuch): {NO_WAY}",
    )


def test_versions_that_the_installed_onnx_does_not_know_are_named() -> None:
    """The operators could mean something else in them."""
    newest = onnx.defs.onnx_opset_version()
    own = helper.make_opsetid("own", 1)
    function = helper.make_function(
        "own", "F", ["x"], ["y"], [node("Neg", "x", "y")], [helper.make_opsetid("", newest + 2)]
    )
    nodes = [node("F", "x", "t", domain="own"), node("Relu", "t", "y")]
    known = helper.make_opsetid("", newest)
    assert OnnxModel(model_of([node("Relu", "x", "y")], *PORTS, opset_imports=[known])).inputs
    unknown = helper.make_opsetid("", newest + 1)
    proto = model_of(nodes, *PORTS, functions=[function], opset_imports=[unknown, own])
    with pytest.raises(UnsupportedModel, match="the model has 2 parts") as raised:
        OnnxModel(proto)
    told = f"and the installed package onnx {onnx.__version__} knows up to {newest}; upgrade it"
    assert raised.value.nodes == (
        f"opset_import: asks for version {newest + 1} of ONNX's operators, {told}",
        f"function 'F': asks for version {newest + 2} of ONNX's operators, {told}",
    )


@pytest.mark.parametrize(
    ("domain", "version", "problem"),
    [
        ("", 99, "version 99 of ONNX's operators, and the installed package onnx .* knows up to"),
        ("ai.onnx.ml", 99, "version 99 of ONNX's operators of ai.onnx.ml, .* knows up to"),
        ("", 0, "version 0 of ONNX's operators, which there is not: the first one is 1"),
    ],
)
def test_versions_that_there_are_not_are_named(domain: str, version: int, problem: str) -> None:
    opsets = {"": 21, "ai.onnx.ml": 1, domain: version}
    imports = [helper.make_opsetid(*each) for each in opsets.items()]
    proto = model_of([node("Binarizer", "x", "y", domain="ai.onnx.ml")], *PORTS, opset_imports=imports)
    with pytest.raises(UnsupportedModel, match=problem):
        OnnxModel(proto)


def test_all_operators_that_onnx_does_not_have_are_named() -> None:
    """In a version of its own domains, as in a domain of one's own; with named dims, too."""
    opsets = [helper.make_opsetid(domain, 18 if not domain else 1) for domain in ("", "ai.onnx.ml", "own")]
    unknown = node("Nope", "x", "y", name="inner")
    function = helper.make_function("own", "F", ["x"], ["y"], [unknown], opsets)
    nodes = [
        node("Swish", "x", "a", name="newer"),
        node("Nope", "a", "b", name="none", speed=3),
        helper.make_node("Nope", ["b"], ["c"], "learned", domain="ai.onnx.ml"),
        node("Nope", "zero", "d", name="of constants"),
        helper.make_node("F", ["c"], ["y"], "calls", domain="own"),
    ]
    wanted = [
        "node 'newer' (Swish)",
        "node 'none' (Nope)",
        "node 'learned' (ai.onnx.ml.Nope)",
        "node 'of constants' (Nope)",
        "node 'calls' (own.F), in node 'inner' (Nope)",
    ]
    for dim in (3, "N"):
        ports = {"x": (FLOAT, [dim, 4])}, {"y": (FLOAT, [dim, 4])}
        tensors = {"zero": np.zeros((), np.float32)}
        proto = model_of(nodes, *ports, tensors, functions=[function], opset_imports=opsets)
        with pytest.raises(UnsupportedModel) as raised:
            OnnxModel(proto)
        assert sorted(raised.value.nodes) == sorted(f"{each}: {NO_WAY}" for each in wanted)


# Control flow.


def branch(op: str) -> onnx.GraphProto:
    return graph_of([node(op, "x", "y")], {}, {"y": (FLOAT, [3, 4])})


def test_a_branch_is_chosen_by_the_value_of_its_condition() -> None:
    proto = model_of(
        [node("If", "c", "y", then_branch=branch("Relu"), else_branch=branch("Neg"))],
        {"x": (FLOAT, [3, 4]), "c": (BOOL, [])},
        {"y": (FLOAT, [3, 4])},
    )
    for value in (True, False):
        check(proto, x=X, c=np.array(value))


def test_what_only_constants_can_be_computed_of_waits_for_the_values_that_decide() -> None:
    """ONNX's operator has no way but to be folded, of a shape that the branch decides over."""
    proto = model_of(
        [
            node("If", "c", "z", then_branch=branch("Identity"), else_branch=branch("Transpose")),
            node("Shape", "z", "s", start=1),
            node("Squeeze", "s", "n"),
            node("MelWeightMatrix", "n length rate low high", "m"),
            node("Neg", "m", "y"),
        ],
        {"x": (FLOAT, [3, 4]), "c": (BOOL, [])},
        {"y": (FLOAT, None)},
        {
            "length": np.array(16),
            "rate": np.array(8192),
            "low": np.array(0, np.float32),
            "high": np.array(4096, np.float32),
        },
    )
    for value, bins in ((True, 4), (False, 3)):
        (y,) = run(proto, x=X, c=np.array(value))
        assert y.shape == (9, bins)


def test_a_loop_is_unrolled() -> None:
    body = graph_of(
        [node("Mul", "v x", "w"), node("Identity", "go", "on"), node("ReduceSum", "w", "s", keepdims=0)],
        {"i": (INT64, []), "go": (BOOL, []), "v": (FLOAT, [3, 4])},
        {"on": (BOOL, []), "w": (FLOAT, [3, 4]), "s": (FLOAT, [])},
    )
    proto = model_of(
        [node("Loop", "n yes x", "y sums", body=body)],
        {"x": (FLOAT, [3, 4]), "n": (INT64, [])},
        {"y": (FLOAT, [3, 4]), "sums": (FLOAT, [None])},
        {"yes": np.array(True)},
    )
    y, sums = run(proto, x=X, n=np.array(3))
    np.testing.assert_allclose(y, X**4, rtol=1e-5)
    np.testing.assert_allclose(sums, [(X**power).sum() for power in (2, 3, 4)], rtol=1e-5)


@pytest.mark.parametrize("inner", [[], [node("Neg", "v", "o")]])
def test_loops_in_loops_are_unrolled_up_to_a_limit(inner: list[onnx.NodeProto]) -> None:
    """Also one whose body has no nodes."""
    ports = {"i": (INT64, []), "c": (BOOL, []), "v": (FLOAT, [3, 4])}
    body = graph_of(inner, ports, {"c": (BOOL, []), "o" if inner else "v": (FLOAT, [3, 4])})
    for _ in inner:
        loop = node("Loop", "n yes v", "o", body=body, name="loop")
        body = graph_of([loop], ports, {"c": (BOOL, []), "o": (FLOAT, [3, 4])})
    tensors = {"n": np.array(1000), "yes": np.array(True)}
    outer = node("Loop", "n yes x", "y", body=body, name="outer")
    proto, limits = model_of([outer], *PORTS, tensors), ModelLimits(nodes=50)
    many = r"'outer' \(Loop\).*: has 1,000 turns, which expand the model to 3,0\d\d nodes"
    with pytest.raises(UnsupportedModel, match=many):  # a swappable model has no loops of the service
        OnnxModel(proto, limits, swappable=True).specialised(SPECS, {})


def test_functions_are_expanded_up_to_a_limit() -> None:
    """Each of them calls the next one twice: 2^29 nodes."""
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("own", 1)]
    functions = []
    for number in range(29):
        op, domain = (f"F{number + 1}", "own") if number < 28 else ("Neg", "")
        calls = [helper.make_node(op, [a], [b], domain=domain) for a, b in ("xz", "zy")]
        functions.append(helper.make_function("own", f"F{number}", ["x"], ["y"], calls, opsets))
    call = helper.make_node("F0", ["x"], ["y"], domain="own", name="outer")
    proto = model_of([call], *PORTS, functions=functions, opset_imports=opsets)
    with pytest.raises(
        UnsupportedModel, match=r"'outer' \(own.F0\): expands the model to more than 99 nodes"
    ):
        OnnxModel(proto, ModelLimits(nodes=99)).specialised(SPECS, {})


# Operators with a meaning of their own here.


def test_lists_are_there_while_a_model_is_imported() -> None:
    """Parts are put into a list, taken out of it and concatenated, as a loop does for bags of embeddings."""
    tensors = {"one": np.array(1), "last": np.array(-1), "sizes": np.array([1, 3]), "four": np.array(4)}
    body = graph_of(
        [
            node("SequenceAt", "parts i", "part"),
            node("ReduceSum", "part", "sum", keepdims=0),
            node("SequenceInsert", "before sum", "after"),
            node("Identity", "on", "still"),
        ],
        {"i": (INT64, []), "on": (BOOL, []), "before": (FLOAT, None)},
        {"still": (BOOL, []), "after": (FLOAT, None)},
    )
    for value in (body.input[2], body.output[1]):
        elements = helper.make_tensor_type_proto(FLOAT, None)
        value.type.CopyFrom(helper.make_sequence_type_proto(elements))
    nodes = [
        node("SplitToSequence", "x", "parts", axis=1, keepdims=0),
        node("SequenceEmpty", "", "none"),
        node("Loop", "four - none", "sums", body=body),
        node("ConcatFromSequence", "sums", "of_columns", axis=0, new_axis=1),
        node("SplitToSequence", "x sizes", "two", axis=1),
        node("SequenceInsert", "two x last", "three"),
        node("SequenceErase", "three one", "again"),
        node("SequenceConstruct", "x x", "pair"),
        node("SequenceLength", "pair", "length"),
        node("SequenceAt", "again last", "rest"),
        node("ConcatFromSequence", "three", "all", axis=1),
    ]
    outputs: dict[str, tuple[int, Any]] = {
        "of_columns": (FLOAT, None),
        "length": (INT64, []),
        "rest": (FLOAT, None),
        "all": (FLOAT, None),
    }
    found = run(model_of(nodes, PORTS[0], outputs, tensors), x=X)
    wanted: list[Any] = [X.sum(0), 2, X[:, 1:], np.concatenate([X[:, :1], X, X[:, 1:]], 1)]
    for value, each in zip(found, wanted, strict=True):
        np.testing.assert_allclose(value, each, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("place", [4, -5])
def test_a_place_that_a_list_does_not_have_is_reported(place: int) -> None:
    nodes = [node("SplitToSequence", "x", "parts", axis=1), node("SequenceAt", "parts place", "y")]
    proto = model_of(nodes, PORTS[0], {"y": (FLOAT, None)}, {"place": np.array(place)})
    with pytest.raises(UnsupportedModel, match=f"the place {place} in a list of 4"):
        imported(proto)


@pytest.mark.parametrize(
    ("sizes", "problem"),
    [(0, "parts of 0"), ([1, 2], "do not add up"), (1, "more than 1024 parts")],
)
def test_parts_that_a_tensor_does_not_have_are_reported(sizes: Any, problem: str) -> None:
    nodes = [node("SplitToSequence", "x sizes", "parts", axis=1), node("SequenceAt", "parts zero", "y")]
    tensors = {"sizes": np.array(sizes), "zero": np.array(0)}
    width = 1025 if sizes == 1 else 4
    with pytest.raises(UnsupportedModel, match=problem):
        imported(model_of(nodes, {"x": (FLOAT, [1, width])}, {"y": (FLOAT, None)}, tensors))


def test_a_list_is_no_tensor_and_no_output() -> None:
    nodes = [node("SequenceConstruct", "x x", "pair"), node("Relu", "pair", "y")]
    with pytest.raises(UnsupportedModel, match="a list where it needs a tensor"):
        imported(model_of(nodes, PORTS[0], {"y": (FLOAT, None)}))
    proto = model_of(nodes[:1], PORTS[0], {"pair": (FLOAT, None)})
    with pytest.raises(UnsupportedModel, match="output 'pair': has a list"):
        imported(proto)


def test_integers_wrap_around_as_those_of_onnx() -> None:
    large = np.array([100, -100, 127], np.int8)
    for op in ("Add", "Mul", "Sub"):
        proto = model_of(
            [node(op, "a b", "c"), node("Cast", "c", "y", to=TensorProto.INT32)],
            {"a": (TensorProto.INT8, [3]), "b": (TensorProto.INT8, [3])},
            {"y": (TensorProto.INT32, [3])},
        )
        with np.errstate(over="ignore"):
            check(proto, a=large, b=large[::-1].copy())


@pytest.mark.parametrize("exponents", [np.int32, np.float32])
def test_powers_of_integers_wrap_around_and_lose_no_digits_to_float32(exponents: type[Any]) -> None:
    a = np.array([3, -3, 2, 10, 46341, -46341, 0, 7] if exponents is np.int32 else [7, -3, 13, 8], np.int32)
    b = np.array([40, 41, 31, 10, 2, 3, 0, 10] if exponents is np.int32 else [10, 19, 8, 10], exponents)
    of = helper.np_dtype_to_tensor_dtype(b.dtype)
    ports = {"a": (TensorProto.INT32, a.shape), "b": (of, b.shape)}
    proto = model_of([node("Pow", "a b", "y")], ports, {"y": (TensorProto.INT32, a.shape)})
    (wanted,) = ReferenceEvaluator(proto).run(None, {"a": a, "b": b})
    np.testing.assert_array_equal(run(proto, a=a, b=b)[0], wanted)


def test_powers_below_0_of_integers_lose_their_fractions() -> None:
    """As in onnxruntime; NumPy, and so ONNX's reference, refuses them."""
    a, b = np.array([1, -1, 2, -1, -7], np.int64), np.array([-2, -3, -1, -4, -1], np.int64)
    ports = {name: (INT64, [5]) for name in ("a", "b")}
    proto = model_of([node("Pow", "a b", "y")], ports, {"y": (INT64, [5])})
    assert run(proto, a=a, b=b)[0].tolist() == [1, -1, 0, 1, 0]


@pytest.mark.parametrize(("axis", "dims"), [(0, (2, 1)), (0, (1, 4)), (1, (2, 1)), (1, (1, 6))])
def test_elements_are_gathered_for_the_indices_that_there_are(axis: int, dims: tuple[int, ...]) -> None:
    """Not for those that NumPy would broadcast them to."""
    places = rng.integers(-X.shape[axis], X.shape[axis], dims)
    proto = model_of(
        [node("GatherElements", "x places", "y", axis=axis)],
        {"x": PORTS[0]["x"], "places": (INT64, dims)},
        {"y": (FLOAT, dims)},
    )
    wanted = [X[(p, j) if axis == 0 else (i, p)] for (i, j), p in np.ndenumerate(places)]
    np.testing.assert_array_equal(run(proto, x=X, places=places)[0], np.reshape(wanted, dims))


@pytest.mark.parametrize("dtype", ["int32", "int64", "int8"])
def test_quotients_of_integers_are_exact(dtype: str) -> None:
    limits = np.iinfo(dtype)
    a = np.array([7, -7, 7, -7, limits.max, limits.max, 0], dtype)
    b = np.array([2, 2, -2, -2, 3, limits.max, 5], dtype)
    code = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    proto = model_of([node("Div", "a b", "y")], {"a": (code, [7]), "b": (code, [7])}, {"y": (code, [7])})
    wanted = [
        int(abs(int(p)) // abs(int(q))) * (1 if (p < 0) == (q < 0) else -1) for p, q in zip(a, b, strict=True)
    ]
    np.testing.assert_array_equal(run(proto, a=a, b=b)[0], np.array(wanted, dtype))


@pytest.mark.parametrize(
    "dtypes", [("float32", "bfloat16"), ("float16", "bfloat16"), ("bfloat16", "float32")]
)
@pytest.mark.parametrize("op", ["BatchNormalization", "RMSNormalization"])
def test_norms_whose_weights_have_another_dtype(op: str, dtypes: tuple[str, str]) -> None:
    """A batch norm's result is of its input's dtype, and an RMS norm's of its weights'."""
    of_x, of_weights = (DType(name).numpy for name in dtypes)
    x = X.astype(of_x)
    weights = {name: (0.5 + rng.random(4)).astype(of_weights) for name in "sbmv"}
    wide = {name: values.astype(np.float64) for name, values in weights.items()}
    if op == "BatchNormalization":
        wanted = (x - wide["m"]) / np.sqrt(wide["v"] + 1e-5) * wide["s"] + wide["b"]
        inputs, dtype = "x s b m v", of_x
    else:
        wanted = x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-5) * wide["s"]
        inputs, dtype = "x s", of_weights
    codes = [helper.np_dtype_to_tensor_dtype(each) for each in (x.dtype, dtype)]
    ports = {"x": (codes[0], [3, 4])}, {"y": (codes[1], [3, 4])}
    used = {name: weights[name] for name in inputs.split()[1:]}
    (found,) = run(
        model_of([node(op, inputs, "y")], *ports, used, opset_imports=[helper.make_opsetid("", 23)]), x=x
    )
    assert found.dtype == dtype
    np.testing.assert_allclose(found.astype(np.float64), wanted, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("code", [HALF, TensorProto.BFLOAT16])
def test_float32_weights_beside_operands_of_a_half_type_are_of_that_type(code: int) -> None:
    """As PyTorch's exporter writes convolutions that it has folded norms into."""
    x = X.astype(helper.tensor_dtype_to_np_dtype(code))
    w = rng.standard_normal((4, 2)).astype(np.float32)
    proto = model_of([node("MatMul", "x w", "y")], {"x": (code, [3, 4])}, {"y": (code, [3, 2])}, {"w": w})
    (found,) = run(proto, x=x)
    assert found.dtype == x.dtype
    np.testing.assert_allclose(found.astype(np.float32), x.astype(np.float32) @ w, rtol=0.02, atol=0.05)


def test_float64_weights_beside_float32_operands_are_reported() -> None:
    proto = model_of(
        [node("MatMul", "x w", "y")], {"x": (FLOAT, [3, 4])}, {"y": (FLOAT, [3, 2])}, {"w": np.ones((4, 2))}
    )
    with pytest.raises(InvalidModel, match="has float32 as input 'A' and float64 as input 'B', which must"):
        imported(proto)


def test_a_copy_of_an_output_is_not_told_as_a_node_before_it() -> None:
    outputs = {"y": (FLOAT, [3, 4]), "z": (FLOAT, [3, 4])}
    proto = model_of([node("Relu", "x", "y"), node("Identity", "y", "z")], PORTS[0], outputs)
    body = imported(proto).graph.body
    assert body.label(1) == "identity at the outputs"


def test_truth_values_where_an_operator_takes_numbers_are_reported() -> None:
    nodes = [node("Greater", "x zero", "truth"), node("CumSum", "truth axis", "y", name="sum")]
    tensors = {"zero": np.zeros((), np.float32), "axis": np.array(1)}
    proto = model_of(nodes, PORTS[0], {"y": (INT64, [3, 4])}, tensors)
    with pytest.raises(InvalidModel, match=r"'sum' \(CumSum\): takes no bool as input 'x'"):
        imported(proto)


def test_bfloat16_weights() -> None:
    w = X.astype(ml_dtypes.bfloat16)
    proto = model_of(
        [
            node("Cast", "x", "b", to=TensorProto.BFLOAT16),
            node("Mul", "b w", "m"),
            node("Cast", "m", "y", to=FLOAT),
        ],
        *PORTS,
    )
    proto.graph.initializer.append(
        TensorProto(name="w", dims=[3, 4], data_type=TensorProto.BFLOAT16, raw_data=w.tobytes())
    )
    special = imported(proto)
    assert special.weights["w"][1].dtype == DType.BFLOAT16.numpy
    (y,) = run(proto, x=X)
    np.testing.assert_allclose(y, X.astype(ml_dtypes.bfloat16).astype("f4") * w.astype("f4"), rtol=1e-2)


@pytest.mark.parametrize("version", [7, 9, 11, 13, 17, 21, 23])
def test_older_versions_of_operators(version: int) -> None:
    """Those that a version changes: axes as attributes, flattening softmax, padding."""
    axes_given = version >= 13
    nodes = [
        node("Unsqueeze", "x axes" if axes_given else "x", "u", **({} if axes_given else {"axes": [0]})),
        node("Softmax", "u", "s", axis=1),
        node(
            "ReduceSum",
            "s axes" if axes_given else "s",
            "r",
            keepdims=1,
            **({} if axes_given else {"axes": [0]}),
        ),
        node("Squeeze", "r axes" if axes_given else "r", "y", **({} if axes_given else {"axes": [0]})),
    ]
    tensors = {"axes": np.array([0])} if axes_given else {}
    proto = model_of(nodes, *PORTS, tensors, opset_imports=[helper.make_opsetid("", version)], ir_version=8)
    e = np.exp(X - X.max())
    wanted = e / e.sum() if version < 13 else np.exp(X) / np.exp(X).sum(0)
    np.testing.assert_allclose(run(proto, x=X)[0], wanted, rtol=1e-5)


# What ONNX's text says where its reference implementation, or a range of values, is special.


def results_of(
    op: str, version: int, arrays: list[Any], *, constant: bool, outputs: int = 1, **attributes: Any
) -> list[np.ndarray]:
    """One node's outputs, on constants or on inputs; None for an input that is left out."""
    given = {f"x{n}": np.asarray(each) for n, each in enumerate(arrays) if each is not None}
    names = [f"x{n}" if each is not None else "" for n, each in enumerate(arrays)]
    made = helper.make_node(op, names, [f"y{n}" for n in range(outputs)], **attributes)
    ports = {
        name: (helper.np_dtype_to_tensor_dtype(each.dtype), each.shape)
        for name, each in given.items()
        if not constant
    }
    types = {
        name: helper.make_tensor_type_proto(helper.np_dtype_to_tensor_dtype(each.dtype), each.shape)
        for name, each in given.items()
    }
    imports = [helper.make_opsetid("", version)]
    schema = onnx.defs.get_schema(op, version, "")
    known = onnx.shape_inference.infer_node_outputs(schema, made, types, opset_imports=imports)
    wanted = {name: (known[name].tensor_type.elem_type, None) for name in made.output}
    tensors = given if constant else {}
    proto = model_of([made], ports, wanted, tensors, opset_imports=imports, ir_version=8)
    return run(proto, **({} if constant else given))


def typed(dtype: str, values: Any) -> np.ndarray:
    return np.array(values, dtype)


LARGE = np.array([(1 << 64) - 3, 1 << 63, 5], np.uint64)
DIVIDED = np.array([1, 3, 10**9, (1 << 53) + 1, (1 << 63) - 1, (1 << 63) + 9, (1 << 64) - 1], np.uint64)
SOME = np.array([7, (1 << 63) + 9, (1 << 64) - 1], np.uint64)
MATRICES = np.random.default_rng(2).standard_normal((2, 3, 5, 5)).astype(np.float32)
MATRICES[0, 0, :, 1] = MATRICES[0, 0, :, 3]  # whose determinant is 0
MATRICES[0, 1] = np.eye(5)[::-1]  # which cannot be done without changing rows
E3 = np.exp(X) / np.exp(X).sum()
CASES: list[Any] = [
    ("Add", 14, [LARGE, SOME], {}, [LARGE + SOME]),
    ("Sub", 14, [LARGE, SOME], {}, [LARGE - SOME]),
    ("Mul", 14, [LARGE, SOME], {}, [LARGE * SOME]),
    ("Div", 14, [np.repeat(DIVIDED, 7), np.tile(DIVIDED, 7)], {}, [(DIVIDED[:, None] // DIVIDED).ravel()]),
    ("ReduceMean", 18, [LARGE // 2], {"keepdims": 0}, [np.array((1 << 62), np.uint64)]),
    ("Mod", 13, [LARGE, SOME], {}, [LARGE % SOME]),
    ("Less", 13, [LARGE, SOME], {}, [LARGE < SOME]),
    ("Cast", 21, [LARGE], {"to": TensorProto.INT64}, [LARGE.astype("int64")]),
    ("Cast", 21, [SOME], {"to": TensorProto.INT8}, [SOME.astype("int8")]),
    ("Cast", 21, [SOME], {"to": TensorProto.UINT32}, [SOME.astype("uint32")]),
    (
        "Cast",
        21,
        [typed("int16", [-1, 5])],
        {"to": TensorProto.UINT64},
        [typed("uint64", [(1 << 64) - 1, 5])],
    ),
    ("Cast", 21, [SOME], {"to": TensorProto.FLOAT}, [SOME.astype("float32")]),
    ("MatMul", 13, [LARGE[None], SOME[:, None]], {}, [(LARGE * SOME).sum(dtype="u8").reshape(1, 1)]),
    ("Gemm", 13, [LARGE[:1, None]] * 3, {"alpha": 2.0, "beta": -1.0}, [typed("uint64", [[21]])]),
    (
        "PRelu",
        16,
        [typed("int32", [-(1 << 30), 3]), typed("int32", [9, 9])],
        {},
        [typed("int32", [-(1 << 30), 3])],
    ),
    ("PRelu", 16, [LARGE, SOME], {}, [LARGE]),
    ("Det", 22, [MATRICES], {}, [np.linalg.det(MATRICES)]),
    ("Det", 11, [np.full((1, 1), 3.0)], {}, [np.array(3.0)]),
    (
        "MaxPool",
        22,
        [typed("float32", [[[-2.0]]])],
        {"kernel_shape": [2], "dilations": [2], "auto_pad": "SAME_UPPER"},
        [np.full((1, 1, 1), np.finfo("f4").min)],
    ),
    (
        "MaxPool",
        22,
        [typed("int8", [[[5, 7]]])],
        {"kernel_shape": [2], "pads": [2, 0]},
        [typed("int8", [[[-128, 5, 7]]])],
    ),
    (
        "AveragePool",
        22,
        [typed("float32", [[[6, 8]]])],
        {"kernel_shape": [2], "pads": [2, 0], "count_include_pad": 1},
        [typed("float32", [[[0, 3, 7]]])],
    ),
    (
        "LpPool",
        18,
        [typed("float32", [[[6, 8]]])],
        {"kernel_shape": [2], "pads": [2, 0]},
        [typed("float32", [[[0, 6, 10]]])],
    ),
    ("Compress", 11, [np.empty((2, 0), "f4"), [True, False]], {"axis": 1}, [np.empty((2, 0), "f4")]),
    ("Compress", 11, [np.empty((2, 0), "f4"), [True]], {}, [np.empty(0, "f4")]),
    ("Compress", 11, [X, [False, True, False, True]], {"axis": 0}, [X[1:2]]),
    ("Erf", 9, [typed("int32", [-4, -3, 0, 6])], {}, [typed("int32", [-1, 0, 0, 1])]),
    ("Erf", 9, [typed("uint8", [3, 4])], {}, [typed("uint8", [0, 1])]),
    ("Abs", 13, [typed("int8", [-128, -7])], {}, [typed("int8", [-128, 7])]),
    ("Neg", 13, [typed("int8", [-128, -7])], {}, [typed("int8", [-128, 7])]),
    ("Range", 11, [(1 << 60) + 1, (1 << 60) + 3, 1], {}, [typed("int64", [(1 << 60) + 1, (1 << 60) + 2])]),
    ("Gemm", 13, [typed("int32", [[3]])] * 3, {"alpha": 0.5, "beta": 0.5}, [typed("int32", [[6]])]),
    ("Gemm", 13, [typed("int32", [[1 << 15]])] * 2, {"alpha": 2.0}, [typed("int32", [[-1 << 31]])]),
    ("Celu", 12, [typed("float32", 2.0)], {"alpha": -0.5}, [typed("float32", 2.0)]),
    ("Clip", 6, [X], {"min": 1.0, "max": 0.0}, [np.zeros_like(X)]),
    ("Dropout", 7, [X], {}, [X, np.ones_like(X)]),
    (
        "Pad",
        13,
        [typed("int64", [4]), [1, 0], typed("int64", 3817709934268155566)],
        {},
        [typed("int64", [3817709934268155566, 4])],
    ),
    ("Pad", 13, [np.array([False]), [1, 0], np.array(True)], {}, [np.array([True, False])]),
    ("Squeeze", 13, [X[None], np.empty(0, "i8")], {}, [X[None]]),
    ("Unsqueeze", 11, [X], {"axes": [2, 0]}, [X.reshape(1, 3, 1, 4)]),
    ("Slice", 13, [X, [-9], [-8], [0], [-1]], {}, [X[:1]]),
    ("Shape", 15, [X], {"start": 0, "end": -3}, [np.empty(0, "i8")]),
    ("Softmax", 11, [X[None]], {"axis": 1}, [E3[None]]),
    ("GlobalMaxPool", 1, [X[None]], {}, [X.max(1).reshape(1, 3, 1)]),
    ("LpNormalization", 1, [-np.ones((1, 4), "f4")], {"p": 1}, [np.full((1, 4), -0.25, "f4")]),
    ("ReduceSumSquare", 11, [typed("int32", [1, 2])], {"keepdims": 0}, [typed("int32", 5)]),
    ("Flatten", 13, [np.empty(0, "f4")], {"axis": 1}, [np.empty((0, 1), "f4")]),
    ("CumSum", 14, [np.empty((3, 0), "f4"), [0]], {}, [np.empty((3, 0), "f4")]),
    ("Gelu", 20, [np.empty(0, "f4")], {}, [np.empty(0, "f4")]),
    (
        "ScatterElements",
        18,
        [typed("int8", [100, 1]), [0], typed("int8", [5])],
        {"reduction": "mul"},
        [typed("int8", [-12, 1])],
    ),
    (
        "QuantizeLinear",
        21,
        [typed("float32", [1, 2, 8, 8]), typed("float32", [1, 2]), typed("uint8", [0, 1])],
        {"axis": 0, "block_size": 2},
        [typed("uint8", [1, 2, 5, 5])],
    ),
    *(
        (
            "Resize",
            10,
            [X.reshape(1, 1, 3, 4), typed("float32", [1, 1, *scales])],
            {},
            [X[rows][:, columns][None, None]],
        )
        for scales, rows, columns in (
            ((0.6, 0.6), [0], [0, 2]),
            ((2, 0.6), [0, 0, 1, 1, 2, 2], [0, 2]),
            ((0.7, 1.5), [0, 2], [0, 0, 1, 2, 2, 3]),
        )
    ),
    (
        "Upsample",
        9,
        [X.reshape(1, 1, 3, 4), typed("float32", [1, 1, 0.6, 0.6])],
        {},
        [X[:1, [0, 1]].reshape(1, 1, 1, 2)],
    ),
    (
        "Col2Im",
        18,
        [typed("int32", [[[1, 2], [3, 4]]]), [3], [2]],
        {},
        [typed("int32", [[[1, 5, 4]]])],
    ),
    (
        "NonMaxSuppression",
        11,
        [typed("float32", [[[0, 0, 1, 1]]]), typed("float32", [[[0.5]]]), typed("int64", [3])],
        {},
        [typed("int64", [[0, 0, 0]])],
    ),
]


def test_quotients_are_rounded_to_a_half_type_before_they_are_quantised() -> None:
    x, scale = np.arange(-300, 4000, dtype=np.float16) / np.float16(16), np.array(1.1, np.float16)
    (found,) = results_of("QuantizeLinear", 21, [x, scale, np.array(7, np.uint16)], constant=False)
    np.testing.assert_array_equal(found, np.clip(np.rint(x / scale) + np.float32(7), 0, None))


@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def test_nodes_that_the_suite_does_not_have(case: Any, constant: bool) -> None:
    op, version, arrays, attributes, wanted = case
    found = results_of(op, version, arrays, constant=constant, outputs=len(wanted), **attributes)
    for value, right in zip(found, wanted, strict=True):
        assert (value.dtype, value.shape) == (right.dtype, right.shape)
        near = right.dtype.kind == "f"
        np.testing.assert_allclose(value, right, rtol=1e-5 if near else 0, atol=1e-6 if near else 0)


@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("corners", [0, 1])
@pytest.mark.parametrize("size", [(1, 3, 4), (2, 1, 3), (1, 4, 1), (1, 1, 1), (1, 2, 3, 4), (2, 1, 3, 1)])
def test_a_grid_is_where_pytorch_has_it(size: tuple[int, ...], corners: int, constant: bool) -> None:
    batch, *spatial = size
    rank = len(spatial)
    theta = rng.standard_normal((batch, rank, rank + 1))
    sizes = np.array([batch, 5, *spatial])
    (grid,) = results_of("AffineGrid", 20, [theta, sizes], constant=constant, align_corners=corners)
    ends = [0.0 if dim == 1 else 1.0 if corners else 1 - 1 / dim for dim in spatial]
    places = [np.linspace(-end, end, dim) for end, dim in zip(ends, spatial, strict=True)]
    base = np.stack([*np.meshgrid(*places, indexing="ij")[::-1], np.ones(spatial)], -1)
    np.testing.assert_allclose(grid, np.einsum("...i,bji->b...j", base, theta), rtol=1e-12, atol=1e-12)


def test_a_grid_of_endless_dims_is_refused_before_there_are_places() -> None:
    arrays = [np.ones((1, 2, 3), np.float32), np.array([1, 1, 1 << 60, 1])]
    with pytest.raises(UnsupportedModel, match=r"needs [\d,]+ bytes in the importing process"):
        results_of("AffineGrid", 20, arrays, constant=True)


def test_the_statistics_of_a_norm_are_of_the_stashed_dtype() -> None:
    x = X.astype(np.float64)
    y, mean, deviation = results_of("LayerNormalization", 17, [x, np.ones(4)], constant=False, outputs=3)
    assert [str(each.dtype) for each in (y, mean, deviation)] == ["float64", "float32", "float32"]
    np.testing.assert_allclose(mean, x.mean(-1, keepdims=True), rtol=1e-5)


@pytest.mark.parametrize("training", [False, True])
def test_a_batch_norm_of_float64_whose_weights_are_float32(training: bool) -> None:
    x, one = X.astype(np.float64), np.ones(4, np.float32)
    arrays = [x, one, 0 * one, 0 * one, one]
    found = results_of(
        "BatchNormalization",
        15,
        arrays,
        constant=False,
        outputs=3 if training else 1,
        training_mode=int(training),
    )
    mean, variance = (x.mean(0), x.var(0)) if training else (0.0, 1.0)
    assert [str(each.dtype) for each in found] == ["float64", "float32", "float32"][: len(found)]
    np.testing.assert_allclose(found[0], (x - mean) / np.sqrt(variance + 1e-5), rtol=1e-6)


def test_a_dim_that_is_reduced_and_not_there_is_named() -> None:
    with pytest.raises(InvalidModel, match="has axis 3, where the axes are -3 to 2"):
        results_of("MeanVarianceNormalization", 13, [X[None]], constant=False)


def test_a_function_of_half_constants_keeps_their_dtype() -> None:
    x = X.reshape(1, 1, 3, 4).astype(np.float16)
    (found,) = results_of("MeanVarianceNormalization", 13, [x], constant=True)
    assert found.dtype == np.float16


@pytest.mark.parametrize("backwards", [0, 1])
def test_a_scan_of_version_8_is_of_each_sample(backwards: int) -> None:
    body = graph_of(
        [node("Add", "state x", "next"), node("Mul", "next next", "square")],
        {"state": (FLOAT, [4]), "x": (FLOAT, [4])},
        {"next": (FLOAT, [4]), "square": (FLOAT, [4])},
    )
    x, initial = np.stack([X, X + 1, -X]), np.ones((3, 4), np.float32)
    scan = node("Scan", "- initial x", "last all", body=body, num_scan_inputs=1, directions=[backwards])
    ports = {"initial": (FLOAT, initial.shape), "x": (FLOAT, x.shape)}
    wanted = {"last": (FLOAT, None), "all": (FLOAT, None)}
    proto = model_of([scan], ports, wanted, opset_imports=[helper.make_opsetid("", 8)], ir_version=8)
    sums = np.cumsum(x[:, :: -1 if backwards else 1], axis=1) + initial[:, None]
    last, every = run(proto, initial=initial, x=x)
    np.testing.assert_allclose(last, sums[:, -1], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(every, sums**2, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_a_convolution_that_is_deformed_alike_everywhere_is_one_of_a_moved_image(rank: int) -> None:
    """Of one dim and of three, which the reference implementation does not have."""
    rng = np.random.default_rng(rank)
    x, w = (rng.standard_normal(dims).astype("f4") for dims in ((2, 4, *(6,) * rank), (6, 2, *(3,) * rank)))
    x[:, :, -1] = 0
    moved = x.copy()  # the second group of offsets reads the element before, along the first dim
    moved[:, 2:, 1:] = x[:, 2:, :-1]
    moved[:, 2:, 0] = 0
    of: dict[str, Any] = {
        "group": 2,
        "pads": [1, 0, 1][:rank] * 2,
        "strides": [1, 2, 1][:rank],
        "dilations": [2, 1, 1][:rank],
    }
    (wanted,) = results_of("Conv", 22, [moved, w], constant=False, **of)
    offset = np.zeros((2, 2, 3**rank, rank, *wanted.shape[2:]), np.float32)
    offset[:, 1, :, 0] = -1
    arrays = [x, w, offset.reshape(2, -1, *wanted.shape[2:])]
    (found,) = results_of("DeformConv", 22, arrays, constant=False, offset_group=2, **of)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


def test_regions_of_version_10_begin_at_the_corners_of_elements() -> None:
    """The reference implementation gives what version 16 does."""
    x = np.arange(16, dtype=np.float32).reshape(1, 1, 4, 4)
    arrays = [x, typed("float32", [[0, 0, 2, 2]]), typed("int64", [0])]
    of = {"output_height": 2, "output_width": 2, "sampling_ratio": 1}
    for constant in (False, True):
        (found,) = results_of("RoiAlign", 10, arrays, constant=constant, **of)
        np.testing.assert_allclose(found, [[[[2.5, 3.5], [6.5, 7.5]]]])


NOTHING: dict[str, tuple[list[onnx.NodeProto], dict[str, tuple[int, ...]], tuple[int, ...], float]] = {
    "a product over none": ([node("MatMul", "a b", "y")], {"a": (2, 0), "b": (0, 3)}, (2, 3), 0),
    "a product over none, and more": (
        [node("Gemm", "a b c", "y", alpha=2.0)],
        {"a": (2, 0), "b": (0, 3), "c": (3,)},
        (2, 3),
        1,
    ),
    "no images": ([node("Conv", "x w", "y")], {"x": (0, 3, 5, 5), "w": (4, 3, 3, 3)}, (0, 4, 3, 3), 0),
    "pooling": ([node("MaxPool", "x", "y", kernel_shape=[2, 2])], {"x": (0, 3, 5, 5)}, (0, 3, 4, 4), 0),
    "a norm": ([node("LayerNormalization", "x s", "y")], {"x": (0, 5), "s": (5,)}, (0, 5), 0),
    "a norm of channels": (
        [node("InstanceNormalization", "x s b", "y")],
        {"x": (0, 3, 5), "s": (3,), "b": (3,)},
        (0, 3, 5),
        0,
    ),
    "a recurrence": (
        [node("GRU", "x w r", "y", hidden_size=2)],
        {"x": (3, 0, 4), "w": (1, 6, 4), "r": (1, 6, 2)},
        (3, 1, 0, 2),
        0,
    ),
}


@pytest.mark.parametrize("name", NOTHING)
def test_models_of_tensors_without_elements(name: str) -> None:
    nodes, inputs, dims, value = NOTHING[name]
    proto = model_of(nodes, {of: (FLOAT, each) for of, each in inputs.items()}, {"y": (FLOAT, None)})
    (y,) = run(proto, **{of: np.ones(each, np.float32) for of, each in inputs.items()})
    np.testing.assert_array_equal(y, np.full(dims, value))


@pytest.mark.parametrize("keys", [0, 5])
@pytest.mark.parametrize("batch", [0, 2])
def test_spelled_out_attention_to_nothing_is_0(batch: int, keys: int) -> None:
    nodes = [
        node("Transpose", "k", "kt", perm=[0, 1, 3, 2]),
        node("MatMul", "q kt", "s"),
        node("Softmax", "s", "p", axis=-1),
        node("MatMul", "p v", "y"),
    ]
    dims = {"q": (batch, 2, 3, 4), "k": (batch, 2, keys, 4), "v": (batch, 2, keys, 6)}
    proto = model_of(nodes, {of: (HALF, each) for of, each in dims.items()}, {"y": (HALF, None)})
    (y,) = run(proto, **{of: np.ones(each, np.float16) for of, each in dims.items()})
    np.testing.assert_array_equal(y, np.full((batch, 2, 3, 6), 1 if keys else 0))


@pytest.mark.parametrize(("op", "version"), [("Resize", 11), ("Resize", 21), ("Upsample", 9)])
def test_scales_may_leave_nothing_of_a_dim(op: str, version: int) -> None:
    scales = {"scales": np.array([1, 0.1], np.float32), "roi": np.array([], np.float32)}
    resize = node(op, "x scales" if op == "Upsample" else "x roi scales", "y", mode="nearest")
    nodes = [resize, node("Concat", "y x", "z", axis=1)]
    proto = model_of(
        nodes,
        {"x": (FLOAT, [3, "N"])},
        {"z": (FLOAT, None)},
        scales,
        opset_imports=[helper.make_opsetid("", version)],
    )
    np.testing.assert_array_equal(run(proto, x=X)[0], X)


def test_operators_of_versions_before_7_are_refused_with_how_to_convert_them() -> None:
    proto = model_of([node("Add", "x x", "y")], *PORTS, opset_imports=[helper.make_opsetid("", 6)])
    with pytest.raises(
        UnsupportedModel, match=r"known from version 7 .* asks for 6: convert it with onnx\.ver"
    ):
        OnnxModel(proto)
