"""Records of which bytes each slot has: what the parent writes, the worker reads, and cannot write."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Iterator

import pytest

from cudnn_actor.isolation.process.generations import GenerationTable, GenerationView
from cudnn_actor.protocol import OutOfMemory

from .. import forked_programs
from ..patience import PATIENCE_S

NOBODY = (0, 0, 0, 0)
MAXIMUM = (1 << 64) - 1
PROT_WRITE = 2


@pytest.fixture
def table() -> Iterator[GenerationTable]:
    table = GenerationTable(16)
    yield table
    table.close()
    table.close()


@pytest.fixture
def view(table: GenerationTable) -> Iterator[GenerationView]:
    view = GenerationView(table.fd)
    yield view
    view.close()
    view.close()


def test_a_worker_sees_where_a_buffer_sits(table: GenerationTable, view: GenerationView) -> None:
    table.seat(3, generation=7, arena=1, offset=4096, nbytes=100)
    assert view.at(3) == (7, 1, 4096, 100)
    assert view.generation(3) == 7
    assert view.at(2) == view.at(4) == NOBODY


def test_neighbours_do_not_touch_each_other(table: GenerationTable, view: GenerationView) -> None:
    for slot in range(16):
        table.seat(slot, MAXIMUM - slot, MAXIMUM, MAXIMUM, slot)
    assert [view.at(slot) for slot in range(16)] == [(MAXIMUM - n, MAXIMUM, MAXIMUM, n) for n in range(16)]
    assert view.epoch == 0


def test_a_vacated_seat_is_nobodys_and_every_end_is_counted(
    table: GenerationTable, view: GenerationView
) -> None:
    table.seat(0, 7, 1, 256, 100)
    assert view.epoch == 0
    table.vacate(0)
    assert (view.at(0), view.generation(0), view.epoch) == (NOBODY, 0, 1)
    table.seat(0, 8, 2, 512, 200)
    assert (view.at(0), view.epoch) == ((8, 2, 512, 200), 1)
    table.vacate(0)
    assert view.epoch == 2


@pytest.mark.parametrize("slot", [-1, 16, 1 << 70])
def test_nobody_sits_past_the_last_slot(table: GenerationTable, view: GenerationView, slot: int) -> None:
    table.seat(15, 7, 1, 256, 100)
    assert (view.at(slot), view.generation(slot)) == (NOBODY, 0)


def test_past_the_capacity_there_is_no_room_and_nothing_changes(
    table: GenerationTable, view: GenerationView
) -> None:
    table.seat(15, 7, 1, 256, 100)
    with pytest.raises(OutOfMemory) as caught:
        table.seat(16, 7, 1, 256, 50)
    assert (caught.value.requested, caught.value.in_use) == (50, 100)
    assert (view.at(15), view.epoch) == ((7, 1, 256, 100), 0)


def test_a_table_of_a_million_slots_takes_no_memory_before_they_are_used() -> None:
    table = GenerationTable()
    view = GenerationView(table.fd)
    assert (table.capacity, view.capacity) == (1 << 20, 1 << 20)
    table.seat((1 << 20) - 1, 7, 1, 256, 100)
    assert view.at((1 << 20) - 1) == (7, 1, 256, 100)
    assert os.fstat(table.fd).st_blocks * 512 <= 64 << 10
    view.close()
    table.close()


def test_a_view_outlives_the_descriptor_and_the_table() -> None:
    table = GenerationTable(16)
    table.seat(3, 7, 1, 256, 100)
    view = GenerationView(table.fd)
    table.close()
    assert view.at(3) == (7, 1, 256, 100)
    view.close()


# What a worker cannot do.


def assert_it_cannot_be_written(fd: int) -> None:
    with pytest.raises(PermissionError):
        mmap.mmap(fd, 64)
    with pytest.raises(OSError):
        os.pwrite(fd, b"x", 0)
    with pytest.raises(OSError):
        os.ftruncate(fd, 0)


def test_a_worker_cannot_map_the_records_writable(table: GenerationTable) -> None:
    assert_it_cannot_be_written(table.fd)


def test_opening_them_anew_through_proc_does_not_help(table: GenerationTable) -> None:
    fd = os.open(f"/proc/self/fd/{table.fd}", os.O_RDWR)
    try:
        assert_it_cannot_be_written(fd)
    finally:
        os.close(fd)


def test_a_mapping_for_reading_cannot_be_made_writable(table: GenerationTable) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    address = libc.mmap(None, mmap.PAGESIZE, mmap.PROT_READ, mmap.MAP_SHARED, table.fd, 0)
    try:
        place, size = ctypes.c_void_p(address), ctypes.c_size_t(mmap.PAGESIZE)
        assert libc.mprotect(place, size, mmap.PROT_READ | PROT_WRITE) == -1
        assert ctypes.get_errno() == errno.EACCES
    finally:
        libc.munmap(place, size)


def test_a_process_that_has_the_descriptor_reads_and_cannot_write(table: GenerationTable) -> None:
    table.seat(3, 7, 1, 256, 100)
    script = (
        "import mmap, sys\n"
        "from cudnn_actor.isolation.process.generations import GenerationView\n"
        "fd = int(sys.argv[1])\n"
        "print(GenerationView(fd).at(3))\n"
        "try:\n"
        "    mmap.mmap(fd, 64)[0] = 1\n"
        "except PermissionError:\n"
        "    print('refused')\n"
    )
    done = forked_programs.run(
        ["-c", script, str(table.fd)], pass_fds=[table.fd], check=True, timeout=PATIENCE_S
    )
    assert done.stdout.splitlines() == ["(7, 1, 256, 100)", "refused"]


def test_a_kernel_without_the_seal_gets_a_descriptor_for_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = fcntl.fcntl

    def older(fd: int, command: int, seals: int) -> int:
        if command == fcntl.F_ADD_SEALS and seals & 0x10:
            raise OSError(errno.EINVAL, "no such seal")
        return kernel(fd, command, seals)

    monkeypatch.setattr(fcntl, "fcntl", older)
    table = GenerationTable(16)
    monkeypatch.undo()
    try:
        assert_it_cannot_be_written(table.fd)
        assert fcntl.fcntl(table.fd, fcntl.F_GET_SEALS) == fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
        assert not os.get_inheritable(table.fd)
        table.seat(3, 7, 1, 256, 100)
        view = GenerationView(table.fd)
        assert view.at(3) == (7, 1, 256, 100)
        view.close()
    finally:
        table.close()


def test_another_failure_of_the_seal_is_told_and_leaves_no_descriptor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(fd: int, command: int, seals: int) -> int:
        raise OSError(errno.EPERM, "not today")

    monkeypatch.setattr(fcntl, "fcntl", broken)
    with pytest.raises(PermissionError, match="not today"):
        GenerationTable(16)
