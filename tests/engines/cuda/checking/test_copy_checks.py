"""Self-checks of copies, run on the host: they pass, and what copies something else does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from cudnn_actor.engines.cuda.checking.self_check import BuildContext, SelfCheck
from cudnn_actor.engines.cuda.kernels.joined_kernels import Joined
from cudnn_actor.engines.cuda.kernels.row_copies import Rows
from cudnn_actor.engines.cuda.kernels.transposes import Tiled
from cudnn_actor.engines.cuda.planning.partition import cut
from cudnn_actor.engines.cuda.planning.splitting import compile_split
from cudnn_actor.engines.cuda.running.plan import CudaPlan
from cudnn_actor.engines.cuda.running.recipe import Buffer, KernelStep
from cudnn_actor.protocol import GraphBuilder, OperationGraph, Pad, PadMode, Tensor

from ....in_one_test import cases_in_one_test
from ...host_cuda import Stream
from ...moved_graphs import CONCATENATED, IN_ROWS, TRANSPOSED

__all__ = ["CASES", "GRAPHS", "fault"]

pytestmark = pytest.mark.usefixtures("on_the_host")

TILED = ("halves", "odd", "batches")
JOINED = ("rows", "channels last", "with none")
ROWS = ("odd channels", "odd channels of one", "bytes in rows of seven")
PADDED = ("constant", "edge", "reflect", "symmetric", "wrap")
WIDTHS = ((1, 2), (0, 0), (3, 4))


def padded(mode: Any) -> OperationGraph:
    g = GraphBuilder()
    value = 2.0 if mode == "constant" else 0.0
    return g.build(y=g.pad(g.input("x", (4, 3, 8)), WIDTHS, value, mode=mode)).body


GRAPHS: dict[str, OperationGraph] = {
    **{f"tiled, {name}": TRANSPOSED[name].body for name in TILED},
    **{f"joined, {name}": CONCATENATED[name].body for name in JOINED},
    **{f"rows, {name}": IN_ROWS[name].body for name in ROWS},
    **{f"padded, {mode}": padded(mode) for mode in PADDED},
}
Sabotage = Callable[[Any], tuple[Any, ...]]


def of_kernel(step: Any, **changes: Any) -> tuple[Any]:
    return (msgspec.structs.replace(step, kernel=msgspec.structs.replace(step.kernel, **changes)),)


def missing(_: Any) -> tuple[Any, ...]:
    return ()


def swapped(step: Any) -> tuple[Any, ...]:
    """The first two places exchanged."""
    first, second, *others = step.sources
    return (msgspec.structs.replace(step, sources=(second, first, *others)),)


def one_row_less(step: KernelStep[Tiled]) -> tuple[Any, ...]:
    return of_kernel(step, rows=step.kernel.rows - step.kernel.written)


def one_column_less(step: KernelStep[Tiled]) -> tuple[Any, ...]:
    return of_kernel(step, columns=step.kernel.columns - step.kernel.read)


def rows_apart(step: KernelStep[Tiled]) -> tuple[Any, ...]:
    return of_kernel(step, row_step=step.kernel.row_step - step.kernel.read)


def columns_apart(step: KernelStep[Tiled]) -> tuple[Any, ...]:
    return of_kernel(step, column_step=step.kernel.column_step + step.kernel.written)


def one_part_less(step: KernelStep[Joined]) -> tuple[Any, ...]:
    first, *others = step.kernel.kernels
    return (KernelStep(Joined(tuple(others)), step.sources[len(first.strides) :]),)


def one_part_elsewhere(step: KernelStep[Joined]) -> tuple[Any, ...]:
    """The last part in the place of the first."""
    sources = list(step.sources)
    sources[-2] = sources[0]
    return (msgspec.structs.replace(step, sources=tuple(sources)),)


def one_part_twice(step: KernelStep[Joined]) -> tuple[Any, ...]:
    """The first operand in the place of the last, from 16 bytes on."""
    sources = list(step.sources)
    assert isinstance(sources[1], Buffer)
    sources[-1] = msgspec.structs.replace(sources[1], offset=16)
    return (msgspec.structs.replace(step, sources=tuple(sources)),)


def fewer_elements(step: KernelStep[Joined]) -> tuple[Any, ...]:
    *kernels, last = step.kernel.kernels
    dims = (*last.dims[:-1], last.dims[-1] - last.together)
    return of_kernel(step, kernels=(*kernels, msgspec.structs.replace(last, dims=dims)))


def other_columns(step: KernelStep[Rows]) -> tuple[Any, ...]:
    """A unit from one part to its neighbour."""
    first, second, *others = step.kernel.parts
    one = step.kernel.together
    first, second = (
        msgspec.structs.replace(part, size=part.size + more) for part, more in ((first, one), (second, -one))
    )
    return of_kernel(step, parts=(first, second, *others))


def columns_further(step: KernelStep[Rows]) -> tuple[Any, ...]:
    """The last part from one column on."""
    *others, last = step.kernel.parts
    return of_kernel(step, parts=(*others, msgspec.structs.replace(last, offset=last.offset + 1)))


def fewer_rows(step: KernelStep[Rows]) -> tuple[Any, ...]:
    *slow, (size, steps) = step.kernel.axes
    return of_kernel(step, axes=(*slow, (size - 1, steps)))


def rows_elsewhere(step: KernelStep[Rows]) -> tuple[Any, ...]:
    *slow, (size, (step_, *steps)) = step.kernel.axes
    return of_kernel(step, axes=(*slow, (size, (step_, *(of - 1 for of in steps)))))


def with_operation(step: Any, **changes: Any) -> tuple[Any, ...]:
    return (msgspec.structs.replace(step, operation=msgspec.structs.replace(step.operation, **changes)),)


def other_border(step: Any) -> tuple[Any, ...]:
    if isinstance(step.operation, Pad):
        return with_operation(step, value=1.0)
    modes = list(PadMode)
    return with_operation(step, mode=modes[modes.index(step.operation.mode) - 1])


def other_widths(step: Any) -> tuple[Any, ...]:
    return with_operation(step, before=(0, 0, 2), after=(3, 0, 5))


def other_rows(step: Any) -> tuple[Any, ...]:
    """Rows of x one element nearer to each other."""
    x, y = step.tensors
    x = msgspec.structs.replace(x, strides=(x.strides[0], x.strides[1] - 1, 1))
    return (msgspec.structs.replace(step, tensors=(x, y)),)


SABOTAGES: dict[str, tuple[Sabotage, ...]] = {
    "tiled": (missing, swapped, one_row_less, one_column_less, rows_apart, columns_apart),
    "joined": (missing, swapped, one_part_less, one_part_elsewhere, one_part_twice, fewer_elements),
    "rows": (missing, other_columns, columns_further, fewer_rows, rows_elsewhere),
    "padded": (missing, swapped, other_border, other_widths, other_rows),
}
CASES = [(name, change) for name in GRAPHS for change in SABOTAGES[name.partition(",")[0]]]


def fault(graph: OperationGraph, change: Sabotage | None, context: BuildContext | None = None) -> str | None:
    """What a self-check says of the plan, with a change to its only step."""
    check = SelfCheck(graph, context or BuildContext(None, Stream()))
    plan = compile_split(graph, None, None)
    (step,) = plan.recipe.steps
    steps = (step,) if change is None else change(step)
    found = check.fault(CudaPlan(msgspec.structs.replace(plan.recipe, steps=steps), ()))
    check.close()
    return found


@pytest.mark.parametrize("name", GRAPHS)
def test_copies_pass(name: str) -> None:
    assert fault(GRAPHS[name], None) is None


EMPTY: dict[str, Callable[[GraphBuilder, Tensor], Tensor]] = {
    "slice": lambda _, x: x[:0],
    "transpose": lambda _, x: x[:, :0].transpose(1, 0, 2),
    "reshape": lambda _, x: x[:0].reshape(0, 7),
    "concatenation": lambda g, x: g.concatenate((x[:0], x[:0])),
    "padding": lambda g, x: g.pad(x[:0], 1, 3.0),
    "border": lambda g, x: g.pad(x[:0], ((0, 0), (1, 1), (0, 3)), mode="wrap"),
}


@pytest.mark.parametrize("name", EMPTY)
def test_tensors_may_have_no_elements(name: str) -> None:
    g = GraphBuilder()
    graph = g.build(y=EMPTY[name](g, g.input("x", (2, 3, 4)))).body
    parts = cut(graph)
    for piece in [graph] if parts is None else [piece.graph for piece in parts.pieces]:
        assert fault(piece, None) is None


@cases_in_one_test
@pytest.mark.each_value
@pytest.mark.parametrize(("name", "change"), CASES, ids=lambda one: getattr(one, "__name__", one))
def test_what_copies_something_else_does_not(name: str, change: Sabotage) -> None:
    assert fault(GRAPHS[name], change) is not None
