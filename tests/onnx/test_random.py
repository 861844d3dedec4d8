"""Nodes that draw random numbers: others in each run, and the same ones when a model is loaded again."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from cudnn_actor import InvalidRequest, spawn
from cudnn_actor.errors import UnsupportedModel
from cudnn_actor.onnx import OnnxModel

from .small_models import FLOAT, graph_of, model_of, node

DIMS = (40, 50)
HALVES = np.full(DIMS, 0.5, np.float32)
LOGITS = np.tile(np.log(np.array([1, 2, 5], np.float32)), (2, 1))
TRAINING = {"ratio": np.array(0.25, np.float32), "training": np.array(True)}


def runs(
    proto: onnx.ModelProto, count: int, x: np.ndarray | None = None, *, random: int | None = 7
) -> list[np.ndarray]:
    """The first output of so many runs."""

    async def results() -> list[np.ndarray]:
        async with spawn(device="cpu") as gpu:
            model = await gpu.load(proto, random=random)
            found = [
                next(iter((await gpu.run(model, {} if x is None else {"x": x})).values()))
                for _ in range(count)
            ]
            await model.close()
            return found

    return asyncio.run(results())


def drawing(op: str, *, dims: Any = DIMS, dtype: int = FLOAT, **attributes: Any) -> onnx.ModelProto:
    """A model of one node that draws numbers, like its input x if it is to be like one."""
    inputs = {} if op in ("RandomNormal", "RandomUniform") else {"x": (FLOAT, dims)}
    attributes |= {} if inputs else {"shape": list(dims)}
    return model_of([node(op, " ".join(inputs), "y", **attributes)], inputs, {"y": (dtype, None)})


def of_half(op: str) -> onnx.ModelProto:
    """A model of uniform numbers of float16."""
    proto = drawing(op, dtype=TensorProto.FLOAT16, low=-1.0, high=3.0)
    proto.graph.node[0].attribute.append(helper.make_attribute("dtype", TensorProto.FLOAT16))
    return proto


def given(op: str) -> np.ndarray | None:
    return None if op in ("RandomNormal", "RandomUniform") else HALVES


@pytest.mark.parametrize("op", ["RandomNormal", "RandomNormalLike"])
def test_normal_numbers_have_their_mean_and_deviation(op: str) -> None:
    (y,) = runs(drawing(op, mean=3.0, scale=0.5), 1, given(op))
    assert y.dtype == np.float32
    assert y.shape == DIMS
    assert abs(y.mean() - 3) < 0.05
    assert abs(y.std() - 0.5) < 0.03


@pytest.mark.parametrize("op", ["RandomUniform", "RandomUniformLike"])
def test_uniform_numbers_fill_their_range(op: str) -> None:
    (y,) = runs(of_half(op), 1, given(op))
    assert y.dtype == np.float16
    assert -1 <= y.min() < -0.95
    assert 2.95 < y.max() < 3
    assert abs(float(y.astype(np.float32).mean()) - 1) < 0.1


def test_bernoulli_draws_each_element_with_its_own_probability() -> None:
    chances = np.repeat(np.array([0, 0.25, 1], np.float32), 1000)
    (y,) = runs(drawing("Bernoulli", dims=[3000]), 1, x=chances)
    none, some, every = y.reshape(3, 1000).mean(1)
    assert (none, every) == (0, 1)
    assert abs(some - 0.25) < 0.05


def test_multinomial_draws_classes_as_often_as_they_are_likely() -> None:
    (y,) = runs(drawing("Multinomial", dims=[2, 3], dtype=TensorProto.INT32, sample_size=4000), 1, x=LOGITS)
    assert y.shape == (2, 4000)
    for row in y:
        np.testing.assert_allclose(np.bincount(row, minlength=3) / 4000, [1 / 8, 2 / 8, 5 / 8], atol=0.03)


def test_a_dropout_of_training_drops_its_share_and_scales_the_rest() -> None:
    dropout = node("Dropout", "x ratio training", "y mask")
    outputs = {"y": (FLOAT, None), "mask": (TensorProto.BOOL, None)}
    (y,) = runs(model_of([dropout], {"x": (FLOAT, DIMS)}, outputs, TRAINING), 1, x=HALVES)
    assert set(np.unique(y)) == {np.float32(0), np.float32(0.5 / 0.75)}
    assert abs((y == 0).mean() - 0.25) < 0.05


def test_each_run_draws_other_numbers_and_a_model_that_is_loaded_again_the_same() -> None:
    proto = drawing("RandomNormalLike")
    first, second = runs(proto, 2, x=HALVES), runs(proto, 2, x=HALVES)
    np.testing.assert_array_equal(first, second)
    assert not np.array_equal(first[0], first[1])
    assert not np.array_equal(first[0], runs(proto, 1, random=8, x=HALVES)[0])


def test_two_nodes_draw_different_numbers() -> None:
    nodes = [node("RandomNormalLike", "x", f"n{number}") for number in range(2)]
    proto = model_of([*nodes, node("Sub", "n0 n1", "y")], {"x": (FLOAT, DIMS)}, {"y": (FLOAT, None)})
    (y,) = runs(proto, 1, x=HALVES)
    assert (y == 0).sum() < 5


def test_each_turn_of_a_loop_draws_its_own() -> None:
    body = graph_of(
        [node("RandomNormalLike", "x", "n"), node("Identity", "go", "on")],
        {"turn": (TensorProto.INT64, []), "go": (TensorProto.BOOL, [])},
        {"on": (TensorProto.BOOL, []), "n": (FLOAT, None)},
    )
    loop = node("Loop", "turns -", "y", body=body)
    proto = model_of([loop], {"x": (FLOAT, DIMS)}, {"y": (FLOAT, None)}, {"turns": np.array(2)})
    (y,) = runs(proto, 1, x=HALVES)
    assert y.shape == (2, *DIMS)
    assert not np.array_equal(y[0], y[1])


def test_a_node_with_a_seed_needs_no_other() -> None:
    proto = drawing("RandomUniform", seed=5.0)
    first = runs(proto, 2, random=None)
    np.testing.assert_array_equal(first, runs(proto, 2, random=None))
    assert not np.array_equal(first[0], first[1])


@pytest.mark.parametrize("dims", [(2, 3), ("N", 3)])
@pytest.mark.parametrize("op", ["Bernoulli", "Multinomial", "RandomNormalLike", "RandomUniformLike"])
def test_a_node_without_a_seed_is_refused_and_how_to_give_one_is_said(op: str, dims: Any) -> None:
    dtype = TensorProto.INT32 if op == "Multinomial" else FLOAT
    with pytest.raises(
        UnsupportedModel, match=r"from no seed: load the model with one, as in gpu\.load\(model"
    ):
        runs(drawing(op, dims=dims, dtype=dtype), 0, random=None)


def test_a_seed_for_a_model_that_was_read_is_refused() -> None:
    async def load() -> None:
        async with spawn(device="cpu") as gpu:
            with pytest.raises(InvalidRequest, match=r"comes too late.*OnnxModel\(model, random="):
                await gpu.load(OnnxModel(drawing("RandomNormal"), random=3), random=3)
            with pytest.raises(InvalidRequest, match="random=-1: must be a whole number"):
                await gpu.load(drawing("RandomNormal"), random=-1)

    asyncio.run(load())


def test_numbers_that_decide_over_shapes_are_refused() -> None:
    nodes = [node("RandomUniform", "", "u", shape=[1]), node("Cast", "u", "n", to=TensorProto.INT64)]
    proto = model_of([*nodes, node("Expand", "x n", "y")], {"x": (FLOAT, [1])}, {"y": (FLOAT, None)})
    with pytest.raises(UnsupportedModel, match="random numbers, which decide over shapes"):
        runs(proto, 1, x=np.ones(1, np.float32))
