"""The chaos harness: what it counts and asks, its programs repeat, and a service that works passes."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from structlog.typing import EventDict

from cudnn_actor import CudnnRef, spawn
from cudnn_actor.protocol import (
    Allocate,
    Download,
    DType,
    OutcomeUnknown,
)
from cudnn_actor.protocol.operations import OPERATIONS
from cudnn_actor.supervision import Fault, FaultPlan
from cudnn_actor.trials.chaos.answers import VALUES, Answers
from cudnn_actor.trials.chaos.computations import HEAVY, message, updated_inputs
from cudnn_actor.trials.chaos.faults import FaultKind
from cudnn_actor.trials.chaos.graph_computation import GraphComputation
from cudnn_actor.trials.chaos.graphs import LOAD
from cudnn_actor.trials.chaos.load_kinds import LoadKind
from cudnn_actor.trials.chaos.loop_computation import LoopComputation
from cudnn_actor.trials.chaos.one_run import Outcome, run_once
from cudnn_actor.trials.chaos.oracle import Contents, Deed, Model, Oracle, Wrong
from cudnn_actor.trials.chaos.report import faults_met, print_report, report_of
from cudnn_actor.trials.chaos.settings import STALL_S, Settings
from cudnn_actor.trials.chaos.strikes import fault_plan
from cudnn_actor.trials.chaos.tally import Tally
from cudnn_actor.trials.chaos.task_program import bursts, problems_of, program

from ..forked_programs import Program
from ..log_lines import line
from ..patience import PATIENCE_S
from .chaos_rigs import (
    RECEIPT,
    Asked,
    accumulation,
    buffer,
    download,
    fill,
    values,
)
from .chaos_until import chaos_until
from .terminal import cudnn_actor_here, forked
from .test_demo import INTERRUPTIBLE

STUCK_S = PATIENCE_S / 10
"""Seconds: no request of a short run takes as long, however slow the machine, unless nothing wakes it up."""
WITHOUT_WORKERS = """
import sys
sys.executable = "/nowhere/python"
from cudnn_actor.cli import main
sys.exit(main(sys.argv[1:]))
"""
HANGING_FORKSERVER = """
import sys, threading
if "cudnn_actor.processes.forkserver" in sys.orig_argv:
    threading.Event().wait()
"""
SIGNAL_FOR_ANOTHER_THREAD = """
import signal, sys, threading, time
from cudnn_actor.cli import main
signal.signal(signal.SIGINT, signal.default_int_handler)
def waits():
    frame = sys._current_frames()[threading.main_thread().ident]
    return frame.f_code is threading.Condition.wait.__code__
def interrupt():
    while signal.getsignal(signal.SIGINT) is signal.default_int_handler or not waits():
        time.sleep(0.01)
    signal.pthread_kill(threading.get_ident(), signal.SIGINT)
