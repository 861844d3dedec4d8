"""Products of matrices by cuBLASLt, with the epilogues that it has.

    d = activation(a b + c + bias)

All of this is computed in float32 (float64 of float64) and rounded once. c has the dims of
the product, the bias one element for each column. If a sum is split, its parts have the type
that is computed in, never the result's.

cuBLASLt's kernels for Hopper take two thirds of the time of cuDNN's at the sizes of GPT-2
(684 and 1,040 us for 48 products, H100). cuBLASLt's heuristics choose the algorithm when a
plan is built, and the algorithm is part of the plan.
https://docs.nvidia.com/cuda/cublas/#cublasltmatmul
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterator, Sequence
from ctypes import c_int32, c_int64, c_uint32, c_uint64, c_void_p
from typing import Any, NamedTuple

import msgspec

from cudnn_actor.engines.cuda.cudnn.frontend_graph import Refused
from cudnn_actor.engines.cuda.kernels.kernel import Run
from cudnn_actor.engines.cuda.library.libcublaslt import (
    ALGORITHM_BYTES,
    SUMS_IN_FLOAT32,
    Attribute,
    Described,
    Epilogue,
    Found,
    Layout,
    Preference,
    thread_lt_handle,
)
from cudnn_actor.engines.cuda.library.libraries import libraries
from cudnn_actor.engines.cuda.operations.matmul import (
    CUDA_TYPES,
    check_for_libraries,
    computing,
    describe_product,
)
from cudnn_actor.protocol.operations import GraphTensor, PointwiseMode
from cudnn_actor.protocol.types.dtypes import DType
from cudnn_actor.protocol.types.numerics import Numerics

__all__ = ["ACTIVATIONS", "Descriptors", "LtMatrix", "LtProduct", "Operands", "lt_product", "preference"]

ACTIVATIONS = {PointwiseMode.RELU: Epilogue.RELU, PointwiseMode.GELU_TANH: Epilogue.GELU}
"""The functions that cuBLASLt has as epilogues; one of them comes last."""
_A, _B, _Y, _C = range(4)
_ALIGNMENTS = (
    Preference.MIN_ALIGNMENT_A_BYTES,
    Preference.MIN_ALIGNMENT_B_BYTES,
    Preference.MIN_ALIGNMENT_D_BYTES,
    Preference.MIN_ALIGNMENT_C_BYTES,
)
"""The preferences for alignments, in the order of the matrices. Without a c, c's alignment is d's."""


class Operands(NamedTuple):
    """The tensors of a product and of what follows it: `added` is c."""

    a: GraphTensor
    b: GraphTensor
    y: GraphTensor
    added: GraphTensor | None = None
    bias: GraphTensor | None = None


class LtMatrix(msgspec.Struct, frozen=True):
    """A matrix as it is stored, by columns.

    `leading`: the distance of two columns. `step`: the distance of two matrices of the batch.
    """

    dtype: DType
    rows: int
    columns: int
    leading: int
    step: int


class LtProduct(msgspec.Struct, frozen=True, kw_only=True):
    """A product for cuBLASLt, as data.

    Its addresses are those of a, b and d; of c, if there are four matrices; of the bias, if the epilogue has
    it; and of the workspace, if it needs one.

    Parameters
    ----------
    matrices
        a, b, d and, if there is one, c. cuBLASLt stores matrices by columns: for a y by rows, it computes
        yᵀ = bᵀ aᵀ.
    transposed
        Whether a and b are to be transposed.
    batch
        The number of matrices of each operand.
    compute
        A cublasComputeType_t.
    epilogue
        A cublasLtEpilogue_t.
    alignments
        The alignments of the matrices' addresses, in bytes.
    bias_alignment
        The alignment of the bias; 0 if there is none.
    algorithm
        A cublasLtMatmulAlgo_t, from a library of the version that runs it; empty before one is chosen.
    workspace
        Bytes that the algorithm needs.
    """

    matrices: tuple[LtMatrix, ...]
    transposed: tuple[bool, bool]
    batch: int
    compute: int
    epilogue: int
    alignments: tuple[int, ...]
    bias_alignment: int = 0
    algorithm: bytes = b""
    workspace: int = 0

    def __post_init__(self) -> None:
        if len(self.algorithm) not in (0, ALGORITHM_BYTES):
            raise ValueError(f"an algorithm has {ALGORITHM_BYTES} bytes, not {len(self.algorithm)}")

    @property
    def name(self) -> str:
        """The product's name in the tags of plans. It differs for different algorithms."""
        return f"cublaslt-{hashlib.blake2b(self.algorithm, digest_size=4).hexdigest()}"

    @property
    def reads(self) -> list[int]:
        """The numbers of the addresses that the product only reads."""
        return [n for n in range(len(self.matrices) + (self.bias_alignment > 0)) if n != _Y]

    def with_algorithms(self, workspace_limit: int, most: int) -> Iterator[LtProduct]:
        """Yields the product with each of the `most` algorithms that cuBLASLt expects to be the fastest.

        Raises `EngineFailure` if cuBLASLt has none.
        """
        handle, wanted, limits = thread_lt_handle(), Descriptors(self), preference(self, workspace_limit)
        found, count = (Found * most)(), ctypes.c_int()
        a, b, d, c = wanted.matrices
        handle.library.cublasLtMatmulAlgoGetHeuristic(
            *(handle.pointer, wanted.product.pointer, a, b, c, d, limits.pointer),
            *(most, ctypes.byref(found), ctypes.byref(count)),
        )
        for each in found[: count.value]:
            if not each.state:
                yield msgspec.structs.replace(self, algorithm=bytes(each.algorithm), workspace=each.workspace)

    def run(self) -> Run:
        """The run on the current device. Raises `EngineFailure`."""
        handle, given, cupy = thread_lt_handle(), Descriptors(self), libraries().cupy
        multiply, algorithm = handle.library.cublasLtMatmul, ctypes.create_string_buffer(self.algorithm)
        factor = ctypes.c_double if self.matrices[_A].dtype is DType.FLOAT64 else ctypes.c_float
        added, workspace = len(self.matrices) > _C, self.workspace
        factors = factor(1), factor(int(added))
        one, beta = map(ctypes.byref, factors)
        a, b, d, c = given.matrices

        def launch(addresses: Sequence[int], _: Sequence[float]) -> None:
            rest = iter(addresses)
            at_a, at_b, at_d = next(rest), next(rest), next(rest)
            at_c = next(rest) if added else at_d
            if self.bias_alignment:
                given.product.set(Attribute.BIAS_POINTER, c_void_p(next(rest)))
            multiply(
                *(handle.pointer, given.product.pointer, one, at_a, a, at_b, b, beta, at_c, c, at_d, d),
                *(algorithm, next(rest, None), workspace, cupy.cuda.get_current_stream().ptr),
            )

        return launch


