"""Problems as text: a convolution as a line of `name=value`, or any graph as a token.

    conv_fwd x=32x64x56x56 w=64x64x3x3 pad=1 stride=1 dtype=bfloat16 layout=NHWC

`x` and `w` are the dims of input and filter in all three kinds; the other dims are computed. The error of any
operation ends with such a token.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

from cudnn_actor.cli.user_error import UserError
from cudnn_actor.protocol import (
    Activation,
    BufferRef,
    ConvBwdData,
    ConvBwdFilter,
    ConvFwd,
    ConvSpec,
    CudnnActorError,
    Epilogue,
    Numerics,
    OperationGraph,
    TensorSpec,
)
from cudnn_actor.protocol.graphs.reproduction import graph_of
from cudnn_actor.protocol.messages.lowering import lower
from cudnn_actor.protocol.messages.messages import Compute

__all__ = ["FORM", "Problem", "read_problem", "read_problems"]

T = TypeVar("T")

FORM = "conv_fwd x=32x64x56x56 w=64x64x3x3 pad=1 dtype=bfloat16 layout=NHWC"
_WRITES = {"conv_fwd": "y", "conv_bwd_data": "x", "conv_bwd_filter": "w"}
"""The operand that each kind writes: y, or the gradient of x or w."""
_DEFAULTS = {
    "x": "",
    "w": "",
    "pad": "0",
    "post": "",
    "stride": "1",
    "dilation": "1",
    "groups": "1",
    "dtype": "float32",
    "out": "",
    "layout": "NCHW",
    "bias": "no",
    "activation": "identity",
    "alpha": "1",
    "beta": "0",
    "tf32": "no",
    "deterministic": "no",
}
_EXAMPLES = {"x": "32x64x56x56", "w": "64x64x3x3"}
_FORWARD_ONLY = ("bias", "activation")


class Problem(NamedTuple):
    """A problem's text, and the graph that it describes."""

    text: str
    graph: OperationGraph


def read_problems(lines: Iterable[str]) -> Iterator[Problem]:
    """One problem per line; empty lines and lines that begin with `#` are skipped. Raises `UserError`."""
    for number, line in enumerate(lines, start=1):
        text = line.strip()
        if text and not text.startswith("#"):
            try:
                yield read_problem(text)
            except UserError as error:
                raise UserError(f"line {number}: {error}") from error


def read_problem(text: str) -> Problem:
    """A problem in either form. Raises `UserError`, which names the word that is wrong."""
    text = " ".join(text.split())
    kind, _, rest = text.partition(" ")
    try:
        if kind in _WRITES:
            return Problem(text, lower(_message(kind, _Words(rest))).graph)
        if re.fullmatch(r"[\w-]{20,}", text):
            return Problem(text, graph_of(text))
    except CudnnActorError as error:
        raise UserError(f"{text[:100]}: {error}") from error
    raise UserError(
        f"{text[:100]!r} is not a problem; only convolutions can be written by hand, as in `{FORM}`; "
        "for any other operation, give an error's token"
    )


class _Words:
    """The `name=value` words of a problem; each must be read once."""

    def __init__(self, text: str) -> None:
        self._given = dict(_DEFAULTS)
        self.named: set[str] = set()
        for word in text.split():
            name, equals, value = word.partition("=")
            if name not in _DEFAULTS or not equals or not value or name in self.named:
                names = " ".join(f"{name}=" for name in _DEFAULTS)
                raise _wrong(word, "is not a known name, or is given twice", names)
            self._given[name] = value
            self.named.add(name)

    def text(self, name: str) -> str:
        return self._given[name]

    def dims(self, name: str) -> tuple[int, ...]:
        """Whole numbers separated by x."""
        value = self._given[name]
        if not value:
            raise _wrong(f"{name}=", "is missing", f"{name}={_EXAMPLES[name]}")
        if re.fullmatch(r"\d{1,9}(x\d{1,9})*", value) is None:
            raise _wrong(
                f"{name}={value}",
                "must be whole numbers separated by x",
                f"{name}={_EXAMPLES.get(name, '1')}",
            )
        return tuple(map(int, value.split("x")))

    def spread(self, name: str, count: int) -> tuple[int, ...]:
        """One number for each of `count` dims, or one for all."""
        values = self.dims(name)
        return values * count if len(values) == 1 else values

    def number(self, name: str) -> float:
        return self._read(name, float, "is not a number")

    def yes(self, name: str) -> bool:
        return self._read(name, {"yes": True, "no": False}.__getitem__, "is neither yes nor no")

    def activation(self) -> Activation:
        return self._read("activation", Activation, f"must be one of {', '.join(Activation)}")

    def _read(self, name: str, read: Callable[[str], T], problem: str) -> T:
        value = self._given[name]
        try:
            return read(value)
        except (ValueError, KeyError):
            raise _wrong(f"{name}={value}", problem, f"{name}={_DEFAULTS[name]}") from None


def _message(kind: str, words: _Words) -> Compute:
    x, w, conv = words.dims("x"), words.dims("w"), _conv(words)
    spare = words.named.intersection(_FORWARD_ONLY)
    if spare and kind != "conv_fwd":
        raise _wrong(" ".join(sorted(spare)), f"does not apply to {kind}", "leave it out")
    dtype = words.text("dtype")
    result = words.text("out") or dtype
    operands = {"x": x, "w": w, "y": conv.output_dims(x, w)}
    dtypes = dict.fromkeys(operands, dtype) | {_WRITES[kind]: result}
    refs = {name: _reference(operands[name], dtypes[name], words) for name in operands}
    common: dict[str, Any] = {
        "conv": conv,
        "alpha": words.number("alpha"),
        "beta": words.number("beta"),
        "numerics": Numerics(tf32=words.yes("tf32"), deterministic=words.yes("deterministic")),
    }
    if kind == "conv_bwd_data":
        return ConvBwdData(dy=refs["y"], w=refs["w"], dx=refs["x"], **common)
    if kind == "conv_bwd_filter":
        return ConvBwdFilter(x=refs["x"], dy=refs["y"], dw=refs["w"], **common)
    bias = _reference((1, w[0], *(1 for _ in w[2:])), result, words) if words.yes("bias") else None
    epilogue = Epilogue(activation=words.activation())
    return ConvFwd(x=refs["x"], w=refs["w"], y=refs["y"], bias=bias, epilogue=epilogue, **common)


def _conv(words: _Words) -> ConvSpec:
    rank = len(words.dims("x")) - 2
    pad = words.spread("pad", rank)
    return ConvSpec(
        pre_padding=pad,
        post_padding=words.spread("post", rank) if words.text("post") else pad,
        stride=words.spread("stride", rank),
        dilation=words.spread("dilation", rank),
        groups=words.dims("groups")[0],
    )


def _reference(dims: tuple[int, ...], dtype: Any, words: _Words) -> BufferRef:
    """A reference without a buffer, of which the graph uses only the spec. Checks the words that it is made
    from."""
    layout: Any = words.text("layout")
    spec = TensorSpec.packed(dims, dtype, layout)
    return BufferRef(slot=0, generation=0, spec=spec, device="")


def _wrong(word: str, problem: str, fix: str) -> UserError:
    return UserError(f"{word}: {problem}; as in {fix}")
