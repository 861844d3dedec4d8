"""Top-k and sorting on CUDA: a kernel of our own, in which a block takes one line after the other.

Elements are compared by keys: unsigned numbers of as many bits, the best has the least.
If a line is longer than a block, the wanted elements are found first: the key of the last
wanted one is found eight bits at a time, by counting. They are then put in order in the
workspace: by counting the better ones of each, or, if there are many, by a stable radix
sort.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from cudnn_actor.engines.cuda.kernels.axes import extent
from cudnn_actor.engines.cuda.kernels.element_types import WORD_TYPES
from cudnn_actor.engines.cuda.kernels.index_code import block_loop, indexing, is_wide
from cudnn_actor.engines.cuda.kernels.kernel import (
    FEW_BLOCKS,
    MOST_THREADS,
    THREADS,
    WARP,
    Launch,
    arguments_of,
    power_of_two,
)
from cudnn_actor.engines.cuda.kernels.walks import Walk
from cudnn_actor.engines.cuda.operations.implementation import implement, kernels
from cudnn_actor.protocol.operations import GraphTensor, TopK
from cudnn_actor.protocol.types.dtypes import DType

__all__ = ["top_k_launches", "top_k_workspace"]

_LONG = 1 << 13

_INFINITY = {
    DType.FLOAT64: 0x7FF0000000000000,
    DType.FLOAT32: 0x7F800000,
    DType.FLOAT16: 0x7C00,
    DType.BFLOAT16: 0x7F80,
}


def top_k_launches(operation: TopK[int], tensors: Sequence[GraphTensor]) -> list[Launch]:
    """The launch of a top-k; none if there are no elements."""
    walk = _lines(operation, tensors)
    if not walk.total or not operation.k:
        return []
    axis = operation.axis % len(tensors[0].dims)
    length = tensors[0].dims[axis]
    numbers = (length, operation.k, *(tensor.strides[axis] for tensor in tensors), *walk.numbers.values())
    arguments = arguments_of(len(tensors) + 1, *numbers)  # the workspace is the last
    grid, block = (min(walk.total, FEW_BLOCKS),), (_threads(length),)
    return [Launch("top_k", _source(operation, tensors, walk), grid, block, arguments)]


def top_k_workspace(operation: TopK[int], tensors: Sequence[GraphTensor]) -> int:
    """Bytes for two lists of keys and places for each block."""
    walk = _lines(operation, tensors)
    pair = 4 * (1 + (tensors[0].dtype.itemsize > 4)) + (8 if _is_wide(tensors) else 4)
    return min(walk.total, FEW_BLOCKS) * 2 * operation.k * pair


def _lines(operation: TopK[int], tensors: Sequence[GraphTensor]) -> Walk:
    """The walk over the lines, with the offset of each in the tensors."""
    axis = operation.axis % len(tensors[0].dims)
    others = [n for n in range(len(tensors[0].dims)) if n != axis]
    names = ("x", "values", "indices")
    strides = {
        name: [tensor.strides[n] for n in others] for name, tensor in zip(names, tensors, strict=False)
    }
    return Walk.over("t", [tensors[0].dims[n] for n in others], **strides)


def _threads(length: int) -> int:
    """The threads of a block: a power of two."""
    if length >= _LONG:
        return MOST_THREADS
    return min(THREADS, max(WARP, power_of_two(length)))


def _is_wide(tensors: Sequence[GraphTensor]) -> bool:
    spans = (1 + extent(tensor.dims, tensor.strides) for tensor in tensors)
    return is_wide(*spans, math.prod(tensors[0].dims), sums=True)


def _source(operation: TopK[int], tensors: Sequence[GraphTensor], walk: Walk) -> str:
    """The kernel in CUDA C++."""
    x = tensors[0]
    bits, stored = 8 * x.dtype.itemsize, WORD_TYPES[x.dtype.itemsize]
    with_indices = len(tensors) > 2
    return _SOURCE.format(
        indexing=indexing(wide=_is_wide(tensors)),
        key="unsigned long long" if bits > 32 else "unsigned int",
        stored=stored,
        bits=bits,
        mask=f"{(1 << bits) - 1}ull",
        ordered=_sort_key(x.dtype, bits),
        inverted="~" if operation.largest else "",
        in_order="true" if operation.in_order else "false",
        indices="long long* indices, " if with_indices else "",
        indices_step=", long long indices_step" if with_indices else "",
        lines=walk.parameters,
        each_line=block_loop("line", "t_count"),
        begin=walk.at("line"),
        put_index="indices[indices_at + at * (I)indices_step] = place;" if with_indices else "",
        threads=MOST_THREADS,
        warps=MOST_THREADS // WARP,
    )


def _sort_key(dtype: DType, bits: int) -> str:
    """The C expression of a number from an element's bits, `raw`: it is larger for a larger element."""
    sign = f"{1 << bits - 1}ull"
    if dtype is DType.BOOL:
        return "raw != 0"
    if not dtype.is_floating:
        return f"raw ^ {sign}" if dtype.numpy.kind == "i" else "raw"
    magnitude = f"(raw & {(1 << bits - 1) - 1}ull)"
    number = f"!{magnitude} ? {sign} : raw & {sign} ? ~raw : raw | {sign}"
    return f"{magnitude} > {_INFINITY[dtype]}ull ? ~0ull : {number}"


