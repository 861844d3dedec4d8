"""Compiles an operation graph into a plan: in one piece if cuDNN accepts it, else in several steps.

cuDNN's candidates are checked first, mostly in cuDNN's order, then the ways to run the
graph in steps. The first that passes its self-check becomes the plan.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import msgspec

from cudnn_actor.actors.logs import Log
from cudnn_actor.engines.base import StickyError
from cudnn_actor.engines.cuda.checking.self_check import BuildContext, SelfCheck
from cudnn_actor.engines.cuda.cudnn.compiled_attention import COMPILED_ATTENTION
from cudnn_actor.engines.cuda.cudnn.frontend_graph import Inapplicable, Refused
from cudnn_actor.engines.cuda.cudnn.kernel_caches import KernelCaches, compiles
from cudnn_actor.engines.cuda.library.failures import translate
from cudnn_actor.engines.cuda.operations import REFUSED
from cudnn_actor.engines.cuda.planning.aligned_products import aligned_product
from cudnn_actor.engines.cuda.planning.candidates import (
    COMPILES,
    DYNAMIC,
    TAKES_LONGER,
    CandidateNames,
    OnRefusal,
    build_candidate,
    candidates,
    check_whole,
    ignore_refusal,
    is_compiled_first,
    serialise,
)
from cudnn_actor.engines.cuda.planning.composition import compose, largest, scratch_bytes
from cudnn_actor.engines.cuda.planning.depthwise import compile_depthwise, is_depthwise
from cudnn_actor.engines.cuda.planning.fusing import compile_fused, norm_alone
from cudnn_actor.engines.cuda.planning.partition import Cut, cut
from cudnn_actor.engines.cuda.planning.product_halves import compile_halves, halves_of, is_split_by_default
from cudnn_actor.engines.cuda.planning.products import compile_product, product_of
from cudnn_actor.engines.cuda.planning.ranking import rank
from cudnn_actor.engines.cuda.planning.rearranging import (
    Rearranged,
    as_product,
    plan_of_rearranged,
    product_in_one_step,
    rearrangements,
)
from cudnn_actor.engines.cuda.planning.recurrent_passes import close_graph
from cudnn_actor.engines.cuda.planning.splitting import MOST_FORMS, compile_split, is_elementwise, ways
from cudnn_actor.engines.cuda.planning.steps import bound_sources, finish, graph_step, place_part
from cudnn_actor.engines.cuda.planning.widening import compile_widened, is_widened
from cudnn_actor.engines.cuda.running.loading import load, load_plan
from cudnn_actor.engines.cuda.running.plan import CudaPlan
from cudnn_actor.engines.cuda.running.recipe import GraphStep
from cudnn_actor.engines.support import check_graph, unsupported_error
from cudnn_actor.protocol.errors import OutOfMemory
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.operations import Convolution, MatMul, Pointwise

__all__ = [
    "WORKSPACE_BYTES",
    "compile_aligned",
    "compile_piece",
    "compile_plan",
    "compile_rearranged",
    "compile_whole",
    "may_wait",
]

log = Log("cudnn_actor")

WORKSPACE_BYTES = 4 << 30
"""The most workspace that a plan may use if no limit is set."""
_CHOICES = 3
"""How many candidates are tried for each form of a convolution's tensors."""


def compile_plan(
    graph: OperationGraph, context: BuildContext, workspace_limit: int | None, *, soon: bool = False
) -> CudaPlan:
    """Returns a checked plan for a graph. Blocks for milliseconds, or for seconds if kernels are compiled.

    `soon`: where cuDNN would compile the kernel of a convolution, product or norm, another plan will do if
    there is one; it is then marked as provisional.

    Raises `UnsupportedGraph`, `OutOfMemory` if only plans over the limit can run it, `EngineFailure`.
    """
    check_graph(graph, "cuda", refused=REFUSED)
    limit = WORKSPACE_BYTES if workspace_limit is None else workspace_limit
    parts = cut(graph)
    if parts is None:
        return compile_piece(graph, context, limit, soon=soon)
    return in_pieces(graph, parts, limit, lambda piece: compile_piece(piece, context, limit, soon=soon))


