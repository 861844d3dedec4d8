"""Recurrent layers, CTC losses and attention of several heads against PyTorch on the CPU, in float64, with
their gradients: each in at least 40 forms."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
import pytest

from cudnn_actor.protocol import DType, GraphBuilder, Tensor

from ..differences import computed
from ..problems import normal

torch = pytest.importorskip("torch")
FORMS = 40
FEATURES, HIDDEN, STEPS, BATCH = 3, 4, 5, 3
LENGTHS = (3, 5, 1)


def drawn(*dims: int, seed: int) -> np.ndarray:
    return np.asarray(normal(dims, DType.FLOAT64, seed) / 2)


def of(arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    return {name: torch.from_numpy(array.copy()).requires_grad_() for name, array in arrays.items()}


def check(
    g: GraphBuilder,
    given: dict[str, np.ndarray],
    outputs: Sequence[Tensor],
    *,
    wrt: dict[str, Tensor],
    wanted: Sequence[Any],
    leaves: dict[str, Any],
    what: object,
) -> None:
    """Compare outputs, and the gradients of their weighted sum by `wrt`, with PyTorch's of `leaves`."""
    slopes = [drawn(*each.dims, seed=900 + n) for n, each in enumerate(outputs)]
    upstream = [g.input(f"slope{n}", each.shape, "float64") for n, each in enumerate(slopes)]
    found = g.grad([*outputs], [*wrt.values()], upstream)
    named = {f"y{n}": each for n, each in enumerate(outputs)} | dict(
        zip((f"d_{name}" for name in wrt), found, strict=True)
    )
    got = computed(g.build(named), given | {f"slope{n}": each for n, each in enumerate(slopes)})
    sum((each * torch.from_numpy(slope)).sum() for each, slope in zip(wanted, slopes, strict=True)).backward()
    right = {f"y{n}": each.detach() for n, each in enumerate(wanted)}
    right |= {f"d_{name}": leaves[name].grad for name in wrt}
    for name, array in right.items():
        np.testing.assert_allclose(got[name], array.numpy(), rtol=1e-9, atol=1e-11, err_msg=f"{name}, {what}")


# Recurrent layers.


Layers = tuple[str, int, int, bool, int]


def layer_forms() -> Iterator[Layers]:
    """A mode, layers, directions, whether sequences end early, and elements of a projected state or 0."""
    for mode, layers, ways, end in itertools.product(
        ("lstm", "gru", "tanh", "relu"), (1, 2), (1, 2), (False, True)
    ):
        yield mode, layers, ways, end, 0
        if mode == "lstm":
            yield mode, layers, ways, end, 2


def torch_layers(form: Layers, x: np.ndarray, states: dict[str, np.ndarray]) -> tuple[Any, list[Any], Any]:
    """A module, its outputs, and the leaves: the input, the states and the weights by their names."""
    mode, layers, ways, end, size = form
    kind = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU}.get(mode, torch.nn.RNN)
    how: dict[str, Any] = {"num_layers": layers, "bidirectional": ways == 2, "dtype": torch.float64}
    if mode in ("tanh", "relu"):
        how["nonlinearity"] = mode
    if size:
        how["proj_size"] = size
    module = kind(FEATURES, HIDDEN, **how)
    leaves = of({"x": x, **states})
    state = tuple(leaves[name] for name in states) if mode == "lstm" else leaves["h0"]
    read = leaves["x"]
    if end:
        read = torch.nn.utils.rnn.pack_padded_sequence(read, torch.tensor(LENGTHS), enforce_sorted=False)
    y, last = module(read, state)
    if end:
        y, _ = torch.nn.utils.rnn.pad_packed_sequence(y, total_length=STEPS)
    outputs = [y, *(last if mode == "lstm" else (last,))]
    return module, outputs, leaves | dict(module.named_parameters())


def test_recurrent_layers() -> None:
    forms = list(layer_forms())
    assert len(forms) >= FORMS
    for form in forms:
        mode, layers, ways, end, size = form
        x = drawn(STEPS, BATCH, FEATURES, seed=1)
        states = {"h0": drawn(layers * ways, BATCH, size or HIDDEN, seed=2)}
        if mode == "lstm":
            states["c0"] = drawn(layers * ways, BATCH, HIDDEN, seed=3)
        module, wanted, leaves = torch_layers(form, x, states)
        weights = {name: each.detach().numpy().copy() for name, each in module.named_parameters()}
        g = GraphBuilder()
        given = {"x": x, **states, **weights}
        inputs = {name: g.input(name, array.shape, "float64") for name, array in given.items()}
        own, count = [inputs[name] for name in weights], len(weights) // (layers * ways)
        groups = [own[at : at + count] for at in range(0, len(own), count)]
        function: Any = {"lstm": g.lstm, "gru": g.gru}.get(mode, g.rnn)
        how: dict[str, Any] = {"activation": mode} if mode in ("tanh", "relu") else {}
        made = function(
            inputs["x"],
            groups,
            *(inputs[name] for name in states),
            bidirectional=ways == 2,
            lengths=LENGTHS if end else None,
            **how,
        )
        check(g, given, [*made], wrt=inputs, wanted=wanted, leaves=leaves, what=form)


