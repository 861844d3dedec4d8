"""Kills of members and of their workers under load: nothing is lost, nothing is wrong, each is answered once.

    python -m tests.pool.chaos --devices cpu cpu --seconds 60 --seed 3

Callers send products, calls, runs of a model and samples for batches, without a pause. Whom a seeded
generator draws is killed, and the next one when it is back and every caller has had answers since. Every
answer is compared with what it must be, exactly: all values are small whole numbers.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import numpy as np

from cudnn_actor import BatchedModel, GraphBuilder
from cudnn_actor.pool import MemberState, Pool, spawn_pool
from tests.onnx.small_models import FLOAT, model_of, node

__all__ = ["Outcome", "chaos", "main"]

CALLERS = 6
W = np.random.default_rng(0).integers(-4, 5, (8, 8)).astype(np.float32)
g = GraphBuilder()
PRODUCT = g.build(y=g.relu(g.matmul(g.input("x", (2, 8)), g.input("w", (8, 8)))))
MODEL = model_of([node("MatMul", "x w", "y")], {"x": (FLOAT, ["N", 8])}, {"y": (FLOAT, ["N", 8])}, {"w": W})
Ask = Callable[[np.ndarray], Awaitable[tuple[Any, np.ndarray]]]
"""Gives an answer, and what it must be."""


class Outcome(NamedTuple):
    """What has happened: answers by kind of request, kills by kind, how often requests moved, and how many
    answers the members have given that the pool took."""

    answers: Counter[str]
    kills: Counter[str]
    moved: int
    finished: int
    batches: int
    divided: int


async def chaos(pool: Pool, seed: int, ends: Callable[[Counter[str]], bool]) -> Outcome:
    """Send requests and kill, until `ends` says so of the kills. Raises if anything is lost or wrong.

    The pool's members are in process isolation, and may be replaced without a limit.
    """
    weights = await pool.upload(W)
    model = await pool.load(MODEL)
    before = sum(member.finished for member in pool.statistics().members)
    async with pool.batched(model, max_batch=2) as endpoint:
        warmed = sum(member.finished for member in pool.statistics().members) - before
        kinds = _kinds(pool, weights, model, endpoint)
        answers, kills, over = Counter[str](), Counter[str](), asyncio.Event()
        each, answered = Counter[int](), asyncio.Event()

        async def caller(number: int) -> None:
            rng = np.random.default_rng((seed, number))
            while not over.is_set():
                name = str(rng.choice(list(kinds)))
                x = rng.integers(-8, 9, (2, 8)).astype(np.float32)
                found, expected = await kinds[name](x)
                assert np.array_equal(found, expected), f"{name}: {found}, not {expected}"
                answers[name] += 1
                each[number] += 1
                answered.set()

        async with asyncio.TaskGroup() as tasks:
            for number in range(CALLERS):
                tasks.create_task(caller(number))
            rng = random.Random(seed)
            while not ends(kills):
                victim, seen = rng.randrange(len(pool)), Counter(each)
                before_kill = _incarnation(pool, victim)
                kills[_kill(pool, victim, worker=rng.random() < 0.5)] += 1
                while (
                    not _all_up(pool)
                    or _incarnation(pool, victim) == before_kill
                    or min(each[number] - seen[number] for number in range(CALLERS)) < 3
                ):
                    answered.clear()
                    await answered.wait()
            over.set()
        figures, statistics = endpoint.statistics(), pool.statistics()
    finished = sum(member.finished for member in statistics.members) - before - warmed
    return Outcome(answers, kills, statistics.moved, finished, figures.batches, figures.divided)


def _kinds(pool: Pool, weights: Any, model: Any, endpoint: BatchedModel) -> dict[str, Ask]:
    async def compute(x: np.ndarray) -> tuple[Any, np.ndarray]:
        return await pool.compute(PRODUCT, x=x, w=weights), np.maximum(x @ W, 0)

    async def call(x: np.ndarray) -> tuple[Any, np.ndarray]:
        found = await pool.call(lambda gpu, own: gpu.compute(PRODUCT, x=x, w=own(weights)), kind="call")
        return found, np.maximum(x @ W, 0)

    async def run(x: np.ndarray) -> tuple[Any, np.ndarray]:
        return (await pool.run(model, x=x))["y"], x @ W

    async def batched(x: np.ndarray) -> tuple[Any, np.ndarray]:
        return (await endpoint(x=x[:1]))["y"], x[:1] @ W

    return {"compute": compute, "call": call, "run": run, "batched": batched}


def _all_up(pool: Pool) -> bool:
    return all(member.state is MemberState.UP for member in pool.statistics().members)


def _incarnation(pool: Pool, member: int) -> tuple[int, int]:
    """Which process and which worker of a member, which is up."""
    return pool.statistics().members[member].restarts, pool.on(member).generation


def _kill(pool: Pool, victim: int, *, worker: bool) -> str:
    """Kill a member's worker or its process. Returns which."""
    pid = pool.on(victim).worker_pid if worker else pool.statistics().members[victim].pid
    assert pid is not None, "all are up"
    os.kill(pid, signal.SIGKILL)
    return "worker" if worker else "member"


async def _by_hand(devices: list[str], seconds: float, seed: int) -> Outcome:
    until = time.monotonic() + seconds
    async with spawn_pool(devices, isolation="process", max_restarts=10**6) as pool:
        return await chaos(pool, seed, lambda _kills: time.monotonic() > until)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.pool.chaos", description=__doc__.splitlines()[0])
    parser.add_argument("--devices", nargs="+", default=["cpu", "cpu"])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    print(asyncio.run(_by_hand(given.devices, given.seconds, given.seed)))  # noqa: T201


if __name__ == "__main__":
    main()
