"""docs/semantics.md and the pages that it names agree with the code: options, log lines, errors, numbers."""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, get_args, get_origin

import pytest

from cudnn_actor import Health
from cudnn_actor.engines.cpu import transfer
from cudnn_actor.isolation import staging
from cudnn_actor.isolation.process.parent import (
    in_flight,
    monitor,
    process_isolation,
    recent_plans,
    values,
    worker_source,
)
from cudnn_actor.isolation.process.parent.process_isolation import ProcessIsolation
from cudnn_actor.isolation.thread.cudnn_actor import CudnnActor
from cudnn_actor.isolation.thread.thread_isolation import ThreadIsolation
from cudnn_actor.memory import ARENA_STEP, MemoryTable
from cudnn_actor.options import Options
from cudnn_actor.plan_store import store
from cudnn_actor.processes import channel, frames
from cudnn_actor.protocol import errors
from cudnn_actor.protocol.errors import StaleReason
from cudnn_actor.protocol.graphs.limits import GraphLimits
from cudnn_actor.protocol.messages.messages import Message
from cudnn_actor.protocol.operations import Operation
from cudnn_actor.service import HealthState, giving_up
from cudnn_actor.supervision import Fault, LifecycleEvent

from ..public_names import PUBLIC
from .page import PROMISES, ROOT, TEXT, figures, table, words
from .scenarios import EVERYWHERE, IN_PROCESS, ON_THREAD

CODE = ("cudnn_actor", "actors", "supervision", "protocol")
LOGGERS, LEVELS = {"log", "logger"}, {"debug", "info", "warning", "error", "exception"}


# Log lines.


class Line(NamedTuple):
    """A call in the code that writes a log line. What cannot be seen from the call is None."""

    name: str
    where: str
    level: str | None
    fields: frozenset[str] | None


def lines_of(path: Path) -> Iterator[Line]:
    text = path.read_text()
    if re.search(r"""["']([a-z_]+\.[a-z_]+)["']""", text) is None:
        return  # to parse a file takes longer
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and node.args and (name := name_of(node)) is not None:
            writer = ast.unparse(node.func)
            level = writer.rpartition(".")[2] if "." in writer and " " not in writer else None
            known = all(keyword.arg for keyword in node.keywords)
            fields = frozenset(keyword.arg or "" for keyword in node.keywords) - {"exc_info"}
            where = f"{path.relative_to(ROOT)}:{node.lineno}"
            yield Line(name, where, "error" if level == "exception" else level, fields if known else None)


def name_of(node: ast.Call) -> str | None:
    """The name of the log line that a call writes; None if it writes none."""
    first = node.args[0]
    if not isinstance(first, ast.Constant) or not isinstance(first.value, str):
        return None
    if re.fullmatch(r"[a-z_]+\.[a-z_]+", first.value) is None:
        return None
    writer = ast.unparse(node.func)
    plain = isinstance(node.func, ast.Attribute) and node.func.attr in LEVELS
    return first.value if plain or writer == "write" or " if " in writer else None


@functools.cache  # in the first test that asks, not while tests are collected: it reads all files
def written() -> list[Line]:
    """The log lines of the code, except those of the command line, which the page does not list."""
    paths = [path for folder in CODE for path in sorted((ROOT / folder).rglob("*.py"))]
    own = [path for path in paths if path.resolve() == path and "cli" not in path.parts]
    return [line for path in own for line in lines_of(path)]


def described() -> dict[str, tuple[set[str], set[str]]]:
    """The levels and fields of each log line, according to the page."""
    section = "Lifecycle events and log lines"
    rows = [row[1:] for row in table(section, "event").rows] + [*table(section, "other log lines").rows]
    return {
        name: (set(re.findall(r"\w+", level)), fields_of(fields))
        for names, level, fields, *_ in rows
        for name in words(names)
    }


def fields_of(cell: str) -> set[str]:
    return set(re.findall(r"\w+", re.sub(r"\(.*?\)", "", cell)))


DESCRIBED = described()


def test_the_page_lists_exactly_the_log_lines_of_the_code() -> None:
    assert {line.name for line in written()} == set(DESCRIBED)


@pytest.mark.parametrize("name", sorted(DESCRIBED))
def test_a_log_line_has_the_level_and_the_fields_that_the_page_says(name: str) -> None:
    levels, fields = DESCRIBED[name]
    for line in (line for line in written() if line.name == name):
        assert line.level is None or line.level in levels, line.where
        assert line.fields is None or line.fields <= fields, line.where


@pytest.mark.parametrize("name", sorted(DESCRIBED))
def test_a_field_that_the_page_names_is_written_somewhere(name: str) -> None:
    known = [line.fields for line in written() if line.name == name and line.fields is not None]
    assert not known or DESCRIBED[name][1] == frozenset().union(*known)


