"""`docs/hardware.md`, made from the records of benchmarks and tests that ran on a GPU.

python -m benchmarks.hardware_page
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.markdown import row, rule
from cudnn_actor.engines.cuda.library.versions import RUN, version_text

__all__ = ["PAGE", "Run", "render", "runs_of"]

_ROOT = Path(__file__).parents[1]
PAGE, _RESULTS = _ROOT / "docs" / "hardware.md", _ROOT / "benchmarks" / "results"

_HEAD = """\
# GPUs, drivers, memory

Made by `python -m benchmarks.hardware_page` from the records in `benchmarks/results`. Do not edit it by hand.
What passed in each of these runs is in [gpu.md](gpu.md#what-has-been-run).
"""

_NEEDED = """\
## What is needed

Linux, an NVIDIA driver for CUDA 13 or 12, and the packages of one extra: `cuda12` for a driver for CUDA 12.
`cudnn-actor doctor` says what is missing or too old.
"""

_TRIED = """\
A version of cuDNN that is not {versions} has not passed the GPU tests: it is used, and the log and `doctor`
say so.
"""

_RAN = """\
## What was run

A GPU that is not in this table has not been tried.
"""

_MEMORY = """\
## What a service takes

In process isolation, on {gpu}, in MiB. Device memory (`{recovery}`) is what the device had less of:
"""

_HOST = """\
Host memory (`{growth}`) is what belongs to a process alone. It grows with the kinds of
shapes that a service has seen:
"""


class Run(NamedTuple):
    """A GPU with the versions that ran on it; "–" for what a record does not say."""

    gpu: str
    driver: str
    cuda: str
    cudnn: str


def render() -> str:
    """The page. Raises `FileNotFoundError` where a record that it shows is missing."""
    return "\n".join([_HEAD, *_needed(), *_ran(), *_memory()])


def _needed() -> Iterator[str]:
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    yield from (_NEEDED, *row("extra", "packages"), rule(2))
    for extra in ("cuda13", "cuda12"):
        packages = project["optional-dependencies"][extra]
        yield from row(f"`{extra}`", ", ".join(f"`{package}`" for package in packages))
    yield from ("", _TRIED.format(versions=" or ".join(RUN)))


def _ran() -> Iterator[str]:
    yield from (_RAN, *row("GPU", "driver", "CUDA of the driver", "cuDNN", "first record"), rule(5))
    first: dict[Run, str] = {}
    for path in sorted(_RESULTS.glob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        for run in runs_of(record):
            day = _day(record)
            first[run] = min(day, first.get(run, day))
    for run, day in sorted(first.items()):
        if not any(_says_more(other, run) for other in first):
            yield from row(*run, day)
    yield ""


def _day(record: dict[str, Any]) -> str:
    return str(record.get("date") or record["setting"]["date"])[:10]


def _says_more(one: Run, than: Run) -> bool:
    """Whether a run is the same as another, and its record says something that the other's does not."""
    return one != than and all(b in (a, "–") for a, b in zip(one, than, strict=True))


def runs_of(record: Any) -> Iterator[Run]:
    """The runs on a GPU that a record tells of: none if it does not name a GPU and cuDNN's version."""
    if not isinstance(record, dict):
        return
    for part in (record, record.get("platform"), record.get("setting")):
        if isinstance(part, dict):
            known = {**part, **_dict(part.get("versions"))}
            gpu = re.match(r"NVIDIA \w+", str(known.get("GPU") or known.get("name") or known.get("device")))
            cudnn = known.get("cuDNN") or known.get("cudnn")
            if gpu is not None and cudnn:
                driver = str(known.get("driver", "–"))
                yield Run(gpu[0], driver, _cuda(known.get("CUDA driver")), _version(str(cudnn)))


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _cuda(version: str | None) -> str:
    """The version of CUDA that a driver supports: "13.0" of "13000" or "13.0"."""
    if version is None or "." in version:
        return version or "–"
    return f"{int(version) // 1000}.{int(version) % 1000 // 10}"


def _version(cudnn: str) -> str:
    return version_text(int(cudnn)) if cudnn.isdigit() else cudnn


def _memory() -> Iterator[str]:
    recovery, found = _newest("gpu-2*.json")
    growth, grown = _newest("growth-process-*.json")
    yield from (
        _MEMORY.format(gpu=found["platform"]["name"], recovery=recovery),
        *row("what", "MiB"),
        rule(2),
    )
    free = found["recovery"]["free_mib"]
    alone = free["nothing"] - free["a worker"]
    both = free["nothing"] - free["a worker and its standby"]
    builder = free["an engine in this process, with a plan"] - free["the same, and a process that builds"]
    yield from row("a worker, with an arena of 64 MiB and a plan", f"{alone:,.0f}")
    yield from row("its standby", f"{both - alone:,.0f}")
    yield from row("the process that builds plans", f"{builder:,.0f}")
    yield from ("", _HOST.format(growth=growth))
    samples = grown["samples"]
    shown = [samples[0], samples[1], samples[-1]]
    yield from row("process", *(f"after {sample['shapes']:,} shapes" for sample in shown))
    yield rule(1 + len(shown))
    for process in ("service", "forkserver", "worker", "builder"):
        yield from row(process, *(f"{sample['private_mib'][process]:,.0f}" for sample in shown))
    yield ""


def _newest(names: str) -> tuple[str, Any]:
    for path in sorted(_RESULTS.glob(names), reverse=True):
        return path.name, json.loads(path.read_text(encoding="utf-8"))
    raise FileNotFoundError(f"{_RESULTS} has no {names}")


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
