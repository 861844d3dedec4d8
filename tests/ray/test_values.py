"""How the values of requests get to replicas, and results back: without a cluster."""

from __future__ import annotations

import asyncio
import concurrent.futures
import errno
import gc
import os
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import ml_dtypes
import numpy as np
import pytest
import ray
from ray.exceptions import ActorUnavailableError

from cudnn_actor.processes.process_state import ProcessName
from cudnn_actor.protocol.graphs.named_outputs import named_outputs
from cudnn_actor.ray.held import RayBuffer
from cudnn_actor.ray.node_memory import ArrayPlace, MappedMemory, NodeMemory, Piece
from cudnn_actor.ray.packing import (
    INLINE_ARRAYS,
    INLINE_BYTES,
    PackedResults,
    pack_results,
    unpack_results,
)
from cudnn_actor.ray.values import Sending, Values

from ..patience import PATIENCE_S

SMALL = np.arange(6, dtype=np.float32).reshape(2, 3)
LARGE = np.arange(INLINE_BYTES + 1).astype(np.int8)
WIDE = np.arange(1 << 18, dtype=np.float32).reshape(512, 512)
BUFFER = RayBuffer(pool="pool", number=1, dims=(2, 3))


@pytest.fixture
def put(monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray]:
    """The arrays that are put into Ray's store."""
    arrays: list[np.ndarray] = []

    def note(array: np.ndarray) -> Any:
        arrays.append(array)
        return "in the store", array.nbytes

    monkeypatch.setattr(ray, "put", note)
    return arrays


