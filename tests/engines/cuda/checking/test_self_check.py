"""Self-checks of kernels of our own, run on the host: what is right passes, and what is wrong does not."""

from __future__ import annotations

import ctypes
import functools
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from cudnn_actor.engines.cuda.checking import comparison
from cudnn_actor.engines.cuda.checking.comparison import (
    _TOLERANCES,
    Accuracy,
    compare_on_device,
    difference,
    sample,
)
from cudnn_actor.engines.cuda.checking.convolution_reference import Reference, References
from cudnn_actor.engines.cuda.checking.evaluated_reference import (
    OnDevice,
    OnDeviceApart,
    OnHost,
    OnHostInPart,
    OwnProducts,
    evaluator_of,
)
from cudnn_actor.engines.cuda.checking.journal import Journal
from cudnn_actor.engines.cuda.checking.self_check import BuildContext, SelfCheck
from cudnn_actor.engines.cuda.checking.self_check_memory import CheckedTensor, Findings, draw_array
from cudnn_actor.engines.cuda.kernels.elementwise import elementwise
from cudnn_actor.engines.cuda.kernels.expressions import Constant
from cudnn_actor.engines.cuda.planning.compiler import compile_plan
from cudnn_actor.engines.cuda.planning.splitting import compile_split
from cudnn_actor.engines.cuda.planning.tuning import tune
from cudnn_actor.engines.cuda.running.plan import CudaPlan
from cudnn_actor.engines.cuda.running.recipe import Buffer, KernelStep, OperationStep, Recipe
from cudnn_actor.protocol import (
    AttentionBackward,
    BatchNormTraining,
    ConvolutionBackwardFilter,
    ConvSpec,
    Cumulative,
    DType,
    GraphBuilder,
    GraphTensor,
    GroupNorm,
    InstanceNorm,
    LayerNorm,
    OperationGraph,
    ReductionMode,
    RMSNorm,
)

from ....gpu.test_fused_checks import Sabotage, another_function, plan_of, the_first_place
from ....in_one_test import cases_in_one_test
from ...host_cuda import CUPY, Stream

LAST = 99
"""The last way to run each operation: a kernel of our own."""


pytestmark = pytest.mark.usefixtures("on_the_host")


@pytest.mark.parametrize(
    ("of_a", "of_b"),
    [
        ((5, 7), (7, 3)),
        ((2, 3, 5, 7), (7, 4)),
        ((5, 7), (3, 7, 4)),
        ((2, 1, 5, 7), (3, 7, 4)),
        ((4, 1, 7), (7, 1)),
    ],
)
def test_products_of_our_own(of_a: tuple[int, ...], of_b: tuple[int, ...]) -> None:
    a, b = (np.random.default_rng(n).normal(size=of) for n, of in enumerate((of_a, of_b)))
    turned = np.ascontiguousarray(b.swapaxes(-1, -2)).swapaxes(-1, -2)
    for each in (b, turned):
        np.testing.assert_allclose(OwnProducts.matmul(a, each), a @ b, rtol=1e-12, atol=1e-12)


def test_the_library_that_multiplies_does_not_judge_itself() -> None:
    """Only its products of float64 would be the same as those that they are compared with."""
    for dtype, wanted in ((DType.FLOAT64, OnDeviceApart), (DType.FLOAT32, OnDevice)):
        g = GraphBuilder()
        graph = g.build(y=g.matmul(g.input("a", (400, 300), dtype), g.input("b", (300, 200), dtype)))
        assert evaluator_of(graph.body) is wanted


def scaled(rows: int) -> OperationGraph:
    """Of rows of 1,024 elements, a layer norm and what is computed of it."""
    g = GraphBuilder()
    x, scale = g.input("x", (rows, 1024)), g.input("scale", (1024,))
    return g.build(y=g.exp(g.apply(LayerNorm(x=x, scale=scale))) * x).body


