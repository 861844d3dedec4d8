"""Gradients of operations and of small networks against PyTorch on the CPU, in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cudnn_actor.protocol import (
    BatchNormTraining,
    DType,
    GraphBuilder,
    ReductionMode,
    alibi_slopes,
)

from ..differences import gradients
from ..operations.test_operations_against_torch import F, autograd_is_running, mask_of, torch
from ..problems import normal

__all__ = ["autograd_is_running"]

GRADIENTS: dict[str, tuple[Any, Any]] = {
    "sum": (lambda g, x: g.sum(x, 1), lambda x: x.sum(1)),
    "mean": (lambda g, x: g.mean(x, (0, 2)), lambda x: x.mean((0, 2))),
    "prod": (lambda g, x: g.prod(x, 1), lambda x: x.prod(1)),
    "max": (lambda g, x: g.max(x, 1), lambda x: x.amax(1)),
    "min": (lambda g, x: g.min(x, (1, 2)), lambda x: x.amin((1, 2))),
    "l1": (lambda g, x: g.reduce(ReductionMode.L1, x, 1), lambda x: torch.linalg.vector_norm(x, 1, 1)),
    "l2": (lambda g, x: g.reduce(ReductionMode.L2, x, 1), lambda x: torch.linalg.vector_norm(x, 2, 1)),
    "logsumexp": (lambda g, x: g.logsumexp(x, 1), lambda x: x.logsumexp(1)),
    "cumsum": (lambda g, x: g.cumsum(x, 1), lambda x: x.cumsum(1)),
    "cumprod": (lambda g, x: g.cumprod(x, 1), lambda x: x.cumprod(1)),
    "softmax": (lambda g, x: g.softmax(x, 1), lambda x: x.softmax(1)),
    "log_softmax": (lambda g, x: g.log_softmax(x, 1), lambda x: x.log_softmax(1)),
    "movement": (
        lambda g, x: g.pad(x[:, 1:, ::2].transpose(2, 0, 1), [(0, 0), (1, 2), (3, 0)]).reshape(-1),
        lambda x: F.pad(x[:, 1:, ::2].permute(2, 0, 1), (3, 0, 1, 2)).reshape(-1),
    ),
    "broadcast": (
        lambda g, x: x * x[:1, :, :1] / (x[0, 0] ** 2 + 1.0),
        lambda x: x * x[:1, :, :1] / (x[0, 0] ** 2 + 1),
    ),
    "powers": (lambda g, x: x**2.0 + abs(x) ** 1.5 + x**0.0, lambda x: x**2.0 + abs(x) ** 1.5 + x**0.0),
    "where": (
        lambda g, x: g.where(x > 0.2, x * 3.0, g.exp(x)),
        lambda x: torch.where(x > 0.2, x * 3, x.exp()),
    ),
    "gelu": (
        lambda g, x: g.gelu(x) + g.gelu(x, approximate=True),
        lambda x: F.gelu(x) + F.gelu(x, approximate="tanh"),
    ),
    "relu": (lambda g, x: g.relu(x) + g.leaky_relu(x), lambda x: F.relu(x) + F.leaky_relu(x)),
    "conv": (
        lambda g, x: g.conv(x, x[:, :3, :3] * 0.5, pad=1, stride=2),
        lambda x: F.conv1d(x, x[:, :3, :3] * 0.5, padding=1, stride=2),
    ),
}
"""Functions here and in PyTorch."""


@pytest.mark.parametrize("name", GRADIENTS)
@pytest.mark.parametrize("special", [False, True])
def test_gradients(name: str, special: bool) -> None:
    """With zeros and equal elements, too: what the gradient is there is a convention."""
    of_ours, of_theirs = GRADIENTS[name]
    given = normal((4, 3, 5) if name == "conv" else (3, 4, 5), DType.FLOAT64, 5)
    if special:
        given = np.round(given)
    ours, x = {"x": given}, torch.from_numpy(given).requires_grad_()

    def twice(g: GraphBuilder, x: Any) -> Any:
        return g.grad(g.square(of_ours(g, x)), x)

    y = of_theirs(x)
    y.backward(weights_of(y), retain_graph=True)
    _, found = gradients(of_ours, ours)
    np.testing.assert_allclose(found["x"], x.grad.numpy(), rtol=1e-11, atol=1e-12)
    if special and name == "cumprod":
        return  # see `Cumulative.gradient`
    (once,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    (wanted,) = torch.autograd.grad((once * weights_of(once)).sum(), x)
    _, found = gradients(twice, ours)
    np.testing.assert_allclose(found["x"], wanted.numpy(), rtol=1e-10, atol=1e-11)


def block(g: GraphBuilder, x: Any) -> Any:
    """A transformer's, with weights that are parts of x."""
    rows = g.layer_norm(x, x[0, 0, 0], x[1, 0, 0])
    seen = x + g.attention(rows, rows, rows, window=(3, 0), alibi=True)
    inner = g.gelu(g.matmul(g.rms_norm(seen), x[0, 0]))
    return seen + g.matmul(inner, x[0, 1]) * 0.1


def block_in_torch(x: Any) -> Any:
    rows = F.layer_norm(x, (8,), x[0, 0, 0], x[1, 0, 0])
    mask = mask_of({"window_left": 3, "causal": True, "slopes": alibi_slopes(4)}, 8, 8)
    seen = x + F.scaled_dot_product_attention(rows, rows, rows, mask)
    inner = F.gelu(F.rms_norm(seen, (8,), eps=1e-5) @ x[0, 0])
    return seen + inner @ x[0, 1] * 0.1


