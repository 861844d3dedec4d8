"""The directory: what is kept is found again; what is bad, foreign or unsafe is ignored and replaced."""

from __future__ import annotations

import os
import resource
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from structlog.typing import EventDict

from cudnn_actor.plan_store.plan_file import StoredPlan, encode
from cudnn_actor.plan_store.store import PlanStore

from ..forked_programs import Program
from ..patience import PATIENCE_S
from .kept_plans import key, plan

STRANGER = 54321
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")


def only_file(store: PlanStore) -> Path:
    (file,) = Path(store.directory).iterdir()
    return file


def reasons(logs: list[EventDict], event: str = "plan_store.bad_file") -> list[str]:
    assert {entry["event"] for entry in logs} <= {event}
    assert all(entry["log_level"] == "warning" and entry["path"] for entry in logs)
    return [entry["reason"] for entry in logs]


# Keeping and finding.


def test_a_plan_is_found_again_by_another_process_s_store(store: PlanStore, logs: list[EventDict]) -> None:
    kept = plan(b"bytes" * 1000, workspace=77, tuned=True)
    store.save(key(), kept)
    assert PlanStore(store.directory).load(key()) == kept
    assert logs == []


def test_what_was_never_kept_is_not_found_and_nothing_is_said(
    store: PlanStore, logs: list[EventDict]
) -> None:
    assert store.load(key()) is None
    store.save(key(), plan())
    assert store.load(key(1)) is None
    assert store.load(key(fingerprint="another library")) is None
    assert logs == []


def test_looking_makes_no_directory(store: PlanStore) -> None:
    assert store.load(key()) is None
    assert not Path(store.directory).exists()


def test_directory_and_files_are_their_owner_s_alone(store: PlanStore) -> None:
    store.save(key(), plan())
    assert os.stat(store.directory).st_mode & 0o777 == 0o700
    assert only_file(store).stat().st_mode & 0o777 == 0o600


def test_a_later_plan_takes_the_place_of_an_earlier_one(store: PlanStore) -> None:
    store.save(key(), plan(b"first"))
    store.save(key(), plan(b"second"))
    assert store.load(key()) == plan(b"second")
    only_file(store)


def test_only_a_tuned_plan_takes_the_place_of_a_tuned_one(store: PlanStore) -> None:
    store.save(key(), plan(b"tuned", tuned=True))
    store.save(key(), plan(b"built by one who looked before"))
    assert store.load(key()) == plan(b"tuned", tuned=True)
    store.save(key(), plan(b"tuned again", tuned=True))
    assert store.load(key()) == plan(b"tuned again", tuned=True)


def test_a_provisional_plan_takes_the_place_of_provisional_ones_alone(store: PlanStore) -> None:
    for name in (b"first", b"second"):
        store.save(key(), plan(name, provisional=True))
        assert store.load(key()) == plan(name, provisional=True)
    for better in (plan(b"better"), plan(b"best", tuned=True)):
        store.save(key(), better)
        store.save(key(), plan(b"by one who looked before", provisional=True))
        assert store.load(key()) == better


def test_a_store_stays_where_it_was_when_the_process_goes_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = PlanStore("plans")
    store.save(key(), plan())
    monkeypatch.chdir("/")
    assert store.load(key()) == plan()
    assert store.directory == str(tmp_path / "plans")


# Bad files.


def make_a_link_of(file: Path) -> None:
    file.rename(file.parent / "elsewhere")
    file.symlink_to("elsewhere")


def make_a_pipe_of(file: Path) -> None:
    file.unlink()
    os.mkfifo(file, 0o600)


SPOILERS: dict[str, Callable[[Path], object]] = {
    "emptied": lambda file: file.write_bytes(b""),
    "truncated": lambda file: os.truncate(file, file.stat().st_size - 1),
    "corrupted": lambda file: file.write_bytes(file.read_bytes().replace(b"a plan", b"a bomb")),
    "overwritten": lambda file: file.write_bytes(b"\x00" * 4096),
    "another key's": lambda file: file.write_bytes(encode(key(9), plan(b"the plan of another"))),
    "huge": lambda file: os.truncate(file, 1 << 40),
    "a link": make_a_link_of,
    "a pipe": make_a_pipe_of,
    "others may write it": lambda file: file.chmod(0o602),
    "its group may write it": lambda file: file.chmod(0o620),
}


