"""What all members of a pool have: models, and buffers that are only read."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Generic, TypeVar

import numpy as np

from cudnn_actor.models import Feature, Model
from cudnn_actor.models.sizes import Sizes
from cudnn_actor.models.source import Source
from cudnn_actor.protocol.errors import CudnnActorError, InvalidRequest, Words
from cudnn_actor.protocol.types.buffers import BufferRef
from cudnn_actor.protocol.types.dtypes import DTypeLike
from cudnn_actor.protocol.types.tensor import LayoutLike
from cudnn_actor.protocol.types.tune import Tune
from cudnn_actor.service.client import CudnnRef

__all__ = ["PoolBuffer", "PoolModel", "Replica"]

T = TypeVar("T")


class Replica(ABC, Generic[T]):
    """Something that each member has its own copy of."""

    def __init__(self) -> None:
        self.at: dict[int, T] = {}
        """By member: what its service knows it by."""
        self.closed = False

    @abstractmethod
    async def make(self, gpu: CudnnRef) -> T:
        """Make a copy in a member's service. Raises `CudnnActorError`."""

    @abstractmethod
    async def drop(self, gpu: CudnnRef, copy: T) -> None:
        """Free a copy. Raises `CudnnActorError`."""

    def of(self, member: int) -> T:
        """A member's copy. Raises `InvalidRequest` if there is none: it was dropped."""
        if member not in self.at:
            raise InvalidRequest(
                field="value",
                value=Words(self),
                problem="was freed or unloaded",
                fix="upload or load it again",
            )
        return self.at[member]

    def lost(self, member: int) -> None:
        """Forget the copy of a member that has ended."""
        self.at.pop(member, None)


class PoolBuffer(Replica[BufferRef]):
    """A buffer of each member with the same values, which requests only read. Made by `Pool.upload`.

    Parameters
    ----------
    values
        What it has. The pool keeps them for members that restart.
    layout, dtype
        As in `CudnnRef.upload`.
    """

    def __init__(self, values: np.ndarray, layout: LayoutLike, dtype: DTypeLike | None) -> None:
        super().__init__()
        self._values, self._layout, self._dtype = values, layout, dtype

    def __repr__(self) -> str:
        return f"<buffer of a pool {self._values.shape} {self._values.dtype}>"

    @property
    def dims(self) -> tuple[int, ...]:
        """Its dims, in N, C, spatial order."""
        return self._values.shape

    shape = dims

    async def make(self, gpu: CudnnRef) -> BufferRef:
        """Upload the values."""
        return await gpu.upload(self._values, layout=self._layout, dtype=self._dtype)

    async def drop(self, gpu: CudnnRef, copy: BufferRef) -> None:
        """Free a member's buffer."""
        await gpu.free(copy)


class PoolModel(Replica[Model]):
    """A model that each member of a pool has loaded. Made by `Pool.load`, and run by `Pool.run`.

    Parameters
    ----------
    source
        The model, which was read once.
    name
        What its runs are counted under.
    dims, tune
        As in `Pool.load`.
    """

    def __init__(
        self, source: Source, name: str, dims: Mapping[str, Sizes] | None, tune: Tune | None
    ) -> None:
        super().__init__()
        self._source, self.name, self._dims, self._tune = source, name, dims, tune

    def __repr__(self) -> str:
        return f"<model {self.name!r} of a pool, on {len(self.at)} members>"

    @property
    def inputs(self) -> tuple[Feature, ...]:
        """The inputs that have to be given, in order."""
        return self._source.inputs

    @property
    def outputs(self) -> tuple[Feature, ...]:
        """The outputs, in order."""
        return self._source.outputs

    async def make(self, gpu: CudnnRef) -> Model:
        """Load the model, whose weights are uploaded."""
        return await gpu.load(self._source, dims=self._dims, tune=self._tune, name=self.name)

    async def drop(self, _gpu: CudnnRef, copy: Model) -> None:
        """Unload a member's model."""
        await copy.close()

    def lost(self, member: int) -> None:
        """Forget the model of a member that has ended."""
        if (model := self.at.pop(member, None)) is not None:
            with contextlib.suppress(CudnnActorError):
                model.end()
