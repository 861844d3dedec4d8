"""Products of matrices on CUDA: cuDNN's, cuBLAS's, and a kernel of our own.

cuDNN takes half types, int8, and float32 as TF32, with one dim as a batch, and
fuses the operations behind. cuBLAS also takes full float32 and float64. Both need
matrices whose rows or columns are contiguous. Our kernel takes every type and all
strides; it uses no tensor cores.
https://docs.nvidia.com/deeplearning/cudnn/frontend/latest/operations/Matmul.html
https://docs.nvidia.com/cuda/cublas/#cublasgemmex
"""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from cudnn_actor.engines.cuda.cudnn.frontend_graph import FrontendGraph, Refused
from cudnn_actor.engines.cuda.kernels.axes import Axis, merge_axes
from cudnn_actor.engines.cuda.kernels.element_types import C_TYPES, CONVERSIONS, load, store, value_type
from cudnn_actor.engines.cuda.kernels.index_code import block_loop, division
from cudnn_actor.engines.cuda.kernels.kernel import LARGEST_GRID, Launch, Run, arguments_of, parameters_of
from cudnn_actor.engines.cuda.library.libcublas import WORKSPACE_BYTES, thread_handle
from cudnn_actor.engines.cuda.library.libraries import libraries
from cudnn_actor.engines.cuda.operations.implementation import Launcher, implement, kernels
from cudnn_actor.protocol.operations import GraphTensor, MatMul
from cudnn_actor.protocol.types.dtypes import DType
from cudnn_actor.protocol.types.numerics import Numerics

__all__ = ["CUDA_TYPES", "THREADS", "TILE", "CublasCall", "Matrix", "Product"]
__all__ += [
    "check_for_libraries",
    "computing",
    "cublas_call",
    "cublas_product",
    "describe_product",
    "lower_matmul",
]
__all__ += ["matmul_launches", "tile_source"]

_A, _B, _Y = range(3)
_LONGEST_INTEGER_SUM = ((1 << 31) - 1) // 128**2
"""The longest sum of products of int8 that cannot overflow int32."""


class Matrix(NamedTuple):
    """The rows and columns of an operand, and their strides."""

    rows: int
    columns: int
    row: int
    column: int

    @property
    def leading(self) -> tuple[bool, int]:
        """Whether rows are contiguous, and not columns; and the stride between them. Raises `Refused`.

        A dim of size 1 counts as contiguous with any stride.
        """
        if self.column == 1 or self.columns == 1:
            return True, self.row if self.rows > 1 else self.columns
        if self.row == 1 or self.rows == 1:
            return False, self.column
        raise Refused("neither rows nor columns of a matrix are contiguous")


class Product(NamedTuple):
    """A product with as few dims as possible: a dim of a batch that only a and y have counts as their rows.

    `batch`: the axes of the batch, slowest first, with the strides of a, b, y and further tensors; 0 where
    a tensor is broadcast. `matrices`: the matrices of a, b, y and further tensors.
    """

    batch: Sequence[Axis]
    matrices: tuple[Matrix, ...]


def describe_product(a: GraphTensor, b: GraphTensor, *results: GraphTensor) -> Product:
    """Describe a product. `results`: y, and other tensors of its dims."""
    y = results[0]
    *sizes, rows, columns = y.dims
    inner = a.dims[-1]
    steps = [_batch_strides(tensor, len(sizes)) for tensor in (a, b, *results)]
    of_rows = (a.strides[-2], 0, *(result.strides[-2] for result in results))
    batch = merge_axes([*zip(sizes, zip(*steps, strict=True), strict=True), (rows, of_rows)])
    nothing = (1, (0,) * len(of_rows))
    rows, (a_row, _, *others) = batch.pop() if batch and not batch[-1][1][_B] else nothing
    matrices = (
        Matrix(rows, inner, a_row, a.strides[-1]),
        Matrix(inner, columns, *b.strides[-2:]),
        *(Matrix(rows, columns, row, of.strides[-1]) for row, of in zip(others, results, strict=True)),
    )
    return Product(batch, matrices)


