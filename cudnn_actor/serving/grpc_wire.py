"""Inferences as messages of gRPC. Pure: messages in, records and messages out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cudnn_actor.actors.long_work import check_wanted
from cudnn_actor.protocol.types.dtypes import DType
from cudnn_actor.serving.failures import Refused
from cudnn_actor.serving.grpc_schema import message_class
from cudnn_actor.serving.json_numbers import PIECE
from cudnn_actor.serving.requests import (
    MOST_TENSORS,
    Inference,
    Place,
    Regions,
    RequestedOutput,
    require_once,
    timeout_of,
)
from cudnn_actor.serving.tensors import NAMES, array_of_bytes, bytes_of, checked_shape, dtype_of, nbytes_of

__all__ = ["decode", "encode", "parameters_of", "parse", "parse_inference", "stream_response"]

_CONTENTS = {
    "bool": "bool_contents",
    "int8": "int_contents",
    "int16": "int_contents",
    "int32": "int_contents",
    "int64": "int64_contents",
    "uint8": "uint_contents",
    "uint16": "uint_contents",
    "uint32": "uint_contents",
    "uint64": "uint64_contents",
    "float32": "fp32_contents",
    "float64": "fp64_contents",
}
"""The field that has a tensor's numbers if they are not sent as raw bytes."""
_Response = message_class("ModelInferResponse")
_WITH_LENGTH = 2
"""The wire type of a field whose value follows its length: a string, bytes, a message."""
_RAW_INPUT = 7 << 3 | _WITH_LENGTH
_RAW_OUTPUT = 6 << 3 | _WITH_LENGTH
_STREAMED_RESPONSE = 2 << 3 | _WITH_LENGTH
"""The first bytes of `raw_input_contents`, `raw_output_contents` and `infer_response` in their messages."""
MOST_FIELDS = 4 * MOST_TENSORS
"""How many fields of a request are read here; protobuf reads the rest."""


def parse(name: str, data: bytes) -> Any:
    """Parse bytes as a message of this name. Raises `Refused`."""
    try:
        return message_class(name).FromString(data)
    except Exception as error:
        raise Refused(problem=f"these bytes are no {name}", fix="send the protocol's message") from error


def parse_inference(data: bytes) -> tuple[Any, list[memoryview], int]:
    """Parse a `ModelInferRequest`. Returns it without its raw contents, these contents, and the bytes of the
    rest.

    The contents are views of `data`: protobuf would copy them twice, into its message and out of it. Raises
    `Refused`.
    """
    rest, raw = _without_raw(data)
    request = parse("ModelInferRequest", rest)
    raw += map(memoryview, request.raw_input_contents)
    return request, raw, len(rest)


def _without_raw(data: bytes) -> tuple[bytes, list[memoryview]]:
    """The bytes of a request without its raw contents, and these contents.

    Each field of a request is a byte, a length and a value. From the first field on that is not, everything
    is left to protobuf, which takes it or refuses it. The same goes for everything after `MOST_FIELDS`
    fields, since reading a field takes a microsecond.
    """
    view, rest = memoryview(data), []
    raw: list[memoryview] = []
    at = 0
    for _ in range(MOST_FIELDS):
        begin, end = _value_at(data, at)
        if end is None:
            break
        if data[at] == _RAW_INPUT:
            raw.append(view[begin:end])
        else:
            rest.append(view[at:end])
        at = end
    return b"".join([*rest, view[at:]]), raw


def _value_at(data: bytes, at: int) -> tuple[int, int | None]:
    """The begin and the end of the value of the field at `at`. The end is None if a request has no such
    field."""
    size = 0
    if data[at : at + 1] and data[at] & 0x87 == _WITH_LENGTH:  # its number is below 16
        for place in range(at + 1, min(at + 5, len(data))):
            size |= (data[place] & 0x7F) << 7 * (place - at - 1)
            if data[place] < 0x80:
                end = place + 1 + size
                return place + 1, end if end <= len(data) else None
    return at, None