class Descriptors:
    """The descriptors of a product for cuBLASLt: `matrices` are those of a, b, d and c."""

    def __init__(self, of: LtProduct) -> None:
        double = of.matrices[_A].dtype is DType.FLOAT64
        self.product = Described(
            "MatmulDesc", of.compute, CUDA_TYPES[DType.FLOAT64 if double else DType.FLOAT32]
        )
        for attribute, transposed in zip((Attribute.TRANSA, Attribute.TRANSB), of.transposed, strict=True):
            self.product.set(attribute, c_int32(transposed))
        self.product.set(Attribute.EPILOGUE, c_uint32(of.epilogue))
        if of.bias_alignment:  # the heuristics take the alignment from an address
            self.product.set(Attribute.BIAS_POINTER, c_void_p(of.bias_alignment))
        self._layouts = [_layout(matrix, of.batch) for matrix in of.matrices]
        pointers = [each.pointer for each in self._layouts]
        self.matrices: tuple[Any, ...] = (*pointers[:_C], pointers[-1])


def preference(of: LtProduct, workspace_limit: int) -> Described:
    """The descriptor that says which algorithms may be chosen for a product."""
    found = Described("MatmulPreference")
    found.set(Preference.MAX_WORKSPACE_BYTES, c_uint64(workspace_limit))
    found.set(Preference.REDUCTION_SCHEME_MASK, c_uint32(SUMS_IN_FLOAT32))
    for attribute, alignment in zip(_ALIGNMENTS, (*of.alignments, of.alignments[_Y]), strict=False):
        found.set(attribute, c_uint32(alignment))
    return found


