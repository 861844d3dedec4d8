"""Files with data that is not there, too large or damaged, and what is told of them."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from cudnn_actor import DType, InvalidRequest, TensorSpec
from cudnn_actor.errors import InvalidModel, UnsupportedModel
from cudnn_actor.onnx import OnnxModel

from ..in_one_test import cases_in_one_test
from .small_models import FLOAT, INT64, model_of, node
from .test_bounds import PORTS, SPECS

# Files.


def external(folder: Path, location: str, count: int) -> Path:
    """A model whose weights are `count` floats in another file."""
    proto = model_of([node("Add", "x w", "y")], *PORTS, {"w": np.ones(3, "f4")})
    tensor = proto.graph.initializer[0]
    del tensor.dims[:]
    tensor.ClearField("raw_data")
    tensor.dims.append(count)
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location)
    path = folder / "model.onnx"
    path.write_bytes(proto.SerializeToString())
    return path


def test_data_that_is_not_there_takes_no_memory(tmp_path: Path) -> None:
    (tmp_path / "w.bin").write_bytes(bytes(16))
    with pytest.raises(InvalidModel, match="has 16 bytes of data, and needs 4398046511104"):
        OnnxModel(external(tmp_path, "w.bin", 1 << 40))


def test_data_over_the_limit_is_refused_before_it_is_read(tmp_path: Path) -> None:
    """Of a file with a hole, which takes no room on the disk."""
    with (tmp_path / "w.bin").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(InvalidRequest, match=r"over the limit ModelLimits.nbytes"):
        OnnxModel(external(tmp_path, "w.bin", 1 << 38))


@pytest.mark.parametrize("place", ["initialiser", "data in a file", "sparse constant"])
def test_a_tensor_of_more_dims_than_an_array_has_is_refused_by_their_number(
    place: str, tmp_path: Path
) -> None:
    """Their product has more digits than Python writes, and takes minutes. In 64 bits it is 1."""
    dims = [(1 << 62) + 1] * 100_000
    if place == "sparse constant":
        values = helper.make_tensor("v", FLOAT, [1], [1.0])
        sparse = helper.make_sparse_tensor(values, helper.make_tensor("i", INT64, [1], [0]), [1])
        sparse.dims[:] = dims
        constant = helper.make_node("Constant", [], ["w"], name="w", sparse_value=sparse)
        path = tmp_path / "model.onnx"
        path.write_bytes(model_of([constant, node("Add", "x w", "y")], *PORTS).SerializeToString())
    else:
        path = external(tmp_path, "w.bin", 1)
        proto = onnx.load(path, load_external_data=False)
        tensor = proto.graph.initializer[0]
        tensor.dims[:] = dims
        if place == "initialiser":
            tensor.ClearField("data_location")
            tensor.raw_data = bytes(12)
        path.write_bytes(proto.SerializeToString())
    with pytest.raises((InvalidModel, UnsupportedModel), match=r"'w'.* has 100,000 dims") as caught:
        OnnxModel(path).specialise(SPECS, {})
    assert len(str(caught.value)) < 1000


def test_a_shape_of_more_dims_than_an_array_has_is_told_as_one() -> None:
    """What it would take has more digits than Python writes."""
    dims = np.full(256, 1 << 62)
    proto = model_of([node("ConstantOfShape", "d", "w"), node("Add", "x w", "y")], *PORTS, {"d": dims})
    with pytest.raises(UnsupportedModel, match=r"1 node .*\(ConstantOfShape\): dims: .* 0 to 8 whole"):
        OnnxModel(proto).specialise(SPECS, {})


def test_links_in_a_circle_are_no_data(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(InvalidModel, match="initialiser 'w': has "):
        OnnxModel(external(tmp_path, "a", 3))
    with pytest.raises(InvalidModel, match="cannot be read"):
        OnnxModel(tmp_path / "a")


@pytest.mark.parametrize("what", ["a pipe", "a device", "a folder"])
def test_what_is_no_regular_file_is_no_model(tmp_path: Path, what: str) -> None:
    """A pipe would block, and a device has no end."""
    path = {"a pipe": tmp_path / "pipe", "a device": Path("/dev/zero"), "a folder": tmp_path}[what]
    if what == "a pipe":
        os.mkfifo(path)
    with pytest.raises(InvalidModel, match=r"is (not a regular file|a folder, not a file)"):
        OnnxModel(path)


def test_packed_values_are_not_filled_up(tmp_path: Path) -> None:
    """Two of 4 bits in a byte; ONNX's reader would add 2^40 zeros."""
    proto = model_of([node("DequantizeLinear", "w s", "y")], {}, PORTS[1], {"s": np.array(1, "f4")})
    proto.graph.initializer.append(helper.make_tensor("w", TensorProto.UINT4, [2], [1, 2]))
    proto.graph.initializer[-1].dims[0] = 1 << 40
    with pytest.raises(InvalidModel, match="initialiser 'w'"):
        OnnxModel(proto)


