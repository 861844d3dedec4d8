"""A minute of sound through a voice detector of 1,875 steps, beside ONNX Runtime on the CPU.

    python -m benchmarks.voice_detector silero_vad_16k_sequence.onnx --device cuda:0 --out benchmarks/results

The file is one of the package silero-vad: convolutions, and an LSTM that goes through the chunks of 32 ms. A
row for each side: a service (its name is the device's and its isolation's) and `onnxruntime` on the CPU, with
one thread and with as many as it takes, where that is installed.

`step_us` is the time of a request, NumPy to NumPy, over the number of steps, in microseconds: the median of
the rounds. `off` is the largest difference between the
probabilities and ONNX Runtime's. The sound is drawn: noise whose loudness rises and falls.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import importlib.util
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.table import Table

from cudnn_actor import spawn

from .gpu.setting import gpu_versions
from .recording import Row, attempted, keep

__all__ = ["main"]

STEPS = 1875
_SAMPLES, _BEFORE, _UNITS = 512, 64, 128
"""Of a chunk at 16 kHz; how many of the one before it are given with it; and of the LSTM."""
_ROUNDS = 20
Arrays = dict[str, Any]


def sound(steps: int) -> Arrays:
    """The inputs: chunks of dims (steps, 576), and the state before the first one; float32."""
    rng = np.random.default_rng(0)
    count = steps * _SAMPLES
    loudness = 0.05 * (1 + np.sin(np.arange(count) / 9000)) * (1 + np.sin(np.arange(count) / 37))
    samples = np.concatenate([np.zeros(_BEFORE), loudness * rng.standard_normal(count)]).astype(np.float32)
    windows = np.lib.stride_tricks.sliding_window_view(samples, _BEFORE + _SAMPLES)[::_SAMPLES]
    state = np.zeros((1, 1, _UNITS), np.float32)
    return {"input": np.ascontiguousarray(windows), "h": state, "c": state.copy()}


def _by_onnx_runtime(path: Path, given: Arrays, threads: int, rounds: int) -> tuple[Row, np.ndarray]:
    import onnxruntime  # type: ignore[import-not-found, unused-ignore]  # noqa: PLC0415 - may be missing

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    took, found = [], np.zeros(0)
    for _ in range(rounds + 1):
        start = time.perf_counter()
        found = session.run(["speech_probs"], given)[0]
        took.append(time.perf_counter() - start)
    side = f"onnxruntime {onnxruntime.__version__}, {threads or 'all'} threads"
    return {"side": side, "step_us": _of_step(took, given)}, np.asarray(found)


def _of_step(took: Sequence[float], given: Arrays) -> float:
    """Microseconds of a step: the first request is left out."""
    return round(statistics.median(took[1:]) / len(given["input"]) * 1e6, 3)


async def _by_service(
    path: Path, given: Arrays, device: str, isolation: Literal["process", "thread"], rounds: int
) -> tuple[Row, np.ndarray]:
    async with spawn(device=device, isolation=isolation) as gpu:
        model = await gpu.load(path, dims={"sequence_length": len(given["input"])})
        took, found = [], np.zeros(0)
        for _ in range(rounds + 1):
            start = time.perf_counter()
            found = np.asarray((await gpu.run(model, **given))["speech_probs"])
            took.append(time.perf_counter() - start)
    return {"side": f"{device}, {isolation}", "step_us": _of_step(took, given)}, found


def rows(path: Path, device: str, steps: int, rounds: int) -> Iterator[Row]:
    """Yields a row for each side."""
    given, wanted = sound(steps), None
    if importlib.util.find_spec("onnxruntime") is not None:
        for threads in (1, 0):
            row, wanted = _by_onnx_runtime(path, given, threads, rounds)
            yield row
    for isolation in ("process", "thread"):
        yield from attempted(
            f"{device}, {isolation}",
            functools.partial(_beside, wanted, path, given, device, isolation, rounds),
        )


def _beside(wanted: np.ndarray | None, *arguments: Any) -> Iterator[Row]:
    row, found = asyncio.run(_by_service(*arguments))
    yield row if wanted is None else {**row, "off": float(np.abs(found - wanted).max())}


def sheet(found: list[Row]) -> Table:
    """The table for a terminal."""
    table = Table(title="A voice detector, microseconds of a step")
    for name in ("side", "step_us", "off"):
        table.add_column(name, justify="left" if name == "side" else "right")
    for row in found:
        table.add_row(row["side"], f"{row['step_us']:,}", f"{row['off']:.1e}" if "off" in row else "")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.voice_detector", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--rounds", type=int, default=_ROUNDS)
    parser.add_argument("--out", type=Path, help="directory for the JSON")
    given = parser.parse_args()
    versions = {} if given.device == "cpu" else gpu_versions()
    found = rows(given.file, given.device, given.steps, given.rounds)
    keep(found, sheet, given.out, "voice-detector", versions=versions)


if __name__ == "__main__":
    main()
