"""Attention as a GPU computes it, in NumPy; and with mistakes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import msgspec
import numpy as np

from cudnn_actor.engines.cpu.rounding import rounding_to
from cudnn_actor.protocol import DType
from cudnn_actor.protocol.operations import Attention, AttentionBackward

__all__ = ["MISTAKES", "fused"]

Arrays = dict[str, Any]
_LOG2_E = math.log2(math.e)


def fused(tile: int, weights: DType | None = None) -> Callable[[Any], Any]:
    """Changes attention to a fused one: online softmax over tiles of so many keys, and half types inside.

    `weights`: the type that weights and gradients of scores are rounded to, where operands are float16; None
    for theirs.
    """

    class Forward(_Fused, Attention[int], frozen=True, kw_only=True):
        keys = tile
        rounded_to = weights

    class Backward(_FusedBackward, AttentionBackward[int], frozen=True, kw_only=True):
        keys = tile
        rounded_to = weights

    return _instead(Forward, Backward)


def _mistaken(mistake: Callable[[Any, Arrays], tuple[Any, Arrays]]) -> Callable[[Any], Any]:
    """Changes attention to one that is computed on what a mistake makes of the operation and its inputs."""

    class Forward(Attention[int], frozen=True, kw_only=True):
        def evaluate(self, xp: Any, values: Mapping[str, Any], specs: Any) -> Arrays:
            operation, changed = mistake(self, {**values})
            return Attention.evaluate(operation, xp, changed, specs)

    class Backward(AttentionBackward[int], frozen=True, kw_only=True):
        def evaluate(self, xp: Any, values: Mapping[str, Any], specs: Any) -> Arrays:
            operation, changed = mistake(self, {**values})
            return AttentionBackward.evaluate(operation, xp, changed, specs)

    return _instead(Forward, Backward)


def _instead(forward: type[Any], backward: type[Any]) -> Callable[[Any], Any]:
    def change(operation: Any) -> Any:
        kind = forward if isinstance(operation, Attention) else backward
        return kind(**{name: getattr(operation, name) for name in operation.__struct_fields__})

    return change


class _Tiled:
    """What both passes share. Half types if heads are multiples of 8 features, else what q has."""

    keys: ClassVar[int]
    rounded_to: ClassVar[DType | None]

    def _tiles(self: Any, values: Mapping[str, Any]) -> Any:
        """Keys of a tile, their scores in base 2, which are seen, and the factors of their weights."""
        q, k = values["q"], values["k"]
        size, scale = q.shape[1] // k.shape[1], q.dtype.type(self.effective_scale(q.shape[3]))
        every = slice(0, q.shape[0]), slice(0, q.shape[1]), slice(None), slice(0, q.shape[2])
        _, all_seen = self._scores(np, values, every)
        added = np.asarray(self._added_scores(np, values, every), q.dtype)
        added = np.broadcast_to(added, (*q.shape[:3], k.shape[2]))
        factors = np.broadcast_to(np.asarray(self._factors(np, values, every), q.dtype), added.shape)
        for first in range(0, k.shape[2], self.keys):
            keys = slice(first, first + self.keys)
            # In another order than the reference's: backwards, and in two halves.
            half = q.shape[3] // 2
            of_k = np.repeat(k[:, :, keys], size, axis=1).swapaxes(2, 3)
            scores = q[..., half:] @ of_k[..., half:, :] + q[..., :half] @ of_k[..., :half, :]
            scores = scores * scale + added[..., keys]
            seen = np.broadcast_to(all_seen[..., keys], scores.shape)
            yield keys, scores * q.dtype.type(_LOG2_E), seen, factors[..., keys]

    def _rounded(self: Any, array: Any, values: Mapping[str, Any], dtype: DType) -> Any:
        odd = values["q"].shape[3] % 8 or values["v"].shape[3] % 8
        if odd or dtype not in (DType.FLOAT16, DType.BFLOAT16):
            return array
        to = self.rounded_to if self.rounded_to is not None and dtype is DType.FLOAT16 else dtype
        result = np.empty(array.shape, to.numpy)
        rounding_to(result.dtype)(result, array.astype(np.float64))
        return result.astype(np.float32)


def _power(exponents: Any) -> Any:
    """2 to a power, as wrong as a GPU's instruction for it: exact at 0, and without subnormal results."""
    found = np.exp2(exponents)
    if found.dtype == np.float32:
        wrong = np.where(np.arange(found.size).reshape(found.shape) % 3, 1 + 2.0**-22, 1 - 2.0**-22)
        found = np.where(exponents == 0, 1, found * wrong.astype(np.float32))
        found = np.where(found < 2.0**-126, 0, found).astype(np.float32)
    return found


