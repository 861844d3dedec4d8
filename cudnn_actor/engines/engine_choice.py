"""Chooses the engine for a device, and describes how this process or a worker process makes it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from cudnn_actor.actors.logs import Log
from cudnn_actor.engines import cpu, cuda
from cudnn_actor.engines.base import Engine
from cudnn_actor.engines.cpu.sessions.runtime import is_installed
from cudnn_actor.engines.cuda.device.external_arrays import adopt
from cudnn_actor.engines.cuda.diagnosis.gpus import Driver, expects_gpu, find_driver, find_driver_apart
from cudnn_actor.engines.cuda.diagnosis.installation import Problem, caution, obstacle
from cudnn_actor.extras import install_command
from cudnn_actor.memory.container import default_limit
from cudnn_actor.protocol.errors import InvalidRequest
from cudnn_actor.protocol.types.checks import did_you_mean

if TYPE_CHECKING:
    from cudnn_actor.engines.cpu.sessions.choice import Sessions

__all__ = ["CPU_PRELOAD", "EngineChoice", "WorkerEngine", "check_device", "choose_engine", "visible_gpus"]

log = Log("cudnn_actor")
_SAID: set[Problem] = set()
"""Cautions that this process has logged. Threads that start services side by side may log one twice."""


def _no_limit() -> None:
    """No limit on arenas but the device's own memory."""


class WorkerEngine(NamedTuple):
    """How a worker process makes its engine.

    Parameters
    ----------
    make
        Import path of what it calls: "package.module:Name".
    arguments
        For the call.
    """

    make: str
    arguments: tuple[str | int | bool | None, ...] = ()


class EngineChoice(NamedTuple):
    """How to make the engine for a device.

    Parameters
    ----------
    device
        "cpu" or "cuda:N".
    make
        Makes it. It takes no resources before it is opened.
    outlives_context
        The engine's own attribute: whether a new engine in this process can take over after a sticky error.
    reason
        Why this engine was chosen, as text for people.
    unused_gpu
        Whether "auto" chose the CPU although a program here can expect a GPU (`expects_gpu`).
    adopt
        Wraps another library's array on the device for `Engine.write`. Call it on the thread that uses the
        array, because the array belongs to that thread's current stream. None if the engine has no device of
        its own, or runs in another process, to which a device array cannot be passed.
    worker
        How a worker process makes it; None if only this process can.
    preload
        Modules that the process that forks workers imports first, so that the workers need not. Importing
        them does not initialise a device: a process forked after that could not use the device.
    host_arenas
        Whether its arenas are host memory, which another process can map by their descriptors.
    default_limit
        Finds out how many bytes its arenas may take where the service's options give no limit; None for no
        limit. Reads files, so an event loop must not call it.
    memory_bytes
        The device's memory; 0 if it is not known.
    bus_id
        The GPU's PCI bus id; empty for none.
    """

    device: str
    make: Callable[[], Engine]
    outlives_context: bool
    reason: str = ""
    unused_gpu: bool = False
    adopt: Callable[[object], Any] | None = None
    worker: WorkerEngine | None = None
    preload: tuple[str, ...] = ()
    host_arenas: bool = False
    default_limit: Callable[[], int | None] = _no_limit
    memory_bytes: int = 0
    bus_id: str = ""


CPU_PRELOAD = ("cudnn_actor.engines.cpu.engine",)
_CUDA_PRELOAD = ("cudnn_actor.engines.cuda.engine", "cudnn_actor.engines.cuda.library.preload")


def choose_engine(
    device: str,
    *,
    apart: bool = False,
    executable: str | os.PathLike[str] | None = None,
    dynamic_shapes: bool = False,
    exact: bool = False,
    threads: int | None = None,
    onnx_runtime: bool | None = None,
) -> EngineChoice:
    """The engine for `device`: "cpu", "cuda:N" (N counts from 0), "cuda" for the first GPU, or "auto".

    "auto" is the first GPU that this process may use (`CUDA_VISIBLE_DEVICES` is respected) if one can be
    used, else the CPU; if a GPU could have been expected, that is logged as a warning. Queries the driver
    without making a context; the first query takes a moment.

    Parameters
    ----------
    device
        As above.
    apart
        Whether the engine is for another process. If so, no CUDA library is loaded into this one: a child
        process queries the driver, and this call blocks as `find_driver_apart` does.
    executable
        Path of the Python that runs the engine's processes; None for what `find_python` finds.
    dynamic_shapes
        Whether graphs that differ in sizes alone share compiled kernels.
    exact
        Whether the CPU engine computes in float64.
    threads
        On how many threads the CPU engine computes; None: as many as this process can run at the same time.
    onnx_runtime
        Whether the CPU engine has ONNX Runtime run graphs; None: where that is installed, and pays.

    Raises
    ------
    InvalidRequest
        `device` is not a device name, or cannot be used here (the text says why), or there is no Python to
        query the driver with.
    """
    check_device(device)
    text = str(device)
    path = None if executable is None else os.fspath(executable)
    setting = _Setting(apart, path, dynamic_shapes, exact, threads, onnx_runtime)
    if text == "auto":
        return _automatic(setting)
    if text == "cpu":
        return _cpu("it was asked for", setting)
    return _asked_for(text, int(text.partition(":")[2] or 0), setting)


