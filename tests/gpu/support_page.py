"""`docs/support.md`, made from the tables of cells, the table of refusals and the newest recorded run.

python -m tests.gpu.support_page            writes the page
python -m tests.gpu.support_page --run      runs every cell on this machine's GPU first, and records that
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..engines.devices import why_not
from ..engines.refusals import REFUSALS
from .cases import Kind
from .families import FAMILIES
from .operations import EXACTNESS
from .operations.page import section
from .page_parts import largest, markdown, word, words_by_rank
from .support_matrix import ARITHMETICS, EPILOGUES, FULL, LAYOUTS, RANKS, Arithmetic, Cell, Form, cells
from .support_record import RESULTS, Outcome, Record, latest

__all__ = ["PAGE", "render"]

PAGE = Path(__file__).parents[2] / "docs" / "support.md"

_HEAD = """\
# What the CUDA engine runs

Made by `python -m tests.gpu.support_page` from the tables that the tests run
(`tests/gpu/support_matrix.py`, `tests/gpu/operations/`), the table of refusals
(`tests/engines/refusals.py`) and the newest recorded run. Do not edit it by hand.

{setting}

For each operation, dtype, number of dims, layout and kind, this page says how the CUDA engine runs it, and
how far its results may be from the exact ones. Every combination of these is a cell of a table. A run of the
tests computes each cell: a problem of random, non-square dims, with outputs and a workspace that are full of
NaN before. The result is compared with the definition in float64 on the same operands.

Epilogues of convolutions, TF32, results wider than their operands and uint8 are not combined with everything,
but so that every pair of values occurs.

| word | means |
| --- | --- |
| fused | one plan of cuDNN's, or one kernel of this package, computes all of it |
| split | two or more plans, or a copy into another layout; on the device, never by way of the host |
| refused | the request raises `UnsupportedGraph` |
| not run | a cell of the table that no recorded run on a GPU has had yet |
| – | no cell of the table |

`fused 1, 2; split 3` means: fused for 1 and 2 spatial dims, split for 3. Rows with the layout `some` have the
values that are combined pair by pair. STRIDED tensors of convolutions have gaps between all neighbours.
STRIDED tensors of other operations lie in any order of dims, with gaps or without.

| operations | cells |
| --- | --- |
{cells}
"""

_CRITERION = """\
## How exact other operations are

A result is right if each of its elements is a correct rounding, to its dtype, of some value within a bound
of the float64 result. So the bound does not contain the rounding of the result. If no bound is given, every
bit is right.

- u is 2⁻²⁴, also for half types, which are computed in float32. For float64 it is 2⁻⁵², because the result
  with which it is compared has errors of that size, too.
- A sum of n terms may be off by 4 √n · u times the sum of their magnitudes, for the reasons above.
- NaN must be NaN.
- Nothing but the elements of the results may be written: neither the inputs nor the gaps between a result's
  elements.
"""

_BOUNDS = """\
## How exact convolutions are

An error is the norm of the difference to the float64 result. With L products in each sum, it may be up to

> slope · |α| · (4 √L · u_sum + u_tf32) · ‖conv‖
> + slope · 4 u_pointwise · ‖ |α conv| + |β y| + |bias| ‖, if anything follows the sum
> + 40 u_pointwise · (‖result‖ + √n), if there is an activation
> + u_result · ‖result‖

Here, slope is the activation's steepest slope (1 without an activation), n is the number of values, and
u_pointwise is the unit roundoff of float64 for float64, else of float32. L is C / groups · taps for forward,
at most K / groups · taps for backward data, and N · output positions for backward filter.

Errors of a sum grow as √L · u rather than L · u: see N. J. Higham, T. Mary, "A new approach to probabilistic
rounding error analysis", SIAM J. Sci. Comput. 41 (2019). The factor 4 leaves room for tensor cores, which
truncate: see M. Fasi, N. J. Higham, M. Mikaitis, S. Pranesh, "Numerical behavior of NVIDIA tensor cores",
PeerJ Comput. Sci. 7 (2021).

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

Everything else that this page lists runs. A graph that is not on this page and that no plan can run raises
`UnsupportedGraph`, too. It is never computed wrong, and never moved to the host.

## How to repeat it

