"""Models that are damaged, contradict themselves or reach out of their folder: one typed error each."""

from __future__ import annotations

import os
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from cudnn_actor import DType, InvalidRequest, TensorSpec, spawn
from cudnn_actor.errors import InvalidModel, ModelNotFound
from cudnn_actor.onnx import ModelLimits, OnnxModel
from cudnn_actor.onnx.reading import read

from ..in_one_test import cases_in_one_test
from .mutation import damaged, fate
from .small_models import FLOAT, graph_of, image_model, model_of, node

Change = Callable[[onnx.ModelProto], None]


def _tensor(model: onnx.ModelProto, name: str) -> TensorProto:
    found: TensorProto = next(each for each in model.graph.initializer if each.name == name)
    return found


def _cut_off(model: onnx.ModelProto) -> None:
    tensor = _tensor(model, "w2")
    tensor.raw_data = tensor.raw_data[:-4]


def _without_values(model: onnx.ModelProto) -> None:
    _tensor(model, "w2").ClearField("raw_data")


def _negative(model: onnx.ModelProto) -> None:
    _tensor(model, "w2").dims[0] = -4


def _huge(model: onnx.ModelProto) -> None:
    _tensor(model, "w2").dims[0] = 1 << 60


def _unknown_dtype(model: onnx.ModelProto) -> None:
    _tensor(model, "w2").data_type = 99


def _other_dtype(model: onnx.ModelProto) -> None:
    model.graph.input.append(helper.make_tensor_value_info("w2", TensorProto.DOUBLE, [4, 6, 3, 3]))


def _cyclic(model: onnx.ModelProto) -> None:
    model.graph.node[0].input[0] = "flat"


def _itself(model: onnx.ModelProto) -> None:
    model.graph.node[1].input[0] = "r1"


def _nowhere(model: onnx.ModelProto) -> None:
    model.graph.node[1].input[0] = "nowhere"


def _twice(model: onnx.ModelProto) -> None:
    model.graph.node.append(node("Relu", "c1", "r1", name="again"))


def _no_versions(model: onnx.ModelProto) -> None:
    del model.opset_import[:]


def _no_output(model: onnx.ModelProto) -> None:
    model.graph.output[0].name = "gone"


def _unknown_attribute(model: onnx.ModelProto) -> None:
    model.graph.node[1].attribute.append(helper.make_attribute("speed", 3))


def _sparse(model: onnx.ModelProto) -> None:
    values = numpy_helper.from_array(np.ones(1, np.float32), "s")
    model.graph.sparse_initializer.append(
        helper.make_sparse_tensor(values, numpy_helper.from_array(np.zeros(1, np.int64)), [4])
    )


@cases_in_one_test
@pytest.mark.parametrize(
    ("change", "where", "problem"),
    [
        (_cut_off, "initialiser 'w2'", "cannot be read"),
        (_without_values, "initialiser 'w2'", "has no values: the file was written without them"),
        (_negative, "initialiser 'w2'", "has a dim below 0"),
        (_huge, "initialiser 'w2'", "cannot be read"),
        (_unknown_dtype, "initialiser 'w2'", "has an unknown dtype, number 99"),
        (_other_dtype, "initialiser 'w2'", "is of float32, and declared as float64"),
        (_cyclic, "node 'conv1' (Conv)", "depends on its own result"),
        (_itself, "node 'relu1' (Relu)", "depends on its own result"),
        (_nowhere, "the graph", "nowhere"),
        (_twice, "node 'again' (Relu)", "writes 'r1', which there is already"),
        (_no_versions, "opset_import", "is empty"),
        (_no_output, "the graph", "gone"),
        (_unknown_attribute, "the graph", "speed"),
        (_sparse, "initialiser 's'", "is sparse"),
    ],
)
def test_what_contradicts_itself_is_named(change: Change, where: str, problem: str) -> None:
    model = image_model()
    change(model)
    with pytest.raises(InvalidModel, match=problem) as raised:
        OnnxModel(model)
    assert raised.value.where == where


@pytest.mark.parametrize("data", [b"", b"\x00" * 40, b"not a model", image_model().SerializeToString()[:-50]])
def test_bytes_that_are_no_model(data: bytes) -> None:
    with pytest.raises(InvalidModel):
        OnnxModel(data)


