"""What CUDA makes of recurrent layers: pieces without reserves, and where their weights lie."""

from __future__ import annotations

import ctypes
import itertools
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from cudnn_actor.engines.base import EngineFailure
from cudnn_actor.engines.cuda.cudnn.frontend_graph import Refused
from cudnn_actor.engines.cuda.kernels import kernel
from cudnn_actor.engines.cuda.library import libcudnn
from cudnn_actor.engines.cuda.library.libcudnn import PROTOTYPES
from cudnn_actor.engines.cuda.operations import IMPLEMENTATIONS, recurrent
from cudnn_actor.engines.cuda.operations.recurrent import Span, join_spans, spans_of
from cudnn_actor.engines.cuda.operations.recurrent_calls import Layers, LayersBackward, LayerWeights
from cudnn_actor.engines.cuda.planning.composition import compose, scratch_bytes
from cudnn_actor.engines.cuda.planning.listing import singles
from cudnn_actor.engines.cuda.planning.partition import cut
from cudnn_actor.engines.cuda.planning.recurrent_layers import replace_layers, together
from cudnn_actor.engines.cuda.planning.splitting import compile_split
from cudnn_actor.engines.cuda.running.recipe import OperationStep, Recipe, Scratch
from cudnn_actor.protocol import DType, Graph, GraphBuilder, TensorSpec
from cudnn_actor.protocol.graphs.expressions import Tensor
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.operations import (
    GraphTensor,
    Recurrent,
    RecurrentBackwardData,
    RecurrentBackwardWeights,
    RecurrentMode,
)
from cudnn_actor.protocol.operations.base import tensor_of

from ..planning.test_partition import check

F64 = DType.FLOAT64


def kinds_of(graph: OperationGraph) -> list[str]:
    """The kinds of recurrent operations, without their common beginning."""
    return [
        each.kind.removeprefix("recurrent") for each in graph.operations if each.kind.startswith("recurrent")
    ]


def network(
    mode: str,
    layers: int,
    *,
    wanted: str = "xw",
    outside: str = "y",
    dropout: float = 0.0,
    both: bool = False,
) -> Graph:
    """Layers, their results that are asked for, and the gradients by x, the weights and states."""
    g, ways = GraphBuilder(), 1 + both
    rows = RecurrentMode(mode).gates * 6
    x = g.input("x", (5, 3, 4), F64)
    h0 = g.input("h0", (layers * ways, 3, 6), F64)
    own = [
        [
            g.input(f"w{number}{n}", dims, F64)
            for n, dims in enumerate(((rows, 4 if number < ways else 6 * ways), (rows, 6), (rows,), (rows,)))
        ]
        for number in range(layers * ways)
    ]
    function: Any = {"lstm": g.lstm, "gru": g.gru}.get(mode, g.rnn)
    more: dict[str, Any] = {"dropout": dropout, "state": g.input("state", (2,), "int64")} if dropout else {}
    made = function(x, own, h0, bidirectional=both, lengths=(5, 0, 4), **more)
    of = {"x": [x, h0], "w": [each for layer in own for each in layer]}
    upstream = [g.input(f"slope{n}", each.dims, F64) for n, each in enumerate(made)]
    gradients = g.grad([*made], [each for name in wanted for each in of[name]], upstream) if wanted else []
    results = {name: getattr(made, name) for name in ("y", "h_n") if name in outside.split()}
    return g.build(results | {f"d{n}": each for n, each in enumerate(gradients)})


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("mode", ["lstm", "gru", "tanh"])
def test_layers_are_one_piece_and_their_gradients_another(mode: str, *, both: bool) -> None:
    parts = check(network(mode, 3, outside="y h_n", both=both))
    kinds = [kinds_of(piece.graph) for piece in parts.pieces]
    forward, backward = [""] * 3, [""] * 3 + ["_bwd_data"] * 3 + ["_bwd_weights"] * 3
    assert [each for each in kinds if each] == [forward, backward]
    ((layers, gradients, _),) = parts.kept
    assert (kinds[layers], kinds[gradients]) == (forward, backward)
    for piece in parts.pieces:
        assert cut(piece.graph) is None, "a piece is not cut again"
        if kinds_of(piece.graph):
            (one,) = replace_layers(piece.graph)
            assert isinstance(one, Layers if len(piece.graph.operations) == 3 else LayersBackward)
            assert len(one.w_hh) == 3
            assert one.reserve is not None


