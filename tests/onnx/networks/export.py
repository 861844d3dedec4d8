"""Writes the networks as ONNX files without weights, with PyTorch's outputs and programs beside them.

    python -m tests.onnx.networks.export
    python -m tests.onnx.networks.export --dtype bfloat16 --opsets 23
    python -m tests.onnx.networks.export --full --out FOLDER
    python -m tests.onnx.networks.export --full --dtype bfloat16 --out FOLDER

From the top of the repository, with torch 2.13 (for the CPU), torchvision 0.28, transformers 5.23, diffusers
0.42, onnx 1.23, onnxscript 0.7 and NumPy. Nothing is downloaded. A second run writes the same bytes.

Opset 17 is written by the exporter of TorchScript, later ones by that of `torch.export`. Files have dims
named N for the batch. `NETWORK.npz` has PyTorch's outputs on one thread, for each batch: `B/OUTPUT` has some
elements, evenly spaced, and `B/OUTPUT/sums` the sum of all, and of their absolute values. For bfloat16,
`B/OUTPUT/float32` has the elements that the same weights and inputs give in float32.
"""

from __future__ import annotations

import argparse
import copy
import io
import json
import math
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import torch
from onnx import numpy_helper
from torch import nn

from .architectures import NETWORKS, Network
from .recipes import Recipe, inputs_of, made
from .results import sampled, sums

BATCHES = (1, 3)
OPSETS = (17, 18, 20, 23)
_DATA = Path(__file__).with_name("data")
_SMALL, _LARGEST = 256, 65_536
"""Bytes: smaller tensors stay in the file; larger ones may not stay."""


class Named(nn.Module):  # type: ignore[misc]
    """A network as a module that takes tensors and gives tensors."""

    def __init__(self, name: str, full: bool) -> None:
        super().__init__()
        self.network = NETWORKS[name].make(full)
        self._call = NETWORKS[name].call

    def forward(self, *inputs: Any) -> Any:
        return self._call(self.network, *inputs)


class One(Named):
    """Of one input."""

    def forward(self, x: Any) -> Any:
        return super().forward(x)


class Two(Named):
    """Of two inputs."""

    def forward(self, x: Any, y: Any) -> Any:
        return super().forward(x, y)


def fill(module: nn.Module) -> dict[str, Recipe]:
    """Give all parameters and buffers values, and return their recipes. Whole numbers stay as they are."""
    found: dict[str, Recipe] = {}
    known: dict[int, Recipe] = {}
    every = {"remove_duplicate": False}
    for name, tensor in [*module.named_parameters(**every), *module.named_buffers(**every)]:
        if id(tensor) in known:
            found[name] = known[id(tensor)]
        elif tensor.is_floating_point():
            owner, _, leaf = name.rpartition(".")
            offset, spread = _range(module.get_submodule(owner), leaf, tensor)
            found[name] = known[id(tensor)] = ["seeded", name, list(tensor.shape), offset, spread]
            with torch.no_grad():
                tensor.copy_(torch.from_numpy(made(found[name])))
    return found


def _range(owner: nn.Module, leaf: str, tensor: Any) -> tuple[float, float]:
    """Offset and spread of values with which activations neither vanish nor grow."""
    dims = tensor.shape
    if leaf in ("running_var", "layer_scale") or (leaf == "weight" and len(dims) == 1):
        return 1.0, 0.25
    if isinstance(owner, nn.Embedding):
        return 0.0, 0.5
    if not leaf.endswith("weight"):
        return 0.0, 0.1
    products = dims[0] if type(owner).__name__ == "Conv1D" else math.prod(dims[1:])
    return 0.0, round(math.sqrt(3 / products), 6)


def without_weights(
    model: onnx.ModelProto, recipes: Mapping[str, Recipe], norms: list[list[Any]], bound: float
) -> bytes:
    """The model with recipes in the place of its weights, and without what only debugging needs.

    `bound`: by how much norms' factors may differ from those of float32.
    """
    bare = copy.deepcopy(model)
    graph = bare.graph
    for each in (bare, graph, *graph.node, *graph.input, *graph.output, *graph.initializer):
        del each.metadata_props[:]
        each.doc_string = ""
    del graph.value_info[:]
    known = {name: made(recipe) for name, recipe in recipes.items()}
    for tensor in graph.initializer:
        array = numpy_helper.to_array(tensor)
        if array.nbytes < _SMALL or array.dtype not in (np.float32, ml_dtypes.bfloat16):
            continue
        recipe = next(_recipes(array, known, recipes, norms, bound), None)
        if recipe is not None:
            tensor.doc_string = json.dumps(recipe)
            tensor.ClearField("raw_data")
        elif array.nbytes > _LARGEST:
            raise ValueError(f"{tensor.name} of {array.shape} is made of no parameter")
    data: bytes = bare.SerializeToString(deterministic=True)
    return data


def _recipes(
    array: np.ndarray,
    known: Mapping[str, np.ndarray],
    recipes: Mapping[str, Recipe],
    norms: list[list[Any]],
    bound: float,
) -> Iterator[Recipe]:
    """What an initialiser may have been made of."""

    def close(values: np.ndarray) -> bool:
        return np.allclose(values, array.astype(np.float32), bound, bound / 3)

    for name, values in known.items():
        if values.size == array.size:
            rounded = values.astype(array.dtype)
            if np.array_equal(rounded.reshape(array.shape), array):
                same = values.shape == array.shape
                yield recipes[name] if same else ["reshaped", recipes[name], list(array.shape)]
            if values.ndim == 2 and np.array_equal(rounded.T, array):
                yield ["transposed", recipes[name]]
    for gamma, beta, mean, variance, epsilon in norms:
        factor = known[gamma] / np.sqrt(known[variance] + np.float32(epsilon))
        if array.shape == factor.shape and close(known[beta] - known[mean] * factor):
            shift = (recipes[each] for each in (beta, mean, gamma, variance))
            yield ["norm's shift", *shift, epsilon]
        if array.ndim < 2 or len(array) != len(factor):
            continue
        for name, values in known.items():
            if values.shape == array.shape and close(values * factor.reshape(-1, *[1] * (array.ndim - 1))):
                yield ["norm's scale in", recipes[name], recipes[gamma], recipes[variance], epsilon]


