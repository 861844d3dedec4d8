"""The functions of a `GraphBuilder` for attention: the operation, compositions around it, and several heads.

A composition takes what cuDNN's operation lacks as one: keys that every position sees, causality counted from
the last positions, and scores that are changed by a graph of the caller's.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from cudnn_actor.protocol.errors import InvalidRequest
from cudnn_actor.protocol.graphs.composed_functions import ComposedFunctions
from cudnn_actor.protocol.graphs.expressions import Tensor
from cudnn_actor.protocol.graphs.graph_recorder import as_called
from cudnn_actor.protocol.graphs.random_functions import RandomFunctions
from cudnn_actor.protocol.graphs.spatial_functions import SpatialFunctions
from cudnn_actor.protocol.operations import Attention
from cudnn_actor.protocol.operations.attention import alibi_slopes
from cudnn_actor.protocol.types.checks import (
    is_whole,
    require_flag,
    require_mapping,
)
from cudnn_actor.protocol.types.dtypes import DType
from cudnn_actor.protocol.types.spatial import are_several

__all__ = ["AttentionFunctions", "Causal"]

Causal = bool | Literal["bottom_right"]
_PACKED = ("in_proj_weight",)
_APART = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
_OPTIONAL = ("in_proj_bias", "out_proj.bias", "bias_k", "bias_v")


@dataclasses.dataclass(frozen=True)
class _Seen:
    """Which keys each position sees, and what is added to its scores.

    Parameters
    ----------
    left, right
        How many positions before and after its own; None for all.
    shift
        By how many places a position's own key lies behind it: a number, or int64 of dims (B, 1, 1, 1).
    front
        How many keys stand before those that are counted: every position sees them.
    slopes
        ALiBi's, one for each head; None for 0.
    bias
        Added to the scores of all keys but those in front; None for 0.
    lengths_q, lengths_kv
        As in `Attention`, without the keys in front.
    """

    left: int | None = None
    right: int | None = None
    shift: int | Tensor = 0
    front: int = 0
    slopes: tuple[float, ...] | None = None
    bias: Tensor | None = None
    lengths_q: Tensor | None = None
    lengths_kv: Tensor | None = None

    @property
    def is_window(self) -> bool:
        """Whether the operation's own window says the same, moved by `shift` and `front`."""
        if isinstance(self.shift, Tensor):
            return False
        moved = self.shift + self.front
        left = self.left is None or (not self.front and self.left >= moved)
        right = self.right is None or self.right + self.shift >= 0
        return left and right and (not moved or self.slopes is None)


class _Row(NamedTuple):
    """A key that stands before the others, its value, and what is added to its scores: None for zeros."""

    key: Tensor | None = None
    value: Tensor | None = None
    score: Tensor | None = None


class _Projected(NamedTuple):
    """Queries, keys and values of several heads, dims (B, H, S, D)."""

    q: Tensor
    k: Tensor
    v: Tensor


