"""Attention and its gradients as kernels of our own: every floating-point type and layout.

Sums are float32 (float64 of float64). The kernels use no tensor cores. A block has
a tile of queries and goes over the tiles of keys that the masks leave; for gradients
of keys, it has a tile of keys and goes over tiles of queries. Scores are never
written to memory: T. Dao et al., "FlashAttention", NeurIPS 2022. Sums are added up
in an order that depends on the dims alone.

The C++ of the kernels is in `kernels.attention_code`. There, `Seen` says which scores the
masks leave. The masks of cuDNN's kernels are in `operations.attention.attention_masks`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from cudnn_actor.engines.cuda.kernels.attention_code import BACKWARD, COMMON, DROPPING, EACH, FORWARD, KEEPING
from cudnn_actor.engines.cuda.kernels.element_types import C_TYPES, CONVERSIONS, load, store
from cudnn_actor.engines.cuda.kernels.index_code import number_of, offset_of
from cudnn_actor.engines.cuda.kernels.kernel import LARGEST_GRID, Launch, arguments_of, parameters_of
from cudnn_actor.engines.cuda.operations.random import PHILOX
from cudnn_actor.protocol.operations import Attention, AttentionBackward, GraphTensor
from cudnn_actor.protocol.operations.random import keeping
from cudnn_actor.protocol.types.dtypes import DType

__all__ = ["attention_launches", "attention_workspace"]

AnyAttention = Attention[int] | AttentionBackward[int]

_THREADS = 128
_COLUMNS = 64
"""The columns of a tile that a block goes over: keys, or queries for gradients by keys."""
_ENOUGH_BLOCKS = 256
"""Below this, tiles are smaller, so that more of a GPU's multiprocessors have one."""


class _Tile(NamedTuple):
    """How a kernel cuts its work into blocks.

    Parameters
    ----------
    rows
        The rows of a tile that a thread has; a block has 8 times as many.
    columns
        The columns of each result that a block computes, in groups of 16.
    parts
        The number of blocks that share a tile: each has some of the results' columns.
    blocks
        The number of blocks.
    together
        The number of blocks that the registers of a multiprocessor are to hold.
    """

    rows: int
    columns: tuple[int, ...]
    parts: int
    blocks: int
    together: int = 3


