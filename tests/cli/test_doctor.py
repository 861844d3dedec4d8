"""The doctor: what was found, what is missing, and whether the service works."""

from __future__ import annotations

import errno
import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cudnn_actor.cli import diagnosis
from cudnn_actor.processes.launching import close_launchers

from ..engines.broken_machines import WITHOUT_DRIVER, Machine, bare_machine, whole_machine
from ..patience import PATIENCE_S
from ..whole import WHOLE
from .terminal import CLONE, cudnn_actor_here, forked, python
from .test_chaos import HANGING_FORKSERVER

TRIED = diagnosis.Check(isolation="thread", ok=True, detail="not tried here", device="cpu")


def test_the_doctor_tries_the_service_and_says_what_serves() -> None:
    done = cudnn_actor_here("doctor", "--device", "cpu")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    for words in ("service", "in a thread", "in a process"):
        assert any(words in line and "works" in line and "in part" not in line for line in lines)
    assert any("device" in line and "cpu" in line for line in lines)


def test_the_findings_are_data_too() -> None:
    done = cudnn_actor_here("doctor", "--json", "--device", "cpu")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert found["check"]["ok"]
    assert found["check"]["device"] == "cpu"
    assert found["check"]["reason"]
    assert {name: check["ok"] for name, check in found["isolations"].items()} == {
        "thread": True,
        "process": True,
    }
    assert found["obstacles"] == []
    assert found["python"].endswith(platform.python_version())
    assert found["required"]["numpy"] == np.__version__
    assert found["cores"] >= 1


DENIED = """
import errno, os, resource, sys
{denial}
def denied(*_, **__):
    raise OSError(errno.EPERM, os.strerror(errno.EPERM))
{call}
from cudnn_actor.cli import main
sys.exit(main(["doctor", "--json", "--device", "cpu"]))
"""


def denied(*_: object, **__: object) -> None:
    raise OSError(errno.EPERM, os.strerror(errno.EPERM))


