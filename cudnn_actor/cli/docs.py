"""`cudnn-actor docs`: prints the pages of documentation, which are installed with the package."""

from __future__ import annotations

import argparse
from pathlib import Path

import cudnn_actor
from cudnn_actor.cli.user_error import UserError
from cudnn_actor.protocol.types.checks import did_you_mean

__all__ = ["add_arguments", "run"]

_FOLDER = Path(cudnn_actor.__file__).parent / "docs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("page", nargs="?", help="the page to print; without one, all are listed")


def run(args: argparse.Namespace) -> int:
    """Run the command. Raises `UserError` if there is no such page."""
    pages = {path.stem: path for path in _FOLDER.glob("*.md")}
    if not pages:
        raise UserError(f"there are no pages in {_FOLDER}")
    if args.page is None:
        for name, path in sorted(pages.items()):
            print(f"{name:<{max(map(len, pages))}}  {_title(path)}")
        return 0
    name = args.page.removeprefix("docs/").removesuffix(".md")
    if name not in pages:
        raise UserError(
            f"{args.page!r} is not a page; {did_you_mean(name, pages)}they are {', '.join(sorted(pages))}"
        )
    print(pages[name].read_text(encoding="utf-8"), end="")
    return 0


def _title(path: Path) -> str:
    first, *_ = path.read_text(encoding="utf-8").splitlines()
    return first.lstrip("# ")
