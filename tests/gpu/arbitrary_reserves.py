"""Gradients of recurrent layers from reserves that no layer of theirs wrote: any bytes, or another layer's.

python -m tests.gpu.arbitrary_reserves

Also under compute-sanitizer. The engine is on a thread of this process. Behind each, the layer is trained
with its own reserve, and has the gradients that it should have.
"""

from __future__ import annotations

import asyncio

import numpy as np

from cudnn_actor import CudnnRef, spawn

from ..engines.references import relative_error
from ..service.trained_layers import LAYERS, Layer

__all__ = ["main"]

_BOUND = 2e-5


async def _kept_by(gpu: CudnnRef, layer: Layer) -> np.ndarray:
    """The bytes that another layer keeps."""
    on = await layer.on(gpu)
    await on.train()
    assert on.data.reserve is not None
    return await gpu.download(on.data.reserve)


async def _misuse(gpu: CudnnRef, name: str, layer: Layer) -> None:
    on = await layer.on(gpu)
    found = await on.train()
    reserve, slopes = on.data.reserve, on.data.slopes
    assert reserve is not None
    assert slopes is not None
    rng = np.random.default_rng(1)
    nbytes = reserve.spec.size
    others = {
        "random": rng.integers(0, 256, nbytes),
        "ones": np.full(nbytes, 0xFF),
        "zeros": np.zeros(nbytes),
        "large": np.full(nbytes, 0x7F),
    }
    others |= {
        f"of {key}": np.resize(await _kept_by(gpu, other), nbytes)
        for key, other in LAYERS.items()
        if other is not layer
    }
    for kind, array in others.items():
        for into in (reserve, slopes):
            await gpu.write(into, array.astype(np.uint8))
        await gpu.ask(on.weights)
        await gpu.ask(on.data)
        await gpu.ask(on.weights)
        print(name, kind, flush=True)  # noqa: T201 - the last one is what did harm
    for key, each in (await on.train()).items():
        assert relative_error(each, found[key]) < _BOUND, key


async def _run() -> None:
    async with spawn(device="cuda:0", isolation="thread", hang_after_s=600.0) as gpu:
        for name, layer in LAYERS.items():
            await _misuse(gpu, name, layer)
            assert gpu.generation == 1
    print("unharmed")  # noqa: T201


def main() -> None:
    """See above."""
    asyncio.run(_run())


if __name__ == "__main__":
    main()
