"""Inferences on the wire, without a server: what is well formed comes back, and all else is refused."""

from __future__ import annotations

import os
import tracemalloc
import zlib
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from cudnn_actor.protocol.types.dtypes import DType
from cudnn_actor.serving import grpc_wire, http_wire, json_numbers
from cudnn_actor.serving.failures import Refused, TooLarge
from cudnn_actor.serving.grpc_schema import message_class
from cudnn_actor.serving.json_numbers import array_of_json, json_of_array
from cudnn_actor.serving.regions import SharedMemory
from cudnn_actor.serving.requests import Inference, RequestedOutput
from cudnn_actor.serving.tensors import NAMES, bytes_of

EXAMPLES = int(os.environ.get("SERVING_EXAMPLES", "100"))
NONE = SharedMemory(offered=False)


@st.composite
def tensors(draw: st.DrawFn) -> np.ndarray:
    dtype = draw(st.sampled_from(list(NAMES)))
    shape = draw(arrays.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))
    size = int(np.prod(shape)) * dtype.itemsize
    raw = np.frombuffer(draw(st.binary(min_size=size, max_size=size)), np.uint8)
    return raw % 2 == 1 if dtype is DType.BOOL and not raw.shape[0] else _viewed(raw, dtype, shape)


def _viewed(raw: np.ndarray, dtype: DType, shape: tuple[int, ...]) -> np.ndarray:
    whole = raw % 2 if dtype is DType.BOOL else raw
    return np.ndarray(shape, dtype.numpy, whole.tobytes())


def http_request(named: dict[str, np.ndarray], **more: Any) -> tuple[bytes, int]:
    inputs = [
        {
            "name": name,
            "datatype": NAMES[DType(each.dtype.name)],
            "shape": each.shape,
            "parameters": {"binary_data_size": each.nbytes},
        }
        for name, each in named.items()
    ]
    head = msgspec.json.encode({"inputs": inputs, **more})
    return b"".join([head, *map(bytes_of, named.values())]), len(head)


def grpc_request(named: dict[str, np.ndarray]) -> Any:
    request = message_class("ModelInferRequest")(model_name="m", id="7")
    for name, each in named.items():
        request.inputs.add(name=name, datatype=NAMES[DType(each.dtype.name)], shape=each.shape)
        request.raw_input_contents.append(bytes(bytes_of(each)))
    return request


def over_grpc_wire(message: bytes) -> Inference:
    request, raw, _ = grpc_wire.parse_inference(message)
    return grpc_wire.decode(request, raw, NONE)


def same(found: np.ndarray, wanted: np.ndarray) -> bool:
    return (found.dtype, found.shape, found.tobytes()) == (wanted.dtype, wanted.shape, wanted.tobytes())


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.dictionaries(st.text(max_size=5), tensors(), max_size=3))
def test_arrays_come_back_from_both_wires_as_they_were(named: dict[str, np.ndarray]) -> None:
    over_http = http_wire.decode(*http_request(named, id="7"), NONE)
    over_grpc = over_grpc_wire(grpc_request(named).SerializeToString())
    for inference in (over_http, over_grpc):
        assert inference.id == "7"
        assert inference.inputs.keys() == named.keys()
        assert all(same(inference.inputs[name], each) for name, each in named.items())
    asked = Inference(inputs={}, outputs=tuple(RequestedOutput(name, binary=True) for name in named))
    parts, head = http_wire.encode("m", "1", asked, named, NONE)
    assert b"".join(parts[1:]) == b"".join(map(bytes_of, named.values()))
    assert head == (len(parts[0]) if named else None)
    written = grpc_wire.encode("m", "1", asked, named, NONE)
    response = message_class("ModelInferResponse").FromString(written)
    assert [each.name for each in response.outputs] == list(named)
    assert list(response.raw_output_contents) == [bytes(bytes_of(each)) for each in named.values()]
    for last in (False, True):
        piece = message_class("ModelStreamInferResponse").FromString(
            grpc_wire.stream_response(written, last=last)
        )
        assert ("triton_final_response" in piece.infer_response.parameters) == last
        piece.infer_response.ClearField("parameters")
        assert piece.infer_response == response


