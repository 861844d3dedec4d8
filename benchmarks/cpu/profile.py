"""Profiles a run of this package: the time of each kind of operation, longest first."""

from __future__ import annotations

from collections import defaultdict

from rich.table import Table

from benchmarks.recording import Row
from cudnn_actor import spawn
from cudnn_actor.protocol.graphs.explanation import Explanation, PieceOfPlan

from .cases import Case

__all__ = ["profiled", "sheet"]


async def profiled(case: Case, threads: int) -> Row:
    """The time of a run, and of each kind of operation."""
    async with spawn(
        device="cpu", isolation="thread", hang_after_s=600.0, threads=threads, onnx_runtime=False
    ) as gpu:
        if isinstance(case.what, bytes):
            model = await gpu.load(case.what)
            found = await model.explain(case.inputs, measure=True)
        else:
            found = await gpu.explain(case.what, measure=True)
    return {"run_us": found.run_us, "kinds": _kinds(found)}


def _kinds(found: Explanation) -> list[Row]:
    of = defaultdict[str, list[PieceOfPlan]](list)
    for piece in found.pieces:
        of[_kind(piece)].append(piece)
    kinds = [_summary(kind, pieces) for kind, pieces in of.items()]
    return sorted(kinds, key=lambda kind: -float(kind["us"]))


def _kind(piece: PieceOfPlan) -> str:
    """The kinds of a piece's operations, without their source lines."""
    return ", ".join(dict.fromkeys(label.partition(" at ")[0] for label in piece.labels))


def _summary(kind: str, pieces: list[PieceOfPlan]) -> Row:
    times = [piece.time for piece in pieces if piece.time is not None]
    slowest = max(pieces, key=lambda piece: piece.time.us if piece.time else 0.0)
    return {
        "kind": kind,
        "pieces": len(pieces),
        "us": round(sum(time.us for time in times), 1),
        "flops": sum(time.flops for time in times),
        "nbytes": sum(time.nbytes for time in times),
        "slowest": slowest.labels[0],
        "slowest_us": round(slowest.time.us, 1) if slowest.time else None,
    }


def sheet(found: list[Row]) -> Table:
    """The ten kinds of each case that take longest."""
    table = Table("", "kind", "pieces", "ms", "%", "GFLOP/s", "GB/s", "slowest", "ms")
    for row in found:
        total = row["run_us"]
        table.add_row(row["part"], "all", "", f"{total / 1e3:.2f}")
        for kind in row["kinds"][:10]:
            us = kind["us"] or 1.0
            cells = (f"{us / 1e3:.2f}", f"{100 * us / total:.0f}")
            rates = (f"{kind['flops'] / us / 1e3:.1f}", f"{kind['nbytes'] / us / 1e3:.1f}")
            last = (kind["slowest"], f"{(kind['slowest_us'] or 0) / 1e3:.2f}")
            table.add_row("", kind["kind"], str(kind["pieces"]), *cells, *rates, *last)
    return table
