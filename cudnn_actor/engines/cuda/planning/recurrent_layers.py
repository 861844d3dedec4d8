"""Finds recurrent layers that libcudnn computes together: layers one above the other, and their gradients.

In a graph, a layer is an operation (`Recurrent`), and its gradients are two operations. Layers become
neighbours if only the next layer and their gradients read their results. The gradients of such layers become
neighbours, too. Each group of neighbours is a piece, which is one step of a plan.

Only libcudnn understands its reserve, which it keeps for the gradients. So no piece hands a reserve to
another: the piece of the gradients contains the layers, too, and each piece can be checked by itself. A plan
of both pieces then computes the layers only once: see `Together.kept`. If a graph has a reserve as bytes,
each operation is a step of its own: see `recurrent_passes`.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from cudnn_actor.engines.cuda.cudnn.frontend_graph import Refused
from cudnn_actor.engines.cuda.operations.recurrent_calls import Layers, LayersBackward, LayerWeights
from cudnn_actor.engines.cuda.planning.changed_graphs import graph_of
from cudnn_actor.engines.cuda.planning.recurrent_passes import has_bytes, passes, refusal_of
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.operations import (
    Node,
    Recurrent,
    RecurrentBackwardData,
    RecurrentBackwardWeights,
    TensorRole,
)
from cudnn_actor.protocol.operations.base import tensor_of
from cudnn_actor.protocol.types.tensor import TensorSpec

__all__ = ["Kept", "Together", "replace_layers", "together"]

_RECURRENT: Any = Recurrent | RecurrentBackwardData | RecurrentBackwardWeights
_OF_LAYERS = (*LayerWeights.inputs, "h0", "c0")
_HANDED_ON = frozenset(("x", "y", "reserve", "slopes", "dy"))
"""Operands that the library hands on from one operation of a group to another."""


class Kept(NamedTuple):
    """A group of layers, and a group of gradients that can read its reserve.

    Parameters
    ----------
    layers, gradients
        The number of the first operation of each group; in a `Cut`, the number of each piece.
    y
        The uid of the last layer's output, which the gradients read, too.
    """

    layers: int
    gradients: int
    y: int


class Together(NamedTuple):
    """A graph in which the operations of a group are neighbours.

    Parameters
    ----------
    graph
        The graph. All its tensors keep their uids; there may be more.
    numbers
        The number that each operation had before. A layer's number stands twice if the group of its gradients
        contains the layer, too.
    groups
        The numbers of the operations of each group.
    kept
        The groups of layers, each with the group of gradients that can read its reserve.
    """

    graph: OperationGraph
    numbers: tuple[int, ...]
    groups: tuple[range, ...]
    kept: tuple[Kept, ...]


class _Layer(NamedTuple):
    """The numbers of a layer and of its gradients by data and by weights; None for one that is missing."""

    forward: int | None
    data: int | None = None
    weights: int | None = None

    @property
    def gradients(self) -> set[int]:
        """The numbers of its gradients."""
        return {each for each in (self.data, self.weights) if each is not None}


class _Block(NamedTuple):
    """Operations that become neighbours.

    Parameters
    ----------
    operations
        The operations, each with the number that it had.
    of
        The number of the first layer of the block whose reserve these gradients can read; None if there is
        none.
    y
        The uid of the output of that block's last layer.
    """

    operations: tuple[tuple[int, Any], ...]
    of: int | None = None
    y: int = -1


def together(graph: OperationGraph, *, apart: bool = False) -> Together | None:
    """Returns the graph with groups of layers, each by itself if `apart`; None if it has no layers."""
    if not any(isinstance(each, _RECURRENT) for each in graph.operations):
        return None
    return _Grouping(graph).group(apart=apart)


class _Grouping:
    """Finds the groups of one graph."""

    def __init__(self, graph: OperationGraph) -> None:
        self._graph = graph
        self._operations: Sequence[Any] = graph.operations
        self._tensors = {tensor.uid: tensor for tensor in graph.tensors}
        self._readers: defaultdict[int, list[int]] = defaultdict(list)
        for number, operation in enumerate(graph.operations):
            for uid in dict.fromkeys(operation.reads):
                self._readers[uid].append(number)
        self._uids = itertools.count(1 + max(self._tensors))

    def group(self, *, apart: bool) -> Together:
        """See `together`."""
        layers = list(self._layers())
        each_alone = [[layer] for layer in layers]
        for stacks in (*([] if apart else [self._stacks(layers)]), each_alone):
            blocks = [block for stack in stacks for block in self._blocks(stack)]
            in_order = self._in_order(blocks)
            if in_order is not None:
                return self._together(in_order)
        # Even a group of one layer's gradients would wait for itself: no operations are joined.
        return Together(self._graph, tuple(range(len(self._operations))), (), ())

    # Layers, and which of them are one above the other.

    def _layers(self) -> Iterator[_Layer]:
        """Yields each layer with its gradients, and each gradient by data that does not belong to a layer.

        Where several operations read a layer's reserve, the layer is without gradients: each of them computes
        it again.
        """
        of_layers: set[int] = set()
        for number, operation in enumerate(self._operations):
            if isinstance(operation, Recurrent):
                data = self._only_reader(operation.reserve, RecurrentBackwardData)
                if data is None or not _is_of(self._operations[data], operation):
                    yield _Layer(number)
                    continue
                of_layers.add(data)
                yield _Layer(number, data, self._weights_of(data))
        for number, operation in enumerate(self._operations):
            if isinstance(operation, RecurrentBackwardData) and number not in of_layers:
                yield _Layer(None, number, self._weights_of(number))

    def _weights_of(self, data: int) -> int | None:
        """The number of the gradient by weights that reads the slopes of a gradient by data.

        None if there is none, or if the library does not compute the two together.
        """
        back = self._operations[data]
        number = self._only_reader(back.slopes, RecurrentBackwardWeights)
        if number is None:
            return None
        weights = self._operations[number]
        alike = all(getattr(back, name) == getattr(weights, name) for name in ("x", "h0", "mode", "lengths"))
        return number if alike and weights.y not in back.writes else None

    def _only_reader(self, uid: int | None, kind: type[Any]) -> int | None:
        """The number of the only operation that reads a tensor; None unless it is of this kind."""
        if uid is None or self._is_bound(uid) or len(self._readers[uid]) != 1:
            return None
        (number,) = self._readers[uid]
        return number if isinstance(self._operations[number], kind) else None

    def _is_read_as(self, uid: int, names: Mapping[int, str]) -> bool:
        """Whether only operations with these numbers read a tensor, each as the operand of that name."""
        for number in self._readers[uid]:
            operation = self._operations[number]
            if [name for name, read in operation.named(operation.inputs) if read == uid] != [
                names.get(number)
            ]:
                return False
        return True

    def _is_bound(self, uid: int) -> bool:
        return self._tensors[uid].role is TensorRole.BOUND

    def _stacks(self, layers: Sequence[_Layer]) -> list[list[_Layer]]:
        """Layers one above the other, the lowest first."""
        by_input = {self._operations[each.forward].x: each for each in layers if each.forward is not None}
        above = {}
        for layer in layers:
            upper = None if layer.forward is None else by_input.get(self._operations[layer.forward].y)
            if upper is not None and self._are_linked(layer, upper):
                above[layer] = upper
        stacks, uppers = list[list[_Layer]](), set(above.values())
        for layer in layers:
            if layer not in uppers:
                stack = [layer]
                while stack[-1] in above:
                    stack.append(above[stack[-1]])
                stacks += self._divide(stack)
        return stacks

    def _divide(self, stack: Sequence[_Layer]) -> Iterator[list[_Layer]]:
        """Yields the parts of a stack in which layers share no operands but those that the library hands on.

        A layer may begin with the last state of the layer below. In one call, that operand would be a result.
        """
        part, read, written = list[_Layer](), set[int](), set[int]()
        for layer in stack:
            reads, writes = self._read_and_written(layer)
            if not (written.isdisjoint(reads) and read.isdisjoint(writes)):
                yield part
                part, read, written = [], set(), set()
            part.append(layer)
            read |= reads
            written |= writes
        yield part

    def _read_and_written(self, layer: _Layer) -> tuple[set[int], set[int]]:
        """The uids that a layer and its gradients read, without those in `_HANDED_ON`, and write."""
        numbers = (layer.forward, layer.data, layer.weights)
        operations = [self._operations[number] for number in numbers if number is not None]
        reads = {
            uid for each in operations for name, uid in each.named(each.inputs) if name not in _HANDED_ON
        }
        return reads, {uid for each in operations for uid in each.writes}

    def _are_linked(self, lower: _Layer, upper: _Layer) -> bool:
        """Whether the library can compute a layer and one that reads it together, with their gradients."""
        assert lower.forward is not None
        assert upper.forward is not None
        own, other = self._operations[lower.forward], self._operations[upper.forward]
        if self._is_bound(own.y) or self._form(own) != self._form(other):
            return False
        as_x = dict.fromkeys((upper.forward, *upper.gradients), "x")
        if not self._is_read_as(own.y, as_x | dict.fromkeys(lower.gradients, "y")):
            return False
        if lower.data is None or upper.data is None:
            return lower.data is upper.data and not any(map(self._is_read_apart, (own, other)))
        return self._are_gradients_linked(lower, upper)

    def _are_gradients_linked(self, lower: _Layer, upper: _Layer) -> bool:
        """Whether the gradients of the lower layer read those of the upper one, which nothing else reads."""
        back, next_back = (self._operations[each.data or 0] for each in (lower, upper))
        if back.dy != next_back.dx or self._is_bound(next_back.dx):
            return False
        if not self._is_read_as(next_back.dx, {lower.data or 0: "dy"}):
            return False
        if _names(back) - {"dy"} != _names(next_back) - {"dy"}:
            return False
        if lower.weights is None or upper.weights is None:
            return lower.weights is upper.weights
        own, other = self._operations[lower.weights], self._operations[upper.weights]
        return (own.y, other.y) == (back.y, next_back.y) and _names(own) == _names(other)

    def _is_read_apart(self, layer: Recurrent[int]) -> bool:
        """Whether something reads a layer's reserve."""
        uid = layer.reserve
        return uid is not None and (self._is_bound(uid) or bool(self._readers[uid]))

    def _form(self, layer: Recurrent[int]) -> tuple[object, ...]:
        """The properties that layers which are computed together have in common."""
        w_hh = self._tensors[layer.w_hh]
        return layer.mode, layer.lengths, _names(layer), w_hh.dims, w_hh.dtype

    # Groups.

    def _blocks(self, stack: Sequence[_Layer]) -> Iterator[_Block]:
        """Yields the groups of a stack: the layers, if the graph needs their results, and the gradients."""
        forward = [
            (each.forward, self._operations[each.forward]) for each in stack if each.forward is not None
        ]
        own = [(number, msgspec.structs.replace(each, h_n=None, c_n=None)) for number, each in forward]
        gradients = [
            (number, self._operations[number])
            for numbers in ([each.data for each in stack], [each.weights for each in stack])
            for number in reversed(numbers)
            if number is not None
        ]
        if not forward:
            yield _Block(tuple(self._computed_again(*gradients)))
        elif not gradients:
            yield _Block(tuple(map(self._without_reserve, forward)))
        elif not self._are_needed(forward, [number for number, _ in gradients]):
            yield _Block((*own, *gradients))
        else:
            yield _Block(tuple(forward))
            of = self._copies([uid for _, each in forward for uid in (each.y, each.reserve)])
            copied = tuple((number, _read_copies(each, of)) for number, each in (*own, *gradients))
            yield _Block(copied, of=forward[0][0], y=forward[-1][1].y)

    def _are_needed(self, forward: Sequence[tuple[int, Any]], gradients: Sequence[int]) -> bool:
        """Whether results of layers are bound, or read by anything but the gradients of these layers."""
        ends = [uid for _, each in forward for uid in (each.h_n, each.c_n) if uid is not None]
        y = forward[-1][1].y
        if any(self._is_bound(uid) for uid in (y, *ends)) or any(self._readers[uid] for uid in ends):
            return True
        return not self._is_read_as(y, dict.fromkeys(gradients, "y"))

    def _without_reserve(self, numbered: tuple[int, Any]) -> tuple[int, Any]:
        """A layer with its number, without a reserve that only gradients read which compute it again."""
        number, layer = numbered
        uid = layer.reserve
        if uid is None or self._is_bound(uid) or not self._readers[uid]:
            return numbered
        readers = [self._operations[each] for each in self._readers[uid]]
        if all(isinstance(each, RecurrentBackwardData) and _is_of(each, layer) for each in readers):
            return number, msgspec.structs.replace(layer, reserve=None)
        return numbered

    def _computed_again(self, data: tuple[int, Any], *weights: tuple[int, Any]) -> Iterator[tuple[int, Any]]:
        """Yields a layer and its gradients, for gradients that do not belong to a layer of the graph.

        Gradients that read the reserve of another layer, or an input, stay alone: `replace_layers` refuses
        them.
        """
        number, back = data
        if back.reserve is not None and not self._is_computed(back):
            yield from (data, *weights)
            return
        layer: Recurrent[int] = Recurrent(
            **{name: getattr(back, name) for name in (*Recurrent.inputs, "mode", "lengths")}
        )
        specs = {name: self._tensors[uid].spec for name, uid in layer.named(layer.inputs)}
        inferred = layer.infer(specs)
        y, reserve = next(self._uids), next(self._uids)
        for uid, name in ((y, "y"), (reserve, "reserve")):
            self._tensors[uid] = tensor_of(uid, inferred[name], role=TensorRole.VIRTUAL)
        yield number, msgspec.structs.replace(layer, y=y, reserve=reserve)
        yield number, msgspec.structs.replace(back, y=y, reserve=reserve)
        yield from weights

    def _is_computed(self, back: RecurrentBackwardData[int]) -> bool:
        """Whether the reserve that a gradient reads is written by the layer of which it is the gradient."""
        layer = self._by_reserve.get(back.reserve or 0)
        return layer is not None and _is_of(back, layer)

    @functools.cached_property
    def _by_reserve(self) -> dict[int, Recurrent[int]]:
        """The layers, by their reserves."""
        layers = (each for each in self._operations if isinstance(each, Recurrent))
        return {each.reserve: each for each in layers if each.reserve is not None}

    def _copies(self, uids: Sequence[int]) -> dict[int, int]:
        """Adds a tensor for a copy of each result. Returns the copies' uids, by the results' uids."""
        found = {uid: next(self._uids) for uid in uids}
        for uid, new in found.items():
            spec = TensorSpec.packed(self._tensors[uid].dims, self._tensors[uid].dtype)
            self._tensors[new] = tensor_of(new, spec, role=TensorRole.VIRTUAL)
        return found

    # The graph with its groups.

    def _in_order(self, blocks: Sequence[_Block]) -> list[_Block] | None:
        """These blocks, and a block for each other operation, each behind the blocks that it reads from.

        The order is as near to the graph's as possible. None if there is no such order.
        """
        inside = {number for block in blocks for number, _ in block.operations}
        others = [(n, each) for n, each in enumerate(self._operations) if n not in inside]
        nodes = [*blocks, *(_Block((one,)) for one in others)]
        writers = {
            uid: n for n, node in enumerate(nodes) for _, each in node.operations for uid in each.writes
        }
        before: list[set[int]] = [set() for _ in nodes]
        for n, node in enumerate(nodes):
            for uid in {uid for _, each in node.operations for uid in each.reads}:
                if uid in writers:
                    before[n].add(writers[uid])
                for over in self._over.get(uid, ()):
                    before[writers[over]].add(n)
        return _sort_blocks(nodes, [each - {n} for n, each in enumerate(before)])

    @functools.cached_property
    def _over(self) -> dict[int, list[int]]:
        """The tensors that are written over each tensor."""
        found: defaultdict[int, list[int]] = defaultdict(list)
        for tensor in self._graph.tensors:
            if tensor.overwrites is not None:
                found[tensor.overwrites].append(tensor.uid)
        return found

    def _together(self, blocks: Sequence[_Block]) -> Together:
        """See `together`. `blocks`: in order."""
        numbered = [one for block in blocks for one in block.operations]
        operations = tuple(each for _, each in numbered)
        starts = list(itertools.accumulate((len(block.operations) for block in blocks), initial=0))
        groups = tuple(
            range(start, end)
            for start, end in itertools.pairwise(starts)
            if isinstance(operations[start], _RECURRENT)
        )
        first = {
            block.operations[0][0]: start
            for block, start in zip(blocks, starts, strict=False)
            if block.of is None
        }
        kept = tuple(
            Kept(first[block.of], start, block.y)
            for block, start in zip(blocks, starts, strict=False)
            if block.of is not None
        )
        graph = self._graph
        if operations != graph.operations:
            graph = graph_of(operations, self._tensors, graph.numerics)
        return Together(graph, tuple(number for number, _ in numbered), groups, kept)


