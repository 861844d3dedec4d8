"""Attention on CUDA: cuDNN's fused attention, and kernels of our own for what it does not take.

cuDNN's takes half types, and heads of a multiple of 8 features. Its own dropout
draws other numbers than ours, so it gets ours: a tensor of 0 and 1 for the
weights, which a kernel writes before. Our kernels take every floating-point type
and layout, and up to 1,024 features: a warp for each query, key or element of
the bias's gradient, with sums in float32 (float64 of float64). They use no
tensor cores.
https://docs.nvidia.com/deeplearning/cudnn/frontend/latest/operations/Attention.html
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cudnn_actor.engines.cuda.library.libraries import libraries
from cudnn_actor.engines.cuda.operations.random import PHILOX
from cudnn_actor.engines.cuda.plans.frontend_graph import FrontendGraph, Refused, data_type
from cudnn_actor.engines.cuda.plans.kernels import (
    C_TYPES,
    PREAMBLE,
    Computed,
    Constant,
    Expression,
    Leaf,
    Value,
    load,
    store,
)
from cudnn_actor.protocol.dtypes import DType
from cudnn_actor.protocol.operations import (
    Attention,
    AttentionBackward,
    GraphTensor,
    PointwiseMode,
    RandomBernoulli,
)
from cudnn_actor.protocol.operations.attention import alibi_slopes
from cudnn_actor.protocol.operations.random import keeping

__all__ = ["attention_kernels", "attention_masks", "attention_operands", "lower_attention", "source"]

AnyAttention = Attention[int] | AttentionBackward[int]

_WARPS, _MOST_BLOCKS = 8, 1 << 30
_MOST_FEATURES = 1024
"""A warp keeps a row in registers. With twice as many, the compiler takes five times as long."""
_LENGTHS = ("lengths_q", "lengths_kv")
_TILE = 128
"""cuDNN's backward pass can give NaN for keys that are not a multiple of this, unless it is given lengths."""


# cuDNN's.


def lower_attention(graph: FrontendGraph, operation: AnyAttention) -> None:
    """Add attention to a graph of cuDNN's frontend. Raises `Refused`."""
    q, k = graph.spec(operation.q), graph.spec(operation.k)
    common = {name: graph.tensor(uid) for name, uid in operation.named(("q", "k", "v", "bias"))}
    common |= {"attn_scale": operation.effective_scale(q.dims[3]), **attention_masks(operation, q, k)}
    lengths = dict(operation.named(_LENGTHS))
    if len(lengths) == 1:
        raise Refused("cuDNN takes lengths of queries and keys only together")
    if lengths:
        of_batch, ones = [q.dims[0], 1, 1, 1], [1, 1, 1, 1]
        q_lengths, kv_lengths = (graph.tensor(uid, of_batch, ones) for uid in lengths.values())
        common |= {"use_padding_mask": True, "seq_len_q": q_lengths, "seq_len_kv": kv_lengths}
    if operation.state is not None:
        if not isinstance(operation, Attention):
            raise Refused("cuDNN's gradient of attention with a mask for dropout is wrong (9.19)")
        common["dropout"] = graph.tensor(operation.state), graph.number(1 / (1 - operation.dropout))
    if isinstance(operation, Attention):
        found = graph.pygraph.sdpa(generate_stats=operation.statistics is not None, **common)
    else:
        if operation.dbias is not None:
            spec = graph.spec(operation.dbias)
            common["dBias"] = graph.pygraph.tensor(
                dim=list(spec.dims), stride=list(spec.strides), data_type=data_type(spec.dtype)
            )
        read = {"o": operation.y, "dO": operation.dy, "stats": operation.statistics}
        gradients = graph.pygraph.sdpa_backward(
            **{name: graph.tensor(uid) for name, uid in read.items()},
            use_deterministic_algorithm=graph.numerics.deterministic,
            **common,
        )
        found = (*gradients, common.get("dBias"))
    graph.write_all(operation, found)


