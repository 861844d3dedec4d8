"""A service as a child of a supervisor of the user's."""

from __future__ import annotations

import msgspec

from cudnn_actor.options import NAME, Options, takes_options
from cudnn_actor.service.service import CudnnService
from cudnn_actor.supervision import ChildPolicy, ChildSpec, Restart

__all__ = ["child_spec"]

_SHUTDOWN_S, _READY_WITHIN_S = 10.0, 300.0
"""Limits for a whole service: longer than those for the actor inside."""


class _ChildOptions(Options, frozen=True, kw_only=True):
    """The options of `child_spec` that are given by keyword.

    Parameters
    ----------
    restart
        After which exits the whole service is started again.
    """

    restart: Restart = Restart.PERMANENT


class _NamedChildOptions(_ChildOptions, frozen=True):
    """All options of `child_spec`: `id` may also be given by position.

    Parameters
    ----------
    id
        The child's name under your supervisor; the service's own too, unless `name` is given.
    """

    id: str = NAME


@takes_options(_NamedChildOptions)
def child_spec(options: _NamedChildOptions) -> tuple[ChildSpec, CudnnService]:
    """A service as a child of a `Supervisor` of yours, and its handle.

    The handle stays valid when your supervisor restarts the service. Its buffers do not: using them raises
    `StaleBufferError` from then on.

    Raises
    ------
    InvalidRequest
        An option is out of its range.
    """
    policy = ChildPolicy(
        id=options.id, restart=options.restart, shutdown_s=_SHUTDOWN_S, ready_within_s=_READY_WITHIN_S
    )
    service = CudnnService(msgspec.structs.replace(options, name=options.name or options.id))
    return ChildSpec(policy=policy, make=lambda _: service.make_supervisor()), service
