"""Bytes from raw sockets that are no requests: they cost their connections, and nothing else."""

from __future__ import annotations

import os
import random
import re
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from .servers import PATIENCE_S, running, write_square

CONNECTIONS = int(os.environ.get("SERVING_CONNECTIONS", "150"))
"""How many malformed connections there are over HTTP, and over gRPC."""
BODY = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1,3],"data":[1,2,3]}]}'
HEAD = b"POST /v2/models/square/infer HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n"
REQUEST = HEAD % len(BODY) + BODY
PIECES = [b"", b"\0", b"\r\n", b"\r\n\r\n", b"A" * 300, b":", b"-1", b"99999999999999999999", b"{["]
PIECES += [b"Inference-Header-Content-Length: 7\r\n", b"Transfer-Encoding: chunked\r\n"]
PIECES += [b"Content-Encoding: gzip\r\n", b"%00", b"\xff\xfe"]
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, dict[str, int]]]:
    path = write_square(tmp_path_factory.mktemp("models"))
    with running(str(path), "--http", "0", "--grpc", "0") as (process, ports):
        yield process.pid, ports


def exchanged(port: int, data: bytes) -> bytes:
    """What is answered to these bytes, until the connection's end."""
    with socket.create_connection(("127.0.0.1", port), PATIENCE_S) as connection:
        answer = b""
        try:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            while piece := connection.recv(1 << 16):
                answer += piece
        except (ConnectionResetError, BrokenPipeError):
            pass
        return answer


def malformed_http(rng: random.Random) -> bytes:
    data = REQUEST
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(data) + 1)
        data = data[:at] + rng.choice([*PIECES, rng.randbytes(3)]) + data[at + rng.choice([0, 0, 1, 7]) :]
    return data[: rng.choice([len(data), rng.randrange(len(data) + 1)])]


def malformed_grpc(rng: random.Random) -> bytes:
    frames = [PREFACE]
    for _ in range(rng.randrange(1, 5)):
        payload = rng.randbytes(rng.randrange(40))
        length = rng.choice([len(payload), len(payload), rng.randrange(1 << 24)])
        head = struct.pack(">I", length)[1:] + bytes([rng.randrange(11), rng.randrange(64)])
        frames.append(head + struct.pack(">I", rng.randrange(6)) + payload)
    return b"".join(frames)


def descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.mark.parametrize("face", ["http", "grpc"])
def test_malformed_connections_cost_nothing_but_themselves(
    server: tuple[int, dict[str, int]], face: str
) -> None:
    pid, ports = server
    seed = random.randrange(1 << 32)
    rng = random.Random(seed)
    make = malformed_http if face == "http" else malformed_grpc
    for _ in range(20):  # whatever is made once is made
        exchanged(ports[face], make(rng))
    before, opened = resident_bytes(pid), descriptors(pid)
    for number in range(CONNECTIONS):
        data = make(rng)
        answer = exchanged(ports[face], data)
        for status in re.findall(rb"^HTTP/1.1 (\d+)", answer, re.MULTILINE):
            assert status[:1] in b"124" or status == b"501", f"seed {seed}, {number}: {data!r} -> {answer!r}"
    assert descriptors(pid) <= opened + 5
    assert resident_bytes(pid) - before < 32 << 20, f"seed {seed}"
    with httpx.Client(base_url=f"http://127.0.0.1:{ports['http']}", trust_env=False) as http:
        assert http.get("/v2/health/ready").status_code == 200
        assert http.post("/v2/models/square/infer", content=BODY).json()["outputs"][0]["data"] == [1, 4, 9]


def test_headers_and_bodies_that_are_too_long_are_refused(server: tuple[int, dict[str, int]]) -> None:
    _, ports = server
    assert b" 400 " in exchanged(ports["http"], b"GET / HTTP/1.1\r\nA: " + b"a" * (70 << 10))[:20]
    with socket.create_connection(("127.0.0.1", ports["http"]), PATIENCE_S) as connection:
        connection.sendall(HEAD % 999_999_999_999 + b"{")
        assert b" 413 " in connection.recv(20)