def test_layers_apart_are_pieces_of_their_own() -> None:
    """So they are planned where together they do not pass their check, or take too much memory."""
    graph = network("lstm", 3).body
    parts = cut(graph, layers_apart=True)
    assert parts is not None
    kinds = [each for piece in parts.pieces if (each := kinds_of(piece.graph))]
    assert sorted(kinds) == sorted([[""], ["", "_bwd_data", "_bwd_weights"]] * 3)
    assert len(parts.kept) == 3
    whole = cut(graph)
    assert whole is not None
    (wide,) = (piece.graph for piece in whole.pieces if len(kinds_of(piece.graph)) == 3)
    again = cut(wide, layers_apart=True)
    assert again is not None
    assert [len(piece.graph.operations) for piece in again.pieces] == [1, 1, 1]


def test_gradients_alone_have_the_layers_in_their_piece() -> None:
    parts = check(network("gru", 2, outside=""))
    assert [each for piece in parts.pieces if (each := kinds_of(piece.graph))] == [
        ["", "", "_bwd_data", "_bwd_data", "_bwd_weights", "_bwd_weights"]
    ]
    assert parts.kept == ()


def test_gradients_by_data_alone_have_none_of_weights() -> None:
    parts = check(network("gru", 2, wanted="x"))
    *_, back = (piece.graph for piece in parts.pieces if kinds_of(piece.graph))
    assert kinds_of(back) == ["", "", "_bwd_data", "_bwd_data"]
    (one,) = replace_layers(back)
    assert isinstance(one, LayersBackward)
    assert (len(one.dh0), one.dw_ih) == (2, ())


def test_layers_without_gradients_keep_nothing() -> None:
    parts = check(network("lstm", 2, wanted=""))
    (piece,) = (piece.graph for piece in parts.pieces if kinds_of(piece.graph))
    weights, one = replace_layers(piece)
    assert isinstance(weights, LayerWeights)
    assert isinstance(one, Layers)
    assert one.reserve is None
    assert one.space == weights.space
    assert parts.kept == ()


@pytest.mark.parametrize(
    "what", ["a result between layers", "dropout", "other lengths", "one of two gradients"]
)
def test_layers_with_something_between_are_pieces_of_their_own(what: str) -> None:
    if what == "dropout":
        kinds = [kinds_of(piece.graph) for piece in check(network("gru", 2, dropout=0.5)).pieces]
        one = [[""], ["", "_bwd_data", "_bwd_weights"]]
        assert sorted(each for each in kinds if each) == sorted(one * 2)
        return
    g = GraphBuilder()
    x = g.input("x", (5, 3, 6), F64)
    weights = [[g.input(f"{name}{n}", (6, 6), F64) for name in "ih"] for n in range(2)]
    lower = g.rnn(x, weights[:1]).y
    upper = g.rnn(lower, weights[1:], lengths=(5, 3, 1) if what == "other lengths" else None).y
    results = {"y": upper, "lower": lower} if what == "a result between layers" else {"y": upper}
    if what == "one of two gradients":
        slope = g.input("slope", upper.dims, F64)
        results["d"] = g.grad([upper], weights[1][:1], [slope])[0]
    kinds = [each for piece in check(g.build(results)).pieces if (each := kinds_of(piece.graph))]
    assert [len(each) for each in kinds if "_bwd_data" not in each] == [1, 1]


def test_a_reserve_that_two_gradients_read_is_computed_again_by_both() -> None:
    g = GraphBuilder()
    x, slope = g.input("x", (5, 3, 6), F64), g.input("slope", (5, 3, 6), F64)
    y = g.rnn(x, [[g.input(name, (6, 6), F64) for name in "ih"]]).y
    one, other = g.grad([y], [x], [slope])[0], g.grad([y], [x], [slope * 2.0])[0]
    parts = check(g.build(y=y, one=one, other=other))
    kinds = [each for piece in parts.pieces if (each := kinds_of(piece.graph))]
    assert kinds == [[""], ["", "_bwd_data"], ["", "_bwd_data"]]
    assert parts.kept == ()
    for piece in parts.pieces:
        if kinds_of(piece.graph) == [""]:
            assert not any(name == "reserve" for name, _ in piece.graph.operations[0].named())


