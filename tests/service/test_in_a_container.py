"""What containers and limits deny: writing to `/proc`, more processes, more memory, larger files."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cudnn_actor.isolation.process.cores import may_keep_one_busy
from cudnn_actor.memory.container import processors, room_in_container

from ..patience import PATIENCE_S

ROOT = Path(__file__).parents[2]
SPAWN = """
import asyncio, os, resource, sys
from cudnn_actor import CudnnActorError, spawn

async def main():
    async with spawn(device="cpu", isolation="process", max_restarts=0, standby=1) as gpu:
        return await gpu.ping()

def say() -> None:
    try:
        print(asyncio.run(main()), flush=True)
    except CudnnActorError as error:
        print(type(error).__name__, error, flush=True)

for limit in map(int, sys.argv[1:]):
    if (child := os.fork()) == 0:
        resource.setrlimit(resource.RLIMIT_NPROC, (limit,) * 2)
        say()
        sys.exit()
    if os.waitpid(child, 0)[1]:
        sys.exit(f"{limit}: it did not end well")
if not sys.argv[1:]:
    say()
"""
OTHER_USER = [
    "setpriv",
    "--reuid=54321",
    "--inh-caps=-all,+dac_override",
    "--ambient-caps=-all,+dac_override",
]
"""Runs a program as a user to whom limits apply, and who may read all files."""
READ_ONLY_PROC = ["unshare", "--mount", "sh", "-c", 'mount -o remount,ro,bind /proc && exec "$@"', "sh"]


def run(*command: str, **more: str) -> subprocess.CompletedProcess[str]:
    places = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
        "OPENBLAS_NUM_THREADS": "1",
    }
    places["PYTHONDONTWRITEBYTECODE"] = "1"  # files of another user's would stay
    return subprocess.run(
        command,
        env={**os.environ, **places, **more},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


@functools.cache
def can(*prefix: str) -> bool:
    return shutil.which(prefix[0]) is not None and run(*prefix, "true").returncode == 0


@pytest.mark.skipif(not can(*READ_ONLY_PROC), reason="this user may not mount anything")
def test_a_worker_starts_where_proc_is_read_only() -> None:
    done = run(*READ_ONLY_PROC, sys.executable, "-c", SPAWN)
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")


@pytest.mark.skipif(not can(*OTHER_USER), reason="this user may not run programs as another")
def test_where_there_may_be_no_more_processes_the_error_names_the_limit() -> None:
    """Denied are the first thread of a process, a later one, another process, and a thread of that.

    Each has its limit in a child of one program, which itself is one of the processes that are counted.
    """
    done = run(*OTHER_USER, sys.executable, "-c", SPAWN, "2", "3", "5", "6")
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert len(said) == 4
    for line in said:
        assert line.startswith("StartFailed ")
        assert "(ulimit -u, or the container's limit of pids)" in line


FILL = """
import asyncio, os, sys
import numpy as np
from cudnn_actor import OutOfMemory, spawn

async def main():
    async with spawn(device="cpu", isolation=sys.argv[1]) as gpu:
        ones = np.ones((1, 1, 1024, 4096), np.float32)  # 16 MiB
        taken = []
        try:
            while True:
                taken.append(await gpu.upload(ones))
        except OutOfMemory as error:
            print(len(taken), error.limit is not None, (await gpu.download(taken[-1])).max())

