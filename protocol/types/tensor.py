"""Shapes in memory: dims, strides, dtype, alignment.

Dims are always in the order N, C, then the spatial dims; only strides express
the layout, as in cuDNN. Strides count elements, not bytes.
https://docs.nvidia.com/deeplearning/cudnn/latest/developer/core-concepts.html
"""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Iterable, Sequence
from typing import ClassVar, Literal, TypeGuard

import numpy as np

from cudnn_actor.protocol.errors import InvalidRequest
from cudnn_actor.protocol.types.checks import are_ints, as_index, did_you_mean, is_whole, require_awaited
from cudnn_actor.protocol.types.dtypes import DType, DTypeLike
from cudnn_actor.protocol.types.records import Parameters

__all__ = [
    "MAX_ALIGNMENT",
    "MAX_BYTES",
    "MAX_RANK",
    "Layout",
    "LayoutLike",
    "LayoutName",
    "TensorSpec",
    "packed_nbytes",
    "packed_strides",
    "settled_strides",
    "whole_numbers",
]

MAX_RANK = 8
MAX_STRIDE = (1 << 63) - 1
"""Strides are 64-bit numbers, in cuDNN and on the wire."""
MAX_BYTES = 1 << 48
"""The most bytes that a tensor may span: the address space of a device."""
MIN_ALIGNMENT = 16
MAX_ALIGNMENT = 256
"""Buffers start at multiples of this many bytes, so no spec can require more."""
_MOST_PACKED = 1024
"""The most specs of packed tensors that are kept."""


class Layout(enum.StrEnum):
    """How a tensor's elements lie in memory."""

    NCHW = "NCHW"
    """Packed, the last spatial dim fastest, whatever the rank (so also NCW and NCDHW)."""
    NHWC = "NHWC"
    """Packed, channels fastest, whatever the rank (so also NWC and NDHWC)."""
    STRIDED = "STRIDED"
    """Given by explicit strides."""


_PACKED = (Layout.NCHW, Layout.NHWC)

LayoutName = Literal["NCHW", "NHWC"]
"""The name of a packed layout; for type checkers."""
LayoutLike = Layout | LayoutName


def packed_strides(dims: Sequence[int], layout: LayoutLike = Layout.NCHW) -> tuple[int, ...]:
    """Strides, in elements, of a packed tensor of `dims` in `layout`.

    Dims of 0 count as 1, so that strides are at least 1. Raises `InvalidRequest` for STRIDED, which does not
    determine strides, and for NHWC outside ranks 3-5.
    """
    layout = _layout(layout)
    # The strides of NumPy's numbers are not ints: they must not share an entry with those of ints.
    return _cached_strides(dims, layout) if are_ints(dims) else _strides(dims, layout)


def _strides(dims: Sequence[int], layout: Layout) -> tuple[int, ...]:
    """See `packed_strides`."""
    rank = len(dims)
    order: Iterable[int] = range(rank)
    if layout is Layout.STRIDED:
        raise InvalidRequest(
            field="layout",
            value=layout.value,
            problem="does not determine strides",
            fix="give the strides yourself: TensorSpec.strided(...)",
        )
    if layout is Layout.NHWC:
        if not 3 <= rank <= 5:
            raise InvalidRequest(
                field="layout",
                value=layout.value,
                problem=f"needs 3 to 5 dims, not {rank}",
                fix="use NCHW for other ranks",
            )
        order = (0, *range(2, rank), 1)
    strides = [0] * rank
    step = 1
    for axis in reversed(tuple(order)):
        strides[axis] = step
        step *= max(dims[axis], 1)
    return tuple(strides)


_cached_strides = functools.lru_cache(_MOST_PACKED)(_strides)


