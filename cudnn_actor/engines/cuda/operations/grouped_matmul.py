"""Products of groups of rows on CUDA, by kernels of our own.

The offsets are on the device, so a first kernel sorts them there, and counts
the tiles of each expert's rows; the rows of no expert are a last group. Each
block then finds its tile, which is of one group. Half types are multiplied by
tensor cores, other types as in our kernel of single products.
https://docs.nvidia.com/cuda/parallel-thread-execution/#warp-level-matrix-fragment-mma-16816-float
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from cudnn_actor.engines.cuda.library.libraries import libraries
from cudnn_actor.engines.cuda.operations.lines import compiled
from cudnn_actor.engines.cuda.operations.matmul import MOST_BLOCKS, THREADS, TILE, tile_source
from cudnn_actor.engines.cuda.plans.kernels import C_TYPES, PREAMBLE, store
from cudnn_actor.protocol.dtypes import DType
from cudnn_actor.protocol.operations import GraphTensor, GroupedMatMul, GroupedMatMulBackwardWeights

__all__ = ["INSTRUCTIONS", "grouped_kernels", "grouped_workspace", "source"]

Grouped = GroupedMatMul[int] | GroupedMatMulBackwardWeights[int]

_SORTING_THREADS = 1024
_WIDE_TILE, _DEPTH, _VECTOR = 128, 32, 8
"""Rows and columns of a tile on tensor cores, the steps of its sums at a time, and the elements that are read
at a time."""


class _Matrix(NamedTuple):
    """Strides of a matrix."""

    row: int
    column: int


def grouped_kernels(
    operation: Grouped, tensors: Sequence[GraphTensor], handle: Any
) -> Callable[[Sequence[int]], None]:
    """The launch of either product; see `operations.Launcher`."""
    del handle
    cupy, text = libraries().cupy, source(operation, tensors)
    sort, multiply = (compiled(text, name, cupy) for name in ("sort_ends", "grouped"))
    numbers = tuple(_numbers(operation, tensors).values())
    (experts,), (step,) = tensors[2].dims, tensors[2].strides
    rows, tile = tensors[0].dims[0], _tile(tensors)
    blocks = min(_tiles(operation, tensors), MOST_BLOCKS)

    def launch(addresses: Sequence[int]) -> None:
        *operands, workspace = addresses
        sort((1,), (_SORTING_THREADS,), (operands[2], workspace, experts, step, rows, tile))
        multiply((blocks,), (THREADS,), (operands[0], operands[1], workspace, operands[3], *numbers))

    return launch


def grouped_workspace(operation: Grouped, tensors: Sequence[GraphTensor]) -> int:
    """Bytes for the ends of the groups, and for how many tiles there are up to each end."""
    del operation
    return 2 * (tensors[2].dims[0] + 1) * DType.INT64.itemsize


def _tile(tensors: Sequence[GraphTensor]) -> int:
    return _WIDE_TILE if tensors[0].dtype.is_half else TILE


def _tiles(operation: Grouped, tensors: Sequence[GraphTensor]) -> int:
    """The most tiles that there may be, whatever the offsets."""
    tile, (experts,), (rows, inner) = _tile(tensors), tensors[2].dims, tensors[0].dims
    broad = -(-tensors[3].dims[-1] // tile)
    if isinstance(operation, GroupedMatMul):
        return broad * (rows // tile + min(rows, experts + 1))
    return broad * -(-inner // tile) * experts


def _numbers(operation: Grouped, tensors: Sequence[GraphTensor]) -> Mapping[str, int]:
    """The kernel's numbers, by their names."""
    tokens, _, offsets, result = tensors
    return {
        "experts": offsets.dims[0],
        "tokens": tokens.dims[0],
        "inner": tokens.dims[1],
        "columns": result.dims[-1],
        "expert_step": (tensors[1] if isinstance(operation, GroupedMatMul) else result).strides[0],
        **{
            f"{name}_{field}": stride
            for name, matrix in zip("aby", _matrices(operation, tensors), strict=True)
            for field, stride in matrix._asdict().items()
        },
    }


