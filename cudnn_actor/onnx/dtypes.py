"""Checks that the dtypes of a model agree with each operator, and with the model's declarations.

https://onnx.ai/onnx/repo-docs/OpSchema.html
"""

from __future__ import annotations

import functools
from collections import ChainMap
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import onnx

from cudnn_actor.models.errors import InvalidModel
from cudnn_actor.onnx.lists import Listed
from cudnn_actor.onnx.reading import ModelFile, declared_in, label_of
from cudnn_actor.onnx.schemas import Schema, domain_of, infer, schema_for, schema_of
from cudnn_actor.onnx.values import Contradiction, Value

__all__ = ["Given", "check_dtypes", "dtype_code", "dtypes_of_named_types", "formal"]

_CODES = {name: code for name, code in onnx.TensorProto.DataType.items() if code}
_TYPES = {f"tensor({name.lower()})": code for name, code in _CODES.items()}
"""The names of types of tensors in schemas → ONNX's dtypes."""
_NAMES = {code: name.lower() for name, code in _CODES.items()} | {
    onnx.TensorProto.FLOAT: "float32",
    onnx.TensorProto.DOUBLE: "float64",
}
_HALVES = frozenset({onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16})
_FLOAT = onnx.TensorProto.FLOAT
_NEWEST = 1 << 20
"""More than any version."""
_SUBGRAPHS = (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS)


class _Formal(NamedTuple):
    """One formal parameter of an operator.

    `kind`: the name of its type; several parameters may have the same type. `dtypes`: the dtypes that it may
    have; None if it need not be a tensor. `alike`: whether all inputs that it stands for have one type.
    """

    name: str
    kind: str
    dtypes: frozenset[int] | None
    alike: bool


class Given(NamedTuple):
    """One input of a node: its dtype (None if unknown), and whether it is a constant of the model."""

    dtype: int | None
    constant: bool


@functools.lru_cache(maxsize=4096)
def _formals(schema: Schema, *, outputs: bool = False) -> tuple[_Formal, ...]:
    """The formal parameters of an operator. Each version takes the dtypes that the newest version takes.

    PyTorch writes convolutions of bfloat16 for versions that do not have them, with the meaning of later
    versions.
    """
    newest = schema_of(schema.name, _NEWEST, schema.domain) or schema
    made = []
    for number, each in enumerate(schema.outputs if outputs else schema.inputs):
        later = (newest.outputs if outputs else newest.inputs)[number : number + 1]
        types = each.types.union(*(one.types for one in later))
        known = types <= _TYPES.keys()
        dtypes = frozenset(map(_TYPES.__getitem__, types)) if known else None
        made.append(_Formal(each.name, each.type_str, dtypes, each.is_homogeneous))
    return tuple(made)


def dtype_code(value: Value | None) -> int | None:
    """ONNX's number of a value's dtype; None for a list, and for an input that was left out."""
    if value is None or isinstance(value, Listed):
        return None
    return int(onnx.helper.np_dtype_to_tensor_dtype(value.dtype))


def formal(schema: Schema, number: int) -> _Formal | None:
    """The formal parameter of an input; the last one may stand for several. None if there is none."""
    formals = _formals(schema)
    return formals[min(number, len(formals) - 1)] if formals else None


def dtypes_of_named_types(schema: Schema, inputs: Sequence[Given]) -> dict[str, int]:
    """The dtypes that follow from a node's inputs for the named types of its operator.

    A float32 constant counts as a constant of the half type that it must have: see `Import._agreeing_inputs`.
    Raises `Contradiction` if the operator does not take the dtype of an input, or if two inputs differ that
    must have the same dtype.
    """
    found: dict[str, tuple[int, str]] = {}
    lenient: dict[str, tuple[int, str]] = {}
    for number, (dtype, constant) in enumerate(inputs):
        of = formal(schema, number)
        if of is None or dtype is None:
            continue
        weak = constant and dtype == _FLOAT
        if of.dtypes is not None and dtype not in of.dtypes and not (weak and of.dtypes & _HALVES):
            raise Contradiction(f"takes no {_name(dtype)} as input {of.name!r}")
        if of.alike:
            _bind(lenient if weak else found, of.kind, dtype, of.name)
    for kind, (dtype, name) in lenient.items():
        if found.get(kind, (dtype, ""))[0] not in _HALVES:
            _bind(found, kind, dtype, name)
    return {kind: dtype for kind, (dtype, _) in found.items()}


def _bind(found: dict[str, tuple[int, str]], kind: str, dtype: int, name: str) -> None:
    other, of = found.setdefault(kind, (dtype, name))
    if other != dtype:
        pair = f"{_name(other)} as input {of!r} and {_name(dtype)} as input {name!r}"
        raise Contradiction(f"has {pair}, which must be of one dtype")


def _of_constant(node: onnx.NodeProto) -> int | None:
    """The dtype of a `Constant`."""
    for each in node.attribute:
        if each.name == "value":
            return int(each.t.data_type)
        if each.name.startswith("value_"):
            kinds = {"value_int": onnx.TensorProto.INT64, "value_string": onnx.TensorProto.STRING}
            return kinds.get(each.name.removesuffix("s"), _FLOAT)
    return None


