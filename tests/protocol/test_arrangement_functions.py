"""A builder's functions that move elements are NumPy's, and ONNX's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cudnn_actor.protocol import DType, Graph, GraphBuilder, InvalidRequest, Layout, Tensor

from ..engines.differences import check_gradients, computed
from ..in_one_test import cases_in_one_test

X = np.arange(48.0).reshape(2, 4, 6)
Build = Callable[[GraphBuilder, Tensor], Any]


def results(build: Build, x: np.ndarray) -> list[np.ndarray]:
    g = GraphBuilder()
    made = build(g, g.input("x", x.shape, x.dtype))
    outputs = made if isinstance(made, tuple) else (made,)
    found = computed(g.build({f"y{n}": y for n, y in enumerate(outputs)}), {"x": x})
    return [found[f"y{n}"] for n in range(len(outputs))]


def blocks(x: np.ndarray, size: int, order: str) -> np.ndarray:
    """Each element put where it belongs."""
    n, c, h, w = x.shape
    y = np.empty((n, c // size**2, h * size, w * size), x.dtype)
    for index in np.ndindex(x.shape):
        image, channel, row, column = index
        if order == "DCR":
            within, own = divmod(channel, c // size**2)
        else:
            own, within = divmod(channel, size**2)
        y[image, own, row * size + within // size, column * size + within % size] = x[index]
    return y


FUNCTIONS: dict[str, tuple[Build, Callable[[np.ndarray], Any]]] = {
    "concatenate": (lambda g, x: g.concatenate((x, x[:, :1]), 1), lambda x: np.concatenate((x, x[:, :1]), 1)),
    "stack": (lambda g, x: g.stack((x, x), -1), lambda x: np.stack((x, x), -1)),
    "split": (lambda g, x: g.split(x, 2, -2), lambda x: np.split(x, 2, -2)),
    "split by sizes": (lambda g, x: g.split(x, (1, 0, 5), 2), lambda x: np.split(x, (1, 1), 2)),
    "array_split": (lambda g, x: g.array_split(x, 4, 2), lambda x: np.array_split(x, 4, 2)),
    "more parts": (lambda g, x: g.array_split(x, 3), lambda x: np.array_split(x, 3)),
    "expand_dims": (lambda g, x: g.expand_dims(x, (0, -1)), lambda x: np.expand_dims(x, (0, -1))),
    "squeeze": (lambda g, x: g.squeeze(x[:1, :, :1]), lambda x: np.squeeze(x[:1, :, :1])),
    "squeeze one": (lambda g, x: g.squeeze(x[:1, :, :1], 0), lambda x: np.squeeze(x[:1, :, :1], 0)),
    "swapaxes": (lambda g, x: g.swapaxes(x, 0, -1), lambda x: np.swapaxes(x, 0, -1)),
    "moveaxis": (lambda g, x: g.moveaxis(x, (0, 2), (-1, 0)), lambda x: np.moveaxis(x, (0, 2), (-1, 0))),
    "broadcast_to": (lambda g, x: g.broadcast_to(x[:1], (3, 2, 4, 6)), lambda x: _broadcast(x[:1])),
    "tile": (lambda g, x: g.tile(x, (2, 1, 3)), lambda x: np.tile(x, (2, 1, 3))),
    "tile more dims": (lambda g, x: g.tile(x[0], (2, 3, 1, 2)), lambda x: np.tile(x[0], (2, 3, 1, 2))),
    "tile fewer dims": (lambda g, x: g.tile(x, 2), lambda x: np.tile(x, 2)),
    "tile often": (lambda g, x: g.tile(x, (9, 1, 11)), lambda x: np.tile(x, (9, 1, 11))),
    "tile none": (lambda g, x: g.tile(x, (0, 2)), lambda x: np.tile(x, (0, 2))),
    "repeat": (lambda g, x: g.repeat(x, 3, 1), lambda x: np.repeat(x, 3, 1)),
    "repeat all": (lambda g, x: g.repeat(x, 2), lambda x: np.repeat(x, 2)),
    "flip": (lambda g, x: g.flip(x), np.flip),
    "flip one": (lambda g, x: g.flip(x, (-1, 0)), lambda x: np.flip(x, (-1, 0))),
    "roll": (lambda g, x: g.roll(x, -7), lambda x: np.roll(x, -7)),
    "roll two": (lambda g, x: g.roll(x, (1, -8), (0, 2)), lambda x: np.roll(x, (1, -8), (0, 2))),
    "roll around": (lambda g, x: g.roll(x, 4, 1), lambda x: np.roll(x, 4, 1)),
    "depth_to_space": (lambda g, x: g.depth_to_space(_image(x), 2), lambda x: blocks(_image(x), 2, "DCR")),
    "by channels": (
        lambda g, x: g.depth_to_space(_image(x), 2, "CRD"),
        lambda x: blocks(_image(x), 2, "CRD"),
    ),
}


def _image(x: Any) -> Any:
    return x.reshape(1, 8, 3, 2)


def _broadcast(x: np.ndarray) -> np.ndarray:
    return np.broadcast_to(x, (3, 2, 4, 6))


@cases_in_one_test
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_numpys(name: str) -> None:
    build, wanted = FUNCTIONS[name]
    expected = wanted(X)
    found = results(build, X)
    for one, other in zip(found, expected if isinstance(expected, list) else [expected], strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other, strict=True)


@cases_in_one_test
@pytest.mark.parametrize("dtype", DType)
@pytest.mark.parametrize("name", ["tile", "repeat", "broadcast_to", "roll"])
def test_every_dtype(name: str, dtype: DType) -> None:
    build, wanted = FUNCTIONS[name]
    x = (X.astype(np.uint64) * 0x0101_0101_0101_0101 if dtype is DType.UINT64 else X).astype(dtype.numpy)
    (found,) = results(build, x)
    np.testing.assert_array_equal(found, wanted(x), strict=True)


def test_what_has_its_channels_last_gives_them_last() -> None:
    g = GraphBuilder()
    x, w = g.input("x", (2, 4, 5, 6)), g.input("w", (3, 4, 1, 1))
    last = g.to_layout(x, "NHWC")
    assert g.to_layout(last, Layout.NHWC) is last
    assert g.to_layout(x, "NCHW") is x
    assert g.to_layout(w, "NHWC") is w  # one order in memory is both
    graph = g.build(y=g.relu(g.conv(last, w)), z=g.to_layout(last * 2.0, "NCHW"))
    assert [port.spec.layout for port in graph.outputs] == [Layout.NHWC, Layout.NCHW]
    given = np.arange(240.0, dtype=np.float32).reshape(x.dims)
    found = computed(graph, {"x": given, "w": np.ones(w.dims, np.float32)})
    np.testing.assert_array_equal(found["z"], given * 2)
    with pytest.raises(InvalidRequest, match="layout"):
        g.to_layout(g.input("m", (2, 3)), "NHWC")


def test_a_transpose_makes_channels_last_of_images_and_not_of_rows() -> None:
    """Products and norms of a transformer's tokens (N, L, C) are fast if C is contiguous."""
    g = GraphBuilder()
    images = g.transpose(g.input("images", (2, 5, 6, 8)), (0, 3, 1, 2))
    tokens = g.transpose(g.reshape(images, (2, 8, 30)), (0, 2, 1))
    graph = g.build(y=images * 2.0, z=g.layer_norm(tokens, g.input("scale", (8,))))
    layouts = {port.name: port.spec.layout for port in graph.outputs}
    assert layouts == {"y": Layout.NHWC, "z": Layout.NCHW}


