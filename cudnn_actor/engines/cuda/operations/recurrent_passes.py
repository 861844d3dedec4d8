"""Runs the gradients of recurrent layers by data, and by weights, as steps of their own, from a reserve.

libcudnn changes its reserve when it computes the gradients by data, and reads the changed reserve for those
by weights. A request that is sent again after a crash must find its operands as they were. So the gradients
by data work on a copy of the reserve, which is the operand `slopes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cudnn_actor.engines.cuda.kernels.kernel import Run
from cudnn_actor.engines.cuda.operations.implementation import Asked, Launcher, implement
from cudnn_actor.engines.cuda.operations.recurrent import Call, Network, room_for_reserve
from cudnn_actor.engines.cuda.operations.recurrent_calls import LayerBackwardData, LayerBackwardWeights
from cudnn_actor.protocol.operations import GraphTensor

__all__: list[str] = []


def _by_data(operation: LayerBackwardData[int], tensors: Sequence[GraphTensor], handle: Any) -> Run:
    """The run of gradients by data. Raises `Refused` and `EngineFailure`."""
    network = Network(operation, tensors, handle)

    def run(addresses: Sequence[int], _: Sequence[float]) -> None:
        call = Call(network, addresses)
        slopes = call.place("slopes")
        call.device.copy(slopes, call.place("reserve"), network.reserve)
        call.by_data(call.place("y"), (network.reserve, slopes))
        call.scatter_states(("dh_n", "dh0"), ("dc_n", "dc0"))

    return run


def _by_weights(operation: LayerBackwardWeights[int], tensors: Sequence[GraphTensor], handle: Any) -> Run:
    """The run of gradients by weights. Raises `Refused` and `EngineFailure`.

    libcudnn has not been seen to write to the reserve here. The self-check would find it: its plan computes
    the gradients twice (`planning.recurrent_passes.close_graph`).
    """
    network = Network(operation, tensors, handle)
    gradients = network.weights.spans(gradients=True)

    def run(addresses: Sequence[int], _: Sequence[float]) -> None:
        call = Call(network, addresses)
        call.by_weights(call.place("y"), (network.reserve, call.place("slopes")), gradients)

    return run


def _ask_for_memory(
    operation: LayerBackwardData[int] | LayerBackwardWeights[int],
    tensors: Sequence[GraphTensor],
    handle: Any,
) -> Asked:
    """Bytes of the workspace, and of reserves in no buffer. Raises `Refused` if a buffer is too small."""
    network = Network(operation, tensors, handle)
    return Asked(network.room, room_for_reserve(network, "reserve", "slopes"))


implement(
    LayerBackwardData,
    launchers={"library": Launcher(_by_data, packed=True, asked=_ask_for_memory)},
)
implement(
    LayerBackwardWeights,
    launchers={"library": Launcher(_by_weights, packed=True, asked=_ask_for_memory)},
)
