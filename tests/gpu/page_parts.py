"""What all sections of the support page are made of: tables, and words for what became of cells."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from .support_record import Outcome, Record

__all__ = ["AnyCell", "largest", "markdown", "word", "words_by_rank"]


class AnyCell(Protocol):
    """A cell of the support matrix, of any family."""

    @property
    def name(self) -> str:
        """As it stands in records."""

    @property
    def rank(self) -> int:
        """Dims."""

    @property
    def refused(self) -> str | None:
        """Why the engine refuses it; None for what it must run."""


def word(cell: AnyCell, record: Record | None) -> str:
    """What becomes of a cell."""
    outcome = record.cells.get(cell.name) if record is not None else None
    if outcome is None:
        return "refused" if cell.refused is not None else "not run"
    return ("split" if outcome.split else "fused") if outcome.ran else "refused"


def words_by_rank(row: Iterable[AnyCell], record: Record | None) -> str:
    """What becomes of cells that differ in their rank only."""
    ranks: dict[str, list[str]] = {}
    for cell in row:
        ranks.setdefault(word(cell, record), []).append(str(cell.rank))
    if len(ranks) < 2:
        return next(iter(ranks), "–")
    return "; ".join(f"{found} {', '.join(dims)}" for found, dims in ranks.items())


def largest(outcomes: Iterable[Outcome]) -> str:
    """The largest error of cells that ran, in terms of its bound."""
    errors = [outcome.error for outcome in outcomes if outcome.ran]
    return f"{max(errors):.2f}" if errors else "–"


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"
