"""The steps of recurrent layers on CUDA, by kernels of our own.

In each step, the products of the state with the rows of the weights are added up, for all gates of a unit at
once, and the unit's new state is computed. The states before and behind a step lie in the workspace, in the
type that is computed in.

There are two ways to go through the steps:

- In one launch. A block goes through all steps of its sequences, and its threads wait for each other between
  steps. A thread has a unit of a sequence. The weights lie transposed in the workspace, so that neighbouring
  threads read neighbours.
- By step. Each step is a launch on the whole device. A warp has a unit of a few sequences, and its lanes
  share the products: each adds up every 32nd of them, and then the lanes add up their sums, in a fixed order.
  The rows of the weights lie one after the other in the workspace. This way comes first for a layer whose
  weights are more work than a block can do in the time of a launch.

A GRU that resets first multiplies twice in each step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from cudnn_actor.engines.cuda.cudnn.frontend_graph import Refused
from cudnn_actor.engines.cuda.kernels.element_types import (
    C_TYPES,
    literal,
    load,
    store,
    value_dtype,
    value_type,
)
from cudnn_actor.engines.cuda.kernels.formulas import FORMULAS, PREAMBLE
from cudnn_actor.engines.cuda.kernels.index_code import block_loop, indexing, number_of, offset_of, split_all
from cudnn_actor.engines.cuda.kernels.kernel import (
    MULTIPROCESSORS,
    Launch,
    arguments_of,
    grid_over,
    parameters_of,
)
from cudnn_actor.engines.cuda.kernels.reduction_code import over_lanes
from cudnn_actor.engines.cuda.operations.implementation import implement, kernels
from cudnn_actor.protocol.operations import (
    CellActivation,
    CellFunction,
    GraphTensor,
    PointwiseMode,
    RecurrentCell,
    RecurrentSteps,
)

__all__ = ["BY_STEP", "steps_launches", "steps_workspace"]

BY_STEP = "kernel_by_step"
"""The name of the launcher that has a launch for each step."""

_MOST_THREADS, _MOST_ROWS = 1024, (1 << 16) - 1
"""The most threads of a block, and the most blocks of a grid along its second dim."""
_MACROS = {"x": "IN", "bias": "BIAS", "peepholes": "PEEPHOLES", "h0": "FIRST_H", "c0": "FIRST_C"}
"""The names of the macros that read an operand."""

_MOST_WEIGHTS = 128 << 10
"""The most bytes of a direction's weights for which one block goes through all steps and reads them in each:
as many as lie in a multiprocessor's cache. With as many, both ways take 4.3 to 5.3 microseconds a step, for
one sequence and for 32. With four times as many, a block takes 30 and a launch 5.4 to 7.4 (H200, LSTM)."""
_MOST_SEQUENCES = 256
"""The most sequences of both directions for which each step may be a launch. It is an estimate: for 32
sequences, a launch takes 2 microseconds more than for one, and a block takes 30 for any number."""
_MOST_LAUNCHES = 1 << 14
"""The most launches of a plan. A layer of more steps is one launch, however long that takes."""
_WARPS, _TOGETHER = 4, 8
"""Where each step is a launch: the units of a block, and the sequences of a warp, which share the weights
that the warp reads."""


class _Shape(NamedTuple):
    """How a problem is dealt to launches, blocks and threads.

    Parameters
    ----------
    grid, block
        The grid and the block of the launches that go through the steps.
    steps
        The steps of each launch.
    kept
        The numbers that the workspace has for each unit of each sequence and direction.
    states
        The units of all sequences and directions.
    weights
        The elements of w.
    """

    grid: tuple[int, int, int]
    block: tuple[int, int]
    steps: int
    kept: int
    states: int
    weights: int


def _comes_by_step(operation: RecurrentSteps[int], tensors: Sequence[GraphTensor]) -> bool:
    """Whether a launch for each step is expected to take less time than one launch for all."""
    directions, rows, hidden = tensors[1].dims
    weights, sequences = rows * hidden * tensors[0].dtype.itemsize, directions * tensors[0].dims[1]
    is_worth_it = weights > _MOST_WEIGHTS and sequences <= _MOST_SEQUENCES
    return is_worth_it and _launches_by_step(operation, tensors) <= _MOST_LAUNCHES


def _launches_by_step(operation: RecurrentSteps[int], tensors: Sequence[GraphTensor]) -> int:
    """The number of launches that go through the steps, if each step is a launch."""
    return tensors[0].dims[0] * (1 + _resets_first(operation))


def _resets_first(operation: RecurrentSteps[int]) -> bool:
    return operation.cell is RecurrentCell.GRU_RESET_FIRST


def _shape(operation: RecurrentSteps[int], tensors: Sequence[GraphTensor], *, by_step: bool) -> _Shape:
    (steps, batch, _), (directions, rows, hidden) = tensors[0].dims, tensors[1].dims
    if by_step:
        block, at_once = (32, _WARPS), 1
        across, down = -(-hidden // _WARPS), -(-batch // _TOGETHER)
    else:
        units, at_once = min(_MOST_THREADS, -(-hidden // 32) * 32), max(1, steps)
        together = max(1, min(_MOST_THREADS // max(1, units), -(-batch * directions // MULTIPROCESSORS)))
        block, across, down = (units, together), 1, -(-batch // together)
    grid = (across, min(_MOST_ROWS, down), directions)
    return _Shape(
        grid,
        block,
        at_once,
        kept=2 + (operation.cell is RecurrentCell.LSTM) + 2 * _resets_first(operation),
        states=directions * batch * hidden,
        weights=directions * rows * hidden,
    )


def steps_workspace(operation: RecurrentSteps[int], tensors: Sequence[GraphTensor]) -> int:
    """Bytes of the workspace: for the states before and behind a step, for cells, and for the weights."""
    shape, dtype = _shape(operation, tensors, by_step=False), tensors[0].dtype
    return shape.kept * shape.states * value_dtype(dtype).itemsize + shape.weights * dtype.itemsize


def steps_launches(
    operation: RecurrentSteps[int], tensors: Sequence[GraphTensor], *, by_step: bool
) -> list[Launch]:
    """The launches: one that fills the workspace, and those that go through the steps.

    There are none if there are no sequences. Raises `Refused` if there are too many.
    """
    if by_step and _launches_by_step(operation, tensors) > _MOST_LAUNCHES:
        raise Refused(f"a launch for each step is more than {_MOST_LAUNCHES:,} of them")
    shape, steps = _shape(operation, tensors, by_step=by_step), tensors[0].dims[0]
    numbers, source = _numbers(operation, tensors), _source(operation, tensors, shape.kept, by_step=by_step)
    given = (len(tensors) + 1, *numbers.values())
    if not shape.states:
        return []
    start = grid_over(max(shape.states, shape.weights))
    found = [Launch("recurrent_start", source, *start, arguments_of(*given))]
    halves = (1, 2) if _resets_first(operation) and by_step else (3,)
    for first in range(0, steps, shape.steps):
        for half in halves:
            arguments = arguments_of(*given, first, min(first + shape.steps, steps), half)
            found.append(Launch("recurrent_steps", source, shape.grid, shape.block, arguments))
    return found


def _numbers(operation: RecurrentSteps[int], tensors: Sequence[GraphTensor]) -> dict[str, int]:
    """The kernels' numbers, by their names: sizes, and the strides of each operand."""
    (steps, batch, _), (directions, _, hidden) = tensors[0].dims, tensors[1].dims
    strides = {
        f"{name}_{axis}": stride
        for (name, _), tensor in zip(operation.named(), tensors, strict=True)
        for axis, stride in enumerate(tensor.strides)
    }
    return {"steps": steps, "batch": batch, "directions": directions, "hidden": hidden, **strides}


