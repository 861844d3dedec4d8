"""Finds the nodes that cannot be run, whatever sizes the open dims of a model have, when the model is loaded.

Each node is tried by itself, with one size for all open dims, until it can be run with a size. If there is no
such size, the node is refused if ONNX finds that its known dims contradict its operator, or if the reason is
the same with each size, so that it lies in attributes and known dims. All other errors are left to the first
run. So are nodes of subgraphs and of the model's own functions, and nodes that read a tensor of unknown rank.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx

from cudnn_actor.actors.long_work import check_wanted
from cudnn_actor.models.errors import InvalidModel
from cudnn_actor.models.source import Feature, dims_text
from cudnn_actor.onnx.budget import Recorded
from cudnn_actor.onnx.control import is_control
from cudnn_actor.onnx.importing import Import
from cudnn_actor.onnx.places import Trial
from cudnn_actor.onnx.reading import ModelFile, label_of
from cudnn_actor.onnx.schemas import infer
from cudnn_actor.onnx.values import Value
from cudnn_actor.protocol.graphs.limits import GraphLimits

__all__ = ["problems_of_nodes"]

_SIZES = (16, 1, 2, 60, 840)
"""The sizes that are tried first for open dims. The numbers of the node's own dims and attributes follow."""
_MOST_TRIALS = 32
"""How often a node is tried with one size for all of its open dims, and how often with different sizes."""
_ENOUGH = 8
"""The trials after which a node is left to the first run if its reasons differ."""
_LARGEST = 1 << 20
_SHORT = 1024
"""The most elements of constants that are computed here, and that ONNX is told."""
_UNROLLED = frozenset({"DynamicQuantizeLSTM", "GRU", "LSTM", "RNN"})
_MOST_STEPS = 32
_OPERATIONS_OF_NODE = 10
"""How many operations the trials may add for each node of the model. One node may use them all."""
_FROM_RESULTS = frozenset({"Einsum", "GatherND", "Split"})
"""Operators about which ONNX is not asked: a dim of their results counts as known if it is the same with two
sizes."""
_BROADCAST = frozenset({"LayerNormalization", "PRelu", "RMSNormalization"})
"""Operators whose other inputs are broadcast to the first one."""
_Dims = tuple[int | None, ...]


def problems_of_nodes(file: ModelFile) -> list[str]:
    """The nodes that cannot be run with any sizes of the open dims, and why.

    Raises `InvalidModel` for the first node whose dims contradict its operator.
    """
    check = _Check(replace(file, dtype=None))
    for node in file.nodes:
        check_wanted()
        check.look_at(node)
    return check.problems


class _Type:
    """The known facts about a value: its dtype, and its dims, with None for a dim of any size."""

    __slots__ = ("dims", "dtype")

    def __init__(self, dims: _Dims, dtype: np.dtype[Any]) -> None:
        self.dims, self.dtype = dims, dtype

    @property
    def proto(self) -> onnx.TypeProto:
        return onnx.helper.make_tensor_type_proto(onnx.helper.np_dtype_to_tensor_dtype(self.dtype), self.dims)


_Known = _Type | Value | None
"""An input of a node: its known facts, a constant, or None if it is left out."""


