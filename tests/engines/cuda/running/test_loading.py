"""Plans that are loaded from bytes, as far as that needs no device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import msgspec
import pytest

from cudnn_actor.engines.cuda.checking.self_check import BuildContext
from cudnn_actor.engines.cuda.library import libraries
from cudnn_actor.engines.cuda.planning import cuda_builder
from cudnn_actor.engines.cuda.planning.cuda_builder import CudaBuilder
from cudnn_actor.engines.cuda.running.loading import load_plan
from cudnn_actor.engines.cuda.running.plan import CudaPlan
from cudnn_actor.engines.cuda.running.recipe import GraphStep, Recipe


class Serialisable:
    """In the place of a graph of cuDNN's."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.times = 0

    def serialize(self, *, as_bytes: bool) -> bytes:
        assert as_bytes
        self.times += 1
        return self.data


def plan_of(*graphs: Serialisable, data: tuple[bytes, ...] = ()) -> CudaPlan:
    data = data or (b"",) * len(graphs)
    steps = tuple(GraphStep("eng7", 0, (), (), plan) for plan in data)
    return CudaPlan(Recipe(tag="", steps=steps, scratch=0, buffers=0, scalars=0), graphs)


def steps_of(exported: bytes | None) -> list[bytes]:
    assert exported is not None
    recipe = msgspec.msgpack.decode(exported, type=Recipe)
    return [step.plan for step in recipe.steps if isinstance(step, GraphStep)]


def test_a_graph_of_several_steps_is_serialised_once_and_loaded_once() -> None:
    one, other = Serialisable(b"one"), Serialisable(b"other")
    data = steps_of(CudaBuilder(0).export(plan_of(one, other, one)))
    assert data == [b"one", b"other", b"one"]
    assert (one.times, other.times) == (1, 1)
    seen: list[bytes] = []

    def load(found: bytes) -> object:
        seen.append(found)
        return object()

    restored = load_plan(plan_of(one, other, one, data=tuple(data)).recipe, load)
    assert seen == [b"one", b"other"]
    assert restored.graphs[0] is restored.graphs[2] is not restored.graphs[1]


def test_a_plan_that_has_bytes_is_exported_as_these() -> None:
    live = Serialisable(b"made again")
    assert steps_of(CudaBuilder(0).export(plan_of(live, data=(b"checked",)))) == [b"checked"]


NOTHING: Any = SimpleNamespace(bound=(), scalars=())
"""In the place of a graph without buffers."""


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many steps the plans have whose kernels are loaded."""
    found: list[int] = []

    def program(plan: CudaPlan, *_: Any) -> Any:
        return SimpleNamespace(load=lambda _: found.append(len(plan.recipe.steps)))

    monkeypatch.setattr(cuda_builder, "Program", program)
    monkeypatch.setitem(vars(libraries.libraries()), "cupy", MagicMock())
    return found


@pytest.fixture
def seen(kernels: list[int], monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What is loaded of cuDNN's plans."""
    del kernels
    found: list[bytes] = []

    def load(data: bytes, *_: Any) -> object:
        if data == b"bad":
            raise RuntimeError("cuDNN refuses it")
        found.append(data)
        return object()

    monkeypatch.setattr(cuda_builder, "load", load)
    monkeypatch.setattr(CudaBuilder, "context", BuildContext(None, None))
    return found


def exported(*data: bytes) -> bytes:
    return CudaBuilder(0).export(plan_of(*map(Serialisable, data))) or b""


def test_what_was_loaded_of_a_piece_is_not_loaded_again_for_the_whole(seen: list[bytes]) -> None:
    builder = CudaBuilder(0)
    for piece in (b"one", b"other"):
        builder.load_piece(exported(piece))
    assert seen == [b"one", b"other"]
    whole = exported(b"one", b"third", b"other", b"one")
    assert len(builder.restore(NOTHING, whole).graphs) == 4
    assert seen == [b"one", b"other", b"third"]
    builder.restore(NOTHING, whole)
    assert seen[3:] == [b"one", b"third", b"other"], "another plan has graphs of its own"


def test_kernels_are_loaded_with_the_pieces_or_else_with_the_whole(
    seen: list[bytes], kernels: list[int]
) -> None:
    del seen
    builder, whole = CudaBuilder(0), exported(b"one", b"third", b"other")
    builder.load_piece(exported(b"one", b"other"))
    builder.restore(NOTHING, whole)
    assert kernels == [2], "the engine loads what is left"
    builder.restore(NOTHING, whole)
    assert kernels == [2, 3]


def test_kernels_that_cannot_be_loaded_are_left_to_the_engine(
    seen: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("no room")

    monkeypatch.setattr(cuda_builder, "Program", refuse)
    assert len(CudaBuilder(0).restore(NOTHING, exported(b"one")).graphs) == 1
    assert seen == [b"one"]


def test_a_piece_that_cannot_be_loaded_is_left_to_the_whole(seen: list[bytes]) -> None:
    builder = CudaBuilder(0)
    for piece in (b"not a plan", exported(b"bad"), exported(b"good")):
        builder.load_piece(piece)
    builder.restore(NOTHING, exported(b"good", b"other"))
    assert seen == [b"good", b"other"]


def test_pieces_of_a_build_that_has_failed_are_not_kept_for_another(
    seen: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_kernels = []
    monkeypatch.setattr(CudaBuilder, "load_kernels", lambda _, plan: with_kernels.append(len(plan.graphs)))
    builder = CudaBuilder(0)
    builder.load_piece(exported(b"one"))
    builder.forget_pieces()
    builder.restore(NOTHING, exported(b"one", b"other"))
    assert seen == [b"one", b"one", b"other"]
    assert with_kernels == [1, 2], "a stored plan's kernels are loaded, too"


def test_only_so_many_pieces_are_kept(seen: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_builder, "_MOST_LOADED", 2)
    builder = CudaBuilder(0)
    for piece in (b"one", b"other", b"third"):
        builder.load_piece(exported(piece))
    assert seen == [b"one", b"other"]
