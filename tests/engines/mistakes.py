"""Engines with mistakes, for tests of what the fuzzer of operations notices."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from cudnn_actor.engines.cpu import CpuEngine
from cudnn_actor.engines.cpu.exact.evaluation import EvaluatedPlan, Evaluation, NumPy, exact
from cudnn_actor.engines.cpu.rounding import clip, rounding_to
from cudnn_actor.protocol import DType, TensorSpec, UnsupportedGraph
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.operations import (
    FUNCTIONS,
    AdaptiveWindow,
    ArgReduction,
    AvgPool,
    Coordinates,
    Gather,
    GatherND,
    GroupedMatMul,
    GroupedMatMulBackwardWeights,
    GroupNorm,
    LayerNorm,
    LocalResponseNorm,
    MatMul,
    MaxPool,
    NearestRounding,
    Node,
    Pointwise,
    PointwiseMode,
    RandomBernoulli,
    RandomNormal,
    RandomUniform,
    Reduction,
    ReductionMode,
    ScatterElements,
    ScatterReduction,
    Softmax,
    TopK,
    Window,
)

__all__ = [
    "AsTheyAre",
    "ByDefinition",
    "FirstOfBatch",
    "FirstWins",
    "FromTheStart",
    "InHalf",
    "InSingle",
    "InTF32",
    "LastOfEqualElements",
    "LastOfEqualPlaces",
    "LastOfEquals",
    "LosingNaN",
    "Misreading",
    "Misrunning",
    "NaNLast",
    "NextGroup",
    "NextOffset",
    "NoCarry",
    "NoNaN",
    "OnePassNorm",
    "OtherRows",
    "OtherSide",
    "Refusing",
    "Saturating",
    "ShortSums",
    "Store",
    "SumsInHalf",
    "Unshifted",
    "Wrapping",
    "attribute",
    "computed_in_half",
    "elsewhere",
    "first_input_zeroed",
    "gaps_overwritten",
    "inputs_swapped",
    "instead",
    "lazy",
    "moved",
    "next_number",
    "one_value_missing",
    "opened",
    "other_modes",
    "other_reduction",
    "rounded_down",
    "transposed",
    "truncated",
]


Store = Callable[[np.ndarray, np.ndarray], None]


class ByDefinition(CpuEngine):
    """The CPU engine with other arithmetic.

    Parameters
    ----------
    change
        Changes an operation.
    single
        Compute in float32 what has no float64 operand.
    store
        Stores results in an array; None to round them.
    """

    def __init__(
        self,
        change: Callable[[Any], Any] = lambda operation: operation,
        *,
        single: bool = False,
        store: Store | None = None,
    ) -> None:
        super().__init__(exact=True)  # its own plans take little to build: another takes their place
        self._change, self._single, self._store = change, single, store

    def changes(self, operation: Any) -> bool:
        """Whether an operation is computed in another way than by its definition."""
        return self._single or self._store is not None or bool(self._change(operation) != operation)

    def build(self, graph: OperationGraph, *, workspace_limit: int | None) -> Any:
        plan = super().build(graph, workspace_limit=workspace_limit)
        (operation,) = graph.operations
        other = _Other(plan.tag, graph)
        other.__dict__.update(changed=self._change(operation), single=self._single, store=self._store)
        return other


class _Other(EvaluatedPlan):
    changed: Node
    single: bool
    store: Store | None

    def bind(self, workspace: Any) -> Evaluation:
        return _OtherEvaluation(self.graph, (frozenset(),), self)


class _OtherEvaluation(Evaluation):
    def __init__(self, graph: OperationGraph, last: Any, plan: _Other) -> None:
        super().__init__(graph, last)
        self.__dict__["plan"] = plan

    def _run(self, xp: NumPy, operation: Node, bound: Any, values: dict[int, Any]) -> None:
        plan: _Other = self.__dict__["plan"]
        wide = any(bound[uid].dtype == np.float64 for uid in operation.reads)
        floats = np.float32 if plan.single and not wide else np.float64
        for uid in operation.reads:
            values[uid] = exact(bound[uid])
            if values[uid].dtype == np.float64:
                values[uid] = values[uid].astype(floats)
        for uid, result in self.graph.evaluate(xp, plan.changed, values).items():
            _store(bound[uid], np.array(result), plan.store)


def _store(into: np.ndarray, result: np.ndarray, store: Store | None) -> None:
    if into.dtype.kind in "iub":
        into[...] = clip(result, into.dtype)
    else:
        (store or rounding_to(into.dtype))(into, result.astype(np.float64))


class Misreading(CpuEngine):
    """The CPU engine with a mistake in what it reads back of results."""

    def __init__(self, mistake: Callable[[np.ndarray], None]) -> None:
        super().__init__(exact=True)
        self._mistake = mistake

    def read(self, src: np.ndarray, into: np.ndarray | None = None) -> np.ndarray:
        values = super().read(src, into)
        if values.dtype != np.uint8 or values.ndim > 1:  # the bytes of a whole buffer
            self._mistake(values)
        return values


class Misrunning(CpuEngine):
    """The CPU engine, which does something else with the buffers."""

    def __init__(self, mistake: Callable[[Any, list[np.ndarray], Callable[..., None]], None]) -> None:
        super().__init__(exact=True)
        self._mistake = mistake

    def execute(self, plan: Any, buffers: Sequence[np.ndarray], scalars: Sequence[float]) -> None:
        self._mistake(plan, [*buffers], lambda given: super(Misrunning, self).execute(plan, given, scalars))


class Refusing(CpuEngine):
    def build(self, graph: OperationGraph, *, workspace_limit: int | None) -> Any:
        raise UnsupportedGraph(engine="cpu", digest=graph.digest(), detail="it will not")


def one_value_missing(values: np.ndarray) -> None:
    values.flat[values.size // 2] = 78 if values.dtype.kind in "iu" else np.nan


def computed_in_half(values: np.ndarray) -> None:
    if values.dtype in (np.float32, np.float64):
        with np.errstate(over="ignore"):
            values[...] = values.astype(np.float16)


def next_number(values: np.ndarray) -> None:
    """One unit in the last place too large."""
    if values.dtype.kind not in "iub" and values.dtype.itemsize == 2:
        values[...] = np.nextafter(values, np.full_like(values, np.inf))


def lazy(plan: Any, buffers: list[np.ndarray], execute: Callable[..., None]) -> None:
    del plan, buffers, execute


def inputs_swapped(plan: Any, buffers: list[np.ndarray], execute: Callable[..., None]) -> None:
    first, second = buffers[:2]
    if _inputs(plan, buffers) > 1 and (first.shape, first.dtype) == (second.shape, second.dtype):
        buffers[:2] = second, first
    execute(buffers)


def first_input_zeroed(plan: Any, buffers: list[np.ndarray], execute: Callable[..., None]) -> None:
    execute(buffers)
    buffers[0].fill(0)


def _inputs(plan: Any, buffers: list[np.ndarray]) -> int:
    """How many of the buffers are read. A pointwise operation's plan may not say: it has one result."""
    return len(plan.graph.operations[0].reads) if hasattr(plan, "graph") else len(buffers) - 1


