"""Options for the accuracy and the determinism of a computation, and for the choice of its plans."""

from __future__ import annotations

from typing import ClassVar

from cudnn_actor.protocol.errors import InvalidRequest
from cudnn_actor.protocol.types.records import Parameters

__all__ = ["Numerics"]


class Numerics(Parameters):
    """Accuracy and determinism of an operation graph's computation, and which of the library's plans run it.

    Parameters
    ----------
    tf32
        Allow float32 operands to be rounded to TF32 (10 bits of mantissa) for speed.
    deterministic
        Use only algorithms that give the same bits every time.
    prefer
        Names of plans of cuDNN's that are tried before all others, in this order: "eng45_k2=5". A part of a
        name stands for all plans that have it: "eng45" for those of an engine. Where none of them can run a
        piece of the graph, others do.
    exclude
        Names of plans of cuDNN's that are not used, as in `prefer`. What has no other plan is an
        `UnsupportedGraph`. `CudnnRef.plans` lists names. The CPU engine ignores both.

    Raises
    ------
    InvalidRequest
        `tf32` or `deterministic` is not a bool, or `prefer` or `exclude` no tuple of texts.
    """

    example: ClassVar[str] = "Numerics(tf32=True)"
    tf32: bool = False
    deterministic: bool = False
    prefer: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("tf32", "deterministic"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise InvalidRequest(
                    field=name, value=value, problem="is not a bool", fix="pass True or False"
                )
        for name in ("prefer", "exclude"):
            value = getattr(self, name)
            if not isinstance(value, tuple) or not all(isinstance(one, str) and one for one in value):
                raise InvalidRequest(
                    field=name,
                    value=value,
                    problem="is not a tuple of names of plans",
                    fix='pass names that `await gpu.plans(graph)` lists, as in ("eng45_k2=5",)',
                )

    def preference(self, plan: str) -> int:
        """The place of a plan of that name in the order of `prefer`; behind the last if it is not named."""
        return next((n for n, name in enumerate(self.prefer) if _stands_for(name, plan)), len(self.prefer))

    def excludes(self, plan: str) -> bool:
        """Whether a plan of that name must not be used."""
        return any(_stands_for(name, plan) for name in self.exclude)


def _stands_for(name: str, plan: str) -> bool:
    """Whether all parts of a name, an engine and its knobs, are those of a plan."""
    return set(name.split("_")) <= set(plan.split("_"))
