"""The parts of the CUDA engine that are pure, and so run on every machine."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudnn_actor.engines.base import EngineFailure
from cudnn_actor.engines.cuda.checking.convolution_reference import Reference
from cudnn_actor.engines.cuda.checking.journal import Journal
from cudnn_actor.engines.cuda.cudnn import frontend_graph
from cudnn_actor.engines.cuda.cudnn.errata import erratum
from cudnn_actor.engines.cuda.cudnn.frontend_graph import Refused
from cudnn_actor.engines.cuda.device.place import memory_order
from cudnn_actor.engines.cuda.device.transfer import blocks
from cudnn_actor.engines.cuda.kernels.elementwise import elementwise, source
from cudnn_actor.engines.cuda.kernels.expressions import Constant, Expression, Leaf, Scalar
from cudnn_actor.engines.cuda.kernels.formulas import formula
from cudnn_actor.engines.cuda.operations import IMPLEMENTATIONS
from cudnn_actor.engines.cuda.operations.recurrent_calls import (
    LayerBackwardData,
    LayerBackwardWeights,
    Layers,
    LayersBackward,
    LayerWeights,
)
from cudnn_actor.engines.cuda.planning.candidates import check_whole, takes_bytes
from cudnn_actor.engines.cuda.planning.cuda_builder import CudaBuilder
from cudnn_actor.engines.cuda.planning.splitting import ways
from cudnn_actor.engines.cuda.running.recipe import (
    Buffer,
    GraphStep,
    KernelStep,
    Number,
    OperationStep,
    Recipe,
    Scratch,
)
from cudnn_actor.protocol import (
    BufferRef,
    ConvBwdData,
    ConvBwdFilter,
    ConvFwd,
    ConvSpec,
    DType,
    GraphBuilder,
    Layout,
    TensorSpec,
)
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.messages.lowering import lower
from cudnn_actor.protocol.messages.messages import Compute
from cudnn_actor.protocol.operations import (
    OPERATIONS,
    AvgPool,
    Concat,
    ConvolutionForward,
    GraphTensor,
    MaxPool,
    Movement,
    Node,
    Pointwise,
    PointwiseMode,
    Recurrent,
    RecurrentBackwardData,
    RecurrentBackwardWeights,
    RMSNorm,
    TensorRole,
    Window,
)
from cudnn_actor.protocol.types.tensor import packed_strides

from ....in_one_test import cases_in_one_test
from ...host_cuda import sources_of
from ...workbench import spread

CUDNN = 91901
"""A version of cuDNN with all its errata."""
dims_of = st.lists(st.integers(1, 9), min_size=1, max_size=5).map(tuple)


@given(dims=dims_of, itemsize=st.sampled_from([1, 2, 4, 8]), limit=st.integers(8, 4000))
def test_blocks_cut_an_array_into_parts_that_follow_each_other(
    dims: tuple[int, ...], itemsize: int, limit: int
) -> None:
    array = np.arange(math.prod(dims)).reshape(dims)
    parts = [array[block] for block in blocks(dims, itemsize, limit)]
    assert all(part.size * itemsize <= limit for part in parts)
    np.testing.assert_array_equal(np.concatenate([part.ravel() for part in parts]), array.ravel())


@given(dims=dims_of.filter(lambda d: len(d) >= 3), permutation=st.randoms())
def test_memory_order_is_found_for_whatever_lies_without_gaps(
    dims: tuple[int, ...], permutation: object
) -> None:
    axes = list(range(len(dims)))
    permutation.shuffle(axes)  # type: ignore[attr-defined]
    strides, step = [0] * len(dims), 1
    for axis in reversed(axes):
        strides[axis], step = step, step * dims[axis]
    order = memory_order(TensorSpec.strided(dims, strides, "float32"))
    assert order is not None
    large = [axis for axis in order if dims[axis] > 1]
    assert large == [axis for axis in axes if dims[axis] > 1]


def test_memory_with_gaps_has_no_order() -> None:
    assert memory_order(spread((2, 3, 4, 5), "float32")) is None


def test_neighbouring_axes_become_one_where_every_operand_goes_on() -> None:
    kernel = elementwise(
        Leaf(0, DType.FLOAT32), DType.FLOAT32, (2, 8, 5, 6), [(240, 1, 48, 8), (240, 1, 48, 8)]
    )
    assert kernel.dims == (480,)
    assert kernel.strides == ((1,), (1,))


def test_an_operand_that_is_broadcast_keeps_its_axis_apart() -> None:
    kernel = elementwise(Leaf(0, DType.FLOAT32), DType.FLOAT32, (2, 8, 5, 6), [(240, 1, 48, 8), (0, 1, 0, 0)])
    assert kernel.dims == (60, 8)
    assert kernel.strides == ((8, 1), (0, 1))


@given(dims=st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple), data=st.data())
def test_a_merged_kernel_visits_the_same_elements(dims: tuple[int, ...], data: st.DataObject) -> None:
    strides = [
        tuple(data.draw(st.integers(0, 50)) for _ in dims) for _ in range(data.draw(st.integers(1, 3)))
    ]
    kernel = elementwise(Leaf(0, DType.FLOAT32), DType.FLOAT32, dims, strides)

    def places(sizes: tuple[int, ...], steps: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
        return sorted(
            tuple(sum(i * s for i, s in zip(index, step, strict=True)) for step in steps)
            for index in itertools.product(*map(range, sizes))
        )

    assert places(kernel.dims, list(kernel.strides)) == places(dims, strides)


def test_a_kernels_source_does_not_depend_on_the_shape() -> None:
    value = Expression(PointwiseMode.MUL, (Leaf(0, DType.BFLOAT16), Scalar(0)))
    sources = {
        source(elementwise(value, DType.FLOAT16, dims, [strides, strides]))
        for dims, strides in (((4, 5), (5, 1)), ((7, 2), (2, 1)))
    }
    assert len(sources) == 1


def test_a_recipe_survives_being_bytes() -> None:
    kernel = elementwise(
        Expression(PointwiseMode.ELU, (Leaf(0, DType.INT32),), (0.5,)), DType.INT8, (3, 4), [(4, 1)] * 2
    )
    recipe = Recipe(
        tag="cuda/conv_fwd/00000000/eng1+elementwise",
        steps=(
            GraphStep("eng1", 300, (1, 2, 3), (Buffer(0), Number(0, double=True), Scratch(0, 512)), b"plan"),
            KernelStep(kernel, (Buffer(1), Scratch(0, 512))),
        ),
        scratch=512,
        buffers=2,
        scalars=1,
    )
    assert recipe.workspace == 512 + 512
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(recipe), type=Recipe) == recipe


def _tensor(dims: tuple[int, ...], dtype: DType, layout: Layout) -> GraphTensor:
    spec = TensorSpec.packed(dims, dtype, layout)
    return GraphTensor(uid=0, dims=spec.dims, strides=spec.strides, dtype=dtype)


@pytest.mark.parametrize(
    ("dtype", "layout", "channels", "taken"),
    [
        (DType.INT8, Layout.NHWC, 8, True),
        (DType.INT8, Layout.NHWC, 6, False),
        (DType.INT8, Layout.NCHW, 8, False),
        (DType.UINT8, Layout.NHWC, 8, False),
        (DType.FLOAT16, Layout.NCHW, 3, True),
    ],
)
def test_bytes_are_given_to_cudnn_only_as_it_documents(
    dtype: DType, layout: Layout, channels: int, taken: bool
) -> None:
    shapes = (2, channels, 9, 9), (8, channels, 3, 3), (2, 8, 7, 7)
    assert takes_bytes([_tensor(dims, dtype, layout) for dims in shapes]) is taken


def _graph(alpha: float = 1.0) -> OperationGraph:
    def ref(*dims: int) -> BufferRef:
        return BufferRef(slot=0, generation=0, spec=TensorSpec.packed(dims), device="cuda:0")

    x, w, y = ref(1, 4, 5, 5), ref(4, 4, 1, 1), ref(1, 4, 5, 5)
    return lower(ConvFwd(x=x, w=w, y=y, conv=ConvSpec.symmetric(2), alpha=alpha)).graph


def test_a_candidate_that_kills_its_context_is_not_tried() -> None:
    why = erratum(_graph(alpha=2.0), "eng0_k1=3", CUDNN)
    assert why is not None
    assert "illegal address" in why


def test_an_erratum_does_not_reach_further_than_it_was_seen() -> None:
    assert erratum(_graph(), "eng0", CUDNN) is None
    assert erratum(_graph(alpha=2.0), "eng01_k1=3", CUDNN) is None


def _strided(channels: int, row: int, dtype: DType = DType.BFLOAT16) -> OperationGraph:
    """A convolution whose pixels lie channels first, 10 elements apart, with rows of so many elements."""

    def ref(dims: tuple[int, ...], strides: tuple[int, ...], dtype: DType) -> BufferRef:
        spec = TensorSpec.strided(dims, strides, dtype)
        return BufferRef(slot=1, generation=1, spec=spec, device="cuda:0")

    x = ref((1, channels, 12, 25), (row * 12, 1, row, 10), dtype)
    w = ref((12, channels, 3, 5), (15 * channels, 1, 5 * channels, channels), dtype)
    y = ref((1, 12, 10, 21), (2520, 210, 21, 1), dtype)
    return lower(ConvFwd(x=x, w=w, y=y, conv=ConvSpec.symmetric(2))).graph


def test_rows_that_are_no_whole_vectors_apart_are_not_read_in_place() -> None:
    assert "vector length" in (erratum(_strided(2, 251), "eng71", CUDNN) or "")
    assert "vector length" in (erratum(_strided(4, 250), "eng71", CUDNN) or "")
    assert erratum(_strided(2, 252), "eng71", CUDNN) is None
    assert erratum(_strided(1, 251), "eng71", CUDNN) is None  # nothing is read together with its neighbour
    assert erratum(_strided(2, 251, DType.FLOAT32), "eng71", CUDNN) is None


def test_a_journal_remembers_what_killed_the_process_that_tried_it(tmp_path: Path) -> None:
    path = str(tmp_path / "journal")
    first = Journal(path)
    with first.trying("harmless"):
        pass
    trial = first.trying("deadly")
    trial.__enter__()  # and never left
    second = Journal(path)
    assert second.may_kill("deadly")
    assert not second.may_kill("harmless")


def test_a_journal_takes_plans_that_differ_in_their_knobs_for_one(tmp_path: Path) -> None:
    path = str(tmp_path / "journal")
    with pytest.raises(RuntimeError), Journal(path).trying("cuda/conv_fwd/ab12/eng7_k2=1_k3=0+elementwise"):
        raise RuntimeError
    assert Journal(path).may_kill("cuda/conv_fwd/ab12/eng7_k2=4+elementwise")
    for other in ("cuda/conv_fwd/ab12/eng71_k2=1+elementwise", "cuda/conv_fwd/cd34/eng7_k2=1+elementwise"):
        assert not Journal(path).may_kill(other)


def test_a_trial_that_is_left_by_an_error_that_kills_the_context_stays_open(tmp_path: Path) -> None:
    path = str(tmp_path / "journal")
    with pytest.raises(RuntimeError), Journal(path).trying("deadly"):
        raise RuntimeError
    assert Journal(path).may_kill("deadly")


def test_a_death_is_held_against_a_plan_for_four_processes_and_two_for_good(tmp_path: Path) -> None:
    path = str(tmp_path / "journal")

    def die_of(plan: str) -> bool:
        """Whether a process knew the plan as deadly that then died of it."""
        journal = Journal(path)
        knew = journal.may_kill(plan)
        journal.trying(plan).__enter__()
        return knew

    assert not die_of("unlucky")
    assert not die_of("deadly")
    assert [Journal(path).may_kill("unlucky") for _ in range(4)] == [True, True, True, False]
    assert not die_of("deadly")
    assert all(Journal(path).may_kill("deadly") for _ in range(9))


def test_a_journal_whose_file_is_removed_meanwhile_begins_another(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal(str(path))
    with journal.trying("harmless"):
        pass
    path.unlink()
    with pytest.raises(RuntimeError), journal.trying("deadly"):
        raise RuntimeError
    assert Journal(str(path)).may_kill("deadly")


@pytest.mark.parametrize("how", ["closed", "dropped"])
def test_a_journal_that_is_closed_or_dropped_has_no_file_open(tmp_path: Path, how: str) -> None:
    path = tmp_path / "journal"

    def open_files() -> int:
        return sum(os.path.realpath(f"/proc/self/fd/{fd}") == str(path) for fd in os.listdir("/proc/self/fd"))

    journal: Journal | None = Journal(str(path))
    assert journal is not None
    for _ in range(2):
        with journal.trying("harmless"):
            assert open_files() == 1
    if how == "closed":
        journal.close()
    else:
        journal = None
    assert open_files() == 0


def test_no_journal_remembers_nothing() -> None:
    journal = Journal(None)
    with journal.trying("plan"):
        assert not journal.may_kill("plan")


def test_nothing_is_fused_with_tensors_that_have_gaps() -> None:
    def ref(*dims: int) -> BufferRef:
        return BufferRef(slot=0, generation=0, spec=spread(dims, "float16"), device="cuda:0")

    x, w, y = ref(1, 8, 5, 5), ref(8, 8, 1, 1), ref(1, 8, 5, 5)
    one = ConvFwd(x=x, w=w, y=y, conv=ConvSpec.symmetric(2))
    more = msgspec.structs.replace(one, alpha=2.0)
    assert erratum(lower(one).graph, "eng45_k1=3", CUDNN) is None
    assert "gaps" in (erratum(lower(more).graph, "eng45_k1=3", CUDNN) or "")


def _convolution(kind: str, channels: int, groups: int) -> OperationGraph:
    def ref(*dims: int) -> BufferRef:
        spec = TensorSpec.packed(dims, DType.BFLOAT16, Layout.NHWC)
        return BufferRef(slot=0, generation=0, spec=spec, device="cuda:0")

    x, w, conv = ref(2, channels, 9, 9), ref(channels, channels // groups, 3, 3), ConvSpec.symmetric(2)
    y, conv = ref(2, channels, 7, 7), msgspec.structs.replace(conv, groups=groups)
    message: dict[str, Compute] = {
        "forward": ConvFwd(x=x, w=w, y=y, conv=conv),
        "backward data": ConvBwdData(dy=y, w=w, dx=x, conv=conv),
        "backward filter": ConvBwdFilter(x=x, dy=y, dw=w, conv=conv),
    }
    return lower(message[kind]).graph


def test_engine_11_multiplies_no_matrices_with_gaps() -> None:
    def graph(spec: TensorSpec) -> OperationGraph:
        given = [GraphTensor(uid=n, dims=spec.dims, strides=spec.strides, dtype=spec.dtype) for n in (0, 1)]
        operation = Pointwise(mode=PointwiseMode.RELU, operands=(0,), result=1)
        return OperationGraph(tensors=tuple(given), operations=(operation,))

    dims = (4, 8, 6)
    with_gaps = graph(spread(dims, "float16"))
    assert "gaps" in (erratum(with_gaps, "eng11_k2=4", CUDNN) or "")
    assert erratum(graph(TensorSpec.packed(dims, DType.FLOAT16)), "eng11_k2=4", CUDNN) is None
    assert erratum(_strided(2, 252), "eng11", CUDNN) is None  # a convolution's engine 11 is another one
    assert erratum(with_gaps, "eng11", 92399) is not None
    assert erratum(with_gaps, "eng11", 92400) is None, "cuDNN 9.24 has it fixed"


@pytest.mark.parametrize(("samples", "refused"), [(3, True), (1, False)])
def test_what_each_sample_adds_to_its_channels_is_no_epilogue(samples: int, refused: bool) -> None:
    g = GraphBuilder()
    x, w = g.input("x", (3, 8, 4, 4), "bfloat16", layout="NHWC"), g.input("w", (8, 8, 3, 3), "bfloat16")
    graph = g.build(y=g.conv(x, w, bias=g.input("b", (8,))) + g.input("t", (samples, 8, 1, 1))).body
    with pytest.raises(Refused, match="other samples") if refused else contextlib.nullcontext():
        check_whole(graph)


class Frontend:
    """Stands for an empty graph of cuDNN's frontend, and keeps the dims of its tensors."""

    def __init__(self) -> None:
        self.given: list[tuple[list[int], list[int]]] = []

    def tensor(self, *, dim: list[int], stride: list[int], **_: object) -> None:
        self.given.append((dim, stride))


