"""What the tests of the chaos harness share: deeds to be judged."""

from __future__ import annotations

import concurrent.futures

import numpy as np

from cudnn_actor.protocol import (
    BufferRef,
    ConvFwd,
    ConvSpec,
    Copy,
    Download,
    Fill,
    MaxPool,
    Receipt,
    TensorSpec,
    Window,
)
from cudnn_actor.trials.chaos.oracle import After, Contents, Deed, Model

__all__ = [
    "RECEIPT",
    "Asked",
    "accumulation",
    "buffer",
    "copy",
    "download",
    "fill",
    "two_outputs",
    "values",
]

RECEIPT = Receipt(request_id=1, generation=1, plan="cpu", queue_us=1.0, run_us=1.0)
DIMS = (1, 1, 2, 2)


Asked = concurrent.futures.Future[None]
"""A request on its way, for ever."""


def values(*given: float) -> np.ndarray:
    return np.array(given, np.float32).reshape(DIMS)


def buffer(slot: int, contents: Contents = None) -> Model:
    ref = BufferRef(slot=slot, generation=1, spec=TensorSpec.packed(DIMS, "float32"), device="cpu")
    return Model(ref, contents)


def download(model: Model) -> Deed:
    return Deed(Download(src=model.ref), (model,))


def fill(
    model: Model, value: float, *, timeout_s: float | None = None, cancel_after_s: float | None = None
) -> Deed:
    held = np.full(DIMS, value, np.float32)
    deed = Deed(Fill(dst=model.ref, value=value), (model,), {model: lambda: (held,)})
    deed.timeout_s, deed.cancel_after_s = timeout_s, cancel_after_s
    return deed


def copy(src: Model, dst: Model) -> Deed:
    return Deed(Copy(src=src.ref, dst=dst.ref), (src, dst), {dst: lambda: src.contents})


def accumulation(model: Model, amount: np.ndarray, *, cancel_after_s: float | None = None) -> Deed:
    """Of a convolution whose result is `amount`: its operands do not matter to a judge."""
    x, w = buffer(100), buffer(101)
    message = ConvFwd(x=x.ref, w=w.ref, y=model.ref, conv=ConvSpec.symmetric(2), beta=1.0)

    def after() -> Contents:
        return None if model.contents is None else tuple(held + amount for held in model.contents)

    uses = (x, w, model)
    return Deed(message, uses, {model: after}, accumulates=True, cancel_after_s=cancel_after_s)


def two_outputs(y: Model, index: Model, *, cancel_after_s: float | None = None) -> Deed:
    """Of a max pooling that gives 1 and 2: its input does not matter to a judge."""
    x = buffer(100)
    message = MaxPool(x=x.ref, y=y.ref, index=index.ref, window=Window.symmetric(2, size=1))
    ones, twos = values(1, 1, 1, 1), values(2, 2, 2, 2)
    writes: dict[Model, After] = {y: lambda: (ones,), index: lambda: (twos,)}
    return Deed(message, (x, y, index), writes, cancel_after_s=cancel_after_s)
