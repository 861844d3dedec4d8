"""Values on their way in and out: layouts, dtypes, and what is no number."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import scipy.sparse

from cudnn_actor import DType, InvalidRequest, Layout
from cudnn_actor.protocol.types.dtypes import DTypeName
from cudnn_actor.protocol.types.tensor import LayoutLike

from .cases import all_cases
from .rigs import spawn

pytestmark = pytest.mark.usefixtures("isolation")

LAYOUTS: list[LayoutLike] = [Layout.NCHW, "NHWC"]
DIMS = [(2, 3, 5), (2, 3, 4, 5), (2, 3, 4, 5, 6)]


async def test_what_comes_out_is_what_went_in() -> None:
    async with spawn(device="cpu") as gpu:
        with all_cases() as case:
            for layout, dtype, dims in itertools.product(LAYOUTS, DType, DIMS):
                with case((layout, dtype, dims)):
                    values = np.arange(np.prod(dims)).reshape(dims) % 100
                    array = values.astype(dtype.numpy)
                    ref = await gpu.upload(array, layout=layout)
                    assert (ref.spec.dims, ref.spec.layout, ref.spec.dtype) == (dims, Layout(layout), dtype)
                    out = await gpu.download(ref)
                    np.testing.assert_array_equal(out, array)
                    assert out.dtype == array.dtype
                    assert out.flags.c_contiguous


@pytest.mark.parametrize("dims", [(), (0,), (2, 0, 3), (0, 0), (1,) * 8, (2, 1, 3, 1, 2, 3, 2, 2)])
async def test_a_buffer_has_up_to_eight_dims_and_perhaps_no_elements(dims: tuple[int, ...]) -> None:
    async with spawn(device="cpu") as gpu:
        for dtype in DType:
            array = (np.arange(np.prod(dims, dtype=int)).reshape(dims) % 100).astype(dtype.numpy)
            ref, other = await gpu.upload(array), await gpu.empty(dims, dtype=dtype)
            await gpu.copy(ref, other)
            await gpu.fill(ref, 1)
            for buffer, wanted in ((ref, np.ones(dims)), (other, array)):
                out = await gpu.download(buffer)
                assert (out.shape, out.dtype) == (dims, dtype.numpy)
                np.testing.assert_array_equal(out, wanted.astype(dtype.numpy))
            await gpu.write(ref, array)
            assert (await gpu.download(ref)).tobytes() == array.tobytes()
            assert (await gpu.statistics()).live_bytes == 2 * array.nbytes
            for buffer in (ref, other):
                await gpu.free(buffer)
        assert (await gpu.statistics()).live_buffers == 0


async def test_numbers_become_tensors_without_dims() -> None:
    async with spawn(device="cpu") as gpu:
        for number in (3.5, 7, True, np.uint64(2**64 - 1)):
            out = await gpu.download(await gpu.upload(number))
            assert (out.shape, out.item()) == ((), number)


WIDE = {
    DType.INT64: [-(2**63), -(2**63) + 1, -(2**53) - 1, 2**53 + 1, 2**63 - 1],
    DType.UINT64: [0, 2**53 + 1, 2**63 + 1, 2**64 - 1],
}


@pytest.mark.parametrize("dtype", WIDE)
async def test_integers_of_64_bits_keep_every_digit(dtype: DType) -> None:
    async with spawn(device="cpu") as gpu:
        array = np.array(WIDE[dtype], dtype.numpy).reshape(1, -1, 1)
        src = await gpu.upload(array, layout="NHWC")
        dst = await gpu.empty(array.shape, dtype=dtype)
        await gpu.copy(src, dst)
        assert (await gpu.download(dst)).ravel().tolist() == WIDE[dtype]
        for value in WIDE[dtype]:
            for given in (value, dtype.numpy.type(value)):
                await gpu.fill(dst, given)  # type: ignore[arg-type]
                assert set((await gpu.download(dst)).ravel().tolist()) == {value}


async def test_a_bool_is_filled_with_bools_and_0_and_1() -> None:
    async with spawn(device="cpu") as gpu:
        ref = await gpu.upload([False, True])
        assert ref.spec.dtype is DType.BOOL
        for value in (True, 0, np.True_, 0.0, 1, False):
            await gpu.fill(ref, value)  # type: ignore[arg-type]
            assert (await gpu.download(ref)).tolist() == [bool(value)] * 2
        for wrong in (2, -1, 0.5, float("nan"), "1", None):
            with pytest.raises(InvalidRequest) as caught:
                await gpu.fill(ref, wrong)  # type: ignore[arg-type]
            assert caught.value.field == "value"
        with pytest.raises(InvalidRequest, match="bool where a real number belongs"):
            await gpu.fill(await gpu.empty((1,)), True)
        assert (await gpu.download(ref)).tolist() == [False, False]


async def test_an_array_may_lie_in_memory_as_it_likes() -> None:
    array = np.arange(2 * 3 * 4 * 10, dtype=np.float32).reshape(10, 4, 3, 2).T[:, ::-1, :, ::2]
    async with spawn(device="cpu") as gpu:
        np.testing.assert_array_equal(await gpu.download(await gpu.upload(array, layout="NHWC")), array)


async def test_lists_of_floats_become_float64() -> None:
    async with spawn(device="cpu") as gpu:
        ref = await gpu.upload([[[1.5, 2.5]]])
        assert ref.spec.dtype is DType.FLOAT64
        np.testing.assert_array_equal(await gpu.download(ref), [[[1.5, 2.5]]])


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "int32"])
async def test_whole_numbers_go_where_they_are_told(dtype: DTypeName) -> None:
    async with spawn(device="cpu") as gpu:
        out = await gpu.download(await gpu.upload([[[1, -2, 3]]], dtype=dtype))
    assert out.dtype == DType(dtype).numpy
    np.testing.assert_array_equal(out.astype(float), [[[1, -2, 3]]])


async def test_floats_are_rounded_to_the_dtype_that_is_asked_for() -> None:
    async with spawn(device="cpu") as gpu:
        out = await gpu.download(await gpu.upload([[[1 / 3, 1e300]]], dtype=DType.BFLOAT16))
    np.testing.assert_array_equal(out, np.array([[[1 / 3, np.inf]]], ml_dtypes.bfloat16))


async def test_the_array_may_change_once_upload_has_returned() -> None:
    array = np.ones((1, 1, 8, 8), np.float32)
    async with spawn(device="cpu") as gpu:
        ref = await gpu.upload(array)
        array[:] = 2
        assert (await gpu.download(ref)).max() == 1


BAD: list[tuple[Callable[[], Any], dict[str, Any], str]] = [
    (lambda: np.array([[[object()]]]), {}, "array"),
    (lambda: [["a", "b"]], {}, "array"),
    (lambda: np.ones((1, 1, 2), complex), {}, "array"),
    (lambda: np.zeros((1, 1, 2), "datetime64[s]"), {}, "array"),
    (lambda: np.zeros((1, 1, 2), [("a", "f4")]), {}, "array"),
    (lambda: np.zeros((1, 1, 2), ml_dtypes.float8_e4m3fn), {}, "array"),
    (lambda: [[1.0, 2.0], [3.0]], {}, "array"),
    (lambda: None, {}, "array"),
    (lambda: np.ones((1, 1, 2), np.longdouble), {}, "array"),
    (lambda: np.ones((1, 1, 2)), {"dtype": "float8"}, "dtype"),
    (lambda: np.ones((1, 1, 2)), {"dtype": complex}, "dtype"),
    (lambda: np.ones((1, 1, 2)), {"layout": "NHCW"}, "layout"),
    (lambda: np.ones((1, 1, 2)), {"layout": "STRIDED"}, "layout"),
    (lambda: np.ones((1, 2)), {"layout": "NHWC"}, "layout"),
    (lambda: np.ones((1,) * 9), {}, "array"),
    (lambda: np.ones((1, 1, 2)), {"dtype": "int8"}, "array"),
    (lambda: [[[300]]], {"dtype": "int8"}, "array"),
    (lambda: [[[-1]]], {"dtype": "uint8"}, "array"),
    (lambda: [2**63], {"dtype": "int64"}, "array"),
    (lambda: [0, 2], {"dtype": "bool"}, "array"),
    (lambda: [0.0, 1.0], {"dtype": "bool"}, "array"),
]


async def test_what_is_no_tensor_is_named_with_its_field_and_a_fix() -> None:
    async with spawn(device="cpu") as gpu:
        with all_cases() as case:
            for number, (array, options, field) in enumerate(BAD):
                with case(f"BAD[{number}]"):
                    with pytest.raises(InvalidRequest) as caught:
                        await gpu.upload(array(), **options)
                    assert caught.value.field == field
                    assert caught.value.fix in str(caught.value)
                    assert (await gpu.statistics()).live_buffers == 0
                    await gpu.free(await gpu.upload([1.0]))


async def test_what_a_buffer_cannot_hold_is_named_as_the_argument_of_write() -> None:
    async with spawn(device="cpu") as gpu:
        ref = await gpu.upload(np.zeros((1, 1, 2), np.int8))
        for array in (np.ones((1, 1, 2)), np.full((1, 1, 2), 300), np.zeros((1, 3), np.int8)):
            with pytest.raises(InvalidRequest, match=r"^array="):
                await gpu.write(ref, array)


class Unreadable:
    """An array by its methods, which fail."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, place: int) -> float:
        raise OSError("the file is gone")


