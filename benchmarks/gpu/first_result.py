"""A process that does one convolution and says when it had done what.

Its clock is the system's monotonic one, which its parent has read before it started it. It imports nothing
but what it needs, and that on the clock.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import time
from collections.abc import Callable
from typing import Any

__all__ = ["PLAN"]

PLAN = "the first plan and its run"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", required=True)
    parser.add_argument("--began", type=float, required=True, help="time.monotonic() of its parent")
    parser.add_argument("--plan-store")
    parser.add_argument("--steps", action="store_true", help="take the libraries' own steps one by one first")
    args = parser.parse_args()
    marks: dict[str, float] = {}

    def mark(name: str) -> None:
        marks[name] = time.monotonic() - args.began

    mark("the interpreter")
    if args.steps and args.device.startswith("cuda"):
        _steps(int(args.device.partition(":")[2] or 0), mark)
    service: Any = importlib.import_module("cudnn_actor")
    problems: Any = importlib.import_module("benchmarks.gpu.problems")
    mark("importing cudnn_actor and NumPy")
    store = {} if args.plan_store is None else {"plan_store": args.plan_store}
    spawning = service.spawn(device=args.device, isolation="thread", **store)
    problem = problems.small(on_gpu=args.device.startswith("cuda"))
    asyncio.run(_first_result(spawning, problem, mark))
    print(json.dumps(marks), flush=True)


def _steps(ordinal: int, mark: Callable[[str], None]) -> None:
    """The steps within a service's start, which then finds libraries imported and a context made."""
    cupy = importlib.import_module("cupy")
    mark("importing CuPy")
    cupy.cuda.Device(ordinal).use()
    cupy.cuda.runtime.free(0)
    mark("the context")
    cudnn = importlib.import_module("cudnn")
    mark("importing cudnn")
    cudnn.destroy_handle(cudnn.create_handle())
    mark("a handle")


async def _first_result(spawning: Any, problem: Any, mark: Callable[[str], None]) -> None:
    numpy = importlib.import_module("numpy")
    async with spawning as gpu:
        mark("the service's start")
        given = [numpy.ones(spec.dims, spec.dtype.numpy) for spec in (problem.x, problem.w)]
        x, w = [await gpu.upload(values, layout=problem.layout) for values in given]
        y = await gpu.empty(problem.y.dims, dtype=problem.dtype, layout=problem.layout)
        mark("uploading")
        await gpu.ask(problem.message(x, w, y))
        mark(PLAN)
        await gpu.download(y)
        mark("downloading")


if __name__ == "__main__":
    main()
