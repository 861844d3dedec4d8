"""Builds graphs from expressions that read like NumPy's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import FunctionType
from typing import Any, NoReturn, overload

from cudnn_actor.protocol.errors import InvalidRequest
from cudnn_actor.protocol.graphs.attention_functions import AttentionFunctions
from cudnn_actor.protocol.graphs.expressions import Made, Tensor
from cudnn_actor.protocol.graphs.graph_assembly import GraphAssembly
from cudnn_actor.protocol.graphs.graph_gradients import Gradients
from cudnn_actor.protocol.graphs.limits import GraphLimits
from cudnn_actor.protocol.graphs.named_graph import Graph
from cudnn_actor.protocol.graphs.recurrent_functions import RecurrentFunctions
from cudnn_actor.protocol.operations import PointwiseMode, TensorRole
from cudnn_actor.protocol.types.checks import did_you_mean, require_mapping, require_name
from cudnn_actor.protocol.types.dtypes import DType, DTypeLike
from cudnn_actor.protocol.types.numerics import Numerics
from cudnn_actor.protocol.types.other_names import no_attribute
from cudnn_actor.protocol.types.short_repr import listing
from cudnn_actor.protocol.types.spelling import check_spelling
from cudnn_actor.protocol.types.tensor import Layout, LayoutLike, TensorSpec

__all__ = ["GraphBuilder", "Tensor"]

_ROOM = 60
"""Characters of a builder's repr for its inputs."""


