"""Two gradient descents through a service: find the camera shake, then remove it from the photograph.

Finding the filter w from a photo x and its shaken copy y, and finding the photo from the shaken copy and
the filter, are the two gradients of one function, |conv(x, w) - y|² / 2, with r = conv(x, w) - y:

- by w: ConvBwdFilter(x, r)
- by x: ConvBwdData(r, w)
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import numpy as np

from cudnn_actor.cli.demo.filters import LAPLACIAN
from cudnn_actor.cli.demo.recorder import Recorder
from cudnn_actor.cli.user_error import UserError
from cudnn_actor.protocol import BufferRef, ConvBwdData, ConvBwdFilter, ConvFwd, ConvSpec

__all__ = ["FilterFit", "PhotoFit", "convolve"]

_CURVATURE_STEPS = 8

_VALID = ConvSpec.symmetric(2)
_LEAST_CURVATURE = 1e-3


async def convolve(recorder: Recorder, x: BufferRef, taps: np.ndarray) -> BufferRef:
    """x of dims (N, 1, H, W), filtered without padding: 4 rows and columns fewer for a 5x5 filter."""
    w = await recorder.put(as_filter(taps))
    y = await recorder.room(_VALID.output_dims(x.spec.dims, w.spec.dims))
    await recorder.ask(ConvFwd(x=x, w=w, y=y, conv=_VALID))
    return y


def as_filter(taps: np.ndarray) -> np.ndarray:
    """Taps (h, w) as a filter of dims (1, 1, h, w), float32."""
    return np.ascontiguousarray(taps, dtype=np.float32)[None, None]


class _Residual:
    """r = conv(x, w) - y, in `buffer`, for buffers x and w and a wanted y on the host."""

    def __init__(self, recorder: Recorder, x: BufferRef, w: BufferRef, wanted: np.ndarray) -> None:
        self._recorder = recorder
        self._x, self._w, self._wanted = x, w, wanted

    async def open(self) -> None:
        self.buffer = await self._recorder.room(self._wanted.shape)

    async def compute(self) -> float:
        """Fill `buffer` with r; returns the loss, the mean of r²."""
        await self._recorder.ask(ConvFwd(x=self._x, w=self._w, y=self.buffer, conv=_VALID))
        residual = await self._recorder.get(self.buffer) - self._wanted
        await self._recorder.write(self.buffer, residual)
        return float(np.mean(np.square(residual, dtype=np.float64)))


class FilterFit:
    """Recovers a filter from a sharp patch and the same patch filtered.

    Both are filtered with a Laplacian first. Convolutions commute, so this does not change the solution.
    It reduces the ratio of the curvatures from 1 : 15,000 in a photograph to some 1 : 10, so that plain
    gradient descent converges.

    Parameters
    ----------
    recorder
        The recorder, which sends and times the requests.
    rng
        The generator that draws the start vector of the power method for the curvature.
    """

    def __init__(self, recorder: Recorder, rng: np.random.Generator) -> None:
        self._recorder = recorder
        self._rng = rng
        self.taps = np.zeros((5, 5), dtype=np.float32)
        """The filter found so far."""

    async def run(self, sharp: BufferRef, shaken: BufferRef, steps: int) -> AsyncIterator[float]:
        """Descend, and yield the loss at each step.

        Raises `UserError` if the patch is blank, so that the filter cannot be recovered.
        """
        recorder = self._recorder
        self._x = await convolve(recorder, sharp, LAPLACIAN)
        wanted = await recorder.get(await convolve(recorder, shaken, LAPLACIAN))
        self._w = await recorder.put(as_filter(self.taps))
        self._dw = await recorder.room(self._w.spec.dims)
        residual = _Residual(recorder, self._x, self._w, wanted)
        await residual.open()
        step = np.float32(1 / await self._curvature(residual.buffer))
        for _ in range(steps):
            await recorder.write(self._w, as_filter(self.taps))
            loss = await residual.compute()
            gradient = await self._by_filter(residual.buffer)
            self.taps = self.taps - step * gradient[0, 0]
            yield loss

    async def _curvature(self, y: BufferRef) -> float:
        """An upper estimate of the largest curvature, by the power method, with the same messages."""
        vector: np.ndarray = self._rng.standard_normal(self._w.spec.dims, dtype=np.float32)
        length = 0.0
        for _ in range(_CURVATURE_STEPS):
            await self._recorder.write(self._w, vector)
            await self._recorder.ask(ConvFwd(x=self._x, w=self._w, y=y, conv=_VALID))
            image = await self._by_filter(y)
            length = float(np.linalg.norm(image)) / float(np.linalg.norm(vector))
            if length < _LEAST_CURVATURE:
                raise UserError("the photograph has no detail to learn from; give one that is not blank")
            vector = image / np.float32(np.linalg.norm(image))
        return 1.1 * length

    async def _by_filter(self, dy: BufferRef) -> np.ndarray:
        await self._recorder.ask(ConvBwdFilter(x=self._x, dy=dy, dw=self._dw, conv=_VALID))
        return await self._recorder.get(self._dw)


class Descent:
    """Accelerated gradient descent for a convex function, even if its curvatures are very different.

    The momentum is reset when it points uphill (O'Donoghue and Candès, 2015,
    https://doi.org/10.1007/s10208-013-9150-3), so it needs no tuning.

    Parameters
    ----------
    start
        Where to begin.
    step
        The reciprocal of the function's largest curvature, or less.
    """

    def __init__(self, start: np.ndarray, step: float) -> None:
        self.best = start.copy()
        """The point reached."""
        self.probe = start.copy()
        """The point at which the next gradient is needed: the current point plus the momentum."""
        self._step = np.float32(step)
        self._age = 0

    def follow(self, gradient: np.ndarray) -> None:
        """Take one step, given the gradient at `probe`."""
        reached = self.probe - self._step * gradient
        move = reached - self.best
        if np.vdot(gradient, move) > 0:
            self._age = 0
        self.probe = reached + np.float32(self._age / (self._age + 3)) * move
        self.best = reached
        self._age += 1


class PhotoFit:
    """Recovers a photograph from its filtered copy and the filter.

    Parameters
    ----------
    recorder
        The recorder, which sends and times the requests.
    taps
        The filter, 5x5.
    """

    def __init__(self, recorder: Recorder, taps: np.ndarray) -> None:
        self._recorder = recorder
        self._taps = taps

    async def run(self, shaken: np.ndarray, steps: int) -> AsyncIterator[float]:
        """Descend, and yield the loss at each step.

        `shaken` has dims (N, 1, height, width); `photo` has 4 rows and 4 columns more.
        """
        recorder = self._recorder
        self.photo = np.pad(shaken, ((0, 0), (0, 0), (2, 2), (2, 2)), mode="edge")
        """The photograph found so far."""
        w = await recorder.put(as_filter(self._taps))
        x, dx = await recorder.put(self.photo), await recorder.room(self.photo.shape)
        residual = _Residual(recorder, x, w, shaken)
        await residual.open()
        # A filter amplifies no frequency by more than the sum of its taps' magnitudes.
        descent = Descent(self.photo, 1 / float(np.abs(self._taps).sum()) ** 2)
        for _ in range(steps):
            await recorder.write(x, descent.probe)
            loss = await residual.compute()
            await recorder.ask(ConvBwdData(dy=residual.buffer, w=w, dx=dx, conv=_VALID))
            descent.follow(await recorder.get(dx))
            self.photo = descent.best
            yield loss
