"""Bytes from raw sockets that are no requests: they cost their connections, and nothing else."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Iterator

import grpc
import httpx
import pytest

from ..patience import PATIENCE_S
from .malformed import BODY, HEAD, damage, exchanged
from .malformed_calls import METHODS, call_damage
from .servers import PLAIN, running, write_square

CONNECTIONS = int(os.environ.get("SERVING_CONNECTIONS", "150"))
"""How many malformed connections there are over HTTP, and over gRPC."""

CALLS = int(os.environ.get("SERVING_CALLS", "100"))
"""How many malformed messages are sent to each method of gRPC."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, dict[str, int]]]:
    path = write_square(tmp_path_factory.mktemp("models"))
    with running(str(path), "--http", "0", "--grpc", "0") as (process, ports):
        yield process.pid, ports


@pytest.mark.parametrize("face", ["http", "grpc"])
def test_malformed_connections_cost_nothing_but_themselves(
    server: tuple[int, dict[str, int]], face: str
) -> None:
    pid, ports = server
    seed = random.randrange(1 << 32)
    found = damage(pid, ports, face, CONNECTIONS, seed)
    assert not found.to_blame, f"seed {seed}: {found.to_blame}"
    assert found.grown_descriptors <= 5
    assert found.grown_bytes < 32 << 20, f"seed {seed}"
    with httpx.Client(base_url=f"http://127.0.0.1:{ports['http']}", **PLAIN) as http:
        assert http.get("/v2/health/ready").status_code == 200
        assert http.post("/v2/models/square/infer", content=BODY).json()["outputs"][0]["data"] == [1, 4, 9]


def test_malformed_messages_of_grpc_are_refused_as_the_callers_fault(
    server: tuple[int, dict[str, int]],
) -> None:
    pid, ports = server
    seed = random.randrange(1 << 32)
    found = call_damage(pid, ports["grpc"], CALLS, seed)
    assert not found.to_blame, f"seed {seed}: {found.to_blame}"
    assert {name for name, _ in found.statuses} == set(METHODS)
    assert len(METHODS) == 20
    assert found.grown_descriptors <= 5
    assert found.grown_bytes < 32 << 20, f"seed {seed}"
    with grpc.insecure_channel(f"127.0.0.1:{ports['grpc']}") as channel:
        ready = channel.unary_unary("/inference.GRPCInferenceService/ServerReady")
        assert ready(b"", timeout=PATIENCE_S) == b"\x08\x01"


def test_headers_and_bodies_that_are_too_long_are_refused(server: tuple[int, dict[str, int]]) -> None:
    _, ports = server
    assert b" 400 " in exchanged(ports["http"], b"GET / HTTP/1.1\r\nA: " + b"a" * (70 << 10))[:20]
    with socket.create_connection(("127.0.0.1", ports["http"]), PATIENCE_S) as connection:
        connection.sendall(HEAD % 999_999_999_999 + b"{")
        assert b" 413 " in connection.recv(20)