def _tile(dtype: DType, positions: int, others: int, *features: int) -> _Tile:
    """The tiles of `positions` positions, for each of `others` heads, with results of these features."""
    # The registers limit the rows: float64 takes twice as many, and a tile's results stay in registers.
    rows = 4 if dtype is DType.FLOAT64 else 8
    parts = -(-max(features, default=1) * len(features) // (16 * rows)) or 1
    columns = tuple(-(-size // (16 * parts)) for size in features)

    def blocks() -> int:
        return -(-positions // (8 * rows)) * others * parts

    while rows > 1 and 4 * rows >= positions:
        rows //= 2
    while rows > 2 and blocks() < _ENOUGH_BLOCKS:
        rows //= 2
    return _Tile(rows, columns, parts, blocks())


def _tiles(operation: AnyAttention, given: Mapping[str, GraphTensor]) -> dict[str, _Tile]:
    """The tiles of each kernel, by the kernels' names."""
    q, k, v = given["q"], given["k"], given["v"]
    (batch, heads, rows, features), (_, groups, columns, _) = q.dims, k.dims
    if isinstance(operation, Attention):
        tile = _tile(q.dtype, rows, batch * heads, v.dims[3])
        return {"queries": tile._replace(together=4) if tile.columns[0] <= 4 else tile}
    found = {
        "queries": _tile(q.dtype, rows, batch * heads, features),
        "keys": _tile(q.dtype, columns, batch * groups, features, v.dims[3]),
    }
    if "dbias" in given:
        *outer, positions, _ = given["dbias"].dims
        across = math.prod(outer) * -(-columns // _COLUMNS)
        tile = _tile(q.dtype, rows, across)
        found["biases"] = tile if positions == rows else tile._replace(blocks=across)
    return found


def attention_workspace(operation: AnyAttention, tensors: Sequence[GraphTensor]) -> int:
    """Bytes of the workspace: for gradients, the sum of dy * y of each query; else 0."""
    if isinstance(operation, Attention):
        return 0
    q = _tensors_by_name(operation, tensors)["q"]
    return math.prod(q.dims[:3]) * (8 if q.dtype is DType.FLOAT64 else 4)


def attention_launches(operation: AnyAttention, tensors: Sequence[GraphTensor]) -> list[Launch]:
    """The launches of attention, in order: the first writes the workspace, which the later ones read."""
    given = _tensors_by_name(operation, tensors)
    q, tiles = given["q"], _tiles(operation, given)
    text = _source(operation, given, tiles)
    number = np.float64 if q.dtype is DType.FLOAT64 else np.float32
    scale, lifted = operation.effective_scale(q.dims[3]), 1 / (1 - operation.dropout)
    options = keeping(1 - operation.dropout), number(scale), number(lifted)
    numbers = _numbers(operation, given).values()
    count = len(tensors) + isinstance(operation, AttentionBackward)  # with the workspace
    return [
        Launch(
            name,
            text,
            (min(tile.blocks, LARGEST_GRID),),
            (_THREADS,),
            arguments_of(count, tile.blocks, *numbers, *options),
        )
        for name, tile in tiles.items()
    ]


def _tensors_by_name(operation: AnyAttention, tensors: Sequence[GraphTensor]) -> dict[str, GraphTensor]:
    named = operation.named()
    return {name: tensors[number] for name, number in named}


def _numbers(operation: AnyAttention, given: Mapping[str, GraphTensor]) -> dict[str, int]:
    """The kernels' numbers, by the names of their parameters, but for the number of blocks."""
    (batch, heads, rows, _), (_, groups, columns, _) = given["q"].dims, given["k"].dims
    found = {"batch": batch, "heads": heads, "groups": groups, "rows": rows, "columns": columns}
    for name, tensor in given.items():
        strides = *tensor.strides, *[0] * (4 - len(tensor.strides))
        found |= {f"{name}{axis}": step for axis, step in enumerate(strides)}
    biases = given["dbias"].dims[:3] if "dbias" in given else (1, 1, 1)
    found |= {f"biases{axis}": size for axis, size in enumerate(biases)}
    left, right = operation.bounds(rows, columns)
    return {**found, "left": rows if left is None else left, "right": columns if right is None else right}


def _source(operation: AnyAttention, given: Mapping[str, GraphTensor], tiles: Mapping[str, _Tile]) -> str:
    """The kernels in CUDA C++.

    They depend on dtypes, numbers of features, the tiles, slopes, which operands there are, and whether
    features are neighbours.
    """
    written = dict(operation.named(operation.outputs))
    pointers = [
        f"{'' if name in written else 'const '}{C_TYPES[tensor.dtype]}* {name}"
        for name, tensor in given.items()
    ]
    if isinstance(operation, AttentionBackward):
        pointers.append("T* aparts")
    numbers = parameters_of(["count", *_numbers(operation, given)])
    arguments = ", ".join([*pointers, numbers, "Natural threshold", "T scale", "T lifted"])
    dtype = given["q"].dtype
    # Deeper tiles, if they fit into 48 KiB of shared memory.
    deep = dtype is not DType.FLOAT64 and max(size for of in tiles.values() for size in (0, *of.columns)) <= 6
    code = [
        f"typedef {'double' if dtype is DType.FLOAT64 else 'float'} T;",
        f"typedef {C_TYPES[dtype]} X;",
        CONVERSIONS,
        f"constexpr int D = {given['q'].dims[3]}, E = {given['v'].dims[3]};",
        f"constexpr int N = {_COLUMNS}, THREADS = {_THREADS}, DEPTH = {64 if deep else 32};",
        PHILOX,
        COMMON.replace("LOAD", load(dtype, "*place")),
        DROPPING if "state" in given else KEEPING,
    ]
    if operation.slopes is not None:
        slopes = ", ".join(f"(T){float(slope)!r}" for slope in operation.slopes)
        code.append(f"__device__ const T slopes[] = {{{slopes}}};")
    at = _Code(given, operation)
    bodies = {"queries": FORWARD} if isinstance(operation, Attention) else BACKWARD
    for name, tile in tiles.items():
        columns = "".join(f", {of} = {size}" for of, size in zip("CF", tile.columns, strict=False))
        wide = max(_COLUMNS, *(16 * size for size in tile.columns), 0)
        code.append(f"""
extern "C" __global__ void __launch_bounds__({_THREADS}, {tile.together}) {name}({arguments}) {{
    constexpr int R = {tile.rows}, M = 8 * R, PARTS = {tile.parts}{columns};
    __shared__ Pack<BESIDE> left_room[N * (M + BESIDE) / BESIDE];
    __shared__ Pack<BESIDE> right_room[DEPTH * ({wide} + BESIDE) / BESIDE];
    {EACH}{at.fill(bodies[name])}
    }}
}}""")
    return "\n".join(code)


_RESULTS = {
    "y": ("b", "h", "i", "e"),
    "dq": ("b", "h", "i", "d"),
    "dk": ("b", "g", "j", "d"),
    "dv": ("b", "g", "j", "e"),
    "dbias": ("b_", "h_", "i", "j"),
}
"""The C names of the indices with which results are stored."""


def _offset(name: str, indices: Sequence[str]) -> str:
    """The C expression of an element's offset in a tensor."""
    return offset_of(indices, (f"{name}{axis}" for axis in range(len(indices))))


class _Code:
    """Puts C expressions of the operands there are into a kernel's body."""

    def __init__(self, given: Mapping[str, GraphTensor], operation: AnyAttention) -> None:
        self._given = given
        self._lowered = "" if operation.slopes is None else " - slopes[h] * (T)llabs(i - j)"

    def fill(self, body: str) -> str:
        """A kernel's body with the expressions in place of its words in capital letters."""
        bias = "0"
        if "bias" in self._given:
            dims = self._given["bias"].dims
            inside = ("b", "h", "min(i, rows - 1)", "min(j, columns - 1)")
            own = [axis for axis in range(len(dims)) if dims[axis] > 1]
            place = offset_of((inside[axis] for axis in own), (f"bias{axis}" for axis in own))
            bias = f"(T)({load(self._given['bias'].dtype, f'bias[{place or 0}]')})"
        statistics = f"statistics[{_offset('statistics', ('b', 'h', 'i'))}]"
        words = {
            "BIAS": f"({bias}{self._lowered})",
            "LIMIT_Q": self._length("lengths_q", "rows"),
            "LIMIT_KV": self._length("lengths_kv", "columns"),
            "STATISTICS": statistics,
            "BASE": f"base_of({statistics})",
            "APART": f"aparts[{number_of(('b', 'h', 'i'), ('heads', 'rows'))}]",
            "PLACE_OF_Y": f"y + {_offset('y', _RESULTS['y'])}",
        }
        for name, first in {"q": "i0", "dy": "i0", "k": "j0", "v": "j0"}.items():
            if name in self._given:
                head, limit = ("h", "limit_q") if first == "i0" else ("g", "limit_kv")
                across = 1 if self._given[name].strides[3] == 1 else f"{name}3"
                place = f"{name} + {_offset(name, ('b', head, first))}"
                words[f"ROWS_{name.upper()}"] = f"{{{place}, {name}2, {across}, near({limit} - {first})}}"
        for name, indices in _RESULTS.items():
            if name in self._given:
                place = f"{name}[{_offset(name, indices)}]"
                words[f"STORE_{name.upper()}"] = f"{place} = {store(self._given[name].dtype, 'value')}"
        if "statistics" not in self._given:
            body = body.replace("if (part == 0 && tx == 0) STATISTICS = logarithm;", "")
        for word in sorted(words, key=len, reverse=True):
            body = body.replace(word, words[word])
        return body

    def _length(self, name: str, most: str) -> str:
        if name not in self._given:
            return most
        return f"min(max((long long){name}[b * {name}0], 0ll), {most})"
