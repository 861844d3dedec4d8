"""What users' tests get from the pytest plugin, run by pytest within pytest."""

from __future__ import annotations

import asyncio
import functools
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

import cudnn_actor.testing.marks  # noqa: F401 - else each run within would import it for itself alone
from cudnn_actor import ConvFwd
from cudnn_actor.testing.handles import WatchedRef
from cudnn_actor.testing.leaks import leaks
from cudnn_actor.testing.made import Made

from ..inside import service_behind
from ..onnx import small_models  # noqa: F401 - as well
from ..service.rigs import ONE_BY_ONE, Gate, spawn_gated

ROOT = Path(__file__).parents[2]
pytest_plugins = ["pytester"]

HEAD = """
import numpy as np, pytest
from cudnn_actor import ConvFwd, ConvSpec, Fault, FaultPlan, GraphBuilder, OutOfMemory
from cudnn_actor.messages import Allocate, Fill
ONE = np.ones((1, 1, 1, 1), np.float32)
"""


def run(pytester: pytest.Pytester, program: str, *args: str, **outcomes: int) -> str:
    """Run tests with the plugin. Returns what pytest says, each report once.

    `-rN`: where the variable CI is set, pytest repeats whole reports in its summary.
    """
    pytester.makeini("[pytest]\nasyncio_default_fixture_loop_scope = function")
    pytester.makepyfile(HEAD + program)
    done = pytester.runpytest_inprocess("-p", "pytest_cudnn_actor", "--strict-markers", "-rN", *args)
    done.assert_outcomes(**outcomes)
    return done.stdout.str()


@pytest.mark.parametrize("mode", ["auto", "strict"])
def test_async_tests_have_a_service_in_both_modes_of_pytest_asyncio(
    pytester: pytest.Pytester, mode: str
) -> None:
    mark = "@pytest.mark.asyncio" if mode == "strict" else ""
    program = f"""
{mark}
async def test_it(gpu, gpu_service):
    assert gpu.device == "cpu" and gpu.is_of(gpu_service)
    assert (await gpu.compute(ConvFwd, x=2 * ONE, w=ONE, conv=ConvSpec.symmetric(2))).item() == 2
"""
    run(pytester, program, f"--asyncio-mode={mode}", passed=1)


def test_the_faults_of_a_marker_strike_the_service_of_that_test_alone(pytester: pytest.Pytester) -> None:
    program = """
FULL = FaultPlan().at(1, Fault.OUT_OF_MEMORY, of=Allocate)

@pytest.mark.gpu_faults(FULL)
def test_one(gpu_blocking, gpu_faults):
    assert gpu_faults is FULL
    with pytest.raises(OutOfMemory):
        gpu_blocking.upload(ONE)
    assert len(gpu_blocking.faults_fired) == 1

def test_another(gpu_blocking, gpu_faults):
    assert gpu_faults is None
    gpu_blocking.free(gpu_blocking.upload(ONE))

@pytest.mark.gpu_options(isolation="thread", name="outer")
class TestOverridden:
    @pytest.fixture
    def gpu_faults(self):
        return FULL

    @pytest.mark.gpu_options(name="inner")
    def test_a_fixture_takes_the_place_of_the_marker(self, gpu_blocking, gpu_service):
        assert (gpu_service.isolation, gpu_service.name) == ("thread", "inner")
        with pytest.raises(OutOfMemory):
            gpu_blocking.upload(ONE)
"""
    run(pytester, program, passed=3)


def test_the_programs_of_the_page_pass(pytester: pytest.Pytester) -> None:
    page = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")
    [program] = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    pytester.makeini("[pytest]\nasyncio_default_fixture_loop_scope = function")
    pytester.makepyfile(program)
    done = pytester.runpytest_inprocess("-p", "pytest_cudnn_actor", "--asyncio-mode=strict", "-W", "error")
    done.assert_outcomes(passed=3)


