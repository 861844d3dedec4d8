"""Pooling, norms, attention, products, reductions and softmax against PyTorch on the CPU, in float64."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from cudnn_actor.protocol import (
    AdaptiveWindow,
    ArgReduction,
    Attention,
    AttentionBackward,
    AvgPool,
    AvgPoolBackward,
    BatchNormBackward,
    BatchNormTraining,
    BufferRef,
    Cumulative,
    DType,
    GroupedMatMul,
    GroupedMatMulBackwardWeights,
    GroupNorm,
    GroupNormBackward,
    InstanceNorm,
    InstanceNormBackward,
    LayerNorm,
    LayerNormBackward,
    LocalResponseNorm,
    LocalResponseNormBackward,
    LpPool,
    LpPoolBackward,
    MatMul,
    MaxPool,
    MaxPoolBackward,
    Reduction,
    ReductionMode,
    RMSNorm,
    RMSNormBackward,
    Softmax,
    SoftmaxBackward,
    TensorSpec,
    Window,
    alibi_slopes,
)

from ..problems import normal
from ..references import assert_close
from ..workbench import Workbench

torch = pytest.importorskip("torch")
F = torch.nn.functional
POOLS: dict[str, tuple[tuple[int, ...], dict[str, int]]] = {
    "line": ((2, 3, 12), {"size": 3, "pad": 1, "stride": 2}),
    "image": ((2, 3, 8, 7), {"size": 3, "pad": 1, "stride": 2}),
    "overlapping": ((1, 2, 6, 6), {"size": 2, "pad": 1, "stride": 1}),
    "volume": ((1, 2, 5, 4, 6), {"size": 2, "stride": 2}),
}
each_pool = pytest.mark.parametrize(("dims", "options"), POOLS.values(), ids=POOLS)


@pytest.fixture(scope="module", autouse=True)
def autograd_is_running() -> None:
    """Its first use opens descriptors that stay open, for each GPU: an engine must not be blamed for them."""
    torch.ones(1, requires_grad=True).sum().backward()


def place(bench: Workbench, array: Any) -> BufferRef:
    return bench.place(np.ascontiguousarray(array))


def empty(bench: Workbench, dims: Any, dtype: DType = DType.FLOAT64) -> BufferRef:
    return bench.empty(TensorSpec.packed(tuple(dims), dtype))


def leaf(dims: tuple[int, ...], seed: int) -> Any:
    return torch.from_numpy(normal(dims, DType.FLOAT64, seed)).requires_grad_()


def close(bench: Workbench, refs: Mapping[str, BufferRef], wanted: Mapping[str, Any]) -> None:
    for name, ref in refs.items():
        assert_close(bench.read(ref), wanted[name].detach().numpy())


@each_pool
@pytest.mark.parametrize("dilation", [1, 2])
def test_max_pooling(bench: Workbench, dims: tuple[int, ...], options: dict[str, int], dilation: int) -> None:
    window = Window.symmetric(len(dims) - 2, **options, dilation=dilation)
    x = leaf(dims, 0)
    function = getattr(F, f"max_pool{len(dims) - 2}d")
    wanted, places = function(
        x, options["size"], options["stride"], options.get("pad", 0), dilation, return_indices=True
    )
    dy = normal(tuple(wanted.shape), DType.FLOAT64, 1)
    wanted.backward(torch.from_numpy(dy))
    y, index = empty(bench, wanted.shape), empty(bench, wanted.shape, DType.INT64)
    bench.run(MaxPool(x=place(bench, x.detach().numpy()), y=y, index=index, window=window))
    np.testing.assert_array_equal(bench.read(y), wanted.detach().numpy())
    # PyTorch counts in each plane.
    np.testing.assert_array_equal(bench.read(index) % math.prod(dims[2:]), places.numpy())
    dx = empty(bench, dims)
    bench.run(MaxPoolBackward(dy=place(bench, dy), index=index, dx=dx, window=window))
    close(bench, {"dx": dx}, {"dx": x.grad})


@each_pool
@pytest.mark.parametrize("include_padding", [False, True])
def test_average_pooling(
    bench: Workbench, dims: tuple[int, ...], options: dict[str, int], include_padding: bool
) -> None:
    window = Window.symmetric(len(dims) - 2, **options)
    x = leaf(dims, 0)
    function = getattr(F, f"avg_pool{len(dims) - 2}d")
    wanted = function(
        x,
        options["size"],
        options["stride"],
        options.get("pad", 0),
        count_include_pad=include_padding,
    )
    dy = normal(tuple(wanted.shape), DType.FLOAT64, 1)
    wanted.backward(torch.from_numpy(dy))
    common: Any = {"window": window, "include_padding": include_padding}
    y, dx = empty(bench, wanted.shape), empty(bench, dims)
    bench.run(AvgPool(x=place(bench, x.detach().numpy()), y=y, **common))
    bench.run(AvgPoolBackward(dy=place(bench, dy), dx=dx, **common))
    close(bench, {"y": y, "dx": dx}, {"y": wanted, "dx": x.grad})


@pytest.mark.parametrize(
    ("dims", "output"),
    [((2, 3, 11), (4,)), ((2, 3, 8, 7), (3, 5)), ((1, 2, 3, 4), (5, 7)), ((1, 2, 5, 4, 6), (2, 1, 6))],
)
def test_adaptive_pooling(bench: Workbench, dims: tuple[int, ...], output: tuple[int, ...]) -> None:
    window, rank = AdaptiveWindow(output=output), len(output)
    given, dy = leaf(dims, 0), normal((*dims[:2], *output), DType.FLOAT64, 1)
    x, slopes = place(bench, given.detach().numpy()), place(bench, dy)
    y, dx = empty(bench, dy.shape), empty(bench, dims)

    wanted = getattr(F, f"adaptive_avg_pool{rank}d")(given, output)
    wanted.backward(torch.from_numpy(dy))
    bench.run(AvgPool(x=x, y=y, window=window))
    bench.run(AvgPoolBackward(dy=slopes, dx=dx, window=window))
    close(bench, {"y": y, "dx": dx}, {"y": wanted, "dx": given.grad})

    given.grad = None
    wanted, places = getattr(F, f"adaptive_max_pool{rank}d")(given, output, return_indices=True)
    wanted.backward(torch.from_numpy(dy))
    index = empty(bench, dy.shape, DType.INT64)
    bench.run(MaxPool(x=x, y=y, index=index, window=window))
    np.testing.assert_array_equal(bench.read(index) % math.prod(dims[2:]), places.numpy())
    bench.run(MaxPoolBackward(dy=slopes, index=index, dx=dx, window=window))
    close(bench, {"y": y, "dx": dx}, {"y": wanted, "dx": given.grad})


@pytest.mark.parametrize("p", [1.0, 2.0, 4.0])
def test_lp_pooling(bench: Workbench, p: float) -> None:
    """Of positive numbers: where p is odd, PyTorch adds up signed powers."""
    dims, window = (2, 3, 8, 7), Window.symmetric(2, size=(3, 2), stride=2)
    x = torch.from_numpy(np.abs(normal(dims, DType.FLOAT64, 0)) + 0.1).requires_grad_()
    wanted = F.lp_pool2d(x, p, (3, 2), 2)
    dy = normal(tuple(wanted.shape), DType.FLOAT64, 1)
    wanted.backward(torch.from_numpy(dy))
    y, dx, given = empty(bench, wanted.shape), empty(bench, dims), place(bench, x.detach().numpy())
    bench.run(LpPool(x=given, y=y, window=window, p=p))
    bench.run(LpPoolBackward(dy=place(bench, dy), x=given, y=y, dx=dx, window=window, p=p))
    close(bench, {"y": y, "dx": dx}, {"y": wanted, "dx": x.grad})


def test_grouped_products(bench: Workbench) -> None:
    """Each group by itself."""
    tokens, weights = leaf((9, 6), 0), leaf((4, 6, 5), 1)
    offsets = [2, 5, 5, 8]
    groups = zip([0, *offsets], offsets, weights, strict=False)
    wanted = torch.cat([*(tokens[start:end] @ w for start, end, w in groups), torch.zeros(1, 5)])
    dy = normal((9, 5), DType.FLOAT64, 2)
    wanted.backward(torch.from_numpy(dy))
    given = [place(bench, each.detach().numpy()) for each in (tokens, weights)]
    ends, y = place(bench, np.array(offsets, np.int32)), empty(bench, (9, 5))
    bench.run(GroupedMatMul(tokens=given[0], weights=given[1], offsets=ends, y=y))
    dweights, dtokens = empty(bench, (4, 6, 5)), empty(bench, (9, 6))
    slopes, turned = place(bench, dy), place(bench, weights.detach().numpy().transpose(0, 2, 1))
    bench.run(GroupedMatMulBackwardWeights(tokens=given[0], dy=slopes, offsets=ends, dweights=dweights))
    bench.run(GroupedMatMul(tokens=slopes, weights=turned, offsets=ends, y=dtokens))
    found = {"y": y, "dtokens": dtokens, "dweights": dweights}
    close(bench, found, {"y": wanted, "dtokens": tokens.grad, "dweights": weights.grad})


@pytest.mark.parametrize(("dims", "axis"), [((6, 10), -1), ((2, 3, 4, 5), 2), ((3, 1, 97), 1)])
def test_norms(bench: Workbench, dims: tuple[int, ...], axis: int) -> None:
    row = dims[axis:]
    x, scale, bias = leaf(dims, 0), leaf(row, 1), leaf(row, 2)
    dy = normal(dims, DType.FLOAT64, 3)
    refs: dict[str, Any] = {
        name: place(bench, t.detach().numpy()) for name, t in (("x", x), ("scale", scale))
    }
    statistics = (*dims[: len(dims) - len(row)], *[1] * len(row))
    common: Any = {"axis": axis}

    wanted = F.layer_norm(x, row, scale, bias, 1e-5)
    wanted.backward(torch.from_numpy(dy))
    y, mean, inverse = empty(bench, dims), empty(bench, statistics), empty(bench, statistics)
    kept: dict[str, Any] = {"mean": mean, "inverse_deviation": inverse}
    bench.run(LayerNorm(**refs, bias=place(bench, bias.detach().numpy()), y=y, **kept, **common))
    outputs: dict[str, Any] = {
        "dx": empty(bench, dims),
        "dscale": empty(bench, row),
        "dbias": empty(bench, row),
    }
    bench.run(LayerNormBackward(dy=place(bench, dy), **refs, **kept, **outputs, **common))
    close(bench, {"y": y, **outputs}, {"y": wanted, "dx": x.grad, "dscale": scale.grad, "dbias": bias.grad})

    x.grad = scale.grad = None
    wanted = F.rms_norm(x, row, scale, 1e-5)
    wanted.backward(torch.from_numpy(dy))
    bench.run(RMSNorm(**refs, y=y, inverse_rms=mean, **common))
    outputs = {"dx": empty(bench, dims), "dscale": empty(bench, row)}
    bench.run(RMSNormBackward(dy=place(bench, dy), **refs, inverse_rms=mean, **outputs, **common))
    close(bench, {"y": y, **outputs}, {"y": wanted, "dx": x.grad, "dscale": scale.grad})


@pytest.mark.parametrize("dims", [(5, 6), (3, 6, 4), (2, 6, 3, 4)])
@pytest.mark.parametrize("kind", ["batch", "instance", "group"])
def test_norms_of_channels(bench: Workbench, kind: str, dims: tuple[int, ...]) -> None:
    if kind == "instance" and len(dims) == 2:
        pytest.skip("PyTorch has no instance norm of one element")
    vectors = [leaf(dims[1:2], n) for n in range(1, 5)]
    x, (scale, bias, mean, variance) = leaf(dims, 0), vectors
    old = [place(bench, each.detach().numpy()) for each in (mean, variance)]
    running = [each.detach().clone() for each in (mean, variance)]
    given: Any = {
        n: place(bench, t.detach().numpy()) for n, t in (("x", x), ("scale", scale), ("bias", bias))
    }
    new = {f"new_running_{name}": empty(bench, dims[1:2]) for name in ("mean", "variance")}
    groups: Any = {}
    forward: Any
    backward: Any
    kept: tuple[int, ...]
    if kind == "batch":
        wanted = F.batch_norm(x, *running, scale, bias, True, 0.3)
        given |= {"running_mean": old[0], "running_variance": old[1], "momentum": 0.3, **new}
        forward, backward, kept = BatchNormTraining, BatchNormBackward, dims[1:2]
    elif kind == "instance":
        wanted = F.instance_norm(x, weight=scale, bias=bias)
        forward, backward, kept = InstanceNorm, InstanceNormBackward, dims[:2]
    else:
        wanted, groups = F.group_norm(x, 3, scale, bias), {"groups": 3}
        forward, backward, kept = GroupNorm, GroupNormBackward, (dims[0], 3)
    dy = normal(dims, DType.FLOAT64, 9)
    wanted.backward(torch.from_numpy(dy))
    y = empty(bench, dims)
    statistics: Any = {name: empty(bench, kept) for name in ("mean", "inverse_deviation")}
    bench.run(forward(**given, y=y, **statistics, **groups))
    outputs: Any = {"dx": empty(bench, dims)} | {n: empty(bench, dims[1:2]) for n in ("dscale", "dbias")}
    of_x: Any = {name: given[name] for name in ("x", "scale")}
    bench.run(backward(dy=place(bench, dy), **of_x, **statistics, **outputs, **groups))
    close(bench, {"y": y, **outputs}, {"y": wanted, "dx": x.grad, "dscale": scale.grad, "dbias": bias.grad})
    if kind == "batch":
        close(bench, new, dict(zip(new, running, strict=True)))


@pytest.mark.parametrize("dims", [(2, 7, 3), (2, 7, 3, 4)])
@pytest.mark.parametrize("size", [1, 3, 5])
def test_local_responses(bench: Workbench, size: int, dims: tuple[int, ...]) -> None:
    x, dy = leaf(dims, 0), normal(dims, DType.FLOAT64, 1)
    wanted = F.local_response_norm(x, size, 0.5, 0.6, 1.5)
    wanted.backward(torch.from_numpy(dy))
    y, dx = empty(bench, dims), empty(bench, dims)
    parameters: Any = {"size": size, "alpha": 0.5, "beta": 0.6, "bias": 1.5}
    ref = place(bench, x.detach().numpy())
    bench.run(LocalResponseNorm(x=ref, y=y, **parameters))
    bench.run(LocalResponseNormBackward(dy=place(bench, dy), x=ref, dx=dx, **parameters))
    close(bench, {"y": y, "dx": dx}, {"y": wanted, "dx": x.grad})


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_attention(bench: Workbench, causal: bool, biased: bool, groups: int) -> None:
    if causal and biased:
        pytest.skip("PyTorch takes one of both")
    of_q, of_k = (2, 4, 9, 8), (2, groups, 13, 8)
    q, k, v = leaf(of_q, 0), leaf(of_k, 1), leaf(of_k, 2)
    bias = leaf((1, 4, 9, 13), 3) if biased else None
    wanted = F.scaled_dot_product_attention(
        q, k, v, bias, is_causal=causal, scale=0.4, enable_gqa=groups != 4
    )
    dy = normal(of_q, DType.FLOAT64, 4)
    wanted.backward(torch.from_numpy(dy))
    leaves = {"q": q, "k": k, "v": v, **({} if bias is None else {"bias": bias})}
    refs: dict[str, Any] = {name: place(bench, t.detach().numpy()) for name, t in leaves.items()}
    common: Any = {**refs, "causal": causal, "scale": 0.4}
    y, statistics = empty(bench, of_q), empty(bench, (*of_q[:3], 1))
    bench.run(Attention(**common, y=y, statistics=statistics))
    outputs: dict[str, Any] = {f"d{name}": empty(bench, ref.spec.dims) for name, ref in refs.items()}
    bench.run(AttentionBackward(**common, dy=place(bench, dy), y=y, statistics=statistics, **outputs))
    close(bench, {"y": y, **outputs}, {"y": wanted, **{f"d{name}": t.grad for name, t in leaves.items()}})


SEEN: dict[str, dict[str, Any]] = {
    "window": {"window_left": 2, "window_right": 4},
    "causal window": {"window_left": 3, "causal": True},
    "alibi": {"slopes": alibi_slopes(4)},
    "other slopes in a window": {"slopes": (0.3, 0.0, -0.1, 1.0), "window_left": 5},
    "lengths": {},
}


def mask_of(options: Mapping[str, Any], rows: int, columns: int) -> Any:
    """What PyTorch adds to the scores in the place of windows and slopes."""
    apart = torch.arange(columns) - torch.arange(rows)[:, None]
    right = 0 if options.get("causal") else options.get("window_right", columns)
    seen = (apart <= right) & (-apart <= options.get("window_left", rows))
    slopes = torch.tensor(options.get("slopes", (0.0,)), dtype=torch.float64)[:, None, None]
    return torch.where(seen, -slopes * apart.abs(), -math.inf)


@pytest.mark.parametrize("options", SEEN.values(), ids=SEEN)
def test_attention_to_what_is_seen(bench: Workbench, options: dict[str, Any]) -> None:
    of_q, of_k = (2, 4, 9, 8), (2, 2, 11, 8)
    q, k, v = leaf(of_q, 0), leaf(of_k, 1), leaf(of_k, 2)
    mask, lengths = mask_of(options, 9, 11)[None], {}
    if not options:
        given = {"lengths_kv": np.array([4, 11], np.int32)}
        mask = torch.where(torch.arange(11) < torch.tensor([4, 11])[:, None, None, None], 0.0, -math.inf)
        lengths = {name: place(bench, array) for name, array in given.items()}
    wanted = F.scaled_dot_product_attention(q, k, v, mask.to(torch.float64), enable_gqa=True)
    dy = normal(of_q, DType.FLOAT64, 4)
    wanted.backward(torch.from_numpy(dy))
    leaves = {"q": q, "k": k, "v": v}
    refs: dict[str, Any] = {name: place(bench, t.detach().numpy()) for name, t in leaves.items()}
    common: Any = {**refs, **lengths, **options}
    y, statistics = empty(bench, of_q), empty(bench, (*of_q[:3], 1))
    bench.run(Attention(**common, y=y, statistics=statistics))
    outputs: dict[str, Any] = {f"d{name}": empty(bench, ref.spec.dims) for name, ref in refs.items()}
    bench.run(AttentionBackward(**common, dy=place(bench, dy), y=y, statistics=statistics, **outputs))
    close(bench, {"y": y, **outputs}, {"y": wanted, **{f"d{name}": t.grad for name, t in leaves.items()}})


@pytest.mark.parametrize(
    ("of_a", "of_b"),
    [((5, 7), (7, 3)), ((2, 3, 5, 7), (7, 4)), ((5, 7), (3, 7, 4)), ((2, 1, 5, 7), (3, 7, 4))],
)
def test_products(bench: Workbench, of_a: tuple[int, ...], of_b: tuple[int, ...]) -> None:
    a, b = leaf(of_a, 0), leaf(of_b, 1)
    wanted = torch.matmul(a, b)
    refs = [place(bench, each.detach().numpy()) for each in (a, b)]
    y = empty(bench, wanted.shape)
    bench.run(MatMul(a=refs[0], b=refs[1], y=y))
    close(bench, {"y": y}, {"y": wanted})


REDUCTIONS = {
    ReductionMode.SUM: torch.sum,
    ReductionMode.MIN: torch.amin,
    ReductionMode.MAX: torch.amax,
    ReductionMode.MEAN: torch.mean,
    ReductionMode.L1: lambda x, axes: torch.linalg.vector_norm(x, 1, axes),
    ReductionMode.L2: lambda x, axes: torch.linalg.vector_norm(x, 2, axes),
    ReductionMode.LOG_SUM_EXP: torch.logsumexp,
}


@pytest.mark.parametrize("mode", REDUCTIONS)
@pytest.mark.parametrize("axes", [(-1,), (0, 2), (0, 1, 2)])
def test_reductions(bench: Workbench, mode: ReductionMode, axes: tuple[int, ...]) -> None:
    x = leaf((3, 8, 5), 0).detach()
    with_specials = x.clone()
    with_specials[0, 1, 2], with_specials[1, 3], with_specials[2, 7] = math.nan, -math.inf, math.inf
    for given in (x, with_specials):
        wanted = REDUCTIONS[mode](given, axes).numpy()
        y = empty(bench, wanted.shape)
        bench.run(Reduction(x=place(bench, given.numpy()), y=y, mode=mode, axes=axes))
        np.testing.assert_allclose(bench.read(y), wanted, rtol=1e-12)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_running_sums_and_places(bench: Workbench, axis: int) -> None:
    x = leaf((3, 8, 5), 0).detach()
    given = place(bench, x.numpy())
    for mode, cumulative in ((ReductionMode.SUM, torch.cumsum), (ReductionMode.PRODUCT, torch.cumprod)):
        y = empty(bench, x.shape)
        bench.run(Cumulative(x=given, y=y, mode=mode, axis=axis))
        np.testing.assert_allclose(bench.read(y), cumulative(x, axis).numpy(), rtol=1e-12)
    for mode, find in ((ReductionMode.MAX, torch.argmax), (ReductionMode.MIN, torch.argmin)):
        wanted = find(x, axis, keepdim=True).numpy()
        places = empty(bench, wanted.shape, DType.INT64)
        bench.run(ArgReduction(x=given, y=places, mode=mode, axis=axis, keep_dims=True))
        np.testing.assert_array_equal(bench.read(places), wanted)


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_softmax(bench: Workbench, log: bool, axis: int) -> None:
    x = leaf((3, 8, 5), 0)
    function = torch.log_softmax if log else torch.softmax
    wanted = function(x, axis)
    dy = normal((3, 8, 5), DType.FLOAT64, 1)
    wanted.backward(torch.from_numpy(dy))
    y, dx = empty(bench, x.shape), empty(bench, x.shape)
    bench.run(Softmax(x=place(bench, x.detach().numpy()), y=y, axis=axis, log=log))
    bench.run(SoftmaxBackward(dy=place(bench, dy), y=y, dx=dx, axis=axis, log=log))
    close(bench, {"y": y, "dx": dx}, {"y": wanted, "dx": x.grad})


@pytest.mark.parametrize("log", [False, True])
def test_softmax_of_infinity_and_nan(bench: Workbench, log: bool) -> None:
    inf, nan = math.inf, math.nan
    rows = [[-inf] * 3, [-inf, 0, 1], [inf, 0, 1], [nan, 0, 1], [inf, -inf, 0]]
    x = torch.tensor(rows, dtype=torch.float64)
    y = empty(bench, x.shape)
    bench.run(Softmax(x=place(bench, x.numpy()), y=y, log=log))
    wanted = (torch.log_softmax if log else torch.softmax)(x, -1)
    np.testing.assert_allclose(bench.read(y), wanted.numpy(), rtol=1e-12)
