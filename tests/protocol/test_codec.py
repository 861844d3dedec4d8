"""Messages and replies as bytes."""

from __future__ import annotations

import typing

import hypothesis.strategies as st
import ml_dtypes
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings

from cudnn_actor.protocol import (
    Allocate,
    BufferRef,
    ConvFwd,
    ConvSpec,
    DeployModel,
    DeviceArray,
    Drain,
    DType,
    ErrorRecord,
    Fill,
    MalformedMessage,
    ModelGraph,
    Ping,
    RunModel,
    TensorSpec,
    UnloadModel,
    Upload,
    View,
    WarmModel,
    WriteWeights,
    decode_message,
    decode_reply,
    encode_message,
    encode_reply,
)
from cudnn_actor.protocol.messages.messages import Travelling

from ..in_one_test import cases_in_one_test
from ..whole import WHOLE, more
from .protocol_strategies import MESSAGES, arrays, messages, refs, replies

KINDS = {typing.get_origin(kind) or kind for kind in typing.get_args(Travelling)}
"""The classes of all messages that travel."""
SPEC = TensorSpec.packed((2, 3))
REF = BufferRef(slot=1, generation=1 << 32 | 1, spec=SPEC, device="cpu")


_WITH_ARRAYS = (
    Allocate,
    Upload,
    ModelGraph,
    DeployModel,
    WarmModel,
    RunModel,
    WriteWeights,
    UnloadModel,
)


def same(one: object, other: object) -> bool:
    """Equality that looks into arrays, by their bytes, and into the messages that compare by identity."""
    if isinstance(one, np.ndarray):
        return (
            isinstance(other, np.ndarray)
            and (one.dtype, one.shape) == (other.dtype, other.shape)
            and one.tobytes() == other.tobytes()
        )
    if isinstance(one, _WITH_ARRAYS):
        fields = one.__struct_fields__
        return type(one) is type(other) and all(same(getattr(one, n), getattr(other, n)) for n in fields)
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    return type(one) is type(other) and one == other


def test_there_is_a_strategy_for_every_message() -> None:
    assert MESSAGES.keys() == KINDS


@pytest.mark.parametrize("kind", MESSAGES, ids=[kind.__name__ for kind in MESSAGES])
@settings(max_examples=30 if WHOLE else 3)
@given(st.data())
def test_every_message_round_trips(kind: type, data: st.DataObject) -> None:
    message = data.draw(MESSAGES[kind])
    frame = encode_message(message)
    assert same(message, decode_message(frame))
    assert same(message, decode_message(memoryview(frame)))


@given(replies)
def test_every_reply_round_trips(reply: object) -> None:
    assert same(reply, decode_reply(encode_reply(reply)))


_NUMBERS = st.lists(st.integers(0, 9)).map(tuple)


@given(
    st.dictionaries(
        st.text(), st.text() | st.integers(-(2**63), 2**64 - 1) | st.booleans() | st.none() | _NUMBERS
    )
)
def test_every_error_record_round_trips(
    facts: dict[str, str | int | float | bool | tuple[int, ...] | None],
) -> None:
    record = ErrorRecord(kind="MailboxFull", facts=facts)
    assert decode_reply(encode_reply(record)) == record


def must_decode_or_be_malformed(frame: bytes) -> None:
    for decode in (decode_message, decode_reply):
        try:
            decode(frame)
        except MalformedMessage:
            continue


@given(messages | replies, st.data())
def test_a_truncated_frame_is_malformed(thing: object, data: st.DataObject) -> None:
    is_message = type(thing) in KINDS
    frame = encode_message(thing) if is_message else encode_reply(thing)  # type: ignore[arg-type]
    cut = frame[: data.draw(st.integers(0, len(frame) - 1))]
    with pytest.raises(MalformedMessage):
        (decode_message if is_message else decode_reply)(cut)


@settings(max_examples=more(300))
@given(messages | replies, st.data())
def test_a_flipped_bit_gives_a_message_or_malformed_and_nothing_else(
    thing: object, data: st.DataObject
) -> None:
    is_message = type(thing) in KINDS
    frame = bytearray(encode_message(thing) if is_message else encode_reply(thing))  # type: ignore[arg-type]
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(frame) - 1))
        frame[at] ^= 1 << data.draw(st.integers(0, 7))
    must_decode_or_be_malformed(bytes(frame))


@settings(max_examples=more(300))
@given(st.binary(max_size=200))
def test_random_bytes_give_a_message_or_malformed_and_nothing_else(frame: bytes) -> None:
    must_decode_or_be_malformed(frame)


@pytest.mark.parametrize("depth", [100, 10_000, 1_000_000])
def test_deep_nesting_is_malformed(depth: int) -> None:
    must_decode_or_be_malformed(b"\x91" * depth)
    must_decode_or_be_malformed(b"\x92\xa3int" + b"\x91" * depth)


def packed(value: object) -> bytes:
    return msgspec.msgpack.encode(value)


@pytest.mark.parametrize(
    "fields",
    [
        {"type": "Ping", "extra": 1},
        {"type": "Pong"},
        {},
        {"type": "Fill", "dst": 1, "value": 1.0},
        {"type": "Fill", "value": 1.0},
    ],
)
def test_unknown_and_missing_fields_are_malformed(fields: dict[str, object]) -> None:
    with pytest.raises(MalformedMessage):
        decode_message(packed(fields))


def test_unknown_fields_inside_a_reference_are_malformed() -> None:
    fields = msgspec.to_builtins(Fill(dst=REF, value=1.0))
    assert decode_message(packed(fields)) == Fill(dst=REF, value=1.0)
    fields["dst"]["spec"]["offset"] = 0
    with pytest.raises(MalformedMessage, match="offset"):
        decode_message(packed(fields))


