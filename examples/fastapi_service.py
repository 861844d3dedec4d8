"""A web server in front of a GPU: POST /blur answers with the image, blurred.

    pip install fastapi uvicorn
    uvicorn examples.fastapi_service:app --workers 2 --timeout-graceful-shutdown 20
    python examples/fastapi_service.py    # one process, PORT=8000

Each server process has its own service, with its own worker process. When a worker dies, requests take longer
and none fails. When workers die too often, the server ends (`on_give_up="exit"`), and its supervisor starts a
new one (systemd, Kubernetes, uvicorn with several workers, gunicorn).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator
from typing import Annotated, Any

import msgspec
import numpy as np
import uvicorn
from fastapi import FastAPI, HTTPException, Query, Request
from fastapi.responses import JSONResponse, Response

from cudnn_actor import (
    BufferRef,
    ConvFwd,
    ConvSpec,
    CudnnActorError,
    CudnnRef,
    InvalidRequest,
    OutcomeUnknown,
    OutOfMemory,
    ServiceStopped,
    logging,
    spawn,
)

MAX_BYTES = 4 << 20
"""An image has one byte a pixel. A longer body is refused before it has been read."""
TIMEOUT_S = 20.0
SMOOTH = np.array([1, 4, 6, 4, 1], np.float32) / 16
KERNEL = np.outer(SMOOTH, SMOOTH).reshape(1, 1, 5, 5)
CONV = ConvSpec.symmetric(2, pad=2)

Side = Annotated[int, Query(ge=1, le=MAX_BYTES)]


def make_app(**options: Any) -> FastAPI:
    """The application. `options` go to `spawn`."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        logging.configure()  # the service's log lines, on stderr
        # Here, and not at import: servers that fork (gunicorn --preload) run this in each child.
        chosen = {"isolation": "process", "mailbox": 256, "on_give_up": "exit", **options}
        async with spawn(**chosen) as gpu:
            app.state.gpu = gpu
            app.state.kernel = await gpu.upload(KERNEL)  # stays when a worker is replaced
            yield

    app = FastAPI(lifespan=lifespan)
    app.add_api_route("/blur", blur, methods=["POST"])
    app.add_api_route("/livez", livez)
    app.add_api_route("/readyz", readyz)
    app.add_exception_handler(CudnnActorError, answer_error)
    return app


async def blur(request: Request, height: Side, width: Side) -> Response:
    """Take `height` times `width` bytes, one a pixel, row by row; give as many back."""
    if height * width > MAX_BYTES:
        raise HTTPException(413, f"an image may have {MAX_BYTES:,} pixels")
    body = await read(request, height * width)
    image = np.frombuffer(body, np.uint8).reshape(1, 1, height, width).astype(np.float32)
    blurred = await convolve(request.app.state.gpu, image, request.app.state.kernel)
    pixels = blurred.round().clip(0, 255).astype(np.uint8)
    return Response(pixels.tobytes(), media_type="application/octet-stream")


async def read(request: Request, expected: int) -> bytes:
    """The body. Reading stops as soon as it is longer than expected."""
    body = bytearray()
    async for chunk in request.stream():
        if len(body) + len(chunk) > expected:
            raise HTTPException(413, f"the body is longer than {expected:,} bytes")
        body += chunk
    if len(body) < expected:
        raise HTTPException(400, f"the body has {len(body):,} bytes, not {expected:,}")
    return bytes(body)


async def convolve(gpu: CudnnRef, image: np.ndarray, kernel: BufferRef) -> np.ndarray:
    """The image convolved, in buffers of this request's own."""
    async with contextlib.AsyncExitStack() as stack:
        x = await gpu.upload(image)
        stack.push_async_callback(free, gpu, x)
        y = await gpu.empty(image.shape)
        stack.push_async_callback(free, gpu, y)
        # `submit` refuses with MailboxFull when 256 wait already; `ask` would let this client wait as well.
        await gpu.submit(ConvFwd(x=x, w=kernel, y=y, conv=CONV), timeout=TIMEOUT_S)
        return await gpu.download(y)


async def free(gpu: CudnnRef, buffer: BufferRef) -> None:
    """Free a buffer, unless the service has stopped."""
    with contextlib.suppress(CudnnActorError):
        await gpu.free(buffer)


async def livez(request: Request) -> JSONResponse:
    """Liveness: whether the service can still answer. If not, restart this process."""
    return report(request, request.app.state.gpu.alive)


async def readyz(request: Request) -> JSONResponse:
    """Readiness: whether to send requests here. Not while the worker is being replaced."""
    return report(request, request.app.state.gpu.ready)


def report(request: Request, well: bool) -> JSONResponse:
    gpu: CudnnRef = request.app.state.gpu
    body = {"pid": os.getpid(), "worker_pid": gpu.worker_pid, **msgspec.to_builtins(gpu.health())}
    return JSONResponse(body, status_code=200 if well else 503)


async def answer_error(_: Request, error: Exception) -> JSONResponse:
    """What kind of error it is, with `Retry-After` if repeating the request is safe."""
    assert isinstance(error, CudnnActorError)
    headers = {"Retry-After": "1"} if error.retry_safe else {}
    body = {"error": type(error).__name__, "detail": str(error)}
    return JSONResponse(body, status_code=status_of(error), headers=headers)


def status_of(error: CudnnActorError) -> int:
    """413 and 422 for requests that never work, 503 for what passes, 500 for all else."""
    if isinstance(error, InvalidRequest):
        return 422
    if isinstance(error, OutOfMemory) and not error.retry_safe:
        return 413  # larger than the service may hold
    passes = error.retry_safe or isinstance(error, ServiceStopped | OutcomeUnknown)
    return 503 if passes else 500


app = make_app()


if __name__ == "__main__":
    uvicorn.run(app, port=int(os.environ.get("PORT", "8000")), timeout_graceful_shutdown=20)