def test_graphs_without_layers_are_not_looked_at() -> None:
    g = GraphBuilder()
    assert together(g.build(y=g.input("x", (3,)) * 2.0).body) is None


@pytest.mark.parametrize("state", [6, 2])
@pytest.mark.parametrize("mode", RecurrentMode)
def test_spans_cover_all_weights_once(mode: RecurrentMode, state: int) -> None:
    """With places as a library might have them: all matrices, and then all biases."""
    if state < 6 and mode is not RecurrentMode.LSTM:
        return
    sizes = SimpleNamespace(features=4, directions=2, hidden=6, state=state)
    count = 2 * mode.gates + (state < 6)
    spans: list[Span] = []
    places = {"matrix": 0, "bias": 10_000}
    for way in range(2):
        for number in range(count):
            found = list(spans_of(mode, sizes, way, number, (places["matrix"], places["bias"])))
            places["matrix"] += 4 * found[0].nbytes
            places["bias"] += 4 * sizes.hidden
            spans += [Span(each.name, 4 * each.start, each.place, 4 * each.nbytes) for each in found]
    rows = mode.gates * 6
    dims = {"w_ih": (2, rows, 4), "w_hh": (2, rows, state), "bias": (2, 2, rows), "w_hr": (2, state, 6)}
    whole = join_spans(spans)
    for name, each in dims.items():
        taken = np.zeros(4 * int(np.prod(each)), int)
        for span in whole:
            if span.name == name:
                taken[span.start : span.start + span.nbytes] += 1
        assert (taken == (1 if name != "w_hr" or state < 6 else 0)).all(), name
    space = np.zeros(20_000, int)
    for span in whole:
        space[span.place : span.place + span.nbytes] += 1
    assert space.max() == 1
    # Neighbours are copied together: all gates of a direction. A projection has room for a bias behind it.
    assert len(whole) <= 8


CALLS = {
    "cudnnRNNForward": "handle rnn mode lengths x_of x y_of y h_of hx hy c_of cx cy weight_bytes weights "
    "work_bytes work reserve_bytes reserve",
    "cudnnRNNBackwardData_v8": "handle rnn lengths y_of y dy x_of dx h_of hx dhy dhx c_of cx dcy dcx "
    "weight_bytes weights work_bytes work reserve_bytes reserve",
    "cudnnRNNBackwardWeights_v8": "handle rnn add lengths x_of x h_of hx y_of y weight_bytes weights "
    "work_bytes work reserve_bytes reserve",
}
"""The parameters of functions, as they stand in cuDNN's header."""


class Recorded:
    """Functions of libcudnn that note what they are called with."""

    WEIGHTS, WORK, RESERVE = 1 << 18, 1 << 12, 1 << 9

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.copies: list[tuple[int, int, int]] = []
        self.cleared: list[tuple[int, int, int]] = []
        self.on_their_way: list[Any] = []
        """Arrays whose copy to the device nobody has waited for."""
        self.next = itertools.count(100)
        for name, arguments in PROTOTYPES.items():
            setattr(self, name, self.function(name, arguments))

    def cudnnGetVersion(self) -> int:  # noqa: N802 - the library's
        return 91900

    def function(self, name: str, arguments: tuple[Any, ...]) -> Any:
        def called(*given: Any) -> int:
            if name.startswith("cudnnCreate"):
                given[0][0] = next(self.next)
            elif name == "cudnnGetRNNWeightSpaceSize":
                given[2][0] = self.WEIGHTS
            elif name == "cudnnGetRNNTempSpaceSizes":
                given[4][0], given[5][0] = self.WORK, self.RESERVE if given[2] else 0
            elif name == "cudnnGetRNNWeightParams":
                place = given[4] + 2048 * (16 * given[2] + given[5])
                given[7][0], given[9][0] = place, place + 1024
            elif name in CALLS:
                names = CALLS[name].split()
                arrived = {"arrived": not self.on_their_way}
                self.calls.append((name, dict(zip(names, given, strict=True)) | arrived))
            return 0

        return ctypes.CFUNCTYPE(ctypes.c_int, *arguments)(called)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """Stands for libcudnn and CuPy."""
    found = Recorded()
    runtime = SimpleNamespace(
        memcpyAsync=lambda into, of, nbytes, *_: found.copies.append((into, of, nbytes)),
        memsetAsync=lambda at, value, nbytes, *_: found.cleared.append((at, value, nbytes)),
    )

    def asarray(values: np.ndarray) -> Any:
        found.on_their_way.append(values)
        return SimpleNamespace(data=SimpleNamespace(ptr=77))

    stream = SimpleNamespace(ptr=5, synchronize=found.on_their_way.clear)
    cupy = SimpleNamespace(asarray=asarray, cuda=SimpleNamespace(get_current_stream=lambda: stream))
    for module in (libcudnn, recurrent):
        monkeypatch.setattr(module, "libcudnn", lambda: found)
    for module in (kernel, recurrent):
        monkeypatch.setattr(module, "libraries", lambda: SimpleNamespace(runtime=runtime, cupy=cupy))
    return found


