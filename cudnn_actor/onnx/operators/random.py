"""Random numbers: refused, since each model's numbers are those of a generator that ONNX does not define."""

from __future__ import annotations

from cudnn_actor.onnx.nodes import Node, Result
from cudnn_actor.onnx.table import operator
from cudnn_actor.onnx.values import Refused
from cudnn_actor.protocol.graph_builder import GraphBuilder

__all__ = ["UNDEFINED"]

UNDEFINED = "its numbers are those of a generator that ONNX does not define"


@operator("Bernoulli", "Multinomial")
@operator("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike")
def random(node: Node, g: GraphBuilder) -> Result:
    del node, g
    raise Refused(UNDEFINED)
