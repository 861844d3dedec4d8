"""Einstein summation by products of matrices, for `GraphBuilder` and for ONNX import.

https://numpy.org/doc/stable/reference/generated/numpy.einsum.html
"""

from __future__ import annotations

import math
import string
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from cudnn_actor.protocol.errors import InvalidRequest
from cudnn_actor.protocol.graphs.expressions import Tensor

if TYPE_CHECKING:
    from cudnn_actor.protocol.graphs.graph_builder import GraphBuilder

__all__ = ["einsum"]

_Term = tuple[str, Tensor]
"""The labels of a tensor's dims, and the tensor."""


def einsum(
    g: GraphBuilder,
    equation: str,
    tensors: Sequence[Tensor],
    product: Callable[[Tensor, Tensor], Tensor],
    total: Callable[[Tensor, tuple[int, ...]], Tensor],
) -> Tensor:
    """The sum of products that an equation describes, as `numpy.einsum` computes it.

    `product` multiplies two batches of matrices, `total` sums over some dims. Tensors are multiplied from
    left to right; a label that is needed no more is summed over at once. Raises `InvalidRequest` if the
    equation is malformed, or does not fit the tensors.
    """
    terms, result = _parse(equation, [x.rank for x in tensors])
    _check_sizes(equation, terms, tensors)
    left = [_diagonal(g, labels, x) for labels, x in zip(terms, tensors, strict=True)]
    while len(left) > 1:
        first, second, *rest = left
        needed = set(result).union(*(labels for labels, _ in rest))
        left = [_Joining(g, product, total).multiply(first, second, needed), *rest]
    labels, x = _sum_out(total, left[0], set(result))
    return g.transpose(x, [labels.index(each) for each in result]) if labels != result else x


def _parse(equation: object, ranks: Sequence[int]) -> tuple[list[str], str]:
    """The labels of each operand and of the result, with unused letters for an ellipsis.

    Raises `InvalidRequest`.
    """
    if not isinstance(equation, str):
        raise _no_equation(equation, f"is of type {type(equation).__name__}, not a text")
    given, arrow, result = "".join(equation.split()).partition("->")
    terms = given.split(",")
    if len(terms) != len(ranks):
        raise _no_equation(equation, f"is for {len(terms)} tensors, and there are {len(ranks)}")
    for part in (*terms, result):
        if not all(letter in string.ascii_letters for letter in part.replace("...", "", 1)):
            raise _no_equation(equation, "has other characters than letters, commas, one ... a part, and ->")
    spare = [letter for letter in string.ascii_letters if letter not in equation]
    widths = [rank - len(term.replace("...", "")) for term, rank in zip(terms, ranks, strict=True)]
    for number, (term, width) in enumerate(zip(terms, widths, strict=True)):
        if width < 0 or (width and "..." not in term):
            rank = ranks[number]
            raise _no_equation(equation, f"does not have a label for each of {rank} dims of tensor {number}")
    widest = max((width for term, width in zip(terms, widths, strict=True) if "..." in term), default=0)
    dots = "".join(spare[:widest])
    named = [
        term.replace("...", dots[widest - width :] if width else "")
        for term, width in zip(terms, widths, strict=True)
    ]
    if not arrow:
        letters = "".join(given.replace("...", "").split(","))
        return named, dots + "".join(sorted(each for each in set(letters) if letters.count(each) == 1))
    wanted = result.replace("...", dots)
    if len(set(wanted)) != len(wanted) or not set(wanted) <= set("".join(named)):
        raise _no_equation(equation, "has a result with a label that is there twice, or that no tensor has")
    return named, wanted


