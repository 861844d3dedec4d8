"""Tensors as lists of numbers in JSON, read and written piece by piece.

A call that makes millions of Python's numbers holds the interpreter's lock for a tenth of a second, and no
other thread can run meanwhile, not even an event loop's. Between two pieces, other threads can run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import msgspec
import numpy as np

from cudnn_actor.actors.long_work import check_wanted
from cudnn_actor.protocol.types.dtypes import DType
from cudnn_actor.serving.failures import Refused
from cudnn_actor.serving.tensors import NAMES, unfit

__all__ = ["PIECE", "array_of_json", "json_of_array"]

PIECE = 64 << 10
"""How many bytes of a list are read at a time, and how many elements are written at a time. Either takes
about a millisecond."""
_NUMBERS = b"0123456789+-.eEtrufals \t\n\r"
_BLANKED = bytes.maketrans(b"[]", b"  ")


def array_of_json(tensor: str, dtype: DType, shape: tuple[int, ...], data: bytes | msgspec.Raw) -> np.ndarray:
    """The array of the numbers in `data`, which is valid JSON: a flat list, or nested lists.

    Raises `Refused`.
    """
    count, text = math.prod(shape), bytes(data).strip()
    if count > len(text):  # each number takes a character and a comma
        raise unfit(tensor, shape)
    nested = text.find(b"[", 1) > 0
    if nested and not _has_structure(text, shape):
        raise unfit(tensor, shape)
    flat = np.empty(count, dtype.numpy)
    try:
        filled = 0 if nested and not count else _fill(flat, _pieces(text, dtype, nested=nested))
    except (msgspec.DecodeError, ValueError, OverflowError) as error:
        raise Refused(
            problem=f"the data of input {tensor[:100]!r} are not a list of {NAMES[dtype]}",
            fix="give numbers of that type in row-major order, or nested lists of equal length",
        ) from error
    if filled != count:
        raise unfit(tensor, shape)
    try:
        return flat.reshape(shape)
    except ValueError as error:  # no elements, and one of its sizes is too large
        raise unfit(tensor, shape) from error


def _fill(flat: np.ndarray, pieces: Iterator[list[Any]]) -> int:
    """Write numbers to an array. Returns how many numbers there were; the count ends with the first piece
    that does not fit."""
    filled = 0
    for numbers in pieces:
        end = filled + len(numbers)
        if end > len(flat):
            return end
        with np.errstate(over="ignore"):  # a number that float32 cannot hold becomes infinite
            flat[filled:end] = np.array(numbers, flat.dtype)
        filled = end
    return filled


def _pieces(text: bytes, dtype: DType, *, nested: bool) -> Iterator[list[Any]]:
    """Yield the numbers of a list, some at a time. `nested`: whether there are brackets among them."""
    kind = bool if dtype is DType.BOOL else float if dtype.is_floating else int
    decode = _decoder(kind).decode
    if not nested and not (text.startswith(b"[") and text.endswith(b"]")):
        decode(text)  # raises
    begin, end = 1, len(text) - 1
    while begin < end:
        check_wanted()
        comma = text.find(b",", begin + PIECE, end)
        stop = end if comma < 0 else comma
        piece = text[begin:stop]
        yield decode(b"[%b]" % (piece.translate(_BLANKED) if nested else piece))
        begin = stop + 1


@cache
def _decoder(kind: type) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(list[kind])  # type: ignore[valid-type]


def _has_structure(text: bytes, shape: Sequence[int]) -> bool:
    """Whether nested lists have the lengths of `shape`. Only brackets and commas are compared."""
    length = 0
    for size in reversed(shape):
        length = 2 + size * length + max(size - 1, 0)
    if length > len(text):
        return False
    wanted = b""
    for size in reversed(shape):
        wanted = b"[%b]" % ((wanted + b",") * size)[:-1]
    at = 0
    for begin in range(0, len(text), PIECE):
        check_wanted()
        found = text[begin : begin + PIECE].translate(None, _NUMBERS)
        if not wanted.startswith(found, at):
            return False
        at += len(found)
    return at == length


def json_of_array(array: np.ndarray) -> msgspec.Raw:
    """The elements as a JSON list in row-major order. A number that is not finite becomes null."""
    if array.dtype.kind == "V" or array.dtype.itemsize == 2:  # bfloat16 among them
        array = array.astype(np.float32) if DType(array.dtype.name).is_floating else array
    flat, parts = array.reshape(-1), []
    for begin in range(0, len(flat), PIECE):
        check_wanted()
        parts.append(msgspec.json.encode(flat[begin : begin + PIECE].tolist())[1:-1])
    return msgspec.Raw(b"[%b]" % b",".join(parts))
