"""Operation graphs as text: what an error names, and `cudnn-actor reproduce` runs.

A token is the graph's MessagePack, compressed, in the letters that a shell and a URL leave alone. It says
nothing of values: those are made up when it is run.
"""

from __future__ import annotations

import base64
import zlib

import msgspec

from cudnn_actor.protocol.errors import InvalidRequest
from cudnn_actor.protocol.graph import OperationGraph
from cudnn_actor.protocol.tensor import TensorSpec

__all__ = ["graph_of", "token"]

_LARGEST = 1 << 15
"""Bytes that a token may unpack to, two hundred tensors: more is no graph, but a bomb."""
_DECODER = msgspec.msgpack.Decoder(OperationGraph, strict=True)


def token(graph: OperationGraph) -> str:
    """A graph as text: a few hundred letters, digits, `-` and `_`. The same in every process."""
    packed = zlib.compress(msgspec.msgpack.encode(graph), level=9)
    return base64.urlsafe_b64encode(packed).decode().rstrip("=")


def graph_of(text: str) -> OperationGraph:
    """The graph that `token` made the text of, names and all.

    Raises `InvalidRequest` for any other text; what it unpacks to is bounded, and none of it is code.
    """
    try:
        padded = text.strip() + "=" * (-len(text.strip()) % 4)
        graph = _DECODER.decode(_inflate(base64.b64decode(padded, altchars=b"-_", validate=True)))
        for tensor in graph.tensors:
            TensorSpec(
                dims=tensor.dims, strides=tensor.strides, dtype=tensor.dtype, alignment=tensor.alignment
            )
    except (ValueError, zlib.error, RecursionError) as error:  # msgspec's and base64's are ValueErrors
        raise InvalidRequest(
            field="token",
            value=text if len(text) <= 40 else f"{text[:40]}...",
            problem=f"is not an operation graph: {error}",
            fix="copy everything after `cudnn-actor reproduce`",
        ) from error
    return graph


def _inflate(packed: bytes) -> bytes:
    stream = zlib.decompressobj()
    data = stream.decompress(packed, _LARGEST)
    if not stream.eof or stream.unused_data:
        raise ValueError(f"it is cut short, or unpacks to more than {_LARGEST:,} bytes")
    return data
