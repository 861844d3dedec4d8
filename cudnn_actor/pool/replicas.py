"""The models and read-only buffers that all members of a pool have."""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from cudnn_actor.actors import Deadline
from cudnn_actor.models import Feature, Model
from cudnn_actor.models.sizes import Sizes
from cudnn_actor.models.source import Source
from cudnn_actor.pool.shared_source import SharedSource
from cudnn_actor.protocol.errors import CudnnActorError, InvalidRequest, Words
from cudnn_actor.protocol.types.buffers import BufferRef
from cudnn_actor.protocol.types.dtypes import DTypeLike
from cudnn_actor.protocol.types.tensor import LayoutLike, TensorSpec
from cudnn_actor.protocol.types.tune import Tune
from cudnn_actor.service.client import CudnnRef

__all__ = ["PoolBuffer", "PoolModel", "Replica", "Version"]

T = TypeVar("T")


class Replica(ABC, Generic[T]):
    """A model or a buffer of which each member has its own copy."""

    def __init__(self) -> None:
        self.at: dict[int, T] = {}
        """For each member: its copy, as its service's handle gives it."""
        self.closed = False

    @abstractmethod
    async def make(self, gpu: CudnnRef) -> T:
        """Make a copy in a member's service. Raises `CudnnActorError`."""

    @abstractmethod
    async def drop(self, gpu: CudnnRef, copy: T) -> None:
        """Free a copy. Raises `CudnnActorError`."""

    def of(self, member: int) -> T:
        """A member's copy. Raises `InvalidRequest` if there is none, because it was dropped."""
        try:
            return self.at[member]
        except KeyError:
            raise InvalidRequest(
                field="value",
                value=Words(self),
                problem="was freed or unloaded",
                fix="upload or load it again",
            ) from None

    def forget_member(self, member: int) -> None:
        """Forget the copy of a member that has ended."""
        self.at.pop(member, None)

    def end(self) -> None:
        """Release the values or weights from which copies are made. No further copy will be made."""
        self.closed = True


class PoolBuffer(Replica[BufferRef]):
    """A buffer of each member with the same values, which requests only read. `Pool.upload` makes it.

    Parameters
    ----------
    values
        The buffer's values. The pool keeps them for members that restart.
    layout, dtype
        As in `CudnnRef.upload`.
    """

    def __init__(self, values: np.ndarray, layout: LayoutLike, dtype: DTypeLike | None) -> None:
        super().__init__()
        self._values: np.ndarray | None = values
        self._layout, self._dtype = layout, dtype
        self.dims: tuple[int, ...] = values.shape
        """The buffer's dims, in N, C, spatial order."""

    def __repr__(self) -> str:
        return f"<{'freed ' if self.closed else ''}buffer of a pool {self.dims}>"

    @property
    def shape(self) -> tuple[int, ...]:
        """The buffer's dims, under NumPy's name."""
        return self.dims

    async def make(self, gpu: CudnnRef) -> BufferRef:
        """Upload the values."""
        return await gpu.upload(self._values, layout=self._layout, dtype=self._dtype)

    def end(self) -> None:
        """Release the values."""
        super().end()
        self._values = None

    async def drop(self, gpu: CudnnRef, copy: BufferRef) -> None:
        """Free a member's buffer."""
        await gpu.free(copy)


@dataclass(frozen=True, eq=False, kw_only=True)
class Version:
    """One version of a pool's model: its source, and the options of its load.

    Parameters
    ----------
    source
        The model, which was read once.
    dims, tune
        As in `Pool.load`.
    """

    source: Source
    dims: Mapping[str, Sizes] | None = None
    tune: Tune | None = None

    def release(self) -> None:
        """Forget the weights that members share: no member will load it any more."""
        if isinstance(self.source, SharedSource):
            self.source.release()


class PoolModel(Replica[Model]):
    """A model that each member of a pool has loaded. `Pool.load` makes it, and `Pool.run` runs it.

    Parameters
    ----------
    version
        The current version.
    name
        The name under which the model's runs are counted.
    """

    def __init__(self, version: Version, name: str) -> None:
        super().__init__()
        self.version, self.name = version, name
        self.swapping = asyncio.Lock()
        """A lock for swaps of the model: one at a time."""
        self._made: dict[Model, Version] = {}
        """For each member's model: the version that it runs."""
        self._reserved: dict[object, Mapping[str, TensorSpec]] = {}
        """The specs of inputs for which the model is warm on each member, by the object of each
        reservation."""
        self._releases: dict[tuple[object, Model], Callable[[], None]] = {}

    def __repr__(self) -> str:
        return f"<model {self.name!r} of a pool, on {len(self.at)} members>"

    @property
    def inputs(self) -> tuple[Feature, ...]:
        """The inputs that have to be given, in order."""
        return self.version.source.inputs

    @property
    def defaults(self) -> tuple[Feature, ...]:
        """The inputs that may be left out, since the model has default values for them, in order."""
        return self.version.source.defaults

    @property
    def outputs(self) -> tuple[Feature, ...]:
        """The outputs, in order."""
        return self.version.source.outputs

    async def make(self, gpu: CudnnRef) -> Model:
        """Load the model, with its weights, and warm it for the reserved specs."""
        version = self.version
        copy = await gpu.load(version.source, dims=version.dims, tune=version.tune, name=self.name)
        self._made[copy] = version
        try:
            await self.warm(copy, Deadline())
        except BaseException:
            self._forget(copy)
            raise
        return copy

    async def bring_up_to_date(self, gpu: CudnnRef, copy: Model) -> None:
        """Let a member's model run the current version, if it runs another one: see `CudnnRef.load`."""
        version = self.version
        if self._made[copy] is not version:
            await gpu.load(version.source, dims=version.dims, tune=version.tune, name=self.name, replace=copy)
            self._made[copy] = version

    def reserve(self, specs: Mapping[str, TensorSpec]) -> Callable[[], None]:
        """Let `warm` keep graphs for inputs of these specs. Returns a function that ends this."""
        key = object()
        self._reserved[key] = specs

        def release() -> None:
            self._reserved.pop(key, None)
            for each in [each for each in self._releases if each[0] is key]:
                self._releases.pop(each)()

        return release

    async def warm(self, copy: Model, deadline: Deadline) -> None:
        """Warm a member's model for all reserved specs. Raises as `Model.reserve`."""
        for key, specs in tuple(self._reserved.items()):
            if (key, copy) not in self._releases:
                release = await copy.reserve(specs, deadline)
                if key in self._reserved and copy in self._made:
                    self._releases[key, copy] = release
                else:  # the reservation has ended
                    release()

    async def drop(self, _gpu: CudnnRef, copy: Model) -> None:
        """Unload a member's model."""
        self._forget(copy)

    def forget_member(self, member: int) -> None:
        """Forget the model of a member that has ended."""
        if (copy := self.at.pop(member, None)) is not None:
            self._forget(copy)

    def end(self) -> None:
        """Release the weights."""
        super().end()
        self.version.release()

    def _forget(self, copy: Model) -> None:
        self._made.pop(copy, None)
        for each in [each for each in self._releases if each[1] is copy]:
            self._releases.pop(each)()
        with contextlib.suppress(CudnnActorError):
            copy.end()
