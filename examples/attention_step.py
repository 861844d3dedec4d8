"""A training step of layer norm and attention: forward with statistics, backward, and a step downhill.

    python examples/attention_step.py

No framework and no autograd: each operation has a message for its gradients. NumPy checks them: along its
gradient, a function rises as steeply as the gradient is long.
"""

from __future__ import annotations

import asyncio

import numpy as np

from cudnn_actor import logging, spawn
from cudnn_actor.operations import Attention, AttentionBackward, LayerNorm, LayerNormBackward

Arrays = dict[str, np.ndarray]


async def main() -> None:
    """Compute five gradients, check each, and descend along all of them."""
    rng = np.random.default_rng(3)
    x, k, v, target = rng.standard_normal((4, 2, 4, 16, 32), dtype=np.float32)  # each B, H, S, D
    values = {"x": x, "scale": np.ones(32, np.float32), "bias": np.zeros(32, np.float32), "k": k, "v": v}

    async with spawn(device="auto") as gpu:
        refs = {name: await gpu.upload(array) for name, array in values.items()}

        # Forward: `also` names the outputs that the gradients need.
        norm = LayerNorm(x=refs["x"], scale=refs["scale"], bias=refs["bias"])
        q, mean, inverse = await gpu.apply(norm, also=("mean", "inverse_deviation"))
        attention = Attention(q=q, k=refs["k"], v=refs["v"], causal=True)
        y, statistics = await gpu.apply(attention, also=("statistics",))

        error = await gpu.download(y) - target  # the gradient of |y - target|² / 2
        dy = await gpu.upload(error)
        print(f"loss {(error**2).sum() / 2:.2f}")

        # Backward: what the forward pass read and wrote, and the gradient of its result.
        of_attention = AttentionBackward(
            dy=dy, q=q, k=refs["k"], v=refs["v"], y=y, statistics=statistics, causal=True
        )
        dq, dk, dv = await gpu.apply(of_attention)
        of_norm = LayerNormBackward(
            dy=dq, x=refs["x"], scale=refs["scale"], mean=mean, inverse_deviation=inverse
        )
        dx, dscale, dbias = await gpu.apply(of_norm, also=("dscale", "dbias"))

        after = {}
        for name, ref in zip(values, (dx, dscale, dbias, dk, dv), strict=True):
            gradient = await gpu.download(ref)
            length, rise = np.linalg.norm(gradient), slope(values, target, name, gradient)
            print(f"gradient of {name:5}  norm {length:.4f}, by NumPy {rise:.4f}")
            after[name] = values[name] - 0.1 * gradient
            await gpu.write(refs[name], after[name])  # for the next step
    print(f"loss {loss(after, target):.2f} after the step")


def slope(values: Arrays, target: np.ndarray, name: str, gradient: np.ndarray) -> float:
    """How steeply the loss rises along a gradient: a difference quotient, computed by NumPy in float64."""
    step = 1e-4 * gradient.astype(np.float64) / np.linalg.norm(gradient)
    above, below = (loss({**values, name: values[name] + sign * step}, target) for sign in (1, -1))
    return (above - below) / 2e-4


def loss(values: Arrays, target: np.ndarray) -> float:
    """The loss by its definition."""
    x, scale, bias, k, v = (array.astype(np.float64) for array in values.values())
    deviation = np.sqrt(x.var(axis=-1, keepdims=True) + 1e-5)
    q = (x - x.mean(axis=-1, keepdims=True)) / deviation * scale + bias
    weights = np.exp(q @ k.swapaxes(2, 3) / np.sqrt(q.shape[3])) * np.tri(q.shape[2], k.shape[2])
    y = weights / weights.sum(axis=-1, keepdims=True) @ v
    return float(((y - target) ** 2).sum() / 2)


if __name__ == "__main__":
    logging.configure()  # the services' log lines, on stderr
    asyncio.run(main())
