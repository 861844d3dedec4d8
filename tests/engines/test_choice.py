"""Which engine serves a device, and what is said where none does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from cudnn_actor.engines import choose_engine
from cudnn_actor.protocol import InvalidRequest

from .broken_machines import Machine, bare_machine, whole_machine

ASK = """
import json, sys, structlog
from structlog.testing import capture_logs
from cudnn_actor.engines import choose_engine
from cudnn_actor.protocol import InvalidRequest
with capture_logs() as lines:
    try:
        choice = choose_engine(sys.argv[1])
        answer = [choice.device, choice.reason, choice.outlives_context, choice.adopt is not None]
    except InvalidRequest as error:
        answer = str(error)
print(json.dumps([answer, [[line["log_level"], line["device"], line["reason"]] for line in lines]]))
"""


def asked(machine: Machine, device: str, **environment: str) -> tuple[object, list[list[str]]]:
    """What a process on a machine chooses, and what it logs."""
    done = machine.run("-c", ASK, device, **environment)
    assert done.returncode == 0, done.stderr
    answer, lines = json.loads(done.stdout)
    return answer, lines


@pytest.mark.parametrize(
    "device", ["", "gpu", "CPU", "cuda:", "cuda:-1", "cuda:x", "cuda:0 ", "cpu:0", None, 0]
)
def test_what_is_no_device_is_refused(device: object) -> None:
    with pytest.raises(InvalidRequest, match=r'is no device; use "auto", "cpu" or "cuda:0"'):
        choose_engine(device)  # type: ignore[arg-type]


def test_the_cpu_is_there_for_the_asking() -> None:
    with capture_logs() as lines:
        choice = choose_engine("cpu")
    assert (choice.device, choice.outlives_context, choice.adopt) == ("cpu", True, None)
    assert [(line["event"], line["device"]) for line in lines] == [("device.chosen", "cpu")]


def test_on_a_whole_machine_auto_is_the_first_gpu(tmp_path: Path) -> None:
    machine = whole_machine(tmp_path, gpus=2)
    answer, lines = asked(machine, "auto")
    assert answer == ["cuda:0", "Toy GPU is the first GPU here", False, True]
    assert lines == [["info", "cuda:0", "Toy GPU is the first GPU here"]]


@pytest.mark.parametrize(("device", "chosen"), [("cuda", "cuda:0"), ("cuda:1", "cuda:1")])
def test_a_gpu_is_there_for_the_asking(device: str, chosen: str, tmp_path: Path) -> None:
    answer, _ = asked(whole_machine(tmp_path, gpus=2), device)
    assert answer == [chosen, "it was asked for: Toy GPU", False, True]


def test_a_gpu_past_the_last_is_refused_with_their_number(tmp_path: Path) -> None:
    answer, lines = asked(whole_machine(tmp_path, gpus=2), "cuda:2")
    assert answer == 'device=cuda:2: is no GPU of this machine, which has 2, cuda:0 to cuda:1; use "cuda:0"'
    assert lines == []


def test_hidden_gpus_do_not_count(tmp_path: Path) -> None:
    answer, _ = asked(whole_machine(tmp_path, gpus=1), "cuda:1", CUDA_VISIBLE_DEVICES="3")
    assert "which by CUDA_VISIBLE_DEVICES=3 shows 1, cuda:0" in str(answer)


def test_a_gpu_without_the_packages_is_refused_with_the_command_that_installs_them(tmp_path: Path) -> None:
    machine = bare_machine(tmp_path)
    answer, _ = asked(machine, "cuda:0")
    assert "CuPy is not installed" in str(answer)
    assert 'pip install "cudnn-actor[cuda13]"; cudnn-actor doctor says more' in str(answer)


def test_a_gpu_that_auto_cannot_use_is_a_warning(tmp_path: Path) -> None:
    machine = bare_machine(tmp_path)
    answer, ((level, device, reason),) = asked(machine, "auto")
    assert isinstance(answer, list)
    assert answer[0] == "cpu"
    assert (level, device) == ("warning", "cpu")
    assert reason.startswith("there is a GPU (Toy GPU), but CuPy is not installed")
    assert 'pip install "cudnn-actor[cuda13]"' in reason


def test_without_a_gpu_auto_is_the_cpu_and_nobody_is_warned(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.driver(gpus=0)
    answer, ((level, _, reason),) = asked(machine, "auto")
    assert isinstance(answer, list)
    assert answer[0] == "cpu"
    assert level == "info"
    assert reason.startswith("there is no GPU")
