"""The attributes of a node: resolved in the function around it, and the defaults of its operator."""

from __future__ import annotations

from collections.abc import Mapping

import onnx

from cudnn_actor.onnx.schemas import Schema

__all__ = ["defaults", "resolved_attributes", "with_attributes"]


def defaults(schema: Schema) -> dict[str, onnx.AttributeProto]:
    """The default attributes of an operator."""
    declared = {name: each.default_value for name, each in schema.attributes.items()}
    return {name: each for name, each in declared.items() if each.type != onnx.AttributeProto.UNDEFINED}


def with_attributes(node: onnx.NodeProto, attributes: Mapping[str, onnx.AttributeProto]) -> onnx.NodeProto:
    """A node with these attributes in place of its references to attributes of the function around it."""
    if not any(each.ref_attr_name for each in node.attribute):
        return node
    proto = onnx.NodeProto()
    proto.CopyFrom(node)
    del proto.attribute[:]
    proto.attribute.extend(attributes.values())
    return proto


def resolved_attributes(
    node: onnx.NodeProto, around: Mapping[str, onnx.AttributeProto]
) -> dict[str, onnx.AttributeProto]:
    """A node's attributes. References to attributes of the function around it are replaced by these
    attributes."""
    found: dict[str, onnx.AttributeProto] = {}
    for each in node.attribute:
        if not each.ref_attr_name:
            found[each.name] = each
        elif each.ref_attr_name in around:
            copy = onnx.AttributeProto()
            copy.CopyFrom(around[each.ref_attr_name])
            copy.name = each.name
            found[each.name] = copy
    return found
