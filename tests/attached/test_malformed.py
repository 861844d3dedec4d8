"""What a client sends that breaks the protocol costs its own connection alone, and the log says why."""

from __future__ import annotations

import asyncio
import fcntl
import os
import struct
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from structlog.typing import EventDict

from cudnn_actor import CudnnRef, connect
from cudnn_actor.attached import ServedSocket
from cudnn_actor.attached.server import patience
from cudnn_actor.attached.server.holdings import references
from cudnn_actor.attached.wire import (
    FROM_SERVER,
    KEPT_BYTES,
    LONGEST,
    MOST_KEPT,
    VERSION,
    Answers,
    Attach,
    Attached,
    DropSegment,
    ForgetMessages,
    MapSegment,
    Place,
    Refused,
    Request,
    Requests,
    Room,
    WireArray,
    Withdraw,
)
from cudnn_actor.engines.cpu.arenas import FIXED_SIZE
from cudnn_actor.errors import MalformedMessage, NotDeployed
from cudnn_actor.messages import Download, Free, RunModel, Upload
from cudnn_actor.processes.channel import Channel
from cudnn_actor.processes.frames import encode
from cudnn_actor.protocol.messages.codec import encode_message
from cudnn_actor.protocol.messages.model_messages import ModelRef
from cudnn_actor.protocol.types.dtypes import DType

from .client_program import X
from .raw_client import ATTACH, Raw