def _check_sizes(equation: str, terms: Sequence[str], tensors: Sequence[Tensor]) -> None:
    """Raise `InvalidRequest` unless the dims with one label have one size, or 1."""
    sizes: dict[str, int] = {}
    for labels, x in zip(terms, tensors, strict=True):
        for label in set(labels):
            own = {size for each, size in zip(labels, x.dims, strict=True) if each == label}
            if len(own) > 1:
                shown = " and ".join(map(str, sorted(own)))
                raise _no_equation(equation, f"takes a diagonal of dims of {shown}", "they must be equal")
        for label, size in zip(labels, x.dims, strict=True):
            if size != sizes.setdefault(label, size) and 1 not in (size, sizes[label]):
                problem = f"gives one label to dims of {sizes[label]} and {size}"
                raise _no_equation(equation, problem, "dims with one label must be equal, or 1")
            if sizes[label] == 1:
                sizes[label] = size


def _no_equation(
    equation: object, problem: str, fix: str = "write one, as in 'bij,bjk->bik'"
) -> InvalidRequest:
    return InvalidRequest(field="equation", value=equation, problem=problem, fix=fix)


def _diagonal(g: GraphBuilder, labels: str, x: Tensor) -> _Term:
    """A tensor with each label once: its diagonal along the dims that share a label."""
    for label in dict.fromkeys(labels):
        while labels.count(label) > 1:
            one, other = [n for n, each in enumerate(labels) if each == label][:2]
            order = [n for n in range(x.rank) if n not in (one, other)] + [one, other]
            moved = g.transpose(x, order)
            size = moved.dims[-1]
            flat = g.reshape(moved, (*moved.dims[:-2], size * size))
            x = g.slice(flat, (..., slice(None, None, size + 1)))
            labels = "".join(labels[n] for n in order[:-1])
    return labels, x


def _sum_out(total: Callable[[Tensor, tuple[int, ...]], Tensor], term: _Term, kept: set[str]) -> _Term:
    """A tensor summed over the labels that are not kept."""
    labels, x = term
    axes = tuple(n for n, label in enumerate(labels) if label not in kept)
    return ("".join(each for each in labels if each in kept), total(x, axes)) if axes else term


class _Joining:
    """Multiplies tensors. The parameters are those of `einsum`."""

    def __init__(
        self,
        g: GraphBuilder,
        product: Callable[[Tensor, Tensor], Tensor],
        total: Callable[[Tensor, tuple[int, ...]], Tensor],
    ) -> None:
        self._g, self._product, self._total = g, product, total

    def multiply(self, first: _Term, second: _Term, needed: set[str]) -> _Term:
        """The product of two tensors, summed over the labels that are not `needed`."""
        a_labels, a = _sum_out(self._total, first, needed | set(second[0]))
        b_labels, b = _sum_out(self._total, second, needed | set(a_labels))
        sizes = dict.fromkeys(a_labels + b_labels, 1)
        for labels, x in ((a_labels, a), (b_labels, b)):
            for label, size in zip(labels, x.dims, strict=True):
                sizes[label] = size if sizes[label] == 1 else sizes[label]
        shared = [each for each in a_labels if each in b_labels]
        batch = [each for each in shared if each in needed]
        inner = [each for each in shared if each not in needed]
        rows = [each for each in a_labels if each not in shared]
        columns = [each for each in b_labels if each not in shared]
        left = self._matrices(a_labels, a, (batch, rows, inner), sizes)
        right = self._matrices(b_labels, b, (batch, inner, columns), sizes)
        labels = "".join((*batch, *rows, *columns))
        return labels, self._g.reshape(self._product(left, right), [sizes[each] for each in labels])

    def _matrices(
        self, labels: str, x: Tensor, parts: tuple[list[str], list[str], list[str]], sizes: dict[str, int]
    ) -> Tensor:
        """A tensor as a batch of matrices. `parts`: the labels of the batch, rows and columns."""
        g, (batch, rows, columns) = self._g, parts
        moved = g.transpose(x, [labels.index(each) for each in (*batch, *rows, *columns)])
        whole = g.broadcast_to(moved, [sizes[each] for each in (*batch, *rows, *columns)])
        front, back = (math.prod(sizes[each] for each in part) for part in (rows, columns))
        return g.reshape(whole, (*(sizes[each] for each in batch), front, back))
