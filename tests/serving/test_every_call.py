"""Every method of tritonclient's clients, over HTTP and over gRPC: five models, and shared memory."""

from __future__ import annotations

import itertools
import os
import queue
import signal
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException, shared_memory

from ..patience import PATIENCE_S
from .five_models import DTYPES, KINDS, write_models
from .servers import running

_serial = itertools.count()


@pytest.fixture(scope="module")
def ports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, int]]:
    folder = tmp_path_factory.mktemp("repository")
    write_models(folder)
    with running("--repository", str(folder), "--http", "0", "--grpc", "0") as (process, ports):
        yield ports
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0


@pytest.fixture(scope="module", params=[tritonclient.http, tritonclient.grpc], ids=["http", "grpc"])
def face(request: pytest.FixtureRequest, ports: dict[str, int]) -> Iterator[tuple[ModuleType, Any]]:
    module = request.param
    with module.InferenceServerClient(f"127.0.0.1:{ports[module.__name__[-4:]]}") as client:
        assert client.is_server_live()  # it connects here, and stays connected for all tests
        yield module, client


def tensors(module: ModuleType, name: str, values: np.ndarray) -> list[Any]:
    given = module.InferInput("x", values.shape, KINDS[name])
    given.set_data_from_numpy(values)
    return [given]


def values_for(name: str) -> np.ndarray:
    return np.arange(6).reshape(2, 3).astype(DTYPES[KINDS[name]])


@pytest.mark.parametrize("name", KINDS)
def test_each_datatype_comes_back_as_it_was_sent(face: tuple[ModuleType, Any], name: str) -> None:
    module, client = face
    values = values_for(name)
    answer = client.infer(name, tensors(module, name, values)).as_numpy("y")
    assert answer.dtype == values.dtype
    np.testing.assert_array_equal(answer, values + values)


def true(answer: object) -> None:
    assert answer


def refused(call: Callable[[], object]) -> None:
    """Has the server say that it does not offer this."""
    with pytest.raises(InferenceServerException) as error:
        call()
    assert error.value.status() in ("501", "StatusCode.UNIMPLEMENTED")


def infer_in_shared_memory(module: ModuleType, client: Any) -> None:
    """Both of input and output; then registered regions are listed, and forgotten."""
    values, name = values_for("square"), f"cudnn_actor_{os.getpid()}_{next(_serial)}"
    region = shared_memory.create_shared_memory_region(name, name, 2 * values.nbytes)
    try:
        shared_memory.set_shared_memory_region(region, [values])
        client.register_system_shared_memory(name, name, 2 * values.nbytes)
        given = module.InferInput("x", values.shape, "FP32")
        given.set_shared_memory(name, values.nbytes)
        wanted = module.InferRequestedOutput("y")
        wanted.set_shared_memory(name, values.nbytes, offset=values.nbytes)
        client.infer("square", [given], outputs=[wanted])
        found = shared_memory.get_contents_as_numpy(region, np.float32, values.shape, offset=values.nbytes)
        np.testing.assert_array_equal(found, values + values)
        del found
        assert name in str(client.get_system_shared_memory_status())
        client.unregister_system_shared_memory(name)
        with pytest.raises(InferenceServerException, match="is not registered"):
            client.infer("square", [given])
    finally:
        shared_memory.destroy_shared_memory_region(region)


def load_and_unload(_: ModuleType, client: Any) -> None:
    client.unload_model("halves")
    assert not client.is_model_ready("halves")
    client.load_model("halves")
    assert client.is_model_ready("halves")
    with pytest.raises(InferenceServerException, match="is off"):
        client.load_model("halves", config="{}")
    with pytest.raises(InferenceServerException, match="is unknown"):
        client.load_model("none")
    index = str(client.get_model_repository_index())
    assert all(name in index for name in KINDS)


def infer_behind(module: ModuleType, client: Any) -> None:
    """`async_infer`, which answers over HTTP by a handle, and over gRPC by a callback."""
    given = tensors(module, "square", values_for("square"))
    if module is tritonclient.http:
        answer = client.async_infer("square", given).get_result()
    else:
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        client.async_infer("square", given, callback=lambda result, error: answers.put(error or result))
        answer = answers.get(timeout=PATIENCE_S)
    np.testing.assert_array_equal(answer.as_numpy("y"), 2 * values_for("square"))


def stream(module: ModuleType, client: Any) -> None:
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    client.start_stream(lambda result, error: answers.put(error or result))
    client.async_stream_infer("square", tensors(module, "square", values_for("square")))
    np.testing.assert_array_equal(answers.get(timeout=PATIENCE_S).as_numpy("y"), 2 * values_for("square"))
    client.stop_stream()


def bodies(module: ModuleType, client: Any) -> None:
    body, _ = module.InferenceServerClient.generate_request_body(
        tensors(module, "square", values_for("square"))
    )
    assert body
    head = b'{"outputs":[{"name":"y","datatype":"FP32","shape":[1],"data":[1]}]}'
    assert module.InferenceServerClient.parse_response_body(head).as_numpy("y") == [1]


Call = Callable[[ModuleType, Any], object]
CALLS: dict[str, Call] = {
    "is_server_live": lambda _, client: true(client.is_server_live()),
    "is_server_ready": lambda _, client: true(client.is_server_ready()),
    "is_model_ready": lambda _, client: true(client.is_model_ready("square", "1")),
    "get_server_metadata": lambda _, client: client.get_server_metadata(),
    "get_model_metadata": lambda _, client: client.get_model_metadata("square", "1"),
    "get_model_config": lambda _, client: client.get_model_config("square", "1"),
    "get_inference_statistics": lambda _, client: client.get_inference_statistics("square", "1"),
    "get_model_repository_index": load_and_unload,
    "load_model": load_and_unload,
    "unload_model": load_and_unload,
    "infer": infer_in_shared_memory,
    "register_system_shared_memory": infer_in_shared_memory,
    "get_system_shared_memory_status": infer_in_shared_memory,
    "unregister_system_shared_memory": lambda _, client: client.unregister_system_shared_memory(),
    "async_infer": infer_behind,
    "start_stream": stream,
    "async_stream_infer": stream,
    "stop_stream": stream,
    "generate_request_body": bodies,
    "parse_response_body": bodies,
    "get_trace_settings": lambda _, client: refused(client.get_trace_settings),
    "update_trace_settings": lambda _, client: refused(client.update_trace_settings),
    "get_log_settings": lambda _, client: refused(client.get_log_settings),
    "update_log_settings": lambda _, client: refused(lambda: client.update_log_settings({})),
    "get_cuda_shared_memory_status": lambda _, client: refused(client.get_cuda_shared_memory_status),
    "register_cuda_shared_memory": lambda _, client: refused(
        lambda: client.register_cuda_shared_memory("gpu", b"aGFuZGxl", 0, 1)
    ),
    "unregister_cuda_shared_memory": lambda _, client: refused(client.unregister_cuda_shared_memory),
}
LOCAL = {"close", "plugin", "register_plugin", "unregister_plugin"}
"""What asks the server nothing."""


def methods_of(module: ModuleType) -> set[str]:
    return {name for name in dir(module.InferenceServerClient) if not name.startswith("_")} - LOCAL


@pytest.mark.parametrize("name", CALLS)
def test_each_call_is_answered(face: tuple[ModuleType, Any], name: str) -> None:
    module, client = face
    if name in methods_of(module):
        CALLS[name](module, client)


def test_no_method_of_the_clients_is_forgotten() -> None:
    assert methods_of(tritonclient.http) | methods_of(tritonclient.grpc) == CALLS.keys()
