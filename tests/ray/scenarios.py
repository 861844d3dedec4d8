"""What happens to a pool on a cluster: each function runs in the process that has the cluster.

`test_ray_pool.py` runs them by their names. That process is another than pytest's, in which Ray would leave
threads and descriptors.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from benchmarks.ray_calls import measured
from cudnn_actor import GraphBuilder
from cudnn_actor.errors import (
    DeadlineExceeded,
    InvalidRequest,
    MailboxFull,
    OutcomeUnknown,
    ServiceStopped,
    StartFailed,
)
from cudnn_actor.pool import MemberState
from cudnn_actor.protocol.graphs.named_graph import Graph
from cudnn_actor.ray import RayPool
from cudnn_actor.ray.held import Held, RayModel
from cudnn_actor.ray.packing import split
from cudnn_actor.ray.watching import Watched
from cudnn_actor.supervision import Escalated, Restarted, Restarting, Stopped

from ..examples.test_guides import ROOT, said
from ..examples.test_readme import printed, programs
from ..inside import replication_of
from ..onnx.small_models import FLOAT, image_model, model_of, node
from ..patience import PATIENCE_S
from ..pool.test_models import WEIGHTS, answer_of, layers

__all__ = ["GROUPS", "SCENARIOS"]

PLAIN: dict[str, Any] = {"num_replicas": 2, "num_gpus": 0, "num_cpus": 0.1, "lost_after_s": float(PATIENCE_S)}
"""No replica counts as lost because it is slow. That a process or a node has ended, Ray tells."""


def product() -> Graph:
    """y = relu(x @ w)."""
    g = GraphBuilder()
    return g.build(y=g.relu(g.matmul(g.input("x", (4, 8)), g.input("w", (8, 8)))))


def relu() -> Graph:
    """y = relu(x), of 1 MiB."""
    g = GraphBuilder()
    return g.build(y=g.relu(g.input("x", (512, 512))))


def used(pool: RayPool) -> int:
    """How many pieces of a pool's memory are used."""
    gc.collect()  # an exception and its frames, which have arrays, may be a cycle
    memory = pool._values.memory
    assert memory is not None
    return memory.pieces


def replicas_of(pool: RayPool) -> Sequence[Watched]:
    """The replicas, as the pool sees them."""
    return pool._members


def held_by(pool: RayPool) -> Mapping[Held, object]:
    """What all replicas have, and the current recipes."""
    held: Mapping[Held, object] = replication_of(pool).held
    return held


def send(number: signal.Signals, pid: int | None) -> None:
    """Send a signal to a process, which has to run: None, or 0, would be for this one's group."""
    assert pid
    os.kill(pid, number)


async def is_restarted(pool: RayPool, member: int, generation: int) -> None:
    """Wait until a replica has been restarted for this incarnation."""
    name = pool.statistics().members[member].name
    async for event in pool.events():
        if isinstance(event, Restarted) and event.child == name and event.generation >= generation:
            break


async def is_up(pool: RayPool, member: int, generation: int) -> None:
    """Wait until a replica has been restarted for this incarnation, and gets requests."""
    await is_restarted(pool, member, generation)
    while pool.statistics().members[member].state is not MemberState.UP:  # noqa: ASYNC110 - in a next turn
        await asyncio.sleep(0)


async def is_lost(pool: RayPool, member: int) -> None:
    """Wait until the pool knows that a replica has ended."""
    name = pool.statistics().members[member].name
    async for event in pool.events():
        if isinstance(event, Restarting) and event.child == name:
            break


async def load_around_a_restart(pool: RayPool, member: int, weights: Any) -> list[int]:
    """Have callers send requests until the pool has lost a replica, and again when it is back, until it gets
    requests. Return how many each has sent.

    Meanwhile nobody sends: that would take the processors from the replica that starts.
    """
    sent = list[int]()
    for changed in (partial(is_lost, pool, member), partial(is_up, pool, member, 2)):
        done = asyncio.Event()
        load = asyncio.ensure_future(load_until(pool, done, weights))
        await changed()
        done.set()
        sent += await load
        await is_restarted(pool, member, 2)
    return sent


async def load_until(pool: RayPool, done: asyncio.Event, weights: Any, callers: int = 6) -> list[int]:
    """Have callers send requests until `done`, ten each at least, check each answer, and return how many each
    has sent."""
    graph = product()

    async def caller(number: int) -> int:
        turn = 0
        while turn < 10 or not done.is_set():
            x = np.full((4, 8), 1000 * number + turn, np.float32)
            assert np.array_equal(await pool.compute(graph, x=x, w=weights), x)
            turn += 1
        return turn

    return await asyncio.gather(*(caller(number) for number in range(callers)))


