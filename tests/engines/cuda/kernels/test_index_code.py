"""The C++ of indices, and that generated kernels have no other."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import cudnn_actor.engines.cuda
from cudnn_actor.engines.cuda.kernels.axes import extent
from cudnn_actor.engines.cuda.kernels.index_code import (
    INDEXING,
    block_loop,
    division,
    is_wide,
    number_of,
    offset_of,
    split_all,
    split_index,
    thread_loop,
    with_divisors,
)

from ... import host_cuda

SIZES = {"s0": 3, "s1": 5, "s2": 4, "s3": 1}
"""Of axes, the fastest first."""
OWN_LOOPS = {
    "operations/padding.py": "all rows of a block are of the same part of the columns",
}
"""Files with a loop over the grid that is not `index_code`'s, and why."""
LOOPS = [
    thread_loop("n", "count"),
    block_loop("n", "count"),
    block_loop("n", "count", "(long long)blockDim.x", "threadIdx.x"),
    "EACH(n, count)",
]


def test_numbers_whose_sums_fit_into_32_bits_need_no_more() -> None:
    assert [is_wide(1, n) for n in ((1 << 31) - 1, 1 << 31)] == [False, True]
    assert [is_wide(1, n, sums=True) for n in ((1 << 30) - 1, 1 << 30)] == [False, True]


def test_an_extent_is_the_distance_of_the_first_element_and_the_last() -> None:
    assert extent((3, 1, 4), (-10, 99, 2)) == 26
    assert extent((0, 4), (5, 1)) == 3


@pytest.mark.parametrize("split", [division, split_index])
@pytest.mark.parametrize("loop", LOOPS)
def test_each_number_is_taken_apart_once(loop: str, split: Callable[[str, str, str, int], str]) -> None:
    axes = [(f"i{n}", f"s{n}") for n in range(len(SIZES))]
    parts = split_all("rest", axes, split, times=2)
    back = offset_of((name for name, _ in axes), ("1", "s0 * 2", "s0 * s1 * 2", "s0 * s1 * s2 * 2"), "1")
    again = number_of(("i3", "i2", "i1", "i0 / 2"), ("s2", "s1", "s0"))
    numbers = with_divisors(SIZES)
    declared = " ".join(f"const long long {name} = {number}ll;" for name, number in numbers.items())
    once = "threadIdx.x == 0" if "gridDim.x)" in loop else "true"
    source = f"""{INDEXING}typedef int I;
extern "C" __global__ void taken_apart(int* found, long long count) {{
    {declared}
    {loop} if ({once}) {{ I rest = (I)n; {parts} if ({again} == n) found[n] += {back}; }}
}}
"""
    count = math.prod(SIZES.values())
    found = host_cuda.CUPY.zeros(count, "int32")
    host_cuda.CUPY.RawKernel(source, "taken_apart")((3,), (7,), (found, count))
    assert found.get().tolist() == [1 + 2 * n for n in range(count)]


def test_generated_kernels_have_no_other_loops_over_the_grid_and_no_other_choice_of_a_type() -> None:
    folder = Path(cudnn_actor.engines.cuda.__file__).parent
    texts = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*.py")}
    del texts["kernels/index_code.py"]
    strides = re.compile(r"= ?(\(long long\))?gridDim")
    assert {name for name, text in texts.items() if strides.search(text)} == {*OWN_LOOPS}
    chosen = re.compile(r"\"long long\" if |>= 1 << 3[01]")
    assert not [name for name, text in texts.items() if chosen.search(text)]
