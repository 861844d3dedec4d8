"""How much of a device's memory is free, as another process sees it that takes no more meanwhile.

As a program it answers each line of its input with the number of free bytes.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.gpu.setting import cupy

__all__ = ["Gauge", "gauge"]

_ROOT = Path(__file__).parents[2]


class Gauge:
    """A process that looks. Blocks for a moment when asked."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def free_bytes(self) -> int:
        """The free bytes of the device. Raises `RuntimeError` when the process has failed."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write("?\n")
        stdin.flush()
        answer = stdout.readline()
        if not answer:
            raise RuntimeError(f"the gauge ended with status {self._process.wait()}")
        return int(answer)


@contextmanager
def gauge(ordinal: int) -> Iterator[Gauge]:
    """A gauge for as long as the block runs. Its own context is there before the first answer."""
    command = [sys.executable, "-m", "benchmarks.gpu.device_memory", str(ordinal)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=_ROOT
    ) as process:
        try:
            found = Gauge(process)
            found.free_bytes()
            yield found
        finally:
            process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ordinal", type=int)
    runtime = cupy().cuda.runtime
    runtime.setDevice(parser.parse_args().ordinal)
    for _ in sys.stdin:
        print(runtime.memGetInfo()[0], flush=True)


if __name__ == "__main__":
    main()