async def values_go_in_and_come_out(cluster: Any, pool: RayPool) -> None:
    import ray

    assert len({member.node for member in pool.statistics().members}) == 2  # spread over the nodes
    graph, w = product(), np.eye(8, dtype=np.float32)
    weights = await pool.upload(w)
    x = np.arange(32, dtype=np.float32).reshape(4, 8)
    for given in (x, ray.put(x)):
        assert np.array_equal(await pool.compute(graph, x=given, w=weights), x)
    wide = np.arange(1 << 18, dtype=np.float32).reshape(512, 512)
    for k in range(3):  # the replicas are on this machine, so these lie in memory of this process
        y = await pool.compute(relu(), x=wide + k)
        assert np.array_equal(y, wide + k)
        assert not y.flags.writeable
    assert used(pool) == 1  # the latest result
    model = await pool.load(image_model("N"), dims={"N": 1})
    picture = np.ones((1, 3, 8, 8), np.float32)
    scores = await pool.run(model, image=picture)
    for number in range(2):  # the same on both

        async def run(gpu: Any, own: Any) -> Any:
            return await gpu.run(own(model), image=picture)

        alone = await pool.on(number).call(run)
        assert {name: each.tolist() for name, each in alone.items()} == {
            name: each.tolist() for name, each in scores.items()
        }
    buffer = await pool.on(0).call(lambda gpu, own: gpu.upload(np.ones(3, np.float32)))
    with pytest.raises(InvalidRequest, match="a buffer of one replica"):
        await pool.compute(graph, x=buffer, w=weights)
    with pytest.raises(InvalidRequest, match="x="):  # the replica's own error comes as it is
        await pool.compute(graph, x=x[:2], w=weights)

    class Own:
        """Only this process has it."""

    with pytest.raises(InvalidRequest, match="x="):  # refused there, not here
        await pool.compute(graph, x=Own(), w=weights)
    await pool.free(weights)
    with pytest.raises(InvalidRequest, match="nothing that this pool has"):
        await pool.compute(graph, x=x, w=weights)
    assert [member.outstanding for member in pool.statistics().members] == [0, 0]


async def large_arrays_go_by_rays_store_to_a_replica_of_another_machine(cluster: Any, pool: RayPool) -> None:
    wide = np.arange(1 << 18, dtype=np.float32).reshape(512, 512)
    before = used(pool)
    lives = [each.life for each in replicas_of(pool) if each.life is not None]
    assert [each.hello.near for each in lives] == [True, True]
    for each in lives:
        each.hello = replace(each.hello, near=False)
    for k in range(4):
        assert np.array_equal(await pool.compute(relu(), x=wide + k), wide + k)
    for each in lives:
        each.hello = replace(each.hello, near=True)
    assert used(pool) == before


async def replicas_and_workers_are_killed_under_load(cluster: Any) -> None:
    async with RayPool(**PLAIN, isolation="process") as pool:
        weights = await pool.upload(np.eye(8, dtype=np.float32))
        load = asyncio.ensure_future(load_around_a_restart(pool, 0, weights))
        await asyncio.sleep(0)
        send(signal.SIGKILL, pool.statistics().members[0].pid)
        send(signal.SIGKILL, pool.statistics().members[1].worker_pid)
        sent = await load
        found = pool.statistics()
        assert [member.restarts for member in found.members] == [1, 0]
        assert sum(member.finished for member in found.members) == sum(sent)
        assert found.waiting == 0


async def a_node_is_killed_under_load(cluster: Any, pool: RayPool) -> None:
    import ray

    own = ray.get_runtime_context().get_node_id()
    [member] = [k for k, each in enumerate(pool.statistics().members) if each.node != own]
    finished = sum(each.finished for each in pool.statistics().members)
    weights = await pool.upload(np.eye(8, dtype=np.float32))
    load = asyncio.ensure_future(load_around_a_restart(pool, member, weights))
    node = next(each for each in cluster.list_all_nodes() if each.node_id != own)
    await asyncio.to_thread(cluster.remove_node, node, allow_graceful=False)
    sent = await load
    found = pool.statistics()
    assert {each.node for each in found.members} == {own}  # it was started where there was room
    assert sum(each.finished for each in found.members) - finished == sum(sent)