def compile_piece(
    graph: OperationGraph, context: BuildContext, limit: int, *, soon: bool = False
) -> CudaPlan:
    """`compile_plan` for a graph that `check_graph` accepts and `cut` does not cut, such as a piece."""
    if soon and may_wait(graph) and not graph.numerics.prefer:
        with contextlib.suppress(Refused):
            return _first_good(graph, context, limit, precompiled=True)
    try:
        return _first_good(graph, context, limit)
    except Refused as refusal:
        reason = refusal
    # Layers that are computed together may round too often, or take too much memory.
    if (parts := cut(graph, layers_apart=True)) is not None:
        return in_pieces(graph, parts, limit, lambda piece: compile_piece(piece, context, limit, soon=soon))
    try:
        unlimited = next(possible_plans(graph, context.handle, None, on_refusal=context.trying))
    except Refused:
        unlimited = None
    context.stream.synchronize()  # raises if the context is dead: then cuDNN refuses everything
    if unlimited is None or unlimited.workspace <= limit:
        raise unsupported_error(graph, "cuda", str(reason)) from reason
    numbers = range(len(graph.operations))
    needed = unlimited.workspace
    raise OutOfMemory(requested=needed, in_use=0, limit=limit, workspace=True, operations=numbers)


def in_pieces(
    graph: OperationGraph, parts: Cut, limit: int, build: Callable[[OperationGraph], CudaPlan]
) -> CudaPlan:
    """Returns the plan of a graph in pieces, compiled by `build`. Raises as `build`, and `OutOfMemory`."""
    between = scratch_bytes(parts)
    if between > limit:  # before any piece is built
        numbers = largest(graph, parts)
        raise OutOfMemory(requested=between, in_use=0, limit=limit, workspace=True, operations=numbers)
    plan = compose(graph, parts, build, limit)
    if plan.workspace > limit:
        most = max(plan.recipe.parts, key=lambda part: part.workspace)
        numbers = most.operations
        needed = plan.workspace
        raise OutOfMemory(requested=needed, in_use=0, limit=limit, workspace=True, operations=numbers)
    return plan


def may_wait(graph: OperationGraph) -> bool:
    """Whether a graph may have a plan for which cuDNN need not compile a kernel now.

    That is a graph of convolutions, products and pointwise operations, a norm alone, or attention for which
    cuDNN has compiled a kernel already.
    """
    others = [operation for operation in graph.operations if not isinstance(operation, Pointwise)]
    of_products = bool(others) and all(isinstance(operation, Convolution | MatMul) for operation in others)
    return of_products or norm_alone(graph) is not None or bool(COMPILED_ATTENTION.of(graph))


def _first_good(
    graph: OperationGraph, context: BuildContext, limit: int, *, precompiled: bool = False
) -> CudaPlan:
    """Returns the first plan that passes its self-check. Raises `Refused` if none does.

    If the device has no room for the self-check, it is the first plan, unchecked. With `precompiled`, it is
    provisional if a preferred plan was left out because it takes too long to build.
    """
    left_out = False

    def hear(reason: str) -> None:
        nonlocal left_out
        left_out |= reason in (COMPILES, TAKES_LONGER)
        context.trying(reason)

    check: SelfCheck | None = None
    checked = close_graph(graph)  # the graph whose plan is checked instead, if there is one
    in_passes: CudaPlan | None = None
    last = "cuDNN has no plan for it"
    reasons: list[str] = []
    try:
        plans = possible_plans(
            graph, context.handle, limit, reasons, context.kernels, on_refusal=hear, precompiled=precompiled
        )
        for found in plans:
            plan = found.instead_of(reasons, provisional=left_out)
            context.trying(plan.tag)
            try:
                check = check or SelfCheck(checked or graph, context)
                if checked is not None:
                    in_passes = compile_split(checked, context.handle, None, in_passes=True)
                    check.room_for(in_passes)
            except MemoryError:
                if _shares_kernels(plan):
                    continue  # unchecked, only a plan compiled for itself is used
                log.warning(
                    "plan.unchecked", plan=plan.tag, reason="the device has no room for its self-check"
                )
                return CudaPlan(msgspec.structs.replace(plan.recipe, checked=False), plan.graphs)
            if in_passes is None:
                plan, fault = _checked_plan(plan, check)
            else:
                fault = check.fault(in_passes)
            if fault is None:
                return plan
            log.info("plan.discarded", plan=plan.tag, reason=fault)
            last = f"{plan.tag}: {fault}"
            reasons.append(f"{plan.tag.rpartition('/')[2]} failed its self-check: {fault}")
    finally:
        if check is not None:
            check.close()
    raise Refused(last)


