"""The tables of a recorded run as Markdown: `python -m benchmarks.cpu.page FILE`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from benchmarks.markdown import as_markdown

from .sheets import sheets


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    found = json.loads(parser.parse_args().run.read_bytes())["found"]
    for sheet in sheets([row for row in found if "error" not in row]):
        print("\n".join(as_markdown(sheet)))


if __name__ == "__main__":
    main()
