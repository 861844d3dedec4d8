"""Products of groups of rows on CUDA, by kernels of our own.

The offsets are on the device, so a first kernel sorts them there, and counts
the tiles of each expert's rows. The rows of no expert are a last group. Each
block then finds the group of its tile. Half types are multiplied by tensor
cores, other types as in our kernel of single products.
https://docs.nvidia.com/cuda/parallel-thread-execution/#warp-level-matrix-fragment-mma-16816-float
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from cudnn_actor.engines.cuda.kernels.element_types import C_TYPES, CONVERSIONS, store
from cudnn_actor.engines.cuda.kernels.index_code import block_loop, division
from cudnn_actor.engines.cuda.kernels.kernel import LARGEST_GRID, MOST_THREADS, Launch, Pointer, parameters_of
from cudnn_actor.engines.cuda.operations.implementation import implement, kernels
from cudnn_actor.engines.cuda.operations.matmul import THREADS, TILE, tile_source
from cudnn_actor.protocol.operations import GraphTensor, GroupedMatMul, GroupedMatMulBackwardWeights
from cudnn_actor.protocol.types.dtypes import DType

__all__ = ["INSTRUCTIONS", "grouped_launches", "grouped_workspace"]

Grouped = GroupedMatMul[int] | GroupedMatMulBackwardWeights[int]

_WIDE_TILE, _DEPTH, _VECTOR = 128, 32, 8
"""The rows and columns of a tile on tensor cores, the steps of its sums at a time, and the elements that are
read at a time."""
_STAGES = 4
"""The number of steps in shared memory: one is multiplied while the others are read."""


class _Matrix(NamedTuple):
    """The strides of a matrix."""

    row: int
    column: int


def grouped_launches(operation: Grouped, tensors: Sequence[GraphTensor]) -> list[Launch]:
    """The launches of either product."""
    text, shared = _source(operation, tensors), _shared_bytes(operation, tensors)
    (experts,), (step,) = tensors[2].dims, tensors[2].strides
    a, b, offsets, y, workspace = map(Pointer, range(5))
    ends = (offsets, workspace, experts, step, tensors[0].dims[0], _tile(tensors))
    numbers = _numbers(operation, tensors).values()
    blocks = min(_tiles(operation, tensors), LARGEST_GRID)
    return [
        Launch("sort_ends", text, (1,), (MOST_THREADS,), ends),
        Launch("grouped", text, (blocks,), (THREADS,), (a, b, workspace, y, *numbers), shared=shared),
    ]


def grouped_workspace(operation: Grouped, tensors: Sequence[GraphTensor]) -> int:
    """Bytes for the ends of the groups, and for the number of tiles up to each end."""
    del operation
    return 2 * (tensors[2].dims[0] + 1) * DType.INT64.itemsize


def _shared_bytes(operation: Grouped, tensors: Sequence[GraphTensor]) -> int:
    """Bytes of shared memory that a block is given when it is launched."""
    dtype = tensors[0].dtype
    if not dtype.is_half:
        return 0
    a, b, _ = _matrices(operation, tensors)
    lines = [(_WIDE_TILE, _DEPTH) if along else (_DEPTH, _WIDE_TILE) for along in (a.column == 1, b.row == 1)]
    stages = _STAGES * dtype.itemsize * sum(count * (size + _VECTOR) for count, size in lines)
    return max(stages, DType.FLOAT32.itemsize * _WIDE_TILE * (_WIDE_TILE + _VECTOR))


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
    """The two matrices that are multiplied for each group, and the result."""
    tokens, other, result = (_Matrix(*tensors[number].strides[-2:]) for number in (0, 1, 3))
    forward = isinstance(operation, GroupedMatMul)
    return tokens if forward else _Matrix(tokens.column, tokens.row), other, result


def _source(operation: Grouped, tensors: Sequence[GraphTensor]) -> str:
    """The kernels in CUDA C++."""
    a, b, y = (C_TYPES[tensors[number].dtype] for number in (0, 1, 3))
    numbers = parameters_of(_numbers(operation, tensors))
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
_FORWARD = f"""const long long* tiles = ends + experts + 1;
    {block_loop("tile", "tiles[experts] * broad")} {{
        long long down = tile;
        {division("column", "down", "broad", "size", "long long")}
        long long group = 0, last = experts;  // the first group with a tile after it
        while (group < last) {{
            const long long middle = (group + last) / 2;
            if (tiles[middle] > down) last = middle; else group = middle + 1;
        }}
        const long long start = group ? ends[group - 1] : 0, before = group ? tiles[group - 1] : 0;
        const bool given = group < experts;  // else 0 is stored
        multiply(all_a + start * a_row, all_b + (given ? group * expert_step : 0), all_y + start * y_row,
                 (down - before) * size, column, ends[group] - start, columns, given ? inner : 0,
                 a_row, a_column, b_row, b_column, y_row, y_column);
    }}"""
_BACKWARD = f"""const long long tall = (inner + size - 1) / size;
    {block_loop("tile", "experts * tall * broad")} {{
        long long group = tile;
        {division("column", "group", "broad", "size", "long long")}
        {division("row", "group", "tall", "size", "long long")}
        const long long start = group ? ends[group - 1] : 0;
        multiply(all_a + start * a_column, all_b + start * b_row, all_y + group * expert_step,
                 row, column, inner, columns, ends[group] - start,
                 a_row, a_column, b_row, b_column, y_row, y_column);
    }}"""


def _tile_source(operation: Grouped, tensors: Sequence[GraphTensor]) -> str:
    """C++ that defines `multiply`, by which a block computes a tile: see `tile_source`."""
    given = [tensors[number] for number in (0, 1, 3)]
    dtype, y = tensors[0].dtype, tensors[3].dtype
    if not dtype.is_half:
        return tile_source(given, operation.compute((dtype,)))
    a, b, _ = _matrices(operation, tensors)
    numbers = {
        "SIZE": _WIDE_TILE,
        "DEPTH": _DEPTH,
        "STAGES": _STAGES,
        "A_ALONG": int(a.column == 1),
        "A_WIDE": int(_is_wide(tensors[0])),
        "B_ALONG": int(b.row == 1),
        "B_WIDE": int(_is_wide(tensors[1])),
        "Y_WIDE": int(_is_wide(tensors[3]) and tensors[3].strides[-1] == 1),
    }
    constants = " ".join(f"constexpr int {name} = {value};" for name, value in numbers.items())
    instructions = INSTRUCTIONS.replace("{type}", "bf16" if dtype is DType.BFLOAT16 else "f16")
    tile = _TENSOR_TILE.replace("{y}", C_TYPES[y]).replace("{store}", store(y, "sum"))
    return f"{CONVERSIONS}\n{constants}\n{instructions}{tile}"


def _is_wide(tensor: GraphTensor) -> bool:
    """Whether eight neighbouring elements can be read or stored at once, from any row or expert on."""
    *others, contiguous = sorted(tensor.strides, reverse=True)
    # A group begins at any row, so the tokens' rows must not be the contiguous dim.
    return contiguous == 1 != tensor.strides[0] and all(step % _VECTOR == 0 for step in others)


INSTRUCTIONS = r"""
// Four matrices of 8 x 8, perhaps transposed. Lane n points to row n % 8 of matrix n / 8.
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
// Starts to copy up to 16 bytes to shared memory, and fills what is left of 16 with zeros.
__device__ __forceinline__ void start_copy(void* to, const void* from, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
        :: "r"((unsigned)__cvta_generic_to_shared(to)), "l"(from), "r"(bytes) : "memory");
}
// The copies that were started since the last call are one group.
__device__ __forceinline__ void end_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits for all groups but the last COUNT.
template <int COUNT> __device__ __forceinline__ void wait_for_groups() {
    asm volatile("cp.async.wait_group %0;" :: "n"(COUNT) : "memory");
}
"""
"""C++ before a kernel: functions for tensor cores, and for asynchronous copies to shared memory."""
_TENSOR_TILE = r"""
typedef unsigned short Half;
struct alignas(16) Eight { Half of[8]; };
// In shared memory, an operand's contiguous dim lies along the rows. They are longer by eight elements, so
// that eight rows begin in different banks. ALONG: the contiguous dim is the one that is summed over.
template <bool ALONG> struct Form {
    static constexpr int row = (ALONG ? DEPTH : SIZE) + 8, packs = (ALONG ? DEPTH : SIZE) / 8;
    static constexpr int elements = (ALONG ? SIZE : DEPTH) * row;
};
constexpr int PARTS = SIZE * DEPTH / 8 / 256;

