"""Log lines in other people's programs: silent unless they ask, through their loggers, in their formats."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import io
import json
import logging
import logging.handlers
import queue
import re
import subprocess
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import structlog
from structlog.typing import EventDict

import cudnn_actor.logging
from cudnn_actor import CudnnRef, Fault, FaultPlan, ServiceStopped
from cudnn_actor.messages import Fill

from .. import forked_programs
from ..log_lines import handled_by, line
from ..patience import PATIENCE_S
from .rigs import Trio, single, spawn, start

LOGGER = logging.getLogger("cudnn_actor")
A_CRASH = FaultPlan().at(1, Fault.STICKY, of=Fill)
PROGRAM = """
import asyncio, json, logging, os, signal, sys
import numpy as np
from cudnn_actor import Fault, FaultPlan, spawn
from cudnn_actor.messages import Fill

{configuration}

async def main():
    faults = FaultPlan().at(1, Fault.STICKY, of=Fill)
    async with spawn(device="cpu", name="left", {options}) as gpu:
        x = await gpu.upload(np.ones((1, 1, 2, 2), "float32"))
        if gpu.worker_pid is not None:
            os.kill(gpu.worker_pid, signal.SIGKILL)
        await gpu.fill(x, 2.0)
        gpu.tell(Fill(dst=x, value=1e300))
        print(json.dumps({{"sum": float((await gpu.download(x)).sum()), "generation": gpu.generation}}))

