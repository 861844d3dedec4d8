"""ONNX Runtime and ONNX's reference evaluator, in a process of their own: a model may end it."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx

__all__ = ["Answer", "Others"]

_SECONDS = 60.0


class Answer(NamedTuple):
    """The outputs of a model in order, or why there are none."""

    outputs: list[Any] | None
    reason: str = ""


def _with_onnx_runtime(model: bytes, inputs: Mapping[str, np.ndarray]) -> list[Any]:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    if all(array.dtype.kind in "fiub?OU" for array in inputs.values()):
        return list(session.run(None, dict(inputs)))
    values = {name: _value(ort, array) for name, array in inputs.items()}
    names = [each.name for each in session.get_outputs()]
    return [each.numpy() for each in session.run_with_ort_values(names, values)]


def _value(ort: Any, array: np.ndarray) -> Any:
    kind = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
    return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array, kind)


def _with_the_reference(model: bytes, inputs: Mapping[str, np.ndarray]) -> list[Any]:
    from onnx.reference import ReferenceEvaluator

    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        found = ReferenceEvaluator(model).run(None, dict(inputs))
    return [np.asarray(each) if isinstance(each, np.generic) else each for each in found]


def _attempt(run: Callable[..., list[Any]], model: bytes, inputs: Mapping[str, np.ndarray]) -> Answer:
    try:
        return Answer(run(model, inputs))
    except Exception as error:  # noqa: BLE001 - they raise what they like
        return Answer(None, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")


def _serve(connection: Connection) -> None:
    os.environ["ALLOW_RELEASED_ONNX_OPSET_ONLY"] = "0"
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what ONNX Runtime prints although it is told not to
    while True:
        try:
            model, inputs = connection.recv()
        except EOFError:
            return
        for run in (_with_onnx_runtime, _with_the_reference):
            answer = _attempt(run, model, inputs)
            try:
                connection.send(tuple(answer))  # the class has another name in the other process
            except Exception as error:  # noqa: BLE001 - a value that cannot be pickled
                connection.send((None, f"no answer that can be sent: {type(error).__name__}"))


class Others:
    """The process, started again when it has ended or is too slow. A context manager."""

    def __enter__(self) -> Others:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _start(self) -> None:
        self._connection, other = multiprocessing.Pipe()
        descriptor = other.fileno()
        command = [sys.executable, "-m", __name__, str(descriptor)]
        self._process = subprocess.Popen(command, pass_fds=[descriptor], cwd=Path(__file__).parents[3])
        other.close()

    def _end(self) -> None:
        self._connection.close()
        self._process.kill()
        self._process.wait()

    def answers(self, model: bytes, inputs: Mapping[str, np.ndarray]) -> tuple[Answer, Answer]:
        """What ONNX Runtime and the reference evaluator give. Blocks, for a minute each at most."""
        found = list[Answer]()
        with suppress(BrokenPipeError):
            self._connection.send((model, dict(inputs)))
        while len(found) < 2:
            try:
                slow = not self._connection.poll(_SECONDS)
                found.append(Answer(None, "too slow") if slow else Answer(*self._connection.recv()))
            except (EOFError, ConnectionResetError):
                found.append(Answer(None, "ended its process"))
                slow = True
            if slow:
                self._end()
                self._start()
                found += [Answer(None, "was not asked")] * (2 - len(found))
        return found[0], found[1]


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])))
