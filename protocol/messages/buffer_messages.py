"""Buffers: their memory and the values in them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from cudnn_actor.protocol.messages.any_message import AnyMessage
from cudnn_actor.protocol.messages.receipts import Receipt
from cudnn_actor.protocol.types.buffers import BufferRef
from cudnn_actor.protocol.types.device_array import DeviceArray
from cudnn_actor.protocol.types.tensor import TensorSpec

__all__ = ["Allocate", "Copy", "Download", "Fill", "Free", "LendStaging", "Upload", "View"]

if TYPE_CHECKING:
    Values = np.ndarray | DeviceArray
    """Values on the host, or on the target device."""
else:
    Values = np.ndarray  # for the codec: a device array is meaningless in another process


class Allocate(AnyMessage[BufferRef], tag=True, eq=False):
    """Allocate a buffer; answered by its `BufferRef`. Contents are undefined unless `data` is given.

    Parameters
    ----------
    spec
        The buffer's shape in memory.
    data
        Values of dims `spec.dims`, with any strides. Host values are cast to the spec's dtype within the
        same kind; device values must already have it.
    """

    spec: TensorSpec
    data: Values | None = None


class Upload(AnyMessage[Receipt], tag=True, eq=False):
    """Overwrite `dst` with values of the same dims, as in `Allocate`. Answered by a `Receipt`.

    The array must not change until the reply: the actor reads it, and the sender does not copy it.
    """

    dst: BufferRef
    data: Values


class Download(AnyMessage[np.ndarray], tag=True):
    """Copy a buffer to the host: answered by a new C-contiguous array of dims `src.spec.dims`."""

    src: BufferRef


class View(AnyMessage[Any], tag=True):
    """Ask for the buffer itself, as an array of the device's own array library; thread isolation only.

    Answered once all earlier work that uses the buffer is done. The answer is an array on the buffer's
    memory, with its dims and strides: NumPy's on the CPU, CuPy's on CUDA. While the array, or anything that
    shares its memory, exists, the memory is not given to another buffer, not even after a `Free`.
    """

    buffer: BufferRef


class Copy(AnyMessage[Receipt], tag=True):
    """Copy `src` to `dst`: same dims and dtype, any layouts, different buffers. Answered by a `Receipt`."""

    src: BufferRef
    dst: BufferRef


class Fill(AnyMessage[Receipt], tag=True):
    """Set every element of `dst` to `value`. Answered by a `Receipt`.

    Floating-point dtypes round to nearest; integers take whole numbers in their range, exactly; bool takes
    False, True, 0 and 1.
    """

    dst: BufferRef
    value: bool | int | float


class LendStaging(AnyMessage[np.ndarray], tag=True):
    """Ask for host memory that the device reads without a copy; answered by an array with dims `spec.dims`.

    The array is C-contiguous, and its contents are undefined. It may be filled and passed to runs of models
    and to `Upload` as often as is wanted, as a whole or in leading parts; it must not change until these are
    answered. Its memory is given back when the array, and all that shares its memory, has been collected.
    """

    spec: TensorSpec


class Free(AnyMessage[None], tag=True):
    """Free a buffer once work sent before is done. Answered by None; later uses get `StaleBufferError`."""

    buffer: BufferRef