def _source(
    operation: RecurrentSteps[int], tensors: Sequence[GraphTensor], kept: int, *, by_step: bool
) -> str:
    """The kernels in CUDA C++. They do not depend on the sizes of the layer."""
    dtype = tensors[0].dtype
    operands = dict(zip((name for name, _ in operation.named()), tensors, strict=True))
    pointers = [
        f"{'' if name in operation.outputs else 'const '}{C_TYPES[tensor.dtype]}* {name}_of"
        for name, tensor in operands.items()
    ]
    parameters = f"{', '.join(pointers)}, char* workspace, {parameters_of(_numbers(operation, tensors))}"
    lines = [
        f"typedef {value_type(dtype)} E;",
        f"typedef {C_TYPES[dtype]} Element;",
        f"#define GATES {operation.cell.gates}",
        f"#define KEPT {kept}",
        f"#define TOGETHER {_TOGETHER}",
        *_accesses(operation, operands),
        f"__device__ __forceinline__ E value_of(Element element) {{ return {load(dtype, 'element')}; }}",
        f"__device__ __forceinline__ Element element_of(E value) {{ return {store(dtype, 'value')}; }}",
        *_functions(operation, tensors[1].dims[0], value_type(dtype)),
    ]
    steps, first_half = (_BY_STEP, _FIRST_HALF_BY_STEP) if by_step else (_AT_ONCE, _FIRST_HALF_AT_ONCE)
    text = _START + steps.replace("FIRST_HALF", first_half if _resets_first(operation) else "")
    cell = _CELLS[operation.cell]
    places = {
        "PARAMETERS": parameters,
        "PLACE_OF_WEIGHT": split_all("rest", _WEIGHT_AXES[by_step]),
        "PLACE_OF_STATE": split_all("rest", _STATE_AXES),
        "THE_GATES": f"{cell.first}, {cell.stop}",
        "THE_STATE": cell.state,
        "THE_CELL": cell.text,
        "THE_RESULTS": _RESULTS,
    }
    for name, value in places.items():
        text = text.replace(name, value)
    return PREAMBLE + indexing(wide=True) + "\n".join(lines) + text


