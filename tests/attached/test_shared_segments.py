"""Arrays that services of several processes read where they lie."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
from typing import Any

import numpy as np
import pytest

from cudnn_actor import CudnnRef
from cudnn_actor.attached.client.shared_segments import (
    ToShare,
    gather_at_once,
    place_in_shared,
    shared_arrays,
    shared_copies,
)
from cudnn_actor.attached.server.segments import Segments
from cudnn_actor.attached.wire import Place
from cudnn_actor.protocol.types.dtypes import DType
from cudnn_actor.protocol.types.tensor import TensorSpec

from ..inside import announced_segments, service_behind

VALUES = [
    np.arange(6, dtype=np.float32).reshape(2, 3),
    np.arange(5).astype(DType.BFLOAT16.numpy),
    np.array(7, np.int64),
    np.zeros((0, 4), np.uint8),
]


def copies(values: list[np.ndarray]) -> list[np.ndarray]:
    return shared_copies([to_share(each) for each in values])


def to_share(values: np.ndarray) -> ToShare:
    return ToShare(TensorSpec.packed(values.shape, values.dtype), lambda: values)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_copies_cannot_be_changed_by_anybody_and_their_memory_ends_with_them() -> None:
    before = descriptors()
    found = copies(VALUES)
    for copy, value in zip(found, VALUES, strict=True):
        np.testing.assert_array_equal(copy, value)
        assert copy.dtype == value.dtype
        assert not copy.flags.writeable
    places = [place_in_shared(each) for each in found]
    assert places[0] is not None
    segment, offset = places[0]
    assert [place is not None and place[1] for place in places[:3]] == [0, 64, 128]
    assert offset == 0
    assert place_in_shared(found[0][1:]) == (segment, 12)
    assert place_in_shared(found[0].T) is None
    assert place_in_shared(np.ones(3)) is None
    with pytest.raises(OSError, match="not permitted"):
        os.pwrite(segment.descriptor, b"x", 0)
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(segment.descriptor, 0)
    with pytest.raises(OSError, match="not permitted"):  # no seal can be added, so this one is there
        fcntl.fcntl(segment.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)
    del places, segment, found, copy
    gc.collect()
    assert descriptors() == before


def test_an_array_that_cannot_be_computed_leaves_nothing() -> None:
    before, spec = descriptors(), TensorSpec.packed((4,), "float32")

    def fails() -> np.ndarray:
        raise RuntimeError("no values")

    with pytest.raises(RuntimeError):
        shared_copies([ToShare(spec, lambda: np.zeros(4, np.float32)), ToShare(spec, fails)])
    gc.collect()
    assert descriptors() == before


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many arrays each call of the system has written."""
    counts, write = list[int](), os.pwritev

    def noting(descriptor: int, arrays: list[memoryview], at: int) -> int:
        counts.append(len(arrays))
        return write(descriptor, arrays, at)

    monkeypatch.setattr(os, "pwritev", noting)
    return counts


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16, DType.BOOL, DType.INT64])
@pytest.mark.parametrize("dims", [(), (3,), (2, 5)])
def test_arrays_are_gathered_by_one_call_of_the_system(
    dtype: DType, dims: tuple[int, ...], calls: list[int]
) -> None:
    _, whole, behind = shared_arrays([TensorSpec.packed((9, *dims), dtype)] * 3)
    values = np.arange(whole.size).reshape(whole.shape).astype(whole.dtype)
    values.flags.writeable = False
    gather_at_once([values[:1], values[1:4], values[4:]], whole)
    np.testing.assert_array_equal(whole, values)
    gather_at_once([values[8:], values[:1], values[:1]], whole[4:7])
    np.testing.assert_array_equal(whole, values[[0, 1, 2, 3, 8, 0, 0, 7, 8]])
    assert not behind.any()
    assert calls == [3, 3]


