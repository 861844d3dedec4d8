"""`docs/h200.md`, made from the newest record of each benchmark that needs a GPU.

python -m benchmarks.h200_page
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.markdown import row, rule
from benchmarks.recording import Row

__all__ = ["PAGE", "newest", "render"]

_ROOT = Path(__file__).parents[1]
PAGE, _RESULTS = _ROOT / "docs" / "h200.md", _ROOT / "benchmarks" / "results"

_HEAD = """\
# What an H200 takes

Made by `python -m benchmarks.h200_page` from the newest record of each benchmark in `benchmarks/results`. Do
not edit it by hand. What these figures mean is in [performance.md](performance.md).

Times of plans are device times in µs, of the plan that a service takes, replayed as a CUDA graph. PyTorch's
are the best of three batches. What a benchmark could not measure is missing, or "–".
"""


class Record(NamedTuple):
    """The record of one run of a benchmark."""

    file: str
    known: Row
    found: Any

    @property
    def setting(self) -> str:
        """The place and the time of the run."""
        of = self.known["versions"]
        versions = ", ".join(f"{name} {of[name]}" for name in ("driver", "cuDNN", "PyTorch") if name in of)
        return f"`{self.file}`: {self.known['date'][:10]}, {of['GPU']}, {versions}."


def newest(name: str) -> Record:
    """A benchmark's newest record of a run on a GPU."""
    for record in _records(name):
        return record
    raise FileNotFoundError(f"{_RESULTS} has no {name}-….json of a GPU")


def _records(name: str) -> Iterator[Record]:
    """A benchmark's records of runs on a GPU, the newest first."""
    for path in sorted(_RESULTS.glob(f"{name}-2*.json"), reverse=True):
        record: Row = json.loads(path.read_text())
        if "GPU" in record.get("versions", {}):
            yield Record(path.name, record, record["found"])


def render() -> str:
    """The page."""
    sections = (_networks, _operations, _movement, _epilogues, _depthwise, _building, _models)
    return "\n".join([_HEAD, *(line for section in sections for line in section())])


def _section(title: str, record: Record, *text: str) -> Iterator[str]:
    yield from (f"## {title}", "", record.setting, *text, "")


def _table(columns: Sequence[str], rows: Iterator[Sequence[str]]) -> Iterator[str]:
    yield from row(*columns)
    yield rule(len(columns))
    for cells in rows:
        yield from row(*cells)
    yield ""


def _good(record: Record) -> list[Row]:
    """The rows without those of parts that failed."""
    return [each for each in record.found if "error" not in each]


def _us(value: float | str | None) -> str:
    return f"{value:,.1f}" if isinstance(value, float | int) else "–"


def _times(of: float | None, ours: float) -> str:
    return "–" if of is None else f"{of / ours:.2f}"


def _networks() -> Iterator[str]:
    record = newest("networks")
    yield from _section(
        "Blocks of networks beside PyTorch",
        record,
        "In brackets: kernels and copies of one run, with barriers. All in bfloat16, channels last. The",
        'bottleneck has the batch norm of training. "Graph" is a CUDA graph.',
    )
    blocks = [each for each in _good(record) if "count" not in each]
    sides: tuple[str, ...] = ("us", "eager", "compiled", "compiled, CUDA graphs")

    def cell(each: Row, side: str) -> str:
        kernels = each.get("kernels" if side == "us" else f"{side}: kernels")
        return f"{_us(each[side])} ({kernels})" if side in each else "–"

    yield from _table(
        ("", "ours", "eager", "compiled", "compiled, graph", "eager / ours"),
        (
            (each["part"], *(cell(each, side) for side in sides), _times(each.get("eager"), each["us"]))
            for each in blocks
        ),
    )
    layers = [each for each in _good(record) if "count" in each]
    yield "ResNet-50's convolutions at batch 32, each with bias, relu and, where there is one, the residual:"
    yield ""
    sides = ("us", "eager", "eager, CUDA graph")
    yield from _table(
        ("", "number", "ours", "eager", "eager, graph", "eager, graph / ours"),
        (
            (
                each["part"].removeprefix("conv "),
                str(each["count"]),
                *(cell(each, side) for side in sides),
                _times(each.get(sides[2]), each["us"]),
            )
            for each in layers
        ),
    )
    for title, chosen in (
        ("all", layers),
        ("with bias and relu", [each for each in layers if not _adds(each) and not _bare(each)]),
        ("with bias, residual and relu", [each for each in layers if _adds(each)]),
    ):
        ours, eager, graph = (sum(each["count"] * each[side] for each in chosen) for side in sides)
        number = sum(each["count"] for each in chosen)
        yield f"- {title}: {number} layers, {ours:,.0f} µs; eager {eager:,.0f}, {eager / ours:.2f} times as"
        yield f"  long; as a CUDA graph {graph:,.0f}, {graph / ours:.2f} times."
    yield ""


def _adds(layer: Row) -> bool:
    return " out" in str(layer["part"])


def _bare(layer: Row) -> bool:
    return "projection" in str(layer["part"])


def _operations() -> Iterator[str]:
    record = newest("operations")
    yield from _section(
        "Operations beside PyTorch and a plain copy",
        record,
        '"Of a copy" is the part of a copy\'s bandwidth, for the bytes that must be read and written.',
    )

    def cells(each: Row) -> Sequence[str]:
        ours = each["us"]["chosen"]
        name = str(each["chosen"]).rpartition("/")[2]
        if not isinstance(ours, float):
            return each["problem"], name, "–", _us(each["torch_us"]), "–", "–"
        times = _times(each["torch_us"], ours)
        return each["problem"], name, _us(ours), _us(each["torch_us"]), times, f"{each['fraction']:.2f}"

    yield from _table(
        ("operation", "plan", "ours", "PyTorch", "PyTorch / ours", "of a copy"), map(cells, _good(record))
    )


