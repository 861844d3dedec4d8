"""The options of `spawn` that concern the CPU engine alone, as arguments of a command."""

from __future__ import annotations

import argparse
from typing import Any

from cudnn_actor.cli.user_error import whole_number
from cudnn_actor.options import MOST_THREADS

__all__ = ["add_cpu_arguments", "cpu_options"]


def add_cpu_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options as arguments."""
    group = parser.add_argument_group("on the CPU", "as in spawn(); without effect on a GPU")
    group.add_argument("--exact", action="store_true", help="compute everything in float64, which is slow")
    group.add_argument(
        "--threads",
        type=whole_number(least=1, most=MOST_THREADS),
        metavar="N",
        help="how many threads compute; by default, as many as may run here",
    )
    group.add_argument(
        "--onnx-runtime",
        choices=("yes", "no"),
        help="have ONNX Runtime run all graphs that it can, or none; large ones unless given",
    )


def cpu_options(args: argparse.Namespace) -> dict[str, Any]:
    """The given options, as keyword arguments of `spawn`."""
    onnx_runtime = None if args.onnx_runtime is None else args.onnx_runtime == "yes"
    return {"exact": args.exact, "threads": args.threads, "onnx_runtime": onnx_runtime}
