"""Grouped products on tensor cores, compiled for the host and run, with functions in place of instructions.

The functions do what the PTX ISA says of `ldmatrix`, of `mma.m16n8k16` and of `cp.async`, lane by lane.
Copies end when they start, so a kernel that waits for too few of them is found on a GPU alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cudnn_actor.engines.cuda.kernels.element_types import load
from cudnn_actor.engines.cuda.operations import grouped_matmul
from cudnn_actor.protocol import DType, GroupedMatMul, GroupedMatMulBackwardWeights, TensorSpec

from ....in_one_test import cases_in_one_test
from ...host_cuda import defined, launched

pytestmark = pytest.mark.usefixtures("on_the_host")

INSTRUCTIONS = """
struct alignas(8) float2 { float x, y; };
inline float2 make_float2(float x, float y) { return {x, y}; }
static const unsigned short* rows_of_lanes[1024];
static unsigned fragments_of_lanes[1024][6];
// Lane 8 n + i points to row i of matrix n. Each lane gets two neighbours of a row, or of a column.
template <bool TRANSPOSED> void matrices(unsigned (&parts)[4], const unsigned short* row) {
    if ((unsigned long)row % 16) abort();
    rows_of_lanes[me] = row;
    yield();
    const int lane = me % 32;
    for (int n = 0; n < 4; ++n) {
        const unsigned short* const* rows = rows_of_lanes + (me - lane) + 8 * n;
        parts[n] = 0;
        for (int e = 0; e < 2; ++e) {
            const int i = lane / 4, j = lane % 4 * 2 + e;
            parts[n] |= (unsigned)(TRANSPOSED ? rows[j][i] : rows[i][j]) << 16 * e;
        }
    }
    yield();
}
static float element(const unsigned (*lanes)[6], int lane, int part, int half) {
    const unsigned short bits = lanes[lane][part] >> 16 * half;
    return {value};
}
void add_product(float (&sums)[4], const unsigned (&a)[4], unsigned b_first, unsigned b_last) {
    const unsigned own[] = {a[0], a[1], a[2], a[3], b_first, b_last};
    __builtin_memcpy(fragments_of_lanes[me], own, sizeof own);
    yield();
    const int lane = me % 32;
    const unsigned (*lanes)[6] = fragments_of_lanes + (me - lane);
    for (int n = 0; n < 4; ++n) {
        const int i = lane / 4 + n / 2 * 8, j = lane % 4 * 2 + n % 2;
        for (int k = 0; k < 16; ++k)
            sums[n] += element(lanes, i % 8 * 4 + k % 8 / 2, i / 8 + k / 8 * 2, k % 2)
                * element(lanes, j * 4 + k % 8 / 2, 4 + k / 8, k % 2);
    }
    yield();
}
void start_copy(void* to, const void* from, int bytes) {
    if ((unsigned long)to % 16 || (bytes && (unsigned long)from % 16)) abort();
    __builtin_memset(to, 0, 16);
    __builtin_memcpy(to, from, bytes);
}
void end_group() {}
template <int COUNT> void wait_for_groups() {}
"""
"""In the place of `grouped_matmul.INSTRUCTIONS`."""
ROWS, INNER, COLUMNS, ENDS = 150, 40, 136, [20, 20, 149]


def lying(dims: tuple[int, ...], dtype: DType, order: str) -> TensorSpec:
    """A spec without gaps, perhaps with the last two dims swapped in memory."""
    if order == "packed":
        return TensorSpec.packed(dims, dtype)
    *outer, rows, columns = dims
    return TensorSpec.strided(dims, (*(rows * columns for _ in outer), 1, rows), dtype)


@cases_in_one_test
@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.BFLOAT16])
@pytest.mark.parametrize("other", ["packed", "swapped"])
@pytest.mark.parametrize("tokens", ["packed", "swapped"])
@pytest.mark.parametrize("forward", [True, False])
def test_tiles_on_tensor_cores_are_products(
    forward: bool, tokens: str, other: str, dtype: DType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles that end within the matrices, along each dim, and groups without rows."""
    instructions = INSTRUCTIONS.replace("{value}", load(dtype, "bits"))
    monkeypatch.setattr(grouped_matmul, "INSTRUCTIONS", instructions)
    specs = {
        "tokens": lying((ROWS, INNER), dtype, tokens),
        "offsets": TensorSpec.packed((len(ENDS),), DType.INT32),
    }
    operation: Any
    if forward:
        operation = GroupedMatMul(tokens="tokens", weights="weights", offsets="offsets", y="y")
        specs |= {"weights": lying((len(ENDS), INNER, COLUMNS), dtype, other)}
        specs |= {"y": TensorSpec.packed((ROWS, COLUMNS), DType.FLOAT32)}
    else:
        operation = GroupedMatMulBackwardWeights(
            tokens="tokens", dy="dy", offsets="offsets", dweights="dweights"
        )
        specs |= {"dy": lying((ROWS, COLUMNS), dtype, other)}
        specs |= {"dweights": TensorSpec.packed((len(ENDS), INNER, COLUMNS), DType.FLOAT32)}
    rng = np.random.default_rng(0)
    given: dict[str, np.ndarray] = {"offsets": np.array(ENDS, np.int32)}
    for name, _ in operation.named(operation.inputs):
        if name not in given:  # sums of small whole numbers are exact
            given[name] = rng.integers(-4, 5, specs[name].dims).astype(dtype.numpy)
    found, wanted = launched(operation, specs, given), defined(operation, specs, given)
    for name, expected in wanted.items():
        np.testing.assert_array_equal(found[name], expected)
