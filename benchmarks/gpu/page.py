"""The GPU's section of docs/measurements.md, from a recorded run.

It stands between two comments, and is exchanged as a whole; at the first time it is put at the page's end.
The prose around it is yours to read again.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import msgspec

from benchmarks.gpu.plot import draw
from benchmarks.gpu.report import Platform, Report, sheets
from benchmarks.gpu.sheet import as_markdown
from benchmarks.markdown import exchange, wrapped

__all__ = ["named_in", "section", "update"]

BEGIN, END = "<!-- gpu: begin -->", "<!-- gpu: end -->"
_PLOT = "gpu.png"
_NAMED = "Recorded in `benchmarks/results/"


def section(report: Report, name: str) -> str:
    """The text between the comments, for a run that was recorded in the file `name`."""
    return "\n".join(_lines(report, name))


def _lines(report: Report, name: str) -> Iterator[str]:
    yield from (f"## On a GPU{_isolations(report)}", "")
    yield from (*wrapped(f"{_NAMED}{name}` on {report.date[:10]}: {_platform(report.platform)}."), "")
    yield from (f"![throughput of small convolutions, and ResNet-50's beside PyTorch's]({_PLOT})", "")
    yield from ("```", "python -m benchmarks.gpu --out DIR", "```", "")
    for sheet in sheets(report):
        yield from as_markdown(sheet)


def _isolations(report: Report) -> str:
    """The isolations that a run has measured, for its heading: the first runs measured thread isolation
    alone."""
    measured = {row.isolation for row in report.small.requests} if report.small is not None else {"thread"}
    return "" if "process" in measured or report.recovery is not None else ", thread isolation"


def _platform(found: Platform | None) -> str:
    if found is None:
        return "on what is not known"
    versions = ", ".join(f"{name} {version}" for name, version in found.versions.items())
    cores = f"{found.machine.get('cores')} cores ({found.machine.get('cpu')})"
    return f"{found.name or found.device}, driver {found.driver or 'none'}, {cores}; {versions}"


def named_in(page: str) -> str | None:
    """The file name of the run that a page shows; None where it shows none."""
    _, found, rest = page.partition(_NAMED)
    return rest.partition("`")[0] if found else None


def update(page: Path, report: Report, name: str) -> None:
    """Put a run's section and its plot in the place of the earlier ones."""
    text = page.read_text(encoding="utf-8")
    page.write_text(exchange(text, BEGIN, END, section(report, name)), encoding="utf-8")
    draw(report, page.with_name(_PLOT))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--page", type=Path)
    args = parser.parse_args()
    report = msgspec.json.decode(args.run.read_bytes(), type=Report)
    if args.page is None:
        print(section(report, args.run.name))
    else:
        update(args.page, report, args.run.name)


if __name__ == "__main__":
    main()
