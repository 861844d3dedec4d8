"""The functions of a `GraphBuilder` that are gradients of one function, of what its backward pass is given.

Each adds what `GraphBuilder.grad` adds for the function. Of the function itself, only what its gradient reads
is run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

from cudnn_actor.protocol.errors import InvalidRequest
from cudnn_actor.protocol.graphs.expressions import Tensor
from cudnn_actor.protocol.graphs.graph_gradients import Gradients
from cudnn_actor.protocol.graphs.graph_recorder import as_called, pointwise_mode
from cudnn_actor.protocol.graphs.network_functions import NetworkFunctions
from cudnn_actor.protocol.operations import FUNCTIONS

if TYPE_CHECKING:
    from cudnn_actor.protocol.graphs.graph_builder import GraphBuilder

__all__ = ["BackwardFunctions"]


class BackwardFunctions(NetworkFunctions):
    """Each function adds operations to the graph. Raises `InvalidRequest` if operands do not fit together."""

    def pointwise_backward(
        self,
        mode: str,
        dy: Tensor,
        x: Tensor,
        *,
        parameter: float | None = None,
        lower: float | None = None,
        upper: float | None = None,
    ) -> Tensor:
        """dy times the derivative of a function of one operand at x: `RELU_BWD` of cuDNN, and the like.

        Parameters
        ----------
        mode
            A `PointwiseMode` with one operand, such as "relu", "tanh", "sigmoid", "elu", "gelu",
            "gelu_tanh", "softplus" or "swish". The derivative of one that is constant between jumps is 0.
        dy, x
            The gradient of the function's result, and its operand: floats of the same dims.
        parameter, lower, upper
            Those of the function, as `pointwise` takes them.

        Returns
        -------
        Tensor
            The gradient of x, of its dims and dtype; see `grad` for where there is no derivative.
        """
        function = FUNCTIONS[pointwise_mode(mode)]
        if function.arity != 1:
            raise InvalidRequest(
                field="mode",
                value=mode,
                problem=f"is a function of {function.arity} operands",
                fix="use g.grad(y, (a, b), dy), where y is its result",
            )
        if function.truth:
            raise InvalidRequest(
                field="mode",
                value=mode,
                problem="gives truth values, which have no derivative",
                fix="choose a function that gives floats",
            )

        def forward() -> Tensor:
            return self.pointwise(mode, x, parameter=parameter, lower=lower, upper=upper)

        return self._backward(forward, dy, x)

    def max_pool_backward(
        self,
        dy: Tensor,
        x: Tensor,
        size: int | Sequence[int],
        *,
        pad: int | Sequence[int] = 0,
        stride: int | Sequence[int] | None = None,
        dilation: int | Sequence[int] = 1,
    ) -> Tensor:
        """The gradient of x, from dy, that of `max_pool(x, size, ...)`, without an index and without y.

        Each window gives its gradient to one element of x: the largest, and of equal ones the first in
        row-major order, on every engine. With the index that `MaxPool` gives, use `MaxPoolBackward`.
        """
        return self._backward(
            lambda: self.max_pool(x, size, pad=pad, stride=stride, dilation=dilation), dy, x
        )

    def avg_pool_backward(
        self,
        dy: Tensor,
        x: Tensor,
        size: int | Sequence[int],
        *,
        pad: int | Sequence[int] = 0,
        stride: int | Sequence[int] | None = None,
        include_padding: bool = False,
    ) -> Tensor:
        """The gradient of x, from dy, that of `avg_pool(x, size, ...)`. It does not read the values of x."""
        return self._backward(
            lambda: self.avg_pool(x, size, pad=pad, stride=stride, include_padding=include_padding), dy, x
        )

    def _backward(self, forward: Callable[[], Tensor], dy: Tensor, x: Tensor) -> Tensor:
        """The gradient of x, from that of what `forward` makes of it alone."""
        self._own("dy", dy)
        self._own("x", x)
        place = len(self._operations)
        try:
            (dx,) = Gradients(cast("GraphBuilder", self), [forward()], [x], [dy]).add_all()
        except InvalidRequest as error:
            names = {"upstream": "dy", **dict.fromkeys(("outputs", "wrt", "operands[0]"), "x")}
            raise as_called(error, names) from None
        self._drop_unread(place, (dx.number,))
        return dx
