"""The doctor: what was found, what is missing, and whether the service works."""

from __future__ import annotations

import json
import platform

import numpy as np

from cudnn_actor.cli.driver import find_driver

from .terminal import cudnn_actor, python


def test_the_doctor_tries_the_service_and_says_what_serves() -> None:
    done = cudnn_actor("doctor")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert any("service" in line and "works" in line for line in lines)
    assert any('device="auto"' in line and "cpu" in line for line in lines)
    assert "This release runs the CPU engine only" in done.stdout


def test_the_findings_are_data_too() -> None:
    done = cudnn_actor("doctor", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert found["trial"]["ok"]
    assert found["trial"]["device"] == "cpu"
    assert found["trial"]["reason"]
    assert found["python"].endswith(platform.python_version())
    assert found["required"]["numpy"] == np.__version__
    assert found["cores"] >= 1


def test_what_is_missing_comes_with_the_command_that_installs_it() -> None:
    found = json.loads(cudnn_actor("doctor", "--json").stdout)
    absent = [name for name, version in found["packages"].items() if version is None]
    named = ", ".join(missing["what"] for missing in found["missing"])
    for name in absent:
        assert name in named
    for missing in found["missing"]:
        assert missing["command"].startswith('pip install "cudnn-actor[')


def test_the_doctor_runs_isolated_and_imports_no_cuda_package() -> None:
    code = (
        "import sys; from cudnn_actor.cli import main; status = main(['doctor']); "
        "assert not {'cupy', 'cudnn', 'cuda', 'matplotlib', 'PIL'} & set(sys.modules); sys.exit(status)"
    )
    done = python("-I", "-c", code)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_machine_without_a_driver_is_no_error() -> None:
    driver = find_driver("libcuda-of-no-machine.so")
    assert not driver.found
    assert driver.gpus == ()
    assert "there is no libcuda-of-no-machine.so" in driver.detail


def test_a_library_without_the_driver_in_it_is_no_error() -> None:
    driver = find_driver("libc.so.6")
    assert not driver.found
    assert "does not work" in driver.detail
