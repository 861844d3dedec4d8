"""Loops and scans that are not unrolled: they run as loops, and give what ONNX Runtime gives."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from cudnn_actor import (
    Fault,
    FaultPlan,
    InvalidRequest,
    Loop,
    RunGraph,
    RunLoop,
    TensorSpec,
    spawn,
)
from cudnn_actor.errors import UnsupportedModel
from cudnn_actor.models.source import Step
from cudnn_actor.onnx import ModelLimits, OnnxModel, loops
from cudnn_actor.onnx.ports import Ports
from cudnn_actor.onnx.values import Value

from .onnx_runtime import answers
from .small_models import FLOAT, INT64, graph_of, live_buffers, model_of, node

BOOL = TensorProto.BOOL
AS_LOOPS = ModelLimits(unrolled=0)
rng = np.random.default_rng(7)
X = rng.standard_normal((3, 4)).astype(np.float32)
ROWS = rng.standard_normal((5, 2, 3)).astype(np.float32)
Case = tuple[onnx.ModelProto, dict[str, np.ndarray]]
COUNTED: dict[str, Any] = {"i": (INT64, []), "go": (BOOL, [])}


def known_turns(turns: int = 20) -> Case:
    """A state, a row for each turn, a product by what is outside of the loop, and nodes before and behind."""
    body = graph_of(
        [
            node("MatMul", "scratch w", "u"),
            node("Tanh", "u", "t"),
            node("Add", "t b", "next"),
            node("Identity", "go", "on"),
            node("ReduceSum", "next", "sum", keepdims=0),
        ],
        {**COUNTED, "scratch": (FLOAT, [3, 4])},
        {"on": (BOOL, []), "next": (FLOAT, [3, 4]), "sum": (FLOAT, [])},
    )
    proto = model_of(
        [
            node("Sigmoid", "x", "b"),
            node("Loop", "turns - x", "last sums", body=body),
            node("Mul", "last b", "y"),
            node("ReduceMax", "sums", "most", keepdims=0),
        ],
        {"x": (FLOAT, [3, 4])},
        {"y": (FLOAT, [3, 4]), "sums": (FLOAT, [turns]), "most": (FLOAT, [])},
        {"turns": np.array(turns), "w": rng.standard_normal((4, 4)).astype(np.float32)},
    )
    return proto, {"x": X}


def until(limit: float, turns: int | None = 40) -> Case:
    """The sum of the state decides when it ends."""
    body = graph_of(
        [
            node("Mul", "v two", "next"),
            node("ReduceSum", "next", "sum", keepdims=0),
            node("Less", "sum limit", "on"),
            node("Cast", "i", "number", to=FLOAT),
            node("Add", "sum number", "row"),
        ],
        {**COUNTED, "v": (FLOAT, [3, 4])},
        {"on": (BOOL, []), "next": (FLOAT, [3, 4])} | ({"row": (FLOAT, [])} if turns else {}),
    )
    outputs = "y rows" if turns else "y"
    proto = model_of(
        [node("Abs", "x", "v0"), node("Loop", f"{'turns' if turns else '-'} - v0", outputs, body=body)],
        {"x": (FLOAT, [3, 4])},
        {"y": (FLOAT, [3, 4])} | ({"rows": (FLOAT, [None])} if turns else {}),
        {
            "turns": np.array(turns or 0),
            "two": np.array(1.5, np.float32),
            "limit": np.array(limit, np.float32),
        },
    )
    return proto, {"x": X}


def scan(*, axes: int = 0, back: int = 0) -> Case:
    """Of two inputs, with two outputs: along which axes, and in which directions."""
    dims = [3, 2]
    body = graph_of(
        [
            node("Add", "h a", "s"),
            node("Mul", "s b", "after"),
            node("Neg", "after", "n"),
            node("Add", "n c", "m"),
        ],
        {"h": (FLOAT, dims), "a": (FLOAT, dims), "b": (FLOAT, dims)},
        {"after": (FLOAT, dims), "n": (FLOAT, dims), "m": (FLOAT, dims)},
    )
    nodes = [node("Transpose", "x", "p", perm=[0, 2, 1])]  # (5, 3, 2)
    if axes:
        nodes.append(node("Transpose", "p", "q", perm=[1, 0, 2] if axes == 1 else [1, 2, 0]))
    attributes: dict[str, Any] = {
        "scan_input_axes": [0, axes],
        "scan_input_directions": [back, 1 - back],
        "scan_output_axes": [axes, 0],
        "scan_output_directions": [1 - back, back],
    }
    nodes.append(
        node("Scan", f"h0 p {'q' if axes else 'p'}", "last n m", body=body, num_scan_inputs=2, **attributes)
    )
    outputs = {"last": (FLOAT, None), "n": (FLOAT, None), "m": (FLOAT, None)}
    tensors = {"h0": np.zeros(dims, np.float32), "c": np.array(0.5, np.float32)}
    return model_of(nodes, {"x": (FLOAT, [5, 2, 3])}, outputs, tensors), {"x": ROWS}


def two_in_a_row() -> Case:
    """The second loop runs over the rows of the first; both read what is before the first one."""
    first = graph_of(
        [node("Mul", "v r", "next"), node("Add", "next x", "row"), node("Identity", "go", "on")],
        {**COUNTED, "v": (FLOAT, [3, 4])},
        {"on": (BOOL, []), "next": (FLOAT, [3, 4]), "row": (FLOAT, [3, 4])},
    )
    second = graph_of(
        [node("Add", "h part", "s"), node("Sub", "s r", "after"), node("Identity", "after", "copy")],
        {"h": (FLOAT, [3, 4]), "part": (FLOAT, [3, 4])},
        {"after": (FLOAT, [3, 4]), "copy": (FLOAT, [3, 4])},
    )
    nodes = [
        node("Sigmoid", "x", "r"),
        node("Loop", "turns yes x", "v1 rows", body=first),
        node("Scan", "v1 rows", "h all", body=second, num_scan_inputs=1),
        node("Add", "h r", "y"),
    ]
    outputs = {"y": (FLOAT, [3, 4]), "all": (FLOAT, None), "v1": (FLOAT, [3, 4])}
    tensors = {"turns": np.array(6), "yes": np.array(True)}
    return model_of(nodes, {"x": (FLOAT, [3, 4])}, outputs, tensors), {"x": X}


def odd_states() -> Case:
    """States that a turn does not read or change, sets to a constant, or swaps; a constant row."""
    after = ("unread", "same", "fixed", "a1", "b1", "row")
    body = graph_of(
        [
            node("Identity", "go", "on"),
            node("Cast", "i", "number", to=FLOAT),
            node("Mul", "x number", "unread"),
            node("Identity", "kept", "same"),
            node("Identity", "c", "fixed"),
            node("Identity", "a", "b1"),
            node("Identity", "b", "a1"),
            node("Identity", "c", "row"),
        ],
        {**COUNTED, **{name: (FLOAT, [3, 4]) for name in ("u", "kept", "f", "a", "b")}},
        {"on": (BOOL, []), **{name: (FLOAT, [3, 4]) for name in after}},
    )
    names = "u1 k1 f1 a1 b1 rows"
    nodes = [node("Neg", "x", "z"), node("Loop", "turns - x z x x z", names, body=body)]
    outputs: dict[str, Any] = dict.fromkeys(names.split(), (FLOAT, None))
    tensors = {"turns": np.array(5), "c": rng.standard_normal((3, 4)).astype(np.float32)}
    return model_of(nodes, {"x": (FLOAT, [3, 4])}, outputs, tensors), {"x": X}


def other_dtypes() -> Case:
    """States of integers and truth values, a scalar, and a loop within the loop, which is unrolled."""
    inner = graph_of(
        [node("Mul", "w three", "w1"), node("Identity", "go2", "on2")],
        {"j": (INT64, []), "go2": (BOOL, []), "w": (INT64, [2])},
        {"on2": (BOOL, []), "w1": (INT64, [2])},
    )
    body = graph_of(
        [
            node("Loop", "two - n", "n1", body=inner),
            node("Mod", "n1 prime", "n2"),
            node("Not", "flag", "flag1"),
            node("Add", "total i", "total1"),
            node("Identity", "go", "on"),
        ],
        {**COUNTED, "n": (INT64, [2]), "flag": (BOOL, [1]), "total": (INT64, [])},
        {
            "on": (BOOL, []),
            "n2": (INT64, [2]),
            "flag1": (BOOL, [1]),
            "total1": (INT64, []),
            "n1": (INT64, [2]),
        },
    )
    names = "n1 flag1 total1 rows"
    nodes = [node("Loop", "turns - n flag zero", names, body=body)]
    outputs: dict[str, Any] = {name: (BOOL if "flag" in name else INT64, None) for name in names.split()}
    tensors = {
        name: np.array(value)
        for name, value in (("turns", 7), ("two", 2), ("three", 3), ("prime", 101), ("zero", 0))
    }
    inputs = {"n": (INT64, [2]), "flag": (BOOL, [1])}
    return model_of(nodes, inputs, outputs, tensors), {"n": np.array([5, 8]), "flag": np.array([True])}


def loops_of(source: OnnxModel, inputs: Mapping[str, np.ndarray]) -> list[Step]:
    """The loops that a model becomes."""
    specs = {name: TensorSpec.like(array) for name, array in inputs.items()}
    return [step for step in source.specialise(specs, {}).steps if isinstance(step.run, Loop)]


CASES: dict[str, Case] = {
    "known turns": known_turns(),
    "ends early": until(100.0),
    "ends after the first turn": until(0.0),
    "ends by its number": until(1e30, turns=9),
    "without a number": until(1000.0, turns=None),
    "scan": scan(),
    "scan backwards": scan(back=1),
    "scan of other axes": scan(axes=1, back=1),
    "scan of the last axis": scan(axes=2),
    "two in a row": two_in_a_row(),
    "odd states": odd_states(),
    "other dtypes": other_dtypes(),
}


@pytest.fixture(scope="module")
def wanted() -> Mapping[str, list[np.ndarray]]:
    """What ONNX Runtime gives, for all of them at once."""
    return dict(zip(CASES, answers(list(CASES.values())), strict=True))


@pytest.mark.parametrize("name", CASES)
async def test_a_loop_gives_what_onnx_runtime_gives(
    name: str, wanted: Mapping[str, list[np.ndarray]]
) -> None:
    proto, inputs = CASES[name]
    source = OnnxModel(proto, AS_LOOPS)
    assert loops_of(source, inputs)
    async with spawn(device="cpu") as gpu, await gpu.load(source) as model:
        results = await gpu.run(model, inputs)
    for found, expected in zip(results.values(), wanted[name], strict=True):
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


# Through the service.


async def test_ten_thousand_turns_take_no_more_memory_than_one() -> None:
    """Nor do seven loops in a row: within 2 MiB, which are eight values of a state."""
    body = graph_of(
        [node("Sub", "b v", "next"), node("Identity", "go", "on")],
        {**COUNTED, "v": (FLOAT, [256, 256])},
        {"on": (BOOL, []), "next": (FLOAT, [256, 256])},
    )
    nodes = [node("Abs", "x", "b"), node("Loop", "turns - x", "y0", body=body)]
    nodes += [node("Loop", f"few - y{number}", f"y{number + 1}", body=body) for number in range(6)]
    state: Any = (FLOAT, [256, 256])
    turns = {"turns": np.array(9_994), "few": np.array(2)}
    proto = model_of(nodes, {"x": state}, {"y6": state}, turns)
    x = rng.standard_normal((256, 256)).astype(np.float32)
    source = OnnxModel(proto, AS_LOOPS)
    async with spawn(device="cpu", memory_limit=2 << 20) as gpu, await gpu.load(source) as model:
        before = await live_buffers(gpu)
        found = (await gpu.run(model, x=x))["y6"]
        assert await live_buffers(gpu) == before
    wanted = x
    for _ in range(9_994 + 6 * 2):
        wanted = np.abs(x) - wanted
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("of", [RunLoop, RunGraph])
async def test_a_worker_that_is_killed_in_the_middle_changes_nothing(of: type) -> None:
    proto, inputs = CASES["two in a row"]
    faults = FaultPlan().at(2, Fault.KILL, of=of)
    async with spawn(device="cpu") as gpu, await gpu.load(OnnxModel(proto, AS_LOOPS)) as model:
        wanted = await gpu.run(model, inputs)
    async with spawn(device="cpu", isolation="process", faults=faults) as gpu:
        async with await gpu.load(OnnxModel(proto, AS_LOOPS)) as model:
            found = await asyncio.gather(*(gpu.run(model, inputs) for _ in range(3)))
        assert gpu.generation == 2
    for name, expected in wanted.items():
        for results in found:
            np.testing.assert_array_equal(results[name], expected)


async def test_a_run_that_is_cancelled_leaves_no_buffer() -> None:
    """After any number of steps of the event loop: each of its messages takes two at least."""
    proto, inputs = CASES["two in a row"]
    async with spawn(device="cpu") as gpu, await gpu.load(OnnxModel(proto, AS_LOOPS)) as model:
        before = await live_buffers(gpu)
        for steps in range(1, 10, 2):
            run = asyncio.ensure_future(gpu.run(model, inputs, keep=("y",)))
            for _ in range(steps):
                await asyncio.sleep(0)
            run.cancel()
            with pytest.raises(asyncio.CancelledError):
                await run
            assert await live_buffers(gpu) == before


async def test_outputs_are_kept_each_in_a_buffer_of_its_own() -> None:
    """Also the rows of a loop that has ended early, and outputs that are one value, or an input."""
    proto, inputs = until(100.0)
    proto.graph.node.extend([node("Identity", "y", "again"), node("Identity", "x", "given")])
    proto.graph.output.extend(
        helper.make_tensor_value_info(name, FLOAT, [3, 4]) for name in ("again", "given")
    )
    async with spawn(device="cpu") as gpu, await gpu.load(OnnxModel(proto, AS_LOOPS)) as model:
        x = await gpu.upload(inputs["x"])
        arrays = await gpu.run(model, x=x)
        kept = await gpu.run(model, x=x, keep=("y", "rows", "again", "given", "y"))
        assert len({x.slot, *(ref.slot for ref in kept.values())}) == 5
        for name, ref in kept.items():
            np.testing.assert_array_equal(await gpu.download(ref), arrays[name])
        assert arrays["rows"].shape == (7,)
        assert arrays["rows"].base is None  # else the rows of the turns that did not run stay in memory
        for ref in (*kept.values(), x):
            await gpu.free(ref)


async def test_an_input_says_how_many_turns_there_are() -> None:
    """Its value is looked at, so each number is an import of its own."""
    proto, inputs = known_turns(7)
    of_input = onnx.ModelProto()
    of_input.CopyFrom(proto)
    of_input.graph.initializer.remove(of_input.graph.initializer[0])
    of_input.graph.input.append(helper.make_tensor_value_info("turns", INT64, []))
    async with spawn(device="cpu") as gpu, await gpu.load(OnnxModel(of_input, AS_LOOPS)) as model:
        results = [await gpu.run(model, inputs, turns=np.array(turns)) for turns in (3, 7, 0)]
        async with await gpu.load(proto) as unrolled:
            wanted = await gpu.run(unrolled, inputs)
    assert [each["sums"].shape for each in results] == [(3,), (7,), (0,)]
    for name, expected in wanted.items():
        np.testing.assert_allclose(results[1][name], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
async def test_a_model_with_loops_in_another_dtype(dtype: Any) -> None:
    """What goes from turn to turn is float32."""
    proto, inputs = CASES["known turns"]
    async with spawn(device="cpu") as gpu:
        async with await gpu.load(OnnxModel(proto, AS_LOOPS)) as exact:
            wanted = await gpu.run(exact, inputs)
        async with await gpu.load(OnnxModel(proto, AS_LOOPS, dtype=dtype)) as model:
            results = await gpu.run(model, inputs)
    for name, expected in wanted.items():
        assert results[name].dtype == np.float32
        np.testing.assert_allclose(results[name], expected, rtol=0.05, atol=0.05)
        assert not np.array_equal(results[name], expected) or name == "most"


async def test_a_model_with_loops_is_warmed_explained_and_batched() -> None:
    dims: dict[str, Any] = {name: (FLOAT, ["N", 4]) for name in ("h", "part", "after", "o")}
    body = graph_of(
        [node("Mul", "h part", "s"), node("Add", "s part", "after"), node("Identity", "after", "o")],
        {name: dims[name] for name in ("h", "part")},
        {name: dims[name] for name in ("after", "o")},
    )
    nodes = [
        node("Transpose", "x", "t", perm=[1, 0, 2]),
        node("ReduceMean", "t axis", "first", keepdims=0),
        node("Scan", "first t", "last all", body=body, num_scan_inputs=1, scan_output_axes=[1]),
    ]
    rows: dict[str, Any] = {name: (FLOAT, ["N", "T", 4]) for name in ("x", "all")}
    outputs = {"last": dims["h"], "all": rows["all"]}
    proto = model_of(nodes, {"x": rows["x"]}, outputs, {"axis": np.array([0])})
    x = rng.standard_normal((3, 7, 4)).astype(np.float32)
    async with spawn(device="cpu") as gpu, await gpu.load(OnnxModel(proto, AS_LOOPS)) as model:
        assert await model.warm(N=(1, 2), T=7) > 0
        assert await model.warm(N=(1, 2), T=7) == 0
        labels = [label for piece in (await model.explain(N=2, T=7)).pieces for label in piece.labels]
        assert any(label.startswith("7 turns: mul at node 'last' (Scan)") for label in labels)
        whole = await gpu.run(model, x=x)
        async with gpu.batched(model, max_batch=4, dims={"T": 7}) as endpoint:
            parts = await asyncio.gather(*(endpoint(x=x[place : place + 1]) for place in range(3)))
        for name, expected in whole.items():
            np.testing.assert_allclose(np.concatenate([each[name] for each in parts]), expected, rtol=1e-6)


# What is unrolled all the same, and what is refused.


async def test_rows_whose_number_the_data_decides_are_read_by_other_nodes_in_an_unrolled_loop() -> None:
    proto, inputs = until(100.0)
    proto.graph.node.append(node("ReduceMax", "rows", "most", keepdims=0))
    proto.graph.output.append(helper.make_tensor_value_info("most", FLOAT, []))
    async with spawn(device="cpu") as gpu, await gpu.load(OnnxModel(proto, AS_LOOPS)) as model:
        results = await gpu.run(model, inputs)
    assert results["most"] == results["rows"].max()


@pytest.mark.parametrize("given", ["zero - x", "five no x", "five begins x"])
async def test_a_loop_of_no_turn_gives_its_states(given: str) -> None:
    """By its number, a condition that the file says, and one that follows from the data."""
    body = graph_of(
        [
            node("Neg", "v", "next"),
            node("Identity", "go", "on"),
            node("ReduceSum", "next", "sum", keepdims=0),
        ],
        {**COUNTED, "v": (FLOAT, [3, 4])},
        {"on": (BOOL, []), "next": (FLOAT, [3, 4]), "sum": (FLOAT, [])},
    )
    nodes = [
        node("ReduceSum", "x", "whole", keepdims=0),
        node("Greater", "whole much", "begins"),
        node("Loop", given, "last sums", body=body),
        node("Abs", "last", "y"),
    ]
    outputs: dict[str, Any] = {"y": (FLOAT, [3, 4]), "sums": (FLOAT, [None])}
    tensors = {"zero": np.array(0), "five": np.array(5), "no": np.array(False)}
    tensors["much"] = np.array(1e6, np.float32)
    proto = model_of(nodes, {"x": (FLOAT, [3, 4])}, outputs, tensors)
    source = OnnxModel(proto, AS_LOOPS)
    assert len(loops_of(source, {"x": X})) == (given == "five begins x")
    async with spawn(device="cpu") as gpu, await gpu.load(source) as model:
        results = await gpu.run(model, x=X)
    np.testing.assert_array_equal(results["y"], np.abs(X))
    assert results["sums"].shape == (0,)


def _long(body: onnx.GraphProto, *, given: str = "turns - x", turns: int = 100_000) -> onnx.ModelProto:
    tensors = {"turns": np.array(turns), "five": np.array(5), "half": np.array(0.5, np.float32)}
    loop = node("Loop", given, "y", body=body, name="long")
    return model_of([loop], {"x": (FLOAT, ["N", 4])}, {"y": (FLOAT, None)}, tensors)


def _refused(body: onnx.GraphProto, *, turns: int = 100_000, **more: Any) -> str:
    with pytest.raises(UnsupportedModel) as caught:
        OnnxModel(_long(body, turns=turns), **more).specialise({"x": TensorSpec.packed((3, 4))}, {})
    return str(caught.value)


def _body(*nodes: onnx.NodeProto) -> onnx.GraphProto:
    ports: dict[str, Any] = {**COUNTED, "v": (FLOAT, None)}
    return graph_of([*nodes, node("Identity", "go", "on")], ports, {"on": (BOOL, []), "next": (FLOAT, None)})


def test_refusals_say_why_a_loop_is_not_unrolled_and_why_it_is_none() -> None:
    many = r"node 'long' \(Loop\): has 100,000 turns, .* nor can it run as a loop: "
    wider = _refused(_body(node("Concat", "v x", "next", axis=0)))
    assert re.search(many + r"has a state of dims \(3, 4\), which are \(6, 4\) after a turn", wider)
    longer = _refused(_body(node("Neg", "v", "next")), turns=(1 << 20) + 1)
    assert "does not end within 1,048,576 turns, the most that a loop has" in longer
    drawn = _refused(_body(node("RandomUniformLike", "v", "r"), node("Add", "v r", "next")), random=1)
    assert re.search(many + "draws random numbers", drawn)
    swapped = _refused(_body(node("Neg", "v", "next")), swappable=True)
    assert re.search(many + "weights cannot be overwritten .* without swappable=True", swapped)
    expanded = (node("Shape", "x", "s"), node("Add", "s i", "t"), node("Expand", "half t", "halves"))
    shaped = _refused(
        _body(*expanded, node("ReduceMax", "halves", "m", keepdims=0), node("Mul", "v m", "next"))
    )
    of_turn = r"node 'long' \(Loop\), in node 'halves' \(Expand\): needs the values of 'turn'"
    assert re.search(many + of_turn, shaped)
    inner = _body(node("Neg", "v", "next"))
    nested = _refused(_body(node("Loop", "turns - v", "next", body=inner, name="inner")), turns=20_000)
    assert re.search(r"in node 'inner' \(Loop\): has 20,000 turns", nested)


async def test_a_loop_that_does_not_end_is_refused_once_it_has_had_its_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loops, "MOST_TURNS", 64)
    proto, inputs = until(np.inf, turns=None)
    proto.graph.initializer[1].CopyFrom(numpy_helper.from_array(np.array(1.0, np.float32), "two"))
    async with spawn(device="cpu") as gpu, await gpu.load(OnnxModel(proto, AS_LOOPS)) as model:
        with pytest.raises(InvalidRequest, match=r"node 'y' \(Loop\): has not ended after 64 turns"):
            await gpu.run(model, inputs)


def test_how_far_loops_are_unrolled_is_a_limit() -> None:
    proto, inputs = known_turns(20)
    assert loops_of(OnnxModel(proto), inputs) == []
    assert len(loops_of(OnnxModel(proto, ModelLimits(unrolled=50)), inputs)) == 1
    with pytest.raises(InvalidRequest, match="unrolled"):
        ModelLimits(unrolled=-1)


def test_a_body_that_adds_no_operation_is_a_loop_where_its_turns_are_more_nodes_than_an_import_has() -> None:
    body = _body(node("Identity", "v", "next"))
    (step,) = loops_of(OnnxModel(_long(body, turns=1 << 20)), {"x": X})
    assert step.turns == 1 << 20
    assert re.search(
        r"1,048,576 turns, which expand the model to 3,\d{3},\d{3} nodes; .* nor can it run as a loop",
        _refused(body, turns=1 << 20, swappable=True),
    )


def test_the_initialisers_of_a_model_are_made_where_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of many loops has two imports for each, which would make all initialisers."""
    made: list[str] = []
    initialiser = Ports.initialiser

    def noted(ports: Ports, name: str) -> Value:
        made.append(name)
        return initialiser(ports, name)

    monkeypatch.setattr(Ports, "initialiser", noted)
    proto, inputs = two_in_a_row()
    unread = [numpy_helper.from_array(np.zeros(1, np.float32), f"unread {k}") for k in range(9)]
    proto.graph.initializer.extend(unread)
    assert len(loops_of(OnnxModel(proto, AS_LOOPS), inputs)) == 2
    assert made
    assert not any(name.startswith("unread") for name in made)


