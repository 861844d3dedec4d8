"""A user's process whose workers come to every harm there is: what is in it afterwards, and what it leaves.

Run as a program, because what has been imported and mapped in a process stays there:

    python -m tests.gpu.worker_program DEVICE STANDBY

It prints one line of JSON, and ends by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import cudnn_actor.logging
from cudnn_actor.processes.launching import close_launchers

from .worker_faults import Ammunition
from .worker_load import Load, deadly_service, strike

LIBRARIES = ("libcuda.so", "libcudnn", "libcudart", "libcublas", "libnvrtc")
PACKAGES = ("cupy", "cudnn", "cuda")
_PR_SET_CHILD_SUBREAPER = 36
_GONE_WITHIN_S = 15.0
_LOOK_S = 0.01


async def harm(device: str, standby: int) -> dict[str, Any]:
    """Every harm, under load."""
    with tempfile.TemporaryDirectory(prefix="cudnn-actor-ammunition-") as folder:
        ammunition = Ammunition(folder)
        async with deadly_service(device, folder, standby=standby, hang_after_s=3.0) as gpu:
            async with Load(gpu) as load:
                for how in ("illegal access", "SIGKILL", "hang"):
                    await strike(gpu, how, ammunition)
                    await load.flow()
            found = {"generation": gpu.generation, "checked": load.checked, "device": gpu.device}
    return found


def loaded() -> dict[str, list[str]]:
    """The libraries of the device that are mapped here, and their packages that are imported."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    mapped = {line.rpartition("/")[2] for line in maps if any(name in line for name in LIBRARIES)}
    packages = {name for name in sys.modules if name.partition(".")[0] in PACKAGES}
    return {"mapped": sorted(mapped), "imported": sorted(packages)}


def left_running() -> list[str]:
    """The processes that are still there a moment after the end: orphans of ours come to this process."""
    deadline = time.monotonic() + _GONE_WITHIN_S
    while (left := _children()) and time.monotonic() < deadline:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, os.WNOHANG)
        time.sleep(_LOOK_S)
    return left


def _children() -> list[str]:
    found = []
    for task in Path("/proc/self/task").iterdir():
        for pid in (task / "children").read_text().split():
            with contextlib.suppress(OSError):
                found.append(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode())
    return found


def main() -> None:
    """Print the verdict."""
    device, standby = sys.argv[1], int(sys.argv[2])
    cudnn_actor.logging.configure()
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    verdict = asyncio.run(harm(device, standby))
    verdict |= loaded()
    close_launchers()
    verdict["left"] = left_running()
    print(json.dumps(verdict), flush=True)  # noqa: T201 - the parent reads it


if __name__ == "__main__":
    main()
