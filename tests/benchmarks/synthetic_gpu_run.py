"""A recorded run as a GPU would give it, made up: every part, every way, with something refused."""

from __future__ import annotations

import itertools
import random

from benchmarks.gpu.building import Building
from benchmarks.gpu.ceilings import Ceilings
from benchmarks.gpu.cold import STORES, Cold
from benchmarks.gpu.first_result import PLAN
from benchmarks.gpu.polling import Polling
from benchmarks.gpu.problems import RESNET50, Direction
from benchmarks.gpu.recovery import Recovery
from benchmarks.gpu.report import Platform, Report, new_report
from benchmarks.gpu.resnet import Measured, Resnet, Series
from benchmarks.gpu.small import IN_FLIGHT, PUBLIC, TORCH, Calls, Requests, Small
from benchmarks.gpu.transfers import LAYOUTS, SIZES, WAYS, Moved, Transfers
from cudnn_actor.options import Isolation
from cudnn_actor.protocol.types.tensor import LayoutName
from cudnn_actor.trials.bench.record import ISOLATIONS
from cudnn_actor.trials.measure import Timing

__all__ = ["gpu_run"]

ROUNDS = 3
_random = random.Random(0)


def gpu_run() -> Report:
    """A report without a gap."""
    report = new_report(quick=False)
    machine = {"cpu": "AMD EPYC 9654 96-Core Processor", "cores": 16}
    report.platform = Platform(
        device="cuda:0",
        name="NVIDIA H200",
        driver="580.159.04",
        machine=machine,
        versions={"cuDNN": "9.19.0"},
    )
    pairs = itertools.product(("asyncio", "uvloop"), ISOLATIONS)
    report.small = Small(requests=[_requests(*pair) for pair in pairs], calls=_calls())
    report.building = Building(
        idle=_timings(90),
        building=_timings(120),
        idle_per_s=_some(5e4),
        building_per_s=_some(4e4),
        took_s=_some(0.3),
    )
    steps = {"the interpreter": 0.02, "importing cudnn_actor and NumPy": 0.3, PLAN: 0.07}
    report.cold = Cold(
        runs={kind: [dict(steps)] * ROUNDS for kind in (*STORES, "steps")},
        errors={"extra": "InvalidRequest: no"},
    )
    report.transfers = Transfers(rows=[_moved(size, layout) for size in SIZES for layout in LAYOUTS])
    report.recovery = _recovery()
    report.polling = Polling(
        idle_process=_some(0.2), busy_actor=_some(12), busy_process=_some(14), burst_ms=_some(51), requests=73
    )
    report.resnet = _resnet()
    report.errors = {"another": "Traceback\nRuntimeError: " + "what went wrong " * 9}
    return report


def _some(centre: float) -> list[float]:
    return [centre * _random.uniform(0.97, 1.03) for _ in range(ROUNDS)]


def _timings(p50: float) -> list[Timing]:
    return [Timing(count=900, p50_us=t, p99_us=2 * t, max_us=9000.0) for t in _some(p50)]


def _requests(loop: str, isolation: Isolation) -> Requests:
    asked, submitted = ({n: _some(9e3 * n**0.5 * (1 + i)) for n in IN_FLIGHT} for i in range(2))
    return Requests(
        loop=loop,
        isolation=isolation,
        one=_timings(55),
        ask_per_s=asked,
        submit_per_s=submitted,
        loop_cpu_us=_some(5),
        actor_cpu_us=_some(11),
    )


def _calls() -> list[Calls]:
    names = ("this engine, without its actor", PUBLIC, "frontend: lowered graph", "CUDA graph replay", TORCH)
    return [
        Calls(name=name, per_s=_some(4e4 * place) * 2, one=_timings(30) * 2)
        for place, name in enumerate(names, start=1)
    ]


def _recovery() -> Recovery:
    ends = itertools.product(("SIGKILL", "illegal access", "hang"), ("with standby", "without"))
    free = ("nothing", "a worker", "nothing, after a worker", "a worker and its standby")
    return Recovery(
        ms={", ".join(end): _some(1200) for end in ends},
        free_mib={name: 143_000.0 - 600 * place for place, name in enumerate(free)},
        start_s={"forkserver not there yet": _some(1.5), "forkserver there": _some(0.5)},
        errors={"memory": "RuntimeError: " + "what went wrong " * 9},
    )


def _moved(size: str, layout: LayoutName) -> Moved:
    return Moved(size=size, layout=layout, gb_per_s={way: _some(12) for way in WAYS})


def _resnet() -> Resnet:
    ceilings = Ceilings(tflops={"bfloat16": 780.0, "float32": 51.0, "tf32": 420.0}, copy_gb_per_s=4300.0)
    configs = [
        ("bfloat16", 32, False),
        ("float32", 32, False),
        ("bfloat16", 1, False),
        ("bfloat16", 128, False),
    ]
    configs += [("float32", 1, False), ("float32", 128, False), ("float32", 32, True)]
    series = [_series(*config, direction) for config, direction in itertools.product(configs, Direction)]
    return Resnet(ceilings=ceilings, series=series, left_out=["f32, N=128"])


def _series(dtype: str, batch: int, tf32: bool, direction: Direction) -> Series:
    layout = "NHWC" if dtype == "bfloat16" else "NCHW"
    found = Series(
        dtype=dtype, layout=layout, batch=batch, tf32=tf32, direction=direction.value, flops=10**12
    )
    for conv in RESNET50:
        row = Measured(conv=str(conv), count=50, floor_us=9.0, build_s=0.01, tune_s=0.7)
        for how, centre in (("heuristic", 26.0), ("tuned", 24.0), ("torch", 30.0)):
            if how == "tuned" and batch != 32:
                continue
            row.us[how], row.us[f"{how}, alone"] = _some(centre * batch / 8), _some(centre * batch / 9)
        row.us["actor"] = _some(30.0 * batch / 8)
        found.rows.append(row)
    del found.rows[0].us["torch, alone"]
    found.rows[0].errors["torch, alone"] = "RuntimeError: operation not permitted when stream is capturing"
    return found
