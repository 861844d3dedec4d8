"""Regions of shared memory: whose they may be, and what a client may do to them while they are registered."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cudnn_actor.protocol.types.dtypes import DType
from cudnn_actor.serving.failures import NotOffered, Refused, TooLarge
from cudnn_actor.serving.regions import Region, SharedMemory
from cudnn_actor.serving.requests import Place

ROW = np.arange(4, dtype=np.float32)


@pytest.fixture
def regions() -> Iterator[SharedMemory]:
    regions = SharedMemory(offered=True)
    yield regions
    regions.close()


@pytest.fixture
def path() -> Iterator[Path]:
    """A file of shared memory of 64 bytes."""
    path = Path(f"/dev/shm/cudnn_actor_test_{os.getpid()}")
    path.write_bytes(bytes(64))
    yield path
    path.unlink(missing_ok=True)


def test_a_tensor_is_read_where_it_was_written(regions: SharedMemory, path: Path) -> None:
    regions.register("a", f"/{path.name}", 8, 40)
    place = Place("a", 4, ROW.nbytes)
    regions.write(place, ROW)
    assert path.read_bytes()[12:28] == ROW.tobytes()
    np.testing.assert_array_equal(regions.read(place, DType.FLOAT32, (4,)), ROW)
    (status,) = regions.status("a")
    assert (status.key, status.offset, status.nbytes) == (f"/{path.name}", 8, 40)


@pytest.mark.parametrize("key", ["", "/", "..", "a/b", "/../etc/passwd", "none_such_here", "nul\0", "\ud800"])
def test_what_is_no_name_of_shared_memory_is_refused(regions: SharedMemory, key: str) -> None:
    with pytest.raises(Refused):
        regions.register("a", key, 0, 1)


@pytest.mark.parametrize(("descriptors", "most"), [(11, 2), (12, 3), (resource.RLIM_INFINITY, 3)])
def test_regions_take_a_quarter_of_the_descriptors_at_most(
    descriptors: int, most: int, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (descriptors, resource.RLIM_INFINITY))
    monkeypatch.setattr("cudnn_actor.serving.regions._MOST", 3)
    regions = SharedMemory(offered=True)
    for number in range(most):
        regions.adopt(Region(str(number), path.name, 0, 1, os.open(os.devnull, os.O_RDONLY)))
    with pytest.raises(Refused, match=f"{most} regions are registered") as refused:
        regions.register("one more", path.name, 0, 1)
    assert ("ulimit -n" in str(refused.value)) == (most < 3)
    regions.unregister("0")
    regions.register("one more", path.name, 0, 1)
    regions.close()


def test_links_pipes_and_files_of_others_are_refused(
    regions: SharedMemory, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = path.with_name(f"{path.name}_other")
    for kind in ("link", "pipe"):
        if kind == "link":
            other.symlink_to(path)
        else:
            os.mkfifo(other)
        try:
            with pytest.raises(Refused):
                regions.register("a", other.name, 0, 1)
        finally:
            other.unlink()
    mine = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    with pytest.raises(Refused, match="another user"):
        regions.register("a", path.name, 0, 1)


def test_places_outside_of_a_region_are_refused(regions: SharedMemory, path: Path) -> None:
    with pytest.raises(Refused, match="shorter"):
        regions.register("a", path.name, 60, 8)
    regions.register("a", path.name, 0, 20)
    for place in (Place("a", 8, 16), Place("a", 1 << 62, 16), Place("b", 0, 16)):
        with pytest.raises(Refused):
            regions.read(place, DType.FLOAT32, (4,))
        with pytest.raises(Refused):
            regions.write(place, ROW)
    with pytest.raises(Refused, match="has 16"):
        regions.write(Place("a", 0, 8), ROW)
    with pytest.raises(Refused, match="registered already"):
        regions.register("a", path.name, 0, 8)


def test_a_place_that_no_memory_could_hold_is_refused(regions: SharedMemory, path: Path) -> None:
    nbytes = 1 << 50  # more than a process can address
    place = Place("a", 0, nbytes)
    with pytest.raises(Refused, match="not registered"):
        regions.read(place, DType.INT8, (nbytes,))
    regions.register("a", path.name, 0, 64)
    with pytest.raises(Refused, match="ends behind its region"):
        regions.read(place, DType.INT8, (nbytes,))
    regions.unregister("a")
    os.truncate(path, nbytes)  # of a file with holes, only what was written takes memory
    regions.register("a", path.name, 0, nbytes)
    with pytest.raises(TooLarge, match="no memory"):
        regions.read(place, DType.INT8, (nbytes,))


def test_a_file_that_becomes_shorter_ends_a_request_and_not_the_server(
    regions: SharedMemory, path: Path
) -> None:
    regions.register("a", path.name, 0, 64)
    os.truncate(path, 40)
    place = Place("a", 32, 16)
    with pytest.raises(Refused, match="has become shorter"):
        regions.read(place, DType.FLOAT32, (4,))
    with pytest.raises(Refused, match="has become shorter"):
        regions.write(place, ROW)
    assert path.stat().st_size == 40  # a write does not make it longer again


def test_none_is_offered_to_other_machines(path: Path) -> None:
    with pytest.raises(NotOffered, match="other machines"):
        SharedMemory(offered=False).register("a", path.name, 0, 8)
