"""One infinite number or NaN in an operand of a convolution goes exactly where the definition has it go.

An engine that reads zeros in place of padding, or between the pixels of a stride, makes NaN of infinity.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator

import numpy as np
import pytest

from cudnn_actor.engines.base import Engine
from cudnn_actor.protocol import ConvSpec, Graph, GraphBuilder

from ...whole import some
from ..devices import SESSIONS, factory
from ..differences import computed
from ..problems import Problem

COUNT = some(40)
SPECIAL = (math.inf, -math.inf, math.nan)
MOST = {1: 60, 2: 20, 3: 9}
"""Elements along each spatial dim, about, by the number of spatial dims."""


@pytest.fixture(params=["cpu", SESSIONS], scope="module")
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    engine = factory(request.param)()
    engine.open()
    yield engine
    engine.close()


def _drawn(rng: np.random.Generator) -> Problem:
    spatial = int(rng.integers(1, 4))
    depthwise = rng.random() < 0.3
    groups = int(rng.integers(2, 7)) if depthwise else int(rng.choice([1, 1, 2, 3]))
    channels = 1 if depthwise else int(rng.integers(1, 4))
    filters = groups if depthwise else groups * int(rng.integers(1, 5))
    taps, dilation, stride = (rng.integers(1, most, spatial).tolist() for most in (6, 4, 4))
    reach = [(count - 1) * step + 1 for count, step in zip(taps, dilation, strict=True)]
    pad = [int(rng.integers(most)) for most in reach]
    x = [
        int(rng.integers(max(1, size - 2 * before), MOST[spatial] + size))
        for size, before in zip(reach, pad, strict=True)
    ]
    conv = ConvSpec.symmetric(spatial, pad, stride, dilation=dilation, groups=groups)
    return Problem((int(rng.integers(1, 3)), groups * channels, *x), (filters, channels, *taps), conv)


def _graph(problem: Problem, result: str) -> Graph:
    g, conv = GraphBuilder(), problem.conv
    x, w = g.input("x", problem.x), g.input("w", problem.w)
    y = g.conv(x, w, pad=conv.pre_padding, stride=conv.stride, dilation=conv.dilation, groups=conv.groups)
    if result != "y":
        y = g.grad(y, x if result == "dx" else w, g.input("dy", problem.y))
    return g.build(result=y)


@pytest.mark.parametrize("result", ["y", "dx", "dw"])
def test_a_special_number_goes_where_it_goes_in_the_definition(engine: Engine, result: str) -> None:
    seed = secrets.randbelow(1 << 32)
    for number in range(COUNT):
        rng = np.random.default_rng([seed, number])
        problem = _drawn(rng)
        graph = _graph(problem, result)
        values = {port.name: rng.standard_normal(port.spec.dims, np.float32) for port in graph.inputs}
        operand = values[str(rng.choice([name for name in values if f"d{name}" != result]))]
        # Borders are where an engine might read something else.
        operand[tuple(int(rng.choice([0, size - 1])) for size in operand.shape)] = rng.choice(SPECIAL)
        with np.errstate(all="ignore"):
            wanted = computed(graph, values)["result"]
        arrays = {**values, "result": np.zeros(wanted.shape, np.float32)}
        plan = engine.build(graph.body, workspace_limit=None)
        engine.execute(plan, [arrays[graph.names_of[uid]] for uid in graph.body.bound], ())
        np.testing.assert_allclose(
            arrays["result"], wanted, rtol=1e-4, atol=1e-3, err_msg=f"seed {seed}, {number}: {problem}"
        )
