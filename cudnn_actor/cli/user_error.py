"""Errors that a user of the command line can fix."""

from __future__ import annotations

import argparse
from collections.abc import Callable

__all__ = ["UserError", "whole_number"]

_LARGEST = (1 << 63) - 1


class UserError(Exception):
    """Raised when a command cannot be carried out as given. Its text is one line that says how to fix it."""


def whole_number(least: int = 0, most: int = _LARGEST) -> Callable[[str], int]:
    """What reads an argument that is a whole number, for `argparse`: a seed, or a number of bytes."""

    def read(word: str) -> int:
        if not word.isdecimal() or not least <= int(word) <= most:
            end = "2**63 - 1" if most == _LARGEST else most
            raise argparse.ArgumentTypeError(f"{word} must be a whole number from {least} to {end}")
        return int(word)

    return read
