"""Einstein's summation, by products of matrices."""

from __future__ import annotations

import math
import string
from collections.abc import Sequence

from cudnn_actor.onnx.nodes import Node, Result
from cudnn_actor.onnx.operators.matmul import product
from cudnn_actor.onnx.operators.reduction import reduced
from cudnn_actor.onnx.table import operator
from cudnn_actor.onnx.values import Declined
from cudnn_actor.protocol.graph_builder import GraphBuilder, Tensor
from cudnn_actor.protocol.operations import ReductionMode

__all__: list[str] = []

_Term = tuple[str, Tensor]
"""The labels of a tensor's dims, and the tensor."""


@operator("Einsum", since=12)
def einsum(node: Node, g: GraphBuilder) -> Result:
    tensors = node.tensors()
    equation = "".join(node.attribute("equation").split())
    terms, result = _parsed(equation, [x.rank for x in tensors])
    left = [_diagonal(g, labels, x) for labels, x in zip(terms, tensors, strict=True)]
    while len(left) > 1:
        first, second, *rest = left
        needed = set(result).union(*(labels for labels, _ in rest))
        left = [_joined(g, first, second, needed), *rest]
    labels, x = _summed(g, left[0], set(result))
    return g.transpose(x, [labels.index(each) for each in result]) if labels != result else x


def _parsed(equation: str, ranks: Sequence[int]) -> tuple[list[str], str]:
    """The labels of each operand and of the result, with capital letters of their own for an ellipsis."""
    given, arrow, result = equation.partition("->")
    terms = given.split(",")
    if len(terms) != len(ranks):
        raise Declined(f"the equation {equation!r} is not for {len(ranks)} operands")
    spare = [letter for letter in string.ascii_letters if letter not in equation]
    widths = [rank - len(term.replace("...", "")) for term, rank in zip(terms, ranks, strict=True)]
    widest = max((width for term, width in zip(terms, widths, strict=True) if "..." in term), default=0)
    if any(width < 0 or (width and "..." not in term) for term, width in zip(terms, widths, strict=True)):
        raise Declined(f"the equation {equation!r} does not have a label for each dim")
    dots = "".join(spare[:widest])
    named = [
        term.replace("...", dots[widest - width :] if width else "")
        for term, width in zip(terms, widths, strict=True)
    ]
    if arrow:
        return named, result.replace("...", dots)
    letters = "".join(given.replace("...", "").split(","))
    return named, dots + "".join(sorted(each for each in set(letters) if letters.count(each) == 1))


def _diagonal(g: GraphBuilder, labels: str, x: Tensor) -> _Term:
    """A tensor without labels that are there twice: of those dims, the elements with equal indices."""
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


def _summed(g: GraphBuilder, term: _Term, kept: set[str]) -> _Term:
    """A tensor summed over the labels that are not kept."""
    labels, x = term
    axes = tuple(n for n, label in enumerate(labels) if label not in kept)
    if not axes:
        return term
    return "".join(each for each in labels if each in kept), reduced(
        g, ReductionMode.SUM, x, axes, keepdims=False
    )


def _joined(g: GraphBuilder, first: _Term, second: _Term, needed: set[str]) -> _Term:
    """The product of two tensors, summed over the labels that only they have."""
    a_labels, a = _summed(g, first, needed | set(second[0]))
    b_labels, b = _summed(g, second, needed | set(a_labels))
    sizes = dict.fromkeys(a_labels + b_labels, 1)
    for labels, x in ((a_labels, a), (b_labels, b)):
        for label, size in zip(labels, x.dims, strict=True):
            sizes[label] = max(sizes[label], size)
    shared = [each for each in a_labels if each in b_labels]
    batch = [each for each in shared if each in needed]
    inner = [each for each in shared if each not in needed]
    rows = [each for each in a_labels if each not in shared]
    columns = [each for each in b_labels if each not in shared]

    def arranged(labels: str, x: Tensor, front: list[str], back: list[str]) -> Tensor:
        moved = g.transpose(x, [labels.index(each) for each in (*batch, *front, *back)])
        whole = g.broadcast_to(moved, [sizes[each] for each in (*batch, *front, *back)])
        return g.reshape(
            whole,
            (
                *(sizes[each] for each in batch),
                math.prod(sizes[each] for each in front),
                math.prod(sizes[each] for each in back),
            ),
        )

    y = product(g, arranged(a_labels, a, rows, inner), arranged(b_labels, b, inner, columns))
    labels = "".join((*batch, *rows, *columns))
    return labels, g.reshape(y, [sizes[each] for each in labels])
