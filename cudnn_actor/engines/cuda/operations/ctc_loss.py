"""CTC loss on CUDA: a kernel of our own, in which a block takes one sample after the other, frame by frame.

Each thread has the same states in all frames. Logarithms are added up in double, so that a loss of thousands
has exact derivatives. Exponentials are taken of their differences, in the type that is computed in. A class's
derivative is the sum of the shares of its states, in their order: no result depends on timing.

For derivatives, the forward rows of all frames are kept. If they are too many, the row before every K-th
frame is kept, with K about the root of the number of frames, and the rows of K frames at a time are computed
again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from cudnn_actor.engines.cuda.kernels.element_types import (
    C_TYPES,
    CONVERSIONS,
    literal,
    load,
    store,
    value_type,
)
from cudnn_actor.engines.cuda.kernels.index_code import block_loop
from cudnn_actor.engines.cuda.kernels.kernel import (
    FEW_BLOCKS,
    MOST_THREADS,
    MULTIPROCESSORS,
    WARP,
    Launch,
    arguments_of,
    parameters_of,
    power_of_two,
)
from cudnn_actor.engines.cuda.kernels.reduction_code import in_turn, over_lanes
from cudnn_actor.engines.cuda.operations.implementation import implement, kernels
from cudnn_actor.protocol.operations import CTCLoss, GraphTensor
from cudnn_actor.protocol.types.dtypes import DType

__all__ = ["ctc_launches", "ctc_workspace"]

_BUSY = 2 * MULTIPROCESSORS
"""The number of blocks that keeps a GPU busy."""
_LEAST_ROOM = 128
_MOST_BYTES = 1 << 28
"""The most bytes of the workspace, unless one sample needs more."""
_MOST_UNROLLED = 4
"""The most turns of a loop over a thread's states for which it is unrolled."""
_AHEAD = {1: 4, 2: 2}
"""The number of frames that a thread reads ahead while it waits for other threads, by its number of states; 1
for more states."""


class _Shape(NamedTuple):
    """How a problem is dealt to blocks and threads.

    Parameters
    ----------
    threads, blocks
        The threads of a block, and the blocks of the grid.
    states
        The states of a thread.
    step
        K, the number of frames whose forward rows are kept at a time; 0 without derivatives.
    doubles
        The doubles of the workspace that each block has.
    """

    threads: int
    blocks: int
    states: int
    step: int
    doubles: int

    @property
    def room(self) -> int:
        """The most threads of a block that the source allows. The number is rounded up to a power of two, so
        that there are few sources."""
        return max(_LEAST_ROOM, power_of_two(self.threads))

    @property
    def nbytes(self) -> int:
        """Bytes of the workspace."""
        return self.blocks * self.doubles * DType.FLOAT64.itemsize


