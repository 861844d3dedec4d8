"""An ONNX model as a source of `Model`: it is read and checked at once, and imported for each set of dims."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from cudnn_actor.models.errors import UnsupportedModel
from cudnn_actor.models.source import Feature, NeedsValues, Specialised, fixed_specs
from cudnn_actor.onnx.budget import Recorded, TooManyOperations
from cudnn_actor.onnx.cutting import specialise
from cudnn_actor.onnx.dtypes import check_dtypes
from cudnn_actor.onnx.model_limits import ModelLimits
from cudnn_actor.onnx.open_dims import problems_of_nodes
from cudnn_actor.onnx.operator_checks import problems_of, unknown_versions
from cudnn_actor.onnx.precision import checked_precision
from cudnn_actor.onnx.reading import ModelFile, read
from cudnn_actor.protocol.graphs.limits import GraphLimits
from cudnn_actor.protocol.types.checks import require_flag, require_whole
from cudnn_actor.protocol.types.dtypes import DTypeLike
from cudnn_actor.protocol.types.tensor import TensorSpec

__all__ = ["OnnxModel"]


class OnnxModel:
    """An ONNX model, as a source of `Model`. See `read` for further errors.

    Parameters
    ----------
    model, limits
        See `read`.
    random
        The seed of nodes that draw random numbers and have no seed of their own; None to refuse such nodes.
    dtype
        The dtype of weights and activations: "bfloat16", "float16" or "float32"; None for the dtypes of the
        file. See `CudnnRef.load`.
    swappable
        Whether the weights may be overwritten: see `Model.write`.

    Raises
    ------
    UnsupportedModel
        Nodes cannot be run, whatever the dims of the inputs. The error names all of them. If the dims are
        numbers, it also names the nodes that cannot be run with these dims and the nodes' attributes.
    """

    def __init__(
        self,
        model: Any,
        limits: ModelLimits | None = None,
        *,
        random: int | None = None,
        dtype: DTypeLike | None = None,
        swappable: bool = False,
    ) -> None:
        if random is not None:
            random = require_whole("random", random, 0)
        require_flag("swappable", swappable)
        precision = checked_precision(dtype)
        self._file = replace(read(model, limits), random=random, dtype=precision, swappable=swappable)
        check_dtypes(self._file)
        check_operators(self._file)
        self.inputs: tuple[Feature, ...] = self._file.inputs
        """The inputs that have to be given."""
        self.defaults: tuple[Feature, ...] = self._file.defaults
        """The inputs that may be left out: their defaults are initialisers of the model."""
        self.outputs: tuple[Feature, ...] = self._file.outputs
        """The outputs."""

    @property
    def swappable(self) -> bool:
        """Whether its weights may be overwritten."""
        return self._file.swappable

    @property
    def options(self) -> dict[str, Any]:
        """The options with which the model was read: `random`, `dtype` and `swappable`."""
        file = self._file
        return {"random": file.random, "dtype": file.dtype, "swappable": file.swappable}

    @property
    def tensors(self) -> Mapping[str, np.ndarray]:
        """The values of the initialisers, by name."""
        return self._file.tensors

    def with_tensors(self, tensors: Mapping[str, np.ndarray]) -> OnnxModel:
        """This model with other values for these initialisers, of the same dims and dtypes."""
        other = copy.copy(self)
        other._file = replace(self._file, tensors={**self._file.tensors, **tensors})
        return other

    def specialise(
        self,
        specs: Mapping[str, TensorSpec],
        values: Mapping[str, np.ndarray],
        most_operations: int = GraphLimits().operations,
    ) -> Specialised:
        """See `Source`."""
        try:
            return specialise(self._file, specs, values, most_operations)
        except TooManyOperations as error:
            raise error.refusal(most_operations) from error


def check_operators(file: ModelFile) -> None:
    """Raise `UnsupportedModel` for inputs, versions and nodes that can be run with no dims whatever."""
    problems = [f"input {each.name!r}: is of type {each.kind}" for each in file.inputs if each.dtype is None]
    problems += unknown_versions(file)
    problems += problems_of(file)
    specs = fixed_specs(file.inputs)
    if specs is None:
        problems = list(dict.fromkeys([*problems, *problems_of_nodes(file)]))
    if not problems:
        return
    if specs is not None:
        try:
            # The service decides how many operations a graph may have. This checks with its default limit.
            specialise(file, specs, {}, sys.maxsize, recorded=Recorded.of(GraphLimits().operations))
        except (NeedsValues, TooManyOperations):
            pass  # values that nobody has given: so dims and attributes add nothing to the problems
        except UnsupportedModel as error:
            problems = list(dict.fromkeys([*error.nodes, *problems]))
    raise UnsupportedModel(nodes=problems)