@pytest.mark.parametrize("spoil", SPOILERS.values(), ids=SPOILERS)
def test_a_bad_file_is_said_and_ignored_and_the_next_save_replaces_it(
    spoil: Callable[[Path], object], store: PlanStore, logs: list[EventDict]
) -> None:
    store.save(key(), plan())
    file = only_file(store)
    spoil(file)
    assert store.load(key()) is None
    assert len(reasons(logs)) == 1
    assert logs[0]["path"] == str(file)
    store.save(key(), plan(b"built again"))
    assert store.load(key()) == plan(b"built again")
    assert len(logs) == 1


def test_two_files_that_changed_places_are_both_ignored(store: PlanStore, logs: list[EventDict]) -> None:
    store.save(key(1), plan(b"one"))
    store.save(key(2), plan(b"two"))
    one, two = (Path(store.directory) / key(number).file_name() for number in (1, 2))
    one.rename(two.with_suffix(".x"))
    two.rename(one)
    two.with_suffix(".x").rename(two)
    assert (store.load(key(1)), store.load(key(2))) == (None, None)
    assert all("another key" in reason for reason in reasons(logs))


def test_a_directory_in_a_file_s_place_is_ignored(store: PlanStore, logs: list[EventDict]) -> None:
    (Path(store.directory) / key().file_name()).mkdir(parents=True, mode=0o700)
    assert store.load(key()) is None
    assert len(reasons(logs)) == 1
    logs.clear()
    store.save(key(), plan())
    assert len(reasons(logs, "plan_store.not_kept")) == 1


def test_a_rejected_plan_is_gone_and_may_be_replaced_by_an_untuned_one(
    store: PlanStore, logs: list[EventDict]
) -> None:
    store.save(key(), plan(tuned=True))
    store.reject(key(), "the library says no")
    assert reasons(logs) == ["the library says no"]
    assert store.load(key()) is None
    store.save(key(), plan(b"new"))
    assert store.load(key()) == plan(b"new")


# Whom to trust.


@as_root
def test_a_file_of_another_user_is_ignored(store: PlanStore, logs: list[EventDict]) -> None:
    store.save(key(), plan())
    os.chown(only_file(store), STRANGER, STRANGER)
    assert store.load(key()) is None
    assert f"user {STRANGER}" in reasons(logs)[0]


@as_root
def test_a_directory_of_another_user_is_ignored(store: PlanStore, logs: list[EventDict]) -> None:
    store.save(key(), plan())
    os.chown(store.directory, STRANGER, STRANGER)
    assert store.load(key()) is None
    assert f"user {STRANGER}" in reasons(logs, "plan_store.unusable")[0]


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777], ids=oct)
def test_a_directory_that_others_may_write_is_neither_read_nor_written(
    mode: int, store: PlanStore, logs: list[EventDict]
) -> None:
    store.save(key(), plan())
    os.chmod(store.directory, mode)
    assert store.load(key()) is None
    store.save(key(1), plan())
    assert only_file(store).name == key().file_name()
    assert len(reasons(logs, "plan_store.unusable")) == 1  # not once for every plan
    os.chmod(store.directory, 0o700)
    assert store.load(key()) == plan()


# Disks that will not.


def test_a_directory_that_cannot_be_made_costs_a_log_line(tmp_path: Path, logs: list[EventDict]) -> None:
    (tmp_path / "file").write_text("in the way")
    store = PlanStore(tmp_path / "file" / "plans")
    store.save(key(), plan())
    assert store.load(key()) is None
    assert len(reasons(logs, "plan_store.unusable")) == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_directory_is_read_all_the_same(store: PlanStore, logs: list[EventDict]) -> None:
    store.save(key(), plan())
    os.chmod(store.directory, 0o500)
    store.save(key(1), plan())
    assert store.load(key()) == plan()
    assert len(reasons(logs, "plan_store.not_kept")) == 1
    os.chmod(store.directory, 0o700)


