"""Kernels that are compiled before a graph is built are those that its first plans and their checks need."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any
from unittest.mock import MagicMock

import pytest

from cudnn_actor.engines.cuda.kernels import kernel
from cudnn_actor.engines.cuda.kernels.kernel import Ahead, Launch
from cudnn_actor.engines.cuda.library import libraries
from cudnn_actor.engines.cuda.planning import ahead
from cudnn_actor.engines.cuda.planning.ahead import compiling_ahead, launches_ahead
from cudnn_actor.engines.cuda.planning.compiler import WORKSPACE_BYTES
from cudnn_actor.engines.cuda.planning.partition import cut
from cudnn_actor.protocol import Graph, GraphBuilder, OperationGraph

from ....patience import PATIENCE_S


def pieces(graph: Graph) -> list[OperationGraph]:
    parts = cut(graph.body)
    return [graph.body] if parts is None else [piece.graph for piece in parts.pieces]


def named(graph: Graph) -> list[str]:
    return [each.name for piece in pieces(graph) for each in launches_ahead(piece, WORKSPACE_BYTES)]


def test_a_depthwise_convolution_has_its_kernel_and_that_of_its_reference() -> None:
    g = GraphBuilder()
    x = g.input("x", (2, 32, 14, 14), "bfloat16", layout="NHWC")
    w = g.input("w", (32, 1, 3, 3), "bfloat16", layout="NHWC")
    assert named(g.build(y=g.relu(g.conv(x, w, pad=1, groups=32)))) == ["depthwise", "reference"]


def test_a_convolution_of_cudnns_has_that_of_its_reference() -> None:
    g = GraphBuilder()
    x = g.input("x", (2, 32, 14, 14), "bfloat16", layout="NHWC")
    w = g.input("w", (32, 32, 3, 3), "bfloat16", layout="NHWC")
    assert named(g.build(y=g.relu(g.conv(x, w, pad=1)))) == ["reference"]


def test_a_reduction_alone_has_its_kernel_unless_cudnn_sums() -> None:
    g = GraphBuilder()
    x = g.input("x", (8, 64, 7, 7), "bfloat16", layout="NHWC")
    assert named(g.build(y=x.mean((2, 3))))[0] == "reduce"
    g = GraphBuilder()
    assert named(g.build(y=g.input("x", (64, 7), "float32").sum(1))) == []


@pytest.mark.parametrize("large", [False, True])
def test_functions_have_theirs_and_what_reads_large_tensors_for_the_check(large: bool) -> None:
    g = GraphBuilder()
    x = g.input("x", (4096 if large else 4, 4096), "bfloat16")
    found = named(g.build(y=g.sigmoid(x) * 3.0))
    assert found == ["elementwise"] * (3 if large else 1)


class Compiled(Executor):
    """Has compiled at once whatever it is given."""

    def submit(self, *_: Any, **__: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(None)
        return done


class Source(str):
    """A source at whose look-up in a dict something else happens."""

    __slots__ = ("meanwhile",)
    meanwhile: Callable[[], None]

    def __hash__(self) -> int:
        if hasattr(self, "meanwhile"):
            self.meanwhile()
        return super().__hash__()


def test_a_single_kernel_is_compiled_while_the_first_pieces_are_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its thread waits for a step of the build."""
    began, ended = threading.Event(), threading.Event()

    def compile_it(**_: Any) -> MagicMock:
        assert began.wait(PATIENCE_S)
        ended.set()
        return MagicMock()

    cupy = MagicMock()
    cupy.RawModule.side_effect = compile_it
    monkeypatch.setattr(ahead, "AHEAD", Ahead())
    monkeypatch.setitem(vars(libraries.libraries()), "cupy", cupy)
    g = GraphBuilder()
    graph = g.build(y=g.input("x", (8, 64, 7, 7), "bfloat16", layout="NHWC").mean((2, 3))).body
    with compiling_ahead([graph], WORKSPACE_BYTES):
        assert not ended.is_set()
        began.set()
        assert ended.wait(PATIENCE_S)


def test_builders_on_two_threads_drop_the_same_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    """One does it between two steps of the other."""
    monkeypatch.setattr(kernel, "_MOST_SOURCES", 2)
    known, pool = Ahead(), Compiled()

    def launches(*sources: str) -> list[Launch]:
        return [Launch("f", source, (1,), (32,), ()) for source in sources]

    def drop_them_all() -> None:
        del first.meanwhile
        other = threading.Thread(target=known.compile_on, args=(pool, launches("d", "e")))
        other.start()
        other.join()

    first = Source("a")
    known.compile_on(pool, launches(first, "b"))
    first.meanwhile = drop_them_all
    known.compile_on(pool, launches("c"))
    assert len(known.missing(launches("a", "b", "c", "d", "e"))) == 3
    known.wait_for(*launches("e"))