async def what_was_meant_for_one_replica_ends_with_a_typed_error(cluster: Any, pool: RayPool) -> None:

    async def forever(gpu: Any, own: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)
        await asyncio.Event().wait()

    other = await replicas_of(pool)[0].actor.beat.remote(*split("another incarnation", (None, 1.0)))
    assert other.refused
    with pytest.raises(OutcomeUnknown, match="one replica alone"):
        await pool.on(1).call(forever)
    await is_up(pool, 1, 2)
    assert await pool.on(1).call(lambda gpu, own: gpu.ping()) == 1
    assert [member.restarts for member in pool.statistics().members] == [0, 1]


async def a_model_is_swapped_under_load_and_replicas_that_die_have_the_new_one(
    cluster: Any, pool: RayPool
) -> None:
    before = [*held_by(pool)]
    model = await pool.load(layers(WEIGHTS[0]))
    async with pool.batched(model, max_batch=2) as endpoint:
        asks = (lambda **given: pool.run(model, **given)), endpoint
        load = [Versions(ask) for ask in asks]
        for each in load:
            await each.more(5)
        assert {version for each in load for version in each.found} == {0}
        send(signal.SIGKILL, pool.statistics().members[0].pid)
        assert await pool.load(layers(WEIGHTS[1]), replace=model) is model
        for each in load:
            await each.end()
        await is_up(pool, 0, 2)
        load = [Versions(ask) for ask in asks]
        refused = model_of([node("Relu", "x", "z")], {"x": (FLOAT, ["N", 8])}, {"z": (FLOAT, ["N", 8])})
        with pytest.raises(InvalidRequest):
            await pool.load(refused, replace=model)
        for replica in replicas_of(pool):  # what was refused is not what the next one is given
            assert replica.has[model.number] is held_by(pool)[model]
        for each in load:
            await each.more(8)
            await each.end()
            assert set(each.found) == {1}
        x = np.full((1, 8), 3, np.float32)
        for number in range(2):  # on both

            async def run(gpu: Any, own: Any) -> Any:
                return await gpu.run(own(model), x=x)

            assert np.array_equal((await pool.on(number).call(run))["y"], answer_of(1, x))
        late = pool.batched(model)
        await pool.unload(model)
        assert [*held_by(pool)] == before  # nor what the endpoint has asked of the replicas
        with pytest.raises(InvalidRequest, match="nothing that this pool has"):
            await late.__aenter__()  # refused here: no replica is asked to make what it cannot
    with pytest.raises(InvalidRequest, match="nothing that this pool has"):
        pool.batched(model)


async def what_is_loaded_while_no_replica_is_up_is_made_by_one_before_it_counts(cluster: Any) -> None:
    async with RayPool(**{**PLAIN, "num_replicas": 1}) as pool:
        kept = await pool.load(layers(WEIGHTS[0]))
        send(signal.SIGKILL, pool.statistics().members[0].pid)
        async for event in pool.events():
            if isinstance(event, Restarting):
                break
        loads = [pool.load(layers(WEIGHTS[1]), dims={dim: 1}) for dim in ("N", "L")]
        model, refused = await asyncio.gather(*loads, return_exceptions=True)
        assert isinstance(refused, InvalidRequest), refused
        assert isinstance(model, RayModel), model
        x = np.full((1, 8), 3, np.float32)
        await is_up(pool, 0, 3)  # its second restart, without what it could not make
        assert np.array_equal((await pool.run(kept, x=x))["y"], answer_of(0, x))
        assert np.array_equal((await pool.run(model, x=x))["y"], answer_of(1, x))


class Versions:
    """Two callers that ask a model without a pause, and note of which version each answer is."""

    def __init__(self, ask: Any) -> None:
        self.found: list[int] = []
        self._ask, self._ends, self._changed = ask, False, asyncio.Event()
        self._tasks = [asyncio.ensure_future(self._caller(number)) for number in (1, 2)]

    async def _caller(self, number: int) -> None:
        x = np.full((1, 8), number, np.float32)
        while not self._ends:
            y = (await self._ask(x=x))["y"]
            kinds = [kind for kind in (0, 1) if np.array_equal(y, answer_of(kind, x))]
            assert len(kinds) == 1, f"a mixture: {y}"
            self.found.append(kinds[0])
            self._changed.set()

    async def more(self, count: int) -> None:
        """Wait for so many more answers."""
        wanted = len(self.found) + count
        while len(self.found) < wanted:
            self._changed.clear()
            await self._changed.wait()

    async def end(self) -> None:
        """End them. Raises what they have raised."""
        self._ends = True
        await asyncio.gather(*self._tasks)


