"""Runs the scenarios on one cluster, and writes what has become of each into a file.

python -m tests.ray.program FILE [SCENARIO ...]
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
import traceback
from pathlib import Path

from .cluster import cluster
from .scenarios import SCENARIOS

_LIMIT_S = 100
"""Of one scenario."""


def main(path: Path, names: list[str]) -> None:
    """Run scenarios one after the other; the first line of the file tells what the cluster itself took."""
    from blockbuster import BlockBuster

    begun = time.monotonic()
    outcomes: dict[str, str] = {}
    path.write_text("{}")
    with cluster() as nodes:
        print(f"cluster: {time.monotonic() - begun:.1f} s", flush=True)
        watched = BlockBuster("cudnn_actor")
        watched.activate()
        for name in names or SCENARIOS:
            begun = time.monotonic()
            try:
                asyncio.run(asyncio.wait_for(SCENARIOS[name](nodes), _LIMIT_S))
                outcomes[name] = ""
            except BaseException:  # noqa: BLE001 - the test shows it
                outcomes[name] = traceback.format_exc()
            path.write_text(json.dumps(outcomes))
            print(f"{name}: {time.monotonic() - begun:.1f} s{outcomes[name] and ' FAILED'}", flush=True)
        watched.deactivate()


if __name__ == "__main__":
    signal.alarm(400)
    main(Path(sys.argv[1]), sys.argv[2:])