@pytest.mark.parametrize(
    ("name", "value", "what", "works"),
    [
        ("sys.executable", "/nowhere/python", "there is no Python for worker", ["thread"]),
        ("sys.frozen", True, "there is no Python for worker", ["thread"]),
        ("os.pidfd_open", denied, "pidfd_open is denied", ["thread"]),
        ("os.memfd_create", denied, "memfd_create is denied", []),
    ],
)
def test_where_no_worker_can_start_it_says_which_isolation_works_and_the_fix(
    name: str, value: object, what: str, works: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    close_launchers()  # what has been started already does not ask again
    monkeypatch.setattr(name, value, raising=False)
    _says_what_works_and_the_fix(cudnn_actor_here("doctor", "--json", "--device", "cpu"), what, works)


@pytest.mark.parametrize(
    ("denial", "call", "what", "works"),
    [
        ("os.devnull = '/nowhere/null'", "", "/nowhere/null cannot be used", ["thread"]),
        ("", "del os.memfd_create", "memfd_create is denied", []),
    ],
)
def test_what_was_missing_before_the_imports_is_told_as_well(
    denial: str, call: str, what: str, works: list[str]
) -> None:
    _says_what_works_and_the_fix(python("-c", DENIED.format(denial=denial, call=call)), what, works)


def _says_what_works_and_the_fix(done: subprocess.CompletedProcess[str], what: str, works: list[str]) -> None:
    found = json.loads(done.stdout)
    assert done.returncode == 1
    assert [name for name, check in found["isolations"].items() if check["ok"]] == works
    (obstacle,) = found["obstacles"]
    assert obstacle["what"].startswith(what)
    assert obstacle["fix"]
    assert done.stderr.splitlines()[-1].endswith("reason=shutdown detail=closed"), "it ended in a traceback"


def test_people_are_told_of_it_in_lines() -> None:
    code = DENIED.format(denial="os.devnull = '/nowhere/null'", call="").replace('"--json", ', "")
    done = forked("-c", code)
    assert done.returncode == 1
    assert "works in part" in done.stdout
    assert "mknod -m 666 /dev/null" in done.stdout
    assert not re.search("^Traceback", done.stderr, re.MULTILINE)  # of a log line there may be one


SHORT_FOR_A_PROCESS = """
import cudnn_actor.cli.diagnosis as diagnosis
bounded, limit = diagnosis._run_bounded, diagnosis._LIMIT_S
def _bounded(device, isolation):
    diagnosis._LIMIT_S = 5.0 if isolation == "process" else limit
    return bounded(device, isolation)
diagnosis._run_bounded, diagnosis._END_S = _bounded, 1.0
"""


def test_a_forkserver_that_hangs_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(HANGING_FORKSERVER)
    places = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    code = f"import os; os.environ['PYTHONPATH'] = {places!r}\n{SHORT_FOR_A_PROCESS}"
    done = forked(
        "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{code}{DENIED.format(denial='', call='')}"
    )
    found = json.loads(done.stdout)
    assert done.returncode == 1
    assert found["isolations"]["thread"]["ok"]
    assert found["isolations"]["process"]["detail"] == "no answer in 5 s"


@pytest.mark.parametrize("closed", [*([(0,), (1,), (2,)] if WHOLE else []), (0, 2), (0, 1, 2)])
def test_it_works_with_closed_standard_descriptors(closed: tuple[int, ...]) -> None:
    shut = " ".join(f"{number}>&-" for number in closed)
    command = f'exec "$0" -m cudnn_actor.cli doctor --device cpu {shut}'
    done = subprocess.run(
        ["/bin/sh", "-c", command, sys.executable],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert 1 in closed or "in a process  works" in done.stdout


def test_few_descriptors_are_a_warning() -> None:
    limit = "resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))"
    done = forked("-c", DENIED.format(denial=limit, call=""))
    found = json.loads(done.stdout)
    (obstacle,) = found["obstacles"]
    assert "only 32 descriptors" in obstacle["what"]
    assert not obstacle["prevents"]
    assert done.returncode == 0


ON_THE_CPU = """
import sys
from cudnn_actor.cli import main
sys.exit(main(["doctor", "--json", "--device", "cpu"]))
"""
IN_A_THREAD = """
import cudnn_actor.cli.diagnosis as diagnosis
bounded = diagnosis._run_bounded
diagnosis._run_bounded = lambda device, isolation: bounded(device, "thread")
"""
DOCTOR = ("" if WHOLE else IN_A_THREAD) + ON_THE_CPU.replace(', "--device", "cpu"', "")
IN_LINES = DOCTOR.replace(', "--json"', "")


def doctor(machine: Machine, program: str = DOCTOR, **environment: str) -> tuple[int, dict[str, Any]]:
    """What the doctor finds on a machine, and its exit status.

    Except in `make test-all`, `DOCTOR` tries the service in a thread for both isolations, since a process
    takes a new interpreter. How it tries that, the tests show that run the command.
    """
    done = machine.run("-c", program, **environment)
    return done.returncode, json.loads(done.stdout)


def whats(found: dict[str, Any]) -> list[str]:
    return [problem["what"] for problem in found["problems"]]


def test_without_driver_and_packages_nothing_is_wrong_and_what_is_missing_has_its_command(
    tmp_path: Path,
) -> None:
    status, found = doctor(Machine(tmp_path), WITHOUT_DRIVER + DOCTOR)
    assert (status, found["problems"], found["gpu_wanted"]) == (0, [], False)
    (missing,) = (one for one in found["missing"] if "CuPy" in one["what"])
    assert missing["command"] == f'pip install -e "{CLONE}[cuda13]"'


def test_a_machine_without_a_gpu_is_told_that_the_cpu_serves_and_given_no_order(tmp_path: Path) -> None:
    done = Machine(tmp_path).run("-c", WITHOUT_DRIVER + IN_LINES)
    assert re.search(
        r"✓ device +cpu +there is no GPU to use: there is no NVIDIA driver \([^()]+\)$", done.stdout, re.M
    )
    assert re.search(r"- NVIDIA driver +none .*; if this machine has an NVIDIA GPU, install its", done.stdout)


def test_packages_that_only_some_commands_need_have_their_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "first_version", lambda names: None)
    monkeypatch.setattr(diagnosis, "try_both", lambda device: {"thread": TRIED, "process": TRIED})
    commands = {one.what: one.command for one in diagnosis.diagnose("cpu").missing}
    assert commands["onnx"] == f'pip install -e "{CLONE}[onnx]"'
    assert commands["onnxruntime"] == f'pip install -e "{CLONE}[cpu]"'
    assert commands["matplotlib"] == f'pip install -e "{CLONE}[demo]"'


def test_a_gpu_that_nobody_installed_packages_for_is_a_failure_unless_the_cpu_is_asked_for(
    tmp_path: Path,
) -> None:
    status, found = doctor(bare_machine(tmp_path))
    assert (status, found["gpu_wanted"]) == (1, True)
    assert "CuPy is not installed" in whats(found)
    assert found["missing"] == [] or "CuPy" not in found["missing"][0]["what"]
    assert [gpu["name"] for gpu in found["driver"]["gpus"]] == ["Toy GPU"]
    status, found = doctor(bare_machine(tmp_path / "same"), ON_THE_CPU)
    assert (status, found["gpu_wanted"]) == (0, False)


def test_a_driver_that_does_not_work_is_a_failure_and_why_the_cpu_serves(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.driver(gpus=0, status=999)
    done = machine.run("-c", IN_LINES)
    assert done.returncode == 1
    assert re.search(
        r"✗ NVIDIA driver .* does not work: cuInit returned CUDA_ERROR_OF_A_TOY \(999\)", done.stdout
    )
    assert re.search(r"device +cpu +the NVIDIA driver does not work \(cuInit returned", done.stdout)
    assert "does not work: does not work" not in done.stdout
    assert "it was asked for" not in done.stdout


def test_a_gpu_that_should_work_and_does_not_is_a_failure(tmp_path: Path) -> None:
    machine = bare_machine(tmp_path)
    machine.install("cupy-cuda13x", "14.2.0")
    status, found = doctor(machine)
    assert (status, found["gpu_wanted"]) == (1, True)
    assert found["check"]["ok"]  # on the CPU


def test_a_cudnn_whose_parts_do_not_fit_is_found_and_never_run(tmp_path: Path) -> None:
    machine = whole_machine(tmp_path)
    machine.cudnn(status=5003)
    status, found = doctor(machine)
    assert status == 1
    (problem,) = found["problems"]
    assert problem["what"] == "cuDNN's libraries do not match each other"
    assert "cudnnGraphVersionCheck returned CUDNN_STATUS_SUBLIBRARY_VERSION_MISMATCH" in problem["detail"]
    assert "LD_LIBRARY_PATH" in problem["fix"]
    assert found["check"]["device"] == "cpu"
    assert found["cudnn"]["version"] == "9.28.0"
    assert Path(found["cudnn"]["path"]).parent == machine.lib


def test_an_empty_library_in_the_library_path_is_found(tmp_path: Path) -> None:
    machine = whole_machine(tmp_path)
    (machine.lib / "libcudnn.so.9").write_bytes(b"")
    status, found = doctor(machine)
    assert status == 1
    assert "libcudnn.so.9 is not a library" in whats(found)


def test_packages_of_cuda_13_on_a_driver_of_cuda_12_are_found(tmp_path: Path) -> None:
    machine = whole_machine(tmp_path)
    machine.driver(gpus=1, cuda=12_080)
    status, found = doctor(machine)
    assert status == 1
    assert "the NVIDIA driver is too old for packages of CUDA 13" in whats(found)


def test_hidden_gpus_are_no_failure(tmp_path: Path) -> None:
    machine = whole_machine(tmp_path, gpus=0)
    status, found = doctor(machine, CUDA_VISIBLE_DEVICES="")
    assert status == 0
    assert whats(found) == ["no GPU is visible to this process"]


def test_a_device_that_is_not_there_fails_with_the_reason() -> None:
    done = cudnn_actor_here("doctor", "--device", "cuda:77")
    assert done.returncode == 1
    assert "device='cuda:77'" in done.stdout


def test_the_doctor_runs_isolated_and_imports_no_cuda_package() -> None:
    code = (
        "import sys; from cudnn_actor.cli import main; status = main(['doctor', '--device', 'cpu']); "
        "assert not {'cupy', 'cudnn', 'cuda', 'matplotlib', 'PIL'} & set(sys.modules); sys.exit(status)"
    )
    done = python("-I", "-c", code)
    assert (done.returncode, done.stderr) == (0, "")
