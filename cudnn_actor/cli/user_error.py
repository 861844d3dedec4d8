"""Errors that a user of the command line can fix, and checks of arguments that several commands have."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

__all__ = ["UserError", "check_writable", "whole_number", "writing"]

_LARGEST = (1 << 63) - 1


class UserError(Exception):
    """Raised when a command cannot be carried out as given. Its text is one line that says how to fix it."""


def whole_number(least: int = 0, most: int = _LARGEST) -> Callable[[str], int]:
    """A function that parses an argument as a whole number, for `argparse`: a seed, or a number of bytes."""

    def read(word: str) -> int:
        if not word.isdecimal() or not least <= int(word) <= most:
            end = "2**63 - 1" if most == _LARGEST else most
            raise argparse.ArgumentTypeError(f"{word} must be a whole number from {least} to {end}")
        return int(word)

    return read


def check_writable(path: Path, option: str = "--out") -> None:
    """Raise `UserError` unless the file of an option can be written. Call it before the work that the file is
    for."""
    if path.is_dir():
        raise UserError(f"{option} {path} is a directory; give a file name in it")
    if not path.parent.is_dir():
        raise UserError(f"{option} {path}: there is no directory {path.parent}; create it first")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UserError(f"{option} {path} cannot be written; give a path that you can write")


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise `UserError` if the system refuses a write to a file within the block."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from error
