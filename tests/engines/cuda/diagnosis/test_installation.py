"""What is wrong with an installation of the CUDA engine, and what to do about it."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from cudnn_actor.engines.cuda.diagnosis.gpus import Driver, Gpu, find_driver
from cudnn_actor.engines.cuda.diagnosis.inventory import Inventory, Package, take_inventory
from cudnn_actor.engines.cuda.diagnosis.rules import never_run, problems_of
from cudnn_actor.engines.cuda.library.cudnn_files import (
    MAIN,
    SONAMES,
    Library,
    Loading,
    SearchPath,
    find_cudnn,
    load_apart,
    mapped_cudnn,
)
from cudnn_actor.engines.cuda.library.versions import RUN

from ....in_one_test import cases_in_one_test
from ...broken_machines import CLONE, PACKAGES, Machine, bare_machine, whole_machine

DRIVER = Driver(
    found=True,
    detail="supports CUDA up to 13.0",
    version="580.65.06",
    cuda=13_000,
    gpus=(Gpu(name="Toy GPU", capability="9.0", memory_bytes=2**33),),
)


def library(name: str, folder: str = "/site/nvidia/cudnn/lib", version: str | None = None) -> Library:
    return Library(name=name, path=f"{folder}/{name}", version=version)


CUDNN = tuple(map(library, SONAMES))
WHOLE = Inventory(
    driver=DRIVER,
    packages=tuple(Package(name=name, version=version, folder="/site") for name, version in PACKAGES.items()),
    libraries=CUDNN,
    nvrtc="/site/nvidia/cu13/lib/libnvrtc.so.13",
    loading=Loading(version="9.28.0", cuda=13, mapped=CUDNN),
)


def but(**changes: object) -> Inventory:
    """The whole installation, but for this."""
    return msgspec.structs.replace(WHOLE, **changes)


def with_packages(**versions: str | None) -> Inventory:
    """The whole installation with other versions of packages, or without them."""
    packages = PACKAGES | {name.replace("_", "-"): version for name, version in versions.items()}
    return but(packages=tuple(Package(name=n, version=v, folder="/site") for n, v in packages.items() if v))


def with_driver(**changes: object) -> Inventory:
    return but(driver=msgspec.structs.replace(DRIVER, **changes))


def test_nothing_is_wrong_with_a_whole_installation() -> None:
    assert list(problems_of(WHOLE)) == []


PREVENTING = {
    "no driver": (
        with_driver(found=False, library=False, version=None, cuda=0, gpus=()),
        ("there is no NVIDIA driver", 'device="cpu"'),
    ),
    "a container that was given no driver": (
        with_driver(found=False, library=False, cuda=0, gpus=()),
        ("this process has no NVIDIA driver library", "docker run --gpus all"),
    ),
    "a driver that does not work": (
        with_driver(found=False, detail="does not work: cuInit says ... (803)", cuda=0, gpus=()),
        ("the NVIDIA driver does not work", "restart the machine"),
    ),
    "no GPU": (with_driver(gpus=()), ("there is no GPU", 'device="cpu"')),
    "hidden GPUs": (
        msgspec.structs.replace(with_driver(gpus=()), visible=""),
        ("no GPU is visible to this process", "unset CUDA_VISIBLE_DEVICES"),
    ),
    "packages of CUDA 13 on a driver of CUDA 12": (
        with_driver(cuda=12_080, detail="supports CUDA up to 12.8"),
        ("the NVIDIA driver is too old for packages of CUDA 13", "[cuda12]"),
    ),
    "no CuPy": (with_packages(cupy_cuda13x=None), ("CuPy is not installed", "[cuda13]")),
    "no bindings": (with_packages(cuda_bindings=None), ("cuda-bindings is not installed", "[cuda13]")),
    "no frontend": (
        with_packages(nvidia_cudnn_frontend=None),
        ("the cuDNN frontend is not installed", "[cuda13]"),
    ),
    "an old frontend": (
        with_packages(nvidia_cudnn_frontend="1.9.1"),
        ("the cuDNN frontend is too old", "nvidia-cudnn-frontend>=1.32"),
    ),
    "no cuDNN": (but(libraries=()), ("cuDNN is not installed", "[cuda13]")),
    "an empty cuDNN": (
        but(libraries=(Library(name=MAIN, path="/else/libcudnn.so.9", whole=False),)),
        ("libcudnn.so.9 is not a library", "remove /else from LD_LIBRARY_PATH"),
    ),
    "mixed versions on disk": (
        but(libraries=(library(MAIN, "/usr/lib", "9.19.0"), library(SONAMES[1], "/old", "9.8.0"))),
        ("cuDNN's libraries are of different versions", "LD_LIBRARY_PATH"),
    ),
    "a cuDNN that cannot be loaded": (
        but(loading=Loading(error="undefined symbol: cudnnGetVersion")),
        ("cuDNN cannot be loaded", "--force-reinstall"),
    ),
    "sub-libraries that refuse": (
        but(loading=Loading(version="9.28.0", failed={"cudnnCnnVersionCheck": "MISMATCH"})),
        ("cuDNN's libraries do not match each other", "LD_LIBRARY_PATH"),
    ),
}
DOUBTFUL = {
    "bindings of another CUDA": (
        with_packages(cuda_bindings="12.9.1"),
        ("CuPy and cuda-bindings are for different CUDA versions", "cuda-bindings==13.*"),
    ),
    "two cuDNN packages": (
        with_packages(nvidia_cudnn_cu12="9.28.0.42"),
        ("cuDNN is installed twice", "pip uninstall nvidia-cudnn-cu13 nvidia-cudnn-cu12"),
    ),
    "two CuPy packages": (
        with_packages(cupy_cuda12x="14.2.0"),
        ("CuPy is installed twice", "pip uninstall cupy-cuda13x cupy-cuda12x"),
    ),
    "two folders": (
        but(libraries=(CUDNN[0], library(SONAMES[1], "/old"))),
        ("cuDNN's libraries come from different folders", "LD_LIBRARY_PATH"),
    ),
    "two folders in a trial": (
        but(loading=Loading(version="9.28.0", cuda=13, mapped=(CUDNN[0], library(SONAMES[1], "/old")))),
        ("cuDNN's libraries come from different folders", "LD_LIBRARY_PATH"),
    ),
    "a second cuDNN": (
        but(mapped=(library(MAIN, "/torch"),)),
        ("this process would load a second cuDNN", "LD_LIBRARY_PATH"),
    ),
    "a mixture in this process": (
        but(mapped=(CUDNN[0], library(SONAMES[1], "/torch", "9.8.0"))),
        ("cuDNN's libraries come from different folders", "LD_LIBRARY_PATH"),
    ),
    "cuDNN of another CUDA": (
        but(loading=Loading(version="9.28.0", cuda=12, mapped=CUDNN)),
        ("cuDNN and CuPy are for different CUDA versions", "[cuda13]"),
    ),
    "a cuDNN that the GPU tests have not run with": (
        but(loading=Loading(version="9.99.0", cuda=13, mapped=CUDNN)),
        (
            "cuDNN 9.99.0 has not passed the GPU tests of cudnn-actor",
            f"nvidia-cudnn-cu13=={RUN[-1]}.*",
        ),
    ),
    "a cuDNN package that is too old": (
        but(packages=with_packages(nvidia_cudnn_cu13="9.14.0.64").packages, loading=None),
        (
            "cuDNN 9.14.0.64 has not passed the GPU tests of cudnn-actor",
            f"nvidia-cudnn-cu13=={RUN[-1]}.*",
        ),
    ),
    "no run-time compiler": (
        but(nvrtc=""),
        ("CUDA's run-time compiler was not found", "cupy-cuda13x[ctk]"),
    ),
}


@cases_in_one_test
@pytest.mark.parametrize("name", PREVENTING)
def test_what_prevents_the_use_of_a_gpu_is_named_with_its_fix(name: str) -> None:
    found, (what, fix) = PREVENTING[name]
    first = next(problem for problem in problems_of(found) if problem.prevents)
    assert first.what == what
    assert fix in first.fix
    assert first.detail


@cases_in_one_test
@pytest.mark.parametrize("name", DOUBTFUL)
def test_what_may_go_wrong_is_named_and_prevents_nothing(name: str) -> None:
    found, (what, fix) = DOUBTFUL[name]
    (problem,) = problems_of(found)
    assert (problem.what, problem.prevents) == (what, False)
    assert fix in problem.fix


def test_an_older_cudnn_is_told_apart_from_a_newer_one() -> None:
    older, newer = (never_run(but(loading=Loading(version=text))) for text in ("9.14.0", "9.99.0"))
    assert older is not None
    assert "misaligned addresses" in older.detail
    assert newer is not None
    assert "misaligned" not in newer.detail


@pytest.mark.parametrize("minor", RUN)
def test_a_version_that_was_run_is_known_by_its_minor_version(minor: str) -> None:
    assert never_run(but(loading=Loading(version=f"{minor}.7"))) is None


def test_a_driver_of_cuda_12_is_offered_the_packages_of_cuda_12() -> None:
    bare = with_driver(cuda=12_080)
    problems = list(problems_of(msgspec.structs.replace(bare, packages=(), libraries=(), loading=None)))
    assert {problem.fix for problem in problems} == {f'pip install -e "{CLONE}[cuda12]"'}


# On folders and files.


def files(folder: Path, *names: str) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_bytes(b"\x7fELF")
    return str(folder)


def test_a_library_path_goes_before_the_packages_and_those_before_the_system(tmp_path: Path) -> None:
    first, packages, system = (files(tmp_path / name, MAIN) for name in ("first", "packages", "system"))
    everything = SearchPath(first=(first,), packages=(packages,), system=(system,))
    for search, folder in (
        (everything, first),
        (SearchPath(packages=(packages,), system=(system,)), packages),
        (SearchPath(system=(system,)), system),
    ):
        assert find_cudnn(search)[0].folder == folder


def test_a_stray_sub_library_in_the_library_path_is_the_one_that_is_loaded(tmp_path: Path) -> None:
    packages = files(tmp_path / "packages", *SONAMES)
    stray = files(tmp_path / "stray", "libcudnn_ops.so.9")
    found = find_cudnn(SearchPath(first=(stray,), packages=(packages,)))
    assert [one.name for one in found if one.folder == stray] == ["libcudnn_ops.so.9"]
    assert any("different folders" in p.what for p in problems_of(but(libraries=found)))


def test_a_version_in_a_file_s_name_is_found_behind_the_link(tmp_path: Path) -> None:
    folder = files(tmp_path, f"{MAIN[:-2]}.9.19.0")
    (tmp_path / MAIN).symlink_to(f"{MAIN[:-2]}.9.19.0")
    assert find_cudnn(SearchPath(system=(folder,)))[0].version == "9.19.0"


def test_an_empty_file_in_the_library_path_is_found_out(tmp_path: Path) -> None:
    (tmp_path / MAIN).touch()
    found = take_inventory(DRIVER, path=[], search=SearchPath(first=(str(tmp_path),)), environ={})
    assert any(p.what == "libcudnn.so.9 is not a library" for p in problems_of(found))


def test_packages_are_known_by_what_they_say_of_themselves(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    for name, version in PACKAGES.items():
        machine.install(name, version)
    found = take_inventory(DRIVER, path=[str(machine.site)], search=SearchPath(), environ={})
    assert {package.name: package.version for package in found.packages} == PACKAGES


def test_only_cudnn_s_own_files_count_as_mapped() -> None:
    maps = """
