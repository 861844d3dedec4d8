"""Plans that run a whole graph in a session of ONNX Runtime."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import msgspec
import numpy as np

from cudnn_actor.engines.base import EngineFailure, Plan, RunAnywhere, no_progress
from cudnn_actor.engines.cpu.in_place import LEAST_BYTES, Arrays, InPlace
from cudnn_actor.engines.cpu.sessions.draft import Draft, memory_order
from cudnn_actor.engines.cpu.sessions.runtime import as_value, giving_memory_back, make_session
from cudnn_actor.engines.support import tag_of
from cudnn_actor.memory.array_addresses import address_of
from cudnn_actor.protocol.graphs.explanation import Explanation, piece_of
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.graphs.step_kinds import StepKind

__all__ = ["InsteadOfSession", "SessionLaunch", "SessionPlan", "SessionRun", "session_plan"]


@dataclass(frozen=True, eq=False)
class SessionPlan:
    """A graph that ONNX Runtime runs; immutable.

    Parameters
    ----------
    tag
        `cpu/conv_fwd/1f2e3d4c/ort`.
    draft
        The graph as a model.
    threads
        How many compute a run.
    session
        For runs on any buffers.
    """

    tag: str
    draft: Draft
    threads: int
    session: Any
    workspace: ClassVar[int] = 0
    checked: ClassVar[bool] = True
    provisional: ClassVar[bool] = False

    @property
    def buffers(self) -> int:
        """How many a run takes."""
        return len(self.draft.graph.bound)

    @property
    def scalars(self) -> int:
        """How many a run takes."""
        return len(self.draft.graph.scalars)

    def bind(self) -> SessionRun:
        """The plan, ready to run on any buffers. What it needs beside them, ONNX Runtime allocates."""
        return SessionRun(self.draft, self.session)

    def bind_constant(self, buffers: Sequence[np.ndarray], constant: Collection[int]) -> SessionRun:
        """The plan, ready to run on these buffers, of which those at some places keep their values.

        ONNX Runtime rearranges constant weights once, and computes at once what follows from them alone.
        Blocks: a second of a model of a gigabyte.
        """
        draft, graph = self.draft, self.draft.graph
        given = {graph.bound[place]: buffers[place] for place in constant}
        given = {uid: array for uid, array in given.items() if uid in draft.inputs}
        values = {
            draft.inputs[uid]: as_value(_pack(draft, uid, array), draft.port_of(uid)[0])
            for uid, array in given.items()
        }
        return SessionRun(draft, make_session(draft.model(given), self.threads, values), given)

    def explain(self, graph: OperationGraph) -> Explanation:
        """The explanation, which has one piece; see `engines.base.Plan`."""
        numbers = range(len(graph.operations))
        piece = piece_of(graph, self.tag, numbers, StepKind.SESSION.step_name())
        return Explanation(plan=self.tag, digest=graph.digest(), pieces=(piece,))


@dataclass(frozen=True, eq=False)
class InsteadOfSession:
    """A plan of NumPy's, for a graph that would have been run in a session if that were possible.

    Parameters
    ----------
    plan
        What runs.
    why
        Why there is no session.
    """

    plan: Plan
    why: str

    @property
    def tag(self) -> str:
        """The plan's."""
        return self.plan.tag

    @property
    def workspace(self) -> int:
        """The plan's."""
        return self.plan.workspace

    @property
    def checked(self) -> bool:
        """The plan's."""
        return self.plan.checked

    @property
    def provisional(self) -> bool:
        """The plan's."""
        return self.plan.provisional

    def explain(self, graph: OperationGraph) -> Explanation:
        """The plan's explanation. Its first piece also says why there is no session."""
        found = self.plan.explain(graph)
        first, *others = found.pieces
        told = msgspec.structs.replace(first, why=(self.why, *first.why))
        return msgspec.structs.replace(found, pieces=(told, *others))


def _pack(draft: Draft, uid: int, array: np.ndarray) -> np.ndarray:
    """The values of a buffer, packed: the buffer's own memory if there are no gaps in it."""
    order = memory_order(draft.graph.tensor(uid))
    ordered = array if order is None else array.transpose(order)
    return np.ascontiguousarray(ordered).reshape(ordered.shape).view(f"u{array.itemsize}")


class _Port(NamedTuple):
    """An input or output of a session, for a bound tensor of its graph.

    Parameters
    ----------
    name, element_type
        ONNX's.
    order
        The axes as they lie in memory; None if there are gaps.
    written
        Whether it is an output.
    apart
        Whether results are copied there behind a run, because the run may still read what lies there.
    """

    name: str
    element_type: int
    order: tuple[int, ...] | None
    written: bool
    apart: bool

    def in_memory_order(self, array: np.ndarray) -> np.ndarray:
        """An array with its axes as they lie in memory."""
        return array if self.order is None else array.transpose(self.order)


