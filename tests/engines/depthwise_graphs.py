"""Graphs with a depthwise convolution that become one kernel of our own."""

from __future__ import annotations

from collections.abc import Sequence

from cudnn_actor.protocol import ConvSpec, DType, Graph, GraphBuilder, Layout, Tensor
from cudnn_actor.protocol.operations import (
    ConvolutionBackwardData,
    ConvolutionBackwardFilter,
    ConvolutionForward,
)

__all__ = ["DEPTHWISE", "ONLY_COMPILED"]

FLOAT32, FLOAT16, BFLOAT16 = DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16
Window = tuple[tuple[int, int], ConvSpec]


def window(
    taps: Sequence[int],
    stride: Sequence[int] = (1, 1),
    dilation: Sequence[int] = (1, 1),
    before: Sequence[int] = (0, 0),
    after: Sequence[int] = (0, 0),
) -> Window:
    """Taps and a convolution; the groups are those of the channels."""
    spec = ConvSpec(
        pre_padding=tuple(before),
        post_padding=tuple(after),
        stride=tuple(stride),
        dilation=tuple(dilation),
    )
    rows, columns = taps
    return (rows, columns), spec


WINDOWS: dict[str, tuple[Window, tuple[int, int]]] = {
    "3x3": (window((3, 3), before=(1, 1), after=(1, 1)), (9, 11)),
    "7x7": (window((7, 7), before=(3, 3), after=(3, 3)), (10, 17)),
    "1x1": (window((1, 1)), (3, 4)),
    "asymmetric": (window((4, 5), before=(0, 2), after=(1, 0)), (7, 9)),
    "stride 2": (window((3, 3), (2, 2), before=(1, 1), after=(1, 1)), (9, 12)),
    "stride 2 7x7": (window((7, 7), (2, 2), before=(3, 3), after=(3, 3)), (14, 13)),
    "strides": (window((3, 2), (3, 4), before=(1, 0), after=(0, 3)), (11, 14)),
    "dilated": (window((3, 3), dilation=(2, 3), before=(2, 3), after=(2, 3)), (9, 13)),
    "both": (window((3, 5), (2, 3), (3, 2), (4, 1), (0, 5)), (13, 17)),
    "padding": (window((2, 2), (2, 1), before=(4, 0), after=(5, 3)), (2, 2)),
    "uneven": (window((3, 2), (1, 4)), (5, 45)),
    "between taps": (window((1, 1), (1, 2), before=(0, 1)), (3, 1)),
    "wide": (window((3, 3)), (1 << 15, 1 << 15)),
}
"""Taps and the convolution, and the height and width of x."""


class Drawn:
    """The operands of a convolution, in a builder."""

    def __init__(self, name: str, channels: int, dtype: DType, times: int = 1, samples: int = 2) -> None:
        ((rows, columns), spec), size = WINDOWS[name]
        self.g = GraphBuilder()
        self.conv = ConvSpec(
            pre_padding=spec.pre_padding,
            post_padding=spec.post_padding,
            stride=spec.stride,
            dilation=spec.dilation,
            groups=channels,
        )
        self.dims: dict[str, tuple[int, ...]] = {
            "x": (samples, channels, *size),
            "w": (times * channels, 1, rows, columns),
        }
        self.dims["y"] = self.conv.output_dims(self.dims["x"], self.dims["w"])
        self.dtype = dtype

    def __getitem__(self, name: str) -> Tensor:
        dims = self.dims[name[-1]]
        return self.g.input(name, dims, self.dtype, layout=Layout.NHWC)

    def forward(self) -> Tensor:
        y: Tensor = self.g.apply(ConvolutionForward(x=self["x"], w=self["w"], conv=self.conv))
        return y


def forward(name: str, channels: int, dtype: DType, times: int = 1) -> Graph:
    """A convolution, a bias, a scale and a function, stored in the type of x."""
    drawn = Drawn(name, channels, dtype, times)
    g, filters = drawn.g, drawn.dims["w"][0]
    y = drawn.forward() + g.input("bias", (1, filters, 1, 1), dtype)
    return g.build(y=g.relu(y * 0.5).astype(dtype))


def alone(name: str, channels: int, dtype: DType) -> Graph:
    drawn = Drawn(name, channels, dtype)
    return drawn.g.build(y=drawn.forward())


