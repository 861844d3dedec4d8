"""The demo's model: each caller sends it one picture at a time, the requests run in batches, and the worker
is killed while they do.

Each caller sends its picture again when it has the answer. Each answer is compared with the model's answer
for that picture alone, before the kill.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Sequence

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from cudnn_actor.cli.demo.findings import ServedKill
from cudnn_actor.cli.demo.recorder import Recorder, Sample
from cudnn_actor.models import BatchedModel
from cudnn_actor.protocol import CudnnActorError
from cudnn_actor.service.client import CudnnRef

__all__ = ["CALLERS", "PICTURE_SIDE", "network", "serve_through_a_kill"]

CALLERS = 24
PICTURE_SIDE = 32
_MOST_BATCH, _DELAY_US = 8, 500
_BEFORE_S = _AFTER_S = 0.35
"""Seconds for which the callers send before the kill, and again after the next answer."""
_CHANNELS, _SCORES = 8, 5


def network(rng: np.random.Generator) -> bytes:
    """An ONNX file: two convolutions with random weights, then scores from the means of their channels.

    Pictures of dims (N, 3, 32, 32) give scores of dims (N, 5).
    """
    weights = {
        "w1": rng.standard_normal((_CHANNELS, 3, 3, 3)) / 5,
        "w2": rng.standard_normal((_CHANNELS, _CHANNELS, 3, 3)) / 8,
        "w3": rng.standard_normal((_CHANNELS, _SCORES)),
    }
    nodes = [
        helper.make_node("Conv", ["picture", "w1"], ["c1"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c1"], ["r1"]),
        helper.make_node("Conv", ["r1", "w2"], ["c2"], strides=[2, 2]),
        helper.make_node("Relu", ["c2"], ["r2"]),
        helper.make_node("GlobalAveragePool", ["r2"], ["means"]),
        helper.make_node("Flatten", ["means"], ["flat"]),
        helper.make_node("Gemm", ["flat", "w3"], ["scores"]),
    ]
    dims: list[str | int | None] = ["N", 3, PICTURE_SIDE, PICTURE_SIDE]
    graph = helper.make_graph(
        nodes,
        "demo",
        [helper.make_tensor_value_info("picture", TensorProto.FLOAT, dims)],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["N", _SCORES])],
        [numpy_helper.from_array(values.astype(np.float32), name) for name, values in weights.items()],
    )
    opset = helper.make_opsetid("", 17)
    return bytes(helper.make_model(graph, opset_imports=[opset], ir_version=8).SerializeToString())


async def serve_through_a_kill(
    gpu: CudnnRef,
    recorder: Recorder,
    model: bytes,
    pictures: Sequence[np.ndarray],
    say: Callable[[str], None],
) -> ServedKill:
    """Let one caller for each of these pictures send it again and again, and kill the worker meanwhile.

    Parameters
    ----------
    gpu
        A service in process isolation.
    recorder
        The recorder, which counts the errors; `ServedKill` has times of its clock.
    model
        The model's file, as `network` returns it.
    pictures
        Float32 arrays of dims (1, 3, 32, 32), one for each caller.
    say
        A function that prints the progress.

    Raises
    ------
    CudnnActorError
        The model could not be loaded, or did not run before the kill.
    """
    async with (
        await gpu.load(model) as loaded,
        gpu.batched(loaded, max_batch=_MOST_BATCH, max_delay_us=_DELAY_US) as endpoint,
    ):
        alone = [(await loaded.run({"picture": picture}))["scores"] for picture in pictures]
        return await _Callers(gpu, recorder, endpoint).serve(pictures, alone, say)


class _Callers:
    """The callers, and the outcomes of their requests."""

    def __init__(self, gpu: CudnnRef, recorder: Recorder, endpoint: BatchedModel) -> None:
        self._gpu, self._recorder, self._endpoint = gpu, recorder, endpoint
        self._samples: list[Sample] = []
        self._wrong = 0
        self._in_flight = 0
        self._over = False
        self._generation = gpu.generation
        self._answered = asyncio.Event()
        """An event that is set when the successor of the killed worker has answered."""
        self._answered_s = 0.0

    async def serve(
        self, pictures: Sequence[np.ndarray], alone: Sequence[np.ndarray], say: Callable[[str], None]
    ) -> ServedKill:
        """Serve, kill, and serve on."""
        try:
            async with asyncio.TaskGroup() as callers:
                for picture, scores in zip(pictures, alone, strict=True):
                    callers.create_task(self._call(picture, scores))
                killed_s, in_flight = await self._kill(say)
        except* CudnnActorError as errors:
            raise errors.exceptions[0] from None
        return ServedKill(
            killed_s=killed_s,
            callers=len(pictures),
            in_flight=in_flight,
            answered_s=self._answered_s - killed_s,
            samples=self._samples,
            wrong=self._wrong,
        )

    async def _kill(self, say: Callable[[str], None]) -> tuple[float, int]:
        """Kill the worker after a while, and end the callers a while after the next answer.

        Returns when it was killed, and how many requests were in flight then.
        """
        await asyncio.sleep(_BEFORE_S)
        pid, killed_s, in_flight = self._gpu.worker_pid, self._recorder.now_s, self._in_flight
        assert pid is not None, "it answers all the time"
        os.kill(pid, signal.SIGKILL)
        say(f"  [red]kill -9 {pid}[/]: the worker process, amid the batches of {in_flight} callers")
        await self._answered.wait()
        await asyncio.sleep(_AFTER_S)
        self._over = True
        return killed_s, in_flight

    async def _call(self, picture: np.ndarray, alone: np.ndarray) -> None:
        while not self._over:
            began_s = self._recorder.now_s
            self._in_flight += 1
            try:
                answer = await self._endpoint(picture=picture)
            except CudnnActorError as error:
                self._recorder.note_error(error)
                raise
            finally:
                self._in_flight -= 1
            now_s = self._recorder.now_s
            self._samples.append(Sample("batched model", "BatchedRun", began_s, now_s - began_s))
            self._wrong += not np.allclose(answer["scores"], alone, rtol=1e-4, atol=1e-5)
            if self._gpu.generation > self._generation and not self._answered.is_set():
                self._answered_s = now_s
                self._answered.set()