def _accesses(operation: RecurrentSteps[int], operands: Mapping[str, GraphTensor]) -> Iterator[str]:
    """Yields macros that read and write operands at a place. A missing operand reads as its default."""

    def at(name: str, *place: str) -> str:
        steps = (f"{name}_{axis}" for axis in range(len(place)))
        return f"{name}_of[{offset_of((f'({index})' for index in place), steps)}]"

    places = {
        "x": ("time", "sample", number_of(("way", "gate", "unit"), ("GATES", "hidden"))),
        "bias": ("way", number_of(("gate", "unit"), ("hidden",))),
        "peepholes": ("way", "gate", "unit"),
        **dict.fromkeys(("h0", "c0"), ("way", "sample", "unit")),
    }
    for name, place in places.items():
        value = f"value_of({at(name, *place)})" if name in operands else "(E)0"
        parameter = "" if "sample" in place and name != "x" else "(gate)"
        yield f"#define {_MACROS[name]}{parameter} {value}"
    yield f"#define WEIGHT(row, k) {at('w', 'way', 'row', 'k')}"
    yield f"#define LENGTH {at('lengths', 'sample') if 'lengths' in operands else 'steps'}"
    results = {"y": ("time", "sample", number_of(("way", "unit"), ("hidden",)))}
    results |= dict.fromkeys(("h_n", "c_n"), ("way", "sample", "unit"))
    for name, place in results.items():
        stored = f"{at(name, *place)} = element_of(value)" if name in operands else ""
        yield f"#define STORE_{name.upper()}(value) {stored}"
    backwards = [f"way == {way}" for way in range(operands["w"].dims[0]) if operation.is_backwards(way)]
    cells = "CELLS[n] = FIRST_C; STORE_C_N(FIRST_C);" if operation.cell is RecurrentCell.LSTM else ""
    yield f"#define START_CELLS {cells}"
    yield f"#define BACKWARDS ({' || '.join(backwards) or 'false'})"


