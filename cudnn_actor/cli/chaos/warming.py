"""Builds the load's plans before the first fault, so that a run measures crashes and not build times."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from cudnn_actor import BufferRef, CudnnActorError, CudnnRef
from cudnn_actor.cli.chaos.convolutions import CLASS, INPUTS, READS, WRITES, Kind, Problem
from cudnn_actor.protocol.messages import Compute

__all__ = ["warm"]


async def warm(gpu: CudnnRef, problems: Sequence[Problem], show: Callable[[], None]) -> None:
    """Build every plan of the load; plans whose build fails through a fault are left out."""
    for problem in problems:
        with contextlib.suppress(CudnnActorError):
            await _warm_one(gpu, problem)
        show()


async def _warm_one(gpu: CudnnRef, problem: Problem) -> None:
    roles = {*INPUTS, *WRITES.values()}
    refs: dict[str, BufferRef] = {}
    try:
        for role in sorted(roles):
            spec = problem.spec(role)
            refs[role] = await gpu.empty(spec.dims, dtype=spec.dtype, layout=problem.layout)
        await gpu.warm([_message(problem, kind, refs, beta) for kind in Kind for beta in (0.0, 1.0)])
    finally:
        for ref in refs.values():
            with contextlib.suppress(CudnnActorError):
                await gpu.free(ref)


def _message(problem: Problem, kind: Kind, refs: dict[str, BufferRef], beta: float) -> Compute:
    names = (*READS[kind], WRITES[kind])
    message: Compute = CLASS[kind](**{name: refs[name] for name in names}, conv=problem.conv, beta=beta)
    return message
