"""Views on the GPU: CuPy arrays on the buffer's own bytes, and who may use those for how long."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

from cudnn_actor import ConvFwd, ConvSpec, DType, spawn
from cudnn_actor.messages import View
from cudnn_actor.protocol.types.dtypes import DTypeName
from cudnn_actor.protocol.types.tensor import LayoutName

from ..service.full_memory import FULL, LIMIT, fill_memory, has_room

pytestmark = pytest.mark.gpu

X = np.arange(2 * 3 * 4 * 5, dtype=np.float32).reshape(2, 3, 4, 5)


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("dtype", list(DType))
async def test_a_view_is_a_cupy_array_of_the_buffers_dims_strides_and_values(
    layout: LayoutName, dtype: DType
) -> None:
    import cupy

    async with spawn(device="cuda:0", isolation="thread") as gpu:
        ref = await gpu.upload(X.astype(dtype.numpy), layout=layout)
        view = await gpu.view(ref)
        assert isinstance(view, cupy.ndarray)
        assert (view.shape, view.dtype) == (X.shape, dtype.numpy)
        assert view.strides == tuple(stride * view.itemsize for stride in ref.spec.strides)
        bits = view.view(f"u{view.itemsize}").get()  # CuPy need not know how to copy each dtype
        np.testing.assert_array_equal(bits.view(dtype.numpy), X.astype(dtype.numpy))
        del view


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
async def test_torch_takes_a_view_without_a_copy(dtype: DTypeName) -> None:
    torch = pytest.importorskip("torch")
    async with spawn(device="cuda:0", isolation="thread") as gpu:
        ref = await gpu.upload(X, dtype=dtype, layout="NHWC")
        view = await gpu.view(ref)
        tensor = torch.from_dlpack(view)
        assert (tensor.dtype, tensor.data_ptr()) == (getattr(torch, dtype), view.data.ptr)
        tensor += 1
        torch.cuda.synchronize()
        np.testing.assert_array_equal((await gpu.download(ref)).astype(np.float32), X + 1)
        del view, tensor


async def test_a_view_shows_what_was_sent_before_it_to_any_stream() -> None:
    import cupy

    rng = np.random.default_rng(5)
    async with spawn(device="cuda:0", isolation="thread") as gpu:
        x = await gpu.upload(rng.integers(-2, 3, (8, 64, 96, 96)).astype(np.float32))
        w = await gpu.upload(np.ones((64, 64, 3, 3), np.float32))
        y = await gpu.conv_fwd(x, w, conv=ConvSpec.symmetric(2, pad=1))
        expected = await gpu.download(y)
        await gpu.fill(y, 0)
        message = ConvFwd(x=x, w=w, y=y, conv=ConvSpec.symmetric(2, pad=1))
        for _ in range(30):
            gpu.tell(message)
        view = await gpu.view(y)
        with cupy.cuda.Stream(non_blocking=True):
            got = view.get()
        np.testing.assert_array_equal(got, expected)
        del view


def as_tensor(view: Any) -> Any:
    return pytest.importorskip("torch").from_dlpack(view)


DERIVE = {
    "itself": lambda view: view,
    "a slice": lambda view: view[0, 0, 3:5],
    "a capsule": lambda view: view.__dlpack__(),
    "a tensor": as_tensor,
    "a slice of a tensor": lambda view: as_tensor(view)[0, 0, 3:5],
}


@pytest.mark.parametrize("derive", DERIVE.values(), ids=DERIVE)
async def test_whatever_is_made_of_a_view_keeps_the_bytes_after_free(derive: Any) -> None:
    async with spawn(device="cuda:0", isolation="thread", memory_limit=LIMIT) as gpu:
        derived = derive(await fill_memory(gpu))
        assert not await has_room(gpu)
        if hasattr(derived, "max"):
            assert float(derived.min()) == float(derived.max()) == 5
        del derived
        gc.collect()
        assert await has_room(gpu)


async def test_other_buffers_do_not_get_the_bytes_of_a_view() -> None:
    async with spawn(device="cuda:0", isolation="thread") as gpu:
        view = await fill_memory(gpu)
        others = [await gpu.empty(FULL) for _ in range(40)]
        for other in others:
            await gpu.fill(other, 7)
        assert float(view.min()) == float(view.max()) == 5
        del view


async def test_a_view_is_readable_after_the_end_of_the_service() -> None:
    import cupy

    async with spawn(device="cuda:0", isolation="thread") as gpu:
        view = await gpu.view(await gpu.upload(X))
        kept = await fill_memory(gpu)
    np.testing.assert_array_equal(view.get(), X)
    kept += 1
    assert float(kept.max()) == 6
    del view, kept
    gc.collect()
    cupy.cuda.Device().synchronize()
    async with spawn(device="cuda:0", isolation="thread") as gpu:
        np.testing.assert_array_equal(await gpu.download(await gpu.upload(X)), X)


async def test_views_that_are_never_looked_at_cost_nothing() -> None:
    import cupy

    async with spawn(device="cuda:0", isolation="thread", memory_limit=LIMIT) as gpu:
        ref = await gpu.empty(FULL)
        for _ in range(2000):
            gpu.submit(View(buffer=ref)).cancel()
            await gpu.view(ref)
        await gpu.free(ref)
        assert await has_room(gpu)
    cupy.cuda.Device().synchronize()


async def test_a_view_can_be_uploaded_again() -> None:
    async with spawn(device="cuda:0", isolation="thread") as gpu:
        source = await gpu.upload(X, layout="NHWC")
        copy = await gpu.upload(await gpu.view(source))
        np.testing.assert_array_equal(await gpu.download(copy), X)