def _movement() -> Iterator[str]:
    record = newest("movement")
    rows = _good(record)
    reached = sum(each["fraction"] >= 0.8 for each in rows)
    yield from _section(
        "Movement beside a plain copy",
        record,
        f"{reached} of {len(rows)} problems reach 0.8 of a copy's bandwidth, half of them",
        f"{statistics.median(each['fraction'] for each in rows):.2f}. Tensors are larger than the caches.",
    )
    yield from _table(
        ("problem", "plan", "ours", "a copy", "of a copy"),
        (
            (
                each["problem"],
                str(each["chosen"]).rpartition("/")[2],
                _us(each["us"]),
                _us(each["copy_us"]),
                f"{each['fraction']:.2f}",
            )
            for each in rows
        ),
    )


def _epilogues() -> Iterator[str]:
    record = newest("epilogues")
    yield from _section(
        "Functions behind a product and a convolution",
        record,
        "bfloat16. Fused: cuDNN's first candidate for both. Apart: the sum of both kernels' times.",
    )
    yield from _table(
        ("function", "before", "alone", "fused", "apart", "fused / apart"),
        (
            (
                each["function"],
                each["before"],
                _us(each["alone_us"]),
                _us(each.get("fused_us")),
                _us(each["alone_us"] + each["kernel_us"]),
                _times(each.get("fused_us"), each["alone_us"] + each["kernel_us"]),
            )
            for each in _good(record)
        ),
    )


def _depthwise() -> Iterator[str]:
    record = newest("depthwise")
    yield from _section(
        "Depthwise convolutions, our kernels beside cuDNN's",
        record,
        "Channels last. The fastest plan of each side that is right. In bfloat16, cuDNN has none with a",
        "result in float32.",
    )

    def best(each: Row, *, ours: bool) -> float | None:
        right = (
            us
            for tag, us in each["us"].items()
            if isinstance(us, float) and tag.startswith("depthwise") is ours
        )
        return min(right, default=None)

    yield from _table(
        ("dtype", "problem", "pass", "ours", "cuDNN's"),
        (
            (
                each["dtype"],
                f"{each['samples']}x{each['channels']}x{each['size']}x{each['size']}, "
                f"{each['taps']}x{each['taps']}, stride {each['stride']}",
                each["pass"],
                _us(best(each, ours=True)),
                _us(best(each, ours=False)),
            )
            for each in _good(record)
        ),
    )


def _building() -> Iterator[str]:
    record = newest("building")
    yield from _section(
        "Building plans of graphs",
        record,
        "In ms. Graphs are chains of equal layers of 10 operations, whose pieces are built once. Build: with",
        "nothing compiled yet. Restored: in another process, from the plan store.",
    )
    graphs = [each for each in record.found["graphs"] if "error" not in each]
    names = ("graph", "build", "save", "first run", "restore", "restored first run")
    yield from _table(
        ("operations", "steps", *names),
        (
            (
                str(each["operations"]),
                str(each["steps"]),
                *(f"{each[name.replace(' ', '_') + '_ms']:,.1f}" for name in names),
            )
            for each in graphs
        ),
    )
    yield "A ResNet bottleneck for one batch size after the other, in one process, self-checks included:"
    yield ""
    blocks = [each for each in record.found["batches"] if "error" not in each]
    sizes = list(blocks[0]["build_ms"]) if blocks else []
    yield from _table(
        ("block", *(f"batch {size}" for size in sizes)),
        ((_block(each), *(f"{each['build_ms'][size]:,.0f}" for size in sizes)) for each in blocks),
    )
    yield "And a run of it, in µs:"
    yield ""
    yield from _table(
        ("block", *(f"batch {size}" for size in sizes)),
        (
            (_block(each), *(f"{each['run_us'][size]:,.1f}" for size in sizes))
            for each in blocks
            if "run_us" in each
        ),
    )


def _block(each: Row) -> str:
    return f"{each['block']}{', dynamic shapes' * bool(each.get('dynamic shapes'))}"


def _models() -> Iterator[str]:
    record = newest("models")
    yield from _section(
        "ONNX models",
        record,
        "In ms, float32 without TF32. First: the first run of a new service, in which plans are built.",
        "Stored first: that of another process, with the plans in the store. A run has its inputs on the",
        "device and leaves its outputs there. Compiled: `torch.compile` with CUDA graphs. A network that",
        "this record does not have is from the newest one that has it, beside PyTorch if one has that.",
    )
    rows: dict[tuple[str, int], Row] = {}
    for each in (found for record in _records("models") for found in _good(record)):
        known = rows.setdefault((each["network"], each["batch"]), each)
        if "eager_ms" in each and "eager_ms" not in known:
            rows[each["network"], each["batch"]] = each
    names = ("load", "import", "first", "stored first", "run", "eager", "compiled")
    yield from _table(
        ("network", "opset", "batch", *names),
        (
            (
                each["network"],
                str(each["opset"]),
                str(each["batch"]),
                *(_us(each.get(name.replace(" ", "_") + "_ms")) for name in names),
            )
            for each in rows.values()
        ),
    )


if __name__ == "__main__":
    PAGE.write_text(render().rstrip() + "\n", encoding="utf-8")
