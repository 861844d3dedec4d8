"""Pooling, norms, softmax, sums, attention and products on a GPU, beside PyTorch and a plain copy.

    python -m benchmarks.operations --out benchmarks/results

Needs a GPU and PyTorch. Times are microseconds of device time. The plan that a service would use is timed as
a captured CUDA graph, and so is the first plan of each other way to run the operation alone: cuDNN's graph, a
kernel of ours, libcudnn's function. Each is checked first. PyTorch's function is timed eagerly in the same
process; where it launches many kernels, it is timed as a CUDA graph, too. The plan's time, PyTorch's and the
copy's are the best of three batches.

The plain copy is the driver's. It reads and writes as many bytes together as the operation's operands and
results have: what takes as long as it has all of the copy's bandwidth. Products and attention, which compute
more than they move, take longer by their nature.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import importlib.metadata
import itertools
import re
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from rich.table import Table

from cudnn_actor.engines.cuda.checking.self_check import SelfCheck
from cudnn_actor.engines.cuda.cudnn.frontend_graph import Refused
from cudnn_actor.engines.cuda.library.libraries import libraries
from cudnn_actor.engines.cuda.planning.cuda_builder import CudaBuilder
from cudnn_actor.engines.cuda.planning.partition import cut
from cudnn_actor.engines.cuda.planning.splitting import compile_split, ways
from cudnn_actor.engines.cuda.planning.tuning import time_plan
from cudnn_actor.protocol import (
    AdaptiveWindow,
    Attention,
    AttentionBackward,
    AvgPool,
    AvgPoolBackward,
    BatchNorm,
    BatchNormBackward,
    BatchNormTraining,
    CTCLoss,
    DType,
    GroupedMatMul,
    GroupedMatMulBackwardWeights,
    GroupNorm,
    GroupNormBackward,
    LayerNorm,
    LayerNormBackward,
    Layout,
    MatMul,
    MaxPool,
    MaxPoolBackward,
    OperationGraph,
    Reduction,
    ReductionMode,
    RMSNorm,
    RMSNormBackward,
    Softmax,
    SoftmaxBackward,
    TensorSpec,
    Window,
)

from .gpu.setting import gpu_versions
from .problem import Problem, graph_of, torch_module
from .recording import Row, attempted, keep
from .recurrent_problems import recurrences, walks

_RUNS, _BATCHES = 20, 3


def captured(call: Callable[[], object]) -> Callable[[], object]:
    """A function that replays a call of PyTorch, which has been made before, as a CUDA graph."""
    graph = torch_module().cuda.CUDAGraph()
    with torch_module().cuda.graph(graph, capture_error_mode="thread_local"):
        call()
    return graph.replay  # type: ignore[no-any-return]


def pools(dtype: DType, layout: Layout) -> Iterator[Problem]:
    """ResNet-50's first pooling at a batch of 32: windows of 3 by 3, stride 2, padding 1."""
    torch = torch_module()
    functional, back = torch.nn.functional, torch.ops.aten
    window = Window.symmetric(2, size=3, pad=1, stride=2)
    dims = (32, 64, 112, 112)
    x, y = (TensorSpec.packed(d, dtype, layout) for d in (dims, window.output_dims(dims)))
    index = TensorSpec.packed(y.dims, DType.INT64, layout)
    form = torch.channels_last if layout is Layout.NHWC else torch.contiguous_format
    given = torch.randn(dims, device="cuda").to(getattr(torch, dtype.value)).contiguous(memory_format=form)
    result, places = functional.max_pool2d(given, 3, 2, 1, return_indices=True)

    def name(what: str) -> str:
        return f"{what}, {dtype.value}, {layout.value}, 32x64x112x112"

    common: Any = {"window": window}
    yield Problem(
        name("max pooling"),
        graph_of(MaxPool, {"x": x, "y": y}, **common),
        lambda: functional.max_pool2d(given, 3, 2, 1),
    )
    yield Problem(
        name("max pooling with index"),
        graph_of(MaxPool, {"x": x, "y": y, "index": index}, **common),
        lambda: functional.max_pool2d(given, 3, 2, 1, return_indices=True),
    )
    yield Problem(
        name("max pooling, gradient"),
        graph_of(MaxPoolBackward, {"dy": y, "index": index, "dx": x}, **common),
        lambda: back.max_pool2d_with_indices_backward(
            result, given, [3, 3], [2, 2], [1, 1], [1, 1], False, places
        ),
    )
    yield Problem(
        name("average pooling"),
        graph_of(AvgPool, {"x": x, "y": y}, **common),
        lambda: functional.avg_pool2d(given, 3, 2, 1, count_include_pad=False),
    )
    yield Problem(
        name("average pooling, gradient"),
        graph_of(AvgPoolBackward, {"dy": y, "dx": x}, **common),
        lambda: back.avg_pool2d_backward(result, given, [3, 3], [2, 2], [1, 1], False, False, None),
    )


