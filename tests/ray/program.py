"""Runs the scenarios on one cluster, and writes what has become of each into a file.

python -m tests.ray.program FILE [SCENARIO ...]
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from cudnn_actor.ray import RayPool

from ..patience import PATIENCE_S
from .cluster import cluster
from .scenarios import GROUPS, Lane


def main(path: Path, names: list[str]) -> None:
    """Run the scenarios of these names, or all, and print how long each took."""
    from blockbuster import BlockBuster

    begun = time.monotonic()
    outcomes: dict[str, str] = {}
    path.write_text("{}")
    with cluster() as nodes:
        print(f"cluster: {time.monotonic() - begun:.1f} s", flush=True)
        watched = BlockBuster("cudnn_actor")
        watched.activate()
        for group in GROUPS:
            asyncio.run(run_group(group, names, nodes, outcomes))
            path.write_text(json.dumps(outcomes))
        watched.deactivate()


async def run_group(
    group: Sequence[Lane], names: Collection[str], nodes: Any, outcomes: dict[str, str]
) -> None:
    """Run lanes at a time, and note for each scenario what was raised; nothing for success."""

    async def run(scenario: Callable[..., Awaitable[None]], *given: Any) -> None:
        begun, name = time.monotonic(), scenario.__name__
        try:
            async with asyncio.timeout(PATIENCE_S):
                await scenario(nodes, *given)
            outcomes[name] = ""
        except BaseException:  # noqa: BLE001 - the test shows it
            outcomes[name] = traceback.format_exc()
        print(f"{name}: {time.monotonic() - begun:.1f} s{outcomes[name] and ' FAILED'}", flush=True)

    async def run_lane(lane: Lane) -> None:
        wanted = [each for each in lane.scenarios if not names or each.__name__ in names]
        if not wanted:
            return
        async with contextlib.AsyncExitStack() as ends:
            given = []
            if lane.pool is not None:
                try:
                    async with asyncio.timeout(PATIENCE_S):
                        given = [await ends.enter_async_context(RayPool(**lane.pool))]
                except BaseException:  # noqa: BLE001 - the tests show it
                    outcomes.update(dict.fromkeys((each.__name__ for each in wanted), traceback.format_exc()))
                    return
            for each in wanted:
                await run(each, *given)

    await asyncio.gather(*map(run_lane, group))


if __name__ == "__main__":
    signal.alarm(2 * PATIENCE_S)  # two groups may hang
    main(Path(sys.argv[1]), sys.argv[2:])