# The kernel adds up whole numbers, whose sums are the same in any order, so it uses none of the orders of
# `reduction_code`: a vote counts the elements of a warp, threads add to the same place, and `scan` has a
# result for each bin.
_SOURCE = """{indexing}
typedef {key} Key;
typedef {stored} Stored;
__device__ __forceinline__ Key key_of(Stored raw_bits) {{
    const unsigned long long raw = raw_bits;
    const unsigned long long ordered = {ordered};
    return (Key)({inverted}ordered & {mask});
}}
__device__ __forceinline__ void add(int* place) {{ atomicAdd(place, 1); }}
__device__ __forceinline__ void add(long long* place) {{ atomicAdd((unsigned long long*)place, 1ull); }}
// The number of threads before this one for which `mine` is true; `all` gets the number of all of them.
__device__ I before(bool mine, I* all) {{
    __shared__ int counts[32];
    const int warp = threadIdx.x / 32, warps = blockDim.x / 32;
    const unsigned votes = __ballot_sync(~0u, mine);
    if (threadIdx.x % 32 == 0) counts[warp] = __popc(votes);
    __syncthreads();
    I sum = __popc(votes & ((1u << threadIdx.x % 32) - 1));
    *all = 0;
    for (int other = 0; other < warps; ++other) {{
        if (other < warp) sum += counts[other];
        *all += counts[other];
    }}
    __syncthreads();
    return sum;
}}
// Replaces each of 256 bins by the sum of all bins before it. The second half of `bins` is scratch memory.
__device__ void scan(I* bins) {{
    for (int apart = 1, from = 0; apart < 256; apart *= 2, from ^= 256) {{
        __syncthreads();
        for (int b = threadIdx.x; b < 256; b += blockDim.x)
            bins[(from ^ 256) + b] = bins[from + b] + (b >= apart ? bins[from + b - apart] : 0);
    }}
    __syncthreads();  // eight steps: the sums up to each bin are in the first half
    for (int b = threadIdx.x; b < 256; b += blockDim.x) bins[256 + b] = b ? bins[b - 1] : 0;
    __syncthreads();
    for (int b = threadIdx.x; b < 256; b += blockDim.x) bins[b] = bins[256 + b];
    __syncthreads();
}}
extern "C" __global__ void __launch_bounds__({threads}) top_k(
    const Stored* __restrict__ x, Stored* __restrict__ values, {indices}char* workspace,
    long long length, long long k, long long x_step, long long values_step{indices_step}, {lines}) {{
    __shared__ I bins[512];
    __shared__ unsigned char counts[{warps}][256];
    __shared__ Key shared[{threads}];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    Key* keys = (Key*)workspace + blockIdx.x * 2 * k;
    I* places = (I*)(workspace + gridDim.x * 2 * k * sizeof(Key)) + blockIdx.x * 2 * k;
    {each_line} {{
        {begin}
        const I size = (I)length, wanted = (I)k;
        #define KEY(place) key_of(x[x_at + (place) * (I)x_step])
        const bool few = {in_order} && size <= (I)blockDim.x;
        if (!few && wanted < size) {{
            // Find the key of the last wanted element, and how many elements with that key are wanted.
            Key known = 0, mask = 0;
            I left = wanted;
            for (int shift = {bits} - 8; shift >= 0; shift -= 8) {{
                for (int b = threadIdx.x; b < 256; b += blockDim.x) bins[b] = 0;
                __syncthreads();
                for (I j = threadIdx.x; j < size; j += blockDim.x) {{
                    const Key key = KEY(j);
                    if ((key & mask) == known) add(&bins[(int)(key >> shift & 255)]);
                }}
                scan(bins);
                int low = 0;
                for (int half = 128; half; half /= 2) if (bins[low + half] < left) low += half;
                left -= bins[low];
                known |= (Key)low << shift;
                mask |= (Key)255 << shift;
                __syncthreads();
            }}
            I kept = 0, equals = 0;
            for (I start = 0; start < size; start += blockDim.x) {{
                const I j = start + threadIdx.x;
                const Key key = j < size ? KEY(j) : 0;
                I of_equals, of_kept;
                const bool equal = j < size && key == known;
                const I earlier = equals + before(equal, &of_equals);
                const bool keep = j < size && (key < known || (equal && earlier < left));
                const I at = kept + before(keep, &of_kept);
                if (keep) keys[at] = key, places[at] = j;
                equals += of_equals, kept += of_kept;
            }}
        }} else if (!few) {{
            for (I j = threadIdx.x; j < size; j += blockDim.x) keys[j] = KEY(j), places[j] = j;
        }}
        __syncthreads();
        const I count = few ? size : wanted;
        if ({in_order} && count <= (I)blockDim.x) {{
            const I j = threadIdx.x;
            const Key own = j < count ? (few ? KEY(j) : keys[j]) : 0;
            const I place = few || j >= count ? j : places[j];
            shared[j] = own;
            __syncthreads();
            I at = 0;
            for (I other = 0; other < count; ++other)
                at += shared[other] < own || (shared[other] == own && other < j);
            if (j < count && at < wanted) {{
                values[values_at + at * (I)values_step] = x[x_at + place * (I)x_step];
                {put_index}
            }}
            __syncthreads();
            continue;
        }}
        I from = 0;
        for (int shift = 0; {in_order} && shift < {bits}; shift += 8) {{
            for (int b = threadIdx.x; b < 256; b += blockDim.x) bins[b] = 0;
            for (int b = threadIdx.x; b < 256 * warps; b += blockDim.x) counts[b / 256][b % 256] = 0;
            __syncthreads();
            for (I j = threadIdx.x; j < count; j += blockDim.x)
                add(&bins[(int)(keys[from + j] >> shift & 255)]);
            __syncthreads();
            const bool alike = bins[(int)(keys[from] >> shift & 255)] == count;
            scan(bins);
            if (alike) continue;
            const I to = wanted - from;
            for (I start = 0; start < count; start += blockDim.x) {{
                const I j = start + threadIdx.x;
                const bool there = j < count;
                const Key key = there ? keys[from + j] : 0;
                const int digit = (int)(key >> shift & 255);
                unsigned peers = __ballot_sync(~0u, there);
                #pragma unroll
                for (int bit = 0; bit < 8; ++bit) {{
                    const unsigned votes = __ballot_sync(~0u, digit >> bit & 1);
                    peers &= digit >> bit & 1 ? votes : ~votes;
                }}
                const int rank = __popc(peers & ((1u << lane) - 1));
                if (there && rank == 0) counts[warp][digit] = (unsigned char)__popc(peers);
                __syncthreads();
                if (there) {{
                    I at = bins[digit] + rank;
                    for (int other = 0; other < warp; ++other) at += counts[other][digit];
                    keys[to + at] = key, places[to + at] = places[from + j];
                }}
                __syncthreads();
                for (int b = threadIdx.x; b < 256; b += blockDim.x)
                    for (int other = 0; other < warps; ++other) {{
                        bins[b] += counts[other][b];
                        counts[other][b] = 0;
                    }}
                __syncthreads();
            }}
            from = to;
        }}
        for (I at = threadIdx.x; at < wanted; at += blockDim.x) {{
            const I place = places[from + at];
            values[values_at + at * (I)values_step] = x[x_at + place * (I)x_step];
            {put_index}
        }}
        __syncthreads();
    }}
}}
"""


implement(TopK, launchers=kernels(top_k_launches, top_k_workspace), exact=True)
