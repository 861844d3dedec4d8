"""Differences that are no faults of ours, each with what ONNX says, and refusals that a page documents.

The file is long because it is two tables, with the conditions that their rows name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from .cases import Case
from .comparing import Difference

__all__ = ["KNOWN", "REFUSALS", "Known", "Refusal", "documented", "explained", "summed"]

THEIRS, OPEN, DOCUMENTED = "a fault of theirs", "left open by ONNX", "refused, as documented"
_RUNTIME, _REFERENCE = "ONNX Runtime", "the reference"
_OLDEST = 7
When = Callable[[Case, Difference], bool]


@dataclass(frozen=True)
class Known:
    """Cases of some operators whose answer differs, and what ONNX says of them.

    `operators`: names, separated by spaces; `who`: whose answer it is, or "" for both.
    """

    operators: str
    who: str
    kind: str
    sentence: str
    when: When = lambda case, found: True


@dataclass(frozen=True)
class Refusal:
    """Texts of our errors, and what a page says of them. `alone`: of cases that only the reference "
    "answers."""

    text: str
    sentence: str
    alone: bool = False
    kind: str = DOCUMENTED


# Conditions.


def _floats(case: Case) -> list[np.ndarray]:
    arrays = [
        each
        for each in case.inputs.values()
        if each.dtype.name in ("bfloat16", "float16", "float32", "float64")
    ]
    return [each.astype(np.float64) for each in arrays]


def _with_infinities(case: Case, found: Difference) -> bool:
    return found.kind == "infinities" or any(not np.isfinite(each).all() for each in _floats(case))


def _infinite(case: Case, found: Difference) -> bool:
    return found.kind == "infinities" and _with_infinities(case, found)


def _with_nan(case: Case, found: Difference) -> bool:
    return any(np.isnan(each).any() for each in _floats(case))


def _of_integers(case: Case, found: Difference) -> bool:
    x = case.array(0)
    return x is not None and x.dtype.kind in "iu"


def _beyond(*names: str) -> When:
    """Whether an attribute that is 0 or 1 is something else."""
    return lambda case, found: any(case.value(name) not in (0, 1, None) for name in names)


def _is(**wanted: object) -> When:
    """Whether attributes have these values."""
    return lambda case, found: all(case.value(name) == value for name, value in wanted.items())


def _same_padding(case: Case, found: Difference) -> bool:
    return str(case.value("auto_pad")).startswith("SAME")


def _all(*conditions: When) -> When:
    return lambda case, found: all(each(case, found) for each in conditions)


def _out_of_range(case: Case, found: Difference) -> bool:
    """Whether floats become integers that may not hold them."""
    dtype = case.output_dtypes[0]
    return bool(_floats(case)) and (dtype.kind == "u" or (dtype.kind == "i" and case.flavour == "edges"))


def _not_held(case: Case, found: Difference) -> bool:
    """Whether results of integers may be larger than their type holds, or no integers."""
    inexact = ("Pow", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "Resize", "Upsample")
    return _of_integers(case, found) and (case.flavour == "edges" or case.version.operator in inexact)


def _of_64_bits(case: Case, found: Difference) -> bool:
    return _of_integers(case, found) and case.dtypes[0].itemsize == 8


def _mixed(case: Case, found: Difference) -> bool:
    """Whether a product is of signed and unsigned integers."""
    return len({each.dtype.kind for each in (case.array(0), case.array(1)) if each is not None}) == 2


# The tables.

_SUMS = (
    "Attention AveragePool BatchNormalization CausalConvWithState Conv ConvTranspose DFT DeformConv "
    "Det Einsum "
    "FlexAttention GRU Gemm GlobalAveragePool GlobalLpPool GridSample GroupNormalization "
    "InstanceNormalization LRN "
    "LSTM LayerNormalization LinearAttention LogSoftmax LpNormalization LpPool MatMul "
    "MeanVarianceNormalization "
    "NegativeLogLikelihoodLoss RMSNormalization RNN ReduceL2 ReduceLogSum ReduceLogSumExp Resize RoiAlign "
    "RotaryEmbedding STFT Softmax SoftmaxCrossEntropyLoss Upsample"
)
_ORDERS = (
    "ArgMax ArgMin Clip GlobalMaxPool Hardmax Max MaxPool MaxRoiPool Min NonMaxSuppression ReduceMax "
    "ReduceMin Relu "
    "ScatterElements ScatterND TopK Unique"
)
_POOLS = "AveragePool LpPool MaxPool"
_RECURRENT = "GRU LSTM RNN"
_REDUCTIONS = " ".join(
    f"Reduce{name}"
    for name in ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare")
)
_WINDOWS = "BlackmanWindow HammingWindow HannWindow"

