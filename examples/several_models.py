"""Several models in one service: a limit of memory for all, and a limit of waiting requests for each.

    python examples/several_models.py

It needs the package onnx: `pip install -e ".[onnx]"` in a clone.
"""

from __future__ import annotations

import asyncio
import contextlib

import numpy as np
from onnx import ModelProto, TensorProto, helper, numpy_helper

from cudnn_actor import MailboxFull, OutOfMemory, spawn

MIB = 1 << 20
ONES = np.ones((1, 256), np.float32)


async def main() -> None:
    """Flood one of two models, find no room for a third, and make room."""
    async with spawn(device="auto", memory_limit=80 * MIB) as gpu:
        left = await gpu.load(product("left", 28), dims={"N": 1})
        right = await gpu.load(product("right", 28), dims={"N": 1})
        async with (
            gpu.batched(left, max_batch=8, max_waiting=32) as busy,
            gpu.batched(right, max_batch=8) as quiet,
        ):
            answers: list[asyncio.Future[dict[str, np.ndarray]]] = []
            with contextlib.suppress(MailboxFull):  # a server answers 503
                while len(answers) < 500:
                    answers.append(busy.submit(x=ONES, timeout=20))
            await asyncio.gather(quiet(x=ONES, timeout=20), *answers)
            print(f"left: {len(answers)} answered, and the next refused at once; right: answered")
        try:
            await gpu.load(product("third", 28), dims={"N": 1})
        except OutOfMemory as error:
            print(f"no room for a third; may be sent again: {error.retry_safe}")
        await left.close()  # frees its weights
        third = await gpu.load(product("third", 28), dims={"N": 1})
        for model in (right, third):
            outputs = await gpu.run(model, x=ONES)
            print(f"{model.nbytes / MIB:g} MiB of weights, y {outputs['y'][0, 0]:g}")
            await model.close()


def product(name: str, mib: int) -> ModelProto:
    """A model of one product, whose weights take this many MiB."""
    weights = numpy_helper.from_array(np.ones((256, mib * 1024), np.float32), "w")
    dims = {"x": 256, "y": mib * 1024}
    ports = [helper.make_tensor_value_info(port, TensorProto.FLOAT, ("N", n)) for port, n in dims.items()]
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    graph = helper.make_graph(nodes, name, ports[:1], ports[1:], [weights])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)])


if __name__ == "__main__":
    asyncio.run(main())
