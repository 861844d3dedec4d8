"""What `gpu.batched` refuses: models, options and inputs that do not fit."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from cudnn_actor import (
    InvalidRequest,
    Model,
)
from cudnn_actor.errors import UnsupportedModel
from tests.onnx.small_models import FLOAT, model_of, node

from ..inside import sizes_of_batches
from .rigs import spawn
from .test_batched_models import batched, check, doubling, rows

pytestmark = pytest.mark.usefixtures("isolation")

FIXED = model_of([node("Relu", "x", "y")], {"x": (FLOAT, [4, 3])}, {"y": (FLOAT, [4, 3])})
TWO = model_of(
    [node("MatMul", "a b", "y")],
    {"a": (FLOAT, ["N", "K"]), "b": (FLOAT, ["K", "M"])},
    {"y": (FLOAT, ["N", "M"])},
)
SQUARE = model_of([node("Relu", "x", "y")], {"x": (FLOAT, ["N", "N"])}, {"y": (FLOAT, ["N", "N"])})
SUMMED = model_of(
    [node("ReduceSum", "x axis", "y")],
    {"x": (FLOAT, ["N", 3])},
    {"y": (FLOAT, [1, 3])},
    {"axis": np.array([0])},
)
UNKNOWN = model_of(
    [node("ReduceSum", "x axis", "y")],
    {"x": (FLOAT, ["N", 3])},
    {"y": (FLOAT, None)},
    {"axis": np.array([0])},
)


@pytest.mark.parametrize(
    ("model", "options", "told"),
    [
        (FIXED, {}, r"x=.*: has no leading dim with a name, .*; export the model with one dynamic batch dim"),
        (TWO, {}, r"b=.*: has the leading dim K, and a has N"),
        (SQUARE, {}, r"x=.*: has N in another place, too"),
        (SUMMED, {}, r"y=.*: is an output that does not follow the batch"),
        (doubling("L"), {}, "L=None: is a dim of x and has no size; give it: L=1"),
        (doubling("L"), {"dims": {"K": 3}}, "K=3: is no named dim of the model's inputs"),
        (doubling("L"), {"dims": {"N": 3, "L": 3}}, "dims=.*: has N, along which samples are batched"),
        (doubling("L"), {"dims": {"L": range(1, 20)}}, "are 114 sets of dims, and a model keeps 64"),
        (doubling(), {"dims": 3}, "dims=3: is not a mapping"),
        (doubling(), {"max_batch": 0}, "max_batch=0"),
        (doubling(), {"max_batch": 2.5}, "max_batch=2.5"),
        (doubling(), {"max_waiting": 0}, "max_waiting=0"),
        (doubling(), {"in_flight": 0}, "in_flight=0"),
        (doubling(), {"max_delay_us": -1}, "max_delay_us=-1: must be a number of microseconds"),
        (doubling(), {"max_delay_us": float("nan")}, "max_delay_us=nan: must be a number of microseconds"),
        (doubling(), {"sizes": ()}, r"sizes=\(\): must be whole numbers from 1 on; use sizes="),
        (doubling(), {"sizes": (0, 1)}, r"sizes=\(0, 1\): must be whole numbers"),
        (doubling(), {"sizes": 8}, "sizes=8: must be whole numbers"),
        (doubling(), {"sizes": (1, 8), "max_batch": 16}, "has 8 as the largest, and max_batch is 16"),
        (doubling(), {"timeout": -1}, "timeout=-1"),
    ],
)
async def test_a_model_or_an_option_that_does_not_fit_is_refused(model: Any, options: Any, told: str) -> None:
    async with spawn() as gpu, await gpu.load(model) as loaded:
        with pytest.raises(InvalidRequest, match=told):
            gpu.batched(loaded, **options)


async def test_sizes_are_powers_of_two_and_the_most_unless_they_are_given() -> None:
    async with spawn() as gpu, await gpu.load(doubling()) as model:
        for options, sizes in (
            ({}, (1, 2, 4, 8, 16, 32)),
            ({"max_batch": 12}, (1, 2, 4, 8, 12)),
            ({"sizes": [8, 1, 8]}, (1, 8)),
        ):
            assert sizes_of_batches(gpu.batched(model, **options)) == sizes


async def test_an_output_that_does_not_follow_is_found_on_entry() -> None:
    async with spawn() as gpu:
        async with await gpu.load(UNKNOWN) as model:
            with pytest.raises(InvalidRequest, match=r"y=.*: is an output that does not follow the batch"):
                async with gpu.batched(model, max_batch=4):
                    pass
        await gpu.drain()
        assert (await gpu.statistics()).live_buffers == 0


async def test_a_model_that_cannot_be_run_is_refused_on_entry() -> None:
    bad = model_of(
        [node("Reshape", "x dims", "y")],
        {"x": (FLOAT, ["N", 3])},
        {"y": (FLOAT, ["N", "M"])},
        {"dims": np.array([2, 6])},
    )
    async with spawn() as gpu, await gpu.load(bad) as model:
        with pytest.raises((InvalidRequest, UnsupportedModel)):
            await gpu.batched(model).__aenter__()


async def test_a_model_of_another_service_is_refused() -> None:
    async with spawn() as gpu, spawn() as other, await other.load(doubling()) as model:
        given: Any = "model.onnx"
        for one in (model, given):
            with pytest.raises(InvalidRequest, match="is not a model that this service loaded"):
                gpu.batched(one)


async def test_inputs_that_do_not_fit_are_refused_and_nobody_else_notices() -> None:
    async with batched(max_batch=4) as (gpu, endpoint):
        good = endpoint.submit(x=rows(1.0))
        for inputs, told in (
            ({"x": rows(1.0, 0)}, "N=0: is no sample"),
            ({"x": rows(1.0, 5)}, "N=5: is more than a batch has, 4"),
            ({"x": rows(1.0, 1, 4)}, "x=.*does not fit"),
            ({"x": rows(1.0)[0]}, "it has 1 dims, not 2"),
            ({"x": np.float32(1.0)}, "it has 0 dims, not 2"),
            ({"x": np.array(1.0, np.float32)}, "it has 0 dims, not 2"),
            ({"x": rows(1.0).astype(np.float64)}, "is not the dtype"),
            ({}, "is an input that is missing"),
            ({"x": rows(1.0), "z": 1}, "is no input"),
            ({"x": await gpu.upload(rows(1.0))}, "x=.*: is on the device, .*; give an array"),
        ):
            with pytest.raises(InvalidRequest, match=told):
                await endpoint(inputs)
            with pytest.raises(InvalidRequest, match=told):
                endpoint.submit(inputs)
        with pytest.raises(InvalidRequest, match="timeout=-1"):
            endpoint.submit(x=rows(1.0), timeout=-1)
        check(await good, 1.0)


async def test_several_inputs_have_as_many_samples_each_in_any_order() -> None:
    added = model_of(
        [node("Add", "a b", "y")],
        {"a": (FLOAT, ["N", 3]), "b": (FLOAT, ["N", 1])},
        {"y": (FLOAT, ["N", 3])},
    )
    async with batched(model=added, max_batch=4) as (_, endpoint):
        one, other = rows(1.0, 2), rows(2.0, 2, 1)
        answers = await asyncio.gather(
            endpoint(a=one, b=other), endpoint(b=other, a=one), endpoint({"b": other}, a=one)
        )
        for answer in answers:
            np.testing.assert_array_equal(answer["y"], rows(3.0, 2))
        with pytest.raises(InvalidRequest, match=r"b=.*dim 0 is 3, not 2"):
            await endpoint(a=one, b=rows(2.0, 3, 1))


async def test_an_input_with_a_default_keeps_it() -> None:
    scaled = model_of(
        [node("Mul", "x scale", "y")],
        {"x": (FLOAT, ["N", 3]), "scale": (FLOAT, [1])},
        {"y": (FLOAT, ["N", 3])},
        {"scale": np.array([2], np.float32)},
    )
    async with batched(model=scaled, max_batch=2) as (_, endpoint):
        np.testing.assert_array_equal((await endpoint(x=rows(3.0)))["y"], rows(6.0))
        with pytest.raises(
            InvalidRequest, match=r"scale=input: has a default in the model, .*; leave it out"
        ):
            await endpoint(x=rows(3.0), scale=np.ones(1, np.float32))


async def test_a_model_that_was_closed_is_said_to_be() -> None:
    async with spawn() as gpu:
        model: Model = await gpu.load(doubling())
        async with gpu.batched(model, max_batch=2) as endpoint:
            await model.close()
            with pytest.raises(InvalidRequest, match="is closed"):
                await endpoint(x=rows(1.0))
        await gpu.drain()
        assert (await gpu.statistics()).live_buffers == 0