@contextmanager
def no_file_larger_than(nbytes: int) -> Iterator[None]:
    """Writing stops there, in the middle of a file, as on a full disk. (Python ignores the signal.)"""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_costs_a_log_line_and_leaves_what_was_there(
    store: PlanStore, logs: list[EventDict]
) -> None:
    store.save(key(), plan(b"small"))
    with no_file_larger_than(4096):
        store.save(key(), plan(b"large" * 10_000))
        store.save(key(1), plan(b"large" * 10_000))
    assert len(reasons(logs, "plan_store.not_kept")) == 2
    assert store.load(key()) == plan(b"small")
    only_file(store)


# Room.


def used_at(store: PlanStore, number: int, seconds: int) -> None:
    os.utime(Path(store.directory) / key(number).file_name(), (seconds, seconds))


def test_what_was_used_longest_ago_goes_first(tmp_path: Path, logs: list[EventDict]) -> None:
    size = len(encode(key(), plan(b"x" * 1000)))
    store = PlanStore(tmp_path / "plans", limit_bytes=3 * size)
    for number in range(3):
        store.save(key(number), plan(b"x" * 1000))
        used_at(store, number, 1000 + number)
    assert store.load(key(0)) is not None  # which is a use
    store.save(key(3), plan(b"x" * 1000))
    assert [number for number in range(4) if store.load(key(number)) is not None] == [0, 2, 3]
    assert logs == []


def test_a_plan_larger_than_the_store_is_not_kept_and_drives_nobody_out(
    tmp_path: Path, logs: list[EventDict]
) -> None:
    store = PlanStore(tmp_path / "plans", limit_bytes=2000)
    store.save(key(), plan())
    store.save(key(1), plan(b"x" * 2000))
    assert store.load(key()) == plan()
    assert store.load(key(1)) is None
    assert len(reasons(logs, "plan_store.not_kept")) == 1


def test_what_a_dead_process_left_unfinished_goes_in_time(store: PlanStore) -> None:
    store.save(key(), plan())
    old, new, foreign = (Path(store.directory) / name for name in ("a.unfinished", "b.unfinished", "notes"))
    for file in (old, new, foreign):
        file.write_bytes(b"half a pl")
    for file in (old, foreign):
        os.utime(file, (1000, 1000))
    store.save(key(1), plan())
    assert (old.exists(), new.exists(), foreign.exists()) == (False, True, True)


# Company.

WRITER = """
import sys
from cudnn_actor.plan_store.store import PlanStore
from tests.plan_store.kept_plans import key, plan
store = PlanStore(sys.argv[1], limit_bytes=20_000)
allowed = {bytes([letter]) * 3000 for letter in b"ab"}
for round in range(300):
    store.save(key(round % 12), plan(sys.argv[2].encode() * 3000))
    found = store.load(key((round + 5) % 12))
    assert found is None or found.data in allowed, found
"""


def test_processes_share_a_directory_and_each_finds_whole_plans_or_none(store: PlanStore) -> None:
    writers = [
        Program(
            ["-c", WRITER, store.directory, letter],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=Path(__file__).parents[2],
        )
        for letter in "ab"
    ]
    for writer in writers:
        said, _ = writer.communicate(timeout=PATIENCE_S)
        assert (writer.returncode, said) == (0, "")  # no bad file was seen either
    left = list(Path(store.directory).iterdir())
    assert all(file.suffix == ".plan" for file in left)
    assert sum(file.stat().st_size for file in left) <= 20_000


def test_threads_share_a_store(store: PlanStore, logs: list[EventDict]) -> None:
    found: list[StoredPlan | None] = []

    def work(letter: bytes) -> None:
        for _ in range(100):
            store.save(key(), plan(letter * 2000))
            found.append(store.load(key()))

    threads = [threading.Thread(target=work, args=(letter,)) for letter in (b"a", b"b", b"c")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert {kept.data[:1] for kept in found if kept is not None} <= {b"a", b"b", b"c"}
    assert all(kept is not None and kept.data == kept.data[:1] * 2000 for kept in found)
    assert logs == []
