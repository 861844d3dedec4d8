"""Steps that run kernels of our own: what plans store of them, and what is launched."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator
from typing import Any, get_args

import msgspec
import numpy as np
import pytest

from cudnn_actor.engines.base import EngineFailure
from cudnn_actor.engines.cuda.kernels.depthwise_kernels import Depthwise
from cudnn_actor.engines.cuda.kernels.elementwise import Elementwise
from cudnn_actor.engines.cuda.kernels.expressions import Constant, Expression, Scalar, renumber
from cudnn_actor.engines.cuda.kernels.kernel import Pointer
from cudnn_actor.engines.cuda.kernels.line_kernels import Lined
from cudnn_actor.engines.cuda.operations.fused_norms import Normed
from cudnn_actor.engines.cuda.planning.cuda_builder import CudaBuilder
from cudnn_actor.engines.cuda.planning.depthwise import compile_depthwise
from cudnn_actor.engines.cuda.planning.fusing import compile_fused
from cudnn_actor.engines.cuda.planning.partition import cut
from cudnn_actor.engines.cuda.planning.splitting import compile_split
from cudnn_actor.engines.cuda.running.plan import CudaPlan
from cudnn_actor.engines.cuda.running.recipe import AnyKernel, KernelStep
from cudnn_actor.protocol import Graph, OperationGraph

from ...depthwise_graphs import DEPTHWISE
from ...fused_graphs import ELEMENTWISE, IN_LINES, NORMS
from ...moved_graphs import CONCATENATED, IN_ROWS, TRANSPOSED


def piece_of(graph: Graph) -> OperationGraph:
    parts = cut(graph.body)
    return graph.body if parts is None else parts.pieces[0].graph


@functools.cache
def plans() -> list[tuple[OperationGraph, CudaPlan]]:
    copies = itertools.chain(*(group.values() for group in (ELEMENTWISE, CONCATENATED, TRANSPOSED, IN_ROWS)))
    fused = map(piece_of, (*IN_LINES.values(), *NORMS.values()))
    return [
        *((graph.body, compile_split(graph.body, None, None)) for graph in copies),
        *((piece, compile_fused(piece, None)) for piece in fused),
        *((piece, compile_depthwise(piece, None)) for piece in map(piece_of, DEPTHWISE.values())),
    ]


def steps() -> Iterator[KernelStep[AnyKernel]]:
    for _, plan in plans():
        for step in plan.recipe.steps:
            assert isinstance(step, KernelStep)
            yield step


def test_there_are_plans_with_each_kind_of_kernel() -> None:
    assert {type(step.kernel) for step in steps()} == {*get_args(AnyKernel)}


def test_plans_survive_being_bytes() -> None:
    for graph, plan in plans():
        data = CudaBuilder(0).export(plan)
        assert data is not None
        assert CudaBuilder(0).restore(graph, data).recipe == plan.recipe


def damaged(kernel: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A stored kernel of another kind, or of none, and one with another type in each of its fields."""
    yield kernel | {"type": "unheard of"}
    yield {name: value for name, value in kernel.items() if name != "type"}
    for name in kernel.keys() - {"type"}:
        yield kernel | {name: "no such value"}


def test_bytes_with_a_damaged_kernel_are_refused_before_it_is_compiled() -> None:
    named = {plan.tag.rpartition("/")[2]: (graph, plan) for graph, plan in plans()}
    for graph, plan in named.values():
        recipe = msgspec.msgpack.decode(msgspec.msgpack.encode(plan.recipe))
        for kernel in damaged(recipe["steps"][0]["kernel"]):
            changed = recipe | {"steps": [recipe["steps"][0] | {"kernel": kernel}]}
            with pytest.raises(EngineFailure, match="BAD_PLAN"):
                CudaBuilder(0).restore(graph, msgspec.msgpack.encode(changed))


KINDS: dict[type, tuple[str, ...]] = {
    Pointer: ("pointer",),
    np.ndarray: ("pointer",),
    Scalar: ("double",),
    int: ("long long", "pointer"),  # 0, for a workspace that is not needed
    np.float32: ("T",),
    np.float64: ("T",),
}


def kind_of(parameter: str) -> str:
    return "pointer" if "*" in parameter else parameter.replace("const ", "").strip().rpartition(" ")[0]


def test_launches_take_all_tensors_of_their_step_and_no_other() -> None:
    for step in steps():
        launches = step.kernel.launches()
        arguments = [argument for launch in launches for argument in launch.arguments]
        assert {one.number for one in arguments if isinstance(one, Pointer)} == {*range(len(step.sources))}
        for launch in launches:
            found = re.search(rf'"C" __global__ .*\b{launch.name}\(([^)]*)\)', launch.source)
            assert found is not None
            for argument, parameter in zip(launch.arguments, found[1].split(","), strict=True):
                assert kind_of(parameter) in KINDS[type(argument)], (launch.name, parameter)


def with_scalar(node: Any) -> Any:
    """An expression with a scalar of the plan in the place of each constant."""
    if isinstance(node, Constant):
        return Scalar(0)
    if isinstance(node, Expression):
        return msgspec.structs.replace(node, operands=tuple(map(with_scalar, node.operands)))
    return node


def test_a_kernel_takes_the_numbers_that_its_scalars_have_in_the_whole_plan() -> None:
    seen = set()
    for step in steps():
        kernel: Any = step.kernel
        body = tuple(map(with_scalar, getattr(kernel, "body", ())))
        if not body or body == kernel.body:
            continue
        seen.add(type(kernel))
        (*_, launch) = renumber(msgspec.structs.replace(kernel, body=body), [7]).launches()
        assert [one for one in launch.arguments if isinstance(one, Scalar)] == [Scalar(7)]
        assert "double scalar7" in launch.source
    assert seen == {Elementwise, Lined, Normed, Depthwise}
