"""Joins products of one value by several weights into one product, by all these weights side by side.

Queries, keys and values of attention are such products, and the two halves of a gated network. One large
product takes less time than several smaller ones, and one launch. The weights are put side by side once, when
they are uploaded. Each former result is a slice of the large one. It is not copied where pointwise operations
or products read it, or where only its last dim is split.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from cudnn_actor.models.source import Origin, Weight, values_of
from cudnn_actor.protocol.graphs.named_graph import Graph, Port
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.operations import (
    GraphTensor,
    MatMul,
    Node,
    Pointwise,
    PointwiseMode,
    Reshape,
    Slice,
    TensorRole,
    Transpose,
)
from cudnn_actor.protocol.types.dtypes import DType
from cudnn_actor.protocol.types.tensor import TensorSpec, packed_strides

__all__ = ["Joined", "join_products"]

_PART_BYTES = 16
"""Parts begin at multiples of this: where kernels read vectors."""


class Joined(NamedTuple):
    """A graph, and its weights with their origins."""

    graph: Graph
    weights: Mapping[str, tuple[str, Weight]]
    origins: Mapping[str, Origin]


def join_products(of: Joined, name: Callable[[str], str]) -> Joined:
    """Join the products of a graph. `name` returns a name that no port has yet, made from one for people."""
    return _Joining(of, name).join()


class _Factor(NamedTuple):
    """A weight that a product or a sum reads, with its port and the operations between it and the reader."""

    uid: int
    port: str
    numbers: tuple[int, ...]
    turned: bool = False


class _Part(NamedTuple):
    """A product by a weight, perhaps with a bias.

    `numbers`: its operations. `rounded`: the tensors that get the operands' type once it is joined.
    """

    number: int
    weight: _Factor
    bias: _Factor | None
    result: int
    numbers: tuple[int, ...]
    rounded: tuple[int, ...] = ()


class _Joining:
    """Finds such products in one graph, and replaces them."""

    def __init__(self, of: Joined, name: Callable[[str], str]) -> None:
        self._of, self._name = of, name
        self._body = body = of.graph.body
        self._readers = defaultdict[int, list[int]](list)
        """Tensors → the numbers of the operations that read them, once for each read."""
        self._writers: dict[int, int] = {}
        for number, operation in enumerate(body.operations):
            for uid in operation.reads:
                self._readers[uid].append(number)
            self._writers.update(dict.fromkeys(operation.writes, number))
        self._ports = {port.uid: port.name for port in of.graph.inputs if port.name in of.weights}
        self._tensors = {tensor.uid: tensor for tensor in body.tensors}
        self._new_uids = itertools.count(1 + max(self._tensors))
        self._made: list[Port] = []
        self._weights, self._origins = dict(of.weights), dict(of.origins)

    def join(self) -> Joined:
        """See `join_products`."""
        groups = [group for group in self._groups() if len(group) > 1]
        if not groups:
            return self._of
        instead = {group[0].number: self._instead(group) for group in groups}
        gone = {number for group in groups for part in group for number in part.numbers}
        operations: list[Node] = []
        for number, operation in enumerate(self._body.operations):
            operations += instead.get(number, [] if number in gone else [operation])
        touched = dict.fromkeys(uid for each in operations for uid in (*each.reads, *each.writes))
        body = OperationGraph(
            tensors=tuple(self._tensors[uid] for uid in touched),
            operations=tuple(operations),
            numerics=self._body.numerics,
        )
        inputs = (*(port for port in self._of.graph.inputs if port.uid in touched), *self._made)
        graph = Graph(body=body, inputs=inputs, outputs=self._of.graph.outputs)
        read = {port.name for port in inputs}
        weights = {port: weight for port, weight in self._weights.items() if port in read}
        keys = {key for key, _ in weights.values()}
        return Joined(graph, weights, {key: of for key, of in self._origins.items() if key in keys})

    # Finding them.

    def _groups(self) -> Sequence[list[_Part]]:
        """The products that may be joined, in groups that share the properties that joined products must have
        in common."""
        found = defaultdict[tuple[object, ...], list[_Part]](list)
        for number, operation in enumerate(self._body.operations):
            part = self._part(number, operation) if isinstance(operation, MatMul) else None
            if part is None:
                continue
            of_bias = None if part.bias is None else self._tensors[part.bias.uid].dtype
            found[operation.reads[0], part.weight.turned, of_bias].append(part)
        return [*found.values()]

    def _part(self, number: int, operation: MatMul[int]) -> _Part | None:
        """A product as one that may be joined; None if it may not."""
        y, weight = self._tensors[operation.y], self._weight(operation.b)
        if weight is None or operation.a == operation.b or y.role is not TensorRole.VIRTUAL:
            return None
        sum_of, bias = self._sum(y)
        result, numbers = y.uid, (number, *weight.numbers)
        if sum_of is not None and bias is not None:
            (result,) = self._body.operations[sum_of].writes
            numbers = (*numbers, sum_of, *bias.numbers)
        tensor, narrow = self._tensors[result], self._tensors[operation.a].dtype
        readers = [self._body.operations[each] for each in self._readers[result]]
        rounded = () if tensor.dtype is narrow else self._values_to_round(result) if narrow.is_half else None
        whole = tensor.dims[-1] * narrow.itemsize % _PART_BYTES == 0
        plain = tensor.role is TensorRole.VIRTUAL and tensor.strides == packed_strides(tensor.dims)
        in_parts = all(_reads_parts(each, result, self._tensors) for each in readers)
        in_parts = in_parts and not self._is_epilogue(result)
        if rounded is None or not (whole and plain and in_parts and readers) or 0 in tensor.dims:
            return None
        return _Part(number, weight, bias, result, numbers, rounded)

    def _is_epilogue(self, uid: int) -> bool:
        """Whether the operation that reads a product is better computed with it: a function of it alone, or a
        sum."""
        if len(self._readers[uid]) != 1:
            return False
        operation = self._body.operations[self._readers[uid][0]]
        if not isinstance(operation, Pointwise):
            return False
        others = [self._tensors[other] for other in operation.operands if other != uid]
        alone = all(each.role in (TensorRole.CONSTANT, TensorRole.SCALAR) for each in others)
        return alone or operation.mode in (PointwiseMode.ADD, PointwiseMode.SUB)

    def _values_to_round(self, uid: int) -> tuple[int, ...] | None:
        """A float32 result and the results of moving its elements, if only pointwise operations read these;
        else None.

        ONNX rounds products to the type of their operands. A graph keeps them in float32 for later
        operations.
        """
        found, waiting = list[int](), [uid]
        while waiting:  # a chain of many movements would be too deep for a call in a call
            moved = waiting.pop()
            if self._tensors[moved].role is not TensorRole.VIRTUAL:
                return None
            found.append(moved)
            for number in self._readers[moved]:
                operation = self._body.operations[number]
                if isinstance(operation, Reshape | Transpose):
                    waiting.append(operation.y)
                elif not isinstance(operation, Pointwise):
                    return None
        return tuple(found)

    def _weight(self, uid: int) -> _Factor | None:
        """The weight of a product, as it is or transposed; None if the factor is no weight, or is read
        elsewhere."""
        if len(self._readers[uid]) != 1 or len(self._tensors[uid].dims) != 2:
            return None
        number = self._writers.get(uid)
        if number is None:
            return self._of_port(uid)
        operation = self._body.operations[number]
        if not isinstance(operation, Transpose) or operation.axes != (1, 0):
            return None
        found = self._of_port(operation.x)
        return None if found is None else found._replace(numbers=(number,), turned=True)

    def _sum(self, y: GraphTensor) -> tuple[int | None, _Factor | None]:
        """The number of the operation that adds a bias to a product, if no other operation reads the product;
        and the bias."""
        if len(self._readers[y.uid]) != 1:
            return None, None
        (number,) = self._readers[y.uid]
        operation = self._body.operations[number]
        if not isinstance(operation, Pointwise) or operation.mode is not PointwiseMode.ADD:
            return None, None
        (other,) = (uid for uid in operation.operands if uid != y.uid)
        bias = self._bias(other, y.dims[-1])
        if bias is None or self._tensors[operation.result].dims != y.dims:
            return None, None
        return number, bias

    def _bias(self, uid: int, size: int) -> _Factor | None:
        """The weight that is added to each row, of this size."""
        tensor = self._tensors[uid]
        if len(self._readers[uid]) != 1 or tensor.dims[-1:] != (size,) or math.prod(tensor.dims) != size:
            return None
        number = self._writers.get(uid)
        if number is None:
            return self._of_port(uid)
        operation = self._body.operations[number]
        if not isinstance(operation, Reshape) or self._tensors[operation.x].dims != (size,):
            return None
        found = self._of_port(operation.x)
        return None if found is None else found._replace(numbers=(number,))

    def _of_port(self, uid: int) -> _Factor | None:
        """A weight that is read once, packed, and overwritten by nothing."""
        tensor, port = self._tensors[uid], self._ports.get(uid)
        packed = tensor.strides == packed_strides(tensor.dims)
        if port is None or len(self._readers[uid]) != 1 or not packed:
            return None
        return _Factor(uid, port, ())

    # Joining them.

    def _instead(self, group: Sequence[_Part]) -> list[Node]:
        """The operations that replace a group's operations."""
        first = self._body.operations[group[0].number]
        assert isinstance(first, MatMul), "that is what parts are"
        y, result = self._tensors[first.y], self._tensors[group[0].result]
        sizes = [self._tensors[part.result].dims[-1] for part in group]
        dims = (*y.dims[:-1], sum(sizes))
        operations: list[Node] = []
        weight = self._side_by_side([part.weight for part in group], 0 if group[0].weight.turned else 1)
        b = weight
        if group[0].weight.turned:
            b = self._new(weight, weight.dims[::-1])
            operations.append(Transpose(x=weight.uid, y=b.uid, axes=(1, 0)))
        narrow = self._tensors[first.a].dtype
        biases = [part.bias for part in group if part.bias is not None]
        product = self._new(y, dims, y.dtype if biases else narrow)
        operations.append(MatMul(a=first.a, b=b.uid, y=product.uid))
        if biases:
            bias = self._side_by_side(biases, -1)
            added = self._new(bias, (*(1,) * (len(dims) - 1), dims[-1]))
            total = self._new(result, dims, narrow)
            operations += [
                Reshape(x=bias.uid, y=added.uid, dims=added.dims),
                Pointwise(mode=PointwiseMode.ADD, operands=(product.uid, added.uid), result=total.uid),
            ]
            product = total
        starts = itertools.accumulate(sizes, initial=0)
        for part, start in zip(group, starts, strict=False):
            for uid in part.rounded:
                self._tensors[uid] = msgspec.structs.replace(self._tensors[uid], dtype=narrow)
            tensor = self._tensors[part.result]
            operations.append(
                Slice(
                    x=product.uid,
                    y=part.result,
                    starts=(*(0,) * (len(dims) - 1), start),
                    steps=(1,) * len(dims),
                    sizes=tensor.dims,
                )
            )
        return operations

    def _side_by_side(self, factors: Sequence[_Factor], axis: int) -> GraphTensor:
        """A weight that consists of several weights, as an input of the graph."""
        first, parts = self._tensors[factors[0].uid], [self._weights[each.port] for each in factors]
        size = sum(self._tensors[each.uid].dims[axis] for each in factors)
        dims = tuple(size if at == axis % len(first.dims) else n for at, n in enumerate(first.dims))
        spec = TensorSpec.packed(dims, first.dtype)
        port = self._name(f"{factors[0].port} and {len(factors) - 1} more")
        key = f"side by side along {axis}: {'; '.join(key for key, _ in parts)}"
        arrays = [array for _, array in parts]
        self._weights[port] = key, functools.partial(_concatenate, arrays, axis)
        origins = [self._origins.get(key) for key, _ in parts]
        known = [each for each in origins if each is not None]
        names = frozenset[str]().union(*(each.names for each in known))
        if names:
            compute = functools.partial(_derive, [*zip(origins, arrays, strict=True)], axis)
            self._origins[key] = Origin(key=key, names=names, compute=compute, parts=known)
        made = msgspec.structs.replace(
            first, uid=next(self._new_uids), dims=dims, strides=spec.strides, name=port
        )
        self._tensors[made.uid] = made
        self._made.append(Port(name=port, spec=made.spec, uid=made.uid))
        return made

    def _new(self, tensor: GraphTensor, dims: tuple[int, ...], dtype: DType | None = None) -> GraphTensor:
        """Another tensor between operations, of these dims."""
        made = msgspec.structs.replace(
            tensor,
            uid=next(self._new_uids),
            dims=dims,
            strides=packed_strides(dims),
            dtype=dtype or tensor.dtype,
            role=TensorRole.VIRTUAL,
        )
        self._tensors[made.uid] = made
        return made


def _reads_parts(operation: Node, uid: int, tensors: Mapping[int, GraphTensor]) -> bool:
    """Whether an operation reads a part of rows where it lies as well as a tensor of its own."""
    if isinstance(operation, Pointwise):
        return True
    if isinstance(operation, MatMul):
        return bool(uid != operation.b)
    if not isinstance(operation, Reshape):
        return False
    rows = math.prod(tensors[uid].dims[:-1])
    return rows in itertools.accumulate(operation.dims, int.__mul__, initial=1)


def _concatenate(arrays: Sequence[Weight], axis: int) -> np.ndarray:
    return np.concatenate([values_of(each) for each in arrays], axis)


def _derive(
    parts: Sequence[tuple[Origin | None, Weight]],
    axis: int,
    tensors: Mapping[str, np.ndarray],
    known: dict[str, np.ndarray],
) -> np.ndarray:
    given = (values_of(array) if of is None else of.derive(tensors, known) for of, array in parts)
    return np.concatenate([*given], axis)
