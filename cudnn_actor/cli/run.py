"""`cudnn-actor run`: runs an ONNX model, times it, and says how it runs."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import statistics
import time
import zipfile
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
from rich.console import Console

from cudnn_actor import BatchedModel, CudnnRef, spawn
from cudnn_actor.cli.cpu_options import add_cpu_arguments, cpu_options
from cudnn_actor.cli.throughput import Throughput, in_flight, measure_runs, sheet
from cudnn_actor.cli.throughput_plot import plot
from cudnn_actor.cli.user_error import UserError, check_writable, whole_number, writing
from cudnn_actor.models import Feature, InvalidModel, Model, UnsupportedModel
from cudnn_actor.models.sizes import sizes_in
from cudnn_actor.protocol.errors import InvalidRequest

__all__ = ["add_arguments", "run"]

_RUNS = 20
_SEED = 0
_LONGEST_S = 3600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("model", type=Path, metavar="MODEL.onnx")
    parser.add_argument("--device", default="auto", help='"cuda:0", "cpu" or "auto" (the default)')
    parser.add_argument(
        "--input",
        action="append",
        default=[],
        type=_pair,
        metavar="NAME=FILE.npy",
        help="an input's values, as numpy.save writes them; random numbers for inputs that are not given",
    )
    parser.add_argument(
        "--dim",
        action="append",
        default=[],
        type=_size,
        metavar="NAME=SIZE",
        help="the size of a named dim, such as N=8; may be given for each",
    )
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float16", "float32"),
        help="what weights and activations are computed in; the file's own dtypes unless given",
    )
    parser.add_argument(
        "--random",
        type=whole_number(),
        metavar="SEED",
        help="the seed of nodes that draw random numbers and have none of their own",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE.npz",
        help="write the outputs; those of bfloat16 as two bytes each: array.view(ml_dtypes.bfloat16)",
    )
    parser.add_argument(
        "--tune",
        action="store_true",
        help="measure candidates for each part first, which takes up to minutes, and run the fastest",
    )
    parser.add_argument(
        "--store",
        type=Path,
        metavar="DIR",
        help="keep plans there, tuned ones too: spawn(plan_store=DIR)",
    )
    parser.add_argument("--time", action="store_true", help=f"run it {_RUNS} times more, and time it")
    parser.add_argument("--explain", action="store_true", help="say what runs each part of it")
    parser.add_argument(
        "--profile", action="store_true", help="say what runs each part, and how long it takes"
    )
    parser.add_argument(
        "--timeline", type=Path, metavar="FILE.svg", help="draw what --profile measures along the time"
    )
    parser.add_argument(
        "--concurrency",
        type=in_flight,
        metavar="N[:M]",
        help="run it by N tasks at a time, or by N, 2 N, 4 N, ... M, and say how many runs a second",
    )
    parser.add_argument(
        "--seconds", type=_seconds, default=5.0, help="for how long, each number of tasks (5 unless given)"
    )
    parser.add_argument(
        "--batched",
        action="store_true",
        help="with --concurrency: measure gpu.batched, too, beside single runs",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw what --concurrency measures")
    parser.add_argument(
        "--json", type=Path, metavar="FILE.json", help="write what --explain, --profile and --concurrency say"
    )
    add_cpu_arguments(parser)


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.rpartition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form NAME=VALUE")
    return name, value


def _size(text: str) -> tuple[str, int]:
    name, value = _pair(text)
    return name, whole_number()(value)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= _LONGEST_S:
        raise argparse.ArgumentTypeError(f"{text} must be seconds above 0, at most {_LONGEST_S:.0f}")
    return seconds


def run(args: argparse.Namespace) -> int:
    """Run the command; the exit status is 0 if the model ran."""
    if args.json is not None and not (args.explain or args.profile or args.concurrency):
        raise UserError("--json has nothing to write; ask for --explain, --profile or --concurrency, too")
    if args.timeline is not None and not args.profile:
        raise UserError("--timeline draws what --profile measures; give --profile, too")
    if args.plot is not None:
        _check_plot(args.plot, measured=bool(args.concurrency))
    if args.batched and not args.concurrency:
        raise UserError("--batched needs a number of tasks; give --concurrency 1:64, too")
    for option in ("out", "timeline", "plot", "json"):
        if (path := getattr(args, option)) is not None:
            check_writable(path, f"--{option}")
    try:
        return asyncio.run(_run(args))
    except (InvalidModel, UnsupportedModel, InvalidRequest, ImportError) as error:
        raise UserError(str(error)) from error


def _check_plot(path: Path, *, measured: bool) -> None:
    if not measured:
        raise UserError("--plot draws what --concurrency measures; give --concurrency 1:64, too")
    if path.suffix.lower() != ".svg":
        raise UserError(f"--plot {path} is not an SVG, which browsers show; give a name that ends in .svg")


async def _run(args: argparse.Namespace) -> int:
    async with spawn(device=args.device, plan_store=args.store, **cpu_options(args)) as gpu:
        began = time.perf_counter()
        model = await gpu.load(args.model, dtype=args.dtype, random=args.random, tune=args.tune)
        files, dims = _once("--input", args.input), _once("--dim", args.dim)
        inputs = await asyncio.to_thread(_inputs, model, files, dims)
        endpoint = _endpoint(gpu, model, inputs) if args.batched else None
        try:
            if args.tune:
                await _tune(model, inputs)
            outputs = await gpu.run(model, inputs)
        except UnsupportedModel as error:
            random = [
                name for name, value in inputs.items() if name not in files and value.dtype.kind in "iu"
            ]
            if not random:
                raise
            hint = f"The values of {', '.join(random)} are random: give files if they decide over shapes"
            raise UserError(f"{error}. {hint}") from error
        first = time.perf_counter() - began
        async with contextlib.AsyncExitStack() as stack:
            if endpoint is not None:  # first: a model that cannot be batched is refused
                await stack.enter_async_context(endpoint)
                await endpoint(inputs)
            for name, value in outputs.items():
                print(f"{name}: {value.dtype} {value.shape}, {_summary(value)}")
            if args.time:
                await _time(gpu, model, inputs, first)
            found = await _measure(gpu, model, inputs, endpoint, args)
        if args.json is not None:
            await asyncio.to_thread(_write_json, args.json, found)
        if args.out is not None:
            await asyncio.to_thread(_write, args.out, outputs)
        await model.close()
    return 0


async def _measure(
    gpu: CudnnRef,
    model: Model,
    inputs: dict[str, np.ndarray],
    endpoint: BatchedModel | None,
    args: argparse.Namespace,
) -> dict[str, Any]:
    """Explain, measure and draw as the options ask. Returns the object that `--json` writes."""
    found: dict[str, Any] = {}
    if args.explain or args.profile:
        found["explanation"] = explanation = await model.explain(inputs, measure=args.profile)
        print(explanation)
        if args.timeline is not None:
            await asyncio.to_thread(_write_text, args.timeline, explanation.to_svg())
    if args.concurrency:
        found["throughput"] = throughput = await _load(gpu, model, inputs, endpoint, args)
        if args.plot is not None:
            title = f"{Path(args.model).name} on {gpu.device}, from arrays to arrays"
            await asyncio.to_thread(_write_text, args.plot, plot(title, throughput))
    return found


def _endpoint(gpu: CudnnRef, model: Model, inputs: dict[str, np.ndarray]) -> BatchedModel:
    """A batched model that fits these inputs. Raises `InvalidRequest` or `UserError` if there can be none."""
    counts = {each.dims[0] for each in model.inputs if each.dims}  # the batches decide these
    sizes = sizes_in(model.inputs, inputs)
    endpoint = gpu.batched(model, dims={dim: size for dim, size in sizes.items() if dim not in counts})
    first = model.inputs[0]
    samples = len(inputs[first.name])
    if not 1 <= samples <= endpoint.max_batch:
        assert first.dims is not None, "it can be batched"
        raise UserError(
            f"--batched measures requests of 1 to {endpoint.max_batch} samples, and {first.dims[0]} is "
            f"{samples}; give fewer: --dim {first.dims[0]}=1"
        )
    return endpoint


async def _tune(model: Model, inputs: dict[str, np.ndarray]) -> None:
    """Tune the model for the dims of these inputs, and print the gain."""
    began = time.perf_counter()
    await model.warm(sizes_in(model.inputs, inputs))
    tuned = (await model.explain(inputs)).tuned
    took = f"warmed in {time.perf_counter() - began:.1f} s"
    if tuned is None:
        print(f"{took}: nothing was tuned; -v shows why (the CPU engine has one plan for each graph)")
    else:
        print(f"{took}: {tuned.tuned_us:,.1f} us a run, {tuned.heuristic_us:,.1f} us by the first choices")


async def _load(
    gpu: CudnnRef,
    model: Model,
    inputs: dict[str, np.ndarray],
    endpoint: BatchedModel | None,
    args: argparse.Namespace,
) -> list[Throughput]:
    """Measure the model with several runs in flight, and print the table."""
    found = [
        await measure_runs(lambda: gpu.run(model, inputs), tasks, args.seconds) for tasks in args.concurrency
    ]
    if endpoint is not None:
        found += [await _batched_load(endpoint, inputs, tasks, args.seconds) for tasks in args.concurrency]
    Console(width=100).print(sheet(found))
    return found


async def _batched_load(
    endpoint: BatchedModel, inputs: dict[str, np.ndarray], tasks: int, seconds: float
) -> Throughput:
    """Measure the batched model with several requests in flight, which share batches."""
    before = endpoint.statistics()
    found = await measure_runs(lambda: endpoint(inputs), tasks, seconds)
    after = endpoint.statistics()
    mean = (after.samples - before.samples) / (after.batches - before.batches)
    return msgspec.structs.replace(found, mean_batch=mean)


def _write_json(path: Path, found: dict[str, Any]) -> None:
    with writing(path):
        path.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1))


def _write_text(path: Path, text: str) -> None:
    with writing(path):
        path.write_text(text, encoding="utf-8")


def _summary(value: np.ndarray) -> str:
    if not value.size:
        return "no elements"
    floats = value.astype(np.float64)
    return f"from {floats.min():.6g} to {floats.max():.6g}, mean {floats.mean():.6g}"


async def _time(gpu: Any, model: Model, inputs: dict[str, np.ndarray], first: float) -> None:
    """Time runs whose inputs are on the device, and whose outputs stay there."""
    refs = {name: await gpu.upload(value) for name, value in inputs.items()}
    kept = [each.name for each in model.outputs]
    took = []
    for _ in range(_RUNS):
        began = time.perf_counter()
        outputs = await gpu.run(model, refs, keep=kept)
        took.append(time.perf_counter() - began)
        for ref in outputs.values():
            await gpu.free(ref)
    for ref in refs.values():
        await gpu.free(ref)
    median, least = statistics.median(took) * 1e3, min(took) * 1e3
    print(
        f"loaded and first run: {first:.2f} s; then {median:.3f} ms (median of {_RUNS}), least {least:.3f} ms"
    )


def _once(option: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise UserError(f"{option} is given twice for one name; give it once for each")
    return found


def _inputs(model: Model, files: dict[str, str], dims: dict[str, int]) -> dict[str, np.ndarray]:
    given = [each for each in model.defaults if each.name in files]  # others keep their defaults
    inputs = [*model.inputs, *given]
    _check_names("is no input of the model", files, [each.name for each in (*model.inputs, *model.defaults)])
    named = [dim for each in inputs for dim in each.dims or () if isinstance(dim, str)]
    _check_names("is no named dim of the model", dims, dict.fromkeys(named))
    read = {each.name: _read(each, files[each.name]) for each in inputs if each.name in files}
    sizes = dict(dims)
    for each in inputs:  # other sizes follow from the files, if they have the same names
        shape = read[each.name].shape if each.name in read else ()
        for dim, size in zip(each.dims or (), shape, strict=False):
            if isinstance(dim, str) and sizes.setdefault(dim, size) != size and dim in dims:
                raise UserError(
                    f"--dim {dim}={dims[dim]}: {files[each.name]} has {dim}={size}; leave --dim {dim} out"
                )
    made_up = [each for each in inputs if each.name not in read]
    _check_sizes(made_up, sizes)
    rng = np.random.default_rng(_SEED)
    return {
        each.name: read[each.name] if each.name in read else _made_up(each, sizes, rng) for each in inputs
    }


def _check_names(problem: str, given: Iterable[str], known: Collection[str]) -> None:
    for name in given:
        if name not in known:
            raise UserError(f"{name!r} {problem}: it has {', '.join(known) or 'none'}")


def _check_sizes(made_up: Iterable[Feature], sizes: Collection[str]) -> None:
    """Raise `UserError` unless the dims of these inputs are known. It names all missing dims."""
    missing: dict[str, None] = {}
    lacking = []
    for each in made_up:
        if each.dims is None or None in each.dims:
            raise UserError(f"give a file for {each}: --input {each.name}=FILE.npy")
        unknown = [dim for dim in each.dims if isinstance(dim, str) and dim not in sizes]
        missing |= dict.fromkeys(unknown)
        lacking += [each] if unknown else []
    if missing:
        options = " ".join(f"--dim {dim}=1" for dim in missing)
        files = " ".join(f"--input {each.name}=FILE.npy" for each in lacking)
        inputs = ", ".join(map(str, lacking))
        raise UserError(f"give the size of {', '.join(missing)} in {inputs}: {options}; or files: {files}")


def _read(feature: Feature, path: str) -> np.ndarray:
    try:
        with open(path, "rb") as file:
            array: np.ndarray = np.lib.format.read_array(file, allow_pickle=False)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{path} cannot be read as one array; write it with numpy.save ({error})") from error
    wanted = feature.dtype
    return array.view(wanted.numpy) if wanted == "bfloat16" and array.dtype.itemsize == 2 else array


def _made_up(feature: Feature, dims: dict[str, int], rng: np.random.Generator) -> np.ndarray:
    assert feature.dims is not None, "sizes were checked"
    assert feature.dtype is not None, "a model that was loaded has tensors only"
    sizes = [dims[dim] if isinstance(dim, str) else cast("int", dim) for dim in feature.dims]
    try:
        if feature.dtype.is_floating:
            return rng.standard_normal(sizes).astype(feature.dtype.numpy)
        return rng.integers(0, 2, sizes).astype(feature.dtype.numpy)
    except (MemoryError, ValueError) as error:
        raise UserError(f"{feature} is too large with the dims {tuple(sizes)}: {error}") from error


def _write(path: Path, outputs: dict[str, Any]) -> None:
    # This does the same as numpy.savez, which cannot take an output named "file".
    with writing(path), zipfile.ZipFile(path, "w") as archive:
        for name, value in outputs.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, np.asanyarray(value), allow_pickle=False)
