"""Loads cuDNN in a separate process and prints the result as JSON.

Run as a script; the service never loads cuDNN with it: a broken cuDNN may end the process that loads it, and
which sub-libraries are loaded depends on what the process has loaded before. Makes no CUDA context.
"""

from __future__ import annotations

import ctypes
import json
import sys

CHECKS = ("cudnnGraphVersionCheck", "cudnnOpsVersionCheck", "cudnnCnnVersionCheck", "cudnnAdvVersionCheck")
"""Each loads its sub-library, and fails if its version differs from that of libcudnn.so.9.

https://docs.nvidia.com/deeplearning/cudnn/backend/latest/api/cudnn-graph-library.html
"""


def load(path: str) -> dict[str, object]:
    """cuDNN's version, the CUDA it was built with, the failed checks, and this process's memory mappings."""
    try:
        cudnn = ctypes.CDLL(path)
        version = _size(cudnn, "cudnnGetVersion")
        cudart = _size(cudnn, "cudnnGetCudartVersion")
    except (OSError, AttributeError) as error:
        return {"error": str(error)}
    failed = {name: text for name in CHECKS if (text := _check(cudnn, name))}
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        return {"version": version, "cudart": cudart, "failed": failed, "maps": maps.read()}


def _size(cudnn: ctypes.CDLL, name: str) -> int:
    function = getattr(cudnn, name)
    function.restype = ctypes.c_size_t
    return int(function())


def _check(cudnn: ctypes.CDLL, name: str) -> str:
    """The name of the status that a check returns; empty for success, or if cuDNN lacks the check."""
    function = getattr(cudnn, name, None)
    status = function() if function is not None else 0
    if not status:
        return ""
    cudnn.cudnnGetErrorString.restype = ctypes.c_char_p
    text: bytes | None = cudnn.cudnnGetErrorString(status)
    return (text or b"status %d" % status).decode()


if __name__ == "__main__":
    json.dump(load(sys.argv[1]), sys.stdout)