def _matrices(operation: Grouped, tensors: Sequence[GraphTensor]) -> tuple[_Matrix, _Matrix, _Matrix]:
    """What is multiplied for each group, and the result."""
    tokens, other, result = (_Matrix(*tensors[number].strides[-2:]) for number in (0, 1, 3))
    forward = isinstance(operation, GroupedMatMul)
    return tokens if forward else _Matrix(tokens.column, tokens.row), other, result


def source(operation: Grouped, tensors: Sequence[GraphTensor]) -> str:
    """The kernels in CUDA C++."""
    a, b, y = (C_TYPES[tensors[number].dtype] for number in (0, 1, 3))
    numbers = ", ".join(f"long long {name}" for name in _numbers(operation, tensors))
    body = _FORWARD if isinstance(operation, GroupedMatMul) else _BACKWARD
    together = 2 if tensors[0].dtype.is_half else 1  # blocks on a multiprocessor
    return f"""{_tile_source(operation, tensors)}{_SORT}
extern "C" __global__ void __launch_bounds__({THREADS}, {together}) grouped(
    const {a}* all_a, const {b}* all_b, const long long* ends, {y}* all_y, {numbers}) {{
    constexpr long long size = {_tile(tensors)};
    const long long broad = (columns + size - 1) / size;
    {body}
}}
"""


_SORT = """
// The ends in order, within the rows, and then all rows; and the number of tiles up to each end.
extern "C" __global__ void sort_ends(
    const int* offsets, long long* ends,
    long long experts, long long step, long long rows, long long size) {
    for (long long e = threadIdx.x; e <= experts; e += blockDim.x) {
        const long long end = e < experts ? offsets[e * step] : rows;
        long long rank = 0;
        for (long long other = 0; other < experts; ++other) {
            const int found = offsets[other * step];
            rank += e == experts || found < end || (found == end && other < e);
        }
        ends[rank] = end < 0 ? 0 : end > rows ? rows : end;
    }
    __syncthreads();
    long long* tiles = ends + experts + 1;
    for (long long e = threadIdx.x; e <= experts; e += blockDim.x) {
        long long count = 0;
        for (long long other = 0; other <= e; ++other)
            count += (ends[other] - (other ? ends[other - 1] : 0) + size - 1) / size;
        tiles[e] = count;
    }
}
"""
_FORWARD = """const long long* tiles = ends + experts + 1;
    for (long long tile = blockIdx.x; tile < tiles[experts] * broad; tile += gridDim.x) {
        const long long down = tile / broad, column = tile % broad * size;
        long long group = 0, last = experts;  // the first group with a tile after it
        while (group < last) {
            const long long middle = (group + last) / 2;
            if (tiles[middle] > down) last = middle; else group = middle + 1;
        }
        const long long start = group ? ends[group - 1] : 0, before = group ? tiles[group - 1] : 0;
        const bool given = group < experts;  // else 0 is stored
        multiply(all_a + start * a_row, all_b + (given ? group * expert_step : 0), all_y + start * y_row,
                 (down - before) * size, column, ends[group] - start, columns, given ? inner : 0,
                 a_row, a_column, b_row, b_column, y_row, y_column);
    }"""
_BACKWARD = """const long long tall = (inner + size - 1) / size;
    for (long long tile = blockIdx.x; tile < experts * tall * broad; tile += gridDim.x) {
        const long long column = tile % broad * size, row = tile / broad % tall * size;
        const long long group = tile / broad / tall, start = group ? ends[group - 1] : 0;
        multiply(all_a + start * a_column, all_b + start * b_row, all_y + group * expert_step,
                 row, column, inner, columns, ends[group] - start,
                 a_row, a_column, b_row, b_column, y_row, y_column);
    }"""


