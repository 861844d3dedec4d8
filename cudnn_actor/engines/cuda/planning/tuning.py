"""Tuning: measures candidates for each piece of a graph on the device, and keeps the fastest.

A piece's candidates must pass their self-check. Those that are, by themselves, about as
fast as the first choice are then timed where they will run: in the captured CUDA graph of
the whole, in turns with the plan so far, so that neither the clock nor warm caches favour
one of them. `tuning_rules` decides which is faster. Equal pieces are tuned once, and the
pieces that take the most time of a run come first.

The number of candidates is bounded for each piece, and no further piece is begun after a
few minutes.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from cudnn_actor.actors.logs import Log
from cudnn_actor.engines.base import EngineFailure, ProgressCallback, StickyError
from cudnn_actor.engines.cuda.checking.self_check import BuildContext, SelfCheck
from cudnn_actor.engines.cuda.cudnn.frontend_graph import Refused
from cudnn_actor.engines.cuda.library.failures import translate
from cudnn_actor.engines.cuda.library.libraries import libraries
from cudnn_actor.engines.cuda.planning.compiler import WORKSPACE_BYTES, compile_plan, in_pieces
from cudnn_actor.engines.cuda.planning.partition import Cut, cut
from cudnn_actor.engines.cuda.planning.rivals import Candidate, all_candidates
from cudnn_actor.engines.cuda.planning.tuning_rules import (
    Few,
    finalists,
    gain_of,
    is_gain,
    shortlist,
    worth_tuning,
)
from cudnn_actor.engines.cuda.running.contests import Contest, Entered
from cudnn_actor.engines.cuda.running.plan import CudaPlan
from cudnn_actor.engines.cuda.running.program import Program
from cudnn_actor.engines.cuda.running.recipe import GraphStep, Timed, Tuning
from cudnn_actor.protocol.errors import OutOfMemory
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph

__all__ = ["time_plan", "tune"]

log = Log("cudnn_actor")

_WARM_UPS, _ROUGH_RUNS = 5, 5
_CANDIDATES, _FINALISTS = 16, 4
"""The most candidates of a piece that are built, and the most of them that are tried in the whole."""
_OF_ENGINE, _OF_CUDNN = 3, 6
"""The most candidates of cuDNN's: of one engine, and of all engines."""
_LONGEST_S = 240.0
"""The seconds after which no further piece is begun."""
_NOTHING = Tuning(heuristic_us=0.0, tuned_us=0.0, timed=0, discarded=())
_OWN_FAULTS = (Refused, EngineFailure, MemoryError, OutOfMemory)
"""Errors for which a candidate is left out, unless the context is dead."""


def tune(
    graph: OperationGraph,
    context: BuildContext,
    workspace_limit: int | None,
    progress: ProgressCallback,
) -> CudaPlan:
    """Returns the fastest plan for a graph; its `tuning` has the measurements. Blocks for seconds to minutes.

    Raises as `compile_plan`, and `OutOfMemory` or `MemoryError` if a second set of the graph's tensors does
    not fit.
    """
    limit = WORKSPACE_BYTES if workspace_limit is None else workspace_limit
    return _Tuner(graph, context, limit, progress).tune()