def _batch_strides(tensor: GraphTensor, rank: int) -> tuple[int, ...]:
    own = zip(tensor.dims[:-2], tensor.strides[:-2], strict=True)
    steps = tuple(0 if size == 1 else stride for size, stride in own)
    return (0,) * (rank - len(steps)) + steps


def check_for_libraries(tensors: Sequence[GraphTensor]) -> None:
    """Raise `Refused` for products that no library computes."""
    a = tensors[_A]
    if not a.dtype.is_floating and a.dims[-1] > _LONGEST_INTEGER_SUM:
        raise Refused(f"a sum of {a.dims[-1]:,} products of integers may overflow")
    if any(0 in tensor.dims for tensor in tensors):
        raise Refused("a matrix is empty")


# cuDNN's.


def lower_matmul(graph: FrontendGraph, operation: MatMul[int]) -> None:
    """Add a product to a graph of cuDNN's frontend, with three dims. Raises `Refused`."""
    given = [graph.spec(uid) for uid in (operation.a, operation.b, operation.y)]
    check_for_libraries(given)
    if given[_A].dtype is DType.FLOAT32 and not graph.numerics.tf32:
        raise Refused("cuDNN 9.19 multiplies matrices of float32 in TF32, and does not say so")
    product = describe_product(*given)
    if len(product.batch) > 1:
        raise Refused("cuDNN's products of matrices have one dim as a batch")
    ((size, steps),) = product.batch or ((1, (0, 0, 0)),)

    def shape(which: int) -> tuple[list[int], list[int]]:
        matrix = product.matrices[which]
        row = matrix.row if matrix.rows > 1 else matrix.columns * matrix.column
        column = matrix.column if matrix.columns > 1 else 1
        whole = steps[which] or max(matrix.rows * row, matrix.columns * column)
        return [size if steps[which] else 1, matrix.rows, matrix.columns], [whole, row, column]

    inputs = graph.tensor(operation.a, *shape(_A)), graph.tensor(operation.b, *shape(_B))
    output = graph.pygraph.matmul(*inputs, compute_data_type=graph.compute(operation))
    graph.write(operation.y, output, *shape(_Y))
    graph.fold = partial(_folded_axes, dims=given[_Y].dims, rows=product.matrices[_Y].rows)


def _folded_axes(tensor: GraphTensor, dims: tuple[int, ...], rows: int) -> tuple[list[int], list[int]]:
    """The three dims and their strides of a tensor that is broadcast to the product's dims.

    `rows`: the product of the dims that count as rows. Raises `Refused` if the tensor has no such form.
    """
    if len(tensor.dims) != len(dims):
        raise Refused("what follows a product has another number of dims")
    first = next(axis for axis in range(len(dims)) if math.prod(dims[axis:-1]) <= rows)
    parts = slice(0, first), slice(first, -1), slice(-1, None)
    axes = [_one_axis(tensor.dims[part], tensor.strides[part], dims[part]) for part in parts]
    sizes = [size for size, _ in axes]
    strides = [stride or math.prod(sizes[axis + 1 :]) for axis, (_, stride) in enumerate(axes)]
    return sizes, strides


def _one_axis(sizes: tuple[int, ...], strides: tuple[int, ...], whole: tuple[int, ...]) -> tuple[int, int]:
    """The size and the stride of dims as one dim; (1, 0) if the tensor is broadcast in all of them."""
    given = [(size, (stride,)) for size, stride in zip(sizes, strides, strict=True)]
    axes = merge_axes(given)
    if len(axes) > 1 or (axes and sizes != whole):
        raise Refused("what follows a product is broadcast in a part of the batch")
    size, (stride,) = axes[0] if axes else (1, (0,))
    return size, stride


# cuBLAS's.

