"""Operation graphs as text tokens: errors carry them, and `cudnn-actor reproduce` runs them.

A token is the graph's MessagePack, compressed, in characters that need no quoting in a shell or a URL. It
contains no tensor values: `cudnn-actor reproduce` makes them up.
"""

from __future__ import annotations

import base64
import functools
import zlib

import msgspec

from cudnn_actor.protocol.errors import InvalidRequest
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.types.tensor import TensorSpec

__all__ = ["graph_of", "token"]

_LARGEST = 1 << 22
"""The most bytes that a token may unpack to: tens of thousands of tensors. Stops decompression bombs."""
_LONGEST = 100_000
"""The most letters of a token. Linux takes arguments of 128 KiB."""


def token(graph: OperationGraph) -> str:
    """A graph as text: a few hundred letters, digits, `-` and `_`. The same in every process.

    Empty for a graph of some thousands of operations, whose token would be too long for a command line.
    """
    packed = zlib.compress(msgspec.msgpack.encode(graph), level=9)
    text = base64.urlsafe_b64encode(packed).decode().rstrip("=")
    return text if len(text) <= _LONGEST else ""


def graph_of(text: str) -> OperationGraph:
    """The graph that `token` encoded, names included.

    Raises `InvalidRequest` for any other text. The unpacked size is bounded, and no code in it is run.
    """
    try:
        padded = text.strip() + "=" * (-len(text.strip()) % 4)
        graph = _decoder().decode(_inflate(base64.b64decode(padded, altchars=b"-_", validate=True)))
        for tensor in graph.tensors:
            TensorSpec(
                dims=tensor.dims, strides=tensor.strides, dtype=tensor.dtype, alignment=tensor.alignment
            )
    except (ValueError, zlib.error, RecursionError) as error:  # msgspec and base64 raise ValueErrors
        raise InvalidRequest(
            field="token",
            value=text if len(text) <= 40 else f"{text[:40]}...",
            problem=f"is not an operation graph: {error}",
            fix="copy everything after `cudnn-actor reproduce`",
        ) from error
    return graph


@functools.cache  # all classes of operations are looked at for it: a tenth of the package's import
def _decoder() -> msgspec.msgpack.Decoder[OperationGraph]:
    return msgspec.msgpack.Decoder(OperationGraph, strict=True)


def _inflate(packed: bytes) -> bytes:
    stream = zlib.decompressobj()
    data = stream.decompress(packed, _LARGEST)
    if not stream.eof or stream.unused_data:
        raise ValueError(f"it is truncated, or unpacks to more than {_LARGEST:,} bytes")
    return data
