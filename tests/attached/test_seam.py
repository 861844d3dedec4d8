"""What stands for a service in an attached process has all that handles use of one, and refuses the rest."""

from __future__ import annotations

import ast
import inspect
import re
import signal
import subprocess
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from cudnn_actor import (
    CudnnRef,
    GraphBuilder,
    InvalidRequest,
    Loop,
    RunGraph,
    RunLoop,
    StaleBufferError,
    blocking,
    connect,
)
from cudnn_actor.attached import ServedSocket
from cudnn_actor.blocking import handle
from cudnn_actor.messages import UnloadModel
from cudnn_actor.models import batching
from cudnn_actor.onnx import ModelLimits, OnnxModel
from cudnn_actor.service import client, computing, requests, scopes

from ..forked_programs import Program
from ..inside import kept_by, service_behind
from ..onnx.small_models import image_model
from ..onnx.test_long_loops import known_turns
from ..patience import PATIENCE_S


def used(module: ModuleType, of: str) -> set[str]:
    """The attributes that a module uses of `self._service`, or of `self._state`."""
    found = set()
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.Attribute) and re.search(rf"(^|\.)_?{of}$", ast.unparse(node.value)):
            found.add(node.attr)
    return found


@pytest.mark.parametrize("module", [client, computing, requests, scopes, handle, batching])
async def test_handles_find_what_they_use_of_a_service(client: CudnnRef, module: ModuleType) -> None:
    service, state = service_behind(client), service_behind(client).state
    assert not [name for name in used(module, "service") if not hasattr(service, name)]
    assert not [name for name in used(module, "state") if not hasattr(state, name)]


async def test_every_property_of_the_handle_can_be_read(client: CudnnRef) -> None:
    for name, value in inspect.getmembers(CudnnRef):
        if isinstance(value, property):
            getattr(client, name)
    assert client.health().state == "ready"
    assert client.metrics().service == "cudnn"
    assert "cudnn" in client._repr_html_()
    with pytest.raises(InvalidRequest, match="cannot be sent"):
        await client.view(await client.upload(np.ones((1, 1, 2, 2), np.float32)))


async def test_a_shared_weight_is_only_read(client: CudnnRef, served: ServedSocket, tmp_path: Path) -> None:
    file = tmp_path / "image.onnx"
    file.write_bytes(image_model().SerializeToString())
    model = await client.load(file, dims={"N": 1})
    weights = [kept for kept, _ in kept_by(model).weights.values()]
    assert weights
    for weight in weights:
        with pytest.raises(InvalidRequest, match="share"):
            await client.fill(weight, 0.0)
        with pytest.raises(InvalidRequest, match="share"):
            await client.copy(weight, await client.empty(weight.dims, dtype=weight.dtype))
    async with connect(served.path) as other:
        await other.ask(UnloadModel(model=model.ref))  # of another client: it is not its own, so nothing ends
        with pytest.raises(StaleBufferError):
            await other.download(weights[0])
    assert (await client.run(model, image=np.ones((1, 3, 8, 8), np.float32))).keys()
    await model.close()


async def test_graphs_and_loops_of_a_model_read_shared_weights(client: CudnnRef) -> None:
    """And write to none."""
    proto, inputs = known_turns(20)
    async with await client.load(OnnxModel(proto, ModelLimits(unrolled=0))) as model:
        plain = await client.load(proto)
        wanted = await client.run(plain, inputs)
        for name, array in (await client.run(model, inputs)).items():
            np.testing.assert_allclose(array, wanted[name], rtol=1e-5, atol=1e-6)
        ((weight, _),) = kept_by(model).weights.values()
        g = GraphBuilder()
        x = g.input("x", weight.dims)
        graph = g.build(y=g.tanh(x))
        own = await client.empty(weight.dims, dtype="float32")
        await client.apply(graph, x=weight)
        with pytest.raises(InvalidRequest, match="share"):
            await client.ask(RunGraph.bind(graph, x=own, y=weight))
        loop = Loop(body=graph, carried={"x": "y"})
        with pytest.raises(InvalidRequest, match="share"):
            await client.loop(loop, turns=2, x=own, y=weight)
        zeros = np.zeros(loop.scratch.dims, np.uint8)
        scratch = await client._upload_weight(zeros, loop.scratch, shared=True)
        with pytest.raises(InvalidRequest, match="share"):
            await client.ask(RunLoop.bind(loop, x=weight, y=own, turns=2, scratch=scratch))
        await client.free(scratch)
        await plain.close()


def test_the_command_lets_others_attach(tmp_path: Path) -> None:
    pytest.importorskip("uvicorn")
    file = tmp_path / "images.onnx"
    file.write_bytes(image_model().SerializeToString())
    command = ["-m", "cudnn_actor.cli", "serve", "--device", "cpu", "--http", "0", "--grpc", "0"]
    words = [*command, "--socket", f"{tmp_path}/s", str(file)]
    with Program(words, stdout=subprocess.PIPE, spare=True) as process:
        try:
            assert process.stdout.readline().startswith("serving: ")
            path = process.stdout.readline().removeprefix("attachable: ").strip()
            image = np.ones((1, 3, 8, 8), np.float32)
            with blocking.connect(path) as gpu:
                assert gpu.ping() == 1
                found = blocking.served_model(gpu, "images").run(image=image)
            assert found.keys() == {output.name for output in image_model().graph.output}
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE_S) == 0
        finally:
            process.kill()