class _Form(NamedTuple):
    """The form of an array that a session reads or writes where it lies.

    Parameters
    ----------
    dims, dtype
        Its own.
    order
        The axes as they lie in memory; None if that is their order.
    """

    dims: tuple[int, ...]
    dtype: np.dtype[Any]
    order: tuple[int, ...] | None


class _Bound(NamedTuple):
    """A session, bound to buffers.

    Parameters
    ----------
    buffers
        Those.
    binding
        ONNX Runtime's.
    before, after
        Copies around a run, of what does not lie as the session takes it.
    numbers
        Where the scalars of a run are written.
    """

    buffers: tuple[np.ndarray, ...]
    binding: Any
    before: list[Callable[[], object]]
    after: list[Callable[[], object]]
    numbers: list[np.ndarray]


class SessionRun:
    """A session, and the buffers that it was last run on.

    Parameters
    ----------
    draft
        Its model.
    session
        The session.
    constants
        The buffers whose values the session has, by uid. It keeps them mapped, since it may read them.
    """

    def __init__(self, draft: Draft, session: Any, constants: Collection[int] = ()) -> None:
        self._draft = draft
        self._session = session
        self._constants = constants
        self._bound: _Bound | None = None
        self._elsewhere: _Bound | None = None
        """The binding for runs on arrays in place of some buffers."""
        self._addresses: dict[int, int] = {}
        """The places that have been bound to such arrays, and the address to which each is bound now."""
        self._options = giving_memory_back()
        """The options of the first run: memory that the runs of other graphs no longer need is given back
        after it."""

    def run(
        self,
        buffers: Sequence[np.ndarray],
        scalars: Iterable[float],
        on_progress: Callable[[], None] = no_progress,
        on_piece: Callable[[], None] = no_progress,
    ) -> None:
        """Compute. `on_piece` is called behind it.

        Raises `ValueError` if a buffer's dims do not match the graph's, `EngineFailure`.
        """
        bound = self._bound
        if bound is None or any(one is not other for one, other in zip(bound.buffers, buffers, strict=True)):
            self._bound = None
            bound = self._bound = self._bind(buffers)
        self._compute(bound, scalars)
        on_progress()
        on_piece()

    def run_on(self, buffers: Sequence[np.ndarray], scalars: Iterable[float], arrays: Arrays) -> None:
        """Compute on these buffers, and on arrays that it may `use` in place of some.

        The buffers are the same at each call. None of the arrays is kept. Raises the same.
        """
        bound = self._elsewhere
        if bound is None:
            bound = self._elsewhere = self._bind(buffers)
        addresses = self._addresses
        if addresses != arrays.starts:
            for place in addresses.keys() | arrays.starts:  # some may be bound to arrays of the last run
                array = arrays.get(place, buffers[place])
                address = arrays.starts.get(place) or address_of(array)
                if addresses.get(place) != address:
                    port = self._ports[place]
                    assert port is not None
                    _attach(bound.binding, port, port.in_memory_order(array), address)
                    addresses[place] = address
        self._compute(bound, scalars)

    def usable(self, buffers: Sequence[np.ndarray]) -> Callable[[int, np.ndarray], bool]:
        """A function that says whether the session reads or writes an array where it lies, in the place of
        one of these buffers."""
        forms = [self._form(place, buffer) for place, buffer in enumerate(buffers)]

        def is_usable(place: int, array: np.ndarray) -> bool:
            if (form := forms[place]) is None or array.shape != form.dims or array.dtype != form.dtype:
                return False
            flags = array.flags if form.order is None else array.transpose(form.order).flags
            return flags.c_contiguous and flags.aligned

        return is_usable

    def _form(self, place: int, buffer: np.ndarray) -> _Form | None:
        """The form that arrays in the place of a buffer must have; None if no array may take its place."""
        port = self._ports[place]
        if port is None or port.apart or not port.in_memory_order(buffer).flags.c_contiguous:
            return None
        usual = port.order is None or port.order == tuple(range(buffer.ndim))
        return _Form(buffer.shape, buffer.dtype, None if usual else port.order)

    def may_move(self, buffers: Sequence[np.ndarray]) -> bool:
        """Whether it pays to run on arrays in place of buffers, and the graph overwrites no operand."""
        if any(tensor.overwrites is not None for tensor in self._draft.graph.tensors):
            return False
        moved = (buffer for port, buffer in zip(self._ports, buffers, strict=True) if port is not None)
        return sum(buffer.nbytes for buffer in moved) >= LEAST_BYTES

    def results(self, buffers: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The buffers that a run writes."""
        return [buffer for port, buffer in zip(self._ports, buffers, strict=True) if port and port.written]

    @functools.cached_property
    def _ports(self) -> list[_Port | None]:
        """The port of each bound tensor; None if the session has the tensor's values, or does not use it."""
        draft, graph = self._draft, self._draft.graph
        ports = list[_Port | None]()
        for uid in graph.bound:
            written = uid in draft.outputs
            if not written and (uid not in draft.inputs or uid in self._constants):
                ports.append(None)
                continue
            tensor, (element_type, _) = graph.tensor(uid), draft.port_of(uid)
            name = draft.outputs[uid] if written else draft.inputs[uid]
            apart = tensor.overwrites is not None
            ports.append(_Port(name, int(element_type), memory_order(tensor), written, apart))
        return ports

    def _compute(self, bound: _Bound, scalars: Iterable[float]) -> None:
        for number, value in zip(bound.numbers, scalars, strict=True):
            number[...] = value
        for call in bound.before:
            call()
        try:
            self._session.run_with_iobinding(bound.binding, self._options)
            self._options = None
        except Exception as error:
            raise EngineFailure("ONNX_RUNTIME", str(error)) from error
        for call in bound.after:
            call()

    def _bind(self, buffers: Sequence[np.ndarray]) -> _Bound:
        graph, draft = self._draft.graph, self._draft
        bound = _Bound(tuple(buffers), self._session.io_binding(), [], [], [])
        for uid, port, buffer in zip(graph.bound, self._ports, buffers, strict=True):
            if buffer.shape != graph.tensor(uid).dims:
                raise ValueError(f"a buffer of dims {buffer.shape} for a tensor of {graph.tensor(uid).dims}")
            if port is not None:
                self._bind_port(bound, port, port.in_memory_order(buffer))
        for uid in graph.scalars:
            number = np.empty((1,) * len(graph.tensor(uid).dims), np.float32)
            bound.numbers.append(number)
            if uid in draft.inputs:
                element_type, _ = draft.port_of(uid)
                port = _Port(draft.inputs[uid], int(element_type), None, False, False)
                _attach(bound.binding, port, number, address_of(number))
        return bound

    @staticmethod
    def _bind_port(bound: _Bound, port: _Port, array: np.ndarray) -> None:
        # What an output overwrites may be read behind it: the session has an order of its own.
        if not array.flags.c_contiguous or port.apart:
            packed = np.empty(array.shape, array.dtype)
            if port.written:
                bound.after.append(functools.partial(np.copyto, array, packed))
            else:
                bound.before.append(functools.partial(np.copyto, packed, array))
            array = packed
        _attach(bound.binding, port, array, address_of(array))


def _attach(binding: Any, port: _Port, array: np.ndarray, address: int) -> None:
    """Bind a packed array at this address to a session's input or output. The binding does not keep the
    array."""
    attach = binding.bind_output if port.written else binding.bind_input
    attach(port.name, "cpu", 0, port.element_type, array.shape, address)


class SessionLaunch(RunAnywhere):
    """Runs of a session on the buffers that it was made for, or on others in place of some.

    Parameters
    ----------
    run
        The session.
    buffers, scalars
        What it runs on.
    on_progress
        Is called behind a run.
    """

    def __init__(
        self,
        run: SessionRun,
        buffers: Sequence[np.ndarray],
        scalars: Sequence[float],
        on_progress: Callable[[], None],
    ) -> None:
        self._run, self._buffers, self._scalars, self._on_progress = run, buffers, scalars, on_progress
        self._in_place = InPlace(buffers, run.results(buffers), run.usable(buffers))

    def __call__(self) -> None:
        """Compute on its buffers."""
        self._run.run(self._buffers, self._scalars, self._on_progress)

    def may_pay(self, nbytes: int) -> bool:
        """See `RunAnywhere`."""
        return nbytes >= LEAST_BYTES

    def instead(
        self,
        sources: Sequence[tuple[int, np.ndarray]],
        targets: Sequence[tuple[int, np.ndarray | None]],
    ) -> Arrays:
        """See `RunAnywhere`. The arrays are large, have the layout that the session takes, and overlap no
        result."""
        found = self._in_place.find(sources, targets)
        return found if found.nbytes >= LEAST_BYTES else Arrays()

    def run_on(self, arrays: Arrays) -> None:
        """See `RunAnywhere`."""
        self._run.run_on(self._buffers, self._scalars, arrays)
        self._on_progress()


def session_plan(draft: Draft, threads: int) -> SessionPlan:
    """A plan of a model. Raises whatever ONNX Runtime raises where it does not have an operator. Blocks."""
    return SessionPlan(
        tag_of("cpu", draft.graph, "ort"), draft, threads, make_session(draft.model(), threads, {})
    )
