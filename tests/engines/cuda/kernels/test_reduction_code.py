"""The C++ of reductions: what is accumulated, in which order, and that generated kernels have no other."""

from __future__ import annotations

import functools
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cudnn_actor.engines.cuda
from cudnn_actor.engines.cpu.rounding import integer_range
from cudnn_actor.engines.cuda.kernels.accumulators import (
    MOMENTS,
    TWO_SUMS,
    Accumulator,
    accumulator_of,
    accumulator_of_place,
)
from cudnn_actor.engines.cuda.kernels.element_types import C_TYPES, value_dtype
from cudnn_actor.engines.cuda.kernels.lines import beginning
from cudnn_actor.engines.cuda.kernels.reduction_code import (
    ELEMENT_MAX,
    ELEMENT_MIN,
    ELEMENT_PRODUCT,
    ELEMENT_SUM,
    LARGEST,
    SUM,
    Join,
    in_turn,
    over_halves,
    over_lanes,
)
from cudnn_actor.protocol import DType, ReductionMode

from ... import host_cuda
from ...operations.test_reduction import OF_FLOATS, OF_INTEGERS

DTYPES = (DType.FLOAT32, DType.FLOAT64, DType.INT32, DType.INT64, DType.UINT64)
PLACES = {f"place of {mode}": mode for mode in (ReductionMode.MIN, ReductionMode.MAX)}
FOUND = {"place of min": np.argmin, "place of max": np.argmax}
ELEMENTS = [5, 3, 7, 7, 1, 3, 1, 2]
OWN_EXCHANGES = {
    "kernels/reduction_code.py": "all that is described here",
    "operations/indexing.py": "of elements scattered to a place, the one with the largest number is kept",
    "operations/reduction.py": "a running sum has a result for each element",
    "operations/sorting.py": "whole numbers are counted, and a place is found by halves",
    "checking/self_check_memory.py": "whole numbers are counted",
}
"""Files in which lanes exchange values, or threads halve a distance or add to the same place; and why."""


OWN_JOINS = {
    "kernels/reduction_code.py": "all that is described here",
    "operations/pooling.py": "the largest of a window comes with its place, and the first of several stays",
}
"""Files in which the larger or the smaller of two elements is taken; and why."""


def some_values(count: int) -> np.ndarray:
    """Values whose sum in float32 depends on its order."""
    return np.random.default_rng(1).standard_normal(count).astype(np.float32)


def joined(by: Join, a: np.float32, b: np.float32) -> np.float32:
    return max(a, b) if by is LARGEST else a + b


def launch(body: str, block: tuple[int, ...], values: np.ndarray) -> np.ndarray:
    """What each thread of a block has in `part` after the statements."""
    source = f"""extern "C" __global__ void combined(float* values) {{
    const int thread = threadIdx.y * blockDim.x + threadIdx.x;
    float part = values[thread];
    {body}
    values[thread] = part;
}}
"""
    found = values.copy()
    host_cuda.CUPY.RawKernel(source, "combined")((1,), block, (found,))
    return found


@pytest.mark.each_value
@pytest.mark.parametrize("by", [SUM, LARGEST])
@pytest.mark.parametrize("nearest", [1, 2, 8])
def test_lanes_combine_their_parts_with_those_of_lanes_that_are_ever_less_apart(
    by: Join, nearest: int
) -> None:
    values = some_values(64)
    wanted = [*values]
    for apart in (16, 8, 4, 2, 1):
        if apart >= nearest:
            wanted = [joined(by, part, wanted[lane ^ apart]) for lane, part in enumerate(wanted)]
    found = launch(over_lanes("part", by, nearest), (64,), values)
    assert found.tolist() == wanted
    assert len({*found[:32]}) == nearest


