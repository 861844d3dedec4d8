"""What cuDNN's frontend is known to build for sm_90, as graphs of its own. The builders are used in a child.

They are for operations that our own lowering does not give to cuDNN yet. Its rows in `claims` replace these.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from cudnn_actor.engines.cuda.library.libraries import libraries
from cudnn_actor.engines.cuda.plans.graphs import data_type
from cudnn_actor.protocol import DType

from .device import h200

__all__ = ["Claim", "build_claim", "claims", "planned"]

_HALVES = (DType.FLOAT16, DType.BFLOAT16)
_FLOATS = (DType.FLOAT32, *_HALVES)


class Claim(NamedTuple):
    """A graph, by what makes it, and whether cuDNN has a plan for it."""

    make: Callable[..., Any]
    arguments: Mapping[str, Any]
    builds: bool = True


@functools.cache
def claims() -> dict[str, Claim]:
    """Every claim, by its name."""
    found: dict[str, Claim] = {}
    for claim in itertools.chain(_norms(), _attentions()):
        words = (f"{name}={value}" for name, value in claim.arguments.items())
        found["-".join([claim.make.__name__, *words]).replace(" ", "")] = claim
    return found


def _norms() -> Iterator[Claim]:
    for kind, dtype, length in itertools.product(("layernorm", "rmsnorm"), _FLOATS, (97, 768, 770, 65536)):
        of = {"kind": kind, "dtype": dtype, "length": length}
        yield Claim(norm, of | {"training": True})
        yield Claim(norm_backward, of)
        if length == 768:
            yield Claim(norm, of | {"training": False})


def _attentions() -> Iterator[Claim]:
    for dtype, make in itertools.product(_HALVES, (sdpa, sdpa_backward)):
        of: dict[str, Any] = {"dtype": dtype}
        back = make is sdpa_backward
        for head in (8, 32, 40, 64, 72, 96, 128, 192, 256):
            yield Claim(make, of | {"head": head})
        yield Claim(make, of | {"head": 512}, builds=not back)
        yield Claim(make, of | {"head": 12}, builds=False)
        for lengths in ((7, 5), (77, 77), (197, 197), (1500, 1500), (4096, 77)):
            yield Claim(make, of | {"lengths": lengths})
            yield Claim(make, of | {"lengths": lengths, "padding": True})
        yield Claim(make, of | {"lengths": (1, 512)}, builds=True)
        yield Claim(make, of | {"lengths": (1, 1)}, builds=not back)
        choices: tuple[dict[str, Any], ...] = (
            {"causal": True},
            {"bottom_right": True, "lengths": (128, 512)},
            {"causal": True, "padding": True},
            {"heads": (8, 2)},
            {"heads": (8, 1)},
            {"heads": (8, 2), "causal": True, "padding": True},
            *({"bias": bias} for bias in ("1hss", "bhss", "11ss", "b11s")),
            {"bias": "1hss", "causal": True},
            {"bias": "1hss", "padding": True},
            {"packed": "bshd"},
        )
        for options in choices:
            yield Claim(make, of | options)
    for head, bias in itertools.product((64, 128, 256), ("", "1hss")):
        of = {"dtype": DType.BFLOAT16, "head": head, "bias": bias, "deterministic": True}
        yield Claim(sdpa_backward, of)
    yield Claim(sdpa_backward, {"dtype": DType.FLOAT32}, builds=False)


def build_claim(name: str) -> str:
    """Build the first of cuDNN's candidates that builds; returns its name. Raises cuDNN's errors."""
    claim = claims()[name]
    graph = claim.make(**claim.arguments)
    planned(graph)
    errors: list[str] = []
    for index in range(graph.get_execution_plan_count()):
        try:
            graph.build_plan_at_index(index)
        except (RuntimeError, libraries().cudnn.cudnnGraphNotSupportedError) as error:
            errors.append(str(error))
        else:
            return str(graph.get_plan_name_at_index(index))
    raise RuntimeError("\n".join(errors))


def planned(graph: Any) -> None:
    """Ask for the candidates of a frontend graph."""
    modes = libraries().cudnn.heur_mode
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([modes.A, modes.FALLBACK])


def _graph(dtype: DType) -> Any:
    return libraries().cudnn.pygraph(
        io_data_type=data_type(dtype),
        intermediate_data_type=data_type(DType.FLOAT32),
        compute_data_type=data_type(DType.FLOAT32),
        **h200()._asdict(),
    )


def _packed(dims: tuple[int, ...], order: str = "bhsd") -> list[int]:
    """Strides of a tensor whose dims lie in that order, the slowest first."""
    strides, step = [0] * len(dims), 1
    axes = ["bhsd".index(letter) for letter in order] if len(dims) == 4 else range(len(dims))
    for axis in reversed(axes):
        strides[axis], step = step, step * dims[axis]
    return strides


def _tensor(graph: Any, dims: tuple[int, ...], dtype: DType, order: str = "bhsd") -> Any:
    return graph.tensor(dim=list(dims), stride=_packed(dims, order), data_type=data_type(dtype))


def _output(tensor: Any, dtype: DType) -> None:
    tensor.set_output(True).set_data_type(data_type(dtype))


def norm(kind: str, dtype: DType, length: int, training: bool) -> Any:
    """A layer norm or RMS norm of rows, with statistics if it is for training."""
    graph, phases = _graph(dtype), libraries().cudnn.norm_forward_phase
    x, weights = (128, length, 1, 1), (1, length, 1, 1)
    epsilon = graph.tensor(
        dim=[1] * 4, stride=[1] * 4, data_type=data_type(DType.FLOAT32), is_pass_by_value=True
    )
    y, *statistics = getattr(graph, kind)(
        norm_forward_phase=phases.TRAINING if training else phases.INFERENCE,
        input=_tensor(graph, x, dtype),
        scale=_tensor(graph, weights, DType.FLOAT32),
        bias=_tensor(graph, weights, DType.FLOAT32) if kind == "layernorm" else None,
        epsilon=epsilon,
    )
    _output(y, dtype)
    for statistic in filter(None, statistics):
        _output(statistic, DType.FLOAT32)
    return graph


def norm_backward(kind: str, dtype: DType, length: int) -> Any:
    """The gradients of a layer norm or RMS norm of rows."""
    graph, layer = _graph(dtype), kind == "layernorm"
    x, weights, statistics = (128, length, 1, 1), (1, length, 1, 1), (128, 1, 1, 1)
    others = {"mean": _tensor(graph, statistics, DType.FLOAT32)} if layer else {"has_dbias": False}
    dx, *sums = getattr(graph, f"{kind}_backward")(
        grad=_tensor(graph, x, dtype),
        input=_tensor(graph, x, dtype),
        scale=_tensor(graph, weights, DType.FLOAT32),
        inv_variance=_tensor(graph, statistics, DType.FLOAT32),
        **others,
    )
    _output(dx, dtype)
    for total in filter(None, sums):
        _output(total, DType.FLOAT32)
    return graph


class _Attention:
    """The operands and options of an attention, shared by both directions."""

    def __init__(
        self,
        *,
        dtype: DType,
        head: int = 64,
        lengths: tuple[int, int] = (512, 512),
        heads: tuple[int, int] = (8, 8),
        packed: str = "bhsd",
        bias: str = "",
        causal: bool = False,
        bottom_right: bool = False,
        padding: bool = False,
    ) -> None:
        self.graph = graph = _graph(dtype)
        self._order, self._dtype, batch = packed, dtype, 2
        self.q_dims = (batch, heads[0], lengths[0], head)
        self.k_dims = (batch, heads[1], lengths[1], head)
        self.operands = {"q": self.tensor(self.q_dims), "k": self.tensor(self.k_dims)}
        self.operands["v"] = self.tensor(self.k_dims)
        self.options: dict[str, Any] = {"attn_scale": 0.125}
        if causal:
            self.options["use_causal_mask"] = True
        if bottom_right:
            alignment = libraries().cudnn.diagonal_alignment
            self.options |= {
                "diagonal_alignment": alignment.BOTTOM_RIGHT,
                "diagonal_band_right_bound": 0,
            }
        if padding:
            self.options["use_padding_mask"] = True
            for name in ("seq_len_q", "seq_len_kv"):
                self.options[name] = _tensor(graph, (batch, 1, 1, 1), DType.INT32)
        if bias:
            whole = (batch, heads[0], *lengths)
            self.bias_dims = tuple(1 if c == "1" else size for c, size in zip(bias, whole, strict=True))
            self.options["bias"] = _tensor(graph, self.bias_dims, dtype)

    def tensor(self, dims: tuple[int, ...]) -> Any:
        return _tensor(self.graph, dims, self._dtype, self._order)

    def output(self, tensor: Any, dims: tuple[int, ...]) -> None:
        _output(tensor, self._dtype)
        tensor.set_dim(list(dims)).set_stride(_packed(dims, self._order))


def sdpa(**options: Any) -> Any:
    """An attention, with its statistics."""
    of = _Attention(**options)
    y, statistics = of.graph.sdpa(**of.operands, generate_stats=True, **of.options)
    of.output(y, of.q_dims)
    _output(statistics, DType.FLOAT32)
    return of.graph


def sdpa_backward(*, deterministic: bool = False, **options: Any) -> Any:
    """The gradients of an attention, with the bias's if there is one."""
    of = _Attention(**options)
    given = {name: of.tensor(of.q_dims) for name in ("o", "dO")}
    given["stats"] = _tensor(of.graph, (*of.q_dims[:3], 1), DType.FLOAT32)
    if "bias" in of.options:
        given["dBias"] = _tensor(of.graph, of.bias_dims, options["dtype"])
        given["dBias"].set_output(True)
    if deterministic:
        of.options["use_deterministic_algorithm"] = True
    dq, dk, dv = of.graph.sdpa_backward(**of.operands, **given, **of.options)
    of.output(dq, of.q_dims)
    of.output(dk, of.k_dims)
    of.output(dv, of.k_dims)
    return of.graph
