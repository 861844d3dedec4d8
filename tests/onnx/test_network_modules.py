"""Modules of transformers that PyTorch compiles for a benchmark: their attention takes no mask."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import pytest

from .networks.programs import attend_without_masks

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
if importlib.util.find_spec("torchvision") is None:
    pytest.skip("needs torchvision", allow_module_level=True)

_TOKENS = 12
_CAUSAL = {"vit": False, "bert": False, "gpt2": True, "llama": True}


def _inputs(network: Any) -> list[Any]:
    """One sample, of random values and of tokens that count from 0, without a mask."""
    found = []
    for name, (dims, dtype) in network.inputs(False).items():
        sizes = [1 if dim is None else dim for dim in dims]
        tokens = torch.arange(_TOKENS).expand(sizes) if dtype == torch.int64 else torch.randn(sizes)
        found.append(None if name.endswith("mask") else tokens)
    return found


@pytest.mark.parametrize("name", list(_CAUSAL))
def test_compiled_attention_takes_no_mask_and_computes_the_same(name: str) -> None:
    network = importlib.import_module(".networks.architectures", __package__).NETWORKS[name]
    made, inputs = network.make(False).eval(), _inputs(network)
    attention: list[Any] = []

    def note(graph: Any, _: object) -> Any:
        attention.extend(node for node in graph.graph.nodes if "scaled_dot_product" in str(node.target))
        return graph.forward

    with torch.no_grad():
        expected = network.call(made, *inputs)
        attend_without_masks(made)
        compiled = torch.compile(lambda *given: network.call(made, *given), backend=note, dynamic=False)
        torch.testing.assert_close(compiled(*inputs), expected)
    assert {(node.kwargs["attn_mask"], node.kwargs["is_causal"]) for node in attention} == {
        (None, _CAUSAL[name])
    }
