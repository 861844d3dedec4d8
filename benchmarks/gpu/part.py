"""One part of the run, in a process of its own: `python -m benchmarks.gpu.part`.

What it is doing goes to stdout, a line each; what it found, to a file.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.gpu.report import PARTS, platform_of
from benchmarks.gpu.setting import Setting
from cudnn_actor.cli.logbook import LogBook

__all__ = ["PLATFORM"]

PLATFORM = "platform"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=[PLATFORM, *PARTS])
    parser.add_argument("file", type=Path)
    parser.add_argument("--device", required=True)
    parser.add_argument("--budget", type=float, required=True)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    setting = Setting(
        args.device, args.quick, args.profile, args.budget, time.monotonic(), partial(print, flush=True)
    )
    measure: Callable[[Setting], Any] = platform_of if args.name == PLATFORM else PARTS[args.name].measure
    with LogBook():
        found = measure(setting)
    args.file.write_bytes(msgspec.json.encode(found))


if __name__ == "__main__":
    main()
