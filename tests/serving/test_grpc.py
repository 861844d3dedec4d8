"""The server over gRPC, as `tritonclient` uses it."""

from __future__ import annotations

import queue
import signal
from collections.abc import Iterator

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.grpc import model_config_pb2, service_pb2
from tritonclient.utils import InferenceServerException

from cudnn_actor.serving.grpc_schema import _POOL

from ..patience import PATIENCE_S
from .servers import running, write_square

ROWS = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[triton.InferenceServerClient]:
    path = write_square(tmp_path_factory.mktemp("models"))
    with running(str(path), "--http", "0", "--grpc", "0", "--batch", "4") as (process, ports):
        with triton.InferenceServerClient(f"127.0.0.1:{ports['grpc']}") as client:
            assert client.is_server_live()  # it connects here, and stays connected for all tests
            yield client
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0


def squares(values: np.ndarray = ROWS) -> list[triton.InferInput]:
    given = triton.InferInput("x", values.shape, "FP32")
    given.set_data_from_numpy(values)
    return [given]


def test_an_inference_is_answered(client: triton.InferenceServerClient) -> None:
    answer = client.infer("square", squares(), request_id="one")
    np.testing.assert_array_equal(answer.as_numpy("y"), ROWS**2)
    assert answer.get_response().id == "one"


def test_a_stream_is_answered_in_its_order_and_goes_on_after_an_error(
    client: triton.InferenceServerClient,
) -> None:
    answers: queue.SimpleQueue[tuple[triton.InferResult | None, Exception | None]] = queue.SimpleQueue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    names = ["square", "square", "round", "square"]
    for number, name in enumerate(names):
        client.async_stream_infer(name, squares(ROWS + number), request_id=str(number))
    for number, name in enumerate(names):
        result, error = answers.get(timeout=PATIENCE_S)
        if name == "round":
            assert "is unknown" in str(error)
        else:
            assert result is not None
            assert result.get_response().id == str(number)
            np.testing.assert_array_equal(result.as_numpy("y"), (ROWS + number) ** 2)
    client.stop_stream()


def test_it_says_what_it_serves(client: triton.InferenceServerClient) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("square")
    assert not client.is_model_ready("round")
    assert client.get_server_metadata().name == "cudnn-actor"
    assert client.get_model_metadata("square", as_json=True)["inputs"][0]["shape"] == ["-1", "3"]
    config = client.get_model_config("square").config
    assert (config.max_batch_size, list(config.input[0].dims)) == (4, [3])
    assert config.input[0].data_type == model_config_pb2.TYPE_FP32
    assert client.get_inference_statistics().model_stats[0].name == "square"


@pytest.mark.parametrize(
    ("model", "values", "status", "text"),
    [
        ("round", ROWS, "NOT_FOUND", "is unknown"),
        ("square", np.ones((2, 4), np.float32), "INVALID_ARGUMENT", "does not fit"),
    ],
)
def test_errors_have_the_status_of_their_kind(
    client: triton.InferenceServerClient, model: str, values: np.ndarray, status: str, text: str
) -> None:
    with pytest.raises(InferenceServerException, match=text) as refused:
        client.infer(model, squares(values))
    assert refused.value.status() == f"StatusCode.{status}"


def test_what_is_not_offered_is_unimplemented(client: triton.InferenceServerClient) -> None:
    for call in (client.get_trace_settings, client.get_log_settings, client.get_cuda_shared_memory_status):
        with pytest.raises(InferenceServerException) as refused:
            call()
        assert refused.value.status() == "StatusCode.UNIMPLEMENTED"


def test_each_message_is_the_same_on_the_wire_as_tritonclients() -> None:
    theirs = {
        **service_pb2.DESCRIPTOR.message_types_by_name,
        **model_config_pb2.DESCRIPTOR.message_types_by_name,
    }
    waiting = [
        (each, theirs[name])
        for name, each in _POOL.FindFileByName("cudnn_actor/inference.proto").message_types_by_name.items()
    ]
    compared = 0
    while waiting:
        ours, other = waiting.pop()
        waiting += [(each, other.nested_types_by_name[each.name]) for each in ours.nested_types]
        for field in ours.fields:
            same = other.fields_by_name[field.name]
            assert (field.number, field.type, field.is_repeated) == (same.number, same.type, same.is_repeated)
            kinds = [each.message_type or each.enum_type for each in (field, same)]
            assert len({each and each.full_name for each in kinds}) == 1
            compared += 1
    assert compared > 100
