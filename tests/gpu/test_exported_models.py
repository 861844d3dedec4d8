"""Networks on a GPU beside PyTorch on the same GPU: the small ones of `tests/onnx/networks`, or a folder's.

    CUDNN_ACTOR_NETWORKS=FOLDER python -m pytest -m gpu tests/gpu/test_exported_models.py

`python -m tests.onnx.networks.export` writes such folders, of networks in their usual size, without a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from cudnn_actor import spawn

torch = pytest.importorskip("torch")
pytest.importorskip("onnx")

from ..onnx.networks.programs import program, tensors  # noqa: E402 - needs them
from ..onnx.networks.recipes import inputs_of, read  # noqa: E402
from ..onnx.test_exported_models import DATA, HALVES  # noqa: E402
from ..onnx.test_exported_models import FILES as SMALL  # noqa: E402

FOLDER = os.environ.get("CUDNN_ACTOR_NETWORKS")
FILES = sorted(Path(FOLDER).glob("*.onnx")) if FOLDER else [DATA / f"{name}.onnx" for name in SMALL + HALVES]
BATCHES = (1, 3)
BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""By the dtype of the outputs, which is that of the weights."""


class Given(NamedTuple):
    """A network's file with weights, and for each batch size its inputs and PyTorch's outputs, in order."""

    path: Path
    bound: float
    inputs: dict[int, dict[str, np.ndarray]]
    outputs: dict[int, tuple[np.ndarray, ...]]


@pytest.fixture
def no_tf32() -> Iterator[None]:
    """Float32 is to mean float32 there, too."""
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before


@pytest.fixture
def given(request: pytest.FixtureRequest, tmp_path: Path, no_tf32: None) -> Given:
    recorded: Path = request.param
    model, path = read(recorded), tmp_path / recorded.name
    path.write_bytes(model.SerializeToString())
    inputs = {batch: inputs_of(model, batch) for batch in BATCHES}
    run = program(recorded.with_name(f"{recorded.name.partition('.')[0]}.json"), "cuda")
    with torch.no_grad():
        found = {batch: run(*tensors(each.values(), "cuda")) for batch, each in inputs.items()}
    outputs = {batch: tuple(each.float().cpu().numpy() for each in of) for batch, of in found.items()}
    (dtype,) = {each.dtype for of in found.values() for each in of}
    return Given(path, BOUNDS[dtype], inputs, outputs)


@pytest.mark.parametrize("given", FILES, indirect=True, ids=lambda path: f"{path.parent.name}-{path.stem}")
async def test_results_are_those_of_pytorch(given: Given) -> None:
    async with spawn(device="cuda:0", isolation="process") as gpu:
        model = await gpu.load(given.path)
        for batch, inputs in given.inputs.items():
            results = await gpu.run(model, inputs)
            for (name, found), wanted in zip(results.items(), given.outputs[batch], strict=True):
                difference = np.linalg.norm(found.astype(np.float32) - wanted) / np.linalg.norm(wanted)
                assert difference < given.bound, f"{name} of {batch}"