class _Tuner:
    """The tuning of one graph."""

    def __init__(
        self, graph: OperationGraph, context: BuildContext, limit: int, progress: ProgressCallback
    ) -> None:
        self._graph, self._context, self._limit, self._progress = graph, context, limit, progress
        self._began = time.monotonic()
        self._cuts: dict[str, Cut | None] = {}
        """The cut of a graph, or of a piece, by its digest; None if it is cut no further."""
        self._singles: dict[str, OperationGraph] = {}
        """The different pieces that are cut no further, by digest."""
        self._chosen: dict[str, CudaPlan] = {}
        """The plan so far of each of `_singles`, by digest."""
        self._timed = 0
        self._discarded: list[str] = []

    def tune(self) -> CudaPlan:
        """See `tune`."""
        building = self._context._replace(trying=lambda what: self._progress(0, 0, what))
        for single in self._in_order(self._graph):
            digest = single.digest()
            if digest not in self._chosen:
                self._singles[digest] = single
                self._chosen[digest] = compile_plan(single, building, self._limit)
        first = self._chosen.copy()
        contest = Contest(self._graph, self._context.handle, self._context.stream)
        try:
            return self._fastest_in_whole(contest, first)
        finally:
            contest.close()

    def _fastest_in_whole(self, contest: Contest, first: Mapping[str, CudaPlan]) -> CudaPlan:
        """The plan that is the fastest in the whole. `first`: the first choices, by digest."""
        times = self._times(contest.pieces_us(self._whole(first)))
        wanted = worth_tuning(times)
        for number, digest in enumerate(wanted):
            if time.monotonic() - self._began > _LONGEST_S:
                log.info("plan.tuning_ended", graph=self._graph.digest()[:8], left=len(wanted) - number)
                break
            each_us = [us for key, us in times if key == digest]
            self._tune_piece(contest, digest, each_us, (number, len(wanted)))
        self._progress(len(wanted) * _CANDIDATES, len(wanted) * _CANDIDATES, "the whole")
        runs = contest.turns([contest.enter(self._whole(plans)) for plans in (first, self._chosen)])
        before_us, after_us = map(statistics.median, zip(*runs, strict=True))
        gain = gain_of([(before, after) for before, after in runs])
        if not (self._has_changed and is_gain(gain, 0.0)):
            after_us = before_us
            self._chosen = {digest: _with_first(plan, first[digest]) for digest, plan in self._chosen.items()}
        found = Tuning(
            heuristic_us=before_us,
            tuned_us=after_us,
            timed=self._timed,
            discarded=tuple(self._discarded),
            took_s=time.monotonic() - self._began,
            instead_of=self._of_single.instead_of,
            candidates=self._of_single.candidates,
        )
        return _with_tuning(self._whole(self._chosen), found)

    @property
    def _of_single(self) -> Tuning:
        """The tuning of the whole, if it is a single piece; else `_NOTHING`."""
        plan = self._chosen.get(self._graph.digest())
        return _NOTHING if plan is None or plan.tuning is None else plan.tuning

    @property
    def _has_changed(self) -> bool:
        """Whether a piece has another plan than its first choice."""
        return any(plan.tuning is not None and plan.tuning.instead_of for plan in self._chosen.values())

    # One piece.

    def _tune_piece(
        self, contest: Contest, digest: str, each_us: Sequence[float], place: tuple[int, int]
    ) -> None:
        """Choose a piece's plan. `each_us`: the time of each of the equal pieces in the run."""
        first, piece_us = self._chosen[digest], sum(each_us) / len(each_us)
        candidates, rivals = self._finalists(digest, place)
        entered = [
            (rival, run) for rival in rivals if (run := self._enter_rival(contest, digest, rival)) is not None
        ]
        saved_us, best = 0.0, first
        if entered:
            turns = contest.turns([contest.enter(self._whole(self._chosen)), *(run for _, run in entered)])
            for number, (rival, _) in enumerate(entered, start=1):
                gain = gain_of([(turn[0], turn[number]) for turn in turns])
                if is_gain(gain, sum(each_us)) and gain.us > saved_us:
                    saved_us, best = gain.us, rival
        found = Tuning(
            heuristic_us=piece_us,
            tuned_us=max(0.0, piece_us - saved_us / len(each_us)),
            timed=sum(each.us is not None for each in candidates),
            discarded=(),
            instead_of="" if best is first else _name(first),
            candidates=tuple(candidates),
        )
        self._chosen[digest] = _with_tuning(best, found)

    def _enter_rival(self, contest: Contest, digest: str, rival: CudaPlan) -> Entered | None:
        """The whole with a piece's plan in place of the present one; None if it does not run."""
        with self._context.journal.trying(rival.tag):
            try:
                return contest.enter(self._whole({**self._chosen, digest: rival}))
            except Exception as error:  # noqa: BLE001 - raised again unless it is the plan's own fault
                log.info("plan.not_timed", plan=rival.tag, reason=_excuse(error))
                return None

    def _finalists(self, digest: str, place: tuple[int, int]) -> tuple[list[Timed], list[CudaPlan]]:
        """The times of a piece's plans by themselves, and the plans that may be faster than the present."""
        piece, first = self._singles[digest], self._chosen[digest]
        found: list[tuple[CudaPlan, float]] = []
        candidates: list[Timed] = []
        try:
            check = SelfCheck(piece, self._context)
        except MemoryError as error:
            log.info("plan.not_timed", plan=first.tag, reason=str(error))
            return [], []
        try:
            first_us = self._alone(check, first)
            candidates.append(Timed(_configuration(first) or _name(first), first_us, first.workspace))
            for name, plan in self._build_candidates(piece, first, place):
                us = None
                if (fault := check.fault(plan)) is not None:
                    log.info("plan.discarded", plan=plan.tag, reason=fault)
                    self._discarded.append(f"{_name(plan)}: {fault}")
                elif (us := self._alone(check, plan)) is not None:
                    found.append((plan, us))
                candidates.append(Timed(name, us, plan.workspace, fault or ""))
        finally:
            check.close()
        self._timed += sum(each.us is not None for each in candidates)
        if first_us is None:
            return candidates, []
        best = finalists(first_us, [us for _, us in found], _FINALISTS)
        return candidates, [found[number][0] for number in best]

    def _build_candidates(
        self, piece: OperationGraph, first: CudaPlan, place: tuple[int, int]
    ) -> Iterator[tuple[str, CudaPlan]]:
        """Yields the candidates for a piece that can be built, each once, with its name.

        The present plan is left out. `place`: the piece's number, and the number of pieces.
        """
        every = all_candidates(piece, self._context.handle, self._limit, fallbacks=False)
        if piece.numerics.prefer and (wanted := [each for each in every if _is_preferred(piece, each)]):
            every = wanted
        few = Few((each.configuration for each in every if each.configuration), _OF_ENGINE, _OF_CUDNN)
        known, journal = [first.recipe.steps], self._context.journal
        present = _configuration(first)
        for number, candidate in enumerate(shortlist(((each.kind, each) for each in every), _CANDIDATES)):
            done, of = place
            self._progress(done * _CANDIDATES + number, of * _CANDIDATES, candidate.what)
            if candidate.configuration and not few.allows(candidate.configuration):
                continue
            if candidate.configuration == present:
                few.note(present)
                continue
            name = f"tuning/{piece.digest()[:8]}/{candidate.what}"
            if journal.may_kill(name):
                log.info("plan.discarded", plan=name, reason="to build it killed an earlier process")
                continue
            with journal.trying(name):
                plan = _plan_of(candidate)
            if plan is not None and candidate.configuration:
                few.note(candidate.configuration)
            if plan is not None and plan.recipe.steps not in known:
                known.append(plan.recipe.steps)
                yield candidate.name, plan

    def _alone(self, check: SelfCheck, plan: CudaPlan) -> float | None:
        """Microseconds of a piece's plan that runs again and again by itself; None if it fails."""
        with self._context.journal.trying(plan.tag):
            try:
                return time_plan(check, plan, _ROUGH_RUNS)
            except Exception as error:  # noqa: BLE001 - as above
                log.info("plan.not_timed", plan=plan.tag, reason=_excuse(error))
                return None

    # The whole.

    def _in_order(self, graph: OperationGraph) -> Iterator[OperationGraph]:
        """Yields the pieces of a graph that are cut no further, in order."""
        parts = self._cut_of(graph)
        if parts is None:
            yield graph
            return
        for piece in parts.pieces:
            yield from self._in_order(piece.graph)

    def _cut_of(self, graph: OperationGraph) -> Cut | None:
        digest = graph.digest()
        if digest not in self._cuts:
            self._cuts[digest] = cut(graph)
        return self._cuts[digest]

    def _whole(self, plans: Mapping[str, CudaPlan]) -> CudaPlan:
        """The plan of the whole with these plans of its pieces, by digest. Raises `OutOfMemory`."""

        def plan_of(graph: OperationGraph) -> CudaPlan:
            parts = self._cut_of(graph)
            if parts is None:
                return plans[graph.digest()]
            return in_pieces(graph, parts, self._limit, plan_of)

        return plan_of(self._graph)

    def _times(self, parts_us: Sequence[float]) -> list[tuple[str, float]]:
        """The digest and the microseconds of each piece, from the times of the parts of the whole."""
        rest, found = iter(parts_us), []
        for single in self._in_order(self._graph):
            digest = single.digest()
            parts = len(self._chosen[digest].recipe.parts)
            found.append((digest, sum(itertools.islice(rest, parts))))
        return found