def test_a_part_is_evaluated_on_the_host_until_the_device_has_the_functions() -> None:
    large = scaled(2000)
    assert evaluator_of(large) is OnDevice
    assert evaluator_of(large, ready=False) is OnHostInPart
    assert evaluator_of(scaled(8), ready=False) is OnHost
    assert evaluator_of(scaled(1 << 16), ready=False) is OnDevice, "too much to copy"
    g = GraphBuilder()
    whole = g.build(y=g.apply(Cumulative(x=g.input("x", (4096, 1024)), axis=0, mode=ReductionMode.SUM)))
    assert evaluator_of(whole.body, ready=False) is OnDevice, "no part of it is evaluated by itself"


class OfFewRows(OnHostInPart):
    """An eighth of the part that the host evaluates: kernels that run on the host take long."""

    most_work, most_elements = OnHostInPart.most_work // 8, OnHostInPart.most_elements // 8


@pytest.mark.parametrize("change", [None, another_function, the_first_place])
def test_what_is_evaluated_in_part_is_checked(change: Sabotage | None) -> None:
    g = GraphBuilder()
    graph = g.build(y=g.exp(g.input("x", (50, 1024))) * 0.5 + 1.0).body
    plan = compile_split(graph, None, None)
    if change is not None:
        (step,) = plan.recipe.steps
        plan = CudaPlan(msgspec.structs.replace(plan.recipe, steps=(change(step),)), plan.graphs)
    check = SelfCheck(graph, BuildContext(None, Stream()), evaluator=OfFewRows)
    found = check.fault(plan)
    check.close()
    assert (found is None) == (change is None), found


def test_what_is_drawn_on_a_device_is_spread_evenly_and_differs_with_the_seed() -> None:
    values = [draw_array((64, 1024), seed) for seed in range(4)]
    for each in values:
        numbers, counts = np.unique(each, return_counts=True)
        assert numbers.tolist() == list(range(-3, 5))
        np.testing.assert_allclose(counts, each.size / 8, rtol=0.05)
    pairs = np.corrcoef([part for each in values for part in (each[0::2].ravel(), each[1::2].ravel())])
    np.testing.assert_allclose(pairs, np.eye(8), atol=0.05)


def test_samples_of_each_number_take_its_place_in_memory() -> None:
    g = GraphBuilder()
    x = g.input("x", (3, 700), DType.FLOAT16)
    graph = g.build(y=g.log(g.exp(x)), z=g.rsqrt(x)).body
    check = SelfCheck(graph, BuildContext(None, Stream()))
    drawn, sampled = (np.empty((3, 700), np.float16) for _ in range(2))
    plain = CheckedTensor(CUPY.cuda.MemoryPool(), graph.tensor(graph.bound[0]), 0)
    for into, address in ((drawn, plain.pointer), (sampled, check.pointers[0])):
        ctypes.memmove(into.ctypes.data, address, into.nbytes)
    np.testing.assert_array_equal(sampled, np.abs(drawn) + 0.5)


def contents(tensor: GraphTensor, checked: CheckedTensor) -> np.ndarray:
    """The memory between the guards, not a copy of it."""
    data = (ctypes.c_ubyte * tensor.spec.nbytes).from_address(checked.pointer)
    return np.ctypeslib.as_array(data).view(tensor.dtype.numpy)


@cases_in_one_test
@pytest.mark.parametrize("dtype", list(DType))
def test_tensors_of_each_dtype_have_the_same_numbers_as_far_as_it_holds_them(dtype: DType) -> None:
    tensor = GraphTensor(uid=0, dims=(40, 50), strides=(50, 1), dtype=dtype)
    checked = CheckedTensor(CUPY.cuda.MemoryPool(), tensor, 7)
    numbers = draw_array((40, 50), 7)
    if dtype is DType.BOOL:
        numbers = numbers != 0
    elif dtype.name.startswith("UINT"):
        numbers = np.maximum(numbers, 0)
    np.testing.assert_array_equal(contents(tensor, checked).reshape(40, 50).astype(np.float64), numbers)


