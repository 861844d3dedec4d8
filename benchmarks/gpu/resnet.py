"""ResNet-50's convolutions: the device's time through the actor, beside PyTorch's."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import msgspec
import numpy as np

from benchmarks.gpu import ceilings
from benchmarks.gpu.ceilings import Ceilings
from benchmarks.gpu.problems import RESNET50, Conv, Direction, Problem
from benchmarks.gpu.pytorch import Eager, eager
from benchmarks.gpu.rates import burst_us, on_loop
from benchmarks.gpu.setting import Setting
from benchmarks.gpu.stage import Call, Stage, random_values, staged
from cudnn_actor import BufferRef, CudnnRef
from cudnn_actor.protocol.types.dtypes import DTypeName
from cudnn_actor.protocol.types.tensor import LayoutName

__all__ = ["Measured", "Resnet", "Series", "measure"]

_FULL: tuple[tuple[DTypeName, int, bool], ...] = (
    ("bfloat16", 32, False),
    ("float32", 32, False),
    ("bfloat16", 1, False),
    ("bfloat16", 128, False),
    ("float32", 1, False),
    ("float32", 128, False),
    ("float32", 32, True),
)
"""Type, batch, TF32: in the order of importance, for what the time does not allow is left out at the end."""
_QUICK: tuple[tuple[DTypeName, int, bool], ...] = (("bfloat16", 32, False), ("float32", 1, False))
_DRY: tuple[tuple[DTypeName, int, bool], ...] = (("bfloat16", 1, False), ("float32", 1, False))
_LAYOUTS: dict[str, LayoutName] = {"bfloat16": "NHWC", "float32": "NCHW"}
"""As PyTorch's users lay them out."""
_TUNED_BATCH = 32
_ARENA = 768 << 20
_BURST_US = 4000.0
_FEWEST, _MOST = 20, 400
_TUNE_UNTIL = {"bfloat16": 0.45, "float32": 0.6}
"""Shares of the budget after which nothing more of a type is tuned."""


class Measured(msgspec.Struct, kw_only=True):
    """One convolution in one direction.

    `us` has microseconds for each run, a number a round, by how it was run: "actor" (submitted at once to
    the service), "heuristic", "tuned" and "torch" (in a loop, between the device's events), and each of
    those three with ", alone" (a captured CUDA graph of them: the device's time without the host's).
    """

    conv: str
    count: int
    floor_us: float
    us: dict[str, list[float]] = {}
    build_s: float | None = None
    tune_s: float | None = None
    tried: int = 0
    """Candidates that ran while it was tuned."""
    discarded: list[str] = []
    """Those that were not trusted, and why."""
    plans: dict[str, str] = {}
    errors: dict[str, str] = {}


class Series(msgspec.Struct, kw_only=True):
    """All convolutions of one type, batch and direction."""

    dtype: str
    layout: str
    batch: int
    tf32: bool
    direction: str
    flops: int
    rows: list[Measured] = []


class Resnet(msgspec.Struct, kw_only=True):
    """The record of this part."""

    ceilings: Ceilings
    series: list[Series] = []
    left_out: list[str] = []
    """Series that there was no time for."""


class Subject(NamedTuple):
    """A way to run a problem, in a loop and captured."""

    call: Call
    microseconds: Any
    captured: Any


class Bench(NamedTuple):
    """Runs the problems."""

    setting: Setting
    stage: Stage
    torch: Eager | None
    gpu: CudnnRef


def measure(setting: Setting) -> Resnet:
    """Blocks for minutes."""
    found = Resnet(ceilings=ceilings.measure(setting))
    for dtype, batch, tf32 in setting.choose(_FULL, _QUICK) if setting.on_gpu else _DRY:
        if setting.spent > 1.0:
            found.left_out.append(_name(dtype, batch, tf32))
            continue
        with ExitStack() as stack:
            stage = stack.enter_context(staged(setting, _ARENA if setting.on_gpu else 32 << 20, dtype))
            torch = stack.enter_context(eager(setting.ordinal)) if setting.on_gpu else None
            on_loop("asyncio", _series_of(setting, stage, torch, found, (dtype, batch, tf32)))
    return found


async def _series_of(
    setting: Setting, stage: Stage, torch: Eager | None, found: Resnet, config: tuple[DTypeName, int, bool]
) -> None:
    dtype, batch, tf32 = config
    series = []
    for direction in Direction:
        problem = Problem(RESNET50[0], batch, direction, dtype, _LAYOUTS[dtype], tf32)
        series.append(
            Series(
                dtype=dtype, layout=problem.layout, batch=batch, tf32=tf32, direction=direction.value, flops=0
            )
        )
    found.series += series
    async with setting.service() as gpu:
        bench = Bench(setting, stage, torch, gpu)
        for place, conv in enumerate(_convs(setting)):
            setting.say(f"ResNet-50, {_name(dtype, batch, tf32)}, convolution {place + 1}, {conv}")
            problem = Problem(conv, batch, Direction.FWD, dtype, _LAYOUTS[dtype], tf32)
            await _one_conv(bench, problem, series, found.ceilings)
            if torch is not None:
                torch.forget()


