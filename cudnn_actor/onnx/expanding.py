"""Operators that ONNX defines by a function of other operators."""

from __future__ import annotations

from collections.abc import Sequence

import onnx

from cudnn_actor.onnx.schemas import NOT_INFERRED, Schema
from cudnn_actor.onnx.values import Declined, Value

__all__ = ["body_of", "has_body"]


def has_body(schema: Schema) -> bool:
    """Whether ONNX defines the operator by a function."""
    return bool(schema.has_function or schema.has_context_dependent_function)


def body_of(
    node: onnx.NodeProto, schema: Schema, inputs: Sequence[Value | None], version: int
) -> onnx.FunctionProto | None:
    """The function that defines a node, for a version of the standard operators; None if there is none.

    `inputs`: the function may depend on their types. Raises `Declined` if it cannot be made for them.
    """
    function = onnx.FunctionProto()
    if schema.has_context_dependent_function:
        versions = schema.context_dependent_function_opset_versions
        types = [b"" if each is None else each.type.SerializeToString() for each in inputs]
        for chosen in _order(versions, version):
            try:
                text = schema.get_context_dependent_function_with_opset_version(
                    chosen, node.SerializeToString(), types
                )
            except (*NOT_INFERRED, RuntimeError, ValueError) as error:
                raise Declined(f"does not fit its operator: {str(error)[:200]}") from error
            if text:
                function.ParseFromString(text)
                return function
    if schema.has_function:
        for chosen in _order(schema.function_opset_versions, version):
            text = schema.get_function_with_opset_version(chosen)
            if text:
                function.ParseFromString(text)
                return function
    return None


def _order(versions: Sequence[int], version: int) -> list[int]:
    """The versions that are not newer than the model's, the newest first."""
    return sorted((each for each in versions if each <= version), reverse=True)
