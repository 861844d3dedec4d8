"""Which engine serves a device, and what is said where none does."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cudnn_actor.engines import choose_engine
from cudnn_actor.engines.cuda.diagnosis.gpus import _NODES, Gpu, find_driver_apart
from cudnn_actor.protocol import InvalidRequest

from ..in_one_test import cases_in_one_test
from ..log_lines import capture_logs
from ..patience import PATIENCE_S
from ..whole import few
from .broken_machines import CLONE, WITHOUT_DRIVER, Machine, bare_machine, whole_machine
from .devices import why_not

ASK = """
import json, os, sys
from pathlib import Path
from tests.log_lines import capture_logs
from cudnn_actor.engines import choose_engine
from cudnn_actor.protocol import InvalidRequest
def ask(device, how):
    started = []
    sys.addaudithook(lambda event, _: started.append(event) if event == "subprocess.Popen" else None)
    with capture_logs() as lines:
        for _ in range(2):  # the second time from what is remembered
            del lines[:]
            try:
                choice = choose_engine(device, apart=how == "apart")
                answer = [choice.device, choice.reason, choice.outlives_context, choice.adopt is not None]
            except InvalidRequest as error:
                answer = str(error)
    names = {line.rpartition("/")[2] for line in Path("/proc/self/maps").read_text().splitlines()}
    return {
        "answer": answer,
        "lines": [[line["log_level"], line["device"], line["reason"]] for line in lines],
        "started": len(started),
        "imported": sorted({"cupy", "cudnn", "cuda"} & {name.partition(".")[0] for name in sys.modules}),
        "mapped": sorted(name for name in names if name.startswith(("libcuda", "libcudnn", "libcudart"))),
    }
for device, how in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
    if (pid := os.fork()) == 0:  # a process that has asked nothing yet
        print(json.dumps(ask(device, how)), flush=True)
        os._exit(0)
    os.waitpid(pid, 0)