async def _one_conv(bench: Bench, problem: Problem, series: list[Series], limits: Ceilings) -> None:
    refs = await _buffers(bench.gpu, problem)
    for direction, into in zip(Direction, series, strict=True):
        asked = problem._replace(direction=direction)
        row = Measured(conv=str(asked.conv), count=0, floor_us=ceilings.floor_us(asked, limits))
        into.rows.append(row)
        into.flops += asked.flops
        await _one_problem(bench, asked, refs, row)
    for ref in refs.values():
        await bench.gpu.free(ref)


async def _buffers(gpu: CudnnRef, problem: Problem) -> dict[str, BufferRef]:
    """Random numbers in the order in which they then lie in memory, whatever the layout: quick to upload."""
    refs = {}
    for name, spec in (("x", problem.x), ("w", problem.w), ("y", problem.y)):
        flat = random_values(spec.size, problem.dtype)
        if problem.layout == "NHWC":
            n, c, *space = spec.dims
            values: np.ndarray = np.moveaxis(flat.reshape(n, *space, c), -1, 1)
        else:
            values = flat.reshape(spec.dims)
        refs[name] = await gpu.upload(values, layout=problem.layout)
    return refs


async def _one_problem(bench: Bench, problem: Problem, refs: dict[str, BufferRef], row: Measured) -> None:
    message = problem.message(**refs)
    subjects = _subjects(bench, problem, row)
    try:
        await bench.gpu.ask(message)
        once = await burst_us(bench.gpu, message, 4)
    except Exception as error:  # noqa: BLE001 - recorded, and the others go on
        row.errors["actor"] = f"{type(error).__name__}: {error}"
        once = _BURST_US
    row.count = bench.setting.choose(max(_FEWEST, min(_MOST, int(_BURST_US / once))), 2)
    rounds = bench.setting.choose(3, 1)
    for _ in range(rounds):
        if "actor" not in row.errors:
            _note(row, "actor", await burst_us(bench.gpu, message, row.count))
        for name, subject in subjects.items():
            _note(row, name, subject.microseconds(subject.call, row.count))
    alone = _captured(subjects, row)
    for _ in range(rounds):
        for name, launch in alone.items():
            _note(row, f"{name}, alone", subjects[name].microseconds(launch, 1) / row.count)


def _note(row: Measured, name: str, us: float) -> None:
    row.us.setdefault(name, []).append(round(us, 2))


def _subjects(bench: Bench, problem: Problem, row: Measured) -> dict[str, Subject]:
    """The sides that can run the problem, each run once. Those that cannot are in the row's errors."""
    specs = {"x": problem.x, "w": problem.w, "y": problem.y}
    placed = bench.stage.place(problem.message, specs, problem.written)

    def heuristic() -> Call:
        plan, row.build_s = bench.stage.plan(placed)
        row.plans["heuristic"] = plan.tag
        return bench.stage.call(plan, placed)

    def tuned() -> Call | None:
        answer = bench.stage.tuned(placed) if _tunes(bench.setting, problem) else None
        if answer is None:
            return None
        plan, row.tune_s = answer
        row.plans["tuned"] = plan.tag
        tuning = getattr(plan, "tuning", None)
        if tuning is not None:
            row.tried, row.discarded = tuning.timed, list(tuning.discarded)
        return bench.stage.call(plan, placed)

    def torch() -> Call | None:
        return None if bench.torch is None else bench.torch.call(problem)

    found = {}
    for name, make in (("heuristic", heuristic), ("tuned", tuned), ("torch", torch)):
        try:
            call = make()
            if call is not None:
                call()
                runner: Any = bench.torch if name == "torch" else bench.stage
                found[name] = Subject(call, runner.microseconds, runner.captured)
        except Exception as error:  # noqa: BLE001 - recorded, and the others go on
            row.errors[name] = f"{type(error).__name__}: {error}"
    return found


def _tunes(setting: Setting, problem: Problem) -> bool:
    """Whether there is time: tuning one takes as long as measuring several."""
    tuned = problem.batch == _TUNED_BATCH and not problem.tf32
    return tuned and setting.spent < _TUNE_UNTIL[problem.dtype]


def _captured(subjects: dict[str, Subject], row: Measured) -> dict[str, Call]:
    """Launches of `row.count` runs each, for those that can be captured; each launched once."""
    found = {}
    for name, subject in subjects.items():
        capture = partial(subject.captured, subject.call, row.count)
        try:
            launch = capture()
            if launch is not None:
                launch()
                found[name] = launch
        except Exception as error:  # noqa: BLE001 - recorded, and the others go on
            row.errors[f"{name}, alone"] = f"{type(error).__name__}: {error}"
    return found


def _convs(setting: Setting) -> tuple[Conv, ...]:
    """The convolutions: all, or the few that a processor can do in a moment."""
    return RESNET50[:: setting.choose(1, 4)] if setting.on_gpu else RESNET50[1:2]


def _name(dtype: str, batch: int, tf32: bool) -> str:
    short = "TF32" if tf32 else {"bfloat16": "bf16", "float32": "f32"}[dtype]
    return f"{short} N={batch}"


def name_of(series: Series) -> str:
    """Type, batch and direction, for people."""
    return f"{_name(series.dtype, series.batch, series.tf32)} {series.direction}"
