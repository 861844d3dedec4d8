"""What CUDA makes of recurrent layers: pieces without reserves, and where their weights lie."""

from __future__ import annotations

import ctypes
import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cudnn_actor.engines.base import EngineFailure
from cudnn_actor.engines.cuda.cudnn.frontend_graph import Refused
from cudnn_actor.engines.cuda.kernels import kernel
from cudnn_actor.engines.cuda.library import libcudnn
from cudnn_actor.engines.cuda.library.libcudnn import PROTOTYPES
from cudnn_actor.engines.cuda.operations import IMPLEMENTATIONS, recurrent
from cudnn_actor.engines.cuda.operations.recurrent import Span, joined, spans_of
from cudnn_actor.engines.cuda.planning.partition import cut
from cudnn_actor.engines.cuda.planning.recomputed_layers import recomputed
from cudnn_actor.engines.cuda.planning.splitting import compile_split
from cudnn_actor.protocol import DType, Graph, GraphBuilder, TensorSpec
from cudnn_actor.protocol.operations import (
    Recurrent,
    RecurrentBackwardData,
    RecurrentBackwardWeights,
    RecurrentMode,
    TensorRole,
)
from cudnn_actor.protocol.operations.base import tensor_of

from .test_partition import check

F64 = DType.FLOAT64


def trained(mode: str, *, weights: bool = True) -> Graph:
    """A layer in both directions, what is computed of its states, and the gradients."""
    g = GraphBuilder()
    rows = RecurrentMode(mode).gates * 6
    x = g.input("x", (5, 3, 4), F64)
    dims = ((rows, 4), (rows, 6), (rows,), (rows,))
    own = [[g.input(f"w{way}{n}", each, F64) for n, each in enumerate(dims)] for way in range(2)]
    function: Any = {"lstm": g.lstm, "gru": g.gru}.get(mode, g.rnn)
    y = function(x, own, bidirectional=True, lengths=(5, 2, 4)).y
    loss = g.sum(g.square(y * 0.5))
    of = [x, *(each for direction in own for each in direction)] if weights else [x]
    return g.build({"loss": loss, **{f"d{n}": each for n, each in enumerate(g.grad(loss, of))}})


@pytest.mark.parametrize("mode", ["lstm", "gru", "tanh"])
def test_gradients_read_no_reserve_and_are_one_piece(mode: str) -> None:
    graph = trained(mode)
    parts = check(graph)
    layers = [
        [each.kind for each in piece.graph.operations if each.kind.startswith("recurrent")]
        for piece in parts.pieces
    ]
    assert [each for each in layers if each] == [
        ["recurrent"],
        ["recurrent_bwd_data", "recurrent_bwd_weights"],
    ]
    for piece in parts.pieces:
        assert cut(piece.graph) is None, "a piece is not cut again"
        for operation in piece.graph.operations:
            assert getattr(operation, "reserve", None) is None


def test_gradients_by_data_alone_have_no_slopes_outside() -> None:
    parts = check(trained("gru", weights=False))
    kinds = [each.kind for piece in parts.pieces for each in piece.graph.operations]
    assert "recurrent_bwd_weights" not in kinds


def test_a_graph_without_reserves_stays_as_it_is() -> None:
    g = GraphBuilder()
    x, w, r = g.input("x", (5, 3, 4)), g.input("w", (6, 4)), g.input("r", (6, 6))
    assert recomputed(g.build(y=g.rnn(x, [[w, r]]).y).body) is None


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
    whole = joined(spans)
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


