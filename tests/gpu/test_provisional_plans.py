"""Plans that are built soon, on a GPU: right, and without kernels that cuDNN would have to compile."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cudnn_actor import spawn
from cudnn_actor.engines.cuda.cudnn.compiled_attention import COMPILED_ATTENTION
from cudnn_actor.engines.cuda.planning.cuda_builder import CudaBuilder
from cudnn_actor.onnx import OnnxModel
from cudnn_actor.protocol import OperationGraph

from ..engines.hasty_graphs import COMPILED, NORMS, PRECOMPILED, SINGLE_PIXELS, attention, network
from ..onnx.small_models import image_model
from .test_operation_checks import builder

__all__ = ["builder"]


@pytest.mark.parametrize("name", COMPILED | NORMS | SINGLE_PIXELS)
def test_a_plan_that_is_built_soon_passes_its_self_check_and_is_provisional(
    builder: CudaBuilder, name: str, record_property: Any
) -> None:
    graph = (COMPILED | NORMS | SINGLE_PIXELS)[name]
    soon = builder.build(graph, workspace_limit=None, effort="soon")
    record_property("plan", soon.tag)
    assert soon.checked
    assert soon.provisional, soon.tag
    again = builder.restore(graph, builder.export(soon) or b"")
    assert again.provisional
    assert again.tag == soon.tag
    best = builder.build(graph, workspace_limit=None, effort="behind")
    assert best.checked
    assert not best.provisional
    assert best.tag != soon.tag


@pytest.mark.parametrize("name", PRECOMPILED)
def test_what_compiles_nothing_is_the_best_plan_at_once(builder: CudaBuilder, name: str) -> None:
    graph = PRECOMPILED[name]
    soon = builder.build(graph, workspace_limit=None, effort="soon")
    assert not soon.provisional, soon.tag
    assert builder.build(graph, workspace_limit=None).tag == soon.tag


def test_attention_of_more_samples_takes_a_kernel_that_is_compiled(builder: CudaBuilder) -> None:
    builder.build(attention(1), workspace_limit=None, effort="soon")
    known = COMPILED_ATTENTION.of(attention(8))
    assert known
    soon = builder.build(attention(8), workspace_limit=None, effort="soon")
    assert soon.checked
    assert soon.tag.rpartition("/")[2] in known
    best = builder.build(attention(8), workspace_limit=None, effort="behind")
    assert not best.provisional
    assert soon.provisional == (best.tag != soon.tag)


def test_a_graph_is_provisional_if_one_of_its_pieces_is(builder: CudaBuilder) -> None:
    graph: OperationGraph = network(3)
    soon = builder.build(graph, workspace_limit=None, effort="soon")
    assert soon.provisional
    best = builder.build(graph, workspace_limit=None)
    assert not best.provisional
    kept = {part.tag for part in best.recipe.parts} & {part.tag for part in soon.recipe.parts}
    assert kept, "pieces whose plans were the best are the same"


@pytest.mark.parametrize("isolation", ["thread", "process"])
async def test_a_models_first_answers_are_right_before_and_after_the_plan_is_replaced(
    isolation: Any, tmp_path: Path
) -> None:
    source = OnnxModel(image_model())
    image = np.random.default_rng(0).standard_normal((4, 3, 8, 8)).astype(np.float32)
    async with spawn(device="cpu") as cpu, await cpu.load(source) as model:
        wanted = (await model.run(image=image))["scores"]
    async with spawn(isolation=isolation, plan_store=tmp_path) as gpu:
        model = await gpu.load(source)
        runs = [model.run(image=image[:n]) for n in (1, 2, 3, 4)]
        for n, found in zip((1, 2, 3, 4), await asyncio.gather(*runs), strict=True):
            np.testing.assert_allclose(found["scores"], wanted[:n], rtol=1e-3, atol=1e-4)
        await model.warm(N=(1, 2, 3, 4))
        for _ in range(3):
            for n in (1, 2, 3, 4):
                found = await model.run(image=image[:n])
                np.testing.assert_allclose(found["scores"], wanted[:n], rtol=1e-3, atol=1e-4)
