"""The C++ that kernels with reductions share: how two parts of a result become one, and in which order
threads combine parts. `operations.reduction` has the kernels of a reduction alone, `line_kernels` those of
reductions and softmaxes with other operations, and `norm_kernels` those of norms.

A `Join` says how two parts become one: it is a C expression of both, and one of the part without elements.
A part is a number of T, the type that a kernel computes in, or an accumulator of several numbers, which
has a join of its own: see `kernels.accumulators`.

A thread goes over its own elements in order, in a loop of its kernel: of a line, of a window
or of the inner dim of a product. It then has a part, and parts are combined in an order that
depends only on their number: a result is the same each time. There are three orders.

- Lanes of a warp, in registers (`over_lanes`): each lane combines its part with that of
  the lane 16 apart, then 8, 4, 2 and 1 apart. All lanes get the result.
- Threads of a block, in shared memory (`over_halves`): the first half of the threads
  combine their parts with those of the second half, then a quarter of them, and so on.
- One thread, one part after the other (`in_turn`): for the parts of few warps, or of the
  blocks of an earlier launch.

`COMBINING` has the functions for lines whose parts are accumulators.
A line that is cut has a part for each block with the same x. The first kernel stores
them (`stored_part`), and a warp of the second one combines them (`combined_parts`).
"""

from __future__ import annotations

from typing import NamedTuple

from cudnn_actor.engines.cuda.kernels.kernel import MOST_THREADS, THREADS, WARP

__all__ = [
    "COMBINING",
    "ELEMENT_MAX",
    "ELEMENT_MIN",
    "ELEMENT_PRODUCT",
    "ELEMENT_SUM",
    "LARGEST",
    "OVER_COLUMNS",
    "STATES",
    "SUM",
    "Join",
]
__all__ += [
    "combined_parts",
    "in_turn",
    "over_halves",
    "over_lanes",
    "part_of_line",
    "shuffle",
    "stored_part",
]


def shuffle(part: str) -> str:
    """The C expression of a variable's value in the lane that is `apart` from this one."""
    return f"__shfl_xor_sync(~0u, {part}, apart)"


class Join(NamedTuple):
    """How two parts become one: C expressions in which `{a}` and `{b}` stand for parts.

    Parameters
    ----------
    both
        The parts together. For the same result in all lanes, it must not matter which one is `{a}`.
    none
        The part without elements: joined with another part, it gives that one.
    fetched
        The value of `{a}` in the lane that is `apart` from this one.
    """

    both: str
    none: str
    fetched: str = shuffle("{a}")

    def of(self, a: str, b: str) -> str:
        """The C expression of two parts joined."""
        return self.both.format(a=a, b=b)


SUM, LARGEST = Join("{a} + {b}", "0"), Join("max({a}, {b})", "-INFINITE")
"""The joins of floats. `LARGEST` ignores NaN."""
ELEMENT_SUM, ELEMENT_PRODUCT = Join("sum({a}, {b})", "0"), Join("product({a}, {b})", "1")
"""The joins of elements of any type: integers wrap around (`sum` and `product` are in `lines.beginning`)."""
ELEMENT_MIN = Join("{b} < {a} || {b} != {b} ? {b} : {a}", "INFINITE")
ELEMENT_MAX = Join("{b} > {a} || {b} != {b} ? {b} : {a}", "-INFINITE")
"""The joins of elements that give NaN if one of both is NaN, and `{a}` if both are equal, as 0 and -0 are.
`none` is for floats; `accumulators.accumulator_of` has that for integers."""
STATES = Join("{a}.with({b})", "State::none()", "{a}.from(apart)")
"""The join of two accumulators."""


def over_lanes(part: str, by: Join = SUM, nearest: int = 1) -> str:
    """A C loop that combines the variable `part` of all lanes of a warp. All lanes must run it.

    `nearest`: the least distance of two lanes whose parts are combined, a power of two. Each lane gets the
    result of the lanes whose distance from it is a multiple of `nearest`.
    """
    both = by.of(part, by.fetched.format(a=part))
    # NVRTC unrolls the loops around one that ends with `apart >= 1` further, which makes a kernel larger.
    more = "apart" if nearest == 1 else f"apart >= {nearest}"
    return f'_Pragma("unroll") for (int apart = {WARP // 2}; {more}; apart /= 2) {part} = {both};'


