"""How long requests keep a device busy: times that were recorded on GPUs."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

__all__ = ["Mix", "mixes"]

_RECORDS = Path(__file__).parents[1] / "results"
_H200, _H100 = (
    "models-h200-bfloat16-20261127-modules-flash.json",
    "models-h100-bfloat16-20261126-deployed.json",
)
_SPREAD = "batching-h200-20261126.json"


@dataclass(frozen=True, kw_only=True)
class Mix:
    """A mix of requests: each of the times is as likely as the others.

    Parameters
    ----------
    name
        For people.
    times_us
        Device times of the networks, in microseconds.
    sigma
        The standard deviation of the logarithm of a run's time: two runs of one network differ.
    """

    name: str
    times_us: tuple[float, ...]
    sigma: float

    @property
    def mean_us(self) -> float:
        """The mean device time of a request, in microseconds."""
        return sum(self.times_us) / len(self.times_us) * math.exp(self.sigma**2 / 2)


def mixes(folder: Path = _RECORDS) -> tuple[Mix, Mix, Mix]:
    """The networks that were recorded on an H200, those on an H100, and ResNet-50's batch of 32 alone."""
    sigma, h200, h100 = _recorded_sigma(folder), _recorded(folder / _H200), _recorded(folder / _H100)
    return (
        Mix(name=f"{len(h200)} runs, H200", times_us=tuple(h200.values()), sigma=sigma),
        Mix(name=f"{len(h100)} runs, H100", times_us=tuple(h100.values()), sigma=sigma),
        Mix(name="ResNet-50, 32 images", times_us=(h200["resnet50", 32],), sigma=sigma),
    )


def _recorded(path: Path) -> dict[tuple[str, int], float]:
    """The device time of each network and batch in a record, in microseconds."""
    return {
        (row["network"], row["batch"]): 1000.0 * row["device_ms"]
        for row in json.loads(path.read_text())["found"]
        if "device_ms" in row
    }


def _recorded_sigma(folder: Path) -> float:
    """The deviation that gives the 99th percentile over the median of a pool of one: batches of ResNet-50."""
    rows = json.loads((folder / _SPREAD).read_text())["found"]
    (ratio,) = [row["p99_by_p50"] for row in rows if "p99_by_p50" in row]
    return math.log(ratio) / NormalDist().inv_cdf(0.99)