KNOWN: Sequence[Known] = (
    Known(
        _SUMS,
        "",
        OPEN,
        "ONNX says of no sum, norm or interpolation what it gives where infinities or NaN meet "
        "weights of 0, padding "
        "or each other",
        _infinite,
    ),
    Known(_ORDERS, "", OPEN, "ONNX says of no comparison how NaN compares", _with_nan),
    Known(
        "Clip",
        "",
        OPEN,
        '"They default to numeric_limits::lowest() and numeric_limits::max()", and the function of '
        "Clip without bounds is Identity, which keeps infinities",
        _infinite,
    ),
    Known(
        "QuantizeLinear DynamicQuantizeLinear",
        "",
        OPEN,
        '"saturate ((x / y_scale) + y_zero_point)" of NaN, and of what infinities make NaN, is no integer',
        _with_infinities,
    ),
    Known(
        "Cast CastLike",
        "",
        OPEN,
        '"Casting from floating point to fixed point: undefined if OOR"',
        _out_of_range,
    ),
    Known(
        "Pow",
        "",
        OPEN,
        "a power of integers that is no integer, or that the type does not hold, is not defined",
        _not_held,
    ),
    Known(
        f"{_REDUCTIONS} CumSum CumProd Einsum Upsample Resize",
        "",
        OPEN,
        "ONNX says of integers neither what becomes of a result that their type does not hold nor "
        "how one that is no "
        "integer is rounded",
        _not_held,
    ),
    Known(
        f"{_REDUCTIONS} {_WINDOWS} ArgMax ArgMin RotaryEmbedding TopK",
        "",
        OPEN,
        "the attribute is said to be 0 or 1: ONNX does not say what others mean",
        _beyond("keepdims", "noop_with_empty_axes", "periodic", "largest", "sorted", "interleaved"),
    ),
    Known(
        "ReduceMean",
        "",
        OPEN,
        '"Reduction over an empty set of values yields undefined"',
        lambda case, found: 0 in (_shape(case, 0) or ()),
    ),
    Known(
        "Squeeze",
        _RUNTIME,
        OPEN,
        '"If `axes` is not provided, all the single dimensions will be removed": empty axes are '
        "provided, and are none",
        lambda case, found: _shape(case, 1) == (0,) or case.value("axes") == [],
    ),
    Known(
        "AffineGrid",
        "",
        OPEN,
        '"When `align_corners=1`, consider `-1` and `1` to refer to the centers of the corner '
        'pixels": both cannot be '
        "the center of one pixel",
        lambda case, found: case.value("align_corners") != 0 and 1 in _elements(case, 1)[2:],
    ),
    Known(
        "Dropout",
        "",
        OPEN,
        "before version 12, ONNX does not say what the mask is where nothing is dropped; from then "
        'on "all ones"',
        lambda case, found: found.output == "o1" and case.version.since < 12,
    ),
    Known(
        "Einsum",
        "",
        OPEN,
        "ONNX does not say in which dtype products of half types are summed",
        lambda case, found: found.kind == "values" and case.output_dtypes[0].itemsize == 2,
    ),
    Known(
        _RECURRENT,
        "",
        OPEN,
        "ONNX does not say what a sequence of length 0 gives",
        lambda case, found: 0 in _elements(case, 4),
    ),
    Known(
        "QuantizeLinear",
        "",
        OPEN,
        "before `precision` of version 23, ONNX does not say in which type a half type is divided by "
        "its scale",
        lambda case, found: found.largest <= 1 and case.dtypes[0].itemsize == 2,
    ),
    Known(
        "Resize",
        "",
        OPEN,
        "ONNX does not say in which precision a place is computed that lies between two elements",
        _all(_is(mode="nearest"), _is(coordinate_transformation_mode="tf_crop_and_resize")),
    ),
    # Faults of ONNX Runtime.
    Known(
        _POOLS,
        _RUNTIME,
        THEIRS,
        '"pad_shape[i] = (output_spatial_shape[i] - 1) * strides_spatial_shape[i] + '
        "((kernel_spatial_shape[i] - 1) * "
        'dilations[i] + 1) - input_spatial_shape[i]": it leaves the dilations out',
        lambda case, found: _same_padding(case, found) and max(case.value("dilations") or [1]) > 1,
    ),
    Known(
        _POOLS,
        _RUNTIME,
        OPEN,
        '"pad_shape[i] = ..." is below 0 where windows are further apart than they are long: ONNX '
        "does not say "
        "whether elements are left out then, as ONNX Runtime does, or not, as TensorFlow, from which "
        "SAME comes",
        _same_padding,
    ),
    Known(
        "ConvTranspose",
        _RUNTIME,
        THEIRS,
        '"SAME_UPPER or SAME_LOWER mean pad the input so that `output_shape[i] = input_shape[i] * '
        'strides[i]`", also '
        "where the filter does not reach so far",
        _same_padding,
    ),
    Known(
        "ConvInteger MatMulInteger",
        _RUNTIME,
        THEIRS,
        '"The production MUST never overflow": on processors without VNNI, its sums of two products saturate',
        _mixed,
    ),
    Known(
        "CastLike",
        _RUNTIME,
        THEIRS,
        '"fixed point: when OOR, discard higher bits": of integers with a `saturate`, it gives what '
        "lies in memory",
        _of_integers,
    ),
    Known(
        "DequantizeLinear",
        "",
        OPEN,
        '"y = (x - x_zero_point) * x_scale": ONNX does not say in which type the difference of int32 is',
        _of_integers,
    ),
    Known(
        "NonZero",
        _RUNTIME,
        THEIRS,
        '"for scalar input, NonZero produces output shape (0, N) instead of (1, N)"',
        lambda case, found: _shape(case, 0) == (),
    ),
    Known(
        "SplitToSequence",
        _RUNTIME,
        THEIRS,
        "\"If input 'split' is specified, this attribute [keepdims] is ignored\"",
        lambda case, found: case.value("keepdims") == 0 and case.array(1) is not None,
    ),
    Known(
        "MaxUnpool",
        _RUNTIME,
        THEIRS,
        "the node test maxunpool_export_with_output_shape: indices count in the dims that follow "
        "from the window, and "
        "what output_shape adds comes behind",
        lambda case, found: case.array(2) is not None,
    ),
    Known(
        "MeanVarianceNormalization",
        _RUNTIME,
        THEIRS,
        "its function divides by the deviation plus 1e-9, which gives 0 for equal elements",
        lambda case, found: found.kind == "infinities",
    ),
    Known(
        "Resize",
        _RUNTIME,
        THEIRS,
        "the node test resize_downsample_scales_linear_align_corners: length_resized is "
        "length_original * scale, and "
        "not rounded",
        _is(coordinate_transformation_mode="align_corners"),
    ),
    Known(
        "Resize",
        _RUNTIME,
        THEIRS,
        '"x_original = length_resized > 1 ? start_x * (length_original - 1) + ..." and, beyond the image, '
        "extrapolation_value: it does so neither for the outer axes nor for cubic resizing",
        _is(coordinate_transformation_mode="tf_crop_and_resize"),
    ),
    Known(
        "QuantizeLinear",
        "",
        THEIRS,
        '"precision [...] If not provided, it will be the same as the type of y_scale": it is that of x',
        lambda case, found: case.version.since >= 23 and found.largest <= 1,
    ),
    Known(
        "QLinearMatMul",
        _RUNTIME,
        THEIRS,
        "a sum of nothing is 0, whose quantised value is the zero point: it leaves what lies in memory",
        lambda case, found: 0 in (_shape(case, 0) or ()),
    ),
    Known(
        "Slice",
        "",
        OPEN,
        '"Behavior is undefined if an axis is repeated"',
        lambda case, found: _repeated(_elements(case, 3), len(_shape(case, 0) or ())),
    ),
    Known(
        "Slice",
        _RUNTIME,
        THEIRS,
        'going backwards, "end [...] is clamped to [-1, dims[axes[i]]-1]", and "INT_MIN" stands for '
        "the end: it takes "
        "INT_MAX for that, too",
        lambda case, found: min(_elements(case, 4), default=1) < 0 and max(_elements(case, 2)) >= 2**31 - 1,
    ),
    Known(
        "DynamicQuantizeLinear",
        "",
        OPEN,
        "its scale follows from the largest and the least of no elements",
        lambda case, found: 0 in (_shape(case, 0) or ()),
    ),
    Known(
        "NegativeLogLikelihoodLoss SoftmaxCrossEntropyLoss",
        _RUNTIME,
        OPEN,
        "a `reduction` of another name is none that ONNX has",
        _is(reduction="nonsense"),
    ),
    Known(
        "MatMulInteger",
        _REFERENCE,
        THEIRS,
        '"Scalar refers to per tensor quantization whereas N-D refers to per row": it takes a vector '
        "for columns",
        lambda case, found: len(_shape(case, 2) or ()) == 1,
    ),
    Known(
        "DFT",
        _RUNTIME,
        THEIRS,
        '"If greater than the axis dimension, the signal will be zero-padded up to `dft_length`": an '
        "inverse of half a "
        "transform counts its length otherwise",
        _all(_is(inverse=1), _is(onesided=1)),
    ),
    # Faults of the reference evaluator, where ONNX Runtime has no answer.
    Known(
        f"{_RECURRENT}",
        _REFERENCE,
        THEIRS,
        '"Clipping [...] is applied to the input of activations", and sequence_lens, directions, '
        "layouts and other "
        "activations: the reference evaluator leaves out several of them",
    ),
    Known(
        _POOLS,
        _REFERENCE,
        THEIRS,
        '"divided by the number of elements exclude pad", and the output\'s dims of the text: the '
        "reference evaluator "
        "pads otherwise in ceil_mode, with dilations, and in old versions",
    ),
    Known(
        "GlobalMaxPool ConvTranspose QLinearConv",
        _REFERENCE,
        THEIRS,
        "the dims of the output, as the text says: the reference evaluator gives others",
        lambda case, found: found.kind == "dims",
    ),
    Known(
        "ConvTranspose",
        _REFERENCE,
        THEIRS,
        '"bias to be added to the convolution, 1D tensor of size M": the reference evaluator adds its first '
        "elements to the channels of each group",
        lambda case, found: case.value("group") not in (None, 1) and case.array(2) is not None,
    ),
    Known(
        "QLinearConv",
        _REFERENCE,
        THEIRS,
        '"a 1-D tensor, which means [...] per output channel quantization": unless there are two spatial '
        "dims, the reference evaluator scales along another dim",
        lambda case, found: len(_shape(case, 0) or ()) != 4 and len(_shape(case, 4) or ()) == 1,
    ),
    Known(
        "QLinearConv QLinearMatMul",
        _REFERENCE,
        THEIRS,
        "\"saturate ((x / y_scale) + y_zero_point). For (x / y_scale), it's rounding to the nearest "
        'even": the reference '
        "evaluator adds the zero point before it rounds",
        lambda case, found: found.largest <= 1,
    ),
    Known(
        "QLinearMatMul",
        _REFERENCE,
        THEIRS,
        '"zero point and scale tensor may be an M element vector [v_1, v_2, ..., v_M] for per row '
        'quantization": the '
        "reference evaluator takes them for columns",
        lambda case, found: any(len(_shape(case, number) or ()) == 1 for number in (1, 4)),
    ),
    Known(
        "QuantizeLinear",
        _REFERENCE,
        THEIRS,
        '"saturate ((x / y_scale) + y_zero_point)": of integers, the reference evaluator wraps around',
        _of_integers,
    ),
    Known(
        "ConvInteger QLinearConv",
        _REFERENCE,
        THEIRS,
        '"In case of odd number add the extra padding at [...] the beginning for SAME_LOWER": it '
        "pads with 0, not with "
        "the zero point, or at the end",
        _same_padding,
    ),
    Known(
        "LRN",
        _REFERENCE,
        THEIRS,
        '"max(0, c - floor((size - 1) / 2)) <= i <= min(C - 1, c + ceil((size - 1) / 2))": of even '
        "sizes, the reference "
        "evaluator leaves the last channel out",
        lambda case, found: case.value("size") % 2 == 0,
    ),
    Known(
        "Attention",
        _REFERENCE,
        THEIRS,
        '"If set to `0`, qk_matmul_output is the output of qk matmul": the reference evaluator gives '
        "it with softcap",
        lambda case, found: found.output == "o3",
    ),
    Known(
        "Attention",
        _REFERENCE,
        THEIRS,
        '"If set to `1`, the attention masking is a lower triangular matrix": it broadcasts one that '
        "has the rows of the "
        "mask",
        lambda case, found: case.value("is_causal") == 1 and case.array(3) is not None,
    ),
    Known(
        "OneHot",
        _REFERENCE,
        THEIRS,
        '"the values argument [off_value, on_value]" are the results: it multiplies with their difference',
        _with_infinities,
    ),
    Known(
        "Gemm MatMul",
        _REFERENCE,
        THEIRS,
        "of integers of 64 bits, it computes in float64",
        _of_64_bits,
    ),
    Known(
        "GridSample",
        _REFERENCE,
        OPEN,
        "ONNX does not say how cubic interpolation of volumes meets a border; ONNX Runtime has none",
        lambda case, found: _shape(case, 0) is not None and len(_shape(case, 0) or ()) == 5,
    ),
    Known(
        "Loop",
        _REFERENCE,
        THEIRS,
        "the scan outputs are stacked: the reference evaluator of version 1 joins them",
        lambda case, found: found.kind == "dims",
    ),
)

