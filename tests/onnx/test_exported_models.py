"""Networks as exporters write them, loaded and run by a service, beside what PyTorch computes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx
import pytest

from cudnn_actor import spawn

from ..whole import pairwise
from .networks.recipes import inputs_of, read
from .networks.results import Expected, difference, expected

DATA = Path(__file__).parent / "networks" / "data"
FILES = sorted(path.stem for path in DATA.glob("*.onnx"))
NETWORKS = sorted({file.partition(".")[0] for file in FILES})
HALVES = [f"bfloat16/{network}.23" for network in NETWORKS]
BATCHES = (1, 3)
OF_BOTH_SIZES = [f"{network}.20" for network in NETWORKS]
OTHERS = [file for file in FILES if file not in OF_BOTH_SIZES] + HALVES
CASES = pairwise(
    itertools.product(OTHERS, BATCHES),
    lambda case: (case[0] in HALVES, *case[0].removeprefix("bfloat16/").split("."), case[1]),
    together=1,
)
"""In `make test`, each network once, and each version, besides `OF_BOTH_SIZES`."""
BOUND, BOUND_OF_HALVES = 1e-4, 2e-2
_MADE_OF_THE_BATCH = 2
"""How many constants depend on the batch size, as masks do. Each network has more than 28 weights."""


class Given(NamedTuple):
    """A network's file with weights, and inputs and PyTorch's outputs for each batch size."""

    path: Path
    bound: float
    inputs: dict[int, dict[str, np.ndarray]]
    outputs: dict[int, dict[str, Expected]]


@pytest.fixture
def given(request: pytest.FixtureRequest, tmp_path: Path) -> Given:
    recorded = DATA / f"{request.param}.onnx"
    model, path = read(recorded), tmp_path / recorded.name
    onnx.save(model, path)
    return Given(
        path,
        BOUND_OF_HALVES if request.param in HALVES else BOUND,
        {batch: inputs_of(model, batch) for batch in BATCHES},
        {batch: expected(recorded, batch) for batch in BATCHES},
    )


def check(given: Given, batch: int, results: Mapping[str, np.ndarray]) -> None:
    for name, wanted in given.outputs[batch].items():
        assert difference(results[name], wanted) < given.bound, f"{name} of {batch}"


@pytest.mark.parametrize(("given", "batch"), CASES, indirect=["given"])
async def test_results_are_those_of_pytorch(given: Given, batch: int) -> None:
    async with spawn(device="cpu", isolation="thread") as gpu:
        model = await gpu.load(given.path)
        check(given, batch, await gpu.run(model, given.inputs[batch]))


@pytest.mark.parametrize("given", OF_BOTH_SIZES, indirect=True)
async def test_another_batch_size_uploads_no_weights_and_results_are_those_of_pytorch(given: Given) -> None:
    first, second = BATCHES
    async with spawn(device="cpu", isolation="thread") as gpu:
        model = await gpu.load(given.path)
        counts = []
        for batch in (first, second, second):
            before = (await gpu.statistics()).finished
            check(given, batch, await gpu.run(model, given.inputs[batch]))
            await gpu.drain()
            counts.append((await gpu.statistics()).finished - before)
    _, new, known = counts
    allocated = len(model.inputs) + len(model.outputs)  # where a run's inputs and outputs lie
    assert known == 1 + 2  # the run; the drain and the first statistics
    # The graph is sent to be deployed, and before that for its plan, if there is something to upload.
    assert new - known <= _MADE_OF_THE_BATCH + allocated + 2