def _layout(matrix: LtMatrix, batch: int) -> Described:
    """The descriptor of a matrix."""
    kind, size = CUDA_TYPES[matrix.dtype], (matrix.rows, matrix.columns)
    layout = Described("MatrixLayout", kind, *size, matrix.leading)
    layout.set(Layout.BATCH_COUNT, c_int32(batch))
    layout.set(Layout.STRIDED_BATCH_OFFSET, c_int64(matrix.step))
    return layout


def lt_product(
    numerics: Numerics, operands: Operands, activation: PointwiseMode | None = None
) -> tuple[LtProduct, list[GraphTensor]]:
    """A product without an algorithm, and its tensors in the order of its addresses.

    Raises `Refused` for what cuBLASLt does not take.
    """
    a, b, y, added, bias = operands
    check_for_libraries((a, b, y))
    if not a.dtype.is_floating:
        raise Refused("cuBLASLt takes bytes only in layouts of its own")
    if y.dtype is not a.dtype and not (a.dtype.is_half and y.dtype is DType.FLOAT32):
        raise Refused(f"cuBLASLt does not store products of {a.dtype} as {y.dtype}")
    compute, _ = computing(numerics, a.dtype)
    tensors = [tensor for tensor in (a, b, y, added) if tensor is not None]
    product = describe_product(*tensors)
    if len(product.batch) > 1:
        raise Refused("cuBLASLt's products have one dim as a batch")
    ((size, steps),) = product.batch or ((1, (0,) * len(tensors)),)
    by_rows = product.matrices[_Y].leading[0]
    if added is not None and product.matrices[_C].leading[0] != by_rows:
        raise Refused("what is added to a product lies by columns where that lies by rows, or by rows")
    if bias is not None and not by_rows:
        raise Refused("cuBLASLt adds a bias to the columns of a result by rows")
    order = [*((_B, _A) if by_rows else (_A, _B)), *range(_Y, len(tensors))]
    matrices = [_stored_matrix(product.matrices[of], tensors[of].dtype, steps[of]) for of in order]
    flags = [product.matrices[of].leading[0] != by_rows for of in order[:_Y]]
    epilogue = Epilogue.DEFAULT if activation is None else ACTIVATIONS[activation]
    if bias is not None:
        epilogue = Epilogue.BIAS if activation is None else epilogue | Epilogue.BIAS
    found = LtProduct(
        matrices=tuple(matrices),
        transposed=(flags[0], flags[1]),
        batch=size,
        compute=compute,
        epilogue=int(epilogue),
        alignments=tuple(tensors[of].alignment for of in order),
        bias_alignment=0 if bias is None else bias.alignment,
    )
    return found, [*(tensors[of] for of in order), *([] if bias is None else [bias])]


def _stored_matrix(matrix: Any, dtype: DType, step: int) -> LtMatrix:
    """A matrix as it is stored: one by rows is its transpose by columns. Raises `Refused`."""
    by_rows, leading = matrix.leading
    rows, columns = (matrix.columns, matrix.rows) if by_rows else (matrix.rows, matrix.columns)
    if leading < rows:
        raise Refused("rows or columns of a matrix lie within each other")
    return LtMatrix(dtype, rows, columns, leading, step)