def launched(
    library: Recorded,
    operation: Any,
    lengths: Any = (5, 2, 4),
    base: Any = None,
    again: bool | None = None,
    **dims: Any,
) -> Any:
    """Launch layers on tensors of these dims, those of each layer in a list.

    Returns the addresses of the tensors, and the workspace's, by name. `base`: an address by its name.
    """
    tensors: list[GraphTensor] = []
    operands: dict[str, Any] = {}
    for name in (*operation.inputs, *operation.outputs):
        if name in dims:
            several = isinstance(dims[name], list)
            numbers = [len(tensors) + n for n in range(len(dims[name]) if several else 1)]
            tensors += [
                tensor_of(n, TensorSpec.packed(each))
                for n, each in zip(numbers, dims[name] if several else [dims[name]], strict=True)
            ]
            operands[name] = tuple(numbers) if several else numbers[0]
    more: dict[str, Any] = {} if again is None else {"again": again}
    if operation is not LayerWeights:
        more["lengths"] = lengths
    node = operation(**operands, mode=RecurrentMode.LSTM, **more)
    handle = SimpleNamespace(backend_handle=9)
    places = {name: (base or {}).get(name, (n + 1) << 20) for n, (name, _) in enumerate(node.named())}
    launcher = IMPLEMENTATIONS[operation].launchers["library"]
    assert launcher.asked is not None
    asked = launcher.asked(node, tensors, handle)
    if operation is LayerWeights:
        assert asked == (0, {"space": library.WEIGHTS})
    else:
        assert asked.workspace >= library.WORK + (0 if operation is Layers else library.WEIGHTS)
        assert asked.held == ({"reserve": library.RESERVE + library.WEIGHTS} if "reserve" in dims else {})
    launcher.make(node, tensors, handle)([*places.values(), WORKSPACE], ())
    return places


WORKSPACE = 1 << 40
LAYER: dict[str, Any] = {
    "x": (5, 3, 4),
    "w_ih": [(2, 24, 4)],
    "w_hh": [(2, 24, 6)],
    "bias": [(2, 2, 24)],
    "h0": [(2, 3, 6)],
    "c0": [(2, 3, 6)],
}
TWO: dict[str, Any] = {
    **{"x": (5, 3, 4), "w_ih": [(2, 24, 4), (2, 24, 12)], "w_hh": [(2, 24, 6)] * 2, "bias": [(2, 2, 24)] * 2},
    **{"h0": [(2, 3, 6)] * 2, "c0": [(2, 3, 6)] * 2},
}
GRADIENTS: dict[str, Any] = {
    **{"dy": (5, 3, 12), "dh_n": [(2, 3, 6)], "reserve": (0,), "dx": (5, 3, 4), "dh0": [(2, 3, 6)]},
    **{"dc0": [(2, 3, 6)], "dw_ih": [(2, 24, 4)], "dw_hh": [(2, 24, 6)], "dbias": [(2, 2, 24)]},
}


def test_a_layer_is_passed_as_the_header_says(library: Recorded) -> None:
    at = launched(library, Layers, **LAYER, space=(0,), y=(5, 3, 12), h_n=[(2, 3, 6)], c_n=[(2, 3, 6)])
    ((name, given),) = library.calls
    assert name == "cudnnRNNForward"
    wanted = {"x": "x", "y": "y", "hx": "h0[0]", "hy": "h_n[0]", "cx": "c0[0]", "cy": "c_n[0]"}
    assert {key: given[key] for key in wanted} == {key: at[of] for key, of in wanted.items()}
    assert (given["handle"], given["mode"], given["lengths"]) == (9, 0, 77)
    assert (given["weight_bytes"], given["work_bytes"], given["reserve_bytes"]) == (1 << 18, 1 << 12, 0)
    assert given["weights"] == at["space"]
    assert library.copies == [], "the weights are there"