```sh
python -m tests.gpu.support_page --run      # every cell, a record of what ran how, and this page from it
python -m tests.gpu.fuzz --count 2000       # 2,000 random problems of each family
python -m tests.gpu.fuzz --graphs --count 3000   # random graphs of 1 to 12 operations and gradients
```

Without a GPU, `TEST_ALL=1 make test-support` compares the page with cuDNN itself. For every cell that runs,
it builds the engine's first plan for an H200 that is only described to cuDNN, in one piece where the page
says fused. It does the same for norms and attention, and compiles all kernels that are generated. Without
`TEST_ALL=1`, it takes a part of them: each operation in each dtype, and each kind of kernel in each dtype and
form. It does not show whether a plan computes the right values. It needs python3, make and gcc, and installs
cuDNN and its dependencies into `.venv-support-9.28` (2 GB). `CUDNN=9.19` takes another version. The claims
are rows of `tests/support/claims.py`.
"""


def render(record: Record | None) -> str:
    """The page, from a recorded run or, without one, from what the table expects."""
    counts = "\n".join(
        f"| {name.replace('_', ' ')} | {len(family.cells()):,} |" for name, family in FAMILIES.items()
    )
    parts = [_HEAD.format(setting=_setting(record), cells=counts)]
    parts += [_operation(kind, record) for kind in Kind]
    parts += [_epilogues(record), _BOUNDS]
    if record is not None:
        parts.append(_errors(record))
    parts += [_CRITERION, *(section(family, record) for family in EXACTNESS)]
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
    return f"## Convolution {kind.value}\n\n" + markdown(["dtype", "layout", *Form], rows)


def _layouts(kind: Kind, arithmetic: Arithmetic, record: Record | None) -> Iterator[list[str]]:
    """The rows of an arithmetic: layouts that fare alike share one."""
    rows = {
        layout: [
            words_by_rank([Cell(kind, arithmetic, rank, layout, form) for rank in RANKS], record)
            for form in Form
        ]
        for layout in LAYOUTS
    }
    for words, alike in itertools.groupby(LAYOUTS, rows.__getitem__):
        yield [str(arithmetic), ", ".join(alike), *words]


def _words(record: Record | None, **wanted: object) -> str:
    """What becomes of all cells with these values."""
    alike = (c for c in cells() if all(getattr(c, name) == value for name, value in wanted.items()))
    return "; ".join(sorted({word(cell, record) for cell in alike})) or "–"


def _epilogues(record: Record | None) -> str:
    """Forward with an epilogue: which one down, dtypes across."""
    rows = [
        [name, *(_words(record, kind=Kind.FORWARD, arithmetic=a, epilogue=name) for a in ARITHMETICS)]
        for name in EPILOGUES
    ]
    return "## Convolution forward with an epilogue\n\n" + markdown(
        ["epilogue", *map(str, ARITHMETICS)], rows
    )


def _errors(record: Record) -> str:
    """The largest error in terms of its bound, by arithmetic and operation."""
    rows = [[str(a), *(largest(_outcomes(record, a, kind)) for kind in Kind)] for a in ARITHMETICS]
    title = "Largest error of all cells, in terms of its bound:"
    return f"{title}\n\n" + markdown(["dtype", *(k.value for k in Kind)], rows)


def _outcomes(record: Record, arithmetic: Arithmetic, kind: Kind) -> Iterator[Outcome]:
    for cell in cells():
        if (cell.arithmetic, cell.kind) == (arithmetic, kind) and cell.name in record.cells:
            yield record.cells[cell.name]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; 1, and no page, where a cell of the run has failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.support_page", description=__doc__)
    parser.add_argument("--run", action="store_true", help="run every cell first; needs a GPU")
    if parser.parse_args(arguments).run and (failed := _run()):
        return failed
    PAGE.write_text(render(latest()))
    return 0


def _run() -> int:
    """Run every cell and record it; not 0 where one has failed, or there is no GPU."""
    if (why := why_not("cuda")) is not None:
        print(why, file=sys.stderr)  # noqa: T201 - a command line
        return 1
    tests = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/gpu/test_support_matrix.py"]
    recording = os.environ | {"CUDNN_ACTOR_RECORD": str(RESULTS)}
    return subprocess.run(tests, cwd=PAGE.parents[1], env=recording, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
