"""Blocks of networks on the CPU: forward as written out with NumPy, backward against finite differences."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest
import scipy.special

from benchmarks.blocks import BLOCKS, Block, bottleneck, convnext, transformer
from cudnn_actor.protocol import ConvSpec, DType

from ..differences import computed
from ..references import assert_close, scipy_forward

F64 = DType.FLOAT64
SMALL: dict[str, Callable[[], Block]] = {
    "bottleneck": lambda: bottleneck(batch=2, channels=8, width=2, size=5, dtype=F64),
    "bottleneck with a projection": lambda: bottleneck(
        batch=2, channels=3, width=2, size=5, stride=2, dtype=F64
    ),
    "bottleneck for inference": lambda: bottleneck(
        batch=2, channels=8, width=2, size=5, dtype=F64, inference=True
    ),
    "convnext": lambda: convnext(batch=2, channels=3, size=5, dtype=F64),
    "transformer": lambda: transformer(batch=2, length=6, width=8, heads=2, hidden=12, dtype=F64),
}
each_block = pytest.mark.parametrize("name", SMALL)


def conv(x: np.ndarray, w: np.ndarray, stride: int = 1, groups: int = 1) -> np.ndarray:
    return scipy_forward(x, w, ConvSpec.symmetric(2, w.shape[2] // 2, stride, groups=groups))


def of_bottleneck(v: Mapping[str, np.ndarray], *, inference: bool = False) -> Any:
    def normalised(x: np.ndarray, name: str, stride: int = 1) -> Any:
        scale, bias = (v[part + name][:, None, None] for part in ("scale", "bias"))
        y = conv(x, v[f"w{name}"], stride)
        if not inference:
            variance = y.var((0, 2, 3), keepdims=True)
            y = (y - y.mean((0, 2, 3), keepdims=True)) / np.sqrt(variance + 1e-5)
        return y * scale + bias

    stride = 2 if "w4" in v else 1
    y = np.maximum(normalised(v["x"], "1"), 0)
    y = normalised(np.maximum(normalised(y, "2", stride), 0), "3")
    return np.maximum(y + (normalised(v["x"], "4", stride) if "w4" in v else v["x"]), 0)


def of_convnext(v: Mapping[str, np.ndarray]) -> Any:
    y = conv(v["x"], v["w"], groups=len(v["w"])) + v["bias"][:, None, None]
    y = np.moveaxis(y, 1, 3)
    y = (y - y.mean(3, keepdims=True)) / np.sqrt(y.var(3, keepdims=True) + 1e-6)
    y = (y * v["norm_scale"] + v["norm_bias"]) @ v["w1"] + v["bias1"]
    y = y * scipy.special.ndtr(y)
    return v["x"] + np.moveaxis((y @ v["w2"] + v["bias2"]) * v["layer_scale"], 3, 1)


def of_transformer(v: Mapping[str, np.ndarray]) -> Any:
    def normalised(x: np.ndarray, scale: np.ndarray) -> Any:
        return x / np.sqrt((x * x).mean(2, keepdims=True) + 1e-6) * scale

    x, heads = v["x"], 2
    batch, length, width = x.shape
    normal = normalised(x, v["scale1"])
    q, k, w = ((normal @ v[f"w{n}"]).reshape(batch, length, heads, -1) for n in "qkv")
    scores = np.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(width // heads)
    scores = np.where(np.tri(length, dtype=bool), scores, -np.inf)
    seen = np.einsum("bhqk,bkhd->bqhd", scipy.special.softmax(scores, 3), w).reshape(x.shape)
    x = x + seen @ v["wo"]
    normal = normalised(x, v["scale2"])
    gate = normal @ v["w1"]
    return x + (gate * scipy.special.expit(gate) * (normal @ v["w2"])) @ v["w3"]


ORACLES: dict[str, Callable[[Mapping[str, np.ndarray]], Any]] = {
    "bottleneck": of_bottleneck,
    "bottleneck with a projection": of_bottleneck,
    "bottleneck for inference": partial(of_bottleneck, inference=True),
    "convnext": of_convnext,
    "transformer": of_transformer,
}


@each_block
def test_forward_is_what_numpy_computes(name: str) -> None:
    block = SMALL[name]()
    values = block.values()
    wanted = ORACLES[name](values)
    assert_close(computed(block.forward, values)["y"], wanted)
    assert_close(computed(block.training, values)["y"], wanted)


@each_block
def test_backward_is_the_limit_of_differences(name: str) -> None:
    """Of y's product with upstream, when all inputs move at once in some direction."""
    block = SMALL[name]()
    values = block.values(1)
    found = computed(block.training, values)
    for seed, name_ in enumerate([*block.gradients, None]):
        moved = [name_] if name_ is not None else [*block.gradients]
        rng = np.random.default_rng(seed)
        ways = {n: rng.normal(0, 1, values[n].shape) for n in moved}
        sides = []
        for step in (1e-6, -1e-6):
            at = {**values, **{n: values[n] + step * way for n, way in ways.items()}}
            sides.append((computed(block.forward, at)["y"] * values["upstream"]).sum())
        wanted = (sides[0] - sides[1]) / 2e-6
        got = sum((found[block.gradients[n]] * way).sum() for n, way in ways.items())
        assert abs(got - wanted) <= 1e-7 * sum(np.abs(found[block.gradients[n]]).sum() for n in moved)


@each_block
def test_backward_is_pytorchs(name: str) -> None:
    torch = pytest.importorskip("torch")
    block = SMALL[name]()
    values = block.values(2)
    found = computed(block.training, values)
    leaves = {n: torch.from_numpy(values[n]).requires_grad_() for n in block.gradients}
    y = block.torch(leaves)
    y.backward(torch.from_numpy(values["upstream"]))
    assert_close(found["y"], y.detach().numpy())
    for leaf, gradient in block.gradients.items():
        assert_close(found[gradient], leaves[leaf].grad.numpy())


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_of_the_default_sizes_are_built_with_their_operands_as_they_lie(name: str) -> None:
    block = BLOCKS[name]()
    (y,), first = block.forward.outputs, block.training.outputs[0]
    assert y.spec == first.spec == block.forward.inputs[0].spec
    assert {port.spec.dtype for port in block.training.ports} == {DType.BFLOAT16}
    wanted = {block.gradients[port.name]: port.spec for port in block.forward.inputs}
    assert {port.name: port.spec for port in block.training.outputs[1:]} == wanted
