"""The C++ of attention's kernels.

`operations.flash_attention` replaces words in capital letters that depend on which operands there are, such
as `LIMIT_KV` and `STORE_DQ`: see `_Code` there. It puts definitions of types and sizes before this text.
"""

from __future__ import annotations

from cudnn_actor.engines.cuda.kernels.index_code import block_loop, division
from cudnn_actor.engines.cuda.kernels.reduction_code import LARGEST, in_turn, over_lanes

__all__ = ["BACKWARD", "COMMON", "DROPPING", "EACH", "FORWARD", "KEEPING"]

COMMON = """
#define INFINITE (T)__int_as_float(0x7f800000)
constexpr int BESIDE = 16 / sizeof(T);
template <int V> struct alignas(V < BESIDE ? V * sizeof(T) : 16) Pack { T of[V]; };
__device__ __forceinline__ T get(const X* place) { return (T)(LOAD); }
// A position whose bias is -infinity for all keys has no weights.
__device__ __forceinline__ T base_of(T logarithm) { return logarithm == -INFINITE ? (T)0 : logarithm; }

__device__ __forceinline__ int near(long long number) { return (int)min(max(number, -N - 0ll), N + 0ll); }
// `count` rows of a tensor, at least one. Where a tile has more rows, the last one is repeated, so that
// nothing outside the tensor is read. Results of the repeated row have no weight.
struct Rows {
    const X* at;
    long long step, across;
    int count;
    __device__ __forceinline__ const X* operator[](int row) const { return at + min(row, count - 1) * step; }
};

// Which scores of a tile are seen: those of the queries from i0 on and of the keys from j0 on.
struct Seen {
    int least, most, queries, keys;
    __device__ __forceinline__ bool at(int i, int j) const {
        return j - i >= least && j - i <= most && i < queries && j < keys;
    }
    __device__ __forceinline__ bool all() const {
        return least <= 1 - N && most >= N - 1 && queries == N && keys == N;
    }
};
__device__ __forceinline__ Seen seen_from(
    long long i0, long long j0, long long left, long long right, long long limit_q, long long limit_kv) {
    return {near(i0 - j0 - left), near(i0 - j0 + right), near(limit_q - i0), near(limit_kv - j0)};
}

// A block's threads are 8 x 16, a warp's lanes 2 x 16. Two neighbouring lanes read the same columns, and
// every other lane reads the same rows, as in CUTLASS's products without tensor cores: shared memory then
// serves several of a warp's reads of 16 bytes at once.
__device__ __forceinline__ int thread_x() { return threadIdx.x % 32 / 2; }
__device__ __forceinline__ int thread_y() { return threadIdx.x / 32 * 2 + threadIdx.x % 2; }
// A thread computes R neighbouring rows of the M = 8 R rows of a product. Of scores, it has four columns, 16
// apart, so that neighbouring threads read neighbouring rows of the other operand. Of results, it has the C
// columns that `column` gives.
// The numbers of a thread's rows, and of its columns of scores, in a tile whose first one has number `first`.
// These are macros because the compiler gives a kernel other registers if they are functions.
#define PLACE_IN_BLOCK const int tx = thread_x(), ty = thread_y();
#define ROW(first, r) ((first) + ty * R + (r))
#define COLUMN(first, c) ((first) + tx + 16 * (c))
template <int C> struct Width { static constexpr int value = C % 4 == 0 ? 4 : C % 2 == 0 ? 2 : 1; };
template <int C> __device__ __forceinline__ int column(int c) {
    constexpr int V = Width<C>::value;
    return c / V * 16 * V + thread_x() * V + c % V;
}
template <int R, int C, int STEP> __device__ __forceinline__ void multiply(
    T (&sums)[R][C], const T* left, const T* right, int depth) {
    constexpr int V = Width<C>::value;
    left += thread_y() * R;
    right += thread_x() * V;
    #pragma unroll 4
    for (int p = 0; p < depth; ++p) {
        const Pack<R> of_left = *(const Pack<R>*)(left + p * (8 * R + BESIDE));
        #pragma unroll
        for (int n = 0; n < C; n += V) {
            const Pack<V> of_right = *(const Pack<V>*)(right + p * STEP + n * 16);
            #pragma unroll
            for (int r = 0; r < R; ++r)
                #pragma unroll
                for (int v = 0; v < V; ++v) sums[r][n + v] += of_left.of[r] * of_right.of[v];
        }
    }
}
// Copies `depth` features of SLOTS rows to shared memory, where the values of a feature lie side by side. A
// warp reads 8 features of 4 rows, and writes to 32 banks. SPREAD: the four rows that are a thread's columns
// of scores lie side by side.
template <int SLOTS, bool SPREAD> __device__ __forceinline__ void turn(
    T* into, const Rows& rows, int first, int depth) {
    const int t = threadIdx.x;
    #pragma unroll
    for (int down = 0; down < SLOTS; down += 16) {
        const int slot = down + t / 8;
        const X* from = rows[SPREAD ? slot % 4 * 16 + slot / 4 : slot] + (first + t % 8) * rows.across;
        #pragma unroll
        for (int d = 0; d < DEPTH; d += 8)
            if ((SLOTS >= 16 || slot < SLOTS) && (depth == DEPTH || d + t % 8 < depth))
                into[(d + t % 8) * (SLOTS + BESIDE) + slot] = get(from + d * rows.across);
    }
}
// Both functions below overwrite `left` and `right` in shared memory. All threads write a part of them, and
// then read values that other threads wrote. So all threads wait for each other before they write, when no
// thread reads the old values any more, and after that. All threads of a block make the same calls.

// Scores without their factor: the products of a block's own rows with other rows, over all features.
template <int R, int FEATURES> __device__ __forceinline__ void compare(
    T (&sums)[R][4], T* left, T* right, const Rows& own, const Rows& others) {
    #pragma unroll
    for (int n = 0; n < R * 4; ++n) sums[n / 4][n % 4] = 0;
    #pragma unroll 1
    for (int first = 0; first < FEATURES; first += DEPTH) {
        const int depth = FEATURES % DEPTH ? min(DEPTH, FEATURES - first) : DEPTH;
        __syncthreads();
        turn<8 * R, false>(left, own, first, depth);
        turn<N, true>(right, others, first, depth);
        __syncthreads();
        multiply<R, 4, N + BESIDE>(sums, left, right, depth);
    }
}
// Adds some features of the other rows, each row multiplied by its factor, to a thread's sums.
template <int R, int C, int FEATURES> __device__ __forceinline__ void combine(
    T (&sums)[R][C], const T (&factors)[R][4], T* left, T* right, const Rows& others, int feature) {
    constexpr int WIDE = 16 * C, LANES = C % 2 ? 16 : 32, DOWN = THREADS / LANES;
    const int lane = threadIdx.x % LANES;
    PLACE_IN_BLOCK
    #pragma unroll 1
    for (int first = 0; first < N && first < others.count; first += DEPTH) {
        __syncthreads();
        #pragma unroll
        for (int c = 0; c < 4 && first == 0; ++c) {
            Pack<R> some;
            #pragma unroll
            for (int r = 0; r < R; ++r) some.of[r] = factors[r][c];
            *(Pack<R>*)(left + COLUMN(0, c) * (8 * R + BESIDE) + ROW(0, 0)) = some;
        }
        #pragma unroll
        for (int n = 0; n < DEPTH; n += DOWN) {
            const int row = n + threadIdx.x / LANES;
            const X* from = others[first + row] + (feature + lane) * others.across;
            #pragma unroll
            for (int e = 0; e < WIDE; e += LANES)
                if (FEATURES % WIDE == 0 || feature + e + lane < FEATURES)
                    right[row * WIDE + e + lane] = get(from + e * others.across);
        }
        __syncthreads();
        multiply<R, C, WIDE>(sums, left + first * (8 * R + BESIDE), right, DEPTH);
    }
}
// Replaces a thread's values that are not seen. Rows are queries, or keys if TURNED.
template <bool TURNED, int R> __device__ __forceinline__ void hide(
    T (&values)[R][4], const Seen& seen, T by) {
    if (seen.all()) return;
    PLACE_IN_BLOCK
    #pragma unroll
    for (int n = 0; n < 4 * R; ++n) {
        const int own = ROW(0, n / 4), other = COLUMN(0, n % 4);
        if (!seen.at(TURNED ? other : own, TURNED ? own : other)) values[n / 4][n % 4] = by;
    }
}
// A score's gradient: 0 where there is no weight, even if the other values are not finite.
__device__ __forceinline__ T slope_of(T weight, T change, T aside) {
    return weight == 0 ? (T)0 : weight * (change - aside);
}
"""
COMMON += f"""// The sum over the 16 threads of a row.
__device__ __forceinline__ T sum_of_row(T value) {{
    {over_lanes("value", nearest=2)}
    return value;
}}
"""
KEEPING = """
#define DRAW(TURNED)
#define KEPT(n) true
#define LIFTED(value) (value)
"""
"""The macros of a kernel without dropout."""
DROPPING = """
__device__ __forceinline__ bool is_kept(Natural seed, Natural number, Natural threshold) {
    const Words words = philox(number / 4, 0, seed);
    const unsigned low = number % 2 ? words.of[1] : words.of[0];
    const unsigned high = number % 2 ? words.of[3] : words.of[2];
    return (number % 4 < 2 ? low : high) < threshold;
}
// Which of a thread's weights are kept, a bit for each. `first` is the number of the tile's first weight.
template <bool TURNED, int R> __device__ __forceinline__ unsigned draw(
    const Seen& seen, Natural seed, Natural first, Natural columns, Natural threshold) {
    PLACE_IN_BLOCK
    unsigned kept = 0;
    #pragma unroll 1
    for (int n = 0; n < 4 * R; ++n) {
        const int own = ROW(0, n / 4), other = COLUMN(0, n % 4);
        const int i = TURNED ? other : own, j = TURNED ? own : other;
        if (seen.at(i, j) && is_kept(seed, first + i * columns + j, threshold)) kept |= 1u << n;
    }
    return kept;
}
#define DRAW(TURNED) const unsigned kept = draw<TURNED, R>(seen, (Natural)state[0], (Natural)state[state0] \
    + (((Natural)b * heads + h) * rows + i0) * columns + j0, columns, threshold);
#define KEPT(n) (kept >> (n) & 1)
#define LIFTED(value) ((value) * lifted)
"""
EACH = f"""
    T* const own = left_room->of;
    T* const others = right_room->of;
    PLACE_IN_BLOCK
    {block_loop("item", "count")} {{
        long long rest = item;
"""
_PART = f"""{division("b", "rest", "batch", kind="long long")}
        {division("part", "rest", "PARTS", kind="int")}"""
