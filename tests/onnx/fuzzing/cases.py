"""One drawn model: a node of an operator and version, what it is given, and what is asked of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper, shape_inference

from .draw import Draw, dtype_of
from .hints import HINTS, Parts, by_schema
from .parameters import attributes
from .versions import Version

__all__ = ["Case", "drawn"]

_IR = 10


@dataclass(frozen=True)
class Case:
    """A model of one node, with those that make or take apart its lists.

    `name` is as "Conv-11/1/17": the version, the seed, and the number of the case.
    """

    name: str
    version: Version
    opset: int
    node: onnx.NodeProto
    before: Sequence[onnx.NodeProto]
    after: Sequence[onnx.NodeProto]
    inputs: Mapping[str, np.ndarray]
    """Arrays by name, those of initialisers included."""
    static: frozenset[str]
    """Which of them are initialisers."""
    symbolic: bool
    """Whether the dims of inputs have names instead of numbers."""
    outputs: Sequence[str]
    flavour: str
    attributes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def given(self) -> dict[str, np.ndarray]:
        """The inputs that a run is given."""
        return {name: array for name, array in self.inputs.items() if name not in self.static}

    @cached_property
    def model(self) -> onnx.ModelProto:
        """The model."""
        declared = [
            helper.make_tensor_value_info(
                name,
                helper.np_dtype_to_tensor_dtype(array.dtype),
                [f"{name}_{n}" for n in range(array.ndim)] if self.symbolic else array.shape,
            )
            for name, array in self.given.items()
        ]
        kept = [numpy_helper.from_array(self.inputs[name], name) for name in sorted(self.static)]
        nodes = [*self.before, self.node, *self.after]
        graph = helper.make_graph(nodes, "fuzzed", declared, [], initializer=kept)
        made = helper.make_model(graph, opset_imports=self._imports(), ir_version=_IR)
        types = self._types(made)
        made.graph.output.extend(
            helper.make_tensor_value_info(name, types[name], None) for name in self.outputs
        )
        return made

    def _types(self, made: onnx.ModelProto) -> dict[str, int]:
        """The element types of outputs: as ONNX infers them, else those of inputs of the same type."""
        found: dict[str, int] = dict.fromkeys(self.outputs, int(TensorProto.FLOAT))
        known = {
            declared.type_str: helper.np_dtype_to_tensor_dtype(array.dtype)
            for number, declared in enumerate(self.version.schema.inputs)
            if (array := self.array(number)) is not None
        }
        for declared, name in zip(self.version.schema.outputs, self.node.output, strict=False):
            one = dtype_of(min(declared.types, default="")) if len(declared.types) == 1 else None
            if name in found and (declared.type_str in known or one is not None):
                own = known.get(declared.type_str)
                found[name] = helper.np_dtype_to_tensor_dtype(one) if own is None else own
        with suppress(Exception):  # what cannot be inferred is refused by all
            inferred = shape_inference.infer_shapes(made).graph.value_info
            for each in inferred:
                if each.name in found and each.type.tensor_type.elem_type:
                    found[each.name] = each.type.tensor_type.elem_type
        return found

    def _imports(self) -> list[onnx.OperatorSetIdProto]:
        own = helper.make_opsetid(self.version.domain, self.opset)
        return [own] if not self.version.domain else [own, helper.make_opsetid("", 21)]

    @property
    def dtypes(self) -> list[Any]:
        """The dtypes of all inputs."""
        return [array.dtype for array in self.inputs.values()]

    @cached_property
    def output_dtypes(self) -> list[Any]:
        """The dtypes of the outputs, by the operator's schema."""
        made = self.model.graph.output
        return [helper.tensor_dtype_to_np_dtype(each.type.tensor_type.elem_type) for each in made]

    def in_float32(self) -> Case:
        """The same case with float32 in the place of other floating-point types."""
        wide = {
            name: array.astype(np.float32)
            if array.dtype.name in ("bfloat16", "float16", "float64")
            else array
            for name, array in self.inputs.items()
        }
        return replace(self, inputs=wide)

    def array(self, number: int) -> np.ndarray | None:
        """An input of the node; None if it was left out, or is no tensor."""
        name = self.node.input[number] if number < len(self.node.input) else ""
        return self.inputs.get(name)

    def value(self, attribute: str) -> Any:
        """An attribute's value, else its default, else None."""
        if attribute in self.attributes:
            return self.attributes[attribute]
        declared = self.version.schema.attributes.get(attribute)
        default = None if declared is None else declared.default_value
        if default is None or default.type == onnx.AttributeProto.UNDEFINED:
            return None
        value = helper.get_attribute_value(default)
        return value.decode() if isinstance(value, bytes) else value

    def __str__(self) -> str:
        """As people read it."""
        shown = [
            f"{name}{'=' if name in self.static else ':'}{array.dtype}{list(array.shape)}"
            + (f"={array.reshape(-1).tolist()}" if array.size <= 6 else "")
            for name, array in self.inputs.items()
        ]
        others = {
            name: value for name, value in self.attributes.items() if not isinstance(value, onnx.GraphProto)
        }
        told = [self.name, f"opset {self.opset}", self.flavour, *shown, str(others), "->", *self.outputs]
        return " ".join(told)