NETWORKS: dict[str, tuple[Any, Any]] = {
    "conv, bias, relu, max pool": (
        lambda g, x: g.max_pool(
            g.relu(g.conv(x, x[:, :, :3, :3], pad=1, bias=x[0, 0, 0, :2])), 3, stride=2, pad=1
        ),
        lambda x: F.max_pool2d(F.relu(F.conv2d(x, x[:, :, :3, :3], x[0, 0, 0, :2], padding=1)), 3, 2, 1),
    ),
    "depthwise conv": (
        lambda g, x: g.conv(x, x[0, :, :3, :3].reshape(4, 1, 3, 3), pad=1, stride=2, groups=4),
        lambda x: F.conv2d(x, x[0, :, :3, :3].reshape(4, 1, 3, 3), padding=1, stride=2, groups=4),
    ),
    "average pool": (
        lambda g, x: g.avg_pool(g.square(x), 3, stride=2, pad=1, include_padding=True),
        lambda x: F.avg_pool2d(x.square(), 3, 2, 1),
    ),
    "lp pool": (
        lambda g, x: g.lp_pool(g.square(x) + 0.1, 2, 3.0),
        lambda x: F.lp_pool2d(x.square() + 0.1, 3, 2),
    ),
    "adaptive pools": (
        lambda g, x: g.adaptive_avg_pool(x, 3) * g.adaptive_max_pool(x, 3),
        lambda x: F.adaptive_avg_pool2d(x, 3) * F.adaptive_max_pool2d(x, 3),
    ),
    "layer norm": (
        lambda g, x: g.layer_norm(x, x[0, 0], x[1, 0], axis=-2),
        lambda x: F.layer_norm(x, (8, 8), x[0, 0], x[1, 0]),
    ),
    "rms norm": (
        lambda g, x: g.rms_norm(x, x[0, 0, 0]),
        lambda x: F.rms_norm(x, (8,), x[0, 0, 0], 1e-5),
    ),
    "group norm": (
        lambda g, x: g.group_norm(x, 2, x[0, 0, 0, :4], x[0, 0, 1, :4]),
        lambda x: F.group_norm(x, 2, x[0, 0, 0, :4], x[0, 0, 1, :4]),
    ),
    "instance norm": (
        lambda g, x: g.instance_norm(x, x[0, 0, 0, :4], x[0, 0, 1, :4]),
        lambda x: F.instance_norm(x, weight=x[0, 0, 0, :4], bias=x[0, 0, 1, :4]),
    ),
    "batch norm": (
        lambda g, x: g.apply(BatchNormTraining(x=x, scale=x[0, 0, 0, :4], bias=x[0, 0, 1, :4])),
        lambda x: F.batch_norm(x, None, None, x[0, 0, 0, :4], x[0, 0, 1, :4], training=True),
    ),
    "batch norm for inference": (
        lambda g, x: g.batch_norm(x, x[0, 0, 0, :4], g.square(x[0, 1, 0, :4]), x[0, 2, 0, :4]),
        lambda x: (
            (x - x[0, 0, 0, :4, None, None])
            / (x[0, 1, 0, :4, None, None].square() + 1e-5).sqrt()
            * x[0, 2, 0, :4, None, None]
        ),
    ),
    "local response norm": (
        lambda g, x: g.local_response_norm(x, 3, alpha=0.5, beta=0.6, bias=1.5),
        lambda x: F.local_response_norm(x, 3, 0.5, 0.6, 1.5),
    ),
    "attention of groups": (
        lambda g, x: g.attention(x, x[:, :2], x[:, 2:], scale=0.3, causal=True),
        lambda x: F.scaled_dot_product_attention(
            x, x[:, :2], x[:, 2:], is_causal=True, scale=0.3, enable_gqa=True
        ),
    ),
    "attention with a bias": (
        lambda g, x: g.attention(x, x, x[:, :, :, :5], bias=x[:1]),
        lambda x: F.scaled_dot_product_attention(x, x, x[:, :, :, :5], x[:1]),
    ),
    "cross entropy": (
        lambda g, x: g.sum(g.log_softmax(x, 1)[:, 2]) * -1.0,
        lambda x: x.log_softmax(1)[:, 2].sum() * -1,
    ),
    "norm by hand": (
        lambda g, x: (
            (x - g.mean(x, 1, keepdims=True))
            / g.sqrt(g.mean(g.square(x - g.mean(x, 1, keepdims=True)), 1, keepdims=True) + 1e-5)
        ),
        lambda x: (x - x.mean(1, keepdim=True)) / (x.var(1, correction=0, keepdim=True) + 1e-5).sqrt(),
    ),
    "products": (
        lambda g, x: g.matmul(g.matmul(x, x[:1, :1].transpose(0, 1, 3, 2)), x[0, 0]),
        lambda x: x @ x[:1, :1].transpose(2, 3) @ x[0, 0],
    ),
    "a transformer's block": (block, block_in_torch),
}
"""The same of what needs an image, here and in PyTorch."""


@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_of_networks(name: str) -> None:
    of_ours, of_theirs = NETWORKS[name]
    given = normal((2, 4, 8, 8), DType.FLOAT64, 6)
    x = torch.from_numpy(given).requires_grad_()
    y = of_theirs(x)
    y.backward(weights_of(y))
    _, found = gradients(of_ours, {"x": given})
    np.testing.assert_allclose(found["x"], x.grad.numpy(), rtol=1e-9, atol=1e-9)


def weights_of(y: Any) -> Any:
    """What `gradients` weighs a single output with."""
    return torch.from_numpy(np.random.default_rng(1000).uniform(0.5, 1.5, y.shape))