def mutated(data: bytes, places: list[tuple[int, bytes]]) -> bytes:
    """Bytes with others put over them, or in between where a piece begins with an even byte."""
    for at, piece in places:
        place = at % (len(data) + 1)
        skip = len(piece) if piece and piece[0] % 2 else 0
        data = data[:place] + piece + data[place + skip :]
    return data


HTTP_BYTES, HTTP_HEAD = http_request(
    {"x": np.ones((2, 3), np.float32), "b": np.ones(2, np.bool_)}, outputs=[]
)
GRPC_BYTES = grpc_request({"x": np.ones((2, 3), np.float32)}).SerializeToString()
PLACES = st.lists(st.tuples(st.integers(0, 400), st.binary(max_size=6)), max_size=4)


@settings(max_examples=EXAMPLES, deadline=None)
@given(PLACES, st.none() | st.text(max_size=4) | st.integers(0, 400).map(str))
def test_bytes_that_are_no_request_are_refused(places: list[tuple[int, bytes]], header: str | None) -> None:
    body = mutated(HTTP_BYTES, places)
    message = mutated(GRPC_BYTES, places)
    decoders: list[Callable[[], Inference]] = [
        lambda: http_wire.decode(body, http_wire.header_length(header or str(HTTP_HEAD), len(body)), NONE),
        lambda: over_grpc_wire(message),
    ]
    for decode in decoders:
        try:
            found = decode()
        except Refused:
            continue
        assert sum(each.nbytes for each in found.inputs.values()) <= 8 * (len(body) + len(message))


def fields_of(message: bytes) -> tuple[Any, list[bytes]] | None:
    """A request's small fields, and its raw contents, as protobuf reads them; None if it is none."""
    try:
        whole = message_class("ModelInferRequest").FromString(message)
    except DecodeError:
        return None
    raw = list(whole.raw_input_contents)
    whole.ClearField("raw_input_contents")
    return whole, raw


@settings(max_examples=EXAMPLES, deadline=None)
@given(PLACES, st.booleans())
def test_a_request_over_grpc_has_the_fields_that_protobuf_reads(
    places: list[tuple[int, bytes]], large: bool
) -> None:
    values = np.ones((2, 300 if large else 3), np.float32)  # a length of two bytes, or of one
    agree_on(mutated(grpc_request({"x": values, "y": values}).SerializeToString(), places))


def test_a_request_over_grpc_that_is_cut_off_is_refused_where_protobuf_refuses_it() -> None:
    message = grpc_request({"x": np.ones((2, 20), np.float32)}).SerializeToString()
    for end in range(len(message)):
        agree_on(message[:end])
    agree_on(b"\x3a\x81" + b"\x80" * 10 + b"\0a")


def test_what_follows_many_fields_is_left_to_protobuf() -> None:
    _, raw, nbytes = grpc_wire.parse_inference(b"\x3a\0" * (grpc_wire.MOST_FIELDS + 9))
    assert (len(raw), nbytes) == (grpc_wire.MOST_FIELDS + 9, 9 * 2)


def agree_on(message: bytes) -> None:
    """Assert that a message is read as protobuf reads it."""
    wanted = fields_of(message)
    try:
        request, raw, nbytes = grpc_wire.parse_inference(message)
    except Refused:
        assert wanted is None
        return
    assert wanted is not None
    assert [bytes(each) for each in raw] == wanted[1]
    request.ClearField("raw_input_contents")
    ours, theirs = (each.SerializeToString(deterministic=True) for each in (request, wanted[0]))
    assert ours == theirs  # of the messages, a NaN is unlike itself
    assert nbytes <= len(message)


