"""The measured cases: single convolutions, their gradients and networks, each with its aim."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from benchmarks.trained_files import files
from cudnn_actor.protocol import Graph, GraphBuilder

__all__ = ["CASES", "Case", "Conv", "torch"]

Arrays = dict[str, np.ndarray]


def torch() -> Any:
    """PyTorch, or None where it is not installed."""
    return importlib.import_module("torch") if importlib.util.find_spec("torch") else None


class Case(NamedTuple):
    """A problem that all sides compute.

    Parameters
    ----------
    what
        An ONNX file; or a graph, which ONNX Runtime is not asked for.
    inputs
        By name.
    torch
        The same in PyTorch, from tensors in the order of `inputs`; None if there is nothing to compare with.
    """

    what: bytes | Graph
    inputs: Arrays
    torch: Callable[..., Any] | None = None


class Conv(NamedTuple):
    """A convolution of `batch` images of C×H×H with K filters of R×R, each of C / groups channels."""

    channels: int
    size: int
    filters: int
    taps: int
    stride: int = 1
    dilation: int = 1
    groups: int = 1
    batch: int = 1

    @property
    def pad(self) -> int:
        """Padding that keeps the size at stride 1."""
        return self.dilation * (self.taps // 2)

    @property
    def parameters(self) -> dict[str, Any]:
        """The parameters as a builder of graphs takes them."""
        return {"pad": self.pad, "stride": self.stride, "dilation": self.dilation, "groups": self.groups}

    @property
    def x(self) -> tuple[int, ...]:
        """The dims of the images."""
        return (self.batch, self.channels, self.size, self.size)

    @property
    def w(self) -> tuple[int, ...]:
        """The dims of the filters."""
        return (self.filters, self.channels // self.groups, self.taps, self.taps)

    @property
    def y(self) -> tuple[int, ...]:
        """The dims of the output."""
        size = (self.size - 1) // self.stride + 1
        return (self.batch, self.filters, size, size)


def _normal(name: str, dims: tuple[int, ...], spread: float = 1.0) -> np.ndarray:
    rng = np.random.default_rng([*name.encode()])
    return rng.normal(0, spread, dims).astype(np.float32)


def forward(conv: Conv) -> Case:
    """The convolution with its filters and biases in the file, as in deployed networks."""
    w = _normal("w", conv.w, 1 / math.sqrt(math.prod(conv.w[1:])))
    b = _normal("b", (conv.filters,))
    node = helper.make_node(
        "Conv",
        ["x", "w", "b"],
        ["y"],
        pads=[conv.pad] * 4,
        strides=[conv.stride] * 2,
        dilations=[conv.dilation] * 2,
        group=conv.groups,
    )
    graph = helper.make_graph(
        [node],
        "convolution",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, conv.x)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, conv.y)],
        [numpy_helper.from_array(w, "w"), numpy_helper.from_array(b, "b")],
    )
    file = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    call = None
    if (lib := torch()) is not None:
        call = functools.partial(
            lib.nn.functional.conv2d,
            weight=lib.from_numpy(w),
            bias=lib.from_numpy(b),
            stride=conv.stride,
            padding=conv.pad,
            dilation=conv.dilation,
            groups=conv.groups,
        )
    return Case(file.SerializeToString(), {"x": _normal("x", conv.x)}, call)


def by_data(conv: Conv) -> Case:
    """The gradient with respect to the images."""
    return _gradient(conv, "x")


def by_filter(conv: Conv) -> Case:
    """The gradient with respect to the filters."""
    return _gradient(conv, "w")


def _gradient(conv: Conv, by: str) -> Case:
    g = GraphBuilder()
    x, w, dy = (g.input(name, dims) for name, dims in (("x", conv.x), ("w", conv.w), ("dy", conv.y)))
    found = g.grad(g.conv(x, w, **conv.parameters), {"x": x, "w": w}[by], dy)
    graph = g.build(found=found)
    dims = {"x": conv.x, "w": conv.w, "dy": conv.y}
    inputs = {port.name: _normal(port.name, dims[port.name]) for port in graph.inputs}
    if (lib := torch()) is None:
        return Case(graph, inputs)
    other = lib.from_numpy(_normal("x" if by == "x" else "w", dims[by]))
    order = [port.name for port in graph.inputs]

    def call(*tensors: Any) -> Any:
        given = {by: other, **dict(zip(order, tensors, strict=True))}
        wanted = [by == "x", by == "w", False]
        return lib.ops.aten.convolution_backward(
            given["dy"],
            given["x"],
            given["w"],
            None,
            [conv.stride] * 2,
            [conv.pad] * 2,
            [conv.dilation] * 2,
            False,
            [0, 0],
            conv.groups,
            wanted,
        )[0 if by == "x" else 1]

    return Case(graph, inputs, call)


def small_operations(count: int) -> Case:
    """A chain of operations on 512 numbers each. NumPy takes a microsecond for one: the rest is overhead."""
    nodes = []
    for number in range(count):
        kind, more = ("Relu", ()) if number % 2 else ("MatMul", ("w",))
        nodes.append(helper.make_node(kind, [f"t{number}", *more], [f"t{number + 1}"]))
    dims = (1, 8, 8, 8)
    graph = helper.make_graph(
        nodes,
        "small operations",
        [helper.make_tensor_value_info("t0", TensorProto.FLOAT, dims)],
        [helper.make_tensor_value_info(f"t{count}", TensorProto.FLOAT, dims)],
        [numpy_helper.from_array(_normal("w", (8, 8), 0.3), "w")],
    )
    file = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return Case(file.SerializeToString(), {"t0": _normal("x", dims)})


def exported(name: str) -> Case | None:
    """A network that PyTorch exports; None without PyTorch."""
    if (lib := torch()) is None:
        return None
    architectures = importlib.import_module("benchmarks.cpu.architectures")
    lib.manual_seed(0)
    module = architectures.NETWORKS[name]().eval()
    inputs: Arrays
    if name.startswith("BERT"):
        tokens = np.random.default_rng(0).integers(0, 8000, (1, 128))
        inputs = {"input_ids": tokens, "attention_mask": np.ones((1, 128), np.int64)}
    else:
        inputs = {"x": _normal("x", (1, 3, 224, 224))}
    file = architectures.as_onnx(module, {key: lib.from_numpy(value) for key, value in inputs.items()})
    return Case(file, inputs, module)


def shipped(package: str, name: str, inputs: Callable[[], Arrays], wheels: Path | None) -> Case | None:
    """A file of a package on PyPI; None without a folder for it. Raises `LookupError` if it is not there."""
    if wheels is None:
        return None
    for _, found, data in files(wheels, [package]):
        if found == name:
            return Case(data, inputs())
    raise LookupError(f"{package} has no {name}")


def _speech() -> Arrays:
    """A chunk of 512 samples behind 64 of the one before it."""
    state = np.zeros((2, 1, 128), np.float32)
    return {"input": _normal("x", (1, 576), 0.1), "state": state, "sr": np.array(16000, np.int64)}


def _line() -> Arrays:
    return {"x": _normal("x", (1, 3, 48, 320))}


def _photograph() -> Arrays:
    return {"images": np.abs(_normal("x", (1, 3, 320, 320), 0.5))}


class Named(NamedTuple):
    """A case that can be made.

    Parameters
    ----------
    name
        What it is.
    make
        Makes it, from the folder of packages; None if what it needs is missing.
    most, most_extra
        How many times the rival's time it may take; or milliseconds, if `rival` is None. The second is for an
        engine that has ONNX Runtime.
    rival
        The side that it is compared with.
    """

    name: str
    make: Callable[[Path | None], Case | None]
    most: float
    most_extra: float
    rival: str | None = "onnxruntime"


def _cases() -> Iterator[Named]:
    for name, conv in {
        "1x1, 256 to 64, 56²": Conv(256, 56, 64, 1),
        "3x3, 64 to 64, 56²": Conv(64, 56, 64, 3),
        "7x7/2, 3 to 64, 224²": Conv(3, 224, 64, 7, stride=2),
        "3x3 depthwise, 144, 56²": Conv(144, 56, 144, 3, groups=144),
        "3x3 in 32 groups, 128 to 128, 56²": Conv(128, 56, 128, 3, groups=32),
        "3x3 dilated by 2, 256 to 256, 28²": Conv(256, 28, 256, 3, dilation=2),
    }.items():
        yield Named(name, lambda _, conv=conv: forward(conv), 4.0, 1.3)  # type: ignore[misc]
    conv = Conv(128, 28, 128, 3, batch=4)
    yield Named("3x3, 4 of 128 to 128, 28², gradient by data", lambda _: by_data(conv), 4.0, 1.3, "torch")
    yield Named("3x3, 4 of 128 to 128, 28², gradient by filter", lambda _: by_filter(conv), 4.0, 1.3, "torch")
    yield Named("MobileNetV2", lambda _: exported("MobileNetV2"), 6.0, 1.2)
    yield Named("ResNet-18", lambda _: exported("ResNet-18"), 3.0, 1.2)
    yield Named(
        "YOLO-n (nudenet), 320²", lambda at: shipped("nudenet", "320n.onnx", _photograph, at), 3.0, 1.2
    )
    yield Named("BERT, 6 layers", lambda _: exported("BERT, 6 layers"), 3.0, 1.2)
    recognition = "ch_PP-OCRv4_rec_infer.onnx"
    yield Named(
        "PP-OCR rec, 48x320", lambda at: shipped("rapidocr-onnxruntime", recognition, _line, at), 3.0, 1.2
    )
    yield Named(
        "silero VAD, a chunk",
        lambda at: shipped("silero-vad", "silero_vad.onnx", _speech, at),
        3.0,
        1.0,
        None,
    )
    # 5 µs for each.
    yield Named("400 small operations", lambda _: small_operations(400), 2.0, 2.0, None)


CASES = tuple(_cases())