class _Check:
    def __init__(self, file: ModelFile) -> None:
        self.problems: list[str] = []
        self._file = file
        operations = _OPERATIONS_OF_NODE * len(file.nodes) + GraphLimits().operations
        self._import = Import(file, {}, {}, sys.maxsize, recorded=Recorded.of(operations))
        self._known: dict[str, _Type | Value] = {}
        for name, array in file.tensors.items():
            self._known[name] = self._import.constant(array)
        for feature in (*file.inputs, *file.defaults):
            self._known.pop(feature.name, None)
            if feature.dtype is not None and feature.dims is not None:
                self._known[feature.name] = _Type(_numbers(feature), feature.dtype.numpy)

    def look_at(self, node: onnx.NodeProto) -> None:
        """Try one node, and note the known facts about its results."""
        inputs: list[_Known] = []
        for name in node.input:
            if name and name not in self._known:
                return
            inputs.append(self._known[name] if name else None)
        if is_control(node) or (node.domain, node.op_type, node.overload) in self._file.functions:
            return
        if node.op_type in _UNROLLED and (inputs[0] is None or (inputs[0].dims[0] or 0) > _MOST_STEPS):
            return
        constant = all(each is None or isinstance(each, Value) for each in inputs)
        if constant and any(each is not None and each.size > _SHORT for each in inputs):  # type: ignore[union-attr]
            inputs = [_Type(each.dims, each.dtype) if isinstance(each, Value) else each for each in inputs]
        trial = self._try_sizes(node, inputs)
        if trial is not None:
            self._note(node, inputs, trial)

    def _try_sizes(self, node: onnx.NodeProto, inputs: Sequence[_Known]) -> Trial | None:
        """A trial that succeeded; None if there is none, or if nothing is known of its results."""
        failed: list[Trial] = []
        types, data = _facts_for_onnx(node, inputs)
        problem, same = "", True
        for sizes in _sizes(node, inputs):
            check_wanted()
            trial = self._trial(node, inputs, sizes)
            if trial is None or not trial.problem:
                return trial
            if not failed:
                problem = infer(node, types, data, self._file.opsets)[1] or _problem_of_dims(node, inputs)
            failed.append(trial)
            same = same and trial.problem == failed[0].problem
            if not problem and not (same and trial.telling) and len(failed) >= _ENOUGH:
                return None  # it may be that another size fits
        first, later, where = failed[0], failed[1:], label_of(node)
        if problem and not same:
            dims = ", ".join(dims_text(each.dims) for each in inputs if each is not None)
            raise InvalidModel(where=where, problem=f"has inputs of dims {dims}: {problem}")
        if problem or (same and (first.telling or not later)):
            if problem or first.unfit:
                raise InvalidModel(where=where, problem=first.problem)
            self.problems.append(f"{where}: {first.problem}")
        return None

    def _trial(self, node: onnx.NodeProto, inputs: Sequence[_Known], sizes: Iterable[int]) -> Trial | None:
        """A node with these sizes of its open dims, in order."""
        left = iter(sizes)
        values: list[Value | None] = []
        for each in inputs:
            if each is None or isinstance(each, Value):
                values.append(each)
                continue
            dims = tuple(next(left) if dim is None else dim for dim in each.dims)
            stand_in = self._import.stand_in(dims, each.dtype)
            if not isinstance(stand_in, Value):
                return None
            values.append(stand_in)
        return self._import.trial(node, values)

    def _note(self, node: onnx.NodeProto, inputs: Sequence[_Known], trial: Trial) -> None:
        """Note the known facts about the results of a node that was tried."""
        is_open, other = _open(inputs) > 0, None
        if node.op_type in _FROM_RESULTS:
            other = self._trial(node, inputs, itertools.repeat(_SIZES[-1] + 1)) if is_open else trial
            if other is None or other.problem:
                return
        types, data = _facts_for_onnx(node, inputs)
        inferred = {} if other else infer(node, types, data, self._file.opsets)[0]
        for number, name in enumerate(node.output):
            made = trial.results[number] if number < len(trial.results) else None
            if not name or not isinstance(made, Value):
                continue
            if made.fixed and made.size <= _SHORT and not is_open:  # else it may follow from the size
                self._known[name] = made
            elif other is not None:
                self._known[name] = _Type(_same_dims(made, other, number), made.dtype)
            elif (dims := _dims_of(inferred.get(name), made)) is not None:
                self._known[name] = _Type(dims, made.dtype)


def _numbers(feature: Feature) -> _Dims:
    return tuple(dim if isinstance(dim, int) else None for dim in feature.dims or ())


def _open(inputs: Sequence[_Known]) -> int:
    """How many dims of the inputs are open."""
    return sum(each.dims.count(None) for each in inputs if isinstance(each, _Type))


