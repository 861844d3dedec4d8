"""Looks which faults of cuDNN, that the CUDA engine avoids, the installed version has."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.table import Table

from cudnn_actor.engines.cuda.cudnn.frontend_graph import Refused
from cudnn_actor.engines.cuda.planning.candidates import candidates, names_of
from cudnn_actor.engines.cuda.planning.cuda_builder import CudaBuilder

from ..gpu.setting import gpu_versions
from ..recording import Row, keep
from .candidates import excluded, tried
from .problems import PROBLEMS
from .races import BLOCKS, without_barriers

__all__ = ["main"]

_AT_ONCE = 8
"""Processes that run side by side."""
_CHILD_S = 150


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.library_faults", description=__doc__)
    parser.add_argument("--out", type=Path, help="directory for the JSON")
    parser.add_argument("--only", default="", help="problems in whose name this regular expression is found")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one is not None:
        name, number = given.one
        print(json.dumps(without_barriers(name) if name in BLOCKS else tried(name, int(number))), flush=True)
        return
    keep(_rows(given.only), _sheet, given.out, "library-faults", versions=gpu_versions())


def _rows(only: str) -> Iterator[Row]:
    """The rows: what cuDNN refuses or does not offer at all, then each candidate and block."""
    tasks: list[tuple[str, int]] = []
    builder = CudaBuilder(0)
    builder.open()
    for name, graph in PROBLEMS.items():
        if re.search(only, name):
            try:
                names = names_of(candidates(graph, builder.context.handle, None))
            except Refused as refused:
                yield {"problem": name, "plan": "", "fault": f"refused: {refused}"}
                continue
            found = excluded(graph, names)
            tasks += [(name, number) for number in found]
            if not found:
                yield {"problem": name, "plan": "", "fault": "no candidate that an erratum excludes"}
    builder.close()
    tasks += [(name, 0) for name in BLOCKS if re.search(only, name)]
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        yield from threads.map(lambda task: _apart(*task), tasks)


def _apart(name: str, number: int) -> Row:
    """A row that a process of its own has found, or how it ended."""
    command = [sys.executable, "-m", "benchmarks.library_faults", "--one", name, str(number)]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=_CHILD_S, check=False)
    except subprocess.TimeoutExpired:
        return {"problem": name, "plan": f"candidate {number}", "fault": f"not done in {_CHILD_S} s"}
    lines = ran.stdout.strip().splitlines()
    if ran.returncode == 0 and lines:
        row: Row = json.loads(lines[-1])
        return row
    said = (ran.stderr.strip().splitlines() or [""])[-1]
    return {"problem": name, "plan": f"candidate {number}", "fault": f"exit status {ran.returncode}: {said}"}


def _sheet(found: list[Row]) -> Table:
    table = Table("problem", "plan", "fault", "error, beside the service's", "µs, beside the service's")
    for row in found:
        errors = f"{row['off']}, {row['service_off']}" if "off" in row else ""
        times = f"{row['us']}, {row['service_us']}" if "us" in row else ""
        if "runs" in row:
            without, with_ = row["different_without"], row["different_with"]
            errors = f"of {row['runs']} runs {without} differ, with barriers {with_}"
        table.add_row(row["problem"], row["plan"], str(row["fault"] or ""), errors, times)
    return table


if __name__ == "__main__":
    main()