def attention_masks(operation: AnyAttention, q: GraphTensor, k: GraphTensor) -> dict[str, Any]:
    """cuDNN's options for what each position sees, and for ALiBi. Raises `Refused`."""
    (_, heads, rows, _), columns = q.dims, k.dims[2]
    left, right = operation.bounds(rows, columns)
    if operation.causal and rows == 1:
        raise Refused("cuDNN's causal mask is wrong for a single query")
    masks: dict[str, Any] = {"use_causal_mask": operation.causal}
    if left is not None:
        masks["diagonal_band_left_bound"] = left + 1  # it counts the position itself
    if right is not None and not operation.causal:
        masks["diagonal_band_right_bound"] = right
    if operation.slopes is not None:
        if operation.slopes != alibi_slopes(heads):
            raise Refused("cuDNN takes no other slopes than the paper's")
        if right != 0:
            raise Refused("cuDNN's ALiBi is causal")
        masks["use_alibi_mask"] = True
    return masks


def attention_operands(operation: AnyAttention, tensors: Mapping[str, GraphTensor]) -> dict[str, Computed]:
    """The lengths that cuDNN must get: both or none, none beyond the tensors, and at least one key.

    It computes NaN without keys, even where there are no queries, and takes what lies behind the keys for
    keys if their number is too large. Without keys, the number of queries becomes 0 instead.

    In the place of dropout's state, it gets which weights are kept. Raises `Refused`.
    """
    q, k = tensors["q"], tensors["k"]
    left, _ = operation.bounds(q.dims[2], k.dims[2])
    if left is not None and ("lengths_kv" in tensors or q.dims[2] > k.dims[2]):
        raise Refused("it is not documented what cuDNN gives to a query whose window has no key")
    found = _lengths(operation, tensors)
    if "state" in tensors:
        dims = (*q.dims[:3], k.dims[2])
        kept: RandomBernoulli[str] = RandomBernoulli(
            state="state", y="y", dims=dims, dtype=q.dtype, probability=1 - operation.dropout
        )
        found["state"] = Computed(kept, ("state",), dims, q.dtype)
    return found


def _lengths(operation: AnyAttention, tensors: Mapping[str, GraphTensor]) -> dict[str, Computed]:
    q, k = tensors["q"], tensors["k"]
    given = [name for name in _LENGTHS if name in tensors]
    uneven = k.dims[2] % _TILE != 0 or q.dims[2] == 1
    if not given and not (isinstance(operation, AttentionBackward) and uneven):
        return {}
    first, second = Leaf(0, DType.INT32), Leaf(1, DType.INT32)
    of_q: Value = _clipped(first, 0, q.dims[2]) if "lengths_q" in given else Constant(q.dims[2])
    of_kv: Value = Constant(k.dims[2])
    if "lengths_kv" in given:
        of_kv = _clipped(first, 1, k.dims[2])
        some = _clipped(second if "lengths_q" in given else first, 0, 1)
        of_q = Expression(PointwiseMode.MUL, (of_q, some), compute=DType.INT64)
    dims, of_keys = (q.dims[0],), tuple(name for name in given if name == "lengths_kv")
    return {
        "lengths_q": Computed(of_q, tuple(given), dims, DType.INT32),
        "lengths_kv": Computed(of_kv, of_keys, dims, DType.INT32),
    }


def _clipped(value: Value, least: int, most: int) -> Value:
    return Expression(PointwiseMode.CLIP, (value,), (least, most), DType.INT64)


# Our own.


