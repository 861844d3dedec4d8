"""How much an import may compute by itself, in the process that imports: bytes of arrays, and steps.

`ModelLimits` (`model_limits`) has the numbers. Here they are counted.

A file of few bytes can ask for constants of any size. So an array is counted here before it is made: by the
function that computes constants, and by each operator that makes an array for the graph.

A small file can ask for a graph of any size, too: see `Recorded`.
"""

from __future__ import annotations

import sys

from cudnn_actor.onnx.values import Refused
from cudnn_actor.protocol.errors import InvalidRequest, Words
from cudnn_actor.protocol.graphs.limits import GraphLimits

__all__ = ["Budget", "Recorded", "TooManyOperations", "TooMuch"]


class TooMuch(Refused):
    """Raised when an import would make more, or take longer, than the limits of the model allow."""


class TooManyOperations(Exception):
    """Raised where an import adds more operations than a graph may have. It ends the import.

    `found`: how many there are, for people.
    """

    def __init__(self, found: str) -> None:
        super().__init__(found)
        self.found = found

    def refusal(self, most: int) -> InvalidRequest:
        """The error for the user, where a graph may have `most`."""
        return InvalidRequest(
            field="model",
            value=Words(f"{self.found} operations"),
            problem=f"are over the limit GraphLimits.operations, which is {most:,}",
            fix="raise the limit: spawn(graph_limits=GraphLimits(operations=...))",
        )


class Recorded(GraphLimits):
    """How many operations an import may add, including operations that no output will need."""

    @classmethod
    def of(cls, most: int) -> Recorded:
        """The number for a graph of at most `most` operations. The graph's own limit is checked when it is
        built.

        The import may add twice as many: some operations are only there for their dims, and no other node
        reads the results of some nodes.
        """
        return cls(operations=2 * most, nbytes=1 << 30)

    def check_operations(self, count: int) -> None:
        """Raise `TooManyOperations` if `count` operations are over the limit."""
        if count > self.operations:
            raise TooManyOperations(f"more than {self.operations:,}")


_SMALL = 1 << 16
"""Arrays of at most this many bytes, and nodes of at most 16 times as many steps, may use the last eighth of
a budget."""


class Budget:
    """The remaining bytes, steps and nodes of one import. It belongs to the thread of the import.

    The last eighth is for small arrays. They are mostly dims, without which nothing could be imported. Large
    arrays can be computed by the service instead.

    Parameters
    ----------
    nbytes
        The bytes that all arrays may have together, including temporary ones.
    steps
        Elementary steps, of about a nanosecond each.
    nodes
        Nodes, including those of each call of a function and of each turn of a loop.
    """

    def __init__(self, nbytes: int, steps: int, nodes: int = sys.maxsize) -> None:
        self._nbytes, self._steps, self._nodes = nbytes, steps, nodes
        self._kept = self._spent = 0
        self.walked = 0
        """How many nodes have been imported."""

    def walk(self, nodes: int) -> bool:
        """Count nodes that are imported. Returns whether they fit."""
        self.walked += nodes
        return self.fits(0)

    def fits(self, nodes: int) -> bool:
        """Whether that many nodes more may be imported."""
        return self.walked + nodes <= self._nodes

    def check(self, nbytes: int, steps: int = 0) -> None:
        """Raise `TooMuch` unless that many bytes more fit now. The steps are counted."""
        bytes_left = _usable(self._nbytes, small=nbytes <= _SMALL) - self._kept
        if nbytes > bytes_left:
            raise TooMuch(
                f"needs {nbytes:,} bytes in the importing process, where {max(0, bytes_left):,} are left for "
                "it; raise the limit: ModelLimits(constants=...)"
            )
        steps_left = _usable(self._steps, small=steps <= 16 * _SMALL) - self._spent
        if steps > steps_left:
            raise TooMuch(
                f"needs {steps:,} steps in the importing process, where {max(0, steps_left):,} are left for "
                "it; raise the limit: ModelLimits(steps=...)"
            )
        self._spent += steps

    def keep(self, nbytes: int) -> None:
        """Count bytes that stay until the import ends. Raises `TooMuch` if they do not fit."""
        self.check(nbytes)
        self._kept += nbytes


def _usable(whole: int, *, small: bool) -> int:
    return whole if small else whole - whole // 8