CUDA_TYPES = {
    DType.FLOAT32: 0,
    DType.FLOAT64: 1,
    DType.FLOAT16: 2,
    DType.INT8: 3,
    DType.INT32: 10,
    DType.BFLOAT16: 14,
}
"""cudaDataType."""
_IN_FLOAT32, _IN_FLOAT64, _IN_INT32, _IN_TF32 = 68, 70, 72, 77
"""cublasComputeType_t."""
_DEFAULT_ALGORITHM = -1
_MOST_CALLS = 64
_ALIGNED = 4
"""The number that leading dims of int8 matrices, and all distances in them, must be multiples of."""


def cublas_product(operation: MatMul[int], tensors: Sequence[GraphTensor], handle: Any) -> Run:
    """The run of a product by cuBLAS; see `operations.Launcher`. Raises `Refused`, `EngineFailure`.

    Of several dims of a batch, the largest is cuBLAS's batch. It is called for each place in the other dims.
    """
    del handle  # cuDNN's
    call = cublas_call(operation, tensors)
    cublas, cupy = thread_handle(), libraries().cupy
    name = "cublasGemmStridedBatchedEx_64" if call.batched else "cublasGemmEx_64"
    function = getattr(cublas.library, name)
    factors = [call.factor(value) for value in (1, 0)]
    one, zero = map(ctypes.byref, factors)
    (a, b, y), (of_a, of_b, of_y) = call.order, call.matrices
    head, itemsizes = (cublas.pointer, *call.head), [tensor.dtype.itemsize for tensor in tensors]

    def launch(addresses: Sequence[int], _: Sequence[float]) -> None:
        *operands, workspace = addresses
        cublas.use(cupy.cuda.get_current_stream().ptr, workspace)
        for offsets in call.offsets:
            at = [start + n * size for start, n, size in zip(operands, offsets, itemsizes, strict=True)]
            function(*head, one, at[a], *of_a, at[b], *of_b, zero, at[y], *of_y, *call.tail)

    return launch


class CublasCall(NamedTuple):
    """The arguments of cuBLAS. It stores matrices by columns, so it computes yᵀ = bᵀ aᵀ for y by rows.

    Parameters
    ----------
    order
        The numbers, among a, b and y, of cuBLAS's operands and of its result.
    head
        Whether each operand is to be transposed, and m, n and k.
    matrices
        For each operand and for the result: dtype, leading dim and, if `batched`, stride.
    tail
        The size of the batch, if `batched`; the type that is computed in; and the algorithm.
    offsets
        For each call: the first elements of a, b and y.
    factor
        The type of alpha and beta.
    """

    order: tuple[int, int, int]
    head: tuple[int, ...]
    batched: bool
    matrices: tuple[tuple[int, ...], ...]
    tail: tuple[int, ...]
    offsets: Sequence[tuple[int, ...]]
    factor: Callable[[int], Any]


def cublas_call(operation: MatMul[int], tensors: Sequence[GraphTensor]) -> CublasCall:
    """The calls for a product. Raises `Refused` for what cuBLAS does not take."""
    check_for_libraries(tensors)
    compute, factor = computing(operation.numerics, tensors[_A].dtype)
    product = describe_product(*tensors)
    *others, (size, strides) = sorted(product.batch, key=lambda axis: axis[0]) or [(1, (0, 0, 0))]
    if math.prod(count for count, _ in others) > _MOST_CALLS:
        raise Refused("it would be too many calls of cuBLAS")
    places = itertools.product(*(range(count) for count, _ in others))
    offsets = [tuple(_dot(at, [steps[of] for _, steps in others]) for of in (_A, _B, _Y)) for at in places]
    leading = [matrix.leading for matrix in product.matrices]
    batched = size > 1
    matrices = [
        (CUDA_TYPES[tensor.dtype], ld, stride) if batched else (CUDA_TYPES[tensor.dtype], ld)
        for tensor, (_, ld), stride in zip(tensors, leading, strides, strict=True)
    ]
    distances = [n for of in (_A, _B) for n in (*matrices[of][1:], *(at[of] for at in offsets))]
    if tensors[_A].dtype is DType.INT8 and any(n % _ALIGNED for n in distances):
        raise Refused("cuBLAS takes int8 only in groups of four")
    by_rows = leading[_Y][0]
    order = (_B, _A, _Y) if by_rows else (_A, _B, _Y)
    # A matrix by rows is its transpose by columns, and yᵀ is the product of transposes.
    transposed = (int(leading[of][0] != by_rows) for of in order[:_Y])
    rows, columns = product.matrices[_Y][:2]
    return CublasCall(
        order=order,
        head=(*transposed, *((columns, rows) if by_rows else (rows, columns)), product.matrices[_A].columns),
        batched=batched,
        matrices=tuple(matrices[of] for of in order),
        tail=(*((size,) if batched else ()), compute, _DEFAULT_ALGORITHM),
        offsets=offsets,
        factor=factor,
    )


