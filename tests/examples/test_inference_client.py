"""The example of a client, against a server."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import onnx

from ..onnx.small_models import image_model
from ..patience import PATIENCE_S
from ..serving.servers import running

EXAMPLE = Path(__file__).parents[2] / "examples" / "inference_client.py"


def test_the_example_of_a_client_runs(tmp_path: Path) -> None:
    onnx.save(image_model(), tmp_path / "image.onnx")
    with running(str(tmp_path / "image.onnx"), "--http", "0", "--grpc", "0", "--batch", "4") as (_, ports):
        command = [sys.executable, str(EXAMPLE)]
        command += [*(f"127.0.0.1:{ports[face]}" for face in ("http", "grpc")), "image"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert "over gRPC: 16 answers" in done.stdout
