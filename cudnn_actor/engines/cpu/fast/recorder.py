"""NumPy for a definition that is recorded."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from cudnn_actor.engines.cpu.exact.special import erf_by_choice, erfc_by_choice
from cudnn_actor.engines.cpu.fast.recording import Recorded, Recording, full

__all__ = ["Recorder"]


class Recorder:
    """NumPy, with new arrays of a recording: new arrays that may be written are of the recording."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    def zeros(self, dims: Any, dtype: npt.DTypeLike = np.float64) -> Recorded:
        """An array of zeros."""
        return full(self._recording, dims, 0, dtype)

    def full(self, dims: Any, value: Any, dtype: npt.DTypeLike = np.float64) -> Recorded:
        """An array of one number."""
        return full(self._recording, dims, value, dtype)

    def ones(self, dims: Any, dtype: npt.DTypeLike = np.float64) -> Recorded:
        """An array of ones."""
        return full(self._recording, dims, 1, dtype)

    def ascontiguousarray(self, x: Any) -> Any:
        """An array as it is if it lies in C order without gaps, else a copy that does."""
        return self._recording.pack(x)

    erf, erfc = staticmethod(erf_by_choice), staticmethod(erfc_by_choice)
