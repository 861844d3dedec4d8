"""The reserves that recurrent layers keep for their gradients, as bytes that only the engine that wrote them
understands.

A reserve is a tensor whose numbers are defined (`Recurrent`), or a buffer of bytes: uint8, of one dim. The
CPU engines write the numbers of that tensor to the bytes. CUDA writes what libcudnn keeps, of which only the
size is known.
"""

from __future__ import annotations

from typing import Any

from cudnn_actor.protocol.errors import InvalidRequest
from cudnn_actor.protocol.operations.base import Array, Specs
from cudnn_actor.protocol.types.dtypes import DType
from cudnn_actor.protocol.types.tensor import TensorSpec

__all__ = ["as_bytes", "from_bytes", "is_bytes", "lack_of_bytes", "require_bytes"]


def is_bytes(spec: TensorSpec) -> bool:
    """Whether a reserve, or slopes, of this spec are bytes."""
    return spec.dtype is DType.UINT8 and spec.rank == 1


def require_bytes(specs: Specs, name: str) -> None:
    """Raise `InvalidRequest` unless bytes lie one behind the other, and there are some if x has elements.

    How many are needed is the engine's to say.
    """
    spec = specs[name]
    if spec.strides != (1,) and spec.size > 1:
        problem, fix = f"lies in memory with strides {spec.strides}", "give it bytes that are packed"
    elif not spec.size and specs["x"].size:
        problem, fix = "has no bytes", "ask how many are needed: await gpu.reserve_nbytes(layer)"
    else:
        return
    raise InvalidRequest(field=name, value=spec.dims, problem=problem, fix=fix)


def lack_of_bytes(name: str, given: int, needed: int) -> str:
    """Why an engine cannot take a reserve, or slopes, of too few bytes."""
    return (
        f"{name} has {given:,} of the {needed:,} bytes that are needed: "
        "ask for their number, as in gpu.reserve_nbytes(layer)"
    )


def as_bytes(xp: Any, numbers: Array, dtype: DType, nbytes: int) -> Array:
    """So many bytes, which begin with those of numbers, rounded to a dtype. The others are 0."""
    found = xp.zeros(nbytes, "uint8")
    own = xp.ravel(numbers.astype(dtype.numpy)).view("uint8")
    found[: own.size] = own
    return found


def from_bytes(xp: Any, given: Array, dims: tuple[int, ...], dtype: DType) -> Array:
    """The numbers of `as_bytes`, as float64, from bytes of any integer type."""
    nbytes = TensorSpec.packed(dims, dtype).nbytes
    own = xp.ascontiguousarray(given[:nbytes].astype("uint8"))
    return own.view(dtype.numpy).reshape(dims).astype("float64")