REFUSALS: Sequence[Refusal] = (
    Refusal("no operator of that name and version is known here", "the table of operators, docs/onnx.md"),
    Refusal("No registered implementation for operator", "the table of operators, docs/onnx.md"),
    Refusal(
        "its constant cannot be computed: the reference implementation errs",
        "an operator that is not in the table, of constants, docs/onnx.md",
    ),
    Refusal("draws random numbers from no seed", "random numbers, docs/onnx.md"),
    Refusal(
        r"(is a|is of|is of type|no tensor here is of|has a constant of) "
        "(text|string|sequence|optional|sparse tensor|complex|float8|float4|u?int4|u?int2|object)",
        "what is refused, docs/onnx.md",
    ),
    Refusal("text is not computed", "what is refused, docs/onnx.md"),
    Refusal("is not a dtype that", "the dtypes of operations, docs/operations.md", alone=True),
    Refusal(
        r"window(\.size)?: |spans . inputs, but the padded input|covers only padding",
        "a window that reaches beyond its padded input, or lies in its padding, docs/onnx.md",
    ),
    Refusal("logarithm of a sum of nothing", '"minus infinity (if supported by the datatype)", docs/onnx.md'),
    Refusal("names a dim twice|duplicate value in 'axis'", "an axis that is named twice, docs/onnx.md"),
    Refusal("has axis .*, where|is no dim of x", "an axis that there is not, docs/onnx.md"),
    Refusal("has the .*, where it takes", "a mode of another name than ONNX has, docs/onnx.md", alone=True),
    Refusal("has p ., where it takes 1 and 2", "a norm that ONNX has not, docs/onnx.md"),
    Refusal(
        "has both a 0 and a -1",
        '"it is invalid for the specified shape to contain both a zero value and -1", docs/onnx.md',
    ),
    Refusal(
        "has complex numbers, where half a transform",
        '"When onesided=1 and inverse=0 (forward DFT), only real input is supported", docs/onnx.md',
    ),
    Refusal("has no spatial dims", "a pool of what has no spatial dims, docs/onnx.md"),
)


