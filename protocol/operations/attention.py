"""Scaled dot-product attention, and its gradients.

The definition is ONNX's, of `Attention`, with lengths in the place of a boolean mask, and with windows,
ALiBi and dropout.
https://onnx.ai/onnx/operators/onnx__Attention.html
O. Press et al., "Train short, test long: attention with linear biases", ICLR 2022.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from cudnn_actor.protocol.errors import InvalidRequest
from cudnn_actor.protocol.operations.base import (
    ALLOCATED,
    Array,
    Operation,
    Region,
    Specs,
    T,
    needed_of_leading,
    require,
    require_elements,
    require_floating,
)
from cudnn_actor.protocol.operations.example import ROUNDED, Example
from cudnn_actor.protocol.operations.random import STATE, check_dropout, keeping, state_sample, words
from cudnn_actor.protocol.types.checks import is_finite, is_whole
from cudnn_actor.protocol.types.dtypes import DType
from cudnn_actor.protocol.types.tensor import TensorSpec

__all__ = ["Attention", "AttentionBackward", "alibi_slopes"]

_MOST_SCORES = 1 << 22
"""The most scores computed at a time: 32 MiB as float64, a few times."""
_LONGEST = 1 << 31
"""Positions are int32 on a GPU."""
Piece = tuple[slice, slice, slice, slice]
"""Slices of the batch, of q's heads, of k's heads and of q's positions."""


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """ALiBi's slopes for a number of heads: for a power of two n, 2**(-8 / n), its square and so on.

    For another number, those of the power of two below it, and then every other one of the power above.
    https://github.com/ofirpress/attention_with_linear_biases
    Raises `InvalidRequest` for what is no number of heads.
    """
    if not is_whole(heads) or heads < 1:
        raise InvalidRequest(
            field="heads", value=heads, problem="is no number of heads", fix="give a whole number, at least 1"
        )
    heads = int(heads)
    power = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * (head + 1) / power) for head in range(power)]
    return (*slopes, *(2.0 ** (-4 * (2 * head + 1) / power) for head in range(heads - power)))


