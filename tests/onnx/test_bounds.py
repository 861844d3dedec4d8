"""What a small file can make the importing process take: memory, time, and the end of the program."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from cudnn_actor import DType, InvalidRequest, TensorSpec, spawn
from cudnn_actor.errors import InvalidModel, UnsupportedModel
from cudnn_actor.models.source import NeedsValues, values_of
from cudnn_actor.onnx import ModelLimits, OnnxModel
from cudnn_actor.onnx.budget import Budget
from cudnn_actor.onnx.costs import cost_of
from cudnn_actor.onnx.folding import fold
from cudnn_actor.service import GraphLimits

from ..growth import thread_seconds
from ..in_one_test import cases_in_one_test
from ..patience import PATIENCE_S
from .bombs import KNOWN, imported
from .small_models import FLOAT, INT64, graph_of, model_of, node

MIB = 1 << 20
PORTS = {"x": (FLOAT, [3])}, {"y": (FLOAT, None)}
SPECS = {"x": TensorSpec.packed((3,), DType.FLOAT32)}
OPSETS = {"": 21}


def program(*args: str, timeout: float = PATIENCE_S) -> str:
    """What a program of this Python prints."""
    done = subprocess.run(
        [sys.executable, *args],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env=dict(os.environ),
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="the peak of a process is Linux's to tell"
)
def test_small_files_of_every_operator_take_no_more_than_the_limits() -> None:
    """Each is imported, or refused with a typed error; and none at which there is nothing to bound."""
    found = json.loads(program("-m", "tests.onnx.bombs", "--each", "2", "--constants", str(8 * MIB)))
    assert set(found["fates"]) <= {"imported", "InvalidModel", "InvalidRequest", "UnsupportedModel"}
    assert found["fates"]["imported"] > 90 < found["fates"]["InvalidModel"]
    assert found["fates"]["UnsupportedModel"] > 50
    assert found["worst"][-1][0] < 8 * MIB + 16 * MIB, found["worst"]
    assert found["slowest"][-1][0] < 10, found[
        "slowest"
    ]  # seconds of the processor, of 0.07 that are allowed


@cases_in_one_test
@pytest.mark.parametrize("name", KNOWN)
def test_constants_beyond_the_limit_are_refused_with_the_option_that_raises_it(name: str) -> None:
    data = KNOWN[name]()
    assert len(data) < 1024 or name in ("Concat", "Range")
    fate = imported(data, ModelLimits(constants=8 * MIB, steps=1 << 26))
    assert fate.what == "UnsupportedModel"
    assert re.search(r"raise the limit|are not computed when a model|are the most", fate.text), fate.text


@cases_in_one_test
@pytest.mark.parametrize(
    ("op", "arrays", "options"),
    [
        ("Add", [np.ones((400, 1)), np.ones((1, 400))], {}),
        ("Concat", [np.ones(80_000), np.ones(80_000)], {"axis": 0}),
        ("CumSum", [np.ones(100_000, "f4"), np.array(0)], {"exclusive": 1, "reverse": 1}),
        ("DequantizeLinear", [np.ones(100_000, "i1"), np.float32(1).reshape(()), np.int8(1).reshape(())], {}),
        ("Erf", [np.ones(20_000, "f4")], {}),
        ("Expand", [np.ones(1), np.array([300, 400])], {}),
        ("Gather", [np.ones((4, 10_000)), np.zeros(12, "i8")], {"axis": 0}),
        ("GatherND", [np.ones((200, 8)), np.zeros((5_000, 1), "i8")], {}),
        ("LogSoftmax", [np.ones((400, 400), "f4")], {"axis": 1}),
        ("MatMul", [np.ones((400, 8)), np.ones((8, 400))], {}),
        ("Mod", [np.ones(100_000, "i8"), np.array([3])], {}),
        ("NonZero", [np.ones((50, 50, 50))], {}),
        ("OneHot", [np.zeros(300, "i8"), np.array(500), np.array([0, 1], "f4")], {}),
        ("Pad", [np.ones((100, 100)), np.array([100, 100, 100, 100])], {}),
        ("Pow", [np.ones(100_000, "f4"), np.array([2.5], "f4")], {}),
        ("Range", [np.array(0.0, "f4"), np.array(200_000.0, "f4"), np.array(1.0, "f4")], {}),
        ("ReduceLogSumExp", [np.ones((400, 400), "f4")], {}),
        ("ScatterND", [np.ones(20_000), np.zeros((20_000, 1), "i8"), np.ones(20_000)], {}),
        ("Softmax", [np.ones((400, 400), "f4")], {"axis": 1}),
        ("Tile", [np.ones((20, 20)), np.array([20, 20])], {}),
        ("TopK", [np.ones((200, 500), "f4"), np.array([10])], {}),
        ("Transpose", [np.ones((400, 400))], {}),
        ("Trilu", [np.ones((400, 400)), np.array(1)], {}),
        ("Where", [np.ones((400, 1), "?"), np.ones((1, 400)), np.zeros((1, 400))], {}),
    ],
)
def test_what_a_constant_is_said_to_cost_is_more_than_it_takes(
    op: str, arrays: list[np.ndarray], options: dict[str, Any]
) -> None:
    one = helper.make_node(
        op,
        [f"i{n}" for n in range(len(arrays))],
        ["a", "b", "c", "d"][: 1 + (op == "TopK")],
        **options,
    )
    cost, plenty = cost_of(one, arrays), Budget(1 << 40, 1 << 60)
    fold(one, arrays, OPSETS, plenty)  # what is imported for it first is not counted
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        results = fold(one, arrays, OPSETS, plenty)
        peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert results[0] is not None
    assert peak <= cost.nbytes + MIB // 8


def test_what_is_too_large_to_be_computed_now_is_left_to_the_service() -> None:
    """With the same result, and small constants behind it are still computed."""
    proto = model_of(
        [
            node("Expand", "one dims", "wide"),
            node("ReduceSum", "wide", "total", keepdims=0),
            node("Add", "two two", "four"),
            node("Mul", "x four", "flat"),
            node("Add", "flat total", "y"),
        ],
        *PORTS,
        {"one": np.ones(1, "f4"), "dims": np.array([500, 500]), "two": np.array(2, "f4")},
    )
    model = OnnxModel(proto, ModelLimits(constants=MIB))
    special = model.specialise(SPECS, {})
    assert special.graph is not None
    assert all(values_of(weight).size <= 1 for _, weight in special.weights.values())

    async def result() -> Any:
        async with spawn(device="cpu") as gpu:
            loaded = await gpu.load(model)
            found = await gpu.run(loaded, {"x": np.array([1, 2, 3], "f4")})
            await loaded.close()
            return found["y"]

    np.testing.assert_array_equal(asyncio.run(result()), [250_004, 250_008, 250_012])


def test_a_number_that_an_input_gives_is_bounded_as_one_of_the_file() -> None:
    proto = model_of(
        [
            node("Range", "zero n one", "places"),
            node("Mod", "places two", "odd"),
            node("NonZero", "odd", "which"),
            node("Size", "which", "y"),
        ],
        {"n": (INT64, [])},
        {"y": (INT64, [])},
        {"zero": np.array(0), "one": np.array(1), "two": np.array(2)},
    )
    model = OnnxModel(proto, ModelLimits(constants=8 * MIB))
    specs = {"n": TensorSpec.packed((), DType.INT64)}
    with pytest.raises(NeedsValues):
        model.specialise(specs, {})
    assert model.specialise(specs, {"n": np.array(1000)}).constants["y"] == 500
    for number in (10**7, 1 << 40, 1 << 62):
        with pytest.raises(UnsupportedModel, match=r"ModelLimits\(constants=...\)|a range of"):
            model.specialise(specs, {"n": np.array(number)})


def test_values_that_decide_may_come_from_a_long_chain_of_nodes() -> None:
    count = 1500
    nodes = [node("Neg", f"v{n}", f"v{n + 1}") for n in range(count)]
    proto = model_of(
        [*nodes, node("Expand", f"one v{count}", "y")],
        {"v0": (INT64, [1])},
        {"y": (FLOAT, None)},
        {"one": np.ones(1, "f4")},
    )
    specs = {"v0": TensorSpec.packed((1,), DType.INT64)}
    special = OnnxModel(proto).specialise(specs, {"v0": np.array([5])})
    assert special.graph is not None
    assert special.graph.outputs[0].spec.dims == (5,)


SMALL = ModelLimits(constants=8 * MIB)


def test_places_of_frames_are_bounded_where_there_is_no_frame() -> None:
    """The signal is shorter than a frame, so that no array of both is large."""
    tensors = {"length": np.array(1 << 22), "step": np.array(1 << 22)}
    proto = model_of(
        [node("STFT", "x step - length", "y")], {"x": (FLOAT, [1, 8, 1])}, {"y": (FLOAT, None)}, tensors
    )
    with pytest.raises(UnsupportedModel, match=r"ModelLimits\(constants"):
        OnnxModel(proto, SMALL).specialise({"x": TensorSpec.packed((1, 8, 1), DType.FLOAT32)}, {})


def test_what_attention_hides_is_bounded() -> None:
    """Of as many queries as there are keys, behind those of before."""
    dims = {"x": [1, 4000, 8], "past": [1, 2, 3, 4]}
    call = node("MultiHeadAttention", "x x x - - - past past", "y", num_heads=2, unidirectional=1)
    call.domain = "com.microsoft"
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    ports = {name: (FLOAT, each) for name, each in dims.items()}
    proto = model_of([call], ports, {"y": (FLOAT, None)}, opset_imports=opsets)
    specs = {name: TensorSpec.packed(tuple(each), DType.FLOAT32) for name, each in dims.items()}
    with pytest.raises(UnsupportedModel, match=r"ModelLimits\(constants"):
        OnnxModel(proto, SMALL).specialise(specs, {})


def test_products_that_are_sums_of_nothing_are_not_computed() -> None:
    dims = {"a": [2, 4000, 0], "b": [0, 4000]}
    ports = {name: (TensorProto.UINT8, each) for name, each in dims.items()}
    proto = model_of([node("MatMulInteger", "a b", "y")], ports, {"y": (TensorProto.INT32, None)})
    specs = {name: TensorSpec.packed(tuple(each), DType.UINT8) for name, each in dims.items()}
    model = OnnxModel(proto)
    tracemalloc.start()
    try:
        special = model.specialise(specs, {})
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert special.graph is not None
    assert [port.spec.dims for port in special.graph.outputs] == [(2, 4000, 4000)]
    assert peak < 8 * MIB


def test_text_is_not_computed() -> None:
    """Sixty nodes that each double a text would make one of 2^60 letters."""
    text = numpy_helper.from_array(np.array(["ab"], object), "t0")
    nodes = [node("Add", f"t{n} t{n}", f"t{n + 1}") for n in range(60)]
    proto = model_of([*nodes, node("Identity", "x", "y")], *PORTS)
    proto.graph.initializer.append(text)
    with pytest.raises(InvalidModel, match="takes no string"):
        OnnxModel(proto)
    nodes = [node("Expand", "t0 dims", "t1"), node("NonZero", "t1", "y")]
    tensors = {"t0": np.array(["ab" * 1000], object), "dims": np.array([1 << 20])}
    with pytest.raises(UnsupportedModel, match="text"):
        OnnxModel(model_of(nodes, {}, {"y": (INT64, None)}, tensors)).specialise({}, {})


def test_large_constants_in_a_loop_are_read_once() -> None:
    large = numpy_helper.from_array(np.ones(MIB // 4, "f4"), "large")
    body = helper.make_graph(
        [
            helper.make_node("Constant", [], ["more"], value=large),
            node("Add", "v large", "a"),
            node("Add", "a more", "w"),
            node("Identity", "c", "d"),
        ],
        "body",
        [
            helper.make_tensor_value_info("i", INT64, []),
            helper.make_tensor_value_info("c", TensorProto.BOOL, []),
            helper.make_tensor_value_info("v", FLOAT, [MIB // 4]),
        ],
        [
            helper.make_tensor_value_info("d", TensorProto.BOOL, []),
            helper.make_tensor_value_info("w", FLOAT, [MIB // 4]),
        ],
        initializer=[large],
    )
    loop = node("Loop", "n - x", "y", body=body)
    ports = {"x": (FLOAT, [MIB // 4])}, {"y": (FLOAT, None)}
    proto = model_of([loop], *ports, {"n": np.array(200)})
    model = OnnxModel(proto, ModelLimits(constants=MIB))
    special = model.specialise({"x": TensorSpec.packed((MIB // 4,), DType.FLOAT32)}, {})
    assert len(special.weights) == 1


def test_small_constants_take_steps_too_however_few_nodes_the_file_has() -> None:
    """A loop of two nodes that a small file has turn for minutes."""
    ports = [
        helper.make_tensor_value_info("step", INT64, []),
        helper.make_tensor_value_info("going", TensorProto.BOOL, []),
        helper.make_tensor_value_info("state", FLOAT, [2]),
    ]
    outputs = [
        helper.make_tensor_value_info("still", TensorProto.BOOL, []),
        helper.make_tensor_value_info("next", FLOAT, [2]),
    ]
    nodes = [node("Identity", "going", "still"), node("Add", "state state", "next")]
    body = helper.make_graph(nodes, "body", ports, outputs)
    loop = helper.make_node("Loop", ["turns", "", "state"], ["last"], body=body)
    add = node("Add", "x last", "y")
    tensors = {"turns": np.array(400), "state": np.zeros(2, np.float32)}
    proto = model_of([loop, add], {"x": (FLOAT, [2])}, {"y": (FLOAT, None)}, tensors)
    specs = {"x": TensorSpec.packed((2,), DType.FLOAT32)}
    whole = OnnxModel(proto).specialise(specs, {})
    left = OnnxModel(proto, ModelLimits(steps=1 << 26)).specialise(specs, {})
    assert whole.graph is not None
    assert left.graph is not None
    assert len(whole.graph.body.operations) == 1
    assert len(left.graph.body.operations) > 100  # the service computes what this process may not


# Operations.


MOST = 40
"""How many operations the graphs below may have."""


def chained(count: int, behind: Sequence[onnx.NodeProto] = ()) -> onnx.ModelProto:
    """A chain of functions of one input."""
    names = ["x", *(f"t{number}" for number in range(count - 1)), "y"]
    nodes = [
        node("Relu" if number % 2 else "Neg", x, y) for number, (x, y) in enumerate(itertools.pairwise(names))
    ]
    return model_of([*nodes, *behind], *PORTS)


def called(count: int) -> onnx.ModelProto:
    """A function of two operations that is called in a chain."""
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("own", 1)]
    body = [node("Neg", "i", "n"), node("Relu", "n", "o")]
    function = helper.make_function("own", "F", ["i"], ["o"], body, opsets)
    names = ["x", *(f"t{number}" for number in range(count - 1)), "y"]
    calls = [helper.make_node("F", [x], [y], domain="own") for x, y in itertools.pairwise(names)]
    return model_of(calls, *PORTS, functions=[function], opset_imports=opsets)


def branching(count: int) -> onnx.ModelProto:
    """A chosen branch of a chain."""
    names = ["x", *(f"t{number}" for number in range(count))]
    nodes = [node("Neg", x, y) for x, y in itertools.pairwise(names)]
    branch = graph_of(nodes, {}, {names[-1]: (FLOAT, None)})
    chosen = helper.make_node("If", ["true"], ["y"], then_branch=branch, else_branch=branch)
    return model_of([chosen], *PORTS, {"true": np.array(True)})


def scanned(turns: int) -> onnx.ModelProto:
    """Samples of a batch that are scanned one after the other, of one step each."""
    part = {"state": (FLOAT, [1]), "part": (FLOAT, [1])}
    body = graph_of([node("Add", "state part", "next")], part, {"next": (FLOAT, [1])})
    scan = helper.make_node("Scan", ["", "x", "x"], ["y"], body=body, num_scan_inputs=1)
    ports = {"x": (FLOAT, [turns, 1])}, {"y": (FLOAT, None)}
    return model_of([scan], *ports, opset_imports=[helper.make_opsetid("", 8)])


def of_many_inputs(op: str, **attributes: Any) -> Callable[[int], onnx.ModelProto]:
    """A node that reads one value many times."""
    return lambda count: model_of([helper.make_node(op, ["x"] * count, ["y"], **attributes)], *PORTS)


def einsum(count: int) -> onnx.ModelProto:
    """A product of many factors."""
    return of_many_inputs("Einsum", equation=f"{','.join('a' * count)}->a")(count)


MANY: dict[str, Callable[[int], onnx.ModelProto]] = {
    "a chain": chained,
    "functions": called,
    "a branch": branching,
    "samples of a scan": scanned,
    "a sum": of_many_inputs("Sum"),
    "an Einsum": einsum,
}


def specialised(proto: onnx.ModelProto, most: int = MOST) -> Any:
    source = OnnxModel(proto)
    specs: Any = {each.name: each.spec for each in source.inputs}
    return source.specialise(specs, {}, most)


@pytest.mark.parametrize("of", MANY)
def test_a_graph_of_more_operations_than_the_limit_is_not_made(of: str) -> None:
    """Whatever in the file makes them."""
    with pytest.raises((InvalidRequest, UnsupportedModel), match=r"spawn\(graph_limits=GraphLimits\(op"):
        specialised(MANY[of](3 * MOST))


def test_an_import_ends_where_it_has_added_twice_as_many_operations_as_a_graph_may_have() -> None:
    """It never comes to the node that does not fit."""
    misfit = node("Concat", "y y", "z", axis=5)
    with pytest.raises(InvalidModel, match="Concat"):
        specialised(chained(MOST, [misfit]))
    problem = rf"more than {2 * MOST} operations: are over the limit GraphLimits.operations, .* {MOST}"
    with pytest.raises(InvalidRequest, match=problem):
        specialised(chained(2 * MOST + 1, [misfit]))


def test_operations_that_no_output_needs_do_not_count() -> None:
    unread = [node("Exp", "y", f"e{number}") for number in range(MOST)]
    assert len(specialised(chained(MOST, unread)).graph.body.operations) == MOST
    with pytest.raises(InvalidRequest, match=rf"={MOST + 1} operations: are over the limit"):
        specialised(chained(MOST + 1))


def test_what_cannot_be_run_is_told_also_of_a_graph_with_too_many_operations() -> None:
    unknown = helper.make_node("Unheard", ["x"], ["u"], domain="own")
    proto = chained(3 * MOST)
    proto.graph.node.insert(0, unknown)
    proto.opset_import.append(helper.make_opsetid("own", 1))
    with pytest.raises(UnsupportedModel, match="Unheard"):
        specialised(proto)


async def test_a_model_over_the_service_s_limit_is_refused_when_it_is_loaded() -> None:
    proto = chained(MOST + 1)
    async with spawn(device="cpu", graph_limits=GraphLimits(operations=MOST)) as gpu:
        with pytest.raises(InvalidRequest, match=r"spawn\(graph_limits=GraphLimits\(operations="):
            await gpu.load(proto)
    async with spawn(device="cpu", graph_limits=GraphLimits(operations=MOST + 1)) as gpu:
        model = await gpu.load(proto)
        assert (await gpu.run(model, x=np.ones(3, np.float32)))["y"].shape == (3,)
        await model.close()


# Functions.


def patterns(count: int) -> onnx.ModelProto:
    """Functions that each call the next one twice, with a constant or a variable more: 2^count patterns."""
    names = [f"i{n}" for n in range(count)]
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("own", 1)]
    functions = []
    for number in range(count - 1):
        calls = [
            helper.make_node(f"F{number + 1}", [*names[1:], more], [result], domain="own")
            for more, result in (("c", "a"), ("v", "b"))
        ]
        begin = [helper.make_node("Constant", [], ["c"], value_float=1.0), node("Identity", "i0", "v")]
        nodes = [*begin, *calls, node("Add", "a b", "y")]
        functions.append(helper.make_function("own", f"F{number}", names, ["y"], nodes, opsets))
    functions.append(
        helper.make_function(
            "own", f"F{count - 1}", names, ["y"], [helper.make_node("Sum", names, ["y"])], opsets
        )
    )
    call = helper.make_node("F0", ["x"] * count, ["y"], domain="own")
    return model_of(
        [call], {"x": (FLOAT, ["N"])}, {"y": (FLOAT, ["N"])}, functions=functions, opset_imports=opsets
    )


def test_a_large_constant_without_a_name_is_looked_at_once_however_many_read_it() -> None:
    """The file has 10 KB, and asks for 20 MB, of which 200 nodes read a little each.

    To look at the 20 MB takes about as long as the rest of the import. If each node did, an import would take
    some hundred times as long as with 200 KB.
    """

    def prepared(rows: int) -> Callable[[], object]:
        proto = many_read_a_large_constant(200, rows)
        return lambda: OnnxModel(proto).specialise({"x": TensorSpec.packed((17, 1024), DType.FLOAT32)}, {})

    assert thread_seconds(prepared(5000)) < 20 * thread_seconds(prepared(50))


def many_read_a_large_constant(readers: int, rows: int) -> onnx.ModelProto:
    one = numpy_helper.from_array(np.ones(1, np.float32))
    nodes = [
        node("Constant", "", "dims", value_ints=[rows, 1024]),
        node("ConstantOfShape", "dims", "large", value=one),
    ]
    parts = [f"part{number}" for number in range(readers)]
    nodes += [node("Gather", "large rows", part, axis=0) for part in parts]
    return model_of(
        [*nodes, node("Sum", " ".join(["x", *parts]), "y")],
        {"x": (FLOAT, [17, 1024])},
        {"y": (FLOAT, None)},
        {"rows": np.arange(17)},
    )


def test_functions_are_checked_once_however_often_they_are_called() -> None:
    """Each pattern of constants on its own, they would be 2^40."""
    model = OnnxModel(patterns(40).SerializeToString())
    assert [each.name for each in model.inputs] == ["x"]


def test_an_import_of_functions_has_no_more_nodes_than_the_limit() -> None:
    model = OnnxModel(patterns(24), ModelLimits(nodes=500))
    with pytest.raises(UnsupportedModel, match="more than 500 nodes, the limit"):
        model.specialise({"x": TensorSpec.packed((3,), DType.FLOAT32)}, {})


def test_what_each_call_is_given_counts_like_nodes() -> None:
    """A function of many inputs, whose calls leave them out; and a loop of many states that stay the same."""
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("own", 1)]
    names = [f"i{n}" for n in range(1000)]
    function = helper.make_function("own", "F", names, ["o"], [node("Relu", "i0", "o")], opsets)
    calls = [helper.make_node("F", [f"x{n}" if n else "x"], [f"x{n + 1}"], domain="own") for n in range(20)]
    calls[-1].output[0] = "y"
    called = model_of(calls, *PORTS, functions=[function], opset_imports=opsets)
    ports = [helper.make_tensor_value_info(name, FLOAT, [3]) for name in names]
    step = helper.make_tensor_value_info("step", INT64, [])
    going = helper.make_tensor_value_info("going", TensorProto.BOOL, [])
    body = helper.make_graph([node("Identity", "going", "still")], "body", [step, going, *ports], [])
    body.output.add().CopyFrom(helper.make_tensor_value_info("still", TensorProto.BOOL, []))
    body.output.extend(ports)
    loop = node("Loop", "most - " + "x " * 1000, " ".join(["y", *names[1:]]), body=body)
    looped = model_of([loop], *PORTS, {"most": np.array(20)})
    walked, turned = "more than 10,000 nodes, the limit", r"expand the model to 2\d,\d{3} nodes"
    for proto, many in ((called, walked), (looped, turned)):
        assert OnnxModel(proto).specialise(SPECS, {}).outputs
        with pytest.raises(UnsupportedModel, match=many):  # a swappable model has no loops of the service
            OnnxModel(proto, ModelLimits(nodes=10_000), swappable=True).specialise(SPECS, {})


# A load that nobody waits for.


class Endless:
    """A source that imports for ever, in steps, as an importer does."""

    inputs: tuple[Any, ...] = ()
    defaults: tuple[Any, ...] = ()
    outputs: tuple[Any, ...] = ()

    def __init__(self) -> None:
        self.ended = threading.Event()

    def specialise(self, specs: Any, values: Any, most_operations: int) -> Any:
        from cudnn_actor.actors.long_work import check_wanted

        del specs, values, most_operations
        try:
            while True:
                check_wanted()
                time.sleep(0)
        finally:
            self.ended.set()


async def test_a_load_that_was_given_up_ends_by_itself() -> None:
    source = Endless()
    async with spawn(device="cpu") as gpu:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(gpu.load(source), 0.05)
        assert await asyncio.to_thread(source.ended.wait, 60)


def test_the_end_of_a_program_does_not_wait_for_a_load() -> None:
    """Which would never end, as it does not look whether anybody waits."""
    text = program(
        "-c",
        """
import asyncio, threading, cudnn_actor

class Stuck:
    inputs = defaults = outputs = ()
    def specialise(self, *_):
        threading.Event().wait()

async def main():
    async with cudnn_actor.spawn(device="cpu") as gpu:
        try:
            await asyncio.wait_for(gpu.load(Stuck()), 0.05)
        except TimeoutError:
            print("given up")

asyncio.run(main())
""",
        timeout=PATIENCE_S,
    )
    assert text == "given up\n"
