"""Full edges of a captured CUDA graph, in place of barriers between two kernels.

A kernel that may begin before the kernel in front of it has ended gets a programmatic edge when it is
captured: the kernel in front allows it to begin. A barrier (`barriers`) prevents that. It is a kernel, too,
and takes about a microsecond. An empty node, which launches nothing, can take its place. Only kernels allow
others to begin early, so both edges of an empty node are full edges: the kernel after the node begins when
the kernel in front of the node has ended.

This orders the two kernels as strictly as a barrier does. But only runs can show whether a driver and cuDNN
obey it. So barriers are replaced only with versions of both for which at least `LEAST_REPLAYS` replays were
compared, bit for bit, with those of a graph with barriers, and none differed (`benchmarks.full_edges`).
https://docs.nvidia.com/cuda/cuda-c-programming-guide/index.html#programmatic-dependent-launch-and-synchronization
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

from cudnn_actor.engines.cuda.library.failures import check_status
from cudnn_actor.engines.cuda.library.libcuda import libcuda
from cudnn_actor.engines.cuda.library.libraries import libraries

__all__ = ["LEAST_REPLAYS", "PROVED", "Versions", "are_proved", "versions", "wait_by_edge"]

LEAST_REPLAYS = 10_000
"""The fewest replays that were compared for each of `PROVED`."""


class Versions(NamedTuple):
    """The versions of cuDNN, such as 91900, and of CUDA in the driver, such as 13000; and the device's
    compute capability, such as "90"."""

    cudnn: int
    driver: int
    capability: str


PROVED: frozenset[Versions] = frozenset((Versions(91900, 13000, "90"),))
"""The versions for which `LEAST_REPLAYS` replays were compared. Each has a record in `benchmarks/results`."""

_SET = 1  # CU_STREAM_SET_CAPTURE_DEPENDENCIES


def versions() -> Versions:
    """The versions in this process, and the capability of the current device."""
    loaded = libraries()
    return Versions(
        int(loaded.cudnn.backend_version()),
        int(loaded.runtime.driverGetVersion()),
        str(loaded.cupy.cuda.Device().compute_capability),
    )


def are_proved() -> bool:
    """Whether edges may replace barriers on the current device."""
    return bool(PROVED) and versions() in PROVED


def wait_by_edge(stream: Any) -> None:
    """Make the next work that is captured on a stream wait for the end of the work that was captured before.

    Raises `EngineFailure`.
    """
    library = libcuda()
    status, number, graph, nodes, data, count = (
        *(ctypes.c_int(), ctypes.c_uint64(), ctypes.c_void_p()),
        *(ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_size_t()),
    )
    of_stream = ctypes.c_void_p(stream.ptr)
    check_status(
        library.cuStreamGetCaptureInfo_v3(
            *(of_stream, *map(ctypes.byref, (status, number, graph, nodes, data, count)))
        )
    )
    if not count.value:
        return  # nothing is before it
    node = ctypes.c_void_p()
    check_status(library.cuGraphAddEmptyNode(ctypes.byref(node), graph, nodes, count))
    one = ctypes.c_size_t(1)
    check_status(library.cuStreamUpdateCaptureDependencies_v2(of_stream, ctypes.byref(node), None, one, _SET))