@pytest.mark.parametrize("dtype", [dtype for dtype in DType if dtype.is_floating])
@pytest.mark.parametrize("nan", [np.nan, -np.nan])
def test_nan_is_found_in_elements_and_not_between_them(dtype: DType, nan: float) -> None:
    """Of either sign; infinity is none."""
    pool = CUPY.cuda.MemoryPool()
    tensor = GraphTensor(uid=0, dims=(3, 1, 5), strides=(7, 1, 1), dtype=dtype)
    checked, findings = CheckedTensor(pool, tensor, 0), Findings(pool)
    elements = contents(tensor, checked)
    elements[8], elements[14] = np.inf, -np.inf
    for place, there in ((6, False), (15, True)):
        elements[place] = nan
        checked.look_for_nan(findings)
        assert findings.read() == (False, there)


@pytest.mark.parametrize(
    ("place", "strayed"), [(-4096, True), (-1, True), (0, False), (1999, False), (2000, True), (6095, True)]
)
def test_a_byte_that_has_changed_before_or_behind_a_tensor_is_found(place: int, strayed: bool) -> None:
    """`place` is counted from the tensor's first byte. It has 2000."""
    pool = CUPY.cuda.MemoryPool()
    tensor = GraphTensor(uid=0, dims=(1000,), strides=(1,), dtype=DType.FLOAT16)
    checked, findings = CheckedTensor(pool, tensor, 0), Findings(pool)
    checked.check(findings)
    assert findings.read() == (False, False)
    ctypes.c_ubyte.from_address(checked.pointer + place).value ^= 1
    checked.check(findings)
    assert findings.read() == (strayed, False)


@pytest.mark.parametrize("place", [0, 1, 1000, 1998, 1999])
def test_a_byte_that_has_changed_changes_the_checksum(place: int) -> None:
    tensor = GraphTensor(uid=0, dims=(1000,), strides=(1,), dtype=DType.FLOAT16)
    checked = CheckedTensor(CUPY.cuda.MemoryPool(), tensor, 0)
    sums = CUPY.zeros(3, np.uint64)
    for number, change in enumerate((0, 0, 1)):
        contents(tensor, checked).view(np.uint8)[place] ^= change
        checked.add_up(sums.data.ptr + number * sums.itemsize)
    before, again, behind = sums.get().tolist()
    assert before == again != behind


FLOATS = [DType.FLOAT64, DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16]


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("most", "slack"), [(1 << 20, 1.0), (1 << 20, 4.0), (100, 1.0)])
@pytest.mark.parametrize("count", [1, 1000])
def test_what_agrees_on_a_device_is_what_has_no_fault(
    monkeypatch: pytest.MonkeyPatch, dtype: DType, count: int, most: int, slack: float
) -> None:
    """Just within what is allowed for each element, and just beyond it."""
    monkeypatch.setattr(comparison, "_MOST_COMPARED", most)
    accuracy, (own, sums, underflow) = Accuracy(dtype, slack), _TOLERANCES[dtype]
    wanted = np.random.default_rng(0).normal(size=count) * np.logspace(-3, 3, count)
    scale = np.sqrt(np.mean(sample(wanted) ** 2))
    allowed = own * np.abs(wanted) + slack * sums * scale + underflow
    within = wanted + 0.999 * allowed * np.where(np.arange(count) % 3, 1, -1)
    assert difference(sample(wanted), sample(within), accuracy) is None
    assert not compare_on_device(wanted, within, accuracy)[0].size
    beyond = within.copy()
    beyond[0] = wanted[0] + 1.001 * allowed[0]
    assert difference(*compare_on_device(wanted, beyond, accuracy), accuracy) is not None


@pytest.mark.each_value
@pytest.mark.parametrize("wrong", [np.nan, np.inf, 2.0])
@pytest.mark.parametrize("place", [0, 1, 4998, 4999])
def test_one_wrong_element_is_left_to_compare(place: int, wrong: float) -> None:
    wanted = np.ones(5000)
    got = wanted.copy()
    got[place] = wrong
    for accuracy in map(Accuracy, FLOATS):
        assert "are wrong" in (difference(*compare_on_device(wanted, got, accuracy), accuracy) or "")
        assert compare_on_device(got, wanted, accuracy)[0].size