def _functions(operation: RecurrentSteps[int], directions: int, kind: str) -> Iterator[str]:
    """Yields the C functions of the gates, f, g and k, for each direction. f and g clip their operand."""
    count, every = operation.cell.functions, operation.functions(directions)
    for number, name in zip(range(count), "fgk", strict=False):
        texts = [_text(each, kind) for each in every[number::count]]
        text = texts[0] if len(set(texts)) == 1 else f"way ? {texts[1]} : {texts[0]}"
        bound = "" if operation.clip is None or name == "k" else _clip_statement(operation.clip, kind)
        yield f"__device__ __forceinline__ E {name}_of(E x, long long way) {{ {bound}return {text}; }}"
    forget = "1 - i" if operation.coupled else "f_of(IN(1) + sums[1] + PEEPHOLES(1) * c, way)"
    yield f"#define FORGET ({forget})"


def _clip_statement(clip: float, kind: str) -> str:
    return f"x = clip(x, {literal(-clip, kind)}, {literal(clip, kind)}); "


def _text(activation: CellActivation, kind: str) -> str:
    """The C expression of an activation of x.

    Activations that are no pointwise mode are written by hand, like the formulas of `kernels.formulas`. See
    `CellActivation.__call__` for their definitions.
    """
    a, b = literal(activation.alpha, kind), literal(activation.beta, kind)
    own = {
        CellFunction.AFFINE: f"{a} * x + {b}",
        CellFunction.HARD_SIGMOID: f"clip({a} * x + {b}, (E)0, (E)1)",
        CellFunction.RELU: "x < 0 ? (E)0 : x",
        CellFunction.SCALED_TANH: f"{a} * tanh({b} * x)",
        CellFunction.THRESHOLDED_RELU: f"x > {a} ? x : (E)0",
    }
    function = activation.function
    if function in own:
        return f"({own[function]})"
    parameter = literal(1.0, kind) if function is CellFunction.SOFTPLUS else a
    return f"({FORMULAS[PointwiseMode(function)].floating.format(a='x', parameter=parameter, T='E')})"


_START = """
// Where states and weights lie in the workspace.
#define SIZE (directions * batch * hidden)
#define STATES ((E*)workspace)
#define CELLS (STATES + 2 * SIZE)
#define RESET (STATES + 2 * SIZE)
#define UPDATE (STATES + 3 * SIZE)
#define WEIGHTS ((Element*)(STATES + KEPT * SIZE))
extern "C" __global__ void recurrent_start(PARAMETERS) {
    const I rows = GATES * hidden;
    EACH(n, directions * hidden * rows) {
        I rest = n;
        PLACE_OF_WEIGHT
        WEIGHTS[n] = WEIGHT(row, k);
    }
    EACH(n, SIZE) {
        I rest = n;
        PLACE_OF_STATE
        STATES[n] = FIRST_H;
        STORE_H_N(FIRST_H);  // also where there are no steps
        START_CELLS
    }
}
"""
_WEIGHT_AXES = {
    False: (("row", "rows"), ("k", "hidden"), ("way", "directions")),
    True: (("k", "hidden"), ("row", "rows"), ("way", "directions")),
}
"""The axes of the weights in the workspace, for `split_all`, by whether each step is a launch."""
_STATE_AXES = (("unit", "hidden"), ("sample", "batch"), ("way", "directions"))
"""The axes of the states, for `split_all`."""
_RESULTS = """            after[at] = h;
            STORE_Y(inside ? h : (E)0);
            if (step == steps - 1) {
                STORE_H_N(h);
                STORE_C_N(CELLS[at]);
            }"""
