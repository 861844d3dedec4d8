"""The inference server: requests a second and times of 64 clients with one sample each, by every way in.

    python -m benchmarks.serving --out benchmarks/results
    python -m benchmarks.serving --device cuda:0 --model resnet50.onnx

In process, `gpu.batched` without a server. The others are `tritonclient` against `cudnn-actor serve` in a
process of its own: HTTP with binary tensors, gRPC, and gRPC with the input in shared memory; and the same
client against a server of grpc.aio that computes nothing and answers with bytes of the same size
(`benchmarks.serving_side`). The clients share one process, and the machine's cores with the server.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import tritonclient.grpc.aio as triton_grpc
import tritonclient.http.aio as triton_http
from onnx import TensorProto, helper, numpy_helper
from rich.table import Table
from tritonclient.utils import shared_memory

from cudnn_actor import spawn
from cudnn_actor.cli.throughput import measured
from cudnn_actor.serving.grpc_schema import message_class

from .recording import Row, attempted, keep

__all__ = ["main"]

Call = Callable[[], Awaitable[Any]]
Opened = contextlib.AbstractAsyncContextManager[Call]
REGION = f"cudnn_actor_benchmark_{os.getpid()}"


def network(blocks: int, width: int, image: int) -> onnx.ModelProto:
    """A residual network of 3x3 convolutions: pictures of (N, 3, image, image) to ten scores."""
    rng = np.random.default_rng(0)
    nodes, tensors = [], []

    def convolved(source: str, name: str, channels: int) -> str:
        weights = rng.standard_normal((width, channels, 3, 3)) / np.sqrt(9 * channels)
        tensors.append(numpy_helper.from_array(weights.astype(np.float32), f"{name}_w"))
        nodes.append(helper.make_node("Conv", [source, f"{name}_w"], [name], pads=[1, 1, 1, 1]))
        nodes.append(helper.make_node("Relu", [name], [f"{name}_r"]))
        return f"{name}_r"

    last = convolved("image", "first", 3)
    for block in range(blocks):
        inner = convolved(convolved(last, f"a{block}", width), f"b{block}", width)
        nodes.append(helper.make_node("Add", [last, inner], [f"sum{block}"]))
        last = f"sum{block}"
    scores = rng.standard_normal((width, 10)).astype(np.float32)
    tensors.append(numpy_helper.from_array(scores, "scores_w"))
    nodes += [
        helper.make_node("GlobalAveragePool", [last], ["pooled"]),
        helper.make_node("Flatten", ["pooled"], ["flat"]),
        helper.make_node("MatMul", ["flat", "scores_w"], ["scores"]),
    ]
    given = helper.make_tensor_value_info("image", TensorProto.FLOAT, ["N", 3, image, image])
    made = helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["N", 10])
    graph = helper.make_graph(nodes, "network", [given], [made], initializer=tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


NETWORKS = {"small": (1, 8, 16), "residual": (4, 32, 32)}
"""Blocks, width and image of the networks that are measured without a file."""


@contextlib.contextmanager
def process(*words: str, given: bytes | None = None) -> Iterator[str]:
    """A process of `python -m`; gives its first line. It is killed at the end."""
    command = [sys.executable, "-m", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE) as started:
        try:
            assert started.stdin is not None
            assert started.stdout is not None
            started.stdin.write(given or b"")
            started.stdin.close()
            yield started.stdout.readline().decode()
        finally:
            started.kill()


def _tensor(module: Any, picture: np.ndarray) -> Any:
    return module.InferInput("image", picture.shape, "FP32")


@contextlib.asynccontextmanager
async def in_process(path: Path, picture: np.ndarray, args: argparse.Namespace) -> AsyncIterator[Call]:
    async with (
        spawn(device=args.device, isolation="process") as gpu,
        await gpu.load(path) as model,
        gpu.batched(model, max_batch=args.max_batch, max_delay_us=args.max_delay_us) as endpoint,
    ):
        yield lambda: endpoint(image=picture)


@contextlib.asynccontextmanager
async def over_http(address: str, picture: np.ndarray) -> AsyncIterator[Call]:
    async with triton_http.InferenceServerClient(address, conn_limit=1000) as client:
        given = _tensor(triton_http, picture)
        given.set_data_from_numpy(picture)
        yield lambda: client.infer("model", [given])


@contextlib.asynccontextmanager
async def over_grpc(address: str, picture: np.ndarray) -> AsyncIterator[Call]:
    async with triton_grpc.InferenceServerClient(address) as client:
        given = _tensor(triton_grpc, picture)
        given.set_data_from_numpy(picture)
        yield lambda: client.infer("model", [given])


@contextlib.asynccontextmanager
async def in_shared_memory(address: str, picture: np.ndarray) -> AsyncIterator[Call]:
    region = shared_memory.create_shared_memory_region(REGION, REGION, picture.nbytes)
    try:
        shared_memory.set_shared_memory_region(region, [picture])
        async with triton_grpc.InferenceServerClient(address) as client:
            await client.register_system_shared_memory(REGION, REGION, picture.nbytes)
            given = _tensor(triton_grpc, picture)
            given.set_shared_memory(REGION, picture.nbytes)
            yield lambda: client.infer("model", [given])
            await client.unregister_system_shared_memory(REGION)
    finally:
        shared_memory.destroy_shared_memory_region(region)


async def _row(way: str, opened: Opened, args: argparse.Namespace) -> Row:
    async with opened as call:
        await measured(call, args.clients, args.seconds / 4)  # connections are made, and caches filled
        found = await measured(call, args.clients, args.seconds)
    times = {name: round(getattr(found, name), 3) for name in ("p50_ms", "p99_ms")}
    return {"way": way, "requests_per_s": round(found.per_s, 1), **times}


def _measured(what: str, path: Path, args: argparse.Namespace) -> Iterator[Row]:
    model = onnx.load(path, load_external_data=False)
    dims = [dim.dim_value or 1 for dim in model.graph.input[0].type.tensor_type.shape.dim]
    picture = np.random.default_rng(0).standard_normal(dims).astype(np.float32)
    serve = ["cudnn_actor.cli", "serve", f"model={path}", "--http", "0", "--grpc", "0"]
    serve += ["--device", args.device, "--batch", f"{args.max_batch}:{args.max_delay_us}"]
    yield {"model": what, **asyncio.run(_row("in process", in_process(path, picture, args), args))}
    with process(*serve) as line:
        http, grpc = (part.rpartition(" ")[2] for part in line.strip().split(", "))
        for way, opened, address in (
            ("HTTP, binary", over_http, http),
            ("gRPC", over_grpc, grpc),
            ("gRPC, shared memory", in_shared_memory, grpc),
        ):
            yield {"model": what, **asyncio.run(_row(way, opened(address, picture), args))}
    make: Any = message_class("ModelInferResponse")
    response = make(model_name="model", model_version="1")
    response.outputs.add(name="scores", datatype="FP32", shape=[1, 10])
    response.raw_output_contents.append(bytes(40))
    with process("benchmarks.serving_side", given=response.SerializeToString()) as port:
        address = f"127.0.0.1:{port.strip()}"
        nothing = asyncio.run(_row("a no-op grpc.aio server", over_grpc(address, picture), args))
        yield {"model": what, **nothing}


def rows(args: argparse.Namespace) -> Iterator[Row]:
    """Yields a row for each model and way."""
    if args.model is not None:
        yield from attempted(args.model.name, functools.partial(_measured, args.model.stem, args.model, args))
        return
    with tempfile.TemporaryDirectory() as folder:
        for what in args.networks:
            path = Path(folder) / f"{what}.onnx"
            onnx.save(network(*NETWORKS[what]), path)
            yield from attempted(what, functools.partial(_measured, what, path, args))


def sheet(found: list[Row]) -> Table:
    """The table for a terminal."""
    table = Table(title="requests of one sample, by every way in")
    for name in ("model", "way", "requests a second", "p50, ms", "p99, ms"):
        table.add_column(name, justify="right")
    for row in found:
        numbers = (f"{row[name]:,.2f}" for name in ("p50_ms", "p99_ms"))
        table.add_row(row["model"], row["way"], f"{row['requests_per_s']:,.0f}", *numbers)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving", description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--model", type=Path, help="an ONNX file with one picture in; two small networks unless given"
    )
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--max-batch", type=int, default=32)
    parser.add_argument("--max-delay-us", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=4.0, help="for how long, each row")
    parser.add_argument("--out", type=Path, help="directory for the JSON")
    args = parser.parse_args()
    known = {"python": platform.python_version(), "cores": os.cpu_count(), "clients": args.clients}
    keep(rows(args), sheet, args.out, "serving", **known, device=args.device)


if __name__ == "__main__":
    main()
