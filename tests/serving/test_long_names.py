"""Names and numbers that are longer than any that there is: refused as soon as they are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest
import tritonclient.grpc.aio as triton
from tritonclient.utils import InferenceServerException

from cudnn_actor.serving.server import serve

from .test_processes import INFER, REQUEST, connections, options_for

pytestmark = pytest.mark.usefixtures("forked_fronts")

LONG = "x" * 1025
REGION = "/v2/systemsharedmemory/region/here/register"


@pytest.mark.parametrize("processes", [1, 2])
async def test_they_are_refused_with_one_process_and_with_several(tmp_path: Path, processes: int) -> None:
    options = options_for(tmp_path, grpc=0, processes=processes, service={"device": "cpu"})
    async with serve(options) as server, connections(server) as (client, *_):
        posts: list[tuple[str, Any]] = [
            (f"/v2/repository/models/{LONG}/unload", None),
            (INFER.replace("square", LONG), REQUEST),
            (f"/v2/systemsharedmemory/region/{LONG}/unregister", None),
            (REGION, {"key": LONG, "byte_size": 1}),
            *((REGION, {"key": "a", "offset": at, "byte_size": 1}) for at in (1 << 63, 1 << 64, -(1 << 70))),
            (REGION, {"key": "a", "byte_size": 1 << 64}),
        ]
        for path, json in posts:
            answer = await client.post(path, json=json)
            assert answer.status_code == 400, answer.text
        answer = await client.post(REGION, content=b'{"key": "\\ud800", "byte_size": 1}')
        assert answer.status_code == 400, answer.text
        async with triton.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as other:
            for call in (
                other.get_inference_statistics(LONG),
                other.unload_model(LONG),
                other.register_system_shared_memory(LONG, "a", 1),
                other.register_system_shared_memory("here", LONG, 1),
                other.infer(LONG, []),
            ):
                with pytest.raises(InferenceServerException, match="characters") as raised:
                    await call
                assert raised.value.status() == str(grpc.StatusCode.INVALID_ARGUMENT)
            with pytest.raises(InferenceServerException) as raised:
                await other.register_system_shared_memory("here", "a", 1, offset=(1 << 64) - 1)
            assert raised.value.status() == str(grpc.StatusCode.INVALID_ARGUMENT)
