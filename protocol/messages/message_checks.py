"""Checks of messages that need nothing but the message, and errors for what is no message."""

from __future__ import annotations

import numbers
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np

from cudnn_actor.protocol.errors import InvalidRequest, Words
from cudnn_actor.protocol.graphs.graph_builder import GraphBuilder
from cudnn_actor.protocol.graphs.named_graph import Graph
from cudnn_actor.protocol.messages.messages import COMPUTE, RunModel, Warm, WriteWeights
from cudnn_actor.protocol.messages.model_messages import Draws, ModelGraph, ModelRef
from cudnn_actor.protocol.types.buffers import BufferRef
from cudnn_actor.protocol.types.checks import (
    did_you_mean,
    require_awaited,
    require_fits_message,
    require_flag,
    require_type,
    require_whole,
)
from cudnn_actor.protocol.types.device_array import DeviceArray
from cudnn_actor.protocol.types.dtypes import DType
from cudnn_actor.protocol.types.tensor import TensorSpec
from cudnn_actor.protocol.types.tune import require_tune

__all__ = [
    "check_fill",
    "check_model_graph",
    "check_run_model",
    "check_values",
    "check_warm",
    "check_write",
    "kind_of",
    "no_plan",
    "not_a_message",
]


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
        fix=fix
        or "send an object of a message's class, as in Ping(): cudnn_actor.messages.Message lists them",
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
    """The kind of an object, for people: the name of its class; the object's own name if it is a class."""
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
    require_tune("tune", message.tune)


def check_model_graph(given: ModelGraph) -> None:
    """Raise `InvalidRequest` for a graph whose names, buffers or values do not fit each other.

    Whether the buffers exist, and have the specs of the graph's ports, is checked by their service.
    """
    require_type("graphs", given, ModelGraph)
    graph = given.graph
    require_type("name", given.name, str)
    require_type("graph", graph, Graph)
    require_type("buffers", given.buffers, tuple)
    if len(given.buffers) != len(graph.ports):
        raise InvalidRequest(
            field="buffers",
            value=Words(f"{len(given.buffers)} buffers"),
            problem=f"are not one for each of the {len(graph.ports)} ports of the graph",
            fix="give them in the order of graph.places",
        )
    if not graph.body.pure:
        raise InvalidRequest(
            field="graph",
            value=graph,
            problem="changes its own inputs, so that a run could not be repeated after a crash",
            fix="send RunGraph",
        )
    own = [*_ports_of("inputs", given.inputs, {port.name for port in graph.inputs})]
    own += set(_ports_of("outputs", given.outputs, {port.name for port in graph.outputs}))
    _check_types("specs", given.specs, TensorSpec)
    for field, arrays in (("values", given.values), ("constants", given.constants)):
        _check_types(field, arrays, np.ndarray)
    _check_known("inputs", given.inputs, given.specs, "name in specs")
    _check_known("values", given.values, given.specs, "name in specs")
    if given.draws is not None:
        own += _port_of_state(given.draws, graph, given.inputs)
    for name, port in given.inputs.items():
        spec, wanted = given.specs[name], graph.ports[graph.places[port]].spec
        if (spec.dims, spec.dtype) != (wanted.dims, wanted.dtype):
            raise InvalidRequest(
                field="specs",
                value=Words(f"{name}: {spec}"),
                problem=f"is not what its port has, {wanted}",
                fix="give the dims and dtype of the port",
            )
    for number, ref in enumerate(given.buffers):
        require_type(f"buffers[{number}]", ref, BufferRef)
    refs = dict(zip(graph.places, given.buffers, strict=True))
    shared = Counter(refs.values())
    for port in own:
        if shared[refs[port]] > 1:
            raise InvalidRequest(
                field="buffers",
                value=Words(refs[port]),
                problem=f"is used for {port}, which each run writes, and for another port",
                fix="give it a buffer of its own",
            )