"""The statements that define the matrix of a batch and the part of the columns that a block computes."""
_QUERY = (
    f"""
        {division("h", "rest", "heads", kind="long long")}
        {_PART}"""
    + """
        // The last queries first: with a causal mask, they see the most keys.
        const long long i0 = ((rows - 1) / M - rest) * M, g = h / (heads / groups);
        const long long limit_q = LIMIT_Q, limit_kv = LIMIT_KV;
        const long long start = max(i0 - left, 0ll) / N * N;
        const long long limit = i0 < limit_q ? min(limit_kv, i0 + M + right) : 0;
        const Rows of_q = ROWS_Q;
"""
)
FORWARD = (
    _QUERY
    + """
        T result[R][C] = {}, largest[R], total[R];
        #pragma unroll
        for (int r = 0; r < R; ++r) { largest[r] = -INFINITE; total[r] = 0; }
        for (long long j0 = start; j0 < limit; j0 += N) {
            const Seen seen = seen_from(i0, j0, left, right, limit_q, limit_kv);
            T scores[R][4];
            DRAW(false)
            compare<R, D>(scores, own, others, of_q, ROWS_K);
            #pragma unroll
            for (int n = 0; n < 4 * R; ++n) {
                const long long i = ROW(i0, n / 4), j = COLUMN(j0, n % 4);
                scores[n / 4][n % 4] = scores[n / 4][n % 4] * scale + BIAS;
            }
            hide<false>(scores, seen, -INFINITE);
            #pragma unroll
            for (int r = 0; r < R; ++r) {
                T most = max(max(scores[r][0], scores[r][1]), max(scores[r][2], scores[r][3]));
                """
    + over_lanes("most", LARGEST, nearest=2)
    + """
                most = max(most, largest[r]);
                const T base = base_of(most), shrink = exp(largest[r] - base);
                largest[r] = most;
                total[r] *= shrink;
                #pragma unroll
                for (int c = 0; c < C; ++c) result[r][c] *= shrink;
                #pragma unroll
                for (int c = 0; c < 4; ++c) {
                    const T weight = exp(scores[r][c] - base);
                    total[r] += weight;
                    scores[r][c] = KEPT(r * 4 + c) ? weight : (T)0;
                }
            }
            combine<R, C, E>(result, scores, own, others, ROWS_V, part * 16 * C);
        }
        #pragma unroll
        for (int r = 0; r < R; ++r) {
            const long long i = ROW(i0, r);
            const T sum = sum_of_row(total[r]);
            if (i >= rows) continue;
            const T logarithm = sum == 0 ? -INFINITE : largest[r] + log(sum);
            if (part == 0 && tx == 0) STATISTICS = logarithm;
            #pragma unroll
            for (int c = 0; c < C; ++c) {
                const int e = part * 16 * C + column<C>(c);
                const T value = sum == 0 ? (T)0 : LIFTED(result[r][c] / sum);
                if (e < E) STORE_Y;
            }
        }"""
)
BACKWARD = {
    "queries": _QUERY
    + """
        const Rows of_dy = ROWS_DY;
        T result[R][C] = {}, aside[R], logarithm[R];
        #pragma unroll
        for (int r = 0; r < R; ++r) {
            const long long i = ROW(i0, r);
            T sum = 0;
            for (int e = tx; e < E && i < limit_q; e += 16)
                sum += get(of_dy.at + ROW(0, r) * dy2 + e * dy3)
                    * get(PLACE_OF_Y);
            aside[r] = sum_of_row(sum);
            logarithm[r] = i < limit_q ? BASE : (T)0;
            if (part == 0 && tx == 0 && i < rows) APART = aside[r];
        }
        for (long long j0 = start; j0 < limit; j0 += N) {
            const Seen seen = seen_from(i0, j0, left, right, limit_q, limit_kv);
            T scores[R][4], changes[R][4];
            compare<R, D>(scores, own, others, of_q, ROWS_K);
            compare<R, E>(changes, own, others, of_dy, ROWS_V);
            #pragma unroll
            for (int n = 0; n < 4 * R; ++n) {
                const int r = n / 4, c = n % 4;
                const long long i = ROW(i0, r), j = COLUMN(j0, c);
                scores[r][c] = exp(scores[r][c] * scale + BIAS - logarithm[r]);
            }
            hide<false>(scores, seen, 0);
            DRAW(false)
            #pragma unroll
            for (int n = 0; n < 4 * R; ++n) {
                const int r = n / 4, c = n % 4;
                scores[r][c] = slope_of(scores[r][c], KEPT(n) ? LIFTED(changes[r][c]) : (T)0, aside[r]);
            }
            combine<R, C, D>(result, scores, own, others, ROWS_K, part * 16 * C);
        }
        #pragma unroll
        for (int n = 0; n < C * R; ++n) {
            const int r = n / C, d = part * 16 * C + column<C>(n % C);
            const long long i = ROW(i0, r);
            const T value = result[r][n % C] * scale;
            if (i < rows && d < D) STORE_DQ;
        }""",
    "keys": f"""
        {division("g", "rest", "groups", kind="long long")}
        {_PART}"""
    + """
        const long long j0 = rest * M, limit_q = LIMIT_Q, limit_kv = LIMIT_KV;
        const long long start = max(j0 - right, 0ll) / N * N;
        const long long limit = j0 < limit_kv ? min(limit_q, j0 + M + left) : 0;
        const Rows of_k = ROWS_K, of_v = ROWS_V;
        T by_k[R][C] = {}, by_v[R][F] = {};
        for (long long h = g * (heads / groups); h < (g + 1) * (heads / groups); ++h)
            for (long long i0 = start; i0 < limit; i0 += N) {
                const Seen seen = seen_from(i0, j0, left, right, limit_q, limit_kv);
                const Rows of_q = ROWS_Q, of_dy = ROWS_DY;
                T weights[R][4], factors[R][4], aside[4];
                DRAW(true)
                compare<R, D>(weights, own, others, of_k, of_q);
                #pragma unroll
                for (int c = 0; c < 4; ++c) {
                    const long long i = min(COLUMN(i0, c), limit_q - 1);
                    const T logarithm = BASE;
                    aside[c] = APART;
                    #pragma unroll
                    for (int r = 0; r < R; ++r) {
                        const long long j = ROW(j0, r);
                        weights[r][c] = exp(weights[r][c] * scale + BIAS - logarithm);
                    }
                }
                hide<true>(weights, seen, 0);
                #pragma unroll
                for (int n = 0; n < 4 * R; ++n) {
                    const int r = n / 4, c = n % 4;
                    factors[r][c] = KEPT(n) ? LIFTED(weights[r][c]) : (T)0;
                }
                combine<R, F, E>(by_v, factors, own, others, of_dy, part * 16 * F);
                compare<R, E>(factors, own, others, of_v, of_dy);
                #pragma unroll
                for (int n = 0; n < 4 * R; ++n) {
                    const int r = n / 4, c = n % 4;
                    factors[r][c] = slope_of(weights[r][c], KEPT(n) ? LIFTED(factors[r][c]) : (T)0, aside[c]);
                }
                combine<R, C, D>(by_k, factors, own, others, of_q, part * 16 * C);
            }
        #pragma unroll
        for (int n = 0; n < C * R; ++n) {
            const int d = part * 16 * C + column<C>(n % C);
            const long long j = ROW(j0, n / C);
            const T value = by_k[n / C][n % C] * scale;
            if (j < columns && d < D) STORE_DK;
        }
        #pragma unroll
        for (int n = 0; n < F * R; ++n) {
            const int e = part * 16 * F + column<F>(n % F);
            const long long j = ROW(j0, n / F);
            const T value = by_v[n / F][n % F];
            if (j < columns && e < E) STORE_DV;
        }""",
    "biases": """
        const long long across = (columns + N - 1) / N, down = (biases2 + M - 1) / M;
        """
    + f"""{division("j0", "rest", "across", "N", "long long")}
        {division("i_", "rest", "down", "M", "long long")}
        {division("h_", "rest", "biases1", kind="long long")}"""
    + """
        const long long b_ = rest;
        const long long last_b = biases0 == 1 ? batch : b_ + 1, last_h = biases1 == 1 ? heads : h_ + 1;
        const long long last_i = biases2 == 1 ? rows : i_ + 1;
        T totals[R][4] = {};
        for (long long b = b_; b < last_b; ++b)
            for (long long h = h_; h < last_h; ++h)
                for (long long i0 = i_; i0 < last_i; i0 += M) {
                    const long long limit_q = LIMIT_Q, limit_kv = LIMIT_KV, g = h / (heads / groups);
                    if (j0 >= min(limit_kv, i0 + M + right) || i0 >= min(limit_q, j0 + N + left)) continue;
                    const Seen seen = seen_from(i0, j0, left, right, limit_q, limit_kv);
                    T scores[R][4], changes[R][4];
                    compare<R, D>(scores, own, others, ROWS_Q, ROWS_K);
                    compare<R, E>(changes, own, others, ROWS_DY, ROWS_V);
                    T aside[R];
                    DRAW(false)
                    #pragma unroll
                    for (int r = 0; r < R; ++r) {
                        const long long i = min(ROW(i0, r), limit_q - 1);
                        const T logarithm = BASE;
                        aside[r] = APART;
                        #pragma unroll
                        for (int c = 0; c < 4; ++c) {
                            const long long j = COLUMN(j0, c);
                            scores[r][c] = exp(scores[r][c] * scale + BIAS - logarithm);
                        }
                    }
                    hide<false>(scores, seen, 0);
                    #pragma unroll
                    for (int n = 0; n < 4 * R; ++n) {
                        const int r = n / 4, c = n % 4;
                        totals[r][c] +=
                            slope_of(scores[r][c], KEPT(n) ? LIFTED(changes[r][c]) : (T)0, aside[r]);
                    }
                }
        if (biases2 == 1) {
            // Add up over the queries, too: first a thread's own rows, then the 8 threads of a column.
            __syncthreads();  // no thread reads the old values any more
            #pragma unroll
            for (int c = 0; c < 4; ++c) {
                T sum = 0;
                #pragma unroll
                for (int r = 0; r < R; ++r) sum += totals[r][c];
                own[ty * N + COLUMN(0, c)] = sum;
            }
            __syncthreads();  // all sums are there
            """
    + in_turn("T value", "own[n * N + threadIdx.x % N]", "8", "int n")
    + """
            const long long i = 0, j = j0 + threadIdx.x;
            if (threadIdx.x < N && j < columns) STORE_DBIAS;
            continue;
        }
        #pragma unroll
        for (int n = 0; n < 4 * R; ++n) {
            const long long i = ROW(i_, n / 4), j = COLUMN(j0, n % 4);
            const T value = totals[n / 4][n % 4];
            if (i < rows && j < columns) STORE_DBIAS;
        }""",
}