LEAKS = """
async def test_buffer(gpu):
    await gpu.upload(ONE)  # here

async def test_output(gpu):
    async with gpu.scope() as scope:
        x = await scope.upload(ONE)
        y = await gpu.conv_fwd(x, x, conv=ConvSpec.symmetric(2))  # here

async def test_kept(gpu):
    async with gpu.scope() as scope:
        scope.keep(await scope.empty((2, 3)))  # here

def test_blocking(gpu_blocking):
    gpu_blocking.empty((2, 3), dtype="int8")  # here

async def test_gathered(gpu):
    import asyncio
    await asyncio.gather(gpu.empty((3,)))

def test_message(gpu_service):
    from cudnn_actor import TensorSpec
    gpu_service.actor_ref.ask(Allocate(spec=TensorSpec.packed((5,), "float32")))
"""


def line_numbers(program: str) -> list[int]:
    """Those of the lines marked `here`."""
    return [
        number for number, line in enumerate((HEAD + program).strip().splitlines(), 1) if "# here" in line
    ]


def test_buffers_that_are_left_fail_the_test_with_the_lines_that_made_them(pytester: pytest.Pytester) -> None:
    said = run(pytester, LEAKS, "--asyncio-mode=auto", passed=6, errors=6)
    tests = ("test_buffer", "test_output", "test_kept", "test_blocking")
    for number, test in zip(line_numbers(LEAKS), tests, strict=True):
        assert re.search(rf"made at test_\w+.py:{number} in {test}\n", said)
    assert said.count("made at") == len(tests)  # of the others, the line is not on the stack
    assert said.count("<buffer ") == 6
    assert "int8[2x3]" in said
    assert "gpu_leaks_allowed" in said


def test_a_test_may_be_allowed_to_leak_and_one_that_failed_is_not_blamed_twice(
    pytester: pytest.Pytester,
) -> None:
    program = """
@pytest.mark.gpu_leaks_allowed
def test_allowed(gpu_blocking):
    gpu_blocking.upload(ONE)

def test_failing(gpu_blocking):
    gpu_blocking.upload(ONE)
    raise LookupError

@pytest.fixture
def weights(gpu_blocking):
    buffer = gpu_blocking.upload(ONE)
    yield buffer
    gpu_blocking.free(buffer)

def test_what_its_fixtures_free_is_no_leak(weights):
    pass

def test_a_service_that_it_has_closed_has_nothing(gpu_blocking):
    gpu_blocking.upload(ONE)
    gpu_blocking.close()
"""
    run(pytester, program, passed=3, failed=1)


MODELS = """
from tests.onnx.small_models import image_model
IMAGE = np.ones((1, 3, 8, 8), np.float32)

async def test_model(gpu):
    model = await gpu.load(image_model())  # here
    await gpu.run(model, image=IMAGE)

async def test_closed(gpu):
    async with await gpu.load(image_model()) as model:
        await gpu.run(model, image=IMAGE)

async def test_not_run(gpu):
    await gpu.load(image_model(batch=1))  # here

def test_blocking(gpu_blocking):
    model = gpu_blocking.load(image_model())  # here
    gpu_blocking.run(model, image=IMAGE)
"""


def test_a_model_that_is_left_fails_the_test_also_if_it_was_dropped(pytester: pytest.Pytester) -> None:
    said = run(pytester, MODELS, "--asyncio-mode=auto", "-W", "error", passed=4, errors=3)
    for number, test in zip(
        line_numbers(MODELS), ("test_model", "test_not_run", "test_blocking"), strict=True
    ):
        assert f".py:{number} in {test}" in said
    assert said.count("<model 1> <model: image: float32") == 3
    assert "<buffer " not in said  # its own


