"""Constant nodes: they are read without the reference implementation, and give what it gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from cudnn_actor.onnx.budget import Budget
from cudnn_actor.onnx.folding import fold
from cudnn_actor.onnx.values import Declined

from ..in_one_test import cases_in_one_test

DIMS = [(), (0,), (3,), (2, 3)]
KINDS = [
    {"value_float": 1.5},
    {"value_floats": [1.5, -0.0]},
    {"value_int": 3},
    {"value_ints": [3, 1 << 40]},
    {"value_string": "s"},
    {"value_strings": ["s", "t"]},
    {},
]


def constant(**attributes: Any) -> onnx.NodeProto:
    return helper.make_node("Constant", [], ["y"], **attributes)


def in_fields(code: int, dims: tuple[int, ...]) -> TensorProto:
    """Ones of a dtype, in the field of the message that is meant for it."""
    count = int(np.prod(dims))
    given: list[Any] = ["a"] * count if code == TensorProto.STRING else [1] * count
    return helper.make_tensor("value", code, dims, given)


def in_bytes(code: int, dims: tuple[int, ...]) -> TensorProto:
    """Twos of a dtype, as bytes."""
    return numpy_helper.from_array(np.full(dims, 2).astype(helper.tensor_dtype_to_np_dtype(code)), "value")


def answer_of(work: Any) -> Any:
    """What a reading gives, in a form that can be compared; None if it is refused."""
    try:
        array = np.asarray(work())
    except Exception:  # noqa: BLE001 - that both refuse is compared, not with which words
        return None
    return array.dtype, array.shape, array.tolist() if array.dtype.hasobject else array.tobytes()


def by_the_reference(node: onnx.NodeProto, version: int) -> Any:
    imports = [helper.make_opsetid("", version)]
    function = helper.make_function("f", "f", [], list(node.output), [node], imports)
    (found,) = ReferenceEvaluator(function).run(None, {}, attributes={})
    return found


def folded(node: onnx.NodeProto, version: int) -> Any:
    (found,) = fold(node, [], {"": version}, Budget(1 << 20, 1 << 20))
    return found


def check(node: onnx.NodeProto, version: int) -> Any:
    wanted = answer_of(lambda: by_the_reference(node, version))
    assert answer_of(lambda: folded(node, version)) == wanted
    return wanted


@cases_in_one_test
@pytest.mark.parametrize("make", [in_fields, in_bytes])
@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("code", [code for code in TensorProto.DataType.values() if code])
def test_a_tensor_of_each_dtype_is_read_as_by_the_reference(
    code: int, dims: tuple[int, ...], make: Any
) -> None:
    if make is in_bytes and code == TensorProto.STRING:
        return
    for version in (1, 9, 11, 13, 22):
        assert check(constant(value=make(code, dims)), version) is not None


@pytest.mark.parametrize("attributes", KINDS, ids=lambda each: "".join(each) or "nothing")
def test_other_kinds_of_constants_are_read_as_by_the_reference(attributes: dict[str, Any]) -> None:
    assert (check(constant(**attributes), 22) is None) == (not attributes)


def test_what_is_no_tensor_is_refused() -> None:
    ones = numpy_helper.from_array(np.ones(3, np.float32), "value")
    short, elsewhere = TensorProto(), TensorProto()
    short.CopyFrom(ones)
    short.raw_data = b"123"
    elsewhere.CopyFrom(ones)
    elsewhere.data_location = TensorProto.EXTERNAL
    elsewhere.external_data.add(key="location", value="no such file")
    places = numpy_helper.from_array(np.array([1]), "places")
    sparse = helper.make_sparse_tensor(numpy_helper.from_array(np.ones(1, np.float32), "v"), places, [3])
    linked = constant(value=ones)
    linked.attribute[0].ref_attr_name = "of_a_function"
    nodes = [
        constant(value=short),
        constant(value=elsewhere),
        constant(sparse_value=sparse),
        constant(value=ones, value_float=1.0, sparse_value=sparse),
        linked,
    ]
    for node in nodes:
        with pytest.raises(Declined):
            folded(node, 22)