def several(channels: int, dtype: DType) -> Graph:
    """Results of several types, what is read of y itself, and operands that are broadcast in many ways."""
    drawn = Drawn("3x3", channels, dtype)
    g, dims = drawn.g, drawn.dims["y"]
    y = drawn.forward().astype(dtype)
    row, column = g.input("row", (1, 1, 1, dims[3])), g.input("column", (1, 1, dims[2], 1), "int32")
    other, planes = drawn["other_y"], g.input("planes", dims, "float64")
    a = (y + other) * row
    b = a - column
    return g.build(y=y, a=a.astype(dtype), above=b > 1.0, b=b + planes)


def read_again(dtype: DType) -> Graph:
    """A result that is stored in the type of x, and a function of what is stored."""
    drawn = Drawn("3x3", 8, dtype)
    y = drawn.forward()
    return drawn.g.build(y=y, a=(-y).astype("float32"))


def updated(dtype: DType) -> Graph:
    """A result that overwrites what is added to it."""
    drawn = Drawn("3x3", 8, dtype)
    total = drawn["total_y"]
    y = drawn.forward() + total
    return drawn.g.build(updates={"total_y": y.astype(dtype)})


def of_a_slice(dtype: DType) -> Graph:
    """Some of the channels of a tensor: pixels are apart."""
    g = GraphBuilder()
    x, w = g.input("x", (2, 24, 6, 7), dtype, layout=Layout.NHWC), g.input("w", (8, 1, 3, 3), dtype)
    return g.build(y=g.relu(g.conv(x[:, 8:16], w, pad=1, groups=8)).astype(dtype))


def data(name: str, channels: int, dtype: DType, times: int = 1) -> Graph:
    drawn = Drawn(name, channels, dtype, times)
    g = drawn.g
    dx = g.apply(
        ConvolutionBackwardData(dy=drawn["dy"], w=drawn["w"], conv=drawn.conv), like={"dx": drawn["x"]}
    )
    return g.build(dx=(dx * 2.0).astype(dtype))


def of_filter(name: str, channels: int, dtype: DType, times: int = 1, samples: int = 2) -> Graph:
    drawn = Drawn(name, channels, dtype, times, samples)
    g = drawn.g
    dw = g.apply(
        ConvolutionBackwardFilter(x=drawn["x"], dy=drawn["dy"], conv=drawn.conv), like={"dw": drawn["w"]}
    )
    decay = g.input("decay", (1, 1, 1, drawn.dims["w"][3]))
    return g.build(dw=(dw + decay).astype(dtype))


DTYPES = (BFLOAT16, FLOAT32)
_RUN = [name for name in WINDOWS if name != "wide"]
DEPTHWISE = {
    **{f"forward {name}": forward(name, 8, DTYPES[n % 2]) for n, name in enumerate(_RUN)},
    **{f"forward {n} channels": forward("3x3", n, BFLOAT16) for n in (2, 5, 6, 76)},
    **{f"forward times {n}": forward("stride 2", 8, BFLOAT16, n) for n in (2, 3, 4, 8)},
    "forward alone": alone("7x7", 8, BFLOAT16),
    "forward several": several(8, BFLOAT16),
    "forward several of 6": several(6, FLOAT32),
    "forward read again": read_again(BFLOAT16),
    "forward updated": updated(BFLOAT16),
    "forward of a slice": of_a_slice(BFLOAT16),
    **{f"data {name}": data(name, 8, DTYPES[n % 2]) for n, name in enumerate(_RUN)},
    **{f"data {n} channels": data("stride 2", n, BFLOAT16) for n in (5, 76)},
    **{f"data times {n}": data("both", 4, BFLOAT16, n) for n in (2, 3)},
    **{f"filter {name}": of_filter(name, 8, DTYPES[n % 2]) for n, name in enumerate(_RUN)},
    **{f"filter {n} channels": of_filter("3x3", n, BFLOAT16) for n in (5, 76)},
    **{f"filter times {n}": of_filter("both", 4, BFLOAT16, n) for n in (2, 3, 4)},
    "filter of many": of_filter("3x3", 8, FLOAT32, samples=40),
}
ONLY_COMPILED = {
    f"{kind} {dtype} {name}": make(name, 8, dtype)
    for kind, make in (("forward", forward), ("data", data), ("filter", of_filter))
    for dtype, name in ((FLOAT16, "7x7"), (FLOAT16, "strides"), (BFLOAT16, "wide"))
}
"""What cannot be run on the host: float16, and offsets of 64 bits."""