def test_a_tensor_of_three_dims_stays_one_on_its_way_to_cudnn_but_for_a_convolution(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A matrix product of four dims would be another one. cuDNN's convolutions have two spatial dims."""
    monkeypatch.setattr(frontend_graph, "data_type", str)
    x, w, y, z = (
        BufferRef(slot=slot, generation=1, spec=TensorSpec.packed(dims), device="cuda:0")
        for slot, dims in enumerate([(2, 3, 8), (4, 3, 1), (2, 4, 8), (2, 3, 8)])
    )
    adds: Pointwise[BufferRef] = Pointwise(mode=PointwiseMode.ADD, operands=(x, x), result=z)
    convolves = ConvFwd(x=x, w=w, y=y, conv=ConvSpec.symmetric(1))
    for message, wanted in (
        (adds, ([2, 3, 8], [24, 8, 1])),
        (convolves, ([2, 3, 1, 8], [24, 8, 8, 1])),
    ):
        frontend = Frontend()
        graph = lower(message).graph
        frontend_graph.FrontendGraph(graph, frontend).tensor(graph.operations[0].reads[0])
        assert frontend.given == [wanted]


def test_a_graph_has_as_many_choices_as_its_operation_with_the_most_ways() -> None:
    tensors = tuple(
        GraphTensor(uid=uid, dims=(1, 1, 2, 2), strides=(4, 4, 2, 1), dtype=DType.FLOAT32) for uid in range(4)
    )
    pools: Node = MaxPool(x=0, y=1, window=Window.symmetric(2, 1))
    norms: Node = RMSNorm(x=1, y=2)
    adds: Node = Pointwise(mode=PointwiseMode.ADD, operands=(1, 2), result=3)
    of_pooling = OperationGraph(tensors=tensors[:2], operations=(pools,))
    of_all = OperationGraph(tensors=tensors, operations=(pools, norms, adds))
    assert ways(of_pooling) == len(IMPLEMENTATIONS[MaxPool].launchers)
    assert ways(of_all) == 2 + len(IMPLEMENTATIONS[RMSNorm].launchers)


POOLED = {
    "a half type, channels last": (DType.BFLOAT16, Layout.NHWC, 64, "library"),
    "a half type, channels first": (DType.BFLOAT16, Layout.NCHW, 64, "kernel"),
    "no whole vectors": (DType.BFLOAT16, Layout.NHWC, 60, "kernel"),
    "float32": (DType.FLOAT32, Layout.NHWC, 64, "kernel"),
}


@pytest.mark.parametrize("name", POOLED)
@pytest.mark.parametrize("kind", [MaxPool, AvgPool])
def test_libcudnn_pools_first_the_largest_of_whole_vectors(kind: Any, name: str) -> None:
    dtype, layout, channels, first = POOLED[name]
    dims = (2, channels, 8, 8), (2, channels, 4, 4)
    specs = [TensorSpec.packed(each, dtype, layout) for each in dims]
    tensors = [
        GraphTensor(uid=uid, dims=each.dims, strides=each.strides, dtype=dtype)
        for uid, each in enumerate(specs)
    ]
    operation = kind(x=0, y=1, window=Window.symmetric(2, 2, stride=2))
    names = IMPLEMENTATIONS[kind].launchers_in_order(operation, tensors)
    assert sorted(names) == ["kernel", "library"]
    assert names[0] == (first if kind is MaxPool else "kernel")


@pytest.mark.parametrize("launcher", ["kernel", "forgotten"])
def test_a_stored_plan_whose_launcher_is_unknown_is_not_restored(launcher: str) -> None:
    tensors = tuple(
        GraphTensor(uid=uid, dims=(1, 1, 2, 2), strides=(4, 4, 2, 1), dtype=DType.FLOAT32) for uid in range(2)
    )
    operation: Node = MaxPool(x=0, y=1, window=Window.symmetric(2, 1))
    step = OperationStep(
        operation=operation, tensors=tensors, sources=(Buffer(0), Buffer(1)), launcher=launcher
    )
    recipe = Recipe(tag="cuda/max_pool", steps=(step,), scratch=0, buffers=2, scalars=0)
    graph = OperationGraph(tensors=tensors, operations=(operation,))
    expected = (
        contextlib.nullcontext() if launcher == "kernel" else pytest.raises(EngineFailure, match=launcher)
    )
    with expected:
        assert CudaBuilder(0).restore(graph, msgspec.msgpack.encode(recipe)).recipe == recipe


OF_LAYERS = (Layers, LayersBackward, LayerWeights, LayerBackwardData, LayerBackwardWeights)
"""What recurrent operations become when they are planned: they have no launchers themselves."""


def test_every_operation_runs_on_cuda_or_is_refused_by_name() -> None:
    assert set(IMPLEMENTATIONS) == {*OPERATIONS, *OF_LAYERS}
    for kind, row in IMPLEMENTATIONS.items():
        in_layers = issubclass(kind, Recurrent | RecurrentBackwardData | RecurrentBackwardWeights)
        assert bool(row.ways) != bool(row.refused) or issubclass(kind, Movement | Concat) or in_layers


@cases_in_one_test
@pytest.mark.parametrize("dtype", list(DType))
def test_a_kernel_that_only_copies_copies_the_bits(dtype: DType) -> None:
    """By way of float or double, not every int64 would arrive."""
    copy = source(elementwise(Leaf(0, dtype), dtype, (4, 5), [(5, 1), (1, 4)]))
    body = copy.partition("elementwise(")[2]
    place = "in0[i0 * (I)i0_in0 + i1 * (I)i1_in0]"
    assert re.findall(r"r0\.of\[v\] = (.*);", body) == [place], "what is read, as it is"
    assert re.findall(r"= (r0s\[u\]);", body) == ["r0s[u]"], "that is stored"
    assert "(T)" not in body
    assert "whole(" not in body


@pytest.mark.parametrize("dtype", [DType.INT16, DType.UINT16, DType.UINT32, DType.UINT64, DType.BOOL])
def test_cudnn_is_not_asked_for_types_that_it_does_not_have(dtype: DType) -> None:
    with pytest.raises(frontend_graph.Refused, match=dtype.value):
        frontend_graph.data_type(dtype)


@pytest.mark.parametrize("dims", [(), (2, 0, 3)])
def test_cudnn_is_not_asked_for_tensors_without_dims_or_elements(dims: tuple[int, ...]) -> None:
    strides = packed_strides(dims)
    given = [GraphTensor(uid=uid, dims=dims, strides=strides, dtype=DType.FLOAT32) for uid in range(2)]
    adds: Node = Pointwise(mode=PointwiseMode.ADD, operands=(0, 0), result=1)
    graph = OperationGraph(tensors=tuple(given), operations=(adds,))
    with pytest.raises(frontend_graph.Refused, match="without"):
        frontend_graph.FrontendGraph(graph, Frontend()).tensor(0)


def test_the_reference_of_a_convolution_covers_no_graph_with_a_pooling_after_it() -> None:
    x, w, y, z = (
        GraphTensor(uid=uid, dims=dims, strides=packed_strides(dims), dtype=DType.FLOAT32)
        for uid, dims in enumerate([(2, 3, 8, 8), (4, 3, 1, 1), (2, 4, 8, 8), (2, 4, 4, 4)])
    )
    convolution = ConvolutionForward(x=0, w=1, y=2, conv=ConvSpec.symmetric(2))
    pools = MaxPool(x=2, y=3, window=Window.symmetric(2, 2))
    alone = OperationGraph(tensors=(x, w, y), operations=(convolution,))
    inner = msgspec.structs.replace(y, role=TensorRole.VIRTUAL)
    both = OperationGraph(tensors=(x, w, inner, z), operations=(convolution, pools))
    assert Reference.covers(alone)
    assert not Reference.covers(both)


@pytest.mark.parametrize(
    ("window", "dims", "wide"),
    [
        (Window.symmetric(2, 3, 1), (1, 1, 8, 8), False),
        (Window.symmetric(2, 1 << 15, (1 << 15) - 1), (1, 1, 1, 1), True),
        (Window.symmetric(1, 2), (1, 1, 1 << 28), True),
    ],
)
def test_a_pooling_counts_in_64_bits_where_32_could_overflow(
    window: Window, dims: tuple[int, ...], wide: bool
) -> None:
    operation = AvgPool(x=0, y=1, window=window, include_padding=True)
    shapes = dims, window.output_dims(dims)
    tensors = [
        GraphTensor(uid=uid, dims=of, strides=packed_strides(of), dtype=DType.FLOAT32)
        for uid, of in enumerate(shapes)
    ]
    (source,) = sources_of(operation, tensors)
    assert f"typedef {'long long' if wide else 'int'} I;" in source


def test_a_whole_constant_keeps_every_digit() -> None:
    large = (1 << 53) + 1
    assert formula(Constant(large), [], "long long") == f"{large}ll"
