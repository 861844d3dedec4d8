"""How large a graph may be."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from cudnn_actor.protocol.errors import InvalidRequest, Words
from cudnn_actor.protocol.types.checks import require_whole
from cudnn_actor.protocol.types.records import Parameters

__all__ = ["GraphLimits"]


class GraphLimits(Parameters):
    """How large a graph may be, where it is built, read from a file, or sent to a service.

    The tensors that are stored between the pieces of a graph count towards `spawn(workspace_limit=)`.

    Parameters
    ----------
    operations
        The most operations.
    nbytes
        The most bytes of its encoding: of the text that `Graph.from_json` reads, and of what a worker gets.

    Raises
    ------
    InvalidRequest
        A limit is not a whole number of at least 1.
    """

    example: ClassVar[str] = "GraphLimits(operations=20_000)"
    operations: int = 10_000
    nbytes: int = 16 << 20

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            msgspec.structs.force_setattr(self, name, require_whole(name, getattr(self, name), 1))

    def check_operations(self, count: int) -> None:
        """Raise `InvalidRequest` if `count` operations are over the limit."""
        if count > self.operations:
            raise _over("operations", f"{count:,} operations", self.operations)

    def check_nbytes(self, count: int) -> None:
        """Raise `InvalidRequest` if an encoding of `count` bytes is over the limit."""
        if count > self.nbytes:
            raise _over("nbytes", f"{count:,} bytes", self.nbytes)


def _over(name: str, value: str, limit: int) -> InvalidRequest:
    return InvalidRequest(
        field="graph",
        value=Words(value),
        problem=f"are over the limit GraphLimits.{name}, which is {limit:,}",
        fix=f"cut it into several graphs, or raise the limit: GraphLimits({name}=...)",
    )
