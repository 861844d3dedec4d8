"""`docs/support.md`, made from the table of cells, the table of refusals and the newest recorded run.

python -m tests.gpu.support_page        writes the page
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from ..engines.refusals import REFUSALS
from .cases import Kind
from .support_matrix import ARITHMETICS, EPILOGUES, FULL, LAYOUTS, RANKS, Arithmetic, Cell, Form, cells
from .support_record import Outcome, Record, latest

__all__ = ["PAGE", "render"]

PAGE = Path(__file__).parents[2] / "docs" / "support.md"

_HEAD = """\
# What the CUDA engine runs

Made by `python -m tests.gpu.support_page` from the table that the tests run
(`tests/gpu/support_matrix.py`), the table of refusals (`tests/engines/refusals.py`) and the newest recorded
run. Do not edit it by hand.

{setting}

Every combination of operation, dtype, number of spatial dims, layout and kind is a cell of the table, {cells}
in all; epilogues, TF32, results wider than their operands and uint8 are combined with those so that every
pair of values occurs. Each cell is a convolution of random, non-square dims, written into an output full of
NaN with a workspace full of NaN, and compared with the CPU engine in float64 on the same operands.

| word | means |
| --- | --- |
| fused | one plan of cuDNN's computes all of it |
| split | two or more plans, or a copy into another layout; on the device, never by way of the host |
| refused | the request raises `UnsupportedGraph` |
| runs | it must run; not recorded yet how |
| – | no cell of the table |

Numbers behind a word are spatial dims: `fused 1, 2; split 3` is fused in one and two dimensions. Rows of
`some` layouts are of what is combined pair by pair. STRIDED tensors have gaps between all neighbours.
"""

_BOUNDS = """\
## How exact it is

An error is the norm of the difference to the float64 result. With L products in each sum, it may be up to

> slope · |α| · (4 √L · u_sum + u_tf32) · ‖conv‖
> + slope · 4 u_pointwise · ‖ |α conv| + |β y| + |bias| ‖, if anything follows the sum
> + 16 u_pointwise · (‖result‖ + √n), if there is an activation
> + u_result · ‖result‖

where slope is the activation's steepest (1 without one), n the number of values, and u_pointwise that of
float64 for float64 and of float32 for all else. L is C / groups · taps for forward, at most K / groups · taps
for backward data, and N · output positions for backward filter. That errors of a sum grow as √L · u rather
than L · u is from N. J. Higham, T. Mary, "A new approach to probabilistic rounding error analysis", SIAM J.
Sci. Comput. 41 (2019); the factor 4 leaves room for tensor cores, which truncate (M. Fasi, N. J. Higham,
M. Mikaitis, S. Pranesh, "Numerical behavior of NVIDIA tensor cores", PeerJ Comput. Sci. 7 (2021)).

| dtype | sums in | u_sum | u_result | |
| --- | --- | --- | --- | --- |
| float64 | float64 | 2⁻⁵³ | 2⁻⁵³ | |
| float32 | float32 | 2⁻²⁴ | 2⁻²⁴ | with TF32, u_tf32 = 2⁻¹⁰: both operands are rounded to 11 bits |
| float16 | float32 | 2⁻²⁴ | 2⁻¹¹, to float32 2⁻²⁴ | |
| bfloat16 | float32 | 2⁻²⁴ | 2⁻⁸, to float32 2⁻²⁴ | |
| int8 | int32 | 0 | 0 | exact; an integer made in float32 is one of the two next to the true value |
"""

_TAIL = """\
## What is refused

{refusals}

Everything else runs. A graph that this page does not promise and that cuDNN has no plan for raises
`UnsupportedGraph` too: it is never computed wrong and never moved to the host.

## How to repeat it

```sh
export CUDNN_ACTOR_RECORD=benchmarks/results
python -m pytest -m gpu tests/gpu/test_support_matrix.py   # every cell, and a record of what ran how
python -m tests.gpu.support_page                           # this page
python -m tests.gpu.fuzz --count 2000                      # random problems
```

