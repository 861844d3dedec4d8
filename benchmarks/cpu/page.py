"""The tables of docs/cpu-engine.md, from a recorded run.

    python -m benchmarks.cpu.page FILE [--page docs/cpu-engine.md]

It stands between two comments, and is replaced as a whole; without a page it is printed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.markdown import as_markdown, exchange

from .sheets import sheets

__all__ = ["section"]

BEGIN, END = "<!-- CPU engine: begin -->", "<!-- CPU engine: end -->"


def section(record: dict[str, Any], name: str) -> str:
    """The text between the comments, for a run that was recorded in the file `name`."""
    return "\n".join(_lines(record, name))


def _lines(record: dict[str, Any], name: str) -> Iterator[str]:
    yield from ("## The CPU engine beside ONNX Runtime and PyTorch", "")
    versions = ", ".join(f"{package} {version}" for package, version in record["versions"].items())
    threads = f"{record['threads']} thread{'s' if record['threads'] > 1 else ''} for every side"
    yield f"Recorded in `benchmarks/results/{name}` on {record['date'][:10]}, {record['machine']['cpu']},"
    yield from (f"{threads}; {versions}.", "`python -m benchmarks.cpu --help` says what the sides are.", "")
    for sheet in sheets([row for row in record["found"] if "error" not in row]):
        yield from as_markdown(sheet)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("--page", type=Path)
    args = parser.parse_args()
    text = section(json.loads(args.run.read_bytes()), args.run.name)
    if args.page is None:
        print(text)
        return
    page = args.page.read_text(encoding="utf-8")
    args.page.write_text(exchange(page, BEGIN, END, text, before="## What the tables say"), encoding="utf-8")


if __name__ == "__main__":
    main()
