"""Weights of a pool are read from the disk once, into memory that all members map."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from cudnn_actor import GraphBuilder
from cudnn_actor.models.keeping import MOST_KEPT
from cudnn_actor.models.source import Specialised
from cudnn_actor.pool import Pool
from cudnn_actor.pool.shared_source import SharedSource, share_source
from cudnn_actor.protocol.types.tensor import TensorSpec
from tests.onnx.small_models import FLOAT, model_of, node

from ..inside import announced_segments, service_behind
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
        assert len(announced_segments(service.link)) == 1
        assert not service.link.staging.segments()  # and copied once
    (tmp_path / "weights.bin").unlink()
    kill(pool, 0)
    await is_back(pool, 0, 2)
    for member in (0, 1):
        np.testing.assert_array_equal((await pool.on(member).run(model.at[member], x=x))["y"], 3 * x)


SIZES = MOST_KEPT + 6
"""More sizes of the inputs than the imports that a pool keeps."""


class Added:
    """A source of a model y = x + table + one, whose table has as many rows as x: another for each size."""

    inputs = defaults = outputs = ()

    def specialise(
        self, specs: Mapping[str, TensorSpec], _values: Mapping[str, np.ndarray], *_limits: int
    ) -> Specialised:
        """The model for inputs of these specs."""
        dims = specs["x"].dims
        g = GraphBuilder()
        x, table, one = g.input("x", dims), g.input("table", dims), g.input("one", (1,))
        graph = g.build(y=g.add(g.add(x, table), one))
        return Specialised(
            graph=graph,
            inputs={"x": "x"},
            outputs={"y": "y"},
            weights={
                "table": (f"table of {dims[0]}", lambda: self.table(dims[0])),
                "one": ("one", np.ones(1, np.float32)),
            },
            constants={},
        )

    def table(self, rows: int) -> np.ndarray:
        """The values of the table for inputs of this many rows."""
        return np.arange(rows, dtype=np.float32)


def shared_segments() -> int:
    """How many segments of shared arrays this process has open."""
    paths = [path for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return len({os.stat(path).st_ino for path in paths if "cudnn-actor-shared" in os.readlink(path)})


def specs_of(rows: int) -> dict[str, TensorSpec]:
    return {"x": TensorSpec.packed((rows,))}


def test_weights_of_forgotten_sizes_are_not_kept() -> None:
    source, before = share_source(Added()), shared_segments()
    for rows in range(1, SIZES + 1):
        made = source.specialise(specs_of(rows), {})
    assert shared_segments() - before <= MOST_KEPT + 1  # and one with the weight that all sizes share
    again = source.specialise(specs_of(SIZES), {})
    assert again is made
    first = source.specialise(specs_of(1), {})  # made again
    np.testing.assert_array_equal(first.weights["table"][1], [0])
    assert first.weights["one"][1] is made.weights["one"][1]


def test_an_import_goes_on_while_its_model_is_unloaded() -> None:
    class Unloaded(Added):
        def table(self, rows: int) -> np.ndarray:
            if rows == 2:
                source.release()
            return super().table(rows)

    source = SharedSource(Unloaded())
    source.specialise(specs_of(1), {})
    made = source.specialise(specs_of(2), {})
    assert {port: np.asarray(values).tolist() for port, (_, values) in made.weights.items()} == {
        "table": [0, 1],
        "one": [1],
    }


def _own() -> int:
    return int(Path("/proc/self").resolve().name)
