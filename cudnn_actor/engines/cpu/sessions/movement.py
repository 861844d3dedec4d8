"""Operations that move elements without changing them, as ONNX nodes."""

from __future__ import annotations

import numpy as np

from cudnn_actor.engines.cpu.sessions.draft import Draft, refuse
from cudnn_actor.protocol.operations import (
    BorderPad,
    Concat,
    Gather,
    GatherElements,
    GatherND,
    Pad,
    PadMode,
    Reshape,
    Slice,
    Transpose,
)
from cudnn_actor.protocol.types.dtypes import DType

__all__ = [
    "emit_border_pad",
    "emit_concat",
    "emit_gather",
    "emit_gather_elements",
    "emit_gather_nd",
    "emit_pad",
    "emit_reshape",
    "emit_slice",
    "emit_transpose",
]

_BEFORE_THE_FIRST = -(1 << 62)


def emit_reshape(draft: Draft, operation: Reshape[int]) -> None:
    """Write other dims."""
    dims = draft.list_of(draft.dims(operation.y))
    draft.write(operation.y, draft.emit("Reshape", draft.read(operation.x), dims), rounded=True)


def emit_transpose(draft: Draft, operation: Transpose[int]) -> None:
    """Write another order of dims."""
    x = draft.read(operation.x)
    axes = [axis % len(operation.axes) for axis in operation.axes]
    draft.write(operation.y, draft.emit("Transpose", x, perm=axes) if axes else x, rounded=True)


def emit_slice(draft: Draft, operation: Slice[int]) -> None:
    """Write evenly spaced elements."""
    dims, x = draft.dims(operation.x), draft.read(operation.x)
    given = zip(operation.starts, operation.steps, operation.sizes, dims, strict=True)
    cut = [
        (axis, start, step, size)
        for axis, (start, step, size, dim) in enumerate(given)
        if (start, step, size) != (0, 1, dim)
    ]
    if cut:
        ends = []
        for _, start, step, size in cut:
            end = start + (size - 1) * step + (1 if step > 0 else -1)
            ends.append(end if end >= 0 else _BEFORE_THE_FIRST)
        axes, starts, steps, _ = zip(*cut, strict=True)
        x = draft.emit("Slice", x, *map(draft.list_of, (starts, ends, axes, steps)))
    draft.write(operation.y, x, rounded=True)


def emit_concat(draft: Draft, operation: Concat[int]) -> None:
    """Write tensors one behind the other."""
    operands = map(draft.read, operation.operands)
    draft.write(operation.y, draft.emit("Concat", *operands, axis=operation.axis), rounded=True)


def emit_pad(draft: Draft, operation: Pad[int]) -> None:
    """Write numbers around a tensor."""
    if any(step != 1 for step in operation.steps):
        refuse("padding between elements")
    pads = draft.list_of((*operation.before, *operation.after))
    given = draft.type_of(operation.x)
    if given in (DType.INT16, DType.UINT16):
        refuse(f"padding of {given}")
    value = operation.value
    if draft.graph.tensor(operation.x).dtype.is_half:  # what is there is rounded, too
        value = float(np.float64(value).astype(draft.graph.tensor(operation.x).dtype.numpy))
    number = draft.constant(np.array(value).astype(given.numpy))
    found = draft.emit("Pad", draft.read(operation.x), pads, number)
    draft.write(operation.y, found, rounded=True)


_PAD_MODES = {PadMode.EDGE: "edge", PadMode.REFLECT: "reflect", PadMode.WRAP: "wrap"}


def emit_border_pad(draft: Draft, operation: BorderPad[int]) -> None:
    """Write a tensor's own elements around it."""
    mode, dims = operation.mode, draft.dims(operation.x)
    reach = [size - 1 if mode is PadMode.REFLECT else size for size in dims]
    widths = zip((*operation.before, *operation.after), (*reach, *reach), strict=True)
    if mode not in _PAD_MODES or (mode is not PadMode.EDGE and any(width > most for width, most in widths)):
        refuse(f"padding by {mode}, or by more than the tensor has")
    if draft.type_of(operation.x) in (DType.INT16, DType.UINT16):
        refuse(f"padding of {draft.type_of(operation.x)}")
    pads = draft.list_of((*operation.before, *operation.after))
    found = draft.emit("Pad", draft.read(operation.x), pads, mode=_PAD_MODES[mode])
    draft.write(operation.y, found, rounded=True)


# Elements that indices name. ONNX has no index out of range; ours count as the nearest in range.


def emit_gather(draft: Draft, operation: Gather[int]) -> None:
    """Write slices along an axis."""
    if operation.batch_dims:
        refuse("a gather with dims in common")
    dims = draft.dims(operation.x)
    axis = operation.axis % len(dims)
    indices = _inside(draft, operation.indices, draft.number(dims[axis], DType.INT64))
    found = draft.emit("Gather", draft.read(operation.x), indices, axis=axis)
    draft.write(operation.y, found, rounded=True)


def emit_gather_elements(draft: Draft, operation: GatherElements[int]) -> None:
    """Write single elements along an axis."""
    dims = draft.dims(operation.x)
    axis = operation.axis % len(dims)
    indices = _inside(draft, operation.indices, draft.number(dims[axis], DType.INT64))
    found = draft.emit("GatherElements", draft.read(operation.x), indices, axis=axis)
    draft.write(operation.y, found, rounded=True)


def emit_gather_nd(draft: Draft, operation: GatherND[int]) -> None:
    """Write the parts that lists of indices name."""
    count = draft.dims(operation.indices)[-1]
    sizes = draft.dims(operation.x)[operation.batch_dims :][:count]
    indices = _inside(draft, operation.indices, draft.list_of(sizes))
    found = draft.emit("GatherND", draft.read(operation.x), indices, batch_dims=operation.batch_dims)
    draft.write(operation.y, found, rounded=True)


def _inside(draft: Draft, uid: int, sizes: str) -> str:
    """Indices as places from 0: those below 0 count from the end, and all are in range."""
    indices, zero = draft.read(uid), draft.number(0, DType.INT64)
    if draft.type_of(uid) is not DType.INT64:
        indices = draft.cast(indices, DType.INT64)
    counted = draft.emit("Add", indices, sizes)
    places = draft.emit("Where", draft.emit("Less", indices, zero), counted, indices)
    last = draft.emit("Sub", sizes, draft.number(1, DType.INT64))
    return draft.emit("Min", draft.emit("Max", places, zero), last)
