"""What the server says of its models' requests: how they were batched, and where their time went."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import tritonclient.grpc.aio as triton

from cudnn_actor.serving.model_settings import Batching
from cudnn_actor.serving.server import InferenceServer, ServerOptions, serve_with

from ..service.rigs import Gate, in_thread, spawn_gated
from .servers import PLAIN, until, write_square

HOUR_US = 3.6e9
PARTS = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output")


async def told_by_both(server: InferenceServer) -> Any:
    """The statistics of the model `square` over HTTP, once it is seen that gRPC says the same."""
    base = f"http://127.0.0.1:{server.http_port}"
    async with (
        httpx.AsyncClient(base_url=base, **PLAIN) as http,
        triton.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as client,
    ):
        (told,) = (await http.get("/v2/models/square/stats")).json()["model_stats"]
        (other,) = (await client.get_inference_statistics("square")).model_stats
    for name in ("last_inference", "inference_count", "execution_count"):
        assert getattr(other, name) == told[name]
    for name in PARTS:
        same(getattr(other.inference_stats, name), told["inference_stats"][name])
    for ours, each in zip(other.batch_stats, told["batch_stats"], strict=True):
        assert ours.batch_size == each["batch_size"]
        for name in ("compute_input", "compute_infer", "compute_output"):
            same(getattr(ours, name), each[name])
    return told


def same(message: Any, told: dict[str, int]) -> None:
    assert (message.count, message.ns) == (told["count"], told["ns"])


async def test_batches_are_counted_by_size_and_waiting_apart_from_running(tmp_path: Path) -> None:
    gate = Gate()
    options = ServerOptions(
        models={"square": write_square(tmp_path)},
        http=0,
        grpc=0,
        batch=Batching(max=4, max_delay_us=HOUR_US),
    )
    async with (
        spawn_gated(gate) as gpu,
        serve_with(gpu, options) as server,
        triton.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as client,
    ):

        def asked(rows: int) -> asyncio.Task[Any]:
            given = triton.InferInput("x", [rows, 3], "FP32")
            given.set_data_from_numpy(np.ones((rows, 3), np.float32))
            return asyncio.create_task(client.infer("square", [given]))

        _, served = server.catalog.find("square")
        with gate.closed():
            first = asked(1)
            await in_thread(gate.wait_for_arrival)
            others = [asked(1), asked(1)]
            await until(lambda: served.waiting == 2)
            begun = time.perf_counter_ns()
            await asyncio.sleep(0)
            least_ns = time.perf_counter_ns() - begun
        await asyncio.gather(first, *others)
        await asked(7)  # more than a batch takes: it runs by itself
        told = await told_by_both(server)
    stats = told["inference_stats"]
    assert [(each["batch_size"], each["compute_infer"]["count"]) for each in told["batch_stats"]] == [
        (1, 1),
        (2, 1),
        (7, 1),
    ]
    assert (told["inference_count"], told["execution_count"]) == (10, 3)
    assert all(stats[name]["count"] == 4 for name in PARTS if name != "fail")
    assert stats["queue"]["ns"] > 2 * least_ns
    parts = ("queue", "compute_input", "compute_infer", "compute_output")
    assert sum(stats[name]["ns"] for name in parts) == stats["success"]["ns"]
