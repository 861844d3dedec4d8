"""Options for the accuracy and the determinism of a computation."""

from __future__ import annotations

from typing import ClassVar

from cudnn_actor.protocol.errors import InvalidRequest
from cudnn_actor.protocol.types.records import Parameters

__all__ = ["Numerics"]


class Numerics(Parameters):
    """Accuracy and determinism of an operation graph's computation.

    Parameters
    ----------
    tf32
        Allow float32 operands to be rounded to TF32 (10 bits of mantissa) for speed.
    deterministic
        Use only algorithms that give the same bits every time.

    Raises
    ------
    InvalidRequest
        A field is not a bool.
    """

    example: ClassVar[str] = "Numerics(tf32=True)"
    tf32: bool = False
    deterministic: bool = False

    def __post_init__(self) -> None:
        for name in ("tf32", "deterministic"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise InvalidRequest(
                    field=name, value=value, problem="is not a bool", fix="pass True or False"
                )