def test_every_dim_of_eight_is_repeated() -> None:
    x = np.arange(2.0).reshape(1, 1, 1, 2, 1, 1, 1, 1)
    repeats = (2, 1, 3, 2, 1, 2, 2, 2)
    (found,) = results(lambda g, x: g.tile(x, repeats), x)
    np.testing.assert_array_equal(found, np.tile(x, repeats), strict=True)


@pytest.mark.parametrize("mode", ["DCR", "CRD"])
def test_depth_is_space_and_back(mode: Any) -> None:
    x = np.arange(144.0).reshape(2, 12, 2, 3)
    (found,) = results(lambda g, x: g.space_to_depth(g.depth_to_space(x, 2, mode), 2, mode), x)
    np.testing.assert_array_equal(found, x)


@pytest.mark.parametrize("name", ["split by sizes", "tile", "repeat", "roll two", "by channels"])
def test_gradients(name: str) -> None:
    build, _ = FUNCTIONS[name]

    def squares(g: GraphBuilder, x: Tensor) -> list[Tensor]:
        made = build(g, x)
        return [g.square(y) for y in (made if isinstance(made, tuple) else (made,)) if 0 not in y.dims]

    check_gradients(squares, {"x": X / 48}, tolerance=1e-6)


REFUSED: dict[str, tuple[Build, str]] = {
    "an uneven split": (lambda g, x: g.split(x, 4, 2), "sections"),
    "sizes of another sum": (lambda g, x: g.split(x, (1, 4), 2), "sections"),
    "no parts": (lambda g, x: g.array_split(x, 0), "sections"),
    "no such dim": (lambda g, x: g.roll(x, 1, 3), "axis"),
    "a dim twice": (lambda g, x: g.flip(x, (0, -3)), "axis"),
    "a dim that is not 1": (lambda g, x: g.squeeze(x, 0), "axis"),
    "places of fewer dims": (lambda g, x: g.moveaxis(x, (0, 1), (0,)), "destination"),
    "shifts of fewer dims": (lambda g, x: g.roll(x, (1,), (0, 1)), "shift"),
    "less than none": (lambda g, x: g.tile(x, -1), "repeats"),
    "not an image": (lambda g, x: g.depth_to_space(x, 2), "x"),
    "channels that do not fit": (lambda g, x: g.depth_to_space(_image(x)[:, :6], 2), "block"),
    "a picture that does not fit": (lambda g, x: g.space_to_depth(_image(x), 2), "block"),
    "no such order": (lambda g, x: g.depth_to_space(_image(x), 2, "RDC"), "mode"),  # type: ignore[arg-type]
}


