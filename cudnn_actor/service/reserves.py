"""The graph whose explanation says how many bytes the reserve of a recurrent layer has."""

from __future__ import annotations

from typing import Any

from cudnn_actor.protocol.errors import InvalidRequest
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.messages.message_checks import kind_of
from cudnn_actor.protocol.operations import Recurrent, TensorRole
from cudnn_actor.protocol.operations.base import tensor_of
from cudnn_actor.protocol.operations.field_checks import check_inputs
from cudnn_actor.protocol.types.buffers import BufferRef
from cudnn_actor.protocol.types.checks import require_awaited
from cudnn_actor.protocol.types.dtypes import DType
from cudnn_actor.protocol.types.numerics import Numerics
from cudnn_actor.protocol.types.tensor import TensorSpec

__all__ = ["graph_with_own_reserve"]


def graph_with_own_reserve(layer: Recurrent[BufferRef]) -> OperationGraph:
    """A graph of the layer that keeps bytes within its plan. The explanation of that plan has their number.

    Raises `InvalidRequest` unless `layer` is a recurrent layer whose inputs fit together. Its outputs are
    ignored.
    """
    if type(layer) is not Recurrent:
        require_awaited("layer", layer)
        raise InvalidRequest(
            field="layer",
            value=kind_of(layer),
            problem="keeps nothing for its gradients",
            fix="ask about the layer: Recurrent(x=x, w_ih=w_ih, w_hh=w_hh, mode=mode)",
        )
    checked: Any = check_inputs(layer)  # its mode and lengths have the types that `ask` converts them to
    refs = dict(checked.named(checked.inputs))
    specs = {name: ref.spec for name, ref in refs.items()}
    inferred = checked.infer(specs)
    kept = TensorSpec.packed((inferred["reserve"].nbytes,), DType.UINT8)
    uids: dict[str, Any] = {name: uid for uid, name in enumerate((*refs, "y", "reserve"))}
    bound = {**specs, "y": inferred["y"]}
    tensors = [tensor_of(uids[name], spec, name=name) for name, spec in bound.items()]
    tensors.append(tensor_of(uids["reserve"], kept, role=TensorRole.VIRTUAL))
    operation = Recurrent(**uids, mode=checked.mode, lengths=checked.lengths)
    return OperationGraph(
        tensors=tuple(tensors), operations=(operation,), numerics=checked.numerics or Numerics()
    )
