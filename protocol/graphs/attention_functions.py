"""The functions of a `GraphBuilder` for attention: the operation, compositions around it, and several heads.

A composition takes what cuDNN's operation lacks as one: keys that every position sees, causality counted from
the last positions, and scores that are changed by a graph of the caller's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from cudnn_actor.protocol.errors import InvalidRequest
from cudnn_actor.protocol.graphs.attention_arguments import (
    attention_operation,
    window_of,
    window_without_shift,
)
from cudnn_actor.protocol.graphs.composed_functions import ComposedFunctions
from cudnn_actor.protocol.graphs.expressions import Tensor
from cudnn_actor.protocol.graphs.graph_recorder import as_called
from cudnn_actor.protocol.graphs.random_functions import RandomFunctions
from cudnn_actor.protocol.graphs.spatial_functions import SpatialFunctions
from cudnn_actor.protocol.operations import Attention
from cudnn_actor.protocol.types.checks import as_plain, is_whole, require_flag, require_mapping
from cudnn_actor.protocol.types.dtypes import DType

__all__ = ["AttentionFunctions", "Causal"]

Causal = bool | Literal["bottom_right"]
_APART = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
_OPTIONAL = ("in_proj_bias", "out_proj.bias", "bias_k", "bias_v")


class _Row(NamedTuple):
    """A key that stands before the others, its value, and what is added to its scores: None for zeros."""

    key: Tensor | None = None
    value: Tensor | None = None
    score: Tensor | None = None


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
        from_end = isinstance(causal, str) and causal == "bottom_right"
        if not (from_end or isinstance(causal, bool)):
            raise InvalidRequest(
                field="causal",
                value=causal,
                problem="is no way in which keys are hidden",
                fix='pass True, False or "bottom_right"',
            )
        if score is not None and not callable(score):
            raise InvalidRequest(
                field="score",
                value=score,
                problem="is no function",
                fix="pass one that takes the scores, and returns those to use",
            )
        plain = attention_operation(
            q,
            k,
            v,
            window,
            alibi,
            bias=bias,
            lengths_q=lengths_q,
            lengths_kv=lengths_kv,
            state=state,
            scale=scale,
            causal=from_end or causal,
            dropout=dropout,
        )
        y = self._attend(plain)  # also for its checks: if nothing reads y, it is left out of the graph
        if not from_end and sinks is None and score is None:
            return y
        shift = self._shift(plain) if from_end else 0
        if score is None:
            rows = [] if sinks is None else [_Row(score=self._checked_sinks(sinks, q))]
            return self._seeing(plain, shift, rows)
        if sinks is not None:
            raise InvalidRequest(
                field="sinks",
                value=sinks.dims,
                problem="is given, and so is score",
                fix="give one of the two",
            )
        return self._attend_by_products(plain, shift, score)

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
            As in `attention`, for the positions of `query` and `key`. `causal` is True or False, and
            counts from the first positions.
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
        q, k, v = self._project((query, key, value), weights, heads, batch_first)
        plain = attention_operation(
            q,
            k,
            v,
            window,
            bias=bias,
            lengths_q=lengths_q,
            lengths_kv=lengths_kv,
            state=state,
            scale=scale,
            causal=causal,
            dropout=dropout,
        )
        y = self._attend(plain)
        rows = []
        if "bias_k" in weights:
            rows.append(
                _Row(self._row(weights["bias_k"], "bias_k", k), self._row(weights["bias_v"], "bias_v", v))
            )
        if zero_key:
            rows.append(_Row())
        if rows:
            y = self._seeing(plain, 0, rows)
        joined = self.reshape(self.transpose(y, (0, 2, 1, 3)), (y.dims[0], y.dims[2], y.dims[1] * y.dims[3]))
        try:
            out = self.linear(joined, weights["out_proj.weight"], weights.get("out_proj.bias"))
        except InvalidRequest as error:
            raise as_called(error, {"w": "out_proj.weight", "bias": "out_proj.bias"}) from None
        out = out if batch_first else self.transpose(out, (1, 0, 2))
        if residual is not None and residual.dims != out.dims:
            raise InvalidRequest(
                field="residual",
                value=residual.dims,
                problem="does not have the dims of the result",
                fix=f"give it dims {out.dims}",
            )
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
        features, key_features, value_features = map(as_plain, (features, key_features, value_features))
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

    def _attend(self, attention: Attention[Any]) -> Tensor:
        named = {"window_left": "window", "window_right": "window", "slopes": "alibi"}
        y: Tensor = self._result(attention, **named)
        return y

    def _shift(self, attention: Attention[Any]) -> int | Tensor:
        """How many keys there are more than queries: a number, or int64 of dims (B, 1, 1, 1)."""
        lengths_kv, lengths_q = attention.lengths_kv, attention.lengths_q
        keys, queries = attention.k.dims[2], attention.q.dims[2]
        if lengths_q is None and lengths_kv is None:
            return int(keys - queries)
        sizes = [
            size if given is None else self.clip(self.astype(given, DType.INT64), 0, size)
            for given, size in ((lengths_kv, keys), (lengths_q, queries))
        ]
        difference: Any = sizes[0] - sizes[1]
        return self.reshape(difference, (attention.q.dims[0], 1, 1, 1))

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

    def _seeing(self, attention: Attention[Any], shift: int | Tensor, rows: Sequence[_Row]) -> Tensor:
        """Attention with a position's own key `shift` places behind it, and `rows` that all positions see."""
        q, k, v, bias, slopes = attention.q, attention.k, attention.v, attention.bias, attention.slopes
        wide = attention.compute((q.dtype,))
        window = window_without_shift(attention, shift, len(rows))
        if window is None:
            hidden = self._position_bias(attention, shift, wide)
            bias = hidden if bias is None else self.add(hidden, bias)
            window, slopes = (None, None), None
        lengths = attention.lengths_kv
        if rows:
            bias = self._with_scores(q, k, bias, [row.score for row in rows], wide)
            if lengths is not None:
                lengths = self.astype(self.clip(lengths, 0, k.dims[2]) + len(rows), DType.INT32)
            k = self._with_rows(k, [row.key for row in rows])
            v = self._with_rows(v, [row.value for row in rows])
        left, right = window
        made = msgspec.structs.replace(
            attention,
            k=k,
            v=v,
            bias=bias,
            lengths_kv=lengths,
            causal=False,
            window_left=left,
            window_right=right,
            slopes=slopes,
        )
        return self._attend(made)

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

    def _distance(self, attention: Attention[Any], shift: int | Tensor) -> Tensor:
        """How far each key lies behind a position's own, int64 of dims (1 or B, 1, S, L)."""
        queries, keys = attention.q.dims[2], attention.k.dims[2]
        rows = self.reshape(self.arange(queries), (1, 1, queries, 1))
        columns = self.reshape(self.arange(keys), (1, 1, 1, keys))
        distance: Tensor = columns - rows - shift
        return distance

    def _position_bias(self, attention: Attention[Any], shift: int | Tensor, wide: DType) -> Tensor:
        """The numbers that are added to the scores of all keys: ALiBi's, and -inf for keys outside the
        window."""
        distance = self._distance(attention, shift)
        slopes, inside = attention.slopes, self._inside(attention, distance)
        added: Any = 0.0 if slopes is None else self._alibi(slopes, distance, wide)
        return added if inside is None else self.astype(self.where(inside, added, -math.inf), wide)

    def _alibi(self, slopes: Sequence[float], distance: Tensor, wide: DType) -> Tensor:
        """The numbers that ALiBi adds to the scores of all keys."""
        numbers = [self.full((1, 1, 1, 1), -slope, wide) for slope in slopes]
        return self.concatenate(numbers, axis=1) * self.astype(self.abs(distance), wide)

    def _inside(self, attention: Attention[Any], distance: Tensor) -> Tensor | None:
        """Whether each key is in the window; None if all are."""
        left, right = window_of(attention)
        found: Tensor | None = None
        if right is not None:
            found = distance <= right
        if left is not None:
            after = distance >= -left
            found = after if found is None else self.logical_and(found, after)
        return found

    def _attend_by_products(
        self, attention: Attention[Any], shift: int | Tensor, score: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Attention by products and a softmax, with scores that the caller changes."""
        q, k, v = attention.q, attention.k, attention.v
        (batch, heads, rows, features), (_, groups, columns, _) = q.dims, k.dims
        shared = rows * heads // max(1, groups)  # rows of a group; there may be none
        wide, distance = attention.compute((q.dtype,)), self._distance(attention, shift)
        by_group = self.reshape(q, (batch, groups, shared, features))
        products = self.matmul(by_group, self.transpose(k, (0, 1, 3, 2)))
        dims = (batch, heads, rows, columns)
        scores = self.astype(self.reshape(products, dims), wide) * attention.effective_scale(features)
        if attention.slopes is not None:
            scores = scores + self._alibi(attention.slopes, distance, wide)
        if attention.bias is not None:
            scores = scores + attention.bias
        changed = score(scores)
        if not isinstance(changed, Tensor):
            raise InvalidRequest(
                field="score",
                value=changed,
                problem="is what the function returned, and no tensor",
                fix="have it return the scores to use",
            )
        self._own("score", changed)
        if changed.dims != dims or not changed.dtype.is_floating:
            raise InvalidRequest(
                field="score",
                value=changed.dims,
                problem="gives no scores of the dims that it got",
                fix=f"give floats of dims {dims}",
            )
        weights = self._weights(self.astype(changed, wide), self._visible(attention, distance))
        if attention.dropout:
            assert attention.state is not None, "that has been checked"
            weights = self.dropout(weights, attention.dropout, attention.state)
        mixed = self.matmul(self.reshape(self.astype(weights, q.dtype), (batch, groups, shared, columns)), v)
        return self.astype(self.reshape(mixed, (batch, heads, rows, v.dims[3])), q.dtype)

    def _visible(self, attention: Attention[Any], distance: Tensor) -> Tensor | None:
        """Whether a position sees a key; None if each sees all."""
        found, batch = self._inside(attention, distance), attention.q.dims[0]
        sides = ((attention.lengths_q, 2, attention.q), (attention.lengths_kv, 3, attention.k))
        for lengths, axis, of in sides:
            if lengths is None:
                continue
            dims = [1, 1, 1, 1]
            dims[axis] = of.dims[2]
            place = self.reshape(self.arange(of.dims[2]), tuple(dims))
            counts = place < self.reshape(self.astype(lengths, DType.INT64), (batch, 1, 1, 1))
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

    def _project(
        self,
        given: tuple[Tensor, Tensor, Tensor],
        weights: Mapping[str, Tensor],
        heads: int,
        batch_first: bool,
    ) -> tuple[Tensor, ...]:
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
        heads = as_plain(heads)
        for name, matrix in zip(names, matrices, strict=True):
            if not is_whole(heads) or heads < 1 or matrix.rank != 2 or matrix.dims[0] % heads:
                rows = f"the {matrix.dims[0]} rows of each projection" if matrix.rank == 2 else "the rows"
                raise InvalidRequest(
                    field="heads",
                    value=heads,
                    problem=f"does not divide {rows} in {name}, of dims {weights[name].dims}",
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
        return tuple(made)


def _check_weights(g: AttentionFunctions, weights: Mapping[str, Tensor]) -> None:
    require_mapping("weights", weights, "names to tensors", "name them as PyTorch's parameters")
    apart = not weights.keys().isdisjoint(_APART)
    needed = {"out_proj.weight", *(_APART if apart else ("in_proj_weight",))}
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