def parameters_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters by name, each as a value of Python; those without a value are left out."""
    chosen = {name: each.WhichOneof("parameter_choice") for name, each in given.items()}
    return {name: getattr(given[name], field) for name, field in chosen.items() if field is not None}


def decode(request: Any, raw: Sequence[memoryview], regions: Regions) -> Inference:
    """The inference that a request asks for. `request` and `raw` are from `parse_inference`. The arrays are
    views of `raw`.

    Raises `Refused`.
    """
    require_once("input", [each.name for each in request.inputs])
    inputs: dict[str, np.ndarray] = {}
    taken = 0
    for each in request.inputs:
        dtype, shape = dtype_of(each.name, each.datatype), checked_shape(each.name, each.shape)
        place = Place.of(parameters_of(each.parameters))
        if place is not None:
            inputs[each.name] = regions.read(place, dtype, shape)
        elif not raw:
            inputs[each.name] = _contents(each, dtype, shape)
        else:
            if taken == len(raw):
                raise Refused(problem=f"input {each.name[:100]!r} has no data", fix="send raw_input_contents")
            inputs[each.name] = array_of_bytes(each.name, dtype, shape, raw[taken])
            taken += 1
    if taken < len(raw):
        raise Refused(problem=f"there are {len(raw):,} raw_input_contents", fix="give one for each input")
    require_once("output", [each.name for each in request.outputs])
    asked = [
        RequestedOutput.of(each.name, parameters_of(each.parameters), binary=True) for each in request.outputs
    ]
    return Inference(
        inputs=inputs,
        outputs=tuple(asked) or None,
        id=request.id,
        timeout_s=timeout_of(parameters_of(request.parameters)),
        binary=True,
    )


def _contents(tensor: Any, dtype: DType, shape: tuple[int, ...]) -> np.ndarray:
    """An input whose numbers are in the message itself."""
    field = _CONTENTS.get(dtype)
    given = [] if field is None else getattr(tensor.contents, field)
    if len(given) * dtype.itemsize != nbytes_of(dtype, shape):
        raise Refused(
            problem=f"the data of input {tensor.name[:100]!r} do not have the shape {list(shape)}",
            fix="send raw_input_contents"
            if field is None
            else f"give as many {field}, or raw_input_contents",
        )
    flat = np.empty(len(given), dtype.numpy)
    try:
        for begin in range(0, len(given), PIECE):  # so that other threads can run between two pieces
            check_wanted()
            flat[begin : begin + PIECE] = np.array(given[begin : begin + PIECE], dtype.numpy)
        return flat.reshape(shape)
    except (OverflowError, ValueError) as error:
        raise Refused(
            problem=f"the data of input {tensor.name[:100]!r} are no {NAMES[dtype]}", fix="send numbers of it"
        ) from error


def encode(
    model: str, version: str, inference: Inference, results: Mapping[str, np.ndarray], regions: Regions
) -> bytes:
    """The `ModelInferResponse` with these outputs. Outputs for shared memory are written there.

    Raises `Refused`.
    """
    answer = _Response(model_name=model, model_version=version, id=inference.id)
    raw: list[bytes | memoryview] = []
    for wanted in inference.outputs_to_send(results):
        array = results[wanted.name]
        said = answer.outputs.add(
            name=wanted.name, datatype=NAMES[DType(array.dtype.name)], shape=array.shape
        )
        if wanted.place is None:
            raw += _begin_field(_RAW_OUTPUT, array.nbytes), bytes_of(array)
            continue
        regions.write(wanted.place, array)
        said.parameters["shared_memory_region"].string_param = wanted.place.region
        said.parameters["shared_memory_offset"].int64_param = wanted.place.offset
        said.parameters["shared_memory_byte_size"].int64_param = array.nbytes
    return b"".join([answer.SerializeToString(), *raw])


def stream_response(response: bytes, *, last: bool) -> bytes:
    """A `ModelStreamInferResponse` with a response. `last`: whether it says that no other response
    follows."""
    said = _Response()
    if last:
        said.parameters["triton_final_response"].bool_param = True
    more = said.SerializeToString()  # behind the response's own fields it is a part of it
    return b"".join([_begin_field(_STREAMED_RESPONSE, len(response) + len(more)), response, more])


def _begin_field(first: int, nbytes: int) -> bytes:
    """The first bytes of a field whose value has `nbytes` bytes: its key and its length."""
    begun = bytearray([first])
    while nbytes >= 0x80:
        begun.append(nbytes & 0x7F | 0x80)
        nbytes >>= 7
    begun.append(nbytes)
    return bytes(begun)
