"""Rules that find problems in an inventory of an installation, each with a fix. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from cudnn_actor.engines.cuda.diagnosis.inventory import BINDINGS, CUDNN, CUPY, FRONTEND, Inventory, Package
from cudnn_actor.engines.cuda.library.cudnn_files import MAIN, Library
from cudnn_actor.engines.cuda.library.versions import RUN, is_too_old, was_run
from cudnn_actor.extras import install_command

__all__ = ["Problem", "never_run", "problems_of"]

_OLDEST_FRONTEND = (1, 32)


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """A problem of an installation.

    Parameters
    ----------
    what
        The problem as a clause: "CuPy is not installed".
    detail
        What was found, or what follows from it.
    fix
        What to do about it; a command if there is one.
    prevents
        Whether no GPU can be used until this is fixed; False if it only may cause failures.
    """

    what: str
    detail: str
    fix: str
    prevents: bool = True

    def __str__(self) -> str:
        return f"{self.what} ({self.detail}): {self.fix}"


def problems_of(found: Inventory) -> Iterator[Problem]:
    """The problems of an inventory, the most basic first."""
    yield from _driver_problems(found)
    yield from _missing_packages(found)
    yield from _wrong_majors(found)
    yield from _twins(found)
    yield from _cudnn_problems(found)
    yield from _loading_problems(found)
    yield from _loaded_twice(found)
    yield from _compiler(found)
    if (caution := never_run(found)) is not None:
        yield caution


def _driver_problems(found: Inventory) -> Iterator[Problem]:
    driver = found.driver
    if not driver.library and (driver.version or driver.device_files):
        part = f"driver {driver.version}" if driver.version else "device files of a driver"
        yield Problem(
            what="this process has no NVIDIA driver library",
            detail=f"{driver.detail}, though the machine has {part}",
            fix="in a container, start it with the GPUs: docker run --gpus all ...",
        )
    elif not driver.library:
        yield Problem(
            what="there is no NVIDIA driver",
            detail=driver.detail,
            fix='install the driver of your GPU, or use device="cpu"',
        )
    elif not driver.found:
        yield Problem(
            what="the NVIDIA driver does not work",
            detail=driver.detail,
            fix="restart the machine if the driver was updated, else install it again; nvidia-smi must work",
        )
    elif not driver.gpus and found.visible is not None:
        yield Problem(
            what="no GPU is visible to this process",
            detail=f"CUDA_VISIBLE_DEVICES={found.visible!r} hides them",
            fix="unset CUDA_VISIBLE_DEVICES",
        )
    elif not driver.gpus:
        yield Problem(
            what="there is no GPU",
            detail="the NVIDIA driver works, but finds no GPU",
            fix='use device="cpu", or look for the GPU with nvidia-smi',
        )


def _missing_packages(found: Inventory) -> Iterator[Problem]:
    install = _install(found)
    needed = (
        (CUPY, "CuPy is not installed", "arrays, streams and events need it"),
        (BINDINGS, "cuda-bindings is not installed", "device memory needs it"),
        (FRONTEND, "the cuDNN frontend is not installed", "graphs and plans need nvidia-cudnn-frontend"),
    )
    for names, what, detail in needed:
        if not found.installed_packages(names):
            yield Problem(what=what, detail=detail, fix=install)
    for package in found.installed_packages(FRONTEND):
        if package.numbers[:2] < _OLDEST_FRONTEND:
            yield Problem(
                what="the cuDNN frontend is too old",
                detail=f"{package.name} is {package.version}; 1.32 or newer is needed",
                fix='pip install --upgrade "nvidia-cudnn-frontend>=1.32"',
            )


def _install(found: Inventory) -> str:
    """The command that installs everything, for the CUDA of the installed CuPy, else of the driver."""
    installed = [package.cuda for package in found.installed_packages(CUPY) if package.cuda in (12, 13)]
    wanted = installed[0] if installed else 13
    old_driver = 0 < found.driver.cuda < 13_000  # a driver for CUDA 12 cannot run CUDA 13 programs
    return install_command(f"cuda{12 if old_driver else wanted}")


def _wrong_majors(found: Inventory) -> Iterator[Problem]:
    newest = found.driver.cuda // 1000
    used = (
        *found.installed_packages(CUPY)[:1],
        *found.installed_packages(BINDINGS),
        *found.installed_packages(CUDNN)[:1],
    )
    if newest:
        late = [package for package in used if (package.cuda or 0) > newest]
        if late:
            yield _driver_too_old(found, late)
    cupy, bindings = found.installed_packages(CUPY)[:1], found.installed_packages(BINDINGS)
    if cupy and bindings and cupy[0].cuda not in (None, bindings[0].cuda):
        yield Problem(
            what="CuPy and cuda-bindings are for different CUDA versions",
            detail=_names_of((*cupy, *bindings)),
            fix=f'pip install "cuda-bindings=={cupy[0].cuda}.*"',
            prevents=False,
        )


def _driver_too_old(found: Inventory, late: list[Package]) -> Problem:
    newest, wanted = found.driver.cuda // 1000, max(package.cuda or 0 for package in late)
    remedy = f"update the driver to one that supports CUDA {wanted}"
    if newest == 12:
        names = " ".join(package.name for package in late)
        remedy += f", or: pip uninstall {names} && {install_command('cuda12')}"
    return Problem(
        what=f"the NVIDIA driver is too old for packages of CUDA {wanted}",
        detail=f"it {found.driver.detail}; {_names_of(late)}",
        fix=remedy,
    )


def _twins(found: Inventory) -> Iterator[Problem]:
    """Packages that install the same files, so that the files become a mixture of both."""
    for what, names in (("cuDNN", CUDNN), ("CuPy", CUPY)):
        twins = found.installed_packages(names)
        if len(twins) > 1:
            yield Problem(
                what=f"{what} is installed twice",
                detail=f"{_names_of(twins)} overwrite each other's files",
                fix=f"pip uninstall {' '.join(p.name for p in twins)} && {_install(found)}",
                prevents=False,
            )


def _cudnn_problems(found: Inventory) -> Iterator[Problem]:
    main = found.cudnn
    if main is None:
        yield Problem(
            what="cuDNN is not installed",
            detail=f"there is no {MAIN} in LD_LIBRARY_PATH, Python's packages or the system's folders",
            fix=_install(found),
        )
        return
    for library in found.libraries:
        if not library.whole:
            yield Problem(
                what=f"{library.name} is not a library",
                detail=f"{library.path} is empty or damaged",
                fix=_drop(library, found),
            )
    yield from _mixture("would be loaded", found.libraries, found)


def _mixture(
    when: str, libraries: Sequence[Library], found: Inventory, *, prevents: bool = True
) -> Iterator[Problem]:
    """Libraries of one cuDNN that come from several folders, or are of several versions."""
    folders = sorted({library.folder for library in libraries})
    versions = sorted({library.version for library in libraries if library.version})
    if len(versions) > 1:
        listed = ", ".join(f"{library.name} {library.version}" for library in libraries if library.version)
        yield Problem(
            what="cuDNN's libraries are of different versions",
            detail=f"these {when}: {listed}, from {' and '.join(folders)}",
            fix=_one_only(found),
            prevents=prevents,
        )
    elif len(folders) > 1:
        yield Problem(
            what="cuDNN's libraries come from different folders",
            detail=f"what {when} lies in {' and '.join(folders)}",
            fix=_one_only(found),
            prevents=False,
        )


def never_run(found: Inventory) -> Problem | None:
    """The caution about a version of cuDNN with which the GPU tests have not passed; None if they have."""
    version = found.cudnn_version
    if not version or was_run(version):
        return None
    kind = next((package.name for package in found.installed_packages(CUDNN)), "nvidia-cudnn-cu13")
    why = (
        "older ones were seen to read misaligned addresses, which ends the device context"
        if is_too_old(version)
        else "its results are checked before use, but what a check cannot find was not looked for"
    )
    return Problem(
        what=f"cuDNN {version} has not passed the GPU tests of cudnn-actor",
        detail=f"these have: {' and '.join(RUN)}; {why}",
        fix=f'pip install "{kind}=={RUN[-1]}.*"',
        prevents=False,
    )


def _loading_problems(found: Inventory) -> Iterator[Problem]:
    loading, main = found.loading, found.cudnn
    if loading is None or main is None:
        return
    if loading.error:
        yield Problem(
            what="cuDNN cannot be loaded", detail=f"{main.path}: {loading.error}", fix=_drop(main, found)
        )
    if loading.failed:
        failed = ", ".join(f"{check} returned {status}" for check, status in loading.failed.items())
        yield Problem(
            what="cuDNN's libraries do not match each other",
            detail=f"libcudnn is {loading.version}, but {failed}",
            fix=_one_only(found),
        )
    yield from _mixture("were loaded in a test", loading.mapped, found)
    cupy = found.installed_packages(CUPY)[:1]
    if loading.cuda and cupy and cupy[0].cuda not in (None, loading.cuda):
        yield Problem(
            what="cuDNN and CuPy are for different CUDA versions",
            detail=f"cuDNN {loading.version} in {main.folder} is for CUDA {loading.cuda}; {_names_of(cupy)}",
            fix=_install(found),
            prevents=False,
        )


def _loaded_twice(found: Inventory) -> Iterator[Problem]:
    """This process has already loaded a cuDNN, for example PyTorch's, and the frontend would load another."""
    mains = {library.path: library for library in (*found.mapped, *found.libraries) if library.name == MAIN}
    if found.mapped and len(mains) > 1:
        yield Problem(
            what="this process would load a second cuDNN",
            detail=" and ".join(sorted(mains)),
            fix=_one_only(found),
            prevents=False,
        )
    # Two complete copies look like a mixture here although each may work, so this prevents nothing.
    yield from _mixture("are loaded", found.mapped, found, prevents=False)


def _compiler(found: Inventory) -> Iterator[Problem]:
    cupy = found.installed_packages(CUPY)[:1]
    if cupy and not found.nvrtc:
        yield Problem(
            what="CUDA's run-time compiler was not found",
            detail="CuPy compiles small kernels with libnvrtc",
            fix=f'pip install "{cupy[0].name}[ctk]"',
            prevents=False,
        )


def _drop(library: Library, found: Inventory) -> str:
    """How to remove or repair one library."""
    packaged = [
        package for package in found.installed_packages(CUDNN) if library.path.startswith(package.folder)
    ]
    if packaged:
        return f"pip install --force-reinstall --no-deps {packaged[0].name}"
    return f"remove {library.folder} from LD_LIBRARY_PATH, or cuDNN from that folder"


def _one_only(found: Inventory) -> str:
    packaged = found.installed_packages(CUDNN)
    if packaged:
        return (
            f"unset LD_LIBRARY_PATH; if that does not help, pip install --force-reinstall {packaged[0].name}"
        )
    return "let LD_LIBRARY_PATH name one folder that has all of cuDNN, and remove the others"


def _names_of(packages: Sequence[Package]) -> str:
    return " and ".join(f"{package.name} {package.version}" for package in packages)
