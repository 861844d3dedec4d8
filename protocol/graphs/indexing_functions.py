"""The functions of a `GraphBuilder` that read and write at indices, and that sort."""

from __future__ import annotations

from typing import Any

from cudnn_actor.protocol.errors import InvalidRequest
from cudnn_actor.protocol.graphs.expressions import Tensor
from cudnn_actor.protocol.graphs.movement_functions import MovementFunctions
from cudnn_actor.protocol.operations import (
    Gather,
    GatherElements,
    GatherND,
    Scatter,
    ScatterElements,
    ScatterND,
    ScatterReduction,
    TopK,
)
from cudnn_actor.protocol.operations.base import axis_of

__all__ = ["IndexingFunctions"]


class IndexingFunctions(MovementFunctions):
    """Each function adds operations to the graph. Raises `InvalidRequest` if operands do not fit together."""

    # In order.

    def top_k(self, x: Tensor, k: int, axis: int = -1, *, largest: bool = True, in_order: bool = True) -> Any:
        """The k largest or smallest elements along a dim and their indices, a named tuple: see `TopK`."""
        return self.apply(TopK(x=x, k=k, axis=axis, largest=largest, in_order=in_order), also=("indices",))

    def sort(self, x: Tensor, axis: int = -1, *, descending: bool = False) -> Tensor:
        """The elements along a dim in order; NaN is larger than any number."""
        made: Tensor = self._sort(x, axis, descending).values
        return made

    def argsort(self, x: Tensor, axis: int = -1, *, descending: bool = False) -> Tensor:
        """The indices, int64, that sort x along a dim; of equal elements, the lower index comes first."""
        found: Tensor = self._sort(x, axis, descending).indices
        return found

    def _sort(self, x: Tensor, axis: int, descending: bool) -> Any:
        self._own("x", x)
        try:
            return self.top_k(x, x.dims[axis_of("axis", axis, x.rank)], axis, largest=descending)
        except InvalidRequest as error:
            raise (error.about("descending") if error.field == "largest" else error) from None

    # Reads and writes at indices.

    def take(self, x: Tensor, indices: Tensor, axis: int | None = None, *, batch_dims: int = 0) -> Tensor:
        """The slices of x at these indices along a dim; without one, elements of x as one dim: see `Gather`.

        `indices`: a tensor of int32 or int64; for places that never change, use `x[...]` or an input.
        """
        self._own("x", x)
        if axis is None:
            x, axis = x.reshape(-1), 0
        return self._result(Gather(x=x, indices=indices, axis=axis, batch_dims=batch_dims))

    def take_along_axis(self, x: Tensor, indices: Tensor, axis: int) -> Tensor:
        """The elements of x at these indices along a dim; the other dims are broadcast, as in NumPy.

        See `GatherElements`.
        """
        self._own("x", x)
        self._own("indices", indices)
        if x.rank == indices.rank:
            along = axis_of("axis", axis, x.rank)
            pairs = list(enumerate(zip(x.dims, indices.dims, strict=True)))
            x = self.broadcast_to(x, [i if s == 1 and n != along else s for n, (s, i) in pairs])
            indices = self.broadcast_to(indices, [s if i == 1 and n != along else i for n, (s, i) in pairs])
        return self._result(GatherElements(x=x, indices=indices, axis=axis))

    def gather_nd(self, x: Tensor, indices: Tensor, *, batch_dims: int = 0) -> Tensor:
        """The parts of x at index vectors, which lie along the last dim of `indices`: see `GatherND`."""
        return self._result(GatherND(x=x, indices=indices, batch_dims=batch_dims))

    def put(
        self,
        x: Tensor,
        indices: Tensor,
        updates: Tensor,
        axis: int = 0,
        *,
        batch_dims: int = 0,
        reduction: ScatterReduction = ScatterReduction.NONE,
    ) -> Tensor:
        """x with the slices at these indices along a dim changed: see `Scatter`."""
        where: Any = {"indices": indices, "axis": axis, "batch_dims": batch_dims}
        return self._result(Scatter(x=x, updates=updates, reduction=reduction, **where))

    def put_along_axis(
        self,
        x: Tensor,
        indices: Tensor,
        updates: Tensor,
        axis: int,
        *,
        reduction: ScatterReduction = ScatterReduction.NONE,
    ) -> Tensor:
        """x with the elements at these indices along a dim changed: see `ScatterElements`."""
        where: Any = {"indices": indices, "axis": axis}
        return self._result(ScatterElements(x=x, updates=updates, reduction=reduction, **where))

    def scatter_nd(
        self,
        x: Tensor,
        indices: Tensor,
        updates: Tensor,
        *,
        batch_dims: int = 0,
        reduction: ScatterReduction = ScatterReduction.NONE,
    ) -> Tensor:
        """x with the parts at index vectors changed: see `ScatterND`."""
        where: Any = {"indices": indices, "batch_dims": batch_dims}
        return self._result(ScatterND(x=x, updates=updates, reduction=reduction, **where))
