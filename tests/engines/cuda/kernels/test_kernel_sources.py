"""Kernels of our own that are compiled once for any number of samples."""

from __future__ import annotations

import pytest

from cudnn_actor.engines.cuda.kernels.transposes import describe_tiled
from cudnn_actor.engines.cuda.operations.pooling import pooling_launches
from cudnn_actor.protocol import GraphBuilder
from cudnn_actor.protocol.types.tensor import Layout, TensorSpec

BATCHES = (1, 2, 8, 100)


@pytest.mark.parametrize("kind", ["max_pool", "avg_pool"])
def test_a_pooling_has_one_source_for_all_batch_sizes(kind: str) -> None:
    sources: set[str] = set()
    for batch in BATCHES:
        g = GraphBuilder()
        x = g.input("x", (batch, 64, 14, 14), "bfloat16", layout="NHWC")
        body = g.build(y=getattr(g, kind)(x, 3, stride=2, pad=1)).body
        (operation,) = body.operations
        tensors = [body.tensor(uid) for uid in (*operation.reads, *operation.writes)]
        (launch,) = pooling_launches(operation, tensors)  # type: ignore[arg-type]
        sources.add(launch.source)
    assert len(sources) == 1


def test_a_change_of_layout_has_one_source_for_all_batch_sizes() -> None:
    sources: set[str] = set()
    for batch in BATCHES:
        given, to = (
            TensorSpec.packed((batch, 3, 224, 224), "bfloat16", of) for of in (Layout.NCHW, Layout.NHWC)
        )
        kernel = describe_tiled(given.dims, [to.strides, given.strides], [256, 256], 2)
        assert kernel is not None
        sources.update(launch.source for launch in kernel.launches())
    assert len(sources) == 1
