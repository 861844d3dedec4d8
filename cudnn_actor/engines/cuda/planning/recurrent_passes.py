"""Layers of recurrent networks and their gradients as steps by themselves, which hand on reserves as bytes.

A reserve of bytes has libcudnn's own contents. So it may lie in a buffer, and the forward pass and the two
gradients may be requests of their own. A plan with such operands cannot be checked by itself: only libcudnn
knows the right contents. A plan of the same steps in which the layers come first (`close_graph`) is checked
instead, by its other results.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from cudnn_actor.engines.cuda.cudnn.frontend_graph import Refused
from cudnn_actor.engines.cuda.operations.recurrent_calls import (
    LayerBackwardData,
    LayerBackwardWeights,
    Layers,
    LayerWeights,
)
from cudnn_actor.engines.cuda.planning.changed_graphs import graph_of
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.operations import (
    GraphTensor,
    Node,
    Recurrent,
    RecurrentBackwardData,
    RecurrentBackwardWeights,
    TensorRole,
)
from cudnn_actor.protocol.operations.base import tensor_of
from cudnn_actor.protocol.types.tensor import TensorSpec

__all__ = ["close_graph", "has_bytes", "passes"]

_STATES = ("h0", "c0", "h_n", "c_n", "dh_n", "dc_n", "dh0", "dc0")
_OF_LAYERS = frozenset((*LayerWeights.inputs, *_STATES, *LayerBackwardWeights.outputs))
"""Operands of which libcudnn's calls have one for each layer."""


def has_bytes(graph: OperationGraph) -> bool:
    """Whether a recurrent operation of a graph has a reserve, or slopes, that are bytes."""
    return any(_kept_specs(graph, each) for each in graph.operations)


def _kept_specs(graph: OperationGraph, operation: Any) -> Mapping[str, TensorSpec]:
    """The specs of the tensors that an operation's bytes stand for, by the names of its operands."""
    if not isinstance(operation, Recurrent | RecurrentBackwardData | RecurrentBackwardWeights):
        return {}
    return operation.kept_specs({name: graph.tensor(uid).spec for name, uid in operation.named()})


# The steps.


def passes(graph: OperationGraph) -> Sequence[Node]:
    """Returns the calls of libcudnn that compute a graph of recurrent operations, each of one layer.

    Reserves and slopes that are not bound have new uids, and so have the spaces of weights: only the library
    knows their sizes.

    Raises `Refused` if a bound reserve is not bytes, or if there are other operations.
    """
    return _Passes(graph).calls()


class _Passes:
    """Finds the calls for one graph."""

    def __init__(self, graph: OperationGraph) -> None:
        self._graph = graph
        self._uids = itertools.count(1 + max(tensor.uid for tensor in graph.tensors))
        self._kept: dict[int, int] = {}
        """The new uids of reserves and slopes that are not bound, by their uids in the graph."""
        self._spaces: dict[Any, int] = {}
        self._calls: list[Any] = []

    def calls(self) -> Sequence[Node]:
        for each in self._graph.operations:
            match each:
                case Recurrent():
                    reserve = None if each.reserve is None else self._place_of_written(each, "reserve")
                    self._add(Layers, each, space=self._space(each), reserve=reserve)
                case RecurrentBackwardData():
                    reserve = self._place_of_read(each, "reserve")
                    slopes = None if each.slopes is None else self._place_of_written(each, "slopes")
                    self._add(
                        LayerBackwardData, each, space=self._space(each), reserve=reserve, slopes=slopes
                    )
                case RecurrentBackwardWeights():
                    self._add(LayerBackwardWeights, each, slopes=self._place_of_read(each, "slopes"))
                case _:
                    raise Refused("recurrent layers are steps of their own")
        return self._calls

    def _add(self, call: Any, operation: Any, **own: int | None) -> None:
        """Add the call of an operation, with these operands as they are stored."""
        given: dict[str, Any] = {"mode": operation.mode, "lengths": operation.lengths, **own}
        for name in (*call.inputs, *call.outputs):
            if name not in own:
                uid = getattr(operation, name)
                given[name] = uid if name not in _OF_LAYERS else () if uid is None else (uid,)
        self._calls.append(call(**given))

    def _space(self, operation: Any) -> int:
        """The space of the weights of an operation, which an earlier call may have filled."""
        weights: dict[str, Any] = {
            name: () if (uid := getattr(operation, name)) is None else (uid,) for name in LayerWeights.inputs
        }
        key = (operation.mode, *weights.values())
        if key not in self._spaces:
            space = self._spaces[key] = next(self._uids)
            self._calls.append(LayerWeights(**weights, space=space, mode=operation.mode))
        return self._spaces[key]

    def _place_of_written(self, operation: Any, name: str) -> int:
        """The uid of the tensor that takes a reserve, or slopes, that an operation writes."""
        uid: int = getattr(operation, name)
        if self._is_bound(operation, name):
            return uid
        self._kept[uid] = next(self._uids)
        return self._kept[uid]

    def _place_of_read(self, operation: Any, name: str) -> int:
        """The uid of the tensor that has a reserve, or slopes, that an operation reads."""
        uid = getattr(operation, name)
        if uid in self._kept:
            return self._kept[uid]
        if uid is None or not self._is_bound(operation, name):
            raise Refused("cuDNN's reserve has no meaning outside of it: gradients compute the steps again")
        bound: int = uid
        return bound

    def _is_bound(self, operation: Any, name: str) -> bool:
        """Whether a reserve, or slopes, lie in a buffer. Raises `Refused` if they are then not bytes."""
        if self._graph.tensor(getattr(operation, name)).role is not TensorRole.BOUND:
            return False
        if name not in _kept_specs(self._graph, operation):
            raise refusal_of(name)
        return True