def test_infinities_and_nan_that_are_wanted_are_compared_on_the_host() -> None:
    wanted = np.array([1.0, np.inf, -np.inf, np.nan])
    for accuracy in map(Accuracy, FLOATS):
        compared = compare_on_device(wanted, wanted.copy(), accuracy)
        assert compared[0].size == 4
        assert difference(*compared, accuracy) is None


def test_a_build_tells_each_plan_that_it_tries() -> None:
    g = GraphBuilder()
    graph = g.build(y=g.softmax(g.softmax(g.input("x", (4, 6))), axis=0)).body
    told: list[str] = []
    plan = compile_plan(graph, BuildContext(None, Stream(), trying=told.append), None)
    assert [tag.split("/")[1] for tag in told] == ["softmax", "softmax"]
    assert len(plan.recipe.steps) == 2


def test_a_build_tells_of_each_plan_that_cannot_be_built() -> None:
    """To find out may take half a second for each, and a builder that says nothing for long is killed."""
    g = GraphBuilder()
    n = g.input("n", (4, 4), "int64")
    graph = g.build(y=g.take_along_axis(n, n, 1)).body
    told: list[str] = []
    plan = compile_plan(graph, BuildContext(None, Stream(), trying=told.append), None)
    assert told == ["it has no neighbours to be fused", plan.tag]


class Unwanted(Exception):
    """The plan is not wanted any more."""


def test_tuning_tells_of_them_too() -> None:
    g = GraphBuilder()
    n = g.input("n", (4, 4), "int64")
    graph = g.build(y=g.take_along_axis(n, n, 1)).body

    def progress(done: int, of: int, what: str) -> None:
        raise Unwanted(done, of, what)

    with pytest.raises(Unwanted, match=r"0, 0, 'it has no neighbours to be fused'"):
        tune(graph, BuildContext(None, Stream()), None, progress)


def gradients(g: GraphBuilder, dtype: DType, dropout: float, keys: int) -> list[Any]:
    """Those of q, k and v: with a single key, the first two are made of differences of equal numbers."""
    dims = {"dy": (2, 4, 9, 8), "q": (2, 4, 9, 8), "k": (2, 4, keys, 8), "v": (2, 4, keys, 8)}
    given: dict[str, Any] = {name: g.input(name, of, dtype) for name, of in dims.items()}
    given["y"] = g.input("y", dims["q"], dtype)
    wide = DType.FLOAT64 if dtype is DType.FLOAT64 else DType.FLOAT32
    given["statistics"] = g.input("statistics", (2, 4, 9, 1), wide)
    given["state"] = g.input("state", (2,), "int64")
    return list(g.apply(AttentionBackward(**given, dropout=dropout)))


def alone(dtype: DType = DType.FLOAT32, dropout: float = 0.1, keys: int = 1) -> OperationGraph:
    g = GraphBuilder()
    dq, dk, dv = gradients(g, dtype, dropout, keys)
    return g.build(dq=dq, dk=dk, dv=dv).body


def fault(
    graph: OperationGraph, change: Callable[[OperationStep], OperationStep] | None = None
) -> str | None:
    """What a self-check says of a plan by kernels of our own, with a change to its first step."""
    check = SelfCheck(graph, BuildContext(None, Stream()))
    plan = compile_split(graph, None, None, choice=LAST)
    if change is not None:
        first, *others = plan.recipe.steps
        assert isinstance(first, OperationStep)
        plan = CudaPlan(msgspec.structs.replace(plan.recipe, steps=(change(first), *others)), ())
    found = check.fault(plan)
    check.close()
    return found


@pytest.mark.each_value
@pytest.mark.parametrize("keys", [1, 9])
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16, DType.FLOAT64])
def test_what_is_left_of_terms_that_cancel_is_their_rounding(dtype: DType, keys: int) -> None:
    assert fault(alone(dtype, keys=keys)) is None