def _sort_blocks(nodes: Sequence[_Block], before: Sequence[set[int]]) -> list[_Block] | None:
    """The nodes in the order of their first operations' numbers, but each behind the nodes in its `before`.

    None if nodes wait for each other in a circle.
    """
    behind: defaultdict[int, list[int]] = defaultdict(list)
    for n, earlier in enumerate(before):
        for each in earlier:
            behind[each].append(n)
    left = [len(earlier) for earlier in before]
    ready = [(nodes[n].operations[0][0], n) for n, count in enumerate(left) if not count]
    heapq.heapify(ready)
    found = []
    while ready:
        _, n = heapq.heappop(ready)
        found.append(nodes[n])
        for each in behind[n]:
            left[each] -= 1
            if not left[each]:
                heapq.heappush(ready, (nodes[each].operations[0][0], each))
    return found if len(found) == len(nodes) else None


def _is_of(back: RecurrentBackwardData[int], layer: Recurrent[int]) -> bool:
    """Whether a gradient by data is that of a layer."""
    names = (*Recurrent.inputs, "y", "mode", "lengths")
    return all(getattr(back, name) == getattr(layer, name) for name in names)


def _names(operation: Any) -> set[str]:
    """The names of an operation's operands."""
    return {name for name, _ in operation.named()}