def refusal_of(name: str) -> Refused:
    """The refusal of a reserve, or of slopes, in a buffer of numbers."""
    return Refused(
        f"{name} of cuDNN's are bytes that have a meaning to it alone: give a buffer of uint8 with as many "
        "as gpu.reserve_nbytes(layer) says, or ask for the gradients of a graph, by g.grad"
    )


# The check.


def close_graph(graph: OperationGraph) -> OperationGraph | None:
    """Returns the graph whose plan is checked in place of the plan of a graph with bytes; None without bytes.

    Where an operation reads bytes that no operation before it writes, the layer comes first, and perhaps its
    gradients by data. The operation then comes twice, because a reserve must be as good after it as before.
    All reserves lie within the plan, as tensors of numbers, so that the graph can be evaluated.
    """
    return _Closing(graph).close() if has_bytes(graph) else None


class _Closing:
    """Closes one graph."""

    def __init__(self, graph: OperationGraph) -> None:
        self._graph = graph
        self._tensors = {tensor.uid: tensor for tensor in graph.tensors}
        self._uids = itertools.count(1 + max(self._tensors))
        self._operations: list[Any] = []

    def close(self) -> OperationGraph:
        for operation in self._graph.operations:
            own = self._with_written_operands(operation)
            self._keep_within(operation)
            if own is not operation:
                self._add_twin(own)
            self._operations.append(own)
        return graph_of(self._operations, self._tensors, self._graph.numerics)

    def _with_written_operands(self, operation: Any) -> Any:
        """The operation, on a reserve or slopes that one before it writes, which is added if it is absent."""
        match operation:
            case RecurrentBackwardData(reserve=int(uid)) if uid not in self._graph.written:
                return msgspec.structs.replace(operation, **self._layer_of(operation))
            case RecurrentBackwardWeights(slopes=uid) if uid not in self._graph.written:
                return msgspec.structs.replace(operation, **self._slopes_of(operation))
        return operation

    def _layer_of(self, back: RecurrentBackwardData[int]) -> dict[str, int]:
        """Adds the layer of which these are the gradients. Returns its y and its reserve."""
        given = {name: getattr(back, name) for name in (*Recurrent.inputs, "mode", "lengths")}
        return self._apply(Recurrent(**given), "y", "reserve")

    def _slopes_of(self, weights: RecurrentBackwardWeights[int]) -> dict[str, int]:
        """Adds a layer with such weights, and its gradients by data. Returns its y, and their slopes."""
        given: dict[str, Any] = {name: getattr(weights, name) for name in ("x", "h0", "mode", "lengths")}
        for name in LayerWeights.inputs:
            uid = getattr(weights, f"d{name}")
            given[name] = None if uid is None else self._input(self._tensors[uid].spec)
        specs = {name: self._tensors[uid].spec for name, uid in weights.named()}
        (kept,) = weights.kept_specs(specs).values()
        directions, _, _, _, hidden = kept.dims
        state = specs["dw_hh"].dims[2]
        if given["w_hr"] is None and state < hidden:
            given["w_hr"] = self._input(TensorSpec.packed((directions, state, hidden), specs["x"].dtype))
        made: dict[str, Any] = self._apply(Recurrent(**given), "y", "reserve")
        dy = self._input(specs["y"])
        back: Any = RecurrentBackwardData(**given, **made, dy=dy)
        return {"y": made["y"], "slopes": self._apply(back, "dx", "slopes")["slopes"]}

    def _input(self, spec: TensorSpec) -> int:
        """Adds an input."""
        uid = next(self._uids)
        self._tensors[uid] = tensor_of(uid, spec)
        return uid

    def _apply(self, operation: Any, *names: str) -> dict[str, int]:
        """Adds an operation with these outputs. Returns their uids, by name."""
        inferred = operation.infer({name: self._tensors[uid].spec for name, uid in operation.named()})
        made = {name: next(self._uids) for name in names}
        for name, uid in made.items():
            self._tensors[uid] = tensor_of(uid, inferred[name], role=TensorRole.VIRTUAL)
        self._operations.append(msgspec.structs.replace(operation, **made))
        return made

    def _add_twin(self, operation: Any) -> None:
        """Adds an operation whose results are those of another one, and which nothing reads."""
        made = {}
        for name, uid in operation.named(operation.outputs):
            made[name] = next(self._uids)
            spec = TensorSpec.packed(self._tensors[uid].dims, self._tensors[uid].dtype)
            self._tensors[made[name]] = tensor_of(made[name], spec, role=TensorRole.VIRTUAL)
        self._operations.append(msgspec.structs.replace(operation, **made))

    def _keep_within(self, operation: Any) -> None:
        """Turn the bytes that an operation writes into a tensor of numbers within the plan."""
        kept = _kept_specs(self._graph, operation)
        for name, uid in operation.named(operation.outputs):
            if name in kept:
                found: GraphTensor = tensor_of(uid, kept[name], role=TensorRole.VIRTUAL)
                self._tensors[uid] = found