def test_every_log_line_that_the_text_of_the_page_names_is_in_its_table() -> None:
    families = {name.partition(".")[0] for name in DESCRIBED}
    named = set(re.findall(r"`([a-z_]+\.[a-z_]+)`", TEXT))
    assert {name for name in named if name.partition(".")[0] in families} <= set(DESCRIBED)


def test_every_lifecycle_event_is_on_the_page_with_its_fields() -> None:
    rows = table("Lifecycle events and log lines", "event").rows
    assert {name for row in rows for name in words(row[0])} == {
        kind.__name__ for kind in get_args(LifecycleEvent)
    }


# Options, faults, errors, messages.


def test_every_option_is_on_the_page_with_its_default() -> None:
    rows = table("What spawn takes", "option").rows
    names = {"GraphLimits": GraphLimits}
    said = {words(option)[0]: eval(words(default)[0], names) for option, default, _ in rows}
    options = Options()
    assert said == {name: getattr(options, name) for name in Options.__struct_fields__}


def test_every_fault_is_on_the_page() -> None:
    assert {words(name)[0] for name in table("Scripted faults", "fault").column("fault")} == set(
        Fault.__members__
    )


def test_every_error_that_a_caller_can_get_is_on_the_page() -> None:
    classes = [one for one in vars(errors).values() if inspect.isclass(one)]
    kinds = {one.__name__ for one in classes if issubclass(one, errors.CudnnActorError)}
    kinds -= {"CudnnActorError", "OperationError"}  # bases of others
    ends = {
        name
        for cell in table("Delivery", "a request ends in").column("a request ends in")
        for name in words(cell)
    }
    assert kinds <= ends
    assert {name for name in ends - kinds if "." not in name} == set()


def test_every_reason_of_a_stale_buffer_is_on_the_page() -> None:
    said = {words(cell)[0] for cell in table("Buffers and references", "reason").column("reason")}
    assert said == {str(reason) for reason in StaleReason}


def test_every_message_is_said_to_be_pure_or_not() -> None:
    said = {name for cell in table("Delivery", "message").column("message") for name in words(cell)}
    kinds = {get_origin(kind) or kind for kind in get_args(Message)}
    # Operations are all alike: the page names some, and their base.
    operations = {kind.__name__ for kind in kinds if issubclass(kind, Operation)}
    others = {kind.__name__ for kind in kinds} - operations
    assert {name for name in said if name.isidentifier()} - operations == others | {Operation.__name__}


def test_every_state_and_field_of_a_health_record_is_on_the_page() -> None:
    states = {
        words(cell)[0].strip('"') for cell in table("Health", "`health().state`").column("`health().state`")
    }
    assert states == {str(state) for state in HealthState}
    fields = {words(cell)[0] for cell in table("Health", "field").column("field")}
    assert fields | {"state"} == set(Health.__struct_fields__)


def test_classes_that_the_page_names_exist() -> None:
    used = {name for name in words(TEXT) if re.fullmatch(r"[A-Z][a-z]+(?:[A-Z][a-z]+)+", name)}
    foreign = used - {*PUBLIC, *errors.__all__, *dir(builtins)}
    others = {"ActorDeadError", "NullHandler", "ProcessorFormatter", "ExtraAdder"}
    assert foreign <= others, "only classes of pykka, logging and structlog may be missing"


# Numbers.


def test_the_time_limits_for_ending_a_worker_are_those_of_the_code() -> None:
    rows = table("Stopping", "step").rows
    assert [figures(row[-1])[0] for row in rows] == [monitor.ASKED_S, monitor.TERMINATED_S, monitor.KILLED_S]
    assert all(word in row[1] for word, row in zip(("message", "SIGTERM", "SIGKILL"), rows, strict=True))