def _shape(case: Case, number: int) -> tuple[int, ...] | None:
    array = case.array(number)
    return None if array is None else array.shape


def _repeated(axes: list[int], rank: int) -> bool:
    return len({axis % rank for axis in axes}) < len(axes)


def _elements(case: Case, number: int) -> list[int]:
    array = case.array(number)
    return [] if array is None else [int(each) for each in array.reshape(-1)]


def summed(case: Case) -> float:
    """The largest number that an operator of sums is given; 0 for other operators."""
    if case.version.operator not in _SUMS.split():
        return 0.0
    return max(
        (float(np.abs(each[np.isfinite(each)]).max(initial=0.0)) for each in _floats(case)), default=0.0
    )


def explained(case: Case, who: str, found: Difference) -> Known | None:
    """What explains a difference; None if nothing does."""
    for each in KNOWN:
        if (
            case.version.operator in each.operators.split()
            and each.who in ("", who)
            and each.when(case, found)
        ):
            return each
    return None


def documented(case: Case, reason: str, answered: Sequence[str]) -> Refusal | None:
    """What a page says of a refusal; None if none does."""
    if not case.version.domain and case.opset < _OLDEST:
        return Refusal("", "a version of the standard operators below 7, docs/onnx.md")
    only = list(answered) == [_REFERENCE]
    return next(
        (each for each in REFUSALS if re.search(each.text, reason) and (only or not each.alone)), None
    )
