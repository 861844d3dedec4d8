"""A builder whose tuning meets a candidate that kills its context. For a builder process of its own."""

from __future__ import annotations

from typing import Any

import numpy as np

from cudnn_actor.engines.base import ProgressCallback
from cudnn_actor.engines.cuda.library.libraries import libraries
from cudnn_actor.engines.cuda.planning import tuning
from cudnn_actor.engines.cuda.planning.cuda_builder import CudaBuilder
from cudnn_actor.engines.cuda.planning.rivals import Candidate, all_candidates
from cudnn_actor.engines.cuda.running.plan import CudaPlan
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.operations import Convolution

__all__ = ["StrayBuilder"]


def _stray() -> CudaPlan:
    cupy = libraries().cupy
    source = 'extern "C" __global__ void stray(unsigned long long a) { *(volatile int *)a = 1; }'
    cupy.RawKernel(source, "stray")((1,), (1,), (np.uint64(0x10),))
    cupy.cuda.runtime.deviceSynchronize()
    raise AssertionError("the device has written to an address that nobody has mapped")


class StrayBuilder(CudaBuilder):
    """One of its candidates for a piece with a convolution writes to an illegal address."""

    def tune(
        self, graph: OperationGraph, *, workspace_limit: int | None, progress: ProgressCallback
    ) -> CudaPlan:
        """As `CudaBuilder.tune`, which meets that candidate."""

        def candidates(piece: OperationGraph, *given: Any, **options: Any) -> list[Candidate]:
            found = all_candidates(piece, *given, **options)
            convolves = any(isinstance(operation, Convolution) for operation in piece.operations)
            return [*found, Candidate("stray", 1, _stray)] if convolves else found

        setattr(tuning, "all_candidates", candidates)  # noqa: B010 - mypy sees that it is not exported
        return super().tune(graph, workspace_limit=workspace_limit, progress=progress)