def test_the_weights_of_layers_are_copied_where_the_library_has_them(library: Recorded) -> None:
    at = launched(
        library, LayerWeights, **{name: LAYER[name] for name in ("w_ih", "w_hh", "bias")}, space=(0,)
    )
    assert library.calls == []
    copied = sum(nbytes for _, _, nbytes in library.copies)
    assert copied == 4 * (2 * 24 * (4 + 6 + 2)), "all weights, and both biases"
    space = at["space"]
    assert all(space <= into < space + library.WEIGHTS for into, _, _ in library.copies)
    assert library.cleared == []


def test_biases_that_are_left_out_are_0(library: Recorded) -> None:
    at = launched(library, LayerWeights, w_ih=[(2, 24, 4)], w_hh=[(2, 24, 6)], space=(0,))
    assert library.cleared == [(at["space"], 0, library.WEIGHTS)]
    assert sum(nbytes for _, _, nbytes in library.copies) == 4 * (2 * 24 * (4 + 6))


def test_layers_with_gradients_behind_them_keep_their_reserve(library: Recorded) -> None:
    at = launched(library, Layers, **LAYER, y=(5, 3, 12), reserve=(0,))
    ((_, given),) = library.calls
    assert (given["mode"], given["reserve_bytes"], given["reserve"]) == (1, 1 << 9, at["reserve"])
    assert given["weights"] == at["reserve"] + (1 << 9), "the gradients have them, too"


def test_states_of_layers_are_copied_only_where_they_lie_apart(library: Recorded) -> None:
    state = 4 * 2 * 3 * 6
    near = {"h0[0]": 5 << 30, "h0[1]": (5 << 30) + state, "h_n[0]": 6 << 30, "h_n[1]": (6 << 30) + 2 * state}
    at = launched(
        library, Layers, base=near, lengths=None, **TWO, space=(0,), y=(5, 3, 12), h_n=[(2, 3, 6)] * 2
    )
    ((_, given),) = library.calls
    assert given["hx"] == at["h0[0]"], "one behind the other"
    for name in ("hy", "cx"):
        assert given[name] >= WORKSPACE + library.WORK
    assert given["cy"] is None
    assert sum(nbytes for _, _, nbytes in library.copies) == 2 * state + 2 * state
    cells = [(into, of) for into, of, _ in library.copies if of in (at["c0[0]"], at["c0[1]"])]
    assert cells == [(given["cx"], at["c0[0]"]), (given["cx"] + state, at["c0[1]"])]
    ends = [(into, of) for into, of, _ in library.copies if into in (at["h_n[0]"], at["h_n[1]"])]
    assert ends == [(at["h_n[0]"], given["hy"]), (at["h_n[1]"], given["hy"] + state)]


def test_lengths_are_on_the_device_before_a_layer_runs(library: Recorded) -> None:
    """They are copied on another stream than the one that the layer runs on."""
    launched(library, Layers, **LAYER, space=(0,), y=(5, 3, 12))
    launched(library, LayersBackward, **LAYER, **GRADIENTS)
    assert [given["arrived"] for _, given in library.calls] == [True] * 4


@pytest.mark.parametrize("lengths", [None, (5, 2, 4)])
def test_sizes_beyond_32_bits_are_refused(library: Recorded, lengths: Any) -> None:
    """As arguments of C functions they would lose their upper bits without a word."""
    steps = (1 << 32) + 5
    with pytest.raises(EngineFailure, match="32 bits"):
        launched(
            library, Layers, lengths=lengths, **LAYER | {"x": (steps, 3, 4)}, space=(0,), y=(steps, 3, 12)
        )


