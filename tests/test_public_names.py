"""Names, signatures and members of the public packages stay as they are, unless a change is meant."""

from __future__ import annotations

import difflib
import importlib
import subprocess
import sys
import warnings
from types import ModuleType

import pytest

import cudnn_actor
from cudnn_actor import CudnnActorError, errors
from cudnn_actor.moved_names import HOMES

from .in_one_test import in_one_test
from .public_names import PACKAGES, SNAPSHOT

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


FIRST = """
import importlib, os, sys
import cudnn_actor  # whatever is imported of it first, this is imported before

for name in sys.argv[1:]:
    if (pid := os.fork()) == 0:
        importlib.import_module(name)
        os._exit(0)
    if os.waitpid(pid, 0)[1]:
        sys.exit(f"{name} cannot be the first module that is imported")
"""
COMMANDS = [f"cudnn_actor.{each}" for each in ("cli.serve", "cli.doctor", "cli.demo", "trials.chaos")]


def test_whatever_is_imported_first_finds_what_it_needs() -> None:
    """Each in a process of its own that has imported only the top of this package. Warnings are errors.

    Other tests import in an order of their own, or run programs in processes that have imported most of it.
    """
    filters = ["-W", "error", "-W", "ignore:This process:DeprecationWarning"]
    names = [*(package.__name__ for package in PACKAGES), "cudnn_actor.cli", *COMMANDS]
    command = [sys.executable, *filters, "-c", FIRST, *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=SNAPSHOT.parents[1])
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("package", PACKAGES)
def test_what_a_package_says_it_has_is_there(package: ModuleType) -> None:
    assert not [name for name in package.__all__ if not hasattr(package, name)]
    assert {name for name in dir(package) if name[0].isupper()} <= set(package.__all__)


@in_one_test("name", HOMES)
def test_an_import_that_has_moved_warns_once_and_gives_the_same(name: str) -> None:
    home, found = HOMES[name], dict[str, object]()
    with warnings.catch_warnings(record=True, action="always") as caught:
        exec(f"from cudnn_actor import {name}", found)
    (warning,) = caught
    new = f"from {home} import {name}"
    assert warning.category is DeprecationWarning
    assert str(warning.message) == f"`from cudnn_actor import {name}` is deprecated: write `{new}`"
    assert warning.filename == "<string>"  # the line that imports
    exec(new, expected := dict[str, object]())
    assert found[name] is expected[name]
    assert name in importlib.import_module(home).__all__
    with pytest.warns(DeprecationWarning, match=f"`{new}`"):
        assert getattr(cudnn_actor, name) is expected[name]


def test_the_top_has_no_name_that_has_moved() -> None:
    exec("from cudnn_actor import *", found := dict[str, object]())
    assert set(found) - {"__builtins__"} == set(cudnn_actor.__all__)
    assert not set(cudnn_actor.__all__) & set(HOMES)
    assert not set(dir(cudnn_actor)) & set(HOMES)


USED_LATER = """
import sys
import cudnn_actor

assert "cudnn_actor.attached" not in sys.modules and "connect" in dir(cudnn_actor)
serve_socket = cudnn_actor.attached.serve_socket
from cudnn_actor import *
from cudnn_actor.attached import client, connect as own, serve_socket as same
assert connect is own is cudnn_actor.connect and serve_socket is same
"""


def test_what_is_imported_at_its_first_use_needs_no_import() -> None:
    """In a process of its own, which has imported only the top."""
    command = [sys.executable, "-W", "error", "-c", USED_LATER]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=SNAPSHOT.parents[1])
    assert (done.returncode, done.stderr) == (0, "")


def test_a_name_that_never_was_is_missing_as_everywhere() -> None:
    with pytest.raises(ImportError, match="cannot import name 'Spwan' from 'cudnn_actor'"):
        exec("from cudnn_actor import Spwan")
    with pytest.raises(AttributeError, match="module 'cudnn_actor' has no attribute 'Spwan'"):
        cudnn_actor.Spwan  # type: ignore[attr-defined]  # noqa: B018


def test_the_errors_of_a_service_and_of_models_have_one_home() -> None:
    lower = [importlib.import_module(f"cudnn_actor.{each}.errors") for each in ("protocol", "models")]
    for name, value in ((name, getattr(module, name)) for module in lower for name in module.__all__):
        if isinstance(value, type) and issubclass(value, CudnnActorError):
            assert getattr(errors, name) is value
