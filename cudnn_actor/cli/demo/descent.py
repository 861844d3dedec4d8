"""Gradient descent with Nesterov's momentum, for functions with very different curvatures."""

from __future__ import annotations

import numpy as np

__all__ = ["Descent"]


class Descent:
    """Follows gradients to the minimum of a convex function.

    The momentum is reset where it points uphill (O'Donoghue and Candès, 2015,
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
