"""ONNX's Backend interface, so that its tools and its test suite run models here.

    from cudnn_actor.onnx import backend
    model = backend.prepare(onnx.load("model.onnx"), device="CUDA")
    (y,) = model.run([x])

One service for each device is shared by all models and threads. It ends with the process, or with `close`.
A forked child starts services of its own, for models that it prepares itself.
https://onnx.ai/onnx/repo-docs/ImplementingAnOnnxBackend.html
"""

from __future__ import annotations

import atexit
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import defs, helper, shape_inference
from onnx.backend.base import Backend, BackendRep, Device, DeviceType, namedtupledict

from cudnn_actor.actors import forks
from cudnn_actor.blocking import BlockingModel, BlockingRef, spawn
from cudnn_actor.models import InvalidModel, UnsupportedModel
from cudnn_actor.onnx.onnx_model import OnnxModel
from cudnn_actor.onnx.operator_table import NO_WAY
from cudnn_actor.onnx.reading import label_of
from cudnn_actor.onnx.schemas import domain_of, schema_of
from cudnn_actor.onnx.tensors import first_line
from cudnn_actor.protocol.errors import CudnnActorError, InvalidRequest, Words

__all__ = [
    "CudnnActorBackend",
    "Prepared",
    "close",
    "is_compatible",
    "prepare",
    "run_model",
    "run_node",
    "supports_device",
]


class _Services:
    """The shared services of this process, by device."""

    def __init__(self) -> None:
        self._shared: dict[str, BlockingRef] = {}
        self._lock = threading.Lock()

    def forget_parent(self) -> None:
        """Forget the parent's services in a forked child. Later calls start services of its own."""
        self._shared.clear()
        self._lock = threading.Lock()

    def of(self, device: str) -> BlockingRef:
        """The service of a device. It is started if none is alive."""
        with self._lock:
            if device in self._shared and not self._shared[device].alive:
                self._shared.pop(device).close()
            if device not in self._shared:
                self._shared[device] = spawn(device=device, name=f"onnx on {device}")
            return self._shared[device]

    def close(self) -> None:
        """End all of them."""
        with self._lock:
            ending = list(self._shared.values())
            self._shared.clear()
        for each in ending:
            each.close()


_services = forks.watch(_Services())
atexit.register(_services.close)


def _device(device: str) -> str:
    """A device by ONNX's name, "CPU" or "CUDA:1", as services name it."""
    try:
        asked = Device(device)
    except (AttributeError, ValueError) as error:
        raise InvalidRequest(
            field="device", value=device, problem="is not a device of ONNX's", fix='use "CPU" or "CUDA:0"'
        ) from error
    return "cpu" if asked.type == DeviceType.CPU else f"cuda:{asked.device_id}"


def close() -> None:
    """End the shared services. Models that were prepared cannot run any more."""
    _services.close()