def _checked_plan(plan: CudaPlan, check: SelfCheck) -> tuple[CudaPlan, str | None]:
    """Returns a plan in the form that was checked, and its fault; None if it has none.

    A plan with the kernel of another size is loaded from its bytes first, because the plan store and other
    processes get these bytes. They have the arguments of the graph that the kernel was compiled for, and
    cuDNN has to update those when it runs the plan.
    """
    if not _shares_kernels(plan):
        return plan, check.fault(plan)
    handle, stream, journal, *_ = check.context
    if journal.may_kill(plan.tag):
        return plan, "to load it killed an earlier process"
    with journal.trying(plan.tag):
        try:
            plan = load_plan(plan.recipe, partial(load, handle=handle, stream=stream))
        except Exception as error:
            known = translate(error)
            if isinstance(known, StickyError):
                raise known from error
            return plan, f"cuDNN does not load it: {known}"
    return plan, check.fault(plan)


def _shares_kernels(plan: CudaPlan) -> bool:
    """Whether a plan that has just been built has kernels from a cache: only then do its steps have bytes."""
    return any(isinstance(step, GraphStep) and step.plan for step in plan.recipe.steps)


def possible_plans(
    graph: OperationGraph,
    handle: Any,
    limit: int | None,
    refusals: list[str] | None = None,
    kernels: KernelCaches | None = None,
    *,
    on_refusal: OnRefusal = ignore_refusal,
    precompiled: bool = False,
) -> Iterator[CudaPlan]:
    """Every plan for a graph, each built when the iterator reaches it: in one piece first, then in steps.

    One kernel of our own comes first, if there is one: for pointwise operations, perhaps with gathers before
    them; for reductions, norms and softmaxes with pointwise operations around them; and for depthwise
    convolutions with pointwise operations behind them. So do products by cuBLASLt, and convolutions of few
    channels on rearranged copies or with channels of zeros. If the graph's numerics prefer some of cuDNN's
    candidates, all of cuDNN's come before these. With `kernels`, cuDNN's first candidate for dynamic shapes
    comes before its other ones.

    With `precompiled`, plans whose kernels cuDNN would compile are left out (the reason is `COMPILES`), and
    so are cuDNN's fallbacks. A single step of cuBLASLt's then comes before cuDNN's candidates (the reason is
    `TAKES_LONGER`), and a product by cuBLASLt with a kernel behind it comes before the ways in steps.

    Appends the reasons why plans are missing to `refusals`, and calls `on_refusal` for each plan that cannot
    be built. Raises `Refused`, with cuDNN's reason, if there is no plan.
    """
    refusals = [] if refusals is None else refusals
    found, telling = False, ""
    if precompiled:
        whole = _without_compiling(graph, handle, limit, refusals, on_refusal)
    else:
        whole = _in_one_piece(graph, handle, limit, refusals, kernels)
    steps = _in_steps(graph, handle, limit, on_refusal, precompiled=precompiled)
    if is_elementwise(graph):
        makes = itertools.chain(steps, whole)
    else:
        own = _of_our_own(graph, handle, limit, on_refusal, precompiled=precompiled)
        first, second = (whole, own) if graph.numerics.prefer else (own, whole)
        makes = itertools.chain(first, second, steps)
    for make in makes:
        try:
            plan = make()
        except Refused as refusal:
            on_refusal(str(refusal))
            if str(refusal) not in refusals:
                refusals.append(str(refusal))
            if not isinstance(refusal, Inapplicable):
                telling = telling or str(refusal)
        else:
            found = True
            yield plan
    if not found:
        raise Refused(telling or (refusals[0] if refusals else COMPILES))


_Make = Callable[[], CudaPlan]


def _of_our_own(
    graph: OperationGraph, handle: Any, limit: int | None, on_refusal: OnRefusal, *, precompiled: bool
) -> Iterator[_Make]:
    """Yields functions that build the graph as one kernel of our own, or a convolution on other forms of its
    operands."""
    others = [operation for operation in graph.operations if not isinstance(operation, Pointwise)]
    if (aligned := aligned_product(graph)) is not None:
        for choice in range(_CHOICES):
            yield partial(compile_aligned, graph, aligned, handle, limit, choice, on_refusal=on_refusal)
    if any(is_depthwise(operation, graph.tensor) for operation in others):
        yield partial(compile_depthwise, graph, limit)
    elif (product := product_of(graph)) is not None:
        for choice in range(_CHOICES):
            yield partial(compile_product, graph, product, handle, limit, choice)
    elif (halves := halves_of(graph)) is not None:
        for choice in range(_CHOICES if is_split_by_default(halves) else 0):
            yield partial(compile_halves, graph, halves, handle, limit, choice)
    elif others and not any(isinstance(operation, Convolution) for operation in others):
        yield partial(compile_fused, graph, limit)
    else:
        for rearranged, choice in itertools.product(rearrangements(graph), range(_CHOICES)):
            given = graph, rearranged, handle, limit, choice
            yield partial(compile_rearranged, *given, on_refusal=on_refusal, precompiled=precompiled)
        for candidate in range(_CHOICES if is_widened(graph) else 0):
            yield partial(compile_widened, graph, handle, limit, candidate, precompiled=precompiled)


