"""Tables of a run on a GPU, and how a page shows them."""

from __future__ import annotations

from benchmarks.markdown import as_markdown
from cudnn_actor.trials.bench.sheet import Sheet, as_text, median, number, ratio, verdict

__all__ = ["Sheet", "as_markdown", "as_text", "median", "number", "ratio", "verdict"]