@pytest.mark.parametrize(
    "more",
    [
        b"\x80\x01\x05",  # a number, 16
        b"\x4d\0\0\0\0",  # a fixed32
        b"\x43\x44",  # a group
        b"\x9a\x06\x08aaaaa\x3a\x01b",  # a string, 99; from its second byte on it looks like raw contents
        b"\x4a\x82\x80\x80\x80\x00ab",  # a length of five bytes
        b"\x4a\x00" * 5000,  # many
    ],
)
def test_fields_that_a_request_does_not_have_are_skipped(more: bytes) -> None:
    values = np.ones((2, 3), np.float32)
    message = grpc_request({"x": values}).SerializeToString()
    assert same(over_grpc_wire(more + message).inputs["x"], values)
    assert same(over_grpc_wire(message + more).inputs["x"], values)


def test_raw_contents_of_grpc_are_not_copied() -> None:
    message = grpc_request({"x": np.ones((2, 3), np.float32)}).SerializeToString()
    found = over_grpc_wire(message).inputs["x"]
    assert np.shares_memory(found, np.frombuffer(message, np.uint8))


def refusal(head: bytes) -> str:
    with pytest.raises(Refused) as refused:
        http_wire.decode(head, len(head), NONE)
    return str(refused.value)


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        ('"datatype":"BYTES","shape":[1],"data":["a"]', "numbers only"),
        ('"datatype":"FP8","shape":[1],"data":[1]', "use one of BOOL"),
        ('"datatype":"FP32","shape":[4611686018427387904,4],"data":[1]', "do not have the shape"),
        ('"datatype":"FP32","shape":[-1],"data":[1]', "out of range"),
        ('"datatype":"FP32","shape":[100000000000000000000],"data":[1]', "out of range"),
        ('"datatype":"FP32","shape":[2,2],"data":[[1,2],[3]]', "do not have the shape"),
        ('"datatype":"FP32","shape":[2,2],"data":[[1],[2],[3],[4]]', "do not have the shape"),
        ('"datatype":"UINT8","shape":[1],"data":[256]', "not a list of UINT8"),
        ('"datatype":"INT8","shape":[1],"data":[1.5]', "not a list of INT8"),
        ('"datatype":"BOOL","shape":[1],"data":[1]', "not a list of BOOL"),
        ('"datatype":"FP32","shape":[1]', "do not have the shape"),
        ('"datatype":"FP32","shape":[2],"parameters":{"binary_data_size":4}', "0 bytes are left"),
        ('"datatype":"FP32","shape":[0,9223372036854775807,2],"data":[]', "do not have the shape"),
        (f'"datatype":"FP32","shape":[1],"data":{"[" * 5000}1{"]" * 5000}', "not the JSON"),
        ('"datatype":"FP32","shape":[1],"parameters":{"shared_memory_region":"a"}', "not complete"),
        (
            '"datatype":"FP32","shape":[1],"parameters":{"shared_memory_region":"a","shared_memory_byte_size":4}',
            "not registered",
        ),
    ],
)
def test_a_wrong_tensor_is_refused_with_what_is_wrong(tensor: str, text: str) -> None:
    assert text in refusal(f'{{"inputs":[{{"name":"x",{tensor}}}]}}'.encode())


def test_numbers_in_json_are_read_flat_and_nested() -> None:
    for data in (b"[1, 2.5, 3, 4]", b"[[1, 2.5], [3, 4]]"):
        found = array_of_json("x", DType.BFLOAT16, (2, 2), data)
        np.testing.assert_array_equal(found.astype(np.float32), [[1, 2.5], [3, 4]])
    assert array_of_json("x", DType.FLOAT32, (), b"[3]").shape == ()
    assert array_of_json("x", DType.UINT64, (1,), b"[18446744073709551615]")[0] == 2**64 - 1