def _dot(at: Sequence[int], steps: Sequence[int]) -> int:
    """The sum of the products of two sequences."""
    return sum(n * step for n, step in zip(at, steps, strict=True))


def computing(numerics: Numerics | None, dtype: DType) -> tuple[int, Callable[[int], Any]]:
    """The cublasComputeType_t, and the type of alpha and beta. Raises `Refused`."""
    match dtype:
        case DType.FLOAT64:
            return _IN_FLOAT64, ctypes.c_double
        case DType.INT8:
            return _IN_INT32, ctypes.c_int32
        case DType.FLOAT32 if numerics is not None and numerics.tf32:
            return _IN_TF32, ctypes.c_float
        case DType.FLOAT32 | DType.FLOAT16 | DType.BFLOAT16:
            return _IN_FLOAT32, ctypes.c_float
        case _:
            raise Refused(f"cuBLAS has no products of {dtype}")


# Our own.

TILE, THREADS = 64, 256
"""Rows and columns of a tile, and the threads of the block that computes it."""
_DEPTH = 16
_MOST_AXES = 6
"""The most axes of a batch: tensors have at most eight dims."""


def matmul_launches(operation: MatMul[int], tensors: Sequence[GraphTensor]) -> list[Launch]:
    """The launch of a product on tensors of any strides."""
    product = describe_product(*tensors)
    numbers = _numbers(product)
    tiles = [-(-size // TILE) for size in product.matrices[_Y][:2]]
    blocks = math.prod((*tiles, *(size for size, _ in product.batch)))
    arguments = arguments_of(3, *numbers.values())
    text = _source(operation, tensors, numbers)
    return [Launch("matmul", text, (min(blocks, LARGEST_GRID),), (THREADS,), arguments)]


def _numbers(product: Product) -> Mapping[str, int]:
    """The kernel's numbers, by their names."""
    a, _, y = product.matrices
    numbers = {"rows": y.rows, "columns": y.columns, "inner": a.columns}
    for name, matrix in zip("aby", product.matrices, strict=True):
        numbers |= {f"{name}_row": matrix.row, f"{name}_column": matrix.column}
    missing: Axis = 1, (0, 0, 0)
    for number, (size, steps) in enumerate([missing] * (_MOST_AXES - len(product.batch)) + [*product.batch]):
        numbers |= {f"size{number}": size}
        numbers |= {f"{name}{number}": step for name, step in zip("aby", steps, strict=True)}
    return numbers


def _source(operation: MatMul[int], tensors: Sequence[GraphTensor], names: Iterable[str]) -> str:
    """The kernel in CUDA C++. It depends only on the dtypes. `names`: the names of its numbers."""
    a, b, y = (C_TYPES[tensor.dtype] for tensor in tensors)
    numbers = parameters_of(names)
    decode = " ".join(
        f"{{ {division('at', 'rest', f'size{n}', kind='long long')} "
        f"a += at * a{n}; b += at * b{n}; y += at * y{n}; }}"
        for n in reversed(range(_MOST_AXES))
    )
    return f"""{tile_source(tensors, operation.compute((tensors[_A].dtype,)))}
extern "C" __global__ void __launch_bounds__({THREADS}) matmul(
    const {a}* all_a, const {b}* all_b, {y}* all_y, {numbers}) {{
    const long long tall = (rows + {TILE - 1}) / {TILE}, broad = (columns + {TILE - 1}) / {TILE};
    const long long tiles = tall * broad * size0 * size1 * size2 * size3 * size4 * size5;
    {block_loop("tile", "tiles")} {{
        long long rest = tile;
        {division("column", "rest", "broad", TILE, "long long")}
        {division("row", "rest", "tall", TILE, "long long")}
        const {a}* a = all_a;
        const {b}* b = all_b;
        {y}* y = all_y;
        {decode}
        multiply(a, b, y, row, column, rows, columns, inner,
                 a_row, a_column, b_row, b_column, y_row, y_column);
    }}
}}
"""


def tile_source(tensors: Sequence[GraphTensor], compute: DType) -> str:
    """C++ before a kernel: the function `multiply`, by which a block computes a tile of a product.

    `tensors`: a, b and y; only their dtypes matter. A block of 16 x 16 threads computes 64 x 64 elements, 16
    steps of the sums at a time.
    """
    a, b, y = (tensor.dtype for tensor in tensors)
    element = C_TYPES[compute] if compute in (DType.FLOAT64, DType.INT32) else "float"
    return f"""typedef {element} E;
typedef {value_type(compute)} T;
{CONVERSIONS}
__device__ __forceinline__ void multiply(
    const {C_TYPES[a]}* a, const {C_TYPES[b]}* b, {C_TYPES[y]}* y, long long row, long long column,
    long long rows, long long columns, long long inner,
    long long a_row, long long a_column, long long b_row, long long b_column,
    long long y_row, long long y_column) {{
    __shared__ E of_a[{_DEPTH}][{TILE} + 1], of_b[{_DEPTH}][{TILE} + 1];
    const int t = threadIdx.x, down = t / 16, across = t % 16;
    const bool by_rows = a_column == 1, by_columns = b_column == 1;
    T sums[4][4] = {{}};
    for (long long first = 0; first < inner; first += {_DEPTH}) {{
        #pragma unroll
        for (int part = 0; part < 4; ++part) {{
            // Neighbouring threads read contiguous elements.
            const int far = down + 16 * part, deep = t / 64 + 4 * part;
            const int i = by_rows ? far : t % 64, p = by_rows ? across : deep;
            const int j = by_columns ? t % 64 : far, q = by_columns ? deep : across;
            const bool in_a = row + i < rows && first + p < inner;
            const bool in_b = column + j < columns && first + q < inner;
            const {C_TYPES[a]}* from_a = a + (row + i) * a_row + (first + p) * a_column;
            const {C_TYPES[b]}* from_b = b + (first + q) * b_row + (column + j) * b_column;
            of_a[p][i] = in_a ? (E){load(a, "*from_a")} : (E)0;
            of_b[q][j] = in_b ? (E){load(b, "*from_b")} : (E)0;
        }}
        __syncthreads();
        #pragma unroll
        for (int k = 0; k < {_DEPTH}; ++k) {{
            T left[4], right[4];
            #pragma unroll
            for (int n = 0; n < 4; ++n) {{
                left[n] = of_a[k][down + 16 * n]; right[n] = of_b[k][across + 16 * n];
            }}
            #pragma unroll
            for (int n = 0; n < 16; ++n) sums[n / 4][n % 4] += left[n / 4] * right[n % 4];
        }}
        __syncthreads();
    }}
    #pragma unroll
    for (int n = 0; n < 16; ++n) {{
        const long long i = row + down + 16 * (n / 4), j = column + across + 16 * (n % 4);
        if (i < rows && j < columns) y[i * y_row + j * y_column] = {store(y, "sums[n / 4][n % 4]")};
    }}
}}
"""


implement(
    MatMul,
    lower=lower_matmul,
    launchers={
        "cublas": Launcher(cublas_product, workspace=lambda *_: WORKSPACE_BYTES),
        "cublas_packed": Launcher(cublas_product, packed=True, workspace=lambda *_: WORKSPACE_BYTES),
        **kernels(matmul_launches),
    },
)