def test_and_so_is_what_follows_from_it() -> None:
    g = GraphBuilder()
    dq, dk, dv = gradients(g, DType.FLOAT32, 0.1, keys=1)
    more = g.exp(dq) * 0.5 - 0.5
    assert fault(g.build(dq=more, dk=g.sum(dk * 3.0, (0, 1)), dv=dv).body) is None


def with_operation(**fields: Any) -> Callable[[OperationStep], OperationStep]:
    def change(step: OperationStep) -> OperationStep:
        return msgspec.structs.replace(step, operation=msgspec.structs.replace(step.operation, **fields))

    return change


def swapped(one: str, other: str) -> Callable[[OperationStep], OperationStep]:
    """Each in the place of the other."""

    def change(step: OperationStep) -> OperationStep:
        names = [name for name, _ in step.operation.named()]
        sources, (first, second) = list(step.sources), map(names.index, (one, other))
        sources[first], sources[second] = sources[second], sources[first]
        return msgspec.structs.replace(step, sources=tuple(sources))

    return change


@pytest.mark.parametrize(
    ("keys", "change"),
    [
        (1, swapped("dy", "y")),
        (1, swapped("dy", "q")),
        (1, swapped("dk", "dv")),
        (1, with_operation(dropout=0.2)),
        (9, with_operation(dropout=0.2)),
        (9, with_operation(scale=0.3)),
        (9, with_operation(causal=True)),
        (9, swapped("q", "y")),
        (9, swapped("k", "v")),
        (9, swapped("dq", "dk")),
    ],
)
def test_a_plan_that_computes_something_else_is_found(
    keys: int, change: Callable[[OperationStep], OperationStep]
) -> None:
    """In bfloat16, of which most is allowed."""
    assert "are wrong" in (fault(alone(DType.BFLOAT16, keys=keys), change) or "")


def of_norm(operation: Callable[..., Any], dims: tuple[int, ...], dtype: DType) -> OperationGraph:
    """A norm and its gradients: of rows of one or two elements, little or nothing is left of dx."""
    g = GraphBuilder()
    weights = dims[-1:] if operation in (LayerNorm, RMSNorm) else dims[1:2]
    x, scale, dy = (g.input(n, of, dtype) for n, of in (("x", dims), ("scale", weights), ("dy", dims)))
    dx, dscale = g.grad(g.apply(operation(x=x, scale=scale)), (x, scale), dy)
    return g.build(dx=dx, dscale=dscale).body


@pytest.mark.parametrize(
    ("operation", "dims", "dtype"),
    [
        (LayerNorm, (5, 9, 2), DType.FLOAT32),
        (LayerNorm, (5, 9, 2), DType.FLOAT64),
        (RMSNorm, (5, 9, 1), DType.BFLOAT16),
        (BatchNormTraining, (2, 9), DType.FLOAT32),
        (InstanceNorm, (5, 9, 2), DType.FLOAT32),
        (functools.partial(GroupNorm, groups=3), (5, 6, 1), DType.FLOAT32),
    ],
)
def test_so_it_is_in_gradients_of_norms_of_one_or_two_elements(
    operation: Callable[..., Any], dims: tuple[int, ...], dtype: DType
) -> None:
    assert fault(of_norm(operation, dims, dtype)) is None


def test_and_there_too_a_plan_that_computes_something_else_is_found() -> None:
    graph = of_norm(LayerNorm, (5, 9, 2), DType.BFLOAT16)
    assert "are wrong" in (fault(graph, swapped("mean", "inverse_deviation")) or "")


def test_what_lies_between_two_whole_numbers_may_be_rounded_to_either() -> None:
    """Swish of 57.5 is a little less in float64, and 57.5 in float32, which is rounded to 58."""
    g = GraphBuilder()
    x, w = g.input("x", (1, 1, 1, 128), "int8"), g.input("w", (1, 1, 1, 1), "int8")
    graph = g.build(y=g.swish(g.conv(x, w) * 0.5).astype("int32")).body
    given, ones = np.arange(128, dtype=np.int8), np.ones(1, np.int8)
    single = given * np.float32(0.5)
    stored = np.rint(single / (1 + np.exp(-single))).astype(np.int32)
    places: dict[int, np.ndarray] = dict(zip(graph.bound, (given, ones, stored), strict=True))
    reference = Reference(graph, graph.results[0])
    wanted, got, _ = reference.compute(lambda uid: places[uid].ctypes.data, ())
    assert difference(wanted, got, Accuracy(DType.INT32)) is None
    assert difference(wanted, got + 1, Accuracy(DType.INT32)) is not None