Without a GPU, `make test-support` holds the page against cuDNN itself. For every cell that runs, it builds
the engine's first plan for an H200 that is only described to cuDNN, in one piece where the page says fused.
It does the same for norms and attention, and compiles all kernels that are generated. What it cannot see is
whether a plan computes the right values. It needs python3, make and gcc, and installs cuDNN and what that
needs into `.venv-support` (1.5 GB). The claims are rows of `tests/support/claims.py`.
"""


def render(record: Record | None) -> str:
    """The page, from a recorded run or, without one, from what the table expects."""
    parts = [_HEAD.format(setting=_setting(record), cells=len(cells()))]
    parts += [_operation(kind, record) for kind in Kind]
    parts += [_epilogues(record), _BOUNDS]
    if record is not None:
        parts.append(_errors(record))
    refusals = "\n".join(f"- {r.what}" for r in REFUSALS if r.engine == "cuda")
    return "\n".join([*parts, _TAIL.format(refusals=refusals)])


def _setting(record: Record | None) -> str:
    if record is None:
        return "**No run on a GPU has been recorded yet**: the tables say what the tests expect."
    s = record.setting
    packages = ", ".join(f"{name} {version}" for name, version in s.packages.items())
    return (
        f"Recorded {s.date[:10]} on {s.device}: driver {s.driver}, cuDNN {s.cudnn}, {packages}, "
        f"Python {s.python}, seed {s.seed}."
    )


def _operation(kind: Kind, record: Record | None) -> str:
    """One operation: dtypes and layouts down, kinds of convolution across."""
    whole = [a for a in ARITHMETICS if a in FULL and (a.operands.is_floating or kind is Kind.FORWARD)]
    rows = [row for arithmetic in whole for row in _layouts(kind, arithmetic, record)]
    for arithmetic in ARITHMETICS:
        if arithmetic not in whole:
            words = [_words(record, kind=kind, arithmetic=arithmetic, form=form) for form in Form]
            rows += [[str(arithmetic), "some", *words]] if {*words} != {"–"} else []
    return f"## {kind.value.capitalize()}\n\n" + _markdown(["dtype", "layout", *Form], rows)


def _layouts(kind: Kind, arithmetic: Arithmetic, record: Record | None) -> Iterator[list[str]]:
    """The rows of an arithmetic: layouts that fare alike share one."""
    rows = {
        layout: [
            _ranks([Cell(kind, arithmetic, rank, layout, form) for rank in RANKS], record) for form in Form
        ]
        for layout in LAYOUTS
    }
    for words, alike in itertools.groupby(LAYOUTS, rows.__getitem__):
        yield [str(arithmetic), ", ".join(alike), *words]


def _ranks(row: Sequence[Cell], record: Record | None) -> str:
    """What becomes of a convolution in one, two and three dimensions."""
    ranks: dict[str, list[str]] = {}
    for cell in row:
        ranks.setdefault(_word(cell, record), []).append(str(cell.rank))
    if len(ranks) == 1:
        return next(iter(ranks))
    return "; ".join(f"{word} {', '.join(dims)}" for word, dims in ranks.items())


def _words(record: Record | None, **wanted: object) -> str:
    """What becomes of all cells with these values."""
    alike = (c for c in cells() if all(getattr(c, name) == value for name, value in wanted.items()))
    return "; ".join(sorted({_word(cell, record) for cell in alike})) or "–"


def _word(cell: Cell, record: Record | None) -> str:
    outcome = record.cells.get(cell.name) if record is not None else None
    if outcome is None:
        return "refused" if cell.refused is not None else "runs"
    return ("split" if outcome.split else "fused") if outcome.ran else "refused"


def _epilogues(record: Record | None) -> str:
    """Forward with an epilogue: which one down, dtypes across."""
    rows = [
        [name, *(_words(record, kind=Kind.FORWARD, arithmetic=a, epilogue=name) for a in ARITHMETICS)]
        for name in EPILOGUES
    ]
    return "## Forward with an epilogue\n\n" + _markdown(["epilogue", *map(str, ARITHMETICS)], rows)


def _errors(record: Record) -> str:
    """The largest error in terms of its bound, by arithmetic and operation."""
    rows = [[str(a), *(_largest(_outcomes(record, a, kind)) for kind in Kind)] for a in ARITHMETICS]
    title = "Largest error of all cells, in terms of its bound:"
    return f"{title}\n\n" + _markdown(["dtype", *(k.value for k in Kind)], rows)


def _outcomes(record: Record, arithmetic: Arithmetic, kind: Kind) -> Iterator[Outcome]:
    for cell in cells():
        if (cell.arithmetic, cell.kind) == (arithmetic, kind) and cell.name in record.cells:
            yield record.cells[cell.name]


def _largest(outcomes: Iterable[Outcome]) -> str:
    errors = [outcome.error for outcome in outcomes if outcome.ran]
    return f"{max(errors):.2f}" if errors else "–"


def _markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def main() -> None:
    """Write the page."""
    PAGE.write_text(render(latest()))


if __name__ == "__main__":
    main()
