"""The server's life: who is let in, workers that die, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import ssl
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc.aio as triton
from tritonclient.utils import InferenceServerException

from cudnn_actor import connect
from cudnn_actor.serving.failures import Refused, Unauthorised
from cudnn_actor.serving.model_settings import Batching
from cudnn_actor.serving.server import InferenceServer, ServerOptions, serve
from cudnn_actor.serving.tokens import Tokens

from ..inside import kept_by, service_behind
from ..onnx.small_models import image_model
from ..patience import PATIENCE_S
from .servers import PLAIN, running, write_square

CONNECTIONS = 12
"""Of so many, it is all but certain that each of two processes has one."""
INFER = "/v2/models/square/infer"
KEY = """-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgKUyUMr7azn7k59LV
niIgcASfMDt6S2tOqCT/lOiN/QChRANCAASem0dl33IZnWv4hXpUKybj5uBL7uKB
lVHEdodYaw/oIkEDfvCNgpZWFra7sduZfjYyvvtwbHXhNtIL2VEQLdfZ
-----END PRIVATE KEY-----
"""
"""A key that protects nothing, and a certificate of it for 127.0.0.1."""
CERTIFICATE = """-----BEGIN CERTIFICATE-----
MIIBmzCCAUGgAwIBAgIUUTe6KSyujiPxykNNDc1VTxHMOqgwCgYIKoZIzj0EAwIw
FDESMBAGA1UEAwwJbG9jYWxob3N0MCAXDTI2MTEyNzA2NTQwOFoYDzIxMjYxMTAz
MDY1NDA4WjAUMRIwEAYDVQQDDAlsb2NhbGhvc3QwWTATBgcqhkjOPQIBBggqhkjO
PQMBBwNCAASem0dl33IZnWv4hXpUKybj5uBL7uKBlVHEdodYaw/oIkEDfvCNgpZW
Fra7sduZfjYyvvtwbHXhNtIL2VEQLdfZo28wbTAdBgNVHQ4EFgQUsycpyWtOR443
aauh9Kqn8oJX3rUwHwYDVR0jBBgwFoAUsycpyWtOR443aauh9Kqn8oJX3rUwDwYD
VR0TAQH/BAUwAwEB/zAaBgNVHREEEzARhwR/AAABgglsb2NhbGhvc3QwCgYIKoZI
zj0EAwIDSAAwRQIgeLauQE5XneFHbq/YbhBYql20Yn9YeN8MEbSw8fg7JE0CIQDR
VHnQZN2YFhA9ji6sTdwJOrJef8tYhaI6KRAenXk7UQ==
-----END CERTIFICATE-----
"""
REQUEST = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 3], "data": [1, 2, 3]}]}


@contextlib.asynccontextmanager
async def serving(folder: Path, **options: Any) -> AsyncIterator[tuple[InferenceServer, httpx.AsyncClient]]:
    """A server of the model `square` in this process, and a client of it."""
    service = {"device": "cpu", **options.pop("service", {})}
    chosen = {"http": 0, "grpc": None, "models": {"square": write_square(folder)}, **options}
    async with serve(ServerOptions(service=service, **chosen)) as server:
        base = f"http://127.0.0.1:{server.http_port}"
        async with httpx.AsyncClient(base_url=base, **PLAIN) as http:
            yield server, http


async def test_killed_workers_fail_no_request(tmp_path: Path) -> None:
    """Of 320 requests of eight clients, while the worker is killed twice."""
    service = {"isolation": "process", "standby": 1}

    async def ask(number: int) -> None:
        for count in range(40):
            value = float(number * 100 + count)
            asked = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 3], "data": [value, 1, 2]}]}
            if number == 0 and count in (5, 20) and server.gpu.worker_pid is not None:
                os.kill(server.gpu.worker_pid, signal.SIGKILL)
            answer = await http.post(INFER, json=asked)
            assert answer.status_code == 200, answer.text
            assert answer.json()["outputs"][0]["data"] == [value**2, 1, 4]

    async with serving(tmp_path, service=service, batch=Batching(max=4)) as (server, http):
        await asyncio.gather(*map(ask, range(8)))
        assert server.gpu.generation >= 2


async def test_what_has_not_started_when_its_time_is_over_is_not_run(tmp_path: Path) -> None:
    async with serving(tmp_path) as (server, http):
        before = server.gpu.metrics().finished
        late = await http.post(INFER, json={**REQUEST, "parameters": {"timeout": 1}})
        assert late.status_code == 504
        assert server.gpu.metrics().finished == before
        assert (
            await http.post(INFER, json={**REQUEST, "parameters": {"timeout": 60_000_000}})
        ).status_code == 200


async def test_it_drains_what_is_under_way_and_refuses_the_rest(tmp_path: Path) -> None:
    async with serving(tmp_path) as (server, http):
        with server.host.admit():
            server.host.draining = True
            assert (await http.get("/v2/health/ready")).status_code == 503
            assert (await http.get("/v2/health/live")).status_code == 200
            refused = await http.post(INFER, json=REQUEST)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            idle = asyncio.ensure_future(server.host.idle())
            await asyncio.sleep(0)
            assert not idle.done()
        await idle


async def test_attached_processes_share_the_weights_of_its_models(tmp_path: Path) -> None:
    file, path = tmp_path / "image.onnx", tmp_path / "s"
    file.write_bytes(image_model().SerializeToString())
    image = {"name": "image", "datatype": "FP32", "shape": [1, 3, 8, 8], "data": [0.0] * 192}
    async with serving(tmp_path, models={"image": file}, socket=path) as (server, http):
        assert (await http.post("/v2/models/image/infer", json={"inputs": [image]})).status_code == 200
        async with connect(path) as client:
            model = await client.load("image", dims={"N": 1})
            weights = [ref for ref, _ in kept_by(model).weights.values()]
            await model.close()
            await client.drain()
        await server.gpu.drain()
        assert weights
        assert all(
            service_behind(server.gpu).state.memory.is_live(ref) for ref in weights
        )  # the server's model has them


async def test_too_many_at_a_time_are_told_to_come_again(tmp_path: Path) -> None:
    async with serving(tmp_path, most_running=1) as (server, http):
        with server.host.admit():
            refused = await http.post(INFER, json=REQUEST)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert (await http.post(INFER, json=REQUEST)).status_code == 200


async def test_a_token_is_needed_for_all_but_health_and_the_page(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.touch(mode=0o600)
    tokens.write_text("# of the team\nsecret one\n")
    async with serving(tmp_path, token_file=tokens) as (_, http):
        for path in ("/", "/v2/health/live", "/v2/health/ready", "/v2/models/square/ready"):
            assert (await http.get(path)).status_code == 200
        for path in ("/v2", "/metrics", "/v2/models/square", "/v2/models/stats", "/v2/logging"):
            assert (await http.get(path)).status_code == 401
        wrong, right = ({"authorization": f"Bearer {token}"} for token in ("secret", "secret one"))
        assert (await http.post(INFER, json=REQUEST, headers=wrong)).status_code == 401
        assert (await http.post(INFER, json=REQUEST, headers=right)).status_code == 200


def test_a_file_of_tokens_is_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text("secret\n")
    path.chmod(0o640)
    with pytest.raises(Refused, match="chmod 600"):
        Tokens(path)
    path.chmod(0o600)
    tokens = Tokens(path)
    tokens.require("bearer secret")
    for header in (None, "", "secret", "Basic secret", "Bearer", "Bearer secre", "Bearer # of"):
        with pytest.raises(Unauthorised):
            tokens.require(header)
    path.write_text("# none\n\n")
    with pytest.raises(Refused, match="no token"):
        Tokens(path)


@pytest.mark.parametrize("processes", ["1", "2"])
def test_both_faces_speak_tls(processes: str, tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    key.write_text(KEY)
    certificate.write_text(CERTIFICATE)
    trusted = ssl.create_default_context(cadata=CERTIFICATE)
    words = ("--http", "0", "--grpc", "0", "--tls-key", str(key), "--tls-cert", str(certificate))
    with running(str(write_square(tmp_path)), *words, "--processes", processes) as (_, ports):
        base = f"https://127.0.0.1:{ports['http']}"
        for _ in range(CONNECTIONS):
            with httpx.Client(base_url=base, trust_env=False, verify=trusted, timeout=PATIENCE_S) as http:
                assert http.post(INFER, json=REQUEST).status_code == 200
            with pytest.raises(httpx.TransportError):
                httpx.get(base.replace("https", "http"), **PLAIN)
        trusted.set_alpn_protocols(["h2"])
        for _ in range(CONNECTIONS):
            with (
                socket.create_connection(("127.0.0.1", ports["grpc"]), PATIENCE_S) as plain,
                trusted.wrap_socket(plain, server_hostname="127.0.0.1") as connection,
            ):
                assert connection.selected_alpn_protocol() == "h2"


@pytest.mark.parametrize("processes", ["1", "2"])
def test_requests_are_answered_or_refused_while_a_server_ends(processes: str, tmp_path: Path) -> None:
    found: list[int] = []
    words = (str(write_square(tmp_path)), "--http", "0", "--grpc", "0", "--processes", processes)
    with running(*words) as (process, ports):
        url, first = f"http://127.0.0.1:{ports['http']}{INFER}", threading.Event()

        def ask(_: int) -> None:
            """Until the server has gone; each on a connection of its own."""
            with contextlib.suppress(httpx.TransportError):
                while True:
                    found.append(httpx.post(url, json=REQUEST, **PLAIN).status_code)
                    first.set()

        with ThreadPoolExecutor(4) as clients:
            asked = [clients.submit(ask, number) for number in range(4)]
            assert first.wait(PATIENCE_S)
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE_S) == 0
            for each in asked:
                each.result(PATIENCE_S)
    assert 200 in found
    assert set(found) <= {200, 503}


async def test_over_grpc_too_tokens_deadlines_and_bounds_hold(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.touch(mode=0o600)
    tokens.write_text("secret\n")
    rows = triton.InferInput("x", [1, 3], "FP32")
    rows.set_data_from_numpy(np.ones((1, 3), np.float32))
    known = {"authorization": "Bearer secret"}
    async with (
        serving(tmp_path, grpc=0, token_file=tokens, most_running=1) as (server, _),
        triton.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as client,
    ):

        async def status(**options: Any) -> str:
            with pytest.raises(InferenceServerException) as refused:
                await client.infer("square", [rows], **options)
            return str(refused.value.status()).removeprefix("StatusCode.")

        assert await client.is_server_live()
        assert await status() == "UNAUTHENTICATED"
        assert await status(headers={"authorization": "Bearer other"}) == "UNAUTHENTICATED"
        assert await status(headers=known, timeout=1) == "DEADLINE_EXCEEDED"
        with server.host.admit():
            assert await status(headers=known) == "RESOURCE_EXHAUSTED"
        answer = await client.infer("square", [rows], headers=known)
        np.testing.assert_array_equal(answer.as_numpy("y"), 1)
