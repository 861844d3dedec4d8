"""The settings of a test's service, from markers and options of pytest."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any, Protocol

from cudnn_actor.options import Options, make_options
from cudnn_actor.protocol.errors import InvalidRequest
from cudnn_actor.protocol.types.checks import require_seconds
from cudnn_actor.supervision import FaultPlan

__all__ = ["Mark", "options_of", "plan_of", "seconds_of"]


class Mark(Protocol):
    """A marker as pytest gives it."""

    @property
    def args(self) -> tuple[Any, ...]:
        """The mark's positional arguments."""

    @property
    def kwargs(self) -> Any:
        """The mark's keyword arguments."""


def plan_of(mark: Mark | None) -> FaultPlan | None:
    """The plan of a marker `gpu_faults`. Raises `InvalidRequest` unless it was given one plan alone."""
    if mark is None:
        return None
    if len(mark.args) == 1 and not mark.kwargs and isinstance(mark.args[0], FaultPlan):
        return mark.args[0]
    raise InvalidRequest(
        field="pytest.mark.gpu_faults",
        value=(*mark.args, *mark.kwargs.values()),
        problem="takes one FaultPlan",
        fix="use for example @pytest.mark.gpu_faults(FaultPlan().at(1, Fault.STICKY))",
    )


def options_of(device: str, faults: object, marks: Iterable[Mark]) -> Options:
    """The options of a test's service. If several marks `gpu_options` set an option, the earliest counts.

    Raises `InvalidRequest`.
    """
    given: dict[str, Any] = {}
    for mark in marks:
        if mark.args or "faults" in mark.kwargs:
            raise InvalidRequest(
                field="pytest.mark.gpu_options",
                value=mark.args or mark.kwargs["faults"],
                problem="takes options of spawn by name, but for faults",
                fix="use @pytest.mark.gpu_faults(plan) for faults, and name the options: standby=1",
            )
        given = {**mark.kwargs, **given}
    if faults is not None and not isinstance(faults, FaultPlan):
        raise InvalidRequest(
            field="gpu_faults",
            value=faults,
            problem="is neither a FaultPlan nor None",
            fix="return a plan from the fixture: FaultPlan().at(1, Fault.STICKY)",
        )
    return make_options({"device": device, "faults": faults, **given})


def seconds_of(name: str, text: str) -> float:
    """The seconds that an option of pytest's configuration gives. Raises `InvalidRequest`."""
    given: object = text
    with contextlib.suppress(ValueError):
        given = float(text)
    require_seconds(name, given)
    return float(text)
