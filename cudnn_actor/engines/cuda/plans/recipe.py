"""A plan as data: the steps that run one after the other, and where each finds its tensors.

One step where cuDNN takes the whole graph; several where it does not: packing
what lies in a way that it does not read, the convolution, and a kernel of our
own for the rest. What goes from step to step lies in the workspace.
"""

from __future__ import annotations

import msgspec

from cudnn_actor.engines.cuda.plans.kernels import Elementwise

__all__ = ["Buffer", "GraphStep", "KernelStep", "Number", "Recipe", "Scratch", "Source", "Step"]
__all__ += ["Tuning", "aligned"]

_ALIGNMENT = 256


def aligned(nbytes: int) -> int:
    """The least multiple of the alignment of device memory that holds `nbytes`."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class Buffer(msgspec.Struct, frozen=True, tag="buffer"):
    """One of the plan's buffers, by its place among `graph.bound`."""

    number: int


class Number(msgspec.Struct, frozen=True, tag="number"):
    """One of the plan's scalars, by its place among `graph.scalars`; cuDNN reads it on the host."""

    number: int
    double: bool


class Scratch(msgspec.Struct, frozen=True, tag="scratch"):
    """Bytes of the workspace, counted from the end of what cuDNN's own steps use."""

    offset: int


Source = Buffer | Number | Scratch


class GraphStep(msgspec.Struct, frozen=True, tag="graph"):
    """A plan of cuDNN's.

    Parameters
    ----------
    engine
        cuDNN's name for what runs: "eng45_k2=5".
    workspace
        Bytes that it needs.
    uids, sources
        Its tensors by cuDNN's numbers, ascending, and where each is.
    plan
        As cuDNN serialised it; empty for one that has just been built.
    """

    engine: str
    workspace: int
    uids: tuple[int, ...]
    sources: tuple[Source, ...]
    plan: bytes = b""


class KernelStep(msgspec.Struct, frozen=True, tag="kernel"):
    """An elementwise kernel: its result, then its operands."""

    kernel: Elementwise
    sources: tuple[Source, ...]


Step = GraphStep | KernelStep


class Tuning(msgspec.Struct, frozen=True):
    """What tuning found.

    Parameters
    ----------
    heuristic_us, tuned_us
        Device time of the heuristic's plan and of the fastest, in microseconds.
    tried
        How many candidates were timed.
    discarded
        What was wrong with those that were not: "engine: reason".
    """

    heuristic_us: float
    tuned_us: float
    tried: int
    discarded: tuple[str, ...]


class Recipe(msgspec.Struct, frozen=True):
    """All that a plan is but its live parts.

    Parameters
    ----------
    tag
        As a receipt shows it.
    steps
        In order.
    scratch
        Bytes between the steps.
    buffers, scalars
        How many a run is given.
    tuning
        What was measured, where the plan is the fastest of those that were.
    tried
        Whether it has passed its self-check.
    """

    tag: str
    steps: tuple[Step, ...]
    scratch: int
    buffers: int
    scalars: int
    tuning: Tuning | None = None
    tried: bool = True

    @property
    def own_workspace(self) -> int:
        """Bytes that cuDNN's steps need, one after the other in the same place."""
        return aligned(max((step.workspace for step in self.steps if isinstance(step, GraphStep)), default=0))

    @property
    def workspace(self) -> int:
        """Bytes in all."""
        return self.own_workspace + self.scratch
