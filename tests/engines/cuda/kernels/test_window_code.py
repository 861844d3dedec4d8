"""The C++ of windows: a window covers the places that it says, and a place is covered by these windows."""

from __future__ import annotations

import pytest

from cudnn_actor.engines.cuda.kernels.window_code import adaptive_loop, covered_place, covering_window

from ... import host_cuda

PLACES, WINDOWS, TAPS, BEFORE, STRIDE, DILATION = 13, 5, 4, 3, 3, 2
TAP = f"for (I t = 0; t < {TAPS}; ++t)"
FORWARD, BACK = f"for (I q = 0; q < {WINDOWS}; ++q)", f"for (I p = 0; p < {PLACES}; ++p)"
LOOPS = {
    "places of windows": f"{FORWARD} {TAP} {{ {covered_place('p', 'q', 't', 0, str(PLACES))} COUNT }}",
    "windows of places": f"{BACK} {TAP} {{ {covering_window('q', 'p', 't', 0, str(WINDOWS))} COUNT }}",
    "places of adaptive windows": f"{FORWARD} {adaptive_loop('p', 'q', str(PLACES), str(WINDOWS))} COUNT",
    "adaptive windows of places": f"{BACK} {adaptive_loop('q', 'p', str(WINDOWS), str(PLACES))} COUNT",
}


def covered(window: int, *, adaptive: bool) -> set[int]:
    """The places that a window covers."""
    if adaptive:
        return {*range(window * PLACES // WINDOWS, -(-(window + 1) * PLACES // WINDOWS))}
    taps = (window * STRIDE - BEFORE + tap * DILATION for tap in range(TAPS))
    return {place for place in taps if 0 <= place < PLACES}


@pytest.mark.parametrize("name", LOOPS)
def test_each_place_of_each_window_is_found_once(name: str) -> None:
    source = f"""typedef int I;
constexpr I pre0 = {BEFORE}, stride0 = {STRIDE}, dilation0 = {DILATION};
#define COUNT ++found[q * {PLACES} + p];
extern "C" __global__ void windows(int* found) {{ {LOOPS[name]} }}
"""
    found = host_cuda.CUPY.zeros((WINDOWS + 1) * PLACES, "int32")  # with room for a window too many
    host_cuda.CUPY.RawKernel(source, "windows")((1,), (1,), (found,))
    wanted = [covered(window, adaptive="adaptive" in name) for window in range(WINDOWS)]
    expected = [[int(place in places) for place in range(PLACES)] for places in [*wanted, set()]]
    assert found.get().reshape(WINDOWS + 1, PLACES).tolist() == expected
