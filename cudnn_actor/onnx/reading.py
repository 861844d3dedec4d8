"""Reads ONNX models: from a path, bytes or a `ModelProto` to a checked model with NumPy arrays.

https://onnx.ai/onnx/repo-docs/IR.html
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import checker, numpy_helper

from cudnn_actor.actors.long_work import check_wanted
from cudnn_actor.models.errors import InvalidModel, ModelNotFound
from cudnn_actor.models.source import Feature
from cudnn_actor.onnx.model_limits import ModelLimits, limits_of_import
from cudnn_actor.onnx.schemas import domain_of, of_onnx
from cudnn_actor.onnx.tensors import (
    array_of,
    bytes_of,
    dtype_name,
    first_line,
    numpy_dtype,
    over_nbytes,
    size_of,
)
from cudnn_actor.protocol.errors import InvalidRequest, Words
from cudnn_actor.protocol.types.checks import require_awaited
from cudnn_actor.protocol.types.dtypes import DType

__all__ = [
    "ModelFile",
    "declared_in",
    "in_order",
    "label_of",
    "read",
    "read_by",
]

Opsets = Mapping[str, int]
"""The version of the operators of each domain."""
_UNKNOWN = "cudnn_actor.unknown"
_UNKNOWN_DIMS = (None, -1, "", "-1", "?")
"""The values that exporters write for a dim of any size. They are no names that several dims share."""


@dataclass(frozen=True, eq=False)
class ModelFile:
    """A model that was read and checked.

    `inputs`: the inputs that have to be given. `defaults`: the inputs with an initialiser as a default value.
    `opsets`: the versions of domains that the model imports. `tensors`: its initialisers. `nodes`: its nodes,
    each after the nodes whose results it reads. `functions`: its own functions, by domain, name and overload.
    `declared`: the declared dtypes of names, by ONNX's numbers. `limits`: the limits of an import, for a file
    of this size. `random`: the seed of nodes without one. `dtype`: the dtype in which weights and activations
    are computed; None for their own. `swappable`: whether initialisers may be overwritten later.
    """

    inputs: tuple[Feature, ...]
    defaults: tuple[Feature, ...]
    outputs: tuple[Feature, ...]
    opsets: Opsets
    tensors: Mapping[str, np.ndarray]
    nodes: Sequence[onnx.NodeProto]
    functions: Mapping[tuple[str, str, str], onnx.FunctionProto]
    declared: Mapping[str, int]
    limits: ModelLimits
    random: int | None = None
    dtype: DType | None = None
    swappable: bool = False


def read(model: Any, limits: ModelLimits | None = None) -> ModelFile:
    """Read and check a model. Blocks while it reads files.

    Parameters
    ----------
    model
        A path, the bytes of a file, or an `onnx.ModelProto`.
    limits
        The limits of the model's size.

    Raises
    ------
    ModelNotFound
        There is no file at that path.
    InvalidModel
        The model cannot be read, contradicts itself, or refers to data outside of its folder. The error names
        the node or the initialiser.
    InvalidRequest
        The model is over a limit, or `model` has another type.
    """
    limits = limits or ModelLimits()
    proto, folder = _open(model, limits)
    try:
        return _read_proto(proto, folder, limits)
    except UnicodeDecodeError as error:
        raise InvalidModel(where="the file", problem="has a name that is not UTF-8") from error


def _read_proto(proto: onnx.ModelProto, folder: Path | None, limits: ModelLimits) -> ModelFile:
    if len(proto.opset_import) == 0:
        raise InvalidModel(where="opset_import", problem="is empty, so that no operator has a version")
    everywhere = _all_nodes(proto)
    _check_nodes(len(everywhere), limits)
    _check_names(proto, everywhere)
    nbytes = _read_data(proto, everywhere, folder, limits)
    tensors = _initialisers(proto.graph, folder, limits, nbytes)
    bare = _without_tensors(proto)
    graph = bare.graph
    nodes = in_order(graph.node, {*tensors, *(each.name for each in graph.input)})
    inputs = tuple(_feature(each) for each in graph.input if each.name not in tensors)
    defaults = tuple(_feature(each) for each in graph.input if each.name in tensors)
    outputs = tuple(_feature(each) for each in graph.output)
    functions = {(each.domain, each.name, each.overload): each for each in bare.functions}
    opsets = versions(bare.opset_import)
    _check(bare, nodes, proto.graph.initializer)
    nbytes += sum(array.nbytes for array in tensors.values()) + _encoded_bytes(proto)
    declared, limits = declared_in(proto.graph), limits_of_import(limits, nbytes)
    return ModelFile(inputs, defaults, outputs, opsets, tensors, nodes, functions, declared, limits)


def _encoded_bytes(proto: onnx.ModelProto) -> int:
    """The bytes of the nodes, including constants in them."""
    parts = [*proto.graph.node, *proto.functions]
    try:
        return sum(each.ByteSize() for each in parts)
    except Exception as error:
        raise InvalidModel(where="the graph", problem="has a part of more than 2 GiB") from error


def _check_names(proto: onnx.ModelProto, nodes: Iterable[onnx.NodeProto]) -> None:
    """Raise `InvalidModel` for a name that is not UTF-8, which is read as bytes."""
    parts: list[tuple[onnx.NodeProto | str, Iterable[Any]]] = []
    for node in nodes:
        attributes = [name for each in node.attribute for name in (each.name, each.ref_attr_name)]
        own = (node.name, node.op_type, node.domain, node.overload)
        parts.append((node, (*own, *node.input, *node.output, *attributes)))
        parts += [(node, _names_of(graph)) for graph in _graphs(node.attribute)]
    for function in proto.functions:
        own = (function.name, function.domain, function.overload, *function.input, *function.output)
        domains = (each.domain for each in function.opset_import)
        defaults = (each.name for each in function.attribute_proto)
        parts.append((f"function {function.name!r}", (*own, *function.attribute, *domains, *defaults)))
    parts.append(("opset_import", (each.domain for each in proto.opset_import)))
    for where, texts in [*parts, ("the graph", _names_of(proto.graph))]:
        if bytes in map(type, texts):
            label = where if isinstance(where, str) else label_of(where)
            raise InvalidModel(where=label, problem="has a name that is not UTF-8")


def _names_of(graph: onnx.GraphProto) -> Iterable[Any]:
    """The names in a graph: its own, and those of its inputs and outputs, of their dims, and of its
    tensors."""
    yield graph.name
    for value in (*graph.input, *graph.output):
        yield value.name
        yield from (dim.dim_param for dim in value.type.tensor_type.shape.dim)
    for tensor in (*graph.initializer, *(each.values for each in graph.sparse_initializer)):
        yield tensor.name
        yield from (text for each in tensor.external_data for text in (each.key, each.value))


def _without_tensors(proto: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of a model without the values of its tensors."""
    bare = onnx.ModelProto()
    bare.ir_version = max(3, min(proto.ir_version, onnx.IR_VERSION))
    bare.opset_import.extend(proto.opset_import)
    bare.functions.extend(proto.functions)
    bare.graph.name = proto.graph.name
    for field in ("node", "input", "output"):
        getattr(bare.graph, field).extend(getattr(proto.graph, field))
    return bare