def drawn(version: Version, seed: int, number: int) -> Case:
    """The case of that number."""
    name = f"{version.name}/{seed}/{number}"
    d = Draw(name)
    parts = HINTS.get(version.operator, by_schema)(d, version)
    before: list[onnx.NodeProto] = []
    inputs: dict[str, np.ndarray] = {}
    names = [_named(d, value, f"i{n}", before, inputs) for n, value in enumerate(_trimmed(d, version, parts))]
    given = attributes(d, version, next(iter(inputs.values()), None), parts.attributes)
    results, after, outputs = _outputs(d, version, parts)
    node = helper.make_node(version.operator, names, results, domain=version.domain)
    node.attribute.extend(_attribute(version, each, value) for each, value in given.items())
    none_static, all_static = d.random() < 0.45, d.seldom(0.08)
    static = {
        each
        for each in inputs
        if all_static or each in parts.static or (not none_static and d.random() < 0.5)
    }
    return Case(
        name=name,
        version=version,
        opset=d.choice(version.opsets),
        node=node,
        before=before,
        after=after,
        inputs=inputs,
        static=frozenset(static),
        symbolic=d.random() < 0.4,
        outputs=outputs,
        flavour=d.flavour,
        attributes=given,
    )


def _attribute(v: Version, name: str, value: Any) -> onnx.AttributeProto:
    """An attribute of the type that the schema says."""
    kind = int(v.schema.attributes[name].type)
    number = kind == onnx.AttributeProto.FLOAT and isinstance(value, int)
    return helper.make_attribute(name, float(value) if number else value, attr_type=kind)


def _trimmed(d: Draw, v: Version, parts: Parts) -> list[Any]:
    """The inputs, some optional ones left out."""
    found = list(parts.inputs)
    for number, declared in enumerate(v.schema.inputs[: len(found)]):
        optional = declared.option.name == "Optional"
        if optional and number not in parts.needed and d.random() < 0.35:
            found[number] = None
    while found and found[-1] is None:
        found.pop()
    return found


def _named(
    d: Draw, value: Any, name: str, before: list[onnx.NodeProto], inputs: dict[str, np.ndarray]
) -> str:
    if value is None:
        return ""
    if not isinstance(value, list):
        inputs[name] = np.asarray(value)
        return name
    for number, array in enumerate(value):
        inputs[f"{name}_{number}"] = np.asarray(array)
    of = [f"{name}_{number}" for number in range(len(value))]
    before.append(helper.make_node("SequenceConstruct" if of else "SequenceEmpty", of, [name]))
    return name


def _outputs(d: Draw, v: Version, parts: Parts) -> tuple[list[str], list[onnx.NodeProto], list[str]]:
    """The node's outputs, the nodes that take lists apart, and the outputs of the model."""
    found, after, outputs = list[str](), list[onnx.NodeProto](), list[str]()
    count = parts.outputs or _count(d, v)
    for number in range(count):
        declared = v.schema.outputs[min(number, len(v.schema.outputs) - 1)]
        optional = declared.option.name == "Optional"
        name = "" if optional and number < count - 1 and d.random() < 0.3 else f"o{number}"
        found.append(name)
        if not name:
            continue
        if not all(each.startswith("seq(") for each in declared.types):
            outputs.append(name)
            continue
        after.append(helper.make_node("SequenceLength", [name], [f"{name}_length"]))
        outputs.append(f"{name}_length")
        for place in (0, -1):
            value = numpy_helper.from_array(np.array(place))
            after.append(helper.make_node("Constant", [], [f"{name}_at{place}"], value=value))
            after.append(helper.make_node("SequenceAt", [name, f"{name}_at{place}"], [f"{name}_of{place}"]))
            outputs.append(f"{name}_of{place}")
    return found, after, outputs


def _count(d: Draw, v: Version) -> int:
    least = sum(each.option.name == "Single" for each in v.schema.outputs)
    return d.randint(max(1, least), max(1, len(v.schema.outputs)))
