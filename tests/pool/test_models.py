"""Models of a pool: swapped one member after the other, and run in batches."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from structlog.typing import EventDict

from cudnn_actor.errors import InvalidRequest, MailboxFull, UnsupportedModel
from cudnn_actor.onnx import OnnxModel
from cudnn_actor.pool import MemberState, Pool, PoolModel, spawn_pool
from tests.onnx.small_models import FLOAT, model_of, node

from ..inside import kept_by
from .conftest import is_back, kill, some

UP = MemberState.UP
WEIGHTS = [np.full((8, 8), value, np.float32) for value in (1.0, 3.0)]
"""Of integers, so that what is computed with them is exact, and mixed ones give something else."""


def layers(w: np.ndarray) -> Any:
    """y = x @ w @ w: a mixture of two weights would show."""
    return model_of(
        [node("MatMul", "x w", "h"), node("MatMul", "h v", "y")],
        {"x": (FLOAT, ["N", 8])},
        {"y": (FLOAT, ["N", 8])},
        {"w": w, "v": w + 1},
    )


def answer_of(version: int, x: np.ndarray) -> np.ndarray:
    result: np.ndarray = x @ WEIGHTS[version] @ (WEIGHTS[version] + 1)
    return result


@asynccontextmanager
async def under_load(
    pool: Pool, model: PoolModel, ask: Callable[..., Awaitable[Any]] | None = None
) -> AsyncIterator[list[int]]:
    """Callers that run a model without a pause. Gives the version of each answer, which must be of one."""
    ends, versions = asyncio.Event(), list[int]()

    async def caller(number: int) -> None:
        x = np.full((1, 8), number, np.float32)
        while not ends.is_set():
            found = await (pool.run(model, x=x) if ask is None else ask(x=x))
            kinds = [kind for kind in (0, 1) if np.array_equal(found["y"], answer_of(kind, x))]
            assert len(kinds) == 1, f"a mixture: {found['y']}"
            versions.append(kinds[0])

    async with asyncio.TaskGroup() as tasks:
        for number in range(1, 5):
            tasks.create_task(caller(number))
        try:
            yield versions
        finally:
            ends.set()


async def when(condition: Callable[[], object]) -> None:
    """Wait until something holds, which is looked at in each turn of the loop."""
    while not condition():  # noqa: ASYNC110 - it is not told
        await asyncio.sleep(0)


def states(pool: Pool) -> list[MemberState]:
    return [member.state for member in pool.statistics().members]


async def test_a_model_is_swapped_under_load_with_all_members_but_one_serving(pool: Pool) -> None:
    model = await pool.load(layers(WEIGHTS[0]))
    async with under_load(pool, model) as versions:
        await when(lambda: len(versions) > 20)
        swap = asyncio.ensure_future(pool.load(layers(WEIGHTS[1]), replace=model))
        seen = set[tuple[MemberState, ...]]()
        while not swap.done():
            seen.add(tuple(states(pool)))
            await asyncio.sleep(0)
        assert await swap is model
        assert seen == {(UP, UP), (MemberState.RESTARTING, UP), (UP, MemberState.RESTARTING)}
        began = len(versions) + 4  # each caller may have had its answer before it looked
        await when(lambda: len(versions) > began + 20)
    assert set(versions[:20]) == {0}
    assert set(versions[began:]) == {1}
    assert states(pool) == [UP, UP]


async def test_a_member_that_dies_in_the_middle_of_a_swap_comes_back_with_the_new_model(pool: Pool) -> None:
    model = await pool.load(layers(WEIGHTS[0]), dims={"N": 5})
    async with under_load(pool, model) as versions:
        swap = asyncio.ensure_future(pool.load(layers(WEIGHTS[1]), replace=model))
        await when(lambda: states(pool)[0] is not UP)
        kill(pool, 0)  # the one that is changed
        await swap
        await is_back(pool, 0, 2)
        began = len(versions) + 4
        await when(lambda: len(versions) > began + 20)
    assert set(versions[began:]) == {1}
    for member in (0, 1):
        x = some(1, 8)
        found = await pool.on(member).run(model.at[member], x=x)
        np.testing.assert_array_equal(found["y"], answer_of(1, x))
    warmed = {kept.specs["x"].dims for kept in kept_by(model.at[0]).kept.values()}
    assert (5, 8) in warmed  # the dims of the model that was replaced


class Refused:
    """A model that the second member to import it refuses."""

    swappable = True
    """So each member imports it."""

    def __init__(self, source: Any) -> None:
        self._source, self.imports = source, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def specialise(self, *given: Any) -> Any:
        self.imports += 1
        if self.imports > 1:
            raise UnsupportedModel(nodes=("it is refused",))
        return self._source.specialise(*given)


async def test_a_swap_that_a_member_refuses_leaves_all_with_the_old_model(pool: Pool) -> None:
    from cudnn_actor.onnx import OnnxModel

    model = await pool.load(layers(WEIGHTS[0]), dims={"N": 1})
    refused = Refused(OnnxModel(layers(WEIGHTS[1])))
    async with under_load(pool, model) as versions:
        with pytest.raises(UnsupportedModel):
            await pool.load(refused, replace=model)
        assert refused.imports == 2
        began = len(versions) + 4
        await when(lambda: len(versions) > began + 20)
    assert set(versions[began:]) == {0}
    other = model_of([node("Relu", "x", "z")], {"x": (FLOAT, ["N", 8])}, {"z": (FLOAT, ["N", 8])}, {})
    with pytest.raises(InvalidRequest, match="are not the outputs"):
        await pool.load(other, replace=model)
    await pool.unload(model)
    with pytest.raises(InvalidRequest, match="was unloaded"):
        await pool.load(layers(WEIGHTS[1]), replace=model)


class Once(Refused):
    """A model that each member imports once, and refuses the next time."""

    def specialise(self, *given: Any) -> Any:
        self.imports += 1
        if self.imports == 3:
            raise UnsupportedModel(nodes=("it is refused",))
        return self._source.specialise(*given)


async def test_a_member_that_cannot_go_back_to_the_old_model_is_started_anew_with_it(pool: Pool) -> None:
    model = await pool.load(Once(OnnxModel(layers(WEIGHTS[0]))), dims={"N": 1})
    with pytest.raises(UnsupportedModel):
        await pool.load(Refused(OnnxModel(layers(WEIGHTS[1]))), replace=model)
    await is_back(pool, 0, 2)
    x = some(1, 8)
    for member in (0, 1):
        found = await pool.on(member).run(model.at[member], x=x)
        np.testing.assert_array_equal(found["y"], answer_of(0, x))
    assert [member.restarts for member in pool.statistics().members] == [1, 0]


async def test_batches_go_on_when_their_model_is_swapped(pool: Pool) -> None:
    model = await pool.load(layers(WEIGHTS[0]))
    async with (
        pool.batched(model, max_batch=2) as endpoint,
        under_load(pool, model, endpoint) as versions,
    ):
        await when(lambda: versions)
        await pool.load(layers(WEIGHTS[1]), replace=model)
        began = len(versions) + 4
        await when(lambda: len(versions) > began + 4)
    assert versions[0] == 0
    assert set(versions[began:]) == {1}


async def test_one_member_alone_serves_while_its_model_is_swapped() -> None:
    async with spawn_pool(["cpu"]) as pool:
        model = await pool.load(layers(WEIGHTS[0]))
        async with under_load(pool, model) as versions:
            await when(lambda: versions)
            swap = asyncio.ensure_future(pool.load(layers(WEIGHTS[1]), replace=model))
            while not swap.done():
                assert states(pool) == [UP]
                await asyncio.sleep(0)
            await swap
        assert set(versions) <= {0, 1}


async def test_batches_run_on_all_members_and_survive_their_ends(pool: Pool, logs: list[EventDict]) -> None:
    model = await pool.load(layers(WEIGHTS[0]))
    async with (
        pool.batched(model, max_batch=2) as endpoint,
        under_load(pool, model, endpoint) as versions,
    ):

        async def each_answers_more() -> None:
            before = [member.finished for member in pool.statistics().members]
            await when(
                lambda: all(f.finished > b for f, b in zip(pool.statistics().members, before, strict=True))
            )

        for member in (0, 1):
            await each_answers_more()
            kill(pool, member)
            await is_back(pool, member, 2)
        await each_answers_more()
    assert set(versions) == {0}
    figures = endpoint.statistics()
    assert figures.samples == len(versions)
    assert figures.divided == 0
    assert not [line for line in logs if line["event"] == "batch.divided"]
    sizes = [len(kept_by(copy).kept) for copy in model.at.values()]
    assert sizes == [2, 2]  # 1 and 2 samples, also on members that were started anew


@pytest.mark.parametrize(("members", "processors", "calls"), [(1, 8, []), (2, 7, []), (2, 8, [4])])
async def test_the_system_puts_large_batches_of_several_members_together_where_processors_are_spare(
    members: int, processors: int, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cudnn_actor.pool.requests.processors", lambda: processors)
    counts, write, length = list[int](), os.pwritev, 1 << 18

    def noting(descriptor: int, arrays: list[memoryview], at: int) -> int:
        counts.append(len(arrays))
        return write(descriptor, arrays, at)

    monkeypatch.setattr(os, "pwritev", noting)
    row = {"w": np.ones((length, 1), np.float32)}
    sums = model_of(
        [node("MatMul", "x w", "y")], {"x": (FLOAT, ["N", length])}, {"y": (FLOAT, ["N", 1])}, row
    )
    async with spawn_pool(["cpu"] * members) as pool:
        model = await pool.load(sums)
        async with pool.batched(model, max_batch=4, sizes=[4]) as endpoint:
            given = [np.full((1, length), number, np.float32) for number in range(3)]
            answers = await asyncio.gather(*(endpoint(x=each) for each in given))
    assert [float(each["y"][0, 0]) for each in answers] == [0.0, length, 2 * length]
    assert counts == calls, "three samples, and a row to reach the size"


async def test_a_full_batch_for_each_member_is_put_together_while_others_run(pool: Pool) -> None:
    model = await pool.load(layers(WEIGHTS[0]))
    pids = [member.pid or 0 for member in pool.statistics().members]
    async with pool.batched(model, max_batch=2, in_flight=3) as endpoint:
        try:
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)  # so that no batch ends
            answers = [endpoint.submit(x=some(1, 8)) for _ in range(30)]
            await when(lambda: sum(member.outstanding for member in pool.statistics().members) == 3)
            figures = endpoint.statistics()
            assert (figures.running, figures.waiting) == (3 + len(pids), 30 - 2 * figures.running)
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
        for answer in await asyncio.gather(*answers):
            np.testing.assert_array_equal(answer["y"], answer_of(0, some(1, 8)))


async def test_a_batch_that_is_lost_twice_is_divided(pool: Pool, logs: list[EventDict]) -> None:
    model = await pool.load(layers(WEIGHTS[0]))
    pids = [member.pid or 0 for member in pool.statistics().members]

    async def has_it() -> int:
        """The member that has the batch, which is one of the two."""
        outstanding: list[int] = []
        while not any(outstanding):
            await asyncio.sleep(0)
            outstanding = [member.outstanding for member in pool.statistics().members]
        return outstanding.index(1)

    async with pool.batched(model, max_batch=2) as endpoint:
        try:
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)  # so that it answers nothing before it is killed
            tasks = [endpoint.submit(x=some(1, 8)) for _ in range(2)]
            first = await has_it()
            kill(pool, first)
            await when(lambda: pool.statistics().members[1 - first].outstanding)
        finally:
            for pid in pids:  # the second one, too; and whatever has failed, none stays stopped
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for task in tasks:
            np.testing.assert_array_equal((await task)["y"], answer_of(0, some(1, 8)))
        assert endpoint.statistics().divided == 1
    divided = next(line for line in logs if line["event"] == "batch.divided")
    assert divided["requests"] == 2


async def test_batches_of_a_pool_are_checked_like_those_of_a_service(pool: Pool) -> None:
    model = await pool.load(layers(WEIGHTS[0]))
    with pytest.raises(InvalidRequest, match="in_flight"):
        pool.batched(model, in_flight=0)
    async with pool.batched(model, max_batch=2, max_waiting=1, in_flight=1) as endpoint:
        with pytest.raises(InvalidRequest, match="x"):
            await endpoint(z=some(1, 8))
        ref = await pool.on(0).upload(some(1, 8))
        with pytest.raises(InvalidRequest, match="is on the device"):
            await endpoint(x=ref)
        first, second = endpoint.submit(x=some(2, 8)), None
        with pytest.raises(MailboxFull):
            second = endpoint.submit(x=some(2, 8))
        assert second is None
        np.testing.assert_allclose((await first)["y"], answer_of(0, some(2, 8)), rtol=1e-5)
    await pool.unload(model)
    with pytest.raises(InvalidRequest, match="was unloaded"):
        pool.batched(model)
