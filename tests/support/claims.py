"""What cuDNN is claimed to run, one row a graph. To claim more, add rows.

cuDNN compiles nearly every plan but those of plain convolutions with a compiler of its own, in half a second
to two seconds. So `make test-support` builds plans for a part of the rows, and for all of them with
`TEST_ALL=1` (`tests.whole`).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from cudnn_actor.engines.cuda.operations.attention import FEW_KEYS
from cudnn_actor.protocol import (
    DType,
    GraphBuilder,
    GraphTensor,
    Layout,
    Node,
    Numerics,
    OperationGraph,
    TensorSpec,
)
from cudnn_actor.protocol.operations import (
    Attention,
    AttentionBackward,
    BatchNorm,
    BatchNormBackward,
    BatchNormTraining,
    GenStats,
    GroupNorm,
    GroupNormBackward,
    InstanceNorm,
    InstanceNormBackward,
    LayerNorm,
    LayerNormBackward,
    MatMul,
    Pointwise,
    PointwiseMode,
    Reduction,
    ReductionMode,
    RMSNorm,
    RMSNormBackward,
    TensorRole,
    alibi_slopes,
)

from ..gpu.families import FAMILIES
from ..gpu.support_record import latest
from ..whole import pairwise

__all__ = ["Row", "attention", "biased", "channel_norms", "every_row", "graph_of", "norms", "product", "rows"]

HALVES = (DType.FLOAT16, DType.BFLOAT16)
_PADDED = ("lengths_q", "lengths_kv")
_ENGINE = re.compile(r"\beng\d")
Operands = Mapping[str, TensorSpec | None]


class Row(NamedTuple):
    """A graph, and what is claimed of it.

    Parameters
    ----------
    whole
        Whether one plan of cuDNN's runs all of it. If not, any plan of cuDNN's will do, with copies and
        generated elementwise kernels around it.
    recorded
        The plan that a GPU has run, as in the record; empty if there is none.
    """

    name: str
    graph: OperationGraph
    whole: bool
    recorded: str = ""


def rows() -> list[Row]:
    """The claims that are held against cuDNN, always in the same order.

    A part of them has each kind of graph in each of its dtypes, and each other word of a name once. Of an
    option with a value, such as `bias=1hss`, the option is the word.
    """
    return pairwise(every_row(), _words, together=1)


def every_row() -> Iterator[Row]:
    """All claims."""
    return itertools.chain(_recorded(), _norms(), _channel_norms(), _attentions(), _products(), _sums())


def _words(row: Row) -> Sequence[str]:
    kind, *others = row.name.split("-")
    words = [other.partition("=")[0] for other in others]
    return [f"{kind}-{words[0]}", *words[1:]]


def _recorded() -> Iterator[Row]:
    """The cells of the support matrix that a plan of cuDNN's has run, with the seed of their record.

    `docs/support.md` is written from the same record.
    """
    record = latest()
    assert record is not None
    for cell in itertools.chain.from_iterable(family.cells() for family in FAMILIES.values()):
        outcome = record.cells.get(cell.name)
        if outcome is not None and outcome.ran and _probed(cell.name, outcome.plan):
            graph = cell.case(record.setting.seed).graph()
            if any(isinstance(op, Attention) and _keys(graph, op) <= FEW_KEYS for op in graph.operations):
                continue  # a kernel of ours runs it now
            yield Row(cell.name, graph, whole=not outcome.split, recorded=outcome.plan)


def _keys(graph: OperationGraph, operation: Attention[int]) -> int:
    return graph.tensor(operation.k).dims[2]


def _probed(name: str, plan: str) -> bool:
    """Whether a plan has an engine that can be built without a device: those on cuBLASLt cannot."""
    return _ENGINE.search(plan) is not None and not (name.startswith("matmul") and "eng0" in plan)


def _norms() -> Iterator[Row]:
    """Those of tensors that no erratum is for: our kernels run the large ones."""
    for dtype, length in itertools.product((DType.FLOAT32, *HALVES), (97, 768, 770, 65536)):
        for weights in dict.fromkeys((dtype, DType.FLOAT32)):
            for name, graph in norms(dtype, weights, (2, 8, length)):
                yield Row(f"{name}-{dtype}-{weights}_weights-{length}", graph, whole=True)


def norms(dtype: DType, weights: DType, dims: tuple[int, ...]) -> Iterator[tuple[str, OperationGraph]]:
    """Each norm of rows with these dims, with all operands and for inference."""
    x, w = TensorSpec.packed(dims, dtype), TensorSpec.packed(dims[-1:], weights)
    wide = DType.FLOAT64 if dtype is DType.FLOAT64 else DType.FLOAT32
    statistic = TensorSpec.packed((*dims[:-1], 1), wide)
    mean, rms = dict.fromkeys(("mean", "inverse_deviation"), statistic), {"inverse_rms": statistic}
    layer, given = {"x": x, "scale": w, "bias": w}, {"dy": x, "x": x}
    yield "layer_norm", graph_of(LayerNorm, layer, {"y": None, **mean})
    yield "layer_norm_inference", graph_of(LayerNorm, layer, {"y": None})
    sums = {"dx": None, "dscale": w, "dbias": w}
    yield "layer_norm_bwd", graph_of(LayerNormBackward, {**given, **mean, "scale": w}, sums)
    yield "rms_norm", graph_of(RMSNorm, {"x": x, "scale": w}, {"y": None, **rms})
    yield "rms_norm_inference", graph_of(RMSNorm, {"x": x, "scale": w}, {"y": None})
    yield "rms_norm_bwd", graph_of(RMSNormBackward, {**given, **rms, "scale": w}, {"dx": None, "dscale": w})


def _channel_norms() -> Iterator[Row]:
    """Those that cuDNN runs: batch norm, and instance norm forward, with float32 weights."""
    dims = ((8, 64, 32, 32), (2, 32, 8, 6, 10))
    for dtype, sizes, layout in itertools.product((DType.FLOAT32, *HALVES), dims, (Layout.NHWC, Layout.NCHW)):
        for name, graph in channel_norms(dtype, sizes, layout, DType.FLOAT32):
            ours = name in ("batch_norm", "gen_stats", "instance_norm_bwd") or name.startswith("group_norm")
            if not ours:
                yield Row(f"{name}-{dtype}-{len(sizes)}d-{layout}".lower(), graph, whole=True)
    for dtype in (DType.FLOAT32, *HALVES):
        yield Row(f"batch_norm_training-relu-{dtype}", _normalised(dtype, added=False), whole=True)
        yield Row(f"batch_norm_training-add-relu-{dtype}", _normalised(dtype, added=True), whole=True)
    g = GraphBuilder()
    x = g.input("x", (8, 64, 32, 32), DType.FLOAT16, layout=Layout.NHWC)
    y = g.conv(x, g.input("w", (64, 64, 3, 3), DType.FLOAT16, layout=Layout.NHWC), pad=1)
    sums = g.apply(GenStats(x=y))._asdict()
    yield Row("convolution-gen_stats-float16", g.build(y=y, **sums).body, whole=True)


def _normalised(dtype: DType, *, added: bool) -> OperationGraph:
    """Batch norm, another tensor added to it, and relu."""
    g = GraphBuilder()
    x, z = (g.input(name, (8, 64, 32, 32), dtype, layout=Layout.NHWC) for name in "xz")
    weights = ("scale", "bias", "running_mean", "running_variance")
    given: Any = {name: g.input(name, (64,)) for name in weights}
    operation = BatchNormTraining(x=x, **given)
    found = g.apply(operation, also=operation.outputs[1:])
    y = g.relu(found.y + z if added else found.y)
    return g.build({**found._asdict(), "y": y}).body


def channel_norms(
    dtype: DType, dims: tuple[int, ...], layout: Layout, weights: DType, *, bare: bool = False
) -> Iterator[tuple[str, OperationGraph]]:
    """Each norm of channels of tensors like this, with all operands, or with none that may be left out."""
    x, w = TensorSpec.packed(dims, dtype, layout), TensorSpec.packed(dims[1:2], weights)
    running = {"running_mean": w, "running_variance": w}
    for kind, backward, groups in (
        (BatchNormTraining, BatchNormBackward, None),
        (InstanceNorm, InstanceNormBackward, None),
        (GroupNorm, GroupNormBackward, 2),
    ):
        more: Any = {} if groups is None else {"groups": groups}
        of_batch = kind is BatchNormTraining
        statistics = kind(x=0, **more).infer({"x": x})["mean"]
        kept: Any = dict.fromkeys(("mean", "inverse_deviation"), statistics)
        given: dict[str, Any] = {"x": x}
        outputs: dict[str, Any] = {"y": x}
        if not bare:
            given |= {"scale": w, "bias": w, **(running if of_batch else {})}
            outputs |= kept | ({f"new_{name}": w for name in running} if of_batch else {})
        yield kind.kind, graph_of(kind, given, outputs, **more)
        given = {"dy": x, "x": x, **kept} | ({} if bare else {"scale": w})
        sums = {"dx": x} | ({} if bare else {"dscale": w, "dbias": w})
        yield backward.kind, graph_of(backward, given, sums, **more)
    fixed = {"mean": w, "variance": w} | ({} if bare else {"scale": w, "bias": w})
    yield "batch_norm", graph_of(BatchNorm, {"x": x, **fixed}, {"y": x})
    yield "gen_stats", graph_of(GenStats, {"x": x}, {"sum": None, "sum_of_squares": None})


def _attentions() -> Iterator[Row]:
    heads: list[dict[str, Any]] = [{"head": size} for size in (8, 32, 40, 64, 72, 96, 128, 192, 256)]
    lengths = ((57, 45), (77, 77), (197, 197), (1500, 1500), (4096, 77), (1, 512))
    options: list[dict[str, Any]] = [
        *heads,
        *({"lengths": given} for given in lengths),
        *({"lengths": given, "padded": _PADDED} for given in lengths),
        *({"padded": (name,)} for name in ("lengths_q", "lengths_kv")),
        *({"bias": bias} for bias in ("1hss", "bhss", "11ss", "b11s")),
        *({"causal": True, **more} for more in ({}, {"bias": "1hss"}, {"padded": ("lengths_kv",)})),
        *({"groups": groups, "causal": causal} for groups in (1, 2) for causal in (False, True)),
        {"layout": "bshd"},
        {"bias": "1hss", "padded": ("lengths_kv",)},
        *({"window": window} for window in ((7, None), (None, 5), (7, 5), (7, 0), (0, None))),
        *({"window": (64, 0), **more} for more in ({"groups": 2}, {"lengths": (77, 130)}, {"bias": "1hss"})),
        *({"alibi": True, "causal": True, **more} for more in ({}, {"bias": "1hss"}, {"padded": _PADDED})),
        {"alibi": True, "window": (64, 0)},
        *({"dropout": 0.1, **more} for more in ({}, {"causal": True}, {"groups": 2}, {"bias": "1hss"})),
        *({"dropout": 0.1, **more} for more in ({"padded": _PADDED}, {"lengths": (77, 77)}, {"head": 128})),
        {"dropout": 0.5, "alibi": True, "window": (64, 0)},
    ]
    exact: list[dict[str, Any]] = [
        {"head": head, "deterministic": True, **more}
        for head, more in itertools.product((64, 128, 256), ({}, {"bias": "1hss"}))
    ]
    for dtype, backward in itertools.product(HALVES, (False, True)):
        more = exact if backward else [{"head": 512}, {"lengths": (1, 33)}]
        for choice in (*options, *more):
            if backward and "dropout" in choice:
                continue
            words = (f"{name}={value}" for name, value in choice.items())
            name = "-".join(["attention_bwd" if backward else "attention", dtype, *words])
            # A kernel brings lengths into range. The backward pass needs them for uneven keys, too.
            queries, keys = choice.get("lengths", (512, 512))
            computed = "padded" in choice or "dropout" in choice
            whole = not computed and not (backward and (keys % 128 or queries == 1))
            yield Row(name.replace(" ", ""), attention(dtype, backward=backward, **choice), whole)


def attention(
    dtype: DType,
    *,
    backward: bool,
    head: int = 64,
    lengths: tuple[int, int] = (512, 512),
    groups: int = 8,
    layout: str = "bhsd",
    bias: str = "",
    padded: tuple[str, ...] = (),
    causal: bool = False,
    window: tuple[int | None, int | None] = (None, None),
    alibi: bool = False,
    dropout: float = 0.0,
    deterministic: bool = False,
) -> OperationGraph:
    """An attention of 8 heads with its statistics, or its gradients with the bias's, as one graph.

    `bias` says which of its dims are 1, `padded` which lengths are given.
    """
    batch, heads = 2, 8
    wide = DType.FLOAT64 if dtype is DType.FLOAT64 else DType.FLOAT32

    def spec(groups: int, length: int) -> TensorSpec:
        sizes = dict(zip("bhsd", (batch, groups, length, head), strict=True))
        strides, step = {}, 1
        for axis in reversed(layout):
            strides[axis], step = step, step * sizes[axis]
        return TensorSpec.strided([*sizes.values()], [strides[axis] for axis in sizes], dtype)

    q, k = spec(heads, lengths[0]), spec(groups, lengths[1])
    given: dict[str, TensorSpec | None] = {"q": q, "k": k, "v": k}
    statistics = TensorSpec.packed((batch, heads, lengths[0], 1), wide)
    outputs: dict[str, TensorSpec | None] = {"y": q, "statistics": statistics}
    if backward:
        given = {"dy": q, **given, **outputs}
        outputs = {"dq": q, "dk": k, "dv": k}
    if bias:
        whole = (batch, heads, *lengths)
        dims = tuple(1 if letter == "1" else size for letter, size in zip(bias, whole, strict=True))
        given["bias"] = TensorSpec.packed(dims, dtype)
        if backward:
            outputs["dbias"] = given["bias"]
    given |= {name: TensorSpec.packed((batch,), DType.INT32) for name in padded}
    if dropout:
        given["state"] = TensorSpec.packed((2,), DType.INT64)
    kind = AttentionBackward if backward else Attention
    options: dict[str, Any] = {"causal": causal, "dropout": dropout}
    options |= {"window_left": window[0], "window_right": window[1]}
    options["slopes"] = alibi_slopes(heads) if alibi else None
    return graph_of(kind, given, outputs, Numerics(deterministic=deterministic), **options)


def _products() -> Iterator[Row]:
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
        "square": ((512, 512), (512, 512)),
        "odd": ((77, 130), (130, 61)),
        "one row": ((1, 768), (768, 3072)),
        "one column": ((768, 3072), (3072, 1)),
        "batch": ((8, 128, 64), (8, 64, 256)),
        "heads": ((8, 12, 128, 64), (8, 12, 64, 128)),
        "layer": ((8, 128, 768), (768, 3072)),
        "shared heads": ((8, 12, 128, 64), (8, 1, 64, 128)),
        "shared a": ((128, 64), (8, 64, 256)),
    }
    for dtype, (name, (a, b)) in itertools.product((*HALVES, DType.FLOAT32), shapes.items()):
        for swapped in ("", "a", "b", "ab") if name == "odd" else ("", "b") if dtype in HALVES else ("",):
            numerics = Numerics(tf32=dtype is DType.FLOAT32)
            graph = product(dtype, a, b, swapped=swapped, numerics=numerics)
            yield Row(f"matmul-{dtype}-{name}-{swapped}".replace(" ", "_"), graph, whole=True)
    for dtype in HALVES:
        graph = product(dtype, (8, 128, 64), (8, 64, 256), DType.FLOAT32)
        yield Row(f"matmul-{dtype}-float32_result", graph, whole=True)
    yield Row("matmul-int8", product(DType.INT8, (8, 128, 64), (8, 64, 256), swapped="b"), whole=True)
    biases: tuple[tuple[str, tuple[int, ...]], ...] = (
        ("odd", (1, 61)),
        ("layer", (1, 1, 3072)),
        ("layer", (8, 128, 3072)),
        ("heads", (1, 1, 1, 128)),
        ("heads", (8, 12, 128, 128)),
    )
    for dtype, (name, bias), swapped in itertools.product(HALVES, biases, ("", "b")):
        graph = biased(product(dtype, *shapes[name], swapped=swapped), bias)
        yield Row(f"matmul-{dtype}-{name}-{swapped}-bias={bias}".replace(" ", ""), graph, whole=True)


def biased(graph: OperationGraph, bias: tuple[int, ...]) -> OperationGraph:
    """relu(a @ b + bias), the values between them as float32."""
    *operands, y = graph.tensors

    def same(uid: int, dtype: DType, role: TensorRole) -> GraphTensor:
        return msgspec.structs.replace(y, uid=uid, dtype=dtype, role=role)

    middle = [same(uid, DType.FLOAT32, TensorRole.VIRTUAL) for uid in (y.uid, 3)]
    spec = TensorSpec.packed(bias, y.dtype)
    given = GraphTensor(uid=4, dims=spec.dims, strides=spec.strides, dtype=spec.dtype)
    add = Pointwise(mode=PointwiseMode.ADD, operands=(y.uid, 4), result=3)
    relu = Pointwise(mode=PointwiseMode.RELU, operands=(3,), result=5)
    return OperationGraph(
        tensors=(*operands, *middle, given, same(5, y.dtype, TensorRole.BOUND)),
        operations=(*graph.operations, add, relu),
    )


def product(
    dtype: DType,
    a: tuple[int, ...],
    b: tuple[int, ...],
    result: DType | None = None,
    *,
    swapped: str = "",
    numerics: Numerics | None = None,
) -> OperationGraph:
    """A product of matrices. `swapped`: the operands whose last two dims are swapped in memory."""

    def spec(name: str, dims: tuple[int, ...]) -> TensorSpec:
        packed = TensorSpec.packed((*dims[:-2], dims[-1], dims[-2]), dtype)
        strides = (*packed.strides[:-2], packed.strides[-1], packed.strides[-2])
        return TensorSpec.strided(dims, strides, dtype) if name in swapped else TensorSpec.packed(dims, dtype)

    given = {"a": spec("a", a), "b": spec("b", b)}
    inferred = MatMul(a=0, b=1).infer(given)["y"]
    y = TensorSpec.packed(inferred.dims, result or inferred.dtype)
    return graph_of(MatMul, given, {"y": y}, numerics)


def _sums() -> Iterator[Row]:
    """Over rows, columns and all of what is a matrix in memory, to float32.

    Those of float32 are left to our kernels: cuDNN's may use tensor cores, which round it.
    """
    wanted: list[tuple[tuple[int, ...], tuple[int, ...] | None, Layout]] = [
        ((64, 512), (1,), Layout.NCHW),
        ((21, 97), (-1,), Layout.NCHW),
        ((512, 64), (0,), Layout.NCHW),
        ((1 << 14, 1 << 12), None, Layout.NCHW),
        ((4, 8, 16, 32), (2, 3), Layout.NCHW),
        ((4, 8, 16, 32), (0, 1), Layout.NCHW),
        ((8, 64, 16, 16), (1,), Layout.NHWC),
        ((8, 64, 16, 16), (0, 2, 3), Layout.NHWC),
    ]
    for dtype, (dims, axes, layout) in itertools.product(HALVES, wanted):
        x = TensorSpec.packed(dims, dtype, layout)
        for keep in (True,) if axes is None else (False, True):  # cuDNN has no tensors without dims
            given: dict[str, Any] = {"mode": ReductionMode.SUM, "axes": axes, "keep_dims": keep}
            y = Reduction(x=0, y=1, **given).infer({"x": x})["y"]
            graph = graph_of(Reduction, {"x": x}, {"y": TensorSpec.packed(y.dims, DType.FLOAT32)}, **given)
            yield Row(f"sum-{dtype}-{dims}-{axes}-{layout}-{keep}".replace(" ", ""), graph, whole=True)


def graph_of(
    operation: Callable[..., Node],
    inputs: Operands,
    outputs: Operands,
    numerics: Numerics | None = None,
    **fields: Any,
) -> OperationGraph:
    """A graph of one operation with these operands, by the names of its fields.

    The spec of an output that follows from the inputs may be None.
    """
    names = {name: number for number, name in enumerate((*inputs, *outputs))}
    node = operation(**names, **fields)
    given = {name: spec for name, spec in {**inputs, **outputs}.items() if spec is not None}
    specs = node.infer({name: given[name] for name in inputs}) | given
    node.check({name: specs[name] for name in names})
    tensors = (
        GraphTensor(uid=uid, dims=specs[name].dims, strides=specs[name].strides, dtype=specs[name].dtype)
        for name, uid in names.items()
    )
    return OperationGraph(tensors=tuple(tensors), operations=(node,), numerics=numerics or Numerics())
