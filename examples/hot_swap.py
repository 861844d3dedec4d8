"""New weights, then a new file, while clients run a model: each run is wholly of one of them, and none fails.

    python examples/hot_swap.py

It needs the package onnx: `pip install -e ".[onnx]"` in a clone.
"""

from __future__ import annotations

import asyncio

import numpy as np
import onnx.parser

from cudnn_actor import CudnnRef, spawn
from cudnn_actor.models import Model

TEXT = """<ir_version: 10, opset_import: ["" : 21]>
scaled (float[N, 2] x) => (float[N, 2] y) <float[2] w = {1, 2}> { y = Mul(x, w) }
"""
X = np.ones((1, 2), np.float32)


async def main() -> None:
    """Run the model in eight tasks, and change it under them."""
    async with spawn(device="auto") as gpu:
        # Only weights of a model that is loaded with swappable=True may be overwritten.
        model = await gpu.load(onnx.parser.parse_model(TEXT), swappable=True, dims={"N": 1})
        async with asyncio.TaskGroup() as group:
            clients = [group.create_task(client(gpu, model)) for _ in range(8)]
            print(f"loaded: {await answer(gpu, model)}")
            await model.write({"w": np.array([10, 20], np.float32)})
            print(f"written: {await answer(gpu, model)}")
            await gpu.load(onnx.parser.parse_model(TEXT.replace("{1, 2}", "{3, 4}")), replace=model)
            print(f"replaced: {await answer(gpu, model)}")
        for task in clients:
            print(f"a client got {', then '.join(task.result())}")
        await model.close()


async def client(gpu: CudnnRef, model: Model) -> list[str]:
    """Run the model until the new file answers. Returns the answers that differ from the one before."""
    answers: list[str] = []
    while answers[-1:] != ["3 4"]:
        now = await answer(gpu, model)
        if answers[-1:] != [now]:
            answers.append(now)
    return answers


async def answer(gpu: CudnnRef, model: Model) -> str:
    """What one run gives."""
    outputs = await gpu.run(model, x=X)
    return " ".join(f"{value:g}" for value in outputs["y"][0])


if __name__ == "__main__":
    asyncio.run(main())
