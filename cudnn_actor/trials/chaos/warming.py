"""Builds the load's plans before the first fault, so that a run measures crashes and not build times."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence

from cudnn_actor import Allocate, BufferRef, CudnnActorError, CudnnRef
from cudnn_actor.protocol.messages.messages import Compute
from cudnn_actor.trials.chaos.computations import Problem, accumulates, message

__all__ = ["warm"]


async def warm(gpu: CudnnRef, problems: Sequence[Problem], show: Callable[[], None]) -> None:
    """Build every plan of the load; plans whose build fails through a fault are left out."""
    for problem in problems:
        with contextlib.suppress(CudnnActorError):
            await _warm_one(gpu, problem)
        show()


async def _warm_one(gpu: CudnnRef, problem: Problem) -> None:
    refs: dict[str, BufferRef] = {}
    try:
        for role, spec in problem.specs.items():
            refs[role] = await gpu.ask(Allocate(spec=spec))
        await gpu.warm(_messages(problem, refs))
    finally:
        for ref in refs.values():
            with contextlib.suppress(CudnnActorError):
                await gpu.free(ref)


def _messages(problem: Problem, refs: Mapping[str, BufferRef]) -> list[Compute]:
    messages = []
    for operation in problem.forms:
        operands = operation.named()
        given = {name: refs[role] for name, role in operands}
        betas = (0.0, 1.0) if accumulates(operation) else (0.0,)
        messages += [message(operation, given, beta=beta) for beta in betas]
    return messages
