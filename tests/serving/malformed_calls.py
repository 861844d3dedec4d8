"""Messages of gRPC that are malformed or mean nothing, sent to each method, and what they did to a server."""

from __future__ import annotations

import contextlib
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from tritonclient.grpc import service_pb2

from ..patience import PATIENCE_S
from .malformed import PIECES, descriptors, resident_bytes

__all__ = ["METHODS", "CallDamage", "call_damage"]

SERVICE = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
METHODS = [each.name for each in SERVICE.methods]
NOT_OFFERED = ("CudaSharedMemory", "TraceSetting", "LogSettings")
IN_STREAM = 5
"""How many messages a stream has."""
OURS = {"OK", "INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION"}
NAMES = ["x", "x", "y", "square", "square", "1", "FP32", "FP32", "BOOL", "BYTES", "INT8", "BF16", "", "\0"]
NAMES += ["/a", "..", "é" * 9, "a" * 3000, "region"]
KEYS = ["timeout", "shared_memory_region", "shared_memory_byte_size", "shared_memory_offset", "sequence_id"]
KEYS += ["binary_data", "classification", "triton_enable_empty_final_response"]
NUMBERS = [0, 1, 1, 2, 3, 3, 4, 12, 24, 255, 1 << 31, 1 << 40, 1 << 62, (1 << 63) - 1, 1 << 64]
_WARM = 200


@dataclass
class CallDamage:
    """What so many calls did to a server.

    Parameters
    ----------
    statuses
        How often each method was answered with each status, as (method, status).
    to_blame
        What was answered with a status that is not the caller's fault, with what was sent.
    grown_bytes, grown_descriptors
        By how much the server's memory, and what it has open, have grown.
    """

    statuses: Counter[tuple[str, str]] = field(default_factory=Counter)
    to_blame: list[str] = field(default_factory=list)
    grown_bytes: int = 0
    grown_descriptors: int = 0


def call_damage(pid: int, port: int, calls: int, seed: int) -> CallDamage:
    """Send so many calls to each method. Blocks until each has been answered.

    The model `square` is loaded again after calls that may have unloaded it, and before each inference there
    is a region of shared memory.
    """
    rng, found = random.Random(seed), CallDamage()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel, shared_file() as key:
        region = service_pb2.SystemSharedMemoryRegisterRequest(name="region", key=key, byte_size=64)
        data = region.SerializeToString()
        for _ in range(_WARM // len(METHODS)):  # whatever is made once is made
            for name in METHODS:
                _call(channel, name, rng, CallDamage())
        before, opened = resident_bytes(pid), descriptors(pid)
        for _ in range(calls):
            for name in METHODS:
                if "Infer" in name:
                    _answer(channel, "SystemSharedMemoryRegister", data)  # unless it is registered already
                _call(channel, name, rng, found)
        _answer(channel, "SystemSharedMemoryUnregister", b"")
        found.grown_bytes = resident_bytes(pid) - before
        found.grown_descriptors = descriptors(pid) - opened
    return found


@contextlib.contextmanager
def shared_file() -> Iterator[str]:
    """A file of shared memory of 64 bytes, by its name."""
    path = Path(f"/dev/shm/cudnn_actor_malformed_{os.getpid()}")
    path.write_bytes(bytes(64))
    try:
        yield path.name
    finally:
        path.unlink()


def _call(channel: grpc.Channel, name: str, rng: random.Random, found: CallDamage) -> None:
    """Call a method once, and note the answer."""
    kind = SERVICE.methods_by_name[name].input_type
    if name == "ModelStreamInfer":
        sent = [malformed_message(rng, kind) for _ in range(IN_STREAM)]
        status, answers = _streamed(channel, sent)
        right = status == "OK" and answers == len(sent)  # an error is an answer, and the stream goes on
    else:
        sent = [malformed_message(rng, kind)]
        status = _answer(channel, name, sent[0])
        if name.startswith(NOT_OFFERED):
            right = status == "UNIMPLEMENTED"
        else:  # a request may have a timeout that passes
            right = status in OURS or (name == "ModelInfer" and status == "DEADLINE_EXCEEDED")
    if name == "RepositoryModelUnload":
        asked = service_pb2.RepositoryModelLoadRequest(model_name="square")
        loaded = _answer(channel, "RepositoryModelLoad", asked.SerializeToString())
        right = right and loaded == "OK"
    found.statuses[name, status] += 1
    if not right:
        found.to_blame.append(f"{name} -> {status}: {sent!r}"[:2000])


def _path(name: str) -> str:
    return f"/{SERVICE.full_name}/{name}"


def _answer(channel: grpc.Channel, name: str, data: bytes) -> str:
    """The status of a call whose message has these bytes."""
    call = channel.unary_unary(_path(name)).future(data)
    error = call.exception(PATIENCE_S)  # no deadline of the call: the server would see it
    return "OK" if error is None else str(call.code().name)


def _streamed(channel: grpc.Channel, sent: list[bytes]) -> tuple[str, int]:
    """The status of a stream with these messages, and how many answers it had."""
    stream = channel.stream_stream(_path("ModelStreamInfer"))(iter(sent), timeout=PATIENCE_S)
    answers = 0
    try:
        for _ in stream:
            answers += 1
    except grpc.RpcError:
        pass
    return str(stream.code().name), answers


def malformed_message(rng: random.Random, kind: Descriptor) -> bytes:
    """A message with odd values, or the bytes of one that are changed; sometimes a message that is right."""
    make: Callable[[], bytes] = lambda: _with_odd_values(rng, kind).SerializeToString()  # noqa: E731
    if kind.name == "ModelInferRequest" and rng.random() < 0.5:
        make = lambda: _nearly_right(rng).SerializeToString()  # noqa: E731
    data = make()
    if rng.random() < 0.5:
        return data
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(data) + 1)
        data = data[:at] + rng.choice([*PIECES, rng.randbytes(3)]) + data[at + rng.choice([0, 0, 1, 7]) :]
    return data[: rng.choice([len(data), rng.randrange(len(data) + 1)])]