def versions(imports: Iterable[onnx.OperatorSetIdProto]) -> Opsets:
    """The imported versions, with "" for the standard domain."""
    return {domain_of(each): each.version for each in imports}


def declared_in(graph: onnx.GraphProto) -> dict[str, int]:
    """The dtypes that a graph declares for names, by ONNX's numbers. Names of other types than tensors are
    missing."""
    values = (*graph.input, *graph.value_info, *graph.output)
    found = {each.name: each.type.tensor_type.elem_type for each in values}
    return {name: dtype for name, dtype in found.items() if dtype}


def label_of(node: onnx.NodeProto) -> str:
    """A node for people: its name, or its first output's, and its operator."""
    name = node.name or next((name for name in node.output if name), "")
    domain = f"{domain_of(node)}." if domain_of(node) else ""
    return f"node {name!r} ({domain}{node.op_type})"


def in_order(nodes: Sequence[onnx.NodeProto], known: set[str]) -> list[onnx.NodeProto]:
    """The nodes, each after those whose results it reads. Raises `InvalidModel` for a cycle.

    `known`: names that are there before the first node.
    """
    writers: dict[str, int] = {}
    for number, node in enumerate(nodes):
        for name in filter(None, node.output):
            if name in writers or name in known:
                raise InvalidModel(where=label_of(node), problem=f"writes {name!r}, which there is already")
            writers[name] = number
    waiting = [
        {writers[name] for name in read_by(node) if name in writers} - {number}
        if not any(writers.get(name) == number for name in node.input)
        else {number}
        for number, node in enumerate(nodes)
    ]
    readers: dict[int, list[int]] = {}
    for number, before in enumerate(waiting):
        for one in before:
            readers.setdefault(one, []).append(number)
    left = [len(before) for before in waiting]
    ready = [number for number, count in enumerate(left) if not count][::-1]
    order: list[int] = []
    while ready:
        number = ready.pop()
        order.append(number)
        for reader in reversed(readers.get(number, [])):
            left[reader] -= 1
            if not left[reader]:
                ready.append(reader)
    if len(order) < len(nodes):
        stuck = next(node for node, count in zip(nodes, left, strict=True) if count)
        raise InvalidModel(where=label_of(stuck), problem="depends on its own result")
    return [nodes[number] for number in order]


