"""Blocks of networks on a GPU, forward and backward, beside PyTorch: both against float64 on the CPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from benchmarks.blocks import BLOCKS
from cudnn_actor import spawn
from cudnn_actor.protocol import DType

from ..engines.differences import computed
from ..engines.references import relative_error
from ..service.example_graphs import downloaded, uploaded
from .bounds import UNIT

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")  # in the backward pass's thread

SIZES: dict[str, dict[str, int]] = {
    "bottleneck": {"batch": 4, "channels": 64, "width": 16, "size": 14},
    "convnext": {"batch": 2, "channels": 64, "size": 14},
    "transformer": {"batch": 2, "length": 128, "width": 64, "heads": 4, "hidden": 176},
}


@pytest.fixture(autouse=True)
def no_tf32() -> Iterator[None]:
    """Float32 is to mean float32 there, too."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False  # products of matrices have none by default
    yield
    torch.backends.cudnn.allow_tf32 = before


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16])
@pytest.mark.parametrize("name", BLOCKS)
async def test_our_error_is_at_most_twice_pytorch_s(name: str, dtype: DType) -> None:
    block, exact = (BLOCKS[name](**SIZES[name], dtype=of) for of in (dtype, DType.FLOAT64))
    values = block.values()
    wanted = computed(exact.training, {n: value.astype(np.float64) for n, value in values.items()})
    async with spawn(device="cuda:0", isolation="thread") as gpu:
        buffers = await uploaded(gpu, block.training, values)
        ours = await downloaded(gpu, block.training, buffers, await gpu.apply(block.training, buffers))
    theirs = by_torch(block, values)
    for output, value in wanted.items():
        error, limit = relative_error(ours[output], value), 2 * relative_error(theirs[output], value)
        assert error <= limit + UNIT[dtype], f"{output}: {error:.3g}, and PyTorch's is {limit / 2:.3g}"


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16])
async def test_norms_of_a_bottleneck_are_fused_with_what_is_around_them(dtype: DType) -> None:
    block = BLOCKS["bottleneck"](**SIZES["bottleneck"], dtype=dtype)
    async with spawn(device="cuda:0", isolation="thread") as gpu:
        forward, training = [await gpu.explain(graph) for graph in (block.forward, block.training)]
    norms = [piece for piece in forward.pieces if piece.labels[0].startswith("batch_norm")]
    assert [len(piece.labels) for piece in norms] == [2, 2, 3]
    assert len(forward.pieces) == 6
    assert all("generated kernel" in piece.steps[0] and not piece.why for piece in norms)
    assert len(training.pieces) == 15
    gradients = [piece for piece in training.pieces if piece.labels[0].startswith("conv_bwd_data")]
    assert [len(piece.labels) for piece in gradients] == [3, 3, 2]
    if dtype is DType.BFLOAT16:  # cuDNN computes the gradient of the relu with that of the convolution
        assert all(len(piece.steps) == 1 for piece in gradients), str(training)


def by_torch(block: Any, values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The outputs of `training`."""
    inputs = {name: on_gpu(value) for name, value in values.items()}
    for name in block.gradients:
        inputs[name].requires_grad_()
    y = block.torch(inputs)
    y.backward(inputs["upstream"])
    found = {"y": y, **{output: inputs[name].grad for name, output in block.gradients.items()}}
    return {name: tensor.detach().double().cpu().numpy() for name, tensor in found.items()}


def on_gpu(array: np.ndarray) -> Any:
    """A tensor of the same values and dtype, with its channels last if it has four dims."""
    kind = torch.bfloat16 if array.dtype == ml_dtypes.bfloat16 else getattr(torch, array.dtype.name)
    tensor = torch.from_numpy(array.astype(np.float64)).to("cuda", kind)
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor
