"""The base of operations: the tensors that an operation reads and writes, and its parameters.

An operation is defined once, as one class, generic in what its operands are:
numbers of tensors as a node of a graph, `BufferRef`s as a message. Everything
else follows from the declaration: which buffers a request reads and writes, what
a crash tears, how the operation is encoded, checked and run on the CPU.
"""

from __future__ import annotations

import enum
import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import msgspec

from cudnn_actor.protocol.errors import InvalidRequest, Words
from cudnn_actor.protocol.types.checks import are_ints, as_index, check_result
from cudnn_actor.protocol.types.dtypes import DType
from cudnn_actor.protocol.types.numerics import Numerics
from cudnn_actor.protocol.types.records import Record
from cudnn_actor.protocol.types.tensor import TensorSpec

__all__ = [
    "ALLOCATED",
    "Array",
    "GraphTensor",
    "Operation",
    "Part",
    "Region",
    "Specs",
    "TensorRole",
    "axes_of",
    "axis_of",
    "is_all",
    "require",
    "require_elements",
    "require_floating",
    "tensor_of",
]

T = TypeVar("T", covariant=True)  # noqa: PLC0105 - the name that a reader expects

ALLOCATED: Any = None
"""The default of an output's field: `CudnnRef.apply` allocates what a message leaves out."""
Array = Any
"""An array of NumPy's or of a library with its interface: float64, or an integer type, or bool."""
Specs = Mapping[str, TensorSpec]
"""The specs of operands, by the names of their fields."""
Region = tuple[slice, ...]
"""A part of a tensor: a slice of each dim."""


class Part(NamedTuple):
    """How a part of an operation's outputs is computed from parts of its inputs.

    Parameters
    ----------
    operation
        What is evaluated: the operation, or one with other parameters.
    inputs
        The part of each input.
    results
        The part of each result that it gives: what is wanted, or more.
    moved
        What is added to the values of operands that count places of the whole: of inputs before, of results
        afterwards. Numbers, or arrays of int64 that broadcast.
    """

    operation: Operation[Any]
    inputs: Mapping[str, Region]
    results: Mapping[str, Region]
    moved: Mapping[str, Any] = MappingProxyType({})


class TensorRole(enum.StrEnum):
    """The source of a graph tensor's values: see `graph`."""

    BOUND = "bound"
    SCALAR = "scalar"
    VIRTUAL = "virtual"
    CONSTANT = "constant"


class GraphTensor(Record):
    """A tensor of a graph.

    Parameters
    ----------
    uid
        Its number within the graph.
    dims, strides
        As in `TensorSpec`, strides in elements.
    dtype
        The element type. A virtual tensor's values are rounded to it, as if it were stored.
    role
        Bound, scalar, virtual or constant.
    alignment
        Bytes that a bound tensor's address is a multiple of.
    overwrites
        Of a bound tensor that is written: the uid of the bound tensor that is read from the same buffer.
        None if its buffer is not read. A graph with such a tensor cannot be run again after a crash.
    value
        Of a constant: what each of its elements is. None for any other tensor.
    name
        For people; not part of the graph's meaning.
    """

    uid: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: DType
    role: TensorRole = TensorRole.BOUND
    alignment: int = 16
    overwrites: int | None = None
    value: float | int | None = None
    name: str = ""

    @property
    def spec(self) -> TensorSpec:
        """The spec that a buffer must have to be bound to the tensor. Raises `InvalidRequest`."""
        dims, strides = self.dims, self.strides
        if are_ints(dims) and are_ints(strides):
            return _spec(dims, strides, self.dtype, self.alignment)
        return TensorSpec(dims=dims, strides=strides, dtype=self.dtype, alignment=self.alignment)

    def meaning(self) -> tuple[object, ...]:
        """Everything that defines the tensor, except its name and uids."""
        meaning = (self.dims, self.strides, self.dtype, self.role, self.alignment)
        return meaning if self.value is None else (*meaning, self.value)


@functools.lru_cache(1 << 12, typed=True)
def _spec(dims: tuple[int, ...], strides: tuple[int, ...], dtype: DType, alignment: int) -> TensorSpec:
    """See `GraphTensor.spec`. It is cached because a spec is checked when it is made, and the tensors of a
    graph have few different ones.

    The cache is `typed`, and this is called only with ints. Otherwise True would get the spec of 1, and a str
    that of a `DType`.
    """
    return TensorSpec(dims=dims, strides=strides, dtype=dtype, alignment=alignment)


def is_all(size: int, part: slice) -> bool:
    """Whether a part of `size` elements is all of them, in their order."""
    return range(size)[part] == range(size)


def needed_of_leading(
    specs: Specs, wanted: Mapping[str, Region], count: int, names: Sequence[str]
) -> dict[str, Region] | None:
    """The result of `Operation.needs` if results along the first `count` dims are computed independently.

    The inputs of these names have the same first dims. None if a part of the other dims is wanted.
    """
    first = next(iter(wanted.values()))[:count]
    for name, region in wanted.items():
        if region[:count] != first or not all(map(is_all, specs[name].dims[count:], region[count:])):
            return None
    return {name: (*first, *(slice(None),) * (specs[name].rank - count)) for name in names if name in specs}


def needed_of_lines(
    specs: Specs, wanted: Mapping[str, Region], reduced: Iterable[int], names: Sequence[str]
) -> dict[str, Region] | None:
    """The result of `needed_of_leading` if exactly these dims of the inputs, from 0, are reduced."""
    first = min(reduced, default=max(specs[name].rank for name in names))
    return needed_of_leading(specs, wanted, first, names)


def needed_along(
    specs: Specs, wanted: Mapping[str, Region], axis: int, names: Iterable[str]
) -> dict[str, Region] | None:
    """The result of `Operation.needs` if each line along a dim of these inputs, from 0, is computed alone.

    None if a part of a line is wanted, or other lines of one output than of another.
    """
    (name, region), *others = wanted.items()
    if any(other != region for _, other in others) or not is_all(specs[name].dims[axis], region[axis]):
        return None
    return dict.fromkeys(names, (*region[:axis], slice(None), *region[axis + 1 :]))


def tensor_of(uid: int, spec: TensorSpec, **fields: Any) -> GraphTensor:
    """A graph's tensor of that number, whose buffer has this spec. `fields`: its other fields."""
    of_spec: dict[str, Any] = {name: getattr(spec, name) for name in spec.__struct_fields__}
    return GraphTensor(uid=uid, **(of_spec | fields))


@functools.cache
def _operands_in(fields: tuple[str, ...]) -> Callable[[Any], tuple[Any, ...]]:
    """A function that gives an operation's operands in these fields. A build calls it ten thousand times."""
    if not fields:
        return lambda _: ()
    get: Callable[[Any], Any] = operator.attrgetter(*fields)

    def of_one(operation: Any) -> tuple[Any, ...]:
        value = get(operation)
        return value if isinstance(value, tuple) else () if value is None else (value,)

    def of_several(operation: Any) -> tuple[Any, ...]:
        values = get(operation)
        if are_ints(values):  # of a node that leaves none out
            return values
        each = (value if isinstance(value, tuple) else (value,) for value in values if value is not None)
        return tuple(itertools.chain.from_iterable(each))

    return of_one if len(fields) == 1 else of_several


@functools.lru_cache(256)
def _names_in_tuple(field: str, count: int) -> tuple[str, ...]:
    """The names of the operands in a tuple."""
    return tuple(f"{field}[{number}]" for number in range(count))


@functools.lru_cache(1 << 10)
def _attributes(of: type[Operation[Any]]) -> tuple[str, ...]:
    """The names of an operation's fields that hold neither operands nor numerics, sorted."""
    others = {*of.inputs, *of.outputs, "numerics"}
    return tuple(sorted(name for name in of.__struct_fields__ if name not in others))


class Operation(Record, Generic[T], tag=True):
    """The base of all operations. An operand's field holds `T`, a tuple of `T`, or None if it is left out.

    Parameters
    ----------
    numerics
        Of a message: TF32 and determinism; None for the defaults. None in a graph, which has its own.

    Attributes
    ----------
    kind
        Its name in plan tags.
    inputs, outputs
        The names of the fields that hold operands, in order. An output is written and not read.
    optional
        Those of them that may be left out: None. A message for `CudnnRef.apply` may leave out any output.
    takes_empty
        Whether `evaluate` takes operands without elements. For those of any other operation, `of_nothing`
        gives the outputs.
    nothing
        What an output is where an operand has no elements, by its name, if not 0: a number, or the name of
        the input that it is equal to.
    slack
        How many times the error of a sum of products its results may have: more than 1 where it rounds to the
        type of its operands inside.
    """

    kind: ClassVar[str]
    inputs: ClassVar[tuple[str, ...]]
    outputs: ClassVar[tuple[str, ...]]
    optional: ClassVar[frozenset[str]] = frozenset()
    takes_empty: ClassVar[bool] = False
    nothing: ClassVar[Mapping[str, float | str]] = MappingProxyType({})
    slack: ClassVar[float] = 1.0
    control: ClassVar[bool] = False
    """The message of an operation waits its turn: it does not overtake others."""

    numerics: Numerics | None = None

    def slack_of(self, dtype: DType) -> float:
        """`slack`, of results of this dtype."""
        del dtype
        return self.slack

    @property
    def title(self) -> str:
        """The operation's name in labels: its kind, or the mode of a function of elements or a reduction."""
        return self.kind

    @property
    def reads(self) -> tuple[T, ...]:
        """The operands read, in order; those left out are skipped."""
        return _operands_in(self.inputs)(self)

    @property
    def writes(self) -> tuple[T, ...]:
        """The operands written, in order; those left out are skipped."""
        return _operands_in(self.outputs)(self)

    def named(self, fields: tuple[str, ...] | None = None) -> Iterator[tuple[str, T]]:
        """(name, operand) of each operand in these fields, by default of all; of a tuple as `operands[0]`."""
        for name in (*self.inputs, *self.outputs) if fields is None else fields:
            value = getattr(self, name)
            if isinstance(value, tuple):
                yield from zip(_names_in_tuple(name, len(value)), value, strict=True)
            elif value is not None:
                yield name, value

    def with_operands(self, of: Callable[[str], Any]) -> Operation[Any]:
        """A copy of this operation on other operands: `of` returns the operand of a name."""
        changes: dict[str, Any] = {"numerics": None}
        for name in (*self.inputs, *self.outputs):
            value = getattr(self, name)
            if isinstance(value, tuple):
                changes[name] = tuple(of(f"{name}[{number}]") for number in range(len(value)))
            elif value is not None:
                changes[name] = of(name)
        return msgspec.structs.replace(self, **changes)

    def attributes(self) -> tuple[object, ...]:
        """Everything that defines the operation, except its operands; of these, which ones there are."""
        given = tuple(name for name, _ in self.named())
        return (type(self).__name__, given, *((n, getattr(self, n)) for n in _attributes(type(self))))

    def infer(self, specs: Specs) -> dict[str, TensorSpec]:
        """The specs of the outputs, the optional ones too, packed, from those of the inputs.

        An output whose dims do not follow from the inputs' is left out. Raises `InvalidRequest`, which names
        the field, if the inputs do not fit together.
        """
        raise NotImplementedError

    def check(self, specs: Specs) -> None:
        """Raise `InvalidRequest`, which names the field, unless all given operands fit together."""
        inputs = {name: specs[name] for name, _ in self.named(self.inputs)}
        for name, wanted in self.infer(inputs).items():
            if name in specs:
                require(specs, name, wanted.dims, wanted.dtype)

    def of_nothing(self, specs: Specs) -> Mapping[str, float | str] | None:
        """The outputs where an operand has no elements, as in `nothing`; None if `evaluate` computes them.

        A sum of nothing is 0, and so is what adds nothing. All that is refused, `check` and `infer` refuse.
        """
        if self.takes_empty or all(0 not in spec.dims for spec in specs.values()):
            return None
        return {name: self.nothing.get(name, 0.0) for name, _ in self.named(self.outputs)}

    def compute(self, dtypes: tuple[DType, ...]) -> DType:
        """The type that it computes in, from the dtypes of its inputs."""
        return DType.FLOAT64 if DType.FLOAT64 in dtypes else DType.FLOAT32

    def samples(self, xp: Any, specs: Specs, draw: Callable[[TensorSpec], Array]) -> dict[str, Array]:
        """Values of inputs on which a check of a plan means something, if whole numbers from -3 to 4 do not.

        Parameters
        ----------
        xp
            As in `evaluate`.
        specs
            The specs of all operands.
        draw
            Gives random whole numbers from -3 to 4 of a spec's dims, as float64.

        Returns
        -------
        dict
            Arrays of float64 or int64, for those inputs that need particular values.
        """
        del xp, specs, draw
        return {}

    @property
    def samples_of_each(self) -> bool:
        """Whether each element of `samples` follows from the number drawn in its place alone.

        Then `samples` takes draws of any dims. It is True if there are no samples, too.
        """
        return type(self).samples is Operation.samples

    def gradient(self, g: Any, d: Mapping[str, Any]) -> dict[str, Any]:
        """The gradients of the inputs, from those of the outputs: see `GraphBuilder.grad`.

        Called on an operation whose operands are each a `Tensor` of a builder, its outputs included. One that
        does not override it has no gradient.

        Parameters
        ----------
        g
            The `GraphBuilder`. `g.output(self, name)` is an optional output, `g.sum_to(x, dims)` sums over
            the dims that were broadcast, and `g.apply(..., like={name: x})` makes an output like a tensor.
        d
            The gradient of each output that has one, by the output's name, of its dims and dtype.

        Returns
        -------
        dict
            For each input that has a gradient, by its name as `named` gives it: a tensor of its dims. Those
            left out have none, or a gradient of 0.
        """
        raise NotImplementedError

    def work(self, specs: Specs) -> int:
        """The steps that `evaluate` takes, approximately, from the specs of all operands.

        Where that is too much, a check of a plan evaluates a part of the outputs: see `needs`.

        It is stated, not counted in a trace of `evaluate`. Where it matters, `evaluate` has a loop over
        steps, and a trace would take as many; or values decide what is done, and a trace has none.
        """
        return sum(spec.size for spec in specs.values())

    def needs(self, specs: Specs, wanted: Mapping[str, Region]) -> dict[str, Region] | None:
        """The part of each input that a part of the outputs needs; None if `evaluate` needs whole inputs.

        `evaluate` of these parts must give that part of the outputs. It is stated, not traced: definitions
        read elements by indices and in views, of which a trace does not show what follows from what. Where
        results follow from lines, it is derived from their axes: see `needed_of_lines`, `needed_along`.

        Parameters
        ----------
        specs
            The specs of all operands.
        wanted
            A part of each output.
        """
        del specs, wanted
        return None

    def part(self, specs: Specs, wanted: Mapping[str, Region]) -> Part | None:
        """How a part of the outputs is computed by itself; None if it takes all of the inputs.

        Parameters
        ----------
        specs
            The specs of all operands.
        wanted
            A part of each output: slices that have a start and a stop, and no step.
        """
        needed = self.needs(specs, wanted)
        return None if needed is None else Part(self, needed, wanted)

    def evaluate(self, xp: Any, values: Mapping[str, Array], specs: Specs) -> dict[str, Array]:
        """The outputs' values: the definition of the operation.

        Parameters
        ----------
        xp
            A library with NumPy's interface, and with the functions `erf` and `erfc`.
        values
            The inputs: floats as float64, uint64 as it is, other integers and bool (0 or 1) as int64. Where
            not more than float32 is wanted of floats, as float32: then the outputs may be of that, too.
        specs
            The specs of the outputs that are wanted.

        Returns
        -------
        dict
            An array for each of `specs`: not yet rounded to its dtype, and exact if that is an integer type.
            Where that is bool, all but 0 is true.
        """
        raise NotImplementedError

    def magnitudes(self, xp: Any, values: Mapping[str, Array], specs: Specs) -> dict[str, Array]:
        """How large those outputs would be whose terms may all cancel, if they did not: errors are as large.

        The root of the sum of the squares of the terms. The parameters are those of `evaluate`. A trace does
        not know which numbers are terms. Where an operation's results are such sums, one function gives them
        and this: a parameter of it says whether the terms are summed, or their squares.
        """
        del xp, values, specs
        return {}

    def uncentred_sizes(self, xp: Any, values: Mapping[str, Array], specs: Specs) -> dict[str, Array]:
        """How large those outputs that subtract a mean are without that: their errors are relative to it.

        The parameters are those of `evaluate`.
        """
        del xp, values, specs
        return {}


