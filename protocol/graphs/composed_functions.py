"""The functions of a `GraphBuilder` that are compositions of others: each has the gradients of its parts."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex, cast

from cudnn_actor.protocol.errors import InvalidRequest, Words
from cudnn_actor.protocol.graphs.backward_functions import BackwardFunctions
from cudnn_actor.protocol.graphs.einsum import einsum
from cudnn_actor.protocol.graphs.expressions import Axes, Tensor
from cudnn_actor.protocol.graphs.graph_functions import Functions
from cudnn_actor.protocol.graphs.graph_recorder import as_called
from cudnn_actor.protocol.graphs.indexing_functions import IndexingFunctions
from cudnn_actor.protocol.graphs.integer_division import divide_down
from cudnn_actor.protocol.graphs.named_outputs import named_outputs
from cudnn_actor.protocol.operations import CTCLoss
from cudnn_actor.protocol.operations.base import axis_of
from cudnn_actor.protocol.operations.normalization import check_epsilon, check_momentum
from cudnn_actor.protocol.types.checks import (
    as_index,
    as_number,
    as_plain,
    is_finite,
    is_whole,
    require_choice,
    require_flag,
)
from cudnn_actor.protocol.types.dtypes import DType

if TYPE_CHECKING:
    from cudnn_actor.protocol.graphs.graph_builder import GraphBuilder

__all__ = ["ComposedFunctions"]

_MOST_ELEMENTS = 1 << 53
"""Whole numbers up to here are exact in float64."""


class ComposedFunctions(Functions, IndexingFunctions, BackwardFunctions):
    """Each adds operations to the graph, and raises `InvalidRequest` if its operands do not fit together."""

    def linear(self, x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
        """x @ w.T + bias, with w of dims (features of the result, features of x), as PyTorch stores it."""
        self._own("x", x)
        self._own("w", w)
        if bias is not None:
            self._own("bias", bias)
        if w.rank != 2 or x.rank < 1 or x.dims[-1] != w.dims[1]:
            raise InvalidRequest(
                field="w",
                value=w.dims,
                problem=f"does not fit x, of dims {x.dims}",
                fix=f"give it dims (features of the result, {x.dims[-1] if x.rank else 'those of x'}); "
                "for the other order, write x @ w",
            )
        if bias is not None and bias.dims != w.dims[:1]:
            raise InvalidRequest(
                field="bias",
                value=bias.dims,
                problem="must have one value for each feature of the result",
                fix=f"give it dims {w.dims[:1]}",
            )
        try:
            y = self.matmul(x, self.transpose(w))
        except InvalidRequest as error:
            raise as_called(error, {"a": "x", "b": "w"}) from None
        return y if bias is None else self.add(y, bias)

    def einsum(self, equation: str, *tensors: Tensor) -> Tensor:
        """The sum of products that an equation names, as `numpy.einsum`: `g.einsum("bij,bjk->bik", a, b)`.

        Tensors are joined from the left, by products of matrices.
        """
        for number, x in enumerate(tensors):
            self._own(f"tensors[{number}]", x)
            if not x.dtype.is_floating or x.dtype is not tensors[0].dtype:
                raise InvalidRequest(
                    field=f"tensors[{number}]",
                    value=Words(x.dtype),
                    problem="is not the dtype of the first, which must be one of floats",
                    fix="convert it: x.astype(dtype)",
                )
        return einsum(cast("GraphBuilder", self), equation, tensors, self.matmul, self.sum)

    def var(self, x: Tensor, axis: Axes = None, *, ddof: float = 0, keepdims: bool = False) -> Tensor:
        """The mean squared distance from the mean along these dims, as NumPy's `var`.

        The squares are summed up in float32, or float64, and divided by their number less `ddof`.
        """
        if not is_finite(ddof):
            raise InvalidRequest(
                field="ddof",
                value=ddof,
                problem="must be a finite number",
                fix="use 1 for a sample's variance, or 0",
            )
        self._own("x", x)
        wide = self.astype(x, DType.FLOAT32) if x.dtype.is_half else x
        total = self.sum(self.square(wide - self.mean(wide, axis, keepdims=True)), axis, keepdims=keepdims)
        count = math.prod(x.dims) // max(1, math.prod(total.dims))
        made = self.divide(total, max(count - ddof, 0))
        return self._convert(made, x.dtype, kept=False) if x.dtype.is_half else made

    def std(self, x: Tensor, axis: Axes = None, *, ddof: float = 0, keepdims: bool = False) -> Tensor:
        """The square root of `var`. Its gradient is not finite where all elements are equal."""
        self._own("x", x)
        wide = self.astype(x, DType.FLOAT32) if x.dtype.is_half else x
        made = self.sqrt(self.var(wide, axis, ddof=ddof, keepdims=keepdims))
        return self._convert(made, x.dtype, kept=False) if x.dtype.is_half else made

    def cross_entropy(
        self,
        logits: Tensor,
        targets: Tensor,
        axis: int = -1,
        *,
        ignore: int | None = None,
        reduction: Literal["mean", "sum", "none"] = "mean",
    ) -> Tensor:
        """-log of the softmax of logits at the targets, as PyTorch's `cross_entropy`.

        Parameters
        ----------
        logits
            Floats, with the classes along `axis`.
        targets
            int32 or int64: the class of each, of the dims of `logits` without `axis`; from 0 to the number of
            classes - 1. Or floats of the dims of `logits`: the weight of each class.
        axis
            The dim of the classes: the last one, unless it is given. PyTorch's is 1.
        ignore
            A class whose targets count nothing, also not in the mean.
        reduction
            The mean of all, their sum, or "none" for each one.
        """
        self._own("logits", logits)
        self._own("targets", targets)
        axis = axis_of("axis", axis, logits.rank, "logits")
        without = (*logits.dims[:axis], *logits.dims[axis + 1 :])
        require_choice("reduction", reduction, ("mean", "sum", "none"))
        if not logits.dtype.is_floating:
            raise InvalidRequest(
                field="logits",
                value=Words(logits.dtype),
                problem="is no floating-point dtype",
                fix='convert it: logits.astype("float32")',
            )
        wanted = logits.dims if targets.dtype.is_floating else without
        if targets.dims != wanted or not (
            targets.dtype.is_floating or targets.dtype in (DType.INT32, DType.INT64)
        ):
            raise InvalidRequest(
                field="targets",
                value=Words(f"{targets.dtype} {targets.dims}"),
                problem=f"does not fit logits, of dims {logits.dims}, with their classes along dim {axis}",
                fix=f"give classes, int64 {without}, or their weights, floats {logits.dims}",
            )
        ignore = as_plain(ignore)
        if ignore is not None and (targets.dtype.is_floating or not is_whole(ignore)):
            raise InvalidRequest(
                field="ignore",
                value=ignore,
                problem="is no class that could be ignored",
                fix="give a whole number, and targets of int64",
            )
        if ignore is not None:
            as_number("ignore", ignore)
        losses = self._losses(logits, targets, axis, ignore)
        if reduction == "none":
            made = losses
        elif reduction == "sum" or ignore is None:
            made = self.sum(losses) if reduction == "sum" else self.mean(losses)
        else:
            made = self.sum(losses) / self.sum(self.astype(targets != ignore, losses.dtype))
        return self._convert(made, logits.dtype, kept=False) if logits.dtype.is_half else made

    def _losses(self, logits: Tensor, targets: Tensor, axis: int, ignore: int | None) -> Tensor:
        """The loss of each target, float32 or float64."""
        logits = self.astype(logits, DType.FLOAT32) if logits.dtype.is_half else logits
        logs = self.log_softmax(logits, axis)
        if targets.dtype.is_floating:
            return -self.sum(self.astype(targets, logits.dtype) * logs, axis)
        counted = None if ignore is None else targets != ignore
        chosen = targets if counted is None else self.where(counted, targets, 0)
        dims = (*targets.dims[:axis], 1, *targets.dims[axis:])
        losses = -self.reshape(self.take_along_axis(logs, self.reshape(chosen, dims), axis), targets.dims)
        return losses if counted is None else self.where(counted, losses, 0.0)

    def ctc_loss(
        self,
        log_probs: Tensor,
        targets: Tensor,
        input_lengths: Tensor,
        target_lengths: Tensor,
        *,
        blank: int = 0,
        reduction: Literal["mean", "sum", "none"] = "mean",
        zero_infinity: bool = False,
    ) -> Tensor:
        """The loss of sequences without alignments, as PyTorch's `ctc_loss`: see `CTCLoss`.

        Its gradient is the derivative by `log_probs` themselves, as if each of them could change alone.
        PyTorch's function gives the derivative by the scores that a `log_softmax` took to make them. Through
        that `log_softmax`, both lead to the same gradient of the scores.

        Parameters
        ----------
        log_probs
            Floats of dims (T, N, C): the logarithms of the probabilities of C classes.
        targets
            int32 or int64, of dims (N, S): the labels of each sample, padded with anything.
        input_lengths, target_lengths
            int32 or int64, of dims (N,): how many frames and labels each sample has.
        blank
            The class of blanks.
        reduction
            "mean": each loss is divided by its number of labels, or by 1 if it has none, and the mean of
            these is the result. "sum": the sum of the losses. "none": the losses, of dims (N,). The result
            is float64 if log_probs is, else float32.
        zero_infinity
            Whether infinite losses, of labels that no alignment gives, are 0.
        """
        require_choice("reduction", reduction, ("mean", "sum", "none"))
        loss = CTCLoss(
            log_probs=log_probs,
            targets=targets,
            input_lengths=input_lengths,
            target_lengths=target_lengths,
            blank=blank,
            zero_infinity=zero_infinity,
        )
        losses = self._result(loss)
        if reduction == "none":
            return losses
        if reduction == "sum":
            return self.sum(losses)
        labels = self.clip(target_lengths, 1, max(1, targets.dims[1]))
        return self.mean(losses / self.astype(labels, losses.dtype))

    def batch_norm_finalize(
        self,
        sums: Tensor,
        sums_of_squares: Tensor,
        count: SupportsIndex,
        scale: Tensor | None = None,
        bias: Tensor | None = None,
        *,
        running_mean: Tensor | None = None,
        running_variance: Tensor | None = None,
        epsilon: float = 1e-5,
        momentum: float = 0.1,
        unbiased: bool = True,
    ) -> Any:
        """The scale and bias of a batch norm, from sums of each channel: cuDNN's `BN_FINALIZE_STATISTICS`.

        They are those for an x whose elements were added up, by `GenStats` or piece by piece: its batch norm
        is `x * scale + bias`, with both reshaped to (C, 1, ...), a 1 for each spatial dim of x. The variance
        is the mean of the squares less the square of the mean. It is inaccurate where these are almost equal:
        where the mean is large and the deviation small.

        Parameters
        ----------
        sums, sums_of_squares
            Dims (C,), floats: as `GenStats` gives them.
        count
            How many elements of each channel were added up: a whole number, also NumPy's, at least 1.
        scale, bias
            Those of the norm, dims (C,); without them 1 and 0.
        running_mean, running_variance, epsilon, momentum, unbiased
            As in `BatchNormTraining`.

        Returns
        -------
        named tuple
            `scale`, `bias`, `mean` and `inverse_deviation`, of dims (C,); and for those running statistics
            that are given `new_running_mean` and `new_running_variance`, for `build(updates=...)`.

        Raises
        ------
        InvalidRequest
            A tensor has other dims or is not of floats, or a number is not one that it can be.
        """
        optional = {
            "scale": scale,
            "bias": bias,
            "running_mean": running_mean,
            "running_variance": running_variance,
        }
        given = {"sums": sums, "sums_of_squares": sums_of_squares}
        given |= {name: tensor for name, tensor in optional.items() if tensor is not None}
        for name, tensor in given.items():
            self._own(name, tensor)
        for name, tensor in given.items():
            if tensor.dims != sums.dims or tensor.rank != 1 or not tensor.dtype.is_floating:
                raise InvalidRequest(
                    field=name,
                    value=Words(f"{tensor.dtype} {tensor.dims}"),
                    problem="does not have a number for each channel",
                    fix="give floats of dims (C,), as those of sums",
                )
        try:
            elements = as_index(count)
        except TypeError:
            elements = 0
        if not 1 <= elements <= _MOST_ELEMENTS:
            raise InvalidRequest(
                field="count",
                value=count,
                problem="is no number of elements",
                fix="give how many elements of each channel were added up: N times the spatial dims",
            )
        check_epsilon(epsilon)
        check_momentum(momentum)
        require_flag("unbiased", unbiased)
        mean = sums / elements
        variance = self.maximum(sums_of_squares / elements - mean * mean, 0.0)
        inverse = self.rsqrt(variance + epsilon)
        factor = inverse if scale is None else scale * inverse
        shift = -(mean * factor) if bias is None else bias - mean * factor
        found = {"scale": factor, "bias": shift, "mean": mean, "inverse_deviation": inverse}
        correction = elements / max(1, elements - 1) if unbiased else 1.0
        for name, old, new in (
            ("mean", running_mean, mean),
            ("variance", running_variance, variance * correction),
        ):
            if old is not None:
                blended = old * (1 - momentum) + new * momentum
                found[f"new_running_{name}"] = self.astype(blended, old.dtype)
        return named_outputs("BatchNormFinalizeOutputs", found)

    def floor_divide(self, a: Any, b: Any) -> Tensor:
        """The largest whole number that is not above a / b, as Python's `//`. Integers stay integers.

        An integer divided by 0 is any number.
        """
        return divide_down(cast("GraphBuilder", self), a, b)
