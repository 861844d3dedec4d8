"""What all replicas of a pool have: how a replica makes it, and what the caller knows it by."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from cudnn_actor.models import Feature, Model
from cudnn_actor.models.sizes import Sizes
from cudnn_actor.models.source import Source
from cudnn_actor.protocol.types.buffers import BufferRef
from cudnn_actor.protocol.types.dtypes import DTypeLike
from cudnn_actor.protocol.types.tensor import LayoutLike
from cudnn_actor.protocol.types.tune import Tune
from cudnn_actor.service.client import CudnnRef

__all__ = ["BufferRecipe", "Held", "ModelRecipe", "RayBuffer", "RayModel", "Recipe"]


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
    inputs, outputs
        The inputs that have to be given, and the outputs, in order.
    """

    name: str
    inputs: tuple[Feature, ...]
    outputs: tuple[Feature, ...]


class Recipe(ABC):
    """How a replica makes something that all replicas have. It lies in Ray's object store."""

    @abstractmethod
    async def make(self, gpu: CudnnRef) -> Any:
        """Make it in a replica's service. Raises `CudnnActorError`."""

    @abstractmethod
    async def drop(self, gpu: CudnnRef, made: Any) -> None:
        """Free it. Raises `CudnnActorError`."""


@dataclass(frozen=True)
class BufferRecipe(Recipe):
    """A buffer: its values, and what `CudnnRef.upload` takes besides."""

    values: np.ndarray
    layout: LayoutLike
    dtype: DTypeLike | None

    async def make(self, gpu: CudnnRef) -> BufferRef:
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

    async def make(self, gpu: CudnnRef) -> Model:
        """Load the model, whose weights are uploaded."""
        return await gpu.load(self.source, dims=self.dims, tune=self.tune, name=self.name)

    async def drop(self, _gpu: CudnnRef, made: Model) -> None:
        """Unload the model, once its runs are done."""
        await made.close()
