"""A second opinion: PyTorch on the same operands, both beside the float64 CPU engine."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cudnn_actor.engines.base import Engine
from cudnn_actor.protocol import DType, TensorSpec

from .bounds import UNIT
from .cases import Case, Kind, arrays, run
from .drawing import draw
from .oracle import truth

torch = pytest.importorskip("torch")

PROBLEMS = 40
FLOATS = (DType.FLOAT64, DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16)


@pytest.fixture(autouse=True)
def no_tf32() -> Iterator[None]:
    """Float32 is to mean float32 there, too."""
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("dtype", FLOATS)
def test_our_error_is_at_most_twice_pytorch_s(engine: Engine, dtype: DType, kind: Kind, seed: int) -> None:
    for number, case in zip(range(PROBLEMS), _cases(seed, dtype, kind), strict=False):
        wanted = truth(case).wanted
        ran = run(engine, case)
        ours, theirs = (_error(values, wanted) for values in (ran.values, _by_torch(case)))
        floor = UNIT[dtype] + math.sqrt(case.length) * UNIT[max(dtype, DType.FLOAT32, key=_precision)]
        assert ours <= 2 * theirs + floor, (
            f"problem {number} of CUDNN_ACTOR_SEED={seed}: our error {ours:.3g}, PyTorch's {theirs:.3g}, "
            f"by {ran.plan}\n{case}"
        )


def _precision(dtype: DType) -> float:
    return -UNIT[dtype]


def _cases(seed: int, dtype: DType, kind: Kind) -> Iterator[Case]:
    """Drawn cases of one dtype and kind: the bare convolution, padded alike on both sides as PyTorch does."""
    number = 0
    while True:
        case = draw(seed, number)
        number += 1
        if case.dtype is dtype and case.kind is kind and case.conv.pre_padding == case.conv.post_padding:
            x, w, y = (_of_dtype(spec, dtype) for spec in (case.x, case.w, case.y))
            yield Case(kind=kind, x=x, w=w, y=y, conv=case.conv, seed=case.seed)


def _of_dtype(spec: TensorSpec, dtype: DType) -> TensorSpec:
    return TensorSpec.strided(spec.dims, spec.strides, dtype)


def _by_torch(case: Case) -> np.ndarray:
    rank = case.conv.spatial_dims
    given = {name: _on_gpu(array) for name, array in arrays(case).items()}
    how = {
        "stride": case.conv.stride,
        "padding": case.conv.pre_padding,
        "dilation": case.conv.dilation,
        "groups": case.conv.groups,
    }
    if case.kind is Kind.FORWARD:
        result = getattr(torch.nn.functional, f"conv{rank}d")(given["x"], given["w"], **how)
    elif case.kind is Kind.BACKWARD_DATA:
        result = getattr(torch.nn.grad, f"conv{rank}d_input")(case.x.dims, given["w"], given["y"], **how)
    else:
        result = getattr(torch.nn.grad, f"conv{rank}d_weight")(given["x"], case.w.dims, given["y"], **how)
    values: np.ndarray = result.to(torch.float64).cpu().numpy()
    return values


def _on_gpu(array: np.ndarray) -> Any:
    """NumPy knows no bfloat16 of PyTorch's: its bits travel as whole numbers."""
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).cuda()
    return torch.from_numpy(array).cuda()


def _error(got: np.ndarray, wanted: np.ndarray) -> float:
    difference = np.linalg.norm((got.astype(np.float64) - wanted).ravel())
    return float(difference / (np.linalg.norm(wanted.ravel()) or 1.0))