def read_by(node: onnx.NodeProto) -> Iterable[str]:
    """The names that a node reads, and those that its subgraphs read."""
    yield from node.input
    for graph in _graphs(node.attribute):
        own = {each.name for each in (*graph.input, *graph.initializer)}
        own.update(name for inner in graph.node for name in inner.output)
        names = [name for inner in graph.node for name in read_by(inner)]
        names += [output.name for output in graph.output]
        yield from (name for name in names if name not in own)


def _graphs(attributes: Iterable[onnx.AttributeProto]) -> Iterable[onnx.GraphProto]:
    """The subgraphs in attributes."""
    for attribute in attributes:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def _with_inner(nodes: Iterable[onnx.NodeProto]) -> Iterable[onnx.NodeProto]:
    """Nodes, and the nodes of their subgraphs."""
    for node in nodes:
        yield node
        for graph in _graphs(node.attribute):
            yield from _with_inner(graph.node)


def _all_nodes(proto: onnx.ModelProto) -> list[onnx.NodeProto]:
    """The nodes of a model, including those of its functions and subgraphs."""
    found = list(_with_inner(proto.graph.node))
    for function in proto.functions:
        for nodes in (function.node, *(graph.node for graph in _graphs(function.attribute_proto))):
            found.extend(_with_inner(nodes))
    return found


def _open(model: Any, limits: ModelLimits) -> tuple[onnx.ModelProto, Path | None]:
    """The model's proto, and the folder that its external data is in."""
    if isinstance(model, onnx.ModelProto):
        return model, None
    folder, where = None, "the file"
    if isinstance(model, str | os.PathLike):
        path = Path(os.fspath(model))
        where = str(path)
        try:
            size = size_of(path)
            _check_bytes(size, limits)
            data = bytes_of(path, 0, size)
        except FileNotFoundError as error:
            raise ModelNotFound(
                field="model",
                value=where,
                problem=f"is no file in {path.absolute().parent}",
                fix="give the path of a file that there is",
            ) from error
        except (OSError, ValueError) as error:  # a path with a zero byte is a ValueError
            problem = f"cannot be read: {getattr(error, 'strerror', None) or error}"
            raise InvalidModel(where=where, problem=problem, fix="give a file that you can read") from error
        folder = path.parent
    elif isinstance(model, bytes | bytearray | memoryview):
        data = bytes(model)
        _check_bytes(len(data), limits)
    else:
        require_awaited("model", model)
        raise InvalidRequest(
            field="model",
            value=Words(type(model).__name__),
            problem="is no model",
            fix="give a path, the bytes of a file, or an onnx.ModelProto",
        )
    if not data:
        raise InvalidModel(where=where, problem="is empty")
    proto = onnx.ModelProto()
    try:
        proto.ParseFromString(data)
    except Exception as error:
        problem = "is not an ONNX model, or a part of it is missing"
        raise InvalidModel(where=where, problem=problem) from error
    return proto, folder


def _check_bytes(count: int, limits: ModelLimits) -> None:
    if count > limits.nbytes:
        raise over_nbytes(f"{count:,} bytes", limits.nbytes)


def _check_nodes(count: int, limits: ModelLimits) -> None:
    if count > limits.nodes:
        raise InvalidRequest(
            field="model",
            value=Words(f"{count:,} nodes"),
            problem=f"are over the limit ModelLimits.nodes, which is {limits.nodes:,}",
            fix="raise the limit: ModelLimits(nodes=...)",
        )


def _check(
    bare: onnx.ModelProto, nodes: Sequence[onnx.NodeProto], tensors: Iterable[onnx.TensorProto]
) -> None:
    """Check a model by ONNX's own checker. Its tensors were read before."""
    checked = onnx.ModelProto()
    checked.CopyFrom(bare)
    del checked.graph.node[:]
    checked.graph.node.extend(nodes)
    known = {each.name for each in checked.graph.input}
    for tensor in tensors:  # the checker only needs to know that they exist
        if tensor.name not in known:
            info = onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
            checked.graph.input.append(info)
    for value in (*checked.graph.input, *checked.graph.output):
        if value.type.HasField("tensor_type"):
            value.type.tensor_type.shape.SetInParent()  # unknown ranks are not an error here
    _set_apart_unknown(checked)
    try:
        checker.check_model(checked)
    except Exception as error:
        raise InvalidModel(where="the graph", problem=first_line(error)) from error


