"""Sizes of named dims for which a model is warmed, loaded or explained; its bytes; its end with a block."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto

from cudnn_actor import InvalidRequest, spawn

from .small_models import image_model, model_of, node
from .test_models import images

isolations = pytest.mark.parametrize("isolation", ["thread", "process"])
FLOAT = TensorProto.FLOAT


def product() -> Any:
    """Of an (N, K) and a (K, M)."""
    given = {"a": (FLOAT, ["N", "K"]), "b": (FLOAT, ["K", "M"])}
    return model_of([node("MatMul", "a b", "y")], given, {"y": (FLOAT, ["N", "M"])})


@isolations
async def test_a_run_with_dims_that_were_warmed_builds_nothing(isolation: Any) -> None:
    async with spawn(device="cpu", isolation=isolation) as gpu:
        model = await gpu.load(image_model())
        assert model.nbytes == 0
        assert await model.warm(N=(1, 2)) == 2
        assert model.nbytes > 0
        before = await gpu.statistics()
        for count in (1, 2):
            await gpu.run(model, image=images(count))
        after = await gpu.statistics()
        assert after.plans.misses == before.plans.misses
        assert await model.warm({"N": 2}) == 0
        assert await model.warm(N=3) == 1
        await model.close()
        assert model.nbytes == 0


@isolations
async def test_a_model_is_warm_once_it_is_loaded_and_ends_with_its_block(isolation: Any) -> None:
    async with spawn(device="cpu", isolation=isolation) as gpu:
        async with await gpu.load(image_model(), dims={"N": (1, 2)}) as model:
            assert (await gpu.statistics()).plans.size == 2
            assert (await gpu.run(model, image=images(2)))["scores"].shape == (2, 5)
        await gpu.drain()
        assert (await gpu.statistics()).live_buffers == 0
        with pytest.raises(InvalidRequest, match="is closed"):
            await gpu.run(model, image=images(2))


async def test_weights_are_counted_once_for_all_dims() -> None:
    async with spawn(device="cpu") as gpu, await gpu.load(image_model()) as model:
        await model.warm(N=1)
        once = model.nbytes
        await model.warm(N=(2, 3))
        assert model.nbytes == once


async def test_of_several_dims_every_combination_is_warmed() -> None:
    async with spawn(device="cpu") as gpu, await gpu.load(product()) as model:
        assert await model.warm(N=(1, 2), K=3, M=(4, 5, 6)) == 6
        assert (await gpu.statistics()).plans.size == 6
        a, b = np.ones((2, 3), np.float32), np.ones((3, 6), np.float32)
        np.testing.assert_array_equal((await gpu.run(model, a=a, b=b))["y"], np.full((2, 6), 3))


async def test_a_model_is_explained_for_sizes() -> None:
    async with spawn(device="cpu") as gpu, await gpu.load(image_model()) as model:
        assert await model.explain(N=2) == await model.explain({"image": images(2)})
        assert (await model.explain(N=2, measure=True)).run_us


async def test_a_model_of_fixed_dims_is_warmed_without_sizes() -> None:
    async with spawn(device="cpu") as gpu, await gpu.load(image_model(2)) as model:
        assert await model.warm() == 1


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        ({}, "N=None: is a dim of a and has no size; give it: N=1"),
        ({"N": 1, "M": 2}, "K=None: is a dim of a and b and has no size; give it: K=1"),
        (
            {"N": 1, "K": 2, "M": 3, "O": 4},
            "O=4: is no named dim of .*; .*use one of N, K, M",
        ),
        ({"n": 1, "K": 2, "M": 3}, 'n=1: is no named dim of the model.s inputs; did you mean "N"'),
        (
            {"N": 1.5, "K": 2, "M": 3},
            "N=1.5: must be a whole number from 0 on, .*; use N=8",
        ),
        ({"N": True, "K": 2, "M": 3}, "N=True: must be a whole number"),
        ({"N": -1, "K": 2, "M": 3}, "N=-1: must be a whole number from 0 on"),
        ({"N": (), "K": 2, "M": 3}, r"N=\(\): must be a whole number"),
        ({"N": "12", "K": 2, "M": 3}, "N='12': must be a whole number"),
        ({"N": range(1, 9), "K": range(1, 10), "M": 3}, "are 72 sets of dims, and a model keeps 64"),
        ({"N": range(10**15), "K": 2, "M": 3}, "are 1000000000000000 sets of dims"),
        ({"N": range(10**20), "K": 2, "M": 3}, "sets of dims, and a model keeps 64"),
        ([1, 2], r"sizes=.*: is not a mapping of names of dims to sizes; name each"),
        ({"N": 1 << 40, "K": 1 << 40, "M": 3}, "a=.*overflows"),
    ],
)
async def test_sizes_that_are_wrong_are_told(sizes: Any, told: str) -> None:
    async with spawn(device="cpu") as gpu, await gpu.load(product()) as model:
        with pytest.raises(InvalidRequest, match=told):
            await model.warm(sizes)
        with pytest.raises(InvalidRequest, match=told):
            await gpu.load(product(), dims=sizes)
        assert (await gpu.statistics()).live_buffers == 0


async def test_sizes_within_the_bound_are_all_kept() -> None:
    async with spawn(device="cpu") as gpu, await gpu.load(product()) as model:
        assert await model.warm(N=range(1, 9), K=range(1, 9), M=1) == 64
        before = (await gpu.statistics()).plans.misses
        for n, k in ((1, 1), (8, 8)):
            await gpu.run(model, a=np.ones((n, k), np.float32), b=np.ones((k, 1), np.float32))
        assert (await gpu.statistics()).plans.misses == before


async def test_a_size_is_given_once_and_an_explanation_is_of_one() -> None:
    async with spawn(device="cpu") as gpu, await gpu.load(image_model()) as model:
        with pytest.raises(InvalidRequest, match="N=2: is given twice; give it once"):
            await model.warm({"N": 1}, N=2)
        several: Any = (1, 2)
        with pytest.raises(InvalidRequest, match=re.escape("N=(1, 2): must be one whole number; use N=8")):
            await model.explain(N=several)


async def test_inputs_that_decide_over_shapes_or_have_unknown_dims_need_a_run() -> None:
    shaped = model_of(
        [node("Reshape", "x dims", "y")],
        {"x": (FLOAT, ["N"]), "dims": (TensorProto.INT64, [2])},
        {"y": (FLOAT, ["A", "B"])},
    )
    unknown = model_of([node("Relu", "x", "y")], {"x": (FLOAT, [None])}, {"y": (FLOAT, [None])})
    async with spawn(device="cpu") as gpu:
        async with await gpu.load(shaped) as model:
            with pytest.raises(InvalidRequest, match=r"inputs=None: must be given: .*dims"):
                await model.warm(N=6)
        async with await gpu.load(unknown) as model:
            with pytest.raises(InvalidRequest, match=r"x=.*\(\?\).*: has dims without a name; pass inputs"):
                await model.warm()


async def test_a_model_that_cannot_be_warmed_leaves_nothing() -> None:
    async with spawn(device="cpu") as gpu:
        with pytest.raises(InvalidRequest):
            await gpu.load(image_model(), dims={"M": 1})
        assert (await gpu.statistics()).live_buffers == 0