class _Names(NamedTuple):
    """The names that are known at the place of a node: their dtypes (None if unknown), and which are
    constants."""

    dtypes: MutableMapping[str, int | None]
    constants: MutableMapping[str, bool]

    def inner(self) -> _Names:
        return _Names(ChainMap({}, self.dtypes), ChainMap({}, self.constants))

    def read(self, node: onnx.NodeProto) -> list[Given]:
        """A node's inputs."""
        return [Given(self.dtypes.get(name), self.constants.get(name, False)) for name in node.input]

    def write(self, name: str, dtype: int | None, *, constant: bool) -> None:
        self.dtypes[name], self.constants[name] = dtype, constant


def check_dtypes(file: ModelFile) -> None:
    """Raise `InvalidModel` for the first node whose dtypes contradict its operator or the declared dtypes.

    Nodes of the model's functions are not checked here: an import checks them for each call.
    """
    names = _Names(dict(file.declared), {})
    for name, array in file.tensors.items():
        names.write(name, onnx.helper.np_dtype_to_tensor_dtype(array.dtype), constant=True)
        _check_declared(f"initialiser {name!r}", name, names.dtypes[name], file.declared)
    _Check(file).nodes(file.nodes, names, file.declared)


def _check_declared(where: str, name: str, dtype: int | None, declared: Mapping[str, int]) -> None:
    wanted = declared.get(name, dtype)
    if dtype is not None and dtype != wanted:
        problem = f"gives {name!r} in {_name(dtype)}, and the model declares it as {_name(wanted)}"
        raise InvalidModel(where=where, problem=problem)


def _name(code: int | None) -> str:
    return str(_NAMES.get(code or 0, f"dtype number {code}"))


class _Check:
    """One check of a model's nodes and of their subgraphs."""

    def __init__(self, file: ModelFile) -> None:
        self._file = file

    def nodes(self, nodes: Iterable[onnx.NodeProto], names: _Names, declared: Mapping[str, int]) -> None:
        """Check nodes in order, and add the dtypes of their results to `names`."""
        for node in nodes:
            try:
                found = self._results(node, names)
            except Contradiction as error:
                raise InvalidModel(where=label_of(node), problem=str(error)) from error
            constant = all(names.constants.get(name, not name) for name in node.input)
            for number, name in enumerate(node.output):
                dtype = found[number] if number < len(found) else None
                if name in declared:
                    _check_declared(label_of(node), name, dtype, declared)
                names.write(name, declared.get(name, dtype), constant=constant)

    def _results(self, node: onnx.NodeProto, names: _Names) -> Sequence[int | None]:
        """The dtypes of a node's results; None for an unknown one."""
        own = (node.domain, node.op_type, node.overload) in self._file.functions
        schema = None if own else schema_for(node, self._file.opsets)
        if schema is None:
            return ()
        inputs = names.read(node)
        bound = dtypes_of_named_types(schema, inputs)
        if any(each.type in _SUBGRAPHS for each in node.attribute):
            return self._of_subgraphs(node, names)
        if not domain_of(node) and node.op_type == "Constant":
            return [_of_constant(node)]
        return self._of_schema(schema, node, inputs, bound)

    def _of_schema(
        self, schema: Schema, node: onnx.NodeProto, inputs: Sequence[Given], bound: Mapping[str, int]
    ) -> Sequence[int | None]:
        formals = _formals(schema, outputs=True)
        found: list[int | None] = []
        inferred: Any = None
        for number, name in enumerate(node.output):
            of = formals[min(number, len(formals) - 1)]
            dtype = bound.get(of.kind) if of.alike else None
            if dtype is None and of.dtypes is not None and len(of.dtypes) == 1:
                (dtype,) = of.dtypes
            if dtype is None and of.dtypes is not None:
                if inferred is None:
                    codes = {name: each.dtype for name, each in zip(node.input, inputs, strict=True)}
                    types = {
                        name: onnx.helper.make_tensor_type_proto(code, None)
                        for name, code in codes.items()
                        if name and code is not None
                    }
                    inferred, _ = infer(node, types, {}, self._file.opsets)
                dtype = (inferred[name].tensor_type.elem_type or None) if name in inferred else None
            found.append(dtype)
        return found

    def _of_subgraphs(self, node: onnx.NodeProto, names: _Names) -> Sequence[int | None]:
        found: list[int | None] = []
        for each in node.attribute:
            for graph in [each.g] if each.HasField("g") else each.graphs:
                found = self._of_subgraph(graph, names)
        return found[1:] if node.op_type == "Loop" else found  # the first says whether it goes on

    def _of_subgraph(self, graph: onnx.GraphProto, names: _Names) -> list[int | None]:
        inner, declared = names.inner(), declared_in(graph)
        for value in graph.input:
            inner.write(value.name, declared.get(value.name), constant=False)
        for tensor in graph.initializer:
            inner.write(tensor.name, tensor.data_type, constant=True)
        self.nodes(graph.node, inner, declared)
        return [inner.dtypes.get(value.name) for value in graph.output]