def over_halves(axis: str, part: str, other: str, by: Join = SUM, each: str = "") -> str:
    """A C loop that combines the parts of the threads along an axis of a block, in shared memory.

    The number of threads along the axis is a power of two. All threads of the block must run the loop, each
    after it has written its own part. The result replaces the first thread's part, and behind the loop any
    thread may read it. There is a barrier between the write of each part and its read by another thread.

    Parameters
    ----------
    axis
        "x" or "y".
    part, other
        The C expressions of this thread's part, and of that of the thread which is `apart` behind it.
    by
        How two parts become one.
    each
        The head of a C loop over the parts, if each thread has several.
    """
    return f"""for (int apart = blockDim.{axis} / 2; apart; apart /= 2) {{
        __syncthreads();
        {each}if (threadIdx.{axis} < apart) {part} = {by.of(part, other)};
    }}
    __syncthreads();"""


def in_turn(total: str, part: str, count: str, number: str = "int part", *, unrolled: int = 1) -> str:
    """C statements by which one thread adds up parts number 0 to `count` - 1, in this order.

    `total`: the type and name of the sum. `number`: the type and name of a part's number. `unrolled`: how
    many parts may be read before the first is added; 1 leaves that to the compiler.
    """
    (_, _, name), (_, _, n) = total.rpartition(" "), number.rpartition(" ")
    ahead = f'_Pragma("unroll {unrolled}") ' if unrolled > 1 else ""
    each = f"for ({number} = 0; {n} < {count}; ++{n})"
    return f"{total} = {SUM.none}; {ahead}{each} {name} = {SUM.of(name, part)};"


# Accumulators of lines.

COMBINING = f"""
template <class S> __device__ __forceinline__ S over_warp(S part) {{
    {over_lanes("part", STATES)}
    return part;
}}
template <class S> __device__ S over_block(S part) {{
    __shared__ S parts[{WARP}];
    __syncthreads();  // nobody still reads the parts of the call before
    part = over_warp(part);
    if (threadIdx.x % {WARP} == 0) parts[threadIdx.x / {WARP}] = part;
    __syncthreads();
    return over_warp(threadIdx.x % {WARP} < blockDim.x / {WARP} ? parts[threadIdx.x % {WARP}] : S::none());
}}
template <class S> __device__ S over_column(S part) {{
    __shared__ S parts[{MOST_THREADS}];
    S* mine = parts + threadIdx.y * blockDim.x + threadIdx.x;
    __syncthreads();
    *mine = part;
    {over_halves("y", "(*mine)", "mine[apart * blockDim.x]", STATES)}
    return parts[threadIdx.x];
}}
"""
"""C++ functions that combine the parts of the threads of a warp, of a block, or of a column of a block, whose
threads have the same x. All of these threads get the result."""


_EACH = '_Pragma("unroll") for (int s = 0; s < N; ++s) '
OVER_COLUMNS = f"""
template <int N, class S> __device__ void over_columns(S* state) {{
    __shared__ S parts[N][{THREADS}];
    const int me = threadIdx.y * blockDim.x + threadIdx.x;
    __syncthreads();
    {_EACH}parts[s][me] = state[s];
    {over_halves("y", "parts[s][me]", "parts[s][me + apart * blockDim.x]", STATES, _EACH)}
    {_EACH}state[s] = parts[s][threadIdx.x];
}}
"""
"""C++ that combines the parts of several lines at once: threads wait for each other once for all lines."""


def part_of_line(packs: str, vector: int | str) -> str:
    """C statements that define `begin` and `end`, the range of a line's packs that are a block's part.

    `packs`: the packs of a part. `vector`: the elements of a pack. The range is empty if there is no line.
    """
    return f"""const I begin = blockIdx.y * (I){packs}, all = (I)length / {vector};
        const I end = there ? min(all, begin + (I){packs}) : 0;"""


def stored_part(line: str) -> str:
    """The C expression of the place of a part's accumulator in the workspace `parts`."""
    return f"parts[{line} * gridDim.y + blockIdx.y]"


def combined_parts(to: str, line: str, count: str) -> str:
    """C statements by which a warp combines the `count` parts of a line, and stores the result in `to`."""
    return f"""const State* own = parts + {line} * {count};
        State all = {STATES.none};
        for (int part = lane; part < (int){count}; part += lanes) all = {STATES.of("all", "own[part]")};
        {to} = over_warp(all);"""
