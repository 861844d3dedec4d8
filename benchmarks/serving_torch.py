"""A network of PyTorch behind uvicorn: a picture's bytes in, the bytes of its scores out.

    python -m benchmarks.serving_torch resnet50 compiled --device cuda:0

Needs PyTorch and torchvision. The module is in bfloat16 with its channels last. One thread runs it, on all
pictures that wait when it is free, up to `--max-batch`; compiled, with that many in each run, and its mode is
"reduce-overhead", which launches it as a CUDA graph. It prints its port, and serves until it is killed.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import socket
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import uvicorn

__all__ = ["Batches", "main", "make_app"]

Run = Callable[[Sequence[bytearray]], Sequence[bytes]]
Message = MutableMapping[str, Any]


class Batches:
    """Runs what waits together. All of it is on one event loop, but `run`, which is on a thread of its own.

    Parameters
    ----------
    run
        The outputs of inputs, in their order.
    most
        How many it takes at a time.
    """

    def __init__(self, run: Run, most: int) -> None:
        self._run = run
        self._most = most
        self._thread = ThreadPoolExecutor(1)
        self._waiting: list[tuple[bytearray, asyncio.Future[bytes]]] = []
        self._running = False

    async def ask(self, given: bytearray) -> bytes:
        """The output of an input. Raises as `run`."""
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting.append((given, answer))
        self._start()
        return await answer

    @property
    def waiting(self) -> int:
        """How many inputs wait for a later batch."""
        return len(self._waiting)

    def in_its_thread(self, call: Callable[[], object]) -> None:
        """Call something where `run` is called, and wait for it."""
        self._thread.submit(call).result()

    def _start(self) -> None:
        if self._running or not self._waiting:
            return
        batch, self._waiting = self._waiting[: self._most], self._waiting[self._most :]
        self._running = True
        loop = asyncio.get_running_loop()
        running = loop.run_in_executor(self._thread, self._run, [given for given, _ in batch])
        running.add_done_callback(lambda done: self._answer(batch, done))

    def _answer(
        self, batch: list[tuple[bytearray, asyncio.Future[bytes]]], done: asyncio.Future[Sequence[bytes]]
    ) -> None:
        self._running = False
        self._start()
        error = done.exception()
        for number, (_, answer) in enumerate(batch):
            if answer.done():  # its client has gone
                continue
            if error is None:
                answer.set_result(done.result()[number])
            else:
                answer.set_exception(error)


def make_app(batches: Batches) -> Callable[..., Awaitable[None]]:
    """The ASGI application."""

    async def app(scope: Message, receive: Any, send: Any) -> None:
        assert scope["type"] == "http"
        body, more = bytearray(), True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        found = await batches.ask(body)
        length = (b"content-length", str(len(found)).encode())
        await send({"type": "http.response.start", "status": 200, "headers": [length]})
        await send({"type": "http.response.body", "body": found})

    return app


class Pictures:
    """A network of PyTorch as a function of pictures' bytes. Used from one thread.

    Parameters
    ----------
    name
        Of the network.
    device
        Where it runs, such as "cuda:0".
    most
        How many pictures it takes at a time.
    compiled
        Whether by `torch.compile`; then each run has `most` pictures.
    """

    def __init__(self, name: str, device: str, most: int, *, compiled: bool) -> None:
        self._torch = torch = importlib.import_module("torch")
        network = importlib.import_module("tests.onnx.networks.architectures").NETWORKS[name]
        ((dims, _),) = network.inputs(True).values()
        module = network.make(True).eval().to(device, torch.bfloat16).to(memory_format=torch.channels_last)
        self._module = torch.compile(module, mode="reduce-overhead") if compiled else module
        self._call = network.call
        self._device = device
        self._compiled = compiled
        self._staging = torch.empty((most, *dims[1:]), dtype=torch.bfloat16, pin_memory=device != "cpu")

    def __call__(self, given: Sequence[bytearray]) -> list[bytes]:
        """The scores of each, as bytes of bfloat16."""
        torch, staging = self._torch, self._staging
        for place, each in zip(staging, given, strict=False):
            place.copy_(torch.frombuffer(each, dtype=torch.bfloat16).view(place.shape))
        batch = staging if self._compiled else staging[: len(given)]
        with torch.inference_mode():
            images = batch.to(self._device, non_blocking=True).contiguous(memory_format=torch.channels_last)
            found = self._call(self._module, images)
            scores = found[0] if isinstance(found, tuple) else found
            listed = scores[: len(given)].cpu().view(torch.int16).numpy()
        return [each.tobytes() for each in listed]

    def warm(self) -> None:
        """Run it a few times, for each number of pictures that its runs have."""
        most, nbytes = len(self._staging), self._staging[0].numel() * 2
        for count in (most,) * 4 if self._compiled else range(1, most + 1):
            self([bytearray(nbytes)] * count)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving_torch", description=__doc__)
    parser.add_argument("network")
    parser.add_argument("how", choices=("eager", "compiled"))
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--max-batch", type=int, default=32)
    args = parser.parse_args()
    pictures = Pictures(args.network, args.device, args.max_batch, compiled=args.how == "compiled")
    batches = Batches(pictures, args.max_batch)
    batches.in_its_thread(pictures.warm)
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    print(listener.getsockname()[1], flush=True)
    config = uvicorn.Config(make_app(batches), log_level="warning", access_log=False, lifespan="off")
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main()