def test_gradients_are_passed_as_the_header_says(library: Recorded) -> None:
    at = launched(library, LayersBackward, **LAYER, **GRADIENTS)
    (_, forward), (by_data, given), (by_weights, last) = library.calls
    assert forward["mode"] == 1
    assert forward["reserve"] == given["reserve"] == last["reserve"] == at["reserve"]
    assert forward["y"] == given["y"] == last["y"] >= WORKSPACE, "computed again"
    assert (by_data, by_weights) == ("cudnnRNNBackwardData_v8", "cudnnRNNBackwardWeights_v8")
    wanted = {"dy": "dy", "dx": "dx", "hx": "h0[0]", "dhy": "dh_n[0]", "dhx": "dh0[0]", "dcx": "dc0[0]"}
    assert {key: given[key] for key in wanted} == {key: at[of] for key, of in wanted.items()}
    assert given["dcy"] is None
    assert (last["x"], last["hx"]) == (at["x"], at["h0[0]"])
    of_weights = 4 * (2 * 24 * (4 + 6 + 2))
    assert sum(nbytes for _, _, nbytes in library.copies) == 2 * of_weights
    assert forward["weights"] == given["weights"] == at["reserve"] + (1 << 9)
    assert last["weights"] >= WORKSPACE
    assert all(WORKSPACE <= of < WORKSPACE + library.WEIGHTS for _, of, _ in library.copies[-4:])


def test_gradients_by_data_alone_leave_the_weights_out(library: Recorded) -> None:
    launched(library, LayersBackward, **LAYER, **{name: GRADIENTS[name] for name in ("reserve", "dx")})
    assert [name for name, _ in library.calls] == ["cudnnRNNForward", "cudnnRNNBackwardData_v8"]
    assert library.calls[1][1]["dy"] >= WORKSPACE, "there is none: it is 0"


def test_gradients_that_are_handed_a_reserve_compute_no_layer(library: Recorded) -> None:
    at = launched(library, LayersBackward, again=False, **LAYER, **GRADIENTS, y=(5, 3, 12))
    (by_data, given), (by_weights, last) = library.calls
    assert (by_data, by_weights) == ("cudnnRNNBackwardData_v8", "cudnnRNNBackwardWeights_v8")
    assert given["y"] == last["y"] == at["y"]
    assert given["weights"] == at["reserve"] + (1 << 9)
    assert sum(nbytes for _, _, nbytes in library.copies) == 4 * (2 * 24 * (4 + 6 + 2)), "the gradients"


def reserved(operation: Any, bound: str, **dims: Any) -> Graph:
    """A graph of one operation, whose tensor of this name is bound."""
    g = GraphBuilder()
    operands = {name: g.input(name, each, F64) for name, each in dims.items()}
    made = g.apply(operation(**operands, mode=RecurrentMode.RELU), also=() if bound in dims else (bound,))
    return g.build(found=made if isinstance(made, Tensor) else made[-1])


def test_what_is_kept_outside_of_a_plan_is_refused() -> None:
    layer = {"x": (5, 3, 4), "w_ih": (1, 6, 4), "w_hh": (1, 6, 6)}
    kept = (1, 5, 3, 1, 6)
    with pytest.raises(Refused, match="reserve"):
        replace_layers(reserved(Recurrent, "reserve", **layer).body)
    with pytest.raises(Refused, match="reserve"):
        replace_layers(reserved(RecurrentBackwardData, "reserve", **layer, y=(5, 3, 6), reserve=kept).body)
    with pytest.raises(Refused, match="slopes"):
        replace_layers(reserved(RecurrentBackwardData, "slopes", **layer, y=(5, 3, 6)).body)
    given = {"x": (5, 3, 4), "y": (5, 3, 6), "slopes": kept}
    with pytest.raises(Refused, match="slopes"):
        replace_layers(reserved(RecurrentBackwardWeights, "slopes", **given).body)


def composed(library: Recorded, graph: Graph, limit: int | None = None) -> list[Any]:
    """The steps that libcudnn runs of a graph's plan, and the plan."""
    handle = SimpleNamespace(backend_handle=9)
    parts = cut(graph.body)
    assert parts is not None

    def build(piece: OperationGraph) -> Any:
        return compile_split(piece, handle, None)

    plan = compose(graph.body, parts, build, limit)
    steps = [step for step in plan.recipe.steps if isinstance(step, OperationStep)]
    return [*(step for step in steps if step.launcher == "library"), plan]


