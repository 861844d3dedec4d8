"""Operation graphs as text: there and back, and whatever else is no graph."""

from __future__ import annotations

import base64
import re
import zlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudnn_actor.protocol import (
    BufferRef,
    ConvBwdFilter,
    ConvFwd,
    ConvSpec,
    Epilogue,
    InvalidRequest,
    OperationGraph,
    TensorSpec,
)
from cudnn_actor.protocol.graphs.reproduction import graph_of, token
from cudnn_actor.protocol.messages.lowering import lower
from cudnn_actor.protocol.types.epilogue import Activation

from ..in_one_test import cases_in_one_test


def buffer(*dims: int) -> BufferRef:
    return BufferRef(slot=0, generation=0, spec=TensorSpec.packed(dims, "float16", "NHWC"), device="cuda:0")


X, W, Y, BIAS = buffer(2, 8, 9, 9), buffer(4, 4, 3, 3), buffer(2, 4, 9, 9), buffer(1, 4, 1, 1)
CONV = ConvSpec.symmetric(2, pad=1, groups=2)
GRAPHS = [
    lower(ConvFwd(x=X, w=W, y=Y, conv=CONV)).graph,
    lower(ConvBwdFilter(x=X, dy=Y, dw=W, conv=CONV, beta=1.0)).graph,
    lower(
        ConvFwd(
            x=X,
            w=W,
            y=Y,
            bias=BIAS,
            conv=CONV,
            alpha=0.5,
            beta=2.0,
            epilogue=Epilogue(activation=Activation.SWISH, parameter=0.1),
        )
    ).graph,
]


def packed(data: bytes) -> str:
    return base64.urlsafe_b64encode(zlib.compress(data)).decode()


@pytest.mark.parametrize("graph", GRAPHS)
def test_a_graph_comes_back_whole(graph: OperationGraph) -> None:
    assert graph_of(token(graph)) == graph
    assert graph_of(f"  {token(graph)}\n").digest() == graph.digest()


@pytest.mark.parametrize("graph", GRAPHS)
def test_a_token_is_one_word_to_a_shell_and_fits_a_line_of_a_terminal_s_paste(graph: OperationGraph) -> None:
    assert re.fullmatch(r"e[\w-]+", token(graph))
    assert len(token(graph)) < 1000


@cases_in_one_test
@pytest.mark.parametrize(
    "text",
    [
        "",
        "e",
        "eNp",
        "conv_fwd",
        "é" * 40,
        token(GRAPHS[0])[:-5],
        token(GRAPHS[0]) + "AAAA",
        packed(b""),
        packed(b"\xc1"),
        packed(msgspec.msgpack.encode({"tensors": [], "operations": []})),
        packed(msgspec.msgpack.encode(GRAPHS[0])[:-1]),
        packed(b"\x91" * 30_000),
    ],
)
def test_any_other_text_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="is not an operation graph"):
        graph_of(text)


def test_what_unpacks_to_too_much_is_refused_before_it_does() -> None:
    bomb = packed(bytes(100_000_000))
    with pytest.raises(InvalidRequest, match="unpacks to more than 4,194,304 bytes"):
        graph_of(bomb)


def test_a_tensor_that_could_not_be_is_refused() -> None:
    bad = msgspec.structs.replace(GRAPHS[0].tensors[0], dims=(0, -1, 1 << 62, 1))
    graph = msgspec.structs.replace(GRAPHS[0], tensors=(bad, *GRAPHS[0].tensors[1:]))
    with pytest.raises(InvalidRequest, match="dims"):
        graph_of(token(graph))


@given(place=st.integers(0, 10_000), value=st.integers(0, 255))
def test_a_damaged_token_is_refused_or_another_graph_and_never_another_error(place: int, value: int) -> None:
    data = bytearray(msgspec.msgpack.encode(GRAPHS[2]))
    data[place % len(data)] = value
    try:
        graph_of(packed(bytes(data)))
    except InvalidRequest:
        return