class _Attention(Operation[T]):
    """The base of attention and of its gradient.

    Parameters
    ----------
    scale
        The factor of the scores; None for 1 / sqrt(D).
    causal
        Whether position i sees only the positions j ≤ i, both counted from the first.
    window_left, window_right
        Position i sees only the positions from i - window_left to i + window_right; None for no bound.
    slopes
        ALiBi's: the scores of a head are lowered by its slope times abs(i - j). None for 0.
    dropout
        The probability with which a weight becomes 0; the others are divided by 1 - dropout.
    """

    slack = 16.0  # the weights are rounded to the operands' type
    scale: float | None = None
    causal: bool = False
    window_left: int | None = None
    window_right: int | None = None
    slopes: tuple[float, ...] | None = None
    dropout: float = 0.0

    @property
    def options(self) -> dict[str, Any]:
        """The parameters that both passes have."""
        return {name: getattr(self, name) for name in _Attention.__struct_fields__ if name != "numerics"}

    def bounds(self, rows: int, columns: int) -> tuple[int | None, int | None]:
        """How many positions before and after its own one each sees; None for all of them."""
        left, right = self.window_left, self.window_right
        if self.causal:
            right = 0
        return (
            None if left is None or left >= rows - 1 else left,
            None if right is None or right >= columns - 1 else right,
        )

    def effective_scale(self, features: int) -> float:
        """The factor of the scores, for queries of `features` features."""
        return 1 / math.sqrt(features) if self.scale is None else self.scale

    def _check_inputs(self, specs: Specs) -> None:
        """Check everything but what is computed from it."""
        for name in ("q", "k", "v"):
            require_floating(specs, name)
            if specs[name].rank != 4:
                raise InvalidRequest(
                    field=name,
                    value=specs[name].dims,
                    problem="is not of rank 4",
                    fix="dims are batch, heads, positions, features",
                )
        q, k, v = specs["q"], specs["k"], specs["v"]
        batch, heads, _, features = q.dims
        require(specs, "k", (batch, k.dims[1], k.dims[2], features), q.dtype)
        for name in ("q", "v"):
            require_elements(specs, name, (3,), "features")
        if heads % k.dims[1] if k.dims[1] else heads:
            raise InvalidRequest(
                field="k",
                value=k.dims[1],
                problem=f"heads do not divide the {heads} heads of q",
                fix="give k and v as many heads as q, or a divisor of that",
            )
        require(specs, "v", (batch, k.dims[1], k.dims[2], v.dims[3]), q.dtype)
        if max(q.dims[2], k.dims[2]) >= _LONGEST:
            raise InvalidRequest(
                field="q", value=q.dims, problem="is too long", fix="use fewer than 2**31 positions"
            )
        if self.scale is not None and not is_finite(self.scale):
            raise InvalidRequest(
                field="scale", value=self.scale, problem="is not a finite number", fix="leave it out"
            )
        if not isinstance(self.causal, bool):
            raise InvalidRequest(field="causal", value=self.causal, problem="is not a bool", fix="use True")
        for name in ("lengths_q", "lengths_kv"):
            if name in specs:
                require(specs, name, (batch,), DType.INT32)
        self._check_bias(specs, "bias")
        self._check_options(heads)
        check_dropout(self.dropout, specs["state"].dims if "state" in specs else None, of="weight")
        if "state" in specs:
            require(specs, "state", STATE.dims, STATE.dtype)

    def _check_options(self, heads: int) -> None:
        for name, bound in (("window_left", self.window_left), ("window_right", self.window_right)):
            if bound is not None and (not is_whole(bound) or not 0 <= bound < _LONGEST):
                raise InvalidRequest(
                    field=name,
                    value=bound,
                    problem="must be a whole number from 0 to 2**31 - 1",
                    fix="leave it out for no bound",
                )
        slopes = self.slopes
        if slopes is not None and (len(slopes) != heads or not all(map(is_finite, slopes))):
            raise InvalidRequest(
                field="slopes",
                value=slopes,
                problem=f"are not a finite number for each of the {heads} heads of q",
                fix=f"use alibi_slopes({heads})",
            )

    def _check_bias(self, specs: Specs, name: str) -> None:
        if name not in specs:
            return
        q, k, dims = specs["q"], specs["k"], specs[name].dims
        scores = (*q.dims[:3], k.dims[2])
        fits = len(dims) == 4 and dims[3] == scores[3]
        if not fits or any(own not in (1, all_) for own, all_ in zip(dims, scores, strict=True)):
            raise InvalidRequest(
                field=name,
                value=dims,
                problem=f"cannot be broadcast to the scores, which have dims {scores}",
                fix="give it these dims; the first three may be 1",
            )
        require(specs, name, dims, q.dtype, self.compute((q.dtype,)))

    def _statistics(self, q: TensorSpec) -> TensorSpec:
        return TensorSpec.packed((*q.dims[:3], 1), self.compute((q.dtype,)))

    def _some(self, xp: Any, specs: Specs, draw: Callable[[TensorSpec], Array]) -> dict[str, Array]:
        """Values for which no score is far larger than all others, and lengths that leave something out.

        The last of several samples has no keys.
        """
        q, k = specs["q"], specs["k"]
        values = {name: draw(specs[name]) for name in ("q", "k", "v", "bias") if name in specs}
        if "state" in specs:
            values["state"] = state_sample(xp)
        scale = abs(self.effective_scale(q.dims[3])) * math.sqrt(q.dims[3])
        values["q"] *= 2.0 ** min(12, round(-math.log2(2 * scale))) if scale else 1.0  # finite as float16
        for name, longest in (("lengths_q", q.dims[2]), ("lengths_kv", k.dims[2])):
            if name in specs:
                values[name] = (longest - (draw(specs[name]) + 3) * longest // 16).astype(xp.int64)
        if "lengths_kv" in specs and q.dims[0] > 1:
            values["lengths_kv"][-1] = 0
        return values

    def _pieces(self, q: Array, k: Array) -> Iterator[Piece]:
        """Parts of the scores, with few of them each."""
        batch, heads, rows, _ = q.shape
        groups, columns = k.shape[1:3]
        size = heads // groups
        row_step = max(1, min(rows, _MOST_SCORES // (size * columns)))
        group_step = max(1, min(groups, _MOST_SCORES // (size * row_step * columns)))
        batch_step = max(1, _MOST_SCORES // (group_step * size * row_step * columns))
        if row_step < rows:
            group_step = batch_step = 1
        elif group_step < groups:
            batch_step = 1
        for b in range(0, batch, batch_step):
            for g in range(0, groups, group_step):
                for r in range(0, rows, row_step):
                    of_q = slice(g * size, min(g + group_step, groups) * size)
                    yield (
                        slice(b, b + batch_step),
                        of_q,
                        slice(g, g + group_step),
                        slice(r, min(r + row_step, rows)),
                    )

    def _scores(self, xp: Any, values: Mapping[str, Array], piece: Piece) -> tuple[Array, Array]:
        """A part of the scores, and which of its keys are visible."""
        b, h, g, r = piece
        q, k = values["q"][b, h, r], values["k"][b, g]
        scores = _by_group(q, k.shape[1]) @ k.swapaxes(2, 3)
        scores = scores.reshape(*q.shape[:3], k.shape[2]) * self.effective_scale(q.shape[3])
        scores += self._added_scores(xp, values, piece)
        row, column = xp.arange(r.start, r.stop)[:, None], xp.arange(k.shape[2])
        seen = xp.ones((1, 1, len(row), len(column)), bool)
        left, right = self.bounds(values["q"].shape[2], k.shape[2])
        if left is not None:
            seen &= column >= row - left
        if right is not None:
            seen &= column <= row + right
        if "lengths_q" in values:
            seen = seen & (row < values["lengths_q"][b, None, None, None])
        if "lengths_kv" in values:
            seen = seen & (column < values["lengths_kv"][b, None, None, None])
        return scores, seen

    def _added_scores(self, xp: Any, values: Mapping[str, Array], piece: Piece) -> Any:
        """The numbers that are added to a part of the scores: the bias, and ALiBi's."""
        b, h, _, r = piece
        added: Any = 0.0
        if "bias" in values:
            bias = values["bias"]
            added = bias[
                tuple(s if n > 1 else slice(None) for s, n in zip((b, h, r), bias.shape, strict=False))
            ]
        if self.slopes is not None:
            slopes = xp.asarray(self.slopes, dtype=xp.float64)[h, None, None]
            row, column = xp.arange(r.start, r.stop)[:, None], xp.arange(values["k"].shape[2])
            added = added - slopes * xp.abs(row - column)
        return added

    def _factors(self, xp: Any, values: Mapping[str, Array], piece: Piece) -> Any:
        """The factors of a part of the weights: 0 where they are dropped.

        Weights are numbered in the order of the scores, of dims (B, H, S, L): those that are kept are the
        ones where `RandomBernoulli` of these dims gives 1, with the probability 1 - dropout.
        """
        if not self.dropout:
            return 1.0
        b, h, _, r = piece
        (batch, heads, rows, _), columns = values["q"].shape, values["k"].shape[2]
        samples, own = range(batch)[b], range(heads)[h]
        size = (r.stop - r.start) * columns
        runs: list[list[int]] = []
        for sample, head in itertools.product(samples, own):
            start = ((sample * heads + head) * rows + r.start) * columns
            if runs and sum(runs[-1]) == start:
                runs[-1][1] += size
            else:
                runs.append([start, size])
        drawn = xp.concatenate([words(xp, values["state"], *run) for run in runs])
        kept = (drawn < keeping(1 - self.dropout)).reshape(len(samples), len(own), -1, columns)
        return kept / (1 - self.dropout)


def _by_group(array: Array, groups: int) -> Array:
    """Heads that share a head of k and v, one below the other."""
    batch, heads, rows, features = array.shape
    return array.reshape(batch, groups, heads // groups * rows, features)


class Attention(_Attention[T], tag=True):
    """y = softmax(scale * q @ k^T + bias) @ v, over the positions seen. Answered by a `Receipt`.

    Parameters
    ----------
    q
        Queries, dims (B, H, S, D), of a floating-point dtype.
    k, v
        Keys and values, dims (B, G, L, D) and (B, G, L, E), of q's dtype. G divides H: the first H/G heads of
        q share the first head of k and v, and so on.
    bias
        Added to the scores: dims (B, H, S, L), of which the first three may be 1; of q's dtype or float32
        (float64 where q is float64). None for 0.
    lengths_q, lengths_kv
        int32, dims (B,): how many positions of q, and of k and v, count. Those behind are padding, which
        must hold finite numbers. A length below 0 counts as 0, one above S or L as S or L. None: all count.
    state
        Of dropout: int64, dims (2,), the seed and the number of the first weight, as of `RandomBernoulli`.
        The weights have B * H * S * L numbers.
    y
        Result, dims (B, H, S, E), of q's dtype. 0 at a position that sees nothing, as padding does.
    statistics
        For the backward pass: the logarithm of the sum of the exponentials of a position's scores, float32
        (float64 where q is float64), dims (B, H, S, 1). -inf at a position that sees nothing.
    scale
        The factor of q @ k^T; None for 1 / sqrt(D).
    causal
        Whether position i sees only the positions j ≤ i, both counted from the first.
    window_left, window_right
        Position i sees only the positions from i - window_left to i + window_right; None for no bound.
    slopes
        ALiBi's, one for each head, as `alibi_slopes` gives them: scores are lowered by the head's slope times
        abs(i - j). None for 0.
    dropout
        The probability with which a weight becomes 0; the others are divided by 1 - dropout. From 0 to below
        1. Statistics are those without dropout.
    """

    kind = "attention"
    nothing = MappingProxyType({"statistics": -math.inf})
    inputs = ("q", "k", "v", "bias", "lengths_q", "lengths_kv", "state")
    outputs = ("y", "statistics")
    optional = frozenset({"bias", "lengths_q", "lengths_kv", "state", "statistics"})
    q: T
    k: T
    v: T
    bias: T | None = None
    lengths_q: T | None = None
    lengths_kv: T | None = None
    state: T | None = None
    y: T = ALLOCATED
    statistics: T | None = None

    def infer(self, specs: Specs) -> dict[str, TensorSpec]:
        self._check_inputs(specs)
        q = specs["q"]
        y = TensorSpec.packed((*q.dims[:3], specs["v"].dims[3]), q.dtype)
        return {"y": y, "statistics": self._statistics(q)}

    def gradient(self, g: Any, d: Mapping[str, Any]) -> dict[str, Any]:
        """The gradients of q, k, v and the bias, by `AttentionBackward`. The statistics have none."""
        if "statistics" in d:
            raise InvalidRequest(
                field="statistics", value=None, problem="have no gradient", fix="compute with y alone"
            )
        given: dict[str, Any] = dict(self.named(self.inputs))
        statistics = g.output(self, "statistics")
        backward = AttentionBackward(dy=d["y"], y=self.y, statistics=statistics, **given, **self.options)
        found = g.apply(backward, also=("dbias",) if "bias" in given else ())
        return {name: getattr(found, f"d{name}") for name in ("q", "k", "v", "bias") if name in given}

    def samples(self, xp: Any, specs: Specs, draw: Callable[[TensorSpec], Array]) -> dict[str, Array]:
        return self._some(xp, specs, draw)

    def needs(self, specs: Specs, wanted: Mapping[str, Region]) -> dict[str, Region] | None:
        if self.dropout:
            return None
        batch = specs["q"].dims[0]
        names = [name for name in self.inputs if name in specs and specs[name].dims[0] == batch]
        return needed_of_leading(specs, wanted, 1, names)

    def evaluate(self, xp: Any, values: Mapping[str, Array], specs: Specs) -> dict[str, Array]:
        del specs
        q, k, v = values["q"], values["k"], values["v"]
        y = xp.zeros((*q.shape[:3], v.shape[3]))
        statistics = xp.zeros((*q.shape[:3], 1))
        for b, h, g, r in self._pieces(q, k):
            scores, seen = self._scores(xp, values, (b, h, g, r))
            scores = xp.where(seen, scores, -math.inf)
            largest = scores.max(axis=3, keepdims=True)
            largest = xp.where(largest == -math.inf, 0.0, largest)
            weights = xp.exp(scores - largest)
            total = weights.sum(axis=3, keepdims=True)
            statistics[b, h, r] = largest + xp.log(total)
            weights *= self._factors(xp, values, (b, h, g, r)) / xp.where(total == 0, 1.0, total)
            found = _by_group(weights, v[:, g].shape[1]) @ v[b, g]
            y[b, h, r] = found.reshape(*weights.shape[:3], v.shape[3])
        return {"y": y, "statistics": statistics}


class AttentionBackward(_Attention[T], tag=True):
    """The gradients of `Attention` with respect to q, k, v and the bias. Answered by a `Receipt`.

    Parameters
    ----------
    dy
        Gradient of y, of y's dims and q's dtype.
    q, k, v, bias, lengths_q, lengths_kv, state
    scale, causal, window_left, window_right, slopes, dropout
        As in the forward pass.
    y, statistics
        As the forward pass wrote them.
    dq, dk, dv
        Of the dims and the dtype of q, k and v. 0 for padding.
    dbias
        Of the bias's dims, summed over those that are 1; of its dtype or float32. Only where there is a bias.
    """

    kind = "attention_bwd"
    inputs = ("dy", "q", "k", "v", "y", "statistics", "bias", "lengths_q", "lengths_kv", "state")
    outputs = ("dq", "dk", "dv", "dbias")
    optional = frozenset({"bias", "lengths_q", "lengths_kv", "state", "dbias"})
    dy: T
    q: T
    k: T
    v: T
    y: T
    statistics: T
    bias: T | None = None
    lengths_q: T | None = None
    lengths_kv: T | None = None
    state: T | None = None
    dq: T = ALLOCATED
    dk: T = ALLOCATED
    dv: T = ALLOCATED
    dbias: T | None = None

    def infer(self, specs: Specs) -> dict[str, TensorSpec]:
        self._check_inputs(specs)
        q = specs["q"]
        for name in ("dy", "y"):
            require(specs, name, (*q.dims[:3], specs["v"].dims[3]), q.dtype)
        statistics = self._statistics(q)
        require(specs, "statistics", statistics.dims, statistics.dtype)
        wanted = {"dq": q, "dk": specs["k"], "dv": specs["v"]}
        if "bias" in specs:
            wanted["dbias"] = specs["bias"]
        return {name: TensorSpec.packed(spec.dims, spec.dtype) for name, spec in wanted.items()}

    def check(self, specs: Specs) -> None:
        if "dbias" in specs and "bias" not in specs:
            raise InvalidRequest(
                field="dbias", value=specs["dbias"].dims, problem="needs a bias", fix="leave it out"
            )
        super().check({name: spec for name, spec in specs.items() if name != "dbias"})
        if "dbias" in specs:
            require(specs, "dbias", specs["bias"].dims)
            self._check_bias(specs, "dbias")

    def samples(self, xp: Any, specs: Specs, draw: Callable[[TensorSpec], Array]) -> dict[str, Array]:
        values = self._some(xp, specs, draw)
        forward = Attention(q=0, k=1, v=2, y=3, statistics=4, **self.options)
        return values | forward.evaluate(xp, values, {name: specs[name] for name in ("y", "statistics")})

    def evaluate(self, xp: Any, values: Mapping[str, Array], specs: Specs) -> dict[str, Array]:
        return self._sums(xp, values, specs)

    def magnitudes(self, xp: Any, values: Mapping[str, Array], specs: Specs) -> dict[str, Array]:
        """The magnitudes of dq and dk: with a single key, their terms are differences of equal numbers."""
        return {name: xp.sqrt(sums) for name, sums in self._sums(xp, values, specs, power=2).items()}

    def _sums(self, xp: Any, values: Mapping[str, Array], specs: Specs, power: int = 1) -> dict[str, Array]:
        """The outputs; with a power of 2, the sums of the squares of their terms."""
        q, k, v, dy, y = (values[name] ** power for name in ("q", "k", "v", "dy", "y"))
        scale = self.effective_scale(q.shape[3]) ** power
        apart = (dy * y).sum(axis=3, keepdims=True) * (1 if power == 1 else -1)
        base = xp.where(values["statistics"] == -math.inf, 0.0, values["statistics"])
        dq, dk, dv = (xp.zeros(array.shape) for array in (q, k, v))
        dbias = xp.zeros(values["bias"].shape) if "dbias" in specs else None
        for b, h, g, r in self._pieces(q, k):
            scores, seen = self._scores(xp, values, (b, h, g, r))
            weights = xp.where(seen, xp.exp(scores - base[b, h, r]), 0.0) ** power
            groups = k[:, g].shape[1]
            of_q, of_dy = _by_group(q[b, h, r], groups), _by_group(dy[b, h, r], groups)
            factors = self._factors(xp, values, (b, h, g, r)) ** power
            slopes = (of_dy @ v[b, g].swapaxes(2, 3)).reshape(weights.shape) * factors
            slopes = xp.where(seen, weights * (slopes - apart[b, h, r]), 0.0)
            dv[b, g] += _by_group(weights * factors, groups).swapaxes(2, 3) @ of_dy
            by_group = _by_group(slopes, groups)
            dq[b, h, r] = (by_group @ k[b, g]).reshape(q[b, h, r].shape) * scale
            dk[b, g] += by_group.swapaxes(2, 3) @ of_q * scale
            if dbias is not None:
                places = tuple(
                    s if n > 1 else slice(None) for s, n in zip((b, h, r), dbias.shape, strict=False)
                )
                summed = tuple(axis for axis in range(3) if dbias.shape[axis] == 1)
                dbias[places] += slopes.sum(axis=summed, keepdims=True)
        found = {"dq": dq, "dk": dk, "dv": dv}
        return found if dbias is None else found | {"dbias": dbias}


def _with_bias(
    q: tuple[int, ...], k: tuple[int, ...], *, heads_of_bias: int = 1, causal: bool = False
) -> Example:
    # Of a batch of 1: in a check, the last of several has no keys, and no meaning without the lengths.
    given: dict[str, Any] = {name: name for name in ("q", "k", "v", "bias", "lengths_kv", "statistics")}
    operations = (
        Attention(**given, y="y", causal=causal),
        AttentionBackward(**given, dy="dy", y="y", dq="dq", dk="dk", dv="dv", dbias="dbias", causal=causal),
    )
    dims = {"q": q, "k": k, "v": k, "bias": (1, heads_of_bias, q[2], k[2]), "lengths_kv": q[:1]}
    dtypes = {"lengths_kv": DType.INT32}
    return Example(dims=dims, dtypes=dtypes, operations=operations, tolerance=ROUNDED)


def _local(dims: tuple[int, ...]) -> Example:
    given: dict[str, Any] = {name: name for name in ("q", "k", "v", "statistics")}
    given |= {"window_left": 3, "window_right": 1, "slopes": alibi_slopes(dims[1])}
    operations = (
        Attention(**given, y="y"),
        AttentionBackward(**given, dy="dy", y="y", dq="dq", dk="dk", dv="dv"),
    )
    return Example(dims=dict.fromkeys("qkv", dims), operations=operations, tolerance=ROUNDED)


def examples() -> tuple[Example, ...]:
    """Attention with a bias and lengths; causal attention; attention in a window, with slopes."""
    return (
        _with_bias((1, 4, 9, 8), (1, 2, 16, 8)),
        _with_bias((1, 2, 32, 8), (1, 2, 32, 8), heads_of_bias=2, causal=True),
        _local((1, 2, 16, 8)),
    )
