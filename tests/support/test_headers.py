"""The prototypes read from cuDNN's and cuBLAS's headers are those that are there."""

from __future__ import annotations

import ctypes
import re
from collections import ChainMap
from typing import Any

import pytest

from cudnn_actor.engines.base import EngineFailure
from cudnn_actor.engines.cuda.library import libcublas, libcublaslt
from cudnn_actor.engines.cuda.library.libcudnn import PROTOTYPES
from cudnn_actor.engines.cuda.operations.cublaslt import Descriptors, LtProduct, preference
from cudnn_actor.engines.cuda.planning.products import product_of

from ..engines.cuda.planning.test_products import PRODUCTS
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
    "uint64_t": ctypes.c_uint64,
    "size_t": ctypes.c_size_t,
    "size_t *": ctypes.POINTER(ctypes.c_size_t),
    "int32_t": ctypes.c_int32,
    "int32_t *": ctypes.c_void_p,  # of the device
    "uint32_t": ctypes.c_uint32,
    "unsigned long long": ctypes.c_ulonglong,
    "float": ctypes.c_float,
    "void **": ctypes.POINTER(ctypes.c_void_p),
    "cudaDataType": ctypes.c_int,
    "cudaDataType_t": ctypes.c_int,
}
_OPAQUE = ("Descriptor_t", "Handle_t", "LtHandle_t", "Desc_t", "Layout_t", "Preference_t")
_STRUCTURES = ("cublasLtMatmulAlgo_t *", "cublasLtMatmulHeuristicResult_t *")


def ctype(parameter: str) -> Any:
    """What the table of functions has for a C type: descriptors, handles and data are plain pointers."""
    name = parameter.removeprefix("const ")
    if name == "cudnnRNNDataLayout_t":  # an enum, though it ends as a descriptor of cuBLAS does
        return ctypes.c_int
    if name.endswith(tuple(f"{kind} *" for kind in _OPAQUE)):
        return ctypes.POINTER(ctypes.c_void_p)
    if name in ("void *", "cudaStream_t", *_STRUCTURES) or name.endswith(_OPAQUE):
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


_PYTHON_API = 4
"""`FUNCFLAG_PYTHONAPI` of ctypes: a call keeps the interpreter's lock."""


def lt_header() -> str:
    return (include_folder("nvidia.cu13") / "cublasLt.h").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", libcublaslt.PROTOTYPES)
def test_a_function_of_cublaslt_is_called_as_its_header_declares_it(name: str) -> None:
    function = parse(lt_header())[name]
    assert function.returns == "cublasStatus_t"
    assert libcublaslt.PROTOTYPES[name] == tuple(map(ctype, function.parameters))


def test_the_numbers_of_cublaslt_are_those_of_its_header() -> None:
    prefixes = {
        "CUBLASLT_MATMUL_DESC_": libcublaslt.Attribute,
        "CUBLASLT_MATRIX_LAYOUT_": libcublaslt.Layout,
        "CUBLASLT_MATMUL_PREF_": libcublaslt.Preference,
        "CUBLASLT_EPILOGUE_": libcublaslt.Epilogue,
    }
    numbers = {name: int(value) for name, value in re.findall(r"\b(CUBLASLT_\w+) = (\d+)\b", lt_header())}
    for prefix, enum in prefixes.items():
        for member in enum:
            assert numbers[prefix + str(member.name)] == member.value, member
    assert numbers["CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE"] == libcublaslt.SUMS_IN_FLOAT32
    assert re.search(r"uint64_t data\[8\];\s*} cublasLtMatmulAlgo_t;", lt_header())
    assert ctypes.sizeof(libcublaslt.Found) == 64 + 8 + 4 + 4 + 16


def test_the_installed_cublaslt_takes_every_description_of_a_product(child: Child) -> None:
    """Without a device, as far as before an algorithm is chosen."""
    asked = []
    for graph in PRODUCTS.values():
        found = product_of(graph)
        assert found is not None
        asked.append(found.product)
    assert child.call(descriptions, asked) == len(asked)
    assert child.call(lt_error_without_a_device) == "CUBLAS_STATUS_NOT_INITIALIZED: cublasLtCreate"


def test_descriptions_of_products_keep_the_interpreters_lock(child: Child) -> None:
    kept = child.call(functions_that_keep_the_lock)
    assert sorted(kept) == sorted(name for name in libcublaslt.PROTOTYPES if name in libcublaslt.DESCRIBING)
    assert len(kept) == 9


def functions_that_keep_the_lock() -> list[str]:
    library = libcublaslt.libcublaslt()
    return [name for name in libcublaslt.PROTOTYPES if getattr(library, name)._flags_ & _PYTHON_API]


def descriptions(asked: list[LtProduct]) -> int:
    return len([(Descriptors(each), preference(each, 1 << 25)) for each in asked])


def lt_error_without_a_device() -> str:
    try:
        libcublaslt.LtHandle()
    except EngineFailure as failure:
        return str(failure)
    return f"there is a device, for version {libcublaslt.version()}"


def test_the_installed_cublas_has_its_functions_and_says_what_is_wrong(child: Child) -> None:
    assert child.call(error_without_a_device) == "CUBLAS_STATUS_NOT_INITIALIZED: cublasCreate_v2"


def error_without_a_device() -> str:
    try:
        libcublas.CublasHandle()
    except EngineFailure as failure:
        return str(failure)
    return "there is a device"
