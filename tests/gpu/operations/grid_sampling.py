"""Images read at places that a tensor holds."""

from __future__ import annotations

from typing import Any

import numpy as np

from cudnn_actor.protocol.operations import GridPadding, GridSample, ResampleMode, Specs

from .rows import FLOATS, Asked, Exact, Made, Row, Sizes, walk

__all__ = ["EXACTNESS", "ROWS"]

EXACTNESS = """\
Places are the same on every engine, and so the nearest element is exact. Else, with N elements of which one
of the result is made, along A dims, a value may be off before it is rounded by (4 √N + 40 A) · u times the
sum of their magnitudes.
"""

NEAREST, LINEAR, CUBIC, BORDER, REFLECTION = "nearest", "linear", "cubic", "border", "reflection"
FORMS = (NEAREST, LINEAR, CUBIC, BORDER, REFLECTION)


def _make(asked: Asked) -> Made:
    choose, spatial = asked.choose, asked.rank - 2
    most = {1: 300, 2: 24, 3: 8}[spatial]
    match asked.sizes:
        case Sizes.ONE:
            x, y = (1,) * asked.rank, (1,) * spatial
        case Sizes.LONG:
            x = (1, 1, *(1,) * (spatial - 1), 9_000 + choose.size(9_000))
            y = (*(1,) * (spatial - 1), 5_000 + choose.size(4_000))
        case _:
            x = (choose.size(3), choose.size(6), *(choose.size(most) for _ in range(spatial)))
            y = tuple(choose.size(most) for _ in range(spatial))
    modes = {mode.value: mode for mode in ResampleMode}
    paddings = {padding.value: padding for padding in GridPadding}
    attributes = {
        "mode": modes.get(asked.form or "", choose.one(ResampleMode)),
        "padding": paddings.get(asked.form or "", choose.one(GridPadding)),
        "align_corners": choose.chance(0.5),
    }
    return Made({"x": x, "grid": (x[0], *y, spatial)}, attributes)


def _arrange(operation: Any, rng: np.random.Generator, values: Exact, specs: Specs) -> None:
    """Places in the image and around it; some are no numbers, or far away."""
    del operation, specs
    grid = rng.uniform(-1.5, 1.5, values["grid"].shape)
    edge = rng.random(grid.shape) < 0.2
    grid[edge] = rng.choice([-1.0, 1.0, 0.0, -3.0, 1e4, np.nan, np.inf], int(edge.sum()))
    values["grid"] = grid


class _Sums(GridSample[str], frozen=True, kw_only=True):
    """All weights are 1."""

    def _weights(self, xp: Any, ratio: Any) -> list[Any]:
        return [xp.ones_like(ratio)] * self.reach[1]


def _bound(operation: GridSample[str], values: Exact, specs: Specs) -> Exact:
    if operation.mode is ResampleMode.NEAREST:
        return {}
    sums = _Sums(**{name: getattr(operation, name) for name in operation.__struct_fields__})
    (total,) = sums.evaluate(np, values | {"x": np.abs(values["x"])}, specs).values()
    spatial = values["x"].ndim - 2
    return {"y": (walk(operation.reach[1] ** spatial) + 40 * spatial) * total}


ROWS = (
    Row(
        GridSample,
        FLOATS,
        ranks=(3, 4),
        forms=FORMS,
        make=_make,
        bounds=_bound,
        arrange=_arrange,
        sampled=False,
        more_ranks=(5,),
        varied=("x",),
    ),
)
