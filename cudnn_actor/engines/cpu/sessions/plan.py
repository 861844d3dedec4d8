"""Plans that run a whole graph in a session of ONNX Runtime."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec
import numpy as np

from cudnn_actor.engines.base import EngineFailure, Plan, no_progress
from cudnn_actor.engines.cpu.sessions.draft import Draft, memory_order
from cudnn_actor.engines.cpu.sessions.runtime import as_value, giving_memory_back, make_session
from cudnn_actor.engines.support import tag_of
from cudnn_actor.protocol.graphs.explanation import Explanation, piece_of
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.graphs.step_kinds import StepKind

__all__ = ["InsteadOfSession", "SessionPlan", "SessionRun", "session_plan"]


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

    def fixed(self, buffers: Sequence[np.ndarray], constant: Collection[int]) -> SessionRun:
        """The plan, ready to run on these buffers, of which those at some places keep their values.

        ONNX Runtime rearranges constant weights once, and computes at once what follows from them alone.
        Blocks: a second of a model of a gigabyte.
        """
        draft, graph = self.draft, self.draft.graph
        given = {graph.bound[place]: buffers[place] for place in constant}
        given = {uid: array for uid, array in given.items() if uid in draft.inputs}
        values = {
            draft.inputs[uid]: as_value(_packed(draft, uid, array), draft.port_of(uid)[0])
            for uid, array in given.items()
        }
        return SessionRun(draft, make_session(draft.model(given), self.threads, values), given)

    def explain(self, graph: OperationGraph) -> Explanation:
        """One piece; see `engines.base.Plan`."""
        numbers = range(len(graph.operations))
        piece = piece_of(graph, self.tag, numbers, StepKind.SESSION.named())
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
        """What the plan says; its first piece also says why there is no session."""
        found = self.plan.explain(graph)
        first, *others = found.pieces
        told = msgspec.structs.replace(first, why=(self.why, *first.why))
        return msgspec.structs.replace(found, pieces=(told, *others))


def _in_memory_order(draft: Draft, uid: int, array: np.ndarray) -> np.ndarray:
    """A buffer with its axes as they lie in memory."""
    order = memory_order(draft.graph.tensor(uid))
    return array if order is None else array.transpose(order)


def _packed(draft: Draft, uid: int, array: np.ndarray) -> np.ndarray:
    """The values of a buffer, packed: the buffer's own memory if there are no gaps in it."""
    ordered = _in_memory_order(draft, uid, array)
    return np.ascontiguousarray(ordered).reshape(ordered.shape).view(f"u{array.itemsize}")


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
        self._buffers: tuple[np.ndarray, ...] | None = None
        self._binding: Any = None
        self._options = giving_memory_back()
        """Of the first run: what other graphs' runs no longer need is given back behind it."""
        self._before: list[Callable[[], object]] = []
        self._after: list[Callable[[], object]] = []
        self._numbers: list[np.ndarray] = []

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
        known = self._buffers
        if known is None or any(one is not other for one, other in zip(known, buffers, strict=True)):
            self._bind(buffers)
        for number, value in zip(self._numbers, scalars, strict=True):
            number[...] = value
        for call in self._before:
            call()
        try:
            self._session.run_with_iobinding(self._binding, self._options)
            self._options = None
        except Exception as error:
            raise EngineFailure("ONNX_RUNTIME", str(error)) from error
        for call in self._after:
            call()
        on_progress()
        on_piece()

    def _bind(self, buffers: Sequence[np.ndarray]) -> None:
        graph, draft = self._draft.graph, self._draft
        self._buffers, self._binding = None, self._session.io_binding()
        self._before, self._after, self._numbers = [], [], []
        for uid, buffer in zip(graph.bound, buffers, strict=True):
            if buffer.shape != graph.tensor(uid).dims:
                raise ValueError(f"a buffer of dims {buffer.shape} for a tensor of {graph.tensor(uid).dims}")
            if uid in draft.outputs:
                self._bind_output(uid, buffer)
            elif uid in draft.inputs and uid not in self._constants:
                self._bind_input(uid, buffer)
        for uid in graph.scalars:
            number = np.empty((1,) * len(graph.tensor(uid).dims), np.float32)
            self._numbers.append(number)
            if uid in draft.inputs:
                self._binding.bind_input(*self._place(draft.inputs[uid], uid, number))
        self._buffers = tuple(buffers)

    def _bind_input(self, uid: int, buffer: np.ndarray) -> None:
        array = _in_memory_order(self._draft, uid, buffer)
        if not array.flags.c_contiguous:
            packed = np.empty(array.shape, array.dtype)
            self._before.append(functools.partial(np.copyto, packed, array))
            array = packed
        self._binding.bind_input(*self._place(self._draft.inputs[uid], uid, array))

    def _bind_output(self, uid: int, buffer: np.ndarray) -> None:
        array = _in_memory_order(self._draft, uid, buffer)
        # What an output overwrites may be read behind it: the session has an order of its own.
        if not array.flags.c_contiguous or self._draft.graph.tensor(uid).overwrites is not None:
            packed = np.empty(array.shape, array.dtype)
            self._after.append(functools.partial(np.copyto, array, packed))
            array = packed
        self._binding.bind_output(*self._place(self._draft.outputs[uid], uid, array))

    def _place(self, name: str, uid: int, array: np.ndarray) -> tuple[Any, ...]:
        element_type, _ = self._draft.port_of(uid)
        address, _ = array.__array_interface__["data"]
        return name, "cpu", 0, int(element_type), array.shape, address


def session_plan(draft: Draft, threads: int) -> SessionPlan:
    """A plan of a model. Raises whatever ONNX Runtime raises where it does not have an operator. Blocks."""
    return SessionPlan(
        tag_of("cpu", draft.graph, "ort"), draft, threads, make_session(draft.model(), threads, {})
    )