@pytest.mark.parametrize(("axis", "block"), [("x", (16, 1)), ("y", (3, 8)), ("y", (5, 1))])
@pytest.mark.parametrize("by", [SUM, LARGEST])
def test_the_first_half_of_threads_takes_the_parts_of_the_second(
    axis: str, block: tuple[int, int], by: Join
) -> None:
    columns, rows = block
    values = some_values(columns * rows)
    stride = "1" if axis == "x" else "blockDim.x"
    threads, lines = (columns, rows) if axis == "x" else (rows, columns)
    text = f"""__shared__ float parts[{values.size}];
    parts[thread] = part;
    {over_halves(axis, "parts[thread]", f"parts[thread + apart * {stride}]", by)}
    part = parts[{"0" if axis == "x" else "threadIdx.x"}];"""
    wanted = values.reshape(rows, columns).T if axis == "y" else values.reshape(lines, threads)
    for line, parts in enumerate(map(list, wanted)):
        while len(parts) > 1:
            half = len(parts) // 2
            parts[:] = [joined(by, parts[n], parts[n + half]) for n in range(half)]
        found = launch(text, block, values).reshape(rows, columns)
        assert {*(found[:, line] if axis == "y" else found[line])} == {*parts}


@pytest.mark.parametrize("unrolled", [1, 4])
def test_one_thread_adds_up_parts_in_the_order_of_their_numbers(unrolled: int) -> None:
    values = some_values(50)
    text = in_turn("float total", "values[n]", "50", "long long n", unrolled=unrolled)
    found = launch(f"{text} part = total;", (1,), values)
    assert found[0] == functools.reduce(np.add, values, np.float32(0))


def accumulators(dtype: DType) -> dict[str, Accumulator]:
    """Those of elements of a dtype, by name."""
    modes = [mode for mode in ReductionMode if dtype.is_floating or mode.is_exact]
    return {mode.value: accumulator_of(mode, dtype) for mode in modes} | {
        name: accumulator_of_place(mode) for name, mode in PLACES.items()
    }


def source_of(dtype: DType) -> str:
    """A kernel for each accumulator: its bytes, and its results of elements that are cut in two."""
    text = beginning(dtype, wide=False)
    for n, accumulator in enumerate(accumulators(dtype).values()):
        text += f"namespace of{n} {{ {accumulator.struct} }}\n"
        result = accumulator.result.format(state="state")
        text += f"""extern "C" __global__ void kernel{n}(const {C_TYPES[dtype]}* x, T* y, long long length) {{
    for (int cut = 0; cut <= length; ++cut)
        for (int turned = 0; turned < 2; ++turned) {{
            of{n}::State one = of{n}::State::none(), other = of{n}::State::none();
            for (int j = 0; j < length; ++j) (j < cut ? one : other).take((T)x[j], j);
            const of{n}::State state = turned ? other.with(one) : one.with(other);
            y[cut * 2 + turned] = {result};
        }}
    y[2 * length + 2] = sizeof(of{n}::State);
}}
"""
    return text


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_nan", [False, True])
def test_elements_may_be_cut_in_two_anywhere(dtype: DType, with_nan: bool) -> None:
    if with_nan and not dtype.is_floating:
        elements = np.array([*ELEMENTS[:-1], 9], dtype.numpy)
    else:
        elements = np.array([*ELEMENTS[:-1], math.nan if with_nan else ELEMENTS[-1]], dtype.numpy)
    module = host_cuda.CUPY.RawModule(source_of(dtype))
    for n, (name, accumulator) in enumerate(accumulators(dtype).items()):
        y = np.zeros(2 * elements.size + 3, value_dtype(dtype).numpy)
        module.get_function(f"kernel{n}")((1,), (1,), (elements, y, elements.size))
        if name in FOUND:
            wanted: Any = FOUND[name](elements)
        elif dtype.is_floating:
            wanted = math.nan if with_nan else OF_FLOATS[ReductionMode(name)](elements.astype(np.float64))
        else:
            wanted = OF_INTEGERS[ReductionMode(name)](elements.tolist())
        np.testing.assert_allclose(y[:-1], wanted, 1e-6 if dtype.is_floating else 0, err_msg=name)
        assert y[-1] == accumulator.nbytes(dtype), name


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_least_and_the_greatest_of_all_values_are_found_beside_no_elements(dtype: DType) -> None:
    if dtype.is_floating:
        extremes: list[Any] = [-math.inf, math.inf]
    else:
        extremes = [*integer_range(dtype.numpy)]
    module = host_cuda.CUPY.RawModule(source_of(dtype))
    for n, name in enumerate(accumulators(dtype)):
        if name not in (ReductionMode.MIN.value, ReductionMode.MAX.value):
            continue
        for extreme in extremes:
            elements = np.full(2, extreme, dtype.numpy)
            y = np.zeros(2 * elements.size + 3, value_dtype(dtype).numpy)
            module.get_function(f"kernel{n}")((1,), (1,), (elements, y, elements.size))
            assert {*y[:-1].tolist()} == {extreme}, name