def attention_kernels(
    operation: AnyAttention, tensors: Sequence[GraphTensor], handle: Any
) -> Callable[[Sequence[int]], None]:
    """The launch of attention on tensors of these specs; see `operations.Launcher`. Raises `Refused`."""
    del handle
    given = _given(operation, tensors)
    q, k = given["q"], given["k"]
    if max(q.dims[3], given["v"].dims[3]) > _MOST_FEATURES:
        raise Refused(f"attention on CUDA takes at most {_MOST_FEATURES:,} features a head")
    cupy = libraries().cupy
    module = cupy.RawModule(code=source(operation, tensors), options=("--std=c++17",))
    number = cupy.float64 if q.dtype is DType.FLOAT64 else cupy.float32
    batch, heads, rows, _ = q.dims
    groups, columns = k.dims[1:3]
    left, right = operation.bounds(rows, columns)
    options = (
        rows if left is None else left,
        columns if right is None else right,
        keeping(1 - operation.dropout),
        number(operation.effective_scale(q.dims[3])),
        number(1 / (1 - operation.dropout)),
    )
    numbers = [heads, groups, rows, columns]
    numbers += [number for tensor in given.values() for number in _four(tensor.strides)]
    launches = [("queries", batch * heads * rows)]
    if isinstance(operation, AttentionBackward):
        launches.append(("keys", batch * groups * columns))
        if operation.dbias is not None:
            launches.append(("biases", math.prod(given["dbias"].dims)))
            numbers += given["dbias"].dims[:3]
        else:
            numbers += [1, 1, 1]
    kernels = [
        (module.get_function(name), (min(-(-count // _WARPS), _MOST_BLOCKS),), count)
        for name, count in launches
    ]

    def launch(addresses: Sequence[int]) -> None:
        for kernel, grid, count in kernels:
            kernel(grid, (32 * _WARPS,), (*addresses, count, batch, *numbers, *options))

    return launch


def _given(operation: AnyAttention, tensors: Sequence[GraphTensor]) -> dict[str, GraphTensor]:
    named = operation.named()
    return {name: tensors[number] for name, number in named}


def _four(strides: Sequence[int]) -> list[int]:
    return [*strides, *[0] * (4 - len(strides))]


def source(operation: AnyAttention, tensors: Sequence[GraphTensor]) -> str:
    """The kernels in CUDA C++.

    They depend on dtypes, numbers of features, slopes, and which operands there are.
    """
    given = _given(operation, tensors)
    written = dict(operation.named(operation.outputs))
    pointers = [
        f"{'' if name in written else 'const '}{C_TYPES[tensor.dtype]}* {name}"
        for name, tensor in given.items()
    ]
    names = ["count", "batch", "heads", "groups", "rows", "columns"]
    names += [f"{name}{axis}" for name in given for axis in range(4)]
    if isinstance(operation, AttentionBackward):
        names += [f"biases{axis}" for axis in range(3)]
    names += ["left", "right"]
    numbers = (f"long long {name}" for name in names)
    arguments = ", ".join([*pointers, *numbers, "Natural threshold", "T scale", "T lifted"])
    dtype = given["q"].dtype
    code = [
        f"typedef {'double' if dtype is DType.FLOAT64 else 'float'} T;",
        f"typedef {C_TYPES[dtype]} X;",
        PREAMBLE,
        f"constexpr int D = {given['q'].dims[3]}, E = {given['v'].dims[3]};",
        PHILOX,
        _COMMON.replace("LOAD", load(dtype, "*place")),
        _DROPPING if "state" in given else _KEEPING,
    ]
    if operation.slopes is not None:
        slopes = ", ".join(f"(T){float(slope)!r}" for slope in operation.slopes)
        code.append(f"__device__ const T slopes[] = {{{slopes}}};")
    at = _Code(given, operation)
    bodies = {"queries": _FORWARD} if isinstance(operation, Attention) else _BACKWARD
    for name, body in bodies.items():
        if name != "biases" or "dbias" in given:
            code.append(f'extern "C" __global__ void {name}({arguments}) {{{_EACH}{at.fill(body)}\n}}')
    return "\n".join(code)


class _Code:
    """C expressions of the operands there are."""

    def __init__(self, given: Mapping[str, GraphTensor], operation: AnyAttention) -> None:
        self._given = given
        self._lowered = "" if operation.slopes is None else " - slopes[h] * (T)llabs(i - j)"

    def fill(self, body: str) -> str:
        """A kernel's body with its operands' expressions."""
        bias = "0"
        if "bias" in self._given:
            dims = self._given["bias"].dims
            place = " + ".join(f"{index} * bias{axis}" for axis, index in enumerate("bhij") if dims[axis] > 1)
            bias = f"(T)({load(self._given['bias'].dtype, f'bias[{place or 0}]')})"
        statistics = "statistics[b * statistics0 + h * statistics1 + i * statistics2]"
        words = {
            "BIAS": f"({bias}{self._lowered})",
            "LIMIT_Q": self._length("lengths_q", "rows"),
            "LIMIT_KV": self._length("lengths_kv", "columns"),
            "STATISTICS": statistics,
            "BASE": f"base_of({statistics})",
        }
        for name in ("y", "dq", "dk", "dv", "dbias"):
            if name in self._given:
                words[f"STORE_{name.upper()}"] = store(self._given[name].dtype, "value")
        if "statistics" not in self._given:
            body = body.replace("if (lane == 0) STATISTICS = logarithm;", "")
        for word in sorted(words, key=len, reverse=True):
            body = body.replace(word, words[word])
        return body

    def _length(self, name: str, most: str) -> str:
        if name not in self._given:
            return most
        return f"min(max((long long){name}[b * {name}0], 0ll), {most})"


_COMMON = """
constexpr int ND = (D + 31) / 32, NE = (E + 31) / 32, AT_ONCE = 4;
#define INFINITE (T)__int_as_float(0x7f800000)
__device__ __forceinline__ T get(const X* place) { return (T)(LOAD); }
// A position whose bias is -infinity for all keys has no weights.
__device__ __forceinline__ T base_of(T logarithm) { return logarithm == -INFINITE ? (T)0 : logarithm; }
template <int N, int M> __device__ __forceinline__ void read(
    T (&values)[M], const X* from, long long stride, int lane) {
    #pragma unroll
    for (int n = 0; n < M; ++n) values[n] = n * 32 + lane < N ? get(from + (n * 32 + lane) * stride) : (T)0;
}
template <int N, int M> __device__ __forceinline__ T part(
    const T (&values)[M], const X* with, long long stride, int lane) {
    T sum = 0;
    #pragma unroll
    for (int n = 0; n < M; ++n) {
        if (n * 32 + lane < N) sum += values[n] * get(with + (n * 32 + lane) * stride);
    }
    return sum;
}
template <int N, int M> __device__ __forceinline__ void add(
    T (&values)[M], T factor, const X* with, long long stride, int lane) {
    #pragma unroll
    for (int n = 0; n < M; ++n) {
        if (n * 32 + lane < N) values[n] += factor * get(with + (n * 32 + lane) * stride);
    }
}
__device__ __forceinline__ T over_warp(T value) {
    #pragma unroll
    for (int apart = 16; apart; apart /= 2) value += __shfl_xor_sync(~0u, value, apart);
    return value;
}
"""
_KEEPING = """
#define DRAW(step, b, h, i, j)
#define KEPT(step) true
#define LIFTED(value) (value)
"""
"""Without dropout."""
_DROPPING = """
__device__ __forceinline__ bool is_kept(Natural seed, Natural number, Natural threshold) {
    const Words words = philox(number / 4, 0, seed);
    const unsigned low = number % 2 ? words.of[1] : words.of[0];
    const unsigned high = number % 2 ? words.of[3] : words.of[2];
    return (number % 4 < 2 ? low : high) < threshold;
}
// Each lane draws for one of the next 32 positions, and all of them get to know.
#define DRAW(step, b, h, i, j) \
    if ((step) % 32 == 0) kept = __ballot_sync(~0u, is_kept((Natural)state[0], (Natural)state[state0] \
        + (((Natural)(b) * heads + (h)) * rows + (i)) * columns + (j), threshold));
#define KEPT(step) (kept >> (step) % 32 & 1)
#define LIFTED(value) ((value) * lifted)
"""
_EACH = """
    unsigned kept = 0;
    const int lane = threadIdx.x % 32;
    const long long of_block = blockDim.x / 32, warps = gridDim.x * of_block;
    for (long long item = blockIdx.x * of_block + threadIdx.x / 32; item < count; item += warps) {
"""
"""All lanes of a warp have the same item: shuffles between them are safe."""
_QUERY = """
        const long long i = item % rows, h = item / rows % heads, b = item / rows / heads;
        const long long g = h / (heads / groups);
        const long long start = max(i - left, 0ll), limit = i < LIMIT_Q ? min(LIMIT_KV, i + right + 1) : 0;
        T of_q[ND];
        read<D>(of_q, q + b * q0 + h * q1 + i * q2, q3, lane);
"""
_FORWARD = (
    _QUERY
    + """
        T result[NE] = {}, largest = -INFINITE, total = 0;
        for (long long first = start; first < limit; first += AT_ONCE) {
            DRAW(first - start, b, h, i, first + lane)
            T scores[AT_ONCE], most = largest;
            #pragma unroll
            for (int n = 0; n < AT_ONCE; ++n) {
                const long long j = min(first + n, limit - 1);
                scores[n] = part<D>(of_q, k + b * k0 + g * k1 + j * k2, k3, lane);
            }
            #pragma unroll
            for (int n = 0; n < AT_ONCE; ++n) {
                const long long j = min(first + n, limit - 1);
                scores[n] = over_warp(scores[n]) * scale + BIAS;
                if (first + n >= limit) scores[n] = -INFINITE;
                if (!(scores[n] <= most)) most = scores[n];
            }
            const T base = most == -INFINITE ? (T)0 : most, shrink = exp(largest - base);
            total *= shrink;
            #pragma unroll
            for (int n = 0; n < NE; ++n) result[n] *= shrink;
            #pragma unroll
            for (int n = 0; n < AT_ONCE; ++n) {
                const long long j = min(first + n, limit - 1);
                const T weight = exp(scores[n] - base);
                total += weight;
                if (first + n < limit && KEPT(first - start + n)) {
                    add<E>(result, weight, v + b * v0 + g * v1 + j * v2, v3, lane);
                }
            }
            largest = most;
        }
        const T logarithm = total == 0 ? -INFINITE : largest + log(total);
        if (lane == 0) STATISTICS = logarithm;
        #pragma unroll
        for (int n = 0; n < NE; ++n) if (n * 32 + lane < E) {
            const T value = total == 0 ? (T)0 : LIFTED(result[n] / total);
            y[b * y0 + h * y1 + i * y2 + (n * 32 + lane) * y3] = STORE_Y;
        }
    }"""
)
_BACKWARD = {
    "queries": _QUERY
    + """
        T of_dy[NE], result[ND] = {};
        read<E>(of_dy, dy + b * dy0 + h * dy1 + i * dy2, dy3, lane);
        const T apart = over_warp(part<E>(of_dy, y + b * y0 + h * y1 + i * y2, y3, lane));
        const T logarithm = BASE;
        for (long long first = start; first < limit; first += AT_ONCE) {
            DRAW(first - start, b, h, i, first + lane)
            T scores[AT_ONCE], changes[AT_ONCE];
            #pragma unroll
            for (int n = 0; n < AT_ONCE; ++n) {
                const long long j = min(first + n, limit - 1);
                scores[n] = part<D>(of_q, k + b * k0 + g * k1 + j * k2, k3, lane);
                changes[n] = part<E>(of_dy, v + b * v0 + g * v1 + j * v2, v3, lane);
            }
            #pragma unroll
            for (int n = 0; n < AT_ONCE; ++n) {
                const long long j = min(first + n, limit - 1);
                const T weight = exp(over_warp(scores[n]) * scale + BIAS - logarithm);
                const T change = KEPT(first - start + n) ? LIFTED(over_warp(changes[n])) : (T)0;
                const T slope = weight * (change - apart);
                if (first + n < limit) add<D>(result, slope, k + b * k0 + g * k1 + j * k2, k3, lane);
            }
        }
        #pragma unroll
        for (int n = 0; n < ND; ++n) if (n * 32 + lane < D) {
            const T value = result[n] * scale;
            dq[b * dq0 + h * dq1 + i * dq2 + (n * 32 + lane) * dq3] = STORE_DQ;
        }
    }""",
    "keys": """
        const long long j = item % columns, g = item / columns % groups, b = item / columns / groups;
        const long long start = max(j - right, 0ll), limit = j < LIMIT_KV ? min(LIMIT_Q, j + left + 1) : 0;
        T of_k[ND], of_v[NE], by_k[ND] = {}, by_v[NE] = {};
        read<D>(of_k, k + b * k0 + g * k1 + j * k2, k3, lane);
        read<E>(of_v, v + b * v0 + g * v1 + j * v2, v3, lane);
        for (long long h = g * (heads / groups); h < (g + 1) * (heads / groups); ++h)
            for (long long first = start; first < limit; first += AT_ONCE) {
                DRAW(first - start, b, h, first + lane, j)
                T scores[AT_ONCE], changes[AT_ONCE], aparts[AT_ONCE];
                #pragma unroll
                for (int n = 0; n < AT_ONCE; ++n) {
                    const long long i = min(first + n, limit - 1);
                    const X* row = dy + b * dy0 + h * dy1 + i * dy2;
                    T of_dy[NE];
                    read<E>(of_dy, row, dy3, lane);
                    scores[n] = part<D>(of_k, q + b * q0 + h * q1 + i * q2, q3, lane);
                    changes[n] = part<E>(of_v, row, dy3, lane);
                    aparts[n] = part<E>(of_dy, y + b * y0 + h * y1 + i * y2, y3, lane);
                }
                #pragma unroll
                for (int n = 0; n < AT_ONCE; ++n) {
                    const long long i = min(first + n, limit - 1);
                    const T weight = exp(over_warp(scores[n]) * scale + BIAS - BASE);
                    const T change = KEPT(first - start + n) ? LIFTED(changes[n]) : (T)0;
                    const T slope = weight * over_warp(change - aparts[n]);
                    if (first + n >= limit) continue;
                    add<D>(by_k, slope, q + b * q0 + h * q1 + i * q2, q3, lane);
                    if (KEPT(first - start + n)) {
                        add<E>(by_v, LIFTED(weight), dy + b * dy0 + h * dy1 + i * dy2, dy3, lane);
                    }
                }
            }
        #pragma unroll
        for (int n = 0; n < ND; ++n) if (n * 32 + lane < D) {
            const T value = by_k[n] * scale;
            dk[b * dk0 + g * dk1 + j * dk2 + (n * 32 + lane) * dk3] = STORE_DK;
        }
        #pragma unroll
        for (int n = 0; n < NE; ++n) if (n * 32 + lane < E) {
            const T value = by_v[n];
            dv[b * dv0 + g * dv1 + j * dv2 + (n * 32 + lane) * dv3] = STORE_DV;
        }
    }""",
    "biases": """
        const long long j = item % columns;
        long long rest = item / columns;
        const long long i_ = rest % biases2; rest /= biases2;
        const long long h_ = rest % biases1, b_ = rest / biases1;
        const long long last_b = biases0 == 1 ? batch : b_ + 1, last_h = biases1 == 1 ? heads : h_ + 1;
        const long long last_i = biases2 == 1 ? rows : i_ + 1;
        T value = 0;
        for (long long b = b_; b < last_b; ++b)
            for (long long h = h_; h < last_h; ++h)
                for (long long i = i_; i < last_i; ++i) {
                    if (j >= LIMIT_KV || i >= LIMIT_Q || j > i + right || j < i - left) continue;
                    DRAW(0, b, h, i, j)
                    const long long g = h / (heads / groups);
                    T of_q[ND], of_dy[NE];
                    read<D>(of_q, q + b * q0 + h * q1 + i * q2, q3, lane);
                    read<E>(of_dy, dy + b * dy0 + h * dy1 + i * dy2, dy3, lane);
                    const T score = over_warp(part<D>(of_q, k + b * k0 + g * k1 + j * k2, k3, lane));
                    const T change = part<E>(of_dy, v + b * v0 + g * v1 + j * v2, v3, lane);
                    const T slope = over_warp((KEPT(0) ? LIFTED(change) : (T)0)
                                              - part<E>(of_dy, y + b * y0 + h * y1 + i * y2, y3, lane));
                    value += exp(score * scale + BIAS - BASE) * slope;
                }
        if (lane == 0) dbias[b_ * dbias0 + h_ * dbias1 + i_ * dbias2 + j * dbias3] = STORE_DBIAS;
    }""",
}
