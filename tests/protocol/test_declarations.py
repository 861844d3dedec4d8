"""What follows from an operation's declaration: its buffers, the values of a check, graphs of any size."""

from __future__ import annotations

import itertools
import math
import pkgutil
import re
from collections.abc import Callable, Mapping
from typing import Any, get_args, get_origin

import msgspec
import numpy as np

from cudnn_actor.engines.cpu.exact.evaluation import NumPy
from cudnn_actor.protocol import (
    BufferRef,
    GraphTensor,
    OperationGraph,
    Pointwise,
    PointwiseMode,
    TensorRole,
    TensorSpec,
)
from cudnn_actor.protocol.messages import kinds
from cudnn_actor.protocol.messages.lowering import lower
from cudnn_actor.protocol.messages.message_checks import not_a_message
from cudnn_actor.protocol.messages.messages import Message
from cudnn_actor.protocol.messages.operands import operands
from cudnn_actor.protocol.operations import OPERATIONS, Operation
from cudnn_actor.trials.chaos.computations import PROBLEMS, Computation, Problem

from ..growth import takes_in_proportion
from ..in_one_test import in_one_test

FORMS = [(problem, operation) for problem in PROBLEMS for operation in problem.forms]
each_form = in_one_test("problem, operation", FORMS, ids=lambda one: getattr(one, "kind", "its problem"))


def message(problem: Problem, operation: Computation) -> Operation[BufferRef]:
    """The operation on references to no service's buffers."""
    specs = problem.specs_of(operation)
    slots = {name: slot for slot, name in enumerate(specs, 1)}
    found: Any = operation.with_operands(
        lambda name: BufferRef(slot=slots[name], generation=1, spec=specs[name], device="cpu")
    )
    return found  # type: ignore[no-any-return]


def test_every_operation_has_an_example() -> None:
    assert {type(operation) for _, operation in FORMS} == {*OPERATIONS}


def test_every_message_is_in_the_union_of_them() -> None:
    listed = {each for each in vars(kinds).values() if isinstance(each, type)}
    assert {get_origin(each) or each for each in get_args(Message)} == listed | {*OPERATIONS}


def test_the_error_for_what_is_no_message_names_the_union() -> None:
    (named,) = re.findall(r"(cudnn_actor\.\S+) lists them", str(not_a_message(object())))
    assert pkgutil.resolve_name(named) is Message


# Buffers.


def holds_buffers(kind: msgspec.inspect.Type) -> bool:
    """Whether a value of a type may be, or contain, a reference."""
    if isinstance(kind, msgspec.inspect.StructType) and kind.cls is BufferRef:
        return True
    if isinstance(kind, msgspec.inspect.StructType):
        return any(holds_buffers(field.type) for field in kind.fields)
    parts = ("types", "item_types", "item_type", "key_type", "value_type")
    inner = (getattr(kind, part, ()) for part in parts)
    return any(map(holds_buffers, itertools.chain(*(x if isinstance(x, tuple) else (x,) for x in inner))))


def is_looked_through(kind: msgspec.inspect.Type) -> bool:
    """Whether a field's references are found: one, a tuple of them, or None."""
    match kind:
        case msgspec.inspect.UnionType(types=types):
            return all(is_looked_through(one) for one in types)
        case msgspec.inspect.VarTupleType(item_type=item):
            return is_looked_through(item) and not isinstance(item, msgspec.inspect.VarTupleType)
    return isinstance(kind, msgspec.inspect.NoneType) or getattr(kind, "cls", None) is BufferRef


def fields_with_buffers(cls: Any) -> dict[str, msgspec.inspect.Type]:
    fields = msgspec.inspect.type_info(cls).fields  # type: ignore[attr-defined]
    return {field.name: field.type for field in fields if holds_buffers(field.type)}


_LOOKED_AFTER = {
    ("Warm", "messages"),  # nothing of it runs
    ("DeployModel", "graphs"),  # one hold on them all, and nothing of it runs
    ("WarmModel", "graphs"),
    ("RunModel", "buffers"),  # `operands` and `ModelRun.footprint` look there
    ("RunModel", "into"),
}


