from __future__ import annotations

import numpy as np
import pytest

from cudnn_actor.protocol import (
    ConvBwdData,
    ConvBwdFilter,
    ConvFwd,
    ConvSpec,
    DType,
    Numerics,
    OutOfMemory,
    TensorSpec,
)
from cudnn_actor.protocol.messages.lowering import lower
from cudnn_actor.protocol.messages.messages import Compute

from ...in_one_test import cases_in_one_test
from ..problems import PROBLEMS, Problem, normal
from ..references import assert_close
from ..workbench import Workbench

KINDS = ["forward", "backward data", "backward filter"]
SAME_BITS = Numerics(deterministic=True)


def message_of(
    bench: Workbench, problem: Problem, kind: str, *, beta: float = 0.0, numerics: Numerics | None = None
) -> Compute:
    """A message with random operands, and 0 in the output."""
    x, w, y = (
        bench.place(normal(dims, DType.FLOAT64, seed) if seed != KINDS.index(kind) else np.zeros(dims))
        for seed, dims in zip((2, 3, 0), (problem.x, problem.w, problem.y), strict=True)
    )
    outputs = {"forward": y, "backward data": x, "backward filter": w}
    bench.engine.fill(bench.binding(outputs[kind]), 0.0)
    how = numerics or Numerics()
    if kind == "forward":
        return ConvFwd(x=x, w=w, y=y, conv=problem.conv, alpha=1.5, beta=beta, numerics=how)
    if kind == "backward data":
        return ConvBwdData(dy=y, w=w, dx=x, conv=problem.conv, alpha=1.5, beta=beta, numerics=how)
    return ConvBwdFilter(x=x, dy=y, dw=w, conv=problem.conv, alpha=1.5, beta=beta, numerics=how)


def least_workspace(bench: Workbench, message: Compute) -> int:
    """What the plan with the smallest workspace needs, as the refusal of a smaller one says."""
    with pytest.raises(OutOfMemory) as refusal:
        bench.engine.build(lower(message).graph, workspace_limit=-1)
    return refusal.value.requested


@cases_in_one_test
@pytest.mark.each_value
@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_with_less_workspace_computes_the_same(bench: Workbench, name: str, kind: str) -> None:
    message = message_of(bench, PROBLEMS[name], kind, beta=0.5)
    output = bench.binding(getattr(message, lower(message).outputs[0]))
    wanted = bench.run(message)
    least, most = (
        least_workspace(bench, message),
        bench.engine.build(lower(message).graph, workspace_limit=None),
    )
    for limit in {least, (least + most.workspace) // 2}:
        bench.engine.fill(output, 0.0)
        assert_close(bench.run(message, workspace_limit=limit), wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_keeps_to_the_workspace_limit(bench: Workbench, kind: str) -> None:
    problem = Problem((4, 8, 16, 16), (8, 8, 3, 3), ConvSpec.symmetric(2, pad=1))
    graph = lower(message_of(bench, problem, kind)).graph
    least = least_workspace(bench, message_of(bench, problem, kind))
    for limit in range(least, 4 * least, max(1, least // 4)):
        assert bench.engine.build(graph, workspace_limit=limit).workspace <= limit


@pytest.mark.parametrize("kind", KINDS)
def test_a_workspace_that_nothing_fits_in_is_refused(bench: Workbench, kind: str) -> None:
    message = message_of(bench, PROBLEMS["padded"], kind)
    least = least_workspace(bench, message)
    bench.engine.build(lower(message).graph, workspace_limit=least)
    with pytest.raises(OutOfMemory) as refusal:
        bench.engine.build(lower(message).graph, workspace_limit=least - 1)
    assert refusal.value.limit == least - 1


@cases_in_one_test
@pytest.mark.pairwise(of_exact=True)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["padded", "mostly_padding", "strided", "strided_past_the_filter"])
def test_what_the_workspace_held_does_not_leak(bench: Workbench, kind: str, name: str) -> None:
    wanted = bench.run(message_of(bench, PROBLEMS[name], kind, numerics=SAME_BITS))
    nan = bench.place(np.full((2, 16, 20, 20), np.nan))
    filters = bench.place(np.full((16, 16, 3, 3), np.nan))
    poison = ConvFwd(x=nan, w=filters, y=bench.place(np.zeros((2, 16, 18, 18))), conv=ConvSpec.symmetric(2))
    assert np.isnan(bench.run(poison)).all()
    got = bench.run(message_of(bench, PROBLEMS[name], kind, numerics=SAME_BITS))
    np.testing.assert_array_equal(got, wanted)


def test_a_plan_still_runs_after_a_larger_one_was_built(bench: Workbench) -> None:
    message = message_of(bench, PROBLEMS["padded"], "forward", numerics=SAME_BITS)
    wanted = bench.run(message)
    plan = bench.engine.build(lower(message).graph, workspace_limit=None)
    bench.run(message_of(bench, Problem((1, 32, 40, 40), (8, 32, 3, 3), ConvSpec.symmetric(2)), "forward"))
    bench.engine.fill(bench.binding(message.y), float("nan"))  # type: ignore[union-attr]
    bench.execute(plan, message)
    np.testing.assert_array_equal(bench.read(message.y), wanted)  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_that_is_asked_to_gives_the_same_bits_every_time(bench: Workbench, kind: str) -> None:
    message = message_of(bench, PROBLEMS["three_dimensional"], kind, numerics=SAME_BITS)
    np.testing.assert_array_equal(bench.run(message), bench.run(message))


def test_two_plans_of_one_graph_take_different_buffers(bench: Workbench) -> None:
    one = TensorSpec.packed((1, 1, 1, 1), DType.FLOAT32)
    two, three = (bench.place(np.full((1, 1, 1, 1), v, np.float32)) for v in (2, 3))
    y, z = bench.empty(one), bench.empty(one)
    first = ConvFwd(x=two, w=three, y=y, conv=ConvSpec.symmetric(2))
    second = ConvFwd(x=three, w=three, y=z, conv=ConvSpec.symmetric(2))
    plan = bench.engine.build(lower(first).graph, workspace_limit=None)
    bench.execute(plan, first)
    bench.execute(plan, second)
    assert [bench.read(y).item(), bench.read(z).item()] == [6, 9]