class _Setting(NamedTuple):
    """How an engine is to run: whether in another process, which Python runs what it starts, and what
    concerns one engine alone."""

    apart: bool
    executable: str | None
    dynamic_shapes: bool
    exact: bool
    threads: int | None
    onnx_runtime: bool | None

    @property
    def sessions(self) -> Sessions:
        """The graphs that ONNX Runtime runs. Raises `InvalidRequest` if it is to run any, and is not
        installed."""
        if self.exact or self.onnx_runtime is False:
            return "never"
        if self.onnx_runtime is None:
            return "where it pays"
        if is_installed():
            return "wherever it can"
        raise InvalidRequest(
            field="onnx_runtime",
            value=True,
            problem="needs the package onnxruntime, which is not installed",
            fix=f"{install_command('cpu')}, or leave it out",
        )


def check_device(device: str) -> None:
    """Raise `InvalidRequest` unless `device` is a device name. Does not check whether the device exists."""
    if re.fullmatch(r"auto|cpu|cuda(:\d{1,6})?", str(device)) is None:
        hint = did_you_mean(device, ("auto", "cpu", "cuda:0"))
        if str(device).casefold().startswith("gpu"):  # "gpu" is closest to "cpu" in spelling
            hint = 'did you mean "cuda:0"? '
        raise _refusal(device, "is not a device", f'{hint}use "auto", "cpu", "cuda" or "cuda:0"')


def visible_gpus(executable: str | os.PathLike[str] | None = None) -> tuple[tuple[str, ...], str]:
    """The GPUs that processes of this one may use, as "cuda:N"; and, if there is none, why, as text.

    `CUDA_VISIBLE_DEVICES` is respected. A child process queries the driver: this call blocks as
    `find_driver_apart` does. `executable` as in `choose_engine`.
    """
    driver = find_driver_apart(executable=None if executable is None else os.fspath(executable))
    problem = obstacle(driver)
    if problem is not None:
        return (), f"{problem.what} ({problem.detail})"
    return tuple(f"cuda:{ordinal}" for ordinal in range(len(driver.gpus))), ""


def _automatic(setting: _Setting) -> EngineChoice:
    driver, problem = _examine(setting)
    if problem is None:
        return _cuda(0, driver, f"{_gpu(driver, 0)} is the first GPU here", setting)
    if not expects_gpu(driver):
        return _cpu(f"there is no GPU to use: {problem.what} ({problem.detail})", setting)
    there = f"there is a GPU ({_gpu(driver, 0)}), but " if driver.gpus else ""
    return _cpu(f"{there}{problem}", setting, unused_gpu=True)


def _examine(setting: _Setting) -> tuple[Driver, Problem | None]:
    """The driver, and what prevents the use of its GPUs."""
    driver = find_driver_apart(executable=setting.executable) if setting.apart else find_driver()
    return driver, obstacle(driver if setting.apart else None)


def _asked_for(device: str, ordinal: int, setting: _Setting) -> EngineChoice:
    driver, problem = _examine(setting)
    if problem is not None:
        why = f"cannot be used here: {problem.what} ({problem.detail})"
        raise _refusal(device, why, f"{problem.fix}; cudnn-actor doctor says more")
    if ordinal >= len(driver.gpus):
        raise _refusal(
            device, f"is not a GPU of this machine, which {_shows(len(driver.gpus))}", 'use "cuda:0"'
        )
    return _cuda(ordinal, driver, f"it was asked for: {_gpu(driver, ordinal)}", setting)


def _shows(count: int) -> str:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    shown = "has" if visible is None else f"by CUDA_VISIBLE_DEVICES={visible} shows"
    return f"{shown} {count}, cuda:0" + (f" to cuda:{count - 1}" if count > 1 else "")


def _cpu(reason: str, setting: _Setting, *, unused_gpu: bool = False) -> EngineChoice:
    (log.warning if unused_gpu else log.info)("device.chosen", device="cpu", reason=reason)
    arguments = setting.exact, setting.threads, setting.sessions
    return EngineChoice(
        "cpu",
        partial(_cpu_engine, *arguments),
        outlives_context=True,
        reason=reason,
        unused_gpu=unused_gpu,
        worker=WorkerEngine("cudnn_actor.engines.cpu.engine:CpuEngine", arguments),
        preload=CPU_PRELOAD,
        host_arenas=True,
        default_limit=default_limit,
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
    )


def _cpu_engine(exact: bool, threads: int | None, sessions: Sessions) -> Engine:
    return cpu.CpuEngine(exact, threads, sessions)


def _cuda(ordinal: int, driver: Driver, reason: str, setting: _Setting) -> EngineChoice:
    device = f"cuda:{ordinal}"
    log.info("device.chosen", device=device, reason=reason, driver=driver.version)
    if (said := caution(driver)) is not None and said not in _SAID:
        _SAID.add(said)
        log.warning("cudnn.untried", problem=said.what, detail=said.detail, fix=said.fix)
    return EngineChoice(
        device,
        partial(_cuda_engine, ordinal, setting.dynamic_shapes),
        outlives_context=False,
        reason=reason,
        adopt=None if setting.apart else partial(adopt, ordinal=ordinal),
        worker=WorkerEngine("cudnn_actor.engines.cuda.engine:CudaEngine", (ordinal, setting.dynamic_shapes)),
        preload=_CUDA_PRELOAD,
        memory_bytes=driver.gpus[ordinal].memory_bytes,
        bus_id=driver.gpus[ordinal].bus_id,
    )


def _cuda_engine(ordinal: int, dynamic_shapes: bool) -> Engine:
    return cuda.CudaEngine(ordinal, dynamic_shapes)


def _gpu(driver: Driver, ordinal: int) -> str:
    return driver.gpus[ordinal].name


def _refusal(device: object, problem: str, fix: str) -> InvalidRequest:
    return InvalidRequest(field="device", value=device, problem=problem, fix=fix)