# CTC.


def test_ctc_losses() -> None:
    """Of scores behind a log-softmax: PyTorch gives the derivative by those."""
    reductions: tuple[Literal["mean", "sum", "none"], ...] = ("mean", "sum", "none")
    forms = list(itertools.product((1, 4, 12), (0, 2), (False, True), reductions, (0, 1, 3)))
    assert len(forms) >= FORMS
    for number, (frames, blank, zero_infinity, reduction, most) in enumerate(forms):
        batch, classes = 3, 4
        draw = np.random.default_rng(number)
        x = drawn(frames, batch, classes, seed=number)
        labels = draw.choice([n for n in range(classes) if n != blank], (batch, max(most, 1)))
        ends = np.minimum(draw.integers(0, most + 1, batch), frames)  # else an alignment may not exist
        used = (
            np.full(batch, frames) if zero_infinity else np.array([frames, *draw.integers(1, frames + 1, 2)])
        )
        repeats = [
            sum(a == b for a, b in itertools.pairwise(row[:n])) for row, n in zip(labels, ends, strict=True)
        ]
        if not zero_infinity:
            used = np.maximum(used, ends + repeats)
            ends = np.where(used > frames, 0, ends)
            used = np.minimum(used, frames)
        given = {"x": x, "labels": labels, "used": used.astype(np.int64), "ends": ends.astype(np.int64)}
        leaves = of({"x": x})
        wanted = torch.nn.functional.ctc_loss(
            leaves["x"].log_softmax(2),
            *(torch.from_numpy(given[name]) for name in ("labels", "used", "ends")),
            blank=blank,
            reduction=reduction,
            zero_infinity=zero_infinity,
        )
        g = GraphBuilder()
        inputs = {name: g.input(name, a.shape, a.dtype) for name, a in given.items()}
        loss = g.ctc_loss(
            g.log_softmax(inputs["x"], 2),
            *(inputs[name] for name in ("labels", "used", "ends")),
            blank=blank,
            reduction=reduction,
            zero_infinity=zero_infinity,
        )
        what = (frames, blank, zero_infinity, reduction, most)
        check(g, given, [loss], wrt={"x": inputs["x"]}, wanted=[wanted], leaves=leaves, what=what)


# Attention of several heads.


def test_attention_of_several_heads() -> None:
    """Also with a key and value more, of weights or of zeros, keys of other features, and lengths."""
    forms = [
        (heads, bias, other, causal, more)
        for heads, bias, other, causal, more in itertools.product(
            (1, 2), (False, True), (False, True), (False, True), ("", "lengths", "bias", "zeros")
        )
        if not (causal and more)
    ]
    assert len(forms) >= FORMS
    width, of_key, queries, keys, batch = 4, 6, 3, 5, 2
    for form in forms:
        heads, bias, other, causal, more = form
        first = heads == 2
        module = torch.nn.MultiheadAttention(
            width,
            heads,
            bias=bias,
            add_bias_kv=more == "bias",
            add_zero_attn=more == "zeros",
            kdim=of_key if other else None,
            vdim=width if other else None,
            batch_first=first,
            dtype=torch.float64,
        )
        with torch.no_grad():  # biases begin as 0
            for n, each in enumerate(module.parameters()):
                each.copy_(torch.from_numpy(drawn(*each.shape, seed=n + 20)))
        values = {
            "query": drawn(*_ordered(queries, batch, width, first=first), seed=5),
            "key": drawn(*_ordered(keys, batch, of_key if other else width, first=first), seed=6),
            "value": drawn(*_ordered(keys, batch, width, first=first), seed=7),
        }
        leaves, lengths = of(values), np.array([keys, 2], np.int32)
        hidden = torch.from_numpy(np.arange(keys) >= lengths[:, None]) if more == "lengths" else None
        mask = torch.ones(queries, keys, dtype=torch.bool).triu(1) if causal else None
        wanted, _ = module(*leaves.values(), key_padding_mask=hidden, attn_mask=mask, need_weights=False)
        weights = {name: each.detach().numpy().copy() for name, each in module.named_parameters()}
        g = GraphBuilder()
        given: dict[str, np.ndarray] = {**values, **weights}
        inputs = {name: g.input(name, array.shape, "float64") for name, array in given.items()}
        how: dict[str, Any] = {}
        if more == "lengths":
            how["lengths_kv"] = g.input("lengths", lengths.shape, "int32")
            given["lengths"] = lengths
        y = g.multi_head_attention(
            *(inputs[name] for name in values),
            weights={name: inputs[name] for name in weights},
            heads=heads,
            batch_first=first,
            causal=causal,
            zero_key=more == "zeros",
            **how,
        )
        leaves |= dict(module.named_parameters())
        check(g, given, [y], wrt=inputs, wanted=[wanted], leaves=leaves, what=form)


def _ordered(positions: int, batch: int, features: int, *, first: bool) -> tuple[int, int, int]:
    return (batch, positions, features) if first else (positions, batch, features)