"""


Said = dict[str, Any]
Asked = tuple[Any, list[list[str]]]


def reports(
    machine: Machine, *questions: tuple[str, str], program: str = ASK, **environment: str
) -> list[Said]:
    """For each device and way: what a process chooses, logs, and what it started and loaded for that."""
    done = machine.run("-c", program, *itertools.chain(*questions), **environment)
    said: list[Said] = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(said) == len(questions), done.stderr
    return said


def asked_for_each(machine: Machine, *devices: str, **environment: str) -> dict[str, tuple[Said, Said]]:
    """What processes say that ask the driver themselves, and apart. One interpreter forks all of them."""
    questions = [(device, how) for device in devices for how in ("here", "apart")]
    said = iter(reports(machine, *questions, **environment))
    return {device: (next(said), next(said)) for device in devices}


def agreed(here: Said, apart: Said) -> Asked:
    """What both choose, and what they log.

    The same whether a process asks the driver itself or apart, but for `adopt`, the answer's last; if apart,
    it has loaded nothing.
    """
    assert (apart["imported"], apart["mapped"]) == ([], [])
    assert here["lines"] == apart["lines"]
    if isinstance(here["answer"], str):
        assert here["answer"] == apart["answer"]
        return here["answer"], here["lines"]
    *answer, can_adopt = here["answer"]
    assert apart["answer"] == [*answer, False]
    assert can_adopt == (answer[0] != "cpu")
    return answer, here["lines"]


def asked(machine: Machine, device: str, **environment: str) -> Asked:
    """What a process on a machine chooses, and what it logs."""
    return agreed(*asked_for_each(machine, device, **environment)[device])


@pytest.fixture(scope="module")
def with_two_gpus(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Said, Said]]:
    """What is said on a whole machine, for each device that is asked for."""
    machine = whole_machine(tmp_path_factory.mktemp("whole") / "machine", gpus=2)
    return asked_for_each(machine, "auto", "cuda", "cuda:1", "cuda:2")


@pytest.fixture(scope="module")
def without_packages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Said, Said]]:
    """The same on a machine with a GPU, and none of the packages that use it."""
    return asked_for_each(bare_machine(tmp_path_factory.mktemp("bare") / "machine"), "auto", "cuda:0")


@pytest.fixture(scope="module")
def without_gpu(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Said, Said]]:
    """The same on a machine with a driver, and no GPU."""
    machine = Machine(tmp_path_factory.mktemp("none") / "machine")
    machine.driver(gpus=0)
    return asked_for_each(machine, "auto")


@cases_in_one_test
@pytest.mark.parametrize(
    "device", ["", "gpu", "CPU", "cuda:", "cuda:-1", "cuda:x", "cuda:0 ", "cpu:0", None, 0]
)
def test_what_is_no_device_is_refused(device: object) -> None:
    with pytest.raises(InvalidRequest, match=r'is not a device; .*use "auto", "cpu", "cuda" or "cuda:0"'):
        choose_engine(device)  # type: ignore[arg-type]


def test_the_cpu_is_there_for_the_asking() -> None:
    with capture_logs() as lines:
        choice = choose_engine("cpu")
    assert (choice.device, choice.outlives_context, choice.adopt) == ("cpu", True, None)
    assert [(line["event"], line["device"]) for line in lines] == [("device.chosen", "cpu")]


def test_on_a_whole_machine_auto_is_the_first_gpu(with_two_gpus: dict[str, tuple[Said, Said]]) -> None:
    answer, lines = agreed(*with_two_gpus["auto"])
    assert answer == ["cuda:0", "Toy GPU is the first GPU here", False]
    assert lines == [["info", "cuda:0", "Toy GPU is the first GPU here"]]


@pytest.mark.parametrize(("device", "chosen"), [("cuda", "cuda:0"), ("cuda:1", "cuda:1")])
def test_a_gpu_is_there_for_the_asking(
    device: str, chosen: str, with_two_gpus: dict[str, tuple[Said, Said]]
) -> None:
    answer, _ = agreed(*with_two_gpus[device])
    assert answer == [chosen, "it was asked for: Toy GPU", False]


def test_a_gpu_past_the_last_is_refused_with_their_number(
    with_two_gpus: dict[str, tuple[Said, Said]],
) -> None:
    answer, lines = agreed(*with_two_gpus["cuda:2"])
    assert answer == (
        "device='cuda:2': is not a GPU of this machine, which has 2, cuda:0 to cuda:1; use \"cuda:0\""
    )
    assert lines == []


def test_hidden_gpus_do_not_count(tmp_path: Path) -> None:
    answer, _ = asked(whole_machine(tmp_path, gpus=1), "cuda:1", CUDA_VISIBLE_DEVICES="3")
    assert "which by CUDA_VISIBLE_DEVICES=3 shows 1, cuda:0" in str(answer)


def test_a_gpu_without_the_packages_is_refused_with_the_command_that_installs_them(
    without_packages: dict[str, tuple[Said, Said]],
) -> None:
    answer, _ = agreed(*without_packages["cuda:0"])
    assert "CuPy is not installed" in str(answer)
    assert f'pip install -e "{CLONE}[cuda13]"; cudnn-actor doctor says more' in str(answer)


def test_a_gpu_that_auto_cannot_use_is_a_warning(without_packages: dict[str, tuple[Said, Said]]) -> None:
    answer, ((level, device, reason),) = agreed(*without_packages["auto"])
    assert answer[0] == "cpu"
    assert (level, device) == ("warning", "cpu")
    assert reason.startswith("there is a GPU (Toy GPU), but CuPy is not installed")
    assert f'pip install -e "{CLONE}[cuda13]"' in reason


@pytest.mark.parametrize("status", few([803, 999], 1))
def test_a_driver_that_does_not_work_is_a_warning(status: int, tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.driver(gpus=0, status=status)
    _, ((level, _, reason),) = asked(machine, "auto")
    assert level == "warning"
    assert reason.startswith(
        f"the NVIDIA driver does not work (cuInit returned CUDA_ERROR_OF_A_TOY ({status})): "
    )


def test_without_a_gpu_auto_is_the_cpu_and_nobody_is_warned(
    without_gpu: dict[str, tuple[Said, Said]],
) -> None:
    answer, ((level, _, reason),) = agreed(*without_gpu["auto"])
    assert answer[0] == "cpu"
    # Device files cannot be taken away: with a driver that finds no GPU behind them, something is broken.
    assert level == ("warning" if any(map(os.path.exists, _NODES)) else "info")
    assert reason.startswith("there is no GPU") or level == "warning"


# In a process of its own.


def test_a_gpu_that_was_found_apart_is_remembered(with_two_gpus: dict[str, tuple[Said, Said]]) -> None:
    _, apart = with_two_gpus["auto"]
    assert apart["started"] == 1


def test_a_machine_without_a_gpu_is_asked_again(without_gpu: dict[str, tuple[Said, Said]]) -> None:
    _, apart = without_gpu["auto"]
    assert apart["started"] == 2


def test_where_there_is_no_driver_no_process_is_started(tmp_path: Path) -> None:
    (said,) = reports(Machine(tmp_path), ("auto", "apart"), program=WITHOUT_DRIVER + ASK)
    assert said["answer"][0] == "cpu"
    assert "there is no libcuda-of-no-machine.so" in said["answer"][1]
    assert (said["started"], said["imported"], said["mapped"]) == (0, [], [])


@pytest.mark.gpu
def test_on_this_machine_nothing_of_cuda_is_loaded_to_choose_apart(tmp_path: Path) -> None:
    if (why := why_not("cuda")) is not None:
        pytest.skip(why)
    done = subprocess.run(
        [sys.executable, "-c", ASK, "auto", "apart"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    said = json.loads(done.stdout)
    assert said["answer"][0] == "cuda:0"
    assert (said["started"], said["imported"], said["mapped"]) == (1, [], [])


@pytest.mark.parametrize("gpus", [0, 2])
def test_a_driver_says_apart_what_it_serves(gpus: int, tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.driver(gpus, cuda=12_080)
    driver = find_driver_apart(str(machine.lib / "libcuda.so.1"))
    assert (driver.found, driver.library, driver.cuda) == (True, True, 12_080)
    assert driver.gpus == (Gpu(name="Toy GPU", capability="9.0", memory_bytes=2**33),) * gpus
    assert str(machine.lib) not in Path("/proc/self/maps").read_text()


def test_gpus_are_remembered_for_the_environment_in_which_they_were_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(tmp_path)
    library = str(machine.lib / "libcuda.so.1")
    machine.driver(gpus=2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert len(find_driver_apart(library).gpus) == 2
    machine.driver(gpus=1)
    assert len(find_driver_apart(library).gpus) == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert len(find_driver_apart(library).gpus) == 1


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("abort();", "querying it ends the process with SIGABRT"),
        ("_exit(7);", "querying it ends the process with status 7"),
        ("for (;;) pause();", "it does not answer within"),
    ],
)
def test_whatever_a_driver_does_apart_it_is_an_answer_here(body: str, words: str, tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    code = f"#include <stdlib.h>\n#include <unistd.h>\nint cuInit(unsigned flags) {{ {body} return 0; }}"
    machine.compile("libcuda.so.1", code)
    within_s = 2.0 if "pause" in body else PATIENCE_S
    driver = find_driver_apart(str(machine.lib / "libcuda.so.1"), within_s=within_s)
    assert (driver.found, driver.library, driver.gpus) == (False, True, ())
    assert words in driver.detail


def test_without_an_interpreter_to_start_the_driver_is_not_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(tmp_path)
    machine.driver(gpus=1)
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    driver = find_driver_apart(str(machine.lib / "libcuda.so.1"))
    assert "no process could be started" in driver.detail


def test_a_cudnn_that_was_never_run_is_a_warning_once(tmp_path: Path) -> None:
    machine = whole_machine(tmp_path)
    library = machine.lib / "libcudnn.so.9"
    library.rename(machine.lib / "libcudnn.so.9.99.0")
    library.symlink_to(machine.lib / "libcudnn.so.9.99.0")
    done = machine.run("-c", CHOOSE_TWICE)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [
        ["info", "device.chosen", None],
        [
            "warning",
            "cudnn.untried",
            "cuDNN 9.99.0 has not passed the GPU tests of cudnn-actor",
        ],
        ["info", "device.chosen", None],
    ]


CHOOSE_TWICE = """
import json
from tests.log_lines import capture_logs
from cudnn_actor.engines import choose_engine
with capture_logs() as lines:
    choose_engine("cuda:0", apart=True)
    choose_engine("cuda:0", apart=True)
print(json.dumps([[line["log_level"], line["event"], line.get("problem")] for line in lines]))
"""


def test_a_worker_can_make_what_is_chosen(tmp_path: Path) -> None:
    devices = ["cpu", "cuda:0"]
    done = whole_machine(tmp_path).run("-c", MAKE, *devices)
    assert done.returncode == 0, done.stderr
    for device, line in zip(devices, done.stdout.splitlines(), strict=True):
        name, preloaded, host_arenas = json.loads(line)
        assert name == device
        assert f"cudnn_actor.engines.{device.partition(':')[0]}" in str(preloaded)
        assert host_arenas == (device == "cpu")


MAKE = """
import importlib, json, os, sys
from cudnn_actor.engines import choose_engine
def make(device):
    choice = choose_engine(device, apart=True)
    module, _, name = choice.worker.make.partition(":")
    engine = getattr(importlib.import_module(module), name)(*choice.worker.arguments)
    assert module in choice.preload
    print(json.dumps([engine.device, choice.preload, choice.host_arenas]), flush=True)
for device in sys.argv[1:]:
    if (pid := os.fork()) == 0:
        make(device)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert status == 0, device
"""
