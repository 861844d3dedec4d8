"""How batches of a model's requests are formed: the options, checked against the model."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cudnn_actor.models.keeping import MOST_KEPT
from cudnn_actor.models.sizes import Sizes, sets_of_specs
from cudnn_actor.models.source import Feature
from cudnn_actor.protocol.errors import InvalidRequest
from cudnn_actor.protocol.types.checks import as_indices, is_finite, require_mapping, require_whole
from cudnn_actor.protocol.types.tensor import TensorSpec

__all__ = ["BatchRules"]

_MAX_BATCH = 32


@dataclass(frozen=True, kw_only=True)
class BatchRules:
    """How batches are formed. `of` makes such rules, and checks all of their values.

    Parameters
    ----------
    dim
        The named dim along which samples lie: the leading one of all inputs and outputs.
    sizes
        The numbers of samples that a batch may have, ascending.
    dims
        The sizes of the other named dims.
    max_delay_us
        The most microseconds that a request waits for other requests, unless `in_flight` batches run.
    max_waiting
        How many requests may wait before `submit` is refused.
    in_flight
        How many batches may be sent at a time.
    """

    dim: str
    sizes: tuple[int, ...]
    dims: Mapping[str, Sizes]
    max_delay_us: float
    max_waiting: int
    in_flight: int

    @classmethod
    def of(
        cls,
        inputs: Sequence[Feature],
        outputs: Sequence[Feature],
        *,
        max_batch: int | None,
        sizes: Sequence[int] | None,
        dims: Mapping[str, Sizes] | None,
        max_delay_us: float,
        max_waiting: int,
        in_flight: int,
    ) -> BatchRules:
        """The rules for a model with these inputs and outputs. Raises `InvalidRequest`."""
        max_waiting = require_whole("max_waiting", max_waiting, 1)
        in_flight = require_whole("in_flight", in_flight, 1)
        if not is_finite(max_delay_us) or max_delay_us < 0:
            raise InvalidRequest(
                field="max_delay_us",
                value=max_delay_us,
                problem="must be a number of microseconds ≥ 0",
                fix="use 2000",
            )
        rules = cls(
            dim=_batch_dim(inputs, outputs),
            sizes=_sizes(max_batch, sizes),
            dims={} if dims is None else dims,
            max_delay_us=max_delay_us,
            max_waiting=max_waiting,
            in_flight=in_flight,
        )
        require_mapping("dims", rules.dims, "names of dims to sizes", 'name each: {"L": 128}')
        if rules.dim in rules.dims:
            raise InvalidRequest(
                field="dims",
                value=dict(rules.dims),
                problem=f"has {rules.dim}, along which samples are batched",
                fix=f"give its sizes as sizes={rules.sizes}",
            )
        rules.sets_of_specs(inputs)
        return rules

    def sets_of_specs(self, inputs: Sequence[Feature]) -> list[dict[str, TensorSpec]]:
        """The specs of the inputs of every batch that there can be. Raises `InvalidRequest`."""
        return sets_of_specs(inputs, {self.dim: self.sizes, **self.dims}, MOST_KEPT)

    def group_of(self, inputs: Mapping[str, np.ndarray]) -> Hashable:
        """The key that requests of one batch share: their dims without the leading one."""
        return tuple((name, array.shape[1:]) for name, array in inputs.items())

    def samples_of(self, inputs: Mapping[str, np.ndarray]) -> int:
        """How many samples these inputs have."""
        return len(next(iter(inputs.values())))

    def check_samples(self, samples: int) -> None:
        """Raise `InvalidRequest` unless a request may have this many samples."""
        if not 1 <= samples <= self.sizes[-1]:
            raise InvalidRequest(
                field=self.dim,
                value=samples,
                problem=f"is more than a batch has, {self.sizes[-1]}" if samples else "is no sample",
                fix="give fewer samples in each request" if samples else "give one or more",
            )

    def check_results(self, results: Mapping[str, np.ndarray], inputs: Mapping[str, np.ndarray]) -> None:
        """Raise `InvalidRequest` unless the outputs have as many samples as the inputs."""
        samples = self.samples_of(inputs)
        for name, array in results.items():
            if array.shape[:1] != (samples,):
                raise InvalidRequest(
                    field=name,
                    value=array.shape,
                    problem=f"is an output that does not follow the batch: {self.dim} was {samples}",
                    fix="run the model by itself: await gpu.run(model, ...)",
                )

    def not_warmed(self, inputs: Mapping[str, np.ndarray]) -> InvalidRequest:
        """The error for inputs whose dims were not warmed."""
        shown = ", ".join(f"{name}: {array.shape}" for name, array in inputs.items())
        return InvalidRequest(
            field="inputs",
            value=shown,
            problem="have dims that were not warmed",
            fix="name their sizes: gpu.batched(model, dims={...})",
        )


def _batch_dim(inputs: Sequence[Feature], outputs: Sequence[Feature]) -> str:
    """The named dim that stands first in every input, and nowhere else. Raises `InvalidRequest`."""
    if not inputs:
        raise InvalidRequest(
            field="model",
            value="no inputs",
            problem="has nothing that could be batched",
            fix="run it by itself",
        )
    wanted = _leading(inputs[0])
    for each in inputs:
        lead = _leading(each)
        problem = ""
        if not isinstance(lead, str):
            problem = "has no leading dim with a name, along which samples could be batched"
        elif lead != wanted:
            problem = f"has the leading dim {lead}, and {inputs[0].name} has {wanted}"
        elif lead in (each.dims or ())[1:]:
            problem = f"has {lead} in another place, too"
        if problem:
            raise InvalidRequest(
                field=each.name,
                value=str(each),
                problem=problem,
                fix="export the model with one dynamic batch dim, the first of every input",
            )
    for each in outputs:
        lead = _leading(each)
        if each.dims == () or isinstance(lead, int):
            raise InvalidRequest(
                field=each.name,
                value=str(each),
                problem=f"is an output that does not follow the batch: its leading dim is not {wanted}",
                fix="run the model by itself: await gpu.run(model, ...)",
            )
    assert isinstance(wanted, str)
    return wanted


def _leading(feature: Feature) -> int | str | None:
    return feature.dims[0] if feature.dims else None


def _sizes(max_batch: int | None, sizes: Sequence[int] | None) -> tuple[int, ...]:
    """The numbers of samples that a batch may have, ascending. Raises `InvalidRequest`."""
    if max_batch is not None:
        max_batch = require_whole("max_batch", max_batch, 1)
    if sizes is None:
        most = _MAX_BATCH if max_batch is None else max_batch
        return tuple(dict.fromkeys([*(1 << step for step in range(most.bit_length())), most]))
    several: Any = sizes
    fits = isinstance(several, Sequence | np.ndarray) and not isinstance(several, str | bytes)
    try:
        given = as_indices(several) if fits else ()
    except TypeError:
        given = ()
    if not given or min(given) < 1:
        raise InvalidRequest(
            field="sizes",
            value=sizes,
            problem="must be whole numbers from 1 on",
            fix="use sizes=(1, 2, 4, 8, 16, 32)",
        )
    found = tuple(sorted(set(given)))
    if max_batch is not None and found[-1] != max_batch:
        raise InvalidRequest(
            field="sizes",
            value=sizes,
            problem=f"has {found[-1]} as the largest, and max_batch is {max_batch}",
            fix="make them equal, or leave max_batch out",
        )
    return found
