"""Builds plans for the CUDA engine on a second thread, with its own cuDNN handle."""

from __future__ import annotations

import contextlib
import functools
import itertools
from typing import Any

import msgspec

from cudnn_actor.engines.base import Effort, EngineFailure, PieceByPiece, Plan, ProgressCallback, unheard
from cudnn_actor.engines.cuda.checking.journal import Journal
from cudnn_actor.engines.cuda.checking.rehearsal import Rehearsals
from cudnn_actor.engines.cuda.checking.self_check import BuildContext
from cudnn_actor.engines.cuda.cudnn.kernel_caches import KernelCaches
from cudnn_actor.engines.cuda.library import libcublaslt
from cudnn_actor.engines.cuda.library.failures import mind_own_captures, translate_failures
from cudnn_actor.engines.cuda.library.libraries import libraries
from cudnn_actor.engines.cuda.operations import IMPLEMENTATIONS, REFUSED
from cudnn_actor.engines.cuda.planning.ahead import compiling_ahead
from cudnn_actor.engines.cuda.planning.compiler import WORKSPACE_BYTES, compile_piece, in_pieces
from cudnn_actor.engines.cuda.planning.loading_ahead import NOWHERE_BYTES, loading_ahead
from cudnn_actor.engines.cuda.planning.partition import cut
from cudnn_actor.engines.cuda.planning.tuning import tune
from cudnn_actor.engines.cuda.running.loading import load, load_plan
from cudnn_actor.engines.cuda.running.plan import CudaPlan
from cudnn_actor.engines.cuda.running.program import Program
from cudnn_actor.engines.cuda.running.recipe import GraphStep, OperationStep, Recipe
from cudnn_actor.engines.support import check_graph
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph

__all__ = ["CudaBuilder"]

_FORMAT = 20
"""Version of the format of exported plans. Increase it when recipes, the code that runs them, or errata
change."""
_MOST_PIECES = 512
"""The most plans of pieces that a builder keeps."""
_MOST_LOADED = 512
"""The most of cuDNN's plans of pieces that are kept for the whole that may follow."""


