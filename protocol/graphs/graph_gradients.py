"""Reverse-mode differentiation of graphs: what `GraphBuilder.grad` adds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from cudnn_actor.protocol.errors import InvalidRequest, Words
from cudnn_actor.protocol.graphs.expressions import Tensor
from cudnn_actor.protocol.operations import Node, Operation

if TYPE_CHECKING:
    from cudnn_actor.protocol.graphs.graph_builder import GraphBuilder

__all__ = ["Gradients"]


class Gradients:
    """The gradients that one call of `GraphBuilder.grad` adds. Raises `InvalidRequest`."""

    def __init__(
        self,
        builder: GraphBuilder,
        outputs: Sequence[Tensor],
        wrt: Sequence[Tensor],
        upstream: Sequence[Tensor | None],
    ) -> None:
        self._builder = builder
        self._wrt = wrt
        self._check("outputs", outputs)
        self._check("wrt", wrt)
        if len(upstream) != len(outputs):
            raise InvalidRequest(
                field="upstream",
                value=len(upstream),
                problem=f"is not the number of outputs: {len(outputs)}",
                fix="give one for each output, or None",
            )
        self._depends = {tensor.number for tensor in wrt}
        """Numbers of the tensors of `wrt`, and of those that depend on them: these have gradients."""
        for operation in builder._operations:
            if not self._depends.isdisjoint(operation.reads):
                self._depends.update(uid for uid in operation.writes if self._is_floating(uid))
        self._found: dict[int, Tensor] = {}
        """Numbers of tensors → their gradients, as far as they have been added up."""
        for output, given in zip(outputs, upstream, strict=True):
            if given is not None:
                self._check_upstream(output, given)
                self._add(output.number, given)
            elif output.number in self._depends:
                self._add(output.number, self._full(output, 1))

    def _check(self, name: str, tensors: Sequence[Any]) -> None:
        if not tensors:
            raise InvalidRequest(field=name, value=(), problem="are none", fix="give at least one tensor")
        for tensor in tensors:
            if not isinstance(tensor, Tensor) and hasattr(tensor, "body"):  # a graph, or a loop of one
                raise InvalidRequest(
                    field=name,
                    value=Words(type(tensor).__name__),
                    problem="has no gradients: only tensors of a builder have",
                    fix="differentiate before g.build(...); instead of a loop, add each turn to the graph",
                )
            self._builder._own(name, tensor)
            if not tensor.dtype.is_floating:
                raise InvalidRequest(
                    field=name,
                    value=Words(f"{tensor!r}"),
                    problem="has no gradients: it is not of floats",
                    fix="differentiate floats with respect to floats",
                )

    def _is_floating(self, number: int) -> bool:
        return self._builder._tensors[number].spec.dtype.is_floating

    def _check_upstream(self, output: Tensor, gradient: Tensor) -> None:
        self._builder._own("upstream", gradient)
        if gradient.dims != output.dims or not gradient.dtype.is_floating:
            raise InvalidRequest(
                field="upstream",
                value=Words(f"{gradient!r}"),
                problem="is not a gradient of its output",
                fix=f"give it dims {output.dims}, of floats",
            )

    def add_all(self) -> list[Tensor]:
        """Add the operations of all gradients, and return the gradient of each tensor of `wrt`."""
        builder = self._builder
        for place in reversed(range(len(builder._operations))):
            node = builder._operations[place]
            if not (self._found.keys().isdisjoint(node.writes) or self._depends.isdisjoint(node.reads)):
                self._differentiate(node)
        return [self._of(tensor) for tensor in self._wrt]

    def _of(self, tensor: Tensor) -> Tensor:
        if tensor.number in self._found:
            return self._found[tensor.number]
        return self._full(tensor, 0)

    def _full(self, tensor: Tensor, value: float) -> Tensor:
        """A gradient of a tensor, with one value in all elements."""
        with self._label(tensor._entry.label):
            return self._builder.full(tensor.dims, value, tensor.dtype)

    def _differentiate(self, node: Node) -> None:
        """Add the gradients of an operation's inputs to those found so far."""
        builder = self._builder
        operands = {name: builder._tensor(number) for name, number in node.named()}
        operation: Operation[Any] = node.with_operands(operands.__getitem__)
        known = {
            name: self._found[number] for name, number in node.named(node.outputs) if number in self._found
        }
        label = builder._tensors[node.writes[0]].label
        if type(operation).gradient is Operation.gradient:
            raise InvalidRequest(
                field="outputs",
                value=Words(label),
                problem=f"depends on wrt by {type(operation).__name__}, which has no gradient",
                fix="differentiate what comes before it, or with respect to what comes behind it",
            )
        with self._label(label):
            place = len(builder._operations)
            gradients = operation.gradient(builder, known)
            wanted = (of.number for n, of in gradients.items() if operands[n].number in self._depends)
            builder._drop_unread(place, wanted)
        for name, gradient in gradients.items():
            self._add(operands[name].number, gradient)

    def _add(self, number: int, gradient: Tensor) -> None:
        """Add a gradient of a tensor to those found before."""
        if number not in self._depends:
            return
        builder, spec, before = self._builder, self._builder._tensors[number].spec, self._found.get(number)
        assert gradient.dims == spec.dims, f"a gradient of dims {gradient.dims} for {spec.dims}"
        with self._label(builder._tensors[number].label):
            if before is not None:
                gradient = builder.add(before, gradient)
            if gradient.dtype is not spec.dtype:
                gradient = builder._convert(gradient, spec.dtype, kept=False)
        self._found[number] = gradient

    @contextlib.contextmanager
    def _label(self, label: str) -> Iterator[None]:
        """Label the operations added here as the gradient of `label`, unless an outer call labels them.

        Raises `InvalidRequest` at the end if the graph has too many operations.
        """
        outer = self._builder._gradient_of
        self._builder._gradient_of = outer or f"gradient of {label}"
        try:
            yield
        finally:
            self._builder._gradient_of = outer
        self._builder._limits.check_operations(len(self._builder._operations))
