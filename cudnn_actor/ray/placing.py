"""Lets Ray place the replicas of a pool, with one bundle of a placement group for each. `place` blocks."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cudnn_actor.actors.long_work import check_wanted, in_own_thread
from cudnn_actor.ray.replica import Replica
from cudnn_actor.ray.settings import Settings

__all__ = ["Placed", "place"]

_CONTROL = 16
"""How many calls an actor answers at a time in addition to requests: signs of life, and calls that make or
free copies."""


@dataclass(frozen=True, kw_only=True)
class Placed:
    """The actors of a pool, and the placement group that reserves their resources.

    Parameters
    ----------
    actors
        Ray's handles, in order.
    group
        The placement group, which belongs to the pool.
    """

    actors: tuple[Any, ...]
    group: PlacementGroup

    def remove(self) -> None:
        """End the actors, and free what they have reserved. Blocks for calls to Ray's control service."""
        try:
            for actor in self.actors:
                ray.kill(actor)
        finally:
            remove_placement_group(self.group)  # and with it the actors that were placed in it

    async def remove_within(self, seconds: float) -> str:
        """Call `remove` on a thread. Returns why it has not succeeded within `seconds`; "" if it has.

        If the head of the cluster has gone, a call of Ray blocks until Ray ends this process, after a minute.
        """
        try:
            async with asyncio.timeout(seconds):
                await in_own_thread(self.remove)
        except TimeoutError:
            return f"Ray's control service has not answered within {seconds:g} s"
        except Exception as error:  # noqa: BLE001 - Ray says in many ways that it has ended
            return str(error).partition("\n")[0] or repr(error)
        return ""


def place(settings: Settings) -> Placed:
    """Let Ray start the replicas of a pool, each as soon as there is room for it.

    If nobody waits for this any more, it leaves no replica.
    """
    group = placement_group([dict(settings.resources)] * settings.num_replicas, strategy=settings.spread)
    try:
        actors = tuple(_start(settings, group, number) for number in range(settings.num_replicas))
        check_wanted()
    except BaseException:
        remove_placement_group(group)  # and with it the actors that were placed in it
        raise
    return Placed(actors=actors, group=group)


def _start(settings: Settings, group: PlacementGroup, number: int) -> Any:
    resources = dict(settings.resources)
    return (
        ray.remote(Replica)
        .options(
            num_cpus=resources.pop("CPU"),
            num_gpus=resources.pop("GPU"),
            resources=resources,  # without the two
            max_restarts=settings.max_restarts,
            max_task_retries=0,  # the pool decides which requests run again, and where
            max_concurrency=settings.mailbox + _CONTROL,
            enable_task_events=False,  # to note each request for `ray list tasks` takes a tenth of a call
            runtime_env=settings.runtime_env,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number),
        )
        .remote(settings.options_of(number))
    )
