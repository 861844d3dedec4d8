"""A graph of twice the operations takes at most 2.5 times as long, in each pass over it."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import onnx
import pytest

from cudnn_actor.engines.cpu.exact.compiler import compile_plan
from cudnn_actor.engines.cpu.scratch import aligned_bytes
from cudnn_actor.engines.cuda.planning.composition import compose
from cudnn_actor.engines.cuda.planning.partition import cut
from cudnn_actor.engines.cuda.planning.scratch_places import places
from cudnn_actor.engines.cuda.planning.steps import finish
from cudnn_actor.engines.cuda.running.barriers import waits
from cudnn_actor.engines.cuda.running.recipe import Buffer, GraphStep, Source
from cudnn_actor.models.kept_graphs import KeptGraphs
from cudnn_actor.models.source import Specialised
from cudnn_actor.onnx.onnx_model import OnnxModel
from cudnn_actor.protocol import Concat, Graph, GraphBuilder, GraphLimits, Tensor, TensorSpec
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.graphs.reproduction import token

from ..growth import takes_in_proportion
from ..onnx.small_models import FLOAT, model_of, node
from ..whole import WHOLE

Work = Callable[[], object]
Built = tuple[GraphBuilder, dict[str, Tensor], list[Tensor]]
"""A builder, outputs, and what they are differentiated by."""


def chain(count: int) -> Built:
    g, x = one_input()
    y = x
    for _ in range(count):
        y = g.tanh(y)
    return g, {"y": y}, [x]


def wide(count: int) -> Built:
    """All of one value, and one of all."""
    g, x = one_input()
    return g, {"y": g.concatenate([g.tanh(x) for _ in range(count)])}, [x]


def ladder(count: int) -> Built:
    g, x = one_input()
    y = x
    for _ in range(count // 3):
        y = g.relu(y * 0.5) + y
    return g, {"y": y}, [x]


def many_inputs(count: int) -> Built:
    g = GraphBuilder()
    inputs = [g.input(f"x{number}", (8,)) for number in range(count)]
    return g, {f"y{number}": g.tanh(x) for number, x in enumerate(inputs)}, inputs


def products(count: int) -> Built:
    """Each needed by the next one."""
    g = GraphBuilder()
    x, w = g.input("x", (4, 4)), g.input("w", (4, 4))
    y = x
    for _ in range(count):
        y = y @ w
    return g, {"y": y}, [x]


def kept_products(count: int) -> Built:
    """All needed at the end."""
    g = GraphBuilder()
    x = g.input("x", (4, 4))
    made = [x]
    for _ in range(count // 2):
        made.append(made[-1] @ x)
    y = made.pop()
    while made:
        y = y + made.pop()
    return g, {"y": y}, [x]


def reductions(count: int) -> Built:
    g, x = one_input((4, 4))
    y = x
    for _ in range(count // 2):
        y = x + y.sum(axis=1, keepdims=True)
    return g, {"y": y}, [x]


def one_input(dims: tuple[int, ...] = (8,)) -> tuple[GraphBuilder, Tensor]:
    g = GraphBuilder(limits=GraphLimits(operations=100_000))
    return g, g.input("x", dims)


def graph_of(built: Built) -> Graph:
    g, outputs, _ = built
    return g.build(outputs)


def fresh(graph: Graph) -> OperationGraph:
    """The operations, without anything that has been computed of them."""
    return msgspec.structs.replace(graph.body)


def recorded(make: Callable[[int], Built], count: int) -> Work:
    return lambda: graph_of(make(count))


def differentiated(make: Callable[[int], Built], count: int) -> Work:
    g, outputs, inputs = make(count)
    return lambda: g.grad(list(outputs.values()), inputs)


def written_and_read(make: Callable[[int], Built], count: int) -> Work:
    graph = graph_of(make(count))
    return lambda: (Graph.from_json(graph.to_json()).digest(), token(fresh(graph)), graph.to_dot())


def planned(make: Callable[[int], Built], count: int) -> Work:
    body = fresh(graph_of(make(count)))
    return lambda: compile_plan(body, None)


def run_once(make: Callable[[int], Built], count: int) -> Work:
    body = graph_of(make(count)).body
    plan = compile_plan(body, None)
    buffers = [np.zeros(body.tensor(uid).dims, np.float32) for uid in body.bound]
    workspace = aligned_bytes(plan.workspace)
    return lambda: plan.bind(workspace).run(buffers, [])


def drawn(make: Callable[[int], Built], count: int) -> Work:
    graph = graph_of(make(count))
    explanation = compile_plan(graph.body, None).explain(graph.body)
    return lambda: graph.to_svg(explanation)


def cut_in_pieces(make: Callable[[int], Built], count: int) -> Work:
    body = fresh(graph_of(make(count)))
    return lambda: cut(body)


def placed(make: Callable[[int], Built], count: int) -> Work:
    parts = cut(graph_of(make(count)).body)
    assert parts is not None
    return lambda: places(parts)


def composed(make: Callable[[int], Built], count: int) -> Work:
    body = graph_of(make(count)).body
    parts = cut(body)
    assert parts is not None
    return lambda: compose(body, parts, lambda piece: finish(piece, [], [], 0, None)).explain(body)


def sampled(make: Callable[[int], Built], count: int) -> Work:
    body = fresh(graph_of(make(count)))
    return lambda: body.samples(np, lambda spec: np.zeros(spec.dims))


_ENOUGH = 60
"""A size that shows what grows with its square, if that is not a small part of the rest."""
_QUICK = (cut_in_pieces, many_inputs)
"""A pass that takes few microseconds for each operation: a list that is searched for each shows in 3,200."""
PASSES: list[tuple[Callable[[Callable[[int], Built], int], Work], Callable[[int], Built], int]] = [
    (recorded, many_inputs, 60),
    (differentiated, ladder, 40),
    (differentiated, kept_products, 40),
    (written_and_read, wide, 60),
    (planned, chain, 100),
    (planned, many_inputs, 100),
    (planned, reductions, 100),
    (run_once, wide, 60),
    (drawn, ladder, 40),
    (drawn, kept_products, 75),
    (cut_in_pieces, many_inputs, 200),
    (cut_in_pieces, chain, 150),
    (placed, products, 150),
    (placed, kept_products, 150),
    (composed, kept_products, 60),
    (sampled, many_inputs, 200),
]


@pytest.mark.parametrize(
    ("what", "make", "size"), PASSES, ids=[f"{what.__name__}-{make.__name__}" for what, make, _ in PASSES]
)
def test_a_pass_takes_as_long_as_the_graph_is_large(
    what: Callable[[Callable[[int], Built], int], Work], make: Callable[[int], Built], size: int
) -> None:
    whole = WHOLE or (what, make) == _QUICK
    takes_in_proportion(lambda count: what(make, count), size if whole else min(size, _ENOUGH))


def test_barriers_are_found_in_proportion() -> None:
    """Of products with a residual: cuDNN may run them at the same time."""

    def prepare(count: int) -> Work:
        sources: list[tuple[Source, ...]] = [(Buffer(n), Buffer(count + n)) for n in range(count)]
        steps = [GraphStep("", 0, (0, 1), each, beside=(1,)) for each in sources]
        return lambda: waits(steps)

    takes_in_proportion(prepare, 250)


def test_a_concatenation_is_laid_out_in_proportion() -> None:
    takes_in_proportion(
        lambda count: lambda: Concat(operands=(0,) * count, axis=0, y=1).starts([(1, 4)] * count), 1000
    )


# Models.


def nodes_in_a_row(count: int) -> onnx.ModelProto:
    nodes = [node("Tanh", f"v{number}", f"v{number + 1}") for number in range(count)]
    return model_of(nodes, {"v0": (FLOAT, [8])}, {f"v{count}": (FLOAT, [8])})


def a_sum_of_many(count: int) -> onnx.ModelProto:
    inputs = [f"x{number}" for number in range(count)]
    return model_of(
        [node("Sum", " ".join(inputs), "y")], {x: (FLOAT, [8]) for x in inputs}, {"y": (FLOAT, [8])}
    )


def recurrence(op: str, gates: int) -> Callable[[int], onnx.ModelProto]:
    w, r = np.zeros((1, gates * 4, 3), np.float32), np.zeros((1, gates * 4, 4), np.float32)

    def model(steps: int) -> onnx.ModelProto:
        x, y = [steps, 1, 3], [steps, 1, 1, 4]
        nodes = [node(op, "x w r", "y", hidden_size=4)]
        return model_of(nodes, {"x": (FLOAT, x)}, {"y": (FLOAT, y)}, {"w": w, "r": r})

    return model


def body_of_a_loop() -> onnx.GraphProto:
    value, boolean = onnx.helper.make_tensor_value_info, onnx.TensorProto.BOOL
    nodes = [node("MatMul", "s w", "p"), node("Tanh", "p", "o"), node("Identity", "going", "still")]
    return onnx.helper.make_graph(
        nodes,
        "body",
        [value("step", onnx.TensorProto.INT64, []), value("going", boolean, []), value("s", FLOAT, [1, 8])],
        [value("still", boolean, []), value("o", FLOAT, [1, 8]), value("p", FLOAT, [1, 8])],
        [onnx.numpy_helper.from_array(np.eye(8, dtype=np.float32), "w")],
    )


def loop(steps: int) -> onnx.ModelProto:
    nodes = [node("Loop", "most - x", "y all", body=body_of_a_loop())]
    outputs = {"y": (FLOAT, [1, 8]), "all": (FLOAT, [steps, 1, 8])}
    return model_of(nodes, {"x": (FLOAT, [1, 8])}, outputs, {"most": np.array(steps)})


def scan(steps: int) -> onnx.ModelProto:
    value = onnx.helper.make_tensor_value_info
    body = onnx.helper.make_graph(
        [node("Add", "s x", "t"), node("Tanh", "t", "o")],
        "body",
        [value("s", FLOAT, [4]), value("x", FLOAT, [4])],
        [value("t", FLOAT, [4]), value("o", FLOAT, [4])],
    )
    return model_of(
        [node("Scan", "s0 xs", "y all", body=body, num_scan_inputs=1)],
        {"s0": (FLOAT, [4]), "xs": (FLOAT, [steps, 4])},
        {"y": (FLOAT, [4]), "all": (FLOAT, [steps, 4])},
    )


def branches(count: int) -> tuple[onnx.NodeProto, onnx.NodeProto]:
    """A truth, and a choice of a node by it, from `s`. The other branch, of as many nodes, is never taken."""
    value = onnx.helper.make_tensor_value_info
    other = [node("Relu", f"{f'r{n}' if n else 's'}", f"r{n + 1}") for n in range(count)]
    taken = onnx.helper.make_graph([node("Relu", "s", "r")], "then", [], [value("r", FLOAT, [4])])
    missed = onnx.helper.make_graph(other, "else", [], [value(f"r{count}", FLOAT, [4])])
    true = onnx.numpy_helper.from_array(np.array(True))
    choice = node("If", "true", "o", then_branch=taken, else_branch=missed)
    return node("Constant", "", "true", value=true), choice


def calls_with_a_branch_that_is_not_taken(count: int) -> onnx.ModelProto:
    opsets = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid("own", 1)]
    function = onnx.helper.make_function("own", "F", ["s"], ["o"], branches(count), opsets)
    calls = [
        onnx.helper.make_node("F", [f"x{n}" if n else "x"], [f"x{n + 1}"], domain="own") for n in range(count)
    ]
    ports = {"x": (FLOAT, [4])}, {f"x{count}": (FLOAT, [4])}
    return model_of(calls, *ports, functions=[function], opset_imports=opsets)


def loop_with_a_branch_that_is_not_taken(count: int) -> onnx.ModelProto:
    value, boolean = onnx.helper.make_tensor_value_info, onnx.TensorProto.BOOL
    body = onnx.helper.make_graph(
        [*branches(count), node("Identity", "going", "still")],
        "body",
        [value("step", onnx.TensorProto.INT64, []), value("going", boolean, []), value("s", FLOAT, [4])],
        [value("still", boolean, []), value("o", FLOAT, [4])],
    )
    ports = {"x": (FLOAT, [4])}, {"y": (FLOAT, [4])}
    return model_of([node("Loop", "most - x", "y", body=body)], *ports, {"most": np.array(count)})


def loop_with_constants(count: int) -> onnx.ModelProto:
    """As many in its body as it has turns. They have no elements, and so take no bytes."""
    value, boolean = onnx.helper.make_tensor_value_info, onnx.TensorProto.BOOL
    nothing = np.empty(0, np.float32)
    body = onnx.helper.make_graph(
        [node("Identity", "going", "still"), node("Relu", "s", "o")],
        "body",
        [value("step", onnx.TensorProto.INT64, []), value("going", boolean, []), value("s", FLOAT, [4])],
        [value("still", boolean, []), value("o", FLOAT, [4])],
        [onnx.numpy_helper.from_array(nothing, f"c{n}") for n in range(count)],
    )
    ports = {"x": (FLOAT, [4])}, {"y": (FLOAT, [4])}
    return model_of([node("Loop", "most - x", "y", body=body)], *ports, {"most": np.array(count)})


MODELS: dict[str, tuple[Callable[[int], onnx.ModelProto], int]] = {
    "nodes in a row": (nodes_in_a_row, 50),
    "a sum of many": (a_sum_of_many, 50),
    "LSTM": (recurrence("LSTM", 4), 10),
    "GRU": (recurrence("GRU", 3), 10),
    "RNN": (recurrence("RNN", 1), 20),
    "Loop": (loop, 15),
    "Scan": (scan, 15),
    "calls with a branch that is not taken": (calls_with_a_branch_that_is_not_taken, 50),
    "Loop with a branch that is not taken": (loop_with_a_branch_that_is_not_taken, 50),
    "Loop with constants": (loop_with_constants, 40),
}


@pytest.mark.parametrize(("make", "size"), MODELS.values(), ids=MODELS)
def test_an_import_takes_as_long_as_the_unrolled_model_is_large(
    make: Callable[[int], onnx.ModelProto], size: int
) -> None:
    def prepare(count: int) -> Work:
        data = make(count).SerializeToString()

        def imported() -> object:
            model = OnnxModel(data)
            specs = {each.name: TensorSpec.packed(each.spec.dims) for each in model.inputs if each.spec}
            return model.specialise(specs, {})

        return imported

    takes_in_proportion(prepare, size)


def test_the_end_of_a_run_looks_at_no_other_model() -> None:
    """As many runs as there are models, each of which gives nothing back."""
    g = GraphBuilder()
    graph = g.build({"y": g.relu(g.input("x", (4,)))})

    def prepare(count: int) -> Work:
        models = KeptGraphs(lambda identities, plans: None, limit=1)
        kept = [
            {0: Specialised(graph=graph, inputs={}, outputs={}, weights={}, constants={})}
            for _ in range(count)
        ]
        for each in kept:
            models.add(each)

        def runs() -> object:
            for _ in range(count):
                models.release([], [])
                models.trim()
            return kept

        return runs

    takes_in_proportion(prepare, 250)