def memory(nbytes: int, seals: int = FIXED_SIZE) -> int:
    descriptor = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, nbytes)
    if seals:
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def _framed(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


FRAMES: dict[str, tuple[bytes, str]] = {
    "too long": (struct.pack("<I", LONGEST + 1), "the limit is"),
    "no MessagePack": (struct.pack("<I", 3) + b"\xc1\xc1\xc1", ""),
    "unknown kind": (encode(msgspec.defstruct("Other", [], tag=True, array_like=True)()), ""),
    "wrong type": (_framed(msgspec.msgpack.encode(["Withdraw", "seven!"])), ""),
    "too many fields": (b"\x05\x00\x00\x00\x93\xa3abc", ""),
    "twice attached": (encode(ATTACH), "twice"),
    "no such segment": (encode(DropSegment(7)), "no segment 7"),
    "room that nobody needs": (encode(Room(7, None, 0)), "needs none"),
    "no descriptor": (encode(MapSegment(0, 4096)), "without the descriptor"),
    "numbers that fall": (encode(Requests(0, [Request(b"")])), "came after"),
    "numbers without an end": (encode(Requests(2**64 - 1, [Request(b"")] * 2)), "9223372036854775807"),
    "no such message": (encode(Requests(1, [7])), "no message 7"),
    "no such message to be run late": (encode(Requests(1, [Request(7, timeout_s=1.0)])), "no message 7"),
    "a number given twice": (encode(Requests(1, [Request(b"", keep=1)] * 2)), "message 1 came twice"),
    "a number for a number": (
        encode(Requests(1, [Request(b"", keep=1), Request(1, keep=2)])),
        "message 2 came twice",
    ),
    "too many messages": (
        encode(Requests(1, [Request(b"", keep=number) for number in range(MOST_KEPT + 1)])),
        "too many to keep",
    ),
    "a number that was taken back": (
        encode(Requests(1, [Request(b"", keep=1)])) + encode(ForgetMessages()) + encode(Requests(2, [1])),
        "no message 1",
    ),
}


@pytest.mark.parametrize("case", FRAMES)
async def test_a_malformed_frame_costs_its_connection_alone(
    raw: Raw, client: CudnnRef, logs: list[EventDict], case: str
) -> None:
    frame, reason = FRAMES[case]
    await raw.send(encode(ATTACH))
    await raw.send(frame)
    await raw.ended()
    (line,) = [line for line in logs if line["event"] == "client.malformed"]
    assert reason in line["reason"]
    assert await client.ping() == 1


async def test_messages_of_too_many_bytes_are_not_kept(raw: Raw, logs: list[EventDict]) -> None:
    """The first frame has as many bytes as may be kept."""
    loop = asyncio.get_running_loop()
    await raw.send(encode(ATTACH))
    half = bytes(KEPT_BYTES // 2)
    await loop.sock_sendall(raw.socket, encode(Requests(1, [Request(half, keep=n) for n in range(2)])))
    await loop.sock_sendall(raw.socket, encode(Requests(3, [0, 1, Request(b"1", keep=2)])))
    await raw.ended()
    assert ["too many to keep" in line["reason"] for line in logs if line["event"] == "client.malformed"] == [
        True
    ]


@pytest.mark.parametrize(
    ("frame", "reason"),
    [(encode(Withdraw(1, False)), "before Attach"), (encode(Attach(VERSION + 1, "")), "version")],
)
async def test_the_first_frame_must_attach(
    raw: Raw, logs: list[EventDict], frame: bytes, reason: str
) -> None:
    await raw.send(frame)
    await raw.ended()
    assert [reason in line["reason"] for line in logs if line["event"] == "client.malformed"] == [True]


SEGMENTS: dict[str, tuple[Callable[[], int], int, str]] = {
    "not sealed": (lambda: memory(4096, 0), 4096, "not sealed"),
    "may shrink": (lambda: memory(4096, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL), 4096, "not sealed"),
    "may be sealed": (lambda: memory(4096, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK), 4096, "not sealed"),
    "another size": (lambda: memory(4096), 8192, "another size"),
    "no memory": (lambda: os.open("/dev/null", os.O_RDONLY), 4096, "no memory"),
    "negative": (lambda: memory(4096), -1, "a segment of -1 bytes"),
}


@pytest.mark.parametrize("case", SEGMENTS)
async def test_a_segment_is_checked_before_it_is_mapped(raw: Raw, logs: list[EventDict], case: str) -> None:
    make, nbytes, reason = SEGMENTS[case]
    await raw.send(encode(ATTACH))
    descriptor = make()
    await raw.send(encode(MapSegment(0, nbytes)), (descriptor,))
    os.close(descriptor)
    await raw.ended()
    assert [reason in line["reason"] for line in logs if line["event"] == "client.malformed"] == [True]


async def test_descriptors_that_belong_to_no_frame(raw: Raw, logs: list[EventDict]) -> None:
    descriptor = memory(4096)
    await raw.send(encode(ATTACH), (descriptor, descriptor))
    os.close(descriptor)
    await raw.ended()
    assert [line["reason"] for line in logs if line["event"] == "client.malformed"] == [
        "2 descriptors came that belong to no frame"
    ]


async def test_a_frame_that_never_ends(
    raw: Raw, client: CudnnRef, logs: list[EventDict], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "_LONGEST_S", 0.0)
    await raw.send(encode(ATTACH))
    await raw.send(struct.pack("<I", 1000) + b"x")
    await raw.ended()
    assert ["completed" in line["reason"] for line in logs if line["event"] == "client.malformed"] == [True]
    assert await client.ping() == 1


async def test_a_place_outside_of_the_clients_memory_fails_its_request(raw: Raw, client: CudnnRef) -> None:
    ref = await client.upload(X)

    def placed(segment: int, offset: int, dims: tuple[int, ...] = (2, 3, 8, 8)) -> bytes:
        wire = WireArray(DType.FLOAT32, dims, Place(segment, offset))
        values = msgspec.msgpack.decode(encode_message(Upload(dst=ref, data=X)))
        return msgspec.msgpack.encode({**values, "data": wire})

    bodies = [
        placed(0, 4096),
        placed(1, 0),
        placed(0, -4),
        placed(0, 2),
        placed(0, 0, (-2, -3, 8, 8)),
        b"\xc1",
    ]
    bodies.append(placed(0, 0, (2, 3, 8, 1 << 40)))
    descriptor = memory(4096)
    await raw.send(encode(ATTACH))
    await raw.send(encode(MapSegment(0, 4096)), (descriptor,))
    os.close(descriptor)
    await raw.send(encode(Requests(1, [Request(body) for body in bodies])))
    channel = Channel(raw.socket, FROM_SERVER)
    found: list[Any] = []
    loop = asyncio.get_running_loop()
    came = asyncio.Event()
    loop.add_reader(raw.socket.fileno(), came.set)
    while len(found) < len(bodies):
        await came.wait()
        came.clear()
        for frame in channel.receive():
            found += frame.answers if isinstance(frame, Answers) else []
            assert not isinstance(frame, Attached) or frame.window
    loop.remove_reader(raw.socket.fileno())
    for answer in found:
        assert isinstance(answer, Refused)
        assert isinstance(answer.error.to_error(), MalformedMessage)


async def test_a_model_of_another_client_is_not_there(client: CudnnRef, served: ServedSocket) -> None:
    async with connect(served.path) as other:
        with pytest.raises(NotDeployed):
            await other.ask(RunModel(model=ModelRef(number=1, service=1)))


async def test_what_a_message_names_is_found_wherever_it_stands(client: CudnnRef) -> None:
    ref, model = await client.upload(X), ModelRef(number=1, service=2)
    assert references(Download(src=ref)) == (ref,)
    assert references(Free(buffer=ref)) == (ref,)
    assert references(
        RunModel(model=model, arrays={"x": np.ones(3)}, buffers={"y": ref}, into={"z": ref})
    ) == (
        model,
        ref,
        ref,
    )