def _read_copies(operation: Any, of: Mapping[int, int]) -> Any:
    """The operation, with copies of its layer's results as the operands that the library hands on."""
    return msgspec.structs.replace(
        operation,
        **{name: of[uid] for name, uid in operation.named() if name in _HANDED_ON - {"dy"} and uid in of},
    )


# A group as one step.


def replace_layers(graph: OperationGraph) -> Sequence[Node]:
    """Returns the operations of a graph, with libcudnn's calls in place of a group of recurrent layers.

    The calls have an operand that the graph does not have, with a new uid: the library's reserve, or the
    space of the weights.

    Raises `Refused` if a buffer would hold a reserve or slopes as numbers.
    """
    operations = graph.operations
    if not any(isinstance(each, _RECURRENT) for each in operations):
        return operations
    if has_bytes(graph):
        return passes(graph)
    layers: list[Any] = [each for each in operations if isinstance(each, Recurrent)]
    data: list[Any] = [each for each in operations if isinstance(each, RecurrentBackwardData)]
    weights: list[Any] = [each for each in operations if isinstance(each, RecurrentBackwardWeights)]
    bound = {tensor.uid for tensor in graph.tensors if tensor.role is TensorRole.BOUND}
    if any(each.slopes in bound for each in (*data, *weights)):
        raise refusal_of("slopes")
    if any(each.reserve in bound for each in (*layers, *data)):
        raise refusal_of("reserve")
    is_one = len(layers) + len(data) + len(weights) == len(operations) and len(data) in (0, len(layers))
    if not is_one or len(weights) not in (0, len(data)):
        raise Refused("recurrent layers are steps of their own")
    new = 1 + max(tensor.uid for tensor in graph.tensors)
    return (_backward(layers, data[::-1], weights[::-1], new),) if data else _forward(layers, new)


