"""What all replicas of a pool have: how a replica makes it, and what the caller knows it by."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from cudnn_actor.actors import Deadline
from cudnn_actor.models import Feature, Model
from cudnn_actor.models.sizes import Sizes
from cudnn_actor.models.source import Source
from cudnn_actor.protocol.types.buffers import BufferRef
from cudnn_actor.protocol.types.dtypes import DTypeLike
from cudnn_actor.protocol.types.tensor import LayoutLike, TensorSpec
from cudnn_actor.protocol.types.tune import Tune
from cudnn_actor.service.client import CudnnRef

__all__ = [
    "BufferRecipe",
    "Held",
    "ModelRecipe",
    "RayBuffer",
    "RayModel",
    "Recipe",
    "Reservation",
    "ReservationRecipe",
]


@dataclass(frozen=True, kw_only=True)
class Held:
    """Something that each replica has its own of. It is plain data, which requests carry by number.

    Parameters
    ----------
    pool
        The id of the pool that it belongs to.
    number
        Its number there.
    """

    pool: str
    number: int


@dataclass(frozen=True, kw_only=True)
class RayBuffer(Held):
    """A buffer of each replica with the same values, which requests only read. Made by `RayPool.upload`.

    Parameters
    ----------
    dims
        Its dims, in N, C, spatial order.
    """

    dims: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Its dims."""
        return self.dims


@dataclass(frozen=True, kw_only=True)
class RayModel(Held):
    """A model that each replica has loaded. Made by `RayPool.load`, and run by `RayPool.run`.

    Parameters
    ----------
    name
        What its runs are counted under.
    inputs, defaults, outputs
        The inputs that have to be given, those that may be, which have a default, and the outputs, in order.
    """

    name: str
    inputs: tuple[Feature, ...]
    defaults: tuple[Feature, ...]
    outputs: tuple[Feature, ...]


@dataclass(frozen=True, kw_only=True)
class Reservation(Held):
    """A model that each replica keeps warm for inputs of some specs.

    Parameters
    ----------
    model
        The model.
    """

    model: RayModel


Own = Callable[[Any], Any]
"""Gives a replica's own of what all have."""


class Recipe(ABC):
    """How a replica makes something that all replicas have. It lies in Ray's object store."""

    @abstractmethod
    async def make(self, gpu: CudnnRef, own: Own) -> Any:
        """Make it in a replica's service. Raises `CudnnActorError`."""

    async def replace(self, _gpu: CudnnRef, _made: Any) -> Any:
        """Make it in place of what an earlier recipe has made. Raises `CudnnActorError`; then that stays."""
        raise NotImplementedError(f"{type(self).__name__} replaces nothing")

    @abstractmethod
    async def drop(self, gpu: CudnnRef, made: Any) -> None:
        """Free it. Raises `CudnnActorError`."""


@dataclass(frozen=True)
class BufferRecipe(Recipe):
    """A buffer: its values, and what `CudnnRef.upload` takes besides."""

    values: np.ndarray
    layout: LayoutLike
    dtype: DTypeLike | None

    async def make(self, gpu: CudnnRef, _own: Own) -> BufferRef:
        """Upload the values."""
        return await gpu.upload(self.values, layout=self.layout, dtype=self.dtype)

    async def drop(self, gpu: CudnnRef, made: BufferRef) -> None:
        """Free the buffer."""
        await gpu.free(made)


@dataclass(frozen=True)
class ModelRecipe(Recipe):
    """A model that was read, and what `CudnnRef.load` takes besides."""

    source: Source
    name: str
    dims: Mapping[str, Sizes] | None
    tune: Tune | None

    async def make(self, gpu: CudnnRef, _own: Own) -> Model:
        """Load the model, whose weights are uploaded."""
        return await gpu.load(self.source, dims=self.dims, tune=self.tune, name=self.name)

    async def replace(self, gpu: CudnnRef, made: Model) -> Model:
        """Have the model that was loaded run this one: see `CudnnRef.load`."""
        return await gpu.load(self.source, dims=self.dims, tune=self.tune, name=self.name, replace=made)

    async def drop(self, _gpu: CudnnRef, made: Model) -> None:
        """Unload the model, once its runs are done."""
        await made.close()


@dataclass(frozen=True)
class ReservationRecipe(Recipe):
    """A model of the pool, and the specs of inputs for which it is kept warm."""

    model: RayModel
    specs: Mapping[str, TensorSpec]

    async def make(self, _gpu: CudnnRef, own: Own) -> Callable[[], None]:
        """Warm the model. Returns what ends that, once called."""
        model: Model = own(self.model)
        return await model.reserve(self.specs, Deadline())

    async def drop(self, _gpu: CudnnRef, made: Callable[[], None]) -> None:
        """End it."""
        made()
