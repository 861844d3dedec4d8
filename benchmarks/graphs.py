"""Measures the package before anything runs, against another checkout: its import, and graphs.

    git worktree add ../old COMMIT
    python -m benchmarks.graphs ../old . --out benchmarks/results

Each sample is a process of its own, and both checkouts take turns. Import times are medians, with everything
in the file system's cache; graphs' times are the shortest of their calls. A graph here is a chain of
additions. Lines are those of the product's Python files.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.against import commit, environment

_SIDE = Path(__file__).with_name("graphs_side.py")
_PRODUCT = ("actors", "protocol", "supervision", "cudnn_actor")
COUNTS = (10, 30, 100, 300, 1000)
_MOST_OLD = 300
"""The largest graph for the other checkout: its time grows with the square."""


def sample(tree: Path, counts: tuple[int, ...]) -> dict[str, Any]:
    """The measurements of one process of a checkout. Blocks."""
    done = subprocess.run(
        [sys.executable, str(_SIDE), *map(str, counts)],
        env=environment(tree),
        cwd=tree,
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    assert Path(found.pop("package")).is_relative_to(tree.resolve()), "another checkout was measured"
    return found


def lines(tree: Path) -> dict[str, int]:
    """Lines of Python in each of the product's folders."""
    found = {}
    for name in _PRODUCT:
        files = (path for path in (tree / name).rglob("*.py") if not _linked(path, tree))
        found[name] = sum(len(path.read_text().splitlines()) for path in files)
    return found


def _linked(path: Path, tree: Path) -> bool:
    folders = (folder for folder in path.parents if folder != tree and folder.is_relative_to(tree))
    return any(folder.is_symlink() for folder in folders)


def measure(old: Path, new: Path, rounds: int) -> dict[str, Any]:
    """Both checkouts, in turns; the graphs once each, behind the imports."""
    imports: dict[str, list[float]] = {"old": [], "new": []}
    trees = {"old": old, "new": new}
    for number in range(rounds + 1):
        for side in ("old", "new") if number % 2 else ("new", "old"):
            seconds = sample(trees[side], ())["import_s"]
            if number:  # the first is a warm-up
                imports[side].append(seconds)
    counts = {"old": tuple(count for count in COUNTS if count <= _MOST_OLD), "new": COUNTS}
    return {
        side: {
            "commit": commit(tree),
            "import_s": imports[side],
            "graphs": {key: value for key, value in sample(tree, counts[side]).items() if key != "import_s"},
            "lines": lines(tree),
        }
        for side, tree in trees.items()
    }


def table(found: dict[str, Any]) -> Table:
    """The record for a terminal."""
    sheet = Table(title=f"{found['new']['commit']} beside {found['old']['commit']}")
    for name in ("", "old", "new"):
        sheet.add_column(name, justify="right" if name else "left")
    sides = [found["old"], found["new"]]
    sheet.add_row("import, ms", *(f"{1e3 * statistics.median(side['import_s']):.0f}" for side in sides))
    for count in map(str, COUNTS):
        for key, what in (("construct_and_digest_s", "constructed and digested"), ("decode_s", "decoded")):
            times = (side["graphs"].get(count) for side in sides)
            cells = ("" if time_ is None else f"{1e3 * time_[key]:.2f}" for time_ in times)
            sheet.add_row(f"{int(count):,} operations {what}, ms", *cells)
    for name in _PRODUCT:
        sheet.add_row(f"lines in {name}", *(f"{side['lines'][name]:,}" for side in sides))
    return sheet


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--rounds", type=int, default=15, help="samples of the import for each side")
    parser.add_argument("--out", type=Path, help="directory for the JSON")
    given = parser.parse_args()
    found = measure(given.old, given.new, given.rounds)
    Console(width=110).print(table(found))
    if given.out is not None:
        found |= {
            "date": time.strftime("%Y-%m-%dT%H:%M:%S"),
            "python": platform.python_version(),
            "cores": os.cpu_count(),
        }
        path = given.out / time.strftime("graphs-%Y%m%dT%H%M%S.json")
        path.write_text(json.dumps(found, indent=1) + "\n")
        print(path)


if __name__ == "__main__":
    main()
