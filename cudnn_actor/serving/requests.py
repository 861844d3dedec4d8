"""An inference as a record, the same for HTTP and gRPC; and the parameters that have an effect here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from cudnn_actor.protocol.types.dtypes import DType
from cudnn_actor.serving.failures import Refused

__all__ = [
    "Inference",
    "Place",
    "Regions",
    "RequestedOutput",
    "require_once",
    "require_short",
    "timeout_of",
]

MOST_TENSORS = 1024
"""The most inputs, and the most outputs, that a request may name."""
_LONGEST_S = 1e6
_LONGEST_NAME = 1024
"""The most characters of a name. Names travel between processes, and are repeated in answers."""


@dataclass(frozen=True)
class Place:
    """A part of a registered region of shared memory: the region's name, the first byte, and how many
    bytes."""

    region: str
    offset: int
    nbytes: int

    @classmethod
    def of(cls, parameters: Mapping[str, Any]) -> Place | None:
        """The place that a tensor's parameters name; None if they name no region. Raises `Refused`."""
        region = parameters.get("shared_memory_region")
        if region is None:
            return None
        nbytes, offset = parameters.get("shared_memory_byte_size"), parameters.get("shared_memory_offset", 0)
        if not isinstance(region, str) or nbytes is None or not (_is_size(nbytes) and _is_size(offset)):
            raise Refused(
                problem="a tensor's place in shared memory is not complete",
                fix="give shared_memory_region, shared_memory_byte_size and shared_memory_offset",
            )
        return cls(region, offset, nbytes)


class Regions(Protocol):
    """The regions of shared memory that clients have registered."""

    def read(self, place: Place, dtype: DType, shape: tuple[int, ...]) -> np.ndarray:
        """A copy of the tensor at a place. Raises `Refused`."""

    def write(self, place: Place, array: np.ndarray) -> None:
        """Copy a tensor to a place. Raises `Refused` if it does not fit."""


@dataclass(frozen=True)
class RequestedOutput:
    """An output that a request asks for: its name, whether it is sent as raw bytes, and the place in shared
    memory that it is written to, or None."""

    name: str
    binary: bool = False
    place: Place | None = None

    @classmethod
    def of(cls, name: str, parameters: Mapping[str, Any], *, binary: bool) -> RequestedOutput:
        """The output that a name and parameters ask for. `binary`: whether it is sent as raw bytes, if the
        parameters do not say. Raises `Refused`."""
        if parameters.get("classification"):
            raise Refused(
                problem=f"output {name[:100]!r} asks for classification, which this server does not do",
                fix="leave it out, and sort the scores",
            )
        as_bytes = parameters.get("binary_data", binary)
        if not isinstance(as_bytes, bool):
            raise Refused(problem="binary_data is no truth value", fix="use true or false")
        return cls(name, as_bytes, Place.of(parameters))


@dataclass(frozen=True)
class Inference:
    """A request to run a model.

    Parameters
    ----------
    inputs
        Arrays by name.
    outputs
        The outputs that are asked for; None for all, in the model's order.
    id
        The request's id, which the answer repeats.
    timeout_s
        Seconds until the answer must be there; None for no limit.
    binary
        Whether outputs are sent as raw bytes, if their parameters do not say.
    """

    inputs: dict[str, np.ndarray]
    outputs: tuple[RequestedOutput, ...] | None = None
    id: str = ""
    timeout_s: float | None = None
    binary: bool = False

    def outputs_to_send(self, names: Iterable[str]) -> tuple[RequestedOutput, ...]:
        """The outputs to send, for a model with outputs of these names. Raises `Refused`."""
        known = list(names)
        if self.outputs is None:
            return tuple(RequestedOutput(name, self.binary) for name in known)
        for each in self.outputs:
            if each.name not in known:
                raise Refused(
                    problem=f"{each.name[:100]!r} is no output of the model", fix=f"use {', '.join(known)}"
                )
        return self.outputs

    def count_listed(self, results: Mapping[str, np.ndarray]) -> int:
        """How many numbers of these outputs are sent as lists. Raises `Refused`."""
        return sum(
            results[each.name].size
            for each in self.outputs_to_send(results)
            if not each.binary and each.place is None
        )


def require_short(names: Iterable[str]) -> None:
    """Raise `Refused` if a name of a model, a version or shared memory has too many characters."""
    for each in names:
        if len(each) > _LONGEST_NAME:
            raise Refused(
                problem=f"a name has {len(each):,} characters", fix=f"use one of {_LONGEST_NAME:,} or fewer"
            )


def require_once(what: str, names: Iterable[str]) -> None:
    """Raise `Refused` if a name occurs twice, or if there are too many names."""
    given = list(names)
    if len(given) > MOST_TENSORS:
        raise Refused(problem=f"there are {len(given):,} {what}s", fix=f"give at most {MOST_TENSORS:,}")
    if len(set(given)) < len(given):
        raise Refused(problem=f"an {what} is named twice", fix="name each once")


def timeout_of(parameters: Mapping[str, Any]) -> float | None:
    """The seconds that a request's parameters allow for it; None for no limit. The parameter `timeout` is in
    microseconds, and 0 means no limit.

    `priority` is accepted and has no effect. Raises `Refused`, also for a sequence.
    """
    if parameters.get("sequence_id"):
        raise Refused(
            problem="sequence_id is given, and models here keep no state between requests",
            fix="leave it out",
        )
    timeout = parameters.get("timeout", 0)
    if not _is_size(timeout):
        raise Refused(problem="timeout is no whole number", fix="give microseconds, 0 for no limit")
    return min(timeout / 1e6, _LONGEST_S) if timeout else None


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 63
