"""The pytest plugin: services for tests, scripted faults, and a check that nothing is left on a service.

    @pytest.mark.gpu_faults(FaultPlan().at(1, Fault.STICKY, of=ConvFwd))
    async def test_a_lost_context_is_no_error(gpu): ...

It comes with the package and needs pytest alone; async tests need a plugin that runs them, such as
pytest-asyncio, in any of its modes. Fixtures are plain functions, so it does not matter which event loop a
test has. When pytest starts, nothing is imported but this module.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from cudnn_actor import CudnnRef, CudnnService, FaultPlan
    from cudnn_actor.blocking import BlockingRef
    from cudnn_actor.testing.made import Made

__all__ = ["gpu", "gpu_blocking", "gpu_faults", "gpu_service"]

_DEVICE, _DRAIN_S = "gpu_device", "gpu_drain_s"
_MARKERS = (
    "gpu_faults(plan): the FaultPlan of the test's service, of the fixtures `gpu` and `gpu_blocking`",
    "gpu_options(**options): further options of `spawn` for the test's service",
    "gpu_leaks_allowed: the test may leave buffers, models and requests on its service",
)
_ENDED_EARLY = pytest.StashKey[bool]()
"""Whether a test has raised: then it could not free what it had."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("cudnn-actor")
    group.addoption("--gpu-device", help="device of the services of the fixture `gpu`: cpu, cuda:0, auto")
    parser.addini(_DEVICE, "the default of --gpu-device", default="cpu")
    parser.addini(_DRAIN_S, "how many seconds a test's unfinished requests may take after it", default="10")


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers."""
    for marker in _MARKERS:
        config.addinivalue_line("markers", marker)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Refuse a test with faults that could not strike, as it has no service.

    Only marks of the function itself count: those of a class or module are for all its tests.
    """
    fixtures = getattr(item, "fixturenames", ())
    for mark in item.own_markers:
        if mark.name in ("gpu_faults", "gpu_options") and "gpu_service" not in fixtures:
            from cudnn_actor import InvalidRequest

            raise InvalidRequest(
                field=f"pytest.mark.{mark.name}",
                value=item.name,
                problem="is a test without a service, so the mark has no effect",
                fix="take the fixture gpu or gpu_blocking, or remove the mark",
            )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note for the leak check whether the test has raised."""
    if call.when != "teardown" and call.excinfo is not None:
        item.stash[_ENDED_EARLY] = True
    return (yield)


@pytest.fixture
def gpu_faults(request: pytest.FixtureRequest) -> FaultPlan | None:
    """The faults of the test's service: the plan of its marker `gpu_faults`, or None.

    A fixture of this name in a test module or class takes its place. Raises `InvalidRequest` if the marker
    was not given one plan.
    """
    from cudnn_actor.testing.marks import plan_of

    return plan_of(request.node.get_closest_marker("gpu_faults"))


@pytest.fixture
def _gpu_made() -> Made:
    """The buffers, models and requests that the test makes on its service."""
    from cudnn_actor.testing.made import Made

    return Made()


@pytest.fixture
def gpu_service(
    request: pytest.FixtureRequest, gpu_faults: FaultPlan | None, _gpu_made: Made
) -> Iterator[CudnnService]:
    """The test's service, a `CudnnService`, for threads and pykka actors. It is stopped after the test.

    Unless the test has failed, or is marked `gpu_leaks_allowed`, it fails if anything is left: buffers,
    models, or requests that do not finish within `gpu_drain_s` seconds. Raises `InvalidRequest` for options
    that are out of range, or a device that is not here, and `StartFailed`.
    """
    from cudnn_actor.service.service import start_checked
    from cudnn_actor.testing.leaks import REMEDY, leaks
    from cudnn_actor.testing.marks import options_of, seconds_of

    node, config = request.node, request.config
    device = config.getoption("--gpu-device") or config.getini(_DEVICE)
    drain_s = seconds_of(_DRAIN_S, config.getini(_DRAIN_S))
    service = start_checked(options_of(device, gpu_faults, node.iter_markers("gpu_options")))
    left: list[str] = []
    try:
        yield service
        if not node.stash.get(_ENDED_EARLY, False) and not node.get_closest_marker("gpu_leaks_allowed"):
            left = leaks(service, _gpu_made, drain_s)
    finally:
        service.stop()
    if left:
        text = "\n  ".join(["left on the service:", *left, REMEDY])
        pytest.fail(text.replace(f"{config.invocation_params.dir}/", ""), pytrace=False)


@pytest.fixture
def gpu(gpu_service: CudnnService, _gpu_made: Made) -> CudnnRef:
    """A service for the test, as `spawn` gives it: a `CudnnRef`, for async code. See `gpu_service`."""
    from cudnn_actor.testing.handles import WatchedRef

    return WatchedRef(gpu_service, _gpu_made)


@pytest.fixture
def gpu_blocking(gpu_service: CudnnService, _gpu_made: Made) -> Iterator[BlockingRef]:
    """A handle of `gpu_service` for code without asyncio: a `BlockingRef`, as `blocking.spawn` gives it."""
    from cudnn_actor.testing.handles import WatchedBlockingRef

    handle = WatchedBlockingRef(gpu_service, _gpu_made)
    yield handle
    handle.leave()
