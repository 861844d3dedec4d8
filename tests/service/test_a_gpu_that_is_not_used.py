"""`device="auto"` on a machine that shows signs of a GPU and cannot use one: nobody misses it.

A machine of folders takes a new interpreter. Where only its driver counts, a forked program looks for that
one's library instead.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from .. import forked_programs
from ..engines.broken_machines import CLONE, WITHOUT_DRIVER, Machine, bare_machine
from ..patience import PATIENCE_S

SPAWN = """
import asyncio, json, sys
from tests.log_lines import capture_logs
from cudnn_actor import spawn

async def main(isolation):
    async with spawn(device="auto", isolation=isolation) as gpu:  # the line of the program
        return repr(gpu), gpu.device

with capture_logs() as lines:
    shown, device = asyncio.run(main(sys.argv[1]))
chosen = [line for line in lines if line["event"] == "device.chosen"]
print(json.dumps([shown, device, [[line["log_level"], line["reason"]] for line in chosen]]))
"""
START = """
import json
from tests.log_lines import capture_logs
from cudnn_actor import CudnnRef, start
with capture_logs() as lines:
    service = start()  # the line of the program
print(json.dumps([repr(CudnnRef(service)), service.device, [[lines[0]["log_level"], lines[0]["reason"]]]]))
service.stop()
"""
NODE = """
from cudnn_actor.engines.cuda.diagnosis import gpus
gpus._NODES = ({node!r},)
"""
Done = subprocess.CompletedProcess[str]
BROKEN = "the NVIDIA driver does not work (cuInit returned CUDA_ERROR_OF_A_TOY (999))"


def broken_machine(root: Path, status: int = 999) -> Machine:
    machine = Machine(root)
    machine.driver(gpus=0, status=status)
    return machine


def run(program: str, *words: str, warnings: str = "error", **environment: str) -> Done:
    """Run a program's text, or its file, where nothing hides GPUs."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("CUDA")}
    what = [program] if program.endswith(".py") else ["-c", program]
    return forked_programs.run(
        ["-W", warnings, *what, *words], env=inherited | environment, cwd=CLONE, timeout=PATIENCE_S
    )


def with_driver(machine: Machine) -> str:
    """The beginning of a program that finds a machine's driver, and nothing of this machine's."""
    return WITHOUT_DRIVER.replace("libcuda-of-no-machine.so", str(machine.lib / "libcuda.so.1"))


def file_at(path: Path) -> str:
    path.touch()
    return str(path)


def shown(done: Done) -> tuple[str, str, str]:
    """What the service says that it is, and how its choice is logged; it runs on the CPU."""
    assert done.returncode == 0, done.stderr
    text, device, ((level, reason),) = json.loads(done.stdout)
    assert device == "cpu"
    return text, level, reason


@pytest.mark.parametrize(("isolation", "status"), [("thread", 999), ("process", 803)])
def test_a_broken_driver_is_warned_of_logged_and_shown(isolation: str, status: int, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(SPAWN)
    machine = broken_machine(tmp_path, status)
    done = machine.run(str(program), isolation, warnings="default", PYTHONPATH=f"{machine.site}:{CLONE}")
    text, level, reason = shown(done)
    broken = BROKEN.replace("999", str(status))
    assert reason.startswith(broken)
    assert reason.count("does not work") == 1
    assert level == "warning"
    assert text == f"<CudnnRef 'cudnn' on cpu: {reason}>"
    (warned,) = (line for line in done.stderr.splitlines() if "RuntimeWarning" in line)
    assert warned.startswith(f"{program}:7: RuntimeWarning: "), "not at the line that spawned it"
    assert broken in warned
    assert 'device="cuda"' in warned


def test_a_service_without_asyncio_warns_at_the_line_that_starts_it(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    written = with_driver(broken_machine(tmp_path)) + START
    program.write_text(written)
    done = run(str(program), warnings="default")
    text, level, _ = shown(done)
    assert level == "warning"
    assert BROKEN in text
    (line,) = (n for n, each in enumerate(written.splitlines(), 1) if "# the line of the program" in each)
    assert f"{program}:{line}: RuntimeWarning: " in done.stderr


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_a_warning_that_is_an_error_leaves_nothing_running(isolation: str, tmp_path: Path) -> None:
    program = with_driver(broken_machine(tmp_path)) + SPAWN
    done = run(program, isolation, warnings="error::RuntimeWarning")
    assert done.returncode == 1
    assert "RuntimeWarning: " in done.stderr.splitlines()[-1]
    assert "ResourceWarning" not in done.stderr


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_gpus_that_are_hidden_on_purpose_are_not_spoken_of(hidden: str, tmp_path: Path) -> None:
    program = with_driver(broken_machine(tmp_path)) + SPAWN
    done = run(program, "thread", CUDA_VISIBLE_DEVICES=hidden)
    text, level, _ = shown(done)
    assert (text, level) == ("<CudnnRef 'cudnn' on cpu>", "info")
    assert done.stderr == ""


def test_a_device_file_without_a_driver_library_is_a_sign_too(tmp_path: Path) -> None:
    node = NODE.format(node=file_at(tmp_path / "nvidia0"))
    done = run(WITHOUT_DRIVER + node + SPAWN, "thread", warnings="default")
    text, level, _ = shown(done)
    assert level == "warning"
    assert "this process has no NVIDIA driver library" in text
    assert "RuntimeWarning: " in done.stderr


def test_device_files_whose_driver_finds_no_gpu_are_a_sign_too(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.driver(gpus=0)
    node = NODE.format(node=file_at(tmp_path / "nvidiactl"))
    text, level, _ = shown(run(with_driver(machine) + node + SPAWN, "thread", warnings="default"))
    assert level == "warning"
    assert "there is no GPU" in text


def test_a_gpu_whose_packages_are_missing_is_warned_of(tmp_path: Path) -> None:
    done = bare_machine(tmp_path).run("-c", SPAWN, "thread", warnings="default")
    text, level, _ = shown(done)
    assert level == "warning"
    assert "CuPy is not installed" in text
    assert "RuntimeWarning: " in done.stderr


def test_a_machine_without_any_sign_of_a_gpu_is_told_nothing() -> None:
    text, level, _ = shown(run(WITHOUT_DRIVER + SPAWN, "thread"))
    assert (text, level) == ("<CudnnRef 'cudnn' on cpu>", "info")


def test_the_cpu_that_was_asked_for_is_told_nothing(tmp_path: Path) -> None:
    program = with_driver(broken_machine(tmp_path)) + SPAWN.replace('"auto"', '"cpu"')
    text, level, _ = shown(run(program, "thread"))
    assert (text, level) == ("<CudnnRef 'cudnn' on cpu>", "info")
