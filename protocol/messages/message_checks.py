"""Checks of messages that need nothing but the message, and errors for what is no message."""

from __future__ import annotations

import numbers

import numpy as np

from cudnn_actor.protocol.errors import InvalidRequest, Words
from cudnn_actor.protocol.graphs.graph_builder import GraphBuilder
from cudnn_actor.protocol.graphs.named_graph import Graph
from cudnn_actor.protocol.messages.messages import COMPUTE, Warm
from cudnn_actor.protocol.types.checks import require_awaited, require_fits_message, require_type
from cudnn_actor.protocol.types.device_array import DeviceArray
from cudnn_actor.protocol.types.dtypes import DType
from cudnn_actor.protocol.types.tensor import TensorSpec

__all__ = ["check_fill", "check_values", "check_warm", "kind_of", "no_plan", "not_a_message"]


def not_a_message(given: object, fix: str | None = None) -> InvalidRequest:
    """The error for an object that was sent and is not a message of a service; `fix` if that is known."""
    require_awaited("message", given)
    is_class = isinstance(given, type)
    if isinstance(given, Graph | GraphBuilder):
        fix = "run the graph that g.build(...) gives: await gpu.apply(graph, x=x)"
    return InvalidRequest(
        field="message",
        value=kind_of(given),
        problem="is a class, not a message" if is_class else "is not a message of this service",
        fix=fix or "send an object of a message's class, as in Ping(): cudnn_actor.Message lists them",
    )


def no_plan(field: str, given: object) -> InvalidRequest:
    """The error for an object that is to be planned and has no plan."""
    require_awaited(field, given)
    fix = "give a graph, a convolution or another operation; or, to `warm`, a sequence of them"
    if isinstance(given, GraphBuilder):
        fix = "build the graph: graph = g.build(y=y)"
    elif isinstance(given, str | bytes):
        fix = "read the graph: Graph.from_json(path.read_bytes())"
    return InvalidRequest(
        field=field, value=kind_of(given), problem="has no plan that could be built", fix=fix
    )


def kind_of(given: object) -> Words:
    """What an object is, for people: the name of its class; its own if it is a class."""
    return Words(given.__name__ if isinstance(given, type) else type(given).__name__)


def check_fill(value: object, spec: TensorSpec) -> None:
    """Raise `InvalidRequest` unless a value is a number, or a bool for bool, and can be encoded.

    The engine checks whether the dtype can hold it.
    """
    if spec.dtype is DType.BOOL and isinstance(value, bool | np.bool_):
        return
    require_type("value", value, numbers.Real)
    require_fits_message("value", value)


def check_values(values: object, spec: TensorSpec, device: str) -> None:
    """Raise `InvalidRequest` if the types show that these values cannot be written to a buffer of `spec`.

    Of an array on a device, that is its device, dims and dtype. The engine checks everything else.
    """
    if isinstance(values, np.ndarray):
        return
    if not isinstance(values, DeviceArray):
        raise InvalidRequest(
            field="data",
            value=values,
            problem=f"is {type(values).__name__} where an array belongs",
            fix="pass a NumPy array; gpu.upload, gpu.write and service.values convert what they are given",
        )
    if values.device != device:
        problem, fix = f"is on {values.device}, but this service runs on {device}", f"move it to {device}"
    elif values.dims != spec.dims:
        problem = f"has other dims than the buffer, {spec.dims}"
        fix = "reshape it, or upload it to a new buffer"
    elif values.dtype is not spec.dtype:
        problem = f"does not hold {spec.dtype}, as the buffer does"
        fix = "cast it on the device first: x.to(dtype) in PyTorch, x.astype(dtype) in CuPy and JAX"
    else:
        return
    raise InvalidRequest(field="data", value=Words(values), problem=problem, fix=fix)


def check_warm(message: Warm) -> None:
    """Raise `InvalidRequest` unless a `Warm` holds only requests that run a plan, and graphs."""
    for field, kinds in (("messages", COMPUTE), ("graphs", (Graph,))):
        given: object = getattr(message, field)
        wrong = [one for one in given if type(one) not in kinds] if isinstance(given, tuple) else [given]
        if wrong:
            raise no_plan(field, wrong[0])