_NAMES = {
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

    WEIGHTS, WORK, RESERVE = 1 << 16, 1 << 12, 1 << 9

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.copies: list[tuple[int, int, int]] = []
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
            elif name in _NAMES:
                names = _NAMES[name].split()
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
        memsetAsync=lambda *_: None,
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
    library: Recorded, operation: Any, virtual: Any = (), lengths: Any = (5, 2, 4), **dims: Any
) -> Any:
    """Launch an operation on tensors of these dims. Returns their addresses, and the workspace's, by name."""
    numbers = {name: number for number, name in enumerate(dims)}
    node = operation(**numbers, mode=RecurrentMode.LSTM, lengths=lengths)
    in_order = [name for name, _ in node.named()]
    tensors = [
        tensor_of(
            numbers[name],
            TensorSpec.packed(dims[name]),
            role=TensorRole.VIRTUAL if name in virtual else TensorRole.BOUND,
        )
        for name in in_order
    ]
    handle = SimpleNamespace(backend_handle=9)
    places = {name: 1 << 20 + number for number, name in enumerate(in_order)}
    launcher = IMPLEMENTATIONS[operation].launchers["library"]
    assert launcher.room is not None
    assert launcher.room(node, tensors, handle) >= library.WEIGHTS + library.WORK
    launcher.make(node, tensors, handle)([*places.values(), 1 << 40], ())
    return places


LAYER = {
    "x": (5, 3, 4),
    "w_ih": (2, 24, 4),
    "w_hh": (2, 24, 6),
    "bias": (2, 2, 24),
    "h0": (2, 3, 6),
    "c0": (2, 3, 6),
}


def test_a_layer_is_passed_as_the_header_says(library: Recorded) -> None:
    at = launched(library, Recurrent, **LAYER, y=(5, 3, 12), h_n=(2, 3, 6), c_n=(2, 3, 6))
    ((name, given),) = library.calls
    assert name == "cudnnRNNForward"
    assert {key: given[key] for key in ("x", "y", "hx", "hy", "cx", "cy")} == {
        **{"x": at["x"], "y": at["y"], "hx": at["h0"], "hy": at["h_n"], "cx": at["c0"], "cy": at["c_n"]}
    }
    assert (given["handle"], given["mode"], given["lengths"]) == (9, 0, 77)
    assert (given["weight_bytes"], given["work_bytes"], given["reserve_bytes"]) == (1 << 16, 1 << 12, 0)
    assert given["weights"] == 1 << 40
    copied = sum(nbytes for _, _, nbytes in library.copies)
    assert copied == 4 * (2 * 24 * (4 + 6 + 2)), "all weights, and both biases"
    assert all(1 << 40 <= into < (1 << 40) + library.WEIGHTS for into, _, _ in library.copies)


def test_lengths_are_on_the_device_before_a_layer_runs(library: Recorded) -> None:
    """They are copied on another stream than the one that the layer runs on."""
    launched(library, Recurrent, **LAYER, y=(5, 3, 12))
    launched(library, RecurrentBackwardData, **LAYER, y=(5, 3, 12), dy=(5, 3, 12), dx=(5, 3, 4))
    assert [given["arrived"] for _, given in library.calls] == [True] * 3


@pytest.mark.parametrize("lengths", [None, (5, 2, 4)])
def test_sizes_beyond_32_bits_are_refused(library: Recorded, lengths: Any) -> None:
    """As arguments of C functions they would lose their upper bits without a word."""
    steps = (1 << 32) + 5
    with pytest.raises(EngineFailure, match="32 bits"):
        launched(library, Recurrent, lengths=lengths, **LAYER | {"x": (steps, 3, 4)}, y=(steps, 3, 12))