asyncio.run(main())
"""
OPTIONS = {
    "thread": 'isolation="thread", faults=faults',
    "process": 'isolation="process"',
    "standby": 'isolation="process", standby=1, faults=faults, verify=True',
}


def run(options: str, configuration: str = "") -> subprocess.CompletedProcess[str]:
    code = PROGRAM.format(options=options, configuration=configuration)
    done = forked_programs.run(["-W", "error", "-c", code], timeout=PATIENCE_S, spare=True)
    assert done.returncode == 0, done.stderr
    return done


@contextlib.contextmanager
def formatted(formatter: logging.Formatter, level: int = logging.DEBUG) -> Iterator[list[str]]:
    """What a handler of the user's, at the root's loggers or ours, would print."""
    lines: list[str] = []
    with handled_by(lambda record: lines.append(formatter.format(record))):
        LOGGER.setLevel(level)
        yield lines


async def live_and_crash(**options: Any) -> None:
    async with spawn(device="cpu", faults=A_CRASH, **options) as gpu:
        await gpu.fill(await gpu.upload(single(1.0)), 2.0)


# Nothing is printed that nobody asked for.


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_a_program_that_prints_json_prints_nothing_else_though_the_worker_crashes(options: str) -> None:
    done = run(options)
    assert json.loads(done.stdout)["sum"] == 8.0
    assert json.loads(done.stdout)["generation"] >= 2
    assert done.stderr == ""


def test_the_logger_has_a_null_handler_so_that_warnings_are_not_printed_either() -> None:
    assert [type(handler) for handler in LOGGER.handlers].count(logging.NullHandler) == 1


# The standard library's configuration counts.


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_with_basic_config_each_line_reads_well_and_says_whose_it_is(options: str) -> None:
    done = run(options, "logging.basicConfig(level=logging.INFO)")
    json.loads(done.stdout)
    lines = [line for line in done.stderr.splitlines() if ":cudnn_actor" in line]
    assert all(re.match(r"[A-Z]+:cudnn_actor[.a-z]*:[a-z_]+\.[a-z_]+ service=left ", line) for line in lines)
    assert any(line.startswith("INFO:cudnn_actor:device.chosen service=left device=cpu") for line in lines)
    assert "INFO:cudnn_actor.supervision:service.started service=left child=cudnn generation=1" in lines
    assert any("service.restarted service=left child=cudnn generation=2" in line for line in lines)
    assert any("actor.tell_failed" in line for line in lines)
    assert len(lines) == len([line for line in done.stderr.splitlines() if line]), done.stderr


def test_a_level_for_our_loggers_is_heeded_in_workers_too() -> None:
    quiet = run(
        OPTIONS["standby"],
        "logging.basicConfig(level='DEBUG'); logging.getLogger('cudnn_actor').setLevel(logging.WARNING)",
    )
    levels = {line.partition(":")[0] for line in quiet.stderr.splitlines() if ":cudnn_actor" in line}
    assert "WARNING" in levels
    assert levels <= {"WARNING", "ERROR"}


async def test_a_line_of_a_level_that_is_off_is_not_even_made() -> None:
    made: list[Any] = []
    factory = logging.getLogRecordFactory()

    def note(*args: Any, **given: Any) -> logging.LogRecord:
        made.append(args)
        return factory(*args, **given)

    logging.setLogRecordFactory(note)
    try:
        with formatted(logging.Formatter(), logging.CRITICAL) as lines:
            await live_and_crash()
    finally:
        logging.setLogRecordFactory(factory)
    assert (made, lines) == ([], [])


@pytest.mark.usefixtures("isolation")
async def test_a_record_has_the_event_the_fields_and_where_it_was_written() -> None:
    records: list[Any] = []
    with handled_by(records.append):
        await live_and_crash(name="left")
    (started,) = [record for record in records if record.msg == "service.started"]
    assert (started.event, started.service, started.child, started.generation) == (
        "service.started",
        "left",
        "cudnn",
        1,
    )
    assert (started.name, started.levelname, started.args) == ("cudnn_actor.supervision", "INFO", ())
    assert started.getMessage() == "service.started service=left child=cudnn generation=1"
    assert started.filename == "events.py"
    assert started.lineno in range(*lines_of("log_event"))


def lines_of(name: str) -> tuple[int, int]:
    from cudnn_actor.supervision import events

    source, first = inspect.getsourcelines(getattr(events, name))
    return first, first + len(source)


async def test_the_programs_own_record_factory_is_used() -> None:
    factory = logging.getLogRecordFactory()

    def traced(*args: Any, **given: Any) -> logging.LogRecord:
        record = factory(*args, **given)
        record.trace = "4711"
        return record

    logging.setLogRecordFactory(traced)
    try:
        with formatted(logging.Formatter("%(trace)s %(message)s")) as lines:
            await live_and_crash()
    finally:
        logging.setLogRecordFactory(factory)
    assert lines
    assert all(line.startswith("4711 ") for line in lines)


async def test_a_queue_handler_passes_each_line_on_as_it_reads() -> None:
    waiting: queue.Queue[Any] = queue.Queue()
    handler = logging.handlers.QueueHandler(waiting)
    with handled_by(handler.emit):
        await live_and_crash(name="left")
    records = [waiting.get() for _ in range(waiting.qsize())]
    messages = [record.getMessage() for record in records]
    assert "service.started service=left child=cudnn generation=1" in messages
    assert all(record.service == "left" for record in records)


# structlog's users.


async def test_structlogs_formatter_gets_event_and_fields_apart() -> None:
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[structlog.stdlib.add_log_level, structlog.stdlib.ExtraAdder()],
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            structlog.processors.JSONRenderer(),
        ],
    )
    with formatted(formatter) as lines:
        await live_and_crash(name="left")
    told = [json.loads(line) for line in lines]
    (started,) = [line for line in told if line["event"] == "service.started"]
    wanted = {"level": "info", "service": "left", "child": "cudnn", "generation": 1}
    assert wanted.items() <= started.items()
    assert "fields" not in started


async def test_what_the_program_configured_of_structlog_is_neither_needed_nor_changed() -> None:
    def refuse(*_: object) -> Any:
        raise AssertionError("the program's own structlog was used")

    before = structlog.get_config()
    structlog.configure(processors=[refuse], logger_factory=refuse, wrapper_class=None)
    ours = structlog.get_config()
    try:
        with formatted(logging.Formatter()) as lines:
            await live_and_crash()
        assert structlog.get_config() == ours
    finally:
        structlog.configure(**before)
    assert any(line.startswith("service.restarted ") for line in lines)


@pytest.mark.usefixtures("isolation")
async def test_a_context_variable_may_have_any_name(logs: list[EventDict]) -> None:
    names = {
        "name": "n",
        "msg": "m",
        "message": "x",
        "process": 1,
        "getMessage": 2,
        "fields": 3,
        "args": "%s",
    }
    records: list[Any] = []
    with handled_by(records.append), structlog.contextvars.bound_contextvars(**names):
        async with spawn(device="cpu", faults=FaultPlan().at(2, Fault.SLOW, seconds=0.0)) as gpu:
            await gpu.fill(await gpu.upload(single(1.0)), 2.0)
    (record,) = [record for record in records if record.msg == "fault.injected"]
    assert (record.name, record.name_, record.process_, record.message_) == ("cudnn_actor", "n", 1, "x")
    assert "args=%s fields=3 getMessage=2 message=x msg=m name=n process=1" in record.getMessage()


# Which service.


async def test_the_name_stands_in_every_line_of_either_service(logs: list[EventDict], isolation: str) -> None:
    async def live(name: str) -> None:
        with contextlib.suppress(ServiceStopped):
            async with spawn(device="cpu", name=name, faults=A_CRASH, max_restarts=9) as gpu:
                trio = await Trio.on(gpu)
                await gpu.fill(trio.x, 2.0)
                gpu.tell(Fill(dst=trio.x, value=float("nan")))
                await gpu.ask(trio.product())

    await asyncio.gather(live("left"), live("right"))
    assert {line.get("service") for line in logs} == {"left", "right"}
    for name in ("left", "right"):
        events = {line["event"] for line in logs if line["service"] == name}
        assert {"device.chosen", "service.started", "fault.injected", "service.stopped"} <= events
        assert "request.interrupted" in events


async def test_a_service_without_a_name_is_called_cudnn(logs: list[EventDict]) -> None:
    await live_and_crash()
    assert {line.get("service") for line in logs} == {"cudnn"}


async def test_a_standby_s_lines_say_whose_it_is(logs: list[EventDict]) -> None:
    async with spawn(device="cpu", isolation="process", name="left", standby=1, faults=A_CRASH) as gpu:
        await line(logs, "standby.ready")
        await gpu.fill(await gpu.upload(single(1.0)), 2.0)
    assert {line.get("service") for line in logs} == {"left"}
    assert "standby.promoted" in [line["event"] for line in logs]


# Ours, for those who want it.


@pytest.fixture
def ours() -> io.StringIO:
    """A stream for `configure`, whose handler is taken off at the end of each test (`handled_by`)."""
    return io.StringIO()


def test_configure_prints_one_json_object_a_line(ours: io.StringIO, isolation: str) -> None:
    cudnn_actor.logging.configure(json=True, level="DEBUG", stream=ours)
    service = start(device="cpu", name="left", faults=A_CRASH)
    gpu = CudnnRef(service)
    asyncio.run(crash(gpu))
    service.stop()
    lines = [json.loads(line) for line in ours.getvalue().splitlines()]
    (restarted,) = [line for line in lines if line["event"] == "service.restarted"]
    assert restarted.keys() == {
        *("timestamp", "level", "logger", "event"),
        *("service", "child", "generation", "downtime_s"),
    }
    assert (restarted["level"], restarted["logger"]) == ("info", "cudnn_actor.supervision")
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:.]{15}\+00:00", line["timestamp"]) for line in lines)


async def crash(gpu: CudnnRef) -> None:
    await gpu.fill(await gpu.upload(single(1.0)), 2.0)


async def test_configure_prints_text_of_the_level_asked_for_and_the_last_call_counts(
    ours: io.StringIO,
) -> None:
    unused = io.StringIO()
    cudnn_actor.logging.configure(json=True, stream=unused)
    cudnn_actor.logging.configure(level="WARNING", stream=ours)
    await live_and_crash(name="left")
    lines = ours.getvalue().splitlines()
    assert unused.getvalue() == ""
    assert all(
        re.match(r"\d{4}-\d\d-\d\d [\d:]{8}\.\d{3} (WARNING|ERROR) [a-z_]+\.[a-z_]+ ", line) for line in lines
    )
    assert any("service.restarting service=left child=cudnn" in line for line in lines)


@pytest.mark.parametrize("level", ["LOUD", None, 1.5])
def test_a_level_that_is_none_is_refused_and_changes_nothing(ours: io.StringIO, level: Any) -> None:
    before = LOGGER.level, LOGGER.propagate, LOGGER.handlers[:]
    with pytest.raises((ValueError, TypeError)):
        cudnn_actor.logging.configure(level=level, stream=ours)
    assert (LOGGER.level, LOGGER.propagate, LOGGER.handlers[:]) == before


@pytest.mark.parametrize("as_json", [True, False])
def test_a_traceback_is_text_behind_its_line(ours: io.StringIO, as_json: bool) -> None:
    from cudnn_actor.actors.logs import Log

    cudnn_actor.logging.configure(json=as_json, stream=ours)
    try:
        1 // 0  # noqa: B018
    except ZeroDivisionError:
        Log("cudnn_actor.test").exception("test.failed", value=np.float32(1.5))
    if as_json:
        (line,) = [json.loads(line) for line in ours.getvalue().splitlines()]
        assert line["event"] == "test.failed"
        assert line["exception"].endswith("ZeroDivisionError: integer division or modulo by zero")
    else:
        first, *_, last = ours.getvalue().splitlines()
        assert first.endswith("ERROR test.failed value=1.5") or "test.failed value=" in first
        assert last == "ZeroDivisionError: integer division or modulo by zero"


def test_a_stream_that_is_closed_costs_the_line_and_nothing_else(
    ours: io.StringIO, capsys: pytest.CaptureFixture[str]
) -> None:
    cudnn_actor.logging.configure(stream=ours)
    ours.close()
    service = start(device="cpu")
    assert service.actor_ref.is_alive()
    service.stop()
    assert capsys.readouterr() == ("", "")