def _is_preferred(graph: OperationGraph, candidate: Candidate) -> bool:
    """Whether a candidate is one of cuDNN's that the graph's numerics name."""
    numerics = graph.numerics
    return numerics.preference(candidate.configuration) < len(numerics.prefer)


def _configuration(plan: CudaPlan) -> str | None:
    """cuDNN's name for a plan that is a single graph of cuDNN's; None for other plans."""
    match plan.recipe.steps:
        case (GraphStep(engine=name),):
            return name
    return None


def _plan_of(candidate: Candidate) -> CudaPlan | None:
    """A candidate's plan; None if it cannot be built."""
    try:
        return candidate.build()
    except Exception as error:  # noqa: BLE001 - as above
        log.debug("plan.not_built", what=candidate.what, reason=_excuse(error))
        return None


def _excuse(error: Exception) -> str:
    """Why a candidate is left out. Raises an error that is not the candidate's own fault."""
    known = translate(error)
    if isinstance(known, StickyError) or not isinstance(known, _OWN_FAULTS):
        raise known from error
    return str(known)


def _with_tuning(plan: CudaPlan, found: Tuning) -> CudaPlan:
    """A plan with the measurements by which it was chosen."""
    return CudaPlan(msgspec.structs.replace(plan.recipe, tuning=found), plan.graphs)