@pytest.mark.parametrize("place", ["inputs", "outputs", "attribute", "input", "dim", "tensor", "function"])
def test_a_name_that_is_not_utf_8_is_an_error_of_the_file(place: str) -> None:
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("own", 1)]
    inner = [node("Softmax", "a", "b", axis=0)]
    function = helper.make_function("own", "F", ["a"], ["QQf" if place == "function" else "b"], inner, opsets)
    name = {
        each: ("QQ" if each == place else "ok") + each
        for each in ("inputs", "outputs", "input", "dim", "tensor")
    }
    first = node("Softmax", name["input"], name["outputs"], axis=0)
    if place == "attribute":
        first.attribute[0].name = "QQaxis"
    second = node("Add", f"{name['outputs']} {name['inputs'] if place == 'inputs' else name['tensor']}", "y")
    proto = model_of(
        [first, second],
        {name["input"]: (FLOAT, [name["dim"]])},
        {"y": (FLOAT, None)},
        {name["tensor"]: np.ones(1, "f4")},
        functions=[function],
        opset_imports=opsets,
    )
    data = proto.SerializeToString()
    assert b"QQ" in data
    with pytest.raises(InvalidModel, match="has a name that is not UTF-8"):
        OnnxModel(data.replace(b"QQ", b"Q\xff"))


# What a damaged file was found to raise.


def test_a_file_with_a_node_that_cannot_be_run_and_an_input_that_decides() -> None:
    proto = model_of(
        [node("Reshape", "x dims", "r"), node("NoSuch", "r", "y")],
        {"x": (FLOAT, [4]), "dims": (INT64, [2])},
        {"y": (FLOAT, None)},
    )
    with pytest.raises(UnsupportedModel, match="NoSuch"):
        OnnxModel(proto)


@pytest.mark.parametrize("place", ["input", "output"])
def test_a_dtype_that_onnx_does_not_have(place: str) -> None:
    proto = model_of([node("Relu", "x", "y")], *PORTS)
    getattr(proto.graph, place)[0].type.tensor_type.elem_type = 99
    with pytest.raises((InvalidModel, UnsupportedModel), match="dtype number 99"):
        OnnxModel(proto)


@cases_in_one_test
@pytest.mark.parametrize("version", [8, 21])
@pytest.mark.parametrize("count", [0, -1, 5, 1 << 30, 1 << 62])
def test_a_scan_of_more_inputs_than_it_has(version: int, count: int) -> None:
    inner = helper.make_tensor_value_info("a", FLOAT, []), helper.make_tensor_value_info("b", FLOAT, [])
    body = helper.make_graph([node("Neg", "a", "b")], "body", [inner[0]], [inner[1]])
    scan = node("Scan", "- x" if version == 8 else "x", "y", body=body, num_scan_inputs=count)
    ports = {"x": (FLOAT, [2, 3] if version == 8 else [3])}, {"y": (FLOAT, None)}
    proto = model_of([scan], *ports, opset_imports=[helper.make_opsetid("", version)])
    specs = {"x": TensorSpec.packed((2, 3) if version == 8 else (3,), DType.FLOAT32)}
    with pytest.raises((InvalidModel, UnsupportedModel), match=r"scans [-\d,]+ of \d inputs|num_scan_inputs"):
        OnnxModel(proto).specialise(specs, {})


@pytest.mark.parametrize("sizes", [[1], [1, 1, 1, 1], [1 << 40] * 3])
def test_other_sizes_than_results_do_not_end_the_process(sizes: list[int]) -> None:
    """Of which ONNX's inference writes beyond its memory."""
    split = node("Split", "x sizes", "y z", axis=0)
    proto = model_of(
        [split, node("Neg", "z", "w")], {"x": (FLOAT, [4])}, {"w": (FLOAT, None)}, {"sizes": np.array(sizes)}
    )
    with pytest.raises((InvalidModel, UnsupportedModel), match="Split"):
        OnnxModel(proto).specialise({"x": TensorSpec.packed((4,), DType.FLOAT32)}, {})


def test_an_equation_that_is_no_text_ends() -> None:
    """ONNX's inference would look for its end for ever."""
    einsum = helper.make_node("Einsum", ["x", "x"], ["y"], equation=b"\xff")
    proto = model_of([einsum, node("Neg", "y", "z")], {"x": (FLOAT, [])}, {"z": (FLOAT, None)})
    with pytest.raises((InvalidModel, UnsupportedModel), match="Einsum"):
        OnnxModel(proto).specialise({"x": TensorSpec.packed((), DType.FLOAT32)}, {})