@cases_in_one_test
@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused(name: str) -> None:
    build, field = REFUSED[name]
    g = GraphBuilder()
    with pytest.raises(InvalidRequest) as caught:
        build(g, g.input("x", X.shape))
    assert caught.value.field == field


def test_operations_have_the_line_of_their_caller() -> None:
    g = GraphBuilder()
    graph: Graph = g.build(y=g.roll(g.input("x", (4,)), 1, 0))
    assert graph.body.label(0).startswith("slice at test_arrangement_functions.py:")


def test_only_functions_of_elements_and_reductions_are_labelled_by_their_mode() -> None:
    g = GraphBuilder()
    x = g.input("x", (1, 2, 4, 4))
    y = g.resize(g.pad(g.relu(x), 1, mode="reflect"), sizes=(8, 8), axes=(2, 3)).sum()
    graph = g.build(y=y, place=g.argmax(x, 1)).body
    labels = [graph.label(number).partition(" at ")[0] for number in range(len(graph.operations))]
    assert labels == ["relu", "border_pad", "resample", "sum", "argmax"]


@pytest.mark.parametrize("dtype", ["int8", "float16"])
def test_what_is_chosen_has_the_type_of_the_choices(dtype: Any) -> None:
    g = GraphBuilder()
    x = g.input("x", (3,), dtype)
    for condition in (g.input("b", (3,), "bool"), g.input("i", (3,), "int64")):
        assert g.where(condition, x, 0).dtype == dtype