def _port_of_state(draws: Draws, graph: Graph, inputs: Mapping[str, str]) -> list[str]:
    require_type("draws", draws, Draws)
    _require_int("seed", draws.seed, -1 << 63)
    _require_int("count", draws.count, 0)
    ports = _ports_of("draws", {"state": draws.port}, {port.name for port in graph.inputs})
    spec = graph.ports[graph.places[draws.port]].spec
    if (spec.dims, spec.dtype) != ((2,), DType.INT64) or draws.port in inputs.values():
        raise InvalidRequest(
            field="draws",
            value=Words(f"{draws.port}: {spec}"),
            problem="is an input of the model" if draws.port in inputs.values() else "is not two int64",
            fix="name the port of the random numbers' state",
        )
    return ports


def _require_int(field: str, value: object, least: int) -> None:
    """`require_whole` for a field that must be an int itself, because a message is encoded as it is."""
    if type(value) is not int:
        require_type(field, value, int)
    require_whole(field, value, least)


def _ports_of(field: str, ports: Mapping[str, str], known: set[str]) -> list[str]:
    _check_types(field, ports, str)
    _check_known(field, ports.values(), known, "port of the graph on that side")
    return list(ports.values())


def _check_known(field: str, names: Iterable[str], known: Collection[str], what: str) -> None:
    for name in names:
        if name not in known:
            raise InvalidRequest(
                field=field,
                value=name,
                problem=f"is no {what}",
                fix=f"{did_you_mean(name, known)}use {', '.join(sorted(known)[:20])}"
                if known
                else f"there is none: add {name!r}, or leave it out here",
            )


def _check_types(field: str, given: Mapping[str, Any], kind: type) -> None:
    if type(given) is not dict:  # else the text of the fix, which is made for each run, is for nothing
        require_type(field, given, dict, f"give a dict of names to {kind.__name__}s")
    for name, value in given.items():
        if type(value) is not kind:
            require_type(f"{field}[{name!r}]", value, kind)


def check_run_model(message: RunModel) -> None:
    """Raise `InvalidRequest` unless the fields of a run have the right types, and name each input once."""
    require_type("model", message.model, ModelRef, "pass `model.ref`")
    _check_types("arrays", message.arrays, np.ndarray)
    _check_types("buffers", message.buffers, BufferRef)
    _check_types("into", message.into, BufferRef)
    require_flag("again", message.again)
    _require_int("crashes", message.crashes, 0)
    for name in message.arrays.keys() & message.buffers.keys() if message.buffers else ():
        raise InvalidRequest(field=name, value=Words("input"), problem="is given twice", fix="give it once")
    for name, array in message.arrays.items():
        if DType.of(array.dtype) is None:
            raise InvalidRequest(
                field=name, value=array, problem="has a dtype that no buffer has", fix="convert it"
            )


def check_write(message: WriteWeights) -> None:
    """Raise `InvalidRequest` unless a `WriteWeights` has an array that fits for each buffer.

    Whether the buffers exist is checked by their service.
    """
    require_type("model", message.model, ModelRef, "pass `model.ref`")
    require_type("buffers", message.buffers, tuple)
    require_type("values", message.values, tuple)
    if len(message.values) != len(message.buffers):
        raise InvalidRequest(
            field="values",
            value=Words(f"{len(message.values)} arrays"),
            problem=f"are not one for each of the {len(message.buffers)} buffers",
            fix="give one for each, in the order of the buffers",
        )
    for number, (ref, array) in enumerate(zip(message.buffers, message.values, strict=True)):
        require_type(f"buffers[{number}]", ref, BufferRef)
        require_type(f"values[{number}]", array, np.ndarray)
        if (array.shape, DType.of(array.dtype)) != (ref.spec.dims, ref.spec.dtype):
            raise InvalidRequest(
                field=f"values[{number}]",
                value=Words(f"{array.dtype} {array.shape}"),
                problem=f"is not of the weight's dtype and dims, {ref.spec.dtype} {ref.spec.dims}",
                fix="convert it, or deploy a model with other weights",
            )
    if len(set(message.buffers)) < len(message.buffers):
        raise InvalidRequest(
            field="buffers", value=Words("a buffer"), problem="is given twice", fix="give each once"
        )