// An operand, whose tile a block reads step by step. WIDE: eight neighbours can be read at once, and are
// copied asynchronously. Else a thread keeps them in registers from `start` to `finish`.
template <bool ALONG, bool WIDE> struct Operand {
    typedef Form<ALONG> F;
    const Half* at[PARTS];
    int there[PARTS];  // the elements of each part that exist, as far as the other dim says
    long long left;    // the elements of the dim that is summed over, from the next step on
    const long long inner_step, step;
    Eight parts[WIDE ? 1 : PARTS];

    __device__ __forceinline__ Operand(
        const Half* from, long long outer, long long outers, long long inners,
        long long outer_step, long long inner_step)
        : left(inners), inner_step(inner_step), step(ALONG ? inner_step : outer_step) {
        #pragma unroll
        for (int n = 0; n < PARTS; ++n) {
            const long long o = outer + (ALONG ? line(n) : pack(n)), beyond = outers - o;
            there[n] = beyond <= 0 ? 0 : ALONG || beyond >= 8 ? 8 : (int)beyond;
            at[n] = from + (there[n] ? o * outer_step : 0) + (ALONG ? pack(n) : line(n)) * inner_step;
        }
    }
    static __device__ __forceinline__ int line(int n) { return (threadIdx.x + 256 * n) / F::packs; }
    static __device__ __forceinline__ int pack(int n) { return (threadIdx.x + 256 * n) % F::packs * 8; }

    __device__ __forceinline__ void start(Eight* tile) {
        #pragma unroll
        for (int n = 0; n < PARTS; ++n) {
            int count = there[n];
            if (left < DEPTH) {
                const int beyond = (int)left - (ALONG ? pack(n) : line(n));
                count = beyond <= 0 ? 0 : ALONG && beyond < count ? beyond : count;
            }
            if constexpr (WIDE) {
                start_copy(tile + line(n) * (F::row / 8) + pack(n) / 8, at[n], 2 * count);
            } else {
                #pragma unroll
                for (int e = 0; e < 8; ++e) parts[n].of[e] = e < count ? at[n][e * step] : (Half)0;
            }
            at[n] += DEPTH * inner_step;
        }
        left -= DEPTH;
    }
    __device__ __forceinline__ void finish(Eight* tile) {
        if constexpr (!WIDE)
            #pragma unroll
            for (int n = 0; n < PARTS; ++n) tile[line(n) * (F::row / 8) + pack(n) / 8] = parts[n];
    }
};
struct alignas(16) Results { {y} of[8]; };
// The place to which a lane points for `matrices`, in 16 x 16 elements whose lines are `row` apart. Of the
// four matrices, the odd ones lie beside the even ones, and the last two below the first two; with ODD_BELOW,
// the odd ones lie below, and the last two beside. PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating
// point type", figures "fragment layout for matrix A" and "for matrix B": in a, the odd ones have later rows;
// in b, they are further along the dim that is summed over, and the last two are another fragment.
template <bool ODD_BELOW> __device__ __forceinline__ int place_of_lane(int row, int lane) {
    return ODD_BELOW ? lane % 16 * row + lane / 16 * 8
                     : (lane % 8 + lane / 16 * 8) * row + lane / 8 % 2 * 8;
}
// Where sum `n` of a lane lies in 16 x 8 elements: the same section of PTX ISA, figure "fragment layout for
// accumulator matrix C/D".
__device__ __forceinline__ int row_of_sum(int lane, int n) { return lane / 4 + n / 2 * 8; }
__device__ __forceinline__ int column_of_sum(int lane, int n) { return lane % 4 * 2 + n % 2; }
// Eight warps, two below each other and four side by side, compute 64 x 32 elements each.
__device__ __forceinline__ void multiply(
    const Half* a, const Half* b, {y}* y, long long row, long long column,
    long long rows, long long columns, long long inner,
    long long a_row, long long a_column, long long b_row, long long b_column,
    long long y_row, long long y_column) {
    typedef Form<A_ALONG> A;
    typedef Form<B_ALONG> B;
    extern __shared__ Eight stages[];
    constexpr int behind_a = A::elements / 8, stage = behind_a + B::elements / 8;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, down = warp / 4 * 64, across = warp % 4 * 32;
    float sums[4][4][4] = {};
    Operand<A_ALONG, A_WIDE> of_a(a, row, rows, inner, a_row, a_column);
    Operand<B_ALONG, B_WIDE> of_b(b, column, columns, inner, b_column, b_row);
    const long long steps = (inner + DEPTH - 1) / DEPTH;
    auto tile_of = [&](long long step) { return stages + step % STAGES * stage; };
    auto start = [&](long long step) {
        if (step < steps) {
            of_a.start(tile_of(step));
            of_b.start(tile_of(step) + behind_a);
        }
        end_group();
    };
    auto finish = [&](long long step) {
        if (step < steps) {
            of_a.finish(tile_of(step));
            of_b.finish(tile_of(step) + behind_a);
        }
    };
    for (int step = 0; step < STAGES - 1; ++step) {
        start(step);
        finish(step);
    }
    for (long long step = 0; step < steps; ++step) {
        wait_for_groups<STAGES - 2>();
        __syncthreads();  // this step is in shared memory, and no thread multiplies the one before any more
        start(step + STAGES - 1);
        const Half *tile_a = (const Half*)tile_of(step), *tile_b = tile_a + A::elements;
        #pragma unroll
        for (int k = 0; k < DEPTH; k += 16) {
            unsigned left[4][4], right[2][4];
            #pragma unroll
            for (int n = 0; n < 4; ++n) {
                const int m = down + 16 * n;
                const Half* from = tile_a + (A_ALONG ? m * A::row + k : k * A::row + m);
                matrices<!A_ALONG>(left[n], from + place_of_lane<A_ALONG>(A::row, lane));
            }
            #pragma unroll
            for (int n = 0; n < 2; ++n) {
                const int m = across + 16 * n;
                const Half* from = tile_b + (B_ALONG ? m * B::row + k : k * B::row + m);
                matrices<!B_ALONG>(right[n], from + place_of_lane<!B_ALONG>(B::row, lane));
            }
            #pragma unroll
            for (int n = 0; n < 16; ++n)
                add_product(sums[n / 4][n % 4], left[n / 4],
                            right[n % 4 / 2][n % 2 * 2], right[n % 4 / 2][n % 2 * 2 + 1]);
        }
        finish(step + STAGES - 1);
    }
    __syncthreads();
    // The sums go through shared memory, so that neighbours are stored together.
    constexpr int across_tile = SIZE + 8;
    float* tile = (float*)stages;
    #pragma unroll
    for (int n = 0; n < 64; n += 2) {
        const int i = down + n / 16 * 16 + row_of_sum(lane, n % 4);
        const int j = across + n / 4 % 4 * 8 + column_of_sum(lane, n % 4);
        const float* pair = sums[n / 16][n / 4 % 4] + n % 4;
        *(float2*)(tile + i * across_tile + j) = make_float2(pair[0], pair[1]);
    }
    __syncthreads();
    for (int n = threadIdx.x; n < SIZE * SIZE / 8; n += 256) {
        const long long i = row + n / (SIZE / 8), j = column + n % (SIZE / 8) * 8;
        if (i >= rows) break;
        const float* found = tile + n / (SIZE / 8) * across_tile + n % (SIZE / 8) * 8;
        {y}* to = y + i * y_row + j * y_column;
        Results results;
        #pragma unroll
        for (int e = 0; e < 8; ++e) {
            const float sum = found[e];
            results.of[e] = {store};
        }
        if (Y_WIDE && j + 8 <= columns) {
            *(Results*)to = results;
        } else {
            #pragma unroll
            for (int e = 0; e < 8; ++e) if (j + e < columns) to[e * y_column] = results.of[e];
        }
    }
    __syncthreads();  // the next tile uses the memory again
}
"""


implement(
    GroupedMatMul,
    GroupedMatMulBackwardWeights,
    launchers=kernels(grouped_launches, grouped_workspace),
)
