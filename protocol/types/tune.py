"""Whether plans are tuned: measured against other candidates on the device."""

from __future__ import annotations

from typing import Literal

from cudnn_actor.protocol.errors import InvalidRequest

__all__ = ["Tune", "require_tune"]

Tune = bool | Literal["cached"]
"""True: measure candidates, unless the plan store has a tuned plan. "cached": take what the plan store has
tuned, and never measure. False: measure only if the service was spawned with `autotune=True`."""


def require_tune(field: str, value: object) -> None:
    """Raise `InvalidRequest` unless a value is a `Tune`."""
    if not isinstance(value, bool) and value != "cached":
        raise InvalidRequest(
            field=field,
            value=value,
            problem='is neither True, False nor "cached"',
            fix='pass True to measure, or "cached" to take what a plan store has tuned',
        )