def test_long_lists_are_read_and_written_by_pieces_as_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.arange(60, dtype=np.float32).reshape(3, 4, 5) / 8
    for piece in (1, 7, 64):
        monkeypatch.setattr(json_numbers, "PIECE", piece)
        written = bytes(json_of_array(values))
        assert msgspec.json.decode(written) == values.ravel().tolist()
        for data in (written, msgspec.json.encode(values.tolist()), b" [ 1.5 , 2 , 3 ] "):
            shape = values.shape if len(data) > 20 else (3,)
            wanted = values if len(data) > 20 else np.array([1.5, 2, 3])
            np.testing.assert_array_equal(array_of_json("x", DType.FLOAT32, shape, data), wanted)
        for wrong in (b"[[1,2],[3,4],[5,6]]", b"[[1,2,3,4,5,6]]", b"[1,2,3,4,5]", b'[[1,2,3],[4,5,"6"]]'):
            with pytest.raises(Refused):
                array_of_json("x", DType.FLOAT32, (2, 3), wrong)


def test_typed_contents_of_grpc_are_read_by_pieces_as_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_wire, "PIECE", 7)
    values = np.arange(60, dtype=np.float32).reshape(3, 20)
    request = message_class("ModelInferRequest")(model_name="m")
    given = request.inputs.add(name="x", datatype="FP32", shape=values.shape)
    given.contents.fp32_contents.extend(values.ravel().tolist())
    np.testing.assert_array_equal(grpc_wire.decode(request, [], NONE).inputs["x"], values)


@pytest.mark.parametrize(("shape", "data"), [((0, 3), b"[]"), ((2, 0), b"[[],[]]"), ((1 << 60, 0), b"[]")])
def test_lists_without_numbers_have_any_shape_without_elements(shape: tuple[int, ...], data: bytes) -> None:
    assert array_of_json("x", DType.FLOAT32, shape, data).shape == shape
    with pytest.raises(Refused, match="do not have the shape"):
        array_of_json("x", DType.FLOAT32, shape, b"[[[]]]")


def test_a_byte_that_is_no_truth_value_becomes_one() -> None:
    head = b'{"inputs":[{"name":"x","datatype":"BOOL","shape":[3],"parameters":{"binary_data_size":3}}]}'
    found = http_wire.decode(head + b"\x00\x01\x07", len(head), NONE).inputs["x"]
    assert found.view(np.uint8).tolist() == [0, 1, 1]


def test_bytes_that_belong_to_no_tensor_are_refused() -> None:
    body, head = http_request({"x": np.ones(2, np.float32)})
    with pytest.raises(Refused, match="3 bytes follow the last tensor"):
        http_wire.decode(body + b"abc", head, NONE)
    request = grpc_request({"x": np.ones(2, np.float32)})
    request.raw_input_contents.append(b"abc")
    with pytest.raises(Refused, match="one for each input"):
        over_grpc_wire(request.SerializeToString())


def test_a_body_that_grows_when_it_is_decompressed_takes_no_memory() -> None:
    bomb = zlib.compress(bytes(16 << 20))
    tracemalloc.start()
    try:
        with pytest.raises(TooLarge):
            http_wire.decompress(bomb, "deflate", 1000)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_what_grows_when_it_is_decompressed_is_bounded() -> None:
    with pytest.raises(TooLarge):
        http_wire.decompress(zlib.compress(bytes(1 << 20)), "deflate", 1000)
    with pytest.raises(Refused, match="ends before"):
        http_wire.decompress(zlib.compress(bytes(1000))[:-5], "deflate", 1000)
    assert http_wire.decompress(zlib.compress(bytes(1000)), "deflate", 1000) == bytes(1000)


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"timeout": -1}, "timeout"),
        ({"timeout": "1"}, "timeout"),
        ({"timeout": True}, "timeout"),
        ({"sequence_id": 3}, "sequence_id"),
        ({"binary_data_output": 1}, "binary_data_output"),
    ],
)
def test_wrong_parameters_are_refused(parameters: dict[str, Any], text: str) -> None:
    body, head = http_request({}, parameters=parameters, outputs=[])
    with pytest.raises(Refused, match=text):
        http_wire.decode(body, head, NONE)
    assert (
        http_wire.decode(*http_request({}, parameters={"timeout": 2000, "priority": 9}), NONE).timeout_s
        == 2e-3
    )