def compile_rearranged(
    graph: OperationGraph,
    rearranged: Rearranged,
    handle: Any,
    limit: int | None,
    choice: int,
    *,
    on_refusal: OnRefusal = ignore_refusal,
    precompiled: bool = False,
) -> CudaPlan:
    """The graph on rearranged copies of operands, by plan number `choice` of the rearranged graph.

    Calls `on_refusal` for plans of the rearranged graph, too. Raises `Refused`. `precompiled`: see
    `possible_plans`.
    """
    plans = possible_plans(rearranged.graph, handle, limit, on_refusal=on_refusal, precompiled=precompiled)
    plan = next(itertools.islice(plans, choice, None), None)
    if plan is None:
        raise Refused(f"there is no plan {choice} for it {rearranged.what}")
    return plan_of_rearranged(graph, rearranged, plan, limit)


def compile_aligned(
    graph: OperationGraph,
    aligned: OperationGraph,
    handle: Any,
    limit: int | None,
    choice: int,
    *,
    on_refusal: OnRefusal = ignore_refusal,
) -> CudaPlan:
    """A product by products of whole vectors (`aligned_product`), each by its plan number `choice`.

    Calls `on_refusal` for plans of these products, too. Raises `Refused`.
    """

    def build(piece: OperationGraph) -> CudaPlan:
        plans = possible_plans(piece, handle, limit, on_refusal=on_refusal)
        number = choice if any(isinstance(each, MatMul) for each in piece.operations) else 0
        plan = next(itertools.islice(plans, number, None), None)
        if plan is None:
            raise Refused(f"there is no plan {choice} for products of whole vectors")
        return plan

    parts = cut(aligned)
    assert parts is not None, "copies are pieces of their own"
    plan = compose(aligned, parts, build)
    steps = place_part(graph, aligned, plan, bound_sources(graph), 0)
    return finish(graph, steps, plan.graphs, plan.recipe.scratch, limit)


def _in_one_piece(
    graph: OperationGraph, handle: Any, limit: int | None, refusals: list[str], kernels: KernelCaches | None
) -> Iterator[_Make]:
    """Yields functions that build the graph as a single cuDNN graph: by each candidate, the fallbacks last.

    Candidates come in cuDNN's order, except for those that `rank` puts first. Asking for fallbacks takes most
    of the time, and they are seldom needed, so they are asked for last. A kernel for dynamic shapes comes
    first if cuDNN would compile one for the first candidate.
    """
    cache = None if kernels is None or graph.numerics.prefer else kernels.cache(graph)
    done, refusal = 0, ""
    for fallbacks in (False, True):
        try:
            check_whole(graph)
            lowered = candidates(graph, handle, limit, fallbacks=fallbacks)
        except Refused as error:
            refusal = str(error)
            continue
        names = CandidateNames(lowered)
        count = len(names)
        if cache is not None and count and is_compiled_first(lowered, 0):
            yield partial(_dynamic, graph, handle, limit, cache)
            cache = None
        order = rank(graph, names, done)
        for index in order[:1]:
            yield partial(_whole, graph, lowered, limit, index)
        for index in order[1:]:
            yield partial(compile_whole, graph, handle, limit, index, fallbacks=fallbacks)
        done = count
    if not done:
        refusals.append(refusal)