def test_a_condition_of_several_elements_is_refused_when_the_model_is_imported() -> None:
    body = _body(node("Neg", "v", "next"))
    ports: dict[str, Any] = {"x": (FLOAT, [3, 4]), "begins": (BOOL, [2])}
    proto = model_of([node("Loop", "- begins x", "y", body=body)], ports, {"y": (FLOAT, None)})
    specs = {"x": TensorSpec.packed((3, 4)), "begins": TensorSpec.packed((2,), "bool")}
    with pytest.raises(UnsupportedModel, match="has a condition of several elements"):
        OnnxModel(proto, AS_LOOPS).specialise(specs, {})


async def test_what_a_turn_is_given_is_a_result_of_it_as_it_is() -> None:
    """Its number and its condition as rows, its number as a state, and two states that change places."""
    body = graph_of(
        [node("Identity", f"{each}", f"{each}_after") for each in ("go", "b", "a", "i")]
        + [node("Identity", each, f"{each}_row") for each in ("i", "go", "early")],
        {**COUNTED, "a": (FLOAT, [3, 4]), "b": (FLOAT, [3, 4]), "n": (INT64, [])},
        {"go_after": (BOOL, []), "b_after": (FLOAT, [3, 4]), "a_after": (FLOAT, [3, 4])}
        | {"i_after": (INT64, []), "i_row": (INT64, []), "go_row": (BOOL, []), "early_row": (FLOAT, [3, 4])},
    )
    names = {"p": FLOAT, "q": FLOAT, "last": INT64, "numbers": INT64, "goes": BOOL, "earlies": FLOAT}
    proto = model_of(
        [node("Abs", "x", "early"), node("Loop", "turns - x early seven", " ".join(names), body=body)],
        {"x": (FLOAT, [3, 4])},
        {name: (dtype, None) for name, dtype in names.items()},
        {"turns": np.array(5), "seven": np.array(7)},
    )
    assert loops_of(OnnxModel(proto, AS_LOOPS), {"x": X})
    async with spawn(device="cpu") as gpu, await gpu.load(OnnxModel(proto, AS_LOOPS)) as model:
        found = await gpu.run(model, x=X)
    np.testing.assert_array_equal(found["numbers"], np.arange(5))
    assert found["last"] == 4
    assert found["goes"].tolist() == [True] * 5
    np.testing.assert_array_equal(found["earlies"], [np.abs(X)] * 5)
    np.testing.assert_array_equal(found["p"], np.abs(X))
    np.testing.assert_array_equal(found["q"], X)