class CudaBuilder(PieceByPiece):
    """`engines.base.Builder` for one device. Not thread-safe: one thread opens, uses and closes it.

    Parameters
    ----------
    ordinal
        The device's number.
    journal
        A file in which to record each plan whose self-check begins, so that the next process knows which plan
        killed this one; None for no file.
    dynamic_shapes
        Whether graphs that differ in sizes alone share the kernels that cuDNN compiles.
    """

    def __init__(self, ordinal: int, journal: str | None = None, dynamic_shapes: bool = False) -> None:
        self._ordinal = ordinal
        self._dynamic_shapes = dynamic_shapes
        self._journal = Journal(journal)
        self._context: BuildContext | None = None
        self._pieces: dict[tuple[str, int], CudaPlan] = {}
        """The latest plans of pieces, by digest and limit."""
        self._loaded: dict[bytes, Any] = {}
        """cuDNN's plans that `load_piece` has loaded, by their bytes, until `restore` or `forget_pieces`."""
        self._nowhere: Any = None
        """Device memory of `NOWHERE_BYTES`, once kernels have been loaded."""
        self.rehearsals = Rehearsals(self._apart)
        self.fingerprint = ""

    def expect_builds(self) -> None:
        """Does nothing: `open` does all the preparation."""

    @translate_failures
    def open(self) -> None:
        """Make the device current on this thread and create a cuDNN handle. Raises `EngineFailure`."""
        loaded = libraries().load()
        cupy, cudnn = loaded.cupy, loaded.cudnn
        device = cupy.cuda.Device(self._ordinal)
        device.use()
        mind_own_captures()
        stream = cupy.cuda.Stream(non_blocking=True)
        kernels = KernelCaches() if self._dynamic_shapes else None
        self._context = BuildContext(
            cudnn.create_handle(),
            stream,
            self._journal,
            kernels=kernels,
            evaluator=self.rehearsals.evaluator,
        )
        cudnn.set_stream(self._context.handle, stream.ptr)
        name = loaded.runtime.getDeviceProperties(self._ordinal)["name"].decode()
        self.fingerprint = (
            f"format {_FORMAT}, cuDNN {cudnn.backend_version()}, frontend {cudnn.__version__}, "
            f"cuBLASLt {libcublaslt.version()}, "
            f"sm_{device.compute_capability}, {name}" + ", dynamic shapes" * self._dynamic_shapes
        )

    def _apart(self) -> BuildContext:
        """The context with which another thread evaluates. Makes it current on that thread."""
        cupy = libraries().cupy
        cupy.cuda.Device(self._ordinal).use()
        mind_own_captures()
        return BuildContext(None, cupy.cuda.Stream(non_blocking=True))

    def close(self) -> None:
        """Destroy the handle. Safe to call twice."""
        self.rehearsals.close()
        self._journal.close()
        context, self._context = self._context, None
        self._pieces.clear()
        self._loaded.clear()
        self._nowhere = None
        if context is not None:
            libraries().cudnn.destroy_handle(context.handle)

    @property
    def context(self) -> BuildContext:
        """The context in which plans are built and checked, while the builder is open."""
        assert self._context is not None, "the builder is not open"
        return self._context

    def interrupt(self) -> None:
        """Does nothing: a cuDNN call cannot be interrupted."""

    @translate_failures
    def build(
        self,
        graph: OperationGraph,
        *,
        workspace_limit: int | None,
        progress: ProgressCallback = unheard,
        effort: Effort = "best",
    ) -> CudaPlan:
        """See `compile_plan`. The engine allocates the workspace.

        Plans of pieces are kept, so after a provisional plan only its provisional pieces are built again.
        """
        check_graph(graph, "cuda", refused=REFUSED)
        tried = itertools.count()
        pool = libraries().cupy.cuda.MemoryPool()
        context = self.context._replace(trying=lambda tag: progress(next(tried), 0, tag), pool=pool)
        if effort == "soon":
            context = context._replace(evaluator=self.rehearsals.evaluator_soon)
        limit = WORKSPACE_BYTES if workspace_limit is None else workspace_limit

        def build(piece: OperationGraph) -> CudaPlan:
            key = piece.digest(), limit
            plan = self._pieces.get(key)
            if plan is None:
                plan = compile_piece(piece, context, limit, soon=effort == "soon")
                if effort != "soon":
                    self.rehearsals.note(piece)
                if plan.checked and not plan.provisional:
                    self._keep(key, plan)
            return plan

        def build_and_tell(piece: OperationGraph) -> CudaPlan:
            plan = build(piece)
            if self.on_piece is not None:
                with contextlib.suppress(EngineFailure):  # the whole cannot be exported, either
                    self.on_piece(self._export(plan))
            return plan

        with self.rehearsals.pause():
            parts = cut(graph)
            if parts is None:
                return build(graph)
            different = {piece.graph.digest(): piece.graph for piece in parts.pieces}
            missing = [piece for digest, piece in different.items() if (digest, limit) not in self._pieces]
            loading = loading_ahead(missing if effort == "soon" else (), limit)
            with compiling_ahead(missing, limit, context.evaluator, soon=effort == "soon"), loading:
                plan = in_pieces(graph, parts, limit, build_and_tell)
        self.rehearsals.ask(missing)
        return plan

    def _keep(self, key: tuple[str, int], plan: CudaPlan) -> None:
        if len(self._pieces) >= _MOST_PIECES:
            del self._pieces[next(iter(self._pieces))]
        self._pieces[key] = plan

    @translate_failures
    def tune(
        self, graph: OperationGraph, *, workspace_limit: int | None, progress: ProgressCallback
    ) -> CudaPlan:
        """See `tuning.tune`. Blocks for seconds to minutes. Raises as `build`."""
        with self.rehearsals.pause():  # or they would be timed, too
            return tune(graph, self.context, workspace_limit, progress)

    @translate_failures
    def export(self, plan: Plan) -> bytes | None:
        """A plan as bytes; None for another engine's plan. Raises `EngineFailure` if cuDNN cannot do it."""
        return self._export(plan) if isinstance(plan, CudaPlan) else None

    @translate_failures
    def _export(self, plan: CudaPlan) -> bytes:
        graphs, steps = iter(plan.graphs), []
        serialised = functools.cache(lambda graph: bytes(graph.serialize(as_bytes=True)))
        for step in plan.recipe.steps:
            if isinstance(step, GraphStep):
                graph = next(graphs)
                data = step.plan or serialised(graph)
                step = msgspec.structs.replace(step, plan=data)  # noqa: PLW2901
            steps.append(step)
        return msgspec.msgpack.encode(msgspec.structs.replace(plan.recipe, steps=tuple(steps)))

    @translate_failures
    def restore(self, graph: OperationGraph, data: bytes) -> CudaPlan:
        """The plan that `export` serialised. Raises `EngineFailure` if the bytes are not such a plan."""
        try:
            recipe = msgspec.msgpack.decode(data, type=Recipe)
        except (msgspec.DecodeError, ValueError) as error:
            raise EngineFailure("BAD_PLAN", str(error)) from error
        if (recipe.buffers, recipe.scalars) != (len(graph.bound), len(graph.scalars)):
            raise EngineFailure(
                "BAD_PLAN", f"{recipe.tag} does not take the buffers of graph {graph.digest()[:8]}"
            )
        for step in recipe.steps:
            if isinstance(step, OperationStep):
                kind, launchers = step.operation.kind, IMPLEMENTATIONS[type(step.operation)].launchers
                if step.launcher not in launchers:
                    raise EngineFailure("BAD_PLAN", f"{kind} has no launcher {step.launcher!r}")
        known, self._loaded = self._loaded, {}
        plan = load_plan(recipe, lambda data: known.get(data) or self._load(data))
        if not known:
            self.load_kernels(plan)
        return plan

    def load_piece(self, data: bytes) -> None:
        """See `PieceByPiece.load_piece`. Loads cuDNN's plans, and the kernels of all steps."""
        with contextlib.suppress(Exception):
            recipe = msgspec.msgpack.decode(data, type=Recipe)
            if len(self._loaded) < _MOST_LOADED:
                plan = load_plan(recipe, self._load)
                steps = (step for step in recipe.steps if isinstance(step, GraphStep))
                self._loaded |= {step.plan: graph for step, graph in zip(steps, plan.graphs, strict=True)}
                self.load_kernels(plan)

    def forget_pieces(self) -> None:
        """See `PieceByPiece.forget_pieces`."""
        self._loaded.clear()

    def _load(self, data: bytes) -> Any:
        return load(data, self.context.handle, self.context.stream)

    def load_kernels(self, plan: CudaPlan) -> None:
        """Load the kernels of a plan, as far as that works, so that the engine's thread need not.

        A process has each kernel once, whichever of its threads has loaded it.
        """
        with contextlib.suppress(Exception):  # the engine meets the same error, and reports it
            if self._nowhere is None:
                self._nowhere = libraries().cupy.cuda.alloc(NOWHERE_BYTES)
            program = Program(plan, self.context.handle, self.context.stream)
            program.load(self._nowhere.ptr)