def _shape(operation: CTCLoss[int], tensors: Sequence[GraphTensor]) -> _Shape:
    (frames, samples, _), (_, labels) = tensors[0].dims, tensors[1].dims
    width = 2 * labels + 1
    threads = min(MOST_THREADS, -(-width // WARP) * WARP)
    states = power_of_two(-(-width // threads))
    most = _MOST_BYTES // DType.FLOAT64.itemsize
    step = doubles = 0
    if operation.dlog_probs is not None:
        all_at_once = frames * width * min(samples, _BUSY) <= most
        step = max(1, frames if all_at_once else math.isqrt(frames) + 1)
        kept = -(-frames // step)
        doubles = (step + (kept + 1 if kept > 1 else 0)) * width
    if states > 1:
        doubles += 2 * width
        doubles += 2 * width + labels if step else 0
    blocks = min(samples, FEW_BLOCKS, max(1, most // max(1, doubles)))
    return _Shape(threads, blocks, states, step, doubles)


def ctc_workspace(operation: CTCLoss[int], tensors: Sequence[GraphTensor]) -> int:
    """Bytes for rows of states. At most 256 MiB, or what one sample needs."""
    return _shape(operation, tensors).nbytes


def ctc_launches(operation: CTCLoss[int], tensors: Sequence[GraphTensor]) -> list[Launch]:
    """The launch; its grid is empty if there are no samples."""
    shape = _shape(operation, tensors)
    with_workspace = shape.nbytes > 0
    arguments = arguments_of(len(tensors) + with_workspace, *_numbers(operation, tensors, shape).values())
    grid, block = (shape.blocks,), (shape.threads,)
    return [Launch("ctc_loss", _source(operation, tensors, shape), grid, block, arguments)]


def _numbers(operation: CTCLoss[int], tensors: Sequence[GraphTensor], shape: _Shape) -> dict[str, int]:
    """The kernel's numbers, by their names."""
    (frames, samples, classes), (_, labels) = tensors[0].dims, tensors[1].dims
    names = "x_frame x_sample x_class targets_sample targets_label frames_step labels_step losses_step"
    strides = (stride for tensor in tensors for stride in tensor.strides)
    return {
        **{"frames": frames, "samples": samples, "classes": classes, "labels": labels},
        **{"blank": operation.blank, "step": shape.step, "doubles": shape.doubles},
        **dict(zip(f"{names} d_frame d_sample d_class".split(), strides, strict=False)),
    }


def _source(operation: CTCLoss[int], tensors: Sequence[GraphTensor], shape: _Shape) -> str:
    """The kernel in CUDA C++."""
    dtype = tensors[0].dtype
    value = value_type(dtype)
    names = ("const x", "const targets", "const input_lengths", "const target_lengths", "losses", "slopes")
    pointers = []
    for words, tensor in zip(names, tensors, strict=False):
        *const, name = words.split()
        pointers.append(" ".join([*const, f"{C_TYPES[tensor.dtype]}*", name]))
    if shape.nbytes:
        pointers.append("double* workspace")
    parameters = f"{', '.join(pointers)}, {parameters_of(_numbers(operation, tensors, shape))}"
    return f"""{CONVERSIONS}
typedef {value} E;
typedef {C_TYPES[dtype]} Element;
#define NONE (-{literal(math.inf, "double")})
#define NAN_VALUE {literal(math.nan, value)}
#define STATES {shape.states}
#define AHEAD {_AHEAD.get(shape.states, 1)}
#define ZERO_INFINITY {int(operation.zero_infinity)}
#define EACH_STATE _Pragma("unroll {min(shape.states, _MOST_UNROLLED)}") for (int k = 0; k < STATES; ++k)
#define STATE ((int)threadIdx.x + k * (int)blockDim.x)
__device__ __forceinline__ E value_of(Element element) {{ return {load(dtype, "element")}; }}
__device__ __forceinline__ Element element_of(E value) {{ return {store(dtype, "value")}; }}
{_FUNCTIONS}extern "C" __global__ void __launch_bounds__({shape.room}) ctc_loss({parameters}) {{
    const long long width = 2 * labels + 1;
    {"double* mine = workspace + blockIdx.x * doubles;" if shape.nbytes else ""}
    {_memory(shape)}
{_SAMPLES}{_FORWARD_OF_SLOPES if shape.step else _FORWARD}{_TOTAL}{_SLOPES if shape.step else ""}{_END}"""


def _memory(shape: _Shape) -> str:
    """Statements that define where states of two frames lie, and for derivatives shares and lists."""
    if shape.states == 1:
        found = f"const long long row = {shape.room}; __shared__ double rows[2 * {shape.room}];"
        lists = f"__shared__ E shares[2 * {shape.room}]; __shared__ int following[{shape.room // 2}];"
    else:
        found = "const long long row = width; double* const rows = mine; mine += 2 * width;"
        lists = """E* const shares = (E*)mine; mine += 2 * width;
    int* const following = (int*)mine; mine += labels;"""
    return f"{found}\n    {lists}" if shape.step else found


_FUNCTIONS = """
__device__ __forceinline__ long long within(long long number, long long least, long long most) {
    return number < least ? least : number > most ? most : number;
}
// The logarithm of a sum of exponentials. NaN if a term is NaN, since its difference is.
__device__ __forceinline__ double log_of_sum(double a, double b, double c) {
    const double most = fmax(a, fmax(b, c)), from = most == NONE ? 0.0 : most;
    return from + (double)log(exp((E)(a - from)) + exp((E)(b - from)) + exp((E)(c - from)));
}
"""
_SAMPLES = (
    f"    {block_loop('sample', 'samples')} {{"
    + """
        const long long end = within(input_lengths[sample * frames_step], 0, frames);
        const int count = 2 * (int)within(target_lengths[sample * labels_step], 0, labels) + 1;
        const Element* own = x + sample * x_sample;
        // The class of a state. Threads without a state get the blank's.
        auto class_of = [&](int s) {
            return s % 2 && s < count
                ? within(targets[sample * targets_sample + s / 2 * targets_label], 0, classes - 1) : blank;
        };
        long long classes_of[STATES];
        bool from_two[STATES];  // whether the state two before gets here
        EACH_STATE {
            const int s = STATE;
            classes_of[k] = class_of(s);
            from_two[k] = s >= 2 && s < count && class_of(s - 2) != classes_of[k];
            if (s < count) rows[s] = s ? NONE : 0.0;  // before the first frame, at the first blank
        }
        __syncthreads();
        int now = 0;  // which of the rows the last frame wrote
        // Computes the rows of the frames from `first` up to `stop`, from the row before. `kept`: a place for
        // all of these rows, if they are to be kept.
        auto forward = [&](long long first, long long stop, double* kept) {
            E next[STATES][AHEAD];
            auto read = [&](long long start) {
                EACH_STATE for (int n = 0; n < AHEAD; ++n)
                    if (start + n < stop && STATE < count)
                        next[k][n] = value_of(own[(start + n) * x_frame + classes_of[k] * x_class]);
            };
            read(first);
            for (long long start = first; start < stop; start += AHEAD) {
                E here[STATES][AHEAD];
                EACH_STATE for (int n = 0; n < AHEAD; ++n) here[k][n] = next[k][n];
                read(start + AHEAD);
                #pragma unroll
                for (int n = 0; n < AHEAD; ++n) {
                    if (start + n >= stop) break;
                    const double* before = rows + now * row;
                    EACH_STATE {
                        const int s = STATE;
                        if (s >= count) continue;
                        const double value = log_of_sum(
                            before[s], s ? before[s - 1] : NONE, from_two[k] ? before[s - 2] : NONE
                        ) + (double)here[k][n];
                        rows[(now ^ 1) * row + s] = value;
                        if (kept) kept[(start + n - first) * width + s] = value;
                    }
                    now ^= 1;
                    // All have read the row before, which the next frame overwrites, and written this one.
                    __syncthreads();
                }
            }
        };
"""
)
_FORWARD = """        forward(0, end, nullptr);
"""
_FORWARD_OF_SLOPES = """        __shared__ E of_blank[2][32];
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
        Element* slopes_of = slopes + sample * d_sample;
        // The labels of a class follow each other in a list, which begins at the first of them.
        bool begins[STATES], to_two[STATES];  // to_two: whether a state gets to the state two behind it
        EACH_STATE {
            const int s = STATE;
            to_two[k] = s + 2 < count && class_of(s + 2) != classes_of[k];
            begins[k] = s % 2 && s < count && classes_of[k] != blank;
            if (s % 2 == 0 || s >= count) continue;
            for (int other = s - 2; begins[k] && other > 0; other -= 2)
                begins[k] = class_of(other) != classes_of[k];
            int other = s + 2;
            while (other < count && class_of(other) != classes_of[k]) other += 2;
            following[s / 2] = other < count ? other / 2 : -1;
        }
        double* const alphas = mine;
        double* const saved = alphas + step * width;
        double* const kept = saved + width;
        const long long parts = (end + step - 1) / step;
        for (long long part = 0; part < parts; ++part) {
            if (parts > 1) EACH_STATE if (STATE < count) kept[part * width + STATE] = rows[now * row + STATE];
            const bool last = part == parts - 1;
            forward(part * step, last ? end : (part + 1) * step, last ? alphas : nullptr);
        }
"""
_TOTAL = """        const double* last = rows + now * row + count - 1;
        const double total = log_of_sum(*last, count > 1 ? last[-1] : NONE, NONE);
        const bool left_out = ZERO_INFINITY && total == NONE;
        if (threadIdx.x == 0) losses[sample * losses_step] = left_out ? 0 : 0.0 - total;
"""
_SLOPES = (
    """
        const bool known = total - total == 0;  // neither infinite nor NaN: all threads see the same
        const E missing = left_out ? 0 : NAN_VALUE;
        for (long long frame = known ? end : 0; frame < frames; ++frame)
            for (long long c = threadIdx.x; c < classes; c += blockDim.x)
                slopes_of[frame * d_frame + c * d_class] = element_of(frame < end ? missing : 0);
        __syncthreads();  // all have read the last row
        // Backward, a row has for each state the logarithm of the probability to get from it, its own frame
        // included, to the end. Behind the last frame, only the last blank is at the end.
        EACH_STATE if (STATE < count) rows[now * row + STATE] = STATE == count - 1 ? 0.0 : NONE;
        __syncthreads();
        for (long long part = known ? parts - 1 : -1; part >= 0; --part) {
            const long long first = part * step, stop = part == parts - 1 ? end : first + step;
            if (part < parts - 1) {
                EACH_STATE if (STATE < count) {
                    saved[STATE] = rows[now * row + STATE];
                    rows[(now ^ 1) * row + STATE] = kept[part * width + STATE];
                }
                now ^= 1;
                __syncthreads();
                forward(first, stop, alphas);
                EACH_STATE if (STATE < count) rows[now * row + STATE] = saved[STATE];
                __syncthreads();
            }
            E next[STATES][AHEAD];
            double next_alpha[STATES][AHEAD];
            auto read = [&](long long start) {
                EACH_STATE for (int n = 0; n < AHEAD; ++n)
                    if (start - n >= first && STATE < count) {
                        next[k][n] = value_of(own[(start - n) * x_frame + classes_of[k] * x_class]);
                        next_alpha[k][n] = alphas[(start - n - first) * width + STATE];
                    }
            };
            read(stop - 1);
            for (long long start = stop - 1; start >= first; start -= AHEAD) {
                E here[STATES][AHEAD];
                double alpha[STATES][AHEAD];
                EACH_STATE for (int n = 0; n < AHEAD; ++n)
                    here[k][n] = next[k][n], alpha[k][n] = next_alpha[k][n];
                read(start - AHEAD);
                #pragma unroll
                for (int n = 0; n < AHEAD; ++n) {
                    const long long frame = start - n;
                    if (frame < first) break;
                    const double* before = rows + now * row;
                    E blanks = 0;
                    EACH_STATE {
                        const int s = STATE;
                        if (s >= count) continue;
                        const double behind = log_of_sum(
                            before[s], s + 1 < count ? before[s + 1] : NONE, to_two[k] ? before[s + 2] : NONE
                        );
                        const E share = exp((E)(alpha[k][n] + behind - total));
                        rows[(now ^ 1) * row + s] = behind + (double)here[k][n];
                        shares[now * row + s] = share;
                        if (classes_of[k] == blank) blanks += share;
                    }
                    """
    + over_lanes("blanks")
    + """
                    if (lane == 0) of_blank[now][warp] = blanks;
                    Element* into = slopes_of + frame * d_frame;
                    for (long long c = threadIdx.x; c < classes; c += blockDim.x)
                        into[c * d_class] = element_of(0);
                    // All have read the row that the next frame overwrites. What is read from here on, shares
                    // and sums of blanks, the frame after the next overwrites: behind the next barrier.
                    __syncthreads();
                    EACH_STATE if (begins[k]) {
                        E sum = 0;
                        for (int label = STATE / 2; label >= 0; label = following[label])
                            sum += shares[now * row + 2 * label + 1];
                        into[classes_of[k] * d_class] = element_of(0 - sum);
                    }
                    if (threadIdx.x == 0) {
                        """
    + in_turn("E sum", "of_blank[now][other]", "warps", "int other")
    + """
                        into[blank * d_class] = element_of(0 - sum);
                    }
                    now ^= 1;
                }
            }
            // All have read the shares and the rows, which the next part overwrites.
            __syncthreads();
        }"""
)
_END = """
        __syncthreads();  // the next sample overwrites what this one has read
    }
}
"""


implement(CTCLoss, launchers=kernels(ctc_launches, ctc_workspace))