def _tile_source(operation: Grouped, tensors: Sequence[GraphTensor]) -> str:
    """What defines `multiply`, by which a block computes a tile: see `tile_source`."""
    given = [tensors[number] for number in (0, 1, 3)]
    dtype, y = tensors[0].dtype, tensors[3].dtype
    if not dtype.is_half:
        return tile_source(given, operation.compute((dtype,)))
    a, b, _ = _matrices(operation, tensors)
    numbers = {
        "SIZE": _WIDE_TILE,
        "DEPTH": _DEPTH,
        "A_ALONG": int(a.column == 1),
        "A_WIDE": int(_is_wide(tensors[0])),
        "B_ALONG": int(b.row == 1),
        "B_WIDE": int(_is_wide(tensors[1])),
    }
    constants = " ".join(f"constexpr int {name} = {value};" for name, value in numbers.items())
    instructions = INSTRUCTIONS.replace("{type}", "bf16" if dtype is DType.BFLOAT16 else "f16")
    tile = _TENSOR_TILE.replace("{y}", C_TYPES[y]).replace("{store}", store(y, "sum"))
    return f"{PREAMBLE}\n{constants}\n{instructions}{tile}"


def _is_wide(tensor: GraphTensor) -> bool:
    """Whether eight neighbouring elements of an operand can be read at once, from any row or expert on."""
    *others, contiguous = sorted(tensor.strides, reverse=True)
    # Groups begin at any row: those of tokens must not be what is contiguous.
    return contiguous == 1 != tensor.strides[0] and all(step % _VECTOR == 0 for step in others)


