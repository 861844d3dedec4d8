"""The type that functions of a `GraphBuilder` compute in, if they are asked for one.

Operations of floats compute in float32, or in float64 if an operand is float64, on every engine. So there is
one other type to ask for: float64, of float32 and half types. Then operands are converted before, and results
are rounded afterwards.
"""

from __future__ import annotations

from collections.abc import Collection

from cudnn_actor.protocol.errors import InvalidRequest, Words
from cudnn_actor.protocol.types.dtypes import DType

__all__ = ["asks_for_more"]


def asks_for_more(compute_dtype: object, dtypes: Collection[DType]) -> bool:
    """Whether operands of these dtypes must be converted to float64 to be computed with in a type.

    Raises `InvalidRequest` for a type that these are not computed in.
    """
    wanted, floats = DType.of(compute_dtype), {dtype for dtype in dtypes if dtype.is_floating}
    usual = DType.FLOAT64 if DType.FLOAT64 in floats else DType.FLOAT32
    if floats and wanted in (usual, DType.FLOAT64):
        return wanted is not usual
    of = ", ".join(sorted(dict.fromkeys(dtypes)))
    problem, fix = (
        f"is not a type that {of} is computed in, which is {usual}",
        "leave it out, or pass float64",
    )
    if not floats:
        problem, fix = "is given, but no operand is of floats", "leave it out: integers are computed exactly"
    elif wanted is None:
        problem, fix = "is not a type that floats are computed in", "pass float32 or float64, or leave it out"
    elif usual is DType.FLOAT64:
        fix = 'leave it out, or convert the operands, as in g.astype(x, "float32")'
    raise InvalidRequest(
        field="compute_dtype",
        value=compute_dtype if wanted is None else Words(wanted),
        problem=problem,
        fix=fix,
    )
