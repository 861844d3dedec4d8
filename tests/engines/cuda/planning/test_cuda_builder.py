"""What a builder of the CUDA engine says of itself: the plan store finds its plans by that."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import msgspec
import pytest

from cudnn_actor.engines.cuda.library import libcublaslt
from cudnn_actor.engines.cuda.library.libraries import libraries
from cudnn_actor.engines.cuda.planning.cuda_builder import CudaBuilder


class Machine(msgspec.Struct, frozen=True):
    """The libraries and the device of a machine."""

    cudnn: int = 91900
    frontend: str = "1.32.0"
    cublaslt: int = 130100
    capability: str = "90"
    device: str = "NVIDIA H200"
    dynamic_shapes: bool = False


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Stand-ins for the CUDA packages and for cuBLASLt's library."""
    found: dict[str, Any] = {name: MagicMock() for name in ("cupy", "runtime", "cudnn", "driver", "cublaslt")}
    found["driver"].cuThreadExchangeStreamCaptureMode.return_value = (0, 0)
    for name in ("cupy", "runtime", "cudnn", "driver"):
        monkeypatch.setitem(vars(libraries()), name, found[name])
    monkeypatch.setattr(libcublaslt, "libcublaslt", lambda: found["cublaslt"])
    return found


def fingerprint(modules: dict[str, Any], machine: Machine) -> str:
    """The fingerprint of plans that are built on a machine."""
    modules["cudnn"].backend_version.return_value = machine.cudnn
    modules["cudnn"].__version__ = machine.frontend
    modules["cublaslt"].cublasLtGetVersion.return_value = machine.cublaslt
    modules["cupy"].cuda.Device.return_value.compute_capability = machine.capability
    modules["runtime"].getDeviceProperties.return_value = {"name": machine.device.encode()}
    builder = CudaBuilder(0, dynamic_shapes=machine.dynamic_shapes)
    builder.open()
    builder.close()
    return builder.fingerprint


@pytest.mark.parametrize(
    "other",
    [
        Machine(cudnn=92800),
        Machine(frontend="1.33.0"),
        Machine(cublaslt=130200),
        Machine(capability="100"),
        Machine(device="NVIDIA H100 80GB HBM3"),
        Machine(dynamic_shapes=True),
    ],
    ids=["cudnn", "frontend", "cublaslt", "capability", "device", "dynamic_shapes"],
)
def test_plans_are_not_found_with_another_library_or_device(modules: dict[str, Any], other: Machine) -> None:
    """A plan has algorithms of cuBLASLt's, which mean nothing to another version of it."""
    assert fingerprint(modules, Machine()) == fingerprint(modules, Machine())
    assert fingerprint(modules, other) != fingerprint(modules, Machine())