def _nearly_right(rng: random.Random) -> Any:
    """An inference that is right but for some of its values."""
    asked = service_pb2.ModelInferRequest(model_name="square", raw_input_contents=[bytes(12)])
    given = asked.inputs.add(name="x", datatype="FP32", shape=[1, 3])
    for part in rng.sample([asked, given, *([asked.outputs.add(name="y")] if rng.random() < 0.5 else [])], 1):
        fields = [each for each in part.DESCRIPTOR.fields if rng.random() < 0.3]
        for each in fields:
            part.ClearField(each.name)
            _fill(rng, part, each)
    if rng.random() < 0.3:  # a place in shared memory whose size fits, however large it is
        nbytes = rng.choice([0, 3, 64, 65, 1 << 40, 1 << 62])
        del given.shape[:], asked.raw_input_contents[:]
        given.shape.append(nbytes)
        given.datatype = "INT8"
        given.parameters["shared_memory_region"].string_param = rng.choice(NAMES)
        given.parameters["shared_memory_byte_size"].int64_param = nbytes
    return asked


def _with_odd_values(rng: random.Random, kind: Descriptor) -> Any:
    message = message_factory.GetMessageClass(kind)()
    for each in kind.fields:
        if rng.random() < 0.6:
            _fill(rng, message, each)
    return message


def _fill(rng: random.Random, message: Any, each: FieldDescriptor) -> None:
    """Give a field odd values."""
    if each.message_type is not None and each.message_type.GetOptions().map_entry:
        value = each.message_type.fields_by_name["value"]
        for _ in range(rng.randrange(3)):
            entry = getattr(message, each.name)[rng.choice([*KEYS, *NAMES])]
            if value.message_type is not None:
                entry.CopyFrom(_with_odd_values(rng, value.message_type))
    elif each.is_repeated:
        getattr(message, each.name).extend(_odd_value(rng, each) for _ in range(rng.randrange(4)))
    elif each.message_type is not None:
        getattr(message, each.name).CopyFrom(_odd_value(rng, each))
    else:
        setattr(message, each.name, _odd_value(rng, each))


def _odd_value(rng: random.Random, each: FieldDescriptor) -> Any:
    if each.message_type is not None:
        return _with_odd_values(rng, each.message_type)
    if each.type == FieldDescriptor.TYPE_STRING:
        return rng.choice(NAMES)
    if each.type == FieldDescriptor.TYPE_BYTES:
        return bytes(rng.choice([0, 1, 12, 12, 24, 3000]))
    if each.type == FieldDescriptor.TYPE_BOOL:
        return rng.random() < 0.5
    if each.cpp_type in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return rng.choice([0.0, -1.5, 1e300, float("nan"), float("inf")])
    return _whole_number(rng, each)


def _whole_number(rng: random.Random, each: FieldDescriptor) -> int:
    """A number that the field can hold."""
    short = each.cpp_type in (FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_UINT32)
    signed = each.cpp_type in (FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_INT64)
    most = (1 << (32 if short else 64) - signed) - 1
    number = min(rng.choice(NUMBERS), most)
    return -number if signed and rng.random() < 0.2 else number