async def the_programs_of_the_page_print_what_it_says(cluster: Any) -> None:
    def run_all() -> None:
        with tempfile.TemporaryDirectory() as folder:
            printed(programs(ROOT / "docs/tutorial.md")[0], Path(folder))
            for program in programs(ROOT / "docs/ray.md"):
                assert printed(program, Path(folder)).splitlines() == said(program)

    os.environ["RAY_ADDRESS"] = cluster.address
    await asyncio.to_thread(run_all)


async def what_a_silent_replica_had_runs_elsewhere_whatever_ray_knows(cluster: Any, pool: RayPool) -> None:
    """The process is stopped, so that it cannot answer, and Ray does not notice."""
    graph, w = product(), np.eye(8, dtype=np.float32)
    pid = pool.statistics().members[0].pid
    send(signal.SIGSTOP, pid)
    tasks = [pool.submit(graph, x=np.full((4, 8), k, np.float32), w=w) for k in range(8)]
    while not (had := pool.statistics().members[0].outstanding):  # noqa: ASYNC110 - in a next turn
        await asyncio.sleep(0)
    for k, task in enumerate(tasks):
        assert np.array_equal(await task, np.full((4, 8), k))
    found = pool.statistics()
    assert (found.moved, found.members[0].finished) == (had, 0)
    assert (found.members[0].state, found.members[0].restarts) == (MemberState.RESTARTING, 0)
    weights = await pool.upload(w)  # not on the replica that cannot be reached
    send(signal.SIGCONT, pid)
    while pool.statistics().members[0].state is not MemberState.UP:  # noqa: ASYNC110 - says nothing else
        await asyncio.sleep(0.01)
    assert pool.statistics().members[0].restarts == 0
    values = await pool.on(0).call(lambda gpu, own: gpu.download(own(weights)))  # it has it since
    assert np.array_equal(values, w)


async def a_request_ends_at_its_deadline_whatever_its_replica_does(cluster: Any, pool: RayPool) -> None:
    graph, x, w = product(), np.ones((4, 8), np.float32), np.eye(8, dtype=np.float32)
    before, pids = used(pool), [member.pid for member in pool.statistics().members]
    try:
        for pid in pids:
            send(signal.SIGSTOP, pid)
        await requests_end_though_nobody_answers(pool)
        assert used(pool) > before  # the replica may read and write there, when it goes on
    finally:
        for pid in pids:
            send(signal.SIGCONT, pid)
    assert np.array_equal(await pool.compute(graph, x=x, w=w), x)
    while used(pool) > before:  # noqa: ASYNC110 - until Ray has told of the end of the call
        await asyncio.sleep(0.01)


async def requests_end_though_nobody_answers(pool: RayPool) -> None:
    """One at its deadline, and two when they are cancelled."""
    graph, x, w = product(), np.ones((4, 8), np.float32), np.eye(8, dtype=np.float32)
    with pytest.raises(DeadlineExceeded) as caught:
        await pool.compute(graph, x=x, w=w, timeout=2.0)
    assert (caught.value.timeout_s, caught.value.started) == (2.0, True)
    small, large = {"x": x, "w": w}, {"x": np.ones((512, 512), np.float32)}
    for what, given in ((graph, small), (relu(), large)):
        task = pool.submit(what, given)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert [member.outstanding for member in pool.statistics().members] == [0, 0]


async def a_replica_is_sent_no_more_than_it_may_have(cluster: Any, pool: RayPool) -> None:
    """A call past the pool finds what the pool has sent: on a busy machine Ray begins some calls after it."""

    async def wait(gpu: Any, own: Any) -> None:
        here = vars(gpu).setdefault("here", {"now": 0, "go": asyncio.Event()})
        here["now"] += 1
        await here["go"].wait()

    async def look(gpu: Any, own: Any) -> int:
        here = vars(gpu).setdefault("here", {"now": 0, "go": asyncio.Event()})
        while here["now"] < 2:  # noqa: ASYNC110 - in a next turn
            await asyncio.sleep(0)
        here["go"].set()
        now: int = here["now"]
        return now

    graph, w = product(), np.eye(8, dtype=np.float32)
    calls = [asyncio.ensure_future(pool.call(wait)) for _ in range(9)]
    for _ in range(20):  # turns in which they are sent
        await asyncio.sleep(0)
    had = [member.outstanding for member in pool.statistics().members]
    assert sum(had) == 9
    assert min(had) > 2
    for replica in replicas_of(pool):
        assert replica.life is not None
        assert (await replica.actor.call.remote(*split(replica.life.hello.incarnation, (look,)))).value == 2
    await asyncio.gather(*calls)
    tasks = [pool.submit(graph, x=w[:4], w=w) for _ in range(4)]
    with pytest.raises(MailboxFull):
        pool.submit(graph, x=w[:4], w=w)
    await asyncio.gather(*tasks)
    await pool.submit(graph, x=w[:4], w=w)


