"""The first fifteen lines: spawn a service, convolve an image, look at the receipt.

    python examples/async_client.py

`device="auto"` takes a GPU where there is one that works, else the CPU.
"""

from __future__ import annotations

import asyncio

import numpy as np

from cudnn_actor import ConvFwd, ConvSpec, logging, spawn


async def main() -> None:
    """Run eight random 3x3 filters over an image of three colours."""
    rng = np.random.default_rng(0)
    image = rng.random((1, 3, 224, 224), dtype=np.float32)  # N, C, height, width: always in this order
    kernel = rng.standard_normal((8, 3, 3, 3), dtype=np.float32)  # filters, channels, height, width

    async with spawn(device="auto") as gpu:
        # Arrays are copied into buffers of the service; what you hold are references to them.
        x = await gpu.upload(image, layout="NHWC")  # the layout is how the buffer lies in memory
        w = await gpu.upload(kernel, layout="NHWC")
        y = await gpu.empty((1, 8, 222, 222), dtype="float32", layout="NHWC")

        receipt = await gpu.ask(ConvFwd(x=x, w=w, y=y, conv=ConvSpec.symmetric(2)))

        out = await gpu.download(y)
        await gpu.free(y)

    print(f"shape {out.shape}, dtype {out.dtype}")
    print(f"plan {receipt.plan}, generation {receipt.generation}, ran for {receipt.run_us:.0f} µs")


if __name__ == "__main__":
    logging.configure()  # the services' log lines, on stderr
    asyncio.run(main())
