"""Names, signatures and members of the public packages stay as they are, unless a change is meant."""

from __future__ import annotations

import difflib
import subprocess
import sys
from types import ModuleType

import pytest

import cudnn_actor
import cudnn_actor.blocking
import cudnn_actor.protocol

from .public_names import SNAPSHOT

REMEDY = "if this is meant, run `python -m tests.public_names`"


def test_the_public_names_are_those_of_the_snapshot() -> None:
    """In a process of its own: completion also offers the modules that others have imported."""
    program = "from tests import public_names; print(public_names.listing(), end='')"
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        cwd=SNAPSHOT.parents[1],
    )
    kept, found = SNAPSHOT.read_text().splitlines(), done.stdout.splitlines()
    difference = difflib.unified_diff(kept, found, "kept", "found", lineterm="", n=1)
    assert kept == found, "\n".join([REMEDY, *difference])


@pytest.mark.parametrize("package", [cudnn_actor, cudnn_actor.protocol, cudnn_actor.blocking])
def test_what_a_package_says_it_has_is_there(package: ModuleType) -> None:
    assert not [name for name in package.__all__ if not hasattr(package, name)]
    assert {name for name in dir(package) if name[0].isupper()} <= set(package.__all__)
