"""Inferences as HTTP bodies: JSON, followed by the raw bytes of tensors (the binary tensor extension).

Pure: bytes in, records and bytes out.
https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_binary_data.md
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from cudnn_actor.protocol.types.dtypes import DType
from cudnn_actor.serving.failures import Refused, TooLarge
from cudnn_actor.serving.json_numbers import array_of_json, json_of_array
from cudnn_actor.serving.requests import (
    Inference,
    Place,
    Regions,
    RequestedOutput,
    require_once,
    timeout_of,
)
from cudnn_actor.serving.tensors import (
    NAMES,
    array_of_bytes,
    bytes_of,
    checked_shape,
    dtype_of,
)

__all__ = ["HEADER_LENGTH", "compress", "decode", "decompress", "encode", "header_length"]

HEADER_LENGTH = "Inference-Header-Content-Length"
"""The header that says how many bytes of JSON a body begins with. Tensors follow."""
MOST_JSON = 8 << 20
"""The most bytes of JSON in a request: parsed, they take several times as many."""
_WINDOWS = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}


class _Tensor(msgspec.Struct):
    name: str
    datatype: str
    shape: list[int]
    parameters: dict[str, Any] = {}
    data: msgspec.Raw = msgspec.Raw()


class _Output(msgspec.Struct):
    name: str
    parameters: dict[str, Any] = {}


class _Request(msgspec.Struct):
    inputs: list[_Tensor]
    outputs: list[_Output] | None = None
    id: str = ""
    parameters: dict[str, Any] = {}


_decoder = msgspec.json.Decoder(_Request)


def header_length(header: str | None, body: int) -> int:
    """How many bytes of JSON a body of `body` bytes begins with, according to the header; `body` without a
    header. Raises `Refused`."""
    if header is None:
        return body
    if not (header.isascii() and header.isdigit() and len(header) < 20 and int(header) <= body):
        raise Refused(
            problem=f"{HEADER_LENGTH} is {header[:40]!r}, and the body has {body:,} bytes",
            fix="give how many of them are JSON",
        )
    return int(header)


def decode(body: bytes, json_bytes: int, regions: Regions) -> Inference:
    """The inference that a body asks for. Its arrays are views of the body. Raises `Refused`."""
    if json_bytes > MOST_JSON:
        raise TooLarge(
            problem=f"the request has {json_bytes:,} bytes of JSON, and {MOST_JSON:,} are taken",
            fix="send tensors as raw bytes (the binary tensor extension)",
        )
    view = memoryview(body)
    try:
        request = _decoder.decode(view[:json_bytes])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refused(
            problem=f"the request is not the JSON of an inference: {str(error)[:200]}",
            fix="see the Open Inference Protocol",
        ) from error
    require_once("input", [each.name for each in request.inputs])
    inputs, end = {}, json_bytes
    for each in request.inputs:
        size = each.parameters.get("binary_data_size")
        if size is None:
            inputs[each.name] = _array(each, regions)
            continue
        if type(size) is not int or not 0 <= size <= len(body) - end:
            raise Refused(
                problem=f"binary_data_size of input {each.name[:100]!r} is {str(size)[:40]}, and "
                f"{len(body) - end:,} bytes are left",
                fix="give its bytes, and send them behind the JSON",
            )
        dtype, shape = dtype_of(each.name, each.datatype), checked_shape(each.name, each.shape)
        inputs[each.name] = array_of_bytes(each.name, dtype, shape, view[end : end + size])
        end += size
    if end < len(body):
        raise Refused(
            problem=f"{len(body) - end:,} bytes follow the last tensor",
            fix="say which input they are: binary_data_size",
        )
    return Inference(
        inputs=inputs,
        outputs=_outputs(request),
        id=request.id,
        timeout_s=timeout_of(request.parameters),
        binary=_binary(request),
    )


def _array(tensor: _Tensor, regions: Regions) -> np.ndarray:
    """An input that is in the JSON, or in shared memory."""
    dtype, shape = dtype_of(tensor.name, tensor.datatype), checked_shape(tensor.name, tensor.shape)
    place = Place.of(tensor.parameters)
    if place is not None:
        return regions.read(place, dtype, shape)
    return array_of_json(tensor.name, dtype, shape, bytes(tensor.data))


def _binary(request: _Request) -> bool:
    binary = request.parameters.get("binary_data_output", False)
    if not isinstance(binary, bool):
        raise Refused(problem="binary_data_output is no truth value", fix="use true or false")
    return binary


def _outputs(request: _Request) -> tuple[RequestedOutput, ...] | None:
    if not request.outputs:  # an empty list means all outputs
        return None
    require_once("output", [each.name for each in request.outputs])
    binary = _binary(request)
    return tuple(RequestedOutput.of(each.name, each.parameters, binary=binary) for each in request.outputs)


def encode(
    model: str, version: str, inference: Inference, results: Mapping[str, np.ndarray], regions: Regions
) -> tuple[list[bytes | memoryview], int | None]:
    """The answer's body in parts, and how many bytes of JSON it begins with; None if it is JSON alone.

    Outputs for shared memory are written there. Raises `Refused`.
    """
    outputs: list[dict[str, Any]] = []
    raw: list[memoryview] = []
    for wanted in inference.outputs_to_send(results):
        array = results[wanted.name]
        dtype = DType(array.dtype.name)
        said: dict[str, Any] = {
            "name": wanted.name,
            "datatype": NAMES[dtype],
            "shape": array.shape,
        }
        if wanted.place is not None:
            regions.write(wanted.place, array)
            said["parameters"] = {
                "shared_memory_region": wanted.place.region,
                "shared_memory_offset": wanted.place.offset,
                "shared_memory_byte_size": array.nbytes,
            }
        elif wanted.binary:
            raw.append(bytes_of(array))
            said["parameters"] = {"binary_data_size": array.nbytes}
        else:
            said["data"] = json_of_array(array)
        outputs.append(said)
    answer: dict[str, Any] = {"model_name": model, "model_version": version}
    if inference.id:
        answer["id"] = inference.id
    head = msgspec.json.encode(answer | {"outputs": outputs})
    return [head, *raw], len(head) if raw else None


def decompress(body: bytes, encoding: str, most: int) -> bytes:
    """Decompress a body. Raises `Refused`, also if it then has more than `most` bytes."""
    window = _WINDOWS.get(encoding)
    if window is None:
        raise Refused(
            problem=f"the body has the encoding {encoding[:40]!r}",
            fix=f"use {' or '.join(_WINDOWS)}, or none",
        )
    inflate = zlib.decompressobj(window)
    try:
        whole = inflate.decompress(body, most + 1)
    except zlib.error as error:
        raise Refused(
            problem=f"the body is not compressed by {encoding}: {error}", fix="send it as it is"
        ) from None
    if len(whole) > most:
        raise TooLarge(problem=f"the body has more than {most:,} bytes once decompressed", fix="send less")
    if not inflate.eof:
        raise Refused(problem=f"the body ends before its {encoding} does", fix="send all of it")
    return whole


def compress(parts: Sequence[bytes | memoryview], accepted: str) -> tuple[str, bytes] | None:
    """An encoding that the client accepts, and the body in it; None if the body is to be sent as it is."""
    offered = [word.partition(";")[0].strip() for word in accepted.split(",")]
    encoding = next((each for each in offered if each in _WINDOWS), None)
    if encoding is None:
        return None
    deflate = zlib.compressobj(1, zlib.DEFLATED, _WINDOWS[encoding])
    return encoding, b"".join([*map(deflate.compress, parts), deflate.flush()])