def test_roundings_that_functions_magnify_are_allowed_where_they_are() -> None:
    """Near 12, that of the sigmoid in float32 is magnified by 80,000."""
    g = GraphBuilder()
    x, w = g.input("x", (1, 1, 1, 16), "float32"), g.input("w", (1, 1, 1, 1), "float32")
    graph = g.build(y=g.pointwise("atanh", g.sigmoid(g.conv(x, w)))).body
    given, ones = np.arange(-3, 13, dtype=np.float32), np.ones(1, np.float32)
    stored = np.arctanh(1 / (1 + np.exp(-given, dtype=np.float32)))
    places: dict[int, np.ndarray] = dict(zip(graph.bound, (given, ones, stored), strict=True))
    references, accuracy = References(graph), Accuracy(DType.FLOAT32)
    (uid,) = graph.results

    def judged(places: dict[int, np.ndarray], *, leniently: bool) -> str | None:
        where = (lambda uid: places[uid].ctypes.data), ()
        (found,), (uncertainty,) = (
            references.compare(*where).values(),
            references.uncertainties(*where).values(),
        )
        return difference(*found, accuracy, uncertainty if leniently else 0.0)

    assert judged(places, leniently=False) is not None
    assert judged(places, leniently=True) is None
    for wrong in range(len(stored) - 4):
        others = stored.copy()
        others[wrong] += 0.05
        assert judged(places | {uid: others}, leniently=True) is not None


@pytest.mark.parametrize("sabotage", [another_function, the_first_place])
def test_integers_of_64_bits_are_compared_exactly(sabotage: Sabotage) -> None:
    """A difference of 1 is found at 2**63, where float64 has no odd numbers."""
    graph, plan = plan_of("elementwise unsigned")
    check = SelfCheck(graph, BuildContext(None, Stream()))
    assert check.fault(plan) is None
    (step,) = plan.recipe.steps
    recipe = msgspec.structs.replace(plan.recipe, steps=(sabotage(step),))
    assert "it computes 92233720368547758" in (check.fault(CudaPlan(recipe, ())) or "")
    check.close()


def test_a_result_of_few_elements_is_computed_from_several_draws() -> None:
    """Of the first draw, both sums of this gradient are 0, and so is what a wrong plan writes."""
    conv = ConvSpec(pre_padding=(2, 3), post_padding=(2, 3), stride=(3, 2), dilation=(3, 1))
    x = GraphTensor(uid=0, dims=(1, 1, 32, 1), strides=(1, 1, 10, 9), dtype=DType.FLOAT32)
    dy = GraphTensor(uid=1, dims=(1, 1, 11, 3), strides=(37, 1, 1, 12), dtype=DType.FLOAT32)
    dw = GraphTensor(uid=2, dims=(1, 1, 2, 3), strides=(2, 2, 1, 2), dtype=DType.FLOAT32)
    operation = ConvolutionBackwardFilter(conv=conv, x=0, dy=1, dw=2)
    graph = OperationGraph(tensors=(x, dy, dw), operations=(operation,))
    zeros = elementwise(Constant(0.0), DType.FLOAT32, dw.dims, [dw.strides])
    step = KernelStep(zeros, (Buffer(2),))
    plan = CudaPlan(Recipe(tag="zeros", steps=(step,), scratch=0, buffers=3, scalars=0), ())
    check = SelfCheck(graph, BuildContext(None, Stream()))
    assert check.fault_of_draw(plan) is None, "the first draw does not tell: the test needs another graph"
    assert "of its results are wrong" in str(check.fault(plan))
    assert "of its results are wrong" in str(check.fault(plan)), "the next plan has all draws again"
    check.close()


