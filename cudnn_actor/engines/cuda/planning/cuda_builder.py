"""Builds plans for the CUDA engine on a second thread, with its own cuDNN handle."""

from __future__ import annotations

import functools
import itertools

import msgspec

from cudnn_actor.engines.base import Effort, EngineFailure, Plan, ProgressCallback, unheard
from cudnn_actor.engines.cuda.checking.journal import Journal
from cudnn_actor.engines.cuda.checking.rehearsal import Rehearsals
from cudnn_actor.engines.cuda.checking.self_check import BuildContext
from cudnn_actor.engines.cuda.cudnn.kernel_caches import KernelCaches
from cudnn_actor.engines.cuda.library import libcublaslt
from cudnn_actor.engines.cuda.library.failures import mind_own_captures, reported
from cudnn_actor.engines.cuda.library.libraries import libraries
from cudnn_actor.engines.cuda.operations import IMPLEMENTATIONS, REFUSED
from cudnn_actor.engines.cuda.planning.ahead import compiling_ahead
from cudnn_actor.engines.cuda.planning.compiler import WORKSPACE_BYTES, compile_piece, in_pieces
from cudnn_actor.engines.cuda.planning.partition import cut
from cudnn_actor.engines.cuda.planning.tuning import tune
from cudnn_actor.engines.cuda.running.loading import load, loaded
from cudnn_actor.engines.cuda.running.plan import CudaPlan
from cudnn_actor.engines.cuda.running.recipe import GraphStep, OperationStep, Recipe
from cudnn_actor.engines.support import check_graph
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph

__all__ = ["CudaBuilder"]

_FORMAT = 20
"""Version of the format of exported plans. Increase it when a recipe, what runs it or an erratum changes."""


_MOST_PIECES = 512
"""The most plans of pieces that a builder keeps."""


class CudaBuilder:
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
        self._rehearsals = Rehearsals(self._apart)
        self.fingerprint = ""

    def expect_builds(self) -> None:
        """Does nothing: `open` does all the preparation."""

    @reported
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
            cudnn.create_handle(), stream, self._journal, kernels=kernels, place=self._rehearsals.place
        )
        cudnn.set_stream(self._context.handle, stream.ptr)
        name = loaded.runtime.getDeviceProperties(self._ordinal)["name"].decode()
        self.fingerprint = (
            f"format {_FORMAT}, cuDNN {cudnn.backend_version()}, frontend {cudnn.__version__}, "
            f"cuBLASLt {libcublaslt.version()}, "
            f"sm_{device.compute_capability}, {name}" + ", dynamic shapes" * self._dynamic_shapes
        )

    def _apart(self) -> BuildContext:
        """What another thread evaluates with, made current on it."""
        cupy = libraries().cupy
        cupy.cuda.Device(self._ordinal).use()
        mind_own_captures()
        return BuildContext(None, cupy.cuda.Stream(non_blocking=True))

    def close(self) -> None:
        """Destroy the handle. Safe to call twice."""
        self._rehearsals.close()
        context, self._context = self._context, None
        self._pieces.clear()
        if context is not None:
            libraries().cudnn.destroy_handle(context.handle)

    @property
    def context(self) -> BuildContext:
        """What plans are built and checked with, while it is open."""
        assert self._context is not None, "the builder is not open"
        return self._context

    def interrupt(self) -> None:
        """Does nothing: a cuDNN call cannot be interrupted."""

    @reported
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
            context = context._replace(place=self._rehearsals.place_soon)
        limit = WORKSPACE_BYTES if workspace_limit is None else workspace_limit

        def build(piece: OperationGraph) -> CudaPlan:
            key = piece.digest(), limit
            plan = self._pieces.get(key)
            if plan is None:
                plan = compile_piece(piece, context, limit, soon=effort == "soon")
                if effort != "soon":
                    self._rehearsals.note(piece)
                if plan.checked and not plan.provisional:
                    self._keep(key, plan)
            return plan

        with self._rehearsals.paused():
            parts = cut(graph)
            if parts is None:
                return build(graph)
            different = {piece.graph.digest(): piece.graph for piece in parts.pieces}
            missing = [piece for digest, piece in different.items() if (digest, limit) not in self._pieces]
            with compiling_ahead(missing, limit, context.place, soon=effort == "soon"):
                plan = in_pieces(graph, parts, limit, build)
        self._rehearsals.ask(missing)
        return plan

    def _keep(self, key: tuple[str, int], plan: CudaPlan) -> None:
        if len(self._pieces) >= _MOST_PIECES:
            del self._pieces[next(iter(self._pieces))]
        self._pieces[key] = plan

    @reported
    def tune(
        self, graph: OperationGraph, *, workspace_limit: int | None, progress: ProgressCallback
    ) -> CudaPlan:
        """See `tuning.tune`. Blocks for seconds to minutes. Raises as `build`."""
        with self._rehearsals.paused():  # or they would be timed, too
            return tune(graph, self.context, workspace_limit, progress)

    @reported
    def export(self, plan: Plan) -> bytes | None:
        """A plan as bytes; None for another engine's plan. Raises `EngineFailure` if cuDNN cannot do it."""
        if not isinstance(plan, CudaPlan):
            return None
        graphs, steps = iter(plan.graphs), []
        serialised = functools.cache(lambda graph: bytes(graph.serialize(as_bytes=True)))
        for step in plan.recipe.steps:
            if isinstance(step, GraphStep):
                graph = next(graphs)
                data = step.plan or serialised(graph)
                step = msgspec.structs.replace(step, plan=data)  # noqa: PLW2901
            steps.append(step)
        return msgspec.msgpack.encode(msgspec.structs.replace(plan.recipe, steps=tuple(steps)))

    @reported
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
        return loaded(recipe, lambda data: load(data, self.context.handle, self.context.stream))