class TensorSpec(Parameters):
    """A tensor's shape in memory.

    Parameters
    ----------
    dims
        0 to 8 sizes, each at least 0, in the order N, C, spatial. Without dims it has one element; with a dim
        of 0 it has none.
    strides
        One per dim, in elements, 1 to 2**63 - 1; no two elements may overlap.
    dtype
        The element type.
    alignment
        Bytes that the first element's address is a multiple of: a power of two, 16 to 256.

    Raises
    ------
    InvalidRequest
        A field is not as described above; the text names it.
    """

    example: ClassVar[str] = "TensorSpec.packed(dims, dtype)"
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: DType
    alignment: int = MIN_ALIGNMENT

    def __post_init__(self) -> None:
        _check_dims(self.dims)
        if not isinstance(self.dtype, DType):
            raise InvalidRequest(
                field="dtype",
                value=self.dtype,
                problem="is not a DType",
                fix=f"use one of {', '.join(f'DType.{member.name}' for member in DType)}; "
                "TensorSpec.packed and TensorSpec.strided take their names too",
            )
        _check_strides(self.dims, self.strides)
        a = self.alignment
        if not is_whole(a) or a < MIN_ALIGNMENT or a > MAX_ALIGNMENT or a & (a - 1):
            raise InvalidRequest(
                field="alignment",
                value=a,
                problem="must be a power of two from 16 to 256",
                fix="buffers are 256-byte aligned; leave it at 16",
            )
        if self.nbytes > MAX_BYTES:
            raise InvalidRequest(
                field="dims",
                value=self.dims,
                problem=f"spans {self.nbytes:,} bytes, over the limit of 2**48",
                fix="split the tensor",
            )

    @classmethod
    def packed(
        cls,
        dims: Sequence[int],
        dtype: DTypeLike = DType.FLOAT32,
        layout: LayoutLike = Layout.NCHW,
    ) -> TensorSpec:
        """The spec of a packed tensor with `dims` (in N, C, spatial order) in `layout`."""
        return _pack(cls, whole_numbers("dims", dims), _layout(layout), _dtype(dtype))

    @classmethod
    def strided(
        cls, dims: Sequence[int], strides: Sequence[int], dtype: DTypeLike = DType.FLOAT32
    ) -> TensorSpec:
        """The spec of a tensor with explicit `strides`, in elements."""
        return cls(
            dims=whole_numbers("dims", dims), strides=whole_numbers("strides", strides), dtype=_dtype(dtype)
        )

    @classmethod
    def like(cls, array: np.ndarray) -> TensorSpec:
        """The spec that describes a NumPy array as it lies in memory.

        Raises `InvalidRequest` if its byte strides are not multiples of the element size (as in a field of a
        packed record) or are negative.
        """
        dtype = _dtype(array.dtype)
        if array.size and any(step % array.itemsize for step in array.strides):
            raise InvalidRequest(
                field="strides",
                value=array.strides,
                problem=f"are misaligned: not multiples of the {array.itemsize}-byte element",
                fix="copy the array first: np.ascontiguousarray(array)",
            )
        steps = tuple(step // array.itemsize for step in array.strides)
        return cls.strided(array.shape, settled_strides(array.shape, steps), dtype)

    @property
    def rank(self) -> int:
        """The number of dims."""
        return len(self.dims)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.dims)

    @property
    def nbytes(self) -> int:
        """Bytes from the first element to the end of the last, gaps included."""
        if 0 in self.dims:
            return 0
        last = sum((d - 1) * s for d, s in zip(self.dims, self.strides, strict=True))
        return (last + 1) * self.dtype.itemsize

    @property
    def layout(self) -> Layout:
        """NCHW or NHWC if the strides are packed in that layout (NCHW if in both), else STRIDED."""
        if self.strides == packed_strides(self.dims, Layout.NCHW):
            return Layout.NCHW
        if 3 <= self.rank <= 5 and self.strides == packed_strides(self.dims, Layout.NHWC):
            return Layout.NHWC
        return Layout.STRIDED

    def __str__(self) -> str:
        dims = "x".join(map(str, self.dims))
        return f"{self.dtype.value}[{dims}] {self.layout.value}"

    def __repr__(self) -> str:
        strides = f" {self.strides}" if self.layout is Layout.STRIDED else ""
        aligned = "" if self.alignment == MIN_ALIGNMENT else f", aligned to {self.alignment} bytes"
        return f"<{self}{strides}{aligned}>"


@functools.lru_cache(_MOST_PACKED)
def _pack(cls: type[TensorSpec], dims: tuple[int, ...], layout: Layout, dtype: DType) -> TensorSpec:
    """See `TensorSpec.packed`. An import of a model asks for the same few many times."""
    _check_dims(dims)
    return cls(dims=dims, strides=packed_strides(dims, layout), dtype=dtype)


def packed_nbytes(spec: TensorSpec) -> int:
    """Bytes of a tensor's values, without gaps between them."""
    return spec.size * spec.dtype.itemsize


