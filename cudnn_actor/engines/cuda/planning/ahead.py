"""Compiles kernels of our own for all pieces of a graph on several threads, before the first piece is built.

NVRTC takes 0.03 to 0.2 s for a kernel, and other threads run meanwhile. One after the other, the kernels for
a network's plans and self-checks took most of the time of its first answer, and 1 to 2 s for another size.
A kernel that is missed here is compiled when it is needed.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

from cudnn_actor.engines.cuda.checking.convolution_reference import Reference, references_of
from cudnn_actor.engines.cuda.checking.evaluated_reference import (
    Evaluator,
    evaluator_of,
    kernels_of_evaluation,
)
from cudnn_actor.engines.cuda.cudnn.frontend_graph import Refused
from cudnn_actor.engines.cuda.kernels.kernel import AHEAD, Launch
from cudnn_actor.engines.cuda.library.libraries import libraries
from cudnn_actor.engines.cuda.operations import IMPLEMENTATIONS
from cudnn_actor.engines.cuda.planning.depthwise import compile_depthwise, is_depthwise
from cudnn_actor.engines.cuda.planning.fusing import compile_fused, norm_alone
from cudnn_actor.engines.cuda.planning.splitting import compile_split, is_elementwise
from cudnn_actor.engines.cuda.running.plan import CudaPlan
from cudnn_actor.engines.cuda.running.recipe import KernelStep
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.operations import Convolution, MatMul, Node, Pointwise, Reduction, ReductionMode
from cudnn_actor.protocol.types.dtypes import DType

__all__ = ["compiling_ahead", "launches_ahead"]

_MOST_THREADS = 8


@contextlib.contextmanager
def compiling_ahead(
    pieces: Iterable[OperationGraph],
    limit: int,
    evaluator: Callable[[OperationGraph], Evaluator] = evaluator_of,
    *,
    soon: bool = False,
) -> Iterator[None]:
    """Compile the kernels that the pieces need on other threads, during the `with` block.

    The end of the block waits for the threads. `evaluator`: see `BuildContext`. `soon`: see `compile_plan`.
    """
    missing = AHEAD.missing(
        launch for piece in pieces for launch in launches_ahead(piece, limit, evaluator, soon=soon)
    )
    threads = min(_MOST_THREADS, len(missing), os.cpu_count() or 1)
    if not threads:
        yield
        return
    device = libraries().cupy.cuda.Device()
    with ThreadPoolExecutor(threads, "cudnn-compiler", device.use) as pool:
        AHEAD.compile_on(pool, missing)
        yield


def launches_ahead(
    piece: OperationGraph,
    limit: int,
    evaluator: Callable[[OperationGraph], Evaluator] = evaluator_of,
    *,
    soon: bool = False,
) -> Iterator[Launch]:
    """Yields the launches of our own kernels that the first plan of a piece, or its self-check, has.

    `evaluator`: see `BuildContext`. `soon`: see `compile_plan`.
    """
    if (alone := _as_a_step(piece, soon=soon)) is not None:
        named = dict(alone.named())
        launches = IMPLEMENTATIONS[type(alone)].launchers["kernel"].launches
        assert launches is not None, "its kernels are ours"
        yield from launches(alone.with_operands([*named].index), [*map(piece.tensor, named.values())])
    with contextlib.suppress(Refused):
        plan = _of_kernels(piece, limit)
        if plan is not None:
            for step in plan.recipe.steps:
                if isinstance(step, KernelStep):
                    yield from step.kernel.launches()
    if Reference.covers(piece):
        yield from references_of(piece).launches()
    else:
        yield from kernels_of_evaluation(piece, evaluator(piece))


def _as_a_step(piece: OperationGraph, *, soon: bool) -> Node | None:
    """The only operation of a piece, if a kernel of ours is expected to run it as a step of its own.

    Of the reductions, cuDNN may run sums in float32.
    """
    match piece.operations:
        case [Reduction(mode=mode, y=y) as reduction]:
            by_cudnn = mode is ReductionMode.SUM and piece.tensor(y).dtype is DType.FLOAT32
            return None if by_cudnn else reduction
    return norm_alone(piece) if soon else None


def _of_kernels(piece: OperationGraph, limit: int) -> CudaPlan | None:
    """The plan of a piece if kernels of our own come first for it; else None. Raises `Refused`."""
    others = [operation for operation in piece.operations if not isinstance(operation, Pointwise)]
    if is_elementwise(piece):
        return compile_split(piece, None, limit)
    if any(is_depthwise(operation, piece.tensor) for operation in others):
        return compile_depthwise(piece, limit)
    if any(isinstance(operation, Convolution | MatMul) for operation in others):
        return None
    return compile_fused(piece, limit)
