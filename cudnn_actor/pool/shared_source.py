"""A model whose weights are read and computed once, into memory that all members of a pool map."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from cudnn_actor.attached.client.shared_segments import ToShare, shared_copies
from cudnn_actor.models import Feature
from cudnn_actor.models.keeping import MOST_KEPT
from cudnn_actor.models.rounding import round_to
from cudnn_actor.models.source import Source, Specialised, Weight, values_of
from cudnn_actor.protocol.types.tensor import TensorSpec

__all__ = ["SharedSource", "share_source"]


def share_source(source: Source) -> Source:
    """A source for all members. A source whose weights may be overwritten is returned as it is: each member
    has its own weights."""
    return source if getattr(source, "swappable", False) else SharedSource(source)


class SharedSource:
    """A source that shares its weights: see the module's docstring. Any thread may use it.

    Parameters
    ----------
    source
        The source of the model.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._lock = threading.Lock()
        """A lock that is held while the model is imported: other members wait for the first one's import."""
        self._made: OrderedDict[Hashable, Specialised] = OrderedDict()
        """The latest imports, for members that start later: as many as a model of one service keeps."""
        self._weights: dict[tuple[str, TensorSpec], np.ndarray] = {}
        """The shared weights, read-only, by key and by the spec of the graphs' inputs."""

    @property
    def inputs(self) -> tuple[Feature, ...]:
        """The inputs that have to be given, in order."""
        return self._source.inputs

    @property
    def defaults(self) -> tuple[Feature, ...]:
        """The inputs that may be left out, since they have default values, in order."""
        return self._source.defaults

    @property
    def outputs(self) -> tuple[Feature, ...]:
        """The outputs, in order."""
        return self._source.outputs

    @property
    def options(self) -> dict[str, Any]:
        """The options with which the model was read."""
        return dict(getattr(self._source, "options", {}))

    def specialise(
        self, specs: Mapping[str, TensorSpec], values: Mapping[str, np.ndarray], *limits: int
    ) -> Specialised:
        """See `Source.specialise`. All members get the same result. The first call for these arguments
        blocks for the import."""
        known = frozenset(specs.items()), frozenset((name, *_key(each)) for name, each in values.items())
        with self._lock:
            made = self._made.get((*known, limits))
            if made is None:
                made = self._with_shared_weights(self._source.specialise(specs, values, *limits))
                self._made[(*known, limits)] = made
                if len(self._made) > MOST_KEPT:
                    self._made.popitem(last=False)
                    self._forget_unused()
            return made

    def release(self) -> None:
        """Forget all weights and imports. Weights that a member still uses stay mapped until it is done.

        This does not take the lock, which an import holds for seconds. Weights that such an import adds are
        released with this object.
        """
        self._made, self._weights = OrderedDict(), {}

    def _forget_unused(self) -> None:
        """Forget the weights that only forgotten imports had. A weight that is computed from the dims is
        another one for each size of the inputs."""
        used = {each for made in self._made.values() for each in _weights_of(made)}
        self._weights = {each: array for each, array in self._weights.items() if each in used}

    def _with_shared_weights(self, made: Specialised) -> Specialised:
        specs, known = made.ports, self._weights  # `release` may replace it meanwhile
        missing = {each: weight for each, weight in _weights_of(made).items() if each not in known}
        if missing:
            copies = shared_copies([_to_share(spec, weight) for (_, spec), weight in missing.items()])
            known.update(zip(missing, copies, strict=True))
        weights = {port: (name, known[name, specs[port]]) for port, (name, _) in made.weights.items()}
        return replace(made, weights=weights)


def _weights_of(made: Specialised) -> dict[tuple[str, TensorSpec], Weight]:
    """The weights of an import, by key and by the spec of their graph's input."""
    specs = made.ports
    return {(name, specs[port]): weight for port, (name, weight) in made.weights.items()}


def _to_share(spec: TensorSpec, weight: Weight) -> ToShare:
    return ToShare(spec, lambda: round_to(values_of(weight), spec.dtype))


def _key(values: np.ndarray) -> tuple[str, tuple[int, ...], bytes]:
    return str(values.dtype), values.shape, values.tobytes()