def global_pools(dtype: DType) -> Iterator[Problem]:
    """ResNet-50's last pooling at a batch of 32, as a reduction and as a pooling."""
    torch = torch_module()
    dims = (32, 2048, 7, 7)
    x, y = (TensorSpec.packed(d, dtype, Layout.NHWC) for d in (dims, (*dims[:2], 1, 1)))
    form = torch.channels_last
    given = torch.randn(dims, device="cuda").to(getattr(torch, dtype.value)).contiguous(memory_format=form)
    result = functools.partial(torch.nn.functional.adaptive_avg_pool2d, given, 1)
    what = f"{dtype.value}, NHWC, 32x2048x7x7"
    mean: Any = {"mode": ReductionMode.MEAN, "axes": (2, 3), "keep_dims": True}
    yield Problem(
        f"global average as a reduction, {what}", graph_of(Reduction, {"x": x, "y": y}, **mean), result
    )
    ones = AdaptiveWindow(output=(1, 1))
    yield Problem(
        f"global average as a pooling, {what}", graph_of(AvgPool, {"x": x, "y": y}, window=ones), result
    )
    yield Problem(
        f"global average, gradient, {what}",
        graph_of(AvgPoolBackward, {"dy": y, "dx": x}, window=ones),
        functools.partial(torch.ops.aten._adaptive_avg_pool2d_backward, result(), given),
    )