_AT_ONCE = f"""
#define EACH_UNIT \\
    {block_loop("sample", "batch", "(long long)blockDim.y", "threadIdx.y", "y")} \\
        {block_loop("unit", "hidden", "(long long)blockDim.x", "threadIdx.x")}
"""
_AT_ONCE += """
// Adds to the sums of these gates the products of a state with the unit's rows.
template <int FROM, int TO> __device__ __forceinline__ void multiply(
    const E* state, const Element* weights, long long hidden, long long unit, E* sums
) {
    // A few rows are read before the first of them is used: else each read would wait for the one before.
    const int deep = 8;
    const long long apart = GATES * hidden;
    const Element* row = weights + unit;
    long long k = 0;
    for (; k + deep <= hidden; k += deep, row += deep * apart) {
        E one[deep];
        Element of[deep][TO - FROM];
        #pragma unroll
        for (int n = 0; n < deep; ++n) {
            one[n] = state[k + n];
            #pragma unroll
            for (int gate = FROM; gate < TO; ++gate) of[n][gate - FROM] = row[n * apart + gate * hidden];
        }
        #pragma unroll
        for (int n = 0; n < deep; ++n)
            #pragma unroll
            for (int gate = FROM; gate < TO; ++gate) sums[gate] += one[n] * value_of(of[n][gate - FROM]);
    }
    for (; k < hidden; ++k, row += apart)
        #pragma unroll
        for (int gate = FROM; gate < TO; ++gate) sums[gate] += state[k] * value_of(row[gate * hidden]);
}
extern "C" __global__ void __launch_bounds__(1024) recurrent_steps(
    PARAMETERS, long long first, long long stop, long long halves
) {
    const long long way = blockIdx.z;
    const Element* const weights = WEIGHTS + way * hidden * GATES * hidden;
    for (long long step = first; step < stop; ++step) {
        const long long time = BACKWARDS ? steps - 1 - step : step;
        const E* const before = STATES + step % 2 * SIZE;
        E* const after = STATES + (step + 1) % 2 * SIZE;
FIRST_HALF        if (halves & 2) EACH_UNIT {
            const long long row = (way * batch + sample) * hidden, at = row + unit;
            const bool inside = time < LENGTH;
            E h = before[at];
            if (inside) {
                E sums[GATES];
                #pragma unroll
                for (int gate = 0; gate < GATES; ++gate) sums[gate] = BIAS(gate);
                multiply<THE_GATES>(THE_STATE + row, weights, hidden, unit, sums);
THE_CELL
            }
THE_RESULTS
        }
        // The next step reads all units of the block's sequences.
        __syncthreads();
    }
}
"""
_FIRST_HALF_AT_ONCE = """        if (halves & 1) EACH_UNIT {
            const long long row = (way * batch + sample) * hidden, at = row + unit;
            if (time >= LENGTH) continue;
            E sums[] = {BIAS(0), BIAS(1)};
            multiply<0, 2>(before + row, weights, hidden, unit, sums);
            RESET[at] = f_of(IN(0) + sums[0], way) * before[at];
            UPDATE[at] = f_of(IN(1) + sums[1], way);
        }
        __syncthreads();  // the second half reads all units of the block's sequences
"""
_BY_STEP = (
    """
// Adds the products of the states of `count` sequences with the unit's rows to the sums of these gates: those
// of a sequence in the lane that has it. All lanes of a warp call this.
template <int FROM, int TO> __device__ __forceinline__ void multiply(
    const E* state, const Element* rows, long long hidden, long long count, E* sums
) {
    E parts[TOGETHER][TO - FROM] = {};
    #pragma unroll 4
    for (long long k = threadIdx.x; k < hidden; k += 32) {
        E of[TO - FROM];
        #pragma unroll
        for (int gate = FROM; gate < TO; ++gate) of[gate - FROM] = value_of(rows[gate * hidden * hidden + k]);
        #pragma unroll
        for (int each = 0; each < TOGETHER; ++each)
            if (each < count) {
                const E one = state[each * hidden + k];
                #pragma unroll
                for (int gate = 0; gate < TO - FROM; ++gate) parts[each][gate] += one * of[gate];
            }
    }
    #pragma unroll
    for (int each = 0; each < TOGETHER; ++each)
        if (each < count)
            #pragma unroll
            for (int gate = FROM; gate < TO; ++gate) {
                E sum = parts[each][gate - FROM];
                """
    + over_lanes("sum")
    + """
                if (threadIdx.x == each) sums[gate] += sum;
            }
}
extern "C" __global__ void __launch_bounds__(128) recurrent_steps(
    PARAMETERS, long long step, long long stop, long long halves
) {
    const long long way = blockIdx.z, unit = (long long)blockIdx.x * blockDim.y + threadIdx.y;
    const long long time = BACKWARDS ? steps - 1 - step : step;
    const E* const before = STATES + step % 2 * SIZE;
    E* const after = STATES + (step + 1) % 2 * SIZE;
    const Element* const rows = WEIGHTS + (way * GATES * hidden + unit) * hidden;
    if (unit >= hidden) return;  // all lanes of a warp
    """
    + block_loop("begin", "batch", "(long long)TOGETHER", axis="y")
    + """ {
        const long long count = batch - begin < TOGETHER ? batch - begin : TOGETHER;
        const long long first = (way * batch + begin) * hidden;
        const long long sample = begin + threadIdx.x, at = first + threadIdx.x * hidden + unit;
        const bool has = threadIdx.x < count, inside = has && time < LENGTH;
        E sums[GATES];
        #pragma unroll
        for (int gate = 0; gate < GATES; ++gate) sums[gate] = BIAS(gate);
FIRST_HALF        multiply<THE_GATES>(THE_STATE + first, rows, hidden, count, sums);
        if (!has) continue;
        E h = before[at];
        if (inside) {
THE_CELL
        }
THE_RESULTS
    }
}
"""
)
_FIRST_HALF_BY_STEP = """        if (halves & 1) {
            multiply<0, 2>(before + first, rows, hidden, count, sums);
            if (inside) {
                RESET[at] = f_of(IN(0) + sums[0], way) * before[at];
                UPDATE[at] = f_of(IN(1) + sums[1], way);
            }
            continue;
        }
"""


