"""What containers deny: writing to `/proc`, more processes."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SPAWN = """
import asyncio, resource, sys, threading
from cudnn_actor import CudnnActorError, spawn

async def main():
    async with spawn(device="cpu", isolation="process", max_restarts=0, standby=1) as gpu:
        return await gpu.ping()

if len(sys.argv) > 1:
    resource.setrlimit(resource.RLIMIT_NPROC, (int(sys.argv[1]),) * 2)
try:
    print(asyncio.run(main()))
except CudnnActorError as error:
    print(type(error).__name__, error)
"""
OTHER_USER = [
    "setpriv",
    "--reuid=54321",
    "--inh-caps=-all,+dac_override",
    "--ambient-caps=-all,+dac_override",
]
"""Runs a program as a user to whom limits apply, and who may read all files."""
READ_ONLY_PROC = ["unshare", "--mount", "sh", "-c", 'mount -o remount,ro,bind /proc && exec "$@"', "sh"]


def run(*command: str) -> subprocess.CompletedProcess[str]:
    places = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
        "OPENBLAS_NUM_THREADS": "1",
    }
    places["PYTHONDONTWRITEBYTECODE"] = "1"  # files of another user's would stay
    return subprocess.run(
        command, env={**os.environ, **places}, capture_output=True, text=True, timeout=100, check=False
    )


@functools.cache
def can(*prefix: str) -> bool:
    return shutil.which(prefix[0]) is not None and run(*prefix, "true").returncode == 0


@pytest.mark.skipif(not can(*READ_ONLY_PROC), reason="this user may not mount anything")
def test_a_worker_starts_where_proc_is_read_only() -> None:
    done = run(*READ_ONLY_PROC, sys.executable, "-c", SPAWN)
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")


@pytest.mark.skipif(not can(*OTHER_USER), reason="this user may not run programs as another")
@pytest.mark.parametrize("limit", [1, 2, 4, 5])
def test_where_there_may_be_no_more_processes_the_error_names_the_limit(limit: int) -> None:
    """Denied are the first thread of this process, a later one, another process, and a thread of that."""
    done = run(*OTHER_USER, sys.executable, "-c", SPAWN, str(limit))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("StartFailed ")
    assert "(ulimit -u, or the container's limit of pids)" in done.stdout
