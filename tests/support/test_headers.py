"""The prototypes read from cuDNN's and cuBLAS's headers are those that are there."""

from __future__ import annotations

import ctypes
import re
from collections import ChainMap
from typing import Any

import pytest

from cudnn_actor.engines.base import EngineFailure
from cudnn_actor.engines.cuda.library import libcublas
from cudnn_actor.engines.cuda.library.libcudnn import PROTOTYPES

from .child import Child
from .headers import Prototype, include_folder, parse, prototypes

HEADER = """
/* cudnnStatus_t CUDNNWINAPI cudnnInAComment(void); */
typedef void(CUDNNWINAPI *cudnnCallback_t)(int severity, const char *message);
const char *CUDNNWINAPI
cudnnText(cudnnStatus_t status); // of a status
CUDNN_DEPRECATED cudnnStatus_t CUDNNWINAPI cudnnOld(
    const int dims[], /* of the tensor */
    void **address, const void *x, unsigned long long size, cudnnHandle_t h);
size_t CUDNNWINAPI cudnnNumber(void);
"""


def test_a_header_is_read_as_c_declares_it() -> None:
    assert parse(HEADER) == {
        "cudnnText": Prototype("const char *", ("cudnnStatus_t",)),
        "cudnnOld": Prototype(
            "cudnnStatus_t",
            ("const int *", "void **", "const void *", "unsigned long long", "cudnnHandle_t"),
            deprecated=True,
        ),
        "cudnnNumber": Prototype("size_t", ()),
    }


def test_every_function_of_the_installed_headers_is_found() -> None:
    found = prototypes(include_folder())
    assert {"cudnn_graph", "cudnn_ops", "cudnn_cnn", "cudnn_adv"} <= set(found)
    for header, functions in found.items():
        text = (include_folder() / f"{header}.h").read_text()
        declared = set(re.findall(r"CUDNNWINAPI\s+(cudnn\w+)\s*\(", text))
        assert set(functions) == declared


def test_prototypes_of_the_classic_interface_are_read() -> None:
    found = prototypes(include_folder())
    softmax = found["cudnn_ops"]["cudnnSoftmaxForward"]
    assert softmax.returns == "cudnnStatus_t"
    assert softmax.parameters[:4] == (
        "cudnnHandle_t",
        "cudnnSoftmaxAlgorithm_t",
        "cudnnSoftmaxMode_t",
        "const void *",
    )
    assert not softmax.deprecated
    assert found["cudnn_ops"]["cudnnPoolingForward"].deprecated
    assert found["cudnn_graph"]["cudnnGetLastErrorString"] == Prototype("void", ("char *", "size_t"))


_NUMBERS = {
    "int": ctypes.c_int,
    "int *": ctypes.POINTER(ctypes.c_int),
    "int64_t": ctypes.c_int64,
    "long long int": ctypes.c_longlong,
    "size_t": ctypes.c_size_t,
    "cudaDataType": ctypes.c_int,
}


def ctype(parameter: str) -> Any:
    """What the table of functions has for a C type: descriptors, handles and data are plain pointers."""
    name = parameter.removeprefix("const ")
    if name.endswith(("Descriptor_t *", "Handle_t *")):
        return ctypes.POINTER(ctypes.c_void_p)
    if name in ("void *", "cudaStream_t") or name.endswith(("Descriptor_t", "Handle_t")):
        return ctypes.c_void_p
    if name.startswith(("cudnn", "cublas")) and not name.endswith("*"):  # an enum
        return ctypes.c_int
    return _NUMBERS[name]


@pytest.mark.parametrize("name", PROTOTYPES)
def test_a_function_is_called_as_its_header_declares_it(name: str) -> None:
    functions = ChainMap(*prototypes(include_folder()).values())
    assert functions[name].returns == "cudnnStatus_t"
    assert PROTOTYPES[name] == tuple(map(ctype, functions[name].parameters))


@pytest.mark.parametrize("name", libcublas.PROTOTYPES)
def test_a_function_of_cublas_is_called_as_its_header_declares_it(name: str) -> None:
    function = parse((include_folder("nvidia.cu13") / "cublas_api.h").read_text(encoding="utf-8"))[name]
    assert function.returns == "cublasStatus_t"
    assert libcublas.PROTOTYPES[name] == tuple(map(ctype, function.parameters))


def test_the_installed_cublas_has_its_functions_and_says_what_is_wrong(child: Child) -> None:
    assert child.call(error_without_a_device) == "CUBLAS_STATUS_NOT_INITIALIZED: cublasCreate_v2"


def error_without_a_device() -> str:
    try:
        libcublas.CublasHandle()
    except EngineFailure as failure:
        return str(failure)
    return "there is a device"