def test_gradients_are_passed_as_the_header_says(library: Recorded) -> None:
    y, kept = (5, 3, 12), (2, 5, 3, 5, 6)
    more = {"y": y, "dy": y, "dx": (5, 3, 4), "dh0": (2, 3, 6), "dc0": (2, 3, 6), "dh_n": (2, 3, 6)}
    at = launched(library, RecurrentBackwardData, ("slopes",), **LAYER, **more, slopes=kept)
    (_, forward), (name, given) = library.calls
    assert forward["mode"] == 1
    assert forward["reserve"] == given["reserve"] == at["slopes"]
    assert forward["y"] == given["y"] != at["y"], "computed again"
    assert name == "cudnnRNNBackwardData_v8"
    wanted = {"dy": "dy", "dx": "dx", "hx": "h0", "dhy": "dh_n", "dhx": "dh0", "cx": "c0", "dcx": "dc0"}
    assert {key: given[key] for key in wanted} == {key: at[of] for key, of in wanted.items()}
    assert given["dcy"] is None
    library.calls.clear()
    library.copies.clear()
    weights = {"dw_ih": (2, 24, 4), "dw_hh": (2, 24, 6), "dbias": (2, 2, 24)}
    given_too = {"x": (5, 3, 4), "y": y, "slopes": kept, "h0": (2, 3, 6)}
    at = launched(library, RecurrentBackwardWeights, ("slopes",), **given_too, **weights)
    ((name, given),) = library.calls
    assert name == "cudnnRNNBackwardWeights_v8"
    wanted = {"x": "x", "y": "y", "hx": "h0", "reserve": "slopes"}
    assert {key: given[key] for key in wanted} == {key: at[of] for key, of in wanted.items()}
    assert sum(nbytes for _, _, nbytes in library.copies) == 4 * (2 * 24 * (4 + 6 + 2))
    assert all(1 << 40 <= of < (1 << 40) + library.WEIGHTS for _, of, _ in library.copies)


def test_what_is_kept_outside_of_a_plan_is_refused(library: Recorded) -> None:
    held, handle = IMPLEMENTATIONS[Recurrent].launchers["library"].held, SimpleNamespace(backend_handle=9)
    assert held is not None

    def asked(operation: Any, virtual: Any = (), **dims: Any) -> Any:
        node = operation(**{name: number for number, name in enumerate(dims)}, mode=RecurrentMode.LSTM)
        roles = {name: TensorRole.VIRTUAL if name in virtual else TensorRole.BOUND for name in dims}
        specs = {name: TensorSpec.packed(dims[name]) for name in dims}
        names = [name for name, _ in node.named()]
        return held(
            node, [tensor_of(n, specs[name], role=roles[name]) for n, name in enumerate(names)], handle
        )

    with pytest.raises(Refused, match="reserve"):
        asked(Recurrent, **LAYER, y=(5, 3, 12), reserve=(2, 5, 3, 5, 6))
    given = {
        "x": (5, 3, 4),
        "y": (5, 3, 12),
        "slopes": (2, 5, 3, 5, 6),
        "dw_ih": (2, 24, 4),
        "dw_hh": (2, 24, 6),
    }
    with pytest.raises(Refused, match="slopes"):
        asked(RecurrentBackwardWeights, **given)
    library.RESERVE = 1 << 20
    assert asked(RecurrentBackwardWeights, ("slopes",), **given) == {"slopes": 1 << 20}


def test_a_reserve_larger_than_slopes_has_room_in_their_place(library: Recorded) -> None:
    *_, piece = (
        piece
        for piece in check(trained("gru")).pieces
        if any(each.kind == "recurrent_bwd_data" for each in piece.graph.operations)
    )
    handle = SimpleNamespace(backend_handle=9)
    small = compile_split(piece.graph, handle, None).workspace
    library.RESERVE = 1 << 20
    assert compile_split(piece.graph, handle, None).workspace >= small + (1 << 20) - (1 << 13)


def test_states_of_sequences_without_steps_stay(library: Recorded) -> None:
    """libcudnn writes 0 for them."""
    node_lengths = (5, 0, 0)
    at = launched(library, Recurrent, lengths=node_lengths, **LAYER, y=(5, 3, 12), h_n=(2, 3, 6))
    kept = [(into - at["h_n"], of - at["h0"], size) for into, of, size in library.copies[-2:]]
    line = 4 * 6
    assert kept == [(line, line, 2 * line), (4 * line, 4 * line, 2 * line)]
