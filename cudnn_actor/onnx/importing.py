"""Imports a model: makes its graph for particular dims of its inputs.

Nodes are walked in order. A node is computed now if all its inputs are constants; else its operator's handler
adds it to the graph, or the function that defines it replaces it. All nodes for which none of this is
possible are reported together.
"""

from __future__ import annotations

import functools
from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx

from cudnn_actor.actors.long_work import check_wanted
from cudnn_actor.models.errors import InvalidModel, UnsupportedModel
from cudnn_actor.models.source import Feature, NeedsValues, Specialised, fixed_specs
from cudnn_actor.onnx import operators
from cudnn_actor.onnx.attributes import defaults, resolved_attributes, with_attributes
from cudnn_actor.onnx.budget import Budget, Recorded, TooManyOperations, TooMuch
from cudnn_actor.onnx.control import CONTROL, is_control
from cudnn_actor.onnx.dtypes import Given, dtype_code, dtypes_of_named_types, formal
from cudnn_actor.onnx.expanding import body_of, has_body
from cudnn_actor.onnx.folding import empty_results, fold, inferred_results, misfit
from cudnn_actor.onnx.import_constants import Constants
from cudnn_actor.onnx.import_outputs import Outputs
from cudnn_actor.onnx.lists import Listed
from cudnn_actor.onnx.nodes import Node
from cudnn_actor.onnx.operator_checks import problem_of
from cudnn_actor.onnx.places import (
    UNDECIDED,
    UNKNOWN,
    Misfit,
    Place,
    Scope,
    Trial,
    Unknowable,
    Unknown,
    label_at,
    reason_of,
)
from cudnn_actor.onnx.ports import Initialisers, PortNames, Ports
from cudnn_actor.onnx.precision import Precision
from cudnn_actor.onnx.reading import ModelFile, in_order, label_of, versions
from cudnn_actor.onnx.schemas import Schema, domain_of, schema_for
from cudnn_actor.onnx.unrolling import TooManyTurns
from cudnn_actor.onnx.values import (
    Contradiction,
    Declined,
    Empty,
    OfLoop,
    Pending,
    Refused,
    Undecided,
    Unfit,
    Value,
)
from cudnn_actor.protocol.errors import InvalidRequest, Words
from cudnn_actor.protocol.graphs.graph_builder import GraphBuilder
from cudnn_actor.protocol.types.dtypes import DType
from cudnn_actor.protocol.types.tensor import TensorSpec

__all__ = ["MALFORMED", "Import", "Inline"]