INSTRUCTIONS = r"""
// Four matrices of 8 x 8, from the rows that the lanes point to; perhaps transposed.
template <bool TRANSPOSED> __device__ __forceinline__ void matrices(
    unsigned (&parts)[4], const unsigned short* row) {
    const unsigned at = (unsigned)__cvta_generic_to_shared(row);
    if (TRANSPOSED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
            : "=r"(parts[0]), "=r"(parts[1]), "=r"(parts[2]), "=r"(parts[3]) : "r"(at));
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
            : "=r"(parts[0]), "=r"(parts[1]), "=r"(parts[2]), "=r"(parts[3]) : "r"(at));
}
// sums += a @ b, of 16 x 16 and 16 x 8 elements.
__device__ __forceinline__ void add_product(
    float (&sums)[4], const unsigned (&a)[4], unsigned b_first, unsigned b_last) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.{type}.{type}.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b_first), "r"(b_last));
}
"""
"""What tensor cores are used with."""
_TENSOR_TILE = r"""
typedef unsigned short Half;
struct alignas(16) Eight { Half of[8]; };
// In shared memory, an operand has its contiguous dim along the rows, which are longer by eight elements: so
// eight rows begin in different banks. ALONG: it is the dim that is summed over.
template <bool ALONG> struct Form {
    static constexpr int row = (ALONG ? DEPTH : SIZE) + 8, packs = (ALONG ? DEPTH : SIZE) / 8;
    static constexpr int elements = (ALONG ? SIZE : DEPTH) * row;
};
constexpr int PARTS = SIZE * DEPTH / 8 / 256;

template <bool ALONG, bool WIDE> __device__ __forceinline__ void fetch(
    Eight (&parts)[PARTS], const Half* from, long long outer, long long inner,
    long long outers, long long inners, long long outer_step, long long inner_step) {
    #pragma unroll
    for (int n = 0; n < PARTS; ++n) {
        const int number = threadIdx.x + 256 * n, line = number / Form<ALONG>::packs;
        const int pack = number % Form<ALONG>::packs * 8;
        const long long o = outer + (ALONG ? line : pack), i = inner + (ALONG ? pack : line);
        const bool there = ALONG ? o < outers : i < inners;
        const long long left = ALONG ? inners - i : outers - o, step = ALONG ? inner_step : outer_step;
        const Half* first = from + o * outer_step + i * inner_step;
        if (WIDE && there && left >= 8) {
            parts[n] = *(const Eight*)first;
        } else {
            #pragma unroll
            for (int e = 0; e < 8; ++e) parts[n].of[e] = there && e < left ? first[e * step] : (Half)0;
        }
    }
}
template <bool ALONG> __device__ __forceinline__ void put(const Eight (&parts)[PARTS], Eight* tile) {
    #pragma unroll
    for (int n = 0; n < PARTS; ++n) {
        const int number = threadIdx.x + 256 * n, line = number / Form<ALONG>::packs;
        tile[line * (Form<ALONG>::row / 8) + number % Form<ALONG>::packs] = parts[n];
    }
}
// Eight warps, two below each other and four side by side, compute 64 x 32 elements each.
__device__ __forceinline__ void multiply(
    const Half* a, const Half* b, {y}* y, long long row, long long column,
    long long rows, long long columns, long long inner,
    long long a_row, long long a_column, long long b_row, long long b_column,
    long long y_row, long long y_column) {
    typedef Form<A_ALONG> A;
    typedef Form<B_ALONG> B;
    __shared__ Eight of_a[2][A::elements / 8], of_b[2][B::elements / 8];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, down = warp / 4 * 64, across = warp % 4 * 32;
    float sums[4][4][4] = {};
    Eight next_a[PARTS], next_b[PARTS];
    auto read = [&](long long first) {
        fetch<A_ALONG, A_WIDE>(next_a, a, row, first, rows, inner, a_row, a_column);
        fetch<B_ALONG, B_WIDE>(next_b, b, column, first, columns, inner, b_column, b_row);
    };
    int now = 0;
    if (inner > 0) {
        read(0);
        put<A_ALONG>(next_a, of_a[0]);
        put<B_ALONG>(next_b, of_b[0]);
    }
    __syncthreads();
    for (long long first = 0; first < inner; first += DEPTH, now ^= 1) {
        const bool more = first + DEPTH < inner;
        if (more) read(first + DEPTH);
        #pragma unroll
        for (int k = 0; k < DEPTH; k += 16) {
            unsigned left[4][4], right[2][4];
            #pragma unroll
            for (int n = 0; n < 4; ++n) {
                const int m = down + 16 * n;
                matrices<!A_ALONG>(left[n], (const Half*)of_a[now] + (A_ALONG
                    ? (m + lane % 16) * A::row + k + lane / 16 * 8
                    : (k + lane % 8 + lane / 16 * 8) * A::row + m + lane / 8 % 2 * 8));
            }
            #pragma unroll
            for (int n = 0; n < 2; ++n) {
                const int m = across + 16 * n;
                matrices<!B_ALONG>(right[n], (const Half*)of_b[now] + (B_ALONG
                    ? (m + lane % 8 + lane / 16 * 8) * B::row + k + lane / 8 % 2 * 8
                    : (k + lane % 16) * B::row + m + lane / 16 * 8));
            }
            #pragma unroll
            for (int n = 0; n < 16; ++n)
                add_product(sums[n / 4][n % 4], left[n / 4],
                            right[n % 4 / 2][n % 2 * 2], right[n % 4 / 2][n % 2 * 2 + 1]);
        }
        if (more) {  // nobody reads there: all have passed the barrier since they did
            put<A_ALONG>(next_a, of_a[now ^ 1]);
            put<B_ALONG>(next_b, of_b[now ^ 1]);
        }
        __syncthreads();
    }
    #pragma unroll
    for (int n = 0; n < 64; ++n) {
        const long long i = row + down + n / 16 * 16 + lane / 4 + n / 2 % 2 * 8;
        const long long j = column + across + n / 4 % 4 * 8 + lane % 4 * 2 + n % 2;
        const float sum = sums[n / 16][n / 4 % 4][n % 4];
        if (i < rows && j < columns) y[i * y_row + j * y_column] = {store};
    }
}
"""