def grouped(dtype: DType, sizes: tuple[int, int, int, int]) -> Iterator[Problem]:
    """Tokens, K, N, experts. Our groups have several sizes; PyTorch's, of bfloat16 only, are equal."""
    torch = torch_module()
    rows, inner, columns, experts = sizes
    tokens, dy = TensorSpec.packed((rows, inner), dtype), TensorSpec.packed((rows, columns), dtype)
    weights, offsets = (
        TensorSpec.packed(d, t) for d, t in (((experts, inner, columns), dtype), ((experts,), DType.INT32))
    )
    call = getattr(torch, "_grouped_mm", None) if dtype is DType.BFLOAT16 else None
    forward = backward = None
    if call is not None:
        a, b, c = (torch.randn(s.dims, device="cuda").to(torch.bfloat16) for s in (tokens, weights, dy))
        ends = torch.arange(1, experts + 1, device="cuda", dtype=torch.int32) * (rows // experts)
        forward = functools.partial(call, a, b, offs=ends)
        backward = functools.partial(call, a.t(), c, offs=ends)
    what = f"{dtype.value}, {'x'.join(map(str, sizes[:3]))}, {experts} experts"
    given = {"tokens": tokens, "weights": weights, "offsets": offsets, "y": dy}
    yield Problem(f"grouped product, {what}", graph_of(GroupedMatMul, given), forward)
    given = {"tokens": tokens, "dy": dy, "offsets": offsets, "dweights": weights}
    yield Problem(
        f"grouped product, gradient of the weights, {what}",
        graph_of(GroupedMatMulBackwardWeights, given),
        backward,
    )


def products(dtype: DType) -> Iterator[Problem]:
    """Products of matrices as transformers have them, large square ones, and those of heads."""
    torch = torch_module()
    element = getattr(torch, dtype.value)
    for a, b in (
        ((4096, 768), (768, 3072)),
        ((4096, 3072), (3072, 768)),
        ((6304, 768), (768, 2304)),
        ((512, 2048), (2048, 8192)),
        ((4096, 4096), (4096, 4096)),
        ((1, 4096), (4096, 4096)),
        ((384, 512, 64), (384, 64, 512)),
    ):
        specs = {"a": TensorSpec.packed(a, dtype), "b": TensorSpec.packed(b, dtype)}
        specs |= MatMul(a=0, b=1).infer(specs)
        given = [torch.randn(dims, device="cuda").to(element) for dims in (a, b)]
        name = f"product, {dtype.value}, {'x'.join(map(str, a))} by {'x'.join(map(str, b))}"
        yield Problem(name, graph_of(MatMul, specs), functools.partial(torch.matmul, *given))


def norms(dtype: DType, rows: int, length: int) -> Iterator[Problem]:
    """The norms with what training needs: statistics out, gradients of scale and bias."""
    torch = torch_module()
    functional, back = torch.nn.functional, torch.ops.aten
    x, weights = TensorSpec.packed((rows, length), dtype), TensorSpec.packed((length,), dtype)
    kept = TensorSpec.packed((rows, 1), DType.FLOAT32)
    element = getattr(torch, dtype.value)
    given = torch.randn(rows, length, device="cuda").to(element)
    scale = torch.randn(length, device="cuda").to(element)
    mean, inverse = torch.randn(rows, 1, device="cuda"), torch.rand(rows, 1, device="cuda")

    def name(what: str) -> str:
        return f"{what}, {dtype.value}, {rows}x{length}"

    yield Problem(
        name("layer norm"),
        graph_of(
            LayerNorm,
            {"x": x, "scale": weights, "bias": weights, "y": x, "mean": kept, "inverse_deviation": kept},
        ),
        lambda: back.native_layer_norm(given, [length], scale, scale, 1e-5),
    )
    yield Problem(
        name("layer norm, gradients"),
        graph_of(
            LayerNormBackward,
            {"dy": x, "x": x, "mean": kept, "inverse_deviation": kept, "scale": weights}
            | {"dx": x, "dscale": weights, "dbias": weights},
        ),
        lambda: back.native_layer_norm_backward(
            given, given, [length], mean, inverse, scale, scale, [True, True, True]
        ),
    )
    yield Problem(
        name("RMS norm"),
        graph_of(RMSNorm, {"x": x, "scale": weights, "y": x, "inverse_rms": kept}),
        lambda: functional.rms_norm(given, [length], scale, 1e-5),
    )
    yield Problem(
        name("RMS norm, gradients"),
        graph_of(
            RMSNormBackward,
            {"dy": x, "x": x, "inverse_rms": kept, "scale": weights, "dx": x, "dscale": weights},
        ),
        None,
    )


def channel_norms(dtype: DType, layout: Layout) -> Iterator[Problem]:
    """Batch and group norm of a layer of ResNet-50, with what training needs."""
    torch = torch_module()
    back = torch.ops.aten
    dims, groups = (32, 64, 56, 56), 32
    x, weights = TensorSpec.packed(dims, dtype, layout), TensorSpec.packed(dims[1:2])
    element = getattr(torch, dtype.value)
    memory = torch.channels_last if layout is Layout.NHWC else torch.contiguous_format
    given = torch.randn(dims, device="cuda").to(element).to(memory_format=memory)
    ones = torch.ones(dims[1], device="cuda")
    plain = ones.to(element)
    kept = torch.ones(dims[0], groups, device="cuda").to(element)

    def name(what: str) -> str:
        return f"{what}, {dtype.value}, {'x'.join(map(str, dims))}, {layout.value}"

    statistics = dict.fromkeys(("mean", "inverse_deviation"), weights)
    running = dict.fromkeys(("running_mean", "running_variance"), weights)
    new = {f"new_{name}": weights for name in running}
    yield Problem(
        name("batch norm"),
        graph_of(
            BatchNormTraining,
            {"x": x, "scale": weights, "bias": weights, **running, "y": x, **statistics, **new},
        ),
        lambda: back.native_batch_norm(given, ones, ones, ones, ones, True, 0.1, 1e-5),
    )
    sums = {"dx": x, "dscale": weights, "dbias": weights}
    yield Problem(
        name("batch norm, gradients"),
        graph_of(BatchNormBackward, {"dy": x, "x": x, **statistics, "scale": weights, **sums}),
        lambda: back.native_batch_norm_backward(
            given, given, ones, ones, ones, ones, ones, True, 1e-5, [True, True, True]
        ),
    )
    yield Problem(
        name("batch norm, inference"),
        graph_of(
            BatchNorm,
            {"x": x, "mean": weights, "variance": weights, "scale": weights, "bias": weights, "y": x},
        ),
        lambda: back.native_batch_norm(given, ones, ones, ones, ones, False, 0.1, 1e-5),
    )
    of_groups = dict.fromkeys(("mean", "inverse_deviation"), TensorSpec.packed((dims[0], groups)))
    yield Problem(
        name("group norm"),
        graph_of(GroupNorm, {"x": x, "scale": weights, "bias": weights, "y": x, **of_groups}, groups=groups),
        lambda: back.native_group_norm(given, plain, plain, *dims[:2], dims[2] * dims[3], groups, 1e-5),
    )
    yield Problem(
        name("group norm, gradients"),
        graph_of(GroupNormBackward, {"dy": x, "x": x, **of_groups, "scale": weights, **sums}, groups=groups),
        lambda: back.native_group_norm_backward(
            given, given, kept, kept, plain, *dims[:2], dims[2] * dims[3], groups, [True, True, True]
        ),
    )


def reductions(dtype: DType, rows: int, length: int) -> Iterator[Problem]:
    """Over the rows, the columns and all of a matrix."""
    torch = torch_module()
    x = TensorSpec.packed((rows, length), dtype)
    given = torch.randn(rows, length, device="cuda").to(getattr(torch, dtype.value))

    def name(what: str) -> str:
        return f"{what}, {dtype.value}, {rows}x{length}"

    modes = {
        ReductionMode.SUM: torch.sum,
        ReductionMode.MAX: torch.amax,
        ReductionMode.LOG_SUM_EXP: torch.logsumexp,
    }
    for (mode, function), axes in itertools.product(modes.items(), ((1,), (0,), (0, 1))):
        dims = tuple(size for axis, size in enumerate(x.dims) if axis not in axes)
        y = TensorSpec.packed(dims, DType.FLOAT32 if mode is ReductionMode.SUM else dtype)
        yield Problem(
            name(f"{mode.value} over {' and '.join(map(str, axes))}"),
            graph_of(Reduction, {"x": x, "y": y}, mode=mode, axes=axes),
            functools.partial(function, given, axes),
        )


def softmaxes(dtype: DType, rows: int, length: int) -> Iterator[Problem]:
    """The softmaxes of the rows of a matrix."""
    torch = torch_module()
    x = TensorSpec.packed((rows, length), dtype)
    given = torch.randn(rows, length, device="cuda").to(getattr(torch, dtype.value))

    def name(what: str) -> str:
        return f"{what}, {dtype.value}, {rows}x{length}"

    for log in (False, True):
        function, back = (
            (torch.log_softmax, torch.ops.aten._log_softmax_backward_data)
            if log
            else (torch.softmax, torch.ops.aten._softmax_backward_data)
        )
        result = function(given, 1)
        what = "log-softmax" if log else "softmax"
        yield Problem(
            name(what), graph_of(Softmax, {"x": x, "y": x}, log=log), functools.partial(function, given, 1)
        )
        yield Problem(
            name(f"{what}, gradient"),
            graph_of(SoftmaxBackward, {"dy": x, "y": x, "dx": x}, log=log),
            functools.partial(back, given, result, 1, given.dtype),
        )


def attentions(dtype: DType, dims: tuple[int, int, int, int], *, causal: bool) -> Iterator[Problem]:
    """Forward with statistics, and backward."""
    torch = torch_module()
    functional = torch.nn.functional
    heads, kept = TensorSpec.packed(dims, dtype), TensorSpec.packed((*dims[:3], 1), DType.FLOAT32)
    lengths = TensorSpec.packed(dims[:1], DType.INT32)
    element = getattr(torch, dtype.value)
    q, k, v, dy = (torch.randn(dims, device="cuda").to(element).requires_grad_() for _ in range(4))
    result = functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    operands = dict.fromkeys("qkv", heads)
    what = f"{dtype.value}, {'x'.join(map(str, dims))}{', causal' if causal else ''}"
    yield Problem(
        f"attention, {what}",
        graph_of(Attention, operands | {"y": heads, "statistics": kept}, causal=causal),
        lambda: functional.scaled_dot_product_attention(q, k, v, is_causal=causal),
    )
    yield Problem(
        f"attention with lengths, {what}",
        graph_of(
            Attention, operands | {"lengths_kv": lengths, "y": heads, "statistics": kept}, causal=causal
        ),
        None,
    )
    gradients = dict.fromkeys(("dq", "dk", "dv"), heads)
    yield Problem(
        f"attention, gradients, {what}",
        graph_of(
            AttentionBackward,
            operands | {"dy": heads, "y": heads, "statistics": kept} | gradients,
            causal=causal,
        ),
        lambda: torch.autograd.grad(result, (q, k, v), dy, retain_graph=True),
    )


def ctc_losses(dtype: DType, sizes: tuple[int, int, int, int]) -> Iterator[Problem]:
    """T, N, C, S. The losses alone, and with their derivatives; PyTorch's kernels, with their gradients."""
    torch = torch_module()
    frames, samples, classes, labels = sizes
    specs = {
        "log_probs": TensorSpec.packed((frames, samples, classes), dtype),
        "targets": TensorSpec.packed((samples, labels), DType.INT64),
        **dict.fromkeys(("input_lengths", "target_lengths"), TensorSpec.packed((samples,), DType.INT64)),
        "losses": TensorSpec.packed((samples,), dtype),
    }
    scores = torch.randn((frames, samples, classes), device="cuda", dtype=getattr(torch, dtype.value))
    log_probs = torch.log_softmax(scores, 2)
    targets = torch.randint(1, classes, (samples, labels), device="cuda")
    given = (log_probs, targets, [frames] * samples, [labels] * samples)
    ones = torch.ones(samples, device="cuda", dtype=log_probs.dtype)

    def forward() -> tuple[Any, Any]:
        found: tuple[Any, Any] = torch.ops.aten._ctc_loss(*given, 0, False)
        return found

    def both() -> object:
        return torch.ops.aten._ctc_loss_backward(ones, *given, *forward(), 0, False)

    what = f"{dtype.value}, {'x'.join(map(str, sizes[:3]))}, {labels} labels"
    yield Problem(f"CTC loss, {what}", graph_of(CTCLoss, specs), forward)
    specs |= {"dlog_probs": specs["log_probs"]}
    yield Problem(f"CTC loss with derivatives, {what}", graph_of(CTCLoss, specs), both)


def problems() -> Iterator[Problem]:
    """All problems; each holds its tensors until the next is asked for.

    What is compared most comes first, for runs that end early.
    """
    yield from attentions(DType.BFLOAT16, (4, 16, 4096, 128), causal=True)
    for dtype in (DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32, DType.FLOAT64):
        yield from products(dtype)
    for dtype in (DType.BFLOAT16, DType.FLOAT32):
        for rows, length in ((16384, 768), (8192, 4096)):
            yield from norms(dtype, rows, length)
            yield from softmaxes(dtype, rows, length)
        for layout in (Layout.NHWC, Layout.NCHW):
            yield from channel_norms(dtype, layout)
            yield from pools(dtype, layout)
        yield from global_pools(dtype)
        yield from grouped(dtype, (8192, 2048, 1024, 64))
        yield from grouped(dtype, (4096, 4096, 2048, 8))
        for rows, length in ((16384, 768), (8192, 4096)):
            yield from reductions(dtype, rows, length)
    for dtype, kind in itertools.product((DType.FLOAT16, DType.BFLOAT16), ("LSTM", "GRU")):
        yield from recurrences(dtype, kind)
    for units, batch in itertools.product((128, 256, 512, 1024), (1, 32)):
        yield from walks(DType.FLOAT16, units, batch)
    yield from ctc_losses(DType.FLOAT32, (500, 64, 30, 40))
    yield from ctc_losses(DType.FLOAT32, (1000, 16, 5000, 200))
    yield from attentions(DType.BFLOAT16, (32, 12, 512, 64), causal=False)
    yield from attentions(DType.FLOAT32, (4, 16, 1024, 64), causal=True)


def best(batch: Callable[[], float]) -> float:
    """The least of a few batches' microseconds, to a tenth."""
    return round(min(batch() for _ in range(_BATCHES)), 1)


def moved_bytes(graph: OperationGraph) -> int:
    """The bytes of all operands and results."""
    return sum(graph.tensor(uid).spec.nbytes for uid in graph.bound)


def copying_us(nbytes: int) -> float:
    """Microseconds of device time of a plain copy that reads and writes so many bytes together."""
    cupy, runtime = libraries().cupy, libraries().runtime
    half = nbytes // 2
    source, target = cupy.zeros(half, "uint8"), cupy.zeros(half, "uint8")
    stream = cupy.cuda.get_current_stream()

    def batch() -> float:
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        for number in range(3 + _RUNS):
            if number == 3:
                begin.record(stream)
            kind = runtime.memcpyDeviceToDevice
            runtime.memcpyAsync(int(target.data.ptr), int(source.data.ptr), half, kind, stream.ptr)
        end.record(stream)
        end.synchronize()
        return float(cupy.cuda.get_elapsed_time(begin, end)) * 1e3 / _RUNS

    return best(batch)


def beside_copy(us: float | str, nbytes: int) -> Row:
    """The bytes, the copy's time, and the share of its bandwidth; None if `us` says what is wrong instead."""
    copied = copying_us(nbytes)
    fraction = None if isinstance(us, str) else round(copied / us, 3)
    return {"nbytes": nbytes, "copy_us": copied, "fraction": fraction}


def measure(builder: CudaBuilder, problem: Problem) -> Row:
    """Microseconds of each way, PyTorch's and a copy's; what is wrong with a plan, where something is."""
    start, graph, context = time.monotonic(), problem.graph, builder.context
    plans = {"chosen": builder.build(graph, workspace_limit=None)}
    whole = cut(graph) is None  # pieces have been checked one by one, and are built in one way
    for choice in range(ways(graph) if whole else 0):
        with contextlib.suppress(Refused):
            plan = compile_split(graph, context.handle, None, choice=choice)
            plans.setdefault(plan.tag, plan)
    found: Row = {"problem": problem.name, "chosen": plans["chosen"].tag}
    check = SelfCheck(graph, context)
    try:
        chosen = plans.pop("chosen")
        fault = check.fault(chosen) if whole else None
        us = {"chosen": fault or best(lambda: time_plan(check, chosen, _RUNS))}
        us |= {
            way: check.fault(plan) or round(time_plan(check, plan, _RUNS), 1) for way, plan in plans.items()
        }
    finally:
        check.close()
    found |= {"us": us, "torch_us": None}
    try:
        found["torch_us"] = None if problem.torch is None else torch_us(problem.torch)
        if problem.torch is not None and problem.launches:
            found["torch_graph_us"] = torch_us(captured(problem.torch))
    except Exception as error:  # noqa: BLE001 - ours is measured all the same
        found["torch_error"] = f"{type(error).__name__}: {error}"
    found |= beside_copy(us["chosen"], moved_bytes(graph))
    found["measured_in_s"] = round(time.monotonic() - start, 1)
    return found


def torch_us(call: Callable[[], object], runs: int = _RUNS) -> float:
    """Microseconds of a call, on the device: the best of three batches."""
    torch = torch_module()
    for _ in range(5):
        call()

    def batch() -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(runs):
            call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e3 / runs

    return best(batch)


def main() -> None:
    run_alone(
        "operations",
        __doc__,
        lambda builder, only: each(problems(), functools.partial(measure, builder), only),
        sheet,
        PyTorch="torch",
    )


def run_alone(
    name: str,
    doc: str | None,
    rows: Callable[[CudaBuilder, str], Iterable[Row]],
    sheet: Callable[[list[Row]], Table],
    **packages: str,
) -> None:
    """A program that measures with a builder of its own, and keeps what it finds.

    `rows` takes the builder, and a regular expression that is found in the names of problems. `packages`:
    names in the record, and the packages whose versions it has besides the libraries'.
    """
    parser = argparse.ArgumentParser(description=doc.splitlines()[0] if doc else None)
    parser.add_argument("--out", type=Path, help="directory for the JSON")
    parser.add_argument("--only", default="", help="problems in whose name this regular expression is found")
    given = parser.parse_args()
    known = gpu_versions() | {name: importlib.metadata.version(of) for name, of in packages.items()}
    builder = CudaBuilder(0)
    builder.open()
    keep(rows(builder, given.only), sheet, given.out, name, versions=known)
    builder.close()


def each(problems: Iterable[Any], row: Callable[[Any], Row], only: str = "") -> Iterator[Row]:
    """A row of each problem in whose name the regular expression `only` is found."""
    for problem in problems:
        if re.search(only, problem.name):
            yield from attempted(problem.name, lambda problem=problem: [row(problem)])  # type: ignore[misc]
            libraries().cupy.get_default_memory_pool().free_all_blocks()


def sheet(found: list[Row]) -> Table:
    """The results as a table."""
    table = Table(
        "", "plan", "µs", "PyTorch, µs", "PyTorch / ours", "of a copy's bandwidth", "other ways, µs"
    )
    for row in found:
        us, fraction = row["us"]["chosen"], row["fraction"]
        theirs = row.get("torch_graph_us", row["torch_us"])
        rest = ", ".join(
            f"{way} {us}" for way, us in row["us"].items() if way not in ("chosen", row["chosen"])
        )
        ratio = "" if theirs is None or isinstance(us, str) else f"{theirs / us:.2f}"
        cells = ("" if cell is None else str(cell) for cell in (us, theirs, ratio, fraction, rest))
        table.add_row(row["problem"], row["chosen"], *cells)
    return table


if __name__ == "__main__":
    main()
