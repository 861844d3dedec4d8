"""The demo's table: requests by kind, as measured by the caller."""

from __future__ import annotations

import numpy as np
from rich.table import Table

from cudnn_actor.cli.demo.findings import Findings
from cudnn_actor.cli.demo.recorder import Sample

__all__ = ["request_table", "verdict"]


def request_table(samples: list[Sample]) -> Table:
    """Count and latencies of every kind of request, stage by stage."""
    table = Table(title="Requests, as the caller saw them", title_justify="left", pad_edge=False)
    for name in ("stage", "request"):
        table.add_column(name, no_wrap=True)
    for name in ("count", "p50 ms", "p99 ms", "max ms"):
        table.add_column(name, justify="right", no_wrap=True)
    for stage in dict.fromkeys(sample.stage for sample in samples):
        _add_stage(table, stage, [sample for sample in samples if sample.stage == stage])
    return table


def _add_stage(table: Table, stage: str, samples: list[Sample]) -> None:
    for kind in sorted({sample.kind for sample in samples}):
        latencies = np.array([sample.latency_s for sample in samples if sample.kind == kind]) * 1e3
        p50, p99 = np.percentile(latencies, [50, 99])
        table.add_row(stage, kind, str(len(latencies)), f"{p50:.2f}", f"{p99:.2f}", f"{latencies.max():.2f}")
        stage = ""
    table.add_section()


def verdict(findings: Findings) -> str:
    """The line under the table."""
    return (
        f"restarts: {findings.restarts}   requests run again: {findings.replayed}   "
        f"errors seen by callers: {findings.errors}"
    )
