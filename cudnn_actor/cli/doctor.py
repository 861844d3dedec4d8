"""`cudnn-actor doctor`: reports what was found, what is missing, and whether the service works."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import msgspec
from rich.console import Console
from rich.text import Text

from cudnn_actor.cli.diagnosis import Diagnosis, diagnose
from cudnn_actor.engines.cuda.diagnosis.installation import Problem

__all__ = ["add_arguments", "run"]

_GOOD, _ABSENT, _BAD, _WARNING = ("[green]✓[/]", "[dim]-[/]", "[red]✗[/]", "[yellow]![/]")
_Row = tuple[str, str, str, str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument(
        "--device", default="auto", help='the device to try: "auto" (the default), "cuda:0", "cpu"'
    )


def run(args: argparse.Namespace) -> int:
    """Run the command. The exit status is 1 if a service fails, or if a GPU should be usable but is not."""
    found = diagnose(args.device)
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
    else:
        _show(found, Console(highlight=False, soft_wrap=True))
    broken = found.gpu_wanted and any(problem.prevents for problem in found.problems)
    works = all(check.ok for check in found.isolations.values())
    return 0 if works and not broken and not any(each.prevents for each in found.obstacles) else 1


def _show(found: Diagnosis, console: Console) -> None:
    console.print(f"[bold]cudnn-actor {found.version}[/]  {found.python}  {found.platform}\n")
    for mark, name, value, detail in [*_service(found), *_gpus(found), *_packages(found), *_machine(found)]:
        console.print(f"{mark} {name:<15} {value:<14} {detail}".rstrip())
    for problem in (*found.obstacles, *found.problems):
        _show_problem(problem, console)
    for missing in found.missing:
        console.print(f"\n{missing.what}: not installed, needed for {missing.needed_for}. To install:")
        console.print(Text(f"    {missing.command}"))


def _show_problem(problem: Problem, console: Console) -> None:
    mark = _BAD if problem.prevents else _WARNING
    console.print(f"\n{mark} ", Text(f"{problem.what}: {problem.detail}. To fix it:"), sep="")
    console.print(Text(f"    {problem.fix}"))


def _service(found: Diagnosis) -> Iterator[_Row]:
    check, checks = found.check, found.isolations.values()
    verdict = "works" if all(each.ok for each in checks) else "FAILED"
    if verdict == "FAILED" and any(each.ok for each in checks):
        verdict = "works in part"
    yield (_GOOD if verdict == "works" else _BAD), "service", verdict, ""
    for each in checks:
        mark, words = (_GOOD, "works") if each.ok else (_BAD, "FAILED")
        yield mark, f"  in a {each.isolation}", words, each.detail
    yield (_GOOD if check.device else _BAD), "device", check.device or "none", check.reason or ""


def _gpus(found: Diagnosis) -> Iterator[_Row]:
    driver = found.driver
    broken = driver.library and not driver.found
    mark = _GOOD if driver.found else _BAD if broken else _ABSENT
    detail = f"does not work: {driver.detail}" if broken else driver.detail
    if not driver.library and not found.gpu_wanted:
        detail += "; if this machine has an NVIDIA GPU, install its driver"
    version = driver.version or ("unknown" if driver.library else "none")
    yield mark, "NVIDIA driver", version, detail
    for number, gpu in enumerate(driver.gpus):
        memory = f"{gpu.memory_bytes / 2**30:.0f} GiB"
        yield _GOOD, f"GPU {number}", gpu.name, f"{memory}, compute capability {gpu.capability}"
    if not driver.gpus:
        yield _ABSENT, "GPU", "none", ""


def _packages(found: Diagnosis) -> Iterator[_Row]:
    if found.cudnn is not None:
        yield _GOOD, "libcudnn", found.cudnn.version or "unknown", found.cudnn.path
    for name, version in found.packages.items():
        yield (_GOOD if version else _ABSENT), name, version or "not installed", ""
    for name, version in found.required.items():
        yield (_GOOD if version else _BAD), name, version or "not installed", ""


def _machine(found: Diagnosis) -> Iterator[_Row]:
    blas = found.blas
    threads = "threads: unknown" if blas.threads is None else f"threads: {blas.threads}"
    settings = [f"{name}={value}" for name, value in blas.settings.items()]
    yield _GOOD, "cores", str(found.cores), "that this process may use"
    yield _GOOD, "BLAS", blas.name, " ".join([threads, *settings])