class _Fused(_Tiled):
    def evaluate(self: Any, xp: Any, values: Mapping[str, Any], specs: Any) -> Arrays:
        del xp
        v, dtype = values["v"], specs["y"].dtype
        floats = values["q"].dtype
        largest = np.full((*values["q"].shape[:3], 1), -math.inf, floats)
        y, total = np.zeros((*largest.shape[:3], v.shape[3]), floats), np.zeros_like(largest)
        for keys, every, seen, factors in self._tiles(values):
            scores = np.where(seen, every, -math.inf)
            most = np.maximum(largest, scores.max(axis=3, keepdims=True))
            base = np.where(most == -math.inf, 0, most).astype(floats)
            weights, shrink = _power(scores - base), _power(largest - base)
            total = total * shrink + weights[..., ::-1].sum(axis=3, keepdims=True)
            of_v = np.repeat(v[:, :, keys], y.shape[1] // v.shape[1], axis=1)
            y = y * shrink + self._rounded(weights * factors, values, dtype) @ of_v
            largest = most
        statistics = np.where(total == 0, -math.inf, largest / floats.type(_LOG2_E) + np.log(total))
        return {"y": np.where(total == 0, 0, y / np.where(total == 0, 1, total)), "statistics": statistics}


class _FusedBackward(_Tiled):
    def evaluate(self: Any, xp: Any, values: Mapping[str, Any], specs: Any) -> Arrays:
        del xp
        q, k, v, dy = (values[name] for name in ("q", "k", "v", "dy"))
        dtype, size, floats = specs["dq"].dtype, q.shape[1] // k.shape[1], q.dtype.type
        scale = floats(self.effective_scale(q.shape[3]))
        apart = (dy * values["y"])[..., ::-1].sum(axis=3, keepdims=True)
        statistics = np.where(np.isfinite(values["statistics"]), values["statistics"], 0) * floats(_LOG2_E)
        dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
        slopes_of = []
        for keys, scores, seen, factors in self._tiles(values):
            weights = np.where(seen, _power(scores - statistics.astype(floats)), 0).astype(floats)
            of_k, of_v = (np.repeat(array[:, :, keys], size, axis=1) for array in (k, v))
            slopes = weights * (dy @ of_v.swapaxes(2, 3) * factors - apart)
            slopes_of.append(slopes)
            rounded = self._rounded(slopes * scale, values, dtype)
            dq += rounded @ of_k
            of_p = self._rounded(weights * factors, values, dtype).swapaxes(2, 3)
            for into, found in ((dk, rounded.swapaxes(2, 3) @ q), (dv, of_p @ dy)):
                heads = self._rounded(found, values, dtype) if size > 1 else found
                into[:, :, keys] = heads.reshape(*k.shape[:2], size, *heads.shape[2:]).sum(axis=2)
        found = {"dq": dq, "dk": dk, "dv": dv}
        if "dbias" in specs:
            summed = tuple(axis for axis in range(3) if specs["dbias"].dims[axis] == 1)
            every = self._rounded(np.concatenate(slopes_of, axis=3), values, dtype)
            found["dbias"] = every.sum(axis=summed, keepdims=True)
        return found


# Mistakes.


class _LaterKey(Attention[int], frozen=True, kw_only=True):
    def _scores(self, xp: Any, values: Mapping[str, Any], piece: Any) -> Any:
        scores, seen = Attention._scores(self, xp, values, piece)
        return scores, _one_more(seen) if self.causal or self.window_right is not None else seen


class _LaterKeyBackward(AttentionBackward[int], frozen=True, kw_only=True):
    def _scores(self, xp: Any, values: Mapping[str, Any], piece: Any) -> Any:
        scores, seen = AttentionBackward._scores(self, xp, values, piece)
        return scores, _one_more(seen) if self.causal or self.window_right is not None else seen


def _one_more(seen: Any) -> Any:
    """Each position that sees a key sees the next one too."""
    return seen | np.concatenate([seen[..., :1], seen[..., :-1]], axis=3)


def _other_scale(operation: Any, values: Arrays) -> tuple[Any, Arrays]:
    scale = 1 / values["q"].shape[3] if operation.scale is None else operation.scale
    return msgspec.structs.replace(operation, scale=scale), values


def _without(*names: str) -> Callable[[Any, Arrays], tuple[Any, Arrays]]:
    """Computed without a length, or as if other inputs were all 0."""

    def mistake(operation: Any, values: Arrays) -> tuple[Any, Arrays]:
        kept = {n: np.zeros_like(v) if n in names else v for n, v in values.items()}
        return operation, {n: v for n, v in kept.items() if n not in names or not n.startswith("lengths")}

    return mistake


def _changed(**changes: Any) -> Callable[[Any, Arrays], tuple[Any, Arrays]]:
    """Computed with other options."""

    def mistake(operation: Any, values: Arrays) -> tuple[Any, Arrays]:
        return msgspec.structs.replace(operation, **changes), values

    return mistake


def _next_state(operation: Any, values: Arrays) -> tuple[Any, Arrays]:
    return operation, values | ({"state": values["state"] + [0, 1]} if "state" in values else {})


def _other_group(operation: Any, values: Arrays) -> tuple[Any, Arrays]:
    """Neighbours among q's heads have different heads of k: h % G in the place of h // (H / G)."""
    groups, heads = values["k"].shape[1], values["q"].shape[1]
    order = np.argsort(np.arange(heads) % groups, kind="stable")
    moved = {n: values[n][:, order] for n in ("q", "dy", "y", "statistics") if n in values}
    return operation, values | moved


def _no_delta(operation: Any, values: Arrays) -> tuple[Any, Arrays]:
    return operation, values | ({"y": np.zeros_like(values["y"])} if "y" in values else {})


MISTAKES: dict[str, Callable[[Any], Any]] = {
    "causal off by one": _instead(_LaterKey, _LaterKeyBackward),
    "no square root": _mistaken(_other_scale),
    "bias ignored": _mistaken(_without("bias")),
    "lengths of keys ignored": _mistaken(_without("lengths_kv")),
    "lengths of queries ignored": _mistaken(_without("lengths_q")),
    "another group's keys": _mistaken(_other_group),
    "delta left out": _mistaken(_no_delta),
    "window ignored": _mistaken(_changed(window_left=None, window_right=None)),
    "slopes ignored": _mistaken(_changed(slopes=None)),
    "dropout one number further": _mistaken(_next_state),
    "nothing dropped": _mistaken(_changed(dropout=0.0)),
}
