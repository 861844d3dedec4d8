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


async def test_a_model_of_fixed_dims_is_warm_once_it_is_loaded_with_no_sizes() -> None:
    async with spawn(device="cpu") as gpu:
        async with await gpu.load(image_model(2)) as model:
            assert model.nbytes > 0
            assert (await gpu.statistics()).plans.size == 0
        async with await gpu.load(image_model(2), dims={}) as model:
            assert (await gpu.statistics()).plans.size == 1
            assert await model.warm() == 0


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
        ([1, 2], r"(sizes|dims)=.*: is not a mapping of names of dims to sizes; name each"),
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


def pair(one: str = "a", two: str = "b") -> Any:
    """The sum of two inputs (N, L)."""
    given = {one: (FLOAT, ["N", "L"]), two: (FLOAT, ["N", "L"])}
    return model_of([node("Add", f"{one} {two}", "y")], given, {"y": (FLOAT, ["N", "L"])})


async def test_no_way_to_rearrange_an_input_is_named_that_does_not_fit() -> None:
    async with spawn(device="cpu") as gpu, await gpu.load(pair()) as model:
        with pytest.raises(InvalidRequest, match="give an array that fits; dims with one name must be equal"):
            await gpu.run(model, a=np.ones((2, 3), np.float32), b=np.ones((2, 4), np.float32))
    given = {each: (FLOAT, ["N", "C", "L"]) for each in "ab"}
    deep = model_of([node("Add", "a b", "y")], given, {"y": (FLOAT, ["N", "C", "L"])})
    async with spawn(device="cpu") as gpu, await gpu.load(deep) as model:
        for dims, way in {
            (2, 4, 3): r"give array.transpose\(0, 2, 1\)",
            (2, 3, 5): "give an array that fits",
            (3, 4): r"give array\[None\]|give an array that fits",
        }.items():
            with pytest.raises(InvalidRequest, match=way):
                await gpu.run(model, a=np.ones((2, 3, 4), np.float32), b=np.ones(dims, np.float32))


async def test_numbers_of_numpy_are_sizes() -> None:
    one: Any = np.int64(1)
    two: Any = np.int32(2)
    several: Any = np.array([one, two])
    async with spawn(device="cpu", deployed_limit=np.int64(1 << 20), mailbox=np.int64(64)) as gpu:  # type: ignore[arg-type]
        model = await gpu.load(image_model(), dims={"N": several})
        assert (await gpu.statistics()).plans.size == 2
        assert await model.warm(N=two) == await model.warm(N=(one, two)) == await model.warm(N=two[()]) == 0
        assert await model.warm(N=range(1, 3)) == 0
        lent = await gpu.staging(model.inputs[0], N=two)
        assert lent.shape == (2, 3, 8, 8)
        assert (await model.explain(N=two)).pieces
        for options in ({"max_batch": two}, {"sizes": np.array([1, 2])}, {"sizes": [one, two]}):
            async with gpu.batched(model, **options, max_waiting=two + 7, in_flight=one) as endpoint:
                assert (await endpoint(image=images(1)))["scores"].shape == (1, 5)
        for wrong in (
            True,
            2.0,
            np.float32(2),
            "2",
            np.array([[1]]),
            np.array([True]),
            np.array([]),
            None,
            b"1",
        ):
            with pytest.raises(InvalidRequest, match=r"N=.*whole number"):
                await model.warm({"N": wrong})  # type: ignore[dict-item]


async def test_sizes_that_are_no_mapping_are_refused_alike() -> None:
    async with spawn(device="cpu") as gpu, await gpu.load(image_model()) as model:
        fix = "sizes=8: is not a mapping of names of dims to sizes; name each"
        with pytest.raises(InvalidRequest, match=fix):
            await gpu.staging(model.inputs[0], 8)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match=fix):
            await model.warm(8)  # type: ignore[arg-type]


async def test_advice_on_a_name_that_is_no_keyword_is_a_mapping() -> None:
    given = {"x": (FLOAT, ["timeout", "batch size"])}
    odd = model_of([node("Relu", "x", "y")], given, {"y": (FLOAT, ["timeout", "batch size"])})
    async with spawn(device="cpu") as gpu, await gpu.load(odd) as model:
        with pytest.raises(InvalidRequest, match=re.escape('give it: {"timeout": 1}')):
            await model.warm({"batch size": 2}, timeout=3)
        with pytest.raises(InvalidRequest, match=re.escape('give it: {"batch size": 1}')):
            await gpu.staging(model.inputs[0], {"timeout": 2})
        with pytest.raises(InvalidRequest, match=re.escape('use {"timeout": 8}, or {"timeout": (1, 8)}')):
            await model.warm({"timeout": -1, "batch size": 2})
        assert await model.warm({"timeout": 1, "batch size": 2}) == 1


async def test_an_input_that_is_named_like_an_option_is_asked_for_in_a_mapping() -> None:
    x = np.ones((2, 3), np.float32)
    async with spawn(device="cpu") as gpu, await gpu.load(pair("keep", "timeout")) as model:
        with pytest.raises(InvalidRequest, match=re.escape('as in run(model, {"keep": array})')):
            await gpu.run(model, {"timeout": x}, keep=x)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match=re.escape('as in run(model, {"timeout": array})')):
            await gpu.run(model, {"keep": x}, timeout=x)  # type: ignore[arg-type]
        np.testing.assert_array_equal((await gpu.run(model, {"keep": x, "timeout": x}))["y"], x + x)
        async with gpu.batched(model, max_batch=2, dims={"L": 3}) as endpoint:
            with pytest.raises(InvalidRequest, match=r'name it in a mapping, as in .*"timeout": array'):
                await endpoint({"keep": x}, timeout=x)  # type: ignore[arg-type]
