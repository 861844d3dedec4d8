"""`cudnn-actor docs`: the pages that errors name can be read wherever the package is installed."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from ..patience import PATIENCE_S
from .terminal import CLONE, cudnn_actor_here


def test_it_lists_the_pages_with_their_titles() -> None:
    done = cudnn_actor_here("docs")
    assert (done.returncode, done.stderr) == (0, "")
    names = [line.split()[0] for line in done.stdout.splitlines()]
    assert names == sorted(path.stem for path in (CLONE / "docs").glob("*.md"))
    assert re.search(r"^onnx +ONNX models$", done.stdout, re.MULTILINE)


@pytest.mark.parametrize("name", ["support", "docs/support.md"])
def test_it_prints_a_page(name: str) -> None:
    done = cudnn_actor_here("docs", name)
    assert (done.returncode, done.stdout) == (0, (CLONE / "docs/support.md").read_text())


def test_a_page_that_there_is_not_is_refused_with_those_that_there_are() -> None:
    done = cudnn_actor_here("docs", "suport")
    assert done.returncode == 2
    assert 'did you mean "support"? they are architecture, ' in done.stderr


def test_a_reader_that_leaves_early_ends_it_quietly() -> None:
    command = [sys.executable, "-m", "cudnn_actor.cli", "docs", "onnx"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(PATIENCE_S) == 141


def test_what_the_code_says_names_pages_by_the_command_that_prints_them() -> None:
    for top in ("cudnn_actor", "protocol"):
        for path in (CLONE / top).rglob("*.py"):
            for name in re.findall(r"cudnn-actor docs ([a-z]+)", path.read_text()):
                assert (CLONE / "docs" / f"{name}.md").exists(), f"{path} names {name}"
