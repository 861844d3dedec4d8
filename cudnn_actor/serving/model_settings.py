"""The settings of a model, by which it is loaded and batched: a file `model.toml` beside the model's file.

`read_settings` reads it. `served.load` makes arguments of `CudnnRef.load` and `CudnnRef.batched` of it.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Literal

import msgspec

from cudnn_actor.serving.failures import Refused

__all__ = ["Batching", "Settings", "read_settings"]

_MOST_BYTES = 64 << 10


class Batching(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    rename={"max_delay_us": "delay_us"},  # the key in `model.toml`
):
    """How requests are put together: arguments of `CudnnRef.batched`. `models.forming` has the rules.

    Parameters
    ----------
    max
        The most samples in a batch; None for the largest of `sizes`, or 32 if that is None, too.
    sizes
        How many samples batches have; None for powers of two up to `max`.
    max_delay_us
        Microseconds that a request waits for other requests at most, unless `in_flight` batches run.
    """

    max: int | None = None
    sizes: tuple[int, ...] | None = None
    max_delay_us: float = 2000.0


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of a model.

    Parameters
    ----------
    dtype
        The dtype in which the model computes; None for the dtypes of its file.
    tune
        As in `CudnnRef.load`.
    batch
        How requests are put into batches; None to run each by itself.
    dims
        The sizes of named dims for which the model is warmed. The sizes of the dim along which batches are
        formed are in `batch`.
    """

    dtype: Literal["bfloat16", "float16", "float32"] | None = None
    tune: bool | Literal["cached"] = False
    batch: Batching | None = None
    dims: dict[str, int | tuple[int, ...]] = {}


def read_settings(path: Path, default: Settings) -> Settings:
    """Read a `model.toml`; `default` if there is no such file.

    Raises `Refused` for a file that is not valid. For an unknown key, the error names the key, its table, and
    the page that lists the keys.
    """
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
    except FileNotFoundError:
        return default
    except OSError as error:
        raise Refused(problem=f"{path} cannot be read: {error.strerror}", fix="make it readable") from error
    if len(content) > _MOST_BYTES:
        raise Refused(problem=f"{path} has more than {_MOST_BYTES:,} bytes", fix="shorten it")
    try:
        return msgspec.convert(tomllib.loads(content.decode()), Settings)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError, RecursionError) as error:
        raise Refused(
            problem=f"{path} is not valid: {error}", fix="see `cudnn-actor docs serving` for its keys"
        ) from error