MALFORMED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""The errors that handlers raise for attributes and dims that contradict their operator."""
_REFUSALS = (Declined, Empty, InvalidRequest)
"""The errors that are raised for a node that ONNX allows, but that cannot be run."""
_DEEPEST = 32
"""How deep calls of functions may be nested."""


class Import:
    """One import of a model: `specialise` walks over its nodes once. For the parameters see
    `Source.specialise`.

    `recorded`: how many operations the import may add; by default, as many as `most_operations` allows.
    `beside`: another import for the same model. This one shares its limits, and takes none of its ports'
    names.
    """

    def __init__(
        self,
        file: ModelFile,
        specs: Mapping[str, TensorSpec],
        values: Mapping[str, np.ndarray],
        most_operations: int,
        *,
        recorded: Recorded | None = None,
        beside: Import | None = None,
    ) -> None:
        self._most_operations = most_operations
        self._file, self._specs = file, specs
        self.g = GraphBuilder(limits=recorded or Recorded.of(most_operations))
        self._names: PortNames = PortNames() if beside is None else beside._names
        self.ports = Ports(self.g, file, specs, values, self._names)
        self.problems: dict[str, None] = {}
        """The nodes that cannot be run, and why, each once."""
        self.undecided: set[str] = set()
        """The names of inputs whose values are needed."""
        limits = file.limits
        self._budget: Budget = (
            Budget(limits.constants, limits.steps, limits.nodes) if beside is None else beside._budget
        )
        nodes = [*file.nodes, *(node for each in file.functions.values() for node in each.node)]
        self.precision = None if file.dtype is None else Precision(file.dtype, self.g, nodes)
        self._constants = Constants(self.ports, self._budget)
        self.outputs = Outputs(
            self.g, self.ports, self.precision, file.outputs, most_operations=most_operations
        )

    def specialise(self) -> Specialised:
        """The model for these inputs.

        Raises as `Source.specialise`, `InvalidRequest` for their dims, and `TooManyOperations`.
        """
        place = self.beginning()
        try:
            self.walk(self._file.nodes, place)
        except Misfit as misfit:
            raise misfit.error from misfit
        except TooManyOperations:
            if not self.problems:
                raise
        if self.problems:
            raise UnsupportedModel(nodes=list(self.problems))
        if self.undecided:
            raise NeedsValues(self.undecided)
        return self.outputs.finish(place.names)

    def beginning(self, label: str = "") -> Place:
        """A place where the model's inputs and initialisers are there, within a node of this label."""
        given = [each for each in self._file.defaults if each.name in self._specs]
        names: Scope = ChainMap({}, Initialisers(self.ports, self._file))
        names.update({feature.name: self._input(feature) for feature in (*self._file.inputs, *given)})
        return Place(names, self._file.opsets, {}, label)

    def _input(self, feature: Feature) -> Value:
        value = self.ports.input(feature)
        return value if self.precision is None else self.precision.of_input(value)

    # Nodes.

    def walk(self, nodes: Sequence[onnx.NodeProto], place: Place, names: int = 1) -> None:
        """Import nodes. `names`: how many are set around them, which counts if it is more than the nodes."""
        if not self._budget.walk(max(len(nodes), names)):
            most = self._file.limits.nodes
            problem = f"expands the model to more than {most:,} nodes, the limit ModelLimits.nodes"
            raise UnsupportedModel(nodes=[f"{place.label}: {problem}"])
        for node in nodes:
            check_wanted()
            for name, value in zip(node.output, self._results(node, place), strict=False):
                if name:
                    place.names[name] = value

    def _results(self, node: onnx.NodeProto, place: Place) -> Sequence[Value | Unknown | None]:
        """The results of a node. A node that cannot be run is reported, and stand-ins replace its results."""
        label = label_at(node, place)
        count = len(node.output)
        inputs = self.inputs_of(node, place, label)
        if isinstance(inputs, Unknown):
            return [inputs] * count
        try:
            return self.compute(node, inputs, place)
        except (OfLoop, TooManyTurns, Undecided, Unknowable) as error:
            if place.unrolled is not None:  # who asks tries it as a loop
                raise
            return self._without(error, label, count)
        except InvalidModel:  # it is a ValueError, too: raised by a node within this one
            raise
        except Contradiction as error:
            raise InvalidModel(where=label, problem=str(error)) from error
        except Unfit as unfit:
            raise self._unfit(node, inputs, place, str(unfit)) from unfit
        except UnicodeDecodeError as error:
            raise InvalidModel(where=label, problem="has a name that is not UTF-8") from error
        except (*_REFUSALS, *MALFORMED) as error:
            reason, refused = reason_of(error), isinstance(error, _REFUSALS)
        if problem := self._misfit(node, inputs, place):
            raise self._unfit(node, inputs, place, reason if refused else problem)
        self.problems[f"{label}: {reason}"] = None
        return self._stand_ins(node, inputs, place) or [UNKNOWN] * count

    def _without(self, error: Exception, label: str, count: int) -> Sequence[Unknown]:
        """Stand-ins for the results of a node for which values are missing, or which has too many turns."""
        if isinstance(error, Undecided):
            self.undecided |= error.names
            return [UNDECIDED] * count
        if isinstance(error, Refused):
            self.problems[f"{label}: {error}"] = None
        return [UNKNOWN] * count

    def _misfit(
        self, node: onnx.NodeProto, inputs: Sequence[Value | None], place: Place, *, of_file: bool = False
    ) -> str:
        """Why the dims of a node's inputs do not fit its operator; empty if ONNX finds no reason.

        `of_file`: whether only a reason counts that holds for all dims of the model's inputs.
        """
        if any(each is not None and not each.size for each in inputs):
            return ""  # ONNX's functions contradict themselves for tensors without elements
        if is_control(node) or problem_of(node, place.opsets, self._file):
            return ""
        proto = with_attributes(node, resolved_attributes(node, place.attributes))
        return misfit(proto, inputs, place.opsets, ranks_alone=of_file)

    def _unfit(
        self, node: onnx.NodeProto, inputs: Sequence[Value | None], place: Place, problem: str
    ) -> Misfit:
        """The error for dims that do not fit: a fault of the file if they are in the file, else a fault of
        the given inputs."""
        label = label_at(node, place)
        if fixed_specs(self._file.inputs) == self._specs or self._misfit(node, inputs, place, of_file=True):
            return Misfit(InvalidModel(where=label, problem=problem))
        dims = ", ".join(f"{name} {spec.dims}" for name, spec in self._specs.items())
        problem = f"have dims that do not fit {label}: {problem}"
        fix = "give inputs of other dims, or check the model with onnx.checker"
        return Misfit(InvalidRequest(field="inputs", value=Words(dims), problem=problem, fix=fix))

    def inputs_of(self, node: onnx.NodeProto, place: Place, label: str) -> list[Value | None] | Unknown:
        """A node's inputs, with None for those left out; or the first unknown input, if there is one."""
        inputs: list[Value | None] = []
        for name in node.input:
            if name and name not in place.names:
                raise InvalidModel(where=label, problem=f"reads {name!r}, which nothing writes")
            value = place.names[name] if name else None
            if isinstance(value, Unknown):
                if problem := problem_of(node, place.opsets, self._file):
                    self.problems[f"{label}: {problem}"] = None
                return value
            inputs.append(value)
        return inputs

    def _stand_ins(
        self, node: onnx.NodeProto, inputs: Sequence[Value | None], place: Place
    ) -> list[Value | Unknown | None] | None:
        """Inputs in place of the results of a node that cannot be run, so that later nodes are tried.

        The graph with them is never built. None if their dims are not known.
        """
        found = None if is_control(node) else inferred_results(node, inputs, place.opsets)
        return None if found is None else [None if each is None else self.stand_in(*each) for each in found]

    def trial(self, node: onnx.NodeProto, inputs: list[Value | None]) -> Trial | None:
        """Try one node of the model by itself with these inputs.

        Returns None if the outcome is open: unknown values are needed, or the limits of this import, which
        all trials share, are used up.
        """
        self.problems, self.undecided = {}, set()
        try:
            results = self.compute(node, inputs, Place(ChainMap(), self._file.opsets, {}))
        except (Empty, TooManyOperations, TooMuch, Undecided, UnsupportedModel, Unknowable):
            return None
        except Misfit as misfit:
            return Trial(problem=misfit.error.problem, unfit=True)
        except InvalidModel as error:
            return Trial(problem=error.problem, unfit=True)
        except (Contradiction, Unfit) as error:
            return Trial(problem=str(error), unfit=True, telling=True)
        except (*_REFUSALS, *MALFORMED) as error:
            return Trial(problem=reason_of(error), telling=isinstance(error, Declined))
        return Trial(problem="; ".join(self.problems), results=results)

    def stand_in(self, dims: tuple[int, ...], dtype: np.dtype[Any]) -> Value | Unknown:
        """An input in place of a value whose elements are not known."""
        known = DType.of(dtype)
        if known is None or 0 in dims:
            return UNKNOWN
        try:
            TensorSpec.packed(dims, known)
        except InvalidRequest:  # no tensor can have these dims: the fault is this node's
            return UNKNOWN

        def unknowable() -> np.ndarray:
            raise Unknowable

        return Value(dims, dtype, lambda: self.g.input(self.ports.name("unknown"), dims, known), unknowable)

    def compute(
        self, node: onnx.NodeProto, inputs: list[Value | None], place: Place
    ) -> Sequence[Value | Unknown | None]:
        """Compute a node, or add its operations, and return the results. If it has none, raises an error that
        says why: see `walk`."""
        own = self._file.functions.get((node.domain, node.op_type, node.overload))
        if own is not None:
            nodes = self._constants.read_once(own, lambda: in_order(own.node, set(own.input)))
            attributes = resolved_attributes(node, place.attributes)
            place = replace(place, label=place.label or label_of(node))
            return self._run_function(own, nodes, attributes, inputs, place)
        schema = schema_for(node, place.opsets)
        if schema is None:
            raise Declined(operators.unknown(node, place.opsets))
        moving = any(value is not None and not value.fixed for value in inputs)
        if self.precision is None or not moving or place.as_written or is_control(node):
            return self._of_operator(node, schema, self._agreeing_inputs(node, schema, inputs), place)
        _check_no_list(schema, inputs)
        if (kept := self.precision.input_of_conversion(node, inputs)) is not None:
            return [kept]
        inputs, standing = self.precision.inputs(node, schema, inputs)
        return [
            each if isinstance(each, Unknown) else self.precision.result(each, standing)
            for each in self._of_operator(node, schema, inputs, place)
        ]

    def view(
        self, node: onnx.NodeProto, schema: Schema, inputs: Sequence[Value | None], place: Place
    ) -> Node:
        """A node as handlers see it. Raises `Contradiction`."""
        attributes = resolved_attributes(node, place.attributes)
        view = Node(
            with_attributes(node, attributes),
            schema,
            inputs,
            attributes,
            opsets=place.opsets,
            g=self.g,
            weight=self.ports.weight,
            budget=self._budget,
            random_state=self.ports.random_state,
            most_operations=self._most_operations if place.unrolled is None else place.unrolled,
        )
        view.check()
        return view

    def _of_operator(
        self, node: onnx.NodeProto, schema: Schema, inputs: list[Value | None], place: Place
    ) -> Sequence[Value | Unknown | None]:
        """The results of a node whose operator is ONNX's or ONNX Runtime's."""
        label = place.label or label_of(node)
        attributes = resolved_attributes(node, place.attributes)
        proto = with_attributes(node, attributes)
        view = self.view(node, schema, inputs, place)
        if is_control(node):
            inner = replace(place, label=label, depth=place.depth + 1, unrolled=None)
            return CONTROL[domain_of(node), node.op_type](view, Inline(self, inner))
        found = self._constants.fold(view, place.opsets)
        if found is None:
            found = self._run_handler(view, place, label)
        if found is None:
            body = body_of(proto, schema, inputs, place.opsets.get("", 1))
            if body is None:
                raise Declined(operators.unknown(node, place.opsets))
            if problem := misfit(proto, inputs, place.opsets):  # which the function may not say
                dims = ", ".join(str(each.dims) for each in inputs if each is not None)
                raise Unfit(f"has inputs of dims {dims}: {problem}")
            attributes = {**defaults(schema), **attributes}
            nodes = in_order(body.node, set(body.input))
            inner = replace(place, label=label, as_written=True)
            return self._run_function(body, nodes, attributes, inputs, inner)
        return found

    def _agreeing_inputs(
        self, node: onnx.NodeProto, schema: Schema, inputs: list[Value | None]
    ) -> list[Value | None]:
        """The inputs, with float32 constants in the half type of the operands that they must agree with.

        PyTorch's exporter folds norms of half types into float32 weights, which ONNX does not allow. Anything
        else that contradicts the operator raises `Contradiction`.
        """
        _check_no_list(schema, inputs)
        given = [Given(dtype_code(value), value is not None and value.fixed) for value in inputs]
        kinds, found = dtypes_of_named_types(schema, given), list(inputs)
        for number, value in enumerate(inputs):
            of = formal(schema, number)
            if of is None or value is None:
                continue
            wanted = kinds.get(of.kind) if of.alike else None
            if wanted not in (None, given[number].dtype):
                dtype = onnx.helper.tensor_dtype_to_np_dtype(wanted)
                found[number] = self._constants.in_half(value, dtype, node.input[number])
        return found

    def _run_handler(self, view: Node, place: Place, label: str) -> Sequence[Value | None] | None:
        """Let a node's handler add it to the graph. Returns its results; None if the operator's function is
        to be tried."""
        handler = operators.handler_of(domain_of(view.proto), view.op, view.version)
        if handler is None:
            return None
        self.g.place = label
        try:
            return self._call_handler(handler, view, place)
        except Empty:  # then only values that follow from dims and axes are computed
            fixed = all(value is None or value.fixed for value in view.inputs)
            try:
                return self._constants.compute(view, place.opsets, fixed=fixed)
            except Declined:
                empty = empty_results(view.proto, view.inputs, place.opsets)
                if empty is None:
                    raise
                return [None if each is None else self.ports.constant(each, fixed=True) for each in empty]
        except Refused:
            raise
        except (Declined, InvalidRequest):
            if not has_body(view.schema):
                raise
            return None

    def _call_handler(self, handler: operators.Handler, view: Node, place: Place) -> Sequence[Value | None]:
        inputs = view.inputs
        results = handler(view, self.g)
        found = results if isinstance(results, tuple) else (results,)
        folded: list[tuple[np.ndarray | None, ...]] = []

        def array_of(number: int) -> np.ndarray:
            if not folded:
                if view.drew:
                    raise Declined("draws random numbers, which decide over shapes")
                given = [None if value is None else value.array for value in inputs]
                folded.append(fold(view.proto, given, place.opsets, self._budget))
            array = folded[0][number]
            assert array is not None
            return array

        def value_of(number: int, result: Any) -> Value | None:
            if result is None or isinstance(result, Value):
                return result
            if isinstance(result, np.ndarray | np.generic):
                array = np.asarray(result)
                return self.ports.constant(array, fixed=not view.looked)
            if 0 in result.dims:
                return self.ports.constant(np.empty(result.dims, result.dtype.numpy), fixed=True)
            pending = Pending(inputs, functools.partial(array_of, number))
            value = Value(result.dims, result.dtype.numpy, result, pending)
            value.made_by = view
            return value

        return [value_of(number, result) for number, result in enumerate(found)]

    def _run_function(
        self,
        function: onnx.FunctionProto,
        nodes: Sequence[onnx.NodeProto],
        attributes: Mapping[str, onnx.AttributeProto],
        inputs: Sequence[Value | None],
        place: Place,
    ) -> Sequence[Value | Unknown | None]:
        """A node by the function that defines it, whose nodes are in order. `place` has the node's label."""
        if place.depth >= _DEEPEST:
            raise InvalidModel(where=place.label, problem=f"lies in {_DEEPEST} functions, one in the other")
        of_function = {each.name: each for each in function.attribute_proto}
        names: Scope = ChainMap(dict.fromkeys(function.input))
        names.update(zip(function.input, inputs, strict=False))
        opsets = {**place.opsets, **versions(function.opset_import)}  # ONNX's own do not name all
        attributes = {**of_function, **attributes}
        inner = Place(names, opsets, attributes, place.label, place.depth + 1, place.as_written)
        self.walk(nodes, inner, max(len(function.input), len(function.output), len(of_function), 1))
        return [names.get(name) for name in function.output]

    def inline_graph(
        self, graph: onnx.GraphProto, given: Sequence[Value | None], place: Place
    ) -> list[Value]:
        """Import a subgraph, which sees the names around it. Returns its outputs."""
        if len(given) != len(graph.input):
            raise Declined(f"has a subgraph with {len(graph.input)} inputs, and gives it {len(given)}")
        nodes, constants = self._constants.read_once(
            graph, lambda: (in_order(graph.node, set()), self._constants.of_graph(graph))
        )
        # The layers are its own, so that a loop of many steps copies neither the names around it nor its
        # constants.
        names = place.names.new_child(constants) if constants else place.names
        names = names.new_child(dict(zip((each.name for each in graph.input), given, strict=True)))
        self.walk(nodes, replace(place, names=names), max(len(given), len(graph.output), 1))
        found = [names.get(output.name) for output in graph.output]
        if any(isinstance(value, Unknown) for value in found):
            raise Unknowable
        if not all(isinstance(value, Value) for value in found):
            raise Declined("has an output that nothing writes")
        return found  # type: ignore[return-value]

    def constant(self, array: np.ndarray) -> Value:
        """A constant of the model."""
        return self.ports.constant(array, fixed=True)


@dataclass(frozen=True)
class Inline:
    """See `Inliner`."""

    imports: Import
    place: Place

    def inline_graph(self, graph: onnx.GraphProto, given: Sequence[Value | None]) -> list[Value]:
        """See `Inliner`."""
        return self.imports.inline_graph(graph, given, self.place)

    def compute(self, op_type: str, *inputs: Value, **attributes: Any) -> Value:
        """See `Computing`."""
        node = onnx.helper.make_node(op_type, ["x"] * len(inputs), ["y"], **attributes)
        (value,) = self.imports.compute(node, list(inputs), replace(self.place, opsets={"": 21}))
        if not isinstance(value, Value):
            raise Unknowable
        return value

    def constant(self, array: np.ndarray) -> Value:
        """See `Computing`."""
        return self.imports.constant(array)


def _check_no_list(schema: Schema, inputs: Sequence[Value | None]) -> None:
    for number, value in enumerate(inputs):
        of = formal(schema, number)
        if isinstance(value, Listed) and of is not None and of.dtypes is not None:
            raise Refused("has a list where it needs a tensor")
