"""Self-checks of large graphs, whose values are drawn and compared on the device."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cudnn_actor.engines.cuda import CudaEngine
from cudnn_actor.engines.cuda.checking.comparison import Accuracy, compare_on_device, difference
from cudnn_actor.engines.cuda.checking.self_check import SelfCheck
from cudnn_actor.engines.cuda.checking.self_check_memory import draw_array
from cudnn_actor.engines.cuda.library.libraries import libraries
from cudnn_actor.engines.cuda.planning.cuda_builder import CudaBuilder
from cudnn_actor.protocol import DType, GraphBuilder, OperationGraph

from .test_operation_checks import builder

__all__ = ["builder"]


How = Callable[[GraphBuilder, Any, Callable[..., Any]], Any]


def made(how: How, dtype: DType) -> OperationGraph:
    """A graph of x and a tensor of weights."""
    g = GraphBuilder()
    x = g.input("x", (8, 64, 56, 56), dtype, layout="NHWC")
    return g.build(y=how(g, x, lambda *dims: g.input("w", dims, dtype))).body


PAIRS: dict[str, tuple[How, How]] = {
    "norm": (
        lambda g, x, w: g.relu(g.batch_norm_training(x, w(64), epsilon=1e-5)),
        lambda g, x, w: g.relu(g.batch_norm_training(x, w(64), epsilon=1.0)),
    ),
    "function": (
        lambda g, x, w: g.log(x) * w(64, 1, 1),
        lambda g, x, w: g.sqrt(x) * w(64, 1, 1),
    ),
    "convolution": (
        lambda g, x, w: g.conv(x, w(64, 64, 3, 3), pad=1),
        lambda g, x, w: g.relu(g.conv(x, w(64, 64, 3, 3), pad=1)),
    ),
}
"""Two graphs with the same buffers, by name."""


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16])
@pytest.mark.parametrize("name", PAIRS)
def test_a_plan_that_computes_another_large_graph_is_found(
    builder: CudaBuilder, name: str, dtype: DType
) -> None:
    one, other = (made(how, dtype) for how in PAIRS[name])
    right, wrong = (builder.build(graph, workspace_limit=None) for graph in (one, other))
    check = SelfCheck(one, builder.context)
    try:
        assert check.fault(right) is None
        assert "are wrong" in (check.fault(wrong) or "")
        assert check.fault(right) is None
    finally:
        check.close()


@pytest.mark.parametrize("dtype", [dtype for dtype in DType if dtype.is_floating])
@pytest.mark.parametrize("count", [1, 1000, (3 << 20) + 1])
def test_one_element_that_differs_is_found_on_the_device(
    engine: CudaEngine, dtype: DType, count: int
) -> None:
    accuracy, cupy = Accuracy(dtype), libraries().cupy
    with engine.stream:
        wanted = draw_array((count,), 0)
        assert set(np.unique(cupy.asnumpy(wanted))) <= set(range(-3, 5))
        assert not compare_on_device(wanted, wanted.copy(), accuracy)[0].size
        for wrong in (9.0, np.inf, np.nan):
            got = wanted.copy()
            got[0] = wrong
            assert "are wrong" in (difference(*compare_on_device(wanted, got, accuracy), accuracy) or "")


SCRIPT = """
import os
import threading
from pathlib import Path
from cudnn_actor.engines.cuda.checking import rehearsal
from cudnn_actor.engines.cuda.checking.self_check import SelfCheck
from cudnn_actor.engines.cuda.planning.cuda_builder import CudaBuilder
from cudnn_actor.protocol import GraphBuilder, MaxPool, Window

def pooled(batch):
    g = GraphBuilder()
    x = g.input("x", (batch, 64, 112, 112), "bfloat16", layout="NHWC")
    return g.build(y=g.apply(MaxPool(x=x, window=Window.symmetric(2, size=3, pad=1, stride=2)))).body

def compiled():
    return {each.name for each in Path(os.environ["CUPY_CACHE_DIR"]).rglob("*") if each.is_file()}

builder = CudaBuilder(0)
builder.open()
small, large = pooled(1), pooled(8)
done, rehearse = threading.Event(), rehearsal.rehearse
rehearsal.rehearse = lambda *given: (rehearse(*given), done.set())
builder.rehearsals.ask([small])
assert done.wait(100)
before = compiled()
assert before, "something has been compiled"
check = SelfCheck(large, builder.context)
check.rehearse()
check.close()
print(len(compiled() - before), len(before))
builder.close()
"""


def test_after_a_rehearsal_a_check_of_more_samples_compiles_almost_nothing(tmp_path: Path) -> None:
    """Dims of size 1 merge with others: a kernel that copies more samples may be another one."""
    environment = {**os.environ, "CUPY_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    more, rehearsed = map(int, done.stdout.split())
    assert more <= 1
    assert rehearsed > 10