def settled_strides(dims: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """The strides, with those of a packed tensor for dims of size 1.

    NumPy's strides of such dims may be anything, even 0 or negative, and so may all strides of an array
    without elements.
    """
    if 0 in dims:
        return packed_strides(dims)
    for layout in (Layout.NCHW, Layout.NHWC) if 3 <= len(dims) <= 5 else (Layout.NCHW,):
        packed = packed_strides(dims, layout)
        if all(d == 1 or s == p for d, s, p in zip(dims, strides, packed, strict=True)):
            return packed
    return tuple(1 if d == 1 else s for d, s in zip(dims, strides, strict=True))


def whole_numbers(field: str, values: object) -> tuple[int, ...]:
    """Whole numbers as a tuple of ints: NumPy's are accepted, floats and strings are not."""
    if are_ints(values):
        return values
    try:
        return tuple(as_index(value) for value in values)  # type: ignore[attr-defined]
    except TypeError:
        require_awaited(field, values)
        raise InvalidRequest(
            field=field,
            value=values,
            problem="must be a sequence of whole numbers",
            fix=f"give {field}=x.dims, where x is the tensor"
            if hasattr(type(values), "dims")
            else f"give a tuple such as {field}=(1, 2, 3)",
        ) from None


def _are_whole(numbers: object) -> TypeGuard[tuple[int, ...]]:
    """Whether numbers are a tuple of whole numbers."""
    return are_ints(numbers) or (isinstance(numbers, tuple) and all(map(is_whole, numbers)))


def _check_dims(dims: object) -> None:
    if not _are_whole(dims) or len(dims) > MAX_RANK:
        raise InvalidRequest(
            field="dims",
            value=dims,
            problem="must be a tuple of 0 to 8 whole numbers",
            fix="give the dims in the order N, C, spatial",
        )
    if min(dims, default=0) < 0:
        raise InvalidRequest(
            field="dims", value=dims, problem="contains a size below 0", fix="make every dim at least 0"
        )
    if math.prod(d for d in dims if d) > MAX_BYTES:  # the strides of a tensor without elements count, too
        raise InvalidRequest(
            field="dims", value=dims, problem="overflows: more than 2**48 elements", fix="split the tensor"
        )


def _check_strides(dims: tuple[int, ...], strides: object) -> None:
    if not _are_whole(strides) or len(strides) != len(dims):
        raise InvalidRequest(
            field="strides",
            value=strides,
            problem=f"must be one whole number for each of the {len(dims)} dims",
            fix="give strides in elements",
        )
    if min(strides, default=1) < 1:
        raise InvalidRequest(
            field="strides",
            value=strides,
            problem="contains a stride below 1",
            fix="copy the tensor so that every stride is at least 1",
        )
    if max(strides, default=1) > MAX_STRIDE:
        raise InvalidRequest(
            field="strides",
            value=strides,
            problem="overflows: a stride of 2**63 or more",
            fix="pack the tensor",
        )
    if 0 in dims:
        return
    # In order of stride, each stride must exceed the extent of all smaller dims. That is sufficient for
    # elements not to overlap, and every dense, sliced or padded tensor satisfies it.
    span = 0
    for stride, dim in sorted(zip(strides, dims, strict=True)):
        if dim > 1:
            if stride <= span:
                raise InvalidRequest(
                    field="strides",
                    value=strides,
                    problem=f"are misaligned for dims {dims}: elements would overlap",
                    fix="make each stride larger than the extent of the dims with smaller strides",
                )
            span += stride * (dim - 1)


def _dtype(dtype: object) -> DType:
    found = DType.of(dtype)
    if found is None:
        raise InvalidRequest(
            field="dtype",
            value=dtype,
            problem="is not an element type that tensors can have",
            fix=f"{_misspelt(dtype)}convert to one of {', '.join(DType)}",
        )
    return found


_SHORT = {
    **dict.fromkeys(("fp16", "half", "f16"), DType.FLOAT16),
    **dict.fromkeys(("fp32", "f32"), DType.FLOAT32),
    **dict.fromkeys(("fp64", "f64"), DType.FLOAT64),
    **dict.fromkeys(("bf16",), DType.BFLOAT16),
    "long": DType.INT64,
}
"""Other names of dtypes that NumPy does not know."""


def _misspelt(dtype: object) -> str:
    """A hint for a misspelt dtype; empty for a dtype that NumPy knows but tensors cannot have."""
    short = str(dtype).rpartition(".")[2]  # torch.float32 says what it is
    known = short if short in list(DType) and short != dtype else _SHORT.get(short)
    if known is not None:
        return f'pass "{known}", or '
    try:
        np.dtype(dtype)  # type: ignore[call-overload]
    except (TypeError, ValueError, SyntaxError):
        return did_you_mean(dtype, DType)
    return ""


def _layout(layout: str) -> Layout:
    if type(layout) is Layout:
        return layout
    try:
        return Layout(layout)
    except ValueError:
        raise InvalidRequest(
            field="layout",
            value=layout,
            problem="is not a layout",
            fix=f"{did_you_mean(layout, _PACKED)}use one of {', '.join(_PACKED)}",
        ) from None
