"""Functions of a graph builder against PyTorch's on the CPU, in float64, each in at least 40 forms."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from cudnn_actor.protocol import DType, GraphBuilder

from ...protocol.test_graph_functions import computed
from ..differences import computed as of_graph
from ..problems import normal

torch = pytest.importorskip("torch")
F = torch.nn.functional
FORMS = 40
IMAGES: list[tuple[tuple[int, ...], Any]] = [
    *(((2, 3, 7, 6), (3, 2)), ((1, 2, 8, 9), (2, 2)), ((2, 1, 5, 5), (1, 3)), ((3, 2, 1, 9), (1, 4)))
]
"""Dims, and the size of a block."""


def drawn(dims: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.asarray(normal(dims, DType.FLOAT64, seed))


def close(got: np.ndarray, wanted: Any) -> None:
    np.testing.assert_allclose(got, wanted.detach().numpy(), rtol=1e-10, atol=1e-11)


def of(*arrays: np.ndarray) -> list[Any]:
    return [torch.from_numpy(array).requires_grad_() for array in arrays]


def block_forms() -> Iterator[tuple[tuple[int, ...], Any, int, int, int]]:
    for (dims, size), pad, stride, dilation in itertools.product(IMAGES, (0, 1, 2), (1, 2, 3), (1, 2)):
        spans = [(n - 1) * dilation + 1 for n in size]
        if all(span <= n + 2 * pad for span, n in zip(spans, dims[2:], strict=True)):
            yield dims, size, pad, stride, dilation


def test_columns_and_their_sums() -> None:
    forms = list(block_forms())
    assert len(forms) >= FORMS
    for dims, size, pad, stride, dilation in forms:
        x, options = drawn(dims), {"pad": pad, "stride": stride, "dilation": dilation}
        wanted = F.unfold(torch.from_numpy(x), size, dilation, pad, stride)
        close(computed(lambda g, x, s=size, o=options: g.unfold(x, s, **o), x), wanted)
        columns = drawn(tuple(wanted.shape), 1)
        wanted = F.fold(torch.from_numpy(columns), dims[2:], size, dilation, pad, stride)
        close(computed(lambda g, c, d=dims, s=size, o=options: g.fold(c, d[2:], s, **o), columns), wanted)


def test_transposed_convolutions() -> None:
    forms = [
        (rank, pad, stride, dilation, groups, extra)
        for rank, pad, stride, dilation, groups in itertools.product(
            (1, 2, 3), (0, 1), (1, 2, 3), (1, 2), (1, 2)
        )
        for extra in range(min(stride, 2))
    ]
    assert len(forms) >= FORMS
    for rank, pad, stride, dilation, groups, extra in forms:
        x, w = drawn((2, 4, *(4, 3, 5)[:rank])), drawn((4, 3, *(3, 2, 3)[:rank]), 1)
        bias = drawn((3 * groups,), 2)
        function = getattr(F, f"conv_transpose{rank}d")
        wanted = function(*of(x, w, bias), stride, pad, extra, groups, dilation)
        options: dict[str, Any] = {"pad": pad, "stride": stride, "dilation": dilation, "groups": groups}
        got = computed(
            lambda g, x, w, b, o=options, e=extra: g.conv_transpose(x, w, bias=b, output_pad=e, **o),
            x,
            w,
            bias,
        )
        close(got, wanted)
        flipped = tuple(range(2, 2 + rank))
        got = computed(
            lambda g, x, w, b, o=options, e=extra: g.conv_transpose(
                x, w, bias=b, output_pad=e, flipped=True, **o
            ),
            *(x, np.flip(w, flipped), bias),
        )
        close(got, wanted)


@pytest.mark.filterwarnings("ignore:Since version 1.3.0, affine_grid behavior")
def test_affine_places() -> None:
    sizes = [*itertools.product((1, 2, 3, 5), (1, 2, 4, 7)), *itertools.product((1, 3), (1, 2), (1, 4))]
    forms = list(itertools.product(sizes, (False, True)))
    assert len(forms) >= FORMS
    for number, (spatial, aligned) in enumerate(forms):
        dims, rank = (2, 3, *spatial), len(spatial)
        theta = drawn((2, rank, rank + 1), number)
        wanted = F.affine_grid(torch.from_numpy(theta), dims, align_corners=aligned)
        close(computed(lambda g, t, d=dims, a=aligned: g.affine_grid(t, d, align_corners=a), theta), wanted)


def test_divisive_norms() -> None:
    """PyTorch has none: it has the means of squares that they divide by."""
    forms = list(itertools.product(range(1, 6), range(1, 4), (0.5, 0.75, 1.0)))
    assert len(forms) >= FORMS
    for size, rank, beta in forms:
        x = drawn((2, 2, *(7, 5, 6)[:rank]))
        padded = F.pad(torch.from_numpy(x**2), [(size - 1) // 2, size // 2] * rank)
        mean = getattr(F, f"avg_pool{rank}d")(padded, size, 1)
        wanted = torch.from_numpy(x) / (2 + 0.5 * mean) ** beta
        options = {"alpha": 0.5, "beta": beta, "bias": 2.0}
        close(computed(lambda g, x, s=size, o=options: g.divisive_norm(x, s, **o), x), wanted)


def test_batch_norms_of_each_activation() -> None:
    forms = list(itertools.product((2, 5), (1, 3), ((), (4,), (2, 3)), (1e-5, 0.1), (False, True)))
    assert len(forms) >= FORMS
    for samples, channels, spatial, epsilon, training in forms:
        sample = (channels, *spatial)
        x, scale, bias, mean = (drawn((samples, *sample)), *(drawn(sample, n) for n in (1, 2, 3)))
        variance = mean**2 + 0.5
        rows = [torch.from_numpy(one.copy().reshape(-1)) for one in (mean, variance, scale, bias)]
        wanted = F.batch_norm(torch.from_numpy(x.reshape(samples, -1)), *rows, training, 0.2, epsilon)
        if not training:
            got = computed(
                lambda g, x, *of, e=epsilon: g.batch_norm(x, *of, epsilon=e, per_activation=True),
                *(x, mean, variance, scale, bias),
            )
            close(got, wanted.reshape(x.shape))
            continue
        for place, value in enumerate((wanted, rows[0], rows[1])):
            got = computed(
                lambda g, x, *of, e=epsilon, n=place: g.batch_norm_training(
                    x, *of, epsilon=e, momentum=0.2, per_activation=True
                )[n],
                *(x, scale, bias, mean, variance),
            )
            close(got, value.reshape(got.shape))


ACTIVATIONS: list[tuple[str, dict[str, float], Any]] = [
    ("relu", {}, F.relu),
    *(("relu", {"parameter": p}, lambda x, p=p: F.leaky_relu(x, p)) for p in (0.1, 0.5, 1.5)),
    *(("relu", {"lower": 0.0, "upper": p}, lambda x, p=p: F.hardtanh(x, 0, p)) for p in (1.0, 6.0)),
    ("tanh", {}, torch.tanh),
    ("sigmoid", {}, torch.sigmoid),
    *(("elu", {"parameter": p}, lambda x, p=p: F.elu(x, p)) for p in (0.5, 1.0, 2.0)),
    ("gelu", {}, F.gelu),
    ("gelu_tanh", {}, lambda x: F.gelu(x, approximate="tanh")),
    *(("softplus", {"parameter": p}, lambda x, p=p: F.softplus(x, p, 1e9)) for p in (0.5, 1.0, 3.0)),
    *(("swish", {"parameter": p}, lambda x, p=p: x * torch.sigmoid(p * x)) for p in (0.5, 1.0, 1.7)),
    *(("mish", {}, F.mish), ("selu", {}, F.selu), ("softsign", {}, F.softsign)),
    *(("hard_swish", {}, F.hardswish), ("erf", {}, torch.erf)),
    *((name, {}, getattr(torch, name)) for name in ("exp", "sin", "cos", "square", "abs")),
]


def test_backward_functions_of_elements() -> None:
    scales = (0.3, 3.0)
    assert len(ACTIVATIONS) * len(scales) >= FORMS
    for (mode, options, function), scale in itertools.product(ACTIVATIONS, scales):
        dy, (x,) = drawn((5, 7), 1), of(drawn((5, 7)) * scale)
        function(x).backward(torch.from_numpy(dy))
        got = computed(
            lambda g, dy, x, m=mode, o=options: g.pointwise_backward(m, dy, x, **o), dy, x.detach().numpy()
        )
        close(got, x.grad)


def test_backward_functions_of_poolings() -> None:
    """Of whole numbers, so that there are ties: PyTorch on the CPU takes the first of a window, too."""
    forms = [
        (dims, size, pad, stride, dilation, kind)
        for dims, size, pad, stride, dilation, kind in itertools.product(
            ((2, 3, 9), (2, 2, 7, 6), (1, 2, 5, 4, 6)), (2, 3), (0, 1), (1, 2), (1, 2), ("max", "avg")
        )
        if (dilation == 1 or kind == "max") and (size - 1) * dilation < min(dims[2:]) + 2 * pad
    ]
    assert len(forms) >= FORMS
    for dims, size, pad, stride, dilation, kind in forms:
        (x,) = of(np.round(drawn(dims)))
        given = (x, size, stride, pad, *((dilation,) if kind == "max" else (False, False)))
        y = getattr(F, f"{kind}_pool{len(dims) - 2}d")(*given)
        dy = drawn(tuple(y.shape), 1)
        y.backward(torch.from_numpy(dy))
        options: dict[str, Any] = {"pad": pad, "stride": stride}
        options |= {"dilation": dilation} if kind == "max" else {}
        got = computed(
            lambda g, dy, x, k=kind, s=size, o=options: getattr(g, f"{k}_pool_backward")(dy, x, s, **o),
            *(dy, x.detach().numpy()),
        )
        close(got, x.grad)


def test_recurrent_networks() -> None:
    """Layers of them, with their states, and the gradients of everything."""
    forms: list[Any] = [
        (mode, *rest)
        for mode, *rest in itertools.product(
            ("lstm", "gru", "tanh", "relu"), (1, 2), (False, True), (None, (4, 1, 3)), (False, True), (0, 3)
        )
        if mode == "lstm" or not rest[-1]
    ]
    assert len(forms) >= FORMS
    for mode, layers, both, lengths, biased, size in forms:
        kind = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU}.get(mode, torch.nn.RNN)
        how: dict[str, Any] = {"bidirectional": both, "bias": biased, "num_layers": layers}
        how |= {"proj_size": size} if size else {}
        how |= {"nonlinearity": mode} if kind is torch.nn.RNN else {}
        module = kind(4, 5, **how).double()
        count = layers * (1 + both)
        given = {"x": drawn((4, 3, 4)), "h0": drawn((count, 3, size or 5), 1)}
        given |= {"c0": drawn((count, 3, 5), 2)} if mode == "lstm" else {}
        x, *states = of(*given.values())
        packed = (
            x
            if lengths is None
            else torch.nn.utils.rnn.pack_padded_sequence(x, lengths, enforce_sorted=False)
        )
        y, ends = module(packed, tuple(states) if mode == "lstm" else states[0])
        if lengths is not None:
            y = torch.nn.utils.rnn.pad_packed_sequence(y, total_length=4)[0]
        wanted = [y, *(ends if mode == "lstm" else (ends,))]
        slopes = [drawn(tuple(each.shape), 9 + n) for n, each in enumerate(wanted)]
        sum(
            (each * torch.from_numpy(slope)).sum() for each, slope in zip(wanted, slopes, strict=True)
        ).backward()
        weights = dict(module.named_parameters())
        given |= {name: weight.detach().numpy() for name, weight in weights.items()}
        g = GraphBuilder()
        inputs = {name: g.input(name, array.shape, "float64") for name, array in given.items()}
        groups = [[inputs[name] for name in own] for own in module._all_weights]
        first = [inputs[name] for name in ("x", "h0", "c0") if name in given]
        options: dict[str, Any] = {"bidirectional": both, "lengths": lengths}
        options |= {"activation": mode} if kind is torch.nn.RNN else {}
        made = getattr(g, mode if mode in ("lstm", "gru") else "rnn")(first[0], groups, *first[1:], **options)
        upstream = [g.input(f"slope{n}", slope.shape, "float64") for n, slope in enumerate(slopes)]
        found = g.grad([*made], [*inputs.values()], upstream)
        outputs = {f"y{n}": each for n, each in enumerate(made)}
        outputs |= {f"d{name}": each for name, each in zip(inputs, found, strict=True)}
        values = given | {f"slope{n}": slope for n, slope in enumerate(slopes)}
        got = of_graph(g.build(outputs), values)
        for n, each in enumerate(wanted):
            close(got[f"y{n}"], each)
        for name, leaf in {**dict(zip(("x", "h0", "c0"), (x, *states), strict=False)), **weights}.items():
            close(got[f"d{name}"], leaf.grad)


def test_several_heads() -> None:
    """As modules have them, with the gradients of all inputs and weights."""
    flags = (False, True)
    forms: list[Any] = [*itertools.product((1, 4), flags, flags, flags, flags, flags, flags)]
    assert len(forms) >= FORMS
    for number, (heads, first, bias, extra, zero, cross, padded) in enumerate(forms):
        causal = padded
        features = {"kdim": 6, "vdim": 7} if cross else {}
        module = torch.nn.MultiheadAttention(
            8,
            heads,
            bias=bias,
            add_bias_kv=extra,
            add_zero_attn=zero,
            batch_first=first,
            dtype=torch.float64,
            **features,
        )
        weights = {name: drawn(tuple(of.shape), number) for name, of in module.named_parameters()}
        module.load_state_dict({name: torch.from_numpy(array) for name, array in weights.items()})
        sizes = {"query": (5, 8)} | ({"key": (7, 6), "value": (7, 7)} if cross else {})
        x = {
            name: drawn((3, rows, of) if first else (rows, 3, of), number)
            for name, (rows, of) in sizes.items()
        }
        keys = 7 if cross else 5
        lengths = np.array([keys, 3, 1], np.int32)
        tensors = of_names(x)
        wanted, _ = module(
            *(tensors.values() if cross else [tensors["query"]] * 3),
            attn_mask=torch.triu(torch.ones(5, keys, dtype=torch.bool), 1) if causal else None,
            key_padding_mask=torch.from_numpy(np.arange(keys) >= lengths[:, None]) if padded else None,
            need_weights=False,
        )
        wanted.backward(torch.ones_like(wanted))
        g = GraphBuilder()
        inputs: dict[str, Any] = {name: g.input(name, a.shape, "float64") for name, a in x.items()}
        named = {n: g.input(f"w{i}", a.shape, "float64") for i, (n, a) in enumerate(weights.items())}
        options: dict[str, Any] = {"lengths_kv": g.input("lengths", (3,), "int32")} if padded else {}
        y = g.multi_head_attention(
            **inputs, **options, weights=named, heads=heads, batch_first=first, causal=causal, zero_key=zero
        )
        found = g.grad([y], [*inputs.values(), *named.values()], [g.full(y.dims, 1.0, "float64")])
        graph = g.build({"y": y, **{f"d{i}": each for i, each in enumerate(found)}})
        values = {**x, **{f"w{i}": a for i, a in enumerate(weights.values())}}
        results = of_graph(graph, values | ({"lengths": lengths} if padded else {}))
        close(results["y"], wanted)
        for i, of in enumerate((*tensors.values(), *module.parameters())):
            close(results[f"d{i}"], of.grad)


def of_names(arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    return dict(zip(arrays, of(*arrays.values()), strict=True))
