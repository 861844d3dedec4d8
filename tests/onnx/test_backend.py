"""ONNX's Backend interface."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from cudnn_actor import InvalidRequest, ServiceStopped
from cudnn_actor.errors import InvalidModel, UnsupportedModel
from cudnn_actor.onnx import backend

from ..inside import gpu_behind
from ..patience import PATIENCE_S
from .small_models import FLOAT, image_model, model_of, node

X = np.arange(-3, 3, dtype=np.float32)


@pytest.fixture(autouse=True)
def the_shared_service_ends() -> Iterator[None]:
    yield
    backend.close()


def test_a_node_runs() -> None:
    (y,) = backend.run_node(node("Relu", "x", "y"), [X])
    np.testing.assert_array_equal(y, np.maximum(X, 0))


def test_inputs_of_a_node_by_name_may_be_in_any_order() -> None:
    (y,) = backend.run_node(node("Sub", "a b", "y"), {"b": X, "a": 2 * X})
    np.testing.assert_array_equal(y, X)


def test_a_node_of_an_older_version_runs() -> None:
    (y,) = backend.run_node(node("Softmax", "x", "y", axis=1), [np.ones((2, 2, 3), "f4")], opset_version=11)
    np.testing.assert_allclose(y, np.full((2, 2, 3), 1 / 6), rtol=1e-6)


def test_an_input_of_a_node_may_be_left_out() -> None:
    clip, most = node("Clip", "x low high", "y"), np.array(1, np.float32)
    for given in ([X, None, most], {"x": X, "high": most}, {"x": X, "low": None, "high": most}):
        np.testing.assert_array_equal(backend.run_node(clip, given)[0], np.minimum(X, 1))
    for named in ([X, None, most], [X, most]):
        (y,) = backend.run_node(node("Clip", "x - high", "y"), named)
        np.testing.assert_array_equal(y, np.minimum(X, 1))


def test_one_input_of_a_node_that_is_read_twice() -> None:
    (y,) = backend.run_node(node("Sub", "x x", "y"), [X, X + 1])
    np.testing.assert_array_equal(y, X - X)


@pytest.mark.parametrize(
    ("made", "inputs", "error", "problem"),
    [
        (
            "Add",
            [X],
            InvalidRequest,
            "inputs=1: is not the number of inputs, which is 2; give a, b; None for",
        ),
        ("Add", {"a": X}, InvalidModel, r"node 'y' \(Add\): "),
        ("Add", [X, X.astype("f8")], InvalidModel, r"node 'y' \(Add\): "),
        ("Add", [X, X.tolist()], InvalidRequest, "inputs=list: is no tensor of numbers"),
        ("Nope", [X, X], UnsupportedModel, r"node 'y' \(Nope\): no operator of that name"),
    ],
)
def test_nodes_that_cannot_be_run_are_typed_errors(
    made: str, inputs: Any, error: type[Exception], problem: str
) -> None:
    with pytest.raises(error, match=problem):
        backend.run_node(node(made, "a b", "y"), inputs)


def test_a_prepared_model_runs_many_times_with_arrays_in_order_or_by_name() -> None:
    model = backend.prepare(
        model_of([node("Sub", "a b", "y")], {"a": (FLOAT, [6]), "b": (FLOAT, [6])}, {"y": (FLOAT, [6])})
    )
    for factor in (1.0, 2.0):
        given = [X * np.float32(factor), X]
        np.testing.assert_array_equal(model.run(given)[0], given[0] - X)
        by_name: Any = model.run(dict(zip("ab", given, strict=True)))
        np.testing.assert_array_equal(by_name["y"], given[0] - X)
    with pytest.raises(InvalidRequest, match="is not the number of inputs, which is 2; give a, b"):
        model.run([X])
    model.close()


def test_all_models_of_a_device_share_one_service() -> None:
    one, other = (backend.prepare(image_model()) for _ in range(2))
    assert gpu_behind(one.model) is gpu_behind(other.model)
    one.close()
    (scores, _) = other.run([np.ones((2, 3, 8, 8), np.float32)])
    assert scores.shape == (2, 5)


def test_a_prepared_model_that_is_dropped_frees_its_weights() -> None:
    """Without a warning: ONNX's interface has nothing to close it by."""
    model = backend.prepare(image_model())
    model.run([np.ones((2, 3, 8, 8), np.float32)])
    gpu = gpu_behind(model.model)
    del model
    gc.collect()
    gpu.drain()
    assert gpu.statistics().live_buffers == 0


def test_devices() -> None:
    assert backend.supports_device("CPU")
    assert not backend.supports_device("CUDA:77")
    assert not backend.supports_device("FPGA")


def test_what_is_compatible() -> None:
    assert backend.is_compatible(image_model())
    strange = model_of(
        [node("StringSplit", "x", "y z")],
        {"x": (onnx.TensorProto.STRING, [1])},
        {"y": (onnx.TensorProto.STRING, None)},
    )
    assert not backend.is_compatible(strange)
    with pytest.raises(UnsupportedModel, match="StringSplit"):
        backend.prepare(strange)


def test_a_call_ends_when_the_services_are_closed_and_the_next_one_says_so() -> None:
    model = backend.prepare(image_model())
    ran, ends = threading.Event(), []

    def runs() -> None:
        try:
            while True:
                model.run([np.ones((1, 3, 8, 8), np.float32)])
                ran.set()
        except ServiceStopped as error:
            ends.append(error)

    threads = [threading.Thread(target=runs) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert ran.wait(PATIENCE_S)
    backend.close()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert len(ends) == 4
    with pytest.raises(ServiceStopped):
        model.run([np.ones((1, 3, 8, 8), np.float32)])
    model.close()
    assert backend.prepare(image_model()).run([np.ones((1, 3, 8, 8), np.float32)])


FORKING = """
import asyncio, os, sys, threading
import numpy as np
from cudnn_actor import ServiceStopped
from cudnn_actor.onnx import backend
from tests.onnx.small_models import image_model

x = [np.ones((1, 3, 8, 8), np.float32)]
model = backend.prepare(image_model())
model.run(x)
gpu, held, stay = model.model._gpu._gpu, threading.Event(), threading.Event()

def hold():
    with model.model.model._keeping.lock:
        held.set()
        stay.wait()

holding = threading.Thread(target=hold)
holding.start()
held.wait()
child = os.fork()
if not child:
    refused = 0
    for run in (lambda: model.run(x), lambda: asyncio.run(gpu.run(model.model.model, {"image": x[0]}))):
        try:
            run()
        except ServiceStopped as error:
            refused += error.forked
    model.close()
    backend.prepare(image_model()).run(x)
    sys.exit(5 + refused)
stay.set()
holding.join()
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
model.run(x)
print("done")
"""


def test_a_forked_child_has_services_of_its_own_and_all_end_with_their_process() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-W", "ignore:This process:DeprecationWarning", "-c", FORKING],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