@pytest.fixture
def other_process() -> Iterator[subprocess.Popen[bytes]]:
    """A process that waits until it is killed."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def sent(sending: Sending) -> list[Any]:
    """The values as they are sent."""
    return [*sending.args[1:]]


async def test_large_arrays_are_put_once_until_the_pool_ends(put: list[np.ndarray]) -> None:
    values = Values()
    given = {"x": LARGE, "w": BUFFER, "b": SMALL, "y": LARGE}
    stored = ("in the store", LARGE.nbytes)
    request = values.of("a kind", given)
    assert not put
    for _ in range(2):
        ready = await request.make_ready(near=False)
        assert sent(ready) == [stored, BUFFER, SMALL, stored]
        assert (ready.args[0].names, ready.args[0].room) == (tuple(given), None)
    assert len(put) == 2
    values.end()
    left = sent(await values.of("a kind", given).make_ready(near=False))
    assert all(a is b for a, b in zip(left, given.values(), strict=True))
    values.end()


async def test_the_threads_of_a_pool_that_nobody_closes_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "put", lambda _: threading.current_thread())
    values = Values()
    [thread] = sent(await values.of("a kind", {"x": LARGE}).make_ready(near=False))
    del values
    gc.collect()
    await asyncio.to_thread(thread.join, PATIENCE_S)
    assert not thread.is_alive()


async def test_a_replica_that_is_near_reads_large_arrays_from_the_pools_memory(put: list[np.ndarray]) -> None:
    values = Values()
    name = await asyncio.to_thread(values.begin)
    assert name is not None
    memory = await asyncio.to_thread(MappedMemory.open, name)
    assert memory is not None
    halves = np.arange(1 << 21).astype(ml_dtypes.bfloat16)  # so large that a thread copies it
    given = {"x": WIDE, "w": BUFFER, "b": SMALL, "t": WIDE.T, "h": halves, "m": WIDE.view(np.matrix)}
    x, w, b, t, h, m = sent(await values.of("a kind", given).make_ready(near=True))
    assert (w, b is SMALL) == (BUFFER, True)
    for place, array in ((x, WIDE), (t, WIDE.T), (h, halves)):
        assert isinstance(place, ArrayPlace)
        read = memory.array(place)
        assert (read.dtype, read.flags.writeable) == (array.dtype, False)
        assert np.array_equal(read, array)
    assert m == ("in the store", WIDE.nbytes)  # its class would be lost
    assert len(put) == 1
    values.end()


async def test_a_thread_copies_only_what_takes_long_all_arrays_of_a_request_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = Values()
    await asyncio.to_thread(values.begin)
    threads = list[threading.Thread]()
    write = Piece.write

    def note(piece: Piece, array: np.ndarray) -> None:
        threads.append(threading.current_thread())
        write(piece, array)

    monkeypatch.setattr(Piece, "write", note)
    half, quarter = WIDE[:256], WIDE[:128]
    on_loop: list[list[np.ndarray]] = [[WIDE], [quarter.T], [half, half], [half, quarter[:64].T]]
    by_thread: list[list[np.ndarray]] = [[WIDE.T], [np.append(WIDE, WIDE[:1])]]
    by_thread += [[quarter] * 5, [half, quarter, quarter.T]]
    for arrays in (*on_loop, *by_thread):
        here = any(arrays is each for each in on_loop)
        threads.clear()
        await values.of("a kind", {f"x{k}": each for k, each in enumerate(arrays)}).make_ready(near=True)
        assert [each is threading.current_thread() for each in threads] == [here] * len(arrays)
    values.end()


async def test_small_arrays_that_do_not_all_go_with_the_call_lie_in_the_pools_memory(
    put: list[np.ndarray],
) -> None:
    """Ray would serialise each by itself."""
    values = Values()
    name = await asyncio.to_thread(values.begin)
    assert name is not None
    memory = await asyncio.to_thread(MappedMemory.open, name)
    assert memory is not None
    thirds = [np.full(INLINE_ARRAYS // 3, k, np.int8) for k in range(4)]
    few: dict[str, np.ndarray] = dict(zip("xyz", thirds, strict=False))
    more = {**few, "w": thirds[3], "s": SMALL, "n": np.zeros((0, 3))}
    objects = np.full(INLINE_ARRAYS // 16, None)  # no copy of its bytes would do
    cases: list[tuple[dict[str, np.ndarray], str]] = [(few, ""), (more, "zw"), ({**few, "o": objects}, "")]
    for given, there in cases:
        request = values.of("a kind", given)
        for near in (True, False):
            ready = sent(await request.make_ready(near=near))
            for (key, array), value in zip(given.items(), ready, strict=True):
                if near and key in there:
                    assert isinstance(value, ArrayPlace)
                    assert np.array_equal(memory.array(value), array)
                else:
                    assert value is array
    assert not put
    values.end()


async def test_what_has_no_room_in_the_pools_memory_goes_by_rays_store(
    put: list[np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    values = Values()
    monkeypatch.setattr("cudnn_actor.ray.values.NodeMemory", lambda: NodeMemory(WIDE.nbytes))
    await asyncio.to_thread(values.begin)
    first, second = values.of("a kind", {"x": WIDE}), values.of("a kind", {"x": WIDE})
    for _ in range(2):  # twice in the same place
        [place] = sent(await first.make_ready(near=True))
        assert isinstance(place, ArrayPlace)
    assert sent(await second.make_ready(near=True)) == [("in the store", WIDE.nbytes)]
    del first
    [place] = sent(await values.of("a kind", {"x": WIDE}).make_ready(near=True))
    assert isinstance(place, ArrayPlace)
    assert len(put) == 1
    values.end()


@pytest.mark.parametrize("limit", ["available", "room_in_container"])
async def test_without_memory_for_the_node_all_goes_by_rays_store(
    limit: str, put: list[np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"cudnn_actor.memory.container.{limit}", lambda: 0)
    values = Values()
    assert await asyncio.to_thread(values.begin) is None
    assert sent(await values.of("a kind", {"x": WIDE}).make_ready(near=True)) == [
        ("in the store", WIDE.nbytes)
    ]
    assert len(put) == 1
    values.end()


def test_only_the_memory_of_this_name_is_mapped() -> None:
    name = NodeMemory().name  # it has gone, and its descriptor is closed
    gc.collect()
    assert MappedMemory.open(name) is None
    own = NodeMemory()
    assert MappedMemory.open(own.name) is not None
    assert MappedMemory.open(replace(own.name, file="another node's")) is None
    assert MappedMemory.open(replace(own.name, pid=os.getppid())) is None


def test_only_memory_that_nobody_can_truncate_is_mapped() -> None:
    own = NodeMemory()
    with pytest.raises(PermissionError):
        os.ftruncate(own.name.descriptor, 0)
    file = "cudnn-actor-ray-of-a-test"
    descriptor = os.memfd_create(file, os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, own.name.nbytes)
        assert MappedMemory.open(replace(own.name, descriptor=descriptor, file=file)) is None
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("form", ["an array", "by name", "a named tuple"])
async def test_large_results_lie_in_the_callers_memory_from_the_second_run_on(form: str) -> None:
    values = Values()
    name = await asyncio.to_thread(values.begin)
    assert name is not None
    memory = await asyncio.to_thread(MappedMemory.open, name)
    by_name = {"y": WIDE, "z": SMALL, "t": WIDE.T, "none": np.zeros((0, 3))}
    found: Any = {"an array": WIDE, "by name": by_name}.get(form)
    if form == "a named tuple":
        found = named_outputs("Outputs", by_name)
    request = values.of("a kind", {"x": SMALL})
    first = await request.make_ready(near=True)
    assert first.results is None
    assert pack_results(found, memory, first.args[0].room) is found  # by Ray's store
    request.note(found)
    ready = await request.make_ready(near=True)
    assert ready.results is not None
    packed = pack_results(found, memory, ready.args[0].room)
    assert isinstance(packed, PackedResults)
    assert len(packed) < 4096
    again = unpack_results(packed, ready.results)
    assert type(again) is type(found)
    pairs = {
        "an array": lambda: [(again, found)],
        "by name": lambda: [(again[key], each) for key, each in found.items()],
    }.get(form, lambda: [*zip(again, found, strict=True)])()
    for array, expected in pairs:
        assert (array.dtype, array.shape) == (expected.dtype, expected.shape)
        assert np.array_equal(array, expected)
        assert not array.flags.writeable
    values.end()


def test_results_that_do_not_fit_are_left_to_rays_store() -> None:
    own = NodeMemory()
    memory, piece = MappedMemory.open(own.name), own.take(WIDE.nbytes)
    assert piece is not None
    for found in ({"y": WIDE, "z": SMALL}, WIDE.astype(ml_dtypes.bfloat16)):  # the latter is pickled whole
        assert pack_results(found, memory, piece.room) is found
    assert pack_results(WIDE, memory, None) is WIDE


async def test_memory_of_results_is_free_once_no_array_lies_there() -> None:
    values, own = Values(), await asyncio.to_thread(NodeMemory)
    values.memory = own
    memory = await asyncio.to_thread(MappedMemory.open, own.name)
    values.note_results("a kind", WIDE)
    ready = await values.of("a kind", {}).make_ready(near=True)
    assert ready.results is not None
    found = unpack_results(pack_results(WIDE, memory, ready.results.room), ready.results)
    del ready
    row = found[3]
    del found
    assert own.pieces == 1
    other = own.take(WIDE.nbytes)
    assert other is not None
    other.write(np.zeros_like(WIDE))
    assert np.array_equal(row, WIDE[3])
    del row, other
    assert own.pieces == 0


class Answer:
    """Stands for Ray's reference of an answer."""

    def __init__(self) -> None:
        self.ended: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def future(self) -> concurrent.futures.Future[Any]:
        return self.ended


