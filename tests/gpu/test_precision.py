"""Models that are computed in another dtype than their files', on a GPU."""

from __future__ import annotations

from typing import Any

import pytest

from cudnn_actor import spawn

from ..onnx import test_precision as of_files
from ..onnx.networks.recipes import inputs_of, read
from ..onnx.networks.results import difference, expected
from ..onnx.test_exported_models import DATA, NETWORKS
from ..onnx.test_precision import (  # noqa: F401 - they run here, too
    test_a_choice_of_the_least_number_is_finite,
    test_a_convolutional_network,
    test_a_model_of_float16_is_computed_in_float32,
    test_a_transformer_block_with_a_mask,
    test_masks_are_within_the_limits_of_the_dtype,
    test_norms_and_means,
    test_pictures_are_scaled_before_they_are_rounded,
    test_places_in_pictures_are_exact,
    test_positions_are_exact,
    test_quantised_numbers_are_those_of_the_file,
    test_recurrent_networks,
    test_squares_beyond_the_limits_of_float16_are_summed,
    test_zeros_times_the_least_number_are_zeros,
)


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_files, "DEVICE", "cuda")
    of_files.rng.bit_generator.state = of_files.BEGIN


@pytest.mark.parametrize("dtype", of_files.HALVES)
@pytest.mark.parametrize("network", NETWORKS)
async def test_a_network_of_float32(network: str, dtype: Any) -> None:
    recorded = DATA / f"{network}.23.onnx"
    proto = read(recorded)
    async with spawn(device="cuda") as gpu, await gpu.load(proto, dtype=dtype) as model:
        found = await gpu.run(model, inputs_of(proto, 3))
    for name, wanted in expected(recorded, 3).items():
        assert difference(found[name], wanted) < of_files.BOUNDS[dtype]
