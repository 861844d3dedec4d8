"""The explanation of how an engine runs a graph: the answer to an `Explain`."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.graphs.timeline import timeline
from cudnn_actor.protocol.graphs.timing import DeviceSpeed, PieceTime, PlanTimes, piece_times, share_of_device
from cudnn_actor.protocol.operations import Node, Recurrent
from cudnn_actor.protocol.types.html_table import html_table
from cudnn_actor.protocol.types.short_repr import listing, one_line, short_repr

__all__ = ["Explanation", "Measured", "PieceOfPlan", "PlanCandidate", "ScratchTensor", "Tuned", "piece_of"]

_LONGEST_LABELS = 80
"""The most characters that a cell of a notebook's table has of the labels of several operations."""
_LONGEST_TAG = 32
"""The most characters of a plan's tag in an explanation's repr."""


class Measured(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The measurements of tuning.

    Parameters
    ----------
    heuristic_us, tuned_us
        Device time of the library's first choice and of the fastest candidate, in microseconds.
    timed
        How many candidates were timed.
    instead_of
        What the first choice would have launched, if another candidate was taken.
    """

    heuristic_us: float
    tuned_us: float
    timed: int
    instead_of: str = ""

    __repr__ = short_repr


class Tuned(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The gain of tuning a plan, and how long it took. The pieces say what has changed.

    Parameters
    ----------
    heuristic_us, tuned_us
        Device time of a run with the first choices and with what was chosen, in microseconds.
    took_s
        Seconds that the tuning took, by whichever process did it.
    """

    heuristic_us: float
    tuned_us: float
    took_s: float

    __repr__ = short_repr


class PlanCandidate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A plan that may run a piece of a graph.

    Parameters
    ----------
    name
        cuDNN's name for it, "eng45_k2=5", which `Numerics` takes in `prefer` and `exclude`; for others, what
        it is: "by cuBLASLt, 1".
    kind
        Whose it is, or in which way it runs the piece: "cuDNN's", "by cuBLASLt", "in steps".
    chosen
        Whether it is what runs.
    engine, knobs
        Of cuDNN's plans: the number of the engine, and its knobs by their names. None and empty for others.
    heuristic
        Of cuDNN's plans: the heuristic mode that offers it, "A" or "fallback". Else empty.
    notes
        cuDNN's behaviour notes: "RUNTIME_COMPILATION".
    deterministic
        Whether it gives the same bits every time; None if that is not known.
    workspace
        Bytes of workspace; None as long as it has not been built.
    us
        Microseconds of a run of the piece by itself, if tuning has timed it.
    refused
        Why it is not used: it is excluded, is known to be wrong, or has failed its self-check. Empty if
        nothing speaks against it.
    """

    name: str
    kind: str
    chosen: bool = False
    engine: int | None = None
    knobs: dict[str, int] = {}
    heuristic: str = ""
    notes: tuple[str, ...] = ()
    deterministic: bool | None = None
    workspace: int | None = None
    us: float | None = None
    refused: str = ""

    __repr__ = short_repr

    def __str__(self) -> str:
        facts = [f"{self.name} ({self.kind})" if self.engine is not None else self.name]
        facts += ["runs"] * self.chosen
        facts += [] if self.us is None else [f"{self.us:,.1f} us"]
        facts += [] if self.workspace is None else [f"workspace {self.workspace:,} bytes"]
        facts += ["not deterministic"] * (self.deterministic is False)
        facts += ["fallback"] * (self.heuristic == "fallback")
        facts += [note.lower().replace("_", " ") for note in self.notes]
        return ", ".join(facts) + (f": not used, {self.refused}" if self.refused else "")


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
        Whether the plan has passed a self-check, by this process or by the one that stored it. True on the
        CPU, whose plans need none.
    measured
        What tuning measured for the piece in a run of the whole; None if it was not tuned.
    time
        Its time in a run of the whole, if that was measured.
    candidates
        The plans that may run it, if they were asked for: those of one kind in the order in which they are
        expected to be fast. Where a plan for several pieces together may run in their place, the first of
        these pieces has the candidates for all of them, and the others have none.
    reserve
        Bytes that recurrent layers keep for their gradients, of those that keep bytes: what
        `CudnnRef.reserve_nbytes` gives. On CUDA, of a reserve in a buffer those of the buffer.
    """

    operations: tuple[int, ...]
    labels: tuple[str, ...]
    steps: tuple[str, ...]
    plan: str
    why: tuple[str, ...] = ()
    workspace: int = 0
    checked: bool = True
    measured: Measured | None = None
    time: PieceTime | None = None
    candidates: tuple[PlanCandidate, ...] = ()
    reserve: int = 0

    __repr__ = short_repr


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

    __repr__ = short_repr


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
    run_us, device
        Microseconds of a run, and what the device can do, if the time was measured. The pieces' times add up
        to it only about: each is the median of its own, of several runs.
    tuned
        What tuning has gained; None if the plan was not tuned.
    """

    plan: str
    digest: str
    pieces: tuple[PieceOfPlan, ...]
    views: tuple[str, ...] = ()
    scratch: tuple[ScratchTensor, ...] = ()
    scratch_bytes: int = 0
    workspace: int = 0
    run_us: float | None = None
    device: DeviceSpeed | None = None
    tuned: Tuned | None = None

    def __repr__(self) -> str:
        took = "" if self.run_us is None else f", {self.run_us:,.1f} us"
        plan = one_line("/".join(self.plan.split("/")[:3]), _LONGEST_TAG)
        pieces, steps = _count(len(self.pieces), "piece"), _count(self.steps, "step")
        return f"<Explanation of {plan}: {_count(self._operations, 'operation')} in {pieces}, {steps}{took}>"

    def _repr_html_(self) -> str:
        """The HTML that notebooks show: a table of the pieces, as `str` gives it, but with a row for each."""
        timed = any(piece.time is not None for piece in self.pieces)
        rows = []
        for number, piece in sorted(enumerate(self.pieces), key=_slowest_first):
            took = "" if piece.time is None else f"{piece.time.us:,.1f}"
            share = "" if piece.time is None else share_of_device(piece.time)
            labels = listing(piece.labels, len(piece.labels), _LONGEST_LABELS)
            why = listing(piece.why, len(piece.why), _LONGEST_LABELS) if piece.why else ""
            rows.append((str(number), *((took, share) * timed), _runs(piece), labels, why))
        head = ("piece", *(("us", "of the device") * timed), "runs", "operations", "because")
        return html_table(repr(self)[1:-1], head, rows)

    @property
    def _operations(self) -> int:
        return sum(len(piece.operations) for piece in self.pieces) + len(self.views)

    def with_times(self, graph: OperationGraph, times: PlanTimes) -> Explanation:
        """A copy of this explanation with measured times. `graph`: the graph that it explains."""
        found = piece_times(graph, [piece.operations for piece in self.pieces], times)
        pieces = zip(self.pieces, found, strict=True)
        return msgspec.structs.replace(
            self,
            pieces=tuple(msgspec.structs.replace(piece, time=time) for piece, time in pieces),
            run_us=times.run_us,
            device=times.device,
        )

    def with_only_candidates(self) -> Explanation:
        """A copy of this explanation for an engine without a choice: each piece has one candidate, the plan
        that runs it."""

        def only(piece: PieceOfPlan) -> PieceOfPlan:
            facts: Any = {"chosen": True, "deterministic": True, "workspace": piece.workspace}
            candidate = PlanCandidate(name=piece.plan, kind=_runs(piece), **facts)
            return msgspec.structs.replace(piece, candidates=(candidate,))

        return msgspec.structs.replace(self, pieces=tuple(map(only, self.pieces)))

    def to_svg(self) -> str:
        """A measured run as a picture, SVG: its pieces along the time. `Graph.to_svg` draws the graph."""
        return timeline(self)

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
        checked = "" if self.engine == "cpu" else "; checked" if self.checked else "; NOT CHECKED"
        lines = [
            "/".join(self.plan.split("/")[:3]),
            f"{_count(self._operations, 'operation')} in {_count(len(self.pieces), 'piece')}, "
            f"{_count(self.steps, 'step')} launched, {_count(len(self.views), 'view')}; "
            f"workspace {self.workspace:,} bytes{checked}",
            *([] if self.tuned is None else [self._gain(self.tuned)]),
            "",
        ]
        head, measured = _columns_of_times(self.pieces)
        width = max(len("runs") * bool(head), *(len(_runs(piece)) for piece in self.pieces), 0)
        if self.run_us is not None and self.device is not None:
            copied = f"a copy: {self.device.copy_bytes_per_s / 1e9:,.1f} GB/s"
            medians = "times are medians, which need not add up"
            lines += [f"{self.run_us:,.1f} us a run; the slowest pieces first; {copied}; {medians}", ""]
            lines.append(f"piece{head[1:]}  {'runs':<{width}}  operations")
        for number, piece in sorted(enumerate(self.pieces), key=_slowest_first):
            first, *others = piece.labels
            lines.append(f"{number:>4}{measured[number]}  {_runs(piece):<{width}}  {first}")
            lines += [f"{'':>6}{'':<{width + len(head)}}  {label}" for label in others]
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

    def _gain(self, tuned: Tuned) -> str:
        changed = sum(piece.measured is not None and bool(piece.measured.instead_of) for piece in self.pieces)
        return (
            f"tuned in {tuned.took_s:,.1f} s: {tuned.tuned_us:,.1f} us a run, "
            f"{tuned.heuristic_us:,.1f} us by the first choices; {_count(changed, 'piece')} changed"
        )


def piece_of(graph: OperationGraph, plan: str, operations: Sequence[int], *steps: str) -> PieceOfPlan:
    """A piece of the first choice, that runs these operations of a graph in these steps."""
    labels = tuple(graph.label(number) for number in operations)
    kept = sum(_reserve_bytes(graph, graph.operations[number]) for number in operations)
    return PieceOfPlan(operations=tuple(operations), labels=labels, steps=steps, plan=plan, reserve=kept)


def _reserve_bytes(graph: OperationGraph, operation: Node) -> int:
    """The bytes of a recurrent layer's reserve, of an engine that keeps numbers, if it is bytes."""
    if not isinstance(operation, Recurrent):
        return 0
    specs = {name: graph.tensor(uid).spec for name, uid in operation.named()}
    return sum(spec.nbytes for spec in operation.kept_specs(specs).values())


def _slowest_first(numbered: tuple[int, PieceOfPlan]) -> tuple[float, int]:
    """The key by which pieces are shown: in their order, unless they have times."""
    number, piece = numbered
    return (0.0 if piece.time is None else -piece.time.us), number


def _columns_of_times(pieces: Sequence[PieceOfPlan]) -> tuple[str, list[str]]:
    """The head and the rows of the columns of times; empty texts without times."""
    times = [piece.time for piece in pieces]
    total = sum(time.us for time in times if time is not None)
    if not total:
        return "", [""] * len(times)
    head = f"{'us':>10} {'share':>6} {'GB/s':>7} {'GFLOP/s':>8} {'of the device':>14}"
    return head, [_row(time, total) for time in times if time is not None]


def _row(time: PieceTime, total_us: float) -> str:
    us = max(time.us, 1e-3)
    flops = f"{time.flops / us / 1e3:,.0f}" if time.flops else ""
    return (
        f"{time.us:>10,.1f} {time.us / total_us:>6.1%} {time.nbytes / us / 1e3:>7,.1f} "
        f"{flops:>8} {share_of_device(time):>14}"
    )


def _runs(piece: PieceOfPlan) -> str:
    return " + ".join(piece.steps)


def _facts(piece: PieceOfPlan) -> list[str]:
    facts = [f"workspace {piece.workspace:,} bytes"] if piece.workspace else []
    if piece.measured is not None:
        found = piece.measured
        facts.append(
            f"tuned: {found.tuned_us:.1f} us, the first choice {found.heuristic_us:.1f} us, of {found.timed}"
            + (f"; it was {found.instead_of}" if found.instead_of else "")
        )
    facts += [] if piece.checked else ["not checked: the device had no room for the self-check"]
    return facts + [f"candidate {candidate}" for candidate in piece.candidates]


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
