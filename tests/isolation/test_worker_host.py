"""What the host does at a crash that tests/semantics does not show, and what the random machine has found."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cudnn_actor.actors import Envelope
from cudnn_actor.broker.service_state import Forget
from cudnn_actor.isolation.process.arrivals import LATE_BYTES
from cudnn_actor.isolation.process.parent.in_flight import Violation
from cudnn_actor.isolation.process.parent.late_copies import LateCopies
from cudnn_actor.isolation.process.wire import Answers, ArenaMade, Done
from cudnn_actor.protocol import (
    Allocate,
    BufferRef,
    ConvFwd,
    ConvSpec,
    Copy,
    DeployModel,
    Download,
    Drain,
    Fill,
    Free,
    GraphBuilder,
    ModelGraph,
    NotDeployed,
    OutcomeUnknown,
    RunModel,
    ServiceStopped,
    StaleBufferError,
    TensorSpec,
    UnloadModel,
    Upload,
)
from cudnn_actor.supervision import Fault, FaultPlan

from .simulated import GARBAGE, Office

SPEC = TensorSpec.packed((1, 1, 1, 16), "float32")
WEIGHT = TensorSpec.packed((1, 1, 1, 1), "float32")
CONV = ConvSpec.symmetric(2)


def buffer(office: Office, value: float = 3.0, spec: TensorSpec = SPEC) -> BufferRef:
    ref = office.ask(Allocate(spec=spec, data=np.full(spec.dims, value, "float32")))
    assert isinstance(ref, BufferRef)
    return ref


def begun(office: Office, *messages: Any) -> list[Envelope]:
    """Messages that the worker has begun, all of them, and not finished."""
    envelopes = [office.send(message) for message in messages]
    office.turn()
    while office.worker.queue:
        office.worker.begin()
    return envelopes


def replaced(office: Office) -> None:
    """The worker dies, and another does what is left."""
    pending = office.crash()
    office.host.recovery.reclaim(pending)
    office.attach()
    office.settle()


def read(office: Office, ref: BufferRef) -> Any:
    return office.ask(Download(src=ref)).reshape(-1)[0]


def error_of(office: Office, envelope: Envelope) -> BaseException | None:
    return office.answers[envelope.number][1]


def test_a_plan_that_was_forgotten_while_it_ran_is_in_no_standby(office: Office) -> None:
    """A model may be closed behind a run that was given up and goes on, or that runs again after a crash."""
    office.host.recent.kept = True
    x, y = buffer(office), buffer(office)
    product = ConvFwd(x=x, w=buffer(office, spec=WEIGHT), y=y, conv=CONV)
    digest = office.state.lower(product).graph.digest()
    (running,) = begun(office, product)
    office.ask(Forget(identities=frozenset(), plans=frozenset({digest})))
    replaced(office)
    assert error_of(office, running) is None
    assert not office.host.recent.plans
    office.ask(ConvFwd(x=x, w=buffer(office, spec=WEIGHT), y=y, conv=CONV))  # another message: wanted again
    assert list(office.host.recent.plans) == [digest]


# What becomes of a buffer at a crash.


def test_a_pure_request_whose_input_may_be_overwritten_is_not_run_again(office: Office) -> None:
    src, dst = buffer(office, 3.0), buffer(office, 4.0)
    copy, _ = begun(office, Copy(src=src, dst=dst), Fill(dst=src, value=9.0))
    replaced(office)
    assert isinstance(error_of(office, copy), OutcomeUnknown)


def test_what_a_process_may_still_write_is_withheld_until_it_has_gone(office: Office) -> None:
    ref = buffer(office)
    place = office.memory.resolve(ref).offset
    (fill,) = begun(office, Fill(dst=ref, value=7.0))
    pending = office.crash(may_still_write=True)
    office.attach()
    office.settle()
    assert isinstance(error_of(office, fill), OutcomeUnknown)
    assert office.memory.resolve(buffer(office)).offset != place
    office.host.recovery.reclaim(pending)
    assert office.memory.resolve(buffer(office)).offset == place


@pytest.mark.parametrize("may_still_write", [False, True])
def test_values_that_were_not_copied_when_a_worker_died_are_copied_before_its_requests_are_taken_over(
    may_still_write: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later, the memory might be another request's."""
    office, large = Office(host=False), TensorSpec.packed((1, 1, 1, LATE_BYTES // 4 + 1), "float32")
    office.attach()
    ref, copies = buffer(office, 1.0, large), office.host.sender.copies
    with monkeypatch.context() as patch:
        patch.setattr(LateCopies, "make_all", lambda _: None)
        (upload,) = begun(office, Upload(dst=ref, data=np.full(large.dims, 2.0, "float32")))
    assert copies.pending
    pending = office.crash(may_still_write=may_still_write)
    assert not copies.pending
    office.host.recovery.reclaim(pending)
    office.attach()
    office.settle()
    if may_still_write:
        assert isinstance(error_of(office, upload), OutcomeUnknown)
    else:
        assert (office.ask(Download(src=ref)) == 2.0).all()
    office.close()


def test_a_request_whose_staging_memory_may_still_be_used_does_not_run_again() -> None:
    office = Office(host=False)
    office.attach()
    ref = buffer(office)
    (download,) = begun(office, Download(src=ref))
    office.host.recovery.reclaim(office.crash(may_still_write=True))
    office.attach()
    office.settle()
    error = error_of(office, download)
    assert isinstance(error, OutcomeUnknown)
    assert "its process may still use its place in staging memory" in str(error)
    assert not error.torn
    assert office.state.replayed == 0
    office.close()


def model_graph(office: Office) -> ModelGraph:
    g = GraphBuilder()
    graph = g.build(y=g.input("x", SPEC.dims) + 1.0)
    x, y = buffer(office), buffer(office)
    return ModelGraph(
        name="", graph=graph, buffers=(x, y), specs={"x": SPEC}, inputs={"x": "x"}, outputs={"y": "y"}
    )


def test_a_models_graph_whose_places_may_still_be_written_runs_no_more(office: Office) -> None:
    """Neither a run that was going on, nor one that had not begun, nor a later one."""
    graph = model_graph(office)
    model = office.ask(DeployModel(graphs=(graph,)))
    ones = np.ones(SPEC.dims, np.float32)
    running = begun(office, RunModel.of(model, {"x": ones}))[0]
    waiting = office.send(RunModel.of(model, {"x": ones}))
    office.turn()
    places = {office.memory.resolve(ref).offset for ref in graph.buffers}
    pending = office.crash(may_still_write=True)
    for ref in graph.buffers:
        office.send(Free(buffer=ref))
    office.attach()
    office.settle()
    assert isinstance(error_of(office, running), OutcomeUnknown)
    refused = error_of(office, waiting)
    assert isinstance(refused, NotDeployed)
    assert "no graph is deployed for x: float32 (" in str(refused)
    later = office.send(RunModel.of(model, {"x": ones}))
    office.settle()
    assert str(error_of(office, later)) == str(refused)
    taken = {office.memory.resolve(buffer(office)).offset for _ in range(4)}
    assert not taken & places
    office.host.recovery.reclaim(pending)
    taken = {office.memory.resolve(buffer(office)).offset for _ in range(4)}
    assert places <= taken


@pytest.mark.parametrize("from_buffers", [False, True])
def test_a_worker_keeps_no_graph_that_was_unloaded_behind_a_run_that_runs_again(
    from_buffers: bool, office: Office
) -> None:
    model = office.ask(DeployModel(graphs=(model_graph(office),)))
    run = RunModel.of(model, {"x": np.ones(SPEC.dims, np.float32)})
    if from_buffers:
        run = RunModel.of(model, {"x": buffer(office, 1.0)}, {"y": buffer(office)})
    office.ask(run)
    assert len(office.worker.runs) == 1
    runs = begun(office, run, run)
    office.send(UnloadModel(model=model))
    office.turn()
    assert not office.worker.runs
    replaced(office)
    assert [error_of(office, each) for each in runs] == [None, None]
    assert not office.worker.runs


# What goes with it.


def test_a_free_behind_a_request_does_not_keep_it_from_running_again(office: Office) -> None:
    src, dst = buffer(office, 5.0), buffer(office)
    begun(office, Copy(src=src, dst=dst), Free(buffer=src))
    replaced(office)
    assert read(office, dst) == 5.0


def test_what_reads_a_torn_buffer_fails_also_when_that_was_freed_behind_it(office: Office) -> None:
    x, w, y, z = buffer(office), buffer(office, spec=WEIGHT), buffer(office), buffer(office)
    begun(office, ConvFwd(x=x, w=w, y=y, conv=CONV, beta=1.0))
    copy = office.send(Copy(src=y, dst=z))
    office.send(Free(buffer=y))
    office.turn()
    replaced(office)
    assert isinstance(error_of(office, copy), StaleBufferError)
    assert read(office, z) == 3.0


def test_what_is_half_written_is_made_whole_for_callers_that_have_gone(office: Office) -> None:
    ref = buffer(office)
    (fill,) = begun(office, Fill(dst=ref, value=7.0))
    assert fill.future is not None
    fill.future.cancel()
    fill.withdraw()
    replaced(office)
    assert read(office, ref) == 7.0


def test_one_that_was_promised_never_to_begin_does_not_though_the_worker_met_it(office: Office) -> None:
    ref = buffer(office)
    fill = office.send(Fill(dst=ref, value=7.0), timeout_s=1e6)
    office.turn()
    fill.expire()
    assert office.worker.begin() is None
    replaced(office)
    assert read(office, ref) == 3.0


def test_a_drain_waits_for_an_allocation_that_waits_for_an_arena(office: Office) -> None:
    ref = buffer(office)
    begun(office, Fill(dst=ref, value=1.0))
    allocate = office.send(Allocate(spec=TensorSpec.packed((1, 1, 1, 600_000), "float32")))
    drain = office.send(Drain())
    office.turn()
    office.host.recovery.reclaim(office.crash())
    office.attach()
    office.turn()
    office.worker.begin()
    office.worker.finish()
    office.hear(office.worker.say(1))
    assert drain.number not in office.answers
    office.settle()
    assert list(office.answers)[-2:] == [allocate.number, drain.number]


def test_allocations_that_wait_for_an_arena_do_not_pass_the_window(office: Office) -> None:
    data = np.ones(SPEC.dims, "float32")
    waiting = [office.send(Allocate(spec=SPEC, data=data)) for _ in range(3 * office.window)]
    office.settle()
    assert all(isinstance(office.answer(envelope), BufferRef) for envelope in waiting)


def test_the_last_crash_leaves_nobody_without_an_answer(office: Office) -> None:
    ref = buffer(office)
    waiting = begun(office, Fill(dst=ref, value=7.0), Download(src=ref))
    office.host.recovery.reclaim(office.crash())
    office.mailbox.close("it gave up")
    office.host.recovery.retire()
    assert all(envelope.number in office.answers for envelope in waiting)


def test_values_that_a_fault_holds_up_keep_their_turn() -> None:
    office = Office(host=True, faults=FaultPlan().at(1, Fault.SLOW, of=Upload, seconds=0.0))
    office.attach()
    src, dst = buffer(office), buffer(office)
    office.send(Upload(dst=src, data=np.full(SPEC.dims, 9.0, "float32")))
    office.send(Copy(src=src, dst=dst))
    office.settle()
    assert read(office, dst) == 9.0
    office.close()


def test_a_message_that_follows_its_fault_has_not_begun_with_it() -> None:
    """It comes under the number of its fault, and may get its place on the status page."""
    office = Office(host=False, faults=FaultPlan().at(2, Fault.SLOW, of=Allocate, seconds=0.0))
    office.attach()
    buffer(office)
    (asked,) = begun(office, Allocate(spec=SPEC, data=np.full(SPEC.dims, 3.0, "float32")))
    office.worker.finish()  # its fault
    office.hear(office.worker.say(1))
    office.turn()
    assert office.worker.queue  # the message itself
    office.crash(may_still_write=True)
    office.attach()
    office.settle()
    assert read(office, office.answer(asked)) == 3.0
    office.close()


def owed_since(office: Office) -> float | None:
    return office.host.workers.arena_asked_s


def test_a_worker_owes_an_arena_from_the_request_until_its_answer_or_its_end(office: Office) -> None:
    asked = time.monotonic()
    for _ in range(2):  # each ends before it has answered
        office.send(Allocate(spec=SPEC))
        office.turn()
        assert (owed_since(office) or 0.0) >= asked
        office.crash()
        assert owed_since(office) is None
        office.attach()
    office.turn()
    office.make_arena()
    assert owed_since(office) is None


@pytest.mark.parametrize("host", [True, False], ids=["host arenas", "device arenas"])
def test_an_arena_that_is_made_when_the_memory_has_been_closed_is_not_kept(host: bool) -> None:
    """The end of a service closes the memory on one thread while another reads what the worker says."""
    office = Office(host=host)
    office.attach()
    waiting = [office.send(Allocate(spec=SPEC)) for _ in range(2)]
    office.turn()
    frame, inode = office.worker.make_arena()
    office.memory.close()
    office.hear(frame)
    assert isinstance(error_of(office, waiting[0]), ServiceStopped)
    office.close()
    assert inode not in inodes_open()


def inodes_open() -> set[int]:
    """The files that this process has open."""
    found = set[int]()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.add(os.fstat(int(name)).st_ino)
    return found


LIES: dict[str, Callable[[], Any]] = {
    "an answer to nothing": lambda: Answers([Done(99, 0, "plan", 0, 0.0)]),
    "an arena unasked for": lambda: ArenaMade(5),
}


@pytest.mark.parametrize("lie", sorted(LIES))
def test_a_worker_that_lies_is_found_out(office: Office, lie: str) -> None:
    with pytest.raises(Violation):
        office.hear(LIES[lie]())


def test_a_half_written_buffer_is_half_written(office: Office) -> None:
    """The simulation itself: without this, none of the above would show anything."""
    ref = buffer(office)
    begun(office, Fill(dst=ref, value=7.0))
    (task,) = office.worker.running
    office.worker.die()
    assert office.worker.array(task, ref).reshape(-1)[0] == GARBAGE
    office.host.recovery.reclaim(office.host.recovery.take_over_requests("it died", may_still_write=False))
    office.attach()
    office.settle()
