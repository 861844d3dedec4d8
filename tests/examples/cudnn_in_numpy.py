"""What functions of cuDNN's older API compute, in NumPy."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from cudnn_actor.protocol.operations.random import keeping, words

__all__ = [
    "Arrays",
    "affine_grid",
    "avg_pool",
    "batch_norm",
    "batch_norm_gradients",
    "blend",
    "clipped_lstm_step",
    "conv",
    "deep_image",
    "divisive",
    "divisive_of_deviations",
    "folded",
    "gradient",
    "gradients",
    "grid_sample",
    "kept",
    "lrn",
    "max_pool",
    "norm_add_relu",
    "normal",
    "of_channels",
    "recurrent",
    "relu",
    "sigmoid",
    "softmax",
    "trained",
    "windows",
]


Arrays = dict[str, Any]


def normal(*dims: int, seed: int = 0) -> Any:
    return np.random.default_rng([seed, *dims]).standard_normal(dims).astype(np.float32)


def gradient(function: Callable[[Any], Any], x: Any, dy: Any) -> Any:
    """That of a function at x, by central differences in float64."""
    x = x.astype(np.float64)
    found, step = np.empty_like(x), 1e-6
    for place in np.ndindex(x.shape):
        ahead, behind = x.copy(), x.copy()
        ahead[place] += step
        behind[place] -= step
        found[place] = np.sum((function(ahead) - function(behind)) * dy) / (2 * step)
    return found


def blend(name: str, function: Callable[..., Any], alpha: float, beta: float) -> Callable[..., Arrays]:
    """alpha * function(the arrays) + beta * the array of this name."""
    return lambda **arrays: {name: alpha * function(**arrays) + beta * arrays[name]}


def windows(x: Any, size: tuple[int, int], pad: int, stride: int = 1, value: float = 0.0) -> Any:
    """(N, C, H, W, *size): the elements of each window."""
    widths = ((0, 0), (0, 0), (pad, pad), (pad, pad))
    padded = np.pad(x.astype(np.float64), widths, constant_values=value)
    view = np.lib.stride_tricks.sliding_window_view(padded, size, axis=(2, 3))
    return view[:, :, ::stride, ::stride]


def conv(x: Any, w: Any) -> Any:
    return np.einsum("nchwij,kcij->nkhw", windows(x, w.shape[2:], 1), w)


def relu(x: Any) -> Any:
    return np.maximum(x, 0)


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def softmax(x: Any, axis: Any) -> Any:
    powers = np.exp(x - x.max(axis, keepdims=True))
    return powers / powers.sum(axis, keepdims=True)


def max_pool(x: Any) -> Any:
    return windows(x, (3, 3), 1, 2, -np.inf).max(axis=(4, 5))


def avg_pool(x: Any, include_padding: bool) -> Any:
    counts = windows(np.ones_like(x), (3, 3), 1, 2).sum(axis=(4, 5))
    return windows(x, (3, 3), 1, 2).sum(axis=(4, 5)) / (9 if include_padding else counts)


def of_channels(values: Any) -> Any:
    return values.reshape(1, -1, 1, 1)


def batch_norm(x: Any, scale: Any, bias: Any, axes: tuple[int, ...] = (0, 2, 3)) -> Any:
    mean, variance = x.mean(axes, keepdims=True), x.var(axes, keepdims=True)
    of = of_channels if len(axes) > 1 else np.asarray
    return (x - mean) / np.sqrt(variance + 1e-5) * of(scale) + of(bias)


def trained(x: Any, scale: Any, bias: Any, running_mean: Any, running_variance: Any) -> Arrays:
    mean, variance = x.mean((0, 2, 3)), x.var((0, 2, 3))
    count = x.size // x.shape[1]
    return {
        "y": batch_norm(x, scale, bias),
        "mean": mean,
        "inverse_deviation": 1 / np.sqrt(variance + 1e-5),
        "running_mean": 0.7 * running_mean + 0.3 * mean,
        "running_variance": 0.7 * running_variance + 0.3 * variance * count / (count - 1),
    }


def batch_norm_gradients(dy: Any, x: Any, scale: Any, dscale: Any, **_: Any) -> Arrays:
    zeros = np.zeros_like(scale)
    return {
        "dx": gradient(lambda x: batch_norm(x, scale, zeros), x, dy),
        "dscale": 2.0 * gradient(lambda scale: batch_norm(x, scale, zeros), scale, dy) + 0.5 * dscale,
        "dbias": dy.sum((0, 2, 3)),
    }


def norm_add_relu(x: Any, z: Any, scale: Any, bias: Any) -> Any:
    return relu(batch_norm(x, scale, bias) + z)


def lrn(x: Any) -> Any:
    squares = np.pad(x.astype(np.float64) ** 2, ((0, 0), (2, 2), (0, 0), (0, 0)))
    sums = np.lib.stride_tricks.sliding_window_view(squares, 5, axis=1).sum(-1)
    return x / (2.0 + 1e-2 / 5 * sums) ** 0.75


def divisive(x: Any) -> Any:
    return x / (2.0 + 1e-2 / 9 * windows(x**2, (3, 3), 1).sum(axis=(4, 5))) ** 0.75


def divisive_of_deviations(x: Any, means: Any) -> Any:
    inside = windows(np.ones_like(x), (3, 3), 1)
    off = (windows(x, (3, 3), 1) - means[..., None, None]) * inside
    return x / (2.0 + 1e-2 / 9 * (off**2).sum(axis=(4, 5))) ** 0.75


def recurrent(*, x: Any, h0: Any, w_ih: Any, w_hh: Any, b_ih: Any = 0.0, b_hh: Any = 0.0) -> Any:
    states, h = [], h0[0].astype(np.float64)
    for step in x:
        h = np.tanh(step @ w_ih.T + b_ih + h @ w_hh.T + b_hh)
        states.append(h)
    return np.stack(states)


def kept(dims: tuple[int, ...], state: Any) -> Any:
    """1 where dropout keeps an element, which is divided by the probability of that."""
    return (words(np, state, 0, math.prod(dims)) < keeping(0.75)).reshape(dims) / 0.75


def affine_grid(theta: Any) -> Any:
    rows, columns = np.meshgrid(np.linspace(-1, 1, 5), np.linspace(-1, 1, 4), indexing="ij")
    return np.einsum("nij,hwj->nhwi", theta, np.stack([columns, rows, np.ones_like(rows)], axis=-1))


def grid_sample(x: Any, grid: Any) -> Any:
    n, c, *sizes = x.shape
    found = np.zeros((n, c, *grid.shape[1:3]))
    places = [(grid[..., 1 - d] + 1) / 2 * (sizes[d] - 1) for d in range(2)]
    for corner in itertools.product((0, 1), repeat=2):
        near = [np.floor(place).astype(int) + of for place, of in zip(places, corner, strict=True)]
        weight = math.prod(1 - abs(place - of) for place, of in zip(places, near, strict=True))
        inside = math.prod((of >= 0) & (of < size) for of, size in zip(near, sizes, strict=True))
        row, column = (np.clip(of, 0, size - 1) for of, size in zip(near, sizes, strict=True))
        values = x[np.arange(n)[:, None, None], :, row, column]  # (N, H, W, C)
        found += np.moveaxis(values * (weight * inside)[..., None], -1, 1)
    return found


def gradients(function: Callable[..., Any], *names: str) -> Callable[..., Arrays]:
    """From the arguments of a function and dy: the gradients of those with these names."""

    def found(dy: Any, **arrays: Any) -> Arrays:
        def along(name: str) -> Any:
            return gradient(lambda value: function(**{**arrays, name: value}), arrays[name], dy)

        return {f"d{name}": along(name) for name in names}

    return found


def deep_image(deep: Any) -> Any:
    return deep.reshape(2, 2, 4, 15)


def folded(x: Any, rows: int, columns: int) -> Any:
    """The channels of each place in a block, one place behind the other."""
    return np.concatenate([x[:, :, i::rows, j::columns] for i in range(rows) for j in range(columns)], axis=1)


def clipped_lstm_step(*, x: Any, h: Any, c: Any, w_ih: Any, w_hh: Any, b: Any) -> Arrays:
    write, forget, new, read = np.split(x @ w_ih.T + h @ w_hh.T + b, 4, axis=1)
    new_c = np.clip(sigmoid(forget) * c + sigmoid(write) * np.tanh(new), -0.5, 0.5)
    return {"new_h": sigmoid(read) * np.tanh(new_c), "new_c": new_c}
