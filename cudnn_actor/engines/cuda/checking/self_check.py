"""The self-check of a plan before its first use: it must compute its graph and write nothing else.

cuDNN accepts some graphs that its engines then compute wrongly: int8 in NCHW,
results wider than the operands in NCHW, float32 epilogues with scalars, filters
that reach mostly into padding (cuDNN 9.19). No list of such cases is complete,
so every plan runs once on known numbers: small integers, whose sums every type
holds, or those that an operation asks for (`Operation.samples`). Outputs and
workspace are filled with NaN beforehand, and have guard bytes before and after
them. Results of few elements are computed from several draws of numbers: with a
single draw, a wrong plan may by chance compute the right numbers.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np

from cudnn_actor.actors.logs import Log
from cudnn_actor.engines.base import EngineFailure, StickyError
from cudnn_actor.engines.cuda.checking.comparison import Accuracy, Compared, difference
from cudnn_actor.engines.cuda.checking.convolution_reference import Reference, References, references_of
from cudnn_actor.engines.cuda.checking.evaluated_reference import EvaluatedReference, Evaluator, evaluator_of
from cudnn_actor.engines.cuda.checking.journal import Journal
from cudnn_actor.engines.cuda.checking.self_check_memory import NUMBERS, CheckedTensor, Findings, Guarded
from cudnn_actor.engines.cuda.cudnn.kernel_caches import KernelCaches
from cudnn_actor.engines.cuda.library.failures import translate
from cudnn_actor.engines.cuda.library.libraries import libraries
from cudnn_actor.engines.cuda.running.plan import CudaPlan
from cudnn_actor.engines.cuda.running.program import Program
from cudnn_actor.protocol.graphs.operation_graph import OfNumbers, OperationGraph
from cudnn_actor.protocol.types.tensor import TensorSpec

__all__ = ["BuildContext", "SelfCheck"]

log = Log("cudnn_actor")
V = TypeVar("V")
_MOST_KEPT = 256 << 20
"""The most bytes that stay in a shared pool between two checks. The rest is given back to the device."""
_FEW, _DRAWS_OF_FEW = 64, 4
"""A result with fewer elements is computed from this many draws. The two sums of a filter's gradient were 0
for the first draw, so a plan passed that wrote them to wrong places (cuDNN 9.19, on an H200)."""
_MOST_DRAWS = 32
"""The most draws of a graph that has no tensor of more than a few elements. A single element of `a < b` is
that of `a <= b` in seven draws of eight: in all of four with probability 59 %, in all of 32 with 1.4 %.
Larger inputs give sums of many numbers, which are rarely the same."""
_ReferenceMethod = Callable[[Callable[[int], int], list[float]], dict[int, V]]
"""A method of a reference, which takes the addresses of tensors and the plan's scalars."""


class BuildContext(NamedTuple):
    """The context in which plans are built and checked.

    Parameters
    ----------
    handle, stream
        A cuDNN handle, and the CuPy stream set on it.
    journal
        Where checks are recorded.
    trying
        Called with the tag of each plan that a build tries, and with the reason why a plan cannot be built.
    kernels
        Compiled kernels for graphs of other sizes; None to compile each plan's own.
    pool
        A CuPy memory pool that one self-check after the other takes its memory from; None for one each.
    evaluator
        Returns the evaluator of a graph's results: `evaluator_of`.
    """

    handle: Any
    stream: Any
    journal: Journal = Journal(None)
    trying: Callable[[str], None] = lambda _: None
    kernels: KernelCaches | None = None
    pool: Any = None
    evaluator: Callable[[OperationGraph], Evaluator] = evaluator_of


