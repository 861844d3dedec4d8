"""Random numbers: refused, since each model's numbers are those of a generator that ONNX does not define."""

from __future__ import annotations

from cudnn_actor.onnx.table import REFUSED

__all__ = ["UNDEFINED"]

UNDEFINED = "its numbers are those of a generator that ONNX does not define"

for _name in (
    "Bernoulli",
    "Multinomial",
    "RandomNormal",
    "RandomNormalLike",
    "RandomUniform",
    "RandomUniformLike",
):
    REFUSED["", _name] = UNDEFINED