7f00-7f01 r-xp 00000000 08:01 11  /a b/libcudnn_ops.so.9
7f01-7f02 r--p 00000000 08:01 11  /a b/libcudnn_ops.so.9
7f02-7f03 r-xp 00000000 08:01 12  /usr/lib/libcudnn.so.9.19.0
7f03-7f04 r-xp 00000000 08:01 13  /usr/lib/libcudnn_frontend.txt
7f04-7f05 rw-p 00000000 00:00 0
"""
    found = {(one.name, one.folder, one.version) for one in mapped_cudnn(maps)}
    assert found == {("libcudnn_ops.so.9", "/a b", None), ("libcudnn.so.9", "/usr/lib", "9.19.0")}


@pytest.mark.parametrize("content", [b"", b"\x7fELF and no more"])
def test_a_broken_library_fails_in_a_process_of_its_own(content: bytes, tmp_path: Path) -> None:
    (tmp_path / MAIN).write_bytes(content)
    assert load_apart(str(tmp_path / MAIN)).error


def test_a_trial_load_tells_version_cuda_and_what_does_not_fit(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.cudnn(status=5003)
    loading = load_apart(str(machine.lib / MAIN))
    assert (loading.error, loading.version, loading.cuda) == ("", "9.28.0", 13)
    assert loading.failed == {"cudnnGraphVersionCheck": "CUDNN_STATUS_SUBLIBRARY_VERSION_MISMATCH"}
    assert [one.name for one in loading.mapped] == [MAIN]


def test_where_no_process_can_be_started_the_trial_load_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    assert "no process could be started to load it in" in load_apart(str(tmp_path / MAIN)).error


def test_a_library_that_ends_its_process_is_reported(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.compile(MAIN, "__attribute__((constructor)) void f(void) { __builtin_trap(); }")
    assert "ends the process" in load_apart(str(machine.lib / MAIN)).error


# The driver.


def test_a_machine_without_a_driver_is_no_error() -> None:
    driver = find_driver("libcuda-of-no-machine.so")
    assert (driver.found, driver.library, driver.gpus) == (False, False, ())
    assert "there is no libcuda-of-no-machine.so" in driver.detail


def test_a_library_without_the_driver_in_it_is_no_error() -> None:
    driver = find_driver("libc.so.6")
    assert (driver.found, driver.library) == (False, True)
    assert "cuInit" in driver.detail


@pytest.mark.parametrize("gpus", [0, 2])
def test_a_driver_says_what_it_serves(gpus: int, tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.driver(gpus, cuda=12_080)
    driver = find_driver(str(machine.lib / "libcuda.so.1"))
    assert driver.found
    assert driver.cuda == 12_080
    assert driver.gpus == (Gpu(name="Toy GPU", capability="9.0", memory_bytes=2**33),) * gpus


# In a process on such a machine.

ASK = """
import json, sys
from cudnn_actor.engines.cuda.diagnosis.installation import unavailable
answer = unavailable()
loaded = sorted({"cupy", "cudnn", "cuda"} & set(sys.modules))
print(json.dumps([answer, loaded, "libcudnn" in open("/proc/self/maps").read()]))
"""


def asked(machine: Machine, **environment: str) -> str | None:
    done = machine.run("-c", ASK, **environment)
    assert done.returncode == 0, done.stderr
    answer, loaded, mapped = json.loads(done.stdout)
    assert (loaded, mapped) == ([], False)
    return None if answer is None else str(answer)


def test_a_whole_machine_can_be_used_and_nothing_is_loaded_to_find_out(tmp_path: Path) -> None:
    assert asked(whole_machine(tmp_path)) is None


def test_a_machine_without_packages_names_the_first_that_is_missing(tmp_path: Path) -> None:
    answer = asked(bare_machine(tmp_path))
    assert answer == (
        f'CuPy is not installed (arrays, streams and events need it): pip install -e "{CLONE}[cuda13]"'
    )


def test_a_hidden_gpu_is_named_as_hidden(tmp_path: Path) -> None:
    machine = whole_machine(tmp_path, gpus=0)
    answer = asked(machine, CUDA_VISIBLE_DEVICES="")
    assert answer is not None
    assert "CUDA_VISIBLE_DEVICES='' hides them" in answer