threading.Thread(target=interrupt, daemon=True).start()
sys.exit(main(sys.argv[1:]))
"""
UNKNOWN = OutcomeUnknown(request_id=1, cause="killed", why="it accumulates")


# What it counts.


def test_a_request_that_takes_too_long_is_a_stall_before_it_ends_and_after() -> None:
    now = 0.0
    tally = Tally(clock=lambda: now)
    slow, quick = Asked(), Asked()
    tally.note_sent(slow, fill(buffer(1), 7), LoadKind.PYKKA, task=3, burst=4)
    now = STALL_S + 1
    tally.note_sent(quick, fill(buffer(2), 7), LoadKind.TASKS, task=1, burst=1)
    assert [(stall.sender, stall.task, stall.burst) for stall in tally.stalled_requests()] == [
        ("pykka", 3, 4)
    ]
    for request in (slow, quick):
        tally.note_outcome(request, RECEIPT)
    assert [stall.took_s for stall in tally.stalled_requests()] == [STALL_S + 1]
    assert tally.longest_s == STALL_S + 1
    assert tally.senders == {LoadKind.PYKKA: 1, LoadKind.TASKS: 1}


def test_a_stall_is_told_with_the_faults_of_processes_that_it_met(
    capsys: pytest.CaptureFixture[str],
) -> None:
    now = 0.5
    tally = Tally(clock=lambda: now)
    tally.note_fault(FaultKind.KILL)
    now = 1.0
    request = Asked()
    tally.note_sent(request, fill(buffer(1), 7), LoadKind.PYKKA, task=3, burst=4)
    for kind in (FaultKind.KILL, FaultKind.HANG_STANDBY, FaultKind.FAIL):
        now += 1.0
        tally.note_fault(kind)
    now += STALL_S
    tally.note_outcome(request, RECEIPT)
    report = report_of(Settings(), tally, Outcome("cpu", [], {}, None, "", now, ()))
    assert faults_met(report, report.stalls[0]) == {"kill": 1, "hang-standby": 1}
    print_report(report, Console(width=300))
    said = capsys.readouterr().out
    assert "it met kill: 1, hang-standby: 1)" in said
    assert "each stalled request met at least 2 faults of processes" in said


def test_time_in_which_the_harness_did_not_run_is_no_stall() -> None:
    now = 0.0
    tally = Tally(clock=lambda: now)
    request = Asked()
    tally.note_sent(request, fill(buffer(1), 7), LoadKind.TASKS, task=1, burst=1)
    now = 3600.0
    tally.excuse(3599.0)
    assert tally.stalled_requests() == []
    tally.note_outcome(request, RECEIPT)
    assert (tally.stalled_requests(), tally.longest_s) == ([], 1.0)


def test_a_life_lasts_until_its_end_and_is_noted_with_its_first_answer() -> None:
    now = 0.0
    tally = Tally(clock=lambda: now)

    def answer() -> None:
        request = Asked()
        tally.note_sent(request, fill(buffer(1), 7), LoadKind.TASKS, task=1, burst=1)
        tally.note_outcome(request, RECEIPT)

    now = 1.0
    answer()
    tally.ends(1)
    now = 3.0
    served = [tally.served_s]
    tally.serves(2)
    now = 4.0
    assert [*served, tally.served_s] == [None, 1.0]
    tally.ends(2)
    tally.ends(3)  # a signal meets a worker before it is told that this serves
    tally.serves(3)
    now = 5.0
    tally.serves(4)
    now = 7.0
    answer()
    answer()
    assert tally.lives() == [(0, 1, 1, 1), (3, 1, 0, None), (4, 0, 0, None), (5, 2, 2, 2)]
    life = report_of(Settings(), tally, Outcome("cpu", [], {}, None, "", now, ())).life
    assert (life.lives, life.served_s, life.idle, life.first_max_ms) == (4, 4.0, 1, 2000.0)


def test_a_record_names_the_model_s_file_without_its_folder() -> None:
    tally = Tally(clock=lambda: 0.0)
    settings = Settings(model="/home/someone/net.onnx")
    report = report_of(settings, tally, Outcome("cpu", [], {}, None, "", 1.0, ()))
    assert report.settings == Settings(model="net.onnx")


# What it knows and what it asks.


FORMS = [(number, form) for number, problem in enumerate(LOAD) for form in problem.forms]
IMPURE = [number for number, problem in enumerate(LOAD) if updated_inputs(problem.operations[0])]


async def test_the_answers_are_those_of_the_engine() -> None:
    answers, oracle = Answers(seed=3), Oracle()
    async with spawn(device="cpu") as gpu:
        for number, operation in FORMS:
            problem, numbers = LOAD[number], itertools.cycle(range(VALUES))
            inputs = {
                name: answers.value(number, role, next(numbers))
                for name, role in operation.named(operation.inputs)
            }
            specs = problem.specs_of(operation)
            refs = {
                name: await gpu.upload(array, layout=specs[name].layout) for name, array in inputs.items()
            }
            outputs = [name for name, _ in operation.named(operation.outputs)]
            new = [name for name in outputs if name not in refs]  # a graph's state is both
            refs |= {name: await gpu.ask(Allocate(spec=specs[name])) for name in new}
            await gpu.ask(message(operation, refs))
            results = answers.results(number, operation, inputs)
            assert set(results) == set(outputs)
            for name in outputs:
                model = Model(refs[name], (results[name],), tolerance=problem.tolerance)
                assert oracle.judge([download(model)], [await gpu.download(refs[name])]) == [], (number, name)


def test_the_load_has_every_operation() -> None:
    """A new one is one more row of the table."""
    assert {type(operation) for _, operation in FORMS} == {*OPERATIONS, GraphComputation, LoopComputation}


def test_the_load_has_graphs_with_several_outputs_and_graphs_with_state() -> None:
    graphs = [form.graph for _, form in FORMS if isinstance(form, GraphComputation)]
    assert any(len(graph.outputs) > 3 and graph.body.pure for graph in graphs)
    states = [LOAD[n].specs[role].dtype for n in IMPURE for role in updated_inputs(LOAD[n].operations[0])]
    assert {*states} == {DType.FLOAT32, DType.INT64}


async def ran(number: int, gpu: CudnnRef, times: int, told: int) -> list[Wrong]:
    """What the judge says of a graph that ran `times` times and was acknowledged `told` times."""
    answers, problem = Answers(seed=3), LOAD[number]
    (operation,) = problem.operations
    models = {}
    for name, role in operation.named():
        value = answers.value(number, role, 1) if role in problem.inputs else None
        ref = await gpu.ask(Allocate(spec=problem.specs[role], data=value))
        models[name] = Model(ref, None if value is None else (value,), tolerance=problem.tolerance)
    request = message(operation, {name: model.ref for name, model in models.items()})
    outputs = [name for name, _ in operation.named(operation.outputs)]

    def after(name: str) -> Callable[[], Contents]:
        def results() -> Contents:
            held = {n: models[n].contents for n, _ in operation.named(operation.inputs)}
            given = {n: contents[0] for n, contents in held.items() if contents is not None}
            return (answers.results(number, operation, given)[name],)

        return results

    oracle, wrongs = Oracle(), []
    for count in range(times):
        receipt = await gpu.ask(request)
        if count < told:
            deed = Deed(
                request, tuple(models.values()), {models[n]: after(n) for n in outputs}, accumulates=True
            )
            wrongs += oracle.judge([deed], [receipt])
    for name in outputs:
        wrongs += oracle.judge([download(models[name])], [await gpu.download(models[name].ref)])
    return wrongs


@pytest.mark.parametrize("number", IMPURE)
async def test_a_graph_that_is_applied_to_its_state_once_too_often_or_too_rarely_is_noticed(
    number: int,
) -> None:
    async with spawn(device="cpu") as gpu:
        assert await ran(number, gpu, 3, 3) == []
        assert await ran(number, gpu, 3, 2) != []


def test_requests_that_read_what_they_write_are_counted_by_their_outcome() -> None:
    tally = Tally()
    y, amount = buffer(1, (values(0, 0, 0, 0),)), values(1, 2, 3, 4)
    for outcome in (RECEIPT, UNKNOWN, RECEIPT):
        for deed in (accumulation(y, amount), fill(y, 7)):
            request = Asked()
            tally.note_sent(request, deed, LoadKind.TASKS, task=1, burst=1)
            tally.note_outcome(request, outcome)
    assert +tally.impure == {"applied": 2, "OutcomeUnknown": 1}


def test_programs_have_the_problems_that_the_engine_runs() -> None:
    """On CUDA, what recurrent layers keep for their gradients stays within a graph."""
    settings = Settings(seconds=1.0, engine="cuda", seed=3)
    allowed = problems_of(settings)
    kinds = {operation.kind for number in allowed for operation in LOAD[number].operations}
    assert "recurrent_bwd_data" not in kinds
    steps = itertools.chain.from_iterable(itertools.islice(bursts(settings, 0), 2000))
    assert {step.problem for step in steps} <= set(allowed)


def test_so_many_problems_are_drawn_by_the_seed_and_the_large_one_with_uploads() -> None:
    settings = Settings(problems=5, seed=3)
    drawn = [*problems_of(settings)]
    assert len(set(drawn)) == 6
    assert HEAVY in drawn
    assert drawn == problems_of(settings) != problems_of(Settings(problems=5, seed=4))
    assert drawn == sorted(drawn)
    assert len(problems_of(Settings(problems=5, load=(LoadKind.TASKS,)))) == 5
    assert len(problems_of(Settings(problems=len(LOAD)))) == len(problems_of(Settings())) == len(LOAD)


def test_inputs_are_the_same_in_whatever_order_they_are_asked_for() -> None:
    wanted = [(problem, role) for problem in range(3) for role in LOAD[problem].inputs]
    one, other = Answers(1), Answers(1)
    found = {each: one.value(*each, 0) for each in wanted}
    for each in reversed(wanted):
        assert np.array_equal(other.value(*each, 0), found[each])
        assert one.value(*each, 0) is found[each]


def test_a_seed_decides_the_programs() -> None:
    def beginning(seed: int, task: int) -> list[object]:
        return list(itertools.islice(program(seed, task, range(5)), 200))

    assert beginning(7, 1) == beginning(7, 1)
    assert beginning(7, 1) != beginning(8, 1)
    assert beginning(7, 1) != beginning(7, 2)


def test_a_seed_decides_what_is_injected() -> None:
    assert fault_plan(Settings(seed=7)) == fault_plan(Settings(seed=7))
    assert fault_plan(Settings(seed=7)) != fault_plan(Settings(seed=8))
    assert fault_plan(Settings(faults=(FaultKind.KILL, FaultKind.HANG))).rules == ()


def test_a_run_that_goes_on_slowly_has_lost_nothing() -> None:
    now_s = 0.0
    tally = Tally(clock=lambda: now_s)
    tally.begin()
    request = Asked()
    tally.note_sent(request, fill(buffer(1), 7), LoadKind.TASKS, task=1, burst=1)
    now_s = 50.0
    assert tally.unmoved_s(15.0) == 35.0
    tally.note_outcome(request, RECEIPT)
    assert tally.unmoved_s(15.0) == 0.0, "a request has just ended, after the end of the load"
    now_s = 60.0
    tally.note_fault(FaultKind.MEMORY)
    assert tally.unmoved_s(15.0) == 10.0
    tally.note_fault(FaultKind.KILL, 1)
    assert tally.unmoved_s(15.0) == 0.0


# Whole runs.


async def test_a_lost_request_is_named(logs: list[EventDict]) -> None:
    settings = Settings(
        seconds=600.0,
        isolation="thread",
        faults=(),
        load=(LoadKind.TASKS,),
        tasks=2,
        problems=9,
        hang_after_s=60.0,
        deadline_s=0.2,
    )
    never_ends = FaultPlan().at(30, Fault.HANG, of=Download)  # only the load downloads
    tally, ending = Tally(), threading.Event()
    running = asyncio.create_task(run_once(settings, tally, ending, faults=never_ends))
    await line(logs, "fault.injected")
    ending.set()
    outcome = await running
    assert 1 <= len(outcome.lost) <= tally.requests - tally.ended_requests
    assert all(lost.task in (1, 2) and re.search(r"(float32|int64)\[", lost.request) for lost in outcome.lost)


async def test_a_run_without_faults_has_no_errors_but_its_own() -> None:
    load = (LoadKind.TASKS, LoadKind.CANCELS)
    settings = Settings(
        seconds=float(PATIENCE_S), isolation="thread", faults=(), load=load, tasks=4, problems=9
    )
    tally, ending = Tally(), threading.Event()
    running = asyncio.create_task(run_once(settings, tally, ending))
    while tally.finished <= 300 and not running.done():  # noqa: ASYNC110 - nothing tells of a number
        await asyncio.sleep(0.01)
    ending.set()
    outcome = await running
    assert (outcome.lost, tally.wrongs, outcome.stopped) == ([], [], "")
    assert set(tally.outcomes) <= {"CancelledError", "DeadlineExceeded"}
    assert tally.finished > 300
    assert outcome.statistics is not None
    assert outcome.statistics.live_buffers == 0


FEW = ["--seed", "7", "--problems", "24"]
"""For a run of a moment: what all problems need at its beginning and end would take longer than it does."""


def test_nothing_is_lost_or_wrong_in_a_thread(tmp_path: Path) -> None:
    senders = ["tasks", "loops", "threads", "pykka", "alarms"]
    words = ["--isolation", "thread", "--kill-every", "0.2", "--without", "attached,doomed"]
    wanted = dict.fromkeys([*senders, "poison", "restarts", "RunGraph", "applied"], 1)
    # Few restarts: the service waits before each one of a thread, from the fifth in a row on about 5 s.
    done, record = chaos_until(wanted, tmp_path / "chaos.json", *words, *FEW)
    assert done.stderr == "", done.stdout
    assert "lost: 0   wrong: 0" in done.stdout
    assert done.returncode == int(record["counts"]["stalls"] > 0), done.stdout
    assert record["longest_s"] < STUCK_S, done.stdout
    assert record["settings"]["seed"] == 7
    assert set(record["recovery"]) == {"poison", "start", "fail", "memory"}
    assert set(record["senders"]) == set(senders)
    assert record["recovery"]["poison"]["faults"] == record["injected"]["sticky"] > 0
    assert record["counts"]["finished"] == sum(record["finished"]) > 0
    assert record["counts"]["restarts"] > 0
    assert sum(record["messages"].values()) <= record["counts"]["requests"]
    drawn = {operation.__name__ for operation in OPERATIONS} & set(record["messages"])
    assert drawn, "which of them are drawn in a moment is chance, and that all can be is another test's"
    assert record["messages"]["RunGraph"] > 0
    counts = record["counts"]
    assert 0 < counts["impure_applied"] <= counts["impure"] <= counts["answered"]


@pytest.mark.parametrize("standby", ["0", "1"])
def test_nothing_is_lost_or_wrong_in_a_process(standby: str, tmp_path: Path) -> None:
    words = ["--standby", standby, "--kill-every", "0.2", "--without", "attached,doomed"]
    wanted = {"kill|hang|poison": 2, "finished": 1}
    done, record = chaos_until(wanted, tmp_path / "chaos.json", *words, *FEW)
    counts = record["counts"]
    assert (counts["lost"], counts["wrong"], record["stuck"], record["stopped"]) == (0, 0, [], ""), (
        done.stdout
    )
    assert counts["finished"] > 0
    assert sum(record["recovery"][kind]["faults"] for kind in ("kill", "hang", "poison")) > 1
    assert done.returncode == int(counts["stalls"] > 0)  # on a busy machine, where a start takes seconds
    assert record["longest_s"] < STUCK_S, done.stdout


def test_a_worker_serves_for_a_while_before_it_is_killed(tmp_path: Path) -> None:
    words = ["--faults", "kill", "--load", "tasks", *FEW]
    words += ["--kill-every", "0.05"]  # a start takes longer than a pause
    _, record = chaos_until({"lives": 6}, tmp_path / "chaos.json", *words)
    lasted = [lasted_s for _, lasted_s, _, _ in record["lives"][:-1]]
    assert sum(lasted_s >= 0.025 for lasted_s in lasted) > 0.6 * len(lasted), lasted


def test_an_interrupt_ends_the_run_early_and_it_is_reported() -> None:
    words = ["chaos", "--isolation", "thread", "--faults", "fail", "--seconds", "1000", *FEW]
    program = ["-u", "-c", INTERRUPTIBLE, *words]
    with Program(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        assert run.stdout is not None
        assert run.stdout.readline().startswith("cudnn-actor chaos seed 7")
        while not (line := run.stdout.readline()).startswith(
            "the load begins"
        ):  # before, nothing is reported
            assert line, run.communicate(timeout=PATIENCE_S)
        run.send_signal(signal.SIGINT)
        output, errors = run.communicate(timeout=PATIENCE_S)
    assert (run.returncode, errors) == (130, "")
    assert "lost: 0   wrong: 0   stalls over 5 s: " in output
    (longest_s,) = re.findall(r"the longest took ([\d.]+) s", output)
    assert float(longest_s) < STUCK_S


def test_a_second_interrupt_ends_it_at_once() -> None:
    words = ["chaos", "--isolation", "thread", "--faults", "none", "--seconds", "1000"]
    program = ["-u", "-c", INTERRUPTIBLE, *words]
    with Program(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        assert run.stdout is not None
        run.stdout.readline()
        while run.poll() is None:  # two that come together are one to the kernel
            run.send_signal(signal.SIGINT)
            threading.Event().wait(0.01)
        assert run.returncode == 130


def test_where_no_worker_can_start_it_says_so_and_ends() -> None:
    done = forked("-c", WITHOUT_WORKERS, "chaos", "--seconds", "1000")
    assert done.returncode == 1
    assert "StartFailed: the service did not start" in done.stderr
    assert "/nowhere/python" in done.stderr


def test_an_interrupt_ends_a_start_that_never_comes_about(tmp_path: Path) -> None:
    command = [sys.executable, "-u", "-c", INTERRUPTIBLE, "chaos", "--seconds", "1000"]
    environment = without_forkserver(tmp_path)
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        assert run.stdout is not None
        run.stdout.readline()
        run.send_signal(signal.SIGINT)
        _, errors = run.communicate(timeout=PATIENCE_S)
    assert (run.returncode, errors) == (130, b"")


def test_an_interrupt_that_does_not_end_the_main_thread_s_wait_is_answered(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SIGNAL_FOR_ANOTHER_THREAD, "chaos", "--seconds", "1000"]
    done = subprocess.run(command, env=without_forkserver(tmp_path), capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (130, b"")


def without_forkserver(folder: Path) -> dict[str, str]:
    """An environment in which the forkserver hangs."""
    (folder / "sitecustomize.py").write_text(HANGING_FORKSERVER)
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, sys.path)])}


# Words.


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--isolation", "thread", "--faults", "kill"), "no worker process to send a signal to"),
        (("--isolation", "thread", "--faults", "fail,hang"), "leave hang out"),
        (("--isolation", "thread", "--engine", "cuda", "--faults", "poison"), "nothing survives"),
        (("--isolation", "thread", "--standby", "1"), "standby=1"),
        (("--out", "nowhere/chaos.json"), "there is no directory"),
        (("--out", "/"), "is a directory"),
        (("--faults", "kill-standby"), "there is no standby"),
        (("--faults", "hang-builder", "--standby", "1"), "no process builds plans"),
        (("--load", "uploads,cancels"), "no caller is selected"),
        (("--load", "tasks", "--faults", "kill-client"), "nothing feels it; add attached"),
        (("--without", "doomed", "--faults", "kill-server"), "nothing feels it; add doomed"),
        (("--load", "tasks", "--without", "tasks"), "no caller is selected"),
    ],
)
def test_what_cannot_be_carried_out_is_one_line(words: tuple[str, ...], problem: str) -> None:
    done = cudnn_actor_here("chaos", *words)
    assert done.returncode == 2
    assert problem in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [
        ("--faults", "earthquake"),
        ("--load", "kill"),
        ("--without", "rain"),
        ("--seconds", "0"),
        ("--kill-every", "nan"),
        ("--tasks", "0"),
    ],
)
def test_words_that_mean_nothing_are_told_so(words: tuple[str, ...]) -> None:
    done = cudnn_actor_here("chaos", *words)
    assert done.returncode == 2
    assert words[0] in done.stderr
    assert "Traceback" not in done.stderr