def _set_apart_unknown(checked: onnx.ModelProto) -> None:
    """Give nodes of unknown operators a domain that the checker does not know.

    The checker would refuse the first of them, while the import names all.
    """
    own = {(each.domain, each.name, each.overload) for each in checked.functions}
    for part, nodes in ((checked, checked.graph.node), *((each, each.node) for each in checked.functions)):
        opsets = versions(part.opset_import)
        part.opset_import.add(domain=_UNKNOWN, version=1)
        for node in _with_inner(nodes):
            domain = domain_of(node)
            known = domain not in opsets or of_onnx(node.op_type, opsets[domain], domain)
            if not known and (node.domain, node.op_type, node.overload) not in own:
                node.domain = _UNKNOWN


def _read_data(
    proto: onnx.ModelProto, nodes: Iterable[onnx.NodeProto], folder: Path | None, limits: ModelLimits
) -> int:
    """Read the data in other files that attributes and their subgraphs refer to. Returns how many bytes.

    ONNX itself would look for these files in the process's working directory.
    """
    total = 0
    defaults = ((f"function {each.name!r}", each.attribute_proto) for each in proto.functions)
    for where, attributes in (*((label_of(node), node.attribute) for node in nodes), *defaults):
        for tensor in _tensors(attributes):
            if tensor.data_location == onnx.TensorProto.EXTERNAL:
                array = array_of(tensor, where, folder, limits.nbytes - total)
                total += array.nbytes
                tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    return total


def _tensors(attributes: Sequence[onnx.AttributeProto]) -> Iterable[onnx.TensorProto]:
    """The tensors in attributes, and the tensors of their subgraphs."""
    sparse: list[onnx.SparseTensorProto] = []
    for each in attributes:
        yield from [each.t] if each.HasField("t") else []
        yield from each.tensors
        sparse += [each.sparse_tensor] if each.HasField("sparse_tensor") else []
        sparse += each.sparse_tensors
    for graph in _graphs(attributes):
        yield from graph.initializer
        sparse += graph.sparse_initializer
    for one in sparse:
        yield from (one.values, one.indices)


def _initialisers(
    graph: onnx.GraphProto, folder: Path | None, limits: ModelLimits, total: int
) -> dict[str, np.ndarray]:
    """The values of initialisers. `total`: bytes that were read before."""
    if graph.sparse_initializer:
        name = graph.sparse_initializer[0].values.name
        raise InvalidModel(where=f"initialiser {name!r}", problem="is sparse, which is not supported")
    found: dict[str, np.ndarray] = {}
    for tensor in graph.initializer:
        check_wanted()
        where = f"initialiser {tensor.name!r}"
        if not tensor.name or tensor.name in found:
            raise InvalidModel(where=where, problem="has no name, or one that another has")
        array = array_of(tensor, where, folder, limits.nbytes - total)
        total += array.nbytes
        _check_bytes(total, limits)
        found[tensor.name] = array
    declared = {each.name: each for each in graph.input}
    for name, array in found.items():
        if name in declared:
            wanted = numpy_dtype(declared[name].type.tensor_type.elem_type)
            if wanted is not None and wanted != array.dtype:
                raise InvalidModel(
                    where=f"initialiser {name!r}", problem=f"is of {array.dtype}, and declared as {wanted}"
                )
    return found


def _feature(value: onnx.ValueInfoProto) -> Feature:
    """The record of a model's input or output."""
    kind = value.type.WhichOneof("value")
    if kind != "tensor_type":
        kind = kind.removesuffix("_type").replace("_", " ") if kind else "unknown"
        return Feature(name=value.name, dtype=None, dims=None, kind=kind)
    tensor = value.type.tensor_type
    dtype = DType.of(numpy_dtype(tensor.elem_type))
    kind = "" if dtype else dtype_name(tensor.elem_type)
    if not tensor.HasField("shape"):
        return Feature(name=value.name, dtype=dtype, dims=None, kind=kind)
    dims: list[int | str | None] = []
    for dim in tensor.shape.dim:
        which = dim.WhichOneof("value")
        if which == "dim_value" and dim.dim_value < -1:
            raise InvalidModel(where=f"{value.name!r}", problem=f"has a dim below 0: {dim.dim_value}")
        known = {"dim_value": dim.dim_value, "dim_param": dim.dim_param}.get(which)
        dims.append(None if known in _UNKNOWN_DIMS else known)
    return Feature(name=value.name, dtype=dtype, dims=tuple(dims), kind=kind)
