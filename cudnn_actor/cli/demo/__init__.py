"""`cudnn-actor demo`: its arguments, and checks before the start. The demo itself is in `story`."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from cudnn_actor.cli.user_error import UserError, check_writable, whole_number
from cudnn_actor.extras import install_command

__all__ = ["add_arguments", "run"]

_NEEDED = {"matplotlib": "matplotlib", "PIL": "matplotlib", "onnx": "onnx"}
"""The modules that the demo imports, and the package that brings each."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "image", nargs="?", type=Path, metavar="IMAGE", help="a photograph; without one, matplotlib's sample"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("demo.png"), help="the picture to write (%(default)s)"
    )
    parser.add_argument(
        "--seed", type=whole_number(), default=0, help="determines the camera shake (%(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Run the demo; returns the exit status.

    Raises
    ------
    UserError
        The image can't be read, the picture can't be written, or a package is not installed.
    CudnnActorError
        The service failed.
    """
    try:
        # Imported late: neither `demo --help` nor the other commands need matplotlib or onnx.
        from cudnn_actor.cli.demo.story import tell  # noqa: PLC0415
    except ModuleNotFoundError as error:
        package = _NEEDED.get((error.name or "").partition(".")[0])
        if package is None:
            raise
        raise UserError(
            f"the demo needs {package}, which is not installed: {install_command('demo')}"
        ) from None
    if args.out.suffix.lower() != ".png":
        raise UserError(f"--out {args.out} is not a PNG; give a name that ends in .png")
    check_writable(args.out)
    return asyncio.run(tell(args.image, args.out, args.seed))