def require(specs: Specs, name: str, dims: tuple[int, ...], *dtypes: DType, gradient: str = "") -> None:
    """Raise `InvalidRequest` unless an operand has these dims, and one of these dtypes if any are given.

    `gradient`: as in `check_result`.
    """
    spec = specs[name]
    check_result(name, spec.dims, dims, "that follows from the other operands", gradient=gradient)
    if dtypes and spec.dtype not in dtypes:
        raise InvalidRequest(
            field=name,
            value=Words(spec.dtype),
            problem="is not a dtype that it can have here",
            fix=f"use {' or '.join(dict.fromkeys(dtypes))}",
        )


def require_floating(specs: Specs, name: str) -> None:
    """Raise `InvalidRequest` unless an operand is of a floating-point dtype."""
    require(specs, name, specs[name].dims, *(dtype for dtype in DType if dtype.is_floating))


def require_elements(specs: Specs, name: str, axes: Sequence[int], what: str) -> None:
    """Raise `InvalidRequest` if an operand has a size of 0 along one of these dims, of such elements."""
    dims = specs[name].dims
    if any(dims[axis] == 0 for axis in axes):
        raise InvalidRequest(
            field=name,
            value=dims,
            problem=f"has no {what}",
            fix="make these dims at least 1; the batch may be empty",
        )


def axis_of(field: str, axis: int, rank: int, of: str = "x") -> int:
    """A dim of x, counted from the start. Raises `InvalidRequest`, which names the field, for none.

    `of`: what has the dims, if it is not x.
    """
    try:
        place = as_index(axis)
    except TypeError:
        place = rank
    if not -rank <= place < rank:
        raise InvalidRequest(
            field=field,
            value=axis,
            problem=f"is no dim of {of}, which has {rank}",
            fix=f"use one from {-rank} to {rank - 1}" if rank else "give it at least one dim",
        )
    return place % rank


def axes_of(field: str, axes: Sequence[int], rank: int, of: str = "x") -> list[int]:
    """Several dims, as `axis_of` gives each. Raises `InvalidRequest` also if one is named twice."""
    found = [axis_of(field, axis, rank, of) for axis in axes]
    if len({*found}) < len(found):
        raise InvalidRequest(field=field, value=axes, problem="names a dim twice", fix="name each dim once")
    return found
