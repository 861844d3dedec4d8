"""The functions of a `GraphBuilder` that read at places that indices name."""

from __future__ import annotations

from cudnn_actor.protocol.expressions import Tensor
from cudnn_actor.protocol.movement_functions import MovementFunctions
from cudnn_actor.protocol.operations import Gather, GatherElements, GatherND

__all__ = ["IndexingFunctions"]


class IndexingFunctions(MovementFunctions):
    """Each adds operations to the graph, and raises `InvalidRequest` if its operands do not fit together."""

    def take(self, x: Tensor, indices: Tensor, axis: int | None = None, *, batch_dims: int = 0) -> Tensor:
        """Slices of x along a dim, those that indices name; without one, elements of all: see `Gather`."""
        if axis is None:
            x, axis = x.reshape(-1), 0
        return self._result(Gather(x=x, indices=indices, axis=axis, batch_dims=batch_dims))

    def take_along_axis(self, x: Tensor, indices: Tensor, axis: int) -> Tensor:
        """The elements of x with these coordinates along a dim, with NumPy's broadcasting of the others.

        See `GatherElements`.
        """
        if x.rank == indices.rank:
            along = axis % max(x.rank, 1)
            pairs = list(enumerate(zip(x.dims, indices.dims, strict=True)))
            x = self.broadcast_to(x, [i if s == 1 and n != along else s for n, (s, i) in pairs])
            indices = self.broadcast_to(indices, [s if i == 1 and n != along else i for n, (s, i) in pairs])
        return self._result(GatherElements(x=x, indices=indices, axis=axis))

    def gather_nd(self, x: Tensor, indices: Tensor, *, batch_dims: int = 0) -> Tensor:
        """The parts of x that lists of indices name, along the last dim of `indices`: see `GatherND`."""
        return self._result(GatherND(x=x, indices=indices, batch_dims=batch_dims))
