"""Gradient descent through a service: recover an unknown filter from an image and its filtered copy.

    python examples/fit_filter.py

No framework and no autograd: the loss |conv(x, w) - y|² / 2 has the gradient that ConvBwdFilter computes.
"""

from __future__ import annotations

import asyncio

import numpy as np

from cudnn_actor import ConvBwdFilter, ConvFwd, ConvSpec, logging, spawn
from cudnn_actor.messages import Upload


async def main(steps: int = 60) -> None:
    """Descend, printing the loss as it goes."""
    rng = np.random.default_rng(7)
    image = rng.standard_normal((1, 1, 64, 64), dtype=np.float32)
    hidden = rng.standard_normal((1, 1, 5, 5), dtype=np.float32)  # what is to be found
    conv = ConvSpec.symmetric(2, pad=2)

    async with spawn(device="auto") as gpu:
        x, secret = await gpu.upload(image), await gpu.upload(hidden)
        wanted = await gpu.download(await gpu.conv_fwd(x, secret, conv=conv))

        # The buffers of a step are made once; a step only overwrites them.
        found = np.zeros_like(hidden)
        w, dw = await gpu.upload(found), await gpu.empty(found.shape)
        residual = await gpu.empty(wanted.shape)

        for step in range(1, steps + 1):
            await gpu.ask(ConvFwd(x=x, w=w, y=residual, conv=conv))
            error = await gpu.download(residual) - wanted
            if step == 1 or step % 10 == 0:
                print(f"step {step:2}  loss {np.mean(error**2):.3e}")
            await gpu.ask(Upload(dst=residual, data=error))
            await gpu.ask(ConvBwdFilter(x=x, dy=residual, dw=dw, conv=conv))
            found -= 0.25 * await gpu.download(dw) / image.size  # the image's variance is 1: a careful step
            await gpu.ask(Upload(dst=w, data=found))

    print(f"largest difference to the hidden filter: {np.abs(found - hidden).max():.1e}")


if __name__ == "__main__":
    logging.configure()  # the services' log lines, on stderr
    asyncio.run(main())