async def replicas_that_ray_gives_up_are_told_of_and_the_last_ends_the_pool(cluster: Any) -> None:
    graph, w = product(), np.eye(8, dtype=np.float32)
    async with RayPool(**PLAIN, max_restarts=0) as pool:
        send(signal.SIGKILL, pool.statistics().members[0].pid)
        async for event in pool.events():
            if isinstance(event, Escalated):
                assert event.child == "pool-0"
                break
        assert np.array_equal(await pool.compute(graph, x=w[:4], w=w), w[:4])
        assert [each.state for each in pool.statistics().members] == [MemberState.REMOVED, MemberState.UP]
        send(signal.SIGKILL, pool.statistics().members[1].pid)
        async for event in pool.events():
            last = event
        assert isinstance(last, Stopped)
        assert not pool.alive
        with pytest.raises(ServiceStopped, match="could not be kept running"):
            await pool.compute(graph, x=w[:4], w=w)


async def a_pool_that_cannot_start_says_why(cluster: Any) -> None:
    one = {**PLAIN, "num_replicas": 1}
    with pytest.raises(StartFailed, match=r"0 of 1 replicas .* 1 unicorn, 0.1 CPU for each"):
        await RayPool(**one, resources={"unicorn": 1}, ready_within_s=0.5)
    with pytest.raises(StartFailed, match="pool-0 could not be kept running"):
        await RayPool(**one, device="cuda:0")
    for wrong in ({"mailbox": 0}, {"spread": "WIDE"}, {"num_gpus": -1}, {"on_give_up": "exit"}, {"tun": 1}):
        with pytest.raises(InvalidRequest, match=next(iter(wrong))):
            RayPool(**{**one, **wrong})


async def the_example_is_answered_by_serve(cluster: Any) -> None:
    os.environ["RAY_ADDRESS"] = cluster.address
    command = [sys.executable, "examples/ray_serve_app.py"]
    done = await asyncio.to_thread(subprocess.run, command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if line.startswith("answered")]
    assert said == ["answered by the handle: 20", "answered over HTTP: [12.0, 16.0]"]


async def a_request_is_measured_beside_a_call_of_an_empty_actor(cluster: Any) -> None:
    rows = await measured(rounds=1, count=2, isolation="thread")
    assert [row["rows"] for row in rows] == [32, 1024]
    for row in rows:
        wanted = row["pool"] / (row["actor"] + row["in process"])  # of rounded times, so it differs a little
        assert row["ratio"] == pytest.approx(wanted, rel=0.01, abs=0.01)


class Lane(NamedTuple):
    """Scenarios that run one after the other, with one pool if there are options for it."""

    scenarios: tuple[Callable[..., Awaitable[None]], ...]
    pool: Mapping[str, Any] | None = None


_SHARED = Lane(
    (
        values_go_in_and_come_out,
        large_arrays_go_by_rays_store_to_a_replica_of_another_machine,
        a_replica_is_sent_no_more_than_it_may_have,
        a_request_ends_at_its_deadline_whatever_its_replica_does,
        what_was_meant_for_one_replica_ends_with_a_typed_error,  # replica 1 is restarted
        a_model_is_swapped_under_load_and_replicas_that_die_have_the_new_one,  # and replica 0
    ),
    {**PLAIN, "mailbox": 2},
)
_TOGETHER = (
    _SHARED,
    *(
        Lane((each,))
        for each in (
            replicas_and_workers_are_killed_under_load,
            what_is_loaded_while_no_replica_is_up_is_made_by_one_before_it_counts,
            the_programs_of_the_page_print_what_it_says,
            replicas_that_ray_gives_up_are_told_of_and_the_last_ends_the_pool,
            a_pool_that_cannot_start_says_why,
            a_request_is_measured_beside_a_call_of_an_empty_actor,
        )
    ),
)
"""Those that run at a time: most of the time, they wait for Ray's processes."""
_LAST = Lane(
    (what_a_silent_replica_had_runs_elsewhere_whatever_ray_knows, a_node_is_killed_under_load),
    {**PLAIN, "lost_after_s": 5.0},
)
GROUPS = (_TOGETHER, (Lane((the_example_is_answered_by_serve,)),), (_LAST,))
"""Serve gives its parts a minute to start, so it is alone."""
SCENARIOS = [each.__name__ for group in GROUPS for lane in group for each in lane.scenarios]