def gaps_overwritten(plan: Any, buffers: list[np.ndarray], execute: Callable[..., None]) -> None:
    """As if each output were packed memory."""
    for number in range(_inputs(plan, buffers), len(buffers)):
        out = buffers[number]
        reach = sum((size - 1) * step for size, step in zip(out.shape, out.strides, strict=True))
        span = np.lib.stride_tricks.as_strided(out, (1 + reach // out.itemsize,), (out.itemsize,))
        span.fill(1)
    execute(buffers)


def transposed(plan: Any, buffers: list[np.ndarray], execute: Callable[..., None]) -> None:
    """An output's elements as they lie in memory, taken for another order of dims."""
    execute(buffers)
    for number in range(_inputs(plan, buffers), len(buffers)):
        out = buffers[number]
        out[...] = out.T.reshape(out.shape).copy()


def truncated(into: np.ndarray, result: np.ndarray) -> None:
    """Half types rounded towards zero: the upper half of a float32, say."""
    rounding_to(into.dtype)(into, result.copy())
    if into.dtype.itemsize == 2:
        away = np.abs(into.astype(np.float64)) > np.abs(result)
        into[away] = np.nextafter(into[away], np.zeros_like(into[away]))


def attribute(name: str, other: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Changes an attribute of the operations that have it."""

    def change(operation: Any) -> Any:
        if not hasattr(operation, name):
            return operation
        return msgspec.structs.replace(operation, **{name: other(getattr(operation, name))})

    return change


def moved(window: Any) -> Any:
    """Windows begin an element earlier, as many of them as before."""
    if isinstance(window, AdaptiveWindow) or not window.post_padding[0]:
        return window
    pre, post = window.pre_padding, window.post_padding
    return msgspec.structs.replace(
        window, pre_padding=(pre[0] + 1, *pre[1:]), post_padding=(post[0] - 1, *post[1:])
    )


class OnePassNorm(LayerNorm[int], frozen=True, kw_only=True):
    """The variance as the difference of two large numbers, in float32."""

    def evaluate(self, xp: Any, values: Any, specs: Any) -> dict[str, Any]:
        x = values["x"].astype(np.float32)
        axes = tuple(range(self.axis % x.ndim, x.ndim))
        mean = x.mean(axis=axes, keepdims=True)
        variance = (x * x).mean(axis=axes, keepdims=True) - mean * mean
        inverse = 1 / np.sqrt(variance + self.epsilon)
        y = (x - mean) * inverse * values.get("scale", 1.0) + values.get("bias", 0.0)
        return {"y": y, "mean": mean, "inverse_deviation": inverse}


class NextGroup(GroupNorm[int], frozen=True, kw_only=True):
    """The scales of a group's channels in the wrong order."""

    def evaluate(self, xp: Any, values: Any, specs: Any) -> dict[str, Any]:
        return super().evaluate(xp, {n: v[::-1] if v.ndim == 1 else v for n, v in values.items()}, specs)


class OtherSide(LocalResponseNorm[int], frozen=True, kw_only=True):
    """Of an even window, the larger half before a channel."""

    @property
    def reach(self) -> tuple[int, int]:
        before, after = super().reach
        return after, before


class LastOfEquals(MaxPool[int], frozen=True, kw_only=True):
    """The index of the last of a window's equal elements."""

    def evaluate(self, xp: Any, values: Any, specs: Any) -> dict[str, Any]:
        best, window = values["x"], self.window
        index = np.arange(best.size).reshape(best.shape)
        for axis in reversed(range(window.spatial_dims)):
            count = specs["y"].dims[2 + axis]
            seen = (window.elements_by_place(xp, axis, a, v, count) for a, v in ((best, 0), (index, -1)))
            (best, index), *others = zip(*seen, strict=True)
            for value, place in others:
                taken = (place >= 0) & ((index < 0) | ~(value < best))
                best, index = np.where(taken, value, best), np.where(taken, place, index)
        return {"y": best, "index": index}


class NoNaN(MaxPool[int], frozen=True, kw_only=True):
    """NaN is smaller than any number."""

    def evaluate(self, xp: Any, values: Any, specs: Any) -> dict[str, Any]:
        x = values["x"]
        return super().evaluate(
            xp, {"x": np.where(np.isnan(x), -math.inf, x) if x.dtype.kind == "f" else x}, specs
        )


class InHalf(AvgPool[int], frozen=True, kw_only=True):
    """Sums rounded to float16 before they are divided."""

    def evaluate(self, xp: Any, values: Any, specs: Any) -> dict[str, Any]:
        whole = msgspec.structs.replace(self, include_padding=True)
        size = math.prod(self.window.size) if isinstance(self.window, Window) else 1
        counts = AvgPool.evaluate(self, xp, values, specs)["y"]
        sums = AvgPool.evaluate(whole, xp, values, specs)["y"] * size
        with np.errstate(all="ignore"):
            return {"y": np.where(sums == 0, counts, sums.astype(np.float16) * (counts / sums))}


class AsTheyAre(GroupedMatMul[int], frozen=True, kw_only=True):
    """Rows from one offset to the next, in any order of those; the last expert has all that are left."""

    def evaluate(self, xp: Any, values: Any, specs: Any) -> dict[str, Any]:
        offsets = np.maximum.accumulate(values["offsets"])
        offsets[-1] = len(values["tokens"])
        return super().evaluate(xp, values | {"offsets": offsets}, specs)


class OtherRows(GroupedMatMulBackwardWeights[int], frozen=True, kw_only=True):
    """The rows of an expert that has none are those of the one before."""

    def evaluate(self, xp: Any, values: Any, specs: Any) -> dict[str, Any]:
        found = super().evaluate(xp, values, specs)["dweights"]
        for expert in range(1, len(found)):
            if not found[expert].any():
                found[expert] = found[expert - 1]
        return {"dweights": found}


class ShortSums(MatMul[int], frozen=True, kw_only=True):
    """The last product of each sum is missing."""

    def evaluate(self, xp: Any, values: Any, specs: Any) -> dict[str, Any]:
        cut = {"a": values["a"][..., :-1], "b": values["b"][..., :-1, :]}
        return super().evaluate(xp, cut, specs)


class InTF32(MatMul[int], frozen=True, kw_only=True):
    """Operands cut off to the 11 bits that TF32 has."""

    def evaluate(self, xp: Any, values: Any, specs: Any) -> dict[str, Any]:
        def cut(values: Any) -> Any:
            bits = values.astype(np.float32).view(np.uint32) & np.uint32(0xFFFFE000)
            return bits.view(np.float32).astype(np.float64)

        floats = values["a"].dtype.kind == "f"
        return super().evaluate(xp, {n: cut(v) if floats else v for n, v in values.items()}, specs)


class SumsInHalf(MatMul[int], frozen=True, kw_only=True):
    """Partial sums of two parts, each rounded to bfloat16."""

    def evaluate(self, xp: Any, values: Any, specs: Any) -> dict[str, Any]:
        if values["a"].dtype.kind != "f":
            return super().evaluate(xp, values, specs)
        parts = ({"a": values["a"][..., part::2], "b": values["b"][..., part::2, :]} for part in range(2))
        sums = (super(SumsInHalf, self).evaluate(xp, part, specs)["y"] for part in parts)
        return {"y": sum(each.astype(DType.BFLOAT16.numpy).astype(np.float64) for each in sums)}


class FirstOfBatch(MatMul[int], frozen=True, kw_only=True):
    """All of a batch is multiplied with its first b."""

    def evaluate(self, xp: Any, values: Any, specs: Any) -> dict[str, Any]:
        b = values["b"]
        first = b[(0,) * (b.ndim - 2)]
        return {
            "y": np.broadcast_to(super().evaluate(xp, values | {"b": first}, specs)["y"], specs["y"].dims)
        }


class LastOfEqualPlaces(ArgReduction[int], frozen=True, kw_only=True):
    """The last of equal elements."""

    def evaluate(self, xp: Any, values: Any, specs: Any) -> dict[str, Any]:
        x = np.flip(values["x"], self.axis)
        found = super().evaluate(xp, {"x": x}, specs)["y"]
        return {"y": x.shape[self.axis] - 1 - found}


class LosingNaN(Reduction[int], frozen=True, kw_only=True):
    """The largest of what is no NaN, as `fmax` finds it."""

    def evaluate(self, xp: Any, values: Any, specs: Any) -> dict[str, Any]:
        x = values["x"]
        if self.mode.selects and x.dtype.kind == "f":
            other = {ReductionMode.MIN: math.inf, ReductionMode.MAX: -math.inf}.get(self.mode, 0.0)
            x = np.where(np.isnan(x), other, x)
        return super().evaluate(xp, {"x": x}, specs)


class NextOffset(RandomUniform[int], frozen=True, kw_only=True):
    """The numbers one further."""

    def evaluate(self, xp: Any, values: Any, specs: Any) -> dict[str, Any]:
        return super().evaluate(xp, {"state": values["state"] + np.array([0, 1])}, specs)


class Wrapping(Gather[int], frozen=True, kw_only=True):
    """An index out of range counts modulo the dim."""

    def evaluate(self, xp: Any, values: Any, specs: Any) -> dict[str, Any]:
        size = values["x"].shape[self.axis]
        return super().evaluate(xp, values | {"indices": values["indices"] % size}, specs)


class FromTheStart(GatherND[int], frozen=True, kw_only=True):
    """No index counts from the end."""

    def evaluate(self, xp: Any, values: Any, specs: Any) -> dict[str, Any]:
        return super().evaluate(xp, values | {"indices": np.maximum(values["indices"], 0)}, specs)


class FirstWins(ScatterElements[int], frozen=True, kw_only=True):
    """Of several updates of one element the first."""

    def evaluate(self, xp: Any, values: Any, specs: Any) -> dict[str, Any]:
        if self.reduction is ScatterReduction.NONE:
            values = values | {name: np.flip(values[name], self.axis) for name in ("indices", "updates")}
        return super().evaluate(xp, values, specs)


class LastOfEqualElements(TopK[int], frozen=True, kw_only=True):
    """Of equal elements the higher place comes first."""

    def evaluate(self, xp: Any, values: Any, specs: Any) -> dict[str, Any]:
        x = np.flip(values["x"], self.axis)
        found = super().evaluate(xp, {"x": x}, specs)
        return found | {"indices": x.shape[self.axis] - 1 - found["indices"]}


class NaNLast(TopK[int], frozen=True, kw_only=True):
    """NaN is the last of the largest, too."""

    def evaluate(self, xp: Any, values: Any, specs: Any) -> dict[str, Any]:
        x = values["x"]
        if self.largest and x.dtype.kind == "f":
            x = np.where(np.isnan(x), -np.inf, x)
        return super().evaluate(xp, {"x": x}, specs)


def rounded_down(_: NearestRounding) -> NearestRounding:
    return NearestRounding.FLOOR


def elsewhere(coordinates: Coordinates) -> Coordinates:
    """Places that are often the same."""
    changed = {
        Coordinates.HALF_PIXEL_SYMMETRIC: Coordinates.HALF_PIXEL,
        Coordinates.PYTORCH_HALF_PIXEL: Coordinates.HALF_PIXEL,
        Coordinates.ASYMMETRIC: Coordinates.ALIGN_CORNERS,
    }
    return changed.get(coordinates, coordinates)


class InSingle(RandomNormal[int], frozen=True, kw_only=True):
    """Rounded to float32 first."""

    def evaluate(self, xp: Any, values: Any, specs: Any) -> dict[str, Any]:
        y = super().evaluate(xp, values, specs)["y"]
        return {"y": y.astype(np.float32).astype(np.float64)}


class NoCarry(RandomBernoulli[int], frozen=True, kw_only=True):
    """Blocks of 32 bits."""

    def evaluate(self, xp: Any, values: Any, specs: Any) -> dict[str, Any]:
        state = values["state"] & np.array([-1, (1 << 34) - 1])
        return super().evaluate(xp, {"state": state}, specs)


class Unshifted(Softmax[int], frozen=True, kw_only=True):
    """Exponentials of the elements themselves, which overflow, and vanish."""

    def evaluate(self, xp: Any, values: Any, specs: Any) -> dict[str, Any]:
        powers = np.exp(values["x"].astype(np.float32))
        y = powers / powers.sum(axis=self.axis, keepdims=True)
        return {"y": np.log(y) if self.log else y}


def other_modes(operation: Any) -> Any:
    """Functions of the same operands that are nearly the same."""
    swapped = {
        PointwiseMode.MOD: PointwiseMode.FMOD,
        PointwiseMode.GE: PointwiseMode.GT,
        PointwiseMode.GELU: PointwiseMode.GELU_TANH,
        PointwiseMode.CEIL: PointwiseMode.ROUND,
        PointwiseMode.LOGICAL_XOR: PointwiseMode.LOGICAL_OR,
        PointwiseMode.EXPM1: PointwiseMode.EXP,
        PointwiseMode.SINH: PointwiseMode.ASINH,
    }
    return msgspec.structs.replace(operation, mode=swapped.get(operation.mode, operation.mode))


class Saturating(Pointwise[int], frozen=True, kw_only=True):
    """Bits that are cut off saturate the result, and min and max ignore NaN."""

    def evaluate(self, xp: Any, values: Any, specs: Any) -> dict[str, Any]:
        floats = any(value.dtype.kind == "f" for value in values.values())
        if floats and self.mode in (PointwiseMode.MIN, PointwiseMode.MAX):
            values = dict(zip(values, np.broadcast_arrays(*values.values()), strict=True))
            a, b = values.values()
            values = {"a": np.where(a == a, a, b), "b": np.where(b == b, b, a)}  # noqa: PLR0124
        if not FUNCTIONS[self.mode].bits:
            return super().evaluate(xp, values, specs)
        wide = {"result": TensorSpec.packed(specs["result"].dims, DType.INT64)}
        return super().evaluate(xp, values, wide)


def other_reduction(reduction: ScatterReduction) -> ScatterReduction:
    """Sums for the largest, and updates for sums."""
    changed = {
        ScatterReduction.MAX: ScatterReduction.ADD,
        ScatterReduction.ADD: ScatterReduction.NONE,
        ScatterReduction.MUL: ScatterReduction.NONE,
    }
    return changed.get(reduction, reduction)


def instead(kind: type[Any], other: type[Any]) -> Callable[[Any], Any]:
    """One class of operations computed as another."""

    def change(operation: Any) -> Any:
        if type(operation) is not kind:
            return operation
        return other(**{name: getattr(operation, name) for name in kind.__struct_fields__})

    return change


def opened(engine: CpuEngine) -> CpuEngine:
    engine.open()
    return engine
