"""Buffers of other services, of which one worker maps the memory: what waits for that, and what ends it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest

from cudnn_actor.broker.service_state import Export, Import
from cudnn_actor.engines.cpu.arenas import Arenas
from cudnn_actor.errors import ExecutionFailed
from cudnn_actor.isolation.process.parent.in_flight import Violation
from cudnn_actor.isolation.process.wire import ArenaImported, ArenaMade
from cudnn_actor.memory import ExportedRange
from cudnn_actor.protocol import Allocate, BufferRef, Copy, Download, Fill, Free, StaleBufferError, TensorSpec
from cudnn_actor.protocol.errors import OutcomeUnknown, QuarantinedRequest, StaleReason

from .simulated import Office

SPEC = TensorSpec.packed((1, 1, 1, 16), "float32")
NBYTES = 1 << 21


@pytest.fixture
def theirs() -> Iterator[ExportedRange]:
    """A buffer of another service, full of fives."""
    lender = Arenas()
    descriptor = lender.create(0, NBYTES)
    lender.bind(0, 512, SPEC)[:] = 5
    yield (given := ExportedRange(descriptor, NBYTES, 512))
    given.close()
    lender.clear()


def imported(office: Office, theirs: ExportedRange) -> BufferRef:
    envelope = office.send(Import(memory=theirs, spec=SPEC))
    office.turn()
    office.hear(office.worker.import_arena())
    ref = office.answer(envelope)
    assert isinstance(ref, BufferRef)
    return ref


def test_an_imported_buffer_is_copied_and_unmapped(office: Office, theirs: ExportedRange) -> None:
    ref, own = imported(office, theirs), office.ask(Allocate(spec=SPEC))
    copying, freeing = office.send(Copy(src=ref, dst=own)), office.send(Free(buffer=ref))
    office.turn()
    number = ref.slot  # the first arena of all
    assert number in office.worker.arenas
    office.settle()
    assert office.answer(freeing) is None
    office.answer(copying)
    assert number not in office.worker.arenas  # at once: it may be much of another device's memory
    assert (office.ask(Download(src=own)) == 5).all()


def test_a_worker_that_ends_while_it_maps_is_followed_by_one_that_does(
    office: Office, theirs: ExportedRange
) -> None:
    envelope = office.send(Import(memory=theirs, spec=SPEC))
    behind = office.send(Allocate(spec=SPEC))
    office.turn()
    office.host.recovery.reclaim(office.crash())
    office.attach()
    office.turn()
    office.hear(office.worker.import_arena())
    office.settle()
    assert isinstance(office.answer(envelope), BufferRef)
    assert isinstance(office.answer(behind), BufferRef)


def test_what_has_ended_two_workers_is_mapped_by_no_third(office: Office, theirs: ExportedRange) -> None:
    envelope = office.send(Import(memory=theirs, spec=SPEC))
    behind = office.send(Allocate(spec=SPEC))
    office.turn()
    for _ in range(2):
        assert envelope.number not in office.answers
        office.host.recovery.reclaim(office.crash())
        office.attach()
        office.turn()
    assert not office.worker.imports
    _, error = office.answers[envelope.number]
    assert isinstance(error, QuarantinedRequest)
    assert "Import" in str(error)
    office.settle()
    assert isinstance(office.answer(behind), BufferRef)


@pytest.mark.parametrize("begun", [True, False])
def test_the_next_worker_knows_nothing_of_it(office: Office, theirs: ExportedRange, begun: bool) -> None:
    ref, own = imported(office, theirs), office.ask(Allocate(spec=SPEC, data=np.zeros(SPEC.dims, "float32")))
    copying = office.send(Copy(src=ref, dst=own))
    office.turn()
    if begun:
        office.worker.begin()
    office.host.recovery.reclaim(office.crash())
    office.attach()
    office.settle()
    _, error = office.answers[copying.number]
    assert isinstance(error, OutcomeUnknown if begun else StaleBufferError)
    assert "its memory is lost" in str(error)
    assert set(office.worker.arenas) == {arena.number for arena in office.memory.arenas()}
    with pytest.raises(StaleBufferError):
        office.memory.resolve(ref)


@pytest.mark.parametrize("begun", [True, False])
def test_a_copy_of_one_that_was_freed_behind_it_does_not_run_again(
    office: Office, theirs: ExportedRange, begun: bool
) -> None:
    """The next worker has not mapped it. This is what a move whose caller has gone leaves."""
    ref, own = imported(office, theirs), office.ask(Allocate(spec=SPEC, data=np.zeros(SPEC.dims, "float32")))
    copying, freeing = office.send(Copy(src=ref, dst=own)), office.send(Free(buffer=ref))
    office.turn()
    if begun:
        office.worker.begin()
    office.host.recovery.reclaim(office.crash())
    office.attach()
    office.settle()
    assert office.answer(freeing) is None
    _, error = office.answers[copying.number]
    assert isinstance(error, OutcomeUnknown if begun else StaleBufferError)
    assert "its memory is lost" in str(error)
    assert set(office.worker.arenas) == {arena.number for arena in office.memory.arenas()}


def test_what_waits_behind_one_that_is_refused_goes_on(office: Office, theirs: ExportedRange) -> None:
    bad = ExportedRange(os.memfd_create("test", os.MFD_CLOEXEC), NBYTES, 0)
    refused = office.send(Import(memory=bad, spec=SPEC))
    others = [office.send(Allocate(spec=SPEC)), office.send(Import(memory=theirs, spec=SPEC))]
    office.turn()
    office.hear(office.worker.import_arena())
    office.settle()
    office.hear(office.worker.import_arena())
    _, error = office.answers[refused.number]
    assert isinstance(error, ExecutionFailed)
    assert all(isinstance(office.answer(each), BufferRef) for each in others)
    bad.close()


def test_the_answer_to_an_import_is_that_to_no_wish_for_an_arena(
    office: Office, theirs: ExportedRange
) -> None:
    office.send(Allocate(spec=SPEC))
    office.turn()
    with pytest.raises(Violation):
        office.hear(ArenaImported(office.worker.wishes[0].number))
    office.make_arena()
    office.send(Import(memory=theirs, spec=SPEC))
    office.turn()
    with pytest.raises(Violation):
        office.hear(ArenaMade(office.worker.imports[0][0].number))


def test_a_place_is_told_once_what_was_sent_before_has_ended(office: Office) -> None:
    ref = office.ask(Allocate(spec=SPEC, data=np.zeros(SPEC.dims, "float32")))
    office.send(Fill(dst=ref, value=1))
    asked = office.send(Export(buffer=ref))
    office.turn()
    assert asked.number not in office.answers
    office.settle()
    found = office.answer(asked)
    assert isinstance(found, ExportedRange)
    reader = Arenas()
    reader.map_for_reading(0, found.descriptor, found.arena_bytes)
    assert (reader.bind(0, found.offset, SPEC) == 1).all()
    reader.clear()
    found.close()


def test_a_place_of_a_buffer_that_a_crash_has_torn_is_not_told(office: Office) -> None:
    ref = office.ask(Allocate(spec=SPEC, data=np.zeros(SPEC.dims, "float32")))
    office.send(Fill(dst=ref, value=1))
    asked = office.send(Export(buffer=ref))
    office.turn()
    office.worker.begin()
    office.crash(may_still_write=True)  # so the fill does not run again
    office.attach()
    office.settle()
    _, error = office.answers[asked.number]
    assert isinstance(error, StaleBufferError)
    assert error.reason is StaleReason.TORN