@pytest.mark.parametrize("first", [False, True])
def test_layers_hand_their_reserve_to_their_gradients(library: Recorded, *, first: bool) -> None:
    """Also where their results lie in another order than the library writes them in."""
    library.RESERVE = 1 << 20
    size = library.RESERVE + library.WEIGHTS
    g = GraphBuilder()
    x = g.input("x", (3, 5, 6) if first else (5, 3, 6), F64)
    weights = [[g.input(f"{name}{n}", (6, 6), F64) for name in "ih"] for n in range(2)]
    y = g.rnn(x, weights, batch_first=first).y
    slope = g.input("slope", y.dims, F64)
    gradients = g.grad([y * y], [x, *weights[0], *weights[1]], [slope])
    graph = g.build({"y": y, **{f"d{n}": each for n, each in enumerate(gradients)}})
    layers, back, plan = composed(library, graph)

    def at(step: Any, name: str) -> Any:
        return step.sources[[each for each, _ in step.operation.named()].index(name)]

    assert (layers.operation.kind, back.operation.kind) == ("recurrent", "recurrent_bwd")
    assert back.operation.again is False
    assert at(back, "reserve") == at(layers, "reserve")
    assert at(back, "y") == at(layers, "y")
    assert back.tensors[[name for name, _ in back.operation.named()].index("reserve")].dims == (size,)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(plan.recipe), type=Recipe) == plan.recipe
    # Nothing that runs between the two has the place of the reserve.
    start = at(layers, "reserve").offset
    others = (each for step in plan.recipe.steps if step not in (layers, back) for each in step.sources)
    assert not [
        each for each in others if isinstance(each, Scratch) and start <= each.offset < start + (1 << 20)
    ]


def test_a_reserve_that_does_not_fit_is_computed_again(library: Recorded) -> None:
    library.RESERVE = 1 << 20
    graph = network("gru", 2)
    *_, wide = composed(library, graph)
    _, back, plan = composed(library, graph, wide.workspace - 1)
    assert back.operation.again is True
    assert plan.workspace < wide.workspace


def test_a_result_that_is_not_handed_on_is_kept_no_longer_than_it_is_read(library: Recorded) -> None:
    library.RESERVE = 1 << 20
    g = GraphBuilder()
    x, h = g.input("x", (64, 3, 6), F64), g.input("h", (6, 6), F64)
    y = total = g.rnn(x, [[h, h]]).y
    for activation in ("relu", "tanh", "relu"):  # no two of these are computed together
        total = g.rnn(total, [[h, h]], activation=activation).y
    graph = g.build(d=g.grad([y], [x], [total])[0])
    parts = cut(graph.body)
    assert parts is not None
    assert len(parts.kept) == 1
    *_, back, plan = composed(library, graph, 0)
    assert back.operation.again is True
    needed = max(each.offset + each.nbytes for each in plan.recipe.between)
    assert needed == scratch_bytes(parts) == 2 * 64 * 3 * 6 * 8


def test_states_of_sequences_without_steps_stay(library: Recorded) -> None:
    """libcudnn writes 0 for them."""
    at = launched(library, Layers, lengths=(5, 0, 0), **LAYER, space=(0,), y=(5, 3, 12), h_n=[(2, 3, 6)])
    kept = [(into - at["h_n[0]"], of - at["h0[0]"], size) for into, of, size in library.copies[-2:]]
    line = 4 * 6
    assert kept == [(line, line, 2 * line), (4 * line, 4 * line, 2 * line)]


def test_an_explanation_names_each_operation_once_and_its_pieces_are_found(library: Recorded) -> None:
    """The gradients have the layers in their piece, too, and do not run them."""
    body = network("gru", 2).body
    *_, plan = composed(library, network("gru", 2))
    pieces = plan.explain(body).pieces
    numbers = [number for piece in pieces for number in piece.operations]
    assert len(numbers) == len(set(numbers))
    found = [[pieces[place] for place in places] for _, places in singles(body, pieces)]
    assert found == [[piece] for piece in pieces]


def test_a_gradient_without_its_layer_is_named_once(library: Recorded) -> None:
    """Though its piece has two operations for it."""
    layer = {"x": (5, 3, 4), "w_ih": (1, 6, 4), "w_hh": (1, 6, 6)}
    graph = reserved(RecurrentBackwardData, "y", **layer, y=(5, 3, 6), dy=(5, 3, 6))
    *_, plan = composed(library, graph)
    assert [piece.operations for piece in plan.explain(graph.body).pieces] == [(0,)]
