"""ONNX Runtime: the package, and sessions of models.

It is imported for the first session, in the process that runs it: its import may start threads, which no
forked child has. So no forkserver imports it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np

from cudnn_actor.actors.logs import Log

__all__ = ["as_value", "giving_memory_back", "is_installed", "make_session"]

log = Log("cudnn_actor")

_SILENT = 4
"""The severity of log lines that ONNX Runtime writes to stderr: fatal ones."""


def is_installed() -> bool:
    """Whether the package is there. Imports nothing."""
    return importlib.util.find_spec("onnxruntime") is not None


@functools.cache
def _package() -> Any:
    """The package. It sends no telemetry of this process, unless the variable says otherwise: from 1.30 on,
    that would start a thread, and open a database in the home directory."""
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    return importlib.import_module("onnxruntime")


_registering = threading.Lock()


def _share_memory() -> bool:
    """Register the memory that all sessions of this process take intermediate results from, once.

    Sessions of one engine run one at a time, so that it grows to what the largest needs; with memory of its
    own, each would keep its own. Returns whether there is such memory.

    Engines on several threads may make their first sessions at the same time. A second registration fails:
    so one registers while the others wait.
    """
    with _registering:
        return _register()


@functools.cache
def _register() -> bool:
    ort = _package()
    info = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
    same_as_requested = 1
    try:
        ort.create_and_register_allocator(info, ort.OrtArenaCfg(0, same_as_requested, -1, -1))
    except Exception as error:  # noqa: BLE001 - the package raises its own; there may be one already
        log.debug("session.memory_not_shared", error=str(error))
        return False
    return True


def make_session(model: bytes, threads: int, constants: Mapping[str, Any]) -> Any:
    """A session of a model, and its constants. Raises whatever ONNX Runtime raises. Blocks.

    Parameters
    ----------
    model
        Its bytes.
    threads
        How many compute, the caller's included. Those that wait for work sleep.
    constants
        The values that are given beside the model, by name.
    """
    ort = _package()
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = _SILENT
    # Threads that spin while they wait save 10 us each time on an idle machine. On a busy one, they take the
    # time of those that they wait for: a YOLO-n then took 4 times as long, and twice the CPU seconds.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if _share_memory():
        options.add_session_config_entry("session.use_env_allocators", "1")
    if constants:
        options.add_external_initializers(list(constants), list(constants.values()))
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def as_value(array: np.ndarray, element_type: int) -> Any:
    """A packed array as ONNX Runtime's own value, on the same memory."""
    return _package().OrtValue.ortvalue_from_numpy_with_onnx_type(array, element_type)


def giving_memory_back() -> Any:
    """Options of a run behind which the shared memory keeps only what is in use."""
    options = _package().RunOptions()
    options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    return options
