"""The limits of a model that a stranger may have made: what bounds the memory and the time of its import.

Three modules hold an import to its `ModelLimits`, each before the memory is taken:

- `reading` counts the bytes of the file and of its tensors, and its nodes.
- `budget` counts the bytes and the steps of the arrays that an import computes by itself, and the nodes that
  it imports. It also bounds the operations that an import adds to a graph.
- `cutting` lets no loop be unrolled to more than `unrolled` operations: a longer one becomes a loop.
"""

from __future__ import annotations

import msgspec

from cudnn_actor.protocol.types.checks import require_whole

__all__ = ["ModelLimits", "limits_of_import"]


class ModelLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How large a model may be.

    Parameters
    ----------
    nbytes
        The bytes of the model's file, and of all its tensors.
    nodes
        The nodes of the model, including those of its functions and subgraphs; and the nodes of an import, in
        which functions are expanded and loops unrolled. A call or a turn with more inputs or outputs than
        nodes counts with that number.
    constants
        The bytes of arrays that an import may make by itself, in addition to 16 for each byte of the file and
        of its tensors. A node that needs more is left to the service, or refused if its values decide over
        shapes.
    steps
        The elementary steps, of about a nanosecond each, that an import may take to compute these arrays, in
        addition to 320 for each such byte.
    unrolled
        How many operations a graph may have by unrolling a `Loop` or a `Scan` of the model itself. A longer
        one runs as a loop: see `cudnn-actor docs onnx`. None for the limit of a graph, which is also the
        largest value.

    Raises
    ------
    InvalidRequest
        A limit is no whole number of at least 1, or, for `unrolled`, of at least 0.
    """

    nbytes: int = 64 << 30
    nodes: int = 200_000
    constants: int = 256 << 20
    steps: int = 1 << 33
    unrolled: int | None = None

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if name != "unrolled":
                msgspec.structs.force_setattr(self, name, require_whole(name, getattr(self, name), 1))
        if self.unrolled is not None:
            msgspec.structs.force_setattr(self, "unrolled", require_whole("unrolled", self.unrolled, 0))


def limits_of_import(limits: ModelLimits, nbytes: int) -> ModelLimits:
    """The limits of an import of a file that has `nbytes` bytes with its tensors."""
    return msgspec.structs.replace(
        limits, constants=limits.constants + 16 * nbytes, steps=limits.steps + 320 * nbytes
    )