class SelfCheck:
    """A second set of a graph's tensors, between guards, and the results that plans must compute from them.

    Parameters
    ----------
    graph
        The graph that the plans compute.
    context
        The build context, on whose stream the plans run. Checks wait for that stream.
    evaluator
        The evaluator of the results, for graphs that `Reference` does not cover; the context's by default.

    Raises
    ------
    MemoryError
        The device has no room for a second set of the graph's tensors.
    """

    def __init__(
        self, graph: OperationGraph, context: BuildContext, *, evaluator: Evaluator | None = None
    ) -> None:
        self._graph = graph
        self.context = context
        self._given_evaluator = evaluator
        self._pool = context.pool or libraries().cupy.cuda.MemoryPool()
        self.scalars = [0.5 + 0.25 * number for number in range(len(graph.scalars))]
        self._reference: References | EvaluatedReference | None = None
        try:
            with self._working():
                if Reference.covers(graph):
                    self._reference = references_of(graph)
                else:
                    self._reference = EvaluatedReference.within_room(graph, self._evaluator)
                self._tensors = {
                    uid: CheckedTensor(self._pool, graph.tensor(uid), seed)
                    for seed, uid in enumerate(graph.bound)
                }
                self._put_samples(len(graph.bound))  # seeds below are the tensors' own
                self._sums = self._input_sums()
        except libraries().cupy.cuda.memory.OutOfMemoryError as error:
            self._pool.free_all_blocks()
            raise MemoryError(str(error)) from error
        self._overwritten = {
            before: uid for uid in graph.results if (before := graph.tensor(uid).overwrites) is not None
        }
        """Uid of a tensor that a result overwrites → uid of that result. Both are bound to one buffer."""
        self._drawn: int | None = 0
        """The draw of which the tensors have the values; None if they may have others."""
        self._draws = range(_count_draws(graph))
        self.pointers = [self._tensors[self._overwritten.get(uid, uid)].pointer for uid in graph.bound]

    @functools.cached_property
    def _evaluator(self) -> Evaluator:
        """The evaluator of the results. It is found when it is first needed, because that takes time."""
        return self._given_evaluator or self.context.evaluator(self._graph)

    @contextlib.contextmanager
    def _working(self) -> Iterator[None]:
        """Use the build context's stream, and a memory pool that `close` empties."""
        with self.context.stream, libraries().cupy.cuda.using_allocator(self._pool.malloc):
            yield

    def _input_sums(self) -> list[int]:
        """A checksum of each input. Blocks."""
        cupy = libraries().cupy
        inputs = [tensor for uid, tensor in self._tensors.items() if uid not in self._graph.written]
        sums = cupy.zeros(max(1, len(inputs)), cupy.uint64)
        for number, tensor in enumerate(inputs):
            tensor.add_up(int(sums.data.ptr) + sums.itemsize * number)
        return np.asarray(cupy.asnumpy(sums)).tolist()  # type: ignore[no-any-return]

    def _draw(self, draw: int) -> None:
        """Give the inputs the values of a draw, by its number, and restore the guards. Blocks."""
        count = len(self._tensors)
        first = 2 * count * draw  # as many seeds for tensors, and for samples
        self._drawn = None
        with self._working():
            for seed, tensor in enumerate(self._tensors.values(), first):
                tensor.fill(seed)
            self._put_samples(first + count)
            self._sums = self._input_sums()
        self._drawn = draw

    def _try_to_draw(self, draw: int, plan: str) -> bool:
        """Call `_draw`, and return whether the device had room for it. If not, the draws before must do.

        An exception would leave the check of the plan open in the journal, as if it had killed the process.
        """
        try:
            self._draw(draw)
        except libraries().cupy.cuda.memory.OutOfMemoryError:
            log.warning("plan.unchecked", plan=plan, reason="no room on the device for other numbers")
            return False
        return True

    def _put_samples(self, first: int) -> None:
        """Give the inputs the values that the operations ask for (`Operation.samples`), if they ask for any.

        `first`: the first of the seeds that random values are drawn with.
        """
        graph = self._graph
        evaluator = None if graph.samples_of_each else self._evaluator
        seeds = itertools.count(first)

        def draw(spec: TensorSpec) -> Any:
            assert evaluator is not None, "no operation with samples of each element draws"
            return evaluator.draw(spec.dims, next(seeds))

        with np.errstate(all="ignore"):
            functions = None if evaluator is None else evaluator.xp
            for uid, values in graph.samples(functions, draw, np.array(NUMBERS)).items():
                if isinstance(values, OfNumbers):
                    self._tensors[uid].fill_with(values.values)
                else:
                    assert evaluator is not None, "samples of each element are no arrays"
                    evaluator.store(values, graph.tensor(uid), self._tensors[uid].pointer)

    def rehearse(self) -> None:
        """Compute the reference and compare the tensors with it, without a plan. See `Rehearsals`. Blocks."""
        with self._working():
            self._reference_results(lambda reference: reference.compare)

    def close(self) -> None:
        """Wait for running work and free the memory. A pool of the context keeps some for the next check."""
        self.context.stream.synchronize()
        self._reference = None
        self._tensors.clear()
        if self.context.pool is None or self._pool.total_bytes() > _MOST_KEPT:
            self._pool.free_all_blocks()

    def fault(self, plan: CudaPlan) -> str | None:
        """The fault of a plan as a text; None if the plan passes. Blocks for milliseconds.

        If there is no reference for the graph, only NaN and the guards are checked. Raises `MemoryError` if
        the inputs must be drawn again, because a faulty plan may have written there, and there is no room.

        Each plan is checked with all draws. The check begins with the draw with which the check before it
        ended, whose values are still there: tuning checks many plans, and each draw takes time.
        """
        journal = self.context.journal
        if journal.may_kill(plan.tag):
            return "its self-check killed an earlier process"
        first = self._drawn
        if first is None:
            self._draw(first := 0)
        with journal.trying(plan.tag):
            fault = self.fault_of_draw(plan)
            for draw in self._draws_after(first):
                if fault is not None or not self._try_to_draw(draw, plan.tag):
                    break
                fault = self.fault_of_draw(plan)
        if fault is not None:
            self._drawn = None  # the plan may have written anywhere: no fault of the next plan
        return fault

    def _draws_after(self, draw: int) -> list[int]:
        """All draws but this one: first those with higher numbers, then those with lower ones."""
        return [*self._draws[draw + 1 :], *self._draws[:draw]]

    def fault_of_draw(self, plan: CudaPlan) -> str | None:
        """Run a plan on the inputs of the present draw, and judge the results. None if it passes. Blocks."""
        with self._working():
            for uid in self._graph.results:
                self._tensors[uid].poison()
            for read, result in self._overwritten.items():
                self._tensors[result].copy_from(self._tensors[read])
            try:
                workspace = self.room_for(plan)
                workspace.poison()
                program = Program(plan, self.context.handle, self.context.stream)
                program.run((), self.pointers, self.scalars, workspace.pointer)
                self.context.stream.synchronize()
            except (EngineFailure, RuntimeError, ValueError) as error:
                known = translate(error)
                if isinstance(known, StickyError):
                    raise known from error
                return f"failed: {known}"
            except MemoryError:
                return f"its workspace of {plan.workspace:,} bytes does not fit on the device"
            return self._judge(workspace)

    def room_for(self, plan: CudaPlan) -> Guarded:
        """Allocate a workspace for a plan, between guards. Raises `MemoryError`."""
        with self._working():
            return Guarded(self._pool, plan.workspace)

    def _judge(self, workspace: Guarded) -> str | None:
        """The fault that a run has shown, as a text; None if it has shown none. Blocks."""
        findings = Findings(self._pool)
        for memory in (*self._tensors.values(), workspace):
            memory.check(findings)
        for uid in self._graph.results:
            self._tensors[uid].look_for_nan(findings)
        strayed, nan = findings.read()
        if strayed:
            return "it writes outside its outputs and its workspace"
        if self._input_sums() != self._sums:
            return "it writes to its inputs"
        compared = self._reference_results(lambda reference: reference.compare)
        if nan and not any(np.isnan(wanted).any() for wanted, _ in compared.values()):
            return "it leaves NaN in its outputs"
        suspected = {uid: compared[uid] for uid in self._faults(compared)}
        if not suspected:
            return None
        uncertainties = self._reference_results(lambda reference: reference.uncertainties)
        return next(iter(self._faults(suspected, uncertainties).values()), None)

    def _faults(
        self, compared: Mapping[int, Compared], uncertainties: Mapping[int, np.ndarray] = {}
    ) -> dict[int, str]:
        """The differences of results from the reference, by uid, of the results that differ."""
        found = {
            uid: difference(wanted, got, Accuracy.of(self._graph, uid), uncertainties.get(uid, 0.0))
            for uid, (wanted, got) in compared.items()
        }
        return {uid: fault for uid, fault in found.items() if fault is not None}

    def _reference_results(
        self, method: Callable[[References | EvaluatedReference], _ReferenceMethod[V]]
    ) -> dict[int, V]:
        """What a method of the reference returns; nothing without a reference, or without room for it."""
        if self._reference is None:
            return {}
        try:
            return method(self._reference)(lambda uid: self._tensors[uid].pointer, self.scalars)
        except libraries().cupy.cuda.memory.OutOfMemoryError:
            log.warning("plan.unchecked", reason="no room on the device to compute what it should compute")
            return {}


def _count_draws(graph: OperationGraph) -> int:
    """The number of draws from which the results are computed: one, unless a result has few elements.

    If no tensor of the graph has more than a few elements, the number of draws is such that each result has
    about `_FEW` elements in all of them together, and at most `_MOST_DRAWS`.
    """
    sizes = [size for uid in graph.results if (size := math.prod(graph.tensor(uid).dims))]
    least = min(sizes, default=_FEW)
    if least >= _FEW:
        return 1
    if any(math.prod(graph.tensor(uid).dims) >= _FEW for uid in graph.bound):
        return _DRAWS_OF_FEW
    return max(_DRAWS_OF_FEW, min(_MOST_DRAWS, -(-_FEW // least)))
