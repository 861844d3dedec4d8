"""Convolutions on rearranged copies of their operands, on a GPU: each form passes its self-check."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cudnn_actor.engines.cuda.checking.self_check import SelfCheck
from cudnn_actor.engines.cuda.planning.compiler import compile_rearranged
from cudnn_actor.engines.cuda.planning.cuda_builder import CudaBuilder
from cudnn_actor.engines.cuda.planning.rearranging import rearrangements
from cudnn_actor.engines.cuda.running.program import Program
from cudnn_actor.engines.cuda.running.recipe import ProductStep

from ..engines.cuda.planning.test_rearranging import PATCHES, PIXELS, PRODUCTS, STRIDED, layer, shortcut
from .test_operation_checks import builder

__all__ = ["builder"]

Note = Callable[[str, object], None]
LARGE = {
    "vision transformer": layer((32, 3, 224, 224), (768, 3, 16, 16), stride=16),
    "14x14": layer((8, 3, 224, 224), (1024, 3, 14, 14), stride=14),
    "convnext": layer((32, 3, 224, 224), (96, 3, 4, 4), stride=4),
    "downsampling": layer((32, 96, 56, 56), (192, 96, 2, 2), stride=2),
    "resnet": layer((32, 3, 224, 224), (64, 3, 7, 7), stride=2, pad=3),
    "bottleneck": layer((32, 256, 56, 56), (64, 256, 1, 1)),
    "mobilenet": layer((32, 3, 224, 224), (32, 3, 3, 3), stride=2, pad=1),
}
GRAPHS = {f"small: {name}": graph for name, graph in (PATCHES | PIXELS | PRODUCTS | STRIDED).items()} | LARGE


@pytest.mark.parametrize("name", GRAPHS)
def test_each_form_passes_its_self_check_and_can_be_captured(
    builder: CudaBuilder, name: str, record_property: Note
) -> None:
    graph, context = GRAPHS[name], builder.context
    forms = [*rearrangements(graph, every=True)]
    assert forms
    check = SelfCheck(graph, context)
    for form in forms:
        plan = compile_rearranged(graph, form, context.handle, None, 0)
        record_property(form.what, plan.tag)
        assert check.fault(plan) is None, plan.tag
        program, workspace = Program(plan, context.handle, context.stream), check.room_for(plan)
        for _ in range(5):
            program.run((1.0,), check.pointers, check.scalars, workspace.pointer)
        assert program.replays, f"{plan.tag} cannot be captured"
    check.close()


@pytest.mark.parametrize("name", ["vision transformer", "convnext", "resnet"])
def test_few_channels_are_rearranged_by_default(builder: CudaBuilder, name: str) -> None:
    graph = LARGE[name]
    plan = builder.build(graph, workspace_limit=None)
    first = next(iter(rearrangements(graph)))
    assert plan.checked
    assert len(plan.recipe.steps) == len(first.copies) + 1, plan.tag
    again = builder.restore(graph, builder.export(plan) or b"")
    assert again.tag == plan.tag


SHORTCUTS = {"shortcut": shortcut(8)}


@pytest.mark.parametrize("name", PRODUCTS | SHORTCUTS)
def test_single_pixels_are_a_product_by_default(builder: CudaBuilder, name: str) -> None:
    graph = (PRODUCTS | SHORTCUTS)[name]
    plan = builder.build(graph, workspace_limit=None)
    *bias, step = plan.recipe.steps
    assert plan.checked
    assert isinstance(step, ProductStep)
    assert len(bias) == (name in SHORTCUTS)
    again = builder.restore(graph, builder.export(plan) or b"")
    assert again.tag == plan.tag