@pytest.mark.parametrize(("name", "label"), [("Neg", r"'y' (qq.b'N\xffg')"), ("qq", r"'y' (b'q\xff'.Neg)")])
def test_a_name_that_is_not_utf_8_is_one_of_a_node(name: str, label: str) -> None:
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("qq", 1)]
    neg = helper.make_node("Neg", ["x"], ["y"], domain="qq")
    model = model_of([neg], {"x": (FLOAT, [4])}, {"y": (FLOAT, [4])}, opset_imports=opsets)
    data = model.SerializeToString().replace(name.encode(), name[0].encode() + b"\xff" + name[2:].encode())
    with pytest.raises(InvalidModel, match="has a name that is not UTF-8") as raised:
        OnnxModel(data)
    assert raised.value.where == f"node {label}"


def test_a_file_that_is_not_there_or_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"^model='.*gone.onnx': is no file in /.*; give") as missing:
        OnnxModel(tmp_path / "gone.onnx")
    assert isinstance(missing.value, FileNotFoundError)
    assert isinstance(missing.value, InvalidRequest)
    assert str(pickle.loads(pickle.dumps(missing.value))) == str(missing.value)
    with pytest.raises(InvalidModel, match="cannot be read: embedded null byte"):
        OnnxModel("model.onnx\0")
    for data, problem in ((b"", "is empty"), (b"import onnx", "is not an ONNX model")):
        (tmp_path / "file.py").write_bytes(data)
        for given, where in ((tmp_path / "file.py", str(tmp_path / "file.py")), (data, "the file")):
            with pytest.raises(InvalidModel, match=problem) as raised:
                OnnxModel(given)
            assert raised.value.where == where
    with pytest.raises(InvalidRequest, match="is no model"):
        OnnxModel(7)


def test_nodes_may_come_in_any_order() -> None:
    model = image_model(1)
    nodes = list(model.graph.node)
    del model.graph.node[:]
    model.graph.node.extend(reversed(nodes))
    assert [each.name for each in read(model).nodes] == [each.name for each in nodes]


@pytest.mark.parametrize(("limits", "name"), [({"nbytes": 1000}, "nbytes"), ({"nodes": 5}, "nodes")])
def test_models_over_a_limit_are_refused(limits: dict[str, int], name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"ModelLimits.{name}"):
        OnnxModel(image_model(), ModelLimits(**limits))


# Data in other files.


def elsewhere(tensor: TensorProto, location: str, **more: int) -> TensorProto:
    """A tensor whose data is made to lie in another file."""
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in {"location": location, **more}.items():
        tensor.external_data.add(key=key, value=str(value))
    return tensor


def external(folder: Path, location: str, **more: int) -> Path:
    """A model whose weight lies in another file."""
    model = model_of(
        [node("Mul", "x w", "y")], {"x": (FLOAT, [4])}, {"y": (FLOAT, [4])}, {"w": np.arange(4.0, dtype="f4")}
    )
    (tensor,) = model.graph.initializer
    elsewhere(tensor, location, **more)
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    return path


async def test_data_beside_the_model_is_read(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "w.bin").write_bytes(b"skipped." + np.arange(4.0, dtype="f4").tobytes())
    path = external(tmp_path, "sub/w.bin", offset=8, length=16)
    async with spawn(device="cpu") as gpu:
        model = await gpu.load(path)
        result = await gpu.run(model, {"x": np.full(4, 2, np.float32)})
        np.testing.assert_array_equal(result["y"], [0, 2, 4, 6])
        await model.close()


def test_data_outside_of_the_folder_is_not_read(tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    (tmp_path / "w.bin").write_bytes(bytes(16))
    (inside / "link.bin").symlink_to(tmp_path / "w.bin")
    (inside / "up").symlink_to(tmp_path)
    (inside / "w.bin").write_bytes(bytes(16))
    (inside / "here").mkdir()
    for location in (str(tmp_path / "w.bin"), "../w.bin", "link.bin", "up/w.bin", "here/../w.bin", ""):
        with pytest.raises(InvalidModel, match="outside of the model's folder") as raised:
            OnnxModel(external(inside, location))
        assert raised.value.where == "initialiser 'w'"


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"offset": 8}, "has 8 bytes of data, and needs 16"),
        ({"length": 4}, "has data of length 4, and needs 16 bytes"),
        ({"offset": -1}, "below 0"),
        ({"length": 1 << 40}, "has data of length 1099511627776, and needs 16 bytes"),
    ],
)
def test_data_of_the_wrong_length(more: dict[str, int], problem: str, tmp_path: Path) -> None:
    (tmp_path / "w.bin").write_bytes(bytes(16))
    with pytest.raises(InvalidModel, match=problem):
        OnnxModel(external(tmp_path, "w.bin", **more))