PAUSES = worker_source._PAUSES
PROCESS_BACKOFF, THREAD_BACKOFF = ProcessIsolation.backoff, ThreadIsolation.backoff
OPTIONS, LIMITS = Options(), GraphLimits()
ARENA_BYTES = inspect.signature(MemoryTable).parameters["arena_bytes"].default
NUMBERS = [
    f"which has at most {in_flight.WINDOW} at a time",
    f"the (at most {CudnnActor.batch_limit}) messages of the present turn",
    f"in arenas of {ARENA_BYTES >> 20} MiB",
    f"It consists of segments of {staging.SEGMENT_BYTES >> 20} MiB",
    f"Up to {staging._IDLE_BYTES >> 20} MiB of unused segments",
    f"A result of over {staging.COPY_BYTES >> 10} KiB",
    f"Arrays of over {values.HEAVY_BYTES >> 10} KiB are copied on a thread",
    f"copies to a device and from it without a conversion, the bound is {staging.PIECE_BYTES >> 20} MiB",
    f"array of {2 * transfer._PART_BYTES >> 20} MiB or more",
    f"A frame is {frames.LONGEST >> 20} MiB at most",
    f"{channel._MOST_DESCRIPTORS} descriptors may wait for their frames",
    f"a heartbeat every {process_isolation._LONGEST_BEAT_S} s, or eight in `hang_after_s`",
    f"is given at least {monitor.BUILT_S:g} s for it",
    f"the most recently used plans built (at most {recent_plans.MOST_RECENT})",
    f"first {PAUSES.initial_s} s, then twice as long each time, at most {PAUSES.cap_s:g} s",
    f"Once a standby has lived for {PAUSES.reset_after_s:g} s, and been ready, the delays start anew",
    f"One that is not ready in {ProcessIsolation.ready_within_s:g} s is ended, and counts as dead",
    f"a start fails, or is not ready in {ThreadIsolation.ready_within_s:g} s",
    f"first {PROCESS_BACKOFF.initial_s * 1e3:g} ms, times {PROCESS_BACKOFF.factor:g} for each further "
    f"failure, at most {PROCESS_BACKOFF.cap_s:g} s",
    f"{THREAD_BACKOFF.initial_s * 1e3:g} ms, times {THREAD_BACKOFF.factor:g} for each failure in a row, "
    f"at most {THREAD_BACKOFF.cap_s:g} s",
    f"The delays start anew after a stable {THREAD_BACKOFF.reset_after_s:g} s",
    f"whose sizes are multiples of {ARENA_STEP >> 20} MiB",
    f"Arenas are taken in steps of {ARENA_STEP >> 20} MiB",
    f"if it is still running after {giving_up.EXIT_WITHIN_S:g} s",
    f"it is ended at once with status {giving_up.EXIT_STATUS}",
    f"| {OPTIONS.mailbox:,} | `mailbox` |",
    f"| restarts within {OPTIONS.period_s:g} seconds | {OPTIONS.max_restarts} | `max_restarts`, `period_s` |",
    f"| {OPTIONS.plan_capacity} | `plan_capacity` |",
    f"| {OPTIONS.cache_limit >> 20} MiB | `cache_limit` |",
    f"| {LIMITS.operations:,}, {LIMITS.nbytes >> 20} MiB | `graph_limits` |",
    f"| files of a [plan store](plans.md#plans-on-disk) | {store.LIMIT_BYTES >> 20} MiB |",
]


@pytest.mark.parametrize("sentence", NUMBERS)
def test_a_number_on_the_page_is_that_of_the_code(sentence: str) -> None:
    assert sentence in TEXT


def test_the_numbers_in_words_are_those_of_the_code() -> None:
    assert (process_isolation._BEATS_PER_HANG, worker_source._SILENT_BEATS) == (8, 8), "the page says eight"
    assert (PAUSES.factor, PAUSES.at_once) == (2.0, 1), (
        "the page says: the first at once, then twice as long each time"
    )
    assert (PROCESS_BACKOFF.at_once, PROCESS_BACKOFF.reset_after_s) == (1, 0.0), (
        "the page says: at once for the first failure in a row, which ends when the actor becomes ready"
    )
    assert THREAD_BACKOFF.jitter == PROCESS_BACKOFF.jitter == 0.25, "the page says: up to a quarter less"


# The page of promises.


def test_the_promises_fit_on_two_pages() -> None:
    assert len(PROMISES.read_text().splitlines()) <= 150


SAID_IN_SHORT = [
    ("the worker, however", "the worker is killed, or exits", IN_PROCESS),
    ("the worker, however", "the device context dies", IN_PROCESS),
    ("the worker, however", "the actor hangs", IN_PROCESS),
    ("the actor on a thread, on the CPU", "the device context dies", ("thread, CPU",)),
    ("the actor on a thread, on the CPU", "the actor hangs", ("thread, CPU",)),
    ("the device context, on a thread", "the device context dies", ("thread, CUDA",)),
    ("a thread that hangs", "the actor's thread hangs and does not end", ON_THREAD),
    ("the standby,", "the standby dies", IN_PROCESS),
    ("the worker or the actor, and no restart is left", "no restart is left", EVERYWHERE),
    ("your process", "your process is killed", EVERYWHERE),
]
"""Rows of the promises' table, and the row and the columns of the long table that say the same."""


@pytest.mark.parametrize(("short", "long", "columns"), SAID_IN_SHORT)
def test_what_dies_leaves_the_same_buffers_in_the_short_table_as_in_the_long_one(
    short: str, long: str, columns: tuple[str, ...]
) -> None:
    kept = {"stay": "all", "stay, except torn ones": "buffers", "are lost": "nothing"}
    promises, survives = (
        table("What happens when something dies", "what ends"),
        table("What survives a failure", "failure"),
    )
    (promise,) = [row for row in promises.rows if row[0].startswith(short)]
    (row,) = [row for row in survives.rows if row[0] == long]
    assert {row[survives.columns.index(column)] for column in columns} == {kept[promise[1]]}
