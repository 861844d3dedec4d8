"""The other process of `benchmarks.second_process`: it answers requests, with nothing else around it.

    python -m benchmarks.second_process_side DEVICE NODES RUN_US NBYTES SOCKET MEMORY

A request is a word, which is sent back: "run" and "copy" when the device has finished; "polls" and "sleeps"
say how it waits for requests from then on. On "cpu", a run takes its time by the clock. On a GPU, it is a
CUDA graph of so many kernels, which wait. A copy is that of a shared array to the device, part by part, as
the parts arrive.
"""

from __future__ import annotations

import mmap
import socket
import statistics
import struct
import sys
import time

import numpy as np

from cudnn_actor.isolation.process.arrivals import Arrival, parts_of
from cudnn_actor.memory.array_addresses import address_of

from .gpu.setting import cupy

__all__ = ["COPY", "POLLS", "READY", "RUN", "SLEEPS", "WORDS_BYTES"]

RUN, COPY, POLLS, SLEEPS = b"run", b"copy", b"polls", b"sleeps"
READY = struct.Struct("d")
"""The first word of this process: how many microseconds a run takes on the device."""
WORDS_BYTES = 4096
"""Behind the shared array: the words that say which of its parts are there."""
_TIMED = 30
_WAIT = r"""
extern "C" __global__ void wait(const long long ns) {
    long long begin, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
    do {
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    } while (now - begin < ns);
}
"""


class _Clock:
    """A device that is nothing but a clock, and copies at once."""

    def __init__(self, run_us: float, values: np.ndarray) -> None:
        self.run_us = run_us
        self._values, self._there = values, np.zeros_like(values)

    def run(self) -> None:
        end = time.perf_counter() + self.run_us / 1e6
        while time.perf_counter() < end:
            pass

    def copy(self, begin: int, end: int) -> None:
        self._there[begin:end] = self._values[begin:end]

    def wait(self) -> None:
        pass


class _Gpu:
    """A GPU with one stream. The shared array is pinned."""

    def __init__(self, ordinal: int, nodes: int, run_us: float, values: np.ndarray) -> None:
        library = cupy()
        self._cuda = cuda = library.cuda
        cuda.Device(ordinal).use()
        self._address = address_of(values)
        cuda.runtime.hostRegister(self._address, values.nbytes, 0)
        self._there = cuda.alloc(values.nbytes)
        self._stream = cuda.Stream(non_blocking=True)
        self._end = cuda.Event(block=False, disable_timing=True)
        kernel, each = library.RawKernel(_WAIT, "wait"), (np.int64(run_us * 1e3 / nodes),)
        with self._stream:
            kernel((1,), (1,), each)
            self._stream.synchronize()
            self._stream.begin_capture()
            for _ in range(nodes):
                kernel((1,), (1,), each)
            self._graph = self._stream.end_capture()
        self.run_us = statistics.median(self._device_us() for _ in range(_TIMED))

    def _device_us(self) -> float:
        """A run, launched while another one computes: so it waits for nothing but the device."""
        begin, end = self._cuda.Event(), self._cuda.Event()
        self._graph.launch(self._stream)
        begin.record(self._stream)
        self._graph.launch(self._stream)
        end.record(self._stream)
        end.synchronize()
        return float(self._cuda.get_elapsed_time(begin, end)) * 1e3

    def run(self) -> None:
        self._graph.launch(self._stream)
        self.wait()

    def copy(self, begin: int, end: int) -> None:
        target, source = self._there.ptr + begin, self._address + begin
        to_device = self._cuda.runtime.memcpyHostToDevice
        self._cuda.runtime.memcpyAsync(target, source, end - begin, to_device, self._stream.ptr)

    def wait(self) -> None:
        self._end.record(self._stream)
        while not self._end.done:
            pass


def _copy(device: _Clock | _Gpu, arrival: Arrival, nbytes: int) -> None:
    for number, begin, end in parts_of(nbytes):
        while not arrival.is_there(number):
            pass
        device.copy(begin, end)
    device.wait()


def _polled(connection: socket.socket) -> bytes:
    while True:
        try:
            return connection.recv(16, socket.MSG_DONTWAIT)
        except BlockingIOError:
            pass


def main() -> None:
    """Answer until the other side has gone."""
    where, nodes, run_us, nbytes, connected, descriptor = sys.argv[1:]
    size = int(nbytes)
    memory = mmap.mmap(int(descriptor), size + WORDS_BYTES)
    values = np.frombuffer(memory, np.uint8, size)
    device: _Clock | _Gpu
    if where == "cpu":
        device = _Clock(float(run_us), values)
    else:
        device = _Gpu(int(where.partition(":")[2] or 0), int(nodes), float(run_us), values)
    arrival = Arrival(memoryview(memory), size)
    connection = socket.socket(fileno=int(connected))
    connection.send(READY.pack(device.run_us))
    polls = False
    while request := _polled(connection) if polls else connection.recv(16):
        if request == RUN:
            device.run()
        elif request == COPY:
            _copy(device, arrival, size)
        else:
            polls = request == POLLS
        connection.send(request)


if __name__ == "__main__":
    main()