{before}
asyncio.run(main())
"""
GROUPS = Path("/sys/fs/cgroup/memory" if Path("/sys/fs/cgroup/memory").is_dir() else "/sys/fs/cgroup")
LIMIT_FILE = "memory.limit_in_bytes" if GROUPS.name == "memory" else "memory.max"


@pytest.fixture
def container() -> Iterator[Path]:
    """A control group whose members may take 300 MiB."""
    group = GROUPS / f"cudnn-actor-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / LIMIT_FILE).write_text(str(300 << 20))
    except OSError as error:
        pytest.skip(f"this user may not limit memory: {error}")
    yield group
    group.rmdir()


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_buffers_stop_before_the_container_s_memory_does(isolation: str, container: Path) -> None:
    join = f"open({str(container / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))"
    done = run(sys.executable, "-c", FILL.format(before=join), isolation)
    assert done.returncode == 0, (done.returncode, done.stderr)
    taken, limited, largest = done.stdout.split()
    assert 4 <= int(taken) <= 15
    assert (limited, largest) == ("True", "1.0")


def limits(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("own", "files", "room"),
    [
        ("0::/\n", {"memory.max": "100000\n", "memory.current": "60000\n"}, 40000),
        (
            "0::/a/b\n",
            {
                "a/memory.max": "500\n",
                "a/memory.current": "450\n",
                "a/memory.stat": "anon 1\ninactive_file 30\n",
                "a/b/memory.max": "max\n",
                "memory.max": "9000",
            },
            80,
        ),
        ("0::/of/the/host\n", {"memory.max": "1000\n", "memory.current": "2000\n"}, 0),
        (
            "4:cpu,memory:/of/the/host\n",
            {
                "memory/memory.limit_in_bytes": "700\n",
                "memory/memory.usage_in_bytes": "300\n",
                "memory/memory.stat": "cache 9\ntotal_inactive_file 100\n",
            },
            500,
        ),
        ("4:memory:/\n", {"memory/memory.limit_in_bytes": "9223372036854771712\n"}, None),
        ("0::/\n", {"memory.max": "max\n"}, None),
        ("0::/\n", {}, None),
        ("", {}, None),
    ],
)
def test_the_room_in_a_container_is_the_least_that_its_groups_leave(
    own: str, files: dict[str, str], room: int | None, tmp_path: Path
) -> None:
    (tmp_path / "own").write_text(own)
    assert room_in_container(limits(tmp_path / "groups", files), tmp_path / "own") == room


@pytest.mark.parametrize(
    ("own", "files", "threads"),
    [
        ("0::/a", {"a/cpu.max": "50000 100000\n"}, 1),
        ("0::/a", {"a/cpu.max": "max 100000\n", "cpu.max": "100000 100000\n"}, 1),
        (
            "4:cpu,cpuacct:/b",
            {"cpu,cpuacct/b/cpu.cfs_quota_us": "20000\n", "cpu,cpuacct/b/cpu.cfs_period_us": "50000\n"},
            1,
        ),
        ("4:cpu:/b", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ("0::/a", {"a/cpu.max": "9999999999 100000\n"}, None),
        ("0::/a", {"a/cpu.max": "garbage\n"}, None),
        ("0::/a", {}, None),
    ],
)
def test_a_container_s_quota_of_processors_bounds_the_threads_that_run_at_the_same_time(
    own: str, files: dict[str, str], threads: int | None, tmp_path: Path
) -> None:
    (tmp_path / "own").write_text(own)
    found = processors(limits(tmp_path / "groups", files), tmp_path / "own")
    assert found == (len(os.sched_getaffinity(0)) if threads is None else threads)


@pytest.mark.parametrize(
    ("cores", "quota", "may"), [(64, "max", True), (64, "200000", False), (3, "max", False)]
)
def test_a_thread_stays_awake_only_if_the_container_s_quota_leaves_cores_to_others(
    cores: int, quota: str, may: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    (tmp_path / "own").write_text("0::/a")
    groups = limits(tmp_path / "groups", {"a/cpu.max": f"{quota} 100000\n"})
    assert may_keep_one_busy(groups, tmp_path / "own") is may


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_where_no_large_arena_can_be_had_smaller_ones_are(isolation: str) -> None:
    done = run(sys.executable, "-c", SMALL, isolation, MALLOC_ARENA_MAX="1")
    assert done.returncode == 0, done.stderr
    first, no_space, again, no_file = done.stdout.splitlines()
    assert first == again == "1.0"
    assert re.findall("ulimit -.", no_space) == ["ulimit -v"]
    assert re.findall("ulimit -.", no_file) == ["ulimit -f"]


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_an_empty_arena_makes_room_for_a_larger_one(isolation: str) -> None:
    done = run(sys.executable, "-c", EMPTY, isolation, MALLOC_ARENA_MAX="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["it fits", "one more does not"]


EMPTY = """
import asyncio, os, resource, sys
from cudnn_actor import OutOfMemory, spawn

MIB = 1 << 20

def bound(pid, more):
    taken = int(open(f"/proc/{pid}/statm").read().split()[0]) * resource.getpagesize()
    resource.prlimit(pid, resource.RLIMIT_AS, (taken + more, -1))

async def main():
    async with spawn(device="cpu", isolation=sys.argv[1]) as gpu:
        await gpu.free(await gpu.empty((256 * MIB,), dtype="uint8"))  # its arena is kept
        for pid in {os.getpid(), gpu.worker_pid or os.getpid()}:
            bound(pid, 160 * MIB)
        large = await gpu.empty((320 * MIB,), dtype="uint8")
        print("it fits")
        try:
            await gpu.empty((320 * MIB,), dtype="uint8")
        except OutOfMemory:
            print("one more does not")

asyncio.run(main())
"""


SMALL = """
import asyncio, resource, sys
import numpy as np
from cudnn_actor import OutOfMemory, spawn

def room():
    return int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()

async def use_small_arenas(kind, limit):
    # In the processes of one service, for as long as it lives.
    before = resource.getrlimit(kind)
    async with spawn(device="cpu", isolation=sys.argv[1]) as gpu:
        resource.setrlimit(kind, (limit, before[1]))
        if gpu.worker_pid is not None:
            resource.prlimit(gpu.worker_pid, kind, (limit, before[1]))
        print((await gpu.download(await gpu.upload(np.ones((1, 1, 64, 64), np.float32)))).max())
        try:
            await gpu.empty((1, 1, 8192, 8192), dtype="float32")  # 256 MiB
        except OutOfMemory as error:
            print(error)
    resource.setrlimit(kind, before)

asyncio.run(use_small_arenas(resource.RLIMIT_AS, room() + (60 << 20)))
asyncio.run(use_small_arenas(resource.RLIMIT_FSIZE, 20 << 20))
"""
