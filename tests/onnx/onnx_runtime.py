"""What ONNX Runtime gives for models, in a process of its own: it opens files and keeps them open."""

from __future__ import annotations

import importlib
import pickle
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from ..patience import PATIENCE_S

__all__ = ["answers"]

_Asked = Sequence[tuple[onnx.ModelProto, dict[str, np.ndarray]]]


def answers(asked: _Asked) -> list[list[np.ndarray]]:
    """The outputs of models for inputs. Blocks."""
    given = pickle.dumps([(proto.SerializeToString(), inputs) for proto, inputs in asked])
    command = [sys.executable, "-m", "tests.onnx.onnx_runtime"]
    done = subprocess.run(
        command,
        input=given,
        stdout=subprocess.PIPE,
        check=True,
        cwd=Path(__file__).parents[2],
        timeout=PATIENCE_S,
    )
    return pickle.loads(done.stdout)  # type: ignore[no-any-return]


def _run(model: bytes, inputs: dict[str, np.ndarray]) -> list[Any]:
    ort = importlib.import_module("onnxruntime")

    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    return list(session.run(None, inputs))


if __name__ == "__main__":
    sys.stdout.buffer.write(pickle.dumps([_run(*each) for each in pickle.load(sys.stdin.buffer)]))