class Prepared(BackendRep):
    """A model that is loaded. Its weights are freed by `close`, when it is collected, or with the service."""

    def __init__(self, model: BlockingModel) -> None:
        self.model = model
        forks.finalize(self, model.close).atexit = False

    def run(self, inputs: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Run the model on inputs in order, by name, or on one array. Returns the outputs, in order.
        Blocks."""
        del kwargs
        names = [each.name for each in self.model.inputs]
        if isinstance(inputs, dict):
            given = dict(inputs)
        else:
            listed: Sequence[Any] = inputs if isinstance(inputs, list | tuple) else [inputs]
            if len(listed) != len(names):
                raise _wrong_count(listed, names)
            given = dict(zip(names, listed, strict=True))
        results = self.model.run({name: _array(value) for name, value in given.items()})
        outputs = tuple(each.name for each in self.model.outputs)
        return _outputs_class(outputs)(*(results[name] for name in outputs))

    def close(self) -> None:
        """Free the weights, unless the service has ended and they with it. Idempotent."""
        self.model.close()


@functools.lru_cache(maxsize=256)
def _outputs_class(names: tuple[str, ...]) -> Callable[..., tuple[Any, ...]]:
    """ONNX's class for outputs of these names. To make one takes longer than a small run."""
    return namedtupledict("Outputs", names)


def _array(value: Any) -> Any:
    if isinstance(value, list) or (isinstance(value, np.ndarray) and value.dtype == object) or value is None:
        raise InvalidRequest(
            field="inputs",
            value=Words(type(value).__name__),
            problem="is no tensor of numbers",
            fix="models with sequences, optional values or strings cannot be run",
        )
    return value


def _wrong_count(listed: Sequence[Any], names: Sequence[str], hint: str = "") -> InvalidRequest:
    return InvalidRequest(
        field="inputs",
        value=len(listed),
        problem=f"is not the number of inputs, which is {len(names)}",
        fix=f"give {', '.join(names)}{hint}",
    )


def _by_name(node: onnx.NodeProto, inputs: Any) -> dict[str, np.ndarray]:
    """The arrays that a node is given."""
    names = list(node.input)
    listed = [inputs.get(name) for name in names] if isinstance(inputs, dict) else list(inputs)
    if len(listed) != len(names):
        names = [name for name in names if name]
    if len(listed) != len(names):
        raise _wrong_count(listed, names, "; None for one that is left out")
    given: dict[str, np.ndarray] = {}
    for name, array in zip(names, listed, strict=True):
        if name and array is not None:
            given.setdefault(name, np.asarray(_array(array)))
    return given


class CudnnActorBackend(Backend):
    """The interface's class; the functions of this module are its methods."""

    @classmethod
    def is_compatible(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> bool:
        """Whether each of the model's operators is known."""
        del kwargs
        try:
            OnnxModel(model)
        except (UnsupportedModel, InvalidModel):
            return False
        return cls.supports_device(device)

    @classmethod
    def prepare(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> Prepared:
        """Load a model. `random` is its seed, as for `CudnnRef.load`. Raises as `CudnnRef.load`.

        `limits`: the `ModelLimits` of the import.
        """
        source = OnnxModel(model, kwargs.get("limits"), random=kwargs.get("random"))
        return Prepared(_services.of(_device(device)).load(source))

    @classmethod
    def run_model(
        cls, model: onnx.ModelProto, inputs: Any, device: str = "CPU", **kwargs: Any
    ) -> tuple[Any, ...]:
        """Load a model, run it once, and free its weights."""
        prepared = cls.prepare(model, device, **kwargs)
        try:
            return prepared.run(inputs)
        finally:
            prepared.close()

    @classmethod
    def run_node(
        cls,
        node: onnx.NodeProto,
        inputs: Any,
        device: str = "CPU",
        outputs_info: Any = None,
        **kwargs: Any,
    ) -> tuple[Any, ...]:
        """Run one node.

        `inputs`: by name, or in order. An input that is left out is None, or missing if the node has no name
        for it. If a name occurs several times, its first array counts. `opset_version` (a keyword) is the
        version of the node's domain; by default, the newest. Raises as `run_model`; `InvalidModel` also for
        inputs that the operator does not take.
        """
        del outputs_info
        given = _by_name(node, inputs)
        domain = domain_of(node)
        version = kwargs.get("opset_version", defs.onnx_opset_version() if not domain else 1)
        schema = schema_of(node.op_type, version, domain)
        if schema is None:
            raise UnsupportedModel(nodes=[f"{label_of(node)}: {NO_WAY}"])
        made = onnx.NodeProto()
        made.CopyFrom(node)
        made.input[:] = [name if name in given else "" for name in node.input]
        imports = [helper.make_opsetid(domain, version)]
        try:
            types = [
                helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
                for name, array in given.items()
            ]
            known = {each.name: each.type for each in types}
            inferred = shape_inference.infer_node_outputs(schema, made, known, opset_imports=imports)
        except Exception as error:
            raise InvalidModel(where=label_of(node), problem=first_line(error)) from error
        names = [name for name in node.output if name]
        outputs = [helper.make_value_info(name, inferred.get(name, onnx.TypeProto())) for name in names]
        graph = helper.make_graph([made], "node", types, outputs)
        model = helper.make_model(graph, opset_imports=imports)
        return cls.run_model(model, list(given.values()), device)

    @classmethod
    def supports_device(cls, device: str) -> bool:
        """Whether a service can run on a device: "CPU", or "CUDA:N" where there is a working GPU."""
        try:
            return bool(_services.of(_device(device)).alive)
        except CudnnActorError:
            return False


is_compatible = CudnnActorBackend.is_compatible
prepare = CudnnActorBackend.prepare
run_model = CudnnActorBackend.run_model
run_node = CudnnActorBackend.run_node
supports_device = CudnnActorBackend.supports_device
