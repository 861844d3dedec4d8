"""What an engine does with a graph: the answer to an `Explain`."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence

import msgspec

from cudnn_actor.protocol.graphs.operation_graph import OperationGraph

__all__ = ["Explanation", "Measured", "PieceOfPlan", "ScratchTensor", "piece_of"]


class Measured(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What tuning measured.

    Parameters
    ----------
    heuristic_us, tuned_us
        Device time of the library's first choice and of the fastest candidate, in microseconds.
    timed
        How many candidates were timed.
    """

    heuristic_us: float
    tuned_us: float
    timed: int


class PieceOfPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Operations that run together, as one plan. Several are fused unless `steps` has as many.

    Parameters
    ----------
    operations
        Their numbers in the graph, in order.
    labels
        What they are, and the user's lines that added them: "relu at model.py:12".
    steps
        What is launched, in order: "cuDNN eng45_k2=5", "kernel of matmul". `StepKind` has all names.
    plan
        The tag of its plan.
    why
        Why nothing that would have been preferred runs: what cuDNN says to the piece, what failed its
        self-check. Empty if the first choice runs.
    workspace
        Bytes of workspace that it needs, besides what is stored between pieces.
    checked
        Whether the plan has passed a self-check, by this process or by the one that stored it.
    measured
        The measurements, if the plan was chosen by tuning.
    """

    operations: tuple[int, ...]
    labels: tuple[str, ...]
    steps: tuple[str, ...]
    plan: str
    why: tuple[str, ...] = ()
    workspace: int = 0
    checked: bool = True
    measured: Measured | None = None


class ScratchTensor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tensor that is stored between pieces.

    Parameters
    ----------
    label
        What makes it: "relu at model.py:12".
    nbytes, offset
        Its size, and its place in the scratch memory. Tensors that are not needed at the same time share it.
    first, last
        The pieces, counted from 0, that write it and that read it last.
    """

    label: str
    nbytes: int
    offset: int
    first: int
    last: int


class Explanation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How an engine runs a graph. `str` gives it as a table.

    Parameters
    ----------
    plan
        The tag of the plan, as in receipts.
    digest
        The graph's.
    pieces
        In the order in which they run.
    views
        Operations that nothing is launched for: reshapes, transposes and slices whose results are read where
        their operands lie.
    scratch
        The tensors between pieces.
    scratch_bytes
        Bytes of scratch memory for them.
    workspace
        Bytes of workspace in all, the scratch memory included.
    """

    plan: str
    digest: str
    pieces: tuple[PieceOfPlan, ...]
    views: tuple[str, ...] = ()
    scratch: tuple[ScratchTensor, ...] = ()
    scratch_bytes: int = 0
    workspace: int = 0

    @property
    def engine(self) -> str:
        """ "cpu" or "cuda"."""
        return self.plan.partition("/")[0]

    @property
    def steps(self) -> int:
        """How many steps a run launches. A step of a library may launch more than one kernel."""
        return sum(len(piece.steps) for piece in self.pieces)

    @property
    def checked(self) -> bool:
        """Whether every piece's plan has passed its self-check."""
        return all(piece.checked for piece in self.pieces)

    def __str__(self) -> str:
        operations = sum(len(piece.operations) for piece in self.pieces) + len(self.views)
        lines = [
            "/".join(self.plan.split("/")[:3]),
            f"{_count(operations, 'operation')} in {_count(len(self.pieces), 'piece')}, "
            f"{_count(self.steps, 'step')} launched, {_count(len(self.views), 'view')}; "
            f"workspace {self.workspace:,} bytes; {'checked' if self.checked else 'NOT CHECKED'}",
            "",
        ]
        width = max((len(_runs(piece)) for piece in self.pieces), default=0)
        for number, piece in enumerate(self.pieces):
            first, *others = piece.labels
            lines.append(f"{number:>4}  {_runs(piece):<{width}}  {first}")
            lines += [f"{'':>6}{'':<{width}}  {label}" for label in others]
            lines += [f"{'':>8}because {reason}" for reason in piece.why[:1]]
            lines += [f"{'':>8}    and {reason}" for reason in piece.why[1:]]
            lines += [f"{'':>8}{fact}" for fact in _facts(piece)]
        if self.views:
            counted = (what if n == 1 else f"{what} (x{n})" for what, n in Counter(self.views).items())
            lines += ["", *textwrap.wrap("views: " + ", ".join(counted), 100, subsequent_indent="       ")]
        if self.scratch:
            apart = sum(tensor.nbytes for tensor in self.scratch)
            lines += ["", f"between pieces: {self.scratch_bytes:,} bytes, {apart:,} if nothing were shared"]
            lines += [
                f"{tensor.nbytes:>14,} at {tensor.offset:<12,} pieces {tensor.first} to {tensor.last}: "
                f"{tensor.label}"
                for tensor in self.scratch
            ]
        return "\n".join(lines)


def piece_of(graph: OperationGraph, plan: str, operations: Sequence[int], *steps: str) -> PieceOfPlan:
    """A piece of the first choice, that runs these operations of a graph in these steps."""
    labels = tuple(graph.label(number) for number in operations)
    return PieceOfPlan(operations=tuple(operations), labels=labels, steps=steps, plan=plan)


def _runs(piece: PieceOfPlan) -> str:
    return " + ".join(piece.steps)


def _facts(piece: PieceOfPlan) -> list[str]:
    facts = [f"workspace {piece.workspace:,} bytes"] if piece.workspace else []
    if piece.measured is not None:
        found = piece.measured
        facts.append(
            f"tuned: {found.tuned_us:.1f} us, the first choice {found.heuristic_us:.1f} us, of {found.timed}"
        )
    return facts + ([] if piece.checked else ["not checked: the device had no room for the self-check"])


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
