"""What is built soon does without kernels that cuDNN would have to compile, and without cuDNN where it can.

Something else stands for cuDNN's frontend: it notes of each candidate that its kernel is compiled.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import MagicMock

import msgspec
import pytest

from cudnn_actor.engines.cuda.checking.self_check import BuildContext
from cudnn_actor.engines.cuda.cudnn import compiled_attention
from cudnn_actor.engines.cuda.cudnn.compiled_attention import CompiledAttention
from cudnn_actor.engines.cuda.library import libraries
from cudnn_actor.engines.cuda.library.libcublaslt import ALGORITHM_BYTES
from cudnn_actor.engines.cuda.operations.cublaslt import LtProduct
from cudnn_actor.engines.cuda.planning import candidates, compiler
from cudnn_actor.engines.cuda.planning.ahead import launches_ahead
from cudnn_actor.engines.cuda.planning.compiler import WORKSPACE_BYTES, compile_plan
from cudnn_actor.protocol import OperationGraph

from ...hasty_graphs import NORMS, PRECOMPILED, SINGLE_PIXELS, attention, norm
from ...host_cuda import CUPY, Stream

WIDE, NARROW = "eng1_k24=7", "eng1_k24=3"
"""Candidates for attention. The second is preferred for few queries: see `ranking`."""


class Unsupported(Exception):
    """Raised when cuDNN does not support a graph."""


class Frontend(MagicMock):
    """The frontend with these candidates for each graph. `built` has the names of those that were built.

    `compiles`: whether cuDNN notes that it compiles their kernels.
    """

    def __init__(self, *names: str) -> None:
        super().__init__(cudnnGraphNotSupportedError=Unsupported)
        self.built: list[str] = []
        self.names = names
        self.compiles = True
        self.notes: Any = None
        self.engines.is_python_engine.return_value = False
        self.backend_version.return_value = 91900
        self.pygraph.side_effect = lambda **_: self._graph()

    def _get_child_mock(self, **options: Any) -> MagicMock:
        return MagicMock(**options)

    def _graph(self) -> MagicMock:
        graph = MagicMock()
        for call in (graph.layernorm, graph.rmsnorm, graph.sdpa):
            call.return_value = (MagicMock(), MagicMock(), MagicMock())
        graph.get_execution_plan_count.return_value = len(self.names)
        graph.get_plan_name_at_index.side_effect = self.names.__getitem__
        notes = [self.behavior_note.RUNTIME_COMPILATION] * self.compiles
        if self.notes is None:
            graph.get_behavior_notes_for_plan_at_index.return_value = notes
        else:
            graph.get_behavior_notes_for_plan_at_index.side_effect = lambda _: self.notes()
        graph.get_workspace_size.return_value = 0

        def build(index: int) -> None:
            self.built.append(self.names[index])
            graph._plan_index = index

        graph.build_plan_at_index.side_effect = build
        return graph


@pytest.fixture
def frontend(monkeypatch: pytest.MonkeyPatch) -> Frontend:
    found = Frontend(WIDE, NARROW)
    for name, module in (("cupy", CUPY), ("runtime", CUPY.cuda.runtime), ("cudnn", found)):
        monkeypatch.setitem(vars(libraries.libraries()), name, module)
    known = CompiledAttention()
    for module in (candidates, compiler):
        monkeypatch.setattr(module, "COMPILED_ATTENTION", known)
    return found


class Names(tuple[str, ...]):
    """Names of candidates that note which are asked for."""

    asked: set[int]

    def __getitem__(self, index: Any) -> Any:
        self.asked.add(index)
        return super().__getitem__(index)


def test_only_the_name_of_the_candidate_that_is_built_is_asked_for(frontend: Frontend) -> None:
    frontend.names = names = Names(f"eng{number}" for number in range(60, 99))
    names.asked = set()
    frontend.compiles = False
    for precompiled in (True, False):
        next(compiler.possible_plans(PRECOMPILED["relu"], None, None, precompiled=precompiled))
        assert names.asked == {0}


def test_candidates_are_asked_for_notes_until_one_has_a_kernel(frontend: Frontend) -> None:
    frontend.names = tuple(f"eng{number}" for number in range(40))
    notes = iter([frontend.behavior_note.RUNTIME_COMPILATION] * 3)
    frontend.notes = lambda: [*itertools.islice(notes, 1)]
    assert soon(PRECOMPILED["relu"]) == ("eng3", True)


@pytest.mark.parametrize("kind", NORMS)
def test_a_norm_runs_by_a_kernel_of_our_own_until_cudnns_is_compiled(frontend: Frontend, kind: str) -> None:
    context = BuildContext(None, Stream())
    soon = compile_plan(norm(kind, 3), context, None, soon=True)
    assert soon.tag.endswith("_norm-kernel")
    assert (soon.checked, soon.provisional) == (True, True)
    assert frontend.built == []


@pytest.mark.parametrize("kind", NORMS)
def test_the_kernel_of_a_norm_is_compiled_ahead_and_serves_other_sizes(kind: str) -> None:
    first, second = (
        {each.source for each in launches_ahead(norm(kind, rows), WORKSPACE_BYTES, soon=True)}
        for rows in (3, 700)
    )
    assert len(first) == 1
    assert first <= second
    names = [each.name for each in launches_ahead(norm(kind, 3), WORKSPACE_BYTES)]
    assert "whole" not in names, "where there is time, the norm is cuDNN's"


def soon(graph: OperationGraph) -> tuple[str, bool]:
    """The candidate that is tried first, and whether others were left out before it."""
    refused: list[str] = []
    plan = next(compiler.possible_plans(graph, None, None, on_refusal=refused.append, precompiled=True))
    return plan.tag.rpartition("/")[2], candidates.COMPILES in refused


def test_attention_of_another_size_takes_a_kernel_that_is_there(frontend: Frontend) -> None:
    compiler.compile_whole(attention(1), None, None, 1)
    assert compiler.may_wait(attention(8))
    assert soon(attention(8)) == (NARROW, True)
    compiler.compile_whole(attention(8), None, None, 0)  # what is built behind
    assert soon(attention(4)) == (WIDE, False)
    assert frontend.built == [NARROW, NARROW, WIDE, WIDE]


def test_it_is_not_the_preferred_plan_if_another_candidate_is_put_first(frontend: Frontend) -> None:
    compiler.compile_whole(attention(8), None, None, 0)
    assert soon(attention(1)) == (WIDE, True)
    compiler.compile_whole(attention(1), None, None, 1)
    assert soon(attention(1)) == (NARROW, False)
    assert frontend.built == [WIDE, WIDE, NARROW, NARROW]


def test_attention_does_not_wait_where_nothing_is_there(frontend: Frontend) -> None:
    assert not compiler.may_wait(attention(8))
    compiler.compile_whole(attention(1, width=32), None, None, 1)
    assert not compiler.may_wait(attention(8)), "heads of another width have other kernels"


def products(*algorithms: bytes) -> Callable[..., Iterator[LtProduct]]:
    """A `LtProduct.with_algorithms` that chooses these."""

    def with_algorithms(self: LtProduct, workspace_limit: int, most: int) -> Iterator[LtProduct]:
        yield from (msgspec.structs.replace(self, algorithm=each) for each in algorithms[:most])

    return with_algorithms


@pytest.mark.parametrize("name", SINGLE_PIXELS)
def test_single_pixels_are_a_product_of_cublaslt_until_cudnn_is_asked(
    frontend: Frontend, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(LtProduct, "with_algorithms", products(bytes(ALGORITHM_BYTES)))
    graph, refused = SINGLE_PIXELS[name], list[str]()
    plan = next(compiler.possible_plans(graph, None, None, on_refusal=refused.append, precompiled=True))
    assert plan.tag.rpartition("/")[2].startswith("cublaslt-")
    assert refused == [candidates.TAKES_LONGER], "so the plan is provisional"
    assert not frontend.pygraph.called
    assert not next(compiler.possible_plans(graph, None, None)).tag.rpartition("/")[2].startswith("cublaslt-")


@pytest.mark.parametrize("name", SINGLE_PIXELS)
def test_without_an_algorithm_of_cublaslts_cudnn_is_asked_at_once(
    frontend: Frontend, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(LtProduct, "with_algorithms", products())
    frontend.compiles = False
    refused: list[str] = []
    plan = next(
        compiler.possible_plans(SINGLE_PIXELS[name], None, None, on_refusal=refused.append, precompiled=True)
    )
    assert plan.tag.rpartition("/")[2] == WIDE
    assert {candidates.TAKES_LONGER, candidates.COMPILES}.isdisjoint(refused)


def test_only_so_many_kernels_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_attention, "_MOST", 2)
    known = CompiledAttention()
    for width in (16, 32, 64):
        known.note(attention(1, width=width), "wide")
    assert [bool(known.of(attention(8, width=width))) for width in (16, 32, 64)] == [False, False, True]
    known.note(norm("rms norm", 3), "wide")
    assert not known.of(norm("rms norm", 3))
