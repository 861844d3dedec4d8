"""Bytes that are no requests, sent to a server by raw sockets, and what they did to it."""

from __future__ import annotations

import os
import random
import re
import socket
import struct
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from ..patience import PATIENCE_S

__all__ = ["BODY", "HEAD", "PIECES", "Damage", "damage", "descriptors", "exchanged", "resident_bytes"]

BODY = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1,3],"data":[1,2,3]}]}'
HEAD = b"POST /v2/models/square/infer HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n"
REQUEST = HEAD % len(BODY) + BODY
PIECES = [b"", b"\0", b"\r\n", b"\r\n\r\n", b"A" * 300, b":", b"-1", b"99999999999999999999", b"{["]
PIECES += [b"Inference-Header-Content-Length: 7\r\n", b"Transfer-Encoding: chunked\r\n"]
PIECES += [b"Content-Encoding: gzip\r\n", b"%00", b"\xff\xfe"]
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)
_WARM = 20


@dataclass
class Damage:
    """What so many malformed connections did to a server.

    Parameters
    ----------
    connections
        How many there were.
    statuses
        How often each status was answered over HTTP.
    to_blame
        What was answered with a 5xx but 501, with what was sent.
    grown_bytes, grown_descriptors
        By how much its memory, and what it has open, have grown.
    """

    connections: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    to_blame: list[str] = field(default_factory=list)
    grown_bytes: int = 0
    grown_descriptors: int = 0


def damage(pid: int, ports: dict[str, int], face: str, connections: int, seed: int) -> Damage:
    """Send so many. Blocks until each has been answered or closed."""
    rng, found = random.Random(seed), Damage()
    make = malformed_http if face == "http" else malformed_grpc
    for _ in range(_WARM):  # whatever is made once is made
        exchanged(ports[face], make(rng))
    before, opened = resident_bytes(pid), descriptors(pid)
    for _ in range(connections):
        data = make(rng)
        answer = exchanged(ports[face], data)
        found.connections += 1
        for status in re.findall(rb"^HTTP/1.1 (\d+)", answer, re.MULTILINE):
            found.statuses[status.decode()] += 1
            if status[:1] not in b"124" and status != b"501":
                found.to_blame.append(f"{data!r} -> {answer!r}"[:2000])
    found.grown_bytes = resident_bytes(pid) - before
    found.grown_descriptors = descriptors(pid) - opened
    return found


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