def inner(kind: str) -> onnx.ModelProto:
    """A model whose output is a tensor in an attribute, which has its data in w.bin."""
    tensor = elsewhere(numpy_helper.from_array(np.zeros(1, np.float32), "w"), "w.bin")
    options: dict[str, Any] = {}
    if kind == "ConstantOfShape":
        nodes = [node("Shape", "x", "s"), node(kind, "s", "w", value=tensor)]
    elif kind == "If":
        branch = graph_of([node("Identity", "w", "b")], {}, {"b": (FLOAT, [1])})
        branch.initializer.append(tensor)
        nodes = [node(kind, "yes", "w", then_branch=branch, else_branch=branch)]
    else:
        nodes = [node("Constant", "", "w", value=tensor)]
    if kind == "function":
        options["opset_imports"] = [helper.make_opsetid("", 21), helper.make_opsetid("own", 1)]
        options["functions"] = [
            helper.make_function("own", "F", [], ["w"], nodes, [helper.make_opsetid("", 21)])
        ]
        nodes = [helper.make_node("F", [], ["w"], domain="own")]
    port = {"x": (FLOAT, [4])}
    tensors = {"yes": np.array(True)}
    return model_of(nodes, port, {"w": (FLOAT, None)}, tensors, **options)


@pytest.mark.parametrize("kind", ["Constant", "ConstantOfShape", "If", "function"])
def test_data_of_attributes_is_read_from_the_folder_alone(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never from the working directory."""
    folder = tmp_path / "model"
    folder.mkdir()
    model, path = inner(kind), folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    (tmp_path / "w.bin").write_bytes(np.full(1, 7, "f4").tobytes())
    monkeypatch.chdir(tmp_path)
    for given, problem in (
        (path, "No such file"),
        (path.read_bytes(), "give the model by its path"),
        (model, "give the model by its path"),
    ):
        with pytest.raises(InvalidModel, match=problem) as raised:
            OnnxModel(given)
        assert raised.value.where.startswith("node 'w'")
    (folder / "w.bin").write_bytes(np.full(1, 3, "f4").tobytes())
    specs = {"x": TensorSpec.packed((4,), DType.FLOAT32)}
    assert OnnxModel(path).specialise(specs, {}).constants["w"].flat[0] == 3


def test_a_path_that_holds_no_model_is_shown_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFound) as missing:
        OnnxModel("gone.onnx")
    assert str(missing.value).startswith(f"model='gone.onnx': is no file in {tmp_path}; ")
    for given in (".", tmp_path):
        with pytest.raises(InvalidModel) as folder:
            OnnxModel(given)
        assert f"'{tmp_path}' is a folder, not a file" in str(folder.value)


def test_a_pipe_has_no_data(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "w.bin")
    with pytest.raises(InvalidModel, match=r"cannot be read: '/.*/w\.bin' is not a regular file"):
        OnnxModel(external(tmp_path, "w.bin"))


def test_bytes_have_no_folder(tmp_path: Path) -> None:
    (tmp_path / "w.bin").write_bytes(bytes(16))
    with pytest.raises(InvalidModel, match="give the model by its path"):
        OnnxModel(external(tmp_path, "w.bin").read_bytes())


async def test_damaged_models_are_typed_errors_and_leave_nothing() -> None:
    async with spawn(device="cpu", memory_limit=1 << 28) as gpu:
        for number in range(100):
            await fate(gpu, damaged(random.Random(number)))
        await gpu.drain()
        assert (await gpu.statistics()).live_buffers == 0
        assert gpu.generation == 1


@pytest.mark.parametrize("unknown", ["?", "-1", -1])
def test_a_dim_that_exporters_write_for_any_size_is_unknown_and_shared_with_none(unknown: int | str) -> None:
    proto = model_of([node("Relu", "x", "y")], {"x": (FLOAT, [unknown, unknown, 3])}, {"y": (FLOAT, None)})
    (feature,) = OnnxModel(proto).inputs
    assert feature.dims == (None, None, 3)