def norms_of(module: nn.Module) -> list[list[Any]]:
    """The batch norms: the names of what they have, and epsilon."""
    names = ("weight", "bias", "running_mean", "running_var")
    return [
        [*(f"{name}.{each}" for each in names), norm.eps]
        for name, norm in module.named_modules()
        if isinstance(norm, nn.modules.batchnorm._BatchNorm)
    ]


def exported(
    module: nn.Module, network: Network, inputs: Mapping[str, Any], program: Any, opset: int
) -> onnx.ModelProto:
    """The module as ONNX, with its weights."""
    names = {"input_names": list(inputs), "output_names": list(network.outputs), "opset_version": opset}
    if opset >= 18:
        result = torch.onnx.export(program, dynamo=True, verbose=False, **names)
        found: onnx.ModelProto = result.model_proto
        return found
    file = io.BytesIO()
    axes = {name: {0: "N"} for name in [*inputs, *network.outputs]}
    torch.onnx.export(module, tuple(inputs.values()), file, dynamo=False, dynamic_axes=axes, **names)
    return onnx.load_from_string(file.getvalue())


def program_of(program: Any, recipes: Mapping[str, Recipe]) -> str:
    """An exported program as `programs.program` reads it."""
    given = []
    used = {node.name for node in program.graph.nodes if node.users}
    for spec in program.graph_signature.input_specs:
        if spec.target is not None and spec.arg.name not in used:
            given.append([["unused"], ""])
        elif spec.target is not None:
            tensor = program.state_dict.get(spec.target, program.constants.get(spec.target))
            recipe = recipes.get(spec.target) or ["listed", tensor.tolist()]
            given.append([recipe, str(tensor.dtype).removeprefix("torch.")])
    code = re.sub(r";  [\w =]+ = None$", "", program.graph_module.code.strip(), flags=re.MULTILINE)
    return json.dumps({"code": code, "given": given}, indent=0) + "\n"


def outputs_of(module: nn.Module, inputs: Mapping[str, np.ndarray], dtype: Any) -> list[np.ndarray]:
    """The module's outputs in a dtype, as float32."""
    given = [_tensor(array) for array in inputs.values()]
    with torch.no_grad():
        found = module(*(each.to(dtype) if each.is_floating_point() else each for each in given))
    return [each.float().numpy() for each in (found if isinstance(found, tuple) else (found,))]


def _tensor(array: np.ndarray) -> Any:
    return torch.from_numpy(array.astype(np.float32) if array.dtype == ml_dtypes.bfloat16 else array)


def write(name: str, folder: Path, full: bool, dtype: Any, opsets: tuple[int, ...]) -> None:
    """Write all files of a network."""
    network = NETWORKS[name]
    torch.manual_seed(0)
    module = (One if len(network.inputs(full)) == 1 else Two)(name, full).eval()
    recipes, norms = fill(module), norms_of(module)
    module = module.to(dtype)
    given = network.inputs(full)
    inputs = {
        key: torch.zeros([each or 2 for each in dims], dtype=dtype if kind.is_floating_point else kind)
        for key, (dims, kind) in given.items()
    }
    batch = torch.export.Dim("N", max=network.most)
    program = torch.export.export(module, tuple(inputs.values()), dynamic_shapes=[{0: batch} for _ in inputs])
    (folder / f"{name}.json").write_text(program_of(program, recipes))
    for opset in opsets:
        try:
            model = exported(module, network, inputs, program, opset)
        except RuntimeError as error:  # as TorchScript's exporter has for bfloat16
            print(f"{name}, opset {opset}: not exported, {error}")
            continue
        data = without_weights(model, recipes, norms, 1e-5 if dtype is torch.float32 else 0.03)
        (folder / f"{name}.{opset}.onnx").write_bytes(data)
        print(f"{name}, opset {opset}: {len(data):,} bytes")
    found = {}
    for count in BATCHES:
        arrays = inputs_of(model, count)
        for key, array in zip(network.outputs, outputs_of(module, arrays, dtype), strict=True):
            found[f"{count}/{key}"], found[f"{count}/{key}/sums"] = sampled(array), sums(array)
    if dtype is not torch.float32:
        module = module.float()
        for count in BATCHES:
            arrays = inputs_of(model, count)
            for key, array in zip(network.outputs, outputs_of(module, arrays, torch.float32), strict=True):
                found[f"{count}/{key}/float32"] = sampled(array)
    np.savez(folder / f"{name}.npz", **found)  # type: ignore[arg-type]  # which has a name of its own


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="the folder beside this file unless given")
    parser.add_argument("--full", action="store_true", help="in their usual size")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--opsets", type=int, nargs="+", default=OPSETS)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    folder = given.out or _DATA / ("" if given.dtype == "float32" else given.dtype)
    folder.mkdir(parents=True, exist_ok=True)
    for name in given.networks:
        write(name, folder, given.full, getattr(torch, given.dtype), tuple(given.opsets))


if __name__ == "__main__":
    main()