class AttentionFunctions(ComposedFunctions, SpatialFunctions, RandomFunctions):
    """Each function adds operations to the graph. Raises `InvalidRequest` if operands do not fit together."""

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        bias: Tensor | None = None,
        lengths_q: Tensor | None = None,
        lengths_kv: Tensor | None = None,
        scale: float | None = None,
        causal: Causal = False,
        window: tuple[int | None, int | None] | None = None,
        alibi: bool | Sequence[float] = False,
        dropout: float = 0.0,
        state: Tensor | None = None,
        sinks: Tensor | None = None,
        score: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Attention of queries to keys and values, dims (B, H, S, D): see `Attention`.

        Parameters
        ----------
        q, k, v, bias, lengths_q, lengths_kv, scale
            As in `Attention`.
        causal
            Whether query i sees only the keys j ≤ i. With "bottom_right", both are counted from the end, so
            that the last query sees all keys: query i sees the keys with j - keys ≤ i - queries. If lengths
            are given, "keys" and "queries" are those of the sample.
        window
            How many positions before and after its own each query sees; None for all. With "bottom_right" its
            own is the one that is as far from the end.
        alibi
            Whether there are slopes as in the paper, or the slope of each head.
        dropout, state
            As in `Attention`. Dropout takes B * H * S * L numbers of the state, for L keys, the one of
            `sinks` included.
        sinks
            For each head, the score of one more key, whose value is 0: dims (H,), floats. With it, the
            weights of the other keys add up to less than 1: https://arxiv.org/abs/2309.17453.
        score
            Called once, when the graph is built: it gets the scaled scores with the bias, float32 (float64
            where q is) of dims (B, H, S, L), and returns those to use, of the same dims. What a query does
            not see is hidden afterwards. All scores lie in memory at the same time. Not with `sinks`.
        """
        self._own("q", q)
        for name, given in (("k", k), ("v", v), ("bias", bias), ("sinks", sinks)):
            if given is not None:
                self._own(name, given)
        left, right = _pair(window)
        from_end = _is_from_end(causal)
        slopes = _slopes(alibi, q)
        plain = Attention(
            q=q,
            k=k,
            v=v,
            bias=bias,
            lengths_q=lengths_q,
            lengths_kv=lengths_kv,
            state=state,
            scale=scale,
            causal=from_end or causal,  # type: ignore[arg-type]  # other texts are refused there
            window_left=left,
            window_right=right,
            slopes=slopes,
            dropout=dropout,
        )
        if not from_end and sinks is None and score is None:
            return self._attended(plain)
        self._attended(plain)  # for its checks: what nothing reads is left out of the graph
        shift = self._shift(q, k, lengths_q, lengths_kv) if from_end else 0
        seen = _Seen(left, 0 if causal else right, shift, 0, slopes, bias, lengths_q, lengths_kv)
        if score is not None:
            if sinks is not None:
                raise InvalidRequest(
                    field="sinks", value=sinks.dims, problem="and a score function", fix="give one of the two"
                )
            return self._scored(plain, seen, score)
        rows = [] if sinks is None else [_Row(score=self._checked_sinks(sinks, q))]
        return self._seeing(plain, seen, rows)

    def multi_head_attention(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        weights: Mapping[str, Tensor],
        heads: int,
        batch_first: bool = False,
        bias: Tensor | None = None,
        lengths_q: Tensor | None = None,
        lengths_kv: Tensor | None = None,
        scale: float | None = None,
        causal: bool = False,
        window: tuple[int | None, int | None] | None = None,
        zero_key: bool = False,
        dropout: float = 0.0,
        state: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Attention of several heads between projections, as PyTorch's `MultiheadAttention`.

        Parameters
        ----------
        query, key, value
            Dims (S, B, E), (L, B, features) and (L, B, features); with `batch_first`, (B, S, E) and so on.
            The key is the query unless it is given, and the value is the key.
        weights
            Named as PyTorch's parameters: "in_proj_weight" of dims (3 * E, E), or "q_proj_weight",
            "k_proj_weight" and "v_proj_weight"; "out_proj.weight"; and if there are such, "in_proj_bias",
            "out_proj.bias", and "bias_k" and "bias_v", which are one more key and value. A module's
            `state_dict()` has this form, and so has what `attention_weights` gives. Projections may have
            other sizes than E, as in cuDNN: rows that `heads` divides, as many for q as for k.
        bias, lengths_q, lengths_kv, scale, causal, window, dropout, state
            As in `attention`, for the positions of `query` and `key`.
        zero_key
            Whether there is one more key, of zeros, as PyTorch's `add_zero_attn`.
        residual
            Added to the result, of its dims; None for nothing.

        Returns
        -------
        Tensor
            Of query's dims but the features, which are those of "out_proj.weight".
        """
        key = query if key is None else key
        value = key if value is None else value
        tensors = {"query": query, "key": key, "value": value, "bias": bias, "residual": residual}
        tensors |= {"lengths_q": lengths_q, "lengths_kv": lengths_kv, "state": state}
        for name, given in tensors.items():
            if given is not None:
                self._own(name, given)
        require_flag("batch_first", batch_first)
        require_flag("zero_key", zero_key)
        _check_weights(self, weights)
        _check_ranks(query=query, key=key, value=value)
        q, k, v = self._projected((query, key, value), weights, heads, batch_first)
        left, right = _pair(window)
        plain = Attention(
            q=q,
            k=k,
            v=v,
            bias=bias,
            lengths_q=lengths_q,
            lengths_kv=lengths_kv,
            state=state,
            scale=scale,
            causal=causal,
            window_left=left,
            window_right=right,
            dropout=dropout,
        )
        y = self._attended(plain)
        rows = []
        if "bias_k" in weights:
            rows.append(
                _Row(self._row(weights["bias_k"], "bias_k", k), self._row(weights["bias_v"], "bias_v", v))
            )
        if zero_key:
            rows.append(_Row())
        if rows:
            seen = _Seen(left, 0 if causal else right, 0, 0, None, bias, lengths_q, lengths_kv)
            y = self._seeing(plain, seen, rows)
        joined = self.reshape(self.transpose(y, (0, 2, 1, 3)), (y.dims[0], y.dims[2], y.dims[1] * y.dims[3]))
        try:
            out = self.linear(joined, weights["out_proj.weight"], weights.get("out_proj.bias"))
        except InvalidRequest as error:
            raise as_called(error, {"w": "out_proj.weight", "bias": "out_proj.bias"}) from None
        out = out if batch_first else self.transpose(out, (1, 0, 2))
        return out if residual is None else self.add(out, residual)

    def attention_weights(
        self,
        packed: Tensor,
        features: int,
        *,
        key_features: int | None = None,
        value_features: int | None = None,
        bias: bool = True,
    ) -> dict[str, Tensor]:
        """The weights of `multi_head_attention` as views of one tensor, whose gradient is one tensor, too.

        Parameters
        ----------
        packed
            Of one dim: the weights of queries, keys, values and the result, then their biases.
        features
            Of the query, of each projection, and of the result.
        key_features, value_features
            Of keys and values; None for `features`.
        bias
            Whether there are biases.
        """
        self._own("packed", packed)
        require_flag("bias", bias)
        of_key, of_value = (features if each is None else each for each in (key_features, value_features))
        named = {"features": features, "key_features": of_key, "value_features": of_value}
        for name, count in named.items():
            if not is_whole(count) or count < 1:
                raise InvalidRequest(
                    field=name, value=count, problem="is no number of features", fix="give a whole number"
                )
        inputs = (features, of_key, of_value, features)
        dims: dict[str, tuple[int, ...]] = {
            name: (features, size) for name, size in zip((*_APART, "out_proj.weight"), inputs, strict=True)
        }
        if bias:
            dims |= {"in_proj_bias": (3 * features,), "out_proj.bias": (features,)}
        total = sum(map(math.prod, dims.values()))
        if packed.dims != (total,):
            raise InvalidRequest(
                field="packed",
                value=packed.dims,
                problem="is not all weights",
                fix=f"give it dims {(total,)}",
            )
        found, at = dict[str, Tensor](), 0
        for name, of in dims.items():
            found[name] = self.reshape(packed[at : at + math.prod(of)], of)
            at += math.prod(of)
        return found

    # Parts.

    def _attended(self, attention: Attention[Any]) -> Tensor:
        named = {"window_left": "window", "window_right": "window", "slopes": "alibi"}
        y: Tensor = self._result(attention, **named)
        return y

    def _shift(self, q: Tensor, k: Tensor, lengths_q: Tensor | None, lengths_kv: Tensor | None) -> Any:
        """How many keys there are more than queries: a number, or that of each sample."""
        if lengths_q is None and lengths_kv is None:
            return k.dims[2] - q.dims[2]
        sizes = [
            size if given is None else self.clip(self.astype(given, DType.INT64), 0, size)
            for given, size in ((lengths_kv, k.dims[2]), (lengths_q, q.dims[2]))
        ]
        difference: Any = sizes[0] - sizes[1]
        return self.reshape(difference, (q.dims[0], 1, 1, 1))

    def _checked_sinks(self, sinks: Tensor, q: Tensor) -> Tensor:
        if sinks.dims != (q.dims[1],) or not sinks.dtype.is_floating:
            raise InvalidRequest(
                field="sinks",
                value=sinks.dims,
                problem=f"are not a number for each of the {q.dims[1]} heads of q",
                fix=f"give floats of dims {(q.dims[1],)}",
            )
        return self.reshape(sinks, (1, q.dims[1], 1, 1))

    def _row(self, row: Tensor, name: str, of: Tensor) -> Tensor:
        """One more key or value, for all samples: of PyTorch's dims (1, 1, heads * features)."""
        batch, heads, _, features = of.dims
        if math.prod(row.dims) != heads * features:
            raise InvalidRequest(
                field=f"weights[{name!r}]",
                value=row.dims,
                problem="is not one row of its projection",
                fix=f"give it dims {(1, 1, heads * features)}",
            )
        return self.broadcast_to(self.reshape(row, (1, heads, 1, features)), (batch, heads, 1, features))

    def _seeing(self, attention: Attention[Any], seen: _Seen, rows: Sequence[_Row]) -> Tensor:
        """Attention with other rules of what is seen, and with keys in front, which every position sees."""
        q, k, v = attention.q, attention.k, attention.v
        seen = dataclasses.replace(seen, front=len(rows))
        wide = DType.FLOAT64 if q.dtype is DType.FLOAT64 else DType.FLOAT32
        bias = seen.bias
        if not seen.is_window:
            hidden = self._hidden(q, k, seen, wide)
            bias = hidden if bias is None else self.add(hidden, bias)
            left = right = None
        else:
            assert isinstance(seen.shift, int), "else it is no window"
            moved = seen.shift + seen.front
            left = None if seen.left is None else seen.left - moved
            right = None if seen.right is None else seen.right + moved
        if rows:
            k, v = (
                self._with_rows(k, [row.key for row in rows]),
                self._with_rows(v, [row.value for row in rows]),
            )
            bias = self._with_scores(q, attention.k, bias, [row.score for row in rows], wide)
        lengths = seen.lengths_kv
        if lengths is not None and rows:
            clipped = self.clip(lengths, 0, attention.k.dims[2])
            lengths = self.astype(clipped + len(rows), DType.INT32)
        made = msgspec.structs.replace(
            attention,
            k=k,
            v=v,
            bias=bias,
            lengths_kv=lengths,
            causal=False,
            window_left=left,
            window_right=right,
            slopes=seen.slopes if seen.is_window else None,
        )
        return self._attended(made)

    def _with_rows(self, of: Tensor, rows: Sequence[Tensor | None]) -> Tensor:
        zeros = self.full((of.dims[0], of.dims[1], 1, of.dims[3]), 0.0, of.dtype)
        return self.concatenate([*(zeros if row is None else row for row in rows), of], axis=2)

    def _with_scores(
        self, q: Tensor, k: Tensor, bias: Tensor | None, scores: Sequence[Tensor | None], wide: DType
    ) -> Tensor | None:
        """The bias with columns in front; None if all are 0."""
        if bias is None and all(score is None for score in scores):
            return None
        heads, columns = q.dims[1], k.dims[2]
        rest = self.full((1, 1, 1, columns), 0.0, wide) if bias is None else self.astype(bias, wide)
        of_heads = heads if any(score is not None for score in scores) else rest.dims[1]
        dims = (rest.dims[0], of_heads, rest.dims[2])
        parts = [
            self.full((*dims, 1), 0.0, wide)
            if score is None
            else self.broadcast_to(self.astype(score, wide), (*dims, 1))
            for score in scores
        ]
        return self.concatenate([*parts, self.broadcast_to(rest, (*dims, columns))], axis=3)

    def _distance(self, q: Tensor, k: Tensor, seen: _Seen) -> Tensor:
        """How far each key lies behind a position's own, int64 of dims (1 or B, 1, S, L)."""
        rows = self.reshape(self.arange(q.dims[2]), (1, 1, q.dims[2], 1))
        columns = self.reshape(self.arange(k.dims[2]), (1, 1, 1, k.dims[2]))
        distance: Tensor = columns - rows - seen.shift
        return distance

    def _hidden(self, q: Tensor, k: Tensor, seen: _Seen, wide: DType) -> Tensor:
        """What is added to the scores of all keys: ALiBi's, and -inf for what is outside the window."""
        distance = self._distance(q, k, seen)
        added: Any = 0.0
        if seen.slopes is not None:
            numbers = [self.full((1, 1, 1, 1), -slope, wide) for slope in seen.slopes]
            added = self.concatenate(numbers, axis=1) * self.astype(self.abs(distance), wide)
        inside = self._inside(distance, seen)
        if inside is None:
            made: Tensor = added
            return made
        return self.astype(self.where(inside, added, -math.inf), wide)

    def _inside(self, distance: Tensor, seen: _Seen) -> Tensor | None:
        """Whether each key is in the window; None if all are."""
        found: Tensor | None = None
        if seen.right is not None:
            found = distance <= seen.right
        if seen.left is not None:
            after = distance >= -seen.left
            found = after if found is None else self.logical_and(found, after)
        return found

    def _scored(self, attention: Attention[Any], seen: _Seen, score: Callable[[Tensor], Tensor]) -> Tensor:
        """Attention by products and a softmax, with scores that the caller changes."""
        q, k, v = attention.q, attention.k, attention.v
        (batch, heads, rows, features), (_, groups, columns, _) = q.dims, k.dims
        shared = rows * heads // max(1, groups)  # rows of a group; there may be none
        wide = DType.FLOAT64 if q.dtype is DType.FLOAT64 else DType.FLOAT32
        by_group = self.reshape(q, (batch, groups, shared, features))
        products = self.matmul(by_group, self.transpose(k, (0, 1, 3, 2)))
        dims = (batch, heads, rows, columns)
        scores = self.astype(self.reshape(products, dims), wide) * attention.effective_scale(features)
        if seen.slopes is not None:
            scores = scores + self._hidden(q, k, dataclasses.replace(seen, left=None, right=None), wide)
        if seen.bias is not None:
            scores = scores + seen.bias
        changed = score(scores)
        self._own("score", changed)
        if changed.dims != dims or not changed.dtype.is_floating:
            raise InvalidRequest(
                field="score",
                value=changed.dims,
                problem="gives no scores of the dims that it got",
                fix=f"give floats of dims {dims}",
            )
        weights = self._weights(self.astype(changed, wide), self._visible(q, k, seen))
        if attention.dropout:
            assert attention.state is not None, "that has been checked"
            weights = self.dropout(weights, attention.dropout, attention.state)
        mixed = self.matmul(self.reshape(self.astype(weights, q.dtype), (batch, groups, shared, columns)), v)
        return self.astype(self.reshape(mixed, (batch, heads, rows, v.dims[3])), q.dtype)

    def _visible(self, q: Tensor, k: Tensor, seen: _Seen) -> Tensor | None:
        """Whether a position sees a key; None if each sees all."""
        found = self._inside(self._distance(q, k, seen), seen)
        sides = ((seen.lengths_q, 2, q.dims[2]), (seen.lengths_kv, 3, k.dims[2]))
        for lengths, axis, size in sides:
            if lengths is None:
                continue
            dims = [1, 1, 1, 1]
            dims[axis] = size
            place = self.reshape(self.arange(size), tuple(dims))
            counts = place < self.reshape(self.astype(lengths, DType.INT64), (q.dims[0], 1, 1, 1))
            found = counts if found is None else self.logical_and(found, counts)
        return found

    def _weights(self, scores: Tensor, visible: Tensor | None) -> Tensor:
        """The softmax of the scores that are seen; 0 where a position sees nothing."""
        if visible is None:
            return self.softmax(scores)
        sees = self.max(self.astype(visible, DType.INT32), 3, keepdims=True) > 0
        # Of a position that sees nothing, all scores are 0 here: neither the softmax nor its gradient is NaN.
        hidden = self.where(visible, scores, self.where(sees, -math.inf, 0.0))
        return self.where(sees, self.softmax(self.astype(hidden, scores.dtype)), 0.0)

    def _projected(
        self,
        given: tuple[Tensor, Tensor, Tensor],
        weights: Mapping[str, Tensor],
        heads: int,
        batch_first: bool,
    ) -> _Projected:
        """Queries, keys and values by their weights, with the heads apart."""
        if "in_proj_weight" in weights:
            names = ["in_proj_weight"] * 3
            packed = weights["in_proj_weight"]
            if packed.rank != 2 or packed.dims[0] % 3:
                raise InvalidRequest(
                    field="weights['in_proj_weight']",
                    value=packed.dims,
                    problem="is not three projections, one below the other",
                    fix=f"give it dims {(3 * given[0].dims[2], given[0].dims[2])}",
                )
            matrices = self.split(packed, 3)
        else:
            names = list(_APART)
            matrices = tuple(weights[name] for name in names)
        for name, matrix in zip(names, matrices, strict=True):
            if not is_whole(heads) or heads < 1 or matrix.rank != 2 or matrix.dims[0] % heads:
                raise InvalidRequest(
                    field="heads",
                    value=heads,
                    problem=f"does not divide the rows of {name}, of dims {matrix.dims}",
                    fix="give the number of heads, which divides the rows of each projection",
                )
        sizes = [matrix.dims[0] for matrix in matrices]
        biases: Sequence[Tensor | None] = (None, None, None)
        if "in_proj_bias" in weights:
            bias = weights["in_proj_bias"]
            if bias.dims != (sum(sizes),):
                raise InvalidRequest(
                    field="weights['in_proj_bias']",
                    value=bias.dims,
                    problem="is not a number for each row of the three projections",
                    fix=f"give it dims {(sum(sizes),)}",
                )
            biases = self.split(bias, sizes)
        made = []
        inputs = zip(given, matrices, biases, names, strict=True)
        for x, matrix, own, name in inputs:
            try:
                y = self.linear(x, matrix, own)
            except InvalidRequest as error:
                raise as_called(error, {"w": f"weights[{name!r}]"}) from None
            apart = self.reshape(y, (*y.dims[:2], heads, y.dims[2] // heads))
            made.append(self.transpose(apart, (0, 2, 1, 3) if batch_first else (1, 2, 0, 3)))
        return _Projected(*made)


def _check_weights(g: AttentionFunctions, weights: Mapping[str, Tensor]) -> None:
    require_mapping("weights", weights, "names to tensors", "name them as PyTorch's parameters")
    apart = "in_proj_weight" not in weights
    needed = {"out_proj.weight", *(_APART if apart else _PACKED)}
    problem = ""
    if missing := needed - weights.keys():
        problem = f"has no {sorted(missing)[0]}"
    elif unknown := weights.keys() - needed - set(_OPTIONAL):
        problem = f"has {sorted(unknown)[0]!r}, which is not needed"
    elif ("bias_k" in weights) != ("bias_v" in weights):
        problem = "has one of bias_k and bias_v without the other"
    if problem:
        raise InvalidRequest(
            field="weights",
            value=tuple(sorted(weights)),
            problem=problem,
            fix=f"give {', '.join(sorted(needed))}, and of {', '.join(_OPTIONAL)} those that there are",
        )
    for name, tensor in weights.items():
        g._own(f"weights[{name!r}]", tensor)


def _check_ranks(**given: Tensor) -> None:
    for name, tensor in given.items():
        if tensor.rank != 3:
            raise InvalidRequest(
                field=name,
                value=tensor.dims,
                problem="is not of rank 3",
                fix="dims are positions, batch, features, or with batch_first batch, positions, features",
            )


def _is_from_end(causal: Any) -> bool:
    return isinstance(causal, str) and causal == "bottom_right"


def _pair(window: object) -> tuple[Any, Any]:
    """The two bounds of a window, None twice if there is none. Raises `InvalidRequest` for anything else."""
    if window is None:
        return None, None
    if not isinstance(window, Sequence) or len(window) != 2:
        raise InvalidRequest(
            field="window",
            value=window,
            problem="is not a pair",
            fix="give how many positions before and after its own each sees, as in (4, 0), or None for all",
        )
    return window[0], window[1]


def _slopes(alibi: Any, q: Tensor) -> tuple[float, ...] | None:
    """The slope of each head of q, or None."""
    if isinstance(alibi, bool):
        return alibi_slopes(q.dims[1]) if alibi and q.rank > 1 else None
    if alibi is None:
        return None
    return tuple(alibi) if are_several(alibi) else (alibi,)
