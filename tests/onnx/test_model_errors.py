"""What is told of models and inputs that do not fit."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import onnx
import pytest

from cudnn_actor import (
    InvalidRequest,
    OutOfMemory,
    StaleBufferError,
    spawn,
)
from cudnn_actor.errors import UnsupportedModel
from cudnn_actor.models.sizes import require_sizes_or_inputs
from cudnn_actor.models.source import Feature
from cudnn_actor.onnx.operator_table import NO_WAY, UNSEEDED
from cudnn_actor.protocol import DType

from .small_models import FLOAT, INT64, image_model, model_of, node
from .test_models import buffers, images, scaled


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({}, "is an input that is missing"),
        ({"image": np.zeros((1, 3, 8, 8), np.float32), "other": np.zeros(1)}, "is no input of the model"),
        ({"imgae": np.zeros((1, 3, 8, 8), np.float32)}, 'no input of the model; did you mean "image"'),
        ({"image": np.zeros((1, 3, 8, 8))}, "is not the dtype of the input, which is float32"),
        (
            {"image": np.zeros((1,) * 9, np.float32)},
            r"^image=\(1, 1, 1, 1, 1, 1, 1, 1, 1\): must be a tuple of 0",
        ),
        ({"image": np.zeros((1, 3, 8, 9), np.float32)}, "dim 3 is 9, not 8"),
        (
            {"image": np.zeros((3, 8, 8), np.float32)},
            r"\(N, 3, 8, 8\): it has 3 dims, not 4; give array\[None\]$",
        ),
        (
            {"image": np.zeros((8, 8, 3), np.float32)},
            r"not 4; give array\.transpose\(2, 0, 1\)\[None\]$",
        ),
        (
            {"image": np.zeros((2, 8, 8, 3), np.float32)},
            r"dim 1 is 8, not 3; give array\.transpose\(0, 3, 1, 2\)$",
        ),
        ({"image": np.zeros((8, 8), np.float32)}, "it has 2 dims, not 4; give an array that fits$"),
        (
            {"image": np.zeros((1, 2, 8, 9), np.float32)},
            r"does not fit \(N, 3, 8, 8\): dim 1 is 2, not 3; give",
        ),
    ],
)
async def test_inputs_that_do_not_fit_are_refused(given: dict[str, Any], problem: str) -> None:
    async with spawn(device="cpu") as gpu:
        model = await gpu.load(image_model())
        with pytest.raises(InvalidRequest, match=problem):
            await gpu.run(model, given)
        assert await buffers(gpu) == 0
        for _ in range(2):  # also where inputs are compared with those of the run before
            await gpu.run(model, image=np.zeros((1, 3, 8, 8), np.float32))
            with pytest.raises(InvalidRequest, match=problem):
                await gpu.run(model, given)


async def test_a_buffer_of_another_dtype_is_told_how_to_be_converted() -> None:
    async with spawn(device="cpu") as gpu:
        model = await gpu.load(scaled())
        x = await gpu.upload(np.ones((2, 3)))
        with pytest.raises(InvalidRequest) as raised:
            await gpu.run(model, x=x)
        assert raised.value.fix == (
            "upload it in that dtype: await gpu.upload((await gpu.download(x)).astype('float32'))"
        )
        x = await gpu.upload((await gpu.download(x)).astype("float32"))
        assert (await gpu.run(model, x=x))["y"].shape == (6, 1)
        await model.close()


async def test_an_input_or_a_model_that_was_never_awaited_is_told_so() -> None:
    async with spawn(device="cpu") as gpu:
        model = await gpu.load(image_model())
        forgotten: Any = gpu.upload(images(1))
        for inputs, field in (({"image": forgotten}, "image"), (forgotten, "inputs")):
            with pytest.raises(
                InvalidRequest, match=f"^{field}=coroutine: was never awaited; write {field} ="
            ):
                await gpu.run(model, inputs)
        await forgotten
        await model.close()


async def test_dims_with_one_name_must_agree() -> None:
    proto = model_of(
        [node("Add", "a b", "y")], {"a": (FLOAT, ["N"]), "b": (FLOAT, ["N"])}, {"y": (FLOAT, ["N"])}
    )
    async with spawn(device="cpu") as gpu:
        model = await gpu.load(proto)
        with pytest.raises(
            InvalidRequest,
            match=r"dim 0 is 1, not 3, as N is in other dims; give .* fits; dims with one name must",
        ):
            await gpu.run(model, {"a": np.zeros(3, np.float32), "b": np.zeros(1, np.float32)})


UPLOADED = (
    "image=float64: is not the dtype of the input, which is float32; "
    r"upload it in that dtype: await gpu.upload\(\(await gpu.download\(image\)\).astype\('float32'\)\)"
)


async def test_what_is_no_input_at_all_is_told_with_what_to_pass() -> None:
    async with spawn(device="cpu") as gpu:
        model, image = await gpu.load(image_model()), images(1)
        wrong: list[tuple[Any, dict[str, Any], str]] = [
            (image, {}, "inputs=ndarray: is not a mapping of names to arrays; name each: image"),
            ({"image": None}, {}, "image=None: is of type NoneType, not an array of numbers"),
            (
                {"image": [[1.0], [1.0, 2.0]]},
                {},
                "image=list: cannot be converted to an array: .*; pass rows",
            ),
            (
                {"image": image.tolist()},
                {},
                "image=list: is read as float64, and the input is float32; "
                r"convert it: numpy.asarray\(image, 'float32'\)",
            ),
            ({"image": image}, {"keep": "scores"}, "keep='scores': is not a sequence of names"),
            ({"image": image}, {"keep": ("score",)}, 'not an output of the model; did you mean "scores"?'),
        ]
        for inputs, options, told in wrong:
            with pytest.raises(InvalidRequest, match=told):
                await gpu.run(model, inputs, **options)
        ref = await gpu.upload(images(1).astype("f8"))
        with pytest.raises(InvalidRequest, match=UPLOADED):
            await gpu.run(model, {"image": ref})
        await gpu.free(ref)
        given: Any = model
        with pytest.raises(InvalidRequest, match=r"run it: await gpu\.run"):
            await gpu.apply(given)
        with pytest.raises(InvalidRequest, match=r"ask it: await model\.explain"):
            await gpu.explain(given)
        await model.close()


async def test_a_run_that_fails_leaves_nothing() -> None:
    dims = (FLOAT, [3])
    proto = model_of([node("Add", "a b", "y")], {"a": dims, "b": dims}, {"y": dims})
    async with spawn(device="cpu") as gpu:
        model = await gpu.load(proto)
        x = np.ones(3, np.float32)
        ref = await gpu.upload(x)
        await gpu.free(ref)
        with pytest.raises(StaleBufferError):
            await gpu.run(model, {"a": x, "b": ref})
        assert await buffers(gpu) == 3  # the places of both inputs and the output
        await model.close()
        assert await buffers(gpu) == 0


async def test_all_nodes_that_cannot_be_run_are_named_before_anything_is_allocated() -> None:
    proto = image_model(1)
    proto.graph.node.extend(
        [
            node("Cast", "image", "bytes", to=onnx.TensorProto.UINT8),
            node("ImageDecoder", "bytes", "one", name="first"),
            node("Identity", "one", "two", name="behind"),
            node("ImageDecoder", "two", "three", name="second"),
        ]
    )
    async with spawn(device="cpu") as gpu:
        with pytest.raises(UnsupportedModel, match="2 nodes") as raised:
            await gpu.load(proto)
        assert [text.partition(":")[0] for text in raised.value.nodes] == [
            "node 'first' (ImageDecoder)",
            "node 'second' (ImageDecoder)",
        ]
        assert await buffers(gpu) == 0


@pytest.mark.parametrize("size", [4, "N"])
async def test_what_cannot_be_run_is_found_behind_what_cannot(size: int | str) -> None:
    """With fixed dims, what is refused for its attributes too; with others, what is whatever they are."""
    proto = model_of(
        [
            node("Bernoulli", "x", "b", name="bernoulli"),
            node("Unsqueeze", "b axes", "wide"),
            node("AveragePool", "wide", "pooled", name="pool", kernel_shape=[9]),
            node("RandomNormalLike", "b", "n", name="like"),
            node("RandomUniform", "", "u", name="uniform", shape=[4]),
            node("Cast", "n", "bytes", to=onnx.TensorProto.UINT8),
            node("ImageDecoder", "bytes", "i", name="image"),
            node("Add", "n u", "y", name="add"),
        ],
        {"x": (FLOAT, [size])},
        {"y": (FLOAT, [size])},
        {"axes": np.array([0, 1])},
    )
    async with spawn(device="cpu") as gpu:
        with pytest.raises(UnsupportedModel) as raised:
            await gpu.load(proto)
    named = dict(text.split(": ", 1) for text in raised.value.nodes)
    pool = named.pop("node 'pool' (AveragePool)", "")
    assert ("padded input has 4" in pool) == (size != "N")
    assert named == {
        "node 'bernoulli' (Bernoulli)": UNSEEDED,
        "node 'like' (RandomNormalLike)": UNSEEDED,
        "node 'uniform' (RandomUniform)": UNSEEDED,
        "node 'image' (ImageDecoder)": NO_WAY,
    }


async def test_the_explanation_names_the_nodes() -> None:
    async with spawn(device="cpu") as gpu:
        model = await gpu.load(image_model(1))
        text = str(await model.explain())
        assert "conv_fwd at node 'conv1' (Conv)" in text
        assert "matmul at node 'head' (Gemm)" in text
        await model.close()


def test_all_dims_that_need_a_size_are_named_as_a_caller_gives_them() -> None:
    features = [
        Feature(name="x", dtype=DType.FLOAT32, dims=("N", "a b", 3)),
        Feature(name="y", dtype=DType.FLOAT32, dims=("L", "N")),
    ]
    fix = r'give the size of N, a b, L: model\.explain\(N=8, L=8, \*\*\{"a b": 8\}\), or inputs$'
    with pytest.raises(InvalidRequest, match=fix):
        require_sizes_or_inputs(features, "model.explain")


async def test_an_explanation_needs_inputs_where_dims_or_values_are_open() -> None:
    async with spawn(device="cpu") as gpu:
        model = await gpu.load(image_model())
        with pytest.raises(InvalidRequest, match=r"give the size of N: model\.explain\(N=8\), or inputs$"):
            await model.explain()
        assert "conv_fwd" in str(await model.explain({"image": images(1)}))
        await model.close()
        shape = model_of(
            [node("Expand", "x shape", "y")],
            {"x": (FLOAT, [1]), "shape": (INT64, [1])},
            {"y": (FLOAT, [None])},
        )
        deciding = await gpu.load(shape)
        with pytest.raises(InvalidRequest, match="the values of shape are needed"):
            await deciding.explain()


async def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith(("cudnn_actor.onnx", "onnx"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "onnx", None)
    async with spawn(device="cpu") as gpu:
        with pytest.raises(ImportError, match=r"models need the package onnx: pip install .*\[onnx\]"):
            await gpu.load("model.onnx")


async def test_a_batch_that_does_not_fit_into_memory_is_named_by_its_input() -> None:
    async with spawn(device="cpu", memory_limit=4 << 20) as gpu:
        model = await gpu.load(image_model())
        with pytest.raises(OutOfMemory, match=r"^out of memory: input 'image': 7,680,000 bytes requested"):
            await gpu.run(model, image=images(10_000))
        await model.close()


@pytest.mark.parametrize("when", ["load", "warm", "run"])
@pytest.mark.parametrize("other", [0, 2 << 20])
async def test_a_model_that_does_not_fit_says_how_many_bytes_of_how_many(when: str, other: int) -> None:
    """Those of all of its weights, though it ends with one of them, and none stays."""
    side, limit = 512, 4 << 20
    weights = {name: np.ones((side, side), np.float32) for name in "abc" + "de" * (not other)}
    for number, array in enumerate(weights.values()):
        array[0, 0] = number
    names = ["x", *weights]
    nodes = [node("MatMul", f"{x} {w}", w + "x" if w != names[-1] else "y") for x, w in _chain(names)]
    batch: Any = 1 if when == "load" else "N"
    proto = model_of(nodes, {"x": (FLOAT, [batch, side])}, {"y": (FLOAT, None)}, weights)
    nbytes = sum(array.nbytes for array in weights.values())
    said = rf"^out of memory: the model's weights: {nbytes:,} bytes requested"
    said += r", and memory_limit=4,194,304 allows" if not other else rf"; buffers take {other:,} bytes"
    async with spawn(device="cpu", memory_limit=limit) as gpu:
        kept = await gpu.upload(np.zeros(other, np.uint8)) if other else None
        with pytest.raises(OutOfMemory, match=said) as raised:
            async with await gpu.load(proto) as model:
                await (model.warm(N=1) if when == "warm" else model.run(x=np.ones((1, side), np.float32)))
        assert raised.value.requested == nbytes
        assert raised.value.retry_safe == bool(other)
        await gpu.drain()
        assert (await gpu.statistics()).live_bytes == other
        del kept


def _chain(names: list[str]) -> list[tuple[str, str]]:
    """Each name behind the value that the one before it gives."""
    return [(names[n - 1] + "x" * (n > 1), names[n]) for n in range(1, len(names))]
