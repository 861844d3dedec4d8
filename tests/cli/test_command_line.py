"""The command line itself: words that mean nothing, the log, and what an import costs."""

from __future__ import annotations

import argparse
import logging

import pytest

from cudnn_actor import __version__
from cudnn_actor.actors.logs import Log
from cudnn_actor.cli import main, run_command
from cudnn_actor.cli.logbook import LogBook
from cudnn_actor.protocol import ServiceStopped

from .terminal import cudnn_actor, cudnn_actor_here, python


@pytest.mark.parametrize(
    "words",
    [("sing",), ("demo", "--seed", "x"), ("demo", "--seed", "-1"), ("demo", "a", "b"), ("doctor", "-x")],
)
def test_words_that_mean_nothing_end_with_status_2_and_the_usage(words: tuple[str, ...]) -> None:
    done = cudnn_actor_here(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("usage: cudnn-actor")
    assert "Traceback" not in done.stderr


def test_without_a_command_the_help_names_all_of_them() -> None:
    done = cudnn_actor_here()
    assert done.returncode == 2
    for command in ("demo", "doctor", "bench", "reproduce", "explain", "autotune"):
        assert command in done.stderr


def test_the_version_is_told() -> None:
    done = cudnn_actor("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"cudnn-actor {__version__}\n", "")


def test_a_number_that_is_none_is_named_with_what_would_be_one() -> None:
    assert "x must be a whole number from 0" in cudnn_actor_here("demo", "--seed", "x").stderr


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (
            ("explain", "graph.json", "--workspace-limit", "-5"),
            "--workspace-limit: -5 must be a whole number from 1",
        ),
        (("explain", "graph.json", "--workspace-limit", "0"), "0 must be a whole number from 1"),
        (
            ("autotune", "f.txt", "--store", "d", "--workspace-limit", "-1"),
            "-1 must be a whole number from 1",
        ),
        (("reproduce", "conv_fwd", "--seed", "-1"), "--seed: -1 must be a whole number from 0"),
        (("chaos", "--tasks", "1001"), "1001 must be a whole number from 1 to 1000"),
        (("chaos", "--seed", str(2**63)), "must be a whole number from 0 to 2**63 - 1"),
    ],
)
def test_numbers_that_make_no_sense_are_refused_before_anything_runs(
    words: tuple[str, ...], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(words)
    assert left.value.code == 2
    assert problem in capsys.readouterr().err.splitlines()[-1]


def test_importing_the_command_line_imports_no_command() -> None:
    code = "import sys, cudnn_actor.cli; print(*sys.modules)"
    imported = set(python("-c", code).stdout.split())
    names = ("demo", "story", "doctor", "bench", "reproduce", "explain", "autotune")
    commands = {f"cudnn_actor.{room}.{name}" for name in names for room in ("cli", "trials")}
    assert not imported & {"matplotlib", "PIL", *commands}
    assert "cudnn_actor.cli" in imported


def test_the_log_is_kept_and_printed_when_the_command_fails(capsys: pytest.CaptureFixture[str]) -> None:
    def fails(_: argparse.Namespace) -> int:
        Log("cudnn_actor").warning("gpu.smoke", colour="blue")
        raise ServiceStopped(reason="smoke")

    with LogBook() as logbook:
        assert run_command(fails, argparse.Namespace(), logbook) == 1
    errors = capsys.readouterr().err
    assert "gpu.smoke" in errors
    assert "colour=blue" in errors
    assert "ServiceStopped" in errors


def test_the_log_of_a_command_that_works_is_shown_only_when_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    logger = logging.getLogger("cudnn_actor")
    before = logger.level, logger.propagate, *logger.handlers
    for live, expected in ((False, 0), (True, 1)):
        with LogBook(live=live):
            Log("cudnn_actor.any").info("gpu.hum")
        assert capsys.readouterr().err.count("gpu.hum") == expected
    assert (logger.level, logger.propagate, *logger.handlers) == before
