"""Weights of a pool are read from the disk once, into memory that all members map."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from cudnn_actor.pool import Pool
from tests.onnx.small_models import FLOAT, model_of, node

from ..inside import service_behind
from .conftest import is_back, kill

SIDE = 1024
NBYTES = 4 * SIDE * SIDE


def bytes_read(pid: int) -> int:
    """Bytes that a process has read by system calls, from whatever files."""
    fields = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
    return int(fields["rchar"])


def written(path: Path, w: np.ndarray) -> Path:
    """A model y = x @ w whose weights lie in a file beside it."""
    model = model_of(
        [node("MatMul", "x w", "y")], {"x": (FLOAT, ["N", SIDE])}, {"y": (FLOAT, ["N", SIDE])}, {"w": w}
    )
    onnx.save(model, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    return path


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="the kernel does not count what is read")
async def test_weights_are_read_once_and_again_by_nobody(pool: Pool, tmp_path: Path) -> None:
    w = np.eye(SIDE, dtype=np.float32) * 3
    path, x = written(tmp_path / "model.onnx", w), np.ones((1, SIDE), np.float32)
    pids = [member.pid or 0 for member in pool.statistics().members]
    own, theirs = bytes_read(_own()), [bytes_read(pid) for pid in pids]
    model = await pool.load(path, dims={"N": 1})
    read = bytes_read(_own()) - own
    assert NBYTES <= read < 1.5 * NBYTES
    for pid, before in zip(pids, theirs, strict=True):
        assert bytes_read(pid) - before < NBYTES / 4
    for member in (0, 1):
        service: Any = service_behind(pool.on(member))
        assert len(service.link._shared._numbers) == 1
        assert not service.link.staging.segments()  # and copied once
    (tmp_path / "weights.bin").unlink()
    kill(pool, 0)
    await is_back(pool, 0, 2)
    for member in (0, 1):
        np.testing.assert_array_equal((await pool.on(member).run(model.at[member], x=x))["y"], 3 * x)


def _own() -> int:
    return int(Path("/proc/self").resolve().name)