def test_more_arrays_than_a_call_writes_are_gathered_by_several(calls: list[int]) -> None:
    (whole,) = shared_arrays([TensorSpec.packed((2500,), "int32")])
    values = np.arange(2500, dtype=np.int32)
    gather_at_once([values[n : n + 1] for n in range(2500)], whole)
    np.testing.assert_array_equal(whole, values)
    assert calls == [1024, 1024, 452]


def test_arrays_that_the_system_cannot_write_are_gathered_by_numpy(calls: list[int]) -> None:
    (whole,) = shared_arrays([TensorSpec.packed((4, 3), "float32")])
    values = np.arange(12, dtype=np.float32).reshape(4, 3)
    turned, whole_numbers = values.T.copy().T, values.astype(np.int32)
    cases: list[tuple[list[np.ndarray], np.ndarray]] = [
        ([turned[:2], values[2:]], whole),  # not C-contiguous
        ([whole_numbers[:2], values[2:]], whole),  # another dtype
        ([values[:2], values[2:]], np.empty((4, 3), np.float32)),  # not in shared memory
        ([values[:1], values[1:2]], whole.reshape(2, 6)[:, :3]),  # into what is not C-contiguous
    ]
    for given, into in cases:
        into[...] = -1
        gather_at_once(given, into)
        np.testing.assert_array_equal(into, values[: len(into)])
    gather_at_once([values[:0], values[:0]], whole[:0])
    with pytest.raises(ValueError, match="wrong shape"):
        gather_at_once([values[:2]], whole)
    assert not calls


@pytest.mark.parametrize("written", [None, 7])
def test_where_the_system_refuses_or_writes_a_part_numpy_gathers(
    written: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusing(_descriptor: int, _arrays: list[memoryview], _at: int) -> int:
        if written is None:
            raise OSError(errno.ENOSYS, "not implemented")
        return written

    monkeypatch.setattr(os, "pwritev", refusing)
    (whole,) = shared_arrays([TensorSpec.packed((4, 3), "float32")])
    values = np.arange(12, dtype=np.float32).reshape(4, 3)
    gather_at_once([values[:2], values[2:]], whole)
    np.testing.assert_array_equal(whole, values)


async def test_a_service_reads_them_where_they_lie(client: CudnnRef) -> None:
    service: Any = service_behind(client)
    big = np.arange(1 << 16, dtype=np.float32)
    (copy,) = copies([big])
    (own,) = shared_arrays([TensorSpec.packed((1 << 16,), "float32")])
    own[...] = big + 1
    given = [copy, own, copy[1 << 15 :]]
    refs = [await client.upload(each) for each in given]
    assert not service.link.staging.segments()  # nothing was copied on the way
    assert len(announced_segments(service.link)) == 2
    for ref, expected in zip(refs, (big, big + 1, big[1 << 15 :]), strict=True):
        np.testing.assert_array_equal(await client.download(ref), expected)
    del copy, own, given
    gc.collect()
    assert not announced_segments(service.link)
    assert await client.ping() == 1  # the server has taken the end of the segments for what it is


async def test_more_segments_than_a_service_is_told_of_are_copied(
    client: CudnnRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cudnn_actor.attached.client.announced_segments._MOST", 1)
    service: Any = service_behind(client)
    kept = [copies([np.full(1 << 16, number, np.float32)])[0] for number in range(2)]
    for number, each in enumerate(kept):
        ref = await client.upload(each)
        assert len(service.link.staging.segments()) == number
        assert set(await client.download(ref)) == {number}


def test_a_service_never_writes_to_sealed_memory() -> None:
    (copy,) = copies([np.zeros(1 << 12, np.float32)])
    place = place_in_shared(copy)
    assert place is not None
    segments = Segments()
    segments.map(5, len(place[0]), os.dup(place[0].descriptor))
    with pytest.raises(ValueError, match="is sealed"):
        segments.write(Place(5, 0), 64, [np.ones(4, np.float32)])
    assert not copy.any()
