"""A layer and its gradients as calls by themselves: they hand on what libcudnn keeps, as bytes in buffers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from cudnn_actor.engines.cpu.exact.evaluation import EvaluatedPlan, NumPy
from cudnn_actor.engines.cuda.cudnn.frontend_graph import Refused
from cudnn_actor.engines.cuda.operations.recurrent_calls import (
    LayerBackwardData,
    LayerBackwardWeights,
    Layers,
    LayerWeights,
)
from cudnn_actor.engines.cuda.planning.partition import cut
from cudnn_actor.engines.cuda.planning.recurrent_layers import replace_layers
from cudnn_actor.engines.cuda.planning.recurrent_passes import close_graph, passes
from cudnn_actor.engines.cuda.planning.splitting import compile_split
from cudnn_actor.engines.cuda.running.explaining import explanation
from cudnn_actor.engines.cuda.running.recipe import Recipe
from cudnn_actor.protocol import BufferRef, DType, GraphBuilder, OperationGraph, TensorSpec
from cudnn_actor.protocol.messages.lowering import lower
from cudnn_actor.protocol.operations import (
    Recurrent,
    RecurrentBackwardData,
    RecurrentBackwardWeights,
    RecurrentMode,
    TensorRole,
)
from cudnn_actor.service.reserves import graph_with_own_reserve

from ....in_one_test import cases_in_one_test
from ....service.trained_layers import LAYERS, Arrays, Layer
from .test_recurrent_calls import Computing, Run, library
from .test_recurrent_networks import Values

__all__ = ["library"]

WIDE = {name: layer._replace(dtype=DType.FLOAT64) for name, layer in LAYERS.items()}
NBYTES = Computing.RESERVE
each_layer = pytest.mark.parametrize("layer", WIDE.values(), ids=list(WIDE))
KINDS: tuple[Any, ...] = (Recurrent, RecurrentBackwardData, RecurrentBackwardWeights)


class Messages:
    """The three messages of a layer, on buffers that have numbers alone."""

    def __init__(self, layer: Layer, nbytes: int = NBYTES) -> None:
        self.layer, self.results = layer, layer.results()
        arrays = layer.inputs | self.results
        specs = {name: TensorSpec.packed(array.shape, layer.dtype) for name, array in arrays.items()}
        specs |= dict.fromkeys(("reserve", "slopes"), TensorSpec.packed((nbytes,), DType.UINT8))
        self.refs = {
            name: BufferRef(slot=slot, generation=1, spec=spec, device="cuda:0")
            for slot, (name, spec) in enumerate(specs.items())
        }
        self.names = {ref.slot: name for name, ref in self.refs.items()}
        self.outputs = dict(zip(KINDS, (layer.ends, layer.slopes, layer.gradients), strict=True))

    def message(self, kind: Any, **changes: Any) -> Any:
        names = [name for name in (*kind.inputs, *self.outputs[kind]) if name in self.refs]
        return kind(**{name: self.refs[name] for name in names} | changes, **self.layer.how)

    def graph(self, kind: Any, **changes: Any) -> OperationGraph:
        """Its graph, in which a tensor has the number of its buffer."""
        message = self.message(kind, **changes)
        graph = lower(message).graph
        slots = {
            uid: ref.slot
            for (_, uid), (_, ref) in zip(graph.operations[0].named(), message.named(), strict=True)
        }
        return OperationGraph(
            tensors=tuple(msgspec.structs.replace(each, uid=slots[each.uid]) for each in graph.tensors),
            operations=(
                msgspec.structs.replace(message, **{name: ref.slot for name, ref in message.named()}),
            ),
        )

    def buffers(self) -> Values:
        return {self.refs[name].slot: array for name, array in self.layer.inputs.items()}

    def dims(self) -> dict[int, tuple[int, ...]]:
        return {ref.slot: ref.spec.dims for ref in self.refs.values()}


@each_layer
def test_the_three_calls_compute_the_gradients_in_memory(library: Computing, layer: Layer) -> None:
    messages = Messages(layer)
    run = Run(library, 1, messages.buffers(), messages.dims())
    found: Arrays = {}
    for kind in KINDS:
        graph = messages.graph(kind)
        assert cut(graph) is None
        written = run.run(*replace_layers(graph))
        found |= {messages.names[uid]: array for uid, array in written.items()}
    for name, wanted in messages.results.items():
        np.testing.assert_allclose(found[name], wanted, rtol=0, atol=1e-13, err_msg=name)


def test_gradients_by_data_work_on_a_copy_of_the_reserve(library: Computing) -> None:
    """Also where nobody wants it. So they can be computed again after a crash."""
    messages = Messages(WIDE["lstm"])
    run = Run(library, 1, messages.buffers(), messages.dims())
    run.run(*replace_layers(messages.graph(Recurrent)))
    place = run.at[messages.refs["reserve"].slot]
    before = library.memory.bytes[place : place + NBYTES].copy()
    for changes in ({}, {"slopes": None}, {}):
        run.run(*replace_layers(messages.graph(RecurrentBackwardData, **changes)))
        np.testing.assert_array_equal(library.memory.bytes[place : place + NBYTES], before)


def test_weights_are_brought_into_the_librarys_form_by_each_pass_that_reads_them() -> None:
    """Those of the gradients by data may have changed since the forward pass."""
    messages = Messages(WIDE["lstm"])
    kinds = [[type(each) for each in replace_layers(messages.graph(kind))] for kind in KINDS]
    assert kinds == [[LayerWeights, Layers], [LayerWeights, LayerBackwardData], [LayerBackwardWeights]]


@cases_in_one_test
@each_layer
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_checked_has_the_layer_before_and_the_operation_twice(
    library: Computing, layer: Layer, kind: Any
) -> None:
    messages = Messages(layer)
    graph = messages.graph(kind)
    whole = close_graph(graph)
    assert whole is not None
    count = {Recurrent: 1, RecurrentBackwardData: 3, RecurrentBackwardWeights: 4}[kind]
    assert len(whole.operations) == count
    assert not any(tensor.dtype is DType.UINT8 for tensor in whole.tensors)
    assert set(whole.results) == set(graph.results) - {
        messages.refs[name].slot for name in ("reserve", "slopes")
    }
    # By the calls, and by the definitions.
    rng = np.random.default_rng(2)
    values = {uid: rng.normal(size=whole.tensor(uid).dims) / 4 for uid in whole.bound}
    dims = {tensor.uid: tensor.dims for tensor in whole.tensors if tensor.role is TensorRole.BOUND}
    dims |= {
        uid: whole.tensor(uid).dims
        for each in whole.operations
        for name, uid in each.named()
        if name not in ("reserve", "slopes")
    }
    given = {uid: array for uid, array in values.items() if uid not in whole.written}
    found = Run(library, 3, given, dims).run(*passes(whole))
    EvaluatedPlan("", whole).bind(np.empty(0, np.uint8)).run([values[uid] for uid in whole.bound], ())
    compare_closely({uid: found[uid] for uid in whole.results}, {uid: values[uid] for uid in whole.results})


def compare_closely(found: Values, wanted: Values) -> None:
    for uid, value in found.items():
        np.testing.assert_allclose(value, wanted[uid], rtol=0, atol=1e-13)


def test_a_graph_without_bytes_is_checked_itself() -> None:
    g = GraphBuilder()
    y = g.rnn(g.input("x", (5, 3, 6)), [[g.input(name, (6, 6)) for name in "ih"]]).y
    assert close_graph(g.build(y=y).body) is None


@cases_in_one_test
@each_layer
@pytest.mark.parametrize("nbytes", [100, 100_000])
def test_operands_that_tuning_draws_are_as_large_as_their_buffers(layer: Layer, nbytes: int) -> None:
    """On the device, a store of fewer elements would read behind them."""
    rng = np.random.default_rng(3)
    for kind in KINDS:
        messages = Messages(layer, nbytes)
        graph = messages.graph(kind)
        found = graph.samples(NumPy(), lambda spec: rng.integers(-3, 5, spec.dims).astype(np.float64))
        assert {uid: array.shape for uid, array in found.items()} == {
            uid: graph.tensor(uid).dims for uid in found
        }
        if kind is RecurrentBackwardData:
            reserve = found[messages.refs["reserve"].slot]
            assert reserve.dtype == np.uint8
            assert reserve.any()


@pytest.mark.parametrize(
    ("kind", "name"),
    [(Recurrent, "reserve"), (RecurrentBackwardData, "reserve"), (RecurrentBackwardWeights, "slopes")],
)
def test_too_few_bytes_are_refused_with_their_number(library: Computing, kind: Any, name: str) -> None:
    handle = SimpleNamespace(backend_handle=9)
    compile_split(Messages(WIDE["lstm"]).graph(kind), handle, None)
    with pytest.raises(Refused, match=rf"{name} has {NBYTES - 1:,} of the {NBYTES:,} bytes"):
        compile_split(Messages(WIDE["lstm"], NBYTES - 1).graph(kind), handle, None)


def test_a_plan_tells_how_many_bytes_a_layer_keeps(library: Computing) -> None:
    library.RESERVE = 12_345
    graph = graph_with_own_reserve(Messages(WIDE["lstm"]).message(Recurrent))
    plan = compile_split(graph, SimpleNamespace(backend_handle=9), None)
    (piece,) = explanation(plan.recipe, graph).pieces
    assert piece.reserve == 12_345


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_survives_being_bytes_and_says_what_its_steps_read(library: Computing, kind: Any) -> None:
    graph = Messages(WIDE["lstm"]).graph(kind)
    recipe = compile_split(graph, SimpleNamespace(backend_handle=9), None).recipe
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(recipe), type=Recipe) == recipe
    step: Any = recipe.steps[-1]
    written = [number for number in range(len(step.tensors)) if number not in step.reads]
    assert written == [number for _, number in step.operation.named(step.operation.outputs)]


def test_a_reserve_of_another_layer_within_a_graph_is_refused() -> None:
    messages = Messages(WIDE["lstm"])
    graph = messages.graph(RecurrentBackwardData)
    back: Any = msgspec.structs.replace(graph.operations[0], reserve=None)
    slopes = messages.refs["slopes"].slot
    tensors = tuple(each for each in graph.tensors if each.uid in (*back.reads, *back.writes))
    assert slopes in {each.uid for each in tensors}
    with pytest.raises(Refused, match="reserve"):
        passes(OperationGraph(tensors=tensors, operations=(back,)))


def test_gradients_that_keep_bytes_and_read_none_compute_the_layer() -> None:
    messages = Messages(WIDE["lstm"])
    graph = messages.graph(RecurrentBackwardData, reserve=None)
    parts = cut(graph)
    assert parts is not None
    (piece,) = parts.pieces
    kinds = [type(each) for each in replace_layers(piece.graph)]
    assert kinds == [LayerWeights, Layers, LayerBackwardData]
    assert close_graph(piece.graph) is not None


def test_gradients_of_a_graph_with_bytes_as_an_output_compute_the_layer_again(library: Computing) -> None:
    g = GraphBuilder()
    operands: Any = {
        name: g.input(name, dims, "float64")
        for name, dims in (("x", (5, 3, 6)), ("w_ih", (1, 6, 6)), ("w_hh", (1, 6, 6)))
    }
    size = g.full((NBYTES,), 0, "uint8")
    made = g.apply(Recurrent(**operands, mode=RecurrentMode.TANH), also=("reserve",), like={"reserve": size})
    slope = g.input("slope", (5, 3, 6), "float64")
    found = g.grad(made.y, [*operands.values()], slope)
    graph = g.build({"reserve": made.reserve, **{f"d{n}": each for n, each in enumerate(found)}}).body
    parts = cut(graph)
    assert parts is not None
    kinds = [[type(each) for each in replace_layers(piece.graph)] for piece in parts.pieces]
    assert kinds == [
        [LayerWeights, Layers],
        [LayerWeights, Layers, LayerBackwardData, LayerBackwardWeights],
    ]
    for piece in parts.pieces:
        compile_split(piece.graph, SimpleNamespace(backend_handle=9), None)


def graph_of_training(*, wanted: tuple[str, ...]) -> OperationGraph:
    """Two layers and their gradients, of which bytes are outputs."""
    g = GraphBuilder()
    x, slope = g.input("x", (5, 3, 6), "float64"), g.input("slope", (5, 3, 6), "float64")
    size = g.full((NBYTES,), 0, "uint8")
    y, made = x, []
    for n in range(2):
        operands: Any = {name: g.input(f"{name}{n}", (1, 6, 6), "float64") for name in ("w_ih", "w_hh")} | {
            "x": y,
            "mode": RecurrentMode.TANH,
        }
        found = g.apply(Recurrent(**operands), also=("reserve",), like={"reserve": size})
        y = found.y
        made.append((operands, found))
    results: dict[str, Any] = {"y": y}
    dy = slope
    for n, (operands, found) in reversed([*enumerate(made)]):
        back: Any = RecurrentBackwardData(**operands, y=found.y, reserve=found.reserve, dy=dy)
        data = g.apply(back, also=("slopes",))
        dy = data.dx
        weights: Any = RecurrentBackwardWeights(
            x=operands["x"], y=found.y, slopes=data.slopes, mode=RecurrentMode.TANH
        )
        like = {"dw_ih": operands["w_ih"], "dw_hh": operands["w_hh"]}
        results |= {f"{name}{n}": each for name, each in zip(like, g.apply(weights, like=like), strict=True)}
        results |= {f"reserve{n}": found.reserve, f"slopes{n}": data.slopes}
    results["dx"] = dy
    return g.build({name: each for name, each in results.items() if name.rstrip("01") in wanted}).body


@pytest.mark.parametrize(
    "wanted",
    [("y", "dx", "dw_ih"), ("y", "reserve"), ("y", "reserve", "dx"), ("slopes", "dw_hh"), ("dx", "dw_hh")],
    ids=",".join,
)
def test_bytes_may_be_between_operations_of_a_graph_and_outputs(
    library: Computing, wanted: tuple[str, ...]
) -> None:
    graph = graph_of_training(wanted=wanted)
    parts = cut(graph)
    pieces = [graph] if parts is None else [each.graph for each in parts.pieces]
    rng = np.random.default_rng(4)
    for piece in pieces:
        compile_split(piece, SimpleNamespace(backend_handle=9), None)
        whole = close_graph(piece)
        if whole is None:
            continue
        values = {uid: rng.normal(size=whole.tensor(uid).dims) / 4 for uid in whole.bound}
        dims = {
            uid: whole.tensor(uid).dims
            for each in whole.operations
            for name, uid in each.named()
            if name not in ("reserve", "slopes")
        }
        given = {uid: array for uid, array in values.items() if uid not in whole.written}
        run = Run(library, 5, given, dims)
        run.run(*passes(whole))
        EvaluatedPlan("", whole).bind(np.empty(0, np.uint8)).run([values[uid] for uid in whole.bound], ())
        for uid in whole.results:
            found = run.memory.array(run.at[uid], dims[uid])
            np.testing.assert_allclose(found, values[uid], rtol=0, atol=1e-13)