def _without_compiling(
    graph: OperationGraph, handle: Any, limit: int | None, refusals: list[str], on_refusal: OnRefusal
) -> Iterator[_Make]:
    """Yields functions that build the graph by those of cuDNN's candidates that need no compilation.

    Before them comes a convolution as one step of cuBLASLt's, if it can be one, because asking cuDNN takes
    longer. Behind them come another convolution as a product by cuBLASLt, and a product by cuBLASLt with a
    kernel of our own.
    """
    if (product := product_in_one_step(graph)) is not None:
        yield partial(_in_place_of_cudnn, graph, product, handle, limit, on_refusal)
    lowered, indices = _with_kernels(graph, handle, limit, refusals, on_refusal)
    for number, index in enumerate(indices):  # each is looked for when it is tried
        if number == 0:
            yield partial(_whole, graph, lowered, limit, index)
        else:
            yield partial(compile_whole, graph, handle, limit, index, fallbacks=False)
    if product is None and (product := as_product(graph)) is not None:
        given = graph, product, handle, limit, 0
        yield partial(compile_rearranged, *given, on_refusal=on_refusal, precompiled=True)
    if (halves := halves_of(graph)) is not None:
        yield partial(compile_halves, graph, halves, handle, limit)


def _in_place_of_cudnn(
    graph: OperationGraph, product: Rearranged, handle: Any, limit: int | None, on_refusal: OnRefusal
) -> CudaPlan:
    """A convolution as one step of cuBLASLt's, although cuDNN may have a better plan. Raises `Refused`."""
    of = product_of(product.graph)
    assert of is not None, "`product_in_one_step` has found it"
    plan = compile_product(product.graph, of, handle, limit)
    on_refusal(TAKES_LONGER)
    return plan_of_rearranged(graph, product, plan, limit)


def _with_kernels(
    graph: OperationGraph, handle: Any, limit: int | None, refusals: list[str], on_refusal: OnRefusal
) -> tuple[Any, Iterator[int]]:
    """cuDNN's candidates, and the indices of those whose kernels it need not compile, in order.

    cuDNN is asked only if it may have such candidates, and about each one when the iterator reaches it.
    """
    if compiles(graph):
        on_refusal(COMPILES)
        return None, iter(())
    try:
        check_whole(graph)
        lowered = candidates(graph, handle, limit, fallbacks=False)
    except Refused as error:
        refusals.append(str(error))
        return None, iter(())
    names, compiled = CandidateNames(lowered), COMPILED_ATTENTION.of(graph)
    every = rank(graph, names)

    def has_kernel(index: int) -> bool:
        return (bool(compiled) and names[index] in compiled) or not is_compiled_first(lowered, index)

    found = filter(has_kernel, every)
    first = next(found, None)
    if first is None or first != every[0]:
        on_refusal(COMPILES)
    return lowered, iter(()) if first is None else itertools.chain([first], found)


def _in_steps(
    graph: OperationGraph, handle: Any, limit: int | None, on_refusal: OnRefusal, *, precompiled: bool
) -> Iterator[_Make]:
    """Yields functions that build the graph in steps: a few choices for each form of a convolution's tensors,
    or each way to run another operation."""
    convolves = any(isinstance(operation, Convolution) for operation in graph.operations)
    for form in range(MOST_FORMS if convolves else 1):
        for choice in range(_CHOICES if convolves else ways(graph)):
            given = graph, handle, limit, form, choice
            yield partial(compile_split, *given, on_refusal=on_refusal, precompiled=precompiled)


def compile_whole(
    graph: OperationGraph, handle: Any, limit: int | None, candidate: int, *, fallbacks: bool = True
) -> CudaPlan:
    """The graph as a single cuDNN graph, built with candidate number `candidate`. Raises `Refused`.

    `fallbacks`: whether the candidate may be one of cuDNN's fallbacks.
    """
    return _whole(graph, candidates(graph, handle, limit, fallbacks=fallbacks), limit, candidate)


def _dynamic(graph: OperationGraph, handle: Any, limit: int | None, cache: Any) -> CudaPlan:
    """The graph as a single cuDNN graph with cuDNN's first candidate for dynamic shapes. Raises `Refused`.

    The plan's step also has the plan's bytes, and a name that ends with `DYNAMIC`.
    """
    check_whole(graph)
    lowered = candidates(graph, handle, limit, fallbacks=False, cache=cache)
    build_candidate(graph, lowered, 0)
    step = graph_step(graph, lowered, bound_sources(graph))
    step = msgspec.structs.replace(step, engine=step.engine + DYNAMIC, plan=serialise(lowered))
    return finish(graph, [step], [lowered], 0, limit)


def _whole(graph: OperationGraph, lowered: Any, limit: int | None, candidate: int) -> CudaPlan:
    """The graph as a single cuDNN graph, built with that candidate. Raises `Refused`."""
    build_candidate(graph, lowered, candidate)
    step = graph_step(graph, lowered, bound_sources(graph))
    return finish(graph, [step], [lowered], 0, limit)
