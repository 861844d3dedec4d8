"""The models and buffers that all replicas of a pool have: the objects by which callers name them, and the
recipes by which replicas make them."""

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
    "short_name",
]


@dataclass(frozen=True, kw_only=True)
class Held:
    """A model, a buffer or a reservation of which each replica has its own copy. It is plain data, and
    requests name it by its number.

    Parameters
    ----------
    pool
        The id of the pool to which it belongs.
    number
        Its number in the pool.
    """

    pool: str
    number: int


@dataclass(frozen=True, kw_only=True)
class RayBuffer(Held):
    """A buffer of each replica with the same values, which requests only read. `RayPool.upload` makes it.

    Parameters
    ----------
    dims
        The buffer's dims, in N, C, spatial order.
    """

    dims: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The buffer's dims, under NumPy's name."""
        return self.dims


@dataclass(frozen=True, kw_only=True)
class RayModel(Held):
    """A model that each replica has loaded. `RayPool.load` makes it, and `RayPool.run` runs it.

    Parameters
    ----------
    name
        The name under which the model's runs are counted.
    inputs, defaults, outputs
        The inputs that have to be given, the inputs with default values, which may be left out, and the
        outputs, in order.
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


def short_name(held: Held) -> Held:
    """The pool and the number of a `Held` alone. A replica needs no more, and this is pickled sooner."""
    return Held(pool=held.pool, number=held.number)


Own = Callable[[Any], Any]
"""A function from a `Held` to the replica's own copy."""


class Recipe(ABC):
    """How a replica makes its copy of a `Held`. Recipes are in Ray's object store."""

    @abstractmethod
    async def make(self, gpu: CudnnRef, own: Own) -> Any:
        """Make a copy in a replica's service. Raises `CudnnActorError`."""

    async def replace(self, _gpu: CudnnRef, _made: Any) -> Any:
        """Replace the copy of an earlier recipe. Raises `CudnnActorError`; then the old copy stays."""
        raise NotImplementedError(f"{type(self).__name__} replaces nothing")

    @abstractmethod
    async def drop(self, gpu: CudnnRef, made: Any) -> None:
        """Free a copy. Raises `CudnnActorError`."""


@dataclass(frozen=True)
class BufferRecipe(Recipe):
    """The recipe of a buffer: its values, and the other arguments of `CudnnRef.upload`."""

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
    """The recipe of a model: the model as it was read, and the other arguments of `CudnnRef.load`."""

    source: Source
    name: str
    dims: Mapping[str, Sizes] | None
    tune: Tune | None

    async def make(self, gpu: CudnnRef, _own: Own) -> Model:
        """Load the model, with its weights."""
        return await gpu.load(self.source, dims=self.dims, tune=self.tune, name=self.name)

    async def replace(self, gpu: CudnnRef, made: Model) -> Model:
        """Let the loaded model run this one: see `CudnnRef.load`."""
        return await gpu.load(self.source, dims=self.dims, tune=self.tune, name=self.name, replace=made)

    async def drop(self, _gpu: CudnnRef, made: Model) -> None:
        """Unload the model, once its runs are done."""
        await made.close()


@dataclass(frozen=True)
class ReservationRecipe(Recipe):
    """The recipe of a reservation: a model of the pool, and the specs of inputs for which it is kept warm."""

    model: RayModel
    specs: Mapping[str, TensorSpec]

    async def make(self, _gpu: CudnnRef, own: Own) -> Callable[[], None]:
        """Warm the model. Returns a function that ends the reservation."""
        model: Model = own(self.model)
        return await model.reserve(self.specs, Deadline())

    async def drop(self, _gpu: CudnnRef, made: Callable[[], None]) -> None:
        """End the reservation."""
        made()
