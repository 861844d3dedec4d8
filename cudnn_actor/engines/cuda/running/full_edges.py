"""In a CUDA graph, an edge that a kernel waits for in the place of a barrier in front of it.

A kernel that may begin before the one in front of it has ended gets a programmatic edge when it is captured:
the kernel in front allows it to begin. A barrier (`barriers`) stands in between: a kernel of its own, which
takes about a microsecond. Here a node stands there that does nothing, not even a launch. Only kernels allow
others to begin early, so both edges of that node are full ones: what is behind it begins when what is in
front of it has ended.

That is as strong as a barrier, which waits for the same node. But whether a driver and cuDNN keep to it is
seen in runs alone. So barriers are left out only with versions of both for which at least `LEAST_REPLAYS`
replays were compared, bit for bit, with those of a graph with barriers, and none differed
(`benchmarks.full_edges`).
https://docs.nvidia.com/cuda/cuda-c-programming-guide/index.html#programmatic-dependent-launch-and-synchronization
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any, NamedTuple

from cudnn_actor.engines.cuda.library.failures import check_status
from cudnn_actor.engines.cuda.library.libraries import libraries

__all__ = ["LEAST_REPLAYS", "PROVED", "Versions", "are_proved", "driver", "versions", "wait_by_edge"]

LEAST_REPLAYS = 10_000
"""The fewest replays that were compared for each of `PROVED`."""


class Versions(NamedTuple):
    """What decides: the versions of cuDNN, as 91900, and of CUDA in the driver, as 13000; and the device's
    compute capability, as "90"."""

    cudnn: int
    driver: int
    capability: str


PROVED: frozenset[Versions] = frozenset((Versions(91900, 13000, "90"),))
"""Each has a record in `benchmarks/results`."""

_SET = 1  # CU_STREAM_SET_CAPTURE_DEPENDENCIES


def versions() -> Versions:
    """Those of this process."""
    loaded = libraries()
    return Versions(
        int(loaded.cudnn.backend_version()),
        int(loaded.runtime.driverGetVersion()),
        str(loaded.cupy.cuda.Device().compute_capability),
    )


def are_proved() -> bool:
    """Whether edges may stand in the place of barriers on the current device."""
    return bool(PROVED) and versions() in PROVED


def wait_by_edge(stream: Any) -> None:
    """Have what is captured next on a stream that is being captured wait for the end of all before it.

    Raises `EngineFailure`.
    """
    library = driver()
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


@functools.cache
def driver() -> Any:
    """The driver's library. These calls keep the interpreter's lock: each is short."""
    return ctypes.PyDLL("libcuda.so.1")