async def test_what_is_no_array_at_all_is_named_with_what_to_pass() -> None:
    async with spawn(device="cpu") as gpu:
        ref = await gpu.upload([1.0])
        wrong: list[tuple[Any, str]] = [
            (ref, "array=<buffer .*>: is a buffer, .*; pass it to requests as it is; Copy"),
            ([ref, ref], "is a buffer"),
            ({"x": 1.0}, "array={'x': 1.0}: is of type dict, .*; pass a NumPy array"),
            ((x for x in (1, 2)), "is of type generator"),
            (np.ndarray, "is of type type"),
            (Unreadable(), "array=Unreadable: cannot be converted to an array: the file is gone"),
        ]
        for given, told in wrong:
            for send in (gpu.upload, functools.partial(gpu.write, ref)):
                with pytest.raises(InvalidRequest, match=told) as caught:
                    await send(given)
                assert caught.value.field == "array"


class Meta:
    """What a tensor on PyTorch's meta device tells of itself."""

    is_meta, dtype, shape = True, "torch.float32", (2, 3)


class Sparse:
    """What a sparse tensor of PyTorch tells of itself."""

    is_meta, layout, dtype, shape = False, "torch.sparse_coo", "torch.float32", (2, 3)


@pytest.mark.parametrize(
    ("array", "text"),
    [
        (Meta(), r"^array=Meta: is on PyTorch's meta device, so it has no values; make it on a device"),
        (Sparse(), r"^array=Sparse: is sparse; pass x\.to_dense\(\)"),
        (scipy.sparse.csr_array((2, 3)), r"^array=csr_array: is sparse; pass x\.toarray\(\)"),
    ],
)
async def test_what_has_no_number_for_each_element_is_refused_with_the_way_out(array: Any, text: str) -> None:
    async with spawn(device="cpu") as gpu:
        with pytest.raises(InvalidRequest, match=text):
            await gpu.upload(array)