@in_one_test("cls", get_args(Message))
def test_no_message_holds_a_buffer_where_footprints_do_not_look(cls: Any) -> None:
    """In a mapping, or deeper, a crash would neither tear it nor hold it, and nothing else would notice."""
    for name, kind in fields_with_buffers(cls).items():
        assert is_looked_through(kind) or (cls.__name__, name) in _LOOKED_AFTER


def test_a_buffer_in_a_mapping_would_be_noticed() -> None:
    class Bound(msgspec.Struct):
        x: BufferRef | None
        many: tuple[BufferRef, ...]
        named: Mapping[str, BufferRef]
        deeper: tuple[tuple[BufferRef, ...], ...]

    found = {name: is_looked_through(kind) for name, kind in fields_with_buffers(Bound).items()}
    assert found == {"x": True, "many": True, "named": False, "deeper": False}


@in_one_test("cls", OPERATIONS, ids=lambda cls: cls.__name__)
def test_the_inputs_and_outputs_of_an_operation_are_its_fields_with_operands(cls: Any) -> None:
    assert sorted((*cls.inputs, *cls.outputs)) == sorted(fields_with_buffers(cls[BufferRef]))
    assert cls.optional <= {*cls.inputs, *cls.outputs}


@each_form
def test_every_operand_is_found_by_name(problem: Problem, operation: Computation) -> None:
    asked = message(problem, operation)
    assert operands(asked) == dict(asked.named())
    assert operands(asked).keys() == problem.specs_of(operation).keys()


# Graphs.


@each_form
def test_an_operand_that_is_left_out_is_no_tensor_of_the_graph(
    problem: Problem, operation: Computation
) -> None:
    graph = lower(message(problem, operation)).graph
    (node,) = graph.operations
    assert None not in (*node.reads, *node.writes)
    assert dict(node.named()).keys() == problem.specs_of(operation).keys()
    assert {*graph.bound} == {tensor.uid for tensor in graph.tensors} == {*node.reads, *node.writes}


@each_form
def test_a_tensor_of_any_rank_keeps_it(problem: Problem, operation: Computation) -> None:
    """Those of three dims, too: a matrix product would not survive a fourth."""
    graph = lower(message(problem, operation)).graph
    specs = problem.specs_of(operation)
    assert {tensor.name: (tensor.dims, tensor.strides) for tensor in graph.tensors} == {
        name: (spec.dims, spec.strides) for name, spec in specs.items()
    }


def chain(length: int) -> dict[str, Any]:
    """The fields of a graph of so many operations, each of which reads what the two before it have given."""
    spec = TensorSpec.packed((2, 3))
    tensors = tuple(
        GraphTensor(
            uid=uid,
            dims=spec.dims,
            strides=spec.strides,
            dtype=spec.dtype,
            role=TensorRole.BOUND if uid in (0, 1, length + 1) else TensorRole.VIRTUAL,
        )
        for uid in range(length + 2)
    )
    steps = tuple(
        Pointwise(mode=PointwiseMode.ADD, operands=(uid, uid + 1), result=uid + 2) for uid in range(length)
    )
    return {"tensors": tensors, "operations": steps}


def test_the_work_on_a_graph_grows_as_its_size() -> None:
    """Construction, canonical order, digest and decoding."""

    def prepare(length: int) -> Callable[[], object]:
        fields = chain(length)

        def work() -> object:
            graph = OperationGraph(**fields)
            assert msgspec.msgpack.decode(msgspec.msgpack.encode(graph), type=OperationGraph) == graph
            assert len(graph.canonical_uids) == length + 2
            return graph.digest()

        return work

    takes_in_proportion(prepare, 200)


# Values of a check.


@each_form
def test_no_whole_number_that_a_check_needs_is_left_to_chance(
    problem: Problem, operation: Computation
) -> None:
    """A label or a length of -3 would be read out of bounds: those of a check are never below 0."""
    specs = problem.specs_of(operation)
    rng = np.random.default_rng(0)
    for _ in range(20):
        samples = operation.samples(
            NumPy(), specs, lambda spec: rng.integers(-3, 5, spec.dims).astype(np.float64)
        )
        for name, _ in operation.named(operation.inputs):
            if not specs[name].dtype.is_floating:
                assert samples[name].shape == specs[name].dims
                assert samples[name].min() >= 0
            if name == "index":
                assert samples[name].max() < math.prod(specs["dx"].dims)