def _with_first(plan: CudaPlan, first: CudaPlan) -> CudaPlan:
    """The first choice, with the measurements of the plan that was to take its place."""
    found = plan.tuning
    if found is None:
        return first
    return _with_tuning(first, msgspec.structs.replace(found, tuned_us=found.heuristic_us, instead_of=""))


def _name(plan: CudaPlan) -> str:
    """The part of a plan's tag that says what it launches."""
    return plan.tag.split("/", 3)[-1]


def time_plan(check: SelfCheck, plan: CudaPlan, runs: int) -> float:
    """Microseconds of device time for a run; of a replayed CUDA graph, if the plan can be captured."""
    cupy = libraries().cupy
    stream = check.context.stream
    workspace = check.room_for(plan)
    program = Program(plan, check.context.handle, stream)
    key = tuple(check.pointers)
    begin, end = cupy.cuda.Event(), cupy.cuda.Event()
    for number in range(_WARM_UPS + runs):
        if number == _WARM_UPS:
            begin.record(stream)
        replay = program.replays.get(key)
        if replay is None:
            program.run(key, check.pointers, check.scalars, workspace.pointer)
        else:
            replay.launch(behind=0)
    end.record(stream)
    end.synchronize()
    return float(cupy.cuda.get_elapsed_time(begin, end)) * 1e3 / runs