class GraphBuilder(AttentionFunctions, RecurrentFunctions):
    """Builds a graph: declare inputs, compute with them, and `build` with the outputs.

    A mistake raises `InvalidRequest` at the line that makes it. A tensor's dtype is the type that it has
    where it is stored: as an output, or as an input of an operation that is not pointwise. Between pointwise
    operations, values are float32 (float64 if an operand is), and are not rounded to the dtype.

    Parameters
    ----------
    numerics
        TF32 and determinism, for the whole graph.
    limits
        How large the graph may become. The operation that is one too many raises `InvalidRequest`.
    """

    def __init__(self, numerics: Numerics | None = None, *, limits: GraphLimits | None = None) -> None:
        super().__init__(numerics, limits=limits)
        self._inputs: dict[str, int] = {}

    def __repr__(self) -> str:
        inputs = (repr(Tensor(self, number))[1:-1] for number in self._inputs.values())
        count = len(self._inputs)
        declared = f": {listing(inputs, count, _ROOM)}" if count else ""
        return f"<GraphBuilder with {len(self._operations)} operations{declared}>"

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(no_attribute("GraphBuilder", name, dir(GraphBuilder)))

    # Inputs and outputs.

    def input(
        self,
        name: str,
        dims: Sequence[int],
        dtype: DTypeLike = DType.FLOAT32,
        *,
        layout: LayoutLike = Layout.NCHW,
    ) -> Tensor:
        """Declare an input. Raises `InvalidRequest` if the name is taken or is no name."""
        self._check_name(name)
        spec = TensorSpec.packed(dims, dtype, layout)
        self._inputs[name] = self._add(Made(spec, TensorRole.BOUND, name))
        return Tensor(self, self._inputs[name])

    def build(
        self,
        outputs: Mapping[str, Tensor] | None = None,
        /,
        *,
        updates: Mapping[str, Tensor] | None = None,
        **named: Tensor,
    ) -> Graph:
        """The graph that computes these outputs.

        Operations that no output needs are left out. Inputs that nothing reads stay inputs.

        Parameters
        ----------
        outputs, named
            The outputs by name.
        updates
            Inputs' names → the values that their buffers have afterwards, of the same dims. A graph with an
            update is not run again after a crash that interrupts it.

        Raises
        ------
        InvalidRequest
            There is no output, a name is taken, or an update does not fit its input.
        """
        require_mapping("outputs", outputs, "names to tensors", "name each output, as in g.build(y=y)")
        fix = "name the input, as in updates={'state': new}"
        require_mapping("updates", updates, "inputs' names to tensors", fix)
        for name in named.keys() & (outputs or {}).keys():
            raise InvalidRequest(
                field=name, value=named[name], problem="is given twice", fix="name each output once"
            )
        wanted = {**(outputs or {}), **named}
        updated = dict(updates or {})
        if not wanted and not updated:
            raise InvalidRequest(
                field="outputs", value=None, problem="are none", fix="name one, as in g.build(y=y)"
            )
        for name, value in wanted.items():
            self._check_name(name)
            self._own(name, value)
        for name, value in updated.items():
            self._check_update(name, value)
        overwritten = {self._inputs[name] for name in updated}
        for name, value in updated.items():
            if value.number != self._inputs[name] and value.number in overwritten:
                updated[name] = self.pointwise(
                    PointwiseMode.IDENTITY, value
                )  # what it holds before its own update
        graph = GraphAssembly(self, wanted, updated).graph()
        graph.check(self._limits)
        return graph

    def _check_name(self, name: object) -> None:
        require_name("name", name)
        if name in self._inputs:
            raise InvalidRequest(
                field="name", value=name, problem="is an input's already", fix="choose another"
            )

    def _check_update(self, name: str, value: Tensor) -> None:
        if name not in self._inputs:
            fix = f"{did_you_mean(name, self._inputs)}use {', '.join(self._inputs)}"
            raise InvalidRequest(
                field="updates",
                value=name,
                problem="is no input",
                fix=fix if self._inputs else "declare it: g.input(name, dims)",
            )
        self._own(name, value)
        spec = self._tensors[self._inputs[name]].spec
        if value.dims != spec.dims:
            raise InvalidRequest(
                field=name,
                value=value.dims,
                problem="is not the shape of that input",
                fix=f"give it dims {spec.dims}",
            )

    # Gradients.
    @overload
    def grad(
        self,
        outputs: Tensor | Sequence[Tensor],
        wrt: Tensor,
        upstream: Tensor | Sequence[Tensor | None] | None = None,
    ) -> Tensor: ...
    @overload
    def grad(
        self,
        outputs: Tensor | Sequence[Tensor],
        wrt: Sequence[Tensor],
        upstream: Tensor | Sequence[Tensor | None] | None = None,
    ) -> tuple[Tensor, ...]: ...
    def grad(
        self,
        outputs: Tensor | Sequence[Tensor],
        wrt: Tensor | Sequence[Tensor],
        upstream: Tensor | Sequence[Tensor | None] | None = None,
    ) -> Tensor | tuple[Tensor, ...]:
        """The gradients of outputs with respect to tensors of this graph, by operations added to it.

        A gradient has the dims and the dtype of its tensor, and is rounded where any tensor is. Functions
        that are constant between jumps, comparisons and integers have gradients of 0. It may be
        differentiated again, where the operations that it consists of have gradients.

        Parameters
        ----------
        outputs
            What is differentiated: a loss, or several tensors whose gradients add up. Floats.
        wrt
            Inputs, or any other tensors of this builder: one or several. Floats.
        upstream
            The gradient of each output, of its dims. None for ones: what is differentiated is then the sum of
            the output's elements.

        Returns
        -------
        Tensor or tuple of Tensor
            One for each of `wrt`, as that is given. Zeros where no output depends on it.

        Raises
        ------
        InvalidRequest
            A tensor is not of floats, upstream does not fit the outputs, or an operation between them has no
            gradient: the text says which, and where it was added.
        """
        made, of = _several(outputs), _several(wrt)
        given = [None] * len(made) if upstream is None else _several(upstream)
        found = Gradients(self, made, of, given).add_all()
        return found[0] if isinstance(wrt, Tensor) else tuple(found)


def _several(given: Any) -> list[Any]:
    """The elements of a sequence, or a single object as one element."""
    return list(given) if isinstance(given, Sequence) and not isinstance(given, str) else [given]


for _class in GraphBuilder.__mro__[:-1]:
    for _name, _function in list(vars(_class).items()):
        if isinstance(_function, FunctionType) and not _name.startswith("_"):
            # Errors about arguments name the class that users know.
            _function.__name__, _function.__qualname__ = _name, f"GraphBuilder.{_name}"
            setattr(_class, _name, check_spelling(_function))
