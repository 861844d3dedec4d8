"""How nodes become operations: constants, functions and control flow."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from cudnn_actor import DType, TensorSpec
from cudnn_actor.errors import InvalidModel, UnsupportedModel
from cudnn_actor.onnx import ModelLimits, OnnxModel
from cudnn_actor.onnx.operator_table import NO_WAY, UNSEEDED
from cudnn_actor.protocol import Layout
from cudnn_actor.protocol.operations import Convolution

from .importing import BOOL, HALF, PORTS, X, check, imported, kinds, rng, run
from .small_models import FLOAT, INT64, graph_of, model_of, node

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
    special = OnnxModel(proto, **options).specialise({"x": TensorSpec.packed((3,), "int64")}, {})
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
    special = OnnxModel(proto, **options).specialise({"x": TensorSpec.packed((2, 4), "float32")}, {})
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
        OnnxModel(proto, limits, swappable=True).specialise(SPECS, {})


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
        OnnxModel(proto, ModelLimits(nodes=99)).specialise(SPECS, {})