async def test_memory_is_kept_until_a_replica_that_was_given_up_has_ended() -> None:
    values, own = Values(), await asyncio.to_thread(NodeMemory)
    values.memory = own
    values.note_results("a kind", WIDE)
    request = values.of("a kind", {"x": WIDE})
    ready = await request.make_ready(near=True)
    answer = Answer()
    ready.keep_until(cast("Any", answer), ProcessName.own())
    del ready, request
    assert own.pieces == 2
    answer.ended.set_result(None)
    del answer
    gc.collect()
    assert own.pieces == 0
    ready = await values.of("a kind", {"x": WIDE}).make_ready(near=True)
    answer = Answer()
    ready.keep_until(cast("Any", answer), ProcessName.own())
    answer.ended.set_exception(ActorUnavailableError("it may live", None))
    del ready, answer
    gc.collect()
    assert own.pieces == 2
    assert not values.let_go()
    values.end()


async def test_memory_that_a_dead_process_may_have_used_is_used_again_once_there_is_no_other(
    put: list[np.ndarray], other_process: subprocess.Popen[bytes]
) -> None:
    """Ray says of a replica that is killed only that it cannot be reached."""
    values = Values()
    values.memory = await asyncio.to_thread(NodeMemory, 2 * WIDE.nbytes)
    name = ProcessName.of(other_process.pid)
    assert not name.has_ended()
    for each in (name, None):
        (await values.of("a kind", {"x": WIDE}).make_ready(near=True)).keep_while_lives(each)
    gc.collect()
    request = values.of("a kind", {"x": WIDE})
    assert sent(await request.make_ready(near=True)) == [("in the store", WIDE.nbytes)]
    other_process.kill()
    await asyncio.to_thread(other_process.wait)
    assert name.has_ended()
    [place] = sent(await request.make_ready(near=True))
    assert isinstance(place, ArrayPlace)
    assert [*values.kept] == [None], "nobody knows what has become of that process"
    values.end()


def test_a_process_is_told_from_a_later_one_of_the_same_id() -> None:
    own = ProcessName.own()
    assert own.pid == os.getpid()
    assert not own.has_ended()
    assert replace(own, began=own.began - 1).has_ended()


def test_a_process_has_not_ended_because_nothing_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EMFILE, "no descriptors are left")

    own = ProcessName.own()
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", fail)
        assert not own.has_ended()
