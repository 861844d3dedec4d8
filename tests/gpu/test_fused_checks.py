"""The self-check of kernels that are made for a graph finds those that compute something else.

What is changed here is the kernel's description, as if it had been made wrongly.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from cudnn_actor.engines.cuda import CudaEngine
from cudnn_actor.engines.cuda.checking.self_check import BuildContext, SelfCheck
from cudnn_actor.engines.cuda.kernels.elementwise import Elementwise
from cudnn_actor.engines.cuda.kernels.expressions import Constant, Expression, Leaf, Result
from cudnn_actor.engines.cuda.kernels.line_kernels import Lined, Reduced
from cudnn_actor.engines.cuda.kernels.norm_kernels import Normal
from cudnn_actor.engines.cuda.operations.fused_norms import Normed, beside
from cudnn_actor.engines.cuda.planning.fusing import compile_fused
from cudnn_actor.engines.cuda.planning.partition import cut
from cudnn_actor.engines.cuda.planning.splitting import compile_split
from cudnn_actor.engines.cuda.running.plan import CudaPlan
from cudnn_actor.engines.cuda.running.recipe import KernelStep
from cudnn_actor.protocol import OperationGraph, PointwiseMode, ReductionMode

from ..engines import fused_graphs
from ..engines.fused_graphs import ELEMENTWISE, IN_LINES
from .checked_graphs import SOFTMAX

__all__ = ["CASES", "Sabotage", "plan_of"]

POINTWISE = {f"elementwise {name}": graph.body for name, graph in ELEMENTWISE.items()}
OF_NORMS = {f"norm of {name}": graph.body for name, graph in fused_graphs.NORMS.items()}
GRAPHS = {name: graph.body for name, graph in IN_LINES.items()} | POINTWISE | OF_NORMS
GRAPHS |= {
    name: OperationGraph(tensors=tuple(tensors), operations=(operation,))
    for name, (tensors, operation) in SOFTMAX.items()
}
OfAny = KernelStep[Elementwise] | KernelStep[Lined] | KernelStep[Normed]
Sabotage = Callable[[Any], KernelStep[Any]]
OTHER_MODES = {
    PointwiseMode.MUL: PointwiseMode.ADD,
    PointwiseMode.ADD: PointwiseMode.SUB,
    PointwiseMode.SUB: PointwiseMode.ADD,
    PointwiseMode.NEG: PointwiseMode.IDENTITY,
}
_AVERAGING = (ReductionMode.SUM, ReductionMode.MEAN)


def plan_of(name: str) -> tuple[OperationGraph, CudaPlan]:
    """A graph that runs as one kernel, and its plan."""
    graph = GRAPHS[name]
    if name in POINTWISE:
        return graph, compile_split(graph, None, None)
    parts = cut(graph)
    if parts is not None:  # the others are views
        ((graph, *_),) = parts.pieces
    return graph, compile_fused(graph, None)


def of_kernel(step: Any, **changes: Any) -> Any:
    return msgspec.structs.replace(step, kernel=msgspec.structs.replace(step.kernel, **changes))


# Of both sorts of kernels.


def rotated(step: OfAny) -> OfAny:
    """It reads from a result's place, and writes to an operand's."""
    return msgspec.structs.replace(step, sources=(*step.sources[1:], step.sources[0]))


def another_operand(step: OfAny) -> OfAny:
    """One operand in the place of another."""
    sources, operands = list(step.sources), slice(0, 2)
    if isinstance(step.kernel, Elementwise):
        operands = slice(len(step.kernel.results), len(step.kernel.results) + 2)
    sources[operands] = sources[operands][:1] * 2
    return msgspec.structs.replace(step, sources=tuple(sources))


def swapped_results(step: OfAny) -> OfAny:
    sources = list(step.sources)
    first = 0 if isinstance(step.kernel, Elementwise) else len(step.kernel.operands)
    if isinstance(step.kernel, Normed):
        first += len(beside(step.kernel.operation))
    sources[first : first + 2] = sources[first : first + 2][::-1]
    return msgspec.structs.replace(step, sources=tuple(sources))


def another_result(step: OfAny) -> OfAny:
    """What the second result is, stored as the first."""
    first, second, *others = step.kernel.results
    changed = msgspec.structs.replace(first, value=second.value)
    return of_kernel(step, results=(changed, second, *others))  # type: ignore[no-any-return]


def another_function(step: OfAny) -> OfAny:
    """The last expression that may be another one."""
    body = list(step.kernel.body)
    at = max(n for n, node in enumerate(body) if isinstance(node, Expression) and node.mode in OTHER_MODES)
    node = body[at]
    assert isinstance(node, Expression)
    body[at] = msgspec.structs.replace(node, mode=OTHER_MODES[node.mode])
    return of_kernel(step, body=tuple(body))  # type: ignore[no-any-return]


def larger_constants(step: OfAny) -> OfAny:
    def twice(node: Any) -> Any:
        if isinstance(node, Constant):
            return Constant(2 * node.value)
        if isinstance(node, Expression):
            return msgspec.structs.replace(node, operands=tuple(map(twice, node.operands)))
        return node

    return of_kernel(step, body=tuple(map(twice, step.kernel.body)))  # type: ignore[no-any-return]


# Of kernels over lines.


def another_reduction(step: KernelStep[Lined]) -> KernelStep[Lined]:
    """The largest in the place of sums and means."""
    body = [
        msgspec.structs.replace(node, mode=ReductionMode.MAX)
        if isinstance(node, Reduced) and node.mode in _AVERAGING
        else node
        for node in step.kernel.body
    ]
    return of_kernel(step, body=tuple(body))  # type: ignore[no-any-return]


def resized(axes: Any, by: int) -> Any:
    (size, steps), *others = axes
    return ((size + by, steps), *others)


def of_lines(step: KernelStep[Lined], **changes: Any) -> KernelStep[Lined]:
    return of_kernel(step, lines=step.kernel.lines._replace(**changes))  # type: ignore[no-any-return]


def shorter_lines(step: KernelStep[Lined]) -> KernelStep[Lined]:
    return of_lines(step, along=resized(step.kernel.lines.along, -1))


def one_line_less(step: KernelStep[Lined]) -> KernelStep[Lined]:
    return of_lines(step, across=resized(step.kernel.lines.across, -1))


def one_line_more(step: KernelStep[Lined]) -> KernelStep[Lined]:
    return of_lines(step, across=resized(step.kernel.lines.across, 1))


def the_first_line(step: KernelStep[Lined]) -> KernelStep[Lined]:
    """The first line of the first operand for all lines."""
    across = step.kernel.lines.across
    return of_lines(step, across=tuple((size, (0, *steps[1:])) for size, steps in across))


def the_other_axes(step: KernelStep[Lined]) -> KernelStep[Lined]:
    """Lines along the axes that they should lie across."""
    lines = step.kernel.lines
    return of_lines(step, along=lines.across, across=lines.along, vector=1)


# Of the kernels of norms.


def another_epsilon(step: KernelStep[Normed]) -> KernelStep[Normed]:
    operation: Any = step.kernel.operation
    found = msgspec.structs.replace(operation, epsilon=4 * operation.epsilon + 1)
    return of_kernel(step, operation=found)  # type: ignore[no-any-return]


def another_element(step: KernelStep[Normed]) -> KernelStep[Normed]:
    """The second of what is read, where the norm has another value."""
    other = Leaf(1, step.kernel.operands[1])
    body = [
        Normal((other, *node.operands[1:])) if isinstance(node, Normal) else node for node in step.kernel.body
    ]
    return of_kernel(step, body=tuple(body))  # type: ignore[no-any-return]


def turned(step: KernelStep[Normed]) -> KernelStep[Normed]:
    """Rows of the second of what is read in the place of columns."""
    strides = list(step.kernel.strides)
    *others, height, width = strides[1]
    strides[1] = (*others, width, height)
    return of_kernel(step, strides=tuple(strides))  # type: ignore[no-any-return]


def swapped_weights(step: KernelStep[Normed]) -> KernelStep[Normed]:
    """Of two operands beside the elements, each in the place of the other."""
    sources, first = list(step.sources), len(step.kernel.operands)
    sources[first : first + 2] = sources[first : first + 2][::-1]
    return msgspec.structs.replace(step, sources=tuple(sources))


# Of elementwise kernels.


def one_place_less(step: KernelStep[Elementwise]) -> KernelStep[Elementwise]:
    return fewer(step, 1)


def one_place_more(step: KernelStep[Elementwise]) -> KernelStep[Elementwise]:
    return fewer(step, -1)


def fewer(step: KernelStep[Elementwise], count: int) -> KernelStep[Elementwise]:
    size, *others = step.kernel.dims
    by = count if others else count * step.kernel.together
    return of_kernel(step, dims=(size - by, *others))  # type: ignore[no-any-return]


def the_first_place(step: KernelStep[Elementwise]) -> KernelStep[Elementwise]:
    """The first element of the first operand for all of them."""
    strides = list(step.kernel.strides)
    strides[len(step.kernel.results)] = (0,) * len(step.kernel.dims)
    return of_kernel(step, strides=tuple(strides))  # type: ignore[no-any-return]


def the_first_selected(step: KernelStep[Elementwise]) -> KernelStep[Elementwise]:
    """Whatever indices say, the first along their axis."""

    def first(node: Any) -> Any:
        if isinstance(node, Leaf):
            selects = (msgspec.structs.replace(select, step=0) for select in node.selects)
            return msgspec.structs.replace(node, selects=tuple(selects))
        if isinstance(node, Expression):
            return msgspec.structs.replace(node, operands=tuple(map(first, node.operands)))
        return msgspec.structs.replace(node, value=first(node.value)) if isinstance(node, Result) else node

    body, results = (tuple(map(first, nodes)) for nodes in (step.kernel.body, step.kernel.results))
    return of_kernel(step, body=body, results=results)  # type: ignore[no-any-return]


OF_ALL = [another_function, rotated]
OF_LINES = [*OF_ALL, another_reduction, shorter_lines, one_line_less, the_first_line]
NORMS = ["short", "bfloat16", "float64", "layer_norm", "odd"]
BY_HAND = ["columns", "channels", "planes"]
PLACES = [name for name in POINTWISE if name != "elementwise single"]
SELECTING = [*POINTWISE][[*POINTWISE].index("elementwise looked up") :]
CASES: list[tuple[str, Sabotage]] = [
    *itertools.product(SOFTMAX, [*OF_LINES, one_line_more, the_other_axes]),
    *itertools.product(["softmax", "masked"], [larger_constants]),
    *itertools.product([*SOFTMAX][1:], [another_operand]),
    *itertools.product([*NORMS, *BY_HAND], [*OF_LINES, one_line_more, larger_constants]),
    *itertools.product([*NORMS, *BY_HAND, "long"], [swapped_results, another_result]),
    *itertools.product(["long", "longer"], [*OF_LINES[2:], another_function, another_operand]),
    *itertools.product(["masked", "masked columns"], [*OF_LINES, one_line_more]),
    # Of the cut ones, whose tensors are large, that would be far outside of the others.
    *itertools.product([name for name in OF_NORMS if not name.endswith("cut")], [rotated]),
    *itertools.product([*OF_NORMS][:12], [another_function]),
    *itertools.product([*OF_NORMS][:6], [swapped_results, another_result, another_epsilon, turned]),
    *itertools.product([*OF_NORMS][:9], [another_element, swapped_weights]),
    *itertools.product(POINTWISE, [another_function, rotated]),
    *itertools.product(PLACES, [one_place_less, one_place_more, the_first_place]),
    *itertools.product(SELECTING, [the_first_selected]),
    *itertools.product(
        [*POINTWISE][:4], [swapped_results, another_result, another_operand, larger_constants]
    ),
]


@pytest.fixture
def engine() -> Iterator[CudaEngine]:
    engine = CudaEngine()
    engine.open()
    yield engine
    engine.close()


@pytest.mark.parametrize(("name", "sabotage"), CASES)
def test_a_sabotaged_kernel_is_found(engine: CudaEngine, name: str, sabotage: Sabotage) -> None:
    graph, plan = plan_of(name)
    check = SelfCheck(graph, BuildContext(engine.handle, engine.stream))
    assert check.fault(plan) is None
    (step,) = plan.recipe.steps
    recipe = msgspec.structs.replace(plan.recipe, steps=(sabotage(step),))
    assert check.fault(CudaPlan(recipe, ())) is not None
    assert check.fault(plan) is None, "the next plan was blamed"
    check.close()


@pytest.mark.parametrize("name", GRAPHS)
def test_a_plan_without_its_kernel_is_found(engine: CudaEngine, name: str) -> None:
    graph, plan = plan_of(name)
    check = SelfCheck(graph, BuildContext(engine.handle, engine.stream))
    assert check.fault(plan) is None
    assert check.fault(CudaPlan(msgspec.structs.replace(plan.recipe, steps=()), ())) is not None
    check.close()
