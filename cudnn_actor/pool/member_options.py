"""The options of `spawn` for the members of a pool: as plain data, since their services run in other
processes."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import Any

from cudnn_actor.protocol.errors import InvalidRequest

__all__ = ["plain_options"]


def plain_options(options: Mapping[str, Any], refused: Collection[str], members: str) -> dict[str, Any]:
    """The options with paths as text. Raises `InvalidRequest` for an option that members do not take.

    Parameters
    ----------
    options
        The options, by name.
    refused
        The options that members do not take, because the pool has its own, or because they are no plain data.
    members
        The pool's word for its members, for the error.
    """
    for option in refused:
        if option in options:
            raise InvalidRequest(
                field=option,
                value=options[option],
                problem=f"is no option of a pool's {members}",
                fix="leave it out",
            )
    return {key: os.fspath(each) if isinstance(each, os.PathLike) else each for key, each in options.items()}
