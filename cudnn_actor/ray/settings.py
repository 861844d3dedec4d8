"""The options of a `RayPool`, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from cudnn_actor.engines import check_device
from cudnn_actor.options import make_options
from cudnn_actor.pool.member_options import plain_options
from cudnn_actor.protocol.errors import InvalidRequest
from cudnn_actor.protocol.types.checks import is_finite, require_seconds, require_whole

__all__ = ["Settings", "Spread", "check_settings"]

Spread = Literal["SPREAD", "PACK", "STRICT_SPREAD", "STRICT_PACK"]
"""How Ray places the bundles of a placement group: apart or together; with "STRICT", always so."""
_REFUSED = ("faults", "graph_limits", "on_give_up")
"""The options of `spawn` that a replica does not take: see `plain_options`."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The parameters of a `RayPool`, under their names.

    Parameters
    ----------
    resources
        All resources that a replica takes, by Ray's names: "CPU", "GPU" and others.
    options
        The options of `spawn` for each replica.
    """

    num_replicas: int
    resources: Mapping[str, float]
    spread: Spread
    name: str
    min_ready: int
    mailbox: int
    max_restarts: int
    ready_within_s: float
    lost_after_s: float
    runtime_env: Mapping[str, Any] | None
    options: Mapping[str, Any]

    @property
    def device(self) -> str:
        """The device that replicas are spawned on."""
        return str(self.options["device"])

    def name_of(self, number: int) -> str:
        """The name of a replica."""
        return f"{self.name}-{number}"

    def options_of(self, number: int) -> dict[str, Any]:
        """The options of `spawn` for a replica, as plain data."""
        return {**self.options, "name": self.name_of(number)}


def check_settings(settings: Settings) -> Settings:
    """The settings, with a device. Raises `InvalidRequest` if a value is out of its range."""
    require_whole("num_replicas", settings.num_replicas, 1)
    require_whole("min_ready", settings.min_ready, 1, settings.num_replicas)
    require_whole("mailbox", settings.mailbox, 1)
    require_whole("max_restarts", settings.max_restarts, -1)
    require_seconds("ready_within_s", settings.ready_within_s, positive=True)
    require_seconds("lost_after_s", settings.lost_after_s, positive=True)
    _check_resources(settings.resources)
    if settings.spread not in get_args(Spread):
        raise InvalidRequest(
            field="spread",
            value=settings.spread,
            problem="is no strategy of Ray's placement groups",
            fix=f"use {', '.join(map(repr, get_args(Spread)))}",
        )
    given = plain_options(settings.options, _REFUSED, "replicas")
    options = {"device": "cuda:0" if settings.resources["GPU"] else "cpu", **given}
    check_device(options["device"])
    make_options({**options, "name": settings.name})  # raises if an option is out of its range
    return replace(settings, options=options)


def _check_resources(resources: Mapping[str, float]) -> None:
    for name, amount in resources.items():
        if not is_finite(amount) or amount < 0:
            raise InvalidRequest(
                field={"CPU": "num_cpus", "GPU": "num_gpus"}.get(name, name),
                value=amount,
                problem="is no amount of a resource",
                fix="give a number ≥ 0",
            )
    if not any(resources.values()):
        raise InvalidRequest(
            field="num_cpus",
            value=0,
            problem="leaves nothing that Ray could reserve",
            fix="give at least 0.01",
        )