def test_values_are_not_converted() -> None:
    fields = msgspec.to_builtins(Fill(dst=REF, value=1.0))
    fields["dst"]["slot"] = "1"
    with pytest.raises(MalformedMessage):
        decode_message(packed(fields))


def test_a_spec_that_cannot_be_is_malformed() -> None:
    fields = msgspec.to_builtins(Fill(dst=REF, value=1.0))
    fields["dst"]["spec"]["dims"] = [2, -3]
    with pytest.raises(MalformedMessage, match="at least 0"):
        decode_message(packed(fields))


@cases_in_one_test
@pytest.mark.parametrize(
    "dims",
    [
        (2**40,),
        (2**63,),
        (2**64 - 1,),
        (-1,),
        (-1, -6),
        (0, 2**63),
        (2**32, 2**32),
        (1,) * 100,
        (7,),
        (5,),
    ],
)
def test_dims_that_are_not_those_of_the_data_are_malformed(dims: tuple[int, ...]) -> None:
    body = ["int8", dims, b"123456"]
    with pytest.raises(MalformedMessage):
        decode_reply(packed(["array", body]))
    fields = {"type": "Upload", "dst": msgspec.to_builtins(REF), "data": body}
    with pytest.raises(MalformedMessage):
        decode_message(packed(fields))


@pytest.mark.parametrize("head", [b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff"])
def test_a_length_that_the_frame_does_not_hold_is_malformed(head: bytes) -> None:
    for frame in (head, b"\x92\xa5array\x93\xa4int8" + head, b"\x92\xa5array\x93\xa4int8\x91\x01" + head):
        with pytest.raises(MalformedMessage):
            decode_reply(frame)


@pytest.mark.parametrize(
    "body", [["object", [1], b"12345678"], ["int8", [1]], ["int8", [1], b"1", 1], {}, None]
)
def test_what_is_no_array_is_malformed(body: object) -> None:
    with pytest.raises(MalformedMessage):
        decode_reply(packed(["array", body]))


@given(arrays())
def test_an_array_arrives_c_contiguous(array: np.ndarray) -> None:
    arrived = decode_reply(encode_reply(array))
    assert isinstance(arrived, np.ndarray)
    assert arrived.flags.c_contiguous


def test_bfloat16_travels_bit_by_bit() -> None:
    array = np.array([1.5, -0.0, np.nan], ml_dtypes.bfloat16)
    arrived = decode_reply(encode_reply(array))
    assert isinstance(arrived, np.ndarray)
    assert arrived.dtype == DType.BFLOAT16.numpy
    assert arrived.tobytes() == array.tobytes()


@pytest.mark.parametrize("dtype", [object, "U3", "c8", "m8", ">f4"])
def test_arrays_of_other_types_do_not_travel(dtype: str) -> None:
    with pytest.raises(TypeError, match="cannot be encoded"):
        encode_message(Upload(dst=REF, data=np.zeros(3, dtype)))
    with pytest.raises(TypeError, match="cannot be encoded"):
        encode_reply(np.zeros(3, dtype))


def test_what_means_something_in_this_process_only_does_not_travel() -> None:
    on_device = DeviceArray(dims=(2, 3), dtype=DType.FLOAT32, device="cuda:0", array=object())
    for message in (Upload(dst=REF, data=on_device), Allocate(spec=SPEC, data=on_device)):
        with pytest.raises(TypeError, match="cannot be encoded; copy them to the host"):
            encode_message(message)
    with pytest.raises(TypeError, match="cannot be encoded"):
        encode_message(View(buffer=REF))
    with pytest.raises(MalformedMessage):
        decode_message(packed({"type": "View", "buffer": msgspec.to_builtins(REF)}))


@pytest.mark.parametrize("reply", ["text", 1.5, True, [], object(), {"a": 1}, Ping()])
def test_what_is_no_reply_is_a_type_error(reply: object) -> None:
    with pytest.raises(TypeError, match="is not a reply"):
        encode_reply(reply)


def test_an_unknown_kind_of_reply_is_malformed() -> None:
    with pytest.raises(MalformedMessage, match="unknown kind"):
        decode_reply(packed(["secret", None]))


@pytest.mark.parametrize("value", [np.float32(0.5), np.float64(0.5), np.float16(0.5)])
def test_numpys_numbers_travel_as_numbers(value: float) -> None:
    assert decode_message(encode_message(Fill(dst=REF, value=value))) == Fill(dst=REF, value=0.5)


@pytest.mark.parametrize("value", [object(), 2**70, 1j])
def test_what_is_no_number_does_not_travel(value: float) -> None:
    with pytest.raises(TypeError):
        encode_message(Fill(dst=REF, value=value))


@given(refs)
def test_references_are_equal_and_hash_alike_after_the_wire(ref: BufferRef) -> None:
    arrived = decode_reply(encode_reply(ref))
    assert arrived == ref
    assert hash(arrived) == hash(ref)


def test_defaults_need_not_be_on_the_wire() -> None:
    conv = ConvSpec.symmetric(1)
    fields = msgspec.to_builtins(ConvFwd(x=REF, w=REF, y=REF, conv=conv))
    for name in ("bias", "epilogue", "alpha", "beta", "numerics"):
        del fields[name]
    assert decode_message(packed(fields)) == ConvFwd(x=REF, w=REF, y=REF, conv=conv)
    assert decode_message(packed({"type": "Drain"})) == Drain()