async def test_a_request_that_does_not_end_is_a_leak_with_the_line_that_sent_it() -> None:
    gate, made = Gate(), Made()
    async with spawn_gated(gate, isolation="thread") as spawned:
        gpu = WatchedRef(service_behind(spawned), made)
        x = await gpu.upload(np.ones((1, 1, 1, 1), np.float32))
        find = functools.partial(leaks, service_behind(spawned), made, 0.01)
        with gate.closed():
            future = gpu.submit(ConvFwd(x=x, w=x, y=await gpu.empty((1, 1, 1, 1)), conv=ONE_BY_ONE))
            [found] = await asyncio.to_thread(find)
            assert found.startswith("unfinished after 0.01 s: ConvFwd, sent at ")
            assert found.endswith(f"{gpu_line('future = gpu.submit(')} in {sys._getframe().f_code.co_name}")
        await future
        assert [line[:8] for line in await asyncio.to_thread(leaks, service_behind(spawned), made, 10.0)] == [
            "<buffer "
        ] * 2


def gpu_line(text: str) -> str:
    """The place of the first line here with this text."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    return f"{__file__}:{next(number for number, line in enumerate(lines, 1) if text in line)}"


def test_wrong_use_is_an_error_that_names_the_fix(pytester: pytest.Pytester) -> None:
    program = """
@pytest.mark.gpu_faults(Fault.STICKY)
def test_no_plan(gpu): pass

@pytest.mark.gpu_faults(FaultPlan())
def test_no_service(): pass

@pytest.mark.gpu_options(faults=FaultPlan())
def test_faults_among_the_options(gpu): pass

@pytest.mark.gpu_options(standbye=1)
def test_unknown_option(gpu): pass

class TestFixture:
    @pytest.fixture
    def gpu_faults(self):
        return "STICKY"

    def test_no_plan(self, gpu): pass
"""
    said = run(pytester, program, errors=5)
    assert len(re.findall(r"^E +cudnn_actor.protocol.errors.InvalidRequest: ", said, re.M)) == 5
    for problem in (
        "takes one FaultPlan; use for example",
        "is a test without a service, so the mark has no effect; take the fixture gpu",
        "use @pytest.mark.gpu_faults(plan) for faults",
        "is not an option",
        "is neither a FaultPlan nor None",
    ):
        assert problem in said


@pytest.mark.parametrize("fault", ["FAIL_EXECUTION", "STICKY"])
def test_a_fault_of_the_drain_neither_hides_a_leak_nor_is_one(pytester: pytest.Pytester, fault: str) -> None:
    program = f"""
pytestmark = [
    pytest.mark.gpu_faults(FaultPlan().chance(1.0, Fault.{fault}, of="Drain")),
    pytest.mark.gpu_options(isolation="process", max_restarts=2),
]

def test_none(gpu_blocking): pass

def test_leak(gpu_blocking):
    gpu_blocking.upload(ONE)
    garbage = []  # so there is a second drain, which the service does not survive
    garbage.append(garbage)
"""
    run(pytester, program, passed=2, errors=1)


@pytest.mark.parametrize("seconds", ["soon", "-1", "nan"])
def test_seconds_that_are_none_are_refused(pytester: pytest.Pytester, seconds: str) -> None:
    said = run(pytester, "def test_it(gpu): pass", f"--override-ini=gpu_drain_s={seconds}", errors=1)
    assert "InvalidRequest: gpu_drain_s=" in said


@pytest.mark.parametrize("by", ["option", "ini"])
def test_another_device_is_chosen_by_an_option_or_in_the_configuration(
    pytester: pytest.Pytester, by: str
) -> None:
    chosen = "--gpu-device=tpu" if by == "option" else "--override-ini=gpu_device=tpu"
    said = run(pytester, "def test_it(gpu): pass", chosen, errors=1)
    assert "device='tpu'" in said


def test_pytest_starts_without_the_package_and_numpy() -> None:
    program = "import sys, pytest, pytest_cudnn_actor; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    assert not {"cudnn_actor", "numpy", "pykka", "pytest_asyncio"} & set(done.stdout.split())


def test_an_installation_has_the_plugin() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["entry-points"]["pytest11"] == {"pytest_cudnn_actor": "pytest_cudnn_actor"}
    assert project["tool"]["setuptools"]["py-modules"] == ["pytest_cudnn_actor"]
