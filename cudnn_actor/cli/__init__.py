"""The command line: `cudnn-actor COMMAND`, or `--version`. `_COMMANDS` lists the commands.

Importing this module imports no command. A command is imported only when it is run, so that `doctor` neither
waits for nor fails because of packages that only `demo` needs.

===========  =========================================================
exit status  meaning
===========  =========================================================
0            done
1            the service failed; its log is printed
2            the command can't be carried out as given; one line says why
130          interrupted (Ctrl-C); `chaos` prints what it has found so far
141          nobody reads the output any more, as in `cudnn-actor docs | head`
===========  =========================================================
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import io
import os
import select
import sys
from collections.abc import Callable, Sequence
from typing import Any

import cudnn_actor
from cudnn_actor.cli.logbook import LogBook
from cudnn_actor.cli.user_error import UserError
from cudnn_actor.protocol.errors import CudnnActorError

__all__ = ["main"]

_TRIALS = ("bench", "chaos")
"""The commands in `cudnn_actor.trials`, which a minimal installation does not have."""
_COMMANDS = {
    "demo": "filter a photograph, undo a camera shake and serve a model, while the worker is killed twice",
    "doctor": "report what was found, what is missing, and whether the service works",
    "bench": "measure latencies and throughput",
    "reproduce": "run one operation graph from an error's token, and compare it with the CPU",
    "run": "run an ONNX model, time it, and say how it runs",
    "serve": "answer clients of the Open Inference Protocol (KServe v2) over HTTP and gRPC",
    "explain": "say how an engine runs a graph, and draw it",
    "chaos": "put full load on a service, inject faults continuously, and check every answer",
    "top": "show live what services do, from their metrics",
    "docs": "print a page of the documentation",
    "autotune": "measure all candidate plans for your problems, and store the fastest on disk",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status; see the table in the module's docstring.

    Parameters
    ----------
    argv
        The arguments after the program's name; None for the process's own.

    Raises
    ------
    SystemExit
        Raised by argparse: status 2 for invalid arguments, 0 after `--help` and `--version`.
    """
    _never_fail_over_a_character()
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        parser, run = _parser(words)
        args = parser.parse_args(words)
        if run is None:
            parser.print_help(sys.stderr)
            return 2
        with LogBook(live=args.verbose) as logbook:
            status = run_command(run, args, logbook)
        if sys.stdout is not None:
            sys.stdout.flush()
    except UserError as error:
        print(f"cudnn-actor: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        if not _output_is_shut():
            raise
        return 141  # a shell's status for a program that SIGPIPE has ended
    return status


def _output_is_shut() -> bool:
    """Whether nobody reads the output any more. If so, the rest of the output is discarded."""
    output = select.poll()
    output.register(sys.stdout, 0)  # errors are always reported
    if not any(event & select.POLLERR for _, event in output.poll(0)):
        return False
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
    return True


def run_command(run: Callable[[argparse.Namespace], int], args: argparse.Namespace, logbook: LogBook) -> int:
    """Run a command. Returns its exit status: 1 if it has failed, and then what was logged is printed."""
    try:
        status = run(args)
    except KeyboardInterrupt:
        return 130
    except CudnnActorError as error:
        print(f"cudnn-actor: {type(error).__name__}: {error}", file=sys.stderr)
        status = 1
    if status == 1:
        logbook.print()
    return status


def _parser(words: Sequence[str]) -> tuple[argparse.ArgumentParser, Callable[..., int] | None]:
    """The parser, and the function that runs the given command; None if no known command is given."""
    parser = argparse.ArgumentParser(
        prog="cudnn-actor", description="One supervised actor per GPU that owns cuDNN."
    )
    parser.add_argument("--version", action="version", version=f"cudnn-actor {cudnn_actor.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND")
    run: Callable[..., int] | None = None
    asked = words[0] if words else ""
    minimal = importlib.util.find_spec("cudnn_actor.trials") is None
    for name, summary in _COMMANDS.items():
        listed: dict[str, Any] = (
            {} if minimal and name in _TRIALS else {"help": summary}
        )  # a command without help is not listed
        command = commands.add_parser(name, description=f"{summary[0].upper()}{summary[1:]}.", **listed)
        if name == asked:
            module = _module_of(name)
            module.add_arguments(command)
            command.add_argument("-v", "--verbose", action="store_true", help="show the log as it is written")
            run = module.run
    return parser, run


def _module_of(command: str) -> Any:
    """The module of a command. Raises `UserError` for a command that this installation does not have."""
    try:
        return importlib.import_module(f"cudnn_actor.{'trials' if command in _TRIALS else 'cli'}.{command}")
    except ModuleNotFoundError as error:
        if error.name != "cudnn_actor.trials":
            raise
    raise UserError(
        f"this installation is a minimal one, without `{command}`: build it without CUDNN_ACTOR_MINIMAL"
    )


def _never_fail_over_a_character() -> None:
    """Make output to a terminal or a log with an old encoding print question marks instead of raising."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