@pytest.mark.parametrize("elements", [1, 2, 4, 16])
def test_a_comparison_of_few_elements_is_told_from_one_that_differs_for_equal_numbers(elements: int) -> None:
    """Numbers are equal once in eight draws: of four draws, mostly in none."""

    def compared(name: str) -> OperationGraph:
        g = GraphBuilder()
        a, b = g.input("a", (elements,)), g.input("b", (elements,))
        return g.build(y=getattr(operator, name)(a, b)).body

    for asked, computed in (("lt", "le"), ("le", "lt"), ("gt", "ge")):
        check = SelfCheck(compared(asked), BuildContext(None, Stream()))
        assert check.fault(compile_split(compared(asked), None, None, choice=LAST)) is None
        assert check.fault(compile_split(compared(computed), None, None, choice=LAST)) is not None
        check.close()


@pytest.mark.parametrize("dims", [(4, 6), (8, 16)], ids=["few inputs", "many inputs"])
def test_a_plan_behind_another_one_is_checked_with_every_draw(dims: tuple[int, int]) -> None:
    """It writes what is right for the values that the check of the plan before it has left."""
    g = GraphBuilder()
    graph = g.build(y=g.sum(g.input("x", dims), (0, 1))).body
    y = graph.tensor(graph.results[0])
    place = graph.bound.index(y.uid)
    check = SelfCheck(graph, BuildContext(None, Stream()))
    assert check.fault(compile_split(graph, None, None, choice=LAST)) is None
    left = ctypes.c_float.from_address(check.pointers[place]).value
    constant = elementwise(Constant(left), y.dtype, y.dims, [y.strides])
    recipe = Recipe(
        tag="left", steps=(KernelStep(constant, (Buffer(place),)),), scratch=0, buffers=2, scalars=0
    )
    assert check.fault_of_draw(CudaPlan(recipe, ())) is None
    assert "of its results are wrong" in str(check.fault(CudaPlan(recipe, ())))
    check.close()


def test_a_long_sum_of_integers_is_no_sum_of_zeros() -> None:
    """Numbers that are as small as those of float16 must be would all be rounded to 0."""
    g = GraphBuilder()
    graph = g.build(y=g.sum(g.input("x", (1 << 14,), DType.INT32))).body
    assert fault(graph) is None
    y = graph.tensor(graph.results[0])
    zeros = elementwise(Constant(0.0), y.dtype, y.dims, [y.strides])
    places = tuple(Buffer(place) for place, uid in enumerate(graph.bound) if uid == y.uid)
    recipe = Recipe(tag="zeros", steps=(KernelStep(zeros, places),), scratch=0, buffers=2, scalars=0)
    check = SelfCheck(graph, BuildContext(None, Stream()))
    assert check.fault(CudaPlan(recipe, ())) is not None
    check.close()


def test_numbers_that_the_device_has_no_room_for_are_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    g = GraphBuilder()
    graph = g.build(y=g.sum(g.input("x", (4, 6)), 1)).body
    plan, path = compile_split(graph, None, None, choice=LAST), str(tmp_path / "journal")
    check = SelfCheck(graph, BuildContext(None, Stream(), Journal(path)))
    fill, seeds = CheckedTensor.fill, list[int]()

    def fill_with_little_room(tensor: CheckedTensor, seed: int) -> None:
        seeds.append(seed)
        if seed >= 8:  # of the draw behind the next one: two tensors, and their samples, for each
            raise MemoryError
        fill(tensor, seed)

    monkeypatch.setattr(CheckedTensor, "fill", fill_with_little_room)
    assert check.fault(plan) is None
    assert seeds == [4, 5, 8]
    assert check.fault(plan) is None
    assert seeds == [4, 5, 8, 0, 1, 4, 5, 8], "the next plan has the first draw again"
    check.close()
    for _ in range(2):
        assert not Journal(path).may_kill(plan.tag)
