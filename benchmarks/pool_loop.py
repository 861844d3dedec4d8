"""What the caller of a pool spends on each sample of a batched model, on members that compute nearly nothing.

    python -m benchmarks.pool_loop --members 8 --out benchmarks/results

The members run on the CPU engine, each in a process of its own. The model is a mean of each colour of a
picture and a product with (3, 1000) weights. Callers send one picture after the other. It needs more cores
than members.

With `--ran-ms`, the members are processes that keep each batch for so long, as a GPU does, and read nothing
of it. It then needs cores for the event loop and for the threads that copy. ResNet-50 in bfloat16 on H200 is
about this:

    python -m benchmarks.pool_loop --members 2 --dtype float16 --ran-ms 3

With `--per-s`, samples begin at random moments, so many a second, of which another process tells.

- `per_s`: samples a second, the median of the rounds. Where the members have cores of their own, it is what
  one event loop can do.
- `loop_us`: what the thread of the event loop computes for a sample; `all_us`: all threads of this process,
  which also copy.
- `switches`: how often that thread waits for each batch: for something to do, or for the interpreter's lock.
- `p99_ms`: with `--per-s`, from such a moment to the answer.
- `batch`, `assembled_ms`, `ran_ms`, `divided_ms`: see `benchmarks.pool`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import gc
import resource
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

from cudnn_actor.models import BatchedModel
from cudnn_actor.models.batch_records import BatchTimes
from cudnn_actor.pool import spawn_pool

from .open_load import Load, other_process
from .recording import Row, attempted, keep, table_of
from .timed_members import GATHERS, timed_endpoint

__all__ = ["main"]

_SCORES = 1000


def means(image: int, dtype: str) -> onnx.ModelProto:
    """A model of pictures of (N, 3, image, image)."""
    weights = np.random.default_rng(0).standard_normal((3, _SCORES)).astype(dtype)
    nodes = [
        helper.make_node("GlobalAveragePool", ["image"], ["pooled"]),
        helper.make_node("Flatten", ["pooled"], ["flat"]),
        helper.make_node("MatMul", ["flat", "weights"], ["scores"]),
    ]
    given = helper.make_tensor_value_info(
        "image", helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), ["N", 3, image, image]
    )
    made = helper.make_tensor_value_info(
        "scores", helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), ["N", _SCORES]
    )
    initializer = [numpy_helper.from_array(weights, "weights")]
    graph = helper.make_graph(nodes, "means", [given], [made], initializer=initializer)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


async def measured(args: argparse.Namespace) -> list[Row]:
    """The one row."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "means.onnx"
        onnx.save(means(args.image, args.dtype), path)
        async with endpoint_of(path, args) as endpoint:
            await load(endpoint, args, args.seconds / 4)
            gc.collect()
            gc.freeze()
            async with other_process() if args.per_s else contextlib.nullcontext() as open_load:
                rounds = [await one_round(endpoint, args, open_load) for _ in range(args.rounds)]
            gc.unfreeze()
    row: Row = {name: round(statistics.median(each[name] for each in rounds), 3) for name in rounds[0]}
    return [{"members": args.members, "callers": args.callers, **row}]


@contextlib.asynccontextmanager
async def endpoint_of(path: Path, args: argparse.Namespace) -> AsyncIterator[BatchedModel]:
    """Batches of the model, on members that compute it, or on those that only keep them for `--ran-ms`."""
    if args.ran_ms is not None:
        seconds = args.ran_ms / 1000
        timed = timed_endpoint(path, args.members, seconds, batch=args.batch, gather=GATHERS[args.gather])
        async with timed as endpoint:
            yield endpoint
        return
    async with spawn_pool(["cpu"] * args.members) as pool:
        model = await pool.load(path)
        async with pool.batched(model, max_batch=args.batch, in_flight=2 * args.members) as endpoint:
            yield endpoint


async def one_round(
    endpoint: BatchedModel, args: argparse.Namespace, open_load: Load | None
) -> dict[str, float]:
    """The figures of so many seconds."""
    batches = list[BatchTimes]()
    endpoint.on_batch = batches.append
    began, thread, switched = time.perf_counter(), time.thread_time(), _switches()
    process = time.process_time()
    figures = {}
    if open_load is None:
        answered = await load(endpoint, args, args.seconds)
    else:
        given = {"image": np.zeros((1, 3, args.image, args.image), args.dtype)}
        found = await open_load(lambda: endpoint(given), args.per_s, args.seconds)
        answered = len(found)
        figures["p99_ms"] = 1e3 * float(np.percentile([each.ended - each.began for each in found], 99))
    took, thread, process = (
        time.perf_counter() - began,
        time.thread_time() - thread,
        time.process_time() - process,
    )
    endpoint.on_batch = None
    times = {
        f"{name}_ms": 1e-6 * statistics.fmean(getattr(each, f"{name}_ns") for each in batches)
        for name in ("assembled", "ran", "divided")
    }
    return {
        "per_s": answered / took,
        **figures,
        "loop_us": 1e6 * thread / answered,
        "all_us": 1e6 * process / answered,
        "busy": thread / took,
        "switches": (_switches() - switched) / len(batches),
        "batch": statistics.fmean(each.samples for each in batches),
        **times,
    }


def _switches() -> int:
    """How often this thread has waited so far."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


async def load(endpoint: BatchedModel, args: argparse.Namespace, seconds: float) -> int:
    """How many samples are answered in so many seconds."""
    until, answered = time.perf_counter() + seconds, 0

    async def caller() -> None:
        nonlocal answered
        given = {"image": np.zeros((1, 3, args.image, args.image), args.dtype)}
        while time.perf_counter() < until:
            await endpoint(given)
            answered += 1
            computed = time.perf_counter() + 1e-6 * args.busy_us
            while time.perf_counter() < computed:
                pass

    await asyncio.gather(*(caller() for _ in range(args.callers)))
    return answered


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pool_loop", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--members", type=int, default=2)
    parser.add_argument("--image", type=int, default=224, help="rows and columns of a picture")
    parser.add_argument("--dtype", default="float32", help="of a picture")
    parser.add_argument("--ran-ms", type=float, help="how long a member keeps a batch, and computes nothing")
    parser.add_argument(
        "--gather",
        choices=GATHERS,
        default="system",
        help="with --ran-ms: what copies the pictures of a batch",
    )
    parser.add_argument("--busy-us", type=float, default=0.0, help="what a caller computes for each answer")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--callers", type=int, default=256)
    parser.add_argument("--per-s", type=float, help="how many samples begin in a second, in place of callers")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="directory for the JSON")
    args = parser.parse_args()

    def rows() -> Iterator[Row]:
        yield from attempted("loop", lambda: asyncio.run(measured(args)))

    known = {name: value for name, value in vars(args).items() if name != "out"}
    keep(rows(), functools.partial(table_of, "The caller of a pool"), args.out, "pool_loop", asked=known)


if __name__ == "__main__":
    main()