class _Cell(NamedTuple):
    """The computation of a step by one kind of cell.

    Parameters
    ----------
    first, stop
        The range of the gates whose products are added up.
    state
        The C expression of the state with which the weights are multiplied.
    text
        The C statements that compute h from the sums of these gates.
    """

    first: int
    stop: int
    state: str
    text: str


_CELLS = {
    RecurrentCell.PLAIN: _Cell(0, 1, "before", "h = f_of(IN(0) + sums[0], way);"),
    RecurrentCell.LSTM: _Cell(
        0,
        4,
        "before",
        """
                const E c = CELLS[at], i = f_of(IN(0) + sums[0] + PEEPHOLES(0) * c, way);
                const E cell = FORGET * c + i * g_of(IN(2) + sums[2], way);
                CELLS[at] = cell;
                h = f_of(IN(3) + sums[3] + PEEPHOLES(2) * cell, way) * k_of(cell, way);""",
    ),
    RecurrentCell.GRU: _Cell(
        0,
        3,
        "before",
        """
                const E r = f_of(IN(0) + sums[0], way), z = f_of(IN(1) + sums[1], way);
                h = (1 - z) * g_of(IN(2) + r * sums[2], way) + z * h;""",
    ),
    RecurrentCell.GRU_RESET_FIRST: _Cell(
        2,
        3,
        "RESET",
        """
                const E z = UPDATE[at];
                h = (1 - z) * g_of(IN(2) + sums[2], way) + z * h;""",
    ),
}


_WAYS = {
    name: kernels(partial(steps_launches, by_step=by_step), steps_workspace)["kernel"]
    for name, by_step in (("kernel", False), (BY_STEP, True))
}
implement(RecurrentSteps, launchers=_WAYS | {BY_STEP: _WAYS[BY_STEP]._replace(first=_comes_by_step)})