def _sizes(node: onnx.NodeProto, inputs: Sequence[_Known]) -> Iterator[tuple[int, ...]]:
    """Sizes to try for the open dims: first one size for all, then different ones, from the numbers that the
    node has."""
    count = _open(inputs)
    if not count:
        yield ()
        return
    known = [dim for each in inputs if each is not None for dim in each.dims if dim is not None]
    known += [number for each in node.attribute for number in (each.i, *each.ints)]
    numbers = dict.fromkeys(number for number in (1, 2, *known) if 0 < number <= _LARGEST)
    for size in itertools.islice(dict.fromkeys((*_SIZES, *numbers)), _MOST_TRIALS):
        yield (size,) * count
    if count > 1:
        yield from itertools.islice(itertools.product(numbers, repeat=count), _MOST_TRIALS)


def _facts_for_onnx(
    node: onnx.NodeProto, inputs: Sequence[_Known]
) -> tuple[Mapping[str, onnx.TypeProto], Mapping[str, onnx.TensorProto]]:
    """The facts that ONNX is told about a node's inputs: their types, and the elements of short constants."""
    types, data = {}, {}
    for name, each in zip(node.input, inputs, strict=True):
        if isinstance(each, _Type):
            types[name] = each.proto
        elif each is not None:
            types[name] = each.type
            if each.size <= _SHORT:
                data[name] = onnx.numpy_helper.from_array(each.array)
    return types, data


def _dims_of(inferred: onnx.TypeProto | None, made: Value) -> _Dims | None:
    """The dims that ONNX infers; None if it infers none, or if they differ from a trial's."""
    if inferred is None or not inferred.tensor_type.HasField("shape"):
        return None
    found = [dim.dim_value if dim.HasField("dim_value") else None for dim in inferred.tensor_type.shape.dim]
    if len(found) != made.rank or any(a not in (None, b) for a, b in zip(found, made.dims, strict=True)):
        return None
    return tuple(found)


def _same_dims(made: Value, other: Trial, number: int) -> _Dims:
    """The dims that a result has with another size, too."""
    value = other.results[number]
    dims = value.dims if isinstance(value, Value) else ()
    return tuple(a if a == b else None for a, b in itertools.zip_longest(made.dims, dims))


def _problem_of_dims(node: onnx.NodeProto, inputs: Sequence[_Known]) -> str:
    """Why known dims contradict an operator that ONNX does not check enough; empty if they do not."""
    if node.op_type == "Reshape":
        return _other_elements(node, inputs)
    dims = [each.dims for each in inputs if each is not None]
    if node.op_type not in _BROADCAST or not dims:
        return ""
    narrow = [each for each in dims[1:] if _differ(dims[0], each)]
    return f"{dims_text(narrow[0])} is not broadcast to {dims_text(dims[0])}" if narrow else ""


def _differ(wide: _Dims, narrow: _Dims) -> bool:
    """Whether two dims that are known prevent a tensor of dims `narrow` from being broadcast to `wide`."""
    pairs = zip(reversed(wide), reversed(narrow), strict=False)
    return any(None not in (a, b) and b not in (1, a) for a, b in pairs)


def _other_elements(node: onnx.NodeProto, inputs: Sequence[_Known]) -> str:
    """Why no size of open dims gives a tensor the number of elements of a constant shape."""
    if len(inputs) != 2 or any(each.name == "allowzero" for each in node.attribute):
        return ""
    x, shape = inputs
    if x is None or not isinstance(shape, Value):
        return ""
    wanted = [int(size) for size in shape.array.reshape(-1)]
    kept = {axis for axis, size in enumerate(wanted) if size == 0}
    dims = [dim for axis, dim in enumerate(x.dims) if axis not in kept]
    known = math.prod(dim for dim in dims if dim is not None)
    product = math.prod(size for size in wanted if size > 0)
    if not known or max(kept, default=0) >= len(x.dims):
        return ""
    if -1 in wanted:
        fits = None in dims or known % product == 0
    else:
        fits = product % known == 0 if None in dims else product == known
    return "" if fits else f"no size gives it the elements of shape {tuple(wanted)}"