def test_norms_keep_as_many_bytes_of_a_part_as_their_accumulators_have() -> None:
    sizes = [
        (accumulator.nbytes(dtype), len(accumulator.numbers) * dtype.itemsize)
        for accumulator in (MOMENTS, TWO_SUMS)
        for dtype in (DType.FLOAT32, DType.FLOAT64)
    ]
    assert sizes == [(12, 12), (24, 24), (8, 8), (16, 16)]


def test_a_join_with_the_part_without_elements_changes_nothing() -> None:
    joins = (SUM, LARGEST, ELEMENT_SUM, ELEMENT_PRODUCT, ELEMENT_MIN, ELEMENT_MAX)
    cases = [pair for by in joins for pair in ((by.none, "x", by), ("x", by.none, by))]
    texts = "".join(f"y[{n}] = {by.of(f'((T){a})', b)};\n" for n, (a, b, by) in enumerate(cases))
    source = beginning(DType.FLOAT32, wide=False)
    source += f'extern "C" __global__ void neutral(T x, T* y) {{ {texts} }}'
    neutral = host_cuda.CUPY.RawKernel(source, "neutral")
    for value in (*some_values(4), np.float32(0), np.float32(math.inf), np.float32(-math.inf)):
        y = np.zeros(len(cases), np.float32)
        neutral((1,), (1,), (value, y))
        assert y.tolist() == [value] * len(cases)


@pytest.mark.parametrize("by", [ELEMENT_MIN, ELEMENT_MAX])
def test_of_elements_nan_is_kept_and_of_equal_ones_the_first(by: Join) -> None:
    pairs = [(math.nan, 1.0), (1.0, math.nan), (0.0, -0.0), (-0.0, 0.0)]
    texts = "".join(f"y[{n}] = {by.of(f'x[{2 * n}]', f'x[{2 * n + 1}]')};\n" for n in range(len(pairs)))
    kernel = f'extern "C" __global__ void joined(const float* x, float* y) {{ {texts} }}'
    x, y = np.array(pairs, np.float32), np.zeros(len(pairs), np.float32)
    host_cuda.CUPY.RawKernel(kernel, "joined")((1,), (1,), (x, y))
    assert np.isnan(y[:2]).all()
    assert np.signbit(y[2:]).tolist() == [False, True]


def test_generated_kernels_combine_what_threads_have_in_no_other_way() -> None:
    folder = Path(cudnn_actor.engines.cuda.__file__).parent
    texts = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*.py")}
    exchanges = re.compile(r"__shfl|atomic[A-Z]|; \w+ /= 2\)")
    assert {name for name, text in texts.items() if exchanges.search(text)} == {*OWN_EXCHANGES}


def test_how_two_elements_become_one_is_written_in_one_file() -> None:
    folder = Path(cudnn_actor.engines.cuda.__file__).parent
    texts = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*.py")}
    joins = re.compile(r"([\w{}]+) [<>] [\w{}]+ \|\| \(?\1 != \1")  # the larger or the smaller one, or NaN
    assert {name for name, text in texts.items() if joins.search(text)} == {*OWN_JOINS}
