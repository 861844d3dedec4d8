"""Images of which a definition that is recorded reads elements here and there: `GridSample`'s."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from cudnn_actor.engines.cpu.fast.kernels import Call, Step, deal
from cudnn_actor.engines.cpu.fast.lines import boxes_of_elements
from cudnn_actor.engines.cpu.fast.recording import NotRecordable, Recorded, Recording
from cudnn_actor.engines.cpu.scratch import Dims, Scratch

__all__ = ["ImageArrays", "Images", "images_of"]

Array = npt.NDArray[Any]
_BLOCK = 1 << 16
"""Elements of a block that is copied."""


def images_of(x: Array, lanes: Sequence[Scratch], *, cut: bool) -> tuple[Array, bool, list[Step]]:
    """Images of dims (N, C, spatial), of which each lies without gaps, and whether channels-last.

    They are x itself, or a copy, which the steps make. `cut`: whether parts have some of the channels: then
    the images are not channels-last.
    """
    for channels_last in (False,) if cut else (True, False):
        if all(map(partial(_is_packed, channels_last), x)):
            return x, channels_last, []
    copied = lanes[0].keep(x.shape, x.dtype)

    def call(box: Any, _lane: int) -> Call:
        return partial(np.copyto, copied[(*box, ...)], x[(*box, ...)])

    return copied, False, [deal(boxes_of_elements(x.shape, _BLOCK), len(lanes), call)]


def _is_packed(channels_last: bool, image: Array) -> bool:
    return (np.moveaxis(image, 0, -1) if channels_last else image).flags.c_contiguous


class Images:
    """Images in a recording, of which elements are taken at places."""

    def __init__(
        self, recording: Recording, name: str, dims: Dims, dtype: np.dtype[Any], channels_last: bool
    ) -> None:
        self._recording, self._name, self._axis = recording, name, 0 if channels_last else 1
        self.shape, self.dtype, self.ndim = dims, dtype, len(dims)
        self._rows: dict[tuple[int, int], tuple[Recorded, Recorded]] = {}
        """Places along a dim, and how far that is from the first element, by the id of the former."""

    @property
    def channels_last(self) -> bool:
        """Whether the channels of an element lie side by side."""
        return not self._axis

    def __array_function__(self, function: Any, types: Any, args: Any, options: Any) -> _ChannelsLast:
        """Only what `GridSample` does with its images."""
        del types
        if function is not np.moveaxis or args[1:] != (1, -1) or options:
            raise NotRecordable(function.__name__)
        return _ChannelsLast(self)

    def take(self, places: Sequence[Recorded]) -> Recorded:
        """The elements at places, which are one array for each spatial dim: dims (N, places, C)."""
        (count, channels, *sizes), each = self.shape, places[0].shape[1:]
        apart = [self._apart(place, axis, math.prod(sizes[axis + 1 :])) for axis, place in enumerate(places)]
        total = apart[0]
        for other in apart[1:]:
            total = total + other
        total = total.reshape(count, -1)
        dims = (total.shape[1], channels) if self.channels_last else (channels, total.shape[1])
        found = self._recording.new((count, *dims), self.dtype)
        for number in range(count):
            self._recording.note(
                partial(_take, number, self._axis), (self._name, total[number]), found[number]
            )
        if self.channels_last:
            return found.reshape(count, *each, channels)
        matrices = found.reshape(count, channels, *each)
        return matrices.transpose(0, *range(2, matrices.ndim), 1)

    def _apart(self, place: Recorded, axis: int, stride: int) -> Recorded:
        """How far places along a dim are from the first element. It is computed once for many taps."""
        key = id(place), axis
        if key not in self._rows:
            self._rows[key] = place, place * stride if stride != 1 else place
        return self._rows[key][1]


class _ChannelsLast:
    """The images with their channels as the last dim."""

    def __init__(self, images: Images) -> None:
        self._images = images

    def __getitem__(self, at: tuple[Any, ...]) -> Recorded:
        return self._images.take(at[1:])  # the first are the numbers of the images, in order


class ImageArrays:
    """The images that a part is computed from: those of one part after the other."""

    def __init__(self, *, channels_last: bool) -> None:
        self.channels_last = channels_last
        self.matrices: list[Array] = []

    def show_call(self, x: Array) -> Call:
        """A call after which elements are taken from these images, of dims (N, C, spatial)."""
        if self.channels_last:
            found = [image.reshape(-1, x.shape[1]) for image in np.moveaxis(x, 1, -1)]
        else:
            found = [image.reshape(x.shape[1], -1) for image in x]
        assert all(np.may_share_memory(image, x) for image in found), "`images_of` has seen to that"
        return partial(setattr, self, "matrices", found)


def _take(number: int, axis: int, images: ImageArrays, places: Array, into: Array) -> Call:
    def call() -> None:
        images.matrices[number].take(places, axis, into, "clip")

    return call
