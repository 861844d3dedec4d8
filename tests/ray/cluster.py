"""A Ray cluster of two nodes on this machine, in processes that all end with it."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..patience import PATIENCE_S

__all__ = ["ENVIRONMENT", "cluster", "kill_session", "of_session"]

ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",  # else it writes a token into the home folder
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    # Serve kills its proxy if that is not ready in time; with its own settings, after 5 s.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": str(PATIENCE_S),
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": str(PATIENCE_S),
}
_STORE_BYTES = 80_000_000
_NODE = {"num_cpus": 3, "object_store_memory": _STORE_BYTES, "include_log_monitor": False}
"""A node without the process that passes on what workers print. The first node is also without the one that
would start more nodes. Each imports Ray, which takes a second."""
_SETTINGS = {
    "prestart_worker_first_driver": False,  # a worker for each processor, of which few would be used
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 60_000,
    "health_check_failure_threshold": 4,
}
"""Settings of Ray by which it starts the workers that are needed, and gives up a node that is gone after 2 to
3 s; with its own, that takes 15 s.

A node that is only slow to answer, on a busy machine, has minutes.
"""


@contextlib.contextmanager
def cluster() -> Iterator[Any]:
    """The cluster, to whose first node this process is connected. Blocks for some seconds.

    This process and those that it starts have Ray's files in a folder of their own from then on.
    """
    import ray
    from ray.cluster_utils import Cluster

    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        os.environ["RAY_TMPDIR"] = folder  # a node's temp_dir would not do: Ray notes its address elsewhere
        head = {**_NODE, "include_dashboard": False, "no_monitor": True, "_system_config": _SETTINGS}
        made = Cluster(initialize_head=True, head_node_args=head)
        try:
            made.add_node(**_NODE)
            ray.init(address=made.address, logging_level="warning", log_to_driver=False)
            yield made
        finally:
            ray.shutdown()
            made.shutdown()


def of_session(session: int) -> dict[int, str]:
    """The processes of a session, with their command lines; without its leader, and those that have ended."""
    found = {}
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            number = int(folder.name)
            state, _, _, its, *_ = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(its) == session != number and state not in "ZX":
                found[number] = (folder / "cmdline").read_text().replace("\0", " ").strip()
    return found


def kill_session(session: int) -> None:
    """Kill the processes of a session, be there more of them meanwhile."""
    while left := of_session(session):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