def _forward(layers: Sequence[Any], new: int) -> Sequence[Any]:
    """The call for layers, the lowest first; before it the call that copies their weights, unless it keeps a
    reserve."""
    first, mode = layers[0], layers[0].mode
    given: dict[str, Any] = {name: _all(layers, name) for name in (*_OF_LAYERS, "h_n", "c_n")}
    whole: Any = Layers(x=first.x, y=layers[-1].y, mode=mode, lengths=first.lengths, **given)
    if first.reserve is not None:
        return (msgspec.structs.replace(whole, reserve=new),)
    weights = {name: given[name] for name in LayerWeights.inputs}
    return LayerWeights(**weights, space=new, mode=mode), msgspec.structs.replace(whole, space=new)


def _backward(layers: Sequence[Any], data: Sequence[Any], weights: Sequence[Any], reserve: int) -> Node:
    """The call for the gradients of layers, those of the lowest first."""
    given: dict[str, Any] = {name: _all(layers, name) for name in _OF_LAYERS}
    given |= {name: _all(data, name) for name in ("dh_n", "dc_n", "dh0", "dc0")}
    given |= {name: _all(weights, name) for name in RecurrentBackwardWeights.outputs}
    given |= {"dy": data[-1].dy, "dx": data[0].dx, "reserve": reserve}
    if weights and weights[-1].y != layers[-1].y:
        given["y"] = weights[-1].y
    return LayersBackward(x=layers[0].x, mode=layers[0].mode, lengths=layers[0].lengths, **given)


def _all(operations: Sequence[Any], name: str) -> tuple[int, ...]:
    """The uids of an operand of each operation; empty if the operations have no such operand."""
    return tuple(uid for each in operations if (uid := getattr(each, name)) is not None)
