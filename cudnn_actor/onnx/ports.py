"""The inputs of a model's graph: the model's own, its weights, and the state of random numbers."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from cudnn_actor.models.source import Feature, Origin, Weight
from cudnn_actor.onnx import operators
from cudnn_actor.onnx.reading import ModelFile
from cudnn_actor.onnx.values import Declined, Empty, Refused, Undecided, Value
from cudnn_actor.protocol.graphs.graph_builder import GraphBuilder, Tensor
from cudnn_actor.protocol.messages.model_messages import Draws
from cudnn_actor.protocol.messages.run_loop import SCRATCH
from cudnn_actor.protocol.types.dtypes import DType
from cudnn_actor.protocol.types.tensor import Layout, TensorSpec

__all__ = ["LITTLE", "Initialisers", "PortNames", "Ports", "key_of"]

LITTLE = 1 << 16
"""A constant of at most this many bytes has its digest as its key, so equal constants share a buffer."""


class PortNames:
    """Makes names of ports, each only once in a graph, or in all graphs of a model that is cut at its
    loops."""

    def __init__(self) -> None:
        self._names = {SCRATCH}
        """The names that are taken. No body of a loop may have a port of such a name."""
        self._numbered: Counter[str] = Counter()
        """Names → the last number of a port of that name."""

    def new(self, name: str) -> str:
        """A name that no port has yet."""
        port = name
        while port in self._names:
            self._numbered[name] += 1  # all numbers below are taken: thousands may have one name
            port = f"{name}_{self._numbered[name]}"
        self._names.add(port)
        return port


class Ports:
    """Makes the inputs of one graph, each when it is first needed, under a name of its own.

    Parameters
    ----------
    g
        The builder of the graph.
    file
        The model.
    specs
        The specs of the model's inputs, by name.
    values
        The values of the inputs that decide over shapes.
    names
        The object that makes the names of ports.
    """

    def __init__(
        self,
        g: GraphBuilder,
        file: ModelFile,
        specs: Mapping[str, TensorSpec],
        values: Mapping[str, np.ndarray],
        names: PortNames,
    ) -> None:
        self._g, self._file, self._specs, self._values = g, file, specs, values
        self._inputs: dict[str, str] = {}
        """The model's inputs that are read → their ports."""
        self.name = names.new
        self.looked_at: set[str] = set()
        """The initialisers that may be overwritten and whose values are part of the graph."""
        self._packed: dict[int, Value] = {}
        """The model's inputs, by the ids of their values."""
        self._origins: dict[str, Origin] = {}
        self._weights: dict[str, tuple[str, Weight]] = {}
        self._of_weight: dict[str, Tensor] = {}
        self._random = ""
        self._state: Tensor | None = None
        """The port and the tensor of the state of random numbers, once a node draws some."""
        self._drawn = 0
        """How many random numbers a run draws."""

    def inputs(self, read: Collection[str]) -> dict[str, str]:
        """The inputs of the model that the graph reads → ports. `read`: the ports that it reads."""
        return {name: port for name, port in self._inputs.items() if port in read}

    def weights(self, read: Collection[str]) -> Mapping[str, tuple[str, Weight]]:
        """The ports of the weights that the graph reads → their keys and values."""
        return {port: weight for port, weight in self._weights.items() if port in read}

    def origins(self, read: Collection[str]) -> Mapping[str, Origin]:
        """The keys of those weights that are computed from initialisers that may be overwritten."""
        keys = [key for key, _ in self.weights(read).values()]
        return {key: self._origins[key] for key in keys if key in self._origins}

    def random(self, read: Collection[str]) -> Draws | None:
        """The random numbers that a run of the graph draws; None if it draws none."""
        if self._random not in read:
            return None
        return Draws(port=self._random, seed=self._file.random or 0, count=self._drawn)

    def input(self, feature: Feature) -> Value:
        """An input of the model. As a tensor, it is an input of the graph."""
        name, spec = feature.name, self._specs[feature.name]
        array: Any = self._values.get(name)
        if spec.size == 0:
            return self.constant(np.empty(spec.dims, spec.dtype.numpy), fixed=True)

        def tensor() -> Tensor:
            self._inputs[name] = self.name(name)
            return self._g.input(self._inputs[name], spec.dims, spec.dtype, layout=spec.layout)

        elements = Undecided(frozenset({name})) if array is None else array
        value = Value(spec.dims, spec.dtype.numpy, tensor, elements)
        if spec.layout is Layout.NCHW:
            self._packed[id(value)] = value
        return value

    def is_packed_input(self, value: Value) -> bool:
        """Whether a value is an input of the model, as it is given, with its last dim contiguous."""
        return id(value) in self._packed

    def initialiser(self, name: str) -> Value:
        """An initialiser of the model."""
        # Keys are put together. In quotes, no name looks like the key of something else.
        key, origin = f"initialiser {name!r}", None
        if self._file.swappable:
            origin = Origin(key=key, names=frozenset({name}), compute=lambda tensors, _: tensors[name])
        return self.constant(self._file.tensors[name], fixed=True, key=key, name=name, origin=origin)

    def constant(
        self,
        array: np.ndarray,
        *,
        fixed: bool,
        key: str = "",
        name: str = "",
        origin: Origin | None = None,
    ) -> Value:
        """A value whose elements are known. As a tensor, it is a weight."""
        if origin is not None:
            key = origin.key

        def weight(layout: Layout = Layout.NCHW, dtype: DType | None = None) -> Tensor:
            return self.weight(array, key, name, layout, dtype, origin=origin)

        value = Value(array.shape, array.dtype, weight, array, fixed=fixed, weight=weight)
        value.origin, value.looked_at = origin, self.looked_at
        value.key = key
        return value

    def convert(self, value: Value, dtype: np.dtype[Any], name: str) -> Value:
        """Convert a constant to another dtype. Its elements are converted when they are needed, to upload
        them."""
        origin = value.origin
        key = f"{value.key} as {dtype}" if value.key and value.size * dtype.itemsize > LITTLE else ""
        if origin is not None:
            wide = origin
            key = f"{wide.key} as {dtype}"
            origin = Origin(
                key=key,
                names=wide.names,
                compute=lambda *given: wide.derive(*given).astype(dtype),
                parts=(wide,),
            )

        def weight(layout: Layout = Layout.NCHW, stored: DType | None = None) -> Tensor:
            return self.weight(made, key, name, layout, stored, origin=origin)

        made = Value(
            value.dims, dtype, weight, lambda: value.elements.astype(dtype), fixed=True, weight=weight
        )
        made.origin, made.looked_at, made.key = origin, self.looked_at, key
        return made

    def weight(
        self,
        given: np.ndarray | Value,
        key: str = "",
        name: str = "",
        layout: Layout = Layout.NCHW,
        stored: DType | None = None,
        *,
        origin: Origin | None = None,
    ) -> Tensor:
        """A constant as an input of the graph. Equal values in the same layout and dtype have one input.

        `key` is equal for equal values; by default, it is their digest. `name`: the port's name. `stored`:
        the dtype to which floats are converted when they are uploaded. `origin`: the constant's origin.

        Raises `Declined` for a dtype that no tensor has, and `Empty`.
        """
        dtype = DType.of(given.dtype)
        if dtype is None:
            raise Declined(f"has a constant of {'text' if given.dtype.hasobject else given.dtype}")
        if given.size == 0:
            raise Empty
        dims = given.dims if isinstance(given, Value) else given.shape
        if not key:
            key = key_of(given.elements if isinstance(given, Value) else given, dtype)
        if stored not in (None, dtype):
            dtype, key = stored, f"{key}, {stored}"
        key = key if layout is Layout.NCHW else f"{key}, {layout}"
        if key not in self._of_weight:
            port = self.name(name or f"constant {len(self._weights)}")
            self._of_weight[key] = self._g.input(port, dims, dtype, layout=layout)
            self._weights[port] = key, (lambda: given.elements) if isinstance(given, Value) else given
            if origin is not None:
                self._origins[key] = origin
        return self._of_weight[key]

    def random_state(self, seed: float | None, count: int) -> Tensor:
        """A state of random numbers for a node that draws `count` of them, from its own seed or the model's.

        The seed and the number of the first element are an input of the graph, which each run sets to new
        values.
        """
        if seed is None and self._file.random is None:
            raise Refused(operators.UNSEEDED)
        if self._state is None:
            self._random = self.name("random state")
            self._state = self._g.input(self._random, (2,), DType.INT64)
        state = self._state
        if seed is not None:
            of_node = np.array([int(np.float32(seed).view(np.int32)), 0])
            state = self._g.add(self._g.multiply(state, self.weight(np.array([0, 1]))), self.weight(of_node))
        first, self._drawn = self._drawn, self._drawn + count
        return self._g.advance(state, first) if first else state


class Initialisers(dict[str, Any]):
    """The values of the names of the file's initialisers. Each is made when it is first looked up, because a
    model that is cut has hundreds of imports, each of which reads few."""

    def __init__(self, ports: Ports, file: ModelFile) -> None:
        super().__init__()
        self._ports, self._file = ports, file

    def __contains__(self, name: object) -> bool:
        return name in self._file.tensors

    def __missing__(self, name: str) -> Value:
        if name not in self:
            raise KeyError(name)
        self[name] = made = self._ports.initialiser(name)
        return made


def key_of(array: np.ndarray, dtype: DType) -> str:
    """A key that is equal for equal values of that dtype."""
    data = np.ascontiguousarray(array)
    digest = hashlib.blake2b(data.reshape(-1).view(np.uint8).data, digest_size=16)
    return f"{dtype} {array.shape} {digest.hexdigest()}"
